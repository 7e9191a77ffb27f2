"""Turn your own text into the token shards that the trainer reads.

    python data/prepare.py books/ notes.txt dump.jsonl --out data/mine  # GPT-2's BPE, in parallel
    python data/prepare.py story.txt --split_blank=1 --bytes --out data/story
    python data/prepare.py --python-docs --bytes --out data/pydocs      # a few MB, no download

INPUT is one of these, in UTF-8:
    a text file     one document, or with --split_blank=N the parts between N or more blank lines
    a .jsonl file   a JSON object on each line, with the text of one document under --key
    a folder        all .txt, .md, .rst and .jsonl files in it and in its subfolders

OUT receives NAME_val_000000.bin and NAME_train_000001.bin, NAME_train_000002.bin, and so on.
`shards.py` says what a shard is. A document in it is the token 50256 followed by the document's own
tokens. A shard begins with a document and ends with the first one that fills it to --shard_tokens.

The documents are shuffled, in an order that --seed decides. The first ones in this order are the
validation split, so it is a fair sample of the input and shares no document with training. The
number of --workers does not change the result.

The input may be larger than memory. All tokens go through a temporary file in OUT, which takes 2
bytes for each token. Memory holds only the lengths of the documents, and the text that is being
encoded: a few MB for each worker, or the largest document. The shards get their final names at the
very end, validation after training.

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

if __package__:
    from .shards import SEPARATOR, write_shard
else:  # run as a script
    from shards import SEPARATOR, write_shard

SUFFIXES = (".txt", ".md", ".rst", ".jsonl")

# GPT-2 has one token for each of the 256 bytes, numbered in this order: first the bytes that are
# printing characters in Latin-1, then all others.
_printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
_others = sorted(set(range(256)) - set(_printing))
token_to_byte = np.array(_printing + _others, dtype=np.uint8)  # (256,), indexed by token
byte_to_token = np.argsort(token_to_byte).astype(np.uint16)  # (256,), indexed by byte


class PrepareError(ValueError):
    """The corpus cannot be made; the message is one sentence for the user."""


# ---- from files to documents ---------------------------------------------------------------------

def find_files(inputs):
    """The files that `inputs` name. Folders are searched recursively. Raises PrepareError."""
    files = []
    for item in map(Path, inputs):
        if not item.exists():
            raise PrepareError(f"{item}: no such file or folder; check the path")
        if not item.is_dir():
            files.append(item)
            continue
        found = sorted(path for path in item.rglob("*") if path.suffix.lower() in SUFFIXES)
        if not found:
            kinds = ", ".join(SUFFIXES)
            raise PrepareError(f"{item}: no {kinds} file in this folder; name the files themselves")
        files += found
    return files


def read_documents(path, key="text", split_blank=None, progress=lambda num_bytes: None):
    """Yield the documents of one file as strings; some may be blank.

    Reads no further than the caller asks for, and calls `progress` with the number of bytes read.
    Raises PrepareError.
    """
    try:
        with open(path, "rb") as file:
            if path.suffix.lower() == ".jsonl":
                yield from json_texts(decoded_lines(file, progress), key, path)
            elif split_blank:
                yield from split_at_blank_lines(decoded_lines(file, progress), split_blank)
            else:
                contents = file.read()
                progress(len(contents))
                yield contents.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 ({error.reason})"
        raise PrepareError(f"{path}: {reason}; convert it, for example with iconv") from error
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise PrepareError(f"{path}: {reason}; check the file and its permissions") from error


def decoded_lines(file, progress):
    """Yield the lines of a file that was opened in binary mode, as strings with their ends."""
    for line in file:
        progress(len(line))
        yield line.decode("utf-8")


def json_texts(lines, key, path):
    """Yield the text of every line of a .jsonl file that is not blank. Raises PrepareError."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or not isinstance(entry.get(key), str):
            fault = f'{path}, line {number}: not an object like {{"{key}": "..."}}'
            raise PrepareError(f"{fault}; repair it, or name its key with --key")
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


