"""Values that a forward reads of tensors that it has made of numbers: a capture knows them, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whale
from whale.errors import CaptureError

X = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Reads(nn.Module):
    def __init__(self, loss: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.loss = nn.Linear(4, 4, dtype=torch.float64), loss

    def forward(self, x: Tensor) -> Any:
        return self.loss(self.layer(x))


KNOWN: dict[str, Callable[[Tensor], Any]] = {
    "tolist, as losses of MONAI do": lambda h: h.sum(torch.arange(1, h.dim()).tolist()).square().mean(),
    "item": lambda h: h.mean() * torch.arange(3).sum().item(),
    "each item": lambda h: sum(h.mean() * rate.item() for rate in torch.linspace(0, 0.1, 4)),
    "if": lambda h: h.sum() if torch.arange(3).sum() > 2 else h.mean(),
    "int": lambda h: h[:, : int(torch.arange(3).max())].sum(),
    "index": lambda h: h[torch.arange(8)[2]].sum(),
    "range": lambda h: sum(h[i].sum() for i in range(torch.arange(4).max())),
    "float": lambda h: h.sum() * float(torch.arange(1, 4).pow(2).sum()),
    "torch.tensor": lambda h: h.sum() * torch.tensor([1.0, 2.0]).mul(2).sum().item(),
    "a shape": lambda h: h.sum() / torch.tensor(h.shape).prod().item(),
    "any": lambda h: h.sum() if torch.ones(3, 3).tril().bool().any() else h.mean(),
}


@pytest.mark.parametrize("loss", KNOWN.values(), ids=KNOWN.keys())
def test_values_of_numbers_are_known(loss: Callable[[Tensor], Any]) -> None:
    expected = Reads(loss)(X).item()
    made = whale.parallelize(Reads(loss), X, device="cpu")
    assert made.train_step(X).item() == pytest.approx(expected, rel=1e-12)


def _others(h: Tensor) -> Tensor:
    """The similarities to other rows, as contrastive losses take them."""
    similarity = h @ h.T
    return similarity[~torch.eye(len(h), dtype=torch.bool)].view(len(h), -1).logsumexp(1).mean()


SELECTED: dict[str, Callable[[Tensor], Any]] = {
    "others": _others,
    "masked_select": lambda h: (h @ h.T).masked_select(torch.ones(len(h), len(h)).triu(1).bool()).square().mean(),
    "of each row": lambda h: (h * 2).masked_select(torch.tensor([True, False, True, True])).square().mean(),
    "pairs": lambda h: (h[torch.ones(len(h), len(h)).triu(1).nonzero()].sum(1)).square().mean(),
    "pairs by where": lambda h: (h @ h.T)[torch.where(torch.ones(len(h), len(h)).triu(1) > 0)].square().mean(),
    "none": lambda h: h.square().mean() + h[torch.arange(len(h)) < 0].sum(),
    "rows": lambda h: h[torch.arange(len(h)) % 2 == 0].square().mean(),
    "columns": lambda h: h[:, torch.tensor([True, False, True, True])].square().mean(),
    "both": lambda h: h[torch.arange(len(h)) < 3, 1].square().mean(),
    "combinations": lambda h: (h[torch.combinations(torch.arange(len(h)))].diff(dim=1)).square().mean(),
    "combinations of values": lambda h: torch.combinations(h.mean(1), 3).prod(1).sum(),
    "rows by numpy": lambda h: h[np.arange(len(h)) % 3 == 0].square().mean(),
    "columns by a list": lambda h: h[:, [True, False, True, True]].square().mean(),
}


@pytest.mark.parametrize("loss", SELECTED.values(), ids=SELECTED.keys())
def test_masks_that_are_known_select_for_batches_of_any_size(loss: Callable[[Tensor], Any]) -> None:
    made = whale.parallelize(Reads(loss), X, device="cpu")
    for rows in (8, 6, 3):
        assert made.train_step(X[:rows]).item() == pytest.approx(Reads(loss)(X[:rows]).item(), rel=1e-12)


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        self.chosen: Any = torch.tensor([True, False, True, False])

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)[:, self.chosen].square().sum()


def test_a_mask_that_is_an_attribute_may_change() -> None:
    local = Chooses()
    made: Any = whale.parallelize(Chooses(), X, device="cpu")
    for column in (0, 1, 2):
        for model in (local, made):
            model.chosen[column] = not model.chosen[column]
        assert made.train_step(X).item() == pytest.approx(local(X).item(), rel=1e-12)


def _written(h: Tensor) -> Tensor:
    table = torch.zeros(3)
    table.add_(2)
    return h.sum() * table.sum().item()


def _written_in_part(h: Tensor) -> Tensor:
    table = torch.zeros(3)
    table[1] = 5.0
    return h.sum() * table.sum().item()


UNKNOWN: dict[str, Callable[[Tensor], Any]] = {
    "of the batch": lambda h: h.sum() * h.max().item(),
    "if": lambda h: h.sum() if h.max() > 0 else h.mean(),
    "random": lambda h: h.sum() * torch.rand(3).sum().item(),
    "written": _written,
    "written in part": _written_in_part,
    "a mask of the batch": lambda h: h[h > 0].square().sum(),
    "large": lambda h: h.sum() * torch.ones(10_000).sum().item(),
}


@pytest.mark.parametrize("loss", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_other_values_are_refused(loss: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match="depends on a tensor's values"):
        whale.parallelize(Reads(loss), X, device="cpu")
