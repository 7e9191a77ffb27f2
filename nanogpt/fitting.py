"""A run fitted to a text: what somebody who brings any text should not have to work out.

A run that is not fitted needs a certain amount of text and refuses less. A fitted run takes what
there is. Its preset follows from the kind and the amount of text, its sequences and its validation
from how long the text is, its steps from a budget of minutes or from the text.

`fit` does this when the command line is read. If minutes choose the steps, `fit_to_minutes` does so
after the warm-up, when it is known how long a step takes.
"""
import dataclasses
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch

from data.shards import count_tokens, kind_of_tokens
from nanogpt import arguments, limits
from nanogpt.masks import BLOCK_SIZE
from nanogpt.ranks import require
from nanogpt.run_files import shards_of

# For less text the large model would have to read it twice, and then its tables, which have most of
# its parameters, learn it by heart.
LARGE_TEXT = 60_000_000  # tokens of GPT-2's vocabulary

MINUTES = 2.0  # the budget if none is given
# Readings of a text. More of them make validation worse: the model learns the text by heart
# (records/2026-11-22_h100_one_gpu).
MOST_EPOCHS = {"laptop": 6, "char": 3, "small": 2}
LEAST_STEPS_PER_READING = 75  # for `small`: the batches of a short text are small
# The table of n-grams learns a short text by heart sooner than the layers do. So in `laptop` and
# `small` it has at most one row for so many tokens. A short text, which a CPU reads more than once
# in two minutes, also has shorter n-grams (records/2026-11-23_laptop_ngrams), and with them shorter
# matches in the document (nanogpt/past.py). What came next in the training text is not recalled,
# for the same reason.
TOKENS_PER_ROW = 64
SHORT_TEXT = 2_000_000  # tokens: shorter ones are short
LONGEST_IN_SHORT = 4  # tokens of an n-gram
# A number in a table needs 10 bytes, if weights are in bf16 on one GPU: 4 for the float32 original,
# 2 for the weight that is read, and 2 for each of Adam's moments.
BYTES_PER_NUMBER = 10
# The part of a GPU's memory that the table of n-grams may take. It also makes every save larger.
TABLE_SHARE = 0.1
RECALL_SHARE = 1 / 32  # the same for the table of recalled tokens, of 8 bytes each
VALIDATIONS = 10  # of a run; after each one the weights are kept if they are the best so far
LEAST_INTERVAL = 5  # steps between validations: of a short run they would take most of the time


# What a fitted run has in place of its preset's values.
OVER_PRESET = dict(
    fit=True, cut_documents=True, target_loss=0.0, save_checkpoint="auto", save_every=5.0,
    sample="\n", sample_tokens=500)


class Text(NamedTuple):
    """What the shards of a text hold."""

    kind: str  # of tokens: "bytes" or "gpt2"
    train: tuple[int, ...]  # tokens of each training shard
    val: int  # tokens of all validation shards


def text_of(train_paths: list[Path], val_paths: list[Path]) -> Text:
    """Raises DamagedShard if a file is no shard."""
    train = tuple(map(count_tokens, train_paths))
    return Text(kind_of_tokens(train_paths[0]), train, sum(map(count_tokens, val_paths)))


def preset_for(text: Text, cuda: bool) -> str:
    """The preset that suits a text on this machine."""
    if text.kind == "bytes":
        return "char" if cuda else "laptop"
    return "onepass" if cuda and sum(text.train) >= LARGE_TEXT else "small"


