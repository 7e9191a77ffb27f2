"""The log of one run, read back: its code, facts, steps and end. records/README.md has the format.

Nothing from a log is imported or executed. What cannot be read raises `Refused` with one sentence.
In a record, logs after the first one are kept short (`shorten`); `read_bytes` gives the whole log.
"""
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from data.texts import harmless

RULE = b"=" * 100
SCRIPT = "train_gpt.py"  # what the source at the head of a log is called
FACTS = ("run", "config", "environment", "data", "stage")  # those that every log has
# Keys of the configuration in which runs of one record may differ. Data are compared by their sums.
PER_RUN = {
    "seed", "run_name", "log_dir", "jsonl", "data_dir", "save_checkpoint", "sample",
    "sample_tokens", "resume"}
STEP = re.compile(
    r"step:(\d+)/(\d+) (train|val)_loss:(\S+) train_time:(\d+)ms step_avg:\S+ms")
SHORT = re.compile(
    rb"the code of this log is that of ([\w.-]+); the whole log has the sha256 ([0-9a-f]{64})\n")


class Refused(ValueError):
    """Input that the tool does not accept; the text is one sentence."""

    def __init__(self, sentence: str):
        super().__init__(harmless(sentence))


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
    source: bytes  # of SCRIPT, as it ran
    facts: dict = field(default_factory=dict)  # kind -> list of values
    steps: list = field(default_factory=list)
    end: dict = field(default_factory=dict)

    def values(self, kind: str) -> list:
        return self.facts.get(kind, [])

    @property
    def run(self) -> dict:
        return self.values("run")[0]

    @property
    def config(self) -> dict:
        return self.values("config")[0]

    @property
    def environment(self) -> dict:
        return self.values("environment")[0]

    @property
    def validations(self) -> list[Step]:
        return [step for step in self.steps if step.split == "val"]

    @property
    def interrupted(self) -> bool:
        return bool(self.end.get("interrupted"))

    @property
    def resumed(self) -> bool:
        return bool(self.config.get("resume"))

    @property
    def files(self) -> dict[str, bytes]:
        """Path -> content of all that ran: the script, and the project's files it imported."""
        others = {file["path"]: file["text"].encode() for file in self.values("file")}
        return {SCRIPT: self.source} | others

    @property
    def file_sums(self) -> dict[str, str]:
        """Path -> sha256 of `files`."""
        return {path: sha256(content) for path, content in self.files.items()}

    def tokens_at(self, step: int) -> int:
        """Training tokens seen after `step` steps."""
        total = 0
        for stage in self.values("stage"):
            steps = min(step, stage["last_step"]) - stage["first_step"]
            total += max(steps, 0) * stage["batch_tokens"]
        return total


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# --------------------------------------------------------------------------------------------------
# Whole and short logs


