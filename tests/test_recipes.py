"""The recipes of low precision, each by itself: rounding, the three products, FP8 weights and their
ranks, the loss scale.

References: the formats' numbers, listed from their definition and rounded to by search; PyTorch's
own FP8 casts; worked examples (from the digest of NVFP4 and Float8Linear); products in float64; and
gloo processes, whose FP8 weights are compared with a quantiser written here.
"""
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import train_gpt as t
from nanogpt import kernels
from nanogpt.kernels import E4M3, E5M2
from nanogpt.precision import fp8, fp16, nvfp4
from nanogpt.precision.recipe import (
    E2M1_GRID,
    Measurements,
    Recipe,
    Recipes,
    Site,
    inverse,
    largest_magnitude,
    round_to,
)
from nanogpt.ranks import BadInput

CPU = torch.device("cpu")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LIMIT = {E4M3: 448.0, E5M2: 57344.0}
SITE = Site(0, "o", "qkvo", 3, 1)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(a, b):
    """Relative, in the Frobenius norm."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def decibels(rounded, x):
    return -20 * math.log10(distance(rounded, x))


def to_fp8(x, dtype, has_fp8=True):
    """x rounded with its own scale, and that scale."""
    multiplier = fp8.multiplier(largest_magnitude(x), dtype)
    return fp8.to_fp8(x, multiplier, dtype, has_fp8), inverse(multiplier)


def fp8_values(x, dtype=E4M3):
    """float64 values that a rounded tensor stands for."""
    x8, scale = to_fp8(x, dtype)
    return x8.double() * scale.double()


def values(blocks):
    """float64 values (R, K) that blocks of nvfp4 stand for."""
    x = blocks.numbers.double() * blocks.scales.double()
    return x.flatten(2).flatten(0, 1) * blocks.amax.double() / (6 * 448)


def make_product(recipe, w, has_fp8=True, leave_out=()):
    """The product of one site by a recipe that measures its scales."""
    seen = Measurements([SITE], w.device).seen(SITE)
    if recipe == "nvfp4":
        return nvfp4.NVFP4Product(seen, leave_out)
    w8, scale = to_fp8(w.detach(), E4M3)
    return fp8.FP8Product(seen, w8.view(torch.uint8), scale, has_fp8)


def three_products(recipe, x, w, g, has_fp8=True, leave_out=()):
    """y, dx, dw of a projection, and the amaxes that were seen."""
    x = x.clone().requires_grad_()
    w = w.clone().requires_grad_()
    product = make_product(recipe, w, has_fp8, leave_out)
    y = product(x, w)
    y.backward(g)
    return y.detach(), x.grad, w.grad, product.seen.grad


# ---------------------------------------------------------------------------------------- rounding


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_emulated_rounding_equals_the_cast_at_every_value_tie_and_neighbour_of_a_tie(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    grid = codes[codes.isfinite()].unique()
    ties = (grid[1:] + grid[:-1]) / 2
    near_ties = [ties * (1 + 2**-20), ties * (1 - 2**-20)]
    x = torch.cat([grid, ties, *near_ties, normal(20_000), 1e-5 * normal(20_000)])
    assert torch.equal(round_to(x, fp8.GRIDS[dtype]), x.to(dtype).float())


def test_e2m1_rounds_to_the_nearest_and_ties_to_the_even_code_on_1e5_values():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_to(ties, E2M1_GRID).tolist() == [0, 1, 1, 2, 2, 4, 4]
    x = torch.cat([ties, E2M1, (2.5 * normal(100_000)).clamp(-6, 6)])
    far = (x.abs()[:, None] - E2M1).abs()
    best = far == far.amin(1, keepdim=True)
    is_tie = best.sum(1, keepdim=True) == 2
    even = torch.arange(8) % 2 == 0
    code = torch.where(is_tie, best & even, best).int().argmax(1)
    assert torch.equal(round_to(x, E2M1_GRID), E2M1[code] * x.sign())


@pytest.mark.parametrize("x, down, up", [
    (2.4, 2, 3), (-0.3, -0.5, 0), (1.1, 1, 1.5), (4.5, 4, 6), (-5.9, -6, -4)])
def test_stochastic_rounding_is_unbiased_and_always_gives_one_of_the_two_neighbours(x, down, up):
    n = 1_000_000
    noise = torch.rand(n, generator=torch.Generator().manual_seed(1))
    drawn = round_to(torch.full((n,), x), E2M1_GRID, noise)
    assert set(drawn.unique().tolist()) == {down, up}
    p = (x - down) / (up - down)
    four_deviations = 4 * (p * (1 - p) / n) ** 0.5
    assert (drawn == up).double().mean().item() == pytest.approx(p, abs=four_deviations)


def test_stochastic_rounding_leaves_alone_what_needs_no_rounding():
    assert torch.equal(round_to(E2M1, E2M1_GRID, torch.zeros(8)), E2M1)
    assert torch.equal(round_to(-E2M1, E2M1_GRID, torch.full((8,), 1 - 2**-24)), -E2M1)


def test_two_draws_of_stochastic_rounding_differ_and_their_mean_comes_closer():
    torch.manual_seed(0)
    x = normal(64, 64)
    nearest = values(nvfp4.to_blocks(x))
    draws = [values(nvfp4.to_blocks(x, stochastic=True)) for _ in range(64)]
    assert not torch.equal(draws[0], draws[1])
    mean = torch.stack(draws).mean(0)
    assert distance(mean, x) < distance(nearest, x) / 3
    assert distance(draws[0], x) > distance(nearest, x)


def test_the_mean_of_stochastic_rounding_is_too_small_only_for_a_blocks_largest_value():
    torch.manual_seed(0)
    x = 0.1 * normal(1, 32)
    x[0, 0], x[0, 16] = 1, 0.66  # of the second block, the scale rounds from 295.7 down to 288
    draws = torch.stack([values(nvfp4.to_blocks(x, stochastic=True)) for _ in range(4000)])
    error = draws.mean(0) - x
    assert error[0, 16].item() == pytest.approx(0.66 * (288 / 295.68 - 1), rel=1e-3)
    error[0, 16] = 0
    assert error.abs().max() < 5 * 0.5 * (1 / 6) * 4000**-0.5 * 2  # draws lie at most 2/6 apart


# --------------------------------------------------------------------------------------------- fp8


@pytest.mark.parametrize("has_fp8", [True, False])
def test_fp8_gives_the_known_answers(has_fp8):
    x8, scale = to_fp8(torch.tensor([1.0, 2, 3, 4]), E4M3, has_fp8)
    assert 1 / scale.item() == pytest.approx(112)
    assert x8.float().tolist() == [112, 224, 320, 448]  # 336 is a tie
    assert (x8.float() * scale).tolist() == pytest.approx([1, 2, 2.857143, 4], abs=1e-6)
    g8, scale = to_fp8(torch.tensor([1.0, 2, 3, 5]), E5M2, has_fp8)
    assert 1 / scale.item() == pytest.approx(11468.7998, abs=1e-3)
    assert g8.float().tolist() == [12288, 24576, 32768, 57344]
    zeros, scale = to_fp8(torch.zeros(4), E4M3, has_fp8)
    assert 1 / scale.item() == pytest.approx(4.48e14) and zeros.float().tolist() == [0] * 4


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_the_multiplier_is_the_float64_quotient_rounded_once(dtype):
    amaxes = normal(10_000).abs()
    exact = [LIMIT[dtype] / amax for amax in amaxes.tolist()]
    exact = torch.tensor(exact, dtype=torch.float64).float()
    assert torch.equal(fp8.multiplier(amaxes, dtype), exact)


def test_shards_of_one_weight_share_a_multiplier_and_two_weights_do_not():
    shards = [torch.tensor([1.0, -3.0]), torch.tensor([0.5, 0.25])]
    amaxes = torch.stack([shard.abs().max() for shard in shards])
    assert fp8.multiplier(amaxes.max(), E4M3).item() == pytest.approx(149.33333, abs=1e-4)
    assert fp8.multiplier(amaxes, E4M3).tolist() == pytest.approx([149.33333, 896], abs=1e-4)


def test_signal_to_noise_of_the_formats_is_that_of_the_tables():
    x = normal(512, 512)
    assert decibels(fp8_values(x, E4M3), x) == pytest.approx(31.6, abs=0.3)
    assert decibels(fp8_values(x, E5M2), x) == pytest.approx(25.6, abs=0.3)
    assert decibels(values(nvfp4.to_blocks(x)), x) == pytest.approx(20.4, abs=0.3)
    assert decibels(values(nvfp4.to_blocks(x, square=True)), x) == pytest.approx(19.1, abs=0.3)


@pytest.mark.parametrize("has_fp8", [True, False])
def test_fp8_products_of_whole_numbers_with_scale_one_are_exact_to_the_bit(has_fp8):
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (32, 48), generator=draw).float()
    w = torch.randint(-2, 3, (32, 48), generator=draw).float()
    g = torch.randint(-1, 2, (32, 32), generator=draw).float()
    x[0, 0], w[0, 0], g[0, 0] = 448, 448, 57344  # all scales are 1
    y, dx, dw, seen = three_products("fp8", x, w, g, has_fp8)
    assert torch.equal(y, x @ w.T) and torch.equal(dx, g @ w) and torch.equal(dw, g.T @ x)
    assert seen.tolist() == [1, 448, 57344]  # of the weight it is the scale


def test_native_and_emulated_fp8_differ_by_the_order_of_summation_only():
    operands = normal(128, 96), normal(64, 96, seed=1), normal(128, 64, seed=2)
    native = three_products("fp8", *operands, has_fp8=True)
    emulated = three_products("fp8", *operands, has_fp8=False)
    for a, b in zip(native, emulated):
        assert distance(a, b) < 1e-6


def test_fp8_keeps_both_operands_in_8_bits_for_backward_and_gradients_have_the_activations_dtype():
    saved = []
    w = normal(64, 96, dtype=torch.bfloat16).requires_grad_()
    x = normal(128, 96, dtype=torch.bfloat16).requires_grad_()
    product = make_product("fp8", w)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = product(x, w)
    y.sum().backward()
    matrices = [(x.itemsize, x.shape) for x in saved if x.ndim == 2]
    assert matrices == [(1, (128, 96)), (1, (64, 96))]
    assert y.dtype == x.grad.dtype == w.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_a_product_for_chosen_rows_of_the_weight_has_the_scale_of_all(recipe):
    x, w, rows = normal(64, 48), normal(64, 48, seed=1), torch.arange(0, 64, 4)
    w[1] *= 9  # a row that is not chosen has the amax
    product = make_product(recipe, w)
    y = product.for_rows(rows)(x, w[rows])
    if recipe == "fp8":
        assert distance(y, fp8_values(x) @ fp8_values(w)[rows].T) < 1e-6
    else:  # which keeps no weights: these 16 rows have scales of their own
        chosen = values(nvfp4.to_blocks(w[rows], square=True))
        assert distance(y, values(nvfp4.to_blocks(x)) @ chosen.T) < 1e-6


# ------------------------------------------------------------------------------------- fp8 weights

WIDTH = 32
BANKS = {
    "qkvo": (8, WIDTH, WIDTH), "mlp": (4, WIDTH, 64), "lm_head": (96, WIDTH)}
SITES = []
for layer in range(2):
    SITES.append(Site(layer, "qkv", "qkvo", 4 * layer, 3))
    SITES.append(Site(layer, "o", "qkvo", 4 * layer + 3, 1))
    SITES.append(Site(layer, "up", "mlp", 2 * layer, 1))
    SITES.append(Site(layer, "down", "mlp", 2 * layer + 1, 1))
SITES.append(Site(2, "lm_head", "lm_head", 0, 90))  # six rows pad it to four ranks


def whole_weights(seed=0):
    """Float32 banks whose rows differ much in size; those of no site are the largest."""
    weights = {}
    for number, (name, shape) in enumerate(BANKS.items()):
        size = torch.arange(1, 1 + shape[0]).view(-1, *[1] * (len(shape) - 1))
        weights[name] = size * normal(*shape, seed=seed + number)
    return weights


def fp8_recipe(all_gather=False):
    banks = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in BANKS.items()}
    return fp8.FP8(SITES, banks, Measurements(SITES, CPU), all_gather)


def give_weights(recipe, weights, names=tuple(BANKS)):
    """As the optimizer does: updates this rank's rows, hands them out, tells the recipe."""
    masters = {}
    for name in names:
        masters[name] = recipe.own_rows(weights[name])
        if recipe.hands_out(name):
            recipe.own_rows(recipe.banks[name]).copy_(masters[name])
        else:
            recipe.banks[name].copy_(weights[name])
    for name in BANKS:
        masters.setdefault(name, recipe.own_rows(recipe.banks[name]).float())
    return recipe.weights_changed(names, masters)


