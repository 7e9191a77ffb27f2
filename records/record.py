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
from .flops import refuse_impossible
from .log import (
    FACTS,
    Refused,
    fail,
    parse_json,
    read_bytes,
    read_log,
    refuse_no_record,
    shown,
    shown_key,
)
from .png import read_png
from .stats import ALPHA, distributions, p_below, spread

# keys of the config that may differ between the runs of one record; the data are compared by
# fingerprint
PER_RUN = {
    "seed", "run_name", "log_dir", "jsonl", "data_dir", "save_checkpoint", "load_checkpoint",
    "sample", "sample_tokens",
}
# the rest of environment may differ
MACHINE = ("devices", "world_size", "hosts", "torch", "cuda", "triton")
BLOCK = ("<!-- record:begin -->", "<!-- record:end -->")
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,60}")  # of a record, without its date
PICTURE_SUM = "loss_png_sha256"  # key of record.json; records from before it was written have none
FREE_TEXT = re.compile(r"[\w .,:;()+/*%='&-]{0,200}")  # goes into Markdown tables
SKELETON = """# {name}

{block}

## What is new

Write here what changed, why it helps, and which runs show it.
Everything between the two comments above is generated; `python -m records check` compares it with \
the logs.
"""


def first_difference(a, b, key=""):
    """(key, value in a, value in b) of the first difference between two JSON values, or None."""
    if type(a) is dict and type(b) is dict:
        for k in [*a, *(k for k in b if k not in a)]:
            if k not in a or k not in b:
                return f"{key}.{k}".lstrip("."), a.get(k, "nothing"), b.get(k, "nothing")
            if found := first_difference(a[k], b[k], f"{key}.{k}"):
                return found
        return None
    if type(a) is list and type(b) is list and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b)):
            if found := first_difference(x, y, f"{key}[{i}]"):
                return found
        return None
    return None if type(a) is type(b) and a == b else (key.lstrip("."), a, b)


def shards(log):
    """{split and name: tokens and fingerprint}"""
    ordered = sorted(log.values("data"), key=lambda s: (s["split"], s["name"]))
    return {f"{s['split']} {s['name']}": {"tokens": s["tokens"], "sha256": s["sha256"]}
            for s in ordered}


def fingerprint(log, split=""):
    """sha256 over the sorted names, token counts and fingerprints of the shards (of one split)."""
    lines = [f"{key} {s['tokens']} {s['sha256']}\n" for key, s in shards(log).items()
             if key.startswith(split)]
    text = "".join(lines)
    return hashlib.sha256(text.encode()).hexdigest()


def files(log):
    """The sums of all files that ran; nothing for grammar 1, where the script is all there is."""
    if log.grammar == 1:
        return {}
    return {"files_sha256": log.run["files_sha256"], "files": log.file_sums}


def claims(log):
    """What all runs of a record share."""
    return {"code": {"sha256": log.run["code_sha256"], "files": log.file_sums},
            "data": shards(log),
            "config": {k: v for k, v in log.config.items() if k not in PER_RUN},
            "hardware": {k: log.environment[k] for k in MACHINE}, "stages": log.values("stage")}


def refuse_mixed(logs):
    """Raises Refused, naming the first difference, unless all logs are runs of one code, data,
    config and machine, and their `mfu` counts the same FLOPs."""
    a = logs[0]
    for b in logs[1:]:
        if found := first_difference(claims(a), claims(b)):
            key, ours, theirs = found
            raise Refused(f"one record needs one code, data, config and hardware, but "
                          f"{shown_key(key)} is {shown(ours)} in {a.path} and {shown(theirs)} in "
                          f"{b.path}.")
        if not same_flops(a.end, b.end):
            raise Refused(f"mfu x train_time_s must agree between runs, but mfu is {a.end['mfu']} "
                          f"at {a.end['train_time_s']} s in {a.path} and {b.end['mfu']} at "
                          f"{b.end['train_time_s']} s in {b.path}.")


