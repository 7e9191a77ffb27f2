"""Command line: python -m records code | log | new | check | compare | plot | table | measure.
records/README.md explains them.

Exit status: 0 all well, 1 a check found something, 2 the input was refused.
"""
import argparse
import os
import shlex
import sys
from pathlib import Path

from data.texts import harmless

from . import compare, measure, plots, record, table
from .console import discard_output, prepare_output, sentence_of
from .log import Refused, read_files, read_log, read_source, read_whole
from .stats import INSTALL, have_scipy


def check(root, chosen):
    """Prints what is wrong with the chosen records (default: all) and with the leaderboard. Returns
    whether nothing is. All records are read, because no run may stand in two of them."""
    everything = []
    for folder in [*record.folders(root), *chosen]:
        if folder.resolve() not in everything:
            everything.append(folder.resolve())
    chosen = [folder.resolve() for folder in chosen]
    if not chosen:
        chosen = everything
    recompute = have_scipy()
    latest = record.latest_date(root)
    found = []
    logs = []
    rebuilt = {}
    for folder in everything:
        try:
            own_logs, stored, rebuilt[folder] = record.load(folder, recompute)
            logs += own_logs
            wrong = record.problems(folder, own_logs, stored, rebuilt[folder], latest)
        except Refused as error:
            wrong = [str(error)]
        if folder in chosen:
            found += wrong
            print_summary(folder, wrong, rebuilt.get(folder))
    for text in record.equal_losses(logs):
        print(f"warning: {text}")
    try:
        record.refuse_copies(logs)
    except Refused as error:
        found.append(str(error))
    found += board_problems(root, everything, rebuilt)
    for text in found:
        print(text)
    if not recompute:
        print(f"left out: p-values are those in record.json, as scipy is not installed ({INSTALL})")
    print(f"{len(set(chosen))} record(s) checked, {len(found)} problem(s)")
    return not found


def print_summary(folder, wrong, rebuilt):
    """Prints the line of one record and its warnings. `wrong` is what is wrong with it, and
    `rebuilt` is None if it cannot be read."""
    name = harmless(folder.name)
    if wrong:
        print(f"{name}: PROBLEM")
    else:
        print(f"{name}: ok, {rebuilt['n']} runs, {rebuilt['time_s']['mean']:.2f} s, "
              f"loss {rebuilt['loss']['mean']:.4f}")
    if rebuilt:
        for text in record.warnings(rebuilt):
            print(f"  warning: {text}")


def board_problems(root, everything, rebuilt):
    """Returns what is wrong with the leaderboard, a sentence each. `everything` are the folders of
    records, and `rebuilt` has the records of those that can be read. Without a README or without
    records a note is printed instead."""
    home = (root / "records").resolve()
    inside = [folder for folder in everything if folder.parent == home]
    page = root / "records" / "README.md"
    if not inside:
        print("note: there are no records, so no leaderboard was checked")
        return []
    if not page.exists():
        print("note: there is no records/README.md, so no leaderboard was checked")
        return []
    records = []
    for folder in inside:
        if folder not in rebuilt:
            return [f"{page}: the leaderboard cannot be checked while a record is broken."]
        records.append(rebuilt[folder])
    try:
        table.check_board(root, records)
    except Refused as error:
        return [f"{error} Run `python -m records table`."]
    return []


def logs_named(names):
    """Returns the paths of these logs. A folder stands for all *.txt in it. Raises Refused if it
    has none."""
    paths = []
    for path in map(Path, names):
        found = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not found:
            raise Refused(f"{path} has no logs (*.txt); name a folder that has some.")
        paths += found
    return paths


def draw(names, out, x):
    """Draws the curves of the logs and returns the name of the picture. Without `out` that is the
    name of the log, or curves.png for several, in the current folder. Of several logs those that
    cannot be read are left out, with a sentence on standard error. Raises Refused if none can be
    read or the picture cannot be written."""
    paths = logs_named(names)
    logs = []
    for path in paths:
        try:
            logs.append(read_log(path, may_be_cut=True))
        except Refused as error:
            if len(paths) == 1:
                raise
            print(f"left out: {error}", file=sys.stderr)
    if not logs:
        raise Refused(f"{', '.join(names)}: no log here has steps to draw.")
    if out is None and len(paths) == 1:
        out = f"{paths[0].stem}.png"
    elif out is None:
        out = "curves.png"
    suffix = Path(out).suffix
    if suffix.lower() != ".png":
        raise Refused(f"{out}: expected a name that ends in .png, found {suffix!r}; rename it.")
    plots.draw_curves(out, logs, x)
    return out


def write_files(files, folder):
    """Writes {path: bytes} below a folder. Raises Refused and writes nothing if one of the files is
    there already. Raises Refused, too, if one cannot be written."""
    for path in files:
        target = folder / path
        if os.path.lexists(target):
            raise Refused(f"{target}: exists already.")
    for path, content in files.items():
        target = folder / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "xb") as file:
                file.write(content)
        except OSError as error:
            raise Refused(f"{target}: cannot be written ({error.strerror}).") from None


