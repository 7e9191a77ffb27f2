"""How the processes of a run meet, and what they compare before they begin.

The collectives of torch know no faults: a rank that does not come, or that has refused its command
line, leaves the others waiting without a word. So the ranks meet before that, in a store of keys
and values that each of them can read (torch.distributed.TCPStore). It runs inside of torchrun, or
inside of rank 0 if the ranks were started by hand. Each rank writes a note: what is wrong here, or
else what it is going to run. Nobody goes on before it has read the notes of all.
"""
import dataclasses
import json
import os
import platform
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from nanogpt.ranks import BadInput, SharedFault, all_ranks, refuse_faults, require
from records.console import complain
from records.journal import project_files

STORE_PATIENCE_S = 30  # how long it may take to connect to a store that is known to be there
WAIT_AFTER_FAULT_S = 4  # how long a rank with a fault waits for the others, which may have the same
OWN_KEYS = ("data_dir", "join_timeout")  # hosts may differ in them; shards are compared themselves
REMEDY = "all ranks need the same command, code and data"


class Place(NamedTuple):
    """Where a process stands among those of its run, and where they meet."""
    rank: int
    world_size: int
    address: str
    port: int
    in_torchrun: bool  # whether the store runs inside of torchrun


def own_place() -> Place | None:
    """What the environment says; None for a process on its own. Raises BadInput if it does not say
    all that is needed."""
    if "RANK" not in os.environ:
        return None
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    require(not missing, f"RANK={os.environ['RANK']} is set without {', '.join(missing)}; "
            "start with torchrun, or unset RANK")
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        text = os.environ[name]
        require(text.isdecimal() and int(text) < 2**16, f"{name}={text} is not a number below 2^16")
    rank, world_size, address, port = (os.environ[name] for name in names)
    require(int(rank) < int(world_size), f"RANK={rank} is not below WORLD_SIZE={world_size}")
    in_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(int(rank), int(world_size), address, int(port), in_torchrun)


class Meeting(NamedTuple):
    place: Place
    attempt: str  # how the keys of this run in the store begin
    store: dist.Store
    notes: dict[int, dict]  # of all ranks that have come

    def host(self, rank: int) -> str:
        return self.notes[rank]["host"]


def meet(place: Place, c, fault: str | None, minutes: float) -> Meeting:
    """Meets all ranks, or those that come within so many minutes; with a fault, within seconds. A
    rank has either a configuration `c` or a fault. Raises BadInput if there is nobody to meet."""
    minutes_to_wait = minutes if fault is None else WAIT_AFTER_FAULT_S / 60
    deadline = time.monotonic() + 60 * minutes_to_wait
    no_answer = threading.Timer(60 * minutes_to_wait + 10, give_up, [place, fault])
    no_answer.daemon = True
    no_answer.start()
    try:
        store = open_store(place, deadline, minutes)
        attempt = attempt_of(place)
        store = dist.PrefixStore(attempt, store)
        return Meeting(place, attempt, store, exchange(store, place, note_of(c, fault), deadline))
    except dist.DistError:
        raise BadInput(fault_of(place, fault)) from None
    except BadInput as error:
        raise BadInput(f"rank {place.rank}: {fault or error}") from None
    finally:
        no_answer.cancel()


def fault_of(place: Place, fault: str | None) -> str:
    lost = f"lost the others at {place.address}:{place.port}, who may have ended"
    return f"rank {place.rank}: {fault or lost}"


def give_up(place: Place, fault: str | None) -> None:
    """Ends a process that waits inside of torch for a store that never answers."""
    complain(f"train_gpt.py: {fault_of(place, fault)}")
    os._exit(2)


def refuse(meeting: Meeting, minutes: float) -> None:
    """Raises SharedFault if something is wrong on any rank, if not all have come within so many
    minutes, or if two of them run something else."""
    place, notes = meeting.place, meeting.notes
    refuse_faults({rank: note["fault"] for rank, note in notes.items()}, place.rank,
                  place.world_size)
    absent = [rank for rank in range(place.world_size) if rank not in notes]
    if absent:
        came = f"{len(notes)} of {place.world_size} processes came within {minutes:g} minutes"
        sentence = (f"{came}, {in_words(absent)} did not; start all of them, see whether they can "
                    f"reach {place.address}:{place.port}, or raise --join_timeout")
        meeting.store.set("gave_up", sentence)
        raise SharedFault(sentence, min(notes))
    odd = difference([notes[rank]["runs"] for rank in range(place.world_size)])
    if odd:
        raise SharedFault(odd, 0)


