"""How good is a trained model? Measures that others publish, each with its standard error.

    python evaluate.py model.pt                         # loss on the validation shards of its run
    python evaluate.py model.pt --text=book.txt         # loss and bits per byte on any text
    python evaluate.py model.pt --hellaswag             # 10,042 items, fetched at first use
    python evaluate.py model.pt --last_word=stories.txt
    python evaluate.py a.pt b.pt --text=book.txt        # also: how much lower is b's loss, really?
    python evaluate.py model.pt --text --hellaswag --json > results.json

model.pt is what `train_gpt.py --save_checkpoint=model.pt` has written.

**Loss** is in nats per token, over the text's tokens and the end of each document. On shards it is
what the trainer calls val_loss: over their first val_tokens tokens (those of the first model's
run), in sequences of each model's val_seq_len. Shorter ones (--seq_len; on a CPU 16,384 tokens, if
it does not say more) cut more documents, so the loss is a bit higher.
**Bits per byte** divides by the bytes of the text in UTF-8 instead, and leaves the ends of
documents out, which have no bytes. So models with different tokens can be compared. While a model
of bytes is trained, the screen shows another number, because the trainer knows only the sum over
all tokens: each end counts as a byte. With documents of 4,700 bytes that was 0.03 % more, with
documents of 120 bytes 0.13 % less.

**HellaSwag** (Zellers et al. 2019) gives a context and four endings, of which one is right. The
model takes the ending of the highest probability. We score as llm.c and modded-nanogpt do, so that
numbers can be compared: the context is the item's `ctx` as it stands, an ending has one space put
before it, and both are turned into tokens separately. "HellaSwag" takes the ending with the
highest sum of the log-probabilities of its tokens, and "HellaSwag, normalised" (their acc_norm)
the one with the highest mean over its tokens. Others divide by characters, which gives other
numbers. One thing is ours: before the context stands the token that begins a document, as in
training. In this way of scoring GPT-2 (124M) has 28.6 %, and 29.6 % normalised: published, not
measured here.

**Last word** (after LAMBADA, Paperno et al. 2016) is how often the model knows the last word of a
passage: each of its tokens, with the space before it, must be the most probable one after those
before. A passage is a line of a .jsonl file or a paragraph of a text. What is no letter or digit
behind the word is left out.

Section 1 computes log-probabilities, 2 has the measures, 3 the standard errors, 4 the program.
Shapes in comments are those of train_gpt.py: T tokens of a packed sequence, V size of the
vocabulary.
"""
import argparse
import hashlib
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from data import packages

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # importing torch takes seconds: no traceback then
    packages.require("numpy", "torch", "tqdm")

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import sample
from data import checks, hellaswag, shards, texts
from nanogpt import limits
from nanogpt.masks import BLOCK_SIZE
from nanogpt.ranks import BadInput, require
from records import evaluation
from records.console import discard_output, prepare_output, sentence_of

# --------------------------------------------------------------------------------------------------
# 1. Log-probabilities of tokens
#
# The model takes one sequence of many documents, and tells them apart by the token that begins each
# (model.bos). Attention, the n-grams that look up a row of their table, the search for matches, and
# what a layer reads of the previous token all stop at that token, so nothing leaks from one
# document into the next.
# Rotary positions run on, but only differences of positions matter.
#
# One thing does depend on the place: attention sees whole blocks of 128 tokens, so how far back a
# token sees depends on where in its block it stands. So each completion, with its context, begins
# at the start of a block, as it would alone. The places between are filled with documents of that
# one token.

LOGITS_AT_A_TIME = 2048  # tokens: their logits over 50,304 tokens take 0.4 GB in float32
ITEM_TOKENS = {"cuda": 65_536, "cpu": 8192}  # tokens of a sequence of items, if none is longer
CPU_TOKENS = 16_384  # most tokens of a sequence on a CPU: keys and values are copied there


