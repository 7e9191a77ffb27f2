"""A record folder: what is computed from its logs, how it is written, and how it is checked."""
import hashlib
import itertools
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from . import evaluation, plots
from .log import (
    FACTS,
    Refused,
    fail,
    parse_json,
    read_bytes,
    read_log,
    refuse_unfit_for_record,
    shortened,
    shown,
    shown_key,
)
from .png import read_png
from .stats import ALPHA, distributions, p_below, spread

# Keys of the config that may differ between the runs of one record. The data are compared by their
# fingerprints.
PER_RUN = {
    "seed", "run_name", "log_dir", "jsonl", "data_dir", "save_checkpoint", "load_checkpoint",
    "sample", "sample_tokens",
}
# what the runs of one record share of the environment; the rest of it may differ
MACHINE = ("devices", "world_size", "hosts", "torch", "cuda", "triton")
BLOCK = ("<!-- record:begin -->", "<!-- record:end -->")
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,60}")  # of a record, without its date
PICTURE_SHA256 = "loss_png_sha256"  # key of record.json, which the oldest records do not have
FREE_TEXT = re.compile(r"[\w .,:;()+/*%='&-]{0,200}")  # goes into Markdown tables
SKELETON = """# {name}

{block}

## What is new

Write here what changed, why it helps, and which runs show it.
Everything between the two comments above is generated; `python -m records check` compares it with \
the logs.
"""


def first_difference(a, b, key=""):
    """Looks for the first difference between two JSON values. Returns (its key, the value in a, the
    value in b), or None if they are equal. `key` is where the two values stand."""
    if type(a) is dict and type(b) is dict:
        for name in a | b:
            inner = f"{key}.{name}"
            if name not in a or name not in b:
                return inner.lstrip("."), a.get(name, "nothing"), b.get(name, "nothing")
            if found := first_difference(a[name], b[name], inner):
                return found
        return None
    if type(a) is list and type(b) is list and len(a) == len(b):
        for i in range(len(a)):
            if found := first_difference(a[i], b[i], f"{key}[{i}]"):
                return found
        return None
    if type(a) is type(b) and a == b:
        return None
    return key.lstrip("."), a, b


def shards(log):
    """Returns {"SPLIT NAME": its number of tokens and its sha256}, sorted by split and name."""
    def place(shard):
        return shard["split"], shard["name"]

    found = {}
    for shard in sorted(log.values("data"), key=place):
        facts = {"tokens": shard["tokens"], "sha256": shard["sha256"]}
        found[f"{shard['split']} {shard['name']}"] = facts
    return found


def fingerprint(log, split=""):
    """Returns one sha256 over the names, token counts and sha256 of the shards whose keys in
    `shards` begin with `split`."""
    text = ""
    for key, shard in shards(log).items():
        if key.startswith(split):
            text += f"{key} {shard['tokens']} {shard['sha256']}\n"
    return hashlib.sha256(text.encode()).hexdigest()


def shared_facts(log):
    """Returns what all runs of a record share."""
    return {
        "code": {"sha256": log.run["code_sha256"], "files": log.file_sums},
        "data": shards(log),
        "config": {key: value for key, value in log.config.items() if key not in PER_RUN},
        "hardware": {key: log.environment[key] for key in MACHINE},
        "stages": log.values("stage"),
    }


def without_resume(log):
    """What all runs of a record share, but for where a resumed one went on from. No record may have
    such a run, but `compare` takes it."""
    facts = shared_facts(log)
    facts["config"].pop("resume", None)
    return facts


