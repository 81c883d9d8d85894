"""Assembly of the step of one rank from a compilation and the rank's tensors.

The caller provides groups and transport: those of a launch, or dry ones, to run a step without other ranks. The
compilation is not changed: copies of its graphs' modules get groups and run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale.compile.compilation import Compilation
from whale.graph.values import Value, value_name, value_tensor
from whale.ir.program import Program, Reduce
from whale.runtime.engine import CompiledStep
from whale.runtime.executor import Executor
from whale.runtime.failure import Failures
from whale.runtime.outputs import Outputs, Piece
from whale.runtime.random import RNGPosition
from whale.runtime.reduce import Bucket, Reducer
from whale.runtime.stage import LocalStage, bound
from whale.strategies.lowering import nothing_of

__all__ = ["assemble"]


def assemble(
    compilation: Compilation,
    rank: int,
    program: Program,
    *,
    tensors: Mapping[tuple[str, str], Tensor],
    clock: RNGPosition,
    seeded: RNGPosition | None,
    bridge_group: Callable[[tuple[int, ...]], Any],
    reduce_group: Callable[[tuple[int, ...]], Any],
    failures: Failures,
    device: torch.device,
    transport: Any = dist,
    group: Any = None,
    backward_group: Any = None,
    credit: int | None = None,
) -> CompiledStep:
    """The step of *rank*.

    Args:
        compilation: of the model, for batches of one signature.
        rank: of the step.
        program: of that rank.
        tensors: ``("parameter" | "buffer" | "constant", name)`` and the tensor that the rank holds.
        clock: the RNG position: current step and micro-batch.
        seeded: the RNG position of random operators; None: they draw as the local model does.
        bridge_group: the process group of a bridge's ranks.
        reduce_group: the process group of a bucket's ranks.
        failures, device, transport, group, backward_group, credit: as in the executor.
    """
    stages: dict[int, LocalStage] = {}
    counts = False
    loss = next(stage.loss for stage in compilation.stages if stage.loss is not None)
    for stage in compilation.stages:
        if rank not in stage.mesh.ranks:
            continue
        programs = bound(
            compilation.local_programs(stage, rank, seeded), lambda name, ranks: bridge_group(tuple(sorted(ranks)))
        )
        names = [compilation.parameter_name(v) for v in stage.stored if v[0].name in compilation.captured.parameters]
        outputs = tuple(value_name(v) for v in stage.sent)
        if stage.loss is not None:
            outputs += ("loss",)
            at = stage.mesh.coordinates(rank)
            counts = all(c == 0 or p.kind == "P" for c, p in zip(at, stage.loss_placements[1:], strict=True))
        stages[stage.index] = LocalStage(
            programs=programs,
            outputs=outputs,
            mutated=tuple(stage.mutated),
            tensors=tensors,
            parameters=[p for n in names if isinstance(p := tensors["parameter", n], nn.Parameter)],
            clock=clock,
            returned=tuple(number for number, _, _ in stage.returned),
        )
    buckets = [
        Bucket(
            index=spec.index,
            parameters=tuple(tensors["parameter", n] for n in names),  # type: ignore[misc]
            ranks=spec.ranks,
            stages=frozenset(spec.stages) & stages.keys(),
            group=reduce_group(spec.ranks),
        )
        for spec, names in zip(compilation.reduces, compilation.bucket_parameters, strict=True)
        if rank in spec.ranks
    ]
    order = [instruction.bucket for instruction in program if isinstance(instruction, Reduce)]
    buckets.sort(key=lambda b: order.index(b.index))
    executor = Executor(
        rank=rank,
        program=program,
        edges=compilation.edges,
        stages=stages,
        reducer=Reducer(buckets, failures, transport) if buckets else None,
        failures=failures,
        device=device,
        transport=transport,
        group=group,
        backward_group=backward_group,
        credit=credit,
    )
    return CompiledStep(
        executor=executor,
        stages=list(stages.values()),
        counts_loss=counts,
        loss_dtype=value_tensor(loss).dtype if compilation.captured.has_loss else None,
        outputs=outputs_of(compilation),
    )


def outputs_of(compilation: Compilation) -> Outputs | None:
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
