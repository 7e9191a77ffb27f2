"""sample.py: what is kept of earlier tokens gives the logits of the whole sequence; draws, text, and the program."""
import os
import pty
import select
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, arguments

import sample
import train_gpt as t
from nanogpt import past
from nanogpt.checkpoints import of_model, write
from nanogpt.masks import BLOCK_SIZE
from nanogpt.ranks import BadInput

BOS = 256
LENGTH = 1024
SPEAK = [sys.executable, str(ROOT / "sample.py")]


def random_model(num_layers=5, dtype="float64", seq_len=LENGTH, **changes):
    """Every weight is random: none that is zero could hide a mistake."""
    values = dict(num_layers=num_layers, model_dim=32, num_heads=2, head_dim=8, mlp_dim=64, vocab_size=BOS + 1, ngram_rows=101,
                  longest_ngram=3, recall_rows=10_007,
                  seq_len=seq_len, val_seq_len=seq_len, micro_tokens=seq_len, batch_tokens=seq_len, dtype=dtype,
                  precision="bf16", device="cpu", compile=False)
    model = t.GPT(t.Config(**values | changes), torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=torch.float64) * (0.3 if p.dim() == 3 else 1))
    earlier = text_of([0, 200], seq_len)
    hashes = model.past.read(earlier, True).hashes
    past.remember(model.recall_table, hashes, earlier.roll(-1), model.config.recall_lengths, 1)
    return model


def view(long=3, short=2):
    return t.Setting({"long": long, "short": short}, (1.0, 0.3), 0.75)


def text_of(starts, length=LENGTH):
    tokens = torch.randint(0, 20, (length,), generator=torch.Generator().manual_seed(1))  # so that many pairs come again
    tokens[starts] = BOS
    return tokens


