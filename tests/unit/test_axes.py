"""Axis factors compared with numpy: aligned dims have the same elements, and a cut takes the right elements."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from whale.ir.placement import Cut
from whale.strategies.analysis import Analysis
from whale.strategies.axes import AxisFactors, Dim
from whale.strategies.layout import dim_intervals

FACTORS = st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=1, max_size=5)


@st.composite
def views(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of the same elements: one list of factors, grouped in two ways."""
    factors = draw(FACTORS)

    def grouped() -> list[int]:
        shape, current = [], 1
        for factor in factors:
            current *= factor
            if draw(st.booleans()):
                shape.append(current)
                current = 1
        return [*shape, current]

    return grouped(), grouped()


def taken(table: AxisFactors, dim: Dim, spans: dict[int, tuple[int, int]]) -> np.ndarray:
    """Indices of a dim inside a cut of axis factors."""
    ranges = {factor: ((start, start + length),) for factor, (start, length) in spans.items()}
    intervals = dim_intervals(Analysis(factors=table), dim, ranges)
    return np.concatenate([np.arange(a, b) for a, b in intervals] or [np.arange(0)])


@given(views(), st.data())
def test_a_view_keeps_the_elements_of_every_cut(shapes: tuple[list[int], list[int]], data: st.DataObject) -> None:
    table = AxisFactors()
    left, right = ([table.dim(size) for size in shape] for shape in shapes)
    table.align(left, right)
    elements = np.arange(prod(shapes[0])).reshape(shapes[0])
    shared = [
        (one, i, j)
        for i, dim in enumerate(left)
        for one in table.cuttable(dim)
        for j, other in enumerate(right)
        if table.count(other, one) == 1
    ]
    for one, i, j in shared:
        start = data.draw(st.integers(0, table.size(one) - 1))
        spans = {one: (start, data.draw(st.integers(1, table.size(one) - start)))}
        kept = elements.take(taken(table, left[i], spans), axis=i)
        same = elements.reshape(shapes[1]).take(taken(table, right[j], spans), axis=j)
        assert kept.size == same.size
        assert (kept.reshape(-1) == same.reshape(-1)).all()


@given(FACTORS, st.data())
def test_a_split_and_its_join_align_wholly(factors: list[int], data: st.DataObject) -> None:
    table = AxisFactors()
    fused = table.dim(prod(factors))
    apart = [table.dim(factor) for factor in factors]
    assert table.align([fused], apart)
    assert table.flat(fused) == [factor for dim in apart for factor in table.flat(dim)]


@given(FACTORS, st.data())
def test_segments_are_the_intervals_of_a_cut(factors: list[int], data: st.DataObject) -> None:
    table = AxisFactors()
    dim = table.dim(prod(factors))
    table.align([dim], [table.dim(factor) for factor in factors])
    for one in table.cuttable(dim):
        first = data.draw(st.integers(0, table.size(one)))
        sizes = (first, table.size(one) - first)
        cut = Cut(0, table.segments(dim, one, {}), sizes)
        assert cut.extent == prod(factors)
        for index, start in ((0, 0), (1, first)):
            spans = {one: (start, sizes[index])}
            indices = np.concatenate([np.arange(a, b) for a, b in cut.intervals(index)] or [np.arange(0)])
            assert (indices == taken(table, dim, spans)).all()
            assert len(indices) == table.local_extent(dim, {one: sizes[index]}) == cut.local_extent(index)


