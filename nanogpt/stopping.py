"""Signals that end a run: SIGINT (control-C), SIGTERM (kill, a cluster, torchrun), and SIGHUP (the
terminal was closed).

Before the first step there is nothing to keep, so a signal ends the process at once. From then on
until the weights are written, the first signal is only noted, and the trainer ends the run in
order. It does so after the present step or up to three steps later: all ranks must learn of the
signal first (ranks.Requests), and with head_every_second a run ends after an even number of steps
only.

A second control-C ends the process at once. A second SIGTERM does not: a cluster may send it to all
processes, and torchrun hands on to the ranks what it has got itself. While a sample is drawn from
the trained model, a signal ends the process at once again.

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
        self.when = "before the first step"  # what is said of a signal that does not wait
        self.leaving = False  # whether the process ends anyway, with a sentence and a status
        self.leave_with_others = None  # ends the process if it is one of several (watch.py)

    def listen(self) -> None:
        # nohup has SIGHUP ignored. torchrun hands on even that one, and then waits for our end.
        in_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        for number in SIGNALS:
            if in_torchrun or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.notice)

    def notice(self, number: int, frame) -> None:
        """What Python calls when a signal has come."""
        if self.leaving:
            return  # torchrun sends SIGTERM to all ranks as soon as one of them has ended
        if not self.in_steps:
            if self.leave_with_others:
                self.leave_with_others(number)
            leave(number, self.when)
        if number == signal.SIGINT and not self.signal:  # somebody waits before the screen
            say("the run ends in order, in a moment; the next control-C ends it at once, "
                "and loses what is not saved")
        self.signal = self.signal or SIGNALS[number]
        # The next control-C needs no Python, which may wait for something.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def end_steps(self) -> None:
        """All is written: a signal does not wait any more, nor does one that has come already."""
        self.in_steps = False
        self.when = "after the last step"
        if self.signal:
            self.notice(signal.Signals[self.signal], None)


def leave(number: int, when: str) -> None:
    """Ends the process with one sentence. An exception would not do: the compiler catches some, and
    others come with a traceback."""
    say(f"stopped by {SIGNALS[number]} {when}")
    os._exit(128 + number)


def say(sentence: str) -> None:
    """Writes a line to standard error, on rank 0 only. `print` would not do: a signal may come
    while it is at work."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f"\ntrain_gpt.py: {sentence}\n".encode())
