"""What a capture must not take from its example."""

from __future__ import annotations

import pytest

import whale
from tests.small_models import decoder, tokens
from whale.graph.capture import capture


def test_entries_of_the_example_that_are_one_tensor_stay_apart() -> None:
    ids = tokens()["tokens"]
    example = {"tokens": ids, "labels": ids}
    model = decoder(layers=1)
    assert set(capture(model, example).inputs.values()) == {"tokens", "labels"}
    local = model(tokens=ids, labels=ids.roll(1, 0)).item()
    parallel = whale.parallelize(model, example, device="cpu")
    assert parallel.train_step(tokens=ids, labels=ids.roll(1, 0)).item() == pytest.approx(local, rel=1e-12)
    assert parallel.train_step(**example).item() != pytest.approx(local, rel=1e-3)
