"""The rows of a batch that each rank of a compiled model brings, if ranks bring their own rows alone.

They are those of the largest input that the rank's stage reads, as the placements cut it; a stage that reads none has
those of the values it receives. Other inputs may be read beyond these rows. Placements are all that this knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from torch import fx

from whale.compile.compilation import Compilation
from whale.graph.values import Value, value_shape, value_tensor
from whale.runtime.local_rows import Cuts, RowShares
from whale.strategies.lowering import PlacedStage
from whale.strategies.placing import batch_placeholders

__all__ = ["batch_leaf_names", "row_shares"]

Axes = frozenset[int]
"""Positions in a stage's mesh of the axes that cut the batch."""


def batch_leaf_names(compilation: Compilation) -> frozenset[str]:
    """Names of the leaves of a batch whose first dim is the batch."""
    captured = compilation.captured
    return frozenset(captured.inputs[node.name] for node in batch_placeholders(captured))


def row_shares(compilation: Compilation) -> RowShares:
    """The rows of every rank, for any number of rows."""
    analysis, inputs = compilation.analysis, batch_placeholders(compilation.captured)
    rows = value_shape((inputs[0], 0))[0] if inputs else 0
    outermost = analysis.factors.flat(analysis.dims[inputs[0], 0][0])[:1] if inputs else []
    divided = analysis.batch_factor >= 0 and outermost == [analysis.factors.find(analysis.batch_factor)]
    cuts: dict[int, Cuts] = {}
    for stage in compilation.stages:
        axes = _axes(compilation, stage, inputs) if divided else frozenset()
        for rank in stage.mesh.ranks:
            at = stage.mesh.coordinates(rank)
            cuts.setdefault(rank, tuple((stage.mesh.axis_shares(axis), at[axis]) for axis in sorted(axes)))
    units = compilation.traced.units if divided else 1
    return RowShares(
        rows=rows,
        unit=max(rows // units, 1),
        per_micro_batch=compilation.rows[0] if len(compilation.rows) > 1 else None,
        cuts=cuts,
        first_stage=tuple({cuts[rank]: rank for rank in reversed(compilation.stages[0].mesh.ranks)}.values())[::-1],
    )


def _axes(compilation: Compilation, stage: PlacedStage, inputs: Iterable[fx.Node]) -> Axes:
    """The axes that cut the rows of the largest input that a stage reads, or else of what it receives, for all
    readers."""
    found: dict[Value, Axes] = {}
    for value, axes in _reads(compilation, stage):
        found[value] = found.get(value, axes) & axes
    read = [(node, 0) for node in inputs if (node, 0) in found] or [v for v in stage.received if v in found]
    return found[max(read, key=lambda v: value_tensor(v).nbytes)] if read else frozenset()


def _reads(compilation: Compilation, stage: PlacedStage) -> Iterator[tuple[Value, Axes]]:
    """Values that a stage's operators read, through any that are not placed, with the axes that cut their batch."""
    analysis, placed = compilation.analysis, frozenset(stage.nodes)

    @cache
    def sources(value: Value) -> tuple[Value, ...]:
        op = analysis.ops.get(value[0])
        if op is None or value in stage.stored or not has_batch(value):
            return (value,)
        return tuple(dict.fromkeys(source for operand in op.operands for source in sources(operand)))

    def has_batch(value: Value) -> bool:
        return any(analysis.factors.count(dim, analysis.batch_factor) for dim in analysis.dims[value])

    for node in stage.nodes:
        for i, operand in enumerate(analysis.ops[node].operands):
            if operand[0] in placed or not has_batch(operand):
                continue
            wanted = [choice.inputs[i] for choice in stage.choices[node][1:]]
            axes = frozenset(
                axis for axis, p in enumerate(wanted) if p.kind == "S" and p.factor == analysis.batch_factor
            )
            for source in sources(operand):
                if has_batch(source):
                    yield source, axes
