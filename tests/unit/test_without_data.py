"""A step that is tried without data has the shapes, the types and the memory that torch gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from whale.strategies.dry_run import WithoutData
from whale.strategies.layers import default_dtype

aten = torch.ops.aten

CALLS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, n: x + 1,
    lambda x, n: n + 1,
    lambda x, n: n + 1.0,  # equal to 1, and yet of another type
    lambda x, n: n + True,
    lambda x, n: x.t() @ x,
    lambda x, n: x.t() * 2,
    lambda x, n: x.transpose(0, 1),
    lambda x, n: aten._unsafe_view(x, [12]),
    lambda x, n: aten.native_layer_norm(x, [4], None, None, 1e-5),
    lambda x, n: torch.cat([x, x[1:]], 1 - 1),
    lambda x, n: x.split(2),
    lambda x, n: torch.zeros(3, 4, dtype=n.dtype, device=x.device),
    lambda x, n: x.clone().add_(1),
    lambda x, n: aten.gelu_backward(x, x),
]


def looks(call: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    """For each result its shape, strides, type and bytes, and the tensor whose memory it has."""
    x, n = torch.empty(3, 4, dtype=torch.float16, device="meta"), torch.empty(3, 4, dtype=torch.int64, device="meta")
    given = {x.untyped_storage()._cdata: "x", n.untyped_storage()._cdata: "n"}
    found = call(x, n)
    return [
        (y.shape, y.stride(), y.dtype, y.untyped_storage().nbytes(), given.get(y.untyped_storage()._cdata))
        for y in (found if isinstance(found, list | tuple) else (found,))
    ]


@pytest.mark.parametrize("call", CALLS)
def test_results_are_as_torch_says_whenever_they_are_asked_for(call: Callable[[Tensor, Tensor], Any]) -> None:
    expected = looks(call)
    with WithoutData():
        assert [looks(call) for _ in range(2)] == [expected] * 2


def test_what_has_no_type_of_its_own_has_the_one_that_is_set() -> None:
    def made() -> list[torch.dtype]:
        n = torch.empty(2, dtype=torch.int64, device="meta")
        return [torch.zeros(2).dtype, (n / n).dtype]

    with WithoutData():
        before = made()
        with default_dtype(torch.bfloat16):
            assert made() == [torch.bfloat16] * 2
        assert before == made() == [torch.float32] * 2


def test_anomaly_detection_which_reads_values_is_off_inside_alone() -> None:
    with torch.autograd.set_detect_anomaly(True):
        with WithoutData():
            x = torch.empty(3, device="meta", requires_grad=True)
            x.square().mean().backward()
            assert x.grad is not None and not torch.is_anomaly_enabled()
        assert torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    assert not torch.is_anomaly_enabled()
