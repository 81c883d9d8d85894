"""``--failures`` and ``--fallback`` of ``whale simulate``: what failures of machines leave of a run.

What they leave is ``whale.planner.failures``'s; this file reads the options and shows the result. It loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from whale.cli.tables import text_table
from whale.errors import UsageError
from whale.ir.units import duration_text, parse_quantity
from whale.planner.failures import Failures, Outlook, outlook

if TYPE_CHECKING:
    from whale.ir.workload import Workload

__all__ = ["GivenFailures", "failures_data", "failures_text", "outlook_of"]

DURATIONS = {"mtbf": "mtbf", "save": "saving", "restart": "restart", "repair": "repair", "every": "interval"}
COUNTS = {"node": "node", "spares": "spares"}
"""Names of the option and of `Failures`: times, and whole numbers."""


class GivenFailures(click.ParamType):
    """How machines fail, as ``mtbf=5y,save=20s``."""

    name = "failures"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Failures:
        """Read the text."""
        if isinstance(value, Failures):
            return value
        found: dict[str, Any] = {}
        for part in str(value).split(","):
            name, equals, text = (word.strip() for word in part.partition("="))
            if not equals or name not in DURATIONS | COUNTS:
                known = ", ".join([*DURATIONS, *COUNTS])
                self.fail(f"{part.strip()!r}: write NAME=VALUE, such as mtbf=5y; the names are {known}", param, ctx)
            field = (DURATIONS | COUNTS)[name]
            if field in found:
                self.fail(f"{name} is given twice", param, ctx)
            if name in COUNTS:
                if not text.isdecimal() or len(text) > 6:
                    self.fail(f"{name}={text!r:.40}: write a whole number", param, ctx)
                found[field] = int(text)
                continue
            try:
                found[field] = parse_quantity(text, "duration")
            except ValueError as error:
                self.fail(f"{name}: {error}", param, ctx)
        missing = [name for name in ("mtbf", "save") if DURATIONS[name] not in found]
        if missing:
            what = {"mtbf": "how often a device fails", "save": "how long a checkpoint holds training up"}
            self.fail(f"{missing[0]} is missing: say {what[missing[0]]}, such as mtbf=5y,save=20s", param, ctx)
        try:
            return Failures(**found)
        except UsageError as error:
            self.fail(str(error), param, ctx)


def outlook_of(
    failures: Failures,
    workload: Workload,
    step_seconds: float,
    rows: float | None,
    fallbacks: Iterable[tuple[str, Workload, float | None]],
) -> Outlook:
    """The part of a run that failures leave, whose job may change to plans for fewer devices.

    Args:
        failures: of the devices.
        workload: of the plan for all devices.
        step_seconds: of it.
        rows: of a step, if known; else all plans have as many.
        fallbacks: names, workloads and rows of the plans for fewer devices.

    Raises:
        UsageError: a fallback is not for fewer nodes.
    """
    from whale.planner.simulation.simulate import simulate_alike

    speeds = []
    for name, other, other_rows in fallbacks:
        if other.world_size >= workload.world_size:
            raise UsageError(
                f"--fallback {name} is for {other.world_size} devices and FILE for {workload.world_size}: a job "
                "changes to it when nodes are lost, so it must be for fewer"
            )
        gone = -(-(workload.world_size - other.world_size) // failures.node)
        ratio = other_rows / rows if other_rows and rows else 1.0
        speeds.append((gone, ratio * step_seconds / simulate_alike(other).step_seconds))
    return outlook(failures, workload.world_size, speeds)


def failures_data(found: Outlook) -> dict[str, Any]:
    """The result as a value that JSON can hold; times in seconds, parts of the time."""
    return {
        "mtbf_seconds": found.mtbf,
        "interval_seconds": found.interval,
        "trained": found.trained,
        "saving": found.saving,
        "lost": found.lost,
        "missing_nodes": found.missing,
        "short": found.short,
        "waiting": found.waiting,
        "elastic": found.elastic,
    }


def failures_text(failures: Failures, found: Outlook, devices: int, step_seconds: float) -> str:
    """The result for a reader."""
    nodes = -(-devices // failures.node)
    lines = [
        f"failures: one of {nodes:,} nodes about every {duration_text(found.mtbf)}; a checkpoint every "
        f"{duration_text(found.interval)} ({max(1, round(found.interval / step_seconds)):,} steps)",
        f"while all nodes are there {found.trained:.1%} of the time trains, {found.saving:.1%} saves, and "
        f"{found.lost:.1%} is lost to restarts and what they repeat",
    ]
    if failures.repair:
        spares = f" and {failures.spares} are spare" if failures.spares else ""
        lines.append(
            f"{found.missing:.3g} nodes are under repair on average{spares}: too few are there for {found.short:.1%} "
            "of the time"
        )
    rows = [["that waits for repairs" if failures.repair else "that goes on at once", f"{found.waiting:.1%}"]]
    if found.elastic is not None:
        rows.append(["that goes on with fewer nodes", f"{found.elastic:.1%}"])
    return "\n".join([*lines, text_table("", ["a job", "rows per second of a run without failures"], rows)])
