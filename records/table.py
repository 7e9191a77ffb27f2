"""The leaderboard, in records/README.md."""
from .record import ALPHA, folders, p_text, pm, stored_in, with_block

BOARD = ("<!-- leaderboard:begin -->", "<!-- leaderboard:end -->")
HEAD = ("| record | time (s) | loss | n | target | machine | data |",
        "|---|--:|---|--:|--:|---|---|")
RULE = (f"A rank needs a mean loss that is below the target at p < {ALPHA} (one-sided t test over "
        "the runs). Records of the same data, machine and target stand together, the fastest "
        "first. The target is that of the runs' --target_loss, or of their preset.")


def order(record: dict) -> tuple:
    """Records that share all but the last of these are rivals."""
    return record["data_name"], record["machine"], record["target"], record["time_s"]["mean"]


def link(record: dict) -> str:
    date, _, name = record["name"].partition("_")
    return f"[{name}]({record['name']})"


def rewritten(page: str) -> str:
    """The page with the leaderboard of all records, and below it those without a rank."""
    records = [stored_in(folder) for folder in folders()]
    lines = [BOARD[0], *HEAD]
    others = []
    for record in sorted(records, key=order):
        p = record["loss"]["p_below_target"]
        if p is None or p >= ALPHA:
            others.append(link(record))
            continue
        cells = (link(record), pm(record["time_s"], 2),
                 f"{pm(record['loss'], 4)} ({p_text(record)})", record["n"], record["target"],
                 record["machine"], record["data_name"] or "unnamed")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", RULE]
    if others:
        lines += ["", f"Without a rank: {', '.join(others)}."]
    return with_block(page, BOARD, "\n".join([*lines, BOARD[1]]))
