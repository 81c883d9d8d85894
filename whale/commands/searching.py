"""Searching: from a profile and a cluster to runnable plans: searched, written as plans, compiled and ranked again.

The search prices layers; a compiled plan is predicted with its real collectives and bytes. So the best candidates are
compiled, as many as time allows, and the best plan of each simple kind that could be better. A candidate that does not
compile or fit is rejected with its reason, and another is compiled. Without a model, the search's own predictions
count. This module does not import torch: `whale.commands.candidates` compiles plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from whale.commands.compiled_candidates import CompiledCandidates
from whale.commands.plan_writer import Choice, PlanWriter, Trial, shortage_of
from whale.errors import InfeasibleError, UsageError
from whale.ir.cluster import Cluster
from whale.ir.micro_batches import rows_of_micro_batch
from whale.ir.profile import ModelProfile
from whale.ir.state import LEVELS, StateSharding
from whale.ir.strategy import RECOMPUTES, Offload, Recompute, Reduce
from whale.ir.units import time_text
from whale.ir.workload import Prediction
from whale.planner.advice import advised
from whale.planner.balance.by_speed import Pipeline, pipeline_by_speed
from whale.planner.cost.experts import Shared, shared_experts, with_experts
from whale.planner.cost.precision import own_precision
from whale.planner.cost.stage import CostModel
from whale.planner.schedules.in_flight import in_flight
from whale.planner.search import Candidate, Found, Memo, Progress, SearchSettings, StageChoice, search
from whale.planner.search.evaluate import prices_of, score
from whale.planner.search.layout import fastest_rows
from whale.planner.search.least_memory import with_other_states
from whale.planner.search.problem import PRICED, Stopped
from whale.planner.search.simple import simple_plans

__all__ = ["Searched", "plan_pipeline", "search_plans", "settings_for", "why_slower"]

SEARCH_SHARE = 0.5
"""Fraction of the time limit for the search, if a plan fits and there is a model to compile; the rest is for
compiling."""

LEAST_SHARE = 0.25
"""Fraction of the time limit for another search with less memory."""

RESERVE = 20
"""Number of further candidates that are compiled as long as none can be run."""

REORDERED = 2
"""Number of the best compiled plans on which schedules are tried that the search does not price."""

MOST_WEIGHED = 4096
"""Largest number of micro-batches that is tried as a remedy if a plan does not fit."""


@dataclass(frozen=True, kw_only=True)
class Searched:
    """Result of a search.

    Attributes:
        choices: runnable plans, best first; at least one. Compiled ones precede others.
        refused: candidates that do not compile or fit.
        found: the result of the search, with its bound and excluded plans.
        shared: for each expert degree how devices share experts, and what the other way would take.
    """

    choices: tuple[Choice, ...]
    refused: tuple[Choice, ...]
    found: Found
    shared: tuple[Shared, ...] = ()

    @property
    def best(self) -> Choice:
        """The plan to run."""
        return self.choices[0]


def settings_for(settings: SearchSettings, trial: Trial | None, profile: ModelProfile) -> SearchSettings:
    """Constraints from a model, or without it from its profile: a single micro-batch if its batch cannot be divided.

    Raises:
        UsageError: more are asked for; says which operator computes a row from others.
    """
    why = profile.coupled if trial is None else trial.uncut(settings.micro_batches or 2)
    if not why or settings.micro_batches == 1:
        return settings
    if settings.micro_batches is None:
        return replace(settings, micro_batches=1)
    raise UsageError(why)


def search_plans(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    batch: int,
    settings: SearchSettings,
    trial: Trial | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
    known: Memo | None = None,
    processes: int = 1,
    with_rules: Callable[[ModelProfile], ModelProfile] | None = None,
    with_cuts: Callable[[ModelProfile], ModelProfile] | None = None,
    with_tables: Callable[..., Iterator[Choice]] | None = None,
) -> Searched:
    """Search for plans and compile the best of them.

    Args:
        profile: of the model.
        cluster: the devices.
        batch: rows of the global batch.
        settings: of the search; ``time_limit`` is for both. Schedules that the search does not price are tried on the
            best plans, once these are compiled.
        trial: the model; None: the plans are not compiled.
        progress: called with the progress of the search.
        stop: whether to stop with the best plan so far, compiled or not.
        known: cached costs of an earlier search of the same model.
        processes: which compile, the others forked from this one (`whale.commands.shared`).
        with_rules: adds to a profile what each rule of recompute costs; called if nothing fits without recompute.
        with_cuts: adds to a profile what layers cost on devices that cut each row; called if nothing fits without, or
            there are fewer rows than devices.
        with_tables: plans of the model, by its profile, the cluster, ``batch`` and ``micro_batches``, with its
            embedding tables each in a place of its own.

    Raises:
        InfeasibleError: nothing fits; says what is missing and what would help.
        UsageError: the settings contradict themselves, the batch or the model, or need a model; there was no time.
    """
    begin = time.monotonic()
    settings.check(batch)
    settings = settings_for(settings, trial, profile)
    known = known or Memo()
    shared: list[Shared] = []

    both, each = profile, max(1, batch // len(cluster.devices))

    def with_one_way(given: ModelProfile) -> ModelProfile:
        """The profile with the way to share experts that is faster at each degree."""
        nonlocal both
        both = given
        prices = CostModel.of(given, cluster, precision=settings.precision, optimizer=settings.optimizer)
        fixed = settings.fixed.experts if settings.fixed is not None else None
        shared[:] = shared_experts(prices, each, fixed)
        return with_experts(given, shared)

    def with_other_ways(found: Found, run: Callable[[], Found]) -> Found:
        """The better one of what is *found* and what a search finds with the ways to share experts that are faster with
        the rows that devices have in it, if these are others."""
        nonlocal profile, each
        rows, before = _rows_with_experts(found), (profile, each, list(shared))
        if rows is None or not shared or stop():
            return found
        each = rows
        profile = with_one_way(both)
        if [one.way for one in shared] != [one.way for one in before[-1]]:
            with suppress(InfeasibleError, UsageError, Stopped):  # nothing fits, or there is no time left
                other = run()
                if other.best.prediction.step_seconds < found.best.prediction.step_seconds:
                    return other
        profile, each, shared[:] = before
        return found

    profile = with_one_way(profile)

    def ruled() -> ModelProfile:
        nonlocal profile
        if with_rules is not None:
            profile = with_one_way(with_rules(profile))
        return profile

    def cut() -> ModelProfile:
        nonlocal profile
        assert with_cuts is not None
        profile = with_one_way(with_cuts(profile))
        return profile

    more: dict[str, Any] = {"with_rules": ruled, "with_cuts": None if with_cuts is None else cut}
    if trial is None:
        _require_priced(settings)
        options: dict[str, Any] = {"settings": settings, "progress": progress, "stop": stop, "known": known}
        found = search(profile, cluster, batch=batch, **options, **more)
        options["known"] = None
        found = with_other_ways(found, lambda: search(profile, cluster, batch=batch, **options, **more))
        writer = PlanWriter(
            profile, cluster, batch, None, settings.gradient_dtype, settings.step_in_backward, settings.reduce
        )
        return Searched(
            choices=tuple(writer.written(one) for one in found.candidates),
            refused=(),
            found=found,
            shared=tuple(shared),
        )
    fitting: list[float] = []

    def told(now: Progress) -> None:
        if now.best_seconds is not None:
            fitting.append(now.best_seconds)
        progress(now)

    def over() -> bool:
        return stop() or (bool(fitting) and time.monotonic() - begin > SEARCH_SHARE * settings.time_limit)

    priced = [schedule for schedule in settings.schedules if schedule in PRICED]
    base = None if priced else settings.unpriced[0]  # in place of the one by which the search goes
    wanted = replace(settings, top=settings.top + RESERVE)
    writer = PlanWriter(
        profile, cluster, batch, trial, settings.gradient_dtype, settings.step_in_backward, settings.reduce
    )
    limit = settings.time_limit
    tried = CompiledCandidates(writer, trial, base, begin + limit, limit, stop, processes)

    def searched(where: Cluster, how: SearchSettings, known: Memo | None) -> Found:
        """The plans of a search, of which the best are compiled."""
        try:
            found = search(profile, where, batch=batch, settings=how, progress=told, stop=over, known=known, **more)
        except Stopped:
            if stop():
                raise
            raise UsageError(
                "nothing was found that fits on devices and hosts, and there was no time to try all that takes less "
                "memory; use a larger --time-limit"
            ) from None  # a plan seemed to fit, for which the search was to end
        tried.writer = replace(tried.writer, profile=profile)
        simple = partial(simple_plans, profile, where, batch=batch, settings=settings, known=known)
        for one in (found.default, found):  # what is sold without --thorough is compiled too
            if one is not None:
                tried.best_of(one, simple, settings.top)
        return found

    def in_time() -> SearchSettings:
        return replace(wanted, time_limit=max(tried.until - time.monotonic(), LEAST_SHARE * settings.time_limit))

    placed: Iterable[Choice] = ()
    if with_tables is not None and _places_tables(settings):
        how: Any = {"micro_batches": settings.micro_batches or 1, "schedules": settings.schedules}
        placed = with_tables(profile, cluster, batch=batch, **how)
    try:
        found = searched(cluster, wanted, known)
    except InfeasibleError:
        own = [one for one in placed if not one.reason]
        if not own:
            raise
        ranked = _ranked(own)
        found = Found(
            candidates=tuple(choice.candidate for choice in ranked),
            near=(),
            bound_seconds=0.0,
            dropped=(),
            points=(),
            tried=len(own),
            seconds=time.monotonic() - begin,
        )
        return Searched(choices=tuple(ranked), refused=(), found=found)
    found = with_other_ways(found, lambda: searched(cluster, in_time(), None))
    tried.writer = replace(tried.writer, profile=profile)
    while not tried.choices and not tried.gives_up() and (room := tried.with_less_memory(cluster)) is not None:
        with suppress(InfeasibleError, UsageError):  # nothing fits, or there is no time left
            searched(room, in_time(), None)
            continue
        break
    prices = prices_of(profile, cluster, batch=batch, settings=settings).under(*settings.way)
    tried.settle_states(lambda candidate: with_other_states(prices, candidate, batch, settings))
    for choice in placed:
        (tried.refused if choice.reason else tried.choices).append(choice)
        if stop():
            break
    for candidate in _reordered(tried.choices, [schedule for schedule in settings.unpriced if schedule != base]):
        if not tried.late():
            tried.compile(candidate)
    if not tried.choices:
        reasons = "; ".join(dict.fromkeys(choice.reason for choice in tried.refused))
        none = f"none of the {len(tried.refused)} best plans that the search found can be run: {reasons}"
        if tried.gives_up() and not stop():
            raise UsageError(
                f"there was no time to find a plan that can be run; use a larger --time-limit. So far {none}"
            )
        raise InfeasibleError(none)
    return Searched(
        choices=_shown(_ranked(tried.choices), settings.top),
        refused=tuple(tried.refused),
        found=replace(found, candidates=found.candidates[: settings.top]),
        shared=tuple(shared),
    )


def _rows_with_experts(found: Found) -> int | None:
    """Rows of a micro-batch for each device that divides experts, in the best plan that has such devices."""
    stages = (stage for candidate in found.candidates for stage in candidate.stages if stage.expert > 1)
    return next((max(1, max(stage.rows) // stage.expert) for stage in stages), None)


def _places_tables(settings: SearchSettings) -> bool:
    """Whether plans with tables in places of their own are among those that are asked for."""
    asked = settings.max_stages, settings.reduce
    ways = (settings.recompute, settings.zero, settings.offload)
    return settings.is_free and asked == (None, None) and all(way in ("auto", "none", 0) for way in ways)


def _reordered(choices: Sequence[Choice], schedules: Sequence[str]) -> Iterator[Candidate]:
    """The best of the compiled pipelines with other schedules; those with tables in places have had theirs."""
    pipelines = [one for one in _ranked(choices) if one.compiled and not one.said and len(one.candidate.stages) > 1]
    for choice, schedule in product(pipelines[:REORDERED], schedules):
        if choice.candidate.micro_batches > 1:
            yield replace(choice.candidate, schedule=schedule)


def _shown(choices: Sequence[Choice], count: int) -> tuple[Choice, ...]:
    """The first of some choices, in order; where there is one of a single stage it takes the last place at least."""
    found = list(choices[:count])
    alone = next((one for one in choices if len(one.candidate.stages) == 1), None)
    if count > 1 and alone is not None and all(len(one.candidate.stages) > 1 for one in found):
        found[-1] = alone
    return tuple(found)


def _ranked(choices: Iterable[Choice]) -> list[Choice]:
    """Sort key: compiled plans first, the fastest first."""
    return sorted(choices, key=lambda choice: (not choice.compiled, choice.prediction.step_seconds))


def _require_priced(settings: SearchSettings) -> None:
    if settings.unpriced:
        raise UsageError(
            f"schedule {settings.unpriced[0]} is tried on plans of a model, of which there is only a profile; give the "
            f"model, or choose of {' and '.join(PRICED)}"
        )


def plan_pipeline(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    batch: int,
    micro_batches: int,
    num_stages: int,
    replicas: int,
    schedule: str = "1f1b",
    recompute: Recompute = "none",
    state: StateSharding | None = None,
    gradient_dtype: str | None = None,
    step_in_backward: bool = False,
    offload: Offload = "none",
    reduce: Reduce | None = None,
) -> Choice:
    """The plan of a pipeline of a given size for a profile alone: layers and rows by speed, nothing searched.

    The stages take the devices in the cluster's order.

    Args:
        profile: of the model.
        cluster: the devices: *num_stages* x *replicas*.
        batch: rows of the global batch.
        micro_batches: of a step; the last one may have fewer rows.
        num_stages: of the pipeline.
        replicas: of every stage.
        schedule: ``gpipe`` or ``1f1b``.
        recompute: what backwards of all stages compute again.
        state: how replicas of all stages divide their state; shares are of each replica.
        gradient_dtype: in which gradients are summed; None: in their own.
        step_in_backward: whether parameters are updated, and gradients freed, when these are summed.
        offload: what is in the memory of hosts, in all stages.
        reduce: how replicas of all stages make one gradient of theirs; None: their mean.

    Raises:
        UsageError: the numbers do not fit the cluster, the batch or the profile.
        InfeasibleError: it does not fit in memory; says what is missing, and what would help.
    """
    settings = SearchSettings(micro_batches=micro_batches, schedules=(schedule,))
    settings.check(batch)
    _require_priced(settings)
    precision = own_precision(profile)
    prices = CostModel.of(
        profile,
        cluster,
        precision=precision,
        batch=batch,
        gradient_dtype=gradient_dtype,
        step_in_backward=step_in_backward,
        reduce=reduce or "mean",
    )
    if 1 not in prices.tensor_degrees:
        known = ", ".join(map(str, prices.tensor_degrees)) or "none"
        raise UsageError(
            f"replicas need tensor degree 1, but the profile of {profile.name} knows {known}; use whale search"
        )
    pipeline = pipeline_by_speed(
        profile,
        cluster,
        batch=batch,
        micro_batches=micro_batches,
        num_stages=num_stages,
        replicas=replicas,
        precision=precision,
        schedule=schedule,
        recompute=recompute,
        zero=state.level if state is not None else 0,
        offload=offload,
    )
    if state is not None and len(state.shares) not in (0, replicas):
        raise UsageError(f"--state-shares has {len(state.shares)} numbers, but each stage has {replicas} replicas")
    prices = prices.under(recompute, state.level if state is not None else 0, offload)
    candidate = _pipeline(prices, pipeline, batch, micro_batches, replicas, schedule, state)
    lacking = shortage_of(candidate.prediction)
    if lacking:
        divisors = (count for count in range(micro_batches + 1, min(batch, MOST_WEIGHED) + 1) if batch % count == 0)
        tried = ((_pipeline(prices, pipeline, batch, count, replicas, schedule, state), count) for count in divisors)
        more = next((count for other, count in tried if other.prediction.fits), None)
        cures = [] if more is None else [(True, f"--micro-batches {more}")]
        for rule in (one for one in RECOMPUTES[RECOMPUTES.index(recompute) + 1 :] if one in profile.rules):
            ruled = prices.under(rule, prices.stack.zero, offload)
            if _pipeline(ruled, pipeline, batch, micro_batches, replicas, schedule, state).prediction.fits:
                cures.append((True, f"--recompute {rule}"))
                break
        for level in (level for level in LEVELS if level > prices.stack.zero and replicas > 1):
            other = replace(state or StateSharding(level), level=level)
            if _pipeline(prices, pipeline, batch, micro_batches, replicas, schedule, other).prediction.fits:
                cures.append((True, f"--zero {level}"))
                break
        raise InfeasibleError(
            advised(f"the plan {lacking}", cures, otherwise="use more stages, or let whale search find what fits")
        )
    return PlanWriter(profile, cluster, batch, None, gradient_dtype, step_in_backward, reduce).written(candidate)


def _pipeline(
    prices: CostModel,
    pipeline: Pipeline,
    batch: int,
    micro_batches: int,
    replicas: int,
    schedule: str,
    state: StateSharding | None,
) -> Candidate:
    """The stages of a pipeline, with rows by speed."""
    stages = []
    for index, (layers, ranks) in enumerate(zip(*pipeline, strict=True)):
        groups = [prices.group((rank,), replicas) for rank in ranks]
        held = in_flight(schedule, len(pipeline.layers), index, micro_batches)
        rows = fastest_rows(prices, layers, groups, rows_of_micro_batch(batch, micro_batches), micro_batches, held)
        stages.append(
            StageChoice(
                first=layers.start,
                last=layers.stop,
                ranks=ranks,
                data=replicas,
                tensor=1,
                rows=rows,
                recompute=prices.stack.recompute,
                state=state if state is not None and state.level else None,
                offload=prices.stack.offload,
            )
        )
    return score(prices, stages, micro_batches=micro_batches, schedule=schedule, batch=batch)


def why_slower(best: Prediction, other: Prediction) -> str:
    """The extra time of a step, and the two parts of the breakdowns that differ the most; empty if there is none.

    >>> best = Prediction(step_seconds=1, step_seconds_interval=(1, 1), breakdown={"compute": 0.9, "pipeline": 0.1})
    >>> why_slower(best, best.model_copy(update={"step_seconds": 1.5, "breakdown": {"compute": 0.8, "pipeline": 0.7}}))
    '+500.00 ms: pipeline +600.00 ms, compute -100.00 ms'
    """
    slower = other.step_seconds - best.step_seconds
    if slower <= 0:
        return ""
    parts = dict.fromkeys((*best.breakdown, *other.breakdown))
    more = {part: other.breakdown.get(part, 0.0) - best.breakdown.get(part, 0.0) for part in parts}
    most = sorted((item for item in more.items() if abs(item[1]) >= 1e-5), key=lambda item: -abs(item[1]))[:2]
    shown = ", ".join(f"{part} {time_text(seconds, signed=True)}" for part, seconds in most)
    return time_text(slower, signed=True) + (f": {shown}" if shown else "")
