"""Workloads for tests of the simulator and of what reads its timelines."""

from __future__ import annotations

from typing import Any

from whale.ir.workload import Boundary, LinkTime, StageWork, Transfer, Workload


def stage_work(ranks: tuple[int, ...], **changes: object) -> StageWork:
    """A stage with forwards of 1 and backwards of 2 seconds on each rank, half of them for weights; ``changes`` are
    other values of fields."""
    count = len(ranks)
    fields: dict[str, Any] = {"ranks": ranks, "forward": (1.0,) * count, "backward": (2.0,) * count}
    fields |= {"kept_bytes": (100,) * count} | changes
    fields.setdefault("weights", tuple(seconds / 2 for seconds in fields["backward"]))
    return StageWork.model_validate(fields)


def boundary(source: int, target: int, pairs: list[tuple[int, int]], size: int = 0) -> Boundary:
    """``size`` bytes forward between each pair of ranks, and back."""
    return Boundary(
        source_stage=source,
        target_stage=target,
        forward=tuple(Transfer(source=a, target=b, bytes=size) for a, b in pairs),
        backward=tuple(Transfer(source=b, target=a, bytes=size) for a, b in pairs),
    )


def chain_workload(
    num_ranks: int,
    micro_batches: int,
    *,
    schedule: str = "1f1b",
    chunks: int = 1,
    times: list[tuple[float, float]] | None = None,
    latency: float = 0.0,
    size: int = 0,
    bandwidth: float = 1.0,
) -> Workload:
    """One rank per stage, interleaved ``chunks`` times; by default forward 1 and backward 2 seconds."""
    count = num_ranks * chunks
    stages = []
    for s in range(count):
        forward, backward = times[s] if times else (1.0, 2.0)
        stages.append(stage_work((s % num_ranks,), forward=(forward,), backward=(backward,)))
    hops = [(s % num_ranks, (s + 1) % num_ranks) for s in range(count - 1)]
    pairs = sorted({pair for a, b in hops for pair in ((a, b), (b, a)) if a != b})
    return Workload(
        world_size=num_ranks,
        micro_batches=micro_batches,
        schedule=schedule,
        stages=tuple(stages),
        boundaries=tuple(boundary(s, s + 1, [hop], size) for s, hop in enumerate(hops)),
        links=tuple(LinkTime(source=a, target=b, latency=latency, bandwidth=bandwidth) for a, b in pairs),
    )
