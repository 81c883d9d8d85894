"""State that a forward keeps in Python: what decides the graph is refused with its line, what does not is taken."""

from __future__ import annotations

import functools
import inspect
import random
import re
import time
from collections.abc import Callable
from datetime import datetime
from time import time as now
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whale
from whale.errors import CaptureError
from whale.graph.capture import capture

X = torch.ones(4, 3)
SEEN: list[int] = []
TOTALS = {"calls": 0}


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls, self.width = 0, 0
        self.counts = {"forward": [0]}
        self.generator = np.random.default_rng(0)
        self.kept: Tensor | None = None


class LayerDrop(Base):
    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:  # this
            x = self.layer(x)
        return self.layer(x).sum()


class Mixup(Base):
    def forward(self, x: Tensor) -> Tensor:
        share = float(np.random.beta(0.2, 0.2))  # this
        return self.layer(share * x + (1 - share) * x.flip(0)).sum()


class OwnGenerator(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.generator.random()).sum()  # this


class Seeds(Base):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)  # this
        return self.layer(x).sum()


class Warmup(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # this
        return self.layer(x).sum() * min(1.0, self.calls / 100)


class OnlyCounts(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # this
        return self.layer(x).sum()


class CountsInside(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.counts["forward"][0] += 1  # this
        return self.layer(x).sum() * (1 + self.counts["forward"][0] % 2)


class CountsOnTheClass(Base):
    total = 0

    def forward(self, x: Tensor) -> Tensor:
        CountsOnTheClass.total += 1  # this
        return self.layer(x).sum()


class CountsGlobally(Base):
    def forward(self, x: Tensor) -> Tensor:
        TOTALS["calls"] += 1  # this
        return self.layer(x).sum()


class Collects(Base):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(len(x))  # this
        return self.layer(x).sum()


class Remembers(Base):
    def forward(self, x: Tensor) -> Tensor:
        if self.kept is not None:
            x = x + self.kept
        self.kept = self.layer(x).detach()  # this
        return self.layer(x).sum()


class Once(Base):
    def forward(self, x: Tensor) -> Tensor:
        if not self.calls:
            self.calls = 1  # this
            with torch.no_grad():
                self.layer.weight.div_(2)
        return self.layer(x).sum()


class ReadsTheClock(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() * (2 if time.time() > 4e9 else 1)  # this


class ReadsTheClockByAName(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() * (now() % 7)  # this


class ReadsTheHour(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() * datetime.now().hour  # this


class OwnTorchGenerator(Base):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=torch.default_generator)  # this
        return (self.layer(x) * noise).sum()


class SeedsInBetween(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # this
            noise = torch.randn_like(x)
        return (self.layer(x) * noise).sum()


class WritesData(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data.clamp_(-0.1, 0.1)  # this
        return self.layer(x).sum()


class Averages(Base):
    def __init__(self) -> None:
        super().__init__()
        self.center, self.centers = torch.zeros(3), [torch.zeros(3)]

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        before = self.center
        self.center = 0.9 * before + 0.1 * made.detach().mean(0)  # this
        return (made - before).square().sum()


class AveragesInAList(Averages):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        before = self.centers[0]
        self.centers[0] = 0.9 * before + 0.1 * made.detach().mean(0)  # this
        return (made - before).square().sum()


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        calls: list[int] = []

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            calls.append(1)  # this
            return output * len(calls)

        self.layer.register_forward_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


def line_of(kind: type) -> int:
    lines, start = inspect.getsourcelines(kind)
    return start + next(i for i, line in enumerate(lines) if "# this" in line)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (LayerDrop, "Python's random generator"),
        (Mixup, "numpy's random generator"),
        (OwnGenerator, "the forward changes generator from step to step"),
        (Seeds, "torch.manual_seed in a forward"),
        (Warmup, "the forward changes calls from step to step, and computes something else then"),
        (OnlyCounts, "the forward changes calls from step to step, but"),
        (CountsInside, "the forward changes counts from step to step"),
        (CountsOnTheClass, "the class CountsOnTheClass and its methods reach"),
        (CountsGlobally, "the class CountsGlobally and its methods reach"),
        (Collects, "the class Collects and its methods reach"),
        (Remembers, "the forward changes kept from step to step, and computes something else"),
        (Averages, "the forward changes center from step to step, and computes something else"),
        (AveragesInAList, "the forward changes centers from step to step, and computes something else"),
        (Once, "the forward changes calls from step to step, and computes something else"),
        (ReadsTheClock, "computes with the time"),
        (ReadsTheClockByAName, "computes with the time"),
        (ReadsTheHour, "computes with the time"),
        (OwnTorchGenerator, "a generator of its own"),
        (SeedsInBetween, "torch.manual_seed in a forward"),
        (WritesData, "writes to the parameter layer.weight"),
        (Hooked, "the forward changes what a hook of layer reaches"),
    ],
)
def test_state_that_changes_is_refused_with_its_line(kind: Callable[[], nn.Module], what: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(what)) as caught:
        capture(kind(), X)
    assert (caught.value.file, caught.value.line) == (__file__, line_of(kind))  # type: ignore[arg-type]


class KeepsShapes(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.width = x.shape[1]
        self.kept = self.layer(x)
        return self.kept.sum() * self.width


class Clears(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.terms: list[Tensor] = []
        self.terms.append(self.layer(x).sum())
        return sum(self.terms)  # type: ignore[return-value]


class TakesTime(Base):
    def forward(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        loss = self.layer(x).sum()
        if time.perf_counter() - start > 1e9:
            raise RuntimeError
        return loss


@functools.lru_cache
def mask(rows: int) -> Tensor:
    return torch.ones(rows, rows).tril()


class Masks(Base):
    def forward(self, x: Tensor) -> Tensor:
        return (mask(len(x)) @ self.layer(x)).sum()


def test_what_a_trace_leaves_in_a_cache_is_dropped() -> None:
    model = Masks()
    expected = model(X)
    capture(model, X)
    assert torch.equal(model(X), expected)


def test_an_argument_that_is_written_to_is_said_to_stay() -> None:
    class Writes(Base):
        def forward(self, x: Tensor) -> Tensor:
            x.add_(1)
            return self.layer(x).sum()

    expected = Writes.forward(model := Writes(), X.clone()).item()
    with pytest.warns(UserWarning, match=r"test_forward_state\.py:\d+: a parallel step computes with what is written"):
        made = whale.parallelize(model, X, device="cpu")
    for _ in range(2):
        assert made.train_step(X).item() == pytest.approx(expected)


class CountsElsewhere(Base):
    """A forward during which something counts that only other methods reach, as libraries do that load models."""

    def forward(self, x: Tensor) -> Tensor:
        global_state = globals()
        global_state["UPLOADS"]["number"] += 1
        return self.layer(x).sum()

    def upload(self) -> int:
        return UPLOADS["number"]


UPLOADS = {"number": 0}


class Moves(Averages):
    """A forward that brings a tensor to where its input is, which changes nothing after the first, and keeps others."""

    def forward(self, x: Tensor) -> Tensor:
        self.center = self.center.to(x.device, x.dtype).contiguous()
        self.kept = made = self.layer(x)
        self.centers[0] = made.detach()
        return (made - self.center).square().sum()


@pytest.mark.parametrize("kind", [KeepsShapes, Clears, TakesTime, CountsElsewhere, Moves])
def test_state_that_is_the_same_after_every_step_is_taken(kind: Callable[[], Any]) -> None:
    assert capture(kind(), X).parameters


def test_what_another_module_draws_meanwhile_is_not_the_forward_s() -> None:
    class Between(Base):
        def forward(self, x: Tensor) -> Tensor:
            state = random.getstate()
            random.seed(0)
            scale = random.random()
            random.setstate(state)
            return self.layer(x).sum() * scale

    assert capture(Between(), X).parameters


class Remembering(nn.Module):
    """A recurrent model whose state goes from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 4, batch_first=True)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.layer(x, self.state)
        self.state = state.detach()
        return y.square().mean()


def test_lists_that_torch_keeps_are_not_named() -> None:
    with pytest.raises(CaptureError, match="the forward changes state from step to step"):
        capture(Remembering(), torch.randn(2, 5, 3))
