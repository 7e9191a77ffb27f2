"""Saves: all that a run is made of at some step, so that it can go on from there (--resume).

A save is a folder, which has a file for each rank and a checksum of each file:

    logs/RUN_ID.saved/step_000123/rank_0_of_2.pt
    logs/RUN_ID.saved/step_000123/rank_0_of_2.sha256      as the command sha256sum writes it

A file holds its rank's part of the float32 weights and of the optimizers' state (of small banks
all), its random numbers, its counts of targets, and a part of the table of recalled tokens. That of
rank 0 also holds `facts`: everything that all ranks share. Training stands still while a rank
copies its part to memory of the host. A thread writes the copy to disk. While files are still to
come, the folder's name ends with ".unfinished"; when all are there, rank 0 renames it. Before an
old save is removed, it gets that name back. So a save is whole or it is none, whenever the run is
killed.
The ranks see each other's files: on several hosts the folder must be on a disk that they share.

When the run goes on, each rank reads all files, puts one tensor after the other together, and keeps
its own part of it. So the number of ranks may be another one.

torch.distributed.checkpoint is not used: its metadata is a pickle, which runs what a stranger has
put into it, whereas nanogpt/checkpoint.py reads data only. A save names the file of its checkpoint.
A run that goes on writes there only if that lies in the folder of the logs or below the one where
the program is started; otherwise --save_checkpoint must be given anew.
"""
import hashlib
import math
import os
import re
import shlex
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import torch
import torch.nn.functional as F
from torch import Tensor

from data.texts import harmless
from nanogpt import checkpoint, matches
from nanogpt.ranks import BadInput, all_ranks, on_all_ranks, rank_and_world_size, require
from records.console import complain

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FORMAT = 5
KEPT = 2  # complete saves of a run that stay on disk
NEWEST = "newest"  # what --resume alone stands for
RUNNING = "running"  # a file in RUN_ID.saved: its run holds a lock on it as long as it lives
FINISHED = "finished"  # a file in RUN_ID.saved: a run that went on from there has ended
PATIENCE_S = 120  # how long rank 0 waits for the files of the others
SHARED_DIMENSION = {"slice": 0, "columns": 1}  # the one that ranks have parts of
FACTS = {  # what all ranks share and a run needs to go on
    "config": dict, "run_id": str, "files_sha256": str, "data": list, "came_from": list,
    "best": (dict, type(None)), "checkpoint": (str, type(None)), "seconds": (int, float),
    "steps": list, "updates": int, "bytes_sent": int, "recipes": dict}

# --------------------------------------------------------------------------------------------------
# Where saves are


def saves_in(folder: Path) -> list[Path]:
    """The saves in RUN_ID.saved, the oldest first."""
    saves = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(saves, key=step_of)


def remedy(save: Path) -> str:
    """What to do where this save is of no use."""
    older = [other for other in saves_in(save.parent) if step_of(other) < step_of(save)]
    another = f"give --resume={older[-1]}" if older else "name another save"
    return f"{another}, or leave --resume out to begin anew"


def step_of(save: Path) -> int:
    """The number of steps before a save."""
    return int(save.name.removeprefix("step_"))


def find(asked: str, log_dir: str, given: dict | None = None,
         may_change: tuple[str, ...] = (), new: dict | None = None) -> Path | None:
    """The save that --resume=ASKED means: the folder of a save, or the newest one in a folder
    RUN_ID.saved. NEWEST is that of `find_newest`. Without --resume (empty) it is None. Raises
    BadInput if there is no such save."""
    if not asked:
        return None
    if asked == NEWEST:
        return find_newest(log_dir, given or {}, may_change, new or {})
    path = Path(asked)
    if path.parent == Path():  # named from inside of its folder, whose name is needed later
        path = path.absolute()
    if path in saves_in(path.parent):
        return path
    saves = saves_in(path)
    require(saves, f"--resume={asked} is no complete save; name a folder such as "
            "logs/RUN_ID.saved/step_000123, or give --resume alone for the newest one")
    return saves[-1]


