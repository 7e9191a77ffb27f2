"""The writer of logs, records/journal.py.

References: the lines of a log, written out by hand; `records.log.read_log`, which shares no code
with the writer; clocks made by hand; and for the files of a run the tree that the test has made.
"""
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from nanogpt.ranks import BadInput
from records import journal
from records.__main__ import main as records
from records.console import Console
from records.log import read_log
from train_gpt import CPU_HAS_BF16

SOURCE = b"print('a script')\n"
CPU = torch.device("cpu")
RULE = "=" * 100


def open_log(folder, master=True, jsonl=False):
    log = journal.Log(Console(10, shows=master))
    log.open(folder, "an-id", SOURCE, 10, jsonl)
    return log


def lines_of(log):
    """The lines behind the source."""
    return log.path.read_bytes().removeprefix(SOURCE).decode().splitlines()


# ------------------------------------------------------------------------------------------ the log


def write_all(log):
    """One line of every form."""
    log.fact("run", {"run_id": "an-id", "git_clean": None})
    log.fact("note", "größer")
    log.step(0, 0.0, "val_loss", 10.82584)
    log.step(1, 0.17612, "train_loss", 10.8)
    log.step(3, 1.0006, "train_loss", math.nan)
    log.step(3, 1.0006, "val_loss", 3.00006)
    log.end({"val_loss": 3.0, "reached": True, "mfu": None, "code_sha256": "ab"})


EXPECTED = [
    RULE,
    'run {"run_id": "an-id", "git_clean": null}',
    'note "gr\\u00f6\\u00dfer"',
    "step:0/10 val_loss:10.8258 train_time:0ms step_avg:nanms",
    "step:1/10 train_loss:10.8000 train_time:176ms step_avg:176.12ms",
    "step:3/10 train_loss:nan train_time:1001ms step_avg:333.53ms",
    "step:3/10 val_loss:3.0001 train_time:1001ms step_avg:333.53ms",
    RULE,
    "val_loss: 3.0",
    "reached: true",
    "mfu: null",
    "code_sha256: ab",
]


def test_every_line_of_a_log_to_the_byte(tmp_path):
    log = open_log(tmp_path / "new" / "folder")
    assert log.path == tmp_path / "new" / "folder" / "an-id.txt"
    write_all(log)
    assert log.path.read_bytes() == SOURCE + "\n".join(EXPECTED).encode() + b"\n"
    assert [p.name for p in log.path.parent.iterdir()] == ["an-id.txt"]


def test_the_json_twin_has_the_same_facts(tmp_path):
    log = open_log(tmp_path, jsonl=True)
    write_all(log)
    text = log.path.with_suffix(".jsonl").read_text()
    times = {"kind": "step", "num_steps": 10}
    third = times | {"step": 3, "train_time_ms": 1001, "step_avg_ms": 333.53}
    assert [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()] == [
        {"kind": "run", "run_id": "an-id", "git_clean": None},
        {"kind": "note", "note": "größer"},
        times | {"step": 0, "val_loss": 10.82584, "train_time_ms": 0, "step_avg_ms": None},
        times | {"step": 1, "train_loss": 10.8, "train_time_ms": 176, "step_avg_ms": 176.12},
        third | {"train_loss": None},
        third | {"val_loss": 3.00006},
        {"kind": "end", "val_loss": 3.0, "reached": True, "mfu": None, "code_sha256": "ab"},
    ]


def test_each_line_is_in_the_file_at_once(tmp_path):
    log = open_log(tmp_path, jsonl=True)
    for number in range(1, 4):
        log.fact("note", "x")
        assert len(lines_of(log)) == 1 + number
        assert len(log.path.with_suffix(".jsonl").read_text().splitlines()) == number


def test_the_console_gets_the_losses_the_summary_and_the_name_of_the_log(tmp_path, capsys):
    log = open_log(tmp_path)
    write_all(log)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    shown = [line.removesuffix(" step_avg:nanms") for line in EXPECTED[3:7]]
    assert lines[:4] == shown and lines[-1] == f"log: {log.path}" and err == ""
    assert "loss      3.0000 nats per token; it began at 10.8258" in lines
    assert "git_clean" not in out and "note" not in out and "reached: true" not in out


