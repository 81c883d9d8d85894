"""Data for all sizes from those for a few: numbers are linear, the rest is equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from whale.compile.linear import UnlikeError, of_sizes
from whale.runtime.local_program import LocalCode

aten = torch.ops.aten


class Pair(NamedTuple):
    name: str
    ends: tuple[int, int]


@dataclass(frozen=True)
class Record:
    pairs: tuple[Pair, ...]
    by_rank: dict[int, list[int]]
    is_last: bool = True


def record(length: int, other: int = 7) -> Record:
    return Record((Pair("a", (0, length)), Pair("b", (length - 1, 3 * length + other))), {0: [4], 1: [length // 2]})


@given(st.integers(1, 50), st.integers(51, 99), st.integers(1, 200))
def test_data_are_those_of_the_sizes(one: int, other: int, size: int) -> None:
    found = of_sizes([((2 * n,), record(2 * n)) for n in (one, other)])
    assert found.make((2 * size,)) == record(2 * size)


@given(st.integers(1, 200), st.integers(1, 200))
def test_sizes_vary_independently(length: int, other: int) -> None:
    found = of_sizes([(sizes, record(*sizes)) for sizes in ((10, 3), (20, 3), (20, 5))])
    assert found.make((2 * length, other)) == record(2 * length, other)


def test_products_of_numbers_are_found_with_a_further_point() -> None:
    def areas(height: int, width: int) -> tuple[int, ...]:
        return 3 * (height + 2) * width, height + 2, height * width, height, width // 2, width

    sizes = [(4, 4), (6, 4), (6, 6)]
    assert of_sizes([(own, areas(*own)) for own in sizes]).make((6, 6)) == areas(6, 6)
    assert of_sizes([(own, areas(*own)) for own in [*sizes, (8, 8)]]).make((10, 14)) == areas(10, 14)
    assert of_sizes([((n,), (n, n * n, n**3)) for n in (4, 6, 8)]).make((5,)) == (5, 25, 125)


def test_other_numbers_are_refused_by_a_further_point() -> None:
    for values in [(16, 36, 64), (4, 7, 11), (0, 0, 3)]:
        with pytest.raises(UnlikeError, match="not linear"):
            of_sizes([((n,), value) for n, value in zip((4, 6, 8), values, strict=True)])


def test_the_period_is_that_at_which_all_numbers_are_whole() -> None:
    assert of_sizes([((6,), (3, 2)), ((12,), (6, 4))]).period == 6
    assert of_sizes([((6,), record(6)), ((8,), record(8))]).period == 2
    assert of_sizes([((6,), (5, 7)), ((8,), (7, 9))]).period == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a", "b"), (1.5, 2.5), ((1,), (1, 2)), ({1: 2}, {2: 2}), (True, False), (1, "1"),
        (torch.ones(2), torch.ones(3)), ({1, 2}, {1, 3}), (torch.float32, torch.float64), (record, of_sizes),
    ],
)  # fmt: skip
def test_what_differs_in_more_than_numbers_is_refused(one: Any, other: Any) -> None:
    with pytest.raises(UnlikeError):
        of_sizes([((1,), one), ((2,), other)])


def test_one_object_remains_one_and_what_does_not_change_is_kept() -> None:
    def data(length: int) -> tuple[Any, ...]:
        shared = [length]
        return shared, shared, ["kept"]

    first = data(3)
    made: tuple[Any, ...] = of_sizes([((3,), first), ((4,), data(4))]).make((9,))
    assert made[0] is made[1]
    assert made[0] == [9]
    assert made[2] is first[2]


class Window(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: self.length]


def code(length: int, function: Callable[..., Any] = aten.slice.Tensor) -> LocalCode:
    graph, root = fx.Graph(), nn.Module()
    root.add_module("window", Window(length))
    x = graph.placeholder("x")
    rows = graph.call_function(aten.view.default, (x, [length, 2]))
    part = graph.call_function(function, (graph.call_module("window", (rows,)), 0, 1, length))
    graph.output((part, graph.call_function(aten.new_full.default, (part, [length - 1], 1.0))))
    return LocalCode(root, graph)


def test_one_graph_serves_all_sizes() -> None:
    found = of_sizes([((4,), code(4)), ((6,), code(6))])
    made = {length: found.make((length,)) for length in (4, 6, 9)}
    assert len({own.function for own in made.values()}) == 1
    for length, own in made.items():
        x = torch.arange(2.0 * length)
        assert all(map(torch.equal, own(x), code(length)(x)))


def test_graphs_with_other_operators_are_refused() -> None:
    with pytest.raises(UnlikeError):
        of_sizes([((4,), code(4)), ((6,), code(6, aten.slice_copy.Tensor))])
