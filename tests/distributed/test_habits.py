"""Habits of scripts for one GPU, on two ranks: what they do is exact, or refused with what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import whale
from tests.distributed.harness import Ranks
from tests.small_models import decoder, tokens
from whale.runtime.launch import World

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {"": whale.replicate()},
    "split": {"": whale.split()},
    "stages": {"layers.0": whale.stage(), "layers.1": whale.stage()},
}
SHARDED = ["split", "stages"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as made:
        yield made


def annotated(kind: str, model: nn.Module | None = None) -> nn.Module:
    model = decoder(layers=2) if model is None else model
    whale.annotate(model, LAYOUTS[kind])
    return model


def parallel(kind: str, **options: Any) -> Any:
    return whale.parallelize(annotated(kind), tokens(), device="cpu", timeout_seconds=20, **options)


def refusal(what: Callable[[], Any]) -> str:
    try:
        what()
    except whale.WhaleError as error:
        return str(error)
    return ""


# --- values at the start ----------------------------------------------------------------------------------------------


def start_with_another_element(world: World) -> str:
    model = annotated("replicate")
    if world.rank:
        with torch.no_grad():
            model.get_parameter("layers.1.up.weight")[3, 5] += 0.01
    return refusal(lambda: whale.parallelize(model, tokens(), device="cpu"))


def test_parameters_that_differ_in_one_element_are_refused(ranks: Ranks) -> None:
    for message in ranks.run(start_with_another_element):
        assert "rank 1 has other values in layers.1.up.weight than rank 0" in message
        assert "sync_module_states=True" in message


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.body(x)).square().sum()
        return found


def start_with_other_statistics(world: World) -> str:
    torch.manual_seed(0)
    model = Normed()
    model.get_buffer("norm.num_batches_tracked").fill_(10**9 + world.rank)
    return refusal(lambda: whale.parallelize(model, torch.zeros(4, 4), device="cpu"))


def test_buffers_that_differ_are_refused(ranks: Ranks) -> None:
    for message in ranks.run(start_with_other_statistics):
        assert "rank 1 has other values in norm.num_batches_tracked" in message


def start_from_rank_0(world: World) -> list[torch.Tensor]:
    torch.manual_seed(world.rank)
    model = annotated("split", nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    made = whale.parallelize(
        model,
        torch.zeros(4, 4),
        loss_fn=lambda output, batch: output.square().sum(),
        device="cpu",
        sync_module_states=True,
    )
    return [*made.full_state_dict().values()]


def test_all_ranks_take_the_values_of_rank_0_on_request(ranks: Ranks) -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).state_dict().values()
    for found in ranks.run(start_from_rank_0):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- batches ----------------------------------------------------------------------------------------------------------


def bring_other_rows(world: World, kind: str) -> tuple[str, str]:
    model = parallel(kind)
    batch = {name: x.roll(world.rank, 0) for name, x in tokens().items()}
    return refusal(lambda: model.train_step(**batch)), refusal(lambda: model.eval_step(**batch))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_batches_of_other_values_are_refused(ranks: Ranks, kind: str) -> None:
    for messages in ranks.run(bring_other_rows, kind):
        for message in messages:
            assert "with other values" in message
            assert "without a DistributedSampler, and shuffled by one seed" in message


def bring_rounded_values(world: World) -> float:
    torch.manual_seed(0)
    model = annotated("replicate", nn.Sequential(nn.Linear(4, 8)))
    made = whale.parallelize(
        model, torch.zeros(4, 4), loss_fn=lambda output, batch: output.square().sum(), device="cpu"
    )
    return float(made.train_step(torch.ones(4, 4) * (1 + world.rank * 1e-7)))


def test_values_that_another_processor_rounds_differently_are_taken(ranks: Ranks) -> None:
    assert len(ranks.run(bring_rounded_values)) == 2
