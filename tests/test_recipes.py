"""The recipes of low precision, each by itself: rounding, the three products, FP8 weights, the loss
scale.

References: the formats' numbers, listed from their definition and rounded to by search; PyTorch's
own FP8 casts; worked examples (of NVFP4 and Float8Linear); and products in float64.
"""
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import distance, normal
from test_kernels import nearest

from nanogpt import kernels
from nanogpt.kernels import E4M3, E5M2
from nanogpt.precision import fp8, fp16, nvfp4
from nanogpt.precision.rounding import E2M1_GRID, inverse, round_to

CPU = torch.device("cpu")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LIMIT = {E4M3: 448.0, E5M2: 57344.0}


def to_fp8(x, dtype, has_fp8=True):
    """x rounded with its own scale, and that scale."""
    multiplier = fp8.multiplier_of(x.abs().amax().float(), dtype)
    return fp8.to_fp8(x, multiplier, dtype, has_fp8), inverse(multiplier)


def fp8_values(x, dtype=E4M3):
    """float64 values that a rounded tensor stands for."""
    x8, scale = to_fp8(x, dtype)
    return x8.double() * scale.double()


def values(rounded):
    """float64 values (R, K) that numbers of nvfp4 stand for."""
    numbers, scale = rounded
    return numbers.double() * scale.double()


def make_products(recipe, w, has_fp8=True):
    """Those of one weight by a recipe that measures its scales."""
    if recipe == "nvfp4":
        return nvfp4.NVFP4Products()
    w8, scale = to_fp8(w.detach(), E4M3)
    return fp8.FP8Products(w8.view(torch.uint8), scale, has_fp8)


def three_products(recipe, x, w, g, has_fp8=True):
    """y, dx, dw of a projection. What is rounded at random is the same each time."""
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    w = w.clone().requires_grad_()
    y = make_products(recipe, w, has_fp8).linear(x, w)
    y.backward(g)
    return y.detach(), x.grad, w.grad


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
    assert torch.equal(round_to(x, E2M1_GRID), nearest(x, E2M1))


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


def test_fp8_keeps_both_operands_in_8_bits_for_backward_and_gradients_have_the_activations_dtype():
    saved = []
    w = normal(64, 96, dtype=torch.bfloat16).requires_grad_()
    x = normal(128, 96, dtype=torch.bfloat16).requires_grad_()
    products = make_products("fp8", w)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = products.linear(x, w)
    y.sum().backward()
    matrices = [(x.itemsize, x.shape) for x in saved if x.ndim == 2]
    assert matrices == [(1, (128, 96)), (1, (64, 96))]
    assert y.dtype == x.grad.dtype == w.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_a_product_for_chosen_rows_of_the_weight_has_the_scale_of_all(recipe):
    x, w, rows = normal(64, 48), normal(64, 48, seed=1), torch.arange(0, 64, 4)
    w[1] *= 9  # a row that is not chosen has the amax
    y = make_products(recipe, w).for_rows(rows).linear(x, w[rows])
    if recipe == "fp8":
        assert distance(y, fp8_values(x) @ fp8_values(w)[rows].T) < 1e-6
    else:  # which keeps no weights: these 16 rows have scales of their own
        chosen = values(nvfp4.to_fp4(w[rows], square=True))
        assert distance(y, values(nvfp4.to_fp4(x)) @ chosen.T) < 1e-6


# ------------------------------------------------------------------------------------------- nvfp4


def test_nvfp4_gives_the_known_answers():
    x = torch.cat([torch.arange(16) * 0.5, torch.arange(16) * 0.1])[None].float()
    rounded, scale = nvfp4.to_fp4(x)
    numbers = torch.tensor([0, 0.5, 1, 1, 1.5, 2, 2, 3, 3, 4, 4, 4, 4, 6, 6, 6])
    assert scale == torch.tensor(7.5) / (6 * 448) and rounded.dtype == torch.bfloat16
    assert rounded[0].tolist() == [*(448 * numbers), *(88 * numbers)]  # each block has a scale
    first = [0, 0.625, 1.25, 1.25, 1.875, 2.5, 2.5, 3.75, 3.75, 5, 5, 5, 5, 7.5, 7.5, 7.5]
    assert values((rounded, scale))[0, :16].tolist() == pytest.approx(first, rel=1e-6)


