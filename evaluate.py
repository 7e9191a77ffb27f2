"""How good is a trained model? Loss, bits per byte and HellaSwag, each with its standard error.

    python evaluate.py MODEL                    # loss on the validation shards of its run
    python evaluate.py MODEL --text=book.txt    # loss and bits per byte on any text
    python evaluate.py MODEL --hellaswag        # 10,042 items, fetched at first use
    python evaluate.py A B --text=book.txt      # also B's results minus A's

MODEL is a file that `train_gpt.py --save_checkpoint=models/NAME.safetensors` has written.

**Loss** is in nats per token, or per byte if tokens are bytes, over the text's tokens and the end
of each document. On shards it is what the trainer calls val_loss: over their first val_tokens
tokens, in sequences of the model's val_seq_len; of several models the longest one counts for all.
On a CPU sequences have 16,384 tokens at most, which cut more documents, so the loss is a bit
higher.
**Bits per byte** divides by the bytes of the text in UTF-8, and leaves out the ends of documents,
which have no bytes. So models with different tokens can be compared.
**HellaSwag** (Zellers et al. 2019) gives a context and four endings, of which one is right. We
score as llm.c and modded-nanogpt do, so that numbers can be compared: an ending has one space put
before it, and the model takes the ending whose tokens' log-probabilities have the highest sum, or
for "HellaSwag normalised" (their acc_norm) the highest mean. Before the context stands the token
that begins a document, as in training. GPT-2 (124M) has 28.6 %, and 29.6 % normalised: published,
not measured here.

Shapes in comments are those of train_gpt.py: T tokens of a packed sequence, V size of the
vocabulary.
"""
import argparse
import dataclasses
import math
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from glob import glob
from typing import NamedTuple

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, without a traceback

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import sample
import train_gpt
from data import Parser, hellaswag, require, shards, texts
from nanogpt import checkpoints
from nanogpt.masks import BLOCK_SIZE
from records.console import end_in_order

# --------------------------------------------------------------------------------------------------
# 1. Log-probabilities of tokens
#
# The model takes one sequence of many documents, and tells them apart by the token that begins each
# (model.bos): nothing leaks from one document into the next. But attention sees whole blocks of 128
# tokens, so how far back a token sees depends on where in its block it stands. So each ending of
# HellaSwag, with its context, begins at the start of a block, as it would alone.

LOGITS_AT_A_TIME = 2048  # tokens: their logits over 50,304 tokens take 0.4 GB in float32
ENDINGS_AT_A_TIME = 32  # in one sequence: a few thousand tokens
# Most tokens of a sequence on a CPU. There each block of queries has a copy of the keys and values
# that it may see, which takes memory.
CPU_TOKENS = 16_384
progress = partial(tqdm, unit=" sequences", leave=False, disable=None)  # a bar on a terminal


