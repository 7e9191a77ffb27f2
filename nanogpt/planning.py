"""Before a run: its configuration, what it reads, and where it writes.

`script` is the module train_gpt, and `c` its Config. A plan of batches is the number of sequences
of each step's batch; it follows from the configuration by rules that stand in train_gpt.py.

A run is fitted (`fit`) for somebody who brings any text and should not have to work out the rest.
(Other runs refuse a text that is too short.)
"""
import dataclasses
import math
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from data import BadInput, require, shards
from nanogpt import checkpoints
from nanogpt.command_line import check, check_names, configure, has_cuda, parse, preset_of
from nanogpt.masks import BLOCK_SIZE
from nanogpt.ranks import compare, is_rank_0, on_all_ranks, rank_and_world_size


def parse_config(script, argv: list[str]):
    """The train_gpt.Config of a run. Raises BadInput on an unknown key or a wrong value, and if the
    run is to be fitted to a text that cannot be read."""
    values = parse(script, argv)
    brings_text = "data_dir" in values and not values.get("preset")
    cuda = has_cuda(values.get("device"))
    # The configuration holds the path of the save that was found, and not "newest".
    save = checkpoints.find(values.pop("resume", ""), values.get("log_dir", script.Config.log_dir))
    if save:
        c = checkpoints.config_of_save(script, save, values)
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


# --------------------------------------------------------------------------------------------------
# A run fitted to a text

# For less text the large model would have to read it twice, and then its tables, which have most of
# its parameters, learn it by heart.
LARGE_TEXT = 60_000_000  # tokens of GPT-2's vocabulary
MINUTES = 2.0  # the budget if none is given
# Readings of a text. With more of them the model learns it by heart (records/TRIED.md).
MOST_EPOCHS = {"laptop": 6, "char": 3, "small": 2}
# Batches of a short text are made smaller for so many steps, down to a sequence for each process.
WANTED_STEPS_PER_READING = 75
TOKENS_PER_ROW = 64  # of the table of n-grams, which learns a text by heart sooner than layers do
SHORT_TEXT = 2_000_000  # tokens; a text with fewer has smaller tables (`tables_that_fit`)
TABLE_SHARE = 0.05  # of a GPU's memory, for the table of n-grams, which is in every save, too
RECALL_SHARE = 1 / 32  # the same for the table of recalled tokens

# What a fitted run has in place of its preset's values.
OVER_PRESET = dict(
    fit=True, cut_documents=True, target_loss=0.0, save_checkpoint="auto", save_every=5.0,
    sample="\n", sample_tokens=500)


def preset_for(kind: str, tokens: int, cuda: bool) -> str:
    """The preset that suits a text of so many "bytes" or "gpt2" tokens on this machine."""
    if kind == "bytes":
        return "char" if cuda else "laptop"
    return "onepass" if cuda and tokens >= LARGE_TEXT else "small"


def fit(script, given: dict, cuda: bool):
    """The configuration for a text: the preset that suits it, or the given one, with lengths and
    steps that the text has room for. What is given stays, but lengths that are given become smaller
    where the text is short. Raises BadInput if the text is too short or cannot be read."""
    named = configure(script, preset_of(given), given)  # where its text is
    paths = shards.find_shards(named, "train")
    train = tuple(map(shards.count_tokens, paths))  # tokens of each shard
    val = sum(map(shards.count_tokens, shards.find_shards(named, "val")))
    preset = given.get("preset") or preset_for(shards.kind_of_tokens(paths[0]), sum(train), cuda)
    c = configure(script, preset, OVER_PRESET | given)
    check_names(c, script)
    stages = script.SCHEDULES[c.schedule]
    upper_bounds = ("seq_len", "val_seq_len", "val_tokens")  # a short text may need less
    stays = {name: value for name, value in given.items() if name not in upper_bounds}
    c = dataclasses.replace(c, **tables_that_fit(c, sum(train), cuda) | stays)
    c = dataclasses.replace(c, **lengths_that_fit(c, stages, train, val) | stays)
    wanted = given.get("num_steps", math.inf)
    most_epochs = math.inf
    if "num_steps" not in given:
        most_epochs = MOST_EPOCHS.get(preset, 1)
        if preset in MOST_EPOCHS and "minutes" not in given:
            c = dataclasses.replace(c, minutes=MINUTES)
    steps = steps_that_fit(c, stages, train, wanted, given.get("epochs", most_epochs))
    c = dataclasses.replace(c, **steps | stays)
    # For --minutes the steps are chosen later, and with cut_documents this count is safe.
    if "num_steps" in given or c.minutes or c.cut_documents:
        return c
    return ended_with_the_text(script, c, paths)


