"""A refused model leaves nothing of its capture in globals, classes and what they reach: the script may go on with the
local one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.errors import CaptureError

CACHE: dict[int, Tensor] = {}
PAIRS: dict[int, Any] = {}
ROWS: list[Any] = [None]
HOLDER = SimpleNamespace(table=None)
TABLE: Tensor | None = None


def table(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float64) / 10


def of_a_dict(model: nn.Module, length: int) -> Tensor:
    return CACHE.setdefault(length, table(length))


def of_tuples(model: nn.Module, length: int) -> Tensor:
    if length not in PAIRS:
        PAIRS[length] = (table(length), [table(length).cos()])
    first, (second,) = PAIRS[length]
    return first + second


def of_a_list(model: nn.Module, length: int) -> Tensor:
    if ROWS[0] is None:
        ROWS[0] = table(length)
    return ROWS[0]


def of_a_global(model: nn.Module, length: int) -> Tensor:
    global TABLE
    if TABLE is None:
        TABLE = table(length)
    return TABLE


def of_an_object(model: nn.Module, length: int) -> Tensor:
    if HOLDER.table is None:
        HOLDER.table = table(length)
    return HOLDER.table


def of_a_class(model: nn.Module, length: int) -> Tensor:
    if Model.table is None:
        Model.table = table(length)
    return Model.table


def of_a_function(model: nn.Module, length: int) -> Tensor:
    if not hasattr(of_a_function, "table"):
        of_a_function.table = table(length)  # type: ignore[attr-defined]
    return of_a_function.table  # type: ignore[attr-defined]


def of_a_default(model: nn.Module, length: int, known: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    return known.setdefault(length, table(length))


def made_closure() -> Callable[[nn.Module, int], Tensor]:
    known: Tensor | None = None

    def of_a_closure(model: nn.Module, length: int) -> Tensor:
        nonlocal known
        if known is None:
            known = table(length)
        return known

    return of_a_closure


class Model(nn.Module):
    table: ClassVar[Tensor | None] = None
    where: ClassVar[Callable[[nn.Module, int], Tensor]]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * type(self).where(self, x.shape[1])[:, None]).square().mean()


PLACES = {
    "a dict": of_a_dict,
    "tuples": of_tuples,
    "a list": of_a_list,
    "a global": of_a_global,
    "an object": of_an_object,
    "a class": of_a_class,
    "a function": of_a_function,
    "a default": of_a_default,
    "a closure": made_closure(),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_refused_model_leaves_nothing_of_its_capture(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "where", staticmethod(PLACES[place]), raising=False)
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 4, 3, dtype=torch.float64)
    for _ in range(2):
        with pytest.raises(CaptureError, match="the forward changes .* if it is made once, call the model once before"):
            whale.parallelize(model, x, device="cpu")
    loss = model(x)
    loss.backward()
    assert type(loss) is Tensor
    assert loss.item() == pytest.approx(model(x).item())
    assert model.layer.weight.grad is not None
    assert type(model.layer.weight.grad) is Tensor
