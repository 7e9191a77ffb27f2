"""The command line: every field of a configuration can be given as --name=value.

A configuration is a dataclass whose fields were made with `key`, so that each has a meaning that
--help prints. Presets are sets of other defaults, of which --preset chooses one.
"""
import argparse
import dataclasses
import difflib
from functools import partial

from nanogpt.ranks import BadInput, require


def key(default, meaning: str):
    """A field of a configuration. Its type is that of the default value."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


def true_or_false(text: str) -> bool:
    """The value of a switch. argparse puts this function's name into its sentence."""
    return ("false", "true", "0", "1").index(text.lower()) in (1, 3)


def given(config_class, presets: dict[str, dict], title: str, argv: list[str]) -> dict:
    """The keys that argv gives, with their values.

    Raises BadInput on an unknown key, which it answers with the nearest one, and on a value of the
    wrong type. Prints all keys and leaves the program on --help."""
    parser = argparse.ArgumentParser(
        description=title, epilog=f"presets: {presets}", allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = partial(require, False)  # argparse's sentence, without its page on usage
    for field in dataclasses.fields(config_class):
        options = {"type": type(field.default)}
        if isinstance(field.default, bool):  # --jsonl alone is --jsonl=true
            options = {"type": true_or_false, "nargs": "?", "const": True}
        meaning = field.metadata["meaning"]
        parser.add_argument(
            f"--{field.name}", default=argparse.SUPPRESS, help=meaning, **options)

    values, unknown = parser.parse_known_args(argv)
    names = [field.name for field in dataclasses.fields(config_class)]
    if unknown:
        name = unknown[0].split("=")[0]
        nearest = difflib.get_close_matches(name.removeprefix("--"), names, n=1, cutoff=0)
        raise BadInput(f"unknown key {name}; the nearest one is --{nearest[0]} (--help lists all)")
    preset = getattr(values, "preset", "")
    require(not preset or preset in presets, f"--preset={preset} is none of {', '.join(presets)}")
    return vars(values)
