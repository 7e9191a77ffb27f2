"""GPT-2's tokens, by tiktoken, which fetches their vocabulary once."""
import re
import threading

MANY_BLANKS = re.compile(r"\s{1000,}")
MOST_BLANKS = 500_000  # in a row, that tiktoken gets


class VocabularyError(Exception):
    """tiktoken cannot load the vocabulary. The message says why."""


def load(seconds=30):
    """tiktoken's Encoding. Raises VocabularyError.

    tiktoken would wait for a silent network without end. So a thread loads it, and if that takes
    longer than `seconds`, it is left behind.
    """
    result = []
    faults = ["TimeoutError"]

    def work():
        try:
            import tiktoken
            result.append(tiktoken.get_encoding("gpt2"))
        except Exception as error:  # the network, the cache folder, or a missing package
            faults[:] = [type(error).__name__]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not result:
        raise VocabularyError(f"tiktoken cannot load GPT-2's vocabulary ({faults[0]})")
    return result[0]


def encode(text):
    """The tokens of a text, a list of int.

    tiktoken fails where about a million blanks (spaces, ends of lines) follow each other. There the
    text is encoded in pieces.
    """
    import tiktoken
    vocabulary = tiktoken.get_encoding("gpt2")
    tokens = []
    begin = 0
    for blanks in MANY_BLANKS.finditer(text):
        for end in range(blanks.start() + MOST_BLANKS, blanks.end(), MOST_BLANKS):
            tokens += vocabulary.encode_ordinary(text[begin:end])
            begin = end
    return tokens + vocabulary.encode_ordinary(text[begin:])
