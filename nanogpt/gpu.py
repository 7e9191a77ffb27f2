"""How work is given to the GPU: (1) functions under torch.compile that tell when they compile,
(2) CUDA graphs, (3) work that runs beside other work, and numbers that travel to the GPU.
On a CPU the same calls do the work directly.
"""
import hashlib
import inspect
import os
import time
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
import torch.compiler.config
from torch import Tensor

# --------------------------------------------------------------------------------------------------
# 1. Compiled functions
#
# torch.compile traces a function into a graph of operations and generates kernels for the graph.
# That takes a second or more, so each graph is made before the clock starts, by calling the
# function once. A graph serves only arguments of the form it was traced with: shapes, dtypes,
# Python numbers, which of them are None. Other arguments need another graph.
#
# PyTorch keeps what it generates on disk, by default in a folder of /tmp, or where the
# environment's TORCHINDUCTOR_CACHE_DIR says. A new process traces each function again, but then
# finds its forward and backward pass there.


def set_up_compiler() -> None:
    """Settings of PyTorch's compiler. Our custom operators must be registered by now."""
    # The most graphs of a function, one for each form of its arguments. The default is 8.
    torch._dynamo.config.recompile_limit = 64
    # Floats are constants of a graph. By default a dynamic graph takes them as inputs.
    torch._dynamo.config.specialize_float = True
    # By default, graphs with an autograd function of ours in them, as FP8 has, are never cached.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # All kernels get the same name, so that equal kernels of two graphs are one entry in the cache,
    # such as those that training and validation have in common.
    torch._inductor.config.triton.unique_kernel_names = False
    # Otherwise PyTorch compiles several variants of most elementwise kernels, and times them. That
    # takes a fifth of a first start, and makes no step shorter (records/long_runs.md).
    torch._inductor.config.triton.autotune_pointwise = False
    # The processes in which PyTorch compiles kernels read the tag from the environment. Otherwise
    # a new run would not know which variants of kernels were the fastest, and would time all again.
    tag = operators_hash()
    torch.compiler.config.cache_key_tag = tag
    os.environ["TORCH_COMPILE_CACHE_KEY_TAG"] = tag


def operators_hash() -> str:
    """Identifies the functions that say what our custom operators return and what their gradients
    are. PyTorch's caches know an operator by its name alone: if you edited such a function, they
    would go on to use the code of the old one, and compute wrong numbers without a word."""
    texts = []
    for name, operator in sorted(torch._library.custom_ops.OPDEFS.items()):
        if name.startswith("nanogpt::"):
            for function in (
                    operator._abstract_fn, operator._backward_fn, operator._setup_context_fn):
                texts.append(inspect.getsource(function) if function else "")
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def compiled(function: Callable, tell: Callable[[str, float], None],
             dynamic: bool = False) -> Callable:
    """The function under torch.compile. After a call that had to make a graph it calls
    `tell(name, seconds)`, where `seconds` is how long the call took. With `dynamic`, sizes are
    inputs of a graph, so that one graph serves many sizes: all for which the function takes the
    same branches. (A size of 1 has a graph of its own.)"""
    by_graphs = torch.compile(function, dynamic=dynamic, fullgraph=True)

    def call(*args):
        begin = time.perf_counter()
        stats = torch._dynamo.utils.counters["stats"]
        graphs_before = stats["unique_graphs"]
        result = by_graphs(*args)
        if stats["unique_graphs"] != graphs_before:
            tell(function.__name__, time.perf_counter() - begin)
        return result

    return call


# --------------------------------------------------------------------------------------------------
# 2. CUDA graphs


def call_directly(_, function: Callable, tensors: tuple[Tensor, ...]):
    """Calls the function without a CUDA graph, which would need a key."""
    return function(*tensors)


def caller(as_graphs: bool, parameters: Iterable[Tensor] = ()) -> Callable:
    """`call_directly`, or CudaGraphs for functions that compute gradients of these parameters. What
    runs side by side needs a caller each, because the graphs of one share memory."""
    return CudaGraphs(parameters) if as_graphs else call_directly


