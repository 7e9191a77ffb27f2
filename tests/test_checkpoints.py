"""Weights and saves: written whole or not at all, read as data that is checked; runs that are killed or ended by a
signal, and resumed.

The reference is always the undisturbed run: its exact losses (as its log has them) and its weights. Real
processes and signals where these are the point; elsewhere `main`, with a signal that is only noted.
"""
import functools
import os
import re
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import processes
import pytest
import torch
from conftest import ROOT, arguments, documents, keep, untrained, write_shard
from processes import TORCHRUN, Process, run_ranks, write_driver
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import sample
import train_gpt as t
from nanogpt import checkpoints, process, ranks
from records.console import end_in_order
from records.log import read_log

SAVED = {"save_every": 60, "num_steps": 6, "target_loss": 0, "val_interval": 2, "dtype": "float32", "candidates": 256, "micro_tokens": 256}


def options(corpus, folder, **changes):
    weights = folder / "model.safetensors"
    return arguments(**SAVED | dict(data_dir=corpus, log_dir=folder, save_checkpoint=weights) | changes)


def run(argv, stop_after=None):
    """`main` in this process; the status. `stop_after`: a signal comes in this step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(t, "STOP", process.Stop())
        inner = t.train_step

        def train_step(model, optimizer, batch, step, requests=None, *rest, **named):
            if requests and step + 1 == stop_after:  # the warm-up has no requests
                t.STOP.signal = "SIGINT"
            return inner(model, optimizer, batch, step, requests, *rest, **named)

        patch.setattr(t, "train_step", train_step)
        return t.main([str(word) for word in argv])


def last_log(folder):
    return max(folder.glob("*.txt"), key=lambda path: path.stat().st_mtime_ns)


def steps(folder):
    """All losses of the newest log."""
    return [(x.step, x.split, x.loss) for x in read_log(last_log(folder)).steps]


def weights(folder):
    return load_file(folder / "model.safetensors")


def distance(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().amax().item() for name in a if a[name].numel())


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def the_save(folder):
    (path,) = folder.glob("*.saved")
    return path


def saved_step(folder):
    with safe_open(the_save(folder), "pt") as file:
        return int(file.metadata()["step"])


def refused(capfd, argv):
    status = run(argv)
    _, err = capfd.readouterr()
    assert status == 2 and err.count("\n") == 1 and err.startswith("train_gpt.py: "), err
    return err


# ---------------------------------------------------------------------------------------------------- the same run


NARROW = {"dtype": "auto", "num_steps": 3, "batch_tokens": 512, "num_layers": 1}  # a CPU is slow at it


@pytest.mark.parametrize("changes, stop_after", [
    (NARROW | {"precision": "fp16"}, 2), (NARROW | {"precision": "fp8"}, 2),
    ({"schedule": "onepass", "num_steps": 9, "batch_tokens": 1024, "average_frac": 1.0}, 4),
], ids=["fp16", "fp8", "stages"])
def test_a_resumed_run_is_to_the_bit_the_run_that_was_not_stopped(changes, stop_after, corpus, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(options(corpus, whole, **changes)) == 0
    assert run(options(corpus, parts, **changes), stop_after) == 130
    first = read_log(last_log(parts))
    sizes = []  # of all steps
    for stage in first.facts["stage"]:
        sizes += [stage["batch_tokens"]] * (stage["last_step"] - stage["first_step"])
    assert first.interrupted and first.end["tokens"] == sum(sizes[:stop_after])
    assert run(["--resume", f"--log_dir={parts}"]) == 0
    assert steps(parts) == steps(whole) and same(weights(whole), weights(parts))
    log = read_log(last_log(parts))
    kept, expected = ([note for note in notes if note.startswith("at the end the recipe has")]
                      for notes in (log.facts["note"], read_log(last_log(whole)).facts["note"]))
    assert kept == expected and len(kept) == (changes.get("precision") == "fp16"), "the scale of the loss, and its steps"
    assert any(note.startswith(f"resumed at step {stop_after} from {parts}/{first.run['run_id']}.saved")
               for note in log.facts["note"])
    assert not list(parts.glob("*.saved")), "a run that has come to its end needs no saves"


def test_what_may_change_does_and_what_may_not_is_named(corpus, tmp_path, capfd):
    whole, parts, data = tmp_path / "whole", tmp_path / "parts", tmp_path / "data"
    shutil.copytree(corpus, data)
    run(options(corpus, whole, candidates=0, dtype="float64"))
    run(options(corpus, parts, candidates=0, dtype="float64"), 3)
    capfd.readouterr()
    for change, part in ((["--num_steps=7"], "--num_steps=7 (saved: 6)"), (["--schedule=gpt2"], "--schedule=gpt2 (saved: "), (["--seed=1", "--muon_lr=0.5"], "--seed=1 (saved: 0), --muon_lr"),
                         (["--preset=char"], "--preset=char (saved: laptop)"), (["--save_every=-1"], "--save_every=-1")):
        assert part in refused(capfd, ["--resume", f"--log_dir={parts}", *change])
    changes = ["--micro_tokens=512", "--val_interval=0", f"--data_dir={data}", "--save_every=0", "--run_name=other"]
    same_place = os.path.relpath(the_save(parts))  # so it is replaced, and removed at the end
    assert run([f"--resume={same_place}", f"--log_dir={parts}", *changes]) == 0
    assert not list(parts.glob("*.saved"))
    config = read_log(last_log(parts)).config
    assert (config["micro_tokens"], config["val_interval"], config["run_name"]) == (512, 0, "other")
    assert distance(weights(whole), weights(parts)) < 1e-9


def test_a_fitted_run_goes_on_by_the_command_that_it_was_started_with(corpus, tmp_path, capsys):
    command = [word for word in options(corpus, tmp_path, minutes=0.02) if not word.startswith("--num_steps")]
    command += ["--fit"]
    assert run(command, 1) == 130
    config = read_log(last_log(tmp_path)).config
    assert run([*command, "--resume"]) == 0, capsys.readouterr().err
    assert read_log(last_log(tmp_path)).config["num_steps"] == config["num_steps"]


def test_without_a_save_resume_alone_begins_anew_and_says_so(corpus, tmp_path, capfd):
    assert run([*options(corpus, tmp_path), "--resume"]) == 0
    assert f"no save under {tmp_path}" in capfd.readouterr().err
    log = read_log(last_log(tmp_path))
    assert log.config["resume"] == ""


def test_a_run_goes_on_with_its_time_and_its_lost_targets_and_leaves_a_copy_of_a_save_alone(corpus, tmp_path, capfd):
    few = dict(candidates=16, val_interval=0)  # more tokens of a group are targets
    run(options(corpus, tmp_path / "whole", **few))
    assert run(options(corpus, tmp_path, **few), 3) == 130
    copy = shutil.copytree(tmp_path, tmp_path / "copies") / the_save(tmp_path).name
    assert run([f"--resume={copy}", f"--log_dir={tmp_path}"]) == 0
    assert copy.exists() and "another train_gpt.py" not in capfd.readouterr().out
    log, whole = read_log(last_log(tmp_path)), read_log(last_log(tmp_path / "whole"))
    times = [step.time_ms for step in log.steps]
    assert times == sorted(times)
    assert [defect["what"] for defect in log.facts["defect"]] == [defect["what"] for defect in whole.facts["defect"]] != []


def test_a_run_that_goes_on_with_other_code_says_so(corpus, tmp_path, monkeypatch, capfd):
    assert run(options(corpus, tmp_path), 1) == 130
    monkeypatch.setattr(t, "SOURCE", t.SOURCE + b"# edited\n")
    assert run(["--resume", f"--log_dir={tmp_path}"]) == 0
    assert "the steps before were made by another train_gpt.py" in capfd.readouterr().out


@pytest.mark.parametrize("save_every, remedy", [(0.0, ""), (1e-5, r"; make room, then --resume=\S+\.saved")])
def test_a_run_whose_weights_found_no_room_says_so_at_its_end(save_every, remedy, corpus, tmp_path, monkeypatch, capfd):
    def write(path, *args, write=checkpoints.write):
        if path.suffix != ".saved":
            raise OSError(f"{path} cannot be written (No space left on device)")
        write(path, *args)

    monkeypatch.setattr(checkpoints, "write", write)
    assert run(options(corpus, tmp_path, sample="The ", save_every=save_every)) == 2
    out, _ = capfd.readouterr()
    assert re.search(rf"\nweights   none, as they could not be written{remedy}\n", out) and "sample: " not in out


def test_best_weights_are_still_there_only_while_no_other_run_has_taken_their_name(tmp_path):
    path = tmp_path / "a.safetensors"
    keep(path, untrained(), step=4, val_loss=1.25)
    assert checkpoints.still_there([4, 1.25, str(path)])
    assert not checkpoints.still_there([4, 1.5, str(path)]) and not checkpoints.still_there([3, 1.25, str(path)])
    path.rename(tmp_path / "b.safetensors")
    assert not checkpoints.still_there([4, 1.25, str(path)]) and not checkpoints.still_there(None)


def test_weights_of_a_run_that_began_meanwhile_stay(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other, validate = tmp_path / "models" / f"{corpus.name}.safetensors", t.validate
    monkeypatch.setattr(t, "validate", lambda *args: other.touch() or validate(*args))
    assert run(options(corpus, tmp_path, save_checkpoint="auto")) == 0
    assert other.stat().st_size == 0 and other.with_stem(f"{other.stem}-2").exists()


def test_a_save_that_falls_due_where_none_can_be_made_stays_due_until_it_is_taken():
    requests = ranks.Requests(torch.device("cpu"))
    requests.ask(stop=False, save=True)
    requests.ask(stop=True, save=False)
    assert requests.granted == [True, True]
    assert requests.take() and requests.granted == [False, False]


def test_a_save_is_asked_for_once(monkeypatch):
    """Else ranks that hear of it some steps later would save once more."""
    keeper = object.__new__(checkpoints.Keeper)
    keeper.config, keeper.asked_at, keeper.clock = t.Config(save_every=1), 0, SimpleNamespace(now=lambda: next(times))
    times = iter([59, 60, 61, 119, 120])
    assert [keeper.due() for _ in range(5)] == [False, True, False, False, True]


# ---------------------------------------------------------------------------------------------------- killed


def test_a_run_that_is_killed_while_it_saves_ends_as_if_it_had_not_been(corpus, tmp_path, monkeypatch):
    """It saves after every step, and is killed while a third save is written."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = dict(num_steps=9, val_interval=3, save_every=1e-6)
    assert run(options(corpus, whole, **changes)) == 0
    driver = write_driver(tmp_path / "driver.py", """
save_file = t.checkpoints.save_file
def save_and_die(tensors, path, header):
    save_file(tensors, path, header)
    if header["step"] == "5" and ".saved" in path.name:
        os.kill(os.getpid(), 9)
t.checkpoints.save_file = save_and_die""")
    assert Process(driver, *options(corpus, parts, **changes)).wait() == -signal.SIGKILL
    assert len([*parts.glob("*.saved*")]) == 2 and saved_step(parts) == 4
    assert run(["--resume", f"--log_dir={parts}"]) == 0
    assert steps(parts) == steps(whole) and same(weights(whole), weights(parts))


