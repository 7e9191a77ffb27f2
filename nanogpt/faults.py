"""How an error ends a run: what the user can mend is one sentence and exit status 2."""
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack

import torch.distributed as dist
from torch import Tensor

from data import BadInput, require
from nanogpt.process import Stop
from nanogpt.ranks import all_ranks
from records.console import complain

LESS_MEMORY = "; smaller --micro_tokens, --val_seq_len, --ngram_rows and --recall_rows need less"
LOWER = "lower the learning rates; if --precision is not bf16, try that"


def run(train: Callable[[ExitStack], int], stop: Stop) -> int:
    """Returns the status that `train` returns, 1 after a crash, or 2 if the user can mend what went
    wrong. On an error, what `train` has pushed to its argument is done first: it writes a note to
    the log. If there are several ranks, the one with the error then ends. The others fail in their
    next transfer, or torchrun ends them. Nothing is saved, as a save takes all ranks."""
    try:
        with ExitStack() as at_end:
            status = train(at_end)
        if dist.is_initialized():
            dist.destroy_process_group()
        return status
    except Exception as error:
        sentence = sentence_of(error, LESS_MEMORY)
        if sentence:
            rank = int(os.environ.get("RANK", 0))
            # Rank 0 says it first: mostly all ranks have the same error, as a bad command line.
            # Then torchrun ends the others while they wait.
            if rank > 0:
                stop.end_at_once()  # by a SIGTERM of torchrun, during this wait
                time.sleep(5)
                sentence = f"rank {rank}: {sentence}"
            complain(f"train_gpt.py: {sentence}")
        else:
            traceback.print_exc()
    status = 2 if sentence else 1
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # A process group that others wait in might not let this process end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def sentence_of(error: Exception, remedy: str = "") -> str:
    """What to say of an error that the user can mend, or an empty text. `remedy` is for memory."""
    if isinstance(error, (BadInput, OSError)):
        return str(error)
    # The texts are those of Python, of PyTorch for a GPU and for a CPU, and of cuBLAS. If memory
    # ends while a CUDA graph is recorded, the end of the recording fails, too, and the error about
    # memory stands before that one in the traceback.
    texts = "MemoryError|out of memory|can't allocate memory|ALLOC_FAILED"
    trace = "".join(traceback.format_exception(error))
    return f"too little memory{remedy}" if re.search(texts, trace) else ""


def check_loss(kind: str, loss: float, step: int, state: Callable[[], dict[str, Tensor]]) -> None:
    """Raises BadInput if a loss, which is the same on all ranks, is not finite. `kind` is
    "training" or "validation", and `state` returns what checkpoints.state_of does. The CPU hears of
    a training loss a step late, when that state may be spoiled. A collective if it raises."""
    if not math.isfinite(loss):
        what = f"the {kind} loss is {loss} at step {step}"
        check_state(state(), what)
        raise BadInput(f"{what}, all weights are finite: an activation overflowed; {LOWER}")


def check_state(tensors: dict[str, Tensor], what: str) -> None:
    """Raises BadInput if a number is not finite: a sentence that begins with `what`, and names the
    first rank with such a number, and its first tensor, as "mlp.master". A collective."""
    bad = next((name for name, x in tensors.items() if not x.sum().isfinite()), "")
    for rank, name in enumerate(all_ranks(bad)):
        require(not name, f"{what}, {name} of rank {rank} is not finite; {LOWER}")
