"""The record tool against made-up logs: the grammar, a record's life, and attacks, each refused with its own sentence.

Reference: the grammar in records/README.md, written out once more by `write_log` below. All numbers are invented and
stay in pytest's temporary folders.
"""
import hashlib
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import uuid
import zlib
from datetime import UTC, datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from records import compare, log, plots, record
from records.__main__ import main

SOURCE = b'"""a trainer"""\nprint("training \xe2\x9c\x93")\n'
SHARDS = [{"split": "train", "name": "train_1.bin", "bytes": 2024, "tokens": 500, "sha256": "a" * 64},
          {"split": "val", "name": "val_1.bin", "bytes": 1224, "tokens": 100, "sha256": "b" * 64}]
STAGES = [{"first_step": 0, "last_step": 4, "batch_tokens": 1000},
          {"first_step": 4, "last_step": 8, "batch_tokens": 2000}]
FILES = {  # what a script of grammar 2 imports
    "nanogpt/__init__.py": b"",
    "nanogpt/fp8.py": b'"""Gr\xc3\xbc\xc3\x9fe\n' + b"=" * 100 + b'\n"""\r\nWORD = "ready"\n# \xf0\x9f\x98\x80\n',
    "nanogpt/ranks.py": b"def rank():\n    return 0",
}
CALIBRATION = {"bf16_matmul_tflops": 700.0, "fp8_matmul_tflops": None, "copy_gb_per_s": 4000.0,
               "all_reduce_gb_per_s": 300.0, "all_gather_gb_per_s": 300.0}

DRAW = {name: getattr(plots, name) for name in ("draw_loss", "draw_progress")}
LATEST_DATE = record.latest_date


def all_sums(source, files):
    """{path: sha256} of the script and of the files that it imports."""
    contents = {"train_gpt.py": source} | files
    return {path: hashlib.sha256(content).hexdigest() for path, content in contents.items()}


def write_log(path, seed=1, loss=3.4900, ms=1000, source=SOURCE, shards=SHARDS, config=(), environment=(),
              calibration=(), extra=(), files=None, mfu=None, **run):
    """Writes a consistent log of 8 steps of `ms` + `seed` milliseconds; returns its path. Its training
    losses depend on the seed. With `files`, {path: bytes}, it is of grammar 2."""
    config = {"num_steps": 8, "batch_tokens": 1000, "val_tokens": 100, "target_loss": 3.5, "seed": seed, "run_name": "",
              "epochs": 24, "muon_lr": 0.05, "log_dir": f"logs{seed}"} | dict(config)
    environment = {"python": "3.12.3", "torch": "2.11.0", "cuda": "13.0", "triton": "3.6.0", "driver": "580",
                   "devices": ["Fast GPU"] * 2, "world_size": 2, "hosts": 1, "cpu": "a CPU"} | dict(environment)
    sha, ms = hashlib.sha256(source).hexdigest(), ms + seed
    run = {"run_id": str(uuid.uuid4()), "date": f"2026-11-2{seed % 10}T09:30:00Z", "code_sha256": sha,
           "code_bytes": len(source), "git_commit": "c" * 40, "git_clean": True} | run
    others = []
    if files is not None:
        sums = all_sums(source, files)
        listing = "".join(f"{sums[path]}  {path}\n" for path in sorted(sums))
        run = {"grammar": 2, "files_sha256": hashlib.sha256(listing.encode()).hexdigest()} | run
        others = [{"path": path, "sha256": sums[path], "text": content.decode()}
                  for path, content in files.items()]
    lines = [f"run {json.dumps(run)}", *(f"file {json.dumps(fact)}" for fact in others),
             f"config {json.dumps(config)}", f"environment {json.dumps(environment)}",
             *(f"data {json.dumps(s)}" for s in shards), *(f"stage {json.dumps(s)}" for s in STAGES),
             f"calibration {json.dumps(CALIBRATION | dict(calibration))}", 'compile {"what": "block", "seconds": 3.21}',
             'note "steps follow"', "step:0/8 val_loss:10.8000 train_time:0ms step_avg:nanms"]
    for i in range(1, 9):
        time = i * ms + 3 * (i // 4)
        lines.append(f"step:{i}/8 train_loss:{9 - i / 2 + (seed - 1) / 1000:.4f} train_time:{i * ms}ms step_avg:{ms:.2f}ms")
        if i % 4 == 0:
            value = loss if i == 8 else 5.0
            lines.append(f"step:{i}/8 val_loss:{value:.4f} train_time:{time}ms step_avg:{time / i:.2f}ms")
    lines += [*extra, "=" * 100, f"val_loss: {loss:.4f}", "target: 3.5", f"reached: {json.dumps(loss <= 3.5)}",
              f"train_time_s: {time / 1000:.3f}", f"step_avg_ms: {time / 8:.2f}", "tokens: 12000",
              f"tokens_per_s: {12000000 / time:.0f}", f"mfu: {mfu or 3000 / time:.4f}", "peak_memory_mib: 33812",
              "compile_s: 80.1", f"code_sha256: {sha}"]
    path.write_bytes(source + b"=" * 100 + b"\n" + "\n".join(lines).encode() + b"\n")
    return path


def chunk(kind, content):
    """A part of a PNG picture."""
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checksum


def tiny_picture(path, *facts):
    """Writes a PNG picture of one black pixel. If the last fact is a text, it has that as description."""
    text = b""
    if facts and isinstance(facts[-1], str):
        text = chunk(b"tEXt", b"Description\0" + facts[-1].encode())
    pixel = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)) + text
    pixel += chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")
    Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + pixel)


@pytest.fixture(autouse=True)
def quick_pictures(monkeypatch):
    """Drawing is slow; some tests put it back."""
    for name in DRAW:
        monkeypatch.setattr(plots, name, tiny_picture)


@pytest.fixture(autouse=True)
def late_clock(monkeypatch):
    """The dates of `write_log` lie in the past, whenever the tests run."""
    late = datetime(2027, 1, 1, tzinfo=UTC)
    monkeypatch.setattr(record, "latest_date", lambda root: late)


@pytest.fixture
def root(tmp_path):
    """An empty repository."""
    return tmp_path


@pytest.fixture
def three(root):
    """(root, folder of a record of three runs)"""
    logs = [write_log(root / f"{seed}.txt", seed, 3.49 + seed / 1000) for seed in (1, 2, 3)]
    return root, record.new(root, "first", logs, "a claim", "stand-in corpus, one pass")


def edit(path, old, new, count=1):
    """Replaces bytes of a file; the old ones must be there. `count`: how often, -1 for the last place only."""
    raw = path.read_bytes()
    old, new = (x.encode() if isinstance(x, str) else x for x in (old, new))
    assert old in raw
    path.write_bytes(new.join(raw.rsplit(old, 1)) if count == -1 else raw.replace(old, new, count))


def run_tool(capsys, root, *words):
    status = main(["--root", str(root), *map(str, words)])
    out = capsys.readouterr()
    return status, out.out + out.err


def refusal(path):
    """The sentence with which a log is refused; it names the file and is a single sentence."""
    with pytest.raises(log.Refused) as error:
        log.read_log(path)
    text = str(error.value)
    assert text.startswith(str(path)) and text.endswith(".") and "\n" not in text
    return text


# ---- the grammar, field by field

def test_grammar_is_frozen(tmp_path):
    path = write_log(tmp_path / "log.txt", seed=3, extra=['defect {"what": "2 graphs were compiled inside the clock"}'])
    text = path.read_text().splitlines()
    assert text.count("=" * 100) == 2
    assert text[-23:-11] == [
        "step:1/8 train_loss:8.5020 train_time:1003ms step_avg:1003.00ms",
        "step:2/8 train_loss:8.0020 train_time:2006ms step_avg:1003.00ms",
        "step:3/8 train_loss:7.5020 train_time:3009ms step_avg:1003.00ms",
        "step:4/8 train_loss:7.0020 train_time:4012ms step_avg:1003.00ms",
        "step:4/8 val_loss:5.0000 train_time:4015ms step_avg:1003.75ms",
        "step:5/8 train_loss:6.5020 train_time:5015ms step_avg:1003.00ms",
        "step:6/8 train_loss:6.0020 train_time:6018ms step_avg:1003.00ms",
        "step:7/8 train_loss:5.5020 train_time:7021ms step_avg:1003.00ms",
        "step:8/8 train_loss:5.0020 train_time:8024ms step_avg:1003.00ms",
        "step:8/8 val_loss:3.4900 train_time:8030ms step_avg:1003.75ms",
        'defect {"what": "2 graphs were compiled inside the clock"}',
        "=" * 100,
    ]
    got = log.read_log(path)
    assert got.source == SOURCE and got.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert got.run["date"] == "2026-11-23T09:30:00Z" and got.config["muon_lr"] == 0.05
    assert got.environment["devices"] == ["Fast GPU"] * 2 and got.calibration == CALIBRATION
    assert got.values("data") == SHARDS and got.values("stage") == STAGES
    assert got.values("note") == ["steps follow"] and got.values("compile")[0]["seconds"] == 3.21
    assert got.values("defect") == [{"what": "2 graphs were compiled inside the clock"}]
    assert [s.step for s in got.steps] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert [(s.step, s.loss, s.time_ms) for s in got.validations] == [(0, 10.8, 0), (4, 5.0, 4015), (8, 3.49, 8030)]
    assert got.end == {
        "val_loss": 3.49, "target": 3.5, "reached": True, "train_time_s": 8.03, "step_avg_ms": 1003.75, "tokens": 12000,
        "tokens_per_s": 1494, "mfu": 0.3736, "peak_memory_mib": 33812, "compile_s": 80.1,
        "code_sha256": got.run["code_sha256"]}
    assert [got.tokens_at(i) for i in (0, 3, 4, 6, 8)] == [0, 3000, 4000, 8000, 12000]
    assert got.time_at(4) == (4015, True) and got.time_at(5) == (5015, False) and got.time_at(0) == (0, True)


