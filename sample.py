"""Continue a text with a trained model.

    python sample.py model.pt "ROMEO:"         # prints the text and what the model adds to it
    python sample.py model.pt                  # asks for texts until Ctrl-D or Ctrl-C
    echo "ROMEO:" | python sample.py model.pt  # the text comes from standard input

model.pt is what `train_gpt.py --save_checkpoint=model.pt` has written. A text ends where the model
ends the document, after --max_new_tokens, or where the model's sequences end.

`Memory` keeps what the layers need of earlier tokens, so that a new token costs the work of one.
`generate` draws tokens with it. Shapes in comments are those of train_gpt.py, and n is the number
of tokens that are appended at a time.
"""
import argparse
import codecs
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from data import gpt2, packages

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # importing torch takes seconds: no traceback then
    packages.require("numpy", "torch")

import torch
import torch.nn.functional as F
from torch import Tensor

from data.prepare import byte_to_token, token_to_byte
from data.shards import SEPARATOR, reads_bytes
from data.texts import harmless
from nanogpt import fitting, limits, past
from nanogpt.compiling import CudaGraphs
from nanogpt.masks import BLOCK_SIZE
from nanogpt.ranks import BadInput, is_rank_0, require
from records.console import discard_output, prepare_output, sentence_of

# --------------------------------------------------------------------------------------------------
# 1. What is kept of the tokens so far


def script_of(model):
    """The module that the model comes from: train_gpt, which is called __main__ while it trains."""
    return sys.modules[type(model).__module__]


def last_setting(model):
    """How far the model sees, and how it turns positions, after the steps that it was trained."""
    return script_of(model).setting_of(model.trained_steps, model.config)


def multiplied(model) -> tuple[list, list]:
    """The weights of each layer, multiplied by their learned factors, and products that do not
    multiply by these again. In training train_gpt.Products does it at each product; a sample needs
    it only once."""
    script = script_of(model)

    class Multiplied(script.Products):
        def linear(self, x, w, factor=None):
            return F.linear(x, w)

        def qkv(self, x, weights, factor):
            return F.linear(x, weights.flatten(0, 1)).chunk(3, 1)

    all_weights = []
    for weights in model.layer_weights():
        factors = script.factors_of(weights)
        q, k, v, o = weights.qkvo
        qkvo = torch.stack((q, k, factors["v"] * v, factors["o"] * o))
        all_weights.append(weights._replace(down=factors["down"] * weights.down, qkvo=qkvo))
    products = Multiplied()
    of_layer = script.LayerProducts(products, products, products, products)
    return all_weights, [of_layer] * len(all_weights)


class Places(NamedTuple):
    """Where the keys of new tokens go, and which places their queries see."""
    index: Tensor  # (n,)
    bias: Tensor  # (n, places): 0 where a query sees a place, else -inf


