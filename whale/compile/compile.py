"""From a captured model and the devices to the step that one rank runs: every pass of the compiler, in order.

capture -> partition -> axes -> devices -> placements -> transfers -> order -> this rank's program. Everything but the
last part is the same on every rank, a pure function of model, batch signature, cluster and options, so all ranks agree
without a word. Nothing here starts processes or allocates parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from whale.compile.exchanges import edges_between, sums_of_gradients
from whale.errors import PlanMismatchError, UsageError
from whale.graph.capture import Captured, capture, mark_gradients
from whale.graph.capture_checks import where
from whale.graph.identity import model_hash
from whale.graph.masks import recognize_masks
from whale.graph.ordering import settle_order
from whale.graph.partition import Partition, TaskGraph, partition
from whale.graph.values import Value, needs_grad, operands, resolve, value_name, value_shape, value_tensor
from whale.ir.check import check_programs
from whale.ir.cluster import Cluster
from whale.ir.placement import FANOUT, REPLICATE, Placement, Segment
from whale.ir.plan import Plan
from whale.ir.program import Edge, Program, ReduceSpec, StageSpec, project, project_rank
from whale.ir.schedule import Order, Task, peak_in_flight
from whale.ir.strategy import Strategy
from whale.planner.assignment.assign import Assignment, StageRequest, place, place_interleaved
from whale.planner.assignment.from_plan import place_as_planned
from whale.planner.cost.precision import BY_DTYPE
from whale.planner.schedules.orders import schedule_order
from whale.planner.simulation.simulate import check_workload, hop_seconds, task_seconds
from whale.runtime.module import Shard
from whale.runtime.random import Clock
from whale.runtime.stage import LocalProgram
from whale.strategies.analysis import Analysis, analyse
from whale.strategies.dry_run import calls_as_text, check_stage, stage_calls
from whale.strategies.lowering import PlacedStage, at_micro_batch, lower
from whale.strategies.placing import Report, StageProblem, batch_placeholders, place_stage, place_time
from whale.strategies.sharding import GLOO, Prices
from whale.strategies.ungroup import ungroup


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may choose besides annotations. ``micro_batches`` cut the batch that the model is made with.

    ``plan`` decides the stages' devices, if it says any. Its schedule and micro-batches must be those of these options.
    """

    micro_batches: int = 1
    schedule: str = "1f1b"
    default: Strategy | None = None
    prefer: str = "consecutive"
    promote: bool = False
    seed: int = 0
    plan: Plan | None = None


