"""Whole runs of train_gpt.py, as a user starts them: plain, under torchrun, with bad input, from a log's own code.

References: the file's bytes for the log's first part, `records.log.read_log` (written apart from the trainer, it
recomputes what a log says), the text log for its JSON twin, a second run for determinism, one process for two, and for
what a sentence must say the value that was wrong. Real processes where the process is the point, `main` elsewhere.
"""
import dataclasses
import math
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import processes
import pytest
import torch
from conftest import ROOT, TINY, arguments, check_data, documents, untrained
from processes import ENVIRONMENT, TORCHRUN

import train_gpt as t
from nanogpt import candidates, checkpoints, masks, process, tables, warmup
from nanogpt.precision import StepHooks
from nanogpt.ranks import BadInput
from records.log import read_log

SCRIPT = ROOT / "train_gpt.py"


def start(*args, script=SCRIPT, **options):
    """Runs the script to its end as a user does, in a new process; a hang is a failure."""
    command = [sys.executable, str(script), *args]
    options = dict(capture_output=True, text=True, timeout=100, env=ENVIRONMENT, cwd=ROOT) | options
    return subprocess.run(command, **options)


def only_log(folder, suffix="txt"):
    (path,) = folder.glob(f"*.{suffix}")
    return path


def losses(log):
    return [(s.step, s.split, s.loss) for s in log.steps]


@pytest.fixture(scope="module")
def first(corpus, tmp_path_factory):
    """A plain run that misses its target, with all outputs: (process, folder)."""
    folder = tmp_path_factory.mktemp("first")
    args = arguments(data_dir=corpus, log_dir=folder, save_checkpoint=folder / "model.pt", sample="The ",
                     sample_tokens=8, run_name="a test")
    return start(*args), folder


# ---------------------------------------------------------------------------------------------------- a plain run


def facts_in(text):
    """The lines with a name and what is said of it."""
    return dict(re.findall(r"^(\w+) +(.+)$", text, re.MULTILINE))


def test_a_run_says_what_it_will_do_and_what_came_of_it_and_to_miss_the_target_is_no_crash(
        first, corpus):
    run, folder = first
    path, weights = only_log(folder), folder / "model.pt"
    assert run.returncode == 0 and run.stderr == ""
    begin, end = map(facts_in, run.stdout.split("\nsample: The "))
    expected = {
        "preset": "laptop", "precision": "fp32", "seed": "0", "log": str(path),
        "weights": str(weights), "run": "4 steps, 4,096 bytes, 0.34 epochs",
        "data": f"{corpus}: 12,000 bytes for training, 512 for validation"}
    assert expected.items() <= begin.items()
    result, best = read_log(path).end, checkpoints.read(weights)[1]
    loss, seconds = result["val_loss"], result["train_time_s"]
    expected = {
        "loss": f"{loss:.4f} nats per byte, {loss / math.log(2):.3f} bits per byte",
        "target": "1: missed", "log": str(path),
        "weights": f"{weights}, of step {best['step']} with loss {best['val_loss']:.4f}"}
    assert expected.items() <= end.items() and end["training"].endswith(" the loss of steps 1 to 4")
    per_step, per_second = result["step_avg_ms"], result["tokens_per_s"]
    assert end["time"] == f"{seconds:.1f} s of training, {per_step} ms a step, {per_second:,} tokens/s"
    assert (per_step, per_second) == pytest.approx((250 * seconds, 4096 / seconds), rel=0.01)
    sampling, evaluation = run.stdout.splitlines()[-2:]
    assert sampling.endswith(f'sample.py {weights} "Once upon a time"')
    assert evaluation.endswith(f"evaluate.py {weights}")


def test_a_run_that_reaches_its_target_exits_with_0_and_the_same_seed_gives_the_same_losses(first, corpus, tmp_path):
    run = processes.run(SCRIPT, *arguments(data_dir=corpus, log_dir=tmp_path, target_loss=100))
    assert run.returncode == 0 and re.search(r"\ntarget +100: reached\n", run.stdout)
    again = read_log(only_log(tmp_path))
    assert losses(again) == losses(read_log(only_log(first[1])))


