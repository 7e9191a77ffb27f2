"""What a run leaves on disk beside its log: its best weights, and saves, from which it can go on.

All tensors lie in safetensors files: a header in JSON and the bytes behind it, so reading one can
run nothing, whoever has written it.

Weights (--save_checkpoint) are one file. It has each bank of train_gpt.parameter_table, without
padding, and the table of recalled tokens (nanogpt/past.py). Its header has, each as JSON, `config`,
`step`, `val_loss`, `run_id`, `code_sha256` (of the train_gpt.py that trained them) and `data` (the
fingerprints of the shards).

A save (--save_every, --save_steps, or a signal) is a folder:

    logs/RUN_ID.saved/step_000123/rank_0_of_2.safetensors
    logs/RUN_ID.saved/step_000123/rank_1_of_2.safetensors
    logs/RUN_ID.saved/step_000123/save.json

The file of a rank holds what `tensors_of` names and its random numbers, save.json what all ranks
share. The folder gets its name when all files are in it, so a save is whole or it is none, whenever
the run is killed. On several hosts it must be on a disk that they share. A run that goes on puts
the parts of all files together and keeps its own, so the number of ranks may be another one.
"""
import dataclasses
import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanogpt import arguments, faults, process
from nanogpt.arguments import NEWEST
from nanogpt.ranks import (
    BadInput,
    SharedFault,
    all_ranks,
    on_all_ranks,
    patiently,
    rank_and_world_size,
    require,
)
from records.console import complain
from records.log import sha256

