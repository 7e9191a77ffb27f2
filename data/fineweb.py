"""Fetch the first N of FineWeb's 103 cached GPT-2-token training shards, and the validation shard.

    python data/fineweb.py 9    # 9 x 100M training tokens + 100M validation tokens, 200 MB a shard
    python data/fineweb.py 103 --dir /scratch/fineweb10B    # prints how to train on them

huggingface_hub tries again when the connection drops, goes on where it was interrupted, and gives a
shard its name when it is whole. The same command again fetches only what is missing.

Exit status: 0 all there, 2 bad arguments or could not be fetched, with a sentence on stderr.
"""
import argparse
import signal
from pathlib import Path

REPO = "kjj0/fineweb10B-gpt2"  # a Hugging Face dataset repository
TRAIN_SHARDS = 103


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "n", metavar="N", type=int,
        help=f"training shards to have, 1 to {TRAIN_SHARDS}, 100M tokens each")
    folder = Path(__file__).parent / "fineweb10B"
    parser.add_argument("--dir", type=Path, default=folder, help="default: %(default)s")
    args = parser.parse_args(argv)
    if not 1 <= args.n <= TRAIN_SHARDS:
        parser.error(f"N must be from 1 to {TRAIN_SHARDS}, not {args.n}")
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06}.bin" for i in range(1, args.n + 1)]
    missing = [name for name in names if not (args.dir / name).exists()]
    try:
        from huggingface_hub import hf_hub_download
        for number, name in enumerate(missing, 1):
            print(f"[{number}/{len(missing)}] {name}", flush=True)  # the client draws its bar below
            hf_hub_download(REPO, name, repo_type="dataset", local_dir=args.dir)
    except Exception as error:  # the client's exceptions share no base class across its versions
        reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(" .")
        parser.exit(2, f"fineweb.py: {REPO} cannot be fetched into {args.dir} ({reason}); see to "
                    "the network and to the room on the disk, and run the same command again to go "
                    "on from here, or make shards from text you have with data/prepare.py.\n")
    print(f"{args.dir}: validation shard and {args.n} training shards are there")
    if args.dir != folder:
        print(f"train on them with --data_dir={args.dir} --preset=speedrun; without a preset a run "
              "is fitted to its text")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, without a traceback
    main()
