"""GPT-2's tokens. Words are tokens by tiktoken, which fetches their vocabulary once; the tokens of
single bytes are known here."""
from multiprocessing.pool import ThreadPool

import numpy as np

from data import BadInput

# GPT-2 has one token for each of the 256 bytes, numbered in this order: first the bytes that are
# printing characters in Latin-1, then all others.
_printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
_others = sorted(set(range(256)) - set(_printing))
token_to_byte = np.array(_printing + _others, dtype=np.uint8)  # (256,), indexed by token
byte_to_token = np.argsort(token_to_byte).astype(np.uint16)  # (256,), indexed by byte


def load():
    """tiktoken's Encoding. Raises BadInput.

    tiktoken would wait for a silent network without end. So a thread loads it, which is left behind
    after 30 seconds.
    """
    try:
        import tiktoken
        return ThreadPool(1).apply_async(tiktoken.get_encoding, ["gpt2"]).get(timeout=30)
    except Exception as error:  # the network, the cache folder, or a missing package
        raise BadInput(f"tiktoken cannot load GPT-2's vocabulary ({type(error).__name__}); run "
                       "once with a network, or set TIKTOKEN_CACHE_DIR to a folder that has it; "
                       "data/prepare.py --bytes needs none") from error


def bytes_of(text: str) -> np.ndarray:
    """A token for each byte of a text: (n,) uint16."""
    return byte_to_token[np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)]
