"""The fault table: what goes wrong in the middle of a run, the sentence that names it, the exit status, and what is left
on the disk. Each row of HAPPENS is a run of its own, in this process where no other one is the point.
"""
import errno
import math
import re
import shutil
import time
from collections.abc import Callable
from typing import NamedTuple

import processes
import pytest
import torch
from conftest import arguments
from processes import TORCHRUN, write_driver

import train_gpt as t
from nanogpt import checkpoints, faults, process
from nanogpt.ranks import BadInput
from records import journal

FIRST = "data/fineweb_train_000001.bin"
OLD = {"config": {}, "step": 5, "val_loss": 1.0}
WEIGHTS = {"a": torch.ones(3)}


@pytest.fixture
def place(tmp_path, corpus, monkeypatch):
    """A folder to work in, with shards in data/ and an older checkpoint."""
    shutil.copytree(corpus, tmp_path / "data")
    checkpoints.write(tmp_path / "old.pt", WEIGHTS, OLD)
    monkeypatch.setattr(t, "STOP", process.Stop())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capfd, **changes):
    """`main` in this process: (status, standard output, standard error)."""
    status = t.main(arguments(**{"data_dir": "data", "log_dir": "logs", "save_checkpoint": "new.pt"} | changes))
    return status, *capfd.readouterr()


class Happens(NamedTuple):
    what: str
    when: str  # "before" or "after" the update of this number, from 1 to 4
    act: Callable  # (place, model, monkeypatch)
    sentence: str  # a regular expression: all of standard error
    status: int
    keys: dict = {}
    kept: int | None = 5  # the step of the checkpoint that is left in old.pt
    last: str = "ended early: "  # what the last line of the log says


def spoil(name, value=math.nan):
    def act(place, model, monkeypatch):
        getattr(model, name).data.view(-1)[-1:] = value
    return act


def spoil_masters(place, model, monkeypatch):
    """What an update leaves behind whose learning rate was far too high."""
    spoil("qkvo")(place, model, monkeypatch)
    model.optimizer.masters["qkvo"][0, 0, 0] = math.inf


def cut(place, model, monkeypatch):
    (place / "other").write_bytes((place / FIRST).read_bytes()[:-2])
    (place / "other").replace(place / FIRST)


def fill_the_disk(of):
    """From now on nothing can be written: `of` says to which files."""
    def act(place, model, monkeypatch):
        save_file = checkpoints.save_file
        write = journal.Log.write

        def no_space(path):
            if re.search(of, str(path)):
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(checkpoints, "save_file", lambda x, path, about: no_space(path) or save_file(x, path, about))

        def write_to_full_disk(log, line):
            if log.file and re.search(of, str(log.path)):
                log.file = open("/dev/full", "wb")
            write(log, line)

        monkeypatch.setattr(journal.Log, "write", write_to_full_disk)
    return act


LOWER = "; lower the learning rates; if --precision is not bf16, try that"
# The step that has this loss spoils what it updates.
SPOILT = rf"the training loss is nan at step 3, mlp.master of rank 0 is not finite{LOWER}"
LONG = {"num_steps": 30, "epochs": 50, "val_interval": 2}  # reads the shards again and again
HAPPENS = [
    *[Happens(f"a weight is not finite, {precision}", "before 3", spoil("late_out"), SPOILT, 2, {"precision": precision}, kept=2)
      for precision in ("bf16", "fp8-qkv")],
    Happens("a table is not finite", "before 3", lambda place, model, _: model.ngrams.data.fill_(math.inf), SPOILT, 2, kept=2),
    Happens("the last update spoils the weights", "after 4", spoil_masters, "the validation loss is nan at step 4, qkvo.master "
            f"of rank 0 is not finite{LOWER}", 2,
            {"val_interval": 0}),
    Happens("the update before a save spoils the weights", "after 2", spoil_masters, "training went wrong before step 2, qkvo.master "
            f"of rank 0 is not finite{LOWER}",
            2, {"save_every": 1e-6, "val_interval": 0}),
    Happens("a shard is cut", "before 3", cut, f"{FIRST} has 13022 bytes where its header promises 13024; delete it and run data/fineweb.py.*", 2, LONG, 8),
    Happens("the disk of the log is full", "before 3", fill_the_disk("logs/"), r"cannot write to logs/\S+ .No space left on device.; "
            "the run goes on without a log", 0, kept=4, last="step:2/4 val_loss"),
    Happens("the disk of the checkpoint is full", "before 3", fill_the_disk("^old"), "old.pt cannot be written .*No space left on "
            "device.*; the run goes on", 0, kept=2, last="end"),
]


