"""What an error says if a GPU, or this machine, has too little memory."""
import torch

# Of the CPU, of CUDA and Triton, of NCCL, and of cuBLAS.
LACK_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")


def lack_of_memory(error: BaseException | None) -> str:
    """What an error says if a GPU, or this machine, has too little memory, up to how much was asked
    for; empty if something else is wrong. Python keeps an error that led to another one as its
    __context__. If memory ends while a CUDA graph is recorded, the end of the recording fails, too,
    and the error about memory is the __context__."""
    while error is not None:
        text = str(error)
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
                said in text for said in LACK_OF_MEMORY):
            before, _, after = text.partition("DefaultCPUAllocator: ")
            first, *others = (after or before or "out of memory").split("\n")[0].split(". ")
            if first == "CUDA out of memory" and others:
                return f"{first}. {others[0]}"
            return first
        error = error.__context__
    return ""
