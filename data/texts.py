"""From files to documents: finds the files of texts, reads them, and cuts them into documents.

What prepare.py and evaluate.py read goes through here. What a file is, is seen in its first bytes
and its first line, not in its name. This file knows nothing of tokens.
"""
import codecs
import hashlib
import json
import os
import re
import shlex
import unicodedata
from collections import Counter
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from data import BadInput

HEAD = 1 << 20  # bytes of a file that are looked at before it is read
SUFFIXES = {  # of the files that are taken from a folder
    ".txt", ".text", ".md", ".rst", ".org", ".tex", ".html", ".css",
    ".jsonl", ".ndjson", ".jsonlines", ".json",
    ".c", ".cc", ".cpp", ".cs", ".cu", ".go", ".h", ".hpp", ".hs", ".java", ".jl", ".js", ".jsx",
    ".kt", ".lua", ".php", ".pl", ".py", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift",
    ".ts", ".tsx",
}
JSON_LINES = {".jsonl", ".ndjson", ".jsonlines"}
MARKERS = re.compile(r"<\|end_?of_?text\|>|<\|eot_id\|>|<\|im_end\|>|</s>|<eos>|\[EOS\]")
JSON_START = re.compile(r'\s*(\[\s*[\[{"]|\{\s*")')

EXPORT = 'export its text column as JSON lines, a line like {"text": "..."} for each document'
UNPACK = "unpack it first, and name what was in it"
SAVE = "save its text as a .txt file first, in UTF-8"
TABLES = (".csv", ".tsv")  # what such a file is cannot be seen in its first line
FORMATS = [  # how a file begins, what it then is, and what to do instead
    (b"PAR1", "Parquet", EXPORT),
    (b"ARROW1", "Arrow", EXPORT),
    (b"\xff\xff\xff\xff", "Arrow", EXPORT),
    (b"SQLite format 3", "an SQLite database", EXPORT),
    (b"\x89HDF", "HDF5", EXPORT),
    (b"\x93NUMPY", "an array of numpy (.npy)", "name the text that it was made of"),
    (b"\x88\xd8\x34\x01", "a shard of tokens", "train on its folder with --data_dir=FOLDER"),
    (b"PK\3\4", "a zip archive, as .docx, .xlsx, .epub, .odt and .npz are, too",
     f"unpack it, or {SAVE}"),
    (b"\x1f\x8b", "compressed (gzip)", UNPACK),
    (b"BZh", "compressed (bzip2)", UNPACK),
    (b"\xfd7zXZ", "compressed (xz)", UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed (zstd)", UNPACK),
    (b"%PDF-", "a PDF", SAVE),
    (b"{\\rtf", "RTF", SAVE),
]
MARKS = {  # UTF-32's come before UTF-16's, with which they begin
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}


@contextmanager
def errors_of(path):
    """Turn what goes wrong when `path` is read into a BadInput."""
    try:
        yield
    except UnicodeError as error:
        raise BadInput(f"{path}: not text in UTF-8 ({error.reason}); convert it from the "
                           "encoding that it was saved in, such as cp1252 of Windows in Western "
                           "Europe: iconv -f ENCODING -t utf-8 OLD > NEW") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); check the file and its "
                           "permissions") from error


# ---- which files ---------------------------------------------------------------------------------

def find_sources(inputs, key="text"):
    """The files that `inputs` name or have in their folders, and sentences about those in folders
    that are left out. Raises BadInput."""
    found = []
    notes = []
    for item in inputs:
        if os.path.isdir(item):
            found += search(Path(item), key, notes)
        elif os.path.isfile(item) and Path(item).suffix.lower() in TABLES:
            raise BadInput(f"{item}: a table, not text; {EXPORT}")
        elif os.path.isfile(item):
            found.append(Path(item))
        else:
            raise BadInput(f"{item}: no such file or folder; check the path, and save what "
                               "comes from the web or a pipe to a file first")
    return found, notes


def search(top, key, notes):
    """The files of texts under a folder that are not hidden, sorted. What is left out is said in
    `notes`. Raises BadInput if there are none."""
    found = []
    others = []
    for path in sorted(top.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(top).parts)
        if path.is_file() and not is_hidden:
            is_text = path.suffix.lower() in SUFFIXES and not fault_of(path, key)
            (found if is_text else others).append(path)
    if others:
        endings = Counter(path.suffix or "no ending" for path in others)
        listed = ", ".join(f"{count} x {ending}" for ending, count in endings.most_common(8))
        first = fault_of(others[0], key) or (
            f"{others[0]}: its name does not end as those of texts do; if it is one, name it")
        if not found:
            raise BadInput(f"{top}: no text in this folder, but {listed}, first {first}")
        notes.append(f"left out {len(others):,} file(s) of {top} ({listed}), first {first}")
    elif not found:
        raise BadInput(f"{top}: no files in this folder; name one that has some")
    return found


def fault_of(path, key):
    """Why the beginning of a file cannot be read as text, in a sentence, or None."""
    try:
        next(read_documents(path, key, split_blank=1), None)
    except BadInput as error:
        return str(error)
    return None


# ---- what a file is ------------------------------------------------------------------------------

def format_of(head):
    """(what it is, what to do instead) of a file of a known format that begins with these bytes
    and is no text, or None."""
    for start, name, remedy in FORMATS:
        if head.startswith(start):
            return name, remedy
    if head[257:262] == b"ustar":
        return "a tar archive", UNPACK
    return None


def encoding_without_mark(head):
    """UTF-16 or UTF-32, if these bytes are text in it, or None. In the wrong order of bytes a text
    has no spaces and no ends of lines."""
    for encoding in ("utf-32le", "utf-32be", "utf-16le", "utf-16be"):
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(head)
        except UnicodeError:
            continue
        kinds = {unicodedata.category(c) for c in set(text) - set("\t\n\f\r")}
        if not kinds & {"Cc", "Cn"} and set(text) & set(" \n"):
            return encoding
    return None


