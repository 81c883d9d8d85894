"""Step time of a pipeline by a recurrence, for steps that are too long to simulate event by event.

Every task starts when its rank is free and its inputs have arrived; a message leaves when its task ends and its link is
free. Over the fixed order of a schedule this gives every start in one pass. Once the pipeline is full, each further
micro-batch takes as long as the one before. So only as many micro-batches are evaluated as fill the pipeline, plus some
more, and the rest are extrapolated. Messages that share a resource take turns: between two of its own a link leaves it
to one of each of the others. So a micro-batch takes at least as long as its messages occupy the busiest resource.
Effects that only the simulator models (a sender that waits for a slow message, a message that waits for those under
way, reductions that slow tasks down) do not occur here or are negligible in long steps. This module knows workloads and
no plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

import numpy as np

from whale.ir.workload import Reduction, Workload
from whale.planner.simulation.simulate import simulate
from whale.planner.simulation.timeline import Timeline, busiest

__all__ = ["SETTLING", "Slot", "Timing", "long_timing", "settled_counts", "settled_timing", "slots_of"]

Array = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

SETTLING = 12
"""Micro-batches beyond the number of stages after which the pipeline is periodic. With slow messages the period may be
as many micro-batches as are in flight, so the rate is measured over a number with many divisors."""


SETTLED_TURNS = 3
"""Micro-batches for each set of ranks after which schedules without a recurrence go on evenly."""


class Timing(NamedTuple):
    """Time of a long step.

    Attributes:
        seconds: of the step.
        breakdown: of the rank that ends last, by the parts of `whale.ir.workload.Prediction`.
        bubble: fraction of all ranks' time in which they wait for other stages.
        busiest_rank: that is at work longest.
        of_busiest: its breakdown, which is shown.
    """

    seconds: float
    breakdown: dict[str, float]
    bubble: float
    busiest_rank: int
    of_busiest: dict[str, float]

    @classmethod
    def of(cls, timeline: Timeline) -> Timing:
        """Summarize a simulated step."""
        last, own = (
            {str(part): spent for part, spent in timeline.breakdowns[rank].items()}
            for rank in (timeline.last_rank, timeline.busiest_rank)
        )
        return cls(timeline.step_seconds, last, min(1.0, timeline.bubble), timeline.busiest_rank, own)


class Slot(NamedTuple):
    """The tasks of all stages in one slot; a step is divided into slots as if all tasks took equal time.

    Attributes:
        forwards, backwards: stages that run one.
        last_forward, last_backward: the stage among them that runs its last one, if any.
    """

    forwards: range
    backwards: range
    last_forward: int
    last_backward: int


def slots_of(num_stages: int, micro_batches: int, schedule: str) -> Iterator[Slot]:
    """Yield all slots of a step. A micro-batch moves from stage to stage in consecutive slots, so that a stage depends
    only on earlier slots of its neighbours and of itself.

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


def long_timing(workload: Workload) -> Timing:
    """Return how long a step takes, in a time that hardly grows with its micro-batches.

    ``gpipe`` and ``1f1b`` whose ranks have one stage each, which reads what it receives first, go by a recurrence over
    all ranks of a slot at once, in O(stages) slots at most; others by `settled_timing`.
    """
    depth, count = len(workload.stages), workload.micro_batches
    ranks = [rank for stage in workload.stages for rank in stage.ranks]
    is_chain = len(set(ranks)) == len(ranks) and not any(stage.own for stage in workload.stages)
    if workload.schedule in ("gpipe", "1f1b") and is_chain:
        return _Pass(workload, min(count, depth + 2 * SETTLING)).step()
    return settled_timing(workload)