def test_readme_documents_every_fact_and_key():
    text = (Path(record.__file__).parent / "README.md").read_text()
    for kind, keys in [*log.FACTS.items(), ("run", log.RUN_2), ("end", log.END)]:
        assert all(f"`{word}`" in text for word in [kind, *keys]), kind


@pytest.mark.parametrize("old, new", [("mfu: 0.3743", "mfu: null"), ("peak_memory_mib: 33812", "peak_memory_mib: null"),
                                      ("target: 3.5", "target: 3.500"), ('"c' + "c" * 39 + '"', "null"),
                                      ("step:0/8 val_loss:10.8000 train_time:0ms step_avg:nanms\n", "")])
def test_permitted_variants(tmp_path, old, new):
    edit(write_log(tmp_path / "log.txt"), old, new)
    log.read_log(tmp_path / "log.txt")


# ---- grammar 2: the files that the script imported

EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
ONCE = "each file once, and train_gpt.py at the head of the log only"
BETWEEN = "`file` only between a `run` of grammar 2 and `config`"


def test_grammar_2_is_frozen(tmp_path):
    path = write_log(tmp_path / "log.txt", files=FILES)
    lines = path.read_bytes().removeprefix(SOURCE).decode().split("\n")
    kinds = [line.partition(" ")[0] for line in lines[1:6]]
    assert kinds == ["run", "file", "file", "file", "config"]
    start = '{"path": "nanogpt/__init__.py", "sha256": '
    assert lines[2] == f'file {start}"{EMPTY_SHA256}", "text": ""}}'
    got = log.read_log(path)
    assert got.grammar == 2 and got.source == SOURCE
    assert [*got.files.items()] == [("train_gpt.py", SOURCE), *FILES.items()]
    assert got.file_sums["nanogpt/__init__.py"] == EMPTY_SHA256
    assert got.run["files_sha256"] == got.files_sha256


def test_the_sum_of_all_files_by_an_example(tmp_path):
    # computed with the command sha256sum: of "a\n", of "b\n", and of the two lines it prints
    sums = {"a/b.py": "87428fc522803d31065e7bce3cf03fe475096631e5e07bbd7a0fde60c4cf25c7",
            "train_gpt.py": "0263829989b6fd954f72baaf2fc64bc2e2f01d692d4de72986ea808f6e99813f"}
    of_both = "9eb2464baa5727035c4067fc7c2def6f8ff935e0add5c3c37d5ec458664cbe22"
    got = log.read_log(write_log(tmp_path / "log.txt", source=b"b\n", files={"a/b.py": b"a\n"}))
    assert got.file_sums == sums
    assert got.files_sha256 == got.run["files_sha256"] == of_both


def test_a_script_that_imports_nothing_has_no_other_file(tmp_path):
    got = log.read_log(write_log(tmp_path / "log.txt", files={}))
    assert got.grammar == 2 and got.files == {"train_gpt.py": SOURCE}


def test_grammar_1_has_the_script_only(tmp_path):
    got = log.read_log(write_log(tmp_path / "log.txt"))
    assert got.grammar == 1 and got.files == {"train_gpt.py": SOURCE}


def test_code_writes_all_files_so_that_they_run(tmp_path, capsys):
    source = b"from nanogpt import fp8, ranks\nprint(fp8.WORD, ranks.rank())\n"
    path = write_log(tmp_path / "log.txt", source=source, files=FILES)
    folder = tmp_path / "new" / "folder"
    status, out = run_tool(capsys, tmp_path, "code", path, folder)
    assert (status, out) == (0, f"wrote 4 file(s) below {folder}\n")
    paths = [p for p in folder.rglob("*") if p.is_file()]
    written = {str(p.relative_to(folder)): p.read_bytes() for p in paths}
    assert written == {"train_gpt.py": source} | FILES
    options = dict(cwd=folder, capture_output=True, text=True)
    run = subprocess.run([sys.executable, "-B", "train_gpt.py"], **options)
    assert (run.stdout, run.stderr) == ("ready 0\n", "")
    if shutil.which("sha256sum"):  # the command of the README
        command = "find * -name '*.py' | LC_ALL=C sort | xargs sha256sum | sha256sum"
        assert command in (Path(record.__file__).parent / "README.md").read_text()
        run = subprocess.run(command, shell=True, **options)
        assert run.stdout.split()[0] == log.read_log(path).run["files_sha256"]


def test_code_without_a_folder_prints_the_script_alone(tmp_path, capfdbinary):
    path = write_log(tmp_path / "log.txt", files=FILES)
    assert main(["code", str(path)]) == 0
    assert capfdbinary.readouterr().out == SOURCE


def test_code_of_grammar_1_writes_the_script(tmp_path, capsys):
    path, folder = write_log(tmp_path / "log.txt"), tmp_path / "old"
    assert run_tool(capsys, tmp_path, "code", path, folder)[0] == 0
    assert [p.name for p in folder.iterdir()] == ["train_gpt.py"]
    assert (folder / "train_gpt.py").read_bytes() == SOURCE


@pytest.mark.parametrize("kind", ["file", "link"])
@pytest.mark.parametrize("name", ["train_gpt.py", "nanogpt/ranks.py"])
def test_code_overwrites_nothing(tmp_path, capsys, name, kind):
    path, folder = write_log(tmp_path / "log.txt", files=FILES), tmp_path / "folder"
    present = folder / name
    present.parent.mkdir(parents=True)
    if kind == "file":
        present.write_text("mine")
    else:
        present.symlink_to("nowhere")
    status, out = run_tool(capsys, tmp_path, "code", path, folder)
    assert status == 2 and out == f"refused: {present}: exists already.\n"
    assert [p for p in folder.rglob("*") if not p.is_dir()] == [present], "nothing else is written"
    assert kind == "link" or present.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    path, folder = write_log(tmp_path / "log.txt"), tmp_path / "file"
    folder.write_text("mine")
    status, out = run_tool(capsys, tmp_path, "code", path, folder)
    assert status == 2 and out.count("\n") == 1
    assert f"{folder / 'train_gpt.py'}: cannot be written" in out


def test_code_needs_no_more_of_a_log_than_the_files(tmp_path, capsys):
    path = write_log(tmp_path / "log.txt", files=FILES)
    raw = path.read_bytes()
    path.write_bytes(raw[: raw.index(b"\nconfig ") + 1])
    assert run_tool(capsys, tmp_path, "code", path, tmp_path / "a")[0] == 0
    path.write_bytes(raw[: raw.rindex(b"\nfile ") + 1])  # without the last one
    status, out = run_tool(capsys, tmp_path, "code", path, tmp_path / "b")
    assert status == 2 and "(of all files in the log)" in out and not (tmp_path / "b").exists()
    assert run_tool(capsys, tmp_path, "code", path)[0] == 0, "the script is whole"


RUN, FILE, CONFIG = rb"(?<=\n)(run .*\n)", rb"(?<=\n)(file .*\n)", rb"(config .*\n)"
FP8 = rb"(file \{\"path\": \"nanogpt/fp8.py\".*\n)"
RANKS_SHA256 = rb'("nanogpt/ranks.py", "sha256": )"[0-9a-f]{64}"'
FILES_SHA256 = rb'("files_sha256": )"[0-9a-f]{64}"'
BOTH_KEYS = rb'"grammar": 2, "files_sha256": "[0-9a-f]{64}", '


@pytest.mark.parametrize("pattern, new, sentence", [
    (b"ready", b"reads", "(of the text of nanogpt/fp8.py), found '"),
    (b"return 0", b"return  0", "(of the text of nanogpt/ranks.py), found '"),
    (rb"\\r\\n", rb"\\n", "(of the text of nanogpt/fp8.py), found '"),
    (RANKS_SHA256, rb'\1"' + b"0" * 64 + b'"', "(of the text of nanogpt/ranks.py), found '0000"),
    (RANKS_SHA256, rb'\1"' + b"0" * 63 + b'"', "another kind of value for file.sha256"),
    (FP8, b"", "expected files_sha256"),
    (FP8, rb"\1\1", f"{ONCE}, found 'nanogpt/fp8.py'"),
    (FILE + CONFIG, rb"\2\1", BETWEEN),
    (RUN + FILE, rb"\2\1", BETWEEN),
    (FILES_SHA256, rb'\1"' + b"0" * 64 + b'"', "expected files_sha256"),
    (FILES_SHA256 + b", ", b"", "the key files_sha256 in `run`"),
    (b'"grammar": 2, ', b"", "the key grammar in `run`"),
    (b'"grammar": 2', b'"grammar": 1', "another kind of value for run.grammar, found 1"),
    (b'"grammar": 2', b'"grammar": 3', "another kind of value for run.grammar, found 3"),
    (BOTH_KEYS, b"", BETWEEN),
    (b'"text": ""', b'"text": null', "another kind of value for file.text, found None"),
    (b'"text": ""', rb'"text": "\\ud800"', "strict JSON"),
    (b'"text": ""', b'"txt": ""', "the key text in `file`"),
    (b"a trainer", b"a trainex", "expected code_sha256"),
])
def test_edit_of_the_files(tmp_path, capsys, pattern, new, sentence):
    path, folder = write_log(tmp_path / "log.txt", files=FILES), tmp_path / "folder"
    edited, count = re.subn(pattern, new, path.read_bytes(), count=1)
    assert count == 1
    path.write_bytes(edited)
    text = refusal(path)
    assert sentence in text and ", line " in text and "found " in text and len(text) < 600
    if sentence != BETWEEN:  # a file behind `config` is not looked at when files are written
        status, out = run_tool(capsys, tmp_path, "code", path, folder)
        assert (status, out) == (2, f"refused: {text}\n") and not folder.exists()