def weight_of(site, banks):
    """The weight (N, K) of a site, as a test has it: from the shapes of BANKS."""
    bank = banks[site.bank]
    weight = bank[site.first_row : site.first_row + site.num_rows].reshape(-1, bank.shape[-1])
    return weight.T if site.projection in ("o", "up") else weight


def rounded(weight):
    """e4m3 numbers, as float32, and their scale."""
    multiplier = torch.tensor(448 / weight.double().abs().max().item(), dtype=torch.float64).float()
    numbers = (weight.float() * multiplier).clamp(-448, 448).to(E4M3).float()
    return numbers, (1 / multiplier.double()).float()


def product_weights(product):
    return product.weight_bytes.view(E4M3).float(), product.weight_scale


def check_weights(recipe, banks):
    """The products of all sites read what rounding these whole banks gives, to the bit."""
    for site in SITES:
        numbers, scale = product_weights(recipe.product(site))
        expected, expected_scale = rounded(weight_of(site, banks))
        assert torch.equal(numbers, expected) and scale == expected_scale, site
        assert scale.data_ptr() % 16 == 0


def test_fp8_weights_are_those_of_the_bf16_banks_rounded_for_each_site():
    recipe = fp8_recipe()
    weights = whole_weights()
    assert give_weights(recipe, weights) == 0
    check_weights(recipe, {name: w.bfloat16() for name, w in weights.items()})
    assert not any(recipe.hands_out(name) for name in BANKS)


