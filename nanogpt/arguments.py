"""The command line: every field of a configuration can be given as --name=value.

A configuration is a dataclass whose fields were made with `key`, so that each has a meaning that
--help prints. A comment of one word in the class, on a line of its own, begins a group of keys.
Presets are sets of other defaults, of which --preset chooses one.

    values = given(Config, argv, presets)                  # only what the command line names
    c = configure(Config, presets, "laptop", values)       # over the preset, over the defaults
"""
import dataclasses
import difflib
import inspect
import math
import os
import re
import textwrap
from collections.abc import Callable

from nanogpt.ranks import BadInput, require
from records.console import prepare_output

SWITCH = {"true": True, "1": True, "false": False, "0": False}
WIDTH = 100  # of a line of --help
NAMES_WIDTH = 22  # of its first column


SAMPLING = 'that is a key of sample.py: python sample.py MODEL "TEXT" --temperature=0.8'
HINTS = {  # answers to keys that other trainers have
    "": "your own text is prepared first: ./run.sh FILE, or python data/prepare.py FILE",
    "load_checkpoint": SAMPLING, "temperature": SAMPLING,
    "top_k": SAMPLING, "num_samples": SAMPLING, "max_new_tokens": SAMPLING,
    "lr": "see --muon_lr, --head_lr, --table_lr and --scalar_lr",
    "learning_rate": "see --muon_lr, --head_lr, --table_lr and --scalar_lr",
    "batch_size": "see --batch_tokens and --micro_tokens",
    "device_batch_size": "see --micro_tokens", "max_steps": "see --num_steps",
    "max_iters": "see --num_steps", "iters": "see --num_steps", "steps": "see --num_steps",
    "dropout": "there is none; --minutes or --num_steps makes the run shorter",
    "n_head": "see --num_heads and --head_dim", "depth": "see --num_layers",
    "topology": "all layers are alike; see --num_layers",
    "n_embd": "see --model_dim", "out_dir": "see --log_dir and --save_checkpoint",
    "out": "see --log_dir and --save_checkpoint", "wandb": "--jsonl writes what tools can read",
    "text": "your own text: ./run.sh FILE", "input": "your own text: ./run.sh FILE",
    "file": "your own text: ./run.sh FILE"}


