"""What a run reads, and where it will write: found and tried before anything is compiled.

`c` is train_gpt.Config. The plan of batches and the packing of documents (data/shards.py) follow
from it by rules that stand in train_gpt.py.
"""
import math
import os
import shlex
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from data import shards
from data.fineweb import TRAIN_SHARDS
from nanogpt import checkpoints
from nanogpt.precision import recipe
from nanogpt.ranks import BadInput, compare, is_rank_0, on_all_ranks, rank_and_world_size, require
from records.journal import try_folder


class RunFiles(NamedTuple):
    """What `check_run_files` has found."""
    train_paths: list[Path]
    val_tokens: Tensor  # (val_tokens + 1,), the bits of uint16
    fingerprints: list[dict]  # of all shards
    saved: checkpoints.Saved | None  # what the run goes on from
    checkpoint_path: Path | None  # the file of its weights, on rank 0


def check_run_files(c, packing: shards.Packing, plan: shards.Plan, files: list[dict],
                    num_weights: int) -> RunFiles:
    """`files` are the project's source files that this rank runs. Raises BadInput on all ranks if
    something is wrong on one of them, or if they do not have the same source files and shards. A
    collective."""
    errors = (BadInput, shards.ShardError)
    train_paths, val_paths = on_all_ranks(find_both, c, plan, errors=errors)
    fingerprints = on_all_ranks(identify, train_paths, val_paths, errors=errors)
    facts = {f"code {file['path']}": file["sha256"] for file in files}
    for shard in fingerprints:
        facts[f"{shard['split']} shard {shard['name']}"] = shard["sha256"]
    compare(facts)
    saved = checkpoints.open_save(c.resume, fingerprints, c.data_dir)
    val_tokens = on_all_ranks(
        check_data, c, packing, plan, train_paths, val_paths, errors=errors)
    checkpoint_path = on_all_ranks(place_for_checkpoint, c, num_weights, saved)
    on_all_ranks(try_folder, c.log_dir)
    return RunFiles(train_paths, val_tokens, fingerprints, saved, checkpoint_path)


def shards_of(c, split: str) -> list[Path]:
    """The shards of a split, "train" or "val". Raises ShardError if there are none."""
    return find(c.data_dir, split, c.train_files if split == "train" else c.val_files)


def find_both(c, plan: shards.Plan) -> tuple[list[Path], list[Path]]:
    """Training and validation shards. Raises ShardError if there are none, or if their tokens are
    not of the model's kind, and BadInput if so many processes cannot share the plan's batches."""
    _, world_size = rank_and_world_size()
    for count in dict.fromkeys(plan):
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        require(count % world_size == 0,
                f"{world_size} processes cannot share a batch of {count} sequences; start "
                f"{divisors} of them, or change --batch_tokens or --seq_len")
    train_paths = shards_of(c, "train")
    val_paths = shards_of(c, "val")
    check_kind(train_paths[0], c.vocab_size, c.preset)
    return train_paths, val_paths


def check_data(c, packing: shards.Packing, plan: shards.Plan, train_paths: list[Path],
               val_paths: list[Path]) -> Tensor:
    """The validation tokens. Raises ShardError if there are too few, or too few for training."""
    val_tokens = shards.validation_tokens(val_paths, c.vocab_size, c.val_tokens)
    if chooses_steps(c):  # they are checked when they are chosen; now a step of each stage
        plan = [*dict.fromkeys(plan)]
    check_tokens(c, packing, plan, train_paths)
    return torch.from_numpy(val_tokens.view("int16"))


def identify(train_paths: list[Path], val_paths: list[Path]) -> list[dict]:
    """The fingerprints of all shards. Raises ShardError if one cannot be read, or if one is for
    training and for validation."""
    fingerprints = [shards.fingerprint(path, "train") for path in train_paths]
    fingerprints += [shards.fingerprint(path, "val") for path in val_paths]
    check_apart(fingerprints)
    return fingerprints


def chooses_steps(c) -> bool:
    """Whether the number of steps follows from --minutes. A resumed run keeps its own. If --resume
    finds no save, a new run begins, and c.resume is still NEWEST here."""
    return c.minutes > 0 and c.resume in ("", checkpoints.NEWEST)


