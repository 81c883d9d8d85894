"""Folding of repeated layers: a placed stage without most of its equal consecutive layers.

A dry run of a stage with forty equal layers does the same forty times. The folded stage keeps the first and the last
three layers of a run of equal ones, and the third last reads what the first makes. `whale.predict.replay` repeats what
the third last does for each layer that is left out.

Layers are equal if their operators are, one by one, in arguments, shapes, axis factors (up to a renaming within a
layer) and placements. They are left out only if every operator of a layer reads values of its own layer, the one before
it, values from before the run that all layers read, parameters that no other layer reads, or floating values that are
derived alike in each layer, which remain; and if what comes after the run reads of its layers only the last and the
first. Everything else stays as it is: layers that differ in size or share parameters are not folded.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from torch import fx

from whale.graph.captured import Captured
from whale.graph.origins import layer_of
from whale.graph.values import Value, needs_grad, output_shapes, value_tensor
from whale.ir.placement import Placement
from whale.strategies.analysis import Analysis
from whale.strategies.lowering import PlacedStage
from whale.strategies.rules.registry import Op

__all__ = ["Fold", "Kinds", "folded"]

_KEPT = 4
"""Layers of a run that stay: the first, two whose equality proves that the omitted ones do the same, and the last."""


@dataclass(frozen=True, kw_only=True)
class Fold:
    """A run of equal layers without some of them.

    Attributes:
        starts: the first operators of the layers that stay, and of what follows; None at the end of the stage.
        omitted: number of layers that are left out.
        parameters: for each parameter of the third last layer, those of the omitted layers, the last layer first.
    """

    starts: tuple[fx.Node | None, ...]
    omitted: int
    parameters: Mapping[Value, tuple[Value, ...]]


class Kinds:
    """Numbers of operators, equal for those with equal arguments, shapes and axis factors up to their names; for all
    plans of one captured graph, with the cached ``folds`` of their stages."""

    def __init__(self, captured: Captured, analysis: Analysis) -> None:
        self.captured, self.analysis = captured, analysis
        self.folds: dict[object, tuple[frozenset[fx.Node], dict[fx.Node, Op], tuple[Fold, ...]]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[fx.Node, tuple[int, tuple[int, ...]]] = {}

    def of(self, node: fx.Node) -> tuple[int, tuple[int, ...]]:
        """The number of an operator, and its axis factors in order of appearance."""
        if node not in self._known:
            factors: dict[int, int] = {}
            op = self.analysis.ops[node]
            values = [*op.operands, *((node, i) for i, _ in enumerate(output_shapes(node)))]
            token = (
                node.target,
                _token(node.args),
                _token(node.kwargs),
                node.meta.get("mask"),
                tuple(self._value(value, factors) for value in values),
            )
            self._known[node] = self._numbers.setdefault(token, len(self._numbers)), tuple(factors)
        return self._known[node]

    def _value(self, value: Value, factors: dict[int, int]) -> Hashable:
        if value not in self.analysis.dims:
            return None
        dims = tuple(tuple(self._factor(a, factors) for a in self._flat(dim)) for dim in self.analysis.dims[value])
        x = value_tensor(value)
        return value[1], value[0].op, x.dtype, tuple(x.shape), x.stride(), needs_grad(value), dims

    def _flat(self, dim: Sequence[int]) -> list[int]:
        return self.analysis.factors.flat(dim)

    def _factor(self, factor: int, factors: dict[int, int]) -> Hashable:
        number = factors.setdefault(factor, len(factors))
        parts = self.analysis.factors.parts(factor)
        inside = tuple(self._factor(a, factors) for part in parts for a in self._flat([part])) if parts else ()
        return number, self.analysis.factors.size(factor), inside

    def derived_alike(self, v: Value, w: Value) -> Iterator[tuple[fx.Node, fx.Node]] | None:
        """Pairs of the operators that derive two floating values, in the same way except for names of buffers; None if
        they are derived differently."""
        if v == w:
            return iter(())
        if v[0].op == w[0].op == "placeholder":
            return iter(()) if self._buffer(v) is not None and self._buffer(v) == self._buffer(w) else None
        ops = self.analysis.ops
        if v[0] not in ops or w[0] not in ops or v[1] != w[1] or self.of(v[0])[0] != self.of(w[0])[0]:
            return None
        inner = [self.derived_alike(a, b) for a, b in zip(ops[v[0]].operands, ops[w[0]].operands, strict=True)]
        return None if None in inner else chain([(v[0], w[0])], *(pairs for pairs in inner if pairs))

    def _buffer(self, value: Value) -> Hashable:
        """Description of a buffer that no step changes, or of a constant; None for other values."""
        name = value[0].name
        kept = name in self.captured.constants or self.captured.buffers.get(name, "") not in {
            "",
            *self.captured.mutated,
        }
        return self._value(value, {}) if kept else None

    def placed(self, stage: PlacedStage, node: fx.Node) -> int:
        """The number of an operator together with its placements in a stage."""
        number, factors = self.of(node)
        place = {factor: i for i, factor in enumerate(factors)}

        def tokens(placements: Sequence[Placement]) -> Hashable:
            return tuple([(p.kind, p.dim, place.get(p.factor, -2 - p.factor)) for p in placements])

        made = tuple([(c.form, tokens(c.inputs), tokens(c.outputs)) for c in stage.choices[node]])
        stored = tuple([tokens(stage.stored.get(v, ())) for v in self.analysis.ops[node].operands])
        return self._numbers.setdefault((number, made, stored), len(self._numbers))


def folded(kinds: Kinds, stage: PlacedStage) -> tuple[PlacedStage, dict[fx.Node, Op], tuple[Fold, ...]]:
    """Fold a stage.

    Returns the stage with the omitted operators, the operators that read another value instead, and the runs that were
    folded, in order.
    """
    if stage.origin not in kinds.folds:
        numbers = np.array([kinds.placed(stage, node) for node in stage.nodes])
        search = _Search(kinds, stage, numbers)
        runs = search.runs(0, len(stage.nodes))
        changed = {node: op for run in runs for node, op in search.rewired(run).items()}
        omitted = frozenset(node for run in runs for node in stage.nodes[run.at(1) : run.at(run.count - 3)])
        kinds.folds[stage.origin] = omitted, changed, tuple(map(search.fold, runs))
    omitted, changed, folds = kinds.folds[stage.origin]
    return replace(stage, omitted=omitted), changed, folds


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Equal layers of a stage: the position of the first, the operators of one, and their number."""

    start: int
    length: int
    count: int

    def at(self, layer: int) -> int:
        """Position of the first operator of a layer."""
        return self.start + layer * self.length

    @property
    def stop(self) -> int:
        """Position of what follows."""
        return self.at(self.count)

    @property
    def saved(self) -> int:
        """Operators that are left out."""
        return (self.count - _KEPT) * self.length


