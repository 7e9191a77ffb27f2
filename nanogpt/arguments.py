"""The keys of a configuration, what their values may be, and how they fit each other.

A configuration is a dataclass whose fields were made with `key`, so that each has a meaning that
--help prints. Presets are sets of other defaults, of which --preset chooses one.
"""
import dataclasses
import math

import torch

from nanogpt.masks import BLOCK_SIZE
from nanogpt.ranks import require

NEWEST = "newest"  # what --resume alone stands for


def key(default, meaning: str, alone: str | None = None, choices: tuple[str, ...] = (),
        least: float | None = None, most: float = math.inf):
    """A field of a configuration. Its type is that of the default value.

    alone: its value where none is given: --resume for --resume=newest
    choices: the texts that it can be, if not all
    least, most: the bounds of a number; without `least` a whole number is at least 1, and another
        one 0
    """
    if least is None:
        least = 1 if type(default) is int else 0
    return dataclasses.field(default=default, metadata=dict(
        meaning=meaning, alone=alone, choices=choices, least=least, most=most))


@dataclasses.dataclass
class RunConfig:
    """Keys that say where and how a run is made. They change its weights by rounding at most, so a
    run that goes on from a save may have other values of them."""
    device: str = key("auto", "auto, cuda or cpu", choices=("auto", "cuda", "cpu"))
    attention: str = key(
        "auto", "auto, flex (CUDA, compiled) or sdpa (everywhere)",
        choices=("auto", "flex", "sdpa"))
    compile: bool = key(True, "use torch.compile, and CUDA graphs on a GPU")
    join_timeout: float = key(10.0, "minutes that a process waits for the others at the start")
    resume: str = key(
        "", "save to go on from, logs/RUN_ID.saved; --resume alone: the newest one in log_dir. "
        "Without any save a new run begins",
        alone=NEWEST)
    # output
    log_dir: str = key("logs", "folder of the logs")
    run_name: str = key("", "free text for the log")
    save_checkpoint: str = key(
        "", "file to write the weights of the best validation to; auto: in models/, named after "
        "data_dir")
    save_every: float = key(
        0.0, "minutes of training between saves of the whole run, from which --resume goes on; 0: "
        "none")
    sample: str = key("", "text to continue at the end with the weights of save_checkpoint")
    sample_tokens: int = key(256, "tokens to sample", least=0)


def check(c, schedules: dict[str, list], precisions: dict[str, tuple]) -> None:
    """Raises BadInput where a value of train_gpt.Config cannot be, or values do not fit each other.
    The others are SCHEDULES and PRECISIONS of train_gpt.py."""
    check_bounds(c)
    for name, rows in (("schedule", schedules), ("precision", ("auto", *precisions))):
        value = getattr(c, name)
        require(value in rows, f"--{name}={value} is none of {', '.join(rows)}")
    require(c.device != "cuda" or torch.cuda.is_available(),
            "--device=cuda, but torch sees no GPU here")
    require(c.layers_with_attention, "--attention_layers=none: at least one layer needs attention")
    require(c.save_checkpoint or not c.sample,
            "--sample needs kept weights: give --save_checkpoint=auto, too, or --sample= for none")
    _ = c.layers_with_values  # raises BadInput itself, as the other does
    check_lengths(c)
    check_stages(c, schedules[c.schedule])
    require(c.candidates % 16 == 0,
            f"--candidates={c.candidates} must be a multiple of 16, or 0 for the whole vocabulary")


def check_bounds(c) -> None:
    """Each value by itself."""
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        option = f"--{field.name}={value}"
        about = field.metadata
        require(not about["choices"] or value in about["choices"],
                f"{option} is none of {', '.join(about['choices'])}")
        if type(value) in (int, float):
            require(value >= about["least"], f"{option} must be at least {about['least']}")
            require(value <= about["most"], f"{option} must be at most {about['most']}")


def numbers_among(option: str, text: str, possible: tuple[int, ...]) -> tuple[int, ...]:
    """"all", "none", or numbers with commas between them -> these of the possible ones, ascending.
    Raises BadInput."""
    chosen = {"all": possible, "none": ()}.get(text)
    if chosen is None:
        numbers = {number.strip() for number in text.split(",")}
        chosen = tuple(number for number in possible if str(number) in numbers)
        require(len(chosen) == len(numbers), f"--{option}={text} must be all, none, or some of "
                f"{','.join(map(str, possible))}")
    return chosen


def check_lengths(c) -> None:
    """Lengths are whole blocks of attention or whole sequences, and heads have quarters."""
    for name, unit in (("seq_len", BLOCK_SIZE), ("val_seq_len", BLOCK_SIZE), ("head_dim", 4),
                       ("batch_tokens", c.seq_len), ("val_tokens", c.val_seq_len)):
        value = getattr(c, name)
        require(value % unit == 0, f"--{name}={value} must be a multiple of {unit}")
    require(c.micro_tokens >= c.seq_len, f"--micro_tokens={c.micro_tokens} must be at least "
            f"{c.seq_len}, the tokens of a sequence")
    of_heads = c.num_heads * c.head_dim
    require(of_heads <= c.model_dim,
            f"--num_heads={c.num_heads} times --head_dim={c.head_dim} is {of_heads}; it must be "
            f"at most {c.model_dim}, which is --model_dim")


def check_stages(c, stages: list) -> None:
    """Each stage of the schedule has batches of whole sequences, and together they are the run."""
    for stage in stages:
        sequences = c.batch_tokens // c.seq_len * stage.batch_part
        require(sequences >= 1 and sequences % 1 == 0,
                f"--batch_tokens={c.batch_tokens} must be such that {stage.batch_part:g} of it "
                f"(SCHEDULES[{c.schedule!r}]) is whole sequences of --seq_len={c.seq_len}; change "
                "one of the two")
    fractions = sum(stage.fraction for stage in stages)
    require(abs(fractions - 1) < 1e-6,
            f"SCHEDULES[{c.schedule!r}]: the fractions of its stages make {fractions:g}, not 1")


def configure(config_class, presets: dict[str, dict], preset: str, given: dict):
    """The given values, over those of the preset, over the defaults. Raises BadInput if there is no
    such preset."""
    require(preset in presets, f"--preset={preset} is none of {', '.join(presets)}")
    return config_class(**presets[preset] | given | {"preset": preset})
