"""Two records side by side: loss, time, stages, configuration and code, and what of it is
significant. One record is called A in the report, the other one B."""
import difflib
import statistics

from .log import Refused, read_log, shown, shown_key
from .record import build, first_difference, log_paths, refuse_same_seed, shared_facts
from .stats import ALPHA, INSTALL, MOST_RUNS, have_scipy, welch

SHORT_DIFF = 40  # lines


def read_runs(path):
    """Returns the logs to compare: those of a record, those of any other folder (all *.txt), or the
    one log at this path. Of a folder that is no record, what is not of a run that came to its end
    is left out: a run may be going on there. Returns also a sentence for each of these. Raises
    Refused if no log is left, or if one of a record cannot be read."""
    if not path.is_dir():
        return [read_log(path)], []
    is_record = (path / "record.json").exists()
    pattern = "log_*.txt" if is_record else "*.txt"
    paths = log_paths(path, pattern)
    if not paths:
        raise Refused(f"{path}: expected logs ({pattern}), found none.")
    logs = []
    left_out = []
    for log_path in paths:
        try:
            log = read_log(log_path)
        except Refused as error:
            if is_record:
                raise
            left_out.append(f"caution: left out: {error}")
            continue
        if log.interrupted and not is_record:
            left_out.append(f"caution: left out: {log_path}: the run was interrupted; name this "
                            "log in place of its folder to compare it.")
        else:
            logs.append(log)
    if not logs:
        raise Refused("\n".join([f"{path}: none of its logs is of a run that came to its end.",
                                 *left_out]))
    return logs, left_out


def speed_ratio(a, b):
    """Returns the speed of B's host over that of A's host, from their calibrations: the geometric
    mean over bf16 product and device copy, or None where they share no measurement. Communication
    is left out, because its share of a step is not known here."""
    ratios = []
    for key in ("bf16_matmul_tflops", "copy_gb_per_s"):
        if a[key] and b[key]:
            ratios.append(b[key] / a[key])
    if not ratios:
        return None
    return statistics.geometric_mean(ratios)


def hosts(a, b):
    """Compares the hosts of two records. Returns the factor for B's times, and a sentence that says
    why it is this one."""
    same = a["hardware"]["devices"] == b["hardware"]["devices"]
    names = ""
    rough = ""
    if not same:
        a_name = shown(a["hardware"]["summary"])
        b_name = shown(b["hardware"]["summary"])
        names = f" (A: {a_name}, B: {b_name})"
        rough = ": a rough estimate"
    ratio = speed_ratio(a["calibration"], b["calibration"])
    if ratio is None:
        return 1.0, f"hosts: no calibration in common, so times are compared as they are{names}"
    on_cpus = same and set(a["hardware"]["devices"]) == {"CPU"}
    if on_cpus and a["hardware"]["cpu"] == b["hardware"]["cpu"]:
        return 1.0, ("hosts: CPUs of one name, whose calibration varies with what else runs there "
                     f"(B's is {ratio:.3f} of A's), so times are compared as they are")
    if same and abs(ratio - 1) <= 0.01:
        return 1.0, (f"hosts: alike (B's calibration is {ratio:.3f} of A's), so times are compared "
                     "as they are")
    return ratio, (f"hosts: differ, or one was busy{names}; B's calibration (product and copy, "
                   f"geometric mean) is {ratio:.3f} of A's, so B's times below are multiplied by "
                   f"{ratio:.3f}{rough}")


def verdict(what, unit, a, b, digits):
    """Returns lines on one quantity, whose values in the runs are the lists a and b: difference,
    interval, effect size, and what would settle it."""
    difference = statistics.fmean(b) - statistics.fmean(a)
    head = f"{what}: B - A = {difference:+.{digits}f}{unit}"
    if min(len(a), len(b)) < 2:
        return [f"{head}; a side with one run has no deviation, so there is no p-value: run each "
                "at least 3 times"]
    if not have_scipy():
        return [f"{head}; left out, as scipy is not installed: interval, effect size and test "
                f"({INSTALL})"]
    test = welch(a, b)
    if test is None:
        return [f"{head}; neither side varies at all, so there is no test"]
    found = [f"{head} (95 % CI {test.low:+.{digits}f} to {test.high:+.{digits}f}), "
             f"Hedges g = {test.g:+.2f} (95 % CI about {test.g_low:+.2f} to {test.g_high:+.2f}), "
             f"Welch t = {test.t:.2f}, df = {test.df:.1f}, p = {test.p:.2g}"]
    unclear = f"  not significant (p >= {ALPHA});"
    if test.p < ALPHA:
        word = "lower" if difference < 0 else "higher"
        found.append(f"  significant (p < {ALPHA}): B is {word} in {what}")
    elif test.more is None:
        found.append(f"{unclear} to settle an effect as small as the measured one would need more "
                     f"than {MOST_RUNS} runs a side; the interval says how large the true one may "
                     "still be")
    else:
        found.append(f"{unclear} about {test.more} more runs a side would settle an effect of this "
                     "size (80 % power); fix their number before looking")
    return found


