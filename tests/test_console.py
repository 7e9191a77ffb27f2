"""What people see: records/console.py, records/report.py, and what records/journal.py shows.

References: lines written out by hand, and whole processes where the exit status is the point.
"""
import io
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import ROOT

import train_gpt as t
from nanogpt.ranks import BadInput
from records import console, journal, report

RUN_FACT = {"run_id": "a", "code_sha256": "b"}
MACHINE = {"devices": ["NVIDIA H200"] * 4, "world_size": 4, "torch": "2.11.0+cu128"}
DATA = [dict(split="train", tokens=6_000_000), dict(split="train", tokens=412_345), dict(split="val", tokens=9)]


def log_of(num_steps, **options):
    """A log that has not begun: it keeps its lines in memory."""
    log = journal.Log(**options)
    log.num_steps = num_steps
    return log


def terminal(monkeypatch):
    """A terminal in the place of standard output and standard error."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


@pytest.fixture
def began(tmp_path, capsys, monkeypatch):
    """The configuration and the log of a run of the preset gpt2 that begins, and what it prints."""
    c = t.parse_config(["--preset=gpt2", "--data_dir=data/x", "--num_steps=6", "--seed=3", f"--log_dir={tmp_path}", "--target_loss=1.5"])
    log = journal.Log(tokens_are_bytes=True)
    monkeypatch.setattr(journal, "describe_machine", lambda device: MACHINE)
    run_files = SimpleNamespace(fingerprints=DATA, weights_path=Path("models/x.pt"))
    recipes = {"mlp": "fp8", "head": "bf16", "qkvo": "bf16"}
    report.begin(log, t, torch.device("cuda"), RUN_FACT, [], run_files, recipes, c, 102)
    return c, log, capsys.readouterr().out


def test_the_header_says_what_will_run_with_which_seed_and_where_the_files_will_be(began):
    c, log, out = began
    tokens = sum(t.stage_tokens(t.stage_of(step, c), c) for step in range(6))
    assert out == f"""\
