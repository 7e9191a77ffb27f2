"""The command line, nanogpt/arguments.py, with a small configuration of its own."""
import dataclasses

import pytest

from nanogpt.arguments import configure, given, key
from nanogpt.ranks import BadInput


@dataclasses.dataclass
class Config:
    preset: str = key("", "which preset")
    # data
    data_dir: str = key("data", "folder of shards")
    # a comment of several words is none
    shuffle: bool = key(False, "draw documents in random order, 100% of them")
    # model
    num_steps: int = key(100, "steps")
    muon_lr: float = key(0.5, "learning rate")


PRESETS = {"big": {}, "small": {"num_steps": 10, "shuffle": True}}
HINTS = {"resume": "this version cannot resume", "batch_size": "use --batch_tokens",
         "": "text is prepared first"}


def refused(*argv, hints=None):
    with pytest.raises(BadInput) as error:
        given(Config, list(argv), PRESETS, hints=hints)
    assert "\n" not in str(error.value)
    return str(error.value)


def helped(capsys, *argv, **options):
    with pytest.raises(SystemExit) as end:
        given(Config, [*argv, "--help"], PRESETS, lambda device: "big", "A title.", **options)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_only_what_the_command_line_names_is_given():
    assert given(Config, [], PRESETS) == {}
    assert given(Config, ["--num_steps=100", "--shuffle"], PRESETS) == {"num_steps": 100, "shuffle": True}
    assert given(Config, ["--num_steps=1", "--num_steps", "2"], PRESETS) == {"num_steps": 2}


def test_given_values_lie_over_the_preset_and_that_over_the_defaults():
    values = given(Config, ["--muon_lr=2", "--shuffle=false"], PRESETS)
    assert configure(Config, PRESETS, "small", values) == Config("small", "data", False, 10, 2.0)
    assert configure(Config, PRESETS, "big", {}) == Config(preset="big")
    with pytest.raises(BadInput, match="--preset=huge is none of big, small"):
        configure(Config, PRESETS, "huge", {})


@pytest.mark.parametrize("words, value", [
    (["--num_steps=1_000"], 1000), (["--num_steps", "-3"], -3), (["--num_steps=+007"], 7),
    ([f"--num_steps={2**63 - 1}"], 2**63 - 1), (["--muon_lr=5e-2"], 0.05), (["--muon_lr", "-1"], -1.0),
    (["--data_dir="], ""), (["--data_dir=a=b"], "a=b"), (["--data_dir", "two words"], "two words"),
    (["--data_dir=--x"], "--x"), (["--shuffle"], True), (["--shuffle", "FALSE"], False),
    (["--shuffle=0"], False), (["--shuffle", "--num_steps=1"], True)], ids=str)
def test_values_are_read_in_every_usual_form(words, value):
    found = list(given(Config, words, PRESETS).values())[0]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("word, sentence", [
    ("--num_steps=many", "--num_steps=many is not a whole number"),
    ("--num_steps=1e3", "--num_steps=1e3 is not a whole number"),
    ("--num_steps=", "--num_steps= is not a whole number"),
    (f"--num_steps={2**63}", f"--num_steps={2**63} is too large: whole numbers go up to 2^63 - 1"),
    (f"--num_steps=-{10**30}", f"--num_steps=-{10**30} is too large: whole numbers go up to 2^63 - 1"),
    ("--muon_lr=fast", "--muon_lr=fast is not a number"),
    ("--muon_lr=nan", "--muon_lr=nan is not a finite number"),
    ("--muon_lr=-inf", "--muon_lr=-inf is not a finite number"),
    ("--muon_lr=1e999", "--muon_lr=1e999 is not a finite number"),
    ("--shuffle=maybe", "--shuffle=maybe is neither true nor false"),
    ("--num_steps", "--num_steps needs a value: --num_steps=VALUE"),
])
def test_a_value_that_cannot_be_is_named(word, sentence):
    assert refused(word) == sentence


def test_a_key_does_not_take_the_next_key_for_its_value():
    assert refused("--data_dir", "--shuffle") == "--data_dir needs a value: --data_dir=VALUE"


@pytest.mark.parametrize("word, answer", [
    ("--num_step=3", "unknown key --num_step; the nearest one is --num_steps (--help lists all)"),
    ("--num-steps=3", "unknown key --num-steps; the nearest one is --num_steps (--help lists all)"),
    ("--xyzzyx", "unknown key --xyzzyx (--help lists all)"),
    ("--resume", "unknown key --resume; this version cannot resume (--help lists all)"),
    ("--Batch-Size=3", "unknown key --Batch-Size; use --batch_tokens (--help lists all)"),
    ("a.txt", "a.txt is no key; text is prepared first (--help lists all keys)"),
    ("-num_steps=3", "unknown key -num_steps; the nearest one is --num_steps (--help lists all)"),
])
def test_an_unknown_word_is_answered_with_a_hint_or_the_nearest_key(word, answer):
    assert refused(word, hints=HINTS) == answer


def test_a_file_whose_name_begins_with_a_dash_is_told_how_to_give_it(tmp_path, monkeypatch):
    (tmp_path / "-dash.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert refused("-dash.txt") == "-dash.txt looks like a key; give the file as ./-dash.txt"


def test_without_hints_a_word_that_is_no_key_is_told_the_form():
    assert refused("a.txt") == "a.txt is no key; what is given has the form --key=value (--help lists all keys)"


def test_help_names_a_value_that_cannot_be_before_it_prints_anything(capsys):
    def check(config):
        if config.num_steps > 50:
            raise BadInput(f"{config.num_steps} are too many steps of {config.preset}")

    helped(capsys, "--preset=small", check=check)
    with pytest.raises(BadInput, match="51 are too many steps of small"):
        helped(capsys, "--preset=small", "--num_steps=51", check=check)
    assert capsys.readouterr().out == ""


def test_help_shows_everyday_keys_first_then_the_groups_of_the_comments(capsys):
    lines = helped(capsys, everyday=("num_steps", "preset"), about={"small": "for small machines"}).splitlines()
    assert lines[0] == "A title."
    assert lines[4:] == [
        "everyday keys",
        "  --num_steps         steps [100]",
        "  --preset            which preset [big]",
        "",
        "data",
        "  --data_dir          folder of shards [data]",
        "  --shuffle           draw documents in random order, 100% of them [false]",
        "",
        "model",
        "  --muon_lr           learning rate [0.5]",
        "",
        "presets: other defaults, over which the keys that you give are laid",
        "  big",
        "  small               for small machines",
        "",
        "In brackets: the values of --preset=big.",
    ]


def test_help_shows_the_values_of_the_preset_that_is_named(capsys):
    out = helped(capsys, "--preset=small")
    assert "steps [10]" in out and "[true]" in out and "--preset=small." in out


def test_keys_of_a_class_without_source_are_shown_too(capsys):
    made = dataclasses.make_dataclass("Made", [("number", int, key(3, "a number"))])
    with pytest.raises(SystemExit):
        given(made, ["-h"], {})
    assert "\nkeys\n  --number            a number [3]\n" in capsys.readouterr().out


def test_long_names_and_meanings_stay_in_their_columns(capsys):
    made = dataclasses.make_dataclass("Made", [("a_name_of_many_letters", int, key(3, "many words " * 30))])
    with pytest.raises(SystemExit):
        given(made, ["-h"], {})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    first = lines.index("  --a_name_of_many_letters")
    assert all(line.startswith(" " * 22 + "many") or line.startswith(" " * 22 + "words") for line in lines[first + 1 : first + 4])
