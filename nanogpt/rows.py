"""The rows of big tables that a step looks up, and the gradients of these rows.

A batch looks up only some rows of the tables of value embeddings and of n-grams. Only those have a
gradient and are updated. Each rank owns some of the columns of every row, so that all ranks share
this work, whichever rows they are.

The work takes memory bandwidth, while the update of the matrices takes arithmetic. So it is done
on a CUDA stream beside the main one: 28.7 to 28.9 instead of 30.0 ms a step of 16,384 tokens on one
H200 (records/2026-11-21_ladder_beside_two_gpus).
"""
import torch
import torch.distributed as dist
from torch import Tensor

from nanogpt import kernels
from nanogpt.ranks import rank_and_world_size
from nanogpt.streams import SideStream
from records.journal import to_host


class LookedUpRows:
    """The rows of the tables that a step looks up, and their gradients.

    In each step these methods are called in this order: `find` before the forward passes, `add`
    after each of them, then by the optimizer `take_sums`, and `put` for each table. All is done on
    the side stream: `find` and `add` switch to it, the other two are to be called on it.

    A table exists twice. Its bank, in the dtype of the products, is whole on every rank: lookups
    read it. The master is its float32 original, of which a rank has `share` columns of every row;
    these it updates."""

    def __init__(self, device: torch.device):
        self.device = device
        self.side_stream = SideStream(device)
        _, self.world_size = rank_and_world_size()
        self.reset({})

    def reset(self, masters: dict[str, Tensor]) -> None:
        """Forgets all steps so far. masters: for each table this rank's columns, (rows, share)."""
        self.masters = masters
        # Of the step in hand, for each table:
        self.places = {}  # (rows,), of a used row its place among the used ones, from 1 on
        self.counts = None  # (tables,) on the CPU, how many rows are used
        self.counts_arrived = None  # the event after which it is there
        self.totals = {}  # (world_size, n, share), sums of gradients of the n used rows
        self.used = {}  # (n,), the used rows in ascending order

    def on_side_stream(self):
        return self.side_stream.on()

    def meet(self) -> None:
        """The main stream and the side stream wait for all that was begun on the other."""
        self.side_stream.join()
        self.side_stream.follow()

    @torch.no_grad()
    def find(self, batch: list[dict[str, Tensor]]) -> None:
        """Begins to find out which rows any rank looks up. `batch` has those of each micro-batch of
        this rank, (lookups,) for each table. The CPU must know how many there are, to make room for
        their sums, but only in the first `add`. Until then the GPU counts them beside the forward
        pass. A collective."""
        self.meet()
        with self.on_side_stream():
            sizes = [len(master) for master in self.masters.values()]
            is_used = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
            flags = dict(zip(self.masters, is_used.split(sizes)))
            for rows in batch:
                for name, index in rows.items():
                    flags[name].index_fill_(0, index, 1)
            if self.world_size > 1:  # this wait is one of the stream, not of the CPU
                dist.all_reduce(is_used, dist.ReduceOp.MAX, async_op=True).wait()
            # How many used rows there are up to each row. `make_totals` looks for 1, 2, 3, ... in
            # these counts, because nonzero() would make the CPU wait here.
            self.places = {name: flag.cumsum(0) for name, flag in flags.items()}
            counts = torch.stack([place[-1] for place in self.places.values()])
            self.counts, self.counts_arrived = to_host(counts)

    def make_totals(self) -> None:
        """Waits for the number of used rows, and makes room for the sums of their gradients."""
        if self.counts_arrived is not None:
            self.counts_arrived.synchronize()
        for name, n in zip(self.masters, self.counts.tolist()):
            share = self.masters[name].size(1)
            self.totals[name] = self.masters[name].new_zeros(self.world_size, n, share)
            numbers = torch.arange(1, n + 1, device=self.device)
            self.used[name] = torch.searchsorted(self.places[name], numbers)

    @torch.no_grad()
    def add(self, rows: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        """Adds the gradients (lookups, width) of the rows (lookups,) that a micro-batch looked
        up."""
        self.meet()
        with self.on_side_stream():
            if not self.totals:
                self.make_totals()
            for name in self.masters:
                kernels.sum_rows(self.totals[name], self.places[name], rows[name], gradients[name])
                self.side_stream.keep(gradients[name])  # `train_step` holds the rows until it meets

    def take_sums(self, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
        """The totals, (world_size, n, share) in the dtype they are sent in; they are forgotten
        here."""
        sums = {name: total.to(dtypes[name]) for name, total in self.totals.items()}
        self.totals = {}
        return sums

    def put(self, name: str, bank: Tensor, parts: Tensor) -> None:
        """Writes the updated rows, (world_size * n, share), into the bank."""
        kernels.put_rows(bank, self.used[name], parts.unflatten(0, (self.world_size, -1)))
