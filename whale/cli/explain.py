"""``whale explain`` and ``whale diff``: what bounds a plan's step and what would help; what two plans do differently.

The answers are ``whale.planner.explain``'s. Neither needs the model or torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whale.cli.options import note, verbosity_options
from whale.errors import InputFileError
from whale.ir.units import bytes_text, time_text

if TYPE_CHECKING:
    from whale.ir.workload import Prediction
    from whale.planner.explain import Change, Difference, Explanation, Saving

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("file", type=_FILE)
@click.option(
    "--changes", type=click.IntRange(0, 1000), default=3, metavar="N", help="Number of changes to propose [3]."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@verbosity_options
def explain(file: Path, changes: int, as_json: bool) -> None:
    """Say what bounds the step of a plan, who waits for whom, and what would help most.

    FILE is a plan that 'whale plan' made. Each change is simulated with the plan's own numbers.
    """
    from whale.ir.plan import Plan
    from whale.planner.explain import explain as explain_workload
    from whale.planner.explain import savings
    from whale.planner.simulation.simulate import check_workload

    plan = Plan.load(file)
    if plan.workload is None:
        raise InputFileError(
            "the plan has no workload to explain: it was written by hand; make it with 'whale plan'", path=file
        )
    if not plan.prediction_is_current:
        note(f"whale: note: {file} was edited after its workload was computed; the old plan is explained")
    try:
        check_workload(plan.workload)
    except ValueError as error:
        raise InputFileError(str(error), path=file) from error
    found = explain_workload(plan.workload, plan.prediction, plan=plan, num_changes=changes)
    saved = savings(plan)
    if as_json:
        data = {**dataclasses.asdict(found), "savings": [dataclasses.asdict(saving) for saving in saved]}
        click.echo(json.dumps(data, indent=2))
        return
    click.echo("\n".join([as_text(found), *_memory(plan.prediction, saved)]))


def _memory(prediction: Prediction | None, saved: Sequence[Saving]) -> list[str]:
    """The fullest device, and what would free most of it."""
    if prediction is None or not prediction.memory:
        return []
    fullest = max(prediction.memory, key=lambda device: device.share)
    part = fullest.share
    of = f"{bytes_text(fullest.total)} of {bytes_text(fullest.capacity)} ({part:.0%})"
    lines = ["", f"memory: {of} on rank {fullest.rank}, the fullest; what would free most, about:"]
    lines += [f"  {saving.what}: {'at most ' * saving.is_most}{bytes_text(saving.bytes)}" for saving in saved]
    return lines if saved else [*lines[:1], lines[1].partition(";")[0]]


def as_text(found: Explanation) -> str:
    """The explanation for a reader."""
    lines = [f"{time_text(found.step_seconds)} a step: {found.bound}", f"rank {found.rank}, the busiest:"]
    parts = [(part, seconds) for part, seconds in found.breakdown.items() if seconds > 0]
    lines += [f"  {part:<14}{time_text(seconds):>14}  {seconds / found.step_seconds:6.1%}" for part, seconds in parts]
    if found.waits:
        lines += ["", "who waits:"]
        for wait in found.waits:
            peer = f"rank {wait.peer}" if wait.peer >= 0 else f"its own {wait.part}"
            part = f" ({wait.part})" if wait.peer >= 0 else ""
            lines.append(f"  rank {wait.rank} waits {time_text(wait.seconds)} for {peer}{part}")
    lines += ["", "what would help most:" if found.changes else "none of the simulated changes would help"]
    for change in found.changes:
        lines.append(f"  {_change(change, found.step_seconds)}")
    refused = [change for change in found.others if change.fits is False]
    lines += [f"  (does not fit: {change.what})" for change in refused]
    return "\n".join(lines)


def _change(change: Change, before: float) -> str:

    saved = 1 - change.step_seconds / before
    return f"{change.what}: {time_text(change.step_seconds)}, {saved:.1%} less"


@click.command()
@click.argument("first", type=_FILE)
@click.argument("second", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@verbosity_options
def diff(first: Path, second: Path, as_json: bool) -> None:
    """Show what two plans decide differently, and what that should change."""
    from whale.ir.plan import Plan
    from whale.planner.explain import difference

    plans = [Plan.load(path) for path in (first, second)]
    for path, plan in zip((first, second), plans, strict=True):
        if plan.prediction is None or not plan.prediction_is_current:
            note(f"whale: note: {path} has no prediction of its current content")
    found = difference(*plans)
    click.echo(json.dumps(dataclasses.asdict(found), indent=2) if as_json else diff_as_text(found))


def diff_as_text(found: Difference) -> str:
    """The difference for a reader."""
    if not found.fields:
        return "the plans decide the same"
    lines = [f"{path}: {_value(one)} -> {_value(other)}" for path, (one, other) in found.fields.items()]
    effects = [(name, one, other) for name, (one, other) in found.effects.items() if one != other]
    if effects:
        lines += ["", "predicted, with the parts of the busiest rank of each:"]
    for name, one, other in effects:
        ratio = f" (x {other / one:.3f})" if one and other else ""
        lines.append(f"  {_effect(name, one)} -> {_effect(name, other, named=False)}{ratio}")
    return "\n".join(lines)


def _value(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _effect(name: str, value: float | None, *, named: bool = True) -> str:

    label = name.removesuffix("_seconds").removesuffix("_bytes").replace("_", " ") + " " if named else ""
    if value is None:
        return f"{label}unknown"
    if name.endswith("_seconds"):
        return label + time_text(value)
    return f"{label}{bytes_text(value)}" if name.endswith("_bytes") else f"{label}{value:.1%}"
