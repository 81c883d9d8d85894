"""Axis factors: the common structure of the dims of all tensors of a model.

Every dim of every tensor is a product of *axis factors*. Operators determine which dims are the
same axis; factors are then merged (two dims of the same axis), refined (192 becomes 3 x heads x 16) and cut into sums
(a fused projection of different parts). Refinement is substitution: it applies at once wherever the factor occurs,
forward and backward through the graph, so a weight learns that it consists of heads before any share is cut.

A factor is a size and an identity. This module knows no operator, no device and no placement cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, prod

from whale.ir.placement import Segment

Dim = list[int]
"""A dim as a product of axis factors, major to minor; the empty list is a dim of size 1."""


class AxisFactors:
    """The union-find of axis factors, with product and sum expansions.

    >>> factors = AxisFactors()
    >>> fused, heads, width = factors.dim(192), factors.dim(4), factors.dim(16)
    >>> factors.align([fused], [factors.dim(3), heads, width])
    True
    >>> [factors.size(one) for one in factors.cuttable(fused)]
    [3, 4, 16]
    """

    def __init__(self) -> None:
        self._size: list[int] = []
        self._parent: list[int] = []
        self._product: dict[int, tuple[int, ...]] = {}
        self._sum: dict[int, tuple[int, ...]] = {}

    def new(self, size: int) -> int:
        """Make a new factor of this size (at least 2; size 0 is allowed for empty dims)."""
        self._size.append(size)
        self._parent.append(len(self._parent))
        return len(self._size) - 1

    def dim(self, size: int) -> Dim:
        """Make a new dim of this size."""
        return [] if size == 1 else [self.new(size)]

    def size(self, factor: int) -> int:
        """Number of positions of a factor."""
        return self._size[factor]

    def extent(self, dim: Dim) -> int:
        """Number of positions of a dim."""
        return prod(self._size[factor] for factor in dim)

    def find(self, factor: int) -> int:
        """The representative of a factor."""
        while self._parent[factor] != factor:
            self._parent[factor] = self._parent[self._parent[factor]]
            factor = self._parent[factor]
        return factor

    def flat(self, dim: Sequence[int]) -> list[int]:
        """A dim with its product expansions written out: unrefined factors and sums."""
        result: list[int] = []
        stack = list(reversed(dim))
        while stack:
            factor = self.find(stack.pop())
            if factor in self._product:
                stack.extend(reversed(self._product[factor]))
            else:
                result.append(factor)
        return result

    def parts(self, factor: int) -> tuple[int, ...] | None:
        """The consecutive parts of a factor that is a sum; None for others."""
        return self._sum.get(self.find(factor))

    # Refinement

    def split_sum(self, factor: int, sizes: Sequence[int]) -> tuple[int, ...] | None:
        """Cut a factor into consecutive parts of these sizes; None if it has another structure."""
        factor = self.find(factor)
        if factor in self._product:
            return None
        if factor in self._sum:
            parts = self._sum[factor]
            return parts if tuple(self._size[p] for p in parts) == tuple(sizes) else None
        self._sum[factor] = tuple(self.new(size) for size in sizes)
        return self._sum[factor]

    def _split_product(self, factor: int, major: int) -> tuple[int, int] | None:
        """Refine an unrefined factor into (major, rest)."""
        if factor in self._sum:
            return None
        pair = (self.new(major), self.new(self._size[factor] // major))
        self._product[factor] = pair
        return pair

    def unify(self, a: int, b: int) -> bool:
        """Merge two factors of equal size. Returns False, and records nothing false, if their structures contradict."""
        a, b = self.find(a), self.find(b)
        if a == b:
            return True
        if self._size[a] != self._size[b]:
            return False
        a_plain = a not in self._product and a not in self._sum
        b_plain = b not in self._product and b not in self._sum
        if a_plain or b_plain:
            child, parent = (a, b) if a_plain else (b, a)
            if not self._occurs(child, parent):
                self._parent[child] = parent
            return True
        if a in self._product and b in self._product:
            if not self.align([self._product[a]], [self._product[b]]):
                return False
        elif a in self._sum and b in self._sum:
            parts_a, parts_b = self._sum[a], self._sum[b]
            if [self._size[p] for p in parts_a] != [self._size[p] for p in parts_b]:
                return False
            merged = [self.unify(x, y) for x, y in zip(parts_a, parts_b, strict=True)]
            if not all(merged):
                return False
        else:
            return False
        self._parent[a] = b
        return True

    def _occurs(self, wanted: int, factor: int) -> bool:
        factor = self.find(factor)
        if factor == wanted:
            return True
        children = self._product.get(factor, ()) + self._sum.get(factor, ())
        return any(self._occurs(wanted, child) for child in children)

    def align(self, left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> bool:
        """Merge two lists of dims with the same number of elements (a view). Returns whether all of it was possible."""
        a = list(reversed(self.flat([x for dim in left for x in dim])))
        b = list(reversed(self.flat([x for dim in right for x in dim])))
        whole = True
        while a and b:
            x, y = self.find(a.pop()), self.find(b.pop())
            if x == y:
                continue
            if x in self._product or y in self._product:  # refined by an earlier step of this loop
                a.extend(reversed(self.flat([x])))
                b.extend(reversed(self.flat([y])))
                continue
            size_x, size_y = self._size[x], self._size[y]
            if size_x == size_y:
                if not self.unify(x, y):
                    whole = False
                continue
            common = gcd(size_x, size_y)
            parts_x = self._split_product(x, common) if common not in (1, size_x) else None
            parts_y = self._split_product(y, common) if common not in (1, size_y) else None
            if (parts_x or size_x == common) and (parts_y or size_y == common):
                a.extend(reversed(parts_x or (x,)))
                b.extend(reversed(parts_y or (y,)))
                continue
            whole = False  # e.g. [6, 4] seen as [4, 6]: skip to where both sides meet again
            while size_x != size_y:
                if size_x < size_y:
                    if not a:
                        return False
                    size_x *= self._size[a.pop()]
                else:
                    if not b:
                        return False
                    size_y *= self._size[b.pop()]
        return whole

    # Reading a refined dim

    def count(self, dim: Sequence[int], along: int) -> int:
        """How *along* cuts this dim: 1 if the dim can be sharded by it; 0 if not at all; -1 if only in places."""
        total = 0
        for factor in self.flat(dim):
            if factor == along:
                total += 1
            elif factor in self._sum:
                counts = {self.count([part], along) for part in self._sum[factor]}
                if counts == {0}:
                    continue
                if len(counts) > 1 or -1 in counts:
                    return -1
                total += counts.pop()
        return total

    def cuttable(self, dim: Sequence[int]) -> list[int]:
        """The factors by which a dim can be sharded, major to minor."""
        found: list[int] = []

        def visit(factors: Sequence[int]) -> None:
            for factor in self.flat(factors):
                if factor in self._sum:
                    for part in self._sum[factor]:
                        visit([part])
                elif factor not in found:
                    found.append(factor)

        visit(dim)
        return [factor for factor in found if self.count(dim, factor) == 1]

    def local_extent(self, dim: Sequence[int], local: Mapping[int, int]) -> int:
        """Length of a dim if the factors in *local* have these numbers of positions instead of all."""
        total = 1
        for factor in self.flat(dim):
            if factor in self._sum:
                total *= sum(self.local_extent([part], local) for part in self._sum[factor])
            else:
                total *= local.get(factor, self._size[factor])
        return total

    def segments(self, dim: Sequence[int], along: int, local: Mapping[int, int]) -> tuple[Segment, ...]:
        """The ranges of a dim that a cut along *along* passes through.

        *local* gives the lengths of factors that are already cut, including *along* itself if it is cut twice.
        """
        factors = self.flat(dim)
        sizes = [self.local_extent([factor], local) for factor in factors]
        for position, factor in enumerate(factors):
            outer, inner = prod(sizes[:position]), prod(sizes[position + 1 :])
            if factor == along:
                return (Segment(outer, local.get(along, self._size[along]), inner),)
            if factor in self._sum and self.count([factor], along) == 1:
                parts: tuple[Segment, ...] = ()
                for part in self._sum[factor]:
                    parts += self.segments([part], along, local)
                scaled = tuple(Segment(s.outer, s.size, s.inner * inner) for s in parts)
                return scaled * outer
        raise KeyError(f"axis factor {along} does not cut this dim")
