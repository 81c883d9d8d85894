"""Folding of equal ranks: one rank of each kind is simulated for all ranks of the kind.

Two ranks are equal if their tasks have equal times, and if their peers in messages, groups and gradient reductions are
equal in the same sense. This is the coarsest equitable partition of the ranks, computed by colour refinement: ranks
with equal times start with one colour, and the colours of their neighbours split colours until nothing changes. Ranks
of one colour are in the same state at all times of a simulation, because every event that unblocks one of them happens
to the others at the same time. Messages that share an adapter count the messages of the omitted ranks. So the folded
step equals the full step exactly; if messages share an adapter, up to rounding (the full simulation rounds the end of
each of several simultaneous messages).

If folding would put two different links between the same two ranks, or a link from a rank to itself, the ranks stay
separate. Complexity: linear in the size of the workload, times the number of rounds, usually four or five. This module
knows neither the clock nor devices.

Source: A. Cardon, M. Crochemore, "Partitioning a graph in O(|A| log |V|)" (1982), for the partition; its faster
algorithm is not needed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from whale.ir.workload import Boundary, LinkTime, Reduction, StageWork, Transfer, Workload

__all__ = ["Quotient", "quotient"]

Pair = tuple[int, int]
T = TypeVar("T")

_NUMBERS = (
    "forward", "backward", "weights", "communication", "kept_bytes", "forward_peak_bytes", "backward_peak_bytes",
    "gathered", "own",
)  # fmt: skip
"""Fields of a stage with one entry per rank, or none."""


@dataclass(frozen=True, kw_only=True)
class Quotient:
    """A workload with one rank of each kind.

    Attributes:
        workload: the lowest rank of each kind represents it; ranks keep their original numbers.
        members: all ranks of a kind, ascending, by the rank that represents them.
        loads: for each link and resource, how many equal links share the resource.
    """

    workload: Workload
    members: Mapping[int, tuple[int, ...]]
    loads: Mapping[Pair, Mapping[str, int]]


def quotient(workload: Workload) -> Quotient:
    """Fold the equal ranks of a consistent workload (`whale.planner.simulation.simulate.check_workload`).

    >>> stage = StageWork(ranks=(0, 1, 2), forward=(1, 1, 2), backward=(2, 2, 2), weights=(1,) * 3, kept_bytes=(0,) * 3)
    >>> found = quotient(Workload(world_size=3, micro_batches=4, stages=(stage,)))
    >>> found.workload.stages[0].ranks, dict(found.members)
    ((0, 2), {0: (0, 1), 2: (2,)})
    """
    structure = _Structure(workload)
    colours = structure.refined(_numbered(structure.own))
    while apart := structure.indistinct(colours):
        ranks = {rank: (colour, rank if colour in apart else -1) for rank, colour in colours.ranks.items()}
        colours = structure.refined(_numbered(ranks))
    return _divided(structure, colours)


def _numbered(keys: Mapping[T, Hashable]) -> dict[T, int]:
    """Number the keys; equal keys get equal numbers."""
    known: dict[Hashable, int] = {}
    return {item: known.setdefault(key, len(known)) for item, key in keys.items()}


@dataclass(frozen=True)
class _Colours:
    """Colours of ranks, links, resources and reduction groups; equal items have equal colours."""

    ranks: dict[int, int]
    links: dict[Pair, int]
    resources: dict[str, int]
    sums: dict[int, int]

    def count(self) -> list[int]:
        """Number of colours of each."""
        return [len(set(colours.values())) for colours in (self.ranks, self.links, self.resources, self.sums)]


def _positions(sequence: Sequence[int], members: Sequence[int]) -> tuple[int, ...]:
    """For each member in a sequence, also of others, its position among all members."""
    position = {member: place for place, member in enumerate(members)}
    return tuple([position[one] for one in sequence if one in position])


class _Structure:
    """Adjacency of the ranks of a workload: messages, groups and reductions.

    Attributes:
        own: times of a rank's tasks, its copies and the order of its reductions.
        sizes: bytes of all transfers, by boundary, direction, source and target.
        carried: the transfers over each link.
        times: `LinkTime` of a link, or None if the workload has none.
        leaving, entering: links of a rank, in the order of its program.
        users: links that share a resource.
        groups: groups of each rank in which its tasks wait for others.
        sums: reductions by their set of ranks. The other attributes refer to a set by its position here.
        terms: labels of the reductions of each set.
        sets: sets of each rank.
        place: for each set and rank, the set's position among the rank's sets, and the slowdown of the rank in it.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.sizes = _sizes(workload)
        times = {(link.source, link.target): link for link in workload.links}
        copied: dict[int, list[Any]] = {}
        self.carried: dict[Pair, list[Any]] = {}
        for (boundary, direction, source, target), size in self.sizes.items():
            if source == target:
                copied.setdefault(source, []).append((boundary, direction, size))
            else:
                self.carried.setdefault((source, target), []).append((boundary, direction, size))
        self.times = {pair: times.get(pair) for pair in self.carried}
        self.labels = {pair: (_label(self.times[pair]), tuple(carried)) for pair, carried in self.carried.items()}
        self.uses = {pair: _resources(time) for pair, time in self.times.items()}
        self.leaving: dict[int, list[Pair]] = {}
        self.entering: dict[int, list[Pair]] = {}
        self.users: dict[str, list[Pair]] = {}
        for pair, resources in self.uses.items():
            self.leaving.setdefault(pair[0], []).append(pair)
            self.entering.setdefault(pair[1], []).append(pair)
            for resource in resources:
                self.users.setdefault(resource, []).append(pair)
        self.groups: dict[int, list[tuple[int, ...]]] = {}
        for stage in workload.stages:
            for group in stage.together:
                for rank in group:
                    self.groups.setdefault(rank, []).append(group)
        self.sums: dict[tuple[int, ...], list[Reduction]] = {}
        for reduction in workload.reductions:
            self.sums.setdefault(reduction.ranks, []).append(reduction)
        numbers = {ranks: number for number, ranks in enumerate(self.sums)}  # thousands of ranks are hashed once
        sequence = [numbers[reduction.ranks] for reduction in workload.reductions]
        self.sets: dict[int, list[int]] = {}
        for ranks, number in numbers.items():
            for rank in ranks:
                self.sets.setdefault(rank, []).append(number)
        orders = {own: _positions(sequence, own) for own in set(map(tuple, self.sets.values()))}
        self.terms = [tuple(map(_term, reductions)) for reductions in self.sums.values()]
        self.place = [
            [
                (rank, self.sets[rank].index(number), tuple(r.slowdown[at] for r in reductions if r.slowdown))
                for at, rank in enumerate(ranks)
            ]
            for number, (ranks, reductions) in enumerate(self.sums.items())
        ]
        self.own = {
            rank: (numbers, tuple(copied.get(rank, ())), orders.get(tuple(self.sets.get(rank, ())), ()))
            for rank, numbers in _numbers_of_ranks(workload).items()
        }

    def refined(self, ranks: dict[int, int]) -> _Colours:
        """Refine the colours of ranks by their neighbours until nothing changes."""
        before = _Colours(ranks, {}, dict.fromkeys(self.users, 0), {})
        while True:
            after = self._round(before)
            if after.count() == before.count():
                return after
            before = after

    def _round(self, before: _Colours) -> _Colours:
        ranks, resources = before.ranks, before.resources
        links = _numbered(
            {
                pair: (label, ranks[pair[0]], ranks[pair[1]], tuple(resources[name] for name in self.uses[pair]))
                for pair, label in self.labels.items()
            }
        )
        sums = _numbered(
            {
                number: (term, frozenset((ranks[rank], at, slowed) for rank, at, slowed in self.place[number]))
                for number, term in enumerate(self.terms)
            }
        )
        return _Colours(
            ranks=_numbered(
                {
                    rank: (
                        colour,
                        tuple(links[pair] for pair in self.leaving.get(rank, ())),
                        tuple(links[pair] for pair in self.entering.get(rank, ())),
                        tuple(frozenset(ranks[member] for member in group) for group in self.groups.get(rank, ())),
                        tuple(sums[found] for found in self.sets.get(rank, ())),
                    )
                    for rank, colour in ranks.items()
                }
            ),
            links=links,
            resources=_numbered(
                {name: tuple(sorted(links[pair] for pair in pairs)) for name, pairs in self.users.items()}
            ),
            sums=sums,
        )

    def indistinct(self, colours: _Colours) -> set[int]:
        """Return the colours whose folding would need two links where there can be one.

        If processes do not run ahead, receives are posted by a credit of values, so every message counts.
        """
        found: set[int] = set()
        between: dict[Pair, int] = {}
        for (source, target), link in colours.links.items():
            ends = colours.ranks[source], colours.ranks[target]
            if ends[0] == ends[1] or between.setdefault(ends, link) != link:
                found.update(ends)
        if not self.workload.runs_ahead:
            for links in (*self.leaving.values(), *self.entering.values()):
                for link, count in Counter(colours.links[pair] for pair in links).items():
                    if count > 1:
                        pair = next(pair for pair in links if colours.links[pair] == link)
                        found.update(colours.ranks[rank] for rank in pair)
        sizes = Counter(colours.ranks.values())
        return {colour for colour in found if sizes[colour] > 1}


