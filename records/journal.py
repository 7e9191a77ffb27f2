"""What a run writes about itself: its log, its clock, and the facts on the run and the machine.

The log is also what people see of a run while it goes on; what they see before and after is in
records/report.py. The log's grammar stands in records/README.md, and its reader is records/log.py.
"""
import io
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from data import require
from nanogpt.gpu import mark
from nanogpt.kernels import triton
from nanogpt.ranks import all_ranks, is_rank_0
from records.console import ROOT, complain, discard_output
from records.log import RULE, sha256


class Log:
    """The log of one run: source, facts, steps and end block. People see a bar on a terminal, and a
    line for each validation and each defect. Only rank 0 writes and shows this; on other ranks the
    same calls leave no trace.

    If the file cannot be written to any more, as on a full disk, one sentence says so, and the run
    goes on. Such a log has no end block.
    """

    def __init__(self, tokens_are_bytes: bool = False):
        self.unit = "byte" if tokens_are_bytes else "token"
        self.bar = None  # on standard error, shown on a terminal only
        self.num_steps = 0
        self.pending = []  # losses that may still be on their way from the device
        self.steps: list[tuple] = []  # step, seconds, name and loss of all lines
        self.path = None
        self.facts: dict[str, list[dict]] = {}  # that it begins with, by their kinds
        # At first it holds the facts that come before the log begins. None if it cannot be written
        # to any more, or has ended.
        self.file = io.BytesIO()

    def begin(self, source: bytes, facts: dict[str, list[dict]]) -> None:
        """Opens LOG_DIR/RUN_ID.txt and writes the script's source, the facts, and those that have
        come before. Raises OSError if the file cannot be opened."""
        self.facts = facts
        [run], [config] = facts["run"], facts["config"]
        self.path = Path(config["log_dir"], f"{run['run_id']}.txt")
        self.num_steps = config["num_steps"]
        came_before = self.file.getvalue().decode()
        lines = [f"{kind} {json.dumps(value)}\n" for kind, values in facts.items()
                 for value in values]
        self.file = open(self.path if is_rank_0() else os.devnull, "wb")
        text = source.decode() + RULE + "\n" + "".join(lines) + came_before
        self.write(text.removesuffix("\n"))

    def write(self, lines: str) -> None:
        """Writes lines. They are in the file at once, also if the run is killed."""
        try:
            if self.file:
                self.file.write(lines.encode() + b"\n")
                self.file.flush()
        except OSError as error:
            self.file = None
            complain(f"cannot write to {self.path} ({error.strerror}); the run goes on without a "
                     "log")

    def fact(self, kind: str, value: dict | str) -> None:
        """Writes the line `KIND JSON`. The value is a string for a note and an object otherwise."""
        self.write(f"{kind} {json.dumps(value)}")
        if kind == "defect":
            self.show(f"warning: {value['what']}")

    def say(self, text: str) -> None:
        """Prints a line, and notes it in the log."""
        self.show(text)
        self.fact("note", text)

    def show(self, text: str) -> None:
        """Prints lines above the bar. A reader who leaves, or a full disk, does not end the run."""
        if not is_rank_0():
            return
        try:
            tqdm.write(text)
            sys.stdout.flush()
        except OSError as error:
            discard_output(sys.stdout)
            complain(f"cannot print ({error.strerror}); the run goes on silently")

    def step(self, step: int, seconds: float, name: str, loss: float, show: bool = True) -> None:
        """Writes the line of a loss after `step` steps and `seconds` of training time. The name is
        "train_loss" or "val_loss". With `show` the former moves the bar; the latter is printed."""
        self.steps.append((step, seconds, name, loss))
        milliseconds = 1000 * seconds
        average = milliseconds / step if step > 0 else math.nan
        text = (f"step:{step}/{self.num_steps} {name}:{loss:.4f} "
                f"train_time:{milliseconds:.0f}ms step_avg:{average:.2f}ms")
        self.write(text)
        if show and name == "train_loss":
            if self.bar is None:
                self.bar = tqdm(
                    total=self.num_steps, initial=step - 1, unit="step", dynamic_ncols=True,
                    miniters=1, disable=None if is_rank_0() else True)
            self.bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            self.bar.update()
        elif show:
            bits = f" bits_per_byte:{loss / math.log(2):.4f}" if self.unit == "byte" else ""
            self.show(text.replace("nanms", "-") + bits)  # no average before the first step

    def put(self, step: int, message: Tensor, seconds: float) -> None:
        """Takes the message of a step, which the device may still have to compute. Nothing waits
        for it, because the GPU would then stand still while the CPU prepares the next step.
        message: (1 + n,), the mean loss and n other numbers, which `arrived` hands back."""
        # PyTorch makes the copy in pinned memory, into which the GPU can write by itself.
        copy = message.to("cpu", non_blocking=message.is_cuda)
        self.pending.append((step, seconds, copy, mark(message.device)))

    def arrived(self, last_step: int) -> list[tuple[int, float, list[float]]]:
        """Waits for the messages of the steps up to this one, and writes the lines of their losses.
        Returns of each the step, the loss and the numbers that were with it."""
        arrived = []
        while self.pending and self.pending[0][0] <= last_step:
            step, seconds, values, event = self.pending.pop(0)
            event.synchronize()
            loss, *others = values.tolist()
            self.step(step, seconds, "train_loss", loss)
            arrived.append((step, loss, others))
        return arrived

    def end(self, facts: dict) -> None:
        """Writes the end block: a line `key: value` for each fact. Nothing may follow it."""
        self.write(RULE)
        for key, value in facts.items():
            self.write(f"{key}: {value if isinstance(value, str) else json.dumps(value)}")
        self.file = None

    def close_bar(self) -> None:
        """Lets the bar stand as it is. What is printed next stands below it."""
        if self.bar is not None:
            self.bar.close()

    def end_early(self, kind: type | None, error: BaseException | None, trace) -> None:
        """The last line of a log without an end block, if an error ends the run: what it was. This
        is called like __exit__ of a context manager."""
        self.close_bar()
        if error is not None:
            self.fact("note", f"ended early: {str(error) or kind.__name__}".partition("\n")[0])


