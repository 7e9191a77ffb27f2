"""How an error ends a run: what the user can mend is one sentence and exit status 2."""
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack

import torch.distributed as dist
from torch import Tensor

from data.shards import ShardError
from nanogpt.process import Stop
from nanogpt.ranks import BadInput, SharedFault, all_ranks
from records.console import complain

LACK_OF_MEMORY = re.compile(
    r"CUDA out of memory\. Tried to allocate \S+ \S+(?=\.)|can't allocate memory: you tried to "
    r"allocate \d+ bytes|out of memory|ALLOC_FAILED")  # the last of cuBLAS


def run(train: Callable[[ExitStack], int], stop: Stop) -> int:
    """Returns the status that `train` returns, 1 after a crash, or 2 if the user can mend what went
    wrong. On an error, what `train` has pushed to its argument is done first: it writes a note to
    the log. One of several ranks then ends at once, and torchrun ends the others. These save
    nothing, as a save takes all ranks."""
    try:
        with ExitStack() as at_end:
            status = train(at_end)
        if dist.is_initialized():
            dist.destroy_process_group()
        return status
    except Exception as error:
        sentence = sentence_of(error)
        if sentence:
            say(sentence, error, stop)
        else:
            traceback.print_exc()
    status = 2 if sentence else 1
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # A process group that others wait in might not let this process end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def sentence_of(error: Exception) -> str:
    """What to say of an error that the user can mend, or an empty one."""
    if isinstance(error, (BadInput, ShardError, OSError)):
        return str(error)
    lack = lack_of_memory(error)
    remedy = "smaller --micro_tokens, --val_seq_len, --ngram_rows and --recall_rows need less"
    return f"{lack}; {remedy}" if lack else ""


def lack_of_memory(error: BaseException | None) -> str:
    """What an error says if a GPU, or this machine, has too little memory, up to how much was asked
    for; empty if something else is wrong. If memory ends while a CUDA graph is recorded, the end of
    the recording fails, too, and the error about memory is the __context__ of that."""
    while error is not None:
        found = LACK_OF_MEMORY.search(str(error))
        if found or isinstance(error, MemoryError):
            return found[0] if found else "out of memory"
        error = error.__context__
    return ""


def say(sentence: str, error: Exception, stop: Stop) -> None:
    """Rank 0 says it first: mostly all ranks have the same error, as a bad command line. Then
    torchrun ends the others while they wait."""
    rank = int(os.environ.get("RANK", 0))
    if rank > 0:
        stop.end_steps()  # a SIGTERM of torchrun ends this wait
        time.sleep(2)
        if isinstance(error, SharedFault):
            return
        sentence = f"rank {rank}: {sentence}"
    complain(f"train_gpt.py: {sentence}")


# A loss that is infinite or NaN spoils every weight in its step, and the CPU hears of it a step
# later. So where it began can be named only if some weights are still finite.

LOWER = "lower the learning rates; if --precision is not bf16, try that"


def refuse_loss(kind: str, loss: float, step: int, tensors: dict[str, Tensor]) -> None:
    """Raises BadInput for a loss that is not finite. `kind` is "training" or "validation", and
    `tensors` are those of checkpoints.tensors_of. A collective."""
    where = not_finite(tensors) or ", all weights finite: an activation overflowed"
    raise BadInput(f"the {kind} loss is {loss} at step {step}{where}; {LOWER}")


def not_finite(tensors: dict[str, Tensor]) -> str:
    """Ends a sentence with the first rank that has a number which is not finite, its first tensor
    that has one, and how many more it has; empty if there is none. A collective."""
    bad = [name for name, tensor in tensors.items()
           # In parts: of a whole table the results of isfinite() might not fit into memory.
           if not all(part.isfinite().all() for part in tensor.flatten().split(2**28))]
    sentence = ""
    if bad:  # bad[0] is such as "mlp.master" or "mlp.momentum_buffer"
        bank, _, kind = bad[0].partition(".")
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        sentence = f"the {kind.replace('master', 'weights')} of {bank}{more} not finite"
    for rank, of_rank in enumerate(all_ranks(sentence)):
        if of_rank:
            return f", on rank {rank} {of_rank}"
    return ""
