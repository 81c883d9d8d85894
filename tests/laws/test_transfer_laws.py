"""Transfers between stages: targets receive the regions that they want, once from each distinct source."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from whale.strategies.transfer import Region, region_shape, transfers

EXTENTS = (1, 5, 12)


@st.composite
def stretches(draw: st.DrawFn, extent: int) -> tuple[tuple[int, int], ...]:
    """Disjoint ascending intervals of a dim, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, extent), min_size=2, max_size=6).filter(lambda c: len(c) % 2 == 0)))
    return tuple(zip(cuts[::2], cuts[1::2], strict=True))


@st.composite
def divided(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """A tensor in parts along a dim, or whole; each on some ranks; some parts are empty."""
    whole = tuple(((0, extent),) for extent in shape)
    if not shape:
        return [whole] * draw(st.integers(1, 3))
    dim = draw(st.integers(0, len(shape) - 1))
    inner = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=5)))
    parts = [(*whole[:dim], (part,), *whole[dim + 1 :]) for part in pairwise((0, *inner, shape[dim]))]
    return draw(st.permutations([part for part in parts for _ in range(draw(st.integers(1, 2)))]))


@st.composite
def sides(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[int, Region], dict[int, Region]]:
    shape = tuple(draw(st.lists(st.sampled_from(EXTENTS), max_size=3)))
    some = st.lists(st.tuples(*(stretches(extent) for extent in shape)), min_size=1, max_size=5)
    sources, targets = draw(st.one_of(divided(shape), some)), draw(st.one_of(divided(shape), some))
    first = draw(st.sampled_from((0, 2, 20)))  # on the same ranks, on some of them, on others
    return shape, dict(enumerate(sources)), dict(enumerate(targets, start=first))


def local(whole: Tensor, region: Region) -> Tensor:
    for dim, own in enumerate(region):
        indices = [index for start, stop in own for index in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.long))
    return whole


@given(sides())
def test_targets_get_what_sources_hold(given: tuple[tuple[int, ...], dict[int, Region], dict[int, Region]]) -> None:
    shape, sources, targets = given
    whole = torch.arange(prod(shape)).reshape(shape) + 1
    kinds = set(sources.values())
    times = torch.zeros(shape, dtype=torch.long)  # in how many parts that differ an element is
    for region in kinds:
        times.view(-1)[local(whole, region).reshape(-1) - 1] += 1
    filled = {rank: torch.zeros(region_shape(region), dtype=torch.long) for rank, region in targets.items()}
    counts = {rank: torch.zeros_like(x) for rank, x in filled.items()}
    for one in transfers(sources, targets):
        there = tuple(slice(start, stop) for start, stop in one.target_box)
        here = tuple(slice(start, stop) for start, stop in one.source_box)
        filled[one.target][there] = local(whole, sources[one.source])[here]
        counts[one.target][there] += 1
    for rank, region in targets.items():
        wanted = local(times, region)
        assert torch.equal(counts[rank], wanted)
        assert torch.equal(filled[rank], torch.where(wanted > 0, local(whole, region), 0))
