"""The results that `evaluate.py --json` writes: their form, and how a record shows them.

Such a file is a JSON object:

    form           1
    date           in UTC, as "2026-11-22T16:00:00Z"
    torch, device  the version and the machine that computed the results
    models         a list: path, sha256 of the weights, steps, preset, tokens ("gpt2", "bytes" or
                   "other")
    results        a list: a key of MEASURES as measure, number of the model in `models` from 0,
                   value, standard_error (null for a single unit), units, data and its sha256
    differences    a list: measure, model, against (another model's number), value, standard_error,
                   low and high, the ends of the 95 % interval

A check can tell whether a file has this form. It cannot tell whether the results are those of the
record's runs: weights are not part of a record. So a record keeps the file beside its logs, and
says that it is not part of the proof.
"""
import json
import re
from typing import NamedTuple

from .log import SHA, Refused, fail, parse_json, read_bytes

FORM = 1
FILE = "evaluation.json"  # its name in the folder of a record
MARKS = ("<!-- evaluation:begin -->", "<!-- evaluation:end -->")
MAX_BYTES = 100_000


class Measure(NamedTuple):
    title: str
    is_share: bool  # the value is from 0 to 1, and shown in percent
    unit: str  # of the value
    of: str  # what was counted: the units of which the standard error speaks


MEASURES = {
    "loss": Measure("loss", False, "nats per token", "documents"),
    "bits_per_byte": Measure("bits per byte", False, "", "documents"),
    "hellaswag": Measure("HellaSwag", True, "right by the sum", "items"),
    "hellaswag_norm": Measure("HellaSwag, normalised", True, "right by the mean", "items"),
    "last_word": Measure("last word", True, "right", "passages"),
}

# The value of each key as JSON text, so that one pattern states type, sign and range.
COUNT = r"[0-9]{1,15}"
NUMBER = r"-?[0-9]{1,15}(\.[0-9]+)?(e[-+]?[0-9]+)?"
POSITIVE = r"[0-9]{1,15}(\.[0-9]+)?(e[-+]?[0-9]+)?"
DATE = r'"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z"'
NAME = r'"[\w .,:;()+/%=@~?-]{1,200}"'  # goes into Markdown tables
FACTS = {
    "": {"form": str(FORM), "date": DATE, "torch": NAME, "device": NAME},
    "models": {"path": NAME, "weights_sha256": SHA, "steps": COUNT, "preset": NAME,
               "tokens": '"gpt2"|"bytes"|"other"'},
    "results": {"measure": NAME, "model": COUNT, "value": POSITIVE,
                "standard_error": POSITIVE + "|null", "units": COUNT, "data": NAME,
                "data_sha256": SHA},
    "differences": {"measure": NAME, "model": COUNT, "against": COUNT, "value": NUMBER,
                    "standard_error": POSITIVE, "low": NUMBER, "high": NUMBER},
}
LISTS = ("models", "results", "differences")


def clean(text):
    """A text in the form of a NAME: what has no place in a table becomes a question mark."""
    return re.sub(r"[^\w .,:;()+/%=@~-]", "?", text)[:200]


def without_folders(content):
    """The same results without the folders of absolute paths, which are those of one machine."""
    for facts, key in ((content["models"], "path"), (content["results"], "data")):
        for fact in facts:
            if fact[key].startswith("/"):
                fact[key] = fact[key].rstrip("/").rpartition("/")[2]
    return content


def read(path):
    """The content of a file of results. Raises Refused, naming the first fault, if it does not have
    the form that is described above."""
    try:
        text = read_bytes(path, MAX_BYTES).decode()
    except UnicodeDecodeError:
        raise Refused(f"{path}: expected UTF-8 text, found other bytes.") from None
    content = parse_json(text, path, 1)
    if type(content) is not dict:
        fail(path, 1, "an object, as `evaluate.py --json` writes it", content)
    check_facts(path, "", content)
    for kind in LISTS:
        entries = content.get(kind)
        if type(entries) is not list or not all(type(entry) is dict for entry in entries):
            fail(path, 1, f"{kind} to be a list of objects", entries)
        for entry in entries:
            check_facts(path, kind, entry)
    if not content["results"]:
        raise Refused(f"{path}: expected at least one result, found none.")
    for entry in content["results"] + content["differences"]:
        check_entry(path, entry, len(content["models"]))
    return content


