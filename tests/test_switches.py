"""Every mechanism can be switched off, so that it can be judged: what is left trains, and has no weights of it."""
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, optimizer_of, read, training_loss, untrained
from test_model import naive_attention, naive_mask, tiny, tokens_of, turned, view

import train_gpt as t
from nanogpt.precision import fp8_static
from nanogpt.ranks import BadInput

SWITCHES = {  # option -> the parameters that it takes away
    "ngram_rows": {"ngrams"},
    "induced": set(),
    "recall_rows": set(),
    "value_layers": {"value_embeds"},
    "late_mix": {"late_in", "late_out", "late_bias"},
    "mix_previous": set(),
    "scalars": {"scalars"},
    "candidates": set(),
    "second_token": set(),
}


def trained(**changes):
    """Parameters of a tiny model, and its losses over some steps on one batch."""
    model = t.GPT(t.Config(**TINY | dict(dtype="float32") | changes), torch.device("cpu"))
    optimizer = optimizer_of(model)
    tokens = torch.randint(0, 60, (257,), generator=torch.Generator().manual_seed(0))
    batch = read(model, [(tokens[:-1], tokens[1:])])
    losses = [t.train_step(model, optimizer, batch, step)[0].item() for step in range(4)]
    assert all(bank.isfinite().all() for bank in model.parameters())
    return model, losses


@pytest.mark.parametrize("option", SWITCHES)
def test_without_a_mechanism_the_model_trains_and_has_no_weights_of_it(option):
    with_it, _ = trained(candidates=256)
    assert getattr(with_it.config, option) != t.PLAIN_MODEL[option]
    model, losses = trained(**{"candidates": 256} | {option: t.PLAIN_MODEL[option]})
    assert {*with_it.params} - {*model.params} == SWITCHES[option]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("candidates", [0, 256])
def test_the_token_after_the_next_one_counts_in_gradients_but_not_in_the_loss(candidates):
    inputs, targets = torch.randint(0, 60, (2, 2, 256), generator=torch.Generator().manual_seed(0))
    after_these = torch.cat((targets[:, 1:], targets[:, :1]), 1)  # of two sequences
    losses, gradients = [], []
    for terms in ([(targets, 0.5)], [(targets, 0), (after_these, 0)]):
        model = untrained(dtype="float64", precision="bf16", candidates=candidates)
        setting = t.setting_of(0, model.config)
        for weight, (wanted, second_weight) in zip((1, 0.5), terms):
            loss = training_loss(
                model, inputs.flatten(), wanted.flatten(), setting._replace(second_weight=second_weight))
            (weight * loss).backward()
            losses.append(loss.item())
        gradients.append([bank.grad for bank in model.parameters() if bank.grad is not None])
    assert losses[0] == pytest.approx(losses[1])
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference)
    for option, weight in (("", 0.5), ("=false", 0)):
        assert t.setting_of(0, t.parse_config(["--preset=speedrun", f"--second_token{option}"])).second_weight == weight


def test_a_second_target_counts_only_where_the_first_one_and_itself_are_candidates():
    x, w = torch.randn(2, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_().unbind()
    products = SimpleNamespace(linear=lambda x, w: x @ w.T)
    first, second = torch.tensor([[1, -1, 2, -1], [3, 0, -1, -1]])
    loss = t.head_loss(x, w, torch.stack((first, second)), None, products, torch.tensor(0.5))
    log_p = t.kernels.softcap(x @ w.T, *t.CAP).log_softmax(-1)
    reference = -(log_p[0, 1] + log_p[2, 2] + 0.5 * log_p[0, 3])
    for ours, theirs in zip(*(torch.autograd.grad(of, (x, w), retain_graph=True) for of in (loss, reference))):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8-qkv", "nvfp4"])
def test_a_model_trains_with_attention_and_value_embeddings_in_some_of_its_layers(precision):
    model, losses = trained(attention_layers="0,2", value_layers="2", precision=precision)
    assert losses[-1] < losses[0]
    log = []
    fp8_static.check_weights(model, 0, SimpleNamespace(fact=lambda *fact: log.append(fact)))
    assert log == []


@pytest.mark.parametrize("option", ["--attention_layers=0,3", "--attention_layers=", "--value_layers=first"])
def test_a_layer_that_is_none_is_refused_in_a_sentence(option):
    with pytest.raises(BadInput, match=f"{option} must be all, or some of 0,1,2"):
        t.parse_config(["--preset=laptop", "--num_layers=3", option])
    with pytest.raises(BadInput, match="--value_layers=0,1 must be all, or some of 0,2"):
        t.parse_config(["--preset=laptop", "--attention_layers=0,2", "--value_layers=0,1"])


def test_with_everything_off_the_model_is_the_plain_transformer_of_124m_weights():
    gpt2 = t.parse_config(["--preset=gpt2"])
    assert {*SWITCHES} == {*t.PLAIN_MODEL}
    shapes = {name: param.shape for name, param in t.parameter_table(gpt2).items()}
    assert shapes == {"mlp": (24, 768, 3072), "lm_head": (50304, 768), "qkvo": (48, 768, 768)}
    assert t.report.num_weights(t.parameter_table(gpt2)) == (12 * 12 * 768**2 + 50304 * 768, 0)
    table = t.parameter_table(t.parse_config(["--preset=speedrun"]))
    sizes = {name: math.prod(param.shape) for name, param in table.items()}
    in_tables = sizes["ngrams"] + sizes["value_embeds"]
    assert t.report.num_weights(table) == (sum(sizes.values()) - in_tables, in_tables)
    model, losses = trained(**t.PLAIN_MODEL)
    assert {*model.params} == {*shapes} and losses[-1] < losses[0]


def test_the_plain_transformer_has_the_loss_and_gradients_of_one_written_out():
    """Pre-norm attention with queries and keys of length 1, squared ReLU and capped logits, in float64."""
    model = tiny(**t.PLAIN_MODEL)
    setting, tokens, targets = view(), tokens_of([0], 384), tokens_of([], 384, 1)
    loss = training_loss(model, tokens, targets, setting)
    loss.backward()

    w = {name: bank.detach().clone().requires_grad_() for name, bank in model.named_parameters()}
    frequencies = torch.tensor([*setting.frequencies, 0.0, 0.0], dtype=torch.float64)
    far, near = (naive_mask([0], window, 384) for window in setting.windows)

    def rms(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    x = rms(w["lm_head"][tokens])
    for i in range(5):
        u = rms(x)
        q, k, v = ((u @ w["qkvo"][4 * i + j].T).view(384, 4, 8) for j in range(3))
        q, k = turned(rms(q), frequencies), turned(rms(k), frequencies)
        y = naive_attention(setting.score_scale * q, k, v, far if i in (2, 4) else near)
        x = x + y.flatten(1) @ w["qkvo"][4 * i + 3]
        x = x + torch.relu(rms(x) @ w["mlp"][2 * i]).square() @ w["mlp"][2 * i + 1].T
    logits = 23 * torch.sigmoid((rms(x) @ w["lm_head"].T + 5) / 7.5)
    reference = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    reference.backward()
    assert loss.item() == pytest.approx(reference.item(), rel=1e-9)
    for name, bank in model.named_parameters():
        assert (bank.grad - w[name].grad).norm() < 1e-7 * w[name].grad.norm(), name
