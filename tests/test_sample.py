"""sample.py: logits are those of the whole sequence; draws, text, and the program."""
import os
import signal
import subprocess
import sys

import processes
import pytest
import torch
from conftest import ROOT, keep, untrained
from processes import Process
from test_model import tiny

import sample
import train_gpt as t
from nanogpt.ranks import BadInput
from records.console import end_in_order

pytestmark = pytest.mark.usefixtures("no_gpu")
SPEAK = [sys.executable, str(ROOT / "sample.py"), "--device=cpu"]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_model():
    return tiny(vocab_size=384, seq_len=1024, micro_tokens=1024, batch_tokens=1024, num_steps=4,
                schedule="laptop")


def continue_text(model, text, count, **options):
    return "".join(sample.continued(model, text, count, **options))


# ---------------------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize("trained_steps", [1, 4])  # of 4: weights that were kept earlier see less far
@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_the_logits_after_a_text_are_those_of_the_whole_sequence_it_begins(length, trained_steps):
    model = random_model()
    model.trained_steps = trained_steps
    tokens = torch.randint(0, 20, (512,), generator=generator(1))
    tokens[[0, 100]] = model.bos
    with torch.no_grad():
        whole = model.logits(*model.last_stream(model.past.read(tokens, False), t.setting_of(model.trained_steps, model.config), training=False))
    found = sample.next_logits(model, tokens[:length].tolist())
    torch.testing.assert_close(found, whole[length - 1], rtol=0, atol=1e-9)


def test_the_same_seed_draws_the_same_tokens_and_temperature_0_the_most_probable_ones():
    model = random_model()
    text = [continue_text(model, "ij", 12, seed=seed) for seed in (0, 0, 1)]
    assert text[0] == text[1] != text[2]
    best = continue_text(model, "ij", 1, temperature=0)
    encode, to_bytes = sample.codec(384)
    assert best == "ij" + to_bytes(int(sample.next_logits(model, [383, *encode("ij")]).argmax())).decode(errors="replace")


def test_tokens_are_drawn_by_their_probability():
    logits = torch.tensor([1.0, 3.0, 2.0, -40.0])
    draws = generator()
    drawn = torch.tensor([sample.draw(logits, 2.0, draws) for _ in range(3000)])
    p = (logits / 2).softmax(0)  # 0.19, 0.51, 0.31, 0
    torch.testing.assert_close(torch.bincount(drawn, minlength=4) / 3000, p, atol=0.03, rtol=0)


@pytest.fixture
def scripted(monkeypatch):
    """In place of `draw`: the tokens that are given, then the last of them for ever."""
    def script(*tokens):
        tokens = [*tokens]
        monkeypatch.setattr(sample, "draw", lambda *_: tokens.pop(0) if len(tokens) > 1 else tokens[0])

    return script


def test_a_sample_ends_with_its_length_its_document_or_the_sequence_and_of_a_longer_text_the_end_is_read(scripted):
    model = untrained()
    scripted(7)
    for prompt in ("x" * 3, "", "é"):
        assert continue_text(model, prompt, 10) == prompt + "(" * 10  # GPT-2's token i < 94 is byte 33 + i
    scripted(65, 66, model.bos)
    assert continue_text(model, "x", 10) == "xbc"
    scripted(66)
    assert continue_text(model, "x" * 3, 400) == "x" * 3 + "c" * 252  # and the separator: 256 tokens
    for length in (245, 246, 255, 300):
        assert continue_text(model, "x" * length, 10) == "x" * length + "c" * 10


@pytest.mark.parametrize("count, kept", [(1, 254), (100, 155), (400, 128)])
def test_a_model_reads_the_end_of_a_text_that_leaves_no_room_but_at_least_half_a_sequence(count, kept, monkeypatch):
    model = untrained()
    read = []
    monkeypatch.setattr(sample, "next_logits", lambda model, tokens: read.append([*tokens]) or torch.zeros(384))
    encode, _ = sample.codec(384)
    continue_text(model, "xyz" * 100, count)
    assert read[0] == [model.bos, *encode("xyz" * 100)[-kept:]]