def open_store(place: Place, deadline: float, minutes: float) -> dist.Store:
    """A connection to the store, which rank 0 starts if torchrun has none. Raises BadInput if none
    listens there before the deadline. The store of torchrun has been there before its ranks: if it
    does not answer, torchrun was killed."""
    starts = place.rank == 0 and not place.in_torchrun
    if place.in_torchrun:
        deadline = min(deadline, time.monotonic() + STORE_PATIENCE_S)
    while not starts:
        try:
            socket.create_connection((place.address, place.port), timeout=2).close()
            break
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host, as "a..b"
            reason = getattr(error, "strerror", None) or str(error)
        if time.monotonic() > deadline and place.in_torchrun:
            raise BadInput(
                f"torchrun does not answer at {place.address}:{place.port} ({reason}); it was "
                "killed, or its host cannot be reached")
        if time.monotonic() > deadline:
            raise BadInput(
                f"nobody answers at {place.address}:{place.port} within {minutes:g} minutes "
                f"({reason}); start rank 0 there, correct MASTER_ADDR and MASTER_PORT, or raise "
                "--join_timeout")
        time.sleep(0.1)  # not inside of torch: a signal ends this wait
    try:
        return connect(place, starts)
    except dist.DistError as error:
        raise BadInput(
            f"cannot meet at {place.address}:{place.port} ({str(error).partition('.')[0]}); choose "
            "another MASTER_PORT, or correct MASTER_ADDR") from None


def connect(place: Place, starts: bool = False) -> dist.Store:
    store = dist.TCPStore(place.address, place.port, is_master=starts, wait_for_workers=False,
                          timeout=timedelta(seconds=STORE_PATIENCE_S))
    store.set_timeout(timedelta(minutes=10))
    return store


def attempt_of(place: Place) -> str:
    """The prefix of what this run has in the store. After a rank has failed, torchrun may start all
    of them again, and keeps the store with what they have left in it. (With --rdzv_backend=c10d
    each host has a count of its own. If they differ, the ranks do not meet until one more restart
    has made them equal.)"""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if place.in_torchrun else "0"
    return f"attempt_{count}"


def note_of(c, fault: str | None) -> dict:
    runs = {}
    if c is not None:
        keys = {name: value for name, value in dataclasses.asdict(c).items()
                if name not in OWN_KEYS}
        runs = {"keys": keys, "files": {file["path"]: file["sha256"] for file in project_files("")}}
    return {"fault": fault, "runs": runs, "host": platform.node(), "pid": os.getpid(),
            "pids_of": namespace_of_pids()}


def namespace_of_pids() -> str:
    """Two processes that have this in common can find each other by their pids. Empty where the
    system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def neighbours(meeting: Meeting) -> dict[int, int]:
    """The pids of the other ranks that run on this host."""
    here = namespace_of_pids()
    return {rank: note["pid"] for rank, note in meeting.notes.items()
            if here and note["pids_of"] == here and rank != meeting.place.rank}


def exchange(store: dist.Store, place: Place, note: dict, deadline: float) -> dict[int, dict]:
    """The notes of all ranks, or of those that have come by the deadline. A rank without a fault
    does not wait once another one has told its own."""
    store.set(f"note_{place.rank}", json.dumps(note))
    notes = {place.rank: note}
    while len(notes) < place.world_size and time.monotonic() < deadline:
        others_gave_up = store.check(["gave_up"])
        for rank in range(place.world_size):
            if rank not in notes and store.check([f"note_{rank}"]):
                notes[rank] = json.loads(store.get(f"note_{rank}"))
        if others_gave_up:
            break
        if note["fault"] is None and any(other["fault"] for other in notes.values()):
            break
        time.sleep(0.05)
    return notes


def in_words(ranks: list[int]) -> str:
    """"rank 4", or "rank 4 (also 5, 6)": of many, the first ones."""
    others = ", ".join(map(str, ranks[1:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {ranks[0]}" + (f" (also {others})" if others else "")


def difference(runs: list[dict[str, dict]]) -> str:
    """The sentence on the first rank that runs something else than rank 0, or an empty one."""
    found = {}
    for rank, facts in enumerate(runs):
        if parts := what_differs(runs[0], facts):
            found[rank] = parts
    if not found:
        return ""
    parts = found[min(found)]
    same = [rank for rank in found if found[rank] == parts]
    more = f", and {len(parts) - 3} more" if len(parts) > 3 else ""
    return f"{in_words(same)} {', '.join(parts[:3])}{more}; {REMEDY}"


def what_differs(ours: dict[str, dict], theirs: dict[str, dict]) -> list[str]:
    """What another rank runs or reads that rank 0 does not. Of files only those count that both
    have imported: rank 0 needs some for what it alone does."""
    parts = []
    for kind in ours:
        for name in ours[kind] | theirs[kind]:
            a, b = ours[kind].get(name), theirs[kind].get(name)
            if a == b or (kind == "files" and None in (a, b)):
                continue
            if kind == "keys":
                parts.append(f"runs --{name}={b} where rank 0 runs --{name}={a}")
            elif kind == "files":
                parts.append(f"runs another {name} than rank 0")
            elif a is None:
                parts.append(f"reads {name}, which rank 0 does not read")
            elif b is None:
                parts.append(f"does not read {name}, which rank 0 reads")
            else:
                parts.append(f"reads another {name} than rank 0")
    return parts


def refuse_other_data(files: list[dict], data: list[dict]) -> None:
    """Raises BadInput unless the files that several ranks have imported are the same, and the
    shards that they read, by the facts `file` and `data` of each. A collective."""
    shards = {f"{shard['split']} shard {shard['name']}": shard["sha256"] for shard in data}
    runs = {"files": {file["path"]: file["sha256"] for file in files}, "shards": shards}
    odd = difference(all_ranks(runs))
    require(not odd, odd)
