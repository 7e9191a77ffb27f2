"""Continue a text with a trained model.

    python sample.py MODEL "ROMEO:"         # prints the text and what the model adds to it
    echo "ROMEO:" | python sample.py MODEL  # the text comes from standard input

MODEL is a file that `train_gpt.py --save_checkpoint=models/NAME.safetensors` has written. A text
ends where the model ends the document, after --max_new_tokens, or where the model's sequences end.
Of a text that is longer than these the model reads the end.

For each new token the whole text is computed anew. To keep what layers know of earlier tokens would
be faster, but would need a second version of each layer, as layers here read more of earlier tokens
than their keys and values.
"""
import argparse
import codecs
import signal
import sys
from collections.abc import Callable, Iterator

from data import BadInput, gpt2, harmless, packages

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, without a traceback
    packages.require("numpy", "torch", "safetensors", "tqdm")

import torch
from torch import Tensor

from data.prepare import bytes_of, token_to_byte
from data.shards import SEPARATOR, reads_bytes
from nanogpt import faults, fitting
from nanogpt.masks import BLOCK_SIZE
from nanogpt.ranks import is_rank_0, require
from records.console import complain, discard_output, prepare_output

# --------------------------------------------------------------------------------------------------
# 1. Tokens, one after the other


def last_setting(model):
    """How far the model sees, and how it turns positions, after the steps that it was trained."""
    script = sys.modules[type(model).__module__]  # train_gpt, or __main__ while that trains
    return script.setting_of(model.trained_steps, model.config)


def widen(model) -> None:
    """On a CPU the model computes in float32: many can only emulate narrower numbers."""
    if model.lm_head.device.type == "cpu" and model.lm_head.dtype != torch.float64:
        model.float()


@torch.no_grad()
def next_logits(model, tokens: list[int]) -> Tensor:
    """The capped logits (V,) of the token after these. The model takes whole blocks, so they are
    filled up with tokens that nothing before them can see."""
    filling = -len(tokens) % BLOCK_SIZE
    padded = torch.tensor(tokens + [model.bos] * filling, device=model.lm_head.device)
    x, sources = model.last_stream(padded, last_setting(model), training=False)
    last = slice(len(tokens) - 1, len(tokens))
    return model.logits(x[last], tuple(source[last] for source in sources))[0]


def draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token drawn by its probability, from logits (V,): among the top_k most probable ones (0:
    all). Temperature 0 takes the most probable one."""
    if temperature == 0:
        return int(logits.argmax())
    logits, tokens = logits.double().topk(min(top_k or len(logits), len(logits)))
    probabilities = ((logits - logits[0]) / temperature).softmax(-1)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def generate(model, tokens: list[int], count: int, temperature: float, top_k: int,
             generator: torch.Generator) -> Iterator[int]:
    """At most `count` tokens that continue `tokens`, one by one as they are drawn, up to the end of
    the document, whose token is among them, or of the model's sequences. Raises BadInput if the
    logits are not finite."""
    tokens = [*tokens]
    for _ in range(min(count, model.config.seq_len - len(tokens))):
        logits = next_logits(model, tokens)
        require(logits.isfinite().all(), "the logits are not finite: training has diverged")
        tokens.append(draw(logits, temperature, top_k, generator))
        yield tokens[-1]
        if tokens[-1] == model.bos:
            break


# --------------------------------------------------------------------------------------------------
# 2. Text


def codec(vocab_size: int) -> tuple[Callable[[str], list[int]], Callable[[int], bytes]]:
    """Two functions, from a text to its tokens and from a token to its bytes: tokens are bytes for
    a small vocabulary, otherwise GPT-2's byte-pair encoding. Tokens that begin a document or pad
    the vocabulary have no text. Raises BadInput if GPT-2's cannot be had."""
    if reads_bytes(vocab_size):
        return (lambda text: bytes_of(text).tolist(),
                lambda token: token_to_byte[token : token + 1].tobytes())
    vocabulary = gpt2.load()

    def gpt2_bytes(token: int) -> bytes:
        return vocabulary.decode_single_token_bytes(token) if token < SEPARATOR else b""

    return vocabulary.encode_ordinary, gpt2_bytes


def check(config) -> list[str]:
    """Whether a run can end with a sample, before it begins. A run that is fitted to a text does
    without the sample that nobody has asked for, and returns a note. Raises BadInput otherwise."""
    try:
        if is_rank_0():
            codec(config.vocab_size)
    except BadInput as error:
        if not config.fit or config.sample != fitting.SAMPLE:
            raise BadInput(f"{error}, or do without a sample: --sample=") from None
        config.sample = ""
        return [f"there will be no sample: {error}"]
    return []


def opening(config, val_tokens: Tensor) -> str:
    """What the sample at the end of a run begins with: --sample, or in a run that is fitted to a
    text, if nobody has asked for another one, a few words from the beginning of the validation
    tokens, without the first one, which may be cut."""
    if not config.fit or config.sample != fitting.SAMPLE:
        return config.sample
    _, to_bytes = codec(config.vocab_size)
    text = b"".join(to_bytes(token & 0xFFFF) for token in val_tokens[:200].tolist())
    return " ".join(text.decode(errors="replace").split()[1:6])[:80] or config.sample


