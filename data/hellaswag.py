"""The items of HellaSwag's validation split; evaluate.py says what they are. Its authors keep them
on GitHub as JSON. The copy on the Hugging Face Hub is in Parquet, which needs one more library.
"""
import hashlib
import http.client
import json
import urllib.request
from pathlib import Path

from data import BadInput, require

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
PATH = Path(__file__).resolve().parent / "hellaswag_val.jsonl"


def read_items() -> list[dict]:
    """All items: of each a context "ctx", four "endings", and the right one's number, "label". They
    are fetched at first use. Raises BadInput."""
    try:
        if not PATH.exists():
            with urllib.request.urlopen(URL, timeout=20) as answer:
                PATH.write_bytes(answer.read())
        content = PATH.read_bytes()
    except (OSError, http.client.HTTPException) as error:
        raise BadInput(
            f"HellaSwag could not be fetched ({error!r}); connect to the network and run it again, "
            f"or fetch {URL} elsewhere and put it at {PATH}") from error
    require(hashlib.sha256(content).hexdigest() == SHA256,
            f"{PATH} is damaged or another file; delete it, and it is fetched anew")
    return [json.loads(line) for line in content.splitlines()]