def test_another_seed_gives_other_losses(first, corpus, tmp_path):
    assert t.main(arguments(data_dir=corpus, log_dir=tmp_path, seed=1)) == 0
    assert losses(read_log(only_log(tmp_path))) != losses(read_log(only_log(first[1])))


def test_the_order_of_a_run_and_that_each_step_draws_other_numbers(corpus, tmp_path, monkeypatch):
    """Before each validation all weights are complete, and before the last one they are averaged."""
    events, seeds, draws, limits, limits_before_steps = [], [], [], [], []

    def note(owner, name, event):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **named: (event(*args), function(*args, **named))[1])

    note(t.Optimizer, "go_half_way_to_averages", lambda *_: events.append("average"))
    note(tables.Tables, "complete", lambda *_: events.append("complete"))
    note(StepHooks, "before_validation", lambda *_: events.append("gather"))
    note(t, "validate", lambda *_: events.append("validate"))
    note(t.STOP, "end_at_once", lambda *_: events.append("a signal ends it"))
    note(t, "train_step", lambda *_: (events.append("step"), seeds.append(torch.initial_seed())))
    note(candidates, "choose", lambda *args: draws.append(args[-1]))
    note(t.ranks, "limit_waiting", lambda *longest: limits.append(longest))
    monkeypatch.setattr(t.STOP, "end_after_a_step", lambda: (  # as steps begin
        [x.clear() for x in (events, seeds, draws)], limits_before_steps.extend(limits)))
    t.main(arguments(data_dir=corpus, log_dir=tmp_path, candidates=64, average_frac=1.0))
    whole = ["complete", "gather", "validate"]
    assert events == [*whole, "step", "step", *whole, "step", "step", "average", "complete", *whole,
                      "a signal ends it"]
    assert len(set(seeds)) == 4 and limits_before_steps == [()], "a rank that has died would be waited for too long"
    assert len(draws) == 4 and not any(torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])


def test_the_clock_stands_still_while_it_validates(corpus, tmp_path, monkeypatch):
    now = [1.0]
    monkeypatch.setattr("records.journal.time.perf_counter", lambda: now[0])
    for name, seconds in (("validate", 1000), ("train_step", 3)):
        monkeypatch.setattr(t, name, lambda *args, function=getattr(t, name), seconds=seconds, **named: (
            now.__setitem__(0, now[0] + seconds), function(*args, **named))[1])
    t.main(arguments(data_dir=corpus, log_dir=tmp_path, val_interval=1))
    times = [step.time_ms for step in read_log(only_log(tmp_path)).steps]
    assert times == [0, *[3000 * step for step in (1, 2, 3, 4) for _ in ("train", "val")]]


def test_schedules_follow_the_steps_that_minutes_choose(corpus, tmp_path, monkeypatch, capsys):
    train_step, lengths, of_warm_up, models = t.train_step, [], [], []

    def step(model, optimizer, batch, number, requests=None, *rest, **named):
        (lengths if requests else of_warm_up).append(model.config.num_steps)
        models.append(model)
        return train_step(model, optimizer, batch, number, requests, *rest, **named)

    monkeypatch.setattr(t, "train_step", step)
    monkeypatch.setattr(warmup.WarmUp, "seconds_per_step", lambda *_: 30.0)
    argv = arguments(data_dir=corpus, log_dir=tmp_path, minutes=4, epochs=100, cut_documents=True, recall_rows=1001)
    assert t.main([word for word in argv if not word.startswith("--num_steps")]) == 0
    assert read_log(only_log(tmp_path)).config["epochs"] == 1 and models[-1].recall_table.any(), "a text that is read once is remembered"
    assert set(lengths) == {len(lengths)} == {8} == {read_log(only_log(tmp_path)).config["num_steps"]}
    assert of_warm_up[-1] == len(lengths), "with other stages other graphs may be needed"
    assert re.search(r"\nrun +8 steps, .*, about 4\.0 min\n", capsys.readouterr().out)


