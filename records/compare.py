"""Two records side by side: loss, time, stages, configuration and code, and what of it is
significant."""
import difflib
import statistics

from .log import Refused, read_log, shown, shown_key
from .record import build, claims, first_difference
from .stats import ALPHA, INSTALL, MOST_RUNS, have_scipy, welch

SHORT_DIFF = 40  # lines


def read_runs(path):
    """The logs to compare: those of a record, those of any other folder (*.txt), or one log alone.
    Raises Refused."""
    if not path.is_dir():
        return [read_log(path)]
    pattern = "log_*.txt" if (path / "record.json").exists() else "*.txt"
    paths = sorted(path.glob(pattern), key=lambda p: (len(p.name), p.name))
    if not paths:
        raise Refused(f"{path}: expected logs ({pattern}), found none.")
    return [read_log(p) for p in paths]


def speed_ratio(a, b):
    """Speed of b's host over a's, from their calibrations: geometric mean over bf16 product and
    device copy. None where they share no measurement. Communication is left out: its share of a
    step is not known here."""
    keys = ("bf16_matmul_tflops", "copy_gb_per_s")
    ratios = [b[key] / a[key] for key in keys if a[key] and b[key]]
    return statistics.geometric_mean(ratios) if ratios else None


def hosts(a, b):
    """(factor on b's times, sentence)"""
    ours, theirs = a["hardware"], b["hardware"]
    same = ours["devices"] == theirs["devices"]
    names = "" if same else f" (A: {shown(ours['summary'])}, B: {shown(theirs['summary'])})"
    ratio = speed_ratio(a["calibration"], b["calibration"])
    if ratio is None:
        return 1.0, f"hosts: no calibration in common, so times are compared as they are{names}"
    if same and abs(ratio - 1) <= 0.01:
        return 1.0, (f"hosts: alike (B's calibration is {ratio:.3f} of A's), so times are compared "
                     "as they are")
    rough = "" if same else ": a rough estimate"
    return ratio, (f"hosts: differ{names}; B's calibration (product and copy, geometric mean) is "
                   f"{ratio:.3f} of A's, so B's times below are multiplied by {ratio:.3f}{rough}")


def verdict(what, unit, a, b, digits):
    """Lines on one quantity: difference, interval, effect size, and what would settle it."""
    diff = statistics.fmean(b) - statistics.fmean(a)
    head = f"{what}: B - A = {diff:+.{digits}f}{unit}"
    if min(len(a), len(b)) < 2:
        return [f"{head}; a side with one run has no deviation, so there is no p-value: run each "
                "at least 3 times"]
    if not have_scipy():
        return [f"{head}; left out, as scipy is not installed: interval, effect size and test "
                f"({INSTALL})"]
    w = welch(a, b)
    if w is None:
        return [f"{head}; neither side varies at all, so there is no test"]
    found = [f"{head} (95 % CI {w.low:+.{digits}f} to {w.high:+.{digits}f}), "
             f"Hedges g = {w.g:+.2f} (95 % CI about {w.g_low:+.2f} to {w.g_high:+.2f}), "
             f"Welch t = {w.t:.2f}, df = {w.df:.1f}, p = {w.p:.2g}"]
    unclear = f"  not significant (p >= {ALPHA});"
    if w.p < ALPHA:
        word = "lower" if diff < 0 else "higher"
        found.append(f"  significant (p < {ALPHA}): B is {word} in {what}")
    elif w.more is None:
        found.append(f"{unclear} an effect this small would need more than {MOST_RUNS} runs a "
                     "side: treat A and B as equal")
    else:
        found.append(f"{unclear} about {w.more} more runs a side would settle an effect of this "
                     "size (80 % power); fix their number before looking")
    return found


def stage_times(logs):
    """([mean ms a step of each stage], whether all stage ends are validations, which alone are
    exact)"""
    means = []
    exact = True
    for stage in logs[0].values("stage"):
        spans = []
        for log in logs:
            begin, begin_exact = log.time_at(stage["first_step"])
            end, end_exact = log.time_at(stage["last_step"])
            exact = exact and begin_exact and end_exact
            spans.append((end - begin) / (stage["last_step"] - stage["first_step"]))
        means.append(statistics.fmean(spans))
    return means, exact


def stage_lines(a_logs, b_logs, factor):
    """A line on each stage: the time of a step on both sides, and their ratio."""
    a_ms, a_exact = stage_times(a_logs)
    b_ms, b_exact = stage_times(b_logs)
    b_ms = [ms * factor for ms in b_ms]
    a_stages = a_logs[0].values("stage")
    b_stages = b_logs[0].values("stage")
    lines = []
    for i in range(max(len(a_ms), len(b_ms))):
        sides = [stage_text("A", a_ms, a_stages, i), stage_text("B", b_ms, b_stages, i)]
        if i < min(len(a_ms), len(b_ms)) and a_ms[i]:
            sides.append(f"B / A = {b_ms[i] / a_ms[i]:.4f}")
        lines.append(f"stage {i + 1}: {', '.join(sides)}")
    if not (a_exact and b_exact):
        lines.append("  (a stage ends without a validation: its time is that of a training line, "
                     "not exact)")
    return lines


