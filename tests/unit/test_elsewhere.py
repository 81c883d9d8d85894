"""Parameters of other ranks in scripts: writes do nothing, values are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from whale.errors import UsageError
from whale.runtime.elsewhere import Elsewhere


def weight() -> Elsewhere:
    said = "head.weight, of which rank 1 has the values and rank 0 none"
    return Elsewhere(nn.Parameter(torch.empty(3, 2, dtype=torch.float64, device="meta")), said)


def test_what_is_known_of_a_parameter() -> None:
    x = weight()
    assert isinstance(x, nn.Parameter)
    assert (x.shape, x.dtype, x.numel(), x.dim(), x.size(0), len(x)) == ((3, 2), torch.float64, 6, 2, 3, 3)
    assert x.requires_grad
    assert x.is_leaf
    assert x.grad is None
    assert x in {x}
    assert copy.deepcopy(x) is x
    assert "head.weight" in repr(x)
    assert "(): head.weight" not in repr(x)
    assert "<() float64: head.weight" in str(x.t().norm())


WRITES: dict[str, Callable[[Any], object]] = {
    "data": lambda x: x.data.mul_(2.0),
    "init": lambda x: nn.init.trunc_normal_(x, std=0.02),
    "copy": lambda x: x.data.copy_(torch.ones(3, 2)),
    "row": lambda x: x.data.__setitem__(0, 0.0),
    "freeze": lambda x: x.requires_grad_(False),
    "gradient": lambda x: setattr(x, "grad", torch.ones(3, 2, dtype=torch.float64)),
    "mark": lambda x: setattr(x, "no_decay", True),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_write_does_nothing(what: str) -> None:
    x = weight()
    with torch.no_grad():
        WRITES[what](x)
    assert x.shape == (3, 2)
    assert x.grad is None


READS: dict[str, Callable[[Any], object]] = {
    "number": lambda x: x.norm().item(),
    "float": lambda x: float(x.sum()),
    "branch": lambda x: bool(x.isfinite().all()),
    "list": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "copy out": lambda x: torch.zeros(3, 2).copy_(x),
    "sum": lambda x: torch.zeros(3, 2).add_(x),
    "row": lambda x: torch.zeros(3, 2).__setitem__(0, x[0]),
    "host": lambda x: x.cpu().numpy(),
    "equal": lambda x: torch.equal(x, torch.zeros(3, 2)),
    "total": lambda x: (torch.zeros(()) + (x**2).sum()).item(),
}


@pytest.mark.parametrize("what", READS)
def test_values_are_refused_in_words(what: str) -> None:
    with pytest.raises(
        UsageError, match=r"needs values of head.weight, of which rank 1 has the values and rank 0 none"
    ):
        READS[what](weight())


def test_optimizers_leave_it_alone() -> None:
    x, own = weight(), nn.Parameter(torch.ones(2))
    for foreach in (False, True):
        groups: list[dict[str, Any]] = [{"params": [x], "weight_decay": 0.1}, {"params": [own]}]
        optimizer = torch.optim.AdamW(groups, foreach=foreach)
        own.grad = torch.ones(2)
        nn.utils.clip_grad_norm_([x, own], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert [*optimizer.state] == [own]
