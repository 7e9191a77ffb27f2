"""The NanoGPT speedrun in one file: train a GPT-2-class model to a target validation loss, fast.

    torchrun --standalone --nproc_per_node=8 train_gpt.py    # 8 GPUs: the speedrun, FineWeb to 3.28
    torchrun --standalone --nproc_per_node=1 train_gpt.py    # fewer GPUs: same updates, by accumulation
    python train_gpt.py --preset=laptop                      # two minutes on a CPU
    python train_gpt.py --help                               # every key, its meaning and unit

Read it top to bottom: (1) configuration, (2) low precision, (3) attention, (4) the model, (5) the optimisers,
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
    precision: str = key("auto", "row of PRECISIONS; auto: fp8-head where the GPU has FP8, else bf16")
    native: bool = key(False, "refuse to emulate products that this device does not have")
    float8_all_gather: bool = key(False, "hand out updated weights as FP8, half the traffic; for --precision=fp8")
    nvfp4_without: str = key("", "parts of nvfp4 to leave out, for ablation: of rht,sr,2d")
    bf16_last_layers: int = key(0, "last layers that stay out of the recipe")
    bf16_last_frac: float = key(0.0, "last fraction of the steps, which is trained without the recipe")
    dtype: str = key("auto", "dtype of activations and of the weights that products use; auto: as the precision says")
    attention: str = key("auto", "auto, flex (CUDA) or sdpa (everywhere)")
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
        device="cpu", precision="bf16" if CPU_HAS_BF16 else "fp32", compile=False, sample="The ",
    ),
    "char": dict(  # six plain layers that see 256 bytes, on any text: to compare precisions in minutes
        data_dir="data/pydocs", cut_documents=True, epochs=100, precision="bf16", topology="char", model_dim=384,
        num_heads=6, mlp_dim=1536, vocab_size=272, num_steps=1000, batch_tokens=16_384, seq_len=16_384, window_max=256,
        momentum_warmup=100, target_loss=1.3, val_tokens=65_536, val_seq_len=16_384, val_interval=100,
    ),
}

def parse_config(argv: list[str]) -> Config:
    """`--key=value` over the preset's values. Raises BadInput on an unknown key or a wrong value."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter,
                                     epilog=f"presets: {PRESETS}")

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
                          ("device", ["auto", "cuda", "cpu"]), ("precision", ["auto", *PRECISIONS]),
                          ("dtype", ["auto", "bfloat16", "float16", "float32", "float64"])):
        if getattr(c, name) not in choices:
            raise BadInput(f"--{name}={getattr(c, name)} is none of {', '.join(choices)}")
    if c.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device=cuda, but torch sees no GPU here")
    if c.attention == "flex" and c.device == "cpu":
        raise BadInput("--attention=flex needs CUDA: FlexAttention has no backward on CPU")
    if unknown := set(c.nvfp4_without.split(",")) - {"", *NVFP4_PARTS}:
        raise BadInput(f"--nvfp4_without={c.nvfp4_without}: {min(unknown)} is none of {', '.join(NVFP4_PARTS)}")

# ------------------------------------------------------------------------------------------------------------------
# 2. Low precision
#
# Nearly all FLOPs of training are matrix products, and hardware multiplies narrow numbers faster: FP8 twice as fast as
# bf16, FP4 up to four times. They lack range: e4m3 (4 bits of exponent, 3 of mantissa) holds 2^-9 to 448, e5m2 2^-16 to
# 57344; larger ones must be clipped, smaller ones become zero. So a tensor is multiplied by a scale that brings its
# largest magnitude (amax) to the format's end, and the product divided by both scales. And they lack precision: errors
# of up to 1/16 average out, as a product sums thousands, if the sum is wide. Weights are wide in the optimizer (float32
# masters), as an update is far smaller than a step of e4m3; so are norms, softmax and loss.
#
# A projection has three products: fprop y = x w^T, dgrad dx = dy w, wgrad dw = dy^T x. Each sums over another
# dimension. One scale a tensor survives transposition, so x, w and dy are rounded once and serve twice; where scales
# vary along the sum (nvfp4) each product rounds anew, from wide numbers. x and w want mantissa, e4m3; gradients vary
# more in size, e5m2. Sums may be quick (fewer bits, "fast accumulation") in fprop only: errors of gradients add up. FP8
# units want the summed dimension contiguous in both operands, so backward makes transposed copies. The recipes:
# fp8-static: constant scales, for the head. Its input is normalised, |x| <= sqrt(D): nothing to measure (record 21).
# fp8: each product measures amax ("tensorwise dynamic"; Float8Linear of nanochat and torchao), so x and dy are read
#   twice. Weights are rounded once a step. --float8_all_gather (torchao): who updates a slice of a weight rounds it and
#   hands out bytes; slices must share the weight's scale, so one vector of all amaxes is reduced over the ranks.
# nvfp4 (TransformerEngine's NVFP4BlockScaling): e2m1 has 0, 1/2, 1, 3/2, 2, 3, 4, 6 and signs; 16 along the sum share
#   an e4m3 scale, the tensor a float32 one. Weights share scales in 16 x 16 blocks, so that fprop and dgrad see one w
#   ("2d"); gradients are rounded at random, right on average, or all small ones would vanish ("sr"); an orthogonal
#   transform of both operands of wgrad, which cancels, spreads an outlier over 16 tokens ("rht").
# fp16: more mantissa than bf16, less exponent: small gradients vanish. So the loss is multiplied by a power of two that
#   is halved, and the step skipped, when a gradient overflows; 2000 good steps double it (section 5).
# All these numbers, and e2m1 times e4m3, are exact in bf16: where hardware lacks a product, one in bf16 of the same
# rounded numbers gives the same but for the order of sums.

