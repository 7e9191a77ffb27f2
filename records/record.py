"""The folder of a record: made from logs (`new`), and read back (`read`); and the leaderboard.

    records/DATE_NAME/
        log_1.txt, log_2.txt ...  the logs; those after the first one without their code
                                  (`log.shorten`)
        record.json               two free texts: a claim, and what the data are called
        README.md                 a table of what follows from the logs (`block`), and what its
                                  author writes
"""
import json
import statistics
from pathlib import Path

from .log import PER_RUN, Log, machine_name, read_logs, sha256, shorten

RECORDS = Path(__file__).parent
ALPHA = 0.01  # what the field calls significant
VERSIONS = ("torch", "cuda", "triton")
MACHINE = ("devices", "world_size", "hosts", *VERSIONS)  # equal in all runs
CPU_MACHINE = (*MACHINE, "cpu", "threads")  # without GPUs these count, too


def folders() -> list[Path]:
    """All records."""
    return sorted(path.parent for path in RECORDS.glob("*/record.json"))


def shared(log: Log) -> dict:
    """What all runs of a record have in common. `data` has the sum of each shard."""
    data = {f"{shard['split']} {shard['name']}": shard["sha256"] for shard in log.facts["data"]}
    config = {key: value for key, value in log.config.items() if key not in PER_RUN}
    keys = CPU_MACHINE if "CPU" in log.environment["devices"] else MACHINE
    machine = {key: log.environment[key] for key in keys if key in log.environment}
    code = {path: sha256(content)[:12] for path, content in log.files.items()}
    return dict(code=code, data=data, config=config, machine=machine)


def differing(a: dict, b: dict) -> list[str]:
    """The keys that do not have the same value in both."""
    return [key for key in sorted(a | b) if a.get(key) != b.get(key)]


def refuse_mixed(logs: list[Log]) -> None:
    """Raises ValueError unless all runs have one code, data, configuration and machine, and each a
    seed of its own: otherwise they do not say how much runs of one kind differ."""
    first = shared(logs[0])
    for log in logs[1:]:
        for what, ours in shared(log).items():
            for key in differing(first[what], ours):
                raise ValueError(
                    f"runs of one kind have one {what}, but {key} is {first[what].get(key)!r} in "
                    f"{logs[0].path} and {ours.get(key)!r} in {log.path}; put logs of each kind "
                    "into a folder of their own.")
    seeds = [log.config["seed"] for log in logs]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"runs of one kind have a seed each; these have {seeds}, from "
                         f"{logs[0].path} on; leave out logs with a seed that another one has.")


def scipy_stats():
    """The module scipy.stats, which training does not need. Raises ValueError without scipy."""
    try:
        from scipy import stats
    except ModuleNotFoundError:
        raise ValueError("statistics need scipy: pip install scipy") from None
    return stats


def pm(values: list[float], digits: int) -> str:
    """Mean and sample deviation as text. A single value has no deviation."""
    moments = [statistics.fmean(values)]
    if len(values) > 1:
        moments.append(statistics.stdev(values))
    return " ± ".join(f"{moment:.{digits}f}" for moment in moments)


class Record:
    """What follows from logs, with two free texts. Raises ValueError if a run has no place here."""

    def __init__(self, name: str, logs: list[Log], claim: str, data_name: str):
        for log in logs:
            for fault, is_so in (("was interrupted or has no end", log.interrupted),
                                 ("was resumed", log.config.get("resume")),
                                 ("has no target (--target_loss)", not log.end.get("target"))):
                if is_so:
                    raise ValueError(f"{log.path}: a run that {fault} has no place in a record; "
                                     "leave it out.")
        refuse_mixed(logs)
        self.name = name  # DATE_NAME
        self.logs = logs
        self.claim = claim
        self.data_name = data_name
        self.losses = [log.end["val_loss"] for log in logs]
        self.times = [log.end["train_time_s"] for log in logs]
        self.target = logs[0].end["target"]
        self.p = None  # of "the true mean loss is below the target", by Student's t test
        if len(set(self.losses)) > 1:  # else there is no deviation to judge by
            self.p = scipy_stats().ttest_1samp(self.losses, self.target, alternative="less").pvalue
        self.p_text = "no test" if self.p is None else f"p = {self.p:.2g}"
        self.machine = machine_name(logs[0].environment, logs[0].config)


