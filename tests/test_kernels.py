"""The kernels of nanogpt/kernels.py, their plain PyTorch twins, and the operators around them.

References: the numbers of the FP8 formats, rounded to by search, products in float64, whole numbers
that FP8 holds exactly, cross-entropy and autograd in float64, loops over rows, and
`torch.library.opcheck`.

Without a GPU the kernels run in Triton's interpreter, against their twins. The interpreter (of
Triton 3.7 to 3.9) casts to FP8 wrongly, so PyTorch's cast takes the place of its own. The kernels'
own cast is seen by the tests that need a GPU.
"""
import importlib.util
import math
import os
import sys

import processes
import pytest
import torch
import torch.nn.functional as F

from nanogpt import kernels, tables
from nanogpt.kernels import E4M3, E5M2

FP8_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_fp8_gpu = pytest.mark.skipif(not FP8_GPU, reason="needs a GPU with FP8")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_fp8_gpu)])
needs_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available() or torch.__version__.startswith("2.11."),
    reason="needs Triton, which is for Linux; that of 2.11.0, for GPUs, does not interpret with NumPy 2.4 and 2.5",
)

CAP = 23.0, 5.0, 7.5  # height, shift and width of record 54
LIMIT = {E4M3: 448.0, E5M2: 57344.0}

# Scales as in training: of the MLP's input, of weights, of gradients, and of the hidden layer.
X_SCALE = 1 / 16
W_SCALE = 2.0**-8
GRAD_SCALE = 2.0**-12
HIDDEN_SCALE = 64.0


def normal(*shape, seed=0, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)


def integers(low, high, *shape, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).to(device)


