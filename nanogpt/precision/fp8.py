"""FP8 with one measured scale for each tensor ("tensorwise dynamic scaling"): --precision=fp8.

One scale for a tensor stays valid when the tensor is transposed. So x, w and dy are rounded once
and serve in two products each.

Numerics. These are the steps for a tensor, in order:
    amax        = max |x|, in float32, but at least 1e-12
    multiplier  = 448 / amax (57344 / amax for gradients), divided in float64, kept in float32
    x8          = x * multiplier, clamped to the format's range, rounded to nearest even
    scale       = 1 / multiplier, divided in float64, kept in float32
A product of x8 and w8 is multiplied by both scales. The clamp matters, because rounding to e5m2
gives infinity beyond its range. If amax is not finite, the scale is NaN: an infinite amax would
otherwise turn all other numbers of the tensor into zeros, without a word. On normally distributed
numbers the error of e4m3 is 31.5 dB below the signal, that of e5m2 25.6 dB.

What it keeps between steps. Weights change only once in a step, so `weights_changed` rounds them
then, however many passes the step has. Products read these bytes and scales at places that never
move, as CUDA graphs require.

--float8_all_gather. Every rank updates some rows of each bank and then hands them out to the
others. With this switch it rounds its rows first and hands out bytes: half the traffic of bf16.
Rows of one weight may belong to several ranks and must share its scale. So the ranks first exchange
the amaxes of all weights. What arrives is, to the bit, what rounding the whole float32 weights
gives. (Without the switch bf16 weights are rounded, so that about 2 % of the bytes differ.) The
wide weights are fetched before each validation, which uses them. The bank lm_head is still handed
out wide as well: it is also the embedding, which is looked up.

Sources: Micikevicius et al. 2022, "FP8 formats for deep learning"; Float8Linear of torchao and of
nanochat, whose numbers these are; torchao's precompute_float8_dynamic_scale_for_fsdp.
"""
import math
from collections.abc import Collection

import torch
from torch import Tensor

from nanogpt import kernels
from nanogpt.kernels import E4M3, E5M2
from nanogpt.precision import Products, StepHooks
from nanogpt.precision.rounding import E4M3_GRID, E5M2_GRID, inverse, round_to
from nanogpt.ranks import Slices, gathered

GRIDS = {E4M3: E4M3_GRID, E5M2: E5M2_GRID}


def multiplier_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """What brings each amax (...) to the end of an FP8 dtype's range; NaN if it is not finite."""
    finite = (torch.finfo(dtype).max / amax.double().clamp(min=1e-12)).float()
    return torch.where(amax.isfinite(), finite, math.nan)


def to_fp8(x: Tensor, multiplier: Tensor, dtype: torch.dtype, has_fp8: bool = True) -> Tensor:
    """x * multiplier, clamped to the dtype's range and rounded. Code that is compiled for a device
    without FP8 cannot hold such numbers: they come as bf16, which `kernels.product` takes, too."""
    limit = torch.finfo(dtype).max
    y = (x.float() * multiplier).clamp(-limit, limit)
    if has_fp8:
        return y.to(dtype)
    return round_to(y, GRIDS[dtype]).bfloat16()


def measure_and_round(x: Tensor, dtype: torch.dtype, has_fp8: bool) -> tuple[Tensor, Tensor]:
    """x rounded with a scale of its own, and that scale ()."""
    of_x = multiplier_of(x.abs().amax().float(), dtype)
    return to_fp8(x, of_x, dtype, has_fp8), inverse(of_x)


class FP8Linear(torch.autograd.Function):
    """x (T, K), w (N, K) -> x w^T (T, N), of x's dtype. All three products multiply FP8 numbers.
    The weight comes rounded, as w8 (N, K) with its scale (); w itself only gets the gradient."""

    @staticmethod
    def forward(ctx, x, w, w8, w_scale, has_fp8):
        x8, x_scale = measure_and_round(x, E4M3, has_fp8)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.has_fp8 = has_fp8
        return kernels.product(x8, w8, x_scale, w_scale, x.dtype)

    @staticmethod
    def backward(ctx, g):
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = measure_and_round(g, E5M2, ctx.has_fp8)  # (T, N)
        grad_x = kernels.product(g8, w8.t(), g_scale, w_scale, g.dtype)  # (T, K)
        grad_w = kernels.product(g8.t(), x8.t(), g_scale, x_scale, g.dtype)  # (N, K)
        return grad_x, grad_w, None, None, None


