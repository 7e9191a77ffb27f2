"""The NanoGPT speedrun in one file: train a GPT-2-class model to a target validation loss, fast.

    torchrun --standalone --nproc_per_node=8 train_gpt.py    # 8 GPUs: the speedrun, FineWeb to 3.28
    torchrun --standalone --nproc_per_node=1 train_gpt.py    # fewer GPUs: same updates, by accumulation
    python train_gpt.py --preset=laptop                      # two minutes on a CPU
    python train_gpt.py --help                               # every key, its meaning and unit

Read it top to bottom: (1) configuration, (2) the FP8 head, (3) attention, (4) the model, (5) the optimisers,
(6) the data, (7) schedules, (8) the log and the clock, (9) the run. Nothing above section 9 needs a GPU, a network or
torchrun, and importing this file does nothing, so tests and notebooks can use its parts.

Shapes in comments: T tokens of one packed sequence, D model width, H heads, d head width, F MLP width, V vocabulary.
Sources are named by modded-nanogpt record number or by paper.
"""

with open(__file__, "rb") as file:
    SOURCE = file.read()  # before anything else: what the log shows is what runs, even if the file is edited meanwhile

import os
import sys
import time

LAUNCHED = time.perf_counter()

if __name__ == "__main__":  # torch reads this once, at its import: large, varied tensors would fragment fixed segments
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import argparse
import dataclasses
import difflib
import gc
import hashlib
import json
import math
import platform
import subprocess
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

triton = None  # without a GPU each kernel's plain-PyTorch twin runs; Triton's interpreter runs the kernels in tests
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET"):
    import triton
    import triton.language as tl

class BadInput(Exception):
    """Something the user can mend: printed as one sentence on rank 0, without a traceback, exit status 2."""

def ranks() -> tuple[int, int]:
    """(rank, world_size): (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

# ------------------------------------------------------------------------------------------------------------------
# 1. Configuration: the defaults are the record; every key can be given as --key=value

def key(default, meaning: str):
    return field(default=default, metadata={"meaning": meaning})

@dataclass
class Config:
    preset: str = key("", "speedrun or laptop; empty: speedrun with CUDA, laptop without")
    # data
    data_dir: str = key("data/fineweb10B", "folder of .bin shards")
    train_files: str = key("fineweb_train_*.bin", "glob of training shards inside data_dir")
    val_files: str = key("fineweb_val_*.bin", "glob of validation shards inside data_dir")
    epochs: int = key(1, "times the training shards may be read; more than 1 repeats data")
    cut_documents: bool = key(False, "sequences follow each other without gaps, else each begins with a document")
    # model
    topology: str = key("gpt2", "entry of TOPOLOGIES: which layer has what")
    model_dim: int = key(768, "width of the residual stream")
    num_heads: int = key(6, "attention heads; head width is model_dim / num_heads")
    mlp_dim: int = key(3072, "hidden width of the MLP")
    vocab_size: int = key(50304, "rows of the embedding: GPT-2's 50257 tokens, rounded up to a multiple of 128")
    # schedule
    num_steps: int = key(1695, "optimizer steps")
    batch_tokens: int = key(393_216, "tokens per optimizer step, over all GPUs")
    seq_len: int = key(49_152, "tokens per packed training sequence; a batch is batch_tokens / seq_len of them")
    cooldown_frac: float = key(0.45, "last fraction of the steps, over which the learning rate falls to a tenth")
    momentum_warmup: int = key(300, "steps over which Muon's momentum rises from 0.85 to 0.95")
    window_max: int = key(1728, "window of long layers at the end, in tokens; it grows linearly from one block")
    # optimizers
    muon_lr: float = key(0.05, "Muon's learning rate, for the matrices")
    head_lr: float = key(0.008, "Adam's learning rate for the output head")
    embed_lr: float = key(0.6, "Adam's learning rate for token and value embeddings")
    scalar_lr: float = key(0.04, "Adam's learning rate for the scalars")
    # evaluation
    target_loss: float = key(3.28, "validation loss to reach, nats per token")
    val_tokens: int = key(10_485_760, "validation tokens, always the first ones; records are compared on these")
    val_seq_len: int = key(262_144, "tokens per validation sequence")
    val_interval: int = key(125, "steps between validations, 0: only at the end")
    # system
    seed: int = key(0, "seed of the initial weights")
    device: str = key("auto", "auto, cuda or cpu")
    dtype: str = key("bfloat16", "dtype of activations and of the weights that products use")
    attention: str = key("auto", "auto, flex (CUDA) or sdpa (everywhere)")
    fp8_head: bool = key(True, "output head in FP8 where the GPU has it (compute capability 8.9 or newer)")
    compile: bool = key(True, "use torch.compile")
    save_memory: bool = key(False, "recompute activations in backward: the same update with less memory, slower")
    # output
    log_dir: str = key("logs", "folder of the logs")
    jsonl: bool = key(False, "also write the log as JSON lines")
    run_name: str = key("", "free text for the log")
    save_checkpoint: str = key("", "file to write the final weights to")
    load_checkpoint: str = key("", "file of weights for --sample; nothing is trained")
    sample: str = key("", "text to continue with the trained (or loaded) model")
    sample_tokens: int = key(256, "tokens to sample")

CPU_HAS_BF16 = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()  # only such CPUs multiply bf16 natively

PRESETS: dict[str, dict] = {
    "speedrun": {},
    "laptop": dict(
        data_dir="data/pydocs", epochs=2, cut_documents=True,
        topology="laptop", model_dim=128, num_heads=2, mlp_dim=512, vocab_size=272,
        num_steps=880, batch_tokens=2048, seq_len=2048, window_max=512, cooldown_frac=0.6, momentum_warmup=100,
        muon_lr=0.03, head_lr=0.02, embed_lr=0.3,
        target_loss=1.5, val_tokens=131_072, val_seq_len=8192, val_interval=220,
        device="cpu", dtype="bfloat16" if CPU_HAS_BF16 else "float32",
        fp8_head=False, compile=False, sample="The ",
    ),
}

def parse_config(argv: list[str]) -> Config:
    """`--key=value` over the preset's values. Raises BadInput on an unknown key or a wrong value."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter,
                                     epilog=f"--preset=laptop stands for {PRESETS['laptop']}")

    def refuse(message: str) -> None:
        raise BadInput(message)

    def boolean(text: str) -> bool:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]

    def integer(text: str) -> int:
        return int(text.replace("_", ""))

    parser.error = refuse
    for f in dataclasses.fields(Config):
        kind = {bool: boolean, int: integer}.get(type(f.default), type(f.default))
        extra = {"nargs": "?", "const": True} if kind is boolean else {}  # a bare --jsonl is --jsonl=true
        parser.add_argument(f"--{f.name}", type=kind, default=f.default, help=f.metadata["meaning"], **extra)
    try:
        values, unknown = parser.parse_known_args(argv)
    except KeyError as error:
        raise BadInput(f"{error} is neither true nor false") from None
    if unknown:
        name = unknown[0].split("=")[0]
        near = difflib.get_close_matches(name.removeprefix("--"), vars(values), n=1, cutoff=0)[0]
        raise BadInput(f"unknown key {name}; the nearest one is --{near} (--help lists all)")
    preset = values.preset or ("speedrun" if torch.cuda.is_available() else "laptop")
    if preset not in PRESETS:
        raise BadInput(f"--preset={preset} is none of {', '.join(PRESETS)}")
    parser.set_defaults(**PRESETS[preset] | {"preset": preset})
    config = Config(**vars(parser.parse_args(argv)) | {"preset": preset})
    check_config(config)
    return config

