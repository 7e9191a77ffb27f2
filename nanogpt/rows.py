"""The rows of big tables that a step looks up, and the gradients of these rows.

A batch looks up only some rows of the tables of value embeddings and of n-grams. Only those have a
gradient and are updated. Each rank owns some of the columns of every row, so that all ranks share
this work, whichever rows they are.

A rank looks up many rows several times, and the ranks mostly different ones. So each rank first
adds up the gradients of the rows that it has looked up itself. It cuts these sums by columns, and
sends each rank the columns which that rank owns. Then each rank adds up what it has received.

The work takes memory bandwidth, while the update of the matrices takes arithmetic. So it is done
on a CUDA stream beside the main one: 28.7 to 28.9 instead of 30.0 ms a step of 16,384 tokens on one
H200 (records/2026-11-21_ladder_beside_two_gpus).
"""
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nanogpt import kernels
from nanogpt.compiling import call_directly
from nanogpt.ranks import NoTransfer, gathered, rank_and_world_size
from nanogpt.streams import SideStream
from records.journal import to_host


class Places(NamedTuple):
    """Numbers the used rows of one table 1, 2, 3, ... in their order: if this rank has used rows 2
    and 5, own[2] is 1 and own[5] is 2. Entries of unused rows mean nothing. With several ranks,
    `counts` ends with one more part, of the rows that any of them has used."""
    counts: Tensor  # (parts * R,) int32, how many used rows up to this one, part after part
    own: Tensor  # (R,), the same of this rank alone; of a used row it is the row's number
    of_all: Tensor  # (R,), the same of all ranks together
    ends: Tensor  # the last count of each part: used rows of that rank and of all before it


def find_places(rank: int, *is_used: Tensor) -> list[Places]:
    """is_used (ranks, R) of each table, 1 for each row that a rank has used, else 0."""
    found = []
    for flags in is_used:
        if len(flags) > 1:
            flags = torch.cat((flags, flags.amax(0, keepdim=True)))
        # One long sum: many sums of a row each would take the GPU longer.
        counts = flags.flatten().cumsum(0, dtype=torch.int32).view(flags.shape)
        ends = counts[:, -1]
        begins = F.pad(ends[:-1], (1, 0))
        own, of_all = counts[rank] - begins[rank], counts[-1] - begins[-1]
        found.append(Places(counts.flatten(), own, of_all, ends))
    return found


