"""The program of a rank: check that every nest gives the local model's loss and gradients, and measure its steps.

Ranks may be those of torchrun or of a testbed. Results are JSON in the experiment's folder, written by rank 0.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from between import Wanted, noise, peak_of, time_in_turn
from experiment import Experiment, build
from live_bytes import living
from torch import nn

import whale
from whale import profiling
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.planner.catalog import device_types
from whale.runtime.failure import Failures
from whale.runtime.launch import World
from whale.runtime.module import ParallelModule

LINKS_SECONDS = 150.0
NOISE_FLOOR = 1e-3
"""Errors of a gradient are relative to its largest element, or to this part of the largest of all gradients: some are
zero in mathematics and hold only rounding."""


def each_rank(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# --- parity -----------------------------------------------------------------------------------------------------------


def verify(experiment: Experiment, plans: Mapping[str, Path], cluster: Path) -> dict[str, float]:
    """The worst error of loss and gradients on any rank, of every nesting, in float64 and with the small settings."""
    model, batch = build(experiment, small=True)
    model = model.double()
    local = copy.deepcopy(model)
    loss = local(**batch)
    loss.backward()
    errors = {}
    for name, plan in plans.items():
        parallel = whale.parallelize(copy.deepcopy(model), batch, cluster=cluster, plan=plan, timeout_seconds=300)
        found = parallel.train_step(**batch)
        errors[name] = max(abs(found.item() / loss.item() - 1), _worst_gradient(parallel, local))
    everywhere = each_rank(errors)
    return {name: max(own[name] for own in everywhere) for name in errors}


def _worst_gradient(parallel: ParallelModule, local: nn.Module) -> float:
    found = parallel.full_gradients()
    expected = {name: p.grad for name, p in local.named_parameters() if p.grad is not None}
    floor = NOISE_FLOOR * max(float(grad.abs().max()) for grad in expected.values())
    return max(
        float((found[name] - grad).abs().max()) / max(float(grad.abs().max()), floor) for name, grad in expected.items()
    )


# --- steps ------------------------------------------------------------------------------------------------------------


def measure(
    world: World,
    experiment: Experiment,
    plans: Mapping[str, Path],
    cluster: Path,
    profile: ModelProfile,
    wanted: Wanted,
    *,
    small: bool,
    repeats: int,
) -> tuple[ModelProfile, dict[str, Any]]:
    """The profile as measured between the steps (rank 0's is the one that counts), and what was measured of every
    nesting."""
    model, batch = build(experiment, small=small)
    described = Cluster.load(cluster, catalog=device_types())
    places = profiling.places_of(world, described)
    sizes = profiling.Sizes.of(world.device)
    items, known = profiling.machine_items(world, places, sizes), profile
    for _ in range(1 if small else 2):  # what there was no time for the first time
        known, _ = profiling.measure_items(world, items, known, time_limit=1.0 if small else LINKS_SECONDS)
    start = time.perf_counter()
    steps: dict[str, _Step] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, plan in plans.items():
        others = frozenset(living())
        steps[name] = step = _Step(copy.deepcopy(model), batch, cluster, plan, world)
        found[name] = {"bytes": each_rank(_peak(step, others, world)), "sent": sum(each_rank(_sent_by(step)))}
        step.times.clear()
        if world.rank == 0:
            print(f"{time.perf_counter() - start:.0f} s: {name}", file=sys.stderr, flush=True)
    made, seconds = time_in_turn(world, described, known, model, batch, steps, wanted, repeats=repeats)
    for name, own in seconds.items():
        found[name] |= {"seconds": statistics.median(own), "noise": noise(own), "each": own}
        found[name]["bubble"] = _bubble(each_rank(steps[name].times))
    return made, found


class _Step:
    """A training step of a plan: forward, backward and AdamW. ``times`` has the seconds of every step of this rank, and
    of those the seconds in which it waited for values and gradients of other stages."""

    def __init__(self, model: nn.Module, batch: Any, cluster: Path, plan: Path, world: World) -> None:
        self.model = whale.parallelize(model, batch, cluster=cluster, plan=plan, timeout_seconds=300)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch, self.world, self.times = copy.deepcopy(batch), world, list[tuple[float, float]]()

    def __call__(self) -> None:
        start = time.perf_counter()
        with _waits(self.model._whale.engine.world.failures) as waits:
            self.model.train_step(**self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append((time.perf_counter() - start, sum(waits)))


@contextmanager
def _waits(failures: Failures) -> Iterator[list[float]]:
    """Note the seconds of every wait for what another stage sends."""
    wait, seconds = failures.wait, list[float]()

    def timed(work: Any, what: str, *arguments: Any, **options: Any) -> None:
        start = time.perf_counter()
        wait(work, what, *arguments, **options)
        if what.startswith(("value ", "gradient of value ")):
            seconds.append(time.perf_counter() - start)

    failures.wait = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        failures.wait = wait  # type: ignore[method-assign]


def _bubble(times: list[list[tuple[float, float]]]) -> float:
    """The share of all ranks' time in which they wait for other stages, or have ended while others have not: the median
    of the steps."""
    shares = []
    for step in zip(*times, strict=True):
        longest = max(seconds for seconds, _ in step)
        shares.append(1 - sum(seconds - waited for seconds, waited in step) / (len(step) * longest))
    return statistics.median(shares)


def _peak(step: Callable[[], object], others: frozenset[int], world: World) -> int:
    """The most bytes of a step's tensors; with CUDA of all tensors on the device."""
    if world.device.type != "cuda":
        return peak_of(step, others)
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def _sent_by(step: Callable[[], object]) -> int:
    """The bytes that this rank's node sends in a step, headers and all; 0 for all but the first rank of a node."""
    dist.barrier()
    before = _sent()
    dist.barrier()
    step()
    dist.barrier()
    return _sent() - before if os.environ.get("LOCAL_RANK", "0") == "0" else 0


def _sent() -> int:
    """Bytes that the interface that gloo uses has sent, or all but the loopback, by the kernel's count."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    counts = {name.strip(): int(numbers.split()[8]) for name, numbers in lines}
    used = os.environ.get("GLOO_SOCKET_IFNAME")
    return counts[used] if used else sum(count for name, count in counts.items() if name != "lo")


def write(path: Path, value: Any) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1))
    part.replace(path)
