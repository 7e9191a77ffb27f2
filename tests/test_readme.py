"""README.md and the pages of docs/ name only what exists: files, keys and links.

Reference: the files of the project, the fields of Config, and the options of the other programs as their source has
them."""
import dataclasses
import re

import pytest
from conftest import ROOT

import train_gpt

PROGRAMS = ("sample.py", "evaluate.py", "data/prepare.py", "data/texts.py", "data/fineweb.py", "records/__main__.py")
TORCHRUN = {"standalone", "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request):
    return request.param


def test_the_files_that_it_names_are_there(page):
    named = set(re.findall(r"`([\w/]+\.(?:py|sh)|[\w/]+/)`", page.read_text("utf-8")))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_keys_that_it_names_are_known(page):
    known = {field.name for field in dataclasses.fields(train_gpt.Config)} | TORCHRUN | {"help"}
    for program in PROGRAMS:
        known |= set(re.findall(r'"--([\w-]+)"', (ROOT / program).read_text("utf-8")))
    named = set(re.findall(r"(?<!\S)`?--([a-z][\w-]*)", page.read_text("utf-8")))
    assert named - known == set()


def test_its_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)", page.read_text("utf-8"))
    assert targets
    local = [target for target in targets if not target.startswith("https://")]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_names_of_the_script_that_it_gives_are_there(page):
    """Functions, classes and constants stand in backticks with a capital or an underscore in them."""
    named = set(re.findall(r"`([A-Za-z]\w*(?:\.\w+)?)`", page.read_text("utf-8")))
    files = [ROOT / "train_gpt.py", ROOT / "tests/test_model.py", *(ROOT / "nanogpt").rglob("*.py")]
    source = "".join(path.read_text("utf-8") for path in files)
    names = {name for name in named if name != name.lower() or "_" in name}
    written = {name for name in names if re.search(rf"\b{name.rpartition('.')[2]}\b", source)}
    others = {"val_loss", "train_loss", "train_time"}  # of the log
    assert names - written - others == set()


def test_the_room_lists_all_its_files():
    text = (ROOT / "nanogpt" / "__init__.py").read_text("utf-8")
    files = {path.name for path in (ROOT / "nanogpt").glob("*.py")} - {"__init__.py"}
    assert files == set(re.findall(r"\w+\.py", text)) - {"train_gpt.py"}