def find_newest(log_dir: str, given: dict, may_change: tuple[str, ...], new: dict) -> Path | None:
    """The newest save of the runs in `log_dir` that were ended early, or None if no run was saved
    there that the command can mean.

    Where several runs share a folder, the command of each one should find its own: only runs with
    the `given` values are meant, of these the one on the given data, and then the one whose
    configuration is nearest to `new`, which the command would have without --resume.

    Raises BadInput if the run that is meant is still going on or has come to its end, if only
    others were ended early, or if the newest save is damaged and the keys do not say which run is
    meant."""
    saves = {"early": [], "running": [], "finished": []}  # the last one of each run
    for folder in Path(log_dir).glob("*.saved"):
        kind = "finished" if (folder / FINISHED).exists() else "early"
        saves["running" if is_running(folder) else kind] += saves_in(folder)[-1:]
    for of_kind in saves.values():  # the newest first
        of_kind.sort(key=age, reverse=True)

    # 1. A run that was ended early.
    says_which = not set(given) <= set(may_change)  # else the newest one is meant
    differences = {}  # save -> from what was asked for
    others = {}  # save -> its configuration, which has other values than the given ones
    for save in saves["early"]:
        try:
            config = facts_of(save)["config"]
        except BadInput:  # it is damaged; perhaps a newer one is meant, or another run
            if not says_which and not differences:
                raise
            continue
        if changes(config, given, may_change):
            others[save] = config
            continue
        other_data = "data_dir" in given and not same_path(config, given)
        number = len(changes(config, new, may_change)) if says_which else 0
        differences[save] = other_data, number
    if differences:
        return min(differences, key=differences.get)

    # 2. There is none. Perhaps this very run still lives, or has come to its end.
    for save in saves["running"]:
        require(not is_meant(save, given, may_change),
                f"the run of {save.parent} is still going on; end it before you resume it, or "
                f"give --resume={save} to go on from there beside it")
    for save in saves["finished"]:
        require(not is_meant(save, given, may_change),
                f"the run of {save.parent} has come to its end; give --resume={save} to go on from "
                "there once more, or leave out --resume to begin anew")
    for save, config in others.items():
        raise BadInput(
            f"no save in {log_dir} can go on with {', '.join(changes(config, given, may_change))}; "
            f"the newest one is {save}, of {config.get('data_dir')}; leave out what differs to go "
            "on from there, or leave out --resume to begin anew")
    return None


def age(save: Path) -> tuple[int, int]:
    """Sorts saves by when they were written; one that is removed meanwhile counts as the oldest."""
    try:
        return save.stat().st_mtime_ns, step_of(save)
    except OSError:
        return 0, 0


def is_meant(save: Path, given: dict, may_change: tuple[str, ...]) -> bool:
    """Whether the given values can mean the run of a save. One that is damaged hinders nobody."""
    try:
        config = facts_of(save)["config"]
    except BadInput:
        return False
    same_text = "data_dir" not in given or same_path(config, given)
    same_name = given.get("run_name") in (None, config.get("run_name"))
    return same_text and same_name and not changes(config, given, may_change)


def hold(folder: Path) -> TextIO | None:
    """Locks RUN_ID.saved/running, until the file that it returns is closed, as at the end of this
    process. None if another process has locked it, or where there are no locks (Windows, some
    disks)."""
    if fcntl is None:
        return None
    try:
        file = open(folder / RUNNING, "a")
    except OSError:
        return None
    for _ in range(5):  # `is_running` of another process may have it for a moment
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            time.sleep(0.05)
    file.close()
    return None


def is_running(folder: Path) -> bool:
    """Whether the run that writes to RUN_ID.saved still lives, as far as that can be known."""
    if fcntl is None:
        return False
    try:
        with open(folder / RUNNING) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # there is no such file, or this disk has no locks
    return False


def same_path(config: dict, given: dict) -> bool:
    return Path(str(config.get("data_dir"))).resolve() == Path(given["data_dir"]).resolve()


def rank_file(save: Path, rank: int, world_size: int) -> Path:
    return save / f"rank_{rank}_of_{world_size}.pt"


def checksum_file(part: Path) -> Path:
    return part.with_suffix(".sha256")


# --------------------------------------------------------------------------------------------------
# Writing


