"""Time of a micro-batch whose weights and gradients are sharded over the data group (ZeRO 2 and 3, FSDP), and of the
gathers with which a step begins (ZeRO 1 and 2 in Whale).

A model is wrapped in units (in FSDP blocks, and what is before and after them; in Whale buckets), and each unit's
weights are gathered before it runs and its gradients reduce-scattered after its backward. The collectives follow one
another in one queue beside the computation: while a unit computes, the next one's weights are gathered and the previous
one's gradients are reduced. So the first gather and the last reduce-scatter are exposed, and so is what of the others
takes longer than the computation beside it. Seconds only; it knows no layers and no network.

Reference: Y. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023), section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from whale.ir.cluster import DeviceType

__all__ = ["ShardedUnit", "arrival_seconds", "scattered_by", "sharded_seconds"]


class ShardedUnit(NamedTuple):
    """Equal units that follow one another: seconds of one's forward and backward without these collectives, of
    gathering its weights and of reduce-scattering its gradients; ``num`` of them."""

    forward: float
    backward: float
    gather: float
    reduce: float
    num: int = 1


def scattered_by(types: Iterable[DeviceType]) -> Literal["all_to_all", "reduce_scatter"]:
    """The collective that a sum of gradients to their owners is: on processors ranks add what they get themselves."""
    return "all_to_all" if any(type_.is_processor for type_ in types) else "reduce_scatter"


def arrival_seconds(units: Sequence[ShardedUnit], *, slowdown: float, before: float = 0.0) -> float:
    """The seconds from the beginning of a step before which a first forward cannot end, if all units are gathered one
    after the other from that beginning on.

    Args:
        units: in the order of the forward.
        slowdown: how much longer computation takes beside a gather.
        before: seconds of gathers that start before these.

    >>> units = [ShardedUnit(forward=1, backward=0, gather=3, reduce=0, num=2), ShardedUnit(2, 0, 1, 0)]
    >>> arrival_seconds(units, slowdown=0.0)
    9.0
    """
    arrived, forward, end = before, 0.0, 0.0
    for unit in units:
        first, last = arrived + unit.gather, arrived + unit.num * unit.gather
        end = max(end + unit.num * unit.forward, first + unit.num * unit.forward, last + unit.forward)
        arrived, forward = last, forward + unit.num * unit.forward
    return end + slowdown * min(forward, arrived) if arrived else 0.0


def sharded_seconds(
    units: Sequence[ShardedUnit], *, regather: bool, slowdown: float, keeps_last: bool = True, tail: bool = True
) -> tuple[float, float]:
    """Seconds of a micro-batch's forward and backward with the collectives of sharded units.

    Args:
        units: in the order of the forward.
        regather: whether weights are dropped after the forward and gathered again for the backward (ZeRO 3).
        keeps_last: whether those of the last unit, which the backward needs first, are kept all the same.
        tail: whether the last sum, which nothing in the backward hides, is part of it.
        slowdown: how much longer computation and collectives take while both run, as a share of the shorter of them.

    Complexity: linear in the number of unlike units.

    >>> blocks = [ShardedUnit(forward=2, backward=4, gather=1, reduce=3, num=3)]
    >>> sharded_seconds(blocks, regather=True, slowdown=0.0)
    (7.0, 15.0)
    """

    def beside(compute: float, collectives: float) -> float:
        return max(compute, collectives) + slowdown * min(compute, collectives)

    forward, backward = units[0].gather, units[0].reduce if tail else 0.0
    backward += units[-1].gather if regather and not keeps_last else 0.0
    for index, unit in enumerate(units):
        after = units[index + 1] if index + 1 < len(units) else None
        before = units[index - 1] if index else None
        forward += (unit.num - 1) * beside(unit.forward, unit.gather)
        forward += beside(unit.forward, after.gather if after else 0.0)
        again = float(regather)
        # in the backward a unit computes beside the gather of the one before it and the sums of the one after it
        inner = again * unit.gather + unit.reduce
        entering = again * (unit.gather if unit.num > 1 else before.gather if before else 0.0)
        leaving = again * (before.gather if before else 0.0) + unit.reduce
        first = entering + (after.reduce if after else 0.0)
        if unit.num == 1:
            backward += beside(unit.backward, first)
        else:
            backward += beside(unit.backward, first) + beside(unit.backward, leaving)
            backward += (unit.num - 2) * beside(unit.backward, inner)
    return forward, backward