@pytest.mark.parametrize("path", [
    "/tmp/x.py", "../x.py", "a/../x.py", "./x.py", "a/./x.py", "a//x.py", "/x.py", "~/x.py", "",
    "x.PY", "x.txt", "x.py/", ".py", ".hidden.py", ".git/x.py", "a.b/x.py", "a\\b.py", "C:x.py",
    "x.py\n", "x\x00.py", "x y.py", "\u00e9.py", "\x1b[31m.py",
    "a/b/c/d/e/f/x.py", "x" * 101 + ".py",
], ids=ascii)
def test_paths_that_are_no_plain_ones_are_refused(tmp_path, capsys, path):
    made, folder = write_log(tmp_path / "log.txt", files={path: b"print(1)\n"}), tmp_path / "folder"
    text = refusal(made)
    assert "another kind of value for file.path, found " in text and text.isascii()
    status, out = run_tool(capsys, tmp_path, "code", made, folder)
    assert (status, out) == (2, f"refused: {text}\n") and not folder.exists()


@pytest.mark.parametrize("paths", [["train_gpt.py"], ["Train_GPT.py"], ["a.py", "A.py"],
                                   ["a/b.py", "A/b.py"]])
def test_paths_that_some_systems_take_for_one_are_refused(tmp_path, paths):
    made = write_log(tmp_path / "log.txt", files={path: b"print(1)\n" for path in paths})
    assert f"{ONCE}, found {paths[-1]!r}" in refusal(made)


@pytest.mark.parametrize("files", [
    {f"a{i}.py": b"" for i in range(100)},
    {f"a{i}.py": b"#" * 2**20 for i in range(3)},
    {"a.py": b"\n" * (2**20 - 100)},  # twice as long in JSON
], ids=["many", "large", "long line"])
def test_files_up_to_the_limits_are_read(tmp_path, files):
    got = log.read_log(write_log(tmp_path / "log.txt", files=files))
    assert got.files == {"train_gpt.py": SOURCE} | files


@pytest.mark.parametrize("files, sentence", [
    ({f"a{i}.py": b"" for i in range(101)}, "at most 100 files of at most 1,048,576 bytes"),
    ({"a.py": b"#" * (2**20 + 1)}, "at most 100 files of at most 1,048,576 bytes"),
    ({"a.py": b"#" * 2**21}, "of at most 2,097,152 characters"),
], ids=["many", "large", "long line"])
def test_files_beyond_the_limits_are_refused(tmp_path, files, sentence):
    assert sentence in refusal(write_log(tmp_path / "log.txt", files=files))


def test_damage_of_any_kind_to_the_files_is_read_or_refused(tmp_path):
    path, dice = write_log(tmp_path / "log.txt", files=FILES), random.Random(1)
    raw = path.read_bytes()
    first, last = raw.index(b"\nrun "), raw.index(b"\nconfig ")
    for _ in range(300):
        damaged, at = bytearray(raw), dice.randrange(first, last)
        damaged[at] ^= 1 << dice.randrange(8)
        cut = raw[:at] + raw[at + dice.randrange(1, 40):]
        path.write_bytes(dice.choice([damaged, cut]))
        try:
            got = log.read_log(path)
        except log.Refused:
            continue
        assert got.files == {"train_gpt.py": SOURCE} | FILES


def test_half_a_character_in_any_fact_is_refused(tmp_path):
    shards = [SHARDS[0] | {"name": "\ud800.bin"}, SHARDS[1]]  # no text has it, so no file can
    assert "strict JSON" in refusal(write_log(tmp_path / "log.txt", shards=shards))




def test_a_record_of_grammar_1_is_as_it_was(three):
    _, folder = three
    sha = hashlib.sha256(SOURCE).hexdigest()
    code = json.loads((folder / "record.json").read_text())["code"]
    assert code == {"sha256": sha, "bytes": len(SOURCE)}
    row = f"| code | sha256 `{sha[:16]}`, {len(SOURCE)} bytes, embedded in each log |"
    assert row in (folder / "README.md").read_text()


@pytest.mark.parametrize("files, sentence", [
    (FILES | {"nanogpt/fp8.py": b"other"}, "but code.files.nanogpt/fp8.py is"),
    (FILES | {"nanogpt/nvfp4.py": b""}, "but code.files.nanogpt/nvfp4.py is 'nothing' in"),
    ({"nanogpt/__init__.py": b""}, "but code.files.nanogpt/fp8.py is"),
    (None, "but code.files.nanogpt/__init__.py is"),
], ids=["changed", "one more", "fewer", "grammar 1"])
def test_the_runs_of_a_record_share_all_files(root, capsys, files, sentence):
    logs = [write_log(root / "a.txt", 1, files=FILES), write_log(root / "b.txt", 2, files=files)]
    status, out = run_tool(capsys, root, "new", "mixed", *logs)
    assert status == 2 and sentence in out and "a.txt and" in out and "b.txt." in out


def two_runs(folder, seed, **options):
    return group(folder, [3.49, 3.48], [1000, 1000], seed=seed, **options)


def test_compare_shows_the_difference_of_one_file(tmp_path):
    before = two_runs(tmp_path, 1, files=FILES)
    assert "\ncode: identical" in report(before, two_runs(tmp_path, 3, files=FILES))
    changed = FILES | {"nanogpt/ranks.py": b"def rank():\n    return 1"}
    assert report(before, two_runs(tmp_path, 5, files=changed)).endswith("""
code: 1 lines added, 1 removed
--- A/nanogpt/ranks.py
+++ B/nanogpt/ranks.py
@@ -1,2 +1,2 @@
 def rank():
-    return 0
+    return 1""")


def test_compare_shows_the_difference_of_all_files(tmp_path):
    before = two_runs(tmp_path, 1, files=FILES)
    changed = FILES | {"nanogpt/ranks.py": b"def rank():\n    return 1"}
    changed["nanogpt/fp16.py"] = b"\x1b[31m"
    del changed["nanogpt/fp8.py"]
    text = report(before, two_runs(tmp_path, 3, source=SOURCE + b"x = 1\n", files=changed))
    assert """
code: 3 lines added, 7 removed
  train_gpt.py: 1 added, 0 removed
  nanogpt/fp8.py: 0 added, 6 removed
  nanogpt/ranks.py: 1 added, 1 removed
  nanogpt/fp16.py: 1 added, 0 removed
--- A/train_gpt.py
""" in text
    assert "--- A/nanogpt/fp8.py\n+++ /dev/null\n" in text
    assert "--- /dev/null\n+++ B/nanogpt/fp16.py\n@@ -0,0 +1 @@\n+?[31m" in text


def test_compare_of_one_file_with_many(tmp_path):
    text = report(two_runs(tmp_path, 1), two_runs(tmp_path, 3, files=FILES))
    assert "  nanogpt/ranks.py: 2 added, 0 removed" in text and "A/train_gpt.py" not in text


# ---- a record's life

def test_code_is_byte_identical_and_needs_no_complete_log(tmp_path, capfdbinary):
    path = write_log(tmp_path / "log.txt", source=b"a = 1\r\n# \xff\x00\nb = 2\n")
    path.write_bytes(path.read_bytes()[:-700])
    assert main(["code", str(path)]) == 0
    assert capfdbinary.readouterr().out == b"a = 1\r\n# \xff\x00\nb = 2\n"




@pytest.mark.parametrize("given", ["2026-11-21_dated", "2026-11-22_dated", "dated"])
def test_a_name_that_begins_with_a_date_does_not_get_another(root, capsys, given):
    for i in (1, 2):
        write_log(root / f"{i}.txt", seed=i)
    assert run_tool(capsys, root, "new", "2026-11-21_", root / "1.txt", root / "2.txt")[0] == 2, "it has no name"
    assert run_tool(capsys, root, "new", given, root / "1.txt", root / "2.txt")[0] == 0
    assert [folder.name for folder in (root / "records").iterdir()] == ["2026-11-21_dated"]


def test_a_new_record_says_if_others_call_its_data_something_else(root, capsys):
    other_val = [SHARDS[0], SHARDS[1] | {"sha256": "c" * 64}]
    said = []
    for seed, (name, shards) in enumerate([("a book", SHARDS), ("FineWeb", SHARDS), ("a book", other_val)], 1):
        path = write_log(root / f"{seed}.txt", seed=seed, shards=shards)
        status, out = run_tool(capsys, root, "new", f"number_{seed}", path, f"--data={name}")
        assert status == 0
        said.append([line for line in out.splitlines() if line.startswith("note: ")])
    first = "2026-11-21_number_1"
    assert said == [[], [f"note: {first} calls the same shards 'a book', not 'FineWeb'."],
                    [f"note: {first} calls other validation shards 'a book', too."]]


