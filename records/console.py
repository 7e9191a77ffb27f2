"""What people see of a run: a header, a bar on a terminal, a line for each validation, and a
summary with a small curve at the end. The log file is the business of records/journal.py.
"""
import math
import os
import shlex
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from tqdm import tqdm

CLEAR_RISE = 0.01  # of the validation loss, in nats, which is overfitting: less may be chance
ROWS = 8  # of the curve
COLUMNS = 60

# ------------------------------------------------------------------------------------------------
# Output of any program


def prepare_output() -> None:
    """For programs that print: a character that a terminal lacks becomes an escape as \\u2588."""
    sys.stdout.reconfigure(errors="backslashreplace")


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
        self.tokens_are_bytes = tokens_are_bytes
        self.unit = "byte" if tokens_are_bytes else "token"
        self.shows = shows
        self.bar = None
        if shows:
            prepare_output()

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

    def say_facts(self, facts: dict[str, str]) -> None:
        """Prints a line for each fact that has a text."""
        for name, text in facts.items():
            if text:
                self.say(f"{name:<10}{text}")

    def header(self, machine: dict, data: list[dict], config: dict, stages: list[dict],
               num_weights: tuple[int, int], precision: str, log: Path, weights: Path | None,
               seconds: float | None) -> None:
        """Prints what will run. machine, data, config, stages: the log's facts
        (records/README.md); num_weights: how many are active in every token, and how many are in
        tables; log, weights: the files to be written, None if the weights are not kept; seconds:
        how long the run may take, if that is known."""
        devices = [f"{count} x {name}" for name, count in Counter(machine["devices"]).items()]
        if machine["devices"][0] == "CPU":
            devices.append(machine["cpu"])
        version = machine["torch"].partition("+")[0]
        train_tokens = sum(shard["tokens"] for shard in data if shard["split"] == "train")
        tokens = sum((stage["last_step"] - stage["first_step"]) * stage["batch_tokens"]
                     for stage in stages)
        active, in_tables = num_weights
        self.say_facts({
            "device": ", ".join([*devices, f"torch {version}"]),
            "preset": config["preset"],
            "model": f"{in_millions(active)} parameters active, {in_millions(in_tables)} in tables",
            "precision": precision,
            "data": f"{config['data_dir']}: {train_tokens:,} {self.unit}s for training, "
                    f"{config['val_tokens']:,} for validation",
            "run": f"{config['num_steps']:,} steps, {tokens:,} {self.unit}s, "
                   f"{tokens / train_tokens:.2f} epochs"
                   + (f", about {duration(seconds)}" if seconds else ""),
            "seed": str(config["seed"]),
            "log": str(log),
            "weights": str(weights or "not kept; --save_checkpoint keeps them"),
        })

    def train_loss(self, step: int, num_steps: int, loss: float) -> None:
        """Moves the bar on, which is on standard error and is shown on a terminal only."""
        if self.bar is None:
            self.bar = tqdm(
                total=num_steps, initial=step - 1, unit="step", dynamic_ncols=True, miniters=1,
                disable=None if self.shows else True)
        self.bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        self.bar.update()

    def val_loss(self, line: str, loss: float) -> None:
        """Shows a validation loss; `line` is that of the log."""
        bits = f" bits_per_byte:{loss / math.log(2):.4f}" if self.tokens_are_bytes else ""
        self.say(line.replace("nanms", "-") + bits)  # before the first step there is no average

    def close(self) -> None:
        """Lets the bar stand as it is. What is printed next stands below it."""
        if self.bar is not None:
            self.bar.close()
        self.bar = None

    def result(self, steps: list[tuple], facts: dict, log: Path, weights: Path | None,
               kept_step: int | None) -> None:
        """Prints what came of the run. steps: step, training time, name and loss of all lines of
        the log; facts: those of its end block; log, weights: the files that were written;
        kept_step: the step whose weights these are."""
        self.close()
        losses = [loss for _, _, name, loss in steps if name == "train_loss"]
        for line in ["", *curve(losses)]:
            self.say(line)
        self.say_facts({
            "loss": self.loss_in_words(steps),
            "target": target_in_words(facts["val_loss"], facts["target"]),
            "time": f"{duration(facts['train_time_s'])} of training, {facts['step_avg_ms']} ms a "
                    f"step, {facts['tokens_per_s']:,} tokens/s",
            "mfu": f"{facts['mfu']:.1%} of the device's peak" if facts["mfu"] else "",
            "memory": f"{facts['peak_memory_mib']:,} MiB of the GPU at most"
                      if facts["peak_memory_mib"] else "",
            "log": str(log),
            "weights": f"{weights}, of step {kept_step}" if weights else "",
        })

    def loss_in_words(self, steps: list[tuple]) -> str:
        """The last validation loss, and the best one if that is another. In bits per byte, the end
        of a document counts as a byte; in evaluate.py it does not."""
        validations = [(loss, step) for step, _, name, loss in steps if name == "val_loss"]
        if not validations:
            return ""
        loss, step = validations[-1]
        bits = f", {loss / math.log(2):.3f} bits per byte" if self.tokens_are_bytes else ""
        text = f"{loss:.4f} nats per {self.unit}{bits}, at step {step}"
        if rise(steps) > 0:
            best, best_step = min(validations)
            text += f"; the best was {best:.4f} at step {best_step}"
        if rise(steps) > CLEAR_RISE and best_step > 0:  # worse than untrained is another fault
            text += " (overfitting: more text helps)"
        return text

    def next(self, commands: list[str], on_all_ranks: bool = False) -> None:
        """Prints commands of Python to try next."""
        if commands:
            self.say("next:")
        for command in commands:
            self.say(f"  {to_type(command, on_all_ranks)}")

    def stopped(self, signal: str, step: int, command: str) -> None:
        """Says that a signal has ended the run, and the command that goes on from its save, if
        there is one."""
        self.say(f"stopped by {signal} after step {step}")
        if command:
            self.next([command], on_all_ranks=True)
        else:
            self.say("it cannot be resumed, as nothing was saved; --save_every=MINUTES saves")


