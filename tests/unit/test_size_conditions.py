"""Conditions on sizes: what a model's code asks of them; none where torch does not know, or numbers are not linear."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale.graph.size_conditions import SizeConditions, size_conditions


class Model(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.middle = middle
        self.up, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.up(x))).sum()


def found(middle: Callable[[Tensor], Tensor], length: int = 12) -> SizeConditions | None:
    return size_conditions(Model(middle), {"args[0]": torch.zeros(3, length, 4)}, {("args[0]", 1): 0}, device="cpu")


def branch(x: Tensor) -> Tensor:
    return x if x.shape[1] > 10 else 2 * x


def loop(x: Tensor) -> Tensor:
    for place in range(x.shape[1]):
        x = x + place
    return x


def test_code_that_asks_nothing_has_no_conditions() -> None:
    conditions = found(lambda x: x.reshape(-1, 8).relu())
    assert conditions is not None
    assert all(conditions.hold([length]) for length in (2, 3, 12, 5000))
    assert not conditions.hold([1])  # it would be broadcast


@pytest.mark.parametrize(
    ("middle", "length", "same", "others"),
    [
        (branch, 12, [11, 100], [10, 2]),
        (branch, 9, [2, 10], [11, 100]),
        (loop, 12, [12], [11, 13]),
        (lambda x: x[:, : min(x.shape[1], 32)], 12, [31], [33]),
        (lambda x: x + torch.ones(64, 8)[: x.shape[1]], 12, [63], [65]),
    ],
)
def test_what_code_asks_of_a_size_is_a_condition(
    middle: Callable[[Tensor], Tensor], length: int, same: list[int], others: list[int]
) -> None:
    conditions = found(middle, length)
    assert conditions is not None
    assert [conditions.hold([n]) for n in same] == [True] * len(same)
    assert [conditions.hold([n]) for n in others] == [False] * len(others)


@pytest.mark.parametrize(
    "middle",
    [
        lambda x: x * (1 / x.shape[1]),
        lambda x: F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2),
        lambda x: (x @ x.transpose(1, 2)).reshape(3, -1)[:, :8],
        lambda x: x[:, : int((x > 0).sum())],
    ],
)
def test_numbers_that_are_not_linear_and_what_torch_does_not_know_have_none(
    middle: Callable[[Tensor], Tensor],
) -> None:
    assert found(middle) is None


def test_sizes_that_are_asked_of_together() -> None:
    batch = {"args[0]": torch.zeros(3, 12, 4), "args[1]": torch.zeros(3, 7, 4)}

    class Two(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            longer = x if x.shape[1] > y.shape[1] else y
            return super().forward(longer)

    model = Two(lambda x: x)
    conditions = size_conditions(model, batch, {("args[0]", 1): 0, ("args[1]", 1): 1}, device="cpu")
    assert conditions is not None
    assert [conditions.hold(sizes) for sizes in ([30, 29], [9, 2], [7, 12], [8, 8])] == [True, True, False, False]
