"""Shares by speed: the order of devices and the shares along each axis with which the slowest stage takes least.

The annotations decide stages, degrees and regions. Stages of equal size may be swapped;
`whale.planner.balance.mesh_shares` computes shares along every axis of a mesh by the layer times of each device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from whale.compile.compilation import Compilation
from whale.errors import InfeasibleError
from whale.ir.plan import Plan, PlanAxis, PlanStage, PlanState
from whale.ir.workload import DeviceMemory
from whale.planner.assignment.from_plan import axis_role
from whale.planner.balance.mesh_shares import AxisToShare, MeshDevice, MeshShares, mesh_shares
from whale.predict.costs import Costs
from whale.predict.layer_parts import Part, StageLayers, stage_layers
from whale.predict.prediction import Predicted
from whale.strategies.lowering import PlacedStage

__all__ = ["bytes_of_rows", "even_stages", "ranks_text", "shares_by_speed", "shares_with_reasons"]

MAX_ORDERS = 720
"""Limit on the orders of stages' devices: all orders of six distinct groups."""


def even_stages(plan: Plan, compilation: Compilation) -> Plan:
    """A plan with the stages of its compiled annotations, in equal shares."""
    return plan.model_copy(update={"stages": tuple(_even(compilation, stage) for stage in compilation.stages)})


def shares_by_speed(compilation: Compilation, costs: Costs, even: Predicted, start: Plan) -> Plan:
    """The plan with the order of devices and the shares with the least time of the slowest stage.

    Raises:
        InfeasibleError: none fits.
    """
    return shares_with_reasons(compilation, costs, even, start)[0]


def shares_with_reasons(
    compilation: Compilation, costs: Costs, even: Predicted, start: Plan
) -> tuple[Plan, tuple[str, ...]]:
    """The plan of `shares_by_speed`, with the reasons for its decisions, in sentences.

    Raises:
        InfeasibleError: none fits.
    """
    return _Problem(compilation, costs, even, start).solve()


def bytes_of_rows(held: DeviceMemory) -> int:
    """Bytes that grow with the rows: activations, and of the buffers all but those of gradients."""
    return held.activations + held.workspace + max(0, held.buffers - held.parameters)


def _even(compilation: Compilation, stage: PlacedStage) -> PlanStage:
    roles = compilation.assignment.stages[stage.index].roles
    ruled = any(one.recompute != "none" for one in compilation.stages)
    return PlanStage(
        recompute=stage.recompute if ruled else None,
        state=None if stage.state is None else PlanState.of(stage.state),
        reduce=stage.reduce if stage.reduce != "mean" else None,
        distinct=stage.distinct,
        offload=stage.offload if any(one.offload != "none" for one in compilation.stages) else None,
        ranks=stage.mesh.ranks,
        axes=tuple(
            PlanAxis(name=axis.name, size=axis.size, role=axis_role(roles, position))
            for position, axis in enumerate(stage.mesh.axes)
        ),
    )


