"""The passes of the compiler: from a traced model and devices to a compilation.

stages -> devices -> placements -> transfers -> order. The result is a pure function of the traced model, the cluster
and the options, so all ranks agree without communication. Nothing here starts processes or allocates parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whale.compile.adasum import check_rows_apart, with_row_axes
from whale.compile.compilation import Compilation, LocalParameter, StoredForm, placement_of
from whale.compile.exchanges import edges_between, has_idle_ranks, places_of_readers, sums_of_gradients
from whale.compile.options import Options, distincts_of, offloads_of, reduces_of, rules_of, states_of
from whale.compile.trace import Traced, trace
from whale.errors import PlanMismatchError, UsageError
from whale.graph.captured import Captured
from whale.graph.origins import module_of, where
from whale.graph.partition import Partition, TaskGraph
from whale.graph.values import Value, operands, resolve, value_shape
from whale.ir.cluster import Cluster
from whale.ir.garbage import without_collections
from whale.ir.placement import REPLICATE, REPLICATE_PARTIAL, Placement
from whale.ir.plan import Plan
from whale.ir.program import StageSpec
from whale.ir.schedule import Task
from whale.ir.state import StateSharding
from whale.ir.strategy import STATE_ON_HOST, Offload, Reduce, ScopePath
from whale.planner.assignment.assign import Assignment, StageRequest, place, place_interleaved
from whale.planner.assignment.from_plan import place_as_planned
from whale.planner.cost.precision import DTYPES
from whale.planner.schedules.orders import schedule_order
from whale.planner.simulation.simulate import check_workload, p2p_seconds, task_seconds
from whale.runtime.owned import Unit
from whale.runtime.shards import Shard
from whale.strategies.analysis import Analysis
from whale.strategies.bridge_prices import GLOO, Prices
from whale.strategies.casts import read_as
from whale.strategies.host_tables import tables_of
from whale.strategies.lowering import PlacedStage
from whale.strategies.placing import Report, StageProblem, batch_placeholders, place_stage
from whale.strategies.row_sums import row_sums

__all__ = ["compile_model", "compile_traced", "local_tensors", "rows_of"]


@without_collections
def compile_traced(
    traced: Traced,
    cluster: Cluster,
    options: Options,
    *,
    device: torch.device | str,
    scopes: Mapping[str, ScopePath] | None = None,
    rows_per_micro_batch: int | None = None,
    stored: Mapping[tuple[int, str], tuple[StoredForm, ...]] | None = None,
    units: tuple[Unit, ...] = (),
    on_host: frozenset[str] = frozenset(),
) -> Compilation:
    """Compile a traced model for a cluster.

    Args:
        traced: the model. It is not changed: compilations for other options share it.
        cluster: the devices.
        options: the micro-batches, the schedule, and the plan, if any.
        device: ``cpu`` or ``cuda``; its kernels and links decide between placements.
        scopes: annotations in place of those with which the model was traced, by module path.
        rows_per_micro_batch: of an earlier compilation whose parameters are in use.
        stored: how that compilation stores its parameters.
        units: of which ranks own stretches in it.
        on_host: names of the tables that it has in the host's memory.

    Raises:
        AnnotationError, InfeasibleError, PlanMismatchError, UsageError: annotations, plan and devices do not fit.
    """
    captured, analysis = traced.captured, traced.analysis
    rows = rows_of(traced, options, rows_per_micro_batch)
    cut = traced.annotated if scopes is None else traced.stages(scopes)
    if options.plan is not None and stored is None:
        options.plan.check_model(traced.hash)
    assignment = _assign(cut, cluster, options, traced.dtype)
    report = Report()
    stages = _place_stages(traced, cut, assignment, rows, device, report, stored or {})
    rules = rules_of(cut, options)
    hosted = offloads_of(cut, options)
    reduces_by = reduces_of(cut, options)
    states = [
        _served(_on_host(state, offload), reduce)
        for state, offload, reduce in zip(states_of(cut, options), hosted, reduces_by, strict=True)
    ]
    for stage, state in zip(stages, states, strict=True):
        if state is not None and state.level and not captured.has_loss and stored is None:
            raise UsageError(
                f"stage {stage.index} has {state}, which divides what a step trains, but the example batch leads to no "
                "loss: give parallelize one with which there is a loss"
            )
    num = len(cluster.devices)
    if options.staleness:
        _check_late(options, stages, reduces_by, states)
    if "adasum" in reduces_by:
        stages = _with_replicas(traced, cut, assignment, stages, options)
    stages = tuple(
        replace(
            stage,
            recompute=rule,
            state=state.of_stage(stage.mesh.ranks, num) if state and state.level else None,
            offload=offload,
            reduce=reduce,
            distinct=distinct,
        )
        for stage, rule, state, offload, reduce, distinct in zip(
            stages, rules, states, hosted, reduces_by, distincts_of(cut, options), strict=True
        )
    )
    stages = _with_tables_on_host(captured, stages, None if stored is None else on_host)
    if options.local_rows:
        summed = row_sums(captured, analysis, stages).values
        stages = tuple(replace(stage, summed=summed) for stage in stages)
    if options.plan is not None and options.plan.decides_meshes and stored is None:
        _check_units(analysis, stages, options.plan)
    edges = edges_between(captured, stages, rows)
    specs = tuple(StageSpec(index=s.index, ranks=s.mesh.ranks) for s in stages)
    sets = tuple(frozenset(stage.mesh.ranks) for stage in stages)
    order = schedule_order(options.schedule, len(stages), len(rows), sets, *_times(options.plan, len(stages)))
    gradient_dtype = DTYPES.get(options.gradient_dtype or "", "")
    reduces, bucket_parameters = sums_of_gradients(
        captured, stages, rows, cluster, gradient_dtype, of_one=options.step_in_backward
    )
    found = Compilation(
        traced=traced,
        cluster=cluster,
        partition=cut,
        assignment=assignment,
        stages=stages,
        edges=edges,
        order=order,
        rows=rows,
        reduces=reduces,
        bucket_parameters=bucket_parameters,
        report=report,
        warnings=tuple(_warnings(assignment, options, report, captured)),
        rank_specs=specs,
        gradient_dtype=gradient_dtype,
        step_in_backward=options.step_in_backward,
        staleness=options.staleness,
        is_of_several=len(rows) > 1,
    )
    if stored is None:
        units = _units_of(found)
    else:
        _check_same_units(found, units)
        idle = {stage.index for stage in stages if units and has_idle_ranks(stage, len(rows))}
        units = tuple(
            replace(unit, spec=replace(unit.spec, gathers="step")) if idle.intersection(unit.spec.stages) else unit
            for unit in units
        )
    return replace(found, units=units)


def _with_tables_on_host(
    captured: Captured, stages: tuple[PlacedStage, ...], known: frozenset[str] | None
) -> tuple[PlacedStage, ...]:
    """Stages that know which of their tables are in the host's memory; those that are *known* stay there.

    Raises:
        UsageError: there are none where they are asked for, or stages share one that only some have there.
    """
    asked = [stage for stage in stages if stage.tables_on_host]
    found = {stage.index: tables_of(captured, stage.stored) if known is None else known for stage in asked}
    if asked and not any(found.values()) and known is None:
        raise UsageError(
            "offload='tables' has tables with sparse gradients in the host's memory, and there are none in "
            f"{'stage' if len(asked) == 1 else 'stages'} {', '.join(str(stage.index) for stage in asked)}: make "
            "embeddings with sparse=True, or leave it out"
        )
    for stage in stages:
        names = {captured.parameters[v[0].name] for v in stage.stored if v[0].name in captured.parameters}
        for index, tables in found.items():
            if shared := sorted(tables & names - found.get(stage.index, frozenset())):
                raise UsageError(
                    f"stages {index} and {stage.index} read {shared[0]}, but only stage {index} has offload='tables': "
                    "say it of both, or of none"
                )
    return tuple(replace(stage, on_host=found.get(stage.index, frozenset())) for stage in stages)


def _units_of(compilation: Compilation) -> tuple[Unit, ...]:
    """The buckets of which ranks own stretches."""
    found, local = [], dict[int, dict[str, LocalParameter]]()
    captured = compilation.captured
    nodes = {captured.parameters[n.name]: n for n in captured.graph.nodes if n.name in captured.parameters}
    places = places_of_readers(captured)
    for spec, names in zip(compilation.reduces, compilation.bucket_parameters, strict=True):
        if spec.bounds:
            rank = spec.ranks[0]
            if rank not in local:
                local[rank] = compilation.local_parameters(rank)
            kinds = [local[rank][name] for name in names]
            shapes = tuple(kind.shape for kind in kinds)
            on_host = all(compilation.stages[stage].state_on_host for stage in spec.stages)
            low = tuple(read_as(nodes[name]) or kinds[0].dtype for name in names)
            readers = min(places[name][0] for name in names), max(places[name][1] for name in names)
            found.append(
                Unit(
                    spec=spec,
                    names=names,
                    shapes=shapes,
                    dtype=kinds[0].dtype,
                    read_as=low,
                    on_host=on_host,
                    readers=readers,
                )
            )
    return tuple(found)


def _check_same_units(compilation: Compilation, units: Sequence[Unit]) -> None:
    """Refuse a step that trains other parameters than those which ranks hold in stretches.

    Raises:
        UsageError: it is such a one.
    """
    held = {(u.spec.index, u.names, u.spec.ranks, u.spec.bounds) for u in units}
    buckets = zip(compilation.reduces, compilation.bucket_parameters, strict=True)
    summed = {(s.index, names, s.ranks, s.bounds) for s, names in buckets if s.bounds}
    if summed and summed != held:
        raise UsageError(
            "the batch's step trains other parameters than that of the example batch, or in other parts, but zero= "
            "divides parameters as the first step trains them: give parallelize an example batch that reads all of "
            "them and returns the loss, or leave zero out"
        )


def compile_model(
    model: nn.Module,
    batch: Any,
    cluster: Cluster,
    options: Options,
    *,
    device: torch.device | str,
    training: bool,
    loss_fn: Callable[..., Any] | None = None,
) -> Compilation:
    """Trace *model* for batches like *batch*, and compile it.

    Raises the errors of :func:`whale.compile.trace.trace` and of :func:`compile_traced`.
    """
    traced = trace(
        model,
        batch,
        device=device,
        training=training,
        loss_fn=loss_fn,
        promote=options.promote,
        precision=options.precision,
    )
    return compile_traced(traced, cluster, options, device=device)


def _assign(cut: Partition, cluster: Cluster, options: Options, dtype: str) -> Assignment:
    """The devices of every stage: the plan's, or those from annotations and cluster."""
    requests = [_request(graph) for graph in cut.stages]
    if options.plan is not None and options.plan.decides_meshes:
        return place_as_planned(requests, cluster.devices, options.plan, default=options.default, dtype=dtype)
    assign = place_interleaved if options.schedule == "interleaved" else place
    assignment = assign(
        requests,
        cluster.devices,
        default=options.default,
        prefer=options.prefer,  # type: ignore[arg-type]
        dtype=dtype,
    )
    if options.plan is not None:
        options.plan.check_stages([stage.device.ranks for stage in assignment.stages])
    return assignment