def test_nvfp4_of_nothing_is_nothing_and_tiny_blocks_beside_large_ones_vanish():
    zeros = torch.zeros(16, 32)
    assert not values(nvfp4.to_fp4(zeros)).any() and not nvfp4.NVFP4Linear.apply(zeros, zeros).any()
    x = torch.ones(1, 32)
    x[0, 16:] = 1e-6
    expected = [pytest.approx([1.0] * 16 + [0.0] * 16, rel=1e-6)]
    assert values(nvfp4.to_fp4(x)).tolist() == expected


def test_the_transform_spreads_one_number_over_its_block_and_cancels_in_wgrad():
    x = torch.zeros(1, 32)
    x[0, 3] = 4
    spread = [-1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1]
    assert nvfp4.hadamard(x).tolist() == [spread + [0] * 16]
    x, g = normal(256, 48), normal(256, 32, seed=1)
    transformed = nvfp4.hadamard(g.T).double() @ nvfp4.hadamard(x.T).double().T
    assert distance(transformed, g.double().T @ x.double()) < 1e-6
    assert distance(nvfp4.hadamard(x.T).norm(), x.norm()) < 1e-6


def test_nvfp4_multiplies_square_blocks_gradients_rounded_at_random_and_a_transformed_wgrad():
    x, w, g = normal(64, 48), normal(32, 48, seed=1), normal(64, 32, seed=2)
    y, dx, dw = three_products("nvfp4", x, w, g)
    torch.manual_seed(0)
    drawn, drawn_t = (
        values(nvfp4.to_fp4(a, stochastic=True)) for a in (g, nvfp4.hadamard(g.T)))
    square = values(nvfp4.to_fp4(w, square=True))
    assert distance(y, values(nvfp4.to_fp4(x)) @ square.T) < 1e-6
    assert distance(dx, drawn @ square) < 1e-6
    assert distance(dw, drawn_t @ values(nvfp4.to_fp4(nvfp4.hadamard(x.T))).T) < 1e-6


# ------------------------------------------------------------------------------ both fp8 and nvfp4


def call(products, x, w):
    return products.linear(x, w)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe, bound", [("fp8", 2e-3), ("nvfp4", 0.3)])
