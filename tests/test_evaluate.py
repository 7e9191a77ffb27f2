"""evaluate.py, data/hellaswag.py and records/evaluation.py.

References: scores of made-up items are compared with those of sample.Memory, which reads one item alone, token by
token, in float64; the loss with the trainer's validation; standard errors with closed forms; downloads come from a
small server on this machine. No item of the real HellaSwag is here."""
import hashlib
import http.server
import json
import math
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from conftest import ROOT, SEPARATOR, arguments, check_data, write_shard

import evaluate
import sample
import train_gpt as t
from data import hellaswag, shards
from nanogpt.checkpoints import of_model, write
from nanogpt.ranks import BadInput
from records import evaluation
from records.log import Refused

BOS = 271


def model_pair(num_layers=4, **changes):
    """The same random weights in float32 and in float64. None is zero, which could hide a mistake."""
    values = dict(num_layers=num_layers, model_dim=32, num_heads=4, head_dim=8, mlp_dim=64, vocab_size=BOS + 1, ngram_rows=101,
                  seq_len=2048, val_seq_len=1024, micro_tokens=2048, batch_tokens=2048, schedule="laptop",
                  precision="bf16", device="cpu", compile=False) | changes
    narrow = t.GPT(t.Config(**values, dtype="float32"), torch.device("cpu"))
    wide = t.GPT(t.Config(**values, dtype="float64"), torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p, q in zip(narrow.parameters(), wide.parameters()):
            p.copy_(0.3 * torch.randn(p.shape, generator=draw))
            q.copy_(p)
    return narrow, wide


def random_items(lengths, completions=4, longest=9, seed=0):
    """An item for each length of a context."""
    draw = np.random.default_rng(seed)
    return [evaluate.Item(draw.integers(256, size=length).tolist(),
                          [draw.integers(256, size=draw.integers(1, longest + 1)).tolist() for _ in range(completions)])
            for length in lengths]


def scores_alone(wide, item):
    """The reference: (sum of log-probabilities, tokens, all of them the most probable ones) of each completion."""
    found = []
    for completion in item.completions:
        memory = sample.Memory(wide, sample.last_setting(wide))
        logits = memory.append([wide.bos, *item.context])
        total, is_first = 0.0, True
        for token in completion:
            total += float(logits.double().log_softmax(-1)[token])
            is_first = is_first and int(logits.argmax()) == token
            logits = memory.append([token])
        found.append((total, len(completion), is_first))
    return found


# ---------------------------------------------------------------------------------------------- scores of made-up items


@pytest.mark.parametrize("num_layers", [2, 5])
def test_scores_are_those_of_each_item_alone_in_float64(num_layers):
    narrow, wide = model_pair(num_layers)
    items = random_items([1, 5, 40, 118, 119, 127, 128, 130, 200, 500, 700], completions=2)  # windows are 256 and 512
    scores = evaluate.score_items(narrow, items, 1024)
    for i, item in enumerate(items):
        for k, (total, count, is_first) in enumerate(scores_alone(wide, item)):
            assert abs(scores.log_probability[i, k] - total) < 1e-4, (i, k)
            assert scores.num_tokens[i, k] == count
            assert scores.is_top[i, k] == is_first


@pytest.mark.parametrize("num_layers", [1, 4, 7])
def test_a_score_does_not_depend_on_what_an_item_is_packed_with(num_layers):
    """All at the border of a document takes part: attention, n-grams, induced tokens, what is taken from the token before."""
    _, wide = model_pair(num_layers)
    item = random_items([300], seed=7)[0]
    alone = evaluate.score_items(wide, [item], 2048).log_probability[0]
    for seed in range(2):
        draw = np.random.default_rng(seed)
        before, after = (random_items(draw.integers(1, 300, size=2), seed=seed + side) for side in (10, 20))
        together = evaluate.score_items(wide, [*before, item, *after], 2048)
        assert np.abs(together.log_probability[len(before)] - alone).max() < 1e-9


def test_the_documents_around_it_would_be_seen_without_their_separator():
    """So the test above can fail: one token that is no separator lets the documents leak."""
    _, wide = model_pair()
    item = random_items([50], completions=1)[0]
    sequence = next(evaluate.packed([item, item], BOS, 2048))
    tokens, targets = torch.from_numpy(sequence.tokens), torch.from_numpy(sequence.targets)
    setting = sample.last_setting(wide)
    with_separator, _ = evaluate.score(wide, setting, tokens, targets)
    tokens[1:][tokens[1:] == BOS] = 7
    without, _ = evaluate.score(wide, setting, tokens, targets)
    count = len(item.completions[0])
    assert (with_separator[count:] - with_separator[:count]).abs().max() < 1e-9
    assert (without[count:] - with_separator[:count]).abs().max() > 1e-3


def test_items_begin_at_blocks_and_sequences_have_one_length():
    items = random_items([5, 130, 20, 127, 128, 0], completions=2)
    sequences = list(evaluate.packed(items, BOS, 512))
    assert [len(sequence.tokens) for sequence in sequences[:-1]] == [512] * (len(sequences) - 1)
    found = {}
    for sequence in sequences:
        assert len(sequence.tokens) == len(sequence.targets) == len(sequence.owners) and len(sequence.tokens) % 128 == 0
        for number in set(sequence.owners.tolist()) - {-1}:
            assert number not in found, "each completion stands in one sequence"
            found[number] = sequence, np.flatnonzero(sequence.owners == number)
    assert sorted(found) == list(range(12))
    covered = 0
    for number, (sequence, places) in found.items():
        item = items[number // 2]
        completion = item.completions[number % 2]
        begin = places[0] - len(item.context)
        assert begin % 128 == 0 and sequence.targets[places].tolist() == completion
        assert sequence.tokens[begin : places[-1] + 1].tolist() == [BOS, *item.context, *completion[:-1]]
        covered += places[-1] + 1 - begin
    everything = np.concatenate([sequence.tokens for sequence in sequences])
    assert sum(everything != BOS) == covered - 12, "what lies between is filled with the separator"


def test_an_item_that_is_too_long_is_one_sentence():
    narrow, _ = model_pair()
    with pytest.raises(BadInput, match=r"one item has 1,0\d\d tokens, and sequences have 1,024; give --seq_len=1152"):
        evaluate.score_items(narrow, random_items([1020], longest=8), 1024)


class Counter(torch.nn.Module):
    """Stands for a model: after token i comes i + 1, with a probability of exactly `certainty`; V is 10."""

    def __init__(self, certainty=0.5):
        super().__init__()
        self.bos = 9
        self.lm_head = torch.zeros(1)
        others = math.log((1 - certainty) / 9)
        self.table = torch.full((10, 10), others)
        self.table[torch.arange(10), (torch.arange(10) + 1) % 10] = math.log(certainty)

    def last_stream(self, tokens, setting, training):
        return tokens, (tokens,)

    def logits(self, x, sources):
        return self.table[x]


@pytest.fixture
def counter(monkeypatch):
    monkeypatch.setattr(sample, "last_setting", lambda model: t.Setting({"long": 2, "short": 1}, (1.0,), 1.0))
    return Counter()


def as_model(gpt):
    return evaluate.Model("m.pt", gpt, "bytes", lambda text: [int(c) for c in text if c.isdigit()], np.ones(10, int), "0" * 64)


def test_last_words_with_known_answers(counter):
    passages = [("1 2", " 3"), ("1 2", " 4"), ("5", " 678"), ("5", " 679"), ("12", " 0")]
    sums = evaluate.last_word_measures(as_model(counter), passages, 512)["last_word"]
    assert sums.amounts.tolist() == [1, 0, 1, 0, 0] and sums.sizes.tolist() == [1] * 5
    assert evaluate.result_of(sums) == pytest.approx(0.4)


def test_hellaswag_with_known_answers(counter):
    """The sum prefers short endings, the mean long ones with the same number of wrong tokens."""
    items = [hellaswag.Item("12", ["345", "5", "999", "888"], 0),  # sum: "345" has 3 log 1/2, "5" has log 1/18
             hellaswag.Item("1", ["2", "345678", "0", "0"], 0),
             hellaswag.Item("1", ["345678", "0", "00", "000"], 0)]  # one token is wrong: 0.5 ** 5 / 18 loses to 1 / 18
    measures = evaluate.hellaswag_measures(as_model(counter), items, 512)
    assert measures["hellaswag"].amounts.tolist() == [1, 1, 0]
    assert measures["hellaswag_norm"].amounts.tolist() == [1, 1, 1]
    scores = evaluate.score_items(counter, [evaluate.Item([1, 2], [[3, 4, 5], [5]])], 512)
    np.testing.assert_allclose(scores.log_probability, [[3 * math.log(0.5), math.log(1 / 18)]], atol=1e-6)


@pytest.mark.parametrize("passage, pair", [
    ("The end.", ("The", " end")), ("  a b\nc!\"\n", ("  a b", "\nc")), ("x  don't)...", ("x", "  don't")),
    ("Où est-il né ?", ("Où est-il", " né")), ("one", None), ("", None), ("...", None), (" one. ", None),
    ("3 + 4", ("3 +", " 4")),
], ids=repr)
def test_the_last_word_of_a_passage(passage, pair):
    assert evaluate.split_last_word(passage) == pair


# ------------------------------------------------------------------------------------------------------- loss and bits


@pytest.fixture(scope="module")
def checkpoint(corpus, tmp_path_factory):
    """A file of weights that some steps of a tiny model have made, and the loss that the trainer says it has."""
    c = t.parse_config(arguments(data_dir=corpus, val_tokens=1024, dtype="float32"))
    model = t.GPT(c, torch.device("cpu"))
    t.initialize(model, 0)
    _, _, tokens = check_data(c)
    path = tmp_path_factory.mktemp("models") / "model.pt"
    loss = t.validate(model, tokens, 4)
    write(path, of_model(model, 4, loss, {}))
    return path, loss


@pytest.fixture(scope="module")
def another(checkpoint):
    """The same model with its output a bit changed."""
    content = torch.load(checkpoint[0])
    draw = torch.Generator().manual_seed(1)
    content["weights"]["lm_head"] += 0.0003 * torch.randn(content["weights"]["lm_head"].shape, generator=draw)
    path = checkpoint[0].with_name("another.pt")
    write(path, {key: content[key] for key in ("config", "weights", "step", "val_loss")})
    return path


def run(capsys, *words):
    """(exit status, standard output, standard error)"""
    status = evaluate.main([str(word) for word in words])
    return status, *capsys.readouterr()


def results(capsys, *words):
    status, out, err = run(capsys, *words, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_the_loss_is_that_of_the_trainers_validation(checkpoint, capsys):
    path, loss = checkpoint
    got = results(capsys, path)["results"]
    assert [result["measure"] for result in got] == ["loss", "bits_per_byte"]
    assert got[0]["value"] == pytest.approx(loss, abs=1e-5)
    assert got[0]["units"] == got[1]["units"] > 1 and got[0]["standard_error"] > 0
    assert got[0] == results(capsys, path, "--text")["results"][0]


def test_the_loss_of_a_text_by_an_example(tmp_path, checkpoint, capsys):
    """Three documents, of which one ends at once; the reference goes through them one by one."""
    texts = ["Once upon a time", "x", "there was a fox.\n" * 3]
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in [*texts, "  "]))
    got = {result["measure"]: result for result in results(
        capsys, checkpoint[0], f"--text={file}", "--key=body")["results"]}
    model = t.load_checkpoint(checkpoint[0], torch.device("cpu"))
    encode, _ = sample.codec(model.config.vocab_size)
    nats, ends = [], []
    for text in texts:
        memory = sample.Memory(model, sample.last_setting(model))
        tokens = [model.bos, *encode(text)]
        rows = [float(-memory.append([token]).log_softmax(-1)[target])
                for token, target in zip(tokens, [*tokens[1:], model.bos])]
        nats.append(sum(rows))
        ends.append(rows[-1])
    num_bytes = np.array([len(text) for text in texts])
    assert got["loss"]["value"] == pytest.approx(sum(nats) / (num_bytes + 1).sum(), abs=1e-5)
    bits = (np.array(nats) - ends) / math.log(2)
    assert got["bits_per_byte"]["value"] == pytest.approx(bits.sum() / num_bytes.sum(), abs=1e-5)
    assert got["loss"]["units"] == 3
    assert got["loss"]["data_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_sum_of_the_weights_is_that_of_the_file(checkpoint, capsys):
    assert results(capsys, checkpoint[0])["models"][0]["weights_sha256"] == torch.load(checkpoint[0])["sha256"]


def test_two_models_are_compared_document_by_document(checkpoint, another, capsys):
    content = results(capsys, checkpoint[0], another, "--limit=5")
    first, second = (result for result in content["results"] if result["measure"] == "loss")
    assert first["units"] == second["units"] == 5
    difference = content["differences"][0]
    assert (difference["measure"], difference["model"], difference["against"]) == ("loss", 1, 0)
    assert difference["value"] == pytest.approx(second["value"] - first["value"], abs=2e-6)
    assert difference["standard_error"] < first["standard_error"]
    assert difference["low"] < difference["value"] < difference["high"]
    same = results(capsys, another, another)["differences"]
    assert [(entry["value"], entry["standard_error"]) for entry in same] == [(0, 0)] * 2


# -------------------------------------------------------------------------------------------------------- how certain


def sums(totals, weights=None):
    totals = np.array(totals, dtype=float)
    return evaluate.PerUnit(totals, np.ones_like(totals) if weights is None else np.array(weights, dtype=float))


def error_of(measure):
    return evaluate.standard_error(evaluate.influences(measure))


def test_standard_errors_have_their_closed_forms():
    x = np.random.default_rng(0).normal(size=100)
    assert error_of(sums(x)) == pytest.approx(x.std(ddof=1) / 10)
    assert error_of(sums([1] * 30 + [0] * 70)) == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    assert evaluate.result_of(sums([2, 4], [1, 3])) == 1.5
    assert error_of(sums([2, 4], [1, 3])) == pytest.approx(0.25)  # of influences 1/8 and -1/8
    assert error_of(sums([3], [2])) is None and evaluate.difference(sums([3]), sums([2])) is None
    assert error_of(sums(2 * np.arange(1, 6), np.arange(1, 6))) == pytest.approx(0)  # each document has the same mean


def test_a_paired_difference_has_its_closed_form():
    draw = np.random.default_rng(1)
    luck, a, b = draw.normal(size=400), draw.normal(size=400), draw.normal(size=400)
    found = evaluate.difference(sums(luck + 0.1 * b + 0.5), sums(luck + 0.1 * a))
    each = 0.1 * (b - a) + 0.5
    assert found.value == pytest.approx(each.mean())
    assert found.standard_error == pytest.approx(each.std(ddof=1) / 20)
    assert found.high - found.low == pytest.approx(2 * 1.959964 * found.standard_error)


def test_intervals_of_ratios_hold_as_often_as_they_say():
    """Documents of very different lengths, whose loss depends on the length."""
    draw = np.random.default_rng(2)
    held = 0
    for _ in range(400):
        lengths = draw.geometric(0.02, size=200)
        a, b = (sums(lengths * draw.normal(3 + offset, 0.5, size=200) + 5, lengths) for offset in (0, 0.1))
        found = evaluate.difference(b, a)
        held += found.low < 0.1 < found.high
    assert 0.91 < held / 400 < 0.98


# ---------------------------------------------------------------------------------------------------- items on disk


def line(**changes):
    entry = {"ctx": "A dog", "endings": ["runs.", "flies.", "reads.", "sinks."], "label": 0, "ind": 4} | changes
    return json.dumps(entry) + "\n"


GOOD = line() + "\n" + line(label="3", ctx="Une fête é")


def test_items_are_read(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text(GOOD)
    first, second = hellaswag.read_items(path)
    assert first == ("A dog", ["runs.", "flies.", "reads.", "sinks."], 0)
    assert (second.context, second.label) == ("Une fête é", 3)


@pytest.mark.parametrize("text, part", [
    (GOOD + GOOD[:40], "line 4 is not a JSON object"), (GOOD + "[1]\n", "line 4 is not a JSON object"),
    ("[" * 100_000, "line 1 is not a JSON object"), (line(ctx=3), 'line 1 has no text as "ctx"'),
    (line(ctx=" "), 'no text as "ctx"'), (line(endings=["a"] * 3), 'no 4 texts as "endings"'),
    (line(endings=["a", "b", "c", 4]), 'no 4 texts as "endings"'), (line(endings="abcd"), 'no 4 texts as "endings"'),
    (line(label=""), 'as "label"; the test split has none'), (line(label=4), 'as "label"'), ("\n", "holds no items"),
    (line(label=True), 'as "label"'), (b"\xff\xfe", "line 1 is not a JSON object"),
], ids=repr)
def test_damaged_items_are_one_sentence(tmp_path, checkpoint, capsys, text, part):
    path = tmp_path / "items.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    status, out, err = run(capsys, checkpoint[0], f"--hellaswag={path}")
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith(f"evaluate.py: {path}") and part in err


class Server:
    """A server on this machine. `most` is how many bytes of an answer it sends before it hangs up."""

    def __init__(self, body, most=None, knows_ranges=True):
        self.begins = begins = []  # where each answer began

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path != "/items.jsonl":
                    self.send_error(404)
                    return
                begin = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0]) if knows_ranges else 0
                begins.append(begin)
                if begin >= len(body):
                    self.send_error(416)
                    return
                self.send_response(206 if begin else 200)
                self.send_header("Content-Length", str(len(body) - begin))
                self.end_headers()
                self.wfile.write(body[begin:][:most])

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/items.jsonl"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


BODY = GOOD.encode() * 3000
SUM = hashlib.sha256(BODY).hexdigest()


def fetch(path, server, sha256=SUM):
    return hellaswag.fetch(path, server.url, sha256)


@pytest.mark.parametrize("most, begins", [(None, [0]), (200_000, [0, 200_000, 400_000, 600_000])])
def test_a_dropped_connection_is_picked_up_where_it_ended(tmp_path, most, begins):
    path = tmp_path / "items.jsonl"
    with Server(BODY, most) as server:
        fetch(path, server)
        assert path.read_bytes() == BODY and server.begins == begins[: math.ceil(len(BODY) / (most or len(BODY)))]
        fetch(path, server)  # it is there, so nothing is asked
        assert len(server.begins) == math.ceil(len(BODY) / (most or len(BODY)))
    assert [file.name for file in tmp_path.iterdir()] == ["items.jsonl"]


def test_a_download_of_an_earlier_run_is_gone_on_with(tmp_path):
    path = tmp_path / "items.jsonl"
    part = tmp_path / "items.jsonl.part"
    for begun, begins in ((BODY[:1000], [1000]), (BODY, [len(BODY), 0]), (b"x" + BODY, [len(BODY) + 1, 0])):
        part.write_bytes(begun)
        with Server(BODY) as server:
            fetch(path, server)
            assert path.read_bytes() == BODY and server.begins == begins
        path.unlink()
    part.write_bytes(b"x" * 10)
    with Server(BODY, knows_ranges=False) as server:
        assert fetch(path, server).read_bytes() == BODY


def test_a_server_that_always_begins_anew_and_breaks_off_is_given_up(tmp_path, monkeypatch):
    lengths = iter([500, 300, 400])

    def breaks_off(url, part):
        part.write_bytes(BODY[: next(lengths)])
        raise OSError("reset by peer")

    monkeypatch.setattr(hellaswag, "download", breaks_off)
    with pytest.raises(hellaswag.ItemsError, match="could not be fetched .*reset by peer"):
        hellaswag.fetch(tmp_path / "items.jsonl", "http://example.com", SUM)
    assert next(lengths) == 400, "it was asked twice"


def test_what_arrives_damaged_is_refused_and_not_kept(tmp_path):
    path = tmp_path / "items.jsonl"
    with Server(BODY[:-1] + b"?") as server:
        with pytest.raises(hellaswag.ItemsError, match="items.jsonl arrived damaged, or was changed"):
            fetch(path, server)
    assert not list(tmp_path.iterdir())
    with Server(BODY) as server:
        assert fetch(path, server).exists()


@pytest.mark.parametrize("url, part", [
    ("http://127.0.0.1:9/items.jsonl", "URLError"), ("http://no.such.host.invalid/items.jsonl", "URLError"),
    ("404", "404"),
])
def test_without_a_network_there_is_one_sentence(tmp_path, checkpoint, capsys, monkeypatch, url, part):
    with Server(BODY) as server:
        missing = server.url.replace("items", "other") if url == "404" else url
        monkeypatch.setattr(hellaswag, "PATH", tmp_path / "items.jsonl")
        monkeypatch.setattr(hellaswag.fetch, "__defaults__", (tmp_path / "items.jsonl", missing, SUM))
        status, out, err = run(capsys, checkpoint[0], "--hellaswag")
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("evaluate.py: items.jsonl could not be fetched (") and part in err
    assert "connect to the network" in err


# ---------------------------------------------------------------------------------------------------------- the program


def test_all_measures_at_once(tmp_path, checkpoint, another, capsys):
    items, text = tmp_path / "items.jsonl", tmp_path / "text.txt"
    items.write_text(GOOD * 20)
    text.write_text("The first one ends.\nHere it does.\n\n\nA second, and so on.\n\nThree")
    words = (checkpoint[0], another, f"--text={text}", "--split_blank=1", f"--hellaswag={items}", f"--last_word={text}")
    status, out, err = run(capsys, *words)
    assert (status, err) == (0, "")
    for part in ("loss", "bits per byte", "HellaSwag, normalised", "40 items of items.jsonl", "2 passages",
                 "another.pt minus", "95 % interval", "fewer than 30"):
        assert part in out
    content = results(capsys, *words)
    assert [result["measure"] for result in content["results"] if result["model"] == 1] == [*evaluation.MEASURES]
    file = tmp_path / "results.json"
    file.write_text(json.dumps(content))
    assert evaluation.read(file) == content


def test_models_that_agree_on_every_passage_are_not_said_to_be_equal(tmp_path, checkpoint, another, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Passage {i} ends with zebras" for i in range(40)))
    status, out, _ = run(capsys, checkpoint[0], another, f"--last_word={text}")
    assert status == 0 and "interval +0.00 % to +0.00 %" in out
    assert "An interval of no width: the models agree on all N. They may still differ by 3 / N." in out
    assert "An error of 0: all N have the same result. Of further ones about 3 / N may differ." in out
    text.write_text("One\n\nTwo")
    status, out, _ = run(capsys, checkpoint[0], checkpoint[0], f"--text={text}", "--split_blank=1")
    assert status == 0 and "+0.0000 to +0.0000" in out and "3 / N" not in out, "that holds for shares only"
    text.write_text("A single passage")
    status, out, _ = run(capsys, checkpoint[0], f"--last_word={text}")
    assert status == 0 and "A single one has none" in out and "no width" not in out


def test_the_program_runs_as_a_script(checkpoint, tmp_path):
    command = [sys.executable, str(ROOT / "evaluate.py"), str(checkpoint[0]), "--device=cpu"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "nats per token" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words, part", [
    ([], "MODEL"), (["no.pt"], "no.pt"), (["/dev/null"], "/dev/null"), ([ROOT], str(ROOT)),
    (["MODEL", "--text=no.txt"], "no.txt: no such file"), (["MODEL", "--text=no.bin"], "no.bin"),
    (["MODEL", "--text=EMPTY"], "no text in it"), (["MODEL", "--last_word=EMPTY"], "no text in it"),
    (["MODEL", "--last_word=ONE"], "no passage of two words"), (["MODEL", "--hellaswag=no.jsonl"], "no.jsonl"),
    (["MODEL", "--hellaswag", ROOT], str(ROOT)), (["MODEL", "--limit=0"], "limit"), (["MODEL", "--seq_len=100"], "128"),
    (["MODEL", "--device=tpu"], "tpu"), (["MODEL", "--tex=a"], "--tex=a"), (["MODEL", "--text=GPT2"], "of the kind gpt2"),
    (["MODEL", "--last_word="], "--last_word is empty"), (["MODEL", "--text="], "--text is empty"),
    (["MODEL", "--hellaswag=FIFO"], "no file"), (["MODEL", "--text=FOLDER"], "a pipe or a device"),
    (["MODEL", "--text=DAMAGED"], "promises"), (["MODEL", "--last_word=BINARY"], "UTF-8"),
], ids=str)
def test_what_cannot_be_is_one_sentence(tmp_path, checkpoint, capsys, words, part):
    files = {"MODEL": checkpoint[0], "EMPTY": tmp_path / "empty.txt", "ONE": tmp_path / "one.txt",
             "GPT2": tmp_path / "a_val_0.bin", "DAMAGED": tmp_path / "b.bin", "BINARY": tmp_path / "binary.txt",
             "FOLDER": tmp_path / "folder", "FIFO": tmp_path / "folder" / "a_val_0.bin"}
    files["FOLDER"].mkdir()
    os.mkfifo(files["FIFO"])
    files["EMPTY"].write_text(" \n\n")
    files["ONE"].write_text("one\n\ntwo.\n")
    files["BINARY"].write_bytes(b"a \xff b")
    write_shard(files["GPT2"], [SEPARATOR, 300, 301])
    write_shard(files["DAMAGED"], [SEPARATOR, 1], count=5)
    filled = []
    for word in map(str, words):
        name = word.rpartition("=")[2]
        filled.append(word.replace(name, str(files[name])) if name in files else word)
    status, out, err = run(capsys, *filled)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("evaluate.py: ") and part in err


def test_half_precision_is_widened_as_in_validation(corpus, tmp_path, capsys):
    c = t.parse_config(arguments(data_dir=corpus, precision="fp16"))
    model = t.GPT(c, torch.device("cpu"))
    t.initialize(model, 0)
    _, _, tokens = check_data(c)
    loss = t.validate(model, tokens, 4)
    write(tmp_path / "model.pt", of_model(model, 4, loss, {}))
    got = results(capsys, tmp_path / "model.pt")["results"][0]["value"]
    assert got == pytest.approx(loss, abs=1e-2)


def test_a_model_that_had_another_loss_when_it_was_trained_is_named(checkpoint, tmp_path, capsys):
    path, loss = checkpoint
    assert run(capsys, path)[::2] == (0, "")
    content = torch.load(path, weights_only=True)
    write(tmp_path / "model.pt", {name: content[name] for name in content if name != "sha256"} | {"val_loss": loss + 0.02})
    status, _, err = run(capsys, tmp_path / "model.pt")
    assert status == 0 and err.count("\n") == 1 and f"and had {loss + 0.02:.4f} when it was trained" in err
    status, _, err = run(capsys, tmp_path / "model.pt", "--limit=1")
    assert (status, err) == (0, ""), "a part of the text has another loss anyway"
    other = content["config"] | {"val_files": "*_val_00000*.bin"}
    write(tmp_path / "other.pt", {
        name: content[name] for name in content if name != "sha256"} | {"val_loss": loss + 0.02, "config": other})
    status, _, err = run(capsys, path, tmp_path / "other.pt")
    assert (status, err) == (0, ""), "the loss on other files is another one anyway"


def test_text_that_was_prepared_anew_since_the_training_is_named(corpus, tmp_path, capsys):
    """With another split, a model's validation text may be what it was trained on."""
    folder = tmp_path / "data"
    shutil.copytree(corpus, folder)
    c = t.parse_config(arguments(data_dir=folder))
    _, val_paths, tokens = check_data(c)
    model = t.GPT(c, torch.device("cpu"))
    write(tmp_path / "model.pt", of_model(
        model, 4, t.validate(model, tokens, 4), dict(data=[shards.fingerprint(path, "val") for path in val_paths])))
    status, _, err = run(capsys, tmp_path / "model.pt")
    assert (status, err) == (0, "")
    for path in val_paths:
        content = bytearray(path.read_bytes())
        content[-2] ^= 1  # the low byte of the last token
        path.write_bytes(content)
    status, _, err = run(capsys, tmp_path / "model.pt")
    assert (status, err.count("\n")) == (0, 1) and f"{folder} was prepared anew after {tmp_path / 'model.pt'}" in err
    status, _, err = run(capsys, tmp_path / "model.pt", f"--text={corpus}")
    assert (status, err) == (0, ""), "another folder is no mistake"
    (train_path,) = folder.glob("*_train_000001.bin")
    status, _, err = run(capsys, tmp_path / "model.pt", f"--text={train_path}")
    assert (status, err) == (0, ""), "nor is a shard that the run did not validate on"


def test_models_of_other_tokens_are_compared_by_bits_per_byte(tmp_path, checkpoint, capsys, monkeypatch):
    """The second model has GPT-2's kind of vocabulary; here a token is two characters."""
    def codec(vocab_size):
        if vocab_size < 1000:
            return real(vocab_size)
        pairs = lambda text: [ord(a) + 128 * ord(b) for a, b in zip(text[::2], text[1::2])]
        return pairs, lambda token: b"xx" if token < 128 * 128 else b""

    real = sample.codec
    monkeypatch.setattr(sample, "codec", codec)
    c = t.parse_config(arguments(vocab_size=50304, candidates=0, model_dim=16, head_dim=8))
    model = t.GPT(c, torch.device("cpu"))
    t.initialize(model, 0)
    write(tmp_path / "model.pt", of_model(model, 4, 1.0, {}))
    text = tmp_path / "text.txt"
    text.write_text("Some text.\n\nSome more.\n\n" * 20)
    content = results(capsys, checkpoint[0], tmp_path / "model.pt", f"--text={text}", "--split_blank=1")
    assert [model["tokens"] for model in content["models"]] == ["bytes", "gpt2"]
    assert [entry["measure"] for entry in content["differences"]] == ["bits_per_byte"]
    assert run(capsys, checkpoint[0], tmp_path / "model.pt")[0] == 2  # shards hold tokens of one kind


def test_of_a_vocabulary_of_ones_own_the_loss_on_shards_is_measured(tmp_path, capsys):
    path = tmp_path / "own_val_000000.bin"
    write_shard(path, [SEPARATOR, *range(1990)] * 3)
    c = t.parse_config(arguments(vocab_size=2000, candidates=0))
    model = t.GPT(c, torch.device("cpu"))
    t.initialize(model, 0)
    write(tmp_path / "model.pt", of_model(model, 4, 1.0, {}))
    content = results(capsys, tmp_path / "model.pt", f"--text={path}")
    assert content["models"][0]["tokens"] == "other"
    assert [(result["measure"], result["units"]) for result in content["results"]] == [("loss", 1)]
    status, out, err = run(capsys, tmp_path / "model.pt", f"--last_word={ROOT / 'README.md'}")
    assert (status, out) == (2, "") and "only its loss on shards can be measured" in err


# ----------------------------------------------------------------------------------------------- the form of the results


def content_with(*changes):
    """Results in the right form, but for some changes: (where, value), and the value None takes it away."""
    content = {
        "form": 1, "date": "2026-11-22T16:00:00Z", "torch": "2.11.0", "device": "NVIDIA H200",
        "models": [{"path": f"models/{name}.pt", "weights_sha256": "0" * 64, "steps": 950, "preset": "onepass",
                    "tokens": "gpt2"} for name in "ab"],
        "results": [{"measure": "hellaswag", "model": 0, "value": 0.2859, "standard_error": 0.0045, "units": 10042,
                     "data": "items.jsonl", "data_sha256": "1" * 64},
                    {"measure": "loss", "model": 1, "value": 3.4832, "standard_error": None, "units": 1,
                     "data": "data/x", "data_sha256": "1" * 64}],
        "differences": [{"measure": "loss", "model": 1, "against": 0, "value": -0.01, "standard_error": 0.001,
                         "low": -0.012, "high": -0.008}],
    }
    for where, value in changes:
        *path, last = where.split(".")
        inner = content
        for step in path:
            inner = inner[int(step) if step.isdigit() else step]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    return content


def test_letters_of_any_language_stay_in_names_and_what_would_break_a_table_does_not(tmp_path):
    assert evaluation.clean("models/kürz 1.pt") == "models/kürz 1.pt" and evaluation.clean("a|`b`\n") == "a??b??"
    file = tmp_path / "results.json"
    file.write_text(json.dumps(content_with(("models.1.path", "models/kürz 1.pt"))))
    assert "| `models/kürz 1.pt`, step 950 | loss |" in evaluation.block(evaluation.read(file))


def test_results_in_the_right_form_are_read_and_shown(tmp_path):
    file = tmp_path / "results.json"
    file.write_text(json.dumps(content_with()))
    page = evaluation.block(evaluation.read(file))
    assert "**not part of the proof**" in page
    assert "| `models/a.pt`, step 950 | HellaSwag | 28.59 % ± 0.45 % right by the sum | 10,042 items of items.jsonl |" in page
    assert "| `models/b.pt`, step 950 | loss | 3.4832 nats per token | 1 document of data/x |" in page
    assert "| -0.0100, 95 % interval -0.0120 to -0.0080 |" in page


@pytest.mark.parametrize("where, value", [
    ("form", 2), ("form", None), ("date", "today"), ("device", "a|b"), ("models", {}), ("models.0.path", "<b>"),
    ("models.1.weights_sha256", "00"), ("models.0.tokens", "words"), ("results", []), ("results.0", 3),
    ("results.0.measure", "beauty"), ("results.0.model", 2), ("results.0.value", 1.2), ("results.1.value", -0.1),
    ("results.0.value", "0.3"), ("results.0.units", 1.5), ("results.0.standard_error", -1), ("results.0.data", None),
    ("differences", None), ("differences.0.low", -0.001), ("differences.0.against", 7), ("differences.0.high", True),
], ids=str)
def test_results_in_another_form_are_refused(tmp_path, where, value):
    file = tmp_path / "results.json"
    content = content_with()
    if where == "results.0" or where == "results":
        content = content | {"results": value if where == "results" else [value]}
    else:
        content = content_with((where, value))
    file.write_text(json.dumps(content))
    with pytest.raises(Refused, match="expected"):
        evaluation.read(file)


def test_any_damage_to_a_file_of_results_is_read_or_refused(tmp_path):
    file = tmp_path / "results.json"
    whole = json.dumps(content_with()).encode()
    draw = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for place in draw.integers(len(whole), size=2):
            damaged[place] = draw.integers(256)
        file.write_bytes(damaged[: draw.integers(len(whole) // 2, len(whole) + 1)])
        try:
            evaluation.block(evaluation.read(file))
        except Refused:
            pass
