"""python -m records measure: runs of their own on one and two processes, and the table of what their logs say."""
import os
from pathlib import Path

import pytest
from conftest import arguments

from records import measure
from records.__main__ import main
from records.log import read_log


def test_it_runs_on_each_number_of_processes_and_its_table_says_what_the_logs_say(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("records.measure.SHORT", 2)
    keys = " ".join(arguments(data_dir=corpus, target_loss=0))
    status = main(["measure", str(tmp_path / "new"), "--gpus=1,2", "--seeds=0", "--limit=600", f"--keys={keys}"])
    out = capsys.readouterr().out
    table = [row.split(" | ") for row in out.splitlines() if row.startswith("| ")][2:]
    assert status == 0 and [row[:2] for row in table] == [
        ["| 2 steps, empty caches", "2"], ["| 2 steps", "1"]], out
    for number, row in enumerate(table):
        (path,) = tmp_path.glob(f"new/run_{number}/*.txt")
        log = read_log(path)
        assert len(log.environment["devices"]) == int(row[1])
        assert row[3:5] == [f"{log.end['train_time_s']:.2f}", f"{log.end['step_avg_ms']:.2f}"]
        assert row[-1] == f"{log.end['val_loss']:.4f} |"
    speeds = [float(row[5].replace(",", "")) for row in table]
    assert float(table[0][6]) == pytest.approx(speeds[0] / speeds[1], abs=2e-3) and table[1][6] == "1.000"


def test_all_seeds_run_on_most_gpus_before_a_short_run_on_each_number():
    tasks = measure.tasks_of([1, 4], 2, ["--preset=onepass"])
    assert [(task.name, task.gpus) for task in tasks] == [
        ("seed 1, empty caches", 4), ("seed 2", 4), ("64 steps", 4), ("64 steps", 1)]
    assert tasks[1].keys == ["--preset=onepass", "--seed=2"]


def test_what_no_run_would_accept_is_one_sentence_and_leaves_no_folder_and_a_folder_in_use_is_refused(tmp_path, capsys):
    keys = f"--preset=laptop --data_dir={tmp_path / 'none'}"
    assert main(["measure", str(tmp_path / "new"), f"--keys={keys}"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("refused: train_gpt.py: no train shards")
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").touch()
    assert main(["measure", str(tmp_path / "new")]) == 2
    assert "new: is no empty folder; name a new one." in capsys.readouterr().err


def test_a_run_that_takes_too_long_is_ended_with_all_its_processes(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("records.measure.SHORT", 10**6)
    name = f"too_long_{os.getpid()}"
    keys = " ".join(arguments(data_dir=corpus, epochs=10**6, run_name=name))
    main(["measure", str(tmp_path / "new"), "--gpus=1", "--seeds=0", "--limit=5", f"--keys={keys}"])
    assert "failed: it took more than 5 s" in capsys.readouterr().out
    running = [path for path in Path("/proc").glob("[0-9]*/cmdline") if name.encode() in read_bytes_of(path)
               and path.parent.name != str(os.getpid())]
    assert not running


def read_bytes_of(path):
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""