@torch.no_grad()
def score(model, setting, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """tokens (T,) and the target of each one (T,), -1 where there is none -> two tensors (n,) for
    the n targets in their order: the log-probability of each in nats, and whether it is the most
    probable token. T is a multiple of 128. As in validation, no recipe of low precision is used."""
    x, sources = model.last_stream(tokens, setting, training=False)  # (T, D), and those of late_mix
    log_probabilities = []
    is_top = []
    for places in (targets >= 0).nonzero()[:, 0].split(LOGITS_AT_A_TIME):
        logits = model.logits(x[places], tuple(source[places] for source in sources))  # (places, V)
        wanted = targets[places]
        log_probabilities.append(-F.cross_entropy(logits, wanted, reduction="none"))
        is_top.append(logits.argmax(-1) == wanted)
    return torch.cat(log_probabilities), torch.cat(is_top)


class Item(NamedTuple):
    """A context and texts that may follow it, in tokens."""
    context: list[int]
    completions: list[list[int]]


class Scores(NamedTuple):
    """What a model says about items, of which each has the same number of completions. All arrays
    are (items, completions)."""
    log_probability: np.ndarray  # float64, of all tokens of the completion, in nats
    num_tokens: np.ndarray  # int64
    is_top: np.ndarray  # bool: each of its tokens is the most probable one


class Sequence(NamedTuple):
    """Documents that are computed together; each of the three is (T,) int64."""
    tokens: np.ndarray
    targets: np.ndarray  # the tokens of completions, one place earlier; -1 elsewhere
    owners: np.ndarray  # at a target: the number of its completion, counted over all items


def packed(items: list[Item], bos: int, seq_len: int) -> Iterator[Sequence]:
    """Yields sequences of seq_len tokens, a multiple of 128; the last one may be shorter. Each
    completion is a document of its own, with the context before it, and begins at the start of a
    block. Raises ValueError if one does not fit into a sequence."""
    sequence = None
    end = 0  # of what is filled so far, rounded up to whole blocks
    number = 0
    for item in items:
        for completion in item.completions:
            document = [bos, *item.context, *completion]
            count = len(document) - 1  # the last token is a target only
            if sequence is None or end + count > seq_len:
                if sequence is not None:
                    yield sequence
                sequence = Sequence(
                    tokens=np.full(seq_len, bos),
                    targets=np.full(seq_len, -1),
                    owners=np.full(seq_len, -1))
                end = 0
            answer = slice(end + count - len(completion), end + count)
            sequence.tokens[end : end + count] = document[:-1]
            sequence.targets[answer] = completion
            sequence.owners[answer] = number
            end += math.ceil(count / BLOCK_SIZE) * BLOCK_SIZE
            number += 1
    if sequence is not None:
        yield Sequence(*(array[:end] for array in sequence))


def score_items(model, items: list[Item], most_tokens: int, progress: Callable = iter) -> Scores:
    """Scores items, as many at a time as keep the device busy. `progress` wraps the loop over
    sequences. Raises BadInput if an item has more than most_tokens tokens."""
    longest = 0
    for item in items:
        longest_completion = max(len(completion) for completion in item.completions)
        longest = max(longest, len(item.context) + longest_completion)
    room = math.ceil(longest / BLOCK_SIZE) * BLOCK_SIZE  # tokens, in whole blocks
    require(room <= most_tokens,
            f"one item has {longest:,} tokens, and sequences have {most_tokens:,}; give "
            f"--seq_len={room}, or shorten the item")
    setting = shortened(sample.last_setting(model), longest)
    device = model.lm_head.device
    seq_len = max(room, min(most_tokens, ITEM_TOKENS[device.type]))
    shape = len(items), len(items[0].completions)
    log_probability = np.zeros(shape)
    num_tokens = np.zeros(shape, dtype=np.int64)
    misses = np.zeros(shape, dtype=np.int64)
    for sequence in progress(list(packed(items, model.bos, seq_len))):
        tokens = torch.from_numpy(sequence.tokens).to(device)
        targets = torch.from_numpy(sequence.targets).to(device)
        owners = sequence.owners[sequence.targets >= 0]  # (n,)
        found, is_top = score(model, setting, tokens, targets)
        # reshape(-1) is a view, so this adds to the arrays themselves.
        np.add.at(log_probability.reshape(-1), owners, found.double().cpu().numpy())
        np.add.at(num_tokens.reshape(-1), owners, 1)
        np.add.at(misses.reshape(-1), owners, ~is_top.cpu().numpy())
    return Scores(log_probability, num_tokens, misses == 0)


def shortened(setting, longest: int):
    """The setting with windows cut to a document of `longest` tokens that begins at the start of a
    block. What is cut off belongs to other documents, so no result changes, and attention has less
    to gather."""
    blocks = math.ceil(longest / BLOCK_SIZE)
    windows = {name: min(window, blocks) for name, window in setting.windows.items()}
    return setting._replace(windows=windows)


class Stream(NamedTuple):
    """Documents one after the other, in the tokens of one model."""
    tokens: np.ndarray  # (n + 1,) int64: n inputs, and the last target
    starts: np.ndarray  # (documents,) where each one begins among the inputs; the first is 0


def score_stream(model, stream: Stream, seq_len: int, progress: Callable = iter) -> np.ndarray:
    """The log-probability in nats of each token of the stream but the first: (n,) float64. As in
    the trainer's validation, sequences follow each other without gaps, wherever documents begin.
    `progress` wraps the loop over sequences."""
    setting = sample.last_setting(model)
    device = model.lm_head.device
    n = len(stream.tokens) - 1
    results = []
    for begin in progress(range(0, n, seq_len)):
        piece = torch.from_numpy(stream.tokens[begin : begin + seq_len + 1]).to(device)
        inputs = len(piece) - 1
        filling = math.ceil(inputs / BLOCK_SIZE) * BLOCK_SIZE - inputs  # of the last sequence
        tokens = F.pad(piece[:-1], (0, filling), value=model.bos)
        targets = F.pad(piece[1:], (0, filling), value=-1)
        found, _ = score(model, setting, tokens, targets)
        results.append(found.double().cpu().numpy())
    return np.concatenate(results)


# --------------------------------------------------------------------------------------------------
# 2. Measures
#
# A result is a sum over documents, items or passages ("units"), divided by another one: nats by
# tokens, bits by bytes, right answers by items. Both are kept unit by unit, because the standard
# error needs them (section 3).


class PerUnit(NamedTuple):
    """A measure of one model, unit by unit. The result is amounts.sum() / sizes.sum()."""
    amounts: np.ndarray  # (units,) float64: nats, bits or right answers
    sizes: np.ndarray  # (units,) float64: tokens, bytes or ones


class Model(NamedTuple):
    """A model and what is needed to show it text."""
    path: str
    gpt: nn.Module
    kind: str  # of its tokens: "gpt2", "bytes", or "other" for a vocabulary of the user's
    encode: Callable[[str], list[int]] | None  # None: the vocabulary is not known here
    token_bytes: np.ndarray | None  # (V,) the number of bytes that each token stands for
    sha256: str  # of the weights


def loss_measures(model: Model, stream: Stream, seq_len: int,
                  progress: Callable = iter) -> dict[str, PerUnit]:
    """"loss", and if the bytes of tokens are known "bits_per_byte"; units are documents. The token
    that begins the next document belongs to the one that it ends."""
    nats = -score_stream(model.gpt, stream, seq_len, progress)  # (n,)
    nats_of_documents = np.add.reduceat(nats, stream.starts)
    counts = np.diff(stream.starts, append=len(nats))
    found = {"loss": PerUnit(nats_of_documents, counts.astype(float))}
    if model.token_bytes is None:
        return found
    num_bytes = model.token_bytes[stream.tokens[1:]]  # (n,) of each target
    if num_bytes.any():
        bits = np.where(num_bytes > 0, nats / math.log(2), 0)
        found["bits_per_byte"] = PerUnit(
            np.add.reduceat(bits, stream.starts),
            np.add.reduceat(num_bytes, stream.starts).astype(float))
    return found


def hellaswag_measures(model: Model, items: list[hellaswag.Item], seq_len: int,
                       progress: Callable = iter) -> dict[str, PerUnit]:
    """"hellaswag" and "hellaswag_norm", as the head of this file says; units are items."""
    tokenized = []
    for item in items:
        endings = [model.encode(f" {ending}") for ending in item.endings]
        tokenized.append(Item(model.encode(item.context), endings))
    scores = score_items(model.gpt, tokenized, seq_len, progress)
    labels = np.array([item.label for item in items])
    mean = scores.log_probability / scores.num_tokens
    right = scores.log_probability.argmax(1) == labels
    right_by_mean = mean.argmax(1) == labels
    ones = np.ones(len(items))
    return {"hellaswag": PerUnit(right.astype(float), ones),
            "hellaswag_norm": PerUnit(right_by_mean.astype(float), ones)}


def last_word_measures(model: Model, passages: list[tuple[str, str]], seq_len: int,
                       progress: Callable = iter) -> dict[str, PerUnit]:
    """"last_word", for pairs of `split_last_word`; units are passages."""
    items = [Item(model.encode(context), [model.encode(word)]) for context, word in passages]
    scores = score_items(model.gpt, items, seq_len, progress)
    return {"last_word": PerUnit(scores.is_top[:, 0].astype(float), np.ones(len(items)))}


def split_last_word(passage: str) -> tuple[str, str] | None:
    """What stands before the last word, and the word with the space before it. None if there are
    fewer than two words."""
    end = len(passage)
    while end > 0 and not passage[end - 1].isalnum():
        end -= 1
    begin = end
    while begin > 0 and not passage[begin - 1].isspace():
        begin -= 1
    context = passage[:begin].rstrip()
    return (context, passage[len(context) : end]) if context else None


# --------------------------------------------------------------------------------------------------
# 3. How certain a result is
#
# The units are taken as drawn at random from many more, independently of each other. A result is a
# ratio of two sums. To first order its error is the sum of what each unit adds to it, (amount -
# result x size) / sum of sizes, and the variance of such a sum is known (ratio estimator:
# Cochran 1977, section 2.11). Where all sizes are 1 this is the usual standard error of a mean.
#
# Two models that are measured on the same units have much of their luck in common. So a difference
# is computed unit by unit, and most of it cancels. This says how certain a result is for this one
# trained model. It does not say what another seed would give: `python -m records compare` does.

NORMAL_95 = 1.959964  # a normal variable is within so many standard deviations in 95 % of all cases
FEW = 30  # units, below which the interval is too narrow to be trusted


def result_of(per_unit: PerUnit) -> float:
    return float(per_unit.amounts.sum() / per_unit.sizes.sum())


def influences(per_unit: PerUnit) -> np.ndarray:
    """(units,) how much each unit adds to the error of the result."""
    result = result_of(per_unit)
    return (per_unit.amounts - result * per_unit.sizes) / per_unit.sizes.sum()


def standard_error(influence: np.ndarray) -> float | None:
    """The standard error of a sum of (units,) influences, or None for a single unit."""
    n = len(influence)
    if n < 2:
        return None
    return math.sqrt(n / (n - 1) * float(np.square(influence).sum()))


class Difference(NamedTuple):
    value: float
    standard_error: float
    low: float  # the 95 % interval
    high: float


def difference(b: PerUnit, a: PerUnit) -> Difference | None:
    """b's result minus a's, over the same units. None for a single unit."""
    error = standard_error(influences(b) - influences(a))
    if error is None:
        return None
    value = result_of(b) - result_of(a)
    return Difference(value, error, value - NORMAL_95 * error, value + NORMAL_95 * error)


# --------------------------------------------------------------------------------------------------
# 4. The program

OWN = "the validation shards of its training"  # what --text alone means
MOST_FOR_BYTES = 512  # size of the vocabulary of a model that reads bytes


def sequence_length(text: str) -> int:
    number = int(text)
    if number <= 0 or number % BLOCK_SIZE:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of {BLOCK_SIZE}")
    return number


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line. Raises BadInput on an unknown option or a wrong value."""
    parser = argparse.ArgumentParser(
        prog="evaluate.py", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.error = partial(require, False)  # argparse's sentence, without its page on usage
    option = parser.add_argument
    option("models", metavar="MODEL", nargs="+",
           help="file that --save_checkpoint has written; others are compared with the first one")
    option("--text", metavar="PATH", nargs="?", const=OWN,
           help="measure loss and bits per byte on a text file, a .jsonl file, a folder of them, a "
           f"shard, or a folder of shards; without PATH, and if no measure is named: {OWN}")
    option("--hellaswag", metavar="FILE", nargs="?", const=str(hellaswag.PATH),
           help="measure accuracy on HellaSwag; without FILE it is fetched (12 MB)")
    option("--last_word", metavar="FILE", help="measure how often the last word of each paragraph, "
           "or of each line of a .jsonl file, is known")
    option("--limit", type=sample.at_least(1), metavar="N",
           help="take the first N documents, items or passages only")
    option("--split_blank", type=sample.at_least(1), metavar="N",
           help="cut a text at N or more blank lines into documents (--text), "
           "or into passages (--last_word)")
    option("--key", default="text", help="where a .jsonl line has its text; default %(default)s")
    option("--seq_len", type=sequence_length, metavar="N",
           help="tokens to work on at a time; default: the model's val_seq_len, on a CPU at most "
           f"{CPU_TOKENS}. Fewer need less memory, and cut more documents of --text")
    option("--device", type=sample.device, default="auto", help="auto, cuda or cpu")
    option("--json", action="store_true", help="write the results to standard output as JSON")
    options = parser.parse_args(argv)
    for name in ("text", "hellaswag", "last_word"):
        require(getattr(options, name) != "", f"--{name} is empty; name a file")
    return options


def load_model(path: str, device: torch.device) -> Model:
    """Raises BadInput if the file is no checkpoint of this program."""
    import train_gpt
    gpt = train_gpt.load_checkpoint(path, device)
    if device.type == "cpu" and gpt.lm_head.dtype == torch.bfloat16 and not train_gpt.CPU_HAS_BF16:
        gpt.float()  # this CPU could only emulate bf16
    kind = kind_for(gpt.config.vocab_size)
    model = Model(path, gpt, kind, None, None, sha256_of([Path(path)]))
    if kind == "other":
        return model
    try:
        encode, to_bytes = sample.codec(gpt.config.vocab_size)
    except BadInput as error:
        print(f"evaluate.py: {error}", file=sys.stderr)  # the loss on shards can still be had
        return model
    lengths = [len(to_bytes(token)) for token in range(gpt.config.vocab_size)]
    return model._replace(encode=encode, token_bytes=np.array(lengths))


def kind_for(vocab_size: int) -> str:
    """The kind of a model's tokens, as far as the size of its vocabulary tells."""
    if not shards.reads_bytes(vocab_size):
        return "gpt2"
    return "bytes" if vocab_size <= MOST_FOR_BYTES else "other"


def require_text(model: Model) -> None:
    """Raises BadInput unless the model can be shown a text."""
    require(model.encode, f"{model.path} has tokens whose text is not known here, so that only its "
            "loss on shards can be measured")


class Source(NamedTuple):
    """What a measure is computed from."""
    name: str
    sha256: str  # of all its files, one after the other
    content: list  # shards' paths, documents, HellaSwag's items, or pairs of `split_last_word`


def sha256_of(paths: list[Path]) -> str:
    """The sha256 of the files, one after the other. Raises BadInput if one is no file: it could be
    read for ever, or only once."""
    digest = hashlib.sha256()
    for path in paths:
        require(path.is_file(), f"{path} is a pipe or a device; name a file")
        with open(path, "rb") as file:
            while piece := file.read(1 << 24):
                digest.update(piece)
    return digest.hexdigest()


OTHER_CODE = 0.01  # nats; dtypes, and where long sequences are cut, make smaller differences


class Text(NamedTuple):
    """What the loss is measured on: shards, or documents as strings."""
    source: Source
    val_tokens: int | None  # how many of the shards' first tokens count; None if it has documents

    @property
    def is_shards(self) -> bool:
        return self.val_tokens is not None


def find_text(options: argparse.Namespace, model: Model) -> Text:
    """What --text means. Raises BadInput, ShardError or PrepareError if it is not there."""
    c = model.gpt.config
    if options.text in (None, OWN):
        try:
            paths = checks.find(c.data_dir, "val", c.val_files)
        except shards.ShardError as error:
            raise BadInput(f"{error}; or name a text with --text") from None
        return Text(Source(c.data_dir, sha256_of(paths), paths), c.val_tokens)
    path = Path(options.text)
    if path.suffix == ".bin":
        require(path.is_file(), f"{path}: no such file; name a shard")
        return Text(Source(options.text, sha256_of([path]), [path]), c.val_tokens)
    if path.is_dir() and list(path.glob("*_val_*.bin")):
        paths = checks.find(options.text, "val", "*_val_*.bin")
        return Text(Source(options.text, sha256_of(paths), paths), c.val_tokens)
    return Text(read_texts(options.text, options.key, options.split_blank), None)


def warn_of_other_shards(text: Text, models: list[Model]) -> bool:
    """Says on standard error which models were trained when their folder held other validation
    shards. Text that is prepared anew is split anew. Returns whether there are any."""
    if not text.is_shards:
        return False
    warned = False
    read = [shards.fingerprint(path, "val") for path in text.source.content]
    for model in models:
        known = {shard.get("name"): shard.get("sha256") for shard in model.gpt.data}
        changed = any(
            shard["name"] in known and known[shard["name"]] != shard["sha256"] for shard in read)
        folder = Path(model.gpt.config.data_dir).resolve()
        if changed and text.source.content[0].resolve().parent == folder:
            print(f"evaluate.py: {folder} was prepared anew after {model.path} was trained, so its "
                  "validation text may be what the model has learned from", file=sys.stderr)
            warned = True
    return warned


def warn_of_other_code(models: list[Model], of_models: list[dict[str, PerUnit]]) -> None:
    """Says on standard error which models have another loss than when they were trained, on the
    same text. Most likely the code has changed, or the text: a checkpoint holds neither."""
    def text_of(model: Model) -> tuple:
        c = model.gpt.config
        return c.data_dir, c.val_files, c.val_tokens

    for model, found in zip(models, of_models):
        trained = model.gpt.val_loss
        loss = result_of(found["loss"])
        same_text = text_of(model) == text_of(models[0])
        if same_text and trained is not None and abs(loss - trained) > OTHER_CODE:
            print(f"evaluate.py: {model.path} has a loss of {loss:.4f} here and had {trained:.4f} "
                  "when it was trained, so train_gpt.py or the text in "
                  f"{model.gpt.config.data_dir} has probably changed; `python -m records code LOG "
                  "FOLDER` gives back the code of its run", file=sys.stderr)


def read_texts(name: str, key: str, split_blank: int | None) -> Source:
    """The documents of a file or folder that are not blank. Raises PrepareError if they cannot be
    read, and BadInput if there are none."""
    paths, _ = texts.find_sources([name], key)
    documents = []
    for path in paths:
        for document in texts.read_documents(path, key, split_blank):
            if document.strip():
                documents.append(document)
    require(documents, f"{name}: no text in it; name a file that has some")
    return Source(name, sha256_of(paths), documents)


def stream_of(text: Text, model: Model, limit: int | None) -> Stream:
    """The documents of a text in the model's tokens, at most `limit`. Raises BadInput if it is of
    shards that hold tokens of another kind, and ShardError if one is damaged."""
    source = text.source
    if text.is_shards:
        kind = shards.kind_of_tokens(source.content[0])
        require(model.kind in (kind, "other"),
                f"{source.content[0]} holds tokens of the kind {kind}, and {model.path} reads "
                f"{model.kind}; name a text file with --text")
        tokens = np.concatenate(
            [shards.read_shard(path, model.gpt.config.vocab_size).tokens
             for path in source.content])
        tokens = tokens[: text.val_tokens + 1].astype(np.int64)
    else:
        require_text(model)
        pieces = []
        for document in source.content[:limit]:
            pieces += [[model.gpt.bos], model.encode(document)]
        pieces.append([model.gpt.bos])  # the end of the last document
        tokens = np.concatenate([np.array(piece, dtype=np.int64) for piece in pieces])
    begins = tokens == model.gpt.bos
    begins[0] = True
    starts = np.flatnonzero(begins[:-1])
    if limit is not None and limit < len(starts):
        tokens = tokens[: starts[limit] + 1]
        starts = starts[:limit]
    require(len(tokens) > 1, f"{source.name} holds no token to predict; name a longer text")
    return Stream(tokens, starts)


def read_passages(options: argparse.Namespace) -> Source:
    """Raises PrepareError or BadInput if there are none."""
    source = read_texts(options.last_word, options.key, options.split_blank or 1)
    pairs = [pair for document in source.content if (pair := split_last_word(document))]
    require(pairs, f"{options.last_word}: no passage of two words in it; name another text")
    return source._replace(content=pairs[: options.limit])


def read_hellaswag(options: argparse.Namespace) -> Source:
    """Raises ItemsError if the items cannot be had."""
    path = Path(options.hellaswag)
    if path == hellaswag.PATH:
        hellaswag.fetch()
    require(path.is_file(), f"{path}: no file; name one with HellaSwag's items")
    items = hellaswag.read_items(path)
    return Source(path.name, sha256_of([path]), items[: options.limit])


class Measured(NamedTuple):
    """The measures of one source: for each model, by their names."""
    source: Source
    of_models: list[dict[str, PerUnit]]


def measure_all(options: argparse.Namespace, models: list[Model]) -> list[Measured]:
    """What the command line asks for. Raises BadInput, ShardError, PrepareError or ItemsError."""
    # 1. All that is to be read, so that a mistake shows before anything is computed.
    wants_text = options.text or not (options.hellaswag or options.last_word)
    if wants_text:
        text = find_text(options, models[0])
        changed = warn_of_other_shards(text, models)
        streams = [stream_of(text, model, options.limit) for model in models]
        counts = {len(stream.starts) for stream in streams}
        require(len(counts) == 1,
                f"the models do not see the same documents of {text.source.name}; measure them one "
                "by one")
    if options.hellaswag or options.last_word:
        for model in models:
            require_text(model)
    items = read_hellaswag(options) if options.hellaswag else None
    passages = read_passages(options) if options.last_word else None

    # 2. What is computed.
    def progress(steps):
        return tqdm(steps, unit="sequence", leave=False, disable=None)  # None: only on a terminal

    done = []
    if wants_text:
        of_models = [loss_measures(model, stream, max_tokens(options, model), progress)
                     for model, stream in zip(models, streams)]
        if options.text in (None, OWN) and not (options.limit or options.seq_len or changed):
            warn_of_other_code(models, of_models)
        done.append(Measured(text.source, of_models))
    for source, measure in ((items, hellaswag_measures), (passages, last_word_measures)):
        if source:
            of_models = [measure(model, source.content, max_tokens(options, model), progress)
                         for model in models]
            done.append(Measured(source, of_models))
    return done


def max_tokens(options: argparse.Namespace, model: Model) -> int:
    """Most tokens of a sequence."""
    own = model.gpt.config.val_seq_len
    if options.device.type == "cpu":
        own = min(own, CPU_TOKENS)
    return options.seq_len or own


def report(models: list[Model], all_measured: list[Measured], device: torch.device) -> dict:
    """The results in the form of records/evaluation.py. Raises BadInput if one is not finite."""
    clean = evaluation.clean
    results = []
    differences = []
    for source, of_models in all_measured:
        for index, by_name in enumerate(of_models):
            for name, per_unit in by_name.items():
                result = result_of(per_unit)
                require(math.isfinite(result),
                        f"{models[index].path}: the {name} is not finite; its training diverged")
                error = standard_error(influences(per_unit))
                results.append(dict(
                    measure=name, model=index, value=rounded(result), standard_error=rounded(error),
                    units=len(per_unit.amounts), data=clean(source.name),
                    data_sha256=source.sha256))
                same_kind = models[index].kind == models[0].kind
                if index == 0 or name not in of_models[0] or (name == "loss" and not same_kind):
                    continue  # losses of tokens of two kinds say nothing about each other
                found = difference(per_unit, of_models[0][name])
                if found:
                    values = {key: rounded(value) for key, value in found._asdict().items()}
                    differences.append(dict(measure=name, model=index, against=0, **values))
    return dict(
        form=evaluation.FORM, date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        torch=clean(torch.__version__), device=clean(name_of(device)),
        models=[dict(path=clean(model.path), weights_sha256=model.sha256,
                     steps=model.gpt.trained_steps, preset=clean(model.gpt.config.preset),
                     tokens=model.kind) for model in models],
        results=results, differences=differences)


def rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 6)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def is_sure_share(entry: dict) -> bool:
    """Whether a share, or a difference of two, has no error because it is the same of all units."""
    return evaluation.MEASURES[entry["measure"]].is_share and entry["standard_error"] == 0