def test_fp8_weights_change_in_place_and_only_those_of_the_named_banks():
    recipe = fp8_recipe()
    weights = whole_weights()
    give_weights(recipe, weights)
    products = {site.projection: recipe.product(site) for site in SITES[4:]}
    before = {name: product_weights(product)[0].clone() for name, product in products.items()}
    scale = products["lm_head"].weight_scale.clone()
    give_weights(recipe, whole_weights(seed=9), ["qkvo", "mlp"])
    for name, product in products.items():
        assert torch.equal(product_weights(product)[0], before[name]) == (name == "lm_head")
    assert products["lm_head"].weight_scale == scale


def test_there_are_no_fp8_weights_before_the_first_update():
    product = fp8_recipe().product(SITES[1])
    y = product(normal(16, WIDTH), normal(WIDTH, WIDTH))
    assert y.isnan().all()


def test_a_weight_that_is_not_finite_is_seen_and_spoils_no_other_site():
    for bad in (math.nan, math.inf):
        recipe = fp8_recipe()
        weights = whole_weights()
        weights["qkvo"][3, 2, 3] = bad
        give_weights(recipe, weights)
        scales = [recipe.product(site).weight_scale.item() for site in SITES]
        assert [site.label() for site, scale in zip(SITES, scales) if math.isnan(scale)] == [
            "layer 0's o"]


