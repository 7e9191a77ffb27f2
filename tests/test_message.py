"""nanogpt/message.py: who hears of a number that is not finite, when, and what the sentence says of it.

What a step of each precision leaves behind is in test_precision.py; whole runs are in test_faults.py.
"""
import math

import pytest
import torch

from nanogpt import message
from nanogpt.ranks import BadInput
from records.journal import TrainingLoss

NAMES = {"a": torch.bfloat16, "b": torch.float32, "c": torch.bfloat16}
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]


def of_ranks(world_size, monkeypatch):
    """The messages of each rank."""
    made = []
    for rank in range(world_size):
        monkeypatch.setattr(message, "rank_and_world_size", lambda rank=rank: (rank, world_size))
        made.append(message.Messages({name: torch.ones(2, 3, dtype=dtype) for name, dtype in NAMES.items()}))
    return made


def sent(ranks, step, losses):
    """What all ranks hear of a step."""
    others = sum(rank.write(torch.tensor(loss)) for rank, loss in zip(ranks, losses)).tolist()
    return TrainingLoss(step, sum(losses), others)


@pytest.mark.parametrize("losses, bad, part", [
    ([1.0, math.nan, 1.0], {}, "the training loss is nan at step 5 on rank 1, all matrices finite: an activation"),
    ([math.nan] * 3, {2: "c"}, "the training loss is nan at step 5 on rank 2, the weights of c not finite; lower"),
    ([math.nan] * 3, {0: "cb", 1: "a"}, "at step 5 on rank 0, the weights of b not finite; lower"),
    ([1.0] * 3, {1: "a"}, "a number is not finite at step 5 on rank 1, the weights of a not finite"),
])
def test_the_sentence_names_the_rank_and_its_first_weight(losses, bad, part, monkeypatch):
    ranks = of_ranks(3, monkeypatch)
    for rank, names in bad.items():
        for name in names:
            ranks[rank].weights[name][1, 2] = math.inf
    heard = sent(ranks, 5, losses)
    for rank in ranks:
        with pytest.raises(BadInput, match=part):
            rank.read([heard], 5)


def test_a_rank_that_hears_early_waits_so_that_all_end_after_the_same_step(monkeypatch):
    ranks = of_ranks(2, monkeypatch)
    ranks[0].read([sent(ranks, 4, [1.0, 1.0]), sent(ranks, 5, [math.nan, 1.0])], 4)
    with pytest.raises(BadInput, match="at step 5 on rank 0"):
        ranks[0].read([], 5)


def test_a_request_of_one_rank_is_granted_once_by_all_after_the_same_step(monkeypatch):
    ranks = of_ranks(2, monkeypatch)
    ranks[1].ask("save")
    ranks[1].ask("save")
    heard = [sent(ranks, step, [1.0, 1.0]) for step in (8, 9)]
    ranks[0].read(heard[:1], 7)  # it has come early
    assert not any(rank.grant("save") for rank in ranks)
    ranks[0].read(heard[1:], 8)
    ranks[1].read(heard, 8)
    assert [[rank.grant(name) for rank in ranks] for name in ("stop", "save", "save")] == [
        [False, False], [True, True], [False, False]]


def test_a_single_process_grants_at_once(monkeypatch):
    (alone,) = of_ranks(1, monkeypatch)
    alone.ask("stop")
    assert [alone.grant("stop"), alone.grant("stop"), alone.grant("save")] == [True, False, False]


@pytest.mark.parametrize("name, value, part", [
    ("b.master", math.nan, "the weights of b not finite"), ("b.mean", -math.inf, "the mean of b not finite")])
def test_the_last_update_is_judged_by_validation_and_before_a_save(name, value, part):
    tensors = {"a.master": torch.ones(3), "n": torch.ones(1).int(), "b.master": torch.ones(3), "b.mean": torch.ones(3)}
    message.check_validation(8, 2.5, tensors)
    message.check_save(8, tensors)
    with pytest.raises(BadInput, match="the validation loss is nan at step 8 on all ranks, all weights finite"):
        message.check_validation(8, math.nan, tensors)
    tensors[name][1] = value
    with pytest.raises(BadInput, match=f"the validation loss is nan at step 8 on rank 0, {part}; lower the learning"):
        message.check_validation(8, math.nan, tensors)
    with pytest.raises(BadInput, match=f"training went wrong before step 8 on rank 0, {part}"):
        message.check_save(8, tensors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_tensor_that_is_not_finite_is_found(value, device):
    tensors = [torch.randn(300, 777, device=device).to(dtype) for dtype in NAMES.values()]
    assert message.first_fault(tensors).item() == 0
    for place in (2, 1, 0):
        tensors[place].view(-1)[70_000] = value
        assert message.first_fault(tensors).item() == place + 1
