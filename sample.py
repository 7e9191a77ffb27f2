"""Continue a text with a trained model.

    python sample.py MODEL "ROMEO:"         # prints the text and what the model adds to it
    echo "ROMEO:" | python sample.py MODEL  # the text comes from standard input

MODEL is a file that `train_gpt.py --save_checkpoint=models/NAME.safetensors` has written. A text
ends where the model ends the document, after --sample_tokens, or where the model's sequences end.
Of a text that leaves too little room in them the model reads the end.

For each new token the whole text is computed anew. To keep what layers know of earlier tokens would
be faster, but would need a second version of each layer, as layers here read more of earlier tokens
than their keys and values.
"""
import argparse
import codecs
import signal
import sys
from collections.abc import Callable, Iterator

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, without a traceback

import torch
import torch.nn.functional as F
from torch import Tensor

from data import Parser, gpt2, harmless, require
from data.gpt2 import bytes_of, token_to_byte
from data.shards import SEPARATOR, reads_bytes
from nanogpt import checkpoints
from nanogpt.masks import BLOCK_SIZE
from records.console import complain, end_in_order


@torch.no_grad()
def logits_after(model, tokens: Tensor) -> Callable[[slice | Tensor], Tensor]:
    """Reads tokens (T,). Returns a function from n places among them to the capped logits (n, V) of
    the tokens that come next. The model takes whole blocks, so they are filled up with tokens that
    nothing before them can see. As in validation, no recipe of low precision is used."""
    script = sys.modules[type(model).__module__]  # train_gpt, or __main__ while that trains
    setting = script.setting_of(model.trained_steps, model.config)  # after all its steps
    filling = -len(tokens) % BLOCK_SIZE
    tokens = F.pad(tokens.to(model.lm_head.device), (0, filling), value=model.bos)
    reading = model.past.read(tokens, training=False)
    x, sources = model.last_stream(reading, setting, training=False)
    return torch.no_grad()(
        lambda places: model.logits(x[places], tuple(source[places] for source in sources)))


def next_logits(model, tokens: list[int]) -> Tensor:
    """The capped logits (V,) of the token after these."""
    return logits_after(model, torch.tensor(tokens))(slice(len(tokens) - 1, len(tokens)))[0]


def draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """A token drawn by its probability, from logits (V,). Temperature 0: the most probable."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities = (logits.double() / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def codec(vocab_size: int) -> tuple[Callable[[str], list[int]], Callable[[int], bytes]]:
    """Two functions, from a text to its tokens and from a token to its bytes: tokens are bytes for
    a small vocabulary, otherwise GPT-2's byte-pair encoding. Tokens that begin a document or pad
    the vocabulary have no text. Raises BadInput if GPT-2's cannot be had."""
    if reads_bytes(vocab_size):
        return (lambda text: bytes_of(text).tolist(),
                lambda token: token_to_byte[token : token + 1].tobytes())
    vocabulary = gpt2.load()
    return (vocabulary.encode_ordinary, lambda token:
            vocabulary.decode_single_token_bytes(token) if token < SEPARATOR else b"")


def continued(model, text: str, count: int, temperature: float = 0.8,
              seed: int = 0) -> Iterator[str]:
    """The text, then a piece for each token that the model adds to it: at most `count`, up to the
    end of the document or of the model's sequences. A piece may be empty, as a character may take
    several tokens. If the text leaves room in a sequence neither for `count` tokens nor for half of
    the sequence, the model reads the end of it. Control characters are replaced (`harmless`)."""
    encode, to_bytes = codec(model.config.vocab_size)
    tokens = [model.bos, *encode(text)]
    most = model.config.seq_len
    room = max(most - count, most // 2 + 1)
    if len(tokens) > room:
        tokens = [model.bos, *tokens[1 - room :]]
    end = min(most, len(tokens) + count)
    generator = torch.Generator(model.lm_head.device).manual_seed(seed)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    yield harmless(text)
    while len(tokens) < end:
        token = draw(next_logits(model, tokens), temperature, generator)
        if token == model.bos:
            break
        tokens.append(token)
        yield harmless(decoder.decode(to_bytes(token)))
    yield decoder.decode(b"", final=True)


DEVICES = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]  # the best one first


def work(argv: list[str]) -> None:
    """Continues a text, and shows each token as it is drawn. Raises BadInput."""
    parser = Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    option = parser.add_argument
    option("model", metavar="MODEL", help="file that --save_checkpoint has written")
    option("text", metavar="TEXT", nargs="?",
           help="text to continue, in quotes; without it, what comes from standard input")
    option("--temperature", type=float, default=0.8,
           help="below 1 the probable becomes more probable; 0: always the most probable token")
    option("--sample_tokens", type=int, default=256, help="tokens to add at most")
    option("--seed", type=int, default=0, help="the same seed gives the same text")
    option("--device", choices=DEVICES, default=DEVICES[0], help="where the model computes")
    options = parser.parse_intermixed_args(argv)
    for name in ("temperature", "sample_tokens"):
        value = getattr(options, name)
        require(value >= 0, f"--{name}={value} must be 0 or more")
    require(0 <= options.seed < 2**32, f"--seed={options.seed} must be from 0 to {2**32 - 1}")
    import train_gpt  # here, as the trainer imports this file
    model = checkpoints.load_model(options.model, options.device, train_gpt)
    text = options.text
    if text is None:
        if sys.stdin.isatty():
            complain("type the text to continue, and then Ctrl-D on a line of its own")
        text = sys.stdin.buffer.read().decode(errors="replace")
        text = text.removesuffix("\n").removesuffix("\r")
    for piece in continued(
            model, text, options.sample_tokens, options.temperature, options.seed):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    sys.exit(end_in_order("sample.py", work, sys.argv[1:]))