def write_rank_file(path: Path, content: dict) -> None:
    """Writes the file of a rank, and when that is on disk its checksum. Raises OSError, or
    RuntimeError from torch.save, if the disk is full."""
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.write_synced(path, lambda file: torch.save(content, file))
    line = f"{sha256_of(path)}  {path.name}\n"
    beside = path.with_suffix(".part")
    checkpoint.write_synced(beside, lambda file: file.write(line.encode()))
    os.replace(beside, checksum_file(path))


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder safe from a power failure. Windows has no way to do that."""
    if os.name == "nt":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensors_of_optimizer(optimizer) -> dict[str, Tensor]:
    """This rank's part of all that the updates of a train_gpt.Optimizer change, by names like
    "mlp.master" and "mlp.momentum_buffer"."""
    named = {}
    for name, master in optimizer.masters.items():
        named[f"{name}.master"] = master
        for kind, moment in optimizer.state[name]._asdict().items():
            named[f"{name}.{kind}"] = moment
    return named


def tensors_of_model(model) -> dict[str, Tensor]:
    """What a save has of a train_gpt.GPT beside the optimizer's tensors: this rank's counts, and
    its part of the recall table, which all ranks have whole."""
    rank, world_size = rank_and_world_size()
    return dict(
        target_counts=model.target_counts, lost_targets=model.lost_targets,
        recall_table=model.recall_table.tensor_split(world_size)[rank])


def random_state(device: torch.device) -> dict[str, Tensor | None]:
    """The state of this rank's random numbers: those of the CPU, and of its GPU if it has one."""
    gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"cpu": torch.get_rng_state(), "cuda": gpu}


def unfinished(save: Path) -> Path:
    """The name that a save has while its files come or go."""
    return save.with_name(f"{save.name}.unfinished")


def remove(save: Path) -> None:
    """Removes a save so that a run which is killed meanwhile leaves none that lacks files."""
    with suppress(OSError):
        shutil.rmtree(save.rename(unfinished(save)))


def sweep(folder: Path, but: Path | None = None) -> None:
    """Removes what killed runs have left in RUN_ID.saved, but for one folder."""
    for path in folder.glob("*.unfinished"):
        if path != but:
            shutil.rmtree(path, ignore_errors=True)


def keep_newest(folder: Path) -> None:
    """Removes all saves in RUN_ID.saved but the last KEPT."""
    for old in saves_in(folder)[:-KEPT]:
        remove(old)


