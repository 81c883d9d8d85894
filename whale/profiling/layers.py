"""Measurements of a model's layers: forward, backward and update of each kind of layer on each device type.

Layers run one after the other as in a step, at some tensor degrees and rows of a micro-batch. It knows no links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import mean
from typing import Any

from torch import nn

from whale.errors import UsageError
from whale.ir.profile import LayerKind, MeasuredTimes, ModelProfile
from whale.profiling.measuring import Item
from whale.profiling.places import RankLocation, first_of_types
from whale.runtime import probe
from whale.runtime.launch import World
from whale.strategies.layers import LayeredModel
from whale.strategies.runnable import runnable_layers

__all__ = ["layer_items"]

PARTS = ("forward", "backward", "update", "accumulation", "spread")
"""Fields of a layer's measured times, in the order in which ranks report them."""
MICRO_BATCHES = 2
"""Micro-batches of a timed step: the backward of one sets gradients, that of the other adds to them."""


def layer_items(
    world: World,
    places: Sequence[RankLocation],
    profile: ModelProfile,
    capture: Callable[[], Mapping[int, LayeredModel]],
    model: nn.Module,
    batch: Any,
    *,
    rows: Sequence[int],
    degrees: Sequence[int] | None = None,
) -> list[Item]:
    """Measurements of the layers of *model* on the first rank of each device type, at the given tensor degrees, or at
    every degree in the profile.

    *capture* divides the model into layers for micro-batches of these rows; it is called once, if there is something to
    measure.
    """
    captured = cache(capture)
    every = sorted({variant.tensor_degree for kind in profile.kinds for variant in kind.variants})
    return [
        _layers(world, place, profile, captured, model, batch, degree, count)
        for degree in every
        if degrees is None or degree in degrees
        for count in rows
        for place in first_of_types(places)
    ]


def _layers(
    world: World,
    place: RankLocation,
    chain: ModelProfile,
    captured: Callable[[], Mapping[int, LayeredModel]],
    model: nn.Module,
    batch: Any,
    degree: int,
    rows: int,
) -> Item:
    positions = _positions(chain, degree, rows, place.memory_bytes)

    def prepare() -> None:
        model_at_rows = captured()[rows]
        if model_at_rows.hash != chain.model_hash:
            raise UsageError(f"the profile is of another model ({chain.name!r}): measure into another file")
        for kind in dict.fromkeys(chain.layers):
            model_at_rows.place(kind, degree)

    def run(seconds: float) -> list[list[float]]:
        layers = runnable_layers(
            captured()[rows], model, batch, degree=degree, rows=rows, positions=positions, device=world.device
        )
        found = probe.layer_seconds(layers, device=world.device, seconds=seconds, micro_batches=MICRO_BATCHES)
        by_kind: dict[int, list[probe.LayerSeconds]] = {}
        for layer, times in zip(layers, found, strict=True):
            by_kind.setdefault(layer.kind, []).append(times)
        return [
            [
                mean(times.forward for times in by_kind[kind]),
                mean(times.first_backward for times in by_kind[kind]),
                mean(times.update for times in by_kind[kind]),
                max(0.0, mean(times.backward - times.first_backward for times in by_kind[kind])),
                by_kind[kind][0].spread,
            ]
            for kind in range(len(chain.kinds))
        ]

    def times_of(kind: LayerKind) -> MeasuredTimes | None:
        return next((t for t in kind.measured if (t.device_type, t.tensor_degree) == (place.device_type, degree)), None)

    def known(profile: ModelProfile) -> bool:
        return all((times := times_of(kind)) is not None and rows in times.rows for kind in profile.kinds)

    def merged(profile: ModelProfile, found: list[list[float]]) -> ModelProfile:
        kinds = []
        for kind, numbers in zip(profile.kinds, found, strict=True):
            old = times_of(kind)
            points = {} if old is None else {at: _parts(old, index) for index, at in enumerate(old.rows)}
            points[rows] = tuple(numbers)
            columns: Any = zip(*(points[at] for at in sorted(points)), strict=True)
            named: dict[str, Any] = dict(zip(PARTS, columns, strict=True))
            new = MeasuredTimes(
                device_type=place.device_type,
                tensor_degree=degree,
                rows=tuple(sorted(points)),
                **named,
            )
            others = [times for times in kind.measured if times is not old]
            measured = sorted([*others, new], key=lambda times: (times.device_type, times.tensor_degree))
            kinds.append(kind.model_copy(update={"measured": tuple(measured)}))
        return profile.model_copy(update={"kinds": tuple(kinds)})

    return Item(
        name=f"layers at tensor degree {degree}, {rows} rows, on {place.device_type}",
        ranks=(place.rank,),
        known=known,
        run=run,
        merged=merged,
        weight=4.0,
        prepare=prepare,
    )


def _parts(times: MeasuredTimes, index: int) -> tuple[float, ...]:
    return tuple(values[index] if (values := getattr(times, part)) else 0.0 for part in PARTS)


def _positions(chain: ModelProfile, degree: int, rows: int, memory_bytes: int) -> list[int]:
    """The layers to run: all, because fewer would hit caches more often than a step does, or as many of each kind as
    leave half of the memory free, at least one."""
    number_bytes = 4.0  # float32, the widest usual dtype
    costs = []
    for kind in chain.kinds:
        variant = next((v for v in kind.variants if v.tensor_degree == degree), None)
        kept = sum(saved.size.total(rows, number_bytes) for saved in variant.saved) if variant else 0.0
        costs.append((variant.parameters * 4 * number_bytes if variant else 0.0) + kept)
    most = max(chain.layers.count(kind) for kind in range(len(chain.kinds)))
    while most > 1 and sum(costs[kind] * min(most, chain.layers.count(kind)) for kind in range(len(costs))) > (
        memory_bytes / 2
    ):
        most -= 1
    seen: Counter[int] = Counter()
    positions = []
    for position, layer in enumerate(chain.layers):
        seen[layer] += 1
        if seen[layer] <= most:
            positions.append(position)
    return positions
