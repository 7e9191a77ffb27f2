"""evaluate.py and data/hellaswag.py.

References: scores of made-up items are compared with those of sample.next_logits, which reads one item alone, in float64;
the loss with the trainer's validation; standard errors with closed forms. No item of the real HellaSwag is here."""
import hashlib
import json
import math
import re
import sys

import numpy as np
import processes
import pytest
import torch
from conftest import ROOT, SEPARATOR, check_data, keep, untrained, write_shard
from test_model import tiny

import evaluate
import sample
import train_gpt as t
from data import hellaswag
from nanogpt import checkpoints
from records.console import end_in_order

pytestmark = pytest.mark.usefixtures("no_gpu")  # on which the models would compute
BOS = 271


def score_alone(model, context, tokens):
    """The reference: the log-probability of each token after those before."""
    document = [model.bos, *context, *tokens]
    first = len(document) - len(tokens)
    return [float(sample.next_logits(model, document[:i]).double().log_softmax(-1)[document[i]]) for i in range(first, len(document))]


# ---------------------------------------------------------------------------------------------- scores of made-up items


@pytest.mark.parametrize("num_layers", [2, 5])
def test_scores_are_those_of_each_ending_alone_whatever_it_is_packed_with(num_layers, monkeypatch):
    """All at the border of a document takes part: attention, n-grams, induced tokens, what is taken from the token before."""
    sizes = dict(num_layers=num_layers, vocab_size=BOS + 1, seq_len=2048, micro_tokens=2048,
                 batch_tokens=2048, schedule="laptop")
    narrow, wide = (tiny(dtype=dtype, **sizes) for dtype in ("float32", "float64"))
    monkeypatch.setattr(evaluate, "ENDINGS_AT_A_TIME", 4)
    draw = np.random.default_rng(0)
    endings = [(draw.integers(256, size=length).tolist(), draw.integers(256, size=draw.integers(1, 10)).tolist())
               for length in [1, 40, 118, 119, 127, 128, 130, 300, 700, 1100]]  # windows are 256 and 512
    found = evaluate.score_endings(narrow, endings)
    expected = [sum(score_alone(wide, *ending)) for ending in endings]
    np.testing.assert_allclose(found, expected, atol=1e-3)
    together = evaluate.score_endings(wide, endings)
    for ending, value in zip(endings, together):
        assert abs(evaluate.score_endings(wide, [ending])[0] - value) < 1e-9


def setting_of(step, config):
    """As train_gpt has it for its models; this is for a Counter."""


class Counter(torch.nn.Module):
    """Stands for a model: after token i comes i + 1, with a probability of exactly 1/2; V is 10."""

    def __init__(self):
        super().__init__()
        self.bos = 9
        self.lm_head = torch.zeros(1)
        self.past = self  # which reads tokens as they are
        self.trained_steps = self.config = None
        self.table = torch.full((10, 10), math.log(0.5 / 9))
        self.table[torch.arange(10), (torch.arange(10) + 1) % 10] = math.log(0.5)

    def read(self, tokens, training):
        return tokens

    def last_stream(self, tokens, setting, training):
        return tokens, (tokens,)

    def logits(self, x, sources):
        return self.table[x]


def item(context, endings, label=0):
    return dict(ctx=context, endings=endings, label=label)


def test_hellaswag_with_known_answers():
    """The sum prefers short endings, the mean long ones with the same number of wrong tokens."""
    items = [item("12", ["345", "5", "999", "888"]),  # sum: "345" has 3 log 1/2, "5" has log 1/18
             item("1", ["2", "345678", "0", "0"], "0"),
             item("1", ["345678", "0", "00", "000"])]  # one token is wrong: 0.5 ** 5 / 18 loses to 1 / 18
    model = evaluate.Model("m", Counter(), lambda text: [int(c) for c in text if c.isdigit()], np.ones(10, int))
    measures = evaluate.hellaswag_measures(model, items)
    assert measures["HellaSwag, %"].amounts.tolist() == [100, 100, 0]
    assert measures["HellaSwag normalised, %"].amounts.tolist() == [100, 100, 100]
    found = evaluate.score_endings(model.gpt, [([1, 2], [3, 4, 5]), ([1, 2], [5])])
    np.testing.assert_allclose(found, [3 * math.log(0.5), math.log(1 / 18)], atol=1e-6)


