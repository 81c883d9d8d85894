"""``whale search``: from an unmodified model, or a profile, and a cluster to the best plan, with why the others lost.

The search is ``whale.planner.search``'s, the plans are written and compiled by ``whale.commands.searching``; this file
loads what they need, shows how far they are and what they found, and keeps the best where it is interrupted. torch is
loaded only where a model is given.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from whale.arguments import check_updates
from whale.cli.assumptions import (
    assumptions_text,
    autocast_of,
    dtype_of,
    in_precision,
    is_given,
    said_of_hosts,
    said_of_model,
    said_of_optimizer,
)
from whale.cli.clusters import load_cluster
from whale.cli.collecting import seldom_collecting
from whale.cli.files import refuse_same, refuse_unwritable, write_whole
from whale.cli.model_loader import load_model, parse_settings
from whale.cli.options import (
    AT_LEAST_1,
    GRADIENT_DTYPE_HELP,
    MOST,
    PRECISION_HELP,
    REDUCE_HELP,
    STEP_IN_BACKWARD_HELP,
    Numbers,
    note,
    offload_option,
    state_options,
    verbosity_options,
)
from whale.cli.progress import Interruption, ProgressLine
from whale.errors import InfeasibleError, UsageError, WhaleError
from whale.ir.state import Align
from whale.ir.strategy import RECOMPUTES, REDUCES, Offload, Recompute, Reduce
from whale.ir.units import counted, time_text
from whale.planner.cost.optimizers import OPTIMIZERS, costs_of

if TYPE_CHECKING:
    from whale.commands.candidates import CandidateCompiler
    from whale.commands.plan_writer import Choice
    from whale.commands.searching import Searched
    from whale.compile.options import Options
    from whale.ir.cluster import Cluster
    from whale.ir.profile import ModelProfile
    from whale.ir.strategy import ScopePath
    from whale.planner.search import Fixed, Memo, Progress, SearchSettings

LEAST_SHARE = 0.25
"""Smallest fraction of the time limit for searching and compiling, after any capture of the model."""

_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.option("--model", "spec", metavar="SPEC", help="file.py:callable, or hf:<model_type>.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of the model; may be repeated.")
@click.option("--profile", "profile_file", type=click.Path(path_type=Path), metavar="FILE", help="Measured times.")
@click.option("--cluster", "cluster_file", required=True, metavar="FILE", help="The machines.")
@click.option(
    "--batch",
    "batches",
    required=True,
    type=Numbers(least=1, distinct=True),
    metavar="N,N-N,...",
    help="Rows of the global batch; several, or a range, are cases of a table.",
)
@click.option("--micro-batches", type=AT_LEAST_1, metavar="M", help="Micro-batches in a step [searched].")
@click.option("--schedule", "schedules", multiple=True, metavar="NAME", help="Allowed schedule; repeatable [1f1b].")
@click.option("--max-stages", type=AT_LEAST_1, metavar="N", help="Maximum number of stages.")
@click.option("--precision", metavar="NAME", help=PRECISION_HELP)
@click.option("--gradient-dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help=GRADIENT_DTYPE_HELP)
@click.option("--step-in-backward", is_flag=True, help=STEP_IN_BACKWARD_HELP)
@click.option("--reduce", type=click.Choice(REDUCES), help=REDUCE_HELP)
@click.option(
    "--recompute",
    type=click.Choice(("auto", *RECOMPUTES)),
    default="auto",
    help="What backwards compute again; auto: nothing if a plan fits, else the least that does, by stage [auto].",
)
@state_options("auto", "auto", shares=False)
@offload_option("auto", "auto")
@click.option(
    "--optimizer", type=click.Choice(OPTIMIZERS), default="adamw", help="Its states must fit in memory [adamw]."
)
@click.option(
    "--annotate", "annotations", multiple=True, metavar="KEY=STRATEGY", help="Annotation to keep; may be repeated."
)
@click.option("--without", "without_", multiple=True, metavar="NODE|TYPE:N", help="What if these devices were missing?")
@click.option("--with", "with_", multiple=True, metavar="NxTYPE", help="What if there were such a node?")
@click.option(
    "--time-limit",
    type=_POSITIVE,
    default=30.0,
    metavar="S",
    help="Seconds; one plan is compiled whatever they are [30].",
)
@click.option("--thorough", is_flag=True, help="Try more plans, in some more seconds.")
@click.option("--seed", type=click.IntRange(0, MOST), default=0, metavar="N", help="Seed of random moves [0].")
@click.option("--top", type=AT_LEAST_1, default=5, metavar="K", help="How many plans to show [5].")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the best plan to this file."
)
@click.option("--record", type=click.Path(path_type=Path), metavar="FILE", help="Write a record for 'whale report'.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@verbosity_options
@click.pass_context
def search(
    ctx: click.Context,
    spec: str | None,
    settings: tuple[str, ...],
    profile_file: Path | None,
    cluster_file: str,
    batches: tuple[int, ...],
    micro_batches: int | None,
    schedules: tuple[str, ...],
    max_stages: int | None,
    precision: str | None,
    gradient_dtype: str | None,
    step_in_backward: bool,
    reduce: Reduce | None,
    recompute: Recompute | Literal["auto"],
    zero: Any,
    state_align: Align | None,
    offload: Offload | Literal["auto"],
    optimizer: Any,
    annotations: tuple[str, ...],
    without_: tuple[str, ...],
    with_: tuple[str, ...],
    time_limit: float,
    thorough: bool,
    seed: int,
    top: int,
    output: Path | None,
    record: Path | None,
    as_json: bool,
) -> None:
    """Find the fastest plan for a model on any mix of devices.

    It chooses the stages and their layers, the devices of each and their order, data and tensor parallelism in each,
    rows by speed, and the number of micro-batches. The best plans are compiled, without allocating anything, and the
    best of these tried with the other schedules of --schedule. With a profile and no model the search's own prediction
    counts.

    Ctrl-C returns the best plan so far. --without, --with and several batches print a table, one row for each case.
    """
    from whale.commands.searching import settings_for
    from whale.ir.profile import ModelProfile
    from whale.planner.catalog import device_types, device_types_with
    from whale.planner.cost.precision import precision_named
    from whale.planner.search import SearchSettings

    ctx.with_resource(seldom_collecting(restored=ctx.obj is None))
    began = time.monotonic() if ctx.obj is None else ctx.obj
    if spec is None and profile_file is None:
        raise UsageError("whale search needs --model, to capture a model, or --profile, to use a profile, or both")
    if spec is None and (settings or annotations):
        raise UsageError(f"{'--set' if settings else '--annotate'} is for --model")
    if precision is not None and autocast_of(precision) is None:
        dtype_of(precision)  # refuses what no model runs in
    refuse_same({"-o": output, "--record": record}, {"--cluster": cluster_file, "--profile": profile_file})
    for path, option in ((output, "-o"), (record, "--record")):
        if path is not None:
            refuse_unwritable(path, option)
    asked = SearchSettings(
        micro_batches=micro_batches,
        schedules=schedules or ("1f1b",),
        max_stages=max_stages,
        optimizer=optimizer,
        recompute=recompute,
        zero=zero,
        state_align=state_align or ("parameter" if costs_of(optimizer).factored else "row"),
        gradient_dtype=gradient_dtype,
        step_in_backward=step_in_backward,
        reduce=reduce,
        offload=offload,
        thorough=thorough,
        seed=seed,
        top=top,
    )
    for batch in batches:
        asked.check(batch)
    profile = None if profile_file is None else ModelProfile.load(profile_file)
    check_updates(autocast_of(precision, profile), step_in_backward=step_in_backward, name="--step-in-backward")
    catalog = device_types() if profile is None else device_types_with(profile)
    cluster = load_cluster(cluster_file, profile)
    cases = _cases(cluster, batches, without_, with_, catalog)
    if (output or record) is not None and (len(batches) > 1 or len(without_) + len(with_) > 1):
        raise UsageError(
            f"{f'-o {output}' if output is not None else f'--record {record}'}: there are {len(cases)} cases; ask for "
            "one change at most, and its plan is written"
        )
    chosen = cases[-1] if (output or record) is not None or len(cases) == 1 else None
    if precision is not None and chosen is not None:
        precision_named(precision).refuse_without(device.type for device in chosen.cluster.devices)
    model = None
    if spec is not None:
        from whale.compile.options import Options

        loaded = load_model(spec, parse_settings(settings), batch_size=cases[-1].batch, device="meta")
        rules = recompute not in ("auto", "none")
        options = Options(gradient_dtype=gradient_dtype, step_in_backward=step_in_backward, reduce=reduce)
        model = SearchedModel.of(loaded, profile, cluster, precision, optimizer, annotations, options, rules=rules)
        profile = model.profile
    assert profile is not None
    given = replace(
        asked,
        precision=precision or _precision(profile),
        time_limit=max(time_limit - (time.monotonic() - began), LEAST_SHARE * time_limit),
        fixed=None if model is None else model.fixed,
    )
    # What-if cases are searched without the model.
    given = settings_for(given, None if model is None else model.trial, profile)
    with Interruption() as interruption:
        said = _said_of_profile(profile) if model is None else model.assumptions
        trial = None if model is None else model.trial
        run = _Run(profile, given, interruption, said, trial)
        try:
            _answer(run, cases, chosen, None if model is None else model.trial, output, record, as_json)
        except (InfeasibleError, UsageError) as error:
            if not interruption.came() or isinstance(error, UsageError):
                for line in said:
                    note(f"assumed: {line}")
                raise
            note("stopped before any plan was found")
        else:
            if interruption.came():
                note("stopped; this is the best so far")
    if interruption.came():
        ctx.exit(interruption.exit_code)


def _answer(
    run: _Run,
    cases: Sequence[_Case],
    chosen: _Case | None,
    trial: CandidateCompiler | None,
    output: Path | None,
    record: Path | None,
    as_json: bool,
) -> None:
    """Print a table of the cases where there are several; write the plan of the chosen one, and show it if alone."""
    if len(cases) > 1:
        settings = run.settings if trial is None else replace(run.settings, schedules=run.settings.priced)
        _answer_cases(replace(run, settings=settings), cases, as_json)  # without the model
        if run.interruption.came():
            return
    if chosen is not None:
        searched = run.searched(chosen, trial)
        _write(searched, chosen, output)
        if record is not None:
            from whale.cli.search_recorded import record_of

            write_whole(record, record_of(searched, chosen.cluster).dumps(), "--record")
            note(f"wrote {record}: whale report draws it")
        if len(cases) == 1:
            _show(searched, chosen, output, as_json)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A case: a batch on a cluster, which differs from the file's by *change*."""

    change: str
    cluster: Cluster
    batch: int