def find(root, name):
    """Returns the path that a name stands for: an existing log or folder, or the folder of a record
    that is called so with or without its date. Raises Refused unless there is exactly one."""
    if os.path.exists(name):  # which knows no name that is too long
        return Path(name)
    found = []
    for folder in record.folders(root):
        if name in (folder.name, record.without_date(folder.name)):
            found.append(folder)
    if len(found) != 1:
        called = "no file, folder or record is" if not found else "more than one record is"
        raise Refused(f"{called} called {name!r}; check the path.")
    return found[0]


def parse(argv):
    """Returns the command line as argparse's namespace. Ends the program if it cannot be parsed."""
    parser = argparse.ArgumentParser(
        prog="python -m records",
        description="Turn logs into records; check, compare and draw them.")
    root = Path(__file__).parents[1]
    parser.add_argument("--root", type=Path, default=root, help="repository root")
    commands = parser.add_subparsers(dest="command", required=True)

    p = commands.add_parser("code", help="print a log's train_gpt.py, or write all files that ran")
    p.add_argument("log")
    p.add_argument("folder", nargs="?", type=Path, help="where to write all files of the run")

    p = commands.add_parser("log", help="print a log as it was written, byte for byte")
    p.add_argument("log")

    p = commands.add_parser("new", help="write records/DATE_NAME from logs")
    p.add_argument("name")
    p.add_argument("logs", nargs="+", help="logs, or folders of them")
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
    p.add_argument("logs", nargs="+", help="logs, or folders of them")
    p.add_argument("--out", help="the PNG file to write (default: LOG.png; curves.png for several)")
    axes = tuple(plots.AXES)
    p.add_argument("--x", choices=axes, default="time", help="the x axis (default: time)")

    commands.add_parser("table", help="rewrite the leaderboard and the progress picture")

    p = commands.add_parser("measure", help="measure starts, seeds and speed of this machine")
    p.add_argument("folder", help="a new folder for logs, outputs and the compiler's caches")
    p.add_argument("--gpus", type=numbers, default=[1], help="how many, such as 1,2,4,8")
    p.add_argument("--seeds", type=not_negative(int), default=3, help="whole runs on most GPUs")
    p.add_argument("--limit", type=not_negative(float), default=3600,
                   help="seconds that a run may take")
    p.add_argument("--keys", type=shlex.split, default=[],
                   help='of all runs, in quotes: "--preset=onepass --data_dir=data/corpus"')
    return parser.parse_args(argv)


def numbers(text):
    """The numbers in a text such as 1,2,4. Raises ValueError."""
    found = [int(word) for word in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def not_negative(kind):
    """A type of arguments: a number of this kind that is not negative."""
    def number(text):
        value = kind(text)
        if not value >= 0:  # neither is nan
            raise ValueError(text)
        return value
    return number


def run(args):
    """Does what the command line asks for and returns the exit status. Raises Refused if the input
    is not accepted."""
    if args.command == "code" and args.folder is not None:
        files = read_files(args.log)
        write_files(files, args.folder)
        print(f"wrote {len(files)} file(s) below {args.folder}")
    elif args.command == "code":
        source = read_source(args.log)
        if sys.stdout.isatty():
            source = harmless(source.decode(errors="replace")).encode()
        sys.stdout.buffer.write(source)
    elif args.command == "log":
        sys.stdout.buffer.write(read_whole(args.log))
    elif args.command == "new":
        folder = record.new(
            args.root, args.name, logs_named(args.logs), args.claim, args.data, args.eval)
        print(f"wrote {folder}; now write its README.md, then run `python -m records table`")
        for doubt in record.doubts_about_name(args.root, folder):
            print(doubt)
    elif args.command == "check":
        if not (args.root / "records").is_dir():
            raise Refused(f"{args.root} has no folder `records`; name the root of the repository.")
        for folder in args.dirs:
            if not folder.is_dir():
                raise Refused(f"{folder}: expected the folder of a record, found none.")
        all_is_well = check(args.root, args.dirs)
        return 0 if all_is_well else 1
    elif args.command == "compare":
        a = find(args.root, args.a)
        b = find(args.root, args.b)
        a_logs, a_left_out = compare.read_runs(a)
        b_logs, b_left_out = compare.read_runs(b)
        names = [a.resolve().name, b.resolve().name]
        report = compare.compare(a_logs, b_logs, names, args.diff, [*a_left_out, *b_left_out])
        print("\n".join(report))
    elif args.command == "plot":
        out = draw(args.logs, args.out, args.x)
        print(f"wrote {out}")
    elif args.command == "measure":
        all_is_well = measure.measure(args.folder, args.gpus, args.seeds, args.keys, args.limit)
        return 0 if all_is_well else 1
    else:
        count = table.write(args.root)
        print(f"wrote the leaderboard of {count} record(s)")
    return 0


def main(argv=None):
    """Runs the tool and returns its exit status. Input that is refused is one line of text."""
    prepare_output()
    args = parse(argv)
    try:
        status = run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as in `| head -1`
        discard_output(sys.stdout)
        return 0
    except OSError as error:  # as on a full disk
        discard_output(sys.stdout)
        print(f"refused: {sentence_of(error)}.", file=sys.stderr)
        return 2
    except Refused as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
