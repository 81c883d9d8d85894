"""``whale allocate``: which devices of a cluster each of several jobs gets, and which batch.

The rule is ``whale.planner.allocation``'s; this file loads jobs and profiles, and shows what it says. torch is loaded
only where a job gives a model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whale.cli.assumptions import autocast_of, dtype_of
from whale.cli.clusters import load_cluster
from whale.cli.files import write_whole
from whale.cli.options import note, verbosity_options
from whale.cli.progress import ProgressLine
from whale.cli.tables import text_table
from whale.errors import UsageError, WhaleError
from whale.ir.device_names import matching_types
from whale.ir.units import duration_text
from whale.planner.cost.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from whale.cli.search import SearchedModel
    from whale.ir.cluster import Cluster
    from whale.ir.document import Document
    from whale.ir.jobs import Job, Jobs
    from whale.ir.plan import Plan
    from whale.ir.profile import ModelProfile
    from whale.planner.allocation.options import Options
    from whale.planner.allocation.speeds import JobSpeeds
    from whale.planner.allocation.timeline import Rule, Timeline

_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.argument("jobs_file", metavar="JOBS", type=click.Path(path_type=Path))
@click.option("--cluster", "cluster_file", required=True, metavar="FILE", help="The machines.")
@click.option("--search-seconds", type=_POSITIVE, default=2.0, metavar="S", help="Limit of each search of a plan [2].")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the plan and the cluster file of each job that runs now.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@verbosity_options
def allocate(jobs_file: Path, cluster_file: str, search_seconds: float, output: Path | None, as_json: bool) -> None:
    """Share a mixed cluster among jobs so that they are done soonest.

    JOBS is a file with what each job trains, how much is left and how much it counts. For every number of devices that
    a job may be given, the fastest plan is searched; devices and batches are then those of the least weighted sum of
    completion times, if devices are given anew whenever a job is done.
    """
    from whale.ir.document import read_document
    from whale.ir.jobs import Jobs
    from whale.planner.allocation.options import options_of
    from whale.planner.catalog import device_types

    document = read_document(jobs_file)
    jobs = Jobs.of_document(document)
    file = _File(document, jobs)
    for job in jobs.jobs:
        with file.place(job, "optimizer"):
            if job.optimizer not in OPTIMIZERS:
                raise UsageError(f"unknown optimizer {job.optimizer!r}; use one of {', '.join(OPTIMIZERS)}")
        with file.place(job, "precision"):
            if job.precision is not None and autocast_of(job.precision) is None:
                dtype_of(job.precision)  # refuses what no model runs in
    given = {job.name: _profile_file(job, jobs_file.parent) for job in jobs.jobs if job.profile is not None}
    cluster = load_cluster(cluster_file, next(iter(given.values()), None))
    options = options_of(cluster)
    held = _held(file, cluster, options)
    profiles = {
        job.name: given.get(job.name) or _captured(file, job, cluster, max(job.batch)).profile for job in jobs.jobs
    }
    speeds = _speeds(file, profiles, cluster, options, search_seconds)
    answer = _Answer.of(file, cluster, options, speeds, held)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        for started in answer.started(profiles, search_seconds):
            plan, machines = output / f"{started.name}.json", output / f"{started.name}.cluster.json"
            write_whole(plan, started.plan.dumps())
            write_whole(machines, started.cluster.dumps(catalog=device_types()))
            note(f"wrote {plan} and {machines}: start it with whale launch {plan} --cluster {machines} ...")
    click.echo(json.dumps(answer.as_data(), indent=2) if as_json else answer.as_text())


def _profile_file(job: Job, folder: Path) -> ModelProfile:
    from whale.ir.profile import ModelProfile

    assert job.profile is not None
    return ModelProfile.load(folder / job.profile)


@dataclass(frozen=True)
class _File:
    """The file of jobs, for errors that name its lines."""

    document: Document
    jobs: Jobs

    @property
    def folder(self) -> Path:
        """The folder of the files that it names."""
        return Path(self.document.source).parent

    @contextmanager
    def place(self, job: Job, key: str = "name") -> Iterator[None]:
        """Errors name the job, with its keys in place of the options that other commands have for them; those of wrong
        values name the line of *key*."""
        try:
            yield
        except WhaleError as error:
            said = f"job {job.name!r}: {str(error).removeprefix('--')}"
            if not isinstance(error, UsageError):
                raise type(error)(said) from error
            raise self.document.error(said, ("jobs", self.jobs.jobs.index(job), key)) from error


def _captured(file: _File, job: Job, cluster: Cluster, batch: int) -> SearchedModel:
    """The model of a job, whose file is found from the folder of the jobs' file."""
    from whale.cli.model_loader import load_model
    from whale.cli.search import SearchedModel
    from whale.compile.options import Options

    assert job.model is not None
    spec = job.model if job.model.startswith("hf:") else str(file.folder / job.model)
    with file.place(job, "model"):
        loaded = load_model(spec, dict(job.set), batch_size=batch, device="meta")
        return SearchedModel.of(loaded, None, cluster, job.precision, job.optimizer, (), Options(), rules=False)


