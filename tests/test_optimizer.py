"""NorMuon, Adam, the schedules and the sharding over ranks.

References: the steps of the digest's section C.8 written in float64 NumPy, torch.optim.Adam in float64, the polar
factor U V^T from NumPy's SVD, and for the sharding one rank against 2, 3 and 4 ranks over gloo on the same 12
sequences, in float64, so that only a fault can make a difference (in float32 the order of a sum turns bits of Muon's
bfloat16). 3 ranks divide no bank of the model: they need the padding.
"""
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt as t


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def numbers(*values):
    """0-D tensors, as the compiled functions take them, but in float64."""
    return [torch.tensor(value, dtype=torch.float64) for value in values]


# ---------------------------------------------------------------------------------------------------- Adam


def adam(master, grads, lr, decay, beta1, beta2):
    """Our Adam after one step for each gradient: (master, part)."""
    master, part, state = master.clone(), torch.empty_like(master), (torch.zeros_like(master), torch.zeros_like(master))
    for step, grad in enumerate(grads, 1):
        correction = (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        t.adam_update(master, part, grad, state, *numbers(lr, decay, beta1, beta2, correction))
    return master, part


@pytest.mark.parametrize("betas", [(0.5, 0.95), (0.75, 0.95), (0.9, 0.99)])
def test_adam_without_decay_equals_torch_optim_for_five_steps(betas):
    start, grads = normal(6, 5), [normal(6, 5, seed=step) for step in range(1, 6)]
    theirs = start.clone().requires_grad_()
    reference = torch.optim.Adam([theirs], lr=0.03, betas=betas, eps=1e-12)  # eps comes in at another place
    for theirs.grad in grads:
        reference.step()
    master, part = adam(start, grads, 0.03, 0.0, *betas)
    torch.testing.assert_close(master, theirs.detach(), rtol=1e-8, atol=1e-9)
    assert torch.equal(part, master)


def test_adam_moves_small_first_gradients_by_the_whole_learning_rate_and_unseen_rows_not_at_all():
    gradient = torch.tensor([[1e-7, -1e-7], [0.0, 0.0]], dtype=torch.float64)  # an eps of 1e-8 would take a part of it
    master, _ = adam(torch.ones(2, 2, dtype=torch.float64), [gradient], 0.5, 0.3, 0.9, 0.99)
    shrunk = 1 - 0.5 * (1 + 0.3)  # the update lowers this weight, so it decays; rows without gradient must not
    torch.testing.assert_close(master, torch.tensor([[shrunk, 1.5], [1, 1]], dtype=torch.float64), rtol=0, atol=6e-3)


def test_adams_decay_acts_only_where_the_update_shrinks_the_weight():
    start, grads = normal(40, 50), [normal(40, 50, seed=step) for step in (1, 2, 3)]
    p, m, v = start.numpy().copy(), 0.0, 0.0
    for step, grad in enumerate(grads, 1):
        g = grad.numpy()
        m, v = 0.6 * m + 0.4 * g, 0.9 * v + 0.1 * g**2
        update = np.sqrt(1 - 0.9**step) / (1 - 0.6**step) * m / (np.sqrt(v) + 1e-10)
        p = p - 0.02 * update - np.where(update * p > 0, 0.02 * 0.7 * p, 0)
    np.testing.assert_allclose(adam(start, grads, 0.02, 0.7, 0.6, 0.9)[0].numpy(), p, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- Muon


def matrices(rows, cols, spectrum, count=3):
    """Matrices with known singular vectors and values: (G, U, V)."""
    found = []
    for seed in range(count):
        u, v = (np.linalg.qr(np.random.default_rng(seed + 10 * n).normal(size=(n, len(spectrum))))[0]
                for n in (rows, cols))
        found.append((u * spectrum @ v.T, u, v))
    return [torch.tensor(np.stack(part)) for part in zip(*found)]


@pytest.mark.parametrize("rows, cols", [(32, 32), (64, 32), (32, 64), (96, 24)])
def test_orthogonalize_keeps_singular_vectors_and_brings_all_values_near_one(rows, cols):
    spectrum = np.geomspace(1, 0.02, min(rows, cols))
    G, U, V = matrices(rows, cols, spectrum)
    X = t.orthogonalize(G)
    assert X.dtype == torch.bfloat16 and X.shape == G.shape
    values = U.mT @ X.double() @ V  # diagonal, if the singular vectors are those of G
    diagonal = values.diagonal(dim1=-2, dim2=-1)
    assert 0.84 < diagonal.min() and diagonal.max() < 1.16
    assert (values - torch.diag_embed(diagonal)).abs().max() < 0.06
    assert (X.double() - U @ values @ V.mT).norm() < 0.05 * X.norm()  # nothing outside of their span
    singular = torch.linalg.svdvals(X.double())
    assert 0.84 < singular.min() and singular.max() < 1.16


POLAR_EXPRESS = [(8.156554524902461, -22.48329292557795, 15.878769915207462),
                 (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                 (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                 (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                 (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)]


def polar_express(G):
    """The digest's polynomials of a singular value, applied to each: (n, rows, cols) float64."""
    u, s, v = np.linalg.svd(G, full_matrices=False)
    s = s / (1.02 * np.linalg.norm(G, axis=(-2, -1))[:, None] + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    return u * s[:, None, :] @ v


@pytest.mark.parametrize("rows, cols", [(32, 32), (96, 24), (24, 96)])
def test_orthogonalize_follows_the_digests_polynomials(rows, cols):
    G = normal(4, rows, cols)
    reference = torch.tensor(polar_express(G.numpy()))
    assert (t.orthogonalize(G).double() - reference).norm() < 0.03 * reference.norm()  # bfloat16


def test_orthogonalize_treats_the_matrices_of_a_batch_one_by_one():
    G = normal(5, 24, 40) * torch.tensor([1, 1e-3, 1e3, 1, 0.0])[:, None, None]
    batch = t.orthogonalize(G)
    for i in range(5):
        assert torch.equal(batch[i], t.orthogonalize(G[i : i + 1])[0])
    assert not batch[4].any(), "a matrix of zeros, as padding is, must stay one"


def test_orthogonalize_does_not_see_the_scale():
    G = normal(2, 16, 48)
    assert torch.equal(t.orthogonalize(G * 2**20), t.orthogonalize(G))


def normuon(p, grads, lr, decay, momenta):
    """Section C.8.1 of the digest in float64, one matrix at a time: weights (n, rows, cols) after all gradients."""
    done = []
    for i, w in enumerate(p):
        m, S = np.zeros_like(w), 0.0
        for g, mu in zip((grad[i] for grad in grads), momenta):
            m = mu * m + (1 - mu) * g
            X = polar_express(((1 - mu) * g + mu * m)[None])[0]
            tall = w.shape[0] >= w.shape[1]  # then a neuron is a row, else a column
            S = 0.9 * S + 0.1 * (X**2).mean(axis=1 if tall else 0, keepdims=True)
            scaled = X / np.sqrt(np.maximum(S, 1e-10))
            X = scaled * np.linalg.norm(X) / np.linalg.norm(scaled)
            w = w - lr * X - np.where(X * w > 0, lr * decay * w, 0)
        done.append(w)
    return np.stack(done)


def muon(start, grads, lr, decay, momenta):
    """Our Muon after one step for each gradient: (master, part)."""
    master, part = start.clone(), torch.empty_like(start, dtype=torch.bfloat16)
    shape = (*start.shape[:2], 1) if start.shape[1] >= start.shape[2] else (len(start), 1, start.shape[2])
    state = torch.zeros_like(start), start.new_zeros(shape)
    for grad, momentum in zip(grads, momenta):
        t.muon_update(master, part, grad.clone(), state, *numbers(lr, decay, momentum))
    return master, part


SHAPES = pytest.mark.parametrize("rows, cols", [(16, 16), (16, 48), (48, 16)])
MOMENTA = (0.85, 0.9, 0.95)


@SHAPES
def test_muon_is_the_digests_normuon_with_cautious_decay(rows, cols, monkeypatch):
    monkeypatch.setattr(t, "orthogonalize", lambda G: torch.tensor(polar_express(G.numpy())))  # without its bfloat16
    start, grads = normal(3, rows, cols, seed=8), [normal(3, rows, cols, seed=i) for i in range(3)]
    grads[0][:, :2], grads[0][:, :, :3] = 5 * grads[0][:, :2], 9 * grads[0][:, :, :3]  # neurons of unequal weight
    master, part = muon(start, grads, 0.3, 1.1, MOMENTA)
    reference = normuon(start.numpy(), [g.numpy() for g in grads], 0.3, 1.1, MOMENTA)
    np.testing.assert_allclose(master.numpy(), reference, rtol=1e-9, atol=1e-11)
    assert torch.equal(part, master.bfloat16())


@SHAPES
def test_muon_in_bfloat16_stays_near_its_float64_reference(rows, cols):
    start, grads = torch.zeros(2, rows, cols, dtype=torch.float64), [normal(2, rows, cols, seed=i) for i in range(3)]
    reference = normuon(start.numpy(), [g.numpy() for g in grads], 0.1, 1.0, MOMENTA)
    error = np.linalg.norm(muon(start, grads, 0.1, 1.0, MOMENTA)[0].numpy() - reference)
    assert error < 0.03 * np.linalg.norm(reference)


@SHAPES
def test_equalising_neurons_keeps_the_frobenius_norm_of_the_update(rows, cols):
    start, gradient = torch.zeros(4, rows, cols, dtype=torch.float64), normal(4, rows, cols)
    gradient[0, 0] *= 100
    master, _ = muon(start, [gradient], 1.0, 0.0, [0.0])
    norms = t.orthogonalize(gradient).double().norm(dim=(1, 2))
    torch.testing.assert_close(master.norm(dim=(1, 2)), norms, rtol=1e-9, atol=0)
    neurons = master.norm(dim=2 if rows >= cols else 1)  # after one step all of a matrix have one length
    torch.testing.assert_close(neurons, neurons[:, :1].expand_as(neurons), rtol=1e-9, atol=0)


def test_a_matrix_without_gradient_as_padding_is_stays_as_it_is():
    start = torch.cat((normal(1, 8, 16), torch.zeros(1, 8, 16, dtype=torch.float64)))
    master, _ = muon(start, [torch.zeros(2, 8, 16, dtype=torch.float64)] * 2, 1.0, 0.5, [0.9, 0.9])
    assert torch.equal(master, start)


# ---------------------------------------------------------------------------------------------------- schedules


def test_stages_of_the_speedrun_begin_at_the_rounded_shares_of_the_steps():
    c = t.Config(num_steps=1270)
    assert [(first, end) for first, end, _ in t.stages(c)] == [(0, 419), (419, 838), (838, 1257), (1257, 1270),
                                                               (1270, 1270)]
    batches = [round(t.stage_tokens(t.stage_of(step, c), c)) for step in range(1270)]
    assert batches == [131_072] * 419 + [262_144] * 419 + [393_216] * 432
    assert t.total_tokens(c) == sum(batches)
    assert [t.stage_of(step, c).longest for step in (0, 418, 419, 1270)] == [896, 896, 2048, 2048]


@pytest.mark.parametrize("preset", t.PRESETS)
def test_the_stages_of_every_preset_cover_all_steps_without_a_gap_and_give_whole_sequences(preset):
    c = t.parse_config([f"--preset={preset}"])
    bounds = [(first, end) for first, end, _ in t.stages(c)]
    assert bounds[0][0] == 0 and bounds[-1][1] == c.num_steps
    assert all(end == first for (_, end), (first, _) in zip(bounds, bounds[1:]))
    for first, end, stage in t.stages(c):
        assert t.stage_tokens(stage, c) % c.seq_len == 0 and c.micro_tokens % c.seq_len == 0
        assert all(t.stage_of(step, c) is stage for step in range(first, end))


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 7, 50, 101])
def test_few_steps_leave_out_stages_but_never_a_step(num_steps):
    c = t.Config(num_steps=num_steps)
    taken = [step for first, end, _ in t.stages(c) for step in range(first, end)]
    assert taken == [*range(num_steps)]


def test_the_learning_rate_follows_the_digest():
    c = t.Config(num_steps=1270)
    by_hand = {0: 1.0, 418: 1.0, 419: 1.52, 507: 1.52, 508: 1.52, 600: 1.355, 700: 1.175, 1000: 0.710, 1200: 0.295}
    assert {step: t.lr_factor(step, c) for step in by_hand} == pytest.approx(by_hand, abs=1e-3)
    down = np.interp(np.arange(508, 1271), [508, 1270], [0, 1])
    stage = np.array([1.52 if step < 838 else 1.73 for step in range(508, 1271)])
    np.testing.assert_allclose([t.lr_factor(s, c) for s in range(508, 1271)], stage * (1 - down) + 0.15 * down,
                               rtol=1e-12)


def test_muons_momentum_rises_and_falls_over_the_digests_steps():
    c = t.Config(num_steps=1250)
    momenta = [t.muon_momentum(s, c) for s in range(1251)]
    line = np.interp(np.arange(1251), [0, 300, 1200, 1250], [0.85, 0.95, 0.95, 0.85])
    np.testing.assert_allclose(momenta, line, rtol=1e-12)


# ---------------------------------------------------------------------------------------------------- one rank


t.TOPOLOGIES["all kinds"] = [
    t.Layer(paired=True, ve=0), t.Layer(window="long", offset=True, xsa=True), t.Layer(),
    t.Layer(attn=False, skip=1), t.Layer(ve=1, source=1, xsa=True)]


def small(dtype, world_size=1, **changes):
    values = dict(topology="all kinds", model_dim=16, num_heads=2, mlp_dim=32, vocab_size=61, seq_len=128,
                  val_seq_len=128, micro_tokens=128, batch_tokens=1536, num_steps=6, schedule="laptop",
                  adam_every=2, untie_frac=0.5, bigram_rows=101, dtype=dtype, precision="bf16", device="cpu")
    return t.GPT(t.Config(**values | changes), torch.device("cpu"), world_size)


def give_gradients(model, seed):
    """Adds to the gradient of each parameter, as a backward pass does."""
    for i, p in enumerate(model.parameters()):
        if not (model.tied and p is model.embed):
            grad = normal(*p.shape, seed=100 * seed + i).to(p.dtype)
            p.grad = grad if p.grad is None else p.grad + grad


def test_float32_weights_keep_updates_that_bfloat16_would_lose():
    model = small("bfloat16", adam_every=1)
    start = t.initialize(model, 0)
    start["bigrams"] = torch.ones_like(start["bigrams"])
    optimizer = t.Optimizer(model)
    optimizer.reset(start)
    model.bigrams.data.fill_(1)
    for _ in range(50):
        for p in model.parameters():
            p.grad = -torch.ones_like(p)
        optimizer.step(1e-4, 0.9)  # under a constant gradient Adam moves by 0.6e-4: bfloat16's step at 1 is 78e-4
    torch.testing.assert_close(optimizer.masters["bigrams"], start["bigrams"] + 50 * 0.6e-4, rtol=0, atol=1e-5)
    for _ in range(50):
        for p in model.parameters():
            p.grad = -torch.ones_like(p)
        optimizer.step(1e-4, 0.9)
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), optimizer.masters[name].to(p.dtype)), name
        assert p.grad is None
    assert (model.bigrams > 1).all()


def test_a_reset_forgets_moments_and_steps():
    model, after = small("float64"), []
    optimizer = t.Optimizer(model)
    for _ in range(2):
        optimizer.reset(t.initialize(model, 3))
        for step in range(3):
            give_gradients(model, step)
            optimizer.step(1.0, 0.9)
        after.append([p.detach().clone() for p in model.parameters()])
        for p in model.parameters():
            p.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*after))