def block(record: Record) -> str:
    """The part of a record's README that follows from it, with markers around."""
    logs = record.logs
    first = logs[0]
    reached = sum(log.end["reached"] for log in logs)
    memory = max(log.end.get("peak_memory_mib") or 0 for log in logs)
    rows = {
        "claim": record.claim or "none stated",
        "date": record.name[:10],
        "runs": f"{len(logs)}, of which {reached} reached the target",
        "training time": f"{pm(record.times, 3)} s",
        "final validation loss": f"{pm(record.losses, 4)}, target {record.target} "
                                 f"({record.p_text} for a mean below it)",
        "training tokens": f"{first.end['tokens']:,} in {first.config['num_steps']:,} steps",
        "machine": record.machine,
        "peak memory": f"{memory:,} MiB of each GPU" if memory else "not measured",
        "versions": ", ".join(f"{key} {first.environment[key]}" for key in VERSIONS),
        "data": record.data_name or "unnamed",
        "code": f"sha256 `{first.run['code_sha256'][:16]}`, in the first log",
    }
    lines = ["<!-- record:begin -->", "| | |", "|---|---|"]
    lines += [f"| {what} | {text} |" for what, text in rows.items()]
    lines += ["", "| log | seed | loss | time (s) |", "|---|--:|--:|--:|"]
    defects = []
    for number, log in enumerate(logs, 1):
        file = f"log_{number}.txt"
        lines.append(f"| [{file}]({file}) | {log.config['seed']} | {log.end['val_loss']:.4f} "
                     f"| {log.end['train_time_s']:.3f} |")
        defects += [f"\nDefect in {file}: {defect['what']}" for defect in log.facts["defect"]]
    return "\n".join([*lines, *defects, "<!-- record:end -->"])


def new(name: str, logs: list[Log], claim: str, data_name: str) -> Path:
    """Makes records/DATE_NAME from logs. Raises ValueError before it writes, and OSError."""
    date = min(log.run["date"] for log in logs)[:10]
    folder = RECORDS / f"{date}_{name}"
    record = Record(folder.name, logs, claim, data_name)
    if folder.exists():
        raise ValueError(f"{folder} is there already; choose another name.")
    folder.mkdir()
    (folder / "log_1.txt").write_bytes(logs[0].raw)
    for number, log in enumerate(logs[1:], 2):
        (folder / f"log_{number}.txt").write_bytes(shorten(log.raw, "log_1.txt"))
    texts = dict(claim=claim, data_name=data_name)
    (folder / "record.json").write_text(json.dumps(texts, indent=1) + "\n", "utf-8")
    (folder / "README.md").write_text(
        f"# {folder.name}\n\n{block(record)}\n\n## What is new\n\n"
        "Write here what changed, why it helps, and which runs show it.\n", "utf-8")
    return folder


def read(folder: Path) -> Record:
    """The record of a folder. Raises OSError and ValueError if it is damaged."""
    try:
        texts = json.loads((folder / "record.json").read_text("utf-8"))
        record = Record(
            folder.name, read_logs(folder), texts["claim"], texts["data_name"])
        page = (folder / "README.md").read_text("utf-8")
    except (ValueError, LookupError) as error:
        raise ValueError(f"{folder.name}: {error}") from None
    if block(record) not in page:
        raise ValueError(f"{folder.name}: the table in its README.md is not that of its logs and "
                         "its record.json.")
    return record


def with_leaderboard(page: str, records: list[Record]) -> str:
    """The page records/README.md with the leaderboard, and below it the records without a rank."""
    begin = "<!-- leaderboard:begin -->"
    end = "<!-- leaderboard:end -->"
    lines = [begin, "| record | time (s) | loss | n | target | machine | data |",
             "|---|--:|---|--:|--:|---|---|"]
    others = []
    for record in sorted(records, key=lambda record: (
            record.data_name, record.machine, record.target, statistics.fmean(record.times))):
        link = f"[{record.name[11:]}]({record.name})"
        if record.p is None or record.p >= ALPHA:
            others.append(link)
            continue
        lines.append(f"| {link} | {pm(record.times, 2)} | {pm(record.losses, 4)} "
                     f"({record.p_text}) | {len(record.logs)} | {record.target} "
                     f"| {record.machine} | {record.data_name or 'unnamed'} |")
    if others:
        lines += ["", f"Without a rank: {', '.join(others)}."]
    return page.partition(begin)[0] + "\n".join([*lines, end]) + page.partition(end)[2]
