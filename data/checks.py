"""Whether the shards suit a run: found out before anything is compiled.

Each function raises ShardError with one sentence: what is wrong, where, and the remedy.
"""
import math
import os
import shlex
from pathlib import Path

from .fineweb import TRAIN_SHARDS
from .shards import (
    Packing,
    Plan,
    ShardError,
    batches,
    count_tokens,
    find_shards,
    largest_token,
    reads_bytes,
)

FINEWEB = "data/fineweb10B"  # where fineweb.py puts its shards
PYDOCS = "data/pydocs"  # those of the laptop preset


def fetch(shards: int) -> str:
    """The command that gets so many shards of FineWeb to where the user looks for them."""
    here = Path(FINEWEB).resolve() == Path(__file__).resolve().with_name("fineweb10B")
    return f"{script('fineweb.py')} {shards}" + ("" if here else f" --dir {FINEWEB}")


def script(name: str) -> str:
    """The command that starts a script of this folder from where the user is."""
    path = Path(__file__).with_name(name)
    try:
        path = os.path.relpath(path)
    except ValueError:  # on another drive of Windows
        pass
    return f"python {shlex.quote(str(path))}"


def find(folder: str, split: str, pattern: str) -> list[Path]:
    """The shards of a split, "train" or "val"."""
    if not folder:
        raise ShardError("--data_dir is empty; name a folder of shards")
    remedy = f"check the path, or make them: {script('prepare.py')} FILE"
    if folder == PYDOCS:
        remedy = f"make them: {script('prepare.py')} --python-docs --bytes --out {folder}"
    elif folder == FINEWEB:
        remedy = f"get them: {fetch(9)}"
    return find_shards(folder, split, pattern, remedy)


def check_kind(path: Path, vocab_size: int, preset: str) -> None:
    """Raises ShardError unless the tokens of a shard are of the kind that the model reads."""
    wants_bytes = reads_bytes(vocab_size)
    largest = largest_token(path)
    if vocab_size <= largest < 256:
        raise ShardError(
            f"{path} holds bytes (one is {largest}), for which --vocab_size={vocab_size} is too "
            "small; leave it out")
    if largest >= vocab_size and wants_bytes:
        raise ShardError(
            f"{path} holds GPT-2's tokens (one is {largest}), and --preset={preset} wants bytes; "
            f"make them with `{script('prepare.py')} FILE --bytes`, or choose --preset=small")
    if largest < 256 and not wants_bytes:
        raise ShardError(
            f"{path} holds bytes, and --preset={preset} with --vocab_size={vocab_size} wants "
            "GPT-2's tokens; choose --preset=char or laptop without --vocab_size, or make tokens "
            f"with `{script('prepare.py')} FILE --tokens=gpt2`")


def check_apart(fingerprints: list[dict]) -> None:
    """Raises ShardError if a training shard (data/shards.py, `fingerprint`) is one for validation,
    too."""
    names = {shard["sha256"]: shard["name"] for shard in fingerprints if shard["split"] == "train"}
    for shard in fingerprints:
        if shard["split"] == "val" and shard["sha256"] in names:
            raise ShardError(
                f"{shard['name']} is for validation and has the same tokens as "
                f"{names[shard['sha256']]}, which is for training; the loss would only tell what "
                "the model has learned by heart, so give validation a text of its own "
                "(--val_files)")


def check_amount(paths: list[Path], packing: Packing, plan: Plan, folder: str,
                 fitted: bool = False) -> None:
    """Raises ShardError unless the training shards last for all steps of the plan. `fitted`: the
    run is fitted to the text already."""
    # This packs all documents as training will. Nothing less tells how many steps there are.
    steps = sum(1 for _ in batches(paths, packing, plan))
    if steps == len(plan):
        return
    have = sum(map(count_tokens, paths)) * packing.epochs
    need = packing.seq_len * sum(plan)
    # Each stage lasts for a part of all steps, and the first ones have small batches. So the number
    # of possible steps follows from the tokens of the steps above, and not from their number. It
    # comes out a bit low, which is safe.
    found = packing.seq_len * sum(plan[:steps])
    possible = len(plan) * found // need
    remedy = "lower --num_steps or --minutes, or raise --epochs"
    if not fitted:
        remedy = f"let the run fit the text (--fit), {remedy}"
    if not packing.cut_documents and have >= need and folder != FINEWEB:
        remedy = ("give --cut_documents=true (without it only the beginning of a long document is "
                  f"read), {remedy}")
    # A shard of FineWeb has 1e8 tokens. The ends of long documents are skipped.
    enough = math.ceil(1.3 * need / packing.epochs / 1e8)
    if folder == FINEWEB and enough <= TRAIN_SHARDS:
        remedy = f"get more with `{fetch(enough)}`, or {remedy}"
    what = "1 step needs" if len(plan) == 1 else f"{len(plan)} steps need"
    raise ShardError(f"{what} {need:,} tokens; the {have:,} in {folder} last for about {possible} "
                     f"steps; {remedy}")