device    4 x NVIDIA H200, torch 2.11.0+cu128
preset    gpt2
model     123.6M parameters active, 0.0M in tables
precision bf16, fp8
data      data/x: 6,412,345 bytes for training, 10,485,760 for validation
run       6 steps, {tokens:,} bytes, {tokens / 6_412_345:.2f} epochs, about 1.7 min
seed      3
log       {log.path}
weights   models/x.pt
"""


@pytest.mark.parametrize("loss, verdict", [(1.75, "missed"), (1.5, "reached"), (1.25, "reached")])
def test_the_end_says_what_came_of_the_run(began, capsys, loss, verdict, monkeypatch):
    c, log, _ = began
    log.step(5, 88.0, "train_loss", 3.0)
    log.step(6, 88.2, "train_loss", 2.0)
    log.step(6, 88.24, "val_loss", loss + 0.00001)
    keeper = SimpleNamespace(best=(2, 1.3, "models/x.pt"), remove_save=lambda: None)
    model = SimpleNamespace(candidates=SimpleNamespace(lost_targets=0))
    optimizer = SimpleNamespace(hooks=SimpleNamespace(state=dict))
    run = SimpleNamespace(config=c, log=log, keeper=keeper, model=model, optimizer=optimizer, device=torch.device("cpu"),
                          step=6, clock=SimpleNamespace(total=88.24), ended_by="")
    c.sample = ""
    capsys.readouterr()
    monkeypatch.setattr(t, "STOP", mock.Mock())
    monkeypatch.setattr(log, "close_bar", lambda: log.show("The bar ends."))
    assert report.end(run, t, 12.3) == 0
    assert t.STOP.end_at_once.called, "by a Ctrl-C, also while a sample is drawn"
    tokens = c.seq_len * sum(t.batch_plan(c))
    *summary, _, sampling, evaluation = capsys.readouterr().out.splitlines()
    assert summary == [
        "The bar ends.",
        "",
        "training  █▁ the loss of steps 1 to 6",
        f"loss      {loss:.4f} nats per byte, {loss / math.log(2):.3f} bits per byte",
        f"target    1.5: {verdict}",
        f"time      88.2 s of training, 14706.67 ms a step, {tokens / 88.24:,.0f} tokens/s",
        f"log       {log.path}",
        "weights   models/x.pt, of step 2 with loss 1.3000"]
    assert sampling.endswith('sample.py models/x.pt "Once upon a time"') and evaluation.endswith("evaluate.py models/x.pt")
    assert log.path.read_text().splitlines()[-10:] == [
        f"val_loss: {loss}", "target: 1.5", f"reached: {json.dumps(loss <= 1.5)}", "train_time_s: 88.24", "step_avg_ms: 14706.67",
        f"tokens: {tokens}", f"tokens_per_s: {tokens / 88.24:.0f}", "peak_memory_mib: null", "compile_s: 12.3",
        "code_sha256: b"]


def test_a_sample_that_cannot_be_drawn_is_a_sentence(monkeypatch):
    run = SimpleNamespace(config=t.Config(sample="x"), device="cpu")
    for error, said in ((BadInput("no network"), "none: no network"), (torch.OutOfMemoryError("CUDA out of memory. Tried."), "none: CUDA out of memory")):
        monkeypatch.setattr(t.checkpoints, "load_model", mock.Mock(side_effect=error))
        assert report.sample_of(run, t, "models/x.pt") == said


def test_a_sample_has_the_tokens_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(t.checkpoints, "load_model", lambda *_: None)
    monkeypatch.setattr(report.sample, "continued", lambda model, text, count: text + "." * count)
    run = SimpleNamespace(config=t.Config(sample="x", sample_tokens=3), device="cpu")
    assert report.sample_of(run, t, "models/x.pt") == "x..."


def test_a_file_gets_a_line_for_each_validation_and_nothing_of_the_steps(capsys):
    log = log_of(2, tokens_are_bytes=True)
    log.step(1, 1.0, "train_loss", 3.0)
    log.step(2, 2.0, "train_loss", 2.5)
    log.step(2, 2.0, "val_loss", 2.0)
    assert capsys.readouterr() == ("step:2/2 val_loss:2.0000 train_time:2000ms step_avg:1000.00ms bits_per_byte:2.8854\n", "")


def test_lines_of_an_earlier_run_are_not_shown_again(capsys):
    log = log_of(4)
    log.step(1, 1.0, "train_loss", 3.0, show=False)
    log.step(1, 1.0, "val_loss", 2.0, show=False)
    assert log.bar is None and len(log.steps) == 2 and capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_that_makes_way_for_lines_and_stays_at_the_end(monkeypatch):
    screen = terminal(monkeypatch)
    log = log_of(4)
    log.step(1, 1.0, "train_loss", 3.0)
    log.step(1, 1.0, "val_loss", 2.0)
    for step in (2, 3, 4):
        log.step(step, 1.0 * step, "train_loss", 2.5)
    log.close_bar()
    log.show("below")
    frames = [part for part in screen.getvalue().replace("\n", "\r").split("\r") if part.strip()]
    assert "step:1/4 val_loss:2.0000 train_time:1000ms step_avg:1000.00ms" in frames and "below" == frames[-1]
    assert frames[-2].startswith("100%") and "4/4" in frames[-2] and "loss 2.500" in frames[-2]


RUNS = """
import os, sys
from records import journal  # once for all runs: it takes seconds
reading, pipe = os.pipe()
os.close(reading)  # as after `| head -n 1`
full = os.open("/dev/full", os.O_WRONLY)
for out, err in ((pipe, 2), (full, 2), (pipe, pipe), (full, full)):
    run = os.fork()
    if run == 0:
        os.dup2(out, 1), os.dup2(err, 2)
        log = journal.Log()
        for step in range(1, 1001):
            log.show(f"step:{step}/1000 " + "x" * 1000)
        sys.exit(3)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_a_console_that_cannot_be_written_to_falls_silent_and_the_run_goes_on():
    run = subprocess.run([sys.executable, "-c", RUNS], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.split() == ["3"] * 4 and "Traceback" not in run.stderr and "Exception" not in run.stderr
    assert run.stderr.count("the run goes on silently") == 2, "where standard error can be written to"


def test_the_curve_has_a_bar_for_each_loss_or_for_the_mean_of_several():
    assert console.curve([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 1.0]) == "█▇▆▅▄▃▂▁▁"
    assert console.curve([5.0] * 300 + [1.0, 2.0] * 150) == "█" * 30 + "▁" * 30
    assert console.curve([3.0]) in ("▁", "█")


def test_a_run_that_was_stopped_has_the_tokens_of_its_steps():
    c = t.Config(num_steps=100, seq_len=256)
    log_ = SimpleNamespace(steps=[(40, 2.0, "val_loss", 3.0)], facts={"run": [{"code_sha256": "a"}]})
    run = SimpleNamespace(config=c, log=log_, step=40, clock=SimpleNamespace(total=2.0), device=torch.device("cpu"))
    tokens = sum(t.stage_tokens(t.stage_of(step, c), c) for step in range(40))
    found = report.results(run, t, 1.0)
    assert (found["tokens"], found["tokens_per_s"], found["step_avg_ms"]) == (tokens, tokens // 2, 50.0)
