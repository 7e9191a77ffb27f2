"""Turn your own text into the token shards that the trainer reads.

    python data/prepare.py story.txt                    # writes data/story, prints what to run next
    python data/prepare.py books/ notes.txt dump.jsonl --out data/mine
    python data/prepare.py story.txt --split_blank=1 --bytes --out data/story_bytes
    python data/prepare.py --python-docs --bytes --out data/pydocs      # a few MB, no download

INPUT is one of these, in UTF-8, or in UTF-16 with a byte-order mark:
    a file          one document, or with --split_blank=N the parts between N or more blank lines
    a .jsonl file   a JSON object on each line, with the text of one document under --key
    a folder        the files of text and of source code in it and in its subfolders (texts.py has
                    their endings), without hidden ones and without those that are not text

Without --out, OUT is data/NAME, with the name of the first INPUT. If that folder has the tokens of
another text, of an older version of this one, or was made with other options, OUT is data/NAME-2,
and so on. The shards are OUT/PREFIX_val_000000.bin, OUT/PREFIX_train_000001.bin, and so on. PREFIX
is --name, or else the name of OUT, for --python-docs `fineweb`. `shards.py` says what a shard is. A
document in it is the token 50256 followed by the document's own tokens. These are GPT-2's, or one
for each byte: with --bytes, or where GPT-2's vocabulary cannot be loaded. A shard has about
--shard_tokens tokens, in whole documents.

Blank documents are dropped, and so are those whose text an earlier one has. The others are
shuffled, in an order that --seed decides. The first ones in this order are the validation split,
so it is a fair sample of the input and shares no document with training. There is one exception.
With whole documents, validation may become more than half larger than it should be, as with a
single long text, or leave too little to train on. Then the last of its documents is cut: the end
goes to validation and the beginning to training. The number of --workers does not change the
result.

The input may be larger than memory. All tokens go through a temporary file in OUT, which takes 2
bytes for each token. Memory holds only the lengths and the hashes of the documents, and the text
that is being encoded: a few MB for each worker, or the largest document. The shards get their final
names at the very end, validation after training. Then OUT/corpus.json is written, which says what
they were made of. The same command finds it the next time, and has nothing to do.

Exit status: 0 done, 2 with one sentence on stderr that names the file and what to do, 130 and 143
stopped by Ctrl-C and by SIGTERM.
"""
import argparse
import collections
import json
import multiprocessing
import os
import platform
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

if __package__:
    from . import packages
else:  # run as a script
    import packages

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `stop` takes over: no traceback
    packages.require("numpy", "tqdm")

import numpy as np

if __package__:
    from . import gpt2
    from .python_docs import python_documents
    from .shards import SEPARATOR, ShardError, count_tokens, write_shard
    from .texts import PrepareError, distinct, errors_of, find_sources, is_text, read_documents
else:
    import gpt2
    from python_docs import python_documents
    from shards import SEPARATOR, ShardError, count_tokens, write_shard
    from texts import PrepareError, distinct, errors_of, find_sources, is_text, read_documents

DATA = Path(__file__).resolve().parent  # where the folder of a corpus is by default
RESERVED = {"fineweb10b", "pydocs", "__pycache__"}  # folders there that are not for your own text
RECORD = "corpus.json"
LEAST_TRAIN = 130  # tokens: a sequence of 128, its last target, and a separator
LEAST_VAL = 129
MOST_WORKERS = 61  # as many as Windows allows
MOST_TOKENS = 2**31 - 1  # of a shard, as the number in its header has 32 bits

# GPT-2 has one token for each of the 256 bytes, numbered in this order: first the bytes that are
# printing characters in Latin-1, then all others.
_printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
_others = sorted(set(range(256)) - set(_printing))
token_to_byte = np.array(_printing + _others, dtype=np.uint8)  # (256,), indexed by token
byte_to_token = np.argsort(token_to_byte).astype(np.uint16)  # (256,), indexed by byte


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
            body = gpt2.encode(text)
        tokens = np.empty(1 + len(body), dtype="<u2")
        tokens[0] = SEPARATOR
        tokens[1:] = body
        documents.append(tokens)
    return np.concatenate(documents), [len(tokens) for tokens in documents]


