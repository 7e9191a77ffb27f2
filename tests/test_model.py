"""Attention and the model against naive versions in float64, written from the papers and records that the script names.

References: masks and softmax written out over all pairs of tokens, rotary embedding as complex multiplication, and the
network as a plain loop over its layers; all in float64, gradients by autograd through the
reference. FlexAttention runs on CUDA, compiled, with its backward; on a CPU only its mask is compared. Rows of
tables that a batch looks up: Python integers for their numbers, autograd's dense gradients for theirs.
"""
import math

import numpy as np
import pytest
import torch
from conftest import one_group, training_loss, untrained
from test_kernels import normal

import train_gpt as t
from nanogpt import candidates, masks, past

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
WINDOWS = (1, 2, 3, 7)  # 7 blocks are more than there are
layouts = pytest.mark.parametrize("starts", LAYOUTS.values(), ids=LAYOUTS)


def naive_mask(starts, window, length=T):
    """(T, T): query t sees key s: not later, in the same document, and its block fewer than `window` blocks back."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        begin = max([0, *(start for start in starts if start <= query)])
        mask[query, max(begin, (query // 128 - window + 1) * 128, 0) : query + 1] = True
    return mask


def naive_attention(q, k, v, mask):
    scores = torch.einsum("qhd,khd->hqk", q, k)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -math.inf).softmax(-1), v)


def tokens_of(starts, length=T, seed=0):
    tokens = torch.randint(0, BOS, (length,), generator=torch.Generator().manual_seed(seed))
    tokens[list(starts)] = BOS
    return tokens


def documents_of(begins):
    """The number of starts up to and including each token, as the model counts them."""
    return begins.cumsum(0, dtype=torch.int32)


# ---------------------------------------------------------------------------------------------------- attention


@layouts
def test_sdpa_attention_and_its_gradients_equal_a_naive_masked_softmax(starts):
    """In bf16, which a CPU may be quick at, other functions compute it."""
    documents = documents_of(tokens_of(starts) == BOS)
    made = masks.sdpa_masks(documents, WINDOWS)
    weight = normal(T, 2, 8, seed=9)
    for mask, window in zip(made, WINDOWS, strict=True):
        ours, naive = ([normal(T, 2, 8, seed=i).requires_grad_() for i in range(3)] for _ in range(2))
        y = t.attend(*ours, mask)
        reference = naive_attention(*naive, naive_mask(starts, window))
        torch.testing.assert_close(y, reference, rtol=1e-11, atol=1e-12)
        (y * weight).sum().backward()
        (reference * weight).sum().backward()
        for a, b in zip(ours, naive):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)
        narrow = t.attend(*[x.detach().bfloat16() for x in ours], mask)
        assert (narrow - reference).norm() < 0.015 * reference.norm()


def test_the_mask_of_flex_attention_is_that_of_every_pair_of_tokens():
    starts, each = [0, 200, 300, 320, 600], torch.arange(T)
    [mask] = masks.flex_masks(documents_of(tokens_of(starts) == BOS), (5,))
    assert torch.equal(mask.mask_mod(0, 0, each[:, None], each), naive_mask(starts, 5))


@pytest.mark.parametrize("seed", range(20))
def test_flex_block_lists_hold_what_any_random_packing_makes_visible_in_both_directions(seed):
    draw = torch.Generator().manual_seed(seed)
    length, count = 128 * 16, int(2 ** (seed % 10))
    starts = sorted(set(torch.randint(0, length, (count,), generator=draw).tolist()))
    documents = documents_of(tokens_of(starts, length) == BOS)
    document = [sum(start <= i for start in starts) for i in range(length)]
    for window, mask in zip((1, 4, 16), masks.flex_masks(documents, (1, 4, 16)), strict=True):
        for query in range(16):  # blocks as sets of documents: visible if they share one, wholly if they have only one
            for key in range(16):
                q, k = (set(document[128 * b : 128 * b + 128]) for b in (query, key))
                near = 0 <= query - key < window
                kind = "full_" if near and query != key and q == k and len(q) == 1 else "" if near and q & k else None
                for listed in ("full_", ""):
                    for side, row, column in (("kv", query, key), ("q", key, query)):
                        seen = getattr(mask, f"{listed}{side}_num_blocks")[0, 0, row].item()
                        columns = getattr(mask, f"{listed}{side}_indices")[0, 0, row, :seen].tolist()
                        assert columns.count(column) == (listed == kind), (window, side, row, column, kind)


@cuda
@pytest.mark.parametrize("window", [1, 2, 7])
def test_flex_attention_with_its_backward_equals_the_naive_softmax_on_cuda(window):
    starts = LAYOUTS["starts inside blocks"]
    [mask] = masks.flex_masks(documents_of(tokens_of(starts).cuda() == BOS), (window,))
    q, k, v = (0.35 * normal(T, 2, 64, seed=i).float().cuda() for i in range(3))  # scores of about 1
    for x in (q, k, v):
        x.requires_grad_()
    y = torch.compile(t.attend, dynamic=False)(q, k, v, mask)
    y.square().sum().backward()
    naive = [x.detach().double().requires_grad_() for x in (q, k, v)]
    reference = naive_attention(*naive, naive_mask(starts, window).cuda())
    reference.square().sum().backward()
    for a, b in ((y, reference), *((x.grad, z.grad) for x, z in zip((q, k, v), naive))):
        assert (a.double() - b).norm() < 5e-3 * b.norm()  # TF32 products


# ---------------------------------------------------------------------------------------------------- rotary


def frequencies(d):
    """Radians a position for each of a head's d / 2 pairs, before any window grew."""
    rotating = d // 4
    return torch.tensor([1024 ** (-j / (rotating - 1)) for j in range(rotating)] + [0.0] * rotating,
                        dtype=torch.float64)


