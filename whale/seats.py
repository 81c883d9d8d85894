"""Seats: which process of a launch is which rank of a plan or a cluster file, by the device that it has.

Launchers number processes by addresses and process ids, or in the order in which they come, and not by devices. The
ranks of a plan are for types of devices, and for hosts where the cluster file names them; so each process takes a rank
that is for what it has. This file knows types and hosts; no processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whale.detection import known_type
from whale.errors import PlanMismatchError
from whale.ir.cluster import Cluster
from whale.ir.device_names import matching_types
from whale.ir.plan import Plan
from whale.planner.catalog import device_types
from whale.planner.what_if import only
from whale.runtime.launch import Seating
from whale.runtime.location import RankLocation

__all__ = ["PartOfCluster", "Seat", "seating"]


@dataclass(frozen=True, kw_only=True)
class Seat:
    """The device that a rank is for: its type, its memory (0: any), and its host, if one is named."""

    device_type: str
    memory_bytes: int = 0
    host: str | None = None

    def __str__(self) -> str:
        return self.device_type + (f" on host {self.host}" if self.host is not None else "")


def seating(cluster: Cluster | None, plan: Plan | None) -> Seating | None:
    """How the processes of a launch take the ranks of a cluster, or of a plan without one; None if all are alike.

    What it returns raises `PlanMismatchError` if a rank is left for which no process has the device.

    >>> of = RankLocation(rank=0, device_type="cpu", node="here", memory_bytes=2**30, stands_for="slow")
    >>> fast = RankLocation(rank=1, device_type="cpu", node="here", memory_bytes=2**30, stands_for="fast")
    >>> plan = Plan.model_validate({"world_size": 2, "cluster": {"devices": {"fast": [0], "slow": [1]}}})
    >>> take = seating(None, plan)
    >>> take([of, fast]) if take else None
    (1, 0)
    """
    if cluster is not None:
        seats = _seats_of(cluster)
    elif plan is not None and plan.cluster is not None:
        types = device_types()
        named = {rank: name for name, ranks in plan.cluster.devices.items() for rank in ranks}
        seats = [
            Seat(device_type=name, memory_bytes=types[name].memory_bytes if name in types else 0)
            for _, name in sorted(named.items())
        ]
    else:
        return None
    return (lambda places: _all_taken(seats, places)) if len(set(seats)) > 1 else None


class PartOfCluster:
    """How the processes of a launch take ranks of a cluster that may have more devices, as where machines of a job
    come and go: the devices for which there is no process are left out, and the others are numbered anew.

    Called with the places of the processes, as a `Seating`.

    Attributes:
        cluster: of the devices for which there are processes, once they are known.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._seats = _seats_of(cluster)

    def __call__(self, places: Sequence[RankLocation]) -> tuple[int, ...]:
        """The rank of each process.

        Raises:
            PlanMismatchError: a process has a device of which the cluster has no more.
        """
        taken = _taken(self._seats, places, all_seats=False)
        without = [place for process, place in enumerate(places) if process not in taken]
        if without:
            what = without[0].stands_for or without[0].device_type
            raise PlanMismatchError(
                f"a process on {without[0].node} has a {what}, of which the cluster file has no more: it has "
                f"{', '.join(map(str, self._seats))}; name there all machines that may come"
            )
        self.cluster = only(self.cluster, taken.values())
        order = sorted(taken.values())
        return tuple(order.index(taken[process]) for process in range(len(places)))


def _seats_of(cluster: Cluster) -> list[Seat]:
    hosts = {node.name: node.host for node in cluster.nodes}
    return [
        Seat(device_type=device.type.name, memory_bytes=device.memory_bytes, host=hosts[device.node])
        for device in cluster.devices
    ]


def _all_taken(seats: Sequence[Seat], places: Sequence[RankLocation]) -> tuple[int, ...]:
    """The rank of each process."""
    taken = _taken(seats, places, all_seats=True)
    return tuple(taken[process] for process in range(len(places)))


def _taken(seats: Sequence[Seat], places: Sequence[RankLocation], *, all_seats: bool) -> dict[int, int]:
    """The seat of each process: its number in the launch if all fit so; else seats are filled in their order, each by
    a process beside the one before, if such a one fits, or by the first that does. Without *all_seats* those that no
    process fits stay free."""
    wanted = {seat.device_type: seat.memory_bytes for seat in seats}
    means = [_means(place, wanted) for place in places]

    def fits(process: int, seat: Seat) -> bool:
        place = places[process]
        return seat.device_type in means[process] and seat.host in (None, place.node, place.node.partition(".")[0])

    if len(seats) == len(places) and all(fits(rank, seat) for rank, seat in enumerate(seats)):
        return {rank: rank for rank in range(len(seats))}
    free = list(range(len(places)))
    taken: dict[int, int] = {}
    beside: tuple[str, str] | None = None
    for rank, seat in enumerate(seats):
        found = [process for process in free if fits(process, seat)]
        if not found:
            if not all_seats:
                continue
            have = ", ".join(f"{place.stands_for or place.device_type} on {place.node}" for place in places)
            raise PlanMismatchError(
                f"rank {rank} is for a device of type {seat}, and no process with such a one is left: the "
                f"{len(places)} that were started have {have}; start one process for each device of the plan or "
                "cluster file, or make a plan for these devices"
            )
        # One that fits several types takes what the others leave.
        least = min(len(means[process]) for process in found)
        found = [process for process in found if len(means[process]) == least]
        own = next((process for process in found if _agent(places[process]) == beside), found[0])
        free.remove(own)
        taken[own], beside = rank, _agent(places[own])
    return taken


def _agent(place: RankLocation) -> tuple[str, str]:
    return place.node, place.agent


def _means(place: RankLocation, wanted: Mapping[str, int]) -> set[str]:
    """The types, of those that are wanted, that the device of a process may be: all for a processor that stands for
    none; else by its name and the catalog's, and what the catalog has not, if nothing else is meant."""
    if place.stands_for:
        return {place.stands_for} & set(wanted)
    if place.device_type == "cpu":
        return set(wanted)
    known = known_type(place)
    own = {*matching_types(place.device_type, wanted), *([known.name] if known is not None else [])} & set(wanted)
    return own or {name for name in wanted if name not in device_types()}