def score(model: nn.Module, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """tokens (T,) and the target of each one (T,), -1 where there is none -> the log-probability of
    each target in nats, (n,) float64 for the n targets in their order."""
    logits = sample.logits_after(model, torch.from_numpy(tokens))
    targets = torch.from_numpy(targets).to(model.lm_head.device)
    found = []
    for places in (targets >= 0).nonzero()[:, 0].split(LOGITS_AT_A_TIME):
        found.append(-F.cross_entropy(logits(places), targets[places], reduction="none"))
    return torch.cat(found).double().cpu().numpy()


def score_endings(model: nn.Module, endings: list[tuple[list[int], list[int]]]) -> np.ndarray:
    """The tokens of the context, and its own, of each ending -> its log-probability, (endings,)."""
    sums = []
    for first in progress(range(0, len(endings), ENDINGS_AT_A_TIME)):
        together = endings[first : first + ENDINGS_AT_A_TIME]
        tokens = []
        targets = []
        for context, ending in together:
            filling = -(len(context) + len(ending)) % BLOCK_SIZE
            tokens += [model.bos, *context, *ending[:-1]] + [model.bos] * filling
            targets += [-1] * len(context) + ending + [-1] * filling
        found = score(model, np.array(tokens), np.array(targets))
        ends = np.cumsum([len(ending) for _, ending in together])
        sums.append(np.add.reduceat(found, [0, *ends[:-1]]))
    return np.concatenate(sums)


# --------------------------------------------------------------------------------------------------
# 2. Measures
#
# A result is a sum over documents or items ("units"), divided by another one: nats by tokens, bits
# by bytes, right answers by items. Both are kept unit by unit, for the standard error. Units are
# taken as drawn at random from many more. To first order the error of a result is the sum of what
# each unit adds to it, (amount - result x size) / sum of sizes (ratio estimator: Cochran 1977,
# section 2.11). Two models that are measured on the same units have much of their luck in common,
# so a difference is computed unit by unit. All this is about one trained model. What another seed
# would give, `python -m records compare` says.


class Measure(NamedTuple):
    """A measure of one model, unit by unit."""
    amounts: np.ndarray  # (units,) nats, bits or right answers
    sizes: np.ndarray  # (units,) tokens, bytes or ones

    def result(self) -> float:
        return float(self.amounts.sum() / self.sizes.sum())

    def influences(self) -> np.ndarray:
        """(units,) how much each unit adds to the error of the result."""
        return (self.amounts - self.result() * self.sizes) / self.sizes.sum()


def with_error(value: float, influences: np.ndarray) -> str:
    """A value with its standard error, by the (units,) influences. A single unit has none."""
    n = len(influences)
    if n == 1:
        return f"{value:.4f}"
    return f"{value:.4f} ± {math.sqrt(n) * influences.std(ddof=1):.4f}"  # their mean is 0


class Model(NamedTuple):
    """A model and what is needed to show it text."""
    path: str
    gpt: nn.Module
    encode: Callable[[str], list[int]]
    token_bytes: np.ndarray  # (V,) the number of bytes that each token stands for


def loss_measures(model: Model, tokens: np.ndarray, seq_len: int) -> dict[str, Measure]:
    """Loss and bits per byte; units are documents. The token that begins the next document belongs
    to the one that it ends. The name of the loss says of what tokens it is, as losses of tokens of
    two kinds say nothing about each other. As in the trainer's validation, sequences follow each
    other without gaps, without regard to documents."""
    if model.gpt.lm_head.device.type == "cpu":
        seq_len = min(seq_len, CPU_TOKENS)
    scores = []
    for begin in progress(range(0, len(tokens) - 1, seq_len)):
        piece = tokens[begin : begin + seq_len + 1]
        scores.append(score(model.gpt, piece[:-1], piece[1:]))
    nats = -np.concatenate(scores)  # (n,) of all tokens but the first
    begins = tokens[:-1] == model.gpt.bos
    begins[0] = True
    starts = np.flatnonzero(begins)
    num_bytes = model.token_bytes[tokens[1:]]  # (n,) of each target
    bits = np.where(num_bytes > 0, nats / math.log(2), 0)

    def per_document(amounts: np.ndarray, sizes: np.ndarray) -> Measure:
        return Measure(np.add.reduceat(amounts, starts), np.add.reduceat(sizes, starts))

    token = "byte" if shards.reads_bytes(model.gpt.config.vocab_size) else "token"
    return {f"loss, nats per {token}": per_document(nats, np.ones(len(nats))),
            "bits per byte": per_document(bits, num_bytes)}


def hellaswag_measures(model: Model, items: list[dict]) -> dict[str, Measure]:
    """The right answers in percent, as the head of this file says; units are items."""
    endings = []
    for item in items:
        context = model.encode(item["ctx"])
        endings += [(context, model.encode(f" {text}")) for text in item["endings"]]
    sums = score_endings(model.gpt, endings).reshape(len(items), -1)
    counts = np.array([len(ending) for _, ending in endings]).reshape(sums.shape)
    labels = np.array([int(item["label"]) for item in items])

    def percent(scores: np.ndarray) -> Measure:
        is_right = scores.argmax(1) == labels
        return Measure(100.0 * is_right, np.ones(len(items)))

    return {"HellaSwag, %": percent(sums), "HellaSwag normalised, %": percent(sums / counts)}


# --------------------------------------------------------------------------------------------------
# 3. The program


def load_model(path: str, device: str) -> Model:
    """Raises BadInput if the file is no checkpoint of this program."""
    gpt = checkpoints.load_model(path, device, train_gpt)
    encode, to_bytes = sample.codec(gpt.config.vocab_size)
    lengths = [len(to_bytes(token)) for token in range(gpt.config.vocab_size)]
    return Model(path, gpt, encode, np.array(lengths))


def read_text(options: argparse.Namespace, models: list[Model]) -> tuple[str, list[np.ndarray]]:
    """What --text means: its name, and the tokens (n + 1,) of each model. Raises BadInput."""
    config = models[0].gpt.config
    if options.text is not None:
        config = dataclasses.replace(config, data_dir=options.text)
    has_shards = bool(glob(config.val_files, root_dir=config.data_dir))
    require(has_shards or options.text is not None,
            f"there are no validation shards in {os.path.abspath(config.data_dir)}; start this "
            f"where {models[0].path} was trained, or name a text with --text")
    source = f"documents of {config.data_dir}"
    if has_shards:
        paths = shards.find_shards(config, "val")
        tokens = []
        for model in models:
            size = model.gpt.config.vocab_size
            shards.check_kind(paths[0], size, f"name a text file for {model.path} with --text")
            first = shards.validation_tokens(paths, size, config.val_tokens)
            tokens.append(first.astype(np.int64))
        return source, tokens
    documents = list(texts.read_all([options.text], options))
    require(documents, f"{options.text}: no text in it; name a file that has some")
    tokens = []
    for model in models:
        begin = [model.gpt.bos]
        parts = [begin + model.encode(document) for document in documents]
        tokens.append(np.concatenate([*parts, begin]))  # the end of the last document
    return source, tokens


def show(models: list[Model], measured: list[dict[str, Measure]], source: str) -> None:
    """Prints the results of each model, and less those of the first. `source` names the units."""
    for model, measures in zip(models, measured):
        print(f"{model.path} (preset {model.gpt.config.preset}, step {model.gpt.trained_steps:,})")
        for name, measure in measures.items():
            text = with_error(measure.result(), measure.influences())
            print(f"  {name:<23} {text:<20} {source}: {len(measure.sizes):,}")
    for model, measures in zip(models[1:], measured[1:]):
        for name, measure in measures.items():
            if name in measured[0]:
                first = measured[0][name]
                text = with_error(measure.result() - first.result(),
                                  measure.influences() - first.influences())
                print(f"{model.path} minus {models[0].path}, {name}: {text}")
    print("± is one standard error over documents or items. A single one has none, and with fewer "
          "than 30 it is too small: --text=PATH --split_blank=1 cuts a text into more.")


def work(argv: list[str]) -> None:
    """Measures what the command line asks for. Raises BadInput."""
    parser = Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    option = parser.add_argument
    option("models", metavar="MODEL", nargs="+",
           help="file that --save_checkpoint has written; others are compared with the first one")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--text", metavar="PATH",
        help="a text file, JSON lines, a folder of them or of shards, to measure the loss on; else "
        "the validation shards of the model's training")
    what.add_argument("--hellaswag", action="store_true",
                      help="measure accuracy on HellaSwag, which is fetched (12 MB)")
    texts.add_options(parser)
    option("--device", choices=sample.DEVICES, default=sample.DEVICES[0],
           help="where the models compute")
    options = parser.parse_intermixed_args(argv)
    require(options.text or not (options.split or options.split_blank),
            "--split and --split_blank cut a text; name it with --text")
    models = [load_model(path, options.device) for path in options.models]
    if options.hellaswag:
        source = "items"
        items = hellaswag.read_items()
        measured = [hellaswag_measures(model, items) for model in models]
    else:
        source, tokens = read_text(options, models)
        # Where sequences are longer, a model sees more of a document. So all have the same length.
        seq_len = max(model.gpt.config.val_seq_len for model in models)
        measured = [loss_measures(*pair, seq_len) for pair in zip(models, tokens)]
    show(models, measured, source)


if __name__ == "__main__":
    sys.exit(end_in_order("evaluate.py", work, sys.argv[1:]))
