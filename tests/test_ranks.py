"""Ranks that disagree, do not come, die, are stopped or hang: who says what, with which status, and that none is left.

Real processes with gloo where the process is the point, started by hand (no torchrun ends the others) or by torchrun;
what the watch counts and says is tried on beats that a test makes up.
"""
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import ROOT, arguments, documents, write_shard
from processes import ENVIRONMENT, STDOUT, TORCHRUN, Process, free_port

from nanogpt import checkpoints, joining, watch
from nanogpt.ranks import BadInput, SharedFault, refuse_faults
from nanogpt.stopping import Stop

SCRIPT = ROOT / "train_gpt.py"
LONG = {"num_steps": 5000, "epochs": 10**5, "val_interval": 0, "target_loss": 0, "save_checkpoint": ""}
GO_ON = "; the run ends here; --resume goes on from its last save, if there is one"
DRIVER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import train_gpt as t
from nanogpt import watch
watch.LOOK_S, watch.LOST_LOOKS, watch.STILL_S = 0.5, 8, 4
t.STOP.listen()
inner = t.train_step
def train_step(model, optimizer, batch, step, *rest):
    if t.STOP.in_steps and step == 3 and os.environ["RANK"] == "1":
        exec(sys.argv[2])
    return inner(model, optimizer, batch, step, *rest)
