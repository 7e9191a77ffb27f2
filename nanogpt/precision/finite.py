"""When a number of a run is not finite: where that began, for the sentence that ends the run.

A loss that is infinite or NaN spoils every weight in the very step it belongs to, and the CPU hears
of it a step later. Then it is too late to ask where it began. So each rank sends with each step its
own loss, and for its part of each weight before the update one number, which is finite only if all
of that part is. They travel in the vector that the ranks sum anyway (nanogpt/ranks.py, `Requests`).
A sum is not finite if one of its numbers is not. They are computed while the gradients are on their
way, so nothing waits for them. The tables of embeddings are left out: of them a step reads a few
rows, and to read gigabytes would cost each step a millisecond or more.
"""
import math

import torch
from torch import Tensor

from nanogpt.precision.recipe import Measurements
from nanogpt.ranks import BadInput, all_ranks, rank_and_world_size, require
from records.journal import TrainingLoss

REMEDY = "lower the learning rates"


class Check:
    """Finds the first step whose numbers are not finite.

    numbers     what each step adds to the vector
    refuse      ends the run if a vector that has arrived has a number that is not finite
    """

    def __init__(self, weights: dict[str, Tensor], measurements: Measurements):
        """weights: this rank's part of each parameter, as it is updated in place, without the
        tables; measurements: what the recipes of low precision have seen"""
        self.weights = weights
        self.measurements = measurements
        self.rank, self.world_size = rank_and_world_size()
        device = next(iter(weights.values())).device
        self.is_own_rank = torch.arange(self.world_size, device=device) == self.rank
        self.waiting = []  # losses that other ranks may not have heard yet
        self.groups = {}  # dtype -> name -> weight
        for name, weight in weights.items():
            self.groups.setdefault(weight.dtype, {})[name] = weight

    @torch.no_grad()
    def numbers(self, loss: Tensor) -> Tensor:
        """(weights + ranks,): for each weight a number that is finite if all of its numbers are,
        and at this rank's place its own loss (). It is to be called before the update."""
        of_weights = []
        for dtype, group in self.groups.items():
            wide = torch.promote_types(dtype, torch.float32)
            if loss.is_cuda:
                of_weights += torch._foreach_norm(  # one kernel for all
                    [*group.values()], math.inf, dtype=wide)
            else:
                of_weights += [weight.sum(dtype=wide) for weight in group.values()]
        of_ranks = torch.where(self.is_own_rank, loss.float(), 0.0)
        return torch.cat([torch.stack(of_weights), of_ranks])

    def refuse(self, losses: list[TrainingLoss], step: int) -> None:
        """Raises BadInput if one of the losses up to this step, or what was measured with it, is
        not finite. A loss of a later step may have come to some ranks only. It is kept for the
        next call, so that all ranks end after the same step."""
        self.waiting += losses
        while self.waiting and (self.waiting[0].step <= step or self.world_size == 1):
            loss = self.waiting.pop(0)
            begins = len(loss.others) - len(self.weights) - self.world_size
            faults, numbers = loss.others[:begins], loss.others[begins:]
            if any(faults) or not all(map(math.isfinite, [loss.loss, *numbers])):
                raise BadInput(self.sentence(loss, faults, numbers))

    def sentence(self, loss: TrainingLoss, faults: list[float], numbers: list[float]) -> str:
        """What was not finite, and on which rank. `faults` are those of the measurements, and
        `numbers` are what all ranks have told."""
        names = [name for group in self.groups.values() for name in group]
        of_weights = zip(names, numbers)
        bad = {name for name, number in of_weights if not math.isfinite(number)}
        of_ranks = enumerate(numbers[len(names) :])
        bad_ranks = [rank for rank, number in of_ranks if not math.isfinite(number)]
        where = self.measurements.culprit(faults)
        remedy = REMEDY
        if bad and not where.startswith(", weight of"):  # which is more exact
            where = f", {listed([label(name) for name in self.weights if name in bad])}"
        elif not where:
            where = ", all matrices finite: an activation overflowed, or a row of a table"
            remedy += ", or give --precision=bf16 if it is one of narrower numbers"
        ranks = name_ranks(bad_ranks, self.world_size)
        what = f"the training loss is {loss.loss}"
        if math.isfinite(loss.loss):
            what = "a number is not finite"
        return f"{what} at step {loss.step} on {ranks}{where}; {remedy}"


def first_not_finite(tensors: dict[str, Tensor]) -> str:
    """Ends a sentence with the first rank that has a number which is not finite, and with the first
    of its tensors that has one; empty if there is none. They are those of a save
    (nanogpt/saving.py), by names such as "mlp.master". This waits for the device. A collective."""
    bad = [label(name) for name, tensor in tensors.items() if not tensor.isfinite().all()]
    for rank, sentence in enumerate(all_ranks(listed(bad) if bad else "")):
        if sentence:
            return f" on rank {rank}, {sentence}"
    return ""


def check_validation(step: int, loss: float, tensors: dict[str, Tensor]) -> None:
    """Raises BadInput if the loss of a validation is not finite, which all ranks know alike."""
    if not math.isfinite(loss):
        all_finite = " on all ranks, all weights finite: an activation overflowed"
        where = first_not_finite(tensors) or all_finite
        raise BadInput(f"the validation loss is {loss} at step {step}{where}; {REMEDY}")


def check_save(step: int, tensors: dict[str, Tensor]) -> None:
    """Raises BadInput if a save of these tensors would be of no use. A collective."""
    where = first_not_finite(tensors)
    require(not where, f"training went wrong before step {step}{where}; {REMEDY}")


def label(name: str) -> str:
    """What a sentence calls a tensor: "mlp.momentum_buffer" is the momentum_buffer of mlp."""
    name, _, kind = name.partition(".")
    return f"the weights of {name}" if kind in ("", "master") else f"the {kind} of {name}"


def listed(bad: list[str]) -> str:
    """The first of the things that are not finite, and how many more there are."""
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"{bad[0]}{more} not finite"


def name_ranks(ranks: list[int], world_size: int) -> str:
    """"rank 0" if there is no other, "rank 3 alone", "ranks 1, 2", or "all 8 ranks"."""
    if world_size == 1:
        return "rank 0"
    if len(ranks) in (0, world_size):  # none: no rank's own loss is bad
        return f"all {world_size} ranks"
    return f"rank {ranks[0]} alone" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