PROJECTIONS = ("qkv", "o", "fc", "proj", "lm_head")
PRECISIONS = {name: (name,) * 5 for name in ("bf16", "fp32", "fp16", "fp8")}  # --precision: recipe of each projection
PRECISIONS |= {"fp8-head": ("bf16",) * 4 + ("fp8-static",), "nvfp4": ("nvfp4",) * 4 + ("bf16",)}
PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
NVFP4_PARTS = ("rht", "sr", "2d")
CAPABILITY = {"bf16": (8, 0), "fp16": (7, 0), "fp8-static": (8, 9), "fp8": (8, 9), "nvfp4": (10, 0)}  # of CUDA GPUs
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

def native(recipe: str, device: torch.device) -> bool:
    """Whether the device has the recipe's products. A CPU has all but nvfp4's, whose native form was never run."""
    if device.type != "cuda" or torch.version.hip:  # older AMD GPUs have another e4m3, which ends at 240
        return recipe in PLAIN or device.type == "cpu" and recipe != "nvfp4"
    return torch.cuda.get_device_capability(device) >= CAPABILITY.get(recipe, (0, 0))

def plan(c: Config, device: torch.device, plain: str) -> list[dict[str, str]]:
    """The recipe of each projection: a dict a layer and one for the head. Raises BadInput where one is impossible."""
    auto, layers = "fp8-head" if device.type == "cuda" and native("fp8", device) else "bf16", TOPOLOGIES[c.topology]
    *default, head = PRECISIONS[auto if c.precision == "auto" else c.precision]
    rows = [{name: layer.recipes.get(name, recipe) if i < len(layers) - c.bf16_last_layers else plain
             for name, recipe in zip(PROJECTIONS, default) if layer.attn or name in ("fc", "proj")}
            for i, layer in enumerate(layers)] + [{"lm_head": head}]
    for row, name, recipe in [(r, *item) for r in rows for item in r.items()]:
        width = {"fc": c.mlp_dim, "proj": c.mlp_dim, "lm_head": c.vocab_size}.get(name, c.model_dim)
        row[name] = plain if recipe in PLAIN or plain == "fp64" or c.model_dim % 16 or width % 16 else recipe
        if row[name] != recipe == "nvfp4" or c.float8_all_gather and (row[name] != "fp8" or c.bf16_last_frac):
            raise BadInput(f"{name} of {c.model_dim} x {width} is {recipe}; nvfp4 takes multiples of 16 only, and "
                           "--float8_all_gather fp8 in all layers and steps, which does too: no rank has wide weights")
        if c.native and not native(row[name], device):
            raise BadInput(f"--native, but {device.type} has no products of {name} in {row[name]} here")
    return rows

def scaled_mm(a: Tensor, b_t: Tensor, a_scale: float | Tensor, b_scale: float | Tensor, dtype, fast: bool) -> Tensor:
    """a (M, K) times b_t (N, K) transposed, and both scales -> (M, N). Operands in FP8, or rounded numbers in bf16."""
    one = torch.ones((), device=a.device)  # each scale gets its own, hence aligned, memory
    if a.dtype == torch.bfloat16 or not native("fp8", a.device):
        a, b = a.bfloat16(), b_t.bfloat16().t()  # exact, and so are their products
        y = torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
        return (y * (one * a_scale * b_scale)).to(dtype)
    a, b_t = (x if x.is_contiguous() else transpose(x.t().contiguous().view(torch.uint8)).view(x.dtype)
              for x in (a, b_t))
    return torch._scaled_mm(a, b_t.t(), one * a_scale, one * b_scale, out_dtype=dtype, use_fast_accum=fast)

