"""Costs of every range of the chain on a mesh: arrays over the layers, for the search algorithms.

A mesh is counts of devices from pools, so its prices are those of a sample: its tensor groups at the beginning of a
node, its data group over the first of its devices, its messages to the next node. What a data slice costs depends on
its tensor group and its rows alone, and is worked out once for all meshes that have such slices. Times between the
numbers of rows that are priced are interpolated. What is found with these prices is laid out on ranks and priced
exactly by `whale.planner.search.evaluate`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise, product
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np

from whale.ir.cluster import Region
from whale.planner.cost.groups import TensorGroup
from whale.planner.cost.overlap import Beside
from whale.planner.cost.replicas import gather_seconds, of_kind
from whale.planner.cost.sharded import scattered_by
from whale.planner.network.links import inter_node_kind
from whale.planner.search.mesh_costs import Array, MeshCosts, ReplicaCosts, added_by_sums
from whale.planner.search.replica_table import ReplicaTable, total
from whale.planner.search.row_table import BACKWARD, FAR, FORWARD, NEAR, UPDATE
from whale.planner.search.space import Division, Mesh, layouts, replicas_of

__all__ = ["MOST_SAMPLED", "Array", "CostTable", "Pace"]

MOST_PLACED = 64
"""Devices of a sequence up to which it is found out which stages lie in one node."""

MOST_SAMPLED = 64
"""Ranks of a pool in a data group for which its sums are priced; those of more differ by a few hops."""

UNEVEN = 1.05
"""How much longer some replicas take for a stage than others, above which it gets rows of its own."""


Sample = tuple[tuple[tuple[TensorGroup, int], ...], tuple[int, ...]]
"""Tensor groups with their number, and ranks of a data group."""


class Pace(NamedTuple):
    """Seconds for a micro-batch of the whole chain and of its commonest part, and of handing on after one, and back."""

    of_chain: float
    of_part: float
    hop: float


class GradientSums(NamedTuple):
    """Sums of gradients once a step: seconds of a message; seconds up to each part; how the last backward and they slow
    each other."""

    message: float
    upto: Array
    beside: Beside
    gathers: Array | None = None


@dataclass(frozen=True, kw_only=True)
class CostTable(ReplicaTable):
    """Costs of meshes, each computed once. Mixed replicas share rows by speed, or ``by_memory``."""

    by_memory: bool = False
    _costs: dict[Any, MeshCosts] = field(default_factory=dict, init=False)
    _firsts: dict[Any, int] = field(default_factory=dict, init=False)
    _hops: dict[Any, tuple[list[float], list[float]]] = field(default_factory=dict, init=False)
    _loads: dict[tuple[int, Mesh], float] = field(default_factory=dict, init=False)
    _hop_factors: dict[tuple[int, int, Mesh], tuple[float, float]] = field(default_factory=dict, init=False)
    _seconds: dict[Any, float] = field(default_factory=dict, init=False)
    _near: dict[tuple[Mesh, ...], list[bool]] = field(default_factory=dict, init=False)
    _overheads: dict[tuple[int, ...], float] = field(default_factory=dict, init=False)
    _samples: dict[Mesh, Sample] = field(default_factory=dict, init=False)
    _leads: dict[tuple[int, int], list[int]] = field(default_factory=dict, init=False)
    _gradient_sums: dict[Mesh, GradientSums] = field(default_factory=dict, init=False)
    _paces: dict[Any, Pace] = field(default_factory=dict, init=False)
    _work: dict[Any, Pace] = field(default_factory=dict, init=False)
    _likely_work: dict[Any, Pace] = field(default_factory=dict, init=False)
    tied_sums: dict[Any, tuple[float, float]] = field(default_factory=dict, init=False)
    fit_divisions: dict[tuple[int, ...], list[Division]] = field(default_factory=dict, init=False)
    any_meshes: list[tuple[tuple[int, ...], Mesh]] = field(default_factory=list, init=False)

    def costs(self, mesh: Mesh, rows: int, micro_batches: int) -> MeshCosts:
        """Costs of a mesh, for *rows* rows of each of *micro_batches* micro-batches."""
        key = (mesh, rows, self.prices.adding(micro_batches))
        found = self._costs.get(key)
        if found is None:
            found = self._costs[key] = self._worked_out(mesh, rows, micro_batches)
        return found

    def _worked_out(self, mesh: Mesh, rows: int, micro_batches: int) -> MeshCosts:
        groups, data_group = self.sample(mesh)
        slices = tuple(
            self.replica_costs(group, count, micro_batches, self._shards(mesh, group))
            for group, count in self._shared(groups, rows, micro_batches)
        )
        sums = self.gradient_sums(mesh)
        forward, backward, update = slices[0].forward, slices[0].backward, slices[0].update
        if len(slices) > 1:
            forward, backward, update = self._slowest_of([one.of_kinds for one in slices]) @ self._counts
        update = update / self._owners(mesh)
        busiest = max(slices, key=lambda one: one.rows)
        met = self._met(busiest, data_group)
        return MeshCosts(
            mesh=mesh,
            allowed=self.chain.allows(mesh),
            slices=slices,
            forward=forward if met is None else forward + met[0],
            backward=backward if met is None else backward + met[1],
            met=met,
            update=update,
            sums=sums.upto,
            gathers=sums.gathers,
            message=sums.message,
            beside=sums.beside,
            hop=self._hop(busiest, mesh),
        )

    @cached_property
    def gathers_once(self) -> bool:
        """Whether replicas divide states, and so sum gradients to their owners and gather parameters, once a step."""
        return self.prices.runs and self.prices.stack.zero in (1, 2) and not self.prices.combines

    def takes(self, mesh: Mesh, rows: int) -> bool:
        """Whether a micro-batch of *rows* rows may be divided among the replicas of a mesh: each has one, or some only
        own a part of the states, of devices that are alike."""
        if mesh.data <= rows:
            return True
        return self.gathers_once and mesh.expert == 1 and sum(map(bool, mesh.counts)) == 1

    def _owners(self, mesh: Mesh) -> int:
        """Replicas of a mesh that divide what the optimizer steps with on their devices."""
        divides = self.prices.runs and self.prices.stack.zero and not self.prices.stack.state_on_host
        return mesh.data * mesh.context if divides else 1

    def _met(self, replica: ReplicaCosts, data_group: Sequence[int]) -> Array | None:
        """Seconds forward and backward (rows) up to each part of the collectives between replicas; None if no layer has
        any."""
        if len(data_group) < 2 or not (self.prices.meeting or self.prices.stack.zero == 3):
            return None
        group, rows, kinds = replica.group, replica.rows, range(len(self.prices.profile.kinds))
        divide_rows = data_group[:: group.context]
        of_kinds = np.array([of_kind(self.prices, kind, group, rows, divide_rows) for kind in kinds]).T
        if self.prices.stack.zero == 3:  # gathers beside what is computed
            gathers = np.array([gather_seconds(self.prices, kind, group, data_group) for kind in kinds])
            of_kinds += np.maximum(0.0, gathers - replica.of_kinds[:2])
        return of_kinds @ self._counts

    def stage(
        self, mesh: Mesh, rows: int, micro_batches: int, part: tuple[int, int], held: int
    ) -> tuple[float, float, float, float]:
        """Forward, backward and once-per-step seconds of the parts [first, last) on a mesh, and the fraction of memory
        that its fullest replica needs. Rows of mixed replicas are by speed for the whole chain, or those of the
        stage if these do not fit or its layers suit some types better."""
        return self.stage_on(self.costs(mesh, rows, micro_batches), rows, micro_batches, part, held)

    def stage_on(
        self, costs: MeshCosts, rows: int, micro_batches: int, part: tuple[int, int], held: int
    ) -> tuple[float, float, float, float]:
        """`stage` where the costs of the mesh are at hand."""
        if len(costs.slices) == 1:
            return costs.stage(*part, held)
        key = (*part, held)
        found = costs.fitted.get(key)
        if found is None:
            found = costs.stage(*part, held)
            if found[-1] > 1 or costs.uneven(*part) > UNEVEN:
                found = self._within_memory(costs, rows, micro_batches, part, held) or found
            costs.fitted[key] = found
        return found

    def _within_memory(
        self, costs: MeshCosts, rows: int, micro_batches: int, part: tuple[int, int], held: int
    ) -> tuple[float, float, float, float] | None:
        """Costs like `stage`, with the fastest rows if each replica has at most as many as fit; None if not all rows
        fit."""
        groups, _ = self.sample(costs.mesh)
        nums = self._nums_in(part)

        def seconds(group: TensorGroup, count: int) -> float:
            if not count:
                return 0.0
            forward, backward, *_ = self._of_kinds(group, count, micro_batches)
            return total(nums, forward) + total(nums, backward)

        most = self._most_held(costs.mesh, rows, micro_batches, part, held)
        least = 1 if self.prices.stack.zero else 0
        if min(most) < least or sum(limit * num for limit, (_, num) in zip(most, groups, strict=True)) < rows:
            return None
        low, high = 0.0, max(seconds(group, limit) for limit, (group, _) in zip(most, groups, strict=True))
        shares = most
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            within = [
                max(least, bisect_right(range(1, limit + 1), middle, key=lambda count: seconds(group, count)))
                for limit, (group, _) in zip(most, groups, strict=True)
            ]
            if sum(count * num for count, (_, num) in zip(within, groups, strict=True)) < rows:
                low = middle
            else:
                shares, high = within, middle
        chosen = [
            self.replica_costs(group, count, micro_batches, self._shards(costs.mesh, group))
            for count, (group, _) in zip(shares, groups, strict=True)
        ]
        ahead, back = max((one.seconds(*part) for one in chosen if one.rows), key=sum)
        once, met = costs.stage(*part, held)[2], costs.met_in(*part)
        return ahead + met[0], back + met[1], once, max(one.fullness(*part, held) for one in chosen)

    def first_held(self, mesh: Mesh, rows: int, micro_batches: int, end: int, held: int) -> int:
        """The first part that a stage up to *end* can reach back to if each replica has no more rows than fit."""
        key = (mesh, rows, self.prices.adding(micro_batches), end, held)
        if key not in self._firsts:
            nums = [num for _, num in self.sample(mesh)[0]]

            def fits(first: int) -> bool:
                most = self._most_held(mesh, rows, micro_batches, (first, end), held)
                return sum(limit * num for limit, num in zip(most, nums, strict=True)) >= rows

            allowed = int(self.costs(mesh, rows, micro_batches).allowed[end])
            self._firsts[key] = allowed + bisect_left(range(allowed, end), True, key=fits)
        return self._firsts[key]

    def _most_held(self, mesh: Mesh, rows: int, micro_batches: int, part: tuple[int, int], held: int) -> list[int]:
        """The most rows of a micro-batch with which each kind of replica of a mesh holds the parts [first, last)."""
        return [
            bisect_left(
                range(1, rows + 1),
                True,
                key=self._overflows(group, micro_batches, part, held, self._shards(mesh, group)),
            )
            for group, _ in self.sample(mesh)[0]
        ]

    def _shards(self, mesh: Mesh, group: TensorGroup) -> float:
        """Parts, such as a replica of a mesh has one of, into which its replicas divide their state: equal ones, or of
        several types by their memory."""
        if not self.prices.stack.zero:
            return 1.0
        whole = sum(num * max(0.0, self._room_of(one)) for one, num in self.sample(mesh)[0])
        return max(1.0, mesh.context * whole / max(1.0, self._room_of(group)))

    @cached_property
    def _since(self) -> tuple[int, ...]:
        """For each part the first one that it depends on, where some depend on none before them."""
        since, bounds = self.prices.profile.since if self.prices.runs else (), self.chain.bounds
        return tuple(bisect_right(bounds, min(since[begin:end])) - 1 for begin, end in pairwise(bounds) if since)

    def own_seconds(self, costs: MeshCosts, first: int, last: int) -> float:
        """Seconds forward of the parts of a stage [first, last), which is not the first, that need nothing of the
        stages before."""
        since = self._since[first:last] if first else ()
        return sum(costs.forward_of(part) for part, begin in enumerate(since, first) if begin >= first)

    def hops(self, source: Mesh, target: Mesh, rows: int, micro_batches: int, near: bool = False) -> list[float]:
        """Seconds to send what a stage on *source* hands on to one on *target*, *near* if in the same node, and as much
        back, for each end of the stage. Slices have their rows in order; what those of a kind send to those of another
        all goes through the one link of the busiest slice of each, the slower of the two."""
        return self.ways(source, target, rows, micro_batches, near)[0]

    def ways(
        self, source: Mesh, target: Mesh, rows: int, micro_batches: int, near: bool
    ) -> tuple[list[float], list[float]]:
        """`hops`, and the part of each that is latency, in which messages occupy no link."""
        key = (source, target, rows, self.prices.adding(micro_batches), near)
        if key not in self._hops:
            spans = [self._spans(mesh, rows, micro_batches) for mesh in (source, target)]
            found, latency = np.zeros((2, len(self.chain) + 1))
            for (one, first, last), (other, start, end) in product(*spans):
                common = min(last, end) - max(first, start)
                if common > 1e-9:
                    waited = np.maximum(*((own.near_latency if near else own.latency) for own in (one, other)))
                    sent = self._both_ways((one, other), (source, target), common, near)
                    found, latency = np.maximum(found, waited + sent), np.maximum(latency, waited)
            if part := self._far_part(source, target):
                late, sent = self._far_ways((source, target), part * rows)
                found, latency = np.maximum(found, late + sent), np.maximum(latency, late)
            self._hops[key] = found.tolist(), np.minimum(latency, found).tolist()
        return self._hops[key]

    def _far_part(self, source: Mesh, target: Mesh) -> float:
        """The least part of the rows that goes from region to region between stages on two meshes."""
        if len({pool.region for pool in self.pools}) < 2:
            return 0.0
        shares: list[Counter[Region | None]] = [Counter(), Counter()]
        for mesh, own in zip((source, target), shares, strict=True):
            for pool, count in zip(self.pools, mesh.counts, strict=True):
                own[pool.region] += count
        here, there = shares
        stays = sum(min(here[one] / sum(source.counts), there[one] / sum(target.counts)) for one in here)
        return max(0.0, round(1 - stays, 9))

    def _far_ways(self, meshes: tuple[Mesh, Mesh], rows: float) -> tuple[float, Array]:
        """Seconds of latency, and others, of handing these rows of a micro-batch on from region to region, and of their
        gradients back: what all devices send goes through the gateways of their nodes in the region with the slowest
        way."""
        source, target = meshes
        counts = zip(self.pools, source.counts, target.counts, strict=True)
        far = [(pool, pool.region, both) for pool, *both in counts if pool.region is not None and any(both)]
        ways = [
            (region.link, min(1.0, ceil(count / pool.per_node) / self.prices.topology.gateways(region)))
            for pool, region, both in far
            for count in both
            if count
        ]
        link, used = min(ways, key=lambda way: way[0].bandwidth * way[1])
        shares = self.held_shares((source.tensor, target.tensor), (rows / source.data, rows / target.data))
        sent = self._handed(rows) / (link.bandwidth * used * inter_node_kind(link).efficiency)
        latency = max(way.latency for way, _ in ways)
        return 2 * latency, sent * (shares[1] * target.tensor + shares[0] * source.tensor)

    def _both_ways(
        self, ends: tuple[ReplicaCosts, ReplicaCosts], meshes: tuple[Mesh, Mesh], common: float, near: bool
    ) -> Array:
        """Seconds of handing *common* rows from slices of a mesh on to those of another, and of their gradients back,
        without latencies.

        Each device gets its part of the rows. So the adapters of the source, or those of the target, send or receive as
        much as all devices of the node.
        """
        source, target = ends
        shares = self.held_shares((source.group.tensor, target.group.tensor), (source.rows, target.rows))
        parts = [min(1.0, common / max(1, own.rows)) for own in ends]
        ratio = target.group.tensor / source.group.tensor if self.prices.exchanges else 1.0
        if near:  # each device sends and receives on its own
            sent = [part * own.near_alone for part, own in zip(parts, ends, strict=True)]
            loads = 1.0, 1.0
            ratios = max(1.0, ratio), max(1.0, 1 / ratio)
        else:
            slower = self._slower(*(own.group for own in ends))
            sent = [part * slow * own.alone for part, slow, own in zip(parts, slower, ends, strict=True)]
            loads = self._load(source.group, meshes[0]), self._load(target.group, meshes[1])
            ratios = ratio, 1 / ratio
        forward = np.maximum(ratios[0] * loads[0] * sent[0], loads[1] * sent[1])
        backward = np.maximum(loads[0] * sent[0], ratios[1] * loads[1] * sent[1])
        return shares[1] * forward + shares[0] * backward

    def _hop(self, replica: ReplicaCosts, mesh: Mesh) -> Array:
        """`hops` between alike stages."""
        shares = sum(self.held_shares((mesh.tensor,) * 2, (replica.rows,) * 2))
        if self._lies_inside(mesh):
            return replica.near_latency + shares * replica.near_alone
        return replica.latency + shares * self._load(replica.group, mesh) * replica.alone

    def _hop_of_commonest(self, group: TensorGroup, rows: int, sent: Sequence[float], mesh: Mesh) -> float:
        """`_hop` after the commonest part, by the latency and the rest of a way that `_sends_of_commonest` gives."""
        rows = min(rows, self._shared_since)
        key = (group.kind, rows, mesh)
        factors = self._hop_factors.get(key)
        if factors is None:
            end, _ = self._end_of_commonest
            share = sum(float(shares[end]) for shares in self.held_shares((mesh.tensor,) * 2, (rows,) * 2))
            factors = self._hop_factors[key] = share, 1.0 if self._lies_inside(mesh) else self._load(group, mesh)
        return sent[0] + factors[0] * factors[1] * sent[1]

    def _load(self, group: TensorGroup, mesh: Mesh) -> float:
        """Messages that move through an adapter of a node at a time, if each device of a mesh there has one."""
        if not self.prices.exchanges:  # in their own price
            return 1.0
        key = (group.kind, mesh)
        if key not in self._loads:
            member = max(self.prices.topology.members(group.ranks), key=lambda member: len(member.ranks))
            node, most = member.node, len(member.ranks)
            own = sum(num for other, num in self.sample(mesh)[0] if other.kind == group.kind)
            together = most * max(1, min(own, len(node.ranks) // most))
            adapters = 1 if node.inter is None else len(set(self.prices.topology.adapters(node, node.ranks[:together])))
            self._loads[key] = together / adapters
        return self._loads[key]

    def _slower(self, source: TensorGroup, target: TensorGroup) -> list[float]:
        """By how much messages from a group to another are slower than those of each to another node that it is priced
        with: the slower adapter limits them."""
        least = min(map(self._adapter_speed, (*source.ranks, *target.ranks)))
        found = []
        for group in (source, target):
            far, _ = self._targets_of(group)
            speed = min(map(self._adapter_speed, (group.ranks[0], *far[:1])))
            found.append(speed / least if speed < inf else 1.0)
        return found

    def _adapter_speed(self, rank: int) -> float:
        """Bytes per second of an adapter of a rank's node."""
        link = self.prices.cluster.node_of(rank).inter
        return inf if link is None else link.bandwidth / link.num_adapters

    def overhead(self, sequence: Sequence[Mesh]) -> float:
        """Seconds of a step on stages of these meshes that belong to no stage."""
        counts = tuple(map(sum, zip(*(mesh.counts for mesh in sequence), strict=True)))
        if counts not in self._overheads:
            some = zip(self.pools, counts, strict=True)
            ranks = sorted(rank for pool, count in some for rank in pool.ranks[:count])
            self._overheads[counts] = self.prices.overhead_of(ranks)
        return self._overheads[counts]

    def near_hops(self, sequence: tuple[Mesh, ...]) -> Sequence[bool]:
        """Stages in one node with the next one; none with many devices, where few are."""
        room = MOST_PLACED if self.largest_node > 1 else 0
        for mesh in sequence:
            room -= sum(mesh.counts)
            if room < 0:
                return [False] * (len(sequence) - 1)
        if sequence not in self._near:
            node_of = self.prices.cluster.node_of
            laid, *_ = layouts(self.pools, sequence)
            nodes = [{id(node_of(rank)) for group in groups for rank in group} for groups in laid]
            self._near[sequence] = [one == other and len(one) == 1 for one, other in pairwise(nodes)]
        return self._near[sequence]

    @cached_property
    def has_one_adapter(self) -> bool:
        """Whether all devices of a node share an adapter to other nodes."""
        cluster = self.prices.cluster
        return all(node.inter is None or node.inter.num_adapters == 1 for node in cluster.nodes)

    def _lies_inside(self, mesh: Mesh) -> bool:
        """Whether two such meshes fit in a node."""
        used = [pool for pool, count in enumerate(mesh.counts) if count]
        return len(used) == 1 and 2 * mesh.counts[used[0]] <= self.pools[used[0]].per_node

    def _spans(self, mesh: Mesh, rows: int, micro_batches: int) -> list[tuple[ReplicaCosts, float, float]]:
        """The kinds of data slices of a mesh, and which rows of a micro-batch those of a kind have: first and last."""
        slices, (groups, _) = self.costs(mesh, rows, micro_batches).slices, self.sample(mesh)
        shares = [one.rows * num for one, (_, num) in zip(slices, groups, strict=True)]
        ends = np.cumsum([0, *shares]) * (rows / sum(shares))
        return list(zip(slices, ends[:-1].tolist(), ends[1:].tolist(), strict=True))

    def paces(self, mesh: Mesh, rows: int, micro_batches: int) -> Pace:
        """Seconds for *rows* rows of each of *micro_batches* micro-batches, with their part of what comes once a step.
        As `costs`, without the parts between; of the sums of the commonest part only what grows with the bytes."""
        key = (mesh, rows, micro_batches)
        if key not in self._paces:
            self.find_paces((mesh,), rows, micro_batches)
        return self._paces[key]

    def find_paces(self, meshes: Iterable[Mesh], rows: int, micro_batches: int) -> None:
        """Work out `paces` of some meshes at once, before they are looked up one by one."""
        new = [mesh for mesh in meshes if (mesh, rows, micro_batches) not in self._paces]
        if not new:
            return
        self.find_work(new, rows, micro_batches)
        part, _ = self.commonest
        sums = [self.gradient_sums(mesh) for mesh in new]
        firsts = [self.sample(mesh)[0][0] for mesh in new]
        tables = self._tables_of([(group, -(-rows // num)) for group, num in firsts], micro_batches)
        once = added_by_sums(
            np.array([one.upto for one in sums]), tables[:, BACKWARD] @ self._counts, [one.beside for one in sums]
        )
        times = (once[:, -1], once[:, part + 1] - once[:, part])
        for mesh, one, of_chain, of_part in zip(new, sums, *(own.tolist() for own in times), strict=True):
            key = mesh, rows, micro_batches
            work = self._work[key]
            of_chain, of_part = (one.message + of_chain) / micro_batches, of_part / micro_batches
            self._paces[key] = Pace(work.of_chain + of_chain, work.of_part + of_part, work.hop)

    def likely_work(self, mesh: Mesh, rows: int, micro_batches: int) -> Pace:
        """`work`, of types side by side as if each took as long for a row as for its equal share of them."""
        key = (mesh, rows, micro_batches)
        if key not in self._likely_work:
            self.find_likely_work((mesh,), rows, micro_batches)
        return self._likely_work[key]

    def find_likely_work(self, meshes: Iterable[Mesh], rows: int, micro_batches: int) -> None:
        """Work out `likely_work` of some meshes at once, before it is looked up for each."""
        new = [mesh for mesh in meshes if (mesh, rows, micro_batches) not in self._likely_work]
        mixed = [mesh for mesh in new if len(self.sample(mesh)[0]) > 1]
        alike = [mesh for mesh in new if len(self.sample(mesh)[0]) == 1]
        self.find_work(alike, rows, micro_batches)
        for mesh in alike:
            self._likely_work[mesh, rows, micro_batches] = self._work[mesh, rows, micro_batches]
        if not mixed:
            return
        shares = [(group, -(-rows // mesh.data), num) for mesh in mixed for group, num in self.sample(mesh)[0]]
        tables = self._tables_of([(group, share) for group, share, _ in shares], micro_batches)
        chains, parts = self._times_of(tables[:, FORWARD] + tables[:, BACKWARD])
        found = zip(shares, chains, parts, self._sends_of_commonest(tables, FAR), strict=True)
        for mesh in mixed:
            own = list(islice(found, len(self.sample(mesh)[0])))
            speed = sum(num * share / max(chain, 1e-12) for (_, share, num), chain, _, _ in own)
            hop = max(self._hop_of_commonest(group, share, sent, mesh) for (group, share, _), *_, sent in own)
            self._likely_work[mesh, rows, micro_batches] = Pace(rows / speed, min(part for _, _, part, _ in own), hop)

    def work(self, mesh: Mesh, rows: int, micro_batches: int) -> Pace:
        """Times like `paces`, without gradient reductions."""
        key = (mesh, rows, micro_batches)
        if key not in self._work:
            self.find_work((mesh,), rows, micro_batches)
        return self._work[key]

    def find_work(self, meshes: Iterable[Mesh], rows: int, micro_batches: int) -> None:
        """Work out `work` of some meshes at once, before it is looked up for each."""
        new = [mesh for mesh in meshes if (mesh, rows, micro_batches) not in self._work]
        if not new:
            return
        shares = [self._shared(self.sample(mesh)[0], rows, micro_batches) for mesh in new]
        every = self._tables_of([one for own in shares for one in own], micro_batches)
        if len(every) > len(new):  # those of types side by side are one
            tables = np.empty((len(new), *every.shape[1:]))
            begin = 0
            for place, own in enumerate(shares):
                tables[place] = self._side_by_side(every[begin : begin + len(own)])
                begin += len(own)
        else:
            tables = every
        owners = np.array([micro_batches * self._owners(mesh) for mesh in new])[:, None]
        times = self._times_of(tables[:, FORWARD] + tables[:, BACKWARD] + tables[:, UPDATE] / owners)
        sends = zip(*(self._sends_of_commonest(every, way) for way in (FAR, NEAR)), strict=True)
        for mesh, own, chain, part in zip(new, shares, *times, strict=True):
            inside = self._lies_inside(mesh)
            hops = [self._hop_of_commonest(group, share, next(sends)[inside], mesh) for group, share in own]
            self._work[mesh, rows, micro_batches] = Pace(chain, part, max(hops))

    def _times_of(self, seconds: Array) -> tuple[list[float], list[float]]:
        """Seconds of the chain and of its commonest part, from those by kind of layer (second axis)."""
        return (seconds @ self._num_layers).tolist(), (seconds @ self._counts_of_commonest).tolist()

    def _sends_of_commonest(self, tables: Array, way: tuple[int, int]) -> list[list[float]]:
        """Latency and the rest of handing on after the commonest part, from `_tables_of`."""
        _, last = self._end_of_commonest
        found: list[list[float]] = tables[:, way, last].tolist()
        return found

    def _side_by_side(self, tables: Array) -> Array:
        """The table of replicas of several kinds (first axis): of each kind of layer those that take longest."""
        found = tables.max(axis=0)
        found[: UPDATE + 1] = self._slowest_of(tables[:, : UPDATE + 1])
        return found

    @staticmethod
    def _slowest_of(of_kinds: Sequence[Array] | Array) -> Array:
        """Forward, backward and update of each kind of layer (columns), on the slices where it takes longest."""
        tables = np.array(of_kinds)
        slowest = tables[(tables[:, 0] + tables[:, 1]).argmax(axis=0), :, np.arange(tables.shape[2])].T
        slowest[2] = tables[:, 2].max(axis=0)
        return slowest

    def sample(self, mesh: Mesh) -> Sample:
        """A tensor group of each kind of slices with their number, and ranks as its data group has them."""
        if mesh not in self._samples:
            counted: dict[TensorGroup, int] = {}
            data_groups: list[dict[int, None]] = [{}, {}]  # at the first place of a slice and at the last
            taken = [0] * len(self.pools)
            for part in replicas_of(mesh):
                ranks = [
                    rank for pool, count in zip(self.pools, part.counts, strict=True) for rank in pool.ranks[:count]
                ]
                group = self.prices.group(sorted(ranks), mesh.data, mesh.expert, mesh.context)
                counted[group] = counted.get(group, 0) + part.num
                used = [index for index, count in enumerate(part.counts) if count]
                for own, place in zip(data_groups, (0, -1), strict=True):
                    for index in used if mesh.context > 1 else (used[place],):
                        for rank in self._placed(index, taken[index], part.num, part.counts[index], mesh):
                            if rank in own:  # slices of another size before it are not where these would begin
                                rank = next(one for one in self.pools[index].ranks if one not in own)
                            own[rank] = None
                taken = [done + part.num * count for done, count in zip(taken, part.counts, strict=True)]
            node_of = self.prices.cluster.node_of
            slower = max(data_groups, key=lambda own: len({id(node_of(rank)) for rank in own}))
            self._samples[mesh] = tuple(counted.items()), tuple(slower)
        return self._samples[mesh]

    def _placed(self, index: int, begin: int, num: int, size: int, mesh: Mesh) -> list[int]:
        """The ranks of a data group on *num* parts of data slices, of *size* devices of a pool beyond its first
        *begin*: parts that a node has room for lie within nodes."""
        ranks, step = self.pools[index].ranks, size if mesh.context == 1 else mesh.tensor
        if not size:
            return []
        if (index, size) not in self._leads:
            self._leads[index, size] = self.pools[index].leads(size)
        leads = self._leads[index, size][-(-begin // size) :][: min(num, MOST_SAMPLED)]
        if len(leads) < min(num, MOST_SAMPLED):  # the rest straddle nodes
            leads = list(range(begin, begin + num * size, size))
        return [ranks[lead + more] for lead in leads for more in range(0, size, step)][:MOST_SAMPLED]

    def _shared(
        self, groups: Sequence[tuple[TensorGroup, int]], rows: int, micro_batches: int
    ) -> list[tuple[TensorGroup, int]]:
        """Rows of each kind of slices in proportion to speed, whole, the slowest done as soon as possible; or in
        proportion to memory, the fullest as little so as possible."""
        num_slices = sum(num for _, num in groups)
        if len(groups) == 1:
            return [(groups[0][0], -(-rows // num_slices))]

        def seconds(group: TensorGroup, count: int) -> float:
            if self.by_memory:
                return count / group.memory_bytes
            key = (group.kind, count, self.prices.adding(micro_batches))
            if key not in self._seconds:
                forward, backward, *_ = self._table(group, count, micro_batches) @ self._num_layers
                self._seconds[key] = float(forward + backward)
            return self._seconds[key]

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
        if self.prices.stack.zero and 0 in most:  # each replica has a row, as plans are laid out
            able = [one for one, count in zip(groups, most, strict=True) if count]
            fewer = rows - num_slices + sum(num for _, num in able)
            shared = dict(self._shared(able, fewer, micro_batches))
            return [(group, shared.get(group, 1)) for group, _ in groups]
        return [(group, count) for (group, _), count in zip(groups, most, strict=True)]

    def gradient_sums(self, mesh: Mesh) -> GradientSums:
        """The sums of gradients of a mesh. In expert groups all devices sum what is whole on each, and those of the
        same place their experts."""
        if mesh not in self._gradient_sums:
            dense, experts, *_ = self._parameters_of(mesh.tensor, mesh.expert)
            _, data_group = self.sample(mesh)
            num_alike = mesh.size // mesh.context
            kind = scattered_by(self.prices.num_of_types) if self.gathers_once else "all_reduce"
            message, upto = self._exchanged(mesh, data_group, kind)
            gathers = self._exchanged(mesh, data_group, "all_gather")[1] if self.gathers_once else None
            whole_bytes = max(1.0, float(dense[-1] + experts[-1]) * self.prices.gradient_bytes)
            size = self.prices.message_bytes(data_group, whole_bytes, num_alike)
            beside = self.prices.beside(data_group, num_alike, size)
            self._gradient_sums[mesh] = GradientSums(message, upto, beside, gathers)
        return self._gradient_sums[mesh]

    def _exchanged(self, mesh: Mesh, data_group: Sequence[int], kind: str) -> tuple[float, Array]:
        """A collective over what replicas of a mesh have of gradients or parameters: seconds of a message, and seconds
        up to each part."""
        dense, experts, *_ = self._parameters_of(mesh.tensor, mesh.expert)
        if mesh.expert == 1:
            return self._summed(data_group, mesh.tensor, dense + experts, kind)
        whole = self._summed(self.dense_group(mesh), 1, dense, kind)
        parts = self._summed(data_group, mesh.expert, experts, kind)
        return max(whole[0], parts[0]), whole[1] + parts[1]

    def sum_seconds(self, mesh: Mesh, elements: float) -> float:
        """Seconds to sum the gradients of some elements over the replicas of a mesh, at the mean over all of its."""
        dense, experts, *_ = self._parameters_of(mesh.tensor, mesh.expert)
        return float(self.gradient_sums(mesh).upto[-1] / (dense[-1] + experts[-1])) * elements

    def gather_seconds(self, mesh: Mesh, elements: float) -> float:
        """Seconds to gather some elements before the first forward likewise; 0 where replicas do not divide them."""
        gathers = self.gradient_sums(mesh).gathers
        dense, experts, *_ = self._parameters_of(mesh.tensor, mesh.expert)
        return 0.0 if gathers is None else float(gathers[-1] / (dense[-1] + experts[-1])) * elements

    def dense_group(self, mesh: Mesh) -> tuple[int, ...]:
        """Ranks as those have them that sum what no experts are: of expert groups all devices."""
        if mesh.expert == 1:
            return self.sample(mesh)[1]
        nums = (min(count, MOST_SAMPLED) for count in mesh.counts)
        return tuple(rank for pool, num in zip(self.pools, nums, strict=True) for rank in pool.ranks[:num])

    def _summed(self, ranks: Sequence[int], num_alike: int, elements: Array, kind: str) -> tuple[float, Array]:
        """One of *num_alike* concurrent collectives over these ranks, by cumulative elements of the parts: seconds of a
        message, and seconds up to each part."""
        size = elements * self.prices.gradient_bytes
        much = float(size[-1])
        if len(ranks) < 2 or not much:
            return 0.0, np.zeros(len(size))
        message = self.prices.message_bytes(ranks, much, num_alike, divided=kind != "all_reduce")
        seconds = self.prices.all_reduce(ranks, num_alike, much, kind=kind)
        return self.prices.over(kind, ranks, num_alike, message), seconds / much * size
