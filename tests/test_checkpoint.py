"""Checkpoints: written whole or not at all, and read as data that is checked."""
import contextlib
import dataclasses
import os
import pickle
import stat
import zipfile

import pytest
import torch
from conftest import TINY

import train_gpt as t
from nanogpt import checkpoint
from nanogpt.ranks import BadInput

GOOD = {"config": {"seed": 1}, "weights": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)},
        "step": 7, "val_loss": 1.5}


def test_what_is_written_is_read_and_nothing_else_stays(tmp_path):
    path = tmp_path / "model.pt"
    checkpoint.write(path, GOOD)
    content = checkpoint.read(path)
    assert content["config"] == GOOD["config"] and content["step"] == 7 and content["val_loss"] == 1.5
    for name, w in GOOD["weights"].items():
        assert content["weights"][name].dtype == w.dtype and torch.equal(content["weights"][name], w)
    assert os.listdir(tmp_path) == ["model.pt"]


def test_an_error_of_the_script_is_not_blamed_on_the_file(tmp_path, monkeypatch):
    model = t.GPT(t.Config(**TINY), torch.device("cpu"))
    path = tmp_path / "model.pt"
    content = {"config": dataclasses.asdict(model.config), "weights": model.state_dict(), "step": 7}
    checkpoint.write(path, content | {"weights": {**content["weights"], "recall_table": model.recall_table}})
    assert t.load_checkpoint(path, "cpu").trained_steps == 7  # the device may be its name

    def broken(*_):
        raise AttributeError("'Config' object has no attribute 'atention'")

    monkeypatch.setattr(t, "GPT", broken)
    with pytest.raises(AttributeError, match="atention"):
        t.load_checkpoint(path, torch.device("cpu"))


def test_a_flipped_bit_anywhere_in_the_weights_is_found(tmp_path):
    path = tmp_path / "model.pt"
    checkpoint.write(path, GOOD)
    content = path.read_bytes()
    place = content.index(torch.arange(6.0).numpy().tobytes())
    for i in range(24):
        damaged = bytearray(content)
        damaged[place + i] ^= 1 << (i % 8)
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match="model.pt"):
            checkpoint.read(path)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("content", [b"", b"no checkpoint", pickle.dumps({"config": Bomb()}), pickle.dumps({})])
