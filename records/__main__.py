"""The command line, which records/README.md explains:

    python -m records code | log | new | check | compare | plot | table

Exit status: 0 all well, 1 a check found something, 2 the input was refused.
"""
import argparse
import signal
import sys
from pathlib import Path

from . import compare, plots, record, table
from .console import prepare_output
from .log import Log, Refused, read_bytes, read_log

ROOT = Path(__file__).parents[1]


def logs_named(names: list[str]) -> list[Path]:
    """The paths of these logs. A folder stands for all *.txt in it."""
    paths = []
    for path in map(Path, names):
        found = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not found:
            raise Refused(f"{path} has no logs (*.txt).")
        paths += found
    return paths


def write_code(log: Log, folder: Path) -> None:
    """Writes all files that ran below a folder, which must not have one of them."""
    for path in log.files:
        if (folder / path).exists():
            raise Refused(f"{folder / path} exists already.")
        if not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise Refused(f"{log.path}: the file {path} would lie outside of {folder}.")
    for path, content in log.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def check(root: Path) -> int:
    """Compares all records and the leaderboard with the logs. Returns the exit status."""
    found = []
    records = []
    for folder in record.folders(root):
        wrong = record.problems(folder)
        found += wrong
        if not wrong:
            stored = record.stored_in(folder)
            records.append(stored)
            print(f"{folder.name}: ok, {stored['n']} runs, {stored['time_s']['mean']:.2f} s, loss "
                  f"{stored['loss']['mean']:.4f}")
    if not found:
        found = table.problems(root, records)
    for text in found:
        print(text)
    print(f"{len(records)} records agree with their logs, problems: {len(found)}")
    return 1 if found else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m records", description="Make records of logs; check and compare them.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project's folder")
    commands = parser.add_subparsers(dest="command", required=True)

    p = commands.add_parser("code", help="print a log's train_gpt.py, or write all files that ran")
    p.add_argument("log")
    p.add_argument("folder", nargs="?", type=Path, help="where to write all files")

    p = commands.add_parser("log", help="print a log as it was written, byte for byte")
    p.add_argument("log")

    p = commands.add_parser("new", help="make records/DATE_NAME from logs")
    p.add_argument("name")
    p.add_argument("logs", nargs="+", help="logs, or folders of them")
    p.add_argument("--claim", default="", help="one sentence: what is new")
    p.add_argument("--data", default="", help='what the data are called, such as "FineWeb"')

    commands.add_parser("check", help="compare records and leaderboard with the logs")

    p = commands.add_parser("compare", help="compare two records, folders of logs, or logs")
    p.add_argument("a", type=Path)
    p.add_argument("b", type=Path)
    p.add_argument("--diff", action="store_true", help="show the whole difference of the code")

    p = commands.add_parser("plot", help="draw the losses of runs, also of those that go on")
    p.add_argument("logs", nargs="+", help="logs, or folders of them")
    p.add_argument("--out", default="curves.png", help="the PNG to write (default: curves.png)")
    p.add_argument("--x", choices=tuple(plots.AXES), default="time", help="(default: time)")

    commands.add_parser("table", help="rewrite the leaderboard in records/README.md")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Does what the command line asks for. Returns the exit status."""
    if args.command == "check":
        return check(args.root)
    if args.command == "log":
        sys.stdout.buffer.write(read_bytes(args.log))
    elif args.command == "code":
        log = read_log(args.log, may_be_cut=True)
        if args.folder:
            write_code(log, args.folder)
            print(f"wrote {len(log.files)} files below {args.folder}")
        else:
            sys.stdout.buffer.write(log.source)
    elif args.command == "new":
        logs = [read_log(path) for path in logs_named(args.logs)]
        folder = record.new(args.root, args.name, logs, args.claim, args.data)
        print(f"wrote {folder}; write its README.md, then run `python -m records table`")
    elif args.command == "compare":
        (a, without_a), (b, without_b) = map(compare.read_side, (args.a, args.b))
        lines = compare.compare(a, b, (args.a, args.b), args.diff)
        print("\n".join([*without_a, *without_b, *lines]))
    elif args.command == "plot":
        logs = [read_log(path, may_be_cut=True) for path in logs_named(args.logs)]
        plots.draw_curves(args.out, logs, args.x)
        print(f"wrote {args.out}")
    else:
        records = table.all_records(args.root)
        table.write(args.root, records)
        print(f"wrote the leaderboard of {len(records)} records")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the tool and returns its exit status. Input that is refused is one line of text."""
    prepare_output()
    try:
        return run(parse(argv))
    except (OSError, Refused) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main())