def tables_that_fit(c, tokens: int, cuda: bool) -> dict[str, int]:
    """How large the tables may be with so much text, and this GPU. A short text also has shorter
    n-grams, and what came next in it is not recalled (records/2026-11-23_laptop_ngrams)."""
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


def lengths_that_fit(c, stages: list, train: tuple[int, ...], val: int) -> dict[str, int]:
    """The lengths of sequences, batches and validation, in tokens, for a text with so many tokens:
    `train` are those of each training shard, `val` those of all validation shards. None exceeds
    that of the configuration, but each is a block at least, and a batch has a sequence for each
    process. Raises BadInput if the text is too short."""
    # 1. Each process has a sequence of each batch, and a stage may have a part of a full batch.
    smallest_part = min(stage.batch_part for stage in stages)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    unit = round(world_size / smallest_part)  # a batch has a multiple of so many sequences

    # 2. Sequences. A batch lies within one shard, so the largest shard is the limit.
    inputs = max(train) - 1  # of that shard: its last token is a target only
    longest = inputs // unit // BLOCK_SIZE * BLOCK_SIZE
    require(longest > 0, f"{inputs + 1:,} tokens are too few to train on; "
            f"{unit * BLOCK_SIZE + 1:,} are needed, so prepare a longer text")
    require(val > BLOCK_SIZE, f"{val:,} tokens are too few to validate on; "
            f"{BLOCK_SIZE + 1} are needed, so prepare a longer text")
    seq_len = min(c.seq_len, longest, whole_blocks(c.micro_tokens))
    val_seq_len = min(c.val_seq_len, whole_blocks(val - 1), whole_blocks(c.val_tokens))

    # 3. Batches and validation of whole sequences.
    batch_tokens = min(c.batch_tokens, sum(train) // WANTED_STEPS_PER_READING, inputs)
    batch_tokens = max(1, batch_tokens // seq_len // unit) * unit * seq_len
    return dict(
        seq_len=seq_len, batch_tokens=batch_tokens, val_seq_len=val_seq_len,
        val_tokens=max(min(c.val_tokens, val - 1) // val_seq_len, 1) * val_seq_len)


def whole_blocks(tokens: int) -> int:
    """The largest multiple of BLOCK_SIZE up to `tokens`, but one block at least."""
    return max(tokens // BLOCK_SIZE, 1) * BLOCK_SIZE


def steps_that_fit(c, stages: list, shard_tokens: tuple[int, ...], wanted: float,
                   most_epochs: float) -> dict[str, int]:
    """As many steps as are wanted, but no more than `most_epochs` readings of the training shards
    give, if nothing of long documents is left out. `epochs` in the result is the number of readings
    that these steps take."""
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
    """Steps between validations: a tenth of the run. In a short run it is more: else it would
    validate on more tokens than it trains on."""
    return max(num_steps // 10, math.ceil(c.val_tokens / c.batch_tokens))


def fit_to_minutes(script, c, paths: list[Path], seconds: float):
    """The configuration with as many steps of so many seconds as --minutes has room for, or as the
    training shards at these paths last for. Raises BadInput if one cannot be read."""
    steps = steps_that_fit(
        c, script.SCHEDULES[c.schedule], tuple(map(shards.count_tokens, paths)),
        60 * c.minutes / seconds, c.epochs)
    if not c.fit or c.val_interval != validation_interval(c, c.num_steps):
        steps.pop("val_interval")  # `fit` would not have chosen it: it is a preset's, or was given
    if not c.cut_documents:
        steps.pop("epochs")  # how often the text is read cannot be told, so c.epochs stays
    return ended_with_the_text(script, dataclasses.replace(c, **steps), paths)


def ended_with_the_text(script, c, paths: list[Path]):
    """The configuration with fewer steps where the training shards at these paths do not last for
    all of them, but one at least. Without cut_documents the ends of long documents are left out,
    which `steps_that_fit` does not know."""
    plan = script.batch_plan(c)
    while len(plan) > 1 and (lasts_for := count_steps(c, plan, paths)) < len(plan):
        part = sum(plan[:lasts_for]) / sum(plan)
        c = dataclasses.replace(c, num_steps=max(1, int(part * c.num_steps)))
        plan = script.batch_plan(c)
    return c


# --------------------------------------------------------------------------------------------------
# What a run reads, and where it writes


class RunFiles(NamedTuple):
    """What `check_run_files` has found."""
    train_paths: list[Path]
    val_tokens: Tensor  # (val_tokens + 1,), uint16
    fingerprints: list[dict]  # of all shards
    saved: dict | None  # the header of the save that the run goes on from
    weights_path: Path | None = None  # the file of its weights, on rank 0


def check_run_files(c, plan: shards.Plan, files: list[dict]) -> RunFiles:
    """`files` are the project's source files that this rank runs. Raises BadInput on all ranks if
    something is wrong on one of them, or if their source files, shards or saves differ. A
    collective."""
    found = on_all_ranks(check_data, c, plan)
    facts = {f"code {file['path']}": file["sha256"] for file in files}
    for shard in found.fingerprints:
        facts[f"{shard['split']} shard {shard['name']}"] = shard["sha256"]
    if found.saved:  # another host may have an older copy
        facts["a save of step"] = found.saved["step"]
    compare(facts)
    return found._replace(weights_path=on_all_ranks(try_places, c, found.saved))


def check_data(c, plan: shards.Plan) -> RunFiles:
    """What the run reads. Raises BadInput if a shard is missing or damaged, or of another kind of
    tokens than the model's, if there are too few, if the save is of other shards, or if so many
    processes cannot share the plan's batches."""
    _, world_size = rank_and_world_size()
    or_change = "" if c.resume else ", or change --batch_tokens or --seq_len"
    for count in plan:
        require(count % world_size == 0,
                f"{world_size} processes cannot share batches of {count} x {c.seq_len:,} tokens; "
                f"start fewer of them{or_change}")
    train_paths = shards.find_shards(c, "train")
    val_paths = shards.find_shards(c, "val")
    shards.check_kind(
        train_paths[0], c.vocab_size, "choose another --preset, or make others with "
        "data/prepare.py FILE --tokens=bytes or --tokens=gpt2")
    fingerprints = [shards.fingerprint(path, "train") for path in train_paths]
    fingerprints += [shards.fingerprint(path, "val") for path in val_paths]
    saved = checkpoints.check_save(c.resume, fingerprints, c.data_dir) if c.resume else None
    val_tokens = shards.validation_tokens(val_paths, c.vocab_size, c.val_tokens)
    require(len(val_tokens) > c.val_tokens, f"validation needs {c.val_tokens + 1:,} tokens and "
            f"{c.data_dir} holds {len(val_tokens):,}; give --fit, which fits the run to the text, "
            "or lower --val_tokens and --val_seq_len")
    if chooses_steps(c):  # all steps are checked when they are chosen; now a batch of each size
        plan = [*dict.fromkeys(plan)]
    steps = count_steps(c, plan, train_paths)
    require(steps == len(plan), f"the text in {c.data_dir} lasts for {steps} steps of the "
            f"{len(plan)}; get more text, let the run fit it (--fit), lower --batch_tokens or "
            "--num_steps, or raise --epochs")
    return RunFiles(train_paths, torch.from_numpy(val_tokens), fingerprints, saved)


def chooses_steps(c) -> bool:
    """Whether the number of steps follows from --minutes. A resumed run keeps its own."""
    return c.minutes > 0 and not c.resume


def count_steps(c, plan: shards.Plan, paths: list[Path]) -> int:
    """For how many steps of the plan the training shards last."""
    # This packs all documents as training will. Nothing less tells how many steps there are.
    return sum(1 for _ in shards.batches(paths, c, plan))


def try_places(c, saved: dict | None) -> Path | None:
    """Makes the folders of log and weights, which only rank 0 needs. Returns the file of the
    weights, if they are to be kept: with --save_checkpoint=auto none of another run. Raises
    BadInput if nothing can be written there."""
    if not is_rank_0():
        return None
    folders = [Path(c.log_dir)]
    path = Path(c.save_checkpoint) if c.save_checkpoint else None
    if c.save_checkpoint == "auto":
        name = Path(c.data_dir).resolve().name
        path = checkpoints.unused_path(Path("models", f"{name}.safetensors"))
        if saved and checkpoints.still_there(saved["best"]):
            path = Path(saved["best"][2])
    if path:
        require(not path.is_dir(), f"--save_checkpoint={path} is a folder; name a file")
        require(path.suffix, f"--save_checkpoint={path} has no ending; give a name such as "
                "models/NAME.safetensors, or auto, or nothing behind the = to keep no weights")
        folders.append(path.parent)
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise BadInput(f"nothing can be written to {folder} ({error.strerror})") from None
    return path
