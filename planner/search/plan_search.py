"""The search under one rule of recompute and one way to divide state: what is tried, and the plans that it leads to.

`whale.planner.search.searching` says what is searched and how.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import chain, groupby, pairwise, product
from math import inf, isqrt
from random import Random
from typing import NamedTuple, TypeVar

from whale.ir.units import counted
from whale.planner.cost.memory import framework_bytes, refuse_tiny
from whale.planner.cost.stage import CostModel
from whale.planner.search.bound import least_seconds
from whale.planner.search.effort import THOROUGH
from whale.planner.search.families import EvenPace, Family, Outlook, fit_divisions, outlooks
from whale.planner.search.layout import laid_out
from whale.planner.search.partial_plans import (
    PartialPlan,
    Scored,
    Times,
    best_cuts,
    best_timed,
    cut_exactly,
    evenest_cuts,
    likely_cuts,
)
from whale.planner.search.partition import DeviceCountProgram, GroupedStages
from whale.planner.search.problem import Candidate, Dropped, Fixed, Found, SearchSettings, StageChoice, Stopped
from whale.planner.search.refine import disturbed, redivided, refined, shifted, with_moved_cuts
from whale.planner.search.remedies import QUICK_LOOK_SECONDS, remedies, shortage
from whale.planner.search.replica_table import HELD
from whale.planner.search.scoreboard import Scoreboard
from whale.planner.search.space import Mesh, pools_of
from whale.planner.search.table import CostTable

__all__ = ["PlanSearch", "best_of", "step_seconds"]

_T = TypeVar("_T")

LONGEST_LINE = 8
"""Devices up to which pure pipelines get their cuts in several orders; those of more are a family."""

MOST_MISSING = 24
"""Sequences that hold most of the model of which it is found out by how much they do not fit, where none does."""

FEW_MICRO_BATCHES = 12
"""Largest number of micro-batches tried on large clusters whether or not it divides the batch."""

FEW_NUMBERS = 8
"""Numbers of micro-batches up to which families are solved for all of them."""

MOST_TYPES_CHOSEN = 4
"""Types of devices up to which single stages leave out any of them."""

MOST_LOOKED_AT = 3
"""Number of the largest micro-batch counts with which a short search tests a remedy."""

SPARE = 5
"""Number of further partial plans that are placed if some do not fit on ranks."""

MOST_LAID_OUT, LAID_RANKS = 60, 1024
"""Limits on the partial plans that are placed and on their total ranks, if these are more than requested: the order on
ranks may differ."""

LEAST_LAID_OUT = 5
"""Partial plans that are placed and fit, even if the time is up, or fewer are requested on more devices."""

SURELY_SLOWER = 1.15
"""Ratio to the best simulated step above which a partial plan's own time makes it no rival: on ranks it is rarely as
much faster."""

MOST_ON_RANKS, LEADERS_ON_RANKS = 24, 3
"""Plans on ranks with a cut moved by a part, or a stage at another degree, which are simulated at last, and the best
plans beside which they are."""

MOST_EXCHANGED = 24
"""Exchanges of neighbours in the best plan that are tried at last."""


class _Lacking(NamedTuple):
    """A sequence of meshes, or a family, of which nothing fits, and the part of the layers that it holds at most."""

    given: tuple[Mesh, ...] | Family
    micro_batches: int
    schedule: str
    held: float


class _Waiting(NamedTuple):
    """A family that is not solved yet, or all those of a number of micro-batches, which are not listed yet.

    Attributes:
        reach: seconds of a step to which it could come at best.
        micro_batches: of a step.
        place: among the families of that number of micro-batches.
        outlook: which family it is; None: not listed.
        pace: seconds per micro-batch of its stages; None until computed; ``reach`` excludes gradient reductions.
    """

    reach: float
    micro_batches: int
    place: int = 0
    outlook: Outlook | None = None
    pace: EvenPace | None = None


@dataclass
class PlanSearch(Scoreboard):
    """A search at given prices.

    Attributes:
        lacking: sequences of meshes and families of which nothing fits.
    """

    lacking: list[_Lacking] = field(default_factory=list)

    def run(self) -> Found | None:
        """The best plans; None if nothing fits."""
        micro_batches, max_stages = self._micro_batches(), self._max_stages()
        self.bound = least_seconds(self.meshes.prices.under("none"), self.batch)
        candidates, near = self._tried(micro_batches, max_stages)
        default = None
        if self.settings.thorough and not (self.stopped() or self._late()):  # after all that is done by default
            default = self._found(candidates, near) if candidates else None
            self.effort = THOROUGH
            self.dropped.clear()
            self.lacking.clear()
            both = zip((candidates, near), self._tried(micro_batches, max_stages), strict=True)
            candidates, near = (_unlike((*one, *more)) for one, more in both)
        if not candidates and self.stopped():
            spent = f"after {time.monotonic() - self.began:.3g} seconds and {counted(self.tried, 'plan')}"
            raise Stopped(f"the search was stopped before it found a plan that fits, {spent}")
        candidates = candidates or self._nearly_fitting()
        if not candidates:
            return None
        self._tell()
        return self._found(candidates, near, default)

    def _nearly_fitting(self) -> list[Candidate]:
        """The nearest plan, if it fits on its ranks after all: scores count buckets beside every stage's largest need,
        and the parts of mixed groups as they are by speed."""
        if self.nearest is None:
            return []
        candidate = laid_out(self.meshes, self.nearest.draft, self.batch)
        return [candidate] if candidate.prediction.fits else []

    def _found(self, candidates: Sequence[Candidate], near: Sequence[Candidate], default: Found | None = None) -> Found:
        ordered = sorted(candidates, key=step_seconds)
        self.bound = min(self.bound, ordered[0].prediction.step_seconds)
        return Found(
            candidates=tuple(best_of(ordered, self.settings.top)),
            near=tuple(sorted(near, key=step_seconds)),
            bound_seconds=self.bound,
            dropped=tuple(Dropped(family=name, reason=reason, count=n) for (name, reason), n in self.dropped.items()),
            points=tuple(self.points),
            tried=self.tried,
            seconds=time.monotonic() - self.began,
            default=default,
        )

    def _tried(self, micro_batches: Sequence[int], max_stages: int) -> tuple[list[Candidate], list[Candidate]]:
        """The best plans that this effort leads to, and others on the meshes of one of these."""
        self._drafts(micro_batches, max_stages)
        if not self.best and len(self.meshes.pools) > 1:
            self.meshes = replace(self.meshes, by_memory=True)
            self.scores.clear()
            self._drafts(micro_batches, max_stages)
        most = self.stages_scored + self.effort.stages_descended
        starts = best_timed(self.best.values(), self.effort.refined // 3, key=_kind)
        for start in dict.fromkeys([*self._leading(1), *starts, *self._leading(self.effort.refined)]):
            if self.stages_scored < most:
                self._refine(start, micro_batches, max_stages)
        self._restart(micro_batches, max_stages)
        self._reorder(micro_batches, max_stages)
        candidates, near = self._simulated()
        return [*candidates, *self._in_one_region(candidates)], near

    def _in_one_region(self, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
        """The best plans on the devices of each region alone, where these could be better: on slow ways between regions
        they are, and families and descents begin with all devices."""
        best = min(map(step_seconds, candidates), default=inf)
        prices, pools = self.meshes.prices, self.meshes.pools
        regions = dict.fromkeys(pool.region for pool in pools)
        for region in regions if len(regions) > 1 else ():
            own = tuple(pool for pool in pools if pool.region == region)
            devices = Counter(pool.type for pool in own for _ in pool.ranks)
            if self._over() or least_seconds(prices.under("none"), self.batch, devices) > best:
                continue
            alone = PlanSearch(
                meshes=replace(self.meshes, pools=own),
                batch=self.batch,
                settings=self.settings,
                tell=None,
                stopped=self.stopped,
                began=self.began,
                bound=self.bound,
                effort=self.effort,
            )
            yield from alone._tried(alone._micro_batches(), alone._max_stages())[0]
            self.tried += alone.tried

    def quick_look(self) -> int | None:
        """The micro-batches of a plan that fits, if one is found at once: those of few rows take least memory, or only
        one does."""
        micro_batches, max_stages = self._micro_batches(), self._max_stages()
        self._drafts(sorted({micro_batches[0], *micro_batches[-MOST_LOOKED_AT:]}), max_stages)
        return self._leading(1)[0].draft.micro_batches if self.best else None

    # What is tried

    def _drafts(self, micro_batches: Sequence[int], max_stages: int) -> None:
        matching = self.meshes.matching_micro_batches(self.batch)
        dividing = [count for count in micro_batches if self.batch % count == 0]
        for schedule in self.settings.priced:
            self._single_strategies(micro_batches, schedule, max_stages)
            self._single_stages(micro_batches, schedule)
            few = micro_batches if len(micro_batches) <= FEW_NUMBERS else _spread(dividing, self.effort.micro_batches)
            tried = {*few, *(count for count in matching if count in micro_batches)}
            self._families(sorted(tried), schedule, max_stages)
            while self.best and not self._over():
                leading = self._leading(1)[0]
                place = bisect_left(dividing, leading.draft.micro_batches)
                nearby = set(dividing[max(0, place - 1) : place + 2]) - tried
                tried |= nearby
                if nearby:
                    self._families(sorted(nearby), schedule, max_stages)
                if self._leading(1)[0] is leading:
                    break

    def _micro_batches(self) -> list[int]:
        if self.settings.micro_batches is not None:
            return [self.settings.micro_batches]
        small = [count for count in range(1, isqrt(self.batch) + 1) if self.batch % count == 0]
        found = {*small, *(self.batch // count for count in small), *self.meshes.matching_micro_batches(self.batch)}
        few = (-(-self.batch // count) for count in range(1, FEW_MICRO_BATCHES + 1))  # rows, of which some are equal
        found.update(-(-self.batch // rows) for rows in few)
        return sorted(found)

    def _max_stages(self) -> int:
        most = min(len(self.meshes.chain), len(self.meshes.prices.cluster.devices))
        return min(most, self.settings.max_stages or most)

    def _restart(self, micro_batches: Sequence[int], max_stages: int) -> None:
        """Descend again, from some random moves away from one of the best plans, until some in a row find no better."""
        draw, most = Random(self.settings.seed), self.stages_scored + self.effort.stages_restarted
        best, vain = self._best_seconds(), 0
        while self.best and vain < self.effort.restarts and self.stages_scored <= most and not self._over():
            start = draw.choice(self._leading(self.effort.leaders))
            start = disturbed(self.meshes, start, self.batch, max_stages, draw, self._score)
            self._note(start)
            self._refine(start, micro_batches, max_stages)
            vain, best = (vain + 1 if self._best_seconds() >= best else 0), self._best_seconds()

    def _reorder(self, micro_batches: Sequence[int], max_stages: int) -> None:
        """Exchange neighbours in the best plan, different stages or whole runs of alike ones, and descend from
        there, as long as that helps: which of them comes first changes what messages wait for and how often they leave
        a node, and a descent only exchanges single stages at its bottleneck."""
        while self.best and not self._over():
            leading = self._leading(1)[0]
            draft = leading.draft
            for sequence in _reorders(draft.meshes)[:MOST_EXCHANGED]:
                scored = self._cut(sequence, draft.micro_batches, draft.schedule)
                scored.append(self._scored(sequence, draft.starts, draft.micro_batches, draft.schedule))
                self._note(scored[-1])
                for one in best_timed(scored, 1):
                    self._keep(with_moved_cuts(self.meshes, one, self.batch, self._score))
            better = self._leading(1)[0]
            if better is leading:
                break
            self._refine(better, micro_batches, max_stages)

    def _refine(self, start: Scored, micro_batches: Sequence[int], max_stages: int) -> None:
        most = self.stages_scored + self.effort.stages_refined
        refined(
            self.meshes,
            start,
            self.batch,
            micro_batches=micro_batches,
            max_stages=max_stages,
            score=self._score,
            tried=self._note,
            kept=self._keep,
            stop=lambda: self._over() or self.stages_scored > most,
            left=self.left,
        )

    def _single_strategies(self, micro_batches: Sequence[int], schedule: str, max_stages: int) -> None:
        """Pure data, tensor and pipeline parallelism over all devices."""
        pools = self.meshes.pools
        every = tuple(len(pool.ranks) for pool in pools)
        num = sum(every)
        degrees = [degree for degree in self.meshes.prices.tensor_degrees if degree in (1, num)]
        sequences: list[tuple[Mesh, ...]] = [(Mesh(every, degree),) for degree in degrees]
        if 1 < num <= min(max_stages, LONGEST_LINE):
            singles = [Mesh(tuple(int(index == own) for index in range(len(pools))), 1) for own in range(len(pools))]
            line = [mesh for mesh, count in zip(singles, every, strict=True) for _ in range(count)]
            by_memory = sorted(line, key=lambda mesh: -pools[mesh.counts.index(1)].type.memory_bytes)
            sequences += [tuple(line), tuple(reversed(line)), tuple(by_memory)]
        for count in micro_batches:
            for sequence in dict.fromkeys(sequences):
                if not self._over():
                    self._draft(sequence, count, schedule)

    def _single_stages(self, micro_batches: Sequence[int], schedule: str) -> None:
        """One stage on all devices, on those of some types, on a node or on a device, at each degree, for few
        micro-batches: on slow networks few devices are faster than many."""
        pools = self.meshes.pools
        every = [len(pool.ranks) for pool in pools]
        chosen = (
            product((True, False), repeat=len(every)) if len(every) <= MOST_TYPES_CHOSEN else [(True,) * len(every)]
        )
        some = [tuple(num * own for num, own in zip(every, which, strict=True)) for which in chosen if any(which)]
        for own, pool in enumerate(pools):
            some += [tuple(num * (own == other) for other in range(len(pools))) for num in (pool.per_node, 1)]
        few = [count for count in micro_batches if count <= FEW_MICRO_BATCHES]
        for counts, division in ((one, own) for one in dict.fromkeys(some) for own in fit_divisions(self.meshes, one)):
            mesh = Mesh(counts, *division)
            for place, count in enumerate(reversed(few)):  # the more micro-batches, the less memory
                parts = self.meshes.parts_held(mesh, self.meshes.rows(self.batch, count), count)
                if (held := float(parts[:, 0].min())) < 1:
                    self._drop("1 stage", "its devices do not hold the model", len(few) - place)
                    self.lacking.append(_Lacking((mesh,), count, schedule, held))
                    break
                if not self._over():
                    self._draft((mesh,), count, schedule)

    def _families(self, micro_batches: Sequence[int], schedule: str, max_stages: int) -> None:
        promising: list[tuple[float, DeviceCountProgram | GroupedStages, int, int]] = []
        near, solved = self._best_seconds(), 0
        wider = max(1, len(self.meshes.pools) - 1)  # more types make more families that differ little
        waiting = self._waiting(micro_batches)
        while (
            waiting
            and not self._over()
            and waiting[0].reach <= self.effort.near * near
            and (solved < self.effort.families * wider or waiting[0].reach <= near < inf)
        ):
            one = heappop(waiting)
            if one.outlook is None:
                for listed in self._outlooks(one.micro_batches, max_stages):
                    heappush(waiting, listed)
                continue
            family = one.outlook.family
            if one.pace is None:
                held = family.part_held(self.meshes, self.batch)
                pace = family.paces(self.meshes, self.batch) if held >= HELD else None
                if pace is None or pace.slowest == inf:
                    self._drop(family.name, "its devices do not hold the model", family.num)
                    self.lacking.append(_Lacking(family, family.micro_batches, schedule, held))
                else:
                    reach = family.reach(pace, one.outlook.shallowest)
                    heappush(waiting, one._replace(reach=reach, pace=pace))
                continue
            found = family.sequences(self.meshes, self.batch, schedule, one.pace, self.effort.near * near)
            promises = found.promises
            if not promises:
                fits = "fits in memory" if near == inf else "that fits in memory comes near the best"
                self._drop(family.name, f"no sequence of its meshes{self._allowed} {fits}")
                self.lacking.append(_Lacking(family, family.micro_batches, schedule, 1.0))
            solved += near < inf or bool(promises)
            promising += [(own, found, place, family.micro_batches) for place, own in enumerate(promises)]
            if promises and promises[0] < near:  # simulation may be slower: mixed stages are slow to send
                cut = (one for meshes in found.at(0) for one in self._cut(meshes, family.micro_batches, schedule))
                near = min([near, *(one.timed.seconds for one in cut if one.fits)])
        for one in waiting:
            name = "any family" if one.outlook is None else one.outlook.name
            if self._over():
                self._drop(name, "the time was up")
            elif one.reach > self.effort.near * near:
                self._drop(name, "could not come near the best if its stages were equal")
            else:
                self._drop(name, f"could only come near the best, after {solved} that could reach more")
        promising.sort(key=lambda one: one[0])
        sequences = ((meshes, count) for _, found, place, count in promising for meshes in found.at(place))
        self._score_best(sequences, schedule, self.effort.stages_cut * wider)

    def _waiting(self, micro_batches: Sequence[int]) -> list[_Waiting]:
        """A heap of all numbers of micro-batches, whose families are not listed yet, those first that could come to
        least: the lower bound, and what it takes to fill the least pipeline that holds the model."""
        found = []
        for count in micro_batches:
            filling = (self.meshes.least_depth(count) - 1) / count
            found.append(_Waiting((1 + filling) * (self.bound - self.meshes.prices.step_overhead), count))
        heapify(found)
        return found

    def _outlooks(self, count: int, max_stages: int) -> Iterator[_Waiting]:
        """All families for a number of micro-batches, with what they could come to if layers were divided as one
        likes."""
        for place, outlook in enumerate(outlooks(self.meshes, self.batch, count, max_stages)):
            yield _Waiting(outlook.reach, count, place, outlook)

    def _score_best(self, sequences: Iterable[tuple[tuple[Mesh, ...], int]], schedule: str, stages: int) -> None:
        """Cut and score the first sequences with numbers of micro-batches, up to a total number of stages, and cut the
        best of them exactly."""
        scored: list[Scored] = []
        for sequence, count in sequences:
            stages -= len(sequence)
            if stages < 0 or self._over():
                break
            scored += self._cut(sequence, count, schedule)
        for one in best_timed(scored, self.effort.cut_exactly):
            self._keep(one if self._over() else cut_exactly(self.meshes, one, self.batch, self._score))

    def _cut(self, sequence: tuple[Mesh, ...], count: int, schedule: str) -> list[Scored]:
        """Partial plans of a sequence with its likely cuts."""
        every = likely_cuts(self.meshes, sequence, self.batch, count, schedule)
        scored = [self._scored(sequence, starts, count, schedule) for starts in every]
        for one in scored:
            self._note(one)
        return scored

    def _draft(self, sequence: tuple[Mesh, ...], count: int, schedule: str) -> None:
        if not self._takes(sequence, count):
            return
        starts = best_cuts(self.meshes, sequence, self.batch, count, schedule)
        scored = starts and self._scored(sequence, starts, count, schedule)
        if scored:
            self._note(scored)
            if scored.fits:
                self._keep(with_moved_cuts(self.meshes, scored, self.batch, self._score))
        if not scored or not scored.fits:
            self._drop(counted(len(sequence), "stage"), f"no cut{self._allowed} fits in memory")
            self.lacking.append(_Lacking(sequence, count, schedule, 1.0))

    def _takes(self, sequence: Iterable[Mesh], count: int) -> bool:
        """Whether *count* micro-batches may be divided among the replicas of each mesh."""
        rows = self.meshes.rows(self.batch, count)
        return all(self.meshes.takes(mesh, rows) for mesh in sequence)

    @property
    def _allowed(self) -> str:
        """Words for what annotations leave, where there are any."""
        return "" if self.settings.is_free else " that the annotations allow"

    # The answer

    def _simulated(self) -> tuple[list[Candidate], list[Candidate]]:
        """The best partial plans on ranks, one of several with equal times, and others on the meshes of one of these.
        The best plan of one stage is among them, because only a compiled plan knows how much of its gradient reductions
        overlaps the last backward."""
        few = min(MOST_LAID_OUT, LAID_RANKS // len(self.meshes.prices.cluster.devices))
        most = max(self.settings.top, LEAST_LAID_OUT, few)
        alone = best_timed((one for one in self.best.values() if len(one.draft.meshes) == 1), 1)
        leading = best_timed(self.best.values(), most + SPARE, key=lambda draft: (draft.meshes, draft.micro_batches))
        found: dict[tuple[Mesh, ...], list[Candidate]] = {}
        seen: set[tuple[Times, int, str]] = set()
        plans: set[tuple[tuple[StageChoice, ...], int, str]] = set()
        placed: list[tuple[Candidate, Scored]] = []
        best = inf
        for scored in [*alone, *leading]:
            draft = scored.draft
            look = scored.times, draft.micro_batches, draft.schedule
            if look in seen:
                continue
            if len(found) >= LEAST_LAID_OUT and self._over():
                break
            if len(seen) > most or (len(found) >= self.settings.top and scored.timed.seconds > SURELY_SLOWER * best):
                break
            candidate = laid_out(self.meshes, draft, self.batch)
            plan = candidate.stages, candidate.micro_batches, candidate.schedule
            if candidate.prediction.fits and plan not in plans:  # stages without experts are alike in any expert groups
                plans.add(plan)
                seen.add(look)
                best = min(best, candidate.prediction.step_seconds)
                found.setdefault(draft.meshes, []).append(candidate)
                placed.append((candidate, scored))
        for sequence, candidate in self._moved_on_ranks(placed, min(MOST_ON_RANKS, few)):
            plan = candidate.stages, candidate.micro_batches, candidate.schedule
            if plan not in plans:
                plans.add(plan)
                found.setdefault(sequence, []).append(candidate)
        alike = [sorted(one, key=step_seconds) for one in found.values()]
        return [best for best, *_ in alike], [other for _, *others in alike for other in others]

    def _moved_on_ranks(
        self, placed: Sequence[tuple[Candidate, Scored]], most: int
    ) -> Iterator[tuple[tuple[Mesh, ...], Candidate]]:
        """The best plans that are *placed* with a cut moved by a part or a stage at another degree, as long as that
        helps, and their meshes: partial plans do not know how messages of their ranks wait for each other, and only the
        best one of a sequence of meshes is placed. At *most* as many are simulated."""
        leading = sorted(placed, key=lambda one: step_seconds(one[0]))[:LEADERS_ON_RANKS]
        for best, scored in leading:
            if step_seconds(best) > SURELY_SLOWER * step_seconds(leading[0][0]):
                break
            while most > 0 and not self._over():
                drafts = (*shifted(self.meshes, scored, self.batch), *redivided(self.meshes, scored, self.batch))
                others = [self._score(draft) for draft in drafts]
                others = sorted((one for one in others if one.fits), key=lambda one: one.seconds)[:most]
                most -= len(others)
                moved = [(laid_out(self.meshes, one.draft, self.batch), one) for one in others]
                fitting = [one for one in moved if one[0].prediction.fits]
                candidate, nearest = min(fitting, key=lambda one: step_seconds(one[0]), default=(best, scored))
                if step_seconds(candidate) >= step_seconds(best):
                    break
                best, scored = candidate, nearest
                yield scored.draft.meshes, best

    # Nothing fits

    def is_possible(self) -> bool:
        """Whether there is a plan, if nothing fits, on devices with more memory: what is fixed may leave none."""
        lacking = sorted(self.lacking, key=lambda one: -one.held)
        for number, (given, count, schedule, _) in enumerate(lacking):
            if number >= MOST_MISSING and self.nearest is not None:
                break
            sequence = given.all_devices() if isinstance(given, Family) else given
            starts = evenest_cuts(self.meshes, sequence, self.batch, count, schedule)
            if starts is not None and self._takes(sequence, count):
                self._note(self._scored(sequence, starts, count, schedule))
        return self.nearest is not None

    def shortage(self, prices: CostModel) -> str:
        """Error text for the nearest plan, with changes that would fit at these *prices*."""
        if not self.is_possible() or self.nearest is None:
            return self._contradiction()
        devices = self.meshes.prices.cluster.devices
        if all(framework_bytes(device.type, len(devices)) > device.memory_bytes for device in devices):
            refuse_tiny(devices, len(devices))
        left = self.settings.time_limit - (time.monotonic() - self.began)
        weighed = remedies(prices, self.batch, self.settings, look=self._look, seconds=left)
        return shortage(self.meshes, self.nearest.draft, self.batch, weighed)

    def _contradiction(self) -> str:
        """Error text where what is fixed leaves no plan, whatever the memory."""
        fixed, num = self.settings.fixed or Fixed(), len(self.meshes.prices.cluster.devices)
        devices = counted(num, "device")
        for one in fixed.degrees:
            needed = (one.data or 1) * (one.tensor or 1)
            if needed > num:
                return f"{one} needs {needed} devices, but there are {num}; use smaller degrees, or more devices"
            if (one.data or 1) > self.batch:
                rows = counted(self.batch, "row")
                return f"{one} needs a row for each replica, but the batch has {rows}; use fewer, or a larger batch"
        said = [str(one) for one in fixed.degrees]
        said += [f"a stage that starts at layer {start}" for start in fixed.starts]
        said += [f"at most {counted(one, 'stage')}" for one in (self.settings.max_stages,) if one is not None]
        said += [counted(one, "micro-batch", "es") for one in (self.settings.micro_batches,) if one is not None]
        what = f" and what is fixed ({'; '.join(said)})" if said else ""
        return f"no plan is possible on {devices}{what}; fix less, or use more devices"

    def _look(self, prices: CostModel, batch: int, settings: SearchSettings) -> int | None:
        """The `quick_look` of another search, which ends with the first plan that fits."""
        count = settings.micro_batches
        if count is not None and self.meshes.rows(batch, count) * (count - 1) >= batch:  # of too few rows
            settings = replace(settings, micro_batches=None)
        meshes = CostTable(
            prices=replace(prices, batch=batch),
            pools=pools_of(prices.cluster),
            chain=self.meshes.chain,
        )
        until = time.monotonic() + QUICK_LOOK_SECONDS
        look = PlanSearch(
            meshes=meshes,
            batch=batch,
            settings=replace(settings, thorough=False),
            tell=None,
            stopped=lambda: self.stopped() or bool(look.best) or time.monotonic() > until,
        )
        return look.quick_look()


def step_seconds(candidate: Candidate) -> float:
    """Return the seconds of a candidate's step: a sort key."""
    return candidate.prediction.step_seconds