# ------------------------------------------------------------------------------------------------------- loss and bits


def make_checkpoint(path, corpus, **changes):
    """A file of weights of an untrained model, and the loss that the trainer's validation has."""
    model = untrained(data_dir=corpus, val_tokens=1024, **changes)
    with torch.no_grad():
        model.lm_head.mul_(20)  # else all tokens are as probable
    loss = t.validate(model, check_data(model.config)[1], 4)
    keep(path, model, step=3, val_loss=loss)
    return path, loss


@pytest.fixture(scope="module")
def checkpoint(corpus, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("models") / "model.safetensors", corpus)


@pytest.fixture(scope="module")
def another(checkpoint):
    """The same model with its output a bit changed."""
    weights, about = checkpoints.read(checkpoint[0])
    draw = torch.Generator().manual_seed(1)
    weights["lm_head"] += 0.003 * torch.randn(weights["lm_head"].shape, generator=draw)
    path = checkpoint[0].with_name("another.safetensors")
    checkpoints.write(path, weights, about)
    return path


def run(capsys, *words):
    """(exit status, standard output, standard error)"""
    status = end_in_order("evaluate.py", evaluate.work, [str(word) for word in words])
    return status, *capsys.readouterr()


def measures(monkeypatch, *words):
    """The measures of each model on the data of the command line."""
    shown = []
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "show", lambda models, measured, source: shown.extend(measured))
        assert end_in_order("evaluate.py", evaluate.work, [str(word) for word in words]) == 0
    return shown


LOSS = "loss, nats per byte"


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_loss_is_that_of_the_trainers_validation(precision, corpus, tmp_path, monkeypatch):
    path, loss = make_checkpoint(tmp_path / "model.safetensors", corpus, precision=precision)
    keep(tmp_path / "second.safetensors", untrained(data_dir=tmp_path))  # whose text is not looked for
    got, _ = measures(monkeypatch, path, tmp_path / "second.safetensors")
    assert got[LOSS].result() == pytest.approx(loss, abs=1e-5 if precision == "fp32" else 1e-2)


def test_the_loss_of_a_text_by_an_example(tmp_path, checkpoint, monkeypatch):
    """Three documents, of which one ends at once; the reference goes through them one by one."""
    texts = ["Once upon a time", "x", "there was a fox.\n" * 3]
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in [*texts, "  "]))
    [got] = measures(monkeypatch, checkpoint[0], f"--text={file}", "--key=body")
    model = t.checkpoints.load_model(checkpoint[0], torch.device("cpu"), t)
    encode, _ = sample.codec(model.config.vocab_size)
    rows = [score_alone(model, [], [*encode(text), model.bos]) for text in texts]
    num_bytes = sum(len(text) for text in texts)
    assert got[LOSS].result() == pytest.approx(-sum(map(sum, rows)) / (num_bytes + 3), abs=1e-5)
    assert got["bits per byte"].result() == pytest.approx(
        -sum(sum(row[:-1]) for row in rows) / math.log(2) / num_bytes, abs=1e-5)
    assert len(got[LOSS].sizes) == 3


def test_two_models_are_compared_document_by_document(checkpoint, another, capsys):
    out = run(capsys, checkpoint[0], another)[1]
    value = r"(-?[\d.]+) ± ([\d.]+)"
    (first, error), (second, _), (difference, of_difference) = re.findall(f"{LOSS}:? +{value}", out)
    assert float(difference) == pytest.approx(float(second) - float(first), abs=2e-4)
    assert float(of_difference) < 0.8 * float(error), "what both have in common is no error"


def test_standard_errors_have_their_closed_forms():
    def error_of(amounts, sizes):
        measure = evaluate.Measure(np.array(amounts, float), np.array(sizes, float))
        return float(evaluate.with_error(7, 1000 * measure.influences()).removeprefix("7.0000 ± ")) / 1000

    x = np.random.default_rng(0).normal(size=100)
    assert error_of(x, np.ones(100)) == pytest.approx(x.std(ddof=1) / 10, abs=1e-6)
    assert error_of([2, 4], [1, 3]) == pytest.approx(0.25)  # of influences 1/8 and -1/8
    assert error_of(2 * np.arange(1, 6), np.arange(1, 6)) == pytest.approx(0)  # each document has the same mean
    assert evaluate.with_error(7, np.zeros(1)) == "7.0000"