@given(FACTORS, st.data())
def test_a_cut_of_a_cut_is_one_of_what_is_left(factors: list[int], data: st.DataObject) -> None:
    table = AxisFactors()
    dim = table.dim(prod(factors))
    table.align([dim], [table.dim(factor) for factor in factors])
    found = table.cuttable(dim)
    if not found:
        return
    outer, inner = data.draw(st.sampled_from(found)), data.draw(st.sampled_from(found))
    start = data.draw(st.integers(0, table.size(outer) - 1))
    length = data.draw(st.integers(1, table.size(outer) - start))
    left = taken(table, dim, {outer: (start, length)})
    available = length if inner == outer else table.size(inner)
    again = data.draw(st.integers(0, available))
    cut = Cut(0, table.segments(dim, inner, {outer: length}), (again, available - again))
    both = {outer: (start, length), inner: (0, again)}
    if inner == outer:
        both = {outer: (start, again)}
    indices = np.concatenate([np.arange(a, b) for a, b in cut.intervals(0)] or [np.arange(0)]).astype(int)
    assert (left[indices] == taken(table, dim, both)).all()


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(2, 4), st.data())
def test_parts_of_unlike_length_are_cut_each(multiples: list[int], heads: int, data: st.DataObject) -> None:
    """A fused projection: query, key and value of other lengths, all cut by heads."""
    table = AxisFactors()
    head = table.new(heads)
    sizes = [heads * multiple for multiple in multiples]
    dim = table.dim(sum(sizes))
    parts = table.split_sum(dim[0], sizes)
    assert parts is not None
    for part, multiple in zip(parts, multiples, strict=True):
        assert table.align([[part]], [[head], table.dim(multiple)])
    shard = table.cuttable([parts[0]])[0]
    assert table.count(dim, shard) == 1
    start = data.draw(st.integers(0, heads - 1))
    length = data.draw(st.integers(1, heads - start))
    columns = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    expected = [column.reshape(heads, -1)[start : start + length].reshape(-1) for column in columns]
    assert (taken(table, dim, {shard: (start, length)}) == np.concatenate(expected)).all()
    cut = Cut(0, table.segments(dim, shard, {}), (start, length, heads - start - length))
    assert (np.concatenate([np.arange(a, b) for a, b in cut.intervals(1)]) == np.concatenate(expected)).all()


def test_refining_shows_wherever_the_atom_is() -> None:
    """A weight learns from a later view that its columns are heads."""
    table = AxisFactors()
    weight, activation = table.dim(192), table.dim(192)
    assert table.align([weight], [activation])
    three, heads, width = table.dim(3), table.dim(4), table.dim(16)
    assert table.align([activation], [three, heads, width])
    assert [table.size(one) for one in table.cuttable(weight)] == [3, 4, 16]
    assert table.segments(weight, table.find(heads[0]), {})[0].outer == 3


def test_grouped_queries_learn_the_heads_of_keys() -> None:
    """repeat_kv: (key heads) -> (key heads, group) -> (query heads)."""
    table = AxisFactors()
    keys, queries, group = table.dim(2), table.dim(8), table.dim(4)
    assert table.align([queries], [keys, group])
    assert table.count(queries, table.find(keys[0])) == 1
    assert [table.size(one) for one in table.cuttable(queries)] == [2, 4]


def test_views_that_cross_stay_whole_there_and_only_there() -> None:
    table = AxisFactors()
    rows, six, four = table.dim(5), table.dim(6), table.dim(4)
    other, four_first, six_last = table.dim(5), table.dim(4), table.dim(6)
    assert not table.align([rows, four, six], [other, six_last, four_first])
    assert table.find(rows[0]) == table.find(other[0])
    assert not set(table.cuttable(four)) & set(table.cuttable(four_first))


def test_unlike_structures_are_refused_and_kept() -> None:
    table = AxisFactors()
    product, parts = table.dim(12), table.dim(12)
    table.align([product], [table.dim(3), table.dim(4)])
    assert table.split_sum(parts[0], (8, 4)) is not None
    assert not table.unify(product[0], parts[0])
    assert [table.size(one) for one in table.cuttable(product)] == [3, 4]
    assert table.split_sum(product[0], (6, 6)) is None


def test_a_leaf_in_some_parts_only_does_not_cut_the_whole() -> None:
    table = AxisFactors()
    dim = table.dim(12)
    parts = table.split_sum(dim[0], (8, 4))
    assert parts is not None
    assert [table.count(dim, part) for part in parts] == [-1, -1]
    assert table.cuttable(dim) == []