def jobs(documents):
    """Group documents into lists of about a million characters.

    A worker encodes one list at a time. Shorter ones would cost more time to send than to encode.
    """
    job = []
    num_characters = 0
    for text in documents:
        job.append(text)
        num_characters += len(text)
        if num_characters >= 1_000_000:
            yield job
            job = []
            num_characters = 0
    if job:
        yield job


def encode_all(documents, use_bytes, workers):
    """Yield what encode() returns for every job, in order, encoded by `workers` processes.

    Raises PrepareError if GPT-2's vocabulary is needed and cannot be had, or if a worker dies.
    """
    if not use_bytes:
        load_vocabulary()
    if workers == 1:
        for job in jobs(documents):
            yield encode(job, use_bytes)
        return
    pool = start_pool(workers)
    try:
        # The pool's own map() would read all the input before it returned anything. This queue lets
        # no more than two jobs for each worker wait, which bounds the memory.
        pending = collections.deque()
        for job in jobs(documents):
            pending.append(pool.submit(encode, job, use_bytes))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BaseException as error:
        for process in multiprocessing.active_children():
            process.kill()  # it may be in the middle of a long document
        pool.shutdown(wait=False, cancel_futures=True)  # a queue to dead workers may never end
        if isinstance(error, BrokenProcessPool):
            fault = "a worker process died, perhaps for lack of memory"
            raise PrepareError(f"{fault}; try a lower --workers") from error
        raise
    pool.shutdown()


def start_pool(workers):
    """A pool of processes that leave Ctrl-C and SIGTERM to this one."""
    pool = ProcessPoolExecutor(workers, initializer=start_worker)
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        return pool
    # A fork runs hooks of the library, and Python drops an exception that a signal raises in one.
    # So the signals wait until the workers are there, which the first job brings about.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    pool.submit(os.getpid)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pool


def start_worker():
    """Leave Ctrl-C and SIGTERM to the main process, and end when it ends, however that happens."""
    def end_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def load_vocabulary(seconds=30):
    """Load GPT-2's vocabulary once, before the workers need it. Raises PrepareError."""
    try:
        gpt2.load(seconds)
    except gpt2.VocabularyError as error:
        raise PrepareError(
            f"{error}; run once with a network, set TIKTOKEN_CACHE_DIR to a folder that has it, or "
            "give --tokens=bytes (for the presets laptop and char)") from None


def choose_tokens(wanted, say):
    """"gpt2" or "bytes", for a `wanted` that may also be "auto": GPT-2's tokens if they can be had.

    Raises PrepareError if exactly "gpt2" is wanted and its vocabulary cannot be had.
    """
    if wanted == "bytes":
        return "bytes"
    try:
        load_vocabulary()
    except PrepareError as error:
        if wanted == "gpt2":
            raise
        fault = str(error).split(";")[0]
        say(f"prepare.py: {fault}, so every byte becomes a token. For GPT-2's tokens, connect to "
            "the network or set TIKTOKEN_CACHE_DIR, and run again with --tokens=gpt2.")
        return "bytes"
    return "gpt2"


# ---- from tokens to shards -----------------------------------------------------------------------

