"""Which projection has which recipe, and the products of all of them."""
from typing import NamedTuple

import torch
from torch import Tensor

from data import require
from nanogpt import kernels
from nanogpt.precision import PLAIN, Products, StepHooks
from nanogpt.precision.fp8 import FP8
from nanogpt.precision.fp8_static import STATIC
from nanogpt.precision.fp16 import LossScaling
from nanogpt.precision.nvfp4 import NVFP4Products

PLAIN_DTYPES = {  # of recipes that compute in the dtype of the tensors
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
PROJECTIONS = ("qkv", "o", "up", "down", "lm_head")


def plain_recipe(c) -> str:
    """The recipe of the model's own dtype: "bf16", "fp16", "fp32" or "fp64". c: train_gpt.Config"""
    if c.dtype == "auto":
        return c.precision if c.precision in PLAIN_DTYPES else "bf16"
    dtype = getattr(torch, c.dtype)
    return next(name for name in PLAIN_DTYPES if PLAIN_DTYPES[name] == dtype)


def choose(c, wanted: dict[str, str], device: torch.device) -> dict[str, str]:
    """The recipe of each projection, by their names. `wanted` are those of --precision, and `c` is
    train_gpt.Config. All are plain in float64, and where a width is no multiple of 16. Raises
    BadInput if a GPU lacks bf16 or --float8_all_gather lacks fp8."""
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


class LayerProducts(NamedTuple):
    """The products of each projection of a layer."""
    qkv: Products = PLAIN
    o: Products = PLAIN
    up: Products = PLAIN
    down: Products = PLAIN


class Precision:
    """All products of a model: `layers[training]` has those of every layer, in training or in
    validation, and `head[training]` those of the head. `hooks` act at points of a step: only fp16
    and fp8 have some, and no run has both."""

    def __init__(self, c, recipe_names: dict[str, str], banks: dict[str, Tensor]):
        """c: train_gpt.Config; recipe_names: by projection; banks: the model's weights by name"""
        self.recipe_names = recipe_names
        self.hooks = StepHooks()
        if c.precision == "fp16":
            self.hooks = LossScaling(banks["lm_head"].device, c.seq_len)
        elif "fp8" in recipe_names.values():
            self.hooks = FP8(banks, c.float8_all_gather)
        # The rows of the banks: train_gpt.py, section 4.
        layers = []
        places = {layer: 4 * n for n, layer in enumerate(c.layers_with_attention)}
        for i in range(c.num_layers):
            place = places.get(i, 0)  # without attention nobody asks for qkv and o
            layers.append(LayerProducts(
                self.products_of("qkv", "qkvo", slice(place, place + 3)),
                self.products_of("o", "qkvo", slice(place + 3, place + 4), True),
                self.products_of("up", "mlp", slice(2 * i, 2 * i + 1), True),
                self.products_of("down", "mlp", slice(2 * i + 1, 2 * i + 2))))
        head = self.products_of("lm_head", "lm_head", slice(c.vocab_size))
        self.layers = {True: layers, False: [LayerProducts()] * c.num_layers}
        self.head = {True: head, False: PLAIN}

    def products_of(self, projection: str, bank: str, rows: slice,
                    transposed: bool = False) -> Products:
        """A projection's products. Its weight is these rows of a bank: (N, K), or transposed."""
        name = self.recipe_names[projection]
        if name in PLAIN_DTYPES:
            return PLAIN
        if name == "fp8":
            return self.hooks.products_of(bank, rows, transposed)
        if name == "nvfp4":
            return NVFP4Products()
        if name == "fp8-static" and projection in STATIC:
            return STATIC[projection]
        raise ValueError(f"{name} is no recipe for {projection}")