def _check_late(
    options: Options,
    stages: Sequence[PlacedStage],
    reduces_by: Sequence[Reduce],
    states: Sequence[StateSharding | None],
) -> None:
    """Refuse late sums where there are no servers that could have them late.

    Raises:
        UsageError: says where.
    """
    told = f"staleness={options.staleness}: "
    for stage, reduce, state in zip(stages, reduces_by, states, strict=True):
        if reduce != "server":
            raise UsageError(
                f"{told}the sums of servers come late, but stage {stage.index} has reduce={reduce!r}: use "
                "reduce='server', or leave staleness out"
            )
        if state is not None and state.level > 1:
            raise UsageError(f"{told}servers have the sums of whole steps late, but zero={state.level}: leave zero out")
    if options.step_in_backward or options.precision == "fp16":
        other = "step_in_backward=True" if options.step_in_backward else "precision='fp16'"
        raise UsageError(f"{told}{other} needs the gradients of a step in it; leave one of them out")


def _with_replicas(
    traced: Traced, cut: Partition, assignment: Assignment, stages: tuple[PlacedStage, ...], options: Options
) -> tuple[PlacedStage, ...]:
    """Stages that know along which axes they are replicated, for gradients of replicas that are combined.

    Raises:
        UsageError: such gradients there are none, or these steps need sums.
    """
    if options.step_in_backward:
        raise UsageError(
            "reduce='adasum' combines the gradients of a step when all of them are there, but step_in_backward=True "
            "updates parameters before: leave one of them out"
        )
    if any(len(stage.mesh.ranks) > 1 for stage in stages) and traced.captured.has_loss:
        check_rows_apart(traced)
    found = []
    for stage, graph, spot in zip(stages, cut.stages, assignment.stages, strict=True):
        roles = {node: spot.roles.of(graph.scopes[node]) for node in graph.nodes}
        found.append(with_row_axes(stage, traced.analysis, roles, traced.captured.parameters))
    return tuple(found)


