"""Functions of torch in place of overloads: they call the same ones, and graphs keep theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from whale.runtime.direct_calls import _DIRECT, called_directly

aten = torch.ops.aten
X, Y, B = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
CUBE = torch.randn(2, 4, 4)
SAMPLES: dict[Any, tuple[Any, ...]] = {
    aten.view.default: (X, [2, 8]),
    aten.reshape.default: (X.t(), [16]),
    aten.transpose.int: (X, 0, 1),
    aten.permute.default: (CUBE, [2, 0, 1]),
    aten.bmm.default: (CUBE, CUBE),
    aten.addmm.default: (B, X, Y),
    aten.sum.dim_IntList: (X, [0], True),
    aten.mean.dim: (X, [1], True),
    aten.cat.default: ([X, Y], 1),
    aten.split_with_sizes.default: (X, [1, 3], 1),
    aten.where.self: (X > 0, X, Y),
    aten.pow.Tensor_Scalar: (X, 2),
    aten.embedding.default: (X, torch.tensor([1, 2]), -1, False, True),
    aten.native_layer_norm.default: (X, [4], B, B, 1e-5),
    aten._softmax.default: (X, -1, False),
    aten._log_softmax.default: (X, -1, False),
    aten._softmax_backward_data.default: (X, Y, -1, torch.float32),
    aten._log_softmax_backward_data.default: (X, Y, -1, torch.float32),
    **dict.fromkeys((aten.mm.default, aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor), (X, Y)),
}
"""Arguments of a call; of operators that are not here a tensor alone."""

NAMED: dict[str, Any] = {
    "alpha": 2,
    "dtype": torch.float64,
    "memory_format": torch.contiguous_format,
    "approximate": "tanh",
}


class Called(TorchDispatchMode):
    """Notes overloads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append((func, {name: value for name, value in (kwargs or {}).items() if value is not None}))
        return func(*args, **(kwargs or {}))


def called(function: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], list[Tensor]]:
    with Called() as mode:
        result = function(*args, **kwargs)
    return mode.found, list(result) if isinstance(result, (tuple, list)) else [result]


@pytest.mark.parametrize("overload", _DIRECT, ids=str)
def test_a_function_calls_the_overload_that_it_stands_for(overload: Any) -> None:
    direct, args = _DIRECT[overload], SAMPLES.get(overload, (X,))
    assert len(args) <= direct.positional
    for kwargs in ({}, *({name: NAMED[name]} for name in direct.named)):
        (own, found), (other, expected) = (called(one, *args, **kwargs) for one in (direct.function, overload))
        assert own == other
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_calls_with_other_arguments_stay_and_graphs_keep_their_overloads() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    same = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float32})
    cast = graph.call_function(aten._to_copy.default, (same,), {"dtype": torch.float64})
    same.meta["val"], cast.meta["val"] = X, X.double()
    scaled = graph.call_function(aten.addmm.default, (x, x, x), {"beta": 2})
    graph.output((cast, scaled, graph.call_function(aten.mm.default, (x, same))))
    targets = [node.target for node in graph.nodes]
    with called_directly(graph):
        code = graph.python_code("self").src
    assert [node.target for node in graph.nodes] == targets
    assert "torch.mm(" in code and "torch_Tensor_to(" in code
    assert "aten._to_copy.default(" in code and "aten.addmm.default(" in code