# ------------------------------------------------------------------------------------------- nvfp4


def test_nvfp4_gives_the_known_answers():
    x = torch.cat([torch.arange(16) * 0.5, torch.arange(16) * 0.1])[None].float()
    blocks = nvfp4.to_blocks(x)
    numbers = [0, 0.5, 1, 1, 1.5, 2, 2, 3, 3, 4, 4, 4, 4, 6, 6, 6]
    assert blocks.amax == 7.5 and blocks.scales.flatten().tolist() == [448, 88]
    assert blocks.numbers.flatten().tolist() == numbers * 2
    first = [0, 0.625, 1.25, 1.25, 1.875, 2.5, 2.5, 3.75, 3.75, 5, 5, 5, 5, 7.5, 7.5, 7.5]
    assert values(blocks)[0, :16].tolist() == pytest.approx(first, rel=1e-6)


def test_nvfp4_of_nothing_is_nothing_and_tiny_blocks_beside_large_ones_vanish():
    zero = nvfp4.to_blocks(torch.zeros(16, 32))
    assert not values(zero).any() and not nvfp4.multiply(zero, zero, torch.float32).any()
    x = torch.ones(1, 32)
    x[0, 16:] = 1e-6
    expected = [pytest.approx([1.0] * 16 + [0.0] * 16, rel=1e-6)]
    assert values(nvfp4.to_blocks(x)).tolist() == expected


def test_square_blocks_carry_the_same_numbers_in_the_transpose_and_rows_of_16_do_not():
    w = normal(64, 96)
    one = nvfp4.to_blocks(w, square=True)
    other = nvfp4.to_blocks(w.t(), square=True)
    assert torch.equal(one.numbers.permute(2, 3, 0, 1), other.numbers)
    assert torch.equal(one.scales.permute(2, 3, 0, 1), other.scales)
    assert torch.equal(values(one).T, values(other))
    assert not torch.equal(values(nvfp4.to_blocks(w)).T, values(nvfp4.to_blocks(w.t())))


def test_the_transform_spreads_one_number_over_its_block_and_cancels_in_wgrad():
    x = torch.zeros(1, 32)
    x[0, 3] = 4
    spread = [-1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1]
    assert nvfp4.hadamard(x).tolist() == [spread + [0] * 16]
    x, g = normal(256, 48), normal(256, 32, seed=1)
    transformed = nvfp4.hadamard(g.T).double() @ nvfp4.hadamard(x.T).double().T
    assert distance(transformed, g.double().T @ x.double()) < 1e-6
    assert distance(nvfp4.hadamard(x.T).norm(), x.norm()) < 1e-6