t.train_step = train_step
sys.exit(t.main(sys.argv[3:]))
"""


class Ranks(list):
    """Processes that a test has started."""

    def start(self, *command, **variables):
        self.append(Process(*command, stderr=STDOUT, env=ENVIRONMENT | variables))
        return self[-1]

    def by_hand(self, rank, port, *command, world_size=2):
        return self.start(*command, RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(port))

    def ends(self, seconds=60):
        """The statuses and the sentences of all processes, which must end by themselves."""
        end = time.monotonic() + seconds
        statuses = [process.wait(max(0.1, end - time.monotonic())) for process in self]
        said = [re.findall(r"^train_gpt\.py: (.*)$", process.out(), re.MULTILINE) for process in self]
        return statuses, said


@pytest.fixture
def ranks():
    started = Ranks()
    yield started
    for process in started:
        process.kill()


@pytest.fixture
def port():
    return free_port()


def two_by_hand(ranks, port, corpus, folder, of_rank_1, **changes):
    for rank in range(2):
        own = {"data_dir": corpus, "log_dir": folder / "logs"} | changes | (of_rank_1 if rank else {})
        ranks.by_hand(rank, port, SCRIPT, *arguments(**own))


def test_a_port_of_a_test_is_given_to_nobody_else_but_its_ranks_can_meet_there(port):
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    store = dist.TCPStore("127.0.0.1", port, is_master=True)
    store.set("a", "b")
    assert dist.TCPStore("127.0.0.1", port).get("a") == b"b"


# ------------------------------------------------------------------------------------------- before the run begins


@pytest.mark.parametrize("of_rank_1, said", [
    ({"seed": 1, "muon_lr": 0.5},
     (r"rank 1 runs --muon_lr=0.5 where rank 0 runs --muon_lr=0.0\d+, runs --seed=1 where rank 0 runs --seed=0; all "
      "ranks need the same command, code and data", None)),
    ({"num_stepz": 3}, (None, "rank 1: unknown key --num_stepz; .*")),
], ids=["other values", "a bad key on one rank"])
def test_what_one_rank_runs_otherwise_is_named_and_both_end(of_rank_1, said, ranks, port, corpus, tmp_path):
    two_by_hand(ranks, port, corpus, tmp_path, of_rank_1)
    statuses, found = ranks.ends()
    assert statuses == [2, 2]
    for pattern, sentences in zip(said, found):
        assert len(sentences) == (pattern is not None), found
        assert pattern is None or re.fullmatch(pattern, sentences[0]), found
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("other", ["cut", "another"])
def test_a_shard_that_only_one_rank_reads_so_is_named_by_its_rank(other, ranks, port, corpus, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    for path in corpus.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    second = own / "fineweb_train_000002.bin"
    write_shard(second, documents(6000, 9), count=6000 if other == "another" else 7000)
    two_by_hand(ranks, port, corpus, tmp_path, {"data_dir": own})
    statuses, said = ranks.ends()
    assert statuses == [2, 2]
    if other == "cut":
        assert said[0] == [] and len(said[1]) == 1 and said[1][0].startswith(f"rank 1: {second} has "), said
    else:
        assert said == [["rank 1 reads another train shard fineweb_train_000002.bin than rank 0; "
                         "all ranks need the same command, code and data"], []]


def test_who_waits_in_vain_says_how_many_came_and_what_to_do(ranks, port, corpus, tmp_path):
    begin = time.monotonic()
    args = arguments(data_dir=corpus, log_dir=tmp_path / "logs", join_timeout=0.02)
    ranks.by_hand(0, port, SCRIPT, *args, world_size=3)
    ranks.by_hand(1, 1, SCRIPT, *args)  # nobody listens at port 1
    statuses, ((alone,), (in_vain,)) = ranks.ends()
    assert statuses == [2, 2] and time.monotonic() - begin < 30
    assert alone.startswith("1 of 3 processes came within 0.02 minutes, rank 1 (also 2) did not; ")
    assert in_vain.startswith("rank 1: nobody answers at 127.0.0.1:1 within 0.02 minutes (Connection refused); ")
    assert "--join_timeout" in alone and "--join_timeout" in in_vain


def test_a_rank_whose_torchrun_was_killed_before_they_met_does_not_wait_for_join_timeout(port, monkeypatch):
    monkeypatch.setattr(joining, "STORE_PATIENCE_S", 0.2)
    place = joining.Place(rank=0, world_size=2, address="127.0.0.1", port=port, in_torchrun=True)
    begin = time.monotonic()
    with pytest.raises(BadInput, match=f"torchrun does not answer at 127.0.0.1:{port} .*; it was killed, or"):
        joining.open_store(place, deadline=begin + 300, minutes=5)
    assert time.monotonic() - begin < 10


def test_an_address_that_can_be_no_host_is_one_sentence():
    place = joining.Place(rank=1, world_size=2, address="a..b", port=29500, in_torchrun=False)
    with pytest.raises(BadInput, match=r"nobody answers at a\.\.b:29500 .*; start rank 0 there, correct MASTER_ADDR"):
        joining.open_store(place, deadline=time.monotonic(), minutes=0.02)


def test_a_rank_that_comes_when_the_others_have_given_up_still_knows_who_had_come():
    class Store(dict):
        set, get = dict.__setitem__, dict.__getitem__

        def check(self, names):
            return all(name in self for name in names)

    store = Store(gave_up="rank 2 has not come", note_0=json.dumps({"fault": None}))
    place = joining.Place(1, 3, "host", 1, False)
    notes = joining.exchange(store, place, {"fault": None}, time.monotonic() + 5)
    assert sorted(notes) == [0, 1]


def test_each_rank_says_its_own_fault_and_one_says_what_all_have():
    def heard(faults, world_size=3):
        raised = []
        for rank in range(world_size):
            with pytest.raises(SharedFault) as error:
                refuse_faults(faults, rank, world_size)
            raised.append(str(error.value) if error.value.speaker == rank else None)
        return raised

    assert heard({0: "a", 1: "a", 2: "a"}) == ["a", None, None]
    assert heard({0: None, 1: "a", 2: "b"}) == [None, "rank 1: a", "rank 2: b"]
    assert heard({0: "b", 1: "a", 2: "a"}) == ["rank 0: b", "rank 1: a", None]
    assert heard({1: "a"}) == [None, "rank 1: a", None], "rank 2 has not come yet"
    assert heard({0: "a"}, world_size=1) == ["a"]
    refuse_faults({0: None, 1: None}, 0, 2)


def test_of_many_ranks_and_differences_the_first_are_named():
    def runs(**changes):
        return {"keys": {"seed": 0, "num_steps": 4} | changes, "files": {"a.py": "1"}}

    assert joining.difference([runs(), runs()]) == ""
    found = joining.difference([runs(), runs(seed=1), runs(seed=1), runs(num_steps=5)])
    assert found == f"rank 1 (also 2) runs --seed=1 where rank 0 runs --seed=0; {joining.REMEDY}"
    theirs = runs() | {"files": {"a.py": "2", "b.py": "3"}}
    assert joining.difference([runs(), theirs]) == f"rank 1 runs another a.py than rank 0; {joining.REMEDY}"
    shards = [{"shards": {"train shard x.bin": "1"}}, {"shards": {"train shard y.bin": "1"}}]
    assert joining.difference(shards) == ("rank 1 does not read train shard x.bin, which rank 0 reads, reads train shard "
                                          f"y.bin, which rank 0 does not read; {joining.REMEDY}")


# ------------------------------------------------------------------------------------------- while it goes on


def test_the_rank_that_lives_names_the_one_that_was_killed(ranks, port, corpus, tmp_path):
    lost = 0  # and with it the store
    two_by_hand(ranks, port, corpus, tmp_path, {}, **LONG)
    ranks[0].wait_for("step:1/")
    killed_at = time.monotonic()
    ranks[lost].kill()
    statuses, said = ranks.ends()
    assert statuses[lost] == -signal.SIGKILL and statuses[1 - lost] == watch.LOST and said[lost] == []
    (sentence,) = said[1 - lost]
    assert re.fullmatch(rf"rank {lost} on host \S+ has ended without a word \(.*\)" + re.escape(GO_ON), sentence)
    assert time.monotonic() - killed_at < 30 and "Traceback" not in ranks[1 - lost].out()


def driven(ranks, port, corpus, folder, code, **own):
    """Two ranks of which the second runs this code in its fourth step, and whose patience is 4 s."""
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    changes = LONG | dict(data_dir=corpus, log_dir=folder / "logs", val_interval=2, save_checkpoint=folder / "model.pt") | own
    for rank in range(2):
        ranks.by_hand(rank, port, driver, ROOT, code, *arguments(**changes))


@pytest.mark.parametrize("code, statuses, pattern", [
    ("os.kill(os.getpid(), 19)", [watch.LOST, -signal.SIGKILL], r"rank 1 on host \S+ has not been heard from for 4 s"),
    ("time.sleep(1000)", [watch.LOST] * 2,
     r"all ranks have stood in step 4 for \d+ s, rank \d at \S+\.py:\d+, rank \d at \S+\.py:\d+"),
    ("raise RuntimeError('a bug')", [1, 1], "rank 1 has failed"),
], ids=["stopped", "hangs", "has a bug"])
def test_both_ranks_end_with_one_sentence_if_one(code, statuses, pattern, ranks, port, corpus, tmp_path):
    driven(ranks, port, corpus, tmp_path, code)
    found, said = ranks.ends()
    (sentence,) = said[0] + said[1]
    assert found == statuses and re.fullmatch(pattern, sentence.removesuffix(GO_ON)), sentence
    tracebacks = [ranks[rank].out().count("Traceback") for rank in range(2)]
    assert tracebacks == ([0, 1] if "bug" in code else [0, 0])
    (log,) = (tmp_path / "logs").glob("*.txt")
    assert re.fullmatch(r'note "ended early: .*' + pattern + ".*", log.read_text().splitlines()[-1])
    assert checkpoints.read(tmp_path / "model.pt")["step"] == 2, "the weights of the best validation"


def test_a_terminal_or_a_log_that_stands_still_ends_no_run(ranks, port, corpus, tmp_path):
    code = """if True:
        from records import journal
        written = journal.Log.step
        def step(*words, journal=journal, written=written):
            journal.Log.step = written
            time.sleep(7)  # as Ctrl-S would make it wait
            return written(*words)
        journal.Log.step = step
    """
    driven(ranks, port, corpus, tmp_path, code, num_steps=6)
    assert ranks.ends() == ([0, 0], [[], []])


def of_torchrun(process):
    """The pids of its ranks."""
    text = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout
    pids = map(int, text.split())
    return {pid: int(match[1]) for pid in pids
            if (match := re.search(rb"\0RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes()))}


def test_ranks_whose_torchrun_was_killed_end_after_the_step_in_hand(ranks, corpus, tmp_path):
    torchrun = ranks.start(*TORCHRUN, "--nproc_per_node=2", SCRIPT,
                           *arguments(data_dir=corpus, log_dir=tmp_path / "logs", **LONG))
    ranks[0].wait_for("step:1/")
    pids = of_torchrun(torchrun)
    assert sorted(pids.values()) == [0, 1]
    torchrun.kill()
    end = time.monotonic() + 30
    while not all(map(watch.has_ended, pids)):
        assert time.monotonic() < end, ranks[0].out()
        time.sleep(0.1)
    assert "train_gpt.py: torchrun has ended, so its ranks end, too\n" in ranks[0].out()
    assert "stopped by SIGTERM after step " in ranks[0].out()


def test_torchrun_starts_again_a_run_that_has_lost_a_rank_and_it_goes_on_from_its_save(ranks, corpus, tmp_path):
    logs = tmp_path / "logs"
    changes = LONG | {"num_steps": 60, "save_every": 0.01, "data_dir": corpus, "log_dir": logs}
    torchrun = ranks.start(*TORCHRUN, "--nproc_per_node=2", "--max-restarts=1", SCRIPT, "--resume",
                           *arguments(**changes))
    end = time.monotonic() + 60
    while not list(logs.glob("*.saved/step_??????")):
        assert time.monotonic() < end, ranks[0].out()
        time.sleep(0.02)
    (pid,) = [pid for pid, rank in of_torchrun(torchrun).items() if rank == 1]
    os.kill(pid, signal.SIGKILL)
    statuses, ((sentence,),) = ranks.ends(90)
    assert statuses == [0] and sentence.startswith("rank 1 on host ")
    assert "resumed at step " in ranks[0].out() and "step:60/60 val_loss" in ranks[0].out()


def test_of_two_hosts_with_a_torchrun_each_one_ends_in_a_sentence_if_the_other_is_lost(ranks, port, corpus, tmp_path):
    changes = LONG | {"data_dir": corpus, "log_dir": tmp_path / "logs"}
    hosts = [ranks.start("-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={number}", "--nproc_per_node=1",
                         "--master_addr=127.0.0.1", f"--master_port={port}", SCRIPT, *arguments(**changes))
             for number in range(2)]
    ranks[0].wait_for("step:1/")
    pids = of_torchrun(hosts[1])
    assert [*pids.values()] == [1], "the second host has the second rank"
    for pid in (hosts[1].pid, *pids):
        os.kill(pid, signal.SIGKILL)
    statuses, ((sentence,), _) = ranks.ends(60)
    assert statuses == [1, -signal.SIGKILL] and sentence.startswith("rank 1 on host "), sentence


# ------------------------------------------------------------------------------------------- what the watch counts


@pytest.fixture
def watching(monkeypatch):
    """The watch of rank 0 of three, which has no threads: a test calls `look` with beats of its own."""
    place = joining.Place(0, 3, "localhost", 29500, False)
    w = watch.Watch(Stop())
    w.rank, w.world_size = 0, 3
    w.meeting = joining.Meeting(place, "", None, {rank: {"host": f"host_{rank}"} for rank in range(3)})
    w.heard = w.judged = [""] * 3
    w.silent = [0] * 3

    def look(beats=None):
        if beats:
            w.heard = [json.dumps(dict(count=count, step=step, work=w.work, line="a.py:1")) for count, step in beats]
            w.rounds += 1
        w.look()

    w.see = look
    return w


def test_a_rank_is_lost_after_thirty_looks_without_a_beat(watching):
    for i in range(31):
        assert watching.lost(watch.LOST_LOOKS) == ""
        watching.see([(i, None), (0, None), (i, None)])
    assert watching.lost(watch.LOST_LOOKS) == "rank 1 on host host_1 has not been heard from for 30 s"
    watching.see([(31, None), (1, None), (31, None)])
    assert watching.lost(watch.LOST_LOOKS) == "", "it lives after all"


def test_a_rank_whose_process_is_gone_from_this_host_is_lost_after_three_looks(watching):
    gone = subprocess.Popen(["true"])
    gone.wait()
    watching.pids = {1: gone.pid, 2: os.getpid()}
    for i in range(2):
        watching.see([(i, None), (0, None), (i, None)])
        assert watching.lost(watch.LOST_LOOKS) == ""
    watching.see([(2, None), (0, None), (2, None)])
    assert watching.lost(watch.LOST_LOOKS).startswith("rank 1 on host host_1 has ended without a word")


def test_a_signal_that_comes_while_a_process_ends_anyway_is_not_noted(monkeypatch):
    """torchrun sends one to all ranks as soon as the first has ended. Its reason must stay the last word."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    stop = Stop()
    stop.in_steps = stop.leaving = True
    stop.notice(signal.SIGTERM, None)
    assert stop.signal == ""