@pytest.mark.parametrize("every", [1, 2, 3])
def test_adam_acts_every_nth_step_on_the_sum_of_the_gradients_since_and_muon_at_every_step(every):
    model = small("float64", adam_every=every)
    optimizer = t.Optimizer(model)
    optimizer.reset(t.initialize(model, 3))
    model.tied = False
    table = model.table
    expected = {name: (getattr(model, name).detach().clone(), torch.zeros_like(getattr(model, name)), 0.0, 0.0)
                for name, param in table.items() if param.optimizer == "adam"}
    for step in range(1, 7):
        before = {name: getattr(model, name).detach().clone() for name in table}
        give_gradients(model, step)
        given = {name: normal(*getattr(model, name).shape, seed=100 * step + i) for i, name in enumerate(table)}
        optimizer.step(0.5, 0.9)
        for name, param in table.items():
            p = getattr(model, name)
            if param.optimizer == "muon":
                assert not torch.equal(p, before[name]) and p.grad is None
                continue
            w, gathered, m, v = expected[name]
            gathered = gathered + given[name]
            if step % every:
                assert torch.equal(p, before[name]) and torch.allclose(p.grad, gathered)
            else:
                (beta1, beta2), n = param.betas, step // every
                m, v = beta1 * m + (1 - beta1) * gathered, beta2 * v + (1 - beta2) * gathered**2
                update = (1 - beta2**n) ** 0.5 / (1 - beta1**n) * m / (v.sqrt() + 1e-10)
                w = w - 0.5 * param.lr * (update + torch.where(update * w > 0, 0.5 * param.decay * w, 0))
                gathered = torch.zeros_like(gathered)
                torch.testing.assert_close(p.detach(), w, rtol=1e-5, atol=1e-6)  # its scalars are float32
                assert p.grad is None
            expected[name] = w, gathered, m, v