def key(default, meaning: str, alone: str | None = None):
    """A field of a configuration. Its type is that of the default value. `alone` is the value of
    the key where none is given: --resume for --resume=newest."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "alone": alone})


def configure(config_class, presets: dict[str, dict], preset: str, given: dict):
    """The given values, laid over those of the preset, over the defaults. Raises BadInput if there
    is no such preset."""
    require(preset in presets, f"--preset={preset} is none of {', '.join(presets)}")
    return config_class(**presets[preset] | given | {"preset": preset})


def given(config_class, argv: list[str], presets: dict[str, dict],
          default_preset: Callable | None = None, title: str = "",
          everyday: tuple[str, ...] = (), about: dict[str, str] | None = None,
          check: Callable | None = None, hints: dict[str, str] = HINTS) -> dict:
    """The values that argv names, by their keys. Of a key that is given twice the last one counts.

    default_preset: a function of the value of --device, or None if it is not given
    everyday: keys that --help lists first
    about: what --help says about each preset
    check: raises BadInput if a value of the configuration that it gets cannot be. Only --help calls
        it: so run.sh finds wrong values before it makes or fetches data for them
    hints: answers to keys that other programs have; that of "" is for a word that is no key

    Raises BadInput on an unknown key, which it answers with the hint or with the nearest key, and
    on a value that cannot be. On --help it prints all keys, with the values of the preset in
    argv or else the default one, and leaves the program with status 0 (SystemExit).
    """
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    wants_help = "--help" in argv or "-h" in argv
    words = [word for word in argv if word not in ("--help", "-h")]
    values = {}
    while words:
        word = words.pop(0)
        name, has_value, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in fields:
            raise BadInput(unknown(word, list(fields), hints or {}))
        default = fields[name].default
        next_is_value = bool(words) and not words[0].startswith("--")
        if isinstance(default, bool) and not has_value:  # --jsonl alone is --jsonl=true
            next_is_value = next_is_value and words[0].lower() in SWITCH
            text = words.pop(0) if next_is_value else "true"
        elif not has_value and not next_is_value and fields[name].metadata.get("alone"):
            text = fields[name].metadata["alone"]
        elif not has_value:
            require(next_is_value, f"--{name} needs a value: --{name}=VALUE")
            text = words.pop(0)
        values[name] = value_of(name, text, type(default))

    if wants_help:
        preset = values.get("preset")
        if not preset and default_preset:
            preset = default_preset(values.get("device"))
        shown = configure(config_class, presets, preset, {}) if preset else config_class()
        if check:
            check(dataclasses.replace(shown, **values))
        about = dict.fromkeys(presets, "") | (about or {})
        prepare_output()
        print(help_text(shown, title, everyday, about), end="")
        raise SystemExit(0)
    return values


def value_of(name: str, text: str, kind: type):
    """The value of a key, which must be of this type. Raises BadInput if the text is none."""
    if kind is bool:
        require(text.lower() in SWITCH, f"--{name}={text} is neither true nor false")
        return SWITCH[text.lower()]
    if kind is int:
        require(re.fullmatch(r"\s*[+-]?[0-9]+(_[0-9]+)*\s*", text),
                f"--{name}={text} is not a whole number")
        digits = text.replace("_", "").strip().lstrip("+-").lstrip("0")
        require(len(digits) <= 19 and int(digits or 0) < 2**63,
                f"--{name}={text} is too large: whole numbers go up to 2^63 - 1")
        return int(text)
    if kind is float:
        try:
            value = float(text)
        except ValueError:
            raise BadInput(f"--{name}={text} is not a number") from None
        require(math.isfinite(value), f"--{name}={text} is not a finite number")
        return value
    return text


def unknown(word: str, names: list[str], hints: dict[str, str]) -> str:
    """The sentence that answers a word which is no key."""
    if not word.startswith("-"):
        hint = hints.get("", "what is given has the form --key=value")
        return f"{word} is no key; {hint} (--help lists all keys)"
    name = word.partition("=")[0]
    plain = name.lstrip("-").replace("-", "_").lower()
    if plain in hints:
        return f"unknown key {name}; {hints[plain]} (--help lists all)"
    if os.path.exists(word):
        return f"{word} looks like a key; give the file as ./{word}"
    nearest = difflib.get_close_matches(plain, names, n=1, cutoff=0.6)
    if nearest:
        return f"unknown key {name}; the nearest one is --{nearest[0]} (--help lists all)"
    return f"unknown key {name} (--help lists all)"


# ------------------------------------------------------------------------------------------------
# --help


def help_text(config, title: str, everyday: tuple[str, ...], about: dict[str, str]) -> str:
    """All that --help prints. The values shown are those of the configuration."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    lines = [*textwrap.wrap(title, WIDTH), "", "usage: python train_gpt.py --key=value ..."]
    groups = {"everyday keys": [name for name in everyday if name in fields]}
    for name, group in groups_of(type(config)).items():
        if name not in everyday:
            groups.setdefault(group, []).append(name)
    for group, names in groups.items():
        if names:
            lines += ["", group]
        for name in names:
            value = getattr(config, name)
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            meaning = fields[name].metadata["meaning"]
            lines += row(f"--{name}", f"{meaning} [{shown}]" if shown else meaning)
    lines += ["", "presets: other defaults, over which the keys that you give are laid"]
    for preset, sentence in about.items():
        lines += row(preset, sentence)
    preset = getattr(config, "preset", "")
    if preset:
        lines += ["", f"In brackets: the values of --preset={preset}."]
    return "\n".join(lines) + "\n"


def row(name: str, text: str) -> list[str]:
    """A row of two columns, of which the second may have several lines."""
    lines = textwrap.wrap(text, WIDTH - NAMES_WIDTH, break_on_hyphens=False) or [""]
    if len(name) + 3 > NAMES_WIDTH:  # then the second column begins below it
        return [f"  {name}", *[" " * NAMES_WIDTH + line for line in lines]]
    first = f"  {name}".ljust(NAMES_WIDTH) + lines[0]
    return [first.rstrip(), *[" " * NAMES_WIDTH + line for line in lines[1:]]]


def groups_of(config_class) -> dict[str, str]:
    """The group of each field: the last comment of one word above it in the source of the class.
    Fields before the first such comment are of the group "keys", and so are all if there is no
    source."""
    groups = {}
    group = "keys"
    try:
        source = inspect.getsource(config_class)
    except (OSError, TypeError):
        source = ""
    names = [field.name for field in dataclasses.fields(config_class)]
    for line in source.splitlines():
        if heading := re.fullmatch(r"\s*# (\w+)", line):
            group = heading[1]
        name = line.partition(":")[0].strip()
        if name in names:
            groups[name] = group
    for name in names:
        groups.setdefault(name, "keys")
    return groups
