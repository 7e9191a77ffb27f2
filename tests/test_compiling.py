"""Compiled functions that report, graphs kept on disk, and CUDA graphs (nanogpt/compiling.py).

References: the same function without compilation, the counter of graphs that PyTorch keeps, new
processes where the process is the point, and for kept graphs a list of everything that can change
between two calls. Each change must lead to a new graph; most of them by PyTorch's guards alone.
"""
import contextlib
import importlib.util
import json
import operator
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from nanogpt import compiling

T, D = 128, 16
GRAPHS = torch._dynamo.utils.counters["stats"]


@pytest.fixture(autouse=True)
def settings():
    """Those of the project, and none of them left behind."""
    dynamo, functorch, inductor = torch._dynamo.config, torch._functorch.config, torch._inductor.config
    with contextlib.ExitStack() as stack:
        for config, name in (
                (dynamo, "enable_aot_compile"), (dynamo, "recompile_limit"),
                (functorch, "autograd_cache_allow_custom_autograd_functions"),
                (inductor, "triton.unique_kernel_names"), (inductor, "post_grad_custom_pre_pass")):
            stack.enter_context(config.patch({name: operator.attrgetter(name)(config)}))
        compiling.configure()
        yield


# ------------------------------------------------------------------------------- what is reported


@pytest.fixture
def eager_graphs(monkeypatch):
    """torch.compile that traces graphs but generates no code, which takes long."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, backend="eager", **options))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Reports(list):
    """What was reported, without the seconds, which must be possible ones."""

    def __call__(self, what, seconds):
        assert 0 <= seconds < 600
        self.append(what)


class Weights(NamedTuple):
    up: Tensor
    gate: Tensor | None


def head(x, weights, bias):
    y = F.linear(x, weights.up)
    if weights.gate is not None:
        y = y * weights.gate
    return y if bias is None else y + bias


def test_a_call_that_compiles_is_reported_with_its_size_its_mode_and_what_is_none(eager_graphs):
    reports = Reports()
    compiled = compiling.Compiled(head, reports)
    x, up, gate = torch.ones(3, 2), torch.ones(4, 2), torch.ones(4)
    assert torch.equal(compiled(x, Weights(up, None), None), torch.full((3, 4), 2.0))
    compiled(x + 1, Weights(up + 1, None), None)
    assert reports == ["head of 3 rows for training, without gate, bias"]
    with torch.no_grad():
        compiled(x, Weights(up, None), gate)
        compiled(torch.ones(5, 2), Weights(up, gate), gate)
    assert reports[1:] == ["head of 3 rows without gradients, without gate", "head of 5 rows without gradients"]


def test_one_dynamic_graph_serves_all_sizes(eager_graphs):
    reports = Reports()
    compiled = compiling.Compiled(head, reports, dynamic=True)
    for n in (3, 4, 1000):
        assert compiled(torch.ones(n, 2), Weights(torch.ones(4, 2), None), None).shape == (n, 4)
    assert reports == ["head of many sizes for training, without gate, bias"]


# -------------------------------------------------------------------- a function as the script has


@torch.library.custom_op("test_compiling::double", mutates_args=())
def double_op(x: Tensor) -> Tensor:
    return 2 * x


@double_op.register_fake
def _(x):
    return torch.empty_like(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, scale):
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        return torch.ops.test_compiling.double(F.linear(x, w) * scale)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        g = torch.ops.test_compiling.double(g) * ctx.scale
        return g @ w, g.t() @ x, None


class Scaled:
    """A plain object, as a recipe's product is."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x, w):
        return Doubled.apply(x, w, self.scale)


class ScaledTwice(Scaled):
    def __call__(self, x, w):
        return 2 * Doubled.apply(x, w, self.scale)


class Beside(NamedTuple):
    """What the function takes and returns beside x."""
    whole: Tensor
    first: Tensor


class Context(NamedTuple):
    mask: BlockMask | Tensor
    scale: Tensor
    inject: Tensor
    extra: Tensor | None
    flag: bool


class Recipes(NamedTuple):
    up: Scaled