def _sizes(workload: Workload) -> dict[tuple[int, str, int, int], int]:
    found: dict[tuple[int, str, int, int], int] = {}
    for index, boundary in enumerate(workload.boundaries):
        for direction, transfers in (("forward", boundary.forward), ("backward", boundary.backward)):
            for transfer in transfers:
                key = (index, direction, transfer.source, transfer.target)
                found[key] = found.get(key, 0) + transfer.bytes
    return found


def _numbers_of_ranks(workload: Workload) -> dict[int, tuple[Any, ...]]:
    """Task times of each rank, stage by stage, and its update."""
    found: dict[int, list[Any]] = {rank: [] for rank in sorted({r for s in workload.stages for r in s.ranks})}
    for index, stage in enumerate(workload.stages):
        numbers = [getattr(stage, name) or (0,) * len(stage.ranks) for name in _NUMBERS]
        for rank, *own in zip(stage.ranks, *numbers, strict=True):
            found[rank].append((index, *own))
    update = workload.update or (0.0,) * workload.world_size
    return {rank: (*own, update[rank]) for rank, own in found.items()}


def _label(time: LinkTime | None) -> Hashable:
    return None if time is None else (time.latency, time.bandwidth)


def _resources(time: LinkTime | None) -> tuple[str, ...]:
    return () if time is None else tuple(dict.fromkeys(time.resources))


