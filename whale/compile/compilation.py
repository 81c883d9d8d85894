"""A compiled model: its stages with their devices and placements, what they exchange, and the order of their tasks.

It is equal on every rank, and immutable data: running it, also without data, does not change it. The programs of the
ranks are derived from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from whale.compile.trace import Traced
from whale.errors import CaptureError, UsageError
from whale.graph.captured import Captured
from whale.graph.origins import is_checkpointed
from whale.graph.partition import Partition
from whale.graph.values import Value, needs_grad, value_name, value_shape, value_tensor
from whale.ir.check import check_programs
from whale.ir.cluster import Cluster
from whale.ir.placement import Placement, Segment
from whale.ir.program import Edge, Program, ReduceSpec, StageSpec, project, project_rank
from whale.ir.schedule import Order, peak_in_flight
from whale.planner.assignment.assign import Assignment
from whale.runtime.local_program import LocalProgram
from whale.runtime.owned import Unit, rows_of
from whale.runtime.random import RNGPosition
from whale.runtime.shards import Shard
from whale.strategies.analysis import Analysis
from whale.strategies.dry_run import EarlySum, calls_as_text, check_stage, like_ranks, stage_calls
from whale.strategies.folding import Fold, folded
from whale.strategies.lowering import PlacedStage, at_micro_batch, lower
from whale.strategies.placing import Report
from whale.strategies.row_sums import RowSums, row_sums

__all__ = ["Compilation", "LocalParameter", "StoredForm", "placement_of"]


class LocalParameter(NamedTuple):
    """A rank's shard of a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


StoredForm = tuple[str, int, tuple[Segment, ...]]
"""Storage of a parameter on a mesh axis, independent of the graph: kind, dim, segments of the cut."""


