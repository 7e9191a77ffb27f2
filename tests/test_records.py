"""Records: made from logs, shortened without a loss, compared with the logs, and ranked.

References: logs written here by hand, scipy for the tests, the bytes of the logs themselves."""
import dataclasses
import hashlib
import json
import sys

import pytest
import scipy.stats

from nanogpt import command_line
from records import compare, console, log, record
from records.__main__ import REFUSED, work

SOURCE = "print('the script')\n"
OTHER = "X = 1\n"


def main(argv):
    return console.end_in_order("records", work, argv, REFUSED)


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def lines_of(seed=1, losses=(5.0, 4.0), time_ms=1000, source=SOURCE, precision="fp32", device="CPU", cpu="Some CPU", resume="", target=4.2, other=OTHER,
             train_sum="1" * 64, was_stopped=False):
    """A log of two steps, line by line."""
    last = losses[-1]
    facts = [
        ("run", dict(run_id=f"run-{seed}-{last}", date="2026-11-27T09:00:00Z", code_sha256=sha(source), code_bytes=len(source),
                     git_commit="abc1234", git_clean=True, grammar=2)),
        ("file", dict(path="nanogpt/other.py", sha256=sha(other), text=other)),
        ("config", dict(num_steps=2, batch_tokens=64, val_tokens=32, target_loss=target, seed=seed, run_name="", precision=precision,
                        resume=resume, log_dir=f"logs/{seed}")),
        ("environment", dict(python="3.11", torch="2.13.0", cuda=None, triton=None, driver=None, devices=[device], world_size=1, hosts=1,
                             cpu=cpu)),
        ("data", dict(split="train", name="a.bin", bytes=1280, tokens=128, sha256=train_sum)),
        ("data", dict(split="val", name="b.bin", bytes=1088, tokens=32, sha256="2" * 64)),
        ("stage", dict(first_step=0, last_step=2, batch_tokens=64)),
        ("note", "a note"),
    ]
    steps = [f"step:1/2 train_loss:{losses[0]:.4f} train_time:{time_ms // 2}ms step_avg:{time_ms / 2:.2f}ms",
             f"step:2/2 train_loss:{losses[0]:.4f} train_time:{time_ms}ms step_avg:{time_ms / 2:.2f}ms",
             f"step:2/2 val_loss:{last:.4f} train_time:{time_ms}ms step_avg:{time_ms / 2:.2f}ms"]
    end = dict(val_loss=f"{last:.4f}", target=json.dumps(target), reached=json.dumps(None if target is None else last <= target),
               train_time_s=f"{time_ms / 1000:.3f}", tokens=128, peak_memory_mib="null", code_sha256=sha(source))
    if was_stopped:
        end["interrupted"] = "true"
    return [*source.splitlines(), "=" * 100, *(f"{kind} {json.dumps(value)}" for kind, value in facts), *steps, "=" * 100,
            *(f"{key}: {value}" for key, value in end.items()), ""]


def write(path, **changes):
    path.write_text("\n".join(lines_of(**changes)))
    return path


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "records").mkdir()
    monkeypatch.setattr(record, "RECORDS", tmp_path / "records")
    (tmp_path / "records" / "README.md").write_text("# Records\n\n<!-- leaderboard:begin --><!-- leaderboard:end -->\n")
    return tmp_path


def write_runs(folder, losses, first_ms=1000, **changes):
    """A folder with the log of a run for each last loss."""
    folder.mkdir()
    for seed, last in enumerate(losses, 1):
        write(folder / f"{seed}.txt", seed=seed, losses=(5.0, last), time_ms=first_ms + seed, **changes)
    return str(folder)


def make(root, name="first", losses=(4.0, 4.1, 4.05), **changes):
    """A record of such runs. Returns its folder."""
    assert main(["new", name, write_runs(root / f"logs_{name}", losses, **changes), "--claim=what is new", "--data=some text"]) == 0
    return root / "records" / f"2026-11-27_{name}"


