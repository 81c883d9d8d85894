"""The search algorithm: from a profile and a cluster to the fastest plans that fit.

Objective: the least step time of a plan, as simulated. A plan is a chain of stages: contiguous layers; devices of one
or several types; a mesh of data x (tensor or expert) on them, each stage its own; rows of a micro-batch for each data
slice; the same number of micro-batches for all, the last of which may have fewer rows; a schedule. Constraints: every
device holds its part with the micro-batches that the schedule keeps in flight; every rank is used once at most; what is
fixed stays.
The space excludes different pipelines in parallel, which no executor runs. Recompute, state that replicas divide (ZeRO)
and state or activations on hosts are part of it where nothing fits without: then plans are searched under each rule and
level for all stages, under both where neither is enough, and then with some of it on hosts; each stage of those that
are found gets the least with which it still fits. State is divided, and values are computed again, also where the best
simple plan that does so is faster than all that fit without. At last each row is cut, such as a long sequence or a
large volume: where nothing fits else, and where there are fewer rows than devices. How attention is computed then, as a
ring, by heads or from gathered keys, the placement of layers has chosen for their profile.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from whale.errors import InfeasibleError, UsageError
from whale.ir.cluster import Cluster
from whale.ir.garbage import without_collections
from whale.ir.profile import ModelProfile
from whale.ir.strategy import RECOMPUTES, Offload, Recompute
from whale.planner.cost.hosts import has_hosts
from whale.planner.cost.stage import CostModel
from whale.planner.cost.stage_cost import Memo
from whale.planner.search.evaluate import prices_of
from whale.planner.search.least_memory import aligned, with_least
from whale.planner.search.plan_search import PlanSearch, step_seconds
from whale.planner.search.problem import Fixed, Found, Progress, SearchSettings, Stopped
from whale.planner.search.remedies import hosts_hold
from whale.planner.search.simple import fastest_simple, least_simple
from whale.planner.search.space import Chain, pools_of
from whale.planner.search.table import CostTable

__all__ = ["search"]

LEAST_GAP = 0.1
"""Part of a step by which it could be shorter if all devices computed all the time, from which on it is found out what
cutting rows, or dividing state where plans fit without, gains."""

MOST_LAUNCHED = 0.5
"""Part of the time of a row in which its device waits for launches, beyond which less of each row saves nothing."""

LEAST_TIME = 0.25
"""Part of the time limit that a search has at least in each way to take less memory, where nothing fits without; after
that part beyond the limit no rule of recompute is measured any more."""

Way = tuple[Recompute, int, Offload]
"""A rule of recompute, a level of state and what is on hosts, of all stages."""


@without_collections
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
    prices = prices or prices_of(profile, cluster, batch=batch, settings=settings, known=known)
    if not prices.tensor_degrees:
        raise UsageError(f"the profile of {profile.name} has no tensor degree that all layers know; profile it again")
    if prices.tensor_degrees[0] > len(cluster.devices):
        raise InfeasibleError(
            f"the profile of {profile.name} knows no tensor degree below {prices.tensor_degrees[0]}, but the cluster "
            f"has {len(cluster.devices)} devices; profile degree 1 too"
        )
    searches = _Searches(
        costs=prices,
        batch=batch,
        settings=settings,
        tell=progress,
        stop=stop or (lambda: False),
        with_rules=with_rules,
        with_cuts=with_cuts,
    )
    return searches.found()


@dataclass(kw_only=True)
class _Searches:
    """Searches for plans of one problem, each with one rule of recompute, level of state and offload for all stages.

    Attributes:
        costs: of the profile, with what was added to it when that was asked for.
        batch: rows of a step.
        settings: what may be decided, and for how long.
        tell, stop, with_rules, with_cuts: as `search` takes them.
        began: when the time limit begins.
        last: the latest search.
        overfull: searches whose state no hosts hold, which were not run.
        ended: why searches ended without an answer.
        untried: whether the time was over before some were tried.
    """

    costs: CostModel
    batch: int
    settings: SearchSettings
    tell: Callable[[Progress], None] | None
    stop: Callable[[], bool]
    with_rules: Callable[[], ModelProfile] | None
    with_cuts: Callable[[], ModelProfile] | None
    began: float = field(default_factory=time.monotonic)
    last: PlanSearch = field(init=False)
    overfull: list[PlanSearch] = field(default_factory=list)
    ended: list[Stopped] = field(default_factory=list)
    untried: bool = False

    def found(self) -> Found:
        """The fastest plans: of the first way, else of the first of the others with which some fit; and with divided
        state or cut rows, where these may be faster.

        Raises:
            InfeasibleError: nothing fits.
            UsageError: there was no time to try all ways.
        """
        settings = self.settings
        self.last = self._under(self._first_way())
        first = self._run(self.last)
        if first is None and not self.stop() and not self.last.is_possible():
            self._refuse()
        if first is None:
            groups = ([settings.way], *_ways(settings, self.costs))
            untried = ([way for way in ways if way != self._first_way()] for ways in groups)
            found = self._fitting(untried, nothing_else=True)
        else:
            whole = [[self.settings.way]] if first.gap >= LEAST_GAP and self._first_way() != self.settings.way else []
            found = [first, *self._with_less_memory(first), *self._fitting(whole)]
        found += self._with_cut_rows(found)
        if not found:
            self._refuse()
        return aligned(with_least(self.costs, found, self.batch, settings), settings)

    def _first_way(self) -> Way:
        """The way of the first search: replicas divide the states of the optimizer where that may be decided, because
        each then updates a part of the parameters, and what is sent is the same; where that saves little they are whole
        at last."""
        rule, level, offload = self.settings.way
        divides = self.settings.may_divide and len(self.costs.cluster.devices) > 1
        return rule, 1 if divides else level, offload

    def _under(self, way: Way) -> PlanSearch:
        limit = self.settings.time_limit
        left = max(limit - (time.monotonic() - self.began), LEAST_TIME * limit)
        prices = self.costs.under(*way)
        chain = Chain.of(prices.profile.paths, len(prices.profile.layers), self.settings.fixed)
        return PlanSearch(
            meshes=CostTable(prices=prices, pools=pools_of(prices.cluster), chain=chain),
            batch=self.batch,
            settings=replace(self.settings, time_limit=left),
            tell=self.tell,
            stopped=self.stop,
        )

    def _run(self, search: PlanSearch) -> Found | None:
        try:
            return search.run()
        except Stopped as error:
            self.ended.append(error)
            return None

    def _fitting(
        self,
        groups: Iterable[Sequence[Way]],
        counts: Callable[[Found], bool] = lambda found: True,
        *,
        nothing_else: bool = False,
    ) -> list[Found]:
        """The results of the first group of ways that has some that count. Where there is *nothing_else*, ways are also
        tried after the time limit, except under rules that have to be measured first."""
        found: list[Found] = []
        for ways in groups:
            if found or self.stop():
                break
            for way in ways:
                late = time.monotonic() - self.began > (1 + LEAST_TIME) * self.settings.time_limit
                if late and not (nothing_else and way[0] in self.costs.profile.rules):
                    self.untried = True
                elif self._knows(way[0]) and not self.stop():
                    self.last = self._under(way)
                    if not hosts_hold(self.last.meshes.prices):
                        self.overfull.append(self.last)
                    elif (one := self._run(self.last)) is not None and counts(one):
                        found.append(one)
        return found

    def _with_less_memory(self, first: Found) -> list[Found]:
        """Plans whose replicas divide all of their state, or whose backwards compute again, where plans fit without:
        those of the whole model may be faster than the long pipelines, the many shards or the small micro-batches that
        do not."""
        (rule, level, offload), found = self._first_way(), [first]
        ways: list[Way] = []
        if self.settings.zero == "auto" and len(self.costs.cluster.devices) > 1:
            ways.append((rule, 3, offload))
        if self.settings.recompute == "auto":
            ways += [(one, level, offload) for one in RECOMPUTES[1:]]
        simple = self.last.meshes
        for way in ways:
            best = min(step_seconds(one.best) for one in found)
            if min(one.gap for one in found) < LEAST_GAP or self.stop():
                break
            if way[0] != rule and not self._lacks_memory(simple, best):
                continue
            if not self._knows(way[0]):
                continue
            fitting = fastest_simple(self._under(way).meshes, self.batch, self.settings)
            if fitting is not None and fitting.prediction.step_seconds < best:
                found += self._fitting([[way]])
        return found[1:]

    def _lacks_memory(self, meshes: CostTable, best: float) -> bool:
        """Whether a simple plan would be faster than *best* by a good part, and does not fit or it would have been
        found; and the profile may say what backwards cost that compute again."""
        if self.with_rules is None and len(self.costs.profile.rules) == 1:
            return False
        return least_simple(meshes, self.batch, self.settings) < (1 - LEAST_GAP) * best

    def _knows(self, rule: Recompute) -> bool:
        """Whether the profile says what a rule costs, where it is asked for."""
        rules = self.costs.profile.rules
        if rule not in rules and self.with_rules is not None and rules != RECOMPUTES:
            self.costs = replace(self.costs, profile=self.with_rules(), memo=Memo())
        return rule in self.costs.profile.rules

    def _with_cut_rows(self, found: Sequence[Found]) -> list[Found]:
        """Plans whose devices cut each row, where these may be faster."""
        if self.with_cuts is None or self.costs.cuts or self.untried or self.stop():
            return []
        if not _cut_may_pay(self.costs, self.batch, found):
            return []
        cut = replace(self.costs, profile=self.with_cuts(), memo=Memo())
        if not cut.cuts:
            return []
        self.costs = cut
        fitting = self._fitting([[self._first_way()]], _is_cut)
        if not fitting and found:
            meshes, best = self._under(self._first_way()).meshes, min(step_seconds(one.best) for one in found)
            if least_simple(meshes, self.batch, self.settings, is_cut=True) >= (1 - LEAST_GAP) * best:
                return []  # less memory would not make any of them the fastest
        return fitting or self._fitting(_ways(self.settings, cut), _is_cut)

    def _refuse(self) -> NoReturn:
        """Say what is missing, and what would help."""
        settings, costs = self.settings, self.costs
        if self.ended:
            raise self.ended[0]
        if self.untried:
            raise UsageError(
                "nothing fits by itself, and there was no time to try all that takes less memory; use a larger "
                "--time-limit"
            )
        for other in self.overfull:  # the first that fits on devices says what hosts would need
            other.meshes = replace(other.meshes, any_hosts=True)
            self._run(other)
            if other.best:
                self.last = other
                break
        weighed, given = self.last.meshes.prices, settings.recompute
        if given not in ("auto", "full") and self.with_rules is not None and costs.profile.rules != RECOMPUTES:
            weighed = replace(costs, profile=self.with_rules(), memo=Memo()).under(*settings.way)
        raise InfeasibleError(self.last.shortage(weighed))


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


def _ways(settings: SearchSettings, costs: CostModel) -> Iterator[list[Way]]:
    """Changes to try where nothing fits, those first that cost least: one of rule and level, then both, and what is on
    the host, with these or without."""
    rules = RECOMPUTES[1:] if settings.recompute == "auto" else ()
    levels = (1, 3) if settings.zero == "auto" and len(costs.cluster.devices) > 1 else ()
    rule, level, offload = settings.way
    yield [*((rule, one, offload) for one in levels), *((one, level, offload) for one in rules)]
    if rules and levels:
        yield [(one, levels[-1], offload) for one in rules]
    if settings.offload != "auto" or not has_hosts(costs.cluster):
        return
    most = rules[-1] if rules else rule
    if costs.profile.has_tables:
        yield [(rule, level, "tables"), (most, levels[-1] if levels else level, "tables")]
    else:
        each: tuple[int, ...] = (1, 3) if settings.zero == "auto" else (max(1, level),)
        yield [*((rule, one, "state") for one in each), (rule, level, "activations")]
        yield [*((most, one, "state") for one in each if rules), (most, each[-1], "both")]
