"""data/fineweb.py and data/prepare.py against independent references.

References: shards are parsed with `struct` alone, tokens are turned back into text and compared
with the input, the byte table is compared with tiktoken's single-byte tokens, and fetching is tried
against a fake downloader and, through the real client, against a small server on this machine.
Nothing here needs a network or a GPU.
"""
import gzip
import http.server
import json
import os
import platform
import random
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if (VOCABULARY := ROOT.parent / "shared" / "gpt2-bpe").is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(VOCABULARY))

from data import fineweb, prepare, shards  # noqa: E402
from data.python_docs import source_prose  # noqa: E402

BOS = 50256


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    """tiktoken's GPT-2 encoding, or where its vocabulary cannot be had, `few_merges`."""
    import tiktoken
    from tiktoken import registry

    try:
        return tiktoken.get_encoding("gpt2")
    except Exception:
        registry.ENCODINGS["gpt2"] = few_merges(tmp_path_factory.mktemp("vocabulary"))
        return registry.ENCODINGS["gpt2"]


def few_merges(folder):
    """An encoding made by tiktoken after GPT-2's scheme, with the bytes and five merges."""
    import tiktoken
    from tiktoken import load

    merges = ["t h", "th e", "i n", "\u0120 the", "e r"]
    characters = [chr(b) for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    characters += [chr(256 + i) for i in range(256 - len(characters))]
    tokens = characters + [merge.replace(" ", "") for merge in merges]
    vocabulary = folder / "vocab.bpe"
    vocabulary.write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    encoder = folder / "encoder.json"
    encoder.write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    ranks = load.data_gym_to_mergeable_bpe_ranks(str(vocabulary), str(encoder))
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    special = {"<|endoftext|>": BOS}
    return tiktoken.Encoding(
        "gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


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


def gpt2_byte_table():
    """GPT-2's order of the bytes, written down a second way.

    The Latin-1 characters that print and are not blank come first.
    """
    first = []
    for byte in range(256):
        if chr(byte).isprintable() and not chr(byte).isspace() and byte != 0xAD:
            first.append(byte)
    return first + [byte for byte in range(256) if byte not in first]


def from_bytes(document):
    table = gpt2_byte_table()
    return bytes(table[token] for token in document).decode("utf-8")


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
    prepare.main([str(source), f"--out={out}", "--workers=1", *args])


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


def folder_is_empty(folder):
    return not Path(folder).exists() or not any(Path(folder).iterdir())


# ---- prepare.py: tokens --------------------------------------------------------------------------

def test_byte_tables_follow_gpt2s_order_and_are_inverse_to_each_other():
    assert prepare.token_to_byte.tolist() == gpt2_byte_table()
    assert bytes(prepare.token_to_byte[:3].tolist()) == b"!\"#"
    assert prepare.token_to_byte[prepare.byte_to_token].tolist() == list(range(256))


def test_byte_tables_equal_tiktokens_single_byte_tokens(gpt2):
    for token, byte in enumerate(prepare.token_to_byte):
        assert gpt2.decode_single_token_bytes(token) == bytes([byte])
    for byte, token in enumerate(prepare.byte_to_token):
        assert gpt2.encode_single_token(bytes([byte])) == token


def test_bytes_corpus_decodes_back_to_the_input(tmp_path):
    texts = make_texts(200)
    prepare_texts(texts, tmp_path / "out", "--bytes")
    assert sorted(map(from_bytes, read_corpus(tmp_path / "out"))) == sorted(texts)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["corpus.json", "out_train_000001.bin", "out_val_000000.bin"]


def test_bpe_corpus_equals_tiktoken_and_decodes_back_to_the_input(tmp_path, gpt2):
    texts = make_texts(100) + ["literal <|endoftext|> in a document is text"]
    prepare_texts(texts, tmp_path / "out")
    documents = read_corpus(tmp_path / "out")
    assert sorted(documents) == sorted(gpt2.encode(text, disallowed_special=()) for text in texts)
    assert sorted(map(gpt2.decode, documents)) == sorted(texts)


def test_a_million_blanks_in_a_row_at_which_tiktoken_fails_are_encoded(gpt2):
    from data.gpt2 import encode
    text = "begin\n" + 1_100_000 * " " + "x end"
    assert gpt2.decode(encode(text)) == text
    assert encode("a few  blanks \n\n x") == gpt2.encode("a few  blanks \n\n x")


@pytest.mark.parametrize("use_bytes", [True, False], ids=["bytes", "bpe"])
def test_parallel_result_equals_serial(use_bytes, request):
    if not use_bytes:
        request.getfixturevalue("gpt2")
    texts = ["".join(make_texts(60, seed=i)) for i in range(200)]  # several batches of work
    serial = list(prepare.encode_all(iter(texts), use_bytes, workers=1))
    parallel = list(prepare.encode_all(iter(texts), use_bytes, workers=2))
    assert len(serial) > 2
    for one, other in zip(serial, parallel, strict=True):
        assert one[0].tolist() == other[0].tolist()
        assert one[1] == other[1]


# ---- prepare.py: splits and shards ---------------------------------------------------------------

def test_validation_is_a_fair_sample_of_whole_documents_that_training_lacks(tmp_path):
    prepare_texts(make_texts(2000), tmp_path, "--bytes", "--val_tokens=40000")
    train = list(map(from_bytes, read_split(tmp_path, "train")))
    val = list(map(from_bytes, read_split(tmp_path, "val")))
    assert not set(train) & set(val)
    tokens = sum(len(text.encode()) + 1 for text in val)
    assert 40000 < tokens < 40000 + 2000  # one document over at most
    positions = [int(text.split(":")[0]) for text in val]  # in the input, 0..1999
    assert 800 < sum(positions) / len(positions) < 1200


def test_shards_fill_up_with_whole_documents_and_are_numbered_from_one(tmp_path):
    prepare_texts(make_texts(300), tmp_path, "--bytes", "--name=mine", "--val_tokens=5000",
                  "--shard_tokens=20000")
    paths = sorted(tmp_path.glob("mine_train_*.bin"))
    assert len(paths) > 3
    for number, path in enumerate(paths, 1):
        assert path.name == f"mine_train_{number:06d}.bin"
        assert read_shard(path)[0] == BOS
    for path in paths[:-1]:
        assert 20000 - 1000 < len(read_shard(path)) < 20000 + 1000


def test_more_tokens_than_a_header_can_count_are_refused_in_a_sentence(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        prepare_texts(make_texts(3), tmp_path, "--bytes", f"--shard_tokens={2**31}")
    assert "--shard_tokens must be at most 1,073,741,823" in capsys.readouterr().err
    monkeypatch.setattr(prepare, "MOST_TOKENS", 25_000)
    with pytest.raises(SystemExit):
        prepare_texts(["a" * 20_000, *make_texts(60)], tmp_path, "--bytes", "--shard_tokens=10000")
    assert "a document of 20,001 tokens is too long for a shard" in capsys.readouterr().err
    assert not [*tmp_path.glob("*.bin")]


def test_the_trainer_reads_what_was_prepared(tmp_path):
    prepare_texts(make_texts(300), tmp_path, "--bytes", "--shard_tokens=20000")
    paths = shards.find_shards(tmp_path, "train", "*_train_*.bin", "")
    documents = []
    for path in paths:
        tokens, starts = shards.read_shard(path, 50257)
        assert shards.count_tokens(path) == len(tokens)
        for document in np.split(tokens, starts)[1:]:
            documents.append(document[1:].tolist())
    assert len(paths) > 3
    assert documents == read_split(tmp_path, "train")


def test_seed_decides_the_order(tmp_path):
    found = []
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare_texts(make_texts(100), tmp_path / out, "--bytes", f"--seed={seed}")
        found.append(read_corpus(tmp_path / out))
    a, b, c = found
    assert a == b != c
    assert sorted(a) == sorted(c)


def test_folder_is_searched_and_each_text_file_is_one_document_byte_for_byte(tmp_path):
    texts = {
        "a.txt": "\none\r\n\n\ntwo\n\n" * 6, "deep/er/b.md": "three" * 30, "c.txt": "four\n" * 30}
    folder = tmp_path / "in"
    out = tmp_path / "out"
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "blank.txt").write_text(" \n\n")
    write_jsonl(folder / "d.jsonl", ["five" * 40], key="body")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "e.txt").write_text("hidden")
    (folder / ".f.txt").write_text("hidden")
    prepare.main([str(folder), "--bytes", "--key=body", f"--out={out}"])
    assert sorted(map(from_bytes, read_corpus(out))) == sorted([*texts.values(), "five" * 40])


def test_split_blank_cuts_at_that_many_blank_lines(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("a\nb\n\nc\n\n\nd\n  \n\n\ne")
    assert list(prepare.read_documents(path, split_blank=2)) == ["a\nb\n\nc\n", "d\n", "e"]
    assert list(prepare.read_documents(path, split_blank=1)) == ["a\nb\n", "c\n", "d\n", "e"]


def test_split_blank_keeps_what_is_blank_at_the_end_and_in_between(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("\n\n\na\n \nb\n\n\nc\n\n\n\n")
    documents = [text for text in prepare.read_documents(path, split_blank=2) if text]
    assert documents == ["a\n \nb\n", "c\n\n\n\n"]


def test_interrupted_run_leaves_nothing_behind(tmp_path):
    def dies():
        yield "some text"
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        prepare.write_corpus(dies(), tmp_path / "out")
    assert folder_is_empty(tmp_path / "out")


# ---- prepare.py: errors --------------------------------------------------------------------------

@pytest.mark.parametrize("name, content, advice", [
    ("latin1.txt", "café".encode("latin-1") * 9, "iconv"),
    ("book.txt.gz", gzip.compress(b"text " * 99, mtime=0), "compressed; unpack it first"),
    ("broken.jsonl", b'{"text": "fine"}\n{"text": \n', "line 2"),
    ("nokey.jsonl", b'{"body": "fine"}\n', "as it has the keys 'body'; repair it, or name its key with --key"),
    ("list.jsonl", b"[1, 2]\n", "--key"),
    (".", None, "name the files"),
    ("absent.txt", None, "check the path"),
])
def test_bad_input_is_one_sentence_that_names_the_file(tmp_path, capsys, name, content, advice):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        prepare.main([str(path), "--bytes", "--workers=1", f"--out={tmp_path / 'out'}"])
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert message.count("\n") == 1
    assert str(path) in message
    assert advice in message
    assert folder_is_empty(tmp_path / "out")


@pytest.mark.parametrize("args, part", [
    (["empty.txt"], "no text"),
    (["one.txt"], "add text"),
    (["one.txt", "--val_tokens=50"], "--val_tokens"),
    (["one.txt", "--name=a/b"], "--name=a_b"),
    (["--python-docs"], "--out data/pydocs"),
    (["one.txt", "--workers=0"], "--workers"),
    ([], "INPUT"),
])
def test_errors_on_the_command_line_are_one_sentence_with_status_2(tmp_path, args, part):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "one.txt").write_text("only one document here\n" * 9)
    inputs = [tmp_path / arg if arg.endswith(".txt") else arg for arg in args]
    out = [] if "--python-docs" in args else [f"--out={tmp_path / 'out'}"]
    run = script("prepare.py", *inputs, *out, "--bytes")
    assert_one_sentence(run, 2, part)
    assert folder_is_empty(tmp_path / "out")


def test_missing_vocabulary_is_one_sentence_that_offers_bytes(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("text")
    offline = {"TIKTOKEN_CACHE_DIR": str(tmp_path / "none"), "https_proxy": "http://127.0.0.1:9"}
    command = ["prepare.py", source, "--tokens=gpt2", "--out", tmp_path / "out"]
    run = script(*command, **offline)
    assert_one_sentence(run, 2, "--tokens=bytes", "TIKTOKEN_CACHE_DIR")


def test_old_shards_are_not_mixed_with_new_ones(tmp_path, capsys):
    old = tmp_path / "fineweb_train_000007.bin"
    old.write_bytes(b"old")
    with pytest.raises(SystemExit, match="2"):
        prepare_texts(make_texts(50), tmp_path, "--bytes")
    assert old.name in capsys.readouterr().err
    assert old.read_bytes() == b"old"


@pytest.mark.parametrize("program", ["train_gpt.py", "sample.py", "evaluate.py", "data/prepare.py", "data/fineweb.py"])
def test_outside_of_the_environment_a_program_says_how_to_enter_it(program):
    python = [sys.executable, "-S"]  # which sees no installed packages
    run = subprocess.run([*python, program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert_one_sentence(run, 2, f"{program}: numpy is not installed", ". .venv/bin/activate")


# ---- prepare.py: --python-docs -------------------------------------------------------------------

@pytest.fixture(scope="session")
def python_docs(tmp_path_factory):
    out = tmp_path_factory.mktemp("pydocs")
    return out, prepare.make_python_docs_corpus(out)


def test_python_docs_corpus_is_megabytes_of_english_with_5_percent_for_validation(python_docs):
    out, counts = python_docs
    train = read_split(out, "train")
    train_tokens = sum(len(document) + 1 for document in train)
    val_tokens = sum(len(document) + 1 for document in read_split(out, "val"))
    assert (train_tokens, val_tokens) == (counts["train_tokens"], counts["val_tokens"])
    assert train_tokens + val_tokens > 1_500_000
    assert 0.04 < val_tokens / (train_tokens + val_tokens) < 0.10
    text = "\n".join(map(from_bytes, train))
    assert ">>>" not in text
    assert text.count(" the ") > 10_000
    letters = sum(c.isalpha() or c.isspace() for c in text)
    assert letters > 0.85 * len(text)


def times_of_change(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_python_docs_corpus_is_made_once_and_the_same_each_time(python_docs, tmp_path):
    out, counts = python_docs
    before = times_of_change(out)
    assert prepare.make_python_docs_corpus(out) is None
    assert times_of_change(out) == before
    run = script(
        "prepare.py", "--python-docs", "--bytes", "--out", tmp_path, PYTHONHASHSEED="7")
    assert run.returncode == 0, run.stderr
    assert f"{counts['train_tokens']:,} training" in run.stdout
    shards = [name for name in before if name.endswith(".bin")]
    assert len(shards) == 2
    for name in shards:
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes()


@pytest.mark.parametrize("name", ["mine", "fineweb"])
def test_python_docs_leave_the_corpus_of_other_texts_as_it_is(tmp_path, name):
    text = tmp_path / "story.txt"
    text.write_text("".join(make_texts(60, 1)), encoding="utf-8")
    out = tmp_path / "out"
    made = script("prepare.py", text, "--bytes", "--split_blank=1", "--name", name, "--out", out)
    assert made.returncode == 0, made.stderr
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    refused = script("prepare.py", "--python-docs", "--bytes", "--out", out)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert f"{name}_train_000001.bin: already there" in refused.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_python_docs_are_not_made_by_two_processes_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "python_documents", lambda: ("".join(make_texts(60, seed)) for seed in range(20)))
    for host, process in ((platform.node(), os.getppid()), ("another-host", os.getpid())):
        other = tmp_path / f".incomplete-{host}-{process}-x"
        other.mkdir()
        with pytest.raises(prepare.PrepareError, match="in use by another process"):
            prepare.make_python_docs_corpus(tmp_path)
        other.rmdir()


def test_python_docs_are_made_anew_if_they_are_not_whole_or_shall_be_others(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "python_documents", lambda: ("".join(make_texts(60, seed)) for seed in range(20)))
    counts = prepare.make_python_docs_corpus(tmp_path)
    assert prepare.make_python_docs_corpus(tmp_path) is None
    next(tmp_path.glob("*_train_*")).unlink()
    assert prepare.make_python_docs_corpus(tmp_path) == counts
    assert prepare.make_python_docs_corpus(tmp_path, val_tokens=1000)["val_tokens"] == 1001
    assert prepare.make_python_docs_corpus(tmp_path, val_tokens=1000) is None
    (tmp_path / "corpus.json").unlink()  # a kill leaves shards without it, and perhaps not all of them
    assert prepare.make_python_docs_corpus(tmp_path) is None
    (shard,) = tmp_path.glob("*_val_*")
    for damage in (lambda: os.truncate(shard, 1000), shard.unlink):
        damage()
        with pytest.raises(prepare.PrepareError, match="was broken off; delete the .bin files in .* to make it anew"):
            prepare.make_python_docs_corpus(tmp_path)


def test_source_prose_finds_docstrings_and_comments_in_order_and_no_code():
    source = ('"""Module."""\nx = "string"  # tail\n# One\n# two.\n'
              'def f():\n    """Function\n\n    text."""\n    # Last.\n')
    assert source_prose(source) == "Module.\n\nOne\ntwo.\n\n\nFunction\n\ntext.\n\nLast.\n"


# ---- fineweb.py ----------------------------------------------------------------------------------

class FakeHub:
    """Stands in for hf_hub_download.

    `plan` has an entry for each call: an exception to raise, or the bytes to deliver.
    """

    def __init__(self, monkeypatch, *plan):
        hub = pytest.importorskip("huggingface_hub")
        self.plan = list(plan)
        self.asked = []  # names of files
        self.slept = []  # seconds
        monkeypatch.setattr(hub, "hf_hub_download", self)
        monkeypatch.setattr(fineweb, "check_online", lambda: None)
        monkeypatch.setattr(fineweb.time, "sleep", self.slept.append)

    def __call__(self, repo_id, filename, *, repo_type, local_dir):
        assert (repo_id, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
        self.asked.append(filename)
        path = Path(local_dir) / filename
        if path.exists():
            return str(path)  # as the client does: what is there is not fetched again
        path.parent.mkdir(parents=True, exist_ok=True)
        step = self.plan.pop(0)
        if isinstance(step, BaseException):
            path.with_suffix(".incomplete").write_bytes(GOOD[:1100])
            raise step
        path.write_bytes(step)
        return str(path)


GOOD = shard_bytes([BOS, *range(500)])
VAL = "fineweb_val_000000.bin"
TRAIN = "fineweb_train_000001.bin"


def final_files(folder):
    return sorted(p.name for p in Path(folder).iterdir() if p.name.endswith(".bin"))


def test_fetch_brings_validation_and_the_first_n_shards_once(tmp_path, monkeypatch):
    hub = FakeHub(monkeypatch, GOOD, GOOD, GOOD)
    for _ in range(2):
        fineweb.main(["2", f"--dir={tmp_path}"])
    assert hub.asked == [VAL, TRAIN, "fineweb_train_000002.bin"]
    assert [p.name for p in sorted(tmp_path.iterdir())] == sorted(hub.asked)
    assert read_shard(tmp_path / TRAIN) == [BOS, *range(500)]


def test_interrupted_download_leaves_no_final_file_and_the_next_run_goes_on(
        tmp_path, monkeypatch, capsys):
    hub = FakeHub(monkeypatch, GOOD, KeyboardInterrupt(), GOOD)
    with pytest.raises(SystemExit, match="130"):
        fineweb.main(["1", f"--dir={tmp_path}"])
    assert "go on" in capsys.readouterr().err
    assert final_files(tmp_path) == [VAL]
    fineweb.main(["1", f"--dir={tmp_path}"])
    assert hub.asked == [VAL, TRAIN, TRAIN]
    assert final_files(tmp_path) == [TRAIN, VAL]


def test_failures_are_retried_with_doubling_pauses(tmp_path, monkeypatch):
    hub = FakeHub(monkeypatch, *[ConnectionError("reset")] * 3, GOOD, GOOD)
    fineweb.main(["1", f"--dir={tmp_path}"])
    assert hub.slept == [1, 2, 4]
    assert final_files(tmp_path) == [TRAIN, VAL]


def test_a_lasting_failure_is_one_sentence(tmp_path, monkeypatch, capsys):
    hub = FakeHub(monkeypatch, *[ConnectionError("reset\nby peer")] * 6)
    with pytest.raises(SystemExit, match="1"):
        fineweb.main(["1", f"--dir={tmp_path}"])
    message = capsys.readouterr().err
    assert VAL in message
    assert message.count("\n") == 1
    assert hub.slept == [1, 2, 4, 8, 16]
    assert final_files(tmp_path) == []


BAD = {
    "magic": shard_bytes([1, 2], magic=20240521),
    "version": shard_bytes([1, 2], version=2),
    "short": GOOD[:-2],
    "long": GOOD + b"\0\0",
    "no tokens": shard_bytes([]),
    "half a header": GOOD[:8],
    "empty": b"",
}
FAULT_OF_SHORT = "it has 2024 bytes where its header promises 2026"


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_damaged_arrival_is_refused_and_fetched_again(tmp_path, monkeypatch, bad):
    hub = FakeHub(monkeypatch, bad, GOOD)
    fineweb.fetch_shard(VAL, tmp_path)
    assert hub.asked == [VAL, VAL]
    assert (tmp_path / VAL).read_bytes() == GOOD


def test_a_damaged_shard_that_is_already_there_is_replaced(tmp_path, monkeypatch, capsys):
    hub = FakeHub(monkeypatch, GOOD)
    (tmp_path / VAL).write_bytes(GOOD)
    (tmp_path / TRAIN).write_bytes(BAD["short"])
    fineweb.main(["1", f"--dir={tmp_path}"])
    sentence = f"{tmp_path / TRAIN}: {FAULT_OF_SHORT}; fetching it again\n"
    assert capsys.readouterr().out.startswith(sentence)
    assert hub.asked == [TRAIN]
    assert (tmp_path / TRAIN).read_bytes() == GOOD


def test_a_shard_that_always_arrives_damaged_is_one_sentence(tmp_path, monkeypatch, capsys):
    FakeHub(monkeypatch, *[BAD["short"]] * 6)
    with pytest.raises(SystemExit, match="1"):
        fineweb.main(["1", f"--dir={tmp_path}"])
    printed = capsys.readouterr()
    assert f"{VAL}: {FAULT_OF_SHORT}; trying again in 16 s\n" in printed.out
    assert printed.err == (
        f"fineweb.py: {VAL} could not be fetched ({FAULT_OF_SHORT}); "
        "run the same command again to go on from here.\n")
    assert final_files(tmp_path) == []


@pytest.mark.parametrize("n", ["0", "104", "-1", "two", "1.5", None])
def test_bad_n_is_one_sentence(n, capsys):
    with pytest.raises(SystemExit, match="2"):
        fineweb.main([n] if n else [])
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "N" in message


@pytest.mark.parametrize("variable, value", [
    ("HF_HUB_OFFLINE", "1"), ("HF_ENDPOINT", "http://127.0.0.1:9")])
def test_no_network_is_one_sentence_and_status_1(tmp_path, variable, value):
    pytest.importorskip("huggingface_hub")
    run = script("fineweb.py", 1, "--dir", tmp_path, **{variable: value})
    assert_one_sentence(run, 1, "cannot be reached", "connect to the network")
    assert final_files(tmp_path) == []


def test_the_real_client_picks_up_a_dropped_connection(tmp_path):
    """Through huggingface_hub itself.

    A server on this machine hangs up in the middle of its first answer for each shard.
    """
    pytest.importorskip("huggingface_hub")
    tokens = 12_000_000  # the client keeps whole blocks of 10 MB
    header = struct.pack("<256i", 20240520, 1, tokens, *[0] * 253)
    body = header + random.Random(0).randbytes(2 * tokens)
    ranges = []  # where each answer began

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            start = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
            self.send_response(206 if start else 200)
            self.send_header("ETag", '"1234"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(body) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.end_headers()
            return start

        def do_GET(self):
            if "/resolve/main/" not in self.path:
                self.send_error(404)  # the client asks for other things too
                return
            start = self.do_HEAD()
            ranges.append(start)
            self.wfile.write(body[start:] if len(ranges) % 2 == 0 else body[:-len(body) // 3])

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        run = script("fineweb.py", 1, "--dir", tmp_path, HF_ENDPOINT=endpoint,
                     HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="0")
        server.shutdown()
    assert run.returncode == 0, run.stderr
    assert (tmp_path / VAL).read_bytes() == (tmp_path / TRAIN).read_bytes() == body
    assert [start > 0 for start in ranges] == [False, True, False, True]
