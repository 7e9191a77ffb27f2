"""What the script does with the batches of data/shards.py (whose own tests are in test_shards.py).

It makes the plan from its schedule, splits a rank's sequences into micro-batches, moves them to the
device, and checks before compiling that the shards last for the run.
"""
from types import SimpleNamespace

import pytest
import torch
from conftest import SEPARATOR, TINY, check_data, documents, write_shard

import train_gpt as t
from data import shards
from nanogpt.batches import group_sequences, micro_batches
from nanogpt.ranks import BadInput

CPU = torch.device("cpu")
SHARDS = [documents(5000, 1), documents(3100, 2), documents(500, 3), documents(4000, 4)]  # the third makes no batch
STAGES = [  # batches of 2, 4 and 2 sequences of a batch of 4
    t.Stage(0.25, 0.5, 1, 1, 1.0), t.Stage(0.5, 1, 1, 1, 1.0), t.Stage(0.25, 0.5, 1, 1, 1.0)]


@pytest.fixture
def folder(tmp_path):
    for i, tokens in enumerate(SHARDS):
        write_shard(tmp_path / f"fineweb_train_{i:06}.bin", tokens)
    write_shard(tmp_path / "fineweb_val_000000.bin", documents(600, 9))
    return tmp_path


@pytest.fixture(autouse=True)
def schedule(monkeypatch):
    monkeypatch.setitem(t.SCHEDULES, "stages", STAGES)


@pytest.fixture
def large(folder):
    """The same folder, with a shard that is large enough for documents of 40 tokens at most."""
    write_shard(folder / "fineweb_train_000004.bin", documents(40_000, 5))
    return folder


def config(folder, **changes):
    return t.Config(**TINY | {"data_dir": str(folder), "num_steps": 1000} | changes)


def batches(c):
    """The batches, as a run has them, until the shards end."""
    return shards.ahead(map(shards.packed, shards.batches(shards.find_shards(c, "train"), c, t.batch_plan(c))))


# ---- batches -------------------------------------------------------------------------------------

def test_the_batch_size_changes_at_the_first_step_of_a_stage(large):
    c = config(large, schedule="stages", num_steps=14, batch_tokens=512, seq_len=128)
    found = [len(batch) for batch in batches(c)]
    assert found == [2] * 4 + [4] * 6 + [2] * 4  # 3.5 and 10.5, rounded to even


def test_a_batch_is_prepared_only_after_meet_and_once_the_one_before_is_remembered(folder):
    past = t.GPT(config(folder), CPU).past
    batch = torch.zeros(1, 257, dtype=torch.uint16)
    sentence = "`meet` must come before each batch, and `remember` between two"
    with pytest.raises(RuntimeError, match=sentence):
        past.prepare(batch)
    past.meet()
    first = past.prepare(batch)
    past.meet()
    with pytest.raises(RuntimeError, match=sentence):
        past.prepare(batch)
    past.remember(first)
    past.prepare(batch)


@pytest.mark.parametrize(
    "rank, world_size, group_tokens, micro_tokens, group_size, parts", [
    (0, 1, 512, 1536, 2, [(0, 6)]),
    (0, 1, 512, 1280, 2, [(0, 2), (2, 4), (4, 6)]),  # three sequences would be 1.5 groups
    (0, 1, 512, 256, 2, [(i, i + 1) for i in range(6)]),
    (1, 2, 10**6, 2048, 6, [(3, 6)]),
    (1, 3, 1024, 2048, 4, [(2, 4)]),
    (1, 6, 100, 2048, 1, [(1, 2)]),
])
def test_groups_are_cut_from_the_whole_batch_and_a_micro_batch_has_whole_ones_or_lies_inside_one(
        rank, world_size, group_tokens, micro_tokens, group_size, parts, monkeypatch):
    monkeypatch.setattr("nanogpt.batches.GROUP_TOKENS", group_tokens)
    monkeypatch.setattr("nanogpt.batches.rank_and_world_size", lambda: (rank, world_size))
    c = SimpleNamespace(seq_len=256, micro_tokens=micro_tokens)
    assert group_sequences(6, c) == group_size
    assert [(part.start, part.stop) for part in micro_batches(6, c)] == parts


def test_validation_needs_the_target_of_its_last_token_too(tmp_path):
    write_shard(tmp_path / "fineweb_train_0.bin", documents(5000))
    c = t.Config(**TINY | dict(data_dir=str(tmp_path), num_steps=1))
    write_shard(tmp_path / "fineweb_val_0.bin", documents(c.val_tokens + 1))
    check_data(c)
    write_shard(tmp_path / "fineweb_val_0.bin", documents(c.val_tokens))
    with pytest.raises(BadInput, match=f"holds {c.val_tokens}"):
        check_data(c)


# ---- enough data? --------------------------------------------------------------------------------

@pytest.mark.parametrize("batch_tokens, seq_len, epochs",
                         [(512, 256, 2), (2048, 512, 3)])
def test_the_check_before_compiling_agrees_exactly_with_what_the_loader_yields(folder, batch_tokens, seq_len, epochs):
    changes = dict(batch_tokens=batch_tokens, seq_len=seq_len, epochs=epochs)
    have = sum(1 for _ in batches(config(folder, **changes)))
    train_paths, val_tokens, *_ = check_data(config(folder, num_steps=have, **changes))
    assert [path.name for path in train_paths] == [f"fineweb_train_{i:06}.bin" for i in range(4)]
    assert val_tokens.tolist() == [383 if token == SEPARATOR else token for token in documents(600, 9)][:513]
    with pytest.raises(BadInput) as error:
        check_data(config(folder, num_steps=have + 1, **changes))
    sentence = str(error.value)
    for part in (f"the text in {folder} lasts for {have} steps of the {have + 1}", "--fit", "--num_steps", "--epochs"):
        assert part in sentence, f"{part} is not in: {sentence}"


@pytest.mark.parametrize("world_size", [3, 4])
def test_the_number_of_processes_must_divide_the_batch_of_every_stage(large, monkeypatch, world_size):
    c = config(large, schedule="stages", num_steps=8)
    monkeypatch.setattr("nanogpt.planning.rank_and_world_size", lambda: (0, 2))
    check_data(c)
    monkeypatch.setattr("nanogpt.planning.rank_and_world_size", lambda: (0, world_size))
    with pytest.raises(BadInput, match=f"{world_size} processes cannot share batches of 2 x .* tokens; start fewer of them"):
        check_data(c)


def test_a_batch_gets_other_memory_than_the_one_before_it_which_a_gpu_may_still_read(folder):
    model = t.GPT(config(folder), CPU)
    text = torch.tensor(documents(257)).clamp(max=383).to(torch.uint16)[None]  # 383 stands for the separator
    places = []
    for _ in range(2):
        model.past.meet()
        [(reading, targets)] = model.past.prepare(text).micro_batches  # dropped when the next one is made
        places.append({tensor.data_ptr() for tensor in (*reading, *targets) if len(tensor)})
        model.past.remember(model.past.kept)
        del reading, targets
    assert places[0].isdisjoint(places[1])
