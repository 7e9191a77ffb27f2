"""The command line: every field of a configuration can be given as --name=value. What is given is
laid over the values of the save that --resume means, of what fits a text, or of a preset.

`script` is the module train_gpt: its Config, its presets and its schedules.
"""
import argparse
import dataclasses

import torch

from nanogpt import arguments, checkpoints, fitting
from nanogpt.arguments import check_bounds, configure
from nanogpt.ranks import BadInput, require


def parse_config(script, argv: list[str]):
    """The train_gpt.Config of a run. Raises BadInput on an unknown key or a wrong value, and if the
    run is to be fitted to a text that cannot be read."""
    values = given(script, argv)
    require(not (values.get("minutes") and "num_steps" in values),
            "--minutes chooses the number of steps; leave out --minutes or --num_steps")
    brings_text = "data_dir" in values and not values.get("preset")
    cuda = has_cuda(values.get("device"))
    # A configuration names the save that is found, not what --resume was given as.
    save = checkpoints.find(values.pop("resume", ""), values.get("log_dir", script.Config.log_dir))
    if save:
        c = checkpoints.configure(script.Config, save, values, script.MAY_CHANGE)
    else:
        if not cuda:
            values = script.ON_CPU | values
        if values.get("minutes"):
            values = {"target_loss": 0.0} | values  # that of a preset is for its number of steps
        if values.get("fit", brings_text):
            c = fitting.fit(script, values, cuda)
        else:
            c = configure(script.Config, script.PRESETS, preset_of(values), values)
    arguments.check(c, script.SCHEDULES, script.PRECISIONS)
    return c


def has_cuda(device: str | None) -> bool:
    """Whether --device=... leads to a GPU of this machine."""
    return device in (None, "auto", "cuda") and torch.cuda.is_available()


def preset_of(values: dict) -> str:
    """The preset that is given, or else the one for this machine."""
    default = "speedrun" if has_cuda(values.get("device")) else "laptop"
    return values.get("preset") or default


def given(script, argv: list[str]) -> dict:
    """The values that argv names, by their keys. Raises BadInput on an unknown key and on a value
    that cannot be."""
    values = vars(parser_of(script, preset_of({})).parse_args(argv))
    shows_help = values.pop("help", False)
    check_bounds(script.Config(**values))
    if shows_help:
        parser_of(script, preset_of(values)).print_help()
        raise SystemExit(0)
    return values


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise BadInput(f"{message} (--help lists all keys)")


def parser_of(script, preset: str) -> Parser:
    """A parser of all keys. Its help has their values in this preset."""
    shown = configure(script.Config, script.PRESETS, preset, {})
    presets = [f"  {name:<10}{about}" for name, about in script.ABOUT.items()]
    parser = Parser(
        usage="python train_gpt.py --key=value ...", description=script.__doc__.split("\n\n")[0],
        epilog="\n".join([
            "presets: other defaults, over which the keys that you give are laid", *presets, "",
            f"In brackets: the values of --preset={preset}."]),
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    of_run = vars(arguments.RunConfig())  # come last
    for field in sorted(dataclasses.fields(script.Config), key=lambda field: field.name in of_run):
        kind = type(field.default)
        alone = True if kind is bool else field.metadata["alone"]
        options = dict(nargs="?", const=alone) if alone else {}
        text = f"{field.metadata['meaning']} [{getattr(shown, field.name)}]"
        parser.add_argument(
            f"--{field.name}", type=switch if kind is bool else kind, metavar="",
            help=text.replace("%", "%%"), **options)
    parser.add_argument("--help", "-h", action="store_true")
    return parser


def switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text} is neither true nor false")
    return text.lower() == "true"
