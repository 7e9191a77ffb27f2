"""Which recipe each product of the model has, and what the trainer asks of the recipes.

A recipe is a way to compute the products of the model, forward and backward. fp8 and nvfp4 replace
products: for a site (a place where the model multiplies by a weight) they have an object which is
called like a function:

    product(x, w)           x (T, K), w (N, K) -> x w^T (T, N), with gradients for x and w
    product.for_rows(rows)  a product for these rows (n,) of w, as the output head needs it, whose
                            loss is computed over some of the vocabulary

These objects are arguments of compiled functions. torch.compile reads their attributes while it
traces, so they hold tensors, true and false, and nothing else.
"""
import importlib
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from nanogpt import kernels
from nanogpt.ranks import require


class Site(NamedTuple):
    """A place of the model that multiplies by a weight. Weights live in banks, which are stacks of
    matrices of one shape, so a site's weight is some rows of a bank. A row of a bank is an entry of
    its first dimension: a whole matrix in mlp and qkvo, one vector in lm_head."""
    layer: int  # its layer; the output head comes after the last one
    projection: str  # one of PROJECTIONS
    bank: str  # its name
    first_row: int
    num_rows: int

    def label(self) -> str:
        """How messages name the site."""
        if self.projection == "lm_head":
            return self.projection
        return f"layer {self.layer}'s {self.projection}"

    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)

    def weight(self, banks: dict[str, Tensor]) -> Tensor:
        """The site's weight (N, K), a view into `banks`."""
        weight = banks[self.bank][self.rows()].flatten(0, -2)
        if self.projection in ("o", "up"):
            return weight.t()  # these weights are stored as (K, N)
        return weight


# --------------------------------------------------------------------------------------------------
# Which recipe where

