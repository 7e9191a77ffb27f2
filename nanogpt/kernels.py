"""The trainer's GPU kernels, each beside the plain PyTorch that computes the same.

A kernel is a function for the GPU, written in Triton. The GPU runs many copies of it ("programs")
at a time, and each one works on a small tile of the tensors. Where PyTorch would read and write
the memory several times, a kernel reads once, computes everything, and writes once.

Every kernel has a twin in plain PyTorch. The twin runs where the kernel cannot: on CPUs, on GPUs
that lack the hardware, and for dtypes that the kernel does not take. It also tells a reader in a
few lines what the kernel is for, and the tests compare the two.

Most sections have the same order: the algebra in prose, the kernel, and the function to call, which
often holds the twin. It is an operator ("custom_op"), so torch.compile takes it as one step and
does not look inside. The function marked `register_fake` tells the compiler which shapes and dtypes
come out.

Sections: (1) FP8, (2) rounding, (3) products, (4) the MLP's squared ReLU, (5) the loss. The kernels
for rows of tables stand in nanogpt/tables.py.

Shapes in comments: M, N and K are any sizes, T tokens, D model width, F hidden width of the MLP,
V vocabulary. Sources are named by modded-nanogpt record number or by paper.
"""
import importlib.util
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from nanogpt.gpu import constant

# Without a GPU only the twins run, so Triton need not be installed. The tests run the kernels on a
# CPU, in Triton's interpreter, which the variable TRITON_INTERPRET turns on.
triton = tl = None
has_triton = importlib.util.find_spec("triton") is not None
if has_triton and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor


# --------------------------------------------------------------------------------------------------
# 1. FP8: numbers of 8 bits, which tensor cores multiply twice as fast as bf16
#
# There are two formats. e4m3 has 4 bits of exponent and 3 of mantissa: it is the more precise one,
# and its largest number is 448. e5m2 has 5 and 2: it reaches from 2^-16 to 57344. Activations and
# weights are held in e4m3, gradients in e5m2, because gradients differ more in size.

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


def has_fp8(device: torch.device) -> bool:
    """Whether this device multiplies FP8 matrices. On others we emulate it, also on CPUs: PyTorch
    can multiply such matrices there, but on some takes hundreds of times as long."""
    if device.type != "cuda" or torch.version.hip:  # older AMD GPUs have an e4m3 that ends at 240
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


# --------------------------------------------------------------------------------------------------
# 2. Rounding to FP8, and transposition
#
# A tensor is divided by a scale before it is rounded, so that its numbers fit the format's range.
# A product of two such tensors is multiplied by both scales. Numbers that still do not fit are
# clamped to the largest one, because a plain cast may turn them into NaN. A NaN stays NaN, so that
# somebody notices it.
#
# FP8 tensor cores want both operands stored with the summed dimension last. The three products of a
# projection sum over three dimensions (nanogpt/precision/__init__.py). So x, w and dy are each
# needed as they are and transposed. The first kernel below writes both while it has a tile of x in
# registers: x is read once and rounded once.

# Each program works on a tile of this size.
TILE_ROWS = 64
TILE_COLUMNS = 128


def tiles(x: Tensor) -> tuple[int, int]:
    """How many programs cover x (M, N)."""
    M, N = x.shape
    return triton.cdiv(M, TILE_ROWS), triton.cdiv(N, TILE_COLUMNS)


