"""Runs that are saved, killed, ended by a signal, and resumed.

The reference is always the undisturbed run: its exact losses (from the JSON twin of its log) and its weights. Real
processes and signals where these are the point; elsewhere `main`, with a signal that is only noted.
"""
import dataclasses
import hashlib
import json
import os
import pickle
import pty
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import processes
import pytest
import torch
from conftest import ROOT, arguments, documents, write_shard
from processes import ENVIRONMENT, TORCHRUN, Process, run_ranks

import train_gpt as t
from data import shards
from nanogpt import fitting, saving, stopping
from nanogpt.ranks import REQUESTS, BadInput, Requests
from records.journal import TrainingLoss
from records.log import Refused, read_log, refuse_unfit_for_record

SAVED = {"save_every": 60, "num_steps": 6, "target_loss": 0, "val_interval": 2, "jsonl": True,
         "dtype": "float32", "candidates": 256, "micro_tokens": 256}
DRIVER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import train_gpt as t
t.STOP.listen()
inner = t.train_step
def train_step(model, optimizer, batch, step, *rest, **named):
    if t.STOP.in_steps and step == 2 and os.environ.get("RANK", "0") == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGTERM)
    return inner(model, optimizer, batch, step, *rest, **named)
t.train_step = train_step
sys.exit(t.main(sys.argv[3:]))
"""


def options(corpus, folder, **changes):
    return arguments(**SAVED | dict(data_dir=corpus, log_dir=folder, save_checkpoint=folder / "model.pt") | changes)


def by_minutes(argv):
    """Without the number of steps, which --minutes chooses."""
    return [word for word in argv if not word.startswith("--num_steps")]


def run(argv, stop_after=None):
    """`main` in this process; the status. `stop_after`: a signal comes in this step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(t, "STOP", stopping.Stop())
        inner = t.train_step

        def train_step(model, optimizer, batch, step, *rest, **named):
            if t.STOP.in_steps and step + 1 == stop_after:
                t.STOP.signal = "SIGINT"
            return inner(model, optimizer, batch, step, *rest, **named)

        patch.setattr(t, "train_step", train_step)
        return t.main([str(word) for word in argv])


def start(*command, **options):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=100,
                          env=ENVIRONMENT, cwd=ROOT, **options)


def torchrun(*command):
    return processes.run(*TORCHRUN, "--nproc_per_node=2", *command)


def last_log(folder):
    return max(folder.glob("*.txt"), key=lambda path: path.stat().st_mtime_ns)


def steps(folder):
    """All losses of the newest log, with every digit."""
    lines = [json.loads(line) for line in last_log(folder).with_suffix(".jsonl").read_text().splitlines()]
    return [(x["step"], x.get("train_loss"), x.get("val_loss")) for x in lines if x["kind"] == "step"]


def weights(folder):
    return torch.load(folder / "model.pt", weights_only=True)["weights"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().amax().item() for name in a if a[name].numel())


def the_save(folder):
    (path,) = folder.glob("*.saved/step_*")
    return path


# ---------------------------------------------------------------------------------------------------- the same run


STAGES = {"schedule": "speedrun", "num_steps": 9, "batch_tokens": 1536}


