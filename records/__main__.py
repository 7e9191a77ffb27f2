"""Command line: python -m records code | new | check | compare | table (see records/README.md).

Exit status: 0 all well, 1 a check found something, 2 the input was refused.
"""
import argparse
import os
import sys
from pathlib import Path

from . import compare, record, table
from .log import Refused, read_files, read_source


def check(root, chosen):
    """Prints what is wrong with the chosen records (default: all) and with the leaderboard; True if nothing is."""
    everything = list(dict.fromkeys(p.resolve() for p in [*record.folders(root), *chosen]))
    chosen, found, logs, rebuilt = {p.resolve() for p in chosen} or set(everything), [], [], {}
    for folder in everything:
        try:
            own, stored, rebuilt[folder] = record.load(folder)
            logs += own
            wrong = record.problems(folder, stored, rebuilt[folder])
        except Refused as error:
            wrong = [str(error)]
        if folder in chosen:
            found += wrong
            r = rebuilt.get(folder)
            print(f"{folder.name}: " + ("PROBLEM" if wrong else f"ok, {r['n']} runs, {r['time_s']['mean']:.2f} s, "
                                        f"loss {r['loss']['mean']:.4f}"))
            for text in record.warnings(r) if r else []:
                print(f"  warning: {text}")
    try:
        record.refuse_twice(logs)
    except Refused as error:
        found.append(str(error))
    found += check_board(root, everything, rebuilt)
    for text in found:
        print(text)
    print(f"{len(chosen)} record(s) checked, {len(found)} problem(s)")
    return not found


def check_board(root, everything, rebuilt):
    """Problems of the leaderboard; without a README or its markers there is only a note."""
    path = root / "README.md"
    if not path.exists() or not any(mark in record.read_text(path) for mark in table.BOARD):
        print("note: README.md has no leaderboard markers, so no leaderboard was checked")
        return []
    inside = [p for p in everything if p.parent == (root / "records").resolve()]
    if any(p not in rebuilt for p in inside):
        return [f"{path}: the leaderboard cannot be checked while a record is broken."]
    try:
        record.compare_block(path, table.BOARD, table.board([rebuilt[p] for p in inside]))
    except Refused as error:
        return [str(error)]
    return []


def write_files(files, folder):
    """Writes {path: bytes} below a folder. Raises Refused if one of them is there already; then
    nothing is written."""
    for path in files:
        if os.path.lexists(folder / path):
            raise Refused(f"{folder / path}: exists already.")
    for path, content in files.items():
        target = folder / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "xb") as file:
                file.write(content)
        except OSError as error:
            raise Refused(f"{target}: cannot be written ({error.strerror}).") from None


def find(root, name):
    """The folder of a record: a path, a folder name, or the name without its date. Raises Refused."""
    found = [p for p in record.folders(root) if name in (p.name, p.name[11:])]
    if Path(name).is_dir():
        found = [Path(name)]
    if len(found) != 1:
        raise Refused(f"expected one record called {name}, found {len(found)}.")
    return found[0]


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m records", description="Turn logs into records; check and compare.")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="repository root")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("code", help="print a log's train_gpt.py, or write all files that ran")
    p.add_argument("log")
    p.add_argument("folder", nargs="?", type=Path, help="where to write all files of the run")
    p = commands.add_parser("new", help="write records/DATE_NAME from logs")
    p.add_argument("name")
    p.add_argument("logs", nargs="+")
    p.add_argument("--claim", default="", help="one sentence: what is new")
    p.add_argument("--data", default="", help='what the data are called, e.g. "FineWeb"')
    p = commands.add_parser("check", help="recompute records and leaderboard from the logs")
    p.add_argument("dirs", nargs="*", type=Path)
    p = commands.add_parser("compare", help="test two records against each other")
    p.add_argument("a")
    p.add_argument("b")
    p.add_argument("--diff", action="store_true", help="show the whole code diff")
    commands.add_parser("table", help="rewrite the leaderboard and the progress picture")
    args = parser.parse_args(argv)
    try:
        if args.command == "code" and args.folder is not None:
            files = read_files(args.log)
            write_files(files, args.folder)
            print(f"wrote {len(files)} file(s) below {args.folder}")
        elif args.command == "code":
            sys.stdout.buffer.write(read_source(args.log))
        elif args.command == "new":
            print(f"wrote {record.new(args.root, args.name, args.logs, args.claim, args.data)}; "
                  "now write its README.md, then run `python -m records table`")
        elif args.command == "check":
            if missing := [d for d in args.dirs if not d.is_dir()]:
                raise Refused(f"{missing[0]}: expected the folder of a record, found none.")
            return 0 if check(args.root, args.dirs) else 1
        elif args.command == "compare":
            sides = [find(args.root, name) for name in (args.a, args.b)]
            print("\n".join(compare.compare(*(record.load(s)[0] for s in sides), [s.name for s in sides], args.diff)))
        else:
            print(f"wrote the leaderboard of {table.write(args.root)} record(s)")
    except Refused as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