class EarlierTokens:
    """What one layer keeps of the tokens so far. The model calls `previous` and `attend`, with n
    new tokens.

    Keys and values lie in a ring of `num_places` places, as many as the window has positions:
    position p is at place p % num_places. A query sees whole blocks, the last of them its own. So
    what a new position overwrites is too far back for every query that is still to come."""

    def __init__(self, c, num_places: int, dtype: torch.dtype, like: Tensor):
        H, d, D = c.num_heads, c.head_dim, c.model_dim
        self.keys = like.new_zeros(H, num_places, d, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        # Of the last token, before any of it is replaced by the token before: the norms that
        # attention and the MLP read, and the keys.
        self.last = {
            "attention": like.new_zeros(1, D),
            "mlp": like.new_zeros(1, D),
            "keys": like.new_zeros(1, H, d),
        }
        self.places = None  # those of the new tokens, a Places

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (n, ...) of new tokens -> that of the token before each of them."""
        before = torch.cat((self.last[name], x[:-1]))
        self.last[name].copy_(x[-1:])
        return before

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of new tokens, over them and those before. q, k, v (n, H, d) -> the same
        shape."""
        dtype = self.keys.dtype
        self.keys.index_copy_(1, self.places.index, k.transpose(0, 1).to(dtype))
        self.values.index_copy_(1, self.places.index, v.transpose(0, 1).to(dtype))
        q_wide = q.transpose(0, 1).to(dtype)  # (H, n, d)
        y = F.scaled_dot_product_attention(
            q_wide[None], self.keys[None], self.values[None], self.places.bias, scale=1.0)
        return y[0].transpose(0, 1).contiguous().to(q.dtype)


class Memory:
    """A model and what it keeps of one text. Tokens are appended; the logits of the next one come
    back. All that `compute` changes lies in tensors that are written in place, so that on a GPU the
    work of one token can be a CUDA graph (nanogpt/compiling.py)."""

    @torch.no_grad()
    def __init__(self, model, setting, cuda_graph: bool = True):
        c = model.config
        device = model.lm_head.device
        self.model = model
        self.script = script_of(model)
        self.windows = setting.windows
        self.limit = c.seq_len
        self.weights, self.products = multiplied(model)
        rotary = model.rotary(setting, c.seq_len, training=False)
        self.cos, self.sin, self.score_scale = rotary  # (limit, 1, d) both, and ()

        # PyTorch's attention on a CPU computes in float32, so keys and values are kept so.
        # (Training multiplies bf16 in bf16, which is faster there: masks.cpu_attention.)
        self.dtype = model.lm_head.dtype
        if device.type == "cpu":
            self.dtype = torch.promote_types(self.dtype, torch.float32)
        self.layers = []
        for layer in range(c.num_layers):
            num_places = self.count_places(self.window_of(layer))
            self.layers.append(EarlierTokens(c, num_places, self.dtype, like=model.lm_head))

        self.position = torch.zeros((), dtype=torch.int64, device=device)  # of the next token
        self.document = torch.zeros_like(self.position)  # where the last document begins
        self.last_tokens = torch.zeros(
            c.longest_match - 1, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(self.limit, dtype=torch.int64, device=device)  # all of them
        self.clear()
        self.graphs = CudaGraphs([]) if cuda_graph and device.type == "cuda" else None
        self.warm = False

    def window_of(self, layer: int) -> str:
        return "long" if self.script.sees_far(layer, self.model.config) else "short"

    def count_places(self, window: str) -> int:
        """The positions that a window reaches, or those of a whole sequence if they are fewer."""
        return min(self.windows[window] * BLOCK_SIZE, self.limit)

    def clear(self) -> None:
        """Forgets all tokens. What the layers keep may stay: no query sees a place before it is
        written, and the first token of all begins a document, so it takes nothing from another."""
        self.length = 0  # tokens so far
        self.position.zero_()
        self.document.zero_()
        self.last_tokens.zero_()

    def append(self, tokens: list[int]) -> Tensor:
        """Appends at least one token -> the capped logits (V,) of the next one. Raises ValueError
        if the model's sequences end before."""
        if not 0 < len(tokens) <= self.limit - self.length:
            raise ValueError(f"{len(tokens)} tokens after {self.length}, of at most {self.limit}")
        with torch.inference_mode():  # a tenth faster than no_grad
            tokens = torch.tensor(tokens, device=self.position.device)
            while len(tokens):
                count = BLOCK_SIZE - self.length % BLOCK_SIZE
                logits = self.logits_after(tokens[:count])
                self.length += len(tokens[:count])
                tokens = tokens[count:]
        return logits.clone()  # a usual tensor, which no replay of a graph overwrites

    def logits_after(self, tokens: Tensor) -> Tensor:
        """`compute`, as a CUDA graph where that is possible and there is a single token."""
        if self.graphs is None or len(tokens) > 1:
            return self.compute(tokens)
        if not self.warm:  # what is allocated at first use cannot be recorded
            self.warm = True
            return self.compute(tokens)
        try:
            return self.graphs("one token", self.compute, (tokens,))
        except RuntimeError as error:
            print(f"sample.py: no CUDA graph, which is slower ({error})", file=sys.stderr)
            self.graphs = None
            return self.compute(tokens)

    def compute(self, tokens: Tensor) -> Tensor:
        """tokens (n,) of one block -> the capped logits (V,) of the token after the last one."""
        x, sources = self.last_stream(tokens)
        return self.model.logits(x[-1:], tuple(source[-1:] for source in sources))[0]

    def last_stream(self, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """tokens (n,) of one block, after those before -> what GPT.last_stream returns."""
        model = self.model
        script = self.script

        # 1. Inputs look at K tokens before, so the last ones stand in front, and their rows are
        # dropped afterwards.
        K = len(self.last_tokens)
        tokens = torch.cat((self.last_tokens, tokens))  # (K + n,)
        position = self.position + torch.arange(-K, len(tokens) - K, device=tokens.device)
        begins = (tokens == model.bos) | (position == 0)
        reading = past.Reading(tokens, *model.past.look_back(tokens, begins))
        if model.config.induced:
            token, length = self.induced_tokens(tokens, position)
            reading = reading._replace(induced_token=token, induced_length=length)
        looked_up = model.look_up(reading)
        first_x, injects, guesses = script.embed_inputs(
            looked_up["lm_head"], reading, looked_up.get("ngrams"), model.weight("lm_head"),
            model.optional("length_vectors"), model.signs, model.optional("scalars"),
            len(self.layers))
        first_x = x = first_x[K:]
        injects = [None if inject is None else inject[K:] for inject in injects]
        value_embeds = [None if of_layer is None else of_layer[K:]
                        for of_layer in model.value_embeds_of(looked_up)]
        position = position[K:]  # (n,)
        begins = begins[K:]

        # 2. The document of each new token, as the position where it begins. (n,)
        document = torch.where(begins, position, self.document).cummax(0).values

        # 3. The layers.
        rotary = self.cos[position], self.sin[position], self.score_scale
        places = {name: self.find_places(position, document, name) for name in self.windows}
        outputs = []
        for i, earlier in enumerate(self.layers):
            earlier.places = places[self.window_of(i)]
            context = script.LayerContext(
                model.config.mix_previous, model.config.num_heads, *rotary, None, injects[i],
                value_embeds[i], begins, earlier)
            x = script.block(x, self.weights[i], context, self.products[i])
            outputs.append(x)

        # 4. What the next call must know.
        self.last_tokens.copy_(tokens[-K:])
        self.document.copy_(document[-1])
        self.position += len(position)
        guesses = [guess[K:] for guess in guesses]
        return x, script.late_sources(first_x, outputs, guesses, value_embeds[0])

    def induced_tokens(self, tokens: Tensor, position: Tensor) -> Tensor:
        """tokens and their positions (K + n,), of which the first K are known already -> the
        induced tokens and the lengths of their matches (2, K + n), 0 for the first K."""
        model = self.model
        K = len(self.last_tokens)
        self.tokens.index_copy_(0, position[K:], tokens[K:])
        # Places behind the new tokens may still hold an earlier text. The search only looks back,
        # so they change nothing for the new tokens.
        begins = self.tokens == model.bos
        begins[:1] = True  # not begins[0], which a CUDA graph cannot record
        hashes = past.ngram_hashes(self.tokens, begins, model.config.longest_ngram)
        found = torch.stack(past.induced_tokens(self.tokens, begins, hashes))  # (2, limit)
        return F.pad(found[:, position[K:]], (K, 0))

    def find_places(self, position: Tensor, document: Tensor, window: str) -> Places:
        """position, document (n,) of new tokens, all of one block -> the places of their keys, in
        layers with this window."""
        count = self.count_places(window)
        # Place p holds the newest position whose remainder by `count` is p.
        newest = position[-1]
        held = newest - (newest - torch.arange(count, device=newest.device)) % count  # (places,)
        first_in_window = (position // BLOCK_SIZE - (self.windows[window] - 1)) * BLOCK_SIZE
        first = torch.maximum(first_in_window, document)
        seen = (held <= position[:, None]) & (held >= first[:, None])
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return Places(position % count, bias.masked_fill(~seen, -math.inf))


# --------------------------------------------------------------------------------------------------
# 2. Tokens, one after the other


def draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token drawn by its probability, from logits (V,): among the top_k most probable ones, or
    among all for 0. Temperature 0 takes the most probable one."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.double()  # so that no temperature is too small to divide by
    if 0 < top_k < len(logits):
        logits, tokens = logits.topk(top_k)
    else:
        tokens = torch.arange(len(logits), device=logits.device)
    probabilities = ((logits - logits.max()) / temperature).softmax(-1)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def generate(memory: Memory, tokens: list[int], count: int, temperature: float, top_k: int,
             generator: torch.Generator) -> Iterator[int]:
    """At most `count` tokens that continue `tokens`, one by one as they are drawn, up to the end of
    the document, whose token is among them, or of the model's sequences. Raises BadInput if the
    logits are not finite."""
    memory.clear()
    logits = memory.append(tokens)
    require(logits.isfinite().all(), "the logits are not finite: training has diverged")
    count = min(count, memory.limit - len(tokens))
    for i in range(count):
        token = draw(logits, temperature, top_k, generator)
        yield token
        if token == memory.model.bos or i == count - 1:
            break
        logits = memory.append([token])


# --------------------------------------------------------------------------------------------------
# 3. Text


def codec(vocab_size: int) -> tuple[Callable[[str], list[int]], Callable[[int], bytes]]:
    """Two functions, from a text to its tokens and from a token to its bytes: tokens are bytes for
    a small vocabulary, otherwise GPT-2's byte-pair encoding. Tokens that begin a document or pad
    the vocabulary have no text."""
    if reads_bytes(vocab_size):
        def encode(text: str) -> list[int]:
            tokens = byte_to_token[list(text.encode(errors="replace"))].tolist()
            require(max(tokens, default=0) < vocab_size - 1,
                    f"the text has a byte for which --vocab_size={vocab_size} has no token")
            return tokens

        def to_bytes(token: int) -> bytes:
            return token_to_byte[token : token + 1].tobytes()

        return encode, to_bytes

    try:
        vocabulary = gpt2.load()
    except gpt2.VocabularyError as error:
        raise BadInput(f"{error}; run once with a network, or set TIKTOKEN_CACHE_DIR to a folder "
                       "that has it") from None

    def gpt2_bytes(token: int) -> bytes:
        return vocabulary.decode_single_token_bytes(token) if token < SEPARATOR else b""

    return gpt2.encode, gpt2_bytes


def prompt_tokens(model, encode: Callable[[str], list[int]], text: str) -> list[int]:
    """The tokens of a text that begins a document. Raises BadInput if none could follow."""
    tokens = [model.bos, *encode(text)]
    check_length(len(tokens) - 1, model.config.seq_len)
    return tokens


def check_length(count: int, longest: int) -> None:
    require(count + 1 < longest,
            f"the text to continue has {count} tokens, and may have at most {longest - 2}")


def check_text(config, text: str) -> None:
    """Raises BadInput if a model of this configuration will not be able to continue the text."""
    try:
        text.encode()
    except UnicodeEncodeError:  # Python has put stand-ins for the bytes that are no character
        raise BadInput("the text to continue is not valid UTF-8") from None
    encode, _ = codec(config.vocab_size)
    check_length(len(encode(text)), config.seq_len)


def check(config) -> list[str]:
    """Whether a run can end with a sample, before it begins. A run that is fitted to a text does
    without the sample that nobody has asked for, and returns a note. Raises BadInput otherwise."""
    if not is_rank_0():
        return []
    try:
        check_text(config, config.sample)
    except BadInput as error:
        if not config.fit or config.sample != fitting.OVER_PRESET["sample"]:
            raise
        config.sample = ""
        return [f"there will be no sample: {error}"]
    return []


def after_training(model, text: str, count: int) -> str:
    """The text, continued by a model that has just been trained, as it can be printed."""
    if model.lm_head.device.type == "cpu":
        prepare_for_cpu(model)
    return printable(continue_text(model, last_setting(model), text, count))


def continue_text(model, setting, text: str, count: int, temperature: float = 0.8, top_k: int = 0,
                  seed: int = 0) -> str:
    """`text` and what `count` more tokens add to it, or fewer if the document ends before. Raises
    BadInput if the text is too long for the model."""
    encode, to_bytes = codec(model.config.vocab_size)
    tokens = prompt_tokens(model, encode, text)
    generator = torch.Generator(model.lm_head.device).manual_seed(seed)
    new = generate(Memory(model, setting), tokens, count, temperature, top_k, generator)
    return text + b"".join(map(to_bytes, new)).decode(errors="replace")


# --------------------------------------------------------------------------------------------------
# 4. The program


SMALL = 10_000_000  # weights that are active in every token


def at_least(low: int) -> Callable[[str], int]:
    """For argparse, which puts the name of the inner function into its sentence."""
    def whole_number(text: str) -> int:
        number = int(text)
        if not low <= number < 2**63:
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and 2^63")
        return number

    return whole_number


def temperature(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number from 0 on")
    return number


def device(text: str) -> torch.device:
    cuda = torch.cuda.is_available()
    if text not in ("auto", "cuda", "cpu"):
        raise argparse.ArgumentTypeError(f"{text} is none of auto, cuda, cpu")
    if text == "cuda" and not cuda:
        raise argparse.ArgumentTypeError("torch sees no GPU here")
    return torch.device("cuda" if cuda and text != "cpu" else "cpu")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line. Raises BadInput on an unknown option or a wrong value."""
    parser = argparse.ArgumentParser(
        prog="sample.py", description=__doc__.split("\n\n")[0], allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = partial(require, False)  # argparse's sentence, without its page on usage
    option = parser.add_argument
    option("checkpoint", metavar="CHECKPOINT", help="file that --save_checkpoint has written")
    option("text", metavar="TEXT", nargs="?", default=argparse.SUPPRESS,
           help="text to continue; without it the program asks for texts, or reads one from a pipe")
    option("--temperature", type=temperature, default=0.8,
           help="below 1 the probable becomes more probable; 0: always the most probable token")
    option("--top_k", type=at_least(0), default=0,
           help="draw among so many of the most probable tokens, 0: among all")
    option("--num_samples", type=at_least(1), default=1, help="continuations of each text")
    option("--max_new_tokens", type=at_least(1), default=256, help="tokens to add at most")
    option("--seed", type=at_least(0), default=0, help="the same seed gives the same texts")
    option("--device", type=device, default="auto", help="auto, cuda or cpu")
    return parser.parse_intermixed_args(argv)  # options may stand before TEXT, too


def printable(text: str) -> str:
    """On a terminal control characters become question marks: they could change how it works."""
    if sys.stdout is None or not sys.stdout.isatty():  # None: closed, as by >&-
        return text
    return harmless(text)


def show(text: str) -> None:
    """Writes a text at once. What the console cannot show becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(printable(text).encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def texts_to_continue(options: argparse.Namespace) -> Iterator[str]:
    """The text of the command line, or that of standard input, or what the user answers."""
    if hasattr(options, "text"):
        yield options.text
        return
    require(sys.stdin is not None, "there is no text to continue")
    if not sys.stdin.isatty():
        yield sys.stdin.buffer.read().decode(errors="replace").removesuffix("\n")
        return
    sys.stdin.reconfigure(errors="replace")
    while True:
        print("text to continue: ", end="", file=sys.stderr, flush=True)
        # Once a GPU is in use, Ctrl-C does not end input(), which goes on reading after a signal.
        while os.name != "nt" and not select.select([sys.stdin], [], [], 0.2)[0]:
            pass  # (Windows has no `select` for a console)
        try:
            text = input()
        except EOFError:  # Ctrl-D
            print(file=sys.stderr)
            return
        yield text


def prepare_for_cpu(model) -> None:
    """A small model's products of a single row take a third of the time in float32, and threads
    would only wait for each other."""
    active, _ = script_of(model).num_weights(model.config)
    if active < SMALL:
        torch.set_num_threads(1)
        if model.lm_head.dtype != torch.float64:
            model.float()


class Speaker:
    """Continues texts with the model of a checkpoint, and shows them as they are made."""

    def __init__(self, options: argparse.Namespace):
        from train_gpt import load_checkpoint
        path = options.checkpoint
        self.options = options
        self.model = load_checkpoint(path, options.device)
        self.encode, self.to_bytes = codec(self.model.config.vocab_size)
        if options.device.type == "cpu":
            prepare_for_cpu(self.model)
        self.memory = Memory(self.model, last_setting(self.model))
        self.generator = torch.Generator(options.device).manual_seed(options.seed)

    def answer(self, text: str) -> None:
        """Raises BadInput if the text is too long."""
        options = self.options
        tokens = prompt_tokens(self.model, self.encode, text)
        for number in range(1, options.num_samples + 1):
            if options.num_samples > 1:
                show(f"---------- sample {number} of {options.num_samples} ----------\n")
            show(text)
            new = generate(
                self.memory, tokens, options.max_new_tokens, options.temperature, options.top_k,
                self.generator)
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            for token in new:
                show(decoder.decode(self.to_bytes(token)))
            show(decoder.decode(b"", final=True) + "\n")
            no_room = self.memory.limit < len(tokens) + options.max_new_tokens
            if no_room and token != self.model.bos:
                print(f"sample.py: the text ends here, because the model's sequences have "
                      f"{self.memory.limit} tokens", file=sys.stderr)


def main(argv: list[str]) -> int:
    """Exit status: 0, 2 for bad input, or as usual 130 for Ctrl-C while a single text is made."""
    prepare_output()
    asks = False
    try:
        options = parse(argv)
        asks = not hasattr(options, "text") and sys.stdin is not None and sys.stdin.isatty()
        speaker = Speaker(options)
        for text in texts_to_continue(options):
            try:
                speaker.answer(text)
            except BadInput as error:
                if not asks:
                    raise
                print(f"sample.py: {error}", file=sys.stderr)  # and asks again
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 0 if asks else 130
    except BrokenPipeError:  # as in `| head -1`
        discard_output(sys.stdout)
    except OSError as error:  # as on a full disk
        discard_output(sys.stdout)
        print(f"sample.py: {sentence_of(error)}", file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as error:
        lack = limits.lack_of_memory(error)
        if not lack:
            raise
        print(f"sample.py: {lack}", file=sys.stderr)
        return 2
    except BadInput as error:
        print(f"sample.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # main ends in order
    sys.exit(main(sys.argv[1:]))
