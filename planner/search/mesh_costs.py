"""Costs of ranges of the chain on a replica and on a mesh, as arrays over the parts of the chain.

Sums up to each part, so that a stage of parts [first, last) costs sum[last] - sum[first]. It knows no devices: the
figures are made by `whale.planner.search.table`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from whale.planner.balance.cuts import StageGroup
from whale.planner.cost.groups import TensorGroup
from whale.planner.cost.memory import message_bytes
from whale.planner.cost.overlap import Beside, Overlap, overlap
from whale.planner.search.space import Mesh

__all__ = ["Array", "Integers", "MeshCosts", "ReplicaCosts", "Tied", "added_by_sums", "counted_again"]

Array = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

TOGETHER = 8
"""Numbers of micro-batches in flight for which it is worked out at once what fits in memory."""

BARRED_SECONDS = 1e6
"""Cost of a part on a mesh of other degrees than its fixed ones: larger than any plan."""


Tied = tuple[tuple[tuple[int, ...], float], ...]
"""Parts that share something, in order, and how much."""


def counted_again(tied: Tied, first: int, last: int) -> float:
    """Amount that sums up to parts count more than once in the parts [first, last), because several of these share it.

    >>> counted_again((((0, 3, 5), 10.0),), 0, 4), counted_again((((0, 3, 5), 10.0),), 1, 4)
    (10.0, 0.0)
    """
    return sum(max(0, bisect_left(parts, last) - bisect_left(parts, first) - 1) * much for parts, much in tied)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaCosts:
    """Costs of parts of the chain on a tensor group, for the given rows of a micro-batch.

    Attributes:
        group, rows: whose they are.
        of_kinds: seconds of the kinds of layers (columns): forward, backward, and the optimizer once a step.
        forward, backward, update: their sums up to each part.
        latency: for each end of a stage the latencies of handing on to another node and back.
        alone: for each end of a stage the other seconds of a message to another node with what it hands on, alone.
        near_latency, near_alone: the same within the node, where there is room for another slice.
        fixed: bytes of weights, gradients and optimizer states up to each part.
        tied: for each parameter that several parts read, these and its bytes, which ``fixed`` has for each of them.
        step: what the optimizer needs besides while it steps, up to each part.
        kept: bytes of a micro-batch up to each part, with the allocator's waste.
        handed: for each end of a stage what it hands on of a micro-batch, likewise; zeros where it does not hold that.
        working: bytes of each part while it runs, likewise.
        room: capacity without what the framework takes.
    """

    group: TensorGroup
    rows: int
    of_kinds: Array
    forward: Array
    backward: Array
    update: Array
    latency: Array
    alone: Array
    near_latency: Array
    near_alone: Array
    fixed: Array
    tied: Tied
    step: Array
    kept: Array
    handed: Array
    working: Array
    room: float

    def seconds(self, first: int, last: int) -> tuple[float, float]:
        """Forward and backward of parts [first, last)."""
        return float(self.forward[last] - self.forward[first]), float(self.backward[last] - self.backward[first])

    def fullness(self, first: int, last: int, held: int) -> float:
        """Fraction of memory that parts [first, last) take with the given micro-batches in flight."""
        return self._need(first, last, held) / self.room if self.room > 0 else inf

    def _need(self, first: int, last: int, held: int) -> float:
        fixed, step, kept, handed, working = self._lists
        state = fixed[last] - fixed[first] - counted_again(self.tied, first, last)
        way = message_bytes(handed[first], handed[last], held)
        need = state + held * (kept[last] - kept[first]) + way + max(working[first:last])
        return max(need, state + step[last] - step[first])

    @cached_property
    def _lists(self) -> list[list[float]]:
        return [one.tolist() for one in (self.fixed, self.step, self.kept, self.handed, self.working)]

    def reach(self, held: int) -> Integers:
        """For each end of a stage the first part that it can reach back to within memory, with as many micro-batches in
        flight. Worked out once, for some numbers of micro-batches at a time."""
        if held not in self._reaches:
            first = (held - 1) // TOGETHER * TOGETHER + 1
            several = range(first, first + TOGETHER)
            self._reaches.update(zip(several, self._first_held(several), strict=True))
        return self._reaches[held]

    def _first_held(self, several: Sequence[int]) -> Integers:
        """`reach` for several numbers of micro-batches in flight (first axis), ascending.

        For every amount w that a part works with: no part of more may be in the stage, and what else the stage holds
        must leave w. The least over all w is exact, in O(parts x log(parts)) for each w.
        """
        num = len(self.fixed)
        into, out = np.array([(message_bytes(1, 0, held), message_bytes(0, 1, held)) for held in several]).T[:, :, None]
        if self._need(0, num - 1, several[-1]) + float((into + out).max() * self.handed.max()) <= self.room:
            return np.zeros((len(several), num), dtype=np.int64)
        state, stepping = self.fixed + np.array(several)[:, None] * self.kept, self.fixed + self.step
        freed = np.maximum.accumulate(state - into * self.handed, axis=1)  # that begins there or, after less, before
        most, after = self._amounts
        wanted = (state + out * self.handed)[:, None] + most[:, None] - self.room
        first = np.array([own.searchsorted(needed.ravel()) for own, needed in zip(freed, wanted, strict=True)])
        found = np.maximum(after, first.reshape(wanted.shape)).min(axis=1)
        return np.maximum(found, np.searchsorted(stepping, stepping - self.room, side="left"))

    @cached_property
    def _reaches(self) -> dict[int, Integers]:
        return {}

    @cached_property
    def _amounts(self) -> tuple[Array, Integers]:
        """The amounts that parts work with, and for each (first axis) and each end the first part after those that need
        more."""
        most = np.array(sorted(set(self.working.tolist())))
        after = np.zeros((len(most), len(self.fixed)), dtype=np.int64)
        larger = np.arange(1, len(self.fixed)) * (self.working > most[:, None])
        np.maximum.accumulate(larger, axis=1, out=after[:, 1:])
        return most, after


def added_by_sums(sums: Array, backward: Array, besides: Sequence[Beside]) -> Array:
    """Seconds that gradient sums add to a step if each part hides its own behind its backward, of some meshes (first
    axis); all are sums up to each part (second axis)."""
    rate, slowdown = np.array([(one.rate, one.slowdown) for one in besides]).T[:, :, None]
    summed = np.diff(sums)
    hidden = np.minimum(summed / rate, np.diff(backward))
    found = np.zeros(sums.shape)
    (summed - (rate - slowdown) * hidden).cumsum(axis=1, out=found[:, 1:])
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshCosts:
    """Costs of parts of the chain on a mesh, for the given rows of a micro-batch.

    Attributes:
        mesh: whose they are.
        allowed: for each end of a stage the first part that it may reach back to, by what is decided.
        slices: one of each kind of its data slices, with the rows of the one that has most.
        forward, backward: sums up to each part, of the slowest slice; seconds of a micro-batch.
        update: sums of the optimizer's seconds, once a step.
        sums: sums of the seconds that summing gradients takes, once a step.
        message: seconds of one message of gradients.
        beside: how the last backward and these sums slow each other.
        met: sums of the seconds of collectives between slices that are in ``forward`` and ``backward``; None: none.
        hop: for each end of a stage the seconds of sending what it hands on to a stage like it, and as much back.
        gathers: sums of the seconds in which replicas gather, from the beginning of a step on, the parameters that each
            has updated a part of; None: none.
    """

    mesh: Mesh
    allowed: Integers
    slices: tuple[ReplicaCosts, ...]
    forward: Array
    backward: Array
    update: Array
    sums: Array
    message: float
    beside: Beside
    hop: Array
    met: Array | None = None
    gathers: Array | None = None

    @cached_property
    def both(self) -> Array:
        """Sums of forward and backward."""
        return self.forward + self.backward

    def seconds(self, first: int, last: int) -> tuple[float, float, float]:
        """Seconds of parts [first, last): forward, backward, and once per step."""
        forward, backward, update, *_ = self._lists
        ahead, back = forward[last] - forward[first], backward[last] - backward[first]
        if len(self.slices) > 1:  # one that is slower with some layers may be faster with others
            met = self.met_in(first, last)
            ahead, back = max((one.seconds(first, last) for one in self.slices), key=sum)
            ahead, back = ahead + met[0], back + met[1]
        return ahead, back, update[last] - update[first] + self._summed(first, last, back).added

    def _summed(self, first: int, last: int, backward: float) -> Overlap:
        """The sums of the gradients of parts [first, last), whose backward takes *backward* seconds."""
        _, _, _, sums, leads = self._lists
        lead = max(leads[first : last + 1]) - leads[first]
        return overlap(sums[last] - sums[first], lead, self.message, self.beside, backward)

    def slowed_in(self, first: int, last: int, backward: float) -> float:
        """Seconds by which sums slow the last backward of parts [first, last), which `seconds` counts once per step."""
        if not self.beside.slowdown or not self.message:
            return 0.0
        summed = self._summed(first, last, backward)
        return summed.added - summed.exposed

    def uneven(self, first: int, last: int) -> float:
        """How much longer the slowest slice takes for parts [first, last) than the fastest, if all take as long for the
        whole chain."""
        parts = [
            sum(one.seconds(first, last)) / max(float(one.forward[-1] + one.backward[-1]), 1e-12) for one in self.slices
        ]
        return max(parts) / max(min(parts), 1e-12)

    def update_in(self, first: int, last: int) -> float:
        """Seconds of the optimizer for parts [first, last)."""
        _, _, update, *_ = self._lists
        return update[last] - update[first]

    def forward_of(self, part: int) -> float:
        """Seconds of a micro-batch's forward through a part."""
        forward, *_ = self._lists
        return forward[part + 1] - forward[part]

    def gathered_in(self, first: int, last: int) -> float:
        """Seconds from the beginning of a step after which no forward of parts [first, last) would wait: each part
        waits until its parameters and those before are gathered, a bucket at a time, and gathers slow it."""
        if self.gathers is None:
            return 0.0
        (gathers, waits), forward = self._gather_lists, self._lists[0]
        slowed = self.beside.slowdown * min(forward[last] - forward[first], gathers[last] - gathers[first])
        return max(waits[first:last]) - gathers[first] + forward[first] + slowed

    @cached_property
    def _gather_lists(self) -> tuple[list[float], list[float]]:
        """Sums of the seconds of gathers up to each part; and for each part those for which it waits, without the
        forwards before: for its first bucket, and for the last one without what it computes until then."""
        assert self.gathers is not None
        own, forward = np.diff(self.gathers), np.diff(self.forward)
        bucket = np.minimum(own, self.message)
        computed = forward * (1 - bucket / np.maximum(own, 1e-12))
        waits = np.maximum(self.gathers[:-1] + bucket, self.gathers[1:] - computed) - self.forward[:-1]
        return self.gathers.tolist(), waits.tolist()

    def met_in(self, first: int, last: int) -> tuple[float, float]:
        """Seconds forward and backward of the collectives between slices in parts [first, last)."""
        if self.met is None:
            return 0.0, 0.0
        return float(self.met[0, last] - self.met[0, first]), float(self.met[1, last] - self.met[1, first])

    def stage(self, first: int, last: int, held: int) -> tuple[float, float, float, float]:
        """Cached `seconds` and `fullness` of parts [first, last)."""
        key = first, last, held
        found = self._stages.get(key)
        if found is None:
            found = self._stages[key] = (*self.seconds(first, last), self.fullness(first, last, held))
        return found

    @cached_property
    def _lists(self) -> list[list[float]]:
        leads = self.sums - self.beside.rate * self.backward
        return [one.tolist() for one in (self.forward, self.backward, self.update, self.sums, leads)]

    @cached_property
    def once(self) -> Array:
        """Sums of what comes once a step: the optimizer, and by how much sums of gradients make it longer if each part
        hides its own behind its backward."""
        return self.update + added_by_sums(self.sums[None], self.backward[None], (self.beside,))[0]

    @cached_property
    def _stages(self) -> dict[tuple[int, int, int], tuple[float, float, float, float]]:
        return {}

    @cached_property
    def fitted(self) -> dict[tuple[int, int, int], tuple[float, float, float, float]]:
        """`stage` by what is in it, with rows that suit the stage."""
        return {}

    def fullness(self, first: int, last: int, held: int) -> float:
        """The part of the room of the fullest slice that parts [first, last) take."""
        if len(self.slices) == 1:
            return self.slices[0].fullness(first, last, held)
        return max(one.fullness(first, last, held) for one in self.slices)

    def reach(self, held: int) -> Integers:
        """For each end of a stage the first part that it can reach back to, within memory and what is decided."""
        if held not in self._reaches:
            found = self.allowed
            for one in self.slices:
                found = np.maximum(found, one.reach(held))
            self._reaches[held] = found
        return self._reaches[held]

    def pace(self, micro_batches: int, ahead: bool = False) -> tuple[Array, Array]:
        """Seconds for a micro-batch with its part of what comes once a step: sums up to each part, and the same for the
        end of a stage, with what it hands on.

        A stage that does all forwards *ahead* of its first backward does all but one, and hands on all but one, while
        it would wait: of these a step is longer by backwards alone.
        """
        key = micro_batches, ahead
        if key not in self._paces:
            share = micro_batches if ahead else 1
            sums = self.forward / share + self.backward + self.once / micro_batches
            self._paces[key] = sums, sums + self.hop / share + self.message / micro_batches
        return self._paces[key]

    def longest(self, micro_batches: int) -> float:
        """The most seconds of `pace` that a stage could take, all of the chain and what it hands on."""
        if micro_batches not in self._longest:
            self._longest[micro_batches] = max(self.pace_lists(micro_batches)[1])
        return self._longest[micro_batches]

    def reach_list(self, held: int) -> list[int]:
        """`reach` as a list."""
        if held not in self._reach_lists:
            self._reach_lists[held] = self.reach(held).tolist()
        return self._reach_lists[held]

    def pace_lists(self, micro_batches: int, ahead: bool = False) -> tuple[list[float], list[float]]:
        """`pace` as lists."""
        key = micro_batches, ahead
        if key not in self._pace_lists:
            sums, ends = self.pace(micro_batches, ahead)
            self._pace_lists[key] = sums.tolist(), ends.tolist()
        return self._pace_lists[key]

    def shortest_ends(self, micro_batches: int, ahead: bool = False) -> list[int]:
        """For each end of a stage within the chain the one at or after it up to which a stage takes least by `pace`:
        where less is handed on, a longer stage takes less time than a shorter one."""
        key = micro_batches, ahead
        if key not in self._shortest_ends:
            _, ends = self.pace_lists(micro_batches, ahead)
            found = list(range(len(ends)))
            for end in range(len(ends) - 3, -1, -1):
                if ends[found[end + 1]] < ends[end]:
                    found[end] = found[end + 1]
            self._shortest_ends[key] = found
        return self._shortest_ends[key]

    def group(self, micro_batches: int) -> StageGroup:
        """The mesh as `whale.planner.balance.cuts` sees it: memory as parts of the room of whichever slice has least
        for it."""
        if micro_batches not in self._groups:
            self._groups[micro_batches] = self._group(micro_batches)
        return self._groups[micro_batches]

    def _group(self, micro_batches: int) -> StageGroup:
        sums, _ = self.pace(micro_batches)
        barred = self.allowed[1:] == np.arange(1, len(self.allowed))
        rooms = [max(one.room, 1.0) for one in self.slices]
        kept = np.max([np.diff(one.kept) / room for one, room in zip(self.slices, rooms, strict=True)], axis=0)
        working = np.max([one.working / room for one, room in zip(self.slices, rooms, strict=True)], axis=0)
        return StageGroup(
            name=" / ".join(map(str, self.mesh)),
            seconds=tuple(np.where(barred, BARRED_SECONDS, np.diff(sums)).tolist()),
            fixed_bytes=tuple((np.diff(self.slices[0].fixed) / min(rooms)).tolist()),
            kept_bytes=tuple(kept.tolist()),
            working_bytes=tuple(working.tolist()),
            capacity_bytes=1.0,
        )

    @cached_property
    def _longest(self) -> dict[int, float]:
        return {}

    @cached_property
    def _groups(self) -> dict[int, StageGroup]:
        return {}

    @cached_property
    def _reaches(self) -> dict[int, Integers]:
        return {}

    @cached_property
    def _reach_lists(self) -> dict[int, list[int]]:
        return {}

    @cached_property
    def _shortest_ends(self) -> dict[tuple[int, bool], list[int]]:
        return {}

    @cached_property
    def _pace_lists(self) -> dict[tuple[int, bool], tuple[list[float], list[float]]]:
        return {}

    @cached_property
    def _paces(self) -> dict[tuple[int, bool], tuple[Array, Array]]:
        return {}