# ---- from documents to tokens --------------------------------------------------------------------

def encode(texts, use_bytes):
    """Encode documents, a list of strings.

    Returns their tokens end to end, with SEPARATOR before each document: (n,) uint16; and a list of
    the number of tokens of each document, SEPARATOR included.
    """
    documents = []
    for text in texts:
        if use_bytes:
            text_bytes = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)
            body = byte_to_token[text_bytes]
        else:
            import tiktoken
            body = tiktoken.get_encoding("gpt2").encode_ordinary(text)
        tokens = np.empty(1 + len(body), dtype="<u2")
        tokens[0] = SEPARATOR
        tokens[1:] = body
        documents.append(tokens)
    return np.concatenate(documents), [len(tokens) for tokens in documents]


def jobs(documents, size=1 << 20):
    """Group documents into lists of about `size` characters, and drop blank documents.

    A worker encodes one list at a time. Shorter ones would cost more time to send than to encode.
    """
    job = []
    num_characters = 0
    for text in documents:
        if text.strip():
            job.append(text)
            num_characters += len(text)
        if num_characters >= size:
            yield job
            job = []
            num_characters = 0
    if job:
        yield job


def encode_all(documents, use_bytes=True, workers=1):
    """Yield what encode() returns for every job, in order, encoded by `workers` processes.

    Raises PrepareError if GPT-2's vocabulary is needed and cannot be had.
    """
    if not use_bytes:
        load_vocabulary()
    if workers == 1:
        for job in jobs(documents):
            yield encode(job, use_bytes)
        return
    with ProcessPoolExecutor(workers) as pool:
        # The pool's own map() would read all the input before it returned anything. This queue lets
        # no more than two jobs for each worker wait, which bounds the memory.
        pending = collections.deque()
        for job in jobs(documents):
            pending.append(pool.submit(encode, job, use_bytes))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def load_vocabulary():
    """Load GPT-2's vocabulary once, before the workers need it. Raises PrepareError."""
    try:
        import tiktoken
        tiktoken.get_encoding("gpt2")
    except Exception as error:  # from the network, from the cache folder, or a missing package
        raise PrepareError(
            f"tiktoken cannot load GPT-2's vocabulary ({type(error).__name__}); run once with a "
            "network, set TIKTOKEN_CACHE_DIR to a folder that has it, or pass --bytes") from error


# ---- from tokens to shards -----------------------------------------------------------------------