def settled_counts(workload: Workload) -> tuple[int, int]:
    """Return two numbers of micro-batches from which `settled_timing` extrapolates: the pipeline has settled in the
    smaller one, and what follows repeats itself in the larger one."""
    depth, count = len(workload.stages), workload.micro_batches
    num_sets = len({stage.ranks for stage in workload.stages})
    if num_sets == depth:
        return depth + SETTLING, depth + 2 * SETTLING
    first = count % num_sets + num_sets * max(SETTLED_TURNS, -(-2 * SETTLING // num_sets))
    return first, first + num_sets


def settled_timing(workload: Workload) -> Timing:
    """Return how long a step takes by two shorter ones that are simulated, for any schedule and with messages that wait
    for each other."""
    first, second = settled_counts(workload)
    return Timing.of(simulate(workload)) if workload.micro_batches <= second else _extrapolated(workload, first, second)


def _extrapolated(workload: Workload, first: int, second: int) -> Timing:
    """Extrapolate from two steps of fewer micro-batches: past its warm-up a schedule takes as long for every further
    turn, in which each set of ranks takes one more micro-batch for each set."""
    one, other = (Timing.of(simulate(workload.model_copy(update={"micro_batches": num}))) for num in (first, second))
    turns = (workload.micro_batches - first) / (second - first)

    def after(few: float, more: float) -> float:
        return max(0.0, few + turns * (more - few))

    seconds = after(one.seconds, other.seconds)
    last, own = (
        {part: after(few[part], more[part]) for part in more}
        for few, more in ((one.breakdown, other.breakdown), (one.of_busiest, other.of_busiest))
    )
    waits = after(one.bubble * one.seconds, other.bubble * other.seconds)
    return Timing(seconds, last, min(1.0, waits / seconds) if seconds else 0.0, other.busiest_rank, own)


class _Inputs(NamedTuple):
    """One message for each rank (by position) that it waits for before a task.

    Attributes:
        made: position of the end of the sending task, relative to the rank's own row in all ends by slot.
        latency: of the link; minus infinity if a rank waits for no such message.
        seconds: transfer time on the link, beside the messages of the same task that share a resource with it.
        others: seconds that messages of other links occupy its busiest resource between two of its own: those in the
            same direction, and all.
        free: time at which the link is free again.
        shared: whether any of ``others`` is not 0.
    """

    made: Integers
    latency: Array
    seconds: Array
    others: tuple[Array, Array]
    free: Array
    shared: bool


def _stretched(reduction: Reduction) -> float:
    """Seconds of a sum of gradients while ranks compute."""
    return reduction.seconds * (1 + reduction.stretch)


class _Pass:
    """Evaluate the first *count* micro-batches and the end of a step, and extrapolate those between.

    Ranks of consecutive stages have consecutive positions. In arrays with two rows, the first is of backwards and the
    second of forwards, or of waits for other ranks and for messages.
    """

    def __init__(self, workload: Workload, count: int) -> None:
        self.workload, self.count = workload, count
        self.slots = tuple(slots_of(len(workload.stages), count, workload.schedule))
        self.each = self.slots[0].forwards.step
        places: dict[int, slice] = {}
        self.ranks: list[int] = []
        for stage in sorted(range(len(workload.stages)), key=lambda stage: (stage % self.each, stage)):
            first = len(self.ranks)
            self.ranks += workload.stages[stage].ranks
            places[stage] = slice(first, len(self.ranks))
        self.places = [places[stage] for stage in range(len(workload.stages))]
        num = len(self.ranks)
        self.seconds, self.communication = np.zeros((2, num)), np.zeros(num)
        for work, own in zip(workload.stages, self.places, strict=True):
            self.seconds[:, own] = work.backward, work.forward
            self.communication[own] = work.communication or 0.0
        self.free, self.waited = np.zeros(num), np.zeros((2, num))
        self.ends = np.zeros((2, len(self.slots), num))
        self.waits = np.zeros((len(self.slots), 2, num))  # until and with each backward
        self.links = {(link.source, link.target): link for link in workload.links}
        self.occupied = self._occupied()
        self.inputs = [self._inputs(ahead) for ahead in (False, True)]
        self.slower = self._slower()
        self.least_ends, self.gathering = np.zeros(num), np.zeros(num)  # of first forwards, and what they wait
        for work, own in zip(workload.stages, self.places, strict=True):
            self.least_ends[own] = work.gathered or 0.0
        self.sending = np.array([self._sending(ahead) for ahead in (False, True)])

    def _slower(self) -> Array:
        """Seconds by which each rank's last backward is slower because of the gradient sums beside it."""
        found, place = np.zeros(len(self.ranks)), {rank: index for index, rank in enumerate(self.ranks)}
        for reduction in self.workload.reductions:
            slowdowns = reduction.slowdown or (self.workload.overlap_slowdown,) * len(reduction.ranks)
            for rank, slowdown in zip(reduction.ranks, slowdowns, strict=True):
                alone = (1 - reduction.ready) * self.seconds[0, place[rank]] * self.workload.last_share
                both = min(alone * (1 + slowdown), _stretched(reduction))
                found[place[rank]] += both - both / (1 + slowdown)
        return found

    def _occupied(self) -> list[defaultdict[str, float]]:
        """Seconds for which the messages of a micro-batch occupy each resource: those of gradients, the others, all."""
        found = [defaultdict[str, float](float) for _ in range(3)]
        for boundary in self.workload.boundaries:
            for own, messages in zip(found, (boundary.backward, boundary.forward), strict=False):
                for one in messages:
                    link = self.links[one.source, one.target]
                    for resource in link.resources:
                        own[resource] += one.bytes / link.bandwidth
                        found[-1][resource] += one.bytes / link.bandwidth
        return found

    def _inputs(self, ahead: bool) -> list[_Inputs]:
        """Return the first message that each rank waits for, the second, and so on."""
        num, place = len(self.ranks), {rank: index for index, rank in enumerate(self.ranks)}
        of_ranks: list[list[tuple[float, ...]]] = [[] for _ in self.ranks]
        together = defaultdict[tuple[int, str], list[float]](list)  # messages of a stage that share a resource
        messages = []
        for boundary in self.workload.boundaries:
            slots = boundary.target_stage - boundary.source_stage  # from the sending task to the waiting one
            stage = boundary.source_stage if ahead else boundary.target_stage
            for one in boundary.forward if ahead else boundary.backward:
                link = self.links[one.source, one.target]
                seconds = one.bytes / link.bandwidth
                messages.append((one, link, seconds, stage, slots))
                for resource in link.resources:
                    together[stage, resource].append(seconds)
        for one, link, seconds, stage, slots in messages:
            begun = (sum(min(seconds, other) for other in together[stage, name]) for name in link.resources)
            spent = max(begun, default=seconds)
            others = [
                max(0.0, max((occupied[name] for name in link.resources), default=0.0) - spent)
                for occupied in (self.occupied[ahead], self.occupied[-1])
            ]
            given = place[one.source] - slots * num, link.latency, spent, *others
            of_ranks[place[one.target]].append(given)
        found = []
        for number in range(max(map(len, of_ranks))):
            every = [own[number] if number < len(own) else (0, -inf, 0.0, 0.0, 0.0) for own in of_ranks]
            made, latency, transfer, same, both = (np.array(values) for values in zip(*every, strict=True))
            shared = bool(same.any() or both.any())
            found.append(_Inputs(made.astype(np.int64), latency, transfer, (same, both), np.zeros(num), shared))
        return found

    def _sending(self, ahead: bool) -> Array:
        """Seconds in which each rank waits for its sends after a task."""
        found = np.zeros(len(self.ranks))
        if not self.workload.blocking_transfers:
            return found
        place = {rank: index for index, rank in enumerate(self.ranks)}
        for boundary in self.workload.boundaries:
            for one in boundary.forward if ahead else boundary.backward:
                own = place[one.source]
                found[own] = max(found[own], one.bytes / self.links[one.source, one.target].bandwidth)
        return found

    def step(self) -> Timing:
        for slot, given in enumerate(self.slots):
            self._run(slot, True, given.forwards, given.last_forward, bool(given.backwards))
            self._run(slot, False, given.backwards, given.last_backward, bool(given.forwards))
        times, depth = self.workload.micro_batches - self.count, len(self.places)
        if times:
            period = self._period()
            for stage, own in enumerate(self.places):
                last = self.count - 2 - (depth - stage if self.workload.schedule == "1f1b" else 0)
                first, last = (self._slot(False, stage, micro_batch) for micro_batch in (last - SETTLING, last))
                self._go_on(own, times, period, self.waits[last, :, own] - self.waits[first, :, own])
        return self._ended()

    def _run(self, slot: int, ahead: bool, stages: range, last: int, both: bool) -> None:
        """Run a forward or a backward on each rank of some stages once its inputs have arrived; the *last* stage's one
        has fewer rows. Messages go *both* ways, or one."""
        if not stages:
            return
        own = slice(self.places[stages[0]].start, self.places[stages[-1]].stop)
        free = begin = issued = self.free[own]
        share: Array | None = None  # of the rows of a full micro-batch
        if last in stages and self.workload.last_share < 1:
            share = np.ones(len(free))
            share[self.places[last].start - own.start : self.places[last].stop - own.start] = self.workload.last_share
        ends = self.ends[int(ahead)]
        for given in self.inputs[ahead]:
            made, link, others = ends.ravel()[given.made[own] + slot * len(self.ranks)], given.free[own], given.others
            np.maximum(made, link, out=link)
            link += given.seconds[own] if share is None else given.seconds[own] * share
            arrived = link + given.latency[own]
            issued = np.where(arrived > begin, np.maximum(made, free), issued)
            begin = np.maximum(begin, arrived)
            if given.shared:
                link += others[both][own] if share is None else share * others[both][own]
        self.waited[0, own] += issued - free
        self.waited[1, own] += begin - issued
        seconds = self.seconds[int(ahead), own]
        done = begin + (seconds if share is None else share * seconds)
        if last in stages and not ahead:
            last_ones = slice(self.places[last].start - own.start, self.places[last].stop - own.start)
            done[last_ones] += self.slower[self.places[last]]
        if ahead and slot < len(self.places):
            waits = np.maximum(0.0, self.least_ends[own] - done)
            self.gathering[own] += waits
            done = done + waits
        ends[slot, own] = done
        if self.workload.blocking_transfers:
            sending = self.sending[int(ahead), own]
            sending = sending if share is None else share * sending
            self.waited[1, own] += sending
            done = done + sending
        self.free[own] = done
        if not ahead:
            self.waits[slot, :, own] = self.waited[:, own]

    def _slot(self, ahead: bool, stage: int, micro_batch: int) -> int:
        """Yield the stages in which a rank runs a task of a micro-batch."""
        first = stage if ahead else self.slots[0].last_backward - stage - self.each * (self.count - 1)
        return first + self.each * micro_batch

    def _go_on(self, own: slice, times: float, period: float, waits: Array) -> None:
        """Extrapolate a number of micro-batches, one per period; ranks wait as they did between two backwards."""
        more = times * np.maximum(0.0, period - self.seconds[:, own].sum(axis=0))
        whole = waits.sum(axis=0)
        share = np.divide(waits[0], whole, out=np.ones_like(whole), where=whole > 0)
        self.waited[:, own] += share * more, (1 - share) * more
        self.free[own] += times * period

    def _period(self) -> float:
        """Time of a micro-batch once the pipeline is full, measured at the last stage, away from both ends of the step;
        with ``gpipe`` forwards there, and then backwards at the first stage."""

        def spent(stage: int, ahead: bool) -> float:
            slots = [self._slot(ahead, stage, self.count - 2 - back) for back in (0, SETTLING)]
            last, first = self.ends[int(ahead)][slots, self.places[stage]]
            return float((last - first).max()) / SETTLING

        depth = len(self.places)
        if self.workload.schedule == "gpipe":
            return spent(depth - 1, True) + spent(0, False)
        return spent(depth - 1, False)

    def _ended(self) -> Timing:
        """Add the gradient reductions, one after the other on each rank, and the update."""
        free = dict(zip(self.ranks, self.free.tolist(), strict=True))
        slower = dict(zip(self.ranks, self.slower.tolist(), strict=True))
        last_backward = dict(zip(self.ranks, (self.seconds[0] * self.workload.last_share).tolist(), strict=True))
        ready = dict.fromkeys(free, 0.0)
        waiting, summed = dict.fromkeys(free, 0.0), dict(slower)
        for reduction in self.workload.reductions:
            alone = 1 - reduction.ready  # of the last backward, that sums run beside
            left = {r: alone * last_backward[r] + slower[r] if alone else 0.0 for r in reduction.ranks}
            start = max(max(free[r] - left[r], ready[r]) for r in reduction.ranks)
            beside = max(0.0, *(free[r] - start for r in reduction.ranks))  # for which any rank computes
            hidden = beside / (1 + reduction.stretch)
            end = start + (beside + reduction.seconds - hidden if hidden < reduction.seconds else _stretched(reduction))
            for rank in reduction.ranks:
                since = max(free[rank], ready[rank])
                waiting[rank] += max(0.0, start - since)
                summed[rank] += max(0.0, end - max(since, start))
                ready[rank] = end
        ready = {rank: max(at, free[rank]) for rank, at in ready.items()}
        update = self.workload.update or (0.0,) * self.workload.world_size
        ends = {index: at + update[index] for index, at in ready.items()}
        last = max(ends, key=lambda index: (ends[index], -index))
        seconds = ends[last] + self.workload.overhead
        times = self.workload.micro_batches - 1 + self.workload.last_share
        work = times * self.seconds.sum(axis=0)
        own = busiest(dict(zip(self.ranks, work.tolist(), strict=True)))

        def parts(rank: int) -> dict[str, float]:
            place = self.ranks.index(rank)
            inside, gathering = float(self.communication[place]), float(self.gathering[place])
            return {
                "compute": times * (float(self.seconds[:, place].sum()) - inside),
                "communication": times * inside + gathering,
                "pipeline": float(self.waited[0, place]) + ends[last] - ends[rank],
                "transfer": float(self.waited[1, place]),
                "stall": waiting[rank],
                "reduction": summed[rank],
                "update": update[rank],
                "overhead": self.workload.overhead,
            }

        waits = float(self.waited.sum()) + sum(ends[last] - end for end in ends.values())
        return Timing(seconds, parts(last), min(1.0, waits / len(ends) / seconds), own, parts(own))
