"""The oracle of the parity tests: one step of a model in parallel, against plain PyTorch in one process.

Every rank runs the step in parallel; the test's process runs the local one, once for all layouts of a model. That is
the user's own model, eagerly, in float64, with its own loss; for models that cast to float32 inside, it is the captured
graph with its casts promoted. Every gradient is compared by name.
"""

from __future__ import annotations

import copy
import logging
import pickle
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import whale
from tests.distributed.harness import Ranks
from tests.distributed.traces import captured_once
from tests.largest import largest
from whale.graph.capture import _Loss, batch_leaves
from whale.graph.captured import Captured
from whale.ir.cluster import Cluster, DeviceType
from whale.runtime.launch import World

Build = Callable[[], tuple[nn.Module, Any]]
Layout = Mapping[str, Any]
Local = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
"""The loss of a step in one process, the gradients by name, and the buffers after it."""

BOUND = 1e-12
UNEVEN_BOUND = 1e-9
MOST_RANKS = 12
"""How many ranks the worlds of a module have together: a rank that waits for the next test holds its traces."""
NOISE_FLOOR = 1e-3
"""Errors are relative to the largest element of a gradient, or to this part of the largest of all gradients: some are
zero in mathematics, as that of a key's bias, and hold only rounding."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How to run a model in parallel. ``speeds``: of the devices, equal without it."""

    layout: Layout = field(default_factory=dict)
    micro_batches: int = 1
    schedule: str = "1f1b"
    speeds: tuple[float, ...] = ()
    promote: bool = False
    training: bool = False
    loss_fn: Callable[..., Any] | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Results of a rank: relative errors, and the parameters on it with their local shapes."""

    loss: float
    gradients: dict[str, float]
    held: dict[str, tuple[int, ...]]
    whole: dict[str, tuple[int, ...]]
    buffers: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[float, str]:
        """The largest error, and of what."""
        errors = {**self.gradients, **self.buffers, "loss": self.loss}
        error = largest(*errors.values())
        return error, next(name for name, each in errors.items() if largest(each) == error)


class Worlds:
    """Ranks of several sizes, started when they are first needed, and again after a test that failed."""

    def __init__(self) -> None:
        self._ranks: dict[int, Ranks] = {}
        self._local: dict[Hashable, bytes] = {}

    def run(self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 100.0) -> list[Any]:
        """``function(world, *arguments)`` of every rank of a world of that size."""
        self._ranks[size] = self._ranks.pop(size) if size in self._ranks else Ranks(size, timeout_seconds=60.0)
        while sum(self._ranks) > MOST_RANKS and len(self._ranks) > 1:
            self._ranks.pop(next(iter(self._ranks))).close()  # not used for longest
        try:
            return self._ranks[size].run(_isolated, function, arguments, timeout=timeout)
        except BaseException:
            self.close()
            raise

    def local(self, build: Build, setup: Setup) -> bytes:
        """The local step of a model, computed once for all layouts, in the test's own process; pickled, because tensors
        would come to ranks as files of shared memory."""
        key = (build, setup.promote, setup.training, setup.loss_fn)
        if key not in self._local:
            with _quiet():
                self._local[key] = pickle.dumps(local_step(*built(build, setup), setup))
        return self._local[key]

    def close(self) -> None:
        """End them."""
        while self._ranks:
            self._ranks.popitem()[1].close()


def _isolated(world: World, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Leave the process as it was: warnings of models are not ours, and groups of finished runs keep sockets."""
    with _quiet():
        result = function(world, *arguments)
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    return result


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, which models give and tests do not read."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def cluster_of(speeds: tuple[float, ...]) -> Cluster | None:
    """One node of devices with these speeds; None where they are equal."""
    if not speeds:
        return None
    types = [
        DeviceType.of(f"card{speed:g}", speed={"float32": speed * 1e12}, memory_bytes=2**34, memory_bandwidth=1e12)
        for speed in speeds
    ]
    return Cluster.of([("node0", type_) for type_ in types])


