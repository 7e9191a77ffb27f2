"""The log of one run: read it, and refuse one that is damaged or contradicts itself.

A log comes from a stranger: it is read as bytes up to a fixed size and matched against the grammar
in records/README.md; nothing in it is ever imported or executed. What is refused raises `Refused`,
whose text is one sentence with the file, the line and the value found.
"""
import hashlib
import json
import math
import os
import re
import stat
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from data.texts import harmless

MAX_LOG = 256 * 2**20  # bytes, checked before anything is read
MAX_SOURCE = 2**20  # bytes
MAX_LINE = 100_000  # characters of one fact
MAX_TEXT = 1000  # characters of one text in a fact, such as a name
MAX_NAME = 200  # characters of a shard's name
MAX_FILE_LINE = 2 * MAX_SOURCE  # characters of a `file`: its text is longer as JSON
MAX_FILES = 100
MAX_LINES = 2_500_000
MAX_STAGES = 100
MAX_DEPTH = 8  # nesting of one fact's JSON
SEPARATOR = "=" * 100
RULE_LINE = f"\n{SEPARATOR}\n".encode()
# What stands for the source in a log whose source and files are those of another log beside it.
SHORT_HEAD = "source and files as in {name}; sha256 of the whole log {sha256}"
SHORT = re.compile(rb"source and files as in (?P<name>(\.\./)?[\w-]+\.txt); "
                   rb"sha256 of the whole log (?P<sha256>[0-9a-f]{64})")
SCRIPT = "train_gpt.py"  # what the source at the head of a log is called
LONG_TEXTS = ("file", "compile", "defect", "note")  # facts whose texts may be longer than MAX_TEXT

# Each value of a fact is tested as JSON text, so one pattern states type, sign and range.
INT = r"\d{1,15}"
NUM = r"\d{1,15}(\.\d+)?(e[-+]?\d+)?"
TEXT = r'".*"'
SHA = '"[0-9a-f]{64}"'
FACTS = {
    "run": {
        "run_id": r'"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"',
        "date": r'"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"',
        "code_sha256": SHA,
        "code_bytes": INT,
        "git_commit": '"[0-9a-f]{7,64}"|null',
        "git_clean": "true|false|null",
    },
    "file": {
        # plain names, at most five folders deep: below the project's folder, and nothing hidden
        "path": r'"([\w-]{1,100}/){0,5}[\w-]{1,100}\.py"',
        "sha256": SHA,
        "text": TEXT,
    },
    "config": {
        "num_steps": INT,
        "batch_tokens": INT,
        "val_tokens": INT,
        "target_loss": NUM + "|null",
        "seed": "-?" + INT,
        "run_name": TEXT,
    },
    "environment": {
        "python": TEXT,
        "torch": TEXT,
        "cuda": TEXT + "|null",
        "triton": TEXT + "|null",
        "driver": TEXT + "|null",
        "devices": r'\["[^"]+"(, "[^"]+")*\]',
        "world_size": INT,
        "hosts": INT,
        "cpu": TEXT + "|null",
    },
    "data": {
        "split": '"train"|"val"',
        "name": r'"[^"]+"',
        "bytes": INT,
        "tokens": INT,
        "sha256": SHA,
    },
    "stage": {"first_step": INT, "last_step": INT, "batch_tokens": INT},
    "calibration": {
        "bf16_matmul_tflops": NUM + "|null",
        "fp8_matmul_tflops": NUM + "|null",
        "copy_gb_per_s": NUM + "|null",
        "all_reduce_gb_per_s": NUM + "|null",
        "all_gather_gb_per_s": NUM + "|null",
    },
    "compile": {"what": TEXT, "seconds": NUM},
    "defect": {"what": TEXT},
    "note": {},
}
RUN_2 = {"grammar": "2", "files_sha256": SHA}  # what `run` has besides in grammar 2
# every log has these, in this order
ORDER = ("run", "config", "environment", "data", "stage", "calibration")
REPEATED = ("data", "stage")
STEP = re.compile(
    r"step:(\d{1,9})/(\d{1,9}) (train|val)_loss:(\d{1,9}\.\d{1,9}) "
    r"train_time:(\d{1,12})ms step_avg:(nan|\d{1,12}\.\d\d)ms", re.ASCII)