def _term(reduction: Reduction) -> Hashable:
    amounts = reduction.bytes, reduction.seconds, reduction.ready, reduction.stretch
    return reduction.stages, amounts, bool(reduction.slowdown)


# --- the quotient -----------------------------------------------------------------------------------------------------


def _divided(structure: _Structure, colours: _Colours) -> Quotient:
    members: dict[int, list[int]] = {}
    for rank in sorted(colours.ranks):
        members.setdefault(colours.ranks[rank], []).append(rank)
    stand_in = {rank: ranks[0] for ranks in members.values() for rank in ranks}
    workload = structure.workload
    links, loads = _links(structure, colours, stand_in)
    changed = workload.model_copy(
        update={
            "stages": tuple(_stage(stage, stand_in) for stage in workload.stages),
            "boundaries": tuple(
                _boundary(structure, index, boundary, stand_in) for index, boundary in enumerate(workload.boundaries)
            ),
            "reductions": tuple(_reductions(structure, colours, stand_in)),
            "links": links,
        }
    )
    return Quotient(workload=changed, members={own[0]: tuple(own) for own in members.values()}, loads=loads)


def _stage(stage: StageWork, stand_in: Mapping[int, int]) -> StageWork:
    kept = [position for position, rank in enumerate(stage.ranks) if stand_in[rank] == rank]
    numbers = {name: getattr(stage, name) for name in ("ranks", *_NUMBERS)}
    groups = dict.fromkeys(tuple(sorted({stand_in[rank] for rank in group})) for group in stage.together)
    return stage.model_copy(
        update={
            **{name: tuple(values[at] for at in kept) for name, values in numbers.items() if values},
            "together": tuple(group for group in groups if len(group) > 1),
        }
    )


def _boundary(structure: _Structure, index: int, boundary: Boundary, stand_in: Mapping[int, int]) -> Boundary:
    def left(direction: str, transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
        found: dict[Pair, Transfer] = {}
        for transfer in transfers:
            source, target = transfer.source, transfer.target
            ends = stand_in[source], stand_in[target]
            if ends not in found:
                size = structure.sizes[index, direction, source, target]
                found[ends] = Transfer(source=ends[0], target=ends[1], bytes=size)
        return tuple(found.values())

    forward, backward = left("forward", boundary.forward), left("backward", boundary.backward)
    return boundary.model_copy(update={"forward": forward, "backward": backward})


def _reductions(structure: _Structure, colours: _Colours, stand_in: Mapping[int, int]) -> Iterable[Reduction]:
    """Yield the first reduction of each set of equal reductions."""
    chosen: dict[int, tuple[int, ...]] = {}
    colour_of = {ranks: colours.sums[number] for number, ranks in enumerate(structure.sums)}
    for ranks, colour in colour_of.items():
        chosen.setdefault(colour, ranks)
    for reduction in structure.workload.reductions:
        ranks = reduction.ranks
        if chosen[colour_of[ranks]] != ranks:
            continue
        slowdown = dict(zip((stand_in[rank] for rank in ranks), reduction.slowdown, strict=False))
        left = tuple(dict.fromkeys(stand_in[rank] for rank in ranks))
        yield reduction.model_copy(update={"ranks": left, "slowdown": tuple(slowdown.values())})


def _links(
    structure: _Structure, colours: _Colours, stand_in: Mapping[int, int]
) -> tuple[tuple[LinkTime, ...], dict[Pair, dict[str, int]]]:
    """Return the folded links, with representative resources, and the number of equal links on each resource."""
    names: dict[int, str] = {}
    for name, colour in colours.resources.items():
        names.setdefault(colour, name)
    uses = {name: Counter(colours.links[pair] for pair in pairs) for name, pairs in structure.users.items()}
    found: dict[Pair, LinkTime] = {}
    loads: dict[Pair, dict[str, int]] = {}
    for pair, time in structure.times.items():
        ends = stand_in[pair[0]], stand_in[pair[1]]
        if time is None or ends in found:
            continue
        own = {names[colours.resources[name]]: uses[name][colours.links[pair]] for name in structure.uses[pair]}
        found[ends] = LinkTime(
            source=ends[0], target=ends[1], latency=time.latency, bandwidth=time.bandwidth, resources=tuple(own)
        )
        loads[ends] = own
    return tuple(found.values()), loads
