"""Families of meshes for the stages of a pipeline; each family is a device-count program of its own.

A cluster of thousands of devices has more sequences of meshes than can be looked at, but few kinds of good ones:

- *any*: each stage takes any units of each pool, one type or mixed, at any tensor or expert degree; pools are cut into
  few units (16 of one type, 8 each of two, 4 of three), so pipelines are short;
- *matched*: each stage is of one type, with as many devices as divide the rows of a micro-batch evenly;
- *replicas*: all stages have the same data degree, and each type its own tensor or expert degree: pipelines of any
  depth, in which a stage is of one type (deep ones in runs: `whale.planner.search.partition`);
- *alike*: all stages have the same mesh, of all types: data slices are uneven, stages equal.

Pure data, tensor and pipeline parallelism are members of these. The families of a number of micro-batches are tried in
the order of what they could reach if stages were perfectly equal; those that could not come near the best so far are
dropped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import ceil, gcd, inf, prod
from typing import NamedTuple

import numpy as np

from whale.planner.search.mesh_costs import Array
from whale.planner.search.partition import DeviceCountProgram, GroupedStages, Option, StageGroup
from whale.planner.search.replica_table import HELD, fewest_holding
from whale.planner.search.space import Division, Mesh, Pool
from whale.planner.search.table import CostTable, Pace

__all__ = ["EvenPace", "Family", "Outlook", "any_meshes", "fit_divisions", "held_together", "outlooks"]

Sized = tuple[tuple[int, ...], Mesh]
"""A mesh with the units of each dimension that it takes."""

UNITS = {1: 16, 2: 8, 3: 4, 4: 3}
"""Units into which the family *any* divides each pool, by the number of pools; two for more."""

DEEPEST = {"any": 8, "matched": 6}
"""Stages of the family *any* where there is more than one pool."""

DEEP = 16
"""Stages beyond which those on equal meshes are taken to be next to each other."""

MOST_MIXED = 16
"""Devices of a mesh whose tensor groups may mix types."""

MOST_FREE = 64
"""Devices of a cluster up to which the family *any* mixes any counts; beyond, all of all types but one of a mesh."""

MATCHED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Rows of a data slice in the family *matched*."""

FEW_REPLICAS = 2
"""Largest number of replicas for which the family *replicas* has pipelines of all layers that leave devices idle, which
memory may require."""

LEAST_SHARE = 16
"""The smallest mesh of the family *matched* has that part of a pool."""

MOST_STATES = 1_500
"""Limit on the states of the device-count program of the family *matched*."""

SPREAD = (1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6, 1.8, 2.2, 3.0, 5.0, 10.0)
"""Bounds on the slowest stage that are tried, as multiples of what it takes at least."""


class EvenPace(NamedTuple):
    """Seconds of stages for a micro-batch, if all were equal: of each; of the slowest, since layers are whole; and what
    one sends to the next, and back."""

    even: float
    slowest: float
    hop: float