def check_facts(path, kind, entry):
    """Raises Refused unless each fact of this kind stands in the entry, and in its form."""
    for key, pattern in FACTS[kind].items():
        value = json.dumps(entry.get(key), ensure_ascii=False)
        if key not in entry or not re.fullmatch(pattern, value):
            where = f"{kind}: {key}" if kind else key
            fail(path, 1, f"{where} as records/evaluation.py describes it", entry.get(key))


def check_entry(path, entry, num_models):
    """Raises Refused unless a result or a difference names what there is, and its numbers agree."""
    if entry["measure"] not in MEASURES:
        fail(path, 1, f"a measure among {', '.join(MEASURES)}", entry["measure"])
    for key in ("model", "against"):
        if entry.get(key, 0) >= num_models:
            expected = f"{key} to be the number of a model, from 0 to {num_models - 1}"
            fail(path, 1, expected, entry[key])
    if "low" in entry and not entry["low"] <= entry["value"] <= entry["high"]:
        fail(path, 1, "the value of a difference to lie in its interval", entry["value"])
    if "low" not in entry and MEASURES[entry["measure"]].is_share and entry["value"] > 1:
        fail(path, 1, f"a share of at most 1 as {entry['measure']}", entry["value"])


# ---- how results are shown -----------------------------------------------------------------------

def value_text(result):
    """The value of a result with its standard error and unit, such as "28.59 % ± 0.45 % right"."""
    measure = MEASURES[result["measure"]]
    text = number_text(measure, result["value"])
    if result["standard_error"] is not None:
        text += f" ± {number_text(measure, result['standard_error'])}"
    return f"{text} {measure.unit}".rstrip()


def number_text(measure, value):
    return f"{100 * value:.2f} %" if measure.is_share else f"{value:.4f}"


def units_text(result):
    """What a result is over, such as "10,042 items of hellaswag_val.jsonl"."""
    of = MEASURES[result["measure"]].of
    if result["units"] == 1:
        of = of.removesuffix("s")
    return f"{result['units']:,} {of} of {result['data']}"


def difference_text(difference):
    """A difference and its interval, such as "-0.0051, 95 % interval -0.0070 to -0.0032"."""
    factor, digits, percent = 1, 4, ""
    if MEASURES[difference["measure"]].is_share:
        factor, digits, percent = 100, 2, " %"
    value, low, high = (f"{factor * difference[key]:+.{digits}f}{percent}"
                        for key in ("value", "low", "high"))
    return f"{value}, 95 % interval {low} to {high}"


def block(content):
    """The generated part of a record's README that shows the results, markers included."""
    models = content["models"]
    lines = [
        MARKS[0],
        "Results of `evaluate.py`, which are **not part of the proof**: the logs do not show that "
        "they are of these runs.",
        "",
        "| model | measure | value ± standard error | over |",
        "|---|---|---|---|",
    ]
    for result in content["results"]:
        model = models[result["model"]]
        title = MEASURES[result["measure"]].title
        lines.append(f"| `{model['path']}`, step {model['steps']:,} | {title} "
                     f"| {value_text(result)} | {units_text(result)} |")
    for difference in content["differences"]:
        model = models[difference["model"]]["path"]
        against = models[difference["against"]]["path"]
        title = MEASURES[difference["measure"]].title
        lines.append(
            f"| `{model}` - `{against}` | {title} | {difference_text(difference)} | the same |")
    date = content["date"][:10]
    where = f"Computed with torch {content['torch']} on {content['device']}, {date}."
    return "\n".join([*lines, "", where, MARKS[1]])
