"""The local program of a stage on one rank: three graphs, their input tensors, and state between steps.

The *constant* graph runs once, the *step* graph once a step on the global batch, the *micro-batch* graph for every
micro-batch. Knows tensors and graphs; not how they were made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from whale.runtime.collectives import CollectiveModule, Group
from whale.runtime.random import RNGPosition, column_numbers, row_numbers

Intervals = tuple[tuple[tuple[int, int], ...], ...]
"""For each dim of a tensor, half-open ranges in order."""

Source = tuple[str, Any]
"""Source of a placeholder's tensor: ("parameter", name), ("buffer", name), ("constant", name), ("input", (leaf,
intervals)), ("received", position), (level, position) for an earlier graph's output, or ("rows" | "columns",
(intervals, shape)) for numbers of a part's elements in a whole tensor of this shape."""


@dataclass(eq=False)
class LocalCode:
    """A graph with the modules that it calls. torch makes code of it when it is first run, if it ever is.

    ``unbound`` is the code of which this is a copy with process groups: both run the same function.
    """

    root: nn.Module
    graph: fx.Graph
    unbound: LocalCode | None = None

    @cached_property
    def module(self) -> fx.GraphModule:
        """The graph as a module of torch."""
        return fx.GraphModule(self.root, self.graph)

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The graph as a function of a root with its modules, and of its placeholders."""
        return type(self.module).forward if self.unbound is None else self.unbound.function

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        return self.function(self.root, *args)

    def once(self, *args: Any) -> Any:
        """Run it without making code of it, which takes longer than to run it node by node."""
        return fx.Interpreter(self.root, graph=self.graph).run(*args)


@dataclass
class LocalGraph:
    """One graph of a local program, and the sources of its placeholders, in order."""

    code: LocalCode
    sources: list[Source]


@dataclass
class LocalProgram:
    """The local program of one rank for a stage and one micro-batch.

    The micro-batch graph returns the sent values, then the loss if the stage has it, then new buffer values, then
    tensors of the model's output.
    ``bridges`` are the modules that need a process group, which only their copies have (:func:`bound`).
    ``depends_on_position`` means that the program is valid for one micro-batch only, not for others of as many rows.
    ``nothing`` is set if the rank has no row of the micro-batch and no rank waits for it inside the stage: the shapes
    and dtypes that it then returns without running.
    """

    constant: LocalGraph
    step: LocalGraph
    micro_batch: LocalGraph
    bridges: list[CollectiveModule] = field(default_factory=list)
    depends_on_position: bool = False
    nothing: tuple[tuple[tuple[int, ...], torch.dtype], ...] | None = None


def bound(programs: Sequence[LocalProgram], group_of: Callable[[str, tuple[int, ...]], Group]) -> list[LocalProgram]:
    """Copies of programs whose modules have process groups; the programs themselves are not changed.

    Args:
        programs: of a stage's micro-batches; shared parts remain shared in the copies.
        group_of: the group of a module, by its name in its graph and its ranks.
    """
    codes: dict[int, LocalCode] = {}

    def of_graph(graph: LocalGraph) -> LocalGraph:
        code = graph.code
        if id(code) not in codes:
            codes[id(code)] = LocalCode(_with_groups(code.root, group_of), code.graph, unbound=code)
        return LocalGraph(codes[id(code)], graph.sources)

    def of_program(program: LocalProgram) -> LocalProgram:
        graphs = [of_graph(graph) for graph in (program.constant, program.step, program.micro_batch)]
        inside = (module for graph in graphs for module in graph.code.root.modules())
        return replace(
            program,
            constant=graphs[0],
            step=graphs[1],
            micro_batch=graphs[2],
            bridges=[module for module in inside if isinstance(module, CollectiveModule)],
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


def element_numbers(kind: str, what: tuple[Intervals, tuple[int, ...]], device: torch.device) -> Tensor:
    """The tensor of a source of kind ``rows`` or ``columns``."""
    intervals, shape = what
    return row_numbers(intervals, shape, device) if kind == "rows" else column_numbers(intervals, device)


def part(x: Tensor, intervals: Intervals) -> Tensor:
    """The part of a tensor that lies in these stretches of each dim; a view where it can be."""
    for dim, stretches in enumerate(intervals):
        if stretches == ((0, x.shape[dim]),):
            continue
        pieces = [x.narrow(dim, start, stop - start) for start, stop in stretches]
        if not pieces:
            x = x.narrow(dim, 0, 0)
        else:
            x = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return x


class Rectangle(NamedTuple):
    """A rectangle of a part: where it is in the whole tensor, and in the part."""

    whole: tuple[slice, ...]
    part: tuple[slice, ...]


def rectangles(intervals: Intervals) -> Iterator[Rectangle]:
    """The rectangles of which a part is made."""
    spans = []
    for dim in intervals:
        starts = accumulate((stop - start for start, stop in dim), initial=0)
        spans.append([(slice(a, b), slice(at, at + b - a)) for (a, b), at in zip(dim, starts, strict=False)])
    for choice in product(*spans):
        yield Rectangle(tuple(whole for whole, _ in choice), tuple(part for _, part in choice))


class LocalStage:
    """One stage of this rank, as the executor's input.

    Args:
        programs: one a micro-batch; equal ones are the same object.
        outputs: names of the values that the micro-batch graph returns to the executor.
        mutated: names of the buffers whose new values follow.
        returned: numbers of the tensors of the model's output that follow.
        tensors: the rank's parameters and buffers by name, and the constants.
        parameters: the trainable parameters that the stage reads.
    """

    def __init__(
        self,
        *,
        programs: Sequence[LocalProgram],
        outputs: tuple[str, ...],
        mutated: tuple[str, ...],
        tensors: Mapping[tuple[str, str], Tensor],
        parameters: Sequence[nn.Parameter],
        clock: RNGPosition,
        returned: tuple[int, ...] = (),
    ) -> None:
        self.programs, self.outputs, self.mutated, self.clock = programs, outputs, mutated, clock
        self.returned = returned
        self.parameters = tuple(parameters)
        self._tensors = tensors
        self._constants: dict[int, tuple[Tensor, ...]] = {}
        self._steps: dict[int, tuple[Tensor, ...]] = {}
        self._known: dict[int, tuple[list[Any], list[tuple[int, str, Any]]]] = {}
        self._numbers: dict[tuple[str, Any], Tensor] = {}
        self._batch: Mapping[str, Any] = {}
        self._changed: dict[str, Tensor] = {}
        self._taken: dict[tuple[int, int], Tensor] = {}

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks that collectives inside this stage wait for, this one included."""
        return tuple(sorted({rank for program in self.programs for b in program.bridges for rank in b.ranks}))

    def begin(self, batch: Mapping[str, Any]) -> None:
        """Start a step on a global batch, whose leaves are tensors, or rows of them (:class:`LocalRows`): drop state
        of the last one."""
        self._batch = batch
        self._steps.clear()

    def forward(self, micro_batch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the micro-batch graph; new buffer values are stored when the step ends, the rest is returned."""
        program = self.programs[micro_batch]
        self.clock.micro_batch = micro_batch
        if program.nothing is not None:  # many operators refuse tensors without rows
            device = next(iter(self._tensors.values())).device
            return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in program.nothing)
        results = program.micro_batch.code(*self._arguments(program, program.micro_batch, received))
        if len(results) > len(self.outputs):
            count = len(self.outputs)
            after = count + len(self.mutated)
            self._changed = dict(zip(self.mutated, results[count:after], strict=True))
            for number, value in zip(self.returned, results[after:], strict=True):
                self._taken[number, micro_batch] = value.detach()
            results = results[:count]
        return results

    def take_returned(self) -> dict[tuple[int, int], Tensor]:
        """This rank's parts of the model's output of this step, by number and micro-batch; they are not kept."""
        taken, self._taken = self._taken, {}
        return taken

    def finish(self) -> None:
        """End a step: store new buffer values. Earlier is not possible, because a backward may still read the old
        ones."""
        with torch.no_grad():
            for name, value in self._changed.items():
                self._tensors["buffer", name].copy_(value)
        self._changed = {}
        self._steps.clear()

    def _arguments(self, program: LocalProgram, graph: LocalGraph, received: tuple[Tensor, ...]) -> list[Any]:
        known = self._known.get(id(graph))
        if known is None:
            known = self._known[id(graph)] = self._split(program, graph)
        fixed, changing = known
        arguments = fixed.copy()
        for position, kind, what in changing:
            if kind == "received":
                arguments[position] = received[what]
            elif kind == "input":
                leaf, intervals = what
                held = self._batch[leaf]
                arguments[position] = part(held, intervals) if isinstance(held, Tensor) else held.part(intervals)
            else:
                arguments[position] = self._step(program)[what]
        return arguments

    def _split(self, program: LocalProgram, graph: LocalGraph) -> tuple[list[Any], list[tuple[int, str, Any]]]:
        """The constant arguments, in their positions, and the positions and sources of the others."""
        fixed: list[Any] = [None] * len(graph.sources)
        changing = []
        for position, (kind, what) in enumerate(graph.sources):
            if kind in ("received", "input", "step"):
                changing.append((position, kind, what))
            elif kind == "constant" and isinstance(what, int):
                fixed[position] = self._constant(program)[what]
            elif kind in ("rows", "columns"):
                fixed[position] = self._numbers_of(kind, what)
            else:
                fixed[position] = self._tensors[kind, what]
        return fixed, changing

    def _numbers_of(self, kind: str, what: tuple[Intervals, tuple[int, ...]]) -> Tensor:
        """The numbers of rows or columns, once for all operators on parts of this kind."""
        if (kind, what) not in self._numbers:
            self._numbers[kind, what] = element_numbers(kind, what, next(iter(self._tensors.values())).device)
        return self._numbers[kind, what]

    def _constant(self, program: LocalProgram) -> tuple[Tensor, ...]:
        key = id(program.constant.code)
        if key not in self._constants:
            with torch.no_grad():
                graph = program.constant
                self._constants[key] = graph.code.once(*self._arguments(program, graph, ()))
        return self._constants[key]

    def _step(self, program: LocalProgram) -> tuple[Tensor, ...]:
        key = id(program.step.code)
        if key not in self._steps:
            with torch.no_grad():
                self._steps[key] = program.step.code(*self._arguments(program, program.step, ()))
        return self._steps[key]
