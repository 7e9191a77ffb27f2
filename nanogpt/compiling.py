"""Functions under torch.compile that report when they compile, and CUDA graphs.

torch.compile traces a function into a graph of operations and generates kernels for the graph. That
takes a second or more, so each graph is made before the clock starts, by calling the function once.
A graph serves only arguments of the form it was traced with: shapes, dtypes, Python numbers, which
of them are None. PyTorch writes these conditions down as guards. Arguments that break a
guard need another graph.

PyTorch keeps the generated kernels on disk, but a new process traces all functions again to find
them, which takes many seconds. `KeptGraphs` keeps the traced graphs with their guards as well.
(PyTorch's own cache of traced graphs, `torch._dynamo.config.caching_precompile`, is not used. In
torch 2.11 and 2.13 a process that loaded from it fails with an AssertionError as soon as it has to
trace another graph.)
"""
import hashlib
import inspect
import os
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, NoneType
from typing import NamedTuple

import torch
from torch import Tensor

CONSTANTS = (NoneType, bool, int, float, str, torch.dtype, torch.device)
COLLECTIONS = (tuple, list, dict)
CODE = (FunctionType, type)


def configure(namespace: str = "nanogpt") -> None:
    """The settings of PyTorch's compiler that this project needs. `namespace` is that of its custom
    operators, which must be registered by now."""
    torch._dynamo.config.enable_aot_compile = True  # for KeptGraphs; the default of torch 2.13
    # A function has a graph for each form of its arguments, and for each size unless it is dynamic.
    # PyTorch gives up at 8.
    torch._dynamo.config.recompile_limit = 64
    # Floats are constants of a graph. By default a dynamic graph takes them as inputs, and cannot
    # be kept then.
    torch._dynamo.config.specialize_float = True
    # By default, graphs with an autograd function of ours in them, as FP8 has, are never cached.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # All kernels get the same name, so that equal kernels of two graphs are one entry in the cache,
    # such as those that training and validation have in common.
    torch._inductor.config.triton.unique_kernel_names = False
    identity = operators_hash(namespace)
    torch._inductor.config.post_grad_custom_pre_pass = pass_that_only_names(identity)