def split_code(raw: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """A log -> its source with the rule, its `run` line, its `file` lines, and the rest."""
    head, found, rest = raw.partition(b"\n" + RULE + b"\n")
    if not found:
        raise ValueError
    lines = rest.split(b"\n")
    first = next(i for i, line in enumerate(lines) if i and not line.startswith(b"file "))
    join = b"\n".join
    return head + found, lines[0] + b"\n", join([*lines[1:first], b""]), join(lines[first:])


def shorten(raw: bytes, first: bytes, first_name: str) -> bytes:
    """The log without its code, if that is the code of the record's first log. Else it is returned
    as it is."""
    source, run, files, rest = split_code(raw)
    first_source, _, first_files, _ = split_code(first)
    if (source, files) != (first_source, first_files):
        return raw
    line = f"the code of this log is that of {first_name}; the whole log has the sha256 "
    return line.encode() + sha256(raw).encode() + b"\n" + run + rest


def read_bytes(path: str | Path) -> bytes:
    """The whole log, byte for byte. Raises Refused."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror}).") from None
    short = SHORT.match(raw)
    if not short:
        return raw
    first_path = Path(path).parent / short[1].decode()
    try:
        source, _, files, _ = split_code(first_path.read_bytes())
    except (OSError, ValueError, StopIteration):
        raise Refused(f"{path}: its code is that of {first_path}, which cannot be read.") from None
    run, _, rest = raw[short.end():].partition(b"\n")
    whole = source + run + b"\n" + files + rest
    if sha256(whole) != short[2].decode():
        raise Refused(f"{path}: expected a log with the sha256 {short[2].decode()}, found "
                      f"{sha256(whole)}: this file or {first_path.name} was changed.")
    return whole


# --------------------------------------------------------------------------------------------------
# Reading


def read_log(path: str | Path, may_be_cut: bool = False) -> Log:
    """The log of a run. Raises Refused if it is damaged or not of one run. With `may_be_cut` it may
    end after any step, because its run goes on or was killed; it then counts as interrupted."""
    raw = read_bytes(path)
    source, found, rest = raw.partition(b"\n" + RULE + b"\n")
    if not found:
        raise Refused(f"{path}: no line of 100 '=' behind the code, so this is no log.")
    log = Log(str(path), raw, source + b"\n")
    number = log.source.count(b"\n") + 1
    lines = rest.decode(errors="replace").split("\n")
    rule = RULE.decode()
    if rule not in lines and not may_be_cut:
        raise Refused(f"{path}: the run goes on, was killed, or ended early, as there is no block "
                      "of results at the end; `plot` shows the steps that it has.")
    end_at = lines.index(rule) if rule in lines else len(lines) - 1  # which may be half a line
    for text in lines[:end_at]:
        number += 1
        read_line(log, number, text)
    log.end = dict(interrupted=True) if rule not in lines else read_end(log, lines[end_at + 1:])
    for kind in FACTS:
        if not log.values(kind):
            raise Refused(f"{path}: no `{kind}` line.")
    check_code(log)
    check_steps(log)
    return log


def read_line(log: Log, number: int, text: str) -> None:
    """Adds a step or a fact to the log."""
    step = STEP.fullmatch(text)
    if step:
        loss = float(step[4])
        log.steps.append(Step(int(step[1]), step[3], loss, int(step[5])))
        return
    kind, _, body = text.partition(" ")
    try:
        value = json.loads(body)
    except ValueError:
        raise Refused(f"{log.path}, line {number}: neither a step nor a fact: "
                      f"{text[:70]!r}.") from None
    log.facts.setdefault(kind, []).append(value)


def read_end(log: Log, lines: list[str]) -> dict:
    """The block of results: `key: value` in each line."""
    end = {}
    for text in lines:
        key, found, value = text.partition(": ")
        if found:
            end[key] = value if key == "code_sha256" else json.loads(value)
    for key in ("val_loss", "target", "reached", "train_time_s", "tokens"):
        if key not in end:
            raise Refused(f"{log.path}: no {key} in the results at the end.")
    return end


def check_code(log: Log) -> None:
    """Raises Refused unless script and files have the sums that the log says."""
    sums = [(SCRIPT, log.source, log.run["code_sha256"])]
    for file in log.values("file"):
        sums.append((file["path"], file["text"].encode(), file["sha256"]))
    for path, content, expected in sums:
        if sha256(content) != expected:
            raise Refused(f"{log.path}: expected {path} with the sha256 {expected}, found "
                          f"{sha256(content)}.")


def check_steps(log: Log) -> None:
    """Raises Refused unless all steps are there and the results are those of the last one."""
    train = [step.step for step in log.steps if step.split == "train"]
    begin = train[0] if train and log.resumed else 1
    if train != list(range(begin, begin + len(train))):
        raise Refused(f"{log.path}: steps are missing or stand twice.")
    if log.interrupted or log.resumed:
        return
    last = log.steps[-1] if log.steps else None
    if len(train) != log.config["num_steps"] or last is None or last.split != "val":
        raise Refused(f"{log.path}: expected {log.config['num_steps']} steps and a validation at "
                      f"the end, found {len(train)} steps.")
    seconds = log.end["train_time_s"]
    same = math.isclose(last.loss, log.end["val_loss"], abs_tol=1e-9)
    if not same or abs(1000 * seconds - last.time_ms) > 2:
        raise Refused(f"{log.path}: the results ({log.end['val_loss']} after {seconds} s) are not "
                      f"those of the last validation ({last.loss} after {last.time_ms} ms).")


def refuse_unfit_for_record(log: Log) -> None:
    """Raises Refused for a run that can be read, but is no record."""
    found = ""
    if log.end.get("target") is None or log.end.get("reached") is None:
        found = "has no target"
    if log.interrupted:
        found = "was interrupted"
    elif log.resumed:
        found = "was resumed"
    if found:
        raise Refused(f"{log.path}: this run {found}; `plot` and `compare` take it, but no record.")
