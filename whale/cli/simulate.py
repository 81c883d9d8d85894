"""``whale simulate``: what the ranks do during a step, from a plan or from a workload alone; loads no torch."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whale.cli.failures import GivenFailures, Step, failures_data, failures_text, outlook_of
from whale.cli.files import refuse_same, write_whole
from whale.cli.options import AT_LEAST_1, note, verbosity_options
from whale.errors import InputFileError, UsageError
from whale.ir.units import bytes_text, counted, time_text
from whale.planner.schedules.orders import SCHEDULES
from whale.planner.simulation.gantt import LEGEND, breakdown_table, gantt
from whale.planner.simulation.timeline import Event, Timeline
from whale.planner.simulation.trace import trace_of

if TYPE_CHECKING:
    from whale.ir.workload import Workload
    from whale.planner.failures import Failures


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--schedule", metavar="NAME", type=click.Choice(SCHEDULES), help="Another schedule than the file's.")
@click.option("--micro-batches", type=AT_LEAST_1, metavar="M", help="Another number, of the same size.")
@click.option(
    "--failures",
    type=GivenFailures(),
    metavar="mtbf=5y,save=20s,...",
    help="What failures leave of a long run: time between failures of a device, time to save; also restart=, repair=, "
    "every= (between checkpoints) [Daly's], node= (devices that fail together) and spares= (nodes).",
)
@click.option(
    "--fallback",
    "fallbacks",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="A plan for fewer devices, to which an elastic job changes after a failure; may be repeated.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write a trace for Perfetto.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@verbosity_options
def simulate(
    file: Path,
    schedule: str | None,
    micro_batches: int | None,
    failures: Failures | None,
    fallbacks: tuple[Path, ...],
    output: Path | None,
    as_json: bool,
) -> None:
    """Simulate a step and show what each rank does when, and what it waits for.

    FILE is a plan that 'whale plan' made, or a workload: the times of stages and links as JSON.
    """
    from whale.planner.simulation.simulate import simulate as simulate_workload

    refuse_same({"-o": output}, {"FILE": file, **{f"--fallback {one}": one for one in fallbacks}})
    if fallbacks and failures is None:
        raise UsageError("--fallback is a plan after a failure: give --failures too, such as mtbf=5y,save=20s")
    step = _read(file)
    changes = {"schedule": schedule, "micro_batches": micro_batches}
    workload = step.workload.model_copy(update={name: value for name, value in changes.items() if value is not None})
    timeline = simulate_workload(workload)
    if output is not None:
        write_trace(timeline, output)
    outlook = None
    if failures is not None:
        full, own_full = (one.micro_batches - 1 + one.last_share for one in (workload, step.workload))
        rows = step.rows and step.rows * full / own_full
        others = ((str(one), _read(one)) for one in fallbacks)
        outlook = outlook_of(failures, replace(step, rows=rows), timeline.step_seconds, others)
    if as_json:
        data = as_data(timeline) if outlook is None else {**as_data(timeline), "failures": failures_data(outlook)}
        click.echo(json.dumps(data, indent=2))
    else:
        width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100
        click.echo(as_text(timeline, workload, width))
        if failures is not None and outlook is not None:
            click.echo(f"\n{failures_text(failures, outlook, step.devices, timeline.step_seconds)}")


def read_workload(path: Path) -> Workload:
    """Read the workload of a plan, or a file that is one.

    Raises:
        InputFileError: neither, a plan without a workload, or a workload that contradicts itself.
    """
    return _read(path).workload


def _read(path: Path) -> Step:
    """The step of a plan or of a workload file."""
    from whale.ir.document import read_document
    from whale.ir.plan import Plan
    from whale.ir.record import read_record
    from whale.ir.workload import Workload
    from whale.planner.simulation.simulate import check_workload

    document = read_document(path, "json")
    if "workload" in document.value or "version" in document.value:
        plan = Plan.of_document(document)
        if plan.workload is None:
            raise InputFileError(
                "the plan has no workload to simulate: it was written by hand; make it with 'whale plan', or "
                "ask 'whale estimate' for such degrees",
                path=path,
            )
        if not plan.prediction_is_current:
            note(f"whale: note: {path} was edited after its workload was computed; the simulation is of the old plan")
        used = len({rank for stage in plan.stages for rank in stage.ranks})
        step = Step(workload=plan.workload, devices=used, rows=plan.batch)
    else:
        workload = read_record(Workload, document)
        step = Step(workload=workload, devices=workload.world_size, rows=None)
    try:
        check_workload(step.workload)
    except UsageError as error:
        raise InputFileError(str(error), path=path) from error
    return step


def write_trace(timeline: Timeline, path: Path, option: str = "-o") -> None:
    """Write the trace as JSON to the file that *option* names."""
    write_whole(path, json.dumps(trace_of(timeline)), option)
    note(f"wrote {path}: open it at https://ui.perfetto.dev")


def as_data(timeline: Timeline) -> dict[str, Any]:
    """The result as a value that JSON can hold; times in seconds."""
    return {
        "step_seconds": timeline.step_seconds,
        "span_seconds": timeline.span_seconds,
        "bubble": timeline.bubble,
        "last_rank": timeline.last_rank,
        "breakdown": dict(timeline.breakdowns[timeline.busiest_rank]),
        "breakdown_rank": timeline.busiest_rank,
        "in_flight": [timeline.in_flight[stage] for stage in sorted(timeline.in_flight)],
        "ranks": [
            {"rank": rank, "breakdown": dict(timeline.breakdowns[rank]), "activation_bytes": timeline.peak_bytes(rank)}
            for rank in timeline.ranks
        ],
        "critical_path": [_event(event) for event in timeline.critical_path()],
    }


def as_text(timeline: Timeline, workload: Workload, width: int) -> str:
    """The chart of the ranks, and where the time goes."""
    fullest = max(timeline.ranks, key=lambda rank: (timeline.peak_bytes(rank), -rank))
    held = timeline.peak_bytes(fullest)
    waits: dict[tuple[int, str], float] = {}
    for event in timeline.events:
        if event.kind == "idle" and event.rank == timeline.last_rank and event.peer >= 0:
            key = (event.peer, event.reason)
            waits[key] = waits.get(key, 0.0) + event.seconds
    longest = sorted(waits.items(), key=lambda wait: (-wait[1], wait[0]))[:3]
    return "\n".join(
        [
            f"{workload.schedule}, {counted(len(workload.stages), 'stage')}, "
            f"{counted(workload.micro_batches, 'micro-batch', 'es')}: "
            f"{time_text(timeline.step_seconds)} a step, bubble {timeline.bubble:.1%}",
            "",
            gantt(timeline, width),
            LEGEND,
            "",
            breakdown_table(timeline),
            "",
            *(
                f"rank {timeline.last_rank} waits {time_text(seconds)} for "
                + (f"its own {reason}" if peer == timeline.last_rank else f"rank {peer} ({reason})")
                for (peer, reason), seconds in longest
            ),
            f"activations: at most {bytes_text(held)}, on rank {fullest}; micro-batches in flight by stage: "
            + " ".join(str(timeline.in_flight[stage]) for stage in sorted(timeline.in_flight)),
        ]
    )


def _event(event: Event) -> dict[str, Any]:
    return {"event": str(event), "rank": event.rank, "start": event.start, "end": event.end}
