"""The top-level README names only what exists: files, keys and links.

Reference: the files of the project, the fields of Config, and the options of the other programs as their source has
them."""
import dataclasses
import re

import pytest
from conftest import ROOT

import train_gpt

PROGRAMS = ("sample.py", "evaluate.py", "data/prepare.py", "data/fineweb.py", "records/__main__.py")
TORCHRUN = {"rdzv_conf", "standalone", "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "max_restarts"}
TO_COME = ("TODO-SAMPLE", "TODO-RESUME")  # sections with such a mark describe what is not here yet


@pytest.fixture(scope="module")
def readme():
    return (ROOT / "README.md").read_text("utf-8")


def sections(text):
    return re.split(r"^## ", text, flags=re.MULTILINE)


def test_the_files_that_it_names_are_there(readme):
    named = set(re.findall(r"`([\w/]+\.(?:py|sh)|[\w/]+/)`", readme))
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_keys_that_it_names_are_known(readme):
    known = {field.name for field in dataclasses.fields(train_gpt.Config)} | TORCHRUN | {"help"}
    for program in PROGRAMS:
        known |= set(re.findall(r'"--([\w-]+)"', (ROOT / program).read_text("utf-8")))
    for section in sections(readme):
        if not any(mark in section for mark in TO_COME):
            named = set(re.findall(r"(?<!\S)`?--([a-z][\w-]*)", section))
            assert named - known == set(), section.partition("\n")[0]


def test_its_links_lead_somewhere(readme):
    targets = re.findall(r"\]\(([^)#]+)", readme)
    assert targets
    local = [target for target in targets if not target.startswith("https://")]
    assert [target for target in local if not (ROOT / target).exists()] == []


def test_the_room_lists_all_its_files():
    text = (ROOT / "nanogpt" / "__init__.py").read_text("utf-8")
    files = {path.name for path in (ROOT / "nanogpt").glob("*.py")} - {"__init__.py"}
    assert files == set(re.findall(r"\w+\.py", text)) - {"train_gpt.py"}
