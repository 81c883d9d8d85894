"""Replicas of a stage that are alike, which are priced and simulated once; and what each owns of the stage's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from whale.ir.strategy import Offload
from whale.planner.cost.chain_stage import ChainStage
from whale.planner.cost.groups import TensorGroup
from whale.planner.cost.stage import CostModel

__all__ = ["Exchanged", "Kind", "own_bytes", "owned_part", "ruled"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Replicas of a stage that are alike; the first stands for them.

    Attributes:
        index: of that slice in its stage.
        rank: of its device with least memory, which stands for all of the slice.
        share: of the state that they own.
    """

    group: TensorGroup
    rows: float
    index: int
    rank: int
    share: float


class Exchanged(NamedTuple):
    """When the replicas of a stage exchange for the state that they divide: whether gradients are summed in ``each``
    micro-batch, and parameters gathered in ``tasks``, or else once a step."""

    each: bool
    tasks: bool

    @classmethod
    def of(cls, prices: CostModel, stage: ChainStage, micro_batches: int) -> Exchanged:
        """The times at which Whale does it: not in tasks in which a replica has no rows."""
        rows = sum(stage.rows)
        last = min(1.0, prices.batch / rows - micro_batches + 1) if prices.batch and rows else 1.0
        idle = any(round(count * last) < stage.expert for count in stage.rows)  # devices of a group divide them
        return cls(each=stage.level > 1 and micro_batches > 1, tasks=stage.level == 3 and not idle)


def ruled(prices: CostModel, stage: ChainStage) -> CostModel:
    """The prices of a stage's layers, without exchanges of its state."""
    word: Offload = "activations" if stage.activations_on_host else "tables" if stage.tables_on_host else "none"
    return prices.under(stage.recompute, offload=word)


def owned_part(prices: CostModel, stage: ChainStage, kind: Kind) -> float:
    """The part of its state that a device owns: of experts, as many fewer ranks hold as all others."""
    if not stage.level:
        return 1.0
    dense, experts = prices.parameters(stage.layers, stage.tensor, stage.expert)
    return kind.share * (dense / stage.expert + experts) / max(1.0, dense + experts)


def own_bytes(prices: CostModel, stage: ChainStage, kind: Kind) -> float:
    """Bytes of a stage's trained parameters that a device owns."""
    elements = sum(prices.parameters(stage.layers, stage.tensor, stage.expert))
    return elements * prices.precision.element_bytes * owned_part(prices, stage, kind)
