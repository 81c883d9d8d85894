"""Checkpoints of one plan under another: training runs under many plans, and what differs after a load.

`tests.distributed.test_checkpoint` takes a few of the plans, ``benchmarks/resharding.py`` all pairs of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import whale
from tests.distributed.parity import Worlds, cluster_of
from tests.small_models import Decoder, tokens
from whale.cli.model_loader import load_model
from whale.runtime.launch import World
from whale.runtime.outputs import put
from whale.runtime.stage import part

BOUND = 1e-12
"""The largest relative error of losses after a load into another plan, where sums have another order."""

OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
}


@dataclass(frozen=True)
class Setting:
    """A plan: number of ranks, annotations and options."""

    size: int
    layout: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def stages(*first_layers: int, split: bool = False) -> dict[str, Any]:
    """Stages that begin at these of four layers."""
    ends = [*first_layers[1:], 4]
    keys = [f"layers.[{a}-{b - 1}]" if b - a > 1 else f"layers.{a}" for a, b in zip(first_layers, ends, strict=True)]
    return {key: [whale.stage(), whale.split()] if split else whale.stage() for key in keys}


SPLIT: dict[str, Any] = {"": whale.split()}
PIPELINED = {"micro_batches": 2}
UNEVEN = {"cluster": cluster_of((3.0, 1.0))}

DECODER: Mapping[str, Setting] = {
    "one process": Setting(1),
    "dp2": Setting(2),
    "dp4": Setting(4),
    "tp2": Setting(2, SPLIT),
    "pp2": Setting(2, stages(0, 2), PIPELINED),
    "pp4": Setting(4, stages(0, 1, 2, 3), PIPELINED),
    "dp2 x tp2": Setting(4, {"": [whale.replicate(2), whale.split(2)]}),
    "dp2 x pp2": Setting(4, {key: [stage, whale.replicate()] for key, stage in stages(0, 2).items()}, PIPELINED),
    "tp2 x pp2": Setting(4, stages(0, 2, split=True), PIPELINED),
    "uneven pp": Setting(2, stages(0, 3), PIPELINED),
    "dp 3:1": Setting(2, {}, UNEVEN),
    "tp 3:1": Setting(2, SPLIT, UNEVEN),
    "interleaved": Setting(2, stages(0, 1, 2, 3), PIPELINED | {"schedule": "interleaved"}),
    "zero1": Setting(2, {}, {"zero": 1}),
    "zero3 3:1": Setting(2, {}, {"zero": 3, "state_shares": [3, 1]}),
    "state on the host": Setting(2, {}, {"zero": 1, "offload": "state"}),
}
EXPERTS: Mapping[str, Setting] = {
    "one process": Setting(1),
    "experts 2": Setting(2, {"": whale.replicate(), "layers.*.feed_forward": whale.split()}),
    "experts 4": Setting(4, {"": whale.replicate(), "layers.*.feed_forward": whale.split()}),
    "dp2": Setting(2),
    "zero2": Setting(2, {}, {"zero": 2}),
}
"""Plans of a mixture of experts."""

FIRST_TEN = tuple(DECODER)[:10]

State = Mapping[str, Mapping[str, Any]]


class Tied(Decoder):
    """A decoder whose head has the embedding's matrix, and a buffer."""

    def __init__(self, layers: int) -> None:
        super().__init__(width=16, heads=4, layers=layers)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()))


