"""The command line: every field of a configuration can be given as --name=value. What is given is
laid over the values of the save that --resume means, of what fits a text, or of a preset.

`script` is the module train_gpt: its Config, its presets and its schedules.
"""
import argparse
import dataclasses
from collections.abc import Callable

import torch

from nanogpt import arguments, checkpoints, fitting
from nanogpt.arguments import check_bounds, configure
from nanogpt.ranks import BadInput, require

EVERYDAY = (  # keys that --help shows first
    "preset", "data_dir", "minutes", "num_steps", "seed", "target_loss", "save_checkpoint",
    "sample", "micro_tokens", "device", "precision")

SWITCH = {"true": True, "yes": True, "on": True, "1": True,
          "false": False, "no": False, "off": False, "0": False}


def parse_config(script, argv: list[str]):
    """The train_gpt.Config of a run. Raises BadInput on an unknown key or a wrong value, and
    ShardError if the run is to be fitted to a text that cannot be read."""
    config_class, presets, schedules = script.Config, script.PRESETS, script.SCHEDULES
    values = given(config_class, argv, presets, default_preset, script.__doc__.split("\n\n")[0],
                   EVERYDAY, script.ABOUT)
    require(not (values.get("minutes") and "num_steps" in values),
            "--minutes chooses the number of steps; leave out --minutes or --num_steps")
    brings_text = "data_dir" in values and not values.get("preset")
    cuda = has_cuda(values.get("device"))
    # A configuration names the save that is found, not what --resume was given as.
    save = checkpoints.find(values.pop("resume", ""), values.get("log_dir", config_class.log_dir))
    if save:
        c = checkpoints.configure(config_class, save, values, script.MAY_CHANGE)
    else:
        if not cuda:
            values = script.ON_CPU | values
        if values.get("minutes"):
            values = {"target_loss": 0.0} | values  # that of a preset is for its number of steps
        if values.get("fit", brings_text):
            c = fitting.fit(config_class, presets, schedules, values, cuda)
        else:
            preset = values.get("preset") or default_preset(values.get("device"))
            c = configure(config_class, presets, preset, values)
    arguments.check(c, schedules, script.PRECISIONS)
    return c


def has_cuda(device: str | None) -> bool:
    """Whether --device=... leads to a GPU of this machine."""
    return device in (None, "auto", "cuda") and torch.cuda.is_available()


def default_preset(device: str | None = None) -> str:
    return "speedrun" if has_cuda(device) else "laptop"


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise BadInput(f"{message} (--help lists all keys)")


def given(config_class, argv: list[str], presets: dict[str, dict],
          default_preset: Callable[[str | None], str], title: str, everyday: tuple[str, ...],
          about: dict[str, str]) -> dict:
    """The values that argv names, by their keys. Raises BadInput on an unknown key and on a value
    that cannot be.

    default_preset: a function of the value of --device, or None if it is not given
    everyday: keys that --help lists first
    about: what --help says about each preset
    """
    parser = Parser(
        description=title, usage="python train_gpt.py --key=value ...", add_help=False,
        allow_abbrev=False, argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    first = parser.add_argument_group("everyday keys")
    others = parser.add_argument_group("all other keys")
    actions = {}
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    for name in dict.fromkeys((*everyday, *fields)):
        kind = type(fields[name].default)
        alone = True if kind is bool else fields[name].metadata["alone"]
        options = dict(nargs="?", const=alone) if alone else {}
        group = first if name in everyday else others
        read = switch if kind is bool else kind
        actions[name] = group.add_argument(f"--{name}", type=read, metavar="", **options)
    parser.add_argument("--help", "-h", action="store_true")
    values = vars(parser.parse_args(argv))
    shows_help = values.pop("help", False)
    check_bounds(config_class(**values))
    if shows_help:
        preset = values.get("preset") or default_preset(values.get("device"))
        shown = configure(config_class, presets, preset, {})
        for name, field in fields.items():
            text = f"{field.metadata['meaning']} [{getattr(shown, name)}]"
            actions[name].help = text.replace("%", "%%")
        lines = [f"  {name:<10}{about.get(name, '')}" for name in presets]
        parser.epilog = "\n".join([
            "presets: other defaults, over which the keys that you give are laid", *lines, "",
            f"In brackets: the values of --preset={preset}."])
        parser.print_help()
        raise SystemExit(0)
    return values


def switch(text: str) -> bool:
    if text.lower() not in SWITCH:
        raise argparse.ArgumentTypeError(f"{text} is neither true nor false")
    return SWITCH[text.lower()]
