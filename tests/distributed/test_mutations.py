"""Faults of the executor that raise nothing: with each, training differs from the local model, and without it does not.

Each mutation changes one method on all ranks alike, as a mistake in it would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from tests.distributed.parity import BOUND, Worlds
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.small_models import Block, Decoder, decoder, tokens
from whale.runtime.launch import World
from whale.runtime.owned import HeldUnit, Scattered, _Arriving
from whale.runtime.stage import LocalStage
from whale.strategies import forms, traced_call

STEPS = 3
Mutation = Callable[[], AbstractContextManager[Any]]


class DroppingBlock(Block):
    """A layer with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.25, self.training))


class Normed(Decoder):
    """A decoder with a batch norm between its layers, whose statistics are sums over all rows."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.norm(layer(x).transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def dropping() -> nn.Module:
    torch.manual_seed(0)
    model = Decoder(layers=2)
    model.layers = nn.ModuleList(DroppingBlock(16, 4) for _ in range(2))
    return model.double()


def normed() -> nn.Module:
    torch.manual_seed(0)
    return Normed().double()


# --- the mutations ----------------------------------------------------------------------------------------------------


@contextmanager
def parameters_gathered_in_the_first_step_alone() -> Iterator[None]:
    begin, gathered = HeldUnit.begin, set[HeldUnit]()

    def once(self: HeldUnit) -> None:
        if self not in gathered:
            gathered.add(self)
            begin(self)

    with patch.object(HeldUnit, "begin", once):
        yield


@contextmanager
def parameters_of_a_task_left_over_the_step() -> Iterator[None]:
    start, arrived, left = HeldUnit.start, HeldUnit.arrived, dict[HeldUnit, _Arriving]()

    def start_once(self: HeldUnit) -> _Arriving:
        return left[self] if self in left else start(self)

    def keep(self: HeldUnit, arriving: _Arriving) -> tuple[Tensor, ...]:
        found = arrived(self, arriving)
        left[self] = _Arriving(arriving.whole, [])
        return found

    with patch.object(HeldUnit, "start", start_once), patch.object(HeldUnit, "arrived", keep):
        yield


@contextmanager
def sums_inside_an_operator_escape_its_trace() -> Iterator[None]:
    with patch.object(forms, "is_recording", lambda: False), patch.object(traced_call, "_known", {}):
        yield


@contextmanager
def another_mask_when_computed_again() -> Iterator[None]:
    backward = LocalStage.backward

    def with_another_seed(self: LocalStage, *arguments: Any) -> tuple[Tensor | None, ...]:
        self.clock.seed += 1
        try:
            return backward(self, *arguments)
        finally:
            self.clock.seed -= 1

    with patch.object(LocalStage, "backward", with_another_seed):
        yield


@contextmanager
def gradients_freed_while_they_are_summed() -> Iterator[None]:
    scatter = HeldUnit.scatter

    def then_used_by_another(self: HeldUnit, total: Tensor) -> Scattered:
        found = scatter(self, total)
        total.zero_()  # what is allocated next has this memory
        return found

    with patch.object(HeldUnit, "scatter", then_used_by_another):
        yield


# --- training ---------------------------------------------------------------------------------------------------------


def trained(model: nn.Module, step: Callable[..., Tensor]) -> list[float]:
    """The losses of some steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        losses.append(step(**tokens()).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def in_parallel(build: Callable[[], nn.Module], layout: Any, options: dict[str, Any]) -> list[float]:
    model = build()
    whale.annotate(model, layout)
    made = whale.parallelize(model, tokens(), device="cpu", seed=0, timeout_seconds=20, **options)
    return trained(made, made.train_step)


def by_local_model(build: Callable[[], nn.Module]) -> list[float]:
    model = build()

    def step(**batch: Tensor) -> Tensor:
        loss: Tensor = model(**batch)
        loss.backward()
        return loss

    return trained(model, step)


def expected(build: Callable[[], nn.Module], layout: Any) -> list[float]:
    """The losses of the local model; of one with dropout those of a step that keeps its masks."""
    return in_parallel(build, layout, {}) if build is dropping else by_local_model(build)


def apart(
    world: World, mutation: Mutation, build: Callable[[], nn.Module], layout: Any, options: dict[str, Any]
) -> tuple[float, float]:
    """The largest differences of losses, without the mutation and with it."""
    wanted = expected(build, layout)
    found = []
    for change in (nullcontext, mutation):
        with change():
            losses = in_parallel(build, layout, options)
        found.append(max(abs(a - b) for a, b in zip(losses, wanted, strict=True)))
    return found[0], found[1]


REPLICAS = {"": whale.replicate()}
CASES: list[tuple[Mutation, Callable[[], nn.Module], Any, dict[str, Any]]] = [
    (parameters_gathered_in_the_first_step_alone, decoder, REPLICAS, {"zero": 1}),
    (parameters_of_a_task_left_over_the_step, decoder, REPLICAS, {"zero": 3, "micro_batches": 2}),
    (sums_inside_an_operator_escape_its_trace, normed, REPLICAS, {}),
    (another_mask_when_computed_again, dropping, REPLICAS, {"recompute": "full"}),
    (gradients_freed_while_they_are_summed, decoder, REPLICAS, {"zero": 2, "micro_batches": 2}),
]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


@pytest.mark.parametrize(("mutation", "build", "layout", "options"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_silent_fault_is_seen_in_the_losses(
    worlds: Worlds, mutation: Mutation, build: Callable[[], nn.Module], layout: Any, options: dict[str, Any]
) -> None:
    for without, with_it in worlds.run(2, apart, mutation, build, layout, options):
        assert without <= BOUND
        assert with_it > 1e6 * BOUND