def check_config(c: Config) -> None:
    """Raises BadInput where values do not fit each other."""
    for name in ("num_steps batch_tokens seq_len val_tokens val_seq_len model_dim num_heads mlp_dim vocab_size epochs "
                 "cooldown_frac").split():
        if getattr(c, name) <= 0:
            raise BadInput(f"--{name}={getattr(c, name)} must be positive")
    for name, multiple_of in (("seq_len", BLOCK), ("val_seq_len", BLOCK), ("batch_tokens", c.seq_len),
                              ("val_tokens", c.val_seq_len), ("model_dim", 4 * c.num_heads)):
        if getattr(c, name) % multiple_of:
            raise BadInput(f"--{name}={getattr(c, name)} must be a multiple of {multiple_of}")
    if not 0 <= c.seed < 2**63:
        raise BadInput(f"--seed={c.seed} must be between 0 and 2^63")
    if c.model_dim < GATE_DIM:
        raise BadInput(f"--model_dim={c.model_dim} must be at least {GATE_DIM}: that many channels steer the gates")
    for name, choices in (("topology", [*TOPOLOGIES]), ("attention", ["auto", "flex", "sdpa"]),
                          ("device", ["auto", "cuda", "cpu"]), ("dtype", ["bfloat16", "float32", "float64"])):
        if getattr(c, name) not in choices:
            raise BadInput(f"--{name}={getattr(c, name)} is none of {', '.join(choices)}")
    if c.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device=cuda, but torch sees no GPU here")
    if c.attention == "flex" and c.device == "cpu":
        raise BadInput("--attention=flex needs CUDA: FlexAttention has no backward on CPU")

# ------------------------------------------------------------------------------------------------------------------
# 2. The FP8 head
#
# The product with the vocabulary is a third of all FLOPs, and Hopper multiplies FP8 twice as fast as bf16. Activations
# and weights go in as e4m3 (more mantissa), the gradient as e5m2 (more range). Scales are constants: the input is
# RMS-normalised, so |x| <= sqrt(D), and nothing has to be measured (record 21). 448 is the largest e4m3 number.
# The tensor cores want the first operand row-major and the second column-major, i.e. both with the contracted
# dimension contiguous, so backward needs transposed copies. Products accumulate fast (fewer bits) only forward.
# FP8 tensors enter and leave the custom operators as bytes: torch.library.opcheck cannot compare FP8 ones.

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HEAD_SCALES = (768**0.5 / 448, 2**-9, 1 / 448)  # of x, w and the gradient (record 28); the loss is a sum over tokens

def quantize(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x / scale, clamped to dtype's range (a plain cast may give NaN beyond it), rounded to nearest even."""
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp_(-limit, limit).to(dtype)

def scaled_mm(a: Tensor, b_t: Tensor, a_scale: float | Tensor, b_scale: float, dtype, fast: bool) -> Tensor:
    """a (M, K) times b_t (N, K) transposed -> (M, N), FP8 operands. Each scale has its own, hence aligned, memory."""
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b_t.t(), one * a_scale, one * b_scale, out_dtype=dtype, use_fast_accum=fast)

@torch.library.custom_op("nanogpt::mm", mutates_args=())
def mm_op(x: Tensor, w: Tensor, x_s: float, w_s: float, grad_s: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, D) times w (V, D) transposed in FP8 -> (T, V) in bf16, and both quantised operands for backward."""
    x8, w8 = quantize(x, x_s, E4M3), quantize(w, w_s, E4M3)
    return scaled_mm(x8, w8, x_s, w_s, torch.bfloat16, fast=True), x8.view(torch.uint8), w8.view(torch.uint8)

@mm_op.register_fake
def _(x: Tensor, w: Tensor, x_s: float, w_s: float, grad_s: float):
    return (x.new_empty(x.shape[0], w.shape[0], dtype=torch.bfloat16),
            torch.empty_like(x, dtype=torch.uint8), torch.empty_like(w, dtype=torch.uint8))

@torch.library.custom_op("nanogpt::mm_backward", mutates_args=())
def mm_backward_op(g8: Tensor, x8: Tensor, w8: Tensor, grad_s: Tensor, x_s: float, w_s: float) -> tuple[Tensor, Tensor]:
    """g8 (T, V) in units of grad_s, x8 (T, D), w8 (V, D) -> gradients of x (T, D) in bf16, of w (V, D) in float32."""
    g8_t, x8_t, w8_t = (transpose(t) for t in (g8, x8, w8))
    grad_x = scaled_mm(g8.view(E5M2), w8_t.view(E4M3), grad_s, w_s, torch.bfloat16, fast=False)
    grad_w = scaled_mm(g8_t.view(E5M2), x8_t.view(E4M3), grad_s, x_s, torch.float32, fast=False)
    return grad_x, grad_w

@mm_backward_op.register_fake
def _(g8: Tensor, x8: Tensor, w8: Tensor, grad_s: Tensor, x_s: float, w_s: float):
    return torch.empty_like(x8, dtype=torch.bfloat16), torch.empty_like(w8, dtype=torch.float32)

def _mm_setup(ctx, inputs, output):
    (x, w, *ctx.scales), (_, x8, w8) = inputs, output
    ctx.dtypes = x.dtype, w.dtype
    ctx.save_for_backward(x8, w8)
    ctx.set_materialize_grads(False)  # the quantised outputs get no gradient

def _mm_autograd(ctx, g, *_):
    x_s, w_s, grad_s = ctx.scales
    g8 = quantize(g, grad_s, E5M2).view(torch.uint8)
    scale = torch.full((), grad_s, device=g.device)
    grads = torch.ops.nanogpt.mm_backward(g8, *ctx.saved_tensors, scale, x_s, w_s)
    return *(grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes)), None, None, None

mm_op.register_autograd(_mm_autograd, setup_context=_mm_setup)

def transpose(x: Tensor) -> Tensor:
    """(M, N) bytes -> (N, M), contiguous, in tiles: the framework's copy would write single bytes."""
    if not x.is_cuda or triton is None:
        return x.t().contiguous()
    (M, N), out = x.shape, x.new_empty(x.shape[::-1])
    transpose_kernel[triton.cdiv(M, 64), triton.cdiv(N, 128)](x, out, M, N, 64, 128, num_warps=8)
    return out

# The loss. A sigmoid caps the logits to (0, 30) (record 18), so exponentials cannot overflow and their sum needs no
# maximum first. One kernel reads a token's logits twice, the second time from cache, and leaves the loss and its
# gradient, in e5m2: the gradient never exists in bf16 and nothing is recomputed in backward (records 67, 79).

CAP, CAP_WIDTH = 30.0, 7.5

def softcap(z: Tensor) -> Tensor:
    """Logits (..., V), capped, in float32 or wider."""
    return CAP * torch.sigmoid(z.to(torch.promote_types(z.dtype, torch.float32)) / CAP_WIDTH)

@torch.library.custom_op("nanogpt::loss", mutates_args=())
def loss_op(z: Tensor, targets: Tensor, grad_s: float) -> tuple[Tensor, Tensor]:
    """z (T, V) before the cap, targets (T,) -> cross-entropy (T,) float32, and its gradient (T, V) / grad_s in e5m2."""
    if z.is_cuda and triton is not None:
        loss, g8 = z.new_empty(len(z), dtype=torch.float32), torch.empty_like(z, dtype=torch.uint8)
        loss_kernel[len(z),](z, targets, loss, g8.view(E5M2), 1 / grad_s, z.shape[1], CAP, 1 / CAP_WIDTH, num_warps=4)
        return loss, g8
    lse = softcap(z).logsumexp(-1)
    loss = lse - softcap(z.gather(-1, targets[:, None]))[:, 0]
    s = torch.sigmoid(z.float() / CAP_WIDTH)
    p = torch.exp(CAP * s - lse[:, None]) - F.one_hot(targets, z.shape[1])
    return loss, quantize(p * s * (1 - s) * (CAP / CAP_WIDTH), grad_s, E5M2).view(torch.uint8)

@loss_op.register_fake
def _(z: Tensor, targets: Tensor, grad_s: float):
    return z.new_empty(len(z), dtype=torch.float32), torch.empty_like(z, dtype=torch.uint8)

