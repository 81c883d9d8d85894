"""Costs of every range of the chain on a replica: arrays over the layers, for whatever mesh has such replicas.

What a data slice costs depends on its tensor group and its rows alone. Times between the numbers of rows that are
priced are interpolated; what accumulating gradients takes is linear in the share of micro-batches that do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from whale.planner.cost.groups import TensorGroup
from whale.planner.cost.hosts import OF_PROCESSES, host_of
from whale.planner.cost.memory import message_bytes
from whale.planner.search.mesh_costs import Array, Integers, ReplicaCosts, Tied, counted_again
from whale.planner.search.row_table import ACCUMULATION, BACKWARD, FAR, FORWARD, KEPT, NEAR, UPDATE, WORKING, RowTable
from whale.planner.search.space import Division, Mesh, MeshSpace

__all__ = ["HELD", "ReplicaTable", "fewest_holding", "total"]

HELD = 1 - 1e-9
"""Fraction of layers that counts as all, up to rounding."""

BUCKETS = (0, 2, 4)
"""Buckets of parameters and gradients that are whole at a time at each level of dividing state, beside what is kept and
one that is filled (`whale.planner.cost.plan_memory` counts them)."""

MOST_EXACT = 1_000
"""Prices of layers on replicas with numbers of rows other than powers of two. Times between these are uneven, by up to
a third, because kernels run in waves of tiles."""


@dataclass(frozen=True, kw_only=True)
class ReplicaTable(MeshSpace):
    """Costs of replicas, each computed once. Times of the first ``most_exact`` replicas with numbers of rows are not
    interpolated; with ``any_hosts`` hosts hold all that is on them."""

    most_exact: int = MOST_EXACT
    any_hosts: bool = False
    _slices: dict[Any, ReplicaCosts] = field(default_factory=dict, init=False)
    _tables: dict[Any, Array] = field(default_factory=dict, init=False)
    _parts: dict[Any, Array] = field(default_factory=dict, init=False)
    _commonest_held: dict[tuple[Mesh, int, int], list[int]] = field(default_factory=dict, init=False)
    _targets: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict, init=False)
    _handed_bytes: dict[tuple[tuple[int, int], tuple[int, int], int], float] = field(default_factory=dict, init=False)
    _held_shares: dict[Hashable, tuple[Array, Array]] = field(default_factory=dict, init=False)
    _lists: dict[Any, list[list[float]]] = field(default_factory=dict, init=False)
    _nums: dict[tuple[int, int], list[float]] = field(default_factory=dict, init=False)
    _sizes: dict[float, Array] = field(default_factory=dict, init=False)
    _needs: dict[tuple[int, int, int, int], Array] = field(default_factory=dict, init=False)
    _most_rows: dict[tuple[int, int, int, int], float] = field(default_factory=dict, init=False)
    _of_buckets: dict[tuple[int, int], float] = field(default_factory=dict, init=False)
    _parameters: dict[Any, tuple[Array, Array, Array, Array]] = field(default_factory=dict, init=False)

    def _overflows(
        self, group: TensorGroup, micro_batches: int, part: tuple[int, int], held: int, shards: float = 1.0
    ) -> Callable[[int], bool]:
        """Whether a replica does not hold the parts [first, last) with given rows of a micro-batch: its `fullness`,
        without its costs of all other parts."""
        first, last = part
        fixed, step = self._state_of(group, shards, micro_batches)
        tied = self._tied_state(group.tensor, shards, micro_batches)
        state = float(fixed[last] - fixed[first]) - counted_again(tied, first, last)
        stepping = float(step[last] - step[first])
        room = self._room_of(group)
        nums = self._nums_in(part)

        def overflows(rows: int) -> bool:
            _, _, kept, working = self._of_kinds(group, rows, micro_batches)
            handed = self._handed(rows / group.positions)
            way = message_bytes(handed[first], handed[last], held)
            most = max(own for num, own in zip(nums, working, strict=True) if num)
            if (whole := self._kept_whole(group, rows)) is not None:
                most += float(whole[last] - whole[first])
            return bool(state + held * total(nums, kept) + way + most > room)

        if state + stepping > room:
            return lambda _: True
        return overflows

    def _nums_in(self, part: tuple[int, int]) -> list[float]:
        """How many layers of each kind the parts [first, last) have."""
        if part not in self._nums:
            first, last = part
            self._nums[part] = (self._counts[:, last] - self._counts[:, first]).tolist()
        return self._nums[part]

    def _of_kinds(self, group: TensorGroup, rows: int, micro_batches: int) -> list[list[float]]:
        """Forward, backward, kept and working of each kind of layer, as lists: `_table`."""
        key = (group.kind, rows, self.prices.adding(micro_batches))
        found = self._lists.get(key)
        if found is None:
            table = self._table(group, rows, micro_batches)
            found = self._lists[key] = table[[FORWARD, BACKWARD, KEPT, WORKING]].tolist()
        return found

    def replica_costs(self, group: TensorGroup, rows: int, micro_batches: int, shards: float = 1.0) -> ReplicaCosts:
        """Costs of a replica with the given rows of a micro-batch, which has one of *shards* parts of what is divided
        of its state."""
        key = (group.kind, rows, self.prices.adding(micro_batches), shards)
        if key not in self._slices:
            table = self._table(group, rows, micro_batches)
            forward, backward, update, kept = table[: KEPT + 1] @ self._counts
            starts, last_layers = self._ends
            sent = np.zeros((4, len(self.chain) + 1))
            sent[:, 1:-1] = table[[*FAR, *NEAR]][:, last_layers]
            fixed, step = self._state_of(group, shards, micro_batches)
            if (whole := self._kept_whole(group, rows)) is not None:
                fixed = fixed + whole
            self._slices[key] = ReplicaCosts(
                group=group,
                rows=rows,
                of_kinds=table[: UPDATE + 1],
                forward=forward,
                backward=backward,
                update=update,
                latency=sent[0],
                alone=sent[1],
                near_latency=sent[2],
                near_alone=sent[3],
                fixed=fixed,
                tied=self._tied_state(group.tensor, shards, micro_batches),
                step=step,
                kept=kept,
                handed=self._handed(rows / group.positions),
                working=np.maximum.reduceat(table[WORKING][self._layers], starts),
                room=self._room_of(group),
            )
        return self._slices[key]

    def _state_of(self, group: TensorGroup, shards: float, micro_batches: int) -> tuple[Array, Array]:
        """Sums up to each part of the bytes of state on a device, and of what it needs besides once a step: while the
        optimizer steps, or where the state is on the host, what leaves no more room here than there."""
        _, _, fixed, step = self._parameters_of(group.tensor, group.expert, shards, micro_batches)
        if not self.prices.stack.state_on_host or self.any_hosts:
            return fixed, step
        each = [
            self._hosted(kind, group.tensor, group.expert, shards) for kind in range(len(self.prices.profile.kinds))
        ]
        room = min(map(self._room_on_host, group.ranks))
        return fixed, np.array(each) @ self._counts * (self._room_of(group) / max(1.0, room)) - fixed

    def _kept_whole(self, group: TensorGroup, rows: int) -> Array | None:
        """Sums up to each part of the bytes of parameters that a device keeps from micro-batch to micro-batch although
        replicas divide them: where a device has no rows they are gathered once a step."""
        if self.prices.stack.zero < 3 or rows >= group.expert:
            return None
        dense, experts, *_ = self._parameters_of(group.tensor, group.expert)
        return (dense + experts) * self.prices.precision.element_bytes

    def _hosted(self, kind: int, tensor: int, expert: int, shards: float) -> float:
        """Bytes of the state of a layer on a device's host, of which the device has one of *shards* parts."""
        prices = self.prices
        dense, experts = prices.parameters_of(kind, tensor, expert)
        own = dense / (shards * expert) + experts / shards
        return own * prices.precision.element_bytes * (2 + prices.states)

    def _room_on_host(self, rank: int) -> float:
        """The part of a host's memory that a device has, without its process."""
        cluster = self.prices.cluster
        node = cluster.node_of(rank)
        taken = 0.0 if cluster.devices[rank].type.is_processor else OF_PROCESSES
        return host_of(cluster, node).memory_bytes / len(node.ranks) - taken

    def _room_of(self, group: TensorGroup) -> float:
        """Capacity of its smallest device, without what the framework takes, and buckets on their way."""
        taken = max(self.prices.overhead_bytes[type_.name] for type_ in group.types)
        return group.memory_bytes - taken - self._buckets(group.tensor, group.expert)

    def _buckets(self, tensor: int, expert: int) -> float:
        """Bytes of buckets that a device has beside its state where replicas divide it, if it has no layer but
        blocks."""
        if not self.prices.stack.zero or not self.prices.runs:
            return 0.0
        key = (tensor, expert)
        if key not in self._of_buckets:
            kinds, ranks = self.prices.profile.layers, self.pools[0].ranks
            blocks = [place for place, kind in enumerate(kinds) if self.prices.repeats(kind)] or range(len(kinds))
            largest = min(
                self.prices.largest_bucket(ranks, blocks, tensor, expert, divided=True),
                sum(self.prices.parameters(blocks, tensor, expert)) * self.prices.gradient_bytes,
            )
            whole = BUCKETS[self.prices.stack.zero - 1] * largest
            if self.prices.stack.zero > 1:
                whole += self.prices.filled_bucket(ranks, largest)
            self._of_buckets[key] = self.prices.waste * whole
        return self._of_buckets[key]

    def _table(self, group: TensorGroup, rows: int, micro_batches: int) -> Array:
        """The quantities of `row_table` (first axis) of each kind of layer (second axis) on a group."""
        key = (group.kind, rows, self.prices.adding(micro_batches))
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = self._tables_of([(group, rows)], micro_batches)[0]
        return found

    def _tables_of(self, asked: Sequence[tuple[TensorGroup, int]], micro_batches: int) -> Array:
        """`_table` of several groups with their rows (first axis)."""
        adding = self.prices.adding(micro_batches)
        if adding == 1 or not self.prices.runs:
            return self._row_table.at(asked, adding)
        found = self._row_table.at(asked, 1)  # linear in the share of micro-batches that add to gradients
        found[:, BACKWARD] += (1 - 1 / adding) * found[:, ACCUMULATION]
        return found

    @cached_property
    def _row_table(self) -> RowTable:
        return RowTable(self._priced, len(self.prices.profile.kinds), self.most_exact)

    def _priced(self, group: TensorGroup, rows: int, micro_batches: int) -> Array:
        """`_table` of a number of rows that is priced, for as many micro-batches that accumulate gradients."""
        kinds, (far, near) = range(len(self.prices.profile.kinds)), self._targets_of(group)
        degrees: tuple[int, int] = (group.tensor, group.expert)
        found = []
        for kind in kinds:
            one = self.prices.layer(kind, group, rows, micro_batches)
            own = max(0.0, one.kept - self.prices.shared_casts_of(kind, degrees))
            kept, working = (self.prices.waste * amount for amount in (own, one.working))
            sent = self._sent(kind, group, far, rows)
            within = sent if near == far else self._sent(kind, group, near, rows)
            found.append((one.forward, one.backward, one.update, kept, working, one.accumulation, *sent, *within))
        return np.array(found).T

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
        key = (used, mesh.division, share, most)
        if key not in self._parts:
            found = [self._parts_of(pool, mesh.division, np.array([share]), most)[0] for pool in used]
            self._parts[key] = np.min(found, axis=0)
        return self._parts[key]

    def commonest_held(self, mesh: Mesh, rows: int, micro_batches: int) -> list[int]:
        """How many parts like the commonest one fit on a mesh at most if it is the last stage, the last but one and so
        on."""
        key = (mesh, rows, micro_batches)
        if key not in self._commonest_held:
            nums = np.array(list(self.layer_counts.values()))
            each = self._counts_of_commonest[list(self.layer_counts)]
            layers = (nums[:, None] * self.parts_held(mesh, rows, micro_batches))[each > 0]
            found = (layers / each[each > 0, None] + 1e-6).min(axis=0)
            self._commonest_held[key] = found.astype(np.int64).tolist()
        return self._commonest_held[key]

    def least_depth(self, micro_batches: int) -> int:
        """The fewest stages that could hold the model on any meshes."""
        nothing = np.zeros(1, dtype=np.int64)
        parts = [
            self._parts_of(pool, division, nothing, micro_batches)[0]
            for pool in range(len(self.pools))
            for division in self.all_divisions
        ]
        return fewest_holding(parts)

    def together_held(
        self, pool: int, division: Division, shares: Sequence[int], stages: Sequence[int], micro_batches: int
    ) -> Array:
        """Like `parts_held`, summed up over some *stages* on devices of a pool: for each number of rows of a data slice
        (first axis) and kind of layer (second axis)."""
        most = min(micro_batches, len(self.chain))  # in flight; stages further from the end hold as much
        parts, num = self._parts_of(pool, division, np.array(shares), micro_batches, most), np.array(stages)
        places = np.arange(len(num)), slice(None), np.minimum(num, most) - 1
        found: Array = parts.cumsum(axis=2)[places] + np.maximum(num - most, 0)[:, None] * parts[:, :, -1]
        return found

    def _parts_of(
        self, pool: int, division: Division, shares: Integers, micro_batches: int, places: int | None = None
    ) -> Array:
        """The part of the layers of each kind (second axis) that fits for each number of rows of a data slice (first
        axis) with as many micro-batches in flight as in the last stage, the last but one and so on (third axis)."""
        state, kept, kept_each, working, working_each, nums = self._amounts(pool, *division)[:, None, :, None]
        held = np.minimum(np.arange(1, (places or len(self.chain)) + 1), micro_batches)
        share = shares[:, None, None]
        room = self._room(pool) - working - share * working_each
        fits = room / np.maximum(state + held * (kept + share * kept_each), 1.0)
        if self.prices.stack.state_on_host and not self.any_hosts:
            fits = np.minimum(fits, self._held_by_hosts(pool, *division)[None, :, None])
        found: Array = np.floor(np.maximum(fits, 0.0) + 1e-9) / nums
        return found

    def _held_by_hosts(self, pool: int, tensor: int, expert: int, context: int) -> Array:
        """The number of layers of each kind whose state has room on the hosts of a pool."""
        room = max(self._room_on_host(node[0]) for node in self.pools[pool].nodes)
        shards = self._most_shards(pool, tensor)
        each = [self._hosted(kind, tensor, expert, shards) for kind in self.layer_counts]
        return room / np.maximum(each, 1.0)

    def _room(self, pool: int) -> float:
        type_ = self.pools[pool].type
        return type_.memory_bytes - self.prices.overhead_bytes[type_.name]

    def _most_shards(self, pool: int, tensor: int) -> float:
        """The most parts, of what a device of a pool has, into which all devices together could divide state."""
        if not self.prices.stack.zero:
            return 1.0
        room = max(1.0, self._room(pool))
        return max(
            1.0, sum(len(one.ranks) * max(0.0, self._room(i)) for i, one in enumerate(self.pools)) / room / tensor
        )

    def _amounts(self, pool: int, tensor: int, expert: int, context: int) -> Array:
        """Bytes (rows) of each kind of layer (columns): of its states; of what it keeps, at least and for each row;
        of what it works with, likewise; and how many such layers there are."""
        key = (pool, tensor, expert, context)
        if key not in self._needs:
            prices, type_, found = self.prices, self.pools[pool].type, []
            for kind, num in self.layer_counts.items():
                one, two = (
                    [of(kind, type_, (tensor, expert, context), rows / expert) for of in (prices.kept, prices.working)]
                    for rows in (1, 2)
                )
                amounts = [(2 * a - b, b - a) for a, b in zip(one, two, strict=True)]
                amounts[0] = (amounts[0][0] - prices.shared_casts_of(kind, (tensor, expert)), amounts[0][1])
                by_rows = [prices.waste * amount for pair in amounts for amount in pair]
                own, frozen = prices.parameters_of(kind, tensor, expert), prices.frozen_of(kind, tensor, expert)
                shards = self._most_shards(pool, tensor)
                state = prices.lasting(prices.state(sum(own), frozen, shards=shards, zero=prices.stack.zero), 1)
                found.append((state + self._casts(kind, tensor, expert), *by_rows, num))
            self._needs[key] = np.array(found).T
        return self._needs[key]

    def _sent(self, kind: int, group: TensorGroup, target: tuple[int, ...], rows: int) -> tuple[float, float]:
        """Seconds of handing on, and as much back, what a layer of this kind makes of some rows, from a device of a
        group to another rank: latencies of both ways, and the rest of one way, alone on its links. Nothing without a
        *target*."""
        if not target:
            return 0.0, 0.0
        prices = self.prices
        whole = prices.profile.kinds[kind].output.total(rows, prices.precision.element_bytes)
        if prices.exchanges:
            size = round(whole / group.positions)
            hop = prices.link(group.ranks[0], target[0], size)
        else:
            size = prices.handed(whole, group.degree, group.degree, positions=group.positions)
            hop = prices.hop(group.ranks, target, group, size, whole)
        return 2 * hop.latency, size / hop.bandwidth

    @cached_property
    def _shared_since(self) -> int:
        """Rows from which no layer hands on other parts."""
        variants = (one for kind in self.prices.profile.kinds for one in kind.variants)
        return max((end.since for one in variants for end in (one.received, one.sent)), default=0)

    def held_shares(self, tensors: tuple[int, int], rows: tuple[float, float]) -> tuple[Array, Array]:
        """For each end of a stage the part of what it hands on that a device has, and one of the next stage, by their
        tensor degrees and the most rows of their replicas."""
        key = tensors, tuple([min(one, self._shared_since) for one in rows])
        if key not in self._held_shares:
            starts, last_layers = self._ends
            shares = np.ones((2, len(self.chain) + 1))
            if self.prices.exchanges:
                layers = zip(last_layers.tolist(), self._layers[starts[1:]].tolist(), strict=True)
                each = [self.prices.held_shares(kinds, tensors, rows) for kinds in layers]
                shares[:, 1:-1] = np.array(each).reshape(-1, 2).T
            self._held_shares[key] = shares[0], shares[1]
        return self._held_shares[key]

    def handed_bytes(self, source: tuple[int, int], target: tuple[int, int], rows: int) -> float:
        """Bytes that a stage of parts [first, last) sends to a later one, of the whole rows."""
        key = (source, target, rows)
        if key not in self._handed_bytes:
            bounds = self.chain.bounds
            layers, others = (range(bounds[first], bounds[last]) for first, last in (source, target))
            self._handed_bytes[key] = self.prices.handed_on(layers, others, rows)
        return self._handed_bytes[key]

    def priced_bytes(self, part: int, rows: int) -> float:
        """Bytes for which handing on before a part is priced: those of the first layer like the one before it."""
        return self.prices.output_of_kind(self.chain.bounds[part] - 1, rows)

    def _targets_of(self, group: TensorGroup) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ranks on another node if there is one, to which a group hands on, and another of the same node if there is
        one, else the same; nothing, where there are no other ranks."""
        if group.kind not in self._targets:
            node = self.prices.cluster.node_of(group.ranks[0])
            far = self._elsewhere(group.ranks)
            other = next((rank for rank in node.ranks if rank not in group.ranks), None)
            self._targets[group.kind] = far, far if other is None else (other,) * len(group.ranks)
        return self._targets[group.kind]

    def _handed(self, rows: float) -> Array:
        """Bytes that a stage which ends there hands on, where it holds them."""
        if rows not in self._sizes:
            found = self._sizes[rows] = np.zeros(len(self.chain) + 1)
            if self.prices.runs:
                size, profile = self.prices.precision.element_bytes, self.prices.profile
                if profile.skips:
                    sizes = np.array([self.prices.output_bytes(bound - 1, rows) for bound in self.chain.bounds[1:-1]])
                else:  # as many as layers, each one of a few kinds
                    sizes = np.array([kind.output.total(rows, size) for kind in profile.kinds])[self._ends[1]]
                found[1:-1] = sizes * self.prices.waste
        return self._sizes[rows]

    def _elsewhere(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """A rank on another node, of the same region if there is one, that with the fastest network, or if there is
        none another rank, as often as *ranks* has some: messages to it are limited by the network of *ranks* alone."""
        devices = self.prices.cluster.devices
        home = devices[ranks[0]].node
        others = [pool.ranks[0] for pool in self.pools] + [pool.ranks[-1] for pool in self.pools]
        region = self.prices.cluster.node_of(ranks[0]).region

        def nearness(rank: int) -> tuple[bool, float]:
            return self.prices.cluster.node_of(rank).region == region, self._network(rank)

        far = max((rank for rank in others if devices[rank].node != home), key=nearness, default=None)
        near = next((rank for rank in others if rank not in ranks), None)
        rank = near if far is None else far
        return () if rank is None else (rank,) * len(ranks)

    def _network(self, rank: int) -> float:
        """Bandwidth of a rank to other nodes."""
        link = self.prices.cluster.node_of(rank).inter
        return inf if link is None else link.bandwidth

    def _parameters_of(
        self, tensor: int, expert: int, shards: float = 1.0, micro_batches: int = 1
    ) -> tuple[Array, Array, Array, Array]:
        """Sums up to each part of a device's elements of parameters, dense ones and those of experts, tied ones where
        they are read first; of its bytes of states, and of what its optimizer takes besides while it steps, of which it
        has one of *shards* parts, of dense ones of as many more as there are in an expert group."""
        key = (tensor, expert, shards, self.prices.step_in_backward and micro_batches == 1)
        if key not in self._parameters:
            prices, kinds, zero = self.prices, range(len(self.prices.profile.kinds)), self.prices.stack.zero
            dense, experts = zip(*(prices.parameters_of(kind, tensor, expert) for kind in kinds), strict=True)
            elements = list(map(sum, zip(dense, experts, strict=True)))
            states, casts = [], [self._casts(kind, tensor, expert) for kind in kinds]
            for kind in kinds:
                frozen = prices.frozen_of(kind, tensor, expert)
                state = prices.state(dense[kind], frozen, shards=shards * expert, zero=zero)
                state += prices.state(experts[kind], shards=shards, zero=zero)
                states.append(prices.lasting(state, micro_batches) + casts[kind])
            steps = [prices.waste * prices.step_bytes(number) / (shards if zero else 1) for number in elements]
            steps = [step - cast for step, cast in zip(steps, casts, strict=True)]  # they are gone while it steps
            found = np.array([dense, experts, states, steps]) @ self._counts
            for parts, shared in self.tied:  # its gradient is one, ready with the first of its readers
                found[0] -= shared / tensor * np.searchsorted(parts[1:], np.arange(found.shape[1]), side="left")
            self._parameters[key] = found[0], found[1], found[2], found[3]
        return self._parameters[key]

    def _casts(self, kind: int, tensor: int, expert: int) -> float:
        """Bytes of the casts of a layer's parameters that all micro-batches share, with the allocator's waste; where
        state is divided parameters are gathered as these."""
        if self.prices.stack.zero:
            return 0.0
        return self.prices.waste * self.prices.shared_casts_of(kind, (tensor, expert))

    def _tied_state(self, tensor: int, shards: float = 1.0, micro_batches: int = 1) -> Tied:
        """Bytes of the states of each tied parameter, with its parts."""
        zero = self.prices.stack.zero
        states = (self.prices.state(shared / tensor, shards=shards, zero=zero) for _, shared in self.tied)
        each = (self.prices.lasting(state, micro_batches) for state in states)
        return tuple(zip((parts for parts, _ in self.tied), each, strict=True))

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
    def _end_of_commonest(self) -> tuple[int, int]:
        """An end of a stage after a part like `commonest`, and the kind of the last layer before it."""
        part, _ = self.commonest
        end = part + 1 if part + 1 < len(self.chain) else part
        return end, self.prices.profile.layers[self.chain.bounds[part + 1] - 1]

    @cached_property
    def _num_layers(self) -> Array:
        return self._counts[:, -1]


def fewest_holding(parts: Sequence[Array]) -> int:
    """The fewest stages that could hold all layers, if the r-th from the end holds as much of each kind as any of some
    meshes does there: *parts* are those of `ReplicaTable.parts_held`."""
    together = np.max(parts, axis=0).cumsum(axis=1).min(axis=0)
    return int(np.searchsorted(together, HELD)) + 1


def total(nums: Sequence[float], each: Sequence[float]) -> float:
    """A sum of products."""
    return sum(num * own for num, own in zip(nums, each, strict=True))