# ---- results of evaluate.py beside a record

EVALUATION = {
    "form": 1, "date": "2026-11-22T16:00:00Z", "torch": "2.11.0", "device": "Fast GPU",
    "models": [{"path": "/home/somebody/models/a.pt", "weights_sha256": "0" * 64, "steps": 8, "preset": "onepass", "tokens": "gpt2"}],
    "results": [{"measure": "hellaswag", "model": 0, "value": 0.2859, "standard_error": 0.0045, "units": 10042,
                 "data": "/data/items/", "data_sha256": "1" * 64}],
    "differences": [],
}


@pytest.fixture
def evaluated(root, capsys):
    """(root, folder of a record with results)"""
    (root / "results.json").write_text(json.dumps(EVALUATION))
    logs = [write_log(root / f"{seed}.txt", seed) for seed in (1, 2)]
    status, out = run_tool(capsys, root, "new", "good", *logs, f"--eval={root / 'results.json'}")
    assert status == 0, out
    return root, root / "records" / "2026-11-21_good"




@pytest.mark.parametrize("file, old, new, sentence", [
    ("README.md", "28.59 %", "38.59 %", "(generated from evaluation.json)"),
    ("README.md", "**not part of the proof**", "proved", "(generated from evaluation.json)"),
    ("README.md", "<!-- evaluation:end -->", "", "expected <!-- evaluation:begin --> and then"),
    ("evaluation.json", "0.2859", "0.3859", "(generated from evaluation.json)"),
    ("evaluation.json", "0.2859", '"high"', "results: value as records/evaluation.py describes it"),
    ("evaluation.json", "{", "[", "expected strict JSON"),
    ("evaluation.json", None, None, "expected evaluation.json beside it, found none"),
])
def test_results_that_were_edited(evaluated, capsys, file, old, new, sentence):
    root, folder = evaluated
    if old is None:
        (folder / file).unlink()
    else:
        edit(folder / file, old, new)
    status, out = run_tool(capsys, root, "check", folder)
    assert status == 1 and sentence in out


def test_results_in_another_form_make_no_record(root, capsys):
    (root / "results.json").write_text("{}")
    status, out = run_tool(capsys, root, "new", "bad", write_log(root / "1.txt"), f"--eval={root / 'results.json'}")
    assert status == 2 and out.startswith("refused: ") and "form as records/evaluation.py describes it" in out
    assert not (root / "records").exists()




def test_new_is_all_or_nothing(root, monkeypatch):
    def broken(*_):
        raise RuntimeError("disk full")
    monkeypatch.setattr(plots, "draw_loss", broken)
    with pytest.raises(RuntimeError):
        record.new(root, "first", [write_log(root / "a.txt")])
    assert list((root / "records").iterdir()) == []


def test_check_refuses_a_root_without_records(tmp_path, capsys):
    status, out = run_tool(capsys, tmp_path, "check")
    assert status == 2 and "has no folder `records`" in out






# ---- attacks on a log

END_LOSS, END_TIME = "\nval_loss: 3.4900", "train_time_s: 8.014"  # of write_log's seed 1


@pytest.mark.parametrize("old, new, sentence", [
    (b"a trainer", b"a trainex", "expected code_sha256"),
    (b"a trainer", b"a trainers", "expected code_bytes"),
    (END_LOSS, "\nval_loss: 3.4100", "val_loss to be 3.49 (the last validation), found 3.41"),
    ("step:8/8 val_loss:3.4900", "step:8/8 val_loss:3.4100", "val_loss to be 3.41"),
    ("reached: true", "reached: false", "reached to be val_loss <= target"),
    (END_LOSS, "\nval_loss: 03.4900", "strict JSON"),
    ("target: 3.5", "target: 3.6", "target to be 3.5 (config.target_loss)"),
    ("step:5/8 train_loss:6.5000 train_time:5005ms step_avg:1001.00ms\n", "",
     "train step 5 (steps are gapless), found 'step 6'"),
    ("step:5/8 train_loss", "step:4/8 train_loss", "train step 5 (steps are gapless), found 'step 4'"),
    ("step:4/8 val_loss", "step:3/8 val_loss", "val step 4"),
    ("step:5/8", "step:5/9", "step:5/8 (config.num_steps)"),
    ("train_time:5005ms step_avg:1001.00", "train_time:3005ms step_avg:601.00", "time does not run back"),
    ("train_time:5005ms", "train_time:5105ms", "step_avg to be train_time / step"),
    (END_TIME, "train_time_s: 7.014", "train_time_s to be 8.014"),
    ("step_avg_ms: 1001.75", "step_avg_ms: 901.75", "step_avg_ms to be 1001.75"),
    ("tokens: 12000", "tokens: 13000", "tokens to be 12000 (steps x batch_tokens"),
    ("tokens_per_s: 1497", "tokens_per_s: 1697", "tokens_per_s to be tokens / train_time_s"),
    ("mfu: 0.3743", "mfu: -0.3743", "`mfu: ...` in the end block"),
    ("compile_s: 80.1", "compile_s: nan", "`compile_s: ...` in the end block, found 'compile_s: nan'"),
    ("val_loss:3.4900", "val_loss:nan", "step:I/N train_loss or val_loss"),
    ("train_loss:6.5000", "train_loss:-6.5000", "step:I/N train_loss or val_loss"),
    ('"tokens": 500', '"tokens": 501', "expected 2026 bytes for 501 tokens, found 2024"),
    ('"tokens": 500', '"tokens": -500', "another kind of value for data.tokens, found -500"),
    ('"copy_gb_per_s": 4000.0', '"copy_gb_per_s": NaN', "NaN is not a number"),
    ('"copy_gb_per_s": 4000.0', '"copy_gb_per_s": 1e999', "1e999 is not a number"),
    ('"muon_lr": 0.05', '"muon_lr": 0.05, "muon_lr": 0.06', "a key stands twice"),
    ('"muon_lr": 0.05', '"muon_lr": ' + "[" * 5000 + "]" * 5000, "JSON"),
    ('"muon_lr": 0.05', '"muon_lr": ' + "[" * 20 + "]" * 20, "at most 8 levels deep"),
    ('"muon_lr": 0.05', '"muon_lr": ' + "9" * 9000, "strict JSON"),
    ('"muon_lr": 0.05', '"muon_lr": "' + "x" * 200_000 + '"', "at most 100,000 characters"),
    ('"first_step": 4', '"first_step": 5', "begins at step 4"),
    ('"val_tokens": 100, ', "", "the key val_tokens in `config`"),
    ('"split": "val"', '"split": "train"', "both splits, train and val"),
    ('"name": "val_1.bin"', '"name": ""', "another kind of value for data.name"),
    ('"world_size": 2', '"world_size": 8', "8 devices (world_size)"),
    ("2026-11-21T", "2026-02-31T", "a date of the calendar"),
    ('note "steps follow"', 'note "steps \x1b[31mfollow"', "strict JSON"),
    ('note "steps follow"', 'exec "rm -rf"', "a step or a fact"),
    ("environment {", 'note "x"\nenvironment {', None),
    ("config {", f"calibration {json.dumps(CALIBRATION)}\nconfig {{", "the facts in the order run, config"),
])
def test_edit_of_one_place(tmp_path, old, new, sentence):
    path = write_log(tmp_path / "log.txt")
    edit(path, old, new, count=-1 if old == END_LOSS else 1)
    if sentence is None:
        log.read_log(path)
    else:
        text = refusal(path)
        assert sentence in text and ", line " in text and "found " in text and len(text) < 600


@pytest.mark.parametrize("kind", ["run", "config", "environment", "calibration", "data"])
def test_header_line_twice(tmp_path, kind):
    path = write_log(tmp_path / "log.txt")
    line = re.search(rf"\n({kind} .*\n)", path.read_bytes().decode())[1]
    edit(path, line, line + line)
    assert ("each shard once" if kind == "data" else f"only one `{kind}` line") in refusal(path)


def test_time_scaled_in_step_lines(tmp_path):
    fast, slow = write_log(tmp_path / "fast.txt", ms=500), write_log(tmp_path / "slow.txt", ms=1000)
    steps, end = (p.read_bytes().rsplit(b"=" * 100, 1)[i] for i, p in enumerate((fast, slow)))
    fast.write_bytes(steps + b"=" * 100 + end)
    assert "train_time_s to be 4.014 (the last validation), found 8.014" in refusal(fast)


@pytest.mark.parametrize("keep, sentence", [(-1, "code_sha256"), (-60, "code_sha256"), (-300, "second line of 100"),
                                            (-900, "second line of 100"), (60, "then a line of 100")])
def test_log_cut_before_the_end(tmp_path, keep, sentence):
    path = write_log(tmp_path / "log.txt")
    path.write_bytes(path.read_bytes()[:keep])
    assert sentence in refusal(path)


def test_damage_of_any_kind_is_read_or_refused(tmp_path):
    """Random flips, cuts and moved lines: no other exception than Refused, and never another loss or time."""
    path, dice = write_log(tmp_path / "log.txt"), random.Random(0)
    raw = path.read_bytes()
    for _ in range(600):
        damaged, at = bytearray(raw), dice.randrange(len(raw))
        lines, (i, j) = raw.split(b"\n"), dice.sample(range(raw.count(b"\n")), 2)
        lines[i], lines[j] = lines[j], lines[i]
        damaged[at] ^= 1 << dice.randrange(8)
        path.write_bytes(dice.choice([damaged, raw[:at] + raw[at + dice.randrange(1, 40):], b"\n".join(lines)]))
        try:
            got = log.read_log(path)
        except log.Refused:
            continue
        assert got.source == SOURCE and (got.end["val_loss"], got.end["train_time_s"]) == (3.49, 8.014)


