"""A run that is fitted to a text: preset, lengths and steps follow from what the shards hold."""
import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import SEPARATOR, arguments, check_data, write_shard

import sample
import train_gpt as t
from data import checks, shards
from nanogpt import checkpoints, fitting, run_files
from nanogpt.fitting import Text
from nanogpt.ranks import BadInput

LAPTOP = dict(seq_len=2048, batch_tokens=2048, micro_tokens=16_384, val_seq_len=8192, val_tokens=131_072)
SMALL = dict(seq_len=2048, batch_tokens=32_768, micro_tokens=16_384, val_seq_len=16_384, val_tokens=262_144)


@pytest.mark.parametrize("kind, tokens, cuda, preset", [
    ("bytes", 20_000, False, "laptop"), ("bytes", 10**9, False, "laptop"), ("bytes", 20_000, True, "char"),
    ("gpt2", 20_000, True, "small"), ("gpt2", 59_999_999, True, "small"), ("gpt2", 60_000_000, True, "onepass"),
    ("gpt2", 10**9, False, "small")])
def test_the_preset_follows_from_the_kind_and_the_amount_of_text(kind, tokens, cuda, preset):
    half = tokens // 2
    assert fitting.preset_for(Text(kind, (half, tokens - half), 1000), cuda) == preset


@pytest.mark.parametrize("most", [LAPTOP, SMALL])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("train", [(2000,), (19_000,), (400, 30_000), (1_003_854,), (7, 10**8, 10**8)])
@pytest.mark.parametrize("val", [129, 1000, 55_785, 10**7])
def test_lengths_fit_the_text_and_each_other(most, world_size, train, val):
    fitted = fitting.lengths_that_fit(Text("bytes", train, val), world_size, **most)
    for name, value in fitted.items():
        assert 0 < value and (value <= most[name] or world_size > 1), name
    sequences = fitted["batch_tokens"] // fitted["seq_len"]
    assert sequences * fitted["seq_len"] == fitted["batch_tokens"] and sequences % world_size == 0
    assert fitted["batch_tokens"] + 1 <= max(train), "a batch fits into one shard"
    assert fitted["seq_len"] % 128 == 0 and fitted["micro_tokens"] % fitted["seq_len"] == 0
    assert fitted["val_seq_len"] % 128 == 0 and fitted["val_tokens"] % fitted["val_seq_len"] == 0
    assert fitted["val_tokens"] + 1 <= val
    if max(train) > world_size * most["batch_tokens"] and val > most["val_tokens"]:
        if most["batch_tokens"] // most["seq_len"] % world_size == 0:
            assert fitted == most, "a long text changes nothing"


@pytest.mark.parametrize("tokens, world_size, batch, rows", [
    (321_126, 1, 4096, 5017), (321_126, 2, 4096, 5017), (11_399_128, 1, 32_768, 65_536), (3000, 1, 2048, 46)])
