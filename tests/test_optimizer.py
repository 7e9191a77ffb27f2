"""Adam, Muon and their sharding over ranks.

References: torch.optim.Adam in float64, the closed form of Adam under a constant gradient, the polar factor U V^T from
NumPy's SVD in float64, and for the sharding one rank against 2, 3 and 4 ranks over gloo on the same 12 sequences, in
float64, so that only a fault can make a difference (in float32 the order of a sum turns bits of Muon's bfloat16). 3
ranks divide no bank of the model: they need the padding.
"""
import json
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


# ---------------------------------------------------------------------------------------------------- Adam


def test_adam_equals_torch_optim_for_five_steps():
    ours, state = normal(6, 5), {}
    theirs = ours.clone().requires_grad_()
    reference = torch.optim.Adam([theirs], lr=0.03, betas=(0.8, 0.95), eps=1e-10)
    for step in range(1, 6):
        theirs.grad = normal(6, 5, seed=step)
        reference.step()
        ours -= t.adam_update(normal(6, 5, seed=step), state, 0.03, step)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-8, atol=1e-10)


def test_adam_moves_small_first_gradients_by_the_whole_learning_rate_and_unseen_rows_not_at_all():
    gradient = torch.tensor([[1e-7, -1e-7], [0.0, 0.0]])  # an eps of 1e-8 would take a part of it
    update = t.adam_update(gradient, {}, 0.5, 1)
    torch.testing.assert_close(update, torch.tensor([[0.5, -0.5], [0.0, 0.0]]), rtol=5e-3, atol=0)


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
    assert 0.6 < diagonal.min() and diagonal.max() < 1.3
    assert (values - torch.diag_embed(diagonal)).abs().max() < 0.06
    assert (X.double() - U @ values @ V.mT).norm() < 0.05 * X.norm()  # nothing outside of their span
    singular = torch.linalg.svdvals(X.double())
    assert 0.6 < singular.min() and singular.max() < 1.3


def test_orthogonalize_treats_the_matrices_of_a_batch_one_by_one():
    G = normal(5, 24, 40) * torch.tensor([1, 1e-3, 1e3, 1, 0.0])[:, None, None]
    batch = t.orthogonalize(G)
    for i in range(5):
        assert torch.equal(batch[i], t.orthogonalize(G[i : i + 1])[0])
    assert not batch[4].any(), "a matrix of zeros, as padding is, must stay one"


def test_orthogonalize_does_not_see_the_scale():
    G = normal(2, 16, 48)
    assert torch.equal(t.orthogonalize(G * 2**20), t.orthogonalize(G))


@pytest.mark.parametrize("rows, cols, factor", [(16, 16, 1), (16, 96, 1), (96, 16, 6**0.5)])
def test_muon_steps_along_the_polar_factor_of_nesterov_momentum(rows, cols, factor):
    state, momentum = {}, np.zeros((2, rows, cols))
    common = 6 * torch.eye(16, dtype=torch.float64) if rows == cols else 0  # else some singular values are too small
    for step, mu in enumerate((0.85, 0.9, 0.95)):
        gradient = normal(2, rows, cols, seed=step) + common
        momentum = mu * momentum + (1 - mu) * gradient.numpy()
        u, _, v = np.linalg.svd((1 - mu) * gradient.numpy() + mu * momentum, full_matrices=False)
        polar = u @ v
        update = t.muon_update(gradient.clone(), state, lr=0.1, momentum=mu).numpy()
        for ours, reference in zip(update, polar):
            cosine = (ours * reference).sum() / np.linalg.norm(ours) / np.linalg.norm(reference)
            length = np.linalg.norm(ours) / np.linalg.norm(reference)
            assert cosine > 0.975  # its own singular values spread over [0.68, 1.13]; plain momentum has 0.94
            assert 0.7 * 0.1 * factor < length < 1.2 * 0.1 * factor  # lr times sqrt(rows / cols) if tall
    np.testing.assert_allclose(state["momentum"].numpy(), momentum, rtol=1e-12, atol=1e-15)


# ---------------------------------------------------------------------------------------------------- schedules


