"""What every stretch of the chain costs on a mesh: arrays over the layers, for the algorithms that choose.

A mesh is counts of devices from pools, so its prices are those of a sample: its tensor groups at the beginning of a
node, its data group over the first of its devices, its messages to the next node. Times between the numbers of rows
that are priced are interpolated. What is found with these prices is laid out on ranks and priced exactly by
`whale.planner.search.evaluate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np

from whale.ir.profile import Affine
from whale.planner.memory import FRAGMENTATION
from whale.planner.search.choices import Fixed
from whale.planner.search.devices import Mesh, Pool, slices_of
from whale.planner.search.prices import LayerPrice, Prices, TensorGroup

__all__ = ["Array", "Chain", "MeshCosts", "Meshes"]

Array = np.ndarray[Any, np.dtype[np.float64]]

MOST_SAMPLED = 256
"""Ranks of a pool in a data group for which its sums are priced; those of more differ by a few hops."""

EXACT_ROWS = 4
"""Up to so many rows times are not interpolated: launches and tiles make them uneven there."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The model as parts that no cut goes through.

    Attributes:
        bounds: the first layer of each part, and the number of layers.
        starts: parts that must begin a stage.
        degrees: for each part (data, tensor) where they are decided, else None.
    """

    bounds: tuple[int, ...]
    starts: frozenset[int] = frozenset()
    degrees: tuple[tuple[int | None, int | None], ...] = ()

    @classmethod
    def of(cls, paths: Sequence[str], num_layers: int, fixed: Fixed | None) -> Chain:
        """The parts of a chain: a stage cannot begin at a layer without a path, if others have one, nor inside of what
        is fixed to be one."""
        fixed = fixed or Fixed()
        cuts = {layer for layer in range(num_layers) if not paths or paths[layer]} | {0, *fixed.starts}
        for first, last in fixed.uncut:
            cuts -= set(range(first + 1, last))
        bounds = (*sorted(cuts), num_layers)
        position = {bound: index for index, bound in enumerate(bounds)}
        degrees: list[tuple[int | None, int | None]] = []
        for first, last in pairwise(bounds):
            own = [one for one in fixed.degrees if one.first < last and first < one.last]
            data = next((one.data for one in own if one.data is not None), None)
            tensor = next((one.tensor for one in own if one.tensor is not None), None)
            degrees.append((data, tensor))
        starts = frozenset(position[start] for start in fixed.starts)
        return cls(bounds=bounds, starts=starts, degrees=tuple(degrees))

    def __len__(self) -> int:
        """Parts."""
        return len(self.bounds) - 1

    @cached_property
    def last_start(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """For each end of a stage the first part that it may reach back to, by what must begin a stage."""
        found = np.zeros(len(self) + 1, dtype=np.int64)
        for end in range(1, len(self) + 1):
            found[end] = max((start for start in self.starts if start < end), default=0)
        return found

    def allows(self, mesh: Mesh) -> Array:
        """For each end of a stage the first part that it may reach back to, by what degrees are decided."""
        found = np.zeros(len(self) + 1)
        for part, (data, tensor) in enumerate(self.degrees):
            if (data is not None and data != mesh.data) or (tensor is not None and tensor != mesh.tensor):
                found[part + 1 :] = part + 1
        return found


class Class(NamedTuple):
    """Data slices of a mesh that are alike: how many, and the rows of the one that has most."""

    group: TensorGroup
    num: int
    rows: int


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshCosts:
    """What parts of the chain cost on a mesh, for so many rows of a micro-batch.

    Attributes:
        mesh: whose they are.
        classes: of its data slices.
        forward, backward: sums up to each part, of the slowest slice; seconds of a micro-batch.
        once: sums of what comes once a step: the optimizer, and the bytes of gradients at the network's pace.
        latency: seconds of the sum of gradients however few they are.
        hop: for each end of a stage the seconds of sending what it hands on, and as much back.
        fixed: bytes of weights, gradients and optimizer states up to each part.
        kept, working: for each class sums, and bytes of each part; with the allocator's waste.
        room: of each class: capacity without what the framework takes.
    """

    mesh: Mesh
    classes: tuple[Class, ...]
    forward: Array
    backward: Array
    once: Array
    latency: float
    hop: Array
    fixed: Array
    kept: tuple[Array, ...]
    working: tuple[Array, ...]
    room: tuple[float, ...]

    @cached_property
    def both(self) -> Array:
        """Sums of forward and backward."""
        return self.forward + self.backward

    def seconds_once(self, first: int, last: int) -> float:
        """What parts [first, last) take once a step."""
        return float(self.once[last] - self.once[first]) + self.latency

    def fits(self, first: int, last: int, held: int) -> bool:
        """Whether parts [first, last) fit with so many micro-batches in flight."""
        return self.fullness(first, last, held) <= 1

    def fullness(self, first: int, last: int, held: int) -> float:
        """The part of the room of the fullest class that parts [first, last) take."""
        fixed = self.fixed[last] - self.fixed[first]
        found = 0.0
        for kept, working, room in zip(self.kept, self.working, self.room, strict=True):
            need = fixed + held * (kept[last] - kept[first]) + working[first:last].max()
            found = max(found, need / room if room > 0 else inf)
        return float(found)

    def part_held(self, held: Array) -> Array:
        """The part of the chain that fits on the mesh at most, for each number of micro-batches in flight."""
        found = np.full(len(held), inf)
        for kept, room in zip(self.kept, self.room, strict=True):
            found = np.minimum(found, max(0.0, room) / np.maximum(self.fixed[-1] + held * kept[-1], 1.0))
        return found

    def reach(self, held: int) -> Array:
        """For each end of a stage the first part that it can reach back to within memory.

        For every amount w that a part works with: no part of more may be in the stage, and what else the stage holds
        must leave w. The least over all w is exact, in O(parts x log(parts)) for each w and class. Worked out once.
        """
        if held not in self._reaches:
            self._reaches[held] = self._first_held(held)
        return self._reaches[held]

    def _first_held(self, held: int) -> Array:
        found = np.zeros(len(self.fixed))
        if self.fits(0, len(self.fixed) - 1, held):
            return found
        for kept, amounts, room in zip(self.kept, self._amounts, self.room, strict=True):
            state = self.fixed + held * kept
            own = np.full(len(state), inf)
            for most, more in amounts:
                own = np.minimum(own, np.maximum(more, np.searchsorted(state, state + most - room, side="left")))
            found = np.maximum(found, own)
        return found

    @cached_property
    def _reaches(self) -> dict[int, Array]:
        return {}

    @cached_property
    def _amounts(self) -> list[list[tuple[float, Array]]]:
        """For each class the amounts that its parts work with, each with the first part after those that need more."""
        return [
            [
                (float(most), np.concatenate([[0.0], np.maximum.accumulate(self._after * (working > most))]))
                for most in np.unique(working)
            ]
            for working in self.working
        ]

    @cached_property
    def _after(self) -> Array:
        """For each part the next one."""
        return np.arange(1.0, len(self.fixed))


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """Prices of meshes, each worked out once. Up to ``exact_rows`` rows times are not interpolated."""

    prices: Prices
    pools: tuple[Pool, ...]
    chain: Chain
    exact_rows: int = EXACT_ROWS
    _costs: dict[Any, MeshCosts] = field(default_factory=dict)
    _samples: dict[Mesh, tuple[tuple[tuple[TensorGroup, int], ...], tuple[int, ...]]] = field(default_factory=dict)
    _syncs: dict[Mesh, tuple[float, float]] = field(default_factory=dict)
    _needs: dict[tuple[int, int], list[Affine]] = field(default_factory=dict)
    _rows: dict[tuple[int, int], int] = field(default_factory=dict)

    def rows(self, batch: int, micro_batches: int) -> int:
        """Rows of a micro-batch; the last one has fewer where their number does not divide the batch.

        Then there is a choice: those that most data degrees of a pool's devices divide, or are divided by.
        """
        if batch % micro_batches == 0:
            return batch // micro_batches
        if (batch, micro_batches) not in self._rows:
            least, most = -(-batch // micro_batches), (batch - 1) // (micro_batches - 1)
            found = max(range(least, most + 1), key=lambda rows: (sum(self._matches(rows)), -rows), default=least)
            self._rows[batch, micro_batches] = found
        return self._rows[batch, micro_batches]

    def matching_micro_batches(self, batch: int) -> list[int]:
        """Numbers of micro-batches whose rows every pool can divide evenly at some tensor degree."""
        found = set()
        for pool in self.pools:
            for degree in self.degrees(pool):
                for factor in (1, 2, 3, 4, 6, 8):
                    rows = len(pool.ranks) // degree * factor
                    if 0 < rows <= batch and all(self._matches(rows)):
                        count = -(-batch // rows)
                        if self.rows(batch, count) == rows:
                            found.add(count)
        return sorted(found)

    def _matches(self, rows: int) -> list[int]:
        """At how many tensor degrees the devices of each pool divide so many rows evenly."""
        found = []
        for pool in self.pools:
            slices = [len(pool.ranks) // degree for degree in self.degrees(pool)]
            found.append(sum(num > 0 and (rows % num == 0 or num % rows == 0) for num in slices))
        return found

    def degrees(self, pool: Pool) -> tuple[int, ...]:
        """Tensor degrees of groups of a pool's devices: within a node or of whole nodes, where times are known."""
        return self._degrees[pool.type.name]

    @cached_property
    def _degrees(self) -> dict[str, tuple[int, ...]]:
        return {
            pool.type.name: tuple(
                degree
                for degree in self.prices.tensor_degrees
                if (degree <= pool.per_node or degree % pool.per_node == 0)
                and self.prices.knows(pool.type, degree, pool.per_node)
            )
            for pool in self.pools
        }

    def costs(self, mesh: Mesh, rows: int, micro_batches: int) -> MeshCosts:
        """Of a mesh, for *rows* rows of each of *micro_batches* micro-batches."""
        key = (mesh, rows, micro_batches)
        if key not in self._costs:
            self._costs[key] = self._worked_out(mesh, rows, micro_batches)
        return self._costs[key]

    def _worked_out(self, mesh: Mesh, rows: int, micro_batches: int) -> MeshCosts:
        groups, data_group = self.sample(mesh)
        classes = self._shared(groups, rows, micro_batches)
        kinds = range(len(self.prices.profile.kinds))
        table = [[self.between(kind, one.group, one.rows, micro_batches) for kind in kinds] for one in classes]
        slowest = [
            max((row[kind] for row in table), key=lambda price: price.forward + price.backward) for kind in kinds
        ]
        parameters = [sum(self.prices.parameters_of(kind, mesh.tensor)) for kind in kinds]
        latency, pace = self._sync(mesh, data_group)
        once = [
            max(row[kind].update for row in table) + pace * parameters[kind] * self.prices.gradient_bytes
            for kind in kinds
        ]
        waste = 1 + FRAGMENTATION
        overhead = [max(self.prices.overhead_bytes[type_.name] for type_ in one.group.types) for one in classes]
        return MeshCosts(
            mesh=mesh,
            classes=classes,
            forward=self._sums([price.forward for price in slowest]),
            backward=self._sums([price.backward for price in slowest]),
            once=self._sums(once),
            latency=latency,
            hop=self._hops(mesh, classes),
            fixed=self._sums([self.prices.state(number).total for number in parameters]),
            kept=tuple(self._sums([price.kept * waste for price in row]) for row in table),
            working=tuple(self._largest([price.working * waste for price in row]) for row in table),
            room=tuple(one.group.memory_bytes - taken for one, taken in zip(classes, overhead, strict=True)),
        )

    def too_large(self, pool: int, tensor: int, rows: int) -> bool:
        """Whether some layer alone does not fit on devices of a pool with so many rows of a micro-batch."""
        key = (pool, tensor)
        if key not in self._needs:
            self._needs[key] = [self._need(kind, pool, tensor) for kind in self.layer_counts]
        type_ = self.pools[pool].type
        room = type_.memory_bytes - self.prices.overhead_bytes[type_.name]
        return any(need(rows) > room for need in self._needs[key])

    def _need(self, kind: int, pool: int, tensor: int) -> Affine:
        """What a layer needs at least, by rows."""
        prices, type_ = self.prices, self.pools[pool].type
        one, two = (prices.kept(kind, type_, tensor, rows) * (1 + FRAGMENTATION) for rows in (1, 2))
        state = prices.state(sum(prices.parameters_of(kind, tensor))).total
        return Affine(state + max(0.0, 2 * one - two), two - one)

    def sample(self, mesh: Mesh) -> tuple[tuple[tuple[TensorGroup, int], ...], tuple[int, ...]]:
        """A tensor group of each class with their number, and ranks as its data group has them."""
        if mesh not in self._samples:
            counted: dict[TensorGroup, int] = {}
            data_group: list[int] = []
            taken = [0] * len(self.pools)
            for part in slices_of(mesh):
                ranks = [
                    rank for pool, count in zip(self.pools, part.counts, strict=True) for rank in pool.ranks[:count]
                ]
                group = self.prices.group(sorted(ranks), mesh.data)
                counted[group] = counted.get(group, 0) + part.num
                main = next(index for index, count in enumerate(part.counts) if count)
                step = part.counts[main]
                own = self.pools[main].ranks[taken[main] : taken[main] + part.num * step : step]
                data_group += own[:MOST_SAMPLED]
                taken = [done + part.num * count for done, count in zip(taken, part.counts, strict=True)]
            self._samples[mesh] = tuple(counted.items()), tuple(data_group)
        return self._samples[mesh]

    def _shared(self, groups: Sequence[tuple[TensorGroup, int]], rows: int, micro_batches: int) -> tuple[Class, ...]:
        """Rows of each class in proportion to speed, whole, the slowest done as soon as possible."""
        num_slices = sum(num for _, num in groups)
        if len(groups) == 1:
            return (Class(groups[0][0], num_slices, -(-rows // num_slices)),)

        def seconds(group: TensorGroup, count: int) -> float:
            return sum(
                number * (price.forward + price.backward)
                for kind, number in self.layer_counts.items()
                for price in [self.between(kind, group, count, micro_batches)]
            )

        shares = [rows / num_slices] * len(groups)
        for _ in range(2):  # speeds depend on the rows, a little
            speeds = [
                max(share, 1.0) / max(seconds(group, max(1, round(share))), 1e-12)
                for share, (group, _) in zip(shares, groups, strict=True)
            ]
            whole = sum(speed * num for speed, (_, num) in zip(speeds, groups, strict=True))
            shares = [rows * speed / whole for speed in speeds]
        given = [int(share) for share in shares]
        left = rows - sum(share * num for share, (_, num) in zip(given, groups, strict=True))
        most = list(given)
        room = [num for _, num in groups]
        while left > 0:
            done = [seconds(group, given[index] + 1) for index, (group, _) in enumerate(groups)]
            index = done.index(min(done))
            taken = min(left, room[index])
            left, room[index] = left - taken, room[index] - taken
            most[index] = given[index] + 1
            if not room[index]:
                given[index], room[index] = given[index] + 1, groups[index][1]
        return tuple(Class(group, num, count) for (group, num), count in zip(groups, most, strict=True))

    @cached_property
    def layer_counts(self) -> dict[int, int]:
        """How many layers there are of each kind."""
        layers = self.prices.profile.layers
        return {kind: layers.count(kind) for kind in dict.fromkeys(layers)}

    def between(self, kind: int, group: TensorGroup, rows: int, micro_batches: int) -> LayerPrice:
        """The price of a layer, interpolated between numbers of rows that are powers of two."""
        below = 1 << (rows.bit_length() - 1) if rows else 0
        if rows <= self.exact_rows or rows == below:
            return self.prices.layer(kind, group, rows, micro_batches)
        low, high = (self.prices.layer(kind, group, count, micro_batches) for count in (below, 2 * below))
        share = (rows - below) / below
        return LayerPrice(
            forward=low.forward + share * (high.forward - low.forward),
            backward=low.backward + share * (high.backward - low.backward),
            weights=low.weights + share * (high.weights - low.weights),
            communication=low.communication + share * (high.communication - low.communication),
            kept=low.kept + share * (high.kept - low.kept),
            working=low.working + share * (high.working - low.working),
            update=low.update,
            measured=low.measured,
        )

    def _sync(self, mesh: Mesh, data_group: Sequence[int]) -> tuple[float, float]:
        """The sum of gradients over the data group as seconds, and seconds a byte."""
        if len(data_group) < 2:
            return 0.0, 0.0
        if mesh not in self._syncs:
            whole = sum(
                count * sum(self.prices.parameters_of(kind, mesh.tensor)) for kind, count in self.layer_counts.items()
            )
            much, little = whole * self.prices.gradient_bytes, whole * self.prices.gradient_bytes / 8
            if not much:
                return 0.0, 0.0
            times = [self.prices.all_reduce(data_group, mesh.tensor, size) for size in (much, little)]
            pace = max(0.0, (times[0] - times[1]) / (much - little))
            self._syncs[mesh] = max(0.0, times[1] - pace * little), pace
        return self._syncs[mesh]

    def _hops(self, mesh: Mesh, classes: Sequence[Class]) -> Array:
        """Seconds to send what a stage that ends there hands on, from its busiest slice to another node if there is
        one, and as much back."""
        found = np.zeros(len(self.chain) + 1)
        busiest = max(classes, key=lambda one: one.rows)
        source = busiest.group.ranks
        target = self._elsewhere(source)
        if not target:
            return found
        of_kinds = []
        for kind in self.prices.profile.kinds:
            whole = kind.output.total(busiest.rows, self.prices.precision.element_bytes)
            size = round(whole / mesh.tensor)
            hop = self.prices.hop(source, target, busiest.group, size, whole)
            of_kinds.append(2 * (hop.latency + size / hop.bandwidth))
        found[1:-1] = np.array(of_kinds)[self._layers[np.array(self.chain.bounds[1:-1], dtype=np.int64) - 1]]
        return found

    def _elsewhere(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """A rank on another node, or if there is none another rank, as often as *ranks* has some."""
        devices = self.prices.cluster.devices
        home = devices[ranks[0]].node
        others = [pool.ranks[0] for pool in self.pools] + [pool.ranks[-1] for pool in self.pools]
        far = next((rank for rank in others if devices[rank].node != home), None)
        near = next((rank for rank in others if rank not in ranks), None)
        rank = near if far is None else far
        return () if rank is None else (rank,) * len(ranks)

    # Over the chain

    def _sums(self, of_kinds: Sequence[float]) -> Array:
        upto = np.concatenate([[0.0], np.cumsum(np.array(of_kinds)[self._layers])])
        return upto[np.array(self.chain.bounds)]

    def _largest(self, of_kinds: Sequence[float]) -> Array:
        values = np.array(of_kinds)[self._layers]
        return np.maximum.reduceat(values, np.array(self.chain.bounds[:-1]))

    @cached_property
    def _layers(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array(self.prices.profile.layers)
