"""The search algorithm: from a profile and a cluster to the fastest plans that fit.

Objective: the least step time of a plan, as simulated. A plan is a chain of stages: contiguous layers; devices of one
or several types; a mesh of data x (tensor or expert) on them, each stage its own; rows of a micro-batch for each data
slice; the same number of micro-batches for all, the last of which may have fewer rows; a schedule. Constraints: every
device holds its part with the micro-batches that the schedule keeps in flight; every rank is used once at most; what is
fixed stays.
The space excludes different pipelines in parallel, which no executor runs. Recompute, state that replicas divide (ZeRO)
and state or activations on hosts are part of it where nothing fits without: then plans are searched under each rule and
level for all stages, under both where neither is enough, and then with some of it on hosts; each stage of those that
are found gets the least with which it still fits. At last each row is cut, such as a long sequence or a large volume:
where nothing fits else, and where there are fewer rows than devices. How attention is computed then, as a ring, by
heads or from gathered keys, the placement of layers has chosen for their profile.

Method, for clusters of any size:

1. devices are counted by type (`space`); the costs of ranges of the chain on a mesh are arrays (`table`);
2. families of meshes (`families`), each a device-count program over the remaining devices of each type or, for deep
   pipelines, grouped stages (`partition`), for some numbers of micro-batches, in the order of their lower bounds;
3. the best sequences get their exact cuts (`whale.planner.balance.cuts`) and are refined at their bottleneck
   (`refine`);
4. the best partial plans are placed on ranks, with exact rows (`layout`), and simulated (`evaluate`); the simulation of
   whole layers and rows orders them.

Exact: costs of the results, cuts of a sequence by the formula of the step, rows of a stage, memory. Heuristic: that
families contain the best meshes, and the descent. Every result has a lower bound, the computation divided among all
devices (`bound`). If nothing fits, the error names sufficient changes (`remedies`). Complexity: independent of the
number of devices, except for placing and simulating a few plans; plans that can only lose are not priced, cut or timed
to the end.

Sources: Whale (Jia et al., USENIX ATC 2022), whose balance of mixed devices this extends from given plans to the
choice of plans; Sailor (Strati et al., SOSP 2025), which searches such clusters by enumerating and pruning; the dynamic
program from the last stage with 1F1B's memory follows PipeDream (Narayanan et al., SOSP 2019) and Alpa (Zheng et al.,
OSDI 2022).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from whale.errors import InfeasibleError, UsageError, WhaleError
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.ir.state import LEVELS, StateSharding
from whale.ir.strategy import RECOMPUTES, Offload, Recompute
from whale.planner.balance.least_recompute import least_steps
from whale.planner.cost.hosts import has_hosts
from whale.planner.cost.stage import CostModel
from whale.planner.cost.stage_cost import Memo
from whale.planner.search.evaluate import fitted
from whale.planner.search.plan_search import PlanSearch, best_of, step_seconds
from whale.planner.search.problem import Candidate, Dropped, Fixed, Found, Progress, SearchSettings
from whale.planner.search.remedies import hosts_hold
from whale.planner.search.space import Chain, pools_of
from whale.planner.search.table import CostTable

__all__ = ["search"]

LEAST_GAP = 0.1
"""Part of a step by which it could be shorter if all devices computed all the time, from which on it is looked at what
cutting rows gains."""

MOST_LAUNCHED = 0.5
"""Part of the time of a row in which its device waits for launches, beyond which less of each row saves nothing."""

LEAST_TIME = 0.25
"""Part of the time limit that a search has at least under each rule of recompute, where nothing fits without; none
begins that part after the limit."""


def search(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    batch: int,
    settings: SearchSettings | None = None,
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    known: Memo | None = None,
    prices: CostModel | None = None,
    with_rules: Callable[[], ModelProfile] | None = None,
    with_cuts: Callable[[], ModelProfile] | None = None,
) -> Found:
    """Find the fastest plans for a step of *batch* rows.

    The same arguments give the same answer, unless the time limit or *stop* ends the search early.

    Args:
        profile: of the model.
        cluster: the machines.
        batch: rows of a step, all devices together.
        settings: what may be decided, and for how long.
        progress: called from time to time with the progress.
        stop: is asked often; once it says so the best so far is the answer.
        known: prices of an earlier search for the same model, which this one adds to.
        prices: to be paid in place of Whale's own, of the same profile and cluster.
        with_rules: returns the profile with what each rule of recompute costs; asked if that is not known, and nothing
            fits without.
        with_cuts: returns the profile with what layers cost on devices that cut each row; asked if that is not known,
            and there are fewer rows than devices or nothing fits without.

    Raises:
        InfeasibleError: nothing fits: what is missing, and what would help.
        UsageError: the settings contradict themselves, the batch or the profile.
    """
    settings = settings or SearchSettings()
    settings.check(batch)
    fixed = settings.fixed or Fixed()
    fixed.check(len(profile.layers))
    prices = prices or CostModel.of(
        profile,
        cluster,
        precision=settings.precision,
        optimizer=settings.optimizer,
        batch=batch,
        gradient_dtype=settings.gradient_dtype,
        step_in_backward=settings.step_in_backward,
        reduce=settings.reduce or "mean",
        known=known,
    )
    if not prices.tensor_degrees:
        raise UsageError(f"the profile of {profile.name} has no tensor degree that all layers know; profile it again")
    if prices.tensor_degrees[0] > len(cluster.devices):
        raise InfeasibleError(
            f"the profile of {profile.name} knows no tensor degree below {prices.tensor_degrees[0]}, but the cluster "
            f"has {len(cluster.devices)} devices; profile degree 1 too"
        )
    pools, began = pools_of(cluster), time.monotonic()
    chain = Chain.of(profile.paths, len(profile.layers), settings.fixed)

    def under(prices: CostModel) -> PlanSearch:
        left = max(settings.time_limit - (time.monotonic() - began), LEAST_TIME * settings.time_limit)
        return PlanSearch(
            meshes=CostTable(prices=prices, pools=pools, chain=chain),
            batch=batch,
            settings=replace(settings, time_limit=left),
            tell=progress,
            stopped=stop or (lambda: False),
        )

    ended: list[WhaleError] = []

    def run(search: PlanSearch) -> Found | None:
        try:
            return search.run()
        except (InfeasibleError, UsageError) as error:  # it was stopped, or there was no time
            ended.append(error)
            return None

    last = under(prices.under(*settings.way))
    overfull: list[PlanSearch] = []  # whose state no hosts hold
    untried, costs = False, prices

    def tried(groups: Iterable[list[Way]], counts: Callable[[Found], bool] = lambda found: True) -> list[Found]:
        """The results of the first group of ways that has some that count."""
        nonlocal costs, last, untried
        found: list[Found] = []
        for ways in groups:
            if found or untried or last.stopped():
                break
            for way in ways:
                if time.monotonic() - began > (1 + LEAST_TIME) * settings.time_limit:
                    untried = True
                    break
                rules = costs.profile.rules
                if way[0] not in rules and with_rules is not None and rules != RECOMPUTES:
                    costs = replace(costs, profile=with_rules(), memo=Memo())
                if way[0] in costs.profile.rules and not last.stopped():
                    last = under(costs.under(*way))
                    if not hosts_hold(last.meshes.prices):
                        overfull.append(last)
                    elif (one := run(last)) is not None and counts(one):
                        found.append(one)
        return found

    first = run(last)
    found = [first] if first is not None else tried(_ways(settings, cluster))
    may_cut = with_cuts is not None and not costs.cuts and not untried and not last.stopped()
    if with_cuts is not None and may_cut and _cut_may_pay(costs, batch, found):
        cut = replace(costs, profile=with_cuts(), memo=Memo())
        if cut.cuts:
            costs = cut
            found += tried([[settings.way], *_ways(settings, cluster)], _is_cut)
    prices = costs
    if first is not None:
        least = [_with_least(prices, found[1:], batch, settings)] if found[1:] else []
        return _aligned(_together([first, *least], settings.top) if least else first, settings)
    if not found and ended:
        raise ended[0]
    if not found and untried:
        raise UsageError(
            "nothing fits by itself, and there was no time to try all that takes less memory: "
            f"{settings.time_limit:.3g} seconds were over; give it more"
        )
    for other in overfull if not found else ():  # the first that fits on devices says what hosts would need
        run(other)
        if other.best:
            last = other
            break
    if not found:
        weighed, given = last.meshes.prices, settings.recompute
        if given != "auto" and given != "full" and with_rules is not None and profile.rules != RECOMPUTES:
            weighed = replace(prices, profile=with_rules(), memo=Memo()).under(*settings.way)
        raise InfeasibleError(last.shortage(weighed))
    return _aligned(_with_least(prices, found, batch, settings), settings)


def _cut_may_pay(prices: CostModel, batch: int, found: Sequence[Found]) -> bool:
    """Whether devices that cut rows could make a faster plan than those that searches found without: there are none, or
    there are fewer rows than devices and a row keeps a device busy."""
    if not found:
        return True
    if batch >= len(prices.cluster.devices) or min(one.gap for one in found) < LEAST_GAP:
        return False
    group = prices.group((found[0].best.stages[0].ranks[0],), 1)
    row = prices.stage(range(len(prices.profile.layers)), group, 1, 1)
    return row.launched < MOST_LAUNCHED * (row.forward + row.backward)


def _is_cut(found: Found) -> bool:
    """Whether the fastest plan cuts rows."""
    return any(stage.context > 1 for stage in found.best.stages)


Way = tuple[Recompute, int, Offload]
"""A rule of recompute, a level of state and what is on hosts, of all stages."""


def _ways(settings: SearchSettings, cluster: Cluster) -> Iterator[list[Way]]:
    """Changes to try where nothing fits, those first that cost least: one of rule and level, then both, and what is on
    the host, with these or without."""
    rules = RECOMPUTES[1:] if settings.recompute == "auto" else ()
    levels = (1, 3) if settings.zero == "auto" and len(cluster.devices) > 1 else ()
    rule, level, offload = settings.way
    yield [*((rule, one, offload) for one in levels), *((one, level, offload) for one in rules)]
    if rules and levels:
        yield [(one, levels[-1], offload) for one in rules]
    if settings.offload == "auto" and has_hosts(cluster):
        each: tuple[int, ...] = (1, 3) if settings.zero == "auto" else (max(1, level),)
        yield [*((rule, one, "state") for one in each), (rule, level, "activations")]
        most = (*rules, rule)[len(rules) - 1]
        yield [*((most, one, "state") for one in each if rules), (most, each[-1], "both")]


def _aligned(found: Found, settings: SearchSettings) -> Found:
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


def _with_least(prices: CostModel, found: Sequence[Found], batch: int, settings: SearchSettings) -> Found:
    """Results under several rules and levels as one, with the least recompute and the least level in each stage."""

    def least(each: Found) -> Found:
        candidates = tuple(_least(prices, candidate, batch, settings) for candidate in each.candidates)
        return replace(each, candidates=candidates, default=None if each.default is None else least(each.default))

    return _together(list(map(least, found)), settings.top)


def _together(found: Sequence[Found], top: int) -> Found:
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
        default=_together(default, top) if default else None,
    )


def _least(prices: CostModel, candidate: Candidate, batch: int, settings: SearchSettings) -> Candidate:
    """A candidate with the least on the host in each stage with which it fits, then with the least level and the least
    recompute, whichever is decided first."""
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
    both = (least_levels(least_rules(start)), least_rules(least_levels(start)))
    return min(both, key=step_seconds)