def layer(x, beside, weights, context, recipes):
    if isinstance(context.mask, BlockMask):
        t = torch.arange(len(x))
        seen = context.mask.mask_mod(0, 0, t[:, None], t).to(x.dtype)
        seen = seen + context.mask.kv_num_blocks.sum()
    else:
        seen = context.mask.to(x.dtype)
    y = seen @ beside.whole
    if context.flag:
        y = y + beside.first.sum()
    x = x + context.scale * y + context.inject
    if context.extra is not None:
        x = x + context.extra
    if weights.gate is not None:
        x = x * weights.gate
    x = x + recipes.up(x, weights.up)
    return x, Beside(x.sin(), x[:, :4].clone())


def block_mask(rule=0, documents=None):
    """All masks have the same shapes. The rules differ in nothing but their code."""
    if documents is None:
        documents = torch.arange(T) // 50

    def same_document(batch, head, query, key):
        return documents[query] == documents[key]

    def other_document(batch, head, query, key):
        return documents[query] != documents[key]

    rule = (same_document, other_document)[rule]
    counts, which = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    return BlockMask((T, T), counts, which, None, None, counts, which, None, None, (128, 128), rule)


def random(*shape, grad=True):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(grad)


def arguments():
    x, whole = random(T, D), random(T, D)
    context = Context(block_mask(), torch.tensor(0.5), random(T, D), None, False)
    return x, Beside(whole, random(T, 4)), Weights(random(D, D), random(D)), context, Recipes(Scaled(0.25))


def outcome(function, args):
    """Values and gradients, by name."""
    leaves = {"x": args[0], "whole": args[1].whole, "up": args[2].up, "inject": args[3].inject}
    for leaf in leaves.values():
        leaf.grad = None
    x, beside = function(*args)
    found = {"value": x, "beside": beside.whole, "first": beside.first}
    if x.requires_grad:
        (x.sum() + beside.whole.sum() + beside.first.sum()).backward()
        found |= {name: leaf.grad for name, leaf in leaves.items()}
    return {name: value.detach() for name, value in found.items()}


def check_equal(ours, reference):
    assert {*ours} == {*reference}
    for name, value in reference.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-4, msg=name)


class NewGraph(Exception):
    pass


class Finder(compiling.KeptGraphs):
    """Finds kept graphs, but makes none."""

    def make(self, name, args):
        raise NewGraph


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where graphs are kept. The compiler's own caches stay where they are: they are slow to fill."""
    monkeypatch.setattr(compiling.KeptGraphs, "folder", lambda self: tmp_path / "kept")
    torch._dynamo.reset()
    yield tmp_path / "kept"
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the graph of `layer` for `arguments()`, and of `embed` and `update`, made in this process."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling.KeptGraphs, "folder", lambda self: folder)
        compiling.configure()
        compiling.KeptGraphs(layer, "sources", False).graph_for(arguments())
        compiling.KeptGraphs(update, "sources", True).graph_for(states(64))
    return folder


def update(master, mean, gradient, lr):
    """As an optimizer's: it writes to its arguments."""
    mean.add_((gradient - mean) * 0.1)
    master.sub_(lr * mean)


def states(n, width=8):
    return torch.ones(n, width), torch.zeros(n, width), torch.ones(n, width), torch.tensor(0.5)


@pytest.fixture
def kept(made, monkeypatch):
    monkeypatch.setattr(compiling.KeptGraphs, "folder", lambda self: made)
    return made


# ---------------------------------------------------------------------------------- kept graphs


def test_a_kept_graph_is_loaded_without_tracing_and_computes_what_the_function_does(kept):
    before = GRAPHS["unique_graphs"]
    finder = Finder(layer, "sources", False)
    graph, loaded = finder.graph_for(arguments())
    assert loaded
    check_equal(outcome(graph, arguments()), outcome(layer, arguments()))
    again, loaded = finder.graph_for(arguments())
    assert again is graph and not loaded
    assert GRAPHS["unique_graphs"] == before


def replaced(**changes):
    """`arguments()` with some fields of the context changed."""
    x, beside, weights, context, recipes = arguments()
    return x, beside, weights, context._replace(**changes), recipes


def with_x(x):
    return x, *arguments()[1:]


