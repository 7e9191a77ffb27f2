"""The items of HellaSwag (Zellers et al. 2019): a context and four endings, of which one is right.

A file of items has a JSON object on each line. Three of its keys are read:

    ctx         the context, a string
    endings     four strings
    label       which of them is right, 0 to 3

The validation split has 10,042 items. Its authors keep the file on GitHub; the copy on the Hugging
Face Hub is in Parquet, which needs one more library.
"""
import hashlib
import json
import urllib.request
from pathlib import Path
from typing import NamedTuple

from data import BadInput

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
PATH = Path(__file__).resolve().parent / "hellaswag_val.jsonl"
NUM_ENDINGS = 4


class Item(NamedTuple):
    context: str
    endings: list[str]  # NUM_ENDINGS of them
    label: int  # the right one, from 0


def read_items(path):
    """The items of a file, a list of Item. Raises BadInput if it has none, or if a line is not an
    item, and names the line."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); check the path") from None
    items = [parse_item(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    if not items:
        raise BadInput(f"{path} holds no items; delete it to fetch it anew, or name another file")
    return items


def parse_item(line, place):
    """The Item of one line, bytes. `place` is what the sentence of a BadInput begins with."""
    try:
        entry = json.loads(line)
        item = Item(entry["ctx"], entry["endings"], int(entry["label"]))
        if len(item.endings) == NUM_ENDINGS and item.label in range(NUM_ENDINGS):
            return item
    except (ValueError, TypeError, KeyError):
        pass
    raise BadInput(f"{place} is not a JSON object with ctx, {NUM_ENDINGS} endings and a label "
                   f"from 0 to {NUM_ENDINGS - 1}; take the validation split, as the test split "
                   "has no labels")


def fetch(path=PATH, url=URL, sha256=SHA256):
    """Make sure that the file is there, and return its path. Raises BadInput."""
    if path.exists():
        return path
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            content = answer.read()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise OSError("it arrived damaged, or was changed: its sha256 is not the known one")
        path.write_bytes(content)
    except Exception as error:  # of the network, of HTTP, or of the disk
        raise BadInput(
            f"{path.name} could not be fetched ({error!r}); connect to the network and run it "
            f"again, or fetch {url} elsewhere and give its path") from error
    return path
