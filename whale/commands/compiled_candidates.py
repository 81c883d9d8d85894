"""Candidates of a search that are compiled: the best, those that could be better, and others until one can be run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import NamedTuple

from whale.commands.plan_writer import Choice, PlanWriter, Trial
from whale.commands.shared import Shared
from whale.errors import UsageError
from whale.ir.cluster import Cluster
from whale.ir.workload import Workload
from whale.planner.search import Candidate, Found
from whale.planner.search.least_memory import LEAST_GAIN
from whale.planner.search.simple import least_after_compiling

__all__ = ["CompiledCandidates"]

PATIENCE = 2.0
"""Multiple of the time limit for which candidates are compiled as long as none can be run."""

MOST_UNSURE, UNSURE_OPERATORS = 8, 8192
"""Limits on the further candidates that are compiled because they could be better than the best compiled one, and on
the operators of all of them together. Both are counted, so that a busy machine leads to the same plans."""

WORTH_SHARING, LEAST_SHARED = 16384, 4096
"""Operators of all candidates together, seconds of compiling, that are shared with other processes from the first
candidate on: each fork finds again what the others know of equal stages, which takes as long as half of that. Fewer are
shared after the first, of which forks know all; and least of all."""

UNSURE = 0.05
"""Part of a step by which the search has to say that one of two plans is faster, or both are compiled."""

GAIN = 1e-3
"""Smallest relative improvement for which another candidate is compiled."""


class _Timed(NamedTuple):
    """A candidate that was tried, and the seconds that it took."""

    choice: Choice
    seconds: float


@dataclass
class CompiledCandidates:
    """Candidates that were compiled, or written down where there was no time for that.

    Attributes:
        schedule: in place of that by which the search went, if not None.
        until: the time at which no more are compiled, if one can be run.
        time_limit: seconds that end then.
        processes: which compile.
        room: of each device type, the part of its memory that candidates of another search may take.
    """

    writer: PlanWriter
    trial: Trial
    schedule: str | None
    until: float
    time_limit: float
    stopped: Callable[[], bool]
    processes: int
    choices: list[Choice] = field(default_factory=list)
    refused: list[Choice] = field(default_factory=list)
    longest: float = 0.0
    seen: set[object] = field(default_factory=set)
    room: dict[str, float] = field(default_factory=dict)

    def gives_up(self) -> bool:
        """Whether no other is compiled although none can be run."""
        return self.stopped() or time.monotonic() > self.until + (PATIENCE - 1) * self.time_limit

    def late(self) -> bool:
        """Whether there is one that can be run, and no time to compile another."""
        return self.stopped() or (bool(self.choices) and time.monotonic() + self.longest > self.until)

    def best_of(self, found: Found, simple: Callable[[], Sequence[Candidate]], top: int) -> None:
        """Compile the best that a search found, then each of the *simple* plans that could be better, then the others
        of the *top*; as long as none of these can be run, the next ones; and at last those that would be better than
        the best so far if compiling made them as much faster as any of these."""
        first, *others = found.candidates[:top]
        at_once = self.trial.num_operators * len(others) > WORTH_SHARING
        if not at_once:
            self.compile(first, self.schedule)
        with self._shared(others) as shared:
            if at_once:
                self.compile(first, self.schedule)
            for candidate in () if self.late() else simple():
                best = min((one.prediction.step_seconds for one in self.choices if one.compiled), default=inf)
                least = max(least_after_compiling(candidate), _least_with_sums(candidate.workload))
                if least < best and not self.late():
                    self.compile(candidate, self.schedule)
            for number, candidate in enumerate(others):
                self.compile(candidate, self.schedule, partial(shared.result, number))
        for candidate in found.candidates[top:]:
            if self.choices or self.gives_up():
                break
            self.compile(candidate, self.schedule)
        unsure = sorted((*found.candidates[top:], *found.near), key=lambda one: one.prediction.step_seconds)
        for candidate in unsure[: min(MOST_UNSURE, UNSURE_OPERATORS // max(1, self.trial.num_operators))]:
            compiled = [one for one in self.choices if one.compiled]
            gained = min((_seconds(one) / one.candidate.prediction.step_seconds for one in compiled), default=0.0)
            best = min(map(_seconds, compiled), default=0.0)
            if candidate.prediction.step_seconds * gained >= best * (1 - GAIN) or self.late():
                break
            self.compile(candidate, self.schedule)

    def settle_states(self, with_others: Callable[[Candidate], Candidate | None]) -> None:
        """Compile the best with whole states of the optimizer in place of divided ones, or the other way round, where
        the search is not sure which takes longer. Divided ones stay if they save time enough.

        Args:
            with_others: returns the plan with the other states, if there is one that fits.
        """
        best = min((one for one in self.choices if one.compiled), key=_seconds, default=None)
        changed = None if best is None or self.late() else with_others(best.candidate)
        if best is None or changed is None:
            return
        if changed.prediction.step_seconds > (1 + UNSURE) * best.candidate.prediction.step_seconds:
            return
        self.compile(changed)
        other = next((one for one in self.choices if one.compiled and _are_alike(one.candidate, changed)), None)
        if other is not None:
            whole, divided = sorted((best, other), key=_divides)
            if _seconds(divided) > (1 - LEAST_GAIN) * _seconds(whole):
                self.choices.remove(divided)

    def _shared(self, candidates: Sequence[Candidate]) -> Shared[_Timed]:
        """Some candidates, compiled by several processes where that takes long enough."""
        much = self.trial.num_operators * len(candidates) > LEAST_SHARED and not self.late()
        return Shared(
            lambda number: self._in_time(self._scheduled(candidates[number], self.schedule)),
            len(candidates),
            processes=self.processes if much else 1,
            forked=self.trial.forked,
        )

    def compile(
        self, candidate: Candidate, schedule: str | None = None, compiled: Callable[[], _Timed] | None = None
    ) -> None:
        """Compile a candidate with its schedule or another, unless one that takes the same was, or write it down where
        it is late. *compiled* returns it compiled by another process."""
        candidate = self._scheduled(candidate, schedule)
        prediction = candidate.prediction
        look = len(candidate.stages), candidate.micro_batches, candidate.schedule, *prediction.breakdown.values()
        if look in self.seen:
            return
        self.seen.add(look)
        if self.late():
            timed = self._timed(candidate, self.writer.written)
        else:
            timed = self._compiled(candidate) if compiled is None else compiled()
            if not (timed.choice.compiled or timed.choice.reason or self.late()):  # and none can be run
                timed = self._compiled(candidate)
        (self.refused if timed.choice.reason else self.choices).append(timed.choice)
        self.longest = max(self.longest, timed.seconds)

    def _scheduled(self, candidate: Candidate, schedule: str | None) -> Candidate:
        return replace(candidate, schedule=schedule or candidate.schedule)

    def _in_time(self, candidate: Candidate) -> _Timed:
        """A candidate that several processes share: compiled, or written down where there is no time for that."""
        if self.stopped() or time.monotonic() + self.longest > self.until:
            return self._timed(candidate, self.writer.written)
        timed = self._compiled(candidate)
        self.longest = max(self.longest, timed.seconds)
        return timed

    def _compiled(self, candidate: Candidate) -> _Timed:
        return self._timed(candidate, partial(self.writer.compiled, trial=self.trial))

    def _timed(self, candidate: Candidate, write: Callable[[Candidate], Choice]) -> _Timed:
        """Write a candidate as a plan; the choice has the reason if it cannot be annotations of this model."""
        began = time.monotonic()
        try:
            choice = write(candidate)
        except UsageError as error:
            choice = Choice(candidate=candidate, plan=self.writer.unwritten(candidate), reason=str(error))
        return _Timed(choice, time.monotonic() - began)

    def with_less_memory(self, cluster: Cluster) -> Cluster | None:
        """The cluster with less memory, by the factor by which compiled plans exceed the search's prediction, by device
        type; None if memory is not why no plan can be run."""
        unfit = [choice for choice in self.refused if choice.compiled]
        types, tighter = [device.type.name for device in cluster.devices], False
        for type_ in set(types):
            for choice in unfit:
                said, real = (
                    max((one.total for one in given.memory if types[one.rank] == type_), default=0)
                    for given in (choice.candidate.prediction, choice.prediction)
                )
                if said and said / real < self.room.get(type_, 1.0):
                    self.room[type_], tighter = said / real, True
        return _with_memory(cluster, self.room) if tighter else None


def _least_with_sums(workload: Workload) -> float:
    """Least seconds of a step in which a stage sums its gradients: it computes all its micro-batches, and the sums
    begin with the backward of the last at the earliest.

    >>> from whale.ir.workload import Reduction, StageWork
    >>> stage = StageWork(ranks=(0, 1), forward=(1, 1), backward=(2, 2), weights=(1, 1), kept_bytes=(0, 0))
    >>> sums = tuple(Reduction(ranks=(0, 1), stages=(0,), bytes=8, seconds=seconds) for seconds in (2, 3))
    >>> _least_with_sums(Workload(world_size=2, micro_batches=3, stages=(stage,), reductions=sums))
    12.0
    """
    sums = defaultdict[tuple[tuple[int, ...], tuple[int, ...]], float](float)
    for reduction in workload.reductions:
        sums[reduction.stages, reduction.ranks] += reduction.seconds
    full = workload.micro_batches - 1
    least = 0.0
    for (stages, _), seconds in sums.items():
        for stage in (workload.stages[index] for index in stages):
            times = zip(stage.forward, stage.backward, strict=True)
            before = min(full * (ahead + back) + workload.last_share * ahead for ahead, back in times)
            least = max(least, before + seconds)
    return least


def _seconds(choice: Choice) -> float:
    return choice.prediction.step_seconds


def _divides(choice: Choice) -> bool:
    """Whether replicas of a stage divide their state."""
    return any(stage.level for stage in choice.candidate.stages)


def _are_alike(one: Candidate, other: Candidate) -> bool:
    """Whether two plans are the same; they may have been found by prices that differ."""
    return (one.stages, one.micro_batches, one.schedule) == (other.stages, other.micro_batches, other.schedule)


def _with_memory(cluster: Cluster, parts: Mapping[str, float]) -> Cluster:
    """The cluster with a part of the memory of each device type."""
    types = {
        device.type.name: replace(device.type, memory_bytes=int(device.memory_bytes * parts.get(device.type.name, 1.0)))
        for device in cluster.devices
    }
    return replace(cluster, devices=tuple(replace(one, type=types[one.type.name]) for one in cluster.devices))