def equal(a, b):
    """Whether two FP8 tensors have the same bytes: PyTorch does not compare FP8."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def values_of(dtype):
    """All non-negative numbers of a format, in order."""
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    return numbers[numbers.isfinite()]


GRID = {dtype: values_of(dtype) for dtype in (E4M3, E5M2)}


def nearest(x, grid):
    """The number of the format that is nearest to each of x, by search, ties to even. grid: all of
    its non-negative numbers in order, so that every second one has an even last bit."""
    size = x.abs()
    above = torch.searchsorted(grid, size.contiguous()).clamp(1, len(grid) - 1)
    to_low, to_high = size - grid[above - 1], grid[above] - size
    up = (to_high < to_low) | (to_high == to_low) & (above % 2 == 0)
    return torch.where(up, grid[above], grid[above - 1]) * x.sign()


# ---------------------------------------------------------------------------------------- rounding


@devices
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_a_matrix_is_rounded_and_transposed_whole_and_in_parts_of_its_columns(device, dtype):
    for wide in (torch.float32, torch.bfloat16):
        x = 50 * normal(80, 96, dtype=wide, device=device)
        for parts in ((x,), x.split((16, 48, 32), 1), (x.t(),)):
            y, y_t = kernels.quantize_columns(parts, 0.25, dtype)
            assert y.is_contiguous() and y_t.is_contiguous()
            assert equal(y, kernels.round_to_fp8(torch.cat(parts, 1), 0.25, dtype))
            assert equal(y_t, y.t().contiguous()) and equal(y_t, kernels.transpose(y))


# --------------------------------------------------------------------------------------- operators


def check_operator(operator, *arguments):
    """`opcheck`, and that no argument changes: that part of opcheck cannot compare FP8. Nor can it
    sum up FP8, as it does to get a gradient."""
    tests = ["test_autograd_registration", "test_faketensor"]
    tensors = [x for x in leaves(arguments) if isinstance(x, torch.Tensor)]
    if not any(x.requires_grad for x in tensors):
        tests.append("test_aot_dispatch_dynamic")
    before = [x.detach().clone() for x in tensors]
    torch.library.opcheck(operator.default, arguments, test_utils=tests)
    assert all(torch.equal(x.double(), old.double()) for x, old in zip(tensors, before))


@devices
def test_opcheck_passes_on_all_operators(device):
    rows, width, vocab = 32, 64, 48
    ops = torch.ops.nanogpt
    x = normal(rows, width, dtype=torch.bfloat16, device=device)
    check_operator(ops.quantize, [x, x], 0.25, E4M3)
    check_operator(ops.quantize, [x.t()], 0.25, E5M2)
    scale = torch.tensor(0.5, device=device)
    x8 = kernels.round_to_fp8(normal(rows, width, device=device), 0.1, E4M3)
    w8 = kernels.round_to_fp8(normal(vocab, width, device=device), 0.1, E4M3)
    g8 = kernels.round_to_fp8(normal(rows, vocab, device=device), 0.1, E5M2)
    for a, b_t in ((x8, w8), (g8, w8.t()), (g8.t(), x8.t())):
        check_operator(ops.product, a, b_t, scale, scale, torch.bfloat16)
    check_operator(ops.product, x8.bfloat16(), w8.bfloat16(), scale, scale, torch.float32)
    check_operator(ops.product, g8.bfloat16(), w8.t(), scale, scale, torch.float32)
    check_operator(ops.static_product, x8, w8, 0.25, torch.bfloat16)
    check_operator(ops.static_product, x8.t(), g8.t(), 0.25, torch.bfloat16)
    check_operator(ops.hidden_layer, x8, w8, 0.5, 4.0)
    h8, _ = kernels.hidden_layer(x8, w8, 0.5, 4.0)
    gradient = x8.float().to(E5M2)
    check_operator(ops.hidden_layer, gradient, w8, 0.5, 4.0, h8, 0.25)
    z = normal(rows, vocab, dtype=torch.bfloat16, device=device)
    targets = integers(0, vocab - 1, 2, rows, device=device)
    for bias in (None, torch.zeros(vocab, device=device)):
        torch.library.opcheck(ops.loss.default, (z, targets[:1], [*CAP], 1 / 448, bias))
        torch.library.opcheck(ops.loss.default, (z, targets, [*CAP], 1 / 448, bias, scale))


# ---------------------------------------------------------------------------------------- products


@devices
@pytest.mark.parametrize("a_scale, b_scale", [(1.0, 1.0), (0.5, 2.0**-9)])
@pytest.mark.parametrize("emulated", [False, True])
def test_products_of_whole_numbers_are_exact_to_the_bit(
    device, a_scale, b_scale, emulated, monkeypatch
):
    if emulated or device == "cpu":  # which has these products, too, though we do not use them
        monkeypatch.setattr(kernels, "has_fp8", lambda device: not emulated)
    a = integers(-2, 2, 32, 48, device=device)
    b_t = integers(-2, 2, 64, 48, seed=1, device=device)
    exact = (a.double() @ b_t.double().T) * a_scale * b_scale  # all sums below 256: bf16 holds them
    scales = torch.tensor(a_scale, device=device), torch.tensor(b_scale, device=device)
    for a_format, b_format in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)):
        a8 = a.float().to(a_format)
        b8 = b_t.float().to(b_format)
        a8_view = a8.t().contiguous().t()
        b8_view = b8.t().contiguous().t()
        for left, right in ((a8, b8), (a8_view, b8), (a8, b8_view), (a8_view, b8_view)):
            for dtype in (torch.bfloat16, torch.float32):
                y = kernels.product(left, right, *scales, dtype)
                assert y.dtype == dtype and torch.equal(y.double(), exact)
                y = kernels.static_product(left, right, a_scale * b_scale, dtype)
                assert y.dtype == dtype and torch.equal(y.double(), exact)
        for left, right in ((a8.bfloat16(), b8.bfloat16()), (a8.bfloat16(), b8)):
            y = kernels.product(left, right, *scales, torch.float32)
            assert torch.equal(y.double(), exact)


# ------------------------------------------------------------------------------------ squared ReLU


def hidden_layer_operands(T=256, D=96, width=160):
    """x, up^T, gradient and down^T in FP8, of magnitudes as in training, and a row far beyond."""
    x = normal(T, D)
    x[3] *= 200  # its squares, and their gradient, are more than the formats hold
    up_t = 0.3 * normal(width, D, seed=1)
    down_t = 0.1 * normal(width, D, seed=2)
    g = 0.05 * normal(T, D, seed=3)
    x8, _ = kernels.quantize(x, X_SCALE, E4M3)
    up8_t, _ = kernels.quantize(up_t, W_SCALE, E4M3)
    g8, _ = kernels.quantize(g, GRAD_SCALE, E5M2)
    down8_t, _ = kernels.quantize(down_t, W_SCALE, E4M3)
    return x8, up8_t, g8, down8_t


@pytest.mark.parametrize("emulated", [False, True])
def test_hidden_layer_and_its_gradient_are_the_formulas_in_float64_rounded(emulated, monkeypatch):
    monkeypatch.setattr(kernels, "has_fp8", lambda device: not emulated)
    x8, up8_t, g8, down8_t = hidden_layer_operands()
    h, h_t = call_hidden_layer(x8, up8_t, None)
    z, z_t = call_hidden_layer(g8, down8_t, h)
    assert (h.dtype, z.dtype) == (E4M3, E5M2)
    assert equal(h_t, h.t().contiguous()) and equal(z_t, z.t().contiguous())
    x_up = x8.double() @ up8_t.double().T * X_SCALE * W_SCALE
    hidden = x_up.relu().square()
    # The formula of the gradient begins with the rounded h, so this does, too.
    slope = 2 * (h.double() * HIDDEN_SCALE).sqrt()
    gradient = slope * (g8.double() @ down8_t.double().T) * GRAD_SCALE * W_SCALE
    for ours, exact, scale, dtype in (
        (h, hidden, HIDDEN_SCALE, E4M3), (z, gradient, GRAD_SCALE, E5M2)
    ):
        rounded = nearest(exact / scale, GRID[dtype])
        different = (ours.double() != rounded).double().mean()
        assert different < 1e-3  # float32 sums next to a tie
        assert 0.3 < (ours.double() != 0).double().mean() < 0.7
        assert ours.double().abs().max() == LIMIT[dtype], "no operand was beyond the end"


# ---------------------------------------------------------------------------------------- the loss


def capped(z):
    """The cap of record 54, 23 sigmoid((z + 5) / 7.5), by another function."""
    return 11.5 * torch.tanh((z + 5) / 15) + 11.5


def with_bias(z, targets):
    """z, with one target missing, and biases of all tokens that are no targets."""
    bias = normal(z.shape[1], seed=7).float().mul(2).index_fill(0, targets, 0)
    missing = torch.arange(len(targets)) == 1
    return z, targets.where(~missing, -1), bias


def with_second_targets(targets):
    """The targets and second ones, of which one is missing and one is the first one again."""
    second = targets.roll(-1)
    second[2], second[3] = targets[2], -1
    return torch.stack((targets, second)), torch.tensor(0.25)


@pytest.mark.parametrize("sample, second", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_and_its_gradient_are_those_of_cross_entropy_of_capped_logits(dtype, sample, second):
    z = normal(40, 300).mul(6).to(dtype)
    targets = integers(0, 299, 40)
    bias = None
    if sample:
        z, targets, bias = with_bias(z, targets)
    exact = z.double().requires_grad_()
    logits = capped(exact) + (bias if sample else 0)
    reference = F.cross_entropy(logits, targets, reduction="none", ignore_index=-1)
    reference.sum().backward(retain_graph=True)
    targets, weight = with_second_targets(targets) if second else (targets[None], None)
    if second:
        others = targets[1].where(targets[0] >= 0, -1)
        (weight * F.cross_entropy(logits, others, reduction="sum", ignore_index=-1)).backward()
    loss, gradient = kernels.capped_cross_entropy(z, targets, CAP, 1 / 448, bias, weight)
    assert (loss.dtype, gradient.dtype) == (torch.float32, E5M2)
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=1e-5)
    error = (gradient.double() / 448 - exact.grad).abs()
    # Half a step of e5m2, which has 2 bits of mantissa, or of its subnormal numbers.
    assert (error <= exact.grad.abs() * 2**-3 * 1.001 + 2**-17 / 448).all()


def test_the_loss_of_extreme_logits_is_finite_and_its_gradient_is_clamped():
    z = torch.tensor([[3e38, -3e38, 0.0], [-3e38, 3e38, 1.0]]).bfloat16()
    loss, _ = kernels.capped_cross_entropy(z, torch.tensor([[0, 0]]), CAP, 1e-9)
    exact = []
    for other in (0, 1):
        logit = 23 / (1 + math.exp(-(other + 5) / 7.5))
        exact.append(math.log(1 + math.exp(logit - 23) + math.exp(-23)))
    assert loss.tolist() == pytest.approx([exact[0], 23 + exact[1]], abs=1e-5)
    z = torch.zeros(2, 4).bfloat16()
    _, gradient = kernels.capped_cross_entropy(z, torch.tensor([[0, 1]]), CAP, 1e-9)
    end = LIMIT[E5M2]
    assert gradient.tolist() == [[-end, end, end, end], [end, -end, end, end]]


def test_without_a_target_loss_and_gradient_are_0_even_where_a_logit_is_nan():
    z = normal(4, 30, dtype=torch.bfloat16)
    z[1:3, 5] = math.nan
    for bias in (None, torch.zeros(30)):
        loss, gradient = kernels.capped_cross_entropy(z, torch.tensor([[3, -1, 4, -1]]), CAP, 1, bias)
        assert loss[[1, 3]].tolist() == [0, 0]
        assert not gradient.float()[[1, 3]].any()
        assert loss[0].isfinite() and gradient.float()[0].isfinite().all()
        assert loss[2].isnan() and gradient.float()[2].isnan().all(), "with a target it is seen"


# ---------------------------------------------------------------------------------- rows of tables

@pytest.mark.parametrize(
    "ranks, width", [(1, 5), (2, 7), (3, 4), (4, 13), (2, 16), (3, 22), (5, 16)])
def test_what_ranks_take_of_their_columns_is_put_into_these_rows_without_padding_and_into_no_others(
    ranks, width
):
    share = -(-width // ranks)
    rows = [0, 4, 5, 9]
    bank = normal(11, width, dtype=torch.bfloat16)
    for rank in range(ranks):
        taken = tables.take_columns(bank, torch.tensor(rows), rank, ranks)
        columns = range(rank * share, (rank + 1) * share)
        assert taken.tolist() == [[bank[row, c].item() if c < width else 0 for c in columns] for row in rows]
    parts = normal(ranks, 4, share, seed=1, dtype=torch.bfloat16)
    expected = bank.tolist()
    place = bank.data_ptr()
    tables.put_rows(bank, torch.tensor(rows), parts)
    for line, row in enumerate(rows):
        for column in range(width):
            expected[row][column] = parts[column // share, line, column % share].item()
    assert bank.tolist() == expected and bank.data_ptr() == place


def test_rows_in_bf16_are_rounded_at_random_right_on_average_and_not_as_their_neighbours():
    """Updates of a tenth of the distance to the next number of bf16, which rounding to the nearest would lose."""
    n, change = 20_000, 2**-7 / 10
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gradient, bank = -torch.ones(n, 4, device=device), torch.ones(n, 4, device=device).bfloat16()
    tables.update_rows(
        gradient, torch.arange(n, device=device), gradient[:, 0].abs(), bank, 0, change, 0.0)
    assert set(bank.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert (bank.double().mean() - 1).item() == pytest.approx(change, rel=0.05)  # a deviation is 0.011 of it
    up = bank.flatten() > 1
    for distance in (1, 4, 64, 320):
        both = torch.corrcoef(torch.stack((up[distance:], up[:-distance])).double())[0, 1].item()
        assert abs(both) < 0.02, distance  # a deviation is 0.0035


# ------------------------------------------------------------------------------------- the kernels
# Of each kernel: the arguments of its runs; how it is called, which on a CPU is its twin and on a
# GPU the kernel; how Triton's interpreter runs it; and how well both must agree.


def transpose_inputs():
    sizes = (70, 130), (129, 3), (3, 300)
    return [(integers(0, 255, *size).to(torch.uint8).view(E4M3),) for size in sizes]


def interpret_transpose(x):
    M, N = x.shape
    x_t = filled(N, M, dtype=x.dtype)
    kernels.transpose_kernel[kernels.tiles(x)](
        x.view(torch.uint8), x_t.view(torch.uint8), M, N, 64, 128)
    return x_t


def assert_equal_bytes(ours, twin):
    assert equal(ours, twin)


def quantize_inputs():
    """x, scale and dtype. Infinity is clamped, and what is no number stays so."""
    runs = []
    for size, scale, dtype in (((70, 130), 0.25, E4M3), ((129, 3), 2.0**-12, E5M2)):
        x = 700 * scale * normal(*size)
        x[1, :3] = torch.tensor([math.inf, -math.inf, math.nan])
        runs.append((x.bfloat16(), scale, dtype))
    return runs


def interpret_quantize(x, scale, dtype):
    """The first third of the columns, then the others."""
    M, N = x.shape
    y = filled(M, N, dtype=dtype)
    y_t = filled(N, M, dtype=dtype)
    for begin, end in ((0, N // 3), (N // 3, N)):
        part = x[:, begin:end].contiguous()
        kernels.quantize_kernel[kernels.tiles(part)](
            part, y_t[begin:], M, end - begin, y[:, begin:], N, 1 / scale, LIMIT[dtype], 64, 128
        )
    return y, y_t


def assert_quantized(ours, twin):
    for a, b in zip(ours, twin):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)
    limit = LIMIT[ours[0].dtype]
    assert ours[0].float()[1, :2].tolist() == [limit, -limit]


def loss_inputs():
    """z, targets, cap, grad_scale, bias and second_weight. The vocabularies fill no tile, or one."""
    runs = []
    sizes = (5, 3000, 1 / 448), (3, 50, 1 / 448), (2, 2048, 1 / 448), (4, 33_000, 1.4e-5), (6, 60, 1 / 448)
    for i, (tokens, vocab, grad_scale) in enumerate(sizes):
        z = normal(tokens, vocab, seed=i).mul(5).bfloat16()
        targets = integers(0, vocab - 1, tokens, seed=i)
        bias = None
        if i in (1, 3, 4):
            z, targets, bias = with_bias(z, targets)
            z[1, 7] = math.nan  # where there is no target
        targets, weight = with_second_targets(targets) if tokens == 6 else (targets[None], None)
        runs.append((z, targets, CAP, grad_scale, bias, weight))
    return runs


def interpret_loss(z, targets, cap, grad_scale, bias, second_weight):
    T, V = z.shape
    loss = filled(T, dtype=torch.float32)
    gradient = filled(T, V, dtype=E5M2)
    tile = kernels.triton.next_power_of_2(V)
    kernels.loss_kernel[T,](
        z, targets, loss, gradient, bias, second_weight, 1 / grad_scale, V, *cap, False, tile)
    return loss, gradient


def assert_losses_agree(ours, twin):
    """Where rounding to e5m2 is nearly a tie, the last bit may differ. On a GPU tanh.approx is
    wrong by 2^-11 of a tangent: times 11.5, in a logit and in the sum."""
    error, differing = (2 * 11.5 * 2**-11, 0.15) if FP8_GPU else (1e-5, 2e-3)
    torch.testing.assert_close(ours[0], twin[0], rtol=1e-5, atol=error)
    codes = []
    for _, gradient in (ours, twin):
        code = gradient.view(torch.uint8).int()
        codes.append(code * (code != 128))  # both zeros are 0
    steps = codes[0] - codes[1]  # codes of one sign are in order
    assert steps.abs().max() <= 1
    assert (steps != 0).sum() <= 1 + differing * steps.numel()


def hidden_layer_inputs():
    """a, b_t and h (none forward), at whole tiles and others."""
    runs = []
    for sizes in ((64, 64, 96), (48, 48, 80)):
        x8, up8_t, g8, down8_t = hidden_layer_operands(*sizes)
        h, _ = kernels.hidden_layer(x8, up8_t, X_SCALE * W_SCALE, HIDDEN_SCALE)
        runs += [(x8, up8_t, None), (g8, down8_t, h)]
    return runs


def call_hidden_layer(a, b_t, h):
    if h is None:
        return kernels.hidden_layer(a, b_t, X_SCALE * W_SCALE, HIDDEN_SCALE)
    return kernels.hidden_layer(a, b_t, GRAD_SCALE * W_SCALE, HIDDEN_SCALE, h, GRAD_SCALE)


def interpret_hidden_layer(a, b_t, h):
    M, K = a.shape
    N = len(b_t)
    y = filled(M, N, dtype=a.dtype)
    y_t = filled(N, M, dtype=a.dtype)
    backward = h is not None
    depth = 16 if backward else 32
    factor = X_SCALE * W_SCALE * HIDDEN_SCALE**-0.5
    if backward:
        factor = 2 * W_SCALE * HIDDEN_SCALE**0.5
    descriptors = []
    for x in (a, b_t):
        descriptors.append(kernels.TensorDescriptor.from_tensor(x, [32, depth]))
    for x in (h if backward else y, y, y_t):
        descriptors.append(kernels.TensorDescriptor.from_tensor(x, [32, 32]))
    kernels.hidden_layer_kernel[3,](
        *descriptors, factor, M, N, K, backward, LIMIT[a.dtype], 32, depth)
    return y, y_t


def assert_hidden_layer_agrees(ours, twin):
    """Few numbers round to a neighbour, since sums are in another order, and fast ones on a GPU."""
    y, y_t = ours
    assert equal(y_t, y.t().contiguous())
    step = {E4M3: 2**-3, E5M2: 2**-2}[y.dtype]  # at most, in units of the smaller neighbour
    y = y.double()
    twin = twin[0].double()
    assert (y != twin).double().mean() < 0.05
    bound = 1.001 * step * torch.minimum(y.abs(), twin.abs()) + 1e-3 * twin.std()
    assert ((y - twin).abs() <= bound).all()


USED = torch.tensor([1, 2, 5, 6, 11])


def sum_rows_inputs():
    """total, places and gradient."""
    places = integers(0, 4, 20)
    runs = []
    for ranks, width in ((1, 40), (3, 31)):  # the width is that of a table
        total = normal(ranks, 5, -(-width // ranks), seed=1).float()
        total.transpose(0, 1).flatten(1)[:, width:] = 0
        runs.append((total, places, normal(20, width, seed=2).bfloat16()))
    return runs


def call_sum_rows(total, *others):
    tables.sum_rows(total, *others)
    return total


def interpret_sum_rows(total, places, gradient):
    _, n, share = total.shape
    lines, width = gradient.shape
    grid = -(-lines // 8), -(-width // 16)
    tables.sum_rows_kernel[grid](total, places, gradient, n, lines, width, share, 8, 16)
    return total


def update_rows_inputs():
    """gradient, rows, root, bank, rank, lr and decay: all columns in float32 and in bf16, and those of the last rank."""
    gradient, root, bank = normal(5, 37).float(), normal(5, seed=1).square().float(), normal(12, 37, seed=2).float()
    return [(gradient, USED, root, bank, 0, 0.1, 0.3), (gradient, USED, root, bank.bfloat16(), 0, 0.1, 0.3),
            (gradient[:, :13].contiguous(), USED, root, bank, 2, 0.1, 0.3)]


def call_update_rows(gradient, rows, root, bank, *others):
    bank = bank.clone()
    tables.update_rows(gradient, rows, root, bank, *others)
    return bank


def interpret_update_rows(gradient, rows, root, bank, rank, lr, decay):
    n, share = gradient.shape
    bank = bank.clone()
    grid = -(-n // 4), -(-share // 16)
    tables.update_rows_kernel[grid](gradient, rows, root, bank, n, share, bank.size(1), rank * share, lr, decay,
                                    7, bank.dtype == torch.bfloat16, 4, 16)
    return bank


def assert_rows_agree(ours, twin):
    """Sums are in another order, and bf16 may be rounded to either neighbour."""
    for a, b in zip(leaves(ours), leaves(twin), strict=True):
        rtol = 2**-7 if a.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-5)


def leaves(results):
    return torch.utils._pytree.tree_leaves(results)


KERNELS = {
    "transpose": (
        transpose_inputs, kernels.transpose, interpret_transpose, assert_equal_bytes),
    "quantize": (quantize_inputs, kernels.quantize, interpret_quantize, assert_quantized),
    "loss": (loss_inputs, kernels.capped_cross_entropy, interpret_loss, assert_losses_agree),
    "hidden_layer": (
        hidden_layer_inputs, call_hidden_layer, interpret_hidden_layer,
        assert_hidden_layer_agrees),
    "sum_rows": (sum_rows_inputs, call_sum_rows, interpret_sum_rows, assert_rows_agree),
    "update_rows": (update_rows_inputs, call_update_rows, interpret_update_rows, assert_rows_agree),
}


def filled(*shape, dtype):
    """A tensor of 77s, which a kernel is to overwrite."""
    if dtype.itemsize == 1:
        return torch.full(shape, 77, dtype=torch.uint8).view(dtype)
    return torch.full(shape, 77, dtype=dtype)


def use_pytorchs_cast():
    """Puts PyTorch's cast between float32 and FP8 in the place of the interpreter's."""
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    fp8 = {tl.float8e5: E5M2, tl.float8e4nv: E4M3}
    original = interpreter._convert_float

    def convert(data, source, target, rounding):
        data = np.ascontiguousarray(data)
        if source == tl.float32 and target in fp8:
            return torch.from_numpy(data).to(fp8[target]).view(torch.uint8).numpy()
        if target == tl.float32 and source in fp8:
            return torch.from_numpy(data.view(np.uint8)).view(fp8[source]).float().numpy()
        return original(data, source, target, rounding)

    interpreter._convert_float = convert


def run_in_interpreter(path):
    """Writes what every kernel makes of its inputs to a file. Runs in a process of its own."""
    use_pytorchs_cast()
    results = {}
    for name, (inputs, _, interpret, _) in KERNELS.items():
        results[name] = [interpret(*arguments) for arguments in inputs()]
    torch.save(results, path)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """What the kernels make of their inputs, in another process: the interpreter is for all."""
    path = tmp_path_factory.mktemp("kernels") / "results"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = processes.run(__file__, path, env=environment)
    assert run.returncode == 0, run.stderr
    return torch.load(path)


@needs_interpreter
@pytest.mark.parametrize("name", KERNELS)
def test_in_tritons_interpreter_a_kernel_gives_the_numbers_of_its_twin(name, interpreted):
    inputs, twin, _, assert_agree = KERNELS[name]
    for ours, arguments in zip(interpreted[name], inputs(), strict=True):
        assert_agree(ours, twin(*arguments))


@needs_fp8_gpu
@pytest.mark.parametrize("name", KERNELS)
def test_on_a_gpu_a_kernel_gives_the_numbers_of_its_twin(name):
    inputs, call, _, assert_agree = KERNELS[name]
    map_tensors = torch.utils._pytree.tree_map_only
    for on_gpu, arguments in zip(map_tensors(torch.Tensor, torch.Tensor.cuda, inputs()), inputs()):
        ours = map_tensors(torch.Tensor, torch.Tensor.cpu, call(*on_gpu))
        assert_agree(ours, call(*arguments))


if __name__ == "__main__":  # with the root of the project on the path, as the tests have it
    run_in_interpreter(sys.argv[1])