def test_a_stage_counts_by_its_steps_and_the_slowest_rank_when_minutes_choose_them(monkeypatch):
    """A step here takes a second for each sequence that it trains on, and one to prepare the next batch."""
    monkeypatch.setitem(t.SCHEDULES, "unequal", [t.Stage(0.75, 0.25, 1, 1, 1.0), t.Stage(0.25, 1, 2, 2, 1.0)])
    model = t.GPT(t.Config(**TINY | dict(schedule="unequal", num_steps=4)), torch.device("cpu"))
    warm_up, now, prepare = warmup.WarmUp(model, t.Optimizer(model), t), [1.0], model.past.prepare

    def train_step(model, optimizer, batch, step, prepare_next):
        now[0] += len(batch.next_tokens) / 256
        model.past.meet()
        model.past.remember(batch)
        prepare_next()

    monkeypatch.setattr("records.journal.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(t, "train_step", train_step)
    monkeypatch.setattr(model.past, "prepare", lambda *args, **named: (
        now.__setitem__(0, now[0] + 1), prepare(*args, **named))[1])
    monkeypatch.setattr(warmup, "all_ranks", lambda seconds: [seconds, 2 * seconds])
    assert warm_up.seconds_per_step() == pytest.approx(2 * (0.75 * (1 + 1) + 0.25 * (4 + 1)))


def test_seeds_steps_and_ranks_round_by_other_numbers_and_a_step_made_again_by_the_same(monkeypatch):
    def draw(seed, step, rank):
        monkeypatch.setattr(t.ranks, "rank_and_world_size", lambda: (rank, 8))
        t.seed_rounding(seed, step, torch.device("cpu"))
        return torch.rand(4).tolist()

    of_each = [(seed, step, rank) for seed in (0, 1, 10**18) for step in (0, 1, 3000) for rank in (0, 7)]
    drawn = [draw(*which) for which in of_each]
    assert drawn == [draw(*which) for which in of_each] and len({tuple(x) for x in drawn}) == len(of_each)


def test_the_log_begins_with_the_source_byte_for_byte_and_agrees_with_itself(first, corpus):
    path = only_log(first[1])
    assert path.read_bytes().startswith(SCRIPT.read_bytes() + b"=" * 100 + b"\n")
    log = read_log(path)
    assert path.stem == log.run["run_id"]
    assert log.files == {name: (ROOT / name).read_bytes() for name in log.files}
    for name in ("train_gpt.py", "data/shards.py", "nanogpt/ranks.py", "records/journal.py", "sample.py"):
        assert name in log.files, "not all that ran is in the log"
    expected = TINY | {"data_dir": str(corpus), "run_name": "a test", "seed": 0, "dtype": "auto"}
    expected |= {"sample": "The ", "save_checkpoint": log.config["save_checkpoint"]}  # as the fixture has given them
    assert {k: log.config[k] for k in expected} == expected
    assert [(d["split"], d["name"], d["tokens"]) for d in log.facts["data"]] == [
        ("train", "fineweb_train_000001.bin", 6000), ("train", "fineweb_train_000002.bin", 6000),
        ("val", "fineweb_val_000000.bin", 2000)]
    assert [(s.step, s.split) for s in log.steps] == [
        (0, "val"), (1, "train"), (2, "train"), (2, "val"), (3, "train"), (4, "train"), (4, "val")]
    assert log.steps[0].loss == pytest.approx(math.log(384), abs=0.01) and log.steps[0].time_ms == 0
    assert log.facts["stage"] == [{"first_step": 0, "last_step": 4, "batch_tokens": 1024}]
    assert log.end["tokens"] == 4096 and log.end["reached"] is False and log.end["target"] == 1
    assert log.environment["devices"] == ["CPU"] and log.environment["torch"] == torch.__version__


STAGES = {"schedule": "onepass", "num_steps": 6, "batch_tokens": 2048, "epochs": 3}  # 4, 4 and 8 sequences a step


def test_the_files_taken_out_of_a_log_run_by_themselves_and_give_the_same_losses(first, corpus, tmp_path):
    path, folder, logs = only_log(first[1]), tmp_path / "old", tmp_path / "logs"
    out = processes.run("-m", "records", "code", path, folder)
    assert out.returncode == 0, out.stderr
    written = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.py")}
    settings = shlex.split(out.stdout.splitlines()[-1])
    output = [f"--save_checkpoint={logs / 'model.pt'}", "--sample=The ", "--sample_tokens=8"]
    again = start(*settings, f"--data_dir={corpus}", f"--log_dir={logs}", *output, script=folder / "train_gpt.py", cwd=folder)
    assert again.returncode == 0 and "\nsample: The " in again.stdout, again.stderr
    log = read_log(only_log(logs))
    assert log.files == read_log(path).files == written and log.run["git_commit"] is None
    assert losses(log) == losses(read_log(path))


def test_a_loaded_model_has_the_loss_of_the_saved_one(first, corpus):
    c = t.parse_config(arguments(data_dir=corpus))
    model = t.checkpoints.load_model(first[1] / "model.pt", torch.device("cpu"), t)
    _, val_tokens, *_ = check_data(c)
    loss = t.validate(model, val_tokens, c.num_steps)
    assert loss == pytest.approx(read_log(only_log(first[1])).end["val_loss"], abs=6e-5)


# ---------------------------------------------------------------------------------------------------- torchrun


def test_two_processes_have_the_losses_and_weights_of_one_through_all_stages(corpus, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    changes = STAGES | dict(data_dir=corpus, dtype="float64", cut_documents=True, micro_tokens=512)
    t.main(arguments(log_dir=one, save_checkpoint=one / "model.pt", **changes))
    run = processes.run(*TORCHRUN, "--nproc_per_node=2", SCRIPT,
                        *arguments(log_dir=two, save_checkpoint=two / "model.pt", **changes))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("step:6/6 val_loss") == 1  # only rank 0 speaks
    log = read_log(only_log(two))
    assert log.environment["world_size"] == 2
    assert losses(log) == losses(read_log(only_log(one)))
    stages = [[*stage.values()] for stage in log.facts["stage"]]
    assert stages == [[0, 2, 1024], [2, 4, 1024], [4, 6, 2048]]
    assert log.end["tokens"] == 4 * 1024 + 2 * 2048
    assert log.steps[1].loss == pytest.approx(math.log(384), abs=0.05), "the mean of a small batch"
    a, b = (checkpoints.read(folder / "model.pt")[0] for folder in (one, two))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-9, atol=1e-9)


def test_what_is_looked_for_one_step_ahead_is_what_the_step_itself_would_find(corpus, tmp_path, monkeypatch):
    """The table of recalled tokens has all earlier steps then, and nothing of the step's own tokens."""
    train_step, recalled, texts = t.train_step, [], []

    def checked(model, optimizer, batch, step, *others):
        if len(others) == 2:  # not while warming up
            for reading, _ in batch.micro_batches:
                found = model.past.read(reading.tokens, True)
                assert all(map(torch.equal, reading, found))
                recalled.append(found.recalled_length.count_nonzero().item())
            texts.append(batch.micro_batches[0][0].tokens)
            of_first_step = model.past.read(texts[0], True).recalled_length  # most places are not shared with others
            assert step == 0 or of_first_step.count_nonzero() > 0.9 * len(of_first_step)
        return train_step(model, optimizer, batch, step, *others)

    monkeypatch.setattr(t, "train_step", checked)
    t.main(arguments(data_dir=corpus, log_dir=tmp_path, recall_rows=2**16, longest_ngram=2, micro_tokens=256, num_steps=8))
    per_step = len(recalled) // 8
    assert per_step > 1 and not any(recalled[:per_step]) and recalled[-1] > 0


# ---------------------------------------------------------------------------------------------------- bad input


def refused(capfd, args):
    """The sentence with which `main` refuses."""
    status = t.main(args)
    out, err = capfd.readouterr()
    assert status == 2 and err.endswith("\n") and err.count("\n") == 1 and out == "", (status, out, err)
    return err


@pytest.mark.parametrize("changes, parts", [
    ({"num_steps": 0}, ["--num_steps=0", "at least 1"]), ({"val_interval": -1}, ["--val_interval=-1", "at least 0"]),
    ({"seq_len": 200, "batch_tokens": 800}, ["--seq_len=200", "multiple of 128"]), ({"micro_tokens": 255}, ["--micro_tokens=255", "at least 256"]),
    ({"candidates": 200}, ["--candidates=200", "multiple of 16"]),
    ({"schedule": "long"}, ["--schedule=long", "speedrun, onepass, laptop, char"]),
    ({"schedule": "onepass", "batch_tokens": 256}, ["--batch_tokens=256", "0.5 of it"]),  # its first stage has a half of that
    ({"val_seq_len": 100}, ["--val_seq_len=100", "128"]), ({"batch_tokens": 1000}, ["--batch_tokens=1000", "256"]),
    ({"val_tokens": 300}, ["--val_tokens=300", "256"]), ({"num_heads": 3}, ["--num_heads=3", "48", "32, which is --model_dim"]),
    ({"model_dim": 16}, ["--head_dim=16 is 32", "16, which is --model_dim"]), ({"head_dim": 6}, ["--head_dim=6", "multiple of 4"]), ({"cooldown_frac": 0}, ["--cooldown_frac=0"]), ({"muon_momentum": 1}, ["--muon_momentum=1", "at most"]),
    ({"schedule": "long", "fit": True}, ["--schedule=long", "speedrun, onepass, laptop"]), ({"num_steps": 4000}, ["steps of the 4000", "--fit", "--epochs"]),
    ({"data_dir": "/nowhere"}, ["no train shards", "in /nowhere; check the path, or get them: data/prepare.py"]), ({"val_tokens": 25600}, ["25,601", "2,000"]),
    ({"val_files": "none*"}, ["no val shards (--val_files=none*)", "data/prepare.py"]), ({"train_files": ""}, ["--train_files"]),
    ({"vocab_size": 50304}, ["fineweb_train_000001.bin holds tokens of the kind bytes", "--vocab_size=50304 wants gpt2", "--tokens=gpt2"]),
    ({"float8_all_gather": True}, ["--float8_all_gather", "--precision=fp8"]),
    ({"vocab_size": 10**11}, ["--vocab_size=100000000000", "65536"]),
    ({"muon_lr": "nan"}, ["--muon_lr=nan"]), ({"device": "mps"}, ["--device=mps", "auto, cuda, cpu"]),
    ({"log_dir": "/dev/null/logs"}, ["nothing can be written to /dev/null/logs "]), ({"save_checkpoint": "/dev/null/x.pt"}, ["/dev/null"]),
    ({"resume": "nowhere"}, ["nowhere is missing", "leave --resume out"]),
    ({"save_checkpoint": "."}, ["--save_checkpoint=. is a folder; name a file"]), ({"save_checkpoint": "false"}, ["--save_checkpoint=false", "nothing behind the ="]), ({"sample": "The"}, ["--save_checkpoint=auto", "--sample="]),
    ({"attention": "flex"}, ["--attention=flex is none of auto, sdpa"]), ({"attention_layers": "none"}, ["at least one layer needs attention"]),
    ({"recall_for": "2,3"}, ["--recall_for=2,3", "some of 3,4,5"]),
], ids=lambda value: "-".join(map(str, value.items())) if isinstance(value, dict) else "")
def test_a_value_that_cannot_be_is_named_in_one_sentence(changes, parts, corpus, tmp_path, capfd):
    sentence = refused(capfd, arguments(**{"data_dir": corpus, "log_dir": tmp_path} | changes))
    assert all(part in sentence for part in parts), sentence
    assert not list(tmp_path.iterdir()), "the log was opened before all was checked"


def test_nanogpts_tokens_without_a_header_are_recognised_with_the_remedy(tmp_path, capfd):
    np.arange(100, dtype="<u2").tofile(tmp_path / "train.bin")
    sentence = refused(capfd, arguments(data_dir=tmp_path, log_dir=tmp_path / "logs"))
    assert "train.bin" in sentence and "nanoGPT" in sentence and "write_shard" in sentence


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_a_gpu_that_is_not_there_is_one_sentence(capfd):
    assert "--device=cuda" in refused(capfd, arguments(device="cuda"))


def test_a_rank_without_torchrun_is_one_sentence(monkeypatch, corpus, tmp_path, capfd):
    monkeypatch.setenv("RANK", "0")
    sentence = refused(capfd, arguments(data_dir=corpus, log_dir=tmp_path))
    assert "WORLD_SIZE" in sentence and "torchrun" in sentence


# ---------------------------------------------------------------------------------------------------- configuration


def test_help_shows_the_preset_that_the_device_would_have(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device, preset in (("cpu", "laptop"), ("auto", "speedrun")):
        with pytest.raises(SystemExit):
            t.parse_config(["--help", f"--device={device}"])
        assert f"the values of --preset={preset}" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(BadInput, match="--num_steps=0 must be at least 1"):  # run.sh finds values out of range by this
        t.parse_config(["--help", "--num_steps=0"])


def test_presets_are_laid_over_the_defaults(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, values in t.PRESETS.items():
        laid_over = dataclasses.asdict(t.Config()) | values | {"preset": name} | t.ON_CPU
        assert dataclasses.asdict(t.parse_config([f"--preset={name}"])) == laid_over


# ---------------------------------------------------------------------------------------------------- compilation


def masks_of_one_shape(documents, windows, make_masks=masks.sdpa_masks):
    """SDPA's, but as FlexAttention's are: what a window is changes their numbers and not their shapes."""
    n = len(documents) // masks.BLOCK_SIZE
    far = torch.arange(n * masks.BLOCK_SIZE - 1, -1, -1) // masks.BLOCK_SIZE
    [whole] = make_masks(documents, (n,))
    return [whole & (far < window) for window in windows]


@pytest.mark.parametrize("make_masks", [masks_of_one_shape, masks.sdpa_masks])
def test_warming_up_compiles_every_graph_of_the_run(make_masks, eager_graphs, corpus, tmp_path, monkeypatch):
    """Each stage has two steps, and batches of 4 or 8 sequences; a sequence of validation is longer than most windows."""
    monkeypatch.setattr(masks, "sdpa_masks", make_masks)
    args = arguments(data_dir=corpus, log_dir=tmp_path, compile=True, val_interval=3, val_tokens=1280, val_seq_len=1280, **STAGES)
    assert t.main(args) == 0
    log = read_log(only_log(tmp_path))
    assert len(log.facts["compile"]) >= 4 and log.facts["defect"] == []
    assert [fact["what"] for fact in log.facts["compile"]].count("block") >= 2, "one for each length of a micro-batch"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_on_a_gpu_a_run_of_compiled_cuda_graphs_has_the_losses_of_one_without(corpus, tmp_path, precision):
    """Over all stages, with two and four micro-batches a step, and the head in every second step."""
    losses = []
    for compiled in (True, False):
        torch._dynamo.reset()
        folder = tmp_path / str(compiled)
        t.main(arguments(data_dir=corpus, log_dir=folder, device="cuda", attention="sdpa", compile=compiled, candidates=0,
                         precision=precision, micro_tokens=512, head_every_second=True, val_interval=0, **STAGES))
        log = read_log(only_log(folder))
        assert log.facts["defect"] == []
        losses.append([s.loss for s in log.steps])
    assert losses[0] == pytest.approx(losses[1], abs=0.05)


def test_a_warm_up_leaves_no_trace(corpus, tmp_path, monkeypatch):
    """Neither in weights, moments, averages and what is recalled, nor in what is counted."""
    def result(name):
        folder = tmp_path / name
        t.main(arguments(data_dir=corpus, log_dir=folder, save_checkpoint=folder / "model.pt", num_steps=8, candidates=16,
                         schedule="laptop", recall_rows=2**16, average_frac=1.0, val_interval=0))
        return checkpoints.read(folder / "model.pt")[0], read_log(only_log(folder)).facts["defect"]

    with_warm_up, lost = result("with")
    monkeypatch.setattr(t.warmup.WarmUp, "run", lambda self: None)
    without, lost_without = result("without")
    assert all(torch.equal(weight, without[name]) for name, weight in with_warm_up.items())
    assert lost == lost_without != []


@pytest.mark.parametrize("step", [0, 4])  # with other windows
def test_the_mean_of_validation_is_over_exactly_val_tokens(step):
    """Its sequences are longer than those of training, and read as a whole."""
    model = untrained(val_tokens=1024, val_seq_len=512, schedule="laptop")
    model.lm_head.data.normal_(generator=torch.Generator().manual_seed(0))
    setting = t.setting_of(step, model.config)
    tokens = torch.tensor(documents(1300, longest=900), dtype=torch.int32).clamp(max=383)
    by_hand = 0.0
    for begin in (0, 512):  # what lies behind the 1025th token does not count
        part = tokens[begin : begin + 513].long()
        x, sources = model.last_stream(model.past.read(part[:-1], False), setting, training=False)
        by_hand += torch.nn.functional.cross_entropy(model.logits(x, sources).double(), part[1:], reduction="sum").item()
    assert t.validate(model, tokens.to(torch.uint16), step) == pytest.approx(by_hand / 1024, rel=1e-5)


def test_a_sequence_of_validation_may_be_longer_than_a_batch(corpus, tmp_path):
    assert t.main(arguments(data_dir=corpus, log_dir=tmp_path, batch_tokens=256, val_seq_len=512)) == 0


def test_each_rank_compiles_its_share_of_the_graphs_first(monkeypatch):
    model, done = untrained(**STAGES, micro_tokens=1024), []
    for name in ("forward_backward", "validate", "update"):
        monkeypatch.setattr(warmup.WarmUp, name, lambda self, *step, name=name: done.append((name, *step)))
    for rank in (0, 1):
        for module in ("warmup", "batches"):
            monkeypatch.setattr(f"nanogpt.{module}.rank_and_world_size", lambda rank=rank: (rank, 2))
        warmup.WarmUp(model, t.Optimizer(model), t).compile_share()
        assert len(done) == 2 * (rank + 1)
    passes = [t.batch_plan(model.config)[step] for name, *steps in done for step in steps if name == "forward_backward"]
    assert sorted(passes) == [4, 8] and ("validate", 6) in done and ("update",) in done, "one for each length of a micro-batch"


def test_what_is_compiled_while_the_clock_runs_is_a_defect(eager_graphs, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(t.warmup.WarmUp, "run", lambda self: None)
    t.main(arguments(data_dir=corpus, log_dir=tmp_path, compile=True, val_interval=0, num_steps=2, num_layers=1))
    log = read_log(only_log(tmp_path))
    assert "block was compiled while the clock ran" in [fact["what"] for fact in log.facts["defect"]]
    assert all(fact["seconds"] >= 0 for fact in log.facts["defect"]) and log.facts["compile"] == []


@pytest.mark.parametrize("visible, local_rank, cards, expected", [
    ("4,5", 1, 0, (0, "5")), (None, 3, 8, (0, "3")), (None, 0, 0, (0, None)), ("", 1, 8, (1, ""))])
def test_a_process_started_by_torchrun_sees_its_own_gpu_only(visible, local_rank, cards, expected, monkeypatch):
    for name, value in dict(CUDA_VISIBLE_DEVICES=visible, LOCAL_RANK=str(local_rank)).items():
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    given = "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_HIGH_PRIORITY"
    for name in given:
        monkeypatch.setenv(name, "kept")
    monkeypatch.setattr(process, "glob", lambda pattern: ["card"] * cards)
    assert (process.set_environment(), os.environ.get("CUDA_VISIBLE_DEVICES")) == expected
    assert {os.environ[name] for name in given} == {"kept"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what pytest puts back at the end is the old value


# ---------------------------------------------------------------------------------------------------- the file itself


ROOMS = ["sample", *sorted(str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
                           for folder in ("nanogpt", "nanogpt/precision", "data", "records") for path in (ROOT / folder).glob("*.py"))]
IMPORT = """
import os, sys, threading
sys.path.insert(0, sys.argv[1])
sys.modules["triton"] = None  # as if it were not installed
import torch

def state():
    return dict(os.environ), torch.get_num_threads(), torch.get_rng_state().tolist(), threading.active_count()

for name in sys.argv[2:]:
    if os.fork() == 0:  # each one is imported first of all
        before = state()
        __import__(name)
        loaded = set(sys.modules) & {"tiktoken", "train_gpt"} - {name}
        os._exit(state() != before or bool(loaded))
    if os.wait()[1]:
        print(name, "cannot be imported, or has side effects")
"""


def test_importing_does_nothing(tmp_path):
    script, empty = tmp_path / "import.py", tmp_path / "empty"
    script.write_text(IMPORT)
    empty.mkdir()
    run = processes.run(script, ROOT, "train_gpt", *ROOMS, cwd=empty)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert not list(empty.iterdir())


def test_stages_that_do_not_make_the_whole_run_are_refused(monkeypatch):
    monkeypatch.setitem(t.SCHEDULES, "short", [t.Stage(0.5, 1, 1, 1, 1.0), t.Stage(0.4, 1, 2, 2, 1.0)])
    with pytest.raises(BadInput, match="the fractions of its stages make 0.9, not 1"):
        t.parse_config(arguments(schedule="short"))