def test_untying_copies_weights_masters_and_moments_of_the_head_which_then_part():
    model = small("bfloat16", adam_every=1)
    optimizer = t.Optimizer(model)
    optimizer.reset(t.initialize(model, 3))
    for step in range(2):
        give_gradients(model, step)
        optimizer.step(1.0, 0.9)
    assert not model.embed.any() and not optimizer.masters["embed"].any()  # so far it takes part in nothing
    optimizer.untie()
    assert not model.tied and torch.equal(model.embed, model.lm_head) and model.embed.any()
    assert torch.equal(optimizer.masters["embed"], optimizer.masters["lm_head"])
    assert (optimizer.masters["embed"] != model.embed).any(), "the float32 weights, not their bfloat16 copies"
    for ours, theirs in zip(optimizer.state["embed"], optimizer.state["lm_head"]):
        assert torch.equal(ours, theirs) and ours.any() and ours.data_ptr() != theirs.data_ptr()
    model.embed.grad, model.lm_head.grad = torch.ones_like(model.embed), torch.ones_like(model.embed)
    optimizer.step(1.0, 0.9)
    assert torch.equal(model.embed, model.lm_head)  # the same gradient, moments and number of updates
    model.embed.grad, model.lm_head.grad = torch.ones_like(model.embed), -torch.ones_like(model.embed)
    optimizer.step(1.0, 0.9)
    assert not torch.equal(model.embed, model.lm_head)


