"""Mapping of a compiled model to a profile: the layers of each stage, and the shard of each layer on each rank.

A profile is a chain of layers with module paths; a compilation has operators, stages and meshes. It knows no seconds,
no bytes and no cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from whale.compile.compilation import Compilation
from whale.errors import UsageError
from whale.graph.origins import module_of
from whale.ir.profile import ModelProfile
from whale.ir.strategy import Recompute, RegionRole, divides_batch, shards_operators
from whale.strategies.layout import unit_shares
from whale.strategies.lowering import PlacedStage

__all__ = ["Part", "StageLayers", "layer_finder", "stage_layers"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rank's shard of a layer: the rows of a micro-batch, the fraction of a split, the number of ranks over which
    only its experts are split, that of ranks over which each row is cut with how many times an equal part of it this
    rank has, what its backward computes again, and whether tables with sparse gradients are on the host."""

    rows: int
    fraction: float
    expert: int = 1
    context: int = 1
    part: float = 1.0
    recompute: Recompute = "none"
    tables_on_host: bool = False


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """The layers of a stage: positions in the profile's chain, and each rank's shard of each."""

    layers: tuple[int, ...]
    parts: Mapping[int, tuple[Part, ...]]


def stage_layers(compilation: Compilation, profile: ModelProfile) -> list[StageLayers]:
    """Assign the layers of the profile to stages, with their shards.

    A layer belongs to the stage that computes the first operator in its module.

    Raises:
        UsageError: the profile has no module paths, or a layer's module computes nothing in this model.
    """
    if len(profile.paths) != len(profile.layers):
        raise UsageError(
            f"the profile of {profile.name} does not say which modules its layers are; make one with whale profile "
            "--model, or estimate its degrees with whale estimate"
        )
    first: dict[str, tuple[int, Any]] = {}
    for stage in compilation.stages:
        for node in stage.nodes:
            path = module_of(node) or ""
            while True:
                first.setdefault(path, (stage.index, node))
                if not path:
                    break
                path = path.rpartition(".")[0]
    found: list[list[tuple[int, Any]]] = [[] for _ in compilation.stages]
    before: tuple[int, Any] | None = None
    for position, path in enumerate(profile.paths):
        place = first.get(path) if path else before or first.get("")
        if place is None:
            raise UsageError(
                f"layer {position} of the profile is {path!r}, which computes nothing in this model; give the profile "
                "that was made of it"
            )
        found[place[0]].append((position, place[1]))
        before = place
    return [
        StageLayers(
            layers=tuple(position for position, _ in members),
            parts=_parts(compilation, profile, stage, members),
        )
        for stage, members in zip(compilation.stages, found, strict=True)
    ]


def _parts(
    compilation: Compilation, profile: ModelProfile, stage: PlacedStage, members: Sequence[tuple[int, Any]]
) -> dict[int, tuple[Part, ...]]:
    """Each rank's shards of layers, each with its first operator, by the roles of their regions."""
    spot, scopes = compilation.assignment.stages[stage.index], compilation.partition.stages[stage.index].scopes
    by_path = {module_of(node) or "": spot.roles.of(scopes[node]) for node in stage.nodes} if profile.experts else {}
    roles = []
    for layer, node in members:
        own, modules = spot.roles.of(scopes[node]), profile.experts[layer] if profile.experts else ()
        roles.append((own, next((by_path[module] for module in modules if module in by_path), own)))
    shares = [stage.mesh.axis_shares(axis) for axis in range(len(stage.mesh.axes))]
    sums = [sum(own) for own in shares]

    def part(role: Sequence[RegionRole], of_experts: Sequence[RegionRole], coordinates: Sequence[int]) -> Part:
        rows, fraction, expert = max(compilation.rows), 1.0, 1
        context, own = 1, 1.0
        for axis, (one, other, at) in enumerate(zip(role, of_experts, coordinates, strict=True)):
            if divides_batch(one):
                rows = unit_shares(rows, stage.layout.axes[axis + 1])[at]
                expert *= stage.mesh.shape[axis] if shards_operators(other) else 1
            elif shards_operators(one):
                fraction *= shares[axis][at] / sums[axis]
            else:
                context, own = (
                    context * stage.mesh.shape[axis],
                    own * stage.mesh.shape[axis] * shares[axis][at] / sums[axis],
                )
        return Part(
            rows=rows,
            fraction=fraction,
            expert=expert,
            context=context,
            part=own,
            recompute=stage.recompute,
            tables_on_host=stage.tables_on_host,
        )

    found = {}
    for rank in stage.mesh.ranks:
        coordinates = stage.mesh.coordinates(rank)
        parts = {both: part(*both, coordinates) for both in dict.fromkeys(roles)}
        found[rank] = tuple(parts[both] for both in roles)
    return found


def layer_finder(paths: Sequence[str]) -> Callable[[str], int]:
    """The layer of a parameter, the one with the longest path that it begins with; -1 for none."""
    positions = {path: layer for layer, path in reversed(list(enumerate(paths))) if path}

    @cache
    def layer_of(name: str) -> int:
        while name and name not in positions:
            name = name.rpartition(".")[0]
        return positions.get(name, -1)

    return layer_of
