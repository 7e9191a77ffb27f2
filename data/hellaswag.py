"""The items of HellaSwag (Zellers et al. 2019): a context and four endings, of which one is right.

    python data/hellaswag.py        # fetches the validation split, 12 MB, unless it is there

A file of items has a JSON object on each line. Three of its keys are read:

    ctx         the context, a string
    endings     four strings
    label       which of them is right, 0 to 3

The validation split has 10,042 items. Its authors keep the file on GitHub; the copy on the Hugging
Face Hub is in Parquet, which needs one more library. So the file is fetched from GitHub, and its
sha256 is checked, which is known. A download that broke off goes on where it ended. You can also
fetch the file on another machine and give its path to evaluate.py.

Exit status: 0 the file is there, 1 it could not be fetched, 130 interrupted; a failure is one
sentence on stderr.
"""
import errno
import hashlib
import http.client
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
OF_THE_DISK = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


class ItemsError(ValueError):
    """Items that cannot be had. The message is one sentence: what is wrong, where, the remedy."""


class Item(NamedTuple):
    context: str
    endings: list[str]  # NUM_ENDINGS of them
    label: int  # the right one, from 0


# ---- reading -------------------------------------------------------------------------------------

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
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise ItemsError(f"{place} is not a JSON object; is the file damaged?")
    context = entry.get("ctx")
    endings = entry.get("endings")
    label = entry.get("label")
    if not isinstance(context, str) or not context.strip():
        raise ItemsError(f'{place} has no text as "ctx"; is it other data?')
    texts = isinstance(endings, list) and all(isinstance(ending, str) for ending in endings)
    if not texts or len(endings) != NUM_ENDINGS:
        raise ItemsError(f'{place} has no {NUM_ENDINGS} texts as "endings"; is it other data?')
    if str(label) not in ("0", "1", "2", "3"):  # some copies of the data have it as a string
        raise ItemsError(f'{place} has no number from 0 to {NUM_ENDINGS - 1} as "label"; the test '
                         "split has none, take the validation split")
    return Item(context, endings, int(label))


# ---- fetching ------------------------------------------------------------------------------------

def fetch(path=PATH, url=URL, sha256=SHA256):
    """Make sure that the file is there, and return its path.

    What arrives is kept in PATH.part, and gets its final name after its sha256 was checked. When
    the connection drops, another attempt goes on from there, as long as each one brings something.
    Raises ItemsError if the file cannot be fetched or written, or is not the one with this sha256.
    """
    path = Path(path)
    if path.exists():
        return path
    part = path.with_name(f"{path.name}.part")
    again = f"connect to the network and run it again, or fetch {url} elsewhere and give its path"
    while True:
        before = size_of(part)
        try:
            download(url, part)
            break
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "errno", None) in OF_THE_DISK:
                raise ItemsError(f"{part} cannot be written ({error.strerror}); make room there, "
                                 "or give yourself the right to write") from error
            if before and getattr(error, "code", None) == 416:
                part.unlink()  # it reaches beyond the end of the file, so it is of another one
            elif size_of(part) <= before:  # less, if the server begins anew and breaks off sooner
                reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(" .")
                raise ItemsError(f"{path.name} could not be fetched ({reason}); {again}") from error
    if hashlib.sha256(part.read_bytes()).hexdigest() != sha256:
        part.unlink()  # or the next attempt would go on behind it
        raise ItemsError(f"{path.name} arrived damaged, or was changed (its sha256 is not the one "
                         f"that is known); {again}")
    os.replace(part, path)
    return path


def size_of(path):
    """The size of a file in bytes; 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def download(url, part, seconds=20):
    """Append to the file `part` what it lacks of the URL's content.

    Raises OSError or http.client.HTTPException if the connection drops, if nothing comes for so
    many seconds, or if the server refuses.
    """
    begin = size_of(part)
    request = urllib.request.Request(url)
    if begin:
        request.add_header("Range", f"bytes={begin}-")
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        goes_on = answer.status == 206  # otherwise the server sends all of it
        expected = int(answer.headers.get("Content-Length", 0))
        with open(part, "ab" if goes_on else "wb") as file:
            received = 0
            while piece := answer.read(1 << 16):
                file.write(piece)
                received += len(piece)
    if received < expected:
        raise ConnectionError(f"{received:,} of {expected:,} bytes arrived")


def main():
    try:
        path = fetch()
        print(f"{path}: {len(read_items(path)):,} items")
    except ItemsError as error:
        print(f"hellaswag.py: {error}.", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"hellaswag.py: {error.filename}: {error.strerror}; make room there, or give "
              "yourself the right to write.", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("hellaswag.py: interrupted; run it again to go on.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
