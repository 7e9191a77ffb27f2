"""What people see, records/console.py.

References: lines written out by hand, and whole processes where the exit status is the point.
"""
import io
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from records import console
from records.console import Console

HEADER = dict(
    machine={"devices": ["NVIDIA H200"] * 4, "world_size": 4, "hosts": 1, "torch": "2.11.0+cu128", "cpu": "Xeon"},
    data=[dict(split="train", tokens=6_000_000), dict(split="train", tokens=412_345), dict(split="val", tokens=9)],
    config=dict(preset="speedrun", data_dir="data/x", val_tokens=131_072, num_steps=700, seed=3),
    stages=[dict(first_step=0, last_step=200, batch_tokens=1024), dict(first_step=200, last_step=600, batch_tokens=2048),
            dict(first_step=600, last_step=700, batch_tokens=4096)],
    num_weights=(123_456_789, 41_000), precision="bf16, fp8", log=Path("logs/a.txt"), weights=Path("models/x.pt"),
    seconds=102)


def test_the_header_says_what_will_run_with_which_seed_and_where_the_files_will_be(capsys):
    Console().header(**HEADER)
    out = capsys.readouterr().out
    assert out == """\
device    4 x NVIDIA H200, torch 2.11.0
preset    speedrun
model     123.5M parameters active, 0.0M in tables
precision bf16, fp8
data      data/x: 6,412,345 tokens for training, 131,072 for validation
run       700 steps, 1,433,600 tokens, 0.22 epochs, about 1.7 min
seed      3
log       logs/a.txt
weights   models/x.pt
"""
    Console().header(**HEADER | dict(weights=None))
    assert capsys.readouterr().out == out.replace("models/x.pt", "not kept; --save_checkpoint keeps them")


def test_a_file_gets_a_line_for_each_validation_and_nothing_of_the_steps(capsys):
    seen = Console(tokens_are_bytes=True)
    seen.train_loss(1, 2, 3.0)
    seen.train_loss(2, 2, 2.5)
    seen.val_loss("step:2/2 val_loss:2.0", 2.0)
    assert capsys.readouterr() == ("step:2/2 val_loss:2.0 bits_per_byte:2.8854\n", "")


def test_a_terminal_gets_a_bar_that_makes_way_for_lines_and_stays_at_the_end(monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(console, "prepare_output", lambda: None)
    seen = Console()
    seen.train_loss(1, 4, 3.0)
    seen.val_loss("step:1/4 val_loss:2.0", 2.0)
    for step in (2, 3, 4):
        seen.train_loss(step, 4, 2.5)
    seen.close()
    seen.say("below")
    frames = [part for part in screen.getvalue().replace("\n", "\r").split("\r") if part.strip()]
    assert "step:1/4 val_loss:2.0" in frames and "below" == frames[-1]
    assert frames[-2].startswith("100%") and "4/4" in frames[-2] and "loss 2.500" in frames[-2]


FACTS = dict(val_loss=1.75, target=1.5, reached=False, train_time_s=88.24, step_avg_ms=126.05, tokens_per_s=16254,  peak_memory_mib=12345)
STEPS = [(0, 0.0, "val_loss", 5.6), (1, 0.1, "train_loss", 5.5), (2, 0.2, "val_loss", 1.75)]


def summary(capsys, facts=FACTS, steps=STEPS, weights=None, kept_step=None):
    Console(tokens_are_bytes=True).result(steps, facts, Path("logs/a.txt"), weights, kept_step)
    return capsys.readouterr().out.splitlines()


def test_the_summary_of_a_run_that_misses_its_target(capsys):
    assert summary(capsys, weights=Path("models/x.pt"), kept_step=2) == [
        "",
        "loss      1.7500 nats per byte, 2.525 bits per byte, at step 2",
        "target    1.5: missed",
        "time      88.2 s of training, 126.05 ms a step, 16,254 tokens/s",
        "memory    12,345 MiB of the GPU at most",
        "log       logs/a.txt",
        "weights   models/x.pt, of step 2"]


def test_the_summary_of_a_run_that_reaches_its_target(capsys):
    assert "target    1.75: reached" in summary(capsys, FACTS | {"target": 1.75, "reached": True})


@pytest.mark.parametrize("last, end", [
    (1.7, "at step 9; the best was 1.6000 at step 5"),
    (1.60003, "at step 9"), (1.5, "at step 9")])
def test_a_best_validation_before_the_end_is_named(last, end, capsys):
    steps = [(0, 0.0, "val_loss", 5.6), (5, 0.2, "val_loss", 1.6), (9, 0.3, "val_loss", last)]
    assert summary(capsys, steps=steps)[1].endswith(end)
    diverged = [(0, 0.0, "val_loss", 5.6), (9, 0.3, "val_loss", 23.4)]
    assert summary(capsys, steps=diverged)[1].endswith("; the best was 5.6000 at step 0")


def test_commands_to_try_next_are_quoted_as_a_shell_needs_it(capsys):
    Console().next("models/my text.pt")
    _, sampling, evaluation = capsys.readouterr().out.splitlines()
    assert shlex.split(sampling)[1:] == ["sample.py", "models/my text.pt", "Once upon a time"]
    assert shlex.split(evaluation)[1:] == ["evaluate.py", "models/my text.pt"]


RUN = """
import sys
from records.console import Console
seen = Console()
for step in range(1, 1001):
    seen.val_loss(f"step:{step}/1000 " + "x" * 1000, 3.0)
sys.exit(3)
"""


@pytest.mark.parametrize("shell", ["| head -n 1 > /dev/null", "> /dev/full", "> /dev/full 2>&1", "2>&1 | true"])
def test_a_console_that_cannot_be_written_to_falls_silent_and_the_run_goes_on(shell):
    command = f'set -o pipefail; "$0" -c "$1" {shell}'
    run = subprocess.run(["bash", "-c", command, sys.executable, RUN], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 3 and "Traceback" not in run.stderr and "Exception" not in run.stderr
    assert run.stderr.count("the run goes on silently") == ("2>" not in shell), run.stderr


def test_the_curve_has_a_column_for_each_loss_or_for_the_mean_of_several():
    losses = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 1.0]
    heights = [8, 8, 7, 6, 5, 4, 3, 2, 1, 1]  # of 8 rows from 1 to 9
    assert console.curve(losses) == [
        *(f"  {row}.00 |" + "#" * sum(height >= row for height in heights) for row in range(8, 0, -1)),
        "training loss, steps 1 to 10", ""]
    halves = console.curve([5.0] * 300 + [1.0, 2.0] * 150)
    assert halves[0] == "  4.56 |" + "#" * 30 and halves[7] == "  1.50 |" + "#" * 60
    assert console.curve([3.0] * 9) == [] and len(console.curve([3.0] * 10)) == 10
