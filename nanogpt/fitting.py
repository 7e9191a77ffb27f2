"""From the command line to the configuration of a run: what is given is laid over the values of the
save that --resume means, over a preset, or over what fits a text.

A run is fitted to a text for somebody who brings any text and should not have to work out the rest.
Its preset follows from the kind and the amount of text, its sequences and its validation from how
long the text is, its steps from a budget of minutes or from the text. (Other runs need a certain
amount of text and refuse less.) `script` is the module train_gpt.
"""
import dataclasses
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch

from data.shards import count_tokens, kind_of_tokens
from nanogpt import checkpoints
from nanogpt.command_line import check, configure, has_cuda, parse, preset_of, require_one_of
from nanogpt.masks import BLOCK_SIZE
from nanogpt.ranks import require
from nanogpt.run_files import shards_of

# For less text the large model would have to read it twice, and then its tables, which have most of
# its parameters, learn it by heart.
LARGE_TEXT = 60_000_000  # tokens of GPT-2's vocabulary
MINUTES = 2.0  # the budget if none is given
# Readings of a text. More of them make validation worse: the model learns the text by heart
# (records/TRIED.md).
MOST_EPOCHS = {"laptop": 6, "char": 3, "small": 2}
LEAST_STEPS_PER_READING = 75  # the batches of a short text are small
TOKENS_PER_ROW = 64  # of the table of n-grams, which learns a text by heart sooner than layers do
SHORT_TEXT = 2_000_000  # tokens: shorter ones are short
TABLE_SHARE = 0.05  # of a GPU's memory, for the table of n-grams, which is in every save, too
RECALL_SHARE = 1 / 32  # the same for the table of recalled tokens

# What a fitted run has in place of its preset's values.
OVER_PRESET = dict(
    fit=True, cut_documents=True, target_loss=0.0, save_checkpoint="auto", save_every=5.0,
    sample="\n", sample_tokens=500)


def parse_config(script, argv: list[str]):
    """The train_gpt.Config of a run. Raises BadInput on an unknown key or a wrong value, and if the
    run is to be fitted to a text that cannot be read."""
    values = parse(script, argv)
    require(not (values.get("minutes") and "num_steps" in values),
            "--minutes chooses the number of steps; leave out --minutes or --num_steps")
    brings_text = "data_dir" in values and not values.get("preset")
    cuda = has_cuda(values.get("device"))
    # A configuration names the save that is found, not what --resume was given as.
    save = checkpoints.find(values.pop("resume", ""), values.get("log_dir", script.Config.log_dir))
    if save:
        c = checkpoints.configure(script, save, values)
    else:
        if not cuda:
            values = script.ON_CPU | values
        if values.get("minutes"):
            values = {"target_loss": 0.0} | values  # that of a preset is for its number of steps
        if values.get("fit", brings_text):
            c = fit(script, values, cuda)
        else:
            c = configure(script, preset_of(values), values)
    check(c, script)
    return c


class Text(NamedTuple):
    """What the shards of a text hold."""

    kind: str  # of tokens: "bytes" or "gpt2"
    train: tuple[int, ...]  # tokens of each training shard
    val: int  # tokens of all validation shards


def preset_for(text: Text, cuda: bool) -> str:
    """The preset that suits a text on this machine."""
    if text.kind == "bytes":
        return "char" if cuda else "laptop"
    return "onepass" if cuda and sum(text.train) >= LARGE_TEXT else "small"


def fit(script, given: dict, cuda: bool):
    """The configuration for a text: the preset that suits it, or the given one, with lengths and
    steps that the text has room for. What is given stays, but lengths that are given are upper
    bounds. Raises BadInput if the text is too short or cannot be read."""
    named = script.Config(**script.PRESETS.get(given.get("preset"), {}) | given)
    paths = shards_of(named, "train")
    text = Text(kind_of_tokens(paths[0]), tuple(map(count_tokens, paths)),
                sum(map(count_tokens, shards_of(named, "val"))))
    preset = given.get("preset") or preset_for(text, cuda)
    c = configure(script, preset, OVER_PRESET | given)
    require_one_of("schedule", c.schedule, script.SCHEDULES)
    stages = script.SCHEDULES[c.schedule]
    c = dataclasses.replace(c, **tables_that_fit(c, text, cuda) | given)
    c = dataclasses.replace(c, **lengths_that_fit(c, stages, text, "batch_tokens" in given))
    if "num_steps" in given:
        wanted, most_epochs = c.num_steps, math.inf
    else:
        wanted, most_epochs = math.inf, MOST_EPOCHS.get(c.preset, 1)
        if c.preset in MOST_EPOCHS and "minutes" not in given:
            c = dataclasses.replace(c, minutes=MINUTES)
    most_epochs = given.get("epochs", most_epochs)
    steps = steps_that_fit(c, stages, text.train, wanted, most_epochs)
    return dataclasses.replace(c, **steps | {name: given[name] for name in steps if name in given})