REMEDY = "name an older save with --resume=FOLDER, or leave --resume out to begin anew"
KEPT = 2  # saves of a run that stay on disk
UNFINISHED = "unfinished"  # name of the folder of a save that is being written


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict) -> None:
    """Writes a safetensors file with `about` in its header. Until all of it is on disk, an older
    file of this name stays. Raises OSError if the disk is full."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    on_cpu = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    header = {"format": "pt"} | {name: json.dumps(value) for name, value in about.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(on_cpu, beside, header)
        # save_file lets nobody else read it. Whoever may read the folder may read the file.
        beside.chmod(path.parent.stat().st_mode & 0o666)
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, SafetensorError) as error:
        beside.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written ({error})") from None


def open_tensors(path: Path, remedy: str):
    """A safetensors file, whose tensors are read when they are asked for. Raises BadInput if it is
    none."""
    require(path.is_file(), f"{path}: no such file; {remedy}")
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{path} is cut off or no checkpoint of this program ({error}); copy it "
                       f"once more, or {remedy}") from None


# --------------------------------------------------------------------------------------------------
# Weights


def of_model(model, step: int, val_loss: float | None, origin: dict) -> dict:
    """The content of the file of a train_gpt.GPT's weights after so many steps. `origin` has
    `run_id`, `code_sha256` and `data`, or nothing."""
    weights = {name: model.weight(name).detach() for name in model.params}
    weights["recall_table"] = model.recall_table
    config = dataclasses.asdict(model.config)
    return dict(config=config, weights=weights, step=step, val_loss=val_loss) | origin


def write(path: Path, content: dict) -> None:
    about = {name: value for name, value in content.items() if name != "weights"}
    write_tensors(path, content["weights"], about)


def read(path: str | Path) -> dict:
    """What `of_model` has made, with the weights on the CPU. Raises BadInput if the file is no
    checkpoint of this program."""
    remedy = "name a file that --save_checkpoint has written, such as models/NAME.safetensors"
    path = Path(path)
    save = path if path.is_dir() else path.parent
    require(not (save / "save.json").exists(),
            f"{path} is part of a save; go on with it by --resume={save}, or {remedy}")
    file = open_tensors(path, remedy)
    header = file.metadata() or {}
    require("config" in header,
            f"{path} is a safetensors file, but no checkpoint of this program; {remedy}")
    content = {name: json.loads(text) for name, text in header.items() if name != "format"}
    content["weights"] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return content


def unused_path(path: Path) -> Path:
    """NAME.safetensors, or NAME-2.safetensors and so on: the first that does not exist."""
    unused = path
    number = 2
    while unused.exists():
        unused = path.with_stem(f"{path.stem}-{number}")
        number += 1
    return unused


def config_values(config: dict, config_class: type) -> dict:
    """The configuration of a file, as values of all fields of the dataclass. A key that is newer
    than the file has its default, and one that is unknown is passed over."""
    return {field.name: config.get(field.name, field.default)
            for field in dataclasses.fields(config_class)}


def model_of(content: dict, device: torch.device, script):
    """The train_gpt.GPT of a file's content, for texts of any multiple of 128 tokens. `script` is
    that module. Raises BadInput if the weights do not fit the configuration."""
    values = config_values(content["config"], script.Config)
    if values["precision"] == "fp16":  # texts overflow it sooner than training does
        values["precision"] = "bf16"
    c = script.Config(**values | dict(
        attention="sdpa", compile=False, device=device.type, sample="", run_name=""))
    arguments.check(c, script.SCHEDULES, script.PRECISIONS)
    model = script.GPT(c, device)
    try:
        model.load_state_dict(content["weights"])
    except RuntimeError:
        raise BadInput("the weights do not fit this code; use the code of its run, which the log "
                       f"{content.get('run_id', 'RUN_ID')}.txt holds") from None
    model.trained_steps = content["step"]
    return model


def load_model(path: str | Path, device: torch.device | str, script):
    """The model of a file, as `model_of` makes it. Says so if another train_gpt.py has trained it,
    as the same weights may mean something else there. Raises BadInput as these two do."""
    content = read(path)
    try:
        model = model_of(content, torch.device(device), script)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    model.of_other_code = content.get("code_sha256") not in (None, sha256(script.SOURCE))
    if model.of_other_code:
        log = f"{content['run_id']}.txt"
        complain(f"{path} was trained by another train_gpt.py; what this one computes with it may "
                 f"be wrong. `python -m records code LOGS/{log} FOLDER` writes the other one")
    return model


# --------------------------------------------------------------------------------------------------
# Finding a save, and going on from it


def saves_in(folder: Path) -> list[Path]:
    """The saves that lie anywhere in a folder, or are it, the oldest first."""
    files = sorted(folder.glob("**/save.json"), key=lambda file: file.stat().st_mtime_ns)
    return [file.parent for file in files if file.parent.name != UNFINISHED]


def find(asked: str, log_dir: str) -> Path | None:
    """The save that --resume=ASKED means: the newest one in that folder, or for NEWEST in
    `log_dir`, where there may be none. Raises BadInput if a save that was named is not there."""
    if not asked:
        return None
    saves = saves_in(Path(log_dir if asked == NEWEST else asked))
    if not saves and asked == NEWEST:
        process.say(f"no save under {log_dir}; this run begins at step 0")
        return None
    require(saves, f"--resume={asked} is no complete save; name a folder such as "
            "logs/RUN_ID.saved/step_000123, or give --resume alone for the newest one")
    return saves[-1]


def facts_of(save: Path) -> dict:
    """What save.json holds. Raises BadInput if it is damaged."""
    try:
        return json.loads((save / "save.json").read_text())
    except (OSError, ValueError):
        raise BadInput(f"{save / 'save.json'} is damaged; {REMEDY}") from None


def configure(config_class: type, save: Path, given: dict, may_change: tuple[str, ...]):
    """The configuration of a save, with the given values laid over it: they may be of RunConfig and
    of `may_change`. Raises BadInput if a given value would change the result."""
    saved = config_values(facts_of(save)["config"], config_class)
    changed = [f"--{name}={value} (saved: {saved[name]})" for name, value in given.items()
               if name not in (*may_change, *vars(arguments.RunConfig())) and value != saved[name]]
    require(not changed, f"--resume={save} goes on with the saved configuration, which cannot be "
            f"changed by {', '.join(changed)}; leave out what differs, name the save that you "
            "mean, or leave --resume out to begin anew")
    return config_class(**saved | given | {"resume": str(save)})


def state_of(optimizer) -> dict[str, Tensor]:
    """All that the updates of a train_gpt.Optimizer change, by names like "mlp.master" and
    "mlp.momentum_buffer": this rank's rows of what `is_sliced`, and all of the rest."""
    named = {}
    for name, master in optimizer.masters.items():
        named[f"{name}.master"] = master
        for kind, moment in optimizer.state[name]._asdict().items():
            named[f"{name}.{kind}"] = moment
    for name, average in optimizer.averages.items():
        named[f"{name}.average"] = average
    for name, table in optimizer.tables.tables.items():
        named[f"{name}.weights"] = table.bank
        named[f"{name}.mean_square"] = table.mean_square
    candidates = optimizer.model.candidates
    return named | dict(
        recall_table=optimizer.model.recall_table, target_counts=candidates.target_counts,
        lost_targets=candidates.lost_targets)


