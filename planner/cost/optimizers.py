"""Optimizers: their states, temporary memory and memory traffic, as in PyTorch, for parameters of any dtype.

Data, for what predicts memory and time. States have the number type of their parameter: there are no master weights.
On processors torch steps through parameters one by one, on accelerators through lists of all of them (``foreach``) if
the optimizer has such lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Literal, get_args

from whale.errors import UsageError

__all__ = ["OPTIMIZERS", "Optimizer", "OptimizerCosts", "costs_of", "state_elements", "temporary_bytes"]

Optimizer = Literal["adamw", "adafactor", "sgd", "sgd_momentum", "none"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)


@dataclass(frozen=True, kw_only=True)
class OptimizerCosts:
    """Costs of an optimizer, in tensors of a parameter's size.

    Attributes:
        states: that it keeps.
        one_by_one: that a step makes of one parameter at a time, where it goes through them one by one; the last of
            them is dropped when that of the next parameter is there.
        in_lists: that a step makes of all parameters at a time, where it goes through lists of them.
        moved: that a step reads and writes, those of other kernels again.
        counter_bytes: besides, for each parameter.
        factored: whether it keeps the sums of rows and of columns of each matrix in place of one of the size of it, and
            one of the size of other parameters; so it needs whole matrices.
    """

    states: int
    one_by_one: int
    in_lists: int
    moved: int
    counter_bytes: int = 0
    factored: bool = False

    @property
    def steps_one_by_one(self) -> bool:
        """Whether it has no lists of parameters on accelerators either."""
        return self.one_by_one > 0 and not self.in_lists


_COSTS: dict[Optimizer, OptimizerCosts] = {
    # Adam: a root and a quotient; in lists the root, which is divided in its place. Steps are counted in float32.
    "adamw": OptimizerCosts(states=2, one_by_one=2, in_lists=1, moved=20, counter_bytes=4),
    # Adafactor: the estimate from both sums, which becomes the update in its place.
    "adafactor": OptimizerCosts(states=0, one_by_one=1, in_lists=0, moved=17, counter_bytes=4, factored=True),
    "sgd": OptimizerCosts(states=0, one_by_one=0, in_lists=0, moved=3),
    "sgd_momentum": OptimizerCosts(states=1, one_by_one=0, in_lists=0, moved=8),
    "none": OptimizerCosts(states=0, one_by_one=0, in_lists=0, moved=0),
}


def costs_of(optimizer: str) -> OptimizerCosts:
    """The costs of an optimizer.

    Raises:
        UsageError: there is none of that name.
    """
    known = next((costs for name, costs in _COSTS.items() if name == optimizer), None)
    if known is None:
        raise UsageError(f"unknown optimizer {optimizer!r}; use one of {', '.join(OPTIMIZERS)}")
    return known


def state_elements(optimizer: str, shape: Sequence[int]) -> int:
    """Elements of the states for a parameter of a shape.

    >>> state_elements("adamw", (4, 3)), state_elements("adafactor", (2, 4, 3)), state_elements("adafactor", (3,))
    (24, 14, 3)
    """
    costs, size = costs_of(optimizer), prod(shape)
    if costs.factored:
        return size // max(1, shape[-1]) + size // max(1, shape[-2]) if len(shape) > 1 else size
    return costs.states * size


def temporary_bytes(optimizer: str, sizes: Sequence[int], *, processor: bool) -> int:
    """Temporary bytes of a step, for parameters of these bytes, in the optimizer's order.

    >>> [temporary_bytes("adamw", [100, 90], processor=processor) for processor in (True, False)]
    [280, 190]
    """
    costs = costs_of(optimizer)
    if processor or costs.steps_one_by_one:
        if not costs.one_by_one:
            return 0
        return max((before + costs.one_by_one * size for before, size in pairwise([0, *sizes])), default=0)
    return costs.in_lists * sum(sizes)