def test_a_rank_that_slept_itself_blames_nobody(watching, monkeypatch):
    watching.see([(0, None)] * 3)
    monkeypatch.setattr(watch.time, "monotonic", lambda: time.perf_counter() + 1e6)
    watching.see([(0, None)] * 3)
    assert watching.lost(watch.LOST_LOOKS) == "" and watching.hung() == ""


def test_a_store_that_is_silent_is_rank_0_or_torchrun(watching):
    for _ in range(30):
        watching.see()
    assert watching.lost(watch.LOST_LOOKS) == "", "rank 0 itself has the store"
    watching.rank = 1
    assert watching.lost(watch.LOST_LOOKS) == "rank 0 on host host_0 has not been heard from for 30 s"
    watching.meeting = watching.meeting._replace(place=watching.meeting.place._replace(in_torchrun=True))
    watching.parent = os.getppid()
    assert watching.lost(watch.LOST_LOOKS) == "torchrun on localhost has not been heard from for 30 s"


@pytest.mark.parametrize("longest, looks", [(0.01, 42), (1.0, 51), (20.0, 241)])
def test_ranks_that_stand_in_a_step_hang_only_after_ten_times_the_longest_one(watching, longest, looks):
    watching.work, watching.longest = "validation", {"validation": longest, "step": 1000.0}
    for i in range(looks):
        assert watching.hung() == ""
        watching.see([(i, 7), (i, 6), (i, 7)])
    assert watching.hung() == f"rank 1 on host host_1 has stood in step 7 for {looks - 1} s"