def open_text(path):
    """Open a file of UTF-8 or, if it begins with their mark, of UTF-16 or UTF-32. Ends of lines
    stay as they are. Raises BadInput if it is something else, UnicodeError if its beginning is
    no text, and OSError."""
    with open(path, "rb") as file:
        head = file.read(HEAD)
    encoding = next((MARKS[mark] for mark in MARKS if head.startswith(mark)), "utf-8")
    known = format_of(head)
    if known and encoding == "utf-8":
        raise BadInput(f"{path}: {known[0]}, not text; {known[1]}")
    if encoding == "utf-8" and b"\0" in head:
        if found := encoding_without_mark(head):
            raise BadInput(
                f"{path}: text in {found.upper()} without the mark that says so; convert it, as by "
                f"iconv -f {found} -t utf-8 OLD > NEW")
        raise BadInput(f"{path}: not text, as it holds zero bytes; name a file of text. If they "
                       "are tokens, as nanoGPT's train.bin, give their folder to train_gpt.py "
                       "--data_dir")
    codecs.getincrementaldecoder(encoding)().decode(head)
    return open(path, encoding=encoding, newline="\n")


def json_form(file, path):
    """How an open text holds JSON, or None if it holds none: "lines", an object on each, or
    "whole", one object or array over all of it. The file is read from its beginning afterwards."""
    head = file.read(1 << 16)
    file.seek(0)
    if not JSON_START.match(head):
        return "lines" if path.suffix.lower() in JSON_LINES else None
    first = next(line for line in file if line.strip())
    file.seek(0)
    try:
        return "lines" if isinstance(json.loads(first), dict) else "whole"
    except ValueError:
        return "whole"


# ---- documents -----------------------------------------------------------------------------------

def read_documents(path, key="text", split_blank=None, split=None):
    """Yield the documents of one file as strings; some may be blank.

    A text is one document, or is split at `split_blank` or more blank lines, or at each `split`, a
    string. Raises BadInput.
    """
    path = Path(path)
    with errors_of(path), open_text(path) as file:
        form = json_form(file, path)
        if form == "lines":
            documents = json_lines(file, key, path)
        elif form == "whole":
            documents = json_items(file.read(), key, path)
        else:
            yield from split_at_blank_lines(file, split_blank) if split_blank else split_at(
                file, split)
            return
        for text in documents:
            yield from split_at([text], split)


def read_all(paths, options, markers):
    """Yield the documents of several files, read as `options` say (key, split_blank, split), and
    count the MARKERS in them, as they may end documents. Raises BadInput."""
    for path in paths:
        for text in read_documents(path, options.key, options.split_blank, options.split):
            markers.update(MARKERS.findall(text))
            yield text


def json_lines(lines, key, path):
    """Yield the text of every line of JSON that is not blank. Raises BadInput."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(
                f"{place}: no JSON ({error.msg}); repair or remove this line") from error
        yield text_of(entry, key, place)


def json_items(text, key, path):
    """Yield the text of every item of a JSON array, or of one JSON object. A text that only begins
    like JSON is one document, unless the name says that it is JSON. Raises BadInput."""
    try:
        items = json.loads(text)
    except ValueError as error:
        if not path.suffix.lower().startswith((".json", ".ndjson")):
            yield text
            return
        raise BadInput(
            f"{path}: begins as JSON over several lines and cannot be read as one array or object "
            f"({error}); write an object to each line, as by jq -c . OLD > NEW.jsonl") from error
    if not isinstance(items, list):
        items = [items]
    for number, item in enumerate(items, 1):
        yield item if isinstance(item, str) else text_of(item, key, f"{path}, item {number}")


def text_of(entry, key, place):
    """The text of a JSON object. Raises BadInput, which names its place."""
    if not isinstance(entry, dict):
        raise BadInput(f'{place}: not an object like {{"{key}": "..."}}; repair or remove it')
    if not isinstance(entry.get(key), str):
        keys = f"{', '.join(map(repr, entry)):.200}"
        raise BadInput(f'{place}: an object without a text "{key}", with the keys {keys}; name '
                           "that of its text with --key, or repair it")
    return entry[key]


def split_at(lines, marker):
    """Yield the parts of a text between markers, without ends of lines around them; the whole text
    if the marker is None."""
    if not marker:
        yield "".join(lines)
        return
    document = []
    for line in lines:
        first, *others = line.split(marker)
        document.append(first)
        for part in others:
            yield "".join(document).strip("\r\n")
            document = [part]
    yield "".join(document).strip("\r\n")


def note_on_markers(markers):
    """A sentence about the most frequent of the `markers` that read_all has counted, or None."""
    if not markers:
        return None
    [(marker, number)] = markers.most_common(1)
    times = "once" if number == 1 else f"{number:,} times"
    return (f"{marker} stands {times} in the text and is read as text; if it ends "
            f"documents, split there: --split={shlex.quote(marker)}")


def split_at_blank_lines(lines, at_least):
    """Yield the parts of a text between stretches of `at_least` or more blank lines, which are
    dropped."""
    document = []
    for is_blank, group in groupby(lines, lambda line: not line.strip()):
        group = list(group)
        if is_blank and len(group) >= at_least:
            yield "".join(document)
            document = []
        else:
            document += group
    yield "".join(document)


def distinct(documents, dropped):
    """Yield the documents that are not blank and whose text no earlier one has; the others of
    these are counted in dropped["duplicates"]."""
    seen = set()
    for text in documents:
        if not text.strip():
            continue
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in seen:
            dropped["duplicates"] += 1
            continue
        seen.add(digest)
        yield text
