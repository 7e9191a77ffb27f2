"""FP8 with constant scales: the recipe of the default run (record 19).

Where numbers lie is known beforehand for the inputs of most products: they come from normalised
vectors, so that |x| is at most sqrt(D), or are the squared results of a product of such inputs.
"""
import torch

from nanogpt import kernels
from nanogpt.kernels import E4M3, E5M2
from nanogpt.precision import Products

# Constant scales of a projection's input, of the weights, and of the gradient of a loss that is a
# sum over tokens. They are powers of two, so that only rounding loses something. Weights up to 7
# and gradients up to 14 fit; larger ones are clamped. 448 / 16 = 28 is just above sqrt(768): in the
# presets no normalised input can be larger, but with a model_dim above 784 it can. The squares
# between the MLP's two products were near 10 in an earlier model, but up to 12,700 on the first
# token of a document, and must not be clamped there.
INPUT_SCALES = {"qkv": 1 / 16, "up": 1 / 16, "down": 64.0}
WEIGHT_SCALE = 2.0**-6
GRADIENT_SCALE = 2.0**-12

# The head has those of record 55, but a wider one for weights: inputs up to 100, weights up to 6.4
# and gradients of its logits up to 0.75 become numbers up to 448, where e4m3 ends. (The gradients
# are in e5m2, in which up to 96 fit.)
HEAD_INPUT_SCALE = 100 / 448
HEAD_WEIGHT_SCALE = 6.4 / 448
HEAD_GRADIENT_SCALE = 0.75 / 448


class StaticLinear(torch.autograd.Function):
    """x (T, K), w (N, K) -> x w^T (T, N) in x's dtype, cut into `parts` pieces of equal width; all
    three products are in FP8. Backward rounds the gradients as one matrix, without a copy."""

    @staticmethod
    def forward(ctx, x, w, input_scale, parts):
        x8, x8_t = kernels.quantize(x, input_scale, E4M3)  # (T, K) and (K, T)
        w8, w8_t = kernels.quantize(w, WEIGHT_SCALE, E4M3)  # (N, K) and (K, N)
        ctx.save_for_backward(x8_t, w8_t)
        ctx.input_scale = input_scale
        y = kernels.static_product(x8, w8, input_scale * WEIGHT_SCALE, x.dtype)
        return y.chunk(parts, 1)

    @staticmethod
    def backward(ctx, *gradients):
        x8_t, w8_t = ctx.saved_tensors
        g8, g8_t = kernels.quantize_columns(gradients, GRADIENT_SCALE, E5M2)  # (T, N) and (N, T)
        dtype = gradients[0].dtype
        grad_x = kernels.static_product(g8, w8_t, GRADIENT_SCALE * WEIGHT_SCALE, dtype)
        grad_w = kernels.static_product(g8_t, x8_t, GRADIENT_SCALE * ctx.input_scale, dtype)
        return grad_x, grad_w, None, None


class StaticMLP(torch.autograd.Function):
    """x (T, D), up and down (D, F) -> relu(x up)^2 down^T (T, D), all products in FP8. The algebra
    of the hidden layer stands in nanogpt/kernels.py, section 4."""

    @staticmethod
    def forward(ctx, x, up, down):
        x8, x8_t = kernels.quantize(x, INPUT_SCALES["up"], E4M3)
        up8, up8_t = kernels.quantize(up, WEIGHT_SCALE, E4M3)
        down8, down8_t = kernels.quantize(down, WEIGHT_SCALE, E4M3)
        hidden8, hidden8_t = kernels.hidden_layer(
            x8, up8_t, INPUT_SCALES["up"] * WEIGHT_SCALE, INPUT_SCALES["down"])  # (T, F), (F, T)
        ctx.save_for_backward(x8_t, up8, down8_t, hidden8, hidden8_t)
        return kernels.static_product(hidden8, down8, INPUT_SCALES["down"] * WEIGHT_SCALE, x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x8_t, up8, down8_t, hidden8, hidden8_t = ctx.saved_tensors
        dtype = gradient.dtype
        g8, g8_t = kernels.quantize(gradient, GRADIENT_SCALE, E5M2)  # (T, D), (D, T)
        dz8, dz8_t = kernels.hidden_layer(  # of z = x up: (T, F), (F, T)
            g8, down8_t, GRADIENT_SCALE * WEIGHT_SCALE, INPUT_SCALES["down"], hidden8,
            GRADIENT_SCALE)
        grad_x = kernels.static_product(dz8, up8, GRADIENT_SCALE * WEIGHT_SCALE, dtype)
        grad_up = kernels.static_product(x8_t, dz8_t, INPUT_SCALES["up"] * GRADIENT_SCALE, dtype)
        grad_down = kernels.static_product(
            g8_t, hidden8_t, GRADIENT_SCALE * INPUT_SCALES["down"], dtype)
        return grad_x, grad_up, grad_down


class StaticFP8(Products):
    """The products of a projection. (Those of the head are in train_gpt.FP8HeadLoss.)"""

    def __init__(self, input_scale: float):
        self.input_scale = input_scale

    def linear(self, x, w, factor=None):
        w = w if factor is None else factor * w
        return StaticLinear.apply(x, w, self.input_scale, 1)[0]

    def three_linears(self, x, weights, factor):
        queries, keys, values = StaticLinear.apply(x, weights.flatten(0, 1), self.input_scale, 3)
        return queries, keys, factor * values

    def mlp(self, x, up, down, factor, activation, down_products):
        if not isinstance(down_products, StaticFP8):
            return super().mlp(x, up, down, factor, activation, down_products)
        return StaticMLP.apply(x, up, factor * down)  # the activation is relu(x)^2


STATIC = {name: StaticFP8(scale) for name, scale in INPUT_SCALES.items()}
STATIC["lm_head"] = StaticFP8(HEAD_INPUT_SCALE)  # only a mark: head_loss takes FP8HeadLoss

# A model learns to live with clamped weights. But validation clamps nothing and sees another model:
# a long run once went wrong that way without a word (records/long_runs.md).
LARGEST_CLAMPED_PART = 0.001


@torch.no_grad()
def check_weights(model, step: int, log) -> None:
    """Notes a defect in the log for each projection with constant scales of whose weights more than
    LARGEST_CLAMPED_PART are clamped. model: a train_gpt.GPT; log: a journal.Log"""
    mlp = model.weight("mlp").unflatten(0, (-1, 2))  # (L, 2, D, F)
    qkvo = model.weight("qkvo").unflatten(0, (-1, 4))  # (layers with attention, 4, H d, D)
    weights = {"qkv": qkvo[:, :3], "up": mlp[:, 0], "down": mlp[:, 1],
               "lm_head": model.weight("lm_head")}
    if model.config.scalars:
        down = model.amounts().of_layers[:, 3]  # (L,) the factors of `down`, the fourth of SCALARS
        weights["down"] = down[:, None, None] * weights["down"]
    for projection, weight in weights.items():
        if model.precision.recipe_names[projection] != "fp8-static":
            continue
        scale = HEAD_WEIGHT_SCALE if projection == "lm_head" else WEIGHT_SCALE
        limit = torch.finfo(E4M3).max * scale
        part = (weight.abs() > limit).float().mean().item()
        if part > LARGEST_CLAMPED_PART:
            log.fact("defect", dict(
                what=f"{100 * part:.2g} % of the weights of {projection} are too large for FP8 at "
                f"step {step} and are clamped; lower the learning rates, or raise their scale"))