if triton is not None:

    @triton.jit
    def quantize_kernel(
        x_ptr,  # (M, N)
        y_t_ptr,  # (N, M)
        M,
        N,
        y_ptr,  # (M, N), columns of a wider tensor
        y_width,  # of that tensor
        inverse_scale,
        LIMIT: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        """Rounds a tile of x and writes it twice: to y and, transposed, to y_t."""
        # Offsets have 64 bits: x may have more elements than 32 bits can count.
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row[:, None] < M) & (column[None, :] < N)
        x = tl.load(x_ptr + row[:, None] * N + column[None, :], mask=inside, other=0)
        x = x.to(tl.float32) * inverse_scale
        x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        y = x.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row[:, None] * y_width + column[None, :], y, mask=inside)
        y_t = tl.trans(y)
        tl.store(y_t_ptr + column[:, None] * M + row[None, :], y_t, mask=tl.trans(inside))

    @triton.jit
    def transpose_kernel(x_ptr, x_t_ptr, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        """Writes a tile of x (M, N) to x_t (N, M)."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row[:, None] < M) & (column[None, :] < N)
        x = tl.load(x_ptr + row[:, None] * N + column[None, :], mask=inside, other=0)
        x_t = tl.trans(x)
        tl.store(x_t_ptr + column[:, None] * M + row[None, :], x_t, mask=tl.trans(inside))


def round_to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x / scale, clamped to the range of the FP8 dtype and rounded to nearest, ties to even."""
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def transpose(x: Tensor) -> Tensor:
    """x (M, N), contiguous and in FP8 -> (N, M), contiguous.

    On a GPU PyTorch's own copy would write single bytes, where the kernel writes whole tiles.
    """
    if not x.is_cuda:
        return x.t().clone(memory_format=torch.contiguous_format)
    M, N = x.shape
    x_t = x.new_empty(N, M)
    # The kernel gets bytes: Triton has no FP8 zero to fill in for what lies outside of x.
    transpose_kernel[tiles(x)](
        x.view(torch.uint8), x_t.view(torch.uint8), M, N, TILE_ROWS, TILE_COLUMNS, num_warps=8
    )
    return x_t


def new_pair(like: Tensor, M: int, N: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for a matrix (M, N), and for the same transposed."""
    return like.new_empty(M, N, dtype=dtype), like.new_empty(N, M, dtype=dtype)


@torch.library.custom_op("nanogpt::quantize", mutates_args=())
def quantize_columns(
    parts: list[Tensor], scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A matrix x (M, N), which exists in parts (M, some of its columns) -> round_to_fp8(x, scale,
    dtype), as it is (M, N) and transposed (N, M).

    The parts are put together while they are rounded, so that nobody has to copy them beforehand.
    The kernel multiplies by 1 / scale where the twin divides. Unless the scale is a power of two,
    a number midway between two FP8 numbers may be rounded up by the one and down by the other.
    """
    first = parts[0]
    # For float32 the kernel wrote wrong numbers when Triton 3.6 compiled it.
    if not (first.is_cuda and has_fp8(first.device) and first.dtype == torch.bfloat16):
        y = round_to_fp8(torch.cat(parts, 1), scale, dtype)
        return y, transpose(y)
    M = len(first)
    width = sum(x.shape[1] for x in parts)
    y, y_t = new_pair(first, M, width, dtype)
    begin = 0
    for x in parts:
        N = x.shape[1]
        quantize_kernel[tiles(x)](
            x.contiguous(), y_t[begin:], M, N, y[:, begin:], width, 1 / scale,
            torch.finfo(dtype).max, TILE_ROWS, TILE_COLUMNS, num_warps=8
        )
        begin += N
    return y, y_t


@quantize_columns.register_fake
def _(parts, scale, dtype):
    return new_pair(parts[0], len(parts[0]), sum(x.shape[1] for x in parts), dtype)


def quantize(x: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_columns` of one part."""
    return quantize_columns([x], scale, dtype)


# --------------------------------------------------------------------------------------------------
# 3. Products of FP8 matrices
#
# A product takes its formats from its operands, and multiplies the sums by both scales. Hopper can
# add up in fewer bits, which is faster ("fast accumulation"). We allow that only where both
# operands are e4m3, which is the forward pass: backward, the errors of gradients would add up.
# (Section 4 has an exception.)
#
# GPUs without FP8 products multiply in bf16, which holds every FP8 number exactly, and CPUs in
# float32. Both add up in float32, which holds every product of two of them exactly. So only the
# order of the sum differs, but for fast accumulation. A caller may also hand in bf16 tensors of
# rounded numbers, as the recipe for FP4 does.


def contiguous(x: Tensor) -> Tensor:
    """x (M, N) with its last dimension contiguous. A transposed view is written out in tiles."""
    if x.is_contiguous():
        return x
    return transpose(x.t().contiguous())


@torch.library.custom_op("nanogpt::product", mutates_args=())
def product(a: Tensor, b_t: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a (M, K) times b_t (N, K) transposed, times both scales () -> (M, N) in dtype.

    The operands are in FP8, or in bf16 if they hold rounded numbers. They may be transposed views,
    but contiguous ones are faster. The scales are float32 tensors on the same device. The hardware
    wants K and N to be multiples of 16.
    """
    holds_rounded_numbers = torch.bfloat16 in (a.dtype, b_t.dtype)
    if holds_rounded_numbers or not has_fp8(a.device):
        if a.is_cuda:
            sums = torch.mm(a.bfloat16(), b_t.bfloat16().t(), out_dtype=torch.float32)
        else:
            sums = a.float() @ b_t.float().t()
        return (sums * (a_scale * b_scale)).to(dtype)
    fast = a.dtype == E4M3 and b_t.dtype == E4M3
    a = contiguous(a)
    b = contiguous(b_t).t()
    return torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)


@product.register_fake
def _(a, b_t, a_scale, b_scale, dtype):
    return a.new_empty(len(a), len(b_t), dtype=dtype)


# This is an operator of its own so that torch.compile does not see `constant`: it would copy
# the number to the device at every call.
@torch.library.custom_op("nanogpt::static_product", mutates_args=())
def static_product(a: Tensor, b_t: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """`product` with one constant, which is the product of both scales."""
    return product(
        a, b_t, constant(a.device, scale), constant(a.device, 1.0), dtype)


@static_product.register_fake
def _(a, b_t, scale, dtype):
    return a.new_empty(len(a), len(b_t), dtype=dtype)


# --------------------------------------------------------------------------------------------------
# 4. The MLP's squared ReLU, in the same kernel as the product before it (records 59, 87)
#
# The MLP computes z = x up, h = relu(z)^2 and then h down^T, with weights up and down (D, F). F is
# several times D, so z and h would be a layer's largest tensors. The kernel has the sums of a tile
# in registers, and squares and rounds them there: z is never written to memory, and h only in FP8.
#
# Backward, the gradient of h is dh = g down, and that of z is dz = dh * 2 relu(z). As relu(z) is
# sqrt(h), backward needs h but not z. Where h was rounded to 0, the gradient is 0, too. That is so
# up to hidden_scale / 1024.
#
# The scales are put together in one factor f. The operands hold FP8 numbers, so the product is
# sums * product_scale, where product_scale is the scale of the one operand times that of the other.
# What is written is h8 = h / hidden_scale, and backward dz8 = dz / grad_scale:
#     h8  = relu(sums * f)^2       where f = product_scale / sqrt(hidden_scale)
#     dz8 = sums * f * sqrt(h8)    where f = 2 product_scale sqrt(hidden_scale) / grad_scale
# So both directions have the same kernel, with few differences at the end.

# The fastest of 16 choices on an H200. A program computes several tiles, one by one. Two programs
# share a processor, so that one writes its tile while the other multiplies. Both must fit
# into its 228 KB of shared memory: forward, 2 KB are left.
HOPPER_TILE = 128  # rows and columns of a tile of y
HOPPER_PROGRAMS = 2  # on each processor
HOPPER_FORWARD = dict(DEPTH=128, num_warps=8, num_stages=3)  # DEPTH: terms summed at a time
HOPPER_BACKWARD = dict(DEPTH=64, num_warps=4, num_stages=4)

if triton is not None:

    @triton.jit
    def hidden_layer_kernel(
        a,  # (M, K)
        b_t,  # (N, K)
        h,  # (M, N), read backward only
        y,  # (M, N)
        y_t,  # (N, M)
        factor,
        M,
        N,
        K,
        BACKWARD: tl.constexpr,
        LIMIT: tl.constexpr,
        TILE: tl.constexpr,
        DEPTH: tl.constexpr,
    ):
        """Computes every n-th tile, where n is the number of programs. The five tensors come as
        descriptors, which load and store whole tiles."""
        tiles_across = tl.cdiv(N, TILE)
        num_tiles = tl.cdiv(M, TILE) * tiles_across
        for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
            row = tile // tiles_across * TILE
            column = tile % tiles_across * TILE
            sums = tl.zeros((TILE, TILE), tl.float32)
            for k in range(0, K, DEPTH):
                # This is a fast accumulation, even backward, because it has only D terms.
                sums = tl.dot(a.load([row, k]), b_t.load([column, k]).T, sums)
            z = sums * factor
            if BACKWARD:
                z *= tl.sqrt(h.load([row, column]).to(tl.float32))
            else:
                z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
                z *= z
            z = tl.clamp(z, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            rounded = z.to(y.dtype)
            y.store([row, column], rounded)
            y_t.store([column, row], rounded.T)


@torch.library.custom_op("nanogpt::hidden_layer", mutates_args=())
def hidden_layer(
    a: Tensor,
    b_t: Tensor,
    product_scale: float,
    hidden_scale: float,
    h: Tensor | None = None,
    grad_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Forward: x (T, D) and up_t (F, D), both e4m3 -> h = relu(x up)^2 / hidden_scale in e4m3.

    Backward, with this h: g (T, D) in e5m2, the gradient of the MLP's output, and down_t (F, D) in
    e4m3 -> the gradient of x up in e5m2, divided by grad_scale. product_scale is the scale of a
    times that of b_t. Returns the result as it is (T, F) and transposed (F, T).
    """
    backward = h is not None
    # The kernel's tiles were chosen for Hopper. AMD has a (9, 0), too.
    is_nvidia = a.is_cuda and not torch.version.hip
    if not (is_nvidia and torch.cuda.get_device_capability(a.device) == (9, 0)):
        sums = static_product(a, b_t, product_scale, torch.float32)
        if backward:
            return quantize(2 * (h.float() * hidden_scale).sqrt() * sums, grad_scale, E5M2)
        return quantize(F.relu(sums).square(), hidden_scale, E4M3)
    factor = product_scale * hidden_scale**-0.5
    choice = HOPPER_FORWARD
    if backward:
        factor = 2 * product_scale * hidden_scale**0.5 / grad_scale
        choice = HOPPER_BACKWARD
    M, K = a.shape
    N = b_t.shape[0]
    y, y_t = new_pair(a, M, N, a.dtype)
    descriptors = []
    for x in (a, b_t):
        descriptors.append(TensorDescriptor.from_tensor(x, [HOPPER_TILE, choice["DEPTH"]]))
    for x in (h if backward else y, y, y_t):  # forward there is no h, but it is not read
        descriptors.append(TensorDescriptor.from_tensor(x, [HOPPER_TILE, HOPPER_TILE]))
    processors = torch.cuda.get_device_properties(a.device).multi_processor_count
    limit = torch.finfo(a.dtype).max
    hidden_layer_kernel[HOPPER_PROGRAMS * processors,](
        *descriptors, factor, M, N, K, backward, limit, HOPPER_TILE, **choice
    )
    return y, y_t


@hidden_layer.register_fake
def _(a, b_t, product_scale, hidden_scale, h=None, grad_scale=1.0):
    return new_pair(a, len(a), len(b_t), a.dtype)


# --------------------------------------------------------------------------------------------------
# 5. The loss: cross-entropy of capped logits with its gradient, in one kernel (records 67, 79)
#
# A sigmoid caps the logits (records 19, 54): logit = height * sigmoid((z + shift) / width). They
# lie between 0 and `height`, so their exponentials cannot overflow, and we need no maximum first.
#
# One program works on one token. It holds all V logits of the token in registers, so it reads them
# once. (16,384 candidates fit. A whole vocabulary does not: Triton puts a part of it into slower
# memory, though to read the logits twice would be faster.) The program writes the loss and the
# gradient. So the gradient is written once, in FP8, and the backward pass computes nothing again.
#
# To read and write its tensors would take about three quarters of the kernel's time, so the number
# of instructions counts, too. Two tricks save some:
# - A hyperbolic tangent is one instruction, a sigmoid is several. With a = height / 2 and
#   t = tanh((z + shift) / (2 width)),
#       logit = a + a t    and    dlogit/dz = (1 - t^2) a / (2 width).
# - A power of two is one instruction, so e^x is computed as 2^(x log2(e)).


def softcap(z: Tensor, height: float, shift: float, width: float) -> Tensor:
    """The capped logits of z (..., V), in float32 or wider."""
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return height * torch.sigmoid((z + shift) / width)


if triton is not None:

    @triton.jit
    def tanh(x, FAST: tl.constexpr):
        if FAST:  # one instruction, with a relative error of up to 2^-11
            return tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
            )
        return 2 * tl.sigmoid(2 * x) - 1

    @triton.jit
    def loss_kernel(
        z_ptr,  # (T, V)
        targets_ptr,  # (1, T) or (2, T)
        loss_ptr,  # (T,)
        gradient_ptr,  # (T, V)
        bias_ptr,  # (V,) or None
        second_weight_ptr,  # (), or None if there are no second targets
        inverse_scale,
        V,
        height, shift, width,
        FAST: tl.constexpr,
        TILE: tl.constexpr,
    ):
        """Computes loss and gradient of one token. TILE is at least V."""
        LOG2E: tl.constexpr = 1.4426950408889634
        token = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, TILE)
        inside = column < V
        a = height / 2
        slope = 0.5 / width
        offset = shift * slope
        factor = a * slope * inverse_scale
        z_ptr += token * V
        gradient_ptr += token * V

        # 1. e^(logit - height) for each token of the vocabulary, and their sum. The exponent is
        # a t - a.
        z = tl.load(z_ptr + column, mask=inside, other=0.0).to(tl.float32)
        t = tanh(z * slope + offset, FAST)
        power = t * (a * LOG2E) - a * LOG2E
        if bias_ptr is not None:
            power += tl.load(bias_ptr + column, mask=inside) * LOG2E
        e = tl.where(inside, tl.exp2(power), 0.0)
        total = tl.sum(e)

        # 2. The gradient, as if no token were a target; step 3 corrects those that are. If there is
        # no first target it is zero. A product with 0 would not do, because 0 times NaN is NaN.
        target = tl.load(targets_ptr + token)
        second = target
        weight = 0.0
        if second_weight_ptr is not None:
            second = tl.load(targets_ptr + tl.num_programs(0) + token)
            weight = tl.where(second < 0, 0.0, tl.load(second_weight_ptr))
        gradient = e * (1 - t * t) * (factor * (1 + weight) / total)
        gradient = tl.where(target < 0, 0.0, gradient)
        tl.store(gradient_ptr + column, gradient.to(tl.float8e5), mask=inside)

        # 3. The loss, and the gradients at the targets, whose biases must be 0.
        for i in tl.static_range(1 if second_weight_ptr is None else 2):
            place = target if i == 0 else second
            valid = (target >= 0) & (place >= 0)
            target_z = tl.load(z_ptr + place, mask=valid).to(tl.float32)
            t = tanh(target_z * slope + offset, FAST)
            probability = tl.exp2(t * (a * LOG2E) - a * LOG2E) / total
            # 1 for the first target, `weight` for the second one, both if they are the same
            share = tl.where(place == target, 1.0, 0.0) + tl.where(place == second, weight, 0.0)
            gradient = (probability * (1 + weight) - share) * (1 - t * t) * factor
            if i == 0:
                loss = tl.log(total) + a - a * t
                tl.store(loss_ptr + token, tl.where(target < 0, 0.0, loss))
                # Step 2 must be over in all threads: the next line overwrites some of its numbers.
                tl.debug_barrier()
            tl.store(gradient_ptr + place, gradient.to(tl.float8e5), mask=valid)


@torch.library.custom_op("nanogpt::loss", mutates_args=())
def capped_cross_entropy(
    z: Tensor, targets: Tensor, cap: list[float], grad_scale: float, bias: Tensor | None = None,
    second_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits z (T, V), contiguous, before the cap and targets (1 or 2, T) int64 -> each token's
    loss and its gradient. cap is [height, shift, width], as an operator takes no tuple.

    Returns the cross-entropy (T,) in float32, and (T, V) in e5m2 its gradient with respect to z,
    divided by grad_scale. That is at most height / (4 width grad_scale), or with second_weight
    1 + second_weight times that, which must not exceed 57344, where e5m2 ends.

    bias (V,) is added to the capped logits. It must be 0 for every token that is a target. A target
    of -1 means that there is none: the loss and the gradient are 0 then, even if z is NaN.

    With second_weight () in float32, targets are (2, T). The second ones have no loss, but
    second_weight times their gradient is added where there is a first target.
    """
    T, V = z.shape
    if z.is_cuda and not torch.version.hip:  # the kernel has an instruction of NVIDIA's
        loss = z.new_empty(T, dtype=torch.float32)
        gradient = torch.empty_like(z, dtype=E5M2)
        tile = triton.next_power_of_2(V)
        # One warp for every 2,048 logits. CUDA allows 32, as many as 65,536 logits have.
        loss_kernel[T,](
            z, targets.contiguous(), loss, gradient, bias, second_weight, 1 / grad_scale, V, *cap,
            FAST=True, TILE=tile, num_warps=max(tile // 2048, 1)
        )
        return loss, gradient
    height, shift, width = cap
    sigmoid = torch.sigmoid((z.float() + shift) / width)
    logits = height * sigmoid
    if bias is not None:
        logits = logits + bias
    first, second = targets[0], targets[-1]
    loss = F.cross_entropy(logits, first, reduction="none", ignore_index=-1)
    probability = logits.softmax(-1)
    gradient = probability - F.one_hot(first.clamp(min=0), V)
    if second_weight is not None:
        weight = torch.where(second < 0, 0.0, second_weight)[:, None]
        gradient = gradient + weight * (probability - F.one_hot(second.clamp(min=0), V))
    gradient = gradient * sigmoid * (1 - sigmoid) * (height / width)
    # Not a product with 0 or 1, because NaN times 0 is NaN.
    gradient = torch.where(first[:, None] >= 0, gradient, 0.0)
    return loss, round_to_fp8(gradient, grad_scale, E5M2)


@capped_cross_entropy.register_fake
def _(z, targets, cap, grad_scale, bias=None, second_weight=None):
    return z.new_empty(len(z), dtype=torch.float32), torch.empty_like(z, dtype=E5M2)