def test_the_transforms_signs_are_those_of_transformer_engine():
    signs = [+1, +1, +1, -1, +1, -1, -1, -1, -1, -1, -1, +1, -1, +1, -1, -1]
    assert (4 * nvfp4.hadamard(torch.eye(16))[:, 0]).tolist() == signs  # H's first column is ones


def test_nvfp4_products_equal_those_of_the_hardware_block_by_block():
    a = nvfp4.to_blocks(normal(32, 64))
    b = nvfp4.to_blocks(normal(48, 64, seed=1), square=True)
    b_scales = b.scales.expand(-1, 16, -1, -1).reshape(48, 1, 4, 1)
    total = torch.zeros(32, 48)
    for k in range(4):  # as the tensor core: float32 sums of blocks of 16, times both block scales
        part = a.numbers.view(32, 4, 16)[:, k] @ b.numbers.view(48, 4, 16)[:, k].T
        total += a.scales[:, 0, k] * b_scales[:, 0, k].T * part
    expected = total * (a.amax * b.amax / (36 * 448 * 448))
    assert distance(nvfp4.multiply(a, b, torch.float32), expected) < 1e-6


def test_each_part_of_nvfp4_can_be_left_out():
    x, w, g = normal(64, 48), normal(32, 48, seed=1), normal(64, 32, seed=2)

    def products_with(*parts):
        torch.manual_seed(0)
        leave_out = tuple({*nvfp4.PARTS} - {*parts})
        return three_products("nvfp4", x, w, g, leave_out=leave_out)[:3]

    def rounded(x):
        return values(nvfp4.to_blocks(x))

    y, dx, dw = products_with()  # each product of the operands rounded along its own sum
    assert distance(y, rounded(x) @ rounded(w).T) < 1e-6
    assert distance(dx, rounded(g) @ rounded(w.T).T) < 1e-6
    assert distance(dw, rounded(g.T) @ rounded(x.T).T) < 1e-6
    equal_without = {}
    for part in nvfp4.PARTS:
        with_part = products_with(part)
        equal_without[part] = [torch.equal(a, b) for a, b in zip(with_part, (y, dx, dw))]
    assert equal_without == {
        "2d": [False, False, True], "sr": [True, False, False], "rht": [True, True, False]}


# ------------------------------------------------------------------------------ both fp8 and nvfp4


def call(product, x, w):
    return product(x, w)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_a_gpu_gives_the_products_of_the_cpu_but_for_the_order_of_summation(recipe, compiled):
    function = torch.compile(call, fullgraph=True, dynamic=False) if compiled else call
    operands = normal(256, 96), normal(64, 96, seed=1), normal(256, 64, seed=2)
    on_cpu = three_products(recipe, *operands, has_fp8=False, leave_out=("sr",))
    x, w, g = (operand.cuda().requires_grad_() for operand in operands)
    product = make_product(recipe, w, kernels.has_fp8(w.device), leave_out=("sr",))
    y = function(product, x, w)
    y.backward(g.detach())
    # Another order of summation moves few numbers over a tie of the transformed operands, and
    # Hopper sums fprop in fewer bits.
    bounds = (2e-3, 1e-3, 1e-2 if recipe == "nvfp4" else 1e-3)
    for ours, exact, bound in zip((y, x.grad, w.grad), on_cpu, bounds):
        assert distance(ours.detach().cpu(), exact) < bound


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_a_compiled_product_is_the_eager_one_and_other_sites_compile_nothing(recipe):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False)
    measurements = Measurements(SITES[:3], CPU)
    for number, site in enumerate(measurements.sites):
        x, w, g = normal(64, 48, seed=number), normal(32, 48), normal(64, 32)
        results = []
        for function in (call, compiled):
            x, w = (operand.detach().clone().requires_grad_() for operand in (x, w))
            product = make_product(recipe, w, leave_out=("sr",))
            product.seen = measurements.seen(site)
            measurements.reset()
            y = function(product, x, w)
            y.backward(g)
            results.append((y, x.grad, w.grad, measurements.amaxes.clone()))
        for eager, ours in zip(*results):
            assert torch.equal(eager, ours)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert measurements.amaxes[number].all() and measurements.amaxes.count_nonzero() == 3