def operators_hash(namespace: str) -> str:
    """Identifies the functions that say what our custom operators return and what their gradients
    are. PyTorch's caches know an operator by its name alone. If you edited such a function, they
    would go on to use code that was generated for the old one, and compute wrong numbers without a
    word. So this hash becomes part of the caches' keys."""
    texts = []
    for name, operator in sorted(torch._library.custom_ops.OPDEFS.items()):
        if name.startswith(f"{namespace}::"):
            for function in (
                    operator._abstract_fn, operator._backward_fn, operator._setup_context_fn):
                texts.append(inspect.getsource(function) if function else "")
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def pass_that_only_names(identity: str):
    """A pass of the compiler that leaves every graph as it is. The compiler puts the identity of
    its passes into the keys of its caches, which is all that this one is for."""
    from torch._inductor.custom_graph_pass import CustomGraphPass  # importing it takes 2 s

    class OnlyNames(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            pass

        def uuid(self) -> str:
            return identity

        def __repr__(self) -> str:  # KeptGraphs hashes it with all settings: no address in it
            return f"pass_that_only_names({identity})"

    return OnlyNames()


class Compiled:
    """A function under torch.compile. After a call that had to compile or load a graph it calls
    `report(what, seconds)`, where `seconds` is how long the call took; it also says there if graphs
    cannot be kept.

    `sources` identifies the project's source files, all of them: a hash. With it, graphs are kept
    on disk for later runs. Then its results may depend on nothing but its arguments, these files
    and the constants of its own module (`globals_read`). With `dynamic`, sizes are inputs of a
    graph, so that one graph serves many sizes: all for which the function takes the same branches.
    (A size of 1 has a graph of its own.)

    The first argument is a tensor. A CUDA graph cannot contain compilation: call the function once
    before you capture it."""

    def __init__(self, function: FunctionType, report: Callable[[str, float], None],
                 sources: str = "", dynamic: bool = False):
        self.function = function
        self.report = report
        self.dynamic = dynamic
        self.traced = torch.compile(function, dynamic=dynamic, fullgraph=True)
        self.kept = KeptGraphs(function, sources, dynamic) if sources else None

    def __call__(self, *args):
        begin = time.perf_counter()
        stats = torch._dynamo.utils.counters["stats"]
        graphs_before = stats["unique_graphs"]
        graph, loaded = self.graph_for(args)
        result = graph(*args)
        if loaded or stats["unique_graphs"] != graphs_before:
            what = describe(self.function, args, self.dynamic)
            if loaded:
                what += " (loaded from disk)"
            self.report(what, time.perf_counter() - begin)
        return result

    def graph_for(self, args: tuple) -> tuple[Callable, bool]:
        """What computes the function for these arguments, and whether it was loaded just now."""
        if self.kept is not None:
            try:
                return self.kept.graph_for(args)
            except Exception as error:  # it is experimental in PyTorch; without it starts are slow
                self.kept = None
                reason = f"{type(error).__name__}: {str(error)[:150]}"
                self.report(f"graphs of {self.function.__name__} are not kept: {reason}", 0.0)
        return self.traced, False


class KeptGraphs:
    """The graphs of one function, kept on disk beside the compiler's caches.

    Two things decide whether a graph may serve some arguments.
    - Its guards, which PyTorch keeps with it. They are checked at each call, as torch.compile does,
      and know the form of tensors, which of them are the same one, numbers, strings, and the
      state of PyTorch: whether gradients are computed, autocast, the number of threads.
    - Its key, because kept guards know neither functions nor globals. The key has the source files,
      the constants that the function reads (`globals_read`), the versions of Python and PyTorch,
      the kind of processor, the compiler's settings, and the name of each function in the
      arguments. It also has the form of the arguments, so that few graphs are loaded only to be
      refused by their guards.

    Memory that the function writes to may not overlap other arguments: neither these guards nor
    those of torch.compile always notice.

    Arguments that are neither tensors, constants, functions, classes, plain objects nor collections
    of these raise a TypeError, because the key could not say all that matters about them."""

    def __init__(self, function: FunctionType, sources: str, dynamic: bool):
        self.function = function
        self.sources = sources
        self.dynamic = dynamic
        self.graphs = {}  # key -> list of graphs that this process has loaded or made

    def graph_for(self, args: tuple) -> tuple[Callable, bool]:
        """A graph for these arguments, and whether it was loaded just now. Makes it if there is
        none."""
        key = (torch.is_grad_enabled(), form(args, self.dynamic))
        known = self.graphs.setdefault(repr(key), [])
        for graph in known:
            if graph.guard_check(*args):
                return graph, False
        name = self.file_name((key, globals_read(self.function, args)))
        graph = self.load(name, args)
        loaded = graph is not None
        if not loaded:
            graph = self.make(name, args)
        graph.disable_guard_check()  # guards are checked above, so the call itself need not
        known.append(graph)
        return graph, loaded

    def folder(self) -> Path:
        return Path(torch._inductor.runtime.cache_dir_utils.cache_dir(), "nanogpt")

    def file_name(self, key: tuple) -> str:
        """Names the files of a key. Graphs of one name differ only in what guards tell apart."""
        facts = [
            self.sources, sys.version, torch.__version__, torch.backends.cpu.get_cpu_capability(),
            torch.cuda.is_available() and torch.cuda.get_device_name(),
            torch._inductor.config.get_hash(), torch._functorch.config.get_hash(),
            self.dynamic, form(self.function), key,
        ]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def load(self, name: str, args: tuple) -> Callable | None:
        """The first kept graph of this name whose guards accept the arguments. Raises what PyTorch
        raises on a damaged file, and removes the file."""
        for path in sorted(self.folder().glob(f"{name}.*")):
            # Reading guards makes new ones, for which PyTorch needs a context. Any will do.
            context = torch._guards.TracingContext(None)
            try:
                with open(path, "rb") as file, torch._guards.tracing(context):
                    graph = torch.compiler.load_compiled_function(
                        file, f_globals=self.function.__globals__)
            except Exception:
                path.unlink(missing_ok=True)
                raise
            if graph.guard_check(*args):
                return graph
        return None

    def make(self, name: str, args: tuple) -> Callable:
        """A new graph, forward and backward, also written to disk."""
        compiled = torch.compile(self.function, dynamic=self.dynamic, fullgraph=True)
        with hiding_grad(args), warnings.catch_warnings():
            # PyTorch looks at the .grad of every argument, and warns that not all can have one.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
            graph = compiled.aot_compile((args, {}))
        if not graph.guard_check(*args):
            raise RuntimeError("its guards refuse the arguments that it was made with")
        self.folder().mkdir(parents=True, exist_ok=True)
        unfinished = self.folder() / f"unfinished.{uuid.uuid4()}"
        graph.save_compiled_function(str(unfinished))
        # Renamed at the end, because another rank may be reading.
        os.replace(unfinished, self.folder() / f"{name}.{uuid.uuid4()}")
        return graph


def form(value, dynamic: bool = False):
    """What the key of a graph says about an argument: nested tuples of strings and numbers. With
    `dynamic`, tensors of different sizes have the same form. Raises TypeError on a type of which
    this function does not know what matters."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Tensor):
        shape = value.dim() if dynamic else tuple(value.shape)
        return kind, shape, str(value.dtype), str(value.device), value.requires_grad
    if isinstance(value, CONSTANTS):
        return kind, repr(value)
    if isinstance(value, type):
        return kind, value.__module__, value.__qualname__
    if isinstance(value, tuple | list):
        return kind, *[form(item, dynamic) for item in value]
    if isinstance(value, dict):
        return kind, *[(form(name), form(item, dynamic)) for name, item in value.items()]
    if isinstance(value, FunctionType):
        line = value.__code__.co_firstlineno
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        inside = form((cells, value.__defaults__, value.__kwdefaults__), dynamic)
        return kind, value.__module__, value.__qualname__, line, inside
    # A class without a __reduce__ of its own: the attributes are all there is.
    if hasattr(value, "__dict__") and type(value).__reduce__ is object.__reduce__:
        return kind, form(vars(value), dynamic)
    raise TypeError(f"an argument of type {kind} has no known form")


def globals_read(function: FunctionType, args: tuple) -> dict[str, object]:
    """The constants, collections, functions and classes of the function's module that it reads when
    it is traced: name -> form. The source files alone may not decide their values, as in
    `WIDE = "WIDE" in os.environ`. Besides its own code this follows the functions and classes of
    the module that it names, and the methods of its arguments; not other modules, the attributes
    of classes, nor functions that are arguments."""
    found = {}
    codes = codes_of(function)
    for kind in kinds_in(args):
        if kind.__module__ == function.__module__:
            codes += codes_of(kind)
    while codes:
        for name in codes.pop().co_names:
            if name in found or name not in function.__globals__:
                continue
            value = function.__globals__[name]
            if not isinstance(value, (*CONSTANTS, *COLLECTIONS, *CODE)):
                continue
            found[name] = form(value)
            if isinstance(value, CODE) and value.__module__ == function.__module__:
                codes += codes_of(value)
    return dict(sorted(found.items()))


def codes_of(value: FunctionType | type) -> list[CodeType]:
    """The code of a function and of those inside it, or of all methods of a class."""
    if isinstance(value, type):
        methods = [getattr(method, "__func__", method)
                   for kind in value.__mro__ if kind.__module__ == value.__module__
                   for method in vars(kind).values()]
        return [code for method in methods if isinstance(method, FunctionType)
                for code in codes_of(method)]
    codes = [value.__code__]
    for code in codes:  # which grows meanwhile
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return codes


def kinds_in(value) -> set[type]:
    """The class of a value, and those of what is in it."""
    kinds = {type(value)}
    if isinstance(value, tuple | list):
        kinds = kinds.union(*map(kinds_in, value))
    elif isinstance(value, dict):
        kinds = kinds.union(*map(kinds_in, value.values()))
    return kinds


def tensors_in(value) -> Iterator[Tensor]:
    """The tensors in an argument, also in collections and in attributes of objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value))


