"""data/prepare.py, from texts to shards, and data/fineweb.py.

References: tokens are turned back into text and compared with the input, tiktoken itself encodes
with a small vocabulary, and a fake downloader stands in for the network.
"""
import gzip
import json
import random
import resource
import shutil
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import tiktoken
from conftest import ROOT, SEPARATOR, write_shard

import sample
from data import fineweb, prepare, shards, texts
from records.console import end_in_order, to_type


@pytest.fixture
def gpt2(monkeypatch):
    """tiktoken with the bytes and a few pairs of GPT-2's vocabulary, in the place of all of it, which needs a network."""
    ranks = {bytes([byte]): token for token, byte in enumerate(prepare.gpt2.token_to_byte)}
    ranks |= {pair: 256 + number for number, pair in enumerate([b" t", b" a", b"he", b"in", b"re"])}
    splits = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    encoding = tiktoken.Encoding("small", pat_str=splits, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": SEPARATOR})
    monkeypatch.setattr(prepare.gpt2, "load", lambda: encoding)
    return encoding


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder in place of data/."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setattr(prepare, "DATA", folder)
    monkeypatch.chdir(tmp_path)
    return folder


def read_split(folder, split):
    """The documents of a split as lists of tokens, without what separates them."""
    [path] = folder.glob(f"*_{split}_*.bin")
    shard = shards.read_shard(path, 50304)
    before, *documents = np.split(shard.tokens, shard.starts)
    assert not len(before)
    return [document[1:].tolist() for document in documents]


def read_corpus(folder):
    """The documents of both splits."""
    return read_split(folder, "train") + read_split(folder, "val")


FIRST_BYTES = [b for b in range(256) if chr(b).isprintable() and not chr(b).isspace() and b != 0xAD]
GPT2_BYTES = FIRST_BYTES + [b for b in range(256) if b not in FIRST_BYTES]  # GPT-2's order, written a second way


def from_bytes(document):
    return bytes(GPT2_BYTES[token] for token in document).decode("utf-8")


def make_texts(count, seed=0):
    rng = random.Random(seed)
    words = "the cat sat on a mat — naïve café, 東京 and Ωmega; don't 1234 stop\n".split(" ")
    texts = []
    for number in range(count):
        text = " ".join(rng.choices(words, k=rng.randint(1, 120)))
        texts.append(f"{number}: {text}")
    return texts


def json_lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def main(argv):
    """What the last line of prepare.py does. After status 0 it returns."""
    status = end_in_order("prepare.py", prepare.work, argv)
    if status:
        sys.exit(status)


def run_prepare(path, *options):
    """Makes a corpus of bytes, or of what the options say. Returns its folder."""
    out = Path(f"{path}.out")
    main([str(path), "--bytes", f"--out={out}", *options])
    return out


def refusal(capsys, call, *arguments):
    """The one sentence with which this ends, with status 2."""
    with pytest.raises(SystemExit, match="2"):
        call(*arguments)
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


STORY = "".join(f"Line {number}: the cat sat on a mat.\n" for number in range(2000))
STORIES = make_texts(60, seed=3)
LINES = json_lines(STORIES)
INDENTED = json.dumps([{"text": text} for text in STORIES], indent=1)
JOINED = "\n<|endoftext|>\n".join(STORIES)


# ---- prepare.py: tokens and splits ---------------------------------------------------------------

def test_bytes_have_the_tokens_that_gpt2_has_for_them():
    assert prepare.gpt2.token_to_byte.tolist() == GPT2_BYTES
    assert prepare.gpt2.byte_to_token[GPT2_BYTES].tolist() == [*range(256)]
    known = {"!": 0, "0": 15, "A": 32, "a": 64, "~": 93, "\0": 188, "\t": 197, "\n": 198, " ": 220, "\x7f": 221}
    assert {character: prepare.gpt2.byte_to_token[ord(character)] for character in known} == known


def test_gpt2s_tokens_equal_tiktokens_and_decode_back_to_the_input(tmp_path, gpt2):
    texts = make_texts(100) + ["literal <|endoftext|> in a document is text"]
    out = run_prepare(write(tmp_path / "a.jsonl", json_lines(texts)), "--tokens=gpt2")
    assert sorted(read_corpus(out)) == sorted(gpt2.encode(text, disallowed_special=()) for text in texts)


def test_validation_is_a_fair_sample_of_whole_documents_that_training_lacks(tmp_path):
    texts = make_texts(2000)
    out = run_prepare(write(tmp_path / "a.jsonl", json_lines(texts)))
    train, val = (list(map(from_bytes, read_split(out, split))) for split in ("train", "val"))
    assert sorted(train + val) == sorted(texts)
    tokens, total = (sum(len(text.encode()) + 1 for text in part) for part in (val, texts))
    assert total // 20 <= tokens < total // 20 + 2000  # one document over at most
    positions = [int(text.split(":")[0]) for text in val]  # in the input, 0..1999
    assert 800 < sum(positions) / len(positions) < 1200


def test_equal_documents_are_taken_once_and_counted(tmp_path, capsys):
    texts = make_texts(100)
    out = run_prepare(write(tmp_path / "a.jsonl", json_lines(texts + texts[:30] + ["  "])))
    assert sorted(map(from_bytes, read_corpus(out))) == sorted(texts)
    assert "from 100 documents (duplicates dropped: 30)" in capsys.readouterr().out


# ---- prepare.py: what people bring ---------------------------------------------------------------

@pytest.mark.parametrize("name, content, options", [
    ("a.jsonl", LINES, []),
    ("a.ndjson", LINES, []),
    ("a.json", LINES, []),
    ("lines.txt", LINES, []),
    ("gaps.jsonl", LINES.replace("\n", "\n\n"), []),
    ("marked.jsonlines", b"\xef\xbb\xbf" + LINES.encode(), []),
    ("marked.jsonl", LINES.encode("utf-16"), []),
    ("joined.txt", JOINED, ["--split=<|endoftext|>"]),
    ("windows.txt", JOINED.replace("\n<", "\r\n<").replace(">\n", ">\r\n"), ["--split=<|endoftext|>"]),
    ("marked.txt", JOINED.encode("utf-16"), ["--split=<|endoftext|>"]),
    ("wide.txt", JOINED.encode("utf-32"), ["--split=<|endoftext|>"]),
    ("blank.txt", "\n\n".join(text.strip() for text in STORIES), ["--split_blank=1"]),
    ("windows.txt", "\n\n \r\n\n".join(text.replace("\n", "\n\n\n") for text in STORIES), ["--split_blank=3"]),
])
def test_documents_are_found_in_texts_and_json_lines(tmp_path, name, content, options):
    out = run_prepare(write(tmp_path / name, content), *options)
    found = [from_bytes(document).strip() for document in read_corpus(out)]
    assert sorted(text.replace("\n\n\n", "\n") for text in found) == sorted(text.strip() for text in STORIES)


@pytest.mark.parametrize("text", [
    "[Verse 1]\nla la\n" * 99, "{ a set }\n" * 99, '{"quoted"} he said, and no JSON\n' * 99, "[1]\n" * 99,
    "\none\r\n\n\ntwo\n\n" * 30, "Все счастливые семьи\r\n東京は夜の七時\r\n" * 30])
def test_a_text_is_one_document_byte_for_byte_also_if_it_looks_a_bit_like_json(tmp_path, text):
    train, val = read_corpus(run_prepare(write(tmp_path / "a.txt", text)))
    assert from_bytes(train + val) == text


@pytest.mark.parametrize("name, content, is_said", [("a.txt", JOINED, True), ("a.jsonl", LINES, False), ("b.jsonl", json_lines([JOINED, JOINED + "."]), True)])
def test_markers_between_documents_that_are_read_as_text_are_said(tmp_path, capsys, name, content, is_said):
    run_prepare(write(tmp_path / name, content))
    assert capsys.readouterr().err.count("if it ends documents, give --split='<|endoftext|>'") == is_said, "once at most"


WIDE = "The cat, naïve as ever.\r\nAnd 東京.\n" * 99
ZEROS = bytes(range(256)) * 20
BAD = [  # name, content, what the sentence says
    ("a.csv", b"id,text\n1,hello\n", "a table, not text; export its text column as JSON lines"),
    ("a.parquet", b"PAR1" + ZEROS, "Parquet, not text; export its text column as JSON lines"),
    ("a.txt", gzip.compress(JOINED.encode(), mtime=0), "compressed (gzip), not text; unpack it first"),
    ("a.docx", b"PK\3\4" + ZEROS, ".docx"),
    ("a.pdf", b"%PDF-1.5\n\xff", "a PDF, not text; save its text as a .txt file"),
    ("a.bin", struct.pack("<256i", 20240520, 1, *[0] * 254), "if it holds tokens, give its folder to train_gpt.py --data_dir"),
    ("a.txt", WIDE.encode("utf-16le"), "iconv -f utf-16le -t utf-8"),
    ("a.txt", "café".encode("latin-1") * 9, "cp1252 of Windows"),
    ("a.jsonl", b'{"text": "fine"}\n{"text": \n', "line 2: no JSON object"),
    ("a.json", INDENTED.encode(), "line 1: no JSON object like {\"text\": \"...\"}; repair it, or write each object on a line: jq -c"),
    ("a.jsonl", b'{"body": "fine"}\n', "line 1: \"text\" is missing; the keys are 'body'. Name that of the text with --key"),
    ("a.jsonl", b"[1, 2]\n", "line 1: no JSON object"),
    ("a.ndjson", b'{"text": null}', "line 1: \"text\" is null, not a text"),
    ("a.txt", b"few words", "too few"),
    ("a.txt", b"", "no text"),
    ("absent.txt", None, "check the path"),
]


@pytest.mark.parametrize("name, content, advice", BAD)
def test_what_cannot_be_used_is_named_for_what_it_is_in_one_sentence(tmp_path, capsys, name, content, advice):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    message = refusal(capsys, run_prepare, path)
    assert message.startswith(f"prepare.py: {path}") and advice in message
    assert [*tmp_path.iterdir()] == [path] * (content is not None), "nothing is left behind"


def test_a_folder_is_searched_and_what_is_left_out_is_said(tmp_path, capsys):
    files = {"A.TXT": JOINED, "deep/er/b.md": "three" * 30, "c.ndjson": LINES, "LICENSE": "four\n" * 30,
             "package.json": '{\n "name": "x"}', "bad.py": b"\xff\x00", "pic.png": b"\x89PNG", "t.csv": "a,b",
             ".hidden/e.txt": "hidden", ".f.txt": "hidden", "blank.txt": " \n\n"}
    for name, content in files.items():
        write(tmp_path / "in" / name, content)
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    out = run_prepare(tmp_path / "in")
    expected = [JOINED, "three" * 30, *STORIES, "four\n" * 30]
    assert sorted(map(from_bytes, read_corpus(out))) == sorted(expected)
    said = capsys.readouterr().err
    assert f"left out 4 file(s) of {tmp_path / 'in'}, first {tmp_path / 'in' / 'bad.py'}: not text" in said


def test_a_mistake_in_json_lines_of_a_folder_ends_it_as_good_lines_would_be_lost_too(tmp_path, capsys):
    write(tmp_path / "in" / "a.txt", STORY)
    write(tmp_path / "in" / "e.jsonl", LINES + '{"body": "fine"}\n')
    message = refusal(capsys, run_prepare, tmp_path / "in")
    assert "e.jsonl, line" in message and "Name that of the text with --key" in message


@pytest.mark.parametrize("name, content, part", [
    (".hidden.txt", b"text", "no files in this folder"),
    ("a_train_000001.bin", b"", "a folder of shards; train on them with --data_dir="),
    ("a.parquet", b"PAR1", "no text in this folder, first {}/a.parquet: Parquet")])
def test_a_folder_without_texts_is_named(tmp_path, capsys, name, content, part):
    write(tmp_path / name, content)
    message = refusal(capsys, run_prepare, tmp_path)
    assert message.startswith(f"prepare.py: {tmp_path}: {part.format(tmp_path)}")


def test_without_a_gpu_bytes_are_made_unless_gpt2s_tokens_are_asked_for(tmp_path, capsys, monkeypatch, gpt2):
    path = write(tmp_path / "a.jsonl", LINES)
    for gpu, option, kind in ((False, [], "bytes"), (True, [], "gpt2"), (False, ["--tokens=gpt2"], "gpt2")):
        monkeypatch.setattr("torch.cuda.is_available", lambda gpu=gpu: gpu)
        main([path, f"--out={tmp_path / f'out{gpu}{option}'}", *option])
        assert f"validation tokens ({kind})" in capsys.readouterr().out


# ---- prepare.py: where the shards go, and what is said --------------------------------------------

@pytest.mark.parametrize("given, folder", [
    ("story.txt", "story"),
    ("LICENSE", "LICENSE"),
    ("my_train_set.txt", "my-train_set"),
    ("my_val_set.txt", "my-val_set"),
    ("taken.txt", "taken-2"),
    ("half.txt", "half"),
    ("own.txt", "own-2"),
    ("notes.md.txt", "notes.md-2"),
    ("___.txt", "text"),
    ("сказка.txt", "сказка"),
])
def test_the_default_folder_has_the_name_of_the_input(tmp_path, data, given, folder):
    write(data / "taken" / "other.py", "something else")
    write(data / "half" / "corpus.json", "{}")  # as an interruption leaves it
    write(data / "own" / "corpus.json", '{"text": "a"}\n{"text": "b"}\n')  # a text of the user
    write(data / "half" / "half_train_000001.bin", "cut off")
    write(data / "notes.md", "a file")
    main([write(tmp_path / given, STORY), "--bytes"])
    names = sorted(path.name for path in (data / folder).glob("*.bin"))
    assert names == [f"{folder}_train_000001.bin", f"{folder}_val_000000.bin"]


def test_the_last_line_is_the_command_that_trains(tmp_path, data, capsys):
    main([write(tmp_path / "story.txt", STORY), "--bytes"])
    made, command = capsys.readouterr().out.splitlines()
    total = 1 + len(STORY)
    val = total // 20
    train = total - val + 1  # the second part has a separator of its own
    assert made.startswith(
        f"data/story: {train:,} training and {val:,} validation tokens (bytes) from 1 document (")
    assert command == to_type("train_gpt.py --data_dir=data/story")


def test_print_folder_prints_nothing_else_on_stdout(tmp_path, data, capsys):
    source = write(tmp_path / "story.txt", STORY)
    for word in ("training", "already made"):
        main([source, "--bytes", "--print_folder"])
        printed = capsys.readouterr()
        assert printed.out == "data/story\n"
        assert word in printed.err


def test_inputs_may_stand_before_and_behind_options(tmp_path, data):
    main([write(tmp_path / "a.txt", STORY), "--bytes", write(tmp_path / "b.txt", STORY.upper())])
    assert sum(map(len, read_corpus(data / "a"))) == 2 * len(STORY)


def test_the_same_command_again_changes_nothing_and_after_a_change_the_old_shards_stay(tmp_path, data, capsys):
    source = write(tmp_path / "story.txt", STORY)
    for options, text, folder, is_new in (
            ([], STORY, "story", True), ([], STORY, "story", False), (["--split_blank=1"], STORY, "story-2", True),
            ([], STORY.upper(), "story-3", True), ([], STORY.upper(), "story-3", False)):
        before = {path: path.stat().st_mtime_ns for path in data.rglob("*.bin")}
        if is_new and text != STORY:
            write(tmp_path / "story.txt", text)
        main([source, "--bytes", *options])
        said = capsys.readouterr().out
        assert f"data/{folder}: " in said and ("already made of this text; used again" not in said) == is_new
        assert "".join(map(from_bytes, read_corpus(data / folder))) == text
        assert before.items() <= {path: path.stat().st_mtime_ns for path in data.rglob("*.bin")}.items()
    for out in (data / "story", tmp_path, source):  # in the second the text lies, the third is the text: nobody is to delete them
        message = refusal(capsys, main, [source, "--bytes", f"--out={out}"])
        assert f"{out}: holds other files, or was made of other text" in message and "name a new folder" in message


@pytest.mark.parametrize("args, most, part", [
    ([], None, "name a file or folder of text"),
    (["story.txt", "--python-docs"], None, "python-docs alone"),
    (["story.txt", "--bytes", "--out=out"], 50_000, "cannot write to out (File too large); make room there"),
], ids=["no input", "two inputs", "full disk"])
def test_a_process_that_cannot_go_on_says_so_in_one_sentence(tmp_path, args, most, part):
    def limit_files():
        if most:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    write(tmp_path / "story.txt", STORY)
    run = subprocess.run([sys.executable, ROOT / "data" / "prepare.py", *args], cwd=tmp_path,
                         preexec_fn=limit_files, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and part in run.stderr, run
    if most:  # the folder that was begun can be finished
        again = subprocess.run([sys.executable, ROOT / "data" / "prepare.py", *args], cwd=tmp_path, capture_output=True, text=True)
        assert again.returncode == 0 and json.loads((tmp_path / "out" / "corpus.json").read_text())["documents"] == 1


def test_neither_success_nor_a_refusal_waits_for_an_import_of_torch(tmp_path):
    code = ("import sys\nfrom data import prepare\nfrom records.console import end_in_order\n"
            "status = end_in_order('prepare.py', prepare.work, sys.argv[1:])\nsys.exit(9 if 'torch' in sys.modules else status)")
    command = [sys.executable, "-c", code, write(tmp_path / "story.txt", STORY), "--bytes", f"--out={tmp_path / 'out'}"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    assert subprocess.run([*command, "nosuchfile.txt"], cwd=ROOT).returncode == 2


MODULE = '''"""Tools for rivers.

They are quiet, and so are the meadows beside them in the evening, when all the cows are asleep.

>>> dive("a code example which is not English at all")
"""
import asyncio  # the remark of a line

# A remark of its own, which says more
# than one line could.
def dive(depth):
    """Go down, and never come up again from there."""
    return "a string in the code is no documentation"
'''


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A part of Python's library in place of all of it, which takes 10 s, and a module of ours."""
    folder = tmp_path / "library"
    shutil.copytree(Path(sysconfig.get_path("stdlib")) / "asyncio", folder / "asyncio")
    (folder / "test").mkdir()
    (folder / "rivers.py").write_text(MODULE)
    (folder / "copied.py").write_text(MODULE)
    (folder / "test" / "test_rivers.py").write_text(MODULE.replace("quiet", "loud"))
    (folder / "template.py").write_text("class @NAME@:\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))


def test_python_docs_are_the_english_of_its_reference_and_library_and_are_made_once(
        tmp_path, capsys, library):
    command = ["--python-docs", f"--out={tmp_path / 'pydocs'}"]
    main(command)
    train = read_split(tmp_path / "pydocs", "train")
    val = read_split(tmp_path / "pydocs", "val")
    counts = [sum(len(document) + 1 for document in part) for part in (train, val)]
    assert "{:,} training and {:,} validation tokens (bytes)".format(*counts) in capsys.readouterr().out
    assert sum(counts) > 350_000 and 0.04 < counts[1] / sum(counts) < 0.10
    text = "\n".join(map(from_bytes, train + val))
    assert ">>>" not in text and text.count(" the ") > 3000
    for prose in ("They are quiet, ", "which says more\nthan one line", "Go down, and never come up"):
        assert text.count(prose) == 1, prose
    for other in ("They are loud, ", "no documentation"):
        assert other not in text
    main(command)
    assert "already made" in capsys.readouterr().out


# ---- fineweb.py ----------------------------------------------------------------------------------

VAL = "fineweb_val_000000.bin"
TRAIN = "fineweb_train_000001.bin"


@pytest.fixture
def hub(monkeypatch):
    """Stands in for hf_hub_download: `asked` has the names it was asked for; it raises `fault`, if there is one."""
    hub = SimpleNamespace(asked=[], fault=None)

    def download(repo_id, filename, *, repo_type, local_dir):
        assert (repo_id, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
        hub.asked.append(filename)
        if hub.fault:
            raise hub.fault
        write_shard(local_dir / filename, [SEPARATOR, 1])

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return hub


def test_fetch_brings_what_is_missing(tmp_path, hub):
    for gone, asked in (([], [VAL, TRAIN, "fineweb_train_000002.bin"]), ([], []), ([TRAIN], [TRAIN])):
        for name in gone:
            (tmp_path / name).unlink()
        hub.asked.clear()
        fineweb.main(["2", f"--dir={tmp_path}"])
        assert hub.asked == asked


@pytest.mark.parametrize("fault, part", [
    (ConnectionError("reset\nby peer"), "ConnectionError: reset"), (OSError(28, "No space left on device"), "No space left")])
def test_a_failure_is_one_sentence(tmp_path, hub, fault, part, capsys):
    hub.fault = fault
    message = refusal(capsys, fineweb.main, ["1", f"--dir={tmp_path}"])
    assert part in message and "run the same command again" in message


def test_the_number_of_shards_is_checked(capsys):
    with pytest.raises(SystemExit, match="2"):
        fineweb.main(["104"])
    assert "N must be from 1 to 103" in capsys.readouterr().err


def test_the_same_texts_are_divided_alike_each_time(tmp_path):
    """Else a model would be validated on what an earlier one has trained on."""
    folders = [run_prepare(write(tmp_path / name / "a.jsonl", json_lines(STORIES))) for name in ("one", "two")]
    for split in ("train", "val"):
        assert read_split(folders[0], split) == read_split(folders[1], split)


@pytest.mark.parametrize("lengths, val, train", [  # of the documents in their order; then of those of each split
    ([300, 3700], [300], [3700]),  # 5 % are 200, and half as much again is taken whole
    ([301, 3699], [200], [102, 3699]),
    ([50, 50, 101, 3799], [50, 50, 101], [3799]),
    ([259], [129], [131]),  # as few as the refusal asks for; the second part has a separator of its own
    ([161, 101], [129], [33, 101]),  # else the 101 would be all there is to train on
    ([260, 60, 9680], [260, 60], [9680]),  # at most 300: 5 % would be 500
])
def test_validation_takes_whole_documents_unless_that_is_far_too_much(lengths, val, train, monkeypatch):
    monkeypatch.setattr(prepare, "MOST_VAL", 300)
    ends = np.cumsum(lengths)
    documents = [np.r_[SEPARATOR, np.arange(end - length, end - 1)] for length, end in zip(lengths, ends)]
    splits = prepare.split_documents(documents, "text")
    assert [[len(document) for document in part] for part in splits] == [train, val]
    tokens = np.concatenate([*splits[0], *splits[1]])
    assert sorted(tokens[tokens != SEPARATOR]) == sorted(np.concatenate([document[1:] for document in documents]))
    assert all(document[0] == SEPARATOR for part in splits for document in part)


@pytest.mark.parametrize("first, second", [
    (["--key=text"], ["--key=body"]), (["--split=cat"], ["--split=mat"]), (["--tokens=gpt2"], ["--bytes"])], ids=str)
def test_a_corpus_that_was_made_with_another_option_is_not_used_again(tmp_path, data, gpt2, no_gpu, first, second):
    lines = "".join(json.dumps(dict(text=text, body=text.upper())) + "\n" for text in STORIES)
    source = write(tmp_path / "a.jsonl", lines)
    for options, folders in ((first, 1), (second, 2), (first, 2), (second, 2)):
        main([source, *options])
        assert len([*data.iterdir()]) == folders


def test_a_document_behind_a_marker_keeps_its_indentation():
    options = SimpleNamespace(split="<|end|>", split_blank=None)
    assert texts.split("  a\n<|end|>\r\n\tb \n\n<|end|>c", options) == ["  a", "\tb ", "c"]


def test_gpt2s_tokens_go_back_to_their_text_and_those_of_ends_and_padding_have_none(gpt2):
    encode, to_bytes = sample.codec(50304)
    text = "the naïve cat<|endoftext|>, in text"
    tokens = encode(text)
    assert max(tokens) < SEPARATOR and len(tokens) < len(text) and b"".join(map(to_bytes, tokens)).decode() == text
    assert [to_bytes(token) for token in (SEPARATOR, SEPARATOR + 1, 50303)] == [b""] * 3
