"""``--failures`` and ``--fallback`` of ``whale simulate``: what failures of machines leave of a run.

What they leave is ``whale.planner.failures``'s; this file reads the options and shows the result. It loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from whale.cli.tables import text_table
from whale.errors import UsageError
from whale.ir.units import counted, duration_text, parse_quantity
from whale.planner.failures import Failures, Outlook, outlook

if TYPE_CHECKING:
    from whale.ir.workload import Workload

__all__ = ["GivenFailures", "Step", "failures_data", "failures_text", "outlook_of"]

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


@dataclass(frozen=True, kw_only=True)
class Step:
    """The workload of a step, the devices that compute a stage (failures of others hold nothing up),
    and the rows, if known."""

    workload: Workload
    devices: int
    rows: float | None


def outlook_of(failures: Failures, step: Step, step_seconds: float, fallbacks: Iterable[tuple[str, Step]]) -> Outlook:
    """The part of a run that failures leave, whose job may change to plans for fewer devices.

    Args:
        failures: of the devices.
        step: of the plan for all devices.
        step_seconds: of it.
        fallbacks: names and steps of the plans for fewer devices; where rows are not known, all have as many.

    Raises:
        UsageError: a fallback does not use fewer devices, or is faster.
    """
    from whale.planner.simulation.simulate import simulate_alike

    speeds = []
    for name, other in fallbacks:
        if other.devices >= step.devices:
            raise UsageError(
                f"--fallback {name} uses {other.devices} devices and FILE {step.devices}: a job changes to it when "
                "nodes are lost, so it must use fewer"
            )
        gone = -(-(step.devices - other.devices) // failures.node)
        ratio = other.rows / step.rows if other.rows and step.rows else 1.0
        speed = ratio * step_seconds / simulate_alike(other.workload).step_seconds
        if speed > 1:
            raise UsageError(
                f"--fallback {name} is {speed:.3g} x as fast as FILE, on fewer devices: run it in the place of FILE"
            )
        speeds.append((gone, speed))
    return outlook(failures, step.devices, speeds)


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
    nodes, units = -(-devices // failures.node), "nodes" if failures.node > 1 else "devices"
    steps = counted(max(1, round(found.interval / step_seconds)), "step")
    whose, there = ("the node", "it is") if nodes == 1 else (f"one of {nodes:,} {units}", f"all {units} are")
    lines = [
        f"failures: {whose} about every {duration_text(found.mtbf)}; a checkpoint every "
        f"{duration_text(found.interval)} ({steps})",
        f"while {there} there {found.trained:.1%} of the time trains, {found.saving:.1%} saves, and "
        f"{found.lost:.1%} is lost to restarts and what they repeat",
    ]
    if failures.repair:
        spares = f" and {failures.spares} are spare" if failures.spares else ""
        lines.append(
            f"{found.missing:.3g} {units} are under repair on average{spares}: too few are there for {found.short:.1%} "
            "of the time"
        )
    rows = [["that waits for repairs" if failures.repair else "that goes on at once", f"{found.waiting:.1%}"]]
    if found.elastic is not None:
        rows.append([f"that goes on with fewer {units}", f"{found.elastic:.1%}"])
    return "\n".join([*lines, text_table("", ["a job", "rows per second of a run without failures"], rows)])