def place_for_checkpoint(c, num_weights: int, saved: checkpoints.Saved | None) -> Path | None:
    """The file of the checkpoint, if there is to be one; under "auto" it gets a number if another
    run has that name (`checkpoints.unused_path`). Raises BadInput if it cannot be written."""
    if not c.save_checkpoint or not is_rank_0():
        return None
    path = Path(c.save_checkpoint)
    if c.save_checkpoint == "auto":
        path = Path("models", f"{Path(c.data_dir).resolve().name}.safetensors")
        path = checkpoints.unused_path(path, saved.facts["runs"] if saved else [])
    dtype = recipe.PLAIN_DTYPES[recipe.plain_recipe(c)]  # of nearly all weights
    checkpoints.try_place(path, dtype.itemsize * num_weights + 4 * c.recall_rows)
    return path


# ------------------------------------------------------------------------------------------------
# Whether the shards suit the run

DATA = Path(shards.__file__).parent
FINEWEB = "data/fineweb10B"  # where fineweb.py puts its shards
PYDOCS = "data/pydocs"  # those of the laptop preset


def script(name: str) -> str:
    """The command that starts a script of data/ from where the user is."""
    return f"python {shlex.quote(os.path.relpath(DATA / name))}"


def find(folder: str, split: str, pattern: str) -> list[Path]:
    """The shards of a split, "train" or "val"."""
    if not folder:
        raise shards.ShardError("--data_dir is empty; name a folder of shards")
    remedy = f"check the path, or make them: {script('prepare.py')} FILE"
    if folder == PYDOCS:
        remedy = f"make them: {script('prepare.py')} --python-docs --bytes --out {folder}"
    elif folder == FINEWEB:
        remedy = f"get them: {script('fineweb.py')} 9"
    return shards.find_shards(folder, split, pattern, remedy)


def check_kind(path: Path, vocab_size: int, preset: str) -> None:
    """Raises ShardError unless the tokens of a shard are of the kind that the model reads."""
    largest = shards.largest_token(path)
    holds_bytes = largest < 256
    if largest >= vocab_size or holds_bytes != shards.reads_bytes(vocab_size):
        kind = "bytes" if holds_bytes else "GPT-2's tokens"
        wanted = "GPT-2's tokens"
        if shards.reads_bytes(vocab_size):
            wanted = f"bytes below {vocab_size}"
        presets = "char or laptop" if holds_bytes else "small, onepass or speedrun"
        other = "--tokens=gpt2" if holds_bytes else "--bytes"
        raise shards.ShardError(
            f"{path} holds {kind} (one is {largest}), and --preset={preset} with --vocab_size="
            f"{vocab_size} wants {wanted}; choose --preset={presets} without --vocab_size, or make "
            f"others: {script('prepare.py')} FILE {other}")


def check_apart(fingerprints: list[dict]) -> None:
    """Raises ShardError if a training shard (data/shards.py, `fingerprint`) is one for validation,
    too."""
    names = {shard["sha256"]: shard["name"] for shard in fingerprints if shard["split"] == "train"}
    for shard in fingerprints:
        if shard["split"] == "val" and shard["sha256"] in names:
            raise shards.ShardError(
                f"{shard['name']} is for validation and has the same tokens as "
                f"{names[shard['sha256']]}, which is for training; the loss would only tell what "
                "the model has learned by heart, so give validation a text of its own "
                "(--val_files)")


def check_tokens(c, packing: shards.Packing, plan: shards.Plan, paths: list[Path]) -> None:
    """Raises BadInput unless the training shards last for all steps of the plan."""
    # This packs all documents as training will. Nothing less tells how many steps there are.
    steps = sum(1 for _ in shards.batches(paths, packing, plan))
    if steps == len(plan):
        return
    have = sum(map(shards.count_tokens, paths)) * packing.epochs
    need = packing.seq_len * sum(plan)
    # The first stages may have small batches, so the number of possible steps follows from the
    # tokens of the steps above. It comes out a bit low, which is safe.
    possible = len(plan) * sum(plan[:steps]) // sum(plan)
    remedy = "lower --num_steps or --minutes, or raise --epochs"
    if not c.fit:
        remedy = f"let the run fit the text (--fit), {remedy}"
    # A shard of FineWeb has 1e8 tokens. The ends of long documents are skipped.
    enough = math.ceil(1.3 * need / packing.epochs / 1e8)
    if c.data_dir == FINEWEB and enough <= TRAIN_SHARDS:
        remedy = f"get more with `{script('fineweb.py')} {enough}`, or {remedy}"
    elif not c.cut_documents and have >= need:
        remedy = ("give --cut_documents=true (without it only the beginning of a long document is "
                  f"read), {remedy}")
    raise BadInput(f"{len(plan)} steps need {need:,} tokens; the {have:,} in {c.data_dir} last for "
                   f"about {possible} steps; {remedy}")
