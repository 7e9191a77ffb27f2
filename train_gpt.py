"""The NanoGPT speedrun in one script: train a GPT-2-class model to a target validation loss, fast.

    torchrun --standalone --nproc_per_node=8 train_gpt.py    # 8 GPUs: aims at 3.28 on FineWeb
    torchrun --standalone --nproc_per_node=2 train_gpt.py    # fewer GPUs: the same batches
    python train_gpt.py --preset=laptop                      # one to four minutes on a CPU
    python train_gpt.py --help                               # every key, its meaning and unit

This file holds model, loss, optimizers and run. It reads from top to bottom: (1) configuration,
(2) products, (3) attention, (4) parameters and layers, (5) the loss, (6) the whole model, (7) the
output head in FP8, (8) the optimizers, (9) schedules, (10) one step and validation, (11) the run.

Read it first as --preset=gpt2 runs it, the plain transformer: PLAIN_MODEL (section 1) names what it
is without. There the parameters are qkvo, mlp and lm_head; `attention` is its steps 1, 3 and 4;
`embed_inputs` only makes the first stream, and `late_mix` only normalises the last one; the loss is
over the whole vocabulary; and there are no tables, so that `Tables` only adds up the gradients of
the token embedding's rows. On the way through the model, a part that is off is None (row numbers,
guesses and candidates: an empty tensor), or returns early.

The rest lives in folders: data/ makes and reads shards, records/ writes logs and judges them, and
nanogpt/ has the tables, what follows from the text alone, kernels, compilation, low precision,
saves and the command line. Importing this file trains nothing and needs no GPU, so tests and
notebooks can use its parts.

Shapes in comments: T tokens that are worked on at a time, mostly a micro-batch, its sequences end
to end, D width of the model, H attention heads, d width of a head, F hidden width of the MLP, L
layers, A of them with attention, E with value embeddings, V size of the vocabulary, G number of
lengths of n-grams, W width of their rows. A function whose docstring says "A collective." exchanges
data with the other ranks (processes, one for each GPU): all must call it at the same point.
"(record 28)" names a record of the speedrun, whose code is in
github.com/KellerJordan/modded-nanogpt."""

with open(__file__, "rb") as file:
    SOURCE = file.read()  # before all else: the log shows what runs, not a later edit of it

import time

from nanogpt import process

LAUNCHED = time.perf_counter()
LOCAL_GPU = process.local_rank()
# Until the run is ready a signal ends the process at once; later Run.save_or_stop ends the run.
STOP = process.Stop()

if __name__ == "__main__":
    STOP.take_over()  # importing torch takes seconds, in which Ctrl-C would give a traceback
    LOCAL_GPU = process.set_environment()

import dataclasses
import gc
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from itertools import accumulate, islice, pairwise
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from data import shards
from nanogpt import checkpoints, command_line, faults, gpu, kernels, masks, planning, ranks, warmup
from nanogpt.batches import host_tensor, inputs_and_targets
from nanogpt.candidates import Candidates, Targets
from nanogpt.command_line import RunConfig, key
from nanogpt.gpu import NO_TRANSFER, constant, to_device
from nanogpt.kernels import E4M3, E5M2
from nanogpt.masks import BLOCK_SIZE
from nanogpt.past import Past, PreparedBatch, Reading
from nanogpt.planning import RunFiles, check_run_files, chooses_steps
from nanogpt.precision import Products, fp8_static, recipes
from nanogpt.precision.fp8_static import HEAD_GRADIENT_SCALE, HEAD_INPUT_SCALE, HEAD_WEIGHT_SCALE
from nanogpt.precision.recipes import LayerProducts, Precision
from nanogpt.tables import Table, Tables
from records import journal, report

# --------------------------------------------------------------------------------------------------
# 1. Configuration: every key can be given as --name=value

@dataclasses.dataclass
class Config(RunConfig):
    """What decides the result of a run, and where its data are. `RunConfig` has the other keys,
    such as where the log goes and when the run is saved (nanogpt/command_line.py)."""
    preset: str = key(
        "", "a preset by its name; without one it is chosen by the machine, and with a data_dir "
        "also by the text")
    # data
    data_dir: str = key("data/fineweb10B", "folder of .bin shards")
    train_files: str = key("*_train_*.bin", "glob of training shards inside data_dir")
    val_files: str = key("*_val_*.bin", "glob of validation shards inside data_dir")
    epochs: int = key(
        1, "times the training shards may be read; a large table of n-grams learns by heart what "
        "is read again")
    fit: bool = key(
        False, "choose model, table sizes, lengths and steps by the text and the GPU, without a "
        "target; on if a data_dir but no preset is given")
    cut_documents: bool = key(
        False, "cut the text into sequences without gaps, without regard to documents; else each "
        "sequence begins with a document")
    longest_document: int = key(
        2048, "tokens that are read of a document; with cut_documents all of them")
    # model
    num_layers: int = key(
        6, "layers; the one in the middle and the last one see as far as the long window")
    model_dim: int = key(640, "width of the residual stream")
    num_heads: int = key(4, "attention heads of a layer")
    head_dim: int = key(128, "width of a head; num_heads * head_dim is at most model_dim")
    mlp_dim: int = key(2304, "hidden width of the MLP")
    vocab_size: int = key(
        50304, "rows of the embedding: GPT-2's 50257 tokens, rounded up to a multiple of 128",
        most=2**16)
    attention_layers: str = key(
        "all", "layers that have attention, as 0,2,5, or all; the others are just an MLP")
    value_layers: str = key(
        "all", "which of these add a learned vector of each token to its values: as 0,5, or all, "
        "or none")
    mix_previous: bool = key(
        True, "let attention and MLP read some channels of the previous token, and take half of "
        "each key from it")
    late_mix: bool = key(
        True, "add to the last stream an amount of earlier ones, of guesses, n-grams, embeddings "
        "(MUDD)")
    scalars: bool = key(
        True, "learned factors of the parts of a layer; without them all are 1, and no layer adds "
        "the embedding again")
    candidates: int = key(
        8192, "tokens of the vocabulary that a training loss is computed over; 0: all of them",
        least=0)
    second_token: bool = key(
        True, "predict the token after the next one, too, in the first stages of speedrun and "
        "onepass")
    # schedule
    schedule: str = key("speedrun", "entry of SCHEDULES: the stages of the run")
    num_steps: int = key(3800, "optimizer steps", most=10_000_000)
    minutes: float = key(
        0.0, "training time: after the warm-up, as many steps are chosen as it has room for and "
        "the text lasts for; 0: num_steps (if neither is given, --fit takes two minutes with "
        "laptop, char and small)")
    batch_tokens: int = key(
        262_144, "tokens of a full batch, over all GPUs; SCHEDULES gives each stage a part of it")
    seq_len: int = key(
        8192, "tokens of a training sequence, which may hold several documents")
    micro_tokens: int = key(
        32_768, "most tokens a GPU trains on at a time, in whole sequences: fewer need less "
        "memory. With --fit no sequence is longer")
    cooldown_frac: float = key(
        0.7, "last part of the steps, in which the factor of all learning rates falls to lr_floor",
        least=0.001, most=1)
    lr_floor: float = key(
        0.15, "factor of the learning rates after the last step; 0.3 in `speedrun`, because it "
        "averages its last weights",
        most=1)
    # optimizers
    muon_lr: float = key(
        0.02, "Muon's learning rate, for the matrices of attention; the MLPs' have two and four "
        "times this")
    muon_momentum: float = key(0.9, "Muon's momentum", most=0.999)
    muon_decay: float = key(
        1.2, "weight decay of the matrices: an update that shrinks a weight also takes away "
        "muon_decay * (muon_lr * factor of the schedule)^2 of it; for the MLPs' up twice this, for "
        "down four times")
    head_lr: float = key(
        0.0065, "Adam's learning rate for output head and token embedding; MUDD "
        "(late_mix) has a quarter of it")
    head_every_second: bool = key(
        False, "update the head, and with it the token embedding, in every second step only, by "
        "the sum of two gradients; the gradient of a last odd step is dropped")
    average_frac: float = key(
        0.0, "time constant of a moving average of all weights but those of tables, as a part of "
        "the steps; the last validation is of weights half-way between this average and the last "
        "ones, and if it is the best, those weights are kept. 0: none")
    table_lr: float = key(0.12, "learning rate for value and n-gram embeddings")
    scalar_lr: float = key(0.04, "Adam's learning rate for the scalars and `length_vectors`")
    longest_ngram: int = key(
        3, "for each n from 2 to this, the last n tokens look up a row of a table of n-grams; a "
        "match in the document has at most so many tokens, too. Tokens that differ only "
        "in case, accents, or a space before count as the same",
        least=2)
    ngram_rows: int = key(
        16_777_216, "rows of that table, for all lengths; n-grams whose hashes have the same "
        "remainder share one. 0: no n-grams",
        least=0)
    ngram_part: float = key(
        0.5, "width of such a row, as a part of model_dim; in each step the GPUs exchange rows, so "
        "narrow ones take less time",
        most=1)
    induced: bool = key(
        True, "guess the next token by the longest match earlier in the document")
    recall_rows: int = key(
        0, "entries of a table of what came next in the training text; it stays empty if --epochs "
        "is above 1, because a text that is read again would be known by heart. Each takes 4 bytes "
        "on every GPU, and in checkpoints and saves. 0: no such guesses",
        least=0)
    recall_for: str = key(
        "3,4,6", "for how many last tokens this table is looked up; the longest match counts")
    # evaluation
    target_loss: float = key(3.28, "validation loss to reach, nats per token; 0: none")
    val_tokens: int = key(
        10_485_760, "validation tokens, always the first ones; records are compared on these. With "
        "--fit fewer if the text has no more")
    val_seq_len: int = key(262_144, "tokens per validation sequence")
    val_interval: int = key(125, "steps between validations, 0: only at the end", least=0)
    # numbers
    seed: int = key(
        0, "seed of the initial weights, candidates and random rounding", least=0,
        most=2**32 - 1)
    precision: str = key(
        "auto", "row of PRECISIONS, such as bf16 or fp8-head (all: docs/precision.md); auto: "
        "fp8-qkv where the GPU has FP8, else bf16")
    float8_all_gather: bool = key(
        False, "hand out the layers' updated matrices as FP8, which halves their traffic; for "
        "--precision=fp8")
    dtype: str = key(
        "auto", "of activations and of the weights that products use: bfloat16, float32, float64, "
        "or auto: as the precision says",
        choices=("auto", "bfloat16", "float32", "float64"))

    @property
    def layers_with_attention(self) -> tuple[int, ...]:
        """The layers that have attention."""
        every = tuple(range(self.num_layers))
        return command_line.numbers_among("attention_layers", self.attention_layers, every)

    @property
    def layers_with_values(self) -> tuple[int, ...]:
        """Those of them that have value embeddings."""
        possible = self.layers_with_attention
        return command_line.numbers_among("value_layers", self.value_layers, possible)

    @property
    def ngram_width(self) -> int:
        """Width of a row of the table of n-grams."""
        return max(1, round(self.ngram_part * self.model_dim))

    @property
    def recall_lengths(self) -> tuple[int, ...]:
        """For how many last tokens `recall_table` is looked up."""
        possible = tuple(range(3, 17))  # two are compared anyway (CHECK_BITS in nanogpt/past.py)
        lengths = command_line.numbers_among("recall_for", self.recall_for, possible)
        return lengths if self.recall_rows else ()

    @property
    def longest_match(self) -> int:
        """How many tokens a match has at most, in the document or in the training text."""
        return max((self.longest_ngram, *self.recall_lengths))


# Small models of single bytes have these settings in common. Of their 272 tokens the first 256 are
# the bytes, and the last one begins a document. Products in FP8 need a multiple of 16.
BYTES = dict(
    data_dir="data/pydocs", cut_documents=True, vocab_size=272,
    cooldown_frac=0.6)

# For short texts: six layers, each of which sees at most 256 tokens.
SHORT_TEXTS = dict(
    num_layers=6, model_dim=384, num_heads=6, head_dim=64, mlp_dim=1536,
    longest_ngram=2, ngram_part=1.0,
    schedule="char", num_steps=1000, micro_tokens=16_384,
    val_seq_len=16_384, val_interval=100,
    precision="bf16", save_every=5.0)

