"""A step of one rank as data: programs, transfers, sums and outputs, without tensors of the rank and without groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from whale.compile.adasum import count_of_replica
from whale.compile.compilation import Compilation
from whale.graph.values import Value, value_name, value_tensor
from whale.ir.program import Compute, Edge, Program, ReduceSpec
from whale.runtime.equal_rows import RowKeys
from whale.runtime.local_program import Intervals, LocalProgram, ShapeAndDtype
from whale.runtime.outputs import Outputs, Piece
from whale.runtime.owned import Unit
from whale.runtime.random import RNGPosition
from whale.strategies.arrivals import awaited
from whale.strategies.casts import cast_once
from whale.strategies.derivatives import with_derivatives
from whale.strategies.equal_rows import keys_of
from whale.strategies.gathering import gathered
from whale.strategies.lowering import nothing_of
from whale.strategies.offloading import offloaded

__all__ = ["RankCount", "RankKeys", "RankStage", "RankStep", "RankSums", "rank_step"]


@dataclass(frozen=True, kw_only=True)
class RankStage:
    """A stage on one rank.

    Attributes:
        index: of the stage.
        programs: one a micro-batch; equal ones are the same object.
        parameters: names of those that it stores.
        outputs: names of the values that a program returns to the executor.
        mutated: names of the buffers whose new values follow.
        returned: numbers of the tensors of the model's output that follow.
    """

    index: int
    programs: tuple[LocalProgram, ...]
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    mutated: tuple[str, ...]
    returned: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RankSums:
    """The sums over rows of all ranks that a step reads.

    Attributes:
        likes: their shapes and dtypes.
        terms: programs that return this rank's terms, with the numbers of their sums.
    """

    likes: tuple[ShapeAndDtype, ...]
    terms: tuple[tuple[tuple[int, ...], LocalProgram], ...]


@dataclass(frozen=True, kw_only=True)
class RankCount:
    """The divisor of the loss of each replica, a count of the batch's values.

    Attributes:
        replicas: their number.
        replica: that of this rank.
        program: returns what the rank adds to its replica's count; None if nothing.
    """

    replicas: int
    replica: int
    program: LocalProgram | None


@dataclass(frozen=True, kw_only=True)
class RankKeys:
    """The keys of an edge's rows, and the parts of its value that the rank has of each micro-batch, where it is at the
    source and at the target."""

    edge: int
    keys: RowKeys
    held: Mapping[bool, tuple[Intervals, ...]]


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """A step of one rank.

    Attributes:
        program: its tasks, transfers and sums, in order.
        edges: of all stages.
        stages: those of the rank.
        buckets: sums of gradients of which the rank has a term, with the names of their parameters.
        counts_loss: whether the rank's loss is part of the global sum.
        loss_dtype: None if the model returns no loss.
        outputs: how ranks make the model's output; None if the step does not return it.
        constants: tensors that the model's code contains, by name.
        sums: those over rows of all ranks, in steps of local batches.
        units: buckets of which the rank owns a stretch.
        count: the divisor of the loss of each replica, if their gradients are combined and it is no number.
        staleness: steps after which owners have the sums of a step.
        equal_rows: how both ends of its edges know which rows are equal, where these are sent once.
    """

    program: Program
    edges: tuple[Edge, ...]
    stages: tuple[RankStage, ...]
    buckets: tuple[tuple[ReduceSpec, tuple[str, ...]], ...]
    counts_loss: bool
    loss_dtype: torch.dtype | None
    outputs: Outputs | None
    constants: Mapping[str, Tensor]
    sums: RankSums = RankSums(likes=(), terms=())
    units: tuple[Unit, ...] = ()
    count: RankCount | None = None
    staleness: int = 0
    equal_rows: tuple[RankKeys, ...] = ()


def rank_step(
    compilation: Compilation,
    rank: int,
    program: Program,
    seeded: RNGPosition | None,
    *,
    device: torch.device | None = None,
    layouts: Mapping[str, tuple[int, ...]] | None = None,
) -> RankStep:
    """The step of *rank* in a compilation.

    Args:
        compilation: of the model, for batches of one signature.
        rank: of the step.
        program: of that rank.
        seeded: the RNG position of random operators; None: they draw as the local model does.
        device: on which it runs; None for programs without derivatives and gathers.
        layouts: strides of the rank's parameters and buffers, where they are not contiguous.
    """
    in_parts = any(isinstance(task, Compute) and task.kind == "I" for task in program)
    captured = compilation.captured
    counts = False
    units = tuple(unit for unit in compilation.units if rank in unit.spec.ranks)
    stages = []
    for stage in compilation.stages:
        if rank not in stage.mesh.ranks:
            continue
        outputs = tuple(value_name(v) for v in stage.sent)
        if stage.loss is not None:
            outputs += ("loss",)
            at = stage.mesh.coordinates(rank)
            counts = all(c == 0 or p.kind == "P" for c, p in zip(at, stage.loss_placements[1:], strict=True))
        programs = compilation.local_programs(stage, rank, seeded)
        if device is not None and captured.has_loss:
            programs = with_derivatives(captured, stage, rank, programs, device, in_parts=in_parts, layouts=layouts)
        if device is not None and compilation.is_of_several:
            programs = cast_once(programs, {name for unit in units for name in unit.names})
        if units and device is not None:
            programs = gathered(programs, units)
        if stage.activations_on_host and device is not None:
            programs = offloaded(programs)
        if device is not None:
            programs = awaited(programs)
        stages.append(
            RankStage(
                index=stage.index,
                programs=tuple(programs),
                parameters=tuple(
                    compilation.parameter_name(v) for v in stage.stored if v[0].name in captured.parameters
                ),
                outputs=outputs,
                mutated=tuple(stage.mutated),
                returned=tuple(number for number, _, _ in stage.returned),
            )
        )
    loss = next(stage.loss for stage in compilation.stages if stage.loss is not None)
    return RankStep(
        program=program,
        edges=tuple(compilation.edges),
        stages=tuple(stages),
        buckets=tuple(
            (spec, tuple(names))
            for spec, names in zip(compilation.reduces, compilation.bucket_parameters, strict=True)
            if rank in spec.ranks
        ),
        counts_loss=counts,
        loss_dtype=value_tensor(loss).dtype if captured.has_loss else None,
        outputs=_outputs_of(compilation),
        constants=captured.constants,
        sums=_sums_of(compilation, rank),
        units=units,
        count=_count_of(compilation, rank),
        staleness=compilation.staleness,
        equal_rows=tuple(_equal_rows_of(compilation, rank)),
    )


def _equal_rows_of(compilation: Compilation, rank: int) -> Iterator[RankKeys]:
    stages = {stage.index: stage for stage in compilation.stages}
    for edge in compilation.edges:
        source, target = stages[edge.source_stage], stages[edge.target_stage]
        if edge.distinct is None or rank not in {*source.mesh.ranks, *target.mesh.ranks}:
            continue
        value = next(value for value in source.sent if value_name(value) == edge.value)
        keys = keys_of(compilation.captured, value)
        assert keys is not None
        held = {}
        for stage, placements in ((source, source.sent[value]), (target, target.stored[value])):
            if rank in stage.mesh.ranks:
                at = stage.mesh.coordinates(rank)
                held[stage is source] = tuple(
                    stage.layout.intervals(value, placements, (number, *at)) for number in range(len(compilation.rows))
                )
        yield RankKeys(edge=edge.index, keys=keys, held=held)


def _count_of(compilation: Compilation, rank: int) -> RankCount | None:
    counted = [spec.adasum for spec in compilation.reduces if spec.adasum is not None and not spec.adasum.rows]
    if not counted:
        return None
    replica, program = count_of_replica(compilation.captured, compilation.analysis, compilation.stages, rank)
    return RankCount(replicas=len(counted[0].replicas), replica=replica, program=program)


def _sums_of(compilation: Compilation, rank: int) -> RankSums:
    sums = compilation.row_sums
    own = [stage for stage in compilation.stages if rank in stage.mesh.ranks]
    found = [sums.terms(stage, rank) for stage in own if sums.of_stage.get(stage.index)]
    kinds = [value_tensor(value) for value in sums.values]
    return RankSums(
        likes=tuple((tuple(kind.shape), kind.dtype) for kind in kinds),
        terms=tuple(terms for terms in found if terms is not None),
    )


def _outputs_of(compilation: Compilation) -> Outputs | None:
    """How ranks make the model's output, if the steps of a compilation return it.

    The first rank and micro-batch with rows gives a part that several have.
    """
    structure = compilation.captured.structure
    if structure is None:
        return None
    values: dict[int, Value] = {}
    pieces = []
    for stage in compilation.stages:
        for number, value, placements in stage.returned:
            values[number] = value
            given = set()
            for micro_batch, rank in product(range(len(compilation.rows)), stage.mesh.ranks):
                at = (micro_batch, *stage.mesh.coordinates(rank))
                key = tuple(c for c, p in zip(at, placements, strict=True) if p.kind in ("S", "P"))
                if key not in given and nothing_of(stage, at) is None:
                    given.add(key)
                    intervals = stage.layout.intervals(value, placements, at)
                    pieces.append(Piece(number=number, rank=rank, micro_batch=micro_batch, intervals=intervals))
    tensors = [value_tensor(values[number]) for number in range(len(values))]
    return Outputs(
        shapes=[tuple(x.shape) for x in tensors],
        dtypes=[x.dtype for x in tensors],
        pieces=pieces,
        filled=structure.filled,
    )