def models_agree(difference: dict) -> bool:
    return is_sure_share(difference) and difference["value"] == 0


def show(content: dict) -> None:
    """Prints the results as lines of text."""
    for number, model in enumerate(content["models"]):
        print(f"{model['path']} (preset {model['preset']}, step {model['steps']:,})")
        for result in content["results"]:
            if result["model"] == number:
                title = evaluation.MEASURES[result["measure"]].title
                print(f"  {title:<23} {evaluation.value_text(result):<38}"
                      f"{evaluation.units_text(result)}")
    for found in content["differences"]:
        b, a = (content["models"][found[key]]["path"] for key in ("model", "against"))
        title = evaluation.MEASURES[found["measure"]].title
        print(f"{b} minus {a}, {title}: {evaluation.difference_text(found)}")
    print("Behind ± stands one standard error over documents, items or passages.")
    of_bytes = [number for number, model in enumerate(content["models"])
                if model["tokens"] == "bytes"]
    if any(result["model"] in of_bytes and result["measure"] == "bits_per_byte"
           for result in content["results"]):
        print("In bits per byte the end of a document is no byte here; in training it is one.")
    if any(result["standard_error"] is None for result in content["results"]):
        print("A single one has none; of a --text, --split_blank=1 makes several documents.")
    if any(models_agree(found) for found in content["differences"]):
        print("An interval of no width: the models agree on all N. They may still differ by 3 / N.")
    if any(is_sure_share(result) for result in content["results"]):
        print("An error of 0: all N have the same result. Of further ones about 3 / N may differ.")
    if any(1 < result["units"] < FEW for result in content["results"]):
        print(f"With fewer than {FEW} of them, errors and intervals are too small.")


def main(argv: list[str]) -> int:
    """Exit status: 0, 2 for bad input, or as usual 130 for Ctrl-C."""
    prepare_output()
    try:
        options = parse(argv)
        models = [load_model(path, options.device) for path in options.models]
        content = report(models, measure_all(options, models), options.device)
        if options.json:
            print(json.dumps(content, indent=1))
        else:
            show(content)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in `| head -1`
        discard_output(sys.stdout)
    except (RuntimeError, MemoryError) as error:
        lack = limits.lack_of_memory(error)
        if not lack:
            raise
        print(f"evaluate.py: {lack}; give a smaller --seq_len", file=sys.stderr)
        return 2
    except OSError as error:
        discard_output(sys.stdout)
        print(f"evaluate.py: {sentence_of(error)}", file=sys.stderr)
        return 2
    except (BadInput, shards.ShardError, texts.PrepareError, hellaswag.ItemsError) as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # main ends in order
    sys.exit(main(sys.argv[1:]))
