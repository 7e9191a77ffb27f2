"""From files to documents: finds the files of texts, reads them, and cuts them into documents.

What prepare.py and evaluate.py read goes through here. This file knows nothing of tokens.
"""
import codecs
import hashlib
import json
import os
import re
import unicodedata
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ZERO_BYTES = "it holds zero bytes"
OF_PROGRAMS = {".doc", ".docx", ".epub", ".mobi", ".odt", ".pdf", ".rtf"}
COMPRESSED = {".7z", ".bz2", ".gz", ".tgz", ".xz", ".zip", ".zst"}
SUFFIXES = {
    ".txt", ".md", ".rst", ".jsonl", ".org", ".tex", ".html", ".css",
    ".c", ".cc", ".cpp", ".cs", ".cu", ".go", ".h", ".hpp", ".hs", ".java", ".jl", ".js", ".jsx",
    ".kt", ".lua", ".php", ".pl", ".py", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift",
    ".ts", ".tsx",
}


def harmless(text):
    """The text with question marks in place of control characters, but for ends of lines and tabs.

    They could change how a terminal works, and names of files and what files hold may have them.
    """
    return "".join("?" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


class PrepareError(ValueError):
    """The corpus cannot be made; the message is one sentence for the user."""

    def __init__(self, sentence):
        super().__init__(harmless(sentence))


class Source(NamedTuple):
    path: Path
    named: bool  # on the command line; otherwise it was found in a folder


@contextmanager
def errors_of(path):
    """Turn what goes wrong when `path` is read into a PrepareError."""
    try:
        yield
    except UnicodeError as error:
        reason = f"not text in UTF-8 ({getattr(error, 'reason', error)})"
        encoding = "utf-16le" if ZERO_BYTES in reason else "cp1252"
        remedy = f"name a text file, or convert it, as by iconv -f {encoding} -t utf-8 OLD > NEW"
        if Path(path).suffix.lower() in COMPRESSED:
            reason, remedy = "compressed", "unpack it first, and name what was in it"
        if Path(path).suffix.lower() in OF_PROGRAMS:
            reason, remedy = "no plain text", "save it as a .txt file first, in UTF-8"
        raise PrepareError(f"{path}: {reason}; {remedy}") from error
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        path = error.filename or path  # in a folder: what in it is meant
        raise PrepareError(f"{path}: {reason}; check the file and its permissions") from error


def find_sources(inputs):
    """The files that `inputs` name or have in their folders, and those in folders that are left out
    because of their endings. Raises PrepareError."""
    sources = []
    left_out = []
    if "" in inputs:  # an unset variable of the shell, which Path would take for this folder
        raise PrepareError("one of the names is empty; name a file or a folder")
    for item in map(Path, inputs):
        with errors_of(item):
            if item.is_file():
                sources.append(Source(item, named=True))
            elif item.is_dir():
                found, others = search(item)
                sources += [Source(path, named=False) for path in found]
                left_out += others
            elif item.is_symlink() and not item.exists():
                target = os.readlink(item)
                raise PrepareError(f"{item}: a link to {target}, which is not there; repair it")
            elif item.exists():
                raise PrepareError(
                    f"{item}: a pipe or a device, not a file; write its text to a file first")
            else:
                address = "; download it first" if re.match("[a-z]+:/", str(item)) else ""
                raise PrepareError(f"{item}: no such file or folder{address or '; check the path'}")
    return sources, left_out


def search(top):
    """The files under a folder that are not hidden: those that have one of the SUFFIXES, and the
    others, both sorted.

    Raises OSError if a folder cannot be read, and PrepareError if it has none of the first kind.
    """
    def refuse(error):
        raise error

    found = []
    others = []
    for folder, subfolders, names in os.walk(top, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            hidden = name.startswith(".")
            if not hidden and path.is_file():
                (found if path.suffix.lower() in SUFFIXES else others).append(path)
    if not found:
        kinds = ".txt, .md, .rst, .jsonl or source code"
        raise PrepareError(f"{top}: no {kinds} in this folder (links to folders are not followed); "
                           "name the files themselves")
    return sorted(found), sorted(others)


def open_text(path):
    """Open a file of UTF-8 or, if it begins with their mark, of UTF-16. Line ends stay as they are.

    Raises OSError.
    """
    with open(path, "rb") as file:
        mark = file.read(2)
    is_utf_16 = mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return open(path, encoding="utf-16" if is_utf_16 else "utf-8-sig", newline="\n")


def is_text(path):
    """Whether a file can be decoded to its end and has no zero bytes. Raises PrepareError."""
    with errors_of(path):
        try:
            with open_text(path) as file:
                while part := file.read(1 << 20):
                    if "\0" in part:
                        return False
                return True
        except UnicodeError:
            return False


def read_documents(path, key="text", split_blank=None, progress=lambda num_bytes: None):
    """Yield the documents of one file as strings; some may be blank.

    Reads no further than the caller asks for, and calls `progress` with the number of bytes read.
    Raises PrepareError.
    """
    with errors_of(path), open_text(path) as file:
        if path.suffix.lower() == ".json":
            raise PrepareError(f"{path}: JSON is no text; write an object with the text of each "
                               "document to a line of a .jsonl file, or name a copy .txt")
        if path.suffix.lower() == ".jsonl":
            yield from json_texts(checked(file, file, progress), key, path)
        elif split_blank:
            yield from split_at_blank_lines(checked(file, file, progress), split_blank)
        else:
            yield from checked(iter(file.read, ""), file, progress)  # the whole text at once


def checked(parts, file, progress):
    """Yield `parts`, which are read from `file`. Raises UnicodeError if one has a zero byte."""
    position = 0
    for part in parts:
        if "\0" in part:
            raise UnicodeError(ZERO_BYTES)
        progress(file.buffer.tell() - position)
        position = file.buffer.tell()
        yield part


def json_texts(lines, key, path):
    """Yield the text of every line of a .jsonl file that is not blank. Raises PrepareError."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except RecursionError as error:
            fault = f"{path}, line {number}: nested too deeply"
            raise PrepareError(f"{fault}; remove this line") from error
        except ValueError as error:
            fault = f"{path}, line {number}: no JSON ({getattr(error, 'msg', error)})"
            raise PrepareError(f"{fault}; repair or remove this line") from error
        if isinstance(entry, dict) and not isinstance(entry.get(key, ""), str):
            raise PrepareError(f'{path}, line {number}: its "{key}" is no text; give it one, or '
                               "remove this line")
        if not isinstance(entry, dict) or key not in entry:
            fault = f'{path}, line {number}: not an object like {{"{key}": "..."}}'
            if isinstance(entry, dict):
                fault += f", as it has the keys {', '.join(map(repr, entry))}"
            raise PrepareError(f"{fault[:300]}; repair it, or name its key with --key")
        yield entry[key]


def split_at_blank_lines(lines, at_least):
    """Yield the parts of a text between stretches of `at_least` or more blank lines.

    These stretches are dropped, but the last part keeps the blank lines at the end of the file.
    """
    document = []
    blank_lines = []  # since the last line that was not blank
    for line in lines:
        if not line.strip():
            blank_lines.append(line)
            continue
        if len(blank_lines) >= at_least:
            yield "".join(document)
            document = []
        else:
            document += blank_lines
        document.append(line)
        blank_lines = []
    yield "".join(document + blank_lines)


def distinct(documents, dropped):
    """Yield the documents that are not blank and whose text no earlier one has.

    dropped["duplicates"] counts those whose text an earlier one has. Blank ones are not counted.
    """
    seen = set()
    for text in documents:
        if not text or text.isspace():
            continue
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in seen:
            dropped["duplicates"] += 1
            continue
        seen.add(digest)
        yield text
