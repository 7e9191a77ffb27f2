"""The items of HellaSwag (Zellers et al. 2019): a context and four endings, of which one is right.

The validation split has 10,042 items. Its authors keep the file on GitHub, with a JSON object on
each line; the copy on the Hugging Face Hub is in Parquet, which needs one more library.
"""
import json
from pathlib import Path

import torch

from data import BadInput

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
PATH = Path(__file__).resolve().parent / "hellaswag_val.jsonl"


def read_items() -> list[dict]:
    """All items: of each a context "ctx", four "endings", and the right one's number, "label". They
    are fetched at first use. Raises BadInput."""
    try:
        if not PATH.exists():
            torch.hub.download_url_to_file(URL, PATH, SHA256, progress=False)
        return [json.loads(line) for line in PATH.read_bytes().splitlines()]
    except (OSError, RuntimeError) as error:  # the latter if it has another sum
        raise BadInput(
            f"HellaSwag could not be fetched ({error!r}); connect to the network and run it again, "
            f"or fetch {URL} elsewhere and put it at {PATH}") from error
