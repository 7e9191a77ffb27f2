"""data/fineweb.py and data/prepare.py against independent references.

References: shards are parsed with `struct` alone, tokens are turned back into text and compared
with the input, tiktoken itself encodes with a small vocabulary, and a fake downloader stands in for
the network.
"""
import gzip
import json
import os
import random
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data import fineweb, prepare, shards  # noqa: E402

BOS = 50256


@pytest.fixture
def gpt2(monkeypatch):
    """tiktoken with the bytes and a few pairs of GPT-2's vocabulary, in the place of all of it, which needs a network."""
    ranks = {bytes([byte]): token for token, byte in enumerate(prepare.token_to_byte)}
    ranks |= {pair: 256 + number for number, pair in enumerate([b" t", b" a", b"he", b"in", b"re"])}
    splits = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    encoding = tiktoken.Encoding("small", pat_str=splits, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": BOS})
    monkeypatch.setattr(prepare.gpt2, "load", lambda: encoding)
    return encoding


def shard_bytes(tokens, magic=20240520, version=1):
    header = struct.pack("<256i", magic, version, len(tokens), *[0] * 253)
    return header + struct.pack(f"<{len(tokens)}H", *tokens)


def read_shard(path):
    """The tokens of a shard as a list, after a check of every field of the header."""
    data = Path(path).read_bytes()
    header = struct.unpack("<256i", data[:1024])
    assert header[:2] == (20240520, 1)
    assert not any(header[3:])
    assert len(data) == 1024 + 2 * header[2]
    return list(struct.unpack(f"<{header[2]}H", data[1024:]))


def read_split(folder, split, name="*"):
    """The documents of a split as lists of tokens without BOS.

    Every shard must begin with a document.
    """
    documents = []
    for path in sorted(Path(folder).glob(f"{name}_{split}_*.bin")):
        tokens = read_shard(path)
        assert tokens[0] == BOS
        for token in tokens:
            if token == BOS:
                documents.append([])
            else:
                documents[-1].append(token)
    return documents


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


def write_jsonl(path, texts, key="text"):
    with open(path, "w", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"id": number, key: text}) + "\n")
    return path


def prepare_texts(texts, out, *args):
    """Run prepare.py on a .jsonl file of these texts, in this process."""
    out.mkdir(parents=True, exist_ok=True)
    source = write_jsonl(out.with_suffix(".jsonl"), texts)
    prepare.main([str(source), f"--out={out}", "--bytes", *args])


def script(name, *args, **env):
    command = [sys.executable, ROOT / "data" / name, *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | env, timeout=60, check=False)


def assert_one_sentence(run, status, *parts):
    assert run.returncode == status, run
    assert run.stderr.count("\n") == 1
    assert "Traceback" not in run.stderr
    for part in parts:
        assert str(part) in run.stderr


# ---- prepare.py: tokens, splits and shards -------------------------------------------------------

def test_bytes_have_the_tokens_that_gpt2_has_for_them():
    assert prepare.token_to_byte[prepare.byte_to_token].tolist() == list(range(256))
    known = {"!": 0, "0": 15, "A": 32, "a": 64, "~": 93, "\0": 188, "\t": 197, "\n": 198, " ": 220, "\x7f": 221}
    assert {character: prepare.byte_to_token[ord(character)] for character in known} == known
    assert [prepare.byte_to_token[byte] for byte in (0xA1, 0xAE, 0xFF, 0x80, 0xAD)] == [94, 106, 187, 222, 255]


def test_gpt2s_tokens_equal_tiktokens_and_decode_back_to_the_input(tmp_path, gpt2):
    texts = make_texts(100) + ["literal <|endoftext|> in a document is text"]
    prepare_texts(texts, tmp_path / "out", "--tokens=gpt2")
    documents = read_corpus(tmp_path / "out")
    assert sorted(documents) == sorted(gpt2.encode(text, disallowed_special=()) for text in texts)


