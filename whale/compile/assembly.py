"""Assembly of the step of one rank from its data and the rank's tensors.

The caller provides groups and transport: those of a launch, or dry ones, to run a step without other ranks. The data is
not changed: copies of its graphs' modules get groups and run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whale.compile.rank_step import RankStep
from whale.ir.program import Direction, Edge, Reduce, ReduceSpec
from whale.runtime.adasum import Combination
from whale.runtime.cuda_graphs import Recorder
from whale.runtime.engine import CompiledStep, ReplicaCounts
from whale.runtime.equal_rows import EqualRows
from whale.runtime.executor import Executor
from whale.runtime.failure import Failures
from whale.runtime.local_program import LocalProgram, bound, with_backwards
from whale.runtime.local_rows import RowTerms
from whale.runtime.messages import messages_of
from whale.runtime.random import RNGPosition
from whale.runtime.reduce import Bucket, Reducer
from whale.runtime.stage import LocalStage
from whale.strategies.gradients_in_place import gradients_in_place
from whale.strategies.less_memory import in_less_memory
from whale.strategies.pieces import in_pieces

__all__ = ["assemble"]


def assemble(
    step: RankStep,
    rank: int,
    *,
    tensors: Mapping[tuple[str, Any], Any],
    clock: RNGPosition,
    bridge_group: Callable[[tuple[int, ...]], Any],
    reduce_group: Callable[[tuple[int, ...]], Any],
    failures: Failures,
    device: torch.device,
    transport: Any = dist,
    host_group: Callable[[tuple[int, ...]], Any] | None = None,
    message_group: Callable[[Edge, Direction], Any] = lambda edge, direction: None,
    credit: int | None = None,
    recorder: Recorder | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> CompiledStep:
    """The step of *rank*.

    Args:
        step: its data.
        rank: of the step.
        tensors: ``("parameter" | "buffer" | "constant", name)`` and the tensor that the rank holds; for what it owns in
            stretches ``("unit", bucket)`` and ``("gradient", name)`` with what holds parameters and gradients.
        clock: the RNG position: current step and micro-batch.
        bridge_group: the process group of a bridge's ranks.
        reduce_group: the process group of a bucket's ranks.
        failures, device, credit: as in the executor.
        transport: has ``isend``, ``irecv`` and ``all_reduce``: ``torch.distributed``, except in a dry run.
        host_group: that of a bucket's ranks for tensors on the host; by default *reduce_group*.
        message_group: the process group of an edge's messages in a direction.
        recorder: of the device; None: graphs are run operator by operator.
        warn: called if they are run so nevertheless.
    """
    stages: dict[int, LocalStage] = {}
    units = {unit.spec.index: tensors["unit", unit.spec.index] for unit in step.units}
    for stage in step.stages:
        if recorder is None:
            programs = with_backwards(stage.programs, lambda code: in_less_memory(gradients_in_place(code)))
        else:
            stay = {index for index, unit in units.items() if unit.keeps_whole}
            programs = in_pieces(with_backwards(stage.programs, in_less_memory), recorder, clock, device, stay, warn)
        stages[stage.index] = LocalStage(
            programs=bound(programs, lambda name, ranks: bridge_group(tuple(sorted(ranks)))),
            outputs=stage.outputs,
            mutated=stage.mutated,
            tensors=tensors,
            parameters=[p for n in stage.parameters if isinstance(p := tensors.get(("parameter", n)), nn.Parameter)],
            clock=clock,
            device=device,
            returned=stage.returned,
            keeps_casts=recorder is not None,
        )
    early = {task.bucket: task.early for task in step.program if isinstance(task, Reduce)}
    held = {
        spec.index: tuple(tensors["gradient" if spec.bounds else "parameter", n] for n in names)
        for spec, names in step.buckets
    }

    def combination(spec: ReduceSpec, names: Sequence[str]) -> Combination | None:
        if spec.adasum is None:
            return None
        sizes = [prod(holder.shape) for holder in held[spec.index]]
        groups = reduce_group(spec.ranks), reduce_group(spec.adasum.ranks)
        return Combination(spec, names, sizes, rank, *groups, failures, transport)

    buckets = [
        Bucket(
            index=spec.index,
            parameters=held[spec.index],
            ranks=spec.ranks,
            stages=frozenset(spec.stages).intersection(stages),
            group=(host_group or reduce_group if spec.on_host else reduce_group)(spec.ranks),
            early=early[spec.index],
            unit=units[spec.index] if spec.bounds else None,
            each=spec.each,
            dtype=getattr(torch, spec.dtype) if spec.dtype else None,
            adasum=combination(spec, names),
            rows=spec.rows,
            on_host=spec.on_host,
        )
        for spec, names in step.buckets
    ]
    order = list(early)
    buckets.sort(key=lambda b: order.index(b.index))
    reducer = Reducer(buckets, failures, transport, staleness=step.staleness) if buckets else None
    executor = Executor(
        rank=rank,
        program=step.program,
        edges=step.edges,
        stages=stages,
        reducer=reducer,
        units=units,
        failures=failures,
        device=device,
        messages=messages_of(device, transport),
        group_of=message_group,
        credit=credit,
        equal_rows=EqualRows(
            {one.edge: one.keys for one in step.equal_rows},
            {(one.edge, at_source): held for one in step.equal_rows for at_source, held in one.held.items()},
            device,
        ),
    )

    def alone(program: LocalProgram, outputs: tuple[str, ...]) -> LocalStage:
        """A stage without tasks."""
        bare: dict[str, Any] = {"outputs": outputs, "mutated": (), "parameters": ()}
        return LocalStage(programs=(program,), tensors=tensors, clock=clock, device=device, **bare)

    terms = tuple((numbers, alone(program, tuple(map(str, numbers)))) for numbers, program in step.sums.terms)
    count = None
    if step.count is not None:
        own = step.count.program
        counting = None if own is None else alone(own, ("count",))
        count = ReplicaCounts(step.count.replicas, step.count.replica, counting)
    return CompiledStep(
        count=count,
        sums=RowTerms(step.sums.likes, terms),
        executor=executor,
        stages=list(stages.values()),
        counts_loss=step.counts_loss,
        loss_dtype=step.loss_dtype,
        outputs=step.outputs,
    )
