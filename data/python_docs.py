"""The English that every Python brings along: the corpus of the laptop preset, without a download.

It is the language reference, and the docstrings and comments of the library. So it differs from one
version of Python to another.
"""
import ast
import os
import re
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def is_prose(paragraph: str) -> bool:
    """Whether this is English rather than code, a table or a session of the interpreter."""
    num_letters = sum(c.isalpha() or c.isspace() for c in paragraph)
    says_something = len(paragraph.split()) > 6 or paragraph.endswith(".")
    return says_something and num_letters > 0.8 * len(paragraph) and ">>>" not in paragraph


def source_prose(source: str) -> str:
    """The docstrings and the blocks of comments in a Python source, in the order they stand there.
    (Only a comment right below a docstring of one line may come before it.)

    Raises SyntaxError and ValueError.
    """
    found = []  # (line, text)
    for block in re.finditer(r"(?m)(?:^[ \t]*#.*\n)+", source):
        text = re.sub(r"(?m)^[ \t]*#+ ?", "", block[0])
        found.append((source.count("\n", 0, block.start()), text))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)  # without its indentation
            if text:
                found.append((node.body[0].lineno, text))
    return "\n\n".join(text for _, text in sorted(found))


def python_texts() -> Iterator[str]:
    """Yields the topics of the language reference, then the prose of every library module. Modules
    are read, not imported."""
    with suppress(ImportError):  # some distributions leave it out; the library is the larger part
        from pydoc_data.topics import topics
        for name in sorted(topics):
            yield topics[name]
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - skipped)  # os.walk goes only where this list says
        for name in sorted(name for name in names if name.endswith(".py")):
            with suppress(OSError, SyntaxError, ValueError):  # a template, or an old encoding
                yield source_prose(Path(folder, name).read_text(encoding="utf-8"))


def python_documents() -> Iterator[str]:
    """Yields a document for each topic and module: its paragraphs of prose, without those that an
    earlier document had, such as licences."""
    seen = set()
    for text in python_texts():
        paragraphs = [part.strip("\n").rstrip() for part in re.split(r"\n[ \t]*\n", text)]
        fresh = [p for p in dict.fromkeys(paragraphs) if p not in seen and is_prose(p)]
        seen.update(fresh)
        if sum(map(len, fresh)) >= 200:
            yield "\n\n".join(fresh) + "\n"
