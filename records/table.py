"""The leaderboard, in records/README.md."""
import re

from .record import ALPHA, p_text, pm, with_block

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
    return p is not None and p < ALPHA


def link(record: dict) -> str:
    name = re.sub(r"\d{4}-\d\d-\d\d_", "", record["name"])
    return f"[{name}]({record['name']})"


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


def rewritten(page: str, records: list[dict]) -> str:
    """The page with the leaderboard of these records."""
    return with_block(page, BOARD, board(records))
