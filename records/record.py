"""The folder of a record: made from logs (`new`), and compared with them (`problems`).

    records/DATE_NAME/
        log_1.txt, log_2.txt ...  the logs; those after the first one without their code, if it is
                                  the same (`log.shorten`)
        record.json               what follows from them (`build`), and two free texts
        README.md                 a table made from record.json, and what its author writes
        loss.png                  the losses over time and tokens
"""
import json
import statistics
from pathlib import Path

from . import plots
from .log import PER_RUN, Log, Refused, machine_name, read_logs, sha256, shorten

RECORDS = Path(__file__).parent
ALPHA = 0.01  # what the field calls significant
MACHINE = ("devices", "world_size", "hosts", "torch", "cuda", "triton")  # equal in all runs
BLOCK = ("<!-- record:begin -->", "<!-- record:end -->")


def folders() -> list[Path]:
    """All records."""
    return sorted(path.parent for path in RECORDS.glob("*/record.json"))


# --------------------------------------------------------------------------------------------------
# What runs have in common, and their statistics


def shared(log: Log) -> dict:
    """What all runs of a record have in common. `data` has the sum of each shard."""
    data = {f"{shard['split']} {shard['name']}": shard["sha256"] for shard in log.facts["data"]}
    config = {key: value for key, value in log.config.items() if key not in PER_RUN}
    machine = {key: log.environment[key] for key in MACHINE}
    code = {path: sha256(content) for path, content in log.files.items()}
    return dict(code=code, data=data, config=config, machine=machine)


def differing(a: dict, b: dict) -> list[str]:
    """The keys that do not have the same value in both."""
    return [key for key in sorted(a | b) if a.get(key) != b.get(key)]


def refuse_mixed(logs: list[Log]) -> None:
    """Raises Refused unless all runs have one code, data, configuration and machine, and each a
    seed of its own: otherwise they do not say how much runs of one kind differ."""
    first = shared(logs[0])
    for log in logs[1:]:
        for what, ours in shared(log).items():
            for key in differing(first[what], ours):
                raise Refused(
                    f"runs of one kind have one {what}, but {key} is {first[what].get(key)!r} in "
                    f"{logs[0].path} and {ours.get(key)!r} in {log.path}.")
    seeds = [log.config["seed"] for log in logs]
    if len(set(seeds)) < len(seeds):
        raise Refused(f"runs of one kind have different seeds, not {seeds}; the first one is "
                      f"{logs[0].path}.")


def moments(values: list[float], digits: int) -> dict:
    """Mean and sample deviation, which a single value does not have."""
    sd = round(statistics.stdev(values), digits) if len(values) > 1 else None
    return dict(mean=round(statistics.fmean(values), digits), sd=sd)


def pm(value: dict, digits: int) -> str:
    """Mean and deviation as text."""
    text = f"{value['mean']:.{digits}f}"
    return text if value["sd"] is None else f"{text} ± {value['sd']:.{digits}f}"


def p_below(values: list[float], target: float) -> float | None:
    """One-sided p of "the true mean is below the target" by Student's t test, or None where there
    is no deviation to judge by."""
    if len(set(values)) == 1:
        return None
    from scipy import stats  # of requirements-dev.txt
    p = stats.ttest_1samp(values, target, alternative="less").pvalue
    return float(f"{p:.3g}")


def p_text(record: dict) -> str:
    p = record["loss"]["p_below_target"]
    return "no test" if p is None else f"p = {p:.2g}"


# --------------------------------------------------------------------------------------------------
# What is written


def build(logs: list[Log], name: str, claim: str, data_name: str) -> dict:
    """The content of record.json. All of it follows from the logs, but for the two free texts."""
    for log in logs:
        if log.interrupted or log.resumed or log.end["target"] is None:
            raise Refused(f"{log.path}: a record needs runs to a target that were neither "
                          "interrupted nor resumed.")
    refuse_mixed(logs)
    first = logs[0]
    losses = [log.end["val_loss"] for log in logs]
    target = first.end["target"]
    runs = []
    for number, log in enumerate(logs, 1):
        runs.append(dict(
            log=f"log_{number}.txt", log_sha256=sha256(log.raw), run_id=log.run["run_id"],
            seed=log.config["seed"], loss=log.end["val_loss"],
            time_s=log.end["train_time_s"], reached=log.end["reached"],
            git_commit=log.run["git_commit"],
            defects=[defect["what"] for defect in log.facts["defect"]]))
    validation = [shard["sha256"] for shard in first.facts["data"] if shard["split"] == "val"]
    return dict(
        name=name, date=min(log.run["date"] for log in logs)[:10], claim=claim,
        data_name=data_name, n=len(logs), target=target,
        loss=moments(losses, 5) | dict(p_below_target=p_below(losses, target)),
        time_s=moments([log.end["train_time_s"] for log in logs], 4),
        tokens=first.end["tokens"], num_steps=first.config["num_steps"],
        val_tokens=first.config["val_tokens"], val_sha256=sorted(validation),
        peak_memory_mib=max(log.end.get("peak_memory_mib") or 0 for log in logs) or None,
        machine=machine_name(first.environment, first.config),
        versions={key: first.environment[key] for key in MACHINE[3:]},
        preset=first.config.get("preset", ""), code_sha256=first.run["code_sha256"], runs=runs)


