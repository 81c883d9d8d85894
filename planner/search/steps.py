"""How long a step takes when it is too long to simulate event by event: the same waits as a recurrence.

Every task of a pipeline starts when its rank is free and what it consumes has arrived; a message leaves when it is made
and its link is free. Over the fixed order of a schedule that gives every start in one pass. Once the pipeline is full
each further micro-batch takes as long as the one before, so of a long step only as many are gone through as fill it,
and some more; what is between them goes on. What the simulator knows besides (a sender that waits for a slow message,
reductions that slow tasks down) does not occur here or is nothing beside a step. It knows workloads, and no plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from whale.ir.workload import StageWork, Workload

__all__ = ["SETTLING", "Step", "in_flight", "long_step", "order_of_tasks"]

SETTLING = 12
"""Micro-batches more than a pipeline has stages, after which it goes on evenly; where messages are slow that may be as
many micro-batches at a time as are in flight, so what goes on is measured over a number that many divide."""


class Step(NamedTuple):
    """A step: its seconds, those of the rank that ends last by `whale.ir.workload.Prediction`'s parts, the share of all
    ranks' time in which they wait for others."""

    seconds: float
    breakdown: dict[str, float]
    bubble: float


def in_flight(schedule: str, num_stages: int, stage: int, micro_batches: int) -> int:
    """How many micro-batches a stage keeps at a time, at most.

    >>> [in_flight("1f1b", 4, stage, 8) for stage in range(4)]
    [4, 3, 2, 1]
    """
    return micro_batches if schedule == "gpipe" else min(num_stages - stage, micro_batches)


@lru_cache(maxsize=256)
def order_of_tasks(num_stages: int, micro_batches: int, schedule: str) -> tuple[tuple[int, int, bool], ...]:
    """(stage, micro-batch, whether forward), each after what it needs and after what its stage does before.

    That is the order in time if every task took as long as any other.

    >>> [("B", "F")[ahead] + str(index) for stage, index, ahead in order_of_tasks(2, 3, "1f1b") if stage == 0]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    tasks = []
    for stage in range(num_stages):
        for index in range(micro_batches):
            if schedule == "gpipe":
                ahead, back = stage + index, micro_batches + 2 * num_stages - stage + index
            else:
                ahead, back = stage + 2 * index, 2 * num_stages - stage - 1 + 2 * index
            tasks += [(ahead, stage, index, True), (back, stage, index, False)]
    tasks.sort()
    return tuple((stage, index, ahead) for _, stage, index, ahead in tasks)


def long_step(workload: Workload) -> Step:
    """A step of a ``gpipe`` or ``1f1b`` workload whose ranks have one stage each. O(stages^2 x transfers) at most."""
    depth = len(workload.stages)
    few, more = depth + SETTLING, depth + 3 * SETTLING
    if workload.micro_batches <= more:
        return _Pass(workload, workload.micro_batches).step()
    one, other = (_Pass(workload, count).step() for count in (few, more))
    times = (workload.micro_batches - more) / (more - few)

    def onward(first: float, second: float) -> float:
        return max(0.0, second + times * (second - first))

    seconds = onward(one.seconds, other.seconds)
    waited = onward(one.bubble * one.seconds, other.bubble * other.seconds)
    parts = {part: onward(one.breakdown.get(part, 0.0), spent) for part, spent in other.breakdown.items()}
    scale = seconds / sum(parts.values())  # another rank may be the last of the longer step
    return Step(seconds, {part: spent * scale for part, spent in parts.items()}, min(1.0, waited / seconds))


class _Input(NamedTuple):
    """What a rank waits for before a task: the rank that sends, the link's latency, seconds of a message on it."""

    source: int
    latency: float
    seconds: float


@dataclass
class _Rank:
    """A rank with what has become of it."""

    forward: float
    backward: float
    communication: float
    free: float = 0.0
    pipeline: float = 0.0
    transfer: float = 0.0
    links: dict[tuple[int, bool], float] = field(default_factory=dict)  # when the link from a source is free
    done: dict[tuple[int, bool], float] = field(default_factory=dict)  # when a task ended


class _Pass:
    def __init__(self, workload: Workload, micro_batches: int) -> None:
        self.workload, self.count = workload, micro_batches
        self.ranks: dict[int, _Rank] = {}
        for stage in workload.stages:
            self.ranks.update(_ranks(stage))
        links = {(link.source, link.target): link for link in workload.links}
        self.inputs: dict[tuple[int, bool], list[_Input]] = {}
        for boundary in workload.boundaries:
            for ahead, transfers in ((True, boundary.forward), (False, boundary.backward)):
                for one in transfers:
                    link = links[one.source, one.target]
                    given = _Input(one.source, link.latency, one.bytes / link.bandwidth)
                    self.inputs.setdefault((one.target, ahead), []).append(given)

    def step(self) -> Step:
        stages = [stage.ranks for stage in self.workload.stages]
        for stage, index, ahead in order_of_tasks(len(stages), self.count, self.workload.schedule):
            for rank in stages[stage]:
                self._run(rank, index, ahead)
        return self._ended()

    def _run(self, index: int, micro_batch: int, ahead: bool) -> None:
        rank = self.ranks[index]
        share = self.workload.last_share if micro_batch == self.count - 1 else 1.0
        begin = free = rank.free
        issued = free
        for source, latency, seconds in self.inputs.get((index, ahead), ()):
            made = self.ranks[source].done[micro_batch, ahead]
            gone = rank.links[source, ahead] = max(made, rank.links.get((source, ahead), 0.0)) + seconds * share
            if gone + latency > begin:
                begin, issued = gone + latency, max(made, free)
        rank.pipeline += issued - free
        rank.transfer += begin - issued
        rank.free = rank.done[micro_batch, ahead] = begin + share * (rank.forward if ahead else rank.backward)

    def _ended(self) -> Step:
        """The sums of gradients, one after the other on each rank, and the update."""
        ready = {index: rank.free for index, rank in self.ranks.items()}
        waiting, summed = dict.fromkeys(ready, 0.0), dict.fromkeys(ready, 0.0)
        for reduction in self.workload.reductions:
            start = max(max(self.ranks[index].free, ready[index]) for index in reduction.ranks)
            for index in reduction.ranks:
                waiting[index] += start - ready[index]
                summed[index] += reduction.seconds
                ready[index] = start + reduction.seconds
        update = self.workload.update or (0.0,) * self.workload.world_size
        ends = {index: at + update[index] for index, at in ready.items()}
        last = max(ends, key=lambda index: (ends[index], -index))
        seconds = ends[last] + self.workload.overhead
        times = self.count - 1 + self.workload.last_share
        rank = self.ranks[last]
        breakdown = {
            "compute": times * (rank.forward + rank.backward - rank.communication),
            "communication": times * rank.communication,
            "pipeline": rank.pipeline,
            "transfer": rank.transfer,
            "stall": waiting[last],
            "reduction": summed[last],
            "update": update[last],
            "overhead": self.workload.overhead,
        }
        waits = sum(rank.pipeline + rank.transfer + ends[last] - ends[index] for index, rank in self.ranks.items())
        return Step(seconds, breakdown, min(1.0, waits / len(ends) / seconds))


def _ranks(stage: StageWork) -> Iterator[tuple[int, _Rank]]:
    communication: Sequence[float] = stage.communication or (0.0,) * len(stage.ranks)
    for rank, *times in zip(stage.ranks, stage.forward, stage.backward, communication, strict=True):
        forward, backward, inside = times
        yield rank, _Rank(forward, backward, inside)
