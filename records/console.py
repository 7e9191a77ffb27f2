"""What people see of a run: a header, a progress bar, the validations, and a summary at the end.

A terminal gets the bar, on standard error. Without a terminal (a pipe, a file, CI) about twenty
lines stand for it. All other lines go to standard output. The log file is none of this file's
business (records/journal.py): facts arrive here as plain values and leave as sentences.

Nothing that goes wrong with the console ends a run. Characters that it cannot show are replaced,
and if it cannot be written to, it falls silent.
"""
import atexit
import contextlib
import math
import os
import shlex
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import NamedTuple, TextIO

PROGRESS_LINES = 20  # about as many lines for the training steps where there is no bar,
MOST_QUIET_S = 60.0  # but at least one in so many seconds of training
RECENT_STEPS = 50  # over which the time of a step is averaged
REDRAW_S = 0.1  # the bar is drawn anew at most this often
LABEL_WIDTH = 10
CLEAR_RISE = 0.01  # of the validation loss, in nats, which is overfitting: less may be chance

# ------------------------------------------------------------------------------------------------
# Streams that cannot end a run


class Stream:
    """A text stream for people. Characters that its encoding lacks are replaced by "?". After the
    first error (its reader has left, its disk is full) it takes everything and writes nothing.
    `broken` then says what was wrong."""

    def __init__(self, file: TextIO | None):
        """`file` may be None, as sys.stdout is in a program without a console."""
        self.file = file
        self.encoding = getattr(file, "encoding", None) or "utf-8"
        self.broken = "" if file is not None else "there is none"

    def write(self, text: str) -> None:
        if self.broken:
            return
        try:
            self.file.write(self.known(text))
            self.file.flush()
        except (OSError, ValueError) as error:  # ValueError: the file has been closed
            self.broken = getattr(error, "strerror", None) or str(error)
            discard_output(self.file)

    def known(self, text: str) -> str:
        return text.encode(self.encoding, "replace").decode(self.encoding)

    def can_show(self, text: str) -> bool:
        """Whether the encoding has all these characters."""
        return text == self.known(text)

    def is_terminal(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return not self.broken and self.file.isatty()
        return False

    def columns(self) -> int:
        """The width of the terminal; 80 if it does not say."""
        with contextlib.suppress(OSError, ValueError):
            return os.get_terminal_size(self.file.fileno()).columns or 80
        return 80


def prepare_output() -> None:
    """For programs that print to standard output. What a terminal lacks becomes an escape such as
    \\u2588, and a program that was started without standard output gets one that leads nowhere."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    sys.stdout.reconfigure(errors="backslashreplace")


def discard_output(file: TextIO) -> None:
    """Sends what the file still holds to nowhere. Otherwise Python would try again to write it when
    the program ends, fail, and change the exit status to 120."""
    with contextlib.suppress(OSError, ValueError):
        number = file.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


# ------------------------------------------------------------------------------------------------
# The line at the bottom of a terminal


class BottomLine:
    """The last line of a terminal, which is written over and over: the bar, or what the run is busy
    with before the first step."""

    on_screen: "BottomLine | None" = None  # the one that is shown now, if any

    def __init__(self, stream: Stream):
        self.stream = stream
        self.text = ""

    def show(self, text: str) -> None:
        text = text[: self.stream.columns() - 1]  # a longer one would go on in the next line
        self.stream.write("\r" + text.ljust(len(self.text)))
        self.text = text
        BottomLine.on_screen = self

    def hide(self) -> str:
        """Takes the line away, and returns what it showed."""
        text = self.text
        if text:
            self.stream.write("\r" + " " * len(text) + "\r")
        self.text = ""
        BottomLine.on_screen = None
        return text

    def leave(self) -> None:
        """Lets the line stand where it is; what comes next stands below it."""
        if self.text:
            self.stream.write("\n")
        self.text = ""
        BottomLine.on_screen = None


def sentence_of(error: OSError) -> str:
    """What is wrong with which file. An error that names none comes from the output."""
    reason = error.strerror or str(error)
    if error.filename:
        return f"{error.filename}: {reason}"
    return f"the output cannot be written ({reason})"


def complain(sentence: str) -> None:
    """Writes a sentence to standard error, below the bar if there is one."""
    if BottomLine.on_screen is not None:
        BottomLine.on_screen.leave()
    Stream(sys.stderr).write(sentence + "\n")


# ------------------------------------------------------------------------------------------------
# The console


class Point(NamedTuple):
    """A loss after some steps."""

    step: int
    loss: float


class Console:
    """What people see of one run. With `shows` False nothing: other ranks than the first have such
    a console, so that all ranks can make the same calls."""

    def __init__(self, num_steps: int, shows: bool = True):
        self.num_steps = num_steps
        self.shows = shows
        self.out = Stream(sys.stdout if shows else None)
        self.bottom = BottomLine(Stream(sys.stderr if shows else None))
        self.has_bar = self.bottom.stream.is_terminal()
        self.tokens_are_bytes = False  # `header` may change it
        self.training: list[Point] = []
        self.validations: list[Point] = []
        self.recent = deque([(0, 0.0)], maxlen=RECENT_STEPS + 1)  # steps and their training time
        self.drawn_at = -math.inf
        self.printed_at = 0.0  # seconds of training
        self.busy_with = ""  # what the run does before its first step
        self.busy_since = 0.0
        self.graphs: list[str] = []  # those compiled or loaded
        self.lock = threading.Lock()  # held by the thread that writes
        self.ticker: threading.Thread | None = None  # shows how long the run has been busy
        self.ticker_ends = threading.Event()

    def say(self, text: str) -> None:
        """Prints lines, above the bar."""
        if not self.shows:
            return
        with self.lock:
            shown = self.bottom.hide()
            was_broken = self.out.broken
            self.out.write(text + "\n")
            if self.out.broken and not was_broken:
                complain(f"cannot print ({self.out.broken}); the run goes on silently")
            if shown:
                self.bottom.show(shown)

    def say_facts(self, facts: dict[str, str]) -> None:
        """Prints a line for each fact, the names in one column; leaves out those without a text."""
        for name, text in facts.items():
            if text:
                self.say(f"{name:<{LABEL_WIDTH}}{text}")

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    # -------------------------------------------------------------------- before the first step

    def header(self, machine: dict, data: list[dict], config: dict, num_weights: tuple[int, int],
               tokens_are_bytes: bool, stages: list[dict], seconds: float | None = None) -> None:
        """Prints what will run.

        machine, data, config, stages: the log's facts (records/README.md)
        num_weights: how many are active in every token, and how many are in tables
        seconds: how long the run may take; None: not known
        """
        self.num_steps = config["num_steps"]
        self.tokens_are_bytes = tokens_are_bytes
        active, in_tables = num_weights
        train_tokens = sum(shard["tokens"] for shard in data if shard["split"] == "train")
        batches = [stage["batch_tokens"] for stage in stages]
        batch = " to ".join(f"{size:,}" for size in sorted({min(batches), max(batches)}))
        tokens = 0
        for stage in stages:
            tokens += (stage["last_step"] - stage["first_step"]) * stage["batch_tokens"]
        unit = " (bytes)" if self.tokens_are_bytes else ""
        time_needed = "" if seconds is None else f", about {duration(seconds)}"
        steps = "step" if self.num_steps == 1 else "steps"
        self.say_facts({
            "machine": machine_in_words(machine),
            "preset": config["preset"],
            "model": f"{count_in_words(active)} parameters active, "
                     f"{count_in_words(in_tables)} in tables",
            "data": f"{config['data_dir']}: {train_tokens:,} training tokens{unit}, "
                    f"{config['val_tokens']:,} for validation",
            "run": f"{self.num_steps:,} {steps} of {batch} tokens, {count_in_words(tokens)} tokens "
                   f"in all ({epochs_in_words(tokens / train_tokens)}){time_needed}",
        })
        self.say("")

    def busy(self, what: str) -> None:
        """Says what the run does until the first loss arrives, such as "compiling". On a terminal
        the seconds are counted."""
        self.busy_with = what
        self.busy_since = time.monotonic()
        if not self.has_bar:
            self.say(f"{what} ...")
            return
        self.bottom.show(self.busy_in_words())
        self.ticker = threading.Thread(target=self.tick, daemon=True)
        self.ticker.start()
        atexit.register(self.stop_ticker)  # a thread that writes while Python ends could crash it

    def tick(self) -> None:
        """Draws the line anew each second, until `stop_ticker`. It stays away once an error has
        taken its place."""
        while not self.ticker_ends.wait(1.0):
            with self.lock:
                if BottomLine.on_screen is self.bottom:
                    self.bottom.show(self.busy_in_words())

    def stop_ticker(self) -> None:
        if self.ticker is not None:
            self.ticker_ends.set()
            self.ticker.join()
            self.ticker = None
            atexit.unregister(self.stop_ticker)

    def compiled(self, what: str) -> None:
        """Says which graph was compiled or loaded just now."""
        self.graphs.append(what)
        if self.ticker is not None:
            with self.lock:
                self.bottom.show(self.busy_in_words())

    def busy_seconds(self) -> float:
        return time.monotonic() - self.busy_since

    def busy_in_words(self) -> str:
        text = f"{self.busy_with} ({self.busy_seconds():.0f} s)"
        if self.graphs:
            latest = self.graphs[-1].partition(",")[0]  # without the details
            text += f": {len(self.graphs)} done, the last one {latest}"
        return text

    def end_busy(self) -> None:
        """Ends what `busy` began, if it has."""
        if self.busy_with:
            self.stop_ticker()
            self.bottom.hide()
            if self.graphs:
                self.say(f"{self.busy_with}: done after {duration(self.busy_seconds())}, "
                         f"graphs: {len(self.graphs)}")
        self.busy_with = ""

    # ------------------------------------------------------------------------------- the steps

    def train_loss(self, step: int, seconds: float, loss: float, line: str) -> None:
        """Shows a training loss after `step` steps and `seconds` of training time; `line` is that
        of the log."""
        self.end_busy()
        self.training.append(Point(step, loss))
        self.recent.append((step, seconds))
        if self.has_bar:
            self.draw_bar()
        if not (self.has_bar and self.out.is_terminal()) and self.is_progress(step, seconds):
            self.printed_at = seconds
            self.say(line)
        if not math.isfinite(loss):  # this ends the run, with a sentence of its own
            self.close()

    def remember(self, step: int, seconds: float, name: str, loss: float) -> None:
        """Takes a loss of a run that this one goes on with: it is part of the curve at the end."""
        points = self.training if name == "train_loss" else self.validations
        points.append(Point(step, loss))
        self.recent = deque([(step, seconds)], maxlen=RECENT_STEPS + 1)

    def is_progress(self, step: int, seconds: float) -> bool:
        """Whether a step is one of those, spread evenly, whose lines are printed, or the first one
        after a long time without a line."""
        before = (step - 1) * PROGRESS_LINES // self.num_steps
        is_spread = step == 1 or step * PROGRESS_LINES // self.num_steps > before
        return is_spread or seconds - self.printed_at >= MOST_QUIET_S

    def val_loss(self, step: int, seconds: float, loss: float, line: str) -> None:
        """Shows a validation loss, with the arguments of `train_loss`."""
        self.end_busy()
        self.validations.append(Point(step, loss))
        if not self.out.is_terminal():
            bits = f" bits_per_byte:{loss / math.log(2):.4f}" if self.tokens_are_bytes else ""
            self.say(line.removesuffix(" step_avg:nanms") + bits)  # before the first step
            return
        width = len(str(self.num_steps))
        self.say(f"step {step:>{width}}/{self.num_steps}   val loss {self.loss_in_words(loss)}   "
                 f"{duration(seconds)} of training")

    def loss_in_words(self, loss: float) -> str:
        """In bits per byte, the end of a document counts as a byte; in evaluate.py it does not."""
        unit = "byte" if self.tokens_are_bytes else "token"
        bits = f", {loss / math.log(2):.3f} bits per byte" if self.tokens_are_bytes else ""
        return f"{loss:.4f} nats per {unit}{bits}"

    def draw_bar(self) -> None:
        """Draws the bar, unless it has just been drawn."""
        step, loss = self.training[-1]
        now = time.monotonic()
        if now - self.drawn_at < REDRAW_S and step < self.num_steps:
            return
        self.drawn_at = now
        width = len(str(self.num_steps))
        text = f"{step:>{width}}/{self.num_steps}  loss {loss:.3f}"
        seconds_a_step = self.seconds_a_step()
        if seconds_a_step is not None:
            text += f"  {milliseconds(seconds_a_step)} a step"
            if step < self.num_steps:
                text += f"  {duration((self.num_steps - step) * seconds_a_step)} left"
        room = min(40, self.bottom.stream.columns() - len(text) - 5)
        if room >= 5:
            full = "█" if self.bottom.stream.can_show("█") else "#"
            text = f"|{full * (room * step // self.num_steps):<{room}}|  {text}"
        self.bottom.show(text)

    def seconds_a_step(self) -> float | None:
        """Training time of a recent step. The clock of training stands still during validation, so
        a validation does not make steps look slow."""
        first_step, first_seconds = self.recent[0]
        last_step, last_seconds = self.recent[-1]
        if last_step == first_step:
            return None
        return (last_seconds - first_seconds) / (last_step - first_step)

    def close(self) -> None:
        """Lets the bar stand as it is. What is printed next stands below it."""
        self.bottom.leave()

    # --------------------------------------------------------------------------------- the end

    def result(self, facts: dict, kept_step: int | None = None) -> None:
        """Prints what came of the run. `facts` are those of the log's end block; what is missing or
        None there is left out. `kept_step` is the step whose weights were kept, if any were."""
        self.close()
        self.say("")
        self.say_facts({
            "loss": self.loss_at_the_end(facts.get("val_loss")),
            "target": target_in_words(facts),
            "best": self.best_in_words(kept_step),
            "time": time_in_words(facts),
            "memory": memory_in_words(facts.get("peak_memory_mib")),
        })
        blocks = self.out.can_show(BLOCKS + MARK)
        lines = curve(self.training, self.validations, blocks)
        if lines:
            self.say("\n" + "\n".join(lines))
        self.say("")

    def loss_at_the_end(self, loss: float | None) -> str:
        if loss is None:
            return ""
        start = ""
        if self.training and self.validations and self.validations[-1].step == 0:
            start = ", before the first step"
        elif self.validations and self.validations[0].step == 0:
            start = f"; it began at {self.validations[0].loss:.4f}"
        elif self.training:
            start = f"; the first batch had {self.training[0].loss:.4f}"
        return self.loss_in_words(loss) + start

    def rise(self) -> float:
        """By how much the last validation loss is above the best one, as they are printed."""
        if not self.validations:
            return 0.0
        losses = [round(point.loss, 4) for point in self.validations]
        return losses[-1] - min(losses)

    def best_in_words(self, kept_step: int | None) -> str:
        """Says that an earlier validation was better than the last one, if that is so."""
        rise = self.rise()
        if not rise > 0:
            return ""
        best = min(self.validations, key=lambda point: point.loss)
        last = self.validations[-1]
        text = f"{best.loss:.4f} at step {best.step:,}"
        if kept_step == best.step:
            text += ", and the weights of that step were kept"
        text += f"; from there it rose to {last.loss:.4f}"
        if rise > CLEAR_RISE:
            text += " (overfitting: more text helps)"
        return text

    def closing(self, checkpoint: Path | None, commands: list[str], launcher: str = "") -> None:
        """Prints the file of the weights, if there is one, and commands of Python to try next."""
        if checkpoint:
            self.say(f"checkpoint: {checkpoint}")
        if commands:
            self.say("next:")
            for command in commands:
                self.say(f"  {python_command()} {launcher}{script_folder()}{command}")

    def stopped(self, signal: str, step: int, checkpoint: Path | None, command: str,
                saves: bool) -> None:
        """Says what is left of a run that a signal has ended, and the command that goes on from its
        save, if there is one. `saves`: whether the run was to save."""
        self.say(f"stopped by {signal} after step {step} of {self.num_steps}")
        self.closing(checkpoint, [command] if command else [], launcher())
        if not command:
            advice = "" if saves else "; --save_every=MINUTES saves"
            self.say(f"it cannot be resumed, as nothing was saved{advice}")


# ------------------------------------------------------------------------------------------------
# Facts in words


def next_commands(checkpoint: Path | None, data_dir: str, longer: str) -> list[str]:
    """What to try after a run. `longer` is the option that makes it longer, if one does."""
    commands = []
    if checkpoint:
        commands.append(f'sample.py {shlex.quote(Path(checkpoint).as_posix())} "Once upon a time"')
    if longer:
        commands.append(f"train_gpt.py {shlex.quote(f'--data_dir={data_dir}')} {longer}")
    return commands


def python_command() -> str:
    """What to type for the Python that runs this."""
    python = Path(os.path.abspath(sys.executable))  # a virtual environment has a link there
    here = Path.cwd()
    if python.is_relative_to(here):
        python = python.relative_to(here)
    return shlex.quote(python.as_posix())


def launcher() -> str:
    """What to type before a script that shall have as many processes as this run on this host."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if processes == 1:
        return ""
    return f"-m torch.distributed.run --standalone --nproc_per_node={processes} "


def script_folder() -> str:
    """What to type before the name of a script: its folder, if that is not the current one."""
    folder = Path(__file__).resolve().parents[1]
    return "" if folder == Path.cwd() else shlex.quote(f"{folder.as_posix()}/")


def count_in_words(number: int) -> str:
    """41,234 in full; from 100,000 on in millions or billions: 0.9M, 108.0M, 1.4B."""
    if number >= 1e9:
        return f"{number / 1e9:,.1f}B"
    if number >= 1e5:
        return f"{number / 1e6:.1f}M"
    return f"{number:,}"


def duration(seconds: float) -> str:
    """A time in the unit that suits it: 8.1 s, 45 s, 1.7 min, 2.3 h."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def milliseconds(seconds: float) -> str:
    """A short time: 8.25 ms, 126 ms, 1,260 ms."""
    value = 1000 * seconds
    return f"{value:.2f} ms" if value < 10 else f"{value:,.0f} ms"


def epochs_in_words(times: float) -> str:
    """How often the training text is read."""
    if times < 0.1:
        return f"{times:.2f} epochs"
    if times < 10:
        return f"{times:.1f} epochs"
    return f"{times:,.0f} epochs"


def machine_in_words(machine: dict) -> str:
    """The devices of the fact `environment`, and the version of PyTorch."""
    parts = []
    for name, number in Counter(machine["devices"]).items():
        if name == "CPU":
            name = f"CPU ({machine['cpu']})" if machine["cpu"] else "CPU"
        parts.append(f"{number} x {name}")
    if machine["hosts"] > 1:
        parts.append(f"{machine['hosts']} hosts")
    version = machine["torch"].partition("+")[0]
    return ", ".join([*parts, f"torch {version}"])


def target_in_words(facts: dict) -> str:
    loss, target = facts.get("val_loss"), facts.get("target")
    if loss is None or target is None:
        return ""
    if loss <= target:
        return f"{target:g}: reached"
    if facts.get("interrupted"):
        return f"{target:g}: not reached so far"
    return f"{target:g}: missed by {loss - target:.4f}"


def time_in_words(facts: dict) -> str:
    """Training time and speeds, as far as the end block knows them."""
    parts = []
    if facts.get("train_time_s") is not None:
        parts.append(f"{duration(facts['train_time_s'])} of training")
    if facts.get("step_avg_ms") is not None:
        parts.append(f"{milliseconds(facts['step_avg_ms'] / 1000)} a step")
    if facts.get("tokens_per_s") is not None:
        parts.append(f"{facts['tokens_per_s']:,} tokens/s")
    if facts.get("mfu") is not None:
        parts.append(f"{facts['mfu']:.1%} of the device's peak")
    return ", ".join(parts)


def memory_in_words(mebibytes: int | None) -> str:
    return "" if mebibytes is None else f"{mebibytes:,} MiB of the GPU at most"


# ------------------------------------------------------------------------------------------------
# The curve of the loss

ROWS = 8
COLUMNS = 60
BLOCKS = " ▁▂▃▄▅▆▇█"  # by how many eighths of a row are full
MARK = "●"  # a validation


def curve(training: list[Point], validations: list[Point], blocks: bool) -> list[str]:
    """The losses as a picture of at most 60 columns x 8 rows and its labels. The height of a column
    is the mean of its training losses. `blocks` False: only ASCII characters. An empty list if
    there are fewer than 10 training losses, or all are the same."""
    training = [point for point in training if math.isfinite(point.loss)]
    validations = [point for point in validations if point.step > 0 and math.isfinite(point.loss)]
    if len(training) < 10:
        return []
    num_columns = min(COLUMNS, len(training))
    means = []
    for column in range(num_columns):
        first = column * len(training) // num_columns
        end = (column + 1) * len(training) // num_columns
        losses = [point.loss for point in training[first:end]]
        means.append(sum(losses) / len(losses))
    marks = {}
    for point in validations:
        column = (point.step - 1) * num_columns // training[-1].step
        marks[min(column, num_columns - 1)] = point.loss
    low = min([*means, *marks.values()])
    high = max([*means, *marks.values()])
    if low == high:
        return []

    def eighths(loss: float) -> int:
        """The height of a loss, from 1 to 64 eighths of a row."""
        return 1 + round((loss - low) / (high - low) * (8 * ROWS - 1))

    lines = []
    label_width = max(len(f"{high:.2f}"), len(f"{low:.2f}"))
    for row in reversed(range(ROWS)):
        label = {ROWS - 1: f"{high:.2f}", 0: f"{low:.2f}"}.get(row, "")
        cells = ""
        for column, mean in enumerate(means):
            full = min(max(eighths(mean) - 8 * row, 0), 8)
            cell = BLOCKS[full]
            if not blocks:
                cell = "#" if full >= 4 or (row == 0 and full) else " "
            if column in marks and (eighths(marks[column]) - 1) // 8 == row:
                cell = MARK if blocks else "o"
            cells += cell
        lines.append(f"{label:>{label_width}} |{cells}".rstrip())
    first, last = f"step {training[0].step}", f"{training[-1].step}"
    axis = first + last.rjust(num_columns - len(first))
    lines.append(" " * (label_width + 2) + axis)
    mark = MARK if blocks else "o"
    legend = f"loss: columns are training, {mark} is validation"
    lines.append(" " * (label_width + 2) + legend)
    return lines
