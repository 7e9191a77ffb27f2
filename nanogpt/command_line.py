"""The command line: the keys of a configuration, what their values may be, and how they fit.

A configuration is a dataclass whose fields were made with `key`, so that each has a meaning that
--help prints. `script` is the module train_gpt: its Config, its presets and its schedules.
"""
import argparse
import dataclasses
import math

import torch

from data import Parser, require
from nanogpt.masks import BLOCK_SIZE

NEWEST = "newest"  # what --resume alone stands for


def key(default, meaning: str, choices: tuple[str, ...] = (), least: float | None = None,
        most: float = math.inf):
    """A field of a configuration. Its type is that of the default value.

    choices: the texts that it can be, if not all
    least, most: the bounds of a number; without `least` a whole number is at least 1, and any other
        number at least 0
    """
    if least is None:
        least = 1 if type(default) is int else 0
    return dataclasses.field(default=default, metadata=dict(
        meaning=meaning, choices=choices, least=least, most=most))


@dataclasses.dataclass
class RunConfig:
    """Keys that say where and how a run is made. A run that goes on from a save may have others.
    Wrong ones raise BadInput."""
    device: str = key("auto", "auto, cuda or cpu", choices=("auto", "cuda", "cpu"))
    attention: str = key(
        "auto", "sdpa, or auto: FlexAttention in compiled runs on a GPU with a head_dim of 16 or "
        "more, else sdpa",
        choices=("auto", "sdpa"))
    compile: bool = key(True, "use torch.compile, and CUDA graphs on a GPU")
    join_timeout: float = key(
        10.0, "minutes that a process waits for the others at the start", most=100_000)
    resume: str = key(
        "", "save to go on from, logs/RUN_ID.saved; --resume alone: the newest one in log_dir or "
        "below. Without any save a new run begins")
    # output
    log_dir: str = key("logs", "folder of the logs")
    run_name: str = key("", "free text for the log")
    save_checkpoint: str = key(
        "", "file for the weights of the best validation; auto: in models/, named after data_dir")
    save_every: float = key(
        0.0, "minutes of training between saves of the whole run, for --resume; 0: none")
    sample: str = key("", "text to continue at the end with the weights of save_checkpoint")
    sample_tokens: int = key(256, "tokens to sample", least=0)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            about = field.metadata
            if about["choices"]:
                require_one_of(field.name, value, about["choices"])
            if type(value) in (int, float):
                require(value >= about["least"],
                        f"--{field.name}={value} must be at least {about['least']}")
                require(value <= about["most"],
                        f"--{field.name}={value} must be at most {about['most']}")


def require_one_of(name: str, value: str, choices) -> None:
    require(value in choices, f"--{name}={value} is none of {', '.join(choices)}")


def check_names(c, script) -> None:
    """Raises BadInput where a schedule or a precision has no such entry in the script."""
    require_one_of("schedule", c.schedule, script.SCHEDULES)
    require_one_of("precision", c.precision, ("auto", *script.PRECISIONS))


def check(c, script) -> None:
    """Raises BadInput where values of a train_gpt.Config do not fit each other."""
    check_names(c, script)
    require(c.device != "cuda" or torch.cuda.is_available(),
            "--device=cuda, but torch sees no GPU here")
    require(c.layers_with_attention, "--attention_layers=none: at least one layer needs attention")
    require(c.save_checkpoint or not c.sample,
            "--sample needs kept weights: give --save_checkpoint=auto, too, or --sample= for none")
    _ = c.layers_with_values, c.recall_lengths  # to read these raises BadInput if they are wrong
    # Lengths are whole blocks of attention, or whole sequences. A head is cut into quarters.
    for name, unit, what in (
            ("seq_len", BLOCK_SIZE, ""), ("val_seq_len", BLOCK_SIZE, ""), ("head_dim", 4, ""),
            ("batch_tokens", c.seq_len, ", which is --seq_len"),
            ("val_tokens", c.val_seq_len, ", which is --val_seq_len")):
        value = getattr(c, name)
        require(value % unit == 0, f"--{name}={value} must be a multiple of {unit}{what}")
    require(c.micro_tokens >= c.seq_len, f"--micro_tokens={c.micro_tokens} must be at least "
            f"{c.seq_len}, the tokens of a sequence")
    of_heads = c.num_heads * c.head_dim
    require(of_heads <= c.model_dim,
            f"--num_heads={c.num_heads} times --head_dim={c.head_dim} is {of_heads}; it must be "
            f"at most {c.model_dim}, which is --model_dim")
    # Each stage has batches of whole sequences, and together the stages are the run.
    stages = script.SCHEDULES[c.schedule]
    for stage in stages:
        sequences = c.batch_tokens // c.seq_len * stage.batch_part
        require(sequences >= 1 and sequences % 1 == 0,
                f"--batch_tokens={c.batch_tokens} must be such that {stage.batch_part:g} of it "
                f"(SCHEDULES[{c.schedule!r}]) is whole sequences of --seq_len={c.seq_len}; change "
                "one of the two")
    fractions = sum(stage.fraction for stage in stages)
    require(abs(fractions - 1) < 1e-6,
            f"SCHEDULES[{c.schedule!r}]: the fractions of its stages make {fractions:g}, not 1")
    require(c.candidates % 16 == 0,
            f"--candidates={c.candidates} must be a multiple of 16, or 0 for the whole vocabulary")


