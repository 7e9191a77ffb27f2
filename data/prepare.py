"""Turn your own text into the token shards that the trainer reads.

    python data/prepare.py story.txt                    # writes data/story, prints what to run next
    python data/prepare.py books/ notes.txt dump.jsonl --out data/mine
    python data/prepare.py stories.txt --split='<|endoftext|>'
    python data/prepare.py --python-docs            # data/pydocs, a few MB, in bytes, no download

INPUT is one of these, in UTF-8, or in UTF-16 with a byte-order mark:
    a text          one document, or with --split or --split_blank several
    JSON lines      an object on each line, with a text, as above, under --key. A file is taken for
                    JSON lines if its first line is an object, or if it ends in .jsonl, .ndjson,
                    .jsonlines or .json
    a folder        all files in it and in its subfolders, without hidden ones and linked folders.
                    Tables (.csv), .json that is no JSON lines, and what is no text in UTF-8 or
                    UTF-16 are left out, and a note says how many they are; but not a .jsonl with
                    a mistake

The shards are OUT/NAME_val_000000.bin and OUT/NAME_train_000001.bin (shards.py says what a shard
is). Without --out, OUT is data/NAME, with the name of the first INPUT, or data/NAME-2 and so on if
that is made of something else. OUT/corpus.json has the files and options of the command; the same
command finds it the next time, and has nothing to do, unless a file has changed. Tokens are
GPT-2's, or one for each byte.

Blank documents are dropped, and so are those whose text an earlier one has. The others are shuffled
and divided: 5% of the tokens, but 129 to 10.5M, are for validation (`split_documents`). Memory
holds all tokens, at two bytes each, and the text of up to 256 documents, or of one file if it has
more.

Exit status: 0 done, 2 with one sentence on stderr that names the file and what to do.
"""
import argparse
import hashlib
import json
import os
import random
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import count, islice
from multiprocessing.pool import ThreadPool
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, without a traceback
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # where all modules lie

import numpy as np
from tqdm import tqdm

from data import BadInput, Parser, gpt2, require, texts
from data.python_docs import python_documents
from data.shards import SEPARATOR, write_shard
from records.console import end_in_order, to_type

DATA = Path(__file__).resolve().parent  # where the folder of a corpus is by default
LEAST_TRAIN = 130  # tokens: a sequence of 128, its last target, and a separator
LEAST_VAL = 129
MOST_VAL = 10_485_760 + 1  # one more, because the last prediction needs its target too


def encode_all(documents: Iterable[str], use_bytes: bool) -> Iterator[np.ndarray]:
    """Yields the tokens of each document, SEPARATOR first: (n,) uint16."""
    vocabulary = None if use_bytes else gpt2.load()

    def encode(text: str) -> np.ndarray:
        if use_bytes:
            return gpt2.bytes_of(text)
        valid = text.encode("utf-8", "replace").decode()  # JSON may hold half of a surrogate pair
        return vocabulary.encode_to_numpy(valid, disallowed_special=())

    documents = iter(documents)
    with ThreadPool() as pool:
        while job := list(islice(documents, 256)):
            for body in pool.imap(encode, job):
                yield np.concatenate([[SEPARATOR], body], dtype="<u2", casting="unsafe")


def write_corpus(documents: Iterable[str], folder: Path, use_bytes: bool, source: str) -> dict:
    """Encodes the documents, shuffles them, splits them, and writes them to a folder as shards.
    Returns how many train_tokens, val_tokens, documents and duplicates there are, by these names.
    Raises OSError, and BadInput, which speaks of `source`, if two splits need more tokens."""
    num_read = 0
    distinct = {}  # by their hash
    for tokens in encode_all(documents, use_bytes):
        num_read += 1
        distinct.setdefault(hashlib.sha256(tokens).digest(), tokens)
    encoded = list(distinct.values())
    random.Random(0).shuffle(encoded)
    train, val = split_documents(encoded, source)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.json").write_text("{}\n", "utf-8")  # until all is written (`folder_for`)
    name = safe_name(folder.name)
    write_shard(folder / f"{name}_train_000001.bin", train)
    write_shard(folder / f"{name}_val_000000.bin", val)
    return {"train_tokens": sum(map(len, train)), "val_tokens": sum(map(len, val)),
            "documents": len(encoded), "duplicates": num_read - len(encoded)}


