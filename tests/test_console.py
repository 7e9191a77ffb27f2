"""What people see, records/console.py.

References: lines written out by hand; files that fail as real ones do; a pseudo-terminal; and whole
processes where the exit status is the point.
"""
import contextlib
import io
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from records import console
from records.console import BottomLine, Console, Point, Stream


class Terminal(io.StringIO):
    """A terminal of 80 columns that remembers all it was sent."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Both streams are one terminal, and a clock that the test moves: (terminal, [now])."""
    screen, now = Terminal(), [0.0]
    monkeypatch.setattr(console, "sys", SimpleNamespace(stdout=screen, stderr=screen))
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    yield screen, now
    BottomLine.on_screen = None


def frames(screen):
    """What stood in the last line of the terminal, one thing after the other."""
    return [part.strip() for part in re.split("[\r\n]", screen.getvalue()) if part.strip()]


def run(seen, losses, validations=(), seconds_a_step=0.1, now=None):
    """A run of these training losses, with a validation of loss 2 after some steps."""
    for step, loss in enumerate([None, *losses]):
        if now:
            now[0] += 1
        if step:
            seen.train_loss(step, step * seconds_a_step, loss, f"step:{step}/{len(losses)} train_loss:{loss}")
        if step in validations:
            seen.val_loss(step, step * seconds_a_step, 2.0, f"step:{step}/{len(losses)} val_loss:2.0")


HEADER = dict(
    machine={"devices": ["NVIDIA H200"] * 4, "hosts": 1, "torch": "2.11.0+cu128", "cpu": "Xeon"},
    data=[dict(split="train", tokens=6_000_000), dict(split="train", tokens=412_345), dict(split="val", tokens=9)],
    config=dict(preset="speedrun", data_dir="data/x", val_tokens=131_072, num_steps=700),
    num_weights=(123_456_789, 41_000), tokens_are_bytes=False,
    stages=[dict(first_step=0, last_step=200, batch_tokens=1024), dict(first_step=200, last_step=600, batch_tokens=2048),
            dict(first_step=600, last_step=700, batch_tokens=4096)])


# -------------------------------------------------------------------------------------- the header


def test_the_header_says_what_will_run(capsys):
    Console(700).header(**HEADER, seconds=102)
    assert capsys.readouterr().out == """\
machine   4 x NVIDIA H200, torch 2.11.0
preset    speedrun
model     123.5M parameters active, 41,000 in tables
data      data/x: 6,412,345 training tokens, 131,072 for validation
run       700 steps of 1,024 to 4,096 tokens, 1.4M tokens in all (0.2 epochs), about 1.7 min

"""


def test_the_header_of_a_small_run_on_a_processor(capsys):
    machine = {"devices": ["CPU"], "hosts": 1, "torch": "2.13.0", "cpu": "Xeon"}
    Console(7).header(**HEADER | dict(
        machine=machine, config=HEADER["config"] | dict(num_steps=7), tokens_are_bytes=True,
        stages=[dict(first_step=0, last_step=7, batch_tokens=2048)]))
    out = capsys.readouterr().out
    assert "machine   1 x CPU (Xeon), torch 2.13.0\n" in out and "training tokens (bytes), " in out
    assert "\nrun       7 steps of 2,048 tokens, 14,336 tokens in all (0.00 epochs)\n" in out


def test_commands_to_try_next_are_quoted_as_a_shell_needs_it():
    sampling, training = console.next_commands(Path("models/my text.pt"), "data/my $text", "--minutes=10")
    assert shlex.split(sampling) == ["sample.py", "models/my text.pt", "Once upon a time"]
    assert shlex.split(training) == ["train_gpt.py", "--data_dir=data/my $text", "--minutes=10"]


# ------------------------------------------------------------------------------- without a terminal


def test_a_long_run_prints_a_line_a_minute(capsys):
    seen = Console(10_000)
    for step in range(1, 41):
        seen.train_loss(step, 7.0 * step, 3.0, f"step:{step}")
    assert capsys.readouterr().out.split() == ["step:1", "step:10", "step:19", "step:28", "step:37"]