class CudaGraphs:
    """Calls functions on the GPU as CUDA graphs. To start a kernel costs the CPU some microseconds.
    A forward and backward pass of `speedrun` starts about 500, for which the CPU may need longer
    than the GPU has to work. A CUDA graph is a recording of all of them, started by one call.

    A graph does the same work on the same memory every time. So inputs are copied to where it reads
    them, and what depends on anything else needs a graph of its own. Gradients are such a case: the
    first backward pass of a step makes new tensors of them, and later passes add to these."""

    def __init__(self, parameters: Iterable[Tensor]):
        self.parameters = list(parameters)
        self.captures = {}
        # Graphs share memory. To replay a graph may overwrite results of graphs that were captured
        # after it, but not of those captured before it.
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, key, function: Callable, tensors: tuple[Tensor, ...]):
        """Returns function(*tensors), which may also make or add to the .grad of the parameters.
        Use a result before this caller is called again, which may overwrite it. (Calls whose graph
        was captured after that of the result do not.)

        `key` names the recording, and must be hashable. Calls with the same key must do the same
        operations on the same memory: they may differ in the numbers in their tensors and
        gradients, and in the shapes of the tensors. Compilation cannot be recorded, and nothing
        that is made at first use. So call the function itself once before."""
        shapes = tuple(x.shape for x in tensors)
        # The address of the gradient that backward adds to; False where it makes a new one.
        added_to = tuple(p.grad is not None and p.grad.data_ptr() for p in self.parameters)
        key = (key, shapes, added_to)
        if key not in self.captures:
            self.captures[key] = self.capture(function, tensors)
        graph, inputs, results, gradients = self.captures[key]
        for own, x in zip(inputs, tensors):
            own.copy_(x)
        graph.replay()
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient
        return results

    def capture(self, function: Callable, tensors: tuple[Tensor, ...]) -> tuple:
        """Records the function, which computes nothing yet. Returns the graph, the copies of the
        tensors that it reads, what the function returned, which each replay writes anew, and the
        .grad of every parameter after it."""
        graph = torch.cuda.CUDAGraph()
        inputs = [x.clone() for x in tensors]
        # Kernels of a graph keep the priority of the stream that they were recorded on. CUDA's
        # default stream cannot be recorded; `None` means another. "thread_local": meanwhile another
        # thread may allocate memory.
        stream = torch.cuda.current_stream()
        if stream == torch.cuda.default_stream():
            stream = None
        with torch.cuda.graph(graph, self.pool, stream, "thread_local"):
            results = function(*inputs)
        return graph, inputs, results, [p.grad for p in self.parameters]


# --------------------------------------------------------------------------------------------------
# 3. Side by side
#
# torch.get_device_module gives torch.cuda, or torch.cpu, whose streams and events do nothing.

NO_TRANSFER = torch.cpu.Event()  # stands for a transfer where there is nothing to wait for


def to_device(numbers: list, device: torch.device) -> Tensor:
    """These numbers as a tensor on the device. The CPU does not wait until the GPU has them."""
    there = torch.tensor(numbers, pin_memory=device.type == "cuda")  # which the GPU reads by itself
    return there.to(device, non_blocking=True)


def mark(device: torch.device):
    """An event at this point of the current stream. Its `wait` makes the stream that is current
    then wait for all that comes before this point, and `synchronize` makes the CPU wait."""
    event = torch.get_device_module(device).Event()
    event.record()
    return event


@lru_cache(maxsize=None, typed=True)  # 1 and 1.0 are two constants
def constant(device: torch.device, value: float | tuple[int, ...]) -> Tensor:
    """The number or numbers on the device, copied there once: a CUDA graph that was captured with
    them reads the same memory at every replay."""
    return torch.tensor(value, device=device)


class SideStream:
    """A stream of CUDA for work that may run beside that of the main one, on the same GPU:

        side.meet()
        with side.on():
            y = work(x)  # is begun here
        ...  # may run at the same time
        side.meet()  # from here on y can be used

    When Python drops y, which was made on the side stream, PyTorch may give its memory to later
    work of the side stream, though the main stream may still read y. So call `meet` before such
    later work: then it begins after the main stream has read y. When Python drops x, its memory
    goes to later work of the main stream, though the side stream may still read it. Where x may be
    dropped before the two meet, call `keep(x)`. Without CUDA work runs in the order of the code."""

    def __init__(self, device: torch.device):
        self.module = torch.get_device_module(device)
        self.stream = self.module.Stream()

    def on(self):
        return self.module.stream(self.stream)

    def meet(self) -> None:
        """Both streams wait for what was begun on the other. The CPU and other ranks do not."""
        main = self.module.current_stream()
        main.wait_stream(self.stream)
        self.stream.wait_stream(main)

    def keep(self, x: Tensor) -> None:
        """The memory of x, a tensor of the main stream, is given to no other tensor until the work
        that was begun on the side stream is done."""
        if x.is_cuda:
            x.record_stream(self.stream)