class FP8Products(Products):
    """The products of one weight. The factor multiplies the result, so that it need not be known
    when the weight is rounded, once a step."""

    def __init__(self, weight_bytes: Tensor, weight_scale: Tensor, has_fp8: bool):
        """weight_bytes: (N, K) uint8, the bytes of e4m3 numbers; weight_scale: ()"""
        self.weight_bytes = weight_bytes
        self.weight_scale = weight_scale
        self.has_fp8 = has_fp8

    def linear(self, x, w, factor=None):
        w8 = self.weight_bytes.view(E4M3)
        y = FP8Linear.apply(x, w, w8, self.weight_scale, self.has_fp8)
        return y if factor is None else factor * y

    def for_rows(self, rows):
        return FP8Products(self.weight_bytes[rows], self.weight_scale, self.has_fp8)


class FP8(StepHooks):
    """All matrices in FP8. There are no FP8 weights before `weights_changed` is called with the
    names of all banks. Each rank updates an equal part of their rows."""

    def __init__(self, banks: dict[str, Tensor], all_gather: bool):
        """banks: the model's weights by name"""
        self.all_gather = all_gather
        self.hands_out = ("mlp", "qkvo") if all_gather else ()
        self.slices = Slices()
        self.banks = {name: banks[name].detach() for name in ("lm_head", "mlp", "qkvo")}
        self.weight_bytes = {}  # in e4m3, as bytes: any device can copy and send those
        for name, bank in self.banks.items():
            self.weight_bytes[name] = torch.zeros_like(bank, dtype=torch.uint8)
        # The number of each row's scale. The head has one scale, each matrix of the MLPs has one,
        # and each attention has two: one for queries, keys and values, and one for the output.
        device = self.banks["mlp"].device
        of_head = torch.zeros(len(self.banks["lm_head"]), dtype=torch.int64, device=device)
        of_mlps = 1 + torch.arange(len(self.banks["mlp"]), device=device)
        row = torch.arange(len(self.banks["qkvo"]), device=device)
        is_output = row % 4 == 3
        of_attentions = 1 + len(of_mlps) + row // 4 * 2 + is_output
        self.scale_of_row = {"lm_head": of_head, "mlp": of_mlps, "qkvo": of_attentions}
        # The scale is a row's first number: compiled code wants it at a multiple of 16 bytes.
        self.scales = torch.full((int(of_attentions[-1]) + 1, 4), math.nan, device=device)

    def products_of(self, name: str, rows: slice, transposed: bool) -> FP8Products:
        """The products of a weight (N, K): these rows of a bank, which may have it as (K, N)."""
        weight_bytes = self.weight_bytes[name][rows].flatten(0, -2)
        if transposed:
            weight_bytes = weight_bytes.t()
        number = int(self.scale_of_row[name][rows][0])
        has_fp8 = kernels.has_fp8(weight_bytes.device)
        return FP8Products(weight_bytes, self.scales[number, 0], has_fp8)

    @torch.no_grad()
    def weights_changed(self, names: Collection[str], masters: dict[str, Tensor]) -> None:
        """Measures all weights, and rounds those of the named banks."""
        # 1. What is rounded: whole banks, or with --float8_all_gather this rank's float32 rows.
        weights = self.banks
        scale_of_row = self.scale_of_row
        if self.all_gather:
            weights = {name: masters[name] for name in self.banks}
            scale_of_row = {name: self.slices.own(rows) for name, rows in scale_of_row.items()}

        # 2. The scales, from the amaxes of all rows that share one.
        amaxes = torch.zeros_like(self.scales[:, 0])
        for name, weight in weights.items():
            row_amaxes = weight.abs().flatten(1).amax(1).float()
            # A maximum by scatter may lose a NaN, but not infinity, which says the same here.
            row_amaxes = row_amaxes.nan_to_num(math.inf, math.inf)
            amaxes.scatter_reduce_(0, scale_of_row[name], row_amaxes, "amax")
        if self.all_gather:
            amaxes = gathered(amaxes[None]).amax(0)
        multipliers = multiplier_of(amaxes, E4M3)
        self.scales.copy_(inverse(multipliers)[:, None].expand_as(self.scales))

        # 3. The bytes. Any device can round to FP8 here, outside of compiled code.
        for name, weight in weights.items():
            if name in names:
                of_rows = multipliers[scale_of_row[name]]
                rounded = to_fp8(weight.flatten(1), of_rows[:, None], E4M3)
                new_bytes = rounded.view(torch.uint8).view(weight.shape)
                if self.all_gather:
                    new_bytes = gathered(new_bytes)
                self.weight_bytes[name].copy_(new_bytes)

    @torch.no_grad()
    def before_validation(self) -> None:
        """Fetches the wide rows that --float8_all_gather has left with the ranks that own them."""
        for name in self.hands_out:
            self.banks[name].copy_(gathered(self.slices.own(self.banks[name])))
