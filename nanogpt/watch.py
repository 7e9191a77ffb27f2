"""What ends a run on all ranks when one of them is lost, and makes one of them say why.

A collective waits for all ranks. If one of them has died, has been stopped, or is on a host that
has vanished, the others wait for it: on GPUs for ever, deep inside of CUDA. So each rank has two
threads beside its work. One talks: once a second it writes its beat into the store in which the
ranks have met (nanogpt/joining.py), and reads those of the others. A beat says how often this
thread has done so, in which step the rank is and what it does there, and at which line of code. The
other thread judges what was heard. It never touches the store itself, since an answer of a store
whose host has vanished may never come. It ends the process in four cases:

    lost    a rank has not been heard from for 30 s, or its process is gone from this host
    hung    all ranks stand in an update or in a validation, and none has come to the end of it for
            40 s and ten times the longest one so far: a collective hangs, although all processes
            live
    over    another rank has written down why it ends
    orphan  torchrun, which has started this process, is gone

Silence is counted in looks of this thread, not in seconds: a process that was itself asleep, such
as on a closed laptop, must not blame the others. A compiler can keep the threads of its rank from
running for some seconds, so the limit is 30. `hung` says nothing in the first update and the first
validation, nor while a rank reads data or saves: how long that may take nobody knows.

A rank that ends the run writes why under `over`, where only the first one is kept. The rank
that was first says it, and so does one rank of each other host; all others end in silence. If the
store is gone, too, one rank of each host speaks. A process on its own has none of this.
"""
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from nanogpt import joining
from nanogpt.ranks import BadInput, SharedFault
from nanogpt.stopping import SIGNALS, Stop
from records.console import complain

LOOK_S = 1.0  # between two looks, and between two beats
LOST_LOOKS = 30  # without a beat
# What a look counts in addition if the process is gone from this host: so it is lost after three.
# At a normal end, too, processes end one after the other.
DEAD_LOOKS = 10
FAILED_LOOKS = 4  # without a beat, once a collective has failed
STILL_S = 40  # that all ranks may stand in a step, besides ten times the longest one
ORPHAN_LOOKS = 60  # for the end in order of a run whose torchrun is gone
WRITING_S = 20  # that the end waits for the best weights to be written
LOST = 3  # exit status
ROOT = Path(__file__).parents[1]
PROJECT = (ROOT, ROOT / "nanogpt", ROOT / "data", ROOT / "records")
GO_ON = "the run ends here; --resume goes on from its last save, if there is one"