@contextmanager
def hiding_grad(args: tuple):
    """Takes .grad away from the arguments for a while. PyTorch cannot read a kept graph that was
    made while an argument had one, though graphs do not depend on it."""
    gradients = []
    for x in tensors_in(args):
        if x.is_leaf and x.grad is not None:
            gradients.append((x, x.grad))
            x.grad = None
    try:
        yield
    finally:
        for x, gradient in gradients:
            x.grad = gradient


def describe(function: FunctionType, args: tuple, dynamic: bool) -> str:
    """Which graph of a function this is: its size, its mode, and the arguments that are None."""
    size = "many sizes" if dynamic else f"{len(args[0])} rows"
    mode = "for training" if torch.is_grad_enabled() else "without gradients"
    what = f"{function.__name__} of {size} {mode}"
    names = absent(function.__code__.co_varnames, args)
    if names:
        what += f", without {', '.join(names)}"
    return what


def absent(names: Iterable[str], values: Iterable) -> list[str]:
    """The names whose values are None, also in NamedTuples among the values."""
    found = []
    for name, value in zip(names, values):
        if value is None:
            found.append(name)
        elif hasattr(value, "_fields"):
            found += absent(value._fields, value)
    return found


def call_directly(_, function: Callable, tensors: tuple[Tensor, ...]):
    """Calls the function without a CUDA graph. The first argument is the key that `CudaGraphs`
    would need."""
    return function(*tensors)


