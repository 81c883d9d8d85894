"""Costs of every range of the chain on a mesh: arrays over the layers, for the search algorithms.

A mesh is counts of devices from pools, so its prices are those of a sample: its tensor groups at the beginning of a
node, its data group over the first of its devices, its messages to the next node. What a data slice costs depends on
its tensor group and its rows alone, and is worked out once for all meshes that have such slices. Times between the
numbers of rows that are priced are interpolated. What is found with these prices is laid out on ranks and priced
exactly by `whale.planner.search.evaluate`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from whale.planner.cost.overlap import Beside
from whale.planner.cost.replicas import of_kind
from whale.planner.cost.stage import TensorGroup
from whale.planner.search.mesh_costs import Array, Integers, MeshCosts, ReplicaCosts, added_by_sums
from whale.planner.search.space import Division, Mesh, MeshSpace, lay_out, replicas_of

__all__ = ["MOST_SAMPLED", "Array", "CostTable", "Pace"]

MOST_PLACED = 64
"""Devices of a sequence up to which it is found out which stages lie in one node."""

MOST_SAMPLED = 64
"""Ranks of a pool in a data group for which its sums are priced; those of more differ by a few hops."""

EXACT_ROWS = 4
"""Largest number of rows whose times are not interpolated, because launches and tiles make them uneven there."""

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


@dataclass(frozen=True, kw_only=True)
class CostTable(MeshSpace):
    """Costs of meshes, each computed once. Up to ``exact_rows`` rows times are not interpolated. Mixed replicas share
    rows by speed, or ``by_memory``."""

    exact_rows: int = EXACT_ROWS
    by_memory: bool = False
    _costs: dict[Any, MeshCosts] = field(default_factory=dict, init=False)
    _slices: dict[Any, ReplicaCosts] = field(default_factory=dict, init=False)
    _firsts: dict[Any, int] = field(default_factory=dict, init=False)
    _hops: dict[Any, list[float]] = field(default_factory=dict, init=False)
    _tables: dict[Any, Array] = field(default_factory=dict, init=False)
    _parts: dict[Any, Array] = field(default_factory=dict, init=False)
    _seconds: dict[Any, float] = field(default_factory=dict, init=False)
    _near: dict[tuple[Mesh, ...], list[bool]] = field(default_factory=dict, init=False)
    _samples: dict[Mesh, Sample] = field(default_factory=dict, init=False)
    _gradient_sums: dict[Mesh, GradientSums] = field(default_factory=dict, init=False)
    _paces: dict[Any, Pace] = field(default_factory=dict, init=False)
    _work: dict[Any, Pace] = field(default_factory=dict, init=False)
    _needs: dict[tuple[int, int, int], Array] = field(default_factory=dict, init=False)
    _most_rows: dict[tuple[int, int, int], float] = field(default_factory=dict, init=False)
    _parameters: dict[tuple[int, int], tuple[Array, Array, Array, Array]] = field(default_factory=dict, init=False)
    tied_sums: dict[Any, float] = field(default_factory=dict, init=False)

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
            self.replica_costs(group, count, micro_batches)
            for group, count in self._shared(groups, rows, micro_batches)
        )
        sums = self.gradient_sums(mesh)
        forward, backward, update = slices[0].forward, slices[0].backward, slices[0].update
        if len(slices) > 1:
            forward, backward, update = self._slowest_of([one.of_kinds for one in slices]) @ self._counts
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
            message=sums.message,
            beside=sums.beside,
            hop=busiest.near if self._lies_inside(mesh) else busiest.hop,
        )

    def _met(self, replica: ReplicaCosts, data_group: Sequence[int]) -> Array | None:
        """Seconds forward and backward (rows) up to each part of the collectives between replicas; None if no layer has
        any."""
        if not self.prices.meeting or len(data_group) < 2:
            return None
        group, rows, kinds = replica.group, replica.rows, range(len(self.prices.profile.kinds))
        of_kinds = [of_kind(self.prices, kind, group, rows, data_group) for kind in kinds]
        return np.array(of_kinds).T @ self._counts

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

        def of(group: TensorGroup, count: int) -> ReplicaCosts:
            return self.replica_costs(group, count, micro_batches)

        def seconds(group: TensorGroup, count: int) -> float:
            return sum(of(group, count).seconds(*part)) if count else 0.0

        most = self._most_held(costs.mesh, rows, micro_batches, part, held)
        if sum(limit * num for limit, (_, num) in zip(most, groups, strict=True)) < rows:
            return None
        low, high = 0.0, max(seconds(group, limit) for limit, (group, _) in zip(most, groups, strict=True))
        shares = most
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            within = [
                bisect_right(range(1, limit + 1), middle, key=lambda count: seconds(group, count))
                for limit, (group, _) in zip(most, groups, strict=True)
            ]
            if sum(count * num for count, (_, num) in zip(within, groups, strict=True)) < rows:
                low = middle
            else:
                shares, high = within, middle
        chosen = [of(group, count) for count, (group, _) in zip(shares, groups, strict=True)]
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
                key=lambda count: self.replica_costs(group, count, micro_batches).fullness(*part, held) > 1,
            )
            for group, _ in self.sample(mesh)[0]
        ]

    def hops(self, source: Mesh, target: Mesh, rows: int, micro_batches: int, near: bool = False) -> list[float]:
        """Seconds to send what a stage on *source* hands on to one on *target*, *near* if in the same node, and as much
        back, for each end of the stage. Slices have their rows in order; what those of a kind send to those of another
        all goes through the one link of whichever slice has most of it."""
        key = (source, target, rows, self.prices.adding(micro_batches), near)
        if key not in self._hops:
            spans = [self._spans(mesh, rows, micro_batches) for mesh in (source, target)]
            found = np.zeros(len(self.chain) + 1)
            for (one, first, last), (other, start, end) in product(*spans):
                busier, common = max(one, other, key=lambda own: own.rows), min(last, end) - max(first, start)
                if common > 1e-9:
                    seconds = busier.near if near else busier.hop
                    found = np.maximum(found, seconds * min(1.0, common / max(1, busier.rows)))
            self._hops[key] = found.tolist()
        return self._hops[key]

    def near_hops(self, sequence: tuple[Mesh, ...]) -> Sequence[bool]:
        """Stages in one node with the next one; none with many devices, where few are."""
        room = MOST_PLACED if self.largest_node > 1 else 0
        for mesh in sequence:
            room -= sum(mesh.counts)
            if room < 0:
                return [False] * (len(sequence) - 1)
        if sequence not in self._near:
            node_of = self.prices.cluster.node_of
            laid = lay_out(self.pools, sequence)
            nodes = [{id(node_of(rank)) for group in groups for rank in group} for groups in laid]
            self._near[sequence] = [one == other and len(one) == 1 for one, other in pairwise(nodes)]
        return self._near[sequence]

    def _lies_inside(self, mesh: Mesh) -> bool:
        """Whether two such meshes fit in a node."""
        used = [pool for pool, count in enumerate(mesh.counts) if count]
        return len(used) == 1 and 2 * mesh.counts[used[0]] <= self.pools[used[0]].per_node

    def _spans(self, mesh: Mesh, rows: int, micro_batches: int) -> list[tuple[ReplicaCosts, float, float]]:
        """The kinds of data slices of a mesh, and which rows of a micro-batch those of a kind have: first and last."""
        slices, (groups, _) = self.costs(mesh, rows, micro_batches).slices, self.sample(mesh)
        shares = [max(1, one.rows) * num for one, (_, num) in zip(slices, groups, strict=True)]
        ends = np.cumsum([0, *shares]) * (rows / sum(shares))
        return list(zip(slices, ends[:-1].tolist(), ends[1:].tolist(), strict=True))

    def paces(self, mesh: Mesh, rows: int, micro_batches: int) -> Pace:
        """Seconds for *rows* rows of each of *micro_batches* micro-batches, with their part of what comes once a step.
        As `costs`, without the parts between; of the sums of the commonest part only what grows with the bytes."""
        key = (mesh, rows, micro_batches)
        if key not in self._paces:
            of_chain, of_part, hop = self.work(mesh, rows, micro_batches)
            part, _ = self.commonest
            group, num = self.sample(mesh)[0][0]
            sums = self.gradient_sums(mesh)
            backward = self._table(group, -(-rows // num), micro_batches)[1] @ self._counts
            once = added_by_sums(sums.upto, backward, sums.beside)
            of_chain += (sums.message + float(once[-1])) / micro_batches
            of_part += float(once[part + 1] - once[part]) / micro_batches
            self._paces[key] = Pace(of_chain, of_part, hop)
        return self._paces[key]

    def work(self, mesh: Mesh, rows: int, micro_batches: int) -> Pace:
        """Times like `paces`, without gradient reductions."""
        key = (mesh, rows, micro_batches)
        if key not in self._work:
            groups, _ = self.sample(mesh)
            if len(groups) == 1:
                ((group, num),) = groups
                table = self._table(group, -(-rows // num), micro_batches)
                (forward, backward, update), hops = table[:3], table[5]
            else:
                tables = [self._table(*one, micro_batches) for one in self._shared(groups, rows, micro_batches)]
                forward, backward, update = self._slowest_of([one[:3] for one in tables])
                hops = np.max([one[5] for one in tables], axis=0)
            each, part = forward + backward + update / micro_batches, self._counts_of_commonest
            hop = float(hops[self._last_of_commonest])
            if self._lies_inside(mesh) and (near := self._nears(groups[0][0], -(-rows // groups[0][1]))) is not None:
                hop = float(near[self._last_of_commonest])
            self._work[key] = Pace(float(each @ self._num_layers), float(each @ part), hop)
        return self._work[key]

    @staticmethod
    def _slowest_of(of_kinds: Sequence[Array]) -> Array:
        """Forward, backward and update of each kind of layer (columns), on the slices where it takes longest."""
        tables = np.stack(of_kinds)
        slowest = tables[(tables[:, 0] + tables[:, 1]).argmax(axis=0), :, np.arange(tables.shape[2])].T
        slowest[2] = tables[:, 2].max(axis=0)
        return slowest

    def replica_costs(self, group: TensorGroup, rows: int, micro_batches: int) -> ReplicaCosts:
        """Costs of a replica with the given rows of a micro-batch."""
        key = (group.kind, rows, self.prices.adding(micro_batches))
        if key not in self._slices:
            table = self._table(group, rows, micro_batches)
            forward, backward, update, kept = table[:4] @ self._counts
            overhead = max(self.prices.overhead_bytes[type_.name] for type_ in group.types)
            starts, last_layers = self._ends
            hop = np.concatenate([[0.0], table[5][last_layers], [0.0]])
            near = self._nears(group, rows)
            self._slices[key] = ReplicaCosts(
                group=group,
                rows=rows,
                of_kinds=table[:3],
                forward=forward,
                backward=backward,
                update=update,
                hop=hop,
                near=hop if near is None else np.concatenate([[0.0], near[last_layers], [0.0]]),
                fixed=self._parameters_of(group.tensor, group.expert)[2],
                step=self._parameters_of(group.tensor, group.expert)[3],
                kept=kept,
                handed=self._handed(rows / group.expert),
                working=np.maximum.reduceat(table[4][self._layers], starts),
                room=group.memory_bytes - overhead,
            )
        return self._slices[key]

    def _table(self, group: TensorGroup, rows: int, micro_batches: int) -> Array:
        """Forward, backward, update, kept, working, sending on and what a later micro-batch's backward takes more
        (rows) of each kind of layer (columns), interpolated between numbers of rows that are powers of two."""
        rows, adding = group.whole_rows(rows), self.prices.adding(micro_batches)
        key = (group.kind, rows, adding)
        found = self._tables.get(key)
        if found is None:
            own = rows // group.expert
            below = group.expert << (own.bit_length() - 1) if rows else 0
            if adding > 1 and self.prices.runs:  # linear in the share of micro-batches that add to gradients
                found = self._table(group, rows, 1).copy()
                found[1] += (1 - 1 / adding) * found[6]
            elif own <= self.exact_rows or rows == below:
                found = self._priced(group, rows, adding)
            else:
                low, high = (self._table(group, count, micro_batches) for count in (below, 2 * below))
                found = low + (rows - below) / below * (high - low)
            self._tables[key] = found
        return found

    def _priced(self, group: TensorGroup, rows: int, micro_batches: int) -> Array:
        """`_table` of a number of rows that is priced."""
        kinds = range(len(self.prices.profile.kinds))
        found = []
        for kind in kinds:
            one, hop = self.prices.layer(kind, group, rows, micro_batches), self._hop(kind, group, rows)
            found.append((one.forward, one.backward, one.update, one.kept, one.working, hop, one.accumulation))
        columns = np.array(found).T
        columns[3:5] *= self.prices.waste
        return columns

    def too_large(self, pool: int, division: Division, rows: int) -> bool:
        """Whether a single layer does not fit on devices of a pool with the given rows of a micro-batch."""
        key = (pool, *division)
        if key not in self._most_rows:
            state, kept, kept_each, working, working_each, _ = self._amounts(*key)
            room = self._room(pool) - state - kept - working
            most = np.where(room < 0, -1.0, room / np.maximum(kept_each + working_each, 1e-9))
            self._most_rows[key] = float(most.min())
        return rows > self._most_rows[key]

    def parts_held(self, mesh: Mesh, rows: int, micro_batches: int) -> Array:
        """For each kind of layer (first axis) the part of them, in whole layers, that fits on a mesh at most if it is
        the last stage, the last but one and so on (second axis). Nothing is timed for it."""
        used = tuple(pool for pool, count in enumerate(mesh.counts) if count)
        share = -(-rows // mesh.data) if len(used) == 1 else 0  # of types side by side some may have no rows
        most = min(micro_batches, len(self.chain))
        key = (used, mesh.tensor, mesh.expert, share, most)
        if key not in self._parts:
            division = mesh.tensor, mesh.expert
            found = [self._parts_of(pool, division, np.array([share]), most)[0] for pool in used]
            self._parts[key] = np.min(found, axis=0)
        return self._parts[key]

    def together_held(
        self, pool: int, division: Division, shares: Sequence[int], stages: Sequence[int], micro_batches: int
    ) -> Array:
        """Like `parts_held`, summed up over some *stages* on devices of a pool: for each number of rows of a data slice
        (first axis) and kind of layer (second axis)."""
        parts = self._parts_of(pool, division, np.array(shares), micro_batches)
        within = np.arange(len(self.chain)) < np.array(stages)[:, None, None]
        found: Array = np.sum(parts, axis=2, where=within)
        return found

    def _parts_of(self, pool: int, division: Division, shares: Integers, micro_batches: int) -> Array:
        """The part of the layers of each kind (second axis) that fits for each number of rows of a data slice (first
        axis) with as many micro-batches in flight as in the last stage, the last but one and so on (third axis)."""
        state, kept, kept_each, working, working_each, nums = self._amounts(pool, *division)[:, None, :, None]
        held, share = np.minimum(np.arange(1, len(self.chain) + 1), micro_batches), shares[:, None, None]
        room = self._room(pool) - working - share * working_each
        fits = room / np.maximum(state + held * (kept + share * kept_each), 1.0)
        found: Array = np.floor(np.maximum(fits, 0.0) + 1e-9) / nums
        return found

    def _room(self, pool: int) -> float:
        type_ = self.pools[pool].type
        return type_.memory_bytes - self.prices.overhead_bytes[type_.name]

    def _amounts(self, pool: int, tensor: int, expert: int) -> Array:
        """Bytes (rows) of each kind of layer (columns): of its states; of what it keeps, at least and for each row;
        of what it works with, likewise; and how many such layers there are."""
        key = (pool, tensor, expert)
        if key not in self._needs:
            prices, type_, found = self.prices, self.pools[pool].type, []
            for kind, num in self.layer_counts.items():
                one, two = (
                    [of(kind, type_, (tensor, expert), rows / expert) for of in (prices.kept, prices.working)]
                    for rows in (1, 2)
                )
                amounts = [(2 * a - b, b - a) for a, b in zip(one, two, strict=True)]
                by_rows = [prices.waste * amount for pair in amounts for amount in pair]
                own, frozen = prices.parameters_of(kind, tensor, expert), prices.frozen_of(kind, tensor, expert)
                state = prices.state(sum(own), frozen).total
                found.append((state, *by_rows, num))
            self._needs[key] = np.array(found).T
        return self._needs[key]

    def sample(self, mesh: Mesh) -> Sample:
        """A tensor group of each kind of slices with their number, and ranks as its data group has them."""
        if mesh not in self._samples:
            counted: dict[TensorGroup, int] = {}
            data_group: list[int] = []
            taken = [0] * len(self.pools)
            for part in replicas_of(mesh):
                ranks = [
                    rank for pool, count in zip(self.pools, part.counts, strict=True) for rank in pool.ranks[:count]
                ]
                group = self.prices.group(sorted(ranks), mesh.data, mesh.expert)
                counted[group] = counted.get(group, 0) + part.num
                main = next(index for index, count in enumerate(part.counts) if count)
                step = part.counts[main]
                own = self.pools[main].ranks[taken[main] : taken[main] + part.num * step : step]
                data_group += own[:MOST_SAMPLED]
                taken = [done + part.num * count for done, count in zip(taken, part.counts, strict=True)]
            self._samples[mesh] = tuple(counted.items()), tuple(data_group)
        return self._samples[mesh]

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
        return [(group, count) for (group, _), count in zip(groups, most, strict=True)]

    def gradient_sums(self, mesh: Mesh) -> GradientSums:
        """The sums of gradients of a mesh. In expert groups all devices sum what is whole on each, and those of the
        same place their experts."""
        if mesh not in self._gradient_sums:
            dense, experts, *_ = self._parameters_of(mesh.tensor, mesh.expert)
            _, data_group = self.sample(mesh)
            if mesh.expert == 1:
                message, upto = self._summed(data_group, mesh.tensor, dense + experts)
            else:
                whole = self._summed(self.dense_group(mesh), 1, dense)
                parts = self._summed(data_group, mesh.expert, experts)
                message, upto = max(whole[0], parts[0]), whole[1] + parts[1]
            size = self.prices.message_bytes(
                max(1.0, float(dense[-1] + experts[-1]) * self.prices.gradient_bytes), mesh.size
            )
            beside = self.prices.beside(data_group, mesh.size, size)
            self._gradient_sums[mesh] = GradientSums(message, upto, beside)
        return self._gradient_sums[mesh]

    def sum_seconds(self, mesh: Mesh, elements: float) -> float:
        """Seconds to sum the gradients of some elements over the replicas of a mesh, at the mean over all of its."""
        dense, experts, *_ = self._parameters_of(mesh.tensor, mesh.expert)
        return float(self.gradient_sums(mesh).upto[-1] / (dense[-1] + experts[-1])) * elements

    def dense_group(self, mesh: Mesh) -> tuple[int, ...]:
        """Ranks as those have them that sum what no experts are: of expert groups all devices."""
        if mesh.expert == 1:
            return self.sample(mesh)[1]
        nums = (min(count, MOST_SAMPLED) for count in mesh.counts)
        return tuple(rank for pool, num in zip(self.pools, nums, strict=True) for rank in pool.ranks[:num])

    def _summed(self, ranks: Sequence[int], num_alike: int, elements: Array) -> tuple[float, Array]:
        """One of *num_alike* concurrent reductions over these ranks, by cumulative elements of the parts: seconds of a
        message, and seconds up to each part."""
        size = elements * self.prices.gradient_bytes
        much = float(size[-1])
        if len(ranks) < 2 or not much:
            return 0.0, np.zeros(len(size))
        message = self.prices.message_bytes(much, num_alike)
        seconds = self.prices.all_reduce(ranks, num_alike, much)
        return self.prices.over("all_reduce", ranks, num_alike, message), seconds / much * size

    def _hop(self, kind: int, group: TensorGroup, rows: int) -> float:
        """Seconds to send what a layer of this kind hands on, from a slice to another node if there is one, and as much
        back."""
        target = self._elsewhere(group.ranks)
        if not target:
            return 0.0
        return self._sent(kind, group, target, rows)

    def _sent(self, kind: int, group: TensorGroup, target: tuple[int, ...], rows: int) -> float:
        whole = self.prices.profile.kinds[kind].output.total(rows, self.prices.precision.element_bytes)
        seconds = 0.0
        for share in (1.0, self.prices.sent_share_of(kind, group.tensor, group.expert)):
            size = self.prices.handed(whole, group.degree, group.degree, positions=group.positions, share=share)
            hop = self.prices.hop(group.ranks, target, group, size, whole)
            seconds += hop.latency + size / hop.bandwidth
        return seconds

    def _nears(self, group: TensorGroup, rows: int) -> Array | None:
        """p2p time like `_hop` for each kind of layer, to a replica of the same node; None if there is no room for
        one."""
        node = self.prices.cluster.node_of(group.ranks[0])
        other = next((rank for rank in node.ranks if rank not in group.ranks), None)
        if other is None or 2 * group.degree > len(node.ranks):
            return None
        target = (other,) * len(group.ranks)
        return np.array([self._sent(kind, group, target, rows) for kind in range(len(self.prices.profile.kinds))])

    def _handed(self, rows: float) -> Array:
        """Bytes that a stage which ends there hands on, where it holds them."""
        found = np.zeros(len(self.chain) + 1)
        if self.prices.runs:
            size = self.prices.precision.element_bytes
            of_kinds = np.array([kind.output.total(rows, size) for kind in self.prices.profile.kinds])
            found[1:-1] = of_kinds[self._ends[1]] * self.prices.waste
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

    def _parameters_of(self, tensor: int, expert: int) -> tuple[Array, Array, Array, Array]:
        """Sums up to each part of a device's elements of parameters, dense ones and those of experts, of its bytes of
        states, and of what its optimizer takes besides while it steps."""
        key = (tensor, expert)
        if key not in self._parameters:
            prices, kinds = self.prices, range(len(self.prices.profile.kinds))
            dense, experts = zip(*(prices.parameters_of(kind, *key) for kind in kinds), strict=True)
            elements = list(map(sum, zip(dense, experts, strict=True)))
            states = [prices.state(elements[kind], prices.frozen_of(kind, *key)).total for kind in kinds]
            steps = [prices.waste * prices.step_bytes(number) for number in elements]
            found = np.array([dense, experts, states, steps]) @ self._counts
            self._parameters[key] = found[0], found[1], found[2], found[3]
        return self._parameters[key]

    @cached_property
    def _layers(self) -> Integers:
        return np.array(self.prices.profile.layers)

    @cached_property
    def tied(self) -> tuple[tuple[tuple[int, ...], float], ...]:
        """The parts that share a parameter, with its elements, for each that several parts read."""
        of_layer = np.repeat(np.arange(len(self.chain)), np.diff(self.chain.bounds))
        shared = ((sorted({int(of_layer[layer]) for layer in layers}), n) for layers, n in self.prices.profile.tied)
        return tuple((tuple(parts), elements) for parts, elements in shared if len(parts) > 1)

    @cached_property
    def _ends(self) -> tuple[Integers, Integers]:
        """The first layer of each part, and the kinds of the layers after which a stage may end and another begin."""
        starts = np.array(self.chain.bounds[:-1])
        return starts, self._layers[starts[1:] - 1]

    @cached_property
    def _counts(self) -> Array:
        """How many layers of each kind (rows) there are up to each part."""
        found = np.zeros((len(self.prices.profile.kinds), len(self._layers) + 1))
        found[self._layers, np.arange(1, len(self._layers) + 1)] = 1.0
        return found.cumsum(axis=1)[:, np.array(self.chain.bounds)]

    @cached_property
    def layer_counts(self) -> dict[int, int]:
        """How many layers there are of each kind."""
        layers = self.prices.profile.layers
        return {kind: layers.count(kind) for kind in dict.fromkeys(layers)}

    @cached_property
    def commonest(self) -> tuple[int, int]:
        """A part of the chain that most others are like, and how many these are."""
        layers = self.prices.profile.layers
        parts = [tuple(sorted(layers[first:last])) for first, last in pairwise(self.chain.bounds)]
        most = max(dict.fromkeys(parts), key=parts.count)
        return parts.index(most), parts.count(most)

    @cached_property
    def _counts_of_commonest(self) -> Array:
        part, _ = self.commonest
        found: Array = self._counts[:, part + 1] - self._counts[:, part]
        return found

    @cached_property
    def _last_of_commonest(self) -> int:
        """The kind of the last layer of `commonest`."""
        return self.prices.profile.layers[self.chain.bounds[self.commonest[0] + 1] - 1]

    @cached_property
    def _num_layers(self) -> Array:
        return self._counts[:, -1]