def stage_times(logs):
    """Returns the mean milliseconds a step of each stage, and whether all of them are exact. They
    are if every stage ends with a validation, as only the times of validations are exact."""
    means = []
    exact = True
    for stage in logs[0].values("stage"):
        steps = stage["last_step"] - stage["first_step"]
        step_times = []
        for log in logs:
            begin, begin_exact = log.time_at(stage["first_step"])
            end, end_exact = log.time_at(stage["last_step"])
            exact = exact and begin_exact and end_exact
            step_times.append((end - begin) / steps)
        means.append(statistics.fmean(step_times))
    return means, exact


def stage_lines(a_logs, b_logs, factor):
    """Returns a line on each stage: the time of a step on both sides, and their ratio. B's times
    are multiplied by the factor."""
    a_times, a_exact = stage_times(a_logs)
    b_times, b_exact = stage_times(b_logs)
    b_times = [milliseconds * factor for milliseconds in b_times]
    a_stages = a_logs[0].values("stage")
    b_stages = b_logs[0].values("stage")
    lines = []
    for i in range(max(len(a_stages), len(b_stages))):
        texts = [stage_text("A", a_times, a_stages, i), stage_text("B", b_times, b_stages, i)]
        in_both = i < min(len(a_stages), len(b_stages))
        if in_both and a_times[i]:
            texts.append(f"B / A = {b_times[i] / a_times[i]:.4f}")
        lines.append(f"stage {i + 1}: {', '.join(texts)}")
    if not (a_exact and b_exact):
        lines.append("  (a stage ends without a validation: its time is that of a training line, "
                     "not exact)")
    return lines


def stage_text(name, times, stages, i):
    """Returns what one side says about stage i."""
    if i >= len(stages):
        return f"{name} has no such stage"
    stage = stages[i]
    steps = stage["last_step"] - stage["first_step"]
    return f"{name} {times[i]:.2f} ms x {steps} steps of {stage['batch_tokens']:,} tokens"


def config_lines(a, b):
    """Returns a line for each key of the configuration in which two logs differ. Keys that may
    differ between the runs of one record are left out."""
    a_config = shared_facts(a)["config"]
    b_config = shared_facts(b)["config"]
    lines = []
    for key in sorted(a_config | b_config):
        in_both = key in a_config and key in b_config
        if in_both and a_config[key] == b_config[key]:
            continue
        a_value = shown(a_config.get(key, "absent"))
        b_value = shown(b_config.get(key, "absent"))
        lines.append(f"config: {shown_key(key)} is {a_value} in A and {b_value} in B")
    return lines


def file_diff(path, a, b):
    """Returns the lines of the unified diff of one file. `a` and `b` are its bytes on both sides,
    or None where it is absent."""
    a_name, a_lines = file_lines("A", path, a)
    b_name, b_lines = file_lines("B", path, b)
    return list(difflib.unified_diff(a_lines, b_lines, a_name, b_name, lineterm=""))


def file_lines(side, path, content):
    """Returns the name of a file at the head of a diff, and its lines."""
    if content is None:
        return "/dev/null", []
    return f"{side}/{path}", content.decode(errors="replace").split("\n")


def changed_lines(diff):
    """Returns how many lines a diff adds and how many it removes, without the two names at its
    head."""
    changes = diff[2:]
    added = sum(line.startswith("+") for line in changes)
    removed = sum(line.startswith("-") for line in changes)
    return added, removed


def code_lines(a, b, whole):
    """Returns the unified diffs of all files in two logs, below the numbers of changed lines.
    Unless the `whole` diff is asked for, only its first lines are shown."""
    a_files = a.files
    b_files = b.files
    all_added = 0
    all_removed = 0
    counts = []
    diff_lines = []
    for path in a_files | b_files:
        a_content = a_files.get(path)
        b_content = b_files.get(path)
        if a_content == b_content:
            continue
        diff = file_diff(path, a_content, b_content)
        added, removed = changed_lines(diff)
        all_added += added
        all_removed += removed
        counts.append(f"  {path}: {added} added, {removed} removed")
        diff_lines += diff
    if not counts:
        return ["code: identical"]
    report = [f"code: {all_added} lines added, {all_removed} removed"]
    if len(counts) > 1:
        report += counts
    head = diff_lines if whole else diff_lines[:SHORT_DIFF]
    report += [visible(line) for line in head]
    if len(head) < len(diff_lines):
        report.append(f"... {len(diff_lines) - len(head)} more lines of diff (--diff shows all)")
    return report


