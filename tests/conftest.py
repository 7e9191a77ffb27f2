"""What the tests of train_gpt.py share: synthetic shards, written with `struct` alone, and a tiny configuration."""
import dataclasses
import multiprocessing.util
import os
import random
import signal
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tensors are tiny: threads would only wait for each other
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # as are the graphs: no pool of processes for them
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if sys.dont_write_bytecode:  # many containers ask for this, so that no files appear beside sources
    # Then each new process would compile all of PyTorch's Python for some seconds. So its bytecode
    # is kept where git does not look.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(ROOT / ".venv" / "bytecode")
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"]
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:  # under nohup, or behind a shell's &: programs we start would, too
        signal.signal(number, lambda *_: None)  # a handler, unlike SIG_IGN, is not inherited by a new program

import pytest
import torch

import sample
import train_gpt as t
from nanogpt import checkpoints, planning
from nanogpt.candidates import Drawn, Targets
from nanogpt.gpu import NO_TRANSFER
from nanogpt.past import PreparedBatch, distinct_rows
from nanogpt.ranks import gathered

SEPARATOR = 50256
TINY = {  # a model and a schedule that run in a second; in float32, as many CPUs only emulate bf16
    "num_layers": 3, "model_dim": 32, "num_heads": 2, "head_dim": 16, "mlp_dim": 64, "vocab_size": 384, "num_steps": 4,
    "schedule": "char", "batch_tokens": 1024, "seq_len": 256, "ngram_rows": 500, "recall_rows": 1000,
    "val_tokens": 512, "val_seq_len": 256, "val_interval": 2, "target_loss": 1.0, "device": "cpu", "compile": False,
    "precision": "fp32", "sample": "", "save_checkpoint": "", "preset": "laptop",
}


def write_shard(path, tokens, magic=20240520, version=1, count=None):
    """A shard as the format has it, or one whose header lies."""
    count = len(tokens) if count is None else count
    path.write_bytes(struct.pack("<256i", magic, version, count, *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens))
    return path


def documents(count, seed=0, shortest=1, longest=300):
    """`count` tokens below 64 in documents of random length, each behind a separator."""
    draw, tokens = random.Random(seed), []
    while len(tokens) < count:
        common = draw.sample(range(64), 20)  # few of all tokens, and fewer in a document: there is something to learn
        tokens += [SEPARATOR, *draw.choices(common, k=draw.randint(shortest, longest))]
    return tokens[:count]


def arguments(**changes):
    """The tiny configuration as a command line."""
    return [f"--{name}={value}" for name, value in (TINY | changes).items()]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(a, b):
    """Relative, in the Frobenius norm."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder with two training shards and one for validation."""
    folder = tmp_path_factory.mktemp("corpus")
    for seed in (1, 2):
        write_shard(folder / f"fineweb_train_{seed:06}.bin", documents(6000, seed))
    write_shard(folder / "fineweb_val_000000.bin", documents(2000, 3))
    return folder


@pytest.fixture(scope="session", autouse=True)
def place_of_processes():
    """Where processes.py has its sockets: chosen before a test changes where temporary files are."""
    multiprocessing.util.get_temp_dir()


@pytest.fixture
def no_gpu(monkeypatch):
    """As on a machine without a GPU, for what is chosen by the machine: preset, tokens, and where sample.py and evaluate.py
    compute."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sample, "DEVICES", ["cpu"])


@pytest.fixture
def eager_graphs(monkeypatch):
    """torch.compile that traces graphs but generates no code, which takes long: it
    recompiles for the same reasons."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, backend="eager", **options))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def untrained(**changes):
    """The model of the tiny configuration with its initial weights."""
    model = t.GPT(t.parse_config(arguments(**changes)), torch.device("cpu"))
    t.initialize(model, 0)
    return model


def optimizer_of(model, seed=0):
    """An optimizer that has made no step, of a model with the initial weights of this seed."""
    optimizer = t.Optimizer(model)
    optimizer.reset(t.initialize(model, seed))
    return optimizer


def check_data(c):
    """What the trainer finds out about the shards of a configuration before it compiles anything."""
    return planning.check_data(c, t.batch_plan(c))


def keep(path, model, step=4, val_loss=1.0):
    """Writes a file of a model's weights."""
    about = dict(config=dataclasses.asdict(model.config), step=step, val_loss=val_loss)
    checkpoints.write(path, checkpoints.weights_of(model), about)


def training_loss(model, tokens, targets, setting):
    """The loss that training has for these tokens (T,)."""
    [pair] = read(model, [(tokens, targets)]).micro_batches
    return model(*pair, setting, True)


def one_group(model, targets):
    """Targets (T,) with candidates that are drawn for them alone."""
    candidates = model.candidates
    drawn = candidates.draw(targets, len(targets), candidates.random_numbers(1, step=0))
    candidates.remember(drawn)
    return Targets(targets, drawn.chosen, drawn.bias, drawn.place_of_token)


def read(model, batch):
    """Inputs and targets (T,) of each micro-batch -> what train_step takes."""
    pairs = [(model.past.read(inputs, training=True), one_group(model, targets)) for inputs, targets in batch]
    prepared = with_rows(pairs)
    return prepared._replace(
        drawn=Drawn(*torch.zeros(5)),  # `one_group` has counted the targets
        hashes=torch.cat([reading.hashes for reading, _ in pairs], 1),
        next_tokens=torch.cat([targets for _, targets in batch]))


def with_rows(pairs):
    """The readings of this rank's micro-batches, or what has rows as they have, and their targets -> a batch that knows
    which rows all ranks use. A collective."""
    own = [torch.cat(rows) for rows in zip(*(reading.rows().values() for reading, _ in pairs))]
    rows, ends = zip(*(distinct_rows(gathered(numbers[None])) for numbers in own))
    return PreparedBatch(pairs, None, None, None, rows, torch.stack(ends), NO_TRANSFER)


def looking_up(rows):
    """The rows of each index that micro-batches look up -> what Tables.begin takes. A collective."""
    return with_rows([(SimpleNamespace(rows=lambda own=own: own), None) for own in rows])