def with_product(product):
    return *arguments()[:-1], Recipes(product)


def with_weights(**changes):
    x, beside, weights, context, recipes = arguments()
    return x, beside, weights._replace(**changes), context, recipes


def x_is_whole():
    x, beside, *rest = arguments()
    return x, beside._replace(whole=x), *rest


SEEN_BY_GUARDS = {
    "length": lambda: with_x(random(T, 1)),
    "strides": lambda: with_x(random(D, T, grad=False).t().requires_grad_()),
    "dtype": lambda: with_x(random(T, D, grad=False).double().requires_grad_()),
    "device": lambda: with_x(random(T, D).to("meta")),
    "requires_grad": lambda: with_x(random(T, D, grad=False)),
    "subclass": lambda: with_x(torch.nn.Buffer(random(T, D, grad=False)).as_subclass(Tagged).requires_grad_()),
    "the same tensor twice": x_is_whole,
    "a tensor where None was": lambda: replaced(extra=random(T, D)),
    "None where a tensor was": lambda: with_weights(gate=None),
    "a number where a tensor was": lambda: replaced(scale=0.5),
    "bool": lambda: replaced(flag=True),
    "bool to int": lambda: replaced(flag=0),
    "number in an object": lambda: with_product(Scaled(0.5)),
    "class of an object": lambda: with_product(ScaledTwice(0.25)),
    "tensor for a mask": lambda: replaced(mask=torch.ones(T, T, dtype=torch.bool)),
    "tensor in a mask's function": lambda: replaced(mask=block_mask(documents=torch.zeros(T, dtype=torch.int32))),
}


class Tagged(Tensor):
    pass


@pytest.mark.parametrize("change", SEEN_BY_GUARDS)
def test_other_arguments_get_another_graph_and_its_guards_alone_would_notice(change, kept):
    finder = Finder(layer, "sources", False)
    graph, _ = finder.graph_for(arguments())
    changed = SEEN_BY_GUARDS[change]()
    assert not graph.guard_check(*changed)
    with pytest.raises(NewGraph):
        finder.graph_for(changed)
    assert finder.graph_for(arguments()) == (graph, False)


class Restored:
    """A setting of PyTorch, for the length of a with block."""

    def __init__(self, get, set_, value):
        self.get, self.set, self.value = get, set_, value

    def __enter__(self):
        self.before = self.get()
        self.set(self.value)

    def __exit__(self, *_):
        self.set(self.before)