class FP8HeadLoss(torch.autograd.Function):
    """x (T, D), w (V, D), targets (T,) -> cross-entropy of the capped logits, summed over T; all products in FP8."""

    @staticmethod
    def forward(ctx, x, w, targets):
        z, x8, w8 = torch.ops.nanogpt.mm(x, w, *HEAD_SCALES)
        loss, g8 = torch.ops.nanogpt.loss(z, targets, HEAD_SCALES[2])
        ctx.save_for_backward(g8, x8, w8)
        ctx.dtype = w.dtype
        return loss.sum()

    @staticmethod
    def backward(ctx, grad):
        x_s, w_s, grad_s = HEAD_SCALES
        grad_x, grad_w = torch.ops.nanogpt.mm_backward(*ctx.saved_tensors, grad * grad_s, x_s, w_s)
        return grad_x, grad_w.to(ctx.dtype), None

if triton is not None:

    @triton.jit
    def transpose_kernel(x_ptr, out_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
        rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # 64-bit: T x V overflows 32-bit offsets
        cols = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)
        inside = (rows[:, None] < M) & (cols[None, :] < N)
        x = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=inside, other=0)
        tl.store(out_ptr + cols[:, None] * M + rows[None, :], tl.trans(x), mask=tl.trans(inside))

    @triton.jit
    def loss_kernel(z_ptr, target_ptr, loss_ptr, g_ptr, inv_scale, V, CAP, INV_WIDTH, TILE: tl.constexpr = 2048):
        row = tl.program_id(0).to(tl.int64)
        z_ptr += row * V
        g_ptr += row * V
        target = tl.load(target_ptr + row)
        total = tl.zeros((TILE,), tl.float32)
        for begin in range(0, V, TILE):
            cols = begin + tl.arange(0, TILE)
            z = tl.load(z_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
            total += tl.where(cols < V, tl.exp(CAP * tl.sigmoid(z * INV_WIDTH) - CAP), 0.0)
        lse = CAP + tl.log(tl.sum(total))
        tl.store(loss_ptr + row, lse - CAP * tl.sigmoid(tl.load(z_ptr + target).to(tl.float32) * INV_WIDTH))
        for begin in range(0, V, TILE):
            cols = begin + tl.arange(0, TILE)
            z = tl.load(z_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
            s = tl.sigmoid(z * INV_WIDTH)
            p = tl.exp(CAP * s - lse) - tl.where(cols == target, 1.0, 0.0)
            g = p * s * (1 - s) * (CAP * INV_WIDTH * inv_scale)
            tl.store(g_ptr + cols, tl.minimum(tl.maximum(g, -57344.0), 57344.0).to(tl.float8e5), mask=cols < V)

# ------------------------------------------------------------------------------------------------------------------
# 3. Attention: causal, inside one document, over a sliding window of whole blocks
#
# Query t sees key s when s <= t, both lie in one document, and s's block is among the last `window` blocks up to t's.
# FlexAttention skips blocks that hold nothing; elsewhere scaled-dot-product attention computes the same mask block row
# by block row. Windows are plain numbers here, outside of every compiled graph, so a new window compiles nothing.

BLOCK = 128  # tokens

def document_ids(tokens: Tensor, bos: int) -> Tensor:
    """(T,) tokens -> (T,) int32, the number of document starts up to and including each token."""
    return (tokens == bos).cumsum(0, dtype=torch.int32)

def flex_masks(docs: Tensor, windows: dict[str, int]) -> dict[str, BlockMask]:
    """docs (T,) -> a BlockMask a window, in blocks (FlexAttention: record 12). Full blocks skip the element mask."""

    def causal_document(b, h, q, kv):
        return (q >= kv) & (docs[q] == docs[kv])

    first, last = docs[::BLOCK], docs[BLOCK - 1 :: BLOCK]  # (n,) document of each block's ends
    row = torch.arange(len(first), device=docs.device, dtype=torch.int32)
    distance = row[:, None] - row  # (n, n) query block minus key block
    touching = (distance >= 0) & (first[:, None] <= last) & (last[:, None] >= first)
    full = (distance > 0) & (first[:, None] == last) & (last[:, None] == first)

    def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:  # how many blocks each row has, and which, those first
        index = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[None, None], index.to(torch.int32)[None, None]

    def mask(window: int) -> BlockMask:
        near = distance < window
        return BlockMask.from_kv_blocks(*ordered(touching & ~full & near), *ordered(full & near),
                                        BLOCK_SIZE=BLOCK, mask_mod=causal_document)

    return {name: mask(window) for name, window in windows.items()}

def sdpa_masks(docs: Tensor, windows: dict[str, int]) -> dict[str, Tensor]:
    """docs (T,) -> per window a bool mask (n, 1, BLOCK, window * BLOCK) of each query block over the last blocks."""

    def mask(window: int) -> Tensor:
        window = min(window, len(docs) // BLOCK)
        keys = F.pad(docs, ((window - 1) * BLOCK, 0), value=-1).unfold(0, window * BLOCK, BLOCK)  # (n, window * BLOCK)
        q = torch.arange(BLOCK, device=docs.device)[:, None] + (window - 1) * BLOCK
        causal = q >= torch.arange(window * BLOCK, device=docs.device)
        return (causal & (docs.view(-1, BLOCK, 1) == keys[:, None]))[:, None]

    return {name: mask(window) for name, window in windows.items()}

def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor, scale: float) -> Tensor:
    """q, k, v (T, H, d) -> (T, H, d), by FlexAttention for a BlockMask, else by SDPA."""
    if isinstance(mask, BlockMask):
        y = flex_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), block_mask=mask, scale=scale)
        return y[0].transpose(0, 1)
    (T, H, d), (n, _, _, span), dtype = q.shape, mask.shape, q.dtype
    if not q.is_cuda:  # the CPU's SDPA takes up to three times as long for a backward pass in bf16 as in float32
        q, k, v = (t.to(torch.promote_types(dtype, torch.float32)) for t in (q, k, v))

    def windows(t: Tensor) -> Tensor:  # (T, H, d) -> (n, H, span, d), each query block's keys
        return F.pad(t, (0, 0, 0, 0, span - BLOCK, 0)).unfold(0, span, BLOCK).transpose(2, 3)

    q = q.view(n, BLOCK, H, d).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, windows(k), windows(v), attn_mask=mask, scale=scale)
    return y.transpose(1, 2).reshape(T, H, d).to(dtype)

# ------------------------------------------------------------------------------------------------------------------
# 4. The model, in two tables: which layer has what, and which parameters there are. Nothing else names a layer.

class Layer(NamedTuple):
    attn: bool = True  # has attention
    window: str = "short"  # "short" or "long"
    ve: int | None = None  # value embedding that is mixed into v (record 14)
    skip: int | None = None  # earlier layer whose output is added first, as in a U-net (record 11)

TOPOLOGIES: dict[str, list[Layer]] = {
    "gpt2": [
        Layer(window="long", ve=0),
        Layer(ve=1),
        Layer(ve=2),
        Layer(),
        Layer(window="long"),
        Layer(),
        Layer(skip=5),
        Layer(skip=4, attn=False),
        Layer(skip=3),
        Layer(skip=2, ve=0),
        Layer(skip=1, ve=1),
        Layer(skip=0, ve=2, window="long"),
    ],
    "laptop": [Layer(ve=0), Layer(window="long"), Layer(skip=1), Layer(skip=0, ve=0, window="long")],
}

GATE_DIM = 12  # channels of the input that steer the attention gate (record 28)
SCALARS = ("skip", "x", "x0", "v", "ve")  # mixing weights of one layer, columns of one parameter
SCALARS_INIT = (1.0, 1.0, 0.0, 0.5, 0.5)

class Param(NamedTuple):
    shape: tuple[int, ...]  # Muon treats it as a stack of matrices
    optimizer: str  # "muon" or "adam"
    lr: float
    init: Callable[[Tensor], None]  # fills a float32 tensor in place
    sharded: bool = True  # each rank updates its part of dimension 0; else every rank updates all of it

