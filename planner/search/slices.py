"""What a row of a micro-batch may find itself on: the kinds of data slices that a stage may have, and what parts of the
chain take there, from below.

A kind is a device type, a tensor or expert degree and a number of rows; beyond a few rows a range of them, which takes
what the fewest take and as few devices as if all had the most. Groups are priced where their devices are next to each
other in a node. Between numbers of rows that are priced a layer is taken to need no less a row than at the nearer of
both. The bound is made of these; they know no stages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np

from whale.planner.search.meshes import Array, Meshes

__all__ = ["NEVER", "Slices"]

Integers = np.ndarray[Any, np.dtype[np.int64]]

NEVER = 1e30
"""Seconds of what cannot be."""

SINGLE_ROWS, PER_OCTAVE = 16, 4
"""Up to so many rows each number is a kind of its own; then there are so many from a power of two to the next."""

NUMBERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Of slices, over which a sum of gradients is priced; over a number between two of them it takes no less than over the
lower one."""

MOST_MIXED = 16
"""Devices of a tensor group that may be of several types."""


class _Group(NamedTuple):
    """Devices of a type (a pool, by position) that share a layer's matrices, or those of its experts."""

    pool: int
    tensor: int
    expert: int

    @property
    def degree(self) -> int:
        """Its devices."""
        return self.tensor * self.expert


class _Times(NamedTuple):
    """Of a kind of layer on a group, for each range of rows: device-seconds of a row, seconds of a micro-batch of the
    least rows. ``update``: seconds; ``parameters``: of a device; ``kept``: bytes, for the least rows."""

    work: Array
    forward: Array
    backward: Array
    kept: Array
    update: float
    parameters: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Slices:
    """The kinds of slices, along the last axis. A first axis is that of the parts of the chain that are unlike.

    Attributes:
        nums: devices of each type.
        order: which parts the chain has, one after the other.
        type, degree: of a slice: the type by its position, its devices.
        fewest, most: its rows.
        work: device-seconds of a row.
        forward, backward: seconds of a micro-batch.
        update: seconds.
        gradients: bytes that a device has to sum.
        state, kept: shares of a device's room that weights and their states take, and the activations of a micro-batch.
        paces: seconds a byte of a sum over as many slices as `NUMBERS` says (first axis), and more.
        slower: how many times longer a row takes than on another type, at most: another slice of the stage has at most
            so many times one row more.
    """

    nums: Array
    order: tuple[int, ...]
    type: Integers
    degree: Integers
    fewest: Integers
    most: Integers
    work: Array
    forward: Array
    backward: Array
    update: Array
    gradients: Array
    state: Array
    kept: Array
    paces: Array
    slower: Array

    @classmethod
    def of(cls, meshes: Meshes, most: int) -> Slices:
        """Those of up to *most* rows."""
        prices, pools = meshes.prices, meshes.pools
        ranges, groups = list(_ranges(most)), list(_groups(meshes))
        kinds = list(meshes.layer_counts)
        tables = [[_times(meshes, kind, group, ranges) for kind in kinds] for group in groups]
        parts = list(_parts(meshes))
        unlike = list(dict.fromkeys(parts))
        counts = np.array([[layers.count(kind) for kind in kinds] for layers, _ in unlike], dtype=float)
        tied = np.array([[shared] for _, shared in unlike])

        def along(values: list[list[Any]]) -> Array:
            """Of each part and slice, from what layers take on groups."""
            of_kinds = [np.array([np.broadcast_to(one, len(ranges)) for one in row], dtype=float) for row in values]
            return np.concatenate([counts @ one for one in of_kinds], axis=1)

        type_, tensor, expert = (np.repeat(values, len(ranges)) for values in zip(*groups, strict=True))
        elements = np.maximum(0.0, along([[one.parameters for one in row] for row in tables]) - tied / tensor)
        overheads = [prices.overhead_bytes[pool.type.name] for pool in pools]
        rooms = np.array(
            [max(1.0, pool.type.memory_bytes - taken) for pool, taken in zip(pools, overheads, strict=True)]
        )
        kept = along([[one.kept for one in row] for row in tables]) * prices.waste
        whole = {
            group[1:]: sum(meshes.layer_counts[kind] * table.parameters for kind, table in zip(kinds, row, strict=True))
            for group, row in zip(groups, tables, strict=True)
        }
        work = along([[one.work for one in row] for row in tables])
        # In expert groups all is taken to be summed as what is whole is: by one group of all devices, the quickest.
        paces = {one: _paces(meshes, one[0], size * prices.gradient_bytes) for one, size in whole.items()}
        return cls(
            nums=np.array([len(pool.ranks) for pool in pools], dtype=float),
            order=tuple(unlike.index(part) for part in parts),
            type=type_,
            degree=tensor * expert,
            fewest=np.tile([first for first, _ in ranges], len(groups)),
            most=np.tile([last for _, last in ranges], len(groups)),
            work=work,
            forward=along([[one.forward for one in row] for row in tables]),
            backward=along([[one.backward for one in row] for row in tables]),
            update=along([[one.update for one in row] for row in tables]),
            gradients=elements * prices.gradient_bytes,
            state=elements * prices.state(1.0).total / rooms[type_],
            kept=kept / rooms[type_],
            paces=np.stack([paces[both] for both in zip(tensor.tolist(), expert.tolist(), strict=True)], axis=1),
            slower=_slower(work[[unlike.index(part) for part in parts]].sum(axis=0), type_, np.stack([tensor, expert])),
        )