def tables_that_fit(c, text: Text, cuda: bool) -> dict[str, int]:
    """How large the tables may be with this text, and this GPU. A short text also has shorter
    n-grams, and what came next in it is not recalled (records/2026-11-23_laptop_ngrams)."""
    tokens = sum(text.train)
    rows, recalled, longest = c.ngram_rows, c.recall_rows, c.longest_ngram
    if cuda:
        # In whole GiB: GPUs of one kind may differ by some MiB, and all ranks need the same tables.
        memory = torch.cuda.get_device_properties(0).total_memory // 2**30 * 2**30
        rows = min(rows, max(1, int(TABLE_SHARE * memory) // (2 * c.ngram_width)))  # in bf16
        recalled = min(recalled, int(RECALL_SHARE * memory) // 4)
    if c.preset in ("laptop", "small"):
        rows = min(rows, max(1, tokens // TOKENS_PER_ROW))
    if tokens < SHORT_TEXT:
        recalled = 0
        longest = min(longest, 4)
    return dict(ngram_rows=rows, recall_rows=recalled, longest_ngram=longest)


def lengths_that_fit(c, stages: list, text: Text, keep_batch: bool) -> dict[str, int]:
    """How long sequences, batches and validation can be with this text, in tokens. Those of the
    configuration are the most; with `keep_batch` its batches stay. Raises BadInput if the text is
    too short."""
    # 1. Each process has a sequence of each batch, and a stage may have a part of a full batch.
    smallest_part = min(stage.batch_part for stage in stages)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    unit = round(world_size / smallest_part)  # a batch has a multiple of so many sequences

    # 2. Sequences. A batch lies within one shard, so the largest shard is the limit.
    inputs = max(text.train) - 1  # of that shard: its last token is a target only
    longest = inputs // unit // BLOCK_SIZE * BLOCK_SIZE
    require(longest > 0, f"{inputs + 1:,} tokens are too few to train on; "
            f"{unit * BLOCK_SIZE + 1:,} are needed, so prepare a longer text")
    require(text.val > BLOCK_SIZE, f"{text.val:,} tokens are too few to validate on; "
            f"{BLOCK_SIZE + 1} are needed, so prepare a longer text")
    seq_len = min(c.seq_len, longest, whole_blocks(c.micro_tokens))
    val_seq_len = min(c.val_seq_len, whole_blocks(text.val - 1), whole_blocks(c.val_tokens))

    # 3. Batches and validation of whole sequences.
    batch_tokens = c.batch_tokens
    if not keep_batch:
        batch_tokens = min(batch_tokens, sum(text.train) // LEAST_STEPS_PER_READING)
        batch_tokens = max(1, min(batch_tokens, inputs) // seq_len // unit) * unit * seq_len
    return dict(
        seq_len=seq_len, batch_tokens=batch_tokens, val_seq_len=val_seq_len,
        val_tokens=max(min(c.val_tokens, text.val - 1) // val_seq_len, 1) * val_seq_len)


def whole_blocks(tokens: int) -> int:
    """The largest multiple of BLOCK_SIZE up to `tokens`, but one block at least."""
    return max(tokens // BLOCK_SIZE, 1) * BLOCK_SIZE


def steps_that_fit(c, stages: list, shard_tokens: tuple[int, ...], wanted: float,
                   most_epochs: float) -> dict[str, int]:
    """As many steps as are wanted, but no more than `most_epochs` readings of the training shards
    give. `epochs` in the result is the number of readings that these steps take."""
    # A batch lies within one shard, so at the end of each up to one sequence less than a batch is
    # not read. This counts on the worst case.
    per_batch = c.batch_tokens // c.seq_len
    sequences = [max((tokens - 1) // c.seq_len - (per_batch - 1), 0) for tokens in shard_tokens]
    require(any(sequences), f"no training shard holds a batch of {c.batch_tokens:,} tokens; lower "
            "--batch_tokens or --seq_len")
    per_step = c.batch_tokens * sum(stage.fraction * stage.batch_part for stage in stages)
    steps_per_reading = max(sum(sequences) * c.seq_len / per_step, 1)
    num_steps = max(1, int(min(wanted, most_epochs * steps_per_reading)))
    return dict(
        num_steps=num_steps, epochs=math.ceil(num_steps / steps_per_reading),
        val_interval=validation_interval(c, num_steps))


def validation_interval(c, num_steps: int) -> int:
    """Ten validations in a run. In a short one there are fewer: else it would validate on more
    tokens than it trains on."""
    return max(num_steps // 10, math.ceil(c.val_tokens / c.batch_tokens))


def fit_to_minutes(c, stages: list, train_paths: list[Path], seconds: float):
    """The configuration with as many steps of so many seconds as --minutes has room for. Without
    cut_documents the text may last for fewer, because the ends of long documents are left out."""
    steps = steps_that_fit(
        c, stages, tuple(map(count_tokens, train_paths)), 60 * c.minutes / seconds, c.epochs)
    if not c.fit or c.val_interval != validation_interval(c, c.num_steps):
        steps.pop("val_interval")  # it is the preset's own, or was given
    if not c.cut_documents:
        steps.pop("epochs")  # how often the text is read cannot be told, so c.epochs stays
    return dataclasses.replace(c, **steps)
