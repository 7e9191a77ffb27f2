"""Checkpoints: files of weights that are written whole or not at all, and read as data.

A checkpoint is what torch.save makes of a dictionary: `config` (name -> value), `weights` (name ->
tensor), `step` (steps so far), `val_loss`, `run_id`, `data` (the fingerprints of the shards), and
`sha256`, a checksum of the weights. The table of recalled tokens (nanogpt/matches.py) is among the
weights. Reading knows nothing of the model: whether the weights fit it, `model_of` checks.
"""
import dataclasses
import hashlib
import os
import pickletools
import re
import shutil
import stat
import tempfile
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from nanogpt import matches
from nanogpt.ranks import BadInput, require
from records.console import complain


def of_model(model, step: int, val_loss: float, origin: dict) -> dict:
    """The checkpoint of a train_gpt.GPT after so many steps, without its checksum: weights
    without padding, on the CPU. `origin` has `run_id` and `data`, or nothing."""
    weights = dict(recall_table=model.recall_table.to("cpu", copy=True))
    for name in model.params:
        weights[name] = model.weight(name).detach().to("cpu", copy=True)
    config = dataclasses.asdict(model.config)
    return dict(config=config, weights=weights, step=step, val_loss=val_loss) | origin


def unused_path(path: Path, own_runs: list[str] | None = None) -> Path:
    """NAME.pt, or NAME-2.pt and so on: the first that does not exist, or that is the checkpoint of
    one of these runs."""
    name = path.stem
    number = 2
    while os.path.lexists(path) and run_of(path) not in (own_runs or []):
        path = path.with_name(f"{name}-{number}.pt")
        number += 1
    return path


def run_of(path: Path) -> str | None:
    """The run that has written a checkpoint; None if it is none, or does not say."""
    try:
        return load(path).get("run_id")
    except Exception:  # a foreign file can make torch.load raise nearly anything
        return None


