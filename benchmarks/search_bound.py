"""A lower bound on the step time by linear programs: how much better than the search's plan could any plan be?

For a number of micro-batches M of R rows and a step of T seconds, plans are relaxed to a flow of rows through the chain
of layers. Variables are y[k, d, i, j, h] >= 0, the rows of a micro-batch that go through layers [i, j) on a replica of
devices of type k at the tensor or expert degrees d, with h stages after it. Constraints::

    sum_j y[., i, j, h] = sum_e y[., e, i, h + 1]        flow: what leaves a stage at layer i enters the next one there
    sum y[., 0, j, .] = R                                all rows of a micro-batch enter
    sum_(d, i, j, h) size(d) / rows[k, d, i, j, h] y <= N[k]      devices of each type k

where rows[...] is the most rows with which such a replica is done within T and fits in memory. It is not done before::

    F(before) + mu C + max(0, C(after) - min(h, M - 1) f) + sigma B(before)              1F1B
    F(before) + mu C + sigma F(after) + B(after) + sigma B(before)                       GPipe

with mu = batch / R, forward f and backward b of its rows and C = f + b; F, B and C of what comes before and after are
those of the fastest replica of each layer with one row, and sigma is the share of rows in the last micro-batch. Its
devices hold the states of its layers and the saved activations of min(h + 1, M) micro-batches (GPipe: all M). If no M
has a flow, no plan takes less than T; the bound is bisected.

A plan of the search gives a flow (the rows of each stage by replica), so the relaxation is sound. It ignores messages,
sums of gradients and the optimizer, and allows parts of replicas and any path of a row through the stages. Replicas of
mixed tensor groups are as slow as their slowest device, and count as parts of replicas of each type. More than `DEPTH`
stages after a stage count as equally many. Solved with HiGHS (Huangfu and Hall, 2018).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import highspy
import numpy as np

from whale.ir.cluster import DeviceType
from whale.planner.cost.stage import CostModel
from whale.planner.search.bound import least_seconds

__all__ = ["linear_bound"]

DEPTH = 6
"""Largest number of later stages with states of their own; larger numbers share the last state."""

ENOUGH = 0.005
"""To which the bound is bisected, as a part of it."""

SINGLE_ROWS, PER_OCTAVE = 16, 8
"""Each number of rows up to the first is priced, and then the second per octave. Between two of them a replica takes no
less time than with the lower one."""

SLACK = 1e-6
"""Tolerance of memory and devices, for rounding."""

Array = np.ndarray[Any, np.dtype[np.float64]]


def linear_bound(
    prices: CostModel, batch: int, counts: Sequence[int], *, known: float, schedule: str = "1f1b"
) -> float:
    """No plan takes less.

    Args:
        prices: of layers.
        batch: rows of a step.
        counts: numbers of micro-batches that may be chosen, and the rows of their micro-batches.
        known: seconds of a step of a plan: the bound is looked for up to there.
        schedule: ``1f1b`` or ``gpipe``.
    """
    low, high = least_seconds(prices, batch) - prices.step_overhead, known - prices.step_overhead
    costs = _Costs(prices, batch)
    flows = [_Flow(costs, batch, -(-batch // count), schedule) for count in sorted(set(counts))]
    while high - low > ENOUGH * high:
        step = (low + high) / 2
        place = next((place for place, flow in enumerate(flows) if flow.devices(step) <= 1 + SLACK), None)
        if place is None:
            low = step
        else:
            high = step
            flows.insert(0, flows.pop(place))  # the next time it is looked at first
    return min(known, low + prices.step_overhead)


class _Kind(NamedTuple):
    """Devices of a type at a tensor and an expert degree."""

    type: DeviceType
    tensor: int
    expert: int


class _Costs:
    """Seconds and bytes of every stretch [i, j) of the chain on each kind of replica, as matrices."""

    def __init__(self, prices: CostModel, batch: int) -> None:
        self.prices = prices
        node = max(len(node.ranks) for node in prices.cluster.nodes)
        self.kinds = [
            _Kind(type_, tensor, expert)
            for type_ in prices.num_of_types
            for tensor, expert in (
                *((one, 1) for one in prices.tensor_degrees if prices.knows(type_, one, node)),
                *((1, one) for one in prices.expert_degrees),
            )
        ]
        self.rows = sorted({*range(1, min(batch, SINGLE_ROWS) + 1), *_octaves(batch)})
        self.chain = prices.profile.layers
        self._tables: dict[tuple[_Kind, int], tuple[Array, ...]] = {}

    def of(self, kind: _Kind, rows: int) -> tuple[Array, ...]:
        """Forward, backward, bytes of states, of saved activations and of workspace of each stretch [first, end of it)
        with *rows* rows; infinite where there is none."""
        key = kind, rows
        if key not in self._tables:
            priced = {layer: self._layer(layer, kind, rows) for layer in set(self.chain)}
            forward, backward, state, kept, working = np.array([priced[layer] for layer in self.chain]).T
            for readers, shared in self.prices.profile.tied:  # the copies in a stage are one
                elements = shared / kind.tensor
                state[list(readers[1:])] -= self.prices.state(elements).total
            self._tables[key] = (*map(_sums, (forward, backward, state, kept)), _maxima(working))
        return self._tables[key]

    def _layer(self, layer: int, kind: _Kind, rows: int) -> tuple[float, ...]:
        prices, degrees = self.prices, (kind.tensor, kind.expert)
        own = rows * kind.expert
        state = prices.state(sum(prices.parameters_of(layer, *degrees)), prices.frozen_of(layer, *degrees)).total
        return (
            *prices.computation(layer, kind.type, kind.tensor, own, kind.expert),
            state,
            prices.kept(layer, kind.type, (*degrees, 1), rows) * prices.waste,
            prices.working(layer, kind.type, (*degrees, 1), rows) * prices.waste,
        )

    @cached_property
    def least(self) -> tuple[Array, Array]:
        """Forward and backward of one row up to each layer, on the fastest replica for each layer."""
        ones = [[np.diag(table, 1) for table in self.of(kind, 1)[:2]] for kind in self.kinds]
        forward, backward = np.min(ones, axis=0)
        return np.concatenate([[0.0], forward.cumsum()]), np.concatenate([[0.0], backward.cumsum()])


def _octaves(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield from (power + power * part // PER_OCTAVE for part in range(PER_OCTAVE))
        power *= 2


def _sums(values: Array) -> Array:
    upto = np.concatenate([[0.0], values.cumsum()])
    return np.where(np.tri(len(upto), dtype=bool), inf, upto[None, :] - upto[:, None])


def _maxima(values: Array) -> Array:
    found = np.full((len(values) + 1,) * 2, 0.0)
    found[:-1, 1:] = np.triu(np.broadcast_to(values, (len(values),) * 2))
    return np.maximum.accumulate(found, axis=1)


@dataclass
class _Flow:
    """Plans whose micro-batches have ``rows`` rows."""

    costs: _Costs
    batch: int
    rows: int
    schedule: str

    def devices(self, step: float) -> float:
        """The part of the devices of each type that plans of such a step need at least; infinite where there are
        none."""
        most = [self._most_rows(kind, step) for kind in self.costs.kinds]
        size = len(self.costs.chain)
        types = list(self.costs.prices.num_of_types)
        columns: list[tuple[int, int, int, int, int, float]] = []  # from and to which state, on which type, devices
        for kind, rows in zip(self.costs.kinds, most, strict=True):
            share = kind.tensor * kind.expert * self.rows / self.costs.prices.num_of_types[kind.type]
            later, first, last = np.nonzero(rows)
            for h, i, j in zip(later.tolist(), first.tolist(), last.tolist(), strict=True):
                if (h == 0) != (j == size):
                    continue
                for after in (h - 1, h) if h == DEPTH else (h - 1,):
                    columns.append((i, h, j, after, types.index(kind.type), share / rows[h, i, j]))
        return _least_share(columns, size, len(types))

    def _most_rows(self, kind: _Kind, step: float) -> Array:
        """The most rows of a replica by the stages after it, and its first and last layer; 0 where there are none."""
        size = len(self.costs.chain)
        count = -(-self.batch // self.rows)
        last_share = self.batch / self.rows - count + 1
        ahead, back = self.costs.least
        after = np.stack([ahead[-1] - ahead, back[-1] - back])[:, None, :]
        room = kind.type.memory_bytes - self.costs.prices.overhead_bytes[kind.type.name]
        found = np.zeros((DEPTH + 1, size + 1, size + 1))
        numbers = [rows for rows in self.costs.rows if rows <= self.rows]
        for rows, above in zip(numbers, [*numbers[1:], self.rows + 1], strict=True):
            own = rows if kind.expert == 1 else -(-rows // kind.expert)
            forward, backward, state, kept, working = self.costs.of(kind, own)
            busy = self.batch / self.rows * (forward + backward)
            for later in range(DEPTH + 1):
                if self.schedule == "gpipe":
                    held, waits = count, last_share * after[0] + after[1]
                else:
                    held = min(later + 1, count)
                    deepest = (size - np.arange(size + 1))[None, :] if later == DEPTH else later
                    waits = np.maximum(
                        0.0,
                        after.sum(axis=0) - np.minimum(deepest, count - 1) * np.where(np.isinf(forward), 0.0, forward),
                    )
                done = ahead[:, None] + busy + waits + last_share * back[:, None]
                fits = state + held * kept + working <= room * (1 + SLACK)
                found[later][(done < step) & fits] = above - 1
        return found


def _least_share(columns: Sequence[tuple[int, int, int, int, int, float]], size: int, num_types: int) -> float:
    """The least part of the devices with which a flow of 1 gets from layer 0 to the end."""
    if not columns:
        return inf
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    infinite = highspy.kHighsInf
    # A state is (layer, stages after the one that begins there); the end of the chain is one state.
    states = {state: row for row, state in enumerate(sorted({(i, h) for i, h, *_ in columns}))}
    starts = {h for i, h, *_ in columns if i == 0}
    if not starts:
        return inf
    num = len(columns)
    matrix_rows: list[list[tuple[int, float]]] = [[] for _ in states]
    devices: list[list[tuple[int, float]]] = [[] for _ in range(num_types)]
    begin = [index for index, column in enumerate(columns) if column[0] == 0]
    for index, (i, h, j, after, type_, share) in enumerate(columns):
        matrix_rows[states[i, h]].append((index, 1.0))
        if j < size:
            if (j, after) in states:
                matrix_rows[states[j, after]].append((index, -1.0))
            else:
                matrix_rows.append([(index, 1.0)])  # leads nowhere
        devices[type_].append((index, share))
    model.addVars(num + 1, np.zeros(num + 1), np.full(num + 1, infinite))
    model.changeColCost(num, 1.0)

    def row(low: float, high: float, entries: Sequence[tuple[int, float]]) -> None:
        places, values = zip(*entries, strict=True)
        model.addRow(low, high, len(places), np.array(places, dtype=np.int32), np.array(values))

    inner = {row_ for (i, _), row_ in states.items() if i > 0}
    for place, entries in enumerate(matrix_rows):
        if place in inner or place >= len(states):
            row(0.0, 0.0, entries)
    row(1.0, 1.0, [(index, 1.0) for index in begin])
    for entries in devices:
        if entries:
            row(-infinite, 0.0, [*entries, (num, -1.0)])
    model.run()
    if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return inf
    return float(model.getInfo().objective_function_value)
