"""Recipes of low precision in the model: constant scales, what is kept between steps, the ranks, the switch.

References: the formats' values listed from their definition and rounded to by search, products in float64, and gloo
processes whose FP8 weights are compared with a quantiser written here.
"""
import functools
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import test_optimizer
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import arguments, distance, normal, read, training_loss, untrained
from processes import ENVIRONMENT
from test_kernels import GRID, nearest
from test_recipes import make_products
from torch import multiprocessing

import train_gpt as t
from nanogpt import kernels
from nanogpt.gpu import constant
from nanogpt.kernels import E4M3, E5M2
from nanogpt.precision import PLAIN, fp8, fp8_static, nvfp4, recipes
from nanogpt.precision.fp8_static import STATIC
from nanogpt.ranks import BadInput
from records import journal

CPU = torch.device("cpu")
MATRICES = ("qkvo", "mlp", "lm_head")
VIEW = t.setting_of(0, t.Config(schedule="laptop", model_dim=64, num_heads=2, head_dim=32))


def config(**changes):
    tiny = dict(num_layers=4, model_dim=64, num_heads=2, head_dim=32, mlp_dim=128, vocab_size=384, ngram_rows=500,
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


# ---------------------------------------------------------------------------------------------------- fp8-static


def to_nearest(x, scale, dtype):
    """x -> the nearest of the format's numbers times `scale`, in float64."""
    return nearest(x.double() / scale, GRID[dtype]) * scale


def equal_but_for_one_bf16_rounding(ours, a, b):
    """ours, in bf16, is the float64 product of a and b, whose sum was made in float32."""
    exact = a @ b
    sums = a.abs() @ b.abs()
    return ours.dtype == torch.bfloat16 and ((ours.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * sums).all()


def mlp_operands():
    """x, up, down and the gradient of what comes out, in bf16, of magnitudes as in training."""
    shapes = (256, 96, 1), (96, 160, 0.3), (96, 160, 0.05), (256, 96, 0.02)
    return [(size * normal(*shape, seed=i)).bfloat16() for i, (*shape, size) in enumerate(shapes)]


def in_fp8(x, scale, dtype):
    """The numbers of the format, by search."""
    return (to_nearest(x, scale, dtype) / scale).to(dtype)


def rounded_mlp(x, up, down, g):
    """Operands of the six FP8 products, as the format's nearest numbers in float64. h and its gradient are what the
    operator makes, as exact values may lie next to a tie; test_kernels.py compares them."""
    x_scale, hidden_scale = fp8_static.INPUT_SCALES["up"], fp8_static.INPUT_SCALES["down"]
    x8 = to_nearest(x, x_scale, E4M3)
    g8 = to_nearest(g, fp8_static.GRADIENT_SCALE, E5M2)
    up8, down8 = (to_nearest(w, fp8_static.WEIGHT_SCALE, E4M3) for w in (up, down))
    h, _ = kernels.hidden_layer(
        in_fp8(x, x_scale, E4M3), in_fp8(up.T, fp8_static.WEIGHT_SCALE, E4M3), x_scale * fp8_static.WEIGHT_SCALE, hidden_scale)
    z, _ = kernels.hidden_layer(
        in_fp8(g, fp8_static.GRADIENT_SCALE, E5M2), in_fp8(down.T, fp8_static.WEIGHT_SCALE, E4M3),
        fp8_static.GRADIENT_SCALE * fp8_static.WEIGHT_SCALE, hidden_scale, h, fp8_static.GRADIENT_SCALE)
    return x8, up8, down8, h.double() * hidden_scale, g8, z.double() * fp8_static.GRADIENT_SCALE


@pytest.mark.parametrize("precision", ["fp8-mlp", "fp8-qkv"])
def test_another_activation_of_the_mlp_needs_one_changed_line_whatever_the_recipe(precision, corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(t, "ACTIVATION", F.gelu)
    model = t.GPT(config(precision=precision, dtype="float32"), CPU)
    names = model.precision.recipe_names
    assert (names["up"], names["down"]) == ("fp32", "fp32"), "constant scales are for the squared ReLU"
    assert names["qkv"] == ("fp8-static" if precision == "fp8-qkv" else "fp32")
    x, up, down = (torch.randn(shape, dtype=torch.float64) for shape in ((16, 32), (32, 64), (32, 64)))
    layer = model.precision.layers[True][0]
    y = layer.up.mlp(x, up, down, torch.tensor(0.7, dtype=torch.float64), t.ACTIVATION, layer.down)
    torch.testing.assert_close(y, 0.7 * F.gelu(x @ up) @ down.T)
    t.main(arguments(data_dir=corpus, log_dir=tmp_path, precision=precision, num_layers=1, num_steps=1))
    assert "with this ACTIVATION the MLP has no FP8" in capsys.readouterr().out


@pytest.mark.parametrize("native", [True, False])
def test_the_static_mlp_multiplies_rounded_and_clamped_operands_in_all_six_products(native, monkeypatch):
    monkeypatch.setattr(kernels, "has_fp8", lambda device: native)
    x, up, down, g = mlp_operands()
    weight_end = 448 * fp8_static.WEIGHT_SCALE
    ends = [448 * fp8_static.INPUT_SCALES["up"], weight_end, weight_end, 57344 * fp8_static.GRADIENT_SCALE]
    for tensor, end in zip((x, up, down, g), ends):
        tensor[3, 5] = end * 1e3
        tensor[4, 6] = -end * 1e3
    x[7, :9], up[:9, 7] = ends[:2]  # a square of 194,481
    leaves = [w.clone().requires_grad_() for w in (x, up, down)]
    y = fp8_static.StaticMLP.apply(*leaves)
    y.backward(g)
    dx, dup, ddown = (w.grad for w in leaves)
    x8, up8, down8, h, g8, z = rounded_mlp(x, up, down, g)
    assert [rounded.abs().max() for rounded in (x8, up8, down8, g8)] == ends
    assert h.max() == 448 * fp8_static.INPUT_SCALES["down"] and 0.3 < (h > 0).double().mean() < 0.7
    assert equal_but_for_one_bf16_rounding(y, h, down8.T) and equal_but_for_one_bf16_rounding(dx, z, up8.T)
    assert equal_but_for_one_bf16_rounding(dup, x8.T, z) and equal_but_for_one_bf16_rounding(ddown, g8.T, h)
    assert not equal_but_for_one_bf16_rounding(y, (x8 @ up8).relu().square(), down8.T), "that would be no FP8"


@pytest.mark.parametrize("name", ["qkv", "up", "down"])
@pytest.mark.parametrize("native", [True, False])
def test_a_projection_with_constant_scales_multiplies_rounded_operands_in_all_three_products(native, name, monkeypatch):
    monkeypatch.setattr(kernels, "has_fp8", lambda device: native)
    x, w, g = normal(64, 48).bfloat16(), (0.05 * normal(80, 48)).bfloat16(), (0.02 * normal(64, 80)).bfloat16()
    x[0, 0], w[1, 1], g[2, 2] = 1e5, -1e4, 1e4  # beyond the ends
    leaves = [a.clone().requires_grad_() for a in (x, w)]
    factor = torch.tensor(0.5)
    y = STATIC[name].linear(*leaves, factor)  # w is rounded times the factor
    y.backward(g)
    x8 = to_nearest(x, fp8_static.INPUT_SCALES[name], E4M3)
    w8 = to_nearest(w * factor, fp8_static.WEIGHT_SCALE, E4M3)
    g8 = to_nearest(g, fp8_static.GRADIENT_SCALE, E5M2)
    assert equal_but_for_one_bf16_rounding(y, x8, w8.T)
    assert equal_but_for_one_bf16_rounding(leaves[0].grad, g8, w8)
    assert equal_but_for_one_bf16_rounding(leaves[1].grad, g8.T * factor, x8)


def test_an_mlp_of_two_recipes_rounds_only_the_operands_of_the_static_one():
    x, up, down, _ = mlp_operands()
    y = STATIC["up"].mlp(x, up, down, torch.tensor(0.5), t.relu_squared, PLAIN)
    x8, up8 = to_nearest(x, fp8_static.INPUT_SCALES["up"], E4M3), to_nearest(up, fp8_static.WEIGHT_SCALE, E4M3)
    rounded, exact = ((a.double() @ b.double()).relu().square() @ (0.5 * down.double()).T for a, b in ((x8, up8), (x, up)))
    assert distance(y, rounded) < 0.006  # roundings to bf16
    assert distance(y, exact) > 0.02


# ---------------------------------------------------------------------------------------------------- clamped weights


def defects(corpus, folder):
    short = dict(num_layers=1, num_steps=2, val_interval=1)
    assert t.main(arguments(data_dir=corpus, precision="fp8-qkv", log_dir=folder, **short)) == 0
    text = next(folder.glob("*.txt")).read_text()
    return [json.loads(line.partition(" ")[2])["what"] for line in text.splitlines() if line.startswith("defect {")]


def test_a_sound_run_of_fp8_has_no_defect_and_one_whose_weights_do_not_fit_names_the_projection(corpus, tmp_path, monkeypatch):
    assert defects(corpus, tmp_path / "sound") == []
    monkeypatch.setattr(fp8_static, "HEAD_WEIGHT_SCALE", 2.0**-20)  # weights beyond 448 / 2^20 = 0.0004 are clamped
    found = defects(corpus, tmp_path / "other")
    assert len(found) >= 2 and any("% of the weights of lm_head are too large for FP8 at step" in what for what in found)
    assert not any("weights of up" in what for what in found)


@pytest.mark.parametrize("projection", ["qkv", "up", "down", "lm_head"])
def test_weights_beyond_the_range_are_counted_with_the_factor_that_multiplies_them(projection):
    model = untrained(precision="fp8-qkv")
    with torch.no_grad():
        if projection == "qkv":
            model.qkvo[2] = 8.0
        elif projection == "up":
            model.mlp[0] = -8.0
        elif projection == "down":
            model.mlp[1] = 0.5
            model.scalars[0, [*t.SCALARS].index("down")] = 17.0
        else:
            model.lm_head[:2] = 7.0
        model.qkvo[3] = 100.0  # of "o", which is in bf16
    noted = []
    fp8_static.check_weights(model, 7, SimpleNamespace(fact=lambda kind, fact: noted.append(fact["what"])))
    [sentence] = noted
    assert f"% of the weights of {projection} are too large for FP8 at step 7" in sentence


# ---------------------------------------------------------------------------------------------------- the model


def weights_of(model):
    """Layer and name -> the weight (N, K) of a projection, from the banks as the table of parameters lays them out."""
    D, L = 64, model.config.num_layers
    for i in range(L):
        qkvo = model.qkvo.detach()[4 * i : 4 * i + 4]
        yield (i, "qkv"), qkvo[:3].reshape(3 * D, D)
        yield (i, "o"), qkvo[3].T
        yield (i, "up"), model.mlp.detach()[2 * i].T
        yield (i, "down"), model.mlp.detach()[2 * i + 1]
    yield (L, "lm_head"), model.lm_head.detach()


def recipe_at(model, layer, name):
    """The recipe that a projection has in training."""
    layers, head = model.precision.layers[True], model.precision.head[True]
    return head if name == "lm_head" else getattr(layers[layer], name)


def test_after_each_step_the_fp8_weights_are_the_bf16_weights_rounded_also_of_a_head_that_waits():
    model, optimizer = trainer(precision="fp8", head_every_second=True)
    for step in range(2):
        t.train_step(model, optimizer, read(model, batch()), step)
        for (layer, name), w in weights_of(model):
            multiplier = (448 / w.double().abs().max()).float()
            expected = (w.float() * multiplier).clamp(-448, 448).to(E4M3)
            product = recipe_at(model, layer, name)
            rounded, scale = product.weight_bytes.view(E4M3), product.weight_scale
            assert torch.equal(rounded.float(), expected.float()), (step, layer, name)
            assert scale == multiplier.reciprocal() and scale.data_ptr() % 16 == 0


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_a_learned_factor_has_the_product_and_gradients_of_one_on_the_weight(name):
    x, w, g = normal(64, 48), normal(32, 48, seed=1), normal(64, 32, seed=2)
    factor, results = torch.tensor(0.5), []
    for late in (False, True):
        a, b, f = x.clone().requires_grad_(), w.clone().requires_grad_(), factor.clone().requires_grad_()
        torch.manual_seed(0)  # nvfp4 rounds at random
        of_weight = make_products(name, w if late else w * factor)
        y = of_weight.linear(a, b, f) if late else of_weight.linear(a, f * b)
        y.backward(g)
        results.append((y.detach(), a.grad, b.grad, f.grad))
    for late, early in list(zip(*results[::-1]))[:3]:  # a power of two: no number is rounded otherwise
        assert distance(late, early) < 1e-5
    y, *_, factor_grad = results[1]
    assert distance(factor_grad, (g * y / factor).sum()) < 1e-5


@pytest.mark.parametrize("name, close", [("bf16", 1e-6), ("fp8-static", 0.06), ("fp8", 0.06), ("nvfp4", 0.2)])
def test_queries_keys_and_values_are_those_of_float64_and_the_factor_is_of_the_values(name, close):
    x, weight = normal(64, 48), 0.1 * normal(3 * 48, 48, seed=1)
    factor = torch.tensor(0.7, requires_grad=True)
    which = {"bf16": PLAIN, "fp8-static": STATIC["qkv"]}.get(name) or make_products(name, weight)
    ours = which.three_linears(x, weight.view(3, 48, 48), t.for_each_token(factor, x))
    exact = [x.double() @ part.double().T for part in weight.split(48)]
    exact[2] = 0.7 * exact[2]
    assert all(distance(a.detach(), b) < close for a, b in zip(ours, exact))
    g = normal(64, 48, seed=2)
    ours[2].backward(g)
    parts = g * ours[2].detach() / 0.7
    assert abs(factor.grad - parts.sum()) < close * parts.norm()


@functools.cache
def losses(precision):
    """Of six steps on one batch."""
    torch.manual_seed(0)
    model, optimizer = trainer(precision=precision, num_steps=6)
    data = batch(1)
    return [t.train_step(model, optimizer, read(model, data), 0)[0].item() / 0.5 for _ in range(6)]


@pytest.mark.parametrize("precision, close", [
    ("fp16", 0.002), ("fp8-head", 0.01), ("fp8-mlp", 0.02), ("fp8-qkv", 0.02), ("fp8", 0.02), ("nvfp4", 0.1)])
def test_every_recipe_learns_as_float32_does(precision, close):
    ours, exact = losses(precision), losses("fp32")
    assert exact[-1] < exact[0] - 2
    assert abs(ours[0] - exact[0]) < close and abs(ours[-1] - exact[-1]) < 10 * close and ours[-1] < ours[0] - 2


@pytest.mark.parametrize("precision", ["fp8", "fp16"])
def test_validation_is_in_bf16_without_the_recipe_also_after_training(precision):
    model, _ = trainer(precision=precision)
    plain, _ = trainer(precision="bf16")
    plain.load_state_dict(model.state_dict())
    data = batch(1)[0]
    assert not torch.equal(training_loss(model, *data, VIEW), training_loss(plain, *data, VIEW))
    assert torch.equal(*[t.loss_without_gradient(each, *data, VIEW).float() for each in (model, plain)])


# ---------------------------------------------------------------------------------------------------- the switch


def test_each_projection_can_have_a_recipe_of_its_own(monkeypatch):
    monkeypatch.setitem(t.PRECISIONS, "own", ("nvfp4", "bf16", "fp8", "nvfp4", "bf16"))
    model, _ = trainer(precision="own")
    kinds = [type(recipe_at(model, 0, name)) for name in recipes.PROJECTIONS]
    plain = type(PLAIN)
    assert kinds == [nvfp4.NVFP4Products, plain, fp8.FP8Products, nvfp4.NVFP4Products, plain]
    assert torch.isfinite(training_loss(model, *batch(1)[0], VIEW))


@pytest.mark.parametrize("changes", [dict(model_dim=72), dict(head_dim=20), dict(mlp_dim=120), dict(vocab_size=376)], ids=str)
def test_shapes_that_are_no_multiples_of_16_stay_wide(changes):
    for precision in ("fp8", "fp8-qkv", "nvfp4"):
        c = config(precision=precision, **changes)
        assert {*t.choose_recipes(c, CPU).values()} == {"bf16"}


@pytest.mark.parametrize("changes, message", [
    (dict(precision="bf16", float8_all_gather=True), "--float8_all_gather needs fp8 .* give --precision=fp8"),
    (dict(precision="fp8", float8_all_gather=True, mlp_dim=120), "--float8_all_gather .* multiples of 16"),
    (dict(precision="fp8", float8_all_gather=True, dtype="float64"), "--float8_all_gather .* --dtype=auto"),
])
def test_a_recipe_that_cannot_be_is_refused_in_one_sentence(changes, message):
    with pytest.raises(BadInput, match=message):
        trainer(**changes)


def test_a_gpu_without_bf16_is_told_what_it_can_do(monkeypatch):
    has_bf16 = False
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    gpu, c = torch.device("cuda"), config(compile=True)
    for precision in ("bf16", "fp16"):
        with pytest.raises(BadInput, match="no bf16.*; give --precision=fp32, or --compile=false"):
            t.choose_recipes(config(precision=precision, compile=True), gpu)
        assert t.choose_recipes(config(precision=precision, compile=False), gpu)["qkv"] == precision
    assert t.choose_recipes(config(precision="fp32", compile=True), gpu)["qkv"] == "fp32"
    has_bf16 = True
    assert t.choose_recipes(c, gpu)


def test_the_switch_sets_the_dtype_and_auto_is_plain_without_a_gpu():
    for precision, dtype in (("bf16", "bfloat16"), ("fp32", "float32"), ("fp16", "float16"), ("nvfp4", "bfloat16")):
        assert t.GPT(config(precision=precision), CPU).qkvo.dtype == getattr(torch, dtype)
    auto = t.GPT(config(), CPU)
    assert auto.precision.recipe_names == dict.fromkeys(recipes.PROJECTIONS, "bf16")
    assert t.GPT(config(precision="fp32", dtype="float64"), CPU).precision.recipe_names["o"] == "fp64"


@pytest.mark.parametrize("capability, expected", [((9, 0), "fp8-qkv"), ((8, 9), "fp8-qkv"), ((8, 0), "bf16")])
def test_auto_asks_the_gpu_for_fp8(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    names = t.choose_recipes(config(), torch.device("cuda"))
    assert names == dict(zip(recipes.PROJECTIONS, t.PRECISIONS[expected]))


def test_the_run_names_its_products_in_the_log(corpus, tmp_path):
    t.main(arguments(data_dir=corpus, log_dir=tmp_path, num_layers=1, precision="fp8", float8_all_gather=True, num_steps=1))
    (log,) = tmp_path.glob("*.txt")
    text = log.read_text().split(journal.RULE)[1]
    assert 'note "products: qkv fp8 (emulated), o fp8 (emulated)' in text
    assert ', lm_head fp8 (emulated)"\n' in text
    assert recipes.summary({"qkv": "fp16", "up": "nvfp4"}, CPU) == "qkv fp16 (native), up nvfp4 (emulated)"


# ---------------------------------------------------------------------------------------------------- fp16


def test_a_power_of_two_on_the_loss_changes_no_bit_in_float32():
    weights = []
    for scale in (1.0, 2.0**15):
        model, optimizer = trainer(precision="fp16", dtype="float32")
        scaling = model.precision.hooks
        scaling.set_scale(scale)
        for step in range(3):
            t.train_step(model, optimizer, read(model, batch(2, step)), step)
        assert optimizer.updates == 3 and scaling.scale == scale
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights))


def give_gradients(model, optimizer, factor, seed=0, spoilt=None):
    """Gradients as the passes of a step leave them, one number of parameter `spoilt` infinite."""
    def change(name, gradient):
        gradient *= factor
        if name == spoilt:
            gradient[(2,) * gradient.ndim] = math.inf

    test_optimizer.give_gradients(model, optimizer, seed, change=change)


@pytest.mark.parametrize("spoilt", ["qkvo", "lm_head", "ngrams", "value_embeds"])
def test_a_skipped_step_leaves_no_trace_and_the_next_one_is_as_if_it_had_never_been(spoilt):
    states = []
    for skips in (False, True):
        model, optimizer = trainer(precision="fp16")
        scaling = model.precision.hooks
        scaling.set_scale(2.0**15 if skips else 2.0**14)
        for seed, bad in enumerate((True, False, False, True, False, False)):
            if bad and not skips:
                continue
            give_gradients(model, optimizer, 0.01 * scaling.scale, seed, spoilt if bad else None)
            before = scaling.scale
            optimizer.start_sums()
            optimizer.step(1.0)
            assert scaling.scale == before / (1 + bad) == scaling.factor * 256
            assert optimizer.slices.sums == optimizer.tables.arriving == {}
            assert all(p.grad is None for p in model.parameters())
            scaling.set_scale(2.0**14)
        assert optimizer.updates == 4 and scaling.skipped_steps == 2 * skips
        states.append([*model.parameters(), *optimizer.masters.values(),
                       *(s for state in optimizer.state.values() for s in state)])
    assert len(states[0]) == len(states[1]) and all(torch.equal(a, b) for a, b in zip(*states))


def test_a_skipped_step_takes_its_gradient_of_the_head_with_it():
    heads = []
    for skips in ([False, False], [True, False, False]):
        model, optimizer = trainer(precision="fp16", head_every_second=True)
        for seed, skip in enumerate(skips, 3 - len(skips)):
            model.precision.hooks.set_scale(2.0**14)
            give_gradients(model, optimizer, 0.01 * 2.0**14, seed, "qkvo" if skip else None)
            optimizer.start_sums()
            optimizer.step(1.0)
        heads.append(model.lm_head.detach().clone())
    assert torch.equal(*heads)


@pytest.mark.parametrize("precision", ["fp8", "fp16"])
def test_what_a_cuda_graph_reads_stays_at_its_place_through_warming_up_and_training(precision):
    model, optimizer = trainer(precision=precision, num_layers=1)
    places, phase = {}, "warm-up"

    def tensors():
        found = dict(signs=model.signs, number=constant(CPU, 4.0), **dict(model.named_parameters()))
        if precision == "fp16":
            found["factor"] = model.precision.hooks.factor
        if precision == "fp8":
            found["scales"] = model.precision.hooks.scales
            found |= {(name, "fp8"): w for name, w in model.precision.hooks.weight_bytes.items()}
            for (layer, name), _ in weights_of(model):
                product = recipe_at(model, layer, name)
                found |= {(layer, name, "scale"): product.weight_scale, (layer, name, "bytes"): product.weight_bytes}
        for _, end, _ in t.stages(model.config):
            setting = t.setting_of(end - 1, model.config)
            tables = t.rotary_table(64, setting.frequencies, model.config.head_dim, model.lm_head.dtype, CPU)
            found |= {(setting.frequencies, i): x for i, x in enumerate(tables)}
        return found

    def call(key, function, arguments):
        now = tensors()
        if phase == "warm-up":
            places.update({name: x.detach() for name, x in now.items() if name not in places})  # kept: none can stand there
        assert [name for name, x in places.items() if now[name].data_ptr() != x.data_ptr()] == []
        return function(*arguments)

    warm_up = t.warmup.WarmUp(model, optimizer, t)
    model.call = call
    warm_up.run()
    optimizer.reset(t.initialize(model, model.config.seed))
    phase = "run"
    for step in range(4):
        t.train_step(model, optimizer, read(model, batch(2, step)), step)
    assert {"signs", "ngrams"} < {*places} and any(isinstance(name, tuple) for name in places)


# ---------------------------------------------------------------------------------------------------- ranks


def start_of(model):
    """Float32 weights that do not depend on the number of ranks; matrices of very different size."""
    full = {}
    for number, (name, param) in enumerate(model.params.items()):
        w = 0.1 * normal(*param.shape, seed=number)
        w *= torch.arange(1, 1 + len(w)).view(-1, *[1] * (w.ndim - 1))
        full[name] = F.pad(w, (0,) * (2 * w.ndim - 1) + (len(getattr(model, name)) - len(w),))
        getattr(model, name).data.copy_(full[name])
    return full


def work(rank, world_size, folder):
    """A step of a rank by each recipe, whose results go to a file in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world_size}", rank=rank, world_size=world_size)
    result = {}
    for name in ("fp8", "fp16", "fp16 rows"):
        precision, *kind = name.split()
        c = config(precision=precision, float8_all_gather=precision == "fp8")
        model = t.GPT(c, CPU, world_size)
        optimizer = t.Optimizer(model)
        optimizer.reset(start_of(model))
        before = {n: w.clone() for n, w in optimizer.masters.items()}
        last = precision == "fp16" and rank == world_size - 1  # what Muon has reaches the slice's owner through the sum
        give_gradients(model, optimizer, 1.0, rank, ("ngrams" if kind else "qkvo") if last else None)
        optimizer.start_sums()
        optimizer.step(1.0)
        recipe = model.precision.hooks
        gathered = {n: w.view(torch.float8_e4m3fn).float() for n, w in getattr(recipe, "weight_bytes", {}).items()}
        stale = {n: getattr(model, n).detach().clone() for n in ("qkvo", "mlp")}
        recipe.before_validation()
        result[name] = dict(
            before=before, masters=optimizer.masters, steps=optimizer.updates, stale=stale, weights8=gathered,
            state=[tuple(s) for s in optimizer.state.values()], kept=recipe.state(), scales=getattr(recipe, "scales", None),
            grads=[p.grad for p in model.parameters()], wide={n: p.detach().clone() for n, p in model.named_parameters()})
    torch.save(result, f"{folder}/{world_size}-{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Number of ranks -> what each had after one step, made by the last lines of this file."""
    folder = tmp_path_factory.mktemp("worlds")
    run = subprocess.run([sys.executable, __file__, folder], capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert run.returncode == 0, run.stderr
    return {n: [torch.load(folder / f"{n}-{rank}") for rank in range(n)] for n in (1, 4)}


@pytest.mark.parametrize("world_size", [1, 4])
def test_gathered_fp8_weights_are_the_rounded_whole_weights_to_the_bit(worlds, world_size):
    ranks = [rank["fp8"] for rank in worlds[world_size]]
    whole = {name: torch.cat([rank["masters"][name] for rank in ranks]) for name in MATRICES}
    weights = [("qkvo", slice(4 * i, 4 * i + 3)) for i in range(4)]  # one scale each
    weights += [("qkvo", slice(4 * i + 3, 4 * i + 4)) for i in range(4)] + [("lm_head", slice(0, 384))]
    weights += [("mlp", slice(i, i + 1)) for i in range(8)]
    for rank in ranks:
        for bank, rows in weights:
            amax = whole[bank][rows].abs().max().double()
            scale = torch.tensor(448 / amax.item(), dtype=torch.float64).float()
            expected = (whole[bank][rows] * scale).clamp(-448, 448).to(E4M3).float()
            assert torch.equal(rank["weights8"][bank][rows], expected), (bank, rows)
        for bank in MATRICES:
            assert torch.equal(rank["wide"][bank], whole[bank].bfloat16()), "validation needs the wide weights of all"
            if world_size > 1 and bank != "lm_head":
                assert not torch.equal(rank["stale"][bank], rank["wide"][bank]), "a step has handed out bytes only"
            assert torch.equal(rank["weights8"][bank], ranks[0]["weights8"][bank])
        assert torch.equal(rank["scales"], ranks[0]["scales"])


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("name", ["fp16", "fp16 rows"])
def test_a_gradient_that_overflows_on_one_rank_makes_all_skip_the_step(worlds, world_size, name):
    for rank in (rank[name] for rank in worlds[world_size]):
        assert all(torch.equal(w, rank["before"][name]) for name, w in rank["masters"].items())
        assert not any(s.any() for state in rank["state"] for s in state)
        assert (rank["steps"], rank["kept"]["scale"], rank["kept"]["good_steps"]) == (0, 2**14, 0)
        assert {*rank["grads"]} == {None}


def test_a_weight_that_is_not_finite_makes_no_fp8_numbers_of_its_matrix_and_of_no_other():
    for bad in (math.nan, math.inf):
        model, optimizer = trainer(precision="fp8")
        model.mlp.data[3, 5, 7] = bad
        model.precision.hooks.weights_changed(MATRICES, optimizer.masters)
        scales = {key: recipe_at(model, *key).weight_scale.isfinite().item() for key, _ in weights_of(model)}
        assert [key for key, finite in scales.items() if not finite] == [(1, "down")]


if __name__ == "__main__":  # one process imports torch and forks all ranks
    for number in (1, 4):
        multiprocessing.start_processes(work, (number, sys.argv[1]), number, start_method="fork")
