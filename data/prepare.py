"""Turn your own text into the token shards that the trainer reads.

    python data/prepare.py books/ notes.txt dump.jsonl --out data/mine    # GPT-2's BPE, in parallel
    python data/prepare.py story.txt --split_blank=1 --bytes --out data/story
    python data/prepare.py --python-docs --bytes --out data/pydocs        # a few MB of English, no download

INPUT is a text file (one document, or with --split_blank=N one per stretch between N or more blank lines), a .jsonl
file (one document a line, under --key), or a folder of .txt, .md, .rst and .jsonl files, searched recursively; UTF-8.
OUT receives NAME_val_000000.bin and NAME_train_000001.bin, ...: 256 int32 of header (magic 20240520, version 1, token
count, zeros) and then uint16 tokens, all little-endian. A document is 50256 followed by its own tokens; a shard begins
with a document and ends with the first one that fills it to --shard_tokens.

Documents are shuffled by --seed however large the corpus: tokens go through a temporary file in OUT (2 bytes a token),
and memory holds only the documents' lengths and a few MB of text a worker (or the largest document). The first shuffled
documents are the validation split, so it is a fair sample and shares no document with training. The result does not
depend on --workers. Shards take their final names last of all, validation after training.

Exit status: 0 done, 2 with one sentence on stderr that names the file and what to do.
"""
import argparse
import ast
import collections
import json
import os
import random
import re
import sys
import sysconfig
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

BOS = 50256  # GPT-2's end-of-text token, in front of every document
MAGIC, VERSION = 20240520, 1
SUFFIXES = (".txt", ".md", ".rst", ".jsonl")

# GPT-2 numbers its 256 single-byte tokens in this order: the bytes that print in Latin-1, then all others.
_printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
token_to_byte = np.array(_printing + sorted(set(range(256)) - set(_printing)), dtype=np.uint8)  # (256,) by token id
byte_to_token = np.argsort(token_to_byte).astype(np.uint16)  # (256,) by byte value


class PrepareError(ValueError):
    """The corpus cannot be made; the message is one sentence for the user."""


def find_files(inputs):
    """The files that `inputs` name, folders searched recursively and sorted. Raises PrepareError."""
    files = []
    for item in map(Path, inputs):
        if not item.exists():
            raise PrepareError(f"{item}: no such file or folder; check the path")
        found = sorted(p for p in item.rglob("*") if p.suffix.lower() in SUFFIXES) if item.is_dir() else [item]
        if not found:
            raise PrepareError(f"{item}: no {', '.join(SUFFIXES)} file in this folder; name the files themselves")
        files += found
    return files


def read_documents(path, key="text", split_blank=None, progress=lambda num_bytes: None):
    """Yield the documents of one file as strings, read as they are asked for. Raises PrepareError."""
    jsonl, document, blanks = path.suffix.lower() == ".jsonl", [], []
    try:
        with open(path, "rb") as f:
            if not jsonl and not split_blank:  # the whole file at once
                document = [f.read().decode("utf-8")]
                progress(f.tell())
            for number, line in enumerate(f, 1):
                progress(len(line))
                line = line.decode("utf-8")
                if not line.strip():
                    blanks.append(line)
                elif jsonl:
                    yield json_text(line, key, f"{path}, line {number}")
                else:
                    if len(blanks) >= split_blank:
                        yield "".join(document)
                        document, blanks = [], []
                    document += [*blanks, line]
                    blanks = []
    except UnicodeDecodeError as error:
        raise PrepareError(f"{path}: not UTF-8 ({error.reason}); convert it, for example with iconv") from error
    except OSError as error:
        raise PrepareError(f"{path}: cannot be read ({error.strerror}); check the file and its permissions") from error
    yield "".join(document + blanks)


def json_text(line, key, where):
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get(key), str):
        raise PrepareError(f'{where}: not an object like {{"{key}": "..."}}; repair it, or name its key with --key')
    return row[key]


def encode(texts, use_bytes):
    """Documents (list of str) -> their tokens end to end, BOS before each (n,) uint16, and each one's length (list)."""
    tokens = []
    for text in texts:
        if use_bytes:
            body = byte_to_token[np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)]
        else:
            import tiktoken
            body = tiktoken.get_encoding("gpt2").encode_ordinary(text)
        tokens.append(np.empty(1 + len(body), dtype="<u2"))
        tokens[-1][0], tokens[-1][1:] = BOS, body
    return np.concatenate(tokens), [len(t) for t in tokens]


