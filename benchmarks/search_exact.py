"""Distance of the search from the optimum on random chains and mixed devices, each case solved exactly.

    python benchmarks/search_exact.py --repeats 50 --write 2026-11-21

Cases have up to 6 devices of 3 types and 8 layers of 2 kinds, with memory that binds in some, sends and fixed costs
that matter in some. The search is run as it is for large clusters, without its exact end, and then with it.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from harness import arguments, report, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chains import card, chain, layer, machines
from whale.errors import InfeasibleError
from whale.ir.cluster import Cluster, Link
from whale.ir.profile import ModelProfile
from whale.planner.search import SearchSettings, exact, search

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


def seconds(given: Case) -> tuple[float | None, bool, float]:
    """The best step, whether it is proven, and how long that took."""
    began = time.process_time()
    try:
        found = search(given.profile, given.cluster, batch=given.batch, settings=replace(SETTINGS))
    except InfeasibleError:
        return None, True, time.process_time() - began
    return found.best.prediction.step_seconds, found.exact, time.process_time() - began


def main() -> None:
    options = arguments(__doc__ or "", repeats=50)
    gaps, times, missed, most = [], [], 0, exact.MOST_DEVICES
    for seed in range(options.repeats):
        given = case(seed)
        best, proven, spent = seconds(given)
        exact.MOST_DEVICES = 0
        heuristic, _, quick = seconds(given)
        exact.MOST_DEVICES = most
        if best is None:
            continue
        assert proven
        times.append((spent, quick))
        if heuristic is None:
            missed += 1
        else:
            gaps.append(heuristic / best - 1)
        print(seed, f"{best:.4f} s", "none" if heuristic is None else f"{gaps[-1]:+.2%}", f"{spent:.2f} s", flush=True)
    gaps.sort()
    rows = [
        ("cases with a plan", f"{len(times)} of {options.repeats}"),
        ("best plan found without the exact end", f"{sum(gap < 1e-6 for gap in gaps)}"),
        ("within 1% of it", f"{sum(gap <= 0.01 for gap in gaps)}"),
        ("mean, largest gap", f"{sum(gaps) / len(gaps):.2%}, {gaps[-1]:.2%}"),
        ("no plan found though there is one", f"{missed}"),
        ("search to the end, median and most", _spread(sorted(one for one, _ in times))),
        ("without the exact end", _spread(sorted(other for _, other in times))),
    ]
    report("search_exact", options, table(("", ""), rows))


def _spread(values: list[float]) -> str:
    return f"{values[len(values) // 2]:.2f} s, {values[-1]:.2f} s"


if __name__ == "__main__":
    main()
