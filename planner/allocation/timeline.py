"""A simulation of jobs that share devices under a rule, from one change to the next.

A change is a job that arrives or is done, or a device that fails or comes back. At each, the rule says what every job
gets. It knows no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from whale.errors import UsageError
from whale.ir.units import counted

__all__ = ["NOTHING", "Change", "Demand", "Phase", "Rule", "Timeline", "simulate"]

NOTHING = 0
"""The option of a job that waits."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """A job, as rules see it.

    Attributes:
        number: of the job.
        work: seconds that are left at a speed of 1.
        weight: of its completion time.
        speeds: by option; 0: it cannot run so.
        held: the option that it has.
        pause_seconds: for which it makes no progress yet.
        arrival_seconds: when it comes.
    """

    number: int
    work: float
    speeds: NDArray[np.float64]
    weight: float = 1.0
    held: int = NOTHING
    pause_seconds: float = 0.0
    arrival_seconds: float = 0.0

    def seconds(self, restart_seconds: float) -> NDArray[np.float64]:
        """Until it is done, by option, if that stays; infinite where it cannot run."""
        with np.errstate(divide="ignore"):
            found = restart_seconds + np.where(self.speeds > 0, self.work / self.speeds, inf)
        found[self.held] += self.pause_seconds - restart_seconds
        found[NOTHING] = inf
        return found

    @property
    def left_seconds(self) -> float:
        """Until it is done with what it has; infinite if it waits."""
        speed = float(self.speeds[self.held]) if self.held != NOTHING else 0.0
        return self.pause_seconds + self.work / speed if speed > 0 else inf

    def after(self, seconds: float) -> Demand:
        """The job after this time with what it has."""
        if self.held == NOTHING:
            return self
        work = self.work - max(0.0, seconds - self.pause_seconds) * float(self.speeds[self.held])
        return replace(self, work=max(0.0, work), pause_seconds=max(0.0, self.pause_seconds - seconds))

    def given(self, option: int, restart_seconds: float) -> Demand:
        """The job once it has this option."""
        if option == self.held:
            return self
        return replace(self, held=option, pause_seconds=restart_seconds if option != NOTHING else 0.0)


Rule = Callable[[Sequence[Demand], tuple[int, ...]], Sequence[int]]
"""The option of each unfinished job, by what the devices by kind are."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Another number of devices.

    Attributes:
        seconds: when.
        capacity: devices by kind from then on.
        kind: of the device that fails; None: one comes back.
        draw: which of the devices of that kind: a number of [0, 1), of their order.
    """

    seconds: float
    capacity: tuple[int, ...]
    kind: int | None = None
    draw: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A time between two changes: its start, and the option of each job, by its number."""

    seconds: float
    given: dict[int, int]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When jobs are done.

    Attributes:
        done_seconds: by number of the job.
        phases: in order.
        total_seconds: weighted sum of the times from arrivals to completions.
        restarts: how often a job that had devices got others.
    """

    done_seconds: dict[int, float]
    phases: tuple[Phase, ...]
    total_seconds: float
    restarts: int


def simulate(
    jobs: Sequence[Demand],
    counts: NDArray[np.int64],
    capacity: tuple[int, ...],
    rule: Rule,
    *,
    restart_seconds: float = 0.0,
    changes: Sequence[Change] = (),
    lost_seconds: float = 0.0,
) -> Timeline:
    """Follow the jobs until all are done.

    Args:
        jobs: with numbers of their own.
        counts: devices by option and kind.
        capacity: devices by kind at the start.
        rule: asked at every change.
        restart_seconds: for which a job makes no progress once its devices change.
        changes: of the devices, in order.
        lost_seconds: of progress that a job loses in which a device fails, beside the restart.

    Raises:
        UsageError: the rule lets all jobs wait, and nothing else will change that.
    """
    coming = sorted(jobs, key=lambda job: job.arrival_seconds)
    changing = list(changes)
    now, restarts = 0.0, 0
    here: list[Demand] = []
    phases: list[Phase] = []
    done: dict[int, float] = {}
    while coming or here:
        while coming and coming[0].arrival_seconds <= now:
            here.append(coming.pop(0))
        while changing and changing[0].seconds <= now:
            change = changing.pop(0)
            capacity = change.capacity
            if change.kind is not None:
                here = _struck(here, counts, change, restart_seconds, lost_seconds)
        chosen = list(rule(here, capacity)) if here else []
        restarts += sum(job.held not in (NOTHING, option) for job, option in zip(here, chosen, strict=True))
        here = [job.given(option, restart_seconds) for job, option in zip(here, chosen, strict=True)]
        if here:
            phases.append(Phase(seconds=now, given={job.number: job.held for job in here}))
        ends = [now + min((job.left_seconds for job in here), default=inf)]
        ends += [*(job.arrival_seconds for job in coming[:1]), *(change.seconds for change in changing[:1])]
        end = min(ends)
        if end == inf:
            raise UsageError(f"{counted(len(here), 'job')} can run on none of the devices that are there")
        done |= {job.number: now + job.left_seconds for job in here if now + job.left_seconds <= end}
        here, now = [job.after(end - now) for job in here if now + job.left_seconds > end], end
    total = sum(job.weight * (done[job.number] - job.arrival_seconds) for job in jobs)
    return Timeline(done_seconds=done, phases=tuple(phases), total_seconds=float(total), restarts=restarts)


def _struck(
    jobs: Sequence[Demand], counts: NDArray[np.int64], change: Change, restart_seconds: float, lost_seconds: float
) -> list[Demand]:
    """The jobs after one of them has lost a device: it starts again, with what it had saved."""
    found, passed = [], 0.0
    at = change.draw * (change.capacity[change.kind or 0] + 1)
    for job in jobs:
        own = float(counts[job.held, change.kind])
        if passed <= at < passed + own:
            work = job.work + lost_seconds * float(job.speeds[job.held])
            job = replace(job, work=work, pause_seconds=restart_seconds)
        passed += own
        found.append(job)
    return found
