"""What a run leaves on disk beside its log: its best weights, and a save, from which it can go on.

Both are safetensors files: a header in JSON and the bytes of tensors behind it, so reading one can
run nothing, whoever has written it. A file gets its name when all of it is on disk, so it is whole
or there is none, whenever the run is killed. Rank 0 writes both.

Weights (--save_checkpoint) are each bank of train_gpt.parameter_table, without padding, and the
table of recalled tokens (nanogpt/past.py). The header has, each as JSON, `config`, `step`,
`val_loss`, `run_id`, `code_sha256` (of its train_gpt.py) and `data` (fingerprints of the shards).

A save, logs/RUN_ID.saved, is made if --save_every says so: every so many minutes, and at a signal.
The next one replaces it. It has what `tensors_of` names, whole, so a run may go on with another
number of ranks.
"""
import dataclasses
import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data import BadInput, require
from nanogpt import faults, process
from nanogpt.command_line import NEWEST, RunConfig, check
from nanogpt.ranks import gathered, is_rank_0, on_all_ranks, patiently
from records.console import complain
from records.log import sha256

ANEW = "leave --resume out to begin anew"
KINDS = {  # of files: a key that only their header has, and the remedy if the file is another
    "save": ("updates", ANEW),
    "weights": ("val_loss", "name a file that --save_checkpoint has written, such as "
                "models/NAME.safetensors"),
}


def part_of(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(f"{path.name}.part")


def write(path: Path, tensors: dict[str, Tensor], about: dict) -> None:
    """Writes a file with `about` in its header. Until all of it is on disk, an older one of this
    name stays. Raises OSError if that fails, as on a full disk."""
    beside = part_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.touch()  # so that no other run takes the name meanwhile (`unused_path`)
        on_cpu = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        header = {"format": "pt"} | {name: json.dumps(value) for name, value in about.items()}
        save_file(on_cpu, beside, header)
        # save_file lets nobody else read it. Whoever may read the folder may read the file.
        beside.chmod(path.parent.stat().st_mode & 0o644)
        with open(beside, "rb+") as file:  # Windows syncs no file that is open for reading only
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, SafetensorError) as error:
        beside.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written ({error})") from None


def open_file(path: str | Path, kind: str):
    """A file, to read tensors from, and its header. Raises BadInput if it is none of this kind."""
    mark, remedy = KINDS[kind]
    require(not Path(path).is_dir(), f"{path} is a folder; {remedy}")
    try:
        file = safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{path} is missing, cut off, or no file of this program ({error}); {remedy}"
                       ) from None
    header = file.metadata() or {}
    require({mark, "config"} <= header.keys(), f"{path} holds no {kind} of this program; {remedy}")
    return file, {name: json.loads(text) for name, text in header.items() if name != "format"}


def still_there(best: list | None) -> bool:
    """Whether a file still holds these best weights, of this step, loss and path. It may have been
    moved, and another run may have taken its name."""
    if not best:
        return False
    step, loss, path = best
    try:
        _, about = open_file(path, "weights")
    except BadInput:
        return False
    return (about.get("step"), about["val_loss"]) == (step, loss)


# --------------------------------------------------------------------------------------------------
# Weights


def weights_of(model) -> dict[str, Tensor]:
    """The tensors of the file of a train_gpt.GPT's weights. Its tables must be complete
    (`Tables.complete`), as they are after validation."""
    weights = {name: model.weight(name) for name in model.params}
    return weights | {"recall_table": model.recall_table}


def read(path: str | Path) -> tuple[dict[str, Tensor], dict]:
    """The weights of a file, and what its header says. Raises BadInput if it has none."""
    file, about = open_file(path, "weights")
    return {name: file.get_tensor(name) for name in file.keys()}, about


def unused_path(path: Path) -> Path:
    """NAME.safetensors, or NAME-2.safetensors and so on: the first that does not exist and that no
    run is writing."""
    unused = path
    number = 1
    while unused.exists() or part_of(unused).exists():
        number += 1
        unused = path.with_stem(f"{path.stem}-{number}")
    return unused


def config_values(config: dict, config_class: type) -> dict:
    """The configuration of a file, as values of all fields of the dataclass. A key that is newer
    than the file has its default, and one that is unknown is passed over."""
    return {field.name: config.get(field.name, field.default)
            for field in dataclasses.fields(config_class)}