def numbers_among(option: str, text: str, possible: tuple[int, ...]) -> tuple[int, ...]:
    """all, none, or 2,0,5 -> these of the possible numbers, ascending. Raises BadInput."""
    chosen = {"all": possible, "none": ()}.get(text)
    if chosen is None:
        numbers = {number.strip() for number in text.split(",")}
        chosen = tuple(number for number in possible if str(number) in numbers)
        require(len(chosen) == len(numbers), f"--{option}={text} must be all, or some of "
                f"{','.join(map(str, possible))}")
    return chosen


def configure(script, preset: str, given: dict):
    """The given values, over those of the preset, over the defaults. Raises BadInput."""
    require_one_of("preset", preset, script.PRESETS)
    return script.Config(**script.PRESETS[preset] | given | {"preset": preset})


def has_cuda(device: str | None) -> bool:
    """Whether --device=... leads to a GPU of this machine."""
    return device in (None, "auto", "cuda") and torch.cuda.is_available()


def preset_of(values: dict) -> str:
    """The preset that is given, or else the one for this machine."""
    default = "speedrun" if has_cuda(values.get("device")) else "laptop"
    return values.get("preset") or default


def parse(script, argv: list[str]) -> dict:
    """The values that argv names, by their keys. Raises BadInput on an unknown key, on a value of
    another type, and if both --minutes and --num_steps are given."""
    values, others = parser_of(script, preset_of({})).parse_known_args(argv)
    advice = "--help lists all options"
    if not all(other.startswith("-") for other in others):
        advice = "give a text to ./run.sh or to data/prepare.py"
    require(not others, f"unrecognized arguments: {' '.join(others)} ({advice})")
    values = vars(values)
    require(not (values.get("minutes") and "num_steps" in values),
            "--minutes chooses the number of steps; leave out --minutes or --num_steps")
    if values.pop("help", False):
        # For its BadInput only: run.sh finds wrong names and numbers by --help.
        check_names(configure(script, preset_of(values), values), script)
        parser_of(script, preset_of(values)).print_help()
        raise SystemExit(0)
    return values


def parser_of(script, preset: str) -> Parser:
    """A parser of all keys. Its help has their values in this preset."""
    shown = configure(script, preset, {})
    presets = [f"  {name:<10}{about}" for name, about in script.ABOUT.items()]
    parser = Parser(
        usage="python train_gpt.py --name=value ...", description=script.__doc__.split("\n\n")[0],
        epilog="\n".join([
            "presets: other defaults, over which the keys that you give are laid", *presets, "",
            f"In brackets: the values of --preset={preset}."]),
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    of_run = vars(RunConfig())  # come last
    for field in sorted(dataclasses.fields(script.Config), key=lambda field: field.name in of_run):
        kind = type(field.default)
        options = dict(type=kind, metavar="")
        if kind is bool:
            options = dict(type=switch, nargs="?", const=True, metavar="=false")
        elif field.name == "resume":
            options = dict(nargs="?", const=NEWEST, metavar="=PATH")
        text = f"{field.metadata['meaning']} [{getattr(shown, field.name)}]"
        parser.add_argument(f"--{field.name}", help=text.replace("%", "%%"), **options)
    parser.add_argument("--help", "-h", action="store_true")
    return parser


def switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text} is neither true nor false")
    return text.lower() == "true"
