"""How far from the best plan is the search? Random chains on mixed devices, of which every plan is tried.

    python benchmarks/search_exact.py --repeats 50 --write 2026-11-23

Cases have up to 6 devices of 3 types and 8 layers of 2 kinds, with memory that binds in some, and sends and fixed costs
that matter in some. The best plan is that of the oracle of the tests (``tests/search_oracle.py``), which walks through
all of them. Beside it are two lower bounds: that which the search tells, and that of a linear program
(``search_bound.py``).
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path

from harness import arguments, report, table
from search_bound import linear_bound

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chains import card, chain, layer, machines
from tests.search_oracle import best_plan
from whale.errors import InfeasibleError
from whale.ir.cluster import Cluster, Link
from whale.ir.profile import ModelProfile
from whale.planner.cost.stage import CostModel
from whale.planner.search import SearchSettings, search

DEGREES = (1, 2)
SETTINGS = SearchSettings(time_limit=120)


@dataclass(frozen=True)
class Case:
    profile: ModelProfile
    cluster: Cluster
    batch: int


def case(seed: int) -> Case:
    draw = random.Random(seed)
    types = [card(name, gib=draw.choice([0.06, 0.12, 64])) for name in "abc"[: draw.randint(2, 3)]]
    kinds = [
        layer(
            {one.name: draw.choice([0.01, 0.015, 0.02, 0.04]) for one in types},
            degrees=DEGREES,
            fixed=draw.choice([0.0, 0.02]),
            parameters=draw.choice([1e5, 2e6]),
            kept=draw.choice([1e5, 5e6]),
            output=draw.choice([1e3, 1e6]),
            name=str(index),
        )
        for index in range(2)
    ]
    devices = sorted((draw.choice(types) for _ in range(draw.randint(4, 6))), key=lambda one: one.name)
    return Case(
        profile=chain(kinds, [draw.randint(0, 1) for _ in range(draw.randint(4, 8))]),
        cluster=machines(devices, Link(bandwidth=draw.choice([1e8, 1e10]), latency=1e-5)),
        batch=draw.choice([4, 8, 12]),
    )


def searched(given: Case) -> tuple[float | None, float, float]:
    """The best step that the search finds, its lower bound, and the processor seconds that it takes."""
    began = time.process_time()
    try:
        found = search(given.profile, given.cluster, batch=given.batch, settings=SETTINGS)
    except InfeasibleError:
        return None, 0.0, time.process_time() - began
    return found.best.prediction.step_seconds, found.bound_seconds, time.process_time() - began


def bound(given: Case, best: float) -> float:
    """By the linear program, for all numbers of rows."""
    prices = CostModel.of(given.profile, given.cluster, batch=given.batch)
    return linear_bound(prices, given.batch, range(1, given.batch + 1), known=best)


def main() -> None:
    options = arguments(__doc__ or "", repeats=50)
    gaps, times, bounds, works, missed, infeasible = [], [], [], [], 0, 0
    for seed in range(options.repeats):
        given = case(seed)
        found, work, spent = searched(given)
        known = inf if found is None else found
        plan = best_plan(given.profile, given.cluster, batch=given.batch, settings=SETTINGS, known=known)
        best = found if plan is None else plan.prediction.step_seconds
        if best is None:
            infeasible += 1
            continue
        times.append(spent)
        bounds.append(bound(given, best) / best)
        works.append(work / best)
        if found is None:
            missed += 1
        else:
            gaps.append(found / best - 1)
        said = "none" if found is None else f"{gaps[-1]:+.2%}"
        print(seed, f"{best:.4f} s", said, f"bounds {works[-1]:.0%}, {bounds[-1]:.0%}", f"{spent:.2f} s", flush=True)
    gaps.sort()
    rows = [
        ("cases with a plan", f"{len(times)} of {options.repeats}"),
        ("best plan found by the search", f"{sum(gap < 1e-6 for gap in gaps)}"),
        ("within 1% of it", f"{sum(gap <= 0.01 for gap in gaps)}"),
        ("mean, largest gap", f"{sum(gaps) / len(gaps):.2%}, {gaps[-1]:.2%}"),
        ("no plan found though there is one", f"{missed}"),
        ("lower bound of the search, of the best step, median and least", _shares(works)),
        ("lower bound by the linear program", _shares(bounds)),
        ("the search, median and most", _spread(sorted(times))),
    ]
    report("search_exact", options, table(("", ""), rows))


def _shares(values: list[float]) -> str:
    return f"{sorted(values)[len(values) // 2]:.0%}, {min(values):.0%}"


def _spread(values: list[float]) -> str:
    return f"{values[len(values) // 2]:.2f} s, {values[-1]:.2f} s"


if __name__ == "__main__":
    main()
