"""Axis factors compared with numpy: aligned dims have the same elements, and a cut takes the right elements."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from whale.ir.placement import Cut
from whale.strategies.analysis import Analysis
from whale.strategies.axes import Atoms, Dim
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


def taken(atoms: Atoms, dim: Dim, spans: dict[int, tuple[int, int]]) -> np.ndarray:
    """Indices of a dim inside a cut of axis factors."""
    intervals = dim_intervals(Analysis(atoms=atoms), dim, spans)
    return np.concatenate([np.arange(a, b) for a, b in intervals] or [np.arange(0)])


@given(views(), st.data())
def test_a_view_keeps_the_elements_of_every_cut(shapes: tuple[list[int], list[int]], data: st.DataObject) -> None:
    atoms = Atoms()
    left, right = ([atoms.dim(size) for size in shape] for shape in shapes)
    atoms.align(left, right)
    elements = np.arange(prod(shapes[0])).reshape(shapes[0])
    shared = [
        (leaf, i, j)
        for i, dim in enumerate(left)
        for leaf in atoms.leaves(dim)
        for j, other in enumerate(right)
        if atoms.count(other, leaf) == 1
    ]
    for leaf, i, j in shared:
        start = data.draw(st.integers(0, atoms.size(leaf) - 1))
        spans = {leaf: (start, data.draw(st.integers(1, atoms.size(leaf) - start)))}
        kept = elements.take(taken(atoms, left[i], spans), axis=i)
        same = elements.reshape(shapes[1]).take(taken(atoms, right[j], spans), axis=j)
        assert kept.size == same.size
        assert (kept.reshape(-1) == same.reshape(-1)).all()


@given(FACTORS, st.data())
def test_a_split_and_its_join_align_wholly(factors: list[int], data: st.DataObject) -> None:
    atoms = Atoms()
    fused = atoms.dim(prod(factors))
    apart = [atoms.dim(factor) for factor in factors]
    assert atoms.align([fused], apart)
    assert atoms.flat(fused) == [atom for dim in apart for atom in atoms.flat(dim)]


@given(FACTORS, st.data())
def test_segments_are_the_intervals_of_a_cut(factors: list[int], data: st.DataObject) -> None:
    atoms = Atoms()
    dim = atoms.dim(prod(factors))
    atoms.align([dim], [atoms.dim(factor) for factor in factors])
    for leaf in atoms.leaves(dim):
        first = data.draw(st.integers(0, atoms.size(leaf)))
        sizes = (first, atoms.size(leaf) - first)
        cut = Cut(0, atoms.segments(dim, leaf, {}), sizes)
        assert cut.extent == prod(factors)
        for index, start in ((0, 0), (1, first)):
            spans = {leaf: (start, sizes[index])}
            indices = np.concatenate([np.arange(a, b) for a, b in cut.intervals(index)] or [np.arange(0)])
            assert (indices == taken(atoms, dim, spans)).all()
            assert len(indices) == atoms.local_extent(dim, {leaf: sizes[index]}) == cut.local_extent(index)


@given(FACTORS, st.data())
def test_a_cut_of_a_cut_is_one_of_what_is_left(factors: list[int], data: st.DataObject) -> None:
    atoms = Atoms()
    dim = atoms.dim(prod(factors))
    atoms.align([dim], [atoms.dim(factor) for factor in factors])
    found = atoms.leaves(dim)
    if not found:
        return
    outer, inner = data.draw(st.sampled_from(found)), data.draw(st.sampled_from(found))
    start = data.draw(st.integers(0, atoms.size(outer) - 1))
    length = data.draw(st.integers(1, atoms.size(outer) - start))
    left = taken(atoms, dim, {outer: (start, length)})
    available = length if inner == outer else atoms.size(inner)
    again = data.draw(st.integers(0, available))
    cut = Cut(0, atoms.segments(dim, inner, {outer: length}), (again, available - again))
    both = {outer: (start, length), inner: (0, again)}
    if inner == outer:
        both = {outer: (start, again)}
    indices = np.concatenate([np.arange(a, b) for a, b in cut.intervals(0)] or [np.arange(0)]).astype(int)
    assert (left[indices] == taken(atoms, dim, both)).all()


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(2, 4), st.data())
def test_parts_of_unlike_length_are_cut_each(multiples: list[int], heads: int, data: st.DataObject) -> None:
    """A fused projection: query, key and value of other lengths, all cut by heads."""
    atoms = Atoms()
    head = atoms.new(heads)
    sizes = [heads * multiple for multiple in multiples]
    dim = atoms.dim(sum(sizes))
    parts = atoms.split_sum(dim[0], sizes)
    assert parts is not None
    for part, multiple in zip(parts, multiples, strict=True):
        assert atoms.align([[part]], [[head], atoms.dim(multiple)])
    shard = atoms.leaves([parts[0]])[0]
    assert atoms.count(dim, shard) == 1
    start = data.draw(st.integers(0, heads - 1))
    length = data.draw(st.integers(1, heads - start))
    columns = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    expected = [column.reshape(heads, -1)[start : start + length].reshape(-1) for column in columns]
    assert (taken(atoms, dim, {shard: (start, length)}) == np.concatenate(expected)).all()
    cut = Cut(0, atoms.segments(dim, shard, {}), (start, length, heads - start - length))
    assert (np.concatenate([np.arange(a, b) for a, b in cut.intervals(1)]) == np.concatenate(expected)).all()


def test_refining_shows_wherever_the_atom_is() -> None:
    """A weight learns from a later view that its columns are heads."""
    atoms = Atoms()
    weight, activation = atoms.dim(192), atoms.dim(192)
    assert atoms.align([weight], [activation])
    three, heads, width = atoms.dim(3), atoms.dim(4), atoms.dim(16)
    assert atoms.align([activation], [three, heads, width])
    assert [atoms.size(leaf) for leaf in atoms.leaves(weight)] == [3, 4, 16]
    assert atoms.segments(weight, atoms.find(heads[0]), {})[0].outer == 3


def test_grouped_queries_learn_the_heads_of_keys() -> None:
    """repeat_kv: (key heads) -> (key heads, group) -> (query heads)."""
    atoms = Atoms()
    keys, queries, group = atoms.dim(2), atoms.dim(8), atoms.dim(4)
    assert atoms.align([queries], [keys, group])
    assert atoms.count(queries, atoms.find(keys[0])) == 1
    assert [atoms.size(leaf) for leaf in atoms.leaves(queries)] == [2, 4]


def test_views_that_cross_stay_whole_there_and_only_there() -> None:
    atoms = Atoms()
    rows, six, four = atoms.dim(5), atoms.dim(6), atoms.dim(4)
    other, four_first, six_last = atoms.dim(5), atoms.dim(4), atoms.dim(6)
    assert not atoms.align([rows, four, six], [other, six_last, four_first])
    assert atoms.find(rows[0]) == atoms.find(other[0])
    assert not set(atoms.leaves(four)) & set(atoms.leaves(four_first))


def test_unlike_structures_are_refused_and_kept() -> None:
    atoms = Atoms()
    product, parts = atoms.dim(12), atoms.dim(12)
    atoms.align([product], [atoms.dim(3), atoms.dim(4)])
    assert atoms.split_sum(parts[0], (8, 4)) is not None
    assert not atoms.unify(product[0], parts[0])
    assert [atoms.size(leaf) for leaf in atoms.leaves(product)] == [3, 4]
    assert atoms.split_sum(product[0], (6, 6)) is None


def test_a_leaf_in_some_parts_only_does_not_cut_the_whole() -> None:
    atoms = Atoms()
    dim = atoms.dim(12)
    parts = atoms.split_sum(dim[0], (8, 4))
    assert parts is not None
    assert [atoms.count(dim, part) for part in parts] == [-1, -1]
    assert atoms.leaves(dim) == []