@pytest.mark.parametrize("recipe, has_fp8, error", [  # decibels of x, w and the gradient
    ("fp8", True, (31.6, 31.6, 25.6)),
    ("fp8", False, (31.6, 31.6, 25.6)),
    ("nvfp4", False, (20.4, 19.1, 16.4)),  # rounding at random costs 4 more
])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_those_of_float64_within_the_error_of_the_format(
        recipe, has_fp8, error, dtype):
    torch.manual_seed(0)
    x, w, g = normal(256, 96), normal(64, 96, seed=1), normal(256, 64, seed=2)
    x[3] *= 20  # an outlier
    exact = x.double() @ w.double().T, g.double() @ w.double(), g.double().T @ x.double()
    ours = three_products(recipe, x.to(dtype), w.to(dtype), g.to(dtype), has_fp8)[:3]
    assert all(a.dtype == dtype for a in ours)
    x_error, w_error, g_error = (10 ** (-db / 20) for db in error)
    errors = (x_error, w_error), (g_error, w_error), (g_error, x_error)
    for a, b, of_operands in zip(ours, exact, errors):
        bound = 1.15 * math.hypot(*of_operands)
        assert bound / 1.5 < distance(a, b) < bound
        assert F.cosine_similarity(a.double().flatten(), b.flatten(), dim=0) > 1 - bound**2


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_makes_no_zeros_and_is_seen(recipe, bad, culprit):
    w, x, g = operands = normal(32, 48, seed=1), normal(64, 48), normal(64, 32, seed=2)
    operands[culprit][5, 7] = bad
    y, dx, dw, seen = three_products(recipe, x, w, g)
    assert seen.isfinite().tolist() == [index != culprit for index in range(3)]
    touched = {0: (y, dx), 1: (y, dw), 2: (dx, dw)}[culprit]
    assert not any(a.isfinite().any() for a in touched), "no scale, no numbers"


# ------------------------------------------------------------------------------------ measurements


def fault(layer, name, kind):
    """Places in `amaxes` where something was not finite."""
    return [(site.layer, site.projection) for site in SITES].index((layer, name)), kind


@pytest.mark.parametrize("faults, sentence", [
    ([], ""),
    ([fault(1, "up", 0), fault(1, "down", 0), fault(0, "qkv", 1), fault(2, "lm_head", 2)],
     ", weight of layer 1's up not finite"),
    ([fault(1, "o", 1), fault(1, "up", 1), fault(0, "qkv", 2)],
     ", input of layer 1's o not finite"),
    ([fault(0, "qkv", 2), fault(0, "o", 2), fault(1, "down", 2)],
     ", gradient of layer 1's down not finite"),
    ([fault(2, "lm_head", 1), fault(2, "lm_head", 2)], ", input of lm_head not finite"),
])
def test_the_culprit_is_the_first_weight_or_input_and_else_the_last_gradient(faults, sentence):
    measurements = Measurements(SITES, CPU)
    for row, kind in faults:
        measurements.amaxes[row, kind] = math.nan
    flags = 2 * measurements.faults()  # the sum over two ranks
    assert measurements.culprit(flags.tolist()) == sentence
    measurements.reset()
    assert not measurements.faults().any()


def test_a_sum_of_amaxes_that_was_once_infinite_stays_so():
    measurements = Measurements(SITES, CPU)
    seen = measurements.seen(SITES[4])
    for amax in (1.0, math.inf, 2.0, -math.inf, 3.0):
        (seen * torch.tensor([1.0, amax, 1.0])).sum().backward()
    assert measurements.faults().nonzero().tolist() == [[3 * 4 + 1]]
    assert measurements.amaxes[4, 0] == 5


# -------------------------------------------------------------------------------------------- fp16


def test_the_loss_scale_follows_the_rule():
    scale, good_steps, trace = 2.0**15, 0, {}
    for step in range(4002):
        scale, good_steps = fp16.next_loss_scale(scale, good_steps, step > 1)
        trace[step] = scale
    assert (trace[0], trace[1], trace[2000], trace[2001]) == (16384, 8192, 8192, 16384)
    assert (trace[4000], trace[4001]) == (16384, 32768)
    for _ in range(40):
        scale, good_steps = fp16.next_loss_scale(scale, good_steps, False)
    assert (scale, good_steps) == (1, 0)
    assert fp16.next_loss_scale(2.0**127, 1999, True)[0] == 2.0**127


