"""Variables of the environment that torch, NCCL and CUDA read once, when they start. So this file
imports nothing of torch, and a program calls `prepare` before it does."""
import os
from glob import glob


def local_rank() -> int:
    """The number of this process among those of its host."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def prepare() -> int:
    """Sets the variables, and returns the number of this process's GPU among those it sees."""
    # Tensors of many sizes would fragment memory that is handed out in fixed pieces.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # Transfers get the next free processors of the GPU. Without priority they would wait behind all
    # kernels that were started before.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    # Each process sees its own GPU only, as cuda:0. If rank 1 worked on cuda:1, it could not use
    # what the compiler's cache has for cuda:0, and would compile all of it again.
    gpus = [str(i) for i in range(len(glob("/dev/nvidia[0-9]*")))]
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        gpus = [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    if local_rank() >= len(gpus):
        return local_rank()
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank()]
    return 0
