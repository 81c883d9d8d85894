"""The least recompute, or division of state, with which a plan fits in memory, stage by stage.

The stages of devices that lack memory under a rule get the next one, which keeps less. It prices no times: a rule that
keeps more never takes longer. What devices hold is the caller's to say, from a dry run or from the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from whale.ir.strategy import RECOMPUTES, Recompute
from whale.ir.workload import DeviceMemory

__all__ = ["least_recompute", "least_steps"]

Rules = tuple[Recompute, ...]
_Step = TypeVar("_Step")


def least_steps(
    ranks: Sequence[Sequence[int]],
    ladder: Sequence[_Step],
    memory_under: Callable[[tuple[_Step, ...]], Sequence[DeviceMemory]],
    *,
    given: Sequence[_Step | None] | None = None,
) -> tuple[_Step, ...]:
    """Return a step of a ladder for each stage: the first with which its devices fit, or the last where none does.

    Args:
        ranks: of each stage; stages that share some have one step.
        ladder: from what takes most memory to what takes least.
        memory_under: what devices hold where stages have these steps.
        given: steps that are decided already, None where one is open.
    """
    fixed = given or [None] * len(ranks)
    steps = [ladder[0] if step is None else step for step in fixed]
    for step in ladder[1:]:
        lacking = {device.rank for device in memory_under(tuple(steps)) if device.total > device.capacity}
        changed = [
            step if lacking.intersection(own) and decided is None else old
            for own, decided, old in zip(ranks, fixed, steps, strict=True)
        ]
        if changed == steps:
            break
        steps = changed
    return tuple(steps)


def least_recompute(
    ranks: Sequence[Sequence[int]],
    memory_under: Callable[[Rules], Sequence[DeviceMemory]],
    *,
    given: Sequence[Recompute | None] | None = None,
) -> Rules:
    """Return a rule for each stage: the mildest with which its devices fit, or ``full`` where none does.

    Args:
        ranks: of each stage; stages that share some have one rule.
        memory_under: what devices hold where stages have these rules.
        given: rules that are decided already, None where one is open.

    >>> def held(rules):
    ...     sizes = {"none": 9, "selective": 6, "full": 3}
    ...     return [
    ...         DeviceMemory(rank=rank, device="", capacity=capacity, activations=sizes[rule])
    ...         for rank, (rule, capacity) in enumerate(zip(rules, (4, 7, 9), strict=True))
    ...     ]
    >>> least_recompute([(0,), (1,), (2,)], held)
    ('full', 'selective', 'none')
    """
    return least_steps(ranks, RECOMPUTES, memory_under, given=given)
