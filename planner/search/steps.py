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
from typing import NamedTuple

from whale.ir.workload import StageWork, Workload

__all__ = ["SETTLING", "Slot", "Step", "in_flight", "long_step", "slots_of"]

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


class Slot(NamedTuple):
    """What stages do in one of the slots into which a step is divided as if every task took as long as any other.

    Attributes:
        forwards, backwards: stages that do one.
        last_forward, last_backward: the stage among them that does its last one, if it is among them.
    """

    forwards: range
    backwards: range
    last_forward: int
    last_backward: int


def slots_of(num_stages: int, micro_batches: int, schedule: str) -> Iterator[Slot]:
    """All slots of a step. A micro-batch is handed from a stage to the next one from one slot to the next, so that what
    a stage does depends on what its neighbour and itself did in slots before.

    >>> done = [(slot.forwards, slot.backwards) for slot in slots_of(2, 3, "1f1b")]
    >>> "".join("F" if 0 in forwards else "B" for forwards, backwards in done if 0 in forwards or 0 in backwards)
    'FFBFBB'
    """
    each = 1 if schedule == "gpipe" else 2  # slots from a micro-batch to the next
    turn = micro_batches + 2 * num_stages if schedule == "gpipe" else 2 * num_stages - 1
    for slot in range(turn + each * (micro_batches - 1) + 1):
        last_forward = slot - each * (micro_batches - 1)
        last_backward = turn - slot + each * (micro_batches - 1)
        yield Slot(
            range(max(last_forward, slot % each), min(slot, num_stages - 1) + 1, each),
            range(max(turn - slot, (turn - slot) % each), min(last_backward, num_stages - 1) + 1, each),
            last_forward,
            last_backward,
        )


def long_step(workload: Workload) -> Step:
    """A step of a ``gpipe`` or ``1f1b`` workload whose ranks have one stage each. O(stages^2 x transfers) at most."""
    return _Pass(workload, min(workload.micro_batches, len(workload.stages) + 2 * SETTLING)).step()


@dataclass(slots=True, eq=False)
class _Input:
    """What a rank waits for before a task: the rank that sends, the link's latency, seconds of a message on it, and
    when it is free again."""

    source: _Rank
    latency: float
    seconds: float
    free: float = 0.0


@dataclass(slots=True, eq=False)
class _Rank:
    """A rank with what has become of it. Pairs are for backwards and forwards."""

    forward: float
    backward: float
    communication: float
    free: float = 0.0
    pipeline: float = 0.0
    transfer: float = 0.0
    inputs: tuple[list[_Input], list[_Input]] = field(default_factory=lambda: ([], []))
    done: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # when each micro-batch ended
    waits: list[tuple[float, float]] = field(default_factory=list)  # for others and for messages, at each backward

    def runs(self, ahead: bool, share: float) -> None:
        """A forward or a backward of its next micro-batch, of which it has a share of the rows, once what it consumes
        is there."""
        begin = issued = free = self.free
        done = self.done[ahead]
        for given in self.inputs[ahead]:
            made = given.source.done[ahead][len(done)]
            given.free = max(made, given.free) + given.seconds * share
            if given.free + given.latency > begin:
                begin, issued = given.free + given.latency, max(made, free)
        self.pipeline += issued - free
        self.transfer += begin - issued
        self.free = begin + share * (self.forward if ahead else self.backward)
        done.append(self.free)
        if not ahead:
            self.waits.append((self.pipeline, self.transfer))

    def goes_on(self, times: float, period: float, first: int, last: int) -> None:
        """So many micro-batches more, one each period; it waits as it did between two backwards."""
        more = times * max(0.0, period - self.forward - self.backward)
        pipeline, transfer = (after - before for before, after in zip(self.waits[first], self.waits[last], strict=True))
        share = pipeline / (pipeline + transfer) if pipeline + transfer else 1.0
        self.pipeline, self.transfer = self.pipeline + share * more, self.transfer + (1 - share) * more
        self.free += times * period


class _Pass:
    """The first *count* micro-batches and the end of a step; what is between goes on as it was."""

    def __init__(self, workload: Workload, count: int) -> None:
        self.workload, self.count = workload, count
        self.ranks: dict[int, _Rank] = {}
        for stage in workload.stages:
            self.ranks.update(_ranks(stage))
        links = {(link.source, link.target): link for link in workload.links}
        for boundary in workload.boundaries:
            for ahead, transfers in ((True, boundary.forward), (False, boundary.backward)):
                for one in transfers:
                    link = links[one.source, one.target]
                    given = _Input(self.ranks[one.source], link.latency, one.bytes / link.bandwidth)
                    self.ranks[one.target].inputs[ahead].append(given)

    def step(self) -> Step:
        stages = [[self.ranks[index] for index in stage.ranks] for stage in self.workload.stages]
        last_share = self.workload.last_share
        for slot in slots_of(len(stages), self.count, self.workload.schedule):
            for stage in slot.forwards:
                for rank in stages[stage]:
                    rank.runs(True, last_share if stage == slot.last_forward else 1.0)
            for stage in slot.backwards:
                for rank in stages[stage]:
                    rank.runs(False, last_share if stage == slot.last_backward else 1.0)
        times = self.workload.micro_batches - self.count
        if times:
            period = self._period(stages)
            for stage, ranks in enumerate(stages):
                last = self.count - 2 - (len(stages) - stage if self.workload.schedule == "1f1b" else 0)
                for rank in ranks:
                    rank.goes_on(times, period, last - SETTLING, last)
        return self._ended()

    def _period(self, stages: Sequence[Sequence[_Rank]]) -> float:
        """What a micro-batch takes once the pipeline is full: at the last stage, which no end of a step has touched;
        with ``gpipe`` forwards there, and then backwards at the first."""

        def spent(ranks: Sequence[_Rank], ahead: bool) -> float:
            return max(rank.done[ahead][-2] - rank.done[ahead][-2 - SETTLING] for rank in ranks) / SETTLING

        if self.workload.schedule == "gpipe":
            return spent(stages[-1], True) + spent(stages[0], False)
        return spent(stages[-1], False)

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
        times = self.workload.micro_batches - 1 + self.workload.last_share
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