END = {
    "val_loss": r"\d{1,9}\.\d+",
    "target": NUM + "|null",
    "reached": "true|false|null",
    "train_time_s": r"\d{1,9}\.\d{1,3}",
    "step_avg_ms": r"\d{1,12}\.\d{1,2}",
    "tokens": INT,
    "tokens_per_s": INT,
    "mfu": r"\d{1,3}\.\d+|null",
    "peak_memory_mib": INT + "|null",
    "compile_s": r"\d{1,9}(\.\d+)?",
    "code_sha256": "[0-9a-f]{64}",
}
DIVERGED = re.compile(r"step:\S+ (train|val)_loss:-?(nan|inf) ")  # and the run ends
INTERRUPTED = "interrupted: true"  # may stand anywhere among the lines of the end block, once
NOT_WHOLE = re.compile(r"(resumed|interrupted)\b", re.IGNORECASE)  # how a note on that begins


class Refused(ValueError):
    """Input that the tool does not accept; the text is one sentence."""

    def __init__(self, sentence):
        super().__init__(harmless(sentence))


@dataclass
class Step:
    line: int
    step: int
    total: int
    split: str  # "train" or "val"
    loss: float
    time_ms: int
    avg_ms: float  # nan at step 0


@dataclass
class Log:
    path: str
    raw: bytes
    source: bytes  # of SCRIPT as it ran
    # kind -> [(line, value)]
    facts: dict = field(default_factory=lambda: {kind: [] for kind in FACTS})
    steps: list = field(default_factory=list)
    end: dict = field(default_factory=dict)
    end_line: dict = field(default_factory=dict)  # key of the end block -> line

    def values(self, kind):
        return [value for _, value in self.facts[kind]]

    run = property(lambda self: self.facts["run"][0][1])
    config = property(lambda self: self.facts["config"][0][1])
    environment = property(lambda self: self.facts["environment"][0][1])
    calibration = property(lambda self: self.facts["calibration"][0][1])
    grammar = property(lambda self: self.run.get("grammar", 1))
    interrupted = property(lambda self: self.end.get("interrupted") or "interrupted" in self.breaks)
    resumed = property(lambda self: bool(self.config.get("resume")) or "resumed" in self.breaks)
    validations = property(lambda self: [s for s in self.steps if s.split == "val"])
    sha256 = property(lambda self: hashlib.sha256(self.raw).hexdigest())

    @property
    def breaks(self):
        """{"resumed" or "interrupted": the note that says so}"""
        found = {}
        for note in self.values("note"):
            if match := NOT_WHOLE.match(note):
                found[match[1].lower()] = note
        return found

    @property
    def files(self):
        """{path: bytes} of all that ran: the script and, since grammar 2, what it imports."""
        others = {file["path"]: file["text"].encode() for file in self.values("file")}
        return {SCRIPT: self.source} | others

    @property
    def file_sums(self):
        """{path: sha256} of `files`"""
        digest = hashlib.sha256
        return {path: digest(content).hexdigest() for path, content in self.files.items()}

    @property
    def files_sha256(self):
        """One sum over all files: that of what `sha256sum` prints for them, sorted by path."""
        lines = [f"{digest}  {path}\n" for path, digest in sorted(self.file_sums.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def times_sha256(self):
        """Fingerprint of every time stamp: two runs never share it, a relabelled copy does."""
        return hashlib.sha256(repr([(s.step, s.time_ms) for s in self.steps]).encode()).hexdigest()

    @property
    def losses_sha256(self):
        """Fingerprint of every loss: runs of different seeds never share it, a copied run does."""
        losses = [(s.step, s.split, s.loss) for s in self.steps]
        return hashlib.sha256(repr(losses).encode()).hexdigest()

    def tokens_at(self, step):
        """Training tokens seen after `step` steps."""
        return sum((min(step, s["last_step"]) - s["first_step"]) * s["batch_tokens"]
                   for s in self.values("stage") if s["first_step"] < step)

    def time_at(self, step):
        """(milliseconds, exact) at the end of `step`: exact where the clock stood still for a
        validation."""
        found = [s for s in self.steps if s.step == step]
        return (found[-1].time_ms, found[-1].split == "val") if found else (0, True)


def shown(value, limit=70):
    """A value as harmless text: no control characters reach a terminal."""
    text = ascii(value)
    return text if len(text) <= limit else text[:limit] + "..."


def shown_key(key):
    """A key as harmless text without quotation marks."""
    return shown(key).replace("'", "")


def fail(path, line, expected, found):
    raise Refused(f"{path}, line {line}: expected {expected}, found {shown(found)}.")


def read_bytes(path, limit=MAX_LOG):
    """The bytes of a regular file. Raises Refused for anything else, and for a large file before
    reading it."""
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise Refused(f"{path}: expected a regular file, found a link, a folder or a device.")
        if status.st_size > limit:
            raise Refused(f"{path}: expected at most {limit:,} bytes, found {status.st_size:,}.")
        with open(path, "rb") as f:
            return f.read(limit)
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror}).") from None


