"""What several programs print, and how they end."""
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import BadInput

ROOT = Path(__file__).resolve().parents[1]  # the project's folder

BARS = "▁▂▃▄▅▆▇█"  # from low to high


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


def end_in_order(program: str, work: Callable[[list[str]], int | None], argv: list[str],
                 refused: tuple[type, ...] = (BadInput, OSError)) -> int:
    """Does the work of a program. Returns the exit status: that of the work (None is 0), or 2 after
    one sentence about bad input, a full disk or too little memory."""
    sys.stdout.reconfigure(errors="replace")  # a file or pipe on Windows may lack some characters
    try:
        status = work(argv)
        sys.stdout.flush()
        return status or 0
    except Exception as error:
        if isinstance(error, refused):
            sentence = str(error)
        else:
            from nanogpt import faults  # it imports torch, which takes seconds
            sentence = faults.sentence_of(error)
        if not sentence:
            raise
        if isinstance(error, OSError):
            discard_output(sys.stdout)
        if isinstance(error, BrokenPipeError):  # as in `| head -1`
            return 0
    complain(f"{program}: {sentence}")
    return 2


def curve(losses: list[float]) -> str:
    """Losses as a row of up to 60 bars: each is as high as the mean of its part of the run."""
    means = [part.mean() for part in np.array_split(losses, min(60, len(losses)))]
    heights = np.interp(means, (min(means), max(means)), (0, len(BARS) - 1)).round()
    return "".join(BARS[int(height)] for height in heights)


def to_type(command: str) -> str:
    """A command such as "sample.py x.pt" as one has to type it in the current folder."""
    python = "python"
    if shutil.which("python") != sys.executable:
        python = shlex.quote(os.path.relpath(sys.executable))
    script, space, rest = command.partition(" ")
    return f"{python} {shlex.quote(os.path.relpath(ROOT / script))}{space}{rest}"
