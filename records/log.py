"""The log of one run, read back: its code, facts, steps and end. records/README.md has the format.

Nothing from a log is imported or executed. What cannot be read raises ValueError with one sentence,
which names the file. In a record, logs after the first one are kept short (`shorten`); `read_bytes`
gives the whole log.
"""
import hashlib
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

RULE = "=" * 100  # the line that ends the source, and the one that begins the end block
SCRIPT = "train_gpt.py"  # what the source at the head of a log is called
# Keys of the configuration in which runs of one record may differ. Data are compared by their sums.
PER_RUN = {
    "seed", "run_name", "log_dir", "data_dir", "save_checkpoint", "save_every", "sample",
    "sample_tokens", "resume"}
STEP = re.compile(
    r"step:(\d+)/\d+ (train|val)_loss:(\S+) train_time:(\d+)ms step_avg:\S+ms")
SHORT = re.compile(
    rb"the code of this log is that of ([\w.-]+); the whole log has the sha256 ([0-9a-f]{64})\n")
# A log: the source with the rule, the line `run`, the lines `file`, and the rest.
PARTS = re.compile(
    rb"\A(.*?\n={100}\n)(run [^\n]*\n)((?:file [^\n]*\n)*)(.*)", re.DOTALL)


@dataclass
class Step:
    step: int
    split: str  # "train" or "val"
    loss: float
    time_ms: int  # of training, so far


@dataclass
class Log:
    path: str
    raw: bytes  # the whole log
    facts: defaultdict[str, list]  # the values of each kind
    run: dict  # the facts of which there is one each
    config: dict
    environment: dict
    steps: list[Step]
    interrupted: bool  # by a signal; also if there is no end block
    end: dict  # the block of results
    files: dict[str, bytes]  # path -> content of all that ran: SCRIPT, and what it imported


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def machine_name(environment: dict, config: dict) -> str:
    """Such as "4 x NVIDIA H200". A CPU has its own name, and what it multiplies in (--dtype, or
    --precision): one that multiplies in bf16 is another machine than one that does not."""
    names = sorted(set(environment["devices"]))
    if names == ["CPU"]:
        dtype = config.get("dtype", "auto")
        multiplies_in = config.get("precision", "fp32") if dtype == "auto" else dtype
        names = [f"{environment['cpu']} ({multiplies_in})"]
    return f"{environment['world_size']} x {' + '.join(names)}"


def shorten(raw: bytes, first_name: str) -> bytes:
    """The log without its code, which is the code of the record's first log."""
    _, run, _, rest = PARTS.fullmatch(raw).groups()
    line = f"the code of this log is that of {first_name}; the whole log has the sha256 "
    return line.encode() + sha256(raw).encode() + b"\n" + run + rest


def read_bytes(path: Path) -> bytes:
    """The whole log, byte for byte. Raises ValueError and OSError."""
    raw = path.read_bytes()
    short = SHORT.match(raw)
    if not short:
        return raw
    first_path = path.parent / short[1].decode()
    if not first_path.exists():
        raise ValueError(f"{path}: its code is in {first_path.name}, which is missing.")
    run, end, rest = raw[short.end():].partition(b"\n")
    whole = PARTS.sub(lambda first: first[1] + run + end + first[3] + rest, first_path.read_bytes())
    if sha256(whole) != short[2].decode():
        raise ValueError(f"{path}: it or {first_path.name} is no longer as it was written.")
    return whole


def read_logs(path: Path) -> list[Log]:
    """The log at this path, or those in this folder, all its *.txt, log_2.txt before log_10.txt."""
    paths = [path]
    if path.is_dir():
        paths = sorted(path.glob("*.txt"), key=lambda found: (len(found.name), found.name))
    if not paths:
        raise ValueError(f"{path} has no logs (*.txt).")
    return [read_log(found) for found in paths]


def read_log(path: str | Path) -> Log:
    """The log of a run. If it has no end, because its run goes on or was killed, it counts as
    interrupted. Raises OSError, and ValueError if it is damaged."""
    raw = read_bytes(Path(path))
    try:
        return parse(str(path), raw)
    except (ValueError, LookupError) as error:
        raise ValueError(f"{path}: damaged, or no whole log: {error}.") from None


def parse(path: str, raw: bytes) -> Log:
    """The log with this content. Raises ValueError and LookupError."""
    source, found, rest = raw.partition(f"\n{RULE}\n".encode())
    if not found:
        raise ValueError("no line of 100 '=' behind the code (or lines end as on Windows)")
    text, has_end, end = rest.decode(errors="replace").partition(f"\n{RULE}\n")
    lines = text.split("\n")
    if not has_end:
        lines.pop()  # it may be half a line
    elif not end.endswith("\n") or "\ncode_sha256: " not in end:
        raise ValueError("its end is cut off")
    facts, steps = read_lines(lines)
    for kind in ("run", "config", "environment"):
        if not facts[kind]:
            raise ValueError(f"it has no line that begins with {kind}")
    results = {}
    for line in end.splitlines():
        key, value = line.split(": ", 1)
        results[key] = value if key == "code_sha256" else json.loads(value)
    run = facts["run"][0]
    script = dict(path=SCRIPT, text=source.decode() + "\n", sha256=run["code_sha256"])
    files = {}
    for file in [script, *facts["file"]]:
        files[file["path"]] = file["text"].encode()
        if sha256(files[file["path"]]) != file["sha256"]:
            raise ValueError(f"{file['path']} in it is no longer as it was written")
    log = Log(path, raw, facts, run, facts["config"][0], facts["environment"][0], steps,
              not has_end or "interrupted" in results, results, files)
    if not log.interrupted:
        check_steps(log)
    return log


def read_lines(lines: list[str]) -> tuple[defaultdict, list[Step]]:
    """The facts and the steps in these lines."""
    facts = defaultdict(list)
    steps = []
    for line in lines:
        if step := STEP.fullmatch(line):
            steps.append(Step(int(step[1]), step[2], float(step[3]), int(step[4])))
            continue
        kind, _, body = line.partition(" ")
        try:
            facts[kind].append(json.loads(body))
        except ValueError:
            raise ValueError(f"neither a step nor a fact: {line[:70]!r}") from None
    return facts, steps


def check_steps(log: Log) -> None:
    """Raises ValueError unless all steps are there, and the results follow from the last line and
    the configuration."""
    train = [step.step for step in log.steps if step.split == "train"]
    last = log.steps[-1]
    late_ms = abs(1000 * log.end["train_time_s"] - last.time_ms)
    target = log.config["target_loss"] or None
    results = last.loss, target, target and last.loss <= target
    if (train != list(range(1, log.config["num_steps"] + 1)) or last.split != "val" or late_ms > 2
            or results != (log.end["val_loss"], log.end["target"], log.end["reached"])):
        raise ValueError("steps are missing, or the results are not those of the last line")
