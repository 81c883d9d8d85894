"""The uniform plan that degrees name: equal degrees on all stages, replicas in the order of the layout.

It converts a `Layout` to the stages of a plan, which `whale.planner.cost.plan` evaluates, and prices single stages for
balancing layers and rows over mixed devices. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

from whale.ir.profile import ModelProfile
from whale.ir.state import StateSharding
from whale.planner.cost.calibration import CALIBRATION, Calibration
from whale.planner.cost.chain_stage import ChainStage
from whale.planner.cost.configuration import Configuration, Layout
from whale.planner.cost.groups import TensorGroup
from whale.planner.cost.memory import StateBytes
from whale.planner.cost.stack import Stack
from whale.planner.cost.stage import CostModel
from whale.planner.cost.stage_cost import Memo, StageCost

__all__ = ["Stages", "stack_of"]


def stack_of(configuration: Configuration, data: int, calibration: Calibration = CALIBRATION) -> Stack:
    """Return the stack of a configuration with a number of replicas: if it has none, ZeRO 2 and 3 over several devices
    are FSDP, all else is Megatron. In Whale's each stage has its own rule of recompute, and divides its own state."""
    shared = configuration.zero >= 2 and data * configuration.context > 1
    return Stack(
        name=configuration.stack or ("fsdp" if shared else "megatron"),
        attention=configuration.attention,
        recompute="none" if configuration.stack == "whale" else configuration.recompute,
        sequence_parallel=bool(configuration.sequence_parallel),
        zero=0 if configuration.stack == "whale" else configuration.zero,
        interleaved=configuration.virtual_stages > 1,
        calibration=calibration,
    )


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of a layout, with their prices."""

    prices: CostModel
    layout: Layout

    @classmethod
    def of(
        cls, profile: ModelProfile, layout: Layout, *, stack: Stack | None = None, known: Memo | None = None
    ) -> Stages:
        """Return the stages of a layout, as a stack runs them (None: that of its configuration), with what is
        *known*."""
        given = layout.configuration
        prices = CostModel.of(
            profile,
            layout.cluster,
            precision=given.precision,
            stack=stack or stack_of(given, layout.data),
            batch=given.batch,
            gradient_dtype=given.gradient_dtype,
            step_in_backward=given.step_in_backward,
            reduce=given.reduce,
            optimizer=given.optimizer,
            known=known,
        )
        level = 0 if given.offload == "none" else given.level
        return cls(prices=prices.under(given.recompute, level, given.offload), layout=layout)

    @property
    def profile(self) -> ModelProfile:
        """The profile of the model."""
        return self.prices.profile

    def changed(self, layout: Layout) -> Stages:
        """Return the stages of another layout of the same devices."""
        given = self.prices.stack
        if self.prices.runs:
            plain = replace(given, recompute="none", zero=0, offload="none")
            return Stages.of(self.profile, layout, stack=plain, known=self.prices.memo)
        stack = stack_of(layout.configuration, layout.data, given.calibration)
        known = self.prices.memo if stack == given else None
        return Stages.of(self.profile, layout, stack=stack, known=known)

    @cached_property
    def _positions(self) -> int:
        """Parts into which a slice divides its rows, over experts and context."""
        given = self.layout.configuration
        return lcm(given.expert, given.context)

    @cached_property
    def _together(self) -> int:
        """Replicas of a slice: those among which experts are split."""
        return self._positions // self.layout.configuration.context

    def plan(self, cuts: Sequence[range], rows: Sequence[float]) -> list[ChainStage]:
        """Return the stages of a plan with these layers, and these rows of a micro-batch on each replica."""
        given, layout = self.layout.configuration, self.layout
        num = layout.data // self._together
        shares = tuple(
            self._together * max(rows[index * self._together : (index + 1) * self._together]) for index in range(num)
        )
        each = len(given.state_shares) // num  # of the replicas of a slice
        parts = tuple(sum(given.state_shares[index * each : (index + 1) * each]) for index in range(num) if each)
        return [
            ChainStage(
                first=layers.start,
                last=layers.stop,
                ranks=tuple(
                    rank
                    for replica in range(layout.data)
                    for rank in layout.devices_of(index % given.pipeline, replica)
                ),
                data=num,
                tensor=given.tensor,
                rows=shares,
                expert=given.expert,
                context=given.context,
                recompute=given.recompute,
                state=StateSharding(given.level, parts) if given.level and self.prices.runs else None,
                offload=given.offload if self.prices.runs else "none",
            )
            for index, layers in enumerate(cuts)
        ]

    def group(self, stage: int, replica: int) -> TensorGroup:
        """Return the devices of the slice of a stage in which a replica is."""
        given, layout = self.layout.configuration, self.layout
        first = replica - replica % self._together
        ranks = [rank for one in range(first, first + self._together) for rank in layout.devices_of(stage, one)]
        return self.prices.group(ranks, layout.data // self._together, given.expert, given.context)

    def cost(self, layers: range, stage: int, replica: int, rows: float) -> StageCost:
        """Return what *layers* take on the devices of a replica's pipeline stage, for *rows* rows of its own."""
        shards = self.layout.data * self.layout.configuration.context
        count = self.layout.num_micro_batches
        return self.prices.stage(layers, self.group(stage, replica), rows * self._together, count, shards)

    def state(self, layers: Iterable[int]) -> StateBytes:
        """Return the bytes of weights, gradients and optimizer states on one device."""
        given = self.layout.configuration
        return self.prices.state_of(
            layers,
            given.tensor,
            given.expert,
            shards=self.layout.data * given.context,
            zero=given.level if given.pipeline == 1 or self.prices.runs else min(given.zero, 1),
        )
