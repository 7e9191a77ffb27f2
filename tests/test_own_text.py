"""data/prepare.py for a newcomer's own text: one command that always ends with usable shards.

The shards are read with `struct` alone and turned back into text. The command runs in a folder that
stands in for data/, or as a process of its own where signals, pipes and exit statuses matter.
"""
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from test_data_scripts import (
    BOS,
    ROOT,
    assert_one_sentence,
    folder_is_empty,
    from_bytes,
    make_texts,
    read_corpus,
    read_shard,
    read_split,
    script,
    write_jsonl,
)

from data import prepare, shards
from data.texts import errors_of

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


def record_of(folder):
    return json.loads((folder / "corpus.json").read_text())


# ---- how the text is split -----------------------------------------------------------------------

def test_one_document_gives_its_first_95_percent_to_training_and_the_rest_to_validation(
        tmp_path, data):
    prepare.main([write(tmp_path / "story.txt", STORY), "--bytes"])
    [train] = read_split(data / "story", "train")
    [val] = read_split(data / "story", "val")
    assert from_bytes(train + val) == STORY
    assert len(val) / len(STORY) == pytest.approx(0.05, abs=0.001)


def test_the_trainer_reads_both_splits_of_one_document(tmp_path, data):
    prepare.main([write(tmp_path / "story.txt", STORY), "--bytes"])
    for split in ("train", "val"):
        [path] = shards.find_shards(data / "story", split, f"*_{split}_*.bin", "")
        assert shards.read_shard(path, 50257).starts.tolist() == [0]


def test_two_files_lose_nothing_and_one_of_them_is_cut(tmp_path, data):
    first, second = STORY[:30_000], STORY[30_000:]
    prepare.main([write(tmp_path / "a.txt", first), write(tmp_path / "b.txt", second), "--bytes"])
    train = list(map(from_bytes, read_split(data / "a", "train")))
    [val] = map(from_bytes, read_split(data / "a", "val"))
    assert sorted([train[0] + val, train[1]]) == sorted([first, second])
    assert len(val) / len(STORY) == pytest.approx(0.05, abs=0.001)


@pytest.mark.parametrize("seed", range(5))
def test_validation_is_5_percent_where_one_document_is_longer_than_all_others(tmp_path, seed):
    texts = [text[:900] for text in make_texts(50)]
    texts.insert(20, "word " * 400_000)
    source = write_jsonl(tmp_path / "mix.jsonl", texts)
    out = tmp_path / "out"
    prepare.main([str(source), "--bytes", f"--out={out}", f"--seed={seed}"])
    val = count(read_split(out, "val"))
    assert val / (val + count(read_split(out, "train"))) == pytest.approx(0.05, abs=0.002)
    whole = [from_bytes(document) for document in read_corpus(out)]
    assert sum(map(len, whole)) == sum(map(len, texts))


def test_documents_of_ordinary_length_stay_whole(tmp_path):
    texts = make_texts(200)
    out = tmp_path / "out"
    prepare.main([str(write_jsonl(tmp_path / "a.jsonl", texts)), "--bytes", f"--out={out}"])
    assert sorted(map(from_bytes, read_corpus(out))) == sorted(texts)