def _kind(draft: PartialPlan) -> tuple[int, bool]:
    """Micro-batches, and whether there are several stages: few moves lead from one kind to another."""
    return draft.micro_batches, len(draft.meshes) > 1


def _reorders(meshes: Sequence[Mesh]) -> list[tuple[Mesh, ...]]:
    """The meshes with neighbouring runs of alike ones exchanged, whole or a single stage of each.

    >>> a, b = Mesh((1, 0), 1), Mesh((0, 1), 1)
    >>> _reorders((a, b, b)) == [(b, b, a), (b, a, b)]
    True
    """
    runs = [tuple(alike) for _, alike in groupby(meshes)]
    whole, single = [], []
    for place, (one, other) in enumerate(pairwise(runs)):
        before, after = tuple(chain(*runs[:place])), tuple(chain(*runs[place + 2 :]))
        whole.append((*before, *other, *one, *after))
        single.append((*before, *one[1:], other[0], one[-1], *other[1:], *after))
    return list(dict.fromkeys((*whole, *single)))


def _unlike(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates, each once."""
    return list({(one.stages, one.micro_batches, one.schedule): one for one in candidates}.values())


def best_of(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the first candidates, in order; where one has a single stage it takes the last place at least."""
    found = list(candidates[:count])
    alone = next((one for one in candidates if len(one.stages) == 1), None)
    if count > 1 and alone is not None and all(len(one.stages) > 1 for one in found):
        found[-1] = alone
    return found


def _spread(values: Sequence[_T], most: int) -> list[_T]:
    """A given number of the values, including the first and the last."""
    if len(values) <= most:
        return list(values)
    step = (len(values) - 1) / (most - 1)
    return [values[round(index * step)] for index in range(most)]