class _Search:
    """The runs of equal layers of one stage."""

    def __init__(self, kinds: Kinds, stage: PlacedStage, numbers: np.ndarray) -> None:
        self.kinds, self.stage, self.numbers, self.nodes = kinds, stage, numbers, stage.nodes
        self.operands = [kinds.analysis.ops[node].operands for node in self.nodes]
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.reader: dict[Value, int] = {}
        for i, values in enumerate(self.operands):
            for value in values:
                self.reader.setdefault(value, i)
        self.leaving = [*stage.sent, *stage.mutated.values(), *([] if stage.loss is None else [stage.loss])]

    def runs(self, start: int, stop: int) -> list[_Run]:
        """The runs between two positions that leave out the most, in order."""
        best: _Run | None = None
        for hoped, length in self._lengths(start, stop):
            if best is not None and hoped <= best.saved:
                break
            run = self._longest(start, stop, length)
            if run is not None and run.saved > (best.saved if best else 0) and self._is_sound(run):
                best = run
        return [] if best is None else [*self.runs(start, best.start), best, *self.runs(best.stop, stop)]

    def _lengths(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Lengths of a layer, by the operators that they would leave out at most."""
        last: dict[int, int] = {}
        distances: dict[int, None] = {}
        for i in range(start, stop):
            number = int(self.numbers[i])
            if number in last:
                distances[i - last[number]] = None
            last[number] = i
        found = []
        for length in distances:
            first, equal = _longest(self.numbers[start : stop - length] == self.numbers[start + length : stop])
            run = _Run(start=first, length=length, count=equal // length + 1)
            if run.count > _KEPT:
                found.append((run.saved, length))
        return sorted(found, key=lambda one: (-one[0], one[1]))

    def _longest(self, start: int, stop: int, length: int) -> _Run | None:
        equal = self.numbers[start : stop - length] == self.numbers[start + length : stop]
        for i in np.flatnonzero(equal):
            equal[i] = self._alike(start + int(i), length)
        first, extent = _longest(equal)
        # Regions of recompute are layers: a value that leaves one is kept, so that no layer is spliced within one.
        later = next((skipped for skipped in range(length) if self._begins_layer(start + first + skipped)), 0)
        run = _Run(start=start + first + later, length=length, count=(extent - later) // length + 1)
        return run if run.count > _KEPT else None

    def _begins_layer(self, i: int) -> bool:
        """Whether an operator is the first of a layer of the model."""
        own = layer_of(self.nodes[i])
        return bool(own) and (i == 0 or layer_of(self.nodes[i - 1]) != own)

    def _alike(self, i: int, length: int) -> bool:
        """Whether the operator one layer later reads the same, or what is as much later."""
        return all(
            v == w
            or self._moved(v, w) == length
            or (self._is_floating(v) and self._is_floating(w) and self.kinds.derived_alike(v, w) is not None)
            for v, w in zip(*self._pair(i, length), strict=True)
        )

    def _pair(self, i: int, length: int) -> tuple[list[Value], list[Value]]:
        return self.operands[i], self.operands[i + length]

    def _moved(self, v: Value, w: Value) -> int | None:
        """Operators between two values, or between the first that read two parameters."""
        if v[0] in self.position and w[0] in self.position:
            return self.position[w[0]] - self.position[v[0]] if v[1] == w[1] else None
        if self._is_parameter(v) and self._is_parameter(w):
            return self.reader[w] - self.reader[v]
        return None

    def _is_floating(self, value: Value) -> bool:
        return value[0] not in self.position and value not in self.stage.stored

    def _is_sound(self, run: _Run) -> bool:
        """Whether leaving layers of a run out changes nothing for the operators that stay."""
        for layer in range(run.count):
            renamed: dict[int, int] = {}
            for i in range(run.at(layer), run.at(layer + 1)):
                if not all(self._is_near(run, layer, value) for value in self.operands[i]):
                    return False
                later = self._factors(i, run.length) if layer + 1 < run.count else ()
                if any(renamed.setdefault(a, b) != b for a, b in later):
                    return False
            if len(set(renamed.values())) < len(renamed):
                return False
        behind = (value for values in self.operands[run.stop :] for value in values)
        inside = range(run.at(1), run.at(run.count - 1))
        if any(self._made(value) in inside for value in (*behind, *self.leaving)):
            return False
        return all(self._cut_alike(run, v, w) for v, w in self._renamed(run).items())

    def _factors(self, i: int, length: int) -> Iterator[tuple[int, int]]:
        """Pairs of axis factors of an operator, with those that derive its floating operands, and of the same one layer
        later."""
        pairs = [(self.nodes[i], self.nodes[i + length])]
        for v, w in zip(*self._pair(i, length), strict=True):
            if self._is_floating(v):
                pairs += self.kinds.derived_alike(v, w) or ()
        for one, other in pairs:
            yield from zip(self.kinds.of(one)[1], self.kinds.of(other)[1], strict=True)

    def _cut_alike(self, run: _Run, v: Value, w: Value) -> bool:
        """Whether a value that the third last layer reads is cut along no factor that it does not share with the one
        that it reads instead."""
        factors, dims = self.kinds.analysis.factors, self.kinds.analysis.dims
        unlike: set[int] = set()
        for one, other in zip(dims[v], dims[w], strict=True):
            pairs = list(zip(factors.flat(one), factors.flat(other), strict=True))
            unlike.update(factor for pair in pairs for factor in pair if pair[0] != pair[1])
        placed = [choice.outputs[x[1]] for x in (v, w) for choice in self.stage.choices[x[0]]]
        for i in range(run.at(run.count - 3), run.at(run.count - 2)):
            for k, value in enumerate(self.operands[i]):
                placed += [choice.inputs[k] for choice in self.stage.choices[self.nodes[i]] if value == v]
        return not any(placement.factor in unlike for placement in placed)

    def _is_near(self, run: _Run, layer: int, value: Value) -> bool:
        """Whether a layer may read a value: its own, one of the layer before, or one that exists before the run."""
        if value[0] in self.position:
            at = self.position[value[0]]
            return at < run.start or at >= run.at(layer - 1) or layer == 0
        return not self._is_parameter(value) or not run.start <= self.reader[value] < run.at(layer)

    def _made(self, value: Value) -> int:
        """Position at which a value is made, or a parameter first read; -1 for others."""
        return self.reader[value] if self._is_parameter(value) else self.position.get(value[0], -1)

    def _is_parameter(self, value: Value) -> bool:
        return value in self.stage.stored and value[0].op == "placeholder"

    def _renamed(self, run: _Run) -> dict[Value, Value]:
        """For each value of the last omitted layer that the next one reads, that of the first layer."""
        moved = run.saved
        inside = range(run.at(run.count - _KEPT), run.at(run.count - _KEPT + 1))
        values = (v for i in range(inside.stop, inside.stop + run.length) for v in self.operands[i])
        return {
            value: (self.nodes[self.position[value[0]] - moved], value[1])
            for value in values
            if self.position.get(value[0], -1) in inside
        }

    def rewired(self, run: _Run) -> dict[fx.Node, Op]:
        """The operators of the third last layer that read values of the first instead."""
        renamed, found = self._renamed(run), {}
        for i in range(run.at(run.count - 3), run.at(run.count - 2)):
            if any(value in renamed for value in self.operands[i]):
                op = copy(self.kinds.analysis.ops[self.nodes[i]])
                op.operands = [renamed.get(value, value) for value in op.operands]
                found[self.nodes[i]] = op
        return found

    def fold(self, run: _Run) -> Fold:
        """Describe what is left out."""
        layers = (0, *range(run.count - 3, run.count + 1))
        starts = tuple(self.nodes[at] if (at := run.at(layer)) < len(self.nodes) else None for layer in layers)
        parameters = {
            value: tuple(self.operands[i - back * run.length][k] for back in range(1, run.count - _KEPT + 1))
            for i in range(run.at(run.count - 3), run.at(run.count - 2))
            for k, value in enumerate(self.operands[i])
            if self._is_parameter(value) and self.reader[value] >= run.start
        }
        return Fold(starts=starts, omitted=run.count - _KEPT, parameters=parameters)


def _longest(equal: np.ndarray) -> tuple[int, int]:
    """Start and length of the longest run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], equal.astype(np.int8), [0]))))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    best = int(lengths.argmax())
    return int(edges[2 * best]), int(lengths[best])


def _token(x: Any) -> Hashable:
    """Arguments without the values that they name."""
    if isinstance(x, fx.Node):
        return fx.Node
    if isinstance(x, list | tuple):
        return tuple(map(_token, x))
    if isinstance(x, Mapping):
        return tuple((key, _token(value)) for key, value in x.items())
    return type(x), x
