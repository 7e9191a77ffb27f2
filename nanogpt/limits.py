"""What the values of a configuration may be. Wrong values that are not refused here would show as
an error of PyTorch in the middle of a run.

`c` is train_gpt.Config. What a stage of the schedule is, train_gpt.py says.
"""
import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import torch

from nanogpt import recipe
from nanogpt.masks import BLOCK_SIZE
from nanogpt.ranks import BadInput, require

# Far more than anybody trains. Beyond it, already the list of all batches would fill the memory, or
# the size of a weight would be more than an integer of 64 bits holds.
MOST = {"num_steps": 10**6, "batch_tokens": 2**30, "seq_len": 2**20, "val_seq_len": 2**30,
        "num_layers": 1000, "model_dim": 2**20, "mlp_dim": 2**20, "ngram_rows": 2**31,
        "recall_rows": 2**31}


def check(c, schedules: dict[str, list], precisions: dict, gate_dim: int) -> None:
    """Raises BadInput, which names the key, where a value cannot be, or values do not fit each
    other. `gate_dim` is how many channels of the stream a gate reads; it reads half as many of a
    value embedding."""
    check_values(c, schedules, precisions)
    stages = schedules[c.schedule]
    check_stages(c.schedule, stages)
    check_candidates(c, stages)
    check_multiples(c, stages)
    require(c.model_dim >= gate_dim,
            f"--model_dim={c.model_dim} must be at least {gate_dim}, a gate's channels")
    of_heads = c.num_heads * c.head_dim
    require(gate_dim // 2 <= of_heads <= c.model_dim,
            f"--num_heads={c.num_heads} times --head_dim={c.head_dim} is {of_heads}; it must be "
            f"from {gate_dim // 2} to {c.model_dim}, which is --model_dim")
    if c.nvfp4_without:
        recipe.module_of("nvfp4").parts_to_leave_out(c.nvfp4_without)  # raises BadInput for others


def check_values(c, schedules: dict[str, list], precisions: dict) -> None:
    """The part of `check` that looks at each value alone. Raises BadInput."""
    check_ranges(c)
    check_choices(c, schedules, precisions)
    check_device(c)
    require(c.vocab_size <= 2**16,
            f"--vocab_size={c.vocab_size} must be at most {2**16}: shards hold tokens of 16 bits")
    require(0 <= c.seed < 10**15, f"--seed={c.seed} must be from 0 to 10^15 - 1, as logs hold it")
    for name in ("minutes", "save_every", "save_steps", "val_interval", "sample_tokens",
                 "profile_steps", "bf16_last_layers", "bf16_last_frac", "target_loss", "muon_lr",
                 "muon_momentum", "muon_decay", "head_lr", "table_lr", "scalar_lr"):
        value = getattr(c, name)
        require(value >= 0, f"--{name}={value} must not be negative")
    for name in ("cooldown_frac", "bf16_last_frac"):
        value = getattr(c, name)
        require(value <= 1, f"--{name}={value} is a part of the steps, so it must be at most 1")
    require(c.ngram_part <= 1, f"--ngram_part={c.ngram_part} must be at most 1")
    require(c.muon_momentum < 1, f"--muon_momentum={c.muon_momentum} must be below 1")
    require(2 <= c.longest_ngram <= 32,
            f"--longest_ngram={c.longest_ngram} must be at least 2 and at most 32")
    require(0 < c.join_timeout <= 10_000,
            f"--join_timeout={c.join_timeout} must be above 0 and at most 10,000 minutes")
    check_texts(c)


def check_ranges(c) -> None:
    for name in ("num_steps", "batch_tokens", "seq_len", "micro_tokens", "val_tokens",
                 "val_seq_len", "num_layers", "model_dim", "num_heads", "head_dim", "mlp_dim",
                 "vocab_size", "ngram_part", "epochs", "cooldown_frac",
                 "longest_document"):
        value = getattr(c, name)
        require(value > 0, f"--{name}={value} must be positive")
    for name in ("ngram_rows", "recall_rows"):
        value = getattr(c, name)
        require(value >= 0, f"--{name}={value} must not be negative")
    for name, most in MOST.items():
        value = getattr(c, name)
        require(value <= most, f"--{name}={value} is too large: it must be at most {most:,}")


def check_texts(c) -> None:
    """A log holds at most 1,000 characters of each text, and only --sample may have other than
    printable ones (records/log.py)."""
    require(c.log_dir, "--log_dir= is empty; name a folder, or leave it out")
    for name, value in vars(c).items():
        if isinstance(value, str):
            require(len(value) <= 1000,
                    f"--{name} has {len(value):,} characters, and must have at most 1,000")
            require(value.isprintable() or name == "sample",
                    f"--{name}={ascii(value)} has characters that cannot be printed; rename it")


def check_choices(c, schedules: dict, precisions: dict) -> None:
    choices = {
        "schedule": schedules, "precision": ("auto", *precisions),
        "attention": ("auto", "flex", "sdpa"), "device": ("auto", "cuda", "cpu"),
        "dtype": ("auto", "bfloat16", "float16", "float32", "float64")}
    for name, allowed in choices.items():
        value = getattr(c, name)
        require(value in allowed, f"--{name}={value} is none of {', '.join(allowed)}")