@dataclass(kw_only=True)
class Compilation:
    """A model, compiled for one batch signature; equal on every rank.

    ``rows`` are the units of the batch in each micro-batch; ``warnings`` what the user should know of it;
    ``folds`` the runs of equal layers that are left out of its stages, for dry runs; ``units`` the buckets of which
    ranks own stretches; ``is_of_several`` says that there are several micro-batches, whose casts of parameters are
    shared; ``gradient_dtype`` is that in which gradients are summed, if it is not their own; ``step_in_backward`` says
    that parameters are updated, and their gradients freed, as soon as these are summed; ``staleness`` after how many
    steps owners have the sums of a step.
    """

    traced: Traced
    cluster: Cluster
    partition: Partition
    assignment: Assignment
    stages: tuple[PlacedStage, ...]
    edges: tuple[Edge, ...]
    order: Order
    rows: tuple[int, ...]
    reduces: tuple[ReduceSpec, ...]
    bucket_parameters: tuple[tuple[str, ...], ...]
    report: Report
    warnings: tuple[str, ...] = ()
    rank_specs: tuple[StageSpec, ...] = field(default=())
    folds: Mapping[int, tuple[Fold, ...]] = field(default_factory=dict)
    units: tuple[Unit, ...] = ()
    gradient_dtype: str = ""
    step_in_backward: bool = False
    staleness: int = 0
    is_of_several: bool = False
    _lowered: dict[tuple[int, int, RNGPosition | None], list[LocalProgram]] = field(default_factory=dict)

    @property
    def captured(self) -> Captured:
        """The graph of the model."""
        return self.traced.captured

    @property
    def analysis(self) -> Analysis:
        """The axes of that graph."""
        return self.traced.analysis

    def program(self, rank: int) -> Program:
        """The tasks, transfers and reductions of one rank."""
        return project_rank(self.order, self.rank_specs, self.edges, self.reduces, rank, self.gathers)

    def programs(self) -> dict[int, Program]:
        """The programs of all ranks, for the static check."""
        return project(self.order, self.rank_specs, self.edges, self.reduces, self.gathers)

    @cached_property
    def of_first(self) -> Compilation:
        """The same for the first micro-batch alone; what ranks run of it is sufficient for others of its kind."""
        order = tuple(task for task in self.order if task.micro_batch == 0)
        return replace(self, rows=self.rows[:1], order=order, is_of_several=self.is_of_several, _lowered={})

    @cached_property
    def folded(self) -> Compilation:
        """The same with few layers of each run of equal ones; parameters and communication between ranks are those of
        all."""
        changed, stages, folds = dict(self.analysis.ops), [], {}
        for stage in self.stages:
            short, ops, folds[stage.index] = folded(self.traced.kinds, stage)
            stages.append(short)
            changed |= ops
        if not any(folds.values()):
            return self
        traced = replace(self.traced, analysis=replace(self.analysis, ops=changed))
        return replace(self, traced=traced, stages=tuple(stages), folds=folds, _lowered={})

    @cached_property
    def computes_again(self) -> bool:
        """Whether backwards compute values again, by the rule of a stage or in a checkpoint of torch."""
        ruled = any(stage.recompute != "none" for stage in self.stages)
        return ruled or any(map(is_checkpointed, self.captured.graph.nodes))

    @cached_property
    def offloads_activations(self) -> bool:
        """Whether forwards of any stage keep on the host what their backwards read."""
        return any(stage.activations_on_host for stage in self.stages)

    @cached_property
    def tables_on_host(self) -> frozenset[str]:
        """The names of the tables in the host's memory."""
        return frozenset[str]().union(*(stage.on_host for stage in self.stages))

    @cached_property
    def row_sums(self) -> RowSums:
        """The sums over rows that ranks exchange before a step."""
        exchanged = any(stage.summed for stage in self.stages)
        return row_sums(self.captured, self.analysis, self.stages if exchanged else ())

    @cached_property
    def gathers(self) -> tuple[ReduceSpec, ...]:
        """The buckets whose parameters are gathered once a step, those first that a forward reads first."""
        units = sorted(self.units, key=lambda unit: unit.readers[0])
        return tuple(unit.spec for unit in units if unit.spec.gathers == "step")

    @cached_property
    def most_in_flight(self) -> dict[int, int]:
        """The most micro-batches in flight on each stage."""
        return peak_in_flight(self.order)

    def local_programs(self, stage: PlacedStage, rank: int, clock: RNGPosition | None) -> list[LocalProgram]:
        """The local programs of *rank* in a stage for each micro-batch; graphs are shared between micro-batches of
        equal size."""
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

    def check(self, rank: int, clock: RNGPosition | None) -> str:
        """Prove that the programs of all ranks match, and the collectives inside them.

        *rank* is this rank: its programs are lowered here, and cached. Returns the digests on which all ranks must
        agree. Raises :class:`ScheduleError` for the first fault.
        """
        specs = {spec.index: spec for spec in (*self.reduces, *self.gathers)}
        check_programs(self.programs(), self.rank_specs, self.edges, tuple(specs.values()), order=self.order)
        texts = []
        for stage in self.stages:
            try:
                calls = stage_calls(
                    self.captured, stage, self.rows, lambda s, r: self.local_programs(s, r, clock), rank
                )
            except NotImplementedError as error:  # torch says which operator has no backward without data
                raise CaptureError(
                    f"stage {stage.index} cannot be checked without data: {str(error).split('. ')[0]}; use another "
                    "operator"
                ) from error
            sums = [
                EarlySum(spec.index, spec.ranks, names)
                for spec, names in zip(self.reduces, self.bucket_parameters, strict=True)
                if spec.stages == (stage.index,) and len(spec.ranks) > 1
            ]
            last = self._kind_of_last(stage.index)
            each = any(spec.each for spec in self.reduces)
            check_stage(stage.index, calls, sums, [] if last is None else calls if each else [last])
            self.traced.communicating[stage.origin, self.rows[:1]] = self._axes(stage, clock, rank)
            texts.append(calls_as_text(stage, calls))
        self._lowered = {key: programs for key, programs in self._lowered.items() if key[1] == rank}
        return "\n".join(texts)

    def communicating(self, place: int) -> frozenset[int]:
        """The axes of a stage's mesh along which its programs communicate. They are the same in every layer and
        micro-batch, and for equal placements in all compilations of a trace."""
        key, known = (self.stages[place].origin, self.rows[:1]), self.traced.communicating
        if key not in known:
            short = self.of_first.folded  # whose programs dry runs have too
            known[key] = short._axes(short.stages[place], None)
        return known[key]

    def _axes(self, stage: PlacedStage, clock: RNGPosition | None, rank: int = -1) -> frozenset[int]:
        axes = [axis for axis, kind in enumerate(stage.mesh.axes) if kind.size > 1]
        used = set[int]()
        for members in like_ranks(stage, self.rows) if axes else ():
            actor = rank if rank in members else members[0]
            calls = {bridge.ranks for program in self.local_programs(stage, actor, clock) for bridge in program.bridges}
            used.update(axis for axis in axes if stage.mesh.group(axis, actor) in calls)
        return frozenset(used)

    def _kind_of_last(self, stage: int) -> int | None:
        """The first micro-batch with as many rows as that of a stage's last backward, if one is not split: the weights'
        part of a split backward, in which gradients are made, has no collectives of its own."""
        last = [task for task in self.order if task.stage == stage and task.kind in "BW"][-1:]
        return next((self.rows.index(self.rows[task.micro_batch]) for task in last if task.kind == "B"), None)

    def texts(self) -> dict[str, str]:
        """Named texts of everything that ranks must agree on."""
        captured = self.captured
        graph = [f"{captured.parameters} {captured.buffers} {captured.inputs} {captured.mutated}"]
        for node in captured.graph.nodes:
            values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
            kinds = [(v.dtype, tuple(v.shape)) for v in values]
            target = getattr(node.target, "__qualname__", node.target)  # a function has an address in its text
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), _without_index)
            graph.append(f"{node.op} {node.name} {target} {args} {kwargs} {kinds}")
        placements = [f"step in the backward {self.step_in_backward} staleness {self.staleness}"]
        for stage in self.stages:
            placements.append(f"stage {stage.index} {stage.mesh} {stage.layout.axes} recompute {stage.recompute}")
            placements.append(f"state {stage.state} on the host {stage.offload} {sorted(stage.on_host)}")
            placements.append(f"distinct {stage.distinct}")
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
        """Storage of every parameter on every stage, for a later compilation to reuse."""
        forms = {}
        for stage in self.stages:
            for value, placements in stage.stored.items():
                if value[0].name in self.captured.parameters:
                    forms[stage.index, self.parameter_name(value)] = tuple(
                        _form(self.analysis, value, p) for p in placements
                    )
        return forms

    @cached_property
    def unread(self) -> dict[str, PlacedStage]:
        """For each parameter that the step does not read the stage on whose ranks it lies whole: that which computes
        most closely around its module, the first where several do."""
        read = {
            self.parameter_name(value)
            for stage in self.stages
            for value in stage.stored
            if value[0].name in self.captured.parameters
        }
        names = [name for name in self.traced.parameters if name not in read]
        around: dict[str, PlacedStage] = {"": self.stages[0]}
        for stage in self.stages if names else ():
            for path in dict.fromkeys(path for node in stage.nodes for path in self.traced.paths.get(node, ())):
                while path:
                    around.setdefault(path, stage)
                    path = path.rpartition(".")[0]
        found = {}
        for name in names:
            path = name
            while path not in around:
                path = path.rpartition(".")[0]
            found[name] = around[path]
        return found

    def local_parameters(self, rank: int) -> dict[str, LocalParameter]:
        """The shard of every parameter on a rank, in the order of `shards`."""
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
        """Location of every parameter that the loss reads."""
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
        for unit in self.units:
            for rank, rows in unit.owners():
                for name in parts.keys() & set(unit.names):
                    whole = parts[name].pop(rank)
                    if name in rows:
                        parts[name][rank] = rows_of(whole, *rows[name])
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


def _without_index(argument: Any) -> Any:
    """An argument of an operator, as it is on every rank: each has a device of its own."""
    return torch.device(argument.type) if isinstance(argument, torch.device) else argument


def _form(analysis: Analysis, value: Value, placement: Placement) -> StoredForm:
    if placement.kind != "S":
        return placement.kind, -1, ()
    return "S", placement.dim, analysis.factors.segments(analysis.dims[value][placement.dim], placement.factor, {})


def placement_of(analysis: Analysis, value: Value, form: StoredForm) -> Placement:
    """The placement in this graph that stores a parameter as in *form*."""
    kind, dim, segments = form
    if kind != "S":
        return Placement(kind)  # type: ignore[arg-type]
    for factor in analysis.factors.cuttable(analysis.dims[value][dim]):
        if analysis.factors.segments(analysis.dims[value][dim], factor, {}) == segments:
            return Placement("S", dim, factor)
    raise UsageError(f"{value[0].name} cannot be stored in this batch's graph as it is: its dim {dim} is cut elsewhere")
