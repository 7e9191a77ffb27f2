"""Which projection has which recipe, and where a recipe acts between the products.

The trainer calls the methods of a `Recipe` at fixed points of a step. fp8 and nvfp4 replace
products, too. Each of their products belongs to a site (a place where the model multiplies by a
weight), and is called like a function:

    product(x, w)           x (T, K), w (N, K) -> x w^T (T, N), with gradients for x and w
    product.for_rows(rows)  a product for these rows (n,) of w, as the output head needs it, whose
                            loss is computed over some of the vocabulary

These objects are arguments of compiled functions. torch.compile reads their attributes while it
traces, so they hold tensors, true and false, and nothing else.
"""
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from nanogpt import kernels
from nanogpt.ranks import require

PLAIN_DTYPES = {  # of recipes that compute in the dtype of the tensors
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
KNOWN = (*PLAIN_DTYPES, "fp8-static", "fp8", "nvfp4")
PROJECTIONS = ("qkv", "o", "up", "down", "lm_head")
NVFP4_PARTS = ("rht", "sr", "2d")  # what --nvfp4_without may name


class Site(NamedTuple):
    """A place of the model that multiplies by a weight. Weights live in banks, which are stacks of
    matrices of one shape, so a site's weight is some rows of a bank. A row of a bank is an entry of
    its first dimension: a whole matrix in mlp and qkvo, one vector in lm_head."""
    layer: int  # its layer; the output head comes after the last one
    projection: str  # one of PROJECTIONS
    bank: str  # its name
    first_row: int
    num_rows: int

    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)

    def weight(self, banks: dict[str, Tensor]) -> Tensor:
        """The site's weight (N, K), a view into `banks`."""
        weight = banks[self.bank][self.rows()].flatten(0, -2)
        if self.projection in ("o", "up"):
            return weight.t()  # these weights are stored as (K, N)
        return weight


class Recipe:
    """The points of a step at which a recipe may act. Here nothing happens at any of them. Only two
    recipes keep something between steps and do more, fp8 and fp16; no run has both."""

    def reset(self) -> None:
        """Forgets what training has changed, as the trainer does after its warm-up."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss () whose gradients are to be computed."""
        return loss

    def gradients_are_finite(self, summed: Callable[[], list[Tensor]]) -> bool:
        """Whether to keep this step. `summed` waits for the summed gradients that this rank will
        use, and returns them; a recipe that does not scale the loss need not call it. This is
        called once in a step, before any `unscale`. A collective: all ranks get the same answer."""
        return True

    def unscale(self, gradient: Tensor) -> Tensor:
        """A gradient of the loss itself, given one of the scaled loss."""
        return gradient

    def hands_out(self, name: str) -> bool:
        """Whether `weights_changed` gives all ranks the new weights of this bank. If it does, the
        optimizer must not."""
        return False

    def weights_changed(self, names: Collection[str], masters: dict[str, Tensor]) -> int:
        """Is called when the banks of these names have changed. `masters` has this rank's part of
        each bank, in float32 or wider. Returns the size in bytes of what the ranks have gathered. A
        collective."""
        return 0

    def before_validation(self) -> None:
        """Makes the banks complete on every rank, as validation uses no recipe. A collective."""

    def note(self) -> str:
        """A line for the end of the log, or nothing."""
        return ""

    def state(self) -> dict:
        """What a save needs beside what `weights_changed` makes anew: numbers by name, the same on
        all ranks."""
        return {}

    def load_state(self, state: dict) -> None:
        """Goes on from what `state` has returned."""


# --------------------------------------------------------------------------------------------------
# Which recipe where

# The names of the recipes of a whole model: for each layer, and last for the output head, the
# recipe's name by that of the projection.
RecipeNames = list[dict[str, str]]


def plain_recipe(c) -> str:
    """That of the model's own dtype: "bf16", "fp16", "fp32" or "fp64". c: train_gpt.Config"""
    if c.dtype == "auto":
        return c.precision if c.precision in PLAIN_DTYPES else "bf16"
    dtype = getattr(torch, c.dtype)
    return next(name for name in PLAIN_DTYPES if PLAIN_DTYPES[name] == dtype)


def scales_loss(c) -> bool:
    """Whether the command line says --precision=fp16 or --dtype=float16."""
    return "fp16" in (c.precision, plain_recipe(c))


def is_native(recipe_name: str, device: torch.device) -> bool:
    """Whether the device itself has the products of this recipe. Of a CPU that is assumed for bf16
    and fp16, too. The products of GPUs that have nvfp4 (Blackwell) were never tried, so it is
    emulated everywhere."""
    if recipe_name == "nvfp4":
        return False
    if recipe_name in ("fp8", "fp8-static"):
        return kernels.has_fp8(device)
    if device.type != "cuda" or torch.version.hip or recipe_name in ("fp32", "fp64"):
        return True
    needed = {"bf16": (8, 0), "fp16": (7, 0)}
    return torch.cuda.get_device_capability(device) >= needed[recipe_name]


