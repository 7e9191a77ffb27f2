"""The command line, nanogpt/command_line.py, with a small configuration of its own."""
import dataclasses
from types import SimpleNamespace

import pytest

from nanogpt.command_line import configure, key, parse
from nanogpt.ranks import BadInput


@dataclasses.dataclass
class Config:
    preset: str = key("", "which preset")
    device: str = key("cpu", "where")
    data_dir: str = key("data", "folder of shards, 100% of them")
    shuffle: bool = key(False, "draw documents in random order")
    num_steps: int = key(100, "steps")
    schedule: str = key("flat", "stages")
    precision: str = key("auto", "recipes")
    muon_lr: float = key(0.5, "learning rate")
    resume: str = key("", "save to go on from")


PRESETS = {"laptop": {}, "speedrun": {}, "small": {"num_steps": 10, "shuffle": True}}
SCRIPT = SimpleNamespace(
    Config=Config, PRESETS=PRESETS, SCHEDULES={"flat": []}, PRECISIONS={"bf16": ()}, ABOUT={"small": "not large"},
    __doc__="A title.\n\nAnd more.")


def read(*argv):
    return parse(SCRIPT, list(argv))


def test_given_values_lie_over_the_preset_and_that_over_the_defaults():
    values = read("--muon_lr=2", "--shuffle=false")
    assert values == {"muon_lr": 2.0, "shuffle": False}
    expected = Config("small", num_steps=10, muon_lr=2.0)
    assert configure(SCRIPT, "small", values) == expected
    with pytest.raises(BadInput, match="--preset=huge is none of laptop, speedrun, small"):
        configure(SCRIPT, "huge", {})


@pytest.mark.parametrize("words, value", [
    (["--num_steps=1_000"], 1000), (["--num_steps", "3"], 3), (["--muon_lr=5e-2"], 0.05),
    (["--num_steps=1", "--num_steps=2"], 2), (["--data_dir="], ""), (["--data_dir=a=b"], "a=b"),
    (["--data_dir", "two words"], "two words"), (["--shuffle"], True), (["--shuffle", "FALSE"], False),
    (["--resume"], "newest"), (["--resume=x"], "x")], ids=str)
def test_values_are_read_in_every_usual_form(words, value):
    [found] = read(*words).values()
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("word, parts", [
    ("--num_steps=1e3", ["--num_steps", "invalid int value: '1e3'"]),
    ("--muon_lr=fast", ["--muon_lr", "invalid float value: 'fast'"]),
    ("--shuffle=maybe", ["--shuffle", "maybe is neither true nor false"]),
    ("--num_steps", ["--num_steps"]),
    ("--num_step=3", ["unrecognized arguments: --num_step=3", "--help lists all options"]),
    ("a.txt", ["unrecognized arguments: a.txt"])])
def test_what_cannot_be_is_answered_in_one_sentence(word, parts):
    with pytest.raises(BadInput) as error:
        read(word)
    assert all(part in str(error.value) for part in parts) and "\n" not in str(error.value)


def test_help_shows_all_keys_with_the_values_of_the_preset(capsys):
    with pytest.raises(SystemExit) as end:
        read("--preset=small", "--help")
    out = capsys.readouterr().out
    assert end.value.code == 0 and "A title." in out and "steps [10]" in out and "100% of" in out
    assert "small     not large" in out and "--preset=small." in out and "more" not in out
    with pytest.raises(BadInput, match="--schedule=flt is none of flat"):  # run.sh asks before it fetches data
        read("--schedule=flt", "--help")