def test_the_run_unties_at_the_first_step_of_the_last_third_and_reports_the_tied_loss_until_then():
    model = small("float64", untie_frac=0.667)
    optimizer = t.Optimizer(model)
    optimizer.reset(t.initialize(model, 0))
    tied = []
    for step in range(6):
        tokens = torch.randint(0, 61, (12, 129), generator=torch.Generator().manual_seed(step))
        t.train_step(model, optimizer, [(s[:-1], s[1:]) for s in tokens], step)
        tied.append(model.tied)
    assert tied == [True] * 5 + [False]  # 0.667 * 6 = 4.002


@pytest.mark.parametrize("every", [1, 2, 3])
def test_warming_up_leaves_no_trace(every):
    warm, fresh = small("float64", adam_every=every), small("float64", adam_every=every)
    start, optimizer = t.initialize(fresh, 0), t.Optimizer(warm)
    t.warm_up(warm, optimizer, torch.device("cpu"))
    assert warm.tied and (optimizer.steps, optimizer.updates) == (0, 0)
    for name, p in warm.named_parameters():
        assert torch.equal(p, getattr(fresh, name)) and torch.equal(optimizer.masters[name], start[name]), name
        assert p.grad is None and not any(part.any() for part in optimizer.state[name]), name


def test_every_parameter_has_optimizer_learning_rate_decay_and_betas_of_the_digest():
    table = t.parameter_table(t.Config())
    rates = {name: (p.optimizer, p.lr) for name, p in table.items()}
    assert rates == {
        "qk": ("muon", 0.023), "vo": ("muon", 0.023), "mlp_up": ("muon", 0.046), "mlp_down": ("muon", 0.092),
        "scalars": ("adam", 0.04), "mix": ("adam", 0.04), "xsa": ("adam", 0.04), "gates": ("adam", 0.008),
        "value_embeds": ("adam", 0.6), "bigrams": ("adam", 0.6), "lm_head": ("adam", 0.008), "embed": ("adam", 0.008)}
    per_step = {name: p.lr * p.decay for name, p in table.items()}  # what a weight loses in a step at full rate
    muon = 1.2 * 0.023**2
    assert per_step == pytest.approx({
        "qk": muon, "vo": muon, "mlp_up": 2 * muon, "mlp_down": 4 * muon, "value_embeds": 0.009, "bigrams": 0.009,
        "lm_head": 4.8e-5, "embed": 4.8e-5, "scalars": 0, "mix": 0, "xsa": 0, "gates": 0})
    assert {name: p.betas for name, p in table.items() if p.decay and p.optimizer == "adam"} == {
        "value_embeds": (0.75, 0.95), "bigrams": (0.75, 0.95), "lm_head": (0.5, 0.95), "embed": (0.5, 0.95)}
    assert {p.betas for p in table.values() if p.optimizer == "adam" and not p.decay} == {(0.9, 0.99)}