def split_documents(documents: list[np.ndarray],
                    source: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Divides the shuffled documents, (n,) uint16 each, into those for training and validation.

    Validation gets the first documents, 5% of the tokens: a fair sample of the input, which shares
    no document with training. If they would be more than half as much again, as with a single long
    text, or leave too little to train on, then the last of them is cut: its end goes to validation
    and its beginning to training. Raises BadInput if there are too few tokens.
    """
    total = sum(map(len, documents))
    require(total > 0, f"{source}: no text in it; name a file that has some")
    share = max(min(total // 20, MOST_VAL), LEAST_VAL)
    require(total >= share + LEAST_TRAIN, f"{source}: {total:,} tokens of text are too few; at "
            f"least {LEAST_VAL + LEAST_TRAIN} are needed, so add text")

    ends = np.cumsum([len(document) for document in documents])
    last = int(np.searchsorted(ends, share))  # the document that fills the share
    excess = int(ends[last]) - share
    if excess <= share // 2 and total - ends[last] >= LEAST_TRAIN:
        return documents[last + 1 :], documents[: last + 1]
    document = documents[last]
    head = min(excess + 1, len(document) - 1)  # one more, as the tail gets a separator of its own
    tail = np.concatenate([[SEPARATOR], document[head:]])
    return [document[:head], *documents[last + 1 :]], [*documents[:last], tail]


def safe_name(text: str) -> str:
    """`text` without the characters that a shell, a file system or a glob takes for something else.

    The shards of my_train would be my_train_val_000000.bin and so on, which the trainer would take
    for training shards; this makes it my-train. Never returns an empty name.
    """
    name = re.sub(r"[^\w.-]", "_", text).strip("._-")[:60]
    name = re.sub(r"(?i)_(?=(train|val)(_|$))", "-", name)
    return name or "text"


def folder_for(args: argparse.Namespace, made_of: dict) -> tuple[Path, bool]:
    """The folder of the corpus of `made_of`, and whether it is there already. Raises BadInput."""
    if args.out:
        first = Path(os.path.realpath(args.out))
    else:
        path = Path(os.path.abspath(args.inputs[0]))
        first = DATA / safe_name(path.name if path.is_dir() else path.stem)
    folder = first
    for number in count(2):
        record = folder / "corpus.json"
        try:
            made = json.loads(record.read_text("utf-8") or "{}")  # a full disk leaves it empty
        except (OSError, ValueError):  # there is none, or it is a text of somebody
            made = None
        if isinstance(made, dict) and made_of.items() <= made.items():
            return folder, True
        if made == {} or not folder.exists() or folder.is_dir() and not any(folder.iterdir()):
            return folder, False
        require(not args.out, f"{args.out}: holds other files, or was made of other text or with "
                "other options, or is a file; name a new folder with --out")
        folder = first.with_name(f"{first.name}-{number}")


def make_corpus(args: argparse.Namespace) -> tuple[Path, str]:
    """Makes the corpus, unless it is there already. Returns its folder, and what to say of it.
    Raises BadInput and OSError."""
    start = time.perf_counter()
    files = [path for item in args.inputs for path in texts.find_files(item)]
    made_of = {
        "files": [[os.path.abspath(path), path.stat().st_size, path.stat().st_mtime_ns]
                  for path in files],  # a file that was changed has another time
        "options": {name: getattr(args, name)
                    for name in ("python_docs", "key", "split", "split_blank")},
        "tokens": args.tokens}
    folder, is_made = folder_for(args, made_of)
    if is_made:
        return folder, "already made of this text; used again"

    documents = python_documents() if args.python_docs else texts.read_all(args.inputs, args)
    counts = write_corpus(tqdm(documents, unit=" documents", disable=None), folder,
                          args.tokens == "bytes", ", ".join(args.inputs))
    (folder / "corpus.json").write_text(json.dumps(made_of | counts, indent=1) + "\n", "utf-8")
    plural = "s" * (counts["documents"] != 1)
    return folder, (
        f"{counts['train_tokens']:,} training and {counts['val_tokens']:,} validation tokens "
        f"({args.tokens}) from {counts['documents']:,} document{plural} (duplicates dropped: "
        f"{counts['duplicates']:,}) in {time.perf_counter() - start:.1f} s")


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("inputs", nargs="*", metavar="INPUT", help="text, JSON lines, or a folder of them")
    add("--python-docs", action="store_true",
        help="use the English that Python itself brings along")
    add("--out", help="folder for the shards; default data/NAME of the first INPUT")
    add("--tokens", choices=["gpt2", "bytes"],
        help="bytes: a token per byte (ids 0-255), as always with --python-docs; default: gpt2 if "
        "there is a GPU, else bytes")
    add("--bytes", action="store_const", const="bytes", dest="tokens",
        help="short for --tokens=bytes")
    texts.add_options(parser)
    add("--print_folder", action="store_true",
        help="print the folder alone on stdout, and everything else on stderr")
    args = parser.parse_intermixed_args(argv)
    require(args.python_docs != bool(args.inputs),
            "name a file or folder of text, or give --python-docs alone")
    if args.python_docs:
        args.out = args.out or DATA / "pydocs"
        args.tokens = "bytes"  # it is the text of the preset laptop
    if not args.tokens:
        import torch  # which takes seconds
        args.tokens = "gpt2" if torch.cuda.is_available() else "bytes"
    return args


def work(argv: list[str]) -> None:
    """Makes the corpus that the command line asks for. Raises BadInput."""
    args = parse_args(argv)
    try:
        folder, result = make_corpus(args)
    except OSError as error:
        raise BadInput(
            f"cannot write to {args.out or DATA} ({error.strerror}); make room there, or give "
            "yourself the right to write there, and run the same command again") from None
    screen = sys.stderr if args.print_folder else sys.stdout
    print(f"{os.path.relpath(folder)}: {result}", file=screen)
    if args.print_folder:
        print(os.path.relpath(folder))
    elif args.inputs:
        print(to_type(shlex.join(["train_gpt.py", f"--data_dir={os.path.relpath(folder)}"])))


if __name__ == "__main__":
    sys.exit(end_in_order("prepare.py", work, sys.argv[1:]))
