"""Checkpoints: saved under one plan and loaded under another, bitwise, with the curve of a run that never stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.distributed.parity import Worlds, cluster_of
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.small_models import Decoder, tokens
from whale.runtime.launch import World
from whale.runtime.outputs import put
from whale.runtime.stage import part

BOUND = 1e-12
"""The largest relative error of losses after a load into another plan, where sums have another order."""

SPLIT: dict[str, Any] = {"": whale.split()}
STAGES: dict[str, Any] = {"layers.0": whale.stage(), "layers.1": whale.stage()}

PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, {}),
    "dp2": (2, {}, {}),
    "dp 3:1": (2, {}, {"cluster": cluster_of((3.0, 1.0))}),
    "tp2": (2, SPLIT, {}),
    "tp 3:1": (2, SPLIT, {"cluster": cluster_of((3.0, 1.0))}),
    "pp2": (2, STAGES, {"micro_batches": 2}),
    "zero1": (2, {}, {"zero": 1}),
    "zero3 3:1": (2, {}, {"zero": 3, "state_shares": [3, 1]}),
    "zero1 on the host": (2, {}, {"zero": 1, "offload": "state"}),
    "tp2 x pp2": (4, {name: [stage, whale.split()] for name, stage in STAGES.items()}, {"micro_batches": 2}),
}
"""Number of ranks, annotations and options."""

State = Mapping[str, Mapping[str, Any]]


class Tied(Decoder):
    """A decoder whose head has the embedding's matrix, and a sum over batches in a buffer."""

    def __init__(self) -> None:
        super().__init__(width=16, heads=4, layers=2)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()))


class Run:
    """A training run: a model, an optimizer with two groups, a schedule of its rate, and a loader."""

    def __init__(self, plan: str) -> None:
        _, layout, options = PLANS[plan]
        torch.manual_seed(0)
        model: nn.Module = Tied().double()
        if layout:
            whale.annotate(model, layout)
        self.model = whale.parallelize(model, tokens(), device="cpu", timeout_seconds=60, **options)
        wide = [p for name, p in self.model.named_parameters() if name.endswith("weight")]
        narrow = [p for name, p in self.model.named_parameters() if name.endswith("bias")]
        groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0, "lr": 1e-2}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3], gamma=0.5)
        data = [{name: rows[0] for name, rows in tokens(rows=1 + i).items()} for i in range(32)]
        self.batches: Iterator[Any] | None = None
        self.loader = whale.shard_dataset(data, self.model, batch_size=8, shuffle=True, seed=3)

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

    def parts(self) -> dict[str, Any]:
        """This rank's tensors and states, with which part of the whole they are."""
        engine, rank = self.model._whale.engine, self.model.rank
        found = {}
        for name, tensor in engine.tensors.items():
            shard = engine.shard(name)
            if rank in shard.parts:
                state = self.optimizer.state.get(tensor, {})
                found[name] = (shard.shape, shard.parts[rank], {"value": tensor.detach(), **state})
        return found


def whole(parts: list[dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
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


def saved(world: World | None, plan: str, folder: Path) -> tuple[list[float], list[float], dict[str, Any]]:
    run = Run(plan)
    before = run.train(2)
    whale.save_checkpoint(folder / plan, run.model, step=2, **run.state)
    parts = {n: (s, at, {k: v.clone() for k, v in states.items()}) for n, (s, at, states) in run.parts().items()}
    after = run.train(2)  # while it is written
    whale.wait_for_checkpoints()
    return before, after, parts


def loaded(world: World | None, plan: str, folder: Path, references: State) -> dict[str, tuple[list[str], list[float]]]:
    """For each checkpoint the tensors that are other than when they were saved, and the losses of further steps."""
    run = Run(plan)
    found = {}
    for other, reference in references.items():
        done = whale.load_checkpoint(folder / other, run.model, **run.state)
        assert done is not None
        run.batches = None
        assert (done.step, done.damaged) == (2, ())
        unlike = []
        for name, (_, at, states) in run.parts().items():
            if states.keys() != reference[name].keys():
                unlike.append(f"{name} has {sorted(states)}")
            for key, tensor in states.items():
                expected = reference[name][key]
                expected = part(expected, at) if expected.dim() else expected
                if not torch.equal(tensor, expected) or tensor.dtype != expected.dtype:
                    unlike.append(f"{name} {key}")
        found[other] = unlike, run.train(2)
    return found


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def on_ranks(worlds: Worlds, plan: str, function: Any, *arguments: Any) -> list[Any]:
    size = PLANS[plan][0]
    return [function(None, plan, *arguments)] if size == 1 else worlds.run(size, function, plan, *arguments)


class Saved:
    """Checkpoints of all plans: the curve until then, the curve after it, and all tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before: dict[str, list[float]] = {}
        self.after: dict[str, list[float]] = {}
        self.states: dict[str, dict[str, dict[str, Tensor]]] = {}


@pytest.fixture(scope="module")
def runs(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    made = Saved(tmp_path_factory.mktemp("runs"))
    for plan in PLANS:
        results = on_ranks(worlds, plan, saved, made.folder)
        made.before[plan], made.after[plan], _ = results[0]
        made.states[plan] = whole([parts for _, _, parts in results])
    return made


def test_all_plans_train_alike(runs: Saved) -> None:
    for plan in PLANS:
        assert runs.before[plan] + runs.after[plan] == pytest.approx(
            runs.before["one process"] + runs.after["one process"], rel=BOUND
        )


@pytest.mark.parametrize("plan", PLANS)
def test_a_checkpoint_of_any_plan_goes_on_under_this_one(worlds: Worlds, runs: Saved, plan: str) -> None:
    for rank, found in enumerate(on_ranks(worlds, plan, loaded, runs.folder, runs.states)):
        for other, (unlike, losses) in found.items():
            assert not unlike, f"from {other}, on rank {rank}"
            bound = 0.0 if other == plan else BOUND
            assert losses == pytest.approx(runs.after[other], rel=bound, abs=0), f"from {other}"
