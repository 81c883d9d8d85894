"""Data that differ in numbers only, which are linear in sizes, or products of such: from the data for a few sizes to
those for all.

It knows tuples, dataclasses, modules and local graphs; not what they are for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from math import lcm, prod
from types import MethodType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx, nn

from whale.graph.nodes import create_node
from whale.runtime.local_program import LocalCode

__all__ = ["Linear", "OfSizes", "UnlikeError", "of_sizes"]

Sizes = tuple[int, ...]

T = TypeVar("T")


_MOST_FACTORS = 3
"""The most factors of a number: as many as space has dims."""


class UnlikeError(Exception):
    """Data differ in more than numbers."""


@dataclass(frozen=True)
class Linear:
    """A number that is linear in sizes.

    >>> Linear((Fraction(2), Fraction(1, 2))).at((8,))
    6
    """

    coefficients: tuple[Fraction, ...]
    """The constant, then one for each size."""

    def exact(self, sizes: Sizes) -> Fraction:
        """The number for these sizes."""
        constant, *others = self.coefficients
        return constant + sum(c * size for c, size in zip(others, sizes, strict=True))

    def at(self, sizes: Sizes) -> int:
        """The number for these sizes, which are such that it is whole."""
        total = self.exact(sizes)
        assert total.denominator == 1
        return total.numerator


@dataclass(eq=False)
class _Product:
    """A number that is a product of linear ones; they are known when all data are compared."""

    values: Sizes
    factors: tuple[Linear, ...] = ()

    def at(self, sizes: Sizes) -> int:
        """The number for these sizes."""
        return prod(factor.at(sizes) for factor in self.factors)


class OfSizes(Generic[T]):
    """Data for all sizes: *make* has those for some.

    ``period`` is a number of which a size may differ from the given ones by multiples, so that all numbers are whole.
    """

    def __init__(self, data: Any, period: int) -> None:
        self._data, self.period = data, period

    def make(self, sizes: Sizes) -> T:
        """The data for these sizes."""
        found: T = _Making(sizes)(self._data)
        return found


def of_sizes(points: Sequence[tuple[Sizes, T]]) -> OfSizes[T]:
    """The data for all sizes.

    Args:
        points: data for one more combination of sizes than there are sizes, no three of them on a line, and for others,
            which must be those that follow from the first.

    Raises:
        UnlikeError: they differ in more than numbers, or a number is not linear in the sizes and no product of numbers
            that are.
    """
    comparison = _Comparison([sizes for sizes, _ in points])
    data = comparison([value for _, value in points])
    comparison.find_products()
    return OfSizes(data, comparison.period)


@dataclass(frozen=True, eq=False)
class _Changing:
    """Data that depend on sizes."""

    build: Callable[[_Making], Any]


class _Making:
    """Makes the data for some sizes; what is the same object in them remains so."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._made: dict[_Changing, Any] = {}

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, _Changing):
            return x
        if x not in self._made:
            self._made[x] = x.build(self)
        return self._made[x]


