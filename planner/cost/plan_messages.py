"""Messages between the stages of a plan, each kind of replica's with all that share its adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from whale.ir.workload import Boundary, LinkTime, Transfer
from whale.planner.cost.groups import TensorGroup
from whale.planner.cost.messages import Exchange, Sent, exchange
from whale.planner.cost.plan_kinds import Pair, PlanKinds

__all__ = ["PlanMessages"]


@dataclass(frozen=True, kw_only=True)
class PlanMessages(PlanKinds):
    """The messages of a plan."""

    def _boundaries(self) -> tuple[tuple[Boundary, ...], tuple[LinkTime, ...]]:
        """The messages between kinds of replicas: the slowest of those between the replicas of two kinds that have rows
        in common, forward and back."""
        boundaries: list[Boundary] = []
        links: dict[tuple[int, int], LinkTime] = {}
        for here, there in self.pairs:
            example = self._examples[here, there]
            ways: list[list[Transfer]] = [[], []]
            found = self._whales[here, there] if self.prices.exchanges else self._of_others(here, there, example)
            for way, transfers in enumerate(ways):
                # All messages of a way are in each other's price; the slowest shares its ends with other boundaries.
                ends: set[str] = set()
                for (source, target), both in sorted(found.items(), key=lambda one: -one[1].ways[way].seconds):
                    sent, ranks = both.ways[way], (self.kinds[here][source].rank, self.kinds[there][target].rank)
                    a, b = ranks[:: -1 if way else 1]
                    transfers.append(Transfer(source=a, target=b, bytes=sent.bytes))
                    spent = max(1e-12, sent.seconds - sent.latency)
                    own = set(self._ends(a, b, example[source, target].same_node)) - ends
                    ends |= own
                    link = LinkTime(
                        source=a,
                        target=b,
                        latency=sent.latency,
                        bandwidth=max(1, sent.bytes) / spent,
                        resources=tuple(sorted(own)),
                    )
                    if (a, b) not in links or link.bandwidth < links[a, b].bandwidth:
                        links[a, b] = link
            boundaries.append(
                Boundary(source_stage=here, target_stage=there, forward=tuple(ways[0]), backward=tuple(ways[1]))
            )
        return tuple(boundaries), tuple(links.values())

    def _ends(self, source: int, target: int, same_node: bool) -> tuple[str, ...]:
        """The resources that a message shares with those of other boundaries, in stacks like Whale's."""
        if not self.prices.exchanges:
            return ()
        return self.prices.topology.ends(source, target, same_node=same_node)

    @cached_property
    def _examples(self) -> dict[tuple[int, int], dict[tuple[int, int], Pair]]:
        """For each two stages and two of their kinds, replicas of these that have rows in common."""
        found: dict[tuple[int, int], dict[tuple[int, int], Pair]] = {}
        for (here, there), pairs in self.pairs.items():
            example = found[here, there] = {}
            for pair in pairs:
                example.setdefault((self.of[here][pair.source], self.of[there][pair.target]), pair)
        return found

    @cached_property
    def _whales(self) -> dict[tuple[int, int], dict[tuple[int, int], Exchange]]:
        """The messages between an example of each two kinds, with all that share their adapters."""
        sent = {}
        for (here, there), example in self._examples.items():
            pairs = [(pair.source, pair.target) for pair in example.values()]
            found = exchange(self.prices, self.stages[here], self.stages[there], pairs)
            sent[here, there] = {kinds: found[pair.source, pair.target] for kinds, pair in example.items()}
        return sent

    def _of_others(
        self, here: int, there: int, example: Mapping[tuple[int, int], Pair]
    ) -> dict[tuple[int, int], Exchange]:
        """The same in stacks other than Whale's. A replica that sends to several of a kind, or receives from several,
        uses one link for all: the busier end counts."""
        sent: dict[tuple[int, int], float] = {}
        received: dict[tuple[int, int], float] = {}
        for pair in self.pairs[here, there]:
            source, target = self.of[here][pair.source], self.of[there][pair.target]
            sent[pair.source, target] = sent.get((pair.source, target), 0) + pair.rows
            received[source, pair.target] = received.get((source, pair.target), 0) + pair.rows
        rows = dict.fromkeys(example, 0.0)
        for (index, target), count in sent.items():
            between = self.of[here][index], target
            rows[between] = max(rows[between], count)
        for (source, index), count in received.items():
            between = source, self.of[there][index]
            rows[between] = max(rows[between], count)
        found = {}
        for kinds, pair in example.items():
            whole = self.prices.output_bytes(self.stages[here].last - 1, rows[kinds])
            groups = self.kinds[here][kinds[0]].group, self.kinds[there][kinds[1]].group
            ends = self.stages[here].slice(pair.source), self.stages[there].slice(pair.target)
            ways = ((*ends, groups[1]), (*ends[::-1], groups[0]))
            forward, backward = (self._of_other(*way, whole) for way in ways)
            found[kinds] = Exchange(forward, backward)
        return found

    def _of_other(self, source: Sequence[int], target: Sequence[int], into: TensorGroup, whole: float) -> Sent:
        size = self.prices.handed(whole, len(source), len(target), positions=into.positions)
        hop = self.prices.hop(source, target, into, size, whole)
        return Sent(size, hop.latency, hop.latency + size / hop.bandwidth)
