"""nanogpt/precision/finite.py: who hears of a number that is not finite, when, and what the sentence says of it.

What a step of each precision leaves behind is in test_precision.py; whole runs are in test_faults.py.
"""
import math

import pytest
import torch

from nanogpt.precision import finite
from nanogpt.precision.recipe import Measurements
from nanogpt.ranks import BadInput
from records.journal import TrainingLoss

NAMES = {"a": torch.bfloat16, "b": torch.float32, "c": torch.bfloat16}


def checks(world_size, monkeypatch):
    """A check of each rank, and the part of the weights that it owns."""
    made = []
    for rank in range(world_size):
        monkeypatch.setattr(finite, "rank_and_world_size", lambda rank=rank: (rank, world_size))
        weights = {name: torch.ones(2, 3, dtype=dtype) for name, dtype in NAMES.items()}
        made.append((finite.Check(weights, Measurements([], torch.device("cpu"))), weights))
    return made


def vector(made, losses):
    """What all ranks hear of a step, as TrainingLoss.others."""
    return sum(check.numbers(torch.tensor(loss)) for (check, _), loss in zip(made, losses)).tolist()


@pytest.mark.parametrize("losses, bad, part", [
    ([1.0, math.nan, 1.0], {}, "on rank 1 alone, all matrices finite: an activation overflowed"),
    ([math.inf, math.nan, 1.0], {}, "on ranks 0, 1, all matrices finite"),
    ([math.nan] * 3, {2: ["c"]}, "on all 3 ranks, the weights of c not finite; lower"),
    ([math.nan] * 3, {0: ["c", "b"], 1: ["b"]}, "on all 3 ranks, the weights of b and 1 more not finite; lower"),
    ([1.0] * 3, {1: ["a"]}, "the weights of a not finite"),
])
def test_the_sentence_names_the_ranks_and_the_first_weights(losses, bad, part, monkeypatch):
    made = checks(3, monkeypatch)
    for rank, names in bad.items():
        for name in names:
            made[rank][1][name][1, 2] = math.inf
    heard = TrainingLoss(5, sum(losses), vector(made, losses))
    for check, _ in made:
        with pytest.raises(BadInput, match=part):
            check.refuse([heard], 5)


def test_a_rank_that_hears_early_waits_so_that_all_end_after_the_same_step(monkeypatch):
    (check, _), _ = made = checks(2, monkeypatch)
    good, bad = (TrainingLoss(step, loss, vector(made, [loss, loss])) for step, loss in ((4, 1.0), (5, math.nan)))
    check.refuse([good, bad], 4)
    with pytest.raises(BadInput, match="at step 5"):
        check.refuse([], 5)


def test_a_single_process_hears_at_once(monkeypatch):
    ((check, _),) = made = checks(1, monkeypatch)
    with pytest.raises(BadInput, match="the training loss is nan at step 5 on rank 0, all"):
        check.refuse([TrainingLoss(5, math.nan, vector(made, [math.nan]))], 4)


@pytest.mark.parametrize("name, value, part", [
    ("b.master", math.nan, "the weights of b not finite"), ("b.mean", -math.inf, "the mean of b not finite")])
def test_the_last_update_is_judged_by_validation_and_before_a_save(name, value, part):
    tensors = {"a.master": torch.ones(3), "b.master": torch.ones(3), "b.mean": torch.ones(3), "n": torch.ones(1).int()}
    finite.check_validation(8, 2.5, tensors)
    finite.check_save(8, tensors)
    with pytest.raises(BadInput, match="the validation loss is nan at step 8 on all ranks, all weights finite"):
        finite.check_validation(8, math.nan, tensors)
    tensors[name][1] = value
    with pytest.raises(BadInput, match=f"the validation loss is nan at step 8 on rank 0, {part}; lower the learning"):
        finite.check_validation(8, math.nan, tensors)
    with pytest.raises(BadInput, match=f"training went wrong before step 8 on rank 0, {part}"):
        finite.check_save(8, tensors)


def test_the_rank_of_a_bad_weight_is_named(monkeypatch):
    monkeypatch.setattr(finite, "all_ranks", lambda value: ["", "", value])
    assert finite.first_not_finite({"a": torch.tensor([math.inf])}) == " on rank 2, the weights of a not finite"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gpu_finds_the_same(value):
    weights = {name: torch.randn(300, 777, device="cuda").to(dtype) for name, dtype in NAMES.items()}
    check = finite.Check(weights, Measurements([], torch.device("cuda")))
    loss = torch.ones((), device="cuda")
    assert check.numbers(loss).isfinite().tolist() == [True] * 4
    for place, name in enumerate(["a", "c", "b"]):  # bfloat16 stands first
        weights[name].view(-1)[70_000] = value
        assert check.numbers(loss).isfinite().tolist() == [i > place for i in range(3)] + [True]
    assert not check.numbers(loss * value).isfinite().any()
