"""A stage on one rank: it runs the graphs of its local programs on their tensors, and has state between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from whale.runtime.anomalies import run_checked
from whale.runtime.derivative import laid_out
from whale.runtime.gradients import GradientSink, TakesGradients
from whale.runtime.local_program import (
    INPUTS,
    Intervals,
    LocalCode,
    LocalGraph,
    LocalProgram,
    ShapeAndDtype,
    Wait,
    there,
)
from whale.runtime.random import RNGPosition, column_numbers, row_numbers


@dataclass(eq=False)
class Kept:
    """Everything that a backward needs of its forward: tensors that this made, and its arguments by number."""

    made: list[Any] = field(default_factory=list)
    arguments: dict[int, Any] = field(default_factory=dict)
    weights: list[Any] = field(default_factory=list)  # arguments of the weights' part of a split backward


class _Packed(NamedTuple):
    """A kept tensor in the form that a script's hooks for saved tensors gave it."""

    value: Any
    unpack: Callable[[Any], Tensor]


class _Arguments(NamedTuple):
    """The arguments of a graph: constant ones in their positions, the positions and sources of the others, and whether
    the graph waits for received values itself."""

    fixed: list[Any]
    changing: list[tuple[int, str, Any]]
    waits: bool


class _Version(NamedTuple):
    """A tensor, and how often it had been written to."""

    tensor: Tensor
    number: int

    @property
    def is_over(self) -> bool:
        """Whether it was written to since."""
        return self.tensor._version != self.number


