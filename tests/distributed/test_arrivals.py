"""Stages that compute their own part while values are on their way equal the local model, and wait late."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import whale
from tests.distributed.harness import Ranks
from tests.distributed.parity import Worlds
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.largest import largest
from tests.replays import CpuRecorder
from whale.runtime import cuda_graphs
from whale.runtime.failure import Failures
from whale.runtime.launch import World
from whale.runtime.messages import Messages

aten = torch.ops.aten


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


class Clicks(nn.Module):
    """Tables, and a dense part that reads the vectors of the first one before it computes anything of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 6, mode="sum", sparse=True) for rows in (50, 9, 17))
        self.bottom = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        self.top = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor, numbers: Tensor, clicked: Tensor) -> Tensor:
        found = [torch.tanh(table(ids[:, number])) for number, table in enumerate(self.tables)]
        x = self.bottom(numbers)
        for vectors in found:
            x = torch.sin(x) * vectors + x
        return F.binary_cross_entropy_with_logits(self.top(x).squeeze(1), clicked)


def batch(rows: int = 12) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "ids": torch.randint(9, (rows, 3, 4), generator=draw),
        "numbers": torch.randn(rows, 4, generator=draw, dtype=torch.float64),
        "clicked": torch.randint(2, (rows,), generator=draw).double(),
    }


def layout(ranks: int) -> dict[str, Any]:
    """The first table on the first rank, the others on the last, the dense part on all."""
    return {
        "tables.0": [whale.cluster([0]), whale.stage()],
        "tables.[1,2]": [whale.cluster([ranks - 1]), whale.stage()],
        "": [whale.cluster(range(ranks)), whale.stage(), whale.replicate()],
    }


def made_of(local: nn.Module, ranks: int, **options: Any) -> Any:
    model = copy.deepcopy(local)
    whale.annotate(model, layout(ranks))
    return whale.parallelize(model, batch(), device="cpu", timeout_seconds=30, **options)


def error(world: World, options: dict[str, Any], recorded: bool = False) -> float:
    """The largest difference of losses, an evaluation and parameters from the local model's after some steps."""
    local = Clicks().double()
    with pytest.MonkeyPatch.context() as patch:
        if recorded:
            patch.setitem(cuda_graphs.RECORDERS, "cpu", CpuRecorder)
        made = made_of(local, world.size, **options)
        both = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (local, made)]
        worst = 0.0
        for step in range(4):
            loss = local(**batch())
            loss.backward()
            worst = largest(worst, abs(made.train_step(**batch()).item() - loss.item()))
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
            if step == 1 and not recorded:
                with torch.no_grad():
                    worst = largest(worst, abs(made.eval_step(**batch()).item() - local(**batch()).item()))
    state = made.full_state_dict()
    return largest(worst, *(float((state[name] - x).abs().max()) for name, x in local.state_dict().items()))


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (2, {}),
    "micro-batches": (2, {"micro_batches": 3}),
    "recompute": (2, {"recompute": "full"}),
    "split backward": (2, {"schedule": "zero_bubble", "micro_batches": 2}),
    "compiled": (2, {"compile": True}),
    "recorded": (2, {"cuda_graphs": True}),
    "three": (3, {"micro_batches": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_the_local_ones(worlds: Worlds, name: str) -> None:
    ranks, options = CASES[name]
    assert max(worlds.run(ranks, error, options, name == "recorded")) < 1e-12


class _Log(TorchDispatchMode):
    """Names of operators as they run."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def late(world: World) -> tuple[int, list[str], float]:
    """Products of rank 1 before it waits for a value, the values in the order in which it waits, and how long the first
    wait takes if its sender is late by 0.3 s."""
    made = made_of(Clicks().double(), world.size)
    made.train_step(**batch())
    seen: list[str] = []
    waited: list[float] = []
    wait, send = Failures.wait, Messages.send

    def noted(self: Failures, work: Any, what: str, *args: Any, **options: Any) -> None:
        begin = time.perf_counter()
        wait(self, work, what, *args, **options)
        if what.startswith("value") and " from " in what:
            seen.append(what)
            waited.append(time.perf_counter() - begin)

    def slow(self: Messages, *args: Any) -> Any:
        time.sleep(0.3 if world.rank == 0 else 0.0)
        return send(self, *args)

    with pytest.MonkeyPatch.context() as patch, _Log(seen):
        patch.setattr(Failures, "wait", noted)
        patch.setattr(Messages, "send", slow)
        made.train_step(**batch())
    places = [place for place, name in enumerate(seen) if name.startswith("value")]
    products = sum(name == "aten.addmm.default" for name in seen[: places[0]])
    return products, [seen[place].split("'")[1] for place in places], waited[0]


def test_a_stage_has_computed_its_own_part_when_it_waits_for_a_late_sender(worlds: Worlds) -> None:
    _, (products, values, seconds) = worlds.run(2, late)
    assert products == 2
    assert len(values) == 1, values  # the other two are its own
    assert seconds > 0.1


def silent(world: World) -> None:
    """Train while rank 0 sends nothing for longer than others wait for values."""
    made = made_of(Clicks().double(), world.size)
    made.train_step(**batch())
    wait = Failures.wait

    def impatient(self: Failures, work: Any, what: str, *args: Any, **options: Any) -> None:
        self.timeout_seconds = 1.0 if what.startswith("value") else 30.0
        wait(self, work, what, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Failures, "wait", impatient)
        if world.rank == 0:
            patch.setattr(Messages, "send", lambda *args: time.sleep(4))
        made.train_step(**batch())


def test_a_value_that_does_not_come_names_its_rank() -> None:
    with Ranks(2) as ranks:
        _, outcome = ranks.outcomes(silent, timeout=60)
    assert re.search(
        r"rank 1 waited for value '.*' of micro-batch 0 from rank 0, in task 2F0 .*, and rank 0 did not come",
        outcome.error,
    ), outcome.traceback
