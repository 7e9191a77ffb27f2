"""Shards of tokens: their format, how they are read, made from text, and fetched."""
import argparse
import unicodedata


class BadInput(Exception):
    """Something the user can mend. It is shown as one sentence, without a traceback."""


def require(condition, sentence: str) -> None:
    """Raises BadInput with this sentence unless the condition holds."""
    if not condition:
        raise BadInput(sentence)


class Parser(argparse.ArgumentParser):
    """A parser of a command line whose errors are BadInput."""

    def error(self, message: str):
        raise BadInput(f"{message} (--help lists all options)")


def harmless(text: str) -> str:
    """The text without carriage returns, which texts of Windows have, and with question marks in
    place of other control characters, but for ends of lines and tabs. They could change how a
    terminal works, and a model may write them."""
    return "".join("?" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c
                   for c in text if c != "\r")