def load_model(path: str | Path, device: torch.device | str, script):
    """The train_gpt.GPT of a file, for texts of any multiple of 128 tokens. `script` is that
    module. On a CPU that can only emulate bf16 it computes in float32. Says so if another
    train_gpt.py has trained it, as the same weights may mean something else there. Raises BadInput
    if there is no such model."""
    device = torch.device(device)
    weights, about = read(path)
    if about.get("code_sha256") not in (None, sha256(script.SOURCE)):
        complain(f"{path} was trained by another train_gpt.py; what this one computes with it may "
                 f"be wrong. `python -m records code LOGS/{about['run_id']}.txt FOLDER` writes the "
                 "other one")
    values = config_values(about["config"], script.Config)
    if values["precision"] == "fp16":  # texts overflow it sooner than training does
        values["precision"] = "bf16"
    values |= dict(attention="sdpa", compile=False, device=device.type, sample="")
    c = script.Config(**values)
    check(c, script)
    model = script.GPT(c, device)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        if faults.sentence_of(error):  # too little memory
            raise
        raise BadInput(f"{path} does not fit this code; use the code of its run, which the log "
                       f"{about.get('run_id', 'RUN_ID')}.txt holds") from None
    if device.type == "cpu" and not script.CPU_HAS_BF16:
        model.float()
    model.trained_steps = about["step"]
    return model


# --------------------------------------------------------------------------------------------------
# Finding a save, and going on from it