def turned(x, freq):
    """x (T, H, d): pair (j, j + d/2), as a complex number, times exp(-i position freq_j)."""
    angle = torch.arange(len(x)).double()[:, None, None] * freq
    pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), -angle)
    return torch.cat((pairs.real, pairs.imag), -1)


def test_a_table_in_bfloat16_has_the_precise_angles_of_far_positions():
    cos, sin = t.rotary_table(600_000, (1.0,), 4, torch.bfloat16, torch.device("cpu"))
    for position in (1, 70_000, 599_999):  # in float32 the last angle would be off by 0.03
        assert cos[position, 0].tolist() == pytest.approx([math.cos(position), 1] * 2, abs=4e-3)
        assert sin[position, 0].tolist() == pytest.approx([math.sin(position), 0, -math.sin(position), 0], abs=4e-3)


def test_half_of_each_key_begins_as_the_query_so_that_it_finds_what_came_before():
    for mixes in (True, False):
        model = untrained(attention_layers="0,2", mix_previous=mixes)
        queries, keys, *_ = model.qkvo.detach().view(2, 4, 2, 2, 2, 4, 32).unbind(1)  # (layers, heads, pair, half, 4, D)
        assert torch.equal(queries[:, :, :, 1], keys[:, :, :, 1]) == mixes, "the half that is the previous token's"
        assert not (queries[:, :, :, 0] == keys[:, :, :, 0]).any()


# ---------------------------------------------------------------------------------------------------- what is seen when


def first_steps(c):
    """The first step of each of the speedrun's four stages, and the one after the last."""
    return [0, round(0.33 * c.num_steps), round(0.66 * c.num_steps), round(0.99 * c.num_steps), c.num_steps]


def test_windows_are_those_of_the_stage_and_grow_once_more_for_the_last_validation():
    c = t.Config()
    begin = first_steps(c)
    by_hand = [(3, 1), (5, 2), (9, 4), (13, 6), (20, 6)]
    assert [t.setting_of(step, c).windows for step in begin] == by_hand
    assert [t.setting_of(step - 1, c).windows for step in begin[1:]] == by_hand[:-1]
    laptop = t.Config(**t.PRESETS["laptop"])
    assert t.setting_of(0, laptop).score_scale == pytest.approx(12.8 / 64)
    assert [t.setting_of(step, laptop).windows for step in (0, 207, 208, 364, 520)] == [
        (2, 1), (2, 1), (4, 2), (8, 2), (8, 2)]


