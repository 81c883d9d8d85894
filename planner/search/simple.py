"""The plans that people write down without a search, each kind at its best.

One stage on all devices, on those of a type, on a node or on one device, at every tensor and expert degree; a stage a
type, a stage a node and a stage a device. The search contains them all, but ranks them by a model of layers: how much
of a reduction runs beside the last backward, and what a compiled plan exchanges, is known once it is compiled. So the
best of each kind is compiled too, whatever its rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import inf

from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.planner.cost.stage_cost import Memo
from whale.planner.cost.step import timing_of
from whale.planner.search.evaluate import prices_of
from whale.planner.search.families import fit_divisions
from whale.planner.search.layout import laid_out
from whale.planner.search.least_memory import divided
from whale.planner.search.partial_plans import PartialPlan, Scored, allowed, best_cuts, best_timed, score_partial
from whale.planner.search.plan_search import step_seconds
from whale.planner.search.problem import Candidate, SearchSettings
from whale.planner.search.refine import with_moved_cuts
from whale.planner.search.space import Chain, Division, Mesh, Pool, pools_of
from whale.planner.search.table import CostTable

__all__ = ["fastest_simple", "least_after_compiling", "least_simple", "simple_plans"]

LONGEST_LINE = 16
"""Stages up to which pipelines of a stage a node or a device are simple; deeper ones are left to the search."""

MOST_COUNTS = 12
"""Numbers of micro-batches that are tried for each mesh: the smallest for one stage, spread for pipelines."""

MOST_FULL = 4
"""Times the memory of a device that rows by speed may need of it, where others hold less of a share of theirs."""

MOST_LAID_OUT = 3
"""Plans of a kind that are laid out until one fits on its ranks."""


def simple_plans(
    profile: ModelProfile, cluster: Cluster, *, batch: int, settings: SearchSettings, known: Memo | None = None
) -> list[Candidate]:
    """Return the fastest plan of each simple kind that fits, by the search's prices, fastest first; with divided states
    of the optimizer where it is faster so.

    Args:
        profile: of the model.
        cluster: the machines.
        batch: rows of a step.
        settings: of the search; what is fixed stays, and the time limit is not looked at.
        known: prices of an earlier search for the same model.
    """
    prices = prices_of(profile, cluster, batch=batch, settings=settings, known=known).under(*settings.way)
    chain = Chain.of(profile.paths, len(profile.layers), settings.fixed)
    meshes = CostTable(prices=prices, pools=pools_of(cluster), chain=chain)
    found = (_best(meshes, own, batch) for own in _drafts(meshes, batch, settings).values())
    fitting = [divided(prices, one, batch, settings) or one for one in found if one is not None]
    return sorted(fitting, key=step_seconds)


def fastest_simple(meshes: CostTable, batch: int, settings: SearchSettings) -> Candidate | None:
    """Return the fastest plan of all simple kinds that fits at the prices of *meshes*; None if none does."""
    return _best(meshes, [one for own in _drafts(meshes, batch, settings).values() for one in own], batch)


def least_simple(meshes: CostTable, batch: int, settings: SearchSettings, *, is_cut: bool = False) -> float:
    """Return the least seconds of a step of all simple plans, or of those whose devices cut rows, whether or not they
    fit."""
    every = (one for own in _drafts(meshes, batch, settings).values() for one in own)
    some = (one for one in every if not is_cut or any(mesh.context > 1 for mesh in one.draft.meshes))
    return min((one.seconds for one in some), default=inf)


def _drafts(meshes: CostTable, batch: int, settings: SearchSettings) -> dict[str, list[Scored]]:
    """Partial plans of each kind, with the numbers of micro-batches that are tried."""
    most = min(len(meshes.chain), settings.max_stages or len(meshes.chain))
    found: dict[str, list[Scored]] = {}
    for kind, sequence in _sequences(meshes):
        if len(sequence) <= most:
            for count, schedule in product(_micro_batches(batch, settings, len(sequence)), settings.priced):
                if (scored := _scored(meshes, sequence, batch, count, schedule)) is not None:
                    found.setdefault(kind, []).append(scored)
    return found


def least_after_compiling(candidate: Candidate) -> float:
    """Return the seconds of a candidate's step without its sums of gradients, which may run beside the backward, and
    without what ranks that it leaves idle add."""
    timing = timing_of(candidate.workload)  # of the rank that ends last
    return timing.seconds - sum(timing.breakdown.get(part, 0.0) for part in ("reduction", "overhead"))


def _sequences(meshes: CostTable) -> Iterator[tuple[str, tuple[Mesh, ...]]]:
    """The meshes of each kind; some come twice."""
    pools = meshes.pools
    every = tuple(len(pool.ranks) for pool in pools)
    alone = [_only(index, count, pools) for index, count in enumerate(every)]
    nodes = [_only(index, len(node), pools) for index, pool in enumerate(pools) for node in pool.nodes]
    scopes = [("all devices", [every]), ("a type", alone), ("a node", nodes)]
    scopes.append(("a device", [_only(index, 1, pools) for index in range(len(pools))]))
    for scope, counts in scopes:
        for own in dict.fromkeys(counts):
            for division in fit_divisions(meshes, own):
                yield f"one stage on {scope}, {division}", (Mesh(own, *division),)
    devices = [_only(index, 1, pools) for index, count in enumerate(every) for _ in range(count)]
    for kind, stages in (("a stage a type", alone), ("a stage a node", nodes), ("a stage a device", devices)):
        if not 1 < len(stages) <= LONGEST_LINE:
            continue
        by_memory = sorted(stages, key=lambda own: -pools[_pool(own)].type.memory_bytes)
        for order in dict.fromkeys((tuple(stages), tuple(reversed(stages)), tuple(by_memory))):
            shared = [set(fit_divisions(meshes, own)) for own in order]
            for division in sorted(set.intersection(*shared)):
                yield f"{kind}, {division}", tuple(Mesh(own, *division) for own in order)
            yield (
                f"{kind}, largest degrees",
                tuple(Mesh(own, *_largest(one)) for own, one in zip(order, shared, strict=True)),
            )


def _only(index: int, count: int, pools: Sequence[Pool]) -> tuple[int, ...]:
    return tuple(count if own == index else 0 for own in range(len(pools)))


def _pool(counts: tuple[int, ...]) -> int:
    return next(index for index, count in enumerate(counts) if count)


def _largest(divisions: set[Division]) -> Division:
    return max((one for one in divisions if one[1:] == (1, 1)), default=(1, 1, 1))


def _micro_batches(batch: int, settings: SearchSettings, stages: int) -> list[int]:
    if settings.micro_batches is not None:
        return [settings.micro_batches]
    found = [count for count in range(1, min(batch, 4096) + 1) if batch % count == 0]
    if stages == 1 or len(found) <= MOST_COUNTS:
        return found[:MOST_COUNTS]
    return [found[round(place * (len(found) - 1) / (MOST_COUNTS - 1))] for place in range(MOST_COUNTS)]


def _scored(meshes: CostTable, sequence: tuple[Mesh, ...], batch: int, count: int, schedule: str) -> Scored | None:
    """The sequence with its best cuts; None where it does not fit. One stage may fit with other rows than by speed."""
    if not all(meshes.takes(mesh, meshes.rows(batch, count)) for mesh in sequence):
        return None
    starts = (0,) if len(sequence) == 1 else best_cuts(meshes, sequence, batch, count, schedule)
    if starts is None or not allowed(meshes, sequence, starts):
        return None
    plan = PartialPlan(meshes=sequence, starts=starts, micro_batches=count, schedule=schedule)
    scored = score_partial(meshes, plan, batch)
    return (
        with_moved_cuts(meshes, scored, batch, partial(score_partial, meshes, batch=batch)) if scored.fits else scored
    )


def _best(meshes: CostTable, drafts: Sequence[Scored], batch: int) -> Candidate | None:
    """The fastest of the first few that fit on their ranks: by speed, or with other rows where types are mixed."""
    leading = best_timed(drafts, MOST_LAID_OUT)
    limit = leading[0].seconds if leading else inf
    unsure = [one for one in drafts if 1 < one.fullness < MOST_FULL and one.seconds < limit and _is_mixed(one)]
    nearest = sorted(unsure, key=lambda one: one.fullness)[:MOST_LAID_OUT]
    found = (laid_out(meshes, one.draft, batch) for one in (*nearest, *leading))
    fitting = (one for one in found if one.prediction.fits)
    return min(fitting, key=lambda one: one.prediction.step_seconds, default=None)


def _is_mixed(scored: Scored) -> bool:
    """Whether its first stage has devices of several types."""
    return sum(map(bool, scored.draft.meshes[0].counts)) > 1
