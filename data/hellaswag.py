"""The items of HellaSwag (Zellers et al. 2019): a context and four endings, of which one is right.

    python data/hellaswag.py        # fetches the validation split, 12 MB, unless it is there

A file of items has a JSON object on each line. Three of its keys are read:

    ctx         the context, a string
    endings     four strings
    label       which of them is right, 0 to 3

The validation split has 10,042 items. Its authors keep the file on GitHub; the copy on the Hugging
Face Hub is in Parquet, which needs one more library. You can also fetch the file on another machine
and give its path to evaluate.py.
"""
import hashlib
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
PATH = Path(__file__).resolve().parent / "hellaswag_val.jsonl"
NUM_ENDINGS = 4


class ItemsError(ValueError):
    """Items that cannot be had. The message is one sentence: what is wrong, where, the remedy."""


class Item(NamedTuple):
    context: str
    endings: list[str]  # NUM_ENDINGS of them
    label: int  # the right one, from 0


def read_items(path):
    """The items of a file, a list of Item. Raises ItemsError if it has none, or if a line is not an
    item, and names the line."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ItemsError(f"{path} cannot be read ({error.strerror}); check the path") from None
    items = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            items.append(parse_item(line, f"{path}, line {number}"))
    if not items:
        raise ItemsError(f"{path} holds no items; delete it to fetch it anew, or name another file")
    return items


def parse_item(line, place):
    """The Item of one line, bytes. `place` is what the sentence of an ItemsError begins with."""
    try:
        entry = json.loads(line)
        context, endings, label = entry["ctx"], entry["endings"], int(entry["label"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ItemsError(f"{place} is not a JSON object with ctx, endings and label; take the "
                         "validation split, as the test split has no labels") from None
    are_texts = isinstance(endings, list) and all(isinstance(x, str) for x in [context, *endings])
    if not are_texts or len(endings) != NUM_ENDINGS or label not in range(NUM_ENDINGS):
        raise ItemsError(f"{place} has no context, {NUM_ENDINGS} endings and a label from 0 to "
                         f"{NUM_ENDINGS - 1}; is it other data?")
    return Item(context, endings, label)


def fetch(path=PATH, url=URL, sha256=SHA256):
    """Make sure that the file is there, and return its path. What arrives gets its name when its
    sha256 was checked. Raises ItemsError."""
    path = Path(path)
    if path.exists():
        return path
    again = f"connect to the network and run it again, or fetch {url} elsewhere and give its path"
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            content = answer.read()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise OSError("it arrived damaged, or was changed: its sha256 is not the known one")
        part.write_bytes(content)
        os.replace(part, path)
    except Exception as error:  # of the network, of HTTP, or of the disk
        reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(" .")
        raise ItemsError(f"{path.name} could not be fetched ({reason}); {again}") from error
    return path


def main():
    try:
        path = fetch()
        print(f"{path}: {len(read_items(path)):,} items")
    except ItemsError as error:
        print(f"hellaswag.py: {error}.", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