def _held(file: _File, cluster: Cluster, options: Options) -> dict[str, int]:
    """The option that each job has now; none where it is no option, as if the job began.

    Raises:
        InputFileError: unknown types of devices, or more of a type, of all jobs together, than the cluster has.
    """
    types = {device.type.name: device.type.memory_bytes for device in cluster.devices}
    found, have = {}, dict[str, dict[str, int]]()
    for job in file.jobs.jobs:
        with file.place(job, "devices"):
            devices = _named(job.devices, types)
            option = options.index(devices) if devices else 0
            for type_, number in devices.items():
                own = have.setdefault(type_, {})
                own[job.name] = number
                if sum(own.values()) > options.numbers[type_]:
                    said = ", ".join(f"{name} has {count}" for name, count in own.items())
                    raise UsageError(
                        f"devices: the cluster has {options.numbers[type_]} {type_}, but {said}; a device is of one job"
                    )
        if option is None:
            note(f"job {job.name} has devices that are no whole part of a node or nodes: it will get others")
        found[job.name] = option or 0
    return found


def _named(devices: Mapping[str, int], types: Mapping[str, int]) -> dict[str, int]:
    """Numbers of devices by the names that the cluster has for their types; unknown names stay."""
    found: dict[str, int] = {}
    for name, number in devices.items():
        means = matching_types(name, types)
        if len(means) > 1:
            raise UsageError(f"devices: {name!r} may be {' or '.join(means)}; give one")
        if number:
            own = means[0] if means else name
            found[own] = found.get(own, 0) + number
    return found


def _speeds(
    file: _File, profiles: Mapping[str, ModelProfile], cluster: Cluster, options: Options, search_seconds: float
) -> list[JobSpeeds]:
    """Speeds of each job; where jobs differ in nothing that they depend on, they are searched once."""
    from whale.planner.allocation.speeds import speeds_of

    known: dict[Any, JobSpeeds] = {}
    found, began, jobs = [], time.monotonic(), file.jobs.jobs
    most = search_seconds * len(options.counts) * sum(len(job.batch) for job in jobs)
    with ProgressLine("searching plans", most) as line:
        for job in jobs:
            same = job.model_dump_json(exclude={"name", "rows", "weight", "devices"})
            if same not in known:

                def tell(done: int, all_: int, name: str = job.name) -> None:
                    line.show(time.monotonic() - began, f"{name}: {done} of {all_} numbers of devices")

                with file.place(job):
                    known[same] = speeds_of(
                        job, profiles[job.name], cluster, options, search_seconds=search_seconds, tell=tell
                    )
            found.append(known[same])
    return found


def _compiled(job: Job, model: SearchedModel, part: Cluster, batch: int, search_seconds: float) -> Plan:
    """The best plan of a job's model on its devices, compiled as it is run there."""
    from whale.commands.searching import search_plans, settings_for
    from whale.planner.allocation.speeds import settings_of

    settings = replace(settings_of(job, model.profile), time_limit=2 * search_seconds, fixed=model.fixed)
    found = search_plans(
        model.profile, part, batch=batch, settings=settings_for(settings, model.trial, model.profile), trial=model.trial
    )
    return found.best.plan