STATES = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: Restored(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "threads": lambda: Restored(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
    "deterministic": lambda: Restored(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "precision of products": lambda: Restored(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("state", STATES)
def test_another_state_of_pytorch_gets_another_graph_and_its_guards_alone_would_notice(state, kept):
    finder, args = Finder(layer, "sources", False), arguments()
    graph, _ = finder.graph_for(args)
    with STATES[state]():
        assert not graph.guard_check(*args)
        with pytest.raises(NewGraph):
            finder.graph_for(args)
    assert finder.graph_for(args) == (graph, False)


def test_another_function_in_the_arguments_gets_another_graph_though_guards_do_not_notice(kept):
    finder = Finder(layer, "sources", False)
    graph, _ = finder.graph_for(arguments())
    other = replaced(mask=block_mask(rule=1))
    assert graph.guard_check(*other), "if this fails, guards are better than we say"
    with pytest.raises(NewGraph):
        finder.graph_for(other)
    same = replaced(mask=block_mask(documents=torch.zeros(T, dtype=torch.int64)))
    assert finder.graph_for(same) == (graph, False), "documents are numbers in a tensor"
    check_equal(outcome(graph, same), outcome(layer, same))


@pytest.mark.parametrize("owner, name, value", [
    (sys, "version", "4.0"), (torch, "__version__", "3.0"),
    (torch.backends.cpu, "get_cpu_capability", lambda: "another"),
])
def test_another_system_gets_another_graph(kept, owner, name, value, monkeypatch):
    Finder(layer, "sources", False).graph_for(arguments())
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(NewGraph):
        Finder(layer, "sources", False).graph_for(arguments())


@pytest.mark.parametrize("config, name, value", [
    (torch._inductor.config, "epilogue_fusion", False), (torch._inductor.config, "triton.unique_kernel_names", True),
    (torch._functorch.config, "activation_memory_budget", 0.5),
])
def test_another_setting_of_the_compiler_gets_another_graph(kept, config, name, value):
    Finder(layer, "sources", False).graph_for(arguments())
    with config.patch(name, value), pytest.raises(NewGraph):
        Finder(layer, "sources", False).graph_for(arguments())


def test_another_gpu_gets_another_graph(kept, monkeypatch):
    for name in ("H100", "H200"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)  # noqa: B023
        with pytest.raises(NewGraph):
            Finder(layer, "sources", False).graph_for(arguments())


def maker(factor):
    def layer(x, beside, weights, context, recipes):
        return factor * x, beside
    return layer


def test_other_sources_and_other_functions_get_other_graphs(kept):
    for function, sources, dynamic in (
            (layer, "other", False), (layer, "sources", True), (maker(1.0), "sources", False)):
        with pytest.raises(NewGraph):
            Finder(function, sources, dynamic).graph_for(arguments())
    names = {Finder(maker(factor), "", False).file_name(()) for factor in (1.0, 2.0)}
    assert len(names) == 2, "what a function closes over belongs to it"


ADDED, FACTOR, SHIFTS, OTHER = 1.0, 2, (3, 4), 5.0


class Shifted:
    def __call__(self, x):
        return x + SHIFTS[0]


def times_factor(x):
    return FACTOR * x


def reads_globals(x, shifted):
    return shifted(times_factor(x)) + sum([ADDED for _ in range(2)])


@pytest.mark.parametrize("name, other, is_read", [
    ("ADDED", 2.0, True), ("FACTOR", 3, True), ("SHIFTS", (5, 4), True), ("times_factor", maker, True), ("OTHER", 6.0, False)])
def test_a_changed_constant_that_a_function_reads_gives_another_graph(folder, monkeypatch, name, other, is_read):
    args = torch.ones(3), Shifted()
    before = compiling.globals_read(reads_globals, args)
    graph, _ = compiling.KeptGraphs(reads_globals, "sources", False).graph_for(args)
    assert torch.equal(graph(*args), torch.full((3,), 7.0))
    monkeypatch.setitem(globals(), name, other)  # as a switch in the environment may do, with the same source files
    assert (compiling.globals_read(reads_globals, args) != before) == is_read
    if is_read:
        with pytest.raises(NewGraph):
            Finder(reads_globals, "sources", False).graph_for(args)
    else:
        assert Finder(reads_globals, "sources", False).graph_for(args)[1], "loaded"


def test_a_kept_dynamic_graph_serves_all_sizes(kept):
    finder = Finder(update, "sources", True)
    for n in (64, 1000, 2):
        ours, reference = states(n), states(n)
        finder.graph_for(ours)[0](*ours)
        update(*reference)
        for a, b in zip(ours, reference):
            torch.testing.assert_close(a, b)
    assert [len(graphs) for graphs in finder.graphs.values()] == [1]
    with pytest.raises(NewGraph):
        finder.graph_for(states(1))  # whose rows could be broadcast
    with pytest.raises(NewGraph):
        finder.graph_for(states(64, 1))


def test_an_argument_that_is_written_to_and_given_twice_gets_another_graph(kept):
    finder = Finder(update, "sources", True)
    graph, _ = finder.graph_for(states(64))
    master, _, gradient, lr = states(64)
    assert not graph.guard_check(master, master, gradient, lr)
    with pytest.raises(NewGraph):
        finder.graph_for((master, master, gradient, lr))


def method_owner():
    return SimpleNamespace(weights=Weights(torch.ones(2), None))


@pytest.mark.parametrize("value", [
    np.ones(2), {1, 2}, partial(head, None), method_owner().weights.index, iter([1]), torch.Generator(), len,
], ids=lambda value: type(value).__name__)
def test_what_cannot_be_described_is_not_kept_and_is_computed_all_the_same(eager_graphs, folder, value):
    with pytest.raises(TypeError):
        compiling.form((torch.ones(2), value))
    reports = Reports()
    compiled = compiling.Compiled(lambda x, ignored: x + 1, reports, "sources")
    assert torch.equal(compiled(torch.ones(2), value), torch.full((2,), 2.0))
    assert reports[0].startswith("graphs of <lambda> are not kept: TypeError: ")
    assert not folder.exists()


def scale(x, by):
    return x * by


def test_a_damaged_graph_is_reported_and_removed_and_the_next_process_makes_a_new_one(folder):
    def run():
        """As a new process would. Returns what was reported."""
        torch._dynamo.reset()
        reports = Reports()
        y = compiling.Compiled(scale, reports, "sources")(torch.ones(4), 3)
        assert torch.equal(y, torch.full((4,), 3.0))
        return reports

    what = "scale of 4 rows for training"
    assert run() == [what]
    assert run() == [f"{what} (loaded from disk)"]
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    reports = run()
    assert reports[0].startswith("graphs of scale are not kept: ") and reports[1:] == [what]
    assert [*folder.iterdir()] == []
    assert run() == [what]
    assert run() == [f"{what} (loaded from disk)"]
    assert len([*folder.iterdir()]) == 1


def test_making_a_graph_warns_of_nothing_and_leaves_no_unfinished_file(folder):
    x = random(3).exp()  # not a leaf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)  # importing parts of torch gives some
        compiling.Compiled(scale, Reports(), "sources")(x, 2)
    assert [path.name.partition(".")[0] == "unfinished" for path in folder.iterdir()] == [False]


class Measuring:
    """As a recipe's product: `seen` is a leaf that has a .grad already."""

    def __init__(self):
        self.seen = torch.zeros(3, requires_grad=True)
        self.seen.grad = torch.ones(3)

    def __call__(self, x, w):
        return x * w + self.seen.sum()


def measured(x, products):
    return products.up(x, 2)


def test_arguments_with_gradients_can_be_kept_and_have_the_same_ones_after_it(folder):
    for loaded in (False, True):
        x, measuring = random(3), Measuring()
        x.grad, before = torch.zeros(3), measuring.seen.grad
        kept = (Finder if loaded else compiling.KeptGraphs)(measured, "sources", False)
        graph, was_loaded = kept.graph_for((x, Recipes(measuring)))
        assert was_loaded is loaded
        assert measuring.seen.grad is before and torch.equal(x.grad, torch.zeros(3))
        graph(x, Recipes(measuring)).sum().backward()
        assert torch.equal(measuring.seen.grad, torch.full((3,), 4.0)) and torch.equal(x.grad, torch.full((3,), 2.0))


def attend(q, context):
    return flex_attention(q, q + 1, q + 2, block_mask=context.mask, scale=context.scale)


def causal(batch, head, query, key):
    return query >= key


def test_a_graph_with_flex_attention_can_be_kept(folder):
    """Its guards are about more than arguments: loading them needs some care."""
    def args(n):
        mask = create_block_mask(causal, None, None, n, n, device="cpu")
        return random(1, 2, n, 32, grad=False), Context(mask, 0.5, None, None, False)

    with torch.no_grad():
        graph, loaded = compiling.KeptGraphs(attend, "sources", False).graph_for(args(256))
        assert not loaded
        graph, loaded = Finder(attend, "sources", False).graph_for(args(256))
        assert loaded
        torch.testing.assert_close(graph(*args(256)), attend(*args(256)), rtol=1e-4, atol=1e-4)
        with pytest.raises(NewGraph):
            Finder(attend, "sources", False).graph_for(args(384))


PROCESS = """
import json, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import torch
import test_compiling as c
from nanogpt import compiling

folder, choices = Path(sys.argv[1]), json.loads(sys.argv[2])
compiling.KeptGraphs.folder = lambda self: folder
compiling.configure()


class Recipe(c.Scaled):  # defined in the script, as its recipes are
    pass


def block(x, beside, weights, context, recipes):
    return c.layer(x, beside, weights, context, recipes)


reports = []
compiled = compiling.Compiled(block, lambda what, seconds: reports.append(what), "sources")
for flag in choices:
    args = c.replaced(flag=flag)[:-1] + (c.Recipes(Recipe(0.25)),)
    c.check_equal(c.outcome(compiled, args), c.outcome(block, args))
print(json.dumps([torch._dynamo.utils.counters["stats"]["unique_graphs"], reports]))
"""


def test_a_new_process_loads_the_graphs_of_an_earlier_one_and_can_make_others_after_that(tmp_path):
    (tmp_path / "script.py").write_text(PROCESS)

    def run(seed, *flag):
        """`seed`: of Python's hashes of strings, on which no key may depend."""
        command = [sys.executable, "script.py", "kept", json.dumps(flag), str(ROOT), str(Path(__file__).parent)]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300,
                                env=os.environ | {"PYTHONHASHSEED": str(seed)})
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    new = "block of 128 rows for training, without extra"
    loaded = f"{new} (loaded from disk)"
    assert run(1, True) == [1, [new]]
    assert run(2, True, False, True) == [1, [loaded, new]]


# ----------------------------------------------------------------------- PyTorch's own caches


OPERATOR = """
import torch

@torch.library.custom_op("edited::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return (2 * x).to(DTYPE)

twice.register_fake(lambda x: torch.empty_like(x, dtype=DTYPE))

def backward(ctx, g):
    return (FACTOR * g).to(torch.float32)

twice.register_autograd(backward)

def call(x):
    return torch.ops.edited.twice(x) + 1
"""


@pytest.mark.parametrize("keep", [False, True])
def test_an_edited_operator_is_not_taken_for_the_old_one(folder, keep):
    """Each edit is a new file here. PyTorch's caches are on, and know the call from the others."""
    for dtype, factor in (("torch.float32", "2"), ("torch.float64", "2"), ("torch.float32", "3")):
        torch._dynamo.reset()
        text = OPERATOR.replace("DTYPE", dtype).replace("FACTOR", factor)
        path = folder.parent / f"operator_{dtype[-2:]}_{factor}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        compiling.configure("edited")
        compiled = compiling.Compiled(module.call, Reports(), text if keep else "")
        x = torch.ones(4, requires_grad=True)
        y = compiled(x)
        assert y.dtype == eval(dtype) and y.tolist() == [3.0] * 4
        y.sum().backward()
        assert x.grad.tolist() == [float(factor)] * 4


# ------------------------------------------------------------------------------------ CUDA graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graphs_compute_what_the_function_does_for_first_and_later_micro_batches():
    parameters = [torch.nn.Parameter(torch.randn(8, 8, device="cuda")) for _ in range(2)]
    unused = torch.nn.Parameter(torch.randn(2, device="cuda"))
    graphs = compiling.CudaGraphs([*parameters, unused])
    calls = []

    def forward_backward(x, y):
        calls.append(len(x))
        loss = ((x @ parameters[0]).relu() @ parameters[1] * y).sum()
        loss.backward()
        return {"loss": loss.detach()}

    def step(call, batches):
        for p in parameters:
            p.grad = None
        losses = [call("key", forward_backward, batch)["loss"].item() for batch in batches]
        return losses, [p.grad.clone() for p in parameters]

    def directly(key, function, tensors):
        return function(*tensors)

    for number, count in enumerate([(4, 4), (4, 4, 4), (6,), (4, 4)]):
        generator = torch.Generator("cuda").manual_seed(number)
        batches = [tuple(torch.randn(n, 8, generator=generator, device="cuda") for _ in range(2)) for n in count]
        reference = step(directly, batches)
        calls.clear()
        torch.testing.assert_close(step(graphs, batches), reference)
        assert calls == [[4, 4], [], [6], []][number], "captured once, replayed later"
        assert unused.grad is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_result_of_a_cuda_graph_stays_while_one_runs_that_was_captured_later():
    """So the row gradients of a first pass may still be summed while the second one runs."""
    graphs = compiling.CudaGraphs([])

    def work(x):
        return torch.stack([x + i for i in range(20)]).sum(0)  # with memory that graphs share

    inputs = [torch.full((1000,), float(i), device="cuda") for i in range(3)]
    expected = work(inputs[0])
    first = graphs("first", work, (inputs[0],))
    for x in inputs[1:]:
        assert torch.equal(graphs("later", work, (x,)), work(x))
        assert torch.equal(first, expected)