def _ranges(most: int) -> Iterator[tuple[int, int]]:
    """Numbers of rows from one to *most* in ranges, first and last.

    >>> list(_ranges(22))[-3:]
    [(16, 16), (17, 20), (21, 22)]
    """
    first = 1
    while first <= most:
        length = 1 if first <= SINGLE_ROWS else (1 << (first - 1).bit_length() - 1) // PER_OCTAVE
        yield first, min(first + length - 1, most)
        first += length


def _groups(meshes: Meshes) -> Iterator[_Group]:
    """Every type with its degrees, those of small groups that may mix types too."""
    prices, num = meshes.prices, len(meshes.prices.cluster.devices)
    largest = max(len(node.ranks) for node in prices.cluster.nodes)
    small = [degree for degree in prices.tensor_degrees if degree <= min(num, MOST_MIXED)]
    for index, pool in enumerate(meshes.pools):
        mixed = {degree for degree in small if prices.knows(pool.type, degree, largest)}
        yield from (_Group(index, degree, 1) for degree in sorted({*meshes.degrees(pool), *mixed}) if degree <= num)
        yield from (_Group(index, 1, degree) for degree in prices.expert_degrees if degree <= num)


def _parts(meshes: Meshes) -> Iterator[tuple[tuple[int, ...], float]]:
    """Of each part of the chain the kinds of its layers, and parameters that others share with it."""
    layers, tied = meshes.prices.profile.layers, meshes.prices.profile.tied
    for first, last in pairwise(meshes.chain.bounds):
        shared = sum(size * sum(first <= reader < last for reader in readers) for readers, size in tied)
        yield tuple(sorted(layers[first:last])), float(shared)


# --- prices -----------------------------------------------------------------------------------------------------------


def _times(meshes: Meshes, kind: int, group: _Group, ranges: Sequence[tuple[int, int]]) -> _Times:
    prices, pool = meshes.prices, meshes.pools[group.pool]
    parameters = sum(prices.parameters_of(kind, group.tensor, group.expert))
    one, two = (prices.kept(kind, pool.type, (group.tensor, group.expert), rows / group.expert) for rows in (1, 2))
    kept = np.array([max(0.0, one + (two - one) * (first - 1)) for first, _ in ranges])
    room = pool.type.memory_bytes - prices.overhead_bytes[pool.type.name]
    fits = prices.state(parameters).total + kept * prices.waste <= room
    never = np.full(len(ranges), NEVER)
    if not fits.any():
        return _Times(never, never, never, kept, 0.0, parameters)
    most = ranges[int(np.flatnonzero(fits)[-1])][1]
    points = _points(meshes, kind, most, group.expert)
    times = [_seconds(meshes, kind, group, rows) for rows in points]
    forward, backward = (
        _between(points, [time[way] for time in times], [first for first, _ in ranges]) for way in (0, 1)
    )
    work = _least_each(points, [sum(time[:2]) for time in times], ranges)
    return _Times(
        np.where(fits, work * group.degree, NEVER),
        np.where(fits, forward, NEVER),
        np.where(fits, backward, NEVER),
        kept,
        min(time[2] for time in times),
        parameters,
    )