def _cases(
    cluster: Cluster,
    batches: Sequence[int],
    missing: Sequence[str],
    added: Sequence[str],
    catalog: Mapping[str, Any],
) -> list[_Case]:
    """The cluster as it is and with each of the changes, at every batch; as it is first."""
    from whale.planner.what_if import with_node, without

    clusters = [("as it is", cluster)]
    clusters += [(f"without {what}", without(cluster, what)) for what in missing]
    clusters += [(f"with {what}", with_node(cluster, what, catalog)) for what in added]
    return [_Case(change=change, cluster=one, batch=batch) for batch in batches for change, one in clusters]


@dataclass(frozen=True, kw_only=True)
class SearchedModel:
    """A captured model: its profile, what it is tried on, and what is decided already."""

    profile: ModelProfile
    trial: CandidateCompiler
    fixed: Fixed
    assumptions: tuple[str, ...]

    @classmethod
    def of(
        cls,
        loaded: Any,
        profile: ModelProfile | None,
        cluster: Cluster,
        precision: str | None,
        optimizer: Any,
        annotations: Sequence[str],
        options: Options,
        *,
        rules: bool,
    ) -> SearchedModel:
        """Capture what ``--model`` gave, in the precision that is asked for."""
        from whale.commands.automatic import search_inputs
        from whale.commands.candidates import CandidateCompiler, scopes_by, take_scopes

        autocast = autocast_of(precision, profile)
        precision = in_precision(loaded, precision or autocast)
        scopes = take_scopes(loaded.model)
        if scopes and annotations:
            raise UsageError(f"--annotate is for a model without annotations, but {loaded.name} has some; keep one")
        scopes = scopes or scopes_by(loaded.model, _texts(annotations))
        note(f"capturing {loaded.name}")
        trial = CandidateCompiler(
            loaded.model,
            loaded.batch,
            name=loaded.name,
            optimizer=optimizer,
            options=replace(options, precision=autocast),
            precision="tf32" if precision == "tf32" else None,
            scopes=scopes,
        )
        if profile is None:
            note(f"profiling {loaded.name}")
        inputs = search_inputs(trial, loaded.batch, cluster, profile=profile, rules=rules)
        return cls(
            profile=inputs.profile,
            trial=trial,
            fixed=inputs.fixed,
            assumptions=(*said_of_model(loaded, precision, rows=inputs.rows), *_said_of_scopes(scopes)),
        )