def lengths_that_fit(text: Text, unit: int, seq_len: int, batch_tokens: int, micro_tokens: int,
                     val_seq_len: int, val_tokens: int) -> dict[str, int]:
    """How long sequences, batches and validation can be with this text, in tokens. The given
    lengths are the most; but a sequence has one block at least, and a batch `unit` sequences. A
    batch has a multiple of `unit` sequences, so that each process has whole ones in every stage.
    Raises BadInput if the text is too short."""
    # 1. Sequences. A batch lies within one shard, so the largest shard is the limit.
    inputs = max(text.train) - 1  # of that shard: its last token is a target only
    longest = inputs // unit // BLOCK_SIZE * BLOCK_SIZE
    need = unit * BLOCK_SIZE + 1
    require(longest > 0, f"{inputs + 1:,} tokens are too few to train on; {need:,} are needed, so "
            "prepare a longer text")
    seq_len = min(seq_len, longest, whole_blocks(micro_tokens))
    sequences = min(batch_tokens, inputs) // seq_len
    sequences = max(1, sequences // unit) * unit

    # 2. Validation: whole sequences.
    have = text.val - 1
    require(have >= BLOCK_SIZE,
            f"{text.val:,} tokens are too few to validate on; {BLOCK_SIZE + 1} are needed, so "
            "prepare a longer text")
    val_seq_len = min(val_seq_len, whole_blocks(have), whole_blocks(val_tokens))
    val_tokens = max(min(val_tokens, have) // val_seq_len, 1) * val_seq_len
    return dict(
        seq_len=seq_len, batch_tokens=sequences * seq_len,
        micro_tokens=max(micro_tokens // seq_len, 1) * seq_len,
        val_seq_len=val_seq_len, val_tokens=val_tokens)


def whole_blocks(tokens: int) -> int:
    """The largest multiple of BLOCK_SIZE up to `tokens`, but one block at least."""
    return max(tokens // BLOCK_SIZE, 1) * BLOCK_SIZE


def steps_that_fit(shard_tokens: tuple[int, ...], wanted: float, most_epochs: float,
                   tokens_per_step: float, seq_len: int, batch_tokens: int) -> dict[str, int]:
    """As many steps as are wanted, but no more than `most_epochs` readings of the training shards
    give. `epochs` in the result is the number of readings that these steps take."""
    # A batch lies within one shard, so at the end of each up to one sequence less than a batch is
    # not read. This counts on the worst case. (`tokens_per_step` is the mean over all stages.)
    per_batch = batch_tokens // seq_len
    tokens_per_reading = 0
    for tokens in shard_tokens:
        sequences = (tokens - 1) // seq_len - (per_batch - 1)
        tokens_per_reading += max(sequences, 0) * seq_len
    require(tokens_per_reading > 0, f"no training shard holds a batch of {batch_tokens:,} tokens; "
            "lower --batch_tokens or --seq_len")
    steps_per_reading = max(tokens_per_reading / tokens_per_step, 1)  # it has a batch at least
    most = min(most_epochs * steps_per_reading, limits.MOST["num_steps"])
    num_steps = max(1, int(min(wanted, most)))
    return dict(
        num_steps=num_steps, epochs=math.ceil(num_steps / steps_per_reading),
        val_interval=validation_interval(num_steps))


def validation_interval(num_steps: int) -> int:
    return max(LEAST_INTERVAL, num_steps // VALIDATIONS)


# --------------------------------------------------------------------------------------------------
# The same for a configuration: train_gpt.Config, and the stages of its schedule


def fit(c, presets: dict[str, dict], schedules: dict[str, list], given: dict, cuda: bool):
    """The configuration for the text that `c` names: the preset that suits it, or the given one,
    with lengths and steps that the text has room for. Raises BadInput if the text is too short, and
    ShardError if it cannot be read."""
    limits.check_ranges(c)
    text = text_of(shards_of(c, "train"), shards_of(c, "val"))
    preset = given.get("preset") or preset_for(text, cuda)
    over_preset = OVER_PRESET
    if not cuda:  # the preset for CPUs knows the faster precision
        over_preset = OVER_PRESET | dict(precision=presets["laptop"]["precision"])
    laid_over = {name: values | over_preset for name, values in presets.items()}
    c = arguments.configure(type(c), laid_over, preset, given)
    require(c.schedule in schedules,
            f"--schedule={c.schedule} is none of {', '.join(schedules)}")
    if cuda:
        # In whole GiB: GPUs of one kind may differ by some MiB, and all ranks need the same tables.
        memory = torch.cuda.get_device_properties(0).total_memory // 2**30 * 2**30
        rows = rows_that_fit(c.ngram_width, memory)
        recalled = int(RECALL_SHARE * memory) // 8
        c = dataclasses.replace(
            c, ngram_rows=min(c.ngram_rows, rows), recall_rows=min(c.recall_rows, recalled))
    return fit_to_text(c, schedules[c.schedule], text, given)


def rows_that_fit(width: int, memory: int) -> int:
    """How many rows of n-grams a GPU with so many bytes of memory has room for."""
    return max(1, int(TABLE_SHARE * memory) // (BYTES_PER_NUMBER * width))


def fit_to_text(c, schedule: list, text: Text, given: dict):
    """The configuration with lengths and steps that the text has room for. What was given stays as
    it is. Only micro_tokens and val_tokens are upper bounds: they become whole sequences. Raises
    BadInput if the text is too short."""
    # 1. Lengths. Each process has a sequence of each batch, and a stage may have a part of a full
    # batch. (There is no process group yet, but torchrun says how many processes there are.)
    parts = [limits.part_of_batch(stage).denominator for stage in schedule]
    world_size = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
    unit = world_size * math.lcm(*parts)
    batch_tokens = c.batch_tokens
    tokens = sum(text.train)
    if c.preset == "small":
        batch_tokens = min(batch_tokens, tokens // LEAST_STEPS_PER_READING)
    table = dict(longest_ngram=c.longest_ngram, ngram_rows=c.ngram_rows)
    if c.preset in ("laptop", "small"):
        table["ngram_rows"] = min(c.ngram_rows, max(1, tokens // TOKENS_PER_ROW))
    if tokens < SHORT_TEXT:
        table["longest_ngram"] = min(c.longest_ngram, LONGEST_IN_SHORT)
        table["recall_rows"] = 0
    bounds = {}  # upper bounds, each with room for a sequence of the length that was given
    for name, bound in (("seq_len", "micro_tokens"), ("val_seq_len", "val_tokens")):
        length = given.get(name, 0)
        if bound in given:
            require(length <= given[bound], f"--{name}={length} must be at most --{bound}, which "
                    f"is {given[bound]}; lower the one or raise the other")
        bounds[bound] = max(getattr(c, bound), length)
    lengths = lengths_that_fit(
        text, unit, c.seq_len, batch_tokens, bounds["micro_tokens"], c.val_seq_len,
        bounds["val_tokens"])
    for name in ("seq_len", "val_seq_len"):
        length = given.get(name, 0)
        require(length <= lengths[name], f"--{name}={length} is more than this text has room for, "
                f"which is {lengths[name]}; lower it, or leave it out")
    fixed = {name: value for name, value in given.items() if name not in bounds}
    c = dataclasses.replace(c, **lengths | table | fixed)

    # 2. Steps: those that were given, or as many as the text has.
    wanted = math.inf
    most_epochs = MOST_EPOCHS.get(c.preset, 1)
    minutes = c.minutes
    if "num_steps" in given:
        wanted = c.num_steps
        most_epochs = math.inf
    elif c.preset not in ("speedrun", "onepass"):
        minutes = given.get("minutes", MINUTES)
    most_epochs = given.get("epochs", most_epochs)
    steps = steps_of_schedule(c, schedule, text.train, wanted, most_epochs)
    return dataclasses.replace(c, **{"minutes": minutes} | steps | fixed)


def fit_to_minutes(c, schedule: list, train_paths: list[Path], seconds: float):
    """The configuration with as many steps of so many seconds as --minutes has room for. Without
    cut_documents the text may last for fewer, because the ends of long documents are left out."""
    shard_tokens = tuple(map(count_tokens, train_paths))
    wanted = 60 * c.minutes / seconds
    steps = steps_of_schedule(c, schedule, shard_tokens, wanted, c.epochs)
    if not c.fit or c.val_interval != validation_interval(c.num_steps):
        steps.pop("val_interval")  # it is the preset's own, or was given
    if not c.cut_documents:
        steps.pop("epochs")  # how often the text is read cannot be told, so c.epochs stays
    return dataclasses.replace(c, **steps)


def why_shorter(c, seconds: float) -> list[str]:
    """A note if a run of steps of so many seconds takes clearly less than --minutes."""
    if (c.num_steps + 1) * seconds > 0.9 * 60 * c.minutes:
        return []
    times = "once" if c.epochs == 1 else f"{c.epochs} times"
    return [f"This is less than {c.minutes:g} minutes, because the text is read {times} at most. "
            "With more readings the model would learn the text by heart; to try it, give "
            f"--epochs={2 * c.epochs}."]


def option_for_longer(c, seconds: float) -> str:
    """The option that makes a fitted run of steps of so many seconds longer; empty if there is
    none."""
    if not (c.fit and c.minutes):
        return ""
    return f"--epochs={2 * c.epochs}" if why_shorter(c, seconds) else f"--minutes={5 * c.minutes:g}"


def steps_of_schedule(c, schedule: list, shard_tokens: tuple[int, ...], wanted: float,
                      most_epochs: float) -> dict[str, int]:
    """What `steps_that_fit` returns, for this schedule."""
    per_step = c.batch_tokens * sum(stage.fraction * stage.batch_part for stage in schedule)
    return steps_that_fit(
        shard_tokens, wanted, most_epochs, per_step, c.seq_len, c.batch_tokens)