def parallel(model: nn.Module, batch: Any, setup: Setup) -> Any:
    """The parallel model."""
    if setup.layout:
        whale.annotate(model, setup.layout)
    return whale.parallelize(
        model,
        batch,
        cluster=cluster_of(setup.speeds),
        micro_batches=setup.micro_batches,
        schedule=setup.schedule,
        promote_casts=setup.promote,
        loss_fn=setup.loss_fn,
        seed=setup.seed,
        device="cpu",
    )


def local_step(model: nn.Module, batch: Any, setup: Setup) -> Local:
    """The loss, the gradients by name and the buffers of one step in this process; *model* is left alone."""
    model = copy.deepcopy(model)
    leaves = {k: v.clone() if isinstance(v, Tensor) else v for k, v in batch_leaves(batch).items()}
    if setup.promote:
        loss = run_captured(captured_once(model, batch, promote=True), model, leaves)
    else:
        loss = _Loss(model, list(leaves), setup.loss_fn)(*leaves.values())
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, dict(model.named_buffers())


def run_captured(captured: Captured, model: nn.Module, leaves: Mapping[str, Any]) -> Tensor:
    """The loss of a captured graph with the tensors of a model."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants}
    names = {**captured.parameters, **captured.buffers, **{n: n for n in captured.constants}}
    placeholders = [n.name for n in captured.graph.nodes if n.op == "placeholder"]
    read = [
        leaves[captured.inputs[n]] if n in captured.inputs else tensors[names[n]] if n in names else None
        for n in placeholders
    ]
    loss: Tensor = captured.module(*read)[0]
    return loss


def built(build: Build, setup: Setup) -> tuple[nn.Module, Any]:
    """The model and its batch, the same in every process."""
    torch.manual_seed(0)
    model, batch = build()
    model.train(setup.training)
    return model, batch


def compare(world: World, build: Build, setup: Setup, local: bytes) -> Difference:
    """Run one step of a model in parallel, and compare it with the local one."""
    model, batch = built(build, setup)
    whole = {n: tuple(p.shape) for n, p in model.named_parameters()}
    loss, gradients, buffers = pickle.loads(local)
    module = parallel(model, batch, setup)
    found_loss = module._step(batch_leaves(batch), train=True)
    found = module.full_gradients()
    extra = {n for n, g in found.items() if n not in gradients and g.abs().max() > 0}
    if extra or set(gradients) - set(found):
        raise AssertionError(f"gradients differ in name: more {extra}, less {set(gradients) - set(found)}")
    errors = relative_errors(found, gradients)
    state = module.full_state_dict()
    drift = {
        n: float((state[n].double() - b.double()).abs().max()) for n, b in buffers.items() if n in state and b.numel()
    }
    return Difference(
        loss=float((found_loss - loss).abs() / loss.abs()),
        gradients=errors,
        held={n: tuple(p.shape) for n, p in module.named_parameters()},
        whole=whole,
        buffers=drift,
    )


def relative_errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Errors of tensors by name, relative to the largest element of each (see :data:`NOISE_FLOOR`)."""
    largest = max(float(g.abs().max()) for g in expected.values() if g.numel())
    return {
        name: float((found[name] - g).abs().max()) / max(float(g.abs().max()), NOISE_FLOOR * largest)
        for name, g in expected.items()
        if g.numel()
    }


def check(worlds: Worlds, size: int, build: Build, setup: Setup, bound: float | None = None) -> list[Difference]:
    """Assert parity on every rank; returns what each found."""
    limit = bound or (UNEVEN_BOUND if setup.speeds else BOUND)
    results: list[Difference] = worlds.run(size, compare, build, setup, worlds.local(build, setup))
    for rank, difference in enumerate(results):
        error, name = difference.worst
        assert error <= limit, f"rank {rank}: {name} differs by {error:.1e}, more than {limit:.0e}"
    return results


@contextmanager
def worlds() -> Iterator[Worlds]:
    """Worlds for the tests of a module."""
    made = Worlds()
    try:
        yield made
    finally:
        made.close()