# ---------------------------------------------------------------------------------------------------- many ranks

RANKS = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import train_gpt as t
import test_optimizer

def work(rank, world_size, dtype, folder):
    torch.set_num_threads(1)
    calls = []
    def recorded(kind, function):
        def call(*args, **kwargs):
            calls.append([kind, str(tuple(args[0].shape)), bool(kwargs.get("async_op"))])
            return function(*args, **kwargs)
        return call
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store{world_size}", rank=rank,
                                world_size=world_size)
        t.reduce_scatter, t.all_gather = recorded("scatter", t.reduce_scatter), recorded("gather", t.all_gather)
        dist.all_reduce = recorded("all_reduce", dist.all_reduce)
    model = test_optimizer.small(dtype, world_size)
    start = t.initialize(model, 5 + rank)  # only rank 0's weights count
    optimizer = t.Optimizer(model)
    optimizer.reset(start)
    generator = torch.Generator().manual_seed(1)
    losses, issued = [], []
    for step in range(6):
        tokens = torch.randint(0, 61, (12, 129), generator=generator)
        batch = [(s[:-1], s[1:]) for s in tokens[rank::world_size]]
        losses.append(t.train_step(model, optimizer, batch, step).item())
        issued.append(calls[:])
        calls.clear()
    padding = sum(getattr(model, n)[p.shape[0] :].abs().sum().item() for n, p in model.table.items())
    owned = {n: tuple(m.shape) for n, m in optimizer.masters.items()}
    torch.save(dict(weights={n: model.weight(n).detach().clone() for n in model.table}, losses=losses, calls=issued,
                    padding=padding, owned=owned, tied=model.tied), f"{folder}/{world_size}-{rank}")
    if world_size > 1:
        dist.destroy_process_group()

