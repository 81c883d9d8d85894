"""A capture whose alike layers are copies is the capture in which all of them are traced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from whale.cli.model_loader import load_model
from whale.graph import capture as capturing
from whale.graph import repeats
from whale.graph.capture import capture
from whale.graph.captured import Captured
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
    monkeypatch.setattr(capturing, "_has_values", lambda model: False)
    copied = lines(capture(model, batch))
    with monkeypatch.context() as patch:
        patch.setattr(repeats, "TRACED", 1000)
        traced = lines(capture(model, batch))
    return copied, traced, len(made)


def test_a_model_that_runs_is_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(str(EXAMPLES / "gpt.py:gpt"), {"layers": 5, "hidden": 32, "heads": 2, "seq": 8}, batch_size=2)
    monkeypatch.setattr(repeats, "_copied", None)
    assert lines(capture(loaded.model, loaded.batch))


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
    """Stores its result where the model reads it."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.__dict__["note"] = note

    def forward(self, x: Tensor) -> Tensor:
        inner = self.linear(x)
        self.__dict__["note"](inner)
        return x + inner


class Counting(Layer):
    """Its result depends on the number of calls of all instances."""

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

    monkeypatch.setattr(repeats.Reach, "token", lambda self, x: repeats.Same(x) if callable(x) else repr(x))
    copied, traced, count = both(Reading(*(Noting(note) for _ in range(4))), BATCH, monkeypatch)
    assert copied == traced
    assert count > 0  # at first
    assert sum(line.startswith("call_function mean") for line in copied) == 4


def test_a_layer_that_counts_its_calls_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "calls", 0)

    class Restarting(Stack):
        def forward(self, x: Tensor) -> Tensor:
            Counting.calls = 0
            return super().forward(x)

    copied, _, count = both(Restarting(*(Counting() for _ in range(4))), BATCH, monkeypatch)
    assert count == 0
    assert [factor for factor in range(1, 5) if any(f", {factor})" in line for line in copied)] == [1, 2, 3, 4]


def test_layers_with_other_attributes_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, traced, count = both(Stack(*(Numbered(number) for number in (2, 2, 2, 2, 3, 3))), BATCH, monkeypatch)
    assert copied == traced
    assert count == 1


class Placeless(Numbered):
    """Its number is for a cache, which no training has."""

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        x = x.to(torch.float32)  # as it is
        return Layer.forward(self, x) if cache is None else super().forward(x)


class FromTheFourth(Numbered):
    def forward(self, x: Tensor) -> Tensor:
        return Layer.forward(self, x) * (2 if self.number > 3 else 1)


@pytest.mark.parametrize(("kind", "copies"), [(Placeless, 3), (FromTheFourth, 0)])
def test_a_number_tells_layers_apart_that_read_it(
    kind: type[Numbered], copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, traced, count = both(Stack(*(kind(number) for number in range(6))), BATCH, monkeypatch)
    assert copied == traced
    assert count == copies
    assert not hasattr(kind, "number")


class Wide(Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


class Measured(Layer):
    @property
    def width(self) -> int:
        """The width, which other layers of the list have as a number."""
        return self.linear.in_features


def test_classes_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Measured.__dict__["width"]
    copied, traced, _ = both(Stack(Wide(3), Measured(), Wide(4), Measured(), Wide(5)), BATCH, monkeypatch)
    assert copied == traced
    assert Measured.__dict__["width"] is own and "width" not in vars(Wide)


class Tree(Layer):
    """A layer with layers of its own class, which have numbers, too."""

    def __init__(self, number: int, *inner: Tree) -> None:
        super().__init__()
        self.number, self.inner = number, nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for layer in self.inner:
            x = layer(x)
        return x


def test_layers_with_layers_of_their_class_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[Any] = []
    duplicate = capturing._duplicate

    def counted(*given: Any) -> Any:
        captures.append(given)
        return duplicate(*given)

    monkeypatch.setattr(capturing, "_duplicate", counted)
    trees = (Tree(number, *(Tree(place) for place in range(4))) for number in range(5))
    copied, traced, count = both(Stack(*trees), BATCH, monkeypatch)
    assert copied == traced
    assert count > 0
    assert len(captures) == 2, "the first capture was given up"
    assert "number" not in vars(Tree)


def test_layers_of_hugging_face_models_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 5}
    loaded = load_model("hf:llama", {**sizes, "sequence_length": 8}, batch_size=2, device="meta")
    copied, traced, count = both(loaded.model, loaded.batch, monkeypatch)
    assert copied == traced
    assert count == 3


def test_a_trace_with_copies_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 5}
    loaded = load_model("hf:llama", {**sizes, "sequence_length": 8}, batch_size=2, device="meta")
    exports = []
    export = torch.export.export

    def counted(*arguments: Any, **options: Any) -> Any:
        exports.append(arguments)
        return export(*arguments, **options)

    monkeypatch.setattr(torch.export, "export", counted)
    capture(loaded.model, loaded.batch)
    assert len(exports) == 1