def write_corpus(
        documents, out_dir, name="fineweb", use_bytes=True, workers=1, *, val_tokens=None,
        shard_tokens=100_000_000, seed=0, old=(), record=None, source="the input"):
    """Encode the documents, shuffle them, split them, and write them as shards.

    With `val_tokens=None`, validation gets 5% of the tokens, at most 10,485,760. The files `old`
    are removed when the new ones are complete. Returns a dictionary with "train_tokens",
    "val_tokens", and the numbers of "documents" and of "duplicates" among the input. If `record` is
    a dictionary, both together become corpus.json.

    Raises PrepareError, which speaks of `source`, if there are too few tokens for two splits, or as
    encode_all() does; also if corpus.json is there already and not ours. Raises OSError if
    `out_dir` cannot be used.
    """
    out_dir = Path(out_dir)
    if record is not None and (out_dir / RECORD).exists() and not read_record(out_dir):
        raise PrepareError(f"{out_dir / RECORD}: already there, and not written by this program; "
                           "move it away, or choose another --out")
    in_use = sweep(out_dir)
    if in_use:
        raise PrepareError(f"{in_use}: in use by another process; wait for its end, or delete it")
    prefix = f".incomplete-{platform.node()}-{os.getpid()}-"
    with (made_folder(out_dir),
          tempfile.TemporaryDirectory(prefix=prefix, dir=out_dir) as folder):
        # 1. Write all tokens to one file, the spool, in the order of the input.
        spool = Path(folder, "documents.u16")
        dropped = collections.Counter()
        with closing(encode_all(distinct(documents, dropped), use_bytes, workers)) as encoded:
            lengths = write_spool(spool, encoded)
        longest = max(lengths, default=0)
        if longest + shard_tokens > MOST_TOKENS:
            raise PrepareError(f"{source}: a document of {longest:,} tokens is too long for a "
                               "shard; split it by --split_blank, or into several files")

        # 2. Shuffle the documents and split them.
        order = list(range(len(lengths)))
        random.Random(seed).shuffle(order)
        starts = np.cumsum(lengths) - lengths  # (documents,) where each begins in the spool
        shuffled = np.stack([starts, lengths], axis=1)[order]
        if dropped["duplicates"]:
            source += f", without its {dropped['duplicates']:,} duplicate documents"
        splits = split_documents(shuffled, val_tokens, source)

        # 3. Write the shards and the record.
        counts = {"documents": len(lengths), "duplicates": dropped["duplicates"]}
        paths = []
        for split, first_number in (("train", 1), ("val", 0)):
            counts[f"{split}_tokens"] = 0
            for number, group in enumerate(divide(splits[split], shard_tokens), first_number):
                path = Path(folder, f"{name}_{split}_{number:06d}.bin")
                write_shard(path, read_spool(spool, group))
                counts[f"{split}_tokens"] += count_tokens(path)
                paths.append(path)
        if record is not None:
            path = Path(folder, RECORD)
            path.write_text(json.dumps(record | counts, indent=1) + "\n", encoding="utf-8")
            paths.append(path)

        # 4. Give them their final names, now that all of them are there.
        for path in old:
            path.unlink()
        for path in paths:
            os.replace(path, out_dir / path.name)
    return counts


