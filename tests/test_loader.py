"""Shards and the loader: every batch is predicted by a plain walk over Python lists, every fault by the byte changed.

References: shards written with `struct` (conftest.py), and `walk`, which finds the sequences of record 26's rule one
token after another: a sequence begins at the first document start that is not inside the one before it.
"""
import hashlib
import threading

import numpy as np
import pytest
import torch
from conftest import SEPARATOR, TINY, documents, write_shard

import train_gpt as t

CPU = torch.device("cpu")
SHARDS = [documents(5000, 1), documents(3100, 2), documents(700, 3), documents(4000, 4)]  # the third makes no batch


def walk(shards, count, seq_len):
    """All batches that `count` sequences a batch can be made of: lists of token lists, seq_len + 1 long."""
    batches = []
    for shard in shards:
        shard, position, batch = [min(token, 383) if token == SEPARATOR else token for token in shard], 0, []
        while position + seq_len + 1 <= len(shard):
            if shard[position] != 383:
                position += 1
                continue
            batch.append(shard[position : position + seq_len + 1])
            position += seq_len
            if len(batch) == count:
                batches.append(batch)
                batch = []
    return batches


@pytest.fixture
def folder(tmp_path):
    for i, tokens in enumerate(SHARDS):
        write_shard(tmp_path / f"fineweb_train_{i:06}.bin", tokens)
    write_shard(tmp_path / "fineweb_val_000000.bin", documents(600, 9))
    return tmp_path


def config(folder, **changes):
    return t.Config(**TINY | {"data_dir": str(folder)} | changes)


def drain(c, rank=0, world_size=1):
    """All batches of a loader, until it says that the shards ran out."""
    loader, batches = t.Loader(t.find_shards(c, "train"), c, rank, world_size, CPU), []
    with pytest.raises(t.BadInput, match="ran out.*--epochs"):
        while True:
            batches.append(loader.batch())
    return batches


# ---------------------------------------------------------------------------------------------------- batches


def test_every_sequence_begins_at_a_document_start_and_targets_are_the_next_tokens(folder):
    batches = drain(config(folder))
    assert len(batches) > 5
    for batch in batches:
        assert len(batch) == 4
        for inputs, targets in batch:
            assert inputs.shape == targets.shape == (256,) and inputs.dtype == targets.dtype == torch.int64
            assert inputs[0] == 383 and torch.equal(inputs[1:], targets[:-1])


