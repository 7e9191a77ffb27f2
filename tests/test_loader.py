"""Shards and the loader: every batch is predicted by a plain walk over Python lists, every fault by the byte changed.

References: shards written with `struct` (conftest.py), and `walk`, which follows the digest's rule (C.10.1) with lists
of documents: take them in order, each clipped, until a sequence and one token are full; the rest of the last is lost.
"""
import hashlib
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import SEPARATOR, TINY, documents, write_shard

import train_gpt as t

CPU = torch.device("cpu")
SHARDS = [documents(5000, 1), documents(3100, 2), documents(500, 3), documents(4000, 4)]  # the third makes no batch
STAGES = [  # batches of 2, 4, 4 and 2 sequences of a batch of 4, documents of at most 40, 40, 200 and 2048 tokens
    t.Stage(0.25, 0.5, 40, 1, 1, 1.0), t.Stage(0.25, 1, 40, 1, 1, 1.0), t.Stage(0.25, 1, 200, 1, 1, 1.0),
    t.Stage(0.25, 0.5, 2048, 1, 1, 1.0)]


def walk(shards, plan, length):
    """All batches that the shards hold: lists of token lists, `length` long.

    plan: step -> (sequences of its batch, most tokens of a document).
    """
    batches = []
    for shard in shards:
        shard = [min(token, 383) if token == SEPARATOR else token for token in shard]
        waiting, batch, sequence = [], [], []
        for token in shard:
            if token == 383:
                waiting.append([])
            if waiting:  # what comes before the first start belongs to no document
                waiting[-1].append(token)
        for document in waiting:
            count, longest = plan(len(batches))
            sequence += document[:longest]
            if len(sequence) >= length:
                batch, sequence = [*batch, sequence[:length]], []
            if len(batch) == count:
                batches, batch = [*batches, batch], []
    return batches


def same(count, longest=2048):
    return lambda step: (count, longest)


@pytest.fixture
def folder(tmp_path):
    for i, tokens in enumerate(SHARDS):
        write_shard(tmp_path / f"fineweb_train_{i:06}.bin", tokens)
    write_shard(tmp_path / "fineweb_val_000000.bin", documents(600, 9))
    return tmp_path


@pytest.fixture(autouse=True)
def schedule(monkeypatch):
    monkeypatch.setitem(t.SCHEDULES, "stages", STAGES)


MORE = documents(40_000, 5)


@pytest.fixture
def large(tmp_path, folder):
    """The same folder, with a shard that is large enough for documents of 40 tokens at most."""
    write_shard(folder / "fineweb_train_000004.bin", MORE)
    return folder


def config(folder, **changes):
    return t.Config(**TINY | {"data_dir": str(folder), "num_steps": 1000} | changes)


def sequences(batch, seq_len):
    """Token lists of all sequences of a batch, targets included."""
    rows = []
    for inputs, targets in batch:
        assert inputs.shape == targets.shape and inputs.dtype == targets.dtype == torch.int64
        for x, y in zip(inputs.view(-1, seq_len).tolist(), targets.view(-1, seq_len).tolist()):
            assert x[1:] == y[:-1], "targets are the next tokens"
            rows.append(x + y[-1:])
    return rows


def loaded(c, rank=0, world_size=1):
    """Iterator over a rank's batches, as a run has them."""
    batches = t.ahead(t.training_batches(t.find_shards(c, "train"), c, rank, world_size, CPU))
    return ([t.to_device(rows, CPU) for rows in batch] for batch in batches)


def drain(c, rank=0, world_size=1):
    """All batches of a rank, until it is said that the shards ran out."""
    batches = []
    with pytest.raises(t.BadInput, match="ran out.*--epochs"):
        for batch in loaded(c, rank, world_size):
            batches.append(batch)
    return batches


# ---------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("batch_tokens, seq_len, longest", [
    (1024, 256, 2048), (256, 256, 2048), (1536, 512, 2048), (256, 128, 2048), (1024, 256, 100), (512, 256, 256),
    (512, 256, 257), (256, 128, 10)])
