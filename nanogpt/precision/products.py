"""The products of every projection of a model, by its recipes.

The model calls the methods of `Products` and does not ask which recipe it has. In validation all
products are plain.
"""
from typing import NamedTuple

from torch import Tensor

from nanogpt.precision.fp8 import FP8, Site
from nanogpt.precision.fp8_static import STATIC
from nanogpt.precision.fp16 import LossScaling
from nanogpt.precision.nvfp4 import NVFP4Products
from nanogpt.precision.recipe import PLAIN, Products, Recipe


class LayerProducts(NamedTuple):
    """The products of each projection of a layer."""
    qkv: Products
    o: Products
    up: Products
    down: Products


PLAIN_LAYER = LayerProducts(PLAIN, PLAIN, PLAIN, PLAIN)


class Precision:
    """All products of a model. `recipe` is what acts between them (`Recipe`). No run has both of
    the recipes that do."""

    def __init__(self, c, recipe_names: dict[str, str], banks: dict[str, Tensor]):
        """c: train_gpt.Config; recipe_names: by the projections' names; banks: the model's weights
        by name"""
        self.recipe_names = recipe_names
        sites = self.fp8_sites(c)
        self.recipe = Recipe()
        if c.precision == "fp16":
            self.recipe = LossScaling(banks["lm_head"].device, c.seq_len)
        elif sites:
            self.recipe = FP8(sites, banks, c.float8_all_gather)
        self.layers = []
        for layer in range(c.num_layers):
            of_layer = [self.products_of(layer, name) for name in LayerProducts._fields]
            self.layers.append(LayerProducts(*of_layer))
        self.head = self.products_of(c.num_layers, "lm_head")

    def fp8_sites(self, c) -> dict[tuple[int, str], Site]:
        """Where the weights of the recipe fp8 are (train_gpt.py, section 4)."""
        sites = {("lm_head", c.num_layers): Site("lm_head", slice(c.vocab_size))}
        for place, i in enumerate(c.attends):
            sites["qkv", i] = Site("qkvo", slice(4 * place, 4 * place + 3))
            sites["o", i] = Site("qkvo", slice(4 * place + 3, 4 * place + 4), transposed=True)
        for i in range(c.num_layers):
            sites["up", i] = Site("mlp", slice(2 * i, 2 * i + 1), transposed=True)
            sites["down", i] = Site("mlp", slice(2 * i + 1, 2 * i + 2))
        return {key: site for key, site in sites.items() if self.recipe_names[key[0]] == "fp8"}

    def products_of(self, layer: int, projection: str) -> Products:
        name = self.recipe_names[projection]
        if name == "fp8-static":
            return STATIC[projection]
        if name == "fp8":
            return self.recipe.products.get((projection, layer), PLAIN)  # without attention: PLAIN
        if name == "nvfp4":
            return NVFP4Products()
        return PLAIN

    def layers_at(self, training: bool) -> list[LayerProducts]:
        """The products of all layers in training or in validation."""
        return self.layers if training else [PLAIN_LAYER] * len(self.layers)

    def head_at(self, training: bool) -> Products:
        """The same for the head."""
        return self.head if training else PLAIN