def parameter_table(c: Config) -> dict[str, Param]:
    """Every parameter of the model, in the order in which the optimizer works on them."""
    layers = TOPOLOGIES[c.topology]
    num_attn, num_ve = sum(layer.attn for layer in layers), 1 + max((layer.ve or 0) for layer in layers)
    D, V = c.model_dim, c.vocab_size
    bound = 3**0.5 * 0.5 * D**-0.5  # uniform with half the usual deviation: a bit better (record 21)

    def ordinary(w: Tensor) -> None:
        w.normal_()

    def inward(matrices: int) -> Callable[[Tensor], None]:  # the last matrix of each group, which writes to x, is zero
        def init(w: Tensor) -> None:
            w.uniform_(-bound, bound)
            w.view(-1, matrices, *w.shape[1:])[:, -1] = 0

        return init

    return {
        "qkvo": Param((num_attn * 4, D, D), "muon", c.muon_lr, inward(4)),
        "mlp": Param((len(layers) * 2, D, c.mlp_dim), "muon", c.muon_lr, inward(2)),
        "attn_gate": Param((num_attn, c.num_heads, GATE_DIM), "muon", c.muon_lr, nn.init.zeros_),
        "scalars": Param((len(layers), len(SCALARS)), "adam", c.scalar_lr,
                         lambda w: w.copy_(torch.tensor(SCALARS_INIT)), sharded=False),
        "lm_head": Param((V, D), "adam", c.head_lr, nn.init.zeros_),
        "embed": Param((V, D), "adam", c.embed_lr, ordinary),
        "value_embeds": Param((num_ve * V, D), "adam", c.embed_lr, ordinary),
    }

def norm(x: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)

def rope_table(T: int, head_dim: int, device: torch.device, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin (T, 1, d/2). The slower half of the frequencies is zero: position-free (after @YouJiacheng)."""
    rotating = head_dim // 4
    freq = (1 / 1024) ** torch.linspace(0, 1, rotating, dtype=dtype, device=device)
    angle = torch.arange(T, dtype=dtype, device=device)[:, None] * F.pad(freq, (0, head_dim // 2 - rotating))
    return angle.cos()[:, None], angle.sin()[:, None]

def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (T, H, d), in float32: pairs are (j, j + d/2)."""
    x1, x2 = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1).type_as(x)