class _Comparison:
    """Compares data for several sizes, piece by piece; gives data, or what makes them where they depend on sizes."""

    def __init__(self, sizes: Sequence[Sizes]) -> None:
        self._sizes = sizes
        self._rows = [(Fraction(1), *map(Fraction, own)) for own in sizes[: len(sizes[0]) + 1]]
        self._known: dict[tuple[int, ...], Any] = {}
        self._linears: dict[Sizes, Linear] = {}
        self._products: dict[Sizes, _Product] = {}
        self._alive: list[Any] = []
        self.period = 1

    def __call__(self, xs: Sequence[Any]) -> Any:
        first = xs[0]
        if all(x is first for x in xs[1:]):
            return first
        key = tuple(map(id, xs))
        if key not in self._known:
            self._known[key] = self._compared(xs)
            self._alive.append(xs)
        return self._known[key]

    def _compared(self, xs: Sequence[Any]) -> Any:
        first, kind = xs[0], type(xs[0])
        if any(type(x) is not kind for x in xs[1:]):
            raise UnlikeError(f"{[type(x).__name__ for x in xs]}")
        if kind is int:
            return self._number(xs)
        if isinstance(first, Tensor):
            return self._same(xs, all(x.dtype == first.dtype and torch.equal(x, first) for x in xs[1:]))
        if isinstance(first, (tuple, list)):
            return self._sequence(xs)
        if isinstance(first, Mapping):
            self._same(xs, all(list(x) == list(first) for x in xs[1:]))
            values = {key: self([x[key] for x in xs]) for key in first}
            return self._built(first, list(values.values()), lambda made: dict(zip(values, made, strict=True)))
        if isinstance(first, slice):
            parts = [self([getattr(x, end) for x in xs]) for end in ("start", "stop", "step")]
            return self._built(first, parts, lambda made: slice(*made))
        if isinstance(first, LocalCode):
            return self._code(xs)
        if isinstance(first, nn.Module):
            return self._module(xs)
        if isinstance(first, MethodType):
            self._same(xs, all(x.__func__ is first.__func__ for x in xs[1:]))
            return self._built(first, [self([x.__self__ for x in xs])], lambda made: MethodType(first.__func__, *made))
        if is_dataclass(first):
            names = [field.name for field in fields(first) if field.init]
            parts = [self([getattr(x, name) for x in xs]) for name in names]
            return self._built(first, parts, lambda made: kind(**dict(zip(names, made, strict=True))))
        return self._same(xs, all(bool(x == first) for x in xs[1:]))

    def _same(self, xs: Sequence[Any], equal: bool) -> Any:
        if not equal:
            raise UnlikeError(f"{str(xs[0])[:60]} and {str(xs[-1])[:60]}")
        return xs[0]

    def _built(self, first: Any, parts: Sequence[Any], build: Callable[[list[Any]], Any]) -> Any:
        """An object made of parts; the first one where none depends on sizes."""
        if not any(isinstance(part, _Changing) for part in parts):
            return first
        return _Changing(lambda making: build([making(part) for part in parts]))

    def _sequence(self, xs: Sequence[Any]) -> Any:
        first = xs[0]
        self._same(xs, all(len(x) == len(first) for x in xs[1:]))
        parts = [self(together) for together in zip(*xs, strict=True)]
        named = hasattr(first, "_fields")
        return self._built(first, parts, lambda made: type(first)(*made) if named else type(first)(made))

    def _number(self, xs: Sequence[int]) -> Any:
        if all(x == xs[0] for x in xs[1:]):
            return xs[0]
        number = self._function(tuple(xs))
        return _Changing(lambda making: number.at(making.sizes))

    def _function(self, values: Sizes) -> Linear | _Product:
        """The function of the sizes with these values."""
        if values not in self._linears and values not in self._products:
            linear = self._linear(values)
            if linear is None:
                self._products[values] = _Product(values)
            else:
                self._linears[values] = linear
                self.period = lcm(self.period, *(c.denominator for c in linear.coefficients[1:]))
        return self._linears.get(values) or self._products[values]

    def find_products(self) -> None:
        """Find the factors of numbers that are not linear, among those that are."""
        for values, product in self._products.items():
            factors = self._factors(values, _MOST_FACTORS)
            if factors is None:
                raise UnlikeError(f"{values} are not linear in {self._sizes}, and no product of numbers that are")
            product.factors = factors

    def _factors(self, values: Sizes, most: int) -> tuple[Linear, ...] | None:
        if (linear := self._linear(values)) is not None:
            return (linear,)
        for known, factor in self._linears.items() if most > 1 else ():
            if all(x and not value % x for value, x in zip(values, known, strict=True)):
                rest = self._factors(tuple(value // x for value, x in zip(values, known, strict=True)), most - 1)
                if rest is not None:
                    return factor, *rest
        return None

    def _linear(self, values: Sizes) -> Linear | None:
        """The linear function with these values, by elimination; None if there is none."""
        rows = [[*row, Fraction(value)] for row, value in zip(self._rows, values, strict=False)]
        for column in range(len(rows)):
            pivot = next(row for row in rows[column:] if row[column])
            rows.remove(pivot)
            pivot = [x / pivot[column] for x in pivot]
            rows = [[x - row[column] * y for x, y in zip(row, pivot, strict=True)] for row in rows]
            rows.insert(column, pivot)
        found = Linear(tuple(row[-1] for row in rows))
        if any(found.exact(own) != value for own, value in zip(self._sizes, values, strict=True)):
            return None
        return found

    # Modules and graphs

    def _module(self, xs: Sequence[nn.Module]) -> Any:
        first = xs[0]
        names = [name for name in first.__dict__ if name != "_modules"]
        self._same(xs, all([name for name in x.__dict__ if name != "_modules"] == names for x in xs[1:]))
        own = [self([x.__dict__[name] for x in xs]) for name in names]
        children = self([x._modules for x in xs])

        def build(made: list[Any]) -> nn.Module:
            module = copy.copy(first)
            module.__dict__.update(zip(names, made, strict=False), _modules=made[-1])
            return module

        return self._built(first, [*own, children], build)

    def _code(self, xs: Sequence[LocalCode]) -> Any:
        """One graph for all sizes, which reads its numbers from its root."""
        graph, numbers = self._graph([x.graph for x in xs])
        root = self([x.root for x in xs])
        if not numbers and not isinstance(root, _Changing):
            return xs[0]
        named = {name: values[0] for name, values in numbers.items()}
        common = LocalCode(_with_numbers(xs[0].root, named), graph, boxed=xs[0].boxed)
        common.function  # noqa: B018 - its code is made here, not in the first step that runs it
        functions = {name: self._function(values) for name, values in numbers.items()}

        def build(making: _Making) -> LocalCode:
            held = {name: number.at(making.sizes) for name, number in functions.items()}
            return LocalCode(_with_numbers(making(root), held), graph, unbound=common, boxed=common.boxed)

        return _Changing(build)

    def _graph(self, graphs: Sequence[fx.Graph]) -> tuple[fx.Graph, dict[str, Sizes]]:
        """A copy of equal graphs, and the numbers that it reads by name where they differ."""
        places = {node: place for graph in graphs for place, node in enumerate(graph.nodes)}
        new, nodes = fx.Graph(), list[fx.Node]()
        numbers: dict[Sizes, fx.Node] = {}

        def argument(xs: Sequence[Any]) -> Any:
            first, kind = xs[0], type(xs[0])
            if any(type(x) is not kind for x in xs[1:]):
                raise UnlikeError(f"arguments {xs}")
            if kind is fx.Node:
                self._same(xs, len({places[x] for x in xs}) == 1)
                return nodes[places[first]]
            if isinstance(first, (tuple, list)):
                self._same(xs, len({len(x) for x in xs}) == 1)
                return type(first)(argument(together) for together in zip(*xs, strict=True))
            if isinstance(first, Mapping):
                self._same(xs, all(list(x) == list(first) for x in xs[1:]))
                return {key: argument([x[key] for x in xs]) for key in first}
            if isinstance(first, slice):
                return slice(*(argument([getattr(x, end) for x in xs]) for end in ("start", "stop", "step")))
            if kind is int and len(set(xs)) > 1:
                if tuple(xs) not in numbers:
                    numbers[tuple(xs)] = new.create_node("get_attr", f"number_{len(numbers)}")
                return numbers[tuple(xs)]
            return self._same(xs, all(bool(x == first) for x in xs[1:]))

        for together in zip(*(graph.nodes for graph in graphs), strict=False):
            first = together[0]
            self._same(together, len({(node.op, node.target) for node in together}) == 1)
            args = argument([node.args for node in together])
            kwargs = argument([dict(node.kwargs) for node in together])
            nodes.append(create_node(new, first.op, first.target, args, kwargs, name=first.name))
        self._same(graphs, len({len(graph.nodes) for graph in graphs}) == 1)
        return new, {str(node.target): values for values, node in numbers.items()}


def _with_numbers(root: nn.Module, numbers: Mapping[str, int]) -> nn.Module:
    """A copy of the root of a graph that has these numbers too."""
    made = copy.copy(root)
    made.__dict__.update(numbers)
    return made
