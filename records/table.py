"""The leaderboard in the top-level README.md and the progress picture, generated from all
records."""
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

from . import plots
from .log import Refused
from .png import read_png
from .record import between, compare_block, folders, load, p_text, plain, pm, read_text
from .stats import ALPHA

BOARD = ("<!-- leaderboard:begin -->", "<!-- leaderboard:end -->")
HEAD = ("| # | date | record | time (s) | loss | n | target | hardware | data | log |",
        "|--:|---|---|--:|---|--:|--:|---|---|---|")
RULE = (f"A rank needs a mean loss that is below the target at p < {ALPHA} (one-sided t test over "
        "the runs).")
PICTURE = "![Training time of the records, in the order of their dates](records/progress.png)"
HIDING = ("pre", "code", "script", "style", "template", "textarea", "details")  # tags of HTML


def track(record):
    """Records are ranked against each other only on the same machine, data, validation tokens and
    target."""
    return (
        record["data_name"],
        record["hardware"]["summary"],
        record["target"],
        record["config"]["val_tokens"],
        record["data"]["val_fingerprint"],
    )


def unranked(record):
    """Why a record has no rank, in a word or two; empty if it has one."""
    p = record["loss"]["p_below_target"]
    if record["loss"]["mean"] > record["target"]:
        return "missed"
    if p is None:
        return "no test"
    return "" if p < ALPHA else f"p >= {ALPHA}"


def by_track(records):
    """[(track, its records: the ranked ones, those not shown to reach the target, those that missed
    it; each group with the fastest first)]"""
    def place(r):
        return unranked(r) == "missed", unranked(r) != "", r["time_s"]["mean"], r["name"]

    tracks = {}
    for record in records:
        tracks.setdefault(track(record), []).append(record)
    return [(key, sorted(tracks[key], key=place)) for key in sorted(tracks)]


def link(r):
    return f"[{r['name'][11:]}](records/{r['name']})"


def row(place, r):
    """One line of the table."""
    where = f"records/{r['name']}"
    cells = (
        str(place),
        r["date"],
        link(r),
        pm(r["time_s"], 2),
        f"{pm(r['loss'], 4)} ({p_text(r)})",
        str(r["n"]),
        f"{r['target']:g}",
        plain(r["hardware"]["summary"]),
        r["data_name"] or "unnamed",
        f"[log]({where}/{r['runs'][0]['log']})",
    )
    return f"| {' | '.join(cells)} |"


def board(records):
    """The leaderboard, markers included. Records without a rank follow the table in a sentence."""
    rows = []
    others = []
    for _, members in by_track(records):
        for place, r in enumerate(members, 1):
            why = unranked(r)
            if why:
                others.append(f"{link(r)} ({why})")
            else:
                rows.append(row(place, r))
    rule = f"{RULE} Without a rank: {', '.join(others)}." if others else RULE
    picture = ["", PICTURE] if drawn(records) else []
    return "\n".join([BOARD[0], *HEAD, *rows, "", rule, *picture, BOARD[1]])


def drawn(records):
    """The tracks of the progress picture: [(title, records whose mean is not above the target,
    whether each is ranked)]."""
    tracks = []
    for key, members in by_track(records):
        title = f"{plain(key[0] or 'unnamed data')}, {plain(key[1])}, target {key[2]:g}"
        reached = [r for r in members if unranked(r) != "missed"]
        if reached:
            tracks.append((title, reached, [unranked(r) == "" for r in reached]))
    return tracks


def description(tracks):
    """What stands as text in the progress picture: a sum of all that is drawn."""
    facts = []
    for title, records, ranked in tracks:
        points = [[r["name"], r["runs"][0]["date"], r["time_s"]["mean"]] for r in records]
        facts.append([title, points, ranked])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def refuse_hidden(path, before):
    """Raises Refused if what stands before the leaderboard opens something that hides it: a
    comment, a block of code, or a tag."""
    text = re.sub(r"<!--.*?-->", "", before, flags=re.DOTALL)
    found = "a comment" if "<!--" in text else ""
    fence = ""
    for line in text.split("\n"):
        mark = re.match(r" {0,3}(```+|~~~+)(.*)", line)
        if not fence and mark:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and not mark[2].strip():
            fence = ""
    if fence:
        found = "a block of code"
    for tag in HIDING:
        opened = len(re.findall(rf"<{tag}\b", text, re.IGNORECASE))
        if opened > len(re.findall(rf"</{tag}\b", text, re.IGNORECASE)):
            found = f"<{tag}>"
    if text.rpartition("\n")[2].strip() or text.endswith(("    ", "\t")):
        found = "other text on the same line"
    if found:
        raise Refused(f"{path}: expected a leaderboard that can be seen, found {found} open before "
                      f"{BOARD[0]}; close it there.")


def check_board(root, records):
    """Raises Refused unless the leaderboard in README.md is that of these records, can be seen, and
    the progress picture was drawn from them."""
    path = root / "README.md"
    before, _, _ = between(read_text(path), BOARD, path)
    refuse_hidden(path, before)
    compare_block(path, BOARD, board(records))
    if tracks := drawn(records):
        picture = root / "records" / "progress.png"
        if read_png(picture).get("Description") != description(tracks):
            raise Refused(f"{picture}: expected a picture of the records as they are, found an "
                          "older one; run `python -m records table`.")


def write(root):
    """Rewrites the leaderboard and records/progress.png from the logs of all records. Raises
    Refused."""
    records = [load(folder)[2] for folder in folders(root)]
    path = root / "README.md"
    before, _, after = between(read_text(path), BOARD, path)
    refuse_hidden(path, before)
    with tempfile.TemporaryDirectory(dir=root, prefix=".table_") as scratch:
        text = before + board(records) + after
        (Path(scratch) / "README.md").write_text(text, "utf-8", newline="\n")
        if tracks := drawn(records):
            plots.draw_progress(Path(scratch) / "progress.png", tracks, description(tracks))
            os.replace(Path(scratch) / "progress.png", root / "records" / "progress.png")
        os.replace(Path(scratch) / "README.md", path)
    return len(records)
