"""M-to-N transfers: which parts of a value the ranks of one stage send to the ranks of another.

Both stages have the value replicated or sharded, each on its own mesh; the target's shards are intersected with the
source's. If several ranks have the same part, a target reads from itself if it can, otherwise they alternate.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, product

from whale.ir.program import Box, Transfer
from whale.strategies.layout import Interval

Region = tuple[tuple[Interval, ...], ...]
"""The region of a value on a rank: for each dim, ranges of the whole dim, consecutive in its local tensor."""


def transfers(sources: Mapping[int, Region], targets: Mapping[int, Region]) -> tuple[Transfer, ...]:
    """Return the boxes to move so that every target rank has its region.

    >>> whole, left, right = (((0, 4),),), (((0, 2),),), (((2, 4),),)
    >>> [(t.source, t.target, t.source_box, t.target_box) for t in transfers({0: left, 1: right}, {2: whole})]
    [(0, 2, ((0, 2),), ((0, 2),)), (1, 2, ((0, 2),), ((2, 4),))]
    """
    holders: dict[Region, list[int]] = {}
    for rank, region in sources.items():
        holders.setdefault(region, []).append(rank)
    near = _Near(list(holders))
    found = []
    common: dict[Region, list[tuple[list[int], list[tuple[Box, Box]]]]] = {}
    for turn, (target, wanted) in enumerate(targets.items()):
        if wanted not in common:
            pairs = [(holders[region], _common(region, wanted)) for region in near.to(wanted)]
            common[wanted] = [(ranks, boxes) for ranks, boxes in pairs if boxes]
        for ranks, boxes in common[wanted]:
            source = target if target in ranks else ranks[turn % len(ranks)]
            found += [Transfer(source, target, box_a, box_b) for box_a, box_b in boxes]
    return tuple(found)


class _Near:
    """Index of regions by the dim in which they differ most, so that only regions that may overlap are compared."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = regions
        dims = range(len(regions[0]) if regions else 0)
        self.dim = max(dims, key=lambda dim: len({region[dim] for region in regions}), default=None)
        if self.dim is not None:
            along = sorted((*stretch, place) for place, region in enumerate(regions) for stretch in region[self.dim])
            self.places = [place for _, _, place in along]
            self.starts = [start for start, _, _ in along]
            self.reached = list(accumulate((stop for _, stop, _ in along), max))

    def to(self, wanted: Region) -> list[Region]:
        """Regions that overlap with *wanted* in that dim, in order; possibly more."""
        if self.dim is None:
            return list(self.regions)
        found: set[int] = set()
        for start, stop in wanted[self.dim]:
            found.update(self.places[bisect_right(self.reached, start) : bisect_left(self.starts, stop)])
        return [self.regions[place] for place in sorted(found)]


def _common(source: Region, target: Region) -> list[tuple[Box, Box]]:
    """The boxes that two regions share, each by its position in both local tensors."""
    found = []
    for whole_a, local_a in _boxes(source):
        for whole_b, local_b in _boxes(target):
            shared = _intersection(whole_a, whole_b)
            if shared is not None:
                found.append((_within(shared, whole_a, local_a), _within(shared, whole_b, local_b)))
    return found


def region_shape(region: Region) -> tuple[int, ...]:
    """Shape of the local tensor of a region."""
    return tuple(sum(stop - start for start, stop in dim) for dim in region)


@lru_cache(maxsize=65536)
def _boxes(region: Region) -> tuple[tuple[Box, Box], ...]:
    """(place in the whole tensor, place in the local tensor) of every contiguous box of a region."""
    per_dim: list[list[tuple[Interval, Interval]]] = []
    for dim in region:
        offset, pairs = 0, []
        for start, stop in dim:
            pairs.append(((start, stop), (offset, offset + stop - start)))
            offset += stop - start
        per_dim.append(pairs)
    return tuple(
        (tuple([whole for whole, _ in pairs]), tuple([local for _, local in pairs])) for pairs in product(*per_dim)
    )


def _intersection(a: Sequence[Interval], b: Sequence[Interval]) -> Box | None:
    shared = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return None if any(stop <= start for start, stop in shared) else shared


def _within(shared: Box, whole: Box, local: Box) -> Box:
    return tuple(
        (place[0] + s[0] - base[0], place[0] + s[1] - base[0])
        for s, base, place in zip(shared, whole, local, strict=True)
    )