@pytest.fixture(scope="module")
def killed(corpus, tmp_path_factory):
    """A number of ranks -> the folder of a run that they brought to its end, and that of one in
    which they were killed after a save."""
    changes = dict(dtype="float64", num_steps=6, val_interval=0, vocab_size=385, ngram_rows=501,
                   head_every_second=True, average_frac=1.0, save_every=1e-6)
    driver = write_driver(tmp_path_factory.mktemp("drivers") / "driver.py", """
step = t.train_step
def step_or_die(model, optimizer, batch, number, requests=None, *rest, **named):
    if requests and number == 5:  # the warm-up has no requests
        os._exit(9)
    return step(model, optimizer, batch, number, requests, *rest, **named)
t.train_step = step_or_die""")

    @functools.cache
    def run_both(ranks):
        whole, parts = (tmp_path_factory.mktemp(name) for name in ("whole", "parts"))
        for rank in run_ranks(ranks, "train_gpt.py", *options(corpus, whole, **changes)):
            assert rank.returncode == 0, rank.stderr
        run_ranks(ranks, driver, *options(corpus, parts, **changes))
        assert saved_step(parts) == 4
        return whole, parts

    return run_both


@pytest.mark.parametrize("before, after", [(2, 2), (2, 1), (1, 2)])
def test_two_ranks_go_on_to_the_bit_and_another_number_of_them_within_rounding(
        before, after, killed, tmp_path):
    whole, killed_parts = killed(before)
    parts = tmp_path / "parts"
    shutil.copytree(killed_parts, parts)
    words = "--resume", f"--log_dir={parts}", f"--save_checkpoint={parts}/model.safetensors"
    for rank in run_ranks(after, "train_gpt.py", *words):
        assert rank.returncode == 0, rank.stderr
    if before == after:
        assert steps(parts) == steps(whole) and same(weights(whole), weights(parts))
    assert [loss for *_, loss in steps(parts)] == pytest.approx([loss for *_, loss in steps(whole)], abs=2e-4)
    assert distance(weights(whole), weights(parts)) < 1e-9


