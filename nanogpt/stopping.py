"""Signals that end a run: SIGINT (control-C) and SIGTERM (kill, a cluster, torchrun).

Before the first step there is nothing to keep, so a signal ends the process at once. From then on
until the weights are written, the first signal is only noted: the trainer ends the run in order
after the step in hand. A second signal ends the process at once. While a sample is drawn from the
trained model, a signal ends the process at once again.

This file imports nothing of torch, because it is at work while torch is imported.
"""
import os
import signal

SIGNALS = {signal.SIGINT: "SIGINT", signal.SIGTERM: "SIGTERM"}


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
        for number in SIGNALS:
            signal.signal(number, self.notice)

    def notice(self, number: int, frame) -> None:
        """What Python calls when a signal has come."""
        if self.leaving:
            return  # torchrun sends SIGTERM to all ranks as soon as one of them has ended
        if not self.in_steps:
            if self.leave_with_others:
                self.leave_with_others(number)
            leave(number, self.when)
        self.signal = SIGNALS[number]
        for other in SIGNALS:  # the next one needs no Python, which may wait for something
            signal.signal(other, signal.SIG_DFL)

    def end_steps(self) -> None:
        """All is written: a signal does not wait any more, nor does one that has come already."""
        self.in_steps = False
        self.when = "after the last step"
        if self.signal:
            leave(signal.Signals[self.signal], self.when)


def leave(number: int, when: str) -> None:
    """Ends the process with one sentence, which only rank 0 writes. An exception would not do: the
    compiler catches some, and others come with a traceback."""
    if os.environ.get("RANK", "0") == "0":
        sentence = f"\ntrain_gpt.py: stopped by {SIGNALS[number]} {when}\n"
        os.write(2, sentence.encode())
    os._exit(128 + number)
