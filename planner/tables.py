"""Places of embedding tables: which device looks up what of each table, whole or in parts.

Objective: the least time of the slowest device, which looks up the rows of its tables and updates them, sends the
vectors to the devices whose rows of the batch they are, and receives those of others; gradients go back the same way.
Constraint: every device fits in memory, and every host. A table is *whole* on one device; cut by *columns*, so that
each device looks up a part of every vector; or cut by *rows*, so that each has a term of every vector, and all send
whole vectors. Cuts are even. Or it is hot, with few rows for what is looked up of it: then all devices have *replicas*,
look their own rows of the batch up, and exchange gradients in place of vectors. Where devices cannot hold all tables
some are in the memory of their hosts, those first that lose least time there for their bytes.

Tables are placed one after the other, the dearest first, each where the slowest device is then the fastest. After that
single tables are placed otherwise, and pairs exchanged, while that helps. It is a heuristic; a test compares it with
all placements of small cases. It knows seconds and bytes of tables, and no models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from whale.errors import InfeasibleError, UsageError
from whale.ir.units import bytes_text

__all__ = ["Table", "TableDevice", "TableHost", "TablePlace", "TablePlaces", "Way", "cheapest_places"]

Way = Literal["whole", "columns", "rows", "replicas"]

MOST_ROUNDS = 20
"""Limit on rounds over all tables; each must improve."""

MOST_EXCHANGED = 64
"""Pairs are exchanged among at most this number of tables, the dearest."""

BETTER = 1e-9
"""The part by which a placement must be faster to be better."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """An embedding table.

    Attributes:
        name: of it.
        rows, columns: of its matrix.
        bytes: of the table with its gradient and optimizer states.
        seconds: on each device, to look up all rows that a step reads, and to update them.
        fixed: seconds besides on each device that has a part of it, where it is cut: each reads all indices, and they
            add up what optimizers need of whole rows.
        sent_bytes: of its vectors for the whole batch; where only distinct ones are sent, of these.
        distinct: the part of the vectors that are distinct, if only these are sent; none if all are.
        of_replicas: seconds on each device if all have it, with the sum of its gradients; none if they cannot.
        at_host: the same as *seconds* at each device's host, with the copies of vectors; none if it cannot be there.
    """

    name: str
    rows: int
    columns: int
    bytes: float
    seconds: tuple[float, ...]
    fixed: tuple[float, ...]
    sent_bytes: float
    of_replicas: tuple[float, ...] = ()
    at_host: tuple[float, ...] = ()
    distinct: float | None = None


@dataclass(frozen=True, kw_only=True)
class TableDevice:
    """A device for tables.

    Attributes:
        name: for messages.
        memory_bytes: that the rest of the model leaves.
        seconds: of what it computes besides, such as the dense part for its rows.
        share: the part of the batch whose vectors it needs.
        seconds_per_byte: of what it sends or receives.
        host: position of its host among all.
    """

    name: str
    memory_bytes: float
    seconds: float
    share: float
    seconds_per_byte: float
    host: int = 0


class TableHost(NamedTuple):
    """Memory of a node beside that of its devices, in bytes, with a name for messages."""

    name: str
    memory_bytes: float


class TablePlace(NamedTuple):
    """The place of a table: whole on one rank, cut evenly among several, or replicas on all; in the memory of these
    ranks' devices or of their hosts."""

    way: Way
    ranks: tuple[int, ...]
    on_host: bool = False


@dataclass(frozen=True, kw_only=True)
class TablePlaces:
    """The places of tables by name, for each device the seconds of a step and the bytes of tables, and these for each
    host."""

    places: Mapping[str, TablePlace]
    seconds: tuple[float, ...]
    bytes: tuple[float, ...]
    host_bytes: tuple[float, ...] = ()


def cheapest_places(
    tables: Sequence[Table], devices: Sequence[TableDevice], hosts: Sequence[TableHost] = ()
) -> TablePlaces:
    """Place tables on devices, and where these cannot hold them on their hosts; see the module for the objective.

    Raises:
        UsageError: there is no device, or a table has not as many seconds as there are devices.
        InfeasibleError: the tables do not fit; says what of which does not.

    >>> from dataclasses import replace
    >>> devices = [TableDevice(name=str(i), memory_bytes=9, seconds=0, share=0.5, seconds_per_byte=0) for i in (0, 1)]
    >>> tables = [
    ...     Table(name=name, rows=1, columns=1, bytes=size, seconds=(size, size), fixed=(0, 0), sent_bytes=0)
    ...     for name, size in (("a", 6), ("b", 5), ("c", 2))
    ... ]
    >>> [place.ranks for place in cheapest_places(tables, devices).places.values()]
    [(0,), (1,), (1,)]
    >>> tables = [replace(table, bytes=2 * table.bytes, at_host=(9, 9)) for table in tables]
    >>> [place.on_host for place in cheapest_places(tables, devices, [TableHost("host", 24)]).places.values()]
    [True, True, False]
    """
    if not devices or any(len(table.seconds) != len(devices) for table in tables):
        raise UsageError(f"{len(devices)} devices for tables: each table needs its seconds on every one of them")
    return _Search(tables, devices, hosts).run()