def test_a_model_of_fp16_whose_activations_overflow_that_continues_texts_all_the_same(tmp_path):
    model = untrained(precision="fp16")
    with torch.no_grad():
        for layer in range(model.config.num_layers):  # hidden numbers of about 10^5, where fp16 ends at 65,504
            model.mlp[2 * layer].normal_(std=50)
            model.mlp[2 * layer + 1].normal_(std=1e-4)
    keep(tmp_path / "model.safetensors", model)
    loaded = t.checkpoints.load_model(tmp_path / "model.safetensors", torch.device("cpu"), t)
    assert sample.next_logits(loaded, [loaded.bos, 1, 2, 3]).isfinite().all()
    assert not sample.next_logits(model, [loaded.bos, 1, 2, 3]).isfinite().all(), "in fp16 they do overflow"


# ---------------------------------------------------------------------------------------------------- text


def test_text_goes_to_tokens_and_back_and_tokens_without_text_are_empty(monkeypatch):
    encode, to_bytes = sample.codec(272)
    assert b"".join(map(to_bytes, encode("aé\0€"))).decode() == "aé\0€"
    assert [to_bytes(token) for token in (256, 271)] == [b"", b""] and encode("\udcff") == encode("?")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(BadInput, match="tiktoken cannot load GPT-2's vocabulary"):
        sample.codec(50304)


# ---------------------------------------------------------------------------------------------------- the program


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model = untrained(seq_len=4096, micro_tokens=4096, batch_tokens=8192)
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    keep(path, model, model.config.num_steps)
    return path


def test_the_program_continues_a_text_from_the_command_line_and_from_a_pipe(checkpoint, tmp_path):
    options = "--device=cpu", "--sample_tokens=40"
    given = processes.run(ROOT / "sample.py", checkpoint, "Once é", "--seed=3", *options, cwd=tmp_path)
    assert given.returncode == 0 and given.stdout.startswith("Once é") and given.stderr == ""
    piped = subprocess.run([*SPEAK, "--seed", "3", checkpoint, *options], input="Once é\n", cwd=tmp_path,
                           capture_output=True, encoding="utf-8", timeout=120)
    assert piped.stdout == given.stdout and piped.stderr == "" and not list(tmp_path.iterdir())


def test_the_program_hands_on_all_its_options(monkeypatch, capsys):
    monkeypatch.setattr(t.checkpoints, "load_model", lambda path, device, script: path)
    monkeypatch.setattr(sample, "continued", lambda *given: [repr(given)])
    sample.work(["m.pt", "x", "--seed=3", "--temperature=0.5", "--sample_tokens=7"])
    assert capsys.readouterr().out == "('m.pt', 'x', 7, 0.5, 3)\n"


def test_a_character_comes_as_soon_as_it_is_complete_and_without_control_characters(scripted):
    encode, _ = sample.codec(384)
    scripted(*encode("aé€\x1b\t\x9b"), *encode("é")[:1], 383)
    pieces = list(sample.continued(untrained(), "Once\x07\r é", 20))
    assert pieces == ["Once? é", "a", "", "é", "", "", "€", "?", "\t", "", "?", "", "�"]


@pytest.mark.parametrize("args, part", [
    ([], "MODEL"), (["no.pt", "x"], "no.pt"), (["x", "--temperature=hot"], "hot"), (["x", "--temperature=nan"], "nan"), (["x", "--sample_tokens=-3"], "-3"),
    (["x", "--seed=-1"], "-1"),
    (["."], "is a folder"),
    (["x", "--sample_tokens=1.5"], "1.5"), (["x", "--device=tpu"], "tpu"),
    (["x", "--temprature=1"], "unrecognized arguments: --temprature=1"), (["x", "y", "z"], "unrecognized arguments: z"),
], ids=str)
def test_what_cannot_be_is_one_sentence(args, part, capfd):
    status = end_in_order("sample.py", sample.work, args)
    out, err = capfd.readouterr()
    assert status == 2 and out == "" and err.count("\n") == 1 and err.startswith("sample.py: ") and part in err


def test_a_closed_pipe_and_control_c_end_it_quietly_and_a_full_disk_with_a_sentence(checkpoint):
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run([*SPEAK, str(checkpoint), "Once"], stdout=writing, stderr=subprocess.PIPE, timeout=120)
    os.close(writing)
    assert run.returncode == 0 and run.stderr == b""
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            run = subprocess.run([*SPEAK, str(checkpoint), "Once"], stdout=full, stderr=subprocess.PIPE, timeout=120)
        assert run.returncode == 2 and run.stderr.count(b"\n") == 1 and run.stderr.startswith(b"sample.py: ")
    process = Process("sample.py", checkpoint, "Once", "--device=cpu", "--sample_tokens=4000")
    process.wait_for("Once")
    process.send_signal(signal.SIGINT)
    assert process.wait() == -signal.SIGINT and process.err() == ""
