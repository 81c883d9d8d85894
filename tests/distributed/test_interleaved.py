"""Interleaved stages: twice as many stages as device groups, equal to the local step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import whale
from tests.distributed.harness import Ranks
from tests.small_models import decoder, tokens
from whale.api import parallelize
from whale.runtime.launch import World


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def layout(*inner: Any, layers: int = 4) -> dict[str, Any]:
    stage = whale.stage(2) if inner else whale.stage()
    return {f"layers.{i}": [stage, *inner] if inner else stage for i in range(layers)}


def compare(world: World, inner: tuple[Any, ...], micro_batches: int, layers: int) -> tuple[float, list[int]]:
    """The largest error of loss and gradients, and the layers that this rank holds."""
    local, model = decoder(layers=layers), decoder(layers=layers)
    loss = local(**tokens())
    loss.backward()
    whale.annotate(model, layout(*inner, layers=layers))
    parallel = parallelize(model, tokens(), micro_batches=micro_batches, schedule="interleaved", device="cpu")
    errors = [abs(parallel.train_step(**tokens()).item() - loss.item())]
    found = parallel.full_gradients()
    for name, parameter in local.named_parameters():
        assert parameter.grad is not None
        errors.append(((found[name] - parameter.grad).abs().max() / parameter.grad.abs().max()).item())
    held = sorted({int(name.split(".")[1]) for name, _ in parallel.named_parameters() if name.startswith("layers.")})
    return max(errors), held


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_four_stages_on_two_ranks_are_the_local_step(two: Ranks, micro_batches: int) -> None:
    results = two.run(compare, (), micro_batches, 4, timeout=110)
    assert [held for _, held in results] == [[0, 2], [1, 3]]
    assert all(error < 1e-12 for error, _ in results)


def test_six_stages_on_two_ranks_are_three_rounds(two: Ranks) -> None:
    results = two.run(compare, (), 4, 6, timeout=110)
    assert [held for _, held in results] == [[0, 2, 4], [1, 3, 5]]
    assert all(error < 1e-12 for error, _ in results)


@pytest.mark.parametrize("inner", [(whale.split(2),), (whale.replicate(2),)], ids=str)
def test_stages_of_two_ranks_are_dealt_too(four: Ranks, inner: tuple[Any, ...]) -> None:
    results = four.run(compare, inner, 4, 4, timeout=110)
    assert [held for _, held in results] == [[0, 2], [0, 2], [1, 3], [1, 3]]
    assert all(error < 1e-12 for error, _ in results)


def test_a_dealt_pipeline_is_repeated_on_more_devices(four: Ranks) -> None:
    results = four.run(compare, (), 2, 6)  # four groups would not divide six stages, so two groups, twice
    assert [held for _, held in results] == [[0, 2, 4], [1, 3, 5], [0, 2, 4], [1, 3, 5]]
    assert all(error < 1e-12 for error, _ in results)
