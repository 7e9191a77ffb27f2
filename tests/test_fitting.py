"""A run that is fitted to a text: preset, lengths and steps follow from what the shards hold."""
import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import SEPARATOR, check_data, write_shard

import train_gpt as t
from data import shards
from nanogpt import planning
from nanogpt.ranks import BadInput

pytestmark = pytest.mark.usefixtures("no_gpu")  # which would choose another preset


@pytest.mark.parametrize("kind, tokens, cuda, preset", [
    ("bytes", 20_000, False, "laptop"), ("bytes", 10**9, False, "laptop"), ("bytes", 20_000, True, "char"),
    ("gpt2", 20_000, True, "small"), ("gpt2", 59_999_999, True, "small"), ("gpt2", 60_000_000, True, "onepass"),
    ("gpt2", 10**9, False, "small")])
def test_the_preset_follows_from_the_kind_and_the_amount_of_text(kind, tokens, cuda, preset):
    assert planning.preset_for(kind, tokens, cuda) == preset


@pytest.fixture
def text(tmp_path):
    write_shard(tmp_path / "novel_train_000001.bin", np.r_[SEPARATOR, np.arange(19_000) % 251])
    write_shard(tmp_path / "novel_val_000000.bin", np.r_[SEPARATOR, np.arange(1000) % 251])
    return f"--data_dir={tmp_path}"


def test_a_folder_without_a_preset_is_fitted_and_one_with_a_preset_is_not(text):
    c = t.parse_config([text])
    assert (c.preset, c.fit, c.target_loss, c.minutes) == ("laptop", True, 0, 2)
    assert (c.save_checkpoint, c.save_every, c.sample) == ("auto", 5, "\n")
    assert (c.val_tokens, c.val_seq_len) == (896, 896)
    strict = t.parse_config([text, "--preset=laptop"])
    assert (strict.fit, strict.target_loss, strict.val_tokens, strict.save_checkpoint) == (False, 1.1, 131_072, "auto")
    assert t.PRESETS["char"]["save_every"] == t.PRESETS["small"]["save_every"] == 5
    assert t.parse_config([text, "--preset=laptop", "--fit"]) == c
    assert not t.parse_config([]).fit