def block(x, x0, skip, ve, qkvo, attn_gate, mask, mlp, scalars, cos, sin) -> Tensor:
    """One layer: x (T, D) -> (T, D). Pure, so that one compiled graph serves all layers of a kind.

    x0 is the first layer's input, skip (T, D) and ve (T, D) may be None; qkvo (4, D, D) and attn_gate (H, GATE_DIM)
    are None in a layer without attention; mlp (2, D, F); scalars (5,) as named in SCALARS.
    """
    w = dict(zip(SCALARS, scalars.unbind()))
    if skip is not None:
        x = x + w["skip"] * skip
    x = w["x"] * x + w["x0"] * x0
    if qkvo is not None:
        T, D = x.shape
        H = attn_gate.size(0)
        u = norm(x)
        q, k, v = F.linear(u, qkvo[:3].flatten(0, 1)).view(T, 3, H, D // H).unbind(1)  # (T, H, d) each
        q, k = rotate(norm(q), cos, sin), rotate(norm(k), cos, sin)  # bounded scores (Henry et al. 2020)
        v = w["v"] * v if ve is None else w["v"] * v + w["ve"] * ve.view_as(v)
        y = attend(q, k, v, mask, scale=0.12 * 128 * H / D)  # 0.12 for heads of 128; unit-RMS q, k bound the score
        gate = torch.sigmoid(F.linear(u[:, :GATE_DIM], attn_gate))  # (T, H): lets a head say nothing (record 28)
        x = x + F.linear((y * gate[..., None]).reshape(T, D), qkvo[3])
    hidden = F.relu(norm(x) @ mlp[0]).square()  # (T, F); both matrices are (D, F) so that Muon stacks them
    return x + F.linear(hidden, mlp[1])

def head_loss(x, lm_head, targets, fp8: bool) -> Tensor:
    """x (T, D), targets (T,) -> cross-entropy summed over tokens, of capped logits."""
    x = norm(x)
    if fp8:
        return FP8HeadLoss.apply(x, lm_head, targets)
    return F.cross_entropy(softcap(F.linear(x, lm_head)), targets, reduction="sum")

class GPT(nn.Module):
    """The model over one packed sequence. Parameters live in stacks ("banks") padded to a multiple of world_size."""

    def __init__(self, c: Config, device: torch.device, world_size: int = 1):
        super().__init__()
        self.config, self.table, self.layers = c, parameter_table(c), TOPOLOGIES[c.topology]
        self.bos = min(50256, c.vocab_size - 1)
        self.flex = c.attention == "flex" or c.attention == "auto" and device.type == "cuda"
        self.fp8 = c.fp8_head
        dtype = getattr(torch, c.dtype)
        full = torch.promote_types(torch.float32, dtype)
        for name, param in self.table.items():
            rows = math.ceil(param.shape[0] / world_size) * world_size if param.sharded else param.shape[0]
            bank = torch.zeros(rows, *param.shape[1:], dtype=dtype if param.sharded else full, device=device)
            self.register_parameter(name, nn.Parameter(bank))
        cos, sin = rope_table(max(c.seq_len, c.val_seq_len), c.model_dim // c.num_heads, device, full)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.block, self.head_loss = block, head_loss  # `compile_model` replaces these two

    def weight(self, name: str) -> Tensor:
        """A bank without its padding."""
        bank, rows = getattr(self, name), self.table[name].shape[0]
        return bank if bank.size(0) == rows else bank[:rows]

    def masks(self, tokens: Tensor, windows: dict[str, int]) -> dict[str, BlockMask | Tensor]:
        return (flex_masks if self.flex else sdpa_masks)(document_ids(tokens, self.bos), windows)

    def hidden(self, tokens: Tensor, windows: dict[str, int]) -> Tensor:
        """tokens (T,) int64 -> the residual stream (T, D) before the head."""
        c, T = self.config, len(tokens)
        x0 = norm(F.embedding(tokens, self.weight("embed")))
        x = x0.view_as(x0)  # another object: were x and x0 one, the compiler would make a graph of its own for that
        tables = self.weight("value_embeds").view(-1, c.vocab_size, c.model_dim).unbind()
        ve = [F.embedding(tokens, table) for table in tables]  # (T, D) each
        qkvo = iter(self.weight("qkvo").view(-1, 4, c.model_dim, c.model_dim).unbind())
        gates, mlps = iter(self.weight("attn_gate").unbind()), self.weight("mlp").view(-1, 2, c.model_dim, c.mlp_dim)
        masks, cos, sin, outputs = self.masks(tokens, windows), self.cos[:T], self.sin[:T], []
        for layer, mlp, scalars in zip(self.layers, mlps.unbind(), self.scalars.unbind()):
            skip = None if layer.skip is None else outputs[layer.skip]
            attn = (next(qkvo), next(gates), masks[layer.window]) if layer.attn else (None, None, None)
            args = (x, x0, skip, None if layer.ve is None else ve[layer.ve], *attn, mlp, scalars, cos, sin)
            x = checkpoint(self.block, *args, use_reentrant=False) if self.saves_memory() else self.block(*args)
            outputs.append(x.view_as(x))
        return x

    def saves_memory(self) -> bool:
        return self.config.save_memory and torch.is_grad_enabled()

    def forward(self, tokens: Tensor, targets: Tensor, windows: dict[str, int]) -> Tensor:
        """tokens, targets (T,) -> loss summed over T. In training the head is FP8 if it can be; in eval never."""
        x, w = self.hidden(tokens, windows), self.weight("lm_head")
        if torch.is_grad_enabled() and not self.saves_memory():
            return self.head_loss(x, w, targets, self.fp8)
        pieces = zip(x.split(VAL_CHUNK), targets.split(VAL_CHUNK))  # logits of a whole sequence would not fit
        if self.saves_memory():
            return sum(checkpoint(self.head_loss, a, w, b, self.fp8, use_reentrant=False) for a, b in pieces)
        return sum(self.head_loss(a, w, b, False) for a, b in pieces)

VAL_CHUNK = 16_384  # tokens whose logits are computed at a time in validation

@torch.no_grad()
def initialize(model: GPT, seed: int) -> dict[str, Tensor]:
    """Draws the weights from `seed` (rank 0's count), fills the model and returns them in float32."""
    torch.manual_seed(seed)
    full = {}
    for name, param in model.table.items():
        bank = getattr(model, name)
        w = torch.zeros(bank.shape, dtype=torch.promote_types(torch.float32, bank.dtype), device=bank.device)
        param.init(w[: param.shape[0]])
        if dist.is_initialized():
            dist.broadcast(w, 0)
        bank.copy_(w)
        full[name] = w
    return full

# ------------------------------------------------------------------------------------------------------------------
# 5. The optimisers: Muon for matrices, Adam for the rest, each rank updating its share
#
# Every rank computes with a bf16 copy of all weights; the float32 weights, and the optimizers' state, exist once, on
# the rank that owns that slice. A step is: sum every gradient over the ranks and keep the own slice (reduce-scatter),
# update it, and hand out the new bf16 slice (all-gather). All transfers are asynchronous, so they run while the
# previous parameter is being worked on. Gradients are sums over tokens, so that neither the number of GPUs nor of
# accumulation steps enters anywhere.

def orthogonalize(G: Tensor, steps: int = 5) -> Tensor:
    """G (n, rows, cols) -> nearly U V^T of each matrix, in bf16: singular values end up in about [0.7, 1.2].

    Newton-Schulz iteration with coefficients for the steepest start (Muon, Jordan 2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.bfloat16()
    if G.size(-2) > G.size(-1):
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # the spectral norm is at most the Frobenius norm
    for _ in range(steps):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return X.mT if G.size(-2) > G.size(-1) else X

def muon_update(grad: Tensor, state: dict[str, Tensor], lr: float, momentum: float) -> Tensor:
    """What to subtract from the weights (n, rows, cols): orthogonalised Nesterov momentum."""
    if not state:
        state["momentum"] = torch.zeros_like(grad)
    buffer = state["momentum"].lerp_(grad, 1 - momentum)
    update = orthogonalize(grad.lerp(buffer, momentum))
    return update.to(grad.dtype) * (lr * max(1, grad.size(-2) / grad.size(-1)) ** 0.5)

def adam_update(grad: Tensor, state: dict[str, Tensor], lr: float, step: int,
                betas: tuple[float, float] = (0.8, 0.95), eps: float = 1e-10) -> Tensor:
    """What to subtract from the weights (Kingma & Ba 2015). The head starts at zero: a larger eps would swallow it."""
    if not state:
        state.update(mean=torch.zeros_like(grad), square=torch.zeros_like(grad))
    mean = state["mean"].lerp_(grad, 1 - betas[0])
    square = state["square"].mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    correction = (1 - betas[1] ** step) ** 0.5 / (1 - betas[0] ** step)
    return mean / square.sqrt().add_(eps) * (lr * correction)

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13's name, and 2.11's
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

class Optimizer:
    """Muon and Adam over the parameter table, sharded over the ranks of the default process group (if there is one)."""

    def __init__(self, model: GPT):
        self.model = model
        self.rank, self.world_size = ranks()
        self.reset({name: p.detach().to(model.scalars.dtype) for name, p in model.named_parameters()})

    def reset(self, full: dict[str, Tensor]) -> None:
        """Starts anew from the float32 weights `full`, as `initialize` returns them."""
        self.masters = {name: self.own(name, w).clone() for name, w in full.items()}
        self.state: dict[str, dict[str, Tensor]] = {name: {} for name in full}
        self.steps = 0

    def own(self, name: str, bank: Tensor) -> Tensor:
        """This rank's slice of a bank: a view, all of it where the parameter is not sharded."""
        return bank.chunk(self.world_size)[self.rank] if self.model.table[name].sharded else bank

    def reduce(self, name: str, grad: Tensor):
        """Starts summing a gradient over the ranks. Returns the slice it will be in, and the transfer or None."""
        if self.world_size == 1:
            return grad, None
        if not self.model.table[name].sharded:
            return grad, dist.all_reduce(grad, async_op=True)
        part = torch.empty_like(self.own(name, grad))
        return part, reduce_scatter(part, grad, async_op=True)

    @torch.no_grad()
    def step(self, lr_factor: float, momentum: float) -> None:
        """Updates all weights from their .grad and frees the gradients. All ranks must call it together."""
        self.steps += 1
        reductions = {name: self.reduce(name, getattr(self.model, name).grad) for name in self.model.table}
        gathers = []
        for name, (grad, transfer) in reductions.items():
            if transfer is not None:
                transfer.wait()
            param, master, state = self.model.table[name], self.masters[name], self.state[name]
            grad = grad.to(master.dtype)
            if param.optimizer == "muon":
                master -= muon_update(grad, state, param.lr * lr_factor, momentum)
            else:
                master -= adam_update(grad, state, param.lr * lr_factor, self.steps)
            bank = getattr(self.model, name)
            part = self.own(name, bank.data).copy_(master)
            if param.sharded and self.world_size > 1:
                gathers.append(all_gather(bank.data, part, async_op=True))
            bank.grad = None
        for transfer in gathers:
            transfer.wait()

# ------------------------------------------------------------------------------------------------------------------
# 6. The data: .bin shards of 256 int32 (20240520, 1, number of tokens, zeros) and then uint16 tokens

HEADER_BYTES, MAGIC, VERSION, SEPARATOR = 1024, 20240520, 1, 50256

def shard_tokens(path: Path) -> int:
    """Number of tokens the header promises. Raises BadInput if the header or the file's length is wrong."""
    header = np.fromfile(path, dtype="<i4", count=256)
    fetch = "fetch or make it again (data/fineweb.py, data/prepare.py)"
    if len(header) < 256:
        raise BadInput(f"{path} has {path.stat().st_size} bytes, less than its header of {HEADER_BYTES}; {fetch}")
    if header[0] != MAGIC or header[1] != VERSION:
        raise BadInput(f"{path} begins with magic {header[0]}, version {header[1]}, not {MAGIC}, {VERSION}; {fetch}")
    size = HEADER_BYTES + 2 * int(header[2])
    if path.stat().st_size != size:
        raise BadInput(f"{path} has {path.stat().st_size} bytes where its header promises {size}; {fetch}")
    return int(header[2])

def read_shard(path: Path, vocab_size: int, pin: bool = False) -> tuple[Tensor, np.ndarray]:
    """Tokens of a shard (int16 bits of uint16, in pinned memory if asked) and the positions of document starts.

    A vocabulary smaller than GPT-2's uses its last id as the separator. Raises BadInput as `shard_tokens` does, and
    where a token lies outside of the vocabulary or no document starts.
    """
    tokens = torch.empty(shard_tokens(path), dtype=torch.int16, pin_memory=pin)
    array = tokens.numpy().view(np.uint16)
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES)
        file.readinto(array)
    starts, separator = np.flatnonzero(array == SEPARATOR), min(SEPARATOR, vocab_size - 1)
    if separator != SEPARATOR and separator in array:
        raise BadInput(f"{path} holds token {separator}, which --vocab_size={vocab_size} needs as separator; raise it")
    array[starts] = separator
    if len(array) and array.max() >= vocab_size:
        raise BadInput(f"{path} holds token {array.max()}, outside of --vocab_size={vocab_size}; is it other data?")
    if not len(starts):
        raise BadInput(f"{path} holds no document start (token {SEPARATOR}); make it with data/prepare.py")
    return tokens, starts

def find_shards(c: Config, split: str) -> list[Path]:
    """The split's shards in order. Raises BadInput if there are none."""
    pattern = c.train_files if split == "train" else c.val_files
    try:
        paths = sorted(Path(c.data_dir).glob(pattern))
    except (ValueError, NotImplementedError) as error:  # an empty or an absolute one
        raise BadInput(f"--{split}_files={pattern}: {error}") from None
    if not paths:
        make = "python data/prepare.py --python-docs --bytes --out data/pydocs" if c.preset == "laptop" \
            else "python data/fineweb.py 9"
        raise BadInput(f"no {split} shards {pattern} in {c.data_dir}; get them with: {make}")
    return paths

def batch_starts(starts: np.ndarray, cursor: int, size: int, count: int, seq_len: int) -> tuple[list[int], int] | None:
    """The next `count` sequences of seq_len + 1 tokens, each from a document start on, not overlapping (record 26).

    Returns their positions in a shard of `size` tokens and the cursor behind them, or None if the shard is used up.
    """
    chosen = []
    while len(chosen) < count:
        if cursor >= len(starts) or starts[cursor] + seq_len + 1 > size:
            return None
        chosen.append(int(starts[cursor]))
        cursor = int(np.searchsorted(starts, chosen[-1] + seq_len))
    return chosen, cursor

def sequence_starts(starts: np.ndarray, size: int, c: Config) -> np.ndarray:
    """Where a sequence may begin: at document starts, or, where no token of a small corpus may be lost, anywhere."""
    return np.arange(0, size, c.seq_len) if c.cut_documents else starts

class Loader:
    """Training batches for one rank. The next shard is read and indexed by a thread while the current one is used."""

    def __init__(self, paths: list[Path], c: Config, rank: int, world_size: int, device: torch.device):
        self.config, self.rank, self.world_size, self.device = c, rank, world_size, device
        self.paths = iter(paths * c.epochs)
        self.thread = ThreadPoolExecutor(1)
        self.upcoming = self.prefetch()
        self.next_shard()

    def prefetch(self):
        path = next(self.paths, None)
        pin = self.device.type == "cuda"  # pinned, so that copies to the GPU need not wait
        return None if path is None else self.thread.submit(read_shard, path, self.config.vocab_size, pin)

    def next_shard(self) -> None:
        if self.upcoming is None:
            raise BadInput("the training shards ran out before the schedule's end; fetch more or raise --epochs")
        (self.tokens, starts), self.cursor = self.upcoming.result(), 0
        self.starts = sequence_starts(starts, len(self.tokens), self.config)
        self.upcoming = self.prefetch()

    def batch(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's sequences of the next batch: pairs of inputs and targets, each (seq_len,) int64 on the device."""
        c = self.config
        args = c.batch_tokens // c.seq_len, c.seq_len
        while (found := batch_starts(self.starts, self.cursor, len(self.tokens), *args)) is None:
            self.next_shard()
        positions, self.cursor = found
        return [to_device(self.tokens[p : p + c.seq_len + 1], self.device)
                for p in positions[self.rank :: self.world_size]]

def to_device(tokens: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """(n + 1,) int16 bits of uint16 -> inputs and targets (n,), int64, without waiting for the copy."""
    tokens = tokens.to(device, non_blocking=True).long() & 0xFFFF
    return tokens[:-1], tokens[1:]

def validation_tokens(c: Config) -> Tensor:
    """The first val_tokens + 1 tokens of the validation split, int16 bits. Raises BadInput if there are fewer."""
    shards, have = [], 0
    for path in find_shards(c, "val"):
        shards.append(read_shard(path, c.vocab_size)[0])
        have += len(shards[-1])
        if have > c.val_tokens:
            return torch.cat(shards)[: c.val_tokens + 1]
    raise BadInput(f"validation needs {c.val_tokens + 1:,} tokens and {c.data_dir} holds {have:,}; lower --val_tokens")

def fingerprint(path: Path, split: str) -> dict:
    """Name, size and sha256 (of header, first and last MiB) of a shard: enough to tell two shards apart quickly."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(HEADER_BYTES + 2**20))
        file.seek(max(0, size - 2**20))
        digest.update(file.read())
    return dict(split=split, name=path.name, bytes=size, tokens=shard_tokens(path), sha256=digest.hexdigest())

# ------------------------------------------------------------------------------------------------------------------
# 7. Schedules: pure functions of the step

def lr_factor(step: int, c: Config) -> float:
    """1, then linear to 0.1 over the last cooldown_frac of the steps."""
    left = (1 - step / c.num_steps) / c.cooldown_frac
    return min(1.0, 0.1 + 0.9 * left)

def muon_momentum(step: int, c: Config) -> float:
    return 0.85 + 0.10 * min(step / max(c.momentum_warmup, 1), 1)

def windows(step: int, c: Config) -> dict[str, int]:
    """Window of long and short layers in blocks; grows linearly over the run (record 13)."""
    long = max(1, math.ceil(c.window_max * step / c.num_steps / BLOCK))
    return {"long": long, "short": max(1, long // 2)}

# ------------------------------------------------------------------------------------------------------------------
# 8. The log and the clock

RULE = "=" * 100

class Log:
    """Rank 0's log: source, facts, steps, end block (grammar: records/README.md). Silent on other ranks."""

    def __init__(self, c: Config, run_id: str, master: bool):
        self.bar, self.twin, self.file = None, None, None
        if not master:
            return
        for folder in (c.log_dir, os.path.dirname(c.save_checkpoint)):  # now, not after training
            Path(folder).mkdir(parents=True, exist_ok=True)
        self.path = Path(c.log_dir) / f"{run_id}.txt"
        self.file = open(self.path, "wb")
        self.file.write(SOURCE + RULE.encode() + b"\n")
        if c.jsonl:
            self.twin = open(self.path.with_suffix(".jsonl"), "w")
        if sys.stderr.isatty():
            from tqdm import tqdm  # only where somebody watches

            self.bar = tqdm(total=c.num_steps, unit="step", dynamic_ncols=True)

    def line(self, text: str, show: bool = True, **facts) -> None:
        """One line of the log, its facts as one JSON object of the twin, and the line on the console."""
        if self.file is None:
            return
        self.file.write(text.encode() + b"\n")
        self.file.flush()  # a run that is killed leaves a log up to that moment
        if self.twin is not None:
            print(json.dumps(facts), file=self.twin, flush=True)
        if show and self.bar is not None:
            self.bar.write(text)
        elif show:
            print(text, flush=True)

    def fact(self, kind: str, value, show: bool = True) -> None:
        facts = value if isinstance(value, dict) else {"note": value}
        self.line(f"{kind} {json.dumps(value)}", show, kind=kind, **facts)

    def step(self, step: int, c: Config, seconds: float, **loss: float) -> None:
        ((name, value),) = loss.items()  # train_loss or val_loss
        ms, average = 1000 * seconds, 1000 * seconds / step if step else math.nan
        self.line(f"step:{step}/{c.num_steps} {name}:{value:.4f} train_time:{ms:.0f}ms step_avg:{average:.2f}ms",
                  show=self.bar is None or name == "val_loss",
                  kind="step", step=step, num_steps=c.num_steps, **loss, train_time_ms=round(ms),
                  step_avg_ms=round(average, 2) if step else None)
        if self.bar is not None and name == "train_loss":
            self.bar.update(step - self.bar.n)
            self.bar.set_postfix_str(f"loss {value:.3f}, {average:.1f} ms a step")

    def end(self, facts: dict) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if self.file is not None:
            rows = [f"{k}: {v if isinstance(v, str) else json.dumps(v)}" for k, v in facts.items()]
            self.line("\n".join([RULE, *rows]), kind="end", **facts)
            print(f"log: {self.path}")

class Clock:
    """Training time in seconds. It stands still around validation; starting and stopping wait for the device."""

    def __init__(self, device: torch.device):
        self.device, self.total, self.since = device, 0.0, None

    def start(self) -> None:
        synchronize(self.device)
        self.since = time.perf_counter()

    def stop(self) -> None:
        synchronize(self.device)
        self.total, self.since = self.now(), None

    def now(self) -> float:
        return self.total + (time.perf_counter() - self.since if self.since is not None else 0.0)

def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

class LossReader:
    """Training losses for the log, read when they have arrived: nothing waits for the device."""

    def __init__(self, c: Config, log: Log, device: torch.device):
        self.config, self.log, self.pending, self.cuda = c, log, [], device.type == "cuda"
        self.losses = torch.zeros(c.num_steps + 1, pin_memory=self.cuda)

    def put(self, step: int, loss: Tensor, seconds: float) -> None:
        """loss: scalar on the device, mean over the batch's tokens."""
        self.losses[step].copy_(loss, non_blocking=True)
        self.pending.append((step, seconds, torch.cuda.current_stream().record_event() if self.cuda else None))
        self.write(wait=False)

    def write(self, wait: bool) -> None:
        """Logs what has arrived, in order. Raises BadInput if a loss is not finite."""
        while self.pending and (wait or not self.cuda or self.pending[0][2].query()):
            step, seconds, arrived = self.pending.pop(0)
            if arrived is not None:
                arrived.synchronize()
            loss = self.losses[step].item()
            self.log.step(step, self.config, seconds, train_loss=loss)
            if not math.isfinite(loss):
                raise BadInput(f"the training loss is {loss} at step {step}; lower the learning rates")

def output_of(*command: str) -> str | None:
    """What a command prints, None if it is not there or says nothing."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return None
    return run.stdout.strip() or None

def describe_run() -> dict:
    """Which run of which code this is."""
    commit = output_of("git", "rev-parse", "--verify", "-q", "HEAD")
    return dict(run_id=str(uuid.uuid4()), date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                code_sha256=hashlib.sha256(SOURCE).hexdigest(), code_bytes=len(SOURCE), git_commit=commit,
                git_clean=output_of("git", "status", "--porcelain") is None if commit else None)

def describe_machine(device: torch.device) -> dict:
    """Hardware and versions. A collective: all ranks call it."""
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    cpu = output_of("sed", "-n", "s/^model name.*: //p;T;q", "/proc/cpuinfo") or platform.processor()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    devices, hosts = all_ranks(name), len(set(all_ranks(platform.node())))
    return dict(python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda,
                triton=triton.__version__ if triton else None, driver=driver.split("\n")[0] if driver else None,
                devices=devices, world_size=len(devices), hosts=hosts, cpu=cpu)

def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median seconds of `work`, after one call that is not counted."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])[repeats // 2]

def calibrate(device: torch.device) -> dict:
    """Speeds of this host, outside the clock, so that runs on different hosts can be compared. A collective."""
    n, numbers = (8192, 2**28) if device.type == "cuda" else (1024, 2**24)
    a, x, flops = torch.randn(n, n, device=device), torch.zeros(numbers, device=device), 2e-12 * n**3
    half, fp8 = a.bfloat16(), quantize(a, 0.02, E4M3)
    gathered = x[: numbers // 4 // ranks()[1] * ranks()[1]]
    part = gathered.chunk(ranks()[1])[0].clone()
    work = {  # what a call moves or computes, and the call; an empty tuple where it cannot be made
        "bf16_matmul_tflops": (flops, lambda: half @ half),
        "fp8_matmul_tflops": (flops, lambda: scaled_mm(fp8, fp8, 1, 1, torch.bfloat16, True)) * has_fp8(device),
        "copy_gb_per_s": (8e-9 * numbers, x.clone),  # bytes read and written
        "all_reduce_gb_per_s": (4e-9 * len(gathered), lambda: dist.all_reduce(gathered)) * (ranks()[1] > 1),
        "all_gather_gb_per_s": (4e-9 * len(gathered), lambda: all_gather(gathered, part)) * (ranks()[1] > 1),
    }
    return {name: float(f"{w[0] / seconds_of(w[1], device):.4g}") if w else None for name, w in work.items()}

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "4090": 165e12}  # bf16

def mfu(c: Config, tokens_per_s: float, device_name: str) -> float | None:
    """Model FLOPs (6 a matmul weight and token, no attention) over the GPUs' dense bf16 peak, or None if unknown."""
    table = parameter_table(c)
    weights = sum(math.prod(table[name].shape) for name in ("qkvo", "mlp", "lm_head"))
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
    return None if peak is None else round(6 * weights * tokens_per_s / ranks()[1] / peak, 4)

# ------------------------------------------------------------------------------------------------------------------
# 9. The run

class Compiled:
    """A function under torch.compile that says in the log which graph it compiled and how long the call took."""

    def __init__(self, function: Callable, log: Log, clock: Clock):
        self.original, self.log, self.clock = function, log, clock
        self.function = torch.compile(function, dynamic=False, fullgraph=True)

    def __call__(self, x: Tensor, *args):
        graphs, begin = torch._dynamo.utils.counters["stats"]["unique_graphs"], time.perf_counter()
        result = self.function(x, *args)
        if torch._dynamo.utils.counters["stats"]["unique_graphs"] != graphs:
            absent = [name for name, arg in zip(self.original.__code__.co_varnames[1:], args) if arg is None]
            mode = "training" if torch.is_grad_enabled() else "validation"
            what = f"{self.original.__name__} of {len(x)} tokens for {mode}" + f", without {absent}" * bool(absent)
            self.log.fact("compile" if self.clock.now() == 0 else "defect",
                          dict(what=what, seconds=round(time.perf_counter() - begin, 2)))
        return result

def compile_model(model: GPT, log: Log, clock: Clock) -> None:
    """A graph for each kind of block and one for the head, for training and validation: quicker than one for all."""
    torch._dynamo.config.recompile_limit = 64  # the default of 8 graphs a function is less than the kinds of blocks
    model.block, model.head_loss = Compiled(block, log, clock), Compiled(head_loss, log, clock)

def train_step(model: GPT, optimizer: Optimizer, batch: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
    """One update. Returns the loss per token over the whole batch, on the device."""
    c, total = model.config, 0
    for inputs, targets in batch:
        loss = model(inputs, targets, windows(step, c))
        loss.backward()
        total = total + loss.detach()
    total = total / c.batch_tokens
    if dist.is_initialized():
        dist.all_reduce(total, async_op=True).wait()  # wait() orders streams here, it does not stop the CPU
    optimizer.step(lr_factor(step, c), muon_momentum(step, c))
    return total

@torch.no_grad()
def validate(model: GPT, tokens: Tensor, step: int, device: torch.device) -> float:
    """Mean loss over the validation tokens (int16 bits, on the CPU); sequences are dealt to the ranks in turn."""
    c = model.config
    rank, world_size = ranks()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for begin in range(rank * c.val_seq_len, c.val_tokens, world_size * c.val_seq_len):
        total += model(*to_device(tokens[begin : begin + c.val_seq_len + 1], device), windows(step, c))
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item() / c.val_tokens

def warm_up(model: GPT, optimizer: Optimizer, device: torch.device) -> None:
    """Compiles and runs everything the run will need, on random documents; then starts anew from the seed."""
    c = model.config
    tokens = torch.randint(0, model.bos, (max(c.seq_len, c.val_seq_len) + 1,), device=device)
    tokens[::600] = model.bos
    inputs, targets = tokens[: c.seq_len], tokens[1 : c.seq_len + 1]
    every = {str(windows(s, c)): s for s in range(c.num_steps + 1)}.values()  # SDPA's masks have the window's shape
    for step in every if c.compile and not model.flex else (0, c.num_steps):
        train_step(model, optimizer, [(inputs, targets)] * 2, step)
        with torch.no_grad():
            model(tokens[: c.val_seq_len], tokens[1 : c.val_seq_len + 1], windows(step, c))
    synchronize(device)
    optimizer.reset(initialize(model, c.seed))

def codec(c: Config) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Encoder and decoder: bytes for a small vocabulary, else GPT-2's byte-pair encoding."""
    if c.vocab_size <= SEPARATOR:
        from data.prepare import byte_to_token, token_to_byte  # only here: training needs no tokeniser
        return (lambda text: byte_to_token[list(text.encode())].tolist(),
                lambda ids: bytes(token_to_byte[[i for i in ids if i < 256]]).decode(errors="replace"))
    import tiktoken
    gpt2 = tiktoken.get_encoding("gpt2")
    return gpt2.encode_ordinary, lambda ids: gpt2.decode([i for i in ids if i < SEPARATOR])

@torch.no_grad()
def sample(model: GPT, text: str, count: int, temperature: float = 0.7) -> str:
    """`text` continued by at most `count` tokens, up to the document's end. Recomputes the sequence every time."""
    c, (encode, decode) = model.config, codec(model.config)
    model.block, model.flex = block, False  # lengths change with every token: nothing to compile
    device = model.embed.device
    ids = [model.bos, *encode(text)]
    end = min(c.seq_len, len(ids) + count)
    if len(ids) >= c.seq_len:
        raise BadInput(f"--sample has {len(ids) - 1} tokens, and the model's sequences only {c.seq_len}")
    while len(ids) < end:
        padded = F.pad(torch.tensor(ids, device=device), (0, -len(ids) % BLOCK))
        x = model.hidden(padded, windows(c.num_steps, c))[len(ids) - 1]
        probabilities = (softcap(F.linear(norm(x), model.weight("lm_head"))) / temperature).softmax(-1)
        ids.append(int(torch.multinomial(probabilities, 1)))
        if ids[-1] == model.bos:
            break
    return decode(ids[1:])

def save_checkpoint(model: GPT, path: str) -> None:
    """Weights without padding and the configuration; written beside and renamed, so that no half file has the name."""
    weights = {name: model.weight(name).detach().cpu().clone() for name in model.table}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save({"config": dataclasses.asdict(model.config), "weights": weights}, f"{path}.part")
    os.replace(f"{path}.part", path)

def load_checkpoint(path: str, device: torch.device) -> GPT:
    """The model of a checkpoint, on one device. Raises BadInput if the file is not one."""
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        model = GPT(Config(**saved["config"]), device)
        model.load_state_dict(saved["weights"])
    except Exception as error:  # a foreign file can make torch.load raise nearly anything
        raise BadInput(f"--load_checkpoint={path} is no checkpoint of this program ({type(error).__name__})") from None
    return model

def setup_device(c: Config) -> torch.device:
    """This rank's device, with the process group started if torchrun launched us."""
    cuda = c.device == "cuda" or c.device == "auto" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.zeros(1, device=device, requires_grad=True).sum().backward()  # autograd's thread first, then NCCL (deadlock)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    return device

def all_ranks(value) -> list:
    """The value of every rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

def check_data(c: Config) -> tuple[list[Path], Tensor]:
    """Training shards and validation tokens. Raises BadInput if the schedule needs other ranks or more data."""
    sequences, world_size = c.batch_tokens // c.seq_len, ranks()[1]
    if sequences % world_size:
        sizes = ", ".join(str(n) for n in range(1, sequences + 1) if sequences % n == 0)
        raise BadInput(f"{world_size} processes cannot share a batch of {sequences} sequences; start {sizes} of them, "
                       "or change --batch_tokens or --seq_len")
    paths, val_tokens, have, steps = find_shards(c, "train"), validation_tokens(c), 0, 0
    for path in paths * c.epochs:  # walks through the shards as the loader will
        tokens, starts = read_shard(path, c.vocab_size)
        starts, have, cursor = sequence_starts(starts, len(tokens), c), have + len(tokens), 0
        while found := batch_starts(starts, cursor, len(tokens), sequences, c.seq_len):
            cursor, steps = found[1], steps + 1
        if steps >= c.num_steps:
            return paths, val_tokens
    shards = math.ceil(1.02 * c.num_steps * c.batch_tokens / 1e8)  # starting at documents skips about 1 %
    raise BadInput(
        f"{c.num_steps} steps need {c.num_steps * c.batch_tokens:,} tokens; the {have:,} in {c.data_dir} make "
        f"{steps} steps; get more with `python data/fineweb.py {shards}`, lower --num_steps, or raise --epochs")

def agreed(work: Callable, *args):
    """work(*args) on every rank; if one raises BadInput, all raise it, so that none is left waiting."""
    result, error = None, None
    try:
        result = work(*args)
    except BadInput as bad:
        error = str(bad)
    errors = [e for e in all_ranks(error) if e]
    if errors:
        raise BadInput(errors[0])
    return result

def has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)

def train(c: Config) -> int:
    """The whole run; returns the exit status: 0 if the target was reached, else 1."""
    device = setup_device(c)
    rank, world_size = ranks()
    paths, val_tokens = agreed(check_data, c)
    run, machine = describe_run(), describe_machine(device)
    log, clock = Log(c, run["run_id"], rank == 0), Clock(device)
    log.fact("run", run)
    log.fact("config", dataclasses.asdict(c), show=False)
    log.fact("environment", machine)
    for split, files in (("train", paths), ("val", find_shards(c, "val"))):
        for path in files:
            log.fact("data", fingerprint(path, split), show=False)
    log.fact("stage", dict(first_step=0, last_step=c.num_steps, batch_tokens=c.batch_tokens), show=False)
    log.fact("calibration", calibrate(device))

    model = GPT(c, device, world_size)
    if c.fp8_head and not has_fp8(device):
        model.fp8 = False
        log.fact("note", f"the head runs in {c.dtype}: {device.type} has no FP8 products")
    initialize(model, c.seed)
    optimizer = Optimizer(model)
    if c.compile:
        compile_model(model, log, clock)
    warm_up(model, optimizer, device)
    compile_s = time.perf_counter() - LAUNCHED
    log.fact("note", f"{compile_s:.1f} s from launch to the first timed step")

    loader = Loader(paths, c, rank, world_size, device)
    reader = LossReader(c, log, device)
    gc.collect()  # a collection in the middle of the run would cost up to 0.4 s (record 47)
    gc.freeze()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    clock.start()
    for step in range(c.num_steps + 1):
        last = step == c.num_steps
        if last or c.val_interval and step % c.val_interval == 0:
            clock.stop()  # all of this is untimed, so it touches no weight and no training data
            reader.write(wait=True)
            val_loss = validate(model, val_tokens, step, device)
            log.step(step, c, clock.total, val_loss=val_loss)
            if last:
                break
            clock.start()
        loss = train_step(model, optimizer, loader.batch(), step)
        reader.put(step + 1, loss, clock.now())

    tokens, seconds = c.num_steps * c.batch_tokens, clock.total
    reached = round(val_loss, 4) <= c.target_loss
    peak = torch.cuda.max_memory_allocated(device) // 2**20 if device.type == "cuda" else None
    log.end(dict(
        val_loss=round(val_loss, 4), target=c.target_loss, reached=reached, train_time_s=round(seconds, 3),
        step_avg_ms=round(1000 * seconds / c.num_steps, 2), tokens=tokens, tokens_per_s=round(tokens / seconds),
        mfu=mfu(c, tokens / seconds, machine["devices"][0]), peak_memory_mib=peak, compile_s=round(compile_s, 1),
        code_sha256=run["code_sha256"],
    ))
    if rank == 0 and c.save_checkpoint:
        save_checkpoint(model, c.save_checkpoint)
    if rank == 0 and c.sample:
        print(f"sample: {sample(model, c.sample, c.sample_tokens)}")
    return 0 if reached else 1

def main(argv: list[str]) -> int:
    """Exit status on rank 0: 0 target reached, 1 not reached, 2 bad input or too little memory."""
    master, sentence = os.environ.get("RANK", "0") == "0", ""
    try:
        c = parse_config(argv)
        if c.load_checkpoint:
            model = load_checkpoint(c.load_checkpoint, torch.device("cpu"))
            sentence, status = sample(model, c.sample, c.sample_tokens), 0
        else:
            status = train(c)
    except BadInput as bad:
        sentence, status = f"train_gpt.py: {bad}", 2
    except OSError as error:  # a file or folder that cannot be read or written
        master, sentence, status = True, f"train_gpt.py: {error}", 2  # only this rank may know
    except torch.OutOfMemoryError as error:
        master, status = True, 2  # only this rank may know
        sentence = f"train_gpt.py: {str(error).split('. ')[0]}; --save_memory makes the same updates with less"
    if master and sentence:
        print(sentence, file=sys.stderr if status else sys.stdout)
    if dist.is_initialized():
        if status < 2:
            dist.barrier()  # torchrun ends all ranks when the first one fails: none may leave while rank 0 is at work
        dist.destroy_process_group()
    return status if master else 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