def test_more_after_the_end(tmp_path):
    path = write_log(tmp_path / "log.txt")
    path.write_bytes(path.read_bytes() + b"val_loss: 3.1\n")
    assert "the file to end with the newline" in refusal(path)


def test_a_record_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    logs = [write_log(tmp_path / f"{seed}.txt", seed, 3.49) for seed in (1, 2)]
    (tmp_path / "records").write_text("a file where the folder should be")
    status, out = run_tool(capsys, tmp_path, "new", "first", *logs, "--data=FineWeb")
    assert (status, out.count("\n")) == (2, 1) and out.startswith("refused: ") and "records" in out


def test_huge_rubbish_links_and_missing(tmp_path, capsys):
    path = tmp_path / "huge.txt"
    with open(path, "wb") as f:
        f.truncate(300 * 2**20)
    assert "at most 268,435,456 bytes, found 314,572,800" in refusal(path)
    path = tmp_path / "rubbish.txt"
    path.write_bytes(bytes(range(256)) * 1000)
    assert "then a line of 100 '='" in refusal(path) and "\\x00\\x01" in refusal(path)
    path.write_bytes(SOURCE + b"=" * 100 + b"\nrun \xff\xfe\n")
    assert "UTF-8" in refusal(path) and "line 4" in refusal(path)
    (tmp_path / "link.txt").symlink_to(path)
    assert "found a link" in refusal(tmp_path / "link.txt")
    assert "cannot be read" in refusal(tmp_path / "absent.txt")
    assert run_tool(capsys, tmp_path, "code", path)[0] == 2
    assert run_tool(capsys, tmp_path, "check", tmp_path / "absent")[0] == 2




# ---- attacks on a record

@pytest.mark.parametrize("change, sentence", [
    ({"source": SOURCE + b"# more\n"}, "but code.sha256 is"),
    ({"config": {"muon_lr": 0.06}}, "but config.muon_lr is 0.05 in"),
    ({"config": {"new_key": 1}}, "but config.new_key is 'nothing' in"),
    ({"shards": [SHARDS[0], SHARDS[1] | {"sha256": "d" * 64}]}, "but data.val val_1.bin.sha256 is"),
    ({"shards": [*SHARDS, SHARDS[0] | {"name": "train_2.bin", "sha256": "c" * 64}]}, "but data.train train_2.bin is 'nothing' in"),
    ({"environment": {"devices": ["Fast GPU", "Slow GPU"]}}, "but hardware.devices[1] is 'Fast GPU' in"),
    ({"environment": {"devices": ["Fast GPU"], "world_size": 1}}, "but hardware.devices is"),
    ({"environment": {"torch": "2.10.0"}}, "but hardware.torch is '2.11.0' in"),
])
def test_mixed_logs(root, capsys, change, sentence):
    logs = [write_log(root / "a.txt", 1), write_log(root / "b.txt", 2, **change)]
    status, out = run_tool(capsys, root, "new", "mixed", *logs)
    assert status == 2 and sentence in out and "a.txt and" in out and "b.txt." in out
    assert not (root / "records").exists()


def test_seed_names_and_folders_may_differ(root):
    change = {"run_name": "other", "log_dir": "x", "data_dir": "y", "jsonl": True}
    record.new(root, "fine", [write_log(root / "a.txt", 1), write_log(root / "b.txt", 2, config=change,
                                                                      environment={"driver": "581"})])


def test_one_run_twice(root, capsys):
    a, b = write_log(root / "a.txt", 1), write_log(root / "b.txt", 2)
    assert "found the same bytes as in" in run_tool(capsys, root, "new", "x", a, a, b)[1]
    same_id = json.loads(re.search(r"\nrun (.*)\n", a.read_text())[1])["run_id"]
    c = write_log(root / "c.txt", 3, run_id=same_id)
    assert "found the same run_id as in" in run_tool(capsys, root, "new", "x", a, c)[1]
    d = write_log(root / "d.txt", 1, loss=3.48)  # a copy with a new id and a better loss
    assert "found the same step times as in" in run_tool(capsys, root, "new", "x", a, d)[1]
    assert run_tool(capsys, root, "new", "x", a)[0] == 0
    assert "found the same bytes as in" in run_tool(capsys, root, "new", "y", a, b)[1]
    folder = record.new(root, "y", [b])
    (folder / "log_1.txt").write_bytes(a.read_bytes())
    status, out = run_tool(capsys, root, "check")
    assert status == 1 and "expected each run once" in out


def test_time_scaled_everywhere_but_in_mfu(root, capsys):
    a, b = write_log(root / "a.txt", 1), write_log(root / "b.txt", 2, ms=500)
    edit(b, re.search(r"mfu: \S+", b.read_text())[0], "mfu: 0.3740")
    assert "mfu x train_time_s must agree" in run_tool(capsys, root, "new", "x", a, b)[1]




def test_log_removed_or_replaced(three, capsys):
    root, folder = three
    (folder / "log_3.txt").unlink()
    status, out = run_tool(capsys, root, "check")
    assert status == 1 and "expected n to be 2 (from the logs), found 3" in out
    (folder / "log_1.txt").unlink()
    assert "expected log_1.txt, log_2.txt" in run_tool(capsys, root, "check")[1]


def test_folder_renamed(three, capsys):
    root, folder = three
    folder.rename(folder.with_name("2026-01-01_first"))
    status, out = run_tool(capsys, root, "check")
    assert status == 1 and "begins with the date of the first run, 2026-11-21_" in out




@pytest.mark.parametrize("name, claim, sentence", [
    ("../evil", "", "a record's name"), ("Upper", "", "a record's name"), ("x", "a | b", "a claim or data name"),
    ("first", "", "exists already")])
def test_names_and_claims(three, capsys, name, claim, sentence):
    root, _ = three
    status, out = run_tool(capsys, root, "new", name, write_log(root / "a.txt", 11), f"--claim={claim}")
    assert status == 2 and sentence in out


def test_text_from_logs_cannot_break_the_page(root):
    device = "GPU | <!-- record:end --> `x`"
    folder = record.new(root, "x", [write_log(root / "a.txt", environment={"devices": [device, device]})])
    text = (folder / "README.md").read_text()
    assert text.count("<!-- record:end -->") == 1 and "GPU ? ??-- record:end --? ?x?" in text


# ---- runs that were not run

def check_of(capsys, root):
    """What `check` says once the leaderboard is written."""
    run_tool(capsys, root, "table")
    return run_tool(capsys, root, "check")


def with_losses_of_seed_1(path):
    """Gives a log of `write_log` the training losses of seed 1."""
    text = path.read_text()
    for step in range(1, 9):
        text = re.sub(rf"step:{step}/8 train_loss:\S+", f"step:{step}/8 train_loss:{9 - step / 2:.4f}", text)
    path.write_text(text)
    return path


def test_a_run_under_new_ids_with_shifted_times_is_refused(root, capsys):
    # another id, another date, another seed, times a millisecond later; the same losses
    copies = [with_losses_of_seed_1(write_log(root / f"{seed}.txt", seed)) for seed in (1, 2, 3)]
    status, out = run_tool(capsys, root, "new", "copies", *copies)
    assert status == 2 and "expected each run once, found the same code and losses as in" in out
    edit(copies[1], "train_loss:8.5000", "train_loss:8.5001")
    status, out = run_tool(capsys, root, "new", "copies", *copies[:2])
    assert status == 2 and "found 7 of 8 training losses equal to those in" in out


def test_the_runs_of_a_record_have_different_seeds(root, capsys):
    a, b = write_log(root / "a.txt", 1), write_log(root / "b.txt", 2)
    edit(b, '"seed": 2', '"seed": 1')
    status, out = run_tool(capsys, root, "new", "x", a, b)
    assert status == 2 and "b.txt: expected a seed of its own for each run, found 1 as in" in out


def test_a_run_of_another_record_is_found_by_its_losses(root, capsys):
    record.new(root, "one", [write_log(root / "1.txt", 1)])
    copied = with_losses_of_seed_1(write_log(root / "2.txt", 2))
    status, out = run_tool(capsys, root, "new", "two", copied)
    assert status == 2 and "found the same code and losses as in" in out
    other = record.new(root, "two", [write_log(root / "3.txt", 3)])
    with_losses_of_seed_1(other / "log_1.txt")
    status, out = run_tool(capsys, root, "check")
    assert status == 1 and "log_1.txt: expected each run once, found the same code and losses as in" in out


def test_equal_losses_of_other_code_are_a_warning(root, capsys):
    """On a CPU code that is only faster computes the same."""
    record.new(root, "one", [write_log(root / "1.txt", 1)])
    faster = with_losses_of_seed_1(write_log(root / "2.txt", 2, ms=500, source=SOURCE + b"# faster\n"))
    record.new(root, "two", [faster])
    status, out = check_of(capsys, root)
    assert status == 0 and "every loss is that of" in out


VAL = SHARDS[1]