def test_validation_is_a_fair_sample_of_whole_documents_that_training_lacks(tmp_path):
    texts = make_texts(2000)
    prepare_texts(texts, tmp_path)
    train = list(map(from_bytes, read_split(tmp_path, "train")))
    val = list(map(from_bytes, read_split(tmp_path, "val")))
    assert sorted(train + val) == sorted(texts)
    tokens, total = (sum(len(text.encode()) + 1 for text in part) for part in (val, texts))
    assert total // 20 <= tokens < total // 20 + 2000  # one document over at most
    positions = [int(text.split(":")[0]) for text in val]  # in the input, 0..1999
    assert 800 < sum(positions) / len(positions) < 1200


def test_the_trainer_reads_the_documents_of_the_shard(tmp_path):
    prepare_texts(make_texts(300), tmp_path / "mine")
    [path] = sorted((tmp_path / "mine").glob("*_train_*.bin"))
    tokens, starts = shards.read_shard(path, 50257)
    assert path.name == "mine_train_000001.bin" and tokens.tolist() == read_shard(path)
    documents = [document[1:].tolist() for document in np.split(tokens, starts)[1:]]
    assert documents == read_split(tmp_path / "mine", "train")


def test_equal_documents_are_taken_once_and_counted(tmp_path, capsys):
    texts = make_texts(100)
    prepare_texts(texts + texts[:30] + ["  "], tmp_path / "out")
    assert sorted(map(from_bytes, read_corpus(tmp_path / "out"))) == sorted(texts)
    assert "from 100 documents (duplicates dropped: 30)" in capsys.readouterr().out


# ---- prepare.py: what people bring ---------------------------------------------------------------

STORIES = make_texts(60, seed=3)
LINES = "".join(json.dumps({"text": text}) + "\n" for text in STORIES)
INDENTED = json.dumps([{"text": text} for text in STORIES], indent=1)
JOINED = "\n<|endoftext|>\n".join(STORIES)


@pytest.mark.parametrize("name, content, options", [
    ("a.jsonl", LINES, []),
    ("a.ndjson", LINES, []),
    ("a.json", LINES, []),
    ("marked.jsonlines", b"\xef\xbb\xbf" + LINES.encode(), []),
    ("marked.jsonl", LINES.encode("utf-16"), []),
    ("joined.txt", JOINED, ["--split=<|endoftext|>"]),
    ("windows.txt", JOINED.replace("\n<", "\r\n<").replace(">\n", ">\r\n"), ["--split=<|endoftext|>"]),
    ("marked.txt", JOINED.encode("utf-16"), ["--split=<|endoftext|>"]),
    ("blank.txt", "\n\n".join(text.strip() for text in STORIES), ["--split_blank=1"]),
    ("windows.txt", "\n\n \r\n\n".join(text.replace("\n", "\n\n\n") for text in STORIES), ["--split_blank=3"]),
])
def test_documents_are_found_in_texts_and_json_lines(tmp_path, name, content, options):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    prepare.main([str(path), "--bytes", f"--out={tmp_path / 'out'}", *options])
    found = [from_bytes(document).strip() for document in read_corpus(tmp_path / "out")]
    assert sorted(text.replace("\n\n\n", "\n") for text in found) == sorted(text.strip() for text in STORIES)


@pytest.mark.parametrize("text", [
    "[Verse 1]\nla la\n" * 99, "{ a set }\n" * 99, '{"quoted"} he said, and no JSON\n' * 99, "[1]\n" * 99,
    "\none\r\n\n\ntwo\n\n" * 30, "Все счастливые семьи\r\n東京は夜の七時\r\n" * 30])
def test_a_text_is_one_document_byte_for_byte_also_if_it_looks_a_bit_like_json(tmp_path, text):
    (tmp_path / "a.txt").write_bytes(text.encode())
    prepare.main([str(tmp_path / "a.txt"), "--bytes", f"--out={tmp_path / 'out'}"])
    train, val = read_corpus(tmp_path / "out")
    assert from_bytes(train + val) == text