class Saver:
    """Saves one run, every so many minutes of training or steps, and when it is told to.

    An error of the disk ends nothing: one sentence on standard error says so, and older saves stay.
    """

    def __init__(self, folder: Path, minutes: float, steps: int, tensors: dict[str, Tensor],
                 came_from: list[str], seconds: float, step: int):
        """folder: RUN_ID.saved, the same on all ranks; minutes and steps: between saves, both 0:
        save never; tensors: what `save` will get; came_from: the folders RUN_ID.saved of the runs
        that this one goes on with; seconds and step: of training so far."""
        self.folder = folder
        self.saves = minutes > 0 or steps > 0
        self.seconds_between = 60 * minutes or math.inf
        self.steps_between = steps or math.inf
        self.came_from = came_from
        self.count_from = seconds, step
        self.rank, self.world_size = rank_and_world_size()
        self.thread = None
        self.locks = []  # files that say that this run lives, also to those that it goes on with
        if self.rank == 0:
            self.locks = [hold(Path(earlier)) for earlier in came_from]
        self.holds_own = False  # its own folder is made with the first save
        self.has_complained = False
        self.copies = {}
        if self.saves:  # the memory is made now, because making it takes longer than copying
            for name, tensor in tensors.items():
                self.copies[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    def due(self, step: int, seconds: float) -> bool:
        """Whether rank 0 wants a save after so many steps and seconds of training."""
        if not self.saves or self.rank != 0 or (self.thread and self.thread.is_alive()):
            return False
        last_seconds, last_step = self.count_from
        return (seconds - last_seconds >= self.seconds_between
                or step - last_step >= self.steps_between)

    @torch.no_grad()
    def save(self, step: int, seconds: float, tensors: dict[str, Tensor], random: dict,
             facts: dict) -> None:
        """Copies everything and begins to write it. All ranks call it after the same step.

        tensors: this rank's parts; random: `random_state`; facts: plain data that does not change
        any more, of rank 0
        """
        self.finish()
        self.count_from = seconds, step
        for name, tensor in tensors.items():
            self.copies[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        content = dict(format=FORMAT, step=step, tensors=self.copies, random=random,
                       facts=facts if self.rank == 0 else {})
        self.thread = threading.Thread(target=self.write, args=(step, content))
        self.thread.start()

    def write(self, step: int, content: dict) -> None:
        """The work of the thread."""
        save = self.folder / f"step_{step:06}"
        writing = unfinished(save)
        part = rank_file(writing, self.rank, self.world_size)
        try:
            if self.rank == 0:
                if not self.holds_own:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    self.locks.append(hold(self.folder))
                    self.holds_own = True
                sweep(self.folder, but=writing)
            write_rank_file(part, content)
            if self.rank == 0:
                self.wait_for_others(writing)
                sync_folder(writing)
                os.rename(writing, save)
                # A copy that went on from here may have come to its end, while this run lives on.
                Path(self.folder, FINISHED).unlink(missing_ok=True)
                sync_folder(self.folder)
                keep_newest(self.folder)
                self.has_complained = False
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            if self.rank != 0:  # rank 0 looks for this file
                with suppress(OSError):
                    part.with_suffix(".failed").write_text(reason_of(error))
                return
            shutil.rmtree(writing, ignore_errors=True)
            if not self.has_complained:
                complain(f"cannot save to {save} ({reason_of(error)}); the run goes on, and older "
                         "saves stay")
            self.has_complained = True

    def wait_for_others(self, writing: Path) -> None:
        """Waits for the files of all ranks. Raises OSError if one does not come."""
        begin = time.monotonic()
        for rank in range(self.world_size):
            part = rank_file(writing, rank, self.world_size)
            while not checksum_file(part).exists():
                failed = part.with_suffix(".failed")
                if failed.exists():
                    raise OSError(f"rank {rank}: {failed.read_text()}")
                if time.monotonic() > begin + PATIENCE_S:
                    raise OSError(f"rank {rank} has written no file within {PATIENCE_S} s; several "
                                  "hosts must share the disk of --log_dir")
                time.sleep(0.01)

    def finish(self, seconds: float | None = None) -> None:
        """Waits until the save that is being written is on disk, or at most so many seconds."""
        if self.thread:
            self.thread.join(seconds)

    def newest(self) -> Path | None:
        """The newest save of this run or of those that it goes on with."""
        for folder in [self.folder, *map(Path, reversed(self.came_from))]:
            if saves := saves_in(folder):
                return saves[-1]
        return None

    def end(self) -> None:
        """The run has come to its end: removes its saves, and marks those of the runs that it went
        on with, so that --resume alone does not find them."""
        self.finish()
        if self.rank == 0:
            for save in saves_in(self.folder):  # the newest last: if killed here, it can be resumed
                remove(save)
            for lock in filter(None, self.locks):
                lock.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            for folder in map(Path, self.came_from):
                if is_running(folder):  # this run has gone on from a copy of it
                    continue
                sweep(folder)
                keep_newest(folder)  # a run may have been killed before it did that
                with suppress(OSError):
                    (folder / FINISHED).touch()


def reason_of(error: Exception) -> str:
    """What was wrong, in a few words."""
    if isinstance(error, RuntimeError):
        return "the disk is full or gone"  # what torch.save says of it is hard to understand
    text = getattr(error, "strerror", None) or str(error)
    return text.partition("\n")[0]


# --------------------------------------------------------------------------------------------------
# Reading


def read_rank_file(path: Path) -> dict:
    """The file of a rank, whose tensors are read only where they are used. Raises BadInput if it is
    none of this program."""
    what_to_do = remedy(path.parent)
    try:
        content = checkpoint.load(path)
        keys = {"step": int, "tensors": dict, "random": dict, "facts": dict}
        fits = content["format"] == FORMAT and all(
            isinstance(content[key], kind) for key, kind in keys.items())
    except Exception as error:  # a foreign file can make torch.load raise nearly anything
        kind = type(error).__name__
        raise BadInput(
            f"{path} is damaged or no save of this program ({kind}); {what_to_do}") from None
    require(fits, f"{path} is a save of another version of this program; {what_to_do}")
    return content


def rank_files(save: Path) -> list[Path]:
    """The files of all ranks. Raises BadInput if one is missing."""
    found = list(save.glob("rank_0_of_*.pt"))
    require(len(found) == 1 and re.fullmatch(r"rank_0_of_[1-9]\d{0,4}\.pt", found[0].name),
            f"{save} holds {len(found)} files rank_0_of_N.pt where a save has one; {remedy(save)}")
    world_size = int(found[0].stem.removeprefix("rank_0_of_"))
    paths = [rank_file(save, rank, world_size) for rank in range(world_size)]
    for path in paths:
        for needed in (path, checksum_file(path)):
            require(needed.is_file(),
                    f"{needed} is missing, so the save is not whole; {remedy(save)}")
    return paths


def facts_of(save: Path) -> dict:
    """What rank 0 has written down, the configuration among it. Raises BadInput if it is damaged.
    """
    facts = read_rank_file(rank_files(save)[0])["facts"]
    require(isinstance(facts.get("config"), dict), f"{save} has no configuration; {remedy(save)}")
    return facts


def share_of(param) -> str:
    """How the ranks share a parameter of parameter_table: tables by their columns."""
    return "columns" if param.optimizer == "rows" else param.share


def fits(saved: list[torch.Size], own: torch.Size, share: str, shape: tuple[int, ...]) -> bool:
    """Whether the parts that ranks have saved make up a tensor of a parameter. own: the shape of
    this rank's part now; share and shape: of the parameter. The parts may differ from ours in the
    shared dimension only, as there may be more or fewer ranks now. There they must add up to the
    size of the parameter and its padding, which is less than 1 for each rank that saved."""
    dim = SHARED_DIMENSION.get(share)
    if dim is None:
        return saved[0] == own
    for part in saved:
        if len(part) != len(own) or part[:dim] != own[:dim] or part[dim + 1 :] != own[dim + 1 :]:
            return False
    padding = sum(part[dim] for part in saved) - shape[dim]
    return 0 <= padding < len(saved)


class Saved:
    """A save that a run goes on from. Reading raises BadInput where something does not fit."""

    def __init__(self, save: Path):
        """Checks the checksums of all files, of which each rank reads some."""
        rank, world_size = rank_and_world_size()
        self.save = save
        self.remedy = remedy(save)
        paths = rank_files(save)
        for path in paths[rank::world_size]:
            found = sha256_of(path)
            require(checksum_file(path).read_bytes().split()[:1] == [found.encode()],
                    f"{path} is damaged: its checksum is {found[:12]}..., not the one beside it; "
                    f"{self.remedy}")
        self.parts = [read_rank_file(path) for path in paths]
        self.facts = self.parts[0]["facts"]
        self.step = self.parts[0]["step"]
        self.same_world = len(self.parts) == world_size

    def fact(self, name: str):
        """One of FACTS."""
        require(name in self.facts, f"{self.save} lacks {name}; {self.remedy}")
        value = self.facts[name]
        require(isinstance(value, FACTS[name]),
                f"{self.save}: {name} is {value!r:.60}; {self.remedy}")
        return value

    def history(self) -> list[str]:
        """The folders RUN_ID.saved of the runs that have led here, which lie beside this one's."""
        logs = self.save.parent.parent
        names = [Path(str(folder)).name for folder in self.fact("came_from")]
        folders = [str(logs / name) for name in names if name.endswith(".saved")]
        if self.save.parent.suffix != ".saved":
            return folders  # somebody has copied the save to this place, where nothing else is ours
        return [*folders, str(self.save.parent)]

    def checkpoint_path(self) -> Path:
        """The file that the checkpoint was to be written to."""
        path = self.fact("checkpoint")
        check_place(self.save, path)
        return Path(path)

    def of_rank(self, rank: int, name: str) -> Tensor:
        tensor = self.parts[rank]["tensors"].get(name)
        require(isinstance(tensor, Tensor), f"{self.save} lacks {name}; {self.remedy}")
        return tensor

    def whole(self, name: str, share: str, shape: tuple[int, ...], rows: int) -> Tensor:
        """A tensor of all ranks. `share` and `shape` are those of its parameter in
        parameter_table. The saved padding is taken off. One that is
        shared by its rows is padded to `rows` of them."""
        parts = [self.of_rank(rank, name) for rank in range(len(self.parts))]
        if share == "all":
            return parts[0]
        dim = SHARED_DIMENSION[share]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        whole = whole.narrow(dim, 0, shape[dim])
        if share == "slice":
            padding = rows - len(whole)
            whole = F.pad(whole, (0, 0) * (whole.dim() - 1) + (0, padding))
        return whole

    def check_fits(self, optimizer) -> None:
        """Raises BadInput unless the save has the tensors of train_gpt.Optimizer and of its model,
        in their shapes. To be called before `restore`, which relies on it."""
        model = optimizer.model
        of_model = tensors_of_model(model)
        ours = tensors_of_optimizer(optimizer) | of_model
        saved = self.parts[0]["tensors"].keys()
        differing = sorted(saved ^ ours.keys())
        for full_name in sorted(ours.keys() & saved):
            shapes = [self.of_rank(rank, full_name).shape for rank in range(len(self.parts))]
            own = ours[full_name].shape
            if full_name == "recall_table":
                are_parts = all(len(shape) == 1 for shape in shapes)
                as_ours = are_parts and matches.is_table(self.recall_table(), model.config)
            elif full_name in of_model:  # each rank has its own
                as_ours = all(shape == own for shape in shapes)
            else:
                param = model.params[full_name.partition(".")[0]]
                as_ours = fits(shapes, own, share_of(param), param.shape)
            if not as_ours:
                differing.append(full_name)
        require(not differing, f"{self.save} was written by other code, as "
                f"{' and '.join(differing[:2])} differ; go on with the code that is in its run's "
                "log (python -m records code LOG FOLDER), or leave --resume out to begin anew")

    @torch.no_grad()
    def restore(self, optimizer) -> None:
        """Fills train_gpt.Optimizer and its model. The banks become copies of the masters, as they
        are after an update. Raises BadInput if one of the other facts does not fit. A
        collective."""
        model = optimizer.model
        for full_name, tensor in tensors_of_optimizer(optimizer).items():
            name, _, kind = full_name.partition(".")
            param = model.params[name]
            bank = optimizer.banks[name]
            whole = self.whole(full_name, share_of(param), param.shape, len(bank))
            tensor.copy_(optimizer.own(name, whole))
            if kind == "master":
                bank.copy_(whole)
        model.target_counts.copy_(self.own_counts("target_counts"))
        model.lost_targets.copy_(self.own_counts("lost_targets"))
        model.recall_table.copy_(self.recall_table())
        optimizer.updates = self.fact("updates")
        optimizer.bytes_sent = self.fact("bytes_sent")
        optimizer.recipes.load_state(self.fact("recipes"))
        optimizer.recipes.weights_changed([*optimizer.masters], optimizer.masters)
        self.restore_random(model.signs.device, model.config.seed)

    def recall_table(self) -> Tensor:
        """The whole of it, (recall_rows,)."""
        ranks = range(len(self.parts))
        return torch.cat([self.of_rank(rank, "recall_table") for rank in ranks])

    def own_counts(self, name: str) -> Tensor:
        """This rank's counts. If there were more or fewer ranks: an equal share of the sum."""
        rank, world_size = rank_and_world_size()
        if self.same_world:
            return self.of_rank(rank, name)
        return sum(self.of_rank(old, name) for old in range(len(self.parts))) / world_size

    def restore_random(self, device: torch.device, seed: int) -> None:
        """Random numbers go on where they were. On another number of ranks or another kind of
        device they begin anew, from the seed, the rank and the step."""
        rank, _ = rank_and_world_size()
        state = self.parts[rank]["random"] if self.same_world else {}
        saved_on = "cuda" if isinstance(state.get("cuda"), Tensor) else "cpu"
        if isinstance(state.get("cpu"), Tensor) and device.type == saved_on:
            try:
                torch.set_rng_state(state["cpu"])
                if saved_on == "cuda":
                    torch.cuda.set_rng_state(state["cuda"], device)
            except (RuntimeError, TypeError):
                raise BadInput(f"{self.save}: no state of random numbers; {self.remedy}") from None
            return
        digest = hashlib.sha256(f"{seed} {rank} {self.step}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def check_data(self, data: list[dict], folder: str) -> None:
        """Raises BadInput unless these shards (data/shards.py, `fingerprint`) are the saved run's.
        Their order counts, their names do not."""
        def essence(shards: list[dict]) -> list[list]:
            return [[dict(shard).get(key) for key in ("split", "tokens", "sha256")]
                    for shard in shards]

        require(essence(self.fact("data")) == essence(data),
                f"the shards in {folder} are not those of {self.save}, a run on "
                f"{self.facts['config'].get('data_dir')}; give the folder of its shards as "
                "--data_dir, or leave --resume out to begin anew")


def open_save(asked: str, data: list[dict], folder: str) -> Saved | None:
    """The save that --resume=ASKED names, or None. `data` are the fingerprints of the shards
    in `folder`. Raises BadInput if the save is damaged or that of a run on other data. A
    collective."""
    path = on_all_ranks(same_save, asked)
    if path in ("", NEWEST):
        return None
    saved = on_all_ranks(Saved, Path(path))
    saved.check_data(data, folder)
    return saved


def how_it_began(asked: str, log_dir: str, saved: Saved | None, run: dict) -> list[str]:
    """Notes for the log of a run under --resume=ASKED. `run` is the log's fact of that name."""
    if asked and not saved:
        return [f"no save under {log_dir} is of such a run; this one begins at step 0"]
    if not saved:
        return []
    ranks = len(saved.parts)
    run_id = harmless(saved.fact("run_id"))
    notes = [f"resumed at step {saved.step} of run {run_id} on {run['date']}; it was "
             f"saved by {ranks} {'process' if ranks == 1 else 'processes'}"]
    if saved.fact("files_sha256") != run["files_sha256"]:
        notes.append("the code is not the one that the saved run began with")
    return notes


def is_near(save: Path, path: str) -> bool:
    """Whether a path lies below the folder where the program is started, or that of the logs. There
    a run that goes on may write what only the save names. A link outside of the logs, as `models`
    may be one to another disk, is the user's own."""
    path = Path(path)
    here = Path.cwd()
    logs = save.parent.parent
    if any(path.resolve().is_relative_to(folder) for folder in (here, logs.resolve())):
        return True
    named = path.absolute()
    in_logs = any(named.is_relative_to(folder) for folder in (logs.absolute(), logs.resolve()))
    return ".." not in path.parts and named.is_relative_to(here) and not in_logs


def check_place(save: Path, path: str) -> None:
    require(is_near(save, path), f"{save} would write weights to {path}; give that as "
            "--save_checkpoint if it shall, else another file")


def command(save: Path | None, save_checkpoint: str) -> str:
    """What goes on from a save; empty if there is none."""
    if not save:
        return ""
    words = ["train_gpt.py", f"--resume={save}"]
    if not is_near(save, save_checkpoint):
        words.append(f"--save_checkpoint={save_checkpoint}")
    return shlex.join(words)


def configure(config_class: type, save: Path, given: dict, may_change: tuple[str, ...]):
    """The configuration of a save, with the given values laid over it. The logs go to the folder
    that RUN_ID.saved lies in. Raises BadInput if a given value would change the result, or if a
    saved one cannot be."""
    config = facts_of(save)["config"]
    try:
        saved = checkpoint.config_values(config, config_class)
    except BadInput as error:
        raise BadInput(f"{save}: {error}; {remedy(save)}") from None
    saved["log_dir"] = config_class.log_dir
    if save.parent.suffix == ".saved":
        saved["log_dir"] = str(save.parent.parent)
    check_changes(save, saved, given, may_change)
    given = {name: value for name, value in given.items() if not was_fitted(saved, name, value)}
    return config_class(**saved | given | {"resume": str(save)})


def changes(saved: dict, given: dict, may_change: tuple[str, ...]) -> list[str]:
    """The given keys that would change the result of a run with the saved configuration."""
    changed = []
    for name, value in given.items():
        if name in may_change or value == saved.get(name):
            continue
        if was_fitted(saved, name, value):
            continue
        changed.append(f"--{name}={value} (saved: {saved.get(name)})")
    return changed


def was_fitted(saved: dict, name: str, value) -> bool:
    """Whether a key may have been given this value, although the saved one is another. The number
    of readings follows from the minutes; what is given for val_tokens is an upper bound."""
    if name == "epochs":
        return bool(saved.get("minutes"))
    return name == "val_tokens" and bool(saved.get("fit")) and value >= saved["val_tokens"]


def check_changes(save: Path, saved: dict, given: dict, may_change: tuple[str, ...]) -> None:
    """Raises BadInput if a key was given another value than the saved one, and may not, or if
    only the save says where to write, and it is far away."""
    changed = changes(saved, given, may_change)
    require(not changed, f"--resume={save} goes on with the saved configuration, which cannot be "
            f"changed by {', '.join(changed)}; leave out what differs, or leave out --resume to "
            "begin anew")
    if "save_checkpoint" not in given:
        check_place(save, saved["save_checkpoint"])


def same_save(path: str) -> str:
    """The save that this rank has found. Raises BadInput if another rank has found another one. A
    collective."""
    found = sorted(set(all_ranks(path)))
    require(len(found) == 1, f"the ranks have found {len(found)} newest saves, {found[0]} and "
            f"{found[-1]}; name one with --resume=PATH")
    return path
