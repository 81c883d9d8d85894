"""Adasum over ranks: each gets the terms of its stretch of a bucket from the others, and combines them in pairs.

Terms travel while backwards go on, as many bytes as in a reduce-scatter. Then the ranks go through the levels of the
tree of pairs together, for all buckets at once: a level needs the dot products of whole parameters, of which every
rank has those of its stretches and shards, and one all-reduce of a few numbers sums them. At last the stretches are
gathered, unless each rank owns the state of its own. This module knows buckets as vectors with parameters one after
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from whale.ir import range_names
from whale.ir.adasum import Pair, levels
from whale.ir.program import ReduceSpec
from whale.runtime.failure import Failures
from whale.runtime.messages import Work
from whale.runtime.owned import exchange
from whale.runtime.ranges import named
from whale.runtime.uploads import upload

__all__ = ["Combination", "Terms", "combined"]

Counts = Callable[[], Tensor]
"""The count by which the loss of each replica is divided, in float64."""


class Terms(NamedTuple):
    """Terms of a rank's stretch on their way: those of all ranks of the bucket, and what has to be waited for."""

    pieces: list[Tensor]
    works: Sequence[Work]


class Combination:
    """The Adasum of one bucket on one rank.

    Args:
        spec: of the bucket.
        names: of its parameters.
        sizes: elements of each on this rank.
        rank: this one.
        group: the process group of the bucket's ranks.
        dots_group: that of all ranks with parts of its parameters.
        failures: waits.
        transport: has ``isend``, ``irecv`` and ``all_reduce``.
    """

    def __init__(
        self,
        spec: ReduceSpec,
        names: Sequence[str],
        sizes: Sequence[int],
        rank: int,
        group: Any,
        dots_group: Any,
        failures: Failures,
        transport: Any = dist,
    ) -> None:
        assert spec.adasum is not None
        self.spec, self.adasum = spec, spec.adasum
        self.group, self.dots_group = group, dots_group
        self.failures, self.transport = failures, transport
        self.position = spec.ranks.index(rank)
        num, total = len(spec.ranks), sum(sizes)
        self.bounds = spec.bounds or tuple(total * place // num for place in range(num + 1))
        first, last = self.bounds[self.position : self.position + 2]
        number = {name: place for place, name in enumerate(self.adasum.table)}
        numbers: list[int] = []
        self.lengths: list[int] = []
        start = 0
        for name, size in zip(names, sizes, strict=True):
            held = min(start + size, last) - max(start, first)
            if held > 0:
                numbers.append(number[name])
                self.lengths.append(held)
            start += size
        self._both = torch.tensor([numbers, self.lengths], dtype=torch.int64)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The numbers in the table of the parameters of this rank's stretch, and their lengths, on a device."""
        if self._both.device != device:
            self._both = upload(self._both, device)
        numbers, lengths = self._both
        return numbers, lengths

    def start(self, total: Tensor) -> Terms:
        """Start to exchange the terms of a vector of the whole bucket."""
        outgoing = [total[start:stop] for start, stop in pairwise(self.bounds)]
        own = outgoing[self.position]
        incoming = [own if at == self.position else torch.empty_like(own) for at in range(len(outgoing))]
        works = exchange(outgoing, incoming, self.spec.ranks, self.position, self.group, self.transport)
        return Terms(incoming, works)

    def gather(self, own: Tensor, total: Tensor) -> Sequence[Work]:
        """Start to gather a vector of the whole bucket from the stretches of all ranks, of which this has its *own*."""
        incoming = [total[start:stop] for start, stop in pairwise(self.bounds)]
        own = incoming[self.position].copy_(own)
        return exchange([own] * len(incoming), incoming, self.spec.ranks, self.position, self.group, self.transport)

    def wait(self, works: Sequence[Work], ranks: Sequence[int], device: torch.device) -> None:
        """Wait for communication."""
        what = f"the combination of gradient bucket {self.spec.index} over ranks {list(ranks)}"
        for work in works:
            self.failures.wait(work, what, ranks, blocking=device.type != "cuda")

    def gradients(self, terms: Terms, counts: Tensor | None) -> list[Tensor]:
        """This rank's stretch of each replica's gradient of the mean loss over its own rows, in float32 at least.

        The terms are those of the mean over all rows. *counts* are what the loss is divided by in each replica.
        """
        device = terms.pieces[0].device
        with named(range_names.WAIT + range_names.BUCKET_SUM, self.spec.index):
            self.wait(terms.works, self.spec.ranks, device)
        dtype = torch.promote_types(terms.pieces[0].dtype, torch.float32)
        if self.adasum.rows:
            counts = upload(torch.tensor(self.adasum.rows, dtype=torch.float64), device)
        factors = None
        if counts is not None:
            factors = torch.where(counts > 0, counts.sum() / counts, 1.0).to(dtype)
        position = {rank: place for place, rank in enumerate(self.spec.ranks)}
        found = []
        for number, replica in enumerate(self.adasum.replicas):
            first, *others = (terms.pieces[position[rank]] for rank in replica)
            held = first.to(
                dtype, copy=replica[0] == self.spec.ranks[self.position]
            )  # a received one is not read again
            for other in others:
                held += other
            found.append(held if factors is None else held.mul_(factors[number]))
        return found

    def add_dots(self, gradients: Sequence[Tensor], pairs: Sequence[Pair], dots: Tensor) -> None:
        """Write this rank's terms of ``ab``, ``aa`` and ``bb`` of each pair into *dots* (pair, parameter, product)."""
        if not self.lengths:
            return
        a, b = (torch.stack([gradients[pair[side]] for pair in pairs]) for side in (0, 1))
        numbers, _ = self._on(dots.device)
        for place, product in enumerate((a * b, a.square(), b.square())):
            sums = [part.sum(-1, dtype=torch.float64) for part in product.split(self.lengths, -1)]
            dots[:, numbers, place] = torch.stack(sums, -1)

    def combine(self, gradients: list[Tensor], pairs: Sequence[Pair], factors: Tensor) -> None:
        """Replace the gradients of each pair by their combination, with *factors* (side, pair, parameter)."""
        if not self.lengths:
            return
        numbers, lengths = self._on(factors.device)
        own = factors[:, :, numbers].to(gradients[0].dtype)
        for number, (first, second) in enumerate(pairs):
            both = own[:, number].repeat_interleave(lengths, -1, output_size=sum(self.lengths))
            gradients[first].mul_(both[0]).addcmul_(gradients[second], both[1])


def combined(sums: Sequence[tuple[Combination, Terms]], counts: Counts | None) -> list[Tensor]:
    """Combine the gradients of all buckets of a rank. All ranks must call it, after the same backwards.

    Args:
        sums: the buckets, and what is on its way of each.
        counts: of the step, if the loss is divided by such a count; None: nothing is known of it, as in a dry run.

    Returns:
        this rank's stretch of each bucket.
    """
    told = None if counts is None or all(one.adasum.rows for one, _ in sums) else counts()
    held = [(one, one.gradients(terms, told)) for one, terms in sums]
    tables: dict[tuple[tuple[int, ...], int], list[tuple[Combination, list[Tensor]]]] = {}
    for one, gradients in held:
        tables.setdefault((one.adasum.ranks, len(one.adasum.replicas)), []).append((one, gradients))
    most = max(len(levels(num)) for _, num in tables)
    for level in range(most):
        for (ranks, num), members in sorted(tables.items(), key=lambda item: item[0]):
            if level < len(levels(num)):
                _combine(members, levels(num)[level], ranks)
    return [gradients[0] for _, gradients in held]


def _combine(
    members: Sequence[tuple[Combination, list[Tensor]]], pairs: Sequence[Pair], ranks: tuple[int, ...]
) -> None:
    """Combine pairs of gradients of parameters of which *ranks* have parts."""
    first, gradients = members[0]
    device = gradients[0].device
    dots = torch.zeros(len(pairs), len(first.adasum.table), 3, dtype=torch.float64, device=device)
    for one, own in members:
        one.add_dots(own, pairs, dots)
    work = first.transport.all_reduce(dots, op=dist.ReduceOp.SUM, group=first.dots_group, async_op=True)
    first.wait([work], ranks, device)
    # A part that several ranks have, as those of a tensor group have a norm's, counts in all three as often.
    factors = torch.stack([_factor(dots, square) for square in (1, 2)])
    for one, own in members:
        one.combine(own, pairs, factors)


def _factor(dots: Tensor, square: int) -> Tensor:
    """How much of one side of each pair goes into the combination; all of one without a norm, which is zero."""
    return torch.where(dots[..., square] > 0, 1 - dots[..., 0] / (2 * dots[..., square]), 1.0)
