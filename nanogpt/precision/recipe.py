"""What the trainer asks of a recipe of low precision, and what the recipes share.

Nearly all the work of training is matrix products, and hardware multiplies numbers of few bits
faster: FP8 twice as fast as bf16, FP4 up to four times as fast. A recipe is a way to compute with
such numbers and to learn nevertheless. The recipe of the default run stands in train_gpt.py, and so
do those that compute in bf16, float32 or float64. The others have a file each, which begins with a
page about the recipe: fp8.py, nvfp4.py and fp16.py.

The trainer calls the methods of `Recipes` at fixed points of a step. This hands each call on to the
recipes that the run has (`Recipe`). fp8 and nvfp4 also replace products: their method
`product(site)` makes an object for a site (a place where the model multiplies by a weight), which
is called like a function:

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


class Recipe:
    """The points of a step at which a recipe may act. Here nothing happens at any of them."""

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

    def note(self) -> str | None:
        """A line for the end of the log, or None."""
        return None

    def state(self) -> dict:
        """What a save needs beside what `weights_changed` makes anew: numbers by name, the same on
        all ranks."""
        return {}

    def load_state(self, state: dict) -> None:
        """Goes on from what `state` has returned."""


def fits(shape: tuple[int, int]) -> bool:
    """Whether FP8 and NVFP4 can multiply by a weight of this shape: they take multiples of 16."""
    return shape[0] % 16 == 0 and shape[1] % 16 == 0


# --------------------------------------------------------------------------------------------------
# Measurements: which number was the first that was not finite?


def largest_magnitude(x: Tensor) -> Tensor:
    """The largest magnitude (amax) of a tensor, () float32: NaN if x has a NaN."""
    return x.abs().amax().float()


class Measurements:
    """The amaxes of weight, input and gradient at every site, summed since the last `reset`.

    When the loss becomes infinite or NaN, one wants to know where it began. Recipes measure amaxes
    anyway, and a sum that was once infinite or NaN stays so. So the trainer may look at these sums
    a step later, when they have come to the CPU without anybody waiting for them, and still find
    the first site that went wrong.

    How they get here: a compiled backward pass may return gradients, but not write to any other
    tensor. So a trick: every product has one more input, `seen`, three zeros which nobody reads.
    Its backward pass returns the three amaxes as if they were the gradient of this input, and
    autograd adds them to `seen.grad`, which is a row of `amaxes`. In place of its amax, a weight
    may give a number that is not finite in the same cases, such as its scale in FP8.
    """

    def __init__(self, sites: list[Site], device: torch.device):
        self.sites = sites  # in the order of the forward pass
        self.amaxes = torch.zeros(len(self.sites), 3, device=device)

    def reset(self) -> None:
        """In place, as CUDA graphs add to the same memory in every step."""
        self.amaxes.zero_()

    def seen(self, site: Site) -> Tensor:
        """The fake parameter (3,) of a site: its gradient is added to the site's row."""
        seen = torch.zeros(3, device=self.amaxes.device, requires_grad=True)
        seen.grad = self.amaxes[self.sites.index(site)]
        return seen

    def faults(self) -> Tensor:
        """(3 * sites,) bool: which sums are not finite."""
        return ~self.amaxes.isfinite().flatten()

    def culprit(self, flags: list[float]) -> str:
        """Ends a sentence with what went wrong first, or is "" if nothing did. `flags` are
        `faults`, summed over the ranks. A bad number spreads to all that is computed from it, so
        the first bad weight began it, or else the first bad input. If there is none, it was the
        last bad gradient, as the backward pass starts at the end."""
        labels = [site.label() for site in self.sites]
        for i, kind in enumerate(("weight", "input", "gradient")):
            bad = [label for label, flag in zip(labels, flags[i::3]) if flag]
            if bad:
                began = bad[-1] if kind == "gradient" else bad[0]
                return f", {kind} of {began} not finite"
        return ""


# --------------------------------------------------------------------------------------------------
# Rounding to formats of few bits, in float32. It gives the same numbers on any device.


class Grid(NamedTuple):
    """The numbers of a floating-point format, but for its largest, which callers must respect."""
    mantissa_bits: int
    smallest_exponent: int  # of normal numbers; below, numbers are equally far from each other


E4M3_GRID = Grid(3, -6)  # up to 448
E5M2_GRID = Grid(2, -14)  # up to 57344
E2M1_GRID = Grid(1, 0)  # 0, 1/2, 1, 3/2, 2, 3, 4, 6