def visible(line):
    """Returns the line with a question mark in place of each control character, because the code
    comes from a stranger and the line goes to a terminal."""
    return "".join(c if c.isprintable() or c == "\t" else "?" for c in line)


def not_whole(logs):
    """Returns a sentence for each run that was interrupted or resumed, which no record may have."""
    found = []
    for log in logs:
        if log.interrupted or log.resumed:
            word = "interrupted" if log.interrupted else "resumed"
            found.append(f"caution: {log.path} was {word}, so its time and loss are not those of a "
                         "whole run")
    return found


def disturbed(logs):
    """Returns a sentence for each run in which something disturbed the measurement."""
    found = []
    for log in logs:
        defects = log.values("defect")
        if defects:
            more = f" (and {len(defects) - 1} more)" if len(defects) > 1 else ""
            found.append(f"caution: {log.path}: {visible(defects[0]['what'])}{more}")
    return found


def not_independent(logs):
    """Returns a sentence if two runs of one side have the same seed, or the same losses."""
    try:
        refuse_same_seed(logs)
    except Refused as error:
        return [f"caution: {error}"]
    return []


def side_text(side, record):
    """Returns the line on one record at the head of the report."""
    target = record["target"]
    target_text = "none" if target is None else f"{target:g}"
    return (f"{side} = {record['name']}: n = {record['n']}, loss {record['loss']['mean']:.4f}, "
            f"time {record['time_s']['mean']:.2f} s, target {target_text}, "
            f"{shown(record['hardware']['summary'])}")


def task_cautions(a, b):
    """Returns a sentence for each thing that makes the tasks of two records different ones."""
    data = ("validation data", a["data"]["val_fingerprint"], b["data"]["val_fingerprint"])
    tokens = ("validation tokens", a["config"]["val_tokens"], b["config"]["val_tokens"])
    targets = ("targets", a["target"], b["target"])
    found = []
    for what, a_value, b_value in (data, tokens, targets):
        if a_value != b_value:
            found.append(f"caution: the {what} differ ({shown(a_value, 20)} and "
                         f"{shown(b_value, 20)}); losses and times are not of one task")
    return found


def no_p(losses, target):
    """Takes the place of stats.p_below. The report does not show that p, and it needs scipy."""
    return None


def compare(a_logs, b_logs, names, whole_diff=False, left_out=()):
    """Returns the lines of the report, all numbers from the logs. `names` are what the two sides
    are called; `left_out` are the sentences of read_runs on both. Raises Refused if a side mixes
    runs, or if a run has no validation."""
    logs = [*a_logs, *b_logs]
    for log in logs:
        if log.end["val_loss"] is None:
            raise Refused(f"{log.path}: expected a validation to compare, found val_loss: null; "
                          "`plot` shows such a run.")
    a = build(a_logs, names[0], p_of=no_p)
    b = build(b_logs, names[1], p_of=no_p)
    factor, sentence = hosts(a, b)
    doubts = not_whole(logs)
    lines = [side_text("A", a), side_text("B", b), *left_out, *doubts, *disturbed(logs)]
    lines += [*not_independent(a_logs), *not_independent(b_logs), sentence]
    lines += task_cautions(a, b)
    a_losses = [log.end["val_loss"] for log in a_logs]
    b_losses = [log.end["val_loss"] for log in b_logs]
    lines += verdict("loss", "", a_losses, b_losses, 4)
    a_times = [log.end["train_time_s"] for log in a_logs]
    b_times = [log.end["train_time_s"] * factor for log in b_logs]
    lines += verdict("time", " s", a_times, b_times, 3)
    if not doubts:
        lines += stage_lines(a_logs, b_logs, factor)
    different = first_difference(a["data"]["shards"], b["data"]["shards"])
    if different:
        key, a_value, b_value = different
        lines.append(f"data: {shown_key(key)} is {shown(a_value)} in A and {shown(b_value)} in B")
    lines += config_lines(a_logs[0], b_logs[0])
    lines += code_lines(a_logs[0], b_logs[0], whole_diff)
    return lines