def write_corpus(
        encoded, out_dir, name="fineweb", val_tokens=None, shard_tokens=100_000_000, seed=0):
    """Shuffle the documents that encode_all() yields, split them, and write them as shards.

    With `val_tokens=None`, validation gets 5% of the tokens, at most 10,485,760. Returns a
    dictionary with the number of tokens in "train" and in "val", and the number of "documents".
    Raises PrepareError if there are no documents, or too few for two splits.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".incomplete-", dir=out_dir) as folder:
        # 1. Write all tokens to one file, in the order of the input.
        spool = Path(folder, "documents.u16")
        lengths = write_spool(spool, encoded)

        # 2. Shuffle the documents and split them.
        order = list(range(len(lengths)))
        random.Random(seed).shuffle(order)
        num_val_documents = count_val_documents(lengths[order], val_tokens)
        train = np.array(order[num_val_documents:])
        val = np.array(order[:num_val_documents])

        # 3. Write the shards, and give them their final names when all of them are there.
        starts = np.cumsum(lengths) - lengths  # (documents,) where each begins in the spool
        paths = []
        for split, chosen, first_number in (("train", train, 1), ("val", val, 0)):
            groups = divide(chosen, lengths[chosen], shard_tokens)
            for number, group in enumerate(groups, first_number):
                path = Path(folder, f"{name}_{split}_{number:06d}.bin")
                write_shard(path, read_spool(spool, starts[group], lengths[group]))
                paths.append(path)
        for path in paths:
            os.replace(path, out_dir / path.name)

    return {
        "train": int(lengths[train].sum()),
        "val": int(lengths[val].sum()),
        "documents": len(lengths),
    }


def write_spool(path, encoded):
    """Write all tokens to `path`. Returns the lengths of the documents: (documents,) int64.

    Raises PrepareError if there is no document.
    """
    lengths = []
    with open(path, "wb") as file:
        for tokens, some_lengths in encoded:
            file.write(tokens.tobytes())
            lengths += some_lengths
    if not lengths:
        raise PrepareError("the input holds no text; name files that do")
    return np.array(lengths)


def count_val_documents(lengths, val_tokens):
    """How many of the shuffled documents validation takes, to have at least `val_tokens` tokens.

    Raises PrepareError if it would take all of them.
    """
    total = int(lengths.sum())
    if val_tokens is None:
        val_tokens = min(total // 20, 10_485_760)
    # one token more, because the last prediction needs its target too
    count = 1 + int(np.searchsorted(np.cumsum(lengths), val_tokens + 1))
    if count >= len(lengths):
        raise PrepareError(
            f"the input is {len(lengths)} document(s) of {total:,} tokens, and {val_tokens:,} for "
            "validation leave none to train on; add text, lower --val_tokens, or cut a long text "
            "file into documents with --split_blank=1")
    return count


def divide(documents, lengths, shard_tokens):
    """Divide the documents of a split into groups, one for each shard.

    A new group begins with the first document that begins at or after the next multiple of
    `shard_tokens`, counted in tokens from the beginning of the split.
    """
    positions = np.cumsum(lengths) - lengths  # (documents,) where each begins in the split
    edges = 1 + np.flatnonzero(np.diff(positions // shard_tokens))
    return np.split(documents, edges)


def read_spool(path, starts, lengths):
    """Yield the tokens of the documents that begin at `starts` and have these lengths.

    The file stays mapped until the last one was yielded; Windows cannot remove it before that.
    """
    tokens = np.memmap(path, dtype="<u2", mode="r")
    for start, length in zip(starts, lengths):
        yield tokens[start : start + length]


# ---- the corpus that every Python brings along ---------------------------------------------------

def is_prose(paragraph):
    """Whether this is English rather than code, a table or a session of the interpreter.

    Prose is mostly letters, and long enough to say something.
    """
    num_letters = sum(c.isalpha() or c.isspace() for c in paragraph)
    says_something = len(paragraph.split()) > 6 or paragraph.endswith(".")
    return says_something and num_letters > 0.8 * len(paragraph) and ">>>" not in paragraph


def source_prose(source):
    """The docstrings and the blocks of comments in a Python source, in the order they stand there.

    Raises SyntaxError and ValueError.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes in the source
        tree = ast.parse(source)
    found = []  # (line, text)
    for block in re.finditer(r"(?m)(?:^[ \t]*#.*\n)+", source):
        text = re.sub(r"(?m)^[ \t]*#+ ?", "", block[0])
        found.append((source.count("\n", 0, block.start()), text))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)  # without its indentation
            if text:
                found.append((node.body[0].lineno, text))
    return "\n\n".join(text for _, text in sorted(found))


def python_texts():
    """Yield the topics of Python's language reference, then the prose of every library module.

    Both are those of the Python that runs this. Modules are read, not imported.
    """
    try:
        from pydoc_data.topics import topics
        for name in sorted(topics):
            yield topics[name]
    except ImportError:
        pass  # some distributions leave it out; the library is the larger part
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - skipped)  # os.walk goes only where this list says
        for name in sorted(names):
            if not name.endswith(".py"):
                continue
            try:
                yield source_prose(Path(folder, name).read_text(encoding="utf-8"))
            except (OSError, SyntaxError, ValueError):
                continue  # a template, or an old encoding


def python_documents():
    """Yield a document for each topic and module: its paragraphs of prose.

    Paragraphs that an earlier document had, such as licences, are left out.
    """
    seen = set()
    for text in python_texts():
        paragraphs = [part.strip("\n").rstrip() for part in re.split(r"\n[ \t]*\n", text)]
        fresh = [p for p in dict.fromkeys(paragraphs) if p not in seen and is_prose(p)]
        seen.update(fresh)
        if sum(map(len, fresh)) >= 200:
            yield "\n\n".join(fresh) + "\n"


