"""Measurements of a machine: rates of its devices, at sizes where each kind reaches its best, and its links.

It works with or without a model, and knows no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from whale.ir.profile import MeasuredRate, ModelProfile
from whale.ir.program import BUCKET_BYTES
from whale.profiling.links import link_items
from whale.profiling.measuring import Item
from whale.profiling.places import RankLocation, first_of_types
from whale.runtime import probe
from whale.runtime.launch import World

__all__ = ["Sizes", "machine_items"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes to measure: sides of matrices by dtype, bytes of a copy and of messages."""

    matmul: tuple[tuple[str, tuple[int, ...]], ...]
    copy: int
    messages: tuple[int, ...]

    @classmethod
    def of(cls, device: torch.device) -> Sizes:
        """The default sizes: large enough on each kind of device for its best rate, and larger than its caches."""
        if device.type == "cuda":
            sides = (512, 1024, 2048, 4096, 8192)
            dtypes = ("float32", "tfloat32", "float16", "bfloat16")
            messages = tuple(2 ** (10 + 3 * step) for step in range(7))  # 1 KiB to 256 MiB
            return cls(matmul=tuple((dtype, sides) for dtype in dtypes), copy=2**30, messages=messages)
        return cls(
            matmul=(("float32", (128, 256, 512, 1024)), ("float64", (512,)), ("bfloat16", (512,))),
            copy=2**28,
            messages=(2**10, 2**14, 2**18, 2**20, BUCKET_BYTES, 2**24),
        )


def machine_items(world: World, places: Sequence[RankLocation], sizes: Sizes) -> list[Item]:
    """Links, then devices: each type of device on its first rank, each kind of pair and group on its first ranks."""
    items = link_items(world, places, sizes.messages)
    for place in first_of_types(places):
        items.append(_rate(world, place, "memory", "float32", (sizes.copy,)))
        items += [_rate(world, place, "matmul", dtype, (side,) * 3) for dtype, sides in sizes.matmul for side in sides]
    return items


def _rate(world: World, place: RankLocation, kind: str, dtype: str, dims: tuple[int, ...]) -> Item:
    side = dims[0]

    def run(seconds: float) -> list[float]:
        if kind == "memory":
            measured = probe.copy_seconds(side, device=world.device, seconds=seconds)
            return [side / measured.seconds, measured.spread]
        measured = probe.matmul_seconds(side, dtype, device=world.device, seconds=seconds)
        return [2 * side**3 / measured.seconds, measured.spread]

    def known(profile: ModelProfile) -> bool:
        return any(
            (rate.device_type, rate.kind, rate.dtype, rate.dims) == (place.device_type, kind, dtype, dims)
            for rate in profile.rates
        )

    def merged(profile: ModelProfile, found: list[float]) -> ModelProfile:
        rate = MeasuredRate(
            device_type=place.device_type,
            kind=kind,  # type: ignore[arg-type]
            dtype=dtype,
            dims=dims,
            rate=found[0],
            spread=found[1],
        )
        figure = "memory_bandwidth" if kind == "memory" else dtype
        figures = {"memory_bytes": float(place.memory_bytes)} | profile.device_types.get(place.device_type, {})
        figures[figure] = max(figures.get(figure, 0.0), found[0])
        return profile.model_copy(
            update={
                "rates": (*profile.rates, rate),
                "device_types": {**profile.device_types, place.device_type: figures},
            }
        )

    size = f"{side / 2**20:g} MiB" if kind == "memory" else f"{side} x {side}"
    return Item(
        name=f"{kind} {dtype} {size} on {place.device_type}",
        ranks=(place.rank,),
        known=known,
        run=run,
        merged=merged,
    )
