"""What a machine does: how long a run takes to start, several seeds, and the speed by the number of
GPUs. Each run is a torchrun of its own, and all figures are those of its log."""
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .log import Refused, read_log

SCRIPT = Path(__file__).parents[1] / "train_gpt.py"
SHORT = 64  # steps of a run that only measures speed, in which all stages of the schedule occur
HEAD = ("run", "GPUs", "start (s)", "training (s)", "ms a step", "tokens/s each", "of one GPU's",
        "MiB each", "loss")


class Task(NamedTuple):
    name: str
    gpus: int
    keys: list[str]


class Row(NamedTuple):
    """What the log of a run says."""

    task: Task
    end: dict  # the end block; empty if the run has failed
    speed: float  # tokens per second and GPU
    fault: str = ""  # why it has failed


def tasks_of(gpus, seeds, keys):
    """The runs in their order: all seeds on most GPUs, then a short run on each number of GPUs. The
    first of all has empty caches."""
    tasks = []
    for seed in range(1, seeds + 1):
        tasks.append(Task(f"seed {seed}", max(gpus), [*keys, f"--seed={seed}"]))
    for number in sorted(gpus, reverse=True):
        short = [*keys, f"--num_steps={SHORT}", "--target_loss=0"]
        tasks.append(Task(f"{SHORT} steps", number, short))
    tasks[0] = tasks[0]._replace(name=f"{tasks[0].name}, empty caches")
    return tasks


def measure(folder, gpus, seeds, keys, limit):
    """Makes all runs, which write to the folder, and prints a table in Markdown. A run that takes
    more than `limit` seconds is ended. Returns whether all runs came to their end. Raises Refused
    if the folder is not empty, or if the first run has refused its keys or its data."""
    folder = Path(folder).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder}: is no empty folder; name a new one.")
    rows = []
    for number, task in enumerate(tasks_of(gpus, seeds, keys)):
        log_dir = folder / f"run_{number}"
        row = run(task, folder, log_dir, limit)
        if not rows and row.fault.startswith(SCRIPT.name) and not list(log_dir.glob("*.txt")):
            shutil.rmtree(folder)
            raise Refused(f"{row.fault}.")  # so would be all other runs
        rows.append(row)
        print(" | ".join(cells(row, None)), flush=True)
    one = next((row.speed for row in rows if row.task.gpus == 1 and row.end), None)
    print(line(HEAD))
    print(line(["---"] * 2 + ["--:"] * 7))
    for row in rows:
        print(line(cells(row, one)))
    return all(row.end for row in rows)


def run(task, folder, log_dir, limit):
    """One run. Its output goes to a file beside its log."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={task.gpus}"]
    command = [sys.executable, *launcher, SCRIPT, "--val_interval=0", *task.keys,
               f"--log_dir={log_dir}"]
    caches = {"TORCHINDUCTOR_CACHE_DIR": folder / "inductor", "TRITON_CACHE_DIR": folder / "triton"}
    environment = os.environ | {name: str(path) for name, path in caches.items()}
    log_dir.mkdir(parents=True)
    with open(log_dir / "output", "wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(limit)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            process.terminate()  # torchrun then ends its processes, which a kill would leave behind
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()  # of several processes each then sees that it is gone, and ends
            process.wait()
            if isinstance(error, KeyboardInterrupt):
                raise
            return Row(task, {}, 0.0, f"it took more than {limit:g} s")
    logs = list(log_dir.glob("*.txt"))
    try:
        end = read_log(logs[0]).end
        if end.get("interrupted"):
            return Row(task, {}, 0.0, "it was interrupted")
        return Row(task, end, end["tokens_per_s"] / task.gpus)
    except (IndexError, KeyError, Refused):
        said = (log_dir / "output").read_text(errors="replace").splitlines()
        reasons = [text for text in said if text.startswith(f"{SCRIPT.name}: ")]
        return Row(task, {}, 0.0, (reasons or [f"see {log_dir}/output"])[0])


def cells(row, speed_of_one):
    """A row of the table. `speed_of_one` is None as long as it is not known."""
    task, end, speed, fault = row
    if not end:
        return [task.name, str(task.gpus), f"failed: {fault}", *[""] * 6]
    share = f"{speed / speed_of_one:.3f}" if speed_of_one else ""
    memory = end["peak_memory_mib"]
    return [task.name, str(task.gpus), f"{end['compile_s']:.1f}", f"{end['train_time_s']:.2f}",
            f"{end['step_avg_ms']:.2f}", f"{speed:,.0f}", share,
            "" if memory is None else f"{memory:,}", f"{end['val_loss']:.4f}"]


def line(words):
    return f"| {' | '.join(words)} |"
