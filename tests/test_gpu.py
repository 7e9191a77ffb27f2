"""Compiled functions that report, and CUDA graphs (nanogpt/gpu.py).

References: the same function without compilation, and the counters that PyTorch keeps.
"""
import contextlib
import importlib.util
import operator
import sys
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanogpt import gpu


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """Those of the project, and none of them left behind."""
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", "")
    dynamo, functorch, inductor = torch._dynamo.config, torch._functorch.config, torch._inductor.config
    compiler = torch.compiler.config
    with contextlib.ExitStack() as stack:
        for config, name in (
                (dynamo, "recompile_limit"), (dynamo, "specialize_float"),
                (functorch, "autograd_cache_allow_custom_autograd_functions"),
                (inductor, "triton.unique_kernel_names"), (compiler, "cache_key_tag")):
            stack.enter_context(config.patch({name: operator.attrgetter(name)(config)}))
        gpu.set_up_compiler()
        yield


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


def test_a_call_that_compiles_is_reported(eager_graphs):
    reports = Reports()
    compiled = gpu.compiled(head, reports)
    x, up, gate = torch.ones(3, 2), torch.ones(4, 2), torch.ones(4)
    assert torch.equal(compiled(x, Weights(up, None), None), torch.full((3, 4), 2.0))
    compiled(x + 1, Weights(up + 1, None), None)
    assert reports == ["head"]
    with torch.no_grad():
        compiled(x, Weights(up, None), gate)
        compiled(torch.ones(5, 2), Weights(up, gate), gate)
    assert reports == ["head"] * 3


def test_one_dynamic_graph_serves_all_sizes(eager_graphs):
    reports = Reports()
    compiled = gpu.compiled(head, reports, dynamic=True)
    for n in (3, 4, 1000):
        assert compiled(torch.ones(n, 2), Weights(torch.ones(4, 2), None), None).shape == (n, 4)
    assert reports == ["head"]


# ----------------------------------------------------------------------- PyTorch's own caches


OPERATOR = """
import torch

@torch.library.custom_op("nanogpt::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return (2 * x).to(DTYPE)

twice.register_fake(lambda x: torch.empty_like(x, dtype=DTYPE))

def backward(ctx, g):
    return (FACTOR * g).to(torch.float32)

twice.register_autograd(backward)

def call(x):
    return torch.ops.nanogpt.twice(x).double()
"""


@torch._inductor.config.patch(fallback_by_default=True)
def test_an_edited_operator_is_not_taken_for_the_old_one(tmp_path):
    """Each edit is a new file here. PyTorch's caches are on, and know the call from the others. The
    code of the first one converts nothing: of an operator that returns float32, it would be wrong.

    The compiled code calls PyTorch's own kernels (`fallback_by_default`): to compile kernels in C++
    would take most of the time."""
    for dtype, factor in (("torch.float64", "2"), ("torch.float32", "2"), ("torch.float32", "3")):
        torch._dynamo.reset()
        text = OPERATOR.replace("DTYPE", dtype).replace("FACTOR", factor)
        path = tmp_path / f"operator_{dtype[-2:]}_{factor}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        gpu.set_up_compiler()
        compiled = gpu.compiled(module.call, Reports())
        x = torch.ones(4, requires_grad=True)
        y = compiled(x)
        assert y.dtype == torch.float64 and y.tolist() == [2.0] * 4
        y.sum().backward()
        assert x.grad.tolist() == [float(factor)] * 4


# ------------------------------------------------------------------------------------ CUDA graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graphs_compute_what_the_function_does_for_first_and_later_micro_batches():
    parameters = [torch.nn.Parameter(torch.randn(8, 8, device="cuda")) for _ in range(2)]
    unused = torch.nn.Parameter(torch.randn(2, device="cuda"))
    graphs = gpu.CudaGraphs([*parameters, unused])
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
    graphs = gpu.CudaGraphs([])

    def work(x):
        return torch.stack([x + i for i in range(20)]).sum(0)  # with memory that graphs share

    inputs = [torch.full((1000,), float(i), device="cuda") for i in range(3)]
    expected = work(inputs[0])
    first = graphs("first", work, (inputs[0],))
    for x in inputs[1:]:
        assert torch.equal(graphs("later", work, (x,)), work(x))
        assert torch.equal(first, expected)
