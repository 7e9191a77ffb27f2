"""The NanoGPT speedrun in one file: train a GPT-2-class model to a target validation loss, fast.

    torchrun --standalone --nproc_per_node=8 train_gpt.py    # 8 GPUs: the speedrun, FineWeb to 3.28
    torchrun --standalone --nproc_per_node=1 train_gpt.py    # fewer GPUs: the same batches, accumulated
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
from glob import glob

LAUNCHED = time.perf_counter()
LOCAL_GPU = int(os.environ.get("LOCAL_RANK", 0))

if __name__ == "__main__":  # torch and CUDA read these once
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # varied sizes fragment fixed ones
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # transfers need few SMs, but would wait for a full GPU
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(i) for i in range(len(glob("/dev/nvidia[0-9]*")))))
    if LOCAL_GPU < len(gpus.split(",")) and gpus:  # the compiler's cache tells cuda:0 from cuda:1, so all are cuda:0
        os.environ["CUDA_VISIBLE_DEVICES"], LOCAL_GPU = gpus.split(",")[LOCAL_GPU], 0

import argparse
import dataclasses
import difflib
import gc
import hashlib
import json
import math
import platform
import subprocess
import timeit
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import accumulate, islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from tqdm import tqdm

triton = None  # without a GPU each kernel's plain-PyTorch twin runs; Triton's interpreter runs the kernels in tests
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET"):
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

class BadInput(Exception):
    """Something the user can mend: printed as one sentence on rank 0, without a traceback, exit status 2."""

def require(holds, sentence: str) -> None:
    if not holds:
        raise BadInput(sentence)

def ranks() -> tuple[int, int]:
    """(rank, world_size): (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

# ------------------------------------------------------------------------------------------------------------------
# 1. Configuration: the defaults are the record; every key can be given as --key=value

def key(default, meaning: str):
    return dataclasses.field(default=default, metadata={"meaning": meaning})

@dataclasses.dataclass
class Config:
    preset: str = key("", "speedrun, onepass, laptop or char; empty: speedrun with CUDA, laptop without")
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
    candidates: int = key(16_384, "tokens the loss of a micro-batch tells the next one from, 0: the whole vocabulary")
    # schedule
    schedule: str = key("speedrun", "entry of SCHEDULES: the stages of the run")
    num_steps: int = key(1560, "optimizer steps")
    batch_tokens: int = key(393_216, "tokens per optimizer step in the last stage, over all GPUs")
    seq_len: int = key(16_384, "tokens of a training sequence: whole documents, the last one cut")
    micro_tokens: int = key(16_384, "most tokens a GPU works on at a time: fewer need less memory")
    cooldown_frac: float = key(0.6, "last fraction of the steps, over which the learning rate falls to 0.15")
    momentum_warmup: int = key(300, "steps over which Muon's momentum rises from 0.85 to 0.95")
    # optimizers
    muon_lr: float = key(0.023, "Muon's learning rate, for the matrices")
    muon_decay: float = key(1.2, "weight decay of the matrices, times muon_lr")
    head_lr: float = key(0.008, "Adam's learning rate for output head, token embedding and gates")
    table_lr: float = key(0.6, "Adam's learning rate for value and bigram embeddings")
    scalar_lr: float = key(0.04, "Adam's learning rate for the scalars")
    bigram_rows: int = key(251_520, "rows of the table of hashed bigrams")
    # evaluation
    target_loss: float = key(3.28, "validation loss to reach, nats per token")
    val_tokens: int = key(10_485_760, "validation tokens, always the first ones; records are compared on these")
    val_seq_len: int = key(262_144, "tokens per validation sequence")
    val_interval: int = key(125, "steps between validations, 0: only at the end")
    # system
    seed: int = key(0, "seed of the initial weights, candidates and random rounding")
    device: str = key("auto", "auto, cuda or cpu")
    precision: str = key("auto", "row of PRECISIONS; auto: fp8-qkv where the GPU has FP8, else bf16")
    native: bool = key(False, "refuse to emulate products that this device does not have")
    float8_all_gather: bool = key(False, "hand out updated weights as FP8, half the traffic; for --precision=fp8")
    nvfp4_without: str = key("", "parts of nvfp4 to leave out, for ablation: of rht,sr,2d")
    bf16_last_layers: int = key(0, "last layers that stay out of the recipe")
    bf16_last_frac: float = key(0.0, "last fraction of the steps, which is trained without the recipe")
    dtype: str = key("auto", "dtype of activations and of the weights that products use; auto: as the precision says")
    attention: str = key("auto", "auto, flex (CUDA) or sdpa (everywhere)")
    compile: bool = key(True, "use torch.compile")
    # output
    log_dir: str = key("logs", "folder of the logs")
    jsonl: bool = key(False, "also write the log as JSON lines")
    run_name: str = key("", "free text for the log")
    save_checkpoint: str = key("", "file to write the final weights to")
    load_checkpoint: str = key("", "file of weights for --sample; nothing is trained")
    sample: str = key("", "text to continue with the trained (or loaded) model")
    sample_tokens: int = key(256, "tokens to sample")

CPU_HAS_BF16 = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()  # only such CPUs multiply bf16 natively
BYTES = dict(data_dir="data/pydocs", cut_documents=True, vocab_size=272, bigram_rows=4096, momentum_warmup=100,
             muon_lr=0.03, head_lr=0.02, table_lr=0.3)  # what small models of single bytes have in common

PRESETS: dict[str, dict] = {
    "speedrun": {},
    "onepass": dict(schedule="onepass", num_steps=950, seq_len=8192, micro_tokens=32_768, muon_lr=0.02, head_lr=0.0065,
                    cooldown_frac=0.7, target_loss=3.492),
    "laptop": BYTES | dict(
        topology="laptop", model_dim=128, num_heads=2, mlp_dim=512, schedule="laptop", num_steps=700, muon_lr=0.04,
        head_lr=0.007, batch_tokens=2048, seq_len=2048, target_loss=1.5, val_tokens=131_072, val_seq_len=8192,
        val_interval=175, device="cpu", precision="bf16" if CPU_HAS_BF16 else "fp32", compile=False, sample="The "),
    "char": BYTES | dict(  # six plain layers that see 256 bytes, on any text: to compare precisions in minutes
        topology="char", model_dim=384, mlp_dim=1536, schedule="char", num_steps=1000, epochs=100, batch_tokens=16_384,
        target_loss=1.3, val_tokens=65_536, val_seq_len=16_384, val_interval=100, precision="bf16"),
}

class Stage(NamedTuple):
    share: float  # of the steps; 0: only for the validation at the end
    batch: float  # of batch_tokens
    longest: int  # tokens of a document that are read
    long: int  # window of long layers, blocks
    short: int  # window of the others
    lr: float  # factor of all learning rates

SCHEDULES: dict[str, list[Stage]] = {
    "speedrun": [  # records 46, 49, 53, 72
        Stage(0.33, 1 / 3, 896, 3, 1, 1.0),
        Stage(0.33, 2 / 3, 2048, 7, 3, 1.52),
        Stage(0.33, 1, 2048, 11, 5, 1.73),
        Stage(0.01, 1, 2048, 13, 6, 1.73),
        Stage(0, 1, 2048, 20, 6, 1.73),
    ],
    "laptop": [Stage(1, 1, 2048, 4, 2, 1.0)],
    "char": [Stage(1, 1, 2048, 2, 2, 1.0)],
}

SCHEDULES["onepass"] = [  # smaller batches, for a run of a fifth of the tokens: records/2026-11-21_ladder_fp8
    stage._replace(batch=batch) for stage, batch in zip(SCHEDULES["speedrun"], (1 / 6, 1 / 6, 1 / 3, 1 / 3, 1 / 3))]

def parse_config(argv: list[str]) -> Config:
    """`--key=value` over the preset's values. Raises BadInput on an unknown key or a wrong value."""

    def true_or_false(text: str) -> bool:  # argparse puts the function's name into its sentence
        return ("false", "true", "0", "1").index(text.lower()) % 2 == 1

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter,
                                     epilog=f"presets: {PRESETS}")
    parser.error = partial(require, False)  # its sentence without its page on usage
    for f in dataclasses.fields(Config):
        boolean = dict(type=true_or_false, nargs="?", const=True)  # a bare --jsonl is --jsonl=true
        kind = boolean if isinstance(f.default, bool) else dict(type=type(f.default))
        parser.add_argument(f"--{f.name}", default=f.default, help=f.metadata["meaning"], **kind)
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        near = difflib.get_close_matches(name.removeprefix("--"), vars(values), n=1, cutoff=0)[0]
        raise BadInput(f"unknown key {name}; the nearest one is --{near} (--help lists all)")
    preset = values.preset or ("speedrun" if torch.cuda.is_available() else "laptop")
    require(preset in PRESETS, f"--preset={preset} is none of {', '.join(PRESETS)}")
    parser.set_defaults(**PRESETS[preset])
    return checked(Config(**vars(parser.parse_args(argv)) | {"preset": preset}))

