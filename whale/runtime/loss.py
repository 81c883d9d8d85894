"""Per-step sums over all ranks: the loss, beside the last sums of gradients, and a check that batches are equal.

Knows ranks and numbers; no stages and no schedules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from whale.errors import UsageError
from whale.ir import range_names
from whale.runtime.agreement import fingerprint
from whale.runtime.launch import World
from whale.runtime.ranges import named
from whale.runtime.refusals import Refusals
from whale.runtime.uploads import upload

__all__ = ["ROUNDING", "GlobalLoss", "LikeBatches", "check_replicas", "look_at"]


class _Sum:
    """An asynchronous sum of a few numbers over all ranks; each is exact up to 2**53. Errors say *what* it is, and
    profiles its *name*."""

    def __init__(
        self, world: World, group: dist.ProcessGroup | None, what: str, name: str, *terms: Tensor | float
    ) -> None:
        self._world, self._what, self._name = world, what, name
        on_host = [0.0 if isinstance(term, Tensor) and term.device.type != "cpu" else float(term) for term in terms]
        self._total = upload(torch.tensor(on_host, dtype=torch.float64), world.device)
        for position, term in enumerate(terms):
            if isinstance(term, Tensor) and term.device.type != "cpu":
                self._total[position] = term
        with named(name):
            work = dist.all_reduce(self._total, group=group, async_op=True)
        assert work is not None
        self.work: dist.Work = work

    def wait(self) -> Tensor:
        """The sums. Raises `WorkerError` if a rank does not come within the timeout; names it."""
        blocking = self._world.device.type == "cpu"
        with named(range_names.WAIT + self._name):
            self._world.failures.wait(self.work, self._what, range(self._world.size), blocking=blocking)
        return self._total


class LikeBatches:
    """A check, as a sum, that all ranks have equal batches: one of another shape would break collectives, and of one
    with other values each rank would compute other parts.

    Args:
        world: all ranks.
        group: of all of them, for this and the loss alone.
        refusals: this is the first collective of a step, in which a rank that refuses it has not-a-numbers.
        given: a text for this rank's batch, equal on all ranks if names, shapes and types are; None if it refuses.
        values: tensors of the batch whose values are to be compared, by a sample.
        replicas: a number for the values of parameters that every rank has.
        term: of a sum over all ranks, in a call that is no step.
    """

    def __init__(
        self,
        world: World,
        group: dist.ProcessGroup | None,
        refusals: Refusals,
        given: str | None,
        values: Sequence[Tensor] = (),
        replicas: Tensor | float = 0.0,
        term: Tensor | float = 0.0,
    ) -> None:
        self._world, self._refusals, self._given, self._num_values = world, refusals, given, len(values)
        self._replicas = replicas
        # All labels are equal if n times the squares' sum is the sum's square, for up to 1024 ranks.
        label = math.nan if given is None else float(crc32(given.encode()) % 2**16)
        if world.size > 1:
            look: Tensor | float = sum((look_at(x) for x in values), 0.0)
            terms = (label, label * label, look, look * look, replicas, replicas * replicas, term)
            self._sum = _Sum(world, group, "what all ranks were given", range_names.COMPARISON_SUM, *terms)
            refusals.joined += 1

    @property
    def work(self) -> dist.Work | None:
        """The collective of the sum; None of one rank."""
        return self._sum.work if self._world.size > 1 else None

    def sum(self) -> Tensor:
        """The sum of the term, after `check` on processors; elsewhere that would wait for the device."""
        if self._world.device.type == "cpu":
            self.check()
        return self._sum.wait()[-1]

    def check(self) -> None:
        """Wait for all ranks.

        Raises:
            UsageError: the batches differ, or a rank refuses the step.
            WorkerError: a rank did not come within the timeout.
        """
        size = self._world.size
        if size == 1:
            return
        labels, squares, looks, squared_looks, replicas, squared_replicas, _ = self._sum.wait().tolist()
        if math.isnan(labels):
            raise self._refusals.found()
        if size * squares != labels * labels:
            told = self._refusals.told_by_all(self._given)
            other = next(rank for rank, given in enumerate(told) if given != told[0])
            raise UsageError(
                f"rank 0 was given {told[0]}, and rank {other} {told[other]}: all ranks take the same steps, with the "
                "same global batch, as whale.shard_dataset gives it, and set the same attributes"
            )
        if size * squared_looks - looks * looks > (size * self._num_values * ROUNDING) ** 2:
            raise UsageError(
                f"the ranks were given {self._given} with other values; give every rank the same global "
                "batch, in one order, as whale.shard_dataset does: without a DistributedSampler, and shuffled by one "
                'seed; or let each bring its own rows, with parallelize(..., batch="local")'
            )
        if size * squared_replicas - replicas * replicas > (size * DRIFT) ** 2:
            check_replicas(self._refusals.told_by_all(float(self._replicas)))


def check_replicas(looks: Sequence[float]) -> None:
    """Compare the numbers of all ranks for the parameters that each has.

    Raises:
        UsageError: they differ; names the ranks.
    """
    others = [rank for rank, look in enumerate(looks) if abs(look - looks[0]) > DRIFT]
    if others:
        raise UsageError(
            f"parameters that all ranks have differ on {'rank' if len(others) == 1 else 'ranks'} "
            f"{', '.join(map(str, others))} from those on rank 0: what changes parameters, gradients or the optimizer "
            "(clipping, a scheduler, a loaded state, an update by hand) must be done on all ranks alike"
        )


DRIFT = 1e-4
"""By how much such numbers differ at most, as a part of their norm: types of devices round updates differently."""

_SAMPLED = 4096
"""Elements of a tensor of a batch of which its values are compared, evenly from all of it."""

ROUNDING = 1e-5
"""By how much equal values differ at most, as a part of their norm: processors round the last bit differently."""


def look_at(x: Tensor) -> Tensor:
    """A number for the values of a tensor, at most about one, by a sample."""
    flat = x.detach().flatten()
    total, norm = fingerprint(flat[:: -(-flat.numel() // _SAMPLED) or 1])
    return torch.where(norm > 0, total / norm, 0.0).nan_to_num(0.5)


class GlobalLoss:
    """The sum of one step's loss over the ranks.

    Args:
        world: all ranks.
        group: of all of them, for this and their batches alone, because a rank may begin long before another.
        counts: whether this rank's loss is a term of the sum.
        dtype: of the sum on all ranks, because a script that compares it must decide equally everywhere.
        terms: of other numbers that are summed with it.
    """

    def __init__(
        self,
        world: World,
        group: dist.ProcessGroup | None,
        counts: bool,
        dtype: torch.dtype,
        terms: Sequence[Tensor | float] = (),
    ) -> None:
        self._world, self._group, self._counts, self._dtype = world, group, counts, dtype
        self._terms = terms
        self._loss: Tensor | None = None
        self._sum: _Sum | None = None

    def begin(self, loss: Tensor | None) -> None:
        """Start the sum with this rank's loss; None if it computes none."""
        self._loss = loss
        if self._world.size > 1:
            term = 0.0 if loss is None or not self._counts else loss.to(torch.float64)
            name = range_names.LOSS_SUM
            self._sum = _Sum(self._world, self._group, "the sum of the loss", name, term, *self._terms)

    def counts(self) -> Tensor:
        """Wait for the sums of the other numbers."""
        assert self._sum is not None
        return self._sum.wait()[1:]

    def finish(self) -> Tensor:
        """Wait for the sum and return it. Raises `WorkerError` if a rank does not come within the timeout."""
        if self._sum is None:
            assert self._loss is not None
            return self._loss
        return self._sum.wait()[0].to(self._dtype, copy=True)