def refuse_mixed(logs):
    """Raises Refused unless all logs are runs of one code, data, config and machine, and count the
    same FLOPs in their `mfu`. The sentence names the first difference."""
    a = logs[0]
    for b in logs[1:]:
        if found := first_difference(without_resume(a), without_resume(b)):
            key, ours, theirs = found
            raise Refused(f"one record needs one code, data, config and hardware, but "
                          f"{shown_key(key)} is {shown(ours)} in {a.path} and {shown(theirs)} in "
                          f"{b.path}.")
        if not (a.interrupted or b.interrupted or same_flops(a.end, b.end)):
            raise Refused(f"mfu x train_time_s must agree between runs, but mfu is {a.end['mfu']} "
                          f"at {a.end['train_time_s']} s in {a.path} and {b.end['mfu']} at "
                          f"{b.end['train_time_s']} s in {b.path}.")


def same_flops(x, y):
    """Returns whether two end blocks count the same FLOPs for a run, which are mfu x time. As mfu
    is printed to 4 digits and time to 1 ms, the products may differ by what rounding explains."""
    x_mfu, x_seconds = x["mfu"], x["train_time_s"]
    y_mfu, y_seconds = y["mfu"], y["train_time_s"]
    if x_mfu is None or y_mfu is None:
        return x_mfu is y_mfu
    difference = abs(x_mfu * x_seconds - y_mfu * y_seconds)
    from_mfu = 0.000051 * (x_seconds + y_seconds)
    from_time = 0.00051 * (x_mfu + y_mfu)
    return difference <= from_mfu + from_time


def refuse_copies(logs):
    """Raises Refused if one run stands twice among the logs, also under a new name, under a new id
    or with new times. Equal losses do not make a copy where the code is another, because a CPU
    computes the same with code that is only faster (see `equal_losses`)."""
    seen = {}
    for log in logs:
        code = str(sorted(log.file_sums.items()))
        marks = {
            "bytes": log.sha256,
            "run_id": log.run["run_id"],
            "step times": log.times_sha256,
            "code and losses": log.losses_sha256 + code,
        }
        for mark in marks.items():
            if mark in seen:
                what, _ = mark
                raise Refused(f"{log.path}: expected each run once, found the same {what} as in "
                              f"{seen[mark]}; leave one of them out.")
            seen[mark] = log.path


def equal_losses(logs):
    """Returns a sentence for each run that has all the losses of another run. Where the code is the
    same too, `refuse_copies` refuses such runs."""
    seen = {}
    found = []
    for log in logs:
        if other := seen.get(log.losses_sha256):
            found.append(f"{log.path}: every loss is that of {other}, so it is either a copy, or "
                         "the same seed of code that computes the same")
        seen[log.losses_sha256] = log.path
    return found


def refuse_same_seed(logs):
    """Raises Refused if two runs of a record have one seed, or more than half of their training
    losses in common. Such runs are not independent, so they say nothing about the spread."""
    for a, b in itertools.combinations(logs, 2):
        seed = b.config["seed"]
        if a.config["seed"] == seed:
            raise Refused(f"{b.path}: expected a seed of its own for each run, found {seed} as in "
                          f"{a.path}; leave one of them out.")
        ours = training_losses(a)
        theirs = training_losses(b)
        equal = sum(ours[step] == theirs.get(step) for step in ours)
        if equal > len(ours) / 2:
            raise Refused(f"{b.path}: expected losses of its own for each run, found {equal} of "
                          f"{len(ours)} training losses equal to those in {a.path}; leave one out.")


def training_losses(log):
    """Returns {step: training loss}."""
    return {step.step: step.loss for step in plots.training_steps(log)}


def latest_date(root):
    """Returns the latest date that a run can have: a day from now. As the clock may be slow, the
    last commit below `root` counts as now if it is later."""
    now = time.time()
    command = ["git", "-C", str(root), "log", "-1", "--format=%ct"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, timeout=60)
        commit = git.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    if commit.isdigit():
        now = max(now, int(commit))
    return datetime.fromtimestamp(now, UTC) + timedelta(days=1)


def refuse_future(logs, latest):
    """Raises Refused for a run that began after `latest`."""
    for log in logs:
        line, run = log.facts["run"][0]
        if run["date"] > latest.strftime("%Y-%m-%dT%H:%M:%SZ"):
            raise Refused(f"{log.path}, line {line}: expected a date up to {latest:%Y-%m-%d} "
                          f"(tomorrow), found {run['date']!r}; if that is right, set this clock.")