class Clock:
    """Training time in seconds: `total` up to the last stop. Starting and stopping wait until the
    device has done all it was given, so that a time is the time of work that is finished."""

    def __init__(self, device: torch.device):
        self.wait = torch.get_device_module(device).synchronize
        self.total = 0.0
        self.started_at = None  # None while the clock stands still

    def start(self) -> None:
        self.wait()
        self.started_at = time.perf_counter()

    def stop(self) -> None:
        self.wait()
        self.total = self.now()
        self.started_at = None

    def now(self) -> float:
        """The time up to now, without waiting for the device."""
        running = time.perf_counter() - self.started_at if self.started_at else 0.0
        return self.total + running


def project_files(script: str | Path) -> list[dict]:
    """The project's files that this process has imported, without the script: each as the fact
    `file` of the log (path, sha256, text). Call it right after the imports: then the log shows what
    runs, even if a file is edited later."""
    names = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # Not every module has a file, and that of torch.classes does not exist.
    paths = {Path(name).resolve() for name in names if name and Path(name).is_file()}
    files = []
    for path in sorted(paths - {Path(script).resolve()}):
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            content = path.read_bytes()
            files.append(dict(path=path.relative_to(ROOT).as_posix(), sha256=sha256(content),
                              text=content.decode()))
    return files


def describe_run(source: bytes) -> dict:
    """The fact `run`: which run of which script this is. That of rank 0 is the one for the log:
    other ranks have another id. Raises BadInput for a script without a newline at its end, as it
    could not be found again in the log."""
    require(source.endswith(b"\n"), "end the last line of train_gpt.py with a newline")
    changes = output_of("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "run_id": str(uuid.uuid4()),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "grammar": 2,  # the version of the log's form
        "code_sha256": sha256(source),
        "code_bytes": len(source),
        "git_commit": output_of("git", "rev-parse", "--verify", "-q", "HEAD"),
        "git_clean": None if changes is None else changes == "",
    }


def output_of(*command: str) -> str | None:
    """What a program prints. None if there is no such program, or if it fails. Git does not look
    for a repository in the folders around the project's: that would be another project."""
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(ROOT.parent)}
    try:
        run = subprocess.run(command, capture_output=True, cwd=ROOT, env=environment)
    except OSError:
        return None
    return run.stdout.decode(errors="replace").strip() if run.returncode == 0 else None


def describe_machine(device: torch.device) -> dict:
    """The fact `environment`: hardware and versions. Call it on all ranks: it is a collective."""
    devices = all_ranks(
        torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU")
    drivers = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__ if triton else None,
        "driver": drivers.partition("\n")[0] if drivers else None,  # a line for each GPU
        "devices": devices,
        "world_size": len(devices),
        "hosts": len(set(all_ranks(platform.node()))),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }


def cpu_name() -> str:
    """The name of the processor; where nothing tells it, at least its architecture."""
    if sys.platform == "linux":
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        found = re.search(r"^model name\s*: (.+)", text, re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()
