"""data/prepare.py for a newcomer's own text: one command that always ends with usable shards.

The shards are read with `struct` alone and turned back into text. The command runs in a folder that
stands in for data/, or as a process of its own where signals, pipes and exit statuses matter.
"""
import os
import subprocess
import sys

import pytest
from test_data_scripts import (
    ROOT,
    assert_one_sentence,
    from_bytes,
    make_texts,
    read_corpus,
    read_split,
    write_jsonl,
)

from data import prepare
from records.console import to_type

STORY = "".join(f"Line {number}: the cat sat on a mat.\n" for number in range(2000))


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder in place of data/, for the commands that this process runs."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setattr(prepare, "DATA", folder)
    monkeypatch.chdir(tmp_path)
    return folder


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def count(documents):
    return sum(1 + len(document) for document in documents)


# ---- how the text is split -----------------------------------------------------------------------

def test_one_document_gives_its_first_95_percent_to_training_and_the_rest_to_validation(
        tmp_path, data):
    prepare.main([write(tmp_path / "story.txt", STORY), "--bytes"])
    [train] = read_split(data / "story", "train")
    [val] = read_split(data / "story", "val")
    assert from_bytes(train + val) == STORY
    assert len(val) / len(STORY) == pytest.approx(0.05, abs=0.001)


def test_validation_is_5_percent_where_one_document_is_longer_than_all_others(tmp_path):
    texts = [text[:900] for text in make_texts(50)]
    texts.insert(20, "word " * 400_000)
    source = write_jsonl(tmp_path / "mix.jsonl", texts)
    out = tmp_path / "out"
    prepare.main([str(source), "--bytes", f"--out={out}"])
    val = count(read_split(out, "val"))
    assert val / (val + count(read_split(out, "train"))) == pytest.approx(0.05, abs=0.002)
    whole = [from_bytes(document) for document in read_corpus(out)]
    assert sum(map(len, whole)) == sum(map(len, texts))


@pytest.mark.parametrize("lengths", [[2000], [40] * 60, [600, 5, 5]])
def test_both_splits_are_always_long_enough_for_the_trainer(tmp_path, lengths):
    texts = [f"{number:<{length}}" for number, length in enumerate(lengths)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    prepare.main([str(source), "--bytes", f"--out={tmp_path / 'out'}"])
    train = count(read_split(tmp_path / "out", "train"))
    val = count(read_split(tmp_path / "out", "val"))
    assert train >= 130
    assert val >= 129
    assert train + val in (sum(lengths) + len(lengths), sum(lengths) + len(lengths) + 1)


# ---- where the shards go, and when they are made -------------------------------------------------

@pytest.mark.parametrize("given, folder", [
    ("story.txt", "story"),
    ("LICENSE", "LICENSE"),
    ("my_train_set.txt", "my-train_set"),
    ("taken.txt", "taken-2"),
    ("___.txt", "text"),
    ("сказка.txt", "сказка"),
])
def test_the_default_folder_has_the_name_of_the_input(tmp_path, data, given, folder):
    write(data / "taken" / "other.py", "something else")
    prepare.main([write(tmp_path / given, STORY), "--bytes"])
    train = sorted((data / folder).glob("*_train_*.bin"))
    val = sorted((data / folder).glob("*_val_*.bin"))
    assert [path.name for path in train + val] == [
        f"{folder}_train_000001.bin", f"{folder}_val_000000.bin"]


def test_the_last_line_is_the_command_that_trains(tmp_path, data, capsys):
    prepare.main([write(tmp_path / "story.txt", STORY), "--bytes"])
    made, command = capsys.readouterr().out.splitlines()
    total = 1 + len(STORY)
    val = total // 20
    train = total - val + 1  # the second part has a separator of its own
    assert made.startswith(
        f"data/story: {train:,} training and {val:,} validation tokens (bytes) from 1 document (")
    assert command == to_type("train_gpt.py --data_dir=data/story")


def test_inputs_may_stand_before_and_behind_options(tmp_path, data):
    prepare.main([write(tmp_path / "a.txt", STORY), "--bytes", write(tmp_path / "b.txt", STORY.upper())])
    assert sum(map(len, read_corpus(data / "a"))) == 2 * len(STORY)


def test_print_folder_prints_nothing_else_on_stdout(tmp_path, data, capsys):
    source = write(tmp_path / "story.txt", STORY)
    for word in ("training", "already made"):
        prepare.main([source, "--bytes", "--print_folder"])
        printed = capsys.readouterr()
        assert printed.out == "data/story\n"
        assert word in printed.err


# ---- the end of a run ----------------------------------------------------------------------------

def test_the_same_command_again_changes_nothing_and_after_a_change_the_old_shards_stay(tmp_path, data, capsys):
    source = write(tmp_path / "story.txt", STORY)
    for options, text, folder, is_new in (
            ([], STORY, "story", True), ([], STORY, "story", False), (["--split_blank=1"], STORY, "story-2", True),
            ([], STORY.upper(), "story-3", True), ([], STORY.upper(), "story-3", False)):
        before = {path: path.stat().st_mtime_ns for path in data.rglob("*.bin")}
        if is_new and text != STORY:
            write(tmp_path / "story.txt", text)
        prepare.main([source, "--bytes", *options])
        said = capsys.readouterr().out
        assert f"data/{folder}: " in said and ("already made of this text; used again" not in said) == is_new
        assert "".join(map(from_bytes, read_corpus(data / folder))) == text
        assert before.items() <= {path: path.stat().st_mtime_ns for path in data.rglob("*.bin")}.items()
    with pytest.raises(SystemExit, match="2"):
        prepare.main([source, "--bytes", f"--out={data / 'story'}"])
    assert "already there, and made of other files" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="limits the size of files")
def test_a_full_disk_is_one_sentence(tmp_path):
    import resource
    run = subprocess.run(
        [sys.executable, ROOT / "data" / "prepare.py", write(tmp_path / "story.txt", STORY),
         "--bytes", f"--out={tmp_path / 'out'}"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True, text=True, check=False)
    assert_one_sentence(run, 2, "cannot write to", tmp_path / "out", "make room")
    assert not (tmp_path / "out" / "corpus.json").exists()
