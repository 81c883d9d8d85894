"""Sums over the rows of all ranks, such as the number of labels that count, where each rank has its own rows alone.

A loss divides by them, so every micro-batch reads them. They are computed of the batch alone: each rank has a program
for its terms, over its rows of all micro-batches at once, and the ranks sum the terms before the step, which has the
sums as inputs. No rank needs the rows of others for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from whale.errors import UsageError
from whale.graph.captured import Captured
from whale.graph.partition import is_random
from whale.graph.values import Value, is_call, resolve
from whale.ir.placement import Placement
from whale.runtime.local_program import LocalProgram
from whale.strategies.analysis import Analysis, Choice
from whale.strategies.layout import Interval, Layout, Placements
from whale.strategies.local_graph import Emitter
from whale.strategies.lowering import MICRO_BATCH, Lowering, PlacedStage, at_micro_batch

__all__ = ["RowSums", "counts_of_loss", "row_sums", "term_of_sum"]

aten = torch.ops.aten

_LINEAR = frozenset((
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.mul.Tensor, aten.mul.Scalar,
    aten.neg.default, aten.div.Scalar, aten.to.dtype, aten._to_copy.default, aten.view.default, aten.reshape.default,
    aten.alias.default,
))  # fmt: skip
"""Operators of losses whose result is a mean over the rows if their operands are, of one count."""

_FORMS = ("", "mean")
"""Forms of operators whose terms add up, and that do not ask for their position."""


class _NotInPartsError(Exception):
    """A value cannot be computed from the rows of one rank."""


@dataclass(frozen=True, kw_only=True)
class RowSums:
    """The sums over rows that the stages of a model read.

    Attributes:
        values: the sums, in the order of the graph.
        of_stage: by stage the numbers of those whose terms its ranks compute.
    """

    captured: Captured
    analysis: Analysis
    values: tuple[Value, ...]
    of_stage: Mapping[int, tuple[int, ...]]

    def terms(self, stage: PlacedStage, rank: int) -> tuple[tuple[int, ...], LocalProgram] | None:
        """The numbers of the sums of which *rank* has terms, and the program that returns these; None if it has none,
        as ranks that compute what another one does."""
        lowering = _Terms(self.captured, self.analysis, stage, rank)
        numbers = tuple(n for n in self.of_stage.get(stage.index, ()) if lowering.counts(self.values[n]))
        return (numbers, lowering.program([self.values[n] for n in numbers])) if numbers else None


def row_sums(captured: Captured, analysis: Analysis, stages: Sequence[PlacedStage]) -> RowSums:
    """The sums over rows that placed stages read, and can have of terms; the same on every rank."""
    owners: dict[Value, int] = {}
    for stage in stages if analysis.batch_factor >= 0 else ():
        for value in _read_sums(captured, analysis, stage):
            if value in owners:
                continue
            try:
                _Terms(captured, analysis, stage, stage.mesh.ranks[0]).program([value])
            except _NotInPartsError:
                continue
            owners[value] = stage.index
    order = {node: place for place, node in enumerate(captured.graph.nodes)}
    values = tuple(sorted(owners, key=lambda value: (order[value[0]], value[1])))
    of_stage = {
        stage.index: tuple(n for n, value in enumerate(values) if owners[value] == stage.index) for stage in stages
    }
    return RowSums(captured=captured, analysis=analysis, values=values, of_stage=of_stage)


def counts_of_loss(
    captured: Captured, analysis: Analysis, stage: PlacedStage
) -> tuple[frozenset[Value | None], frozenset[Value]]:
    """The divisors of the terms of the loss: sums over rows of the batch alone, such as the number of labels that
    count, or None for a number; and other sums over rows that *stage*, which computes the loss, reads."""
    assert stage.loss is not None
    found: set[Value | None] = set()
    waiting = [stage.loss]
    while waiting:
        value = waiting.pop()
        node = value[0]
        trained = [v for v in analysis.ops[node].operands if _is_trained(captured, v)] if is_call(node) else []
        if node.target is aten.div.Tensor and isinstance(node.args[1], fx.Node) and trained:
            below = _sums_in(captured, analysis, resolve(node.args[1]))
            if below:
                found |= below
                continue
        if node.target in _LINEAR or (node.target is aten.div.Tensor and trained):
            waiting += trained
        else:
            found.add(None)
    return frozenset(found), frozenset(_read_sums(captured, analysis, stage)) - found


def _is_trained(captured: Captured, value: Value) -> bool:
    """Whether a value depends on a parameter."""
    seen, waiting = set[fx.Node](), [value[0]]
    while waiting:
        node = waiting.pop()
        if node.name in captured.parameters:
            return True
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return False


def _sums_in(captured: Captured, analysis: Analysis, value: Value) -> set[Value]:
    """The sums over rows of which a value is computed, of the batch alone."""
    found, waiting = set[Value](), [value]
    while waiting:
        one = waiting.pop()
        if not is_call(one[0]) or _is_trained(captured, one):
            continue
        if _sums_rows(captured, analysis, one):
            found.add(one)
        else:
            waiting += analysis.ops[one[0]].operands
    return found


def term_of_sum(
    captured: Captured, analysis: Analysis, stage: PlacedStage, rank: int, value: Value
) -> LocalProgram | None:
    """The program of this rank's term of a sum over rows that a stage reads; None if another rank has the same.

    Raises:
        UsageError: it cannot be computed from the rows of one rank.
    """
    lowering = _Terms(captured, analysis, stage, rank)
    try:
        return lowering.program([value]) if lowering.counts(value) else None
    except _NotInPartsError as error:
        raise UsageError(
            f"{value[0].name} sums over rows of the batch, but cannot be computed from those of one replica, as "
            "reduce='adasum' needs it: use reduce='mean'"
        ) from error


def _read_sums(captured: Captured, analysis: Analysis, stage: PlacedStage) -> Iterator[Value]:
    """The sums over rows of the batch that a stage reads, computed of the batch alone."""
    pinned, seen = set(stage.nodes), set[Value]()
    leaving = [*stage.sent, *stage.mutated.values(), *(value for _, value, _ in stage.returned)]
    waiting = [operand for node in stage.nodes for operand in analysis.ops[node].operands] + leaving
    waiting += [] if stage.loss is None else [stage.loss]
    while waiting:
        value = waiting.pop()
        if value in seen or value[0] in pinned or value in stage.stored or not is_call(value[0]):
            continue
        seen.add(value)
        if _sums_rows(captured, analysis, value):
            yield value
        else:
            waiting += analysis.ops[value[0]].operands


def _sums_rows(captured: Captured, analysis: Analysis, value: Value) -> bool:
    """Whether a value is a sum over the rows of an input."""
    has_choice = _choice(analysis, value, analysis.batch_factor) is not None
    return has_choice and not is_random(value[0]) and bool(_leaves(captured, analysis, value))


def _choice(analysis: Analysis, value: Value, factor: int) -> Choice | None:
    """How an operator adds up along an axis factor."""
    for choice in analysis.choices[value[0]]:
        if choice.factor == factor and choice.outputs[value[1]].kind == "P" and choice.form in _FORMS:
            return choice
    return None


def _leaves(captured: Captured, analysis: Analysis, value: Value) -> set[fx.Node]:
    """The inputs with rows of which a value is computed."""
    found, seen, waiting = set(), set[Value](), [value]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if is_call(one[0]):
            waiting += analysis.ops[one[0]].operands
        elif one[0].name in captured.inputs and any(
            analysis.factors.count(dim, analysis.batch_factor) for dim in analysis.dims[one]
        ):
            found.add(one[0])
    return found


class _AllMicroBatches(Layout):
    """A layout in which the part of a rank is that of all micro-batches together."""

    def local_shape(self, value: Value, placements: Placements, coordinates: Sequence[int]) -> tuple[int, ...]:
        """Shape of a value on the rank at these coordinates, whatever the micro-batch."""
        shapes = [super(_AllMicroBatches, self).local_shape(value, placements, at) for at in self._times(coordinates)]
        cut = placements[0].dim if placements[0].kind == "S" else None
        return tuple(sum(sizes) if dim == cut else sizes[0] for dim, sizes in enumerate(zip(*shapes, strict=True)))

    def intervals(
        self, value: Value, placements: Placements, coordinates: Sequence[int]
    ) -> tuple[tuple[Interval, ...], ...]:
        """The ranges of each dim on the rank at these coordinates, whatever the micro-batch."""
        found = [super(_AllMicroBatches, self).intervals(value, placements, at) for at in self._times(coordinates)]
        return tuple(_union(ranges) for ranges in zip(*found, strict=True))

    def _times(self, coordinates: Sequence[int]) -> list[tuple[int, ...]]:
        return [(time, *coordinates[1:]) for time in range(self.axes[0].size)]


def _union(ranges: Sequence[tuple[Interval, ...]]) -> tuple[Interval, ...]:
    joined: list[Interval] = []
    for start, stop in sorted({interval for each in ranges for interval in each}):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


class _Terms(Lowering):
    """The terms of one rank."""

    def __init__(self, captured: Captured, analysis: Analysis, stage: PlacedStage, rank: int) -> None:
        layout = _AllMicroBatches(analysis, stage.layout.axes, stage.layout.mirrored)
        super().__init__(captured, analysis, replace(stage, layout=layout, summed=()), rank, 0, None)

    def counts(self, value: Value) -> bool:
        """Whether this rank's term counts: of ranks with equal terms the first one's does."""
        outputs = [choice.outputs[value[1]] for choice in self._choices(value)]
        return all(at == 0 or p.kind == "P" for at, p in zip(self.coordinates[1:], outputs[1:], strict=True))

    def program(self, values: Sequence[Value]) -> LocalProgram:
        """The program that returns the terms of these sums."""
        main: Emitter = self.emitters[MICRO_BATCH]
        for value in values:
            op, choices = self.analysis.ops[value[0]], self._choices(value)
            inputs = [tuple(c.inputs[i] for c in choices) for i in range(len(op.operands))]
            outputs = [tuple(c.outputs[i] for c in choices) for i in range(len(choices[0].outputs))]
            args = [self._floating(v, want, MICRO_BATCH) for v, want in zip(op.operands, inputs, strict=True)]
            self._call(main, op, choices, args, inputs, outputs)
            main.outputs.append(main.env[value, outputs[value[1]]])
        constant, step, micro_batch = (emitter.finish() for emitter in self.emitters)
        program = LocalProgram(constant=constant, step=step, micro_batch=micro_batch)
        return at_micro_batch(program, self.stage, self.rank, 0)

    def _choices(self, value: Value) -> list[Choice]:
        """How the sum is computed on each axis: in time by rows, elsewhere as stages cut the same inputs."""
        analysis = self.analysis
        found = [_choice(analysis, value, analysis.batch_factor)]
        leaves = _leaves(self.captured, analysis, value)
        for axis in range(1, len(self.coordinates)):
            factors = dict.fromkeys(f for leaf in leaves for f in self._cuts.get((axis, leaf), ()))
            ways = (_choice(analysis, value, factor) for factor in factors)
            found.append(next((way for way in ways if way is not None), analysis.choices[value[0]][0]))
        return [choice for choice in found if choice is not None]

    @cached_property
    def _cuts(self) -> dict[tuple[int, fx.Node], dict[int, None]]:
        """The axis factors along which operators of the stage read what is computed of an input, by mesh axis."""
        found: dict[tuple[int, fx.Node], dict[int, None]] = {}
        for node in self.stage.nodes:
            for i, operand in enumerate(self.analysis.ops[node].operands):
                if operand[0] in self.pinned or operand in self.stage.stored:
                    continue
                leaves = _leaves(self.captured, self.analysis, operand)
                for axis, choice in enumerate(self.stage.choices[node]):
                    if choice.inputs[i].kind == "S":
                        for leaf in leaves:
                            found.setdefault((axis, leaf), {})[choice.inputs[i].factor] = None
        return found

    def _choice_for(self, node: fx.Node, index: int, axis: int, placement: Placement) -> Choice | None:
        choice = super()._choice_for(node, index, axis, placement)
        return choice if choice is None or choice.form in _FORMS else None

    def _taken(self, emitter: Emitter, value: Value, want: Placements, axis: int) -> fx.Node:
        if want[0].kind == "S":  # rows of several micro-batches are no part that could be taken
            raise _NotInPartsError(value[0].name)
        return super()._taken(emitter, value, want, axis)
