"""Sailor's cost formulas as costs of Whale's search, by `sailor_scores.Strict`.

Used for comparison only, so that plans scored by these formulas were also searched by them. Messages cost the same, but
the search overlaps them as Whale's executor does; plans are scored again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isinf

from sailor_scores import PROCESS_BYTES, STATE_BYTES, Slice, Strict

from whale.ir.cluster import DeviceType
from whale.planner.cost.groups import TensorGroup
from whale.planner.cost.layers import LayerSeconds
from whale.planner.cost.memory import StateBytes
from whale.planner.cost.precision import precision_named
from whale.planner.cost.stack import Stack
from whale.planner.cost.stage import CostModel
from whale.planner.cost.stage_cost import Hop

STACK = Stack(name="megatron", interleaved=True)
"""Sums of gradients after the last backward, in one message, and messages that are hidden where they can be."""

UNKNOWN_SECONDS = 1e3
"""Cost of a layer on rows that were not measured: larger than any plan."""


@dataclass(frozen=True, kw_only=True)
class SailorPrices(CostModel):
    """Costs by the formulas ``rules``."""

    rules: Strict

    @classmethod
    def by(cls, rules: Strict) -> SailorPrices:
        return cls(profile=rules.profile, cluster=rules.cluster, precision=precision_named("tf32"), rules=rules)

    @property
    def exchanges(self) -> bool:
        return False

    @cached_property
    def overhead_bytes(self) -> dict[str, float]:
        return {device.type.name: PROCESS_BYTES[True] for device in self.cluster.devices}

    def state(self, parameters: float, frozen: float = 0.0, *, shards: int = 1, zero: int = 0) -> StateBytes:
        each = parameters * STATE_BYTES / 3
        return StateBytes(parameters=each, gradients=each, optimizer=each)

    def all_reduce(
        self,
        ranks: Sequence[int],
        degree: int,
        num_bytes: float,
        layers: Iterable[int] | None = None,
        kind: str = "all_reduce",
        beside: int = 1,
    ) -> float:
        return self.rules.ring([self.cluster.devices[rank].type.name for rank in ranks], num_bytes)

    def hop(
        self,
        source: Sequence[int],
        target: Sequence[int],
        into: TensorGroup,
        num_bytes: int,
        whole: float,
    ) -> Hop:
        ends = [Slice(ranks=tuple(ranks), rows=1) for ranks in (source, target)]
        seconds = self.rules.message(ends[0], ends[1], max(1.0, whole))
        return Hop(0.0, max(1, num_bytes) / seconds)

    def seconds(
        self, kind: int, type_: DeviceType, degrees: tuple[int, int], rows: float, micro_batches: int, shards: int = 1
    ) -> LayerSeconds:
        times = self.rules.times(kind, type_.name, degrees[0], round(rows))
        forward, backward, update = (UNKNOWN_SECONDS if isinf(value) else value for value in times)
        return LayerSeconds(forward=forward, backward=backward, weights=backward / 2, update=update, measured=True)