@pytest.mark.parametrize("steps, printed", [(1, 1), (4, 4), (20, 20), (21, 21), (30, 21), (700, 21), (1563, 21)])
def test_about_twenty_lines_spread_evenly_are_printed_of_the_steps(steps, printed, capsys):
    run(Console(steps), [3.0] * steps)
    lines = capsys.readouterr().out.splitlines()
    shown = [int(re.match(r"step:(\d+)/", line)[1]) for line in lines]
    assert len(shown) == printed and shown[0] == 1 and shown[-1] == steps
    gaps = [b - a for a, b in zip(shown, shown[1:])]
    assert max(gaps, default=0) <= math.ceil(steps / 20)


def test_lines_are_those_of_the_log_and_validations_have_bits_per_byte(capsys):
    seen = Console(2)
    seen.tokens_are_bytes = True
    run(seen, [3.0, 2.5], validations=[0, 2])
    assert capsys.readouterr().out.splitlines() == [
        "step:0/2 val_loss:2.0 bits_per_byte:2.8854", "step:1/2 train_loss:3.0", "step:2/2 train_loss:2.5",
        "step:2/2 val_loss:2.0 bits_per_byte:2.8854"]


def test_compiling_is_two_lines(capsys, monkeypatch):
    now = [5.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    seen = Console(2)
    seen.busy("compiling")
    seen.compiled("block of 3 rows")
    seen.compiled("head of 3 rows")
    now[0] += 62
    run(seen, [3.0, 2.0])
    out, err = capsys.readouterr()
    assert out.splitlines()[:3] == ["compiling ...", "compiling: done after 62 s, graphs: 2", "step:1/2 train_loss:3.0"]
    assert err == ""


def test_other_ranks_print_nothing(capsys):
    seen = Console(20, shows=False)
    seen.header(**HEADER)
    seen.busy("compiling")
    seen.compiled("block")
    run(seen, [3.0 - step / 10 for step in range(20)], validations=[0, 20])
    seen.warn("x")
    seen.result({"val_loss": 2.0, "target": 1.0})
    seen.closing("model.pt", ["sample"])
    assert capsys.readouterr() == ("", "")


# ------------------------------------------------------------------------------------ on a terminal


def test_the_bar_shows_loss_speed_and_time_left(terminal):
    screen, now = terminal
    run(Console(4), [3.0, 2.5, 2.25, 2.0], validations=[0, 2, 4], now=now)
    assert frames(screen) == [
        "step 0/4   val loss 2.0000 nats per token   0.0 s of training",
        f"|{'█' * 8:<33}|  1/4  loss 3.000  100 ms a step  0.3 s left",
        f"|{'█' * 16:<33}|  2/4  loss 2.500  100 ms a step  0.2 s left",
        "step 2/4   val loss 2.0000 nats per token   0.2 s of training",
        f"|{'█' * 16:<33}|  2/4  loss 2.500  100 ms a step  0.2 s left",
        f"|{'█' * 24:<33}|  3/4  loss 2.250  100 ms a step  0.1 s left",
        f"|{'█' * 40:<40}|  4/4  loss 2.000  100 ms a step",
        "step 4/4   val loss 2.0000 nats per token   0.4 s of training",
        f"|{'█' * 40:<40}|  4/4  loss 2.000  100 ms a step",
    ]
    assert "train_loss" not in screen.getvalue() and max(map(len, frames(screen))) < 80


def test_time_left_is_that_of_the_recent_steps_and_no_validation_changes_it(terminal):
    seen = Console(1000)
    for step in range(1, 101):  # the first 50 steps take 1 s each, the others 0.1 s
        seconds = min(step, 50) + 0.1 * max(step - 50, 0)
        seen.train_loss(step, seconds, 3.0, "")
    assert seen.seconds_a_step() == pytest.approx(0.1)
    terminal[1][0] += 500  # a long validation: the clock of training stands still
    seen.val_loss(100, 55.0, 2.0, "")
    seen.train_loss(101, 55.1, 3.0, "")
    assert frames(terminal[0])[-1].endswith("  101/1000  loss 3.000  100 ms a step  90 s left")


def test_the_bar_is_drawn_ten_times_a_second_at_most_and_at_the_end(terminal):
    screen, now = terminal
    seen = Console(100)
    for step in range(1, 101):
        now[0] += 0.03
        seen.train_loss(step, step / 100, 3.0, "")
    bars = [frame for frame in frames(screen) if "loss" in frame]
    assert 20 <= len(bars) <= 32 and "100/100" in bars[-1]


def test_compiling_stands_in_the_place_of_the_bar(terminal):
    screen, now = terminal
    seen = Console(3)
    seen.busy("compiling")
    now[0] += 12
    seen.compiled("block of 16384 rows")
    now[0] += 50
    run(seen, [3.0], now=now)
    assert frames(screen)[:3] == [
        "compiling (0 s)", "compiling (12 s): 1 done, the last one block of 16384 rows", "compiling: done after 64 s, graphs: 1"]
    assert screen.getvalue().startswith("\rcompiling (0 s)\rcompiling (12 s): 1"), "in one line"


def test_while_the_run_is_busy_the_seconds_are_counted_until_an_error_takes_the_place(terminal, monkeypatch):
    screen, now = terminal
    waits = []

    def wait(seconds):
        waits.append(seconds)
        now[0] += seconds
        if len(waits) == 3:
            console.complain("an error")
        return len(waits) == 5

    seen = Console(3)
    monkeypatch.setattr(seen.ticker_ends, "wait", wait)
    seen.busy("compiling")
    seen.stop_ticker()
    assert waits == [1.0] * 5 and seen.ticker is None
    assert frames(screen) == ["compiling (0 s)", "compiling (1 s)", "compiling (2 s)", "an error"]


def test_a_line_that_is_printed_takes_the_bar_away_and_brings_it_back(terminal):
    screen, now = terminal
    seen = Console(3)
    seen.bottom.show("the bar")
    seen.warn("block of 3 rows (2 s)")
    assert screen.getvalue() == "\rthe bar\r       \rwarning: block of 3 rows (2 s)\n\rthe bar"


def test_a_shorter_bar_leaves_nothing_of_a_longer_one_and_a_long_one_is_cut(terminal):
    line = BottomLine(Stream(terminal[0]))
    line.show("x" * 200)
    line.show("short")
    assert terminal[0].getvalue() == "\r" + "x" * 79 + "\rshort" + " " * 74


def test_a_loss_that_is_not_finite_leaves_the_bar_above_what_comes(terminal):
    run(Console(9), [3.0, math.nan], now=terminal[1])
    assert terminal[0].getvalue().endswith("a step  0.7 s left\n") and BottomLine.on_screen is None


def test_a_complaint_stands_below_the_bar(terminal):
    Console(3).bottom.show("the bar")
    console.complain("a sentence")
    assert terminal[0].getvalue() == "\rthe bar\na sentence\n"


def test_the_bar_is_on_the_terminal_and_lines_in_the_file(terminal, monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(console.sys, "stdout", file)
    run(Console(2), [3.0, 2.0], validations=[2], now=terminal[1])
    assert file.getvalue().splitlines() == [
        "step:1/2 train_loss:3.0", "step:2/2 train_loss:2.0", "step:2/2 val_loss:2.0"]
    assert "2/2  loss 2.000" in terminal[0].getvalue()


# --------------------------------------------------------------------------------------- the result


FACTS = dict(val_loss=1.75, target=1.5, reached=False, train_time_s=88.24, step_avg_ms=126.05, tokens=1_433_600,
             tokens_per_s=16254, mfu=0.4123, peak_memory_mib=12345, compile_s=3.0, code_sha256="ab")


def summary(capsys, facts, validations=(), tokens_are_bytes=False, kept_step=None):
    """The lines of the summary of a run with these validations."""
    seen = Console(100)
    seen.tokens_are_bytes = tokens_are_bytes
    seen.training = [Point(1, 5.5)]
    seen.validations = [Point(*point) for point in validations]
    capsys.readouterr()
    seen.result(facts, kept_step)
    return capsys.readouterr().out.split("\n")


def test_the_summary_of_a_run_that_misses_its_target(capsys):
    assert summary(capsys, FACTS, [(0, 5.6), (50, 2.0), (100, 1.75)], tokens_are_bytes=True) == [
        "",
        "loss      1.7500 nats per byte, 2.525 bits per byte; it began at 5.6000",
        "target    1.5: missed by 0.2500",
        "time      88 s of training, 126 ms a step, 16,254 tokens/s, 41.2% of the device's peak",
        "memory    12,345 MiB of the GPU at most",
        "", ""]


def test_a_run_that_was_stopped_has_not_missed_its_target(capsys):
    lines = summary(capsys, FACTS | {"interrupted": True}, [(0, 1.75)])
    assert "target    1.5: not reached so far" in lines


def test_what_is_not_known_is_left_out_of_the_summary(capsys):
    nothing = dict.fromkeys(FACTS)
    assert summary(capsys, nothing) == summary(capsys, {}) == ["", "", ""]
    lines = summary(capsys, nothing | {"val_loss": 1.75, "train_time_s": 3.0})
    assert lines[1:3] == ["loss      1.7500 nats per token; the first batch had 5.5000", "time      3.0 s of training"]


def test_a_target_that_is_reached(capsys):
    assert summary(capsys, FACTS | {"target": 1.75})[2] == "target    1.75: reached"


@pytest.mark.parametrize("last, kept, text", [
    (1.9, 50, "1.7000 at step 50, and the weights of that step were kept; from there it rose to 1.9000 (overfitting: more text helps)"),
    (1.9, None, "1.7000 at step 50; from there it rose to 1.9000 (overfitting: more text helps)"),
    (1.705, None, "1.7000 at step 50; from there it rose to 1.7050"),
])
def test_a_best_validation_before_the_end_is_named(last, kept, text, capsys):
    validations = [(0, 5.6), (50, 1.7), (75, 1.8), (100, last)]
    assert f"best      {text}" in summary(capsys, FACTS, validations, kept_step=kept)


@pytest.mark.parametrize("last", [1.7, 1.70003, 1.6])
def test_the_end_that_is_best_needs_no_line(last, capsys):
    assert not any(line.startswith("best") for line in summary(capsys, FACTS, [(50, 1.7), (100, last)]))


def test_a_run_that_ends_before_its_first_validation_does_not_give_the_first_loss_for_its_result(capsys):
    seen = Console(10)
    seen.val_loss(0, 0.0, 5.0, "")
    seen.train_loss(1, 1.0, 4.0, "")
    seen.result({"val_loss": 5.0})
    assert "5.0000 nats per token, before the first step\n" in capsys.readouterr().out


def test_the_last_lines_are_the_checkpoint_and_what_to_do_next(capsys, monkeypatch):
    monkeypatch.setattr(console, "python_command", lambda: "PYTHON")
    Console(3).closing("a/model.pt", ["sample.py a/model.pt", "another"])
    Console(3).closing(None, [])
    assert capsys.readouterr().out == (
        "checkpoint: a/model.pt\nnext:\n  PYTHON sample.py a/model.pt\n  PYTHON another\n")


def test_the_printed_command_finds_its_script_from_any_folder(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Console(3).closing(None, ["sample.py --help"])
    command = capsys.readouterr().out.split("next:")[1].strip()
    found = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True)
    assert "sample.py" in found.stdout


def test_the_printed_python_is_the_one_that_runs(capsys):
    Console(3).closing(None, ["-c pass"])
    command = capsys.readouterr().out.splitlines()[-1].strip()
    assert os.path.samefile(command.removesuffix(" -c pass"), sys.executable)


# ---------------------------------------------------------------------------------------- the curve


def test_a_curve_to_the_character():
    heights = [64, 48, 33, 32, 20, 8, 3, 2, 1, 1]  # in eighths of a row
    training = [Point(step, height) for step, height in enumerate(heights, 1)]
    assert console.curve(training, [Point(0, 99), Point(3, 56), Point(10, 1)], blocks=True) == [
        "64.00 |█",
        "      |█ ●",
        "      |██",
        "      |██▁",
        "      |████",
        "      |████▄",
        "      |█████",
        " 1.00 |██████▃▂▁●",
        "       step 1  10",
        "       loss: columns are training, ● is validation"]
    assert console.curve(training, [Point(3, 56), Point(10, 1)], blocks=False) == [
        "64.00 |#",
        "      |# o",
        "      |##",
        "      |##",
        "      |####",
        "      |#####",
        "      |#####",
        " 1.00 |#########o",
        "       step 1  10",
        "       loss: columns are training, o is validation"]


def test_a_curve_has_60_columns_of_mean_losses_and_its_extremes_as_labels():
    training = [Point(step, 5.0 if step <= 300 else 1.0 + step % 2) for step in range(1, 601)]
    lines = console.curve(training, [], blocks=True)
    assert lines[0] == "5.00 |" + "█" * 30 and lines[6] == "     |" + "█" * 30
    assert lines[7] == "1.50 |" + "█" * 30 + "▁" * 30
    assert lines[8] == "      step 1" + "600".rjust(54) and len(lines) == 10


@pytest.mark.parametrize("losses", [[], [3.0] * 9, [3.0] * 50, [math.nan] * 50])
def test_where_there_is_nothing_to_see_there_is_no_curve(losses):
    points = [Point(step + 1, loss) for step, loss in enumerate(losses)]
    assert console.curve(points, [Point(5, math.nan)], blocks=True) == []


# ------------------------------------------------------------------------------- numbers in words


@pytest.mark.parametrize("number, text", [(7, "7"), (41_000, "41,000"), (850_000, "0.8M"), (4_200_000, "4.2M"),
                                          (123_456_789, "123.5M"), (1_400_000_000, "1.4B")])
def test_large_numbers_are_short(number, text):
    assert console.count_in_words(number) == text


@pytest.mark.parametrize("seconds, text", [(0, "0.0 s"), (8.12, "8.1 s"), (9.96, "10 s"), (99.4, "99 s"),
                                           (102, "1.7 min"), (5940, "99.0 min"), (8280, "2.3 h")])
def test_durations_have_the_unit_that_suits_them(seconds, text):
    assert console.duration(seconds) == text


@pytest.mark.parametrize("times, text", [(0.021, "0.02 epochs"), (0.21, "0.2 epochs"), (12.3, "12 epochs"), (1234.5, "1,234 epochs")])
def test_epochs_have_few_digits(times, text):
    assert console.epochs_in_words(times) == text


# ---------------------------------------------------------------------- consoles with a trouble


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_characters_that_a_console_lacks_are_replaced(encoding, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding))
    seen = Console(20)
    run(seen, [3.0 - step / 10 for step in range(20)])
    seen.say("日本 \ud800 x")
    seen.result({"val_loss": 1.0})
    text = raw.getvalue().decode(encoding)
    assert "\n?? ? x\n" in text and "\n3.00 |#" in text


def test_a_bar_in_ascii():
    raw = io.BytesIO()
    screen = io.TextIOWrapper(raw, "ascii")
    seen = Console(2)
    seen.has_bar, seen.bottom = True, BottomLine(Stream(screen))
    seen.train_loss(2, 0.2, 3.0, "")
    assert raw.getvalue().startswith(b"\r|" + b"#" * 40 + b"|  2/2  loss 3.000")
    BottomLine.on_screen = None


def test_a_console_that_is_full_falls_silent_and_says_so_once(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))
    seen = Console(30)
    run(seen, [3.0] * 30, validations=[30])
    seen.result({"val_loss": 2.0})
    assert capsys.readouterr().err == "cannot print (No space left on device); the run goes on silently\n"


