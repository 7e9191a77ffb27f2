"""From files to documents: finds the files of texts, reads them, and cuts them into documents.

What prepare.py and evaluate.py read goes through here. Whether a file is JSON is seen in the ending
of its name. This file knows nothing of tokens.
"""
import codecs
import json
import os
import re
import shlex
from collections import Counter
from pathlib import Path

from data import BadInput

HEAD = 1 << 20  # bytes of a file in which zeros are looked for
SUFFIXES = {  # of the files that are taken from a folder
    ".txt", ".text", ".md", ".rst", ".org", ".tex", ".html", ".css",
    ".jsonl", ".ndjson", ".jsonlines", ".json",
    ".c", ".cc", ".cpp", ".cs", ".cu", ".go", ".h", ".hpp", ".hs", ".java", ".jl", ".js", ".jsx",
    ".kt", ".lua", ".php", ".pl", ".py", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift",
    ".ts", ".tsx",
}
JSON_LINES = {".jsonl", ".ndjson", ".jsonlines"}
TABLES = {".csv", ".tsv"}
MARKERS = re.compile(r"<\|end_?of_?text\|>|<\|eot_id\|>|<\|im_end\|>|</s>|<eos>|\[EOS\]")

EXPORT = 'export its text column as JSON lines, a line like {"text": "..."} for each document'
UNPACK = "unpack it first, and name what was in it"
SAVE = "save its text as a .txt file first, in UTF-8"
FORMATS = [  # how a file begins, what it then is, and what to do instead
    (b"PAR1", "Parquet", EXPORT),
    (b"\x88\xd8\x34\x01", "a shard of tokens", "train on its folder with --data_dir=FOLDER"),
    (b"PK\3\4", "a zip archive, as .docx, .xlsx, .epub and .odt are, too", f"unpack it, or {SAVE}"),
    (b"\x1f\x8b", "compressed (gzip)", UNPACK),
    (b"BZh", "compressed (bzip2)", UNPACK),
    (b"\xfd7zXZ", "compressed (xz)", UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed (zstd)", UNPACK),
    (b"%PDF-", "a PDF", SAVE),
    (b"{\\rtf", "RTF", SAVE),
]


# ---- which files ---------------------------------------------------------------------------------

def find_sources(inputs, key="text"):
    """The files that `inputs` name or have in their folders, and sentences about those in folders
    that are left out. Raises BadInput."""
    found = []
    notes = []
    for item in inputs:
        if os.path.isdir(item):
            found += search(Path(item), key, notes)
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
    faults = []
    endings = Counter()
    for path in sorted(top.rglob("*")):
        if not path.is_file() or any(part[0] == "." for part in path.relative_to(top).parts):
            continue
        fault = fault_of(path, key)
        if not fault and path.suffix.lower() not in SUFFIXES:
            fault = f"{path}: its name does not end as those of texts do; if it is one, name it"
        if fault:
            faults.append(fault)
            endings[path.suffix or "no ending"] += 1
        else:
            found.append(path)
    if faults:
        listed = ", ".join(f"{count} x {ending}" for ending, count in endings.most_common(8))
        notes.append(f"left out {len(faults):,} file(s) of {top} ({listed}), first {faults[0]}")
    if not found:
        raise BadInput(f"{top}: no text in this folder{f'; {notes[-1]}' if faults else ''}")
    return found


def fault_of(path, key):
    """Why a file cannot be read as text, in a sentence, or None. Of JSON lines the first one is
    read."""
    try:
        next(read_documents(path, key), None)
    except BadInput as error:
        return str(error)
    return None


# ---- documents -----------------------------------------------------------------------------------

def read_documents(path, key="text", split_blank=None, split=None):
    """Yield the documents of one file as strings; some may be blank.

    A text is one document, or is split at `split_blank` or more blank lines, or at each `split`, a
    string. Raises BadInput.
    """
    path = Path(path)
    try:
        for text in read_texts(path, key):
            if split:
                yield from (part.strip("\r\n") for part in text.split(split))
            elif split_blank:
                yield from re.split(rf"\n(?:[^\S\n]*\n){{{split_blank},}}", text)
            else:
                yield text
    except UnicodeError as error:
        raise BadInput(f"{path}: not text in UTF-8 ({error.reason}); convert it from the "
                       "encoding that it was saved in, such as cp1252 of Windows in Western "
                       "Europe: iconv -f ENCODING -t utf-8 OLD > NEW") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); check the file and its "
                       "permissions") from error


def read_texts(path, key):
    """Yield the text of a file, or those of the objects in a file of JSON. Raises BadInput,
    UnicodeError and OSError."""
    suffix = path.suffix.lower()
    with open_text(path) as file:
        if suffix in JSON_LINES:
            for number, line in enumerate(file, 1):
                if line.strip():
                    place = f"{path}, line {number}"
                    yield text_of(from_json(line, place, "repair or remove this line"), key, place)
        elif suffix == ".json":
            items = from_json(file.read(), path, "if each line is an object, name it .jsonl")
            for number, item in enumerate(items if isinstance(items, list) else [items], 1):
                yield text_of(item, key, f"{path}, item {number}")
        else:
            yield file.read()


def open_text(path):
    """Open a file of UTF-8 or, if it begins with the mark of that, of UTF-16. Ends of lines stay as
    they are. Raises BadInput if it is something else, and OSError."""
    with open(path, "rb") as file:
        head = file.read(HEAD)
    for start, name, remedy in FORMATS:
        if head.startswith(start):
            raise BadInput(f"{path}: {name}, not text; {remedy}")
    if path.suffix.lower() in TABLES:
        raise BadInput(f"{path}: a table, not text; {EXPORT}")
    is_utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if b"\0" in head and not is_utf16:
        raise BadInput(f"{path}: not text in UTF-8, as it holds zero bytes; name a text")
    return open(path, encoding="utf-16" if is_utf16 else "utf-8-sig", newline="\n")


def from_json(text, place, remedy):
    """What a text of JSON stands for. Raises BadInput, which names its place."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"{place}: no JSON ({error}); {remedy}") from error


def text_of(entry, key, place):
    """The text of a JSON object, or of a string. Raises BadInput, which names its place."""
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, dict):
        raise BadInput(f'{place}: not an object like {{"{key}": "..."}}; repair or remove it')
    if not isinstance(entry.get(key), str):
        keys = f"{', '.join(map(repr, entry)):.200}"
        raise BadInput(f'{place}: an object without a text "{key}", with the keys {keys}; name '
                       "that of its text with --key, or repair it")
    return entry[key]


def read_all(paths, options, markers):
    """Yield the documents of several files, read as `options` say (key, split_blank, split), and
    count the MARKERS in them, as they may end documents. Raises BadInput."""
    for path in paths:
        for text in read_documents(path, options.key, options.split_blank, options.split):
            markers.update(MARKERS.findall(text))
            yield text


def note_on_markers(markers):
    """Sentences, none or one, about the most frequent of the `markers` that read_all has
    counted."""
    return [f"{marker} stands {number:,} times in the text and is read as text; if it ends "
            f"documents, split there: --split={shlex.quote(marker)}"
            for marker, number in markers.most_common(1)]