def parse_json(text, path, line):
    """One strict JSON value. Raises Refused for NaN or infinity, a key that stands twice, half of a
    surrogate pair (no text can hold it), and deep nesting."""
    def no_constant(name):
        raise ValueError(f"{name} is not a number")

    def finite(digits):
        return float(digits) if math.isfinite(float(digits)) else no_constant(digits)

    def unique(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    try:
        value = json.loads(
            text, parse_constant=no_constant, parse_float=finite, object_pairs_hook=unique)
        json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except (ValueError, RecursionError) as error:
        fail(path, line, f"strict JSON ({shown(str(error))})", text)
    level = [value]
    for _ in range(MAX_DEPTH):
        below = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
        level = below
    if level:
        fail(path, line, f"JSON at most {MAX_DEPTH} levels deep", text)
    return value


def shortened(raw, first, name):
    """Returns a log without what it has in common with the `first` log of its record, which lies
    beside it under this name. `read_whole` gives the log back. If their sources differ it stays as
    it is."""
    source, rule, rest = raw.partition(RULE_LINE)
    first_source, _, first_rest = first.partition(RULE_LINE)
    if not rule or source != first_source:
        return raw
    same = {line: mark for mark, line in file_lines(first_rest).items()}
    lines = [same.get(line, line) for line in rest.split(b"\n")]
    head = SHORT_HEAD.format(name=name, sha256=hashlib.sha256(raw).hexdigest()).encode()
    return head + RULE_LINE + b"\n".join(lines)


def file_lines(rest):
    """Returns the `file` lines of a log by what stands for them in a shortened one. `rest` is what
    follows the source."""
    found = {}
    for line in rest.split(b"\n"):
        if line.startswith(b'file {"path": "'):
            path = line.split(b'"')[3]
            found[b"as there: file " + path] = line
    return found


def read_whole(path):
    """Returns the bytes of a log as it was written, also of one that a record keeps in short.
    Raises Refused if the log to which a short one refers does not complete it."""
    raw = read_bytes(path)
    head, _, rest = raw.partition(RULE_LINE)
    match = SHORT.fullmatch(head)
    if not match:
        return raw
    first_path = Path(path).parent / match["name"].decode()
    source, rule, first_rest = read_bytes(first_path).partition(RULE_LINE)
    there = file_lines(first_rest)
    lines = [there.get(line, line) for line in rest.split(b"\n")]
    whole = source + rule + b"\n".join(lines)
    if hashlib.sha256(whole).hexdigest() != match["sha256"].decode():
        raise Refused(f"{path}: expected the source and files in {first_path} to complete a log of "
                      f"sha256 {match['sha256'].decode()}, found another sum; put back both logs.")
    return whole


def split_source(path):
    """(raw bytes, source, line number after the source, lines after it). Raises Refused."""
    raw = read_whole(path)
    source, found, rest = raw.partition(RULE_LINE)
    if not found or len(source) > MAX_SOURCE:
        fail(path, 1, f"at most {MAX_SOURCE:,} bytes of source, then a line of 100 '='", raw[:40])
    source += b"\n"
    number = source.count(b"\n") + 2
    count = rest.count(b"\n")
    if count > MAX_LINES:
        fail(path, number + MAX_LINES, f"at most {MAX_LINES:,} lines after the source", count)
    try:
        lines = rest.decode().split("\n")
    except UnicodeDecodeError as error:
        start = error.start
        fail(path, number + rest[:start].count(b"\n"), "UTF-8 text", rest[start:start + 8])
    return raw, source, number, lines


def check_code(log):
    """Raises Refused unless the embedded source has the length and the sha256 that the run line
    states."""
    if not log.facts["run"]:
        raise Refused(f"{log.path}: expected a `run` line after the source, found none.")
    line, run = log.facts["run"][0]
    if run["code_bytes"] != len(log.source):
        expected = f"code_bytes {len(log.source)} (the length of the embedded source)"
        fail(log.path, line, expected, run["code_bytes"])
    actual = hashlib.sha256(log.source).hexdigest()
    if run["code_sha256"] != actual:
        fail(log.path, line, f"code_sha256 {actual} (of the embedded source)", run["code_sha256"])


def check_files(log):
    """Raises Refused unless each other file is there once and intact, and all of them are there."""
    seen = {SCRIPT}
    for line, file in log.facts["file"]:
        path, content = file["path"], file["text"].encode()
        if len(content) > MAX_SOURCE or len(log.facts["file"]) > MAX_FILES:
            fail(log.path, line, f"at most {MAX_FILES} files of at most {MAX_SOURCE:,} bytes", path)
        if path.lower() in seen:  # some file systems do not tell a.py from A.py
            fail(log.path, line, f"each file once, and {SCRIPT} at the head of the log only", path)
        seen.add(path.lower())
        actual = hashlib.sha256(content).hexdigest()
        if file["sha256"] != actual:
            fail(log.path, line, f"sha256 {actual} (of the text of {path})", file["sha256"])
    line, run = log.facts["run"][0]
    if log.grammar == 2 and run["files_sha256"] != log.files_sha256:
        expected = f"files_sha256 {log.files_sha256} (of all files in the log)"
        fail(log.path, line, expected, run["files_sha256"])


def read_start(path, kinds):
    """A log with the facts of these kinds that stand before `config`; behind them it may be cut.
    Raises Refused."""
    raw, source, number, lines = split_source(path)
    log = Log(str(path), raw, source)
    for line in lines:
        kind = line.partition(" ")[0]
        if kind == "config":
            break
        if kind in kinds:
            read_fact(log, number, line)
        number += 1
    check_code(log)
    return log


def read_source(path):
    """The script, verified against the run line; the rest may be cut. Raises Refused."""
    return read_start(path, ["run"]).source


def read_files(path):
    """{path: bytes} of all files, each verified; the rest may be cut. Raises Refused."""
    log = read_start(path, ["run", "file"])
    check_files(log)
    return log.files


def keys_of(kind, value):
    """{key: pattern} of what this fact must have."""
    if kind == "run" and any(key in value for key in RUN_2):
        return FACTS["run"] | RUN_2
    return FACTS[kind]


def read_fact(log, number, text):
    kind, _, body = text.partition(" ")
    longest = MAX_FILE_LINE if kind == "file" else MAX_LINE
    if kind not in FACTS or len(text) > longest:
        expected = f"a step or a fact ({', '.join(FACTS)}) of at most {longest:,} characters"
        fail(log.path, number, expected, text)
    value = parse_json(body, log.path, number)
    if not isinstance(value, dict if FACTS[kind] else str):
        fail(log.path, number, f"`{kind}` and {'an object' if FACTS[kind] else 'a string'}", body)
    for key, pattern in keys_of(kind, value).items():
        if key not in value:
            fail(log.path, number, f"the key {key} in `{kind}`", body)
        if not re.fullmatch(pattern, json.dumps(value[key])):
            fail(log.path, number, f"another kind of value for {kind}.{key}", value[key])
    check_texts(log, number, kind, value)
    if kind in ORDER:
        if log.facts[kind] and kind not in REPEATED:
            fail(log.path, number, f"only one `{kind}` line", text)
        at = ORDER.index(kind)
        too_late = any(log.facts[later] for later in ORDER[at + 1:])
        too_early = not all(log.facts[earlier] for earlier in ORDER[:at])
        if too_late or too_early:
            fail(log.path, number, f"the facts in the order {', '.join(ORDER)}", text)
    if kind == "file" and (not log.facts["run"] or log.grammar == 1 or log.facts["config"]):
        fail(log.path, number, "`file` only between a `run` of grammar 2 and `config`", text)
    if log.steps and kind not in ("note", "defect"):
        fail(log.path, number, "only steps, notes and defects after the first step", text)
    log.facts[kind].append((number, value))


def check_texts(log, number, kind, value):
    """Raises Refused for a key that is no plain word, and for a text longer than MAX_TEXT in a fact
    that is not one of LONG_TEXTS."""
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if not re.fullmatch(r"\w{1,100}", key, re.ASCII):
            fail(log.path, number, f"keys of at most 100 letters, digits and _ in `{kind}`", key)
        longest = max(map(len, texts_in(item)), default=0)
        if kind not in LONG_TEXTS and longest > MAX_TEXT:
            fail(log.path, number, f"at most {MAX_TEXT:,} characters in {kind}.{key}", item)


def texts_in(value):
    """All texts in a JSON value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return [text for item in value for text in texts_in(item)]
    return []


def read_step(log, number, text):
    match = STEP.fullmatch(text)
    if not match:
        expected = "step:I/N train_loss or val_loss:X train_time:Tms step_avg:Ams"
        fail(log.path, number, expected, text)
    step, total, split, loss, time_ms, avg = match.groups()
    values = (int(step), int(total), split, float(loss), int(time_ms), float(avg))
    log.steps.append(Step(number, *values))


def read_end(log, number, lines):
    """The end block, whose first line is `number`: the keys of END in their order. `val_loss` is
    null only if the run was interrupted before any validation."""
    rest = list(enumerate(lines, number))  # (line number, text)
    if INTERRUPTED in lines:
        line, _ = rest.pop(lines.index(INTERRUPTED))
        log.end["interrupted"] = True
        log.end_line["interrupted"] = line
        if rest and rest[0][1] == "val_loss: null":
            line, _ = rest.pop(0)
            log.end["val_loss"] = None
            log.end_line["val_loss"] = line
    for key, pattern in END.items():
        if key in log.end:
            continue
        line, text = rest.pop(0) if rest else (number + len(lines), "")
        if not re.fullmatch(f"{key}: (?:{pattern})", text, re.ASCII):
            fail(log.path, line, f"`{key}: ...` in the end block", text)
        value = text.removeprefix(f"{key}: ")
        log.end[key] = value if key == "code_sha256" else parse_json(value, log.path, line)
        log.end_line[key] = line
    texts = [text for _, text in rest]
    if texts != [""]:
        line = rest[0][0] if rest else number + len(lines)
        expected = "the file to end with the newline after code_sha256"
        fail(log.path, line, expected, "\n".join(texts))


def read_log(path, may_be_cut=False):
    """A complete, consistent log. Raises Refused with the first thing that is wrong with it. With
    `may_be_cut` it may end after any step, because its run is still going on or was killed. Such a
    log counts as interrupted, and `end` holds nothing else."""
    raw, source, number, lines = split_source(path)
    log = Log(str(path), raw, source)
    if may_be_cut and SEPARATOR not in lines:
        lines = lines[:-1]  # the last line may be half a one
        diverged = [i for i, text in enumerate(lines) if DIVERGED.match(text)]
        lines = lines[: diverged[0]] if diverged else lines
        log.end = {"interrupted": True}
        end_at = len(lines)
    elif SEPARATOR not in lines:
        last = next((text for text in reversed(lines) if text), "")
        state = "ended early" if last.startswith('note "ended early') else "goes on or was killed"
        expected = f"a second line of 100 '=' (the run {state}; `plot` shows the steps that it has)"
        fail(path, number + len(lines) - 1, expected, last)
    else:
        end_at = lines.index(SEPARATOR)
    for line, text in enumerate(lines[:end_at], number):
        if text.startswith("step:"):
            read_step(log, line, text)
        else:
            read_fact(log, line, text)
    if end_at < len(lines):
        read_end(log, number + end_at + 1, lines[end_at + 1:])
    for kind in ORDER:
        if not log.facts[kind]:
            raise Refused(f"{path}: expected a `{kind}` line, found none.")
    check_code(log)
    check_files(log)
    check_facts(log)
    check_data(log)
    check_steps(log)
    if end_at < len(lines):
        check_end(log)
    return log


def refuse_unfit_for_record(log):
    """Raises Refused for a run that can be read but is no record: one without a target, and one
    that was resumed or interrupted."""
    found = None
    if log.end["target"] is None or log.end["reached"] is None:
        found = "a run without a target"
    for word, note in log.breaks.items():
        found = f"a run that was {word} (note {shown(note)})"
    if log.end.get("interrupted"):
        found = "a run that was interrupted (interrupted: true)"
    elif log.config.get("resume"):
        found = f"a run that was resumed (config.resume is {shown(log.config['resume'])})"
    if found:
        raise Refused(f"{log.path}: expected a whole run with a target, found {found}, which "
                      "`plot` and `compare` take, but no record.")


def check_data(log):
    """No shard stands twice, none is for training and for validation, and they hold the tokens that
    were trained on and validated. Raises Refused."""
    seen = {}
    for line, shard in log.facts["data"]:
        name, split = shard["name"], shard["split"]
        plain = name.isprintable() and not re.search(r"[/\\]", name) and name not in (".", "..")
        if not plain or len(name) > MAX_NAME:
            expected = f"the plain name of a file, of at most {MAX_NAME} characters"
            fail(log.path, line, expected, name)
        if shard["sha256"] in seen:
            other = seen[shard["sha256"]]
            expected = (f"another sha256 than that of the {other['split']} shard "
                        f"{shown(other['name'])} (each shard once, none in both splits)")
            fail(log.path, line, expected, f"{split} {name}")
        seen[shard["sha256"]] = shard
    held = {"train": 0, "val": 0}
    for shard in log.values("data"):
        held[shard["split"]] += shard["tokens"]
    line, config = log.facts["config"][0]
    if config["val_tokens"] > held["val"]:
        fail(log.path, line, f"val_tokens of at most {held['val']} (in the val shards)",
             config["val_tokens"])
    epochs = config.get("epochs", 1)
    if type(epochs) is not int or epochs < 1:
        fail(log.path, line, "config.epochs to be a whole number from 1", epochs)
    trained = log.tokens_at(config["num_steps"])
    if trained > epochs * held["train"]:
        line, _ = log.facts["stage"][-1]
        most = epochs * held["train"]
        expected = f"stages of at most {most} tokens (the train shards, {epochs} times)"
        fail(log.path, line, expected, trained)


def check_facts(log):
    """The date exists, there are as many devices as ranks, shards have the size of their tokens and
    stand once, both splits are there, and the stages follow each other up to num_steps. Raises
    Refused."""
    line, run = log.facts["run"][0]
    try:
        datetime.strptime(run["date"], "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        fail(log.path, line, "a date of the calendar", run["date"])
    line, environment = log.facts["environment"][0]
    world_size = environment["world_size"]
    if len(environment["devices"]) != world_size:
        fail(log.path, line, f"{world_size} devices (world_size)", environment["devices"])
    seen = set()
    for line, shard in log.facts["data"]:
        tokens = shard["tokens"]
        size = 1024 + 2 * tokens  # 256 int32 of header, then uint16 tokens
        if shard["bytes"] != size:
            fail(log.path, line, f"{size} bytes for {tokens} tokens", shard["bytes"])
        if (shard["split"], shard["name"]) in seen:
            fail(log.path, line, "each shard once", shard["name"])
        seen.add((shard["split"], shard["name"]))
    if {split for split, _ in seen} != {"train", "val"}:
        fail(log.path, line, "shards of both splits, train and val", sorted(seen))
    at = 0
    for line, stage in log.facts["stage"]:
        if stage["first_step"] != at or stage["last_step"] <= at or not stage["batch_tokens"]:
            expected = f"a stage of some steps and tokens that begins at step {at}"
            fail(log.path, line, expected, stage)
        at = stage["last_step"]
    num_steps = log.config["num_steps"]
    if at != num_steps or len(log.facts["stage"]) > MAX_STAGES:
        expected = f"at most {MAX_STAGES} stages, to end at config.num_steps = {num_steps}"
        fail(log.path, line, expected, at)


def check_steps(log):
    """Every step is there, in order, and its times agree with each other. A resumed run may begin
    later, an interrupted one may end earlier. Raises Refused."""
    total = log.config["num_steps"]
    resumed = log.resumed
    trained = 0
    before = None
    if resumed and log.steps:
        trained = log.steps[0].step - (log.steps[0].split == "train")
    for s in log.steps:
        if s.total != total:
            expected = f"step:{s.step}/{total} (config.num_steps)"
            fail(log.path, s.line, expected, f"step:{s.step}/{s.total}")
        if s.split == "train":
            trained += 1
        again = before and before.split == s.split == "val" and before.step == s.step
        if s.step != trained or again:
            fail(log.path, s.line, f"{s.split} step {trained + bool(again)} (steps are gapless)",
                 f"step {s.step}")
        if before and s.time_ms < before.time_ms:
            expected = f"a train_time of at least {before.time_ms}ms (time does not run back)"
            fail(log.path, s.line, expected, s.time_ms)
        if not resumed:  # such a run may state the average of its own steps
            check_average(log, s)
        before = s
    if log.interrupted and log.steps:
        return
    if trained != total or before is None or before.split != "val":
        line = before.line if before else log.facts["calibration"][0][0]
        last = f"step {trained}" if log.steps else "no step"
        fail(log.path, line, f"steps up to {total} with a last validation", last)


def check_average(log, s):
    """step_avg is train_time over the step. Both are printed rounded: 0.5 ms of the sum, 0.005 ms
    of the average. At step 0, and only there, it is nan. Raises Refused."""
    slack = 0.501 + 0.005001 * s.step
    if math.isnan(s.avg_ms) != (s.step == 0) or abs(s.avg_ms * s.step - s.time_ms) > slack:
        expected = f"step_avg to be train_time / step = {s.time_ms}ms / {s.step}"
        fail(log.path, s.line, expected, s.avg_ms)


def check_end(log):
    """The end block follows from the lines above it. Raises Refused."""
    end = log.end
    if end["code_sha256"] != log.run["code_sha256"]:
        fail_end(log, "code_sha256", f"{log.run['code_sha256']} (the run line)")
    check_target(log)
    if log.interrupted or log.resumed:  # what such a run counts is not fixed
        return
    last = log.steps[-1]
    seconds = end["train_time_s"]
    tokens = log.tokens_at(log.config["num_steps"])
    slack = 0.000501 * end["tokens_per_s"] + 0.501 * seconds + 1  # printed to 1 ms and to 1 token/s
    if end["val_loss"] != last.loss:
        fail_end(log, "val_loss", f"{last.loss} (the last validation)")
    if abs(1000 * seconds - last.time_ms) > 1.001:
        fail_end(log, "train_time_s", f"{last.time_ms / 1000} (the last validation)")
    if abs(end["step_avg_ms"] - last.avg_ms) > 0.0101:
        fail_end(log, "step_avg_ms", f"{last.avg_ms} (the last validation)")
    if end["tokens"] != tokens:
        fail_end(log, "tokens", f"{tokens} (steps x batch_tokens of the stages)")
    if abs(end["tokens_per_s"] * seconds - tokens) > slack:
        fail_end(log, "tokens_per_s", "tokens / train_time_s")


def check_target(log):
    """`target` is that of the configuration, or null in a run that has none; `reached` says whether
    the last validation is at most that. Raises Refused."""
    end = log.end
    target = end["target"]
    if target is not None and target != log.config["target_loss"]:
        fail_end(log, "target", f"{log.config['target_loss']} (config.target_loss)")
    reached = None
    if target is not None and end["val_loss"] is not None:
        reached = end["val_loss"] <= target
    if end["reached"] is not reached and not log.interrupted:
        expected = "null, as target is" if target is None else "val_loss <= target"
        fail_end(log, "reached", expected)


def fail_end(log, key, expected):
    fail(log.path, log.end_line[key], f"{key} to be {expected}", log.end[key])
