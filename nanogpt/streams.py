"""A second CUDA stream: work on it runs beside that of the main one, on the same GPU."""
from contextlib import nullcontext

import torch
from torch import Tensor


class SideStream:
    """    side.follow()
        with side.on():
            ...  # is begun here, but may run beside what the main stream does next
        ...
        side.join()  # what comes now can use the results

    Without a GPU everything runs at once."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None

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

    def meet(self) -> None:
        """Both wait for each other."""
        self.join()
        self.follow()

    def keep(self, x: Tensor) -> None:
        """The memory of x, a tensor of the main stream, is not used for another one until the work
        that has been begun on this stream is done."""
        if self.stream:
            x.record_stream(self.stream)