class LocalParameter(NamedTuple):
    """What a rank has of a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


StoredForm = tuple[str, int, tuple[Segment, ...]]
"""How a parameter is stored on a mesh axis, whatever the graph: kind, dim, segments of the cut."""


@dataclass(kw_only=True)
class Compilation:
    """A model, compiled for one batch signature; the same on every rank.

    ``rows`` are the units of the batch in each micro-batch.
    """

    captured: Captured
    partition: Partition
    analysis: Analysis
    assignment: Assignment
    stages: tuple[PlacedStage, ...]
    edges: tuple[Edge, ...]
    order: Order
    rows: tuple[int, ...]
    reduces: tuple[ReduceSpec, ...]
    bucket_parameters: tuple[tuple[str, ...], ...]
    report: Report
    rank_specs: tuple[StageSpec, ...] = field(default=())
    _lowered: dict[tuple[int, int, Clock | None], list[LocalProgram]] = field(default_factory=dict)

    def program(self, rank: int) -> Program:
        """The tasks, transfers and reductions of one rank."""
        return project_rank(self.order, self.rank_specs, self.edges, self.reduces, rank)

    def programs(self) -> dict[int, Program]:
        """The programs of all ranks, for the static check."""
        return project(self.order, self.rank_specs, self.edges, self.reduces)

    @cached_property
    def of_first(self) -> Compilation:
        """The same for the first micro-batch alone: what its ranks run of it is all that one of its kind needs."""
        order = tuple(task for task in self.order if task.micro_batch == 0)
        return replace(self, rows=self.rows[:1], order=order, _lowered={})

    @cached_property
    def known_programs(self) -> dict[int, Program]:
        """Those of all ranks, made once: for a step that is short."""
        return self.programs()

    @cached_property
    def most_in_flight(self) -> dict[int, int]:
        """Of each stage how many micro-batches it keeps at one time at most."""
        return peak_in_flight(self.order)

    def local_programs(self, stage: PlacedStage, rank: int, clock: Clock | None) -> list[LocalProgram]:
        """What *rank* runs of a stage in each micro-batch; graphs are shared between micro-batches of equal size."""
        key = (stage.index, rank, clock)
        if key not in self._lowered:
            by_rows: dict[Any, LocalProgram] = {}
            found = self._lowered[key] = []
            for index, rows in enumerate(self.rows):
                base = by_rows.get(rows)
                if base is None or base.depends_on_position:
                    base = by_rows[rows] = lower(self.captured, self.analysis, stage, rank, index, clock=clock)
                found.append(at_micro_batch(base, stage, rank, index))
        return self._lowered[key]

    def check(self, rank: int, clock: Clock | None) -> str:
        """Prove that the programs of all ranks fit together, and the collectives inside of them.

        *rank* is this one: what it runs is lowered here, and kept. Returns what all ranks must find alike.
        Raises :class:`ScheduleError` for the first fault.
        """
        check_programs(self.programs(), self.rank_specs, self.edges, self.reduces, order=self.order)
        texts = []
        for stage in self.stages:
            calls = stage_calls(self.captured, stage, self.rows, lambda s, r: self.local_programs(s, r, clock), rank)
            check_stage(stage.index, calls)
            texts.append(calls_as_text(stage, calls))
        self._lowered = {key: programs for key, programs in self._lowered.items() if key[1] == rank}
        return "\n".join(texts)

    def texts(self) -> dict[str, str]:
        """Everything that ranks must agree on, by what it is; the same on every rank that has compiled the same."""
        captured = self.captured
        graph = [f"{captured.parameters} {captured.buffers} {captured.inputs} {captured.mutated}"]
        for node in captured.graph.nodes:
            values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
            kinds = [(v.dtype, tuple(v.shape)) for v in values]
            target = getattr(node.target, "__qualname__", node.target)  # a function has an address in its text
            graph.append(f"{node.op} {node.name} {target} {node.args} {node.kwargs} {kinds}")
        placements = []
        for stage in self.stages:
            placements.append(f"stage {stage.index} {stage.mesh} {stage.layout.axes}")
            placements += [f"{n.name} {' '.join(map(str, c))}" for n, c in stage.choices.items()]
            for placed in (stage.stored, stage.sent):
                placements += sorted(f"{value_name(v)} {' '.join(map(str, p))}" for v, p in placed.items())
        order = f"{self.rows} {' '.join(map(str, self.order))} {self.reduces} {self.bucket_parameters}"
        return {
            "the captured model (its code, its sizes or the example batch)": "\n".join(graph),
            "its placement (annotations, cluster or options)": "\n".join(placements),
            "the order of its tasks (micro-batches or schedule)": order,
        }

    def parameter_name(self, value: Value) -> str:
        """Name of the parameter behind a placeholder."""
        return self.captured.parameters[value[0].name]

    def stored_forms(self) -> dict[tuple[int, str], tuple[StoredForm, ...]]:
        """How every stage stores every parameter, for a later compilation to do the same."""
        forms = {}
        for stage in self.stages:
            for value, placements in stage.stored.items():
                if value[0].name in self.captured.parameters:
                    forms[stage.index, self.parameter_name(value)] = tuple(
                        _form(self.analysis, value, p) for p in placements
                    )
        return forms

    def local_parameters(self, rank: int) -> dict[str, LocalParameter]:
        """The part of every parameter that lies on a rank, in the order of `shards`."""
        found: dict[str, LocalParameter] = {}
        for stage in self.stages:
            if rank not in stage.mesh.ranks:
                continue
            at = (0, *stage.mesh.coordinates(rank))
            for value, placements in stage.stored.items():
                if value[0].name in self.captured.parameters:
                    shape = stage.layout.local_shape(value, placements, at)
                    part = LocalParameter(shape, value_tensor(value).dtype, needs_grad(value))
                    found[self.parameter_name(value)] = part
        return {name: found[name] for name in dict.fromkeys(self.captured.parameters.values()) if name in found}

    def shards(self) -> dict[str, Shard]:
        """Where every parameter that the loss reads lies."""
        parts: dict[str, dict[int, Any]] = {}
        values: dict[str, Value] = {}
        for stage in self.stages:
            for value, placements in stage.stored.items():
                if value[0].name not in self.captured.parameters:
                    continue
                name = self.parameter_name(value)
                values[name] = value
                held = parts.setdefault(name, {})
                for rank in stage.mesh.ranks:
                    held[rank] = stage.layout.intervals(value, placements, (0, *stage.mesh.coordinates(rank)))
        # The order is the model's: parameters() must list them alike on every rank.
        captured_order = [name for name in dict.fromkeys(self.captured.parameters.values()) if name in values]
        return {
            name: Shard(
                shape=value_shape(value),
                dtype=value_tensor(value).dtype,
                parts=parts[name],
                trainable=needs_grad(value),
            )
            for name in captured_order
            for value in [values[name]]
        }


def _form(analysis: Analysis, value: Value, placement: Placement) -> StoredForm:
    if placement.kind != "S":
        return placement.kind, -1, ()
    return "S", placement.dim, analysis.atoms.segments(analysis.dims[value][placement.dim], placement.atom, {})


def _placement(analysis: Analysis, value: Value, form: StoredForm) -> Placement:
    """The placement of this graph that stores a parameter as *form* says."""
    kind, dim, segments = form
    if kind != "S":
        return Placement(kind)  # type: ignore[arg-type]
    for leaf in analysis.atoms.leaves(analysis.dims[value][dim]):
        if analysis.atoms.segments(analysis.dims[value][dim], leaf, {}) == segments:
            return Placement("S", dim, leaf)
    raise UsageError(f"{value[0].name} cannot be stored in this batch's graph as it is: its dim {dim} is cut elsewhere")


def compile_model(
    model: nn.Module,
    batch: Any,
    cluster: Cluster,
    options: Options,
    *,
    device: torch.device | str,
    training: bool,
    loss_fn: Callable[..., Any] | None = None,
    rows_per_micro_batch: int | None = None,
    stored: Mapping[tuple[int, str], tuple[StoredForm, ...]] | None = None,
    like: Compilation | None = None,
) -> Compilation:
    """Compile *model* for batches like *batch*.

    *stored* and *rows_per_micro_batch* are those of an earlier compilation whose parameters are in use. *like* is one
    of the same model and batch, with other options: its graph need not be captured again.

    Raises the errors of every pass; see :mod:`whale.errors`.
    """
    if like is not None:
        captured, cut, analysis = like.captured, like.partition, like.analysis
    else:
        captured = capture(model.train(training), batch, device=device, loss_fn=loss_fn, promote=options.promote)
        recognize_masks(captured)
        if ungroup(captured.graph):
            mark_gradients(captured, model)
        settle_order(captured)
        cut = partition(captured)
        analysis = analyse(captured.graph, batch_placeholders(captured))
    rows = _rows(analysis, options, rows_per_micro_batch)
    loss = resolve(captured.graph.output_node().args[0][0])  # type: ignore[index, arg-type]
    if loss[0] not in cut.stage_of:
        raise UsageError(
            f"the loss{where(loss[0])} depends on no parameter of the model: there is nothing to train; return a loss "
            "that is computed from the parameters"
        )
    if training and not needs_grad(loss):
        raise UsageError(
            f"the loss{where(loss[0])} depends on no parameter that requires a gradient: there is nothing to train; "
            "unfreeze a parameter with requires_grad_(), or call model.eval() first and use eval_step"
        )
    if options.plan is not None and stored is None:
        options.plan.check_model(model_hash(captured))
    assignment = _assign(cut, cluster, options, main_dtype(model))
    if assignment.idle_ranks:
        leaves = "plan leaves" if options.plan is not None and options.plan.decides_meshes else "annotations leave"
        warnings.warn(f"ranks {list(assignment.idle_ranks)} have no work: the {leaves} them out", stacklevel=3)
    report = Report()
    stages = _place_stages(captured, analysis, cut, assignment, rows, loss, device, report, stored or {})
    if options.plan is not None and options.plan.decides_meshes and stored is None:
        _check_units(analysis, stages, options.plan)
    edges = edges_between(stages, rows)
    specs = tuple(StageSpec(index=s.index, ranks=s.mesh.ranks) for s in stages)
    sets = tuple(frozenset(stage.mesh.ranks) for stage in stages)
    order = schedule_order(options.schedule, len(stages), len(rows), sets, *_times(options.plan, len(stages)))
    reduces, bucket_parameters = sums_of_gradients(captured, stages)
    return Compilation(
        captured=captured,
        partition=cut,
        analysis=analysis,
        assignment=assignment,
        stages=stages,
        edges=edges,
        order=order,
        rows=rows,
        reduces=reduces,
        bucket_parameters=bucket_parameters,
        report=report,
        rank_specs=specs,
    )


def _assign(cut: Partition, cluster: Cluster, options: Options, dtype: str) -> Assignment:
    """The devices of every stage: the plan's, or as annotations and cluster say."""
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


