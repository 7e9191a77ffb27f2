"""What a recipe can do, and which projection has which recipe.

A recipe may multiply in its own way (`Products`). Two of them, fp8 and fp16, also keep something
between steps and act at fixed points of a step (`Recipe`).
"""
from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from nanogpt import kernels
from nanogpt.ranks import require

PLAIN_DTYPES = {  # of recipes that compute in the dtype of the tensors
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
PROJECTIONS = ("qkv", "o", "up", "down", "lm_head")


class Products:
    """The products of a projection, here in the dtype of its operands. Other recipes override some
    of the methods. These objects are arguments of compiled functions.

    `factor` is a learned number that multiplies the projection. Here it multiplies the weight,
    which has fewer elements than the result."""

    def linear(self, x: Tensor, w: Tensor, factor: Tensor | None = None) -> Tensor:
        """x (T, K), w (N, K) -> factor x w^T (T, N)."""
        return F.linear(x, w if factor is None else factor * w)

    def three_linears(self, x: Tensor, weights: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
        """x (T, D), weights (3, H d, D) -> queries, keys and factor times values, (T, H d) each.

        The factor multiplies the values and not their weights: it grows with the number of steps,
        beyond 12 in a run of 2,180, and such weights would no longer fit constant FP8 scales."""
        stacked = self.linear(x, weights.flatten(0, 1))  # (T, 3 H d)
        queries, keys, values = stacked.view(len(x), 3, -1).unbind(1)
        return queries, keys, factor * values

    def mlp(self, x: Tensor, up: Tensor, down: Tensor, factor: Tensor, activation: Callable,
            down_products: "Products") -> Tensor:
        """x (T, D), up and down (D, F) -> factor activation(x up) down^T (T, D). This is called on
        the products of `up`. Those of `down` are given: they may have another recipe."""
        hidden = activation(self.linear(x, up.t()))  # (T, F)
        return down_products.linear(hidden, down, factor)

    def for_rows(self, rows: Tensor) -> "Products":
        """These products for some rows (n,) of w, as the output head needs them, whose loss is
        computed over a part of the vocabulary."""
        return self


PLAIN = Products()


class Recipe:
    """The points of a step at which a recipe may act. Here nothing happens at any of them."""
    # Banks whose new weights `weights_changed` gives to all ranks, so that the optimizer must not.
    hands_out: tuple[str, ...] = ()

    def reset(self) -> None:
        """Forgets what training has changed, as the trainer does after its warm-up."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss () whose gradients are to be computed."""
        return loss

    def gradients_are_finite(self, summed: Callable[[], list[Tensor]]) -> bool:
        """Whether to keep this step. `summed` waits for the summed gradients that this rank will
        use, and returns them. Called once in a step, before any `unscale`. A collective."""
        return True

    def unscale(self, gradient: Tensor) -> Tensor:
        """A gradient of the loss itself, given one of the scaled loss."""
        return gradient

    def weights_changed(self, names: Collection[str], masters: dict[str, Tensor]) -> None:
        """Called when the banks of these names have changed. `masters` has this rank's part of each
        bank, in float32 or wider. A collective."""

    def before_validation(self) -> None:
        """Makes the banks complete on every rank, as validation uses no recipe. A collective."""

    def state(self) -> dict:
        """What a save needs: numbers by name, the same on all ranks. The log has them at the
        end."""
        return {}

    def load_state(self, state: dict) -> None:
        """Goes on from what `state` has returned."""


def plain_recipe(c) -> str:
    """That of the model's own dtype: "bf16", "fp16", "fp32" or "fp64". c: train_gpt.Config"""
    if c.dtype == "auto":
        return c.precision if c.precision in PLAIN_DTYPES else "bf16"
    dtype = getattr(torch, c.dtype)
    return next(name for name in PLAIN_DTYPES if PLAIN_DTYPES[name] == dtype)


def choose(c, wanted: dict[str, str], device: torch.device) -> dict[str, str]:
    """The recipe of each projection, by their names. `wanted` are those of --precision, and `c` is
    train_gpt.Config. Raises BadInput where the user asked for what cannot be."""
    plain = plain_recipe(c)
    is_wide = plain in ("fp32", "fp64")
    lacks_bf16 = device.type == "cuda" and not torch.cuda.is_bf16_supported(
        including_emulation=False)
    require(is_wide or not (lacks_bf16 and c.compile),
            "this GPU has no bf16, which PyTorch's compiler needs for this run, also in fp16; give "
            "--precision=fp32, or --compile=false")
    # FP8 and NVFP4 take multiples of 16. All plain recipes mean the one of the model's dtype.
    widths = c.model_dim, c.num_heads * c.head_dim, c.mlp_dim, c.vocab_size
    stays_plain = plain == "fp64" or any(width % 16 for width in widths)
    chosen = {projection: plain if stays_plain or name in PLAIN_DTYPES else name
              for projection, name in wanted.items()}
    require(not c.float8_all_gather or {*chosen.values()} == {"fp8"},
            "--float8_all_gather needs fp8 everywhere, as no rank has all weights; give "
            "--precision=fp8, --dtype=auto and widths that are multiples of 16")
    return chosen


def summary(chosen: dict[str, str], device: torch.device) -> str:
    """Which recipe each projection has, for the log, and whether the device has its products.
    GPUs that have nvfp4 (Blackwell) were never tried, so it is always emulated."""
    emulated = {"nvfp4"} if kernels.has_fp8(device) else {"nvfp4", "fp8", "fp8-static"}
    return ", ".join(f"{projection} {name} ({'emulated' if name in emulated else 'native'})"
                     for projection, name in chosen.items())