# ---------------------------------------------------------------------------------------------------- items on disk


def line(**changes):
    entry = {"ctx": "A dog", "endings": ["runs.", "flies.", "reads.", "sinks."], "label": 0, "ind": 4} | changes
    return json.dumps(entry) + "\n"


ITEMS = (line() + line(label="3", ctx="Une fête é")) * 20


@pytest.fixture
def items(tmp_path, monkeypatch):
    """Made-up items in place of HellaSwag's, and where they are put."""
    source = tmp_path / "source.jsonl"
    source.write_text(ITEMS)
    monkeypatch.setattr(hellaswag, "PATH", tmp_path / "items.jsonl")
    monkeypatch.setattr(hellaswag, "URL", source.as_uri())
    monkeypatch.setattr(hellaswag, "SHA256", hashlib.sha256(ITEMS.encode()).hexdigest())
    return hellaswag.PATH


def test_items_are_fetched_once_and_what_is_damaged_or_cannot_be_fetched_is_one_sentence(items, checkpoint, capsys, monkeypatch):
    assert len(hellaswag.read_items()) == 40
    assert [hellaswag.read_items()[1][key] for key in ("ctx", "endings", "label")] == [
        "Une fête é", ["runs.", "flies.", "reads.", "sinks."], "3"]
    monkeypatch.setattr(hellaswag, "URL", "http://127.0.0.1:9/items.jsonl")
    assert len(hellaswag.read_items()) == 40
    items.write_text(ITEMS[:-1] + "?")
    for part in (f"{items} is damaged or another file; delete it", "HellaSwag could not be fetched (URLError"):
        status, out, err = run(capsys, checkpoint[0], "--hellaswag")
        assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("evaluate.py: ") and part in err
        items.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------- the program


def test_hellaswag_of_two_models(items, checkpoint, another, capsys):
    status, out, err = run(capsys, checkpoint[0], another, "--hellaswag")
    assert (status, err) == (0, "") and "nats" not in out
    for part in ("HellaSwag, %", "HellaSwag normalised, %", "items: 40", "another.safetensors minus",
                 "(preset laptop, step 3)"):
        assert part in out


def test_models_are_compared_on_sequences_of_one_length(tmp_path, capsys):
    paths = []
    for val_seq_len in (256, 512):  # the same weights, so that only the lengths could differ
        paths.append(tmp_path / f"{val_seq_len}.safetensors")
        keep(paths[-1], untrained(val_seq_len=val_seq_len, val_tokens=512))
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh " * 100)
    out = run(capsys, *paths, f"--text={text}")[1]
    assert re.search(r"512.safetensors minus .*nats per byte: [+-]?0\.0000", out), out


def test_one_document_has_no_error_and_no_interval_and_a_sentence_says_why(tmp_path, checkpoint, another, capsys):
    text = tmp_path / "text.txt"
    text.write_text("The first one ends.\n\nA second.<|endoftext|>")
    status, out, err = run(capsys, checkpoint[0], f"--text={text}", another)
    assert status == 0 and "text.txt: 1\n" in out and out.count("±") == 1 and "another.safetensors minus" in out
    assert err.startswith("<|endoftext|> is read as text") and err.count("\n") == 1
    assert out.endswith("A single one has none, and with fewer than 30 it is too small: --text=PATH --split_blank=1 cuts a text into more.\n")


