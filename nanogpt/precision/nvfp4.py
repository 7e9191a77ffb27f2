"""NVFP4, numbers of four bits: --precision=nvfp4.

Why it works. The format e2m1 (2 bits of exponent, 1 of mantissa) has the numbers 0, 1/2, 1, 3/2, 2,
3, 4, 6 and their negatives. With so few numbers, one scale for a whole tensor would make most of
its values 0. So each 16 neighbours along the sum of a product form a block with a scale of its own:
hardware multiplies the sum over a block by the two blocks' scales. Three ideas more let gradients
survive:

- Square blocks. fprop and dgrad sum along different dimensions of w. Blocks of 1 x 16 would round w
  in two different ways, and the gradient would be that of another weight than the loss has seen. So
  weights share a scale in blocks of 16 x 16, which stay the same when they are transposed.
- Stochastic rounding. A gradient that is much smaller than its block's largest would always round
  to 0. So gradients are rounded up or down at random, such that they are right on average. (But the
  largest of a block is clamped where the block's scale was rounded down: up to 6 % smaller, and up
  to a third in blocks that are very small beside the tensor's amax.)
- A random Hadamard transform. Both operands of wgrad are multiplied by the same orthogonal 16 x 16
  matrix, block by block along the sum. It cancels in the product. But it spreads an outlier evenly
  over its block of 16 tokens, whose other values would otherwise round to 0. The matrix is
  Hadamard's with random signs, which were drawn once, so that no regular data fit it badly.

Numerics. An operand is made of a tensor in these steps, in float32:
    amax         = max |x| of the tensor
    multiplier   = 6 * 448 / amax, divided in float64
    block scale  = (max |x| of the block) * multiplier / 6, at most 448, rounded to e4m3
    number       = x * multiplier / block scale, clamped to +-6, rounded to e2m1
So blocks use the whole range of e2m1, and their scales that of e4m3. A block that is very small
beside the tensor's amax gets the scale 0 and vanishes. The three products:
    fprop  y  = x w^T    x in blocks of 1 x 16 along K, w in 16 x 16; both rounded to nearest even
    dgrad  dx = dy w     dy in blocks of 1 x 16 along N, stochastic; w in 16 x 16
    wgrad  dw = dy^T x   both in blocks of 1 x 16 along T, transformed before; dy stochastic
On normally distributed numbers the error is 20.4 dB below the signal (blocks of 16 x 16: 19.1).

Everything is emulated here, without a gain in speed: a number times its block's scale is exact in
bf16, and a product of two such values in float32. Only the order of summation differs from
hardware's.

Sources: NVIDIA 2025, "Pretraining large language models with NVFP4" (arXiv 2509.25149), and the
recipe NVFP4BlockScaling of TransformerEngine.
"""
import torch
from torch import Tensor

from nanogpt import kernels
from nanogpt.precision import Products
from nanogpt.precision.rounding import E2M1_GRID, E4M3_GRID, inverse, round_to

LARGEST = 6  # the largest number of e2m1
LARGEST_SCALE = 448  # the largest number of e4m3
LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def to_fp4(x: Tensor, square: bool = False, stochastic: bool = False) -> tuple[Tensor, Tensor]:
    """Rounds x (R, K) in blocks of 1 x 16, or of 16 x 16 if they are to be square. Sizes that are
    cut into blocks are multiples of 16. Returns numbers times their blocks' scales (R, K), which
    are exact in bf16, and the scale () of them all."""
    height = 16 if square else 1
    amax = x.abs().amax().float()
    blocks = x.float().unflatten(1, (-1, 16))
    blocks = blocks.unflatten(0, (-1, height))

    multiplier = (LARGEST * LARGEST_SCALE / amax.double()).float()
    multiplier = multiplier.clamp(max=LARGEST_FLOAT32)  # infinite if all is zero

    block_amaxes = blocks.abs().amax((1, 3), keepdim=True)
    scales = block_amaxes * (multiplier * (1 / LARGEST))
    scales = round_to(scales.clamp(max=LARGEST_SCALE), E4M3_GRID)

    block_multipliers = inverse(scales * inverse(multiplier))
    block_multipliers = block_multipliers.clamp(max=LARGEST_FLOAT32)  # infinite for blocks of zeros
    numbers = (blocks * block_multipliers).clamp(-LARGEST, LARGEST)
    noise = torch.rand_like(numbers) if stochastic else None
    values = round_to(numbers, E2M1_GRID, noise) * scales
    values = values.bfloat16().reshape(x.shape)
    return values, amax / (LARGEST * LARGEST_SCALE)


def hadamard(x: Tensor) -> Tensor:
    """x (R, C) -> the same shape in float32: each 16 numbers of a row times diag(signs) H / 4.

    H is Sylvester's Hadamard matrix: its entry (i, j) is -1 if the binary numbers i and j have an
    odd number of ones in common, else 1. H / 4 is orthogonal. The signs are the bits of 0xD7E8 from
    the lowest on, where a bit of 1 stands for -1. They are TransformerEngine's.
    """
    i = torch.arange(16, device=x.device)
    common_bits = (i[:, None] & i)[..., None] >> i[:4]  # (16, 16, 4), each in the lowest bit
    minus_signs = common_bits.sum(-1) + (0xD7E8 >> i)[:, None]  # the lowest bit says whether odd
    matrix = 0.25 - 0.5 * (minus_signs & 1)
    return (x.float().reshape(-1, 16) @ matrix).view(x.shape)


class NVFP4Linear(torch.autograd.Function):
    """x (T, K), w (N, K) -> x w^T (T, N), of x's dtype. All three products multiply e2m1 numbers.
    T, K and N are multiples of 16."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        x4, x_scale = to_fp4(x)
        w4, w_scale = to_fp4(w, square=True)
        return kernels.product(x4, w4, x_scale, w_scale, x.dtype)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        w4_t, w_scale = to_fp4(w.t(), square=True)  # the numbers of fprop
        g4, g_scale = to_fp4(g, stochastic=True)
        grad_x = kernels.product(g4, w4_t, g_scale, w_scale, g.dtype)  # (T, K)
        g4_t, g_scale = to_fp4(hadamard(g.t()), stochastic=True)
        x4_t, x_scale = to_fp4(hadamard(x.t()))
        grad_w = kernels.product(g4_t, x4_t, g_scale, x_scale, g.dtype)  # (N, K)
        return grad_x, grad_w


class NVFP4Products(Products):
    """The products of any weight. It is rounded without the factor, which multiplies the result."""

    def linear(self, x, w, factor=None):
        y = NVFP4Linear.apply(x, w)
        return y if factor is None else factor * y