def main_dtype(model: nn.Module) -> str:
    """The number type by whose speeds a model is placed, as clusters name it: that of its first floating parameter.

    float64 counts as float32: a model in float64 is there to check one in float32, and is placed as that is.
    """
    name = _first_dtype(model)
    return name if name != "float64" else "float32"


def precision_of(model: nn.Module) -> str:
    """The precision in which a model's step is priced: that of its first floating parameter, ``tf32`` where that is
    float32 and the process lets CUDA multiply it so (``torch.set_float32_matmul_precision("high")``)."""
    name = BY_DTYPE[_first_dtype(model)]
    return "tf32" if name == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32" else name


def _first_dtype(model: nn.Module) -> str:
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    return str(first.dtype).removeprefix("torch.") if first is not None else "float32"


def _request(graph: TaskGraph) -> StageRequest:
    regions = tuple(dict.fromkeys(graph.scopes.values())) or ((),)
    return StageRequest(stage=graph.cut.stage, outer=graph.cut.outer, regions=regions)


def _rows(analysis: Analysis, options: Options, per_micro_batch: int | None) -> tuple[int, ...]:
    """How many units of the batch each micro-batch has; the last may have fewer where the plan says so, or
    in a later batch, which fills micro-batches of the first size."""
    count = options.micro_batches
    if count < 1:
        raise UsageError(f"micro_batches is {count}: it must be at least 1")
    units = analysis.atoms.size(analysis.batch_leaf) if analysis.batch_leaf >= 0 else 1
    if per_micro_batch is None and options.plan is not None and options.plan.batch == units:
        per_micro_batch = options.plan.micro_batch_rows
    if per_micro_batch is not None:
        full, rest = divmod(units, per_micro_batch)
        return (per_micro_batch,) * full + ((rest,) if rest else ())
    if units % count:
        near = [n for n in range(1, units + 1) if units % n == 0]
        below, above = [n for n in near if n < count], [n for n in near if n > count]
        nearest = " or ".join(str(n) for n in (*below[-1:], *above[:1]))
        raise UsageError(f"micro_batches={count} does not divide the batch of {units} rows; use {nearest}")
    return (units // count,) * count


def _times(plan: Plan | None, num_stages: int) -> tuple[Callable[[Task], float], float] | tuple[()]:
    """How long tasks and hops take, where the plan says it: some schedules depend on it, and the simulated order is
    the one to run."""
    workload = plan.workload if plan is not None else None
    if workload is None or len(workload.stages) != num_stages:
        return ()
    check_workload(workload)
    return task_seconds(workload), hop_seconds(workload)


def _place_stages(
    captured: Captured,
    analysis: Analysis,
    cut: Partition,
    assignment: Assignment,
    rows: tuple[int, ...],
    loss: Value,
    device: torch.device | str,
    report: Report,
    stored: Mapping[tuple[int, str], tuple[StoredForm, ...]],
) -> tuple[PlacedStage, ...]:
    prices = Prices() if torch.device(device).type == "cuda" else GLOO
    shared = _shared_parameters(captured, cut)
    outputs: tuple[Any, ...] = captured.graph.output_node().args[0]  # type: ignore[assignment]
    mutated = {name: resolve(node) for name, node in zip(captured.mutated, outputs[1:], strict=True)}
    fixed_shared: dict[Value, tuple[Placement, ...]] = {}
    time = place_time(captured, analysis, cut, len(rows))
    found: list[PlacedStage] = []
    for graph, spot in zip(cut.stages, assignment.stages, strict=True):
        read = {v for n in graph.nodes for v in operands(n) if v[0].name in captured.parameters}
        fixed: dict[Value, tuple[Placement, ...]] = {}
        for value in read:
            form = stored.get((graph.index, captured.parameters[value[0].name]))
            if form is not None:
                fixed[value] = tuple(_placement(analysis, value, f) for f in form)
            elif value in shared and not _same_meshes(assignment, shared[value]):
                fixed[value] = (REPLICATE,) + (FANOUT,) * len(spot.device.axes)
            elif value in fixed_shared:
                fixed[value] = fixed_shared[value]
        problem = StageProblem(
            task_graph=graph,
            mesh=spot.device,
            roles={n: spot.roles.of(graph.scopes[n]) for n in graph.nodes},
            rows=rows,
            time=time,
            loss=loss if cut.stage_of[loss[0]] == graph.index else None,
            mutated={k: v for k, v in mutated.items() if cut.stage_of.get(v[0], 0) == graph.index},
            fixed=fixed,
            shared=frozenset(v for v in read if v in shared),
        )
        placed = place_stage(captured, analysis, cut, problem, prices=prices, report=report)
        for value in read & set(shared):
            fixed_shared.setdefault(value, placed.stored[value])
        found.append(placed)
    _warn(report, captured)
    return tuple(found)


def _shared_parameters(captured: Captured, cut: Partition) -> dict[Value, tuple[int, ...]]:
    """Parameters that several stages read, and which."""
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
    """Refuse shares of the plan that count more units than anything has that is cut along their axis.

    (Rows are counted in the plan itself, against its batch.)
    """
    for stage, planned in zip(stages, plan.stages, strict=True):
        for position, axis in enumerate(planned.axes or ()):
            leaves = {choices[position + 1].leaf for choices in stage.choices.values()} - {-1}
            most = max((analysis.atoms.size(leaf) for leaf in leaves), default=0)
            if axis.counts_units and sum(axis.shares) > most:
                raise PlanMismatchError(
                    f"the plan's stages.{stage.index}.axes.{position}.shares sum to {sum(axis.shares)} units, but what "
                    f"the model cuts along {axis.name!r} has at most {most}; use whole numbers that sum to at most "
                    "that, or proportions such as 1.5"
                )


def _warn(report: Report, captured: Captured) -> None:
    names = sorted({str(node.target) for node in report.whole})
    if names:
        warnings.warn(
            f"no axis rule for {', '.join(names)}: computed whole on every rank of its mesh axis, with a bridge before "
            "it (slower, not wrong)",
            stacklevel=5,
        )
    uncut = sorted({f"{node.target}{where(node)}" for node in report.uncut})
    if uncut:
        warnings.warn(
            f"split along a dim: {', '.join(uncut[:5])} cannot be cut along it: computed whole on every rank, from "
            "gathered parts (slower, not wrong)",
            stacklevel=5,
        )
    matrices = [captured.parameters[v[0].name] for v in report.gathered if v[0].name in captured.parameters]
    if matrices:
        warnings.warn(
            f"split: {', '.join(matrices[:5])} cannot be stored in parts by its operators and stays whole", stacklevel=5
        )


def local_tensors(
    shards: Mapping[str, Shard], rank: int, whole: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """This rank's parameters, from the whole ones: the user's own object where it is whole, else a copy of the part."""
    from whale.runtime.stage import part

    found: dict[str, Tensor] = {}
    for name, shard in shards.items():
        if rank not in shard.parts:
            continue
        source = whole[name]
        piece = part(source.detach(), shard.parts[rank])
        if tuple(piece.shape) == tuple(source.shape):
            found[name] = source
        else:
            found[name] = nn.Parameter(piece.clone().contiguous(), requires_grad=source.requires_grad)
    return found
