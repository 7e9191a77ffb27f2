"""The FP8 head: its two operators and its loss. The kernels have their own tests in test_kernels.py.

References: products in float64, whole numbers that FP8 holds exactly, autograd of the float64 head, and
`torch.library.opcheck`.
"""
import pytest
import torch
import torch.nn.functional as F

import train_gpt as t

FP8_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not FP8_GPU, reason="needs a GPU with FP8"))]
devices = pytest.mark.parametrize("device", DEVICES)


def normal(*shape, seed=0, dtype=torch.float64, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def integers(low, high, *shape, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).to(device)


def distance(a, b):
    """Relative, in the Frobenius norm."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# ---------------------------------------------------------------------------------------------------- the operators


@devices
@pytest.mark.parametrize("rows, width, vocab", [(32, 64, 48), (16, 16, 16)])
def test_opcheck_passes_on_all_operators(device, rows, width, vocab):
    x, w = normal(rows, width, dtype=torch.bfloat16, device=device), normal(vocab, width, dtype=torch.bfloat16) * 0.1
    x, w = x.requires_grad_(), w.to(device).requires_grad_()
    torch.library.opcheck(torch.ops.nanogpt.mm.default, (x, w, *t.HEAD_SCALES))
    g8 = t.quantize(normal(rows, vocab, device=device), 0.1, t.E5M2).view(torch.uint8)
    x8, w8 = (t.quantize(a.detach(), 0.1, t.E4M3).view(torch.uint8) for a in (x, w))
    scale = torch.tensor(0.5, device=device)
    x8_t, w8_t = x8.t().contiguous(), w8.t().contiguous()
    torch.library.opcheck(torch.ops.nanogpt.mm_backward.default, (g8, x8_t, w8_t, scale, 0.25, 0.125))


@devices
@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (0.5, 2.0**-9, 4.0)])
def test_products_of_whole_numbers_are_exact_to_the_bit(device, scales):
    x_s, w_s, grad_s = scales  # powers of two
    x, w = integers(-2, 2, 32, 48, device=device), integers(-2, 2, 64, 48, seed=1, device=device)
    g = integers(-1, 1, 32, 64, seed=2, device=device)  # all sums below 256: exact in bf16, too
    z, x8_t, w8_t = t.mm_op((x * x_s).bfloat16(), (w * w_s).bfloat16(), x_s, w_s, grad_s)
    assert torch.equal(z.double(), x.double() @ w.double().T * x_s * w_s)
    assert torch.equal(x8_t.view(t.E4M3).double().T, x.double())
    assert torch.equal(w8_t.view(t.E4M3).double().T, w.double())
    g8 = t.quantize(g * grad_s, grad_s, t.E5M2).view(torch.uint8)
    grad_x, grad_w = t.mm_backward_op(g8, x8_t, w8_t, torch.tensor(grad_s, device=device), x_s, w_s)
    assert grad_x.dtype == torch.bfloat16 and torch.equal(grad_x.double(), g.double() @ w.double() * grad_s * w_s)
    assert grad_w.dtype == torch.float32 and torch.equal(grad_w.double(), g.double().T @ x.double() * grad_s * x_s)


@devices
def test_products_equal_float64_ones_of_the_quantised_operands_and_nearly_those_of_the_originals(device):
    x_s, w_s, grad_s = t.HEAD_SCALES
    x, w = normal(96, 64, device=device), normal(160, 64, seed=1, device=device) * 0.1
    z, x8_t, w8_t = t.mm_op(x.bfloat16(), w.bfloat16(), x_s, w_s, grad_s)
    x_q, w_q = x8_t.view(t.E4M3).double().T * x_s, w8_t.view(t.E4M3).double().T * w_s
    assert distance(z, x_q @ w_q.T) < 2**-8  # one rounding to bf16
    assert distance(x_q, x) < 0.04 and distance(w_q, w) < 0.04 and distance(z, x @ w.T) < 0.06
    g = normal(96, 160, seed=2, device=device)
    g8 = t.quantize(g, grad_s, t.E5M2)
    g_q = g8.double() * grad_s
    grad_x, grad_w = t.mm_backward_op(g8.view(torch.uint8), x8_t, w8_t, torch.tensor(grad_s, device=device), x_s, w_s)
    assert distance(grad_x, g_q @ w_q) < 2**-8
    assert distance(grad_w, g_q.T @ x_q) < {"cpu": 1e-5, "cuda": 2**-12}[device]  # tensor cores sum in fewer bits
    assert distance(g_q, g) < 0.08 and distance(grad_x, g @ w) < 0.1 and distance(grad_w, g.T @ x) < 0.1


def test_autograd_of_the_product_is_registered_and_has_the_gradients_of_float64():
    x, w, g = normal(64, 32), normal(80, 32, seed=1) * 0.1, normal(64, 80, seed=2)
    x16, w32 = x.bfloat16().requires_grad_(), w.float().requires_grad_()
    z, *_ = torch.ops.nanogpt.mm(x16, w32, *t.HEAD_SCALES)
    z.backward(g.bfloat16())
    assert (x16.grad.dtype, w32.grad.dtype) == (torch.bfloat16, torch.float32)
    assert distance(x16.grad, g @ w) < 0.1 and distance(w32.grad, g.T @ x) < 0.1


# ---------------------------------------------------------------------------------------------------- the loss


def capped(z):
    """The digest's cap of record 54, 23 sigmoid((z + 5) / 7.5), by another function."""
    return 11.5 * torch.tanh((z + 5) / 15) + 11.5


@devices
def test_the_gradient_of_the_head_is_autograds_within_the_error_of_the_format(device):
    x = F.rms_norm(normal(128, 64, device=device), (64,))
    w, targets = normal(272, 64, seed=1, device=device) * 0.15, integers(0, 271, 128, device=device)
    exact = [a.clone().requires_grad_() for a in (x, w)]
    reference = F.cross_entropy(capped(exact[0] @ exact[1].T), targets, reduction="sum")
    reference.backward()
    ours = [a.bfloat16().requires_grad_() for a in (x, w)]
    loss = t.FP8HeadLoss.apply(*ours, targets)
    loss.backward()
    assert loss.item() == pytest.approx(reference.item(), rel=2e-3)
    for a, b in zip(ours, exact):
        assert a.grad.dtype == torch.bfloat16 and distance(a.grad, b.grad) < 0.1
        assert F.cosine_similarity(a.grad.double().flatten(), b.grad.flatten(), dim=0) > 0.995


@devices
def test_a_factor_on_the_loss_scales_the_gradients_of_the_head(device):
    x, w = normal(32, 64, dtype=torch.bfloat16, device=device), normal(48, 64, seed=1, dtype=torch.bfloat16) * 0.1
    w, targets = w.to(device), integers(0, 47, 32, device=device)
    grads = []
    for factor in (1, 4):  # a power of two: exact
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        (t.FP8HeadLoss.apply(a, b, targets) * factor).backward()
        grads.append((a.grad, b.grad))
    for one, four in zip(*grads):
        assert torch.equal(one * 4, four) and one.abs().sum() > 0


def test_the_model_trains_with_the_fp8_head_and_validates_without_it(monkeypatch):
    calls = []
    monkeypatch.setattr(t.FP8HeadLoss, "apply", lambda *args: calls.append(len(args[0])) or args[0].sum() * 0)
    c = t.Config(topology="laptop", model_dim=32, num_heads=2, mlp_dim=64, vocab_size=64, seq_len=128, val_seq_len=128,
                 micro_tokens=128, schedule="laptop", precision="fp8-head")
    model = t.GPT(c, torch.device("cpu"))
    tokens = integers(0, 63, 128)
    model(tokens, tokens, t.view_of(0, c))
    assert calls == [128]
    with torch.no_grad():
        model(tokens, tokens, t.view_of(0, c))
    assert calls == [128]
