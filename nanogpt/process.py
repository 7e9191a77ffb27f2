"""The process itself: variables of its environment that torch, NCCL and CUDA read when they start,
and signals that end a run: SIGINT (Ctrl-C), SIGTERM (kill, a cluster, torchrun), SIGHUP (the
terminal was closed). This file is used before torch is imported, so it imports nothing of torch.

Until the run is ready there is nothing to keep, so a signal ends the process at once. From then on
it is noted, and the trainer ends the run after a step, when all ranks know of it (ranks.Requests).
One that comes during the last steps or later ends nothing: the run is complete soon. A Ctrl-C after
any signal ends the process at once, and so does a SIGTERM after a Ctrl-C, as torchrun hands on a
second Ctrl-C as SIGTERM. A second SIGTERM does not: a cluster may send it to all processes, and
torchrun hands on to the ranks what it has got itself. When a complete run is written, any signal
ends the process at once again.
"""
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from glob import glob

NAMES = "SIGINT", "SIGTERM", "SIGHUP"  # Windows has no SIGHUP
SIGNALS = {getattr(signal, name): name for name in NAMES if hasattr(signal, name)}


def local_rank() -> int:
    """The number of this process among those of its host."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def set_environment() -> int:
    """Sets the variables, and returns the number of this process's GPU among those it sees."""
    # Tensors of many sizes would fragment memory that is handed out in fixed pieces.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # Without priority, transfers would wait behind all kernels that were started before.
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


class Stop:
    """What a signal does, once `take_over` was called."""

    def __init__(self):
        self.signal = ""  # the name of the one that has come during the steps
        self.numbers = []  # of the signals that are taken over

    def take_over(self) -> None:
        """From now on a signal ends the process without a traceback of Python's."""
        # nohup makes a process ignore SIGHUP, and that stays so.
        self.numbers = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self.end_at_once()

    def end_at_once(self, numbers: Iterable[int] | None = None) -> None:
        """These signals end the process at once; by default all do. The system does that, as Python
        calls no function of ours while the process waits for other ranks."""
        # The system spares process 1, which this may be in a container.
        end = signal.SIG_DFL if os.getpid() > 1 else lambda number, _: os._exit(128 + number)
        for number in self.numbers if numbers is None else numbers:
            signal.signal(number, end)

    def end_after_a_step(self) -> None:
        """A signal is only noted, for the trainer to end the run."""
        for number in self.numbers:
            signal.signal(number, self.notice)

    def notice(self, number: int, frame) -> None:
        if number == signal.SIGINT:  # somebody sits at the terminal
            say("stopping within a few steps, or at the end of the run; the next Ctrl-C ends it at "
                "once, and loses what is not saved")
        self.signal = self.signal or SIGNALS[number]
        end_next = {signal.SIGINT, signal.SIGTERM} if number == signal.SIGINT else {signal.SIGINT}
        self.end_at_once(end_next & {*self.numbers})


def say(sentence: str) -> None:
    """Writes a line to standard error, on rank 0, even if a signal has interrupted a `print`."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f"\ntrain_gpt.py: {sentence}\n".encode())