def test_streams_that_are_missing_or_closed_are_silent(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for out in (None, closed):
        for err in (None, closed):
            monkeypatch.setattr(sys, "stdout", out)
            monkeypatch.setattr(sys, "stderr", err)
            run(Console(3), [3.0] * 3)
            console.complain("x")


RUN = """
import sys
from records.console import Console
seen = Console(1000)
for step in range(1, 1001):
    seen.train_loss(step, step / 10, 3.0, f"step:{step}/1000 " + "x" * 10_000)
seen.result({"val_loss": 2.0})
sys.exit(1)
"""


@pytest.mark.parametrize("shell", ["| head -n 1 > /dev/null", "> /dev/full", ">&-", "> /dev/full 2> /dev/full",
                                   "> /dev/full 2>&-", "2> /dev/full > /dev/null", "2>&1 | true"])
def test_whatever_happens_to_the_console_the_exit_status_is_that_of_the_run(shell):
    command = f'set -o pipefail; "$0" -c "$1" {shell}'
    run = subprocess.run(["bash", "-c", command, sys.executable, RUN], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and "Traceback" not in run.stderr and "Exception" not in run.stderr
    told = "2>" not in shell and ">&-" not in shell
    assert run.stderr.count("the run goes on silently") == told, run.stderr


def test_a_terminal_that_is_gone_does_not_end_a_run(monkeypatch):
    ours, theirs = os.openpty()
    screen = open(theirs, "w")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    seen = Console(20)
    run(seen, [3.0] * 5)
    os.close(ours)
    run(seen, [3.0] * 20)
    seen.result({"val_loss": 2.0})
    with contextlib.suppress(OSError):
        screen.close()
    BottomLine.on_screen = None