def _points(meshes: Meshes, kind: int, most: int, expert: int) -> list[int]:
    """The numbers of rows that are priced: powers of two, of many rows powers of four, and what was measured; so many
    for each device of an expert group, where one row takes as long as one for each."""
    each = -(-most // expert)
    measured = {rows for times in meshes.prices.profile.kinds[kind].measured for rows in times.rows if rows < each}
    powers = range((each - 1).bit_length() + 1)
    found = {1 << power for power in powers if power <= 4 or power % 2 == 0 or power == powers[-1]} | measured
    return sorted({1, *(expert * rows for rows in found)})


def _seconds(meshes: Meshes, kind: int, group: _Group, rows: int) -> tuple[float, float, float]:
    """Forward, backward and update: with collectives where the group fits into a node, else without."""
    prices, pool = meshes.prices, meshes.pools[group.pool]
    if group.degree > pool.per_node:
        return (*prices.computation(kind, pool.type, group.tensor, rows, group.expert), 0.0)
    price = prices.layer(kind, prices.group(pool.nodes[0][: group.degree], 1, group.expert), rows, 1)
    return price.forward, price.backward, price.update


def _between(points: Sequence[int], values: Sequence[float], wanted: Sequence[int]) -> Array:
    """What so many rows take at least: no less than fewer, and no less a row than at the nearer points."""
    each = [value / rows for value, rows in zip(values, points, strict=True)]
    found = []
    for rows in wanted:
        below, above = bisect_right(points, rows) - 1, min(bisect_left(points, rows), len(points) - 1)
        found.append(max(values[below], rows * min(each[below], each[above])))
    return np.array(found)


def _least_each(points: Sequence[int], values: Sequence[float], ranges: Sequence[tuple[int, int]]) -> Array:
    """The least that a row takes, of any number in a range."""
    each = [value / rows for value, rows in zip(values, points, strict=True)]
    found = []
    for first, last in ranges:
        below, above = bisect_right(points, first) - 1, min(bisect_left(points, last), len(points) - 1)
        found.append(min(each[below : above + 1]))
    return np.array(found)


def _slower(work: Array, type_: Integers, degrees: Integers) -> Array:
    """For each slice how many times longer a row takes on its type than on another, at most: the whole chain, at the
    same degrees, each with the rows that suit it."""
    found = np.ones(len(type_))
    for each in np.unique(degrees, axis=1).T:
        alike = (degrees == each[:, None]).all(axis=0)
        best = {int(one): work[(type_ == one) & alike].min() for one in np.unique(type_[alike])}
        for one, own in best.items():
            others = [own / its for its in best.values() if own < NEVER and 0 < its < NEVER]
            found[(type_ == one) & alike] = max([1.0, *others])
    return found


def _paces(meshes: Meshes, degree: int, num_bytes: float) -> Array:
    """Seconds a byte of a sum of gradients over at least as many slices as `NUMBERS` says: of a type's devices or of
    all, next to each other or each on another node."""
    pools, devices = meshes.pools, meshes.prices.cluster.devices
    found = np.full(len(NUMBERS), inf)
    for index, number in enumerate(NUMBERS if num_bytes else ()):
        lines = [pool.ranks[::degree] for pool in pools]
        lines += [tuple(node[0] for node in pool.nodes) for pool in pools if number * degree <= pool.per_node]
        if all(len(line) < number for line in lines):
            lines.append(tuple(range(0, len(devices), degree)))
        for line in lines:
            if len(line) >= number:
                seconds = meshes.prices.all_reduce(line[:number], degree, num_bytes)
                found[index] = min(found[index], seconds / num_bytes)
    least = np.minimum.accumulate(found[::-1])[::-1]
    return np.where(np.isfinite(least), least, np.max(least, where=np.isfinite(least), initial=0.0))
