"""Rivals of the plan that a search finds: plans that people write down, random ones, and changes of the found one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

from hunt_cases import Problem

from whale.commands.searching import Searched
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.ir.state import StateSharding
from whale.planner.cost.stage import CostModel
from whale.planner.schedules.in_flight import in_flight
from whale.planner.search import Candidate, SearchSettings, StageChoice
from whale.planner.search.evaluate import fitted
from whale.planner.search.layout import fastest_rows

__all__ = ["Makers", "Rival", "random_meshes", "rivals", "simple_meshes"]

MOST_RANDOM, MOST_LOCAL = 60, 80
"""Random plans and local changes that are scored."""

Layers = Sequence[range]


class Mesh(NamedTuple):
    """A stage's devices, row-major over data x tensor x expert, and its degrees."""

    ranks: tuple[int, ...]
    tensor: int
    expert: int = 1

    @property
    def data(self) -> int:
        return len(self.ranks) // self.tensor // self.expert


@dataclass(frozen=True)
class Rival:
    """A plan to hold the found one against."""

    kind: str
    candidate: Candidate


@dataclass(frozen=True)
class Makers:
    """Maker of candidates from meshes: balanced cuts, rows by speed, and their score."""

    profile: ModelProfile
    cluster: Cluster
    batch: int
    prices: CostModel
    micro_batches: tuple[int, ...]
    layers: int
    starts: frozenset[int]

    @classmethod
    def of(cls, profile: ModelProfile, cluster: Cluster, settings: SearchSettings, problem: Problem) -> Makers:
        batch = problem.batch
        prices = CostModel.of(profile, cluster, precision=settings.precision, batch=batch)
        counts = [count for count in range(1, batch + 1) if batch % count == 0]
        counts = counts if settings.micro_batches is None else [settings.micro_batches]
        starts = frozenset(index for index, path in enumerate(profile.paths) if path)
        return cls(profile, cluster, batch, prices, tuple(counts), len(profile.layers), starts)

    def made(self, meshes: Sequence[Mesh], micro_batches: int, cuts: Layers | None = None) -> Candidate | None:
        """The candidate with these stages; None where the degrees or the number of stages are impossible."""
        if self.batch % micro_batches or any(not self._knows(mesh) for mesh in meshes):
            return None
        cuts = cuts or self._cuts(meshes, micro_batches)
        if cuts is None:
            return None
        stages = []
        for index, (mesh, layers) in enumerate(zip(meshes, cuts, strict=True)):
            size = mesh.tensor * mesh.expert
            groups = self._groups(mesh)
            held = in_flight("1f1b", len(meshes), index, micro_batches)
            own = fastest_rows(self.prices, layers, groups, self.batch // micro_batches, micro_batches, held)
            level = self.prices.stack.zero
            if level and 0 in own and sum(own) >= len(own):
                return None  # a replica without rows has no state
            stages.append(
                StageChoice(
                    first=layers.start,
                    last=layers.stop,
                    ranks=mesh.ranks,
                    data=len(mesh.ranks) // size,
                    tensor=mesh.tensor,
                    expert=mesh.expert,
                    rows=own,
                    state=StateSharding(level) if level else None,
                )
            )
        return fitted(self.prices, stages, micro_batches=micro_batches, schedule="1f1b", batch=self.batch)

    def dividing(self, level: int) -> Makers:
        """The maker of candidates whose replicas divide their state."""
        return replace(self, prices=self.prices.under("none", level, "none"))

    def _knows(self, mesh: Mesh) -> bool:
        return (
            mesh.tensor in self.prices.tensor_degrees
            and mesh.expert in (1, *self.prices.expert_degrees)
            and 1 in (mesh.tensor, mesh.expert)
            and len(mesh.ranks) % (mesh.tensor * mesh.expert) == 0
        )

    def _groups(self, mesh: Mesh) -> list[Any]:
        size = mesh.tensor * mesh.expert
        parts = [mesh.ranks[first : first + size] for first in range(0, len(mesh.ranks), size)]
        return [self.prices.group(part, mesh.data, mesh.expert) for part in parts]

    def _cuts(self, meshes: Sequence[Mesh], micro_batches: int) -> Layers | None:
        """Contiguous layers for each stage with which the slowest is least slow."""
        num, depth = self.layers, len(meshes)
        if depth > num:
            return None
        if depth == 1:
            return [range(num)]
        rows = self.batch // micro_batches
        sums = []
        for mesh in meshes:
            group = self._groups(mesh)[0]
            share = -(-rows // mesh.data)
            costs = [self.prices.stage([layer], group, share, micro_batches) for layer in range(num)]
            total = [0.0]
            for cost in costs:
                total.append(total[-1] + cost.forward + cost.backward)
            sums.append(total)
        best = [[float("inf")] * (num + 1) for _ in range(depth + 1)]
        come = [[0] * (num + 1) for _ in range(depth + 1)]
        best[0][0] = 0.0
        for stage in range(depth):
            own = sums[stage]
            for end in range(stage + 1, num + 1):
                for first in range(stage, end):
                    if stage and first not in self.starts:
                        continue
                    slowest = max(best[stage][first], own[end] - own[first])
                    if slowest < best[stage + 1][end]:
                        best[stage + 1][end], come[stage + 1][end] = slowest, first
        if best[depth][num] == float("inf"):
            return None
        ends = [num]
        for stage in range(depth, 0, -1):
            ends.append(come[stage][ends[-1]])
        return [range(*pair) for pair in pairwise(reversed(ends))]

    def few_counts(self, depth: int) -> list[int]:
        """Numbers of micro-batches that suit a pipeline of a given depth."""
        if depth == 1:
            return list(self.micro_batches[:4])
        wanted = sorted(self.micro_batches, key=lambda count: abs(count - 3 * depth))
        return sorted({*wanted[:3], self.micro_batches[-1]})


def rivals(makers: Makers, searched: Searched | None, numbers: random.Random) -> Iterator[Rival]:
    dividing = [makers.dividing(level) for level in ((1,) if searched is not None else (1, 3))]
    for kind, meshes in simple_meshes(makers):
        for count in makers.few_counts(len(meshes)):
            if candidate := makers.made(meshes, count):
                yield Rival(kind, candidate)
            for one in dividing if any(mesh.data > 1 for mesh in meshes) else ():
                if candidate := one.made(meshes, count):
                    yield Rival(f"{kind}, zero {one.prices.stack.zero}", candidate)
    for _ in range(MOST_RANDOM):
        meshes, count = random_meshes(makers, numbers)
        for one in (makers, *dividing):
            if candidate := one.made(meshes, count):
                yield Rival("random", candidate)
    if searched is not None:
        for one in (makers, *dividing):
            yield from islice(_local(one, searched.best.candidate, numbers), MOST_LOCAL)


def simple_meshes(makers: Makers) -> Iterator[tuple[str, list[Mesh]]]:
    """The plans that people write down without a search."""
    cluster = makers.cluster
    every = tuple(range(len(cluster.devices)))
    degrees = sorted({1, *makers.prices.tensor_degrees})
    by_type: dict[str, list[int]] = {}
    for device in cluster.devices:
        by_type.setdefault(device.type.name, []).append(device.rank)
    yield "data parallel", [Mesh(every, 1)]
    for name, ranks in by_type.items():
        yield f"data parallel on {name}", [Mesh(tuple(ranks), 1)]
    yield "one device", [Mesh((max(every, key=lambda r: cluster.devices[r].speed("float32")),), 1)]
    for degree in degrees[1:]:
        if all(len(node.ranks) % degree == 0 for node in cluster.nodes):
            yield f"tensor {degree} in nodes, data across", [Mesh(every, degree)]
            meshes = [Mesh(tuple(node.ranks), degree) for node in cluster.nodes]
            yield f"tensor {degree} in nodes, a stage a node", meshes
            if len(every) == degree:
                yield "tensor parallel", [Mesh(every, degree)]
    for degree in makers.prices.expert_degrees:
        if len(every) % degree == 0:
            yield f"expert parallel {degree}", [Mesh(every, 1, degree)]
    nodes = [Mesh(tuple(node.ranks), 1) for node in cluster.nodes]
    for name, meshes in (
        ("data in nodes, a stage a node", nodes),
        ("a stage a device", [Mesh((r,), 1) for r in every]),
    ):
        yield name, meshes
        by_memory = sorted(meshes, key=lambda mesh: -cluster.devices[mesh.ranks[0]].memory_bytes)
        yield name, by_memory
        yield name, list(reversed(meshes))
    if len(by_type) > 1:
        yield "data parallel, a stage a type", [Mesh(tuple(ranks), 1) for ranks in by_type.values()]
    for depth in (2, 4, 8):
        if len(every) % depth == 0:
            size = len(every) // depth
            yield (
                f"data parallel in {depth} stages",
                [Mesh(every[place * size : (place + 1) * size], 1) for place in range(depth)],
            )


def random_meshes(makers: Makers, numbers: random.Random) -> tuple[list[Mesh], int]:
    """Any plan: how many stages, which devices in each and in which mesh, how many micro-batches."""
    num = len(makers.cluster.devices)
    order = list(range(num))
    if numbers.random() < 0.3:
        numbers.shuffle(order)
    else:
        nodes = [list(node.ranks) for node in makers.cluster.nodes]
        numbers.shuffle(nodes)
        order = [rank for node in nodes for rank in node]
    if num > 1 and numbers.random() < 0.2:
        order = order[: numbers.randint(1, num)]
    num = len(order)
    most = min(num, makers.layers, makers.batch * 2)
    depth = min(numbers.randint(1, most), numbers.randint(1, most))
    cuts = (0, *sorted(numbers.sample(range(1, num), depth - 1)), num)
    meshes = []
    for first, last in pairwise(cuts):
        ranks = tuple(sorted(order[first:last]))
        divisions = [(degree, 1) for degree in makers.prices.tensor_degrees if len(ranks) % degree == 0]
        divisions += [(1, degree) for degree in makers.prices.expert_degrees if len(ranks) % degree == 0]
        meshes.append(Mesh(ranks, *numbers.choice(divisions)))
    return meshes, numbers.choice(makers.micro_batches)


def _local(makers: Makers, found: Candidate, numbers: random.Random) -> Iterator[Rival]:
    """The found plan with one thing changed."""
    meshes = [Mesh(stage.ranks, stage.tensor, stage.expert) for stage in found.stages]
    cuts = [range(stage.first, stage.last) for stage in found.stages]
    changes = list(_changes(makers, meshes, cuts, found.micro_batches))
    numbers.shuffle(changes)
    for kind, other, layers, count in changes:
        if candidate := makers.made(other, count, layers):
            yield Rival(f"local {kind}", candidate)


def _changes(
    makers: Makers, meshes: list[Mesh], cuts: list[range], count: int
) -> Iterator[tuple[str, list[Mesh], Layers | None, int]]:
    place = makers.micro_batches.index(count) if count in makers.micro_batches else 0
    for near in makers.micro_batches[max(0, place - 2) : place + 3]:
        yield "micro-batches", meshes, cuts, near
        yield "micro-batches", meshes, None, near
    if count not in makers.micro_batches:
        return
    for index in range(len(meshes) - 1):
        one, other = cuts[index], cuts[index + 1]
        for moved in (-1, 1):
            middle = one.stop + moved
            if one.start < middle < other.stop and middle in makers.starts:
                yield (
                    "cut",
                    meshes,
                    [*cuts[:index], range(one.start, middle), range(middle, other.stop), *cuts[index + 2 :]],
                    count,
                )
        joined = Mesh(
            tuple(sorted((*meshes[index].ranks, *meshes[index + 1].ranks))), meshes[index].tensor, meshes[index].expert
        )
        layers = [*cuts[:index], range(one.start, other.stop), *cuts[index + 2 :]]
        yield "joined", [*meshes[:index], joined, *meshes[index + 2 :]], layers, count
        yield "exchanged", [*meshes[:index], meshes[index + 1], meshes[index], *meshes[index + 2 :]], cuts, count
    for index, mesh in enumerate(meshes):
        divisions = [(degree, 1) for degree in makers.prices.tensor_degrees]
        divisions += [(1, degree) for degree in makers.prices.expert_degrees]
        for division in divisions:
            if division != mesh[1:] and len(mesh.ranks) % (division[0] * division[1]) == 0:
                other = Mesh(tuple(sorted(mesh.ranks)), *division)
                yield "degree", [*meshes[:index], other, *meshes[index + 1 :]], cuts, count
        half = len(mesh.ranks) // 2
        if half:
            parts = [Mesh(tuple(sorted(part)), 1) for part in (mesh.ranks[:half], mesh.ranks[half:])]
            yield "split", [*meshes[:index], *parts, *meshes[index + 1 :]], None, count
    used = {rank for mesh in meshes for rank in mesh.ranks}
    left = tuple(rank for rank in range(len(makers.cluster.devices)) if rank not in used)
    if left:
        yield "left over", [*meshes, Mesh(left, 1)], None, count
        yield "left over", [Mesh(left, 1), *meshes], None, count
        for index, mesh in enumerate(meshes):
            more = mesh._replace(ranks=tuple(sorted((*mesh.ranks, *left))))
            yield "left over", [*meshes[:index], more, *meshes[index + 1 :]], cuts, count
    for index, mesh in enumerate(meshes):
        if mesh.data > 1:
            size = mesh.tensor * mesh.expert
            yield "fewer", [*meshes[:index], mesh._replace(ranks=mesh.ranks[:-size]), *meshes[index + 1 :]], cuts, count