def built(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and its batch."""
    if family == "decoder":
        return Tied(layers=4).double(), tokens()
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 16, "seq": 6, "vocab": 32, "experts": 4, "batch_size": 8}
    found = load_model("examples/models/moe.py:moe", sizes)
    return found.model.double(), found.batch


FAMILIES: Mapping[str, Mapping[str, Setting]] = {"decoder": DECODER, "experts": EXPERTS}


class Run:
    """A training run: a model, an optimizer with two groups, a schedule of its rate, and a loader."""

    def __init__(self, family: str, plan: str, optimizer: str, seed: int, values: int) -> None:
        setting = FAMILIES[family][plan]
        torch.manual_seed(values)
        model, batch = built(family)
        if setting.layout:
            whale.annotate(model, setting.layout)
        self.model = whale.parallelize(model, batch, device="cpu", timeout_seconds=60, **setting.options)
        wide = [p for name, p in self.model.named_parameters() if name.endswith("weight")]
        narrow = [p for name, p in self.model.named_parameters() if not name.endswith("weight")]
        groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0, "lr": 1e-2}]
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3], gamma=0.5)
        count = len(next(iter(batch.values())))
        data = [{name: rows[i % count].roll(i) for name, rows in batch.items()} for i in range(32)]
        self.batches: Iterator[Any] | None = None
        self.loader = whale.shard_dataset(data, self.model, batch_size=8, shuffle=True, seed=seed)

    @property
    def state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader}

    def train(self, steps: int) -> list[float]:
        self.batches = self.batches or iter(self.loader)
        losses = []
        for batch in islice(self.batches, steps):
            losses.append(self.model.train_step(**batch).item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return losses

    def position(self) -> list[Any]:
        """The positions of random operators, the data and the schedule."""
        return [self.model.get_rng_state()[:2].tolist(), self.loader.state_dict(), self.scheduler.state_dict()]

    def parts(self) -> dict[str, Any]:
        """This rank's tensors and states, with which part of the whole they are."""
        engine, rank = self.model._whale.engine, self.model.rank
        found = {}
        for name, tensor in engine.tensors.items():
            shard = engine.shard(name)
            if rank in shard.parts:
                state = {key: x for key, x in self.optimizer.state.get(tensor, {}).items() if isinstance(x, Tensor)}
                found[name] = (shard.shape, shard.parts[rank], {"value": tensor.detach(), **state})
        return found


def whole(parts: Sequence[dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """The tensors and states of all ranks."""
    found: dict[str, dict[str, Tensor]] = {}
    for own in parts:
        for name, (shape, at, states) in own.items():
            for key, tensor in states.items():
                if tensor.dim() == 0:
                    found.setdefault(name, {})[key] = tensor
                    continue
                made = found.setdefault(name, {}).setdefault(key, torch.full(shape, torch.nan, dtype=tensor.dtype))
                put(made, tensor, at)
    return found


@dataclass(frozen=True)
class Saved:
    """The results of a rank that has saved: the losses before, those after, its tensors, and where it was."""

    before: list[float]
    after: list[float]
    parts: dict[str, Any]
    position: list[Any]


def saved(world: World | None, family: str, plan: str, optimizer: str, seed: int, folder: Path) -> Saved:
    """Train two steps, save, and train on while files are written."""
    run = Run(family, plan, optimizer, seed, seed)
    before = run.train(2)
    whale.save_checkpoint(folder / plan, run.model, step=2, **run.state)
    position = run.position()
    parts = {n: (s, at, {k: v.clone() for k, v in states.items()}) for n, (s, at, states) in run.parts().items()}
    after = run.train(2)
    whale.wait_for_checkpoints()
    return Saved(before, after, parts, position)


def loaded(
    world: World | None,
    family: str,
    plan: str,
    optimizer: str,
    seed: int,
    folder: Path,
    references: State,
    positions: Mapping[str, list[Any]],
) -> dict[str, tuple[list[str], list[float]]]:
    """For each checkpoint the tensors that are other than when they were saved, and the losses of further steps."""
    run = Run(family, plan, optimizer, seed, seed + 1)
    found = {}
    for other, reference in references.items():
        done = whale.load_checkpoint(folder / other, run.model, **run.state)
        assert done is not None
        run.batches = None
        assert (done.step, done.damaged) == (2, ())
        unlike = [] if run.position() == positions[other] else [f"position {run.position()} of {positions[other]}"]
        for name, (_, at, states) in run.parts().items():
            if states.keys() != reference[name].keys():
                unlike.append(f"{name} has {sorted(states)}")
                continue
            for key, tensor in states.items():
                expected = reference[name][key]
                expected = part(expected, at) if expected.dim() else expected
                if not torch.equal(tensor, expected) or tensor.dtype != expected.dtype:
                    unlike.append(f"{name} {key}")
        found[other] = unlike, run.train(2)
    return found


def on_ranks(worlds: Worlds, function: Callable[..., Any], family: str, plan: str, *arguments: Any) -> list[Any]:
    """The results of *function* on each rank of a plan."""
    size = FAMILIES[family][plan].size
    if size == 1:
        return [function(None, family, plan, *arguments)]
    return worlds.run(size, function, family, plan, *arguments, timeout=400)


class Runs:
    """Checkpoints of plans: the curve until then, the curve after it, all tensors, and where each was."""

    def __init__(
        self, worlds: Worlds, family: str, plans: Sequence[str], optimizer: str, seed: int, folder: Path
    ) -> None:
        self.worlds, self.family, self.optimizer, self.seed, self.folder = worlds, family, optimizer, seed, folder
        self.curves: dict[str, list[float]] = {}
        self.after: dict[str, list[float]] = {}
        self.states: dict[str, dict[str, dict[str, Tensor]]] = {}
        self.positions: dict[str, list[Any]] = {}
        for plan in sorted(plans, key=lambda plan: FAMILIES[family][plan].size):
            results = on_ranks(worlds, saved, family, plan, optimizer, seed, folder)
            self.curves[plan], self.after[plan] = results[0].before + results[0].after, results[0].after
            self.states[plan] = whole([one.parts for one in results])
            self.positions[plan] = results[0].position

    def faults(self, plan: str) -> dict[str, list[str]]:
        """For each checkpoint what is wrong after it is loaded under a plan."""
        wrong: dict[str, list[str]] = {other: [] for other in self.states}
        more = (self.optimizer, self.seed, self.folder, self.states, self.positions)
        for rank, found in enumerate(on_ranks(self.worlds, loaded, self.family, plan, *more)):
            for other, (unlike, losses) in found.items():
                wrong[other] += [f"rank {rank}: {text}" for text in unlike]
                bound = 0.0 if other == plan else BOUND
                if any(abs(x - y) > bound * abs(y) for x, y in zip(losses, self.after[other], strict=True)):
                    wrong[other].append(f"rank {rank}: losses {losses}, expected {self.after[other]}")
        return wrong