@pytest.mark.parametrize("batch_tokens, seq_len", [(1024, 256), (256, 256), (1536, 512), (256, 128)])
def test_batches_are_those_of_a_plain_walk_across_shards(folder, batch_tokens, seq_len):
    batches = drain(config(folder, batch_tokens=batch_tokens, seq_len=seq_len))
    expected = walk(SHARDS, batch_tokens // seq_len, seq_len)
    assert len(batches) == len(expected) > 2
    for batch, reference in zip(batches, expected):
        assert [inputs.tolist() + targets[-1:].tolist() for inputs, targets in batch] == reference


@pytest.mark.parametrize("documents_of, length, batches", [(128, 128 * 6 + 1, 3), (128, 128 * 6, 2), (129, 129 * 6, 3),
                                                           (127, 127 * 8 + 2, 2), (1000, 1000 + 129, 1)])
def test_documents_as_long_as_a_sequence_and_shards_as_long_as_a_batch_are_used_to_the_last_token(
        tmp_path, documents_of, length, batches):
    tokens = [SEPARATOR if i % documents_of == 0 else 1 for i in range(length)]
    write_shard(tmp_path / "fineweb_train_000000.bin", tokens)
    found = drain(config(tmp_path, seq_len=128, batch_tokens=256))
    assert len(found) == batches == len(walk([tokens], 2, 128))


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_ranks_share_a_batch_without_overlap_and_together_have_all_of_it(folder, world_size):
    c = config(folder)
    whole, parts = drain(c), [drain(c, rank, world_size) for rank in range(world_size)]
    for i, batch in enumerate(whole):
        together = [tuple(inputs.tolist()) for part in parts for inputs, _ in part[i]]
        assert len(set(together)) == len(together) == len(batch)
        assert set(together) == {tuple(inputs.tolist()) for inputs, _ in batch}
        assert {len(part[i]) for part in parts} == {4 // world_size}
    assert {len(part) for part in parts} == {len(whole)}


def test_epochs_read_the_shards_again_in_the_same_order(folder):
    one, three = drain(config(folder)), drain(config(folder, epochs=3))
    assert len(three) == 3 * len(one)
    for i, batch in enumerate(three):
        for (a, b), (c, d) in zip(batch, one[i % len(one)]):
            assert torch.equal(a, c) and torch.equal(b, d)


def test_tokens_above_32767_survive_and_large_vocabularies_keep_their_separator(tmp_path):
    tokens = [SEPARATOR, 0, 32767, 32768, 40000, 50255] * 50
    write_shard(tmp_path / "fineweb_train_000000.bin", tokens)
    c = config(tmp_path, vocab_size=50304, seq_len=128, batch_tokens=128)
    ((inputs, _),) = t.Loader(t.find_shards(c, "train"), c, 0, 1, CPU).batch()
    assert inputs.tolist() == tokens[:128]


def test_the_next_shard_is_read_by_a_thread_before_it_is_needed(folder, monkeypatch):
    reads, read = [], t.read_shard

    def observed(path, *args):
        reads.append((path.name[-5], threading.current_thread() is threading.main_thread()))
        return read(path, *args)

    monkeypatch.setattr(t, "read_shard", observed)
    c = config(folder)
    loader = t.Loader(t.find_shards(c, "train"), c, 0, 1, CPU)
    assert loader.upcoming.result(timeout=10) is not None
    assert reads == [("0", False), ("1", False)]  # the first one is in use, the second one waits
    in_first = len(walk(SHARDS[:1], 4, 256))
    for _ in range(in_first):
        loader.batch()
    assert len(reads) == 2
    loader.batch()
    loader.upcoming.result(timeout=10)
    assert reads == [("0", False), ("1", False), ("2", False)]


def test_a_fault_found_by_the_thread_reaches_the_training_loop(folder):
    c = config(folder)
    write_shard(folder / "fineweb_train_000001.bin", SHARDS[1], magic=5)
    loader = t.Loader(t.find_shards(c, "train"), c, 0, 1, CPU)
    batches = 0
    with pytest.raises(t.BadInput, match="fineweb_train_000001.bin begins with magic 5"):
        while loader.batch():
            batches += 1
    assert batches == len(walk(SHARDS[:1], 4, 256))  # all of the first shard was used



# ---------------------------------------------------------------------------------------------------- enough data?


@pytest.mark.parametrize("batch_tokens, seq_len, epochs",
                         [(1024, 256, 1), (512, 256, 2), (2048, 512, 3), (256, 128, 1)])
def test_the_check_before_compiling_agrees_exactly_with_what_the_loader_yields(folder, batch_tokens, seq_len, epochs):
    changes = dict(batch_tokens=batch_tokens, seq_len=seq_len, epochs=epochs)
    have = len(drain(config(folder, **changes)))
    paths, val_tokens = t.check_data(config(folder, num_steps=have, **changes))
    assert [path.name for path in paths] == [f"fineweb_train_{i:06}.bin" for i in range(4)] and len(val_tokens) == 513
    with pytest.raises(t.BadInput) as error:
        t.check_data(config(folder, num_steps=have + 1, **changes))
    sentence = str(error.value)
    for part in (f"{have + 1} steps", f"{(have + 1) * batch_tokens:,} tokens", f"{sum(map(len, SHARDS)) * epochs:,}",
                 f"{have} steps", str(folder), "data/fineweb.py", "--num_steps", "--epochs"):
        assert part in sentence, f"{part} is not in: {sentence}"


def test_validation_takes_exactly_the_first_tokens_also_from_several_shards(folder):
    more = documents(300, 10)
    write_shard(folder / "fineweb_val_000001.bin", more)
    both = [383 if token == SEPARATOR else token for token in documents(600, 9) + more]
    assert t.validation_tokens(config(folder, val_tokens=768)).tolist() == both[:769]
    assert t.validation_tokens(config(folder, val_tokens=512)).tolist() == both[:513]
    for count in (900, 1024):  # as many targets as tokens would need one token more
        with pytest.raises(t.BadInput, match=rf"needs {count + 1:,} tokens and .* holds 900; lower --val_tokens"):
            t.validation_tokens(config(folder, val_tokens=count))
    assert len(t.validation_tokens(config(folder, val_tokens=899))) == 900


# ---------------------------------------------------------------------------------------------------- bad shards

GOOD = documents(2000, 5)
FAULTS = {  # what is wrong: how the shard is written, and what the sentence must hold besides its name
    "magic": (lambda p: write_shard(p, GOOD, magic=20240521), ["20240521", "20240520", "data/fineweb.py"]),
    "version": (lambda p: write_shard(p, GOOD, version=7), ["version 7", "data/fineweb.py"]),
    "promises more": (lambda p: write_shard(p, GOOD, count=2001), ["5024", "5026", "data/fineweb.py"]),
    "promises less": (lambda p: write_shard(p, GOOD, count=1999), ["5024", "5022", "data/fineweb.py"]),
    "promises a negative number": (lambda p: write_shard(p, GOOD, count=-1), ["5024", "1022", "data/fineweb.py"]),
    "cut inside the header": (lambda p: p.write_bytes(bytes(1000)), ["1000 bytes", "1024", "data/fineweb.py"]),
    "empty": (lambda p: p.write_bytes(b""), ["0 bytes", "1024", "data/fineweb.py"]),
    "odd length": (lambda p: p.write_bytes(write_shard(p, GOOD).read_bytes()[:-1]), ["5023", "5024"]),
    "token out of range": (lambda p: write_shard(p, [*GOOD, 400]), ["token 400", "--vocab_size=384"]),
    "token one past the last": (lambda p: write_shard(p, [*GOOD, 384]), ["token 384", "--vocab_size=384"]),
    "token that stands for the separator": (lambda p: write_shard(p, [*GOOD, 383]), ["token 383", "--vocab_size=384"]),
    "no document start": (lambda p: write_shard(p, [1] * 2000), ["no document start", "50256", "data/prepare.py"]),
    "no tokens": (lambda p: write_shard(p, []), ["no document start", "data/prepare.py"]),
}


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_shard_is_named_with_the_value_found_and_the_remedy(folder, fault, split):
    write, parts = FAULTS[fault]
    path = folder / f"fineweb_{split}_000000.bin"
    write(path)
    with pytest.raises(t.BadInput) as error:
        t.check_data(config(folder))
    sentence = str(error.value)
    for part in (str(path), *parts):
        assert part in sentence, f"{part} is not in: {sentence}"
    assert "\n" not in sentence


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("preset, remedy",
                         [("laptop", "data/prepare.py --python-docs"), ("speedrun", "data/fineweb.py")])
def test_absent_shards_are_named_with_the_command_that_gets_them(folder, split, preset, remedy):
    for path in folder.glob(f"*_{split}_*"):
        path.unlink()
    with pytest.raises(t.BadInput) as error:
        t.check_data(config(folder, preset=preset))
    for part in (f"no {split} shards", f"fineweb_{split}_*.bin", str(folder), remedy):
        assert part in str(error.value)


def test_a_fingerprint_tells_size_tokens_and_the_hash_of_both_ends(tmp_path):
    path = write_shard(tmp_path / "x.bin", np.random.default_rng(0).integers(0, 65536, 2**20).tolist())
    raw = path.read_bytes()
    digest = hashlib.sha256(raw[: 1024 + 2**20] + raw[-(2**20) :]).hexdigest()
    assert t.fingerprint(path, "val") == dict(split="val", name="x.bin", bytes=len(raw), tokens=2**20, sha256=digest)