def test_the_program_runs_as_a_script(checkpoint, tmp_path):
    done = processes.run(ROOT / "evaluate.py", checkpoint[0], "--device=cpu", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "nats per byte" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words, part", [
    ([], "MODEL"), (["no.safetensors"], "no.safetensors"), (["MODEL", "--text=no.txt"], "no.txt: no such file"),
    (["MODEL", "--text=EMPTY"], "no text in it"), (["MODEL", "--split_blank=1"], "name it with --text"),
    (["MODEL", "--hellaswag=no.jsonl"], "no.jsonl"), (["MODEL", "--hellaswag", "--text=EMPTY"], "not allowed with"),
    (["MODEL", "--device=tpu"], "tpu"), (["MODEL", "--tex=a"], "unrecognized arguments: --tex=a"), (["MODEL", "--text=GPT2"], "of the kind gpt2"),
    (["MODEL", "--text="], "no such file or folder"), (["MODEL", "--text=DAMAGED"], "promises"), (["MODEL", "--text=BINARY"], "UTF-8"),
], ids=str)
def test_what_cannot_be_is_one_sentence(tmp_path, checkpoint, capsys, words, part):
    files = {"MODEL": checkpoint[0], "EMPTY": tmp_path / "empty.txt", "GPT2": tmp_path / "gpt2",
             "DAMAGED": tmp_path / "damaged", "BINARY": tmp_path / "binary.txt"}
    files["EMPTY"].write_text(" \n\n")
    files["BINARY"].write_bytes(b"a \xff b")
    files["GPT2"].mkdir()
    write_shard(files["GPT2"] / "a_val_0.bin", [SEPARATOR, 300, 301])
    files["DAMAGED"].mkdir()
    write_shard(files["DAMAGED"] / "b_val_0.bin", [SEPARATOR, 1], count=5)
    for name, file in files.items():
        words = [str(word).replace(name, str(file)) for word in words]
    status, out, err = run(capsys, *words)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("evaluate.py: ") and part in err


def test_models_of_other_tokens_are_compared_by_bits_per_byte(tmp_path, checkpoint, capsys, monkeypatch):
    """The second model has GPT-2's kind of vocabulary; here a token is two characters."""
    def codec(vocab_size):
        if vocab_size < 1000:
            return real(vocab_size)
        pairs = lambda text: [ord(a) + 128 * ord(b) for a, b in zip(text[::2], text[1::2])]
        return pairs, lambda token: b"xx" if token < 128 * 128 else b""

    real = sample.codec
    path = tmp_path / "model.safetensors"
    keep(path, untrained(vocab_size=50304, candidates=0, model_dim=16, head_dim=8))
    text = tmp_path / "text.txt"
    text.write_text("Some text.\n\nSome more.\n\n" * 20)
    with monkeypatch.context() as patch:
        patch.setattr(sample, "codec", codec)
        out = run(capsys, checkpoint[0], path, f"--text={text}", "--split_blank=1")[1]
        assert "nats per byte" in out and "nats per token" in out
        assert out.count("minus") == 1 and re.search("minus .*, bits per byte: ", out)
        assert run(capsys, checkpoint[0], path)[0] == 2  # shards hold tokens of one kind
    monkeypatch.setitem(sys.modules, "tiktoken", None)  # its vocabulary is not at hand
    status, _, err = run(capsys, path, f"--text={text}")
    assert status == 2 and err.startswith("evaluate.py: tiktoken cannot load")


def test_an_ending_of_hellaswag_has_one_space_before_it_and_the_context_none():
    encoded = []
    model = evaluate.Model("m", Counter(), lambda text: encoded.append(text) or [1], np.ones(10, int))
    evaluate.hellaswag_measures(model, [item("A dog", ["runs.", "flies."])])
    assert set(encoded) == {"A dog", " runs.", " flies."}


def test_bits_per_byte_divide_by_the_bytes_of_each_token(tmp_path, monkeypatch):
    keep(tmp_path / "model.safetensors", untrained())
    monkeypatch.setattr(sample, "codec", lambda size: (None, lambda token: b"x" * (token % 5)))
    model = evaluate.load_model(tmp_path / "model.safetensors", "cpu")
    tokens = np.array([model.gpt.bos, 4, 3, model.gpt.bos, 2, 10, 1])  # of 4, 3, 3, 2, 0 and 1 bytes
    model = model._replace(token_bytes=np.where(np.arange(384) == model.gpt.bos, 0, model.token_bytes))
    nats = -evaluate.score(model.gpt, tokens[:-1], tokens[1:])
    measure = evaluate.loss_measures(model, tokens, model.gpt.config.val_seq_len)["bits per byte"]
    assert measure.result() == pytest.approx(nats[[0, 1, 3, 5]].sum() / math.log(2) / (4 + 3 + 2 + 1))
    assert measure.sizes.tolist() == [7, 3]
