"""Copies of a parameter stay copies on devices that round differently; where they are not, it is said which differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import whale
from tests.distributed.parity import Worlds, cluster_of
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.small_models import decoder, tokens
from whale.api import ReplicaReport, verify_replicas
from whale.runtime.gradients import GradientSink
from whale.runtime.launch import World

LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "split": ({"": whale.split()}, 2),
    "replicas of parts": ({"": [whale.replicate(2), whale.split(2)]}, 4),
    "stages of parts": (
        {"layers.[0-1]": [whale.stage(2), whale.split(2)], "layers.[2-3]": [whale.stage(2), whale.split(2)]},
        4,
    ),
}


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def train(world: World, layout: str, speeds: tuple[float, ...], steps: int) -> dict[str, tuple[int, ...]]:
    """Train where odd ranks round differently, as devices of another type do."""
    model = decoder()
    whale.annotate(model, LAYOUTS[layout][0])
    options: dict[str, Any] = {"device": "cpu", "cluster": cluster_of(speeds), "micro_batches": 2}
    made = whale.parallelize(model, tokens(), **options)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    add = GradientSink.add

    def add_rounded(sink: GradientSink, number: int, gradient: Tensor) -> None:
        add(sink, number, gradient * (1 + 2**-40) if world.rank % 2 else gradient)

    GradientSink.add = add_rounded  # type: ignore[method-assign, assignment]
    try:
        for _ in range(steps):
            made.train_step(**tokens())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        GradientSink.add = add  # type: ignore[method-assign]
    return made.unlike_copies()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_on_devices_of_different_types_stay_equal_to_the_bit(worlds: Worlds, layout: str) -> None:
    size = LAYOUTS[layout][1]
    for found in worlds.run(size, train, layout, (1.0, 2.0) * (size // 2), 3):
        assert found == {}


def test_copies_that_drifted_are_named_with_their_ranks(worlds: Worlds) -> None:
    for found in worlds.run(2, train, "split", (), 3):
        assert "layers.0.qkv.bias" in found, found
        assert "layers.0.qkv.weight" not in found  # of which each rank has another part
        assert set(found.values()) == {(1,)}


def write(world: World) -> dict[str, tuple[int, ...]]:
    made = whale.parallelize(decoder(layers=1), tokens(), device="cpu")
    assert made.unlike_copies() == {}
    if world.rank == 1:
        with torch.no_grad():
            made.get_parameter("head.weight")[3, 5].mul_(1 + 2**-52)
    return made.unlike_copies()


def test_one_bit_of_one_copy_is_found(worlds: Worlds) -> None:
    assert worlds.run(2, write) == [{"head.weight": (1,)}] * 2


def verify(world: World, speeds: tuple[float, ...]) -> ReplicaReport:
    model = decoder(layers=1)
    whale.annotate(model, {"": whale.split()})
    return verify_replicas(model, tokens(), steps=2, device="cpu", cluster=cluster_of(speeds))


def test_verify_trains_and_compares_copies(worlds: Worlds) -> None:
    for report in worlds.run(2, verify, (1.0, 2.0)):
        assert (report.passed, report.steps, report.unlike) == (True, 2, {})