def _on_host(state: StateSharding | None, offload: Offload) -> StateSharding | None:
    """How a stage divides its state: ranks that have it on the host own stretches."""
    if offload not in STATE_ON_HOST or (state is not None and state.level):
        return state
    return StateSharding(1)


def _served(state: StateSharding | None, reduce: Reduce) -> StateSharding | None:
    """How a stage divides its state: servers own whole parameters."""
    if reduce != "server":
        return state
    return replace(state, align="parameter") if state is not None and state.level else StateSharding(1, (), "parameter")


def _request(graph: TaskGraph) -> StageRequest:
    regions = tuple(dict.fromkeys(graph.scopes.values())) or ((),)
    return StageRequest(stage=graph.cut.stage, outer=graph.cut.outer, regions=regions)


def rows_of(traced: Traced, options: Options, per_micro_batch: int | None) -> tuple[int, ...]:
    """Units of the batch in each micro-batch.

    A single one has them all, as many as there are. The last of several has fewer if the plan says so, or in a
    later batch, which fills micro-batches of the first size: a larger batch has more of them and needs no more memory.
    """
    count = options.micro_batches
    if count < 1:
        raise UsageError(f"micro_batches is {count}: it must be at least 1")
    units = traced.units
    if count == 1:
        return (units,)
    if per_micro_batch is None and options.plan is not None and options.plan.batch == units:
        per_micro_batch = options.plan.micro_batch_rows
    if per_micro_batch is not None:
        full, rest = divmod(units, per_micro_batch)
        return (per_micro_batch,) * full + ((rest,) if rest else ())
    if units % count:
        near = [n for n in range(1, units + 1) if units % n == 0]
        below, above = [n for n in near if n < count], [n for n in near if n > count]
        nearest = " or ".join(str(n) for n in (*below[-1:], *above[:1]))
        traced.cut_in_time(count)  # it names what couples all rows
        rows = value_shape((batch_placeholders(traced.captured)[0], 0))[0]
        parts = f"batch of {rows} rows"
        if rows != units:
            parts = f"{units} parts of the {parts}: the model computes {rows // units} together, as by chunk or view"
        raise UsageError(f"micro_batches={count} does not divide the {parts}; use {nearest}")
    return (units // count,) * count


def _times(plan: Plan | None, num_stages: int) -> tuple[Callable[[Task], float], float] | tuple[()]:
    """Times of tasks and p2p transfers in the plan, if any: some schedules depend on them, and the executed order must
    be the simulated one."""
    workload = plan.workload if plan is not None else None
    if workload is None or len(workload.stages) != num_stages:
        return ()
    check_workload(workload)
    return task_seconds(workload), p2p_seconds(workload)


def _place_stages(
    traced: Traced,
    cut: Partition,
    assignment: Assignment,
    rows: tuple[int, ...],
    device: torch.device | str,
    report: Report,
    stored: Mapping[tuple[int, str], tuple[StoredForm, ...]],
) -> tuple[PlacedStage, ...]:
    captured, analysis, loss = traced.captured, traced.analysis, traced.loss
    prices = Prices() if torch.device(device).type == "cuda" else GLOO
    shared = _shared_parameters(captured, cut)
    outputs: tuple[Any, ...] = captured.graph.output_node().args[0]  # type: ignore[assignment]
    mutated = captured.new_values
    returned = _returned_values(captured, cut, [resolve(node) for node in outputs[1 + len(mutated) :]])
    _check_buffers(captured, cut, mutated)
    fixed_shared: dict[Value, tuple[Placement, ...]] = {}
    time = traced.cut_in_time(len(rows))
    found: list[PlacedStage] = []
    # A tied parameter is stored as its last reader has it: a head has more to exchange than the table of its words.
    for graph, spot in reversed(list(zip(cut.stages, assignment.stages, strict=True))):
        read = {v for n in graph.nodes for v in operands(n) if v[0].name in captured.parameters}
        fixed: dict[Value, tuple[Placement, ...]] = {}
        for value in read:
            form = stored.get((graph.index, captured.parameters[value[0].name]))
            if form is not None:
                fixed[value] = tuple(placement_of(analysis, value, f) for f in form)
            elif value in shared and not _same_meshes(assignment, shared[value]):
                fixed[value] = (REPLICATE,) + (REPLICATE_PARTIAL,) * len(spot.device.axes)
            elif value in fixed_shared:
                fixed[value] = fixed_shared[value]
        problem = StageProblem(
            task_graph=graph,
            mesh=spot.device,
            roles={n: spot.roles.of(graph.scopes[n]) for n in graph.nodes},
            rows=rows,
            time=time,
            loss=loss if cut.stage_of[loss[0]] == graph.index else None,
            mutated={k: v for k, v in mutated.items() if cut.stage_of.get(v[0], graph.index) == graph.index},
            fixed=fixed,
            shared=frozenset(v for v in read if v in shared),
            returned=returned.get(graph.index, {}),
        )
        placed = _place_stage(traced, cut, problem, prices, report)
        for value in read & set(shared):
            fixed_shared.setdefault(value, placed.stored[value])
        found.append(placed)
    return tuple(reversed(found))


def _place_stage(traced: Traced, cut: Partition, problem: StageProblem, prices: Prices, report: Report) -> PlacedStage:
    """Place a stage, or take the placements of an equal one of an earlier compilation."""
    key = None if problem.key is None else (problem.key, prices)
    if key is None or key not in traced.placed:
        own = Report()
        placed = place_stage(traced.captured, traced.analysis, cut, problem, prices=prices, report=own)
        if key is not None:
            traced.placed[key] = placed, own
    else:
        placed, own = traced.placed[key]
        placed = replace(placed, index=problem.task_graph.index, mesh=problem.mesh)
    report.add(own)
    return placed


def _returned_values(captured: Captured, cut: Partition, values: Sequence[Value]) -> dict[int, dict[int, Value]]:
    """The tensors of the model's output that each stage returns, by their number.

    A value that depends on no parameter is computed by the last stage.
    """
    found: dict[int, dict[int, Value]] = {}
    for number, value in enumerate(values):
        if value[0].name in captured.parameters:
            stages = [cut.stage_of[user] for user in value[0].users if user in cut.stage_of]
            if not stages:
                raise UsageError(
                    f"the model's output has its parameter {captured.parameters[value[0].name]}, which nothing else in "
                    "it reads: leave it out of the output; model.full_state_dict() has it"
                )
            stage = min(stages)
        else:
            stage = cut.stage_of.get(value[0], len(cut.stages) - 1)
        found.setdefault(stage, {})[number] = value
    return found


def _check_buffers(captured: Captured, cut: Partition, mutated: Mapping[str, Value]) -> None:
    """Refuse a buffer that one stage changes and another reads, whose ranks would read the old values.

    What depends on no parameter and no statistic, such as a counter, every stage computes by itself.
    """
    for node in captured.graph.nodes:
        name = captured.buffers.get(node.name) if node.op == "placeholder" else None
        if name is None or name not in mutated or mutated[name][0] not in cut.stage_of:
            continue
        changes = cut.stage_of[mutated[name][0]]
        others = [user for user in node.users if cut.stage_of.get(user, changes) != changes]
        if others:
            raise UsageError(
                f"stage {changes} changes the buffer {name}, and stage {cut.stage_of[others[0]]} reads it"
                f"{where(others[0])}, but ranks of stages do not exchange buffers: change and read it in one stage"
            )


def _shared_parameters(captured: Captured, cut: Partition) -> dict[Value, tuple[int, ...]]:
    """Parameters that several stages read, with these stages."""
    readers: dict[Value, dict[int, None]] = {}
    for graph in cut.stages:
        for node in graph.nodes:
            for value in operands(node):
                if value[0].name in captured.parameters:
                    readers.setdefault(value, {})[graph.index] = None
    return {value: tuple(stages) for value, stages in readers.items() if len(stages) > 1}


def _same_meshes(assignment: Assignment, stages: Sequence[int]) -> bool:
    def mesh(stage: int) -> Any:
        device = assignment.stages[stage].device
        return device.shape, tuple(device.axis_shares(i) for i in range(len(device.axes)))

    return len({mesh(stage) for stage in stages}) == 1


def _check_units(analysis: Analysis, stages: Sequence[PlacedStage], plan: Plan) -> None:
    """Refuse shares of the plan with more units than anything split along their axis.

    (Rows are counted in the plan itself, against its batch; a single one is not cut.)
    """
    for stage, planned in zip(stages, plan.stages, strict=True):
        for position, axis in enumerate(planned.axes or ()):
            factors = {choices[position + 1].factor for choices in stage.choices.values()} - {-1}
            most = max((analysis.factors.size(factor) for factor in factors), default=0)
            is_one = axis.divides_batch and sum(axis.shares) == 1
            if axis.counts_units and sum(axis.shares) > most and not is_one:
                raise PlanMismatchError(
                    f"the plan's stages.{stage.index}.axes.{position}.shares sum to {sum(axis.shares)} units, but what "
                    f"the model cuts along {axis.name!r} has at most {most}; use whole numbers that sum to at most "
                    "that, or proportions such as 1.5"
                )


def _warnings(assignment: Assignment, options: Options, report: Report, captured: Captured) -> Iterator[str]:
    """Sentences to warn the user of devices without work, and of what is slower than it looks."""
    if assignment.idle_ranks:
        leaves = "plan leaves" if options.plan is not None and options.plan.decides_meshes else "annotations leave"
        yield f"ranks {list(assignment.idle_ranks)} have no work: the {leaves} them out"
    names = sorted({str(node.target) for node in report.whole})
    if names:
        yield (
            f"no axis rule for {', '.join(names)}: computed whole on every rank of its mesh axis, with a bridge before "
            "it (slower, not wrong)"
        )
    few = dict.fromkeys(f"{module_of(node) or 'the model'}{where(node)}" for node in report.few_heads)
    if few:
        more = f" and {len(few) - 5} more" if len(few) > 5 else ""
        yield (
            f"split: fewer heads than devices in the attention of {', '.join([*few][:5])}{more}: computed whole on "
            "every rank (slower, not wrong)"
        )
    uncut = sorted({f"{node.target}{where(node)}" for node in report.uncut})
    if uncut:
        yield (
            f"split along a dim: {', '.join(uncut[:5])} cannot be cut along it: computed whole on every rank, from "
            "gathered parts (slower, not wrong)"
        )
    matrices = list(
        dict.fromkeys(captured.parameters[v[0].name] for v in report.gathered if v[0].name in captured.parameters)
    )
    if matrices:
        yield f"split: {', '.join(matrices[:5])} cannot be stored in parts by its operators and stays whole"


def local_tensors(
    shards: Mapping[str, Shard], rank: int, whole: Mapping[str, Tensor], places: Mapping[str, torch.device]
) -> dict[str, Tensor]:
    """This rank's parameters, each on its device, from the whole ones: the user's object if it is whole and there, else
    a copy of the shard."""
    from whale.runtime.stage import part

    found: dict[str, Tensor] = {}
    for name, shard in shards.items():
        if rank not in shard.parts:
            continue
        source = whole[name]
        piece = part(source.detach(), shard.parts[rank])
        if tuple(piece.shape) == tuple(source.shape) and source.device.type == places[name].type:
            found[name] = source
        else:
            piece = piece.to(places[name], copy=True).contiguous()
            found[name] = nn.Parameter(piece, requires_grad=source.requires_grad)
    return found
