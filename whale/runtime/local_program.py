"""The local program of a stage on one rank as data: its graphs, and the sources of their placeholders.

The *constant* graph runs once, and again when a buffer was written to that it reads; the *step* graph once a step on
the global batch; the *micro-batch* graph for every micro-batch, and in training its derivative in its place. Knows
tensors and graphs; not how they were made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from whale.ir.garbage import without_collections
from whale.runtime.collectives import CollectiveModule, Group
from whale.runtime.direct_calls import called_directly, directly

__all__ = [
    "INPUTS",
    "Derivative",
    "Intervals",
    "LocalCode",
    "LocalGraph",
    "LocalProgram",
    "ShapeAndDtype",
    "Source",
    "SplitBackward",
    "Wait",
    "bound",
    "there",
    "wait_for",
    "with_backwards",
    "with_codes",
]

Intervals = tuple[tuple[tuple[int, int], ...], ...]
"""For each dim of a tensor, half-open ranges in order."""

Source = tuple[str, Any]
"""Source of a placeholder's tensor: ("parameter", name), ("buffer", name), ("constant", name), ("input", (leaf,
intervals)), ("received", position), (level, position) for an earlier graph's output, ("sum", number) for a sum over the
rows of all ranks, or ("rows" | "columns", (intervals, shape)) for numbers of a part's elements in a whole tensor of
this shape. A ("host input", (leaf, intervals)) is an input that is wanted on the host. A ("cast", (name, dtype)) is a
parameter in another dtype, made once a step. A ("unit", bucket) is no tensor but holds parameters of which this rank
owns a stretch; a ("gathered", name) is one of them, which the graph gets from there. ("wait", None) is no tensor
either: it waits for received values, of which others give only the memory."""

INPUTS = ("input", "host input")
"""Kinds of sources that are parts of the batch."""

ShapeAndDtype = tuple[tuple[int, ...], torch.dtype]

Wait = Callable[[int], None]
"""Waits, or lets the device's queue wait, until the received value at a position is in its memory."""


def there(position: int) -> None:
    """Wait for a received value that is in its memory already."""


def wait_for(wait: Wait, position: int) -> None:
    """Wait for a received value: the node of a graph before the first that reads it."""
    wait(position)


@dataclass(eq=False)
class LocalCode:
    """A graph with the modules that it calls. torch makes code of it when it is first run, if it ever is.

    ``unbound`` is the code of which this is a copy with process groups: both run the same function. A ``boxed`` one is
    called with its arguments in a list, which it empties, so that each is freed after its last use. One that
    ``runs_once`` is run node by node: to make code of it takes longer.
    """

    root: nn.Module
    graph: fx.Graph
    unbound: LocalCode | None = None
    boxed: bool = False
    runs_once: bool = False

    @cached_property
    def module(self) -> fx.GraphModule:
        """The graph as a module of torch."""
        if self.boxed:
            self.graph.set_codegen(_Boxed())
        return without_collections(fx.GraphModule)(self.root, self.graph)

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The graph as a function of a root with its modules, and of its placeholders."""
        if self.runs_once:
            return partial(_run_by_node, self.graph, boxed=self.boxed)
        if self.unbound is not None:
            return self.unbound.function
        with called_directly(self.graph):
            return type(self.module).forward

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        return self.function(self.root, *args)

    def once(self, *args: Any) -> Any:
        """Run it without making code of it."""
        return _run_by_node(self.graph, self.root, *args, boxed=self.boxed)


def _run_by_node(graph: fx.Graph, root: nn.Module, *args: Any, boxed: bool) -> Any:
    """Run a graph as its code does: values are freed after their last use."""
    given: list[Any] = args[0] if boxed else list(args)
    given.reverse()
    freed: dict[fx.Node, list[fx.Node]] = {}
    later = {node for node in graph.nodes if node.op == "placeholder" and not node.users}
    for node in reversed(graph.nodes):
        freed[node] = [x for x in (node, *node.all_input_nodes) if x not in later]
        later.update(freed[node])
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        target: Any = node.target
        if node.op == "placeholder":
            values[node] = given.pop()
            continue
        read, named = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return read[0]
        if node.op == "get_attr":
            values[node] = attrgetter(target)(root)
        elif node.op == "call_method":
            values[node] = getattr(read[0], target)(*read[1:], **named)
        else:
            call = root.get_submodule(target) if node.op == "call_module" else directly(node)
            values[node] = call(*read, **named)
        read = named = None
        for x in freed[node]:
            del values[x]
    return None


class _Boxed(fx.graph.CodeGen):
    """Code of a function of a list of arguments, which it empties."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **kwargs: Any) -> str:
        """The function's first lines."""
        names = [name.split(":")[0].strip() for name in free_vars if name != "self"]
        taken = f"    {', '.join(names)}, = arguments; arguments.clear()" if names else ""
        return f"def forward(self, arguments){maybe_return_annotation}:\n{taken}"


