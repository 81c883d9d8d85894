"""Step time by the formulas of Sailor's simulator (`Strict`), and by a corrected version of them (`Physical`).

A plan is a chain of stages whose data slices have rows of their own; Sailor's plans are those in which all have as
many. A micro-batch on a stage takes as long as its slowest slice, and messages are not hidden::

    T = (m - 1) max(computation + messages) + sum(computation + messages) + update + reduction

with m = ceil(batch / rows of a micro-batch). `Strict` is Sailor to the letter, where it is defined: a first stage pays
one message (two if there are more than three stages), a last one two, the others two; a gradient is as large as what
the stage's first layer puts out (for a stage of the head alone: the logits); all messages cross nodes; a stage's
gradients are reduced in buckets by one ring over all its slices on the worst link between neighbours, with the
parameters of tensor degree 1 divided by the smallest degree; stages reduce side by side. `Physical` differs in links:
a gradient is as large as what was received, messages within a node use its own links, gradients are as many as the
slice has and are summed within each node before one ring connects the nodes, whose adapter all devices share.

What both add is natural: rows that were not measured lie on the line between those that were, and a last micro-batch
that is not full takes what its rows take. (`whole` counts it as a full one, as Sailor does.) Times and curves are those
of an imported profile; nothing is known of where plans come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil, inf, log10

from whale.ir.cluster import Cluster
from whale.ir.profile import LayerKind, LinkCurve, ModelProfile
from whale.ir.shares import shares

ELEMENT_BYTES = 4
STATE_BYTES = 24
"""For each parameter: weight, gradient, two moments of Adam, a communication buffer and DeepSpeed's copy, 4 each."""
PROCESS_BYTES = {False: 2e9, True: 3e9}
"""Bytes of a process, alone or in a tensor group."""
BUCKET_BYTES = 500_000_000
"""Bytes of gradients that are reduced at a time (DeepSpeed's default)."""
SMALLEST_BYTES = 50e3
"""Below which the fitted bandwidths fall to nothing, and under zero: smaller messages take as long."""
MOST_CONNECTIONS = 4
"""Devices of a node that a curve between nodes was measured with, at most."""

Times = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A model slice of a stage: the ranks of a tensor group, and its rows of a micro-batch."""

    ranks: tuple[int, ...]
    rows: int


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Layers [first, last) on data slices, in the order in which they divide the rows."""

    first: int
    last: int
    slices: tuple[Slice, ...]

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return sum(one.rows for one in self.slices)