@contextmanager
def made_folder(path):
    """Make a folder, and those around it, and remove them in the end if they are still empty."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # one is not empty
            for folder in missing:
                folder.rmdir()


def sweep(out_dir):
    """Remove the temporary folders of processes that were killed.

    Returns the folder of another process that still runs, or may run on another host, or None.
    """
    in_use = None
    for folder in Path(out_dir).glob(".incomplete-*-*-*"):
        host, process, _ = folder.name.removeprefix(".incomplete-").rsplit("-", 2)
        if not re.fullmatch("[0-9]{1,9}", process):
            continue
        own = host == platform.node() and int(process) == os.getpid()
        if host != platform.node() or (not own and process_runs(int(process))):
            in_use = folder
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return in_use


def process_runs(number):
    """Whether there is a process with this number on this machine."""
    if os.name == "nt":  # where os.kill() would end it
        import ctypes
        query = 0x1000  # PROCESS_QUERY_LIMITED_INFORMATION
        handle = ctypes.windll.kernel32.OpenProcess(query, False, number)
        if handle:
            ctypes.windll.kernel32.CloseHandle(handle)
        return bool(handle)
    try:
        os.kill(number, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return True


def write_spool(path, encoded):
    """Write all tokens to `path`. Returns the lengths of the documents: (documents,) int64."""
    lengths = []
    with open(path, "wb") as file:
        for tokens, some_lengths in encoded:
            file.write(tokens.tobytes())
            lengths += some_lengths
    return np.array(lengths, dtype=np.int64)


def split_documents(documents, val_tokens, source):
    """Divide the shuffled documents among "train" and "val".

    `documents` is (documents, 2) int64: where each begins in the spool, and its length. Returns two
    arrays of the same kind, in a dictionary. Validation gets the first documents, at least
    `val_tokens` tokens. If they would be more than half as much again, or leave too little to train
    on, then the last of them is cut in two. Raises PrepareError if there are too few tokens.
    """
    lengths = documents[:, 1]
    total = int(lengths.sum())
    if total == 0:
        raise PrepareError(f"{source}: no text in it; name a file that has some")
    if val_tokens is None:
        share = min(total // 20, 10_485_760 + 1)
    else:
        share = val_tokens + 1  # one more, because the last prediction needs its target too
    share = max(share, LEAST_VAL)
    if total < share + LEAST_TRAIN:
        remedy = "add text" if val_tokens is None else "add text or lower --val_tokens"
        raise PrepareError(
            f"{source}: {total:,} tokens of text are too few, because validation takes {share:,} "
            f"and training needs {LEAST_TRAIN} or more; {remedy}")

    ends = np.cumsum(lengths)
    last = int(np.searchsorted(ends, share))  # the document that fills the share
    excess = int(ends[last]) - share
    if excess <= share // 2 and total - ends[last] >= LEAST_TRAIN:
        return {"train": documents[last + 1 :], "val": documents[: last + 1]}
    start, length = documents[last].tolist()
    tail = length - excess - 1  # one less, because the tail gets a separator of its own
    tail = max(tail, 1)
    head = length - tail
    return {
        "train": np.concatenate([[[start, head]], documents[last + 1 :]]),
        "val": np.concatenate([documents[:last], [[start + head, tail]]]),
    }


def divide(pieces, shard_tokens):
    """Divide the documents of a split into groups, one for each shard.

    A new group begins with the first document that begins at or after the next multiple of
    `shard_tokens`, counted in tokens from the beginning of the split.
    """
    lengths = pieces[:, 1]
    positions = np.cumsum(lengths) - lengths  # (documents,) where each begins in the split
    edges = 1 + np.flatnonzero(np.diff(positions // shard_tokens))
    return np.split(pieces, edges)


def read_spool(path, pieces):
    """Yield the tokens of each document. The second part of one that was cut gets its separator.

    The file stays mapped until the last one was yielded; Windows cannot remove it before that.
    """
    tokens = np.memmap(path, dtype="<u2", mode="r")
    for start, length in pieces.tolist():
        document = tokens[start : start + length]
        if document[0] != SEPARATOR:
            document = np.concatenate([[SEPARATOR], document])
        yield document


def make_python_docs_corpus(out_dir, use_bytes=True, name="fineweb", **options):
    """Make the --python-docs corpus, unless `out_dir` has it already.

    Shards without corpus.json are left as they are. Returns what write_corpus() returns, or None if
    there was nothing to do. Raises PrepareError if such shards are not whole, if `out_dir` has
    shards of other texts, and as write_corpus() does (where Python comes without the sources of its
    library). Raises OSError if `out_dir` cannot be used.
    """
    record = {"python": platform.python_version(), "options": options, "name": name,
              "tokens": "bytes" if use_bytes else "gpt2"}
    found = read_record(out_dir)
    if record.items() <= found.items() and are_complete(found, out_dir):
        return None
    old = shards_in(out_dir, name)
    if old and not found:
        check_whole(out_dir, name)
        return None
    refuse_foreign_shards(out_dir, old if "python" in found else [])
    return write_corpus(
        python_documents(), out_dir, name, use_bytes, **options, old=old, record=record)


# ---- where a corpus is, and what it was made of --------------------------------------------------

def safe_name(text):
    """`text` without the characters that a shell, a file system or a glob takes for something else.

    The shards of my_train would be my_train_val_000000.bin and so on, which the trainer would take
    for training shards; this makes it my-train. Never returns an empty name.
    """
    name = re.sub(r"[^\w.-]", "_", text).strip("._-")[:60]
    name = re.sub(r"(?i)_(?=(train|val)(_|$))", "-", name)
    return name or "text"


def default_folder(sources, args, options, say):
    """The folder in data/ for a corpus of args.inputs: data/NAME, with the name of the first one.
    It is data/NAME_tokens if data/NAME has another purpose, and NAME-2 and so on if the folder has
    the tokens of other inputs, of an older version of these, or was made with other options: runs
    may still use it. Raises as describe() does."""
    paths = absolute(args.inputs)
    path = Path(paths[0])
    name = safe_name(path.name if path.is_dir() else path.stem)
    while name.lower() in RESERVED or holds_other_things(DATA / name):
        name += "_tokens"
    files = [describe(path) for path, _ in sources]
    older = None
    for folder in (DATA / name, *DATA.glob(f"{name}-*")):
        record = read_record(folder)
        if is_made_of(record, wanted_record(files, args, options, folder), args.tokens):
            return folder
        if record.get("inputs") == paths:
            older = folder, record.get("files") == files
    folder = DATA / name
    number = 2
    while read_record(folder) or holds_other_things(folder):
        folder = DATA / f"{name}-{number}"
        number += 1
    if older:
        there, is_same_text = older
        what = "has this text, made with other options"
        if not is_same_text:
            what = "has an older version of this text"
        say(f"prepare.py: {from_here(there)} {what}; it stays, for runs that use it.")
    return folder


def absolute(inputs):
    return [os.path.abspath(path) for path in inputs]


def holds_other_things(path):
    """Whether there is something at `path` that this program has not put there."""
    if not path.is_dir():
        return path.exists()
    names = [name for name in os.listdir(path) if not name.startswith(".incomplete-")]
    return bool(names) and not read_record(path)


def read_record(folder):
    """What OUT/corpus.json says, or an empty dictionary if this program has written none there."""
    try:
        record = json.loads(Path(folder, RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(record, dict) and {"options", "name", "tokens"} <= record.keys()
    return record if is_ours else {}


def shards_in(folder, name="*", split=None):
    """The shards of this name in a folder, of one split or of both."""
    if split is None:
        return shards_in(folder, name, "train") + shards_in(folder, name, "val")
    return sorted(Path(folder).glob(f"{name}_{split}_*.bin"))


def check_whole(folder, name):
    """Raise PrepareError unless there are shards of both splits, all of them whole."""
    try:
        for split in ("train", "val"):
            if not sum(map(count_tokens, shards_in(folder, name, split))):
                raise ShardError(f"{folder} has no {split} shards")
    except ShardError as error:
        reason = str(error).partition(";")[0]
        raise PrepareError(f"{reason}, so making this corpus was broken off; delete the .bin files "
                           f"in {folder} to make it anew") from None


def refuse_foreign_shards(folder, own):
    """Raise PrepareError if the folder has shards that are not among `own`."""
    for path in shards_in(folder):
        if path not in own:  # the trainer would mix it with the new ones
            raise PrepareError(
                f"{path}: already there, and made of other files or with other options; delete the "
                "old shards, or choose another --out")


def are_complete(record, folder):
    """Whether the shards that the record speaks of are there, with as many tokens as it says."""
    try:
        for split in ("train", "val"):
            shards = shards_in(folder, record["name"], split)
            if sum(map(count_tokens, shards)) != record.get(f"{split}_tokens"):
                return False
    except (OSError, ShardError):
        return False
    return True


def wanted_record(files, args, options, folder):
    """What corpus.json would say of a corpus of these files in this folder. `files` are as
    describe() returns them."""
    return {
        "files": files,
        "options": options | {"key": args.key, "split_blank": args.split_blank},
        "name": args.name or safe_name(Path(os.path.abspath(folder)).name),
    }


def is_made_of(record, wanted, tokens):
    """Whether a corpus with this record is the wanted one. `tokens` may be the same as then
    ("auto", too), or name the kind that came of it."""
    same_kind = tokens in (record.get("wanted_tokens"), record.get("tokens"))
    return same_kind and wanted.items() <= record.items()


def make_corpus(sources, args, options, say):
    """Make the corpus of these files in args.out, unless it is there already.

    Only damaged shards of the same corpus are replaced. Returns what corpus.json says, and whether
    it is new. Raises as write_corpus() does.
    """
    from tqdm import tqdm

    # 1. See what is there.
    files = [describe(path) for path, _ in sources]
    wanted = wanted_record(files, args, options, args.out)
    name = wanted["name"]
    record = read_record(args.out)
    is_same = is_made_of(record, wanted, args.tokens)
    if is_same and are_complete(record, args.out):
        return record, False
    old = shards_in(args.out, name) if is_same else []
    refuse_foreign_shards(args.out, old)

    # 2. Make what is not.
    tokens = choose_tokens(args.tokens, say)
    record = wanted | {
        "inputs": absolute(args.inputs), "wanted_tokens": args.tokens, "tokens": tokens}
    num_bytes = sum(file["size"] for file in files)
    # For less than 4 MiB each, starting a worker costs more than it saves.
    workers = min(args.workers, 1 + num_bytes // (4 << 20))
    skipped = []
    with tqdm(total=num_bytes, unit="B", unit_scale=True, disable=None) as bar:

        def documents():
            for path, is_named in sources:
                if is_named or is_text(path):
                    yield from read_documents(path, args.key, args.split_blank, bar.update)
                else:
                    skipped.append(path)

        source = args.inputs[0] + " and the others" * (len(args.inputs) > 1)
        try:
            counts = write_corpus(
                documents(), args.out, name, tokens == "bytes", workers, **options, old=old,
                record=record, source=source)
        except PrepareError:
            if len(skipped) < len(sources):
                raise
            raise PrepareError(f"{source}: no file in UTF-8, nor is the first one, {skipped[0]}; "
                               "convert them, for example with iconv") from None
    if skipped:
        say(f"prepare.py: left out {len(skipped):,} file(s) not in UTF-8, first {skipped[0]}.")
    return record | counts, True


def describe(path):
    """What corpus.json says about an input file. Raises PrepareError."""
    with errors_of(path):
        status = path.stat()
    path = os.path.abspath(path)
    return {"path": path, "size": status.st_size, "changed": status.st_mtime_ns}


# ---- command line --------------------------------------------------------------------------------

class Stopped(BaseException):
    """Ctrl-C or SIGTERM; the argument is the number of the signal."""


def stop(number, _):
    """What Ctrl-C and SIGTERM do."""
    raise Stopped(number)


def fail(message):
    """End the program with one sentence on stderr."""
    print(f"prepare.py: {message}.", file=sys.stderr)
    sys.exit(2)


def print_to(file, line):
    """Print a line; do nothing if that cannot be, as after `| head -1`: the work is done anyway."""
    try:
        print(line, file=file, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def from_here(path):
    """The path as a command here would name it: relative if it lies below."""
    path = Path(os.path.abspath(path))
    here = Path.cwd()
    return (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()


def quoted(argument):
    """The argument as a shell takes it."""
    return f'"{argument}"' if os.name == "nt" and " " in argument else shlex.quote(argument)


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("inputs", nargs="*", metavar="INPUT", help="text file, .jsonl file, or folder of them")
    add("--python-docs", action="store_true",
        help="use the English that Python itself brings along")
    add("--out", help="folder for the shards; default data/NAME of the first INPUT")
    add("--name", help="shards' name; default that of the folder, or fineweb for --python-docs")
    add("--tokens", choices=["auto", "gpt2", "bytes"], default="auto",
        help="GPT-2's, a token per byte (ids 0-255), or GPT-2's if its vocabulary can be loaded; "
             "default %(default)s")
    add("--bytes", action="store_const", const="bytes", dest="tokens",
        help="short for --tokens=bytes")
    add("--key", default="text", help="where a .jsonl line keeps its text; default %(default)s")
    add("--split_blank", type=int, metavar="N", help="cut text files at N or more blank lines")
    add("--val_tokens", type=int, help="validation tokens; default 5%%, at most 10,485,760")
    add("--shard_tokens", type=int, default=100_000_000, help="default %(default)s")
    add("--workers", type=int, default=min(os.cpu_count() or 1, MOST_WORKERS),
        help="processes; default %(default)s")
    add("--seed", type=int, default=0, help="of the shuffle; default %(default)s")
    add("--print_folder", action="store_true",
        help="print the folder alone on stdout, and everything else on stderr")
    parser.error = fail
    args = parser.parse_args(argv)
    for option in ("split_blank", "val_tokens", "shard_tokens", "workers"):
        value = getattr(args, option)
        if value is not None and value < 1:
            fail(f"--{option} must be at least 1")
    args.workers = min(args.workers, MOST_WORKERS)
    if args.shard_tokens > MOST_TOKENS // 2:
        fail(f"--shard_tokens must be at most {MOST_TOKENS // 2:,}")
    if args.out == "":
        fail("--out is empty; name a folder")
    args.out = args.out and Path(args.out)
    if args.python_docs == bool(args.inputs):
        fail("name at least one INPUT or pass --python-docs, not both")
    if args.python_docs and args.out is None:
        fail("--python-docs needs --out; pass --out data/pydocs")
    if args.name is not None and args.name != safe_name(args.name):
        fail(f"--name={args.name} cannot name shards; pass --name={safe_name(args.name)}")
    return args


def main(argv=None):
    args = parse_args(argv)
    say = partial(print_to, sys.stderr if args.print_folder else sys.stdout)
    start = time.perf_counter()
    options = {
        "val_tokens": args.val_tokens,
        "shard_tokens": args.shard_tokens,
        "seed": args.seed,
    }
    left_out = []
    try:
        if args.python_docs:
            tokens = choose_tokens(args.tokens, say)
            counts = make_python_docs_corpus(
                args.out, tokens == "bytes", args.name or "fineweb", **options)
            is_new = counts is not None
        else:
            sources, left_out = find_sources(args.inputs)
            if args.out is None:
                args.out = default_folder(sources, args, options, say)
            counts, is_new = make_corpus(sources, args, options, say)
            tokens = counts["tokens"]
    except PrepareError as error:
        fail(error)
    except MemoryError:
        fail("a document needs more memory than there is; --split_blank=1 makes documents of the "
             "parts between blank lines, and so do several smaller files")
    except OSError as error:
        remedy = "make room there, or give yourself the right to write there"
        if not args.print_folder:  # run.sh has no --out
            remedy += ", or choose another --out"
        fail(f"cannot write to {args.out or DATA} ({error.strerror}); {remedy}")

    folder = from_here(args.out)
    if is_new:
        seconds = time.perf_counter() - start
        plural = "s" * (counts["documents"] != 1)
        say(f"{folder}: {counts['train_tokens']:,} training and {counts['val_tokens']:,} "
            f"validation tokens ({tokens}) from {counts['documents']:,} document{plural} "
            f"(duplicates dropped: {counts['duplicates']:,}) in {seconds:.1f} s")
        if left_out:
            say(f"prepare.py: left out {len(left_out):,} file(s) whose names do not end as those "
                f"of texts, first {left_out[0]}; name such a file to have its text, too.")
    else:
        say(f"{folder}: already there, made of the same input")
    if args.print_folder:
        print_to(sys.stdout, folder)
    elif args.inputs:
        script = quoted(from_here(DATA.parent / "train_gpt.py"))
        say(f"{quoted(from_here(sys.executable))} {script} {quoted(f'--data_dir={folder}')}")


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if sys.stdout is None:  # closed, as by >&-
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    sys.stdout.reconfigure(errors="backslashreplace")  # some Windows consoles lack characters
    status = 0
    try:
        main()
    except SystemExit as end:
        status = end.code or 0
    except Stopped as stopped:
        number = stopped.args[0]
        status = 128 + number
        name = signal.Signals(number).name
        print(f"prepare.py: stopped by {name}; run it again to begin anew.", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)  # a usual exit would wait for the queue of workers that were killed
