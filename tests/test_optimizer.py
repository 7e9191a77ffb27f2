"""NorMuon, Adam, the schedules and the sharding over ranks.

References: the steps of NorMuon (Li et al. 2025) and of Adam (Kingma & Ba 2015) written in float64 NumPy, the polar
factor U V^T from NumPy's SVD, the update of a table's rows as a loop over rows, sets for which rows are looked up, and for
the sharding one rank against 2, 3 and 4 ranks over gloo on the same 12 sequences, in float64, so that only a fault can
make a difference (in float32 the order of a sum turns bits of Muon's bfloat16). 3 ranks divide no bank of the model and
no table's width: they need the padding.
"""
import dataclasses
import math
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import looking_up, optimizer_of, read
from processes import ENVIRONMENT
from test_kernels import normal
from torch import multiprocessing

import train_gpt as t
from nanogpt import batches, checkpoints, ranks, tables

# ---------------------------------------------------------------------------------------------------- Muon


POLAR_EXPRESS = [(8.156554524902461, -22.48329292557795, 15.878769915207462),
                 (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                 (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                 (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                 (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)]


def polar_express(G):
    """The polynomials of Polar Express (Amsel et al. 2025) on singular values, applied to each: (n, rows, cols) float64."""
    u, s, v = np.linalg.svd(G, full_matrices=False)
    s = s / (1.02 * np.linalg.norm(G, axis=(-2, -1))[:, None] + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    return u * s[:, None, :] @ v


@pytest.mark.parametrize("rows, cols", [(32, 32), (96, 24), (24, 96)])
def test_orthogonalize_moves_singular_values_by_polar_express(rows, cols):
    G = normal(4, rows, cols)
    reference = torch.tensor(polar_express(G.numpy()))
    for dtype, tolerance in ((torch.bfloat16, 0.03), (torch.float32, 1e-5), (torch.float64, 1e-12)):
        X = t.orthogonalize(G, dtype)
        assert X.dtype == dtype
        assert (X.double() - reference).norm() < tolerance * reference.norm()


def normuon(w, grads, lr, decay, mu, beta2):
    """A matrix (rows, cols) after these gradients, by a moving average of NorMuon's updates in float64."""
    m, S, average = np.zeros_like(w), 0.0, 0.0
    for g in grads:
        m = mu * m + (1 - mu) * g
        X = polar_express(((1 - mu) * g + mu * m)[None])[0]
        S = beta2 * S + (1 - beta2) * (X**2).mean(axis=0, keepdims=True)  # a neuron is a column
        scaled = X / np.sqrt(np.maximum(S, 1e-10))
        X = scaled * np.linalg.norm(X) / np.linalg.norm(scaled)
        average = 0.3 * average + 0.7 * X
        w = w - lr * average - np.where(average * w > 0, lr * decay * w, 0)
    return w


# ---------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("preset", t.PRESETS)
def test_the_stages_of_every_preset_cover_all_steps_without_a_gap_and_give_whole_sequences(preset):
    c = t.parse_config([f"--preset={preset}"])
    bounds = [(first, end) for first, end, _ in t.stages(c)]
    assert bounds[0][0] == 0 and bounds[-1][1] == c.num_steps
    assert all(end == first for (_, end), (first, _) in zip(bounds, bounds[1:]))
    for first, end, stage in t.stages(c):
        assert t.stage_tokens(stage, c) % c.seq_len == 0 and c.micro_tokens % c.seq_len == 0
        assert all(t.stage_of(step, c) is stage for step in range(first, end))


def test_the_learning_rate_is_that_computed_by_hand():
    c = t.Config(num_steps=1270, cooldown_frac=0.6)
    by_hand = {0: 1.0, 418: 1.0, 419: 1.52, 507: 1.52, 508: 1.52, 600: 1.355, 700: 1.175, 1000: 0.710, 1200: 0.295}
    assert {step: t.lr_factor_at(step, c) for step in by_hand} == pytest.approx(by_hand, abs=1e-3)


# ---------------------------------------------------------------------------------------------------- one rank


def small(dtype, world_size=1, **changes):
    values = dict(num_layers=5, attention_layers="0,2,4", value_layers="0,4", model_dim=16, num_heads=2, head_dim=8, mlp_dim=32, vocab_size=61, seq_len=128,
                  val_seq_len=128, micro_tokens=128, batch_tokens=1536, num_steps=6, schedule="laptop",
                  ngram_rows=101, dtype=dtype, precision="bf16", device="cpu")
    return t.GPT(t.Config(**values | changes), torch.device("cpu"), world_size)


INDEX = {"value_embeds": "tokens", "ngrams": "ngrams"}  # by which rows each table is looked up
TABLES = tuple(INDEX)


def looked_up(model, seed, count=30):
    """Rows of each table, some of them repeated, and a gradient for each: what a micro-batch of `count` tokens has. That
    of the token embedding is 0."""
    draw = torch.Generator().manual_seed(seed)
    rows = {index: torch.randint(0, model.params[name].shape[0], (count,), generator=draw)
            for name, index in INDEX.items()}
    grads = {name: normal(count, getattr(model, name).size(1), seed=seed + i).to(getattr(model, name).dtype)
             for i, name in enumerate(TABLES)}
    return rows, grads | {"lm_head": torch.zeros(count, model.config.model_dim, dtype=model.lm_head.dtype)}


def give_gradients(model, optimizer, seed, micro_batches=1, change=lambda name, gradient: None):
    """What the passes of a step leave: .grad of each dense parameter, and gradients of the tables' rows."""
    batch = [looked_up(model, 1000 * seed + i) for i in range(micro_batches)]
    for _, grads in batch:
        for name in TABLES:
            change(name, grads[name])
    optimizer.tables.begin(looking_up([rows for rows, _ in batch]))
    for i, (_, grads) in enumerate(batch):
        optimizer.tables.add(i, grads)
    for i, (name, p) in enumerate(model.named_parameters()):
        if name not in TABLES:
            p.grad = normal(*p.shape, seed=100 * seed + i).to(p.dtype)
            change(name, p.grad)
    return batch


def test_each_parameter_has_the_rate_and_decay_that_help_names_and_betas_of_its_kind():
    table = t.parameter_table(t.Config(
        muon_lr=0.02, muon_momentum=0.8, muon_decay=1.5, head_lr=0.01, table_lr=0.1, scalar_lr=0.03, recall_rows=9))
    expected = {"lm_head": (0.01, 0.0075, 0.5, 0.95), **dict.fromkeys(("mlp", "qkvo"), (0.02, 0.03, 0.8, 0.9)),
                **dict.fromkeys(("ngrams", "value_embeds"), (0.1, 0.007, 0, 0.95)),
                **dict.fromkeys(("scalars", "length_vectors"), (0.03, 0, 0.9, 0.99)),
                **dict.fromkeys(("late_in", "late_out", "late_bias"), (0.0025, 0, 0.9, 0.99))}
    assert table.keys() == expected.keys()
    for name, param in table.items():
        assert (param.lr, param.decay, *param.betas) == pytest.approx(expected[name]), name


def test_a_step_waits_for_all_that_it_hands_out(monkeypatch):
    model = small("float64")
    optimizer, waited = optimizer_of(model), []
    monkeypatch.setattr(optimizer, "hand_out", lambda name: SimpleNamespace(wait=lambda: waited.append(name)))
    give_gradients(model, optimizer, 1)
    optimizer.start_sums()
    optimizer.step(1.0)
    assert sorted(waited) == sorted(optimizer.masters)


def test_float32_masters_keep_updates_that_are_too_small_for_bf16():
    model = small("bfloat16")
    optimizer = t.Optimizer(model)
    optimizer.reset({name: torch.ones_like(bank, dtype=torch.float32) for name, bank in optimizer.banks.items()})
    for _ in range(8):  # each moves a weight by about 0.0007; the next smaller number than 1 in bf16 is 0.996
        give_gradients(model, optimizer, 0)
        model.lm_head.grad.fill_(1.0)
        optimizer.start_sums()
        optimizer.step(0.1)
    assert (model.lm_head < 1).all() and (optimizer.masters["lm_head"] < 0.997).all()


def naive_adam(w, m, v, g, param, step, lr_factor):
    """NumPy float64: (w, m, v) after one update of a cautious, bias-corrected Adam."""
    numbers = (1 - param.betas[1] ** step) ** 0.5 / (1 - param.betas[0] ** step), lr_factor * param.lr, *param.betas
    numbers = *numbers, lr_factor * param.decay
    correction, lr, beta1, beta2, decay = (float(np.float32(x)) for x in numbers)  # as compiled functions get them
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
    update = correction * m / (np.sqrt(v) + 1e-10)
    return w - lr * (update + np.where(update * w > 0, decay * w, 0)), m, v


def naive_row(w, square, g, param, lr_factor):
    """NumPy float64: one row w (width,) of a table and the mean square of its gradients after one update."""
    now = (g**2).mean()
    square = param.betas[1] * square + (1 - param.betas[1]) * now if square else now
    update = g / (np.sqrt(square) + 1e-10)
    return w - lr_factor * param.lr * (update + np.where(update * w > 0, lr_factor * param.decay * w, 0)), square


@pytest.mark.parametrize("micro_batches, every_second", [(1, False), (3, True)])
def test_each_step_updates_looked_up_rows_by_the_root_of_their_mean_square_and_leaves_all_others_to_the_bit(micro_batches, every_second):
    """And the rest by Adam; the head, if it is to be so, every second step only, by the sum of both gradients."""
    model = small("float64", head_every_second=every_second)
    optimizer = t.Optimizer(model)
    start = t.initialize(model, 3)
    model.ngrams.data.copy_(normal(101, 8))
    optimizer.reset(start)
    expected = {name: [w.numpy().copy(), 0 * w.numpy(), 0 * w.numpy()] for name, w in start.items()}
    for name in TABLES:
        expected[name] = [getattr(model, name).detach().numpy().copy(), np.zeros(model.params[name].shape[0])]
    steps_of_row, earlier = {name: [0] * model.params[name].shape[0] for name in TABLES}, 0
    for step in range(1, 7):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        batch = give_gradients(model, optimizer, step, micro_batches)
        dense = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
        assert dense.keys() == set(before) - {*TABLES}
        if every_second:
            gradient = dense.pop("lm_head").copy()
            if step % 2 == 0:
                dense["lm_head"] = earlier + gradient
            earlier = gradient
        optimizer.start_sums()
        optimizer.step(0.5)
        for name, param in model.params.items():
            p, want = getattr(model, name), expected[name]
            assert p.grad is None
            if param.optimizer == "muon":
                assert not torch.equal(p, before[name]), "Muon acts at every step"
                continue
            weights = optimizer.masters.get(name, p.detach())
            state_of = optimizer.state.get(name) or (optimizer.tables.tables[name].mean_square,)
            ours = [x.numpy() for x in (weights, *state_of)]
            if name in TABLES:
                rows = [row for rows, _ in batch for row in rows[INDEX[name]].tolist()]
                lines = [line for _, grads in batch for line in grads[name].numpy()]
                untouched = np.array([row not in rows for row in range(len(p))])
                assert untouched.any() and len(set(rows)) < len(rows)
                for old, new in zip(want, ours):
                    assert np.array_equal(old[untouched], new[untouched]), f"{name}: rows that no token looked up"
                for row in set(rows):
                    gradient = sum(line for index, line in zip(rows, lines) if index == row)
                    now = naive_row(*(x[row] for x in want), gradient, param, 0.5)
                    for whole, one in zip(want, now):
                        whole[row] = one
                    steps_of_row[name][row] += 1
            elif name in dense:
                want[:] = naive_adam(*want, dense[name], param, step, 0.5)
            for a, b in zip(ours, want):
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12, err_msg=name)
            assert torch.equal(p.detach(), weights)
            for state, kept in zip((weights, *state_of), want):
                kept[:] = state.numpy()  # from here on "to the bit" means since the last step
    assert micro_batches > 1 or all({*counts} >= {0, 1, 2} for counts in steps_of_row.values()), "too uniform a draw"


def test_each_step_updates_matrices_as_muon_does_each_at_its_own_rate_times_the_factor_of_the_step():
    model = small("float64", muon_lr=0.05, muon_decay=2.0, muon_momentum=0.8)
    optimizer = t.Optimizer(model)
    start, factor = t.initialize(model, 3), 0.5
    optimizer.reset(start)
    matrices_of = {name: param for name, param in model.params.items() if param.optimizer == "muon"}
    gradients = {name: [] for name in matrices_of}
    for step in range(3):
        give_gradients(model, optimizer, step)
        for name, given in gradients.items():
            given.append(getattr(model, name).grad.numpy().copy())
        optimizer.start_sums()
        optimizer.step(factor)
    rates = {"qkvo": [0.05], "mlp": [0.1, 0.2]}  # of matrices in turn
    assert rates.keys() == matrices_of.keys()
    for name, given in gradients.items():
        for i, matrix in enumerate(start[name].numpy()):
            numbers = factor * rates[name][i % len(rates[name])], factor * 2.0 * 0.05, 0.8, 0.9
            numbers = [float(np.float32(x)) for x in numbers]  # as compiled functions get them
            expected = normuon(matrix, [gradient[i] for gradient in given], *numbers)
            np.testing.assert_allclose(
                getattr(model, name)[i].detach().numpy(), expected, rtol=1e-9, atol=1e-11, err_msg=f"{name} {i}")


def test_tables_refuse_calls_in_a_wrong_order():
    model = small("float64")
    tables = optimizer_of(model).tables
    (rows, gradients), _ = give_gradients(model, optimizer_of(model), 1, micro_batches=2)
    batch = looking_up([rows, rows])
    with pytest.raises(RuntimeError, match="`add 0` of the tables must be after `begin`"):
        tables.add(0, gradients)
    tables.begin(batch)
    for wrong in (lambda: tables.add(1, gradients), lambda: tables.add_embedding(None),
                  lambda: tables.update({}, None), tables.finish, lambda: tables.begin(batch)):
        with pytest.raises(RuntimeError, match="but was called after `begin`"):
            wrong()


def test_a_missing_gradient_or_an_unknown_optimizer_is_an_error_in_a_sentence():
    model = small("float64")
    optimizer = optimizer_of(model)
    give_gradients(model, optimizer, 1)
    model.mlp.grad = None
    with pytest.raises(RuntimeError, match="^mlp has no gradient"):
        optimizer.start_sums()
    model.params["scalars"] = model.params["scalars"]._replace(optimizer="sgd")
    with pytest.raises(ValueError, match="^scalars: sgd is no optimizer"):
        t.Optimizer(model)


def updated(batch, late):
    """The optimizer after a step whose passes share memory as CUDA graphs do: one may overwrite what it has returned
    itself, and what those have that were captured later. If `late`, the row gradients of a pass are summed as late as
    may be: when the main stream waits for the stream that they are summed on."""
    model, memory, waiting, current = small("float64"), {}, defaultdict(list), []
    optimizer = optimizer_of(model, seed=3)

    def call(name, function, tensors):
        graph = name, model.lm_head.grad is None
        captured = [*memory]
        for other in captured[captured.index(graph) :] if graph in memory else []:
            for gradient in memory[other]:
                gradient.fill_(math.nan)
        loss, gradients = function(*tensors)
        memory[graph] = gradients.values()
        return loss, gradients

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    def sum_waiting(stream):
        while waiting[stream]:
            add(*waiting[stream].pop(0))

    with pytest.MonkeyPatch.context() as patch:
        if late:
            add = tables.sum_rows
            patch.setattr(tables, "sum_rows", lambda *new: waiting[current[-1]].append(new))
            patch.setattr(tables.SideStream, "on", on)
            patch.setattr(tables.SideStream, "meet", sum_waiting)
            for name in ("send", "add_embedding"):  # which come after the sums on the same stream
                method = getattr(optimizer.tables, name)
                patch.setattr(optimizer.tables, name, lambda x, method=method: (sum_waiting(current[-1]), method(x)))
        model.call = call
        t.train_step(model, optimizer, read(model, batch), 1)
    return checkpoints.tensors_of(optimizer)


@pytest.mark.parametrize("count", [2, 3])
def test_the_row_gradients_of_a_pass_may_still_be_read_while_the_next_pass_runs(count):
    tokens = torch.randint(0, 61, (count, 129), generator=torch.Generator().manual_seed(4))
    batch = [(s[:-1], s[1:]) for s in tokens]
    ours, reference = updated(batch, late=True), updated(batch, late=False)
    assert all(torch.equal(x, reference[name]) for name, x in ours.items())


class Graphs:
    """Calls functions as gpu.CudaGraphs does: it keeps the first function of a key, and overwrites what it has returned
    when it is called again."""

    def __init__(self):
        self.functions, self.returned = {}, None

    def __call__(self, key, function, tensors):
        for x in torch.utils._pytree.tree_leaves(self.returned):
            if isinstance(x, torch.Tensor):
                x.fill_(1)
        function = self.functions.setdefault((key, *[x.shape for x in tensors]), function)
        self.returned = function(*[x.clone() for x in tensors])
        return self.returned


def test_batches_that_cuda_graphs_read_train_like_those_that_are_read_directly():
    results = []
    for graphs in (False, True):
        model = small("float64", candidates=48, recall_rows=1001)
        optimizer = optimizer_of(model)
        if graphs:
            model.past.read_calls = [Graphs(), Graphs()]
        generator, prepared = torch.Generator().manual_seed(1), []

        def prepare(step, model=model, generator=generator, prepared=prepared):
            tokens = torch.randint(0, 61, (3, 129), generator=generator).to(torch.uint16)
            prepared.append(model.past.prepare(tokens, step))

        model.past.meet()
        prepare(0)
        c = model.past.config
        model.past.config = dataclasses.replace(c, epochs=2)
        model.past.remember(prepared[0])
        assert not model.recall_table.any(), "text that is read more than once"
        model.past.config = c
        losses = [t.train_step(model, optimizer, prepared[-1], step, prepare_next=partial(prepare, step + 1)).item()
                  for step in range(5)]
        results.append((losses, model.recall_table.tolist(), model.candidates.target_counts.tolist()))
        assert model.recall_table.any()
    assert results[0] == results[1]


def test_a_step_of_training_follows_the_schedule_and_returns_the_mean_loss(monkeypatch):
    model = small("float64", num_steps=10, cooldown_frac=0.6)
    t.initialize(model, 0)
    optimizer, given = t.Optimizer(model), []
    monkeypatch.setattr(optimizer, "step", lambda factor: given.append(factor) or optimizer.tables.reset())
    tokens = torch.randint(0, 61, (12, 129), generator=torch.Generator().manual_seed(1))
    batch = [(s[:-1], s[1:]) for s in tokens]
    loss, *flags = t.train_step(model, optimizer, read(model, batch), 7)
    assert not flags, "no recipe measures anything"
    assert given == [pytest.approx(0.5 + 0.5 * 0.15)]  # half of the cooldown is over
    total = sum(t.loss_without_gradient(model, *sequence, t.setting_of(7, model.config)).item() for sequence in batch)
    assert loss.item() == pytest.approx(total / 1536, rel=1e-12)
    t.train_step(model, optimizer, read(model, batch), 2)
    assert given[1] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_that_works_on_tables_and_candidates_beside_the_rest_makes_the_same_updates():
    device, results = torch.device("cuda"), []
    values = dict(num_layers=5, model_dim=128, num_heads=2, head_dim=64, mlp_dim=512, vocab_size=20_000, ngram_rows=50_000,
                  seq_len=1024, val_seq_len=1024, micro_tokens=4096, batch_tokens=8192, num_steps=8, schedule="laptop",
                  dtype="float64", precision="bf16", device="cuda", attention="sdpa")
    for beside in (True, False):
        model = t.GPT(t.Config(**values), device)
        optimizer = optimizer_of(model)
        streams = optimizer.tables.side_stream, model.past.side_stream
        assert all(side.stream != torch.cuda.current_stream() for side in streams)
        if not beside:
            for side in streams:
                side.stream = torch.cuda.current_stream()
        for step in range(8):
            tokens = torch.randint(0, 20_000, (8, 1025), generator=torch.Generator().manual_seed(step)).to(torch.uint16)
            model.past.meet()
            batch = model.past.prepare(tokens, step)
            t.train_step(model, optimizer, batch, step)
        results.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, p in results[0].items():  # sums by atomic additions are in any order
        assert (p - results[1][name]).norm() <= 1e-9 * p.norm(), name


# ---------------------------------------------------------------------------------------------------- many ranks


def work(rank, world_size, folder):
    """Six steps of a rank, whose results go to a file in the folder."""
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store{world_size}", rank=rank,
                                world_size=world_size)
    tables.ROWS_AT_A_TIME = 300
    # Two groups of six sequences have their candidates in common. One rank trains on both at once.
    batches.GROUP_TOKENS = 6 * 128
    micro_tokens = 12 * 128 if world_size == 1 else 128
    model = small("float64", world_size, ngram_rows=1001, candidates=48, micro_tokens=micro_tokens)
    start = t.initialize(model, 5 + rank)  # only rank 0's weights count
    model.candidates.reset(5)
    optimizer = t.Optimizer(model)
    optimizer.reset(start)
    generator = torch.Generator().manual_seed(1)
    losses = []
    model.past.meet()
    for step in range(6):
        tokens = torch.randint(0, 61, (12, 129), generator=generator)
        tokens = 5 * step + tokens // (2 + step)  # some rows, and other ones at other steps
        tokens[:, 40 + step] = 60  # a document
        tokens = tokens.to(torch.uint16)
        batch = model.past.prepare(tokens, step)
        assert batch.micro_batches[0][1].chosen.shape == (2 if world_size == 1 else 1, 48)
        losses.append(t.train_step(model, optimizer, batch, step).item())
    optimizer.tables.complete()
    of_tables = {n: optimizer.tables.tables[n].mean_square for n in TABLES}
    weights = {n: model.weight(n).detach().clone() for n in model.params}
    torch.save(dict(weights=weights, losses=losses, tables=of_tables), f"{folder}/{world_size}-{rank}")
    if world_size > 1:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """World size -> results of its ranks after six steps, made by the last lines of this file."""
    folder = tmp_path_factory.mktemp("worlds")
    run = subprocess.run([sys.executable, __file__, folder], capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert run.returncode == 0, run.stderr
    return {n: [torch.load(folder / f"{n}-{rank}") for rank in range(n)] for n in (1, 2, 3, 4)}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_number_of_ranks_gives_the_weights_and_losses_of_one(worlds, world_size):
    (one,), many = worlds[1], worlds[world_size]
    model = small("float64", ngram_rows=1001)
    start = t.initialize(model, 5) | {name: model.get_parameter(name).detach() for name in TABLES}
    for rank in many:
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-12)
        for name, w in one["weights"].items():
            assert torch.equal(rank["weights"][name], many[0]["weights"][name]), f"the ranks differ in {name}"
            moved = (w.double() - start[name][: len(w)].double()).norm()
            error = (rank["weights"][name].double() - w.double()).norm() / moved
            assert moved > 0 and error < 1e-9, f"{name}: {error}"
        for name, mean_square in one["tables"].items():
            torch.testing.assert_close(rank["tables"][name], mean_square, rtol=1e-9, atol=0)


def test_sums_are_waited_for_before_they_are_looked_at():
    slices, waited = ranks.Slices(), []
    for name in ("a", "b"):
        slices.sums[name] = torch.ones(1), SimpleNamespace(wait=lambda name=name: waited.append(name))
    assert len(slices.all_sums()) == 2 and waited == ["a", "b"] and [*slices.sums] == ["a", "b"]
    slices.finished_sum("b")
    assert waited == ["a", "b", "b"] and [*slices.sums] == ["a"]


if __name__ == "__main__":  # one process imports torch and forks all ranks
    for number in (1, 2, 3, 4):
        multiprocessing.start_processes(work, (number, sys.argv[1]), number, start_method="fork")