@dataclass(frozen=True)
class _Started:
    """A job that runs now: its plan, and its devices as a cluster of their own."""

    name: str
    plan: Plan
    cluster: Cluster


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """The answer: devices of each job, when all are done, and the sums under plain rules."""

    file: _File
    cluster: Cluster
    options: Options
    speeds: Sequence[JobSpeeds]
    timeline: Timeline
    others: Mapping[str, float]

    @classmethod
    def of(
        cls,
        file: _File,
        cluster: Cluster,
        options: Options,
        speeds: Sequence[JobSpeeds],
        held: Mapping[str, int],
    ) -> _Answer:
        from whale.planner.allocation.rules import LeastCompletion, equal_shares, first_come
        from whale.planner.allocation.timeline import Demand, simulate

        jobs, restart = file.jobs, file.jobs.restart_seconds
        rates = {job.name: own.rows_per_second for job, own in zip(jobs.jobs, speeds, strict=True)}
        held = {name: option if rates[name][option] else 0 for name, option in held.items()}  # else it starts again
        demands = [
            Demand(number=number, work=job.rows, weight=job.weight, speeds=rates[job.name], held=held[job.name])
            for number, job in enumerate(jobs.jobs)
        ]
        counts = options.counts
        rules: dict[str, Rule] = {
            "": LeastCompletion(counts, restart),
            "equal shares": equal_shares(counts),
            "first come": first_come(counts),
        }
        found = {
            name: simulate(demands, counts, options.capacity, rule, restart_seconds=restart)
            for name, rule in rules.items()
        }
        own = found.pop("")
        totals = {name: timeline.total_seconds for name, timeline in found.items()}
        return cls(file=file, cluster=cluster, options=options, speeds=speeds, timeline=own, others=totals)

    @property
    def jobs(self) -> Sequence[Job]:
        """The jobs, as their file has them."""
        return self.file.jobs.jobs

    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each job, from now on."""
        from whale.planner.allocation.options import place

        given = self.timeline.phases[0].given
        return place(self.options, [given[number] for number in range(len(self.jobs))])

    def as_data(self) -> dict[str, Any]:
        """The answer as a value that JSON can hold."""
        now = self.timeline.phases[0].given
        names = [job.name for job in self.jobs]
        return {
            "weighted_sum_seconds": self.timeline.total_seconds,
            "others": dict(self.others),
            "jobs": [
                {
                    "name": job.name,
                    "devices": [self.cluster.devices[rank].name for rank in ranks],
                    "batch": own.batches[now[number]] or None,
                    "rows_per_second": float(own.rows_per_second[now[number]]),
                    "done_seconds": self.timeline.done_seconds[number],
                }
                for number, (job, own, ranks) in enumerate(zip(self.jobs, self.speeds, self.ranks(), strict=True))
            ],
            "phases": [
                {
                    "seconds": phase.seconds,
                    "given": {names[job]: self._given(job, option) for job, option in phase.given.items()},
                }
                for phase in self.timeline.phases
            ],
        }

    def _given(self, number: int, option: int) -> dict[str, Any]:
        kinds, counts = self.options.kinds, self.options.counts[option]
        devices = {kind.name: int(count) for kind, count in zip(kinds, counts, strict=True) if count}
        return {"devices": devices, "batch": self.speeds[number].batches[option] or None}

    def as_text(self) -> str:
        """Tables of what jobs get now and later, and the sums."""
        data = self.as_data()
        now = self.timeline.phases[0].given
        rows = [
            (
                one["name"],
                self.options.text(now[number]),
                one["batch"] or "-",
                f"{one['rows_per_second']:.1f}" if one["batch"] else "-",
                duration_text(one["done_seconds"]),
                _shortened(one["devices"]) or "waits",
            )
            for number, one in enumerate(data["jobs"])
        ]
        columns = ("job", "gets", "batch", "rows/s", "done after", "devices")
        lines = [text_table("", columns, rows).strip(), ""]
        for before, phase in zip(self.timeline.phases, self.timeline.phases[1:], strict=False):
            changed = [
                f"{self.jobs[number].name} gets {self.options.text(option)}"
                for number, option in phase.given.items()
                if before.given[number] != option
            ]
            done = ", ".join(self.jobs[number].name for number in before.given if number not in phase.given)
            lines.append(f"after {duration_text(phase.seconds)}, {done} done: {'; '.join(changed) or 'no change'}")
        total = self.timeline.total_seconds
        sums = ", ".join(
            f"{name} {duration_text(seconds)} ({seconds / total - 1:+.0%})" for name, seconds in self.others.items()
        )
        what = "Weighted sum" if len({job.weight for job in self.jobs}) > 1 else "Sum"
        return "\n".join([*lines, "", f"{what} of completion times: {duration_text(total)}; {sums}."])

    def started(self, profiles: Mapping[str, ModelProfile], search_seconds: float) -> Iterator[_Started]:
        """The jobs that run now. Where a job gives its model, its plan is that of a search that compiles the best."""
        from whale.commands.plan_writer import PlanWriter
        from whale.planner.what_if import only

        for number, (job, ranks) in enumerate(zip(self.jobs, self.ranks(), strict=True)):
            option = self.timeline.phases[0].given[number]
            candidate, batch = self.speeds[number].plans[option], self.speeds[number].batches[option]
            if candidate is None:
                continue
            part = only(self.cluster, ranks)
            if job.model is None:
                plan = PlanWriter(profiles[job.name], part, batch, None).written(candidate).plan
            else:
                plan = _compiled(job, _captured(self.file, job, part, batch), part, batch, search_seconds)
            yield _Started(job.name, plan, part)


def _shortened(names: Sequence[str]) -> str:
    """Names of devices of a type that follow each other, as a range.

    >>> _shortened(["V100:0", "V100:1", "T4:4"])
    'V100:0-1, T4:4'
    """
    runs: list[tuple[str, int, int]] = []
    for name in names:
        type_, _, rank = name.rpartition(":")
        if runs and runs[-1][0] == type_ and runs[-1][2] + 1 == int(rank):
            runs[-1] = (type_, runs[-1][1], int(rank))
        else:
            runs.append((type_, int(rank), int(rank)))
    return ", ".join(f"{type_}:{first}" + (f"-{last}" if last > first else "") for type_, first, last in runs)
