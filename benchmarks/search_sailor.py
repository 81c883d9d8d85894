"""How good are the plans of the search on the yardstick of others: OPT-350M on A100-40 and V100-16, batch 1024?

    python benchmarks/search_sailor.py [--seconds 10] [--write DATE]

The model, its layer times and the links are those of Sailor's artifact (``data/sailor``, MIT licence, beside them), on
nodes of four devices; the search sees nothing else. What it finds is scored by the formulas of Sailor's simulator
(*strict*) and by the same with the links as they are (*physical*): ``sailor_scores.py`` says how they differ, and takes
no price from Whale. Strict scores are of the 40 best plans of a search that pays Sailor's prices, physical ones of the
40 best by Whale's own. The formulas add up messages that Whale's executor hides, so cuts (and whether a micro-batch has
twice or half the rows) are fitted to the formula; devices, degrees and stages are as found. *Whale's best* is scored as
it is. A last micro-batch of fewer rows is counted as such; *whole micro-batches* counts it as full, as Sailor does.

Figures of others, by the strict formulas, were taken earlier from the plans of their authors' programs; nothing of
theirs runs here. *Uneven* is the best of plans like Sailor's with micro-batches of another size for each type, by brute
force; *prototype* is a search over unlike pipelines side by side, which nothing executes; the *bound* is that of a
linear program over all pipelines and shares of the batch, with the strict rule for reductions. The figures of the A100s
alone come out of ``sailor_scores.py`` too (``tests/unit/test_sailor_scores.py``); the other plans are not at hand.

The *bound* is that of a linear program over stages of one pipeline by the prices of the search (``search_bound.py``),
which ignores messages and sums of gradients; *unlike pipelines* is the bound of another, over all pipelines and
shares of the batch, with the strict rule for reductions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path

from sailor_prices import STACK, SailorPrices
from sailor_scores import Physical, Score, Slice, Stage, Strict
from search_bound import linear_bound

from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.planner.catalog import device_types_with
from whale.planner.cost.stage import CostModel
from whale.planner.profile_import import import_sailor
from whale.planner.search import Found, SearchSettings, StageChoice, search

DATA = Path(__file__).parent / "data" / "sailor"
BATCH = 1024
SHARED = "on two cores that did other work meanwhile: the seconds are no measure of the search"
COUNTS = (*(1 << power for power in range(11)), 3, 5, 6, 7, 9, 10, 11, 12)
"""Numbers of micro-batches that the bound allows."""

TOP = 40
"""Plans of each search that are scored by the formulas."""

CLUSTER = """
[links]
inter_node = {{bandwidth = "50 Gbit/s", latency = "30 us", adapters = 1}}
[[nodes]]
count = {fast}
devices = 4
device = "A100-40"
links.intra_node = {{bandwidth = "300 GB/s", latency = "3 us"}}
[[nodes]]
count = {slow}
devices = 4
device = "V100-16"
links.intra_node = {{bandwidth = "150 GB/s", latency = "3 us"}}
"""
"""Four connections between two nodes reach 48 Gbit/s in the curves; within a node it is NVLink."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mix, with what others reach, in steps per second; None: nothing found or nothing published."""

    fast: int
    slow: int
    rivals: dict[str, float | None]
    prototype: float
    prototype_physical: float
    bound: float

    @property
    def name(self) -> str:
        return f"{self.fast} A100 + {self.slow} V100"


def case(fast: int, slow: int, rivals: Sequence[float | None], ours: Sequence[float]) -> Case:
    names = ("A100s alone", "AMP", "Metis", "HexiScale", "Sailor", "uneven")
    prototype, physical, bound = ours
    rows = dict(zip(names, rivals, strict=True))
    return Case(fast=fast, slow=slow, rivals=rows, prototype=prototype, prototype_physical=physical, bound=bound)