@dataclass(frozen=True, kw_only=True)
class Family:
    """CostTable to be sequenced.

    Attributes:
        name: for people.
        meshes: with the units that each takes.
        quotas: units of each dimension.
        max_stages: of its pipelines.
        micro_batches: of a step.
        num: families that this one stands for: if it does not hold the model they do neither.
        extremes: of the meshes of one dimension the smallest and the largest of each tensor and expert degree.
    """

    name: str
    meshes: tuple[Sized, ...]
    quotas: tuple[int, ...]
    max_stages: int
    micro_batches: int
    num: int
    extremes: tuple[Sized, ...]

    def all_devices(self) -> tuple[Mesh, ...]:
        """A sequence of its smallest meshes that uses as many devices as there are."""
        left, found = list(self.quotas), []
        for units, mesh in sorted(self.meshes):
            while all(need <= rest for need, rest in zip(units, left, strict=True)):
                left = [rest - need for need, rest in zip(units, left, strict=True)]
                found.append(mesh)
        return tuple(found[: self.max_stages])

    @cached_property
    def one_of_each(self) -> bool:
        """Whether each stage takes one unit, in each dimension always on the same mesh."""
        units = [units for units, _ in self.meshes]
        return len(set(units)) == len(units) and all(sum(one) == 1 for one in units)

    def part_held(self, meshes: CostTable, batch: int) -> float:
        """The part of the layers of some kind that its devices hold together, at most: whatever the stages, the one
        that is r-th from the end has r micro-batches in flight, and they have no more units than there are."""
        rows, extremes = meshes.rows(batch, self.micro_batches), self.extremes
        stages = [meshes.parts_held(mesh, rows, self.micro_batches)[:, : self.max_stages] for _, mesh in extremes]
        if self.one_of_each:
            return held_together(stages, [self.quotas[_dimension(units)] for units, _ in extremes])
        alone: list[Array | float] = [0.0] * len(self.quotas)
        for (units, _), parts in zip(extremes, stages, strict=True):
            index = _dimension(units)
            alone[index] = np.maximum(alone[index], parts[:, 0] / units[index])
        together = sum(part * quota for part, quota in zip(alone, self.quotas, strict=True))
        return float(np.minimum(np.max(stages, axis=0).sum(axis=1), together).min())

    def least_depth(self, meshes: CostTable, batch: int) -> int:
        """The fewest stages that could hold the model."""
        rows = meshes.rows(batch, self.micro_batches)
        return fewest_holding([meshes.parts_held(mesh, rows, self.micro_batches) for _, mesh in self.extremes])

    def even_work(self, meshes: CostTable, batch: int) -> EvenPace:
        """Time of equal stages on all devices (each dimension's units at the rate of the best of a few meshes), without
        gradient reductions, which take longer to price."""
        return self._even(meshes.likely_work, meshes.rows(batch, self.micro_batches))

    def _even(self, paces: Callable[[Mesh, int, int], Pace], rows: int) -> EvenPace:
        rates, hop = [0.0] * len(self.quotas), inf
        for units, mesh in self.extremes:
            index = _dimension(units)
            pace = paces(mesh, rows, self.micro_batches)
            rates[index] = max(rates[index], 1 / max(pace.of_chain, 1e-12) / units[index])
            hop = min(hop, pace.hop)
        even = 1 / sum(rate * quota for rate, quota in zip(rates, self.quotas, strict=True))
        return EvenPace(even, even, hop)

    def paces(self, meshes: CostTable, batch: int) -> EvenPace:
        """Time like `even_work`, with gradient reductions; and a lower bound on the slowest stage, because layers are
        whole and memory has room for some of them."""
        rows = meshes.rows(batch, self.micro_batches)
        meshes.find_paces((mesh for _, mesh in self.extremes), rows, self.micro_batches)
        found = self._even(meshes.paces, rows)
        if not self.one_of_each:
            return found
        _, num = meshes.commonest
        paces, held = [], []
        for units, mesh in self.extremes:
            paces.append(meshes.paces(mesh, rows, self.micro_batches).of_part)
            most = min(self.quotas[_dimension(units)], self.max_stages)
            held.append(meshes.commonest_held(mesh, rows, self.micro_batches)[:most])
        return found._replace(slowest=max(found.even, _slowest(paces, held, num)))

    def reach(self, pace: EvenPace, shallowest: int) -> float:
        """Seconds of a step with such `paces`, the least that the family could come to in pipelines of at least
        *shallowest* stages: with all of its devices, or on slow networks with so few of them that less is sent. What
        stages send each other and back fills the pipeline, and once it is full each micro-batch waits for it, at all
        boundaries in turn."""
        stages = sum(self.quotas) / max(sum(units) for units, _ in self.meshes)
        turns, least = self.micro_batches, inf
        for depth in range(max(ceil(stages), shallowest), shallowest - 1, -1):
            sent = (depth - 1) * pace.hop * (1 + max(0, turns - depth) / depth)
            even = pace.even * max(1.0, stages / depth)
            step = (turns - 1) * max(pace.slowest, even) + depth * even + sent
            if step > least:
                break
            least = step
        return least

    def sequences(
        self, meshes: CostTable, batch: int, schedule: str, pace: EvenPace, within: float
    ) -> DeviceCountProgram | GroupedStages:
        """Sequences with the fastest slowest stage for some numbers of stages, with steps of at most *within*
        seconds."""
        rows = meshes.rows(batch, self.micro_batches)
        even, slowest, _ = pace
        if self.one_of_each and self.max_stages > DEEP:
            return GroupedStages(
                [
                    StageGroup(meshes.costs(mesh, rows, self.micro_batches), self.quotas[_dimension(units)])
                    for units, mesh in self.meshes
                ],
                meshes.chain,
                micro_batches=self.micro_batches,
                schedule=schedule,
                least=slowest,
                even=even,
                within=within,
                max_stages=self.max_stages,
            )
        options = [Option(units, meshes.costs(mesh, rows, self.micro_batches)) for units, mesh in self.meshes]
        return DeviceCountProgram(
            options,
            self.quotas,
            meshes.chain,
            micro_batches=self.micro_batches,
            schedule=schedule,
            bounds=[slowest * factor for factor in SPREAD],
            even=even,
            within=within,
            max_stages=self.max_stages,
        )


