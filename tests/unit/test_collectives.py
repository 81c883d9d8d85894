"""Even shards are exchanged with one copy, and in the same layout as part by part."""

from __future__ import annotations

import pytest
import torch

from whale.ir.placement import Cut, Segment
from whale.runtime.collectives import _side_by_side, _stacked, assemble, embed, take


@pytest.mark.parametrize(("shape", "dim"), [((6, 5, 4), 0), ((5, 6, 4), 1), ((4, 5, 6), 2), ((0, 6), 1)])
@pytest.mark.parametrize("inner", [1, 2])
def test_stacked_parts_are_those_that_ranks_hold_and_side_by_side_they_are_the_whole(
    shape: tuple[int, ...], dim: int, inner: int
) -> None:
    cut = Cut(dim, (Segment(1, 6 // inner, inner),), (3, 3) if inner == 1 else (1, 1, 1))
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    stacked = _stacked(x, cut)
    for rank, part in enumerate(stacked):
        assert torch.equal(part, take(x, cut, rank))
    assert stacked.is_contiguous()
    assert torch.equal(_side_by_side(stacked, cut), x)


def test_a_dim_without_rows_is_cut_where_its_inner_part_is() -> None:
    cut = Cut(0, (Segment(0, 8, 2),), (4, 4))  # rows, their tokens, and the experts of each, as one dim
    x = torch.zeros(0, 3)
    parts = [take(x, cut, rank) for rank in range(2)]
    assert [part.shape for part in parts] == [x.shape, x.shape]
    assert assemble(parts, cut).shape == embed(parts[0], cut, 0).shape == x.shape