def test_a_gpu_gives_the_products_of_the_cpu_but_for_summation_and_chance(recipe, compiled, bound):
    """Hopper sums fprop of fp8 in fewer bits, and nvfp4 rounds gradients by other random numbers."""
    function = torch.compile(call, fullgraph=True, dynamic=False) if compiled else call
    operands = normal(256, 96), normal(64, 96, seed=1), normal(256, 64, seed=2)
    on_cpu = three_products(recipe, *operands, has_fp8=False)
    x, w, g = (operand.cuda().requires_grad_() for operand in operands)
    y = function(make_products(recipe, w, kernels.has_fp8(w.device)), x, w)
    y.backward(g.detach())
    assert distance(y.detach().cpu(), on_cpu[0]) < 2e-3
    for ours, exact in zip((x.grad, w.grad), on_cpu[1:]):
        assert distance(ours.cpu(), exact) < bound


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_a_compiled_product_is_the_eager_one_and_another_weight_compiles_nothing(recipe):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False)
    for seed in range(2):
        results = []
        for function in (call, compiled):
            torch.manual_seed(0)
            x = normal(64, 48, seed=seed).requires_grad_()
            w = normal(32, 48, seed=seed + 5).requires_grad_()
            y = function(make_products(recipe, w), x, w)
            y.backward(normal(64, 32))
            results.append((y, x.grad, w.grad))
        assert all(torch.equal(eager, ours) for eager, ours in zip(*results))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("recipe, has_fp8, error", [  # decibels of x, w and the gradient
    ("fp8", True, (31.6, 31.6, 25.6)),
    ("fp8", False, (31.6, 31.6, 25.6)),
    ("nvfp4", False, (20.4, 19.1, 16.4)),  # rounding at random costs 4 more
])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_those_of_float64_within_the_error_of_the_format(
        recipe, has_fp8, error, dtype):
    x, w, g = normal(256, 96), normal(64, 96, seed=1), normal(256, 64, seed=2)
    x[3] *= 20  # an outlier
    exact = x.double() @ w.double().T, g.double() @ w.double(), g.double().T @ x.double()
    ours = three_products(recipe, x.to(dtype), w.to(dtype), g.to(dtype), has_fp8)
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
def test_what_is_not_finite_makes_no_zeros(recipe, bad, culprit):
    w, x, g = operands = normal(32, 48, seed=1), normal(64, 48), normal(64, 32, seed=2)
    operands[culprit][5, 7] = bad
    y, dx, dw = three_products(recipe, x, w, g)
    touched = {0: (y, dx), 1: (y, dw), 2: (dx, dw)}[culprit]
    assert not any(a.isfinite().any() for a in touched), "no scale, no numbers"


# -------------------------------------------------------------------------------------------- fp16


def test_the_loss_scale_follows_the_rule():
    scaling, trace = fp16.LossScaling(CPU, 1), {}
    gradient = torch.full((1,), math.inf)
    for step in range(4002):
        if step == 2:
            gradient.zero_()
        scaling.keeps_step(lambda: [gradient])
        trace[step] = scaling.scale
    gradient.fill_(math.nan)
    assert (trace[0], trace[1], trace[2000], trace[2001]) == (16384, 8192, 8192, 16384)
    assert (trace[4000], trace[4001]) == (16384, 32768)
    for _ in range(40):
        scaling.keeps_step(lambda: [gradient])
    assert (scaling.scale, scaling.good_steps, scaling.skipped_steps) == (1, 0, 42)


def test_the_factor_of_the_loss_is_for_its_mean_stays_at_its_place_and_comes_back_with_a_save():
    scaling, resumed = fp16.LossScaling(CPU, 256), fp16.LossScaling(CPU, 256)
    factor = scaling.factor
    loss = torch.tensor(256 * math.log(65))
    assert scaling.scale_loss(loss).item() == pytest.approx(136_786, rel=1e-4)  # beyond fp16
    assert not scaling.keeps_step(lambda: [torch.ones(3), torch.tensor([1, math.nan])])
    assert scaling.keeps_step(lambda: [torch.ones(3)])
    assert scaling.factor is factor and factor == 2.0**14 / 256
    assert scaling.state() == dict(scale=2.0**14, good_steps=1, skipped_steps=1)
    resumed.load_state(scaling.state())
    assert resumed.state() == scaling.state() and resumed.factor == factor
    scaling.reset()
    assert scaling.factor is factor and factor == 2.0**15 / 256
    assert scaling.state() == dict(scale=2.0**15, good_steps=0, skipped_steps=0)


def test_gradients_are_unscaled_by_the_factor_they_were_scaled_by():
    scaling = fp16.LossScaling(CPU, 300)  # near 2^8
    scaling.good_steps = 1999  # the scale doubles after this step
    gradient = normal(9)
    scaled = scaling.scale_loss(gradient)
    assert scaling.keeps_step(lambda: [scaled])
    assert scaling.scale == 2.0**16 and scaling.good_steps == 0
    assert torch.equal(scaling.unscale(scaled), gradient)
    small = scaling.unscale(torch.tensor([2.0**-23]).half())
    assert small.dtype == torch.float32 and small == 2.0**-30, "fp16 ends at 2^-24"