def round_to(x: Tensor, grid: Grid, noise: Tensor | None = None) -> Tensor:
    """Rounds float32 x, which must be within the format's range, to the nearest number of the grid,
    and a tie to the even one. With `noise`, uniform in [0, 1) and of the shape of x, it rounds at
    random instead (stochastic rounding): to one of the two neighbours of x, and to the upper one
    with the probability that makes the mean x.

    Near x the numbers of a grid are multiples of a power of two, the step. It is made here from the
    bits of x, and so is its inverse, because compiled code rounds some divisions differently.
    """
    exponent = (x.view(torch.int32) >> 23) & 255  # float32 stores it with 127 added
    exponent = exponent.clamp(min=grid.smallest_exponent + 127)
    step = ((exponent - grid.mantissa_bits) << 23).view(torch.float32)
    inverse_step = ((254 - exponent + grid.mantissa_bits) << 23).view(torch.float32)
    steps = x * inverse_step
    if noise is None:
        return steps.round() * step
    below = steps.floor()
    return (below + (noise < steps - below)) * step


def inverse(x: Tensor) -> Tensor:
    """1 / x, divided in float64: compiled float32 quotients may differ in the last bit."""
    return x.double().reciprocal().float()


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


def refuse_impossible(recipe_name: str, projection: str, shape: tuple[int, int], c) -> None:
    """Raises BadInput if a projection whose weight has this shape cannot have this recipe, or not
    together with what else the user asked for."""
    require(recipe_name in KNOWN,
            f"{projection} cannot be {recipe_name}, which is none of {', '.join(KNOWN)}")
    if plain_recipe(c) == "fp64":
        require(recipe_name != "nvfp4" and not c.float8_all_gather,
                f"{projection} cannot be {recipe_name} with --dtype=float64, which is without "
                "recipes; choose another --dtype, or neither --precision=nvfp4 nor "
                "--float8_all_gather")
    if c.float8_all_gather:
        module_of("fp8").check_all_gather(projection, shape, recipe_name, c.bf16_last_frac)
    if scales_loss(c):
        module_of("fp16").check(projection, recipe_name)
    if recipe_name == "nvfp4":
        module_of("nvfp4").check(projection, shape)


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


class Recipes:
    """All recipes of a run that have a module of their own, as one: each method but `product` asks
    all."""

    def __init__(self, recipe_names: RecipeNames, sites: list[Site], banks: dict[str, Tensor], c):
        """sites: where the weights of all projections lie in the banks; c: train_gpt.Config"""
        device = next(iter(banks.values())).device
        name_at = {site: recipe_names[site.layer][site.projection] for site in sites}
        fp8_sites = [site for site in sites if name_at[site] == "fp8"]
        measured = [site for site in sites if name_at[site] in ("fp8", "nvfp4")]
        self.sites = {(site.layer, site.projection): site for site in sites}
        self.measurements = Measurements(measured, device)
        self.by_name = {}
        for recipe_name in names_with_module(recipe_names, c):
            module = module_of(recipe_name)
            if recipe_name == "fp8":
                recipe = module.FP8(
                    fp8_sites, banks, self.measurements, c.float8_all_gather)
            elif recipe_name == "nvfp4":
                leave_out = module.parts_to_leave_out(c.nvfp4_without)
                recipe = module.NVFP4(self.measurements, leave_out)
            else:
                recipe = module.LossScaling(device, c.seq_len)
            self.by_name[recipe_name] = recipe

    def product(self, layer: int, projection: str, recipe_name: str):
        """The product of a projection by "fp8" or "nvfp4"."""
        return self.by_name[recipe_name].product(self.sites[layer, projection])

    def reset(self) -> None:
        self.measurements.reset()
        for recipe in self.by_name.values():
            recipe.reset()

    def scale_loss(self, loss: Tensor) -> Tensor:
        for recipe in self.by_name.values():
            loss = recipe.scale_loss(loss)
        return loss

    def gradients_are_finite(self, summed: Callable[[], list[Tensor]]) -> bool:
        answers = [recipe.gradients_are_finite(summed) for recipe in self.by_name.values()]
        return all(answers)

    def unscale(self, gradient: Tensor) -> Tensor:
        for recipe in self.by_name.values():
            gradient = recipe.unscale(gradient)
        return gradient

    def hands_out(self, name: str) -> bool:
        return any(recipe.hands_out(name) for recipe in self.by_name.values())

    def weights_changed(self, names: Collection[str], masters: dict[str, Tensor]) -> int:
        return sum(recipe.weights_changed(names, masters) for recipe in self.by_name.values())

    def before_validation(self) -> None:
        for recipe in self.by_name.values():
            recipe.before_validation()

    def notes(self) -> list[str]:
        notes = [recipe.note() for recipe in self.by_name.values()]
        return [note for note in notes if note is not None]

    def state(self) -> dict:
        return {name: recipe.state() for name, recipe in self.by_name.items()}

    def load_state(self, state: dict) -> None:
        for name, recipe in self.by_name.items():
            if name in state:
                recipe.load_state(state[name])
