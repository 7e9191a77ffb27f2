"""Attention and the model against naive float64 versions of their specification (the digest of record 28).

References: masks and softmax written out over all pairs of tokens, rotary embedding as complex multiplication, and the
12-layer network as a plain loop with its layer numbers in it; all in float64, gradients by autograd through the
reference. FlexAttention runs compiled (forward only: it has no backward on a CPU), on CUDA with its backward.
"""
import math
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import TINY

import train_gpt as t

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
T, BOS = 640, 63  # five blocks
LAYOUTS = {  # positions of document starts
    "one document over all blocks": [0],
    "starts inside blocks": [0, 200, 300, 320, 600],
    "begins inside a document": [130, 500],
    "no start at all": [],
    "starts at the borders of blocks": [0, 128, 384],
    "short documents": range(5, T, 37),
    "one token long": [0, 1, 2, 127, 128, 129, 639],
}
layouts = pytest.mark.parametrize("starts", LAYOUTS.values(), ids=LAYOUTS)


def naive_mask(starts, window, length=T):
    """(T, T): query t sees key s: not later, in the same document, and its block fewer than `window` blocks back."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        begin = max([0, *(start for start in starts if start <= query)])
        mask[query, max(begin, (query // 128 - window + 1) * 128, 0) : query + 1] = True
    return mask


def naive_attention(q, k, v, mask, scale):
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -math.inf).softmax(-1), v)


def tokens_of(starts, length=T, seed=0):
    tokens = torch.randint(0, BOS, (length,), generator=torch.Generator().manual_seed(seed))
    tokens[list(starts)] = BOS
    return tokens


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---------------------------------------------------------------------------------------------------- attention


@layouts
def test_sdpa_attention_and_its_gradients_equal_a_naive_masked_softmax(starts):
    docs = t.document_ids(tokens_of(starts), BOS)
    windows = {str(window): window for window in (1, 2, 3, 7)}
    masks = t.sdpa_masks(docs, windows)
    weight = normal(T, 2, 8, seed=9)
    for name, window in windows.items():
        ours, naive = ([normal(T, 2, 8, seed=i).requires_grad_() for i in range(3)] for _ in range(2))
        y = t.attend(*ours, masks[name], 0.7)
        reference = naive_attention(*naive, naive_mask(starts, window), 0.7)
        torch.testing.assert_close(y, reference, rtol=1e-11, atol=1e-12)
        (y * weight).sum().backward()
        (reference * weight).sum().backward()
        for a, b in zip(ours, naive):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


def expand(counts, indices, by_query):
    """Lists of a BlockMask -> (n, n) bool, query block by key block."""
    blocks = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for row, (count, columns) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0].tolist())):
        assert len(set(columns[:count])) == count
        blocks[row, columns[:count]] = True
    return blocks if by_query else blocks.T


@layouts
@pytest.mark.parametrize("window", [1, 2, 7])
def test_flex_block_lists_expand_to_the_naive_mask_and_hold_nothing_needless(starts, window):
    docs = t.document_ids(tokens_of(starts), BOS)
    mask = t.flex_masks(docs, {"a window": window})["a window"]
    naive = naive_mask(starts, window)
    by_block = naive.view(5, 128, 5, 128).transpose(1, 2).flatten(2)  # (5, 5, 128 * 128)
    elements = mask.mask_mod(0, 0, torch.arange(T)[:, None], torch.arange(T)[None])
    for side in ("kv", "q"):  # the second one is what backward walks through
        partial, full = (expand(getattr(mask, f"{kind}{side}_num_blocks"), getattr(mask, f"{kind}{side}_indices"),
                                by_query=side == "kv") for kind in ("", "full_"))
        assert not (partial & full).any()
        assert torch.equal(partial | full, by_block.any(-1)), "a listed block is empty, or one is missing"
        assert torch.equal(full, by_block.all(-1)), "whole blocks must skip the element mask, and only they"
        grow = lambda blocks: blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(grow(full) | grow(partial) & elements, naive)
    assert torch.equal(mask.to_dense()[0, 0].bool(), by_block.any(-1))


@pytest.mark.skipif(not shutil.which("g++"), reason="FlexAttention on a CPU needs g++")
def test_compiled_flex_attention_equals_the_naive_softmax_and_a_new_window_compiles_nothing(monkeypatch):
    monkeypatch.setattr(t, "flex_attention", torch.compile(t.flex_attention, dynamic=False))
    graphs = torch._dynamo.utils.counters["stats"]
    q, k, v = (normal(T, 1, 16, seed=i) for i in range(3))
    compiled = None
    for starts in (LAYOUTS["starts inside blocks"], LAYOUTS["begins inside a document"]):
        masks = t.flex_masks(t.document_ids(tokens_of(starts), BOS), {"1": 1, "2": 2, "7": 7})
        for window in (1, 2, 7):
            with torch.no_grad():
                y = t.attend(q.float(), k.float(), v.float(), masks[str(window)], 0.5)
            reference = naive_attention(q, k, v, naive_mask(starts, window), 0.5)
            torch.testing.assert_close(y.double(), reference, rtol=1e-4, atol=1e-5)
            compiled = compiled or graphs["unique_graphs"]
    assert graphs["unique_graphs"] == compiled


@cuda
@pytest.mark.parametrize("window", [1, 2, 7])
def test_flex_attention_with_its_backward_equals_the_naive_softmax_on_cuda(window):
    starts = LAYOUTS["starts inside blocks"]
    mask = t.flex_masks(t.document_ids(tokens_of(starts).cuda(), BOS), {"": window})[""]
    q, k, v = (normal(T, 2, 64, seed=i).float().cuda().requires_grad_() for i in range(3))
    y = torch.compile(t.attend, dynamic=False)(q, k, v, mask, 0.12)
    y.square().sum().backward()
    naive = [x.detach().double().requires_grad_() for x in (q, k, v)]
    reference = naive_attention(*naive, naive_mask(starts, window).cuda(), 0.12)
    reference.square().sum().backward()
    for a, b in ((y, reference), *((x.grad, z.grad) for x, z in zip((q, k, v), naive))):
        assert (a.double() - b).norm() < 5e-3 * b.norm()  # TF32 products


# ---------------------------------------------------------------------------------------------------- rotary


def frequencies(d):
    """Radians a token for each of a head's d / 2 pairs."""
    rotating = d // 4
    return torch.tensor([(1 / 1024) ** (j / (rotating - 1)) for j in range(rotating)] + [0.0] * rotating,
                        dtype=torch.float64)