def is_sliced(name: str, optimizer) -> bool:
    """Whether each rank has only some rows of the tensor of this name, and not the whole."""
    bank, _, _ = name.partition(".")
    return bank in optimizer.masters and optimizer.model.params[bank].share == "slice"


def tensors_of(optimizer) -> dict[str, Tensor]:
    """What a save has of this rank: its rows, and an equal part of what all ranks have whole."""
    rank, world_size = rank_and_world_size()
    return {name: x if is_sliced(name, optimizer) else x.view(-1).tensor_split(world_size)[rank]
            for name, x in state_of(optimizer).items()}


def parameters_of(optimizer) -> dict[str, list]:
    """By name, what must be the same in a run that goes on: shapes, and how they are updated."""
    return {name: [*param.shape, param.optimizer]
            for name, param in optimizer.model.params.items()}


def random_module(device: torch.device):
    """What has the state of the random numbers of a device."""
    return torch.cuda if device.type == "cuda" else torch


class Saved:
    """A save that a run goes on from."""

    def __init__(self, save: Path, data: list[dict], folder: str):
        """`data` are the fingerprints of the shards in `folder` (data/shards.py). Raises BadInput
        if the save is damaged, or of a run on other shards; their names do not count."""
        self.save = save
        self.facts = facts_of(save)
        self.step = self.facts["step"]
        ours, saved = ([(shard["split"], shard["sha256"]) for shard in shards]
                       for shards in (data, self.facts["data"]))
        require(ours == saved, f"the shards in {folder} are not those of {save}, a run on "
                f"{self.facts['config'].get('data_dir')}; give the folder of its shards as "
                "--data_dir, or leave --resume out to begin anew")
        count = self.facts["world_size"]
        self.parts = [
            open_tensors(rank_file(save, rank, count), f"the save is not whole; {REMEDY}")
            for rank in range(count)]

    def check_fits(self, optimizer) -> None:
        """Raises BadInput unless the save has what updates of this train_gpt.Optimizer change."""
        saved, ours = self.facts["parameters"], parameters_of(optimizer)
        differing = sorted(name for name in saved | ours if saved.get(name) != ours.get(name))
        require(not differing, f"{self.save} was written by other code, with other weights of "
                f"{' and '.join(differing[:2])}; go on with the code that is in its run's log, or "
                "leave --resume out to begin anew")

    def of_ranks(self, name: str) -> list[Tensor]:
        return [part.get_tensor(name) for part in self.parts]

    @torch.no_grad()
    def restore(self, optimizer) -> None:
        """Fills train_gpt.Optimizer and its model. The banks become copies of the masters, as they
        are after an update."""
        for name, tensor in state_of(optimizer).items():
            whole = torch.cat(self.of_ranks(name))
            bank_name, _, kind = name.partition(".")
            if is_sliced(name, optimizer):
                whole = with_rows(whole, len(optimizer.banks[bank_name]))
                tensor.copy_(optimizer.own_slice(bank_name, whole))
            else:
                whole = whole.view(tensor.shape)
                tensor.copy_(whole)
            if kind == "master":
                optimizer.banks[bank_name].copy_(whole)
        optimizer.updates = self.facts["updates"]
        optimizer.recipe.load_state(self.facts["recipe"])
        optimizer.recipe.weights_changed([*optimizer.masters], optimizer.masters)
        self.restore_random(optimizer.device, optimizer.model.config.seed)

    def restore_random(self, device: torch.device, seed: int) -> None:
        """Random numbers go on where they were. On another number of ranks or another kind of
        device they begin anew, from the seed, the step and the rank."""
        rank, world_size = rank_and_world_size()
        torch.manual_seed((seed * 2**32 + self.step * 2**16 + rank) % 2**63)
        states = self.of_ranks("random")
        random = random_module(device)
        if len(states) == world_size and len(states[rank]) == len(random.get_rng_state()):
            random.set_rng_state(states[rank])


