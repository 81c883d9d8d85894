"""Tensors of a model that share memory: refused where a step could not keep them one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import whale
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.compile.shared_memory import check_shared_memory
from whale.errors import CaptureError, UsageError
from whale.ir.cluster import Cluster
from whale.ir.state import StateSharding

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)


class Views(nn.Module):
    whole: Tensor
    low: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6, dtype=torch.float64)
        self.register_buffer("whole", torch.ones(12, dtype=torch.float64))
        self.register_buffer("low", self.whole[:6])
        self.register_buffer("high", self.whole[6:])

    def forward(self, x: Tensor) -> Any:
        return (self.layer(x) * self.low * self.get_buffer("high")).square().mean()


class Written(Views):
    def forward(self, x: Tensor) -> Any:
        self.whole.mul_(0.9)
        return super().forward(x)


def follows(make: Callable[[Tensor], Tensor]) -> nn.Module:
    class Follows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(6, 6, dtype=torch.float64)
            self.register_buffer("seen", make(self.layer.weight.detach()))

        def forward(self, x: Tensor) -> Any:
            return (self.layer(x) * self.get_buffer("seen").sum()).square().mean()

    return Follows()


def test_a_buffer_that_the_forward_writes_shares_its_memory_with_none() -> None:
    with pytest.raises(UsageError, match="the forward writes to the buffer whole, which shares memory with (low|high)"):
        whale.parallelize(Written(), X, device="cpu")
    local = Views()
    made: Any = whale.parallelize(local, X, device="cpu")
    for _ in range(2):
        assert made.train_step(X).item() == pytest.approx(local(X).item(), rel=1e-12)
        with torch.no_grad():
            local.whole.mul_(0.9)


@pytest.mark.parametrize("make", [lambda w: w, lambda w: w[0], lambda w: w.T])
def test_what_follows_a_trained_parameter_needs_it_whole(make: Callable[[Tensor], Tensor]) -> None:
    def check(**options: Any) -> None:
        model = follows(make)
        compilation = compile_model(model, X, Cluster.homogeneous(2), Options(**options), device="cpu", training=True)
        check_shared_memory(model, compilation, ())

    check(default=whale.replicate().strategy)
    for options in ({"default": whale.split().strategy}, {"state": StateSharding(1)}):
        with pytest.raises(UsageError, match=r"layer\.weight is trained and shares memory with seen, but a rank has"):
            check(**options)


KEEPERS: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda weight: weight.detach(),
    "a view": lambda weight: weight.data[0],
    "a list": lambda weight: [torch.ones(6), weight.detach()],
    "a dict in a dict": lambda weight: {"a": {"b": weight.detach().T}},
}


@pytest.mark.parametrize("kind", KEEPERS)
def test_a_tensor_that_is_no_state_is_no_view_of_a_trained_parameter(kind: str) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(6, 6, dtype=torch.float64), nn.Linear(6, 6, dtype=torch.float64)
            self.kept = KEEPERS[kind](self.layer.weight)

        def forward(self, x: Tensor) -> Any:
            (*_, last) = pytree.tree_leaves(self.kept)
            return (self.last(self.layer(x)) * last.sum()).square().mean()

    local = Keeps()
    with pytest.raises(UsageError, match=r"layer\.weight is trained and shares memory with kept, which is no buffer"):
        whale.parallelize(local, X, device="cpu")
    local.layer.requires_grad_(False)
    made: Any = whale.parallelize(local, X, device="cpu")
    assert made.train_step(X).item() == pytest.approx(local(X).item(), rel=1e-12)


def test_a_global_is_no_view_of_a_trained_parameter() -> None:
    local = nn.Linear(6, 6, dtype=torch.float64)
    seen = local.weight.detach()

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return output.square().mean() + seen.sum()

    with pytest.raises(UsageError, match="weight is trained and shares memory with seen, which is no buffer"):
        whale.parallelize(local, X, device="cpu", loss_fn=loss_fn)


def test_parts_of_one_memory_that_do_not_meet_are_tensors_as_any() -> None:
    flat = torch.randn(72, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)).double()
    for number, layer in enumerate(model):
        layer.weight = nn.Parameter(flat[36 * number : 36 * (number + 1)].view(6, 6))
    options = Options(default=whale.split().strategy)
    loss = lambda output, batch: output.square().mean()  # noqa: E731
    compilation = compile_model(model, X, Cluster.homogeneous(2), options, device="cpu", training=True, loss_fn=loss)
    check_shared_memory(model, compilation, ())


def test_a_region_without_gradients_may_not_read_values() -> None:
    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6, dtype=torch.float64)
            self.register_buffer("at", torch.tensor(1))
            self.register_buffer("rates", torch.ones(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                rate = self.get_buffer("rates")[self.get_buffer("at")]
            return (self.layer(x) * rate).square().mean()

    with pytest.raises(CaptureError, match="Indexed cannot be captured: .* depends on a tensor's values"):
        whale.parallelize(Indexed(), X, device="cpu")


def test_a_parameter_that_the_loss_does_not_read_may_share_the_memory_of_one_that_it_reads() -> None:
    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(6, 6, dtype=torch.float64)
            self.kept = nn.Parameter(self.layer.weight.detach()[0])

        def forward(self, x: Tensor) -> Any:
            return self.layer(x).square().mean()

    local = Unread()
    assert whale.parallelize(local, X, device="cpu").train_step(X).item() == pytest.approx(local(X).item(), rel=1e-12)


def test_a_tensor_that_each_forward_makes_may_begin_as_a_view() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(6, 3).double()), nn.Tanh())

    twin, local = made(), made()
    model: Any = whale.parallelize(local, X, device="cpu", loss_fn=lambda output, _: output.square().sum())
    for _ in range(2):
        assert model.train_step(X).item() == pytest.approx(twin(X).square().sum().item(), rel=1e-12)