@dataclass(frozen=True, kw_only=True)
class Score:
    """Seconds of a step and what they are made of.

    ``straggler`` is of a full micro-batch on the slowest stage; ``memory`` is the fullest device's need as a share of
    what it has.
    """

    seconds: float
    micro_batches: int
    straggler: float
    reduction: float
    update: float
    memory: float

    @property
    def per_second(self) -> float:
        """Steps per second; 0 where the plan does not fit."""
        return 1 / self.seconds if self.memory <= 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class Strict:
    """Sailor's formulas."""

    profile: ModelProfile
    cluster: Cluster
    batch: int

    def score(self, stages: Sequence[Stage], *, whole: bool = False) -> Score:
        """The score of a plan; *whole*: the last micro-batch counts as full.

        Raises:
            ValueError: the stages do not cover the model, or have unlike numbers of rows.
        """
        rows = stages[0].rows
        if any(stage.rows != rows for stage in stages) or not rows:
            raise ValueError(f"the stages divide {[stage.rows for stage in stages]} rows")
        ends = [0, *(stage.last for stage in stages)]
        if [stage.first for stage in stages] != ends[:-1] or ends[-1] != len(self.profile.layers):
            raise ValueError("the stages are not a chain of all layers")
        num = ceil(self.batch / rows)
        rest = self.batch - (num - 1) * rows
        full = self._micro_batch(stages, [tuple(one.rows for one in stage.slices) for stage in stages])
        last = full
        if rest < rows and not whole:
            parts = [shares(rest, [one.rows for one in stage.slices]) for stage in stages]
            last = self._micro_batch(stages, parts)
        pipeline = sum(full) + max(full) * (num - 2) + max(last) if num > 1 else sum(last)
        reduction = max(self.reduction(stage) for stage in stages)
        update = max(self._update(one) for stage in stages for one in stage.slices)
        return Score(
            seconds=pipeline + update + reduction,
            micro_batches=num,
            straggler=max(full),
            reduction=reduction,
            update=update,
            memory=max(self._memory(stage, len(stages) - index) for index, stage in enumerate(stages)),
        )

    # Computation

    def _micro_batch(self, stages: Sequence[Stage], rows: Sequence[Sequence[int]]) -> list[float]:
        """Seconds of computation and messages on each stage."""
        found = []
        last = len(stages) - 1
        for index, stage in enumerate(stages):
            computing = max(self._computation(stage, *one) for one in zip(stage.slices, rows[index], strict=True))
            forward = self._messages(stages, rows, index, index + 1) if index < last else 0.0
            backward = self._messages(stages, rows, index, index - 1) if index else 0.0
            if index == last:
                backward *= 2
            elif index == 0 and len(stages) > 3:
                forward *= 2
            found.append(computing + forward + backward)
        return found

    def _computation(self, stage: Stage, part: Slice, rows: int) -> float:
        if not rows:
            return 0.0
        kinds = self.profile.layers[stage.first : stage.last]
        return max(
            sum(kinds.count(kind) * sum(self.times(kind, name, len(part.ranks), rows)[:2]) for kind in set(kinds))
            for name in self._types(part)
        )

    def _update(self, part: Slice) -> float:
        """Update time of the whole model, as Sailor measured it, for a stage of any layers."""
        kinds, degree = self.profile.layers, len(part.ranks)
        return max(
            sum(kinds.count(kind) * self.times(kind, name, degree, part.rows)[2] for kind in set(kinds))
            for name in self._types(part)
        )

    def times(self, kind: int, type_: str, degree: int, rows: int) -> Times:
        """Forward, backward and update of a layer: as measured, or on the line between the nearest; else endless."""
        key = (kind, type_, degree, rows)
        if key not in self._memo:
            self._memo[key] = _interpolated(self.profile.kinds[kind], type_, degree, rows)
        return self._memo[key]

    @cached_property
    def _memo(self) -> dict[tuple[int, str, int, int], Times]:
        return {}

    def _types(self, part: Slice) -> set[str]:
        return {self.cluster.devices[rank].type.name for rank in part.ranks}

    def _type(self, part: Slice) -> str:
        return self.cluster.devices[part.ranks[0]].type.name

    # Memory

    def _memory(self, stage: Stage, kept: int) -> float:
        """The largest share of a device's memory that is needed, with activations of *kept* micro-batches."""
        most = 0.0
        for degree, rows, capacity in {
            (len(one.ranks), one.rows, min(self.cluster.devices[rank].memory_bytes for rank in one.ranks))
            for one in stage.slices
        }:
            parameters, activations = self._amounts(stage, degree)
            needed = STATE_BYTES * parameters + ELEMENT_BYTES * activations * rows * kept + PROCESS_BYTES[degree > 1]
            most = max(most, needed / capacity)
        return most

    def _amounts(self, stage: Stage, degree: int) -> tuple[float, float]:
        """Elements on a device: parameters, and what a row keeps."""
        parameters = activations = 0.0
        for position in self.profile.layers[stage.first : stage.last]:
            variant = next(v for v in self.profile.kinds[position].variants if v.tensor_degree == degree)
            parameters += variant.parameters
            activations += sum(value.size.elements(1) for value in variant.saved)
        return parameters, activations

    # Messages

    def _messages(self, stages: Sequence[Stage], rows: Sequence[Sequence[int]], source: int, target: int) -> float:
        """Time of the slowest replica of a stage to send its rows to the next stage's replicas."""
        senders, receivers = stages[source], stages[target]
        layer = self.sent_layer(senders, receivers)
        row_bytes = self.profile.kinds[self.profile.layers[layer]].output.total(1, ELEMENT_BYTES)
        return max(
            self.message(senders.slices[one], receivers.slices[other], row_bytes * rows[source][one])
            for one, other in _overlaps(rows[source], rows[target])
        )

    def sent_layer(self, source: Stage, target: Stage) -> int:
        """The layer whose output is as large as the message."""
        return source.last - 1 if source.first < target.first else source.first

    def message(self, source: Slice, target: Slice, num_bytes: float) -> float:
        """Seconds from a tensor group to another."""
        return _seconds(self._curve(source, len(source.ranks), target, len(target.ranks)), num_bytes)

    def reduction(self, stage: Stage) -> float:
        """Seconds to sum a stage's gradients over its slices."""
        degree = min(MOST_CONNECTIONS, *(len(one.ranks) for one in stage.slices))
        num_bytes = self._amounts(stage, 1)[0] * ELEMENT_BYTES / degree
        return self.ring([self._type(one) for one in stage.slices], num_bytes)

    def ring(self, types: Sequence[str], num_bytes: float) -> float:
        """Seconds of a ring over devices of these types in this order, as slow as its slowest link."""
        curves = {self.curves["nodes", pair[0], 1, pair[1], 1] for pair in pairwise(types)}
        return max((_ring(curve, len(types), num_bytes) for curve in curves), default=0.0)

    def _curve(self, source: Slice, devices: int, target: Slice, target_devices: int) -> LinkCurve:
        ends = (
            (self._type(source), min(devices, MOST_CONNECTIONS)),
            (
                self._type(target),
                min(target_devices, MOST_CONNECTIONS),
            ),
        )
        return self.curves["nodes", *ends[0], *ends[1]]

    @cached_property
    def curves(self) -> Mapping[tuple[str, str, int, str, int], LinkCurve]:
        """By where, source, its devices, target, its devices."""
        return {
            (curve.within, curve.source, curve.devices, curve.target, curve.target_devices or curve.devices): curve
            for curve in self.profile.links
        }


