"""Functions of torch.nn on two ranks: exact with divided rows, split matrices and in stages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import Two
from tests.torch_functions import COUPLED, ROWS_OF, error
from whale.runtime.launch import World

LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "replicas": ({"": whale.replicate()}, 1),
    "split, micro-batches": ({"": whale.split()}, 2),
    "stages, micro-batches": ({"first": whale.stage(), "ending": whale.stage()}, 2),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    with worlds_of_a_module() as made:
        yield Two(made)


def all_errors(world: World, layout: str) -> dict[str, float]:
    annotations, micro_batches = LAYOUTS[layout]
    return {name: error(name, annotations, micro_batches=micro_batches) for name in ROWS_OF}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_functions_of_torch_are_exact_on_two_ranks(ranks: Two, layout: str) -> None:
    for found in ranks.run(all_errors, layout):
        assert {name: worst for name, worst in found.items() if worst > 1e-12} == {}


def coupled_errors(world: World, layout: str) -> dict[str, float]:
    return {name: error(name, LAYOUTS[layout][0]) for name in COUPLED}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_of_all_rows_are_exact_on_two_ranks(ranks: Two, layout: str) -> None:
    for found in ranks.run(coupled_errors, layout):
        assert {name: worst for name, worst in found.items() if worst > 1e-12} == {}


class Spectral(nn.Module):
    """Two parts whose weights are normalised by what their forwards write to buffers; each is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.utils.parametrizations.spectral_norm
        self.first = nn.Sequential(norm(nn.Linear(4, 6)), nn.ReLU())
        self.second = nn.Sequential(norm(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x)) - self.second(self.first(2 * x))).square().mean()


def spectral(world: World, micro_batches: int) -> float:
    local, x = Spectral().double(), torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)
    model = copy.deepcopy(local)
    whale.annotate(model, {"first": whale.stage(), "second": whale.stage()})
    parallel = whale.parallelize(model, x, device="cpu", timeout_seconds=20, micro_batches=micro_batches)
    worst = abs(parallel.eval_step(x).item() - local.eval()(x).item())
    local.train()
    for _ in range(2):
        worst = max(worst, abs(parallel.train_step(x).item() - local(x).item()))
    whole = parallel.full_state_dict()
    return max(worst, *(float((whole[name] - value).abs().max()) for name, value in local.state_dict().items()))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_parametrization_updates_its_buffers_in_its_stage(ranks: Two, micro_batches: int) -> None:
    assert max(ranks.run(spectral, micro_batches)) < 1e-12