@dataclass(frozen=True)
class _Problem:
    """Open decisions of a plan, and the data for them."""

    compilation: Compilation
    costs: Costs
    even: Predicted
    start: Plan

    def solve(self) -> tuple[Plan, tuple[str, ...]]:
        """The order of devices and the shares with the least time of the slowest stage."""
        layers = stage_layers(self.compilation, self.costs.profile)
        known: dict[Any, MeshShares | InfeasibleError] = {}

        def shared(index: int, ranks: tuple[int, ...]) -> MeshShares:
            key = (index, tuple(self.costs.cluster.devices[rank].type.name for rank in ranks))
            if key not in known:
                try:
                    known[key] = self._shares(index, layers[index], ranks)
                except InfeasibleError as error:
                    known[key] = error
            found = known[key]
            if isinstance(found, InfeasibleError):
                raise found
            return found

        order, stages = self._order(shared)
        reasons: list[str] = []
        for index, (own, shares) in enumerate(zip(order, stages, strict=True)):
            for axis, units, moves in zip(self.start.stages[index].axes or (), shares.units, shares.moves, strict=True):
                if len(set(units)) > 1:
                    what = "rows of a micro-batch" if axis.divides_batch else "units"
                    shown = ", ".join(map(str, units[:16]))
                    reasons.append(f"stage {index} on ranks {ranks_text(own)}: {what} along {axis.name!r} are {shown}")
                reasons += [f"stage {index}: {move.reason}" for move in moves]
        planned = tuple(
            stage.model_copy(update={"ranks": own, "axes": _with_shares(stage.axes or (), shares)})
            for own, stage, shares in zip(order, self.start.stages, stages, strict=True)
        )
        return self.start.model_copy(update={"stages": planned}), tuple(reasons)

    def _order(
        self, shared: Callable[[int, tuple[int, ...]], MeshShares]
    ) -> tuple[list[tuple[int, ...]], list[MeshShares]]:
        """Assignment of sets of ranks to stages: stages of equal size may be swapped.

        Objective: the least time of the slowest stage, then the least sum. Exact over all orders up to `MAX_ORDERS`.
        """
        sets = [stage.ranks for stage in self.start.stages]
        overlapping = len({rank for own in sets for rank in own}) < sum(map(len, sets))
        graphs = self.compilation.partition.stages
        paths = {path for graph in graphs for path in (graph.cut.outer, *graph.scopes.values())}
        clusters = any(scope.strategy.chooses_devices for path in paths for scope in path)
        best: tuple[tuple[float, float], list[tuple[int, ...]], list[MeshShares]] | None = None
        problem: InfeasibleError | None = None
        seen: set[Any] = set()
        for tried, order in enumerate(permutations(range(len(sets)))):
            ranks = [sets[position] for position in order]
            if tried and (tried >= MAX_ORDERS or overlapping or clusters):
                break
            if any(len(own) != len(stage) for own, stage in zip(ranks, sets, strict=True)):
                continue
            kinds = tuple(tuple(self.costs.cluster.devices[rank].type.name for rank in own) for own in ranks)
            if kinds in seen:
                continue
            seen.add(kinds)
            try:
                shares = [shared(index, own) for index, own in enumerate(ranks)]
            except InfeasibleError as error:
                problem = problem or error
                continue
            cost = (max(one.seconds for one in shares), sum(one.seconds for one in shares))
            if best is None or cost < (best[0][0] * (1 - 1e-9), best[0][1]):
                best = cost, ranks, shares
        if best is None:
            assert problem is not None
            raise problem
        return best[1:]

    def _shares(self, index: int, layers: StageLayers, ranks: tuple[int, ...]) -> MeshShares:
        """Shares along the axes of a stage on these ranks."""
        stage = self.compilation.stages[index]
        axes = [
            AxisToShare(name=axis.name, size=axis.size, role=axis.role, units=self._units(stage, position))
            for position, axis in enumerate(self.start.stages[index].axes or ())
        ]
        held = {one.rank: one for one in self.even.prediction.memory}
        models = stage.mesh.ranks  # whose parts are known
        devices = [self._device(layers, model, held[model], rank) for model, rank in zip(models, ranks, strict=False)]
        return mesh_shares(axes, devices, rows=max(self.compilation.rows))

    def _units(self, stage: PlacedStage, axis: int) -> int:
        """Units of a split axis: the smallest number of units among its operators, such as heads."""
        sizes = {
            self.compilation.analysis.factors.size(choices[axis + 1].factor)
            for choices in stage.choices.values()
            if choices[axis + 1].factor >= 0
        }
        size = stage.mesh.axes[axis].size
        return min((units for units in sizes if units >= size), default=size)

    def _device(self, layers: StageLayers, model: int, held: DeviceMemory, rank: int) -> MeshDevice:
        """A device in the place of a rank that holds *held*; its seconds and bytes depend on its rows and fraction.

        Each layer has its own roles: where its region is replicated, a fraction of the split axes is a share of rows.
        """
        device = self.costs.cluster.devices[rank]
        even_rows = max(max((part.rows for part in layers.parts[model]), default=1), 1)
        parts = layers.parts[model]
        even_fraction = min((part.fraction * part.part / part.context for part in parts), default=1.0)
        divided = any(part.fraction < 1 for part in parts)  # parameters; devices that cut rows have all of them
        of_rows = bytes_of_rows(held)
        state = held.total - held.framework - of_rows

        def seconds(rows: float, fraction: float) -> float:
            total = 0.0
            for layer, part in zip(layers.layers, layers.parts[model], strict=True):
                cut = part.context > 1
                split = cut or part.fraction < 1
                own = Part(
                    rows=round(rows if split else rows * fraction),
                    fraction=part.fraction if cut else fraction if split else 1.0,
                    context=part.context,
                    part=fraction / part.fraction * part.context if cut else 1.0,
                    recompute=part.recompute,
                )
                if own.rows and own.fraction:
                    spent = self.costs.layer(self.costs.profile.layers[layer], rank, own)
                    total += spent.forward + spent.backward
            return total

        def needed(rows: float, fraction: float) -> float:
            share = fraction / even_fraction
            return held.framework + state * (share if divided else 1.0) + of_rows * rows / even_rows * share

        return MeshDevice(name=device.name, seconds=seconds, bytes=needed, capacity_bytes=device.memory_bytes)


def _with_shares(axes: Sequence[PlanAxis], shares: MeshShares) -> tuple[PlanAxis, ...]:
    """Axes with their shares; equal ones are left out.

    Rows of the outermost axis of the batch are counted; of inner ones, which cut what the outer left, and units of what
    is split, they are proportions.
    """
    found, counted = [], False
    for axis, units in zip(axes, shares.units, strict=True):
        outermost = axis.divides_batch and not counted
        counted = counted or axis.divides_batch
        given: tuple[int | float, ...] = units if outermost or not axis.divides_batch else tuple(map(float, units))
        equal = len(set(units)) == 1
        found.append(axis.model_copy(update={"shares": () if equal else given}))
    return tuple(found)


def ranks_text(ranks: Sequence[int]) -> str:
    """The ranks, of many the first ones and how many more there are."""
    text = ", ".join(map(str, ranks[:8]))
    return f"{text} and {len(ranks) - 8} more" if len(ranks) > 8 else text
