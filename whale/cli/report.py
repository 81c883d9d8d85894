"""``whale report``: one page of HTML with pictures of a plan, and the trace of its step; loads no torch.

The page is ``whale.planner.report``'s; this file reads what it is made of, and writes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from whale.cli.files import refuse_same, write_whole
from whale.cli.options import note, verbosity_options
from whale.cli.simulate import write_trace
from whale.errors import InputFileError, PlanMismatchError, UsageError

if TYPE_CHECKING:
    from whale.ir.cluster import Cluster
    from whale.ir.plan import Plan
    from whale.planner.simulation.timeline import Timeline

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("file", type=_FILE)
@click.option("-o", "--output", type=_FILE, metavar="FILE", help="Write the page to this file [stdout].")
@click.option("--cluster", "cluster_file", type=_FILE, metavar="FILE", help="Cluster file: shows the nodes.")
@click.option("--profile", "profile_file", type=_FILE, metavar="FILE", help="A profile with the device types.")
@click.option("--search", "record_file", type=_FILE, metavar="FILE", help="Output of 'whale search --record'.")
@click.option("--trace", "trace_file", type=_FILE, metavar="FILE", help="Also write a trace for Perfetto.")
@verbosity_options
def report(
    file: Path,
    output: Path | None,
    cluster_file: Path | None,
    profile_file: Path | None,
    record_file: Path | None,
    trace_file: Path | None,
) -> None:
    """Show a plan as one page: its step and memory on every device, its place on the cluster, the search, the reasons.

    FILE is a plan. The page opens from the disk in any browser and needs neither network nor scripts. Numbers are
    printed by 'whale simulate --json' and 'whale explain --json'.
    """
    from whale.ir.plan import Plan
    from whale.ir.search_record import SearchRecord
    from whale.planner.explain import explain
    from whale.planner.report.page import report_page

    read = {"FILE": file, "--cluster": cluster_file, "--profile": profile_file, "--search": record_file}
    refuse_same({"-o": output, "--trace": trace_file}, read)
    plan = Plan.load(file)
    if plan.prediction is not None and not plan.prediction_is_current:
        note(f"whale: note: {file} was edited after its prediction was computed; the report shows that of the old plan")
    cluster = _cluster(cluster_file, profile_file, plan) if cluster_file is not None else None
    record = SearchRecord.load(record_file) if record_file is not None else None
    if record is not None and record.plan and record.plan != plan.digest():
        note(f"whale: note: {record_file} is of a search for another plan, or {file} was edited afterwards")
    timeline = _timeline(plan, file)
    if trace_file is not None:
        if timeline is None:
            raise UsageError(f"--trace: {file} has no workload to simulate; make the plan with 'whale plan'")
        write_trace(timeline, trace_file, "--trace")
    explanation = explain(plan.workload, plan.prediction, plan=plan) if plan.workload is not None else None
    page = report_page(plan, timeline=timeline, explanation=explanation, cluster=cluster, record=record)
    if output is None:
        click.echo(page, nl=False)
        return
    write_whole(output, page)
    note(f"wrote {output}: open it in a browser")


def _cluster(path: Path, profile_file: Path | None, plan: Plan) -> Cluster:
    """Read the cluster, and refuse another one than the plan's."""
    from whale.cli.clusters import load_cluster
    from whale.ir.profile import ModelProfile

    cluster = load_cluster(path, ModelProfile.load(profile_file) if profile_file is not None else None)
    if len(cluster.devices) != plan.world_size:
        raise PlanMismatchError(
            f"the plan is for {plan.world_size} devices, but {path} describes {len(cluster.devices)}; give the cluster "
            "that the plan was made for"
        )
    plan.check_cluster(cluster)
    return cluster


def _timeline(plan: Plan, path: Path) -> Timeline | None:
    """Simulate the plan's workload, if it has one."""
    from whale.planner.simulation.simulate import check_workload, simulate

    if plan.workload is None:
        return None
    try:
        check_workload(plan.workload)
    except UsageError as error:
        raise InputFileError(str(error), path=path) from error
    return simulate(plan.workload)