@dataclass
class LocalGraph:
    """One graph of a local program, and the sources of its placeholders, in order."""

    code: LocalCode
    sources: list[Source]


@dataclass
class SplitBackward:
    """A backward in two parts.

    The first returns the gradients of received values, ``num_gradients`` of them, and then what the second needs of it,
    whose placeholders have sources ("passed", number) for that, besides those of a backward.
    """

    inputs: LocalGraph
    weights: LocalGraph
    num_gradients: int


@dataclass
class Derivative:
    """A micro-batch graph and its backward, for steps that train.

    The forward graph has the placeholders of the micro-batch graph and returns its ``num_results`` results, then what
    the backward needs. The backward's first placeholder is a sink of gradients, whose method ``add`` is called with the
    number of a parameter's placeholder and its gradient as soon as this is made. Its others have sources ("kept",
    number), ("argument", number of a placeholder of the forward), or ("seed", number of an output) for a gradient. It
    returns the gradients of received values, by position, None for those that have none. ``strides`` are those that
    the graphs expect of tensors that are made anew in each step, by placeholder; ``received`` and ``seeds`` the shapes
    and dtypes of received values and of gradients of outputs, None where there is none; ``split`` is the same backward
    in two parts.
    """

    forward: LocalCode
    backward: LocalGraph
    num_results: int
    strides: Mapping[int, tuple[int, ...]]
    received: tuple[ShapeAndDtype, ...]
    seeds: tuple[ShapeAndDtype | None, ...]
    split: SplitBackward | None = None

    def with_backwards(self, change: Callable[[LocalGraph], LocalGraph]) -> Derivative:
        """The same with another backward, in one part and in two."""
        split = self.split
        if split is not None:
            split = replace(split, inputs=change(split.inputs), weights=change(split.weights))
        return replace(self, backward=change(self.backward), split=split)

    @cached_property
    def arguments(self) -> tuple[int, ...]:
        """Numbers of the placeholders whose tensors the backward needs."""
        return tuple(what for kind, what in self.backward.sources if kind == "argument")


@dataclass
class LocalProgram:
    """The local program of one rank for a stage and one micro-batch.

    The micro-batch graph returns the sent values, then the loss if the stage has it, then new buffer values, then
    tensors of the model's output.
    ``bridges`` are the modules that need a process group, which only their copies have (:func:`bound`).
    ``depends_on_position`` means that the program is valid for one micro-batch only, not for others of as many rows.
    ``begins_alone`` means that the micro-batch graph computes something of parameters before it reads a received value.
    ``nothing`` is set if the rank has no row of the micro-batch and no rank waits for it inside the stage: the shapes
    and dtypes that it then returns without running. ``derivative`` is what runs in training.
    """

    constant: LocalGraph
    step: LocalGraph
    micro_batch: LocalGraph
    bridges: list[CollectiveModule] = field(default_factory=list)
    depends_on_position: bool = False
    begins_alone: bool = False
    nothing: tuple[ShapeAndDtype, ...] | None = None
    derivative: Derivative | None = None

    def parts_with_gaps(self, batch: Mapping[str, Tensor]) -> list[tuple[str, Intervals]]:
        """The parts of a batch that it reads and that have gaps, as parts of rows do; derivatives read copies of
        these."""
        read = [what for graph in (self.step, self.micro_batch) for kind, what in graph.sources if kind in INPUTS]
        return [
            (leaf, intervals)
            for leaf, intervals in read
            if any(dim != ((0, size),) for dim, size in zip(intervals[1:], batch[leaf].shape[1:], strict=True))
        ]


