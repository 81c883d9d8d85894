"""A capture whose alike layers are copies is the capture in which all of them are traced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from whale.cli.model_loader import load_model
from whale.graph import repeats
from whale.graph.capture import Captured, capture
from whale.graph.ordering import settle_order

EXAMPLES = Path(__file__).parents[2] / "examples/models"


def lines(captured: Captured) -> list[str]:
    """Everything that is known of the graph."""
    settle_order(captured)
    found = [f"{captured.parameters} {captured.buffers} {captured.inputs} {captured.mutated} {captured.stage_regions}"]
    for node in captured.graph.nodes:
        values = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
        shapes = [(x.dtype, tuple(x.shape), x.stride(), x.requires_grad) for x in values]
        around = list((node.meta.get("nn_module_stack") or {}).items())
        found.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {shapes} {around}")
        found[-1] += f" {node.meta.get('grad')} {node.meta.get('stack_trace')}"
    return found


def both(model: nn.Module, batch: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str], int]:
    """The capture with copies, the one without, and how many layers of the first are copies."""
    made = []
    copy = repeats._copied

    def counted(*arguments: Any) -> Any:
        made.append(arguments)
        return copy(*arguments)

    monkeypatch.setattr(repeats, "_copied", counted)
    copied = lines(capture(model, batch))
    with monkeypatch.context() as patch:
        patch.setattr(repeats, "TRACED", 1000)
        traced = lines(capture(model, batch))
    return copied, traced, len(made)


@pytest.mark.parametrize("name", ["gpt", "llama", "moe"])
def test_copied_layers_are_those_that_would_be_traced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"layers": 5, "hidden": 32, "heads": 2, "seq": 8, "vocab": 64}
    loaded = load_model(str(EXAMPLES / f"{name}.py:{name}"), sizes, batch_size=2, device="meta")
    copied, traced, count = both(loaded.model, loaded.batch, monkeypatch)
    assert copied == traced
    assert count == 3


class Layer(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x))


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum() + sum(getattr(layer, "extra", 0.0) for layer in self.layers)


BATCH = (torch.zeros(4, 8),)


class Leaving(Layer):
    """A loss of its own is left on the layer."""

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["extra"] = x.mean()
        return super().forward(x)


class Noting(Layer):
    """What it computed is put where the model finds it."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.__dict__["note"] = note

    def forward(self, x: Tensor) -> Tensor:
        inner = self.linear(x)
        self.__dict__["note"](inner)
        return x + inner


class Counting(Layer):
    """What it computes depends on how often any was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x) * self.calls


class Numbered(Layer):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.number


def test_a_layer_that_leaves_a_value_behind_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, traced, count = both(Stack(*(Leaving() for _ in range(4))), BATCH, monkeypatch)
    assert copied == traced
    assert count == 0


def test_what_others_read_of_the_inside_of_layers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[Tensor] = []

    class Reading(Stack):
        def forward(self, x: Tensor) -> Tensor:
            notes.clear()
            loss = super().forward(x)
            return loss + sum(note.mean() for note in notes)

    def note(x: Tensor) -> None:
        notes.append(x)

    copied, traced, count = both(Reading(*(Noting(note) for _ in range(4))), BATCH, monkeypatch)
    assert copied == traced
    assert count > 0  # at first
    assert sum(line.startswith("call_function mean") for line in copied) == 4


def test_a_layer_that_counts_its_calls_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "calls", 0)
    copied, _, count = both(Stack(*(Counting() for _ in range(4))), BATCH, monkeypatch)
    assert count == 0
    assert [factor for factor in range(1, 5) if any(f", {factor})" in line for line in copied)] == [1, 2, 3, 4]


def test_layers_with_other_attributes_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, traced, count = both(Stack(*(Numbered(number) for number in (2, 2, 2, 2, 3, 3))), BATCH, monkeypatch)
    assert copied == traced
    assert count == 1