def try_place(path: Path, size: int = 0) -> None:
    """Makes the folder of a checkpoint, and a file in it for a moment. Raises BadInput if a
    checkpoint of so many bytes cannot be written there: better now than after hours of training."""
    require(path.name, f"{path} is no file; choose another --save_checkpoint")
    beside = unfinished(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kind = path.stat().st_mode
            require(stat.S_ISREG(kind), f"{path} is no file; choose another --save_checkpoint")
            require(may_be_replaced(path), f"{path} is there already and is no checkpoint; choose "
                    "another --save_checkpoint")
        beside.write_bytes(b"a checkpoint can be written here")
        beside.unlink()
        free = shutil.disk_usage(path.parent).free
        require(free > size, f"{path} has no place: it needs {size / 2**20:,.1f} MiB and finds "
                f"{free / 2**20:,.1f}; free some, or choose another --save_checkpoint")
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise BadInput(f"no checkpoint can be written to {path} ({error.strerror}); "
                       "choose another --save_checkpoint") from None


def may_be_replaced(path: Path) -> bool:
    """Whether a file is empty or looks as torch.save leaves it: a zip file with a pickle."""
    if path.stat().st_size == 0:
        return True
    try:
        with zipfile.ZipFile(path) as file:
            return any(name.endswith("/data.pkl") for name in file.namelist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError):  # a foreign file
        return False


def unfinished(path: Path) -> Path:
    """A name under which a checkpoint is written. It is renamed when all of it is on disk. Another
    process that writes to the same path meanwhile has another name."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")


def write_synced(path: Path, write: Callable) -> None:
    """Makes a file with what `write(file)` writes. When this returns, all of it is on disk. Else
    its final name could reach the disk before its content."""
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def write(path: Path, checkpoint: dict, own_runs: list[str] | None = None) -> Path:
    """Writes a checkpoint and its checksum. Until all of it is there, an older file of this name
    stays as it was. Given `own_runs`, only a file of these runs is replaced; else the path is that
    of `unused_path`. Returns it. Raises BadInput if a weight is not finite, and OSError if the disk
    is full."""
    name = not_finite(checkpoint["weights"])
    require(name is None, f"{path} is not written: the weights in {name} are not finite")
    beside = unfinished(path)
    content = checkpoint | {"sha256": checksum(checkpoint["weights"])}
    try:
        write_synced(beside, lambda file: torch.save(content, file))
        if own_runs is not None:
            return rename_to_unused(beside, path, own_runs)
        os.replace(beside, path)
        return path
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or "the disk is full or gone"
        raise OSError(f"{path} cannot be written ({reason})") from None


def rename_to_unused(beside: Path, path: Path, own_runs: list[str]) -> Path:
    """Renames a file to `unused_path`, and returns that. Two runs that end at the same moment get
    names of their own, because a link never takes the place of a file, as renaming does."""
    while True:
        unused = unused_path(path, own_runs)
        try:
            os.link(beside, unused)
        except FileExistsError:
            if run_of(unused) not in own_runs:  # it has come a moment ago
                continue
        except OSError:  # some disks have no links
            pass
        os.replace(beside, unused)  # which does nothing if both are links to one file
        beside.unlink(missing_ok=True)
        return unused


def write_somewhere(path: Path, checkpoint: dict, own_runs: list[str] | None = None) -> Path:
    """Writes the checkpoint of a run that is over, and if that cannot be, to the system's folder of
    temporary files, with a sentence on standard error. Returns its path. Raises as `write` does if
    it cannot be written there, either."""
    try:
        return write(path, checkpoint, own_runs)
    except OSError as error:
        other = Path(tempfile.gettempdir(), f"{path.stem}.pt")
        try:
            other = write(other, checkpoint, own_runs=[])
        except OSError:
            raise error from None
        complain(f"{error}; the weights are in {other}")
        return other


def keep(path: Path, checkpoint: dict, own_runs: list[str] | None = None) -> str:
    """Writes the checkpoint of a run that an error ends. Returns the sentence on what came of it,
    because a second error must not hide the first."""
    try:
        path = write_somewhere(path, checkpoint, own_runs)
    except (OSError, BadInput) as error:
        return str(error)
    return f"{path} has the weights of step {checkpoint['step']}, the best validation so far"


def read(path: str | Path) -> dict:
    """A checkpoint, with its weights on the CPU. Raises BadInput if the file is no checkpoint, if
    its checksum does not hold, or if a weight is not finite."""
    remedy = "name a file that --save_checkpoint has written, such as models/NAME.pt"
    require(Path(path).exists() and str(path), f"{path or 'an empty name'}: no such file; {remedy}")
    require(not Path(path).is_dir(), f"{path} is a folder; {remedy}")
    try:
        checkpoint = load(path)
        weights = checkpoint["weights"]
        whole = checkpoint["sha256"] == checksum(weights)
        name = not_finite(weights)
        checkpoint["config"] = dict(checkpoint["config"])
        if type(checkpoint["step"]) is not int or not all(isinstance(key, str) for key in weights):
            raise TypeError("step or weights")
        loss = checkpoint.get("val_loss")
        checkpoint["val_loss"] = None if loss is None else float(loss)
        checkpoint["data"] = list(map(dict, checkpoint.get("data", [])))  # older files have none
        for shard in checkpoint["data"]:
            if not all(isinstance(shard.get(key, ""), str) for key in ("name", "sha256")):
                raise TypeError("data")
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror})") from None
    except Exception as error:  # a foreign file can make torch.load raise nearly anything
        kind = type(error).__name__
        raise BadInput(f"{path} is no checkpoint of this program ({kind}); {remedy}") from None
    require(whole, f"{path} is damaged: its weights do not have the checksum that it names")
    require(name is None, f"{path}: the weights in {name} are not finite")
    return checkpoint


# --------------------------------------------------------------------------------------------------
# Files from strangers
#
# What torch.save writes is a zip file: a pickle, and beside it the bytes of each tensor. A pickle
# is a program. Those of `weights_only` can run nothing of the system, but they could still ask for
# more memory than there is: a list of names of what a pickle calls is therefore checked before it
# runs, and the sizes of its tensors afterwards, when they are mapped and not yet read. A file whose
# parts are compressed could be larger than it looks. So nothing needs more memory than the file has
# bytes, whoever has written it.

CALLS = re.compile(r"collections OrderedDict|torch\._utils _rebuild_tensor_v2|torch \w+Storage")


def load(path: str | Path):
    """What torch.save has written, as plain data. Its tensors are mapped, so that they are read
    only where they are used. Raises whatever a foreign file can make torch.load raise, and
    ValueError if a file asks for more than it holds."""
    if not Path(path).is_file():  # reading a pipe would wait for ever
        raise ValueError("no file")
    with zipfile.ZipFile(path) as file:
        if any(part.compress_type != zipfile.ZIP_STORED for part in file.infolist()):
            raise ValueError("compressed")
        names = [part.lower() for part in file.namelist()]  # PyTorch does not look at the case
        if len(set(names)) < len(names):
            raise ValueError("two parts of one name")
        for part in file.namelist():
            if part.lower().endswith(".pkl"):
                check_calls(file.read(part))
    content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    need = 0
    for tensor in tensors_in(content, set()):
        need += tensor.nbytes
        if need > os.path.getsize(path) or not tensor.is_contiguous():
            raise ValueError("tensors larger than the file")
    return content


def check_calls(program: bytes) -> None:
    """Raises ValueError if a pickle names anything but tensors and dictionaries."""
    for code, argument, _ in pickletools.genops(program):
        if code.name == "GLOBAL" and not CALLS.fullmatch(argument):
            raise ValueError(argument)
        if code.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):  # torch.save has none
            raise ValueError(code.name)


def tensors_in(content, seen: set[int]) -> Iterator[Tensor]:
    """All tensors in nested dictionaries, lists and tuples. `seen` are the ids of those that were
    looked through: a list may hold another one many times."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, (dict, list, tuple)) and id(content) not in seen:
        seen.add(id(content))
        for item in content.values() if isinstance(content, dict) else content:
            yield from tensors_in(item, seen)


def config_values(config: dict, config_class: type) -> dict:
    """The configuration of a file, as values of all fields of the dataclass. A key that is newer
    than the file has its default, and one that is not known is passed over. Raises BadInput if a
    value cannot be one of its field."""
    values = {}
    for field in dataclasses.fields(config_class):
        value = values[field.name] = config.get(field.name, field.default)
        fits = isinstance(value, (int, float) if field.type is float else field.type)
        if fits and not isinstance(value, str):
            fits = abs(value) < 2**63  # not infinite, either, and no NaN
        require(fits, f"{field.name} is {value!r:.60} in its configuration, which cannot be")
    return values


# --------------------------------------------------------------------------------------------------
# Checks of the weights


def checksum(weights: dict[str, Tensor]) -> str:
    """The sha256 of the names, dtypes, shapes and bytes of some tensors."""
    total = hashlib.sha256()
    for name, w in weights.items():
        total.update(f"{name} {w.dtype} {tuple(w.shape)}\n".encode())
        total.update(w.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def not_finite(weights: dict[str, Tensor]) -> str | None:
    """The first of these tensors that has a number which is not finite, or None."""
    for name, w in weights.items():
        if not w.isfinite().all():
            return name
    return None


def model_of(content: dict, device: torch.device, script):
    """The train_gpt.GPT of a checkpoint on one device, ready for texts of any multiple of 128
    tokens: nothing is compiled. `script` is that module. `model.trained_steps` is the number of
    steps, `model.data` has the fingerprints of its shards, `model.weights_sha256` the checksum of
    the weights, and `model.val_loss` is the loss of its validation, if they are known. Raises
    BadInput if the weights do not fit the configuration."""
    config = content["config"]
    require("num_layers" in config, "the checkpoint is of an older version of this program; use "
            "the commit that its log names, or train it anew")
    values = config_values(config, script.Config)
    remedy = (f"its run's log, {content.get('run_id', 'RUN_ID')}.txt, holds that code: "
              "python -m records code LOG FOLDER")
    require(values["schedule"] in script.SCHEDULES, "the checkpoint was written by other code, "
            f"with a schedule {values['schedule']}; {remedy}")
    c = script.Config(**values | dict(
        attention="sdpa", compile=False, device=device.type, native=False, sample="", run_name=""))
    script.check_config(c)
    table = script.parameter_table(c)
    differing = sorted({*table, "recall_table"} ^ content["weights"].keys())
    require(not differing, "the checkpoint was written by other code, as only one of the two has "
            f"weights of {' and '.join(differing[:2])}; {remedy}")
    for name, weight in content["weights"].items():
        if name == "recall_table":
            fits = matches.is_table(weight, c)
        else:
            fits = weight.shape == table[name].shape
        require(fits, f"the checkpoint's weights of {name} do not fit its configuration; {remedy}")
    model = script.GPT(c, device)
    model.load_state_dict(content["weights"])
    for bank in model.parameters():
        if bank.dtype == torch.float16:  # texts overflow it sooner than training does
            bank.data = bank.to(torch.float32 if device.type == "cpu" else torch.bfloat16)
    model.trained_steps = content["step"]
    model.data = content.get("data", [])
    model.weights_sha256 = content.get("sha256")
    model.val_loss = content.get("val_loss")
    return model


def load_model(path: str | Path, device: torch.device | str, script):
    """The model of the file, as `model_of` makes it. Raises BadInput if it is no checkpoint of this
    program."""
    content = read(path)
    try:
        return model_of(content, torch.device(device), script)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
