"""Eight processes through a whole run, on a CPU: what torchrun starts on eight GPUs, but for the GPUs."""
import pytest
import torch
from conftest import arguments
from processes import run_ranks

import train_gpt as t
from nanogpt import checkpoints
from records.log import read_log

EIGHT = {  # the speedrun's stages, a sequence of 128 tokens for each rank in its smallest batch
    "num_layers": 4, "schedule": "speedrun", "num_steps": 4, "batch_tokens": 2 * 8 * 128, "seq_len": 128,
    "micro_tokens": 128, "val_tokens": 8 * 128, "val_seq_len": 128, "val_interval": 2, "epochs": 9, "target_loss": 0,
    "candidates": 0, "precision": "fp32", "dtype": "float64", "sample": ""}


def log_of(folder):
    (path,) = folder.glob("*.txt")
    return read_log(path)


@pytest.fixture(scope="module")
def both(corpus, tmp_path_factory):
    """Folders of a run of one process and of one of eight, with their logs and weights."""
    folders = {ranks: tmp_path_factory.mktemp(f"ranks_{ranks}") for ranks in (1, 8)}
    one, eight = (EIGHT | dict(data_dir=corpus, log_dir=folder, save_checkpoint=folder / "model.pt")
                  for folder in folders.values())
    assert t.main(arguments(**one | {"micro_tokens": 2 * 8 * 128})) == 0  # a step's batch at once
    for rank, run in enumerate(run_ranks(8, "train_gpt.py", *arguments(**eight))):
        assert run.returncode == 0, run.stderr
        assert ("step:4/4 val_loss" in run.stdout) == (rank == 0), "only rank 0 speaks"
    return folders


def test_eight_ranks_train_as_one_does_through_three_stages(both):
    one, eight = (log_of(both[ranks]) for ranks in (1, 8))
    assert eight.values("stage") == one.values("stage") and len(eight.values("stage")) == 3
    assert len(eight.steps) == len(one.steps) == 4 + 3, "losses of four steps, and validations after 0, 2 and 4"
    for a, b in zip(one.steps, eight.steps):
        assert (b.step, b.split) == (a.step, a.split)
        assert b.loss == pytest.approx(a.loss, abs=1.5e-4), "the log has four digits"


def test_eight_ranks_end_with_the_weights_of_one(both):
    one, eight = (checkpoints.read(both[ranks] / "model.pt") for ranks in (1, 8))
    assert eight["step"] == one["step"]
    for name, weight in one["weights"].items():
        assert torch.allclose(eight["weights"][name].double(), weight.double(), rtol=1e-6, atol=1e-8), name


def test_the_log_of_eight_ranks_is_written_once_and_is_whole(both):
    log = log_of(both[8])
    assert log.environment["world_size"] == 8 and log.calibration["all_gather_gb_per_s"] > 0
    assert not log.values("defect")
