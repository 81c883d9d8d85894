"""Adasum: the gradients of replicas combined in pairs, less of what both point at the more they agree.

Maleki et al., "Scaling distributed training with adaptive summation" (MLSys 2021). Two gradients ``a`` and ``b`` of a
parameter, each that of the mean loss over its replica's own rows, become ``(1 - ab / 2aa) a + (1 - ab / 2bb) b``: their
sum if they are orthogonal, and their mean if they are equal. More are combined by recursion over halves of the list of
replicas. This module knows the tree of pairs, and the ranks; no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

__all__ = ["Adasum", "Pair", "dot_bytes", "levels"]

Pair = tuple[int, int]
"""Positions of two gradients in a list; their combination takes the place of the first."""


@dataclass(frozen=True, kw_only=True)
class Adasum:
    """How the ranks of a bucket combine its gradients.

    Attributes:
        replicas: the ranks of each replica, whose terms of its gradient are summed first.
        rows: of each replica, in all micro-batches of a step; () if the loss is divided by a count of the batch's
            values, as of labels that are not ignored, which each step finds.
        ranks: over which dot products are summed: all that have parts of parameters of the bucket.
        table: the parameters of all buckets of these ranks, in an order that all of them know.
    """

    replicas: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    ranks: tuple[int, ...]
    table: tuple[str, ...]

    def replica_of(self, rank: int) -> int:
        """The position of the replica of which *rank* has a part."""
        return next(position for position, own in enumerate(self.replicas) if rank in own)


def dot_bytes(replicas: int, parameters: int) -> list[int]:
    """The bytes of the products that ranks sum at each level: three of each parameter and pair, in float64.

    >>> dot_bytes(4, parameters=10)
    [480, 240]
    """
    return [24 * parameters * len(pairs) for pairs in levels(replicas)]


@cache
def levels(num: int) -> tuple[tuple[Pair, ...], ...]:
    """The pairs of *num* gradients that are combined, those that can be at the same time together.

    The paper's recursion, over the halves ``[0, n // 2)`` and ``[n // 2, n)``, for any number.

    >>> levels(4), levels(3), levels(1)
    ((((0, 1), (2, 3)), ((0, 2),)), (((1, 2),), ((0, 1),)), ())
    """
    found: list[list[Pair]] = []

    def combine(first: int, stop: int) -> int:
        if stop - first < 2:
            return 0
        middle = first + (stop - first) // 2
        height = max(combine(first, middle), combine(middle, stop))
        if height == len(found):
            found.append([])
        found[height].append((first, middle))
        return height + 1

    combine(0, num)
    return tuple(map(tuple, found))
