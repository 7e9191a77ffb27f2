"""What a run reads, and where it will write: found and tried before anything is compiled.

`c` is train_gpt.Config. The plan of batches follows from it by rules that stand in train_gpt.py.
"""
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from data import shards
from nanogpt.checkpoints import check_save, unused_path
from nanogpt.ranks import BadInput, compare, is_rank_0, on_all_ranks, rank_and_world_size, require


class RunFiles(NamedTuple):
    """What `check_run_files` has found."""
    train_paths: list[Path]
    val_tokens: Tensor  # (val_tokens + 1,), the bits of uint16
    fingerprints: list[dict]  # of all shards
    saved: dict | None  # the header of the save that the run goes on from
    checkpoint_path: Path | None = None  # the file of its weights, on rank 0


def check_run_files(c, plan: shards.Plan, files: list[dict]) -> RunFiles:
    """`files` are the project's source files that this rank runs. Raises BadInput on all ranks if
    something is wrong on one of them, or if they do not have the same source files and shards. A
    collective."""
    found = on_all_ranks(check_data, c, plan)
    facts = {f"code {file['path']}": file["sha256"] for file in files}
    for shard in found.fingerprints:
        facts[f"{shard['split']} shard {shard['name']}"] = shard["sha256"]
    compare(facts)
    return found._replace(checkpoint_path=on_all_ranks(try_places, c, found.saved))


def check_data(c, plan: shards.Plan) -> RunFiles:
    """What the run reads. Raises BadInput if a shard is missing or damaged, or of another kind of
    tokens than the model's, if they do not suffice, if the save is of others, or if so many
    processes cannot share the plan's batches."""
    _, world_size = rank_and_world_size()
    for count in plan:
        require(count % world_size == 0,
                f"{world_size} processes cannot share batches of {count} x {c.seq_len:,} tokens; "
                "start fewer of them, or change --batch_tokens or --seq_len")
    train_paths = shards_of(c, "train")
    val_paths = shards_of(c, "val")
    holds = shards.kind_of_tokens(train_paths[0])
    wants = "bytes" if shards.reads_bytes(c.vocab_size) else "gpt2"
    require(holds == wants,
            f"{train_paths[0]} holds tokens of the kind {holds}, and --preset={c.preset} with "
            f"--vocab_size={c.vocab_size} wants {wants}; choose another --preset, or make others "
            f"with data/prepare.py FILE --tokens={wants}")
    fingerprints = [shards.fingerprint(path, "train") for path in train_paths]
    fingerprints += [shards.fingerprint(path, "val") for path in val_paths]
    saved = check_save(c.resume, fingerprints, c.data_dir) if c.resume else None
    val_tokens = shards.validation_tokens(val_paths, c.vocab_size, c.val_tokens)
    if chooses_steps(c):  # they are checked when they are chosen; now a step of each stage
        plan = [*dict.fromkeys(plan)]
    check_tokens(c, plan, train_paths)
    return RunFiles(train_paths, torch.from_numpy(val_tokens.view("int16")), fingerprints, saved)


def shards_of(c, split: str) -> list[Path]:
    """The shards of a split, "train" or "val". Raises BadInput if there are none."""
    pattern = c.train_files if split == "train" else c.val_files
    return shards.find_shards(
        c.data_dir, split, pattern, "check the path, or get them: ./run.sh gets the usual ones, "
        "and data/prepare.py makes them of a text")


def chooses_steps(c) -> bool:
    """Whether the number of steps follows from --minutes. A resumed run keeps its own."""
    return c.minutes > 0 and not c.resume


def check_tokens(c, plan: shards.Plan, paths: list[Path]) -> None:
    """Raises BadInput unless the training shards last for all steps of the plan."""
    # This packs all documents as training will. Nothing less tells how many steps there are.
    steps = sum(1 for _ in shards.batches(paths, c, plan))
    require(steps == len(plan), f"the text in {c.data_dir} lasts for {steps} steps of the "
            f"{len(plan)}; get more text, let the run fit it (--fit), lower --num_steps or "
            "--minutes, or raise --epochs")


def try_places(c, saved: dict | None) -> Path | None:
    """Makes the folders of log and weights, which only rank 0 needs. Returns the file of the
    weights, if they are to be kept: with --save_checkpoint=auto none of another run. Raises
    BadInput if nothing can be written there."""
    if not is_rank_0():
        return None
    folders = [Path(c.log_dir)]
    path = Path(c.save_checkpoint) if c.save_checkpoint else None
    if c.save_checkpoint == "auto":
        _, _, kept = (saved and saved["best"]) or (None, None, None)
        name = Path(c.data_dir).resolve().name
        path = Path(kept) if kept else unused_path(Path("models", f"{name}.safetensors"))
    if path:
        require(not path.is_dir(), f"--save_checkpoint={path} is a folder; name a file")
        folders.append(path.parent)
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise BadInput(f"nothing can be written to {folder} ({error.strerror})") from None
    return path