def _packed(x: Any, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
    return _Packed(pack(x), unpack) if isinstance(x, Tensor) else x


def _opened(x: Any) -> Any:
    return x.unpack(x.value) if isinstance(x, _Packed) else x


def _run(code: LocalCode, given: list[Any]) -> tuple[Any, ...]:
    """Run a backward."""
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        return run_checked(code, given)
    found: tuple[Any, ...] = code.function(code.root, given)
    return found


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
        tensors: the rank's parameters and buffers by name, the constants, and the units of which it owns stretches.
        parameters: the trainable parameters that the stage reads.
        device: of the rank.
        keeps_casts: whether casts of parameters that are made once a step keep their memory.
    """

    def __init__(
        self,
        *,
        programs: Sequence[LocalProgram],
        outputs: tuple[str, ...],
        mutated: tuple[str, ...],
        tensors: Mapping[tuple[str, Any], Any],
        parameters: Sequence[nn.Parameter],
        clock: RNGPosition,
        device: torch.device,
        returned: tuple[int, ...] = (),
        keeps_casts: bool = False,
    ) -> None:
        self.programs, self.outputs, self.mutated, self.clock = programs, outputs, mutated, clock
        self.device = device
        self.returned, self.keeps_casts = returned, keeps_casts
        self.parameters = tuple(parameters)
        self._tensors = tensors
        self._constants: dict[int, tuple[Tensor, ...]] = {}
        self._made_of: dict[int, list[_Version]] = {}
        self._steps: dict[int, tuple[Tensor, ...]] = {}
        self._casts: dict[tuple[str, torch.dtype], Tensor] = {}
        self._known: dict[int, _Arguments] = {}
        self._numbers: dict[tuple[str, Any], Tensor] = {}
        self._batch: Mapping[str, Any] = {}
        self._sums: Sequence[Tensor] = ()
        self._changed: dict[str, Tensor] = {}
        self._taken: dict[tuple[int, int], Tensor] = {}
        self._sinks: dict[int, GradientSink] = {}
        self.taker: TakesGradients | None = None

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks that collectives inside this stage wait for, this one included."""
        return tuple(sorted({rank for program in self.programs for b in program.bridges for rank in b.ranks}))

    def begin(self, batch: Mapping[str, Any], sums: Sequence[Tensor] = ()) -> None:
        """Start a step on a global batch, whose leaves are tensors, or rows of them (:class:`LocalRows`), with its
        *sums* over rows: drop state of the last one."""
        self._batch, self._sums = batch, sums
        self._steps.clear()
        if any(made.is_over for buffers in self._made_of.values() for made in buffers):
            self._renew_constants()
        for name, dtype in self._cast_names:
            parameter = self._tensors["parameter", name].detach()
            held = self._casts.get((name, dtype))
            self._casts[name, dtype] = parameter.to(dtype) if held is None else held.copy_(parameter)

    def prepare(self) -> None:
        """Make what all steps share, such as constants and the numbers of rows, of all micro-batches; a step makes what
        it is the first to read."""
        for program in self.programs:
            if program.nothing is None:
                self._arguments_of(program, program.micro_batch)

    def waits(self, micro_batch: int) -> bool:
        """Whether the forward of a micro-batch waits for received values itself."""
        program = self.programs[micro_batch]
        return program.nothing is None and self._arguments_of(program, program.micro_batch).waits

    def forward(self, micro_batch: int, received: tuple[Tensor, ...], wait: Wait = there) -> tuple[Tensor, ...]:
        """Run the micro-batch graph; new buffer values are stored when the step ends, the rest is returned. What is
        *received* may be on its way until *wait* has returned for it."""
        program = self.programs[micro_batch]
        self.clock.micro_batch = micro_batch
        if program.nothing is not None:
            return self._nothing(program.nothing)
        return self._results(micro_batch, program.micro_batch.code(*self._arguments(program, received, wait)))

    def forward_to_train(
        self, micro_batch: int, received: tuple[Tensor, ...], wait: Wait = there
    ) -> tuple[tuple[Tensor, ...], Kept]:
        """The same, with what the backward needs."""
        program = self.programs[micro_batch]
        self.clock.micro_batch = micro_batch
        if program.nothing is not None:
            return self._nothing(program.nothing), Kept()
        derivative = program.derivative
        assert derivative is not None
        arguments = self._arguments(program, received, wait)
        for number, strides in derivative.strides.items():
            if arguments[number].stride() != strides:
                kind, what = program.micro_batch.sources[number]
                if kind == "received":
                    wait(what)
                arguments[number] = laid_out(arguments[number], strides)
        found = derivative.forward(*arguments)
        kept = Kept(list(found[derivative.num_results :]), {i: arguments[i] for i in derivative.arguments})
        if (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
            kept.made = [_packed(x, *hooks) for x in kept.made]
            kept.arguments = {i: _packed(x, *hooks) for i, x in kept.arguments.items()}
        return self._results(micro_batch, found[: derivative.num_results]), kept

    def backward(self, micro_batch: int, kept: Kept, seeds: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run the backward of a micro-batch, which consumes what its forward kept.

        Args:
            micro_batch: its number.
            kept: from :meth:`forward_to_train`.
            seeds: the gradient of each output, None where it has none.

        Returns:
            the gradients of the received values; of those that have none, None.
        """
        program = self.programs[micro_batch]
        self.clock.micro_batch = micro_batch
        if program.derivative is None:
            return ()
        graph = program.derivative.backward
        given = self._given(program, graph, kept, seeds)
        kept.made, kept.arguments = [], {}
        return _run(graph.code, given)

    def backward_of_inputs(
        self, micro_batch: int, kept: Kept, seeds: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """The part of a backward that makes the gradients of received values, which it returns."""
        program = self.programs[micro_batch]
        self.clock.micro_batch = micro_batch
        if program.derivative is None:
            return ()
        split = program.derivative.split
        assert split is not None
        inputs, weights, num_gradients = split.inputs, split.weights, split.num_gradients
        found = _run(inputs.code, self._given(program, inputs, kept, seeds))
        kept.weights = self._given(program, weights, kept, seeds, found[num_gradients:])
        kept.made, kept.arguments = [], {}
        return found[:num_gradients]

    def backward_of_weights(self, micro_batch: int, kept: Kept) -> None:
        """The rest of a backward."""
        program = self.programs[micro_batch]
        self.clock.micro_batch = micro_batch
        if program.derivative is not None:
            assert program.derivative.split is not None
            _run(program.derivative.split.weights.code, kept.weights)

    def _given(
        self,
        program: LocalProgram,
        graph: LocalGraph,
        kept: Kept,
        seeds: Sequence[Tensor | None],
        passed: Sequence[Any] = (),
    ) -> list[Any]:
        """The arguments of a backward graph."""
        assert program.derivative is not None
        given: list[Any] = [self._sink(program)]
        for kind, what in graph.sources:
            match kind:
                case "kept":
                    given.append(_opened(kept.made[what]))
                case "argument":
                    given.append(_opened(kept.arguments[what]))
                case "passed":
                    given.append(passed[what])
                case "unit":
                    given.append(self._tensors[kind, what])
                case _:
                    like, seed = program.derivative.seeds[what], seeds[what]
                    assert like is not None
                    given.append(self._nothing([like])[0] if seed is None else seed.contiguous())
        return given

    def _sink(self, program: LocalProgram) -> GradientSink:
        """The sink of a program's gradients: it knows the parameter of each placeholder."""
        key = id(program.micro_batch)
        if key not in self._sinks:
            holders = {"parameter": "parameter", "gathered": "gradient"}
            sources = program.micro_batch.sources
            takers = [self._tensors[holders[kind], what] if kind in holders else None for kind, what in sources]
            self._sinks[key] = GradientSink(takers)
        sink = self._sinks[key]
        sink.taker = self.taker
        return sink

    def _nothing(self, shapes: Sequence[ShapeAndDtype]) -> tuple[Tensor, ...]:
        """Zeros: also the results of a rank without rows, which many operators refuse."""
        return tuple(torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in shapes)

    def _results(self, micro_batch: int, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The results for the executor; the others are stored."""
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
        if not self.keeps_casts:
            self._casts.clear()

    @cached_property
    def _cast_names(self) -> tuple[tuple[str, torch.dtype], ...]:
        """The parameters of which graphs read casts that are made once a step, and their dtypes."""
        graphs = [program.micro_batch for program in self.programs]
        return tuple(dict.fromkeys(what for graph in graphs for kind, what in graph.sources if kind == "cast"))

    def _arguments(
        self, program: LocalProgram, received: tuple[Tensor, ...], wait: Wait = there, graph: LocalGraph | None = None
    ) -> list[Any]:
        fixed, changing, _ = self._arguments_of(program, graph or program.micro_batch)
        arguments = fixed.copy()
        for position, kind, what in changing:
            if kind == "received":
                arguments[position] = received[what]
            elif kind == "wait":
                arguments[position] = wait
            elif kind == "input":
                leaf, intervals = what
                held = self._batch[leaf]
                arguments[position] = part(held, intervals) if isinstance(held, Tensor) else held.part(intervals)
            elif kind == "host input":
                leaf, intervals = what
                held = self._batch[leaf]
                arguments[position] = part(held, intervals) if isinstance(held, Tensor) else held.on_host(intervals)
            elif kind == "cast":
                arguments[position] = self._casts[what]
            elif kind == "sum":
                arguments[position] = self._sums[what]
            else:
                arguments[position] = self._step(program)[what]
        return arguments

    def _arguments_of(self, program: LocalProgram, graph: LocalGraph) -> _Arguments:
        """The result of `_split`, found once for each graph."""
        known = self._known.get(id(graph))
        if known is None:
            known = self._known[id(graph)] = self._split(program, graph)
        return known

    def _split(self, program: LocalProgram, graph: LocalGraph) -> _Arguments:
        """The arguments of a graph, without those that each micro-batch has."""
        fixed: list[Any] = [None] * len(graph.sources)
        changing = []
        for position, (kind, what) in enumerate(graph.sources):
            if kind in (*INPUTS, "received", "sum", "cast", "step", "wait"):
                changing.append((position, kind, what))
            elif kind == "constant" and isinstance(what, int):
                fixed[position] = self._constant(program)[what]
            elif kind in ("rows", "columns"):
                fixed[position] = self._numbers_of(kind, what)
            elif kind != "gathered":
                fixed[position] = self._tensors[kind, what]
        return _Arguments(fixed, changing, any(kind == "wait" for _, kind, _ in changing))

    def _numbers_of(self, kind: str, what: tuple[Intervals, tuple[int, ...]]) -> Tensor:
        """The numbers of rows or columns, once for all operators on parts of this kind."""
        if (kind, what) not in self._numbers:
            self._numbers[kind, what] = element_numbers(kind, what, self.device)
        return self._numbers[kind, what]

    def _constant(self, program: LocalProgram) -> tuple[Tensor, ...]:
        key = id(program.constant.code)
        if key not in self._constants:
            self._constants[key] = self._make_constants(program)
        return self._constants[key]

    def _make_constants(self, program: LocalProgram) -> tuple[Tensor, ...]:
        graph = program.constant
        # Buffers, and tensors that the script has beside the model, as the weights of a loss.
        held = [self._tensors[source] for source in graph.sources if source in self._tensors]
        self._made_of[id(graph.code)] = [_Version(x, x._version) for x in held if not x.is_inference()]
        with torch.no_grad():
            return graph.code.once(*self._arguments(program, (), graph=graph))

    def _renew_constants(self) -> None:
        """Compute constants of buffers that were written to, as by a script, by what it loads, or by a step of another
        mode. They stay where they are in memory: recorded CUDA graphs read them there."""
        for program in {id(program.constant.code): program for program in self.programs}.values():
            key = id(program.constant.code)
            if any(made.is_over for made in self._made_of.get(key, ())):
                for old, new in zip(self._constants[key], self._make_constants(program), strict=True):
                    there, here = old.untyped_storage(), new.untyped_storage()
                    if there.data_ptr() != here.data_ptr():  # else a view of the buffer
                        there.copy_(here)

    def _step(self, program: LocalProgram) -> tuple[Tensor, ...]:
        key = id(program.step.code)
        if key not in self._steps:
            with torch.no_grad():
                self._steps[key] = program.step.code(*self._arguments(program, (), graph=program.step))
        return self._steps[key]