def choose(c, default: dict[str, str], device: torch.device) -> RecipeNames:
    """The recipe of each projection. Raises BadInput where the user asked for what cannot be.

    c: train_gpt.Config
    default: the recipes of --precision, by the projections' names
    """
    plain = plain_recipe(c)
    require(not c.compile or is_native("bf16", device) or plain in ("fp32", "fp64"),
            "this GPU has no bf16, which PyTorch's compiler needs for this run, also in fp16; give "
            "--precision=fp32, or --compile=false")
    for part in filter(None, c.nvfp4_without.split(",")):
        require(part in NVFP4_PARTS, f"--nvfp4_without={c.nvfp4_without}: {part} is none of "
                f"{', '.join(NVFP4_PARTS)}")
    *of_layer, lm_head = PROJECTIONS
    low = {name: default[name] for name in of_layer}
    last = min(c.bf16_last_layers, c.num_layers)
    wanted = [low] * (c.num_layers - last)
    wanted += [dict.fromkeys(of_layer, plain)] * last
    wanted.append({lm_head: default[lm_head]})

    of_heads = c.num_heads * c.head_dim
    widths = {"qkv": 3 * of_heads, "o": of_heads, "up": c.mlp_dim, "down": c.mlp_dim,
              "lm_head": c.vocab_size}
    chosen = []
    for layer in wanted:
        recipe_names = {}
        for projection, recipe_name in layer.items():
            shape = (c.model_dim, widths[projection])
            refuse_impossible(recipe_name, projection, shape, c)
            # All plain recipes mean the one of the model's own dtype.
            if recipe_name in PLAIN_DTYPES or plain == "fp64" or not fits(shape):
                recipe_name = plain
            require(is_native(recipe_name, device) or not c.native,
                    f"--native, but {device.type} has no products of {projection} in {recipe_name} "
                    "here")
            recipe_names[projection] = recipe_name
        chosen.append(recipe_names)
    return chosen


def fits(shape: tuple[int, int]) -> bool:
    """Whether FP8 and NVFP4 can multiply by a weight of this shape: they take multiples of 16."""
    return shape[0] % 16 == 0 and shape[1] % 16 == 0


def refuse_impossible(recipe_name: str, projection: str, shape: tuple[int, int], c) -> None:
    """Raises BadInput if a projection whose weight has this shape cannot have this recipe, or not
    together with what else the user asked for."""
    size = f"{projection} of {shape[0]} x {shape[1]}"
    require(recipe_name in KNOWN,
            f"{projection} cannot be {recipe_name}, which is none of {', '.join(KNOWN)}")
    if plain_recipe(c) == "fp64":
        require(recipe_name != "nvfp4" and not c.float8_all_gather,
                f"{projection} cannot be {recipe_name} with --dtype=float64, which is without "
                "recipes; choose another --dtype, or neither --precision=nvfp4 nor "
                "--float8_all_gather")
    if c.float8_all_gather:
        why = "--float8_all_gather needs fp8 in all layers and steps, as no rank has all weights"
        require(recipe_name == "fp8",
                f"{why}, but {projection} is {recipe_name}; choose --precision=fp8")
        require(fits(shape), f"{why}, but {size} cannot be fp8, which takes multiples of 16 only; "
                "change the model's widths")
        require(c.bf16_last_frac == 0,
                f"{why}, but --bf16_last_frac is {c.bf16_last_frac}; set it to 0")
    if scales_loss(c):
        fp8_head = (projection, recipe_name) == ("lm_head", "fp8-static")
        require(recipe_name in PLAIN_DTYPES or fp8_head,
                f"{projection} is {recipe_name}, which does not go with fp16's scaled loss; choose "
                "another recipe, or neither --precision=fp16 nor --dtype=float16")
    if recipe_name == "nvfp4":
        require(fits(shape), f"{size} cannot be nvfp4, which takes multiples of 16 only; change "
                "the model's widths, or choose another --precision")


def summary(recipe_names: RecipeNames, device: torch.device) -> str:
    """How many projections have which recipe, for the log."""
    texts = []
    for layer in recipe_names:
        for projection, recipe_name in layer.items():
            how = "native" if is_native(recipe_name, device) else "emulated"
            texts.append(f"{projection} {recipe_name} ({how})")
    return ", ".join(f"{texts.count(text)} x {text}" for text in dict.fromkeys(texts))