def batches(documents, size=1 << 20):
    """Group documents into lists of about `size` characters, a worthwhile job for a worker; blank ones are dropped."""
    batch, chars = [], 0
    for text in documents:
        if text.strip():
            batch.append(text)
            chars += len(text)
        if chars >= size:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def encode_all(documents, use_bytes=True, workers=1):
    """Yield encode() of every batch, in order. Raises PrepareError when GPT-2's vocabulary is needed but missing."""
    if not use_bytes:
        try:
            import tiktoken
            tiktoken.get_encoding("gpt2")  # once, before the workers need it
        except Exception as error:  # whatever the network, the cache folder or a missing package raises
            raise PrepareError(f"tiktoken cannot load GPT-2's vocabulary ({type(error).__name__}); run once with a "
                               "network, set TIKTOKEN_CACHE_DIR to a folder that has it, or pass --bytes") from error
    if workers == 1:
        yield from (encode(batch, use_bytes) for batch in batches(documents))
        return
    with ProcessPoolExecutor(workers) as pool:
        pending = collections.deque()
        for batch in batches(documents):
            pending.append(pool.submit(encode, batch, use_bytes))
            if len(pending) > 2 * workers:  # memory stays bounded: the pool's own map() would read all the input first
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def write_corpus(encoded, out_dir, name="fineweb", val_tokens=None, shard_tokens=100_000_000, seed=0):
    """Write what encode_all() yields as shards; return {"train": tokens, "val": tokens, "documents": count}.

    val_tokens=None keeps 5% for validation, at most 10,485,760. Raises PrepareError: no documents, or too few to split.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".incomplete-", dir=out_dir) as folder:
        spool, lengths = Path(folder, "documents.u16"), []
        with open(spool, "wb") as f:
            for tokens, batch_lengths in encoded:
                f.write(tokens.tobytes())
                lengths += batch_lengths
        if not lengths:
            raise PrepareError("the input holds no text; name files that do")
        lengths = np.array(lengths)  # (documents,) int64, tokens
        starts = np.cumsum(lengths) - lengths  # (documents,) where each begins in the spool
        order = list(range(len(lengths)))
        random.Random(seed).shuffle(order)

        wanted = min(int(lengths.sum()) // 20, 10_485_760) if val_tokens is None else val_tokens
        # one more than wanted, because the last prediction needs its target too
        cut = 1 + int(np.searchsorted(np.cumsum(lengths[order]), wanted + 1))
        if cut >= len(order):
            raise PrepareError(f"the input is {len(order)} document(s) of {lengths.sum():,} tokens, and {wanted:,} for "
                               "validation leave none to train on; add text, lower --val_tokens, or cut a long text "
                               "file into documents with --split_blank=1")
        splits = {"train": np.array(order[cut:]), "val": np.array(order[:cut])}
        tokens, paths = np.memmap(spool, dtype="<u2", mode="r"), []
        for split, chosen in splits.items():
            begins = np.cumsum(lengths[chosen]) - lengths[chosen]  # where each document begins in its split
            edges = 1 + np.flatnonzero(np.diff(begins // shard_tokens))
            for number, members in enumerate(np.split(chosen, edges), start=1 if split == "train" else 0):
                header = np.zeros(256, dtype="<i4")
                header[:3] = MAGIC, VERSION, lengths[members].sum()
                paths.append(Path(folder, f"{name}_{split}_{number:06d}.bin"))
                with open(paths[-1], "wb") as f:
                    f.write(header.tobytes())
                    for d in members:
                        f.write(tokens[starts[d]:starts[d] + lengths[d]].tobytes())
        del tokens  # Windows removes no file that is still mapped
        for path in paths:
            os.replace(path, out_dir / path.name)
    return {split: int(lengths[chosen].sum()) for split, chosen in splits.items()} | {"documents": len(order)}


# ---- the corpus that every Python brings along ----------------------------------------------------------------------

def is_prose(paragraph):
    """English rather than code, tables and interpreter sessions: mostly letters, and long enough to say something."""
    letters = sum(c.isalpha() or c.isspace() for c in paragraph)
    says_something = len(paragraph.split()) > 6 or paragraph.endswith(".")
    return says_something and letters > 0.8 * len(paragraph) and ">>>" not in paragraph


def source_prose(source):
    """The docstrings and comment blocks of a Python source, as they stand. Raises SyntaxError, ValueError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in the parsed source
        tree = ast.parse(source)
    found = [(source.count("\n", 0, block.start()), re.sub(r"(?m)^[ \t]*#+ ?", "", block[0]))
             for block in re.finditer(r"(?m)(?:^[ \t]*#.*\n)+", source)]
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if text := ast.get_docstring(node):  # dedented
                found.append((node.body[0].lineno, text))
    return "\n\n".join(text for _, text in sorted(found))