_BETWEEN_STRATEGIES = re.compile(r",(?![^(]*\))")


def _texts(annotations: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse repeated ``KEY=STRATEGY``, with comma-separated strategies from outer to inner.

    >>> _texts(["layers.[0-3]=stage(),split(2)"])
    {'layers.[0-3]': ('stage()', 'split(2)')}
    >>> _texts(["layers.0=stage(2),split(2, dim=1)"])
    {'layers.0': ('stage(2)', 'split(2, dim=1)')}
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in annotations:
        key, equals, strategies = text.partition("=")
        if not equals or key in found:
            why = f"{key!r} is given twice" if equals else "write KEY=STRATEGY, such as layers.[0-3]=stage()"
            raise UsageError(f"--annotate {text!r}: {why}")
        found[key] = tuple(part.strip() for part in _BETWEEN_STRATEGIES.split(strategies))
    return found


def _said_of_scopes(scopes: Mapping[str, ScopePath]) -> Iterator[str]:
    """The annotations that plans keep."""
    kinds = Counter(str(path[-1].strategy) for path in scopes.values() if path)
    if kinds:
        shown = ", ".join(f"{kind} of {counted(number, 'module')}" for kind, number in kinds.most_common(3))
        yield f"annotations hold in every plan: {shown}; a search of the model without them decides all"


def _said_of_profile(profile: ModelProfile) -> tuple[str, ...]:
    own = () if is_given("precision") else (f"{_precision(profile)}, the profile's; --precision NAME changes it",)
    return (*own, *said_of_optimizer())


def _precision(profile: ModelProfile) -> str:
    from whale.planner.cost.precision import own_precision

    return own_precision(profile)


@dataclass(frozen=True)
class _Run:
    """Searches with progress, until it is interrupted."""

    profile: ModelProfile
    settings: SearchSettings
    interruption: Interruption
    assumptions: tuple[str, ...]
    model: CandidateCompiler | None = None

    def searched(self, case: _Case, trial: CandidateCompiler | None = None, *, known: Memo | None = None) -> Searched:
        """The plans for a case."""
        from whale.commands.searching import search_plans
        from whale.commands.shared import available_cores

        with ProgressLine("searching", self.settings.time_limit) as line:
            found = search_plans(
                self.profile,
                case.cluster,
                batch=case.batch,
                settings=self.settings,
                trial=trial,
                progress=lambda progress: line.show(progress.elapsed, _far(progress)),
                stop=self.interruption.came,
                known=known,
                processes=available_cores(),
                with_rules=None if self.model is None else self._with_rules(self.model, case.batch),
                with_cuts=None if self.model is None else self._with_cuts(self.model, case.cluster),
                with_tables=None if trial is None else self._with_tables(trial),
            )
        note(f"{found.found.tried} plans were tried in {found.found.seconds:.2f} s")
        left = sum(not choice.compiled for choice in found.choices) if trial is not None else 0
        if left and not self.interruption.came():
            note(f"there was no time to compile {left} of the plans shown; --time-limit gives more")
        choices = []
        for choice in found.choices:
            said = {"assumptions": (*self.assumptions, *said_of_hosts(choice.plan, case.cluster))}
            choices.append(replace(choice, plan=choice.plan.model_copy(update=said)))
        return replace(found, choices=tuple(choices))

    def _with_rules(self, model: CandidateCompiler, rows: int) -> Callable[[ModelProfile], ModelProfile]:
        return partial(model.with_rules, rows=rows, stop=self.interruption.came)

    def _with_cuts(self, model: CandidateCompiler, cluster: Cluster) -> Callable[[ModelProfile], ModelProfile]:
        from whale.commands.automatic import context_degrees

        return partial(model.with_cuts, degrees=context_degrees(cluster), stop=self.interruption.came)

    @staticmethod
    def _with_tables(model: CandidateCompiler) -> Callable[..., Iterator[Choice]]:
        from whale.commands.tables import placed_choices

        return partial(placed_choices, model)


def _far(progress: Progress) -> str:

    best = "nothing fits yet" if progress.best_seconds is None else f"best {time_text(progress.best_seconds)}"
    return f"{best}, bound {time_text(progress.bound_seconds)}, {progress.tried} tried"


def _write(searched: Searched, case: _Case, output: Path | None) -> None:
    if output is not None:
        write_whole(output, searched.best.plan.dumps())
        note(f"wrote {output}{'' if case.change == 'as it is' else f', {case.change}'}")


def _show(searched: Searched, case: _Case, output: Path | None, as_json: bool) -> None:
    from whale.cli.search_text import as_data, as_text

    if as_json:
        click.echo(json.dumps(as_data(searched), indent=2))
        return
    click.echo(as_text(searched, case.cluster, output))


# --- what if ----------------------------------------------------------------------------------------------------------


def _answer_cases(run: _Run, cases: Sequence[_Case], as_json: bool) -> None:
    """A row for each case, by the search's own predictions; prices of one search serve the next.

    Raises:
        InfeasibleError: nothing fits in any case, as the table says.
        UsageError: there was no time for any.
    """
    from whale.cli.search_text import case_data, cases_text
    from whale.planner.search import Memo

    known = Memo()
    once = replace(run.settings, top=1)
    rows: list[tuple[_Case, Searched | WhaleError]] = []
    for case in cases:
        if run.interruption.came():
            break
        note(f"{case.change}, batch {case.batch}")
        try:
            rows.append((case, replace(run, settings=once).searched(case, known=known)))
        except (InfeasibleError, UsageError) as error:  # the other: no time
            if run.interruption.came():
                break
            rows.append((case, error))
    answers = [(case.change, case.batch, case.cluster, found) for case, found in rows]
    if as_json:
        click.echo(json.dumps({**case_data(answers), "assumptions": list(run.assumptions)}, indent=2))
    else:
        click.echo("\n\n".join(filter(None, [cases_text(answers), assumptions_text(run.assumptions)])))
    failed = [found for _, found in rows if isinstance(found, WhaleError)]
    if rows and all(isinstance(found, UsageError) for found in failed) and len(failed) == len(rows):
        raise UsageError(f"there was no time for any of the {len(rows)} cases; --time-limit gives more")
    if rows and len(failed) == len(rows):
        raise InfeasibleError(f"no plan fits in any of the {len(rows)} cases; the table says what is missing in each")
