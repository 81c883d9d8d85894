"""The two ways in which devices share the experts of a mixture: each has whole experts, or a part of every one.

With whole experts rows travel: as many as were routed, to and fro. With cut ones every device computes the rows of all:
they are gathered, and results are summed. Which costs less depends on how many experts a row goes to, on how many
devices there are, and on their links; so both are priced, by the prices by which plans are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whale.ir.profile import LayerKind, LayerVariant, ModelProfile
from whale.ir.strategy import EXPERTS, Experts
from whale.planner.cost.stage import CostModel

__all__ = ["Shared", "first_ways", "shared_experts", "ways_of", "with_experts"]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The two ways at one expert degree.

    Attributes:
        degree: devices that share the experts.
        way: that takes less time.
        seconds: forward and backward of the layers with experts for one micro-batch of a row a device, by way.
    """

    degree: int
    way: Experts
    seconds: dict[Experts, float]

    def __str__(self) -> str:
        other: Experts = "cut" if self.way == "whole" else "whole"
        own, others = (f"{self.seconds[way] * 1e3:.3g} ms" for way in (self.way, other))
        why = {
            "whole": f"rows go to whole experts in {own}, each device has a part of every expert in {others}",
            "cut": f"each device has a part of every expert in {own}, rows go to whole experts in {others}",
        }
        return f"over {self.degree} devices: {why[self.way]}"


def ways_of(kind: LayerKind, degree: int) -> tuple[Experts, ...]:
    """The ways in which *degree* devices may share the experts of a kind of layer."""
    return tuple(v.experts for v in kind.expert_variants if v.expert_degree == degree and v.experts is not None)


def first_ways(profile: ModelProfile) -> dict[int, Experts]:
    """The way at each expert degree that a profile's costs are of; none where there is only one."""
    found: dict[int, Experts] = {}
    for kind in profile.kinds:
        for variant in kind.expert_variants:
            if variant.experts is not None:
                found.setdefault(variant.expert_degree, variant.experts)
    return found


def shared_experts(prices: CostModel, rows: int, fixed: Experts | None = None) -> list[Shared]:
    """For each expert degree that has two ways the one that takes less time on the first devices of the cluster, or
    that which is *fixed*.

    Args:
        prices: of the profile with both.
        rows: of a micro-batch for each device.
    """
    profile, found = prices.profile, []
    degrees = {v.expert_degree for kind in profile.kinds for v in kind.expert_variants if v.experts is not None}
    for degree in sorted(degrees):
        if degree > len(prices.cluster.devices):
            continue
        both = [way for way in EXPERTS if all(_has(kind, degree, way) for kind in profile.kinds)]
        seconds = {way: _seconds(prices, degree, way, rows) for way in both}
        if len(seconds) == 2:
            fastest: Experts = "whole" if seconds["whole"] < seconds["cut"] else "cut"
            found.append(Shared(degree=degree, way=fixed or fastest, seconds=seconds))
    return found


def _has(kind: LayerKind, degree: int, way: Experts) -> bool:
    """Whether devices may share a kind's experts so, or need not, because it has none at that degree."""
    ways = ways_of(kind, degree)
    return not ways or way in ways


def _seconds(prices: CostModel, degree: int, way: Experts, rows: int) -> float:
    """Seconds of all layers with experts on the first *degree* devices, with *rows* rows each."""
    profile = _only(prices.profile, {degree: way})
    priced = CostModel.of(
        profile, prices.cluster, precision=prices.precision.name, stack=prices.stack, optimizer=prices.optimizer
    )
    group = priced.group(tuple(range(degree)), 1, degree)
    kinds = [kind for kind in profile.layers if ways_of(profile.kinds[kind], degree)]
    costs = [priced.layer(kind, group, rows * degree, 1) for kind in kinds]
    return sum(cost.forward + cost.backward for cost in costs)


def _only(profile: ModelProfile, chosen: Mapping[int, Experts]) -> ModelProfile:
    """The profile with one way at each expert degree; where none is chosen, the first."""

    def kept(kind: LayerKind) -> tuple[LayerVariant, ...]:
        found: dict[int, LayerVariant] = {}
        for variant in kind.expert_variants:
            if variant.experts in (None, chosen.get(variant.expert_degree)):
                found[variant.expert_degree] = variant
            else:
                found.setdefault(variant.expert_degree, variant)
        return tuple(found.values())

    if not any(variant.experts for kind in profile.kinds for variant in kind.expert_variants):
        return profile
    kinds = tuple(kind.model_copy(update={"expert_variants": kept(kind)}) for kind in profile.kinds)
    return profile.model_copy(update={"kinds": kinds})


def with_experts(profile: ModelProfile, shared: Sequence[Shared]) -> ModelProfile:
    """The profile with one way to share experts at each degree."""
    return _only(profile, {one.degree: one.way for one in shared})
