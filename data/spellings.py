"""Which tokens are one word in several spellings: they differ only in case, accents, or a space
before, or in forms that Unicode calls compatible, as a raised 2 and a 2. N-grams and matches of
spellings are found more often than those of tokens, and mean nearly the same (pull request 375 of
the speedrun).

Those of GPT-2's vocabulary lie in a file beside this one, because a machine without a network
cannot load the vocabulary. Once that file is deleted, `python -m data.spellings` makes it anew.
"""
import unicodedata
from pathlib import Path

import numpy as np

from data import gpt2
from data.shards import SEPARATOR, reads_bytes

FILE = Path(__file__).with_name("gpt2_spellings.npz")


def spelling(token: bytes) -> str:
    """What the spellings of a word have in common. A token that is only a space, an accent, or a
    part of a character has none: an empty text."""
    try:
        text = token.decode().removeprefix(" ")
    except UnicodeDecodeError:
        return ""
    decomposed = unicodedata.normalize("NFKD", text)  # an accent is a sign of its own there
    return "".join(sign for sign in decomposed if not unicodedata.combining(sign)).casefold()


def first_spellings(tokens: list[bytes]) -> np.ndarray:
    """For each token the first one that is another spelling of it, or itself, int64."""
    first = {}  # by spelling; a token without one stands alone, by its number
    return np.array([first.setdefault(spelling(token) or number, number)
                     for number, token in enumerate(tokens)])


def of_gpt2() -> np.ndarray:
    """The same for GPT-2's tokens, from the file. Without the file, as in a folder that `records
    code` has written, they are found anew. Raises BadInput if the vocabulary cannot be loaded."""
    if FILE.exists():
        return np.load(FILE)["numbers"]
    vocabulary = gpt2.load()
    return first_spellings(
        [vocabulary.decode_single_token_bytes(number) for number in range(SEPARATOR)])


def of_vocabulary(vocab_size: int) -> np.ndarray:
    """The same for all tokens of a model (vocab_size,), which are bytes or GPT-2's. Tokens beyond
    these, such as the one that begins a document, stand for themselves."""
    numbers = np.arange(vocab_size)
    if reads_bytes(vocab_size):
        known = first_spellings([bytes([byte]) for byte in gpt2.token_to_byte])
    else:
        known = of_gpt2()
    numbers[: len(known)] = known[:vocab_size]
    return numbers


if __name__ == "__main__":
    np.savez_compressed(FILE, numbers=of_gpt2().astype(np.uint16))