def checked(c: Config) -> Config:
    """The configuration itself. Raises BadInput where values do not fit each other."""
    for name in ("num_steps batch_tokens seq_len micro_tokens val_tokens val_seq_len model_dim num_heads mlp_dim "
                 "vocab_size bigram_rows epochs cooldown_frac").split():
        require(getattr(c, name) > 0, f"--{name}={getattr(c, name)} must be positive")
    enough = min(c.vocab_size, min(c.micro_tokens, c.batch_tokens) // 2)  # texts repeat most of their tokens
    require(c.candidates == 0 or c.candidates >= enough and (c.candidates % 16 == 0 or c.candidates >= c.vocab_size),
            f"--candidates={c.candidates} must be a multiple of 16, at least {enough}, or 0 for the whole vocabulary")
    for name, choices in (("topology", TOPOLOGIES), ("schedule", SCHEDULES), ("precision", ("auto", *PRECISIONS)),
                          ("attention", ("auto", "flex", "sdpa")), ("device", ("auto", "cuda", "cpu")),
                          ("dtype", ("auto", "bfloat16", "float16", "float32", "float64"))):
        require(getattr(c, name) in choices, f"--{name}={getattr(c, name)} is none of {', '.join(choices)}")
    pairs = 1 + any(layer.paired for layer in TOPOLOGIES[c.topology])
    for name, unit in (("seq_len", BLOCK), ("val_seq_len", BLOCK), ("micro_tokens", c.seq_len),
                       *(("batch_tokens", round(c.seq_len / stage.batch)) for stage in SCHEDULES[c.schedule]),
                       ("val_tokens", c.val_seq_len), ("num_heads", pairs), ("model_dim", 4 * c.num_heads)):
        require(getattr(c, name) % unit == 0, f"--{name}={getattr(c, name)} must be a multiple of {unit}")
    require(0 <= c.seed < 2**63, f"--seed={c.seed} must be between 0 and 2^63")
    require(c.model_dim >= GATE_DIM, f"--model_dim={c.model_dim} must be at least {GATE_DIM}, a gate's channels")
    require(c.device != "cuda" or torch.cuda.is_available(), "--device=cuda, but torch sees no GPU here")
    require(c.attention != "flex" or c.device != "cpu", "--attention=flex needs CUDA: it has no backward on CPU")
    unknown = ", ".join(sorted(set(c.nvfp4_without.split(",")) - {"", *NVFP4_PARTS}))
    require(not unknown, f"--nvfp4_without={c.nvfp4_without}: {unknown} is none of {', '.join(NVFP4_PARTS)}")
    return c

# ------------------------------------------------------------------------------------------------------------------
# 2. Low precision
#
# Nearly all FLOPs of training are matrix products, and hardware multiplies narrow numbers faster: FP8 twice as fast as
# bf16, FP4 up to four times. They lack range: e4m3 (4 bits of exponent, 3 of mantissa) holds 2^-9 to 448, e5m2 2^-16 to
# 57344. So a tensor is multiplied by a scale that brings its largest magnitude (amax) to the format's end, and the
# product divided by both scales. And they lack precision: errors of up to 1/16 average out, as a product sums
# thousands, if the sum is wide. Weights stay wide in the optimizer: an update is far smaller than a step of e4m3.
#
# A projection has three products: fprop y = x w^T, dgrad dx = dy w, wgrad dw = dy^T x, each a sum over another
# dimension. One scale a tensor survives transposition, so x, w and dy are rounded once and serve twice; where scales
# vary along the sum (nvfp4) each product rounds anew. x and w want mantissa, e4m3; gradients want range, e5m2. Sums may
# be quick (fewer bits, "fast accumulation") in fprop only, or where few numbers are added: errors of gradients add up.
# FP8 units want the summed dimension contiguous in both operands, so products want others of them transposed. Recipes:
# fp8-static: constant scales, for the head (record 21), the MLPs and qkv: inputs are normalised, |x| <= sqrt(D), or
#   squares of what comes of those. Hidden operands are written both ways as they are rounded.
# fp8: each product measures amax ("tensorwise dynamic"; Float8Linear of nanochat and torchao), weights once a step.
#   --float8_all_gather (torchao): who updates a slice of a weight rounds it and hands out bytes; slices must share the
#   weight's scale, so one vector of all amaxes is reduced over the ranks.
# nvfp4 (TransformerEngine's NVFP4BlockScaling): e2m1 has 0, 1/2, 1, 3/2, 2, 3, 4, 6 and signs; 16 along the sum share
#   an e4m3 scale, the tensor a float32 one. Weights share scales in 16 x 16 blocks, so that fprop and dgrad see one w
#   ("2d"); gradients are rounded at random, right on average, or all small ones would vanish ("sr"); an orthogonal
#   transform of both operands of wgrad, which cancels, spreads an outlier over 16 tokens ("rht").
# fp16: less exponent than bf16, so small gradients vanish. The loss is multiplied by a power of two that is halved, and
#   the step skipped, when a gradient overflows; 2000 good steps double it (section 5).
# All these numbers, and e2m1 times e4m3, are exact in bf16: hardware without such products has them there, emulated.

PROJECTIONS = ("qkv", "o", "fc", "proj", "lm_head")
PRECISIONS = {name: (name,) * 5 for name in ("bf16", "fp32", "fp16", "fp8")}  # --precision: recipe of each projection
PRECISIONS |= {"fp8-head": ("bf16",) * 4 + ("fp8-static",), "fp8-mlp": ("bf16",) * 2 + ("fp8-static",) * 3,
               "fp8-qkv": ("fp8-static", "bf16") + ("fp8-static",) * 3,  # o, the smallest, gains nothing
               "nvfp4": ("nvfp4",) * 4 + ("bf16",)}
PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
MEASURED, NVFP4_PARTS = ("fp8", "nvfp4"), ("rht", "sr", "2d")  # recipes that see amaxes; parts of the second
CAPABILITY = {"bf16": (8, 0), "fp16": (7, 0), "fp8-static": (8, 9), "fp8": (8, 9), "nvfp4": (10, 0)}  # of CUDA GPUs
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

def native(recipe: str, device: torch.device) -> bool:
    """Whether the device has the recipe's products. A CPU has all but nvfp4's, whose native form was never run."""
    if device.type != "cuda" or torch.version.hip:  # older AMD GPUs have another e4m3, which ends at 240
        return recipe in PLAIN or device.type == "cpu" and recipe != "nvfp4"
    return torch.cuda.get_device_capability(device) >= CAPABILITY.get(recipe, (0, 0))

def plan(c: Config, device: torch.device, plain: str) -> list[dict[str, str]]:
    """The recipe of each projection: a dict a layer and one for the head. Raises BadInput where one is impossible."""
    auto, layers = "fp8-qkv" if device.type == "cuda" and native("fp8", device) else "bf16", TOPOLOGIES[c.topology]
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
        require((recipe, c.precision) != ("fp8-static", "fp16") or name == "lm_head",
                f"{name} is fp8-static, whose scale of gradients is constant, and --precision=fp16 scales the loss")
        require(native(row[name], device) or not c.native,
                f"--native, but {device.type} has no products of {name} in {row[name]} here")
    return rows

HEAD_SCALES = (100 / 448, 1.6 / 448, 0.75 / 448)  # fp8-static: of x, w, gradient (record 54), as the loss is a sum

def quantize(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x / scale, clamped to dtype's range (a plain cast may give NaN beyond it), rounded to nearest even."""
    return (x.float() / scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)

FORMATS = {"x": E4M3, "g": E5M2}  # of activations and weights; of gradients

@torch.library.custom_op("nanogpt::quantize", mutates_args=())
def quantize_op(x: Tensor, scale: float, kind: str) -> tuple[Tensor, Tensor]:
    """x (M, N) -> `quantize`d to one of FORMATS, as bytes (M, N), and transposed (N, M)."""
    if x.dtype != torch.bfloat16 or not x.is_cuda or not native("fp8", x.device):  # Triton 3.6 writes wrong float32
        y = quantize(x.contiguous(), scale, FORMATS[kind]).view(torch.uint8)
        return y, transpose(y)
    y, y_t = (x.new_empty(shape, dtype=FORMATS[kind]) for shape in (x.shape, x.shape[::-1]))
    transpose_kernel[tiles(x)](x.contiguous(), y_t, *x.shape, 64, 128, y, 1 / scale, torch.finfo(y.dtype).max,
                               num_warps=8)
    return y.view(torch.uint8), y_t.view(torch.uint8)

quantize_op.register_fake(lambda x, *_: tuple(x.new_empty(s, dtype=torch.uint8) for s in (x.shape, x.shape[::-1])))

def transpose(x: Tensor) -> Tensor:
    """(M, N) bytes -> (N, M), contiguous, in tiles: the framework's copy would write single bytes."""
    if not x.is_cuda:
        return x.t().clone(memory_format=torch.contiguous_format)
    out = x.new_empty(x.shape[::-1])
    transpose_kernel[tiles(x)](x, out, *x.shape, 64, 128, num_warps=8)
    return out

def tiles(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(len(x), 64), triton.cdiv(x.size(1), 128)

@lru_cache(None, typed=True)  # 1 and 1.0 are not the same
def device_numbers(device: torch.device, *values: float) -> Tensor:
    """(n,) on the device, copied there once: a CUDA graph may read it again and again."""
    return torch.tensor(values, device=device)

@torch.library.custom_op("nanogpt::product", mutates_args=())
def product_op(a: Tensor, b_t: Tensor, a_s: Tensor | None, b_s: Tensor | None, dtype: torch.dtype, kinds: str,
               scale: float = 1.0) -> Tensor:
    """a (M, K) times b_t (N, K) transposed, times both scales or else `scale` -> (M, N). Rounded numbers in bf16, or in
    FP8, as bytes of these two of FORMATS, as opcheck cannot compare FP8. Sums are quick without gradients."""
    kinds = [FORMATS[kind] for kind in kinds]
    if a_s is None:
        a_s, b_s = device_numbers(a.device, scale), device_numbers(a.device, 1.0)
    if a.dtype == torch.bfloat16 or not native("fp8", a.device):  # all numbers are exact in bf16, and so are products
        a, b_t = ((x.view(kind) if x.dtype == torch.uint8 else x).bfloat16() for x, kind in zip((a, b_t), kinds))
        y = torch.mm(a, b_t.t(), out_dtype=torch.float32) if a.is_cuda else a.float() @ b_t.float().t()
        return (y * (a_s * b_s)).to(dtype)
    a, b_t = (x if x.is_contiguous() else transpose(x.t().contiguous()) for x in (a, b_t))
    return torch._scaled_mm(a.view(kinds[0]), b_t.view(kinds[1]).t(), a_s, b_s, out_dtype=dtype,
                            use_fast_accum=kinds == [E4M3, E4M3])

product_op.register_fake(lambda a, b_t, a_s, b_s, dtype, *_: a.new_empty(len(a), len(b_t), dtype=dtype))

def scaled_product(a: Tensor, b_t: Tensor, scale: float, dtype: torch.dtype, kinds: str) -> Tensor:
    return product_op(a, b_t, None, None, dtype, kinds, scale)

@torch.library.custom_op("nanogpt::mm", mutates_args=())
def mm_op(x: Tensor, w: Tensor, x_s: float, w_s: float, grad_s: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, D) times w (V, D) transposed in FP8 -> (T, V) in bf16, and for backward both quantised, transposed."""
    (x8, x8_t), (w8, w8_t) = quantize_op(x, x_s, "x"), quantize_op(w, w_s, "x")
    return scaled_product(x8, w8, x_s * w_s, torch.bfloat16, "xx"), x8_t, w8_t

mm_op.register_fake(lambda x, w, *_: (x.new_empty(len(x), len(w), dtype=torch.bfloat16),
                                      *(y.new_empty(y.shape[::-1], dtype=torch.uint8) for y in (x, w))))

@torch.library.custom_op("nanogpt::mm_backward", mutates_args=())
def mm_backward_op(g8: Tensor, x8_t: Tensor, w8_t: Tensor, grad_s: Tensor, x_s: float,
                   w_s: float) -> tuple[Tensor, Tensor]:
    """g8 (T, V) in units of grad_s, x8_t (D, T), w8_t (D, V) -> gradients of x (T, D), bf16, and w (V, D), float32."""
    x_s, w_s = (device_numbers(g8.device, scale) for scale in (x_s, w_s))
    return (product_op(g8, w8_t, grad_s, w_s, torch.bfloat16, "gx"),
            product_op(g8.t(), x8_t, grad_s, x_s, torch.float32, "gx"))

mm_backward_op.register_fake(lambda g8, x8_t, w8_t, *_: (
    g8.new_empty(x8_t.shape[::-1], dtype=torch.bfloat16), g8.new_empty(w8_t.shape[::-1], dtype=torch.float32)))

def _mm_setup(ctx, inputs, output):
    ctx.scales, ctx.dtypes = inputs[2:], [x.dtype for x in inputs[:2]]
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)  # the quantised outputs get no gradient

def _mm_autograd(ctx, g, *_):
    x_s, w_s, grad_s = ctx.scales
    g8, _ = torch.ops.nanogpt.quantize(g, grad_s, "g")
    grads = torch.ops.nanogpt.mm_backward(g8, *ctx.saved_tensors, torch.full((), grad_s, device=g.device), x_s, w_s)
    return *(grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes)), None, None, None

mm_op.register_autograd(_mm_autograd, setup_context=_mm_setup)

# The loss. A sigmoid caps the logits to (0, 23) (records 18, 54), so exponentials cannot overflow and their sum needs
# no maximum first. One kernel reads a token's logits twice, the second time from cache, and leaves the loss and its
# gradient, in e5m2: the gradient never exists in bf16 and nothing is recomputed in backward (records 67, 79).
# In training the vocabulary is a sample of it (section 4), whose logits have a bias.

CAP, CAP_SHIFT, CAP_WIDTH = 23.0, 5.0, 7.5

def softcap(z: Tensor) -> Tensor:
    """Logits (..., V), capped, in float32 or wider."""
    return CAP * torch.sigmoid((z.to(torch.promote_types(z.dtype, torch.float32)) + CAP_SHIFT) / CAP_WIDTH)

@torch.library.custom_op("nanogpt::loss", mutates_args=())
def loss_op(z: Tensor, targets: Tensor, grad_s: float, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """z (T, V) before the cap, targets (T,), bias (V,) or none, which is added after the cap -> cross-entropy (T,)
    float32, and its gradient (T, V) / grad_s in e5m2. That is at most CAP / (4 CAP_WIDTH grad_s), which must be in
    e5m2's range. Biases of targets must be 0. A target of -1 is none: its loss and gradient are 0."""
    if z.is_cuda:
        loss, g8 = z.new_empty(len(z), dtype=torch.float32), torch.empty_like(z, dtype=torch.uint8)
        loss_kernel[len(z),](z, targets, loss, g8.view(E5M2), bias, 1 / grad_s, z.shape[1],
                             CAP, CAP_SHIFT, CAP_WIDTH, FAST=True, num_warps=4)
        return loss, g8
    known, right = (targets >= 0).float(), targets.clamp(min=0)
    logits = softcap(z) if bias is None else softcap(z) + bias
    lse = logits.logsumexp(-1)
    loss = lse - logits.gather(-1, right[:, None])[:, 0]
    s = torch.sigmoid((z.float() + CAP_SHIFT) / CAP_WIDTH)
    p = torch.exp(logits - lse[:, None]) - F.one_hot(right, z.shape[1])
    g = p * s * (1 - s) * (CAP / CAP_WIDTH) * known[:, None]
    return loss * known, quantize(g, grad_s, E5M2).view(torch.uint8)

loss_op.register_fake(lambda z, *_: (z.new_empty(len(z), dtype=torch.float32), z.byte()))

class FP8HeadLoss(torch.autograd.Function):
    """x (T, D), w (V, D), targets (T,) -> cross-entropy of the capped logits, summed over T; all products in FP8."""

    @staticmethod
    def forward(ctx, x, w, targets, bias=None):
        z, x8_t, w8_t = torch.ops.nanogpt.mm(x, w, *HEAD_SCALES)
        loss, g8 = torch.ops.nanogpt.loss(z, targets, HEAD_SCALES[2], bias)
        ctx.save_for_backward(g8, x8_t, w8_t)
        ctx.dtype = w.dtype
        return loss.sum()

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_w = torch.ops.nanogpt.mm_backward(*ctx.saved_tensors, grad * HEAD_SCALES[2], *HEAD_SCALES[:2])
        return grad_x.to(ctx.dtype), grad_w.to(ctx.dtype), None, None

if triton is not None:

    @triton.jit
    def transpose_kernel(x_ptr, out_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, y_ptr=None, inv_scale=1.0,
                         LIMIT: tl.constexpr = None):
        """With y_ptr quantises first, and writes that, too."""
        rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # 64-bit: T x V overflows 32-bit offsets
        cols = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)
        inside = (rows[:, None] < M) & (cols[None, :] < N)
        x = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=inside, other=0)
        if y_ptr is not None:
            x = tl.clamp(x.to(tl.float32) * inv_scale, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            x = x.to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + rows[:, None] * N + cols[None, :], x, mask=inside)
        tl.store(out_ptr + cols[:, None] * M + rows[None, :], tl.trans(x), mask=tl.trans(inside))

    @triton.jit
    def tanh(x, FAST: tl.constexpr):
        if FAST:  # one instruction
            return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
        return 2 * tl.sigmoid(2 * x) - 1

    @triton.jit
    def loss_kernel(z_ptr, target_ptr, loss_ptr, g_ptr, bias_ptr, inv_scale, V, CAP, SHIFT, WIDTH, FAST: tl.constexpr,
                    TILE: tl.constexpr = 2048):
        """Instructions limit it: logits are a + a tanh, exponentials are of 2, and factors are in their exponents."""
        LOG2E: tl.constexpr = 1.4426950408889634
        row, a, slope, shift = tl.program_id(0).to(tl.int64), CAP / 2, 0.5 / WIDTH, SHIFT * 0.5 / WIDTH
        z_ptr += row * V
        g_ptr += row * V
        total = tl.zeros((TILE,), tl.float32)
        for begin in range(0, V, TILE):
            cols = begin + tl.arange(0, TILE)
            z = tl.load(z_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
            power = tanh(z * slope + shift, FAST) * (a * LOG2E) - a * LOG2E
            if bias_ptr is not None:
                power += tl.load(bias_ptr + cols, mask=cols < V) * LOG2E
            total += tl.where(cols < V, tl.exp2(power), 0.0)
        lse, target = 2 * a + tl.log(tl.sum(total)), tl.load(target_ptr + row)
        factor = tl.where(target < 0, 0.0, a / (2 * WIDTH) * inv_scale)  # dlogit/dz = (1 - t^2) a / (2 width)
        power = (a - lse) * LOG2E + tl.log2(factor)
        for begin in range(0, V, TILE):
            cols = begin + tl.arange(0, TILE)
            z = tl.load(z_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
            t = tanh(z * slope + shift, FAST)
            at = t * (a * LOG2E) + power
            if bias_ptr is not None:
                at += tl.load(bias_ptr + cols, mask=cols < V) * LOG2E
            tl.store(g_ptr + cols, (tl.exp2(at) * (1 - t * t)).to(tl.float8e5), mask=cols < V)
        t = tanh(tl.load(z_ptr + target, mask=target >= 0).to(tl.float32) * slope + shift, FAST)
        tl.store(loss_ptr + row, tl.where(target < 0, 0.0, lse - a - a * t))
        tl.debug_barrier()  # the row is written
        g = (tl.exp2(t * (a * LOG2E) + power) - factor) * (1 - t * t)
        tl.store(g_ptr + target, g.to(tl.float8e5), mask=target >= 0)

# Recipes for projections: pure functions on tensors. An FP8 operand is (bytes, or bf16 to emulate, and 1 / scale).
GRIDS = {E4M3: (3, -6), E5M2: (2, -14), "e2m1": (1, 0)}  # bits of mantissa, smallest exponent of normal numbers

def round_to(x: Tensor, grid, noise: Tensor | None = None) -> Tensor:
    """float32 x in the grid's range -> its nearest number, ties to even; with uniform noise one, x on average."""
    mantissa, smallest = GRIDS[grid]
    exponent = ((x.view(torch.int32) >> 23) & 255).clamp(min=smallest + 127)
    step = ((exponent - mantissa) << 23).view(torch.float32)  # between neighbours: a power of two, on any device
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

def fp8_backward(g: Tensor, amax: Tensor, saved: tuple, native: bool) -> tuple[Tensor, Tensor]:
    (x8, x_s, w8, w_s), (g8, g_s) = saved, fp8_operand(g, fp8_scale(amax, E5M2), E5M2, native)
    return product_op(g8, w8.t(), g_s, w_s, g.dtype, "gx"), product_op(g8.t(), x8.t(), g_s, x_s, g.dtype, "gx")

def nvfp4_operand(x: Tensor, square: bool = False, stochastic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """x (R, K) -> e2m1 numbers (R / r, r, K / 16, 16), e4m3 scales (R / r, 1, K / 16, 1), amax; r is 16 if `square`."""
    (R, K), r, x, largest = x.shape, 16 if square else 1, x.float(), torch.finfo(torch.float32).max
    amax, blocks = x.abs().amax(), x.reshape(R // r, r, K // 16, 16)
    encode = torch.where(amax == 0, 1, (6 * 448 / amax.double()).float().clamp(max=largest))
    scale = round_to((blocks.abs().amax((1, 3), keepdim=True) * (encode * (1 / 6))).clamp(max=448), E4M3)
    y = (blocks * inverse(scale * inverse(encode)).clamp(max=largest)).clamp(-6, 6)
    return round_to(y, "e2m1", torch.rand_like(y) if stochastic else None), scale, amax

def nvfp4_mm(a: tuple, b_t: tuple, dtype: torch.dtype, native: bool) -> Tensor:
    a_s, b_s = (amax / (6 * 448) for _, _, amax in (a, b_t))
    if native:  # never run
        (a, a_scales), (b_t, b_scales) = (pack_nvfp4(q, scale) for q, scale, _ in (a, b_t))
        return (torch._scaled_mm(a, b_t.t(), a_scales, b_scales, out_dtype=torch.float32) * (a_s * b_s)).to(dtype)
    a, b_t = ((q * scale).bfloat16().flatten(2).flatten(0, 1) for q, scale, _ in (a, b_t))
    return product_op(a, b_t, a_s, b_s, dtype, "xx")

def pack_nvfp4(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """As tensor cores want them: two codes a byte, the first in the low half, and scales in tiles of 32 x 4 x 4."""
    q, scale = (x.expand(-1, q.size(1), -1, -1).flatten(2).flatten(0, 1) for x in (2 * q, scale))
    c = (torch.where(q.abs() > 4, (2 * q.abs().log2()).floor(), q.abs()) + 8 * (q < 0)).to(torch.uint8)
    tiles = F.pad(scale, (0, -scale.size(1) % 4, 0, -len(scale) % 128)).unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))
    return (c[:, ::2] | c[:, 1::2] << 4).view(torch.float4_e2m1fn_x2), tiles.permute(0, 3, 2, 1, 4).flatten().to(E4M3)

def hadamard(x: Tensor) -> Tensor:
    """x (R, C) -> each 16 numbers of a row times diag(signs) H16 / 4, which is orthogonal."""
    i = torch.arange(16, device=x.device)  # where indices share an odd number of bits, Sylvester's H16 is negative
    negative = ((i[:, None] & i)[..., None] >> i[:4]).sum(-1) + (0xD7E8 >> i)[:, None]  # the signs were drawn once
    return (x.float().reshape(-1, 16) @ (0.25 - 0.5 * (negative & 1))).view(x.shape)

def nvfp4_backward(g: Tensor, x: Tensor, w: Tensor, native: bool, parts: tuple) -> tuple[Tensor, Tensor]:
    g_t, x_t = (hadamard(t.t()) if "rht" in parts else t.t() for t in (g, x))
    w_t = nvfp4_operand(w.t(), "2d" in parts)  # square blocks: the numbers of fprop
    grad_x = nvfp4_mm(nvfp4_operand(g, stochastic="sr" in parts), w_t, g.dtype, native)
    return grad_x, nvfp4_mm(nvfp4_operand(g_t, stochastic="sr" in parts), nvfp4_operand(x_t), g.dtype, native)

class LowLinear(torch.autograd.Function):
    """x (T, K), w (N, K) -> x w^T (T, N) by a recipe. seen (3,) gets amaxes as gradient: NaN there names a culprit."""

    @staticmethod
    def forward(ctx, x, w, seen, w8, w8_scale, recipe, native, parts):
        amax, ctx.how = x.abs().amax().float(), (recipe, native, parts)
        if recipe == "fp8":
            saved = *fp8_operand(x, fp8_scale(amax, E4M3), E4M3, native), w8, w8_scale
            y = product_op(saved[0], w8, saved[1], w8_scale, x.dtype, "xx")
        else:
            y, saved = nvfp4_mm(nvfp4_operand(x), nvfp4_operand(w, "2d" in parts), x.dtype, native), (x, w)
        ctx.save_for_backward(amax, w.abs().amax().float() if w8 is None else w8_scale, *saved)
        return y

    @staticmethod
    def backward(ctx, g):
        (x_amax, w_amax, *saved), amax, (recipe, native, parts) = ctx.saved_tensors, g.abs().amax().float(), ctx.how
        grads = fp8_backward(g, amax, saved, native) if recipe == "fp8" else nvfp4_backward(g, *saved, native, parts)
        return *grads, torch.stack([w_amax, x_amax, amax]), *[None] * 5

# Constant scales (record 89): of a projection's input, of weights, and of the gradient of a loss that is a sum. Squares
# are near 10 (rms), but on a document's first token up to 12,700: training must not clamp what validation does not.
# Powers of two, so that only rounding loses something; 448 / 16 is just above sqrt(768), the largest of normalised x.
STATIC_X = {"qkv": 1 / 16, "o": 1 / 4, "fc": 1 / 16, "proj": 64.0}
STATIC_W, STATIC_GRAD = 2.0**-8, 2.0**-12

class StaticLinear(torch.autograd.Function):
    """x (T, K), w (N, K) -> x w^T (T, N), all products in FP8. Backward's sums, over N and T, want them transposed."""

    @staticmethod
    def forward(ctx, x, w, x_s):
        x8, x8_t = torch.ops.nanogpt.quantize(x, x_s, "x")
        w8, w8_t = torch.ops.nanogpt.quantize(w, STATIC_W, "x")
        ctx.save_for_backward(x8_t, w8_t)
        ctx.x_s = x_s
        return scaled_product(x8, w8, x_s * STATIC_W, x.dtype, "xx")

    @staticmethod
    def backward(ctx, g):
        (x8_t, w8_t), (g8, g8_t) = ctx.saved_tensors, torch.ops.nanogpt.quantize(g, STATIC_GRAD, "g")
        return (scaled_product(g8, w8_t, STATIC_GRAD * STATIC_W, g.dtype, "gx"),
                scaled_product(g8_t, x8_t, STATIC_GRAD * ctx.x_s, g.dtype, "gx"), None)

@torch.library.custom_op("nanogpt::squares", mutates_args=())
def squares_op(a: Tensor, b: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x (T, D), up^T (F, D) -> h = relu(x up)^2, in e4m3, (T, F) and transposed. With h: gradient (T, D), down^T (F, D)
    -> that of x up, 2 sqrt(h) (gradient down), in e5m2, likewise; none where h rounded to 0, below 1/16. One kernel
    (records 59, 87)."""
    (M, K), N, kind, h_s = a.shape, len(b), "x" if h is None else "g", STATIC_X["proj"]
    if not a.is_cuda or torch.cuda.get_device_capability(a.device) != (9, 0):  # the kernel's tiles are for Hopper
        a_s = STATIC_X["fc"] if h is None else STATIC_GRAD
        y = scaled_product(a, b, a_s * STATIC_W, torch.float32, kind + "x")
        y = F.relu(y).square() if h is None else 2 * (h.view(E4M3).float() * h_s).sqrt() * y
        return quantize_op(y, h_s if h is None else STATIC_GRAD, kind)
    y, y_t = a.new_empty(M, N, dtype=FORMATS[kind]), a.new_empty(N, M, dtype=FORMATS[kind])
    operands = a.view(y.dtype), b.view(E4M3), y if h is None else h.view(E4M3), y, y_t
    processors = torch.cuda.get_device_properties(a.device).multi_processor_count
    scale = STATIC_X["fc"] * STATIC_W * h_s**-0.5 if h is None else 2 * STATIC_W * h_s**0.5
    squares_kernel[processors,](*(TensorDescriptor.from_tensor(x, [128, 128]) for x in operands), scale, M, N, K,
                              h is not None, torch.finfo(y.dtype).max, 128, num_warps=8, num_stages=4)
    return y.view(torch.uint8), y_t.view(torch.uint8)

squares_op.register_fake(lambda a, b, h=None: (a.new_empty(len(a), len(b)), a.new_empty(len(b), len(a))))

if triton is not None:

    @triton.jit
    def squares_kernel(a, b, h, y, y_t, scale, M, N, K, BACKWARD: tl.constexpr, LIMIT: tl.constexpr,
                       TILE: tl.constexpr):
        columns = tl.cdiv(N, TILE)
        for tile in tl.range(tl.program_id(0), tl.cdiv(M, TILE) * columns, tl.num_programs(0), flatten=True):
            row, col = tile // columns * TILE, tile % columns * TILE
            sums = tl.zeros((TILE, TILE), tl.float32)
            for k in range(0, K, TILE):
                sums = tl.dot(a.load([row, k]), b.load([col, k]).T, sums)  # quick, backward too: K is only D
            z = sums * scale
            if BACKWARD:
                z *= tl.sqrt(h.load([row, col]).to(tl.float32))
            else:
                z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
                z *= z
            z8 = tl.clamp(z, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(y.dtype)
            y.store([row, col], z8)
            y_t.store([col, row], z8.T)

class StaticMLP(torch.autograd.Function):
    """x (T, D), up, down (D, F) -> relu(x up)^2 down^T (T, D), all products in FP8; h exists in FP8 only."""

    @staticmethod
    def forward(ctx, x, up, down):
        x8, x8_t = torch.ops.nanogpt.quantize(x, STATIC_X["fc"], "x")
        (up8, up8_t), (down8, down8_t) = (torch.ops.nanogpt.quantize(w, STATIC_W, "x") for w in (up, down))
        h8, h8_t = torch.ops.nanogpt.squares(x8, up8_t)
        ctx.save_for_backward(x8_t, up8, down8_t, h8, h8_t)
        return scaled_product(h8, down8, STATIC_X["proj"] * STATIC_W, x.dtype, "xx")

    @staticmethod
    def backward(ctx, g):
        x8_t, up8, down8_t, h8, h8_t = ctx.saved_tensors
        g8, g8_t = torch.ops.nanogpt.quantize(g, STATIC_GRAD, "g")
        z8, z8_t = torch.ops.nanogpt.squares(g8, down8_t, h8)  # the gradient of x up
        return (scaled_product(z8, up8, STATIC_GRAD * STATIC_W, g.dtype, "gx"),
                scaled_product(x8_t, z8_t, STATIC_X["fc"] * STATIC_GRAD, g.dtype, "xg"),
                scaled_product(g8_t, h8_t, STATIC_GRAD * STATIC_X["proj"], g.dtype, "gx"))

def linear(x: Tensor, w: Tensor, low: dict[str, tuple] | None, name: str, factor: Tensor | None = None) -> Tensor:
    """x (T, K), w (N, K) -> factor x w^T (T, N), by the layer's recipe for this projection if there is one."""
    if low and name in low:  # w was rounded without the factor, which is learned: so it multiplies what comes out
        seen, w8, *how = low[name]  # FP8 weights of the banks that the product joins, if it has any
        if how[1] == "fp8-static":
            return StaticLinear.apply(x, w if factor is None else factor * w, STATIC_X[name])
        y = LowLinear.apply(x, w, seen, torch.cat(w8) if len(w8) > 1 else w8[0] if w8 else None, *how)
        return y if factor is None else factor * y
    return F.linear(x, w if factor is None else factor * w)

# ------------------------------------------------------------------------------------------------------------------
# 3. Attention: causal, inside one document, over a sliding window of whole blocks
#
# Query t sees key s when s <= t, both lie in one document, and s's block is among the last `window` blocks up to t's.
# FlexAttention skips blocks that hold nothing; elsewhere scaled-dot-product attention computes the same mask block row
# by block row. Windows are plain numbers here, outside of every compiled graph, so a new window compiles nothing.

BLOCK = 128  # tokens

class View(NamedTuple):
    """How far attention sees, and how well products compute."""
    windows: dict[str, int]  # blocks
    freq: tuple[float, ...]  # rotary frequencies, radians a position
    scale: float  # of the scores
    plain: bool = False  # without recipes of low precision

def block_lists(docs: Tensor, windows: Tensor) -> tuple[Tensor, ...]:
    """docs (T,), windows (W,) in blocks -> for key and for query blocks, seen in part and in full: how many there are
    (W, n), and which (W, n, n), int32, of which the first so many count. Documents lie one after the other, so the
    blocks that a block sees, or sees fully, are ranges: two binary searches."""
    first, last = docs[::BLOCK].contiguous(), docs[BLOCK - 1 :: BLOCK].contiguous()  # (n,) document of a block's ends
    row = torch.arange(len(first), device=docs.device)
    oldest, newest = row - (windows[:, None] - 1), row + (windows[:, None] - 1)  # (W, n)
    see = torch.searchsorted(last, first).maximum(oldest)  # first key block
    full = torch.searchsorted(first, last).minimum(row).maximum(oldest)  # first one that is seen fully, up to row - 1
    seen = (torch.searchsorted(first, last, right=True) - 1).minimum(newest)  # last query block
    fully = (torch.searchsorted(last, first, right=True) - 1).maximum(row).minimum(newest)

    def blocks(begin: Tensor, end: Tensor, own: int) -> tuple[Tensor, Tensor]:  # begin ... end - 1, and first the own
        which = torch.where(row < own, row[:, None], (begin[..., None] + row - own).clamp(max=len(row) - 1))
        return (end - begin + own).int(), which.int()

    after = (row + 1).expand_as(fully)
    return *blocks(see, full, 1), *blocks(full, row, 0), *blocks(fully + 1, seen + 1, 1), *blocks(after, fully + 1, 0)

@torch.no_grad()  # so that training and validation share the graphs of `lists`
def flex_masks(docs: Tensor, windows: dict[str, int], lists: Callable = block_lists) -> dict[str, BlockMask]:
    """docs (T,) -> a BlockMask a window, in blocks (FlexAttention: record 12). Full blocks skip the element mask."""
    causal_document = lambda b, h, q, kv: (q >= kv) & (docs[q] == docs[kv])
    numbers = lists(docs, device_numbers(docs.device, *windows.values()))
    return {name: BlockMask((len(docs),) * 2, *(t[i][None, None] for t in numbers), (BLOCK, BLOCK), causal_document)
            for i, name in enumerate(windows)}

def sdpa_masks(docs: Tensor, windows: dict[str, int]) -> dict[str, Tensor]:
    """docs (T,) -> per window a bool mask (n, 1, BLOCK, window * BLOCK) of each query block over the last blocks."""
    masks = {}
    for name, window in windows.items():
        window = min(window, len(docs) // BLOCK)
        keys = F.pad(docs, ((window - 1) * BLOCK, 0), value=-1).unfold(0, window * BLOCK, BLOCK)  # (n, window * BLOCK)
        masks[name] = (docs.view(-1, BLOCK, 1) == keys[:, None]).tril((window - 1) * BLOCK)[:, None]  # causal
    return masks

def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor, scale: float) -> Tensor:
    """q, k, v (T, H, d) -> (T, H, d), by FlexAttention for a BlockMask, else by SDPA."""
    if isinstance(mask, BlockMask):
        y = flex_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), block_mask=mask, scale=scale)
        return y[0].transpose(0, 1)
    (T, H, d), (n, _, _, span), dtype = q.shape, mask.shape, q.dtype
    if not q.is_cuda:  # the CPU's SDPA takes up to three times as long for a backward pass in bf16 as in float32
        q, k, v = (t.to(torch.promote_types(dtype, torch.float32)) for t in (q, k, v))
    q = q.view(n, BLOCK, H, d).transpose(1, 2)
    k, v = (F.pad(t, (0, 0, 0, 0, span - BLOCK, 0)).unfold(0, span, BLOCK).mT for t in (k, v))  # (n, H, span, d)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return y.transpose(1, 2).reshape(T, H, d).to(dtype)

# ------------------------------------------------------------------------------------------------------------------
# 4. The model, in two tables: which layer has what, and which parameters there are. Nothing else names a layer.

class Layer(NamedTuple):
    attn: bool = True  # has attention
    window: str = "short"  # "short" or "long"
    paired: bool = False  # heads h and h + H/2 share a softmax: two keys for each token (record 58)
    offset: bool = False  # half of each key is the previous token's: finds what came after an equal token (record 49)
    ve: int | None = None  # value embedding that is added to v (record 14)
    source: int | None = None  # attention reads this layer's output instead of the stream (record 77)
    skip: int | None = None  # layer whose output is added (record 11)
    xsa: bool = False  # attention gives up what points along the token's own value (record 82)
    recipes: dict[str, str] = {}  # of projections that do not follow --precision

TOPOLOGIES: dict[str, list[Layer]] = {
    "gpt2": [
        Layer(paired=True),
        Layer(ve=0, xsa=True),
        Layer(ve=1, paired=True),
        Layer(window="long", offset=True, xsa=True),
        Layer(xsa=True),
        Layer(paired=True),
        Layer(attn=False, skip=3),
        Layer(xsa=True),
        Layer(ve=2, source=7, xsa=True),
        Layer(ve=3, source=7, paired=True),
        Layer(ve=4, source=7, window="long", offset=True, xsa=True),
    ],
    "laptop": [Layer(ve=0), Layer(window="long", offset=True), Layer(), Layer(ve=1, window="long", offset=True)],
    "char": [Layer(ve=0), *[Layer()] * 4, Layer(ve=1)],
}

GATE_DIM = 12  # channels that steer a gate (record 28)
SIGNS = 8192  # rows of random signs that tell bigrams of one hash apart (record 83)
SCALARS = {  # mixing weights of a layer, columns of one parameter, and their initial values
    "x0": 0.0, "bigram": 0.05, "v": 0.5, "o": 1.0, "attn": 1.1**0.5, "skip": 0.18, "mlp": 1.1**0.5, "down": 1.0}

class Param(NamedTuple):
    shape: tuple[int, ...]  # Muon treats it as a stack of matrices
    optimizer: str  # "muon" or "adam"
    lr: float | tuple[float, ...]  # Muon's: of a stack's matrices in turn
    init: Callable[[Tensor], None]  # fills a float32 tensor in place
    decay: float = 0.0  # weight decay at full learning rate
    betas: tuple[float, float] = (0.9, 0.99)  # Adam's
    update: str = "slice"  # a rank updates its part of dimension 0; "all": all; "rows": its columns of looked-up rows

def parameter_table(c: Config) -> dict[str, Param]:
    """Every parameter of the model, in the order in which the optimizer works on them. Matrices first and last: their
    updates take long enough for the rest to be summed meanwhile, and then handed out."""
    layers = TOPOLOGIES[c.topology]
    num_attn, num_ve = sum(layer.attn for layer in layers), 1 + max((layer.ve or 0) for layer in layers)
    D, H, V, L = c.model_dim, c.num_heads, c.vocab_size, len(layers)

    uniform = lambda bound: lambda w: w.uniform_(-bound, bound)
    normal = lambda deviation: lambda w: w.normal_(std=deviation)
    rows = lambda *values: lambda w: w.copy_(torch.tensor(values))
    zero, lr, wd = nn.init.zeros_, c.muon_lr, c.muon_decay * c.muon_lr
    narrow = uniform(3**0.5 * 0.5 * D**-0.5)  # half the usual deviation: a bit better (record 21)
    up_and_down = lambda w: (narrow(w[::2]), zero(w[1::2]))  # both (D, F): y = relu(x up)^2 down^T
    late = dict(lr=0.25 * c.head_lr, update="all")
    rare = dict(betas=(0.75, 0.95), decay=0.025 * c.table_lr, update="rows")
    return {
        "mlp": Param((L * 2, D, c.mlp_dim), "muon", (2 * lr, 4 * lr), up_and_down, wd),
        "lm_head": Param((V, D), "adam", c.head_lr, normal(0.005), betas=(0.5, 0.95), decay=0.75 * c.head_lr),
        "value_embeds": Param((V, num_ve * D), "adam", c.table_lr, normal(0.01), **rare),
        "bigrams": Param((c.bigram_rows, D), "adam", c.table_lr, zero, **rare),
        "qk": Param((num_attn * H, 2 * D // H, D), "muon", (lr,), narrow, wd),  # pairs of heads (record 80)
        "vo": Param((num_attn * 2, D, D), "muon", (lr,), narrow, wd),
        "scalars": Param((L, len(SCALARS)), "adam", c.scalar_lr, rows(*SCALARS.values()), update="all"),
        "smear": Param((1,), "adam", c.scalar_lr, zero, update="all"),
        "late_in": Param((64, D), "adam", init=uniform(D**-0.5), **late),
        "late_out": Param((5, 64), "adam", init=zero, **late),
        "late_bias": Param((5,), "adam", init=rows(0, 0, -5, 0, 0), **late),  # a tenth of it counts
        "xsa": Param((num_attn, H), "adam", c.scalar_lr, zero, update="all"),
        "gates": Param((num_attn, 2, H, GATE_DIM), "adam", c.head_lr, zero, update="all"),
    }

def norm(x: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)

def rope_table(T: int, freq: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (T, 1, d) of pairs (j, j + d/2). Those from j = d/4 on do not turn: they are position-free."""
    angle = torch.arange(T, device=freq.device).double()[:, None, None] * F.pad(freq, (0, head_dim // 2 - len(freq)))
    return torch.cat((angle.cos(),) * 2, -1).to(dtype), torch.cat((angle.sin(), -angle.sin()), -1).to(dtype)

def norm_and_rotate(x: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Rotary embedding of scale * norm(x), x (..., d). It keeps the length, so x's serves, and one kernel does all."""
    square = x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1, keepdim=True) + 1e-6
    return ((x * cos + x.roll(x.size(-1) // 2, -1) * sin) * (square.rsqrt() * scale)).type_as(x)

def attention(u, peek, ve, qk, vo, w, gates, xsa, mask, cos, sin, scale, begins, paired: bool, low=None) -> Tensor:
    """u (T, D), the normalised input, and its first channels, `peek` (T, GATE_DIM), which steer gates -> (T, D).
    `begins` (T,) marks document starts, None: no key offset."""
    (T, D), H, gates = u.shape, gates.size(1), gates.to(u.dtype)
    late = low and "qkv" in low and low["qkv"][3] != "fp8-static"
    qkv = torch.cat((qk.reshape(2 * D, D), vo[0] if late else w["v"] * vo[0]))  # `late`: see `linear`
    q, k, v = linear(u, qkv, low, "qkv").view(T, 3, 1 + paired, H // (1 + paired), D // H).unbind(1)
    cos, sin = (table.view(T, 1 + paired, 1, D // H) for table in (cos, sin))
    q, k = norm_and_rotate(q, cos, sin, scale), norm_and_rotate(k, cos, sin)  # bounded scores (Henry et al. 2020)
    if begins is not None:
        turning = torch.arange(D // H, device=u.device) % (D // H // 2) < D // H // 4
        k = torch.where(begins[:, None, None, None] | turning, k, k.roll(1, 0))
    v = w["v"] * v if late else v
    if ve is not None:
        gate = 2 * torch.sigmoid(F.linear(torch.cat((peek[:, : GATE_DIM // 2], ve[:, : GATE_DIM // 2]), 1), gates[1]))
        v = v + (gate[..., None] * ve.reshape(T, H, D // H)).view_as(v)
    y = attend(*(z.flatten(0, 1) for z in (q, k, v)), mask, scale=1.0).view(T, H, D // H)
    if xsa is not None:
        v = v.view_as(y)
        wide = torch.promote_types(v.dtype, torch.float32)  # an outlier's |v|^2 would overflow fp16
        yv, vv = (x.sum(-1, keepdim=True, dtype=wide) for x in (y * v, v.square()))
        y = y - torch.tanh(xsa)[:, None] * (yv / vv.clamp(min=1e-8)).type_as(y) * v
    gate = torch.sigmoid(F.linear(peek, gates[0]))  # (T, H): lets a head say nothing (record 28)
    return linear((y * gate[..., None]).reshape(T, D).type_as(u), vo[1], low, "o", w["o"])

def mlp(x, up, down, factor, low) -> Tensor:
    """x (T, D), up, down (D, F) -> factor relu(x up)^2 down^T (T, D)."""
    if low and all(name in low and low[name][3] == "fp8-static" for name in ("fc", "proj")):
        return StaticMLP.apply(x, up, factor * down)
    hidden = F.relu(linear(x, up.t(), low, "fc")).square()  # (T, F)
    return linear(hidden, down, low, "proj", factor)

def block(x, u, peek, inject, skip, ve, qk, vo, gates, xsa, mask, up, down, scalars, cos, sin, scale, begins,
          paired: bool, low=None) -> tuple[Tensor, Tensor, Tensor]:
    """One layer: the stream x (T, D), and u and peek as `attention` reads them -> the new stream, its u and its peek.
    inject, skip, ve (T, D) may be None; without attention so are qk (H, 2d, D), vo (2, D, D), gates (2, H, GATE_DIM).
    up, down (D, F); scalars as SCALARS names them. Pure, so that one compiled graph serves all layers of a kind."""
    w = dict(zip(SCALARS, scalars.unbind()))
    if qk is not None:
        y = attention(u, peek, ve, qk, vo, w, gates, xsa, mask, cos, sin, scale, begins, paired, low)
        x = w["attn"] * x + y + inject
    if skip is not None:
        x = x + w["skip"] * skip
    x = w["mlp"] * x + mlp(norm(x), up, down, w["down"], low)
    u = norm(x)
    return x, u, u[:, :GATE_DIM].clone()  # a tensor of its own, as the gradient of a slice would be as large as u

def before(tokens: Tensor, begins: Tensor) -> Tensor:
    """(T,) the token before each one, 0 where a document begins."""
    return torch.where(begins, 0, tokens.roll(1))

def embed_inputs(tokens, begins, embed, bigram, signs, smear, weights, layers: tuple):
    """tokens (T,), begins (T,) marking document starts, bigram (T, D) -> the stream's input x0 (T, D), of norm 1, its
    first channels, and what the `layers` add, x0 and bigram by two of all their `weights`. Nothing crosses a border."""
    x = F.embedding(tokens, embed)
    x0 = norm(x + smear.to(x.dtype) * torch.where(begins[:, None], 0, x.roll(1, 0)))  # smear (record 34)
    bigram = bigram * signs[(tokens ^ before(tokens, begins)) % SIGNS]
    return x0, x0[:, :GATE_DIM].clone(), [weights[i, 0] * x0 + weights[i, 1] * bigram for i in layers]

def late_mix(x, sources, w_in, w_out, bias) -> Tensor:
    """x (T, D) and what a small network takes for each token from the sources (T, D), normalised (MUDD: record 81)."""
    m = F.linear(F.gelu(F.linear(x, w_in.to(x.dtype))), w_out.to(x.dtype)) + bias.to(x.dtype)
    return norm(x + sum(0.1 * m[:, i : i + 1] * source for i, source in enumerate(sources)))

def head_loss(x, sources, late, lm_head, targets, bias=None, low=None) -> Tensor:
    """x (T, D), targets (T,), or -1 where there is none, bias (V,) of logits -> cross-entropy summed over tokens."""
    x = late_mix(x, sources, *late)
    if low and low["lm_head"][3] == "fp8-static":
        return FP8HeadLoss.apply(x, lm_head, targets, bias)
    logits = softcap(linear(x, lm_head, low, "lm_head"))
    return F.cross_entropy(logits if bias is None else logits + bias, targets, reduction="sum", ignore_index=-1)

def choose_candidates(targets: Tensor, counts: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """targets (T,), how often each token was one, these included, counts (V,) -> the tokens that the loss is about
    (number,), the targets among them; the logarithm of how many tokens each one stands for; and the targets' places
    among them (T,), -1 for those that did not fit, as more than `number` differ. The sum of exponentials over the
    vocabulary is estimated without bias: priority sampling (Duffield et al. 2007), for a sampled softmax (Bengio and
    Senecal 2008)."""
    size = (1 + counts).index_fill(0, targets, 1e30)  # who is large enough is certain to be chosen
    priority, order = (size / torch.rand_like(size)).clamp(max=1e30).topk(number + 1)
    chosen, next_one = order[:-1], priority[-1]
    places = order.new_full(counts.shape, -1).scatter(0, chosen, torch.arange(number, device=order.device))
    return chosen, (next_one / size[chosen]).clamp(min=1).log(), places[targets]

class GPT(nn.Module):
    """The model over one packed sequence. Parameters live in stacks ("banks") padded to a multiple of world_size."""

    def __init__(self, c: Config, device: torch.device, world_size: int = 1):
        super().__init__()
        self.config, self.table, self.layers = c, parameter_table(c), TOPOLOGIES[c.topology]
        self.bos = min(50256, c.vocab_size - 1)
        self.flex = c.attention == "flex" or c.attention == "auto" and device.type == "cuda"
        self.working = range(len(self.layers))  # layers; while warming up some at a time
        dtype = PLAIN.get(c.precision, torch.bfloat16) if c.dtype == "auto" else getattr(torch, c.dtype)
        full = torch.promote_types(torch.float32, dtype)
        for name, param in self.table.items():
            rows = math.ceil(param.shape[0] / world_size) * world_size if param.update == "slice" else param.shape[0]
            bank = torch.zeros(rows, *param.shape[1:], dtype=full if param.update == "all" else dtype, device=device)
            self.register_parameter(name, nn.Parameter(bank))
        signs = torch.randint(0, 2, (SIGNS, c.model_dim), generator=torch.Generator().manual_seed(0)) * 2 - 1
        self.register_buffer("signs", signs.to(device, torch.int8), persistent=False)
        self.register_buffer("counts", torch.zeros(c.vocab_size, device=device), persistent=False)  # of targets
        self.register_buffer("lost", torch.zeros((), device=device), persistent=False)  # targets that did not fit
        self.ropes = {}
        self.block, self.head_loss = block, head_loss  # `compile_model` replaces these four
        self.embed_inputs, self.block_lists = embed_inputs, block_lists
        self.plan = plan(c, device, next(name for name in PLAIN if PLAIN[name] == dtype))
        self.make_recipes(device)

    def make_recipes(self, device: torch.device) -> None:
        """Makes `lows`, () or (recipes,) for each layer and the head, and the FP8 weights: the optimizer fills them."""
        c, H, attn, banks = self.config, self.config.num_heads, 0, dict(self.named_parameters())
        self.lows, self.weights8, self.groups = [], {}, {}  # groups: a bank's row -> its place in `scales`, or the last
        self.amaxes = torch.zeros(len(self.plan) * len(PROJECTIONS), 3, device=device)  # sums: not finite, it stays so
        self.scales = torch.full((len(self.amaxes) + 1, 4), math.nan, device=device)  # inverse, each on its 16 bytes
        parts = tuple(part for part in NVFP4_PARTS if part not in c.nvfp4_without)
        for i, row in enumerate(self.plan):
            rows = {"qkv": [("qk", H * attn, H), ("vo", 2 * attn, 1)], "o": [("vo", 2 * attn + 1, 1)],
                    "fc": [("mlp", 2 * i, 1)], "proj": [("mlp", 2 * i + 1, 1)],
                    "lm_head": [("lm_head", 0, c.vocab_size)]}
            low, attn = {}, attn + ("qkv" in row)
            for name, recipe in [item for item in row.items() if item[1] not in PLAIN]:
                place, seen, w8 = i * len(PROJECTIONS) + PROJECTIONS.index(name), torch.zeros(3, device=device), ()
                seen.requires_grad_().grad = self.amaxes[place]  # autograd adds to it in place
                for bank, first, count in rows[name] if recipe == "fp8" else ():
                    if bank not in self.groups:
                        self.weights8[bank] = torch.zeros_like(banks[bank].detach(), dtype=torch.uint8)
                        self.groups[bank] = torch.full((len(banks[bank]),), len(self.amaxes), device=device)
                    self.groups[bank][first : first + count] = place
                    part = self.weights8[bank][first : first + count].flatten(0, -2)
                    w8 += (part.t() if name == "fc" else part,)  # (N, K)
                low[name] = seen, w8, self.scales[place, 0] if w8 else None, recipe, native(recipe, device), parts
            self.lows.append((low,) if low else ())

    def recipes(self, view: View) -> list[tuple]:
        return self.lows if torch.is_grad_enabled() and not view.plain else [()] * len(self.lows)

    def weight(self, name: str) -> Tensor:
        """A bank without its padding."""
        bank, rows = getattr(self, name), self.table[name].shape[0]
        return bank if bank.size(0) == rows else bank[:rows]

    def rotary(self, view: View, T: int) -> tuple[Tensor, Tensor, Tensor]:
        """cos, sin (2 T, 1, d), two positions a token for paired heads, and the scale of scores."""
        c, device, key = self.config, self.signs.device, (view.freq, view.scale, T)
        if key not in self.ropes:  # all are kept, as CUDA graphs read them
            freq = torch.tensor(view.freq, dtype=torch.float64, device=device)
            table = rope_table(2 * T, freq, c.model_dim // c.num_heads, self.lm_head.dtype)
            self.ropes[key] = (*table, torch.tensor(view.scale, device=device))
        return self.ropes[key]

    def begins(self, tokens: Tensor) -> Tensor:
        """(T,) where documents begin. A training sequence may begin inside of one."""
        begins = tokens == self.bos
        begins[:: self.config.seq_len if torch.is_grad_enabled() else len(tokens)] = True
        return begins

    def rows(self, tokens: Tensor) -> dict[str, Tensor]:
        """For each table that is updated by rows, the row that each token looks up: (T,) int64."""
        pair = (36313 * tokens) ^ (27191 * before(tokens, self.begins(tokens)))  # hashed (record 62)
        return {"value_embeds": tokens, "bigrams": pair % self.config.bigram_rows}

    def masks(self, begins: Tensor, windows: dict[str, int]) -> dict[tuple, BlockMask | Tensor]:
        """By window and whether heads are paired: then a sequence of twice the length."""
        masks, document = {}, begins.cumsum(0, dtype=torch.int32)
        for paired in {layer.paired for layer in self.layers if layer.attn}:
            docs = document.repeat_interleave(1 + paired)
            used = {row.window: windows[row.window] for row in self.layers if row.attn and row.paired == paired}
            made = flex_masks(docs, used, self.block_lists) if self.flex else sdpa_masks(docs, used)
            masks |= {(name, paired): mask for name, mask in made.items()}
        return masks

    def hidden(self, tokens: Tensor, view: View, looked_up: dict | None = None) -> tuple[Tensor, tuple]:
        """tokens (T,) int64 -> the residual stream after the last layer, and the sources of `late_mix`, (T, D) each."""
        T, begins = len(tokens), self.begins(tokens)
        if looked_up is None:
            looked_up = {name: F.embedding(index, getattr(self, name)) for name, index in self.rows(tokens).items()}
        x, peek, injects = self.embed_inputs(
            tokens, begins, self.weight("lm_head"), looked_up["bigrams"], self.signs, self.smear,
            self.scalars[:, :2], tuple(i for i, layer in enumerate(self.layers) if layer.attn))
        D, H, training = self.config.model_dim, self.config.num_heads, torch.is_grad_enabled()
        ve = looked_up["value_embeds"] if training else F.pad(looked_up.pop("value_embeds"), (0, D))
        ve = ve.split(D, 1)  # without gradients the last one adds nothing
        attns = iter(zip(self.weight("qk").view(-1, H, 2 * D // H, D).unbind(),
                         self.weight("vo").view(-1, 2, D, D).unbind(), self.gates.unbind(), self.xsa.unbind(), injects))
        cos, sin, scale = self.rotary(view, T)
        masks, L, start = self.masks(begins, view.windows), len(self.layers), x
        mlps = self.weight("mlp").unbind()
        mlps = zip(mlps[::2], mlps[1::2], self.scalars.unbind())
        outputs, norms, after = [], {}, (x.view_as(x), peek)  # x has norm 1
        part = lambda has, x, idle: x if has else None if training else idle(x)  # so few graphs validate all layers
        for i, (layer, (up, down, scalars), low) in enumerate(zip(self.layers, mlps, self.recipes(view))):
            inject, value, attn, bounds, length = None, None, (None,) * 5, None, T * (1 + layer.paired)
            if layer.attn:
                *weights, xsa, inject = next(attns)
                value = part(layer.ve is not None, ve[layer.ve or 0], lambda _: ve[-1])
                attn = *weights, part(layer.xsa, xsa, torch.zeros_like), masks[layer.window, layer.paired]
                bounds = part(layer.offset, begins, torch.ones_like)  # where all tokens begin, no key is the last one's
            args = (x, *norms.get(layer.source, after), inject, None if layer.skip is None else outputs[layer.skip],
                    value, *attn, up, down, scalars, cos[:length], sin[:length], scale, bounds, layer.paired, *low)
            x, *after = self.block(*args) if i in self.working else (x, *after)
            outputs.append(x.view_as(x))
            norms[i] = after if any(other.source == i for other in self.layers) else None  # no other needs to be kept
        return x, (start, *(outputs[i] for i in (L // 3, L * 2 // 3, L - 2)), ve[0])

    def forward(self, tokens: Tensor, targets: Tensor, view: View, looked_up: dict | None = None) -> Tensor:
        """tokens, targets (T,) -> loss summed over T. Recipes hold in training only."""
        (x, sources), w = self.hidden(tokens, view, looked_up), self.weight("lm_head")
        late = self.late_in, self.late_out, self.late_bias
        if torch.is_grad_enabled():
            return self.head_loss(x, sources, late, *self.sampled(w, targets, self.recipes(view)[-1]))
        pieces = zip(*(t.split(VAL_CHUNK) for t in (x, targets, *sources)))  # logits of a whole sequence would not fit
        return sum(self.head_loss(a, s, late, w, b) for a, b, *s in pieces)

    def sampled(self, w: Tensor, targets: Tensor, low: tuple) -> tuple:
        """What `head_loss` takes after the first three: the head (V, D), targets (T,), no bias and its recipes, or the
        same for --candidates of the V tokens, with a bias: a third of the work, over a third of it on targets."""
        number = self.config.candidates
        if not 0 < number < len(w):
            return w, targets, None, *low
        with torch.no_grad():
            self.counts.index_add_(0, targets, torch.ones_like(targets, dtype=self.counts.dtype))
            chosen, bias, targets = choose_candidates(targets, self.counts, number)
            self.lost += (targets < 0).sum()
        low = ({name: (seen, tuple(w8[chosen] for w8 in all8), *how) for name, (seen, all8, *how) in row.items()}
               for row in low)
        return w.index_select(0, chosen), targets, bias, *low

VAL_CHUNK = 16_384  # tokens whose logits are computed at a time in validation

@torch.no_grad()
def initialize(model: GPT, seed: int) -> dict[str, Tensor]:
    """Draws the weights from `seed` (rank 0's count), fills the model and returns them in float32."""
    torch.manual_seed(seed)
    full = {}
    for name, param in model.table.items():
        bank = getattr(model, name)
        w = full[name] = torch.zeros_like(bank, dtype=torch.promote_types(torch.float32, bank.dtype))
        param.init(w[: param.shape[0]])
        if dist.is_initialized():
            dist.broadcast(w, 0)
        bank.copy_(w)
    torch.manual_seed((seed * 2**16 + ranks()[0]) % 2**63)  # ranks draw different candidates
    model.counts.zero_()
    model.lost.zero_()
    return full

# ------------------------------------------------------------------------------------------------------------------
# 5. The optimisers: Muon for matrices, Adam for the rest, each rank updating its share
#
# Every rank computes with a bf16 copy of all weights; the float32 weights and the optimizer's state exist once, on the
# rank that owns that slice. A step is: sum every gradient over the ranks and keep the own slice (reduce-scatter),
# update it, and hand out the new bf16 slice (all-gather). Tables have far more rows than a batch has tokens; only rows
# that some rank looked up have gradients and are updated, and slices of tables are columns, so that all ranks share
# this work whichever rows they are. It is done beside Muon, on a stream of its own, as it takes memory
# bandwidth where Muon takes arithmetic. All transfers are asynchronous, so they run while another parameter is being
# worked on. Gradients are sums over tokens, so neither the number of GPUs nor of accumulation steps enters anywhere but
# in the draw of candidates (section 4).

POLAR_EXPRESS = (  # a, b, c of each iteration: the fastest polynomials of degree 5 (Amsel et al. 2025; record 38)
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

def orthogonalize(G: Tensor) -> Tensor:
    """G (n, rows, cols) -> nearly U V^T of each matrix, in bf16, by an odd polynomial in G (Muon, Jordan 2024)."""
    X = G.bfloat16()
    if G.size(-2) > G.size(-1):
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)  # the spectral norm is at most the Frobenius norm
    one = torch.eye(X.size(-2), device=X.device)
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT
        B = a * one + b * A.float() + c * (A @ A).float()
        X = B.bfloat16() @ X  # to add a X to a product would take longer
    return X.mT if G.size(-2) > G.size(-1) else X

def cautious(master: Tensor, part: Tensor, update: Tensor, lr: Tensor, decay: Tensor) -> None:
    """part = master -= lr * update, and decay where that shrinks the weight anyway (Chen et al. 2025; record 43)."""
    part.copy_(master.sub_(lr * (update + decay * master * (update * master > 0))))

def muon_update(master, part, grad, state, lr, decay, momentum) -> None:
    """Updates master (n, rows, cols) by orthogonalised Nesterov momentum whose neurons have equal length over time
    (NorMuon, Li et al. 2025; record 41), and copies it to `part`."""
    buffer, second = state
    grad = grad.to(master.dtype)
    buffer.add_((grad - buffer) * (1 - momentum))
    update = orthogonalize(grad + (buffer - grad) * momentum).to(master.dtype)
    dim = -1 if update.size(-2) >= update.size(-1) else -2
    square = update.square().mean(dim, keepdim=True)  # of each neuron
    second.add_((square - second) * (1 - 0.9))
    scale = second.clamp(min=1e-10).rsqrt()
    total, scaled = square.sum((-2, -1), keepdim=True), (square * scale.square()).sum((-2, -1), keepdim=True)
    cautious(master, part, update * (scale * (total / scaled.clamp(min=1e-30)).sqrt()), lr, decay)  # norm as before

def adam_update(master, part, grad, state, lr, decay, beta1, beta2, correction) -> None:
    """Updates master by Adam (Kingma & Ba 2015) with bias `correction`, and copies it to `part`."""
    mean, square = state
    grad = grad.to(master.dtype)
    mean.add_((grad - mean) * (1 - beta1))
    square.add_((grad.square() - square) * (1 - beta2))
    cautious(master, part, mean / (square.sqrt() + 1e-10) * correction, lr, decay)  # gradients start far below 1e-8

# What is done with rows of tables, each a pass over memory. Indexing in PyTorch, compiled or not, takes two to four.

def adam_rows(total, rows, master, state, dtype, *rates) -> Tensor:
    """`adam_update` of these rows (n,) of master (R, width) from their gradient (n, width). Returns them in `dtype`."""
    copy = torch.empty_like(total, dtype=dtype)
    if total.is_cuda:
        adam_rows_kernel[row_grid(total)](total, rows, master, *state, copy, total.size(1), *rates, 1024)
        return copy
    own, *moments = (t[rows] for t in (master, *state))
    adam_update(own, copy, total, moments, *rates)
    for whole, few in zip((master, *state), (own, *moments)):
        whole[rows] = few
    return copy

def sum_rows(total, place, rows, grad) -> None:
    """Adds grad (T, width) of looked-up rows (T,) to total (ranks, n, width / ranks), row r to line place[r] - 1."""
    (ranks, n, share), width = total.shape, grad.size(1)
    if total.is_cuda:
        sum_rows_kernel[row_grid(grad)](total, place, rows, grad.contiguous(), n, width, share, 1024)
    else:
        grad = F.pad(grad.to(total.dtype), (0, ranks * share - width)).view(-1, ranks, share)
        total.index_add_(1, place[rows] - 1, grad.transpose(0, 1))

def put_rows(bank, rows, parts) -> None:
    """Writes parts (ranks, n, width / ranks) to rows (n,) of bank (R, width)."""
    (_, n, share), width = parts.shape, bank.size(1)
    if bank.is_cuda:
        put_rows_kernel[n, row_grid(bank)[1]](bank, rows, parts, n, width, share, 1024)
    else:
        bank[rows] = parts.transpose(0, 1).flatten(1)[:, :width]

def row_grid(x: Tensor) -> tuple[int, int]:
    return len(x), triton.cdiv(x.size(1), 1024)

if triton is not None:

    @triton.jit
    def adam_rows_kernel(grad_ptr, rows_ptr, master_ptr, mean_ptr, square_ptr, copy_ptr, width, lr, decay, beta1, beta2,
                         correction, COLS: tl.constexpr):
        line, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLS + tl.arange(0, COLS)
        inside, here, at = col < width, line * width + col, tl.load(rows_ptr + line) * width + col
        w, mean, square = (tl.load(master_ptr + at, mask=inside), tl.load(mean_ptr + at, mask=inside),
                           tl.load(square_ptr + at, mask=inside))
        g = tl.load(grad_ptr + here, mask=inside).to(w.dtype)
        mean += (g - mean) * (1 - beta1)
        square += (g * g - square) * (1 - beta2)
        update = mean / (tl.sqrt(square) + 1e-10) * correction
        w -= lr * (update + tl.where(update * w > 0, decay * w, 0.0))
        tl.store(master_ptr + at, w, mask=inside)
        tl.store(mean_ptr + at, mean, mask=inside)
        tl.store(square_ptr + at, square, mask=inside)
        tl.store(copy_ptr + here, w.to(copy_ptr.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["n"])  # which differs from step to step
    def sum_rows_kernel(total_ptr, place_ptr, rows_ptr, grad_ptr, n, width, share, COLS: tl.constexpr):
        line, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLS + tl.arange(0, COLS)
        at = tl.load(place_ptr + tl.load(rows_ptr + line)) - 1
        grad = tl.load(grad_ptr + line * width + col, mask=col < width).to(total_ptr.dtype.element_ty)
        tl.atomic_add(total_ptr + (col // share * n + at) * share + col % share, grad, col < width, sem="relaxed")

    @triton.jit(do_not_specialize=["n"])
    def put_rows_kernel(bank_ptr, rows_ptr, parts_ptr, n, width, share, COLS: tl.constexpr):
        line, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLS + tl.arange(0, COLS)
        part = tl.load(parts_ptr + (col // share * n + line) * share + col % share, mask=col < width)
        tl.store(bank_ptr + tl.load(rows_ptr + line) * width + col, part, mask=col < width)

DONE = SimpleNamespace(wait=lambda: None)  # the transfer of a rank that is alone
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13's name, and 2.11's
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

def next_loss_scale(scale: float, good: int, finite: bool, period: int = 2000) -> tuple[float, int]:
    """S and the number of good steps in a row, after a step (the rule of jmp)."""
    grown = (min(2 * scale, 2.0**127), 0) if good + 1 == period else (scale, good + 1)
    return grown if finite else (max(scale / 2, 1.0), 0)

class Optimizer:
    """Muon and Adam over the parameter table, sharded over the ranks of the default process group (if there is one)."""

    def __init__(self, model: GPT):
        self.model, self.muon, self.adam = model, muon_update, adam_update  # `compile_model` replaces these
        self.rank, self.world_size = ranks()
        self.seq_bits = round(math.log2(model.config.seq_len))
        self.gather8 = [*model.weights8] if model.config.float8_all_gather else []
        self.tables = [name for name, param in model.table.items() if param.update == "rows"]
        self.beside = torch.cuda.Stream() if model.signs.is_cuda else None  # the tables' stream
        self.banks = {name: p.data for name, p in model.named_parameters()}
        self.lr = {}  # of the matrices that this rank updates
        for name in [name for name, param in model.table.items() if param.optimizer == "muon"]:
            number, lr = torch.arange(len(self.banks[name])), torch.tensor(model.table[name].lr)
            self.lr[name] = self.own(name, lr[number % len(lr)][:, None, None].to(model.signs.device))
        self.sent = 0  # bytes, since the last `reset`
        self.factor = torch.zeros((), device=model.signs.device)  # CUDA graphs read it
        self.reset({name: p.detach().to(model.scalars.dtype) for name, p in model.named_parameters()})

    def reset(self, full: dict[str, Tensor]) -> None:
        """Starts anew from the float32 weights `full`, as `initialize` returns them."""
        self.masters = {name: self.own(name, w).clone() for name, w in full.items()}
        self.state = {name: self.zero_state(name) for name in full}
        self.model.amaxes.zero_()
        self.loss_scale, self.good = 2.0**15 if self.model.config.precision == "fp16" else None, 0
        self.factor.fill_((self.loss_scale or 0) * 2.0**-self.seq_bits)
        self.quantize_weights([*full])
        self.steps, self.sent, self.totals, self.used, self.reductions = 0, 0, {}, {}, {}

    def scaled(self, loss: Tensor) -> Tensor:
        """The float32 loss whose gradient `step` wants. jmp's factor is for a mean over a sequence, ours is a sum."""
        return loss if self.loss_scale is None else loss * self.factor

    def zero_state(self, name: str) -> tuple[Tensor, Tensor]:
        """Muon: momentum and mean square of each neuron. Adam: mean and mean square of the gradient."""
        zero = torch.zeros_like(self.masters[name])
        if self.model.table[name].optimizer == "adam":
            return zero, zero.clone()
        return zero, zero.mean(-1 if zero.size(1) >= zero.size(2) else -2, keepdim=True)

    def own(self, name: str, bank: Tensor) -> Tensor:
        """This rank's slice of a bank, a view; of a table the rank's columns, a copy; or all of it."""
        how = self.model.table[name].update
        if how == "rows" and self.world_size > 1:
            return F.pad(bank, (0, -bank.size(1) % self.world_size)).chunk(self.world_size, 1)[self.rank].contiguous()
        return bank.chunk(self.world_size)[self.rank] if how == "slice" else bank

    def reduce(self, name: str, grad: Tensor):
        """Starts summing a gradient over the ranks. Returns this rank's part of the sum to be, and the transfer."""
        if self.world_size == 1:
            return grad, DONE
        if self.model.table[name].update == "all":
            self.sent += 2 * grad.nbytes
            return grad, dist.all_reduce(grad, async_op=True)
        self.sent += grad.nbytes
        part = torch.empty_like(grad.chunk(self.world_size)[0])
        return part, reduce_scatter(part, grad, async_op=True)

    def hand_out(self, name: str, part: Tensor):
        """Starts giving all ranks this rank's updated part of a parameter. Returns all parts, and the transfer."""
        narrow = name in self.gather8 and name != "lm_head"  # which is the embedding, too
        if self.world_size == 1 or self.model.table[name].update == "all" or narrow:
            return part, DONE
        many = part.new_empty(self.world_size * len(part), part.size(1)) if name in self.tables else self.banks[name]
        self.sent += many.nbytes
        return many, all_gather(many, part, async_op=True)

    def meet(self) -> None:
        """What comes now, on this stream or on the tables', waits for all that was begun on both."""
        if self.beside:
            torch.cuda.current_stream().wait_stream(self.beside)
            self.beside.wait_stream(torch.cuda.current_stream())

    @torch.no_grad()
    def find_rows(self, batch: list[dict[str, Tensor]]) -> None:
        """Begins to find out which rows of the tables any rank looks up. To be called before the forward passes: the
        CPU must know how many there are, and waits for it while the device is busy with those."""
        self.meet()
        with torch.cuda.stream(self.beside):
            sizes = [len(self.masters[name]) for name in self.tables]
            used = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.model.signs.device)
            flags = dict(zip(self.tables, used.split(sizes)))
            for name, index in [item for rows in batch for item in rows.items()]:
                flags[name].index_fill_(0, index, 1)
            if self.world_size > 1:
                dist.all_reduce(used, dist.ReduceOp.MAX, async_op=True).wait()  # a wait of the stream, not of the CPU
            self.places = {name: flags[name].cumsum(0) for name in self.tables}
            self.counts = torch.stack([place[-1] for place in self.places.values()]).to("cpu", non_blocking=True)
            self.counted = torch.cuda.current_stream().record_event() if self.counts.is_pinned() else None

    @torch.no_grad()
    def add_rows(self, rows: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
        """Adds a micro-batch's gradients of the looked-up rows to those of this step."""
        self.meet()
        with torch.cuda.stream(self.beside):
            if not self.totals:
                if self.counted is not None:
                    self.counted.synchronize()
                self.totals = {name: self.masters[name].new_zeros(self.world_size, n, self.masters[name].size(1))
                               for name, n in zip(self.tables, self.counts.tolist())}
                for name, total in self.totals.items():  # the k-th used row is where the count of used rows gets to k
                    lines = torch.arange(1, total.size(1) + 1, device=total.device)
                    self.used[name] = torch.searchsorted(self.places[name], lines)
            for name in self.tables:
                sum_rows(self.totals[name], self.places[name], rows[name], grads[name])
                if self.beside:
                    grads[name].record_stream(self.beside)

    @torch.no_grad()
    def update(self, name: str, grad: Tensor, lr_factor: float, momentum: float) -> Tensor:
        """Updates this rank's part of a parameter from that of its gradient. Returns what it has to hand out."""
        param, master, state, bank = (x[name] for x in (self.model.table, self.masters, self.state, self.banks))
        decay = lr_factor * param.decay  # compiled functions read tensors of the CPU anew at every call (record 48)
        if param.optimizer == "muon":
            part = self.own(name, bank)
            self.muon(master, part, grad, state, lr_factor * self.lr[name], torch.tensor(decay), torch.tensor(momentum))
            return part
        t, (beta1, beta2) = max(self.steps, 1), param.betas
        rates = lr_factor * param.lr, decay, beta1, beta2, (1 - beta2**t) ** 0.5 / (1 - beta1**t)
        if param.update == "rows":
            return adam_rows(grad.flatten(0, -2), self.used[name], master, state, bank.dtype, *rates)
        part = self.own(name, bank)
        flat = [x.reshape(-1) for x in (master, part, grad, *state)]  # of any shape: one graph for all
        self.adam(*flat[:3], flat[3:], *map(torch.tensor, rates))
        return part

    @torch.no_grad()
    def start(self) -> None:
        """Starts to sum all .grad over ranks, and frees them: before the last `add_rows`, a long one. A collective."""
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                self.reductions[name] = self.reduce(name, p.grad)
        self.model.zero_grad()

    def start_tables(self) -> None:
        """The same for what `add_rows` has added up."""
        with torch.cuda.stream(self.beside):
            for name, total in self.totals.items():
                self.reductions[name] = self.reduce(name, total.to(self.banks[name].dtype))
        self.totals = {}

    @torch.no_grad()
    def step(self, lr_factor: float, momentum: float) -> None:
        """Updates the weights from their .grad, and the tables from `add_rows`, and frees both. A collective."""
        self.start()
        names = [name for name in self.model.table if name in self.reductions or name in self.totals]
        unscale = self.loss_scale and self.unscale()
        if unscale == 0:
            self.reductions = {}
            return
        self.steps, handed = self.steps + 1, {}
        for name in names:
            if name in self.totals:  # only now: transfers take turns, and those of the matrices need not wait for sums
                self.start_tables()
            with torch.cuda.stream(self.beside if name in self.tables else None):
                grad, transfer = self.reductions.pop(name)
                transfer.wait()
                if self.beside:
                    grad.record_stream(torch.cuda.current_stream())  # its memory is free only after this
                grad = grad if unscale is None else grad.float() * unscale
                handed[name] = self.hand_out(name, self.update(name, grad, lr_factor, momentum))
        for name, (parts, transfer) in handed.items():
            with torch.cuda.stream(self.beside if name in self.tables else None):
                transfer.wait()
                if name in self.tables:
                    put_rows(self.banks[name], self.used[name], parts.unflatten(0, (self.world_size, -1)))
        self.meet()
        self.quantize_weights(names)

    def unscale(self) -> float:
        """Adapts the loss scale. Returns what undoes it, 0 if a gradient overflowed on any rank: none is kept."""
        self.start_tables()
        for _, transfer in self.reductions.values():
            transfer.wait()
        self.meet()
        found = sum((~grad.isfinite().all()).float() for grad, _ in self.reductions.values())
        if self.world_size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        factor, finite = 2.0**self.seq_bits / self.loss_scale, found.item() == 0  # waits for the device
        self.loss_scale, self.good = next_loss_scale(self.loss_scale, self.good, finite)
        self.factor.fill_(self.loss_scale * 2.0**-self.seq_bits)
        return factor * finite

    @torch.no_grad()
    def quantize_weights(self, names: list[str]) -> None:
        """The FP8 weights of these banks anew; with --float8_all_gather from the masters, each rank its part."""
        if not self.model.groups:
            return
        m, amax, sharded = self.model, torch.zeros_like(self.model.scales[:, 0]), self.gather8 and self.world_size > 1
        parts = {name: (self.own(name, group), self.masters[name]) if self.gather8 else (group, self.banks[name])
                 for name, group in m.groups.items()}
        for group, part in parts.values():
            of_rows = part.abs().flatten(1).amax(1).float().nan_to_num(math.inf, math.inf)  # the reduction may lose NaN
            amax.scatter_reduce_(0, group, of_rows, "amax")
        if sharded:
            dist.all_reduce(amax, dist.ReduceOp.MAX)  # one for all weights
        scale = fp8_scale(amax, E4M3)
        m.scales.copy_(inverse(scale)[:, None].expand_as(m.scales))
        for name, (group, part) in [(name, parts[name]) for name in parts if name in names]:
            w8, _ = fp8_operand(part, scale[group].view(-1, *[1] * (part.ndim - 1)), E4M3, native=True)
            (all_gather if sharded else Tensor.copy_)(m.weights8[name], w8)
            self.sent += m.weights8[name].nbytes if sharded else 0

    def bytes_per_step(self) -> int:
        """What this rank sent for an update, in a ring of ranks, on average."""
        return round((1 - 1 / self.world_size) * self.sent / max(self.steps, 1))

    def complete_weights(self) -> None:
        """Fetches the wide weights that --float8_all_gather left with their owners, for validation. A collective."""
        for bank in [self.banks[name] for name in self.gather8 if self.world_size > 1]:
            all_gather(bank, self.own("lm_head", bank).clone())

# ------------------------------------------------------------------------------------------------------------------
# 6. The data: .bin shards of 256 int32 (20240520, 1, number of tokens, zeros) and then uint16 tokens

HEADER_BYTES, MAGIC, VERSION, SEPARATOR = 1024, 20240520, 1, 50256

def shard_tokens(path: Path) -> int:
    """Number of tokens the header promises. Raises BadInput if the header or the file's length is wrong."""
    header, size = np.fromfile(path, dtype="<i4", count=256), path.stat().st_size
    fetch = "fetch or make it again (data/fineweb.py, data/prepare.py)"
    require(len(header) == 256, f"{path} has {size} bytes, less than its header of {HEADER_BYTES}; {fetch}")
    magic, version, tokens = header[:3].tolist()
    require((magic, version) == (MAGIC, VERSION),
            f"{path} begins with magic {magic}, version {version}, not {MAGIC}, {VERSION}; {fetch}")
    promised = HEADER_BYTES + 2 * tokens
    require(size == promised, f"{path} has {size} bytes where its header promises {promised}; {fetch}")
    return tokens

def read_shard(path: Path, vocab_size: int) -> tuple[Tensor, np.ndarray]:
    """Tokens of a shard (int16 bits of uint16) and where documents start: there a small vocabulary has its last id."""
    tokens = np.fromfile(path, dtype="<u2", count=shard_tokens(path), offset=HEADER_BYTES)
    starts, separator = np.flatnonzero(tokens == SEPARATOR), min(SEPARATOR, vocab_size - 1)
    require(len(starts), f"{path} holds no document start (token {SEPARATOR}); make it with data/prepare.py")
    require(separator == SEPARATOR or separator not in tokens,
            f"{path} holds token {separator}, which --vocab_size={vocab_size} needs as separator; raise it")
    tokens[starts] = separator
    last = tokens.max()
    require(last < vocab_size, f"{path} holds token {last}, outside of --vocab_size={vocab_size}; is it other data?")
    return torch.from_numpy(tokens.view(np.int16)), starts

def find_shards(c: Config, split: str) -> list[Path]:
    """The split's shards in order. Raises BadInput if there are none."""
    pattern = c.train_files if split == "train" else c.val_files
    paths = sorted(Path(c.data_dir, name) for name in glob(pattern, root_dir=c.data_dir))
    make = "prepare.py --python-docs --bytes --out data/pydocs" if c.preset in ("laptop", "char") else "fineweb.py 9"
    require(paths, f"no {split} shards (--{split}_files={pattern}) in {c.data_dir}; get them: python data/{make}")
    return paths

def ahead(items: Iterator) -> Iterator:
    """The same items, of which a thread makes the next one, from now on, while the last one is in use."""
    thread = ThreadPoolExecutor(1)
    made = [thread.submit(next, items, None)]

    def take():
        made.append(thread.submit(next, items, None))
        return made.pop(0).result()

    return iter(take, None)

def batches_of(paths: list[Path], c: Config):
    """Generator over the batches of all ranks: a shard's tokens, and a list of sequences, each a list of pieces of them
    (position, count). Pieces are whole documents, of which none contributes more than the stage's `longest` (records
    26, 29); the last one is cut, and what is left of it is skipped."""
    step, stage, need = 0, stage_of(0, c), c.seq_len + 1  # the last token has a target, too
    for tokens, starts in ahead(read_shard(path, c.vocab_size) for path in paths * c.epochs):
        documents = pairwise([*starts.tolist(), len(tokens)])  # where each begins and ends
        if c.cut_documents:  # no token of a small corpus may be lost
            documents = ((begin, begin + need) for begin in range(0, len(tokens) - c.seq_len, c.seq_len))
        batch, pieces, room = [], [], need
        for begin, end in documents:
            count = min(end - begin, room, need if c.cut_documents else stage.longest)
            pieces.append((begin, count))
            room -= count
            if room > 0:
                continue
            batch.append(pieces)
            pieces, room = [], need
            if len(batch) == stage_tokens(stage, c) // c.seq_len:
                yield tokens, batch
                batch, step = [], step + 1
                stage = stage_of(step, c)

def training_batches(paths: list[Path], c: Config, rank: int, world_size: int, device: torch.device):
    """Generator over batches: this rank's micro-batches, int16 bits, (sequences, seq_len + 1)."""
    for tokens, batch in batches_of(paths, c):
        rows = torch.stack([torch.cat([tokens[p : p + n] for p, n in pieces]) for pieces in batch[rank::world_size]])
        rows = rows.pin_memory() if device.type == "cuda" else rows  # so that copies need not wait
        yield rows.split(micro_sequences(len(rows), c))
    raise BadInput("the training shards ran out before the schedule's end; fetch more or raise --epochs")

def micro_sequences(count: int, c: Config) -> int:
    """How many of `count` sequences a GPU works on at a time: as many as fit and divide them evenly."""
    return max(n for n in range(1, c.micro_tokens // c.seq_len + 1) if count % n == 0)

def to_device(rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """(n, length + 1) int16 bits of uint16 -> inputs and targets (n * length,), int64, without waiting."""
    rows = rows.to(device, non_blocking=True).long() & 0xFFFF
    return rows[:, :-1].flatten(), rows[:, 1:].flatten()

def validation_tokens(c: Config) -> Tensor:
    """The first val_tokens + 1 tokens of the validation split, int16 bits. Raises BadInput if there are fewer."""
    tokens, need = torch.cat([read_shard(path, c.vocab_size)[0] for path in find_shards(c, "val")]), c.val_tokens + 1
    require(len(tokens) >= need, f"validation needs {need:,} tokens and {c.data_dir} holds {len(tokens):,}; "
            "lower --val_tokens")
    return tokens[:need]

def fingerprint(path: Path, split: str) -> dict:
    """Name, size and sha256 (of header, first and last MiB) of a shard: enough to tell two shards apart quickly."""
    raw = np.memmap(path, mode="r")
    sha256 = hashlib.sha256(raw[: HEADER_BYTES + 2**20].tobytes() + raw[-(2**20) :].tobytes()).hexdigest()
    return dict(split=split, name=path.name, bytes=len(raw), tokens=shard_tokens(path), sha256=sha256)

# ------------------------------------------------------------------------------------------------------------------
# 7. Schedules: pure functions of the step

def stages(c: Config) -> list[tuple[int, int, Stage]]:
    """First step, last step + 1 and stage of each row of the schedule."""
    rows = SCHEDULES[c.schedule]
    bounds = [round(share * c.num_steps) for share in accumulate((stage.share for stage in rows), initial=0.0)]
    return list(zip(bounds, bounds[1:], rows))

def stage_of(step: int, c: Config) -> Stage:
    """The stage of the update that follows `step` updates; after the last one the schedule's last row."""
    return next((stage for _, end, stage in stages(c) if step < end), SCHEDULES[c.schedule][-1])

def total_tokens(c: Config) -> int:
    """Tokens the whole run trains on."""
    return sum((end - first) * stage_tokens(stage, c) for first, end, stage in stages(c))

def stage_tokens(stage: Stage, c: Config) -> int:
    """Tokens of one of its batches."""
    return round(stage.batch * c.batch_tokens)

def lr_factor(step: int, c: Config) -> float:
    """The stage's factor; over the last cooldown_frac of the steps linearly to 0.15."""
    t = max(0.0, (step / c.num_steps - 1) / c.cooldown_frac + 1)
    return stage_of(step, c).lr * (1 - t) + 0.15 * t

def muon_momentum(step: int, c: Config) -> float:
    """From 0.85 to 0.95, and back over the last 4 % of the steps (record 39)."""
    return 0.85 + 0.10 * max(0, min(step / max(c.momentum_warmup, 1), 1, (c.num_steps - step) / (0.04 * c.num_steps)))

def view_of(step: int, c: Config) -> View:
    """Windows of the step's stage, with YaRN (Peng et al. 2023; record 31): where the long window grew from a to b,
    frequencies that turn less than once in a window fall by a / b, those that turn 32 times stay."""
    rotating, now = c.model_dim // c.num_heads // 4, stage_of(step, c)
    freq, scale, before = [(1 / 1024) ** (j / max(rotating - 1, 1)) for j in range(rotating)], 0.1, None
    for stage in SCHEDULES[c.schedule]:
        a, b = before or stage.long, stage.long
        if stage.share:  # rows without steps only see farther
            ramp = [min(max((BLOCK * a * f / (2 * math.pi) - 1) / 31, 0), 1) for f in freq]
            freq = [f * (a / b + r * (1 - a / b)) for f, r in zip(freq, ramp)]
            scale, before = scale * (1 + 0.2 * math.log(b / a)), b
        if stage is now:
            break
    windows, plain = {"long": now.long, "short": now.short}, (1 - c.bf16_last_frac) * c.num_steps <= step < c.num_steps
    return View(windows, tuple(freq), scale * 128 / (c.model_dim // c.num_heads), plain)

# ------------------------------------------------------------------------------------------------------------------
# 8. The log and the clock

RULE = "=" * 100

class Log:
    """Rank 0's log: source, facts, steps, end block (grammar: records/README.md). Silent on other ranks. Training
    losses are read when they have arrived, so nothing waits for the device."""

    def __init__(self, c: Config, run_id: str, master: bool):
        self.num_steps, self.master, self.pending = c.num_steps, master, []
        if master:
            for folder in (c.log_dir, os.path.dirname(c.save_checkpoint)):  # now, not after training
                Path(folder).mkdir(parents=True, exist_ok=True)
            self.path = Path(c.log_dir) / f"{run_id}.txt"
            self.file = open(self.path, "wb", 0)  # unbuffered: a run that is killed leaves a log up to that moment
            self.file.write(SOURCE + RULE.encode() + b"\n")
            self.twin = open(self.path.with_suffix(".jsonl") if c.jsonl else os.devnull, "w", 1)
        self.bar = tqdm(total=c.num_steps, unit="step", dynamic_ncols=True, disable=None if master else True)

    def line(self, text: str, show: bool = True, **facts) -> None:
        """One line of the log, its facts as one JSON object of the twin, and the line on the console."""
        if self.master:
            self.file.write(text.encode() + b"\n")
            print(json.dumps(facts), file=self.twin)
        if self.master and show:
            with self.bar.external_write_mode():
                print(text, flush=True)

    def fact(self, kind: str, value, show: bool = True) -> None:
        self.line(f"{kind} {json.dumps(value)}", show, kind=kind, **(value if kind != "note" else {"note": value}))

    def step(self, step: int, seconds: float, name: str, loss: float) -> None:
        """The line of a train_loss or val_loss."""
        ms, average = 1000 * seconds, 1000 * seconds / step if step else math.nan
        self.line(f"step:{step}/{self.num_steps} {name}:{loss:.4f} train_time:{ms:.0f}ms step_avg:{average:.2f}ms",
                  show=self.bar.disable or name == "val_loss", kind="step", step=step, num_steps=self.num_steps,
                  **{name: loss}, train_time_ms=round(ms), step_avg_ms=round(average, 2) if step else None)
        self.bar.set_postfix_str(f"{name} {loss:.3f}, {average:.1f} ms a step", refresh=False)
        self.bar.update(step - self.bar.n)

    def put(self, step: int, loss: Tensor, seconds: float) -> None:
        """loss, on the device: mean over the batch's tokens, and perhaps which `amaxes` are not finite."""
        copy = loss.to("cpu", non_blocking=True)
        self.pending.append((step, seconds, copy, torch.cuda.current_stream().record_event() if loss.is_cuda else None))
        self.read()

    def read(self) -> None:
        """Logs the losses that have arrived. Raises BadInput if one, or what a recipe saw, is not finite."""
        while self.pending and (self.pending[0][3] is None or self.pending[0][3].query()):
            step, seconds, copy, _ = self.pending.pop(0)
            loss, *flags = copy.view(-1).tolist()
            self.step(step, seconds, "train_loss", loss)
            if not math.isfinite(loss) or any(flags):
                raise BadInput(f"the training loss is {loss} at step {step}{culprit(flags)}; lower the learning rates")

    def end(self, facts: dict) -> None:
        self.bar.close()
        rows = [f"{k}: {v if isinstance(v, str) else json.dumps(v)}" for k, v in facts.items()]
        self.line("\n".join([RULE, *rows]), kind="end", **facts)

def culprit(flags: list[float]) -> str:
    """What was not finite at first: the first weight or input, else the last gradient, as backward starts there."""
    bad = sorted((i % 3, i // 3) for i, flag in enumerate(flags) if flag) or [(3, 0)]  # kind, place
    kind, place = bad[-1] if bad[0][0] == 2 else bad[0]
    where = f"layer {place // 5}'s " * (place % 5 < 4) + PROJECTIONS[place % 5]
    return f", {('weight', 'input', 'gradient')[kind]} of {where} not finite" if kind < 3 else ""

class Clock:
    """Training time in seconds. It stands still around validation; starting and stopping wait for the device."""

    def __init__(self, device: torch.device):
        self.wait, self.total, self.since = torch.get_device_module(device).synchronize, 0.0, None

    def start(self) -> None:
        self.wait()
        self.since = time.perf_counter()

    def stop(self) -> None:
        self.wait()
        self.total, self.since = self.now(), None

    def now(self) -> float:
        return self.total + (time.perf_counter() - self.since if self.since is not None else 0.0)

def output_of(command: str) -> str | None:
    """What a shell command prints, None if that is nothing; only rank 0 logs, so only there it runs."""
    if ranks()[0] == 0:
        run = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=Path(__file__).parent)
        return run.stdout.strip() or None

def describe_run() -> dict:
    """Which run of which code this is."""
    commit = output_of("git rev-parse --verify -q HEAD")
    return dict(run_id=str(uuid.uuid4()), date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                code_sha256=hashlib.sha256(SOURCE).hexdigest(), code_bytes=len(SOURCE), git_commit=commit,
                git_clean=output_of("git status --porcelain") is None if commit else None)

def describe_machine(device: torch.device) -> dict:
    """Hardware and versions. A collective: all ranks call it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return dict(python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda,
                triton=triton.__version__ if triton else None,
                driver=output_of("nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1"),
                devices=all_ranks(name), world_size=ranks()[1], hosts=len(set(all_ranks(platform.node()))),
                cpu=output_of("sed -n 's/^model name.*: //p;T;q' /proc/cpuinfo") or platform.processor())

def calibrate(device: torch.device) -> dict:
    """Speeds of this host, outside the clock, so that runs on different hosts can be compared. A collective."""
    cuda, wait, world_size = device.type == "cuda", torch.get_device_module(device).synchronize, ranks()[1]
    n, numbers = (8192, 2**28) if cuda else (1024, 2**24)
    a, x, one = torch.randn(n, n, device=device), torch.zeros(numbers, device=device), torch.ones((), device=device)
    half, fp8 = a.bfloat16(), quantize(a, 0.02, E4M3).view(torch.uint8)
    whole = x[: numbers // 4 // world_size * world_size]
    part = whole.chunk(world_size)[0].clone()

    def speed(amount: float, work: Callable[[], object], possible: bool = True) -> float | None:
        """Of what a call computes or moves, per second: the median of five calls, after one that is not counted."""
        if possible:
            seconds = timeit.repeat(lambda: (work(), wait()), number=1, repeat=6)
            return float(f"{amount / sorted(seconds[1:])[2]:.4g}")

    return dict(
        bf16_matmul_tflops=speed(2e-12 * n**3, lambda: half @ half),
        fp8_matmul_tflops=speed(2e-12 * n**3, lambda: product_op(fp8, fp8, one, one, torch.bfloat16, "xx"),
                                cuda and native("fp8", device)),
        copy_gb_per_s=speed(8e-9 * numbers, x.clone),  # bytes read and written
        all_reduce_gb_per_s=speed(4e-9 * len(whole), lambda: dist.all_reduce(whole), world_size > 1),
        all_gather_gb_per_s=speed(4e-9 * len(whole), lambda: all_gather(whole, part), world_size > 1))

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "4090": 165e12}  # bf16

def mfu(c: Config, tokens_per_s: float, device_name: str) -> float | None:
    """Model FLOPs (6 a weight and token, of the head's weights the candidates', no attention) over the GPUs' dense bf16
    peak, or None if unknown."""
    weights = sum(math.prod(p.shape) for p in parameter_table(c).values() if p.optimizer == "muon")
    weights += c.model_dim * min(c.candidates or c.vocab_size, c.vocab_size)
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
    return None if peak is None else round(6 * weights * tokens_per_s / ranks()[1] / peak, 4)

# ------------------------------------------------------------------------------------------------------------------
# 9. The run

class Compiled:
    """A function under torch.compile that says in the log what it compiled or loaded, and how long the call took. Its
    graphs, one for each `signature` of the arguments, are also kept beside the compiler's caches: to load one takes
    hundredths of a second, to trace it most of one. Not where this file is imported: others may change constants."""

    def __init__(self, function: Callable, log: Log, clock: Clock, dynamic: bool = False):
        self.function, self.log, self.clock, self.graphs = function, log, clock, {}
        self.traced, self.dynamic = torch.compile(function, dynamic=dynamic, fullgraph=True), dynamic

    def __call__(self, x: Tensor, *args):
        key, counters, begin = signature((x, *args), self.dynamic), torch._dynamo.utils.counters, time.perf_counter()
        graphs = counters["stats"]["unique_graphs"], len(self.graphs)
        if key not in self.graphs and self.function.__module__ == "__main__":
            self.graphs[key] = self.load((x, *args), key)
        result = self.graphs.get(key, self.traced)(x, *args)
        if graphs != (counters["stats"]["unique_graphs"], len(self.graphs)):
            absent = [name for name, arg in zip(self.function.__code__.co_varnames[1:], args) if arg is None]
            mode = "for training" if torch.is_grad_enabled() else "without gradients"
            what = f"{self.function.__name__} of {len(x)} rows {mode}" + f", without {absent}" * bool(absent)
            self.log.fact("compile" if self.clock.now() == 0 else "defect",
                          dict(what=what, seconds=round(time.perf_counter() - begin, 2),
                               after_launch_s=round(time.perf_counter() - LAUNCHED, 1)))
        return result

    def load(self, args: tuple, key: tuple) -> Callable:
        """The graph for these arguments, made and kept if it is not there."""
        path = None
        try:
            folder = Path(torch._inductor.runtime.cache_dir_utils.cache_dir(), "nanogpt")
            chip = torch.cuda.get_device_name if args[0].is_cuda else torch.backends.cpu.get_cpu_capability
            facts = SOURCE, sys.version, torch.__version__, chip(), torch._inductor.config.get_hash()
            path = folder / hashlib.sha256(repr((facts, self.function.__name__, key)).encode()).hexdigest()
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                skip = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}  # the key says what guards would
                graph = torch.compile(self.function, dynamic=self.dynamic, fullgraph=True, options=skip)
                part = folder / str(uuid.uuid4())
                graph.aot_compile((args, {})).save_compiled_function(str(part))
                os.replace(part, path)
            with open(path, "rb") as file:
                graph = torch.compiler.load_compiled_function(file, f_globals=self.function.__globals__)
            graph.disable_guard_check()
            return graph
        except Exception as error:  # PyTorch calls all this experimental; without it the start is slower, no more
            path and path.unlink(missing_ok=True)
            self.log.fact("note", f"{self.function.__name__} is not kept: {type(error).__name__}: {str(error)[:150]}")
            return self.traced

def signature(args: tuple, dynamic: bool) -> tuple:
    """All that a graph depends on: the form of tensors, which of them are the same one, and other values. A BlockMask's
    form follows from those. A dynamic graph serves all sizes above a block. What is written may not overlap others."""
    places = {}

    def of(x):
        if isinstance(x, Tensor):
            form = [min(n, BLOCK + 1) for n in x.shape] + [x.is_contiguous()] if dynamic else (x.shape, x.stride())
            return places.setdefault(id(x), len(places)), x.dtype, x.device, *form, x.requires_grad
        if isinstance(x, (tuple, list, dict)):
            return tuple(map(of, x.items() if isinstance(x, dict) else x))
        return BlockMask if isinstance(x, BlockMask) else x

    return torch.is_grad_enabled(), of(args)

def compile_model(model: GPT, optimizer: Optimizer, log: Log, clock: Clock) -> None:
    """A graph for each kind of block and one for the head, for training and validation: quicker than one for all."""
    torch._dynamo.config.enable_aot_compile = True  # torch 2.13's default
    torch._dynamo.config.recompile_limit = 64  # the default of 8 graphs a function is less than the kinds of blocks
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True  # or FP8's graphs are made every time
    torch._inductor.config.triton.unique_kernel_names = False  # so kinds of blocks share two kernels of five
    for owner, name in ((model, "block"), (model, "head_loss"), (model, "embed_inputs"), (optimizer, "muon"),
                        (model, "block_lists"), (optimizer, "adam")):
        dynamic = name in ("block_lists", "adam")  # one graph for all lengths
        setattr(owner, name, Compiled(getattr(owner, name), log, clock, dynamic))

def forward_backward(model: GPT, optimizer: Optimizer, inputs: Tensor, targets: Tensor, rows: dict, view: View):
    """Adds a micro-batch's gradients to .grad, but returns those of looked-up rows, with its loss, which is a sum."""
    looked_up = {name: F.embedding(row, getattr(model, name).detach()).requires_grad_() for name, row in rows.items()}
    loss = model(inputs, targets, view, looked_up)
    optimizer.scaled(loss).backward()
    return loss.detach(), {name: x.grad for name, x in looked_up.items()}

class Graphs:
    """`forward_backward` as CUDA graphs: one call starts over 800 kernels, for which the CPU may need longer than the
    GPU has to work. A graph reads and writes the same memory every time, so there is one for each length and view, and
    one for a step's first micro-batch, whose gradients become .grad, and one for the others, which add to that."""

    def __init__(self):
        self.graphs, self.pool = {}, torch.cuda.graph_pool_handle()

    def __call__(self, model: GPT, optimizer: Optimizer, inputs: Tensor, targets: Tensor, rows: dict, view: View):
        key = model.lm_head.grad is None, len(inputs), repr(view)
        if key not in self.graphs:
            places, graph = [x.clone() for x in (inputs, targets, *rows.values())], torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):  # others may allocate
                results = forward_backward(model, optimizer, *places[:2], dict(zip(rows, places[2:])), view)
            self.graphs[key] = graph, places, results, [(p, p.grad) for p in model.parameters() if p.grad is not None]
        graph, places, results, grads = self.graphs[key]
        for place, x in zip(places, (inputs, targets, *rows.values())):
            place.copy_(x)
        graph.replay()
        for p, grad in grads:
            p.grad = grad
        return results

def train_step(model: GPT, optimizer: Optimizer, batch: list[tuple[Tensor, Tensor]], step: int,
               passes: Callable = forward_backward) -> Tensor:
    """One update. Returns the loss per token over the whole batch, on the device."""
    c, total, view = model.config, 0, view_of(step, model.config)
    rows = [model.rows(inputs) for inputs, _ in batch]
    optimizer.find_rows(rows)
    for number, ((inputs, targets), index) in enumerate(zip(batch, rows), 1):
        loss, grads = passes(model, optimizer, inputs, targets, index, view)
        if number == len(batch):
            optimizer.start()
        optimizer.add_rows(index, grads)
        total = total + loss
    optimizer.step(lr_factor(step, c), muon_momentum(step, c))
    total = total / stage_tokens(stage_of(step, c), c)
    if any(recipe in MEASURED for row in model.plan for recipe in row.values()):
        total = torch.cat([total[None], ~model.amaxes.isfinite().flatten()])
    if dist.is_initialized():
        dist.all_reduce(total, async_op=True).wait()  # wait() orders streams here, it does not stop the CPU
    return total

@torch.no_grad()
def evaluate(model: GPT, inputs: Tensor, targets: Tensor, view: View) -> Tensor:
    """The loss, a sum. Weights in fp16 become bf16: they once overflowed here, though not in training."""
    weights = {name: p.bfloat16() for name, p in model.named_parameters() if p.dtype == torch.float16}
    return torch.func.functional_call(model, weights, (inputs, targets, view))

def validate(model: GPT, tokens: Tensor, step: int, device: torch.device) -> float:
    """Mean loss over the validation tokens (int16 bits, on the CPU); sequences are dealt to the ranks in turn."""
    c, (rank, world_size) = model.config, ranks()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for begin in range(rank * c.val_seq_len, c.val_tokens, world_size * c.val_seq_len):
        total += evaluate(model, *to_device(tokens[None, begin : begin + c.val_seq_len + 1], device), view_of(step, c))
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item() / c.val_tokens

def warm_up(model: GPT, optimizer: Optimizer, device: torch.device, passes: Callable = forward_backward) -> None:
    """Compiles and runs everything the run will need, on random documents; then starts anew from the seed. Each rank
    begins with other kinds of layers, and finds those of the other ranks in the compiler's cache later."""
    c, (rank, world_size), wait = model.config, ranks(), torch.get_device_module(device).synchronize
    tokens = torch.randint(0, model.bos, (max(c.micro_tokens, c.val_seq_len) + 1,), device=device)
    tokens[::600] = model.bos
    steps = list({(stage_of(s, c), view_of(s, c).plain): s for s in range(c.num_steps)}.values())
    example = lambda length: (tokens[:length], tokens[1 : length + 1].clone())
    validation = lambda step: evaluate(model, *example(c.val_seq_len), view_of(step, c))
    dense = [name for name in model.table if name not in optimizer.tables]

    def micro_batches(step: int) -> list[tuple[Tensor, Tensor]]:  # of a rank, two at most: others are like the second
        count = stage_tokens(stage_of(step, c), c) // c.seq_len // world_size
        together = micro_sequences(count, c)
        return [example(together * c.seq_len)] * min(2, count // together)

    def micro_step(step: int) -> None:
        inputs, targets = micro_batches(step)[0]
        forward_backward(model, optimizer, inputs, targets, model.rows(inputs), view_of(step, c))
        model.zero_grad()

    def update(names: list[str]) -> None:
        for name in names:
            grad = torch.zeros_like(optimizer.masters[name], dtype=getattr(model, name).dtype)
            optimizer.update(name, grad, 0.0, 0.0)

    if world_size > 1:
        layers = sorted(enumerate(model.layers), key=lambda row: row[1].attn)  # quickest first
        kinds = {(layer.attn, layer.paired, layer.offset, layer.xsa, layer.ve is None): i for i, layer in layers}
        lengths = {len(micro_batches(step)[0][0]): step for step in steps}
        parts = [(micro_step, step, kinds) for step in lengths.values()]
        parts += [(validation, c.num_steps, {(layer.attn, layer.paired): i for i, layer in layers})]
        for shift, (part, step, kinds) in enumerate(parts):
            model.working = [*kinds.values()][(rank + shift) % world_size :: world_size]  # who has one more, changes
            part(step)
        update(sorted(dense, key=lambda name: model.table[name].optimizer, reverse=True)[rank::world_size])
        wait()
        dist.barrier()
        model.working = range(len(model.layers))
    for step in steps:
        micro_step(step)  # what is made at first use cannot be captured
        train_step(model, optimizer, micro_batches(step), step, passes)
        if not model.flex:  # the masks' shapes are the windows'
            validation(step)
    update(dense)
    validation(c.num_steps)
    wait()
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
    model.block, model.embed_inputs, model.flex = block, embed_inputs, False  # lengths change: compile nothing
    ids = [model.bos, *encode(text)]
    end = min(c.seq_len, len(ids) + count)
    require(len(ids) < c.seq_len, f"--sample has {len(ids) - 1} tokens, and the model's sequences only {c.seq_len}")
    while len(ids) < end:
        padded = F.pad(torch.tensor(ids, device=model.lm_head.device), (0, -len(ids) % BLOCK))
        x = late_mix(*model.hidden(padded, view_of(c.num_steps, c)), model.late_in, model.late_out, model.late_bias)
        logits = softcap(F.linear(x[len(ids) - 1], model.weight("lm_head")))
        ids.append(int(torch.multinomial((logits / temperature).softmax(-1), 1)))
        if ids[-1] == model.bos:
            break
    return decode(ids[1:])

def save_checkpoint(model: GPT, path: str) -> None:
    """Weights without padding and the configuration; written beside and renamed, so that no half file has the name."""
    weights = {name: model.weight(name).detach().cpu().clone() for name in model.table}
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
    device = torch.device("cuda", LOCAL_GPU) if cuda else torch.device("cpu")
    if cuda:
        if LOCAL_GPU >= torch.cuda.device_count():
            raise OSError(f"process {LOCAL_GPU} of this host finds no GPU for itself; start one process a GPU")
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(priority=-1))  # goes before the tables' (section 5)
    torch.zeros(1, device=device, requires_grad=True).sum().backward()  # autograd's thread first, then NCCL (deadlock)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    return device

def all_ranks(value) -> list:
    """The value of every rank, on every rank."""
    values = [value] * ranks()[1]
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values

def check_data(c: Config) -> tuple[list[Path], Tensor]:
    """Training shards and validation tokens. Raises BadInput if the schedule needs other ranks or more data."""
    world_size = ranks()[1]
    for stage in SCHEDULES[c.schedule]:
        sequences = stage_tokens(stage, c) // c.seq_len
        sizes = ", ".join(str(n) for n in range(1, sequences + 1) if sequences % n == 0)
        require(sequences % world_size == 0, f"{world_size} processes cannot share a batch of {sequences} sequences; "
                f"start {sizes} of them, or change --batch_tokens or --seq_len")
    paths, val_tokens = find_shards(c, "train"), validation_tokens(c)
    steps = sum(1 for _ in islice(batches_of(paths, c), c.num_steps))
    have, need = sum(map(shard_tokens, paths)) * c.epochs, total_tokens(c)
    shards = math.ceil(1.3 * need / 1e8)  # the ends of long documents are skipped
    require(steps == c.num_steps, f"{c.num_steps} steps need {need:,} tokens; the {have:,} in {c.data_dir} make "
            f"{steps} steps; get more with `python data/fineweb.py {shards}`, lower --num_steps, or raise --epochs")
    return paths, val_tokens

def agreed(work: Callable, *args):
    """work(*args) on every rank; if one raises BadInput, all raise it, so that none is left waiting."""
    try:
        result, error = work(*args), None
    except BadInput as bad:
        result, error = None, str(bad)
    for sentence in filter(None, all_ranks(error)):
        raise BadInput(sentence)
    return result

def train(c: Config) -> int:
    """The whole run; returns the exit status: 0 if the target was reached, else 1."""
    device = setup_device(c)
    rank, world_size = ranks()
    paths, val_tokens = agreed(check_data, c)
    gc.disable()  # the compiler makes so many objects that collections take a tenth of its time
    run, machine = describe_run(), describe_machine(device)
    log, clock = Log(c, run["run_id"], rank == 0), Clock(device)
    log.fact("run", run)
    log.fact("config", dataclasses.asdict(c), show=False)
    log.fact("environment", machine)
    for split, files in (("train", paths), ("val", find_shards(c, "val"))):
        for path in files:
            log.fact("data", fingerprint(path, split), show=False)
    for first, end, stage in stages(c):
        if end > first:
            log.fact("stage", dict(first_step=first, last_step=end, batch_tokens=stage_tokens(stage, c)), show=False)
    log.fact("calibration", calibrate(device))

    model = GPT(c, device, world_size)
    initialize(model, c.seed)
    optimizer = Optimizer(model)
    texts = [f"{k} {v} ({'native' if native(v, device) else 'emulated'})" for row in model.plan for k, v in row.items()]
    products = ", ".join(f"{texts.count(text)} x {text}" for text in dict.fromkeys(texts))
    log.fact("note", f"products: {products}")
    if c.compile:
        compile_model(model, optimizer, log, clock)
    passes = Graphs() if c.compile and device.type == "cuda" else forward_backward
    warm_up(model, optimizer, device, passes)
    compile_s = time.perf_counter() - LAUNCHED
    log.fact("note", f"{compile_s:.1f} s from launch to the first timed step")

    batches = ahead(training_batches(paths, c, rank, world_size, device))
    gc.collect()
    gc.freeze()  # or a collection in the middle of the run would cost up to 0.4 s (record 47)
    gc.enable()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    clock.start()
    for step in range(c.num_steps + 1):
        last = step == c.num_steps
        if last or c.val_interval and step % c.val_interval == 0:
            clock.stop()  # all of this is untimed, so it touches no weight and no training data
            log.read()
            optimizer.complete_weights()
            val_loss = validate(model, val_tokens, step, device)
            log.step(step, clock.total, "val_loss", val_loss)
            if last:
                break
            clock.start()
        batch = [to_device(rows, device) for rows in next(batches)]
        loss = train_step(model, optimizer, batch, step, passes)
        log.put(step + 1, loss, clock.now())

    if c.precision == "fp16":
        log.fact("note", f"{c.num_steps - optimizer.steps} steps skipped, loss scale {optimizer.loss_scale:g}")
    log.fact("note", f"{optimizer.bytes_per_step()} bytes sent per step and rank")
    if lost := int(model.lost):
        log.fact("defect", dict(what=f"{lost} tokens of rank 0 were no candidates; raise --candidates"))
    tokens, seconds = total_tokens(c), clock.total
    reached = round(val_loss, 4) <= c.target_loss
    peak = torch.cuda.max_memory_allocated(device) // 2**20 if device.type == "cuda" else None
    log.end(dict(
        val_loss=round(val_loss, 4), target=c.target_loss, reached=reached, train_time_s=round(seconds, 3),
        step_avg_ms=round(1000 * seconds / c.num_steps, 2), tokens=tokens, tokens_per_s=round(tokens / seconds),
        mfu=mfu(c, tokens / seconds, machine["devices"][0]), peak_memory_mib=peak, compile_s=round(compile_s, 1),
        code_sha256=run["code_sha256"]))
    if rank == 0:
        print(f"log: {log.path}")
        if c.save_checkpoint:
            save_checkpoint(model, c.save_checkpoint)
        if c.sample:
            print(f"sample: {sample(model, c.sample, c.sample_tokens)}")
    return 0 if reached else 1

def main(argv: list[str]) -> int:
    """Exit status on rank 0: 0 target reached, 1 not reached, 2 bad input or too little memory."""
    master, status = os.environ.get("RANK", "0") == "0", 2
    try:
        c = parse_config(argv)
        if c.load_checkpoint:
            print(sample(load_checkpoint(c.load_checkpoint, torch.device("cpu")), c.sample, c.sample_tokens))
        status = 0 if c.load_checkpoint else train(c)
    except (BadInput, OSError, torch.OutOfMemoryError) as error:
        sentence = str(error)
        if isinstance(error, torch.OutOfMemoryError):
            sentence = sentence.split(". ")[0] + "; a smaller --micro_tokens needs less"
        master = master or not isinstance(error, BadInput)  # of its files and memory only this rank may know
        if master:
            print(f"train_gpt.py: {sentence}", file=sys.stderr)
    if dist.is_initialized():
        if status < 2:
            dist.barrier()  # torchrun ends all ranks when the first one fails: none may leave while rank 0 is at work
        dist.destroy_process_group()
    return status if master else 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