def test_the_factor_of_the_loss_is_for_its_mean_and_stays_at_its_place():
    scaling = fp16.LossScaling(CPU, 256)
    factor = scaling.factor
    loss = torch.tensor(256 * math.log(65))
    assert scaling.scale_loss(loss).item() == pytest.approx(136_786, rel=1e-4)  # beyond fp16
    assert not scaling.gradients_are_finite(lambda: [torch.ones(3), torch.tensor([1, math.nan])])
    assert scaling.factor is factor and factor == 2.0**14 / 256
    scaling.reset()
    assert scaling.factor is factor and factor == 2.0**15 / 256


def test_gradients_are_unscaled_by_the_factor_they_were_scaled_by():
    scaling = fp16.LossScaling(CPU, 300)  # near 2^8
    scaling.good_steps = 1999  # the scale doubles after this step
    gradient = normal(9)
    scaled = scaling.scale_loss(gradient)
    assert scaling.gradients_are_finite(lambda: [scaled])
    assert scaling.scale == 2.0**16 and scaling.good_steps == 0
    assert torch.equal(scaling.unscale(scaled), gradient)
    assert scaling.unscale(scaled.half()).dtype == torch.float32


def test_the_note_counts_the_steps_that_were_skipped():
    scaling = fp16.LossScaling(CPU, 256)
    for bad in (1.0, math.inf, 1.0, -math.inf, math.nan):
        scaling.gradients_are_finite(lambda bad=bad: [torch.tensor([bad])])
    assert scaling.note() == "3 steps skipped, loss scale 4096"


# ------------------------------------------------------------------------ what cannot be, and hooks


def test_a_recipe_that_does_nothing_changes_nothing():
    recipe, x = Recipe(), torch.ones(2)
    assert recipe.scale_loss(x) is x and recipe.unscale(x) is x
    assert recipe.gradients_are_finite(lambda: [torch.tensor(math.nan)])
    assert recipe.weights_changed(["qkvo"], {}) == 0 and not recipe.hands_out("qkvo")
    assert recipe.reset() is None and recipe.before_validation() is None and recipe.note() is None


def test_several_recipes_act_as_one():
    names = [dict(qkv="fp8", o="nvfp4", up="fp8-static", down="fp16")] * 2 + [dict(lm_head="fp8")]
    banks = {name: torch.zeros(shape) for name, shape in BANKS.items()}
    recipes = Recipes(names, SITES, banks, t.Config(precision="fp16", seq_len=256, nvfp4_without="sr,2d"))
    assert isinstance(recipes.product(1, "qkv", "fp8"), fp8.FP8Product)
    product = recipes.product(0, "o", "nvfp4")
    assert (product.square, product.stochastic, product.transform) == (False, False, True)
    measured = [(site.layer, site.projection) for site in recipes.measurements.sites]
    assert measured == [(0, "qkv"), (0, "o"), (1, "qkv"), (1, "o"), (2, "lm_head")]
    assert recipes.scale_loss(torch.tensor(256.0)) == 2**15
    assert not recipes.gradients_are_finite(lambda: [torch.tensor(math.inf)])
    assert recipes.unscale(torch.tensor(2.0**15)) == 256
    assert recipes.notes() == ["1 steps skipped, loss scale 16384"]
    recipes.measurements.amaxes.fill_(math.inf)
    recipes.reset()
    assert not recipes.measurements.faults().any()
    assert recipes.scale_loss(torch.tensor(256.0)) == 2**15
    assert recipes.weights_changed(["qkvo"], {}) == 0 and not recipes.hands_out("qkvo")


@pytest.mark.parametrize("check, arguments, sentence", [
    (nvfp4.check, ("up", (64, 120)), "up of 64 x 120 cannot be nvfp4, .* multiples of 16 only; "),
    (nvfp4.check, ("lm_head", (40, 64)), "lm_head of 40 x 64 cannot be nvfp4"),
    (nvfp4.parts_to_leave_out, ("rht,2D",), "--nvfp4_without=rht,2D: 2D is none of rht, sr, 2d"),
    (fp8.check_all_gather, ("qkv", (64, 64), "bf16", 0.0),
     "--float8_all_gather needs fp8 in all layers and steps, .* qkv is bf16; .* --precision=fp8"),
    (fp8.check_all_gather, ("up", (64, 120), "fp8", 0.0),
     "--float8_all_gather .* up of 64 x 120 cannot be fp8, .* multiples of 16 only; "),
    (fp8.check_all_gather, ("up", (64, 128), "fp8", 0.1),
     "--float8_all_gather needs .* --bf16_last_frac is 0.1; set it to 0"),
    (fp16.check, ("o", "fp8-static"),
     "o is fp8-static, which does not go with fp16's scaled loss; "),
])
def test_what_cannot_be_gets_one_sentence(check, arguments, sentence):
    with pytest.raises(BadInput, match=f"^{sentence}"):
        check(*arguments)