def stage_text(name, times, stages, i):
    """What one side says about stage i."""
    if i >= len(stages):
        return f"{name} has no such stage"
    stage = stages[i]
    steps = stage["last_step"] - stage["first_step"]
    return f"{name} {times[i]:.2f} ms x {steps} steps of {stage['batch_tokens']:,} tokens"


def config_lines(a, b):
    """A line for each key of the configuration that differs."""
    ours, theirs = claims(a)["config"], claims(b)["config"]
    return [f"config: {shown_key(key)} is {shown(ours.get(key, 'absent'))} in A and "
            f"{shown(theirs.get(key, 'absent'))} in B"
            for key in sorted({*ours, *theirs})
            if key not in ours or key not in theirs or ours[key] != theirs[key]]


def file_diff(path, a, b):
    """The unified diff of one file; `a` or `b` is None where it is absent."""
    sides = []
    for side, content in (("A", a), ("B", b)):
        if content is None:
            sides.append(("/dev/null", []))
        else:
            sides.append((f"{side}/{path}", content.decode(errors="replace").split("\n")))
    (a_name, a_lines), (b_name, b_lines) = sides
    return list(difflib.unified_diff(a_lines, b_lines, a_name, b_name, lineterm=""))


def changed_lines(diff):
    """(lines added, lines removed), not counting the two names at the head of a diff"""
    return tuple(sum(line.startswith(sign) for line in diff[2:]) for sign in "+-")


def code_lines(a, b, whole):
    """The unified diffs of all embedded files, control characters made visible."""
    ours, theirs = a.files, b.files
    diffs = {path: file_diff(path, ours.get(path), theirs.get(path))
             for path in ours | theirs if ours.get(path) != theirs.get(path)}
    if not diffs:
        return ["code: identical"]
    changes = {path: changed_lines(diff) for path, diff in diffs.items()}
    added, removed = map(sum, zip(*changes.values()))
    report = [f"code: {added} lines added, {removed} removed"]
    if len(diffs) > 1:
        report += [f"  {path}: {plus} added, {minus} removed"
                   for path, (plus, minus) in changes.items()]
    lines = [line for diff in diffs.values() for line in diff]
    head = lines if whole else lines[:SHORT_DIFF]
    for line in head:
        report.append("".join(c if c.isprintable() or c == "\t" else "?" for c in line))
    if len(head) < len(lines):
        report.append(f"... {len(lines) - len(head)} more lines of diff (--diff shows all)")
    return report


def target_text(target):
    return "none" if target is None else f"{target:g}"


def not_whole(logs):
    """Why runs are none that a record may have, a sentence each."""
    found = []
    for log in logs:
        if log.interrupted or log.resumed:
            word = "interrupted" if log.interrupted else "resumed"
            found.append(f"caution: {log.path} was {word}, so its time and loss are not those of a "
                         "whole run")
    return found


def compare(a_logs, b_logs, names, whole_diff=False):
    """The lines of the report, all numbers from the logs. Raises Refused if a side mixes runs."""
    logs = [*a_logs, *b_logs]
    for log in logs:
        if log.end["val_loss"] is None:
            raise Refused(f"{log.path}: expected a validation to compare, found val_loss: null; "
                          "`plot` shows such a run.")
    sides = [build(side, name, p_value=lambda losses, target: None)
             for side, name in zip((a_logs, b_logs), names)]
    a, b = sides
    lines = []
    for side, r in (("A", a), ("B", b)):
        lines.append(f"{side} = {r['name']}: n = {r['n']}, loss {r['loss']['mean']:.4f}, "
                     f"time {r['time_s']['mean']:.2f} s, target {target_text(r['target'])}, "
                     f"{shown(r['hardware']['summary'])}")
    lines += not_whole(logs)
    factor, sentence = hosts(a, b)
    lines.append(sentence)
    for what, x, y in (
        ("validation data", a["data"]["val_fingerprint"], b["data"]["val_fingerprint"]),
        ("validation tokens", a["config"]["val_tokens"], b["config"]["val_tokens"]),
        ("targets", a["target"], b["target"]),
    ):
        if x != y:
            lines.append(f"caution: the {what} differ ({shown(x, 20)} and {shown(y, 20)}); "
                         "losses and times are not of one task")
    losses = [[log.end["val_loss"] for log in side] for side in (a_logs, b_logs)]
    times = [[log.end["train_time_s"] for log in side] for side in (a_logs, b_logs)]
    times[1] = [seconds * factor for seconds in times[1]]
    lines += verdict("loss", "", *losses, 4)
    lines += verdict("time", " s", *times, 3)
    if not not_whole(logs):
        lines += stage_lines(a_logs, b_logs, factor)
    if found := first_difference(a["data"]["shards"], b["data"]["shards"]):
        key, ours, theirs = found
        lines.append(f"data: {shown_key(key)} is {shown(ours)} in A and {shown(theirs)} in B")
    lines += config_lines(a_logs[0], b_logs[0])
    return lines + code_lines(a_logs[0], b_logs[0], whole_diff)