@pytest.mark.parametrize("changes, stop_after", [
    ({}, 3), ({"dtype": "auto", "precision": "bf16", "num_steps": 3}, 2), ({"precision": "fp16", "dtype": "auto"}, 3), (STAGES, 4),
    ({"precision": "fp8", "dtype": "auto", "num_steps": 3}, 2), ({"precision": "nvfp4", "num_steps": 2}, 1),
    ({"num_layers": 5, "model_dim": 64, "num_heads": 4, "head_dim": 8, "candidates": 0, "num_steps": 4}, 3),
], ids=["float32", "bf16", "fp16", "stages", "fp8", "nvfp4", "gpt2"])
def test_a_resumed_run_is_to_the_bit_the_run_that_was_not_stopped(changes, stop_after, corpus, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(options(corpus, whole, **changes)) == 0
    assert run(options(corpus, parts, **changes), stop_after) == 130
    assert run(["--resume", f"--log_dir={parts}"]) == 0
    assert steps(parts) == steps(whole) and same(weights(whole), weights(parts))
    notes = [[note for note in read_log(last_log(folder)).values("note") if "skipped" in note or "sent" in note]
             for folder in (whole, parts)]
    assert notes[0] == notes[1] and len(notes[0]) == 1 + (changes.get("precision") == "fp16")


def test_the_log_of_a_resumed_run_is_read_and_is_no_record(corpus, tmp_path):
    run(options(corpus, tmp_path, target_loss=1), 3)
    first = read_log(last_log(tmp_path))
    save = the_save(tmp_path)
    run(["--resume", f"--log_dir={tmp_path}"])
    log = read_log(last_log(tmp_path))
    assert first.interrupted and first.end["interrupted"] and [s.step for s in first.steps] == [0, 1, 2, 2, 3]
    assert first.end["val_loss"] == first.validations[-1].loss and first.end["tokens"] == 3 * 1024
    assert log.resumed and not log.interrupted and log.config["resume"] == str(save)
    assert any(note.startswith(f"resumed at step 3 of run {first.run['run_id']} on ") for note in log.values("note"))
    assert [(s.step, s.loss) for s in log.steps[:5]] == [(s.step, s.loss) for s in first.steps]
    assert log.steps[5].time_ms > first.steps[-1].time_ms, "the clock goes on"
    assert log.end["tokens"] == 6 * 1024
    for path in tmp_path.glob("*.txt"):
        with pytest.raises(Refused, match="resumed|interrupted"):
            refuse_unfit_for_record(read_log(path))


def test_two_ranks_go_on_to_the_bit_and_one_may_go_on_with_what_two_have_saved(corpus, tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = {"num_steps": 8, "candidates": 256, "head_every_second": True}
    assert [rank.returncode for rank in run_ranks(2, "train_gpt.py", *options(corpus, whole, **changes))] == [0, 0]
    stopped = torchrun(driver, ROOT, 1, *options(corpus, parts, **changes))  # the signal comes to rank 1 only
    assert "exitcode: 143" in stopped.stderr.replace("exitcode  : 143", "exitcode: 143"), stopped.stderr
    assert "stopped by SIGTERM after step" in stopped.stdout and "Error:" not in stopped.stderr.split("ChildFailed")[0]
    assert "-m torch.distributed.run --standalone --nproc_per_node=2 train_gpt.py --resume=" in stopped.stdout
    assert read_log(last_log(parts)).end["interrupted"]
    assert len(list(the_save(parts).iterdir())) == 4
    assert saving.step_of(the_save(parts)) % 2 == 0, "no gradient of the head waits for the next step"
    other = tmp_path / "other"
    shutil.copytree(parts, other)
    for again in run_ranks(2, "train_gpt.py", "--resume", f"--log_dir={parts}"):
        assert again.returncode == 0, again.stderr
    assert steps(parts) == steps(whole) and same(weights(whole), weights(parts))
    assert run([f"--resume={the_save(other)}", f"--log_dir={other}", f"--save_checkpoint={other / 'model.pt'}"]) == 0
    assert steps(other)[-1][0] == 8 and steps(other)[-1][2] == pytest.approx(steps(whole)[-1][2], abs=0.1)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_within_rounding(ranks, corpus, tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = {"candidates": 0, "dtype": "float64", "val_interval": 0, "num_steps": 8, "ngram_rows": 501}
    assert run(options(corpus, whole, **changes)) == 0
    if ranks[0] == 2:
        run_ranks(2, driver, ROOT, 0, *options(corpus, parts, **changes))
        assert run(["--resume", f"--log_dir={parts}"]) == 0
    else:
        run(options(corpus, parts, **changes), 4)
        for again in run_ranks(2, "train_gpt.py", "--resume", f"--log_dir={parts}"):
            assert again.returncode == 0, again.stderr
    expected = [loss or val for _, loss, val in steps(whole)]
    assert [loss or val for _, loss, val in steps(parts)] == pytest.approx(expected, rel=1e-9)
    assert distance(weights(whole), weights(parts)) < 1e-9


GPU = {"device": "cuda", "attention": "sdpa", "dtype": "auto", "num_steps": 8}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compile", [False, True])
def test_a_run_on_a_gpu_goes_on_with_its_random_numbers(compile, corpus, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = GPU | {"compile": compile}
    assert start("train_gpt.py", *options(corpus, whole, **changes)).returncode == 0
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    assert start(driver, ROOT, 0, *options(corpus, parts, **changes)).returncode == 143
    assert start("train_gpt.py", "--resume", f"--log_dir={parts}").returncode == 0
    for (_, *expected), (_, *found) in zip(steps(whole), steps(parts), strict=True):
        assert [x or 0 for x in found] == pytest.approx([x or 0 for x in expected], abs=2e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_stop_save_and_go_on_together(corpus, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    changes = GPU | {"compile": False, "save_every": 0.0005, "num_steps": 30}
    assert torchrun("train_gpt.py", *options(corpus, whole, **changes)).returncode == 0
    torchrun(driver, ROOT, 1, *options(corpus, parts, **changes))
    assert read_log(last_log(parts)).end["interrupted"]
    again = torchrun("train_gpt.py", "--resume", f"--log_dir={parts}")
    assert again.returncode == 0, again.stderr
    for (_, *expected), (_, *found) in zip(steps(whole), steps(parts), strict=True):
        assert [x or 0 for x in found] == pytest.approx([x or 0 for x in expected], abs=1e-2)


def test_what_may_change_does(corpus, tmp_path):
    whole, parts, data = tmp_path / "whole", tmp_path / "parts", tmp_path / "data"
    shutil.copytree(corpus, data)
    run(options(corpus, whole, candidates=0, dtype="float64"))
    run(options(corpus, parts, candidates=0, dtype="float64"), 3)
    changes = ["--micro_tokens=512", "--val_interval=0", f"--data_dir={data}", "--save_every=0", "--run_name=other"]
    assert run(["--resume", f"--log_dir={parts}", *changes]) == 0
    config = read_log(last_log(parts)).config
    assert (config["micro_tokens"], config["val_interval"], config["run_name"]) == (512, 0, "other")
    assert distance(weights(whole), weights(parts)) < 1e-9


def test_a_fitted_run_goes_on_with_any_micro_tokens_that_hold_a_sequence(corpus, tmp_path, capfd):
    keys = dict(fit=True, num_steps=4, micro_tokens=500, seq_len=256, log_dir=tmp_path / "whole", candidates=0)
    run(options(corpus, tmp_path, **keys))
    assert run(options(corpus, tmp_path, **keys | {"log_dir": tmp_path}), 2) == 130
    again = ["--resume", f"--log_dir={tmp_path}"]
    sentence = refused(capfd, [*again, "--micro_tokens=255"])
    assert "--micro_tokens=255 must be at least 256, the tokens of a sequence" in sentence
    assert run([*again, "--micro_tokens=300"]) == 0
    assert steps(tmp_path) == steps(tmp_path / "whole")


def test_a_resumed_run_may_be_stopped_too_and_keeps_the_name_of_its_checkpoint(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(options(corpus, tmp_path, save_checkpoint="auto"), 3)
    assert run(["--resume", f"--log_dir={tmp_path}"], 5) == 130
    assert "step_000005" in capsys.readouterr().out.splitlines()[-1]
    assert run(["--resume", f"--log_dir={tmp_path}", "--save_checkpoint="], 6) == 0
    (path,) = (tmp_path / "models").iterdir()
    assert torch.load(path, weights_only=True)["step"] == 4, "the best one of the run that was stopped"
    assert [(step, val is None) for step, _, val in steps(tmp_path)] == [
        (0, False), (1, True), (2, True), (2, False), (3, True), (4, True), (4, False), (5, True), (6, True), (6, False)]


def test_the_number_of_steps_that_minutes_gave_stays(corpus, tmp_path):
    command = by_minutes(options(corpus, tmp_path, minutes=0.2, epochs=1000))
    assert run(command, 2) == 130
    num_steps = read_log(last_log(tmp_path)).config["num_steps"]
    assert run([*command, "--resume"], 3) == 130
    config = read_log(last_log(tmp_path)).config
    assert config["num_steps"] == num_steps != 6 and config["minutes"] == 0.2


# ---------------------------------------------------------------------------------------------------- killed


def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(corpus, tmp_path):
    """Killed up to three times, at most five steps after a new save: a run of 25 steps has not ended by then."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = dict(num_steps=25, val_interval=10, save_every=0, save_steps=1, epochs=100)
    assert run(options(corpus, whole, **changes)) == 0
    seconds_per_step = read_log(last_log(whole)).steps[-1].time_ms / 1000 / 25
    draw = random.Random(int(os.environ.get("SEED", 0)))
    statuses = []
    for _ in range(3):
        before = {path for path in parts.glob("*.saved/step_*") if ".unf" not in path.name}
        process = Process("train_gpt.py", *options(corpus, parts, **changes), "--resume")
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if {path for path in parts.glob("*.saved/step_*") if ".unf" not in path.name} - before:
                time.sleep(draw.uniform(0, 5 * seconds_per_step))
                break
            time.sleep(0.005)
        process.kill()
        statuses.append(process.wait())
        if statuses[-1] == 0:  # a slow machine has let the run come to its end
            break
    assert statuses[0] == -signal.SIGKILL and statuses[-1] in (0, -signal.SIGKILL), process.err()
    assert run([*options(corpus, parts, **changes), "--resume"]) == 0
    assert steps(parts) == steps(whole) and same(weights(whole), weights(parts))
    assert all(len(saving.saves_in(folder)) <= saving.KEPT for folder in parts.glob("*.saved"))
    with pytest.raises(BadInput, match=r"has come to its end; give --resume=\S+step_0000\d\d to go on .* once more"):
        saving.find(saving.NEWEST, parts)
    with pytest.raises(BadInput, match="has come to its end"):
        saving.find(saving.NEWEST, parts, {"num_steps": 25, "data_dir": str(corpus)}, t.MAY_CHANGE)
    for other in ({"data_dir": "data/other"}, {"run_name": "second"}):
        assert saving.find(saving.NEWEST, parts, other, t.MAY_CHANGE) is None
    assert saving.find(saving.NEWEST, parts, {"seed": 77}, t.MAY_CHANGE) is None, "another run may begin"


def test_leftovers_are_ignored_and_swept_and_the_last_two_saves_are_kept(corpus, tmp_path, monkeypatch):
    counts = []
    end = saving.Saver.end
    monkeypatch.setattr(saving.Saver, "end", lambda self: (
        self.finish(), counts.append(sorted(path.name for path in self.folder.glob("step_*"))), end(self)))
    due = [2, 3, 5]
    monkeypatch.setattr(saving.Saver, "due", lambda self, step, seconds: len(due) > 0 and due.pop(0) >= 0)
    left = []
    write = saving.Saver.write

    def write_among_leftovers(self, step, content):
        (self.folder / "step_000001.unfinished").mkdir(parents=True)
        left.append(saving.saves_in(self.folder))
        write(self, step, content)

    monkeypatch.setattr(saving.Saver, "write", write_among_leftovers)
    assert run(options(corpus, tmp_path)) == 0
    assert counts == [["step_000001", "step_000002"]] and [len(saves) for saves in left] == [0, 1, 2]
    assert not list(tmp_path.glob("*.saved")), "the saves of a run that has come to its end are removed"


def test_a_run_that_is_killed_before_an_old_save_is_removed_keeps_two_in_the_end(corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as killed:
        due = [2, 3, 5]
        killed.setattr(saving.Saver, "due", lambda self, step, seconds: len(due) > 0 and due.pop(0) >= 0)
        killed.setattr(saving, "keep_newest", lambda folder: None)
        killed.setattr(saving.Saver, "end", lambda self: self.finish())
        assert run(options(corpus, tmp_path)) == 0
    (folder,) = tmp_path.glob("*.saved")
    three = saving.saves_in(folder)
    assert len(three) == 3
    assert run(["--resume", f"--log_dir={tmp_path}"]) == 0
    assert saving.saves_in(folder) == three[1:]


def test_a_run_that_is_killed_while_an_old_save_is_removed_goes_on_from_the_newest(corpus, tmp_path, monkeypatch):
    """The kill is a file of the old save that is gone while the others are still there."""
    due = [2, 3, 5]
    monkeypatch.setattr(saving.Saver, "due", lambda self, step, seconds: len(due) > 0 and due.pop(0) >= 0)
    killed = []

    def remove_one_file(folder, ignore_errors=False):
        if "step_" in str(folder):
            killed.append(folder)
            next(folder.glob("*.sha256")).unlink()

    monkeypatch.setattr(shutil, "rmtree", remove_one_file)
    monkeypatch.setattr(saving.Saver, "end", lambda self: self.finish())
    assert run(options(corpus, tmp_path)) == 0
    assert killed
    newest = saving.find(saving.NEWEST, tmp_path)
    assert newest.name == f"step_{max(saving.step_of(path) for path in newest.parent.glob('step_??????')):06}"
    assert saving.Saved(newest).step == saving.step_of(newest)
    for save in saving.saves_in(newest.parent):
        saving.Saved(save)


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.fixture(scope="module")
def stopped(corpus, tmp_path_factory):
    """The folder of a run that was stopped after step 3."""
    folder = tmp_path_factory.mktemp("stopped")
    assert run(options(corpus, folder), 3) == 130
    return folder


def refused(capfd, argv):
    status = run(argv)
    _, err = capfd.readouterr()
    assert status == 2 and err.count("\n") == 1 and err.startswith("train_gpt.py: "), err
    return err


@pytest.mark.parametrize("change, part", [
    (["--num_steps=7"], "--num_steps=7 (saved: 6)"), (["--seed=1", "--muon_lr=0.5"], "--seed=1 (saved: 0), --muon_lr"),
    (["--preset=char"], "--preset=char (saved: laptop)"), (["--device=tpu"], "--device=tpu is none of"),
    (["--save_every=-1"], "--save_every=-1"), (["--batch_tokens=2048"], "--batch_tokens=2048 (saved: 1024)"),
])
def test_what_may_not_change_is_named(change, part, stopped, capfd):
    assert part in refused(capfd, ["--resume", f"--log_dir={stopped}", *change])


def test_other_data_are_refused(stopped, corpus, tmp_path, capfd):
    for path in corpus.iterdir():
        shutil.copy(path, tmp_path)
    write_shard(tmp_path / "fineweb_train_000002.bin", documents(6000, 9))
    sentence = refused(capfd, [f"--resume={the_save(stopped)}", f"--data_dir={tmp_path}"])
    assert str(tmp_path) in sentence and "--data_dir" in sentence


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/a_stranger_was_here",)


def damage(save, how):
    part = save / "rank_0_of_1.pt"
    if how == "flipped":
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
    elif how == "cut":
        part.write_bytes(part.read_bytes()[:5000])
    elif how == "no file":
        part.unlink()
    elif how == "no sum":
        part.with_suffix(".sha256").unlink()
    elif how == "no text as sum":
        part.with_suffix(".sha256").write_bytes(b"\xff\xfe")
    elif how == "a pickle":
        part.write_bytes(pickle.dumps(Evil()))
    elif how == "two":
        shutil.copy(part, save / "rank_0_of_2.pt")
    else:
        content = torch.load(part, weights_only=True)
        if how == "other config":
            content["facts"]["config"] = {"num_steps": "many"}
        elif how == "other weights":
            content["tensors"]["qkvo.master"] = content["tensors"]["qkvo.master"][:-1].clone()
        elif how == "no weights":
            content["tensors"] = {}
        elif how == "checkpoint":
            content = {"config": {}, "weights": {}, "step": 1}
        torch.save(content, part)
        digest = hashlib.sha256(part.read_bytes()).hexdigest()
        part.with_suffix(".sha256").write_text(f"{digest}  {part.name}\n")


def rewrite(save, change):
    """Makes a save what a stranger might have written: `change` gets its content."""
    part = save / "rank_0_of_1.pt"
    content = torch.load(part, weights_only=True)
    change(content)
    torch.save(content, part)
    digest = hashlib.sha256(part.read_bytes()).hexdigest()
    part.with_suffix(".sha256").write_text(f"{digest}  {part.name}\n")


zeros = partial(torch.zeros, dtype=torch.int64)

FOREIGN = {  # what a stranger's save may hold, and what the sentence says
    "large": (lambda content: content["tensors"].update(a=torch.ones(1).expand(2**40)), "damaged or no save"),
    "large, hidden": (lambda content: content["facts"].update(steps=[torch.ones(1).expand(2**40)]), "damaged or no"),
    "facts": (lambda content: content["facts"].update(updates="many"), "updates is 'many'"),
    "a weight more": (lambda content: content["tensors"].update({"smear.master": torch.ones(1)}), "other code, as smear.master differ"),
    "a weight less": (lambda content: content["tensors"].pop("gates.mean"), "other code, as gates.mean differ"),
    "wider weights": (lambda content: content["tensors"].update({"mlp.master": torch.ones(8, 32, 65)}), "as mlp.master differ"),
    "more rows": (lambda content: content["tensors"].update({"ngrams.mean": torch.ones(501, 16)}), "as ngrams.mean differ"),
    "wider rows": (lambda content: content["tensors"].update({"ngrams.mean": torch.ones(500, 17)}), "as ngrams.mean differ"),
    "more matrices": (lambda content: content["tensors"].update({"mlp.master": torch.ones(9, 32, 64)}), "as mlp.master differ"),
    "fewer counts": (lambda content: content["tensors"].update({"target_counts": torch.ones(3)}), "as target_counts differ"),
    "more to recall": (lambda content: content["tensors"].update({"recall_table": zeros(1001)}), "as recall_table differ"),
    "recalled numbers": (lambda content: content["tensors"].update({"recall_table": torch.ones(1000)}), "as recall_table differ"),
    "a wide table": (lambda content: content["tensors"].update({"recall_table": zeros(10, 100)}), "as recall_table differ"),
    "a number": (lambda content: content["tensors"].update({"ngrams.mean": torch.ones(())}), "as ngrams.mean differ"),
    "another gate": (lambda content: content["tensors"].update({"gates.mean": torch.ones(4, 2, 2, 13)}), "as gates.mean differ"),
    "no tensor": (lambda content: content["tensors"].update({"gates.mean": "wide"}), "lacks gates.mean"),
    "random": (lambda content: content["random"].update(cpu=torch.ones(3)), "random numbers"),
    "config": (lambda content: content["facts"]["config"].update(num_steps=10**400), "num_steps is 1000000"),
}


@pytest.mark.parametrize("how", FOREIGN)
def test_the_save_of_a_stranger_is_data_that_is_checked(how, stopped, tmp_path, capfd, monkeypatch):
    if how not in ("facts", "random"):
        monkeypatch.setattr(t, "warm_up_of", lambda *_: pytest.fail("it is refused before anything is compiled"))
    folder = tmp_path / "x.saved" / "step_000003"
    shutil.copytree(the_save(stopped), folder)
    change, part = FOREIGN[how]
    rewrite(folder, change)
    sentence = refused(capfd, [f"--resume={folder}", "--save_checkpoint="])
    assert str(folder) in sentence and part in sentence and "leave --resume out" in sentence


def test_a_save_that_is_named_from_inside_of_its_folder_goes_on_with_its_run(stopped, tmp_path, monkeypatch):
    logs = tmp_path / "logs"
    shutil.copytree(stopped, logs)
    save = the_save(logs)
    monkeypatch.chdir(save.parent)
    assert run([f"--resume={save.name}", "--save_checkpoint="]) == 0
    assert len([*logs.glob("*.txt")]) == 2 and not (save.parent / "logs").exists()


def test_no_path_in_a_save_is_written_to(stopped, corpus, tmp_path, capfd):
    elsewhere = tmp_path / "elsewhere"
    folder = tmp_path / "logs" / "x.saved" / "step_000003"
    shutil.copytree(the_save(stopped), folder)
    (elsewhere / "old.saved").mkdir(parents=True)
    (tmp_path / "logs" / "old.saved").mkdir()

    def name_paths(content):
        content["facts"]["came_from"] = [str(elsewhere / "old.saved"), "..", str(elsewhere)]
        content["facts"]["checkpoint"] = str(elsewhere / "auto.pt")
        content["facts"]["config"] |= {"log_dir": str(elsewhere), "save_checkpoint": str(elsewhere / "model.pt")}

    rewrite(folder, name_paths)
    assert f"would write weights to {elsewhere}/model.pt" in refused(capfd, [f"--resume={folder}"])
    assert f"would write weights to {elsewhere}/auto.pt" in refused(
        capfd, [f"--resume={folder}", "--save_checkpoint=auto"])
    assert run([f"--resume={folder}", f"--save_checkpoint={tmp_path / 'mine.pt'}"]) == 0
    assert [*elsewhere.rglob("*")] == [elsewhere / "old.saved"] and not (tmp_path / "finished").exists()
    assert last_log(tmp_path / "logs") and (tmp_path / "mine.pt").exists()
    assert [path.parent.name for path in sorted(tmp_path.rglob("finished"))] == ["old.saved", "x.saved"]


def test_weights_may_go_on_to_another_disk_by_a_link_of_the_users_own(tmp_path, monkeypatch):
    save = tmp_path / "logs" / "x.saved" / "step_000003"
    (tmp_path / "here").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "here" / "models").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path / "here")
    assert saving.is_near(save, "models/a.pt") and saving.is_near(save, str(tmp_path / "here" / "models" / "a.pt"))
    assert saving.is_near(save, "auto") and saving.is_near(save, str(tmp_path / "logs" / "a.pt"))
    for far in ("models/../a.pt", "../a.pt", str(tmp_path / "disk" / "a.pt")):
        assert not saving.is_near(save, far), far
    save = tmp_path / "here" / "logs" / "x.saved" / "step_000003"
    save.parent.mkdir(parents=True)
    (save.parent / "out").symlink_to(tmp_path / "disk")
    assert not saving.is_near(save, str(save.parent / "out" / "a.pt")), "the link of a stranger's save"


def test_a_save_of_other_data_is_refused_for_the_data_even_if_they_are_too_few(stopped, tmp_path, capfd):
    write_shard(tmp_path / "fineweb_train_000000.bin", documents(300))
    write_shard(tmp_path / "fineweb_val_000000.bin", documents(100))
    sentence = refused(capfd, [f"--resume={the_save(stopped)}", f"--data_dir={tmp_path}"])
    assert f"the shards in {tmp_path} are not those of {the_save(stopped)}" in sentence and "--data_dir" in sentence


@pytest.mark.parametrize("how", ["flipped", "cut", "no file", "no sum", "no text as sum", "a pickle", "two", "other config",
                                 "other weights", "no weights", "checkpoint"])
def test_a_damaged_or_foreign_save_is_one_sentence(how, stopped, tmp_path, capfd):
    folder = tmp_path / "x.saved" / "step_000003"
    shutil.copytree(the_save(stopped), folder)
    damage(folder, how)
    sentence = refused(capfd, [f"--resume={folder}", f"--log_dir={tmp_path / 'logs'}", "--save_checkpoint="])
    assert str(folder) in sentence and "leave --resume out" in sentence
    assert not os.path.exists("/tmp/a_stranger_was_here")


@pytest.mark.parametrize("path", ["/nowhere", "/nowhere/step_000001", "/dev/null"])
def test_a_save_that_is_not_there_is_refused(path, capfd):
    assert f"--resume={path} " in refused(capfd, arguments(resume=path))


def test_unfinished_folders_are_no_saves(stopped, tmp_path, capfd):
    folder = tmp_path / "x.saved"
    shutil.copytree(the_save(stopped), folder / "step_000003.unfinished")
    assert saving.find(saving.NEWEST, tmp_path) is None
    refused(capfd, [f"--resume={folder}"])
    refused(capfd, [f"--resume={folder / 'step_000003.unfinished'}"])
    os.rename(folder / "step_000003.unfinished", folder / "step_000003")
    assert saving.find(saving.NEWEST, tmp_path) == saving.find(str(folder), "") == folder / "step_000003"


def test_of_two_runs_in_one_folder_each_finds_its_own_save(stopped, tmp_path):
    for number, seed in enumerate((0, 1)):
        folder = tmp_path / f"{seed}.saved" / "step_000003"
        shutil.copytree(the_save(stopped), folder)
        rewrite(folder, lambda content, seed=seed: content["facts"]["config"].update(seed=seed, run_name=f"run {seed}"))
        os.utime(folder, (10**9 + number, 10**9 + number))
    newest = tmp_path / "1.saved" / "step_000003"
    found = [saving.find(saving.NEWEST, tmp_path, given, t.MAY_CHANGE) for given in (
        {}, {"seed": 1}, {"seed": 0}, {"run_name": "another", "resume": saving.NEWEST})]
    older = tmp_path / "0.saved" / "step_000003"
    assert found == [newest, newest, older, newest]
    with pytest.raises(BadInput, match=r"can go on with --seed=2 \(saved: 1\); the newest one is .*/1.saved/step_000003, of "):
        saving.find(saving.NEWEST, tmp_path, {"seed": 2}, t.MAY_CHANGE)
    for part in newest.glob("*.pt"):
        part.write_bytes(b"")  # what another run has damaged hinders nobody
    assert saving.find(saving.NEWEST, tmp_path, {"seed": 0}, t.MAY_CHANGE) == older
    with pytest.raises(BadInput):
        saving.find(saving.NEWEST, tmp_path, {"run_name": "another"}, t.MAY_CHANGE)
    os.utime(newest, (10**9 - 1, 10**9 - 1))
    assert saving.find(saving.NEWEST, tmp_path, {"run_name": "another"}, t.MAY_CHANGE) == older, "now it is the newer one"


def test_a_run_that_is_still_going_on_is_not_resumed(stopped, tmp_path):
    alive, ended = tmp_path / "alive.saved", tmp_path / "ended.saved"
    shutil.copytree(the_save(stopped), alive / "step_000004")
    lock = saving.hold(alive)
    assert saving.hold(alive) is None and saving.is_running(alive) and not saving.is_running(ended)
    with pytest.raises(BadInput, match="alive.saved is still going on; end it before .*=.*step_000004 to go on from there"):
        saving.find(saving.NEWEST, tmp_path)
    assert saving.find(saving.NEWEST, tmp_path, {"seed": 77}, t.MAY_CHANGE) is None, "another run hinders nobody"
    shutil.copytree(the_save(stopped), ended / "step_000003")
    os.utime(ended / "step_000003", (10**9, 10**9))
    assert saving.find(saving.NEWEST, tmp_path) == ended / "step_000003", "though the other one is newer"
    rewrite(ended / "step_000003", lambda content: content["facts"]["config"].update(seed=5))
    with pytest.raises(BadInput, match="alive.saved is still going on"):
        saving.find(saving.NEWEST, tmp_path, {"seed": 0}, t.MAY_CHANGE)
    os.utime(ended / "step_000003", (10**9, 10**9))
    lock.close()  # as when its process ends
    assert saving.find(saving.NEWEST, tmp_path) == alive / "step_000004"


def test_a_damaged_save_of_a_run_that_is_going_on_hinders_nobody(stopped, tmp_path):
    shutil.copytree(the_save(stopped), tmp_path / "alive.saved" / "step_000004")
    lock = saving.hold(tmp_path / "alive.saved")
    for part in tmp_path.rglob("*.pt"):
        part.write_bytes(b"")
    assert saving.find(saving.NEWEST, tmp_path, {"seed": 77}, t.MAY_CHANGE) is None
    lock.close()


def test_a_run_holds_its_folder_from_its_first_save_on(tmp_path):
    tensors = {"a": torch.zeros(2)}
    saver = saving.Saver(tmp_path / "x.saved", 0.0, 1, tensors, [], 0.0, 0)
    saver.save(1, 1.0, tensors, {}, {})
    saver.finish()
    assert saving.is_running(tmp_path / "x.saved")
    later = saving.Saver(tmp_path / "y.saved", 0.0, 1, tensors, [str(tmp_path / "x.saved")], 1.0, 1)
    for lock in saver.locks:
        lock.close()
    assert not saving.is_running(tmp_path / "x.saved"), "its run lived when the later one began"
    later = saving.Saver(tmp_path / "y.saved", 0.0, 1, tensors, [str(tmp_path / "x.saved")], 1.0, 1)
    assert saving.is_running(tmp_path / "x.saved"), "or --resume alone would go on from there once more"
    without_saves = saving.Saver(tmp_path / "z.saved", 0.0, 0, tensors, [str(tmp_path / "x.saved")], 1.0, 1)
    assert without_saves.locks == [None], "it asks for the lock, too, which `later` has"
    later.save(2, 2.0, tensors, {}, {})
    later.end()
    assert not (tmp_path / "y.saved").exists() and not saving.is_running(tmp_path / "x.saved")
    assert (tmp_path / "x.saved" / saving.FINISHED).exists()


def test_where_a_save_is_damaged_an_older_one_is_named(stopped, tmp_path, capfd):
    folder = tmp_path / "x.saved"
    for step in (2, 3):
        shutil.copytree(the_save(stopped), folder / f"step_{step:06}")
    for part in (folder / "step_000003").glob("*.sha256"):
        part.unlink()
    said = refused(capfd, [f"--resume={folder}"])
    assert "is missing, so the save is not whole" in said and f"give --resume={folder / 'step_000002'}, or leave" in said


def saves_with(folder, stopped, *configs):
    """Copies of a save with these values in their configurations, each newer than the one before."""
    paths = []
    for number, values in enumerate(configs):
        paths.append(folder / f"{number}.saved" / "step_000003")
        shutil.copytree(the_save(stopped), paths[-1])
        rewrite(paths[-1], lambda content, values=values: content["facts"]["config"].update(values))
        os.utime(paths[-1], (10**9 + number, 10**9 + number))
    return paths


def test_a_command_that_leaves_a_key_out_finds_the_run_that_had_left_it_out_too(stopped, tmp_path):
    plain, changed = saves_with(tmp_path, stopped, {"muon_lr": 0.02}, {"muon_lr": 0.5})
    for new, expected in ((0.02, plain), (0.5, changed), (0.1, changed)):
        found = saving.find(saving.NEWEST, tmp_path, {"seed": 0}, t.MAY_CHANGE, {"seed": 0, "muon_lr": new})
        assert found == expected
    assert saving.find(saving.NEWEST, tmp_path, {"jsonl": True}, t.MAY_CHANGE, {"muon_lr": 0.02}) == changed


def test_of_runs_on_several_texts_the_command_with_a_text_finds_its_own(stopped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = saves_with(tmp_path, stopped, {"data_dir": "data/a"}, {"data_dir": str(tmp_path / "data/b")})
    for asked, expected in (("data/a/", a), ("data/b", b), ("data/moved", b)):
        assert saving.find(saving.NEWEST, tmp_path, {"data_dir": asked}, t.MAY_CHANGE, {}) == expected


def test_a_fitted_run_goes_on_by_the_command_that_it_was_started_with(corpus, tmp_path, capsys):
    command = [*by_minutes(options(corpus, tmp_path)), "--minutes=0", "--fit", "--val_tokens=30000", "--epochs=1"]
    assert run(command, 2) == 130
    assert read_log(last_log(tmp_path)).config["val_tokens"] < 30000
    assert run([*command, "--resume"]) == 0, capsys.readouterr().err
    assert "resumed at step 2" in capsys.readouterr().out


def test_a_run_that_goes_on_from_a_copied_save_removes_nothing_beside_it(corpus, tmp_path):
    assert run(options(corpus, tmp_path / "a"), 3) == 130
    copy = tmp_path / "keep" / "step_000003"
    shutil.copytree(the_save(tmp_path / "a"), copy)
    others = [copy.with_name(name) for name in ("step_000001", "step_000002", "thesis.unfinished")]
    for path in others:
        path.mkdir()
    assert run([f"--resume={copy}"]) == 0
    assert all(path.is_dir() for path in (copy, *others)) and not (copy.parent / saving.FINISHED).exists()


@pytest.mark.parametrize("losses, advises", [([2.0, 1.0, 1.5], False), ([2.0, 1.0, 1.005], True), ([3.0, 2.0, 1.0], True)])
def test_a_longer_run_is_advised_only_if_this_one_has_not_overfitted(losses, advises, corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(t, "validate", lambda model, tokens, step: losses.pop(0))
    monkeypatch.setattr(fitting, "option_for_longer", lambda c, seconds: "--minutes=9")
    command = [*by_minutes(options(corpus, tmp_path, val_interval=2, epochs=100)), "--minutes=0.01"]
    monkeypatch.setattr(fitting, "fit_to_minutes", lambda c, *_: dataclasses.replace(c, num_steps=4))
    assert run(command) == 0
    assert ("--minutes=9" in capsys.readouterr().out) == advises


def test_a_run_whose_copy_has_ended_is_found_again_after_its_next_save(tmp_path):
    folder = tmp_path / "x.saved"
    folder.mkdir()
    (folder / saving.FINISHED).touch()  # as of a copy that went on from a save here
    saver = saving.Saver(folder, 1.0, 0, {}, [], seconds=0.0, step=0)
    saver.save(5, 0.0, {}, {}, {"config": {}})
    saver.finish()
    for lock in saver.locks:
        lock.close()  # as at the end of its process
    assert saving.find(saving.NEWEST, tmp_path) == folder / "step_000005"


def test_resume_with_an_empty_name_is_refused_as_a_new_run_would_not_be_meant():
    with pytest.raises(BadInput, match="--resume= is empty; name a save, or give --resume alone"):
        t.parse_config(["--preset=laptop", "--resume="])


def test_without_a_save_resume_alone_begins_anew_and_says_so(corpus, tmp_path, capsys):
    assert run([*by_minutes(options(corpus, tmp_path, minutes=0.01, epochs=100)), "--resume"]) == 0
    assert f"no save under {tmp_path}" in capsys.readouterr().out
    log = read_log(last_log(tmp_path))
    assert not log.resumed and not log.interrupted and log.config["resume"] == ""
    assert any("begins at step 0" in note for note in log.values("note"))


def test_a_full_disk_is_one_sentence_and_the_run_goes_on(corpus, tmp_path):
    limit = 2**21  # bytes of a file: enough for a log, too few for a save
    found = start("train_gpt.py", *options(corpus, tmp_path, ngram_rows=20_000, save_every=0.0001, save_checkpoint=""),
                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert found.returncode == 0 and found.stderr.count("\n") == 1, found.stderr
    assert "cannot save to" in found.stderr and "the run goes on" in found.stderr
    assert [s for s, _, _ in steps(tmp_path)][-1] == 6


def test_older_saves_stay_when_the_disk_is_full(corpus, tmp_path, monkeypatch, capfd):
    write = saving.write_rank_file
    monkeypatch.setattr(saving.Saver, "due", lambda self, step, seconds: True)

    def write_twice(path, content):
        if content["step"] in (1, 3, 4, 5):
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(saving, "write_rank_file", write_twice)
    assert run(options(corpus, tmp_path), 5) == 130
    out, err = capfd.readouterr()
    assert err.count("\n") == err.count("No space left") == 2, "once before a save that could be written, and once after it"
    assert sorted(path.name for path in tmp_path.glob("*.saved/*"))[-1] == "step_000002"
    assert re.search(r"--resume=\S*step_000002\n", out)


# ---------------------------------------------------------------------------------------------------- signals


def signalled(number, when, *command):
    """Starts a run, sends it a signal when it has printed `when`: (status, seconds, the rest of what it printed)."""
    process = Process(*command, stderr=subprocess.STDOUT)
    process.wait_for(when)
    begin = time.monotonic()
    process.send_signal(number)
    status = process.wait(60)
    return status, time.monotonic() - begin, process.out().partition(when)[2].partition("\n")[2]


LONG = {"num_steps": 2000, "epochs": 1000, "val_interval": 5}


@pytest.mark.parametrize(
    "number, status, save_every", [(signal.SIGINT, 130, 60), (signal.SIGTERM, 143, 0), (signal.SIGHUP, 129, 60)])
def test_a_signal_ends_a_run_in_order(number, status, save_every, corpus, tmp_path):
    command = options(corpus, tmp_path, save_every=save_every, **LONG)
    found, seconds, out = signalled(number, "step:10/", "train_gpt.py", *command)
    assert found == status and seconds < 30 and "Traceback" not in out, out
    log = read_log(last_log(tmp_path))
    assert log.end["interrupted"] and log.end["val_loss"] == log.validations[-1].loss
    assert f"stopped by {signal.Signals(number).name} after step {log.steps[-1].step} of 2000" in out
    assert (tmp_path / "model.pt").exists() and "model.pt" in out
    assert bool(re.search(r"\n  \S*python\S* train_gpt.py --resume=\S+/step_0000\d\d\n", out)) == (save_every > 0)
    assert len(list(tmp_path.glob("*.saved/step_*"))) == (save_every > 0)


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_first_step_is_one_sentence(number, status, corpus, tmp_path):
    found, seconds, out = signalled(number, "warming up", "train_gpt.py", *options(corpus, tmp_path))
    assert found == status and seconds < 5
    assert out.strip() == f"train_gpt.py: stopped by {signal.Signals(number).name} before the first step"


def test_a_signal_while_a_sample_is_drawn_ends_the_run_at_once_with_its_weights_written(corpus, tmp_path):
    command = options(corpus, tmp_path, sample="a", sample_tokens=10**6, seq_len=1024, micro_tokens=1024, candidates=0)
    found, seconds, out = signalled(signal.SIGINT, "log: ", "train_gpt.py", *command)
    assert found == 130 and "stopped by SIGINT after the last step" in out, out
    assert seconds < 20 and (tmp_path / "model.pt").exists() and "Traceback" not in out


def test_torchrun_hands_a_signal_on_to_both_ranks(corpus, tmp_path):
    command = [*TORCHRUN, "--nproc_per_node=2", "train_gpt.py", *options(corpus, tmp_path, **LONG)]
    _, seconds, out = signalled(signal.SIGTERM, "step:10/", *command)
    log = read_log(last_log(tmp_path))
    assert seconds < 30 and log.end["interrupted"] and "stopped by SIGTERM after step" in out
    assert saving.find(saving.NEWEST, tmp_path) == the_save(tmp_path)


def after_signals(*numbers, before="pass", **variables):
    """What comes of a process in the steps of a run that gets these signals: (status, the signal it has noted)."""
    code = f"import os, signal; from nanogpt.stopping import Stop; stop = Stop(); {before}; stop.listen()\n"
    code += f"stop.in_steps = True\nfor number in {numbers}:\n    os.kill(os.getpid(), number)\n"
    code += "    print(stop.signal, flush=True)"
    found = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT | variables, cwd=ROOT, text=True,
                           capture_output=True, timeout=100)
    noted = found.stdout.split()[-1]
    answer = ("\ntrain_gpt.py: the run ends in order, in a moment; the next control-C ends it at once, and loses "
              "what is not saved\n")
    assert found.stderr == (answer if noted == "SIGINT" else "")
    return found.returncode, noted


def test_control_c_ends_a_process_at_once_that_has_had_a_signal():
    assert after_signals(2, 2) == (-2, "SIGINT")
    assert after_signals(15, 2) == (-2, "SIGTERM")


def test_a_sigterm_that_comes_twice_is_one_request():
    """A cluster sends it to all processes, and torchrun, which is one of them, hands it on to the ranks."""
    assert after_signals(15, 15) == (0, "SIGTERM")
    assert after_signals(2, 15, 15) == (0, "SIGINT")


def test_a_closed_terminal_does_not_end_a_run_under_nohup_but_torchrun_does():
    ignore = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    assert after_signals(1, 15, before=ignore) == (0, "SIGTERM")
    assert after_signals(1, 15, before=ignore, TORCHELASTIC_RUN_ID="1") == (0, "SIGHUP")


def test_a_run_that_warms_up_ends_with_129_when_its_terminal_is_closed():
    """Then no sentence can be written."""
    child, terminal = pty.fork()
    if child == 0:
        code = "import time; from nanogpt.stopping import Stop; Stop().listen(); print('ready'); time.sleep(100)"
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-u", "-c", code])
    try:
        assert b"ready" in os.read(terminal, 1000)
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 129
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        raise


def test_a_signal_that_waits_when_the_run_is_over_is_told_to_the_other_ranks():
    stop = stopping.Stop()
    stop.signal, told = "SIGTERM", []

    def tell(number):
        told.append((number, stop.when))
        raise SystemExit  # it would end the process

    stop.leave_with_others = tell
    with pytest.raises(SystemExit):
        stop.end_steps()
    assert told == [(signal.SIGTERM, "after the last step")]


@pytest.mark.parametrize("lag", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_ranks_grant_a_request_at_the_same_step_whenever_they_hear_of_it(lag, monkeypatch):
    monkeypatch.setattr("nanogpt.ranks.rank_and_world_size", lambda: (0, 2))
    ranks = [Requests(torch.device("cpu")) for _ in lag]
    granted, vectors = [], []
    for step in range(12):
        if step == 3:
            ranks[1].ask("SIGTERM")
        if step in (3, 4, 5):  # it asks until it is granted
            ranks[0].ask("save")
        granted.append([[name for name in REQUESTS if rank.grant(name, step)] for rank in ranks])
        vectors.append((step + 1, sum(rank.outgoing() for rank in ranks).tolist()))
        for rank, late in zip(ranks, lag):  # all but the last one have arrived in any case
            rank.hear([TrainingLoss(n, 1.0, [0.0, *numbers]) for n, numbers in vectors[: step + 1 - late]
                       if n > step - late])
    assert [a for a, _ in granted] == [b for _, b in granted]
    assert [step for step, (a, _) in enumerate(granted) if "SIGTERM" in a] == [5]
    assert [step for step, (a, _) in enumerate(granted) if "save" in a][0] == 5


def test_requests_leave_the_flags_of_recipes_alone(monkeypatch):
    monkeypatch.setattr("nanogpt.ranks.rank_and_world_size", lambda: (0, 2))
    requests = Requests(torch.device("cpu"))
    nothing = requests.outgoing().tolist()
    assert set(nothing) == {0}
    requests.ask("save")
    assert requests.hear([TrainingLoss(3, 2.5, [0.0, 7.0, *requests.outgoing().tolist()])]) == [
        TrainingLoss(3, 2.5, [0.0, 7.0])]
    assert not requests.grant("save", 3) and requests.grant("save", 4) and not requests.grant("save", 5)


# ---------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("cut", [False, True])
def test_batches_from_a_later_step_on_are_those_of_the_whole_run(cut, corpus):
    paths = shards.find_shards(corpus, "train", "*_train_*.bin", "")
    packing = shards.Packing(256, 384, 3, cut, 300)
    plan = [2] * 5 + [4] * 10
    for rank in range(2):
        whole = list(shards.rank_batches(paths, packing, plan, rank, 2))
        for first in (0, 4, 12, 15):
            later = list(shards.rank_batches(paths, packing, plan, rank, 2, first))
            assert len(later) == len(plan) - first
            assert all(np.array_equal(a, b) for a, b in zip(later, whole[first:]))


def test_fitted_runs_save_and_records_do_not():
    assert fitting.OVER_PRESET["save_every"] > 0
    for name in ("speedrun", "onepass", "laptop"):
        c = t.parse_config([f"--preset={name}"])
        assert (c.save_every, c.save_steps) == (0, 0)
    assert t.parse_config(["--preset=char"]).save_every > 0, "long runs that are no records"


def test_counts_and_random_numbers_of_another_number_of_ranks(stopped, monkeypatch):
    one = saving.Saved(the_save(stopped))
    counts = one.own_counts("target_counts")
    assert counts.sum() == 3 * 1024
    monkeypatch.setattr(saving, "rank_and_world_size", lambda: (1, 2))
    two = saving.Saved(the_save(stopped))
    assert torch.equal(two.own_counts("target_counts"), counts / 2)
    states = []
    for rank, seed in ((0, 0), (1, 0), (0, 1), (0, 0)):
        monkeypatch.setattr(saving, "rank_and_world_size", lambda rank=rank: (rank, 2))
        two.restore_random(torch.device("cpu"), seed)
        states.append(torch.rand(3).tolist())
    assert states[0] == states[3] and len({tuple(state) for state in states}) == 3


def test_saves_come_after_so_many_steps_or_minutes_whichever_is_first(tmp_path):
    saver = saving.Saver(tmp_path, 1.0, 10, {}, [], seconds=30.0, step=5)
    assert [saver.due(step, 30.0) for step in (5, 14, 15)] == [False, False, True]
    assert [saver.due(6, seconds) for seconds in (89.0, 90.0)] == [False, True]
    assert not saving.Saver(tmp_path, 0.0, 0, {}, [], 0.0, 0).due(10**6, 1e6)


def test_a_run_saves_every_so_many_steps(corpus, tmp_path):
    argv = options(corpus, tmp_path, save_every=0, save_steps=2, num_steps=8, save_checkpoint="")
    assert run(argv) == 0
    assert not list(tmp_path.glob("*.saved/step_*")), "a run that has come to its end needs no saves"
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.replace("step == 2", "step == 5").replace("signal.SIGTERM", "signal.SIGKILL"))
    processes.run(driver, ROOT, 0, *argv)
    saves = sorted(path.name for path in tmp_path.glob("*.saved/step_??????"))
    assert saves and set(saves) <= {"step_000002", "step_000004"}, saves
