"""``whale plan``: an annotated model, or a profile, and a cluster in, a balanced plan with its prediction out.

The decisions are ``whale.commands.planning``'s, and ``whale.commands.searching``'s where there is a profile and no
model; this file loads what they need, shows what they are and why, and prints last the command that runs the plan.
torch is loaded only for a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from whale.arguments import check_updates
from whale.cli.assumptions import assumptions_text, autocast_of, in_precision, said_of_hosts, said_of_model
from whale.cli.clusters import load_cluster
from whale.cli.files import refuse_same, refuse_unwritable, write_whole
from whale.cli.model_loader import load_model, parse_settings
from whale.cli.options import (
    AT_LEAST_1,
    GRADIENT_DTYPE_HELP,
    PRECISION_HELP,
    REDUCE_HELP,
    STALENESS_HELP,
    STEP_IN_BACKWARD_HELP,
    note,
    offload_option,
    sharding_of,
    state_options,
    verbosity_options,
)
from whale.cli.plan_text import command, stage_table, step_lines
from whale.errors import InfeasibleError, UsageError
from whale.ir.state import LEVELS, Align, StateSharding
from whale.ir.strategy import (
    MAX_STALENESS,
    RECOMPUTES,
    REDUCES,
    STATE_ON_HOST,
    Offload,
    Recompute,
    Reduce,
    offload_steps,
)
from whale.ir.units import counted, time_text
from whale.planner.cost.optimizers import OPTIMIZERS, costs_of

if TYPE_CHECKING:
    from whale.commands.plan_writer import Choice
    from whale.commands.planning import Planned
    from whale.ir.cluster import Cluster
    from whale.ir.plan import Plan
    from whale.ir.profile import ModelProfile
    from whale.ir.workload import Prediction, Workload

ROOMS = (1.0, 0.95, 0.9)
"""Parts of their memory that devices have for a cut, from the first on, until the compiled plan fits."""


@click.command()
@click.option("--model", "spec", metavar="SPEC", help="file.py:callable, or hf:<model_type>.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of the model; may be repeated.")
@click.option("--cluster", "cluster_file", metavar="FILE", help="The machines.")
@click.option("--profile", "profile_file", type=click.Path(path_type=Path), metavar="FILE", help="Measured times.")
@click.option("--batch", "batch_size", type=AT_LEAST_1, metavar="N", help="Rows of the global batch [the example's].")
@click.option("--micro-batches", type=AT_LEAST_1, default=1, metavar="M", help="Micro-batches in a step [1].")
@click.option("--schedule", default="1f1b", metavar="NAME", help="The pipeline schedule [1f1b].")
@click.option("--stages", type=AT_LEAST_1, metavar="N", help="Number of stages, without annotations.")
@click.option("--replicas", type=AT_LEAST_1, metavar="R", help="With --stages: data-parallel pipelines.")
@click.option("--precision", metavar="NAME", help=PRECISION_HELP)
@click.option("--gradient-dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help=GRADIENT_DTYPE_HELP)
@click.option("--step-in-backward", is_flag=True, help=STEP_IN_BACKWARD_HELP)
@click.option("--reduce", type=click.Choice(REDUCES), help=REDUCE_HELP)
@click.option("--staleness", type=click.IntRange(0, MAX_STALENESS), default=0, metavar="N", help=STALENESS_HELP)
@click.option(
    "--recompute",
    type=click.Choice((*RECOMPUTES, "auto")),
    help="What backwards compute again; auto: the least that fits, stage by stage [as annotated, else none].",
)
@state_options(None, "as annotated, else 0")
@offload_option(None, "as annotated, else none")
@click.option(
    "--optimizer", type=click.Choice(OPTIMIZERS), default="adamw", help="Its states must fit in memory [adamw]."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the plan to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of a plan and exit.")
@verbosity_options
def plan(
    spec: str | None,
    settings: tuple[str, ...],
    cluster_file: str | None,
    profile_file: Path | None,
    batch_size: int | None,
    micro_batches: int,
    schedule: str,
    stages: int | None,
    replicas: int | None,
    precision: str | None,
    gradient_dtype: str | None,
    step_in_backward: bool,
    reduce: Reduce | None,
    staleness: int,
    recompute: Recompute | Literal["auto"] | None,
    zero: int | Literal["auto"] | None,
    state_shares: tuple[float, ...] | Literal["auto"] | None,
    state_align: Align | None,
    offload: Offload | Literal["auto"] | None,
    optimizer: Any,
    output: Path | None,
    as_json: bool,
    schema: bool,
) -> None:
    """Decide which ranks run what, in which shares, and predict the step.

    The annotations of the model say what may be decided; --stages cuts a model without any. Nothing is allocated and
    no process is started. Without --profile the times of layers are modelled from the figures of the devices.

    With a profile and no model, layers and rows are divided by speed: over --stages, or one stage on all devices.
    """
    from whale.ir.plan import Plan

    if schema:
        click.echo(json.dumps(Plan.published_schema(), indent=2, sort_keys=True))
        return
    if (spec is None and profile_file is None) or cluster_file is None:
        raise UsageError("whale plan needs --cluster, and --model or --profile or both (or --schema)")
    if spec is not None and replicas is not None and stages is None:
        raise UsageError("--replicas is for --stages; an annotated model says its replicas itself")
    from whale.ir.micro_batches import rows_of_micro_batch
    from whale.ir.profile import ModelProfile
    from whale.planner.balance.by_speed import refuse_misfit
    from whale.planner.cost.precision import precision_named
    from whale.planner.schedules.orders import SCHEDULES

    refuse_same({"-o": output}, {"--cluster": cluster_file, "--profile": profile_file})
    if output is not None:
        refuse_unwritable(output)
    if schedule not in SCHEDULES:
        raise UsageError(f"unknown schedule {schedule!r}; use one of {', '.join(SCHEDULES)}")
    profile = ModelProfile.load(profile_file) if profile_file is not None else None
    cluster = load_cluster(cluster_file, profile)
    if batch_size is not None:
        rows_of_micro_batch(batch_size, micro_batches)
    if stages is not None:
        replicas = replicas or max(1, len(cluster.devices) // stages)
        refuse_misfit(cluster, stages, replicas, schedule)
    if spec is None:
        assert profile is not None
        told = ((settings, "--set"), (precision, "--precision"), (optimizer != "adamw", "--optimizer"))
        for given, option in (*told, (staleness, "--staleness")):
            if given:
                raise UsageError(f"{option} is for --model")
        check_updates(profile.autocast, step_in_backward=step_in_backward, name="--step-in-backward")
        state = _of_level(zero, state_shares, state_align, offload, reduce)
        size = (batch_size, micro_batches, schedule, stages or 1, replicas)
        choice = _of_profile(
            profile, cluster, *size, recompute, state, gradient_dtype, step_in_backward, offload, reduce
        )
        _show(choice.plan, choice.prediction, choice.candidate.workload, cluster, output, as_json)
        return
    if costs_of(optimizer).factored and (zero or offload in STATE_ON_HOST):
        if state_align == "row":
            raise UsageError(f"--state-align row: {optimizer} computes with whole matrices; use parameter")
        state_align = "parameter"
    state = sharding_of(zero, state_shares, state_align, offload, reduce)
    autocast = autocast_of(precision, profile)
    if precision is not None:
        precision_named(precision).refuse_without(device.type for device in cluster.devices)
    check_updates(autocast, step_in_backward=step_in_backward, name="--step-in-backward")
    loaded = load_model(spec, parse_settings(settings), batch_size=batch_size, device="meta")

    from whale.annotations import module_scopes
    from whale.commands.automatic import cut_degrees
    from whale.commands.planning import first_that_fits, make_plan, stage_annotations
    from whale.compile.options import Options
    from whale.compile.trace import trace
    from whale.graph.capture import batch_rows
    from whale.ir.plan import PlanAxis, PlanStage
    from whale.planner.balance.by_speed import Pipeline, pipeline_by_speed
    from whale.predict.costs import Costs
    from whale.strategies.profile import profile_model

    rows = batch_rows(loaded.batch)
    if rows is None:
        raise UsageError(f"the batch of {loaded.name} has no tensor with rows")
    precision = in_precision(loaded, precision or autocast)
    scopes = module_scopes(loaded.model)
    if profile is None:
        note(f"profiling {loaded.name}")
    traced = trace(loaded.model, loaded.batch, device="cpu", training=True, precision=autocast)
    if profile is None:
        split = any(scope.strategy.shards_operators for path in scopes.values() for scope in path)
        degrees = [degree for degree in (1, 2, 4, 8) if degree == 1 or (split and degree <= len(cluster.devices))]
        asked = any(scope.strategy.recompute is not None for path in scopes.values() for scope in path)
        profile = profile_model(
            loaded.model,
            loaded.batch,
            tensor_degrees=degrees,
            expert_degrees=degrees,
            context_degrees=cut_degrees(cluster, scopes),
            name=loaded.name,
            captured=traced.captured,
            precision=autocast,
            rules=asked or recompute not in (None, "none"),
        )
    word = f"compiling {loaded.name} for {counted(len(cluster.devices), 'device')}"

    def plan_under(
        annotations: Mapping[str, Sequence[str]] | None = None,
        planned: Sequence[PlanStage] = (),
        *,
        advises: bool = True,
    ) -> Planned:
        note(word)
        return make_plan(
            loaded.model,
            loaded.batch,
            Costs(
                profile=profile,
                cluster=cluster,
                precision=precision,
                micro_batches=micro_batches,
                device="cuda" if _accelerated(cluster) else "cpu",
                optimizer=optimizer,
            ),
            Options(
                micro_batches=micro_batches,
                schedule=schedule,
                precision=autocast,
                gradient_dtype=gradient_dtype,
                step_in_backward=step_in_backward,
                reduce=reduce,
                staleness=staleness,
                recompute="none" if recompute is None or recompute == "auto" else recompute,
                state=None if zero == "auto" else state,
                offload="none" if offload is None or offload == "auto" else offload,
            ),
            rows=rows,
            name=loaded.name,
            annotations=annotations,
            stages=planned,
            least=recompute == "auto",
            least_state=state if zero == "auto" else None,
            auto_shares=state_shares == "auto" or (zero == "auto" and state_shares is None),
            least_offload=offload == "auto",
            advises=advises,
            traced=traced,
        )

    if stages is None:
        found = plan_under()
    else:
        assert replicas is not None
        if scopes:
            raise UsageError(f"--stages {stages} is for a model without annotations, but {loaded.name} has some")
        rules: tuple[Recompute, ...] = ("none", "full") if recompute == "auto" else (recompute or "none",)
        levels = LEVELS if zero == "auto" else (zero or 0,)
        most = offload_steps(has_tables=profile.has_tables)[-1]
        words: tuple[Offload, ...] = ("none", most) if offload == "auto" else (offload or "none",)
        cuts = partial(
            pipeline_by_speed,
            profile,
            cluster,
            batch=rows,
            micro_batches=micro_batches,
            num_stages=stages,
            replicas=replicas,
            precision=precision,
            schedule=schedule,
            optimizer=optimizer,
        )

        ways = list(product(words, rules, levels))
        others = [{"offload": word, "recompute": rule, "zero": level} for word, rule, level in ways if len(ways) > 1]

        def pipeline_under(offload: Offload, recompute: Recompute, zero: int, room: float) -> Pipeline:
            try:
                return cuts(offload=offload, recompute=recompute, zero=zero, room=room, others=others)
            except InfeasibleError:
                # buckets of a divided state are counted generously here: what the compiled plan holds decides
                for level in dict.fromkeys((zero, LEVELS[-1])) if zero and room == 1 else ():
                    with suppress(InfeasibleError):
                        return cuts(offload=offload, recompute=recompute, zero=level, in_full=False)
                raise

        def planned(pipeline: Pipeline, advises: bool) -> Planned:
            axes = (PlanAxis(name="data", size=replicas, role="replicate"),) if replicas > 1 else ()
            placed = [PlanStage(ranks=ranks, axes=axes) for ranks in pipeline.ranks]
            return plan_under(stage_annotations(profile, pipeline.layers), placed, advises=advises)

        found = first_that_fits([partial(pipeline_under, *way, room) for way in ways for room in ROOMS], planned)
    if zero in LEVELS[1:] and all(len(stage.ranks) == 1 for stage in found.plan.stages):
        note(f"--zero {zero} divides nothing of a stage: each has one device, and no replicas")
    why = [f"why: {reason}" for reason in found.reasons]
    if found.even is not None and found.even is not found.predicted:
        even, step = found.even.prediction.step_seconds, found.predicted.prediction.step_seconds
        why.insert(0, f"even shares: {time_text(even)}, {even / step:.2f} times as long")
    said = (*said_of_model(loaded, precision, rows=rows), *said_of_hosts(found.plan, cluster))
    made = found.plan.model_copy(update={"assumptions": said})
    _show(made, found.predicted.prediction, found.predicted.workload, cluster, output, as_json, why)


def _of_profile(
    profile: ModelProfile,
    cluster: Cluster,
    batch: int | None,
    micro_batches: int,
    schedule: str,
    stages: int,
    replicas: int | None,
    recompute: Recompute | Literal["auto"] | None,
    state: StateSharding | None,
    gradient_dtype: str | None,
    step_in_backward: bool,
    offload: Offload | Literal["auto"] | None,
    reduce: Reduce | None,
) -> Choice:
    """The plan of a profile alone, which has no annotations."""
    from whale.commands.searching import plan_pipeline

    if batch is None:
        raise UsageError("--profile without --model has no example batch: say --batch")
    if recompute == "auto":
        raise UsageError("--recompute auto counts the bytes of a model: give --model, or one of none, selective, full")
    return plan_pipeline(
        profile,
        cluster,
        batch=batch,
        micro_batches=micro_batches,
        num_stages=stages,
        replicas=replicas or max(1, len(cluster.devices) // stages),
        schedule=schedule,
        recompute=recompute or "none",
        state=state,
        gradient_dtype=gradient_dtype,
        step_in_backward=step_in_backward,
        offload=_of_word(offload),
        reduce=reduce,
    )


def _of_level(
    zero: int | Literal["auto"] | None,
    shares: tuple[float, ...] | Literal["auto"] | None,
    align: Align | None,
    offload: Offload | Literal["auto"] | None,
    reduce: Reduce | None,
) -> StateSharding | None:
    """How replicas divide their state, where there is no model."""
    if zero == "auto" or shares == "auto":
        raise UsageError("--zero auto and --state-shares auto count the bytes of a model: give --model, or numbers")
    return sharding_of(zero, shares, align, offload, reduce)


def _of_word(offload: Offload | Literal["auto"] | None) -> Offload:
    """The word for what is on the host, where there is no model."""
    if offload == "auto":
        raise UsageError(
            "--offload auto counts the bytes of a model: give --model, or one of none, activations, state, both"
        )
    return offload or "none"


def _show(
    plan: Plan,
    prediction: Prediction,
    workload: Workload,
    cluster: Cluster,
    output: Path | None,
    as_json: bool,
    why: Sequence[str] = (),
) -> None:
    """Write the plan where asked; print it, or its stages, the step, the reasons and the command."""
    if output is not None:
        write_whole(output, plan.dumps())
        note(f"wrote {output}")
    if as_json:
        click.echo(plan.dumps(), nl=False)
        return
    lines = [stage_table(plan, prediction, workload, cluster), "", *step_lines(plan, prediction), *why]
    said = assumptions_text(plan.assumptions)
    click.echo("\n".join([*lines, *(["", said] if said else []), "", command(plan, cluster, output)]))


def _accelerated(cluster: Cluster) -> bool:
    """Whether no device is a processor."""
    return not any(device.type.is_processor for device in cluster.devices)