def test_learning_rate_and_momentum_follow_the_digest():
    c = t.Config()
    factors = [t.lr_factor(s, c) for s in range(1696)]
    flat = int(0.55 * 1695)  # cooldown 0.45
    assert factors[: flat + 1] == [1.0] * (flat + 1) and factors[1695] == pytest.approx(0.1)
    line = np.interp(np.arange(flat + 1, 1696), [0.55 * 1695, 1695], [1, 0.1])
    np.testing.assert_allclose(factors[flat + 1 :], line, rtol=1e-12)
    momenta = [t.muon_momentum(s, c) for s in range(1696)]
    np.testing.assert_allclose(momenta, np.interp(np.arange(1696), [0, 300], [0.85, 0.95]), rtol=1e-12)


# ---------------------------------------------------------------------------------------------------- one rank


def small(dtype, world_size=1):
    c = t.Config(topology="laptop", model_dim=16, num_heads=2, mlp_dim=32, vocab_size=61, seq_len=128, val_seq_len=128,
                 batch_tokens=1536, num_steps=4, window_max=128, dtype=dtype, precision="bf16", device="cpu")
    return t.GPT(c, torch.device("cpu"), world_size)


def test_float32_weights_keep_updates_that_bfloat16_would_lose():
    model = small("bfloat16")
    start = t.initialize(model, 0)
    optimizer = t.Optimizer(model)
    optimizer.reset(start)
    first = model.embed.detach().clone()
    for _ in range(50):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step(1e-4, 0.9)  # under a constant gradient Adam moves by 0.6e-4: bfloat16's step at 1 is 78e-4
    torch.testing.assert_close(optimizer.masters["embed"], start["embed"] - 50 * 0.6e-4, rtol=0, atol=1e-5)
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), optimizer.masters[name].to(p.dtype)), name
        assert p.grad is None
    assert (model.embed != first).any()


def test_a_reset_forgets_moments_and_steps():
    model, after = small("float64"), []
    optimizer = t.Optimizer(model)
    for _ in range(2):
        optimizer.reset(t.initialize(model, 3))
        for step in range(2):
            for i, p in enumerate(model.parameters()):
                p.grad = normal(*p.shape, seed=10 * step + i).to(p.dtype)
            optimizer.step(1.0, 0.9)
        after.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*after))


def test_every_parameter_has_an_optimizer_and_learning_rate_of_the_digest():
    table = t.parameter_table(t.Config())
    assert {name: (p.optimizer, p.lr) for name, p in table.items()} == {
        "qkvo": ("muon", 0.05), "mlp": ("muon", 0.05), "attn_gate": ("muon", 0.05), "scalars": ("adam", 0.04),
        "lm_head": ("adam", 0.008), "embed": ("adam", 0.6), "value_embeds": ("adam", 0.6)}


# ---------------------------------------------------------------------------------------------------- many ranks

RANKS = """
import json, os, sys
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
    losses = []
    for step in range(4):
        tokens = torch.randint(0, 61, (12, 129), generator=generator)
        batch = [(s[:-1], s[1:]) for s in tokens[rank::world_size]]
        losses.append(t.train_step(model, optimizer, batch, step).item())
    padding = sum(getattr(model, n)[p.shape[0] :].abs().sum().item() for n, p in model.table.items())
    owned = {n: tuple(m.shape) for n, m in optimizer.masters.items()}
    torch.save(dict(weights={n: model.weight(n).detach().clone() for n in model.table}, losses=losses, calls=calls,
                    padding=padding, owned=owned), f"{folder}/{world_size}-{rank}")
    if world_size > 1:
        dist.destroy_process_group()

dtype, folder = sys.argv[1:]
for world_size in (1, 2, 3, 4):
    mp.start_processes(work, (world_size, dtype, folder), world_size, start_method="fork")
"""


@pytest.fixture(scope="module", params=["float64", "float32"])
def worlds(request, tmp_path_factory):
    """(dtype, world size -> results of its ranks) after four steps. One process imports torch and forks all ranks."""
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
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-12 if dtype == "float64" else 1e-4)
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
            rows = worlds[1][1][0]["weights"][name].shape[0]
            assert shape[0] == (rows if name == "scalars" else -(-rows // world_size)), name


def test_all_ranks_issue_the_same_collectives_in_the_same_order_and_all_of_them_overlap(worlds):
    for world_size in (2, 3, 4):
        first, *others = [rank["calls"] for rank in worlds[1][world_size]]
        assert all(calls == first for calls in others)
        assert json.dumps([kind for kind, *_ in first]) == json.dumps(
            (["all_reduce"] + ["scatter"] * 3 + ["all_reduce"] + ["scatter"] * 3 + ["gather"] * 6) * 4)
        assert all(asynchronous for *_, asynchronous in first)
