"""The two ways to run a graph: the code that torch makes of it, and node by node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from whale.runtime.local_program import LocalCode


class Value:
    """A value that notes when it is made and when it is freed."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events
        events.append(f"made {name}")

    def __del__(self) -> None:
        self.events.append(f"freed {self.name}")

    def joined(self, other: Value, *, mark: str = "") -> Value:
        """A value made of two."""
        return Value(f"({self.name}{mark}{other.name})", self.events)


def both(x: Value, others: list[Value]) -> tuple[Value, Value]:
    """Two values made of several."""
    return x.joined(others[0]), x.joined(others[-1])


class Joins(nn.Module):
    def forward(self, x: Value, y: Value) -> Value:
        """The values joined."""
        return x.joined(y, mark="|")


def graph_of_everything() -> tuple[nn.Module, fx.Graph]:
    graph, root = fx.Graph(), nn.Module()
    root.add_module("joins", Joins())
    root.register_buffer("number", torch.tensor(3.0))
    x, y, _ = (graph.placeholder(name) for name in ("x", "y", "unused"))
    graph.call_module("joins", (y, y))  # nothing reads it
    z = graph.call_method("joined", (x, y), {"mark": "-"})
    pair = graph.call_function(both, (z, [x, z]))
    first, second = (graph.call_function(lambda pair, i: pair[i], (pair, i)) for i in range(2))
    last = graph.call_module("joins", (first, second))
    graph.output((last, graph.get_attr("number")))
    return root, graph


@pytest.mark.parametrize("boxed", [False, True])
def test_a_graph_that_runs_once_frees_values_where_its_code_does(boxed: bool) -> None:
    def events_of(code: LocalCode) -> Iterator[Any]:
        events: list[str] = []
        given = [Value(name, events) for name in "abc"]
        if boxed:
            found, number = code.function(code.root, given)
            assert not given
        else:
            found, number = code(*given)
        return iter((found.name, number, events[:]))

    root, graph = graph_of_everything()
    code = LocalCode(root, graph, boxed=boxed)
    once = replace(code, runs_once=True)
    by_node, by_code = tuple(events_of(once)), tuple(events_of(code))
    assert by_node == by_code
    assert "module" not in once.__dict__  # no code was made
