"""data/shards.py: a plain walk over lists predicts every batch, the changed byte every fault.

References: shards written with `struct` alone (conftest.py), and `walk`, which packs lists of
tokens as the rule says: take documents in order, each clipped, until a sequence and one token are
full; what is left of the last document is lost.
"""
import hashlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SEPARATOR, documents, write_shard

from data import BadInput, shards

VOCAB_SIZE = 384  # its last token, 383, stands for the separator
SHARDS = [
    documents(5000, seed=1),
    documents(3100, seed=2),
    documents(500, seed=3),  # too small for a batch of four sequences
    documents(4000, seed=4),
]
FOREVER = 1000  # steps: more than any of these shards can feed


@pytest.fixture
def paths(tmp_path):
    """SHARDS as files."""
    return [
        write_shard(tmp_path / f"fineweb_train_{number:06}.bin", tokens)
        for number, tokens in enumerate(SHARDS)]


def packing(**changes):
    usual = {"seq_len": 256, "vocab_size": VOCAB_SIZE, "epochs": 1, "cut_documents": False, "longest_document": 2048}
    return SimpleNamespace(**usual | changes)


def separated(tokens):
    """What a model of VOCAB_SIZE gets to see of these tokens."""
    return [383 if token == SEPARATOR else token for token in tokens]


def split_documents(tokens):
    """The documents of a shard, as lists of tokens."""
    found = []
    for token in separated(tokens):
        if token == 383:
            found.append([])
        found[-1].append(token)
    return found


def walk(contents, num_sequences, length, longest):
    """All batches of so many sequences that shards of these contents hold: lists of sequences of `length` tokens."""
    batches = []
    for tokens in contents:
        batch = []
        sequence = []
        for document in split_documents(tokens):
            sequence += document[:longest]
            if len(sequence) >= length:
                batch.append(sequence[:length])
                sequence = []
            if len(batch) == num_sequences:
                batches.append(batch)
                batch = []
    return batches


def drain(paths, packing, num_sequences, steps=FOREVER):
    """All batches as lists, until the steps or the shards end."""
    found = []
    for sequences in map(shards.packed, shards.batches(paths, packing, [num_sequences] * steps)):
        assert sequences.dtype == np.uint16
        found.append(sequences.tolist())
    return found


# ---- the format ----------------------------------------------------------------------------------

def test_a_shard_is_written_byte_for_byte_as_the_format_has_it(tmp_path):
    tokens = [SEPARATOR, 1, 2, SEPARATOR, 65535, SEPARATOR]
    parts = [np.array(part) for part in (tokens[:3], tokens[3:5], tokens[5:])]
    shards.write_shard(tmp_path / "written.bin", parts)
    expected = write_shard(tmp_path / "expected.bin", tokens)
    assert (tmp_path / "written.bin").read_bytes() == expected.read_bytes()


def test_a_shard_is_read_as_its_tokens_and_the_starts_of_its_documents(tmp_path):
    tokens = [7, SEPARATOR, 0, 32767, 32768, SEPARATOR, SEPARATOR, 50255]
    path = write_shard(tmp_path / "x.bin", tokens)
    shard = shards.read_shard(path, 50304)
    assert shards.count_tokens(path) == 8
    assert shard.tokens.dtype == np.uint16
    assert shard.tokens.tolist() == tokens
    assert shard.starts.tolist() == [1, 5, 6]
    path = write_shard(tmp_path / "bytes.bin", [SEPARATOR, 1, SEPARATOR, 2])
    assert shards.read_shard(path, 384).tokens.tolist() == [383, 1, 383, 2], "the last token stands for the separator"


GOOD = documents(2000, seed=5)


def written(tokens=GOOD, **header):
    return lambda path: write_shard(path, tokens, **header)


def cut_to(size):
    return lambda path: path.write_bytes(write_shard(path, GOOD).read_bytes()[:size])


