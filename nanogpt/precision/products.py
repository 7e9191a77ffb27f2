"""How the model multiplies by its weights: an object for each projection, by its recipe.

The model calls the methods of `Products` and does not ask which recipe it has. In validation all
products are plain.
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanogpt.kernels import E4M3
from nanogpt.precision import fp8, fp8_static, fp16, nvfp4, recipe


class Products:
    """The products of a projection, here in the dtype of its operands. Other recipes override some
    of the methods.

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
        """These products for some rows of w."""
        return self


class LayerProducts(NamedTuple):
    """The products of each projection of a layer."""
    qkv: Products
    o: Products
    up: Products
    down: Products


PLAIN = Products()
PLAIN_LAYER = LayerProducts(PLAIN, PLAIN, PLAIN, PLAIN)


class StaticFP8(Products):
    """FP8 with constant scales. While `hear` is set (`Precision.as_in_training`), it is told which
    part of the numbers of each operand does not fit the scale and is clamped."""

    def __init__(self, name: str, input_scale: float, weight_scale: float):
        self.name = name
        self.input_scale = input_scale
        self.weight_scale = weight_scale
        self.hear = None

    def tell(self, x: Tensor, w: Tensor) -> None:
        if self.hear is None:
            return
        for operand, numbers, scale in (
                ("input", x, self.input_scale), ("weights", w, self.weight_scale)):
            part = (numbers.abs() > torch.finfo(E4M3).max * scale).float().mean()
            self.hear(f"{operand} of {self.name}", part.item())

    def linear(self, x, w, factor=None):
        w = w if factor is None else factor * w
        self.tell(x, w)
        return fp8_static.StaticLinear.apply(x, w, self.input_scale, 1)[0]

    def three_linears(self, x, weights, factor):
        weights = weights.flatten(0, 1)  # (3 H d, D)
        self.tell(x, weights)
        queries, keys, values = fp8_static.StaticLinear.apply(x, weights, self.input_scale, 3)
        return queries, keys, factor * values

    def mlp(self, x, up, down, factor, activation, down_products):
        if not isinstance(down_products, StaticFP8):
            return super().mlp(x, up, down, factor, activation, down_products)
        if self.hear:
            self.tell(x, up)
            down_products.tell(activation(x @ up), factor * down)
        return fp8_static.StaticMLP.apply(x, up, factor * down)  # the activation is relu(x)^2


class Measured(Products):
    """A recipe that measures its scales. The learned factor multiplies the result, so that it need
    not be known when a weight is rounded: "fp8" does that only once a step."""

    def __init__(self, product: Callable):
        self.product = product  # x (T, K), w (N, K) -> (T, N)

    def linear(self, x, w, factor=None):
        y = self.product(x, w)
        return y if factor is None else factor * y

    def for_rows(self, rows):
        return Measured(self.product.for_rows(rows))


STATIC = {name: StaticFP8(name, scale, fp8_static.WEIGHT_SCALE)
          for name, scale in fp8_static.INPUT_SCALES.items()}
STATIC["lm_head"] = StaticFP8(
    "lm_head", fp8_static.HEAD_INPUT_SCALE, fp8_static.HEAD_WEIGHT_SCALE)


def find_sites(c, recipe_names: recipe.RecipeNames) -> dict[tuple[int, str], recipe.Site]:
    """For each projection of each layer its bank (train_gpt.py, section 4), its first entry there,
    and how many entries it multiplies by. c: train_gpt.Config"""
    sites = {}
    for layer, projections in enumerate(recipe_names):
        places = {
            "qkv": ("qkvo", 4 * layer, 3),
            "o": ("qkvo", 4 * layer + 3, 1),
            "up": ("mlp", 2 * layer, 1),
            "down": ("mlp", 2 * layer + 1, 1),
            "lm_head": ("lm_head", 0, c.vocab_size),
        }
        for projection in projections:
            sites[layer, projection] = recipe.Site(layer, projection, *places[projection])
    return sites


class Precision:
    """The products of every projection of a model. `recipe` is what acts between the products: when
    weights have changed, when a validation begins, and so on (recipe.py)."""

    def __init__(self, c, recipe_names: recipe.RecipeNames, banks: dict[str, Tensor]):
        """c: train_gpt.Config; banks: the model's weights by name"""
        self.config = c
        self.recipe_names = recipe_names
        self.sites = find_sites(c, recipe_names)
        of_fp8 = [site for site in self.sites.values()
                  if recipe_names[site.layer][site.projection] == "fp8"]
        self.recipe = recipe.Recipe()
        if recipe.scales_loss(c):
            self.recipe = fp16.LossScaling(banks["lm_head"].device, c.seq_len)
        elif of_fp8:
            self.recipe = fp8.FP8(of_fp8, banks, c.float8_all_gather)
        self.layers = []
        for layer in range(c.num_layers):
            of_layer = [self.products_of(layer, name) for name in LayerProducts._fields]
            self.layers.append(LayerProducts(*of_layer))
        self.head = self.products_of(c.num_layers, "lm_head")
        self.is_plain = all(  # whether training multiplies as validation does
            products is PLAIN for of_layer in [*self.layers, [self.head]] for products in of_layer)
        self.validates_as_in_training = False

    def products_of(self, layer: int, projection: str) -> Products:
        name = self.recipe_names[layer][projection]
        if name == "fp8-static":
            return STATIC[projection]
        if name == "fp8":
            return Measured(self.recipe.product(self.sites[layer, projection]))
        if name == "nvfp4":
            return Measured(nvfp4.NVFP4Product(self.config.nvfp4_without))
        return PLAIN

    def layers_at(self, setting, training: bool) -> list[LayerProducts]:
        """The products of all layers at a train_gpt.Setting. They are plain in validation, and in
        the last part of the run if --bf16_last_frac says so."""
        if (training or self.validates_as_in_training) and not setting.plain:
            return self.layers
        return [PLAIN_LAYER] * len(self.layers)

    def head_at(self, setting, training: bool) -> Products:
        """The same for the head."""
        if (training or self.validates_as_in_training) and not setting.plain:
            return self.head
        return PLAIN

    @contextmanager
    def as_in_training(self) -> Iterator[dict[str, float]]:
        """Within it, validation multiplies as training does. Yields a dictionary that fills with
        the largest part of clamped numbers of each operand, such as "weights of qkv". To be used
        with EAGER: functions that are compiled already would not tell."""
        clamped = {}

        def hear(operand: str, part: float) -> None:
            clamped[operand] = max(part, clamped.get(operand, 0.0))

        self.validates_as_in_training = True
        for products in STATIC.values():
            products.hear = hear
        try:
            yield clamped
        finally:
            self.validates_as_in_training = False
            for products in STATIC.values():
                products.hear = None
