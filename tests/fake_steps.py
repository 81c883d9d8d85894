"""Runs steps on CUDA devices that do not exist, without data, and prints as JSON what would have waited for the device,
what ranks must agree on, and what a rank that is out of memory says.

    LD_PRELOAD=GUARD python -m tests.fake_steps MODEL...     # GUARD: of `tests.fake_cuda.build_guard`

The step is that of a real rank: its engine, executor, graphs, messages and sums, on fake tensors and with torch's fake
process groups. Operators that would make the host wait for the device are noted.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import whale
from tests.collecting import collect_seldom
from tests.fake_cuda import compiled, small, traced_on
from whale.annotations import annotate, module_scopes
from whale.compile.assembly import assemble
from whale.compile.communicators import Communicator, communicators, message_ranks
from whale.compile.compile import compile_traced
from whale.compile.options import Options
from whale.compile.rank_step import rank_step
from whale.compile.row_shares import row_shares
from whale.compile.trace import Traced, trace
from whale.graph.capture import batch_leaves
from whale.ir.cluster import Cluster
from whale.ir.state import StateSharding
from whale.predict.device_memory import memory_advice
from whale.runtime import at_host, messages, random, uploads
from whale.runtime.attributes import Changes
from whale.runtime.engine import Engine, signature
from whale.runtime.failure import Failures
from whale.runtime.launch import World
from whale.runtime.owned import HeldUnit
from whale.runtime.random import RNGPosition
from whale.runtime.recording import is_recording

SIZE = 4
DEVICE = torch.device("cuda", 1)

LAYOUTS: dict[str, Any] = {
    "replicate": ({"": whale.replicate()}, {}),
    "split": ({"": whale.split()}, {}),
    "stages": (None, {"micro_batches": 2}),
}

PLANS: dict[str, Any] = {
    "zero 1": ("replicate", {"state": StateSharding(1)}),
    "zero 3": ("replicate", {"state": StateSharding(3), "recompute": "full", "precision": "bf16"}),
    "zero 1 in stages": ("stages", {"state": StateSharding(1), "schedule": "zero_bubble", "micro_batches": 4}),
    "adasum": ("replicate", {"reduce": "adasum"}),
    "adasum in stages": ("stages", {"reduce": "adasum"}),
    "adasum and zero 1": ("replicate", {"reduce": "adasum", "state": StateSharding(1)}),
    "servers": ("replicate", {"reduce": "server", "staleness": 1}),
    "sums in another dtype": ("replicate", {"gradient_dtype": "bf16"}),
}
"""Other options, with each of the layouts' annotations, of one model: :data:`MODEL`."""

MODEL = "examples/models/gpt.py:gpt"

LOW = ("examples/models/gpt.py:gpt", "examples/models/t5.py:t5", "hf:llama", "hf:vit")
"""Models that are compiled under autocast, which casts other operators on a GPU than on a processor."""

SAVING: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective", "micro_batches": 2},
    "offloaded": {"offload": "activations"},
    "zero 3": {"state": StateSharding(3), "recompute": "full"},
}
"""Options that save memory, with one of the models."""

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.unique_dim.default,
    aten._unique2.default,
}


class Waits(TorchDispatchMode):
    """Notes operators for which the host would wait for the device: those that read values, and copies between both."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        devices = {x.device.type for x in given}
        if "cuda" in devices and func in WAITS:
            self.note(func)
        if func is aten._to_copy.default and "device" in kwargs:
            target = torch.device(kwargs["device"]).type
            if target != given[0].device.type:
                self.copied += given[0].numel()
                if target == "cpu" or not kwargs.get("non_blocking"):
                    self.note(func)
        if func is aten.copy_.default and len(devices) > 1 and not (len(args) > 2 and args[2]):
            self.note(func)
        return func(*args, **kwargs)

    def note(self, func: Any) -> None:
        where = [frame for frame in traceback.extract_stack() if "/whale/" in frame.filename or "fx" in frame.name]
        place = where[-1] if where else None
        self.found.append(f"{func}{f' at {place.filename}:{place.lineno}' if place else ''}")


class Generator:
    """A generator of a device that does not exist; counts how often any is seeded."""

    seeded = 0

    def get_state(self) -> None:
        """Nothing."""

    def set_state(self, state: None) -> None:
        """Nothing."""

    def manual_seed(self, seed: int) -> None:
        """Count."""
        Generator.seeded += 1


class NoQueue(nullcontext[None]):
    """Streams of a device that does not exist."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()

    def beside(self) -> NoQueue:
        return self

    def mark(self) -> None:
        """Nothing."""

    def follow(self, mark: None) -> None:
        """Nothing."""