PLAIN_DTYPES = {  # for recipes that compute in the dtype of the tensors
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


PROJECTIONS = ("qkv", "o", "up", "down", "lm_head")
KNOWN = (*PLAIN_DTYPES, "fp8-static", "fp8", "nvfp4")

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


def module_of(recipe_name: str):
    """The module of a recipe that has one of its own, imported only for the runs that need it, so
    that the log has only the code that its run has used."""
    return importlib.import_module(f"nanogpt.precision.{recipe_name}")


def names_with_module(recipe_names: RecipeNames, c) -> list[str]:
    """Those of the chosen recipes that have a module of their own."""
    used = {recipe_name for layer in recipe_names for recipe_name in layer.values()}
    if scales_loss(c):
        used.add("fp16")
    return [recipe_name for recipe_name in ("fp8", "nvfp4", "fp16") if recipe_name in used]


def import_modules(recipe_names: RecipeNames, c) -> None:
    """Imports all modules that `Recipes` will need."""
    for recipe_name in names_with_module(recipe_names, c):
        module_of(recipe_name)


def fits(shape: tuple[int, int]) -> bool:
    """Whether FP8 and NVFP4 can multiply by a weight of this shape: they take multiples of 16."""
    return shape[0] % 16 == 0 and shape[1] % 16 == 0


def refuse_impossible(recipe_name: str, projection: str, shape: tuple[int, int], c) -> None:
    """Raises BadInput if a projection whose weight has this shape cannot have this recipe, or not
    together with what else the user asked for."""
    require(recipe_name in KNOWN,
            f"{projection} cannot be {recipe_name}, which is none of {', '.join(KNOWN)}")
    size = f"{shape[0]} x {shape[1]}"
    if plain_recipe(c) == "fp64":
        require(recipe_name != "nvfp4" and not c.float8_all_gather,
                f"{projection} cannot be {recipe_name} with --dtype=float64, which is without "
                "recipes; choose another --dtype, or neither --precision=nvfp4 nor "
                "--float8_all_gather")
    if recipe_name == "nvfp4":
        require(fits(shape), f"{projection} of {size} cannot be nvfp4, which takes multiples of 16 "
                "only; change the model's widths, or choose another --precision")
    if scales_loss(c):
        fp8_head = (projection, recipe_name) == ("lm_head", "fp8-static")
        require(recipe_name in PLAIN_DTYPES or fp8_head,
                f"{projection} is {recipe_name}, which does not go with fp16's scaled loss; choose "
                "another recipe, or neither --precision=fp16 nor --dtype=float16")
    if c.float8_all_gather:
        why = ("--float8_all_gather needs fp8 in all layers and steps, as no rank has all wide "
               "weights")
        require(recipe_name == "fp8",
                f"{why}, but {projection} is {recipe_name}; choose --precision=fp8")
        require(fits(shape), f"{why}, but {projection} of {size} cannot be fp8, which takes "
                "multiples of 16 only; change the model's widths")
        require(c.bf16_last_frac == 0,
                f"{why}, but --bf16_last_frac is {c.bf16_last_frac}; set it to 0")


def in_place_of(recipe_name: str, shape: tuple[int, int], c) -> str:
    """The recipe that a projection gets if it asks for this one. It is that of the model's own
    dtype if it asks for any plain one (they all mean just that), if a side of its weight is no
    multiple of 16, or if the model is in float64."""
    plain = plain_recipe(c)
    if recipe_name in PLAIN_DTYPES or plain == "fp64" or not fits(shape):
        return plain
    return recipe_name


def choose(c, default: dict[str, str], device: torch.device) -> RecipeNames:
    """The recipe of each projection. Raises BadInput where the user asked for what cannot be.

    c: train_gpt.Config
    default: the recipes of --precision, by the projections' names
    """
    require(not c.compile or is_native("bf16", device) or plain_recipe(c) in ("fp32", "fp64"),
            "this GPU has no bf16, which PyTorch's compiler needs for this run, also in fp16; give "
            "--precision=fp32, or --compile=false")
    *of_layer, lm_head = PROJECTIONS
    low = {name: default[name] for name in of_layer}
    plain = dict.fromkeys(of_layer, plain_recipe(c))
    last = min(c.bf16_last_layers, c.num_layers)
    wanted = [low] * (c.num_layers - last) + [plain] * last + [{lm_head: default[lm_head]}]

    of_heads = c.num_heads * c.head_dim
    widths = {"qkv": 3 * of_heads, "o": of_heads, "up": c.mlp_dim, "down": c.mlp_dim,
              "lm_head": c.vocab_size}
    chosen = []
    for layer in wanted:
        recipe_names = {}
        for projection, recipe_name in layer.items():
            shape = (c.model_dim, widths[projection])
            refuse_impossible(recipe_name, projection, shape, c)
            recipe_name = in_place_of(recipe_name, shape, c)
            require(is_native(recipe_name, device) or not c.native,
                    f"--native, but {device.type} has no products of {projection} in {recipe_name} "
                    "here")
            recipe_names[projection] = recipe_name
        chosen.append(recipe_names)
    return chosen


def summary(recipe_names: RecipeNames, device: torch.device) -> str:
    """How many projections have which recipe, for the log."""
    texts = []
    for layer in recipe_names:
        for projection, recipe_name in layer.items():
            how = "native" if is_native(recipe_name, device) else "emulated"
            texts.append(f"{projection} {recipe_name} ({how})")
    return ", ".join(f"{texts.count(text)} x {text}" for text in dict.fromkeys(texts))


# --------------------------------------------------------------------------------------------------
# The recipes in a step


class Recipes:
    """What the recipes of a run do at fixed points of a step. With bf16, nvfp4 or constant scales
    nothing happens at any of them: `fp8` and `scaling` are None."""

    def __init__(self, recipe_names: RecipeNames, sites: list[Site], banks: dict[str, Tensor], c):
        """sites: where the weights of all projections lie in the banks; c: train_gpt.Config"""
        self.sites = {(site.layer, site.projection): site for site in sites}
        self.nvfp4_without = c.nvfp4_without
        self.fp8 = None
        self.scaling = None
        used = names_with_module(recipe_names, c)
        if "fp8" in used:
            fp8_sites = [site for site in sites
                         if recipe_names[site.layer][site.projection] == "fp8"]
            self.fp8 = module_of("fp8").FP8(fp8_sites, banks, c.float8_all_gather)
        if "fp16" in used:
            device = next(iter(banks.values())).device
            self.scaling = module_of("fp16").LossScaling(device, c.seq_len)

    def product(self, layer: int, projection: str, recipe_name: str):
        """The product of a projection by "fp8" or "nvfp4"."""
        if recipe_name == "fp8":
            return self.fp8.product(self.sites[layer, projection])
        return module_of("nvfp4").NVFP4Product(self.nvfp4_without)

    def reset(self) -> None:
        """Forgets what training has changed, as the trainer does after its warm-up."""
        if self.scaling:
            self.scaling.reset()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss () whose gradients are to be computed."""
        return self.scaling.scale_loss(loss) if self.scaling else loss

    def gradients_are_finite(self, summed: Callable[[], list[Tensor]]) -> bool:
        """Whether to keep this step. `summed` waits for the summed gradients that this rank will
        use, and returns them; only a scaled loss needs it. This is called once in a step, before
        any `unscale`. A collective: all ranks get the same answer."""
        return self.scaling.gradients_are_finite(summed) if self.scaling else True

    def unscale(self, gradient: Tensor) -> Tensor:
        """A gradient of the loss itself, given one of the scaled loss."""
        return self.scaling.unscale(gradient) if self.scaling else gradient

    def hands_out(self, name: str) -> bool:
        """Whether `weights_changed` gives all ranks the new weights of this bank. If it does, the
        optimizer must not."""
        return self.fp8 is not None and self.fp8.hands_out(name)

    def weights_changed(self, names: Collection[str], masters: dict[str, Tensor]) -> int:
        """Is called when the banks of these names have changed. `masters` has this rank's part of
        each bank, in float32 or wider. Returns the size in bytes of what the ranks have gathered. A
        collective."""
        return self.fp8.weights_changed(names, masters) if self.fp8 else 0

    def before_validation(self) -> None:
        """Makes the banks complete on every rank, as validation uses no recipe. A collective."""
        if self.fp8:
            self.fp8.before_validation()

    def notes(self) -> list[str]:
        """Lines for the end of the log."""
        return [self.scaling.note()] if self.scaling else []

    def state(self) -> dict:
        """What a save needs beside what `weights_changed` makes anew, the same on all ranks."""
        return {"fp16": self.scaling.state()} if self.scaling else {}

    def load_state(self, state: dict) -> None:
        """Goes on from what `state` has returned."""
        if self.scaling and "fp16" in state:
            self.scaling.load_state(state["fp16"])
