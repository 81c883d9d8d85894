"""The explanation of a plan as tables: the breakdown of its step, what limits it, which ranks wait for which, and what
would help. It knows no cluster."""

from __future__ import annotations

from collections.abc import Iterator

from whale.ir.units import time_text
from whale.planner.explain import LEAST_GAIN, Change, Explanation
from whale.planner.report.markup import Markup, element, table
from whale.planner.simulation.timeline import PARTS, Timeline

__all__ = ["reasons_view"]

_MEANINGS = {
    "compute": "tasks: operators",
    "communication": "tasks: collectives inside them",
    "pipeline": "waiting for another stage: the bubble",
    "transfer": "waiting for a message in flight",
    "stall": "waiting for slower devices in its group",
    "reduction": "waiting for gradient reductions",
    "update": "the optimizer",
    "overhead": "everything else",
}


def reasons_view(found: Explanation, timeline: Timeline) -> Iterator[Markup]:
    """A sentence and tables; ``found`` belongs to the same workload as ``timeline``."""
    yield element("p", f"{found.bound[:1].upper()}{found.bound[1:]}.")
    yield _breakdown(found, timeline)
    if found.waits:
        rows = [
            [
                f"rank {wait.rank}",
                f"rank {wait.peer}" if wait.peer >= 0 else f"its own {wait.part}",
                wait.part,
                time_text(wait.seconds),
            ]
            for wait in found.waits
        ]
        yield table("Who waits longest", ["who", "for whom", "part", "in a step"], rows, numbers=(3,))
    changes = [*found.changes, *found.others]
    if changes:
        rows = [_change(change, found.step_seconds) for change in changes]
        head = ["change", "step", "saves", ""]
        yield table("What would help, by simulating the plan again", head, rows, numbers=(1, 2))


def _breakdown(found: Explanation, timeline: Timeline) -> Markup:
    step, count = timeline.step_seconds or 1.0, len(timeline.ranks)
    rows = []
    for part in PARTS:
        own = timeline.breakdowns[found.rank][part]
        mean = sum(parts[part] for parts in timeline.breakdowns.values()) / count
        if own or mean:
            rows.append([part, _MEANINGS[part], time_text(own), f"{own / step:.1%}", f"{mean / step:.1%}"])
    rows.append(["step", "", time_text(timeline.step_seconds), "", ""])
    busiest = f"rank {found.rank}, the busiest"
    head = ["part", "is", busiest, "of the step", "all ranks"]
    return table("Where the step goes", head, rows, numbers=(2, 3, 4))


def _change(change: Change, before: float) -> list[str]:
    saved = 1 - change.step_seconds / before if before else 0.0
    verdict = "does not fit in memory" if change.fits is False else "" if saved >= LEAST_GAIN else "does not help"
    return [change.what, time_text(change.step_seconds), f"{saved:.1%}" if saved > 0 else "", verdict]