@dataclass(frozen=True, kw_only=True)
class Physical(Strict):
    """The same step over links as they are."""

    def sent_layer(self, source: Stage, target: Stage) -> int:
        return min(source.last, target.last) - 1

    def message(self, source: Slice, target: Slice, num_bytes: float) -> float:
        if self._node(source.ranks[0]) == self._node(target.ranks[0]):
            return _seconds(self._within(self._type(source), 2), num_bytes)
        return super().message(source, target, num_bytes)

    def reduction(self, stage: Stage) -> float:
        if len(stage.slices) < 2:
            return 0.0
        by_node: dict[str, list[int]] = {}
        for one in stage.slices:
            for node in {self._node(rank) for rank in one.ranks}:
                by_node.setdefault(node, []).append(len(one.ranks))
        degree = min(min(degrees) for degrees in by_node.values())
        num_bytes = (
            max(self._amounts(stage, d)[0] for d in {d for all_ in by_node.values() for d in all_}) * ELEMENT_BYTES
        )
        most = max(len(degrees) for degrees in by_node.values())
        seconds = 0.0
        if most > 1:
            types = {self._type(one) for one in stage.slices}
            seconds += max(2 * (most - 1) * _seconds(self._within(name, most), num_bytes / most) for name in types)
        if len(by_node) > 1:
            devices = min(MOST_CONNECTIONS, max(len(node.ranks) for node in self.cluster.nodes))
            used = min(devices, most * degree)
            names = {self._type(one) for one in stage.slices}
            pairs = {(a, b) for a in names for b in names}
            # All devices of the node reduce at once, through its one adapter: this stage gets its devices' share.
            whole = num_bytes * degree * devices / used
            seconds += max(
                _ring(self.curves["nodes", a, devices, b, devices], len(by_node), whole, degree * devices // used)
                for a, b in pairs
            )
        return seconds

    def _within(self, type_: str, devices: int) -> LinkCurve:
        known = {key[2]: curve for key, curve in self.curves.items() if key[:2] == ("node", type_)}
        return known[min(known, key=lambda number: abs(number - devices))]

    def _node(self, rank: int) -> str:
        return self.cluster.devices[rank].node


def _interpolated(kind: LayerKind, type_: str, degree: int, rows: int) -> Times:
    for times in kind.measured:
        if (times.device_type, times.tensor_degree) == (type_, degree):
            values = list(zip(times.forward, times.backward, times.update, strict=True))
            if rows in times.rows:
                return values[times.rows.index(rows)]
            for (below, low), (above, high) in zip(
                zip(times.rows, values, strict=True), zip(times.rows[1:], values[1:], strict=True), strict=False
            ):
                if below < rows < above:
                    share = (rows - below) / (above - below)
                    return tuple(a + (b - a) * share for a, b in zip(low, high, strict=True))
    return (inf, inf, inf)


def _seconds(curve: LinkCurve, num_bytes: float) -> float:
    size = max(num_bytes, SMALLEST_BYTES)
    rate = 0.0
    for coefficient in curve.coefficients:
        rate = rate * log10(size) + coefficient
    return size / 1e9 / rate if num_bytes else 0.0


def _ring(curve: LinkCurve, num: int, num_bytes: float, parallel: int = 1) -> float:
    """An all-reduce of *num* members, in buckets; of *parallel* rings side by side that share the curve."""
    full, rest = divmod(num_bytes, BUCKET_BYTES * parallel)
    return 2 * (num - 1) * (full * _seconds(curve, BUCKET_BYTES * parallel / num) + _seconds(curve, rest / num))


def _overlaps(rows: Sequence[int], others: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of slices that have rows in common, where both divide the same rows in order.

    >>> list(_overlaps((2, 2), (1, 3)))
    [(0, 0), (0, 1), (1, 1)]
    """
    one = other = 0
    left, right = rows[0], others[0]
    while True:
        taken = min(left, right)
        if taken:
            yield one, other
        left, right = left - taken, right - taken
        if not left:
            one += 1
            if one == len(rows):
                return
            left = rows[one]
        if not right and other + 1 < len(others):
            other += 1
            right = others[other]


def uniform(
    layers: Sequence[tuple[int, int]], ranks: Sequence[int], *, data: int, tensor: int, rows: int
) -> tuple[Stage, ...]:
    """A plan as planners without mixed devices make it: the same degrees and rows in every stage."""
    groups = [tuple(ranks[start : start + tensor]) for start in range(0, len(layers) * data * tensor, tensor)]
    return tuple(
        Stage(first=a, last=b, slices=tuple(Slice(ranks=g, rows=rows) for g in groups[i * data : (i + 1) * data]))
        for i, (a, b) in enumerate(layers)
    )