def test_of_a_short_text_the_small_model_has_small_batches_and_a_small_table(tokens, world_size, batch, rows, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    c = t.Config(**t.PRESETS["small"] | fitting.OVER_PRESET | {"preset": "small"})
    text = Text("gpt2", (tokens,), 20_000)
    fitted = fitting.fit_to_text(c, t.SCHEDULES[c.schedule], text, {})
    assert (fitted.batch_tokens, fitted.ngram_rows, fitted.epochs) == (batch, rows, 2)
    given = fitting.fit_to_text(c, t.SCHEDULES[c.schedule], text, {"ngram_rows": 99, "epochs": 7})
    assert (given.ngram_rows, given.epochs) == (99, 7), "what is given stays"


@pytest.mark.parametrize("tokens, longest, rows, recall", [
    (1_000_000, 4, 15_625, 0), (3_000_000, 6, 46_875, 2**21), (90_000_000, 6, 131_072, 2**21)])
def test_of_a_short_text_the_laptop_has_short_ngrams_and_a_small_table_and_recalls_nothing(tokens, longest, rows, recall):
    c = t.Config(**t.PRESETS["laptop"] | fitting.OVER_PRESET | {"preset": "laptop"})
    text = Text("bytes", (tokens,), 200_000)
    fitted = fitting.fit_to_text(c, t.SCHEDULES[c.schedule], text, {})
    assert (fitted.longest_ngram, fitted.ngram_rows, fitted.recall_rows) == (longest, rows, recall)
    given = fitting.fit_to_text(c, t.SCHEDULES[c.schedule], text, {"longest_ngram": 7, "ngram_rows": 99})
    assert (given.longest_ngram, given.ngram_rows) == (7, 99), "what is given stays"


def test_a_table_of_ngrams_takes_at_most_a_tenth_of_a_gpus_memory():
    memory = 24 * 2**30
    rows = fitting.rows_that_fit(768, memory)
    of_a_number = 4 + 3 * 2  # bytes: float32, and three times bf16
    assert 0.099 * memory < rows * 768 * of_a_number <= memory / 10
    assert fitting.rows_that_fit(768, 1000) == 1


@pytest.mark.parametrize("gigabytes, rows, recalled", [
    (24, 671_088, 24 * 2**30 // 32 // 8), (80, 2_236_962, 268_435_456), (1000, 4_024_320, 268_435_456)])
def test_a_run_on_a_gpu_is_fitted_to_its_memory(text, gigabytes, rows, recalled, monkeypatch):
    monkeypatch.setattr(fitting, "SHORT_TEXT", 0)  # of a short text nothing is recalled
    gpu = SimpleNamespace(total_memory=gigabytes * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    given = {"data_dir": text.split("=")[1], "preset": "onepass"}
    fitted = fitting.fit(t.Config(**given), t.PRESETS, t.SCHEDULES, given, cuda=True)
    assert (fitted.ngram_rows, fitted.recall_rows) == (rows, recalled)
    given["ngram_rows"] = 10**7
    assert fitting.fit(t.Config(**given), t.PRESETS, t.SCHEDULES, given, cuda=True).ngram_rows == 10**7
    given["ngram_part"] = 0.0
    with pytest.raises(BadInput, match="--ngram_part=0.0 must be positive"):
        fitting.fit(t.Config(**given), t.PRESETS, t.SCHEDULES, given, cuda=True)


@pytest.mark.parametrize("train, val, world_size, part", [
    (128, 1000, 1, "128 tokens are too few to train on; 129"), (256, 1000, 2, "257"), (5000, 128, 1, "to validate on")])
def test_a_text_that_is_too_short_is_refused_with_the_number_that_is_needed(train, val, world_size, part):
    with pytest.raises(BadInput, match=part):
        fitting.lengths_that_fit(Text("bytes", (train,), val), world_size, **LAPTOP)


@pytest.mark.parametrize("train, epochs", [((19_000,), 40), ((1_003_854,), 2), ((50_000, 3000, 70_000), 5)])
def test_the_steps_are_at_most_those_that_the_loader_has_and_nearly_all_of_them(tmp_path, train, epochs):
    for i, tokens in enumerate(train):
        write_shard(tmp_path / f"mine_train_{i}.bin", np.r_[SEPARATOR, np.arange(tokens - 1) % 256])
    packing = shards.Packing(1024, 272, epochs, True, 2048)
    paths = sorted(tmp_path.glob("*.bin"))
    have = sum(1 for _ in shards.batches(paths, packing, [4] * 10**6))
    fitted = fitting.steps_that_fit(train, math.inf, epochs, 4096, 1024, 4096)
    assert 0.9 * have - epochs <= fitted["num_steps"] <= have
    assert fitted["epochs"] == epochs


def test_wanted_steps_are_taken_and_the_epochs_are_those_they_need():
    shards_of = (100_001,)
    fitted = fitting.steps_that_fit(shards_of, 200, 40, 1000, 1000, 1000)
    assert fitted == dict(num_steps=200, epochs=2, val_interval=20)
    assert fitting.steps_that_fit(shards_of, 10**9, 40, 1000, 1000, 1000)["num_steps"] == 4000, "40 readings at most"
    assert fitting.steps_that_fit(shards_of, math.inf, 10**5, 1000, 1000, 1000)["num_steps"] == 10**6, "no more can be"
    assert fitting.steps_that_fit(shards_of, 0.3, 40, 1000, 1000, 1000) == dict(num_steps=1, epochs=1, val_interval=5)


# --------------------------------------------------------------------------------------- the script


@pytest.fixture
def text(tmp_path):
    write_shard(tmp_path / "novel_train_000001.bin", np.r_[SEPARATOR, np.arange(19_000) % 251])
    write_shard(tmp_path / "novel_val_000000.bin", np.r_[SEPARATOR, np.arange(1000) % 251])
    return f"--data_dir={tmp_path}"


def test_a_folder_without_a_preset_is_fitted_and_one_with_a_preset_is_not(text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    c = t.parse_config([text])
    assert (c.preset, c.fit, c.target_loss, c.save_checkpoint, c.minutes) == ("laptop", True, 0, "auto", 2)
    assert (c.val_tokens, c.val_seq_len) == (896, 896)
    strict = t.parse_config([text, "--preset=laptop"])
    assert (strict.fit, strict.target_loss, strict.val_tokens) == (False, 1.5, 131_072)
    assert t.parse_config([text, "--preset=laptop", "--fit"]) == c
    assert not t.parse_config([]).fit


def test_what_is_given_stays_and_the_rest_follows_from_it(text):
    c = t.parse_config([text, "--num_steps=50", "--seq_len=512", "--target_loss=2.5", "--val_interval=7"])
    assert (c.num_steps, c.minutes, c.seq_len, c.target_loss, c.val_interval) == (50, 0, 512, 2.5, 7)
    assert c.epochs == math.ceil(50 * c.batch_tokens / (19_000 // 512 - c.batch_tokens // 512 + 1) / 512)
    check_data(c)


def test_minutes_become_as_many_steps_as_fit_into_them(text, tmp_path):
    c = t.parse_config([text, "--minutes=0.1"])
    paths = list(tmp_path.glob("*_train_*"))
    assert fitting.fit_to_minutes(c, t.SCHEDULES[c.schedule], paths, 0.2).num_steps == 30
    most = fitting.fit_to_minutes(c, t.SCHEDULES[c.schedule], paths, 1e-9)
    assert most.epochs == fitting.MOST_EPOCHS["laptop"]
    checks.check_amount(paths, t.packing(most), t.batch_plan(most), c.data_dir)


def test_a_fitted_run_saves_the_weights_of_its_best_validation_and_ends_with_0(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    losses = iter([5.0, 3.0, 4.0, 4.5])
    monkeypatch.setattr(t, "validate", lambda *args: next(losses))
    keys = ["--num_steps=3", "--val_interval=1", "--seq_len=256", "--batch_tokens=256", "--model_dim=32", "--num_heads=2", "--head_dim=16", "--sample="]
    assert t.main([text, "--save_checkpoint=best.pt", *keys]) == 0
    content = checkpoints.read("best.pt")
    assert (content["step"], content["val_loss"]) == (1, 3.0)
    shorter = ["--num_steps=3", "--val_interval=0", *keys[2:]]
    losses = iter([4.5])
    assert t.main([text, "--save_checkpoint=last.pt", *shorter]) == 0
    last = checkpoints.read("last.pt")
    assert last["step"] == 3
    assert not torch.equal(last["weights"]["qkvo"], content["weights"]["qkvo"])


def test_the_name_and_the_size_of_a_checkpoint(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    c = dataclasses.replace(t.parse_config([text]), save_checkpoint="auto", recall_rows=0)
    assert str(run_files.place_for_checkpoint(c, 1000)) == f"models/{tmp_path.name}.safetensors"
    asked = []
    monkeypatch.setattr(checkpoints, "try_place", lambda path, size: asked.append(size))
    for c.precision in ("bf16", "fp32"):
        run_files.place_for_checkpoint(c, 1000)
    c = dataclasses.replace(c, recall_rows=10)
    run_files.place_for_checkpoint(c, 1000)
    assert asked == [2000, 4000, 4080], "bytes"


def test_weights_that_are_to_go_to_a_link_go_to_the_file_that_it_leads_to(text, tmp_path):
    link, target = tmp_path / "link.pt", tmp_path / "large_disk" / "target.pt"
    link.symlink_to(target)
    c = dataclasses.replace(t.parse_config([text]), save_checkpoint=str(link))
    assert run_files.place_for_checkpoint(c, 1000) == target and link.is_symlink()


def test_two_runs_of_one_text_at_the_same_time_keep_both_models(text, tmp_path, monkeypatch):
    """Both have found the same name unused when they began."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_files, "place_for_checkpoint", lambda *_: Path("models/novel.pt"))
    Path("models").mkdir()
    keys = ["--num_steps=1", "--val_interval=0", "--seq_len=256", "--batch_tokens=256", "--model_dim=32", "--num_heads=2", "--head_dim=16", "--sample="]
    for seed in (1, 2):
        assert t.main([text, *keys, f"--seed={seed}"]) == 0
    models = [checkpoints.read(path) for path in ("models/novel.pt", "models/novel-2.pt")]
    assert [model["config"]["seed"] for model in models] == [1, 2]


@pytest.mark.parametrize("preset", ["onepass", "speedrun"])
@pytest.mark.parametrize("tokens", [30_001, 320_000, 500_000, 10**8])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_a_text_fits_a_preset_whose_stages_have_parts_of_a_batch(preset, tokens, world_size, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    c = t.Config(**t.PRESETS[preset] | fitting.OVER_PRESET | {"preset": preset})
    full = c.batch_tokens
    c = fitting.fit_to_text(c, t.SCHEDULES[c.schedule], Text("gpt2", (tokens,), 20_000), {})
    t.check_config(c)
    assert c.batch_tokens <= min(tokens, full)
    assert {count % world_size for count in t.batch_plan(c)} == {0}
    if tokens == 10**8 and world_size != 3:
        assert c.batch_tokens == full


@pytest.mark.parametrize("minutes, seconds, option", [
    (1, 0.001, "--epochs=12"), (1, 10.0, "--minutes=5"), (2, 100.0, "--minutes=10")])
def test_the_next_command_makes_the_run_longer(text, tmp_path, minutes, seconds, option):
    c = t.parse_config([text, f"--minutes={minutes}"])
    c = fitting.fit_to_minutes(c, t.SCHEDULES[c.schedule], list(tmp_path.glob("*_train_*")), seconds)
    assert fitting.option_for_longer(c, seconds) == option
    assert fitting.option_for_longer(t.parse_config([text, "--num_steps=3"]), seconds) == ""
    assert fitting.option_for_longer(t.Config(), seconds) == ""


@pytest.mark.parametrize("keys, sentence", [
    (["--batch_tokens=0"], "--batch_tokens=0 must be positive"), (["--seq_len=0"], "--seq_len=0 must be positive"),
    (["--val_seq_len=0"], "--val_seq_len=0 must be positive"), (["--minutes=-3"], "--minutes=-3.0 must not be negative"),
    (["--val_seq_len=1048576"], "--val_seq_len=1048576 is more than this text has room for"),
    (["--seq_len=1048576"], "--seq_len=1048576 is more than this text has room for"),
])
def test_values_that_no_text_fits_are_refused_in_a_sentence(text, keys, sentence):
    with pytest.raises(BadInput, match=sentence):
        t.parse_config([text, *keys])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_run_fitted_to_a_cpu_has_the_precision_that_is_fast_there(text, monkeypatch, precision):
    monkeypatch.setitem(t.PRESETS, "laptop", t.PRESETS["laptop"] | {"precision": precision})
    assert t.parse_config([text, "--fit", "--preset=char", "--device=cpu"]).precision == precision
    assert t.parse_config([text, "--fit", "--preset=char", "--device=cpu", "--precision=fp16"]).precision == "fp16"


def test_minutes_and_a_number_of_steps_contradict_each_other(text):
    with pytest.raises(BadInput, match="leave out --minutes or --num_steps"):
        t.parse_config([text, "--minutes=1", "--num_steps=20"])


@pytest.mark.parametrize("keys, expected", [([], 5), (["--val_interval=7"], 7), (["--val_interval=0"], 0)])
def test_a_validation_interval_that_was_given_stays_when_minutes_choose_the_steps(text, tmp_path, keys, expected):
    c = t.parse_config([text, "--minutes=0.1", *keys])
    c = fitting.fit_to_minutes(c, t.SCHEDULES[c.schedule], list(tmp_path.glob("*_train_*")), 0.2)
    assert (c.num_steps, c.val_interval) == (30, expected)


@pytest.mark.parametrize("key, most, is_now", [
    ("micro_tokens", 1000, 896), ("micro_tokens", 50, 128), ("micro_tokens", 10**6, 999_424),
    ("val_tokens", 4096, 896), ("val_tokens", 300, 256), ("val_tokens", 50, 128)])
def test_of_these_lengths_as_much_as_fits_is_taken_up_to_what_was_given(text, key, most, is_now):
    """So that a smaller --micro_tokens always needs less memory, without a calculation."""
    c = t.parse_config([text, f"--{key}={most}"])
    assert getattr(c, key) == is_now
    assert c.micro_tokens % c.seq_len == 0 and c.val_tokens % c.val_seq_len == 0


@pytest.mark.parametrize("key, length", [("seq_len", 32_768), ("val_seq_len", 262_144)])
def test_only_bounds_that_were_given_refuse_a_given_length_of_sequences(tmp_path, key, length):
    for split in ("train", "val"):
        write_shard(tmp_path / f"novel_{split}_000001.bin", np.r_[SEPARATOR, np.arange(600_000) % 251])
    command = [f"--data_dir={tmp_path}", "--preset=laptop", "--fit", f"--{key}={length}"]
    c = t.parse_config(command)
    assert getattr(c, key) == length and c.micro_tokens >= c.seq_len and c.val_tokens >= c.val_seq_len
    bound = {"seq_len": "micro_tokens", "val_seq_len": "val_tokens"}[key]
    with pytest.raises(BadInput, match=f"--{key}={length} must be at most --{bound}, which is 1000"):
        t.parse_config([*command, f"--{bound}=1000"])


@pytest.mark.parametrize("fitted", [True, False])
def test_a_run_that_lacks_text_is_told_to_fit_it_only_if_it_does_not(text, fitted, tmp_path, capsys):
    keys = [text, "--num_steps=200000", "--epochs=1", "--preset=laptop", f"--fit={fitted}", f"--log_dir={tmp_path}"]
    assert t.main([*keys, "--val_tokens=896", "--val_seq_len=896"]) == 2
    said = capsys.readouterr().err
    assert "200000 steps need" in said and "--num_steps" in said and ("--fit" in said) == (not fitted)
    keys[1] = "--num_steps=" + said.partition(" last for about ")[2].partition(" steps")[0]
    check_data(t.parse_config([*keys, "--val_tokens=896", "--val_seq_len=896"]))  # so many do


def test_steps_that_were_given_have_a_batch_each_where_a_reading_has_only_one():
    changes = fitting.steps_that_fit((3 * 128 + 1,), 10, 10, 400.0, 128, 3 * 128)
    assert (changes["num_steps"], changes["epochs"]) == (10, 10)


@pytest.mark.parametrize("steps, advised", [(9, True), (100, False)])  # of 128 tokens; the text has 4,096
def test_where_only_beginnings_of_documents_are_read_the_key_that_reads_all_is_named(tmp_path, steps, advised):
    path = tmp_path / "novel_train_000001.bin"
    write_shard(path, [SEPARATOR, *[1] * 4095])
    with pytest.raises(shards.ShardError) as refused:
        checks.check_amount([path], shards.Packing(128, 256, 1, False, 128), [1] * steps, str(tmp_path), True)
    assert ("--cut_documents=true" in str(refused.value)) == advised


def test_minutes_for_which_the_text_lacks_batches_are_refused_before_the_first_step(tmp_path, capsys):
    """Without cut_documents only 2,048 tokens of a document are read, here half of all tokens."""
    for number, name in enumerate(("novel_train_000001", "novel_val_000000")):
        write_shard(tmp_path / f"{name}.bin", [SEPARATOR, *[number] * 4095] * 4)
    argv = arguments(data_dir=tmp_path, log_dir=tmp_path, cut_documents=False, minutes=100, target_loss=0)
    assert t.main([word for word in argv if not word.startswith("--num_steps")]) == 2
    out, err = capsys.readouterr()
    assert "the 16,384 in" in err and "lower --num_steps or --minutes" in err and err.count("\n") == 1
    assert "step:" not in out


def test_minutes_for_which_the_text_has_no_batch_at_all_are_refused_before_the_warm_up(tmp_path, capsys):
    for name in ("novel_train_000001", "novel_val_000000"):  # one document, of which a sequence could read the beginning
        write_shard(tmp_path / f"{name}.bin", [SEPARATOR, *[name == "novel_val_000000"] * 8191])
    argv = arguments(data_dir=tmp_path, log_dir=tmp_path, cut_documents=False, minutes=100, batch_tokens=4096, seq_len=2048)
    assert t.main([word for word in argv if not word.startswith("--num_steps")]) == 2
    out, err = capsys.readouterr()
    assert "last for about 0 steps; give --cut_documents=true" in err and "warming up" not in out + err and err.count("\n") == 1


@pytest.mark.parametrize("seconds, part", [(0.01, "read 6 times at most"), (10.0, ""), (32.0, "")])
def test_a_run_that_needs_less_than_its_minutes_says_why(text, tmp_path, seconds, part):
    c = t.parse_config([text, "--minutes=1"])
    c = fitting.fit_to_minutes(c, t.SCHEDULES[c.schedule], list(tmp_path.glob("*_train_*")), seconds)
    notes = fitting.why_shorter(c, seconds)
    assert [part in note for note in notes] == [True] * bool(part)


@pytest.mark.parametrize("keys, refused", [(["--fit"], False), (["--fit", "--sample=Once"], True)])
def test_a_vocabulary_that_cannot_be_had_is_found_before_training(text, keys, refused, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    c = t.parse_config([text, "--preset=laptop", *keys])
    c.vocab_size = 50304
    if refused:
        with pytest.raises(BadInput, match="tiktoken cannot load GPT-2's vocabulary"):
            sample.check(c)
    else:
        assert "there will be no sample: tiktoken cannot load" in sample.check(c)[0] and c.sample == ""