def held_together(parts: Sequence[Array], nums: Sequence[int]) -> float:
    """The most that stages hold of some kind of layers, from above: *parts* says for each type what a stage of it holds
    of each kind (first axis) in which place from the end (second axis), *nums* how many such stages there are.

    Each type in turn gets the places where it is most worth, all others share the rest. Exact for two types, up to
    `HELD`: of what can hold all layers in any order it is not said how many more.
    """
    stages = min(sum(nums), parts[0].shape[1])
    anywhere = np.minimum.reduce([part[:, :stages] for part in parts]).sum(axis=1).min()
    if anywhere >= HELD:  # whatever their order
        return float(anywhere)
    least = np.full(len(parts[0]), np.inf)
    for own, num in enumerate(nums):
        others = [part[:, :stages] for index, part in enumerate(parts) if index != own]
        rest = np.max(others, axis=0) if others else np.zeros_like(parts[own][:, :stages])
        gains = -np.sort(rest - parts[own][:, :stages], axis=1)
        forced, most = max(0, stages - sum(nums) + num), min(num, stages)
        gained = gains[:, :forced].sum(axis=1) + np.maximum(gains[:, forced:most], 0).sum(axis=1)
        least = np.minimum(least, rest.sum(axis=1) + gained)
    return float(least.min())


def _slowest(each: Sequence[float], held: Sequence[Sequence[int]], parts: int) -> float:
    """Lower bound on the slowest stage if *parts* equal parts of the chain are divided among stages of some types,
    which take *each* as many seconds for one part, and of which the last, the last but one and so on have room for
    *held* parts, whatever the other types; infinity if all together have too little.

    >>> _slowest([1.0, 3.0], [[9, 9], [9]], 8)
    4.0
    >>> _slowest([1.0, 3.0], [[3, 2], [9]], 8)
    9.0
    """
    each = [max(own, 1e-12) for own in each]
    bounds = np.sort(np.outer(each, np.arange(1, parts + 1)).ravel()).tolist()
    rooms = np.concatenate(held)
    owners = np.repeat(np.arange(len(each)), [len(own) for own in held])

    def done(place: int) -> bool:
        in_time = np.array([int(bounds[place] / own * (1 + 1e-9)) for own in each])
        return bool(np.minimum(in_time[owners], rooms).sum() >= parts)

    place = bisect_left(range(len(bounds)), True, key=done)
    return bounds[place] if place < len(bounds) else inf


def fit_divisions(meshes: CostTable, counts: tuple[int, ...]) -> list[Division]:
    """The tensor and expert degrees for a mesh of these counts: a group is of one type, but in small meshes."""
    if counts not in meshes.fit_divisions:
        meshes.fit_divisions[counts] = _fit_divisions(meshes, counts)
    return meshes.fit_divisions[counts]