def continued(model, text: str, count: int, generator: torch.Generator, temperature: float = 0.8,
              top_k: int = 0) -> Iterator[str]:
    """The text, then what the model adds to it (`generate`), a piece for each token. A piece may be
    empty, as a character may take several tokens. Of a text after which nothing could come, the
    model reads the end, which leaves half of a sequence free."""
    widen(model)
    encode, to_bytes = codec(model.config.vocab_size)
    tokens = encode(text)
    seq_len = model.config.seq_len
    if len(tokens) > seq_len - 2:
        complain(f"the text to continue has {len(tokens):,} tokens, and the model's sequences have "
                 f"{seq_len:,}, so it reads only the last {seq_len // 2:,}")
        tokens = tokens[-(seq_len // 2) :]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    yield text
    for token in generate(model, [model.bos, *tokens], count, temperature, top_k, generator):
        yield decoder.decode(to_bytes(token))
    yield decoder.decode(b"", final=True)


def continue_text(model, text: str, count: int) -> str:
    """The text, continued by a model that has just been trained, as it can be printed."""
    generator = torch.Generator(model.lm_head.device).manual_seed(0)
    return printable("".join(continued(model, text, count, generator)))


def what_to_expect(config, active: int, read: int) -> str:
    """What a sample of a small model of bytes shows, for somebody who has never seen one; empty for
    other models. `active`: its weights without tables; `read`: bytes that it was trained on."""
    if not reads_bytes(config.vocab_size) or active > 5_000_000:
        return ""
    writes = "words and the layout of their text, but no sense"
    if read < 400_000:
        writes = "letters in a likely order, and few words"
    return (f"what to expect: {active / 1e6:.1f}M weights that have read {read / 1e6:.1f}M bytes "
            f"write {writes}; longer runs, more text and larger models on a GPU bring more")


def printable(text: str) -> str:
    """The text, on a terminal without control characters."""
    return harmless(text) if sys.stdout.isatty() else text


# --------------------------------------------------------------------------------------------------
# 3. The program


def number(kind: type, low: float) -> Callable:
    """For argparse: an int or a float that is at least `low`."""
    def checked(text: str):
        value = kind(text)
        if not value >= low:  # as nan is not
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low} on")
        return value

    return checked


def device(text: str) -> torch.device:
    """For argparse: auto, cuda or cpu."""
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    if text not in ("cuda", "cpu") or text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"there is no {text} here; it may be auto, cuda or cpu")
    return torch.device(text)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise BadInput(message)  # without a page on usage


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line. Raises BadInput on an unknown option or a wrong value."""
    parser = Parser(
        prog="sample.py", description=__doc__.split("\n\n")[0], allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    option = parser.add_argument
    option("checkpoint", metavar="MODEL", help="file that --save_checkpoint has written")
    option("text", metavar="TEXT", nargs="?",
           help="text to continue; without it, what comes from standard input")
    option("--temperature", type=number(float, 0), default=0.8,
           help="below 1 the probable becomes more probable; 0: always the most probable token")
    option("--top_k", type=number(int, 0), default=0,
           help="draw among so many of the most probable tokens, 0: among all")
    option("--num_samples", type=number(int, 1), default=1, help="continuations of the text")
    option("--max_new_tokens", type=number(int, 1), default=256, help="tokens to add at most")
    option("--seed", type=number(int, 0), default=0, help="the same seed gives the same texts")
    option("--device", type=device, default="auto", help="auto, cuda or cpu")
    return parser.parse_intermixed_args(argv)


def show(text: str) -> None:
    """Writes a text at once."""
    print(printable(text), end="", flush=True)


def continue_texts(options: argparse.Namespace) -> None:
    """Continues the text as often as asked, and shows each token as it is drawn. Raises BadInput if
    the model is of no use."""
    from train_gpt import load_checkpoint
    model = load_checkpoint(options.checkpoint, options.device)
    text = options.text
    if text is None:
        text = sys.stdin.buffer.read().decode(errors="replace").removesuffix("\n")
    generator = torch.Generator(options.device).manual_seed(options.seed)
    for sample in range(1, options.num_samples + 1):
        if options.num_samples > 1:
            show(f"---------- sample {sample} of {options.num_samples} ----------\n")
        for piece in continued(model, text, options.max_new_tokens, generator,
                               options.temperature, options.top_k):
            show(piece)
        show("\n")


def end_in_order(program: str, work: Callable[[], None]) -> int:
    """Does the work. Exit status: 0, or with one sentence 2 for bad input, a full disk or too
    little memory."""
    prepare_output()
    try:
        work()
        sys.stdout.flush()
        return 0
    except BadInput as error:
        sentence = str(error)
    except OSError as error:
        discard_output(sys.stdout)
        if isinstance(error, BrokenPipeError):  # as in `| head -1`
            return 0
        sentence = str(error)
    except (RuntimeError, MemoryError) as error:
        if not faults.lacks_memory(error):
            raise
        sentence = "too little memory"
    print(f"{program}: {sentence}", file=sys.stderr)
    return 2


def main(argv: list[str]) -> int:
    return end_in_order("sample.py", lambda: continue_texts(parse(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