@torch.library.custom_op("nanogpt::mm", mutates_args=())
def mm_op(x: Tensor, w: Tensor, x_s: Tensor, w_s: Tensor, dtype: torch.dtype) -> Tensor:
    """x (T, K) times w (N, K) transposed -> (T, N). Rounded numbers, e4m3 as bytes or bf16, in units of the scales."""
    x, w = (t.view(E4M3) if t.dtype == torch.uint8 else t for t in (x, w))
    return scaled_mm(x, w, x_s, w_s, dtype, fast=True)

mm_op.register_fake(lambda x, w, x_s, w_s, dtype: x.new_empty(len(x), len(w), dtype=dtype))

@torch.library.custom_op("nanogpt::mm_backward", mutates_args=())
def mm_backward_op(g: Tensor, x: Tensor, w: Tensor, g_s: Tensor, x_s: Tensor, w_s: Tensor,
                   dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """g (T, N), e5m2 as bytes or bf16, and x, w of `mm_op` -> gradients of x (T, K) and w (N, K)."""
    g, x, w = (t.view(kind) if t.dtype == torch.uint8 else t for t, kind in ((g, E5M2), (x, E4M3), (w, E4M3)))
    return scaled_mm(g, w.t(), g_s, w_s, dtype, fast=False), scaled_mm(g.t(), x.t(), g_s, x_s, dtype, fast=False)

mm_backward_op.register_fake(lambda g, x, w, g_s, x_s, w_s, dtype: (x.new_empty(x.shape, dtype=dtype),
                                                                    w.new_empty(w.shape, dtype=dtype)))

def transpose(x: Tensor) -> Tensor:
    """(M, N) bytes -> (N, M), contiguous, in tiles: the framework's copy would write single bytes."""
    if not x.is_cuda or triton is None:
        return x.t().contiguous()
    (M, N), out = x.shape, x.new_empty(x.shape[::-1])
    transpose_kernel[triton.cdiv(M, 64), triton.cdiv(N, 128)](x, out, M, N, 64, 128, num_warps=8)
    return out

HEAD_SCALES = (768**0.5 / 448, 2**-9, 1 / 448)  # fp8-static: of x, w, gradient (record 28), as the loss is a sum

def quantize(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x / scale, clamped to dtype's range (a plain cast may give NaN beyond it), rounded to nearest even."""
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp_(-limit, limit).to(dtype)

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
        x_s, w_s = (torch.full((), scale, device=x.device) for scale in HEAD_SCALES[:2])
        x8, w8 = (quantize(t, scale, E4M3).view(torch.uint8) for t, scale in zip((x, w), HEAD_SCALES))
        loss, g8 = loss_op(mm_op(x8, w8, x_s, w_s, torch.bfloat16), targets, HEAD_SCALES[2])
        ctx.save_for_backward(x8, w8, x_s, w_s, g8)
        ctx.dtype = w.dtype
        return loss.sum()

    @staticmethod
    def backward(ctx, grad):
        x8, w8, x_s, w_s, g8 = ctx.saved_tensors
        return *mm_backward_op(g8, x8, w8, grad * HEAD_SCALES[2], x_s, w_s, ctx.dtype), None

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

# Recipes for projections: pure functions on tensors. `forward` does fprop and says what to save for backward, which
# does dgrad and wgrad. `how` is (recipe, native or not, parts of nvfp4); an FP8 operand (bytes or bf16, 1 / scale).

GRIDS = {E4M3: (3, -6), E5M2: (2, -14), "e2m1": (1, 0)}  # bits of mantissa, smallest exponent of normal numbers

def round_to(x: Tensor, grid, noise: Tensor | None = None) -> Tensor:
    """float32 x inside the grid's range -> the nearest number of the grid, ties to even. With
    noise, uniform in [0, 1): one of the two neighbours at random, x on average. No device need know the format."""
    mantissa, smallest = GRIDS[grid]
    exponent = ((x.view(torch.int32) >> 23) & 255).clamp(min=smallest + 127)
    step = ((exponent - mantissa) << 23).view(torch.float32)  # between neighbours: a power of two
    y = x * ((254 - exponent + mantissa) << 23).view(torch.float32)  # x / step; compiled divisions round otherwise
    return (y.round() if noise is None else y.floor() + (noise < y - y.floor())) * step

def fp8_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The format's end over amax, in float64: compiled float32 quotients may be off by a bit."""
    scale = (torch.finfo(dtype).max / amax.double().clamp(min=1e-12)).float()
    return torch.where(amax.isfinite(), scale, math.nan)  # not 0 for infinity: all else would silently become 0

def inverse(x: Tensor) -> Tensor:
    return x.double().reciprocal().float()

def fp8_operand(x: Tensor, scale: Tensor, dtype: torch.dtype, native: bool) -> tuple[Tensor, Tensor]:
    """x * scale, clamped (e5m2 would go to infinity) and rounded."""
    y = (x.float() * scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return y.to(dtype).view(torch.uint8) if native else round_to(y, dtype).bfloat16(), inverse(scale)

def fp8_forward(x: Tensor, w: Tensor, w8: tuple, amax: Tensor, how: tuple) -> tuple[Tensor, tuple]:
    x8, x_s = fp8_operand(x, fp8_scale(amax, E4M3), E4M3, how[1])
    return mm_op(x8, w8[0], x_s, w8[1], x.dtype), (x8, w8[0], x_s, w8[1])

def fp8_backward(g: Tensor, amax: Tensor, saved: tuple, how: tuple) -> tuple[Tensor, Tensor]:
    (x8, w8, *scales), (g8, g_s) = saved, fp8_operand(g, fp8_scale(amax, E5M2), E5M2, how[1])
    return mm_backward_op(g8, x8, w8, g_s, *scales, g.dtype)

def nvfp4_operand(x: Tensor, square: bool = False, stochastic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """x (R, K) -> e2m1 numbers (R / r, r, K / 16, 16), e4m3 scales (R / r, 1, K / 16, 1), amax; r is 16 if `square`."""
    (R, K), r, x, largest = x.shape, 16 if square else 1, x.float(), torch.finfo(torch.float32).max
    amax, blocks = x.abs().amax(), x.reshape(R // r, r, K // 16, 16)
    encode = torch.where(amax == 0, 1, (6 * 448 / amax.double()).float().clamp(max=largest))
    scale = round_to((blocks.abs().amax((1, 3), keepdim=True) * (encode * (1 / 6))).clamp(max=448), E4M3)
    y = (blocks * inverse(scale * inverse(encode)).clamp(max=largest)).clamp(-6, 6)
    return round_to(y, "e2m1", torch.rand_like(y) if stochastic else None), scale, amax

def nvfp4_mm(a: tuple, b_t: tuple, dtype: torch.dtype, native: bool) -> Tensor:
    (a, a_s), (b_t, b_s) = ((pack(q, scale) if native else (q * scale).bfloat16().flatten(2).flatten(0, 1),
                             amax / (6 * 448)) for q, scale, amax in (a, b_t))
    if native:  # never run
        return (torch._scaled_mm(a[0], b_t[0].t(), a[1], b_t[1], out_dtype=torch.float32) * (a_s * b_s)).to(dtype)
    return mm_op(a, b_t, a_s, b_s, dtype)

def pack(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """As tensor cores want them: two codes a byte, the first in the low half, and scales in tiles of 32 x 4 x 4."""
    q, scale = (x.expand(-1, q.size(1), -1, -1).flatten(2).flatten(0, 1) for x in (2 * q, scale))
    c = (torch.where(q.abs() > 4, (2 * q.abs().log2()).floor(), q.abs()) + 8 * (q < 0)).to(torch.uint8)
    tiles = F.pad(scale, (0, -scale.size(1) % 4, 0, -len(scale) % 128)).unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))
    return (c[:, ::2] | c[:, 1::2] << 4).view(torch.float4_e2m1fn_x2), tiles.permute(0, 3, 2, 1, 4).flatten().to(E4M3)

def hadamard(x: Tensor) -> Tensor:
    """x (R, C) -> each 16 numbers of a row times diag(signs) H16 / 4, which is orthogonal."""
    i = torch.arange(16, device=x.device)
    shared = ((i[:, None] & i)[..., None] >> i[:4]).sum(-1)  # as odd as the number of bits that the indices share,
    negative = ((0xD7E8 >> i)[:, None] + shared) & 1  # where Sylvester's H16 is negative; the signs were drawn once
    return (x.float().reshape(-1, 16) @ (0.25 - 0.5 * negative)).view(x.shape)

def nvfp4_forward(x: Tensor, w: Tensor, w8: tuple, amax: Tensor, how: tuple) -> tuple[Tensor, tuple]:
    return nvfp4_mm(nvfp4_operand(x), nvfp4_operand(w, "2d" in how[2]), x.dtype, how[1]), (x, w)

def nvfp4_backward(g: Tensor, amax: Tensor, saved: tuple, how: tuple) -> tuple[Tensor, Tensor]:
    (x, w), (_, native, parts) = saved, how
    g_t, x_t = (hadamard(t.t()) if "rht" in parts else t.t() for t in (g, x))
    w_t = nvfp4_operand(w.t(), "2d" in parts)  # square blocks: the numbers of fprop
    grad_x = nvfp4_mm(nvfp4_operand(g, stochastic="sr" in parts), w_t, g.dtype, native)
    return grad_x, nvfp4_mm(nvfp4_operand(g_t, stochastic="sr" in parts), nvfp4_operand(x_t), g.dtype, native)

RECIPES = {"fp8": (fp8_forward, fp8_backward), "nvfp4": (nvfp4_forward, nvfp4_backward)}

class LowLinear(torch.autograd.Function):
    """x (T, K), w (N, K) -> x w^T (T, N) by a recipe. seen (3,) gets amaxes as gradient: NaN there names a culprit."""

    @staticmethod
    def forward(ctx, x, w, seen, w8, w8_scale, *how):
        amax, ctx.how = x.abs().amax().float(), how
        y, saved = RECIPES[how[0]][0](x, w, (w8, w8_scale), amax, how)
        ctx.save_for_backward(amax, w.abs().amax().float() if w8 is None else w8_scale, *saved)
        return y

    @staticmethod
    def backward(ctx, g):
        (x_amax, w_amax, *saved), amax = ctx.saved_tensors, g.abs().amax().float()
        grads = RECIPES[ctx.how[0]][1](g, amax, saved, ctx.how)
        return *grads, torch.stack([w_amax, x_amax, amax]), *[None] * 5

def linear(x: Tensor, w: Tensor, low: dict[str, tuple] | None, name: str) -> Tensor:
    """x (T, K), w (N, K) -> x w^T (T, N), by the layer's recipe for this projection if there is one."""
    return LowLinear.apply(x, w, *low[name]) if low and name in low else F.linear(x, w)

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
    recipes: dict[str, str] = {}  # of projections that do not follow --precision

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
    "char": [Layer(window="long", ve=0), *[Layer(window="long")] * 4, Layer(window="long", ve=0)],
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

def block(x, x0, skip, ve, qkvo, attn_gate, mask, mlp, scalars, cos, sin, low=None) -> Tensor:
    """One layer: x (T, D) -> (T, D). Pure, so that one compiled graph serves all layers of a kind.

    x0 is the first layer's input, skip (T, D) and ve (T, D) may be None; qkvo (4, D, D) and attn_gate (H, GATE_DIM)
    are None in a layer without attention; mlp (2, D, F); scalars (5,) as named in SCALARS; low: the layer's recipes.
    """
    w = dict(zip(SCALARS, scalars.unbind()))
    if skip is not None:
        x = x + w["skip"] * skip
    x = w["x"] * x + w["x0"] * x0
    if qkvo is not None:
        T, D = x.shape
        H = attn_gate.size(0)
        u = norm(x)
        qkv = linear(u, qkvo[:3].flatten(0, 1), low, "qkv")
        q, k, v = qkv.view(T, 3, H, D // H).unbind(1)  # (T, H, d) each
        q, k = rotate(norm(q), cos, sin), rotate(norm(k), cos, sin)  # bounded scores (Henry et al. 2020)
        v = w["v"] * v if ve is None else w["v"] * v + w["ve"] * ve.view_as(v)
        y = attend(q, k, v, mask, scale=0.12 * 128 * H / D)  # 0.12 for heads of 128; unit-RMS q, k bound the score
        gate = torch.sigmoid(F.linear(u[:, :GATE_DIM], attn_gate))  # (T, H): lets a head say nothing (record 28)
        x = x + linear((y * gate[..., None]).reshape(T, D), qkvo[3], low, "o")
    hidden = F.relu(linear(norm(x), mlp[0].t(), low, "fc")).square()  # (T, F); both are (D, F) so that Muon stacks them
    return x + linear(hidden, mlp[1], low, "proj")

def head_loss(x, lm_head, targets, low=None) -> Tensor:
    """x (T, D), targets (T,) -> cross-entropy summed over tokens, of capped logits."""
    x = norm(x)
    if low and low["lm_head"][3] == "fp8-static":
        return FP8HeadLoss.apply(x, lm_head, targets)
    return F.cross_entropy(softcap(linear(x, lm_head, low, "lm_head")), targets, reduction="sum")

class GPT(nn.Module):
    """The model over one packed sequence. Parameters live in stacks ("banks") padded to a multiple of world_size."""

    def __init__(self, c: Config, device: torch.device, world_size: int = 1):
        super().__init__()
        self.config, self.table, self.layers = c, parameter_table(c), TOPOLOGIES[c.topology]
        self.bos = min(50256, c.vocab_size - 1)
        self.flex = c.attention == "flex" or c.attention == "auto" and device.type == "cuda"
        dtype = PLAIN.get(c.precision, torch.bfloat16) if c.dtype == "auto" else getattr(torch, c.dtype)
        full = torch.promote_types(torch.float32, dtype)
        for name, param in self.table.items():
            rows = math.ceil(param.shape[0] / world_size) * world_size if param.sharded else param.shape[0]
            bank = torch.zeros(rows, *param.shape[1:], dtype=dtype if param.sharded else full, device=device)
            self.register_parameter(name, nn.Parameter(bank))
        cos, sin = rope_table(max(c.seq_len, c.val_seq_len), c.model_dim // c.num_heads, device, full)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.block, self.head_loss = block, head_loss  # `compile_model` replaces these two
        self.plan, self.plain = plan(c, device, next(name for name in PLAIN if PLAIN[name] == dtype)), False
        self.make_recipes(device)

    def make_recipes(self, device: torch.device) -> None:
        """Makes `lows`, () or (recipes,) for each layer and the head, and the FP8 weights: the optimizer fills them."""
        self.lows, self.weights8, self.groups, count, attn = [], {}, {}, 0, 0
        self.amaxes = torch.zeros(len(self.plan), len(PROJECTIONS), 3, device=device)  # summed up: not finite, it stays
        for bank in ("qkvo", "mlp", "lm_head") if any("fp8" in row.values() for row in self.plan) else ():
            row = torch.arange(len(getattr(self, bank)), device=device)
            self.weights8[bank] = torch.zeros_like(getattr(self, bank).detach(), dtype=torch.uint8)
            self.groups[bank] = count + {"qkvo": row - row % 4 * (row % 4 < 3), "mlp": row, "lm_head": 0 * row}[bank]
            count = int(self.groups[bank].max()) + 1  # a row's place in `scales`: q, k and v are one weight
        self.scales = torch.full((count, 4), math.nan, device=device)  # of FP8 weights, inverse; each on its 16 bytes
        parts = tuple(part for part in NVFP4_PARTS if part not in self.config.nvfp4_without)
        for i, row in enumerate(self.plan):
            rows, low = {"qkv": ("qkvo", 4 * attn, 3), "o": ("qkvo", 4 * attn + 3, 1), "fc": ("mlp", 2 * i, 1),
                         "proj": ("mlp", 2 * i + 1, 1), "lm_head": ("lm_head", 0, self.config.vocab_size)}, {}
            for name, recipe in [item for item in row.items() if item[1] not in PLAIN]:
                (bank, first, number), w8 = rows[name], (None, None)
                seen = torch.zeros(3, device=device, requires_grad=True)
                seen.grad = self.amaxes[i, PROJECTIONS.index(name)]  # autograd adds to it in place
                if recipe == "fp8":
                    q, scale = self.weights8[bank][first : first + number].flatten(0, -2), int(self.groups[bank][first])
                    w8 = q.t() if name == "fc" else q, self.scales[scale, 0]
                low[name] = seen, *w8, recipe, native(recipe, device), parts
            self.lows.append((low,) if low else ())
            attn += "qkv" in row

    def recipes(self) -> list[tuple]:
        return self.lows if torch.is_grad_enabled() and not self.plain else [()] * len(self.lows)

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
        for layer, mlp, scalars, low in zip(self.layers, mlps.unbind(), self.scalars.unbind(), self.recipes()):
            skip = None if layer.skip is None else outputs[layer.skip]
            attn = (next(qkvo), next(gates), masks[layer.window]) if layer.attn else (None, None, None)
            args = (x, x0, skip, None if layer.ve is None else ve[layer.ve], *attn, mlp, scalars, cos, sin, *low)
            x = checkpoint(self.block, *args, use_reentrant=False) if self.saves_memory() else self.block(*args)
            outputs.append(x.view_as(x))
        return x

    def saves_memory(self) -> bool:
        return self.config.save_memory and torch.is_grad_enabled()

    def forward(self, tokens: Tensor, targets: Tensor, windows: dict[str, int]) -> Tensor:
        """tokens, targets (T,) -> loss summed over T. Recipes hold in training only."""
        x, w, low = self.hidden(tokens, windows), self.weight("lm_head"), self.recipes()[-1]
        if torch.is_grad_enabled() and not self.saves_memory():
            return self.head_loss(x, w, targets, *low)
        pieces = zip(x.split(VAL_CHUNK), targets.split(VAL_CHUNK))  # logits of a whole sequence would not fit
        if self.saves_memory():
            return sum(checkpoint(self.head_loss, a, w, b, *low, use_reentrant=False) for a, b in pieces)
        return sum(self.head_loss(a, w, b) for a, b in pieces)

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
# A step that fp16 skips is computed, as the processor does not wait to know of the overflow, and nothing of it kept.

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

def next_loss_scale(scale: Tensor, good: Tensor, finite: Tensor, period: int = 2000) -> tuple[Tensor, Tensor]:
    """S and the number of good steps in a row, after a step (the rule of jmp). All are scalars on the device."""
    full = good + 1 == period
    grown = torch.where(full & (2 * scale).isfinite(), 2 * scale, scale)
    return torch.where(finite, grown, (scale / 2).clamp(min=1)), torch.where(finite & ~full, good + 1, 0)

class Optimizer:
    """Muon and Adam over the parameter table, sharded over the ranks of the default process group (if there is one)."""

    def __init__(self, model: GPT):
        self.model = model
        self.rank, self.world_size = ranks()
        self.seq_bits = round(math.log2(model.config.seq_len))
        self.gather8 = [*model.weights8] if model.config.float8_all_gather else []
        self.reset({name: p.detach().to(model.scalars.dtype) for name, p in model.named_parameters()})

    def reset(self, full: dict[str, Tensor]) -> None:
        """Starts anew from the float32 weights `full`, as `initialize` returns them."""
        self.masters = {name: self.own(name, w).clone() for name, w in full.items()}
        self.state: dict[str, dict[str, Tensor]] = {name: {} for name in full}
        self.steps, self.loss_scale, zero = 0, None, torch.zeros((), device=self.model.scalars.device)
        if self.model.config.precision == "fp16":
            self.steps, self.loss_scale, self.good = zero.double(), zero + 2**15, zero.clone()
        self.quantize_weights()

    def scaled(self, loss: Tensor) -> Tensor:
        """The float32 loss whose gradient `step` wants. jmp's factor is for a mean over a sequence, ours is a sum."""
        return loss if self.loss_scale is None else loss * self.loss_scale * 2.0 ** -self.seq_bits

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
        reductions = {name: self.reduce(name, getattr(self.model, name).grad) for name in self.model.table}
        gathers, finite = [], True
        if self.loss_scale is not None:
            finite, unscale = self.all_finite(reductions), 2.0**self.seq_bits / self.loss_scale
            self.loss_scale, self.good = next_loss_scale(self.loss_scale, self.good, finite)
        self.steps = self.steps + finite
        for name, (grad, transfer) in reductions.items():
            if transfer is not None:
                transfer.wait()
            param, master, state = self.model.table[name], self.masters[name], self.state[name]
            grad = grad.to(master.dtype)
            if self.loss_scale is not None:
                grad, old = grad * unscale, {key: t.clone() for key, t in (state | {"master": master}).items()}
            if param.optimizer == "muon":
                master -= muon_update(grad, state, param.lr * lr_factor, momentum)
            else:
                master -= adam_update(grad, state, param.lr * lr_factor, self.steps)
            if self.loss_scale is not None:
                for key, new in (state | {"master": master}).items():
                    new.copy_(torch.where(finite, new, old.get(key, 0)))
            bank = getattr(self.model, name)
            part = self.own(name, bank.data).copy_(master)
            if param.sharded and self.world_size > 1 and name not in self.gather8:
                gathers.append(all_gather(bank.data, part, async_op=True))
            bank.grad = None
        for transfer in gathers:
            transfer.wait()
        self.quantize_weights()

    def all_finite(self, reductions: dict) -> Tensor:
        """Whether all gradients are finite, on all ranks and on the device. A collective."""
        for transfer in (transfer for _, transfer in reductions.values() if transfer is not None):
            transfer.wait()
        found = torch.stack([~grad.isfinite().all() for grad, _ in reductions.values()]).any().float()
        if dist.is_initialized():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return found == 0

    @torch.no_grad()
    def quantize_weights(self) -> None:
        """The FP8 weights anew; with --float8_all_gather from the masters, each rank its part: a collective."""
        m, amax, sharded = self.model, torch.zeros_like(self.model.scales[:, 0]), self.gather8 and self.world_size > 1
        parts = {name: (self.own(name, group), self.masters[name]) if self.gather8 else (group, getattr(m, name).data)
                 for name, group in m.groups.items()}
        for group, part in parts.values():
            of_rows = part.abs().flatten(1).amax(1).float().nan_to_num(math.inf, math.inf)  # the reduction may lose NaN
            amax.scatter_reduce_(0, group, of_rows, "amax")
        if sharded:
            dist.all_reduce(amax, dist.ReduceOp.MAX)  # one for all weights
        scale = fp8_scale(amax, E4M3)
        m.scales.copy_(inverse(scale)[:, None].expand_as(m.scales))
        for name, (group, part) in parts.items():
            w8, _ = fp8_operand(part, scale[group].view(-1, *[1] * (part.ndim - 1)), E4M3, native=True)
            (all_gather if sharded else Tensor.copy_)(m.weights8[name], w8)

    def bytes_per_step(self) -> int:
        """What a rank sends for an update where ranks form a ring: gradients and weights. Vectors do not count."""
        banks = dict(self.model.named_parameters())
        gathered = banks | {name: self.model.weights8[name] for name in self.gather8}
        return round((1 - 1 / self.world_size) * sum(t.nbytes for t in [*banks.values(), *gathered.values()]))

    def complete_weights(self) -> None:
        """Fetches the wide weights that --float8_all_gather left with their owners, for validation. A collective."""
        for bank in [getattr(self.model, name).data for name in self.gather8 if self.world_size > 1]:
            all_gather(bank, self.own("lm_head", bank).clone())

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
        make = "python data/prepare.py --python-docs --bytes --out data/pydocs" if c.preset in ("laptop", "char") \
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
        self.losses = torch.zeros(c.num_steps + 1, 1 + 15 * (1 + len(TOPOLOGIES[c.topology])), pin_memory=self.cuda)

    def put(self, step: int, loss: Tensor, seconds: float) -> None:
        """loss, on the device: mean over the batch's tokens, and perhaps which `amaxes` are not finite."""
        self.losses[step, : loss.numel()].copy_(loss, non_blocking=True)
        self.pending.append((step, seconds, torch.cuda.current_stream().record_event() if self.cuda else None))
        self.write(wait=False)

    def write(self, wait: bool) -> None:
        """Logs what has arrived, in order. Raises BadInput if a loss, or what a recipe saw, is not finite."""
        while self.pending and (wait or not self.cuda or self.pending[0][2].query()):
            step, seconds, arrived = self.pending.pop(0)
            if arrived is not None:
                arrived.synchronize()
            loss, *flags = self.losses[step].tolist()
            self.log.step(step, self.config, seconds, train_loss=loss)
            if not math.isfinite(loss) or any(flags):
                raise BadInput(f"the training loss is {loss} at step {step}{culprit(flags)}; lower the learning rates")

def culprit(flags: list[float]) -> str:
    """What was not finite at first: the first weight or input, else the last gradient, as backward starts there."""
    bad = sorted((i % 3, i // 3) for i, flag in enumerate(flags) if flag) or [(3, 0)]  # kind, place
    kind, place = bad[-1] if bad[0][0] == 2 else bad[0]
    where = f"layer {place // 5}'s " * (place % 5 < 4) + PROJECTIONS[place % 5]
    return f", {('weight', 'input', 'gradient')[kind]} of {where} not finite" if kind < 3 else ""

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
    half, fp8, has_fp8 = a.bfloat16(), quantize(a, 0.02, E4M3), device.type == "cuda" and native("fp8", device)
    gathered = x[: numbers // 4 // ranks()[1] * ranks()[1]]
    part = gathered.chunk(ranks()[1])[0].clone()
    work = {  # what a call moves or computes, and the call; an empty tuple where it cannot be made
        "bf16_matmul_tflops": (flops, lambda: half @ half),
        "fp8_matmul_tflops": (flops, lambda: scaled_mm(fp8, fp8, 1, 1, torch.bfloat16, True)) * has_fp8,
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
    model.plain = c.bf16_last_frac > 0 and step >= (1 - c.bf16_last_frac) * c.num_steps
    for inputs, targets in batch:
        loss = model(inputs, targets, windows(step, c))
        optimizer.scaled(loss).backward()
        total = total + loss.detach()
    total = total / c.batch_tokens
    if any(recipe in RECIPES for row in model.plan for recipe in row.values()):
        total = torch.cat([total[None], ~model.amaxes.isfinite().flatten()])
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

def describe_products(model: GPT, device: torch.device) -> str:
    """Recipe, native or emulated, of each projection."""
    texts = [f"{k} {v} ({'native' if native(v, device) else 'emulated'})" for row in model.plan for k, v in row.items()]
    return "products: " + ", ".join(f"{texts.count(text)} x {text}" for text in dict.fromkeys(texts))

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
    initialize(model, c.seed)
    optimizer = Optimizer(model)
    log.fact("note", f"{describe_products(model, device)}; {optimizer.bytes_per_step()} bytes sent per step and rank")
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
            optimizer.complete_weights()
            val_loss = validate(model, val_tokens, step, device)
            log.step(step, c, clock.total, val_loss=val_loss)
            if last:
                break
            clock.start()
        loss = train_step(model, optimizer, loader.batch(), step)
        reader.put(step + 1, loss, clock.now())

    if c.precision == "fp16":
        log.fact("note", f"{c.num_steps - int(optimizer.steps)} steps skipped, loss scale {optimizer.loss_scale:g}")
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
