"""The leaderboard in records/README.md and the progress picture, generated from all
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
from .record import (
    between,
    compare_block,
    folders,
    load,
    p_text,
    plain,
    pm,
    read_text,
    without_date,
    write_text,
)
from .stats import ALPHA

BOARD = ("<!-- leaderboard:begin -->", "<!-- leaderboard:end -->")
HEAD = ("| # | date | record | time (s) | loss | n | target | hardware | data | log |",
        "|--:|---|---|--:|---|--:|--:|---|---|---|")
RULE = (f"A rank needs a mean loss that is below the target at p < {ALPHA} (one-sided t test over "
        "the runs).")
PICTURE = "![Training time of the records, in the order of their dates](progress.png)"
HIDING = ("pre", "code", "script", "style", "template", "textarea", "details")  # tags of HTML


def track(record):
    """Returns what the records of one track have in common. Records are ranked against each other
    only on the same data, machine, target and validation tokens."""
    return (
        record["data_name"],
        record["hardware"]["summary"],
        record["target"],
        record["config"]["val_tokens"],
        record["data"]["val_fingerprint"],
    )


def unranked(record):
    """Returns why a record has no rank, in a word or two. The text is empty if it has one."""
    p = record["loss"]["p_below_target"]
    if record["loss"]["mean"] > record["target"]:
        return "missed"
    if p is None:
        return "no test"
    if p >= ALPHA:
        return f"p >= {ALPHA}"
    return ""


def by_track(records):
    """Returns a list of (track, its records). The ranked records come first, then those that are
    not shown to reach the target, then those that missed it. Within these groups the fastest comes
    first."""
    def place(record):
        why = unranked(record)
        return why == "missed", why != "", record["time_s"]["mean"], record["name"]

    tracks = {}
    for record in records:
        tracks.setdefault(track(record), []).append(record)
    return [(key, sorted(tracks[key], key=place)) for key in sorted(tracks)]


def link(record):
    name = record["name"]
    return f"[{without_date(name)}]({name})"


def row(place, record):
    """Returns one line of the table."""
    log = record["runs"][0]["log"]
    cells = (
        str(place),
        record["date"],
        link(record),
        pm(record["time_s"], 2),
        f"{pm(record['loss'], 4)} ({p_text(record)})",
        str(record["n"]),
        f"{record['target']:g}",
        plain(record["hardware"]["summary"]),
        record["data_name"] or "unnamed",
        f"[log]({record['name']}/{log})",
    )
    return f"| {' | '.join(cells)} |"


def board(records):
    """Returns the leaderboard with its markers. A sentence below the table lists the records that
    have no rank."""
    rows = []
    others = {}  # why they have no rank -> links
    for _, members in by_track(records):
        for place, record in enumerate(members, 1):
            why = unranked(record)
            if why:
                others.setdefault(why, []).append(link(record))
            else:
                rows.append(row(place, record))
    rule = RULE
    if others:
        groups = [f"({why}): {', '.join(links)}" for why, links in others.items()]
        rule += f" Without a rank {'; '.join(groups)}."
    lines = [BOARD[0], *HEAD, *rows, "", rule]
    if drawn(records):
        lines += ["", PICTURE]
    lines.append(BOARD[1])
    return "\n".join(lines)


def drawn(records):
    """Returns the tracks of the progress picture, a list of (title, records whose mean is not above
    the target, whether each of them is ranked)."""
    tracks = []
    for key, members in by_track(records):
        data_name, machine, target, *_ = key
        title = f"{plain(data_name or 'unnamed data')}, {plain(machine)}, target {target:g}"
        reached = [record for record in members if unranked(record) != "missed"]
        ranked = [unranked(record) == "" for record in reached]
        if reached:
            tracks.append((title, reached, ranked))
    return tracks


def description(tracks):
    """Returns the text inside the progress picture, by which `check_board` knows what it shows: a
    sum of all that is drawn."""
    facts = []
    for title, records, ranked in tracks:
        points = []
        for record in records:
            date = record["runs"][0]["date"]
            points.append([record["name"], date, record["time_s"]["mean"]])
        facts.append([title, points, ranked])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def ends_in_code(text):
    """Returns whether a block of code is still open at the end of this Markdown."""
    fence = ""  # what has opened the block: at least three ` or ~
    for line in text.split("\n"):
        mark = re.match(r" {0,3}(```+|~~~+)(.*)", line)
        if not mark:
            continue
        if not fence:
            fence = mark[1]
        elif mark[1].startswith(fence) and not mark[2].strip():
            fence = ""
    return fence != ""


def refuse_hidden(path, before):
    """Raises Refused if what stands before the leaderboard opens something that hides it: a
    comment, a block of code, or a tag."""
    text = re.sub(r"<!--.*?-->", "", before, flags=re.DOTALL)
    found = ""
    if "<!--" in text:
        found = "a comment"
    if ends_in_code(text):
        found = "a block of code"
    for tag in HIDING:
        opened = re.findall(rf"<{tag}\b", text, re.IGNORECASE)
        closed = re.findall(rf"</{tag}\b", text, re.IGNORECASE)
        if len(opened) > len(closed):
            found = f"<{tag}>"
    last_line = text.rpartition("\n")[2]
    if last_line.strip() or text.endswith(("    ", "\t")):
        found = "other text on the same line"
    if found:
        raise Refused(f"{path}: expected a leaderboard that can be seen, found {found} open before "
                      f"{BOARD[0]}; close it there.")


def check_board(root, records):
    """Raises Refused unless the leaderboard in records/README.md is that of these records and can
    be seen, and the progress picture was drawn from them."""
    path = root / "records" / "README.md"
    before, _, _ = between(read_text(path), BOARD, path)
    refuse_hidden(path, before)
    compare_block(path, BOARD, board(records))
    if tracks := drawn(records):
        picture = root / "records" / "progress.png"
        if read_png(picture).get("Description") != description(tracks):
            raise Refused(f"{picture}: expected a picture of the records as they are, found an "
                          "older one; run `python -m records table`.")


def write(root):
    """Rewrites the leaderboard and records/progress.png from the logs of all records. Returns the
    number of records. Raises Refused if a record is broken or the README has no place for the
    leaderboard."""
    records = []
    for folder in folders(root):
        _, _, rebuilt = load(folder)
        records.append(rebuilt)
    path = root / "records" / "README.md"
    before, _, after = between(read_text(path), BOARD, path)
    refuse_hidden(path, before)
    with tempfile.TemporaryDirectory(dir=root, prefix=".table_") as scratch:
        page = Path(scratch) / "README.md"
        write_text(page, before + board(records) + after)
        if tracks := drawn(records):
            picture = Path(scratch) / "progress.png"
            plots.draw_progress(picture, tracks, description(tracks))
            os.replace(picture, root / "records" / "progress.png")
        os.replace(page, path)
    return len(records)