def layout_of(model: nn.Module, name: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Annotations and options; None where the model has no list of layers that can be staged."""
    layout, more = PLANS.get(name, (name, {}))
    annotations, options = LAYOUTS[layout]
    options = options | more
    if annotations is not None:
        return annotations, options
    lists = [path for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if len(lists) != 1:
        return None
    (path,) = lists
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        options = {}  # micro-batches would change what it computes
    return {f"{path}.0": [whale.stage(2), whale.replicate(2)], f"{path}.1": [whale.stage(2), whale.split(2)]}, options


def step(spec: str, name: str) -> dict[str, Any] | None:
    """Waits of a training step of rank 1 of four, the groups that it has and does not use, how often it seeds a
    generator, and how many elements of the batch it copies."""
    loaded = small(spec)
    found = layout_of(loaded.model, name)
    if found is None:
        return None
    annotations, options = found
    annotate(loaded.model, annotations)
    traced = traced_on(DEVICE, spec, options.get("precision"))
    return steps_of(loaded.model, loaded.batch, traced, options)


def steps_of(model: nn.Module, given: Any, traced: Traced, options: dict[str, Any]) -> dict[str, Any]:
    """The same of a model with annotations."""
    traced = replace(traced, annotated=traced.stages(module_scopes(model)))
    compilation = compile_traced(traced, Cluster.homogeneous(SIZE), Options(**options), device=DEVICE)
    leaves = batch_leaves(given)
    watched: list[str] = []
    supervisor: Any = SimpleNamespace(check=lambda: None, watch=lambda what, done, seconds: watched.append(what))
    rank, clock = DEVICE.index, RNGPosition(0)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        tensors: dict[str, Tensor] = {}
        for path, own in compilation.local_parameters(rank).items():
            place = "cpu" if path in compilation.tables_on_host else DEVICE
            blank = torch.empty(own.shape, dtype=own.dtype, device=place)
            tensors[path] = nn.Parameter(blank, requires_grad=own.trainable)
        for path, buffer in model.named_buffers():
            tensors[path] = torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE)
        data = rank_step(compilation, rank, compilation.program(rank), clock, device=DEVICE)
        held: dict[tuple[str, Any], Any]
        held = {("parameter" if isinstance(t, nn.Parameter) else "buffer", n): t for n, t in tensors.items()}
        held |= {("constant", n): fake.from_tensor(t).to(DEVICE) for n, t in data.constants.items()}
        made = {one: dist.new_group(list(one.ranks)) for one in communicators(compilation, for_messages=True)}
        used: set[Communicator] = set()

        def group(purpose: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
            if len(ranks) < 2:
                return None
            used.add(Communicator(purpose, ranks))
            return made[Communicator(purpose, ranks)]

        for unit in (unit for unit in compilation.units if rank in unit.spec.ranks):
            gathers, sums = (group(p, unit.spec.ranks) for p in ("gathers of parameters", "sums of gradients"))
            stretch = HeldUnit(unit, rank, {}, DEVICE, gathers, sums, Failures(rank))
            held["unit", unit.spec.index] = stretch
            held |= {("gradient", name): slot for name, slot in stretch.slots.items()}
        specs = compilation.rank_specs
        assembled = assemble(
            data,
            rank,
            tensors=held,
            clock=clock,
            bridge_group=partial(group, "inside stages"),
            reduce_group=partial(group, "sums of gradients"),
            failures=Failures(rank),
            device=DEVICE,
            message_group=lambda edge, direction: group(direction, message_ranks(specs, edge)),
        )
        engine = Engine(
            world=World(rank=rank, size=SIZE, device=DEVICE, failures=Failures(rank), supervisor=supervisor),
            source=None,  # type: ignore[arg-type]
            shards=compilation.shards(),
            buffers={},
            aliases={},
            tensors=tensors,
            clock=clock,
            shares=row_shares(compilation),
            refusals=SimpleNamespace(joined=0),  # type: ignore[arg-type]
        )
        engine.install(leaves, (True,), assembled)
        engine.compared[signature(leaves)] = 1  # the first step looks at all batches
        batch = {n: torch.zeros(v.shape, dtype=v.dtype) if isinstance(v, Tensor) else v for n, v in leaves.items()}
        waits, seeded = Waits(), Generator.seeded
        for number in range(2):  # constants are made in the first
            with waits if number else nullcontext():
                engine.run(batch, (True,), True, Changes())
        places = {path: [str(x.device), str(x.grad.device)] for path, x in tensors.items() if x.grad is not None}
        tables = [x for path, x in tensors.items() if path in compilation.tables_on_host]
        if tables:
            optimizer = torch.optim.SGD(tables, lr=0.1)
            optimizer.step()
    return {
        "places": places,
        "seeded": Generator.seeded - seeded,
        "unused": sorted(map(str, {one for one in made if rank in one.ranks} - used)),
        "watched": watched,
        "waits": sorted(set(waits.found)),
        "copied": waits.copied,
        "whole": sum(v.numel() for v in leaves.values() if isinstance(v, Tensor)),
    }


class Tables(nn.Module):
    """Tables and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 8, mode="sum", sparse=True) for rows in (50, 20))
        self.dense = nn.Linear(16, 1)

    def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
        vectors = [table(ids[:, number] % 20) for number, table in enumerate(self.tables)]
        return nn.functional.mse_loss(self.dense(torch.cat(vectors, 1)).squeeze(1), clicked)


