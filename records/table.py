"""The leaderboard in the top-level README.md and the progress picture, generated from all records."""
import os
import tempfile
from pathlib import Path

from . import plots
from .record import between, folders, load, p_text, plain, pm, read_text

BOARD = ("<!-- leaderboard:begin -->", "<!-- leaderboard:end -->")
HEAD = ("| # | date | record | time (s) | loss | n | target | hardware | data | log |",
        "|--:|---|---|--:|---|--:|--:|---|---|---|")


def track(record):
    """Records are ranked against each other only on the same machine, data, validation tokens and target."""
    return (record["data_name"], record["hardware"]["summary"], record["target"], record["config"]["val_tokens"],
            record["data"]["val_fingerprint"])


def ranked(records):
    """[(track, its records, fastest first; those whose mean misses the target last)]"""
    tracks = {}
    for record in records:
        tracks.setdefault(track(record), []).append(record)
    return [(key, sorted(tracks[key], key=lambda r: (missed(r), r["time_s"]["mean"], r["name"])))
            for key in sorted(tracks)]


def missed(record):
    return record["loss"]["mean"] > record["target"]


def board(records):
    """The leaderboard, markers included."""
    rows = []
    for _, members in ranked(records):
        for place, r in enumerate(members, 1):
            where = f"records/{r['name']}"
            rows.append(f"| {'missed' if missed(r) else place} | {r['date']} | [{r['name'][11:]}]({where}) "
                        f"| {pm(r['time_s'], 2)} | {pm(r['loss'], 4)} ({p_text(r)}) | {r['n']} | {r['target']:g} "
                        f"| {plain(r['hardware']['summary'])} | {r['data_name'] or 'unnamed'} "
                        f"| [log]({where}/{r['runs'][0]['log']}) |")
    picture = ["", "![Record time over date](records/progress.png)"] if drawn(records) else []
    return "\n".join([BOARD[0], *HEAD, *rows, *picture, BOARD[1]])


def drawn(records):
    """The tracks of the progress picture: [(title, records that reached the target)]."""
    tracks = [(f"{plain(key[0] or 'unnamed data')}, {plain(key[1])}, target {key[2]:g}",
               [r for r in members if not missed(r)]) for key, members in ranked(records)]
    return [(title, members) for title, members in tracks if members]


def write(root):
    """Rewrites the leaderboard and records/progress.png from the logs of all records. Raises Refused."""
    records = [load(folder)[2] for folder in folders(root)]
    path = root / "README.md"
    before, _, after = between(read_text(path), BOARD, path)
    with tempfile.TemporaryDirectory(dir=root, prefix=".table_") as scratch:
        (Path(scratch) / "README.md").write_text(before + board(records) + after, "utf-8", newline="\n")
        if tracks := drawn(records):
            plots.draw_progress(Path(scratch) / "progress.png", tracks)
            os.replace(Path(scratch) / "progress.png", root / "records" / "progress.png")
        os.replace(Path(scratch) / "README.md", path)
    return len(records)