@pytest.mark.parametrize("name, content, is_said", [("a.txt", JOINED, True), ("a.jsonl", LINES, False)])
def test_markers_between_documents_that_are_read_as_text_are_said(tmp_path, capsys, name, content, is_said):
    (tmp_path / name).write_text(content)
    prepare.main([str(tmp_path / name), "--bytes", f"--out={tmp_path / 'out'}"])
    assert ("if it ends documents, give --split='<|endoftext|>'" in capsys.readouterr().out) == is_said


WIDE = "The cat, naïve as ever.\r\nAnd 東京.\n" * 99
ZEROS = bytes(range(256)) * 20
BAD = [  # name, content, what the sentence says
    ("a.csv", b"id,text\n1,hello\n", "a table, not text; export its text column as JSON lines"),
    ("a.parquet", b"PAR1" + ZEROS, "Parquet, not text; export its text column as JSON lines"),
    ("a.txt", b"PAR1" + ZEROS, "Parquet, not text; export its text column as JSON lines"),
    ("a.txt", gzip.compress(JOINED.encode()), "compressed (gzip), not text; unpack it first"),
    ("a.docx", b"PK\3\4" + ZEROS, ".docx"),
    ("a.pdf", b"%PDF-1.5\n\xff", "a PDF, not text; save its text as a .txt file"),
    ("a.bin", shard_bytes([BOS, 1]), "if it holds tokens, give its folder to train_gpt.py --data_dir"),
    ("a.txt", WIDE.encode("utf-16le"), "iconv -f utf-16le -t utf-8"),
    ("a.txt", "café".encode("latin-1") * 9, "cp1252 of Windows"),
    ("a.jsonl", b'{"text": "fine"}\n{"text": \n', "line 2: no JSON object"),
    ("a.json", INDENTED.encode(), "line 1: no JSON object like {\"text\": \"...\"}; repair it, or write each object on a line, as by jq -c"),
    ("a.jsonl", b'{"body": "fine"}\n', "with the keys 'body'; name that of its text with --key"),
    ("a.jsonl", b"[1, 2]\n", "line 1: no JSON object"),
    ("a.ndjson", b'{"text": null}', 'line 1: an object without a text "text"'),
    ("a.txt", b"few words", "too few"),
    ("a.txt", b"", "no text"),
    ("absent.txt", None, "check the path"),
]


@pytest.mark.parametrize("name, content, advice", BAD)
def test_what_cannot_be_used_is_named_for_what_it_is_in_one_sentence(tmp_path, capsys, name, content, advice):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit, match="2"):
        prepare.main([str(path), "--bytes", f"--out={tmp_path / 'out'}"])
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith(f"prepare.py: {path}") and advice in message
    assert [*tmp_path.iterdir()] == [path] * (content is not None), "nothing is left behind"


def test_a_folder_is_searched_and_what_is_left_out_is_said(tmp_path, capsys):
    files = {"a.txt": JOINED, "deep/er/b.md": "three" * 30, "c.ndjson": LINES, "d.rs": "four\n" * 30,
             "package.json": '{\n "name": "x"}', "bad.py": b"\xff\x00", "pic.png": b"\x89PNG", "t.csv": "a,b",
             "u.csv": "a,b", ".hidden/e.txt": "hidden", ".f.txt": "hidden", "blank.txt": " \n\n"}
    for name, content in files.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    prepare.main([str(tmp_path / "in"), "--bytes", f"--out={tmp_path / 'out'}"])
    expected = [JOINED, "three" * 30, *STORIES, "four\n" * 30]
    assert sorted(map(from_bytes, read_corpus(tmp_path / "out"))) == sorted(expected)
    said = capsys.readouterr().out
    assert f"left out 2 file(s) of {tmp_path / 'in'}, first " in said
    assert "bad.py: not text" in said


