"""Searching: from a profile and a cluster to runnable plans: searched, written as plans, compiled and ranked again.

The search prices layers; a compiled plan is predicted with its real collectives and bytes. So the best candidates are
compiled, as many as time allows, and the best plan of each simple kind that could be better. A candidate that does not
compile or fit is rejected with its reason, and another is compiled. Without a model, the search's own predictions
count. This module does not import torch: `whale.commands.candidates` compiles plans.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf
from typing import Any, NamedTuple, Protocol

from whale.commands.shared import Shared
from whale.errors import InfeasibleError, UsageError, WhaleError
from whale.ir.cluster import Cluster
from whale.ir.micro_batches import rows_of_micro_batch
from whale.ir.plan import ModelIdentity, Plan
from whale.ir.profile import ModelProfile
from whale.ir.state import LEVELS, StateSharding
from whale.ir.strategy import RECOMPUTES, Recompute
from whale.ir.units import bytes_text
from whale.ir.workload import Prediction, Workload
from whale.planner.advice import advised
from whale.planner.balance.by_speed import pipeline_by_speed
from whale.planner.cost.precision import BY_DTYPE
from whale.planner.cost.stage import CostModel
from whale.planner.schedules.in_flight import in_flight
from whale.planner.schedules.orders import FITTED
from whale.planner.search import Candidate, Found, Memo, Progress, SearchSettings, StageChoice, search
from whale.planner.search.evaluate import score
from whale.planner.search.layout import fastest_rows
from whale.planner.search.problem import PRICED
from whale.planner.search.simple import least_after_compiling, simple_plans
from whale.planner.search.to_plan import annotations_of, plan_of, split_shares

__all__ = [
    "Choice",
    "PlanWriter",
    "Searched",
    "Trial",
    "plan_pipeline",
    "search_plans",
    "settings_for",
    "why_slower",
]

SEARCH_SHARE = 0.5
"""Fraction of the time limit for the search, if a plan fits and there is a model to compile; the rest is for
compiling."""

LEAST_SHARE = 0.25
"""Fraction of the time limit for another search with less memory."""

PATIENCE = 2.0
"""Multiple of the time limit for which candidates are compiled as long as none can be run."""

RESERVE = 20
"""Number of further candidates that are compiled as long as none can be run."""

MOST_UNSURE, UNSURE_OPERATORS = 8, 8192
"""Limits on the further candidates that are compiled because they could be better than the best compiled one, and on
the operators of all of them together. Both are counted, so that a busy machine leads to the same plans."""

WORTH_SHARING = 4096
"""Operators of all candidates together, about a second of compiling, that are shared with other processes; a fork, and
what each finds that the others know, cost some."""

GAIN = 1e-3
"""Smallest relative improvement for which another candidate is compiled."""

REORDERED = 2
"""Number of the best compiled plans on which schedules are tried that the search does not price."""

MOST_WEIGHED = 4096
"""Largest number of micro-batches that is tried as a remedy if a plan does not fit."""


class Trial(Protocol):
    """A candidate compiler; `whale.commands.candidates.CandidateCompiler` is one."""

    identity: ModelIdentity
    dtype: str
    num_operators: int

    def uncut(self, micro_batches: int) -> str:
        """Reason why the batch cannot be divided into a number of micro-batches; empty if it can."""

    def places(self, anchors: Sequence[str]) -> Iterable[tuple[str, int]]:
        """For each operator of the model, its module path and its stage, if stages begin with *anchors*."""

    def predict(self, plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[Prediction, Workload]:
        """Compile the plan, and predict its step."""

    def forked(self) -> None:
        """Called in a forked process before it predicts."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A plan that the search proposes.

    Attributes:
        candidate: with the score of the search.
        plan: with the prediction of the compiled step if *compiled*, else with the search's.
        compiled: whether it was compiled.
        reason: why it is rejected; empty if it is not, as far as known.
    """

    candidate: Candidate
    plan: Plan
    compiled: bool = False
    reason: str = ""

    @property
    def prediction(self) -> Prediction:
        """The most accurate prediction of its step."""
        return self.plan.prediction or self.candidate.prediction


@dataclass(frozen=True, kw_only=True)
class Searched:
    """Result of a search.

    Attributes:
        choices: runnable plans, best first; at least one. Compiled ones precede others.
        refused: candidates that do not compile or fit.
        found: the result of the search, with its bound and excluded plans.
    """

    choices: tuple[Choice, ...]
    refused: tuple[Choice, ...]
    found: Found

    @property
    def best(self) -> Choice:
        """The plan to run."""
        return self.choices[0]


def settings_for(settings: SearchSettings, trial: Trial | None) -> SearchSettings:
    """Constraints from a model: a single micro-batch if its batch cannot be divided.

    Raises:
        UsageError: more are asked for; says which operator computes a row from others.
    """
    if trial is None or not (why := trial.uncut(settings.micro_batches or 2)):
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

    Raises:
        InfeasibleError: nothing fits; says what is missing and what would help.
        UsageError: the settings contradict themselves, the batch or the model, or need a model; there was no time.
    """
    begin = time.monotonic()
    settings.check(batch)
    settings = settings_for(settings, trial)
    known = known or Memo()

    def ruled() -> ModelProfile:
        nonlocal profile
        if with_rules is not None:
            profile = with_rules(profile)
        return profile

    if trial is None:
        _require_priced(settings)
        options: dict[str, Any] = {"settings": settings, "progress": progress, "stop": stop, "known": known}
        found = search(profile, cluster, batch=batch, **options, with_rules=ruled)
        writer = PlanWriter(profile, cluster, batch, None)
        return Searched(choices=tuple(writer.written(one) for one in found.candidates), refused=(), found=found)
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
    writer = PlanWriter(profile, cluster, batch, trial)
    limit = settings.time_limit
    tried = _Tried(writer, trial, base, begin + limit, limit, stop, processes)

    def searched(where: Cluster, how: SearchSettings, known: Memo | None) -> Found:
        """The plans of a search, of which the best are compiled."""
        found = search(
            profile, where, batch=batch, settings=how, progress=told, stop=over, known=known, with_rules=ruled
        )
        tried.writer = replace(tried.writer, profile=profile)
        simple = partial(simple_plans, profile, where, batch=batch, settings=settings, known=known)
        for one in (found.default, found):  # what is sold without --thorough is compiled too
            if one is not None:
                tried.best_of(one, simple, settings.top)
        return found

    found = searched(cluster, wanted, known)
    while not tried.choices and not tried.gives_up() and (room := tried.with_less_memory(cluster)) is not None:
        left = replace(wanted, time_limit=max(tried.until - time.monotonic(), LEAST_SHARE * settings.time_limit))
        with suppress(InfeasibleError, UsageError):  # nothing fits, or there is no time left
            searched(room, left, None)
            continue
        break
    for candidate in _reordered(tried.choices, [schedule for schedule in settings.unpriced if schedule != base]):
        if not tried.late():
            tried.compile(candidate)
    if not tried.choices:
        reasons = "; ".join(dict.fromkeys(choice.reason for choice in tried.refused))
        none = f"none of the {len(tried.refused)} best plans that the search found can be run: {reasons}"
        if tried.gives_up() and not stop():
            raise UsageError(f"there was no time to find a plan that can be run; give it more. So far {none}")
        raise InfeasibleError(none)
    return Searched(
        choices=_shown(_ranked(tried.choices), settings.top),
        refused=tuple(tried.refused),
        found=replace(found, candidates=found.candidates[: settings.top]),
    )