def refuse_doubtful(logs):
    """Raises Refused for runs that are no record, that cannot have been as fast as they say, or
    that are not independent."""
    for log in logs:
        refuse_unfit_for_record(log)
    refuse_copies(logs)
    refuse_same_seed(logs)


def moments(dicts, key, digits):
    """Returns the rounded mean and standard deviation of the values that some dicts have under
    this key. A single value has no deviation, so that is None."""
    values = [one[key] for one in dicts]
    deviation = spread(values)
    if deviation is not None:
        deviation = round(deviation, digits)
    return {"mean": round(statistics.fmean(values), digits), "sd": deviation}


def mean(dicts, key, digits=4):
    """Returns the rounded mean of the values that some dicts have under this key, or None if one
    of them is None, which means not measured."""
    values = [one[key] for one in dicts]
    if None in values:
        return None
    return round(statistics.fmean(values), digits)


def build(logs, name, claim="", data_name="", p_of=p_below):
    """Returns the content of record.json without the sha256 of the picture. All of it comes from
    the logs except the two free texts, `claim` and `data_name`. p_of(losses, target) is the p of a
    mean below the target. Raises Refused if a text is not allowed or if the logs are not those of
    one record."""
    for text in (claim, data_name):
        if type(text) is not str or not FREE_TEXT.fullmatch(text):
            raise Refused(f"{name}: a claim or data name is at most 200 letters, digits or "
                          f".,:;()+/*%='&-, not {shown(text)}.")
    refuse_mixed(logs)
    refuse_copies(logs)
    first = logs[0]
    ends = [log.end for log in logs]
    target = first.end["target"]
    p = p_of([end["val_loss"] for end in ends], target)
    if p is not None:
        p = float(f"{p:.3g}")
    tokens_per_s = mean(ends, "tokens_per_s")
    return {
        "name": name,
        "date": min(log.run["date"] for log in logs)[:10],
        "claim": claim,
        "data_name": data_name,
        "n": len(logs),
        "target": target,
        "loss": moments(ends, "val_loss", 5) | {"p_below_target": p},
        "time_s": moments(ends, "train_time_s", 4),
        "step_avg_ms": mean(ends, "step_avg_ms", 3),
        "tokens": first.end["tokens"],
        "tokens_per_s_per_gpu": round(tokens_per_s / first.environment["world_size"]),
        "mfu": mean(ends, "mfu"),
        "peak_memory_mib": mean(ends, "peak_memory_mib", None),
        "compile_s": mean(ends, "compile_s", 1),
        "calibration": mean_calibration(logs),
        "hardware": hardware(logs),
        "code": code_facts(first),
        "data": data_facts(first),
        "config": shared_facts(first)["config"],
        "stages": first.values("stage"),
        "runs": [summary(number, log) for number, log in enumerate(logs, 1)],
    }


def mean_calibration(logs):
    """Returns the mean of each calibration."""
    calibrations = [log.calibration for log in logs]
    return {key: mean(calibrations, key, 2) for key in FACTS["calibration"]}


def code_facts(log):
    """Returns size and sha256 of what ran. In grammar 1 the script is all there is, so only grammar
    2 has the sha256 of other files."""
    facts = {"sha256": log.run["code_sha256"], "bytes": log.run["code_bytes"]}
    if log.grammar == 2:
        facts["files_sha256"] = log.run["files_sha256"]
        facts["files"] = log.file_sums
    return facts


def data_facts(log):
    return {
        "fingerprint": fingerprint(log),
        "val_fingerprint": fingerprint(log, "val "),
        "shards": shards(log),
    }