# Of Intel's and AMD's processors, those with AVX512-BF16 multiply bf16 faster than float32. To
# compile takes minutes on a CPU.
CPU_HAS_BF16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
ON_CPU = dict(compile=False, precision="bf16" if CPU_HAS_BF16 else "fp32")

# The plain transformer: each mechanism that can be switched off is. In parentheses: where it lives.
# What has no switch stays: normalised queries and keys, a rotary embedding of half of a head,
# attention inside of a document and of a window, squared ReLU, one matrix for embedding and head,
# capped logits, NorMuon with averaged updates, how weights decay. FP8 stays, too, where the GPU
# has it.
PLAIN_MODEL = dict(
    value_layers="none",  # a learned vector of each token in its values (`attention`, step 2)
    mix_previous=False,  # channels and keys of the previous token (`input_of`, `offset_keys`)
    scalars=False,  # learned factors of the parts of a layer (SCALARS, `block`)
    ngram_rows=0,  # rows for the last two and more tokens (`embed_inputs`, step 2)
    induced=False,  # a guess by an earlier match in the document (nanogpt/past.py)
    recall_rows=0,  # a guess by an earlier step's text (nanogpt/past.py)
    late_mix=False,  # earlier streams are added to the last one (`late_mix`)
    candidates=0,  # a part of the vocabulary for the loss (section 5)
    second_token=False,  # the token after the next one as a target, too (`head_loss`)
)

# For long texts. Attention takes many small kernels, so layers 1 and 4 of the six do without it;
# layer 2 has attention, but no value embeddings (records/TRIED.md).
LONG_TEXTS = dict(
    attention_layers="0,2,3,5", value_layers="0,3,5", head_every_second=True,
    micro_tokens=65_536)

PRESETS: dict[str, dict] = {  # a new one has a line in ABOUT, too
    "gpt2": PLAIN_MODEL | dict(
        num_layers=12, model_dim=768, num_heads=6, mlp_dim=3072,
        schedule="gpt2", num_steps=3200, batch_tokens=131_072, seq_len=1024,
        # Sequences that begin with documents, as those of speedrun do, would leave out a third of
        # the text, because they are short.
        cut_documents=True, target_loss=0.0),
    "speedrun": LONG_TEXTS | dict(
        # The default, 3,800 steps, reads 585M tokens. Record 92 reaches 3.277 on FineWeb and 3.124
        # on the stand-in for it (README.md), so 3.28 on FineWeb stands for 3.127 on the stand-in.
        # There we are at 3.3602 after 191.5M tokens (five seeds, records/long_runs.md), and the
        # loss falls by about 0.2105 when e times as many are read: 191.5M * e^((3.3602 - 3.127) /
        # 0.2105) = 580M, and a little to be safe. A larger model needs fewer tokens, but more time
        # (the same page).
        muon_lr=0.0235, muon_momentum=0.92, muon_decay=2.0, head_lr=0.0072, scalar_lr=0.035,
        ngram_rows=33_554_432, recall_rows=1_073_741_824,
        # Averages make up for learning rates that stay high to the end (record 92).
        average_frac=0.06, cooldown_frac=0.75, lr_floor=0.3),
    "onepass": LONG_TEXTS | dict(
        schedule="onepass", num_steps=1420, batch_tokens=131_072,
        recall_rows=268_435_456,
        target_loss=3.492),
    "laptop": BYTES | ON_CPU | dict(
        num_layers=4, model_dim=128, num_heads=2, head_dim=64, mlp_dim=512,
        longest_ngram=6, ngram_rows=131_072, ngram_part=1.0,
        recall_rows=2_097_152, recall_for="7,12",
        schedule="laptop", num_steps=520,
        batch_tokens=2048, seq_len=2048,
        muon_lr=0.04, muon_momentum=0.88, head_lr=0.007, table_lr=0.4,
        # Seeds 0 to 3 end between 1.0891 and 1.0904 in bf16 (records/2026-12-01_laptop).
        target_loss=1.1, val_tokens=131_072, val_seq_len=8192,
        device="cpu", save_checkpoint="auto", sample="The "),
    "char": BYTES | SHORT_TEXTS | dict(
        ngram_rows=4096, epochs=100, batch_tokens=16_384, seq_len=16_384,
        muon_lr=0.03, head_lr=0.02, table_lr=0.1,
        target_loss=1.3, val_tokens=65_536),
    "small": SHORT_TEXTS | dict(
        ngram_rows=65_536, epochs=2, cut_documents=True, batch_tokens=32_768, seq_len=2048,
        muon_lr=0.021, muon_momentum=0.95, head_lr=0.005, table_lr=0.15, cooldown_frac=0.6,
        target_loss=0.0, val_tokens=262_144),
}

ABOUT = {
    "gpt2": "the plain transformer of 124M weights with Muon and Adam, on GPUs: to learn from, and "
            "to compare optimizers",
    "speedrun": "55M weights, and tables, for 585M tokens of FineWeb, on GPUs; aims at a loss of "
                "3.28",
    "onepass": "the same model with smaller tables, for 125M tokens that are read once, on GPUs",
    "laptop": "a small model of bytes, one to four minutes on a CPU",
    "char": "a larger model of bytes, for short texts on a GPU",
    "small": "the layers of char with GPT-2's tokens, for texts of less than 60M tokens",
}

# A run that goes on from a save may have other values of these keys, and of those of RunConfig.
# They change its weights by no more than rounding and chance do. (The data must be the same, but
# may lie elsewhere.)
MAY_CHANGE = ("data_dir", "micro_tokens", "target_loss", "val_interval")


class Stage(NamedTuple):
    """A part of the run. Windows grow from stage to stage, and batches may. Early on, small batches
    learn more per token (record 46), and attention over the near past learns sooner and takes less
    time."""
    fraction: float  # of all steps; 0: only for validation and samples after the last step
    batch_part: float  # its batches, as a part of batch_tokens
    long_window: int  # how far the middle and the last layer see, in blocks of 128 tokens
    short_window: int  # how far the other layers see, in blocks of 128 tokens
    lr_factor: float  # of all learning rates and weight decays
    second_weight: float = 0.0  # of the token after the next one in the loss (`head_loss`)


# The stages of speedrun and onepass after the first one. They and their learning rates follow
# records 46, 49, 53, 72. Batches and windows are smaller than theirs (records/TRIED.md).
LATER_STAGES = [
    # fraction, batch, long and short window, learning rates, second_weight
    Stage(0.33, 1 / 2, 5, 2, 1.52, 0.25),  # the second stage
    Stage(0.33, 1, 9, 4, 1.73),  # the third one
    Stage(0.01, 1, 13, 6, 1.73),  # the last steps
    Stage(0, 1, 20, 6, 1.73),  # validation after the last step
]

SCHEDULES: dict[str, list[Stage]] = {
    "speedrun": [Stage(0.33, 1 / 4, 3, 1, 1.0, 0.5), *LATER_STAGES],
    "onepass": [Stage(0.33, 1 / 2, 3, 1, 1.0, 0.5), *LATER_STAGES],
    "laptop": [
        Stage(0.4, 1, 2, 1, 1.0),
        Stage(0.3, 1, 4, 2, 1.0),
        Stage(0.3, 1, 8, 2, 1.0),
    ],
    "char": [Stage(1, 1, 2, 2, 1.0)],
    "gpt2": [Stage(1, 1, 8, 8, 1.0)],
}


def parse_config(argv: list[str]) -> Config:
    """What the command line says, laid over the values of a save (--resume), over what fits the
    text (--fit), or over a preset (nanogpt/planning.py). Raises BadInput, of which the user sees
    one sentence."""
    return planning.parse_config(sys.modules[__name__], argv)


# --------------------------------------------------------------------------------------------------
# 2. Products
#
# Most arithmetic of training is to multiply activations by large matrices. There are five kinds
# of these, the "projections": up to four in each layer, and the output head. Each has one product
# forward and two backward.
#
#   qkv      to queries, keys and values, in one product
#   o        to the output of attention
#   up       to the hidden layer of the MLP
#   down     from there to the output of the MLP
#   lm_head  to the logits
#
# A "recipe" is a way to compute these products, forward and backward: in the model's dtype ("bf16"
# and others), or with narrow numbers. A "precision" is a recipe for each of the five. The model
# knows neither: it calls the methods of `Products` (nanogpt/precision/__init__.py). Only the loss
# has a way of its own for a head in "fp8-static" (section 7). Two recipes, fp16 and fp8, also act
# at fixed points of a step, to scale the loss for example. For that a model has one object of
# `StepHooks`, which does nothing for all other recipes.

# A number is divided by a scale before it is rounded to FP8 or FP4. "fp8" and "nvfp4" measure their
# scales, those of "fp8-static" are constant.
# "bf16", "fp32" and "fp16" all mean the model's dtype. That is --dtype; by default it is fp32 or
# fp16 in the row of that name, and bf16 in the others.
PRECISIONS: dict[str, tuple[str, ...]] = {  # recipes of qkv, o, up, down and lm_head
    "bf16": ("bf16",) * 5,
    "fp32": ("fp32",) * 5,
    "fp16": ("fp16",) * 5,
    "fp8": ("fp8",) * 5,
    "fp8-head": ("bf16", "bf16", "bf16", "bf16", "fp8-static"),
    "fp8-mlp": ("bf16", "bf16", "fp8-static", "fp8-static", "fp8-static"),
    # `o` is the smallest product: FP8 gains nothing there, and has no constant scale for it.
    "fp8-qkv": ("fp8-static", "bf16", "fp8-static", "fp8-static", "fp8-static"),
    "nvfp4": ("nvfp4", "nvfp4", "nvfp4", "nvfp4", "bf16"),
}


def relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATION = relu_squared  # of the MLP (So et al. 2021)


def choose_recipes(c: Config, device: torch.device) -> dict[str, str]:
    """The recipe of each projection. Raises BadInput where the user asked for what cannot be. With
    another activation the MLP is never "fp8-static": neither the kernel nor the scales are for
    it."""
    precision = c.precision
    if precision == "auto":
        precision = "fp8-qkv" if kernels.has_fp8(device) else "bf16"
    row = dict(zip(recipes.PROJECTIONS, PRECISIONS[precision]))
    if ACTIVATION is not relu_squared:
        for projection in ("up", "down"):
            if row[projection] == "fp8-static":
                row[projection] = "bf16"
    return recipes.choose(c, row, device)


# --------------------------------------------------------------------------------------------------
# 3. Attention: causal, inside one document, over a sliding window of whole blocks
#
# A query sees a key if the key is not later, both belong to the same document, and the key's
# block is among the last `window` blocks up to the query's (nanogpt/masks.py). On GPUs
# compiled FlexAttention skips the blocks in which nothing is seen; otherwise `masks.sdpa` computes
# the same. With FlexAttention, windows are inputs of the compiled graphs, so a new window compiles
# nothing.


class Setting(NamedTuple):
    """What a step of the schedule says about attention (how far it sees, how fast positions turn
    queries and keys, how large its scores are) and about the loss. Each Setting has CUDA graphs of
    its own."""
    windows: tuple[int, int]  # the long one and the short one, in blocks
    frequencies: tuple[float, ...]  # of the rotary embedding, radians a token
    score_scale: float  # multiplies the scores of attention
    second_weight: float = 0.0  # as in Stage


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor) -> Tensor:
    """q, k, v (T, H, d) -> (T, H, d), by FlexAttention for a BlockMask, else by `masks.sdpa`."""
    if not isinstance(mask, BlockMask):
        return masks.sdpa(q, k, v, mask)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # (1, H, T, d)
    y = flex_attention(q, k, v, block_mask=mask, scale=1.0)  # the queries are scaled already
    return y[0].transpose(0, 1)


# --------------------------------------------------------------------------------------------------
# 4. Parameters and layers

# Learned factors of the parts of a layer, and their initial values. Those of the stream are
# logarithms. With x the residual stream, a layer computes in effect (`amounts_of` says how)
#
#   x = exp(stream_attn) * x + o * attention(input_of(x)) + inject
#   x = exp(stream_mlp) * x + down * MLP(input_of(x))
#
# with inject = first * (the normalised embedding) + past * (what n-grams and matches say). A layer
# without attention lacks o * attention(...). With --scalars=False all factors are 1, but `first` is
# 0. `amounts_of`, `embed_inputs`, `block` and `check_weights` rely on this order. A new factor
# stands just before `stream_attn`, is counted in `amounts_of`, and named in `block`.
SCALARS = {
    "first": 0.0,
    "past": 0.05,
    "o": 1.0,
    "down": 1.0,
    "v": 0.5,  # of the values inside of attention
    "stream_attn": 0.05,
    "stream_mlp": 0.05,
}


