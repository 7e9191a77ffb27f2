"""What people see of a run while it goes on: a bar on a terminal, and a line for each validation.
What they see before and after is in records/report.py, and the log in records/journal.py.
"""
import math
import os
import shlex
import shutil
import sys

import numpy as np
from tqdm import tqdm

BARS = "▁▂▃▄▅▆▇█"  # from low to high

# ------------------------------------------------------------------------------------------------
# Output of any program


def discard_output(file) -> None:
    """Sends all that is written to this file from now on to nowhere, and what it still holds.
    Otherwise Python would try again to write that when the program ends, and fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def complain(sentence: str) -> None:
    """Writes a sentence to standard error, above the bar if there is one."""
    try:
        tqdm.write(sentence, file=sys.stderr)
    except OSError:  # the reader of standard error has gone
        discard_output(sys.stderr)


# ------------------------------------------------------------------------------------------------
# The console of a run


class Console:
    """Shows one run. With `shows` False nothing: ranks other than the first have such a console,
    so that all ranks can make the same calls."""

    def __init__(self, tokens_are_bytes: bool = False, shows: bool = True):
        self.unit = "byte" if tokens_are_bytes else "token"
        self.shows = shows
        self.bar = None

    def say(self, text: str) -> None:
        """Prints lines, above the bar. A reader who leaves, or a full disk, does not end the
        run."""
        if not self.shows:
            return
        try:
            tqdm.write(text)
            sys.stdout.flush()
        except OSError as error:
            discard_output(sys.stdout)
            complain(f"cannot print ({error.strerror}); the run goes on silently")

    def train_loss(self, step: int, num_steps: int, loss: float) -> None:
        """Moves the bar on, which is on standard error and is shown on a terminal only."""
        if self.bar is None:
            self.bar = tqdm(total=num_steps, initial=step - 1, unit="step", dynamic_ncols=True,
                            miniters=1, disable=None if self.shows else True)
        self.bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        self.bar.update()

    def val_loss(self, line: str, loss: float) -> None:
        """Shows a validation loss; `line` is that of the log."""
        bits = f" bits_per_byte:{loss / math.log(2):.4f}" if self.unit == "byte" else ""
        self.say(line.replace("nanms", "-") + bits)  # before the first step there is no average

    def close(self) -> None:
        """Lets the bar stand as it is. What is printed next stands below it."""
        if self.bar is not None:
            self.bar.close()


def curve(losses: list[float], columns: int = 60) -> str:
    """Losses as a row of bars: each is as high as the mean of its part of the run."""
    means = [part.mean() for part in np.array_split(losses, min(columns, len(losses)))]
    heights = np.interp(means, (min(means), max(means)), (0, len(BARS) - 1)).round()
    return "".join(BARS[int(height)] for height in heights)


def to_type(command: str) -> str:
    """A command such as "sample.py x.pt" as one has to type it in the project's folder."""
    python = "python"
    if shutil.which("python") != sys.executable:
        python = shlex.quote(os.path.relpath(sys.executable))
    return f"{python} {command}"
