"""The result of a search as text and as JSON: the plans, why the next best lost, what was left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale.cli.assumptions import assumptions_text
from whale.cli.plan_text import command, fullest, memory_text, stage_table, step_lines
from whale.cli.tables import text_table
from whale.errors import UsageError, WhaleError
from whale.ir.units import counted, time_text

if TYPE_CHECKING:
    from whale.commands.plan_writer import Choice
    from whale.commands.searching import Searched
    from whale.ir.cluster import Cluster
    from whale.planner.search import Candidate, StageChoice

    Answer = tuple[str, int, Cluster, Searched | WhaleError]

__all__ = ["against_the_best", "as_data", "as_text", "case_data", "cases_text", "in_short"]


def as_text(searched: Searched, cluster: Cluster, path: Path | None) -> str:
    """The plans, what was left out, the best plan stage by stage, and last the command that runs it."""
    best = searched.best
    workload = best.plan.workload or best.candidate.workload
    parts = [
        _choices(searched, cluster),
        _bound(searched),
        _left_out(searched),
        _experts(searched),
        "" if best.said else _cuts(best.candidate),
        _idle(best.candidate, cluster),
        "\n".join(
            [stage_table(best.plan, best.prediction, workload, cluster), "", *step_lines(best.plan, best.prediction)]
        ),
        assumptions_text(best.plan.assumptions),
        command(best.plan, cluster, path),
    ]
    return "\n\n".join(part for part in parts if part)


def _cuts(candidate: Candidate) -> str:
    """Layers of each stage, by position in the chain."""
    cuts = [f"{stage.first}-{stage.last - 1}" for stage in candidate.stages]
    return f"layers of the stages: {', '.join(cuts)}" if len(cuts) > 1 else ""


def _idle(candidate: Candidate, cluster: Cluster) -> str:
    """The devices that the plan does without."""
    busy = {rank for stage in candidate.stages for rank in stage.ranks}
    counts = Counter(device.type.name for device in cluster.devices if device.rank not in busy)
    return "left idle: " + ", ".join(f"{count} {name}" for name, count in counts.items()) if counts else ""


def _choices(searched: Searched, cluster: Cluster) -> str:

    best = searched.best
    rows = []
    for number, choice in enumerate((*searched.choices, *searched.refused), start=1):
        prediction = choice.prediction
        rows.append(
            [
                str(number),
                time_text(prediction.step_seconds),
                memory_text(fullest(list(prediction.memory))),
                f"{prediction.mfu:.1%}",
                f"{prediction.bubble:.1%}",
                "the best" if choice is best else against_the_best(choice, best),
                choice.said or in_short(choice.candidate, cluster),
            ]
        )
    return text_table("", ["", "step", "fullest device", "MFU", "bubble", "against the best", "plan"], rows)


def against_the_best(choice: Choice, best: Choice) -> str:
    """Why a plan is not the best one."""
    from whale.commands.searching import why_slower

    if choice.reason:
        return choice.reason
    if choice.compiled == best.compiled:
        return why_slower(best.prediction, choice.prediction)
    slower = why_slower(best.candidate.prediction, choice.prediction)  # by the search's predictions of both
    return f"not compiled; by the search {slower or 'no slower'}"


def _bound(searched: Searched) -> str:

    found, best = searched.found, searched.best
    before, bound = time_text(best.candidate.prediction.step_seconds), time_text(found.bound_seconds)
    said = f"Predicted: {before}, without compiling."
    if best.compiled:
        said = f"Before compiling: {before}; after: {time_text(best.prediction.step_seconds)}."
    return f"{said} Lower bound: {bound}."


def _left_out(searched: Searched) -> str:
    rows = [[one.family, one.reason, str(one.count)] for one in searched.found.dropped]
    return text_table("left out", ["plans with", "because", "number"], rows) if rows else ""


def _experts(searched: Searched) -> str:
    """How the devices of the best plan share experts, and why."""
    degrees = {stage.expert for stage in searched.best.candidate.stages}
    return "\n".join(f"experts {one}" for one in searched.shared if one.degree in degrees)


def in_short(candidate: Candidate, cluster: Cluster) -> str:
    """A plan in a line: stages that are alike, with their number, devices and degrees, and the micro-batches.

    >>> from whale.ir.cluster import Cluster
    >>> from whale.ir.workload import Prediction, Workload
    >>> from whale.planner.search import Candidate, StageChoice
    >>> stages = [
    ...     StageChoice(first=n, last=n + 1, ranks=(2 * n, 2 * n + 1), data=1, tensor=2, rows=(1,)) for n in range(2)
    ... ]
    >>> nothing = Prediction(step_seconds=1.0, step_seconds_interval=(1.0, 1.0))
    >>> work = Workload(world_size=4, micro_batches=8, stages=())
    >>> candidate = Candidate(
    ...     stages=tuple(stages), micro_batches=8, schedule="1f1b", prediction=nothing, workload=work
    ... )
    >>> in_short(candidate, Cluster.homogeneous(4))
    '2 stages of 2 device (1 x 2), 8 micro-batches'
    """
    parts = []
    for look, alike in groupby(_look(stage, cluster) for stage in candidate.stages):
        number = len(list(alike))
        parts.append(f"{number} stages of {look}" if number > 1 else look)
    shown = ", ".join(parts[:6]) + (f" and {len(parts) - 6} more" if len(parts) > 6 else "")
    schedule = "" if candidate.schedule == "1f1b" else f" {candidate.schedule}"
    return f"{shown}, {counted(candidate.micro_batches, 'micro-batch', 'es')}{schedule}"


def _look(stage: StageChoice, cluster: Cluster) -> str:
    from whale.planner.search.space import degrees_text

    types = dict.fromkeys(cluster.devices[rank].type.name for rank in stage.ranks)
    counts = [(sum(cluster.devices[rank].type.name == name for rank in stage.ranks), name) for name in types]
    inner = degrees_text(stage.tensor, stage.expert, stage.context)
    degrees = f" ({stage.data} x {inner})" if len(stage.ranks) > 1 else ""
    again = f" recompute {stage.recompute}" if stage.recompute != "none" else ""
    divided = f" zero {stage.level}" if stage.level else ""
    hosted = f" offload {stage.offload}" if stage.offload != "none" else ""
    return " + ".join(f"{count} {name}" for count, name in counts) + degrees + again + divided + hosted


# --- as data ----------------------------------------------------------------------------------------------------------


def as_data(searched: Searched) -> dict[str, Any]:
    """The result as JSON has it; the same for the same search."""
    found = searched.found
    return {
        "step_seconds": searched.best.prediction.step_seconds,
        "bound_seconds": found.bound_seconds,
        "gap": found.gap,
        "choices": [choice_data(choice) for choice in searched.choices],
        "refused": [choice_data(choice) for choice in searched.refused],
        "dropped": [{"family": one.family, "reason": one.reason, "count": one.count} for one in found.dropped],
        "points": [
            {"seconds": one.seconds, "memory": one.memory, "label": one.label, "reason": one.reason}
            for one in found.points
        ],
        "assumptions": list(searched.best.plan.assumptions),
        "plan": searched.best.plan.model_dump(mode="json", exclude_defaults=True),
    }


def choice_data(choice: Choice) -> dict[str, Any]:
    """One of the plans."""
    prediction, candidate = choice.prediction, choice.candidate
    device = fullest(list(prediction.memory))
    return {
        "step_seconds": prediction.step_seconds,
        "step_seconds_interval": list(prediction.step_seconds_interval),
        "compiled": choice.compiled,
        "searched_step_seconds": candidate.prediction.step_seconds,
        "memory_bytes": device.total,
        "memory_capacity_bytes": device.capacity,
        "host_memory_bytes": max((host.total for host in prediction.hosts), default=0),
        "mfu": prediction.mfu,
        "bubble": prediction.bubble,
        "micro_batches": candidate.micro_batches,
        "schedule": candidate.schedule,
        "stages": [_stage_data(stage) for stage in candidate.stages],
        "reason": choice.reason,
    }


def _stage_data(stage: StageChoice) -> dict[str, Any]:
    from whale.ir.ranks import write_ranks

    rows: Sequence[int] = stage.rows
    return {
        "layers": [stage.first, stage.last],
        "ranks": write_ranks(stage.ranks),
        "data": stage.data,
        "tensor": stage.tensor,
        "expert": stage.expert,
        "context": stage.context,
        "recompute": stage.recompute,
        "zero": stage.level,
        "offload": stage.offload,
        "rows": list(rows) if len(set(rows)) > 1 else rows[0],
    }


# --- what if ----------------------------------------------------------------------------------------------------------


def cases_text(answers: Sequence[Answer]) -> str:
    """A row for each case, compared with the first."""
    first = answers[0][3] if answers else None
    rows = []
    for change, batch, cluster, found in answers:
        devices = str(len(cluster.devices))
        if isinstance(found, Exception):
            rows.append([change, str(batch), devices, "-", "-", "-", "-", _reason(found)])
            continue
        prediction = found.best.prediction
        speed = batch / prediction.step_seconds
        than = "-"
        if first is not None and not isinstance(first, Exception):
            than = f"{speed / (answers[0][1] / first.best.prediction.step_seconds):.2f}"
        rows.append(
            [
                change,
                str(batch),
                devices,
                time_text(prediction.step_seconds),
                f"{speed:.1f}",
                than,
                memory_text(fullest(list(prediction.memory))),
                in_short(found.best.candidate, cluster),
            ]
        )
    return text_table(
        "", ["the cluster", "batch", "devices", "step", "rows/s", "times the first", "fullest device", "plan"], rows
    )


def _reason(error: WhaleError) -> str:
    return str(error) if isinstance(error, UsageError) else f"does not fit: {error}"


def case_data(answers: Sequence[Answer]) -> dict[str, Any]:
    """The cases as JSON has them."""
    cases = []
    for change, batch, cluster, found in answers:
        one = {"change": change, "batch": batch, "devices": len(cluster.devices)}
        if isinstance(found, Exception):
            cases.append({**one, "reason": str(found)})
        else:
            cases.append({**one, "bound_seconds": found.found.bound_seconds, **choice_data(found.best)})
    return {"cases": cases}
