"""A record folder: what is computed from its logs, how it is written, and how it is checked."""
import hashlib
import json
import os
import re
import statistics
import tempfile
from pathlib import Path

from . import plots
from .log import FACTS, Refused, fail, parse_json, read_bytes, read_log, shown
from .stats import ALPHA, p_below, spread

# keys of the config that may differ between the runs of one record; the data are compared by fingerprint
PER_RUN = {"seed", "run_name", "log_dir", "jsonl", "data_dir", "save_checkpoint", "load_checkpoint", "sample",
           "sample_tokens"}
MACHINE = ("devices", "world_size", "hosts", "torch", "cuda", "triton")  # the rest of environment may differ
BLOCK = ("<!-- record:begin -->", "<!-- record:end -->")
FREE_TEXT = re.compile(r"[\w .,:;()+/*%='&-]{0,200}")  # claim and data name go into Markdown tables
SKELETON = """# {name}

{block}

## What is new

Write here what changed, why it helps, and which runs show it.
Everything between the two comments above is generated; `python -m records check` compares it with the logs.
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
        return next(filter(None, (first_difference(x, y, f"{key}[{i}]") for i, (x, y) in enumerate(zip(a, b)))), None)
    return None if type(a) is type(b) and a == b else (key.lstrip("."), a, b)


def shards(log):
    return {f"{s['split']} {s['name']}": {"tokens": s["tokens"], "sha256": s["sha256"]}
            for s in sorted(log.values("data"), key=lambda s: (s["split"], s["name"]))}


def fingerprint(log, split=""):
    """sha256 over the sorted names, token counts and fingerprints of the shards (of one split)."""
    text = "".join(f"{key} {s['tokens']} {s['sha256']}\n" for key, s in shards(log).items() if key.startswith(split))
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
    """Raises Refused, naming the first difference, unless all logs are runs of one code, data, config and machine."""
    a = logs[0]
    for b in logs[1:]:
        if found := first_difference(claims(a), claims(b)):
            raise Refused(f"one record needs one code, data, config and hardware, but {found[0]} is "
                          f"{shown(found[1])} in {a.path} and {shown(found[2])} in {b.path}.")
        x, y = a.end, b.end  # mfu x time is the FLOPs of one run, the same in every run
        if (x["mfu"] is None) != (y["mfu"] is None) or x["mfu"] is not None and (
                abs(x["mfu"] * x["train_time_s"] - y["mfu"] * y["train_time_s"])
                > 0.000051 * (x["train_time_s"] + y["train_time_s"]) + 0.00051 * (x["mfu"] + y["mfu"])):
            raise Refused(f"mfu x train_time_s must agree between runs, but mfu is {x['mfu']} at {x['train_time_s']} s "
                          f"in {a.path} and {y['mfu']} at {y['train_time_s']} s in {b.path}.")


def refuse_twice(logs):
    """Raises Refused if one run stands twice among the logs, be it under a new name or a new id."""
    seen = {}
    for log in logs:
        for what, value in (("bytes", log.sha256), ("run_id", log.run["run_id"]), ("step times", log.times_sha256)):
            if (what, value) in seen:
                raise Refused(f"{log.path}: expected each run once, found the same {what} as in {seen[what, value]}.")
            seen[what, value] = log.path


def moments(values, digits):
    sd = spread(values)
    return {"mean": round(statistics.fmean(values), digits), "sd": None if sd is None else round(sd, digits)}


def mean(values, digits=4):
    return None if None in values else round(statistics.fmean(values), digits)


def build(logs, name, claim="", data_name=""):
    """The content of record.json, all of it from the logs but for the two free texts. Raises Refused."""
    for text in (claim, data_name):
        if type(text) is not str or not FREE_TEXT.fullmatch(text):
            raise Refused(f"a claim or data name is at most 200 letters, digits or .,:;()+/*%='&-, not {shown(text)}.")
    refuse_mixed(logs)
    refuse_twice(logs)
    first, ends = logs[0], [log.end for log in logs]
    environment, losses = first.environment, [end["val_loss"] for end in ends]
    p = p_below(losses, first.end["target"])
    loose = {k: sorted({str(log.environment[k]) for log in logs}) for k in ("python", "driver", "cpu")}
    models = sorted(set(environment["devices"]))
    return {
        "name": name, "date": min(log.run["date"] for log in logs)[:10], "claim": claim, "data_name": data_name,
        "n": len(logs), "target": first.end["target"],
        "loss": moments(losses, 5) | {"p_below_target": p and float(f"{p:.3g}")},
        "time_s": moments([end["train_time_s"] for end in ends], 4),
        "step_avg_ms": mean([end["step_avg_ms"] for end in ends], 3),
        "tokens": first.end["tokens"],
        "tokens_per_s_per_gpu": round(mean([e["tokens_per_s"] for e in ends]) / environment["world_size"]),
        "mfu": mean([end["mfu"] for end in ends]),
        "peak_memory_mib": mean([end["peak_memory_mib"] for end in ends], None),
        "compile_s": mean([end["compile_s"] for end in ends], 1),
        "calibration": {k: mean([log.calibration[k] for log in logs], 2) for k in FACTS["calibration"]},
        "hardware": {"summary": f"{environment['world_size']} x {' + '.join(models)}"}
        | {k: environment[k] for k in MACHINE} | loose,
        "code": {"sha256": first.run["code_sha256"], "bytes": first.run["code_bytes"]}
        | files(first),
        "data": {"fingerprint": fingerprint(first), "val_fingerprint": fingerprint(first, "val "),
                 "shards": shards(first)},
        "config": claims(first)["config"], "stages": first.values("stage"),
        "runs": [{"log": f"log_{i}.txt", "log_sha256": log.sha256, "run_id": log.run["run_id"],
                  "date": log.run["date"], "seed": log.config["seed"], "loss": log.end["val_loss"],
                  "reached": log.end["reached"], "time_s": log.end["train_time_s"],
                  "step_avg_ms": log.end["step_avg_ms"], "git_commit": log.run["git_commit"],
                  "git_clean": log.run["git_clean"], "defects": [d["what"] for d in log.values("defect")]}
                 for i, log in enumerate(logs, 1)],
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
            found.append(f"{run['log']}: ran from {'an unknown' if run['git_clean'] is None else 'a changed'} git tree "
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
    r, hw = record, record["hardware"]
    rows = [
        ("claim", r["claim"] or "none stated"), ("date", r["date"]),
        ("runs", f"{r['n']}, of which {sum(run['reached'] for run in r['runs'])} reached the target"),
        ("training time", pm(r["time_s"], 3, " s")),
        ("final validation loss", f"{pm(r['loss'], 4)}, target {r['target']:g} "
                                  f"({p_text(r)} for a mean below the target, one-sided t test)"),
        ("training tokens", f"{r['tokens']:,} in {r['config']['num_steps']:,} steps of {r['step_avg_ms']:.2f} ms"),
        ("throughput", f"{r['tokens_per_s_per_gpu']:,} tokens/s per device, MFU {optional(r['mfu'])}"),
        ("memory, compilation", f"{optional(r['peak_memory_mib'], ' MiB')}, {optional(r['compile_s'], ' s')} untimed"),
        ("hardware", f"{plain(hw['summary'])}, {hw['hosts']} host(s)"),
        ("versions", plain(f"torch {hw['torch']}, CUDA {hw['cuda']}, triton {hw['triton']}, "
                           f"Python {' / '.join(hw['python'])}, driver {' / '.join(hw['driver'])}")),
        ("code", code_text(r["code"])),
        ("data", f"{r['data_name'] or 'unnamed'}, {len(r['data']['shards'])} shards, "
                 f"fingerprint `{r['data']['fingerprint'][:16]}`"),
        ("host calibration", plain(", ".join(f"{k} {v:g}" for k, v in r["calibration"].items() if v is not None))),
    ]
    runs = [f"| [{run['log']}]({run['log']}) | {run['seed']} | {run['loss']:.4f} | {'yes' if run['reached'] else 'no'} "
            f"| {run['time_s']:.3f} | {run['step_avg_ms']:.2f} |" for run in r["runs"]]
    return "\n".join([BLOCK[0], "| | |", "|---|---|", *(f"| {key} | {text} |" for key, text in rows), "",
                      "| log | seed | loss | reached | time (s) | ms a step |", "|---|--:|--:|---|--:|--:|", *runs, "",
                      *(f"- Warning: {text}" for text in warnings(r)), *([""] if warnings(r) else []),
                      "![Validation loss over time and over tokens](loss.png)", BLOCK[1]])


def between(text, markers, path):
    """(before, the text from marker to marker, after). Raises Refused unless each marker stands once, in order."""
    if not (text.count(markers[0]) == text.count(markers[1]) == 1 and text.index(markers[0]) < text.index(markers[1])):
        raise Refused(f"{path}: expected {markers[0]} and then {markers[1]}, each once.")
    start, end = text.index(markers[0]), text.index(markers[1]) + len(markers[1])
    return text[:start], text[start:end], text[end:]


def read_text(path):
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise Refused(f"{path}: expected UTF-8 text, found a byte that is not at {error.start}.") from None


def compare_block(path, markers, expected):
    """Raises Refused, with the first differing line, unless the text between the markers is as generated."""
    before, found, _ = between(read_text(path), markers, path)
    for i, line in enumerate(expected.split("\n")):
        have = (found.split("\n") + [""] * (i + 1))[i]
        if have != line:
            fail(path, before.count("\n") + 1 + i, f"{shown(line, 200)} (generated from the logs)", have)
    if found != expected:
        raise Refused(f"{path}: expected nothing after the generated lines, before {markers[1]}.")


def folders(root):
    return sorted(p for p in (root / "records").glob("*_*") if re.match(r"\d{4}-\d\d-\d\d_", p.name) and p.is_dir())


def load(folder):
    """(logs, stored record.json, record rebuilt from the logs). Raises Refused."""
    paths = sorted(folder.glob("log_*.txt"), key=lambda p: (len(p.name), p.name))
    if not paths or [p.name for p in paths] != [f"log_{i}.txt" for i in range(1, len(paths) + 1)]:
        raise Refused(f"{folder}: expected log_1.txt, log_2.txt and so on, found {shown([p.name for p in paths])}.")
    logs = [read_log(p) for p in paths]
    path = folder / "record.json"
    stored = parse_json(read_text(path), path, 1)
    if type(stored) is not dict:
        fail(path, 1, "an object", stored)
    return logs, stored, build(logs, folder.name, stored.get("claim"), stored.get("data_name"))


def problems(folder, stored, rebuilt):
    """Everything in which a record folder differs from its logs, one sentence each."""
    found = []
    if different := first_difference(stored, rebuilt):
        key, have, expected = different
        found.append(f"{folder / 'record.json'}: expected {key} to be {shown(expected)} (from the logs), "
                     f"found {shown(have)}.")
    if not folder.name.startswith(rebuilt["date"] + "_"):
        found.append(f"{folder}: expected a name that begins with the date of the first run, {rebuilt['date']}_.")
    try:
        compare_block(folder / "README.md", BLOCK, block(rebuilt))
        if read_bytes(folder / "loss.png")[:8] != b"\x89PNG\r\n\x1a\n":
            raise Refused(f"{folder / 'loss.png'}: expected a PNG picture.")
    except Refused as error:
        found.append(str(error))
    return found


def new(root, name, paths, claim="", data_name=""):
    """Writes records/DATE_NAME from the logs, all of it or nothing. Returns the folder. Raises Refused."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,60}", name):
        raise Refused(f"a record's name is lower-case letters, digits, _ and -, not {shown(name)}.")
    logs = sorted((read_log(p) for p in paths), key=lambda log: (log.run["date"], log.run["run_id"]))
    folder = root / "records" / f"{min(log.run['date'] for log in logs)[:10]}_{name}"
    if folder.exists():
        raise Refused(f"{folder}: exists already.")
    record = build(logs, folder.name, claim, data_name)
    refuse_twice([log for other in folders(root) for log in load(other)[0]] + logs)
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new_") as scratch:
        draft = Path(scratch) / folder.name
        draft.mkdir()
        for run, log in zip(record["runs"], logs):
            (draft / run["log"]).write_bytes(log.raw)
        (draft / "record.json").write_text(json.dumps(record, indent=1) + "\n", newline="\n")
        (draft / "README.md").write_text(SKELETON.format(name=folder.name, block=block(record)), "utf-8", newline="\n")
        plots.draw_loss(draft / "loss.png", logs, record["target"])
        os.replace(draft, folder)
    return folder