class Watch:
    """The watch of one rank over all others. `stop` is the one of this process."""

    def __init__(self, stop: Stop):
        self.stop = stop
        self.meeting = None  # where the ranks have met; None for a process on its own
        self.rank, self.world_size = 0, 1
        # The main thread writes these.
        self.step = None  # the one it is in
        self.entered = 0.0
        self.work = ""  # what it does there: "step" or "validation"
        self.longest = {}  # seconds of the longest one of each work so far
        self.writing = threading.Lock()  # held while the best weights are written
        self.at_end = None  # an ExitStack: what is to be done even if an error ends the run
        self.needs_others = True  # else this rank has its results, and ends by itself
        # The thread that talks writes these.
        self.rounds = 0  # how often it has heard from all
        self.heard = []  # the last beat of each rank
        self.over = None  # why the run ends, once a rank has said so
        # The thread that judges writes these.
        self.parent = 0  # the process that has started this one
        self.pids = {}  # of other ranks on this host
        self.judged = []  # the beats it has seen in its last look
        self.judged_rounds = 0
        self.silent = []  # looks without a new beat, of each rank
        self.unheard = 0  # looks without an answer of the store
        self.still = 0  # looks in which all ranks do what they did in the one before
        self.orphaned = 0  # looks since torchrun is gone
        # The thread that holds this lock ends the run, and never releases it.
        self.last_word = threading.Lock()
        self.claim = None  # why this rank ends the run
        self.hurry = threading.Event()  # do not wait for the next second to talk
        self.ended = threading.Event()
        self.threads = []

    @property
    def store(self) -> dist.Store | None:
        """That of the process group."""
        return self.meeting and self.meeting.store

    # ---------------------------------------------------------------- what the main thread calls

    def join(self, parse: Callable, argv: list[str], errors: tuple, minutes: float):
        """parse(argv), a configuration, after all ranks have found that theirs is the same. From
        then on they watch each other. A process on its own raises what parse raises.

        errors: what parse raises if the user can mend it
        minutes: to wait for the others if there is no configuration that says it

        Raises SharedFault and BadInput, as the functions of joining do.
        """
        place = joining.own_place()
        if place is None:
            return parse(argv)
        self.rank, self.world_size = place.rank, place.world_size
        c = fault = None
        try:
            c = parse(argv)
            minutes = c.join_timeout
        except errors as error:
            fault = str(error)
        self.meeting = joining.meet(place, c, fault, minutes)
        joining.refuse(self.meeting, minutes)
        if self.world_size > 1:
            self.heard = self.judged = [""] * self.world_size
            self.silent = [0] * self.world_size
            self.parent = os.getppid()
            self.pids = joining.neighbours(self.meeting)
            self.stop.leave_with_others = self.end_by_signal
            for work in (self.talk, self.judge):
                self.threads.append(threading.Thread(target=work, daemon=True))
                self.threads[-1].start()
        return c

    def enter_step(self, step: int, work: str = "step") -> None:
        """From now on all ranks should get on with this work: "step", an update, or
        "validation"."""
        self.step = step
        self.work = work
        self.entered = time.monotonic()

    def leave_step(self) -> None:
        self.step = None
        seconds = time.monotonic() - self.entered
        self.longest[self.work] = max(self.longest.get(self.work, 0.0), seconds)

    def leave(self) -> None:
        """Waits for all ranks, which have come to the end, and ends the watch. A collective."""
        self.needs_others = True
        if dist.is_initialized():
            dist.barrier()  # torchrun ends all ranks with the first one: rank 0 has more to do
        self.ended.set()
        self.hurry.set()
        for thread in self.threads:
            thread.join(timeout=5)
        if dist.is_initialized():
            dist.destroy_process_group()

    def refuse(self, sentence: str, error: Exception) -> int:
        """Says the sentence of an error that the user can mend, and returns the exit status. Where
        there are other ranks it does not return: it ends the process, and theirs."""
        if self.world_size == 1:
            complain(f"train_gpt.py: {sentence}")
            return 2
        if self.meeting is None or isinstance(error, SharedFault):
            self.stop.leaving = True  # all others know, or cannot be told
            if not isinstance(error, SharedFault) or self.says(error.speaker):
                complain(f"train_gpt.py: {sentence}")
            time.sleep(LOOK_S)  # until all have spoken, and have read what is in our store
            os._exit(2)
        if self.rank > 0:
            time.sleep(2 * LOOK_S)  # an error that all ranks ran into is said by rank 0
            sentence = f"rank {self.rank}: {sentence}"
        self.end_run(sentence, 2)

    def end_if_lost(self, error: Exception | None = None) -> None:
        """Ends the process if another rank is lost or has ended the run. It waits some seconds for
        the answer, and returns if all live, or if there are no others yet."""
        if not self.threads:
            return
        for _ in range(4 * (FAILED_LOOKS + 2)):
            if self.ended.is_set():
                return
            lost = self.lost(FAILED_LOOKS)
            if self.over or lost:
                if error and "heard" in lost:  # it may live, and the error be another one
                    lost += f" ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
                self.end_run(f"{lost}; {GO_ON}", LOST)
            time.sleep(LOOK_S / 4)

    def end_by_signal(self, number: int) -> None:
        """Ends the process at a signal that does not wait, and the others with it. A SIGTERM may be
        torchrun's, because another rank is lost, or our own, because torchrun is."""
        if self.orphaned:
            os._exit(128 + number)
        if number == signal.SIGTERM:
            self.end_if_lost()
        self.end_run(f"stopped by {SIGNALS[number]} {self.stop.when}", 128 + number)

    def end_with_traceback(self, error: Exception) -> None:
        """After an error that nobody has foreseen: ends the process, and the others. Returns where
        there are none. One rank shows its traceback, unless the error comes of a lost rank."""
        self.end_if_lost(error)
        if self.threads:
            self.end_run(f"rank {self.rank} has failed\n{traceback.format_exc()}", 1)

    # ------------------------------------------------------------------------- the two threads

    def talk(self) -> None:
        """Once a second: says that this rank lives, and hears of the others."""
        place = self.meeting.place
        keys = [f"beat_{rank}" for rank in range(self.world_size)] + ["over"]
        try:
            store = dist.PrefixStore(self.meeting.attempt, joining.connect(place))
            for key in keys:  # all must be there before they are read together
                store.compare_set(key, "", "")
            while not self.ended.is_set():
                beat = dict(
                    count=self.rounds, step=self.step, work=self.work, line=line_of_main_thread())
                store.set(keys[self.rank], json.dumps(beat))
                if self.claim and not self.over:
                    store.compare_set("over", "", json.dumps(self.claim))
                *self.heard, over = [value.decode() for value in store.multi_get(keys)]
                self.over = json.loads(over) if over else None
                self.rounds += 1
                self.hurry.wait(LOOK_S)
                self.hurry.clear()
        except RuntimeError:  # as all errors of the store are
            return  # it is gone, and the other thread notices that nothing is heard any more

    def judge(self) -> None:
        """Once a second: looks at what was heard, and ends the process if it must."""
        while not self.ended.wait(LOOK_S):
            self.look()
            if self.orphaned <= ORPHAN_LOOKS and not self.needs_others:
                continue
            if self.over:
                self.end_run("", LOST)
            if self.orphaned > ORPHAN_LOOKS:
                os._exit(LOST)
            if sentence := self.lost(LOST_LOOKS) or self.hung():
                self.end_run(f"{sentence}; {GO_ON}", LOST)

    def look(self) -> None:
        """Counts in how many looks nothing has changed."""
        place = self.meeting.place
        if place.in_torchrun and os.getppid() != self.parent:
            self.be_orphaned()
        self.unheard += 1
        if self.rounds > self.judged_rounds:
            self.unheard = 0
            beats = list(self.heard)
            for rank in range(self.world_size):
                same = beats[rank] == self.judged[rank]
                self.silent[rank] = self.silent[rank] + 1 if same else 0
            same = all(of_each_beat(beats, name) == of_each_beat(self.judged, name)
                       for name in ("step", "work"))
            at_work = None not in of_each_beat(beats, "step")
            self.still = self.still + 1 if same and at_work else 0
            self.judged, self.judged_rounds = beats, self.rounds
        for rank, pid in self.pids.items():
            if has_ended(pid):
                self.silent[rank] += DEAD_LOOKS

    def be_orphaned(self) -> None:
        """The run ends in order when its torchrun is gone: nobody would end it if a rank dies."""
        self.orphaned += 1
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        if self.orphaned == (1 if is_first else 2):  # the others wait until the first has said it
            if is_first:
                complain("train_gpt.py: torchrun has ended, so its ranks end, too")
            if not self.stop.signal:
                os.kill(os.getpid(), signal.SIGTERM)

    # -------------------------------------------------------------------------- what is found out

    def lost_ranks(self, patience: int) -> list[int]:
        """Those without a beat for so many looks. If the store does not answer, and runs inside of
        rank 0, that is rank 0."""
        if self.unheard >= patience and not self.meeting.place.in_torchrun and self.rank > 0:
            return [0]
        return [rank for rank, looks in enumerate(self.silent)
                if looks >= patience and rank != self.rank]

    def lost(self, patience: int) -> str:
        """The words on who is lost; empty if nobody is."""
        ranks = self.lost_ranks(patience)
        dead = [rank for rank in ranks if rank in self.pids and has_ended(self.pids[rank])]
        if dead:
            return f"{self.with_host(dead)} has ended without a word (killed, or out of memory?)"
        place = self.meeting.place
        who = self.with_host(ranks) if ranks else ""
        if self.unheard >= patience and place.in_torchrun and not self.orphaned:
            who = f"torchrun on {place.address}"
        return f"{who} has not been heard from for {patience * LOOK_S:.0f} s" if who else ""

    def hung(self) -> str:
        """The words on a collective that does not return; empty if all is well."""
        work = of_each_beat(self.judged, "work")[self.rank]  # the rank may do something else by now
        longest = self.longest.get(work)
        if longest is None or self.still * LOOK_S < STILL_S + 10 * longest:
            return ""
        steps = of_each_beat(self.judged, "step")
        behind = [rank for rank in range(self.world_size) if steps[rank] == min(steps)]
        seconds = f"{self.still * LOOK_S:.0f} s"
        where = f"in step {min(steps) + 1}"
        if len(behind) < self.world_size:
            return f"{self.with_host(behind)} has stood {where} for {seconds}"
        at = defaultdict(list)  # line -> ranks
        for rank, line in enumerate(of_each_beat(self.judged, "line")):
            at[line].append(rank)
        lines = sorted(at, key=lambda line: len(at[line]))  # that of the odd one out stands first
        places = ", ".join(f"{joining.in_words(at[line])} at {line}" for line in lines[:3])
        if work == "validation":
            where = f"in the validation after step {min(steps)}"
        return f"all ranks have stood {where} for {seconds}, {places}"

    def with_host(self, ranks: list[int]) -> str:
        of_host = defaultdict(list)
        for rank in ranks:
            of_host[self.meeting.host(rank)].append(rank)
        return ", ".join(f"{joining.in_words(of_host[host])} on host {host}" for host in of_host)

    # ------------------------------------------------------------------------------- the last word

    def first_here(self) -> int:
        """The first rank that lives on this host."""
        host, lost = self.meeting.host, self.lost_ranks(FAILED_LOOKS)
        return min(rank for rank in self.meeting.notes
                   if host(rank) == host(self.rank) and rank not in lost)

    def says(self, speaker: int) -> bool:
        """Whether this rank prints the message of rank `speaker`. It does if it is that rank, or
        the first living rank of another host, as each host has a screen of its own."""
        elsewhere = self.meeting.host(speaker) != self.meeting.host(self.rank)
        return speaker == self.rank or (elsewhere and self.rank == self.first_here())

    def end_run(self, sentence: str, status: int) -> None:
        """Ends the process, with this sentence and status if no other rank was first. Never
        returns: the main thread may be stuck."""
        self.stop.leaving = True  # first: a signal would come back here, and wait for itself
        self.last_word.acquire()
        first_line = sentence.partition("\n")[0]  # what follows is a traceback
        self.claim = dict(rank=self.rank, sentence=first_line, status=status)
        self.hurry.set()
        talker = self.threads[0]  # it writes our claim under `over`, and ends if the store is gone
        for _ in range(60):  # 3 s
            if self.over or not talker.is_alive():
                break
            time.sleep(0.05)
        speaker = self.first_here()
        if self.over:
            speaker, status = self.over["rank"], self.over["status"]
            sentence = sentence if speaker == self.rank else self.over["sentence"]
        speaks = self.says(speaker)
        if speaks:
            complain(f"train_gpt.py: {sentence}")
        if self.at_end:  # the main thread may never come to it
            with suppress(Exception):  # whatever fails here, the process must end
                self.at_end.__exit__(BadInput, BadInput(sentence), None)
        self.writing.acquire(timeout=WRITING_S)
        for rank in self.lost_ranks(LOST_LOOKS):
            if rank in self.pids and not has_ended(self.pids[rank]):
                with suppress(OSError):  # it may end this moment
                    os.kill(self.pids[rank], signal.SIGKILL)  # a stopped one would stay for ever
        # Others must have the time to see `over`, so the rank that has the store leaves last.
        has_store = self.rank == 0 and not self.meeting.place.in_torchrun
        time.sleep((3 if has_store else 2 if speaks else 1) * LOOK_S)
        os._exit(status)


def of_each_beat(beats: list[str], name: str) -> list:
    """What the beat of each rank says; None for one that has not been heard of."""
    return [json.loads(beat)[name] if beat else None for beat in beats]


def line_of_main_thread() -> str:
    """The line of this project at which the main thread works or waits."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame:
        path = Path(frame.f_code.co_filename)
        if path.parent in PROJECT:
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def has_ended(pid: int) -> bool:
    """Whether there is no such process any more. Linux only."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False  # it cannot be known, perhaps for want of memory or of open files
    return state in ("Z", "X")