class Capture(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]  # what the graph reads: copies of the function's arguments
    results: object  # what the function returned; each replay writes it anew
    gradients: list[Tensor | None]  # .grad of every parameter after it


class CudaGraphs:
    """Calls functions on the GPU as CUDA graphs. To start a kernel costs the CPU some microseconds.
    A forward and backward pass starts over 800, for which the CPU may need longer than the GPU has
    to work. A CUDA graph is a recording of all of them that is started at once.

    A graph does the same work on the same memory every time. So inputs are copied to where it reads
    them, and what depends on anything else needs a graph of its own. Gradients are such a case: the
    first backward pass of a step makes new tensors of them, and later passes add to these."""

    def __init__(self, parameters: Iterable[Tensor]):
        self.parameters = list(parameters)
        self.captures = {}
        # Graphs share memory. But results are kept: no graph captured later writes there.
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, key, function: Callable, tensors: tuple[Tensor, ...]):
        """Returns function(*tensors), which may also make or add to the .grad of the parameters.
        Use a result before its graph, or one recorded earlier, runs again: both may overwrite
        it.

        `key` names the recording, and must be hashable. Two calls may have the same key only if
        they do the same operations on the same memory, and differ in nothing but the numbers in
        their tensors and gradients, or in the shapes of the tensors. Compilation cannot be
        recorded, and nothing that is made at first use. So call the function itself once before."""
        shapes = tuple(x.shape for x in tensors)
        # Where backward finds a gradient to add to. Where it makes a new one, it is another graph.
        added_to = tuple(p.grad is not None and p.grad.data_ptr() for p in self.parameters)
        key = (key, shapes, added_to)
        if key not in self.captures:
            self.captures[key] = self.capture(function, tensors)
        capture = self.captures[key]
        for own, x in zip(capture.inputs, tensors):
            own.copy_(x)
        capture.graph.replay()
        for parameter, gradient in zip(self.parameters, capture.gradients):
            parameter.grad = gradient
        return capture.results

    def capture(self, function: Callable, tensors: tuple[Tensor, ...]) -> Capture:
        """Records the function. This computes nothing yet."""
        graph = torch.cuda.CUDAGraph()
        inputs = [x.clone() for x in tensors]
        # On the current stream, because kernels of a graph keep the priority of the stream that
        # they were recorded on. CUDA's default stream cannot be recorded: None takes another.
        # "thread_local": meanwhile another thread may allocate memory.
        stream = torch.cuda.current_stream()
        if stream == torch.cuda.default_stream():
            stream = None
        with torch.cuda.graph(graph, self.pool, stream, "thread_local"):
            results = function(*inputs)
        return Capture(graph, inputs, results, [p.grad for p in self.parameters])
