"""The FP8 head: its two operators and its loss. The kernels have their own tests in test_kernels.py.

References: products in float64, whole numbers that FP8 holds exactly, autograd of the head in float64, and
`torch.library.opcheck`.
"""
import pytest
import torch
import torch.nn.functional as F
from conftest import distance
from test_kernels import capped, check_operator, devices, integers, normal

import train_gpt as t
from nanogpt import kernels
from nanogpt.kernels import E5M2
from nanogpt.precision.fp8_static import STATIC

HEAD_SCALES = t.HEAD_INPUT_SCALE, t.HEAD_WEIGHT_SCALE, t.HEAD_GRADIENT_SCALE
mm = torch.ops.nanogpt.mm
mm_backward = torch.ops.nanogpt.mm_backward


@devices
def test_opcheck_passes_on_both_operators(device):
    rows, width, vocab = 32, 64, 48
    x = normal(rows, width, dtype=torch.bfloat16, device=device)
    w = 0.1 * normal(vocab, width, dtype=torch.bfloat16, device=device)
    check_operator(mm, x, w, *HEAD_SCALES)
    _, x8_t, w8_t = mm(x, w, *HEAD_SCALES)
    check_operator(mm, x.requires_grad_(), w.requires_grad_(), *HEAD_SCALES)
    g8 = kernels.round_to_fp8(normal(rows, vocab, device=device), 0.1, E5M2)
    check_operator(mm_backward, g8, x8_t, w8_t, torch.tensor(0.5, device=device), 0.25, 0.125)


@devices
@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (0.5, 2.0**-9, 4.0)])
def test_the_product_of_whole_numbers_and_its_gradients_are_exact_to_the_bit(device, scales):
    x_scale, w_scale, grad_scale = scales  # powers of two
    x = integers(-2, 2, 32, 48, device=device)
    w = integers(-2, 2, 64, 48, seed=1, device=device)
    g = integers(-1, 1, 32, 64, seed=2, device=device)  # all sums are below 256: exact in bf16, too
    leaves = [(a * scale).bfloat16().requires_grad_() for a, scale in ((x, x_scale), (w, w_scale))]
    z, *_ = mm(*leaves, *scales)
    assert z.dtype == torch.bfloat16 and torch.equal(z.double(), x.double() @ w.double().T * x_scale * w_scale)
    z.backward((g * grad_scale).bfloat16())
    x_grad, w_grad = (leaf.grad.double() for leaf in leaves)
    assert torch.equal(x_grad, g.double() @ w.double() * grad_scale * w_scale)
    assert torch.equal(w_grad, g.double().T @ x.double() * grad_scale * x_scale)


@devices
@pytest.mark.parametrize("sampled", [False, True])
def test_the_gradient_of_the_head_is_autograds_within_the_error_of_the_format(sampled, device):
    x = F.rms_norm(normal(128, 64, device=device), (64,))
    w = normal(272, 64, seed=1, device=device) * 0.15
    targets = integers(0, 135, 128, device=device)
    bias = None
    if sampled:  # the other half stands for more tokens; some positions have no target
        bias = torch.zeros(272, device=device)
        bias[136:] = normal(136, seed=3, dtype=torch.float32, device=device).abs()
        targets[::9] = -1
    exact = [a.clone().requires_grad_() for a in (x, w)]
    logits = capped(exact[0] @ exact[1].T)
    if sampled:
        logits = logits + bias
    reference = F.cross_entropy(logits, targets, reduction="sum", ignore_index=-1)
    (4 * reference).backward()
    ours = [a.bfloat16().requires_grad_() for a in (x, w)]
    loss = t.head_loss(*ours, targets[None], bias, STATIC["lm_head"])
    (4 * loss).backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(reference.item(), rel=2e-3)
    for a, b in zip(ours, exact):
        assert a.grad.dtype == torch.bfloat16 and distance(a.grad, b.grad) < 0.1
        assert F.cosine_similarity(a.grad.double().flatten(), b.grad.flatten(), dim=0) > 0.995
    assert not ours[0].grad[targets < 0].any()