@pytest.mark.parametrize("shards, config, sentence", [
    ([SHARDS[0], VAL | {"sha256": "a" * 64}], {}, "than that of the train shard 'train_1.bin'"),
    ([*SHARDS, SHARDS[0] | {"name": "train_2.bin"}], {}, "each shard once, none in both splits"),
    (SHARDS, {"val_tokens": 101}, "val_tokens of at most 100 (in the val shards), found 101"),
    (SHARDS, {"epochs": 23}, "stages of at most 11500 tokens (the train shards, 23 times), found 12000"),
    (SHARDS, {"epochs": 0}, "config.epochs to be a whole number from 1, found 0"),
    (SHARDS, {"epochs": "24"}, "config.epochs to be a whole number from 1, found '24'"),
    ([SHARDS[0], VAL | {"name": "../val_1.bin"}], {}, "the plain name of a file"),
    ([SHARDS[0], VAL | {"name": "/data/val_1.bin"}], {}, "the plain name of a file"),
    ([SHARDS[0], VAL | {"name": "a\\val_1.bin"}], {}, "the plain name of a file"),
    ([SHARDS[0], VAL | {"name": ".."}], {}, "the plain name of a file"),
    ([SHARDS[0], VAL | {"name": "v" * 201}], {}, "of at most 200 characters"),
    (SHARDS, {"run_name": "x" * 1001}, "at most 1,000 characters in config.run_name"),
    (SHARDS, {"muon_lr": [["x" * 99_000]]}, "at most 1,000 characters in config.muon_lr"),
    (SHARDS, {"x" * 99_000: 1}, "keys of at most 100 letters, digits and _ in `config`"),
    (SHARDS, {"\x1b[31m": 1}, "keys of at most 100 letters, digits and _ in `config`"),
])
def test_data_and_names_that_cannot_be(tmp_path, shards, config, sentence):
    text = refusal(write_log(tmp_path / "log.txt", shards=shards, config=config))
    assert sentence in text and ", line " in text and len(text) < 600


def test_a_date_in_the_future_is_refused(three, capsys, monkeypatch):
    root, folder = three
    run_tool(capsys, root, "table")
    monkeypatch.setattr(record, "latest_date", lambda root: datetime(2026, 11, 22, tzinfo=UTC))
    status, out = run_tool(capsys, root, "check")
    assert status == 1 and "log_2.txt, line 4: expected a date up to 2026-11-22" in out
    status, out = run_tool(capsys, root, "new", "late", write_log(root / "9.txt", 9))
    assert status == 2 and "found '2026-11-29T09:30:00Z'" in out


def test_the_latest_date_is_a_day_from_now_or_from_the_last_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(record.time, "time", lambda: 1_000_000_000.0)
    monkeypatch.setattr(record.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 0, ""))
    assert LATEST_DATE(tmp_path) == datetime(2001, 9, 10, 1, 46, 40, tzinfo=UTC)
    monkeypatch.setattr(record.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 0, "1100000000\n"))
    assert LATEST_DATE(tmp_path) == datetime(2004, 11, 10, 11, 33, 20, tzinfo=UTC)


def test_a_long_key_of_record_json_is_shortened(three, capsys):
    root, folder = three
    edit(folder / "record.json", '"n": 3', f'"n": 3, "{"x" * 100_000}": 1')
    status, out = run_tool(capsys, root, "check")
    assert status == 1 and len(out) < 2000


def test_a_folder_with_another_name_is_refused(three, capsys):
    root, folder = three
    folder.rename(folder.with_name("2026-11-21_[first](x)"))
    status, out = run_tool(capsys, root, "check")
    assert status == 1 and "expected a name of lower-case letters, digits, _ and -" in out


# ---- pictures and pages

@pytest.mark.parametrize("damage, sentence", [
    (lambda raw: b"", "expected a PNG picture"),
    (lambda raw: raw[:8], "an empty or cut one"),
    (lambda raw: raw[:-12], "an empty or cut one"),
    (lambda raw: raw + b"more", "an empty or cut one"),
    (lambda raw: raw.replace(b"IDAT", b"IDAX"), "expected an undamaged PNG picture"),
    (lambda raw: raw[:8] + chunk(b"IHDR", bytes(13)) + raw[33:], "an empty or cut one"),
])
def test_the_picture_of_an_older_record_is_whole(three, capsys, damage, sentence):
    root, folder = three
    path = folder / "record.json"
    path.write_text(re.sub(r',\n "loss_png_sha256": "\w+"', "", path.read_text()))
    assert check_of(capsys, root)[0] == 0
    picture = folder / "loss.png"
    picture.write_bytes(damage(picture.read_bytes()))
    status, out = run_tool(capsys, root, "check")
    assert status == 1 and f"{picture}: " in out and sentence in out


@pytest.mark.parametrize("name", ["README.md", "loss.png", "record.json"])
def test_a_record_without_one_of_its_files(three, capsys, name):
    root, folder = three
    run_tool(capsys, root, "table")
    (folder / name).unlink()
    status, out = run_tool(capsys, root, "check")
    assert status == 1 and f"{folder / name}: cannot be read" in out








def test_labels_of_the_progress_picture_do_not_overlap():
    from matplotlib.figure import Figure
    fig = Figure(figsize=(6, 3))
    ax = fig.subplots()
    labels = [ax.annotate(f"{10 + i}.0 s", (0.5 + i / 100, 0.5)) for i in range(6)]
    fig.draw_without_rendering()
    boxes = [label.get_window_extent() for label in labels]
    assert boxes[0].overlaps(boxes[1])
    plots.separate(fig, labels)
    boxes = [label.get_window_extent() for label in labels]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


# ---- runs that are no records

NO_TARGET = [("target: 3.5", "target: null"), ("reached: true", "reached: null")]
INTERRUPTED = [("compile_s: 80.1", "compile_s: 80.1\ninterrupted: true")]
RESUMED = [('note "steps follow"', 'note "resumed at step 4 from x.pt"')]
EARLY = [(re.compile(r"step:5/8 train.*?(?=\n=)", re.DOTALL), "step:5/8 train_loss:6.5000 train_time:5005ms "
          "step_avg:1001.00ms"), *INTERRUPTED]
NO_VALIDATION = [(re.compile(r"step:0/8 val.*?(?=\n=)", re.DOTALL), "step:1/8 train_loss:8.5000 train_time:1001ms "
                  "step_avg:1001.00ms"), ("val_loss: 3.4900", "val_loss: null"), *INTERRUPTED]
LATER = [(re.compile(r"step:0/8 val.*?(?=step:5/8)", re.DOTALL), ""), *RESUMED]


def changed(path, changes):
    """A log with some places changed, each the last of its kind."""
    text = path.read_text()
    for old, new in changes:
        if isinstance(old, str):
            assert old in text
            text = new.join(text.rsplit(old, 1))
        else:
            assert old.search(text)
            text = old.sub(new, text, count=1)
    path.write_text(text)
    return path


@pytest.mark.parametrize("changes, sentence", [
    (NO_TARGET, "found a run without a target"),
    (INTERRUPTED, "found a run that was interrupted (interrupted: true)"),
    (EARLY, "found a run that was interrupted (interrupted: true)"),
    (RESUMED, "found a run that was resumed (note 'resumed at step 4 from x.pt')"),
    (LATER, "found a run that was resumed (note 'resumed at step 4 from x.pt')"),
    ([('note "steps follow"', 'note "Interrupted twice"')], "found a run that was interrupted (note"),
    ([('"epochs": 24', '"epochs": 24, "resume": "x.pt"')], "found a run that was resumed (config.resume is 'x.pt')"),
], ids=range(7))
def test_runs_that_are_no_records(root, capsys, changes, sentence):
    folder = record.new(root, "real", [write_log(root / "2.txt", 2)])
    path = changed(write_log(root / "1.txt", 1), changes)
    status, out = run_tool(capsys, root, "new", "x", path)
    assert status == 2 and f"1.txt: expected a whole run with a target, {sentence}" in out and out.count("\n") == 1
    assert run_tool(capsys, root, "code", path, root / "code")[0] == 0
    status, out = run_tool(capsys, root, "compare", path, folder)
    assert status == 0 and "loss: B - A = " in out
    assert ("caution" in out) == (changes is not NO_TARGET or "targets differ" in out)
    assert run_tool(capsys, root, "plot", path, "--out", root / "a.png")[0] == 0
    (folder / "log_1.txt").write_bytes(path.read_bytes())
    status, out = run_tool(capsys, root, "check")
    assert status == 1 and "expected a whole run with a target" in out


@pytest.mark.parametrize("place", ["val_loss: 3.4900", "tokens: 12000", "compile_s: 80.1"])
def test_the_line_of_a_fault_is_counted_with_the_line_that_says_interrupted(root, place):
    path = changed(write_log(root / "1.txt", 1), [(place, f"interrupted: true\n{place}")])
    number = path.read_text().split("\n").index("compile_s: 80.1") + 1
    assert log.read_log(path).end_line["compile_s"] == number
    changed(path, [("compile_s: 80.1", "compile_s: long")])
    with pytest.raises(log.Refused, match=f"line {number}: expected `compile_s: "):
        log.read_log(path)


def test_a_run_without_any_validation_can_be_drawn_but_not_compared(root, capsys):
    path = changed(write_log(root / "1.txt", 1), NO_VALIDATION)
    assert run_tool(capsys, root, "plot", path, "--out", root / "a.png")[0] == 0
    status, out = run_tool(capsys, root, "compare", path, path)
    assert status == 2 and "expected a validation to compare, found val_loss: null" in out


