"""How fast a job is with every number of devices that it may be given, by searching a plan for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from whale.errors import InfeasibleError
from whale.ir.cluster import Cluster
from whale.ir.jobs import Job
from whale.ir.profile import ModelProfile
from whale.planner.allocation.options import Options, place
from whale.planner.allocation.timeline import NOTHING
from whale.planner.cost.precision import own_precision
from whale.planner.cost.stage_cost import Memo
from whale.planner.search import Candidate, SearchSettings, search
from whale.planner.what_if import only

__all__ = ["SEARCH_SECONDS", "JobSpeeds", "settings_of", "speeds_of"]

SEARCH_SECONDS = 2.0
"""Time limit of each search; most take a tenth."""


@dataclass(frozen=True, kw_only=True)
class JobSpeeds:
    """Speeds of a job, by option.

    Attributes:
        rows_per_second: progress, in rows at the smallest batch; 0: no plan fits.
        batches: of the fastest progress; 0: no plan fits.
        plans: the fastest plan at this batch, on the devices that `place` gives to the job alone; None: none fits.
    """

    rows_per_second: NDArray[np.float64]
    batches: tuple[int, ...]
    plans: tuple[Candidate | None, ...]


def settings_of(job: Job, profile: ModelProfile) -> SearchSettings:
    """The settings with which plans of a job are searched."""
    return SearchSettings(
        precision=job.precision or own_precision(profile),
        optimizer=job.optimizer,  # type: ignore[arg-type]  # the caller has checked it
        zero="auto",
        top=1,
    )


def speeds_of(
    job: Job,
    profile: ModelProfile,
    cluster: Cluster,
    options: Options,
    *,
    search_seconds: float = SEARCH_SECONDS,
    tell: Callable[[int, int], None] = lambda done, all_: None,
) -> JobSpeeds:
    """Search for plans of a job on every option, at every batch that it allows.

    Args:
        job: the job.
        profile: of its model.
        cluster: all devices.
        options: of the cluster.
        search_seconds: time limit of each search.
        tell: called with the number of options that are done, and that of all.

    Raises:
        InfeasibleError: it fits on no devices; the message is that of all of them.
        UsageError: the job contradicts its profile.
    """
    settings = replace(settings_of(job, profile), time_limit=search_seconds)
    known = Memo()
    rates = np.zeros(len(options.counts))
    batches = [0] * len(rates)
    plans: list[Candidate | None] = [None] * len(rates)
    why: InfeasibleError | None = None
    for option, counts in enumerate(options.counts):
        tell(option, len(rates))
        if option == NOTHING or counts.sum() > (job.max_devices or counts.sum()):
            continue
        part = only(cluster, place(options, [option])[0])
        for batch in job.batch:
            try:
                found = search(profile, part, batch=batch, settings=settings, known=known).best
            except InfeasibleError as error:
                why = error
                continue
            rate = job.rows / job.rows_for(batch) * batch / found.prediction.step_seconds
            if rate > rates[option]:
                rates[option], batches[option], plans[option] = rate, batch, found
    if not rates.any():
        raise InfeasibleError(f"it fits on no devices of the cluster: {why}")
    return JobSpeeds(rows_per_second=rates, batches=tuple(batches), plans=tuple(plans))