@pytest.mark.parametrize("files, part", [
    ({"a.parquet": b"PAR1"}, "name the files themselves"), ({"a.txt": b"PAR1"}, "a.txt: Parquet"), ({}, "no files in this folder")])
def test_a_folder_without_texts_is_named(tmp_path, capsys, files, part):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match="2"):
        prepare.main([str(tmp_path), "--bytes", f"--out={tmp_path / 'out'}"])
    message = capsys.readouterr().err
    assert message.startswith(f"prepare.py: {tmp_path}: no ") and part in message


def test_without_a_gpu_bytes_are_made_unless_gpt2s_tokens_are_asked_for(tmp_path, capsys, monkeypatch, gpt2):
    path = str(write_jsonl(tmp_path / "a.jsonl", STORIES))
    for gpu, option, kind in ((False, [], "bytes"), (True, [], "gpt2"), (False, ["--tokens=gpt2"], "gpt2")):
        monkeypatch.setattr("torch.cuda.is_available", lambda gpu=gpu: gpu)
        prepare.main([path, f"--out={tmp_path / f'out{gpu}{option}'}", *option])
        said = capsys.readouterr().out
        assert f"validation tokens ({kind})" in said
        assert ("no GPU here" in said and "--tokens=gpt2" in said) == (kind == "bytes")


@pytest.mark.parametrize("args, part", [
    (["one.txt"], "too few"),
    (["one.txt", "--python-docs"], "python-docs alone"),
    ([], "name a file or folder"),
])
def test_errors_on_the_command_line_are_one_sentence_with_status_2(tmp_path, args, part):
    (tmp_path / "one.txt").write_text("only one document here\n" * 3)
    inputs = [tmp_path / arg if arg.endswith(".txt") else arg for arg in args]
    run = script("prepare.py", *inputs, f"--out={tmp_path / 'out'}", "--bytes")
    assert_one_sentence(run, 2, part)


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
    prepare.main(command)
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
    prepare.main(command)
    assert "already made" in capsys.readouterr().out


# ---- fineweb.py ----------------------------------------------------------------------------------

GOOD = shard_bytes([BOS, *range(500)])
VAL = "fineweb_val_000000.bin"
TRAIN = "fineweb_train_000001.bin"


@pytest.fixture
def hub(monkeypatch):
    """Stands in for hf_hub_download: `asked` has the names it was asked for; it delivers `content`, or raises it."""
    hub = SimpleNamespace(asked=[], content=GOOD)

    def download(repo_id, filename, *, repo_type, local_dir):
        assert (repo_id, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
        hub.asked.append(filename)
        if isinstance(hub.content, BaseException):
            raise hub.content
        local_dir.mkdir(exist_ok=True)
        (local_dir / filename).write_bytes(hub.content)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return hub


def test_fetch_brings_what_is_missing(tmp_path, hub):
    for gone, asked in (([], [VAL, TRAIN, "fineweb_train_000002.bin"]), ([], []), ([TRAIN], [TRAIN])):
        for name in gone:
            (tmp_path / name).unlink()
        hub.asked.clear()
        fineweb.main(["2", f"--dir={tmp_path}"])
        assert hub.asked == asked
    assert read_shard(tmp_path / TRAIN) == [BOS, *range(500)]


@pytest.mark.parametrize("fault, part", [
    (ConnectionError("reset\nby peer"), "ConnectionError: reset"), (OSError(28, "No space left on device"), "No space left")])
def test_a_failure_is_one_sentence(tmp_path, hub, fault, part):
    hub.content = fault
    with pytest.raises(SystemExit) as end:
        fineweb.main(["1", f"--dir={tmp_path}"])
    message = end.value.code  # which Python prints on stderr
    assert "\n" not in message and part in message and "run the same command again" in message


def test_the_number_of_shards_is_checked(capsys):
    with pytest.raises(SystemExit, match="2"):
        fineweb.main(["104"])
    assert "N must be from 1 to 103" in capsys.readouterr().err
