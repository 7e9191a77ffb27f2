"""The writer of logs, records/journal.py.

References: the lines of a log, written out by hand, and for the files of a run the tree that the
test has made.
"""
import hashlib
import math
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from nanogpt.ranks import BadInput
from records import journal

SOURCE = b"print('a script')\n"
RULE = "=" * 100


def open_log(folder, log=None):
    log = log or journal.Log()
    run, config = {"run_id": "an-id", "git_clean": None}, {"log_dir": str(folder), "num_steps": 10}
    log.begin(SOURCE, dict(run=[run], file=[], config=[config], environment=[{}], data=[], stage=[]))
    return log


def lines_of(log):
    """The lines behind the source and the three facts of `open_log`."""
    lines = log.path.read_bytes().removeprefix(SOURCE).decode().splitlines()
    assert lines[:2] == [RULE, 'run {"run_id": "an-id", "git_clean": null}']
    return lines[4:]


def test_every_line_of_a_log_to_the_byte_and_at_once(tmp_path, capsys):
    log = journal.Log(tokens_are_bytes=True)
    log.fact("compile", {"what": "a graph"})  # before the log begins
    open_log(tmp_path, log)
    log.fact("note", "größer")
    log.step(0, 0.0, "val_loss", 10.82584)
    log.step(1, 0.17612, "train_loss", 10.8)
    log.step(3, 1.0006, "train_loss", math.nan)
    log.fact("defect", {"what": "tokens were lost"})
    log.end({"val_loss": 3.0, "reached": True, "mfu": None, "code_sha256": "ab"})
    log.fact("note", "what comes later is not in it")
    assert log.path.read_bytes().startswith(SOURCE) and lines_of(log) == [
        'compile {"what": "a graph"}',
        'note "gr\\u00f6\\u00dfer"',
        "step:0/10 val_loss:10.8258 train_time:0ms step_avg:nanms",
        "step:1/10 train_loss:10.8000 train_time:176ms step_avg:176.12ms",
        "step:3/10 train_loss:nan train_time:1001ms step_avg:333.53ms",
        'defect {"what": "tokens were lost"}',
        RULE, "val_loss: 3.0", "reached: true", "mfu: null", "code_sha256: ab"]
    assert capsys.readouterr().out.splitlines() == [
        "step:0/10 val_loss:10.8258 train_time:0ms step_avg:- bits_per_byte:15.6184",
        "warning: tokens were lost"]


def test_only_losses_that_are_asked_for_are_waited_for(tmp_path, monkeypatch):
    events = [SimpleNamespace(done=False, record=lambda: None) for _ in range(3)]
    for event in events:
        event.synchronize = lambda event=event: setattr(event, "done", True)
    waiting = iter(events)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(Event=lambda: next(waiting)))
    log = open_log(tmp_path)
    for step in (1, 2, 3):
        copy = lambda to, non_blocking, step=step: torch.tensor([float(step)])
        log.put(step, SimpleNamespace(is_cuda=True, device=torch.device("cuda"), to=copy), 0.1 * step)
    assert log.arrived(0) == []
    assert [step for step, _, _ in log.arrived(2)] == [1, 2] and log.arrived(2) == []
    assert [event.done for event in events] == [True, True, False]
    assert [line.split()[1] for line in lines_of(log)] == ["train_loss:1.0000", "train_loss:2.0000"]


def test_the_clock_waits_for_the_device_when_it_starts_and_when_it_stops(monkeypatch):
    device = mock.Mock()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    clock = journal.Clock(torch.device("cpu"))
    clock.start()
    clock.stop()
    assert device.synchronize.call_count == 2


def test_the_files_of_the_project_are_those_it_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "ROOT", tmp_path)
    contents = {
        "rooms/low/fp99.py": "Grüße\r\n".encode(), "rooms/__init__.py": b"",
        ".venv/lib/site-packages/a_library.py": b"x = 1\n", "train_gpt.py": b"x = 2\n",
        "many_seeds.py": b"x = 3\n", "not_imported.py": b"x = 4\n"}
    for path, content in contents.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
        if path != "not_imported.py":
            monkeypatch.setitem(sys.modules, path, SimpleNamespace(__file__=str(tmp_path / path)))
    files = journal.project_files(tmp_path / "train_gpt.py")
    paths = ["many_seeds.py", "rooms/__init__.py", "rooms/low/fp99.py"]
    assert [file["path"] for file in files] == paths
    for file in files:
        assert file["text"].encode() == contents[file["path"]]
        assert file["sha256"] == hashlib.sha256(contents[file["path"]]).hexdigest()


def test_a_run_has_the_sum_of_its_script_which_must_be_found_again_in_the_log():
    run = journal.describe_run("ß\n".encode())
    assert run["code_sha256"] == hashlib.sha256("ß\n".encode()).hexdigest() and run["code_bytes"] == 3
    with pytest.raises(BadInput, match="end the last line of train_gpt.py with a newline"):
        journal.describe_run(b"print(1)")


def test_a_commit_is_named_and_whether_files_that_it_has_were_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "ROOT", tmp_path)

    def git():
        run = journal.describe_run(SOURCE)
        return run["git_commit"], run["git_clean"]

    assert git() == (None, None)
    (tmp_path / "known.py").write_text("")
    for words in (["init", "-q"], ["add", "known.py"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "notes.txt").write_text("x")
    commit, is_clean = git()
    assert re.fullmatch("[0-9a-f]{40}", commit) and is_clean
    (tmp_path / "known.py").write_text("x = 1")
    assert git() == (commit, False)
    monkeypatch.setattr(journal, "ROOT", tmp_path / "again")  # the code of a log, inside of another repository
    journal.ROOT.mkdir()
    assert git() == (None, None)