def check_candidates(c, stages: list) -> None:
    """Candidates are the tokens that a training loss compares (train_gpt.py, section 5). Nearly
    every target should be one of them. Texts repeat tokens, so half as many as tokens suffice."""
    at_a_time = c.micro_tokens // c.seq_len * c.seq_len  # whole sequences
    largest_batch = round(max(stage.batch_part for stage in stages) * c.batch_tokens)
    enough = min(c.vocab_size, min(at_a_time, largest_batch) // 2)
    fits_products = c.candidates % 16 == 0 or c.candidates >= c.vocab_size
    remedy = ""
    if fits_products and c.seq_len <= 2 * c.candidates < at_a_time:
        remedy = f"; or lower --micro_tokens to {2 * c.candidates // c.seq_len * c.seq_len}"
    require(c.candidates == 0 or (c.candidates >= enough and fits_products),
            f"--candidates={c.candidates} must be a multiple of 16, at least {enough}, "
            f"or 0 for the whole vocabulary{remedy}")


def check_stages(name: str, stages: list) -> None:
    """The rows of a schedule, which users change. If they had too few steps, the run would end with
    an error shortly before its end."""
    where = f"SCHEDULES[{name!r}]"
    total = sum(stage.fraction for stage in stages)
    require(abs(total - 1) < 1e-6 and all(stage.fraction >= 0 for stage in stages),
            f"{where}: the fractions of its stages make {total:g} together, and must make 1 "
            "without negative ones")
    for stage in stages:
        require(stage.batch_part > 0, f"{where}: the batch of {stage} must be positive")
        require(abs(stage.batch_part - part_of_batch(stage)) < 1e-6,
                f"{where}: the batch of {stage} must be a simple fraction, such as 1 / 3")
        for window in (stage.long_window, stage.short_window):
            require(isinstance(window, int) and window > 0,
                    f"{where}: the windows of {stage} must be whole blocks, at least one")


def part_of_batch(stage) -> Fraction:
    """The part of --batch_tokens that the batches of a stage have."""
    return Fraction(stage.batch_part).limit_denominator(64)


def check_multiples(c, stages: list) -> None:
    """Lengths are whole blocks of attention or whole sequences, and a head can be cut into
    quarters. Only micro_tokens is an upper bound, with room for a sequence."""
    units = [("seq_len", BLOCK_SIZE, ""), ("val_seq_len", BLOCK_SIZE, "")]
    for stage in stages:
        part = part_of_batch(stage)
        sequence = c.seq_len * part.denominator
        unit = sequence // math.gcd(sequence, part.numerator)
        require(c.batch_tokens % unit == 0 or part == 1,
                f"--batch_tokens={c.batch_tokens} must be a multiple of {unit}, so that {part} of "
                f"it (SCHEDULES[{c.schedule!r}]) is whole sequences of --seq_len={c.seq_len}; "
                "change one of the two")
    units.append(("batch_tokens", c.seq_len, "--seq_len="))
    units.append(("val_tokens", c.val_seq_len, "--val_seq_len="))
    units.append(("head_dim", 4, ""))  # the rotary embedding takes quarters of a head
    for name, unit, key in units:
        value = getattr(c, name)
        require(value % unit == 0, f"--{name}={value} must be a multiple of {key}{unit}")
    require(c.micro_tokens >= c.seq_len, f"--micro_tokens={c.micro_tokens} must be at least "
            f"{c.seq_len}, the tokens of a sequence")


def check_device(c) -> None:
    has_gpu = torch.cuda.is_available()
    require(c.device != "cuda" or has_gpu, "--device=cuda, but torch sees no GPU here")
    require(c.attention != "flex" or (has_gpu and c.device != "cpu"),
            "--attention=flex needs CUDA: it has no backward on CPU")
    require(c.attention != "flex" or c.compile,
            "--attention=flex without the compiler keeps the scores of all pairs of tokens, which "
            "do not fit; leave out --attention=flex or --compile=false")


# Of the CPU, of CUDA and Triton, of NCCL, and of cuBLAS.
LACK_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")


def lack_of_memory(error: BaseException | None) -> str:
    """What an error says if a GPU, or this machine, has too little memory, up to how much was asked
    for; empty if something else is wrong. Python keeps an error that led to another one as its
    __context__. If memory ends while a CUDA graph is recorded, the end of the recording fails, too,
    and the error about memory is the __context__."""
    while error is not None:
        text = str(error)
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
                said in text for said in LACK_OF_MEMORY):
            before, _, after = text.partition("DefaultCPUAllocator: ")
            first, *others = (after or before or "out of memory").split("\n")[0].split(". ")
            if first == "CUDA out of memory" and others:
                return f"{first}. {others[0]}"
            return first
        error = error.__context__
    return ""


@contextmanager
def enough_memory() -> Iterator[None]:
    """Raises BadInput if what is done here needs more memory than the machine has. PyTorch's error
    for GPUs is left as it is."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise BadInput("the model does not fit into the memory of this machine; lower "
                       "--ngram_rows, --recall_rows, --num_layers or --mlp_dim") from None