def with_backwards(programs: Sequence[LocalProgram], change: Callable[[LocalCode], LocalCode]) -> list[LocalProgram]:
    """The programs of a stage's micro-batches with changed backwards; equal ones share theirs."""
    codes: dict[int, LocalCode] = {}
    derivatives: dict[int, Derivative] = {}

    def of_graph(graph: LocalGraph) -> LocalGraph:
        code = graph.code
        if id(code) not in codes:
            codes[id(code)] = change(code)
        return LocalGraph(codes[id(code)], graph.sources)

    def of_derivative(given: Derivative) -> Derivative:
        if id(given) not in derivatives:
            derivatives[id(given)] = given.with_backwards(of_graph)
        return derivatives[id(given)]

    found = {
        id(program): replace(program, derivative=program.derivative and of_derivative(program.derivative))
        for program in programs
    }
    return [found[id(program)] for program in programs]


def bound(programs: Sequence[LocalProgram], group_of: Callable[[str, tuple[int, ...]], Group]) -> list[LocalProgram]:
    """Copies of programs whose modules have process groups; the programs themselves are not changed.

    Args:
        programs: of a stage's micro-batches; shared parts remain shared in the copies.
        group_of: the group of a module, by its name in its graph and its ranks.
    """

    def with_groups(code: LocalCode) -> LocalCode:
        return LocalCode(_with_groups(code.root, group_of), code.graph, unbound=code, boxed=code.boxed)

    return with_codes(programs, with_groups)


def with_codes(programs: Sequence[LocalProgram], change: Callable[[LocalCode], LocalCode]) -> list[LocalProgram]:
    """The programs of a stage's micro-batches with changed codes; shared parts remain shared."""
    codes: dict[int, LocalCode] = {}

    def of_graph(graph: LocalGraph) -> LocalGraph:
        code = graph.code
        if id(code) not in codes:
            codes[id(code)] = change(code)
        return LocalGraph(codes[id(code)], graph.sources)

    def of_program(program: LocalProgram) -> LocalProgram:
        graphs = [of_graph(graph) for graph in (program.constant, program.step, program.micro_batch)]
        inside = (module for graph in graphs for module in graph.code.root.modules())
        derivative = program.derivative
        if derivative is not None:
            forward = of_graph(LocalGraph(derivative.forward, [])).code
            derivative = replace(derivative, forward=forward).with_backwards(of_graph)
        return replace(
            program,
            constant=graphs[0],
            step=graphs[1],
            micro_batch=graphs[2],
            bridges=[module for module in inside if isinstance(module, CollectiveModule)],
            derivative=derivative,
        )

    copies = {id(program): of_program(program) for program in programs}
    return [copies[id(program)] for program in programs]


def _with_groups(module: nn.Module, group_of: Callable[[str, tuple[int, ...]], Group], name: str = "") -> nn.Module:
    """A copy of a module and those inside of it, with a group for each that needs one; all else is shared."""
    bare = copy.copy(module)
    bare._modules = {
        key: None if child is None else _with_groups(child, group_of, f"{name}.{key}".lstrip("."))
        for key, child in module._modules.items()
    }
    if isinstance(bare, CollectiveModule):
        bare.group = group_of(name, bare.ranks)
    return bare
