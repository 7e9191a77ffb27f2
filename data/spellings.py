"""Which tokens are one word in several spellings: they differ only in case, accents, or a space
before. N-grams and matches of spellings are found more often than those of tokens, and mean nearly
the same (pull request 375 of the speedrun).

Those of GPT-2's vocabulary lie in a file beside this one, because a machine without a network
cannot load the vocabulary. `python -m data.spellings` makes that file anew.
"""
import unicodedata
from pathlib import Path

import numpy as np

from data import gpt2
from data.shards import SEPARATOR, reads_bytes

FILE = Path(__file__).with_name("gpt2_spellings.npz")


def spelling(token: bytes) -> str:
    """What the spellings of a word have in common; nothing if the token has no letter or sign of
    its own, as a part of a character, or a space."""
    try:
        text = token.decode().removeprefix(" ")
    except UnicodeDecodeError:
        return ""
    decomposed = unicodedata.normalize("NFKD", text)  # an accent is a sign of its own there
    return "".join(sign for sign in decomposed if not unicodedata.combining(sign)).casefold()


def first_spellings(tokens: list[bytes]) -> np.ndarray:
    """For each token the first one that is another spelling of it, or itself, int64."""
    first = {}
    numbers = []
    for number, token in enumerate(tokens):
        text = spelling(token)
        numbers.append(first.setdefault(text, number) if text else number)
    return np.array(numbers)


def of_vocabulary(vocab_size: int) -> np.ndarray:
    """The same for all tokens of a model (vocab_size,): bytes, or those of GPT-2. Tokens beyond
    these, such as the one that begins a document, stand for themselves."""
    numbers = np.arange(vocab_size)
    if reads_bytes(vocab_size):
        known = first_spellings([bytes([value]) for value in range(256)])
    else:
        known = np.load(FILE)["numbers"]
    size = min(len(known), vocab_size)
    numbers[:size] = known[:size]
    return numbers


if __name__ == "__main__":
    vocabulary = gpt2.load()
    tokens = [vocabulary.decode_single_token_bytes(number) for number in range(SEPARATOR)]
    np.savez_compressed(FILE, numbers=first_spellings(tokens).astype(np.uint16))
