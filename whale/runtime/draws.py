"""Draws: random numbers of each distribution, computed from uniform numbers that depend on positions alone.

So a tensor of random numbers is the same for every division into ranks and micro-batches. Distributions without a
formula for one number from one uniform number (Poisson, gamma) are not here: their operators are computed whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whale.runtime.random import RNGPosition, UniformNumbers
from whale.runtime.recording import call, is_recording

__all__ = ["DRAWS", "SeededDraw"]

aten = torch.ops.aten


class SeededDraw(nn.Module):
    """A random operator whose numbers depend on positions in the whole tensor.

    Args:
        target: the operator, one of :data:`DRAWS`.
        key: of the operator.
        clock: of the step.
        dtype: of the result.
    """

    def __init__(self, target: Any, key: int, clock: RNGPosition, dtype: torch.dtype) -> None:
        super().__init__()
        self.target, self.key, self.clock, self.dtype = target, key, clock, dtype

    def forward(self, rows: Tensor, columns: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Draw; *rows* and *columns* are the numbers of the result's."""
        schema = self.target._schema.arguments
        given = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
        bound = {a.name: given.get(a.name, a.default_value) for a in schema}
        numbers = _Numbers(_shape(bound), partial(UniformNumbers, self.key, self.clock), rows, columns, self.dtype)
        return DRAWS[self.target](numbers, bound).to(self.dtype)


class _Numbers:
    """Uniform numbers of the positions of a tensor."""

    def __init__(
        self,
        shape: tuple[int, ...],
        source: Callable[[int], UniformNumbers],
        rows: Tensor,
        columns: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.shape, self.source, self.rows, self.columns, self.dtype = shape, source, rows, columns, dtype

    def inside(self) -> Tensor:
        """Numbers in (0, 1), in float64."""
        return self._draw(52).add_(2.0**-53)

    def from_zero(self) -> Tensor:
        """Numbers in [0, 1), in the result's digits, so that none becomes 1 there."""
        digits = round(-math.log2(torch.finfo(self.dtype).eps)) + 1 if self.dtype.is_floating_point else 53
        return self._draw(min(digits, 53))

    def normal(self) -> Tensor:
        """Normal numbers, in float64."""
        return torch.erfinv(self.inside().mul_(2).sub_(1)).mul_(math.sqrt(2))

    def _draw(self, digits: int) -> Tensor:
        if not is_recording() and (type(self.rows) is not Tensor or self.rows.is_meta):  # without data
            return torch.empty(self.shape, dtype=torch.float64, device=self.rows.device)
        return call(self.source(digits), self.rows, self.columns).view(self.shape)


def _shape(bound: Mapping[str, Any]) -> tuple[int, ...]:
    if bound.get("size") is not None:
        return tuple(bound["size"])
    if "num_samples" in bound:
        return (*bound["self"].shape[:-1], bound["num_samples"])
    return torch.broadcast_shapes(*(x.shape for x in bound.values() if isinstance(x, Tensor)))


def _uniform(u: _Numbers, a: Mapping[str, Any]) -> Tensor:
    low, high = a.get("from", 0.0), a.get("to", 1.0)
    return u.from_zero().mul_(high - low).add_(low)


def _normal(u: _Numbers, a: Mapping[str, Any]) -> Tensor:
    return u.normal() * a.get("std", 1.0) + a.get("mean", 0.0)


def _whole(u: _Numbers, a: Mapping[str, Any]) -> Tensor:
    """Whole numbers from a lowest up to, without, a highest; up to the largest that the dtype has."""
    low = a.get("low", a.get("from")) or 0
    high = a.get("high", a.get("to"))
    if high is None:
        exact = torch.iinfo(u.dtype).max if not u.dtype.is_floating_point else 2 ** round(1 - math.log2(_eps(u.dtype)))
        high = min(exact, 2**53)
    return u._draw(53).mul_(high - low).floor_().add_(low)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _multinomial(u: _Numbers, a: Mapping[str, Any]) -> Tensor:
    """Categories by the sum of the weights before them; without replacement each weight has one turn (exponential
    clocks would need a number for each category)."""
    weights = a["self"].double()
    if a["replacement"] or a["num_samples"] == 1:
        return _category(weights, u.inside())
    turns, found = u.inside(), []
    for turn in range(a["num_samples"]):
        found.append(_category(weights, turns[..., turn : turn + 1]))
        weights = weights.scatter(-1, found[-1], 0.0)
    return torch.cat(found, -1)


def _category(weights: Tensor, u: Tensor) -> Tensor:
    ends = weights.cumsum(-1)
    place = torch.searchsorted(ends, u * ends[..., -1:], right=True)
    last = (weights > 0).long().cumsum(-1).argmax(-1, keepdim=True)  # of a weight that is not zero
    return torch.minimum(place, last)


Draw = Callable[[_Numbers, Mapping[str, Any]], Tensor]

DRAWS: dict[Any, Draw] = {
    aten.rand.default: _uniform,
    aten.rand_like.default: _uniform,
    aten.uniform.default: _uniform,
    aten.randn.default: _normal,
    aten.randn_like.default: _normal,
    aten.normal_functional.default: _normal,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.normal.float_float: _normal,
    aten.log_normal.default: lambda u, a: _normal(u, a).exp_(),
    aten.randint.default: _whole,
    aten.randint.low: _whole,
    aten.randint_like.default: _whole,
    aten.randint_like.low_dtype: _whole,
    aten.random.default: _whole,
    getattr(aten.random, "from"): _whole,
    aten.random.to: _whole,
    aten.bernoulli.default: lambda u, a: u.inside() < a["self"],
    aten.bernoulli.Tensor: lambda u, a: u.inside() < a["p"],
    aten.exponential.default: lambda u, a: u.inside().log_().div_(-a["lambd"]),
    aten.geometric.default: lambda u, a: (u.inside().log_() / math.log1p(-a["p"])).ceil_().clamp_min_(1),
    aten.cauchy.default: lambda u, a: u.inside().sub_(0.5).mul_(math.pi).tan_().mul_(a["sigma"]).add_(a["median"]),
    aten.multinomial.default: _multinomial,
}
"""Draws of operators, from uniform numbers and the arguments by name."""
