"""The partition of a chain of layers into pipeline stages, on groups of devices that may differ.

Objective: the least step time (M - 1) max_s c_s + sum_s c_s + o, or the least time of the slowest stage max_s c_s. c_s
is the time of stage s for one of M micro-batches: forwards and backwards of its layers, and the p2p time of its output
and of the gradient; o is the time once per step, to sum the gradients of tied layers in different stages. Constraints:
stages are contiguous and have at least one layer; stage s of P stores the state of its layers, the saved activations of
its micro-batches in flight (1F1B: min(P - s, M), so early stages need more) and the working memory of its largest
layer. Exact, by dynamic programming from the last stage, where the number in flight is known, to the first. This module
knows numbers only: no model, no cluster, and no schedule except the numbers in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np

from whale.errors import InfeasibleError, UsageError
from whale.ir.units import bytes_text
from whale.planner.advice import advised
from whale.planner.schedules.in_flight import in_flight

__all__ = [
    "Cut",
    "CutProblem",
    "Objective",
    "StageGroup",
    "Tie",
    "evenest_cut",
    "fastest_cut",
    "price",
]

Array = np.ndarray[Any, np.dtype[np.float64]]
Objective = Literal["step", "slowest"]
Send = Callable[[int, "StageGroup", "StageGroup"], float]

GAP = 1e-9
"""Relative difference below which two step times are equal."""


@dataclass(frozen=True, kw_only=True)
class StageGroup:
    """A group of devices that runs one stage, with the cost of every layer there; equal groups are interchangeable.

    Attributes:
        name: for messages.
        seconds: of each layer, forward and backward of a micro-batch, including collectives inside the group.
        fixed_bytes: of each layer on the group's fullest device: parameters, gradients, optimizer state.
        kept_bytes: saved activations of each layer there, for each micro-batch in flight.
        working_bytes: temporary bytes of each layer while it runs, beyond saved activations; empty for none.
        overhead_bytes: bytes in use before any layer (framework, buffers).
        capacity_bytes: of that device.
    """

    name: str
    seconds: tuple[float, ...]
    fixed_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    working_bytes: tuple[float, ...] = ()
    overhead_bytes: float = 0.0
    capacity_bytes: float = inf

    @cached_property
    def sums(self) -> tuple[Array, Array, Array, Array]:
        """Cost matrices of every possible stage [first layer, first layer of the next stage]: seconds, fixed bytes and
        saved bytes, infinite for empty stages; and the largest working memory of a layer."""
        working = self.working_bytes or (0.0,) * len(self.seconds)
        return _sums(self.seconds), _sums(self.fixed_bytes), _sums(self.kept_bytes), _maxima(working)


class Tie(NamedTuple):
    """Layers (positions) that share a parameter. A stage with several of them stores its ``fixed_bytes`` once; if they
    are in different stages, summing the copies' gradients takes ``seconds`` per step."""

    layers: tuple[int, ...]
    fixed_bytes: float
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CutProblem:
    """A partition problem: the groups, micro-batches and constraints.

    Attributes:
        groups: one for each stage, in the order of the pipeline.
        micro_batches: of a step.
        send: p2p seconds of a layer's (position) output from one group to another, and of its gradient.
        ties: layers that share parameters.
        in_flight: micro-batches in flight on each stage; None: as in 1F1B.
        starts: layers that must begin a stage.
    """

    groups: tuple[StageGroup, ...]
    micro_batches: int
    send: Send | None = None
    ties: tuple[Tie, ...] = ()
    in_flight: tuple[int, ...] | None = None
    starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.groups or self.micro_batches < 1:
            raise UsageError(
                f"a pipeline needs at least one group of devices and one micro-batch, not {len(self.groups)} and "
                f"{self.micro_batches}"
            )
        if self.in_flight is not None and len(self.in_flight) != len(self.groups):
            raise UsageError(f"{len(self.groups)} stages need as many numbers in flight, not {len(self.in_flight)}")
        for group in self.groups:
            lengths = {len(group.seconds), len(group.fixed_bytes), len(group.kept_bytes)}
            if lengths | {len(group.working_bytes or group.seconds)} != {self.num_layers}:
                raise UsageError(f"{group.name} must have a figure for each of {self.num_layers} layers")
        if self.num_layers < len(self.groups):
            raise InfeasibleError(
                f"{self.num_layers} layers do not make {len(self.groups)} stages; use at most {self.num_layers} stages"
            )

    @property
    def num_layers(self) -> int:
        """Layers of the chain."""
        return len(self.groups[0].seconds)

    def held(self) -> tuple[int, ...]:
        """Micro-batches in flight at each stage."""
        count = len(self.groups)
        return self.in_flight or tuple(in_flight("1f1b", count, stage, self.micro_batches) for stage in range(count))


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A partition of the chain into stages.

    Attributes:
        groups: in the order of the pipeline.
        starts: the first layer of each stage.
        seconds: of each stage and micro-batch, with its send.
        fullest_bytes: of each stage's fullest device.
        step_seconds: the objective.
    """

    groups: tuple[StageGroup, ...]
    starts: tuple[int, ...]
    seconds: tuple[float, ...]
    fullest_bytes: tuple[float, ...]
    step_seconds: float

    @property
    def fits(self) -> bool:
        """Whether every stage fits in its memory."""
        return all(need <= group.capacity_bytes for need, group in zip(self.fullest_bytes, self.groups, strict=True))


def fastest_cut(
    problem: CutProblem, objective: Objective = "step", *, remedies: Iterable[tuple[str, CutProblem]] = ()
) -> Cut:
    """Return the best partition for the groups in the given order.

    One dynamic program, O(P (L - P)^2), minimizes the slowest stage. Several minimize the step time: the sum under a
    bound on the slowest stage, for falling bounds, one for each point of the front of (slowest, sum) that could still
    win. Exact up to `GAP`.

    Args:
        problem: groups in the order of the pipeline.
        objective: ``step`` or ``slowest`` (ties go to the smaller sum).
        remedies: changes ("recompute='full'") with the changed problem, for the error message only.

    Raises:
        InfeasibleError: no partition fits; the message says what the fullest stage lacks in the partition that fills
            memory most evenly.

    >>> fast, slow = (StageGroup(name=n, seconds=(t,) * 6, fixed_bytes=(1,) * 6, kept_bytes=(1,) * 6) for n, t in
    ...               (("fast", 1.0), ("slow", 2.0)))
    >>> found = fastest_cut(CutProblem(groups=(slow, fast), micro_batches=8))
    >>> found.starts, found.seconds, found.step_seconds
    ((0, 2), (4.0, 4.0), 36.0)
    """
    tables = _Tables(problem)
    order = tuple(tables.kinds.index(group) for group in problem.groups)
    found = _best(tables, objective, lambda depth, counts: (order[-depth],))
    if found is None:
        raise _shortage(problem, remedies)
    return found


def price(problem: CutProblem, starts: Sequence[int]) -> Cut:
    """Return the cost of given cuts, whether they fit or not."""
    if len(starts) != len(problem.groups) or list(starts) != sorted(set(starts)) or starts[0] != 0:
        raise UsageError(f"the first layers of {len(problem.groups)} stages rise from 0, not {list(starts)}")
    if starts[-1] >= problem.num_layers:
        raise UsageError(f"a stage starts at layer {starts[-1]}, but there are {problem.num_layers}")
    tables = _Tables(problem)
    return _priced(tables, [tables.kinds.index(group) for group in problem.groups], starts)


# --- the stage from layer i to layer j, for all i and j
# ----------------------------------------------------------------------------------------------------------------------


class _Tables:
    """Seconds and bytes of every possible stage, as matrices [first layer, first layer of the next stage]."""

    def __init__(self, problem: CutProblem) -> None:
        self.problem = problem
        self.kinds = list(dict.fromkeys(problem.groups))
        across = _across(problem.starts, problem.num_layers)
        self.seconds = [kind.sums[0] + across for kind in self.kinds]
        twice, self.once = _twice_and_once(problem.ties, problem.num_layers)
        self._fixed = [kind.sums[1] - twice + kind.overhead_bytes for kind in self.kinds]
        self._kept = [kind.sums[2] for kind in self.kinds]
        self._working = [kind.sums[3] for kind in self.kinds]
        self._send: dict[tuple[int, int], Array] = {}
        self._costs: dict[tuple[int, int, int], Array] = {}

    def sends(self, source: int, target: int) -> Array:
        """Seconds by the first layer of the next stage."""
        if (source, target) not in self._send:
            found, send = np.zeros(self.problem.num_layers + 1), self.problem.send
            if send is not None:
                pair = self.kinds[source], self.kinds[target]
                found[1:-1] = [send(layer, *pair) for layer in range(self.problem.num_layers - 1)]
            self._send[source, target] = found
        return self._send[source, target]

    def need(self, kind: int, in_flight: int, part: tuple[int, int]) -> float:
        """Bytes of a stage with the given number of micro-batches in flight."""
        return float(self._fixed[kind][part] + in_flight * self._kept[kind][part] + self._working[kind][part])

    def window(self, depth: int) -> tuple[slice, slice]:
        """Window of layers in which a stage may start, by its distance to the end, since every stage has a layer."""
        num_stages = len(self.problem.groups)
        low, width = num_stages - depth, self.problem.num_layers - num_stages + 1
        return slice(low, low + width), slice(low + 1, low + 1 + width)

    def bytes(self, kind: int, depth: int) -> Array:
        """Bytes of the stages in the window of the given distance to the end."""
        window, held = self.window(depth), self.problem.held()[-depth]
        return self._fixed[kind][window] + held * self._kept[kind][window] + self._working[kind][window]

    def costs(self, kind: int, next_kind: int, depth: int) -> Array:
        """Seconds of the stages in the window of the given distance to the end, before a stage of another kind (-1:
        none); infinite where a stage does not fit. Cached."""
        key = kind, next_kind, depth
        if key not in self._costs:
            window = self.window(depth)
            seconds = self.seconds[kind][window]
            if next_kind >= 0:
                seconds = seconds + self.sends(kind, next_kind)[window[1]]
            fits = self.bytes(kind, depth) <= self.kinds[kind].capacity_bytes
            self._costs[key] = np.where(fits, seconds, inf)
        return self._costs[key]


def _sums(values: Sequence[float]) -> Array:
    """Sums of values[i:j]; infinite for empty ranges."""
    upto = np.concatenate([[0.0], np.cumsum(np.array(values, dtype=float))])
    return np.where(np.tri(len(upto), dtype=bool), inf, np.maximum(upto[None, :] - upto[:, None], 0.0))


def _across(starts: Sequence[int], num_layers: int) -> Array:
    """Infinite where a stage would contain a layer that must begin a stage."""
    found = np.zeros((num_layers + 1,) * 2)
    for start in starts:
        found[:start, start + 1 :] = inf
    return found


def _maxima(values: Sequence[float]) -> Array:
    """Maxima of values[i:j]; 0 for empty ranges."""
    found = np.zeros((len(values) + 1,) * 2)
    found[:-1, 1:] = np.triu(np.broadcast_to(np.array(values, dtype=float), (len(values),) * 2))
    return np.maximum.accumulate(found, axis=1)


def _twice_and_once(ties: Sequence[Tie], num_layers: int) -> tuple[Array, Array]:
    """Bytes of tied layers that a stage counts more than once, and seconds once per step for ties between stages
    (charged to the stage that has the first of the layers but not all)."""
    firsts, nexts = np.arange(num_layers + 1)[:, None], np.arange(num_layers + 1)[None, :]
    twice, once = np.zeros((num_layers + 1,) * 2), np.zeros((num_layers + 1,) * 2)
    for tie in ties:
        members = sum(((firsts <= layer) & (layer < nexts)).astype(float) for layer in tie.layers)
        twice += tie.fixed_bytes * np.maximum(members - 1, 0)
        once += tie.seconds * ((firsts <= min(tie.layers)) & (min(tie.layers) < nexts) & (nexts <= max(tie.layers)))
    return twice, once


def _priced(tables: _Tables, kinds: Sequence[int], starts: Sequence[int]) -> Cut:
    """Evaluate a partition; *kinds* are the positions of its stages' groups in ``tables``."""
    parts = list(pairwise((*starts, tables.problem.num_layers)))
    seconds = [float(tables.seconds[kind][part]) for kind, part in zip(kinds, parts, strict=True)]
    for stage, (source, target) in enumerate(pairwise(kinds)):
        seconds[stage] += float(tables.sends(source, target)[starts[stage + 1]])
    held = tables.problem.held()
    once = sum(float(tables.once[part]) for part in parts)
    return Cut(
        groups=tuple(tables.kinds[kind] for kind in kinds),
        starts=tuple(starts),
        seconds=tuple(seconds),
        fullest_bytes=tuple(
            tables.need(kind, count, part) for kind, count, part in zip(kinds, held, parts, strict=True)
        ),
        step_seconds=(tables.problem.micro_batches - 1) * max(seconds) + sum(seconds) + once,
    )


