"""Signals that end a run: SIGINT (control-C), SIGTERM (kill, a cluster, torchrun), SIGHUP (the
terminal was closed).

Before the first step there is nothing to keep, so a signal ends the process at once. From then on
it is noted, and the trainer ends the run after a step, when all ranks know of it (ranks.Requests).
A second control-C ends the process at once. A second SIGTERM does not: a cluster may send it to all
processes, and torchrun hands on to the ranks what it has got itself.

This file imports nothing of torch, because it is at work while torch is imported.
"""
import os
import signal
from contextlib import suppress

SIGNALS = {signal.SIGINT: "SIGINT", signal.SIGTERM: "SIGTERM"}
if hasattr(signal, "SIGHUP"):  # Windows has none
    SIGNALS[signal.SIGHUP] = "SIGHUP"


def status_of(name: str) -> int:
    """The exit status of a program that a signal of this name has ended."""
    return 128 + signal.Signals[name]


class Stop:
    """Notices signals, once `listen` was called. `signal` is the name of the one that has come
    during the steps, or empty."""

    def __init__(self):
        self.signal = ""
        self.in_steps = False  # whether a signal waits for the end of a step

    def listen(self) -> None:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup ignores SIGHUP
                signal.signal(number, self.notice)

    def notice(self, number: int, frame) -> None:
        """What Python calls when a signal has come."""
        if not self.in_steps:  # an exception would not do: the compiler catches some
            say(f"stopped by {SIGNALS[number]}")
            os._exit(128 + number)
        if number == signal.SIGINT and not self.signal:  # somebody waits before the screen
            say("the run ends in order, in a moment; the next control-C ends it at once, "
                "and loses what is not saved")
        self.signal = self.signal or SIGNALS[number]
        # The next control-C needs no Python, which may wait for something.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def end_steps(self) -> None:
        """All is written: a signal does not wait any more, nor does one that has come already."""
        self.in_steps = False
        if self.signal:
            self.notice(signal.Signals[self.signal], None)

    def ignore(self) -> None:
        """The process ends anyway: torchrun sends SIGTERM to all ranks when the first has ended."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def say(sentence: str) -> None:
    """Writes a line to standard error, on rank 0 only. `print` would not do: a signal may come
    while it is at work."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f"\ntrain_gpt.py: {sentence}\n".encode())
