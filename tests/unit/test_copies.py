"""Functions that a script puts on modules compute with the parallel model's parameters, as with the local ones."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.errors import UsageError

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
GLOBAL: Any = None


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def with_a_closure() -> nn.Module:
    model = layers()
    old = model[2].forward
    model[2].forward = lambda x: 2 * old(x)
    return model


def with_an_adapter() -> nn.Module:
    model = layers()
    layer = model[2].requires_grad_(False)
    layer.down, layer.up = (nn.Parameter(torch.ones(*shape, dtype=torch.float64)) for shape in ((1, 4), (2, 1)))
    old = layer.forward

    def forward(x: Tensor, scale: float = 0.5, *, layers: tuple[Any, ...] = (layer,)) -> Tensor:
        return old(x) + scale * (x @ layers[0].down.T @ layers[0].up.T)

    layer.forward = forward
    return model


def with_a_partial() -> nn.Module:
    model = layers()
    model[1].forward = functools.partial(lambda layer, x: x.tanh() + layer.bias.sum(), model[0])
    return model


def with_a_hook() -> nn.Module:
    model = layers()
    model[0].register_forward_hook(lambda module, given, output: output * model[2].weight.sum())
    return model


def helped(x: Tensor) -> Tensor:
    scale: Tensor = GLOBAL[0].bias.sum()
    return x * scale


def with_a_global() -> nn.Module:
    global GLOBAL
    GLOBAL = layers()
    old = GLOBAL[2].forward
    GLOBAL[2].forward = lambda x: helped(old(x))
    return GLOBAL


def wrapped_twice() -> nn.Module:
    model = layers()
    for _ in range(2):
        model[2].forward = (lambda old: lambda x: old(x).sin())(model[2].forward)
    return model


@pytest.mark.parametrize(
    "build", [with_a_closure, with_an_adapter, with_a_partial, with_a_hook, with_a_global, wrapped_twice]
)
def test_functions_on_modules_compute_with_the_parallel_model_s_parameters(build: Callable[[], nn.Module]) -> None:
    local = build()
    expected = local(X).square().mean()
    expected.backward()
    gradients = {name: p.grad for name, p in local.named_parameters() if p.grad is not None}
    parallel: Any = whale.parallelize(build(), X, loss_fn=lambda output, batch: output.square().mean(), device="cpu")
    for model in (parallel, copy.deepcopy(parallel)):
        model.zero_grad()
        assert model.train_step(X).item() == expected.item()
        found = model.full_gradients()
        assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
    assert gradients.keys() == found.keys()
    with torch.no_grad():
        torch.testing.assert_close(parallel[2](torch.ones(1, 4).double()), local[2](torch.ones(1, 4).double()))  # type: ignore[index]


def test_a_forward_that_is_replaced_later_is_refused() -> None:
    parallel: Any = whale.parallelize(layers(), X, loss_fn=lambda output, batch: output.sum(), device="cpu")
    old = parallel[2].forward
    parallel[2].forward = lambda x: 2 * old(x)
    with pytest.raises(UsageError, match=r"2\.forward was replaced after parallelize, .* before parallelize"):
        parallel.train_step(X)
