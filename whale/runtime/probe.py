"""Measurements of devices, links and layers: robust times on CPU and CUDA.

A measurement is a median of windows of wall time. A window is long compared with the period of a CPU quota (10 to 100
ms), so that throttling is included; ranks of one measurement agree on the number of repetitions, so that none waits for
a call that does not come. This module knows tensors and process groups; its callers decide what to measure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale.errors import UsageError
from whale.ir.placement import Cut, Segment
from whale.runtime import collectives
from whale.runtime.local_program import ShapeAndDtype
from whale.runtime.stage import Kept, LocalStage

__all__ = [
    "TimedLayers",
    "Layer",
    "LayerSeconds",
    "Measured",
    "collective_seconds",
    "copy_seconds",
    "host_copy_seconds",
    "interference",
    "layer_seconds",
    "matmul_seconds",
    "measure",
    "send_seconds",
    "summary",
]

WINDOW_SECONDS = 0.2
"""Twenty periods of 10 ms: over such windows the rate under a CPU quota of 50% spread by 3% (of 100 ms: by 11%)."""
MAX_WINDOWS = 9
MIN_TURNS = 3
MOST_LARGE = 64
"""All-reduces of a turn."""
PIECES = 4
"""Number of tensors in a large all-reduce, as in a gradient bucket."""
CHUNKS = 8
"""Pieces of computation for each of them, so that the next begins soon after it ends."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of one run: the median of windows; ``spread`` is the distance between their quartiles, as a share of
    it."""

    seconds: float
    spread: float


def summary(values: Sequence[float]) -> Measured:
    """The median of some measurements, and how far apart their quartiles are.

    >>> summary([1.0, 3.0, 2.0])
    Measured(seconds=2.0, spread=0.5)
    """
    middle = median(values)
    ordered = sorted(values)
    low, high = (_quantile(ordered, share) for share in (0.25, 0.75))
    return Measured(seconds=middle, spread=(high - low) / middle if middle > 0 else 0.0)


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def measure(
    run: Callable[[], object],
    *,
    device: torch.device,
    seconds: float,
    agree: Callable[[float], float] = lambda estimate: estimate,
) -> Measured:
    """Run a function repeatedly for about the given seconds.

    Two runs come first; the second determines the runs per window. If a run takes more than a third of the time,
    windows have one run, at least one.

    Args:
        run: what to time; it may start work on the device without waiting for it.
        device: that works.
        seconds: to spend, about.
        agree: makes the estimates of all ranks that run this together one.
    """
    run()
    estimate = max(1e-7, agree(_wall(run, 1, device)))
    repeats = ceil(min(WINDOW_SECONDS, seconds / 3) / estimate)
    num_windows = min(max(1, int(seconds / (repeats * estimate))), MAX_WINDOWS)
    return summary([_wall(run, repeats, device) / repeats for _ in range(num_windows)])


def _wall(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    finish(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    finish(device)
    return time.perf_counter() - begin


def finish(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- devices ----------------------------------------------------------------------------------------------------------


def matmul_seconds(size: int, dtype: str, *, device: torch.device, seconds: float) -> Measured:
    """Seconds of a product of two square matrices; ``tfloat32`` is float32 that may use tensor cores."""
    kind = torch.float32 if dtype == "tfloat32" else getattr(torch, dtype)
    left, right = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=kind)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tfloat32"
    try:
        return measure(lambda: torch.mm(left, right, out=out), device=device, seconds=seconds)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def copy_seconds(num_bytes: int, *, device: torch.device, seconds: float) -> Measured:
    """Seconds of a copy that reads half of the bytes from memory and writes the other half."""
    source = torch.ones(num_bytes // 8, device=device)
    target = torch.empty_like(source)
    return measure(lambda: target.copy_(source), device=device, seconds=seconds)


def host_copy_seconds(num_bytes: int, *, device: torch.device, to_device: bool, seconds: float) -> Measured:
    """Seconds of a copy of some bytes between the host's memory, pinned where *device* is a GPU, and a device."""
    pinned = device.type == "cuda"
    here = torch.ones(num_bytes // 4, pin_memory=pinned)
    there = torch.empty_like(here, device=device, pin_memory=False)
    target, source = (there, here) if to_device else (here, there)
    return measure(lambda: target.copy_(source, non_blocking=pinned), device=device, seconds=seconds)


# --- links ------------------------------------------------------------------------------------------------------------


def send_seconds(
    num_bytes: int,
    rank: int,
    peer: int,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device,
    seconds: float,
) -> Measured:
    """Seconds of a message between two ranks: half of there and back, which the lower of the two begins."""
    mine, theirs = (torch.zeros(max(1, num_bytes // 4), device=device) for _ in range(2))

    def there_and_back() -> None:
        order = (True, False) if rank < peer else (False, True)
        for sends in order:
            work = (dist.isend if sends else dist.irecv)(mine if sends else theirs, peer, group=group)
            if work is not None:
                work.wait()

    both = measure(there_and_back, device=device, seconds=seconds, agree=_largest(group, device))
    return replace(both, seconds=both.seconds / 2)


def collective_seconds(
    operation: str,
    num_bytes: int,
    ranks: Sequence[int],
    rank: int,
    group: dist.ProcessGroup,
    *,
    device: torch.device,
    seconds: float,
) -> Measured:
    """Seconds of a collective as the bridges between placements make it, its copies included.

    *num_bytes* is the whole tensor: what an all-reduce reduces, an all-gather returns, a reduce-scatter reads, an
    all-to-all exchanges on one rank.
    """
    world, index = len(ranks), list(ranks).index(rank)
    side = max(1, num_bytes // 4 // world) * world  # elements, in equal parts
    cut = _even(0, side, world)

    def whole() -> Tensor:
        return torch.zeros(side, device=device)

    match operation:
        case "all_reduce":
            x = whole()
            run: Callable[[], object] = lambda: collectives.all_reduce(x, group)  # noqa: E731
        case "all_gather":
            x = whole()[: side // world].clone()
            run = lambda: collectives.all_gather(x, cut, index, group)  # noqa: E731
        case "reduce_scatter":
            x = whole()
            run = lambda: collectives.reduce_scatter(x, cut, index, group)  # noqa: E731
        case "all_to_all":
            x = whole().view(1, side)  # one row of each rank's, cut by columns: each gets all rows of its columns
            source, target = _even(0, world, world), _even(1, side, world)
            run = lambda: collectives.all_to_all(x, source, target, index, group)  # noqa: E731
        case _:
            raise UsageError(f"unknown collective {operation!r}")
    return measure(run, device=device, seconds=seconds, agree=_largest(group, device))


def interference(
    small_bytes: int,
    large_bytes: int,
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    *,
    device: torch.device,
    seconds: float,
) -> tuple[float, float, float]:
    """Interference of gradient reductions with other work of their ranks: the slowdown of a matrix product on this rank
    (1: twice as long) during consecutive reductions, the extra seconds of a small all-reduce, and the slowdown of the
    large ones while all ranks compute. Medians of some rounds.

    *groups* are two of these ranks: collectives of one group follow each other.
    """
    beside = _Beside(small_bytes, large_bytes, groups, device)
    estimate = _largest(groups[0], device)(_wall(beside.turn, 1, device))
    turns = [beside.turn() for _ in range(min(max(MIN_TURNS, int(seconds / max(estimate, 1e-7))), MAX_WINDOWS))]
    slower, waited, longer = (max(0.0, median(each)) for each in zip(*turns, strict=True))
    return slower, waited, longer


class _Beside:
    """Other work during large all-reduces, in rounds.

    A large all-reduce is that of a gradient bucket: tensors are copied into one, which is reduced, and copied back.
    """

    def __init__(
        self, small_bytes: int, large_bytes: int, groups: tuple[dist.ProcessGroup, dist.ProcessGroup], device: Any
    ) -> None:
        self.device, self.groups = device, groups
        self.small = torch.zeros(max(1, small_bytes // 4), device=device)
        self.pieces = [torch.zeros(max(1, large_bytes // 4 // PIECES), device=device) for _ in range(PIECES)]
        side = 256 if device.type == "cpu" else 2048
        self.left, self.right = (torch.randn(side, side, device=device) for _ in range(2))
        self.out = torch.empty_like(self.left)
        agree = _largest(groups[0], device)
        self.products = 1
        self._sum()
        once = agree(_wall(self._sum, 1, device))
        self.count = min(MOST_LARGE, ceil(WINDOW_SECONDS / max(once, 1e-7)))
        self._products()
        self.products = max(1, int(once / CHUNKS / self._products()))

    def turn(self) -> tuple[float, float, float]:
        """Slowdown of products, extra seconds of the small all-reduce, and slowdown of the large ones."""
        self._meet()
        chunks = self.count * CHUNKS // 2
        alone = self._timed(self._products, chunks) / chunks
        self._meet()
        free = self._timed(self._sum, self.count)
        met = self._meet()
        sums = [self._start() for _ in range(self.count)]
        self._small()
        waited = self._small() - met
        for one in sums:
            self._end(*one)
        self._meet()
        done = 0

        def both() -> None:
            nonlocal done
            for _ in range(self.count):
                total, work = self._start()
                while work is not None and not work.is_completed():
                    self._products()
                    done += 1
                self._end(total, work)

        taken = self._timed(both)
        return taken / max(done, 1) / alone - 1, waited, taken / free - 1

    def _meet(self) -> float:
        """Synchronize all ranks; return the seconds of a small all-reduce afterwards."""
        self._small()
        return self._small()

    def _start(self) -> tuple[Tensor, Any]:
        total = torch.cat(self.pieces)
        return total, dist.all_reduce(total, group=self.groups[1], async_op=True)

    def _end(self, total: Tensor, work: Any) -> None:
        if work is not None:
            work.wait()
        torch._foreach_copy_(self.pieces, list(total.split(self.pieces[0].numel())))

    def _sum(self) -> None:
        self._end(*self._start())
        finish(self.device)

    def _small(self) -> float:
        return self._timed(lambda: collectives.all_reduce(self.small, self.groups[0]))

    def _products(self) -> float:
        def run() -> None:
            for _ in range(self.products):
                torch.mm(self.left, self.right, out=self.out)

        return self._timed(run)

    def _timed(self, run: Callable[[], object], repeats: int = 1) -> float:
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # and not the stream of the large ones
        return time.perf_counter() - begin


def _even(dim: int, extent: int, world: int) -> Cut:
    return Cut(dim=dim, segments=(Segment(1, extent, 1),), sizes=(extent // world,) * world)


def _largest(group: dist.ProcessGroup | None, device: torch.device) -> Callable[[float], float]:
    def agree(estimate: float) -> float:
        agreed = torch.tensor([estimate], dtype=torch.float64, device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
        return float(agreed.item())

    return agree


# --- layers -----------------------------------------------------------------------------------------------------------


class Layer(Protocol):
    """A layer that can be run; see ``whale.strategies.runnable``."""

    @property
    def stage(self) -> LocalStage:
        """Runs its forward."""
        ...

    @property
    def received(self) -> Sequence[Tensor]:
        """Stand-ins for what it receives."""
        ...

    @property
    def batch(self) -> Mapping[str, Tensor]:
        """The part of the global batch that its stage reads."""
        ...

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Its trainable parameters."""
        ...


Optimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
MAX_STEPS = 1_000


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """One micro-batch through one layer.

    ``first_backward`` is of the first micro-batch of a step, which sets gradients, ``backward`` of a later one, which
    adds to them. ``update`` is the layer's share of the optimizer's step by its parameters; ``spread`` is a step's.
    """

    forward: float
    first_backward: float
    backward: float
    update: float
    spread: float


def layer_seconds(
    layers: Sequence[Layer],
    *,
    device: torch.device,
    seconds: float,
    micro_batches: int = 4,
    optimizer: Optimizer = torch.optim.AdamW,
) -> list[LayerSeconds]:
    """Seconds of each layer, from training steps of the chain of these layers.

    A step is that of the executor: each micro-batch forward through all layers and backward through all, gradient
    accumulation, then the optimizer, and gradients are freed. Every layer is a graph of its own; its input is the
    output of the layer before, if that has the right shape. So caches, the allocator and the memory are in the state of
    a real step, and the layers' times sum to the step's.
    """
    chain = TimedLayers(layers, device=device, micro_batches=micro_batches, optimizer=optimizer)
    chain.step()  # makes the states of the optimizers, in memory that activations had
    begin = time.perf_counter()
    chain.step()  # so that these need memory once more
    estimate = max(1e-7, time.perf_counter() - begin)
    steps = [chain.step() for _ in range(min(max(1, ceil(seconds / estimate)), MAX_STEPS))]
    return _layer_seconds(layers, steps, ceil(WINDOW_SECONDS / estimate), micro_batches)


class TimedLayers:
    """Layers, one after another, that can be trained step by step while every part of a step is timed."""

    FORWARD, FIRST_BACKWARD, BACKWARD = range(3)

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        device: torch.device,
        micro_batches: int = 4,
        optimizer: Optimizer = torch.optim.AdamW,
    ) -> None:
        self.layers, self.micro_batches = tuple(layers), micro_batches
        parameters = {id(parameter): parameter for layer in layers for parameter in layer.parameters}
        self.optimizer = optimizer(list(parameters.values())) if parameters else None
        self.device, self.clock = device, _Clock(device)

    def step(self) -> tuple[list[list[float]], float]:
        """Run a step; for each layer the seconds of its forwards, first backward and later backwards, and those of the
        optimizer."""
        times = [[0.0] * 3 for _ in self.layers]
        update = [0.0]
        for layer in self.layers:
            layer.stage.begin(layer.batch)
        with torch.no_grad():
            for micro_batch in range(self.micro_batches):
                kept = self._forward(times)
                self._backward(kept, times, self.BACKWARD if micro_batch else self.FIRST_BACKWARD)
        for layer in self.layers:
            layer.stage.finish()
        if self.optimizer is not None:
            self.clock.start()
            self.optimizer.step()
            self.clock.stop(update, 0)
            self.optimizer.zero_grad()
        self.clock.settle()
        return times, update[0]

    def _forward(self, times: Sequence[list[float]]) -> list[Kept]:
        kept: list[Kept] = []
        values: Sequence[Tensor] = ()
        for layer, spent in zip(self.layers, times, strict=True):
            given = tuple(_usable(values, index, x) for index, x in enumerate(layer.received))
            self.clock.start()
            values, of_stage = layer.stage.forward_to_train(0, given)
            self.clock.stop(spent, self.FORWARD)
            kept.append(of_stage)
        return kept

    def _backward(self, kept: list[Kept], times: Sequence[list[float]], index: int) -> None:
        gradients: Sequence[Tensor | None] = ()
        for layer, spent in zip(reversed(self.layers), reversed(times), strict=True):
            derivative = layer.stage.programs[0].derivative
            likes = () if derivative is None else derivative.seeds
            seeds = [_seed(like, gradients, place, self.device) for place, like in enumerate(likes)]
            self.clock.start()
            gradients = layer.stage.backward(0, kept.pop(), seeds)
            self.clock.stop(spent, index)


def _usable(values: Sequence[Tensor], index: int, stand_in: Tensor) -> Tensor:
    """The output of the layer before, if it is this layer's input; else the stand-in."""
    if index < len(values) and values[index].shape == stand_in.shape and values[index].dtype == stand_in.dtype:
        return values[index]
    return stand_in.detach()


def _seed(
    like: ShapeAndDtype | None, gradients: Sequence[Tensor | None], index: int, device: torch.device
) -> Tensor | None:
    gradient = gradients[index] if index < len(gradients) else None
    if like is None or (gradient is not None and gradient.shape == like[0]):
        return gradient
    return torch.ones(like[0], dtype=like[1], device=device)


class _Clock:
    """Accumulates the seconds of sections of work: wall time on a CPU, events on CUDA, which do not disturb its
    queue."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pending: list[tuple[torch.cuda.Event, torch.cuda.Event, list[float], int]] = []
        self.began: float | torch.cuda.Event = 0.0

    def start(self) -> None:
        self.began = time.perf_counter() if self.device.type != "cuda" else self._event()

    def stop(self, into: list[float], index: int) -> None:
        if isinstance(self.began, float):
            into[index] += time.perf_counter() - self.began
        else:
            self.pending.append((self.began, self._event(), into, index))

    def settle(self) -> None:
        """Wait for the device, and add the times of its events."""
        finish(self.device)
        for start, end, into, index in self.pending:
            into[index] += start.elapsed_time(end) / 1e3
        self.pending.clear()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _layer_seconds(
    layers: Sequence[Layer],
    steps: Sequence[tuple[Sequence[Sequence[float]], float]],
    per_window: int,
    micro_batches: int,
) -> list[LayerSeconds]:
    """The median over windows of steps is the step time. Every part gets its share of all steps together, because a
    single part is short compared with the period of a CPU quota."""
    totals = [sum(map(sum, times)) + update for times, update in steps]
    windows = [totals[start : start + per_window] for start in range(0, len(totals) - per_window + 1, per_window)]
    found = summary([sum(window) / len(window) for window in windows or [totals]])
    scale = found.seconds / sum(totals)
    counts = (micro_batches, 1, max(1, micro_batches - 1))
    sizes = _sizes(layers)
    update = sum(update for _, update in steps) * scale / (sum(sizes) or 1)
    result = []
    for index, size in enumerate(sizes):
        parts = [sum(times[index][part] for times, _ in steps) * scale / counts[part] for part in range(3)]
        forward, first_backward, backward = parts
        if micro_batches == 1:
            backward = first_backward
        result.append(
            LayerSeconds(
                forward=forward,
                first_backward=first_backward,
                backward=backward,
                update=update * size,
                spread=found.spread,
            )
        )
    return result


def _sizes(layers: Sequence[Layer]) -> list[int]:
    """Elements that each layer trains; what layers share counts for the first."""
    seen: set[int] = set()
    sizes = []
    for layer in layers:
        own = [parameter for parameter in layer.parameters if id(parameter) not in seen]
        seen |= {id(parameter) for parameter in own}
        sizes.append(sum(parameter.numel() for parameter in own))
    return sizes
