"""A model that is traced with another batch, placed as another compilation is: both differ in sizes only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from whale.compile.compilation import Compilation, placement_of
from whale.compile.exchanges import edges_between, sums_of_gradients
from whale.compile.trace import Traced
from whale.errors import UsageError
from whale.graph.values import Value
from whale.strategies.analysis import Choice
from whale.strategies.layout import Layout, Placements
from whale.strategies.lowering import PlacedStage
from whale.strategies.placing import layout_axes

__all__ = ["placed_like"]


def placed_like(compilation: Compilation, traced: Traced, rows: Sequence[int]) -> Compilation | None:
    """The compilation of *traced* with the placements of another one.

    Args:
        compilation: of the same model in the same modes.
        traced: the model, for another batch.
        rows: of that batch in each micro-batch.

    Returns:
        None if the graphs have other operators, or an operator cannot be placed so.
    """
    nodes = list(compilation.captured.graph.nodes)
    others = list(traced.captured.graph.nodes)
    alike = [(n.op, n.target, n.name) for n in nodes] == [(n.op, n.target, n.name) for n in others]
    if not alike or len(rows) != len(compilation.rows):
        return None
    move = _Move(compilation, traced, dict(zip(nodes, others, strict=True)))
    try:
        stages = tuple(move.stage(stage, rows) for stage in compilation.stages)
    except (LookupError, UsageError):
        return None
    reduces, bucket_parameters = sums_of_gradients(
        traced.captured,
        stages,
        rows,
        compilation.cluster,
        compilation.gradient_dtype,
        of_one=compilation.step_in_backward,
    )
    return replace(
        compilation,
        traced=traced,
        partition=traced.annotated,
        stages=stages,
        edges=edges_between(traced.captured, stages, rows),
        rows=tuple(rows),
        reduces=reduces,
        bucket_parameters=bucket_parameters,
        _lowered={},
    )


class _Move:
    """From the nodes and axis factors of one graph to those of another.

    Raises:
        LookupError, UsageError: an operator or a parameter cannot be placed as in the first.
    """

    def __init__(self, compilation: Compilation, other: Traced, nodes: dict[fx.Node, fx.Node]) -> None:
        self._traced, self._other, self._nodes = compilation.traced, other, nodes
        self._stored = compilation.stored_forms()
        self._factors: dict[int, int] = {-1: -1}

    def stage(self, stage: PlacedStage, rows: Sequence[int]) -> PlacedStage:
        """A stage over the other graph."""
        choices = {self._nodes[n]: tuple(self._choice(n, choice) for choice in own) for n, own in stage.choices.items()}
        mirrored = frozenset((axis, self._factors[factor]) for axis, factor in stage.layout.mirrored)
        return replace(
            stage,
            layout=Layout(self._other.analysis, layout_axes(stage.mesh, rows), mirrored),
            nodes=tuple(self._nodes[node] for node in stage.nodes),
            choices=choices,
            stored={self._value(v): self._held(stage.index, v, placed) for v, placed in stage.stored.items()},
            received=tuple(map(self._value, stage.received)),
            sent={self._value(value): self._placements(placed) for value, placed in stage.sent.items()},
            loss=None if stage.loss is None else self._value(stage.loss),
            loss_placements=self._placements(stage.loss_placements),
            mutated={name: self._value(value) for name, value in stage.mutated.items()},
            returned=tuple((i, self._value(value), self._placements(placed)) for i, value, placed in stage.returned),
            omitted=frozenset(self._nodes[node] for node in stage.omitted),
            summed=tuple(map(self._value, stage.summed)),
            row_axes={self._value(value): axes for value, axes in stage.row_axes.items()},
        )

    def _value(self, value: Value) -> Value:
        return self._nodes[value[0]], value[1]

    def _placements(self, placements: Placements) -> Placements:
        return tuple(p._replace(factor=self._factors[p.factor]) for p in placements)

    def _held(self, stage: int, value: Value, placements: Placements) -> Placements:
        """The placements of a received value, or of a parameter, which may be stored as no operator reads it."""
        name = self._traced.captured.parameters.get(value[0].name)
        if name is None or all(p.factor in self._factors for p in placements):
            return self._placements(placements)
        other = self._value(value)
        return tuple(placement_of(self._other.analysis, other, form) for form in self._stored[stage, name])

    def _choice(self, node: fx.Node, choice: Choice) -> Choice:
        """The other node's choice for this one, and what the factors of this are there."""
        if max(_factors(choice)) < 0:
            return choice
        own = [one for one in self._traced.analysis.choices[node] if _form(one) == _form(choice)]
        others = [one for one in self._other.analysis.choices[self._nodes[node]] if _form(one) == _form(choice)]
        known = [self._factors.get(factor) for factor in _factors(choice)]
        fitting = [
            one
            for one in others
            if all(there in (None, other) for there, other in zip(known, _factors(one), strict=True))
        ]
        if len(fitting) != 1:
            fitting = [others[own.index(choice)]] if len(own) == len(others) and choice in own else []
        for found in fitting:
            for one, other in zip(_factors(choice), _factors(found), strict=True):
                if self._factors.setdefault(one, other) != other:
                    raise LookupError(node.name)
            return found
        raise LookupError(node.name)


def _factors(choice: Choice) -> list[int]:
    return [choice.factor, *(p.factor for p in (*choice.inputs, *choice.outputs))]


def _form(choice: Choice) -> tuple[object, ...]:
    """A choice without the names of its factors."""
    return choice.form, *((p.kind, p.dim) for p in (*choice.inputs, *choice.outputs))