def test_a_record_is_made_checked_and_ranked_and_every_log_comes_back_byte_for_byte(root, capfdbinary):
    folder = make(root)
    assert main(["table"]) == 0 and main(["check"]) == 0
    p = scipy.stats.ttest_1samp([4.0, 4.1, 4.05], 4.2, alternative="less").pvalue
    page = (folder / "README.md").read_text()
    assert f"| 4.0500 ± 0.0500, target 4.2 (p = {p:.2g} for a mean below it) |" in page and "| 3, of which 3 reached the target |" in page
    assert "| what is new |" in page and "| some text |" in page
    assert OTHER.encode() not in (folder / "log_2.txt").read_bytes() and SOURCE.encode() not in (folder / "log_2.txt").read_bytes()
    capfdbinary.readouterr()
    for number in (1, 2, 3):
        assert main(["log", str(folder / f"log_{number}.txt")]) == 0
        assert capfdbinary.readouterr().out == (root / "logs_first" / f"{number}.txt").read_bytes()


def test_ranks_are_by_time_within_one_machine_and_need_less_than_one_chance_in_a_hundred(root):
    make(root, "slow", losses=(4.0, 4.01, 4.02))
    make(root, "fast", losses=(4.0, 4.01, 4.04), first_ms=900)
    make(root, "narrow", losses=(4.0, 4.01, 4.03), precision="bf16")  # another machine
    doubtful = (4.14, 4.15, 4.17)
    assert 0.01 < scipy.stats.ttest_1samp(doubtful, 4.2, alternative="less").pvalue < 0.02
    make(root, "doubtful", losses=doubtful)
    assert main(["table"]) == 0
    text = (root / "records" / "README.md").read_text()
    rows = [line.split("]")[0] for line in text.splitlines() if line.startswith("| [")]
    assert rows == ["| [narrow", "| [fast", "| [slow"]
    assert "Some CPU (bf16)" in text and "Without a rank: [doubtful]" in text
    assert 0.01 < scipy.stats.ttest_ind(doubtful, (4.1, 4.11, 4.12)).pvalue < 0.05
    assert "not significant at 0.01" in compare.verdict("loss", "", doubtful, [4.1, 4.11, 4.12], 4)


@pytest.mark.parametrize("page, old, new, said", [
    ("2026-11-27_first/log_2.txt", "val_loss:4.1000", "val_loss:3.9000", "log_2.txt: it or log_1.txt is no longer as it was written"),
    ("2026-11-27_first/log_1.txt", "X = 1", "X = 2", "nanogpt/other.py in it is no longer as it was written"),
    ("2026-11-27_first/README.md", "4.0500", "4.0400", "the table in its README.md"),
    ("README.md", "[first]", "[second]", "its leaderboard is another"),
])
def test_check_names_what_does_not_follow_from_the_logs(root, capsys, page, old, new, said):
    make(root), main(["table"])
    path = root / "records" / page
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    capsys.readouterr()
    assert main(["check"]) == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("changes, sentence", [
    (dict(source="print(2)\n"), "runs of one kind have one code, but train_gpt.py"),
    (dict(other="X = 3\n"), "runs of one kind have one code, but nanogpt/other.py"),
    (dict(precision="bf16"), "runs of one kind have one config, but precision is 'fp32'"),
    (dict(device="GPU"), "runs of one kind have one machine, but "),
    (dict(cpu="Other CPU"), "runs of one kind have one machine, but cpu is 'Some CPU' in"),
    (dict(train_sum="3" * 64), "runs of one kind have one data, but train a.bin is"),
    (dict(seed=1), "runs of one kind have a seed each; these have [1, 1]"),
    (dict(resume="x"), "a run that was resumed has no place"),
    (dict(was_stopped=True), "b.txt: a run that was interrupted or has no end has no place"),
    (dict(target=None), "a run that has no target (--target_loss) has no place"),
], ids=str)
def test_runs_that_do_not_belong_together_are_refused_by_the_first_difference(root, tmp_path, capsys, changes, sentence):
    (tmp_path / "logs").mkdir()
    write(tmp_path / "logs" / "a.txt", seed=1), write(tmp_path / "logs" / "b.txt", **dict(seed=2, losses=(5.0, 4.1)) | changes)
    logs = str(tmp_path / "logs")
    for command in (["new", "mixed", logs], ["compare", logs, logs]):
        if command[0] == "new" or sentence.startswith("runs of one kind"):
            assert main(command) == 2
            assert sentence in capsys.readouterr().err
    assert not list((root / "records").glob("20*"))


