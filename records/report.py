"""What a run says of itself when it begins and when it has ended, on the screen and in the log.

`script` is the module train_gpt, and `run` a train_gpt.Run.
"""
import dataclasses
import math
import shlex
import signal

import torch

import sample
from data import BadInput
from nanogpt import checkpoints
from nanogpt.ranks import is_rank_0
from records import journal
from records.console import curve, to_type
from records.log import machine_name


def begin(log: journal.Log, script, device: torch.device, about_run: dict, files: list[dict],
          run_files, recipe_names, c, seconds: float | None = None) -> None:
    """Begins the log, and shows what will run. `about_run` is from journal.describe_run, `files`
    are the project's source files, `run_files` is a planning.RunFiles, and `seconds` is how long
    the run may take, if that is known. A collective."""
    stages = [dict(first_step=first, last_step=end, batch_tokens=script.stage_tokens(stage, c))
              for first, end, stage in script.stages(c)]
    config = dataclasses.asdict(c)
    machine = journal.describe_machine(device)
    data = run_files.fingerprints
    log.begin(script.SOURCE, dict(
        run=[about_run], file=files, config=[config], environment=[machine], data=data,
        stage=stages))
    unit = log.unit
    active, in_tables = num_weights(script.parameter_table(c))
    train_tokens = sum(shard["tokens"] for shard in data if shard["split"] == "train")
    tokens = c.seq_len * sum(script.batch_plan(c))
    used = ", ".join(sorted({*recipe_names.values()}))
    show_facts(log, {
        "device": f"{machine_name(machine, config)}, torch {machine['torch']}",
        "preset": c.preset,
        "model": f"{active / 1e6:,.1f}M parameters active, {in_tables / 1e6:,.1f}M in tables",
        "precision": c.precision if used == c.precision else f"{c.precision} ({used})",
        "data": f"{c.data_dir}: {train_tokens:,} {unit}s for training, {c.val_tokens:,} for "
                "validation",
        "run": f"{c.num_steps:,} steps, {tokens:,} {unit}s, {tokens / train_tokens:.2f} epochs"
               + (f", about {seconds / 60:.1f} min" if seconds else ""),
        "seed": str(c.seed),
        "log": log.path,
        "weights": run_files.weights_path or "not kept; --save_checkpoint keeps them",
    })


def end(run, script, startup_s: float) -> int:
    """Says what came of the run, and what to try next. Returns the exit status, which is 0 also if
    the target was missed: that is a result and no crash. It is 2 if no weights could be kept."""
    c, keeper, log = run.config, run.keeper, run.log
    show = log.show
    log.close_bar()
    if run.optimizer.hooks.state():
        log.fact("note", f"at the end the recipe has {run.optimizer.hooks.state()}")
    lost = int(run.model.candidates.lost_targets)
    if lost:
        log.fact("defect", dict(what=f"{lost} targets were no candidates; raise --candidates"))
    result = results(run, script, startup_s)
    log.end(result | ({"interrupted": True} if run.ended_by else {}))
    best, best_loss, path = keeper.best or (None, None, None)
    if not run.ended_by:
        keeper.remove_save()
        script.STOP.end_at_once()  # by a signal, as all is written
        if is_rank_0() and c.sample and path:
            show(f"sample: {sample_of(run, script, path)}")
    train_losses = [loss for _, _, name, loss in log.steps if name == "train_loss"]
    loss, reached, memory = result["val_loss"], result["reached"], result["peak_memory_mib"]
    unit = log.unit
    # Here the end of a document counts as a byte; in evaluate.py it does not.
    bits = f", {loss / math.log(2):.3f} bits per byte" if loss and unit == "byte" else ""
    # A run that was stopped has validated some steps before.
    validated = max((step for step, _, name, _ in log.steps if name == "val_loss"), default=None)
    when = "" if validated == run.step else f", after step {validated}"
    weights = None
    if path:
        weights = f"{path}, of step {best} with loss {best_loss:.4f}"
    elif keeper.lacks_weights:
        weights = "none, as they could not be written"
        if keeper.save_path.exists():
            weights += f"; make room, then --resume={shlex.quote(str(keeper.save_path))}"
    show("")
    show_facts(log, {
        "training": f"{curve(train_losses)} the loss of steps 1 to {run.step}",
        "loss": loss and f"{loss:.4f} nats per {unit}{bits}{when}",
        "target": reached is not None
                  and f"{c.target_loss:g}: {'reached' if reached else 'missed'}",
        "time": f"{result['train_time_s']:,.1f} s of training, {result['step_avg_ms']} ms a step, "
                f"{result['tokens_per_s']:,} tokens/s",
        "memory": memory and f"{memory:,} MiB of the GPU at most",
        "log": log.path,
        "weights": weights,
    })
    if run.ended_by:
        hint = "it cannot be resumed, as nothing was saved"
        if not c.save_every:
            hint += "; --save_every=MINUTES saves"
        if keeper.save_path.exists():
            hint = f"to go on, start it again with --resume={shlex.quote(str(keeper.save_path))}"
        show(f"stopped by {run.ended_by} after step {run.step}; {hint}")
        return 128 + signal.Signals[run.ended_by]
    if path:
        show("next:")
        show("  " + to_type(f'sample.py {shlex.quote(path)} "Once upon a time"'))
        show("  " + to_type(f"evaluate.py {shlex.quote(path)}"))
    return 2 if not path and keeper.lacks_weights else 0


def results(run, script, startup_s: float) -> dict:
    """The end block of the log (records/README.md)."""
    seconds = run.clock.total
    tokens = run.config.seq_len * sum(script.batch_plan(run.config)[: run.step])
    target = run.config.target_loss or None
    val_losses = [loss for _, _, name, loss in run.log.steps if name == "val_loss"]
    loss = round(val_losses[-1], 4) if val_losses else None
    memory = None
    if run.device.type == "cuda":  # with that of CUDA graphs and what PyTorch keeps for later use
        memory = torch.cuda.max_memory_reserved(run.device) // 2**20
    return {
        "val_loss": loss,
        "target": target,
        "reached": loss <= target if loss is not None and target else None,
        "train_time_s": round(seconds, 3),
        "step_avg_ms": round(1000 * seconds / run.step, 2),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds),
        "peak_memory_mib": memory,
        "compile_s": round(startup_s, 1),
        "code_sha256": run.log.facts["run"][0]["code_sha256"],
    }


def show_facts(log: journal.Log, facts: dict) -> None:
    """Prints a line for each fact that has a text."""
    for name, value in facts.items():
        if value:
            log.show(f"{name:<10}{value}")


def sample_of(run, script, path: str) -> str:
    """A text that the best model continues."""
    c = run.config
    try:
        model = checkpoints.load_model(path, run.device, script)
        return "".join(sample.continued(model, c.sample, c.sample_tokens))
    except (BadInput, torch.OutOfMemoryError) as error:  # which explains itself at length
        return f"none: {str(error).partition('. ')[0]}"


def num_weights(table: dict) -> tuple[int, int]:
    """How many weights of train_gpt.parameter_table are outside of tables, and how many in them."""
    in_tables = sum(math.prod(p.shape) for p in table.values() if p.optimizer == "rows")
    return sum(math.prod(p.shape) for p in table.values()) - in_tables, in_tables
