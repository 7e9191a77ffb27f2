"""Two sides of runs: loss, time, configuration and code, and what of it is more than chance."""
import statistics
from pathlib import Path

from .log import machine_name, read_logs
from .record import ALPHA, differing, pm, refuse_mixed, scipy_stats, shared


def verdict(what: str, unit: str, a: list[float], b: list[float], digits: int) -> str:
    """One line on the difference of a quantity between the runs of both sides."""
    difference = statistics.fmean(b) - statistics.fmean(a)
    head = f"{what}: B - A = {difference:+.{digits}f}{unit}"
    if min(len(a), len(b)) < 2 or len(set(a)) == len(set(b)) == 1:
        return f"{head}; no test: it needs two runs or more on each side, with some deviation"
    test = scipy_stats().ttest_ind(b, a, equal_var=False)
    interval = test.confidence_interval(0.95)
    text = (f"{head} (95 % from {interval.low:+.{digits}f} to {interval.high:+.{digits}f}, "
            f"Welch's p = {test.pvalue:.2g})")
    if test.pvalue >= ALPHA:
        return f"{text}: not significant at {ALPHA}"
    return f"{text}: B is {'lower' if difference < 0 else 'higher'}"


def compare(side_a: Path, side_b: Path) -> list[str]:
    """The lines of the report on two sides, each a log or a folder of logs. Runs that were
    interrupted are left out. Raises ValueError if a side has no other, or runs of several kinds."""
    lines = []
    sides = []
    for side, path in (("A", side_a), ("B", side_b)):
        logs = read_logs(path)
        lines += [f"left out, as it was interrupted or has no end: {log.path}"
                  for log in logs if log.interrupted]
        logs = [log for log in logs if not log.interrupted]
        if not logs:
            raise ValueError(f"{path}: no run has come to its end.")
        refuse_mixed(logs)
        sides.append(logs)
        losses = pm([log.end["val_loss"] for log in logs], 4)
        times = pm([log.end["train_time_s"] for log in logs], 2)
        machine = machine_name(logs[0].environment, logs[0].config)
        lines.append(f"{side} = {path}: n = {len(logs)}, loss {losses}, time {times} s, {machine}")
        for log in logs:
            lines += [f"caution: {log.path}: {defect['what']}" for defect in log.facts["defect"]]
            if log.config.get("resume"):
                lines.append(f"caution: {log.path} was resumed, perhaps on another machine")
    for what, unit, key, digits in (("loss", "", "val_loss", 4), ("time", " s", "train_time_s", 3)):
        values = [[log.end[key] for log in logs] for logs in sides]
        lines.append(verdict(what, unit, *values, digits))
    a, b = (shared(logs[0]) for logs in sides)
    for what in ("machine", "config"):
        for key in differing(a[what], b[what]):
            lines.append(f"{what}: {key} is {a[what].get(key)!r} in A and "
                         f"{b[what].get(key)!r} in B")
    if sorted(a["data"].values()) != sorted(b["data"].values()):  # names do not count
        lines.append("caution: the data of A and B differ")
    files = differing(a["code"], b["code"])
    if files:
        lines.append(f"code: another {', '.join(files)}; `python -m records code` writes the files")
    else:
        lines.append("code: the same")
    return lines