class LookedUpRows:
    """The rows of the tables that a step looks up, and their gradients.

    In each step these methods are called in this order: `find` before the passes, `add` after each
    of them, then by the optimizer `take_totals`, and for each table `exchange`, `add_up` and `put`.
    All is done on the side stream: `find` and `add` switch to it, the others are to be called on
    it.

    The token embedding, which is the head, too, is looked up at the same rows as value_embeds.
    Their gradients are added up in the same way, and then `add_embedding` adds them to the head's.

    A table exists twice. Its bank, in the dtype of the products, is whole on every rank: lookups
    read it. The master is its float32 original, of which a rank has `share` columns of every row;
    these it updates."""

    def __init__(self, device: torch.device, masters: dict[str, Tensor], dtype: torch.dtype):
        """masters: for each table this rank's columns, (rows, share); dtype: that of the banks, in
        which gradients are sent, too"""
        self.side_stream = SideStream(device)
        self.dtype = dtype
        self.rank, self.world_size = rank_and_world_size()
        self.masters = masters
        self.call = call_directly  # `train` may put CudaGraphs here
        # Of the step in hand, for each table ("own" are the rows that this rank has looked up):
        self.places = {}
        self.ends = None  # (tables, parts) on the CPU, those of the places
        self.ends_arrived = None  # the event after which they are there
        # Sums of gradients of the own rows: (ranks, own rows, share), and with the name lm_head
        # (1, own rows, width) of the token embedding.
        self.totals = {}
        self.own_tokens = None  # (own rows,) of value_embeds, which are tokens
        self.used = {}  # (n,), the rows that any rank has used, in ascending order
        # If there are several ranks:
        self.rows_of_rank = {}  # how many rows each rank has used
        self.used_by_ranks = {}  # (lines,), which ones, one rank after the other
        self.sums = {}  # (1, n, share), sums over the ranks

    def meet(self) -> None:
        """The main stream and the side stream wait for all that was begun on the other."""
        self.side_stream.join()
        self.side_stream.follow()

    @torch.no_grad()
    def find(self, batch: list[dict[str, Tensor]]) -> None:
        """Begins to find out which rows each rank looks up. `batch` has those of each micro-batch
        of this rank, (lookups,) for each table, as many on every rank. The CPU must know how many
        different ones there are, to make room for their sums, but only in the first `add`. Until
        then the GPU counts them beside the forward pass. A collective."""
        self.meet()
        self.totals = {}
        with self.side_stream.on():
            own = [torch.cat([rows[name] for rows in batch]) for name in self.masters]
            of_ranks = gathered(torch.cat(own)).view(self.world_size, -1)
            of_tables = of_ranks.split([len(rows) for rows in own], 1)
            is_used = []
            for master, rows in zip(self.masters.values(), of_tables):
                flags = rows.new_zeros(self.world_size, len(master), dtype=torch.uint8)
                is_used.append(flags.scatter_(1, rows, 1))
            found = self.call("places", partial(find_places, self.rank), tuple(is_used))
            self.places = dict(zip(self.masters, found))
            self.ends, self.ends_arrived = to_host(
                torch.stack([places.ends for places in found]))

    def make_totals(self) -> None:
        """Waits for the numbers of used rows, and makes room for the sums of their gradients."""
        if self.ends_arrived is not None:
            self.ends_arrived.synchronize()
        with self.side_stream.on():
            for (name, master), ends in zip(self.masters.items(), self.ends.tolist()):
                counts = [end - begin for begin, end in zip([0, *ends], ends)]
                # The k-th used row is where the count becomes k. With nonzero() the CPU would have
                # to wait until the GPU knows how many there are.
                numbers = torch.arange(1, ends[-1] + 1, dtype=torch.int32, device=master.device)
                used = torch.searchsorted(self.places[name].counts, numbers) % len(master)
                of_ranks = used.split(counts)
                if name == "value_embeds":
                    self.own_tokens = of_ranks[self.rank]
                # A copy, because Triton would compile its kernels once more for a tensor that does
                # not begin at a multiple of 16 bytes.
                self.used[name] = of_ranks[-1].clone()
                share = master.size(1)
                self.totals[name] = master.new_zeros(self.world_size, counts[self.rank], share)
                if self.world_size > 1:
                    self.rows_of_rank[name] = counts[:-1]
                    self.used_by_ranks[name] = used[: ends[-2]]
                    self.sums[name] = master.new_zeros(1, counts[-1], share)

    @torch.no_grad()
    def add(self, rows: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        """Adds the gradients (lookups, width) of the rows (lookups,) that a micro-batch looked up,
        for each table, and under the name lm_head for the token embedding."""
        if not self.totals:
            self.make_totals()  # beside the pass: it needs none of its gradients
        self.meet()
        with self.side_stream.on():
            for name, gradient in gradients.items():
                if name not in self.totals:  # of the token embedding
                    shape = 1, len(self.own_tokens), gradient.size(1)
                    self.totals[name] = self.totals["value_embeds"].new_zeros(shape)
                table = name if name in self.masters else "value_embeds"
                kernels.sum_rows(
                    self.totals[name], self.places[table].own, rows[table], gradient)
                self.side_stream.keep(gradient)  # `train_step` holds the rows until it meets

    def add_embedding(self, gradient: Tensor) -> None:
        """Adds the total of the token embedding to the gradient (V, width) of the head, and forgets
        it."""
        total = self.totals.pop("lm_head", None)
        if total is not None:
            gradient.index_add_(0, self.own_tokens, total[0].to(gradient.dtype))

    def take_totals(self) -> dict[str, Tensor]:
        """The totals (ranks, own rows, share), in the dtype they are sent in if there are other
        ranks; they are forgotten here."""
        totals = {name: self.totals.pop(name) for name in self.masters if name in self.totals}
        if self.world_size == 1:
            return totals
        return {name: total.to(self.dtype) for name, total in totals.items()}

    def exchange(self, name: str, total: Tensor) -> tuple:
        """Begins to send each rank its part of the total (ranks, own rows, share). Returns what
        comes from all ranks, one after the other, (lines, share), and the transfer. A
        collective."""
        if self.world_size == 1:
            return total[0], NoTransfer()
        lines = self.rows_of_rank[name]
        arrived = total.new_empty(sum(lines), total.size(2))
        own = [lines[self.rank]] * self.world_size
        return arrived, dist.all_to_all_single(
            arrived, total.flatten(0, 1), lines, own, async_op=True)

    def add_up(self, name: str, arrived: Tensor) -> Tensor:
        """What has come from all ranks (lines, share) -> its sum for each used row (n, share)."""
        if self.world_size == 1:
            return arrived
        sums = self.sums.pop(name)
        kernels.sum_rows(sums, self.places[name].of_all, self.used_by_ranks[name], arrived)
        return sums[0]

    def put(self, name: str, bank: Tensor, parts: Tensor) -> None:
        """Writes the updated rows, (world_size * n, share), into the bank."""
        kernels.put_rows(bank, self.used[name], parts.unflatten(0, (self.world_size, -1)))