def python_texts():
    """The topics of this Python's language reference, then the prose of its library's sources; none is imported."""
    try:
        from pydoc_data.topics import topics
        yield from (topics[name] for name in sorted(topics))
    except ImportError:
        pass  # some distributions leave it out; the library is the larger part
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - skip)
        for name in sorted(n for n in names if n.endswith(".py")):
            try:
                yield source_prose(Path(folder, name).read_text(encoding="utf-8"))
            except (OSError, SyntaxError, ValueError):
                continue  # a template, or an old encoding


def python_documents():
    """Yield one document per topic and module: its paragraphs of prose, less those that an earlier document had."""
    seen = set()
    for text in python_texts():
        paragraphs = [p.strip("\n").rstrip() for p in re.split(r"\n[ \t]*\n", text)]
        fresh = [p for p in dict.fromkeys(paragraphs) if p not in seen and is_prose(p)]
        seen.update(fresh)
        if sum(map(len, fresh)) >= 200:
            yield "\n\n".join(fresh) + "\n"


def make_python_docs_corpus(out_dir, use_bytes=True, name="fineweb", **options):
    """Make the --python-docs corpus and return write_corpus()'s counts, or None when `out_dir` has it already.

    Raises PrepareError as write_corpus() does (a Python without library sources), OSError for an unusable `out_dir`.
    """
    if Path(out_dir, f"{name}_val_000000.bin").exists():  # the file that is named last
        return None
    return write_corpus(encode_all(python_documents(), use_bytes), out_dir, name, **options)


# ---- command line ---------------------------------------------------------------------------------------------------

def fail(message):
    print(f"prepare.py: {message}.", file=sys.stderr)
    sys.exit(2)


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help="text file, .jsonl file, or folder of them")
    parser.add_argument("--python-docs", action="store_true", help="use the English that Python itself brings along")
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--name", default="fineweb", help="shards' name; the trainer looks for %(default)s")
    parser.add_argument("--bytes", action="store_true", help="a token per byte (ids 0-255), without a vocabulary file")
    parser.add_argument("--key", default="text", help="where a .jsonl line keeps its text; default %(default)s")
    parser.add_argument("--split_blank", type=int, metavar="N", help="cut text files at N or more blank lines")
    parser.add_argument("--val_tokens", type=int, help="validation tokens; default 5%%, at most 10,485,760")
    parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="default %(default)s")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle; default %(default)s")
    parser.error = fail
    args = parser.parse_args(argv)
    for option in ("split_blank", "val_tokens", "shard_tokens", "workers"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            fail(f"--{option} must be at least 1")
    if args.python_docs == bool(args.inputs):
        fail("name at least one INPUT or pass --python-docs, not both")
    return args


def main(argv=None):
    args, start = parse_args(argv), time.perf_counter()
    options = {"val_tokens": args.val_tokens, "shard_tokens": args.shard_tokens, "seed": args.seed}
    try:
        if args.python_docs:
            counts = make_python_docs_corpus(args.out, args.bytes, args.name, **options)
        else:
            from tqdm import tqdm
            files = find_files(args.inputs)
            if old := sorted(args.out.glob(f"{args.name}_*.bin")):  # old and new must not mix
                raise PrepareError(f"{old[0]}: already there; delete the old shards, or choose another --out or --name")
            with tqdm(total=sum(p.stat().st_size for p in files), unit="B", unit_scale=True, disable=None) as bar:
                documents = (text for p in files for text in read_documents(p, args.key, args.split_blank, bar.update))
                counts = write_corpus(encode_all(documents, args.bytes, args.workers), args.out, args.name, **options)
    except PrepareError as error:
        fail(error)
    except OSError as error:
        fail(f"cannot write to {args.out} ({error}); choose another --out, or make room there")
    if counts is None:
        print(f"{args.out}: {args.name} shards are there already")
    else:
        print(f"{args.out}: {counts['train']:,} training and {counts['val']:,} validation tokens "
              f"from {counts['documents']:,} documents in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