@pytest.mark.parametrize("changes, sentence", [
    ([NO_TARGET[0]], "reached to be null, as target is, found True"),
    ([NO_TARGET[1]], "reached to be val_loss <= target, found None"),
    ([("val_loss: 3.4900", "val_loss: null")], "`val_loss: ...` in the end block"),
    ([("compile_s: 80.1", "compile_s: 80.1\ninterrupted: yes")], "in the end block"),
    ([EARLY[0]], "steps up to 8 with a last validation"),
    ([LATER[0]], "train step 1 (steps are gapless)"),
], ids=range(6))
def test_a_run_that_lacks_something_says_why(tmp_path, changes, sentence):
    assert sentence in refusal(changed(write_log(tmp_path / "log.txt"), changes))


def test_compare_takes_single_logs_and_folders_of_logs(root, capsys):
    for side, seed in (("a", 1), ("b", 4)):
        (root / side).mkdir()
        three_runs(root / side, seed)
    status, out = run_tool(capsys, root, "compare", root / "a", root / "b" / "4.txt")
    assert status == 0 and "A = a: n = 3, " in out and "B = 4.txt: n = 1, " in out
    (root / "empty").mkdir()
    status, out = run_tool(capsys, root, "compare", root / "a", root / "empty")
    assert status == 2 and "expected logs (*.txt), found none" in out


def test_compare_leaves_out_what_is_no_whole_log_of_a_folder(root, capsys):
    three_runs(root, 1)
    cut = write_log(root / "4.txt", 4)
    cut.write_bytes(cut.read_bytes().partition(b"step:6/8")[0])
    (root / "notes.txt").write_text("run 2 was on another day\n")
    status, out = run_tool(capsys, root, "compare", root, root / "1.txt")
    assert status == 0 and f"A = {root.name}: n = 3, " in out and out.count("left out: ") == 2
    assert "4.txt" in out and "the run goes on or was killed" in out and "notes.txt" in out
    for path in (root / "1.txt", root / "2.txt", root / "3.txt"):
        path.unlink()
    status, out = run_tool(capsys, root, "compare", root, root)
    assert status == 2 and "none of its logs is of a run that came to its end" in out


def test_compare_takes_resumed_runs_with_a_caution_and_interrupted_ones_only_by_name(root, capsys):
    three_runs(root, 1)
    changed(write_log(root / "4.txt", 4, config={"resume": "logs/x.saved/step_000004"}), RESUMED)
    changed(write_log(root / "5.txt", 5, mfu=0.31), INTERRUPTED)  # it counts the FLOPs of fewer steps
    status, out = run_tool(capsys, root, "compare", root, root / "1.txt")
    assert status == 0 and f"A = {root.name}: n = 4, " in out
    assert re.search("4.txt.* was resumed", out) and re.search("left out: .*5.txt: the run was interrupted", out)
    status, out = run_tool(capsys, root, "compare", root / "1.txt", root / "5.txt")
    assert status == 0 and "B = 5.txt: n = 1, " in out and re.search("5.txt was interrupted", out)


def test_compare_says_that_a_run_has_ended_early_and_which_ones_were_disturbed(root, capsys):
    three_runs(root, 1)
    log = (root / "2.txt").read_bytes()
    defect = b'defect {"what": "3 steps were profiled: it takes time"}\n'
    (root / "2.txt").write_bytes(log.replace(b"step:0/8", defect + b"step:0/8", 1))
    cut = write_log(root / "4.txt", 4)
    note = b'note "ended early: the training loss is nan at step 6"\n'
    cut.write_bytes(cut.read_bytes().partition(b"step:6/8")[0] + note)
    status, out = run_tool(capsys, root, "compare", root, root / "1.txt")
    assert status == 0 and f"A = {root.name}: n = 3, " in out
    assert re.search("left out: .*4.txt.*the run ended early.*the training loss is nan at step 6", out)
    assert f"caution: {root / '2.txt'}: 3 steps were profiled" in out


@pytest.mark.parametrize("rest", [b"", b"\n", b"note"])
def test_a_log_that_ends_behind_its_source_is_one_sentence(tmp_path, rest):
    path = tmp_path / "log.txt"
    path.write_bytes(SOURCE + b"=" * 100 + b"\n" + rest)
    assert "the run goes on or was killed" in refusal(path)


def test_compare_warns_of_two_runs_with_one_seed(root, capsys):
    three_runs(root, 1)
    path = changed(write_log(root / "4.txt", 4, config={"seed": 1}), [])
    status, out = run_tool(capsys, root, "compare", root, root / "2.txt")
    assert status == 0 and f"caution: {path}: expected a seed of its own for each run, found 1" in out


def test_compare_names_the_folder_that_it_is_called_in(root, capsys, monkeypatch):
    three_runs(root, 1)
    monkeypatch.chdir(root)
    status, out = run_tool(capsys, root, "compare", ".", "1.txt")
    assert status == 0 and f"A = {root.name}: n = 3, " in out


