"""Processes that run a script as `python script ...` does, but are forked from one that has imported torch already:
an import takes longer than most of what a test then does. They have a pid, an environment, signals, output and an exit
status of their own, but all the same seed of Python's hashes. What happens before or during the import of torch, and what
could depend on hashes, is tested with `subprocess`.

This file imports nothing of ours: each of the processes imports it.
"""
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from subprocess import STDOUT, CompletedProcess

ROOT = Path(__file__).resolve().parents[1]
# They see no GPU, also where there are some: even for a backward pass on the CPU PyTorch would start CUDA on each one. That
# takes time, and ends a process that was forked from one in which CUDA had been started.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch"])
HELD = []  # sockets of free_port


class Process:
    """`python` with these words as its command line: a script or -m and a module, then arguments."""

    def __init__(self, *command, cwd=ROOT, env=ENVIRONMENT, stderr=None):
        """stderr: a path to write to, or STDOUT. `out` and `err` give what was written so far."""
        self.files = [tempfile.NamedTemporaryFile(), tempfile.NamedTemporaryFile()]
        paths = [file.name for file in self.files]
        if stderr is not None:
            paths[1] = paths[0] if stderr == STDOUT else stderr
        self.process = FORKS.Process(target=run_script, args=([*map(str, command)], cwd, dict(env), paths),
                                     daemon=True)  # none outlives the tests
        self.process.start()
        self.pid = self.process.pid

    def out(self):
        return Path(self.files[0].name).read_text(errors="replace")  # a character may be on its way

    def err(self):
        return Path(self.files[1].name).read_text(errors="replace")

    def poll(self):
        """The exit status, or None while the process runs."""
        return self.process.exitcode

    def wait(self, timeout=100):
        """The exit status. A process that has not ended by then is killed, and the test fails."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.kill()
            raise TimeoutError(f"still running after {timeout} s: {self.out()}{self.err()}")
        return self.process.exitcode

    def wait_for(self, text, timeout=60):
        """Returns as soon as the process has written `text` to its standard output."""
        end = time.monotonic() + timeout
        while True:
            over = time.monotonic() > end or self.poll() is not None  # before its last words are read
            if text in self.out():
                return
            if over:
                self.kill()
                raise AssertionError(f"{text!r} is not in {self.out()}{self.err()}")
            time.sleep(0.02)

    def send_signal(self, number):
        with suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, number)

    def kill(self):
        self.process.kill()
        self.process.join()


def run(*command, timeout=100, **options):
    """As `subprocess.run`: to its end, with the status and what was written."""
    process = Process(*command, **options)
    status = process.wait(timeout)
    return CompletedProcess(command, status, process.out(), process.err())


def write_driver(path, changes):
    """A script that makes these changes to train_gpt, which it calls t, and then trains. Returns its path."""
    path.write_text(f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train_gpt as t\n{changes}\n"
                    "sys.exit(t.main(sys.argv[1:]))\n")
    return path


def run_ranks(world_size, *command, timeout=100):
    """As many ranks with one command line, with the variables that torchrun gives them, all to their end."""
    place = dict(WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    ranks = []
    for rank in range(world_size):
        variables = place | dict(RANK=rank, LOCAL_RANK=rank)
        ranks.append(Process(*command, env=ENVIRONMENT | {name: str(value) for name, value in variables.items()}))
    try:
        statuses = [rank.wait(timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [CompletedProcess(command, *found) for found in zip(
        statuses, [rank.out() for rank in ranks], [rank.err() for rank in ranks])]


def free_port():
    """A port that is given to nobody else while this process lives, because a socket stays bound to it. A server can
    listen there nevertheless: both have SO_REUSEADDR, and the socket does not listen."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    HELD.append(held)
    return held.getsockname()[1]


def run_script(command, cwd, environment, paths):
    """What the new process does."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")