@pytest.mark.parametrize("damage, sentence", [
    (lambda lines: [line for line in lines if not line.startswith("step:1/2")], "steps are missing"),
    (lambda lines: [line.replace("val_loss: 4.0", "val_loss: 3.0") for line in lines], "the results are not those of the last line"),
    (lambda lines: ["print('another')", *lines[1:]], "train_gpt.py in it is no longer"),
    (lambda lines: ["a text"], "no line of 100 '='"),
    (lambda lines: [line.replace("target: 4.2", "target: 3.9") for line in lines], "the results are not those of the last line"),
    (lambda lines: [line for line in lines if not line.startswith("config")], "no whole log: it has no line that begins with config"),
    (lambda lines: ["\n".join(lines)[:-1]], "its end is cut off"),
    (lambda lines: 2 * lines, "no whole log"),
    (lambda lines: [line.replace("train_time_s: 1.000", "train_time_s: 0.900") for line in lines], "not those of the last line"),
    (lambda lines: [line + " {" if line.startswith("note") else line for line in lines], "neither a step nor a fact"),
], ids=range(10))
def test_a_damaged_log_is_one_sentence(tmp_path, damage, sentence):
    path = tmp_path / "log.txt"
    path.write_text("\n".join(damage(lines_of())))
    with pytest.raises(ValueError, match=f"{path}: .*{sentence}"):
        log.read_log(path)


def test_code_gives_back_every_file_that_ran_and_overwrites_none(tmp_path, capfd):
    path = write(tmp_path / "log.txt")
    assert main(["code", str(path), str(tmp_path / "code")]) == 0
    assert (tmp_path / "code" / "train_gpt.py").read_text() == SOURCE and (tmp_path / "code" / "nanogpt" / "other.py").read_text() == OTHER
    assert main(["code", str(path), str(tmp_path / "code")]) == 2
    write(path, other="Y = 1\n")
    evil = path.read_text().replace("nanogpt/other.py", "../outside.py")
    path.write_text(evil)
    assert main(["code", str(path), str(tmp_path / "new")]) == 2
    assert not (tmp_path / "outside.py").exists()


def test_compare_says_what_differs_and_whether_it_may_be_chance(tmp_path, capsys):
    values = dict(a=(4.0, 4.01, 4.02), b=(3.89, 3.91, 3.93))  # of unequal deviations
    sides = [write_runs(tmp_path / side, losses, source=f"print('{side}')\n") for side, losses in values.items()]
    assert main(["compare", *sides]) == 0
    out = capsys.readouterr().out
    p = scipy.stats.ttest_ind(values["b"], values["a"], equal_var=False).pvalue
    assert f"loss: B - A = -0.1000 (95 % from -0.1416 to -0.0584, Welch's p = {p:.2g}): B is lower" in out
    assert "time: B - A = +0.000 s" in out and "not significant" in out
    assert "code: another train_gpt.py;" in out


def test_without_scipy_a_comparison_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    sides = [write_runs(tmp_path / side, losses) for side, losses in (("a", (4.0, 4.1)), ("b", (4.2, 4.3)))]
    monkeypatch.setitem(sys.modules, "scipy", None)  # as if it were not installed
    assert main(["compare", *sides]) == 2
    assert capsys.readouterr().err == "records: statistics need scipy: pip install scipy\n"


