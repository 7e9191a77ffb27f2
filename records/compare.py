"""Two sides of runs: loss, time, configuration and code, and what of it is more than chance."""
import difflib
import statistics
from pathlib import Path

from .log import SCRIPT, Log, Refused
from .record import ALPHA, machine_name, moments, pm, refuse_mixed, scipy_stats, shards, shared

SHORT_DIFF = 40  # lines


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
        return f"{text}: not significant at {ALPHA}; more seeds would tell"
    return f"{text}: B is {'lower' if difference < 0 else 'higher'}"


def cautions(logs: list[Log]) -> list[str]:
    """What makes the numbers of a side doubtful."""
    found = []
    for log in logs:
        if log.resumed:
            found.append(f"caution: {log.path} is not of a whole run")
        found += [f"caution: {log.path}: {defect['what']}" for defect in log.facts["defect"]]
    try:
        refuse_mixed(logs)
    except Refused as error:
        found.append(f"caution: {error}")
    return found


def code_lines(a: Log, b: Log) -> list[str]:
    """The beginning of the diff of the files that ran, the script first. A file that only one side
    has imported is new, or gone."""
    diff = []
    for path in sorted(a.files.keys() | b.files.keys(), key=lambda path: (path != SCRIPT, path)):
        texts = [log.files.get(path, b"").decode(errors="replace").splitlines() for log in (a, b)]
        diff += difflib.unified_diff(*texts, f"A/{path}", f"B/{path}", lineterm="", n=1)
    lines = ["code:" if diff else "code: the same", *diff[:SHORT_DIFF]]
    if len(diff) > SHORT_DIFF:
        lines.append(f"... {len(diff) - SHORT_DIFF} more lines; `code` gives back the files")
    return lines


def has_ended(log: Log) -> bool:
    return not log.interrupted and log.end.get("val_loss") is not None


def compare(side_a: tuple[Path, list[Log]], side_b: tuple[Path, list[Log]]) -> list[str]:
    """The lines of the report on two sides, each the name and the logs of its runs. All numbers
    are from the logs. Runs without a last validation are left out. Raises Refused if a side has no
    other."""
    lines = []
    sides = []
    for side, (name, logs) in zip("AB", (side_a, side_b)):
        lines += [f"left out: {log.path}: no last validation" for log in logs if not has_ended(log)]
        logs = [log for log in logs if has_ended(log)]
        if not logs:
            raise Refused(f"{name}: no run with a last validation; `plot` shows the others.")
        sides.append(logs)
        losses = [log.end["val_loss"] for log in logs]
        times = [log.end["train_time_s"] for log in logs]
        lines.append(f"{side} = {name}: n = {len(logs)}, loss {pm(moments(losses, 4), 4)}, time "
                     f"{pm(moments(times, 2), 2)} s, {machine_name(logs[0])}")
        lines += cautions(logs)
    a, b = sides
    if machine_name(a[0]) != machine_name(b[0]):
        lines.append("caution: the machines of A and B differ")
    if sorted(shards(a[0]).values()) != sorted(shards(b[0]).values()):  # names do not count
        lines.append("caution: the data of A and B differ")
    for what, unit, key, digits in (("loss", "", "val_loss", 4), ("time", " s", "train_time_s", 3)):
        values = [[log.end[key] for log in logs] for logs in (a, b)]
        lines.append(verdict(what, unit, *values, digits))
    configs = [shared(logs[0])["config"] for logs in (a, b)]
    for key in sorted(configs[0] | configs[1]):
        ours, theirs = (repr(config[key]) if key in config else "no key" for config in configs)
        if ours != theirs:
            lines.append(f"config: {key} is {ours} in A and {theirs} in B")
    return lines + code_lines(a[0], b[0])
