"""Compiled steps: a limited number, and a warning that says what they differ in."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import whale
from whale.runtime import compiled_steps
from whale.runtime.compiled_steps import CompiledSteps, StepKey


def key(length: int, rate: float = 0.5, dtype: torch.dtype = torch.long) -> StepKey:
    return StepKey((("ids", (8, length), dtype), ("rate", repr(rate))))


def test_the_least_recently_used_steps_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_steps, "KEPT", 2)
    steps = CompiledSteps[int](lambda text: None)
    steps.add(key(1), 1)
    steps.add(key(2), 2)
    assert steps.get(key(1)) == 1
    steps.add(key(3), 3)
    assert (len(steps), steps.num_compiled) == (2, 3)
    assert steps.get(key(2)) is None


def test_steps_that_are_made_of_others_are_limited_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_steps, "KEPT", 2)
    monkeypatch.setattr(compiled_steps, "KEPT_MADE", 3)
    told: list[str] = []
    steps = CompiledSteps[int](told.append)
    for number in range(1, 20):
        steps.add(key(number), number, is_made=number > 2)
        assert steps.get(key(1)) == 1
    assert [number for number in range(1, 20) if steps.get(key(number)) is not None] == [1, 2, 17, 18, 19]
    assert (len(steps), steps.num_compiled, told) == (5, 2, [])


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ([key(n) for n in range(5, 12)], r"in dim 1 of ids \(5, 6, 7, 8, 9\)\. Pad"),
        ([key(5, n / 10) for n in range(7)], r"in rate \(0\.0, 0\.1, 0\.2, 0\.3, 0\.4\)\. Pad"),
        ([StepKey((), (), (("model.beta", (float, n)),)) for n in range(7)], "in the attribute model.beta"),
    ],
)
def test_what_steps_differ_in_is_told_once(keys: list[StepKey], text: str) -> None:
    told: list[str] = []
    steps = CompiledSteps[int](told.append)
    for number, one in enumerate(keys):
        steps.add(one, number)
        steps.add(one._replace(modes=(True,)), number)
    assert len(told) == 1
    assert re.search(text, told[0])


class RowByRow(nn.Module):
    """A loop over rows, of which no step for further ones is made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.layer(row) for row in x])


def test_parallel_models_warn_at_the_fifth_length_and_keep_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_steps, "KEPT", 3)
    model = whale.parallelize(RowByRow(), torch.ones(1, 3), loss_fn=lambda y, _: y.sum(), device="cpu")
    for rows in range(2, 5):
        model.train_step(torch.ones(rows, 3))
    with pytest.warns(UserWarning, match=r"differ in dim 0 of args\[0\] \(1, 2, 3, 4, 5\)"):
        model.train_step(torch.ones(5, 3))
    model.train_step(torch.ones(6, 3))
    assert len(model._whale.engine.steps) == 3