def test_a_run_that_did_not_come_to_its_end_is_not_compared(tmp_path, capsys):
    good = write(tmp_path / "good.txt")
    folder = tmp_path / "b"
    folder.mkdir()
    bad, cut = write(folder / "interrupted.txt", was_stopped=True), folder / "cut.txt"
    cut.write_text("\n".join(lines_of()[:12]))
    assert main(["compare", str(good), str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"records: {folder}: no run has come to its end")
    write(folder / "whole.txt")
    assert main(["compare", str(good), str(folder)]) == 0
    left_out = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert left_out == [f"left out, as it was interrupted or has no end: {path}" for path in (cut, bad)]


def test_there_is_no_test_of_a_single_run_or_without_deviation(root):
    make(root, "single", losses=(4.0,))
    equal = make(root, "equal", losses=(4.0, 4.0))
    assert main(["table"]) == 0
    assert "Without a rank: [single](2026-11-27_single), [equal]" in (root / "records" / "README.md").read_text()
    assert "target 4.2 (no test for a mean below it)" in (equal / "README.md").read_text()
    for a, b in (([1.0], [1.0, 2.0]), ([1.0, 1.0], [2.0, 2.0])):
        assert "no test: it needs two runs" in compare.verdict("loss", "", a, b, 4)


def test_a_run_that_goes_on_can_be_read(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("\n".join(lines_of()[:-9]) + "\n")
    read = log.read_log(path)
    assert read.interrupted
    last = read.steps[-1]  # as the lines of Python in records/README.md use it
    assert (last.split, last.step, last.loss, last.time_ms) == ("val", 2, 4.0, 1000)


def test_records_of_this_project_can_be_compared():
    """And ./run.sh test checks all of them with their logs."""
    assert main(["compare", *map(str, record.folders()[:2])]) == 0


def change(path, *replacements):
    text = path.read_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


DEFECT = 'note "a note"', 'defect {"what": "tokens were lost"}'


def test_compare_says_what_the_sides_do_not_have_in_common(tmp_path, capsys):
    a = change(write(tmp_path / "a.txt"), ('"a.bin"', '"another name of it"'))
    for b, is_said in ((write(tmp_path / "b.txt", seed=2), False),
                       (change(write(tmp_path / "c.txt", seed=2, precision="bf16", train_sum="3" * 64), DEFECT), True)):
        assert main(["compare", str(a), str(b)]) == 0
        out = capsys.readouterr().out
        for line in ("config: precision is 'fp32' in A and 'bf16' in B", "caution: the data of A and B differ",
                     f"caution: {b}: tokens were lost"):
            assert (f"\n{line}\n" in out) == is_said, line
        assert "code: the same" in out


def test_a_record_counts_what_each_log_says(root):
    logs = root / "some"
    write_runs(logs, (4.0, 4.1, 4.3))  # the target is 4.2
    for number, memory in enumerate((100, 3000, 200), 1):
        change(logs / f"{number}.txt", ("peak_memory_mib: null", f"peak_memory_mib: {memory}"),
               ("2026-11-27T", f"2026-11-{26 + number}T"), *([DEFECT] * (number != 2)))
    assert main(["new", "some", str(logs)]) == 0
    page = (root / "records" / "2026-11-27_some" / "README.md").read_text()
    for part in ("| 3, of which 2 reached the target |", "| 3,000 MiB of each GPU |",
                 "\nDefect in log_1.txt: tokens were lost\n", "\nDefect in log_3.txt: tokens were lost\n"):
        assert part in page, part
    assert "Defect in log_2.txt" not in page


def test_records_of_other_data_or_another_target_are_ranked_apart(root):
    for name, first_ms, data_name, target in (
            ("b-slow", 2000, "b", 4.2), ("b-fast", 1000, "b", 4.2), ("a", 9000, "a", 4.2), ("b-low", 9000, "b", 4.1)):
        logs = write_runs(root / name, (3.9, 3.91, 3.92), first_ms=first_ms, target=target)
        assert main(["new", name, logs, f"--data={data_name}"]) == 0
    assert main(["table"]) == 0
    text = (root / "records" / "README.md").read_text()
    assert [line[3:].split("]")[0] for line in text.splitlines() if line.startswith("| [")] == ["a", "b-low", "b-fast", "b-slow"]


def test_a_record_may_have_more_than_nine_logs(root):
    folder = make(root, losses=[4 + seed / 100 for seed in range(12)])
    assert main(["table"]) == 0 and main(["check"]) == 0
    assert "| [log_10.txt](log_10.txt) | 10 | 4.0900 | 1.010 |" in (folder / "README.md").read_text()


def test_runs_of_one_kind_differ_only_in_keys_that_change_no_weights_and_in_the_seed():
    """Data are compared by their sums."""
    of_run = {field.name for field in dataclasses.fields(command_line.RunConfig)}
    assert log.PER_RUN - of_run == {"seed", "data_dir"}
