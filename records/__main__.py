"""Command line: python -m records code | new | check | compare | plot | table. records/README.md
explains them.

Exit status: 0 all well, 1 a check found something, 2 the input was refused.
"""
import argparse
import os
import sys
from pathlib import Path

from . import compare, plots, record, table
from .log import Refused, read_files, read_log, read_source
from .stats import INSTALL, have_scipy


def check(root, chosen):
    """Prints what is wrong with the chosen records (default: all) and with the leaderboard; True if
    nothing is."""
    everything = list(dict.fromkeys(p.resolve() for p in [*record.folders(root), *chosen]))
    chosen = {p.resolve() for p in chosen} or set(everything)
    recompute = have_scipy()
    latest = record.latest_date(root)
    found = []
    logs = []
    rebuilt = {}
    for folder in everything:
        try:
            own, stored, rebuilt[folder] = record.load(folder, recompute)
            logs += own
            wrong = record.problems(folder, own, stored, rebuilt[folder], latest)
        except Refused as error:
            wrong = [str(error)]
        if folder in chosen:
            found += wrong
            print_summary(folder, wrong, rebuilt.get(folder))
    for text in record.equal_losses(logs):
        print(f"warning: {text}")
    try:
        record.refuse_twice(logs)
    except Refused as error:
        found.append(str(error))
    found += board_problems(root, everything, rebuilt)
    for text in found:
        print(text)
    if not recompute:
        print(f"left out: p-values are those in record.json, as scipy is not installed ({INSTALL})")
    print(f"{len(chosen)} record(s) checked, {len(found)} problem(s)")
    return not found


def print_summary(folder, wrong, rebuilt):
    """Prints the line of one record and its warnings. `rebuilt` is None if it cannot be read."""
    if wrong:
        print(f"{folder.name}: PROBLEM")
    else:
        print(f"{folder.name}: ok, {rebuilt['n']} runs, {rebuilt['time_s']['mean']:.2f} s, "
              f"loss {rebuilt['loss']['mean']:.4f}")
    for text in record.warnings(rebuilt) if rebuilt else []:
        print(f"  warning: {text}")


def board_problems(root, everything, rebuilt):
    """Problems of the leaderboard. Without a README or without records there is only a note."""
    inside = [p for p in everything if p.parent == (root / "records").resolve()]
    if not inside or not (root / "README.md").exists():
        missing = "there is no README.md" if inside else "there are no records"
        print(f"note: {missing}, so no leaderboard was checked")
        return []
    if any(p not in rebuilt for p in inside):
        path = root / "README.md"
        return [f"{path}: the leaderboard cannot be checked while a record is broken."]
    try:
        table.check_board(root, [rebuilt[p] for p in inside])
    except Refused as error:
        return [str(error)]
    return []


def draw(paths, out, x):
    """Draws the curves of the logs and returns the picture's name: by default that of the log, or
    curves.png for several, in the current folder. Raises Refused."""
    logs = [read_log(path, cut=True) for path in paths]
    if out is None:
        out = f"{Path(paths[0]).stem}.png" if len(paths) == 1 else "curves.png"
    suffix = Path(out).suffix
    if suffix.lower() != ".png":
        raise Refused(f"{out}: expected a name that ends in .png, found {suffix!r}; rename it.")
    plots.draw_curves(out, logs, x)
    return out


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
    """The runs that a name stands for: a log, a folder (a record or not), the name of a record's
    folder, or that without its date. Raises Refused."""
    if Path(name).exists():
        return Path(name)
    found = [p for p in record.folders(root) if name in (p.name, p.name[11:])]
    if len(found) != 1:
        raise Refused(f"expected one record called {name}, found {len(found)}.")
    return found[0]


def parse(argv):
    """The command line as argparse's namespace."""
    parser = argparse.ArgumentParser(
        prog="python -m records",
        description="Turn logs into records; check, compare and draw them.")
    root = Path(__file__).parents[1]
    parser.add_argument("--root", type=Path, default=root, help="repository root")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("code", help="print a log's train_gpt.py, or write all files that ran")
    p.add_argument("log")
    p.add_argument("folder", nargs="?", type=Path, help="where to write all files of the run")
    p = commands.add_parser("new", help="write records/DATE_NAME from logs")
    p.add_argument("name")
    p.add_argument("logs", nargs="+")
    p.add_argument("--claim", default="", help="one sentence: what is new")
    p.add_argument("--data", default="", help='what the data are called, e.g. "FineWeb"')
    p.add_argument("--eval", help="results to keep with it: what `evaluate.py --json` has written")
    p = commands.add_parser("check", help="recompute records and leaderboard from the logs")
    p.add_argument("dirs", nargs="*", type=Path)
    p = commands.add_parser("compare", help="compare two records, folders of logs or logs")
    p.add_argument("a")
    p.add_argument("b")
    p.add_argument("--diff", action="store_true", help="show the whole code diff")
    p = commands.add_parser("plot", help="draw the loss curves of runs, also of those that go on")
    p.add_argument("logs", nargs="+")
    p.add_argument("--out", help="the PNG file to write (default: LOG.png; curves.png for several)")
    axes = tuple(plots.AXES)
    p.add_argument("--x", choices=axes, default="time", help="the x axis (default: time)")
    commands.add_parser("table", help="rewrite the leaderboard and the progress picture")
    return parser.parse_args(argv)


def run(args):
    """Does what the command line asks for and returns the exit status. Raises Refused."""
    if args.command == "code" and args.folder is not None:
        files = read_files(args.log)
        write_files(files, args.folder)
        print(f"wrote {len(files)} file(s) below {args.folder}")
    elif args.command == "code":
        sys.stdout.buffer.write(read_source(args.log))
    elif args.command == "new":
        folder = record.new(
            args.root, args.name, args.logs, args.claim, args.data, args.eval)
        print(f"wrote {folder}; now write its README.md, then run `python -m records table`")
    elif args.command == "check":
        for folder in args.dirs:
            if not folder.is_dir():
                raise Refused(f"{folder}: expected the folder of a record, found none.")
        return 0 if check(args.root, args.dirs) else 1
    elif args.command == "compare":
        sides = [find(args.root, name) for name in (args.a, args.b)]
        logs = [compare.read_runs(side) for side in sides]
        print("\n".join(compare.compare(*logs, [side.name for side in sides], args.diff)))
    elif args.command == "plot":
        print(f"wrote {draw(args.logs, args.out, args.x)}")
    else:
        print(f"wrote the leaderboard of {table.write(args.root)} record(s)")
    return 0


def main(argv=None):
    try:
        return run(parse(argv))
    except Refused as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
