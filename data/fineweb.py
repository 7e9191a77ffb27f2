"""Fetch the first N of FineWeb's 103 cached GPT-2-token training shards, and the validation shard.

    python data/fineweb.py 9              # 9 x 100M training tokens + 100M validation tokens, 200 MB a shard
    python data/fineweb.py 103 --dir /scratch/fineweb10B

A shard is 256 int32 of header (magic 20240520, version 1, token count, zeros) and then that many uint16 tokens, all
little-endian. Each one arrives in DIR/.incomplete, is checked there, and only then takes its final name; so a file
named `fineweb_*.bin` is whole, and the same command after an interruption goes on with the first shard that is missing
or damaged. A connection that drops resumes within its shard; a killed process starts its one open shard again.

Exit status: 0 all there, 1 could not be fetched, 2 bad arguments, 130 interrupted; a failure is one sentence on stderr.
"""
import argparse
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np

REPO = "kjj0/fineweb10B-gpt2"  # a Hugging Face dataset repository
TRAIN_SHARDS = 103
MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 256 * 4
AGAIN = "run the same command again to go on from here"


class ShardError(ValueError):
    """A file that is not a whole shard; the message says what is wrong with it."""


class FetchError(RuntimeError):
    """A shard that could not be had; the message is a sentence for the user."""


def shard_names(n):
    """The validation shard and the first `n` training shards, in the order they are fetched."""
    return ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, n + 1)]


def check_shard(path):
    """Return a shard's token count. Raises FileNotFoundError, or ShardError for a wrong magic, version or length."""
    size = os.path.getsize(path)  # bytes
    header = np.fromfile(path, dtype="<i4", count=3)
    if len(header) < 3 or header[0] != MAGIC or header[1] != VERSION:
        raise ShardError("its header is not that of a version 1 token shard")
    tokens = int(header[2])
    if tokens <= 0 or size != HEADER_BYTES + 2 * tokens:
        raise ShardError(f"its header promises {tokens:,} tokens but the file has {size:,} bytes")
    return tokens


def check_online():
    """One small request without retries, so that a missing network shows at once. Raises FetchError."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, logging
    logging.set_verbosity_error()  # the client's warnings repeat what we say

    try:
        get_hf_file_metadata(hf_hub_url(REPO, shard_names(0)[0], repo_type="dataset"), timeout=10)
    except Exception as error:  # the client's exceptions share no base class across its versions
        raise FetchError(f"{REPO} cannot be reached ({brief(error)}); connect to the network and {AGAIN}, "
                         "or make shards from text you have with data/prepare.py") from error


def fetch_shard(name, folder, attempts=6):
    """Download one shard, check it, give it its final name in `folder`, and return its token count.

    A failed attempt is followed by a pause of 1, 2, 4, ... seconds. Raises FetchError after the last.
    """
    from huggingface_hub import hf_hub_download

    for attempt in range(attempts):
        try:
            # inside `folder`, so that the rename below stays on one filesystem and is atomic
            arrived = Path(hf_hub_download(REPO, name, repo_type="dataset", local_dir=folder / ".incomplete"))
            try:
                tokens = check_shard(arrived)
            except ShardError:
                arrived.unlink()  # or the next attempt would be handed the same bytes
                raise
            os.replace(arrived, folder / name)
            return tokens
        except Exception as error:
            if attempt == attempts - 1:
                raise FetchError(f"{name} could not be fetched ({brief(error)}); {AGAIN}") from error
            print(f"{name}: {brief(error)}; trying again in {2**attempt} s", flush=True)
            time.sleep(2**attempt)


def fetch(n, folder):
    """Bring the validation shard and the first `n` training shards into `folder`. Raises FetchError, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    for name in shard_names(n):
        try:
            check_shard(folder / name)
        except FileNotFoundError:
            missing.append(name)
        except ShardError as error:
            print(f"{folder / name}: {error}; fetching it again", flush=True)
            missing.append(name)
    if missing:
        check_online()
    for i, name in enumerate(missing, 1):
        print(f"[{i}/{len(missing)}] {name}", flush=True)  # the client draws a progress bar in bytes below this line
        fetch_shard(name, folder)
    shutil.rmtree(folder / ".incomplete", ignore_errors=True)
    print(f"{folder}: validation shard and {n} training shards are there, {len(missing)} of them fetched now")


def brief(error):
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(" .")


def fail(message, status=1):
    print(f"fineweb.py: {message}.", file=sys.stderr)
    sys.exit(status)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("n", metavar="N", help=f"training shards to have, 1 to {TRAIN_SHARDS}, 100M tokens each")
    parser.add_argument("--dir", type=Path, default=Path(__file__).parent / "fineweb10B", help="default: %(default)s")
    parser.error = lambda message: fail(message, 2)
    args = parser.parse_args(argv)
    if not args.n.isdecimal() or not 1 <= int(args.n) <= TRAIN_SHARDS:
        fail(f"N must be a whole number from 1 to {TRAIN_SHARDS}, not {args.n!r}", 2)
    try:
        fetch(int(args.n), args.dir)
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