def test_letters_that_the_terminal_lacks_are_no_error(tmp_path):
    for name, seed in (("läuf 1.txt", 1), ("läuf 2.txt", 2)):
        write_log(tmp_path / name, seed)
    command = [sys.executable, "-m", "records", "compare", tmp_path / "läuf 1.txt", tmp_path / "läuf 2.txt"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, env=os.environ | {
        "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"") and rb"A = l\xe4uf 1.txt" in done.stdout


# ---- curves of any runs

def test_smoothing_is_a_centred_mean():
    losses = [float(i % 3) for i in range(300)]
    means = plots.smoothed(losses)  # of three on each side
    assert means[0] == losses[0] and means[-1] == losses[-1] and len(means) == 300
    assert means[1] == pytest.approx(1.0) and means[150] == pytest.approx(sum(losses[147:154]) / 7)
    assert plots.smoothed([2.0, 4.0]) == [2.0, 4.0] and plots.smoothed([]) == []


def test_plot_draws_whole_runs_and_those_that_go_on(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole, cut = write_log(tmp_path / "whole.txt", 1), write_log(tmp_path / "cut.txt", 2)
    cut.write_bytes(cut.read_bytes().partition(b"step:6/8")[0] + b"step:6/8 train_lo")
    for x in ("time", "tokens", "steps"):
        assert run_tool(capsys, tmp_path, "plot", whole, cut, "--x", x) == (0, "wrote curves.png\n")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert run_tool(capsys, tmp_path, "plot", tmp_path) == (0, "wrote curves.png\n"), "all logs of the folder"
    assert run_tool(capsys, tmp_path, "plot", cut) == (0, "wrote cut.png\n")
    assert [s.step for s in log.read_log(cut, may_be_cut=True).steps][-1] == 5
    cut.write_bytes(cut.read_bytes().partition(b"step:6/8")[0] + b"step:6/8 train_loss:nan train_time:9ms step_avg:1.50ms\n"
                    b'note "ended early: the training loss is nan"\n')
    assert [s.step for s in log.read_log(cut, may_be_cut=True).steps][-1] == 5, "a run that diverged is drawn up to there"
    cut.write_bytes(cut.read_bytes().partition(b"step:0/8")[0])
    status, out = run_tool(capsys, tmp_path, "plot", cut)
    assert status == 2 and "found 'no step'" in out
    status, out = run_tool(capsys, tmp_path, "plot", whole, cut)
    assert status == 0 and "left out: " in out and "found 'no step'" in out and "wrote curves.png\n" in out
    status, out = run_tool(capsys, tmp_path, "plot", cut, cut)
    assert status == 2 and "no log here has steps to draw" in out
    (tmp_path / "empty").mkdir()
    status, out = run_tool(capsys, tmp_path, "plot", tmp_path / "empty")
    assert status == 2 and out == f"refused: {tmp_path / 'empty'} has no logs (*.txt); name a folder that has some.\n"


def test_the_legend_tells_runs_apart(tmp_path):
    paths = [tmp_path / "a" / "1.txt", tmp_path / "b" / "1.txt"]
    for path in paths:
        path.parent.mkdir()
    different = [log.read_log(write_log(path, seed)) for path, seed in zip(paths, (1, 2))]
    assert plots.legends(different) == ["a/1, seed 1", "b/1, seed 2"]
    assert plots.legends(different[:1]) == ["1, seed 1"]
    alike = [log.read_log(write_log(path)) for path in paths]
    assert plots.legends(alike) == ["a/1, seed 1", "b/1, seed 1"]
    assert plots.legends([alike[0]] * 2) == ["a/1.txt, seed 1"] * 2
    named = log.read_log(write_log(paths[0], config={"run_name": "$x$ \x1b[31m"}))
    assert plots.legends([named]) == [r"\$x\$ \x1b[31m, seed 1"]


@pytest.mark.parametrize("out, sentence", [
    ("a.jpg", "a.jpg: expected a name that ends in .png, found '.jpg'"),
    ("none/a.png", "none/a.png: cannot be written"),
])
def test_plot_refuses_a_picture_it_cannot_write(tmp_path, capsys, monkeypatch, out, sentence):
    monkeypatch.chdir(tmp_path)
    status, text = run_tool(capsys, tmp_path, "plot", write_log(tmp_path / "1.txt", 1), "--out", out)
    assert status == 2 and sentence in text and text.count("\n") == 1


# ---- without scipy and matplotlib

def run_bare(root, *words):
    """(exit status, output) of the tool in a Python that has neither scipy nor matplotlib."""
    program = ("import sys; sys.modules.update({'scipy': None, 'matplotlib': None}); "
               "from records.__main__ import main; sys.exit(main(sys.argv[1:]))")
    command = [sys.executable, "-c", program, "--root", str(root), *map(str, words)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(record.__file__).parents[1])
    return run.returncode, run.stdout + run.stderr


@pytest.mark.parametrize("words, library", [
    (["plot", "1.txt"], "matplotlib"),
    (["new", "second", "1.txt"], "scipy"),
    (["table"], "scipy"),
])
def test_what_to_install_is_said(three, words, library):
    root, _ = three
    status, out = run_bare(root, *(root / word if word == "1.txt" else word for word in words))
    assert status == 2 and out.startswith("refused: ") and out.count("\n") == 1
    assert f"need{'s' if library == 'matplotlib' else ''} {library}, which is not installed here" in out
    assert "install it with `pip install -r requirements-dev.txt`" in out


def test_code_compare_and_check_work_without_libraries(three, capsys):
    root, folder = three
    run_tool(capsys, root, "table")
    assert run_bare(root, "code", root / "1.txt") == (0, SOURCE.decode())
    status, out = run_bare(root, "compare", folder, root / "1.txt")
    assert status == 0 and "loss: B - A = -0.0010" in out and "stage 1: A " in out
    status, out = run_bare(root, "compare", folder, folder)
    assert status == 0 and out.count("left out, as scipy is not installed: interval, effect size and test") == 2
    status, out = run_bare(root, "check")
    assert status == 0 and "left out: p-values are those in record.json, as scipy is not installed" in out
    edit(folder / "record.json", '"mean": 3.492', '"mean": 3.482')
    status, out = run_bare(root, "check")
    assert status == 1 and "expected loss.mean to be 3.492 (from the logs), found 3.482" in out


# ---- tracks and comparison

def three_runs(root, seed, losses=(3.490, 3.491, 3.492), **options):
    """Logs of three runs from this seed on."""
    return [write_log(root / f"{seed + i}.txt", seed + i, loss, **options) for i, loss in enumerate(losses)]


def board_rows(root):
    """[(rank, name)] as the leaderboard has them: first the ranked ones, then the others."""
    text = (root / "README.md").read_text()
    ranked = re.findall(r"^\| (\d+) \| 2026-11-\d\d \| \[(\w+)\]", text, re.MULTILINE)
    groups = re.findall(r" \(([^)]+)\): (\[[^;\n]+)", text.partition(" Without a rank")[2])
    return ranked + [(why, name) for why, links in groups for name in re.findall(r"\[(\w+)\]", links)]










def group(tmp_path, losses, times, seed=1, **kwargs):
    return [log.read_log(write_log(tmp_path / f"{seed + i}.txt", seed + i, loss, ms=ms, **kwargs))
            for i, (loss, ms) in enumerate(zip(losses, times))]


def report(a, b, **kwargs):
    return "\n".join(compare.compare(a, b, ["a", "b"], **kwargs))


def test_compare_clear_cases(tmp_path):
    a = group(tmp_path, [3.490, 3.491, 3.492, 3.493], [1000] * 4)
    b = group(tmp_path, [3.470, 3.471, 3.472, 3.473], [900] * 4, seed=5, source=SOURCE + b"# \x1b[31mnew\n")
    text = report(a, b)
    # by hand: both variances 0.001^2 * 5/3, so the error is 0.001 * sqrt(2 * 5/3 / 4), t = -21.9, df = 6
    assert "loss: B - A = -0.0200 (95 % CI -0.0222 to -0.0178)" in text and "t = -21.91, df = 6.0" in text
    assert "significant (p < 0.01): B is lower in loss" in text and "significant (p < 0.01): B is lower in time" in text
    assert "hosts: alike" in text and "code: 1 lines added, 0 removed" in text and "+# ?[31mnew" in text
    assert ("stage 1: A 1003.25 ms x 4 steps of 1,000 tokens, B 907.25 ms x 4 steps of 1,000 tokens, B / A = 0.9043"
            in text)
    assert "stage 2" in text and "not exact" not in text


def test_compare_unclear_cases(tmp_path):
    a = group(tmp_path, [3.490, 3.492, 3.494], [1000] * 3)
    b = group(tmp_path, [3.489, 3.490, 3.493], [1000] * 3, seed=4, config={"muon_lr": 0.06})
    text = report(a, b)
    # d = 0.00133 / sqrt((4 + 4.33) / 2 * 1e-6) = 0.653; 2 (3.417 / d)^2 + 1.7 = 56 runs a side, 3 of which are there
    more = re.search(r"not significant \(p >= 0.01\); about (\d+) more runs a side would settle", text)
    assert int(more[1]) == pytest.approx(53.4, abs=1.01)
    assert "config: muon_lr is 0.05 in A and 0.06 in B" in text and "code: identical" in text
    equal = group(tmp_path, [3.490, 3.492, 3.494], [1000] * 3, seed=7)
    assert "more than 200 runs a side; the interval says how large the true one may still be" in report(a, equal)
    single = group(tmp_path, [3.4], [500], seed=20)
    text = report(a, single)
    assert text.count("no p-value") == 2 and "significant" not in text
    flat = group(tmp_path, [3.49, 3.49], [1000] * 2, seed=30), group(tmp_path, [3.48, 3.48], [1000] * 2, seed=40)
    assert "loss: B - A = -0.0100; neither side varies at all" in report(*flat)


def test_compare_other_hosts_and_data(tmp_path):
    a = group(tmp_path, [3.490, 3.492], [1000] * 2)
    faster = group(tmp_path, [3.490, 3.492], [1000] * 2, seed=3, calibration={"bf16_matmul_tflops": 700 * 1.21})
    text = report(a, faster)
    assert "B's calibration (product and copy, geometric mean) is 1.100 of A's" in text
    assert "B's times below are multiplied by 1.100" in text
    assert "B / A = 1.1022" in text and "rough" not in text  # 1003.75 x 1.1 / 1001.75 with seeds 3.5 and 1.5
    cpus = [group(tmp_path, [3.490, 3.492], [1000] * 2, seed=20 + 2 * i, environment={"devices": ["CPU"] * 2, "cpu": name},
                  calibration={"bf16_matmul_tflops": rate}) for i, (name, rate) in enumerate((("x", 1.0), ("x", 3.0), ("y", 1.3)))]
    assert "hosts: CPUs of one name" in report(*cpus[:2]) and "multiplied" not in report(*cpus[:2])
    assert "multiplied by 1.140" in report(cpus[0], cpus[2])
    other = group(tmp_path, [3.490, 3.492], [1000] * 2, seed=5, environment={"devices": ["Old GPU"] * 2},
                  calibration={"bf16_matmul_tflops": 350.0, "copy_gb_per_s": 2000.0}, config={"val_tokens": 99},
                  shards=[SHARDS[0], SHARDS[1] | {"sha256": "e" * 64}])
    text = report(a, other)
    assert "is 0.500 of A's" in text and "a rough estimate" in text and "caution: the validation data differ" in text
    assert "caution: the validation tokens differ (100 and 99)" in text and "data: val val_1.bin.sha256 is" in text


def test_compare_shortens_the_diff_and_finds_records_by_name(root, capsys):
    longer = SOURCE + b"".join(b"x = %d\n" % i for i in range(100))
    record.new(root, "one", [write_log(root / "a.txt", 1)])
    record.new(root, "two", [write_log(root / "b.txt", 2, source=longer)])
    short, whole = (run_tool(capsys, root, "compare", "one", "two", *more)[1] for more in ([], ["--diff"]))
    assert "more lines of diff (--diff shows all)" in short and "+x = 99" not in short and "+x = 99" in whole
    status, out = run_tool(capsys, root, "compare", "one", "three")
    assert status == 2 and "no file, folder or record is called 'three'; check the path" in out






def test_a_name_that_is_too_long_for_a_file_is_refused_in_a_sentence(capsys):
    assert main(["compare", "a" * 300, "laptop"]) == 2
    assert capsys.readouterr().err.startswith("refused: ")


def test_a_record_keeps_its_first_log_whole_and_gives_back_the_others_byte_for_byte(root, capfdbinary):
    paths = [write_log(root / f"{seed}.txt", seed, files=FILES) for seed in (1, 2, 3)]
    folder = record.new(root, "short", paths, "a claim", "stand-in corpus, one pass")
    written = [path.read_bytes() for path in paths]
    kept = [path.read_bytes() for path in record.log_paths(folder, "log_*.txt")]
    assert kept[0] == written[0]
    for number in (2, 3):
        assert SOURCE not in kept[number - 1] and FILES["nanogpt/ranks.py"] not in kept[number - 1]
        assert main(["log", str(folder / f"log_{number}.txt")]) == 0
        assert capfdbinary.readouterr().out == written[number - 1]


def test_a_log_of_another_source_stays_whole(tmp_path):
    first = write_log(tmp_path / "1.txt").read_bytes()
    other = write_log(tmp_path / "2.txt", source=b"print(2)\n").read_bytes()
    assert log.shortened(other, first, "1.txt") == other


@pytest.mark.parametrize("changed", ["log_1.txt", "log_2.txt"])
def test_an_edit_in_what_two_logs_share_or_in_a_short_one_is_found(three, changed):
    _, folder = three
    edit(folder / changed, "steps follow", "steps fallow") if changed == "log_2.txt" else edit(folder / changed, "a trainer", "b trainer")
    with pytest.raises(log.Refused, match="found another sum; put back both logs"):
        log.read_whole(folder / "log_2.txt")