class Config:
    """State shared by all layers."""

    calls = 0
    scale = 1
    rates = (1, 1, 2, 2, 3, 3)


SHARED = Config()


class Sharing(Layer):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config


class Fourth(Sharing):
    """Every fourth call is another."""

    def forward(self, x: Tensor) -> Tensor:
        self.config.calls += 1
        return super().forward(x) * (2 if self.config.calls % 4 == 0 else 1)


class Scaled(Sharing):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.config.scale


def scale() -> int:
    return SHARED.scale


class Globally(Sharing):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * scale()


class Enclosed(Sharing):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scale = lambda: config.scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale()


class Placed(Sharing):
    """A layer that looks for itself in what holds it."""

    def forward(self, x: Tensor) -> Tensor:
        parent = self.__dict__["parent"]
        return super().forward(x) * Config.rates[list(parent.layers).index(self)]


class Drawing(Sharing):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.config.numbers)  # type: ignore[attr-defined]


class Kept(Sharing):
    """The result is also put where the model finds it."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.config.kept.append(result)  # type: ignore[attr-defined]
        return result


class Model(nn.Module):
    """Layers that share what the model changes between them."""

    def __init__(self, kind: type[Sharing]) -> None:
        super().__init__()
        self.config = SHARED if kind is Globally else Config()
        self.first = nn.Linear(8, 8)  # the inputs of all the layers have gradients
        self.layers = nn.ModuleList(kind(self.config) for _ in range(6))
        for layer in self.layers:
            layer.__dict__["parent"] = self if kind is Placed else None

    def forward(self, x: Tensor) -> Tensor:
        config: Any = SHARED if isinstance(self.layers[0], Globally) else self.layers[0].config
        config.calls, config.kept = 0, []
        config.numbers = iter(Config.rates) if isinstance(self.layers[0], Drawing) else None
        x = self.first(x)
        for rate, layer in zip(Config.rates, self.layers, strict=True):
            config.scale = rate
            x = layer(x)
        return x.square().sum() + sum(kept.mean() for kept in config.kept)


@pytest.mark.parametrize("kind", [Fourth, Scaled, Globally, Enclosed, Placed, Drawing, Kept])
def test_layers_that_reach_what_changes_are_traced(kind: type[Sharing], monkeypatch: pytest.MonkeyPatch) -> None:
    copied, traced, count = both(Model(kind), BATCH, monkeypatch)
    assert copied == traced
    assert count == 0


def test_layers_that_share_what_does_not_change_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Config, "rates", (1, 1, 1, 1, 1, 1))
    copied, traced, count = both(Model(Scaled), BATCH, monkeypatch)
    assert copied == traced
    assert count == 4


class Telling(Layer):
    """A layer that says in an argument what it did."""

    def forward(self, x: Tensor, told: dict[str, Any]) -> Tensor:  # type: ignore[override]
        told["scale"] = 3.0
        return super().forward(x)


class Listening(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            told: dict[str, Any] = {}
            x = layer(x, told) * told.get("scale", 1.0)
        return x.square().sum()


def test_layers_that_change_an_argument_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, traced, count = both(Listening(*(Telling() for _ in range(5))), BATCH, monkeypatch)
    assert copied == traced
    assert count == 0


class Spread(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1, keepdim=True).expand(-1, 8)


def test_layers_whose_results_overlap_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, traced, count = both(Stack(*(Spread() for _ in range(5))), BATCH, monkeypatch)
    assert copied == traced
    assert count == 0


class Averaging(Layer):
    """A buffer is another tensor after the forward."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.average = self.average * 0.9 + x.detach().mean(0)
        return super().forward(x)


def test_layers_that_replace_a_buffer_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, traced, count = both(Stack(*(Averaging() for _ in range(5))), BATCH, monkeypatch)
    assert copied == traced
    assert count == 0


def test_passes_of_torch_see_one_node_for_a_copied_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    finish = repeats.Repeats.finish

    def counted(self: repeats.Repeats, graph: fx.Graph) -> None:
        seen.append(len(graph.nodes))
        finish(self, graph)
        seen.append(len(graph.nodes))

    monkeypatch.setattr(repeats.Repeats, "finish", counted)
    copied, traced, count = both(Stack(*(Layer() for _ in range(6))), BATCH, monkeypatch)
    assert copied == traced
    operators, traced_call = 3, 1
    assert count == 3  # the first reads what needs no gradient
    assert seen[1] - seen[0] == count * (operators - 1) - traced_call


def test_a_model_is_traced_whole_if_a_pass_changes_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = repeats.Repeats.finish

    def changed(self: repeats.Repeats, graph: fx.Graph) -> None:
        for node in graph.nodes:
            node.meta.pop("whale_places", None)
        finish(self, graph)

    monkeypatch.setattr(repeats.Repeats, "finish", changed)
    copied, traced, _ = both(Stack(*(Layer() for _ in range(6))), BATCH, monkeypatch)
    assert copied == traced