def test_yarn_slows_low_frequencies_and_raises_the_scale_as_computed_by_hand(monkeypatch):
    longer = {5: 7, 9: 11}  # the long windows of record 89
    with_longer_windows = [s._replace(long_window=longer.get(s.long_window, s.long_window)) for s in t.SCHEDULES["speedrun"]]
    monkeypatch.setitem(t.SCHEDULES, "speedrun", with_longer_windows)
    c = t.Config()
    views = [t.setting_of(step, c) for step in first_steps(c)]
    assert [setting.score_scale for setting in views] == pytest.approx([0.1, 0.11695, 0.12752, 0.13178, 0.13178], abs=5e-6)
    start = frequencies(128)[:32].tolist()
    assert views[0].frequencies == pytest.approx(start, rel=1e-12)
    relative = [now / before for now, before in zip(views[3].frequencies, start)]
    assert relative[:3] == [1, 1, 1]
    assert [round(relative[4], 3), round(relative[7], 2), round(relative[11], 2)] == [0.871, 0.53, 0.31]
    assert {round(ratio, 3) for ratio in relative[19:]} == {0.231} and relative[31] == pytest.approx(3 / 13)
    assert all(b <= a + 1e-12 for a, b in zip(relative, relative[1:]))
    assert views[4][1:] == views[3][1:], "the last validation sees farther without a further YaRN step"
    first = [f * (3 / 7 + min(max((384 * f / (2 * math.pi) - 1) / 31, 0), 1) * 4 / 7) for f in start]
    assert views[1].frequencies == pytest.approx(first, rel=1e-12)


# ---------------------------------------------------------------------------------------------------- the model


def tiny(world_size=1, **changes):
    """A float64 model whose every weight is random: none that is zero could hide a mistake."""
    values = dict(num_layers=5, model_dim=32, num_heads=4, head_dim=8, mlp_dim=64, vocab_size=BOS + 1, ngram_rows=101,
                  longest_ngram=3, recall_rows=997, seq_len=384, val_seq_len=384, micro_tokens=384, batch_tokens=384,
                  dtype="float64", precision="bf16", device="cpu", compile=False)
    model = t.GPT(t.Config(**values | changes), torch.device("cpu"), world_size)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(normal(*p.shape, seed=i) * (0.3 if p.dim() == 3 else 1))
    return model


