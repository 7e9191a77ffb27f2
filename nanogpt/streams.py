"""Work that may run beside that of the main CUDA stream, on the same GPU:

    side.follow()
    with side.on():
        y = work(x)  # is begun here
    ...  # may run at the same time
    side.join()  # from here on y can be used

When Python drops y, which was made on the side stream, PyTorch may give its memory to later work of
the side stream, though the main stream may still read y. `follow` before that later work prevents
this. When Python drops x, its memory goes to later work of the main stream, though the side stream
may still read it. Where x may be dropped before `join`, call `keep(x)`. Without CUDA all work runs
in the order of the code.
"""
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor

from nanogpt.ranks import NoTransfer


def to_device(numbers: list, device: torch.device) -> Tensor:
    """These numbers as a tensor on the device. The CPU does not wait until the GPU has them."""
    there = torch.tensor(numbers, pin_memory=device.type == "cuda")  # which the GPU reads by itself
    return there.to(device, non_blocking=True)


def to_host(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """The numbers on the CPU, and the event after which they may be read: nothing waits for the
    copy. (PyTorch makes it in pinned memory, into which the GPU can write by itself.)"""
    copy = numbers.to("cpu", non_blocking=numbers.is_cuda)
    return copy, torch.cuda.current_stream().record_event() if numbers.is_cuda else None


def mark(device: torch.device):
    """All that was begun on the current stream so far. Its `wait` makes the stream that is current
    then wait for it."""
    return torch.cuda.current_stream().record_event() if device.type == "cuda" else NoTransfer()


@cache
def constant(device: torch.device, value: float | tuple[int, ...]) -> Tensor:
    """The number or numbers on the device, copied there once: a CUDA graph that was captured with
    them reads the same memory at every replay."""
    return torch.tensor(value, device=device)


class SideStream:
    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def on(self):
        # torch.cuda.stream(None) would do nothing, too, but start CUDA where there is a GPU.
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def follow(self) -> None:
        """What comes on the side stream waits for all that was begun on the main one."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """What comes on the main stream waits for all that was begun on the side stream."""
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)

    def keep(self, x: Tensor) -> None:
        """The memory of x, a tensor of the main stream, is given to no other tensor until the work
        that was begun on the side stream is done."""
        if self.stream:
            x.record_stream(self.stream)
