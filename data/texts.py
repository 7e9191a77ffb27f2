"""Reads texts and JSON lines, and cuts them into documents, for prepare.py and evaluate.py."""
import argparse
import codecs
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from data import BadInput, require
from records.console import complain

JSON_LINES = {".jsonl", ".ndjson", ".jsonlines", ".json"}
MARKER = "<|endoftext|>"  # what most often stands between documents

EXPORT = 'export its text column as JSON lines, a line like {"text": "..."} for each document'
SAVE = "save its text as a .txt file first, in UTF-8"
TABLES = {".csv", ".tsv"}
FORMATS = {  # how a file begins, and what is said of it
    b"PAR1": f"Parquet, not text; {EXPORT}",
    b"PK\3\4": f"a zip archive, as .docx and .epub are, too, not text; unpack it, or {SAVE}",
    b"\x1f\x8b": "compressed (gzip), not text; unpack it first",
    b"%PDF-": f"a PDF, not text; {SAVE}",
    b"{\\rtf": f"RTF, not plain text; {SAVE}",
}
ZEROS = ("not text in UTF-8, as it holds zero bytes; unpack it if it is compressed, convert it if "
         "it is in UTF-16 (iconv -f utf-16le -t utf-8 OLD > NEW), and if it holds tokens, give its "
         "folder to train_gpt.py --data_dir")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how files are read."""
    parser.add_argument(
        "--key", default="text", help="where a JSON object keeps its text; default %(default)s")
    cut = parser.add_mutually_exclusive_group()
    cut.add_argument(
        "--split", metavar="MARKER", help="cut texts where this stands, such as '<|endoftext|>'")
    cut.add_argument(
        "--split_blank", type=int, choices=range(1, 10), metavar="N",
        help="cut texts at N or more blank lines, 1 to 9")


def find_files(item: str) -> list[Path]:
    """The file that `item` names, or those of a folder and its subfolders that are not hidden,
    sorted. Links to folders are not followed, as they may form a circle. Raises BadInput if there
    are none, and for a folder of shards."""
    require(os.path.exists(item), f"{item}: no such file or folder; check the path")
    if not os.path.isdir(item):
        return [Path(item)]
    require(os.access(item, os.R_OK | os.X_OK), f"{item}: cannot be read; check its permissions")
    require(not any(Path(item).glob("*_train_*.bin")),
            f"{item}: a folder of shards; train on them with --data_dir={item}")
    found = [path for path in sorted(Path(item).rglob("*")) if path.is_file()
             and not any(part.startswith(".") for part in path.relative_to(item).parts)]
    require(found, f"{item}: no files in this folder (hidden ones do not count); name another, or "
            "a file")
    return found


def read_all(inputs: list[str], options: argparse.Namespace) -> Iterator[str]:
    """Yields the documents of files and folders, read as `options` say (key, split, split_blank).
    Raises BadInput."""
    saw_marker = False
    for item in inputs:
        files = find_files(item)
        if os.path.isdir(item):
            documents = read_folder(item, files, options)
        else:
            documents = read_documents(files[0], options)
        for text in documents:
            if MARKER in text and not saw_marker:
                saw_marker = True
                complain(f"{MARKER} is read as text; if it ends documents, give --split='{MARKER}'")
            yield text


def read_folder(folder: str, files: list[Path], options: argparse.Namespace) -> Iterator[str]:
    """Yields the documents of the files of a folder. Those that are no text are left out, but
    a .jsonl that cannot be read raises BadInput."""
    left_out = []
    for path in files:
        try:
            documents = list(read_documents(path, options))
        except BadInput as error:
            # Its good lines would be lost, too. But many a .json is a file of settings.
            if path.suffix.lower() in JSON_LINES - {".json"}:
                raise
            left_out.append(error)
        else:
            yield from documents
    if len(left_out) == len(files):
        raise BadInput(f"{folder}: no text in this folder, first {left_out[0]}")
    if left_out:
        complain(f"left out {len(left_out):,} file(s) of {folder}, first {left_out[0]}")


def read_documents(path: Path, options: argparse.Namespace) -> Iterator[str]:
    """Yields the documents of one file that are not blank, as strings. Raises BadInput."""
    suffix = path.suffix.lower()
    require(suffix not in TABLES, f"{path}: a table, not text; {EXPORT}")
    try:
        with open(path, "rb", buffering=1 << 20) as file:
            head = file.peek()
            for start, sentence in FORMATS.items():
                require(not head.startswith(start), f"{path}: {sentence}")
            encoding = "utf-8-sig"  # which is UTF-8 with a mark or without one
            if head.startswith(codecs.BOM_UTF32_LE):  # it begins with that of UTF-16
                encoding = "utf-32"
            elif head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                encoding = "utf-16"
            elif b"\0" in head:
                raise BadInput(f"{path}: {ZEROS}")
            lines = io.TextIOWrapper(file, encoding, newline="\n")  # "\r" stays
            if suffix in JSON_LINES or begins_with_object(head):
                documents = json_lines(lines, options.key, path)
            else:
                documents = [lines.read()]
            for text in documents:
                yield from filter(str.strip, split(text, options))
    except UnicodeError as error:
        raise BadInput(f"{path}: not text in UTF-8 ({error.reason}); convert it from the encoding "
                       "that it was saved in, such as cp1252 of Windows in Western Europe: "
                       "iconv -f ENCODING -t utf-8 OLD > NEW") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); check the file and its "
                       "permissions") from error


def begins_with_object(head: bytes) -> bool:
    """Whether the first line of these bytes is a JSON object, whatever the file is called."""
    try:
        return isinstance(json.loads(head.partition(b"\n")[0]), dict)
    except ValueError:
        return False


def json_lines(lines: Iterable[str], key: str, path: Path) -> Iterator[str]:
    """Yields the text of every line of JSON that is not blank. Raises BadInput."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise BadInput(f'{place}: no JSON object like {{"{key}": "..."}}; repair it, or write '
                           "each object on a line: jq -c . OLD > NEW.jsonl (jq -c '.[]' for an "
                           "array)")
        if not isinstance(entry.get(key), str):
            found = f"{json.dumps(entry[key]):.40}, not a text" if key in entry else "missing"
            keys = f"{', '.join(map(repr, entry)):.200}"
            raise BadInput(f'{place}: "{key}" is {found}; the keys are {keys}. Name that of the '
                           "text with --key, or leave such lines out")
        yield entry[key]


def split(text: str, options: argparse.Namespace) -> list[str]:
    """The parts of a text between `split_blank` or more blank lines; or those between markers,
    without the ends of lines beside these; or the whole text, if neither is asked for."""
    if options.split_blank:
        return re.split(rf"(?m)^(?:[^\S\n]*\n){{{options.split_blank},}}", text)
    if options.split:
        return [part.strip("\r\n") for part in text.split(options.split)]
    return [text]