# ------------------------------------------------------------------------------------------------
# Facts in words


def rise(steps: list[tuple]) -> float:
    """By how much the last validation loss is above the best one, as they are printed."""
    losses = [round(loss, 4) for _, _, name, loss in steps if name == "val_loss"]
    return losses[-1] - min(losses) if losses else 0.0


def target_in_words(loss: float | None, target: float | None) -> str:
    if loss is None or target is None:
        return ""
    result = "reached" if loss <= target else f"missed by {loss - target:.4f}"
    return f"{target:g}: {result}"


def next_commands(checkpoint: Path | None) -> list[str]:
    """What to try after a run that has kept its weights."""
    if not checkpoint:
        return []
    file = shlex.quote(str(checkpoint))
    return [f'sample.py {file} "Once upon a time"', f"evaluate.py {file}"]


def to_type(command: str, on_all_ranks: bool = False) -> str:
    """A command such as "sample.py x.pt" as one has to type it in the present folder. With
    `on_all_ranks` it starts as many processes as this run has on this host."""
    python = "python"
    if shutil.which("python") != sys.executable:
        python = shlex.quote(os.path.relpath(sys.executable))
    folder = os.path.relpath(Path(__file__).parents[1])
    place = "" if folder == "." else shlex.quote(f"{folder}/")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    launcher = ""
    if on_all_ranks and processes > 1:
        launcher = f"-m torch.distributed.run --standalone --nproc_per_node={processes} "
    return f"{python} {launcher}{place}{command}"


def in_millions(number: int) -> str:
    """41,234 in full; from 100,000 on in millions: 0.9M, 108.0M."""
    return f"{number / 1e6:,.1f}M" if number >= 1e5 else f"{number:,}"


def duration(seconds: float) -> str:
    """A time in the unit that suits it: 8.1 s, 1.7 min, 2.3 h."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def curve(losses: list[float]) -> list[str]:
    """Training losses as a picture. A column is the mean of its losses, and each row is labelled
    with the loss that a column must have to reach it. An empty list for fewer than 10 losses."""
    losses = [loss for loss in losses if math.isfinite(loss)]
    if len(losses) < 10:
        return []
    means = [part.mean() for part in np.array_split(losses, min(COLUMNS, len(losses)))]
    full = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
    low, high = min(means), max(means)
    lines = []
    for row in reversed(range(ROWS)):
        level = low + (high - low) * row / ROWS
        cells = [full if mean >= level else " " for mean in means]
        lines.append(f"{level:6.2f} |{''.join(cells)}".rstrip())
    return [*lines, f"training loss, steps 1 to {len(losses)}", ""]
