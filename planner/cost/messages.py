"""Messages between two stages: who sends what to whom, and how long it takes.

Replicas have their rows in order, as ranges of the micro-batch. Whale sends each device of the next stage what it has
of its rows, which is a part where its tensor group divides them, from those that have it
(`whale.strategies.transfer`), and the gradients back likewise. All of a stage's messages in one direction start
together. Those that leave a node through one adapter, or enter it through one, get equal parts of it, as in the
simulator. Messages of other boundaries are not considered here: links name the adapters that they share
(`whale.planner.cost.plan_messages`), and `whale.planner.simulation` knows when they move.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from whale.planner.cost.chain_stage import ChainStage
from whale.planner.cost.stage import CostModel

__all__ = ["Exchange", "InCommon", "Peers", "Sent", "exchange", "in_common"]

ROW = 1e-9
"""Less than that is no row; balanced replicas have fractions of rows, on average over micro-batches."""


class InCommon(NamedTuple):
    """Rows that the owner of a range of them has in common with one of the next stage; both by position."""

    source: int
    target: int
    rows: float


class Sent(NamedTuple):
    """The message that ends last of some: bytes, and seconds in all."""

    bytes: int
    latency: float
    seconds: float


Peers = tuple[int, ...]
"""For each device of a replica, with how many others it has messages in one direction."""


class Exchange(NamedTuple):
    """The slowest messages forward and back between some replicas of two stages, and the peers of the devices of each
    replica, forward and back, among those of all replicas of the other stage."""

    forward: Sent
    backward: Sent
    peers: tuple[tuple[Peers, Peers], tuple[Peers, Peers]] = (((), ()), ((), ()))

    @property
    def ways(self) -> tuple[Sent, Sent]:
        """The slowest messages forward and back."""
        return self.forward, self.backward


def in_common(here: Sequence[float], there: Sequence[float]) -> Iterator[InCommon]:
    """Return which owners of rows of one stage have some in common with which of the next.

    >>> list(in_common([2, 2], [1, 3]))
    [InCommon(source=0, target=0, rows=1), InCommon(source=0, target=1, rows=1), InCommon(source=1, target=1, rows=2)]
    """
    source = target = 0
    left, wanted = here[0], there[0]
    while True:
        rows = min(left, wanted)
        if rows > ROW:
            yield InCommon(source, target, rows)
        left, wanted = left - rows, wanted - rows
        if left < ROW:
            source += 1
            if source == len(here):
                return
            left = here[source]
        if wanted < ROW and target + 1 < len(there):
            target += 1
            wanted = there[target]


class _Message(NamedTuple):
    source: int
    target: int
    bytes: int
    replicas: tuple[int, int]


class _Owners(NamedTuple):
    """Devices of a stage that have the same rows of each micro-batch, in order, and how many such follow each other in
    a replica."""

    ranks: tuple[tuple[int, ...], ...]
    rows: tuple[float, ...]
    each: int

    @classmethod
    def of(cls, stage: ChainStage) -> _Owners:
        each = stage.size // stage.tensor
        ranks = [stage.ranks[first : first + stage.tensor] for first in range(0, len(stage.ranks), stage.tensor)]
        return cls(tuple(ranks), tuple(rows / each for rows in stage.rows for _ in range(each)), each)


def exchange(
    prices: CostModel,
    here: ChainStage,
    there: ChainStage,
    pairs: Iterable[tuple[int, int]],
) -> dict[tuple[int, int], Exchange]:
    """Return the slowest messages between *pairs* of replicas of two stages.

    Only nodes of these replicas are looked at closely, whatever the number of others, and once for all stages that lie
    alike and hand on as much.

    Args:
        prices: of the devices' links.
        here, there: the stages.
        pairs: positions of a replica in each, which have rows in common.

    The stages may have others between them: then what passes over these is sent.
    """
    wanted = frozenset(pairs)
    key = (
        *prices.places(here.ranks, there.ranks),
        *((one.size, one.tensor, one.rows) for one in (here, there)),
        *(prices.handed_on(here.layers, there.layers, rows) for rows in (1, 2)),
        _held_shares(prices, here, there),
        wanted,
    )
    if key not in prices.memo.exchanges:
        prices.memo.exchanges[key] = _exchange(prices, here, there, wanted)
    return prices.memo.exchanges[key]


def _exchange(
    prices: CostModel, here: ChainStage, there: ChainStage, wanted: frozenset[tuple[int, int]]
) -> dict[tuple[int, int], Exchange]:
    owners = _Owners.of(here), _Owners.of(there)
    found = list(in_common(owners[0].rows, owners[1].rows))
    node_of = [device.node for device in prices.cluster.devices]
    nodes = [[{node_of[rank] for rank in ranks} for ranks in own.ranks] for own in owners]
    close: tuple[set[str], set[str]] = set(), set()
    for one in found:
        if (one.source // owners[0].each, one.target // owners[1].each) in wanted:
            close[0].update(nodes[0][one.source])
            close[1].update(nodes[1][one.target])
    near = found
    if not prices.topology.spans_regions((*here.ranks, *there.ranks)):  # else all share the ways between regions
        near = [one for one in found if close[0] & nodes[0][one.source] or close[1] & nodes[1][one.target]]
    shares = _held_shares(prices, here, there)
    sizes = [prices.handed_on(here.layers, there.layers, one.rows) for one in near]
    back_again = [InCommon(one.target, one.source, one.rows) for one in near]
    ways = (
        list(_messages(owners, near, sizes, shares)),
        list(_messages(owners[::-1], back_again, sizes, shares[::-1])),
    )
    ahead, back = _slowest(prices, ways[0], wanted), _slowest(prices, ways[1], {pair[::-1] for pair in wanted})
    met = _with_whom(ways[0]), _with_whom(ways[1])

    def peers(stage: ChainStage, place: int) -> tuple[Peers, Peers]:
        ahead, back = (tuple(len(found.get(rank, ())) for rank in stage.slice(place)) for found in met)
        return ahead, back

    return {(a, b): Exchange(ahead[a, b], back[b, a], (peers(here, a), peers(there, b))) for a, b in wanted}


def _with_whom(messages: Iterable[_Message]) -> dict[int, set[int]]:
    """For each rank that sends or receives, those with which it does."""
    found: dict[int, set[int]] = {}
    for one in messages:
        if one.source != one.target and one.bytes:
            found.setdefault(one.source, set()).add(one.target)
            found.setdefault(one.target, set()).add(one.source)
    return found


def _held_shares(prices: CostModel, here: ChainStage, there: ChainStage) -> tuple[float, float]:
    kinds = prices.profile.layers[here.last - 1], prices.profile.layers[there.first]
    return prices.held_shares(kinds, (here.tensor, there.tensor), (max(here.rows), max(there.rows)))


def _messages(
    owners: tuple[_Owners, _Owners], found: Sequence[InCommon], sizes: Sequence[float], shares: tuple[float, float]
) -> Iterator[_Message]:
    """Messages by which each device gets its part of the rows, from the devices that have parts, or in turn from those
    that all have everything."""
    here, there = owners
    share, wanted = shares
    for one, size in zip(found, sizes, strict=True):
        replicas = one.source // here.each, one.target // there.each
        sources, targets = here.ranks[one.source], there.ranks[one.target]
        if share < 1 and wanted < 1:
            parts = in_common([1 / len(sources)] * len(sources), [1 / len(targets)] * len(targets))
            for source, target, part in parts:
                yield _Message(sources[source], targets[target], round(part * len(targets) * wanted * size), replicas)
            continue
        for place, target in enumerate(targets):
            if share < 1:
                each = round(wanted * size / len(sources))
                yield from (_Message(source, target, each, replicas) for source in sources)
            else:
                turn = one.target * len(targets) + place
                source = target if target in sources else sources[turn % len(sources)]
                yield _Message(source, target, round(wanted * size), replicas)


def _slowest(
    prices: CostModel, messages: Iterable[_Message], wanted: Collection[tuple[int, int]]
) -> dict[tuple[int, int], Sent]:
    """The last message to end between each pair of replicas, if all begin at once."""
    moved = [(one, prices.topology.resources(one.source, one.target)) for one in messages if one.source != one.target]
    users: dict[str, list[int]] = {}
    for one, resources in moved:
        for resource in resources:
            users.setdefault(resource, []).append(one.bytes)
    before: dict[str, tuple[list[int], list[int]]] = {}
    for resource, sizes in users.items():
        sizes.sort()
        before[resource] = sizes, list(accumulate(sizes, initial=0))
    found = {pair: Sent(0, 0.0, 0.0) for pair in wanted}
    for one, resources in moved:
        if one.replicas not in wanted:
            continue
        through = one.bytes  # what has gone through its busiest end once its last byte has
        for resource in resources:
            sizes, sums = before[resource]
            place = bisect_right(sizes, one.bytes)
            through = max(through, sums[place] + (len(sizes) - place) * one.bytes)
        hop = prices.link(one.source, one.target, one.bytes)
        seconds = hop.latency + through / hop.bandwidth
        if seconds > found[one.replicas].seconds:
            found[one.replicas] = Sent(one.bytes, hop.latency, seconds)
    return found
