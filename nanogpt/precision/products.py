"""The products of every projection of a model, by its recipes.

The model calls the methods of `Products` and does not ask which recipe it has. In validation all
products are plain.
"""
from typing import NamedTuple

from torch import Tensor

from nanogpt.precision.fp8 import FP8
from nanogpt.precision.fp8_static import STATIC
from nanogpt.precision.fp16 import LossScaling
from nanogpt.precision.nvfp4 import NVFP4Products
from nanogpt.precision.recipe import PLAIN, PLAIN_DTYPES, Products, Recipe


class LayerProducts(NamedTuple):
    """The products of each projection of a layer."""
    qkv: Products = PLAIN
    o: Products = PLAIN
    up: Products = PLAIN
    down: Products = PLAIN


class Precision:
    """All products of a model: `layers[training]` has those of every layer, in training or in
    validation, and `head[training]` those of the head. `recipe` is what acts between them
    (`Recipe`). No run has both of the recipes that do."""

    def __init__(self, c, recipe_names: dict[str, str], banks: dict[str, Tensor]):
        """c: train_gpt.Config; recipe_names: by the projections' names; banks: the model's weights
        by name"""
        self.recipe_names = recipe_names
        self.recipe = Recipe()
        if c.precision == "fp16":
            self.recipe = LossScaling(banks["lm_head"].device, c.seq_len)
        elif "fp8" in recipe_names.values():
            self.recipe = FP8(banks, c.float8_all_gather)
        # The rows of the banks: train_gpt.py, section 4.
        layers = []
        for i in range(c.num_layers):
            place = 0  # of a layer without attention, whose qkv and o nobody asks for
            if i in c.layers_with_attention:
                place = 4 * c.layers_with_attention.index(i)
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
        """Those of a projection whose weight (N, K) is these rows of a bank, or is there as
        (K, N)."""
        name = self.recipe_names[projection]
        if name in PLAIN_DTYPES:
            return PLAIN
        if name == "fp8":
            return self.recipe.products_of(bank, rows, transposed)
        if name == "nvfp4":
            return NVFP4Products()
        if name == "fp8-static" and projection in STATIC:
            return STATIC[projection]
        raise ValueError(f"{name} is no recipe for {projection}")