def hardware(logs):
    """Returns what all runs share of the machine. What may differ is a list of all that was
    seen."""
    environment = logs[0].environment
    models = sorted(set(environment["devices"]))
    if models == ["CPU"]:  # the processor decides the time, so its name is that of the hardware
        models = sorted({log.environment["cpu"] or "CPU" for log in logs})
    facts = {"summary": f"{environment['world_size']} x {' + '.join(models)}"}
    for key in MACHINE:
        facts[key] = environment[key]
    for key in ("python", "driver", "cpu"):
        facts[key] = sorted({str(log.environment[key]) for log in logs})
    return facts


def summary(number, log):
    """Returns what record.json says about one run."""
    return {
        "log": f"log_{number}.txt",
        "log_sha256": log.sha256,
        "run_id": log.run["run_id"],
        "date": log.run["date"],
        "seed": log.config["seed"],
        "loss": log.end["val_loss"],
        "reached": log.end["reached"],
        "time_s": log.end["train_time_s"],
        "step_avg_ms": log.end["step_avg_ms"],
        "git_commit": log.run["git_commit"],
        "git_clean": log.run["git_clean"],
        "defects": [defect["what"] for defect in log.values("defect")],
    }


def warnings(record):
    """Returns what a reader of the record should know before believing its numbers, a sentence
    each."""
    found = []
    if record["n"] == 1:
        found.append("one run only: no deviation, no test")
    p = record["loss"]["p_below_target"]
    if p is not None and p >= ALPHA:
        found.append(f"a mean loss below the target is not shown at p < {ALPHA} (p = {p:.2g})")
    for run in record["runs"]:
        log = run["log"]
        if not run["reached"]:
            found.append(f"{log}: did not reach the target")
        if not run["git_clean"]:
            tree = "an unknown" if run["git_clean"] is None else "a changed"
            found.append(f"{log}: ran from {tree} git tree (the code that ran is in the log)")
        for what in run["defects"]:
            found.append(f"{log}: {plain(what)}")
    return found


def plain(value):
    """Returns text from a log in a form that is safe inside a Markdown table."""
    return re.sub(r"[^\w .,:;()@+/*%='&-]", "?", str(value), flags=re.ASCII)[:200]


def code_text(code):
    """Returns what ran, for the README: the script and, with grammar 2, the files it imported."""
    text = f"sha256 `{code['sha256'][:16]}`, {code['bytes']:,} bytes"
    if "files" in code:
        files_sha256 = code["files_sha256"][:16]
        text += f"; with what it imports {len(code['files'])} files, sha256 `{files_sha256}`"
    return f"{text}, embedded in each log"


def pm(value, digits, unit=""):
    """Returns mean ± standard deviation as text. A single run has no deviation."""
    text = f"{value['mean']:.{digits}f}"
    if value["sd"] is not None:
        text += f" ± {value['sd']:.{digits}f}"
    return text + unit


def p_text(record):
    p = record["loss"]["p_below_target"]
    return "no test" if p is None else f"p = {p:.2g}"


def optional(value, unit=""):
    return "not measured" if value is None else f"{value:,}{unit}"


def block(record):
    """Returns the generated part of a record's README, with its markers."""
    lines = [BLOCK[0], "| | |", "|---|---|"]
    for what, text in rows(record):
        lines.append(f"| {what} | {text} |")
    lines.append("")
    lines.append("| log | seed | loss | reached | time (s) | ms a step |")
    lines.append("|---|--:|--:|---|--:|--:|")
    for run in record["runs"]:
        reached = "yes" if run["reached"] else "no"
        lines.append(f"| [{run['log']}]({run['log']}) | {run['seed']} | {run['loss']:.4f} "
                     f"| {reached} | {run['time_s']:.3f} | {run['step_avg_ms']:.2f} |")
    lines.append("")
    doubts = warnings(record)
    for text in doubts:
        lines.append(f"- Warning: {text}")
    if doubts:
        lines.append("")
    lines.append("![Validation loss over time and over tokens](loss.png)")
    lines.append(BLOCK[1])
    return "\n".join(lines)


