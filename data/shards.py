"""Shards, the files of tokens that the trainer reads, and how batches are made of them.

A shard is a header of 256 int32 (the number 20240520, the version 1, how many tokens follow, then
zeros), and after it the tokens as uint16. All of it is little-endian; the format comes from llm.c.
Every document begins with the token 50256.
"""
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from glob import glob
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data import BadInput, require

HEADER_BYTES = 1024
MAGIC = 20240520
VERSION = 1
SEPARATOR = 50256  # GPT-2's end-of-text token, the first token of every document

# --------------------------------------------------------------------------------------------------
# 1. The format


AGAIN = "delete it and run data/fineweb.py, or delete its folder and run data/prepare.py"


def count_tokens(path: Path) -> int:
    """How many tokens a shard holds. Raises BadInput if it is damaged or cannot be read."""
    try:
        size = path.stat().st_size
        header = np.fromfile(path, dtype="<i4", count=HEADER_BYTES // 4)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); check the file and its "
                       "permissions") from None
    require(size >= HEADER_BYTES,
            f"{path} has {size} bytes, less than its header of {HEADER_BYTES}; {AGAIN}")
    magic, _, num_tokens, *_ = header.tolist()
    require(magic == MAGIC, f"{path} begins with magic {magic}, not {MAGIC}: is it of another "
            f"format? write_shard in data/shards.py makes shards. If it is damaged, {AGAIN}")
    promised = HEADER_BYTES + 2 * num_tokens
    require(size == promised,
            f"{path} has {size} bytes where its header promises {promised}; {AGAIN}")
    return num_tokens


def write_shard(path: Path, documents: Sequence[np.ndarray]) -> None:
    """Writes documents, each an array of tokens that begins with SEPARATOR, as one shard.

    nanoGPT's train.bin has GPT-2's tokens, but no header. This makes a shard of it:

        tokens = np.r_[SEPARATOR, np.fromfile("train.bin", dtype="<u2")]
        write_shard("own_train_000001.bin", [tokens])
    """
    num_tokens = sum(map(len, documents))
    require(num_tokens < 2**31, f"{path} would have {num_tokens:,} tokens, and a shard has at most "
            f"{2**31 - 1:,}; write several, of a part of the text each")
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = MAGIC, VERSION, num_tokens
    with open(path, "wb") as file:
        file.write(header.tobytes())
        for document in documents:
            file.write(document.astype("<u2", copy=False).tobytes())


class Shard(NamedTuple):
    tokens: np.ndarray  # (num_tokens,) uint16
    starts: np.ndarray  # (num_documents,) int64, where in `tokens` each document begins


def read_shard(path: Path, vocab_size: int) -> Shard:
    """Reads a shard for a model that knows the tokens below `vocab_size`.

    If the vocabulary is too small for 50256, its last token takes the place of the separator.
    Raises BadInput if the file is damaged, has no document, or holds tokens that the model does
    not know. The file is never mapped into memory: where a mapped file has become shorter, the
    system kills the process without a word.
    """
    tokens = np.fromfile(path, dtype="<u2", count=count_tokens(path), offset=HEADER_BYTES)
    starts = np.flatnonzero(tokens == SEPARATOR)
    require(len(starts) > 0,
            f"{path} holds no document start (token {SEPARATOR}); make it with data/prepare.py")
    tokens[starts] = 0
    largest = tokens.max()
    limit = vocab_size - 1 if reads_bytes(vocab_size) else vocab_size
    require(largest < limit, f"{path} holds token {largest}, and with --vocab_size={vocab_size} "
            f"tokens must be below {limit}; is it other data?")
    tokens[starts] = min(SEPARATOR, vocab_size - 1)
    return Shard(tokens, starts)


def kind_of_tokens(path: Path) -> str:
    """"bytes" if the first million tokens, separators aside, are below 256, else "gpt2". Raises
    BadInput."""
    count = min(count_tokens(path), 1_000_000)
    tokens = np.fromfile(path, dtype="<u2", count=count, offset=HEADER_BYTES)
    return "bytes" if tokens[tokens != SEPARATOR].max(initial=0) < 256 else "gpt2"


def reads_bytes(vocab_size: int) -> bool:
    """Whether a model with so many tokens reads bytes: it has no room for GPT-2's separator."""
    return vocab_size <= SEPARATOR


def check_kind(path: Path, vocab_size: int, remedy: str) -> None:
    """Raises BadInput unless a model with so many tokens reads the kind that this shard has."""
    holds = kind_of_tokens(path)
    wants = "bytes" if reads_bytes(vocab_size) else "gpt2"
    require(holds == wants, f"{path} holds tokens of the kind {holds}, and --vocab_size="
            f"{vocab_size} wants {wants}; {remedy}")


def find_shards(c, split: str) -> list[Path]:
    """The shards of a train_gpt.Config, in the order of their names. `split` is "train" or "val".
    Raises BadInput if there are none."""
    pattern = c.train_files if split == "train" else c.val_files
    names = sorted(glob(pattern, root_dir=c.data_dir))
    if not names:
        remedy = ("check the path, or get them: data/prepare.py FILE makes them of a text, with "
                  "--python-docs those of laptop, and data/fineweb.py 9 fetches those of FineWeb")
        if Path(c.data_dir, "train.bin").exists():
            remedy = ("its train.bin seems to be nanoGPT's, tokens without a header; write_shard "
                      "in data/shards.py explains how to make a shard of it")
        raise BadInput(f"no {split} shards (--{split}_files={pattern}) in "
                       f"{os.path.abspath(c.data_dir)}; {remedy}")
    return [Path(c.data_dir, name) for name in names]