def test_a_defect_is_a_warning_and_other_facts_are_for_the_file_alone(tmp_path, capsys):
    log = open_log(tmp_path)
    log.fact("config", {"num_steps": 10})
    log.fact("compile", {"what": "block", "seconds": 2.5})
    log.fact("defect", {"what": "tokens were lost"})
    log.fact("defect", {"what": "block of 3 rows", "seconds": 2.5, "after_launch_s": 9})
    assert capsys.readouterr().out.splitlines() == [
        "warning: tokens were lost", "warning: block of 3 rows (2.5 s)"]
    assert len(lines_of(log)) == 5


def test_the_end_says_it_if_somebody_has_removed_the_log(tmp_path, capsys):
    log = open_log(tmp_path)
    log.path.unlink()
    log.step(1, 0.1, "val_loss", 2.5)
    log.end({"val_loss": 2.5})
    assert capsys.readouterr().out.endswith(f"log: {log.path} (it was removed during the run)\n")


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path, capsys):
    log = open_log(tmp_path, jsonl=True)
    log.fact("note", "the last one")
    before = log.path.read_bytes()
    log.files[log.path] = open("/dev/full", "wb", buffering=0)
    log.put(1, torch.tensor(2.5), 0.1)
    assert log.arrived() == [(1, 2.5, [])]
    log.step(1, 0.1, "val_loss", 2.5)
    log.end({"val_loss": 2.5})
    out, err = capsys.readouterr()
    assert err == (f"cannot write to {log.path} (No space left on device); "
                   "the run goes on without a log\n")
    assert "step:1/10 val_loss:2.5000" in out and out.endswith(f"log: {log.path} (it broke off)\n")
    assert log.path.read_bytes() == before
    assert len(log.path.with_suffix(".jsonl").read_text().splitlines()) == 1


def test_a_twin_that_cannot_be_written_leaves_the_log(tmp_path, capsys):
    log = open_log(tmp_path, jsonl=True)
    twin = log.path.with_suffix(".jsonl")
    log.files[twin] = open("/dev/full", "wb", buffering=0)
    write_all(log)
    assert lines_of(log) == EXPECTED
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith(f"cannot write to {twin} (No space")


def test_a_file_that_takes_a_few_bytes_at_a_time_gets_all(tmp_path):
    taken = []

    def write(content):
        taken.append(bytes(content[:3]))
        return len(taken[-1])

    journal.write_whole(SimpleNamespace(write=write), b"12345678")
    assert taken == [b"123", b"456", b"78"]


def test_other_ranks_leave_no_trace_and_get_the_losses_too(tmp_path, capsys):
    log = open_log(tmp_path / "logs", master=False, jsonl=True)
    write_all(log)
    log.put(4, torch.tensor([2.5, 0.0, 1.0]), 1.2)
    assert log.arrived() == [(4, 2.5, [0.0, 1.0])]
    assert not list(tmp_path.iterdir()) and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("loss, others", [(torch.tensor(2.5), []),
                                         (torch.tensor([2.5, 0, 1, 0]), [0.0, 1.0, 0.0])])
def test_a_loss_that_has_arrived_is_written_and_handed_back_once(tmp_path, loss, others):
    log = open_log(tmp_path)
    log.put(4, loss, 1.2)
    assert lines_of(log) == [RULE]
    (got,) = log.arrived()
    assert (got.step, got.loss, got.others) == (4, 2.5, others) and log.arrived() == []
    assert lines_of(log)[1:] == ["step:4/10 train_loss:2.5000 train_time:1200ms step_avg:300.00ms"]


def test_a_loss_that_is_not_finite_is_written_and_handed_back(tmp_path):
    log = open_log(tmp_path)
    log.put(1, torch.tensor([math.inf, 1.0]), 0.5)
    assert log.arrived() == [(1, math.inf, [1.0])]
    assert lines_of(log)[1].startswith("step:1/10 train_loss:inf ")