def find(asked: str, log_dir: str) -> Path | None:
    """The save that --resume=ASKED means. NEWEST: the newest one in `log_dir` or below, if any."""
    if asked != NEWEST:
        return Path(asked) if asked else None
    saves = Path(log_dir).glob("**/*.saved")
    newest = max(saves, key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        process.say(f"no save under {log_dir}; this run begins at step 0")
    return newest


def config_of_save(script, save: Path, given: dict):
    """The configuration of a save, with the given values laid over it: they may be of RunConfig and
    of train_gpt.MAY_CHANGE. Raises BadInput if a given value would change the result."""
    _, facts = open_file(save, "save")
    saved = config_values(facts["config"], script.Config)
    changed = [f"--{name}={value} (saved: {saved[name]})" for name, value in given.items()
               if name not in (*script.MAY_CHANGE, *vars(RunConfig())) and value != saved[name]]
    require(not changed, f"--resume={save} goes on with the saved configuration, which cannot be "
            f"changed by {', '.join(changed)}; leave that out, name the save you mean, or {ANEW}")
    return script.Config(**saved | given | {"resume": str(save)})


def state_of(optimizer) -> dict[str, Tensor]:
    """The tensors that training changes, but no banks that copy masters, by names like "mlp.master"
    and "mlp.momentum_buffer": of banks with share "slice" this rank's rows, and all of the rest. Of
    tables only this rank's columns are up to date before `Tables.complete`."""
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


def tensors_of(optimizer) -> dict[str, Tensor]:
    """What a save has: all of `state_of`, on rank 0 whole and without padding. A collective."""
    optimizer.tables.complete()
    tensors = state_of(optimizer)
    for name, x in tensors.items():
        bank, _, _ = name.partition(".")
        param = optimizer.model.params.get(bank)
        if bank in optimizer.masters and param.share == "slice":
            whole = gathered(x)[: param.shape[0]]
            if is_rank_0():
                tensors[name] = whole.cpu()  # no GPU has room for all of them
    return tensors


def check_save(path: str, data: list[dict], folder: str) -> dict:
    """What the header of a save says. `data` are the fingerprints of the shards in `folder`
    (data/shards.py). Raises BadInput if it is damaged, or of other shards; names do not count."""
    _, facts = open_file(path, "save")
    ours, saved = ([(shard["split"], shard["sha256"]) for shard in shards]
                   for shards in (data, facts["data"]))
    require(ours == saved, f"the shards in {folder} are not those of {path}, a run on "
            f"{facts['config'].get('data_dir')}; give the folder of its shards as --data_dir, or "
            f"{ANEW}")
    return facts


@torch.no_grad()
def restore(path: Path, saved: dict, optimizer) -> None:
    """Fills train_gpt.Optimizer and its model from a save, whose header was `saved`. The banks
    become copies of the masters, as after an update. The caller must tell the recipe of that
    (`weights_changed`). Raises BadInput if the save does not fit them, or is another one by now."""
    file, facts = open_file(path, "save")
    require(facts == saved, f"{path} was replaced while it was read, so its run still goes on; "
            "wait until that has ended, or name another save")
    try:
        for name, tensor in state_of(optimizer).items():
            whole = file.get_tensor(name)
            bank, _, kind = name.partition(".")
            if bank in optimizer.masters:
                padded = whole.new_zeros(len(optimizer.banks[bank]), *whole.shape[1:])
                padded[: len(whole)] = whole
                if kind == "master":
                    optimizer.banks[bank].copy_(padded)
                whole = optimizer.own_part(bank, padded)
            tensor.copy_(whole)
    except (SafetensorError, RuntimeError) as error:
        if faults.sentence_of(error):  # too little memory
            raise
        raise BadInput(f"{path} was written by other code ({error}); go on with the code that is "
                       f"in its run's log, or {ANEW}") from None
    optimizer.updates = facts["updates"]
    optimizer.hooks.load_state(facts["recipe"])


# --------------------------------------------------------------------------------------------------
# Keeping a run


class Keeper:
    """Keeps one run: saves it, and writes its best weights.

    An error of the disk ends nothing: a sentence on standard error says so, and what was written
    before stays. `first_step`: the steps before the save from which the run goes on, or 0."""

    def __init__(self, optimizer, run_files, log, clock):
        """`optimizer` is train_gpt.Optimizer, `run_files` a RunFiles, `log` and `clock` of
        records/journal.py. Loads the save, if the run goes on from one. A collective."""
        self.config = c = optimizer.model.config
        self.optimizer = optimizer
        self.log = log
        self.clock = clock
        self.first_step = 0
        self.save_path = log.path.with_suffix(".saved")
        # Where the best weights go: None if none are kept, and always on ranks other than 0.
        self.weights_path = run_files.weights_path
        self.lacks_weights = False  # whether the best weights could not be written
        self.best = None  # step, loss and file of the best weights
        saved = run_files.saved
        if saved:
            path = Path(c.resume)
            on_all_ranks(restore, path, saved, optimizer)
            # a collective, so only when no rank has failed
            optimizer.hooks.weights_changed([*optimizer.masters], optimizer.masters)
            self.first_step = saved["step"]
            if path.parent.resolve() == Path(c.log_dir).resolve():  # else it may be somebody's copy
                self.save_path = path
            if still_there(saved["best"]):
                self.best = saved["best"]
            clock.total = saved["seconds"]
            for line in saved["steps"]:
                log.step(*line, show=False)
        self.asked_at = clock.total  # when `due` was True last, in seconds of training

    def due(self) -> bool:
        """Whether a save is due. Rank 0 says so once; the others hear of it (`ranks.Requests`)."""
        now = self.clock.now()
        is_due = is_rank_0() and 0 < 60 * self.config.save_every <= now - self.asked_at
        if is_due:
            self.asked_at = now
        return is_due

    @patiently()
    def save(self, step: int) -> None:
        """Saves the run, if it is one that saves. The log must have all losses so far. Raises
        BadInput if a number is not finite. A collective."""
        if not self.config.save_every:
            return
        optimizer = self.optimizer
        faults.check_state(state_of(optimizer), f"training went wrong before step {step}")
        tensors = tensors_of(optimizer)
        facts = dict(
            config=dataclasses.asdict(self.config), data=self.log.facts["data"], step=step,
            seconds=self.clock.total, steps=self.log.steps, best=self.best,
            code_sha256=self.log.facts["run"][0]["code_sha256"],
            updates=optimizer.updates, recipe=optimizer.hooks.state())
        if not is_rank_0():
            return
        try:
            write(self.save_path, tensors, facts)
        except OSError as error:
            older = ", and an older save stays" if self.save_path.exists() else ""
            complain(f"cannot save: {error}{older}")

    def remove_save(self) -> None:
        """At the end of the run its save is of no use, unless the best weights found no room."""
        if is_rank_0() and not self.lacks_weights:
            self.save_path.unlink(missing_ok=True)

    @patiently()
    def validated(self, step: int, loss: float) -> None:
        """Writes the weights if they are trained, and the best so far. They are written at once, so
        that not even kill -9 loses them. A collective."""
        if step == 0 or self.weights_path is None or (self.best and loss >= self.best[1]):
            return
        if self.config.save_checkpoint == "auto" and not self.best:
            self.weights_path = unused_path(self.weights_path)  # if another run has begun meanwhile
        [run] = self.log.facts["run"]
        about = dict(
            config=dataclasses.asdict(self.config), step=step, val_loss=loss, run_id=run["run_id"],
            code_sha256=run["code_sha256"], data=self.log.facts["data"])
        self.lacks_weights = True
        try:
            write(self.weights_path, weights_of(self.optimizer.model), about)
            self.best = step, loss, str(self.weights_path)
            self.lacks_weights = False
        except OSError as error:
            complain(f"{error}; the run goes on")