def test_what_is_given_stays_and_the_rest_follows_from_it(text):
    c = t.parse_config([text, "--num_steps=50", "--seq_len=512", "--target_loss=2.5", "--val_interval=7"])
    assert (c.num_steps, c.minutes, c.seq_len, c.target_loss, c.val_interval) == (50, 0, 512, 2.5, 7)
    assert c.epochs == math.ceil(50 * c.batch_tokens / (19_000 // 512 - c.batch_tokens // 512 + 1) / 512)
    check_data(c)
    once = t.parse_config([text, "--epochs=1"])
    assert once.epochs == 1 and sum(t.batch_plan(once)) * once.seq_len <= 19_000


def test_the_target_of_a_preset_is_not_for_the_steps_that_minutes_choose(text):
    command = [text, "--preset=laptop", "--minutes=1"]
    assert [t.parse_config([*command, *more]).target_loss for more in ([], ["--target_loss=2"])] == [0, 2]


def test_a_schedule_of_smaller_batches_reads_the_text_once_and_nearly_all_of_it(text):
    c = t.parse_config([text, "--preset=onepass", "--fit", "--seq_len=128"])
    assert (c.epochs, c.minutes) == (1, 0) and 0.9 * 19_000 < sum(t.batch_plan(c)) * c.seq_len <= 19_000


def test_a_batch_is_no_larger_than_the_largest_of_many_shards():
    c = t.Config(**t.PRESETS["small"])
    assert planning.lengths_that_fit(c, t.SCHEDULES[c.schedule], (3000,) * 200, 3000)["batch_tokens"] < 3000


def test_minutes_become_as_many_steps_as_fit_into_them(text, tmp_path):
    c = t.parse_config([text, "--minutes=0.1"])
    paths = list(tmp_path.glob("*_train_*"))
    short = planning.fit_to_minutes(t, c, paths, 0.2)
    assert (short.num_steps, short.val_interval) == (30, 3)
    assert short.val_tokens <= short.val_interval * short.batch_tokens, "it trains on more than it validates on"
    most = planning.fit_to_minutes(t, c, paths, 1e-9)
    assert most.epochs == planning.MOST_EPOCHS["laptop"]
    given = t.parse_config([text, "--minutes=0.1", "--val_interval=7"])
    assert planning.fit_to_minutes(t, given, paths, 0.2).val_interval == 7
    clipped = dataclasses.replace(c, cut_documents=False, epochs=9)
    assert planning.fit_to_minutes(t, clipped, paths, 0.2).epochs == 9, "30 steps may need them"
    check_data(most)


@pytest.mark.parametrize("key, most, is_now", [
    ("val_tokens", 4096, 896), ("val_tokens", 300, 256), ("val_tokens", 50, 128),
    ("seq_len", 2**20, 18_944), ("val_seq_len", 2**20, 896)])
def test_of_these_lengths_as_much_as_fits_is_taken_up_to_what_was_given(text, key, most, is_now):
    c = t.parse_config([text, f"--{key}={most}"])
    assert getattr(c, key) == is_now
    assert c.val_tokens % c.val_seq_len == 0
    assert t.parse_config([text, "--micro_tokens=1000"]).seq_len == 896, "it needs less memory, without a calculation"


def test_minutes_for_which_the_text_lacks_batches_become_the_steps_that_it_lasts_for(tmp_path):
    """Without cut_documents each of these documents, of 4,096 tokens, gives one sequence."""
    write_shard(tmp_path / "novel_train_000001.bin", [SEPARATOR, *[1] * 4095] * 400)
    sizes = dict(batch_tokens=1024, seq_len=256, micro_tokens=256, val_seq_len=128, val_tokens=128)
    c = t.Config(data_dir=str(tmp_path), schedule="onepass", minutes=100, **sizes)
    paths = list(tmp_path.glob("*_train_*"))
    fitted = planning.fit_to_minutes(t, c, paths, 0.2)
    assert planning.count_steps(fitted, t.batch_plan(fitted), paths) == fitted.num_steps
    longer = dataclasses.replace(c, num_steps=fitted.num_steps + 3)
    assert planning.count_steps(longer, t.batch_plan(longer), paths) < longer.num_steps
    assert 390 <= sum(t.batch_plan(fitted)) <= 400


def test_steps_that_follow_from_the_text_are_those_that_it_lasts_for_if_ends_of_documents_are_left_out(tmp_path):
    for split in ("train", "val"):
        write_shard(tmp_path / f"novel_{split}_000001.bin", [SEPARATOR, *[1] * 4095] * 100)
    options = [f"--data_dir={tmp_path}", "--fit", "--preset=laptop", "--epochs=1", "--minutes=0", "--cut_documents=false"]
    c = t.parse_config([*options, "--seq_len=256"])
    check_data(c)
    with pytest.raises(BadInput, match=f"lasts for {c.num_steps} steps"):
        check_data(t.parse_config([*options, "--seq_len=256", f"--num_steps={c.num_steps + 1}"]))


@pytest.mark.parametrize("tokens, rows, longest, recall", [
    (19_000, 296, 4, 0), (3_000_000, 46_875, 6, 2**21)])
def test_of_a_short_text_little_is_looked_up(tokens, rows, longest, recall, tmp_path):
    for split, count in (("train", tokens), ("val", 5000)):
        write_shard(tmp_path / f"a_{split}_1.bin", np.r_[SEPARATOR, np.arange(count - 1) % 251])
    c = t.parse_config([f"--data_dir={tmp_path}", "--device=cpu"])
    assert (c.ngram_rows, c.longest_ngram, c.recall_rows) == (rows, longest, recall)
    assert t.parse_config([f"--data_dir={tmp_path}", "--ngram_rows=99"]).ngram_rows == 99
    assert t.parse_config([f"--data_dir={tmp_path}", "--preset=small", "--fit", "--device=cpu"]).ngram_rows == rows


@pytest.mark.parametrize("gigabytes, rows, recalled", [
    (24, 24 * 2**30 // 20 // 640, 24 * 2**30 // 32 // 4), (1000, 16_777_216, 268_435_456)])
def test_tables_take_at_most_a_part_of_a_gpus_memory(gigabytes, rows, recalled, monkeypatch):
    gpu = SimpleNamespace(total_memory=gigabytes * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    c = t.Config(**t.PRESETS["onepass"] | {"preset": "onepass"})
    tables = planning.tables_that_fit(c, 10**8, cuda=True)
    assert (tables["ngram_rows"], tables["recall_rows"]) == (rows, recalled)


@pytest.mark.parametrize("preset", ["laptop", "small", "onepass", "speedrun"])
@pytest.mark.parametrize("tokens", [30_001, 320_000, 10**8])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_lengths_fit_the_text_the_processes_and_each_other(preset, tokens, world_size, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    c = t.Config(**t.PRESETS[preset] | planning.OVER_PRESET | {"preset": preset})
    stages = t.SCHEDULES[c.schedule]
    c = dataclasses.replace(c, **planning.lengths_that_fit(c, stages, (tokens,), 32_768))
    c = dataclasses.replace(c, **planning.steps_that_fit(c, stages, (tokens,), 9, 1))
    t.command_line.check(c, t)
    assert c.batch_tokens < tokens and c.val_tokens < 32_768, "each last token is a target only"
    assert {count % world_size for count in t.batch_plan(c)} == {0}


def test_a_text_that_is_too_short_is_refused_with_the_number_that_is_needed():
    c = t.Config(**t.PRESETS["laptop"])
    for train, val, part in ((128, 1000, "128 tokens are too few to train on; 129"), (5000, 128, "to validate on")):
        with pytest.raises(BadInput, match=part):
            planning.lengths_that_fit(c, t.SCHEDULES["laptop"], (train,), val)


@pytest.mark.parametrize("train, epochs", [((19_000,), 40), ((50_000, 3000, 70_000), 5)])
def test_the_steps_are_at_most_those_that_the_loader_has_and_nearly_all_of_them(tmp_path, train, epochs):
    for i, tokens in enumerate(train):
        write_shard(tmp_path / f"mine_train_{i}.bin", np.r_[SEPARATOR, np.arange(tokens - 1) % 256])
    paths = sorted(tmp_path.glob("*.bin"))
    have = sum(1 for _ in shards.batches(paths, SimpleNamespace(seq_len=1024, vocab_size=272, epochs=epochs, cut_documents=True), [4] * 10**6))
    c = t.Config(seq_len=1024, batch_tokens=4096)
    fitted = planning.steps_that_fit(c, t.SCHEDULES["char"], train, math.inf, epochs)
    assert 0.9 * have - epochs <= fitted["num_steps"] <= have and fitted["epochs"] == epochs


@pytest.mark.parametrize("keys, sentence", [
    (["--batch_tokens=0"], "--batch_tokens=0 must be at least 1"), (["--minutes=-3"], "--minutes=-3.0 must be at least 0"),
    (["--batch_tokens=5000"], "--batch_tokens=5000 must be a multiple of 2048"),
    (["--batch_tokens=20480"], "no training shard holds a batch of 20,480 tokens"),
    (["--minutes=1", "--num_steps=5"], "leave out --minutes or --num_steps")])
def test_values_that_no_text_fits_are_refused_in_a_sentence(text, keys, sentence):
    with pytest.raises(BadInput, match=sentence):
        t.parse_config([text, *keys])
