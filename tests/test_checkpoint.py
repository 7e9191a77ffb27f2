"""Checkpoints: written whole or not at all, and read as data that is checked."""
import os
import pickle
import stat

import pytest
import torch

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