class Amounts(NamedTuple):
    """How much of each part is added to the stream, in the way that `amounts_of` tells."""
    of_first_stream: Tensor  # (), the product of all factors of the stream
    of_layers: Tensor  # (L, 5), for `first`, `past`, `o`, `down` and `v`


def amounts_of(scalars: Tensor) -> Amounts:
    """scalars (L, len(SCALARS)) -> amounts, so that no layer has to multiply the stream.

    Suppose that the stream begins with x, and that there are two factors f and g. After them it is
    g (f x + a) + b = f g x + g a + b. So the model multiplies each part, when it adds it, by all
    factors that come later, and never the stream itself, which would take a pass over the stream,
    and another one for the gradient of the factor.

    The last stream is the same as with multiplications. Earlier ones are already multiplied by all
    later factors. Attention and MLPs normalise what they read, so for them this makes no
    difference, and `late_mix` learns to use the streams as they are."""
    first_past_o, down, v, factors = scalars.split((3, 1, 1, 2), 1)
    so_far = factors.flatten().cumsum(0)  # (2 L,) logarithms of the products of factors
    that_follow = (so_far[-1] - so_far).exp()  # (2 L,) the product of the factors after each one
    after_attn, after_mlp = that_follow.view(-1, 2).split(1, 1)  # (L, 1) each
    of_layers = torch.cat((first_past_o * after_attn, down * after_mlp, v), 1)
    return Amounts(so_far[-1].exp(), of_layers)


class Param(NamedTuple):
    """Describes a parameter of the model, called a bank. What all layers have lies together in one
    bank."""
    shape: tuple[int, ...]  # Muon takes it as a stack of matrices
    optimizer: str  # "muon" (3-D), "adam", or that of tables, "rows" (nanogpt/tables.py)
    lr: float  # is multiplied by the factor of the schedule, and by matrix_factors
    init: Callable[[Tensor], None]  # fills a tensor in place: float32 or wider, or a table itself
    # Weight decay: an update that shrinks a weight also takes lr * decay of it away. The factor of
    # the schedule multiplies lr and decay, so that decay fades faster than the learning rate
    # (record 43).
    decay: float = 0.0
    # The factors by which the mean of the gradients and their mean square fade in a step (Muon: the
    # mean square of the updates). Tables have no mean.
    betas: tuple[float, float] = (0.9, 0.99)
    # Which share of it a rank updates: "slice", "columns" of a table, or "all", for small ones,
    # which are in float32 or wider in the model itself (section 8)
    share: str = "slice"
    matrix_factors: tuple[float, ...] = (1.0,)  # Muon: factors of lr, for the matrices in turn


# The banks of which a step looks up rows, and the key under which Reading.rows() (nanogpt/past.py)
# has the numbers of these rows. lm_head is the token embedding, too.
LOOKED_UP_AT = {"ngrams": "ngrams", "value_embeds": "tokens", "lm_head": "tokens"}


def normal(deviation: float) -> Callable[[Tensor], None]:
    return lambda w: w.normal_(std=deviation)


def uniform(bound: float) -> Callable[[Tensor], None]:
    return lambda w: w.uniform_(-bound, bound)


def given(*numbers: float) -> Callable[[Tensor], None]:
    return lambda w: w.copy_(torch.tensor(numbers))