def test_nothing_waits_for_a_loss_and_none_overtakes_another(tmp_path, monkeypatch):
    events = [SimpleNamespace(done=False) for _ in range(3)]
    for event in events:
        event.query = lambda event=event: event.done
    waiting = iter(events)
    stream = SimpleNamespace(record_event=lambda: next(waiting))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    log = open_log(tmp_path)
    for step in (1, 2, 3):
        copy = lambda to, non_blocking, step=step: torch.tensor(float(step))
        log.put(step, SimpleNamespace(is_cuda=True, to=copy), 0.1 * step)
    arrivals = []
    for finished in (2, 1, 0):
        arrivals.append([loss.step for loss in log.arrived()])
        events[finished].done = True
    arrivals.append([loss.step for loss in log.arrived()])
    assert arrivals == [[], [], [], [1, 2, 3]]
    assert [line.split()[1] for line in lines_of(log)[1:]] == [
        "train_loss:1.0000", "train_loss:2.0000", "train_loss:3.0000"]


def test_a_folder_that_cannot_be_made_is_an_error_of_the_system():
    with pytest.raises(OSError, match="/dev/null"):
        open_log("/dev/null/logs")


# ---------------------------------------------------------------------------------------- the clock


def test_the_clock_stands_still_when_it_is_stopped(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(journal.time, "perf_counter", lambda: now[0])
    clock = journal.Clock(CPU)
    readings = [clock.now()]
    actions = [(5, clock.start), (2, None), (1, clock.stop), (50, None), (0, clock.start),
               (4, clock.stop)]
    for seconds, action in actions:
        now[0] += seconds
        if action:
            action()
        readings.append(clock.now())
    assert readings == [0, 0, 2, 3, 3, 3, 7] and clock.total == 7


def test_starting_and_stopping_wait_for_the_device_and_reading_does_not(monkeypatch):
    waits = []
    device_module = SimpleNamespace(synchronize=lambda: waits.append(1))
    monkeypatch.setattr(torch, "get_device_module", lambda device: device_module)
    clock = journal.Clock(CPU)
    counts = []
    for action in (clock.now, clock.start, clock.now, clock.stop, clock.now):
        action()
        counts.append(len(waits))
    assert counts == [0, 1, 1, 2, 2]


# -------------------------------------------------------------------------------- files and the run


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder for files, and a function that makes one and pretends that it has been imported."""
    root = tmp_path / "project"

    def imported(name, path, content=b"x = 1\n"):
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__file__=str(file)))

    return root, imported


def paths_of(files):
    return [file["path"] for file in files]


def test_the_files_of_the_project_are_those_it_imported_by_their_names_there(project):
    root, imported = project
    imported("rooms.low.fp99", "rooms/low/fp99.py", "Grüße\r\n".encode())
    imported("rooms", "rooms/__init__.py", b"")
    imported("top_level", "top_level.py")
    imported("the_script", "train_gpt.py")
    imported("a_library", ".venv/lib/python3/site-packages/a_library.py")
    imported("another", "env/another/__init__.py")
    imported("compiled", "compiled.cpython-312-x86_64-linux-gnu.so")
    (root / "rooms" / "not_imported.py").write_text("x = 2\n")
    sys.modules["nothing"] = None
    try:
        files = journal.project_files(root / "train_gpt.py", root)
    finally:
        del sys.modules["nothing"]
    assert paths_of(files) == ["rooms/__init__.py", "rooms/low/fp99.py", "top_level.py"]
    assert files[1] == {"path": "rooms/low/fp99.py", "text": "Grüße\r\n",
                        "sha256": hashlib.sha256("Grüße\r\n".encode()).hexdigest()}


def test_a_program_that_starts_the_script_is_among_the_files(project, monkeypatch):
    root, imported = project
    imported("train_gpt", "train_gpt.py")
    imported("__main__", "many_seeds.py")
    assert paths_of(journal.project_files(root / "train_gpt.py", root)) == ["many_seeds.py"]
    imported("__main__", "train_gpt.py")
    assert journal.project_files(root / "train_gpt.py", root) == []


def test_a_file_that_is_edited_after_the_first_call_is_shown_as_it_was(project):
    root, imported = project
    imported("early", "early.py", b"x = 1\n")
    journal.project_files(root / "train_gpt.py", root)
    imported("early", "early.py", b"x = 2\n")
    imported("late", "late.py", b"x = 3\n")
    files = journal.project_files(root / "train_gpt.py", root)
    assert [file["text"] for file in files] == ["x = 1\n", "x = 3\n"]


def test_a_folder_that_is_reached_through_a_link_has_its_files(project, tmp_path, monkeypatch):
    root, imported = project
    imported("rooms.ranks", "rooms/ranks.py")
    (tmp_path / "link").symlink_to(root)
    script = tmp_path / "link" / "train_gpt.py"
    assert paths_of(journal.project_files(script, tmp_path / "link")) == ["rooms/ranks.py"]
    through = SimpleNamespace(__file__=str(tmp_path / "link" / "rooms" / "ranks.py"))
    monkeypatch.setitem(sys.modules, "rooms.ranks", through)
    assert paths_of(journal.project_files(script, root)) == ["rooms/ranks.py"]


@pytest.mark.parametrize("name, content, remedy", [("größe", b"x = 1\n", "ASCII"),
                                                   ("latin", b"# \xfc\n", "UTF-8")])
def test_a_file_that_a_log_cannot_hold_is_refused(project, name, content, remedy):
    root, imported = project
    imported(name, f"{name}.py", content)
    with pytest.raises(BadInput, match=f"^{name}.py cannot stand in a log; .*{remedy}"):
        journal.project_files(root / "train_gpt.py", root)


def test_the_writer_is_among_the_files_of_this_process():
    files = {file["path"]: file["text"] for file in journal.project_files(ROOT / "train_gpt.py")}
    assert files["records/journal.py"] == Path(journal.__file__).read_text()
    assert "nanogpt/ranks.py" in files and "train_gpt.py" not in files
    assert not any("site-packages" in path or path.startswith("tests") for path in files)


@pytest.mark.parametrize("source", [b"print(1)", b"a\n" + b"=" * 100 + b"\nb\n", b""])
def test_a_script_that_no_log_could_hold_is_refused(source):
    with pytest.raises(BadInput, match="no log could hold this script; end it with a newline"):
        journal.describe_run(source, [], "a.py")


def test_the_sum_of_all_files_is_that_of_the_lines_of_sha256sum():
    # computed with the command: of "b\n" and "a\n", and of the two lines it prints
    file = {"path": "a/b.py", "text": "a\n",
            "sha256": "87428fc522803d31065e7bce3cf03fe475096631e5e07bbd7a0fde60c4cf25c7"}
    expected = "9eb2464baa5727035c4067fc7c2def6f8ff935e0add5c3c37d5ec458664cbe22"
    assert journal.checksum_of_files(b"b\n", [file]) == expected
    run = journal.describe_run(b"b\n", [file], "b.py")
    assert run["files_sha256"] == expected and run["grammar"] == 2 and run["code_bytes"] == 2
    assert run["code_sha256"] == hashlib.sha256(b"b\n").hexdigest()
    assert run["run_id"] != journal.describe_run(b"b\n", [file], "b.py")["run_id"]


def test_a_commit_is_named_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "ROOT", tmp_path)
    run = journal.describe_run(SOURCE, [], tmp_path / "known.py")
    assert (run["git_commit"], run["git_clean"]) == (None, None)
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "known.py").write_text("")
    for words in (["init", "-q"], ["add", "known.py"], [*name, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    run = journal.describe_run(SOURCE, [], tmp_path / "known.py")
    assert re.fullmatch("[0-9a-f]{40}", run["git_commit"]) and run["git_clean"] is True
    (tmp_path / "curves.png").write_text("a picture, which no run reads")
    assert journal.describe_run(SOURCE, [], tmp_path / "known.py")["git_clean"] is True
    (tmp_path / "known.py").write_text("x = 1")
    assert journal.describe_run(SOURCE, [], tmp_path / "known.py")["git_clean"] is False
    (tmp_path / "known.py").write_text("")
    (tmp_path / "idea.py").write_text("x = 1")
    assert journal.describe_run(SOURCE, [], tmp_path / "known.py")["git_clean"] is True
    assert journal.describe_run(SOURCE, [], tmp_path / "idea.py")["git_clean"] is False, "the commit has no such script"
    assert journal.describe_run(SOURCE, [{"path": "idea.py", "sha256": "a"}], tmp_path / "known.py")["git_clean"] is False
    monkeypatch.setattr(journal, "is_rank_0", lambda: False)
    assert journal.describe_run(SOURCE, [], tmp_path / "known.py")["git_commit"] is None, "only rank 0 asks"


SCRIPT = '''
with open(__file__, "rb") as file:
    SOURCE = file.read()
import sys
import torch
from nanogpt import extra
from records import journal
from records.console import Console

cpu = torch.device("cpu")
files = journal.project_files(__file__)
run = journal.describe_run(SOURCE, files, __file__)
log = journal.Log(Console(2))
config = dict(num_steps=2, batch_tokens=8, val_tokens=8, target_loss=extra.TARGET, seed=0, run_name="",
              preset="", data_dir="data", log_dir="logs", jsonl=True)
data = [dict(split=split, name=split, bytes=1056, tokens=16, sha256=digit * 64)
        for split, digit in (("train", "0"), ("val", "1"))]
facts = journal.RunFacts(run, files, journal.describe_machine(cpu), data, journal.calibrate(cpu, cpu_has_bf16=False))
log.begin(SOURCE, facts, config, (1000, 10), False, [dict(first_step=0, last_step=2, batch_tokens=8)])
for step in (1, 2):
    log.put(step, torch.tensor(3.0), step / 10)
    log.arrived()
log.step(2, 0.2, "val_loss", 3.0)
log.end(dict(val_loss=3.0, target=extra.TARGET, reached=True, train_time_s=0.2, step_avg_ms=100.0,
             tokens=16, tokens_per_s=80, mfu=journal.mfu(1.0, 80.0, "CPU"), peak_memory_mib=None,
             compile_s=1.0, code_sha256=run["code_sha256"]))
'''


def test_a_log_has_all_that_ran_and_what_is_taken_out_of_it_runs_again(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in ("data", "nanogpt", "records"):
        (first / folder).mkdir(parents=True)
        for path in (ROOT / folder).glob("*.py"):
            shutil.copy(path, first / folder)
    (first / "nanogpt" / "extra.py").write_text("# é\nTARGET = 3.5\n")
    (first / "train_gpt.py").write_text(SCRIPT)
    logs = []
    for folder in (first, second):
        run = subprocess.run([sys.executable, "-B", "train_gpt.py"], cwd=folder,
                             capture_output=True, text=True, timeout=100)
        assert run.returncode == 0, run.stderr
        (path,) = (folder / "logs").glob("*.txt")
        logs.append(read_log(path))
        if folder == first:
            assert records(["code", str(path), str(second)]) == 0
    assert {"records/journal.py", "nanogpt/ranks.py", "nanogpt/extra.py"} < {*logs[0].files}
    assert "records/log.py" not in logs[0].files and "nanogpt/kernels.py" not in logs[0].files
    for path, content in logs[0].files.items():
        assert content == (first / path).read_bytes() == (second / path).read_bytes()
    assert logs[0].grammar == 2 and logs[0].files_sha256 == logs[1].files_sha256
    assert logs[0].run["run_id"] != logs[1].run["run_id"]
    twin = logs[1].path.replace(".txt", ".jsonl")
    assert [json.loads(line)["kind"] for line in open(twin)].count("file") == len(logs[1].files) - 1


# -------------------------------------------------------------------------------------- the machine


def test_the_machine_is_described():
    machine = journal.describe_machine(CPU)
    assert [*machine] == ["python", "torch", "cuda", "triton", "driver", "devices", "world_size",
                          "hosts", "cpu"]
    assert machine["devices"] == ["CPU"] and machine["world_size"] == machine["hosts"] == 1
    assert machine["torch"] == torch.__version__ and machine["cpu"]


def test_a_program_that_is_missing_or_fails_tells_nothing():
    assert journal.output_of("a-program-that-nobody-has") is None
    assert journal.output_of(sys.executable, "-c", "import sys; print(1); sys.exit(3)") is None
    assert journal.output_of(sys.executable, "-c", "print()") == ""
    assert journal.output_of(sys.executable, "-c", "print('$HOME; x')") == "$HOME; x"


def test_without_git_and_other_programs_the_facts_are_null(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    run, machine = journal.describe_run(SOURCE, [], "a.py"), journal.describe_machine(CPU)
    assert (run["git_commit"], run["git_clean"], machine["driver"]) == (None, None, None)


@pytest.mark.parametrize("system, name", [("darwin", "Apple M2"), ("win32", "Intel64 Family 6")])
def test_the_processor_has_a_name_on_every_system(system, name, monkeypatch):
    asked = []
    monkeypatch.setattr(journal.sys, "platform", system)
    monkeypatch.setattr(journal.platform, "processor", lambda: "Intel64 Family 6")
    monkeypatch.setattr(journal, "output_of", lambda *command: asked.append(command) or "Apple M2")
    assert journal.cpu_name() == name
    assert asked == ([("sysctl", "-n", "machdep.cpu.brand_string")] if system == "darwin" else [])


def test_calibration_multiplies_fp8_if_it_is_given_a_product():
    products = []

    def product(a, b_t, a_scale, b_scale, dtype):
        products.append((a.shape, b_t.shape, a.dtype, dtype, a.float().isfinite().all().item()))
        assert a_scale.item() == b_scale.item() == 1 and a.float().abs().max() > 100

    plain = journal.calibrate(CPU, cpu_has_bf16=CPU_HAS_BF16)  # emulated it would take 14 s
    with_product = journal.calibrate(CPU, product, cpu_has_bf16=False)
    assert [*plain] == [*with_product] == [
        "bf16_matmul_tflops", "fp8_matmul_tflops", "copy_gb_per_s", "all_reduce_gb_per_s",
        "all_gather_gb_per_s"]
    assert (plain["bf16_matmul_tflops"] is not None) == CPU_HAS_BF16
    assert plain["copy_gb_per_s"] > 0
    assert plain["fp8_matmul_tflops"] is None and plain["all_reduce_gb_per_s"] is None
    assert with_product["fp8_matmul_tflops"] > 0
    square = torch.Size([1024, 1024])
    assert products == 6 * [(square, square, torch.float8_e4m3fn, torch.bfloat16, True)]


def test_where_a_cpu_only_emulates_bf16_its_speed_is_not_measured():
    speeds = journal.calibrate(CPU, cpu_has_bf16=False)
    assert speeds["bf16_matmul_tflops"] is None and speeds["copy_gb_per_s"] > 0


def test_a_speed_is_that_of_the_median_of_five_calls_after_the_first(monkeypatch):
    now, durations = [0.0], iter([100.0, 5.0, 1.0, 3.0, 2.0, 4.0])
    monkeypatch.setattr(journal.time, "perf_counter", lambda: now[0])

    def work():
        now[0] += next(durations)

    assert journal.speed(CPU, 1.0, work) == 0.3333
    assert next(durations, None) is None, "six calls"


def test_mfu_is_the_share_of_the_peak_of_the_device(monkeypatch):
    monkeypatch.setattr(journal, "PEAK_FLOPS", {"Fast": 1e12})
    assert journal.mfu(6 * 124e6, 1000.0, "A Fast GPU") == 0.744
    assert journal.mfu(6 * 124e6, 1000.0, "another") is None


@pytest.mark.parametrize("name, peak", [
    ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA H200", 989e12), ("NVIDIA B200", 2250e12),
    ("NVIDIA GH200 480GB", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA GeForce RTX 4090", 165e12)])
def test_mfu_knows_the_peak_by_the_name(name, peak):
    assert journal.mfu(peak / 2, 1.0, name) == 0.5
