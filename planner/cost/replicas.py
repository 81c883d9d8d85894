"""Collectives of layers between the replicas of a stage, such as the sums of a batch norm's statistics.

Profiles have them as communications over the ``replica`` group. Each replica waits in them for the others, so all take
as long as the slowest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from whale.planner.cost.groups import TensorGroup
from whale.planner.cost.stage import CostModel
from whale.planner.cost.stage_cost import StageCost

__all__ = ["between_replicas", "gather_seconds", "of_kind", "with_meetings"]


def between_replicas(
    prices: CostModel, layers: Iterable[int], group: TensorGroup, rows: float, data_group: Sequence[int]
) -> tuple[float, float]:
    """Return the seconds forward and backward of the collectives of *layers* over a data group.

    Args:
        prices: of layers and collectives.
        layers: positions in the profile's chain.
        group: one of the replicas.
        rows: of a micro-batch on a replica.
        data_group: ranks, one of each replica.
    """
    forward = backward = 0.0
    if len(data_group) < 2 or not prices.meeting:
        return forward, backward
    for kind, count in Counter(prices.profile.layers[index] for index in layers).items():
        ahead, back = of_kind(prices, kind, group, rows, data_group)
        forward, backward = forward + count * ahead, backward + count * back
    return forward, backward


def of_kind(
    prices: CostModel, kind: int, group: TensorGroup, rows: float, data_group: Sequence[int]
) -> tuple[float, float]:
    """Return the same for one layer of a kind (a position in the profile's kinds)."""
    if kind not in prices.meeting:
        return 0.0, 0.0
    degrees = (group.tensor, group.expert, group.context if prices.runs else 1)
    spent = prices.seconds(kind, group.types[0], degrees, max(1.0, rows / prices.divided_rows(group)), 1)
    forward, backward = (
        sum(
            one.num * prices.over(one.kind, data_group, group.tensor, one.bytes)
            for one in some
            if one.group == "replica"
        )
        for some in (spent.forward_collectives, spent.backward_collectives)
    )
    return forward, backward


def gather_seconds(prices: CostModel, kind: int, group: TensorGroup, data_group: Sequence[int]) -> float:
    """Return the seconds to gather the parameters of a layer of a kind over a data group."""
    num_bytes = sum(prices.parameters_of(kind, group.tensor, group.expert)) * prices.gradient_bytes
    return prices.over("all_gather", data_group, group.tensor, num_bytes)


def with_meetings(costs: Sequence[StageCost], forward: float, backward: float) -> Sequence[StageCost]:
    """Return the costs of a stage's replicas with the seconds of the collectives between them, in which they wait for
    the slowest."""
    if not forward and not backward:
        return costs
    slowest = [max(getattr(one, name) for one in costs) for name in ("forward", "backward")]
    return [
        one._replace(
            forward=slowest[0] + forward,
            backward=slowest[1] + backward,
            communication=one.communication + forward + backward,
        )
        for one in costs
    ]
