"""Cost of a plan: the workload of its step, its memory and its prediction, for stages on their own devices.

The one evaluation of plans: the search scores its candidates here, and ``whale estimate`` the uniform plan that its
degrees name. What stages cost is in `whale.planner.cost.stage`, how a step goes in `whale.planner.cost.step`; kinds of
replicas (`plan_kinds`), messages (`plan_messages`), sums of gradients (`plan_sums`) and memory (`plan_memory`) have
files of their own. It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from whale.ir.workload import Prediction, Reduction, StageWork, Workload
from whale.planner.cost.chain_stage import ChainStage
from whale.planner.cost.hosts import stepping_on_host
from whale.planner.cost.plan_gathers import sharded_units, tied_gather
from whale.planner.cost.plan_memory import PlanMemory
from whale.planner.cost.plan_sums import PlanSums
from whale.planner.cost.replica_kinds import Kind, own_bytes, owned_part, ruled
from whale.planner.cost.sharded import arrival_seconds
from whale.planner.cost.stage_cost import StageCost
from whale.planner.cost.step import overlap_slowdown, step, timing_of

__all__ = ["PlanCost"]


@dataclass(frozen=True, kw_only=True)
class PlanCost(PlanSums, PlanMemory):
    """A plan with its prediction."""

    def prediction(self, workload: Workload, batch: float, *, of_one: bool = False) -> Prediction:
        """The prediction of a step of *batch* rows, by its *workload*; *of_one*: of a plan that is not compared with
        many others."""
        return step(
            timing_of(workload, of_one=of_one),
            devices=self.prices.num_of_types,
            precision=self.prices.precision,
            flops=3 * batch * self.prices.flops,
            memory=sorted(self.memory(), key=lambda device: device.rank),
            hosts=self.hosts(),
            measured=all(price.measured for own in self.costs for price in own),
            launched=self._launched,
        )

    @property
    def _launched(self) -> float:
        """The part of the tasks' time that the host's launches decide."""
        costs = [cost for own in self.costs for cost in own]
        return sum(cost.launched for cost in costs) / max(1e-12, sum(cost.forward + cost.backward for cost in costs))

    def workload(self, last_share: float = 1.0) -> Workload:
        """The step of one rank for each kind of replica; the last micro-batch may have only a share of the rows."""
        works = []
        for index, (own, costs) in enumerate(zip(self.kinds, self.costs, strict=True)):
            kept = tuple(round(cost.kept) for cost in costs)
            gathered = tuple(self._arriving(index, kind) for kind in own) if self.stages[index].level else ()
            works.append(
                StageWork(
                    ranks=tuple(kind.rank for kind in own),
                    forward=tuple(cost.forward for cost in costs),
                    backward=tuple(cost.backward for cost in costs),
                    weights=tuple(cost.weights for cost in costs),
                    communication=tuple(cost.communication for cost in costs),
                    kept_bytes=kept,
                    forward_peak_bytes=kept,
                    backward_peak_bytes=tuple(round(cost.working) for cost in costs),
                    gathered=gathered,
                    own=self._own(index),
                )
            )
        boundaries, links = self._boundaries()
        update = [0.0] * len(self.prices.cluster.devices)
        for stage, own, costs in zip(self.stages, self.kinds, self.costs, strict=True):
            gathered_after = self._gathered_after(stage, min(cost.forward for cost in costs))
            for kind, cost in zip(own, costs, strict=True):
                update[kind.rank] += self._update(stage, kind, cost) + gathered_after
        return Workload(
            world_size=len(self.prices.cluster.devices),
            micro_batches=self.micro_batches,
            last_share=last_share,
            schedule=self.schedule,
            stages=tuple(works),
            boundaries=boundaries,
            reductions=tuple(sorted(self._reductions(last_share), key=self._launched_at)),
            links=links,
            update=tuple(update),
            overhead=self.prices.overhead_of(sorted({rank for stage in self.stages for rank in stage.ranks})),
            overlap_slowdown=overlap_slowdown(self.prices.num_of_types),
            blocking_transfers=self.prices.stack.blocks,
        )

    def _own(self, index: int) -> tuple[float, ...]:
        """Seconds of each kind of replica of a stage that it computes before it needs what it receives."""
        stage = self.stages[index]
        layers = self.prices.profile.own_layers(stage.first, stage.last) if self.prices.runs else []
        if not layers:
            return ()
        prices = ruled(self.prices, stage)
        return tuple(
            prices.stage(layers, kind.group, kind.rows, self.micro_batches).forward for kind in self.kinds[index]
        )

    @staticmethod
    def _launched_at(reduction: Reduction) -> tuple[int, bool]:
        """Sort key: as Whale's ranks launch reductions, later stages first, whose backwards end first, and of a stage
        its own before what it shares."""
        return -min(reduction.stages), len(reduction.stages) > 1

    def _update(self, stage: ChainStage, kind: Kind, cost: StageCost) -> float:
        """Seconds of the optimizer of a device, for what it owns."""
        update = cost.update * owned_part(self.prices, stage, kind)
        if not stage.state_on_host:
            return update
        own = own_bytes(self.prices, stage, kind)
        return stepping_on_host(self.prices.cluster, kind.rank, own, self.prices.optimizer, on_device=update)

    def _arriving(self, index: int, kind: Kind) -> float:
        """Seconds from the beginning of the step before which the first forward of a stage cannot end, because its
        parameters are gathered; ranks start with those of the stages before."""
        stage, prices = self.stages[index], self.prices
        if self._exchanged[index].tasks:
            return 0.0
        *alike, _ = (other for other in range(index + 1) if self.stages[other].ranks == stage.ranks)
        apart, before = [], 0.0
        for tie in prices.profile.tied:
            owners = self._owners(tie[0])
            divides, is_apart = self._divide(owners), self._is_apart(tie[0])
            apart += [tie] if is_apart or not divides else []
            if is_apart and divides and not {index, *alike}.isdisjoint(owners):
                before += tied_gather(prices, stage, tie, *self._tied_group(owners))
        units = sharded_units(ruled(prices, stage), stage, kind, self.micro_batches, once=True, apart=apart)
        before += sum(
            unit.num * unit.gather
            for other in alike
            for unit in sharded_units(prices, self.stages[other], kind, self.micro_batches, once=True, apart=apart)
        )
        return arrival_seconds(units, slowdown=overlap_slowdown(prices.num_of_types), before=before)