def rows(record):
    """Returns the first table in a record's README, a list of (what, text)."""
    machine = record["hardware"]
    reached = sum(run["reached"] for run in record["runs"])
    speeds = []
    for key, value in record["calibration"].items():
        if value is not None:
            speeds.append(f"{key} {value:g}")
    loss = (f"{pm(record['loss'], 4)}, target {record['target']:g} "
            f"({p_text(record)} for a mean below the target, one-sided t test)")
    tokens = (f"{record['tokens']:,} in {record['config']['num_steps']:,} steps of "
              f"{record['step_avg_ms']:.2f} ms")
    throughput = (f"{record['tokens_per_s_per_gpu']:,} tokens/s per device, "
                  f"MFU {optional(record['mfu'])}")
    memory = (f"{optional(record['peak_memory_mib'], ' MiB')}, "
              f"{optional(record['compile_s'], ' s')} untimed")
    versions = (f"torch {machine['torch']}, CUDA {machine['cuda']}, triton {machine['triton']}, "
                f"Python {' / '.join(machine['python'])}, driver {' / '.join(machine['driver'])}")
    data = (f"{record['data_name'] or 'unnamed'}, {len(record['data']['shards'])} shards, "
            f"fingerprint `{record['data']['fingerprint'][:16]}`")
    return [
        ("claim", record["claim"] or "none stated"),
        ("date", record["date"]),
        ("runs", f"{record['n']}, of which {reached} reached the target"),
        ("training time", pm(record["time_s"], 3, " s")),
        ("final validation loss", loss),
        ("training tokens", tokens),
        ("throughput", throughput),
        ("memory, compilation", memory),
        ("hardware", f"{plain(machine['summary'])}, {machine['hosts']} host(s)"),
        ("versions", plain(versions)),
        ("code", code_text(record["code"])),
        ("data", data),
        ("host calibration", plain(", ".join(speeds))),
    ]


def between(text, markers, path):
    """Returns the text before the first marker, the text from there to the end of the second
    marker, and the text after it. Raises Refused unless each marker stands once, in order."""
    begin, end = markers
    begins = text.count(begin)
    ends = text.count(end)
    if begins != 1 or ends != 1 or text.index(begin) > text.index(end):
        raise Refused(f"{path}: expected {begin} and then {end}, each once, found {begins} and "
                      f"{ends}; write the missing line.")
    first = text.index(begin)
    last = text.index(end) + len(end)
    return text[:first], text[first:last], text[last:]


def read_text(path):
    """Returns the text of a file. Raises Refused if it cannot be read or is not UTF-8."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        found = f"found another byte at {error.start}"
        raise Refused(f"{path}: expected UTF-8 text, {found}.") from None


def write_text(path, text):
    """Writes a text file that is the same on every system."""
    path.write_text(text, "utf-8", newline="\n")


def compare_block(path, markers, expected, source="the logs"):
    """Raises Refused unless the text from marker to marker is the expected one, which was generated
    from `source`. The sentence shows the first line that differs."""
    before, found, _ = between(read_text(path), markers, path)
    found_lines = found.split("\n")
    first_number = before.count("\n") + 1
    for i, line in enumerate(expected.split("\n")):
        have = found_lines[i] if i < len(found_lines) else ""
        if have != line:
            fail(path, first_number + i, f"{shown(line, 200)} (generated from {source})", have)
    if found != expected:
        raise Refused(f"{path}: expected nothing after the generated lines, before {markers[1]}.")


def folders(root):
    """Returns the folders of all records, sorted."""
    found = []
    for path in sorted((root / "records").glob("*_*")):
        if re.match(r"\d{4}-\d\d-\d\d_", path.name) and path.is_dir():
            found.append(path)
    return found


def without_date(name):
    """Returns the name of a record's folder without the date and the _ at its head."""
    return name[11:]