def test_ranks_that_hang_in_a_validation_are_not_said_to_stand_in_a_step(watching):
    watching.work, watching.longest = "validation", {"validation": 0.01}
    for i in range(45):
        watching.see([(i, 950)] * 3)
    assert watching.hung().startswith("all ranks have stood in the validation after step 950 for 44 s, ")


def test_a_long_validation_is_not_taken_for_an_update_that_hangs(watching):
    """The update after a validation begins at once and has the same number, so no beat may fall between the two."""
    watching.work, watching.longest = "validation", {"validation": 100.0, "step": 0.01}
    for i in range(100):
        watching.see([(i, 7)] * 3)
    watching.work = "step"
    for i in range(100, 141):
        assert watching.hung() == ""
        watching.see([(i, 7)] * 3)
    assert watching.hung() == ""
    watching.see([(141, 7)] * 3)
    assert watching.hung().startswith("all ranks have stood in step 8 for 41 s, ")


@pytest.mark.parametrize("longest, elsewhere", [(None, 7), (0.01, None)], ids=["in the first step", "reads data"])
def test_nobody_hangs_in_the_first_step_nor_while_one_is_elsewhere(watching, longest, elsewhere):
    watching.longest = {"": longest} if longest else {"validation": 0.01}
    for i in range(200):
        watching.see([(i, 7), (i, 7), (i, elsewhere)])
        assert watching.hung() == ""


def test_a_sentence_is_said_by_its_rank_and_by_the_first_one_of_each_other_host(watching):
    watching.meeting = watching.meeting._replace(
        notes={rank: {"host": "ab"[rank // 2]} for rank in range(4)})
    watching.silent = [0] * 4
    for speaker, expected in {0: [0, 2], 1: [1, 2], 2: [0, 2], 3: [0, 3]}.items():
        says = []
        for watching.rank in range(4):
            says += [watching.rank] * watching.says(speaker)
        assert says == expected
    watching.rank, watching.silent = 1, [30, 0, 0, 0]
    assert watching.says(3), "rank 0 is lost"


def test_a_process_on_its_own_is_not_watched():
    w = watch.Watch(Stop())
    assert w.join(lambda argv: argv, ["x"], (), 5) == ["x"] and w.store is None and not w.threads
    w.enter_step(0)
    w.leave_step()
    w.leave()