def test_what_can_be_is_not_refused():
    nvfp4.check("up", (64, 128))
    assert nvfp4.parts_to_leave_out("") == () and nvfp4.parts_to_leave_out("2d,sr") == ("2d", "sr")
    fp8.check_all_gather("up", (64, 128), "fp8", 0.0)
    fp16.check("lm_head", "fp8-static")
    fp16.check("o", "fp16")


# ------------------------------------------------------------------------------------------- ranks

RANKS = """
import math
import sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from nanogpt.precision import fp8, fp16
import test_recipes as test

def work(rank, world_size, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    calls, all_reduce, all_gather = [], dist.all_reduce, fp8.all_gather

    def reduce(tensor, op=dist.ReduceOp.SUM, **options):
        calls.append(("max" if op == dist.ReduceOp.MAX else "sum", tensor.dtype, tensor.numel()))
        return all_reduce(tensor, op, **options)

    def gather(whole, part, **options):
        calls.append(("gather", part.dtype, part.numel()))
        return all_gather(whole, part, **options)

    dist.all_reduce, fp8.all_gather = reduce, gather
    result = {}
    for gathers in (False, True):
        recipe = test.fp8_recipe(gathers)
        sent = test.give_weights(recipe, test.whole_weights())
        step = list(calls)
        calls.clear()
        recipe.before_validation()
        products = [test.product_weights(recipe.product(site)) for site in test.SITES]
        result[gathers] = dict(
            products=products, wide=recipe.banks, sent=sent, step=step, fetches=list(calls))
        calls.clear()
    scaling = fp16.LossScaling(test.CPU, 256)
    answers = []
    for bad_rank in (None, 0, world_size - 1):
        bad = math.inf if rank == bad_rank else 1.0
        answers.append(scaling.gradients_are_finite(lambda bad=bad: [torch.ones(5), torch.tensor([bad, 0])]))
    result["fp16"] = dict(answers=answers, scale=scaling.scale, calls=calls)
    torch.save(result, f"{folder}/{world_size}-{rank}")
    dist.destroy_process_group()

for world_size in (1, 2, 4):
    mp.start_processes(work, (world_size, sys.argv[1]), world_size, start_method="fork")
"""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Number of ranks -> what each one had. One process imports torch and forks all ranks."""
    folder = tmp_path_factory.mktemp("worlds")
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here.parent}:{here}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", RANKS, folder], env=environment, timeout=120,
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return {n: [torch.load(folder / f"{n}-{rank}") for rank in range(n)] for n in (1, 2, 4)}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("gathers", [False, True])
def test_fp8_weights_of_every_rank_are_the_rounded_whole_weights_to_the_bit(
        worlds, world_size, gathers):
    weights = whole_weights()
    wide = {name: w.bfloat16() for name, w in weights.items()}
    for rank in worlds[world_size]:
        for site, (numbers, scale) in zip(SITES, rank[gathers]["products"]):
            source = weights if gathers else wide  # float32 masters, or what all ranks have
            expected, expected_scale = rounded(weight_of(site, source))
            assert torch.equal(numbers, expected) and scale == expected_scale, site
        for name, bank in rank[gathers]["wide"].items():
            assert torch.equal(bank, wide[name]), "validation needs the wide weights of all ranks"


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_update_reduces_one_vector_of_amaxes_and_gathers_bytes(worlds, world_size):
    for rank in worlds[world_size]:
        assert rank[False]["step"] == rank[False]["fetches"] == [] and rank[False]["sent"] == 0
        sizes = {name: math.prod(shape) for name, shape in BANKS.items()}
        gathers = [("gather", torch.uint8, size // world_size) for size in sizes.values()]
        assert rank[True]["step"] == [("max", torch.float32, len(SITES) + 1), *gathers]
        assert rank[True]["sent"] == sum(sizes.values())
        del sizes["lm_head"]  # which the optimizer hands out
        fetches = [("gather", torch.bfloat16, size // world_size) for size in sizes.values()]
        assert rank[True]["fetches"] == fetches


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_gradient_that_overflows_on_one_rank_makes_all_skip_the_step(worlds, world_size):
    for rank in worlds[world_size]:
        assert rank["fp16"]["answers"] == [True, False, False] and rank["fp16"]["scale"] == 2**13
        reductions = [] if world_size == 1 else [("max", torch.float32, 1)] * 3
        assert rank["fp16"]["calls"] == reductions