def log_paths(folder, pattern):
    """Returns the files of a folder whose names match the pattern. Short names come first, so that
    log_2.txt stands before log_10.txt."""
    def place(path):
        return len(path.name), path.name

    return sorted(folder.glob(pattern), key=place)


def load(folder, recompute=True):
    """Reads a record. Returns its logs, its record.json, and what record.json should be according
    to the logs. Without `recompute` the p-value is the one in record.json, so that scipy is not
    needed. Raises Refused if the folder does not hold a record."""
    paths = log_paths(folder, "log_*.txt")
    names = [path.name for path in paths]
    expected = [f"log_{number}.txt" for number in range(1, len(names) + 1)]
    if not names or names != expected:
        raise Refused(f"{folder}: expected log_1.txt, log_2.txt and so on, found {shown(names)}.")
    logs = [read_log(path) for path in paths]
    refuse_doubtful(logs)
    path = folder / "record.json"
    stored = parse_json(read_text(path), path, 1)
    if type(stored) is not dict:
        fail(path, 1, "an object", stored)
    if recompute:
        p_of = p_below
    else:
        p = stored_p(stored, path)

        def p_of(losses, target):
            return p

    rebuilt = build(logs, folder.name, stored.get("claim"), stored.get("data_name"), p_of)
    return logs, stored, rebuilt


def stored_p(stored, path):
    """Returns the p-value in a record.json, None if there is none. Raises Refused if it is not from
    0 to 1."""
    loss = stored.get("loss")
    if type(loss) is not dict:
        return None
    p = loss.get("p_below_target")
    if p is None:
        return None
    if type(p) is not float or not 0 <= p <= 1:
        fail(path, 1, "loss.p_below_target from 0.0 to 1.0, or null", p)
    return p


def problems(folder, logs, stored, rebuilt, latest):
    """Returns everything in which a record folder differs from its logs, a sentence each. `stored`
    and `rebuilt` are what `load` returned. A run that began after `latest` is a problem too."""
    found = []
    numbers = {key: value for key, value in stored.items() if key != PICTURE_SHA256}
    if different := first_difference(numbers, rebuilt):
        key, have, expected = different
        found.append(f"{folder / 'record.json'}: expected {shown_key(key)} to be {shown(expected)} "
                     f"(from the logs), found {shown(have)}.")
    if not folder.name.startswith(rebuilt["date"] + "_"):
        found.append(f"{folder}: expected a name that begins with the date of the first run, "
                     f"{rebuilt['date']}_.")
    name = without_date(folder.name)
    if not NAME.fullmatch(name):
        found.append(f"{folder}: expected a name of lower-case letters, digits, _ and - behind the "
                     f"date, found {shown(name)}.")
    for check, *arguments in (
        (refuse_future, logs, latest),
        (compare_block, folder / "README.md", BLOCK, block(rebuilt)),
        (check_picture, folder, stored),
        (check_evaluation, folder),
    ):
        try:
            check(*arguments)
        except Refused as error:
            found.append(str(error))
    return found


def check_picture(folder, stored):
    """Raises Refused unless the picture is the one whose sha256 record.json has. The oldest records
    have none; they need a whole picture, whichever it is."""
    path = folder / "loss.png"
    if PICTURE_SHA256 not in stored:
        read_png(path)
        return
    actual = hashlib.sha256(read_bytes(path)).hexdigest()
    if stored[PICTURE_SHA256] != actual:
        raise Refused(f"{path}: expected the picture whose sha256 is {PICTURE_SHA256} in "
                      f"record.json, {shown(stored[PICTURE_SHA256])}, found one of {actual}; put "
                      "back the one that `new` drew.")


def check_evaluation(folder):
    """Raises Refused unless the README of a record shows the results of evaluate.py that lie in its
    folder, or shows none where there are none."""
    path = folder / evaluation.FILE
    page = folder / "README.md"
    if path.exists():
        expected = evaluation.block(evaluation.read(path))
        compare_block(page, evaluation.MARKS, expected, evaluation.FILE)
    elif evaluation.MARKS[0] in read_text(page):
        raise Refused(f"{page}: expected {evaluation.FILE} beside it, found none; put it back, or "
                      f"take away what stands from {evaluation.MARKS[0]} on.")