@pytest.mark.parametrize("d", [8, 16, 128])
def test_rotation_is_multiplication_with_unit_complex_numbers_and_half_of_the_width_keeps_its_bits(d):
    x = normal(300, 3, d)
    y = t.rotate(x, *t.rope_table(300, d, torch.device("cpu"), torch.float64))
    angle = torch.arange(300).double()[:, None, None] * frequencies(d)
    pairs = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * torch.polar(torch.ones_like(angle), -angle)
    torch.testing.assert_close(y, torch.cat((pairs.real, pairs.imag), -1), rtol=1e-12, atol=1e-12)
    free = [*range(d // 4, d // 2), *range(3 * d // 4, d)]
    assert torch.equal(y[..., free], x[..., free])


def test_rotated_products_depend_on_the_distance_alone():
    cos, sin = t.rope_table(300, 16, torch.device("cpu"), torch.float64)
    q, k = normal(1, 1, 16, seed=1).expand(300, 1, 16), normal(1, 1, 16, seed=2).expand(300, 1, 16)
    products = t.rotate(q, cos, sin)[:, 0] @ t.rotate(k, cos, sin)[:, 0].T
    for distance in (0, 3, 150):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-10, atol=1e-10)
    assert products.diagonal(0)[0] != pytest.approx(products.diagonal(-3)[0].item(), abs=1e-3)


# ---------------------------------------------------------------------------------------------------- the model


def tiny(world_size=1, **changes):
    """A float64 model whose every weight is random."""
    values = dict(topology="gpt2", model_dim=16, num_heads=2, mlp_dim=32, vocab_size=BOS + 1, seq_len=384,
                  val_seq_len=384, batch_tokens=384, dtype="float64", precision="bf16", device="cpu", compile=False)
    model = t.GPT(t.Config(**values | changes), torch.device("cpu"), world_size)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(normal(*p.shape, seed=i) * (0.3 if p.dim() == 3 else 1))
    return model


def plain_gpt(w, tokens, targets, starts, long, short, width, heads, mlp, vocab):
    """Sections B.1 to B.6 of the digest with record 28's differences, layer by layer. w: name -> bank."""
    def rms(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    length, d = len(tokens), width // heads
    angle = torch.arange(length).double()[:, None] * frequencies(d)
    turn = torch.polar(torch.ones_like(angle), -angle)[:, None]

    def rotary(x):
        pairs = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
        return torch.cat((pairs.real, pairs.imag), -1)

    masks = {True: naive_mask(starts, long, length), False: naive_mask(starts, short, length)}
    x0 = rms(w["embed"][tokens])
    value_embeds = w["value_embeds"].view(3, vocab, width)
    x, stack, attention_layer = x0, [], 0
    for i in range(12):
        skip_weight, l0, l1, a0, a1 = w["scalars"][i]
        if i >= 6:
            x = x + skip_weight * stack.pop()
        x = l0 * x + l1 * x0
        if i != 7:
            wq, wk, wv, wo = w["qkvo"][4 * attention_layer : 4 * attention_layer + 4]
            u = rms(x)
            q, k, v = ((u @ m.T).view(length, heads, d) for m in (wq, wk, wv))
            q, k = rotary(rms(q)), rotary(rms(k))
            v = a0 * v
            if i in (0, 1, 2, 9, 10, 11):
                v = v + a1 * value_embeds[i % 9 if i > 8 else i][tokens].view(length, heads, d)
            y = naive_attention(q, k, v, masks[i in (0, 4, 11)], 0.12 * 128 / d)
            gate = torch.sigmoid(u[:, :12] @ w["attn_gate"][attention_layer].T)
            x = x + (y * gate[:, :, None]).reshape(length, width) @ wo.T
            attention_layer += 1
        up, down = w["mlp"][2 * i], w["mlp"][2 * i + 1]  # both (width, mlp)
        x = x + torch.relu(rms(x) @ up) ** 2 @ down.T
        if i < 6:
            stack.append(x)
    logits = 15 * torch.tanh(rms(x) @ w["lm_head"].T / 15) + 15
    loss = (logits.logsumexp(-1) - logits[torch.arange(length), targets]).sum()
    return logits, loss


@pytest.mark.parametrize("width, heads, starts, long, short", [
    (16, 2, [0, 100, 290], 2, 1), (16, 2, [50], 3, 2), (128, 1, [0, 200], 3, 1)])
def test_loss_and_all_gradients_equal_a_plain_version_of_the_specification(width, heads, starts, long, short):
    model = tiny(model_dim=width, num_heads=heads)
    tokens, targets = tokens_of(starts, 384), tokens_of([7], 384, seed=5)
    loss = model(tokens, targets, {"long": long, "short": short})
    loss.backward()
    w = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    _, reference = plain_gpt(w, tokens, targets, starts, long, short, width, heads, 32, BOS + 1)
    reference.backward()
    assert loss.item() == pytest.approx(reference.item(), rel=1e-10)
    for name, p in model.named_parameters():
        error = (p.grad - w[name].grad).norm() / w[name].grad.norm()
        assert error < 1e-8, f"{name}: {error}"
    reached = (model.scalars.grad != 0).sum(0).tolist()  # each mixing weight is used where the digest has it
    assert dict(zip(t.SCALARS, reached)) == {"skip": 6, "x": 12, "x0": 12, "v": 11, "ve": 6}


def test_the_record_has_as_many_weights_as_the_digest_says():
    size = {name: math.prod(p.shape) for name, p in t.parameter_table(t.Config()).items()}
    assert round((size["qkvo"] + size["mlp"]) / 1e6, 1) == 82.6 and round(size["lm_head"] / 1e6, 1) == 38.6
    assert size["embed"] == 50304 * 768 and size["value_embeds"] == 3 * 50304 * 768
    assert size["attn_gate"] == 11 * 6 * 12 and size["scalars"] == 12 * 5


@pytest.mark.parametrize("topology, vocab", [("gpt2", 64), ("laptop", 384)])
def test_the_initial_loss_is_the_logarithm_of_the_vocabulary(topology, vocab):
    model = tiny(topology=topology, vocab_size=vocab)
    t.initialize(model, 0)
    loss = model(tokens_of([0, 99], 384), tokens_of([], 384, 1), {"long": 2, "short": 1})
    assert loss.item() / 384 == pytest.approx(math.log(vocab), rel=1e-12)


def test_initial_weights_are_as_specified_and_depend_on_the_seed_but_not_on_the_number_of_ranks():
    one, three, other = tiny(model_dim=64), tiny(3, model_dim=64), tiny(model_dim=64)
    for model, seed in ((one, 7), (three, 7), (other, 8)):
        t.initialize(model, seed)
    for name in one.table:
        assert torch.equal(one.weight(name), three.weight(name)), name
        assert not getattr(three, name)[one.table[name].shape[0] :].any(), f"the padding of {name} is not zero"
        zero_or_constant = name in ("lm_head", "attn_gate", "scalars")
        assert torch.equal(one.weight(name), other.weight(name)) == zero_or_constant
    bound = 3**0.5 * 0.5 / 64**0.5
    qkvo, mlp = one.qkvo.view(11, 4, 64, 64), one.mlp.view(12, 2, 64, 32)
    assert not qkvo[:, 3].any() and not mlp[:, 1].any() and not one.lm_head.any() and not one.attn_gate.any()
    for drawn in (qkvo[:, :3], mlp[:, :1]):
        assert bound * 0.99 < drawn.abs().max() <= bound
        assert drawn.std().item() == pytest.approx(0.5 / 64**0.5, rel=0.02)
    for normal_bank in (one.embed, one.value_embeds):
        assert normal_bank.std().item() == pytest.approx(1, rel=0.05)
    assert one.scalars.tolist() == [[1, 1, 0, 0.5, 0.5]] * 12


def test_saving_memory_changes_neither_the_loss_nor_the_gradients(monkeypatch):
    monkeypatch.setattr(t, "VAL_CHUNK", 100)  # the head in four pieces
    plain, saving = tiny(), tiny(save_memory=True)
    for model in (plain, saving):
        loss = model(tokens_of([0, 99], 384), tokens_of([], 384, 1), {"long": 2, "short": 1})
        loss.backward()
        model.result = loss.item()
    assert plain.result == pytest.approx(saving.result, rel=1e-14)
    for name in plain.table:
        torch.testing.assert_close(getattr(plain, name).grad, getattr(saving, name).grad, rtol=1e-11, atol=1e-11)


def test_saving_memory_keeps_less_for_backward():
    def kept(model):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            model(tokens_of([0], 384), tokens_of([], 384, 1), {"long": 2, "short": 1})
        return sum(sizes)

    assert kept(tiny(save_memory=True)) < 0.4 * kept(tiny())


def test_validation_in_chunks_gives_the_training_loss_without_a_graph(monkeypatch):
    monkeypatch.setattr(t, "VAL_CHUNK", 100)
    model, args = tiny(), (tokens_of([0, 99], 384), tokens_of([], 384, 1), {"long": 2, "short": 1})
    with torch.no_grad():
        loss = model(*args)
    assert loss.item() == pytest.approx(model(*args).item(), rel=1e-13) and not loss.requires_grad


def test_no_token_is_changed_by_another_document_or_by_a_later_token():
    model, starts = tiny(), [0, 100, 290]
    w = {"long": 3, "short": 2}
    tokens = tokens_of(starts, 384)
    with torch.no_grad():
        before = model.hidden(tokens, w)
        inside, changed = slice(101, 200), tokens.clone()
        changed[inside] = tokens_of([], 99, seed=8)
        after = model.hidden(changed, w)
    moved = (before - after).abs().amax(-1) > 1e-9
    assert not moved[:101].any() and not moved[290:].any()
    assert moved[inside].float().mean() > 0.9 and moved[200:290].any()  # later tokens of the same document do see it


def test_the_mean_validation_loss_is_over_exactly_val_tokens():
    model = tiny(val_tokens=768, num_steps=10, window_max=384)
    tokens = torch.cat((tokens_of([0, 300], 500), tokens_of([40, 100], 500, seed=2)))
    w = {name: p.detach() for name, p in model.named_parameters()}
    slices = [(tokens[b : b + 384], tokens[b + 1 : b + 385]) for b in (0, 384)]
    total = sum(plain_gpt(w, x, y, (x == BOS).nonzero()[:, 0].tolist(), 2, 1, 16, 2, 32, BOS + 1)[1] for x, y in slices)
    loss = t.validate(model, tokens[:769].short(), 5, torch.device("cpu"))  # halfway: 192 tokens, two blocks
    assert loss == pytest.approx(total.item() / 768, rel=1e-10)


def test_windows_grow_from_one_block_to_the_end_as_the_digest_says():
    c = t.Config()
    by_hand = [max(1, -(-1728 * s // (1695 * 128))) for s in range(1696)]  # whole numbers only
    assert [t.windows(s, c)["long"] for s in range(1696)] == by_hand
    assert [t.windows(s, c)["short"] for s in range(1696)] == [max(1, w // 2) for w in by_hand]
    assert t.windows(0, c) == {"long": 1, "short": 1} and t.windows(1695, c) == {"long": 14, "short": 7}


def test_model_flops_are_those_of_the_matrices(monkeypatch):
    monkeypatch.setattr(t, "PEAK_FLOPS", {"Fast": 1e12})
    c = t.Config(**TINY | {"topology": "gpt2", "model_dim": 16, "mlp_dim": 32, "vocab_size": 64})
    weights = 11 * 4 * 16 * 16 + 12 * 2 * 16 * 32 + 64 * 16
    assert t.mfu(c, 1000.0, "A Fast GPU") == round(6 * weights * 1000 / 1e12, 4)
    assert t.mfu(replace(c, model_dim=768, mlp_dim=3072, vocab_size=50304, num_heads=6), 1e3, "A Fast GPU") \
        == pytest.approx(6 * 121.2e6 * 1e3 / 1e12, abs=1e-3)
    assert t.mfu(c, 1000.0, "another") is None
