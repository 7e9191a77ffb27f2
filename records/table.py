"""The leaderboard, in records/README.md."""
import statistics

from .record import ALPHA, Record, pm

BEGIN = "<!-- leaderboard:begin -->"
END = "<!-- leaderboard:end -->"


def rewritten(page: str, records: list[Record]) -> str:
    """The page with the leaderboard of these records, and below it those without a rank."""
    lines = [BEGIN, "| record | time (s) | loss | n | target | machine | data |",
             "|---|--:|---|--:|--:|---|---|"]
    others = []
    for record in sorted(records, key=lambda record: (
            record.data_name, record.machine, record.target, statistics.fmean(record.times))):
        link = f"[{record.name[11:]}]({record.name})"
        if record.p is None or record.p >= ALPHA:
            others.append(link)
            continue
        lines.append(f"| {link} | {pm(record.times, 2)} | {pm(record.losses, 4)} "
                     f"({record.p_text}) | {len(record.logs)} | {record.target} "
                     f"| {record.machine} | {record.data_name or 'unnamed'} |")
    if others:
        lines += ["", f"Without a rank: {', '.join(others)}."]
    return page.partition(BEGIN)[0] + "\n".join([*lines, END]) + page.partition(END)[2]