def test_a_full_disk_is_one_sentence_and_the_run_goes_on(corpus, tmp_path):
    limit = 2**21  # bytes of a file: enough for a log, too few for a save
    driver = write_driver(tmp_path / "driver.py", f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))")
    large_saves = dict(ngram_rows=20_000, save_every=0.0001, save_checkpoint="")
    found = processes.run(driver, *options(corpus, tmp_path, **large_saves))
    assert found.returncode == 0 and found.stderr, found.stderr
    for line in found.stderr.splitlines():
        assert re.fullmatch("cannot save: .*File too large.*", line)
    assert steps(tmp_path)[-1][0] == 6 and not list(tmp_path.rglob("*.part"))


# ---------------------------------------------------------------------------------------------------- bad saves


@pytest.fixture(scope="module")
def stopped(corpus, tmp_path_factory):
    """The folder of a run that was stopped after step 3."""
    folder = tmp_path_factory.mktemp("stopped")
    assert run(options(corpus, folder), 3) == 130
    return folder


@pytest.mark.parametrize("name, length, part", [
    ("*.saved", 0, "cut off"), ("*.saved", 5000, "cut off"), ("model.safetensors", None, "holds no save of this program")])
def test_a_save_that_is_cut_off_or_none_is_one_sentence_before_anything_is_compiled(
        name, length, part, stopped, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(t.warmup, "WarmUp", lambda *_: pytest.fail("too late"))
    save = tmp_path / "copy.saved"
    [whole] = stopped.glob(name)
    save.write_bytes(whole.read_bytes()[:length])
    sentence = refused(capfd, [f"--resume={save}", "--save_checkpoint="])
    assert str(save) in sentence and part in sentence and "leave --resume out" in sentence


def test_a_save_that_its_run_replaces_meanwhile_is_refused(stopped, tmp_path, capfd, monkeypatch):
    save = tmp_path / "copy.saved"
    shutil.copy(the_save(stopped), save)
    check_save = checkpoints.check_save

    def check_and_replace(path, *args):
        facts = check_save(path, *args)
        checkpoints.write(save, load_file(save), facts | {"step": facts["step"] + 1})
        return facts

    monkeypatch.setattr(checkpoints, "check_save", check_and_replace)
    assert "its run still goes on" in refused(capfd, [f"--resume={save}", "--save_checkpoint="])


@pytest.mark.parametrize("name", ["lm_head", "mlp", "late_out"])
def test_a_save_of_other_code_is_one_sentence(name, stopped, tmp_path, capfd):
    save = tmp_path / "copy.saved"
    tensors = load_file(the_save(stopped))
    with safe_open(the_save(stopped), "pt") as file:
        header = file.metadata()
    tensors[f"{name}.master"] = torch.cat(2 * [tensors[f"{name}.master"]], -1)
    save_file(tensors, save, header)
    sentence = refused(capfd, [f"--resume={save}", "--save_checkpoint="])
    assert str(save) in sentence and "was written by other code" in sentence and "leave --resume out" in sentence


def test_other_data_are_refused(stopped, corpus, tmp_path, capfd):
    for path in corpus.iterdir():
        shutil.copy(path, tmp_path)
    write_shard(tmp_path / "fineweb_train_000002.bin", documents(6000, 9))
    sentence = refused(capfd, [f"--resume={the_save(stopped)}", f"--data_dir={tmp_path}"])
    assert f"the shards in {tmp_path} are not those of {the_save(stopped)}" in sentence and "--data_dir" in sentence


def test_resume_finds_the_newest_complete_save_or_the_one_that_is_named(stopped, tmp_path):
    a, b = (tmp_path / name / f"{name}.saved" for name in "ab")
    for number, path in enumerate((a, b), 1):
        path.parent.mkdir()
        shutil.copy(the_save(stopped), path)
        os.utime(path, ns=(0, 10**15 * number))
    assert checkpoints.find(checkpoints.NEWEST, tmp_path) == b and checkpoints.find("", tmp_path) is None
    assert checkpoints.find(str(a), "") == a
    b.rename(f"{b}.1.part")  # it is not whole
    assert checkpoints.find(checkpoints.NEWEST, tmp_path) == a


# ---------------------------------------------------------------------------------------------------- signals


def signalled(number, when, *command):
    """Starts a run, sends it a signal when it has printed `when`: (status, seconds, what it printed after that)."""
    process = Process(*command, stderr=subprocess.STDOUT)
    process.wait_for(when)
    begin = time.monotonic()
    process.send_signal(number)
    status = process.wait(60)
    return status, time.monotonic() - begin, process.out().partition(when)[2].partition("\n")[2]


LONG = {"num_steps": 2000, "epochs": 1000, "val_interval": 5}


@pytest.mark.parametrize("number, status, save_every", [(signal.SIGINT, 130, 60), (signal.SIGTERM, 143, 0), (signal.SIGHUP, 129, 60)])
def test_a_signal_ends_a_run_in_order(number, status, save_every, corpus, tmp_path):
    command = options(corpus, tmp_path, save_every=save_every, **LONG)
    found, seconds, out = signalled(number, "step:10/", "train_gpt.py", *command)
    assert found == status and seconds < 30 and "Traceback" not in out, out
    assert ("the next Ctrl-C ends it at once" in out) == (number == signal.SIGINT)
    log = read_log(last_log(tmp_path))
    validations = [step.loss for step in log.steps if step.split == "val"]
    assert log.end["interrupted"] and log.end["val_loss"] == validations[-1]
    assert f"stopped by {signal.Signals(number).name} after step {log.steps[-1].step}" in out
    assert (tmp_path / "model.safetensors").exists() and "model.safetensors" in out
    assert bool(re.search(r"; to go on, start it again with --resume=\S+.saved\n", out)) == (save_every > 0)
    assert ("; --save_every=MINUTES saves" in out) == (save_every == 0)
    assert len(list(tmp_path.glob("*.saved"))) == (save_every > 0)


def test_a_signal_before_the_run_is_ready_ends_it_without_a_traceback(corpus, tmp_path):
    found, seconds, out = signalled(signal.SIGINT, "warming up", "train_gpt.py", *options(corpus, tmp_path))
    assert found == -signal.SIGINT and seconds < 5  # a shell makes 130 of it
    assert out.strip() == ""


def test_a_signal_before_the_first_step_ends_the_run_after_it(corpus, tmp_path, monkeypatch, capfd):
    """Before it there is nothing to keep."""
    monkeypatch.setattr(process.Stop, "end_after_a_step", lambda stop: stop.notice(signal.SIGTERM, None))
    assert run(options(corpus, tmp_path)) == 143
    assert "stopped by SIGTERM after step 1; to go on" in capfd.readouterr().out and saved_step(tmp_path) == 1


def test_a_signal_that_one_rank_has_got_ends_all_of_them(corpus, tmp_path):
    driver = write_driver(tmp_path / "driver.py", """
if os.environ["RANK"] == "1":
    t.STOP.end_after_a_step = lambda: t.STOP.notice(2, None)""")
    first, second = run_ranks(2, driver, *options(corpus, tmp_path))
    assert (first.returncode, second.returncode) == (143, 130), first.stderr + second.stderr
    assert "stopped by SIGTERM after step" in first.stdout and second.stdout == second.stderr == ""


WAITS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from nanogpt import process, ranks
stop = process.Stop()
stop.take_over()
print("waits", flush=True)
ranks.start_process("cpu", 0, 1.0)
"""


def test_a_signal_ends_a_process_that_waits_for_the_other_ranks(tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    ranks_of_two = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(processes.free_port()))
    waiting = Process(tmp_path / "waits.py", env=processes.ENVIRONMENT | ranks_of_two, stderr=subprocess.STDOUT)
    waiting.wait_for("waits")
    time.sleep(1)  # now it is inside of PyTorch
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(5) == -signal.SIGTERM


def test_torchrun_hands_a_signal_on_to_both_ranks(corpus, tmp_path):
    command = [*TORCHRUN, "--nproc_per_node=2", "train_gpt.py", *options(corpus, tmp_path, **LONG)]
    _, seconds, out = signalled(signal.SIGTERM, "step:10/", *command)
    log = read_log(last_log(tmp_path))
    assert seconds < 30 and log.end["interrupted"] and "stopped by SIGTERM after step" in out
    assert the_save(tmp_path).exists()


# ---------------------------------------------------------------------------------------------------- weights


WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
GOOD = {"config": {"seed": 1}, "step": 7, "val_loss": 1.5}


def test_what_is_written_is_read_and_others_can_read_it_too(tmp_path):
    path = tmp_path / "models" / "model.safetensors"
    checkpoints.write(path, WEIGHTS, GOOD)
    weights, about = checkpoints.read(path)
    assert about == GOOD
    for w in (weights, load_file(path)):
        assert w["b"].dtype == torch.bfloat16 and same(w, WEIGHTS)
    assert os.listdir(path.parent) == [path.name]
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode, "whoever may read other files may read this one"


def test_a_file_that_is_no_checkpoint_or_fits_no_model_says_what_it_is(stopped, tmp_path, capfd):
    path, save = tmp_path / "model.safetensors", the_save(stopped)
    shutil.copy(stopped / "model.safetensors", path)
    size = path.stat().st_size
    foreign = tmp_path / "foreign.safetensors"
    save_file({"a": torch.ones(2)}, foreign)
    torch.save({"weights": {}}, tmp_path / "old.pt")
    (tmp_path / "text.txt").write_text("Once upon a time")
    configs = {"schedule": {"schedule": "long"}, "width": {"model_dim": -5}, "rows": {"ngram_rows": 8}}
    for name, config in configs.items():
        checkpoints.write(tmp_path / name, WEIGHTS, GOOD | {"config": config | {"num_layers": 4}})
    other = "{} is missing, cut off, or no file of this program"
    cases = [(path, size - 1, other), (path, 0, other), (tmp_path, None, "{} is a folder; name a file"), (foreign, None, "{} holds no weights of this program; name a file"),
             (tmp_path / "old.pt", None, other), (tmp_path / "text.txt", None, other), (tmp_path / "nothing", None, other),
             (save, None, "{} holds no weights of this program; name a file"), (tmp_path / "schedule", None, "--schedule=long is none of"),
             (tmp_path / "width", None, "--model_dim=-5 must be at least 1"), (tmp_path / "rows", None, "{} does not fit this code; use the code of its run")]
    for file, length, part in cases:
        if length is not None:
            os.truncate(file, length)
        assert end_in_order("sample.py", sample.work, [str(file), "text", "--device=cpu"]) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith(f"sample.py: {part.format(file)}"), err


def test_under_auto_no_file_of_another_run_is_replaced(tmp_path):
    path = tmp_path / "novel.safetensors"
    assert checkpoints.unused_path(path) == path
    for name in ("novel-2", "novel-3"):
        path.touch()
        path = checkpoints.unused_path(tmp_path / "novel.safetensors")
        assert path == tmp_path / f"{name}.safetensors"
    (tmp_path / "novel-3.safetensors.part").touch()  # another run is writing it
    assert checkpoints.unused_path(tmp_path / "novel.safetensors").name == "novel-4.safetensors"


def test_a_run_whose_best_weights_were_moved_while_it_was_stopped_keeps_weights_again(corpus, tmp_path, monkeypatch):
    losses = iter([9.0, 1.0, 3.0, 2.0])  # at step 0, before the stop, and after it
    monkeypatch.setattr(t, "validate", lambda *_: next(losses))
    assert run(options(corpus, tmp_path), stop_after=3) == 130
    (tmp_path / "model.safetensors").unlink()
    assert run(["--resume", f"--log_dir={tmp_path}"]) == 0
    assert checkpoints.read(tmp_path / "model.safetensors")[1]["val_loss"] == 2.0


def test_a_run_that_was_stopped_before_it_had_weights_to_keep_goes_on_and_keeps_them(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = options(corpus, tmp_path, save_checkpoint="auto", val_interval=6)
    assert run(keys, stop_after=3) == 130 and not [*tmp_path.glob("models/*")]
    assert run(["--resume", f"--log_dir={tmp_path}"]) == 0
    assert len([*tmp_path.glob("models/*")]) == 1


def test_the_weights_of_the_best_validation_are_kept_and_a_resumed_run_goes_on_comparing(
        corpus, tmp_path, monkeypatch, capsys):
    """Untrained weights do not count, even if they were the best."""
    monkeypatch.chdir(tmp_path)
    losses = [1.0, 3.0, 4.0, 2.0]  # at steps 0, 2, 3 (when it is stopped there is none), 4, 6
    monkeypatch.setattr(t, "validate", lambda *_: losses.pop(0))
    auto = {"save_checkpoint": "auto"}
    assert run(options(corpus, tmp_path, **auto), 3) == 130
    (path,) = (tmp_path / "models").iterdir()
    about = checkpoints.read(path)[1]
    assert path.name == f"{corpus.name}.safetensors" and about["val_loss"] == 3.0
    assert about.keys() == {"config", "step", "val_loss", "run_id", "code_sha256", "data"}, "as checkpoints.py says"
    assert checkpoints.load_model(path, "cpu", t).trained_steps == 2
    assert run(["--resume", f"--log_dir={tmp_path}"], 5) == 130
    assert checkpoints.read(path)[1]["step"] == 2, "4.0 is worse"
    out = capsys.readouterr().out
    assert f"{path.relative_to(tmp_path)}, of step 2 with loss 3.0000" in out
    assert out.count("step:2/6 val_loss:3.0000") == 1, "lines of an earlier run are shown again"
    assert run(["--resume", f"--log_dir={tmp_path}"]) == 0
    assert checkpoints.read(path)[1]["step"] == 6 and [*(tmp_path / "models").iterdir()] == [path]


def test_weights_of_another_train_gpt_say_so_where_they_are_loaded_and_those_of_this_one_do_not(stopped, capfd, monkeypatch):
    path = stopped / "model.safetensors"
    t.checkpoints.load_model(path, "cpu", t)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(t, "SOURCE", t.SOURCE.replace(b"ACTIVATION = relu_squared", b"ACTIVATION = F.gelu"))
    t.checkpoints.load_model(path, "cpu", t)
    run_id = checkpoints.read(path)[1]["run_id"]
    assert capfd.readouterr().err == (f"{path} was trained by another train_gpt.py; what this one computes with it may "
                                      f"be wrong. `python -m records code LOGS/{run_id}.txt FOLDER` writes the other one\n")
    weights, about = checkpoints.read(path)
    monkeypatch.setattr(checkpoints, "read", lambda path: (weights, about | {"code_sha256": None}))
    t.checkpoints.load_model(path, "cpu", t)  # an older file has no sum
    assert capfd.readouterr().err == ""


def test_the_first_signal_counts_a_second_control_c_ends_the_process_and_what_is_ignored_stays_so(monkeypatch):
    handlers, ignored = {}, signal.SIGHUP  # as under nohup
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN if number == ignored else signal.SIG_DFL)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    stop = process.Stop()
    stop.take_over()
    assert handlers == dict.fromkeys((signal.SIGINT, signal.SIGTERM), signal.SIG_DFL)
    stop.end_after_a_step()
    assert handlers == dict.fromkeys((signal.SIGINT, signal.SIGTERM), stop.notice)
    stop.notice(signal.SIGTERM, None)
    assert handlers == {signal.SIGINT: signal.SIG_DFL, signal.SIGTERM: stop.notice}
    stop.notice(signal.SIGINT, None)  # torchrun hands on the next Ctrl-C as SIGTERM
    assert handlers == dict.fromkeys((signal.SIGINT, signal.SIGTERM), signal.SIG_DFL)
    assert stop.signal == "SIGTERM"


def test_process_1_of_a_container_which_the_system_spares_ends_with_the_status_of_a_signal(monkeypatch):
    handlers, statuses = {}, []
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "_exit", statuses.append)
    process.Stop().end_at_once([signal.SIGTERM])
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert statuses == [143]


def test_ranks_wait_longer_only_while_rank_0_writes(monkeypatch):
    events = []
    monkeypatch.setattr(ranks, "limit_waiting", lambda longest=ranks.LONGEST_STEP: events.append(longest))
    monkeypatch.setattr(ranks, "all_ranks", lambda _: events.append("meet"))
    with ranks.patiently():
        events.append("write")
    assert events == [ranks.LONGEST_WRITE, "write", "meet", ranks.LONGEST_STEP]
