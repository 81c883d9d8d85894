"""The replicas of a compiled model whose gradients Adasum combines: their ranks, their rows, and the divisors of their
losses.

A rank has a term of the gradient of the mean over all rows. Times the count of all rows, over that of its own, it is
the gradient of the mean over these, if no row is computed from another one. Knows placed stages; runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from torch import fx

from whale.compile.trace import Traced
from whale.errors import UsageError
from whale.graph.captured import Captured
from whale.graph.values import Value, value_name, value_tensor
from whale.ir.adasum import Adasum
from whale.ir.shares import shares_on_axis
from whale.ir.strategy import RegionRole, divides_batch
from whale.runtime.local_program import LocalProgram
from whale.strategies.analysis import Analysis
from whale.strategies.lowering import PlacedStage
from whale.strategies.row_sums import counts_of_loss, term_of_sum

__all__ = ["check_rows_apart", "count_of_replica", "divisor_of", "replicas_of", "with_row_axes"]


def check_rows_apart(traced: Traced) -> None:
    """Refuse a model that computes a row of the batch from others.

    Raises:
        UsageError: it is such a one.
    """
    try:
        traced.cut_in_time(2)
    except UsageError as error:
        reason = str(error).partition(": ")[2].partition("; use ")[0]
        raise UsageError(
            "reduce='adasum' combines the gradients of replicas, each of the mean loss over its own rows, but "
            f"{reason}; use another operator (as a GroupNorm for a BatchNorm), or reduce='mean'"
        ) from error


def with_row_axes(
    stage: PlacedStage, analysis: Analysis, roles: Mapping[fx.Node, Sequence[RegionRole]], parameters: Mapping[str, str]
) -> PlacedStage:
    """A stage with the axes along which all that reads a parameter, or computes the loss, is replicated."""
    found: dict[Value, set[int]] = {}
    every = set(range(len(stage.mesh.axes)))
    for node in stage.nodes:
        own = {axis for axis in every if divides_batch(roles[node][axis])}
        values = [value for value in analysis.ops[node].operands if value[0].name in parameters]
        values += [] if stage.loss is None or stage.loss[0] is not node else [stage.loss]
        for value in values:
            found[value] = found.get(value, every) & own
    return replace(stage, row_axes={value: tuple(sorted(axes)) for value, axes in found.items()})


def replicas_of(
    captured: Captured,
    stages: Sequence[PlacedStage],
    entries: Sequence[tuple[PlacedStage, Value]],
    ranks: Sequence[int],
    everyone: Sequence[int],
    rows: Sequence[int],
    divisor: Value | None,
) -> Adasum | None:
    """How ranks combine the gradients of a parameter; None if they sum them.

    Args:
        captured: the model.
        stages: all of it.
        entries: the stages that read the parameter, with the value that it is there.
        ranks: that have terms of the gradient of one part of it.
        everyone: that have parts of it.
        rows: of the batch in each micro-batch.
        divisor: the sum over rows that divides the loss (`divisor_of`).

    Raises:
        UsageError: the stages' replicas are others, or those of which the loss is divided.
    """
    name = captured.parameters[entries[0][1][0].name]
    if len({stage.reduce for stage, _ in entries}) > 1:
        raise UsageError(
            f"stages {[stage.index for stage, _ in entries]} share {name}, and only one of them has reduce='adasum': "
            "say it of all of them"
        )
    if entries[0][0].reduce != "adasum":
        return None
    replica: dict[int, set[int]] = {}
    found: set[tuple[int, ...]] = set()
    for stage, value in entries:
        summed = [axis for axis, placement in enumerate(stage.stored[value][1:]) if placement.kind == "R*"]
        axes = [axis for axis in stage.row_axes.get(value, ()) if axis in summed]
        found.add(_rows_of_replicas(stage, axes, rows))
        for rank in set(ranks).intersection(stage.mesh.ranks):
            replica.setdefault(rank, set()).add(_position(stage, axes, rank))
    if len(found) > 1 or any(len(own) > 1 for own in replica.values()):
        raise UsageError(
            f"stages {[stage.index for stage, _ in entries]} share {name}, but divide the batch into {sorted(found)} "
            "rows: reduce='adasum' needs as many replicas in both, each with the same rows; use reduce='mean'"
        )
    counts = found.pop()
    if len(counts) < 2:
        return None
    replicas = tuple(
        tuple(rank for rank in sorted(ranks) if replica[rank] == {number}) for number in range(len(counts))
    )
    if not all(replicas):
        raise UsageError(f"{name} has no rank of each of its {len(counts)} replicas: use reduce='mean'")
    dtype = value_tensor(entries[0][1]).dtype
    if not dtype.is_floating_point:
        raise UsageError(f"{name} is {str(dtype).removeprefix('torch.')}: reduce='adasum' combines real gradients")
    if divisor is not None:
        loss = next(stage for stage in stages if stage.loss is not None)
        assert loss.loss is not None
        if _rows_of_replicas(loss, loss.row_axes.get(loss.loss, ()), rows) != counts:
            raise UsageError(
                f"the loss is divided by {value_name(divisor)}, a count of the batch's values, of which the ranks of "
                f"stage {loss.index} have another part than the {len(counts)} replicas of {name}: divide the batch "
                "alike in both for reduce='adasum', or use reduce='mean'"
            )
    told = counts if divisor is None else ()
    return Adasum(replicas=replicas, rows=told, ranks=tuple(sorted(set(everyone))), table=())


def _position(stage: PlacedStage, axes: Sequence[int], rank: int) -> int:
    at, number = stage.mesh.coordinates(rank), 0
    for axis in axes:
        number = number * stage.mesh.axes[axis].size + at[axis]
    return number


def _rows_of_replicas(stage: PlacedStage, axes: Sequence[int], rows: Sequence[int]) -> tuple[int, ...]:
    """The rows of a step that each replica computes on, if some axes divide the batch."""
    total = [0] * prod(stage.mesh.axes[axis].size for axis in axes)
    for units in rows:
        parts = [units]
        for axis in axes:
            parts = [own for part in parts for own in shares_on_axis(part, stage.mesh.axis_shares(axis))]
        total = [before + own for before, own in zip(total, parts, strict=True)]
    return tuple(total)


def divisor_of(captured: Captured, analysis: Analysis, stages: Sequence[PlacedStage]) -> Value | None:
    """The sum over rows that divides the loss; None if it is a number.

    Raises:
        UsageError: several do, or one in another way.
    """
    loss = next(stage for stage in stages if stage.loss is not None)
    found, others = counts_of_loss(captured, analysis, loss)
    if len(found) > 1 or others:
        names = [value_name(value) for value in (*found, *others) if value is not None]
        raise UsageError(
            f"the loss has sums over rows of the batch, {', '.join(names)}, and is not one sum divided by one count: "
            "reduce='adasum' takes the mean over each replica's own rows; let every term of the loss be divided by the "
            "same count, or use reduce='mean'"
        )
    return next(iter(found), None)


def count_of_replica(
    captured: Captured, analysis: Analysis, stages: Sequence[PlacedStage], rank: int
) -> tuple[int, LocalProgram | None]:
    """The position of a rank's replica, and the program of what it adds to the count that divides the loss there."""
    loss = next(stage for stage in stages if stage.loss is not None)
    divisor = divisor_of(captured, analysis, stages)
    if rank not in loss.mesh.ranks or divisor is None:
        return 0, None
    assert loss.loss is not None
    return _position(loss, loss.row_axes[loss.loss], rank), term_of_sum(captured, analysis, loss, rank, divisor)
