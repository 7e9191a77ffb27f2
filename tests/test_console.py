"""What people see: records/console.py, records/report.py, and what records/journal.py shows.

References: lines written out by hand, and whole processes where the exit status is the point.
"""
import io
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import torch
from conftest import ROOT, arguments

import train_gpt as t
from nanogpt.ranks import BadInput
from records import console, report


def test_a_sample_has_the_tokens_that_are_asked_for_or_a_sentence_says_why_there_is_none(
        monkeypatch):
    run = SimpleNamespace(config=t.Config(sample="x", sample_tokens=3), device="cpu")
    load = mock.Mock()
    monkeypatch.setattr(t.checkpoints, "load_model", load)
    monkeypatch.setattr(report.sample, "continued", lambda model, text, count: text + "." * count)
    assert report.sample_of(run, t, "models/x.pt") == "x..."
    for load.side_effect, said in (
            (BadInput("no network"), "none: no network"),
            (torch.OutOfMemoryError("CUDA out of memory. Tried."), "none: CUDA out of memory")):
        assert report.sample_of(run, t, "models/x.pt") == said


def test_a_terminal_gets_a_bar_that_makes_way_for_lines_and_stays_at_the_end(
        corpus, tmp_path, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    assert t.main(arguments(data_dir=corpus, log_dir=tmp_path, num_layers=1)) == 0
    frames = [part for part in screen.getvalue().replace("\n", "\r").split("\r") if part.strip()]
    assert any(frame.startswith("step:2/4 val_loss:") for frame in frames)
    *_, place = [place for place, frame in enumerate(frames) if "%|" in frame]
    last_bar, below = frames[place : place + 2]
    assert last_bar.startswith("100%") and "4/4" in last_bar and "loss " in last_bar
    assert below.startswith("training "), "what came of the run stands below it"


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