@pytest.mark.parametrize("val_tokens", [[], ["--val_tokens=7"], ["--val_tokens=300"]])
@pytest.mark.parametrize("lengths", [[2000], [300, 300], [40] * 60, [5, 600], [600, 5, 5]])
def test_both_splits_are_always_long_enough_for_the_trainer(tmp_path, lengths, val_tokens):
    texts = [f"{number:<{length}}" for number, length in enumerate(lengths)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    prepare.main([str(source), "--bytes", f"--out={tmp_path / 'out'}", *val_tokens])
    train = count(read_split(tmp_path / "out", "train"))
    val = count(read_split(tmp_path / "out", "val"))
    assert train >= 130
    assert val >= max(129, 301 * (val_tokens == ["--val_tokens=300"]))
    assert train + val in (sum(lengths) + len(lengths), sum(lengths) + len(lengths) + 1)


@pytest.mark.parametrize("num_tokens, status", [(259, 0), (258, 2)])
def test_only_text_that_cannot_make_two_splits_is_refused(tmp_path, num_tokens, status):
    source = write(tmp_path / "tiny.txt", "x" * (num_tokens - 1))  # and the separator
    run = script("prepare.py", source, "--bytes", "--out", tmp_path / "my" / "out")
    assert run.returncode == status
    if status:
        assert_one_sentence(run, 2, source, "258", "129", "130", "add text")
        assert not (tmp_path / "my").exists(), "a refused text leaves no folders behind"


def test_equal_documents_are_taken_once_and_counted(tmp_path, data, capsys):
    texts = make_texts(100)
    source = write_jsonl(tmp_path / "twice.jsonl", texts + texts[:30] + ["  "])
    prepare.main([str(source), "--bytes"])
    assert sorted(map(from_bytes, read_corpus(data / "twice"))) == sorted(texts)
    assert "from 100 documents (duplicates dropped: 30)" in capsys.readouterr().out


# ---- where the shards go, and when they are made -------------------------------------------------

@pytest.mark.parametrize("given, folder", [
    ("story.txt", "story"),
    ("LICENSE", "LICENSE"),
    ("my texts (2).old.txt", "my_texts__2_.old"),
    ("my_train_set.txt", "my-train_set"),
    ("x_VAL.txt", "x-VAL"),
    ("pydocs.txt", "pydocs_tokens"),
    ("FineWeb10B.txt", "FineWeb10B_tokens"),
    ("taken.txt", "taken_tokens"),
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


def test_texts_of_one_name_have_a_folder_each_and_find_it_again(tmp_path, data, capsys):
    texts = {folder: STORY + folder for folder in ("a", "b", "c")}
    for again in range(2):
        for number, (folder, text) in enumerate(texts.items(), 1):
            source = write(tmp_path / folder / "story.txt", text) if not again else str(tmp_path / folder / "story.txt")
            prepare.main([source, "--bytes"])
            assert ("already there" in capsys.readouterr().out) == bool(again)
            own = data / ("story" if number == 1 else f"story-{number}")
            assert "".join(map(from_bytes, read_corpus(own))) == text


@pytest.mark.parametrize("content", ['{"name": "our corpus"}', '[1, 2]', 'no JSON'])
def test_a_corpus_json_of_the_user_is_never_touched(tmp_path, data, capsys, content):
    source = write(data / "wiki" / "a.txt", STORY)
    theirs = data / "wiki" / "corpus.json"
    theirs.write_text(content)
    prepare.main([str(data / "wiki"), "--bytes"])
    assert "".join(map(from_bytes, read_corpus(data / "wiki_tokens"))) == STORY
    with pytest.raises(SystemExit, match="2"):
        prepare.main([source, "--bytes", f"--out={data / 'wiki'}"])
    assert f"{theirs}: already there, and not written by this program" in capsys.readouterr().err
    assert theirs.read_text() == content and len(list((data / "wiki").iterdir())) == 2


def test_an_empty_name_is_not_this_folder(capsys):
    with pytest.raises(SystemExit, match="2"):
        prepare.main([""])
    assert "one of the names is empty" in capsys.readouterr().err


def test_the_last_line_is_the_command_that_trains(tmp_path, data, capsys):
    prepare.main([write(tmp_path / "story.txt", STORY), "--bytes"])
    made, command = capsys.readouterr().out.splitlines()
    total = 1 + len(STORY)
    val = total // 20
    train = total - val + 1  # the second part has a separator of its own
    assert made.startswith(
        f"data/story: {train:,} training and {val:,} validation tokens (bytes) from 1 document (")
    program, *rest = command.split()
    assert "python" in program and rest == ["train_gpt.py", "--data_dir=data/story"]


def test_print_folder_prints_nothing_else_on_stdout(tmp_path, data, capsys):
    source = write(tmp_path / "story.txt", STORY)
    for word in ("training", "already there"):
        prepare.main([source, "--bytes", "--print_folder"])
        printed = capsys.readouterr()
        assert printed.out == "data/story\n"
        assert word in printed.err


def test_corpus_json_says_what_the_shards_were_made_of(tmp_path, data):
    source = write(tmp_path / "story.txt", STORY)
    prepare.main([source, "--bytes", "--seed=3"])
    status = os.stat(source)
    record = record_of(data / "story")
    assert record["files"] == [
        {"path": source, "size": status.st_size, "changed": status.st_mtime_ns}]
    assert record["options"]["seed"] == 3
    del record["files"], record["options"]
    assert record == {
        "inputs": [source],
        "name": "story",
        "wanted_tokens": "bytes",
        "tokens": "bytes",
        "train_tokens": count(read_split(data / "story", "train")),
        "val_tokens": count(read_split(data / "story", "val")),
        "documents": 1,
        "duplicates": 0,
    }


@pytest.mark.parametrize("out", [[], ["--out=elsewhere"]], ids=["default", "explicit"])
def test_the_same_command_again_changes_nothing(tmp_path, data, capsys, out):
    command = [write(tmp_path / "story.txt", STORY), "--bytes", *out]
    prepare.main(command)
    folder = tmp_path / "elsewhere" if out else data / "story"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    capsys.readouterr()
    prepare.main([*command, "--workers=2"])
    assert "already there" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("change", ["text", "option"])
def test_after_a_change_the_old_shards_stay_for_runs_that_use_them(tmp_path, data, change, capsys):
    source = write(tmp_path / "story.txt", STORY)
    prepare.main([source, "--bytes", "--shard_tokens=1000", "--split_blank=1"])
    before = contents(data / "story")
    text, options = STORY, ["--shard_tokens=1000", "--split_blank=1"]
    if change == "text":
        text = STORY.upper()
        write(tmp_path / "story.txt", text)
    else:
        options = []
    capsys.readouterr()
    for times in range(2):
        prepare.main([source, "--bytes", *options])
        assert contents(data / "story") == before
        assert "".join(map(from_bytes, read_corpus(data / "story-2"))) == text
        out = capsys.readouterr().out
        reason = {"text": "story has an older version of this text", "option": "story has this text, made with other options"}
        assert (f"{reason[change]}; it stays, for runs that use it" in out) == (times == 0)
        assert ("story-2: already there" in out) == (times == 1)
    assert sorted(path.name for path in data.iterdir()) == ["story", "story-2"]


def test_a_corpus_is_found_again_also_where_an_older_one_before_it_is_gone(tmp_path, data, capsys):
    source = write(tmp_path / "story.txt", STORY)
    prepare.main([source, "--bytes"])
    write(tmp_path / "story.txt", STORY.upper())
    prepare.main([source, "--bytes"])
    for path in (data / "story").iterdir():
        path.unlink()
    (data / "story").rmdir()
    prepare.main([source, "--bytes"])
    assert "story-2: already there" in capsys.readouterr().out and [*data.iterdir()] == [data / "story-2"]


def test_damaged_shards_are_made_anew_in_their_folder(tmp_path, data):
    source = write(tmp_path / "story.txt", STORY)
    prepare.main([source, "--bytes"])
    (data / "story" / "story_train_000001.bin").write_bytes(b"damaged")
    prepare.main([source, "--bytes"])
    assert "".join(map(from_bytes, read_corpus(data / "story"))) == STORY
    assert len(list((data / "story").iterdir())) == 3 and [*data.iterdir()] == [data / "story"]


def test_a_failed_run_leaves_the_old_shards_as_they_were(tmp_path, data, capsys):
    source = write(tmp_path / "story.txt", STORY)
    prepare.main([source, "--bytes"])
    before = read_corpus(data / "story"), record_of(data / "story")
    write(tmp_path / "story.txt", b"\xff\xff not text")
    with pytest.raises(SystemExit, match="2"):
        prepare.main([source, "--bytes"])
    assert (read_corpus(data / "story"), record_of(data / "story")) == before


def test_an_explicit_folder_with_other_shards_is_left_alone(tmp_path, data, capsys):
    source = write(tmp_path / "story.txt", STORY)
    out = tmp_path / "out"
    prepare.main([source, "--bytes", f"--out={out}"])
    write(tmp_path / "story.txt", STORY * 2)
    with pytest.raises(SystemExit, match="2"):
        prepare.main([source, "--bytes", f"--out={out}"])
    assert "delete the old shards, or choose another --out" in capsys.readouterr().err
    assert len(from_bytes(read_split(out, "train")[0])) < len(STORY)


# ---- tokens --------------------------------------------------------------------------------------

OFFLINE = {"TIKTOKEN_CACHE_DIR": "none", "https_proxy": "http://127.0.0.1:9"}


def test_without_a_vocabulary_bytes_are_taken_and_one_line_says_so(tmp_path):
    source = write(tmp_path / "story.txt", STORY)
    run = script("prepare.py", source, "--out", tmp_path / "out", **OFFLINE)
    assert run.returncode == 0
    assert "".join(map(from_bytes, read_corpus(tmp_path / "out"))) == STORY
    note, made, _ = run.stdout.splitlines()
    for part in ("every byte becomes a token", "TIKTOKEN_CACHE_DIR", "--tokens=gpt2"):
        assert part in note
    assert "validation tokens (bytes)" in made
    assert record_of(tmp_path / "out")["tokens"] == "bytes"


def test_a_silent_network_is_given_up(monkeypatch):
    import tiktoken
    answered = threading.Event()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: answered.wait(20))
    with pytest.raises(prepare.PrepareError, match="TimeoutError"):
        prepare.load_vocabulary(seconds=0.05)
    answered.set()


# ---- what is read --------------------------------------------------------------------------------

@pytest.mark.parametrize("name, content", [
    ("marked.txt", b"\xef\xbb\xbf" + STORY.encode()),
    ("wide.txt", STORY.encode("utf-16")),
    ("wide_big_endian.log", b"\xfe\xff" + STORY.encode("utf-16-be")),
    ("marked.jsonl", b"\xef\xbb\xbf" + json.dumps({"text": STORY}).encode()),
    ("no_suffix", STORY.encode()),
])
def test_marks_are_stripped_and_any_suffix_is_read(tmp_path, name, content):
    prepare.main([write(tmp_path / name, content), "--bytes", f"--out={tmp_path / 'out'}"])
    assert "".join(map(from_bytes, read_corpus(tmp_path / "out"))) == STORY


def test_line_ends_of_windows_and_foreign_letters_stay(tmp_path):
    text = "Все счастливые семьи\r\n東京は夜の七時\r\n" * 100
    prepare.main([write(tmp_path / "a.txt", text), "--bytes", f"--out={tmp_path / 'out'}"])
    tokens = [token for document in read_corpus(tmp_path / "out") for token in document]
    assert from_bytes(tokens) == text


def test_a_folder_of_source_code_is_read_and_what_is_not_text_is_left_out(tmp_path, data, capsys):
    write(tmp_path / "code" / "a.py", STORY)
    write(tmp_path / "code" / "b" / "c.rs", STORY.upper())
    write(tmp_path / "code" / "d.py", b"\xff\x00\xfe")
    write(tmp_path / "code" / "e.txt", b"zero \0 bytes")
    write(tmp_path / "code" / "table.csv", STORY)
    write(tmp_path / "code" / ".hidden", STORY)
    prepare.main(["code", "--bytes"])
    texts = "".join(map(from_bytes, read_corpus(data / "code")))
    assert sorted(texts) == sorted(STORY + STORY.upper())
    said = capsys.readouterr().out
    assert f"left out 2 file(s) not in UTF-8, first {os.path.join('code', 'd.py')}." in said
    assert f"left out 1 file(s) whose names do not end as those of texts, first {os.path.join('code', 'table.csv')};" in said


def test_an_address_is_no_file_and_is_to_be_downloaded_first(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        prepare.main(["https://example.com/a.txt", "--bytes", f"--out={tmp_path / 'out'}"])
    assert "no such file or folder; download it first." in capsys.readouterr().err


def make_link(path):
    path.symlink_to("gone")


def make_deep(path):
    path.write_text('{"text": "fine"}\n{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")


def make_latin(path):
    path.mkdir()
    for name in ("a.txt", "b.txt"):
        (path / name).write_bytes("café".encode("latin-1") * 200)


@pytest.mark.parametrize("name, make, diagnosis", [
    ("latin", make_latin, "no file in UTF-8"),
    ("null.jsonl", lambda path: path.write_text('{"text": null}'), 'line 1: its "text" is no text'),
    ("cut.jsonl", lambda path: path.write_text('{"text": "a"}\n{"text": "b'), "line 2: no JSON"),
    ("number.jsonl", lambda path: path.write_text('{"text": 3}'), 'line 1: its "text" is no text'),
    ("other.jsonl", lambda path: path.write_text('{"body": "x"}'), "as it has the keys 'body'"),
    ("link.txt", make_link, "a link to gone"),
    ("pipe", lambda path: os.mkfifo(path), "a pipe or a device"),
    ("deep.jsonl", make_deep, "line 2: nested too deeply"),
    ("picture.png", lambda path: path.write_bytes(b"\x89PNG\r\n"), "not text"),
    ("zeros.txt", lambda path: path.write_bytes(bytes(1000)), "zero bytes"),
    ("wide.txt", lambda path: path.write_bytes(STORY.encode("utf-16le")), "iconv -f utf-16le"),
    ("windows.txt", lambda path: path.write_bytes(b"\x93quoted\x94"), "iconv -f cp1252"),
    ("book.pdf", lambda path: path.write_bytes(b"%PDF-1.5\n\xff"), "no plain text; save it as a .txt"),
    ("array.json", lambda path: path.write_text('[{"text": "a"}]'), "JSON is no text"),
    ("twice.jsonl", lambda path: path.write_text(300 * '{"text": "the same"}\n'), "without its 299 duplicate"),
    ("a" * 300, lambda path: None, "cannot be read"),
    ("empty.txt", lambda path: path.touch(), "no text"),
])
@pytest.mark.skipif(os.name == "nt", reason="makes links and pipes")
def test_unusable_input_is_one_sentence_with_the_right_diagnosis(
        tmp_path, capsys, name, make, diagnosis):
    path = tmp_path / name
    make(path)
    with pytest.raises(SystemExit, match="2"):
        prepare.main([str(path), "--bytes", f"--out={tmp_path / 'out'}"])
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith(f"prepare.py: {path}")
    assert diagnosis in message
    assert folder_is_empty(tmp_path / "out")


def test_of_a_folder_within_a_folder_that_cannot_be_read_the_name_is_said(tmp_path):
    closed = tmp_path / "texts" / "closed"
    with pytest.raises(prepare.PrepareError, match=f"^{closed}: cannot be read"):
        with errors_of(tmp_path / "texts"):
            raise PermissionError(13, "Permission denied", str(closed))


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
def test_a_document_that_is_too_large_for_the_memory_is_one_sentence(tmp_path):
    (tmp_path / "large.txt").write_bytes(b"long " * 20_000_000)
    command = [sys.executable, ROOT / "data" / "prepare.py", tmp_path / "large.txt", "--bytes", f"--out={tmp_path / 'out'}"]
    run = subprocess.run(["bash", "-c", 'ulimit -v 500000; exec "$@"', "", *command], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1, run.stderr
    assert "a document needs more memory" in run.stderr and "--split_blank=1" in run.stderr
    assert folder_is_empty(tmp_path / "out")


# ---- the end of a run ----------------------------------------------------------------------------

def started(tmp_path, *args):
    """A run that is in the middle of several megabytes of documents."""
    source = tmp_path / "long.txt"
    with open(source, "w") as file:
        for number in range(300_000):
            file.write(f"{number}: a short paragraph about nothing at all\n\n")
    out = tmp_path / "out"
    run = subprocess.Popen(
        [sys.executable, ROOT / "data" / "prepare.py", source, "--split_blank=1", "--bytes",
         f"--out={out}", *args],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(out.glob(".incomplete-*/documents.u16")):
        assert run.poll() is None, run.communicate()
        time.sleep(0.01)
    time.sleep(0.2)  # the workers start
    return run, out


@pytest.mark.skipif(os.name == "nt", reason="sends signals")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number, to_group", [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_ends_it_in_one_sentence_and_leaves_nothing(tmp_path, number, to_group, workers):
    run, out = started(tmp_path, f"--workers={workers}")
    (os.killpg if to_group else os.kill)(run.pid, number)
    output, errors = run.communicate(timeout=20)  # ends when the workers have closed it, too
    assert run.returncode == 128 + number, errors
    assert output == ""
    assert errors == f"prepare.py: stopped by {number.name}; run it again to begin anew.\n"
    assert folder_is_empty(out)


@pytest.mark.skipif(os.name == "nt", reason="sends signals")
def test_what_a_killed_run_leaves_is_swept_by_the_next_one(tmp_path):
    run, out = started(tmp_path, "--workers=2")
    in_use = script("prepare.py", tmp_path / "long.txt", "--bytes", "--out", out)
    assert_one_sentence(in_use, 2, "in use by another process", f"-{run.pid}-")
    run.kill()
    run.communicate(timeout=20)  # the workers end, too
    assert list(out.glob(".incomplete-*"))
    again = script("prepare.py", tmp_path / "long.txt", "--bytes", "--out", out)
    assert again.returncode == 0, again.stderr
    assert sorted(path.name for path in out.iterdir()) == [
        "corpus.json", "out_train_000001.bin", "out_val_000000.bin"]


@pytest.mark.skipif(os.name == "nt", reason="limits the size of files")
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    import resource
    run = subprocess.run(
        [sys.executable, ROOT / "data" / "prepare.py", write(tmp_path / "story.txt", STORY),
         "--bytes", f"--out={tmp_path / 'out'}"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True, text=True, check=False)
    assert_one_sentence(run, 2, "cannot write to", tmp_path / "out", "make room")
    assert folder_is_empty(tmp_path / "out")


def test_a_reader_that_stops_after_the_first_line_is_no_error(tmp_path):
    source = write(tmp_path / "story.txt", STORY)
    out = tmp_path / "out"
    receiver, sender = os.pipe()
    os.close(receiver)
    run = subprocess.run(
        [sys.executable, ROOT / "data" / "prepare.py", source, "--bytes", f"--out={out}"],
        stdout=sender, stderr=subprocess.PIPE, text=True, check=False)
    os.close(sender)
    assert (run.returncode, run.stderr) == (0, "")
    [path] = out.glob("*_train_*.bin")
    assert read_shard(path)[0] == BOS
