"""Tensors that a forward makes in its first call and keeps, on two ranks: each step is the local one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import whale
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import Two
from tests.largest import largest
from tests.made_once import ROWS, Grown, Rotary, batch_of
from whale.runtime.launch import World

BOUND = 1e-12
LENGTHS = (4, 8, 4)

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replicate": ({"": whale.replicate()}, {}),
    "micro-batches": ({"": whale.replicate()}, {"micro_batches": 2}),
    "split": ({"": whale.replicate(), "head": whale.split(), "inner": whale.split()}, {}),
    "stages": ({"embedding": whale.stage(), "inner": whale.stage()}, {"micro_batches": 2}),
    "zero 3": ({"": whale.replicate()}, {"zero": 3}),
    "local batches": ({"": whale.replicate()}, {"batch": "local"}),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    with worlds_of_a_module() as made:
        yield Two(made)


def errors_of(world: World, layout: str) -> float:
    """The largest error of the losses of two models, in float64, with batches of some lengths."""
    layers, options = LAYOUTS[layout]

    def brought(length: int, seed: int) -> dict[str, torch.Tensor]:
        own = slice(None) if layout != "local batches" else slice(world.rank * ROWS // 2, (world.rank + 1) * ROWS // 2)
        return {name: x[own] for name, x in batch_of(length, seed).items()}

    worst = 0.0
    for kind in (Grown, Rotary):
        torch.manual_seed(0)
        local = kind().double()
        torch.manual_seed(0)
        model = kind().double()
        whale.annotate(model, layers)
        parallel: Any = whale.parallelize(model, brought(4, 99), device="cpu", timeout_seconds=20, **options)
        optimizers = [torch.optim.SGD(model.parameters(), 0.5) for model in (local, parallel)]
        for seed, length in enumerate(LENGTHS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected = local(**batch_of(length, seed))
            expected.backward()
            worst = largest(worst, float((parallel.train_step(**brought(length, seed)) - expected).abs()))
            for optimizer in optimizers:
                optimizer.step()
    return worst


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_of_any_length_are_the_local_ones(ranks: Two, layout: str) -> None:
    assert max(ranks.run(errors_of, layout)) < BOUND