def same_flops(x, y):
    """Whether two end blocks count the same FLOPs for a run, which is what mfu x time is. mfu is
    printed to 4 digits, time to 1 ms."""
    if x["mfu"] is None or y["mfu"] is None:
        return x["mfu"] is y["mfu"]
    difference = abs(x["mfu"] * x["train_time_s"] - y["mfu"] * y["train_time_s"])
    of_mfu = 0.000051 * (x["train_time_s"] + y["train_time_s"])
    of_time = 0.00051 * (x["mfu"] + y["mfu"])
    return difference <= of_mfu + of_time


def refuse_twice(logs):
    """Raises Refused if one run stands twice among the logs, be it under a new name, under a new
    id, or with new times. Equal losses are no copy where the code is another: a CPU computes the
    same with code that is only faster (see `equal_losses`)."""
    seen = {}
    for log in logs:
        for what, value in (
            ("bytes", log.sha256),
            ("run_id", log.run["run_id"]),
            ("step times", log.times_sha256),
            ("code and losses", log.losses_sha256 + str(sorted(log.file_sums.items()))),
        ):
            if (what, value) in seen:
                raise Refused(f"{log.path}: expected each run once, found the same {what} as in "
                              f"{seen[what, value]}; leave one of them out.")
            seen[what, value] = log.path


def equal_losses(logs):
    """A sentence for each run with all the losses of another one, whose code is another."""
    seen = {}
    found = []
    for log in logs:
        if other := seen.get(log.losses_sha256):
            found.append(f"{log.path}: every loss is that of {other}, so it is either a copy, or "
                         "the same seed of code that computes the same")
        seen[log.losses_sha256] = log.path
    return found


def refuse_same_seed(logs):
    """Raises Refused if two runs of a record have one seed, or share most training losses: such
    runs are not independent, so they say nothing about the spread."""
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
    """{step: training loss}"""
    return {s.step: s.loss for s in log.steps if s.split == "train"}


