"""The leaderboard, in records/README.md."""
from pathlib import Path

from .log import Refused
from .record import DATED, build, folders, logs_in, p_text, pm, stored_in, with_block
from .stats import ALPHA

BOARD = ("<!-- leaderboard:begin -->", "<!-- leaderboard:end -->")
HEAD = ("| # | record | time (s) | loss | n | target | machine | data |",
        "|--:|---|--:|---|--:|--:|---|---|")
RULE = (f"A rank needs a mean loss that is below the target at p < {ALPHA} (one-sided t test over "
        "the runs). Records are ranked against others of the same machine, data, validation tokens "
        "and target, so one without rivals is the first. The target is that of the runs' "
        "--target_loss, or of their preset.")


def track(record: dict) -> tuple:
    """What records share that are ranked against each other."""
    return (record["data_name"], record["machine"], record["target"], record["val_tokens"],
            tuple(record["val_sha256"]))


def has_rank(record: dict) -> bool:
    p = record["loss"]["p_below_target"]
    return p is not None and p < ALPHA and record["loss"]["mean"] <= record["target"]


def link(record: dict) -> str:
    return f"[{DATED.sub('', record['name'])}]({record['name']})"


def board(records: list[dict]) -> str:
    """The leaderboard with its markers: of each track the fastest first, and below the table those
    without a rank."""
    lines = [BOARD[0], *HEAD]
    tracks = {}
    for record in records:
        if has_rank(record):
            tracks.setdefault(track(record), []).append(record)
    for key in sorted(tracks, key=str):
        ranked = sorted(tracks[key], key=lambda record: record["time_s"]["mean"])
        for place, record in enumerate(ranked, 1):
            cells = (place, link(record), pm(record["time_s"], 2),
                     f"{pm(record['loss'], 4)} ({p_text(record)})", record["n"], record["target"],
                     record["machine"], record["data_name"] or "unnamed")
            lines.append(f"| {' | '.join(map(str, cells))} |")
    others = [link(record) for record in records if not has_rank(record)]
    lines += ["", RULE]
    if others:
        lines += ["", f"Without a rank: {', '.join(others)}."]
    return "\n".join([*lines, BOARD[1]])


def rewritten(root: Path, records: list[dict]) -> str:
    """records/README.md with the leaderboard of these records."""
    page = root / "records" / "README.md"
    try:
        return with_block(page.read_text("utf-8"), BOARD, board(records), page)
    except OSError as error:
        raise Refused(f"{page}: cannot be read ({error.strerror}).") from None


def problems(root: Path, records: list[dict]) -> list[str]:
    if rewritten(root, records) != (root / "records" / "README.md").read_text("utf-8"):
        return ["records/README.md: its leaderboard is another; run `python -m records table`"]
    return []


def write(root: Path, records: list[dict]) -> None:
    (root / "records" / "README.md").write_text(rewritten(root, records), "utf-8")


def all_records(root: Path) -> list[dict]:
    """record.json of all records, made from their logs. Raises Refused."""
    found = []
    for folder in folders(root):
        stored = stored_in(folder)
        found.append(build(logs_in(folder), folder.name, stored["claim"], stored["data_name"]))
    return found
