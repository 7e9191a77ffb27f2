"""What several programs print: complaints, a curve of losses, and a command to type."""
import os
import shlex
import shutil
import sys

import numpy as np
from tqdm import tqdm

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