_Floats = npt.NDArray[np.float64]


class _Load(NamedTuple):
    """The load of each device by some tables: seconds of look-ups, bytes held, by hosts too, which follow devices,
    bytes sent to others and received."""

    seconds: _Floats
    bytes: _Floats
    sent: _Floats
    received: _Floats

    def plus(self, other: _Load, sign: float = 1.0) -> _Load:
        return _Load(*(a + sign * b for a, b in zip(self, other, strict=True)))


class _Search:
    def __init__(self, tables: Sequence[Table], devices: Sequence[TableDevice], hosts: Sequence[TableHost]) -> None:
        self.tables, self.devices, self.hosts = tables, devices, hosts
        self.memory, self.own, self.share, self.pace = (
            np.array([getattr(device, name) for device in devices])
            for name in ("memory_bytes", "seconds", "share", "seconds_per_byte")
        )
        self.on_devices = float(self.memory.sum())
        self.memory = np.concatenate([self.memory, [host.memory_bytes for host in hosts]])
        nothing = np.zeros(len(devices))
        self.load = _Load(nothing, np.zeros(len(self.memory)), nothing, nothing)
        self.chosen: dict[int, TablePlace] = {}
        self.order = sorted(range(len(tables)), key=lambda i: (-min(tables[i].seconds), -tables[i].bytes, i))
        self.uses_hosts = bool(hosts) and sum(table.bytes for table in tables) > self.on_devices
        if self.uses_hosts:  # those first that must not be there
            self.order.sort(key=self._gain, reverse=True)
        self._loads: dict[tuple[int, TablePlace], _Load] = {}

    def run(self) -> TablePlaces:
        for number in sorted(self.order, key=lambda i: not (self._is_large(i) or self.uses_hosts)):
            self._place(number)
        for _ in range(MOST_ROUNDS):
            if not (self._move_any() or self._exchange_any()):
                break
        places = {table.name: self.chosen[number] for number, table in enumerate(self.tables)}
        held = tuple(map(float, self.load.bytes))
        return TablePlaces(
            places=places,
            seconds=tuple(map(float, self._seconds(self.load))),
            bytes=held[: len(self.devices)],
            host_bytes=held[len(self.devices) :],
        )

    def _gain(self, number: int) -> float:
        """Seconds that a table on devices saves for each of its bytes."""
        table = self.tables[number]
        return (min(table.at_host) - min(table.seconds)) / table.bytes if table.at_host and table.bytes else np.inf

    def _is_large(self, number: int) -> bool:
        """Whether a table takes most of a device, so that it must come first."""
        return bool(self.tables[number].bytes > 0.5 * self.memory[: len(self.devices)].max())

    def _load_of(self, number: int, place: TablePlace) -> _Load:
        key = (number, place)
        if key not in self._loads:
            table, ranks = self.tables[number], list(place.ranks)
            if place.way == "replicas":
                nothing, each = np.zeros(len(self.devices)), np.zeros(len(self.memory))
                each[: len(self.devices)] = table.bytes
                self._loads[key] = _Load(np.array(table.of_replicas), each, nothing, nothing)
                return self._loads[key]
            part = np.zeros(len(self.devices))
            part[ranks] = 1.0 / len(ranks)
            sends = (part > 0).astype(float) if place.way == "rows" else part
            sent = table.sent_bytes * sends * (1.0 - self.share)
            received = table.sent_bytes * self.share * (sends.sum() - sends)
            whole = table.at_host if place.on_host else table.seconds
            seconds = np.array(whole) * part + np.array(table.fixed) * ((part > 0) & (part < 1))
            held = np.zeros(len(self.memory))
            for rank in ranks:
                held[len(self.devices) + self.devices[rank].host if place.on_host else rank] += table.bytes * part[rank]
            self._loads[key] = _Load(seconds, held, sent, received)
        return self._loads[key]

    def _seconds(self, load: _Load) -> _Floats:
        """Seconds of a step on each device; vectors go, and gradients come."""
        exchanged: _Floats = 2.0 * self.pace * np.maximum(load.sent, load.received)
        return self.own + load.seconds + exchanged

    def _score(self, load: _Load) -> tuple[float, float]:
        """The slowest device, and then all of them."""
        seconds = self._seconds(load)
        return float(seconds.max()), float(np.square(seconds).sum())

    def _options(self, number: int, load: _Load) -> Iterator[TablePlace]:
        """Places of a table beside others, that fit."""
        table, count = self.tables[number], len(self.devices)
        found = [TablePlace("whole", (rank,)) for rank in range(count)]
        free = self.memory - load.bytes
        seconds = self._seconds(load)
        rooms = [free[:count]]
        if self.uses_hosts:
            rooms.append(np.array([free[count + device.host] for device in self.devices]))
        for by in (np.argsort(seconds, kind="stable"), *(np.argsort(-room, kind="stable") for room in rooms)):
            for size in range(2, count + 1):
                ranks = tuple(sorted(int(rank) for rank in by[:size]))
                if table.columns % size == 0:
                    found.append(TablePlace("columns", ranks))
                if table.rows >= size:
                    found.append(TablePlace("rows", ranks))
        if self.uses_hosts and table.at_host:
            found += [place._replace(on_host=True) for place in found]
        if table.of_replicas and count > 1:
            found.append(TablePlace("replicas", tuple(range(count))))
        for place in dict.fromkeys(found):
            if (self._load_of(number, place).bytes <= free).all():
                yield place

    def _best(self, number: int, load: _Load) -> tuple[tuple[float, float], TablePlace] | None:
        scored = [(self._score(load.plus(self._load_of(number, at))), at) for at in self._options(number, load)]
        return min(scored, key=lambda one: one[0], default=None)

    def _place(self, number: int) -> None:
        found = self._best(number, self.load)
        if found is None and self.hosts and not self.uses_hosts:
            self.uses_hosts = True
            found = self._best(number, self.load)
        if found is None:
            table, free = self.tables[number], self.memory - self.load.bytes
            names = [device.name for device in self.devices] + [f"the host {host.name}" for host in self.hosts]
            rest = [f"{name} {bytes_text(max(0.0, float(room)))}" for name, room in zip(names, free, strict=True)]
            left = ", ".join([*rest[: len(self.devices)][:8], *rest[len(self.devices) :][:8]])
            raise InfeasibleError(
                f"{table.name} takes {bytes_text(table.bytes)} with its gradient and optimizer states, and the memory "
                f"that is left is {left}: even in equal parts it does not fit. Use sparse=True with "
                "whale.optim.RowWiseAdagrad, more devices, or fewer columns"
            )
        self.chosen[number] = found[1]
        self.load = self.load.plus(self._load_of(number, found[1]))

    def _without(self, *numbers: int) -> _Load:
        load = self.load
        for number in numbers:
            load = load.plus(self._load_of(number, self.chosen[number]), -1.0)
        return load

    def _move_any(self) -> bool:
        """Place single tables otherwise; whether one is."""
        moved = False
        for number in self.order:
            rest, before = self._without(number), self._score(self.load)
            found = self._best(number, rest)
            if found is not None and _is_better(found[0], before):
                self.chosen[number], moved = found[1], True
                self.load = rest.plus(self._load_of(number, found[1]))
        return moved

    def _exchange_any(self) -> bool:
        """Exchange the places of two tables; whether some are."""
        moved = False
        for one, other in combinations(self.order[:MOST_EXCHANGED], 2):
            first, second = self.chosen[one], self.chosen[other]
            if first == second or "whole" not in (first.way, second.way):
                continue
            if not (self._can(one, second) and self._can(other, first)):
                continue
            load = self._without(one, other).plus(self._load_of(one, second)).plus(self._load_of(other, first))
            if (load.bytes <= self.memory).all() and _is_better(self._score(load), self._score(self.load)):
                self.chosen[one], self.chosen[other], self.load, moved = second, first, load, True
        return moved

    def _can(self, number: int, place: TablePlace) -> bool:
        """Whether a table can be cut so."""
        table, size = self.tables[number], len(place.ranks)
        ways = {"columns": table.columns % size == 0, "rows": table.rows >= size, "replicas": bool(table.of_replicas)}
        return ways.get(place.way, True)


def _is_better(one: Any, other: Any) -> bool:
    """Whether a score is better than another."""
    return one[0] < other[0] * (1 - BETTER) or (one[0] <= other[0] and one[1] < other[1] * (1 - BETTER))