def fingerprint(path: Path, split: str) -> dict:
    """What identifies a shard in a log. The sha256 covers the header, the first MiB of tokens and
    the last MiB of the file: enough to tell two shards apart, and much faster than reading all of
    them at the start of every run. Raises BadInput."""
    mebibyte = 2**20
    num_tokens = count_tokens(path)
    size = HEADER_BYTES + 2 * num_tokens
    with open(path, "rb") as file:
        sha256 = hashlib.sha256(file.read(HEADER_BYTES + mebibyte))
        file.seek(max(size - mebibyte, 0))
        sha256.update(file.read())
    return dict(split=split, name=path.name, bytes=size, tokens=num_tokens,
                sha256=sha256.hexdigest())


# --------------------------------------------------------------------------------------------------
# 2. Reading ahead


def ahead(items: Iterator) -> Iterator:
    """The same items; a thread prepares the next one while the caller uses the current one.

    The first item is prepared before this returns. An exception that the thread meets is raised
    where the caller asks for the item.
    """
    thread = ThreadPoolExecutor(max_workers=1)

    def one_by_one(prepared):
        while (item := prepared.result()) is not None:
            prepared = thread.submit(next, items, None)
            yield item

    first = thread.submit(next, items, None)
    wait([first])
    return one_by_one(first)


# --------------------------------------------------------------------------------------------------
# 3. Packing documents into sequences and batches
#
# A sequence is made of documents, one after the other. It always begins where a document begins,
# because the middle of a text is hard to predict without what stands before it (record 26: 1750
# steps instead of 1770). A long document gives its first tokens only, because a batch teaches more
# if it comes from more documents (record 29: about 25 steps fewer). The last document is cut where
# the sequence is full. What is left of these documents is not used, and the last token that is read
# of one has the beginning of the next document as its target.
#
#     documents    |AAAA|BBBBBBBBBBBB|CC|DDDDDDDDD|EE|FFFFFF...     at most 6 tokens of each
#     sequences    |AAAABBBBBBCC| |DDDDDDEEFFFF| ...                12 tokens long
#
# A small corpus has no tokens to lose. There `cut_documents` asks for the plain alternative: a
# shard is cut into sequences without gaps, without regard to documents. They are taken in random
# order: in that of the text, the model would adapt to what it has just read (records/TRIED.md).
#
# In what follows `c` is train_gpt.Config, which says what its keys mean.

Plan = Sequence[int]  # of each step: sequences in its batch
Pieces = list[np.ndarray]  # a sequence, as views of its shard's tokens: seq_len + 1 in all


def sequences_of(shard: Shard, c) -> Iterator[Pieces]:
    """The sequences of a shard. A last one that is not full is not used.

    With `cut_documents` their random order is the same at each reading and in each run, and each
    shares a token with the one behind it in the text: its last target is the first input there.
    """
    length = c.seq_len + 1  # the last input needs a target, too
    if c.cut_documents:
        begins = np.arange(0, len(shard.tokens) - c.seq_len, c.seq_len)
        np.random.default_rng(0).shuffle(begins)
        for begin in begins.tolist():
            yield [shard.tokens[begin : begin + length]]
        return
    pieces = []
    room = length
    for begin, end in pairwise([*shard.starts.tolist(), len(shard.tokens)]):
        count = min(end - begin, c.longest_document, room)
        pieces.append(shard.tokens[begin : begin + count])
        room -= count
        if room == 0:
            yield pieces
            pieces = []
            room = length


def batches(paths: list[Path], c, plan: Plan) -> Iterator[list[Pieces]]:
    """The sequences of a batch, for every step of the plan. Nothing is copied yet (`packed`).

    Ends early if the shards end before the plan. A batch takes all its tokens from one shard, and
    what is left at the shard's end is not used. A thread reads the next shard while this one is in
    use. Raises BadInput, as read_shard does.
    """
    readings = chain.from_iterable(repeat(paths, c.epochs))
    shards = (read_shard(path, c.vocab_size) for path in readings)
    step = 0
    for shard in ahead(shards):
        sequences = sequences_of(shard, c)
        while step < len(plan):
            batch = list(islice(sequences, plan[step]))
            if len(batch) < plan[step]:
                break  # and go on with the next shard
            yield batch
            step += 1
        if step == len(plan):
            return


def packed(batch: list[Pieces]) -> np.ndarray:
    """A batch as one array: (sequences, seq_len + 1) uint16."""
    return np.stack([np.concatenate(pieces) for pieces in batch])


def validation_tokens(paths: list[Path], vocab_size: int, number: int) -> np.ndarray:
    """The first `number` tokens of the shards and one more, the last target: (number + 1,) uint16;
    or all, if there are fewer. Raises BadInput, as read_shard does."""
    tokens = np.concatenate([read_shard(path, vocab_size).tokens for path in paths])
    return tokens[: number + 1]