def new(root, name, paths, claim="", data_name="", results=None):
    """Writes records/DATE_NAME from the logs, all of it or nothing. `results` is a file that
    `evaluate.py --json` has written, to be kept with them, without the folders of absolute paths.
    Returns the folder. Raises Refused if the logs make no record, or if a library is missing that
    is needed here."""
    name = re.sub(r"^\d{4}-\d\d-\d\d_", "", name)  # of those who wrote a date themselves
    if not NAME.fullmatch(name):
        raise Refused(f"a record's name is lower-case letters, digits, _ and -, not {shown(name)}.")
    # Both raise Refused where their library is missing. So that is said before any log is read.
    distributions()
    plots.figure_class()
    logs = [read_log(path) for path in paths]
    logs.sort(key=lambda log: (log.run["date"], log.run["run_id"]))
    date = logs[0].run["date"][:10]
    folder = root / "records" / f"{date}_{name}"
    if folder.exists():
        raise Refused(f"{folder}: exists already.")
    refuse_doubtful(logs)
    refuse_future(logs, latest_date(root))
    record = build(logs, folder.name, claim, data_name)
    evaluated = None
    if results:
        evaluated = evaluation.without_folders(evaluation.read(results))
    refuse_copies(logs_of_all(root) + logs)
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new_") as scratch:
        draft = Path(scratch) / folder.name
        draft.mkdir()
        write_files(draft, record, logs)
        page = SKELETON.format(name=folder.name, block=block(record))
        if evaluated:
            page += f"\n## Evaluation\n\n{evaluation.block(evaluated)}\n"
            write_text(draft / evaluation.FILE, json.dumps(evaluated, indent=1) + "\n")
        write_text(draft / "README.md", page)
        os.replace(draft, folder)
    return folder


def doubts_about_name(root, folder):
    """Returns sentences about the name of the data of a new record, if another record gives the
    same shards another name, or gives this name to other validation shards, on which losses cannot
    be compared. No name is none."""
    new_record = parse_json(read_text(folder / "record.json"), folder, 1)
    data, name = new_record["data"], new_record["data_name"]
    doubts = {}  # at most one of each kind
    for other_folder in folders(root):
        _, _, other = load(other_folder)
        if not name or not other["data_name"]:
            continue
        same_name = other["data_name"] == name
        if other["data"]["fingerprint"] == data["fingerprint"] and not same_name:
            doubts["name"] = (f"note: {other_folder.name} calls the same shards "
                              f"{shown(other['data_name'])}, not {shown(name)}.")
        if other["data"]["val_fingerprint"] != data["val_fingerprint"] and same_name:
            doubts["shards"] = (f"note: {other_folder.name} calls other validation shards "
                                f"{shown(name)}, too.")
    return list(doubts.values())


def logs_of_all(root):
    """Returns the logs of all records. Raises Refused for a broken record."""
    found = []
    for folder in folders(root):
        logs, _, _ = load(folder)
        found += logs
    return found


def write_files(draft, record, logs):
    """Writes the logs, the first one whole and the others in short, the picture and record.json,
    which holds the sha256 of the picture."""
    first = record["runs"][0]["log"]
    for run, log in zip(record["runs"], logs):
        raw = log.raw if run["log"] == first else shortened(log.raw, logs[0].raw, first)
        (draft / run["log"]).write_bytes(raw)
    picture = draft / "loss.png"
    plots.draw_loss(picture, logs, record["target"])
    digest = hashlib.sha256(read_bytes(picture)).hexdigest()
    content = record | {PICTURE_SHA256: digest}
    write_text(draft / "record.json", json.dumps(content, indent=1) + "\n")
