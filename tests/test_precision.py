"""Recipes of low precision in the model: constant scales, what is kept between steps, the ranks, the switch. The
recipes of nanogpt/ by themselves are tested in test_recipes.py.

References: the formats' values listed from their definition and rounded to by search, products in float64, and gloo
processes whose FP8 weights are compared with a quantiser written here.
"""
import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import arguments

import train_gpt as t

CPU = torch.device("cpu")
ALL = ("rht", "sr", "2d")
MATRICES = ("qk", "vo", "mlp", "lm_head")
VIEW = t.view_of(0, t.Config(schedule="laptop", model_dim=64, num_heads=2))
LIMIT = {t.E4M3: 448.0, t.E5M2: 57344.0}


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(a, b):
    """Relative, in the Frobenius norm."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def numbers(q, dtype=t.E4M3):
    """float32 numbers of the first half of an FP8 operand."""
    return (q.view(dtype) if q.dtype == torch.uint8 else q).float()


def config(**changes):
    tiny = dict(topology="laptop", model_dim=64, num_heads=2, mlp_dim=128, vocab_size=384, bigram_rows=500,
                schedule="laptop", num_steps=4, batch_tokens=512, seq_len=256, micro_tokens=512,
                val_tokens=512, val_seq_len=256, device="cpu", compile=False)
    return t.Config(**(tiny | changes))


def trainer(seed=0, **changes):
    """A model whose weights are all drawn, and its optimizer."""
    model = t.GPT(config(**changes), CPU)
    full = t.initialize(model, seed)
    for number, (name, w) in enumerate(full.items()):
        if name in MATRICES:
            w.copy_(0.1 * normal(*w.shape, seed=number))
            getattr(model, name).data.copy_(w)
    optimizer = t.Optimizer(model)
    optimizer.reset(full)
    return model, optimizer


def batch(count=2, seed=0):
    tokens = torch.randint(0, 383, (count, 257), generator=torch.Generator().manual_seed(seed))
    tokens[:, ::60] = 383
    return [(row[:-1], row[1:]) for row in tokens]


def low(recipe, native, w, parts=ALL):
    """What `linear` needs to run a recipe, and the tensor whose gradient it fills."""
    seen, w8, scale = torch.zeros(3, requires_grad=True, device=w.device), (), None
    if recipe == "fp8":
        q, scale = t.fp8_operand(w.detach(), t.fp8_scale(w.detach().abs().amax().float(), t.E4M3), t.E4M3, True)
        w8 = q.split([16, len(q) - 16])  # as q and k, and v
    return {"fc": (seen, w8, scale, recipe, native, parts)}, seen


# ---------------------------------------------------------------------------------------------------- fp8-static


GRID = {dtype: torch.tensor(sorted({x for x in torch.arange(256, dtype=torch.uint8).view(dtype).tolist()
                                    if math.isfinite(x)}), dtype=torch.float64) for dtype in LIMIT}


def nearest(x, scale, dtype):
    """x in float64 -> the nearest of the format's numbers times `scale`, ties to the even one, by search."""
    x, grid = x.double() / scale, GRID[dtype]
    above = torch.searchsorted(grid, x.contiguous()).clamp(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    even = (high.to(dtype).view(torch.uint8) & 1) == 0
    return torch.where((high - x < x - low) | (high - x == x - low) & even, high, low) * scale


def equal_but_for_one_bf16_rounding(ours, a, b):
    """ours, in bf16, is the float64 product of a and b, whose sum was made in float32."""
    exact, sums = a @ b, a.abs() @ b.abs()
    return ours.dtype == torch.bfloat16 and ((ours.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * sums).all()


def mlp_operands():
    """x, up, down and the gradient of what comes out, in bf16, of magnitudes as in training."""
    shapes = (256, 96, 1), (96, 160, 0.3), (96, 160, 0.05), (256, 96, 0.02)
    return [(size * normal(*shape, seed=i)).bfloat16() for i, (*shape, size) in enumerate(shapes)]


def static_mlp(x, up, down, g):
    leaves = [w.clone().requires_grad_() for w in (x, up, down)]
    y = t.StaticMLP.apply(*leaves)
    y.backward(g)
    return y.detach(), *(w.grad for w in leaves)


def bytes_of(x, scale, dtype):
    return (nearest(x, scale, dtype) / scale).to(dtype).view(torch.uint8)


def rounded_mlp(x, up, down, g):
    """Operands of the six FP8 products, as the format's nearest numbers in float64. h and its gradient are what the
    operator makes, as exact values may lie next to a tie; they are compared here."""
    x_s, h_s = t.STATIC_X["fc"], t.STATIC_X["proj"]
    x8, g8 = nearest(x, x_s, t.E4M3), nearest(g, t.STATIC_GRAD, t.E5M2)
    up8, down8 = (nearest(w, t.STATIC_W, t.E4M3) for w in (up, down))
    h, h_t = t.squares_op(bytes_of(x, x_s, t.E4M3), bytes_of(up.T, t.STATIC_W, t.E4M3))
    z, z_t = t.squares_op(bytes_of(g, t.STATIC_GRAD, t.E5M2), bytes_of(down.T, t.STATIC_W, t.E4M3), h)
    assert torch.equal(h_t, h.T) and torch.equal(z_t, z.T)
    h, z = h.view(t.E4M3).double() * h_s, z.view(t.E5M2).double() * t.STATIC_GRAD
    for ours, exact, scale, dtype in ((h, (x8 @ up8).relu().square(), h_s, t.E4M3),
                                      (z, 2 * h.sqrt() * (g8 @ down8), t.STATIC_GRAD, t.E5M2)):
        assert ((ours != nearest(exact, scale, dtype)).double().mean()) < 1e-3
    return x8, up8, down8, h, g8, z


@pytest.mark.parametrize("native", [True, False])
def test_the_static_mlp_multiplies_rounded_operands_in_all_six_products(native, monkeypatch):
    monkeypatch.setattr(t, "native", lambda recipe, device: native)
    x, up, down, g = mlp_operands()
    y, dx, dup, ddown = static_mlp(x, up, down, g)
    x8, up8, down8, h, g8, z = rounded_mlp(x, up, down, g)
    assert 0.3 < (h > 0).double().mean() < 0.7
    assert equal_but_for_one_bf16_rounding(y, h, down8.T) and equal_but_for_one_bf16_rounding(dx, z, up8.T)
    assert equal_but_for_one_bf16_rounding(dup, x8.T, z) and equal_but_for_one_bf16_rounding(ddown, g8.T, h)
    assert not equal_but_for_one_bf16_rounding(y, (x8 @ up8).relu().square(), down8.T), "that would be no FP8"


def test_the_static_mlp_is_within_the_error_of_its_formats_from_float64():
    operands = mlp_operands()
    x, up, down = (w.double().requires_grad_() for w in operands[:3])
    y = (x @ up).relu().square() @ down.T
    y.backward(operands[3].double())
    e4m3, e5m2 = 10 ** (-31.6 / 20), 10 ** (-25.6 / 20)
    bounds = 3.5 * e4m3, 2 * e5m2 + 2 * e4m3, 2 * e5m2 + 3 * e4m3, e5m2 + 4 * e4m3
    for ours, exact, error in zip(static_mlp(*operands), (y, x.grad, up.grad, down.grad), bounds):
        assert error / 10 < distance(ours, exact) < error


def test_what_the_static_mlp_cannot_hold_is_clamped():
    x, up, down, g = mlp_operands()
    largest = 448 * t.STATIC_X["fc"], 448 * t.STATIC_W, 448 * t.STATIC_W, 57344 * t.STATIC_GRAD
    for tensor, end in zip((x, up, down, g), largest):
        tensor[3, 5], tensor[4, 6] = end * 1e3, -end * 1e3
    x[7, :9], up[:9, 7] = largest[:2]  # a square of 194,481
    y, dx, dup, ddown = static_mlp(x, up, down, g)
    assert all(a.isfinite().all() for a in (y, dx, dup, ddown))
    x8, up8, down8, h, g8, z = rounded_mlp(x, up, down, g)
    assert [rounded.abs().max() for rounded in (x8, up8, down8, g8)] == list(largest)
    assert h.max() == 448 * t.STATIC_X["proj"] and equal_but_for_one_bf16_rounding(y, h, down8.T)
    assert equal_but_for_one_bf16_rounding(dx, z, up8.T)
    x[0, 0] = math.inf
    again, *_ = static_mlp(x, up, down, g)
    assert torch.equal(again[1:], y[1:]) and again.isfinite().all()


@pytest.mark.parametrize("name", ["qkv", "o"])
@pytest.mark.parametrize("native", [True, False])
def test_a_projection_with_constant_scales_multiplies_rounded_operands_in_all_three_products(native, name, monkeypatch):
    monkeypatch.setattr(t, "native", lambda recipe, device: native)
    x, w, g = normal(64, 48).bfloat16(), (0.05 * normal(80, 48)).bfloat16(), (0.02 * normal(64, 80)).bfloat16()
    x[0, 0], w[1, 1], g[2, 2] = 1e4, -1e4, 1e4  # beyond the ends
    leaves, f, x_s = [a.clone().requires_grad_() for a in (x, w)], torch.tensor(0.5), t.STATIC_X[name]
    y = t.linear(*leaves, {name: (torch.zeros(3), (), None, "fp8-static", True, ALL)}, name, f)  # w is rounded times f
    y.backward(g)
    x8, w8, g8 = nearest(x, x_s, t.E4M3), nearest(w * f, t.STATIC_W, t.E4M3), nearest(g, t.STATIC_GRAD, t.E5M2)
    assert equal_but_for_one_bf16_rounding(y, x8, w8.T)
    assert equal_but_for_one_bf16_rounding(leaves[0].grad, g8, w8)
    assert equal_but_for_one_bf16_rounding(leaves[1].grad, g8.T * f, x8)


def test_a_learned_factor_of_the_static_mlp_is_in_the_rounded_weight_and_has_the_gradient_of_one_on_the_weight():
    x, up, down, g = mlp_operands()
    f, down = torch.tensor(0.7, requires_grad=True), down.requires_grad_()
    low = {name: (torch.zeros(3), (), None, "fp8-static", True, ALL) for name in ("fc", "proj")}
    y = t.mlp(x, up, down, f, low)
    y.backward(g)
    expected, *_, ddown = static_mlp(x, up, (f * down).detach(), g)
    assert torch.equal(y, expected) and distance(down.grad, f.double() * ddown.double()) < 2**-8
    parts = ddown.double() * down.detach().double()
    assert abs(f.grad - parts.sum()) < 0.01 * parts.norm()


# ------------------------------------------------------------------------------------------- gradients, health


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_the_run_ends_with_the_name_of_the_projection_that_went_wrong(recipe, tmp_path):
    def message(harm, step=1):
        model, optimizer = trainer(precision=recipe)
        harm(model)
        loss = t.train_step(model, optimizer, batch(), step)
        log = t.Log(model.config, "x", False)
        with pytest.raises(t.BadInput) as error:
            log.put(1, loss, 0.0)
        return str(error.value)

    def input_of_layer_2(model):
        block, calls = model.block, itertools.count()
        def broken(x, u, *args):
            return block(x, u.clone().index_fill_(0, torch.tensor([9]), math.nan) if next(calls) == 2 else u, *args)
        model.block = broken

    def gradient(model):
        head = model.head_loss
        model.head_loss = lambda x, *args: head(Broken.apply(x), *args)

    assert "input of layer 2's qkv not finite" in message(input_of_layer_2)
    assert "gradient of layer 3's proj not finite" in message(gradient)

    def weight(model):
        model.mlp.data[2, 0, 0] = math.inf
        t.Optimizer(model)

    assert "weight of layer 1's fc not finite" in message(weight)


class Broken(torch.autograd.Function):
    """Identity whose gradient is infinite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * math.inf


# ---------------------------------------------------------------------------------------------------- the model


def weights_of(model):
    """Layer and name -> the weight (N, K) of a projection, from the banks as the table of parameters lays them out."""
    D, A = 64, 0
    for i, layer in enumerate(model.layers):
        if layer.attn:
            qk, vo = model.qk.detach()[2 * A : 2 * A + 2].reshape(2 * D, D), model.vo.detach()[2 * A : 2 * A + 2]
            yield (i, "qkv"), torch.cat((qk, vo[0]))
            yield (i, "o"), vo[1]
            A += 1
        yield (i, "fc"), model.mlp.detach()[2 * i].T
        yield (i, "proj"), model.mlp.detach()[2 * i + 1]
    yield (len(model.layers), "lm_head"), model.lm_head.detach()


def test_fp8_weights_are_rounded_once_a_step_however_many_micro_steps_and_equal_the_bf16_weights(monkeypatch):
    monkeypatch.setitem(t.TOPOLOGIES, "own", [t.Layer(ve=0), t.Layer(attn=False), t.Layer(), t.Layer(offset=True)])
    (model, optimizer), shapes, rounded = trainer(precision="fp8", topology="own"), [], t.fp8_operand
    monkeypatch.setattr(t, "fp8_operand", lambda x, *a, **kw: shapes.append(tuple(x.shape)) or rounded(x, *a, **kw))
    t.train_step(model, optimizer, batch(3), 1)
    banks = {tuple(getattr(model, name).shape) for name in MATRICES}
    assert len([s for s in shapes if s in banks]) == len(MATRICES)
    assert not any(s[0] != 256 for s in shapes if s not in banks)
    for (layer, name), w in weights_of(model):
        scale = (448 / w.double().abs().max()).float()
        expected = (w.float() * scale).clamp(-448, 448).to(t.E4M3)
        _, w8, inverse, *_ = model.lows[layer][0][name]
        assert torch.equal(numbers(torch.cat(w8)), expected.float()), (layer, name)
        assert inverse == scale.reciprocal() and inverse.data_ptr() % 16 == 0


def test_every_step_rounds_all_fp8_weights_anew_and_a_weight_without_gradient_keeps_numbers_and_scale():
    model, optimizer = trainer(precision="fp8")
    before = {name: w.clone() for name, w in model.weights8.items()}, model.scales.clone()
    for name in {*MATRICES} - {"lm_head"}:
        getattr(model, name).grad = torch.ones_like(getattr(model, name))
    optimizer.step(1.0, 0.9)
    changed = {name for name, w in model.weights8.items() if not torch.equal(w, before[0][name])}
    assert changed == {*MATRICES} - {"lm_head"} and torch.equal(model.scales[-2], before[1][-2])
    before = {name: w.clone() for name, w in model.weights8.items()}
    t.train_step(model, optimizer, batch(), 1)
    assert not any(torch.equal(w, before[name]) for name, w in model.weights8.items())


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_a_learned_factor_has_the_product_and_gradients_of_one_on_the_weight(recipe):
    x, w, g = normal(64, 48), normal(32, 48, seed=1), normal(64, 32, seed=2)
    factor, native, results = torch.tensor(0.5), recipe == "fp8", []
    for late in (False, True):
        a, b, f = x.clone().requires_grad_(), w.clone().requires_grad_(), factor.clone().requires_grad_()
        how, _ = low(recipe, native, w if late else w * factor, ("rht", "2d"))
        y = t.linear(a, b, how, "fc", f) if late else t.linear(a, f * b, how, "fc")
        y.backward(g)
        results.append((y.detach(), a.grad, b.grad, f.grad))
    for late, early in list(zip(*results[::-1]))[:3]:  # a power of two: no number is rounded otherwise
        assert distance(late, early) < 1e-5
    y, *_, factor_grad = results[1]
    assert distance(factor_grad, (g * y / factor).sum()) < 1e-5


def test_attention_that_gives_up_its_own_value_holds_values_in_fp16_whose_squared_norm_does_not_fit():
    def attention(dtype):
        torch.manual_seed(0)
        u, qk, vo = (torch.randn(*shape).to(dtype) * size for *shape, size in (
            (256, 256, 1), (2, 256, 256, 0.02), (2, 256, 256, 1)))
        docs = torch.zeros(256, dtype=torch.int32)
        cos, sin = t.rope_table(256, torch.tensor([1, 0.5, 0.1, 0.01] * 8), 128, dtype)
        y = t.attention(u, u[:, :12], None, qk, 2 * vo, {name: torch.ones((), dtype=dtype) for name in t.SCALARS},
                        torch.zeros(2, 2, 12), torch.full((2,), 0.3), t.sdpa_masks(docs, {"short": 2})["short"],
                        cos, sin, 0.1, None, False)
        return (u @ (2 * vo[0]).T).view(256, 2, 128).float().square().sum(-1), y

    (norms, ours), (_, exact) = attention(torch.float16), attention(torch.float32)
    assert norms.max() > 65504 and ours.isfinite().all() and distance(ours, exact) < 2**-8


@pytest.mark.parametrize("precision, close", [
    ("fp16", 0.002), ("fp8-head", 0.01), ("fp8-mlp", 0.02), ("fp8-qkv", 0.02), ("fp8", 0.02), ("nvfp4", 0.1)])
def test_every_recipe_learns_as_float32_does(precision, close):
    def losses(precision):
        torch.manual_seed(0)
        model, optimizer = trainer(precision=precision, num_steps=12)
        data = batch(1)
        return [t.train_step(model, optimizer, data, 0).view(-1)[0].item() / 0.5 for _ in range(12)]

    ours, exact = losses(precision), losses("fp32")
    assert exact[-1] < exact[0] - 0.5
    assert abs(ours[0] - exact[0]) < close and abs(ours[-1] - exact[-1]) < 10 * close and ours[-1] < ours[0] - 0.5


@pytest.mark.parametrize("precision", ["fp8", "fp8-qkv", "nvfp4"])
def test_compiled_blocks_give_what_eager_ones_do_and_new_scales_compile_nothing(precision, monkeypatch):
    monkeypatch.setitem(t.TOPOLOGIES, "alike", [t.Layer(ve=0)] * 3)
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, optimizer = trainer(precision=precision, topology="alike", dtype="float32")  # bf16 sums would differ
        torch.manual_seed(0)
        if compiled:
            model.block, model.head_loss = (torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=False)
                                            for f in (t.block, t.head_loss))
        losses, graphs = [], []
        for step in range(3):
            losses.append(t.train_step(model, optimizer, batch(1, step), 0))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        scales = {low["o"][2].item() for (low, *_) in model.lows[:3] if precision == "fp8"}
        assert precision != "fp8" or len(scales) > 1
        results.append((losses, model.mlp.detach().clone()))
    for eager, ours in zip(torch.stack(results[0][0]), torch.stack(results[1][0])):
        assert torch.allclose(eager, ours, rtol=1e-5)  # float32 sums of gradients of the stream take another order,
    assert distance(results[1][1], results[0][1]) < 5e-3  # which turns some roundings
    assert graphs == [2] * 3  # one for all blocks, one for the head


def test_validation_and_the_last_phase_are_without_the_recipe():
    model, optimizer = trainer(precision="fp8", bf16_last_frac=0.5)
    plain, _ = trainer(precision="bf16")
    data = batch(1)[0]
    with torch.no_grad():
        assert torch.equal(model(*data, VIEW), plain(*data, VIEW))
    assert not torch.equal(model(*data, VIEW), plain(*data, VIEW))
    for step, without in enumerate((False, False, True, True)):
        model.amaxes.zero_()
        t.train_step(model, optimizer, batch(), step)
        assert model.amaxes.any() != without


def test_layers_and_projections_can_leave_the_recipe(monkeypatch):
    own = [t.Layer(ve=0, recipes={"o": "bf16", "fc": "fp8"}), t.Layer(attn=False), t.Layer(), t.Layer()]
    monkeypatch.setitem(t.TOPOLOGIES, "own", own)
    model, _ = trainer(precision="nvfp4", topology="own", bf16_last_layers=1)
    assert model.plan == [
        {"qkv": "nvfp4", "o": "bf16", "fc": "fp8", "proj": "nvfp4"}, {"fc": "nvfp4", "proj": "nvfp4"},
        {"qkv": "nvfp4", "o": "nvfp4", "fc": "nvfp4", "proj": "nvfp4"},
        {"qkv": "bf16", "o": "bf16", "fc": "bf16", "proj": "bf16"}, {"lm_head": "bf16"}]
    assert [sorted(low) for lows in model.lows for low in lows] == [
        ["fc", "proj", "qkv"], ["fc", "proj"], ["fc", "o", "proj", "qkv"]]
    assert torch.isfinite(model(*batch(1)[0], VIEW))


def test_constant_scales_can_be_of_any_projection(monkeypatch):
    recipes = {"o": "fp8-static"}, {"fc": "bf16"}, {"proj": "bf16", "qkv": "bf16"}, {"fc": "bf16", "proj": "bf16"}
    monkeypatch.setitem(t.TOPOLOGIES, "own", [t.Layer(ve=0, recipes=recipe) for recipe in recipes])
    model, _ = trainer(precision="fp8-qkv", topology="own")
    assert [sorted(low) for lows in model.lows for low in lows] == [
        ["fc", "o", "proj", "qkv"], ["proj", "qkv"], ["fc"], ["qkv"], ["lm_head"]]
    loss = model(*batch(1)[0], VIEW)
    loss.backward()
    assert torch.isfinite(loss) and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_constant_scales_are_refused_where_the_loss_has_a_scale_of_its_own(monkeypatch):
    monkeypatch.setitem(t.TOPOLOGIES, "own", [t.Layer(ve=0, recipes={"o": "fp8-static"})])
    with pytest.raises(t.BadInput, match="^o is fp8-static, whose scale .* constant, and --precision=fp16 scales"):
        trainer(precision="fp16", topology="own")


def test_shapes_that_fp8_cannot_multiply_stay_wide_and_nvfp4_refuses_them():
    model, _ = trainer(precision="fp8", mlp_dim=120)
    assert model.plan[0] == {"qkv": "fp8", "o": "fp8", "fc": "bf16", "proj": "bf16"}
    for changes in (dict(precision="nvfp4"), dict(precision="fp8", float8_all_gather=True)):
        with pytest.raises(t.BadInput, match=r"fc of 64 x 120 is \w+; nvfp4 takes multiples of 16"):
            trainer(mlp_dim=120, **changes)


def test_bad_use_gets_one_sentence():
    with pytest.raises(t.BadInput, match="--native, but cpu has no products of qkv in nvfp4 here"):
        trainer(precision="nvfp4", native=True)
    for changes in (dict(precision="bf16"), dict(precision="fp8", bf16_last_frac=0.1)):
        with pytest.raises(t.BadInput, match="qkv of .* is .*; .* --float8_all_gather fp8 in all layers and steps"):
            trainer(**changes, float8_all_gather=True)
    for arg, message in (("precision=fp4", "fp8, fp8-head, fp8-mlp, fp8-qkv, nvfp4"),
                         ("nvfp4_without=rht,2D", "2D is none of rht")):
        with pytest.raises(t.BadInput, match=message):
            t.parse_config(["--preset=laptop", f"--{arg}"])


def test_the_switch_sets_the_dtype_and_auto_is_plain_without_a_gpu():
    for precision, dtype in (("bf16", "bfloat16"), ("fp32", "float32"), ("fp16", "float16"), ("nvfp4", "bfloat16")):
        assert t.GPT(config(precision=precision), CPU).qk.dtype == getattr(torch, dtype)
    auto = t.GPT(config(), CPU)
    assert auto.plan[-1] == {"lm_head": "bf16"} and auto.lows == [()] * 5
    assert t.GPT(config(precision="fp32", dtype="float64"), CPU).plan[0]["o"] == "fp64"


def test_the_run_names_its_products_in_the_log(corpus, tmp_path, capsys):
    sizes = dict(data_dir=corpus, log_dir=tmp_path, precision="fp8", float8_all_gather=True)
    line = arguments(**sizes)
    t.main(line)
    (log,) = tmp_path.glob("*.txt")
    text = log.read_text().split(t.RULE)[1]
    assert 'note "products: 4 x qkv fp8 (native), 4 x o fp8 (native)' in text
    assert ', 1 x lm_head fp8 (native)"\n' in text and text.endswith('note "0 bytes sent per step and rank"\n')
    t.main([*line, "--precision=fp16"])
    assert "step:4/4 val_loss" in capsys.readouterr().out


def test_two_steps_with_constant_scales_run_and_the_log_names_its_products(corpus, tmp_path):
    assert t.main(arguments(data_dir=corpus, log_dir=tmp_path, precision="fp8-qkv", num_steps=2)) == 1
    (path,) = tmp_path.glob("*.txt")
    text = path.read_text().split(t.RULE)[1]
    (note,) = [line for line in text.splitlines() if line.startswith('note "products: ')]
    products = ["4 x qkv fp8-static", "4 x o bf16", "4 x fc fp8-static", "4 x proj fp8-static",
                "1 x lm_head fp8-static"]
    assert note == 'note "products: ' + ", ".join(f"{product} (native)" for product in products) + '"'
    first, second = (float(loss) for loss in re.findall(r"train_loss:(\S+)", text))
    assert second < first == pytest.approx(math.log(384), abs=0.01)


def test_the_character_preset_is_the_small_model_of_six_layers():
    sizes = ["--seq_len=256", "--batch_tokens=256", "--val_seq_len=256"]
    c = t.parse_config(["--preset=char", "--precision=fp32", *sizes])
    model = t.GPT(c, CPU)
    context = max(t.view_of(0, c).windows.values()) * t.BLOCK
    assert (len(model.layers), c.model_dim, c.num_heads, context) == (6, 384, 6, 256)
    t.initialize(model, 0)
    model(*(tokens % c.vocab_size for tokens in batch(1)[0]), t.view_of(0, c)).backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == {"xsa"}


# ---------------------------------------------------------------------------------------------------- fp16


def set_loss_scale(optimizer, scale):
    """As it would be after many steps: `factor` is what a CUDA graph reads."""
    optimizer.loss_scale = scale
    optimizer.factor.fill_(scale / 256)  # ours is a sum over a sequence


def test_a_power_of_two_on_the_loss_changes_no_bit_in_float32():
    weights = []
    for scale in (1.0, 2.0**15):
        model, optimizer = trainer(precision="fp16", dtype="float32")
        set_loss_scale(optimizer, scale)
        for step in range(3):
            t.train_step(model, optimizer, batch(2, step), step)
        assert optimizer.steps == 3 and optimizer.loss_scale == scale
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights))


def test_the_scaled_loss_is_wide_enough_for_the_largest_scale():
    model, optimizer = trainer(precision="fp16")
    loss = model(*batch(1)[0], VIEW)
    scaled = optimizer.scaled(loss / 256)
    assert scaled.dtype == torch.float32
    assert optimizer.scaled(torch.tensor(math.log(65) * 256)).item() == pytest.approx(136_786, rel=1e-4)  # of a mean


TABLES = ("value_embeds", "bigrams")


def give_gradients(model, optimizer, factor, seed=0, spoilt=None):
    """Gradients as the passes of a step leave them, one number of parameter `spoilt` infinite."""
    tokens = torch.randint(0, 50, (40,), generator=torch.Generator().manual_seed(seed))
    rows = {name: tokens + 7 * i for i, name in enumerate(TABLES)}
    grads = {name: normal(*rows[name].shape, getattr(model, name).size(1), seed=seed + 90) * factor for name in TABLES}
    optimizer.find_rows([rows])
    for number, (name, p) in enumerate(model.named_parameters()):
        if name in TABLES:
            g = grads[name] = grads[name].to(p.dtype)
        else:
            g = p.grad = (factor * normal(*p.shape, seed=50 + number)).to(p.dtype)
        if name == spoilt:
            g[(2,) * g.ndim] = math.inf
    optimizer.add_rows(rows, grads)


@pytest.mark.parametrize("spoilt", ["qk", "lm_head", "bigrams", "value_embeds"])
def test_a_skipped_step_leaves_no_trace_and_the_next_one_is_as_if_it_had_never_been(spoilt):
    states = []
    for skips in (False, True):
        model, optimizer = trainer(precision="fp16")
        optimizer.loss_scale = 2.0**15 if skips else 2.0**14
        for seed, bad in enumerate((True, False, False, True, False, False)):
            if bad and not skips:
                continue
            give_gradients(model, optimizer, 0.01 * optimizer.loss_scale, seed, spoilt if bad else None)
            before = optimizer.loss_scale
            optimizer.step(1.0, 0.9)
            assert optimizer.loss_scale == before / (1 + bad) == optimizer.factor * 256
            assert optimizer.totals == {} and all(p.grad is None for p in model.parameters())
            optimizer.loss_scale = 2.0**14
        assert optimizer.steps == 4
        states.append([*model.parameters(), *optimizer.masters.values(),
                       *(s for state in optimizer.state.values() for s in state)])
    assert len(states[0]) == len(states[1]) and all(torch.equal(a, b) for a, b in zip(*states))


def test_training_through_a_doubling_of_the_loss_scale_changes_no_bit_in_float32():
    states = []
    for good in (0, 1999):
        model, optimizer = trainer(precision="fp16", dtype="float32")
        optimizer.good = good  # the next good step is the last of 2000
        for step in range(3):
            t.train_step(model, optimizer, batch(2, step), step)
        assert optimizer.loss_scale == (2.0**16 if good else 2.0**15) and optimizer.steps == 3
        states.append([*optimizer.masters.values()])
    assert all(torch.equal(a, b) for a, b in zip(*states))


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8-mlp", "fp16"])
def test_what_a_cuda_graph_reads_stays_at_its_place_through_warming_up_and_training(precision):
    model, optimizer = trainer(precision=precision)
    read, phase = {}, "warm-up"

    def tensors():
        found = dict(signs=model.signs, amaxes=model.amaxes, scales=model.scales, factor=optimizer.factor,
                     numbers=t.device_numbers(CPU, 4, 2), **dict(model.named_parameters()))
        found |= {(name, "fp8"): w for name, w in model.weights8.items()}
        for i, lows in enumerate(model.lows):
            found |= {(i, name): seen.grad for low in lows for name, (seen, *_) in low.items()}
        return found | {(key, i): x for key, rope in model.ropes.items() for i, x in enumerate(rope)}

    def passes(*args):
        now = tensors()
        if phase == "warm-up":  # what is there before validation has made its own ropes
            read.update({name: x.detach() for name, x in now.items() if name not in read})  # kept: none can stand there
        assert [name for name, x in read.items() if now[name].data_ptr() != x.data_ptr()] == []
        return t.forward_backward(*args)

    t.warm_up(model, optimizer, CPU, passes)
    phase = "run"
    for step in range(4):
        t.train_step(model, optimizer, batch(2, step), step, passes)
    assert {"factor", "bigrams"} < {*read} and any(isinstance(name, tuple) for name in read)


# ---------------------------------------------------------------------------------------------------- ranks

RANKS = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import train_gpt as t
import test_precision as test

def work(rank, world_size, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world_size}", rank=rank, world_size=world_size)
    calls, all_reduce, all_gather, reduce_scatter = [], dist.all_reduce, t.all_gather, t.reduce_scatter

    def reduce(tensor, op=dist.ReduceOp.SUM, **kw):
        calls.append(("max" if op == dist.ReduceOp.MAX else "sum", tensor.dtype, tensor.numel()))
        return all_reduce(tensor, op, **kw)

    def gather(out, part, **kw):
        calls.append(("gather", part.dtype, part.numel()))
        return all_gather(out, part, **kw)

    def scatter(out, whole, **kw):
        calls.append(("scatter", whole.dtype, whole.numel()))
        return reduce_scatter(out, whole, **kw)

    dist.all_reduce, t.all_gather, t.reduce_scatter = reduce, gather, scatter
    result = {}
    for name in ("bf16", "fp8", "fp16", "fp16 rows"):
        precision, *kind = name.split()
        c = test.config(precision=precision, float8_all_gather=precision == "fp8")
        model = t.GPT(c, test.CPU, world_size)
        optimizer = t.Optimizer(model)
        optimizer.reset(test.start_of(model))
        before = {n: w.clone() for n, w in optimizer.masters.items()}
        calls.clear()
        last = precision == "fp16" and rank == world_size - 1  # what Muon has reaches the slice's owner through the sum
        test.give_gradients(model, optimizer, 1.0, rank, ("bigrams" if kind else "qk") if last else None)
        optimizer.step(1.0, 0.9)
        step = list(calls)
        optimizer.complete_weights()
        result[name] = dict(
            calls=step, bytes=optimizer.bytes_per_step(), before=before, masters=optimizer.masters,
            steps=optimizer.steps, scales=model.scales, state=optimizer.state,
            scale=optimizer.loss_scale, good=optimizer.good, grads=[p.grad for p in model.parameters()],
            weights8={n: test.numbers(w) for n, w in model.weights8.items()},
            wide={n: p.detach().clone() for n, p in model.named_parameters()},
            used={n: len(rows) for n, rows in optimizer.used.items()})
    torch.save(result, f"{folder}/{world_size}-{rank}")
    dist.destroy_process_group()

for world_size in (1, 2, 4):
    mp.start_processes(work, (world_size, sys.argv[1]), world_size, start_method="fork")
"""


def start_of(model):
    """Float32 weights that do not depend on the number of ranks; matrices of very different size."""
    full = {}
    for number, (name, param) in enumerate(model.table.items()):
        w = 0.1 * normal(*param.shape, seed=number)
        w *= torch.arange(1, 1 + len(w)).view(-1, *[1] * (w.ndim - 1))
        full[name] = F.pad(w, (0,) * (2 * w.ndim - 1) + (len(getattr(model, name)) - len(w),))
        getattr(model, name).data.copy_(full[name])
    return full


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Number of ranks -> what each had after one step. One process imports torch and forks all ranks."""
    folder, here = tmp_path_factory.mktemp("worlds"), Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here.parent}:{here}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", RANKS, folder], env=environment, capture_output=True, text=True,
                         timeout=120)
    assert run.returncode == 0, run.stderr
    return {n: [torch.load(folder / f"{n}-{rank}") for rank in range(n)] for n in (1, 2, 4)}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gathered_fp8_weights_are_the_rounded_whole_weights_to_the_bit(worlds, world_size):
    ranks = [rank["fp8"] for rank in worlds[world_size]]
    whole = {name: torch.cat([rank["masters"][name] for rank in ranks]) for name in MATRICES}
    weights = [[("qk", slice(2 * i, 2 * i + 2)), ("vo", slice(2 * i, 2 * i + 1))] for i in range(4)]  # one scale each
    weights += [[("vo", slice(2 * i + 1, 2 * i + 2))] for i in range(4)] + [[("lm_head", slice(0, 384))]]
    weights += [[("mlp", slice(i, i + 1))] for i in range(8)]
    for rank in ranks:
        for weight in weights:
            amax = max(whole[bank][rows].abs().max().double() for bank, rows in weight)
            scale = torch.tensor(448 / amax.item(), dtype=torch.float64).float()
            for bank, rows in weight:
                expected = (whole[bank][rows] * scale).clamp(-448, 448).to(t.E4M3).float()
                assert torch.equal(rank["weights8"][bank][rows], expected), (bank, rows)
        for bank in MATRICES:
            assert torch.equal(rank["wide"][bank], whole[bank].bfloat16()), "validation needs the wide weights of all"
            assert torch.equal(rank["weights8"][bank], ranks[0]["weights8"][bank])
        assert torch.equal(rank["scales"], ranks[0]["scales"])


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_reduces_one_vector_of_amaxes_and_gathers_matrices_as_bytes(worlds, world_size):
    for rank in (rank["fp8"] for rank in worlds[world_size]):
        calls, sizes = rank["calls"], {n: w.numel() // world_size for n, w in rank["weights8"].items()}
        flags = ("max", torch.uint8, 384 + 500)  # of the tables' rows
        assert [call for call in calls if call[0] == "max"] == [flags, ("max", torch.float32, 5 * 5 + 1)]
        gathered = [call[2] for call in calls if call[0] == "gather" and call[1] == torch.uint8]
        assert sorted(gathered) == sorted(sizes.values()) and {*sizes} == {*MATRICES}
        wide = [call[2] for call in calls if call[0] == "gather" and call[1] == torch.bfloat16]
        others = [rank["used"][name] * width for name, width in (("value_embeds", 2 * 64), ("bigrams", 64))]
        others += [rank["wide"]["lm_head"].numel()]  # looked up: wide, as are the used rows of the tables
        assert sorted(wide) == sorted(size // world_size for size in others)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_bytes_per_step_are_those_of_the_calls_of_a_step_in_a_ring(worlds, world_size, precision):
    for rank in (rank[precision] for rank in worlds[world_size]):
        share = {"gather": world_size - 1, "scatter": 1 - 1 / world_size, "sum": 2 - 2 / world_size, "max": 0}
        sent = sum(share[kind] * size * dtype.itemsize for kind, dtype, size in rank["calls"])
        assert rank["bytes"] == pytest.approx(sent)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", ["fp16", "fp16 rows"])
def test_a_gradient_that_overflows_on_one_rank_makes_all_skip_the_step(worlds, world_size, name):
    for rank in (rank[name] for rank in worlds[world_size]):
        assert all(torch.equal(w, rank["before"][name]) for name, w in rank["masters"].items())
        assert not any(s.any() for state in rank["state"].values() for s in state)
        assert (rank["steps"], rank["scale"], rank["good"]) == (0, 2**14, 0) and {*rank["grads"]} == {None}
        if world_size > 1:
            assert [call for call in rank["calls"] if call[0] == "max"][1:] == [("max", torch.float32, 1)]