CASES = (
    case(32, 96, (0.130, 0.132, 0.124, 0.118, 0.1700, 0.2035), (0.2114, 0.228, 0.226)),
    case(80, 240, (0.272, 0.206, None, 0.239, 0.3609, 0.4064), (0.4194, 0.480, 0.476)),
    case(128, 384, (0.418, 0.312, None, None, 0.5229, 0.5589), (0.5837, 0.672, 0.658)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="the search on Sailor's clusters, by Sailor's formulas")
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit of each search")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    profile = import_sailor(DATA)
    strict_rows, physical_rows, plans = [], [], []
    for one in CASES:
        cluster = cluster_of(profile, one)
        settings = SearchSettings(time_limit=options.seconds, top=TOP)
        strict, physical = (rules(profile=profile, cluster=cluster, batch=BATCH) for rules in (Strict, Physical))
        theirs = search(profile, cluster, batch=BATCH, settings=settings, prices=SailorPrices.by(strict))
        prices = CostModel.of(profile, cluster, batch=BATCH, stack=STACK)
        own = search(profile, cluster, batch=BATCH, settings=settings, prices=prices)
        their_bound = linear_bound(SailorPrices.by(strict), BATCH, COUNTS, known=theirs.best.prediction.step_seconds)
        own_bound = linear_bound(
            prices,
            BATCH,
            COUNTS,
            known=own.best.prediction.step_seconds,
        )
        found, chain = best_by(strict, theirs)
        whole = strict.score(chain, whole=True).per_second
        strict_rows.append(
            (
                one.name,
                *(_shown(value) for value in one.rivals.values()),
                _shown(one.prototype),
                _shown(whole),
                f"**{found:.4f}**",
                f"{found / (one.rivals['Sailor'] or 1) - 1:+.0%}",
                _shown(one.bound),
                f"{found / one.bound:.0%}",
                _shown(1 / their_bound),
                f"{found * their_bound:.0%}",
                f"{theirs.seconds:.2f}",
            )
        )
        plans += list(described(one, cluster, chain, strict.score(chain), "strict"))
        found, chain = best_by(physical, own)
        physical_rows.append(
            (
                one.name,
                _shown(one.prototype_physical),
                _shown(physical.score(as_chain(own.best.stages)).per_second),
                f"**{found:.4f}**",
                _shown(1 / own.best.prediction.step_seconds),
                _shown(1 / own_bound),
                f"{own_bound / own.best.prediction.step_seconds:.0%}",
                f"{own.seconds:.2f}",
                str(own.tried),
            )
        )
        plans += list(described(one, cluster, chain, physical.score(chain), "physical"))
    head = ("steps/s, strict", *CASES[0].rivals, "prototype", "Whale, whole micro-batches", "Whale", "over Sailor")
    first = table((*head, "unlike pipelines", "of it", "bound", "of it", "search s"), strict_rows)
    head = (
        "steps/s, physical",
        "prototype",
        "Whale's best",
        "best by this score",
        "Whale's own prediction",
        "its bound",
    )
    second = table((*head, "of it", "search s", "plans scored"), physical_rows)
    text = "\n\n".join((first, second, "\n".join(plans)))
    print(text)
    if options.write:
        name = f"search_sailor_{options.write}.md"
        command = f"`python benchmarks/search_sailor.py --seconds {options.seconds:g}`"
        parts = (
            "# The search on Sailor's clusters",
            (__doc__ or "").strip(),
            text,
            f"- {options.write}: {command}, {SHARED}",
        )
        (Path(__file__).parent / "results" / name).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def best_by(rules: Strict, found: Found) -> tuple[float, tuple[Stage, ...]]:
    """The best of what was found by these rules, with cuts and micro-batches that suit them: they count messages that
    Whale hides. Devices and degrees stay."""
    best: tuple[float, tuple[Stage, ...]] = (0.0, ())
    for candidate in found.candidates:
        chain = as_chain(candidate.stages)
        scored = rules.score(chain).per_second
        while True:
            moved = max(((rules.score(other).per_second, other) for other in varied(chain)), key=lambda one: one[0])
            if moved[0] <= scored:
                break
            scored, chain = moved
        if scored > best[0]:
            best = scored, chain
    return best


def varied(chain: Sequence[Stage]) -> Iterator[tuple[Stage, ...]]:
    """The chain with one or two of its cuts moved by a layer, or with micro-batches of twice or half the rows."""
    cuts = [stage.first for stage in chain[1:]]
    for moves in product((0, -1, 1), repeat=len(cuts)):
        ends = [0, *(cut + move for cut, move in zip(cuts, moves, strict=True)), chain[-1].last]
        if sum(map(abs, moves)) <= 2 and all(a < b for a, b in pairwise(ends)):
            yield tuple(replace(stage, first=a, last=b) for stage, (a, b) in zip(chain, pairwise(ends), strict=True))
    if 2 * chain[0].rows <= BATCH:
        yield with_rows(chain, 2, 1)
    if all(part.rows % 2 == 0 for stage in chain for part in stage.slices):
        yield with_rows(chain, 1, 2)


def with_rows(chain: Sequence[Stage], times: int, parts: int) -> tuple[Stage, ...]:
    return tuple(
        replace(stage, slices=tuple(replace(part, rows=part.rows * times // parts) for part in stage.slices))
        for stage in chain
    )


def cluster_of(profile: ModelProfile, one: Case) -> Cluster:
    text = CLUSTER.format(fast=one.fast // 4, slow=one.slow // 4)
    return Cluster.parse(text, source=one.name, catalog=device_types_with(profile))


def as_chain(stages: Sequence[StageChoice]) -> tuple[Stage, ...]:
    """The stages of a plan as the scores read them."""
    return tuple(
        Stage(
            first=stage.first,
            last=stage.last,
            slices=tuple(Slice(ranks=stage.slice(index), rows=rows) for index, rows in enumerate(stage.rows)),
        )
        for stage in stages
    )


def described(one: Case, cluster: Cluster, chain: Sequence[Stage], score: Score, rules: str) -> Iterator[str]:
    yield (
        f"- {one.name}, {rules}: {score.per_second:.4f} steps/s, {score.micro_batches} micro-batches of "
        f"{chain[0].rows} rows, "
        f"{score.straggler * 1e3:.1f} ms on the slowest stage, {score.reduction:.3f} s of reduction, "
        f"{score.memory:.0%} of memory"
    )
    for stage in chain:
        counts: dict[tuple[str, int, int], int] = {}
        for part in stage.slices:
            key = (cluster.devices[part.ranks[0]].type.name, len(part.ranks), part.rows)
            counts[key] = counts.get(key, 0) + 1
        slices = ", ".join(f"{num} x ({tensor} {name}, {rows} rows)" for (name, tensor, rows), num in counts.items())
        yield f"  - layers [{stage.first}, {stage.last}): {slices}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}".rstrip("0")


if __name__ == "__main__":
    main()