def test_batches_are_those_of_a_plain_walk_across_shards(folder, batch_tokens, seq_len, longest, monkeypatch):
    monkeypatch.setitem(t.SCHEDULES, "stages", [t.Stage(1, 1, longest, 1, 1, 1.0)])
    batches = drain(config(folder, batch_tokens=batch_tokens, seq_len=seq_len, schedule="stages"))
    expected = walk(SHARDS, same(batch_tokens // seq_len, longest), seq_len + 1)
    assert len(expected) > 1
    assert [sequences(batch, seq_len) for batch in batches] == expected
    assert all(sequence[0] == 383 for batch in expected for sequence in batch)


def test_batch_size_and_document_length_change_at_the_first_step_of_a_stage(large):
    c = config(large, schedule="stages", num_steps=14, batch_tokens=512, seq_len=128)
    batches = loaded(c)
    found = [sequences(next(batches), 128) for _ in range(14)]
    ends = [4, 7, 10, 14]  # 3.5 and 10.5, rounded to even

    def plan(step):
        return [(2, 40), (4, 40), (4, 200), (2, 2048)][sum(step >= end for end in ends[:3])]

    assert found == walk([*SHARDS, MORE], plan, 129)[:14]
    assert [len(batch) for batch in found] == [2] * 4 + [4] * 3 + [4] * 3 + [2] * 4

    def longest_run(batch):  # tokens between separators
        return max(len(part.split()) for row in batch for part in " ".join(map(str, row)).split("383"))

    assert longest_run(found[6]) == 39 and longest_run(found[7]) > 39  # a separator and 39 more


def test_no_token_is_used_twice_and_what_a_cut_document_has_left_is_not_used_at_all(tmp_path):
    starts = np.flatnonzero(np.random.default_rng(0).random(40_000) < 0.02)
    tokens = np.arange(40_000)  # each says where it stands
    tokens[starts] = SEPARATOR
    write_shard(tmp_path / "fineweb_train_000000.bin", tokens.tolist())
    c = config(tmp_path, vocab_size=50304, seq_len=256, batch_tokens=1024)
    batches = [sequences(batch, 256) for batch in drain(c)]
    assert len(batches) > 20
    used = Counter(token for batch in batches for row in batch for token in row if token != SEPARATOR)
    assert set(used.values()) == {1}
    document = np.searchsorted(starts, np.arange(40_000), side="right")
    rows = [{int(document[token]) for token in row if token != SEPARATOR} for batch in batches for row in batch]
    for one, following in zip(rows, rows[1:]):
        assert max(one) < min(following), "a document went on in the next sequence"


def test_documents_are_clipped_cut_and_skipped_as_by_hand(tmp_path, monkeypatch):
    def pieces(length, longest, first=0):
        """Of each sequence of `length` tokens, from documents of 5, 25, 1, 19 and 30 tokens, up to 90."""
        starts = [10, 15, 40, 41, 60][first:]
        path = write_shard(tmp_path / "x.bin", [SEPARATOR if i in starts else 1 for i in range(90)])
        monkeypatch.setitem(t.SCHEDULES, "stages", [t.Stage(1, 1, longest, 1, 1, 1.0)])
        c = config(tmp_path, schedule="stages", seq_len=length - 1, batch_tokens=length - 1)
        return [batch[0] for _, batch in t.batches_of([path], c)]

    assert pieces(12, 2048) == [[(10, 5), (15, 7)], [(40, 1), (41, 11)], [(60, 12)]]
    assert pieces(5, 2048) == [[(10, 5)], [(15, 5)], [(40, 1), (41, 4)], [(60, 5)]]  # full at a document's end
    assert pieces(20, 8) == [[(10, 5), (15, 8), (40, 1), (41, 6)]]
    assert pieces(30, 2048, first=4) == [[(60, 30)]]  # the last one ends with the shard
    assert pieces(31, 2048, first=4) == pieces(17, 8, first=3) == []
    assert pieces(2, 2048, first=4) == [[(60, 2)]]


@pytest.mark.parametrize("documents_of, length, batches", [(129, 129 * 6, 3), (129, 129 * 6 - 1, 2), (128, 128 * 12, 3),
                                                           (1000, 2000, 1), (1000, 1000 + 128, 0), (43, 129 * 2, 1)])
def test_documents_as_long_as_a_sequence_and_shards_as_long_as_a_batch_are_used_to_the_last_token(
        tmp_path, documents_of, length, batches):
    tokens = [SEPARATOR if i % documents_of == 0 else 1 for i in range(length)]
    write_shard(tmp_path / "fineweb_train_000000.bin", tokens)
    c = config(tmp_path, seq_len=128, batch_tokens=256)
    if batches:
        assert len(drain(c)) == batches == len(walk([tokens], same(2), 129))
    else:
        assert drain(c) == []


def test_cut_documents_follow_each_other_without_a_gap_or_a_repetition(folder):
    c = config(folder, cut_documents=True)
    expected = []
    for shard in SHARDS:
        shard = [383 if token == SEPARATOR else token for token in shard]
        rows = [shard[i : i + 257] for i in range(0, len(shard) - 256, 256)]
        expected += [rows[i : i + 4] for i in range(0, len(rows) - 3, 4)]
    assert [sequences(batch, 256) for batch in drain(c)] == expected and len(expected) == 4 + 3 + 0 + 3
    write_shard(folder / "fineweb_train_000000.bin", SHARDS[0][:1025])  # exactly one batch and its last target
    assert len(drain(c)) == 1 + 3 + 0 + 3


@pytest.mark.parametrize("cut_documents", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_ranks_share_a_batch_without_overlap_and_together_have_all_of_it(folder, world_size, cut_documents):
    c = config(folder, cut_documents=cut_documents)
    whole, parts = drain(c), [drain(c, rank, world_size) for rank in range(world_size)]
    assert len(whole) > 5
    for i, batch in enumerate(whole):
        shares = [sequences(part[i], 256) for part in parts]
        assert {len(share) for share in shares} == {4 // world_size}
        assert sorted(sum(shares, [])) == sorted(sequences(batch, 256))
        assert len({tuple(row) for share in shares for row in share}) == 4
    assert {len(part) for part in parts} == {len(whole)}


def test_fewer_micro_tokens_give_more_micro_batches_of_the_same_sequences(folder):
    sizes = {}
    for micro_tokens in (32_768, 1536, 1280, 768, 512, 256):
        c = config(folder, micro_tokens=micro_tokens, batch_tokens=1536)
        batches = drain(c)
        sizes[micro_tokens] = {tuple(len(inputs) for inputs, _ in batch) for batch in batches}
        assert [sequences(batch, 256) for batch in batches] == walk(SHARDS, same(6), 257)
    assert sizes == {32_768: {(1536,)}, 1536: {(1536,)}, 1280: {(768,) * 2},  # all of one size: one graph
                     768: {(768,) * 2}, 512: {(512,) * 3}, 256: {(256,) * 6}}


@pytest.mark.parametrize("cut_documents", [False, True])
def test_fewer_micro_tokens_make_the_same_update(folder, cut_documents):
    results = []
    for micro_tokens in (1024, 512, 256):
        c = config(folder, micro_tokens=micro_tokens, dtype="float64", num_steps=4, cut_documents=cut_documents)
        model = t.GPT(c, CPU)
        start = t.initialize(model, 0)
        optimizer = t.Optimizer(model)
        batches = loaded(c)
        losses = [t.train_step(model, optimizer, next(batches), step).item() for step in range(4)]
        results.append((losses, optimizer.masters))
    for losses, masters in results[1:]:
        assert losses == pytest.approx(results[0][0], rel=1e-11)
        for name, w in masters.items():
            moved = (results[0][1][name] - start[name]).norm()
            assert (w - results[0][1][name]).norm() <= 1e-9 * moved, name


def test_epochs_read_the_shards_again_in_the_same_order(folder):
    one, three = drain(config(folder)), drain(config(folder, epochs=3))
    assert len(three) == 3 * len(one)
    for i, batch in enumerate(three):
        assert sequences(batch, 256) == sequences(one[i % len(one)], 256)


def test_a_run_may_end_with_the_last_batch_of_the_shards(folder):
    c = config(folder, num_steps=len(drain(config(folder))))
    batches = loaded(c)
    for _ in range(c.num_steps):
        assert next(batches)  # a thread fails to put together one more, and nobody asks for it


def test_tokens_above_32767_survive_and_large_vocabularies_keep_their_separator(tmp_path):
    tokens = [SEPARATOR, 0, 32767, 32768, 40000, 50255] * 50
    write_shard(tmp_path / "fineweb_train_000000.bin", tokens)
    c = config(tmp_path, vocab_size=50304, seq_len=128, batch_tokens=128)
    ((inputs, _),) = next(loaded(c))
    assert inputs.tolist() == tokens[:128]


def test_the_next_shard_is_read_by_a_thread_before_it_is_needed(folder, monkeypatch):
    reads, read = [], t.read_shard

    def observed(path, *args):
        reads.append((path.name[-5], threading.current_thread() is threading.main_thread()))
        return read(path, *args)

    def have_been_read(*names):  # from now on nothing else is read until another batch is asked for
        end = time.monotonic() + 10
        while len(reads) < len(names) and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.05)
        return reads == [(name, False) for name in names]

    monkeypatch.setattr(t, "read_shard", observed)
    batches = loaded(config(folder))
    in_first = len(walk(SHARDS[:1], same(4), 257))
    for _ in range(in_first - 1):
        next(batches)
        assert have_been_read("0", "1")  # the first one is in use, the second one waits
    next(batches)  # another thread goes on with the second shard, so the third is read
    assert have_been_read("0", "1", "2")


def test_the_first_item_is_made_at_once_and_each_one_while_the_last_is_in_use():
    begun = [threading.Event() for _ in range(3)]

    def make():
        for number, event in enumerate(begun):
            event.set()
            yield number

    items = t.ahead(make())
    assert begun[0].wait(10) and not begun[1].wait(0.05)
    assert next(items) == 0 and begun[1].wait(10) and not begun[2].wait(0.05)
    assert [*items] == [1, 2]


def test_a_fault_found_by_the_thread_reaches_the_training_loop(folder):
    c = config(folder)
    write_shard(folder / "fineweb_train_000001.bin", SHARDS[1], magic=5)
    batches = 0
    with pytest.raises(t.BadInput, match="fineweb_train_000001.bin begins with magic 5"):
        for _ in loaded(c):
            batches += 1
    assert batches == len(walk(SHARDS[:1], same(4), 257))  # all of the first shard was used


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


@pytest.mark.parametrize("cut_documents", [False, True])
def test_the_check_agrees_with_the_loader_also_where_stages_change_the_batch(large, cut_documents):
    enough = []
    for num_steps in range(1, 150, 3):
        c = config(large, num_steps=num_steps, schedule="stages", batch_tokens=512, seq_len=128,
                   cut_documents=cut_documents)
        batches = loaded(c)
        try:
            for _ in range(num_steps):
                next(batches)
            enough.append(True)
        except t.BadInput:
            enough.append(False)
        if enough[-1]:
            t.check_data(c)
        else:
            with pytest.raises(t.BadInput, match=f"{num_steps} steps need"):
                t.check_data(c)
    assert 5 < sum(enough) < 48


@pytest.mark.parametrize("world_size", [3, 4])
def test_the_number_of_processes_must_divide_the_batch_of_every_stage(large, monkeypatch, world_size):
    c = config(large, schedule="stages", num_steps=8)
    monkeypatch.setattr(t, "ranks", lambda: (0, 2))
    t.check_data(c)
    monkeypatch.setattr(t, "ranks", lambda: (0, world_size))
    with pytest.raises(t.BadInput, match=f"{world_size} processes cannot .* 2 sequences; start 1, 2 of them"):
        t.check_data(c)


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
