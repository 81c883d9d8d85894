"""The least memory-saving of the stages of found plans, and results of several searches as one.

Plans that were searched under one rule of recompute, level of state and offload for all stages get the least of each
with which a stage still fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from whale.ir.state import LEVELS, StateSharding
from whale.ir.strategy import RECOMPUTES, Offload, Recompute
from whale.planner.balance.least_recompute import least_steps
from whale.planner.cost.stage import CostModel
from whale.planner.search.evaluate import fitted
from whale.planner.search.plan_search import best_of, step_seconds
from whale.planner.search.problem import Candidate, Dropped, Found, SearchSettings

__all__ = ["LEAST_GAIN", "MOST_LEAST", "aligned", "divided", "together", "with_least", "with_other_states"]

LEAST_GAIN = 0.01
"""Part of a step from which on plans are taken whose replicas divide the states of the optimizer, to save time."""

MOST_LEAST = 8
"""Plans of a search, the fastest first, on which is tried what saves some memory or time and changes no stage; the
others are there in case that these cannot be run."""


def aligned(found: Found, settings: SearchSettings) -> Found:
    """The result with ends of stretches where they are asked for."""
    if settings.state_align == "row":
        return found

    def of(candidate: Candidate) -> Candidate:
        stages = tuple(
            stage if stage.state is None else replace(stage, state=replace(stage.state, align=settings.state_align))
            for stage in candidate.stages
        )
        return replace(candidate, stages=stages)

    return replace(found, candidates=tuple(map(of, found.candidates)), near=tuple(map(of, found.near)))


def divided(prices: CostModel, candidate: Candidate, batch: int, settings: SearchSettings) -> Candidate | None:
    """Return the plan with replicas that divide the states of the optimizer, where that is faster by some: each updates
    a part of the parameters, and what is sent is the same; None where it is not, or where that may not be decided."""
    found = (
        None if any(own.level for own in candidate.stages) else with_other_states(prices, candidate, batch, settings)
    )
    return found if found is not None and step_seconds(found) < (1 - LEAST_GAIN) * step_seconds(candidate) else None


def with_other_states(
    prices: CostModel, candidate: Candidate, batch: int, settings: SearchSettings
) -> Candidate | None:
    """Return the plan with whole states of the optimizer if replicas of a stage divide them, else with states that all
    replicas divide; None if it does not fit, or if that may not be decided."""
    if not settings.may_divide or any(own.level > 1 or own.state_on_host for own in candidate.stages):
        return None
    divides = not any(own.level for own in candidate.stages)
    stages = tuple(
        replace(own, state=StateSharding(1) if divides and len(own.ranks) > own.tensor else None)
        for own in candidate.stages
    )
    if stages == candidate.stages:
        return None
    count, schedule = candidate.micro_batches, candidate.schedule
    found = fitted(prices, stages, micro_batches=count, schedule=schedule, batch=batch)
    return found if found.prediction.fits else None


def with_least(prices: CostModel, found: Sequence[Found], batch: int, settings: SearchSettings) -> Found:
    """Results under several rules and levels as one, with the least recompute and the least level in each stage."""

    def least(each: Found) -> Found:
        candidates = tuple(
            _least(prices, candidate, batch, settings) if place < MOST_LEAST or _is_slowed(candidate) else candidate
            for place, candidate in enumerate(each.candidates)
        )
        return replace(each, candidates=candidates, default=None if each.default is None else least(each.default))

    return together(list(map(least, found)), settings.top)


def together(found: Sequence[Found], top: int) -> Found:
    """Several results as one."""
    candidates: dict[object, Candidate] = {}
    for candidate in (one for each in found for one in each.candidates):
        candidates.setdefault((candidate.stages, candidate.micro_batches, candidate.schedule), candidate)
    ordered = sorted(candidates.values(), key=step_seconds)
    default = [each.default for each in found if each.default is not None]
    dropped: Counter[tuple[str, str]] = Counter()
    for one in (one for each in found for one in each.dropped):
        dropped[one.family, one.reason] += one.count
    return Found(
        candidates=tuple(best_of(ordered, top)),
        near=tuple(sorted((one for each in found for one in each.near), key=step_seconds)),
        bound_seconds=min(each.bound_seconds for each in found),
        dropped=tuple(Dropped(family=name, reason=reason, count=n) for (name, reason), n in dropped.items()),
        points=tuple(one for each in found for one in each.points),
        tried=sum(each.tried for each in found),
        seconds=sum(each.seconds for each in found),
        default=together(default, top) if default else None,
    )


def _is_slowed(candidate: Candidate) -> bool:
    """Whether a plan takes longer for the memory that it saves: less of that could make it the fastest."""
    return any(own.recompute != "none" or own.level > 1 or own.offload != "none" for own in candidate.stages)


def _least(prices: CostModel, candidate: Candidate, batch: int, settings: SearchSettings) -> Candidate:
    """A candidate with the least on the host in each stage with which it fits, then with the least level and the least
    recompute, whichever is decided first; itself, or with the least of one alone, where that is faster by some."""
    ranks = [stage.ranks for stage in candidate.stages]

    def under(
        rules: Sequence[Recompute] | None = None,
        levels: Sequence[int] | None = None,
        words: Sequence[Offload] | None = None,
        of: Candidate = candidate,
    ) -> Candidate:
        stages = list(of.stages)
        if words is not None:
            stages = [replace(own, offload=word) for own, word in zip(stages, words, strict=True)]
        if rules is not None:
            stages = [replace(own, recompute=rule) for own, rule in zip(stages, rules, strict=True)]
        if levels is not None:
            stages = [
                replace(
                    own, state=StateSharding(max(level, int(own.state_on_host))) if level or own.state_on_host else None
                )
                for own, level in zip(stages, levels, strict=True)
            ]
        count, schedule = candidate.micro_batches, candidate.schedule
        return fitted(prices, stages, micro_batches=count, schedule=schedule, batch=batch)

    def least_rules(of: Candidate) -> Candidate:
        if settings.recompute != "auto" or all(stage.recompute == "none" for stage in of.stages):
            return of
        least = under(least_steps(ranks, RECOMPUTES, lambda rules: under(rules, of=of).prediction.memory), of=of)
        return least if least.prediction.fits else of

    def least_levels(of: Candidate) -> Candidate:
        if settings.zero != "auto" or not any(stage.level for stage in of.stages):
            return of
        levels = least_steps(ranks, LEVELS, lambda levels: under(levels=levels, of=of).prediction.memory)
        least = under(levels=levels, of=of)
        return least if least.prediction.fits else of

    def least_offload(of: Candidate) -> Candidate:
        words = {stage.offload for stage in of.stages} - {"none"}
        if settings.offload != "auto" or not words:
            return of
        ladder: tuple[Offload, ...] = ("none", "state", "both") if "both" in words else ("none", *words)
        least = under(
            words=least_steps(ranks, ladder, lambda words: under(words=words, of=of).prediction.memory), of=of
        )
        return least if least.prediction.fits else of

    start = least_offload(candidate)
    rules, levels = least_rules(start), least_levels(start)
    least = min((least_levels(rules), least_rules(levels)), key=step_seconds)
    fastest = min((rules, levels, start, candidate), key=step_seconds)
    return fastest if step_seconds(fastest) < (1 - LEAST_GAIN) * step_seconds(least) else least
