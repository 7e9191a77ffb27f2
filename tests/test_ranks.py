"""Several processes: all end when one of them has bad input or is killed."""
import re
import time
from pathlib import Path

import pytest
from conftest import ROOT, arguments, documents, write_shard
from processes import STDOUT, TORCHRUN, run, write_driver

from nanogpt import planning, ranks
from nanogpt.ranks import BadInput

SCRIPT = ROOT / "train_gpt.py"


def said(text):
    return re.findall(r"^train_gpt\.py: (.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("fault, pattern", [
    ("setting", r"rank 1 has --muon_lr 0\.5 where rank 0 has .*; all ranks need the same command, code and data"),
    ("cut", r"rank 1: .*fineweb_train_000002\.bin has .*"),
    ("another", r"rank 1 has train shard fineweb_train_000002\.bin \S+ where rank 0 has .*"),
    ("more", r"rank 1 has train shard fineweb_train_000003\.bin \S+ where rank 0 has None.*"),
    ("code", r"rank 1 has code train_gpt\.py \S+ where rank 0 has .*"),
    ("all", r".*num_stepz.*"),
])
def test_bad_input_is_one_sentence_and_ends_all(fault, pattern, corpus, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    for path in corpus.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    if fault in ("cut", "another", "more"):
        name = f"fineweb_train_00000{3 if fault == 'more' else 2}.bin"
        write_shard(own / name, documents(6000, 9), count=7000 if fault == "cut" else 6000)
    words = {"setting": "--muon_lr=0.5", "all": "--num_stepz=3"}.get(fault, f"--data_dir={own}")
    driver = write_driver(tmp_path / "driver.py", f"""
if os.environ["RANK"] == "1" and {fault == "code"}:
    t.SOURCE += b"# edited\\n"
if os.environ["RANK"] == "1" or {fault == "all"}:
    sys.argv.append({words!r})""")
    begin = time.monotonic()
    # torchrun ends a rank that waits while another has spoken
    process = run(*TORCHRUN, "--nproc_per_node=2", driver,
                  *arguments(data_dir=corpus, log_dir=tmp_path / "logs"), stderr=STDOUT)
    (sentence,) = said(process.stdout)
    assert re.fullmatch(pattern, sentence), sentence
    assert time.monotonic() - begin < 40
    assert re.search(r"exitcode +: 2", process.stdout)


def test_the_others_end_when_a_rank_is_killed(corpus, tmp_path):
    driver = write_driver(tmp_path / "driver.py", """
import pathlib
pathlib.Path(sys.argv[0] + os.environ["RANK"]).write_text(str(os.getpid()))
if os.environ["RANK"] == "1":
    t.STOP.end_after_a_step = lambda: os.kill(os.getpid(), 9)""")
    keys = arguments(data_dir=corpus, log_dir=tmp_path)
    torchrun = run(*TORCHRUN, "--nproc_per_node=2", driver, *keys, timeout=60)
    assert torchrun.returncode != 0
    for rank in (0, 1):
        pid = Path(f"{driver}{rank}").read_text()
        assert not Path("/proc", pid).exists()


@pytest.mark.parametrize("error", [BadInput("no shard"), OSError("no shard")], ids=type)
def test_what_one_rank_cannot_do_is_said_by_all(monkeypatch, error):
    def work():
        raise error

    monkeypatch.setattr(ranks, "all_ranks", lambda sentence: [None, sentence])
    with pytest.raises(BadInput, match="rank 1: no shard"):
        ranks.on_all_ranks(work)


def test_hosts_do_not_go_on_from_different_saves(monkeypatch):
    """Each of several hosts has a copy of its own, which may be older."""
    found = planning.RunFiles([], None, [], {"step": 7})
    monkeypatch.setattr(planning, "on_all_ranks", lambda *_: found)
    monkeypatch.setattr(ranks, "all_ranks", lambda facts: [facts, facts | {"a save of step": 3}])
    with pytest.raises(BadInput, match="rank 1 has a save of step 3 where rank 0 has 7"):
        planning.check_run_files(None, [], [])