def _fit_divisions(meshes: CostTable, counts: tuple[int, ...]) -> list[Division]:
    used = [(pool, count) for pool, count in zip(meshes.pools, counts, strict=True) if count]
    fit = [meshes.divisions(pool) for pool, _ in used]
    prices, small = meshes.prices, len(used) > 1 and sum(counts) <= MOST_MIXED
    return [
        division
        for division in meshes.all_divisions
        if (all(division in own for own in fit) and all(count % prod(division) == 0 for _, count in used))
        or (
            small
            and sum(counts) % prod(division) == 0
            and all(prices.knows(pool.type, division[0], meshes.largest_node) for pool, _ in used)
        )
    ]


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The step time that a family could reach, before its meshes are listed.

    Attributes:
        name: of the family.
        reach: seconds of a step to which it could come at best, without gradient reductions.
        make: lists its meshes.
        shallowest: the fewest stages that could hold the model.
    """

    name: str
    reach: float
    make: Callable[[], Family]
    shallowest: int = 1

    @cached_property
    def family(self) -> Family:
        """The family."""
        return self.make()


def outlooks(meshes: CostTable, batch: int, micro_batches: int, max_stages: int) -> Iterator[Outlook]:
    """All families for a number of micro-batches."""
    rows = meshes.rows(batch, micro_batches)
    every = [any_meshes(meshes, rows, micro_batches, max_stages), _matched(meshes, rows, micro_batches, max_stages)]
    every += _alike(meshes, rows, micro_batches, max_stages)
    families = [family for family in every if family is not None and family.extremes]
    meshes.find_likely_work((mesh for family in families for _, mesh in family.extremes), rows, micro_batches)
    for family in families:
        shallowest = family.least_depth(meshes, batch)
        reach = family.reach(family.even_work(meshes, batch), shallowest)
        yield Outlook(name=family.name, reach=reach, make=partial(_itself, family), shallowest=shallowest)
    yield from _replicas(meshes, rows, micro_batches, max_stages)


def _itself(family: Family) -> Family:
    return family


def _unit(pool: Pool, most: int) -> int:
    """Devices in a unit of a pool: a power of two, or whole nodes."""
    least = ceil(len(pool.ranks) / most)
    if least >= pool.per_node:
        return ceil(least / pool.per_node) * pool.per_node
    return min(pool.per_node, 1 << (least - 1).bit_length())


def any_meshes(meshes: CostTable, rows: int, micro_batches: int, max_stages: int) -> Family:
    """The family *any*."""
    pools = meshes.pools
    units = [_unit(pool, UNITS.get(len(pools), 2)) for pool in pools]
    quotas = tuple(len(pool.ranks) // unit for pool, unit in zip(pools, units, strict=True))
    if not meshes.any_meshes:
        meshes.any_meshes.extend(_of_any_units(meshes, quotas, units))
    chosen = []
    for own, mesh in meshes.any_meshes:
        if (data := mesh.data) <= rows:
            used = [pool for pool, number in enumerate(own) if number]
            if len(used) > 1 or not meshes.too_large(used[0], mesh.division, -(-rows // data)):
                chosen.append((own, mesh))
    deepest = max_stages if len(pools) == 1 else min(max_stages, DEEPEST["any"])
    return _family("any", meshes, micro_batches, chosen, quotas, deepest)


def _of_any_units(meshes: CostTable, quotas: Sequence[int], units: Sequence[int]) -> Iterator[Sized]:
    """Meshes of any units of each pool, whatever the rows."""
    free = sum(len(pool.ranks) for pool in meshes.pools) <= MOST_FREE
    for own in product(*(range(quota + 1) for quota in quotas)):
        parts = sum(0 < number < quota for number, quota in zip(own, quotas, strict=True))
        if any(own) and (parts <= 1 or free):
            counts = tuple(number * unit for number, unit in zip(own, units, strict=True))
            yield from ((own, Mesh(counts, *division)) for division in fit_divisions(meshes, counts))


def _matched(meshes: CostTable, rows: int, micro_batches: int, max_stages: int) -> Family | None:
    """The family *matched*: stages of one type whose data slices all have the same rows r, which divide a micro-batch
    of R: at tensor or expert degree t a stage takes t R / r devices. So counts need not be searched."""
    pools = meshes.pools
    found: list[list[tuple[int, Division]]] = []
    for pool in pools:
        divisors = [share for share in MATCHED_ROWS if rows % share == 0]
        sizes = {(prod(one) * rows // share, one) for share in divisors for one in meshes.divisions(pool)}
        most = len(pool.ranks)
        found.append(sorted(one for one in sizes if most <= LEAST_SHARE * one[0] and one[0] <= most))
    units = [gcd(*(size for size, _ in own)) or 1 for own in found]
    quotas = tuple(len(pool.ranks) // unit if own else 0 for pool, unit, own in zip(pools, units, found, strict=True))
    if prod(quota + 1 for quota in quotas) > MOST_STATES:
        return None
    chosen = [
        (_single(index, size // units[index], len(pools)), Mesh(_single(index, size, len(pools)), *division))
        for index, own in enumerate(found)
        for size, division in own
    ]
    return _family("matched", meshes, micro_batches, chosen, quotas, min(max_stages, DEEPEST["matched"]))


class _Line(NamedTuple):
    """Stages that devices of a pool may make at a data degree.

    Attributes:
        mesh: of each; None: the pool is left out.
        quota: how many there may be.
        held: what they hold together at most, of each kind of layer.
        pace: seconds of a micro-batch of the whole chain on one, and of handing it on.
    """

    mesh: Mesh | None
    quota: int
    held: Array
    pace: float
    hop: float


def _replicas(meshes: CostTable, rows: int, micro_batches: int, max_stages: int) -> Iterator[Outlook]:
    pools, num_kinds = meshes.pools, len(meshes.layer_counts)
    degrees = [degree for degree in _degrees(max(len(pool.ranks) for pool in pools)) if degree <= rows]
    nothing = _Line(None, 0, np.zeros(num_kinds), inf, inf)
    some = [
        _line_meshes(meshes, rows, index, [data for data in degrees if data <= len(pool.ranks)])
        for index, pool in enumerate(pools)
    ]
    meshes.find_work((mesh for own, _ in some for alike in own for mesh in alike), rows, micro_batches)
    lines = [_lines(meshes, rows, micro_batches, max_stages, index, own) for index, (own, _) in enumerate(some)]
    for data in degrees:
        own = [
            found.get(data, []) + ([nothing] if data not in found or data in unfit else [])
            for found, (_, unfit) in zip(lines, some, strict=True)
        ]
        yield from _of_data_degree(meshes, micro_batches, max_stages, data, own)


def _line_meshes(meshes: CostTable, rows: int, index: int, degrees: Sequence[int]) -> tuple[list[list[Mesh]], set[int]]:
    """The meshes of devices of a pool at each tensor or expert degree, one for each data degree that the degree leaves
    room for and that holds a layer; and the data degrees for which some degree is too large for the pool."""
    pool, found, unfit = meshes.pools[index], [], set()
    for division in meshes.divisions(pool):
        held = [data for data in degrees if not meshes.too_large(index, division, -(-rows // data))]
        possible = [data for data in held if data * prod(division) <= len(pool.ranks)]
        unfit |= set(held) - set(possible)
        counts = (_single(index, data * prod(division), len(meshes.pools)) for data in possible)
        found.append([Mesh(own, *division) for own in counts])
    return found, unfit


def _lines(
    meshes: CostTable, rows: int, micro_batches: int, max_stages: int, index: int, alike: Sequence[Sequence[Mesh]]
) -> dict[int, list[_Line]]:
    """The stages that devices of a pool may make at each data degree, of the meshes of some tensor and expert
    degrees."""
    found: dict[int, list[_Line]] = {}
    for own in filter(None, alike):
        quotas = [len(meshes.pools[index].ranks) // mesh.counts[index] for mesh in own]
        shares, stages = [-(-rows // mesh.data) for mesh in own], [min(quota, max_stages) for quota in quotas]
        held = meshes.together_held(index, own[0].division, shares, stages, micro_batches)
        for mesh, quota, parts in zip(own, quotas, held, strict=True):
            pace = meshes.work(mesh, rows, micro_batches)
            line = _Line(mesh, quota, parts, max(pace.of_chain, 1e-12), pace.hop)
            found.setdefault(mesh.data, []).append(line)
    return found


def _of_data_degree(
    meshes: CostTable, micro_batches: int, max_stages: int, data: int, lines: Sequence[Sequence[_Line]]
) -> Iterator[Outlook]:
    """The families *replicas* of a data degree, one for each choice of a line for each pool.

    Those whose devices cannot hold the model, by their number alone, are represented by the nearest one.
    """
    chosen = np.indices([len(line) for line in lines]).reshape(len(lines), -1)
    quotas = np.array([np.array([one.quota for one in line])[at] for line, at in zip(lines, chosen, strict=True)])
    stages = quotas.sum(axis=0)
    held = [np.array([one.held for one in line])[at] for line, at in zip(lines, chosen, strict=True)]
    together = np.sum(held, axis=0).min(axis=1)
    deep = 2 * max_stages - 1 if data <= FEW_REPLICAS else max_stages  # idle devices, but as many cuts as there can be
    possible = (stages > 1) & (stages <= max(deep, max_stages))
    enough, short = np.flatnonzero(possible & (together >= HELD)), np.flatnonzero(possible & (together < HELD))
    places = np.concatenate([enough, short[together[short].argsort()[-1:]]])
    rates = [
        np.array([one.quota / one.pace for one in line])[at[places]] for line, at in zip(lines, chosen, strict=True)
    ]
    hops = [np.array([one.hop for one in line])[at[places]] for line, at in zip(lines, chosen, strict=True)]
    reaches = _reaches(1 / np.sum(rates, axis=0), np.min(hops, axis=0), stages[places], micro_batches)
    for place, reach in zip(places.tolist(), reaches.tolist(), strict=True):
        num = 1 if together[place] >= HELD else len(short)
        own = [line[at] for line, at in zip(lines, chosen[:, place].tolist(), strict=True)]
        yield Outlook(
            name="replicas", reach=reach, make=partial(_of_lines, meshes, micro_batches, max_stages, own, num)
        )


def _of_lines(meshes: CostTable, micro_batches: int, max_stages: int, lines: Sequence[_Line], num: int) -> Family:
    sized = [(_single(index, 1, len(lines)), one.mesh) for index, one in enumerate(lines) if one.mesh is not None]
    quotas = tuple(one.quota for one in lines)
    return _family("replicas", meshes, micro_batches, sized, quotas, max_stages, num=num)


def _reaches(even: Array, hops: Array, stages: Array, micro_batches: int) -> Array:
    """`Family.reach` of several families of one mesh a stage, without gradient reductions."""
    depth, least = stages.astype(float), np.full(len(even), inf)
    while len(even):
        sent = (depth - 1) * hops * (1 + np.maximum(0, micro_batches - depth) / depth)
        step = (micro_batches - 1 + depth) * even * stages / depth + sent
        better = step < least
        if not better.any():
            break
        least, depth = np.where(better, step, least), np.maximum(depth - better, 1.0)
    return least


def _alike(meshes: CostTable, rows: int, micro_batches: int, max_stages: int) -> Iterator[Family]:
    nums = [len(pool.ranks) for pool in meshes.pools]
    if len(nums) < 2:
        return
    for depth in _degrees(gcd(*nums)):
        counts = tuple(num // depth for num in nums)
        for division in fit_divisions(meshes, counts):
            mesh = Mesh(counts, *division)
            share = -(-rows // mesh.data)
            if all(meshes.too_large(index, division, share) for index in range(len(nums))):
                continue
            if mesh.data <= rows and depth <= max_stages:
                yield _family("alike", meshes, micro_batches, [((1,), mesh)], (depth,), depth)


def _degrees(most: int) -> list[int]:
    """Powers of two, and thrice them, up to *most*, and *most*."""
    found = {factor << power for factor in (1, 3) for power in range(most.bit_length()) if factor << power <= most}
    return sorted({*found, most})


def _single(index: int, value: int, length: int) -> tuple[int, ...]:
    return tuple(value if position == index else 0 for position in range(length))


def _family(
    name: str,
    meshes: CostTable,
    micro_batches: int,
    chosen: Sequence[Sized],
    quotas: tuple[int, ...],
    deepest: int,
    num: int = 1,
) -> Family:
    """The family of these meshes; without `Family.extremes` it has none of one dimension."""
    sizes = [sum(units) for units, _ in chosen]
    return Family(
        name=name,
        meshes=tuple(chosen),
        quotas=quotas,
        max_stages=max(1, min(deepest, len(meshes.chain), sum(quotas) // min(sizes, default=1))),
        micro_batches=micro_batches,
        num=num,
        extremes=tuple(_extremes(chosen)),
    )


def _dimension(units: Sequence[int]) -> int:
    return next(index for index, number in enumerate(units) if number)


def _extremes(chosen: Sequence[Sized]) -> list[Sized]:
    """The smallest and the largest mesh of each tensor and expert degree of one dimension."""
    found: dict[tuple[int, ...], tuple[Sized, Sized]] = {}
    for one in chosen:
        units, mesh = one
        used = [index for index, number in enumerate(units) if number]
        if len(used) == 1:
            key = used[0], *mesh.division
            least, most = found.get(key, (one, one))
            found[key] = min(least, one), max(most, one)
    return list(dict.fromkeys(one for both in found.values() for one in both))