def with_rows(x: Tensor, rows: int) -> Tensor:
    """A bank cut or padded to so many rows: another number of ranks pads it otherwise."""
    padded = x.new_zeros(rows, *x.shape[1:])
    padded[: len(x)] = x[:rows]
    return padded


# --------------------------------------------------------------------------------------------------
# Keeping a run


def rank_file(save: Path, rank: int, world_size: int) -> Path:
    return save / f"rank_{rank}_of_{world_size}.safetensors"


class Keeper:
    """Keeps one run: saves it, and writes its best weights.

    An error of the disk ends nothing: a sentence on standard error says so, and what was written
    before stays. `first_step`: the steps that were made before the save from which the run goes on,
    or 0."""

    def __init__(self, c, optimizer, run_files, facts, log, clock):
        """`c` and `optimizer` are train_gpt.Config and Optimizer, `run_files` a
        run_files.RunFiles, `facts`, `log` and `clock` of records/journal.py. Loads the save, if the
        run goes on from one. A collective."""
        self.config = c
        self.optimizer = optimizer
        self.facts = facts
        self.log = log
        self.clock = clock
        self.rank, self.world_size = rank_and_world_size()
        self.first_step = 0
        self.folder = Path(c.log_dir, f"{all_ranks(facts.run['run_id'])[0]}.saved")
        self.saves = c.save_every > 0 or c.save_steps > 0
        # Where the best weights go: None if none are kept, and always on ranks other than 0.
        self.weights_file = run_files.checkpoint_path
        self.lacks_weights = False  # whether the best weights could not be written
        self.best = None  # step, loss and file of the best weights; no file of the untrained ones
        if run_files.saved:
            self.go_on(run_files.saved)
        self.last_save = self.clock.total, self.first_step

    def go_on(self, saved: Saved) -> None:
        """A collective."""
        on_all_ranks(saved.restore, self.optimizer)
        facts = saved.facts
        self.first_step = saved.step
        if saved.save.parent.suffix == ".saved":  # else somebody has moved it
            self.folder = saved.save.parent
        self.best = facts["best"]
        self.clock.total = facts["seconds"]
        for line in facts["steps"]:
            self.log.step(*line, show=False)

    def due(self, step: int) -> bool:
        """Whether rank 0 wants a save now. The other ranks, on which this is False, hear of it
        (`ranks.Requests`)."""
        c = self.config
        last_seconds, last_step = self.last_save
        by_clock = c.save_every > 0 and self.clock.now() - last_seconds >= 60 * c.save_every
        return self.rank == 0 and (by_clock or 0 < c.save_steps <= step - last_step)

    def save(self, step: int) -> None:
        """Saves the run, if it is one that saves. The log must have all losses so far. Raises
        BadInput if a number is not finite. A collective."""
        if not self.saves:
            return
        tensors = tensors_of(self.optimizer)
        where = faults.not_finite(tensors)
        require(not where, f"training went wrong before step {step}{where}; {faults.LOWER}")
        tensors["random"] = random_module(self.optimizer.device).get_rng_state()
        self.last_save = self.clock.total, step
        folder = self.folder / UNFINISHED
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # what a run that was killed may have left
        all_ranks(None)
        part = rank_file(folder, self.rank, self.world_size)
        try:
            with patiently():
                on_all_ranks(write_tensors, part, tensors, dict(step=step), errors=(OSError,))
                on_all_ranks(self.finish_save, folder, step, errors=(OSError,))
        except SharedFault as fault:
            if self.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                complain(f"cannot save: {fault}; the run goes on, and older saves stay")

    def finish_save(self, folder: Path, step: int) -> None:
        """What rank 0 does when all ranks have written their files. Raises OSError."""
        if self.rank > 0:
            return
        if len([*folder.iterdir()]) < self.world_size:
            raise OSError(f"{folder} lacks files; hosts must share the disk of --log_dir")
        optimizer = self.optimizer
        facts = dict(
            config=dataclasses.asdict(self.config), data=self.facts.data,
            parameters=parameters_of(optimizer), step=step, world_size=self.world_size,
            seconds=self.clock.total, steps=self.log.steps, best=self.best,
            updates=optimizer.updates, recipe=optimizer.recipe.state())
        (folder / "save.json").write_text(json.dumps(facts))
        save = self.folder / f"step_{step:06}"
        shutil.rmtree(save, ignore_errors=True)  # that of a run which went on from an earlier one
        folder.rename(save)
        for old in saves_in(self.folder)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def end_saves(self) -> None:
        """The run has come to its end: its saves are of no use, unless the disk had no place for
        the best weights."""
        if self.rank == 0 and not self.lacks_weights:
            shutil.rmtree(self.folder, ignore_errors=True)

    def content(self, step: int, val_loss: float | None) -> dict:
        """The weights as they are now (`of_model`)."""
        run = self.facts.run
        origin = dict(
            run_id=run["run_id"], data=self.facts.data, code_sha256=run["code_sha256"])
        return of_model(self.optimizer.model, step, val_loss, origin)

    def validated(self, step: int, loss: float) -> None:
        """Writes the weights if they are the best so far, and better than without training. They
        are written at once, so that not even kill -9 loses them. A collective."""
        if not self.config.save_checkpoint or (self.best and loss >= self.best[1]):
            return
        if step == 0:
            self.best = step, loss, None
            return
        try:
            with patiently():
                path = on_all_ranks(self.write_weights, step, loss, errors=(OSError,))
            self.best = step, loss, path
            self.lacks_weights = False
        except SharedFault as fault:
            if self.rank == 0:
                complain(f"{fault}; the run goes on")
            self.lacks_weights = True

    def write_weights(self, step: int, loss: float) -> str | None:
        """Their file, which rank 0 writes. Raises OSError."""
        if self.rank > 0:
            return None
        if self.config.save_checkpoint == "auto" and not (self.best and self.best[2]):
            self.weights_file = unused_path(self.weights_file)  # if another run has begun meanwhile
        write(self.weights_file, self.content(step, loss))
        return str(self.weights_file)

    def say_how_to_go_on(self, step: int, ended_by: str) -> int:
        """Says how to go on with a run that this signal has ended. Returns the exit status."""
        saves = saves_in(self.folder)
        hint = "it cannot be resumed, as nothing was saved; --save_every=MINUTES saves"
        if saves:
            hint = f"to go on, start it again with --resume={shlex.quote(str(saves[-1]))}"
        self.log.console.say(f"stopped by {ended_by} after step {step}; {hint}")
        return 128 + signal.Signals[ended_by]