DAMAGES = {  # how the shard is damaged, and what the sentence must hold besides its name
    "magic": (written(magic=20240521), ["magic 20240521, not 20240520"]),
    "compressed": (lambda path: path.write_bytes(b"\x1f\x8b" * 999), ["magic -1960867041", "delete it and run"]),
    "promises more": (written(count=2001), ["5024", "5026"]),
    "promises less": (written(count=1999), ["5024", "5022"]),
    "empty": (cut_to(0), ["0 bytes", "1024"]),
    "cut inside a token": (cut_to(-1), ["5023", "5024"]),
    "gone": (lambda path: None, ["cannot be read (No such file or directory)"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_with_the_value_found_and_the_remedy(tmp_path, damage):
    write, parts = DAMAGES[damage]
    path = tmp_path / "fineweb_val_000000.bin"
    write(path)
    for read in (shards.count_tokens, shards.kind_of_tokens, lambda path: shards.read_shard(path, VOCAB_SIZE),
                 lambda path: shards.fingerprint(path, "val")):
        with pytest.raises(BadInput) as error:
            read(path)
        sentence = str(error.value)
        assert sentence.startswith(f"{path} ") and "\n" not in sentence
        assert all(part in sentence for part in parts), sentence


@pytest.mark.parametrize("tokens, parts", [
    ([*GOOD, 383], ["token 383, and with --vocab_size=384", "below 383; is it other data?"]),
    ([1] * 2000, ["no document start (token 50256)", "data/prepare.py"]),
    ([], ["no document start"]),
], ids=["stands for the separator", "no document", "empty"])
def test_tokens_that_the_model_cannot_use_are_named_with_the_remedy(tmp_path, tokens, parts):
    path = write_shard(tmp_path / "x.bin", tokens)
    with pytest.raises(BadInput) as error:
        shards.read_shard(path, VOCAB_SIZE)
    for part in [str(path), *parts]:
        assert part in str(error.value)


@pytest.mark.parametrize("num_tokens", [5, 2**20])
def test_a_fingerprint_tells_size_tokens_and_the_hash_of_both_ends(tmp_path, num_tokens):
    tokens = np.random.default_rng(0).integers(0, 65536, num_tokens).tolist()
    path = write_shard(tmp_path / "x.bin", tokens)
    contents = path.read_bytes()
    ends = contents[: 1024 + 2**20] + contents[-(2**20) :]
    assert shards.fingerprint(path, "val") == {
        "split": "val",
        "name": "x.bin",
        "bytes": 1024 + 2 * num_tokens,
        "tokens": num_tokens,
        "sha256": hashlib.sha256(ends).hexdigest(),
    }


# ---- reading ahead -------------------------------------------------------------------------------

def test_the_first_item_is_there_at_once_and_each_one_is_prepared_while_the_last_is_in_use():
    begun = [threading.Event() for _ in range(3)]

    def make():
        for number, event in enumerate(begun):
            event.set()
            yield number

    items = shards.ahead(make())
    assert begun[0].is_set()
    assert not begun[1].wait(0.05)
    assert next(items) == 0
    assert begun[1].wait(10)
    assert not begun[2].wait(0.05)
    assert list(items) == [1, 2]


# ---- batches -------------------------------------------------------------------------------------

@pytest.mark.parametrize("num_sequences, seq_len, longest", [
    (4, 256, 2048), (3, 512, 2048), (4, 256, 100), (2, 256, 257),
])
def test_batches_are_those_of_a_plain_walk_across_shards(paths, num_sequences, seq_len, longest):
    expected = walk(SHARDS, num_sequences, seq_len + 1, longest)
    assert len(expected) > 1
    assert drain(paths, packing(seq_len=seq_len, longest_document=longest), num_sequences) == expected
    if seq_len == 256 and longest == 2048:  # batches of two readings do not depend on where one ends
        assert drain(paths, packing(epochs=2), num_sequences) == expected * 2


def test_cut_documents_have_no_gap_and_no_repetition_and_come_in_a_random_order(paths):
    cut = packing(cut_documents=True)
    batches = drain(paths, cut, 4)
    assert len(batches) == 4 + 3 + 0 + 3
    assert drain(paths, packing(cut_documents=True, longest_document=10), 4) == batches, "none is clipped"
    for shard, first, end in ((SHARDS[0], 0, 4), (SHARDS[1], 4, 7), (SHARDS[3], 7, 10)):
        in_order = [separated(shard[begin : begin + 257]) for begin in range(0, len(shard) - 256, 256)]
        found = [sequence for batch in batches[first:end] for sequence in batch]
        places = [in_order.index(sequence) for sequence in found]
        assert len(places) == len(set(places)) == len(in_order) // 4 * 4, "all but what fills no batch, once each"
        assert places != sorted(places)
    write_shard(paths[0], SHARDS[0][:1025])  # exactly one batch and its last target
    assert len(drain(paths, cut, 4)) == 1 + 3 + 0 + 3
    write_shard(paths[0], SHARDS[0][:1024])
    assert len(drain(paths, cut, 4)) == 0 + 3 + 0 + 3


def test_batches_end_with_the_plan_or_with_the_shards_whichever_comes_first(paths):
    whole = drain(paths, packing(), 4)
    for steps in (0, 1, len(whole) - 1, len(whole)):
        assert drain(paths, packing(), 4, steps) == whole[:steps]
        assert sum(1 for _ in shards.batches(paths, packing(), [4] * steps)) == steps


# ---- validation ----------------------------------------------------------------------------------

def test_validation_takes_exactly_the_first_tokens_also_from_several_shards(paths):
    both = separated(SHARDS[2] + SHARDS[1])
    for number in (1, 499, 500, 512, 3599, 4000):
        tokens = shards.validation_tokens([paths[2], paths[1]], VOCAB_SIZE, number)
        assert tokens.dtype == np.uint16
        assert tokens.tolist() == both[: number + 1]
