"""The large weights but those of tables, shared out over the ranks: each updates one slice of them.

A step sums the gradients over the ranks, of which each gets the part of its slice, and gives every
updated slice to all ranks. Both travel in the background:

    slices.start_sum("mlp", gradient)      # ... the GPU works on
    part = slices.finished_sum("mlp")      # waits
    transfer = slices.hand_out(bank, own)  # ... the GPU works on
    transfer.wait()                        # from here on the whole bank is new

`start_sum` and `hand_out` are collectives: every rank must call them, in the same order.
"""
import torch
import torch.distributed as dist
from torch import Tensor

from nanogpt.ranks import NoTransfer, all_gather, rank_and_world_size, reduce_scatter
from nanogpt.streams import mark


class Slices:
    def __init__(self):
        self.rank, self.world_size = rank_and_world_size()
        self.sums = {}  # name -> (this rank's part of a summed gradient, its transfer)

    def own(self, bank: Tensor) -> Tensor:
        """This rank's slice of a bank (rows, ...). A view: what is written to it is written to the
        bank."""
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
        """Begins to sum small gradients of one dtype, in one transfer, all of them for each
        rank."""
        if self.world_size == 1 or not gradients:
            self.sums |= {name: (x, NoTransfer()) for name, x in gradients.items()}
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
        """Begins to give the own slice of the bank to all ranks. Returns the transfer, which fills
        the bank."""
        if self.world_size == 1:
            return NoTransfer()
        return all_gather(bank, own, async_op=True)