# ---------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("windows", [(3, 2), (2, 1), (20, 6)], ids=str)  # 20 blocks are longer than a sequence
@pytest.mark.parametrize("starts", [[0], [0, 99, 100, 639, 640, 700], [5]], ids=str)
@pytest.mark.parametrize("num_layers", [1, 4, 7])
def test_the_logits_with_kept_keys_and_values_are_those_of_the_whole_sequence(num_layers, starts, windows):
    model, tokens = random_model(num_layers), text_of(starts)
    with torch.no_grad():
        whole = model.logits(*model.last_stream(tokens, view(*windows), training=False))
    memory, rows, begin = sample.Memory(model, view(*windows)), [], 0
    with torch.no_grad():
        for i in range(LENGTH):  # tokens one by one, and others together, but never across a block's end
            count = [1, 1, 1, 7, 64, 128][i % 6]
            end = min(begin + count, begin + BLOCK_SIZE - begin % BLOCK_SIZE)
            if begin < LENGTH:
                rows.append(model.logits(*memory.last_stream(tokens[begin:end])))
            begin = end
    torch.testing.assert_close(torch.cat(rows), whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_narrow_dtypes_they_are_as_near_to_float64_as_those_of_the_whole_sequence(dtype):
    exact_model, model, tokens = random_model(), random_model(dtype=dtype), text_of([0, 200])
    with torch.no_grad():
        exact, whole = (m.logits(*m.last_stream(tokens, view(), training=False)) for m in (exact_model, model))
    memory = sample.Memory(model, view())
    errors = []
    for count in (1, 2, 127, 130, 300):
        kept = memory.append(tokens[memory.length : memory.length + count].tolist())
        at = memory.length - 1
        errors.append(((kept - exact[at]).norm(), (whole[at] - exact[at]).norm()))
    of_kept, of_whole = (sum(x.item() for x in column) for column in zip(*errors))
    assert of_kept < 3 * of_whole, errors  # rounding grows from layer to layer, with random weights a lot


def test_a_memory_that_was_cleared_knows_nothing_of_the_text_before():
    model, tokens = random_model(), text_of([0, 300]).tolist()
    memory = sample.Memory(model, view())
    first = memory.append(tokens[:700])
    memory.clear()
    memory.append(tokens[300:])
    memory.clear()
    assert torch.equal(memory.append(tokens[:700]), first)


def test_a_memory_takes_no_more_tokens_than_a_sequence_has():
    memory = sample.Memory(random_model(2, seq_len=256), view())
    memory.append([1] * 255)
    with pytest.raises(ValueError, match="2 tokens after 255, of at most 256"):
        memory.append([1, 2])
    memory.append([1])
    for tokens in ([], [1]):
        with pytest.raises(ValueError):
            memory.append(tokens)


def test_the_view_is_that_of_the_step_whose_weights_are_kept():
    model = random_model(5, num_steps=100)
    assert sample.last_setting(model) == t.setting_of(100, model.config)
    model.trained_steps = 50
    assert sample.last_setting(model) == t.setting_of(50, model.config) != t.setting_of(100, model.config)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_cuda_graph_gives_the_logits_of_the_plain_step():
    model, tokens = random_model(5, "float32").cuda(), text_of([0, 200, 500]).tolist()
    model.past.recall_table = model.recall_table
    memories = [sample.Memory(model, view(), cuda_graph) for cuda_graph in (True, False)]
    for begin, end in ((0, 100), *((i, i + 1) for i in range(100, 600))):
        with_graph, plain = (memory.append(tokens[begin:end]) for memory in memories)
        assert torch.equal(with_graph, plain)
    assert memories[0].graphs.captures and memories[1].graphs is None


def test_where_no_graph_can_be_captured_the_step_is_computed_without(capsys):
    model, tokens = random_model(4), text_of([0]).tolist()

    def fails(key, function, tensors):
        raise RuntimeError("operation not permitted when stream is capturing")

    memory, plain = sample.Memory(model, view()), sample.Memory(model, view())
    memory.graphs = fails
    for i in range(5):
        assert torch.equal(memory.append(tokens[i : i + 1]), plain.append(tokens[i : i + 1]))
    assert memory.graphs is None and capsys.readouterr().err.count("\n") == 1


# ---------------------------------------------------------------------------------------------------- draws


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(model, count=40, temperature=0.8, top_k=0, seed=0, prompt=(BOS, 72, 73)):
    memory = sample.Memory(model, view())
    return list(sample.generate(memory, list(prompt), count, temperature, top_k, generator(seed)))


def test_the_same_seed_draws_the_same_tokens_and_another_one_does_not():
    model = random_model(4)
    assert drawn(model) == drawn(model) != drawn(model, seed=1)


def test_temperature_0_takes_the_most_probable_token_of_the_whole_sequence_and_so_does_top_1():
    model = random_model(4, "float32")
    tokens = [BOS, 72, 73]
    for token in drawn(model, temperature=0):
        padded = torch.tensor(tokens + [0] * (-len(tokens) % 128))
        with torch.no_grad():
            logits = model.logits(*model.last_stream(padded, view(), training=False))
        assert token == logits[len(tokens) - 1].argmax()
        tokens.append(token)
    assert drawn(model, top_k=1, temperature=5.0) == tokens[3:]


def test_tokens_are_drawn_by_their_probability():
    logits = torch.tensor([1.0, 3.0, 2.0, -40.0])
    draws = generator()
    counts = torch.bincount(torch.tensor([sample.draw(logits, 2.0, 0, draws) for _ in range(4000)]), minlength=4)
    torch.testing.assert_close(counts / 4000, (logits / 2).softmax(0), atol=0.03, rtol=0)
    among_two = {sample.draw(logits, 2.0, 2, draws) for _ in range(100)}
    assert among_two == {1, 2}
    assert {sample.draw(logits, 1.0, 9, draws) for _ in range(300)} == {0, 1, 2}, "top_k above the vocabulary"
    for tiny in (1e-30, 5e-324):
        assert sample.draw(logits, tiny, 0, draws) == 1


class Scripted:
    """In place of `draw`: the tokens that were given, then the last of them for ever."""

    def __init__(self, *tokens):
        self.tokens = list(tokens)

    def __call__(self, *_):
        return self.tokens.pop(0) if len(self.tokens) > 1 else self.tokens[0]


def untrained():
    """A model as it begins, and how its last step sees."""
    c = t.parse_config(arguments())
    model = t.GPT(c, torch.device("cpu"))
    t.initialize(model, 0)
    return model, t.setting_of(c.num_steps, c)


def test_a_model_of_fp16_whose_activations_overflow_that_continues_texts_all_the_same(tmp_path):
    model = t.GPT(t.parse_config(arguments(precision="fp16")), torch.device("cpu"))
    t.initialize(model, 0)
    with torch.no_grad():
        for layer in range(model.config.num_layers):  # hidden numbers of about 10^5, where fp16 ends at 65,504
            model.mlp[2 * layer].normal_(std=50)
            model.mlp[2 * layer + 1].normal_(std=1e-4)
    write(tmp_path / "model.pt", of_model(model, 4, 1.0, {}))
    loaded = t.load_checkpoint(tmp_path / "model.pt", torch.device("cpu"))
    tokens = torch.tensor([loaded.bos, 1, 2, 3])
    assert sample.Memory(loaded, sample.last_setting(loaded)).append(tokens.tolist()).isfinite().all()
    narrow = sample.Memory(model, sample.last_setting(model)).append(tokens.tolist())
    assert not narrow.isfinite().all(), "in fp16 they do overflow"


@pytest.mark.parametrize("prompt", ["x" * 3, "x" * 100, "", "é"])
def test_a_sample_has_as_many_new_tokens_as_asked_for(prompt, monkeypatch):
    monkeypatch.setattr(sample, "draw", Scripted(7))
    assert sample.continue_text(*untrained(), prompt, 10) == prompt + "(" * 10  # GPT-2's token i < 94 is byte 33 + i


def test_a_sample_ends_with_its_document(monkeypatch):
    model, setting = untrained()
    monkeypatch.setattr(sample, "draw", Scripted(65, 66, model.bos))
    assert sample.continue_text(model, setting, "x", 10) == "xbc"


def test_a_sample_ends_with_the_sequence_and_a_longer_text_is_refused(monkeypatch):
    model, setting = untrained()
    monkeypatch.setattr(sample, "draw", Scripted(66))
    assert sample.continue_text(model, setting, "x" * 253, 10) == "x" * 253 + "cc"  # and the separator: 256 tokens
    with pytest.raises(t.BadInput, match="the text to continue has 256 tokens, and may have at most 254"):
        sample.continue_text(model, setting, "x" * 256, 10)


def test_a_closed_output_is_no_error_at_the_end_of_a_run(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # as by >&-
    assert sample.printable("a\x1bb") == "a\x1bb"


def test_weights_that_are_not_finite_are_named():
    model, setting = untrained()
    model.lm_head.data[3] = float("nan")
    with pytest.raises(t.BadInput, match="not finite"):
        sample.continue_text(model, setting, "x", 10)


def test_the_trainer_can_sample_from_a_script_that_is_called_main():
    """Then there is no module of the name train_gpt: a second one would register its operators again."""
    code = (f"import runpy, sys, torch; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['train_gpt.py', '--help']\n"
            "def end(status): raise SystemError\n"
            "import contextlib, io, types\n"
            "main = types.ModuleType('__main__'); main.__file__ = sys.path[0] + '/train_gpt.py'\n"
            "sys.modules['__main__'] = main\n"
            "source = open(main.__file__).read().split('if __name__ == \"__main__\":\\n    sys.exit')[0]\n"
            "exec(compile(source, main.__file__, 'exec'), vars(main))\n"
            "import sample\n"
            f"model = main.GPT(main.parse_config({arguments()!r}), torch.device('cpu'))\n"
            "main.initialize(model, 0)\n"
            "print(sample.continue_text(model, sample.last_setting(model), 'Once', 3).startswith('Once'))\n"
            "print('train_gpt' in sys.modules)\n")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "True\nFalse\n", run.stderr


# ---------------------------------------------------------------------------------------------------- text


def test_bytes_become_text_as_soon_as_a_character_is_complete(checkpoint, monkeypatch, capfd):
    encode, _ = sample.codec(384)
    shown = []
    monkeypatch.setattr(sample, "show", shown.append)
    monkeypatch.setattr(sample, "draw", Scripted(*encode("aé€"), *encode("é")[:1], 383))
    assert sample.main([str(checkpoint), "Once é", "--max_new_tokens=20"]) == 0
    assert shown == ["Once é", "a", "", "é", "", "", "€", "", "", "�\n"]


def test_text_goes_to_tokens_and_back_and_tokens_without_text_are_empty():
    encode, to_bytes = sample.codec(272)
    assert b"".join(map(to_bytes, encode("aé\0€"))).decode() == "aé\0€"
    assert [to_bytes(token) for token in (256, 271)] == [b"", b""]
    assert encode("\udcff") == encode("?")
    few, _ = sample.codec(256)  # its last token begins documents
    with pytest.raises(t.BadInput, match="the text has a byte for which --vocab_size=256 has no token"):
        few("\xad")


def test_without_gpt2s_vocabulary_there_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(t.BadInput, match="tiktoken cannot load GPT-2's vocabulary"):
        sample.codec(50304)


# ---------------------------------------------------------------------------------------------------- the program


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model, _ = untrained()
    path = tmp_path_factory.mktemp("model") / "model.pt"
    write(path, of_model(model, model.config.num_steps, 1.0, {}))
    return path


def speak(*args, **options):
    return subprocess.run([*SPEAK, *map(str, args)], capture_output=True, encoding="utf-8", timeout=120, **options)


def test_the_program_continues_a_text_from_the_command_line_and_from_a_pipe(checkpoint, tmp_path):
    given = speak(checkpoint, "Once é", "--seed=3", "--device=cpu", "--max_new_tokens=40", cwd=tmp_path)
    assert given.returncode == 0 and given.stdout.startswith("Once é") and given.stderr == ""
    piped = speak(checkpoint, "--seed", "3", "--device=cpu", "--max_new_tokens=40", cwd=tmp_path, input="Once é\n")
    assert piped.stdout == given.stdout and piped.stderr == ""
    assert not list(tmp_path.iterdir())


def test_several_samples_have_a_line_between_them_and_the_end_of_the_sequence_is_told(checkpoint, capfd):
    assert sample.main([str(checkpoint), "Once", "--num_samples=2", "--max_new_tokens=300", "--temperature=0"]) == 0
    out, err = capfd.readouterr()
    _, first, second = out.split("---------- sample ")
    assert first.startswith("1 of 2 ----------\nOnce") and second == first.replace("1 of 2", "2 of 2")
    assert err == 2 * ("sample.py: the text ends here, because the model's sequences have 256 tokens\n")


@pytest.mark.parametrize("args, part", [
    ([], "CHECKPOINT"), (["/dev/null", "x"], "/dev/null"), (["no.pt", "x"], "no.pt"), ([ROOT, "x"], str(ROOT)),
    (["x", "--temperature=-1"], "temperature"), (["x", "--temperature=nan"], "nan"), (["x", "--temperature=a"], "a"),
    (["x", "--top_k=-1"], "top_k"), (["x", "--top_k=1.5"], "1.5"), (["x", "--num_samples=0"], "num_samples"),
    (["x", "--max_new_tokens=0"], "max_new_tokens"), (["x", "--seed=-1"], "seed"), (["x", f"--seed={2**63}"], "seed"),
    (["x", "--device=tpu"], "tpu"), (["x", "--temp=1"], "--temp=1"), (["x", "y", "z"], "z"),
    pytest.param(["x", "--device=cuda"], "no GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="no")),
], ids=str)
def test_what_cannot_be_is_one_sentence(args, part, capfd):
    status = sample.main([str(arg) for arg in args])
    out, err = capfd.readouterr()
    assert status == 2 and out == "" and err.count("\n") == 1 and err.startswith("sample.py: ") and part in err


def test_a_text_that_is_too_long_is_one_sentence(checkpoint, capfd):
    assert sample.main([str(checkpoint), "x" * 256]) == 2
    assert capfd.readouterr() == ("", "sample.py: the text to continue has 256 tokens, and may have at most 254\n")


def test_a_closed_pipe_ends_it_quietly(checkpoint):
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run([*SPEAK, str(checkpoint), "Once"], stdout=writing, stderr=subprocess.PIPE, timeout=120)
    os.close(writing)
    assert run.returncode == 0 and run.stderr == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(checkpoint):
    with open("/dev/full", "w") as full:
        run = subprocess.run([*SPEAK, str(checkpoint), "Once"], stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert run.returncode == 2 and run.stderr.count(b"\n") == 1 and run.stderr.startswith(b"sample.py: ")


def test_a_console_that_cannot_show_a_character_shows_a_question_mark(checkpoint):
    run = speak(checkpoint, "Once é", "--max_new_tokens=40", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert run.returncode == 0 and run.stdout.startswith("Once ?") and run.stderr == ""


@pytest.mark.parametrize("last", [b"\x04", b"\x03"], ids=["Ctrl-D", "Ctrl-C"])
def test_on_a_terminal_it_asks_again_and_again_until_the_end(checkpoint, last):
    child, terminal = pty.fork()
    if child == 0:
        os.execv(SPEAK[0], [*SPEAK, str(checkpoint), "--max_new_tokens=3"])
    seen = b""

    def read_until(part, times):
        nonlocal seen
        while seen.count(part) < times:
            if not select.select([terminal], [], [], 120)[0]:
                os.kill(child, signal.SIGKILL)
                raise AssertionError(f"nothing more came after {seen}")
            seen += os.read(terminal, 1000)

    for number, text in enumerate([b"Once", b"x" * 300, b"Twice \xff"], 1):  # the second is too long
        read_until(b"text to continue: ", number)
        os.write(terminal, text + b"\n")
    read_until(b"text to continue: ", 4)
    os.write(terminal, last)
    try:
        while more := os.read(terminal, 1000):
            seen += more
    except OSError:  # how Linux says that the other side has closed the terminal
        pass
    _, status = os.waitpid(child, 0)
    assert status == 0 and b"Traceback" not in seen
    assert seen.count(b"Once") == 2 and seen.count(b"continue has 300 tokens") == 1, "the terminal's echo, the answer"
    assert b"\x1b" not in seen


def test_ctrl_c_ends_the_wait_for_a_text_also_where_a_read_goes_on_after_a_signal():
    code = """if True:
        import argparse, signal, sample
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.siginterrupt(signal.SIGINT, False)  # so it is once a program uses a GPU
        try:
            next(sample.texts_to_continue(argparse.Namespace()))
        except KeyboardInterrupt:
            print("ended")
    """
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", code])
    seen = b""
    for typed, answer in ((b"", b"text to continue: "), (b"\x03", b"ended")):
        os.write(terminal, typed)
        while answer not in seen:
            if not select.select([terminal], [], [], 60)[0]:
                os.kill(child, signal.SIGKILL)
                raise AssertionError(f"nothing more came after {seen}")
            seen += os.read(terminal, 1000)
    os.waitpid(child, 0)


def test_control_characters_do_not_reach_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    sample.show("a\x1b[31m\x07\x9b\tb\n")
    assert capsys.readouterr().out == "a?[31m??\tb\n"
    monkeypatch.setattr(sample, "continue_text", lambda *_: "a\x1b[2J")
    model, _ = untrained()
    assert sample.after_training(model, "a", 3) == "a?[2J"


@pytest.mark.parametrize("argv", [["m.pt", "Once", "--seed=3"], ["--seed=3", "m.pt", "Once"], ["m.pt", "--seed=3", "Once"]])
def test_options_may_stand_anywhere(argv):
    options = sample.parse(argv)
    assert (options.checkpoint, options.text, options.seed) == ("m.pt", "Once", 3)
    assert not hasattr(sample.parse(["m.pt", "--seed=3"]), "text")
    with pytest.raises(BadInput, match="nonsense"):
        sample.parse([*argv, "--nonsense=1"])


def test_the_laptops_model_counts_as_small_whatever_the_size_of_its_tables(monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for rows, layers, expected in ((131_072, 4, [1]), (64, 4, [1]), (64, 60, [])):
        config = t.Config(**t.PRESETS["laptop"] | dict(ngram_rows=rows, num_layers=layers))
        with torch.device("meta"):
            model = t.GPT(config, torch.device("meta"))
        threads.clear()
        sample.prepare_for_cpu(model)
        assert threads == expected
