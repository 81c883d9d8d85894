"""Alternating measurements of steps, of their layers and reductions, and of the bytes of a step, in the same processes.

A shared machine is faster or slower by 10 to 20% from one minute to the next. Layers and all-reduces that are measured
between the steps run under the same conditions, so a prediction from them can be compared with the steps. Used by ranks
that run steps; knows no models and no plans.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch.distributed as dist
from harness import over_ranks
from live_bytes import LiveBytes
from torch import nn

from whale import profiling
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.runtime.launch import World
from whale.strategies.layers import layered

Step = Callable[[], object]
Wanted = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Tensor degrees, and for those the rows of micro-batches."""


def time_in_turn(
    world: World,
    cluster: Cluster,
    known: ModelProfile,
    model: nn.Module,
    batch: Any,
    steps: Mapping[str, Step],
    wanted: Wanted,
    *,
    repeats: int,
) -> tuple[ModelProfile, dict[str, list[float]]]:
    """Alternate steps with measurements of layers and all-reduces, *repeats* times.

    Returns *known* with these times in place of its own, and the seconds of every step; called by all ranks.
    """
    kinds = tuple(kind.model_copy(update={"measured": ()}) for kind in known.kinds)
    links = tuple(curve for curve in known.links if curve.operation != "all_reduce")
    start = known.model_copy(update={"kinds": kinds, "links": links})
    captured = cache(lambda: layered(model, batch, sorted({count for _, rows in wanted for count in rows})))
    places = profiling.places_of(world, cluster)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    items = [_step_item(world, name, step, seconds[name]) for name, step in steps.items()]
    items += profiling.machine_items(world, places, profiling.Sizes.of(world.device))  # of these, what *start* lacks
    for degrees, rows in wanted:
        for item in profiling.layer_items(world, places, start, captured, model, batch, rows=rows, degrees=degrees):
            items += [item, *_company(item, places)]
    made, _ = profiling.measure_items(
        world, items, start, time_limit=1e4, most_seconds=0.1, passes=repeats, parallel=True
    )
    return made, seconds


def _company(item: profiling.Item, places: Sequence[profiling.Place]) -> list[profiling.Item]:
    """Run the same layer on the other devices of the type: in a real step all compute and share memory bandwidth."""
    first = item.ranks[0]
    return [
        replace(item, ranks=(place.rank,), merged=lambda profile, value: profile)
        for place in places
        if place.rank != first and place.device_type == places[first].device_type
    ]


def _step_item(world: World, name: str, step: Step, seconds: list[float]) -> profiling.Item:
    def run(_: float) -> float:
        step()  # what ran before has left its own in the caches and the allocator
        dist.barrier()
        start = time.perf_counter()
        step()
        seconds.append(over_ranks(time.perf_counter() - start, dist.ReduceOp.MAX))
        return seconds[-1]

    return profiling.Item(
        name=name,
        ranks=tuple(range(world.size)),
        known=lambda profile: False,
        run=run,
        merged=lambda profile, value: profile,
        prepare=step,
    )


def peak_of(step: Step, others: frozenset[int]) -> int:
    """Peak bytes of a step's tensors without *others*; the smaller of two steps, because a gloo thread may release a
    buffer late."""
    step()
    gc.collect()
    peaks = []
    with LiveBytes(others) as live:
        for _ in range(2):
            live.peak = live.now
            step()
            peaks.append(live.peak)
    return min(peaks)


def noise(seconds: Sequence[float]) -> float:
    """Relative distance between the medians of the first and the second half."""
    halves = [statistics.median(half) for half in (seconds[: len(seconds) // 2], seconds[len(seconds) // 2 :])]
    return abs(halves[0] / halves[1] - 1)