def view(long=2, short=1, d=8, score_scale=0.75):
    slower = (0.7 * frequencies(d)[: d // 4]).tolist()
    return t.Setting((long, short), tuple(slower), score_scale)


def plain_gpt(w, signs, tokens, targets, starts, setting, heads, d, longest, recalled, attends, with_values):
    """The model written once more, layer by layer, without what makes it fast. w: name -> bank. recalled: of each token what
    came next in an earlier step, and the length of the match. attends, with_values: numbers of layers."""
    def rms(x, factor=1):  # of a stream, over the factor that the model leaves out
        return x / (x.square().mean(-1, keepdim=True) + 1e-6 * factor**2).sqrt()

    def shifted(x):  # the token before; zeros where a sequence or a document begins
        return torch.stack([torch.zeros_like(x[0]) if i in {0, *starts} else x[i - 1] for i in range(len(x))])

    length, width, L = len(tokens), heads * d, len(w["scalars"])
    freq = torch.tensor([*setting.frequencies] + [0.0] * (d // 4), dtype=torch.float64)
    far, near = (naive_mask(starts, window, length) for window in setting.windows)

    x = w["lm_head"][tokens]
    x0 = rms(x)
    hashes = [torch.tensor(of_length) for of_length in hashes_of(tokens.tolist(), {0, *starts}, longest)]
    ngram = sum(w["ngrams"][of_length % len(w["ngrams"])] * signs[of_length % 8191] for of_length in hashes)
    induced = induced_by_search(tokens.tolist(), {0, *starts}, longest)
    copied, echo = (torch.stack([rms(w["lm_head"].detach()[token]) if length else 0 * x0[0] for token, length in found])
                    for found in (induced, recalled))
    ngram = torch.nn.functional.pad(ngram, (0, x0.shape[1] - ngram.shape[1]))  # the first channels
    past = ngram + copied
    for found in (induced, recalled):
        past = past + torch.stack([w["length_vectors"][length] for _, length in found])
    tables = w["value_embeds"].view(len(w["value_embeds"]), -1, width)
    own = torch.zeros(length, dtype=torch.bool)
    own[[0, *starts]] = True  # a token that has none before it keeps all of its own

    def read(x, factor):  # the norm of a stream, whose last quarter is the previous token's
        u, quarter = rms(x, factor), x.shape[1] // 4
        return torch.cat((u[:, :-quarter], torch.where(own[:, None], u, shifted(u))[:, -quarter:]), -1)

    def attention(i, u, mix_v, mix_o):
        place = attends.index(i)
        wq, wk, wv, wo = w["qkvo"][4 * place : 4 * place + 4]
        q, k, v = ((u @ m.T).view(length, heads, d) for m in (wq, wk, mix_v * wv))
        q, k = rms(q) * setting.score_scale, rms(k)
        if i in with_values:
            v = v + tables[tokens, with_values.index(i)].view(length, heads, d)
        q, k = turned(q, freq), turned(k, freq)
        # the half free of position is the previous token's, too
        quarters = zip(k.chunk(4, -1), torch.where(own[:, None, None], k, shifted(k)).chunk(4, -1))
        k = torch.cat([before if j % 2 else now for j, (now, before) in enumerate(quarters)], -1)
        y = naive_attention(q, k, v, far if i in ((L - 1) // 2, L - 1) else near)
        return y.reshape(length, width) @ (mix_o * wo)

    total = w["scalars"][:, -2:].sum().exp()  # of all factors of the stream
    x, outputs, factor = x0, [], 1
    for i in range(L):
        mix_x0, mix_past, mix_o, mix_down, mix_v, mix_attn, mix_mlp = w["scalars"][i]
        a = attention(i, read(x, factor / total), mix_v, mix_o) if i in attends else 0
        x = mix_attn.exp() * x + a + mix_x0 * x0 + mix_past * past
        factor = factor * mix_attn.exp()
        hidden = torch.relu(read(x, factor / total) @ w["mlp"][2 * i]) ** 2
        x = mix_mlp.exp() * x + hidden @ (mix_down * w["mlp"][2 * i + 1]).T
        factor = factor * mix_mlp.exp()
        outputs.append(x * total / factor)
    x = outputs[-1]
    inner = x @ w["late_in"].T
    inner = inner * (1 + torch.erf(inner / 2**0.5)) / 2  # GELU
    late = (inner @ w["late_out"].T + w["late_bias"]) / 10
    for i, source in enumerate((total * x0, outputs[0], outputs[2], outputs[3], ngram, copied, echo)):
        x = x + late[:, i, None] * source
    x[:, :width] += late[:, -1, None] * tables[tokens, 0]
    x = rms(x)
    logits = 23 / (1 + torch.exp(-(x @ w["lm_head"].T + 5) / 7.5))
    return (logits.logsumexp(-1) - logits[torch.arange(length), targets]).sum()


def induced_by_search(tokens, starts, longest):
    """For each token what came after the last earlier place in its document where the last n tokens stood, and n: the
    largest one up to `longest` that there is, or (0, 0). Tokens before the document count as 0."""
    starts = sorted(starts)
    found = []
    for i in range(len(tokens)):
        begin = max(start for start in starts if start <= i)
        document = [0] * longest + tokens[begin : i + 1]
        match = 0, 0
        for n in range(1, longest + 1):
            last = [words(document[j - n : j]) for j in range(longest + 1, len(document) + 1)]
            same = [begin + j for j in range(i - begin) if last[j] == last[-1]]
            if same:
                match = tokens[same[-1] + 1], n
        found.append(match)
    return found


def recalled_by_search(tokens, steps, starts, lengths):
    """For each token what came after its last n words in the latest of these steps, each inputs and targets, and n: the
    largest of these lengths with which something is found, or (0, 0). Tokens before a document count as 0. Of several
    next tokens in a step the largest one counts."""
    def contexts(tokens, n):
        for i in range(len(tokens)):
            begin = max(start for start in starts if start <= i)
            yield tuple(([0] * n + words(tokens[begin : i + 1].tolist()))[-n:])

    found = [(0, 0)] * len(tokens)
    for n in lengths:
        known = {}
        for inputs, targets in steps:
            of_step = {}
            for context, target in zip(contexts(inputs, n), targets.tolist()):
                of_step[context] = max(target, of_step.get(context, 0))
            known |= of_step
        for i, context in enumerate(contexts(tokens, n)):
            if context in known:
                found[i] = known[context], n
    return found


def words(tokens):
    """A small letter counts as the capital one. (These models read bytes.)"""
    return [token - 32 if ord("a") <= token <= ord("z") else token for token in tokens]


def hashes_of(tokens, starts, longest):
    """In Python's integers: of the last 2, 3, ... `longest` tokens, with 0 for those before a document's start."""
    found = [[] for _ in range(longest - 1)]
    tokens = words(tokens)
    for i, hashed in enumerate(tokens):
        begin = max(start for start in {0, *starts} if start <= i)
        for n in range(2, longest + 1):
            hashed = (1_000_003 * hashed + (tokens[i - n + 1] if i - n + 1 >= begin else 0)) % (2**31 - 1)
            found[n - 2].append(hashed)
    return found


@pytest.mark.parametrize("width, heads, d, starts, long, short", [
    (32, 4, 8, [0, 100, 290], 2, 1), (16, 2, 8, [50, 257], 3, 2), (64, 2, 16, [0, 128, 130], 3, 1)])
@pytest.mark.parametrize("longest, kinds, part, attends, with_values", [
    (2, 384, 0.5, (0, 1, 2, 3, 4), (0, 1, 2, 3, 4)), (4, 7, 1.0, (0, 2, 4), (0, 4)), (3, 20, 0.3, (1, 2), (2,))])
def test_loss_and_all_gradients_equal_a_plain_version_of_the_specification(
        width, heads, d, starts, long, short, longest, kinds, part, attends, with_values):
    """With fewer `kinds` of tokens more and longer n-grams come again. A row of them has a `part` of the width."""
    model = tiny(model_dim=width, num_heads=heads, head_dim=d, longest_ngram=longest, ngram_part=part,
                 attention_layers=",".join(map(str, attends)), value_layers=",".join(map(str, with_values)),
                 recall_rows=2**23,  # so many that no two n-grams share one
                 recall_for=f"{longest + 1},{2 * longest}")
    assert model.ngrams.shape == (101, round(part * width))
    seen = view(long, short, d)
    tokens, targets = tokens_of(starts, 384), tokens_of([7], 384, seed=5)
    # Without token 0: the hash of three tokens and a 0 is that of the three, and the latter would lose its place.
    tokens = torch.where(tokens == BOS, BOS, (tokens % kinds).clamp(min=1))
    replaced = (torch.arange(384) % 13 == 0) & (tokens != BOS)
    earlier = torch.where(replaced, (tokens + 1) % min(kinds, BOS), tokens)  # nearly the same text
    remember(model, earlier, targets)
    recalled = recalled_by_search(tokens, [(earlier, targets)], {0, *starts}, (longest + 1, 2 * longest))
    assert {length for _, length in recalled} == {0, longest + 1, 2 * longest}
    loss = training_loss(model, tokens, targets, seen)
    loss.backward()
    w = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    reference = plain_gpt(w, model.signs, tokens, targets, starts, seen, heads, d, longest, recalled, attends, with_values)
    reference.backward()
    assert loss.item() == pytest.approx(reference.item(), rel=1e-10)
    assert all(p.grad is not None for p in model.parameters())
    for name, p in model.named_parameters():
        if p.grad is not None:
            error = (p.grad - w[name].grad).norm() / w[name].grad.norm()
            assert error < 1e-8, f"{name}: {error}"
    hashes = hashes_of(tokens.tolist(), starts, longest)
    numbers = {"value_embeds": tokens.tolist(), "ngrams": [number % 101 for of_length in hashes for number in of_length]}
    dense = {name: model.get_parameter(name).grad for name in model.params}
    model.zero_grad()
    again, grads = t.forward_backward(model, seen, *one_group(model, targets), *model.past.read(tokens, True))
    assert again.item() == pytest.approx(reference.item(), rel=1e-10) and not again.requires_grad
    model.lm_head.grad.index_add_(0, tokens, grads["lm_head"])  # of the embedding
    for name, p in model.named_parameters():  # now as in training: tables have gradients of looked-up rows alone
        if name in numbers:
            summed = np.zeros(p.shape)
            np.add.at(summed, numbers[name], grads[name].numpy())  # equal rows add up
            assert p.grad is None and np.linalg.norm(summed - w[name].grad.numpy()) < 1e-8 * w[name].grad.norm()
        elif dense[name] is None:
            assert p.grad is None
        else:
            torch.testing.assert_close(p.grad, dense[name], rtol=1e-10, atol=1e-12, msg=name)
    reached = (model.scalars.grad != 0).sum(0).tolist()  # each mixing weight is used
    assert reached == [5, 5, len(attends), 5, len(attends), 5, 5]


def remember(model, inputs, targets):
    hashes = model.past.read(inputs, True).hashes
    past.write_recall(model.recall_table, hashes, targets, model.config.recall_lengths)


@pytest.mark.parametrize("longest, kinds", [(2, 3), (3, 7), (6, 3)])
def test_recalled_tokens_are_those_that_came_next_in_the_latest_step(longest, kinds):
    starts, lengths = [0, 50, 51, 130], (longest + 1, 2 * longest)
    model = tiny(longest_ngram=longest, recall_rows=2**23, recall_for=f"{longest + 1},{2 * longest}")
    begins = torch.zeros(384, dtype=torch.bool)
    begins[starts] = True
    steps, found = [], None
    for step in range(4):
        inputs, targets = (torch.randint(1, kinds, (384,), generator=torch.Generator().manual_seed(10 * step + i)) for i in range(2))
        inputs[starts[1:]] = BOS
        found = torch.stack(past.recalled_tokens(model.recall_table, model.past.read(inputs, True).hashes, lengths), 1)
        assert list(map(tuple, found.tolist())) == recalled_by_search(inputs, steps, {0, *starts}, lengths)
        remember(model, inputs, targets)
        steps.append((inputs, targets))
    assert set(found[:, 1].tolist()) == {0, *lengths} and len(found[:, 0].unique()) >= 2, "else it would show little"


def test_where_ngrams_share_a_place_only_those_with_the_same_last_two_tokens_find_what_was_written():
    table = torch.zeros(1, dtype=torch.int32)  # one place for all
    written, other = torch.tensor([[11], [5]]), torch.tensor([[12], [5]])  # hashes of the last two, and of the last three
    past.write_recall(table, written, torch.tensor([7]), (3,))
    for hashes, expected in ((written, (7, 3)), (other, (0, 0))):
        token, length = past.recalled_tokens(table, hashes, (3,))
        assert (token.item(), length.item()) == expected


# -------------------------------------------------------------------------------- a sample of the vocabulary


def test_candidates_are_those_of_priority_sampling_over_all_counts_so_far():
    drawer = candidates.Candidates(20, 30, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 50, (30,), generator=draw)
    drawer.target_counts += counts
    targets, uniform = torch.randint(0, 30, (12,), generator=draw), torch.rand(2, 30, generator=draw)
    drawn, counts = drawer.draw(targets, 6, uniform), counts.tolist()
    for group in range(2):
        of_group = targets[6 * group : 6 * group + 6].tolist()
        for token in of_group:
            counts[token] += 1
        size = [math.inf if token in of_group else (1 + count) ** 0.5 for token, count in enumerate(counts)]
        priority = [s / u for s, u in zip(size, uniform[group].tolist())]
        order = sorted(range(30), key=lambda token: -priority[token])
        by_hand = {token: math.log(max(1, priority[order[20]] / size[token])) for token in order[:20]}
        found = dict(zip(drawn.chosen[group].tolist(), drawn.bias[group].tolist()))
        assert found.keys() == by_hand.keys() and found == pytest.approx(by_hand, abs=1e-5) and max(by_hand.values()) > 0.1


@pytest.mark.parametrize("number", [40, 41, 100])  # targets only, one more, many more
@pytest.mark.parametrize("zeros", [slice(None), slice(100, 101), slice(0, 1)], ids=["all", "a token", "a target"])
def test_a_draw_of_zero_makes_no_candidate_infinite(number, zeros):
    """torch.rand is 0 once in 2^24 draws, and a priority is a size over a draw."""
    torch.manual_seed(0)
    counts = torch.randint(0, 10_000, (300,)).float()
    targets = torch.randperm(80)[:40].repeat(3)
    is_target = torch.zeros(300, dtype=torch.bool).index_fill_(0, targets, True)
    draws = torch.rand(300)
    draws[zeros] = 0
    chosen, bias, places = (x[0] for x in candidates.choose(number, is_target[None], counts[None], draws[None]))
    places = places[targets]
    assert len(set(chosen.tolist())) == len(chosen) == number
    assert torch.equal(chosen[places], targets), "each target is chosen"
    assert not bias[places].any(), "a target stands for itself"
    assert bias.isfinite().all() and (bias >= 0).all()
    assert bias.max() < math.log(2**25 * 10_000), "nobody stands for as many as a target's size"


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8-head", "nvfp4"])
def test_training_with_candidates_has_nearly_the_gradient_over_the_vocabulary_and_validates_with_all_of_it(precision):
    model = tiny(precision=precision, dtype="float32", candidates=192, vocab_size=384, num_layers=1, model_dim=64,
                 num_heads=2, head_dim=32)
    model.lm_head.data *= 0.2  # so that constant scales clamp nothing
    torch.manual_seed(0)
    t.Optimizer(model)  # which rounds the FP8 weights
    found, tokens, targets = {}, tokens_of([0], 256), tokens_of([], 256, 1)
    history = model.past.read(tokens, True)
    for number, repeats in ((0, 5), (192, 40)):
        model.candidates.number, losses, sums = number, [], dict.fromkeys(("lm_head", "mlp", "qkvo"), 0)
        for seed in range(repeats):
            model.candidates.seed = seed
            losses.append(t.forward_backward(model, view(), *one_group(model, targets), *history)[0].item())
            sums = {name: total + model.get_parameter(name).grad.double() for name, total in sums.items()}
            model.zero_grad()
        found[number] = np.mean(losses), sums
        found[f"validation {number}"] = t.loss_without_gradient(model, tokens, targets, view()).item()
    assert found["validation 192"] == found["validation 0"]
    counts = 40 * torch.bincount(targets, minlength=384)
    assert torch.equal(model.candidates.target_counts, counts), "nothing is counted where the vocabulary is whole"
    assert found[192][0] == pytest.approx(found[0][0], rel=0.01) and np.std(losses) > 0
    for name, exact in found[0][1].items():
        similarity = torch.cosine_similarity(found[192][1][name].flatten(), exact.flatten(), dim=0)
        assert similarity > {"fp8": 0.97, "nvfp4": 0.93}.get(precision, 0.98), name
    t.initialize(model, 0)
    assert not model.candidates.target_counts.any() and not model.candidates.lost_targets, "a run begins anew after warming up"


@pytest.mark.parametrize("precision", ["fp32", "fp8-head"])
def test_tokens_that_are_no_candidates_are_counted_and_add_nothing_to_the_loss(precision, monkeypatch):
    model = tiny(precision=precision, dtype="float32", candidates=48, vocab_size=384, model_dim=64, num_heads=2, head_dim=32)
    model.lm_head.data *= 0.2
    tokens, targets = tokens_of([0], 256), tokens_of([], 256, 1)
    assert len(targets.unique()) > 48
    drawn, choose = [], candidates.choose
    monkeypatch.setattr(candidates, "choose", lambda *args: drawn.append(choose(*args)) or drawn[0])
    loss = training_loss(model, tokens, targets, view()).item()
    (chosen, bias, places), (x, sources) = [x[0] for x in drawn[0]], model.last_stream(model.past.read(tokens, True), view(), True)
    assert not bias.any(), "all are targets"
    places = places[targets]
    x = t.late_mix(x, sources, *model.late_weights())
    logits = 23 / (1 + torch.exp(-(x @ model.lm_head[chosen].T + 5).double() / 7.5))
    known = places >= 0
    expected = (logits.logsumexp(-1)[known] - logits[known, places[known]]).sum().item()
    assert model.candidates.lost_targets == 256 - known.sum() > 0
    assert loss == pytest.approx(expected, rel={"fp32": 1e-5, "fp8-head": 5e-3}[precision])


def test_the_heads_gradient_is_the_sum_over_all_groups_that_have_a_token_among_their_candidates():
    chosen = torch.tensor([[0, 4, 5], [4, 1, 6]])
    place_of_token = torch.tensor([[0, -1, -1, -1, 1, 2, -1], [-1, 1, -1, -1, 0, -1, 2]])
    head = torch.arange(14, dtype=torch.float64).view(7, 2).requires_grad_()
    first, second = t.CandidateRows.apply(head, chosen, place_of_token, t.sum_over_groups)
    assert torch.equal(first, head[[0, 4, 5]]) and torch.equal(second, head[[4, 1, 6]])
    (first.sum() + 10 * second[:, 0].sum() + 100 * second[2, 1]).backward()
    assert head.grad.tolist() == [[1, 1], [10, 0], [0, 0], [0, 0], [11, 1], [1, 1], [10, 100]]


def test_initial_weights_are_as_specified_and_depend_on_the_seed_but_not_on_the_number_of_ranks():
    sizes = dict(model_dim=64, head_dim=16, vocab_size=2000)
    one, three, other = tiny(**sizes), tiny(3, **sizes), tiny(**sizes)
    for model, seed in ((one, 7), (three, 7), (other, 8)):
        t.initialize(model, seed)
    constant = {"scalars", "ngrams", "length_vectors", "late_out", "late_bias"}
    for name in one.params:
        assert torch.equal(one.weight(name), three.weight(name)), name
        assert not getattr(three, name)[one.params[name].shape[0] :].any(), f"the padding of {name} is not zero"
        assert torch.equal(one.weight(name), other.weight(name)) == (name in constant), name
    for name in constant - {"scalars", "late_bias"}:
        assert not getattr(one, name).any(), name
    bound = 3**0.5 * 0.5 / 64**0.5
    assert not one.mlp[1::2].any(), "MLPs begin by adding nothing"
    for drawn in (one.qkvo, one.mlp[::2]):
        assert bound * 0.99 < drawn.abs().max() <= bound
        assert drawn.std().item() == pytest.approx(0.5 / 64**0.5, rel=0.02)
    assert one.lm_head.std().item() == pytest.approx(0.005, rel=0.02)
    assert one.value_embeds.std().item() == pytest.approx(0.01, rel=0.02)
    assert one.late_bias.tolist() == [0, 0, -4, 0, 0, 0, 0, 0]  # 0.4 of the middle layer is taken out
    assert 0.99 / 64**0.5 < one.late_in.abs().max() <= 1 / 64**0.5
    for row in one.scalars.tolist():
        assert dict(zip(t.SCALARS, row)) == pytest.approx({"first": 0, "past": 0.05, "o": 1, "down": 1, "v": 0.5, "stream_attn": 0.05,
                                                           "stream_mlp": 0.05})


def test_validation_in_chunks_gives_the_training_loss_without_a_graph(monkeypatch):
    monkeypatch.setattr(t, "VAL_CHUNK", 100)
    model, args = tiny(), (tokens_of([0, 99], 384), tokens_of([], 384, 1), view())
    loss = t.loss_without_gradient(model, *args)
    assert loss.item() == pytest.approx(training_loss(model, *args).item(), rel=1e-13) and not loss.requires_grad
