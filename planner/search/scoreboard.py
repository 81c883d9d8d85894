"""The state of a search: the partial plans that it scored, the best of them, what it left out, and its progress.

It decides nothing: `whale.planner.search.plan_search` asks for scores, and reads here which plans lead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from whale.planner.search.effort import QUICK, Effort
from whale.planner.search.partial_plans import PartialPlan, Scored, best_timed, score_partial
from whale.planner.search.problem import Point, Progress, SearchSettings
from whale.planner.search.space import Mesh
from whale.planner.search.table import CostTable

__all__ = ["Scoreboard"]

DRAFT_OVERHEAD = 4
"""Stages that take as long to score as a partial plan does besides its stages, about."""

SECONDS_BETWEEN_PROGRESS = 0.1

MOST_POINTS = 400
"""Points that are kept for a drawing."""


@dataclass
class Scoreboard:
    """Partial plans that were scored, for one search.

    Attributes:
        meshes: costs.
        batch: rows of a step.
        settings: of the search; its time limit counts from ``began``, and once a plan fits.
        tell: is called with the progress, now and then.
        stopped: whether to end early.
        bound: no plan takes less.
        scores: of all partial plans; ``best``: of those that fit; ``left``: all of whose likely moves were tried.
        nearest: the one that lacks least memory.
        effort: how much is tried.
        tried, stages_scored: number of partial plans and, about, of their stages.
        points: for a drawing.
        dropped: how many of which family were left out, and why.
    """

    meshes: CostTable
    batch: int
    settings: SearchSettings
    tell: Callable[[Progress], None] | None
    stopped: Callable[[], bool]
    began: float = field(default_factory=time.monotonic)
    bound: float = 0.0
    scores: dict[PartialPlan, Scored] = field(default_factory=dict)
    best: dict[PartialPlan, Scored] = field(default_factory=dict)
    left: set[PartialPlan] = field(default_factory=set)
    nearest: Scored | None = None
    effort: Effort = QUICK
    tried: int = 0
    stages_scored: int = 0
    points: list[Point] = field(default_factory=list)
    dropped: dict[tuple[str, str], int] = field(default_factory=dict)
    told: float = 0.0

    def _scored(self, sequence: tuple[Mesh, ...], starts: tuple[int, ...], count: int, schedule: str) -> Scored:
        return self._score(PartialPlan(meshes=sequence, starts=starts, micro_batches=count, schedule=schedule))

    def _score(self, draft: PartialPlan) -> Scored:
        """Cached `score_partial`."""
        found = self.scores.get(draft)
        if found is None:
            self.stages_scored += DRAFT_OVERHEAD + len(draft.meshes)
            found = self.scores[draft] = score_partial(self.meshes, draft, self.batch)
        return found

    def _note(self, scored: Scored) -> None:
        self.tried += 1
        if len(self.points) < MOST_POINTS:
            reason = "" if scored.fits else f"needs {scored.fullness:.2f} times the memory of a device"
            reason = "a device has no memory beside what the framework takes" if scored.fullness == inf else reason
            self.points.append(
                Point(seconds=scored.seconds, memory=scored.fullness, label=scored.draft.label, reason=reason)
            )
        if self.nearest is None or scored.fullness < self.nearest.fullness:
            self.nearest = scored
        if scored.fits:
            self._keep(scored)
        if time.monotonic() - self.told > SECONDS_BETWEEN_PROGRESS:
            self._tell()

    def _keep(self, scored: Scored) -> None:
        if scored.exact or scored.draft not in self.best:
            self.best[scored.draft] = scored

    def _tell(self) -> None:
        if self.tell is None:
            return
        self.told = time.monotonic()
        best = self._best_seconds()
        self.tell(
            Progress(
                best_seconds=best if best < inf else None,
                bound_seconds=self.bound,
                tried=self.tried,
                elapsed=self.told - self.began,
            )
        )

    def _leading(self, count: int) -> list[Scored]:
        """The best partial plans so far, each of other meshes, timed."""
        return best_timed(self.best.values(), count)

    def _best_seconds(self) -> float:
        return self._leading(1)[0].seconds if self.best else inf

    def _over(self) -> bool:
        """Whether to end: the time limit counts once a plan fits."""
        return self.stopped() or (bool(self.best) and self._late())

    def _late(self) -> bool:
        return time.monotonic() - self.began > self.settings.time_limit

    def _drop(self, family: str, reason: str, num: int = 1) -> None:
        key = (family, reason)
        self.dropped[key] = self.dropped.get(key, 0) + num