def parameter_table(c: Config) -> dict[str, Param]:
    """All parameters. The optimizer updates the tables first, then matrices and head in the order
    of `params` below, and last the small banks. While a GPU updates one of them, gradients of the
    next ones and new weights travel. Another order may take more time, and draws other initial
    weights from a seed. So a new parameter is best added at the end."""
    L = c.num_layers
    A = len(c.layers_with_attention)
    E = len(c.layers_with_values)
    D = c.model_dim
    H = c.num_heads
    d = c.head_dim
    V = c.vocab_size
    num_kinds = c.induced + bool(c.recall_lengths)  # of matches
    num_sources = 4 + bool(c.ngram_rows) + num_kinds + bool(E)  # as `last_stream` lists them

    # Uniform numbers from -a to a have the deviation a / sqrt(3). A deviation of 0.5 D^-0.5 is a
    # bit better than PyTorch's default, D^-0.5 / sqrt(3) (record 19).
    small_uniform = uniform(3**0.5 * 0.5 * D**-0.5)
    zero = nn.init.zeros_

    def up_and_down(w: Tensor) -> None:
        small_uniform(w[::2])
        zero(w[1::2])

    def of_attention(w: Tensor) -> None:
        """Half of each key is made from the previous token (`offset_keys`). For this half, queries
        and keys begin with equal weights (Trockman and Kolter 2023), so a query matches a key whose
        previous token is the query's own token: in "A B ... A", the second A attends to B.
        Otherwise a model has to learn this, in some runs much later than in others."""
        small_uniform(w)
        if not c.mix_previous:
            return
        # The dimensions of a head are (2, d / 2): j and j + d / 2 are a pair of the rotary
        # embedding. Pairs from d / 4 on do not turn (`rotary_table`), and are that half.
        weights = w.view(A, 4, H, 2, d // 2, D)
        queries, keys = weights[:, 0], weights[:, 1]
        keys[..., d // 4 :, :] = queries[..., d // 4 :, :]

    muon = dict(
        optimizer="muon", lr=c.muon_lr, betas=(c.muon_momentum, 0.9),
        decay=c.muon_decay * c.muon_lr)
    scalar = dict(optimizer="adam", lr=c.scalar_lr, share="all")
    late = dict(optimizer="adam", lr=0.25 * c.head_lr, share="all")
    table = dict(
        optimizer="rows", lr=c.table_lr, betas=(0, 0.95), decay=0.07 * c.table_lr, share="columns")
    has = dict(  # parameters of what can be switched off
        value_embeds=E, ngrams=c.ngram_rows, scalars=c.scalars, length_vectors=num_kinds,
        late_in=c.late_mix, late_out=c.late_mix, late_bias=c.late_mix)
    params = {
        # up and down of each layer in turn, both (D, F): y = relu(x up)^2 down^T. By theory, Muon's
        # learning rate for up grows with the root of F / D (record 42), which is 2 for the usual
        # F = 4 D. We take 2 for every width, and for down 4, as record 48 does.
        "mlp": Param(
            (2 * L, D, c.mlp_dim), init=up_and_down, matrix_factors=(2.0, 4.0), **muon),
        # the output head, which is the token embedding, too
        "lm_head": Param(
            (V, D), optimizer="adam", lr=c.head_lr, init=normal(0.005), betas=(0.5, 0.95),
            decay=0.75 * c.head_lr),
        # before value_embeds, as in the large presets it is larger, and its transfers take longer
        "ngrams": Param((c.ngram_rows, c.ngram_width), init=zero, **table),
        "value_embeds": Param((V, E * H * d), init=normal(0.01), **table),
        # Queries, keys, values and output of each layer with attention in turn. The weight of the
        # output (D, H d) is stored transposed, so that all have one shape.
        "qkvo": Param(
            (4 * A, H * d, D), init=of_attention, **muon),
        "scalars": Param((L, len(SCALARS)), init=given(*SCALARS.values()), **scalar),
        # row n is for a match of n tokens, in the document or in the training text; row 0 for none
        "length_vectors": Param((c.longest_match + 1, D), init=zero, **scalar),
        # the small network of `late_mix`: 64 hidden units, an amount of each source
        "late_in": Param((64, D), init=uniform(D**-0.5), **late),
        "late_out": Param((num_sources, 64), init=zero, **late),
        # At first, 0.4 (0.1 of `late_mix` * 4) of the stream after two thirds of the layers is
        # subtracted: the last layers need what it holds, the head does not (records 40, 81).
        "late_bias": Param(
            (num_sources,), init=given(0, 0, -4, *[0] * (num_sources - 3)), **late),
    }
    return {name: param for name, param in params.items() if has.get(name, True)}


def norm(x: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


# CUDA graphs read the same cos and sin again, so all are kept. Those of validation, of 262,144
# positions, take 128 MiB for each stage.
@cache
def rotary_table(T: int, frequencies: tuple[float, ...], head_dim: int, dtype: torch.dtype,
                 device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (T, 1, d). Dimensions j and j + d/2 are a pair that is rotated; pairs from j =
    d/4 on do not turn, so that they are free of position."""
    turning = torch.tensor(frequencies, dtype=torch.float64, device=device)
    position = torch.arange(T, device=device).double()
    angle = position[:, None, None] * F.pad(turning, (0, head_dim // 2 - len(turning)))
    cos = torch.cat((angle.cos(), angle.cos()), -1)
    sin = torch.cat((angle.sin(), -angle.sin()), -1)
    return cos.to(dtype), sin.to(dtype)


def norm_and_rotate(x: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """The rotary embedding of scale * norm(x), for x (..., d). A rotation keeps the length, so the
    norm is taken of x itself, and one kernel does all."""
    wide = torch.promote_types(x.dtype, torch.float32)
    mean_square = x.to(wide).square().mean(-1, keepdim=True) + 1e-6
    rotated = x * cos + x.roll(x.size(-1) // 2, -1) * sin
    return (rotated * (mean_square.rsqrt() * scale)).type_as(x)


class LayerWeights(NamedTuple):
    """The weights of one layer; None where it lacks a part."""
    up: Tensor  # (D, F)
    down: Tensor  # (D, F)
    qkvo: Tensor | None  # (4, H d, D): q = x qkvo[0]^T, k and v likewise; output = y qkvo[3]
    amounts: Tensor | None  # (5,), those of `Amounts`


class LayerContext(NamedTuple):
    """What a layer gets beside the stream and its weights."""
    cos: Tensor  # (T, 1, d)
    sin: Tensor
    score_scale: Tensor  # ()
    mask: BlockMask | Tensor
    inject: Tensor | None  # (T, D), added to the stream before the MLP
    value_embed: Tensor | None  # (T, H d)
    begins: Tensor | None  # (T,) bool, where documents or sequences begin; None: nothing is mixed


def mix_in_previous(x: Tensor, is_own: Tensor, begins: Tensor | None) -> Tensor:
    """x (T, ..., C) -> x, in which each token keeps the channels that `is_own` (C,) marks, and has
    the others from the previous token. The first token of a document, where `begins` (T,) is true,
    keeps all of its own; and without `begins` all tokens do."""
    if begins is None:
        return x
    begins = begins.view(-1, *[1] * (x.dim() - 1))  # (T, 1) or (T, 1, 1)
    return torch.where(begins | is_own, x, x.roll(1, 0))


def input_of(x: Tensor, context: LayerContext) -> Tensor:
    """The stream x (T, D) -> what attention or the MLP reads of it: normalised, with the last
    quarter of the channels from the previous token (as in RWKV, Bo Peng et al. 2023)."""
    D = x.size(1)
    is_own = torch.arange(D, device=x.device) < D - D // 4
    return mix_in_previous(norm(x), is_own, context.begins)


def offset_keys(k: Tensor, context: LayerContext) -> Tensor:
    """Keys k (T, H, d) -> keys in which the half without rotary embedding is the previous token's.
    So a query that looks for a token finds the one that came after it (record 49)."""
    d = k.size(-1)
    is_own = torch.arange(d, device=k.device) % (d // 2) < d // 4
    return mix_in_previous(k, is_own, context.begins)


def attention(x: Tensor, weights: LayerWeights, amounts: dict[str, Tensor | float],
              context: LayerContext, products: LayerProducts) -> Tensor:
    """x (T, D), from `input_of` -> the output of attention (T, D)."""
    T = len(x)
    d = context.cos.size(-1)

    # 1. Queries, keys and values, (T, H, d) each. Normalised queries and keys bound the scores
    # (Henry et al. 2020).
    q, k, v = products.qkv.three_linears(x, weights.qkvo[:3], amounts["v"])
    q = norm_and_rotate(q.view(T, -1, d), context.cos, context.sin, context.score_scale)
    k = norm_and_rotate(k.view(T, -1, d), context.cos, context.sin)

    # 2. A value embedding of each token is added to its values (record 14).
    v = v.view(T, -1, d)
    if context.value_embed is not None:
        v = v + context.value_embed.view(T, -1, d)

    # 3. Attention itself.
    k = offset_keys(k, context)
    y = attend(q, k, v, context.mask)

    # 4. The output.
    return products.o.linear(y.flatten(1), weights.qkvo[3].t(), amounts["o"])


def for_each_token(amount: Tensor, x: Tensor) -> Tensor:
    """The amount (), repeated for each token of x (T, D): (T, 1). Its gradient is then summed in
    two steps: over each row, by the kernel that has the row at hand anyway, and then over the
    tokens. One sum over all would have to read x and its gradient again."""
    return amount.expand(len(x), 1).type_as(x)


def block(x: Tensor, weights: LayerWeights, context: LayerContext,
          products: LayerProducts) -> Tensor:
    """One layer: the residual stream x (T, D) -> the new stream (T, D). It is a pure function, so
    with FlexAttention all layers with the same parts and recipes share one compiled graph. (A block
    of attention is something else, 128 tokens.)"""
    amounts = dict.fromkeys(("o", "down", "v"), 1.0)
    if weights.amounts is not None:
        # Five of SCALARS: those of the stream are contained in these (`amounts_of`).
        amounts = dict(zip(SCALARS, weights.amounts.unbind()))
        # `o` and `down` multiply weights, and `v` the values of each token.
        amounts["v"] = for_each_token(amounts["v"], x)
    if weights.qkvo is not None:
        x = x + attention(input_of(x, context), weights, amounts, context, products)
    if context.inject is not None:
        x = x + context.inject
    return x + products.up.mlp(
        input_of(x, context), weights.up, weights.down, amounts["down"], ACTIVATION, products.down)


# N-grams whose hashes have the same remainder by ngram_rows share a row of the table. So that they
# do not read the same vector, each channel of the row is multiplied by a random sign. The signs are
# chosen by hash % SIGN_ROWS (record 83). SIGN_ROWS is a prime, so hashes with the same remainder by
# ngram_rows seldom have the same remainder by SIGN_ROWS, too.
SIGN_ROWS = 8191


def embed_inputs(
        embedded: Tensor,  # (T, D), the embedding of the tokens
        reading: Reading,  # what follows from the tokens alone (nanogpt/past.py)
        ngrams: Tensor | None,  # (G T, W), the rows of their n-grams
        embedding: Tensor,  # (V, D), that of all tokens
        length_vectors: Tensor | None,  # (lengths, D)
        signs: Tensor,  # (SIGN_ROWS, W)
        amounts: Amounts | None,
        num_layers: int) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
    """What the layers and `late_mix` get of the text:
    - the first stream (T, D)
    - what each layer adds to the stream (T, D): an amount of the embedding, and an amount of what
      the past says; None where there is neither
    - sources of `late_mix`: the sum of the rows of n-grams (T, W), and for each kind of match the
      normalised embedding of the guessed tokens (T, D), 0 where there is no match.
    What the model is without is None, or in the reading an empty tensor."""
    # 1. The embedding, normalised.
    x = norm(embedded)

    # 2. The last tokens: rows of their n-grams, and what came next where they stood before.
    parts = []  # of what the past says, (T, D) each
    for_late_mix = []
    if ngrams is not None:
        of_lengths = ngrams.view(-1, len(x), ngrams.size(1))  # (G, T, W)
        hashes = reading.hashes[: len(of_lengths)]  # (G, T); longer ones are for recalled tokens
        of_ngrams = (of_lengths * signs[hashes % SIGN_ROWS]).sum(0)  # (T, W)
        parts.append(widened(of_ngrams, x))
        for_late_mix.append(of_ngrams)
    guesses = []
    one_hots = []
    for token, length in reading.matches():
        # A gradient of the embedding here gains less than the time it takes (records/TRIED.md).
        guesses.append(norm(F.embedding(token, embedding.detach())) * (length > 0)[:, None])
        one_hots.append(F.one_hot(length, len(length_vectors)))
    if one_hots:
        # This product gives what a lookup of rows would. But the backward pass of a lookup adds the
        # gradients of all tokens to a few rows, where they wait for each other.
        parts.append(sum(one_hots).to(x.dtype) @ length_vectors.to(x.dtype))
    if len(reading.induced_token):  # only this guess: to add the recalled one gains nothing
        parts.append(guesses[0])
    for_late_mix += guesses
    past = sum(parts) if parts else None

    # 3. Each layer adds an amount of the embedding, and an amount of `past`.
    if amounts is None:
        return x, [past] * num_layers, for_late_mix
    of_parts = dict(zip(SCALARS, amounts.of_layers.unbind(1)))  # (L,) each
    injects = [for_each_token(amount, x) * x for amount in of_parts["first"]]
    if past is not None:
        injects = [inject + for_each_token(amount, x) * past
                   for inject, amount in zip(injects, of_parts["past"])]
    return for_each_token(amounts.of_first_stream, x) * x, injects, for_late_mix


def widened(x: Tensor, stream: Tensor) -> Tensor:
    """x (T, W) -> (T, D): x in the first W channels, and zeros in the others."""
    return F.pad(x, (0, stream.size(1) - x.size(1)))


def late_mix(x: Tensor, sources: tuple[Tensor, ...], w_in: Tensor | None, w_out: Tensor | None,
             bias: Tensor | None) -> Tensor:
    """x (T, D), the last stream, plus an amount of each source; the sum is normalised. A source is
    (T, D), or narrower, as the rows of n-grams (T, W): it is added to the first channels. A small
    network decides for each token how much of each source is added (MUDD, multiway dynamic dense
    connections: Xiao et al. 2025; record 81). Its weights are w_in (64, D), w_out (sources, 64) and
    bias (sources,). Without weights nothing is added."""
    if w_in is None:
        return norm(x)
    hidden = F.gelu(F.linear(x, w_in.to(x.dtype)))
    amounts = F.linear(hidden, w_out.to(x.dtype)) + bias.to(x.dtype)  # (T, sources)
    taken = sum(widened(0.1 * amount[:, None] * source, x)
                for amount, source in zip(amounts.unbind(1), sources, strict=True))
    return norm(x + taken)


# --------------------------------------------------------------------------------------------------
# 5. The loss, over candidates
#
# In training, logits are computed for 8,192 candidates by default; all 50,304 tokens would be half
# of the work of a step. A batch is cut into groups of up to 16,384 tokens, or of one longer
# sequence, the same on any number of GPUs (nanogpt/batches.py). Candidates are the targets of a
# group (if they are too many, some are left out and have no loss), and others that are drawn at
# random, frequent ones more often. One that is drawn with probability p stands for 1 / p tokens:
# its `bias`, log(1 / p), is added to its capped logit; that of a target is 0. So the denominator of
# the softmax is right on average (nanogpt/candidates.py). Validation is over the whole vocabulary.

# Tokens whose logits are computed at a time in validation: those of a whole sequence would not fit.
VAL_CHUNK = 16_384


# A sigmoid caps the logits to (0, 23): height, shift and width of it (records 19, 54).
CAP = 23.0, 5.0, 7.5


class CandidateRows(torch.autograd.Function):
    """The rows of the head (V, D) that are candidates: chosen (groups, n) -> (n, D) for each group.
    Autograd itself would make a gradient (V, D) for each group, mostly zeros, and add them up. Here
    `sum_over_groups`, which may be compiled, computes the sum over the groups in one pass."""

    @staticmethod
    def forward(ctx, head, chosen, place_of_token, sum_over_groups):
        ctx.save_for_backward(place_of_token)
        ctx.sum_over_groups = sum_over_groups
        return tuple(head.index_select(0, rows) for rows in chosen)

    @staticmethod
    def backward(ctx, *gradients):
        return ctx.sum_over_groups(gradients, *ctx.saved_tensors), None, None, None


def sum_over_groups(gradients: tuple[Tensor, ...], place_of_token: Tensor) -> Tensor:
    """Gradients (n, D) of each group's candidates, and the place of each token among these,
    (groups, V), -1: none -> the gradient of the head (V, D)."""
    # Place -1 reads the last row, which is then replaced by zeros.
    return sum(torch.where(place[:, None] < 0, 0.0, gradient[place])
               for gradient, place in zip(gradients, place_of_token))


def head_loss(x: Tensor, w: Tensor, targets: Tensor, bias: Tensor | None, products: Products,
              second_weight: Tensor | None = None) -> Tensor:
    """x (T, D), w (V, D), targets (1, T), -1 where the target is no candidate, and a bias (V,) of
    the capped logits, or None -> cross-entropy, summed over T. With candidates, V is their number,
    w has their rows only, and a target is its place among them.

    With second_weight (), early in training, targets are (2, T): the next tokens, and those after
    them. The gradient is that of the first loss plus second_weight times the second, which counts
    only where the first target is a candidate. The value is the first alone, so that losses stay
    comparable (multi-token prediction, record 53; after Gloeckle et al. 2024).

    To train on another loss, change it here, but only where torch.is_grad_enabled(): validation
    calls this function, too, and its losses must stay comparable. Then train with --precision=bf16:
    where the head is in fp8-static, training has a loss of its own, FP8HeadLoss. With candidates a
    sum of exponentials is right, as in a z-loss; a mean over the vocabulary, as in label smoothing,
    is not: give --candidates=0 for that. Where the target is -1, a token must add nothing."""
    if isinstance(products, fp8_static.StaticFP8):
        return FP8HeadLoss.apply(x, w, targets, bias, second_weight)
    logits = kernels.softcap(products.linear(x, w), *CAP)
    if bias is not None:
        logits = logits + bias
    cross_entropy = partial(F.cross_entropy, logits, reduction="sum", ignore_index=-1)
    loss = cross_entropy(targets[0])
    if second_weight is not None:
        second = cross_entropy(targets[1].where(targets[0] >= 0, -1))
        loss = loss + second_weight * (second - second.detach())  # adds a gradient, and 0
    return loss


# --------------------------------------------------------------------------------------------------
# 6. The whole model


class GPT(nn.Module):
    """The model. It reads one or more sequences, end to end, each of one or more documents.

    The weights of all layers lie in banks. Those of which each rank owns a slice are padded to a
    multiple of world_size. The model has the matrices in its own dtype; the optimizer has their
    float32 originals, from which they are rounded. `functions` are those of EAGER (section 8),
    compiled. With them, on a GPU (`as_graphs`) the reading of batches, the passes of `train_step`
    and the updates run as CUDA graphs, and --attention=auto means FlexAttention, if heads have 16
    dimensions or more."""

    def __init__(self, c: Config, device: torch.device, world_size: int = 1,
                 functions: SimpleNamespace | None = None):
        super().__init__()
        self.config = c
        self.device = device
        self.trained_steps = c.num_steps  # a model of a checkpoint may have fewer
        self.functions = functions or EAGER
        self.as_graphs = as_graphs = functions is not None and device.type == "cuda"
        self.params = parameter_table(c)
        # The token that begins a document: GPT-2's, or the last one if the vocabulary is smaller.
        self.bos = min(shards.SEPARATOR, c.vocab_size - 1)
        # Without the compiler FlexAttention would keep the scores of all pairs of tokens.
        self.flex = c.attention == "auto" and as_graphs and c.head_dim >= 16
        self.add_banks(recipes.PLAIN_DTYPES[recipes.plain_recipe(c)], world_size)
        generator = torch.Generator().manual_seed(0)
        signs = 2 * torch.randint(0, 2, (SIGN_ROWS, c.ngram_width), generator=generator) - 1
        self.register_buffer("signs", signs.to(device, torch.int8), persistent=False)
        # What came next in the training text, the same on all ranks (nanogpt/past.py).
        self.register_buffer(
            "recall_table", torch.zeros(c.recall_rows, dtype=torch.int32, device=device))
        self.candidates = Candidates(c.candidates, c.vocab_size, device)
        self.past = Past(c, self.bos, self.recall_table, self.candidates, as_graphs)
        self.precision = Precision(
            c, choose_recipes(c, device), dict(self.named_parameters()))
        self.call = gpu.caller(as_graphs, self.parameters())  # how `train_step` calls a pass

    def add_banks(self, dtype: torch.dtype, world_size: int) -> None:
        wide = torch.promote_types(torch.float32, dtype)
        for name, param in self.params.items():
            rows = param.shape[0]
            if param.share == "slice":
                rows = math.ceil(rows / world_size) * world_size
            # The small ones stay wide, and are converted where they meet an activation, as in
            # w_in.to(x.dtype). A single number need not be: the product has the other's dtype.
            bank_dtype = wide if param.share == "all" else dtype
            if param.optimizer == "rows":
                bank_dtype = bf16_for_fp16(dtype)  # as they have no float32 originals
            bank = torch.zeros(rows, *param.shape[1:], dtype=bank_dtype, device=self.device)
            self.register_parameter(name, nn.Parameter(bank))

    def weight(self, name: str) -> Tensor | None:
        """A bank without its padding, or None if the model is configured without it."""
        bank = self._parameters.get(name)
        if bank is None or len(bank) == self.params[name].shape[0]:
            return bank  # a slice, even of all of it, would copy the gradient
        return bank[: self.params[name].shape[0]]

    def look_up(self, reading: Reading) -> dict[str, Tensor]:
        """The rows of the embedding (T, D), and of the tables: value_embeds (T, E H d) and ngrams
        (G T, W)."""
        rows = reading.rows()
        return {name: F.embedding(rows[at], getattr(self, name)).to(self.lm_head.dtype)
                for name, at in LOOKED_UP_AT.items() if name in self.params}

    def amounts(self) -> Amounts | None:
        """How much of each part is added to the stream; None without scalars."""
        scalars = self.weight("scalars")
        return None if scalars is None else amounts_of(scalars)

    def layer_weights(self, amounts: Amounts | None) -> list[LayerWeights]:
        """The weights of each layer, as views of the banks, and its amounts."""
        c = self.config
        matrices = self.weight("mlp").unbind()
        qkvo = self.weight("qkvo").unflatten(0, (-1, 4))  # (A, 4, H d, D)
        qkvo_at = dict(zip(c.layers_with_attention, qkvo.unbind()))
        of_layers = [None] * c.num_layers if amounts is None else amounts.of_layers.unbind()
        return [LayerWeights(matrices[2 * i], matrices[2 * i + 1], qkvo_at.get(i), of_layers[i])
                for i in range(c.num_layers)]

    def late_weights(self) -> list[Tensor | None]:
        """The three weights of `late_mix`, or None three times without it."""
        return [self.weight(name) for name in ("late_in", "late_out", "late_bias")]

    def layer_contexts(self, begins: Tensor, setting: Setting, injects: list[Tensor | None],
                       value_embed_at: dict[int, Tensor]) -> list[LayerContext]:
        """What each layer gets beside the stream and its weights."""
        c = self.config
        documents = begins.cumsum(0, dtype=torch.int32)
        if self.flex:
            made_masks = masks.flex_masks(documents, setting.windows, self.functions.block_lists)
        else:
            made_masks = masks.sdpa_masks(documents, setting.windows)
        long_mask, short_mask = made_masks
        see_far = (c.num_layers - 1) // 2, c.num_layers - 1  # the layers that have the long window
        dtype = self.lm_head.dtype  # with fp16, bf16 in validation (`loss_without_gradient`)
        cos, sin = rotary_table(
            len(begins), setting.frequencies, c.head_dim, dtype, self.device)
        score_scale = constant(self.device, setting.score_scale)
        return [
            LayerContext(
                cos, sin, score_scale, long_mask if i in see_far else short_mask,
                injects[i], value_embed_at.get(i), begins if c.mix_previous else None)
            for i in range(c.num_layers)]

    def last_stream(self, reading: Reading, setting: Setting, training: bool,
                    looked_up: dict | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The stream after the last layer (T, D), and the sources of `late_mix`. `looked_up` is
        what `look_up` returns; `forward_backward` looks the rows up itself, because it needs their
        gradients."""
        # 1. The first stream, and what each layer gets beside the stream.
        c = self.config
        L = c.num_layers
        looked_up = looked_up or self.look_up(reading)
        amounts = self.amounts()
        x, injects, for_late_mix = self.functions.embed_inputs(
            looked_up["lm_head"], reading, looked_up.get("ngrams"), self.weight("lm_head"),
            self.weight("length_vectors"), self.signs, amounts, L)
        # the value embeddings (T, H d) of the layers that have some
        with_values = c.layers_with_values
        value_embeds = looked_up["value_embeds"].chunk(len(with_values), 1) if with_values else ()
        contexts = self.layer_contexts(
            reading.begins, setting, injects, dict(zip(with_values, value_embeds)))
        weights = self.layer_weights(amounts)
        products = self.precision.layers[training]

        # 2. The layers, one after another.
        streams = [x]
        for of_this_layer in zip(weights, contexts, products):
            x = self.functions.block(x, *of_this_layer)
            streams.append(x)

        # 3. The sources: the first stream; those after about a third of the layers, after about two
        # thirds, and before the last layer; what `embed_inputs` says of the past; and the first
        # value embedding.
        earlier = [streams[n] for n in (0, L // 3, 2 * L // 3, L - 1)]
        return x, (*earlier, *for_late_mix, *value_embeds[:1])

    def forward(self, reading: Reading, targets: Targets, setting: Setting, training: bool,
                looked_up: dict | None = None) -> Tensor:
        """The loss, summed over T. In training it is over candidates, if the targets have any."""
        x, sources = self.last_stream(reading, setting, training, looked_up)
        x = self.functions.late_mix(x, sources, *self.late_weights())
        products = self.precision.head[training]
        head = self.weight("lm_head")
        target_tokens = targets.next_tokens[None]  # (1, T)
        second_weight = None
        if training and setting.second_weight:
            # The second target of a sequence's last token lies outside of the sequence. The
            # sequence's first target takes its place, which is wrong, but for this token alone.
            sequences = targets.next_tokens.view(-1, self.config.seq_len)
            target_tokens = torch.stack((sequences, sequences.roll(-1, 1))).flatten(1)  # (2, T)
            second_weight = constant(self.device, setting.second_weight)
        losses = []
        groups = len(targets.chosen)
        if groups:  # for each group of tokens the head has the rows of its candidates only
            rows = CandidateRows.apply(
                head, targets.chosen, targets.place_of_token, self.functions.sum_over_groups)
            for its_x, its_targets, its_rows, its_chosen, its_bias, its_place in zip(
                    x.chunk(groups), target_tokens.chunk(groups, 1), rows, targets.chosen,
                    targets.bias, targets.place_of_token):
                losses.append(self.functions.head_loss(
                    its_x, its_rows, its_place[its_targets], its_bias,
                    products.for_rows(its_chosen), second_weight))
        else:
            at_a_time = len(x) if training else VAL_CHUNK
            for its_x, its_targets in zip(x.split(at_a_time), target_tokens.split(at_a_time, 1)):
                losses.append(self.functions.head_loss(
                    its_x, head, its_targets, None, products, second_weight))
        return sum(losses)

    def logits(self, x: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        """What `last_stream` returns -> the capped logits of each next token (T, V)."""
        x = late_mix(x, sources, *self.late_weights())
        return kernels.softcap(F.linear(x, self.weight("lm_head")), *CAP)


@torch.no_grad()
def initialize(model: GPT, seed: int) -> dict[str, Tensor]:
    """Draws the weights from `seed`, and fills the model with those of rank 0. Sets the counts of
    targets and the recall table to 0. Returns all weights but those of tables, in float32 or wider.
    A collective."""
    torch.manual_seed(seed)
    full = {}
    for name, param in model.params.items():
        bank = getattr(model, name).data
        w = bank  # a table is filled in place: there may be no room for a second one
        if param.optimizer != "rows":
            full[name] = w = torch.zeros_like(
                bank, dtype=torch.promote_types(torch.float32, bank.dtype))
        param.init(w[: param.shape[0]])
        if dist.is_initialized():
            dist.broadcast(w, 0)  # another kind of GPU would draw other numbers from this seed
        bank.copy_(w)
    model.past.reset(seed)
    return full


# --------------------------------------------------------------------------------------------------
# 7. The output head in FP8
#
# docs/precision.md tells what FP8 is, and why a model learns with it. What does not fit its range
# is clamped; `check_weights` watches the weights for that. The head's products are operators of
# their own, nanogpt::mm and its gradient, as in record 19. That gradient is registered, so that
# other code can put any loss behind it. FP8HeadLoss calls both operators itself, as its kernel has
# the gradient of the logits ready.


@torch.library.custom_op("nanogpt::mm", mutates_args=())
def mm_op(x: Tensor, w: Tensor, x_scale: float, w_scale: float,
          grad_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, D) times w (V, D) transposed, in FP8 -> (T, V) in bf16, and for backward the rounded
    operands transposed: (D, T) and (D, V) in e4m3. grad_scale is for the gradient."""
    x8, x8_t = kernels.quantize(x, x_scale, E4M3)
    w8, w8_t = kernels.quantize(w, w_scale, E4M3)
    return kernels.static_product(x8, w8, x_scale * w_scale, torch.bfloat16), x8_t, w8_t


@mm_op.register_fake
def _(x, w, x_scale, w_scale, grad_scale):
    y = x.new_empty(len(x), len(w), dtype=torch.bfloat16)
    x8_t = x.new_empty(x.shape[::-1], dtype=E4M3)
    w8_t = w.new_empty(w.shape[::-1], dtype=E4M3)
    return y, x8_t, w8_t


@torch.library.custom_op("nanogpt::mm_backward", mutates_args=())
def mm_backward_op(g8: Tensor, x8_t: Tensor, w8_t: Tensor, grad_scale: Tensor, x_scale: float,
                   w_scale: float) -> tuple[Tensor, Tensor]:
    """g8 (T, V) in e5m2, the gradient over grad_scale (); x8_t (D, T), w8_t (D, V) in e4m3
    -> gradients of x (T, D) in bf16 and of w (V, D) in float32."""
    x_scale = constant(g8.device, x_scale)
    w_scale = constant(g8.device, w_scale)
    grad_x = kernels.product(g8, w8_t, grad_scale, w_scale, torch.bfloat16)
    grad_w = kernels.product(g8.t(), x8_t, grad_scale, x_scale, torch.float32)
    return grad_x, grad_w


@mm_backward_op.register_fake
def _(g8, x8_t, w8_t, grad_scale, x_scale, w_scale):
    grad_x = g8.new_empty(x8_t.shape[::-1], dtype=torch.bfloat16)
    grad_w = g8.new_empty(w8_t.shape[::-1], dtype=torch.float32)
    return grad_x, grad_w


def mm_setup(ctx, inputs, output):
    x, w, *ctx.scales = inputs
    ctx.dtypes = x.dtype, w.dtype
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])  # the rounded operands: autograd knows no FP8
    ctx.set_materialize_grads(False)


def mm_autograd(ctx, gradient, *_):
    x_scale, w_scale, grad_scale = ctx.scales
    g8, _ = kernels.quantize(gradient, grad_scale, E5M2)
    grad_scale = torch.full((), grad_scale, device=gradient.device)
    grad_x, grad_w = torch.ops.nanogpt.mm_backward(
        g8, *ctx.saved_tensors, grad_scale, x_scale, w_scale)
    x_dtype, w_dtype = ctx.dtypes
    return grad_x.to(x_dtype), grad_w.to(w_dtype), None, None, None


mm_op.register_autograd(mm_autograd, setup_context=mm_setup)


class FP8HeadLoss(torch.autograd.Function):
    """Takes and returns what `head_loss` does, but takes no `products`.

    One kernel leaves the loss and the gradient of the logits, which is in e5m2 and never exists in
    bf16; so backward has nothing to compute but two products (records 67, 79)."""

    @staticmethod
    def forward(ctx, x, w, targets, bias, second_weight):
        logits, x8_t, w8_t = torch.ops.nanogpt.mm(
            x, w, HEAD_INPUT_SCALE, HEAD_WEIGHT_SCALE, HEAD_GRADIENT_SCALE)
        loss, g8 = kernels.capped_cross_entropy(
            logits, targets, [*CAP], HEAD_GRADIENT_SCALE, bias, second_weight)
        ctx.save_for_backward(g8, x8_t, w8_t)
        ctx.dtype = w.dtype
        return loss.sum()

    @staticmethod
    def backward(ctx, gradient):
        grad_x, grad_w = torch.ops.nanogpt.mm_backward(
            *ctx.saved_tensors, gradient * HEAD_GRADIENT_SCALE, HEAD_INPUT_SCALE, HEAD_WEIGHT_SCALE)
        return grad_x.to(ctx.dtype), grad_w.to(ctx.dtype), None, None, None


# --------------------------------------------------------------------------------------------------
# 8. The optimizers: Muon for matrices, Adam for the head and small banks, each rank its share
#
# Every rank computes with a copy of all large weights in the model's dtype. Their originals
# ("masters", in float32 or wider) and the state of their optimizers exist only once, shared out
# over the ranks. Small banks are whole on every rank, in float32 or wider. Tables have no
# originals.
#
# A step has three phases. First gradients are summed over the ranks: `Optimizer.start_sums` begins
# most of these sums, `Tables.add` those of rows, and `Optimizer.step` that of the head. Then each
# rank updates its share. Last it hands the new weights out to all; but rows of tables travel only
# when the next step begins (`Tables.begin`). `Param.share` says how:
#
#   share      of which     summed by               a rank updates         handed out by
#   "slice"    matrices,    reduce-scatter          its slice of the       all-gather
#              the head                             bank
#   "all"      small banks  all-reduce              all of it, on every    nothing
#                                                   rank
#   "columns"  tables       all-to-all of the rows  its columns of the     all-to-all of the rows
#                           that a rank has looked  rows that any rank     that a rank looks up
#                           up                      has looked up          in the next step
#
# Gradients are added over micro-batches, and sent, in the dtype of the bank; but those of rows are
# added in float32. Transfers run in the background, while the next parameter is being worked on.
# The tables are worked on in a CUDA stream beside that of the matrices (nanogpt/tables.py).
#
# Losses and gradients are sums over tokens, not means. So the result does not depend on how many
# GPUs or micro-batches share a batch, but for rounding. (Tables and some recipes round at random,
# and some recipes measure a scale for each micro-batch.)

POLAR_EXPRESS = (  # a, b, c of each iteration, chosen so that five are enough (Amsel et al. 2025)
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonalize(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient (n, rows, columns) -> nearly U V^T of each matrix U S V^T, in `dtype`. Each
    iteration is an odd polynomial a X + b X^3 + c X^5. All of them together bring singular values
    of 0.001 to 1 times the matrix's norm between 0.84 and 1.15 (Muon, Jordan 2024; record 38)."""
    X = gradient.to(dtype)
    tall = X.size(-2) > X.size(-1)
    if tall:
        X = X.mT  # products are smaller that way
    X = X / (X.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)  # all singular values are below 1
    wide = torch.promote_types(dtype, torch.float32)
    identity = torch.eye(X.size(-2), dtype=wide, device=X.device)
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT
        polynomial = a * identity + b * A.to(wide) + c * (A @ A).to(wide)
        X = polynomial.to(dtype) @ X
    return X.mT if tall else X


def bf16_for_fp16(dtype: torch.dtype) -> torch.dtype:
    """bf16 in place of float16, in which the squares of small numbers would be 0."""
    return torch.bfloat16 if dtype == torch.float16 else dtype


def cautious_update(master: Tensor, part: Tensor, update: Tensor, lr, decay) -> None:
    """Subtracts lr * update from master, with weight decay only where the update shrinks the weight
    anyway (Chen et al. 2025; record 43). Copies the result to `part`, this rank's part of the bank
    that products read."""
    shrinks = update * master > 0
    master.sub_(lr * (update + decay * master * shrinks))
    part.copy_(master)


class Rates(NamedTuple):
    """What an update needs beside the tensors. Compiled functions get it as a tensor (5,), because
    torch.compile would compile them anew for each value of a number, and a CUDA graph would go on
    with the values that it was captured with."""
    lr: float  # that of the Param, times the factor of the schedule
    decay: float
    beta1: float  # of the mean of the gradient; Muon's momentum
    beta2: float  # of the mean square
    correction: float  # Adam's, because both of its means begin at 0


class MuonState(NamedTuple):
    momentum_buffer: Tensor  # (n, rows, columns)
    mean_square: Tensor  # (n, 1, columns), of each neuron's update over time
    mean_update: Tensor  # (n, rows, columns), a moving average of the updates


def muon_update(master: Tensor, part: Tensor, gradient: Tensor, state: MuonState,
                matrix_factors: Tensor, rates: Tensor) -> None:
    """Updates master (n, rows, columns) by an average of orthogonalized Nesterov momentum, and
    copies it to `part`. Neurons whose updates were large over time get smaller ones; then each
    matrix's update gets its old norm again (NorMuon, Li et al. 2025; record 41). Every column
    counts as a neuron: in the MLPs' matrices (D, F) that is a hidden unit. In qkvo the units of a
    head are rows, but taking these made no difference. matrix_factors (n, 1, 1) multiply the
    learning rate of each matrix; the rates are (5,)."""
    lr, decay, momentum, beta2, _ = rates
    # 1. Nesterov momentum, orthogonalized.
    gradient = gradient.to(master.dtype)
    state.momentum_buffer.add_((gradient - state.momentum_buffer) * (1 - momentum))
    nesterov = gradient + (state.momentum_buffer - gradient) * momentum
    # In the dtype of the weights, which is float32 where a machine has no quick products in bf16.
    update = orthogonalize(nesterov, bf16_for_fp16(part.dtype)).to(master.dtype)

    # 2. Each neuron's update over the root of its mean square, then the old norm.
    square = update.square().mean(-2, keepdim=True)  # (n, 1, columns)
    state.mean_square.add_((square - state.mean_square) * (1 - beta2))
    scale = state.mean_square.clamp(min=1e-10).rsqrt()
    total = square.sum((-2, -1), keepdim=True)
    scaled_total = (square * scale.square()).sum((-2, -1), keepdim=True)
    scale = scale * (total / scaled_total.clamp(min=1e-30)).sqrt()

    # 3. A moving average: 0.7 of this update, 0.3 of the average so far. With small batches one
    # update by itself is noisy (tried before in the speedrun's track of 350M weights).
    state.mean_update.add_((update * scale - state.mean_update) * 0.7)
    cautious_update(master, part, state.mean_update, lr * matrix_factors, decay)


class AdamState(NamedTuple):
    mean: Tensor  # of the gradient
    mean_square: Tensor


def adam_update(master: Tensor, part: Tensor, gradient: Tensor, state: AdamState,
                rates: Tensor) -> None:
    """Updates master by Adam (Kingma & Ba 2015), and copies it to `part`. All these tensors have
    one shape; the rates are (5,). `correction` is that of all steps so far, even if the head is
    updated in every second one only."""
    lr, decay, beta1, beta2, correction = rates
    gradient = gradient.to(master.dtype)
    state.mean.add_((gradient - state.mean) * (1 - beta1))
    state.mean_square.add_((gradient.square() - state.mean_square) * (1 - beta2))
    root = state.mean_square.sqrt() + 1e-10  # only against 0 / 0
    update = state.mean / root * correction
    cautious_update(master, part, update, lr, decay)


# The functions that do most of the work. They read nothing but their arguments and constants of the
# source files, so that they can be compiled.
EAGER = SimpleNamespace(
    block=block, late_mix=late_mix, sum_over_groups=sum_over_groups, head_loss=head_loss,
    embed_inputs=embed_inputs, block_lists=masks.block_lists, muon_update=muon_update,
    adam_update=adam_update)


def compiled_functions(tell: Callable[[str, float], None]) -> SimpleNamespace:
    """EAGER under torch.compile. `tell` hears what was compiled and how many seconds it took."""
    gpu.set_up_compiler()
    compiled = {}
    for name, function in vars(EAGER).items():
        # With `dynamic`, sizes are inputs of a graph, so that one graph serves many. Muon has a
        # graph for each of its two banks: faster (records/2026-11-26_two_gpus_narrow_rows).
        dynamic = name in ("block_lists", "adam_update")
        compiled[name] = gpu.compiled(function, tell, dynamic)
    return SimpleNamespace(**compiled)


# To try another optimizer:
#
#   1. Write its state above, a NamedTuple of tensors, and its update, which changes the master, the
#      part and the state in place.
#   2. Add the update to EAGER; if one graph is to serve all shapes, also to the names that are
#      `dynamic` in `compiled_functions`.
#   3. Make its state in Optimizer.zero_state, and call the update in Optimizer.update.
#   4. Name it in parameter_table.
#   5. If it needs a number that Rates lacks: a field there, and its value in Optimizer.rates. Muon
#      and Adam unpack all fields, so name it there, too.
#
# What it should know:
#
#   - The part is what the model computes with: end with `cautious_update`, or part.copy_(master).
#   - Muon takes stacks of matrices, (n, rows, columns); Adam takes everything as a vector. The head
#     comes as this rank's rows, and with head_every_second its gradient is that of two steps.
#   - --head_lr also sets the rate of `late_mix`, and the head's weight decay (`parameter_table`).
#   - State begins at 0 (`reset`). Saves name a field NAME.FIELD, so none may be called master or
#     average. They cut it by its first dimension, which must be the master's.
#   - The MLPs' matrices have larger learning rates: hand `self.matrix_factors[name]`, which stacks
#     of matrices have, to your update, as Muon gets it. Without it all have the same.
#   - Gradients are sums over the tokens of a batch, not means. To Muon and Adam, which divide by
#     the size of the gradient, that makes no difference as long as batches keep their size. To
#     plain SGD it does. The warm-up calls the update with gradients of 0.
#   - On a GPU the update runs as a CUDA graph: what changes from step to step must come in a
#     tensor, as the rates do.
#
# The rows of tables have a kernel instead, `update_rows` in nanogpt/tables.py.


class Optimizer:
    """Updates all parameters by Muon, Adam and `Tables`. The ranks share the work, if there is a
    process group. Making an Optimizer is a collective."""

    def __init__(self, model: GPT):
        self.model = model
        self.hooks = model.precision.hooks
        self.device = model.device
        self.slices = ranks.Slices()
        self.banks = {name: bank.data for name, bank in model.named_parameters()}
        self.matrix_factors = {}  # of this rank's matrices, (n, 1, 1)
        for name, param in model.params.items():
            if len(param.shape) == 3:
                turn = torch.arange(len(self.banks[name])) % len(param.matrix_factors)
                factors = torch.tensor(param.matrix_factors, device=self.device)[turn, None, None]
                self.matrix_factors[name] = self.own_part(name, factors)
        wide = torch.promote_types(torch.float32, model.lm_head.dtype)
        self.tables = Tables(self.device, {
            name: Table(bank, bank.new_zeros(len(bank), dtype=wide), LOOKED_UP_AT[name])
            for name, bank in self.banks.items() if model.params[name].optimizer == "rows"})
        self.parts = {  # this rank's parts of the other banks, as views
            name: self.own_part(name, bank) for name, bank in self.banks.items()
            if name not in self.tables.tables}
        # All small banks are updated together. Each of the others is by itself, so that it can be
        # handed out as soon as it is updated.
        small = tuple(name for name in self.parts if model.params[name].share == "all")
        self.updated_together = [(name,) for name in self.parts if name not in small]
        self.updated_together += [small] if small else []
        self.masters = {
            name: torch.empty_like(part, dtype=wide) for name, part in self.parts.items()}
        self.state = {name: self.zero_state(name) for name in self.parts}
        self.averages = {  # of all masters; tables have none
            name: torch.empty_like(master) for name, master in self.masters.items()
            if model.config.average_frac}
        self.call = gpu.caller(model.as_graphs)
        self.reset(self.banks)  # fills all of these, so that the warm-up can use them

    def reset(self, full: dict[str, Tensor]) -> None:
        """Starts anew from the weights `full`: those of `initialize`, or for a warm-up the banks
        themselves. The tensors stay where they are, as CUDA graphs write to them. A collective."""
        for name, master in self.masters.items():
            master.copy_(self.own_part(name, full[name]))
            for moment in self.state[name]:
                moment.zero_()
        for table in self.tables.tables.values():
            table.mean_square.zero_()
        for name, average in self.averages.items():
            average.copy_(self.masters[name])
        self.tables.reset()
        self.slices.sums.clear()
        # The head's gradient of the first of two steps, for the second one (head_every_second).
        self.first_head_gradient = None
        self.updates = 0  # without those that fp16 has left out, as a gradient was not finite
        self.hooks.reset()
        self.hooks.weights_changed([*self.masters], self.masters)

    def zero_state(self, name: str) -> MuonState | AdamState:
        zero = torch.zeros_like(self.masters[name])
        optimizer = self.model.params[name].optimizer
        if optimizer == "muon":
            return MuonState(zero, zero[:, :1].clone(), zero.clone())
        if optimizer == "adam":
            return AdamState(zero, zero.clone())
        raise ValueError(f"{name}: {optimizer} is no optimizer that has a state here")

    def own_part(self, name: str, bank: Tensor) -> Tensor:
        """What this rank updates of a bank: its slice, as a view, or all of it if all ranks do."""
        return bank if self.model.params[name].share == "all" else self.slices.own(bank)

    @torch.no_grad()
    def start_sums(self) -> None:
        """Begins to sum every .grad but the head's over the ranks, and sets those to None. To be
        called before the last `tables.add`: the sums travel while the GPU adds up the rows'
        gradients. A collective."""
        small = {}
        for name in self.parts:
            bank = getattr(self.model, name)
            if bank.grad is None:
                raise RuntimeError(f"{name} has no gradient; is it used in the forward pass?")
            if name == "lm_head":
                continue
            if self.model.params[name].share == "all":
                small[name] = bank.grad
            else:
                self.slices.start_sum(name, bank.grad)
            bank.grad = None
        self.slices.start_whole_sums(small)

    def start_head_sum(self) -> None:
        """Adds the gradients of looked-up tokens to that of the head. Then begins to sum it, or
        keeps it for the next step. A collective."""
        gradient = self.model.lm_head.grad
        self.model.lm_head.grad = None
        with self.tables.side_stream.on():
            self.tables.side_stream.keep(gradient)
            self.tables.add_embedding(gradient)
            if self.model.config.head_every_second:
                if self.first_head_gradient is None:
                    # A copy, as the next pass may write to the memory of this one (CudaGraphs).
                    self.first_head_gradient = gradient.clone()
                    return
                gradient += self.first_head_gradient
                self.first_head_gradient = None
            self.slices.start_sum("lm_head", gradient)

    @torch.no_grad()
    def step(self, lr_factor: float) -> None:
        """Updates the weights from the gradients, whose sums `start_sums` and `Tables.add` have
        begun, but for the head's. A collective."""
        # 1. The sum of the head begins here, and travels while the first matrices are updated.
        self.start_head_sum()
        head_waits = self.first_head_gradient is not None  # for the gradient of the next step
        # A recipe may leave out a step whose gradients are not finite.
        if not self.hooks.keeps_step(lambda: [*self.tables.gradients(), *self.slices.all_sums()]):
            self.tables.reset()
            self.slices.sums.clear()
            self.first_head_gradient = None
            return
        self.updates += 1

        # 2. Update this rank's part of each parameter, and begin to hand it out. Tables come first,
        # because they take longest; they hand out nothing yet.
        rates = self.rates(lr_factor)
        all_rates = to_device([*rates.values()], self.device)
        self.tables.update(rates, self.hooks.unscale)
        transfers = {}
        for names in self.updated_together:
            if head_waits and names == ("lm_head",):
                continue
            gradients = [self.hooks.unscale(self.slices.finished_sum(name)) for name in names]
            self.call(names, partial(self.update, names), (all_rates, *gradients))
            for name in names:
                transfers[name] = self.hand_out(name)

        # 3. Wait for the tables, and until all other new weights have arrived.
        self.tables.finish()
        for transfer in transfers.values():
            transfer.wait()
        self.hooks.weights_changed(transfers, self.masters)
        self.update_averages()

    def update_averages(self) -> None:
        """Moves the averages towards the weights: exponential moving averages, as in record
        92. Every fourth step is enough (in a run of three steps or fewer, the last one), and takes
        less than a thousandth of the time."""
        c = self.model.config
        if self.averages and self.updates % min(4, c.num_steps) == 0:
            amount = min(4 / (c.average_frac * c.num_steps), 1.0)
            for name, average in self.averages.items():
                average.lerp_(self.masters[name], amount)

    @torch.no_grad()
    def go_half_way_to_averages(self) -> None:
        """After the last step: moves all weights half-way to their averages. The whole way did harm
        where an average went over too many steps (records/long_runs.md). The recipes are not told,
        as only validation comes after this, which uses none. A collective."""
        for name, average in self.averages.items():
            self.masters[name].lerp_(average, 0.5)
            self.parts[name].copy_(self.masters[name])
            self.hand_out(name).wait()

    def rates(self, lr_factor: float) -> dict[str, Rates]:
        """Those of all parameters in this step."""
        t = max(self.updates, 1)  # 0 where the warm-up only compiles
        rates = {}
        for name, param in self.model.params.items():
            beta1, beta2 = param.betas
            correction = (1 - beta2**t) ** 0.5 / (1 - beta1**t)
            rates[name] = Rates(
                lr_factor * param.lr, lr_factor * param.decay, beta1, beta2, correction)
        return rates

    @torch.no_grad()
    def update(self, names: tuple[str, ...], all_rates: Tensor, *gradients: Tensor) -> None:
        """Updates this rank's parts of matrices by Muon, and of the head and small banks by Adam,
        from the gradients of these parts. all_rates (parameters, 5) are those of all parameters."""
        rates_of = dict(zip(self.model.params, all_rates))
        for name, gradient in zip(names, gradients):
            master, part, state = self.masters[name], self.parts[name], self.state[name]
            # A copy, because compiled graphs depend on where in its memory a tensor begins.
            rates = rates_of[name].clone()
            optimizer = self.model.params[name].optimizer
            if optimizer == "muon":
                self.model.functions.muon_update(
                    master, part, gradient, state, self.matrix_factors[name], rates)
            elif optimizer == "adam":  # flat, so that one compiled graph serves all shapes
                flat_state = AdamState(*(moment.view(-1) for moment in state))
                self.model.functions.adam_update(
                    master.view(-1), part.view(-1), gradient.reshape(-1), flat_state, rates)
            else:
                raise ValueError(f"{name}: no update of {optimizer} is called here")

    def hand_out(self, name: str):
        """Begins to give this rank's updated part to all ranks. Returns the transfer, which fills
        the bank. A collective."""
        if self.model.params[name].share == "all" or name in self.hooks.hands_out:
            return NO_TRANSFER
        return self.slices.hand_out(self.banks[name], self.parts[name])


# --------------------------------------------------------------------------------------------------
# 9. Schedules: pure functions of the step. To try another one, add an entry to SCHEDULES (section
# 1), or change `lr_factor_at`.


def stages(c: Config) -> list[tuple[int, int, Stage]]:
    """First step, last step + 1 and the stage itself, for each stage that has steps."""
    schedule = SCHEDULES[c.schedule]
    sums = accumulate((stage.fraction for stage in schedule), initial=0.0)
    bounds = [round(part * c.num_steps) for part in sums]
    every = zip(bounds, bounds[1:], schedule)
    return [(first, end, stage) for first, end, stage in every if first < end]


def stage_of(step: int, c: Config) -> Stage:
    """The stage of the step that comes after `step` steps. When all are done, it is the last
    stage of the schedule."""
    last = SCHEDULES[c.schedule][-1]
    return next((stage for _, end, stage in stages(c) if step < end), last)


def stage_tokens(stage: Stage, c: Config) -> int:
    """Tokens of one of its batches."""
    return round(stage.batch_part * c.batch_tokens)


def batch_plan(c: Config) -> list[int]:
    """For each step how many sequences its batch has."""
    return [
        stage_tokens(stage, c) // c.seq_len
        for first, end, stage in stages(c) for _ in range(first, end)]


def lr_factor_at(step: int, c: Config) -> float:
    """The stage's factor. Over the last cooldown_frac of the steps it becomes lr_floor, linearly.
    Where a stage with a larger factor begins, it jumps up, even then. In `speedrun` it is 1.0 for a
    quarter of the steps, falls to 0.93, jumps to 1.39 after a third of them, falls to 0.85, jumps
    to 0.95 after two thirds, and ends at 0.30."""
    left = 1 - step / c.num_steps  # part of the steps that is still to come
    done = max(0.0, 1 - left / c.cooldown_frac)  # 0 to 1
    return stage_of(step, c).lr_factor * (1 - done) + c.lr_floor * done


def setting_of(step: int, c: Config) -> Setting:
    """The Setting of a step. All layers have the same rotary embedding.

    Where the long window of a stage is another than that of the one before it, frequencies and
    scores follow by YaRN (Bowen Peng et al. 2023; record 31)."""
    now = stage_of(step, c)

    # 1. The first stage. Scores stay below 12.8 sqrt(2): the length of a query is sqrt(d), that of
    # a key at most sqrt(2 d) if its halves come from two tokens (`offset_keys`), else sqrt(d).
    rotating = c.head_dim // 4
    frequencies = [(1 / 1024) ** (j / max(rotating - 1, 1)) for j in range(rotating)]
    score_scale = 12.8 / c.head_dim  # 0.1 for heads of 128, near the usual 1 / sqrt(d) = 0.088

    # 2. Each time that the long window has changed since. (A stage without steps, as the last one
    # of speedrun, sees farther, but rescales nothing.)
    long_windows = [stage.long_window for first, _, stage in stages(c) if first <= step]
    for old, new in pairwise(long_windows):
        frequencies = [rescaled(frequency, old, new) for frequency in frequencies]
        score_scale = score_scale * (1 + 0.2 * math.log(new / old))

    windows = now.long_window, now.short_window
    second_weight = now.second_weight if c.second_token else 0.0
    return Setting(windows, tuple(frequencies), score_scale, second_weight)


@cache  # each step asks for it again
def rescaled(frequency: float, old: int, new: int) -> float:
    """A frequency of the rotary embedding, radians a token, when the long window grows from `old`
    to `new` blocks. One that turns less than once in the old window is multiplied by old / new, one
    that turns at least 32 times stays as it is, and those between are interpolated."""
    turns = BLOCK_SIZE * old * frequency / (2 * math.pi)
    kept_part = min(max((turns - 1) / 31, 0), 1)
    return frequency * (old / new + kept_part * (1 - old / new))


# --------------------------------------------------------------------------------------------------
# 10. One step, and validation
#
# What a GPU does side by side in a step of two micro-batches, if it is one of several (time runs
# downwards; a pass is forward and backward; with head_every_second lm_head is summed and updated
# in every second step only):
#
#   main stream            side stream (tables.py)         transfers between the GPUs
#   puts fetched rows                                      rows that are looked up in this step
#   into the tables
#   pass 1 (see below)
#   pass 2                 adds row gradients of pass 1
#                          adds row gradients of pass 2    sums of mlp, qkvo and small banks
#   Muon for mlp                                           row gradients, sum of lm_head
#   Adam for lm_head       updates ngrams, value_embeds    squares of row gradients, new mlp
#   Muon for qkvo                                          new lm_head and qkvo
#   Adam for small banks                                   the loss, and requests
#
# Row gradients are those of the tables and of the token embedding; lm_head gets the latter before
# its sum begins. One more stream works beside the first pass: it writes down what came next in this
# step, and prepares the next batch, that is, it searches its tokens for matches, draws its
# candidates, and finds the rows that it looks up (nanogpt/past.py). The CPU has to know how many
# rows these are. It waits for this number only when it begins the next step, while the GPU is still
# busy with this one.


def forward_backward(model: GPT, setting: Setting,
                     *tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Adds the gradients of a micro-batch to .grad, except those of looked-up rows. `tensors` are
    those of its Targets, then those of its Reading, one by one, for CUDA graphs. Returns the loss,
    which is a sum over tokens, and the gradients of these rows, (lookups, width): a .grad for a
    whole table would be far too large, and adding to the head's would take long."""
    targets = Targets(*tensors[: len(Targets._fields)])
    reading = Reading(*tensors[len(Targets._fields) :])
    with torch.no_grad():
        looked_up = model.look_up(reading)
    for x in looked_up.values():
        x.requires_grad_()
    loss = model(reading, targets, setting, training=True, looked_up=looked_up)
    model.precision.hooks.scale_loss(loss).backward()
    return loss.detach(), {name: x.grad for name, x in looked_up.items()}


def train_step(model: GPT, optimizer: Optimizer, batch: PreparedBatch, step: int,
               requests: ranks.Requests | None = None,
               prepare_next: Callable = lambda: None) -> Tensor:
    """One update. `prepare_next` prepares the next batch; it is called as soon as the first pass
    has been given to the GPU.

    Returns the message of the step, a vector on the device that is summed over the ranks: the mean
    loss, and what the ranks ask of each other (`Requests`). A collective."""
    c = model.config
    setting = setting_of(step, c)

    # 1. The main CUDA stream and that of `Past` wait for each other (`meet`). The CPU waits until
    # the used rows are counted. Then the ranks send each other these rows (`begin`).
    model.past.meet()
    optimizer.tables.begin(batch)

    # 2. Forward and backward. After the last pass the gradients begin to travel.
    work = partial(forward_backward, model, setting)
    loss_sum = 0
    for i, (reading, targets) in enumerate(batch.micro_batches):
        loss, row_gradients = model.call(setting, work, (*targets, *reading))
        if i == 0:  # beside the first pass: what depends on the text alone
            model.past.remember(batch)
            prepare_next()
        if i == len(batch.micro_batches) - 1:
            optimizer.start_sums()
        optimizer.tables.add(i, row_gradients)
        loss_sum = loss_sum + loss

    # 3. The update, and what the ranks tell each other.
    model.past.join()  # validation and saves read what was remembered
    optimizer.step(lr_factor_at(step, c))
    message = (loss_sum / len(batch.next_tokens))[None]
    if requests:
        message = torch.cat([message, requests.outgoing()])
    if dist.is_initialized():
        # With NCCL only this stream waits for the sum, and the CPU goes on.
        dist.all_reduce(message, async_op=True).wait()
    return message


@torch.no_grad()
def loss_without_gradient(model: GPT, inputs: Tensor, targets: Tensor,
                          setting: Setting) -> Tensor:
    """inputs and targets (T,) -> the loss, a sum over tokens. Weights in fp16 become bf16, in which
    nothing overflows."""
    weights = {
        name: bank.bfloat16() for name, bank in model.named_parameters()
        if bank.dtype == torch.float16}
    reading = model.past.read(inputs, training=False)
    over_all_tokens = Targets(targets, *[targets.new_empty(0)] * 3)
    return torch.func.functional_call(
        model, weights, (reading, over_all_tokens, setting, False))


def validate(model: GPT, tokens: Tensor, step: int) -> float:
    """The mean loss over the validation tokens (val_tokens + 1,), uint16 on the CPU. Sequences are
    dealt to the ranks in turn. A collective.

    It differs from a training loss in that it is over the whole vocabulary, with products in the
    model's dtype; sequences have val_seq_len tokens and begin anywhere, so documents are read whole
    but for the first and the last one; and what comes next is not remembered. After the last step
    windows are those of the schedule's last stage, and `Run.train` has moved the weights half-way
    to their averages, if there are any."""
    c = model.config
    rank, world_size = ranks.rank_and_world_size()
    setting = setting_of(step, c)
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for begin in range(rank * c.val_seq_len, c.val_tokens, world_size * c.val_seq_len):
        sequence = tokens[None, begin : begin + c.val_seq_len + 1]
        inputs, targets = inputs_and_targets(sequence.to(model.device).long())
        total += loss_without_gradient(model, inputs, targets, setting)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item() / c.val_tokens


# --------------------------------------------------------------------------------------------------
# 11. The run


def seed_rounding(seed: int, step: int, device: torch.device) -> None:
    """Lets the random numbers of a step depend on seed, step and rank alone. Random rounding uses
    them. So a run that goes on from a save rounds as an undisturbed one. (torch.manual_seed does
    this, too, but also keeps a stack trace for each kind of GPU that is not in use, which takes
    tenths of a millisecond.)"""
    rank, _ = ranks.rank_and_world_size()
    # Primes, so that seeds, steps and ranks seldom meet: a CPU's generator takes 32 bits only.
    mixed = (seed * 1_000_003 + step * 1009 + rank) % 2**32
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        torch.cuda.manual_seed(mixed)


class Run:
    """The loop of training. Before each step the run saves or ends if all ranks have agreed to, and
    validates if it is time to. What the ranks tell each other travels with the loss of a
    step, and is read one step later (`read_messages`)."""

    def __init__(self, run_files: RunFiles, keeper: checkpoints.Keeper):
        self.optimizer = keeper.optimizer
        self.model = self.optimizer.model
        self.config = c = self.model.config
        self.device = self.model.device
        self.run_files = run_files
        self.keeper = keeper
        self.log = keeper.log
        self.clock = keeper.clock
        self.step = keeper.first_step  # steps so far
        self.ended_by = ""  # the signal that has ended the run early
        self.requests = ranks.Requests(self.device)
        self.get_state = partial(checkpoints.state_of, self.optimizer)
        batches = islice(shards.batches(run_files.train_paths, c, batch_plan(c)), self.step, None)
        self.batches = shards.ahead(
            host_tensor(shards.packed(batch), self.device) for batch in batches)
        self.batch: PreparedBatch | None = None  # of the next step

    def train(self) -> None:
        """All steps, and the averages of the last weights, if any. The clock stands still during
        validation, which trains no weight and reads no training data. A collective."""
        c = self.config
        self.clock.start()
        self.model.past.meet()  # before the first batch; later `train_step` does it
        while self.step < c.num_steps:
            self.save_or_stop()
            if self.ended_by:
                return
            if c.val_interval and self.step % c.val_interval == 0:
                self.clock.stop()
                self.validate()
                self.clock.start()
            self.make_step()
        self.optimizer.go_half_way_to_averages()
        self.optimizer.tables.complete()  # on the clock, as this exchange is part of training
        self.clock.stop()
        self.validate()

    def prepare(self, step: int) -> None:
        """Makes the batch of a step ready, if there is such a step."""
        if step < self.config.num_steps:
            self.batch = self.model.past.prepare(next(self.batches), step)

    def make_step(self) -> None:
        """One step of training. A collective."""
        seed_rounding(self.config.seed, self.step, self.device)
        if self.batch is None:  # the first one; later ones are prepared during the step before
            self.prepare(self.step)
        message = train_step(
            self.model, self.optimizer, self.batch, self.step, self.requests,
            partial(self.prepare, self.step + 1))
        self.log.put(self.step + 1, message, self.clock.now())
        # self.step still counts the earlier steps only. The CPU waits until these are over; the GPU
        # has this step to do meanwhile.
        self.read_messages()
        self.step += 1

    def read_messages(self) -> None:
        """Reads the messages of the first `self.step` steps, and waits for them. Later ones may not
        have come to all ranks yet. Raises BadInput if a loss is not finite. A collective."""
        for step, loss, numbers in self.log.arrived(self.step):
            self.requests.hear(numbers)
            faults.check_loss("training", loss, step, self.get_state)

    def save_or_stop(self) -> None:
        """Saves the run (with --save_every) if a save is due or a signal has come; a signal also
        ends it. All ranks do so after the same step, so a signal may take effect a few steps late
        (`Requests`). A collective."""
        # No stop before the first step, as there would be nothing to keep.
        self.requests.ask(bool(STOP.signal) and self.step > 0, self.keeper.due())
        # Not between the two steps of an update of the head: a save does not hold the gradient of
        # the first one. What was asked for is done a step later.
        if self.optimizer.first_head_gradient is not None:
            return
        if any(self.requests.granted):
            self.read_messages()  # of all steps so far, which a save holds
            stop = self.requests.take()
            self.clock.stop()
            self.keeper.save(self.step)
            self.clock.start()
            if stop:
                # The message of another rank does not say which signal it has got.
                self.ended_by = STOP.signal or "SIGTERM"

    def validate(self) -> None:
        """Validates, and writes the loss to the log. A collective."""
        self.read_messages()
        self.optimizer.tables.complete()
        self.optimizer.hooks.before_validation()
        loss = validate(self.model, self.run_files.val_tokens, self.step)
        self.log.step(self.step, self.clock.total, "val_loss", loss)
        faults.check_loss("validation", loss, self.step, self.get_state)
        if ranks.is_rank_0():
            fp8_static.check_weights(self.model, self.step, self.log)
        self.keeper.validated(self.step, loss)


def train(c: Config, at_end: ExitStack) -> int:
    """The whole run, or what is left of a saved one. Returns the exit status (`main`). `at_end`
    gets what is to be done at the end, also after an error. A collective."""
    script = sys.modules[__name__]  # for modules that use its parts

    # 1. Check what can be checked before the log begins and anything is compiled.
    files = journal.project_files(__file__)
    kind = "cuda" if command_line.has_cuda(c.device) else "cpu"
    device = ranks.start_process(kind, LOCAL_GPU, c.join_timeout)
    about_run = journal.describe_run(SOURCE)
    # Hosts may have their data in other folders; the shards are compared by their fingerprints.
    ranks.compare({f"--{name}": value for name, value in dataclasses.asdict(c).items()
                   if name != "data_dir"} | {"code train_gpt.py": about_run["code_sha256"]})
    recipe_names = choose_recipes(c, device)
    run_files = check_run_files(c, batch_plan(c), files)

    # 2. The log begins with the code and the facts. The number of steps is such a fact: under
    # --minutes it is chosen after the warm-up, and until then the log keeps its lines in memory.
    log = journal.Log(shards.reads_bytes(c.vocab_size))
    at_end.push(log.end_early)
    clock = journal.Clock(device)
    if ACTIVATION is not relu_squared and "fp8-static" in recipe_names.values():
        log.say("with this ACTIVATION the MLP has no FP8 with constant scales, as its kernel "
                "computes relu_squared")
    if run_files.saved:
        log.say(f"resumed at step {run_files.saved['step']} from {c.resume}")
        if run_files.saved.get("code_sha256") != about_run["code_sha256"]:
            log.say("the steps before were made by another train_gpt.py")
    begin = partial(report.begin, log, script, device, about_run, files, run_files, recipe_names)
    if not chooses_steps(c):
        begin(c)
    log.show("compiling ..." if c.compile else "warming up ...")

    def tell_of_compilation(what: str, seconds: float) -> None:
        fact = "compile"
        if clock.now() > 0:
            fact = "defect"
            what += " was compiled while the clock ran"
        after = round(time.perf_counter() - LAUNCHED, 1)
        log.fact(fact, dict(what=what, seconds=round(seconds, 2), after_launch_s=after))

    # 3. Make model and optimizer, compile them and warm up. Collections of garbage would take a
    # tenth of the compiler's time.
    gc.disable()
    functions = compiled_functions(tell_of_compilation) if c.compile else None
    model = GPT(c, device, ranks.rank_and_world_size()[1], functions)
    initialize(model, c.seed)  # for the warm-up; drawn anew after it
    optimizer = Optimizer(model)
    warm_up = warmup.WarmUp(model, optimizer, script)
    warm_up.run()
    if chooses_steps(c):
        c, seconds = warm_up.choose_steps(run_files.train_paths)
        begin(c, c.num_steps * seconds)
    optimizer.reset(initialize(model, c.seed))  # as if nothing had been trained so far

    # 4. Train, from the start or from where a save was made.
    keeper = checkpoints.Keeper(optimizer, run_files, log, clock)
    run = Run(run_files, keeper)
    gc.collect()
    gc.freeze()  # else a collection takes up to 0.4 s in the middle of the run (record 47)
    gc.enable()
    ranks.all_ranks(None)  # the clock starts when all of them are ready
    ranks.limit_waiting()  # for a rank that has died, on whatever host
    startup_s = time.perf_counter() - LAUNCHED
    log.fact("note", f"products: {recipes.summary(recipe_names, device)}")
    log.say(f"ready after {startup_s:.1f} s")
    STOP.end_after_a_step()  # from now on a signal ends all ranks together
    run.train()
    gc.unfreeze()  # else Triton would report what Python does not free at its end

    # 5. Say what came of it.
    return report.end(run, script, startup_s)


def main(argv: list[str]) -> int:
    """Exit status: 0 trained to the end; 1 a crash; 2 bad input, a folder or weights that cannot
    be written, too little memory, or a loss that is not finite; 129, 130 or 143, as a shell shows
    it, ended by a signal. Under torchrun each error is 1."""
    return faults.run(lambda at_end: train(parse_config(argv), at_end), STOP)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a file or pipe on Windows may lack some characters
    sys.exit(main(sys.argv[1:]))
