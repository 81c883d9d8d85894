"""Values of Python that a script changes after parallelize: the next step is compiled with them."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whale

pytestmark = pytest.mark.filterwarnings("ignore:5 kinds of steps")

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
WEIGHT = 1.0
SHARE = ContextVar("SHARE", default=1.0)
OPTIONS = {"weight": 1.0}
ARGS = SimpleNamespace(weight=1.0)


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class Layer(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(3, 3), config
        self.scale = 1.0
        self.rates = [1.0, {"last": 1.0}]
        self.constant = torch.ones(3, dtype=torch.float64)
        self.activation = torch.tanh
        self.array, self.slotted, self.scale_0 = np.ones(3), Slotted(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.scale * self.rates[0] * self.rates[1]["last"] * self.constant  # type: ignore[index]
        x = x * torch.from_numpy(self.array) * self.slotted.factor
        for number in range(1):
            x = x * getattr(self, f"scale_{number}")
        return self.activation(x) * self.config.factor * getattr(self, "later", 1.0)


class Model(nn.Module):
    power = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(factor=1.0)
        self.layers = nn.ModuleList(Layer(self.config) for _ in range(2))
        self.relu = nn.LeakyReLU(0.1)
        self.step = 0

    def double_of(self, x: Tensor) -> Tensor:
        return 2 * x

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (
            self.double_of(self.relu(x)).pow(self.power).sum() * SHARE.get() * WEIGHT * OPTIONS["weight"] * ARGS.weight
        )


class Counted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.epoch = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self, "scale", 1.0)


def change(model: Any) -> dict[str, Callable[[], object]]:
    layer = model.layers[1]
    return {
        "a number": lambda: setattr(layer, "scale", 0.5),
        "one of torch's modules": lambda: setattr(model.relu, "negative_slope", 0.3),
        "in a list": lambda: layer.rates.__setitem__(0, 0.5),
        "in a dict in a list": lambda: layer.rates[1].update(last=0.5),
        "in a shared object": lambda: setattr(model.config, "factor", 0.5),
        "another object": lambda: setattr(layer, "config", SimpleNamespace(factor=0.7)),
        "a constant": lambda: setattr(layer, "constant", torch.full((3,), 0.5, dtype=torch.float64)),
        "in a constant": lambda: layer.constant.mul_(0.5),
        "in an array": lambda: layer.array.__setitem__(0, 0.5),
        "in a slot": lambda: setattr(layer.slotted, "factor", 0.5),
        "a computed name": lambda: setattr(layer, "scale_0", 0.5),
        "a function": lambda: setattr(layer, "activation", torch.sigmoid),
        "a new attribute": lambda: setattr(layer, "later", 0.5),
        "of an instance": lambda: setattr(model, "power", 2),
    }


def test_an_attribute_that_is_changed_acts_at_the_next_step() -> None:
    local = Model().double()
    model: Any = whale.parallelize(copy.deepcopy(local), X, device="cpu")
    last = model.train_step(X).item()
    for what in change(local):
        change(local)[what]()
        change(model)[what]()
        expected = local(X).item()
        assert abs(expected - last) > 1e-5, what
        last = model.train_step(X).item()
        assert last == pytest.approx(expected, abs=1e-12), what
    model.eval()
    assert float(copy.deepcopy(model).eval_step(X)) == pytest.approx(last, abs=1e-12)


def test_an_attribute_that_is_changed_back_needs_no_other_step() -> None:
    model: Any = whale.parallelize(Model().double(), X, device="cpu")
    losses = []
    for scale in (1.0, 0.5, 1.0, 0.5):
        model.layers[0].scale = scale
        losses.append(model.train_step(X).item())
    assert losses[:2] == losses[2:]
    assert len(model._whale.engine.steps) == 2


def test_an_attribute_that_no_forward_names_is_the_script_s() -> None:
    model: Any = whale.parallelize(nn.Sequential(Counted().double()), X, loss_fn=lambda y, _: y.sum(), device="cpu")
    for step in range(3):
        model.step = model[0].epoch = step
        model.train_step(X)
    assert len(model._whale.engine.steps) == 1


def test_what_functions_that_a_module_holds_read_acts_at_the_next_step() -> None:
    factor = [1.0]

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gain = nn.Linear(3, 3), 1.0
            self.head = lambda model, x: x * model.gain
            self.others = {"last": lambda x: x * factor[0]}

        def forward(self, x: Tensor) -> Tensor:
            return self.others["last"](self.head(self, self.layer(x))).sum()

    model: Any = whale.parallelize(Holds().double(), X, device="cpu")
    first = model.train_step(X).item()
    model.gain = 2.0
    assert model.train_step(X).item() == pytest.approx(2 * first)
    factor[0] = 3.0
    assert model.train_step(X).item() == pytest.approx(6 * first)


MORE = {"by": 1.0}


def scaled(output: Tensor, batch: Any, options: dict[str, float], more: dict[str, float] = MORE) -> Tensor:
    return output.square().mean() * options["scale"] * more["by"]


def test_arguments_that_a_loss_already_has_act_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"scale": 1.0}
    loss = functools.partial(scaled, options=options)
    model: Any = whale.parallelize(nn.Linear(3, 2).double(), X, loss_fn=loss, device="cpu")
    first = model.train_step(X).item()
    options["scale"] = 3.0
    assert model.train_step(X).item() == pytest.approx(3 * first)
    monkeypatch.setitem(MORE, "by", 2.0)
    assert model.train_step(X).item() == pytest.approx(6 * first)


class ReadsTheEnvironment(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layer(x).sum() * float(os.environ.get("WHALE_TEST_SCALE", "1"))
        return loss


def test_the_environment_acts_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = whale.parallelize(ReadsTheEnvironment().double(), torch.ones(2, 4).double(), device="cpu")
    first = model.train_step(torch.ones(2, 4).double()).item()
    monkeypatch.setenv("WHALE_TEST_SCALE", "3")
    for _ in range(2):
        assert model.train_step(torch.ones(2, 4).double()).item() == pytest.approx(3 * first)
    assert len(model._whale.engine.steps) == 2


def test_globals_act_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = whale.parallelize(Model().double(), X, device="cpu")
    first = model.train_step(X).item()
    monkeypatch.setitem(globals(), "WEIGHT", 2.0)
    assert model.train_step(X).item() == pytest.approx(2 * first)
    monkeypatch.setitem(OPTIONS, "weight", 3.0)
    assert model.train_step(X).item() == pytest.approx(6 * first)
    monkeypatch.setattr(ARGS, "weight", 4.0)
    assert model.train_step(X).item() == pytest.approx(24 * first)
    monkeypatch.setattr(Model, "double_of", lambda self, x: 3 * x)
    assert model.train_step(X).item() == pytest.approx(36 * first)
    SHARE.set(5.0)
    assert model.train_step(X).item() == pytest.approx(180 * first)
    SHARE.set(1.0)
    monkeypatch.setattr(Model, "power", 2)
    assert model.train_step(X).item() != pytest.approx(24 * first)


class Criterion:
    def __init__(self) -> None:
        self.beta = 1.0

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        return self.beta * output.square().sum()


def test_what_a_loss_function_reads_acts_at_the_next_step() -> None:
    beta, smooth, criterion = 1.0, nn.SmoothL1Loss(beta=1.0), Criterion()

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return beta * smooth(output, torch.zeros_like(output))

    for function in (loss_fn, criterion, criterion.__call__):
        model = whale.parallelize(nn.Linear(3, 3).double(), X, loss_fn=function, device="cpu")
        first = model.train_step(X).item()
        criterion.beta = 2.0
        beta = 2.0
        assert model.train_step(X).item() == pytest.approx(2 * first)
        criterion.beta = beta = 1.0
    model = whale.parallelize(nn.Linear(3, 3).double(), X, loss_fn=loss_fn, device="cpu")
    first = model.train_step(X).item()
    smooth.beta = 0.1
    assert model.train_step(X).item() != pytest.approx(first)