class _Timed(NamedTuple):
    """A candidate that was tried, and the seconds that it took."""

    choice: Choice
    seconds: float


@dataclass
class _Tried:
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
        with self._shared(others) as shared:
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

    def _shared(self, candidates: Sequence[Candidate]) -> Shared[_Timed]:
        """Some candidates, compiled by several processes where that takes long enough."""
        much = self.trial.num_operators * len(candidates) > WORTH_SHARING and not self.late()
        return Shared(
            lambda number: self._compiled(self._scheduled(candidates[number], self.schedule)),
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
        (self.refused if timed.choice.reason else self.choices).append(timed.choice)
        self.longest = max(self.longest, timed.seconds)

    def _scheduled(self, candidate: Candidate, schedule: str | None) -> Candidate:
        return replace(candidate, schedule=schedule or candidate.schedule)

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


def _with_memory(cluster: Cluster, parts: Mapping[str, float]) -> Cluster:
    """The cluster with a part of the memory of each device type."""
    types = {
        device.type.name: replace(device.type, memory_bytes=int(device.memory_bytes * parts.get(device.type.name, 1.0)))
        for device in cluster.devices
    }
    return replace(cluster, devices=tuple(replace(one, type=types[one.type.name]) for one in cluster.devices))


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


def _reordered(choices: Sequence[Choice], schedules: Sequence[str]) -> Iterator[Candidate]:
    """The best of the compiled pipelines with other schedules."""
    pipelines = [one for one in _ranked(choices) if one.compiled and len(one.candidate.stages) > 1]
    for choice, schedule in product(pipelines[:REORDERED], schedules):
        if choice.candidate.micro_batches > 1:
            yield replace(choice.candidate, schedule=schedule)


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

    Raises:
        UsageError: the numbers do not fit the cluster, the batch or the profile.
        InfeasibleError: it does not fit in memory; says what is missing, and what would help.
    """
    settings = SearchSettings(micro_batches=micro_batches, schedules=(schedule,))
    settings.check(batch)
    _require_priced(settings)
    precision = profile.autocast or BY_DTYPE.get(profile.precision, "fp32")
    prices = CostModel.of(profile, cluster, precision=precision, batch=batch)
    if 1 not in prices.tensor_degrees:
        known = ", ".join(map(str, prices.tensor_degrees)) or "none"
        raise UsageError(
            f"replicas need tensor degree 1, but the profile of {profile.name} knows {known}; use whale search"
        )
    cuts = pipeline_by_speed(
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
    )
    if state is not None and len(state.shares) not in (0, replicas):
        raise UsageError(f"--state-shares has {len(state.shares)} numbers, but each stage has {replicas} replicas")
    prices = prices.under(recompute, state.level if state is not None else 0)
    candidate = _pipeline(prices, cuts, batch, micro_batches, replicas, schedule, state)
    lacking = _lacking(candidate.prediction)
    if lacking:
        divisors = (count for count in range(micro_batches + 1, min(batch, MOST_WEIGHED) + 1) if batch % count == 0)
        tried = ((_pipeline(prices, cuts, batch, count, replicas, schedule, state), count) for count in divisors)
        more = next((count for other, count in tried if other.prediction.fits), None)
        cures = [] if more is None else [(True, f"--micro-batches {more}")]
        for rule in (one for one in RECOMPUTES[RECOMPUTES.index(recompute) + 1 :] if one in profile.rules):
            ruled = prices.under(rule, prices.stack.zero)
            if _pipeline(ruled, cuts, batch, micro_batches, replicas, schedule, state).prediction.fits:
                cures.append((True, f"--recompute {rule}"))
                break
        for level in (level for level in LEVELS if level > prices.stack.zero and replicas > 1):
            other = replace(state or StateSharding(level), level=level)
            if _pipeline(prices, cuts, batch, micro_batches, replicas, schedule, other).prediction.fits:
                cures.append((True, f"--zero {level}"))
                break
        raise InfeasibleError(
            advised(f"the plan {lacking}", cures, otherwise="use more stages, or let whale search find what fits")
        )
    return PlanWriter(profile, cluster, batch, None).written(candidate)


def _pipeline(
    prices: CostModel,
    cuts: Sequence[range],
    batch: int,
    micro_batches: int,
    replicas: int,
    schedule: str,
    state: StateSharding | None,
) -> Candidate:
    """Stages of these layers, each on as many devices, with rows by speed."""
    stages = []
    for index, layers in enumerate(cuts):
        ranks = tuple(range(index * replicas, (index + 1) * replicas))
        groups = [prices.group((rank,), replicas) for rank in ranks]
        held = in_flight(schedule, len(cuts), index, micro_batches)
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
            )
        )
    return score(prices, stages, micro_batches=micro_batches, schedule=schedule, batch=batch)


@dataclass(frozen=True)
class PlanWriter:
    """Writes candidates as plans, and compiles them.

    Attributes:
        profile: of the model.
        cluster: the devices.
        batch: rows of the global batch.
        trial: the model; None: there is only the profile.
    """

    profile: ModelProfile
    cluster: Cluster
    batch: int
    trial: Trial | None

    def unwritten(self, candidate: Candidate) -> Plan:
        """The ranks and axes alone, for an annotated model."""
        plan = plan_of(candidate, self.cluster, batch=self.batch, annotations={}, model=self._identity())
        return self._in_precision(plan)

    def written(self, candidate: Candidate, *, by_speed: bool = False) -> Choice:
        """Not compiled."""
        shares = None
        if by_speed and self.trial is not None:
            shares = [split_shares(stage, self.cluster, self.trial.dtype) for stage in candidate.stages]
        plan = plan_of(
            candidate,
            self.cluster,
            batch=self.batch,
            annotations=self._annotations(candidate.stages),
            model=self._identity(),
            shares=shares,
        )
        return Choice(candidate=candidate, plan=self._in_precision(plan))

    def _in_precision(self, plan: Plan) -> Plan:
        """The plan with the precision of ``torch.autocast`` under which the model was captured, if it was."""
        if not self.profile.autocast:
            return plan
        said = plan.model_copy(update={"precision": self.profile.autocast})
        return said if plan.prediction is None else said.with_prediction(plan.prediction, plan.workload)

    def compiled(self, candidate: Candidate, trial: Trial) -> Choice:
        """Compile a candidate; if tensor groups have mixed devices, with shards by speed if that is faster. The reason
        of the choice says why it does not compile or fit.

        Raises:
            UsageError: it cannot be written as annotations of this model.
        """
        even = self.with_prediction(self.written(candidate), trial)
        if not any(split_shares(stage, self.cluster, trial.dtype) for stage in candidate.stages):
            return even
        uneven = self.with_prediction(self.written(candidate, by_speed=True), trial)
        return min(even, uneven, key=lambda choice: (bool(choice.reason), choice.prediction.step_seconds))

    def with_prediction(self, choice: Choice, trial: Trial) -> Choice:
        """Compile a written candidate, and put the prediction into its plan; the reason of the choice says why it does
        not compile or fit."""
        try:
            prediction, workload = trial.predict(choice.plan, self.profile, self.cluster)
            plan = choice.plan.with_prediction(prediction, workload)
            if plan.schedule in FITTED:  # to times that are known now, and with them what it keeps in flight
                prediction, workload = trial.predict(plan, self.profile, self.cluster)
                plan = choice.plan.with_prediction(prediction, workload)
        except WhaleError as error:
            return replace(choice, reason=str(error))
        return replace(choice, plan=plan, compiled=True, reason=_lacking(prediction))

    def _identity(self) -> ModelIdentity | None:
        if self.trial is not None:
            return self.trial.identity
        return ModelIdentity(name=self.profile.name, hash=self.profile.model_hash) if self.profile.model_hash else None

    def _annotations(self, stages: Sequence[StageChoice]) -> Mapping[str, tuple[str, ...]]:
        paths = self.profile.paths
        if not any(paths):
            return {}
        anchors = [paths[stage.first] for stage in stages]
        first = stages[0]
        anchors[0] = next((path for path in paths[first.first : first.last] if path), "")
        if self.trial is not None and len(stages) > 1 and all(anchors):
            return annotations_of(stages, anchors, self.trial.places(anchors), self.profile.experts)
        places = [(paths[layer], index) for index, one in enumerate(stages) for layer in range(one.first, one.last)]
        return annotations_of(stages, anchors, [one for one in places if one[0]], self.profile.experts)


def _lacking(prediction: Prediction) -> str:
    """The device that lacks the most memory, and how much; empty if all fit."""
    worst = max(prediction.memory, key=lambda device: device.total - device.capacity)
    if prediction.fits:
        return ""
    return f"needs {bytes_text(worst.total)} on {worst.device}, which has {bytes_text(worst.capacity)}"


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
    shown = ", ".join(f"{part} {seconds * 1e3:+.2f} ms" for part, seconds in most)
    return f"{slower * 1e3:+.2f} ms" + (f": {shown}" if shown else "")
