"""The command line, which records/README.md explains:

    python -m records code | log | new | check | compare | table

Exit status: 0 all well, 1 a check found something, 2 the input was refused.
"""
import argparse
import shlex
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, without a traceback

from . import compare, record
from .console import end_in_order
from .log import PER_RUN, Log, read_bytes, read_log, read_logs

REFUSED = OSError, ValueError  # shown as a sentence


def write_code(log: Log, folder: Path) -> None:
    """Writes all files that ran in a run into a new folder. Raises ValueError if it is there."""
    if folder.exists():
        raise ValueError(f"{folder} is there already; name another folder.")
    folder.mkdir(parents=True)
    for name, content in log.files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{log.path}: the file {name} would lie outside of {folder}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def check(page: Path) -> int:
    """Compares all records and the leaderboard with the logs. Returns the exit status."""
    records = []
    found = []
    for folder in record.folders():
        try:
            records.append(record.read(folder))
        except (ValueError, OSError) as error:
            found.append(str(error))
    text = page.read_text("utf-8")
    if not found and record.with_leaderboard(text, records) != text:
        found = [f"{page}: its leaderboard is another; run `python -m records table`"]
    for problem in found:
        print(problem)
    print(f"compared {len(record.folders())} records with their logs, problems: {len(found)}")
    return 1 if found else 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m records", description="Make records of logs; check and compare them.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, about: str, *paths: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about)
        for path in paths:
            added.add_argument(path, type=Path)
        return added

    command("code", "write all files that ran in a log's run to a new folder", "log", "folder")
    command("log", "print a log as it was written, byte for byte", "log")
    new = command("new", "make records/DATE_NAME from logs")
    new.add_argument("name")
    new.add_argument("logs", nargs="+", type=Path, help="logs, or folders of them")
    new.add_argument("--claim", default="", help="one sentence: what is new")
    new.add_argument("--data", default="", help='what the data are called, such as "FineWeb"')
    command("check", "compare records and leaderboard with the logs")
    command("compare", "compare two records, folders of logs, or logs", "a", "b")
    command("table", "rewrite the leaderboard in records/README.md")
    return parser.parse_args(argv)


def work(argv: list[str]) -> int:
    """Does what the command line asks for. Returns the exit status."""
    args = parse(argv)
    page = record.RECORDS / "README.md"
    if args.command == "check":
        return check(page)
    if args.command == "code":
        log = read_log(args.log)
        write_code(log, args.folder)
        settings = [f"--{key}={value}" for key, value in log.config.items()
                    if key == "seed" or key not in PER_RUN]
        print(f"wrote {args.folder}; the settings of the run, beside --data_dir:\n"
              f"{shlex.join(settings)}")
    elif args.command == "log":
        sys.stdout.buffer.write(read_bytes(args.log))
    elif args.command == "new":
        logs = [log for path in args.logs for log in read_logs(path)]
        logs.sort(key=lambda log: log.config["seed"])
        folder = record.new(args.name, logs, args.claim, args.data)
        print(f"wrote {folder}; write its README.md, then run `python -m records table`")
    elif args.command == "compare":
        print("\n".join(compare.compare(args.a, args.b)))
    else:
        records = [record.read(folder) for folder in record.folders()]
        page.write_text(record.with_leaderboard(page.read_text("utf-8"), records), "utf-8")
        print(f"wrote the leaderboard in {page}")
    return 0


if __name__ == "__main__":
    sys.exit(end_in_order("records", work, sys.argv[1:], REFUSED))