dtype, folder = sys.argv[1:]
for world_size in (1, 2, 3, 4):
    mp.start_processes(work, (world_size, dtype, folder), world_size, start_method="fork")
"""


@pytest.fixture(scope="module", params=["float64", "float32"])
def worlds(request, tmp_path_factory):
    """(dtype, world size -> results of its ranks) after six steps. One process imports torch and forks all ranks."""
    folder = tmp_path_factory.mktemp("worlds")
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here.parent}:{here}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", RANKS, request.param, folder], env=environment, capture_output=True,
                         text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return request.param, {n: [torch.load(folder / f"{n}-{rank}") for rank in range(n)] for n in (1, 2, 3, 4)}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_number_of_ranks_gives_the_weights_and_losses_of_one(worlds, world_size):
    dtype, results = worlds
    (one,), many = results[1], results[world_size]
    start = t.initialize(small(dtype), 5)
    for rank in many:
        assert not rank["tied"]
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-12 if dtype == "float64" else 1e-3)
        for name, w in one["weights"].items():
            assert torch.equal(rank["weights"][name], many[0]["weights"][name]), f"the ranks differ in {name}"
            moved = (w.double() - start[name][: len(w)].double()).norm()
            error = (rank["weights"][name].double() - w.double()).norm() / moved
            assert moved > 0 and error < (1e-9 if dtype == "float64" else 0.1), f"{name}: {error}"


@pytest.mark.parametrize("world_size", [3, 4])
def test_each_rank_holds_its_part_of_the_optimizers_state_and_padding_stays_zero(worlds, world_size):
    for rank in worlds[1][world_size]:
        assert rank["padding"] == 0
        for name, shape in rank["owned"].items():
            rows, whole = worlds[1][1][0]["weights"][name].shape[0], name in ("scalars", "mix", "xsa", "gates")
            assert shape[0] == (rows if whole else -(-rows // world_size)), name


def test_all_ranks_issue_the_same_collectives_in_the_same_order_and_all_of_them_overlap(worlds):
    loss = ["all_reduce"]
    muon = loss + ["scatter"] * 4 + ["gather"] * 4  # qk, vo, mlp_up, mlp_down
    tied = loss + ["scatter"] * 2 + ["all_reduce"] * 4 + ["scatter"] * 5 + ["gather"] * 7  # tables and head as well
    untied = loss + ["scatter"] * 2 + ["all_reduce"] * 4 + ["scatter"] * 6 + ["gather"] * 8  # and the embedding
    for world_size in (2, 3, 4):
        first, *others = [rank["calls"] for rank in worlds[1][world_size]]
        assert all(calls == first for calls in others)
        assert [[kind for kind, *_ in calls] for calls in first] == [muon, tied, muon, untied, muon, untied]
        assert all(asynchronous for calls in first for *_, asynchronous in calls)
