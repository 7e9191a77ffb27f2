"""The processes of a run: which one this is, how they agree, and how they share the weights.

torchrun starts one process for each GPU and numbers them: the rank of the first is 0, and it is the
one that writes the log. A process on its own is rank 0.
"""
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from data import BadInput, require
from nanogpt.gpu import NO_TRANSFER, mark

# A collective that takes longer is taken for hung, and ends the run. Before the first step
# --join_timeout says how long ranks wait, as one of them may compile.
LONGEST_STEP = timedelta(minutes=2)
LONGEST_WRITE = timedelta(minutes=30)  # of rank 0 to a slow disk


def start_process(kind: str, local_gpu: int, minutes: float) -> torch.device:
    """Starts PyTorch on this process's device, and returns it: the GPU of this number if `kind` is
    "cuda", or the "cpu". Under torchrun it also starts the process group, and waits for the other
    ranks for so many minutes. Raises BadInput if they do not come, or if there is no such GPU."""
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", local_gpu)
        require(local_gpu < torch.cuda.device_count(),
                f"process {local_gpu} of this host finds no GPU; start one process per GPU")
        torch.cuda.set_device(device)
        # Work on this stream goes before what is done beside it (nanogpt/tables.py).
        torch.cuda.set_stream(torch.cuda.Stream(priority=-1))
    # If NCCL started before the thread of autograd, both could wait for each other forever.
    torch.zeros(1, device=device, requires_grad=True).sum().backward()
    if "RANK" in os.environ:
        backend, options = ("nccl", {"device_id": device}) if kind == "cuda" else ("gloo", {})
        try:
            dist.init_process_group(backend, timeout=timedelta(minutes=minutes), **options)
        except (dist.DistError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise BadInput(f"the processes did not meet within {minutes:g} minutes ({reason}); "
                           "see what the others say, start all of them by torchrun, or raise "
                           "--join_timeout") from None
    return device


def limit_waiting(longest: timedelta = LONGEST_STEP) -> None:
    """From now on a collective that takes longer ends the run."""
    if dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(longest, dist.group.WORLD)


@contextmanager
def patiently() -> Iterator[None]:
    """Within it, or in a function that it decorates, the others wait longer than usual for rank 0,
    while it writes a file. A collective."""
    limit_waiting(LONGEST_WRITE)
    yield
    all_ranks(None)
    limit_waiting()


def rank_and_world_size() -> tuple[int, int]:
    """This process's number and how many there are: (0, 1) without a process group."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def is_rank_0() -> bool:
    return rank_and_world_size()[0] == 0


def all_ranks(value) -> list:
    """The value of every rank, on every rank. A collective: all ranks must call it together."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_all_ranks(work: Callable, *args):
    """Returns work(*args), computed on every rank. If it raises BadInput or OSError on some rank,
    every rank raises BadInput, so that none goes on and waits for the others. A collective."""
    result = None
    sentence = None
    try:
        result = work(*args)
    except (BadInput, OSError) as error:
        sentence = str(error)
    sentences = all_ranks(sentence)
    for rank, fault in enumerate(sentences):
        if fault is not None:
            raise BadInput(fault if len({*sentences}) == 1 else f"rank {rank}: {fault}")
    return result


def compare(facts: dict[str, object]) -> None:
    """Raises BadInput unless all ranks have the same facts. A collective."""
    first, *others = all_ranks(facts)
    for rank, theirs in enumerate(others, 1):
        for name in first | theirs:
            require(first.get(name) == theirs.get(name),
                    f"rank {rank} has {name} {theirs.get(name)} where rank 0 has {first.get(name)};"
                    " all ranks need the same command, code and data")


class Requests:
    """What one rank may ask of all of them: to end the run because of a signal, or to save it. They
    all do it between the same two steps.

    Nothing waits for this. What a rank wants travels in the message that the ranks sum at each step
    anyway, and all read the message of a step at the same point. Suppose that a rank asks before
    step 8. The message of step 8 says so. All read it while step 9 is being computed, and do it
    before step 10. A single process needs no message and does it at once."""

    def __init__(self, device: torch.device):
        self.alone = rank_and_world_size()[1] == 1
        self.nothing = torch.zeros(0 if self.alone else 2, device=device)
        self.wanted = [False, False]  # by this rank: to stop, to save
        self.granted = [False, False]

    def ask(self, stop: bool, save: bool) -> None:
        """What this rank wants from now on."""
        self.wanted = [stop, save]
        if self.alone:
            self.hear(self.wanted)

    def outgoing(self) -> Tensor:
        """What this step adds to the message: (2,), or (0,) if there are no other ranks."""
        if self.alone or not any(self.wanted):
            return self.nothing
        return torch.tensor(self.wanted, dtype=self.nothing.dtype, device=self.nothing.device)

    def hear(self, numbers: list[float]) -> None:
        """Reads the sum of what all ranks' `outgoing` have added. It stays granted until taken."""
        for i, number in enumerate(numbers):
            self.granted[i] |= number > 0

    def take(self) -> bool:
        """Whether all ranks stop before the next step, and not just save."""
        stop, _ = self.granted
        self.granted = [False, False]
        return stop


# torch 2.13 has new names for these two collectives, torch 2.11 only the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gathered(x: Tensor) -> Tensor:
    """x (n, ...) of all ranks, one after the other: (world_size * n, ...). A collective."""
    if not dist.is_initialized():
        return x
    of_all = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    all_gather(of_all, x, async_op=True).wait()  # with NCCL not the CPU waits, but its stream
    return of_all


class Slices:
    """Sums of gradients, and new weights for all ranks, of all banks but tables. Each rank updates
    one slice of a large bank, and all of a small one. So a step adds the gradients of all ranks up,
    gives each rank its slice of the sum, and gives every updated slice to all ranks. Both travel in
    the background:

        slices.start_sum("mlp", gradient)      # ... the GPU works on
        part = slices.finished_sum("mlp")      # waits
        transfer = slices.hand_out(bank, own)  # ... the GPU works on
        transfer.wait()                        # from here on the whole bank is new

    `start_sum`, `start_whole_sums` and `hand_out` are collectives: every rank must call them, in
    the same order."""

    def __init__(self):
        self.rank, self.world_size = rank_and_world_size()
        self.sums = {}  # name -> (this rank's part of a summed gradient, its transfer)

    def own(self, bank: Tensor) -> Tensor:
        """This rank's slice of a bank (rows, ...), as a view: to write to it writes to the bank."""
        if self.world_size == 1:
            return bank
        # from_dlpack makes a view with an offset of 0. Otherwise only rank 0, whose slice begins
        # the bank, would have this offset, and would need other compiled graphs than the others.
        return torch.from_dlpack(bank.chunk(self.world_size)[self.rank])

    def start_sum(self, name: str, gradient: Tensor) -> None:
        """Begins to sum a bank's gradient over the ranks."""
        if self.world_size == 1:
            self.sums[name] = gradient, mark(gradient.device)
        else:
            part = torch.empty_like(gradient.chunk(self.world_size)[0])
            self.sums[name] = part, reduce_scatter(part, gradient, async_op=True)

    def start_whole_sums(self, gradients: dict[str, Tensor]) -> None:
        """Begins to sum small gradients of one dtype, for every rank, in one transfer."""
        if self.world_size == 1 or not gradients:
            self.sums |= {name: (x, NO_TRANSFER) for name, x in gradients.items()}
            return
        total = torch.cat([x.flatten() for x in gradients.values()])
        transfer = dist.all_reduce(total, async_op=True)
        parts = total.split([x.numel() for x in gradients.values()])
        for (name, x), part in zip(gradients.items(), parts):
            self.sums[name] = part.view_as(x), transfer

    def all_sums(self) -> list[Tensor]:
        """All sums, after waiting for them; they stay to be finished."""
        for _, transfer in self.sums.values():
            transfer.wait()
        return [gradient for gradient, _ in self.sums.values()]

    def finished_sum(self, name: str) -> Tensor:
        """The sum of this name, after waiting for it."""
        gradient, transfer = self.sums.pop(name)
        transfer.wait()
        if gradient.is_cuda:  # made on another stream, which must not use its memory again too soon
            gradient.record_stream(torch.cuda.current_stream())
        return gradient

    def hand_out(self, bank: Tensor, own: Tensor):
        """Begins to give the own slice to all ranks. Returns the transfer, which fills the bank."""
        if self.world_size == 1:
            return NO_TRANSFER
        return all_gather(bank, own, async_op=True)