def latest_date(root):
    """The latest date a run can have: a day from now. A clock may be slow, so the last commit below
    `root` counts as now if it is later."""
    now = time.time()
    command = ["git", "-C", str(root), "log", "-1", "--format=%ct"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
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
        refuse_no_record(log)
        refuse_impossible(log)
    refuse_twice(logs)
    refuse_same_seed(logs)


def moments(values, digits):
    sd = spread(values)
    return {
        "mean": round(statistics.fmean(values), digits),
        "sd": None if sd is None else round(sd, digits),
    }


def mean(values, digits=4):
    return None if None in values else round(statistics.fmean(values), digits)


def build(logs, name, claim="", data_name="", p_value=p_below):
    """The content of record.json, all of it from the logs but for the two free texts and the sum of
    the picture. p_value(losses, target) is the p of a mean below the target. Raises Refused."""
    for text in (claim, data_name):
        if type(text) is not str or not FREE_TEXT.fullmatch(text):
            raise Refused("a claim or data name is at most 200 letters, digits or .,:;()+/*%='&-, "
                          f"not {shown(text)}.")
    refuse_mixed(logs)
    refuse_twice(logs)
    first = logs[0]
    ends = [log.end for log in logs]
    losses = [end["val_loss"] for end in ends]
    p = p_value(losses, first.end["target"])
    tokens_per_s = mean([end["tokens_per_s"] for end in ends])
    return {
        "name": name,
        "date": min(log.run["date"] for log in logs)[:10],
        "claim": claim,
        "data_name": data_name,
        "n": len(logs),
        "target": first.end["target"],
        "loss": moments(losses, 5) | {"p_below_target": p and float(f"{p:.3g}")},
        "time_s": moments([end["train_time_s"] for end in ends], 4),
        "step_avg_ms": mean([end["step_avg_ms"] for end in ends], 3),
        "tokens": first.end["tokens"],
        "tokens_per_s_per_gpu": round(tokens_per_s / first.environment["world_size"]),
        "mfu": mean([end["mfu"] for end in ends]),
        "peak_memory_mib": mean([end["peak_memory_mib"] for end in ends], None),
        "compile_s": mean([end["compile_s"] for end in ends], 1),
        "calibration": {key: mean([log.calibration[key] for log in logs], 2)
                        for key in FACTS["calibration"]},
        "hardware": hardware(logs),
        "code": {"sha256": first.run["code_sha256"], "bytes": first.run["code_bytes"]}
        | files(first),
        "data": {
            "fingerprint": fingerprint(first),
            "val_fingerprint": fingerprint(first, "val "),
            "shards": shards(first),
        },
        "config": claims(first)["config"],
        "stages": first.values("stage"),
        "runs": [summary(i, log) for i, log in enumerate(logs, 1)],
    }


def hardware(logs):
    """What all runs share of the machine, and what may differ as a list of what was seen."""
    environment = logs[0].environment
    models = sorted(set(environment["devices"]))
    facts = {"summary": f"{environment['world_size']} x {' + '.join(models)}"}
    facts |= {key: environment[key] for key in MACHINE}
    for key in ("python", "driver", "cpu"):
        facts[key] = sorted({str(log.environment[key]) for log in logs})
    return facts


def summary(number, log):
    """What record.json says about one run."""
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
    """What a reader of the record should know before believing its headline."""
    found = ["one run only: no deviation, no test"] if record["n"] == 1 else []
    p = record["loss"]["p_below_target"]
    if p is not None and p >= ALPHA:
        found.append(f"a mean loss below the target is not shown at p < {ALPHA} (p = {p:.2g})")
    for run in record["runs"]:
        if not run["reached"]:
            found.append(f"{run['log']}: did not reach the target")
        if not run["git_clean"]:
            tree = "an unknown" if run["git_clean"] is None else "a changed"
            found.append(f"{run['log']}: ran from {tree} git tree "
                         "(the code that ran is in the log)")
        found += [f"{run['log']}: {plain(what)}" for what in run["defects"]]
    return found


def plain(value):
    """Text from a log, safe inside a Markdown table."""
    return re.sub(r"[^\w .,:;()@+/*%='&-]", "?", str(value), flags=re.ASCII)[:200]


def code_text(code):
    """What ran, for the README: the script, and with grammar 2 also the files it imported."""
    text = f"sha256 `{code['sha256'][:16]}`, {code['bytes']:,} bytes"
    if "files" in code:
        files_sha256 = code["files_sha256"][:16]
        text += f"; with what it imports {len(code['files'])} files, sha256 `{files_sha256}`"
    return f"{text}, embedded in each log"


def pm(value, digits, unit=""):
    sd = "" if value["sd"] is None else f" ± {value['sd']:.{digits}f}"
    return f"{value['mean']:.{digits}f}{sd}{unit}"


def p_text(record):
    p = record["loss"]["p_below_target"]
    return "no test" if p is None else f"p = {p:.2g}"


def optional(value, unit=""):
    return "not measured" if value is None else f"{value:,}{unit}"


def block(record):
    """The generated part of a record's README, markers included."""
    facts = [f"| {key} | {text} |" for key, text in rows(record)]
    runs = []
    for run in record["runs"]:
        reached = "yes" if run["reached"] else "no"
        runs.append(f"| [{run['log']}]({run['log']}) | {run['seed']} | {run['loss']:.4f} "
                    f"| {reached} | {run['time_s']:.3f} | {run['step_avg_ms']:.2f} |")
    doubts = [f"- Warning: {text}" for text in warnings(record)]
    if doubts:
        doubts.append("")
    return "\n".join([
        BLOCK[0],
        "| | |",
        "|---|---|",
        *facts,
        "",
        "| log | seed | loss | reached | time (s) | ms a step |",
        "|---|--:|--:|---|--:|--:|",
        *runs,
        "",
        *doubts,
        "![Validation loss over time and over tokens](loss.png)",
        BLOCK[1],
    ])


def rows(r):
    """[(what, text)] of the first table in a record's README"""
    hw = r["hardware"]
    reached = sum(run["reached"] for run in r["runs"])
    speeds = [f"{key} {value:g}" for key, value in r["calibration"].items() if value is not None]
    return [
        ("claim", r["claim"] or "none stated"),
        ("date", r["date"]),
        ("runs", f"{r['n']}, of which {reached} reached the target"),
        ("training time", pm(r["time_s"], 3, " s")),
        ("final validation loss", f"{pm(r['loss'], 4)}, target {r['target']:g} "
         f"({p_text(r)} for a mean below the target, one-sided t test)"),
        ("training tokens", f"{r['tokens']:,} in {r['config']['num_steps']:,} steps of "
         f"{r['step_avg_ms']:.2f} ms"),
        ("throughput", f"{r['tokens_per_s_per_gpu']:,} tokens/s per device, "
         f"MFU {optional(r['mfu'])}"),
        ("memory, compilation", f"{optional(r['peak_memory_mib'], ' MiB')}, "
         f"{optional(r['compile_s'], ' s')} untimed"),
        ("hardware", f"{plain(hw['summary'])}, {hw['hosts']} host(s)"),
        ("versions", plain(
            f"torch {hw['torch']}, CUDA {hw['cuda']}, triton {hw['triton']}, "
            f"Python {' / '.join(hw['python'])}, driver {' / '.join(hw['driver'])}")),
        ("code", code_text(r["code"])),
        ("data", f"{r['data_name'] or 'unnamed'}, {len(r['data']['shards'])} shards, "
         f"fingerprint `{r['data']['fingerprint'][:16]}`"),
        ("host calibration", plain(", ".join(speeds))),
    ]


def between(text, markers, path):
    """(before, the text from marker to marker, after). Raises Refused unless each marker stands
    once, in order."""
    begin, end = markers
    counts = text.count(begin), text.count(end)
    if counts != (1, 1) or text.index(begin) > text.index(end):
        raise Refused(f"{path}: expected {begin} and then {end}, each once, found {counts[0]} and "
                      f"{counts[1]}; write the missing line.")
    first, last = text.index(begin), text.index(end) + len(end)
    return text[:first], text[first:last], text[last:]


def read_text(path):
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        found = f"found another byte at {error.start}"
        raise Refused(f"{path}: expected UTF-8 text, {found}.") from None


def compare_block(path, markers, expected, source="the logs"):
    """Raises Refused, with the first differing line, unless the text between the markers is as
    generated from `source`."""
    before, found, _ = between(read_text(path), markers, path)
    for i, line in enumerate(expected.split("\n")):
        have = (found.split("\n") + [""] * (i + 1))[i]
        if have != line:
            number = before.count("\n") + 1 + i
            fail(path, number, f"{shown(line, 200)} (generated from {source})", have)
    if found != expected:
        raise Refused(f"{path}: expected nothing after the generated lines, before {markers[1]}.")


def folders(root):
    """The folders of all records, sorted."""
    found = (root / "records").glob("*_*")
    return sorted(p for p in found if re.match(r"\d{4}-\d\d-\d\d_", p.name) and p.is_dir())


def log_paths(folder, pattern):
    """Returns the files of a folder whose names match the pattern. Short names come first, so that
    log_2.txt stands before log_10.txt."""
    def place(path):
        return len(path.name), path.name

    return sorted(folder.glob(pattern), key=place)


def load(folder, recompute=True):
    """(logs, stored record.json, record rebuilt from the logs). Without `recompute` the p-value is
    the one in record.json, so that scipy is not needed. Raises Refused."""
    paths = log_paths(folder, "log_*.txt")
    names = [p.name for p in paths]
    if not names or names != [f"log_{i}.txt" for i in range(1, len(names) + 1)]:
        raise Refused(f"{folder}: expected log_1.txt, log_2.txt and so on, found {shown(names)}.")
    logs = [read_log(p) for p in paths]
    refuse_doubtful(logs)
    path = folder / "record.json"
    stored = parse_json(read_text(path), path, 1)
    if type(stored) is not dict:
        fail(path, 1, "an object", stored)
    p_value = p_below
    if not recompute:
        p = stored_p(stored, path)
        p_value = lambda losses, target: p
    texts = (stored.get("claim"), stored.get("data_name"))
    return logs, stored, build(logs, folder.name, *texts, p_value)


def stored_p(stored, path):
    """The p-value in a record.json. Raises Refused if it is none."""
    loss = stored.get("loss")
    p = loss.get("p_below_target") if type(loss) is dict else None
    if p is not None and not (type(p) is float and 0 <= p <= 1):
        fail(path, 1, "loss.p_below_target from 0.0 to 1.0, or null", p)
    return p


def problems(folder, logs, stored, rebuilt, latest):
    """Everything in which a record folder differs from its logs, one sentence each. No run began
    after `latest`."""
    found = []
    numbers = {key: value for key, value in stored.items() if key != PICTURE_SUM}
    if different := first_difference(numbers, rebuilt):
        key, have, expected = different
        found.append(f"{folder / 'record.json'}: expected {shown_key(key)} to be {shown(expected)} "
                     f"(from the logs), found {shown(have)}.")
    if not folder.name.startswith(rebuilt["date"] + "_"):
        found.append(f"{folder}: expected a name that begins with the date of the first run, "
                     f"{rebuilt['date']}_.")
    if not NAME.fullmatch(folder.name[11:]):
        found.append(f"{folder}: expected a name of lower-case letters, digits, _ and - behind the "
                     f"date, found {shown(folder.name[11:])}.")
    for check in (
        lambda: refuse_future(logs, latest),
        lambda: compare_block(folder / "README.md", BLOCK, block(rebuilt)),
        lambda: check_picture(folder, stored),
        lambda: check_evaluation(folder),
    ):
        try:
            check()
        except Refused as error:
            found.append(str(error))
    return found


def check_picture(folder, stored):
    """Raises Refused unless the picture is the one whose sum record.json has. A record from before
    that sum was written needs a whole picture, whichever it is."""
    path = folder / "loss.png"
    if PICTURE_SUM not in stored:
        read_png(path)
        return
    actual = hashlib.sha256(read_bytes(path)).hexdigest()
    if stored[PICTURE_SUM] != actual:
        raise Refused(f"{path}: expected the picture whose sha256 is {PICTURE_SUM} in record.json, "
                      f"{shown(stored[PICTURE_SUM])}, found one of {actual}; put back the one that "
                      "`new` drew.")


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
    `evaluate.py --json` has written, to be kept with them. Returns the folder. Raises Refused."""
    if not NAME.fullmatch(name):
        raise Refused(f"a record's name is lower-case letters, digits, _ and -, not {shown(name)}.")
    distributions()
    plots.figure_class()
    logs = [read_log(path) for path in paths]
    logs.sort(key=lambda log: (log.run["date"], log.run["run_id"]))
    folder = root / "records" / f"{min(log.run['date'] for log in logs)[:10]}_{name}"
    if folder.exists():
        raise Refused(f"{folder}: exists already.")
    refuse_doubtful(logs)
    refuse_future(logs, latest_date(root))
    record = build(logs, folder.name, claim, data_name)
    evaluated = evaluation.block(evaluation.read(results)) if results else None
    refuse_twice([log for other in folders(root) for log in load(other)[0]] + logs)
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new_") as scratch:
        draft = Path(scratch) / folder.name
        draft.mkdir()
        for run, log in zip(record["runs"], logs):
            (draft / run["log"]).write_bytes(log.raw)
        plots.draw_loss(draft / "loss.png", logs, record["target"])
        picture_sum = hashlib.sha256(read_bytes(draft / "loss.png")).hexdigest()
        content = json.dumps(record | {PICTURE_SUM: picture_sum}, indent=1)
        (draft / "record.json").write_text(content + "\n", newline="\n")
        page = SKELETON.format(name=folder.name, block=block(record))
        if evaluated:
            page += f"\n## Evaluation\n\n{evaluated}\n"
            (draft / evaluation.FILE).write_bytes(read_bytes(results))
        (draft / "README.md").write_text(page, "utf-8", newline="\n")
        os.replace(draft, folder)
    return folder
