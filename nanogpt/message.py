"""What the ranks tell each other at each step, in one vector of numbers that they sum.

Nothing waits for this sum: it is read one step later, when it has come to the CPU. So all that the
ranks must agree on travels in it:

    loss        the mean loss of the step
    requests    for each of REQUESTS, how many ranks ask for it
    faults      for each rank a number that says what it has found not to be finite, 0 if nothing

A loss that is infinite or NaN spoils every weight in the very step it belongs to. When the CPU
hears of it, it is too late to ask where it began. So each rank looks at its part of the weights
before the update, while the gradients are on their way, and sends which one was the first that is
not finite. The tables of embeddings are left out: a step reads a few rows of them, and to read
gigabytes would cost each step a millisecond or more.
"""
import math

import torch
from torch import Tensor

from nanogpt.ranks import BadInput, all_ranks, rank_and_world_size, require

REQUESTS = ("stop", "save")  # to end the run because of a signal, and to save it
REMEDY = "lower the learning rates"


class Messages:
    """Writes this rank's part of the message of each step, and reads the sums.

    Requests are granted between the same two steps on all ranks, because all read the message of a
    step at the same point. Suppose that a rank asks before step 8. The request travels with the
    message of step 8, all have read it when step 9 is over, and grant it before step 10. A single
    process grants at once.
    """

    def __init__(self, weights: dict[str, Tensor]):
        """weights: this rank's part of each parameter, as it is updated in place, without the
        tables"""
        self.weights = weights
        self.rank, self.world_size = rank_and_world_size()
        device = next(iter(weights.values())).device
        self.no_requests = torch.zeros(len(REQUESTS), device=device)
        self.is_own_rank = torch.arange(self.world_size, device=device) == self.rank
        self.asked = set()  # by this rank, and not granted yet
        self.unsent = set()
        self.heard = set()
        self.unread = []  # messages that other ranks may not have got yet

    def ask(self, request: str) -> None:
        if request in self.asked:
            return
        self.asked.add(request)
        if self.world_size == 1:
            self.heard.add(request)
        else:
            self.unsent.add(request)

    def grant(self, request: str) -> bool:
        """Whether all ranks do it now. A request is granted once."""
        if request not in self.heard:
            return False
        self.heard.discard(request)
        self.asked.discard(request)
        return True

    @torch.no_grad()
    def write(self, loss: Tensor) -> Tensor:
        """What follows the mean loss in the message, (requests + ranks,). `loss` () is this rank's
        own. It is to be called before the update."""
        requests = self.no_requests
        if self.unsent:
            numbers = [float(request in self.unsent) for request in REQUESTS]
            requests = torch.tensor(numbers, device=loss.device)
            self.unsent.clear()
        fault = first_fault([*self.weights.values(), loss])
        return torch.cat([requests, torch.where(self.is_own_rank, fault, 0).float()])

    def read(self, messages: list, step: int) -> None:
        """Takes messages that have arrived (records/journal.py, TrainingLoss), and reads those of
        the first `step` steps. A later one may have come to some ranks only. Raises BadInput if a
        number is not finite."""
        self.unread += messages
        while self.unread and self.unread[0].step <= step:
            message = self.unread.pop(0)
            requests = message.others[: len(REQUESTS)]
            faults = message.others[len(REQUESTS) :]
            self.heard |= {name for name, number in zip(REQUESTS, requests) if number}
            if any(faults) or not math.isfinite(message.loss):
                raise BadInput(self.sentence(message.step, message.loss, faults))

    def sentence(self, step: int, loss: float, faults: list[float]) -> str:
        """What was not finite, and on which rank: the first that has named a weight, or else the
        first whose own loss was it."""
        what = f"the training loss is {loss}"
        if math.isfinite(loss):
            what = "a number is not finite"
        labels = [label(name) for name in self.weights]
        for rank, fault in enumerate(faults):
            if 0 < fault <= len(labels):
                where = f"rank {rank}, {labels[int(fault) - 1]} not finite"
                return f"{what} at step {step} on {where}; {REMEDY}"
        rank = next((rank for rank, fault in enumerate(faults) if fault), 0)
        return (f"{what} at step {step} on rank {rank}, all matrices finite: an activation "
                f"overflowed, or a row of a table; {REMEDY}, or give --precision=bf16 if it is one "
                "of narrower numbers")


def first_fault(tensors: list[Tensor]) -> Tensor:
    """() the place of the first of these tensors that has a number which is not finite, from 1 on;
    0 if there is none. They are of floating-point numbers. Nothing waits for the device."""
    if tensors[0].is_cuda:  # one kernel for all of a dtype
        largest = [None] * len(tensors)
        for dtype in {x.dtype for x in tensors}:
            places = [i for i, x in enumerate(tensors) if x.dtype == dtype]
            norms = torch._foreach_norm([tensors[i] for i in places], math.inf)
            for i, norm in zip(places, norms):
                largest[i] = norm.float()
    else:
        largest = [x.abs().amax().float() for x in tensors]
    bad = ~torch.stack(largest).isfinite()
    return torch.where(bad.any(), 1 + bad.int().argmax(), 0)


def where_not_finite(tensors: dict[str, Tensor]) -> str:
    """Ends a sentence with the first rank that has a number which is not finite, and with the first
    of its tensors that has one; empty if there is none. They are those of a save
    (nanogpt/checkpoints.py), by names such as "mlp.master". This waits for the device. A
    collective."""
    floats = {name: x for name, x in tensors.items() if x.is_floating_point()}
    place = first_fault([*floats.values()]).item()
    named = label([*floats][place - 1]) if place else ""
    for rank, bad in enumerate(all_ranks(named)):
        if bad:
            return f" on rank {rank}, {bad} not finite"
    return ""


def check_validation(step: int, loss: float, tensors: dict[str, Tensor]) -> None:
    """Raises BadInput if the loss of a validation is not finite, which all ranks know alike."""
    if not math.isfinite(loss):
        all_finite = " on all ranks, all weights finite: an activation overflowed"
        where = where_not_finite(tensors) or all_finite
        raise BadInput(f"the validation loss is {loss} at step {step}{where}; {REMEDY}")


def check_save(step: int, tensors: dict[str, Tensor]) -> None:
    """Raises BadInput if a save of these tensors would be of no use. A collective."""
    where = where_not_finite(tensors)
    require(not where, f"training went wrong before step {step}{where}; {REMEDY}")


def label(name: str) -> str:
    """What a sentence calls a tensor: "mlp.momentum_buffer" is the momentum_buffer of mlp."""
    name, _, kind = name.partition(".")
    return f"the weights of {name}" if kind in ("", "master") else f"the {kind} of {name}"