def block(record: dict) -> str:
    """The part of a record's README that is made from record.json, with its markers."""
    versions = record["versions"].items()
    reached = [run for run in record["runs"] if run["reached"]]
    memory = record["peak_memory_mib"]
    rows = {
        "claim": record["claim"] or "none stated",
        "date": record["date"],
        "runs": f"{record['n']}, of which {len(reached)} reached the target",
        "training time": f"{pm(record['time_s'], 3)} s",
        "final validation loss": f"{pm(record['loss'], 4)}, target {record['target']} "
                                 f"({p_text(record)} for a mean below it)",
        "training tokens": f"{record['tokens']:,} in {record['num_steps']:,} steps",
        "machine": record["machine"],
        "peak memory": f"{memory:,} MiB of each GPU" if memory else "not measured",
        "versions": ", ".join(f"{key} {value}" for key, value in versions),
        "data": record["data_name"] or "unnamed",
        "code": f"sha256 `{record['code_sha256'][:16]}`, in the first log",
    }
    lines = [BLOCK[0], "| | |", "|---|---|"]
    lines += [f"| {what} | {text} |" for what, text in rows.items()]
    lines += ["", "| log | seed | loss | time (s) |", "|---|--:|--:|--:|"]
    for run in record["runs"]:
        lines.append(f"| [{run['log']}]({run['log']}) | {run['seed']} | {run['loss']:.4f} "
                     f"| {run['time_s']:.3f} |")
    for run in record["runs"]:
        lines += [f"\nDefect in {run['log']}: {what}" for what in run["defects"]]
    lines += ["", "![Validation loss over time and over tokens](loss.png)", BLOCK[1]]
    return "\n".join(lines)


def with_block(text: str, markers: tuple[str, str], new: str) -> str:
    """The text with `new` in place of what stands from one marker to the other, or at the end if
    it has no markers."""
    begin, end = markers
    return text.partition(begin)[0] + new + text.partition(end)[2]


def new(name: str, logs: list[Log], claim: str, data_name: str) -> Path:
    """Makes records/DATE_NAME from these logs. Raises OSError, and Refused before it has written
    anything."""
    folder = RECORDS / f"{min(log.run['date'] for log in logs)[:10]}_{name}"
    record = build(logs, folder.name, claim, data_name)
    picture = plots.curves(logs)
    folder.mkdir()
    (folder / "log_1.txt").write_bytes(logs[0].raw)
    for number, log in enumerate(logs[1:], 2):
        (folder / f"log_{number}.txt").write_bytes(shorten(log.raw, "log_1.txt"))
    picture.savefig(folder / "loss.png")
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    (folder / "README.md").write_text(
        f"# {folder.name}\n\n{block(record)}\n\n## What is new\n\n"
        "Write here what changed, why it helps, and which runs show it.\n", "utf-8")
    return folder


def stored_in(folder: Path) -> dict:
    """What record.json holds."""
    return json.loads((folder / "record.json").read_text("utf-8"))


def problems(folder: Path) -> list[str]:
    """What of the record does not follow from its logs, a sentence each."""
    try:
        stored = stored_in(folder)
        logs = read_logs(folder)
        rebuilt = build(logs, folder.name, stored["claim"], stored["data_name"])
        text = (folder / "README.md").read_text("utf-8")
        rewritten = with_block(text, BLOCK, block(rebuilt))
    except (ValueError, OSError, LookupError) as error:
        return [f"{folder.name}: {error}"]
    found = [f"{folder.name}/record.json: {key} is {stored.get(key)!r}, but by the logs {value!r}"
             for key, value in rebuilt.items() if stored.get(key) != value]
    if text != rewritten:
        found.append(f"{folder.name}/README.md: its table is not that of the logs")
    return found