def last_line(place):
    (log,) = (place / "logs").glob("*.txt")
    return log.read_text().splitlines()[-1]


@pytest.mark.parametrize("row", HAPPENS, ids=lambda row: re.sub(r"\W+", "-", row.what))
def test_a_fault_during_the_run_is_one_sentence_and_what_was_good_is_kept(row, place, capfd, monkeypatch):
    train_step = t.train_step

    def step_and_fault(model, optimizer, batch, step, requests=None, *rest):
        model.optimizer = optimizer

        def moment(when):
            if requests and row.when == f"{when} {step + 1}":
                row.act(place, model, monkeypatch)

        moment("before")
        loss = train_step(model, optimizer, batch, step, requests, *rest)
        moment("after")
        return loss

    monkeypatch.setattr(t, "train_step", step_and_fault)
    status, out, err = run(capfd, save_checkpoint="old.pt", **row.keys)
    assert status == row.status, (out, err)
    assert re.fullmatch(f"(train_gpt.py: )?{row.sentence}\n?", err) and err.count("\n") == 1, err
    last = last_line(place)
    assert row.last in last or (row.last == "end" and "code_sha256" in last), last
    assert checkpoints.read("old.pt")[1]["step"] == row.kept
    assert not list(place.rglob("*.part"))


def test_a_model_that_does_not_fit_into_the_memory_is_one_sentence(place, capfd):
    status, _, err = run(capfd, ngram_rows=2**31, model_dim=2**17, save_checkpoint="")  # more than can be addressed
    assert status == 2 and err.count("\n") == 1 and "too little memory" in err and "--ngram_rows" in err
    assert "ended early" in last_line(place)


# ------------------------------------------------------------------------------------------------- ranks


DRIVER = """
forward_backward = t.forward_backward
passes = []
def spoilt(*args, **options):
    loss, gradients = forward_backward(*args, **options)
    passes.append(loss)
    return loss * float("nan") if len(passes) == 9 and os.environ["RANK"] == "1" else loss, gradients
t.forward_backward = spoilt
end_after_a_step = t.STOP.end_after_a_step
t.STOP.take_over()
t.STOP.end_after_a_step = lambda: (passes.clear(), end_after_a_step())  # passes of the warm-up do not count
"""


def test_two_ranks_end_together_when_the_loss_of_one_goes_wrong(place):
    driver = write_driver(place / "driver.py", DRIVER)
    keys = arguments(data_dir="data", log_dir="logs", num_steps=8, save_checkpoint="new.pt", micro_tokens=256,
                     save_every=1e-6)
    begin = time.monotonic()
    found = processes.run(*TORCHRUN, "--nproc_per_node=2", driver, *keys, cwd=place)
    ours = [line for line in found.stderr.splitlines() if line.startswith("train_gpt.py: ")]
    assert found.returncode != 0 and time.monotonic() - begin < 60, found.stderr
    assert ours == ["train_gpt.py: the training loss is nan at step 5, all weights are finite: an activation overflowed" + LOWER]
    assert checkpoints.read("new.pt")[1]["step"] == 4 and "ended early: the training loss" in last_line(place)
    assert len([*place.glob("logs/*.saved")]) == 1


def test_a_crash_is_a_traceback_and_status_1_after_what_is_to_be_done_at_the_end(capsys):
    def train(at_end):
        at_end.callback(lambda: print("done"))
        raise RuntimeError("a mistake in the code")

    assert faults.run(train, process.Stop()) == 1
    out, err = capsys.readouterr()
    assert out == "done\n" and err.startswith("Traceback") and err.endswith("RuntimeError: a mistake in the code\n")


def while_recording(error):
    """The end of the recording of a CUDA graph fails, too, and hides the first error."""
    other = RuntimeError("capturing stream has unjoined work")
    other.__context__ = error
    return other


GPU_IS_FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. And much more.")


@pytest.mark.parametrize("error, sentence", [
    (GPU_IS_FULL, "too little memory"), (while_recording(GPU_IS_FULL), "too little memory"),
    (OSError(5, "Input/output error", "x.bin"), "[Errno 5] Input/output error: 'x.bin'"), (MemoryError(), "too little memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "too little memory"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "too little memory"), (KeyError("x"), "")])
def test_what_a_user_can_mend_is_a_sentence(error, sentence):
    assert faults.sentence_of(error) == sentence


def test_a_loss_that_is_infinite_ends_a_run_as_one_that_is_no_number():
    with pytest.raises(BadInput, match="the training loss is inf at step 3, all weights are finite"):
        faults.check_loss("training", math.inf, 3, dict)