# --- the dynamic program, from the last stage to the first
# ----------------------------------------------------------------------------------------------------------------------

_Counts = tuple[int, ...]
_Kinds = Callable[[int, _Counts], Sequence[int]]
"""Kinds allowed at the given distance to the end, by the number of later stages of each kind."""

_Weight = Callable[[int, int, int], Array]
"""Weight of every possible stage (in the window of its depth) by its kind, the kind of the next stage (-1: none) and
its depth from the end; infinite where it is not allowed."""


class _Cell(NamedTuple):
    """Best partitions of the remaining layers, by their first layer, and the next stage's start."""

    values: Array
    next_kinds: np.ndarray[Any, np.dtype[np.int64]]
    next_starts: np.ndarray[Any, np.dtype[np.int64]]


def _solve(
    tables: _Tables, kinds: _Kinds, weight: _Weight, *, combine: Callable[[Array, Array], Array]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return kinds and starts of the stages with the least combined weight; None if every combination is infinite.

    The stage at *depth* from the end starts in a window of L - P + 1 layers, since every stage has one.
    """
    num_layers, num_stages = tables.problem.num_layers, len(tables.problem.groups)
    width = num_layers - num_stages + 1
    rows = np.arange(width)
    nothing = np.zeros(width, dtype=np.int64)
    after = np.full(width, inf)
    after[-1] = 0.0
    levels = [{((0,) * len(tables.kinds), -1): _Cell(after, nothing, nothing)}]
    for depth in range(1, num_stages + 1):
        low = num_stages - depth
        level: dict[tuple[_Counts, int], _Cell] = {}
        for (counts, next_kind), cell in levels[-1].items():
            for kind in kinds(depth, counts):
                candidates = combine(weight(kind, next_kind, depth), cell.values)
                chosen = candidates.argmin(axis=1)
                values = candidates[rows, chosen]
                key = (*counts[:kind], counts[kind] + 1, *counts[kind + 1 :]), kind
                old = level.get(key)
                if old is None:
                    level[key] = _Cell(values, nothing + next_kind, chosen + low + 1)
                else:
                    level[key] = _Cell(
                        np.minimum(values, old.values),
                        np.where(values < old.values, next_kind, old.next_kinds),
                        np.where(values < old.values, chosen + low + 1, old.next_starts),
                    )
        levels.append(level)
    counts, kind = min(levels[-1], key=lambda key: levels[-1][key].values[0])
    if not levels[-1][counts, kind].values[0] < inf:
        return None
    found, starts = [kind], [0]
    for depth in range(num_stages, 1, -1):
        cell = levels[depth][counts, kind]
        position = starts[-1] - (num_stages - depth)
        counts = (*counts[:kind], counts[kind] - 1, *counts[kind + 1 :])
        kind, start = int(cell.next_kinds[position]), int(cell.next_starts[position])
        found.append(kind)
        starts.append(start)
    return tuple(found), tuple(starts)


def _best(tables: _Tables, objective: Objective, kinds: _Kinds) -> Cut | None:
    """Return the best partition over the orders that *kinds* allows; None if none fits."""
    micro_batches = tables.problem.micro_batches
    slowest = _solve(tables, kinds, _weights(tables, inf), combine=np.maximum)
    if slowest is None:
        return None

    def least_sum(bound: float) -> Cut | None:
        """Return the partition with the least sum whose stages take at most *bound*."""
        found = _solve(tables, kinds, _weights(tables, bound, once=True), combine=np.add)
        return None if found is None else _priced(tables, *found)

    floor = max(_priced(tables, *slowest).seconds)
    best = least_sum(floor * (1 + GAP)) or _priced(tables, *slowest)
    unbound = least_sum(inf)
    if objective == "slowest" or unbound is None:
        return best
    least = unbound.step_seconds - (micro_batches - 1) * max(unbound.seconds)
    bound = inf if micro_batches == 1 else (best.step_seconds - least) / (micro_batches - 1)
    while bound > floor:
        found = least_sum(bound)
        if found is None:
            break
        best = min(best, found, key=lambda cut: cut.step_seconds)
        rest = found.step_seconds - (micro_batches - 1) * max(found.seconds)
        if (micro_batches - 1) * floor + rest >= best.step_seconds * (1 - GAP):
            break  # the remaining partitions have no smaller sum, and a slowest stage of at least the floor
        bound = max(found.seconds) * (1 - GAP)
    return best


def _weights(tables: _Tables, bound: float, *, once: bool = False) -> _Weight:
    """Seconds of stages that fit and take at most *bound*, plus the seconds once per step if *once*."""

    def weight(kind: int, next_kind: int, depth: int) -> Array:
        seconds = tables.costs(kind, next_kind, depth)
        weights = seconds + tables.once[tables.window(depth)] if once else seconds
        return weights if bound == inf else np.where(seconds <= bound, weights, inf)

    return weight


# --- what does not fit
# ----------------------------------------------------------------------------------------------------------------------


def _shortage(problem: CutProblem, remedies: Iterable[tuple[str, CutProblem]]) -> InfeasibleError:
    """The error for an infeasible partition: the stage that lacks memory in the most even partition, and changes that
    would fit."""
    evenest = evenest_cut(problem)
    stage, need = _fullest(evenest)
    group = evenest.groups[stage]
    lacking = need - group.capacity_bytes
    text = (
        f"no cut into {len(problem.groups)} stages fits. Even in the one that fills memory most evenly, stage {stage} "
        f"on {group.name} needs {bytes_text(need)} and has {bytes_text(group.capacity_bytes)}, "
        f"{bytes_text(lacking)} too little"
    )
    weighed = []
    for change, changed in remedies:
        cut = evenest_cut(changed)
        stage, need = _fullest(cut)
        capacity = bytes_text(cut.groups[stage].capacity_bytes)
        weighed.append((cut.fits, f"{change} ({bytes_text(need)} of {capacity} on stage {stage})"))
    error = InfeasibleError(advised(text, weighed, otherwise="use more stages, or devices with more memory"))
    error.lacking_bytes = lacking
    return error


def evenest_cut(problem: CutProblem) -> Cut:
    """The partition in the given order with the smallest maximal ratio of bytes to capacity, fitting or not.

    Raises:
        InfeasibleError: a number is not finite.
    """
    tables = _Tables(problem)
    order = tuple(tables.kinds.index(group) for group in problem.groups)

    def ratio(kind: int, next_kind: int, depth: int) -> Array:
        needs, possible = tables.bytes(kind, depth), tables.seconds[kind][tables.window(depth)] < inf
        return np.where(possible, np.where(possible, needs, 0.0) / tables.kinds[kind].capacity_bytes, inf)

    found = _solve(tables, lambda depth, counts: (order[-depth],), ratio, combine=np.maximum)
    if found is None:
        raise InfeasibleError("a layer takes a time or memory that is not finite; no cut can hold it")
    return _priced(tables, *found)


def _fullest(cut: Cut) -> tuple[int, float]:
    ratios = [need / group.capacity_bytes for need, group in zip(cut.fullest_bytes, cut.groups, strict=True)]
    stage = ratios.index(max(ratios))
    return stage, cut.fullest_bytes[stage]
