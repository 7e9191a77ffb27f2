"""Rounding to formats of few bits, in float32. It gives the same numbers on any device."""
from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """The numbers of a floating-point format, but for its largest, to which callers clamp."""
    mantissa_bits: int
    smallest_exponent: int  # of normal numbers; below, numbers are equally far from each other


E4M3_GRID = Grid(3, -6)  # up to 448
E5M2_GRID = Grid(2, -14)  # up to 57344
BF16_GRID = Grid(7, -100)  # not -126: `round_to` cannot make the steps of its smallest numbers
E2M1_GRID = Grid(1, 0)  # 0, 1/2, 1, 3/2, 2, 3, 4, 6


def round_to(x: Tensor, grid: Grid, noise: Tensor | None = None) -> Tensor:
    """Rounds float32 x, which must be within the format's range, to the nearest number of the grid,
    and a tie to the even one. With `noise`, uniform in [0, 1) and of the shape of x, it rounds at
    random instead (stochastic rounding): to one of the two neighbours of x, and to the upper one
    with the probability that makes the mean x.

    Near x the numbers of a grid are multiples of a power of two, the step. It is made here from the
    bits of x, and so is its inverse, because compiled code rounds some divisions differently.
    """
    exponent = (x.view(torch.int32) >> 23) & 255  # float32 stores it with 127 added
    exponent = exponent.clamp(min=grid.smallest_exponent + 127)
    step = ((exponent - grid.mantissa_bits) << 23).view(torch.float32)
    inverse_step = ((254 - exponent + grid.mantissa_bits) << 23).view(torch.float32)
    steps = x * inverse_step
    if noise is None:
        return steps.round() * step
    below = steps.floor()
    return (below + (noise < steps - below)) * step


def inverse(x: Tensor) -> Tensor:
    """1 / x, divided in float64: compiled float32 quotients may differ in the last bit."""
    return x.double().reciprocal().float()