def hosted() -> dict[str, Any]:
    """A step of a rank that has tables on its host: where these, their gradients, and what goes there and back are."""
    model = Tables()
    everyone = list(range(SIZE))
    own = [whale.cluster([DEVICE.index]), whale.stage(offload="tables")]
    annotate(model, {"tables": own, "dense": [whale.cluster(everyone), whale.stage(), whale.replicate()]})
    given = {"ids": torch.zeros(8, 2, 3, dtype=torch.int64), "clicked": torch.zeros(8)}
    traced = trace(model, given, device=DEVICE, training=True)
    went: list[list[str]] = []
    down, up = at_host.download, at_host.upload

    def downloaded(tensors: Any) -> Any:
        found = down(tensors)
        went.extend([str(x.device), str(y.device)] for x, y in zip(tensors, found, strict=True) if not is_recording())
        return found

    def uploaded(x: Tensor, device: torch.device) -> Tensor:
        found = up(x, device)
        if not is_recording():
            went.append([str(x.device), str(found.device)])
        return found

    at_host.download, at_host.upload = downloaded, uploaded
    return {**steps_of(model, given, traced, {}), "went": went}


def halves(spec: str) -> list[int]:
    """How many micro-batches a model under autocast is cut into."""
    traced = traced_on(DEVICE, spec, "bf16")
    compilation = compile_traced(
        traced, Cluster.homogeneous(1), Options(micro_batches=2, precision="bf16"), device=DEVICE
    )
    return list(compilation.rows)


def advice(name: str) -> str:
    """The advice of a rank that is out of memory."""
    cluster, traced = Cluster.homogeneous(SIZE), traced_on(DEVICE, MODEL)
    annotated = Options(default=whale.replicate().strategy, **SAVING[name])
    compilation = compile_traced(traced, cluster, annotated, device=DEVICE)
    return memory_advice(compilation, cluster, DEVICE.index, "1f1b", "cuda")


def _each(names: Iterable[str], make: Callable[[str], Any]) -> dict[str, Any]:
    """Results by name. Traces stay, so nothing looks again through those of earlier ones for garbage."""
    found = {}
    for name in names:
        found[name] = make(name)
        gc.freeze()
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    collect_seldom()
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    specs = sys.argv[1:]
    dist.init_process_group("fake", store=FakeStore(), rank=DEVICE.index, world_size=SIZE)
    messages._Streams = NoQueue  # type: ignore[misc, assignment]
    random._generator_of = lambda device: Generator()  # type: ignore[assignment, return-value]
    uploads._blank = lambda x: torch.empty(x.shape, dtype=x.dtype)
    torch.cuda.Event = lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None)  # type: ignore[misc, assignment]
    said = {
        "ranks": _each(specs, lambda spec: [compiled(spec, rank) for rank in (0, 1)]),
        "models": _each(specs, lambda spec: {name: step(spec, name) for name in LAYOUTS}),
        "plans": _each(PLANS, partial(step, MODEL)),
        "halves": _each(LOW, halves),
        "hosted": hosted(),
        "advice": _each(SAVING, advice),
    }
    print(json.dumps(said), flush=True)
    os._exit(0)  # threads of autograd for devices that do not exist would not end


if __name__ == "__main__":
    main()
