"""Fetch the first N of FineWeb's 103 cached GPT-2-token training shards, and the validation shard.

    python data/fineweb.py 9    # 9 x 100M training tokens + 100M validation tokens, 200 MB a shard
    python data/fineweb.py 103 --dir /scratch/fineweb10B

`shards.py` says what a shard is. Each one arrives in DIR/.incomplete, is checked there, and only
then gets its final name, so every file named `fineweb_*.bin` is whole. After an interruption, run
the same command again: it fetches only what is missing or damaged. If the connection drops, the
download goes on in the middle of its shard; if the process is killed, that shard starts again.

Exit status: 0 all there, 1 could not be fetched, 2 bad arguments, 130 interrupted; a failure is one
sentence on stderr.
"""
import argparse
import os
import shutil
import sys
import time
from pathlib import Path

if __package__:
    from . import packages
else:  # run as a script
    import packages

if __name__ == "__main__":
    packages.require("numpy")

if __package__:
    from .shards import DamagedShard, ShardError, count_tokens
else:
    from shards import DamagedShard, ShardError, count_tokens

REPO = "kjj0/fineweb10B-gpt2"  # a Hugging Face dataset repository
TRAIN_SHARDS = 103
AGAIN = "run the same command again to go on from here"


class FetchError(RuntimeError):
    """A shard that could not be fetched; the message is a sentence for the user."""


def shard_names(n):
    """The validation shard and the first `n` training shards, in the order they are fetched."""
    return ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, n + 1)]


def check_online():
    """Send one small request without retries, so that a missing network shows at once.

    Raises FetchError.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, logging
    logging.set_verbosity_error()  # the client's warnings repeat what we say

    url = hf_hub_url(REPO, shard_names(0)[0], repo_type="dataset")
    try:
        get_hf_file_metadata(url, timeout=10)
    except Exception as error:  # the client's exceptions share no base class across its versions
        raise FetchError(
            f"{REPO} cannot be reached ({brief(error)}); connect to the network and {AGAIN}, "
            "or make shards from text you have with data/prepare.py") from error


def fetch_shard(name, folder, attempts=6):
    """Download one shard, check it, give it its final name in `folder`, return its token count.

    Pauses 1, 2, 4, ... seconds after each failed attempt, and raises FetchError after the last one.
    """
    from huggingface_hub import hf_hub_download

    # inside `folder`, so that the rename below stays on one filesystem and is atomic
    incomplete = folder / ".incomplete"
    for attempt in range(attempts):
        try:
            arrived = Path(hf_hub_download(REPO, name, repo_type="dataset", local_dir=incomplete))
            try:
                tokens = count_tokens(arrived)
            except DamagedShard:
                arrived.unlink()  # or the client would hand the next attempt the same bytes
                raise
            os.replace(arrived, folder / name)
            return tokens
        except Exception as error:
            reason = brief(error)
            if attempt == attempts - 1:
                raise FetchError(f"{name} could not be fetched ({reason}); {AGAIN}") from error
            pause = 2**attempt
            print(f"{name}: {reason}; trying again in {pause} s", flush=True)
            time.sleep(pause)


def fetch(n, folder):
    """Bring the validation shard and the first `n` training shards into `folder`.

    Raises FetchError and OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    for name in shard_names(n):
        fault = fault_of(folder / name)
        if fault is not None:
            missing.append(name)
        if fault:
            print(f"{folder / name}: {fault}; fetching it again", flush=True)
    if missing:
        check_online()
    for i, name in enumerate(missing, 1):
        if fault_of(folder / name) is None:  # another process has fetched it meanwhile
            continue
        # the client draws a progress bar in bytes below this line
        print(f"[{i}/{len(missing)}] {name}", flush=True)
        fetch_shard(name, folder)
    shutil.rmtree(folder / ".incomplete", ignore_errors=True)
    print(f"{folder}: validation shard and {n} training shards are there, "
          f"{len(missing)} of them fetched now")


def fault_of(path):
    """What is wrong with the file of a shard: None if it is whole, empty if it is not there."""
    if not path.exists():
        return ""
    try:
        count_tokens(path)
    except ShardError as error:
        return brief(error)
    return None


def brief(error):
    """An exception in a few words, without a full stop, to stand inside a sentence."""
    if isinstance(error, DamagedShard):
        return f"it {error.fault}"
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(" .")


def fail(message, status=1):
    """End the program with one sentence on stderr."""
    print(f"fineweb.py: {message}.", file=sys.stderr)
    sys.exit(status)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "n", metavar="N", help=f"training shards to have, 1 to {TRAIN_SHARDS}, 100M tokens each")
    folder = Path(__file__).parent / "fineweb10B"
    parser.add_argument("--dir", default=folder, help="default: %(default)s")
    parser.error = lambda message: fail(message, 2)
    args = parser.parse_args(argv)
    if not args.n.isdecimal() or not 1 <= int(args.n) <= TRAIN_SHARDS:
        fail(f"N must be a whole number from 1 to {TRAIN_SHARDS}, not {args.n!r}", 2)
    if args.dir == "":
        fail("--dir is empty; name a folder", 2)
    try:
        fetch(int(args.n), Path(args.dir))
    except FetchError as error:
        fail(error)
    except ImportError:
        fail("huggingface_hub is not installed; run: pip install huggingface_hub")
    except OSError as error:
        fail(f"{args.dir} cannot be used ({brief(error)}); name another folder with --dir")
    except KeyboardInterrupt:
        fail(f"interrupted; {AGAIN}", 130)


if __name__ == "__main__":
    main()
