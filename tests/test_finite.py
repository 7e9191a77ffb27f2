"""What is said of a number that is not finite. Whole runs are in test_faults.py."""
import math

import pytest
import torch

from nanogpt import faults
from nanogpt.ranks import BadInput


@pytest.mark.parametrize("name, value", [("b.master", math.nan), ("b.mean", -math.inf)])
def test_the_sentence_names_the_step_and_the_first_tensor(name, value):
    tensors = {"a.master": torch.ones(3), "b.master": torch.ones(3), "b.mean": torch.ones(3), "n": torch.ones(1).int()}
    faults.check_save(8, tensors)
    with pytest.raises(BadInput, match="the validation loss is nan at step 8, all weights finite: an activation"):
        faults.refuse_loss("validation", math.nan, 8, tensors)
    tensors[name][1] = value
    part = f"on rank 0 the {'weights' if name == 'b.master' else 'mean'} of b not finite; lower the learning"
    with pytest.raises(BadInput, match=f"the training loss is inf at step 8, {part}"):
        faults.refuse_loss("training", math.inf, 8, tensors)
    with pytest.raises(BadInput, match=f"training went wrong before step 8, {part}"):
        faults.check_save(8, tensors)


def test_the_rank_of_a_bad_weight_is_named(monkeypatch):
    monkeypatch.setattr(faults, "all_ranks", lambda value: ["", "", value])
    bad = {"a.master": torch.tensor([math.inf]), "b.master": torch.tensor([math.nan])}
    assert faults.not_finite(bad) == ", on rank 2 the weights of a and 1 more not finite"