def make_python_docs_corpus(out_dir, use_bytes=True, name="fineweb", **options):
    """Make the --python-docs corpus, unless `out_dir` has it already.

    Returns what write_corpus() returns, or None if there was nothing to do. Raises PrepareError as
    write_corpus() does (where Python comes without the sources of its library), and OSError if
    `out_dir` cannot be used.
    """
    if Path(out_dir, f"{name}_val_000000.bin").exists():  # validation is named last
        return None
    return write_corpus(encode_all(python_documents(), use_bytes), out_dir, name, **options)


# ---- command line --------------------------------------------------------------------------------

def fail(message):
    """End the program with one sentence on stderr."""
    print(f"prepare.py: {message}.", file=sys.stderr)
    sys.exit(2)


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("inputs", nargs="*", metavar="INPUT", help="text file, .jsonl file, or folder of them")
    add("--python-docs", action="store_true",
        help="use the English that Python itself brings along")
    add("--out", type=Path, required=True, help="folder for the shards")
    add("--name", default="fineweb", help="shards' name; the trainer looks for %(default)s")
    add("--bytes", action="store_true",
        help="a token per byte (ids 0-255), without a vocabulary file")
    add("--key", default="text", help="where a .jsonl line keeps its text; default %(default)s")
    add("--split_blank", type=int, metavar="N", help="cut text files at N or more blank lines")
    add("--val_tokens", type=int, help="validation tokens; default 5%%, at most 10,485,760")
    add("--shard_tokens", type=int, default=100_000_000, help="default %(default)s")
    add("--workers", type=int, default=os.cpu_count(), help="processes; default %(default)s")
    add("--seed", type=int, default=0, help="of the shuffle; default %(default)s")
    parser.error = fail
    args = parser.parse_args(argv)
    for option in ("split_blank", "val_tokens", "shard_tokens", "workers"):
        value = getattr(args, option)
        if value is not None and value < 1:
            fail(f"--{option} must be at least 1")
    if args.python_docs == bool(args.inputs):
        fail("name at least one INPUT or pass --python-docs, not both")
    return args


def make_corpus(args, options):
    """Make the corpus of the files that the command line names. Returns as write_corpus() does."""
    from tqdm import tqdm

    files = find_files(args.inputs)
    old = sorted(args.out.glob(f"{args.name}_*.bin"))
    if old:  # the trainer would mix them with the new ones
        raise PrepareError(
            f"{old[0]}: already there; delete the old shards, or choose another --out or --name")
    num_bytes = sum(path.stat().st_size for path in files)
    with tqdm(total=num_bytes, unit="B", unit_scale=True, disable=None) as bar:

        def documents():
            for path in files:
                yield from read_documents(path, args.key, args.split_blank, bar.update)

        encoded = encode_all(documents(), args.bytes, args.workers)
        return write_corpus(encoded, args.out, args.name, **options)


def main(argv=None):
    args = parse_args(argv)
    start = time.perf_counter()
    options = {
        "val_tokens": args.val_tokens,
        "shard_tokens": args.shard_tokens,
        "seed": args.seed,
    }
    try:
        if args.python_docs:
            counts = make_python_docs_corpus(args.out, args.bytes, args.name, **options)
        else:
            counts = make_corpus(args, options)
    except PrepareError as error:
        fail(error)
    except OSError as error:
        fail(f"cannot write to {args.out} ({error}); choose another --out, or make room there")
    if counts is None:
        print(f"{args.out}: {args.name} shards are there already")
    else:
        seconds = time.perf_counter() - start
        print(f"{args.out}: {counts['train']:,} training and {counts['val']:,} validation tokens "
              f"from {counts['documents']:,} documents in {seconds:.1f} s")


if __name__ == "__main__":
    main()