def test_a_foreign_file_is_one_sentence_and_runs_nothing(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(BadInput, match="model.pt is no checkpoint of this program"):
        checkpoint.read("model.pt")
    assert os.listdir() == ["model.pt"]


def test_facts_in_another_form_become_those_that_a_checkpoint_has(tmp_path):
    path = tmp_path / "model.pt"
    checkpoint.write(path, GOOD | {"val_loss": "1.5", "data": [[["name", "x"], ["sha256", "y"]]]})
    content = checkpoint.read(path)
    assert content["val_loss"] == 1.5 and content["data"] == [{"name": "x", "sha256": "y"}]


def test_a_folder_and_an_empty_name_are_no_checkpoints(tmp_path):
    with pytest.raises(BadInput, match=f"^{tmp_path} is a folder; name a file that --save_checkpoint has written"):
        checkpoint.read(tmp_path)
    with pytest.raises(BadInput, match="^an empty name: no such file; name a file that"):
        checkpoint.read("")


def test_a_pipe_is_no_checkpoint_and_nobody_waits_for_it(tmp_path):
    os.mkfifo(tmp_path / "model.pt")
    with pytest.raises(BadInput, match="model.pt is no checkpoint of this program"):
        checkpoint.read(tmp_path / "model.pt")


class Large:
    """A pickle that asks for a terabyte, which `weights_only` would allow."""

    def __reduce__(self):
        return bytearray, (2**40,)


def compress(path):
    """The same file with its parts compressed: a small one may be a large one."""
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in parts.items():
            new.writestr(name, content)


def in_capitals(path):
    """The same file with other names of its parts, which PyTorch takes for the same ones."""
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in parts.items():
            new.writestr(name.replace("data.pkl", "DATA.PKL"), content)


TOO_MUCH = {  # what a stranger may have put into a checkpoint
    "expanded": {"weights": {"a": torch.ones(1).expand(2**20, 2**20)}},  # four bytes in the file
    "shared": {"weights": {f"a{i}": torch.ones(2**12).as_strided((2**12,), (1,)) for i in range(4)}
               | {f"b{i}": GOOD["weights"]["a"].expand(9, 2, 3) for i in range(2)}},
    "hidden": {"more": [{"deep": (torch.ones(1).expand(2**40),)}]},
    "transposed": {"weights": {"a": torch.ones(2, 3).t()}},
    "without bytes": {"weights": {"a": torch.empty(2**40, device="meta")}},
    "a call": {"config": Large()},
    "no step": {"step": "many"},
    "a step as text": {"step": "5"},
    "a loss as text": {"val_loss": "x"},
    "no dictionary": {"config": 7},
}


@pytest.mark.parametrize("kind", [*TOO_MUCH, "compressed", "a call in capitals"])
def test_a_file_takes_no_more_memory_than_it_has_bytes(tmp_path, kind):
    path = tmp_path / "model.pt"
    content = GOOD | TOO_MUCH.get(kind, {})
    with contextlib.suppress(RuntimeError, NotImplementedError):
        content = content | {"sha256": checkpoint.checksum(GOOD["weights"])}
    torch.save(content, path)
    if kind == "compressed":
        compress(path)
    if kind == "a call in capitals":
        torch.save(content | TOO_MUCH["a call"], path)
        in_capitals(path)
    with pytest.raises(BadInput, match="model.pt is no checkpoint of this program"):
        checkpoint.read(path)


def test_a_list_that_holds_another_one_many_times_is_looked_through_once(tmp_path):
    laughs = [torch.ones(1)]
    for _ in range(40):
        laughs = [laughs, laughs]
    torch.save(laughs, tmp_path / "x.pt")
    assert len(list(checkpoint.tensors_in(checkpoint.load(tmp_path / "x.pt"), set()))) == 1


@dataclasses.dataclass
class Few:
    name: str = "a"
    steps: int = 3
    rate: float = 0.5
    loud: bool = False


def test_the_configuration_of_a_file_has_values_that_can_be(tmp_path):
    defaults = {"name": "a", "steps": 3, "rate": 0.5, "loud": False}
    assert checkpoint.config_values({"steps": 4, "rate": 1, "colour": "red"}, Few) == defaults | {"steps": 4, "rate": 1}
    for wrong in ({"steps": "4"}, {"steps": 0.5}, {"steps": 2**63}, {"rate": float("nan")}, {"rate": float("inf")},
                  {"loud": 1}, {"name": ["a"] * 10**6}, {"name": None}):
        (name,) = wrong
        with pytest.raises(BadInput, match=f"^{name} is .{{1,60}} in its configuration, which cannot be$"):
            checkpoint.config_values(wrong, Few)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_neither_replace_a_good_checkpoint_nor_load(tmp_path, value):
    path = tmp_path / "model.pt"
    checkpoint.write(path, GOOD)
    bad = GOOD | {"weights": GOOD["weights"] | {"b": torch.tensor([1.0, value])}}
    with pytest.raises(BadInput, match="weights in b are not finite"):
        checkpoint.write(path, bad)
    assert checkpoint.read(path)["step"] == 7
    torch.save(bad | {"sha256": checkpoint.checksum(bad["weights"])}, path)
    with pytest.raises(BadInput, match="weights in b are not finite"):
        checkpoint.read(path)


def test_a_full_disk_leaves_the_old_checkpoint_and_no_half_one(tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    checkpoint.write(path, GOOD)

    def full(content, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="model.pt cannot be written .*No space left"):
        checkpoint.write(path, GOOD | {"step": 8})
    assert checkpoint.read(path)["step"] == 7 and os.listdir(tmp_path) == ["model.pt"]


def test_a_foreign_zip_file_is_not_replaced(tmp_path):
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("name", "text")
    damaged = path.read_bytes().replace(b"name", b"\xff\xfe\xfdx")
    damaged = damaged.replace(b"PK\1\2\x14\x03\x14\0\0\0", b"PK\1\2\x14\x03\x14\0\0\x08")  # names are UTF-8, it says
    for content in (path.read_bytes(), damaged):
        path.write_bytes(content)
        with pytest.raises(BadInput, match="is no checkpoint"):
            checkpoint.try_place(path)
        assert path.read_bytes() == content


def test_what_a_foreign_file_is_called_cannot_change_a_terminal():
    assert str(BadInput("a\x1b]0;title\x07b\x9bc\td")) == "a?]0;title?b?c\td"


def test_a_place_where_nothing_can_be_written_is_refused_and_left_as_it_is(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    for name, part in (("fifo", "is no file"), (".", "is no file"), ("file/model.pt", "choose another")):
        with pytest.raises(BadInput, match=part):
            checkpoint.try_place(tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["fifo", "file"]
    checkpoint.try_place(tmp_path / "new" / "folder" / "model.pt")
    assert os.listdir(tmp_path / "new" / "folder") == []


def test_two_runs_that_end_at_the_same_moment_get_names_of_their_own(tmp_path, monkeypatch):
    """The other one is there after this one has found the name unused, and before it takes it."""
    path = tmp_path / "model.pt"
    unused_path = checkpoint.unused_path

    def and_then(*args):
        found = unused_path(*args)
        monkeypatch.setattr(checkpoint, "unused_path", unused_path)
        assert checkpoint.write(path, GOOD | {"run_id": "other"}, ["other"]) == found
        return found

    monkeypatch.setattr(checkpoint, "unused_path", and_then)
    assert checkpoint.write(path, GOOD | {"run_id": "this"}, ["this"]) == tmp_path / "model-2.pt"
    assert checkpoint.write(path, GOOD | {"run_id": "this", "step": 8}, ["this"]) == tmp_path / "model-2.pt"
    found = [checkpoint.read(tmp_path / name)[key] for name in ("model.pt", "model-2.pt") for key in ("run_id", "step")]
    assert found == ["other", 7, "this", 8] and sorted(os.listdir(tmp_path)) == ["model-2.pt", "model.pt"]


def test_only_an_empty_file_or_a_checkpoint_is_replaced(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text("Once upon a time")
    with pytest.raises(BadInput, match="novel.txt is there already and is no checkpoint; choose another"):
        checkpoint.try_place(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("word/document.xml", "Once upon a time")
    with pytest.raises(BadInput, match="is no checkpoint"):
        checkpoint.try_place(path)
    path.write_text("")
    checkpoint.try_place(path)
    torch.save({"weights": {}}, path)
    checkpoint.try_place(path)
    assert torch.load(path) == {"weights": {}}


def test_a_name_is_found_on_disks_without_links_and_beside_links_that_lead_nowhere(tmp_path, monkeypatch):
    (tmp_path / "model.pt").symlink_to("nowhere")
    assert checkpoint.write(tmp_path / "model.pt", GOOD, []) == tmp_path / "model-2.pt"

    def none(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", none)
    assert checkpoint.write(tmp_path / "model.pt", GOOD, []) == tmp_path / "model-3.pt"
    assert sorted(os.listdir(tmp_path)) == ["model-2.pt", "model-3.pt", "model.pt"]


def test_a_run_that_begins_leaves_alone_what_another_one_writes(tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    save = torch.save

    def meanwhile(content, file):
        save(content, file)
        checkpoint.try_place(path)

    monkeypatch.setattr(torch, "save", meanwhile)
    checkpoint.write(path, GOOD)
    assert checkpoint.read(path)["step"] == 7 and os.listdir(tmp_path) == ["model.pt"]


def test_a_run_that_is_killed_while_it_writes_leaves_no_file_that_looks_like_a_model(tmp_path, monkeypatch):
    def killed(*_):
        raise SystemExit

    for name in ("fsync", "link"):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(os, name, killed)
            checkpoint.write(tmp_path / "model.pt", GOOD, [])
    assert {path.suffix for path in tmp_path.iterdir()} == {".part"}


def test_what_was_best_is_kept_when_an_error_ends_the_run(tmp_path):
    path = tmp_path / "model.pt"
    assert checkpoint.keep(path, GOOD) == f"{path} has the weights of step 7, the best validation so far"
    assert checkpoint.read(path)["step"] == 7
    sentence = checkpoint.keep(path, GOOD | {"step": 9, "weights": {"a": torch.tensor([float("nan")])}})
    assert "weights in a are not finite" in sentence and checkpoint.read(path)["step"] == 7
