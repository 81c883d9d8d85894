"""Gradient reduction over the ranks that own a parameter: bucketed, asynchronous, overlapped with the last backward.

Replicas of a stage and stages that share a weight are the same case here: ranks that each have a term of one gradient.
It is a sum, never a mean, because the loss is already divided by a global count. Buckets start in one fixed order, so
all ranks agree on it. This module knows stages only as the numbers that the executor reports as finished, and no
strategies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from whale.errors import ScheduleError, UsageError
from whale.ir import range_names
from whale.runtime.adasum import Combination, Counts, Terms, combined
from whale.runtime.at_host import on_host
from whale.runtime.comm_hooks import CommHook, HookedSum
from whale.runtime.failure import Failures
from whale.runtime.owned import GradientSlot, HeldUnit, Scattered
from whale.runtime.ranges import named
from whale.runtime.sparse_sums import SparseSum

__all__ = ["Bucket", "Reducer", "bucketize"]


Holder = Parameter | GradientSlot
"""Anything to whose gradient a backward adds."""

Update = Callable[[Sequence[Tensor]], None]
"""Steps an optimizer for parameters whose gradients are final."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """A bucket: parameters whose gradients are reduced together.

    Attributes:
        index: of the `ReduceSpec` that this is the local part of.
        parameters: trainable, each once, of one dtype and device; the same list on all ranks.
        ranks: that own them.
        stages: the stages on *this* rank that contribute.
        early: whether it may start within the last backward of its stage, as its `Reduce` says; else it starts at that
            instruction, in the order of all ranks.
        group: the process group of ``ranks``; None if this rank is alone. It is separate from the groups of collectives
            inside stages, because reductions start whenever a gradient is ready.
        unit: holds the stretches in which ranks own the parameters, which are then slots for their gradients; None if
            every rank has all of them.
        each: whether it is summed in every backward of its stage, and not in the last alone.
        dtype: in which ranks exchange gradients and sum them; None: their own.
        adasum: combines the gradients of replicas; None: they are summed.
        rows: that ranks exchange of the sparse gradient of its one parameter; 0: gradients are dense.
        on_host: whether its parameter is in the host's memory.
    """

    index: int
    parameters: tuple[Holder, ...]
    ranks: tuple[int, ...]
    stages: frozenset[int]
    group: dist.ProcessGroup | None
    early: bool = True
    unit: HeldUnit | None = None
    each: bool = False
    dtype: torch.dtype | None = None
    adasum: Combination | None = None
    rows: int = 0
    on_host: bool = False

    def exchanged(self, total: Tensor) -> Tensor:
        """A vector of gradients, as ranks exchange it."""
        return total if self.dtype is None else total.to(self.dtype)


@dataclass(eq=False)
class _Pending:
    """A bucket's state during one step."""

    bucket: Bucket
    stages: set[int]
    ready: set[Holder] = field(default_factory=set)
    total: Tensor | None = None  # the gradients of all parameters, one after the other
    places: dict[Holder, Tensor] = field(default_factory=dict)  # of each gradient in it
    exchanged: Tensor | None = None  # the same in the dtype of the sum, if it is another
    work: dist.Work | HookedSum | None = None
    of_rows: SparseSum | None = None
    own: Tensor | None = None  # sum of this rank's stretch of a unit
    terms: Terms | None = None  # of replicas, to be combined
    started: bool = False  # before its turn

    @property
    def is_complete(self) -> bool:
        return len(self.ready) == len(self.bucket.parameters)


class Reducer:
    """Sums gradients of one rank's buckets, in the order in which they are given, which must be the program's.

    A bucket of one rank alone starts when it is complete, whatever comes before it.

    In a step: `begin`; `arm` before a backward of a stage and `finished` after it, for the last one, and for others if
    `sums_each`; `launch` at the latest when the program says so; `finish`. Existing gradients, from a step whose
    gradients are accumulated, are equal on all ranks: the first rank of a bucket adds to them and the others start
    without, so they count once; to sparse ones all ranks add the sum, and a hook's mean has them on all ranks. They
    remain the same tensors; new gradients are views of their bucket, in which backwards write them (`place`), so that
    nothing is copied, and a bucket of accumulated gradients is summed in place.
    With an update the parameters of a bucket are updated when its sum is there, and its gradients are freed: at most
    two buckets are on their way at a time.
    *failures* knows which rank this is; *transport* has ``all_reduce``: ``torch.distributed``, except in a dry run.
    Gradients of replicas are combined in `finish`, for which *counts* says what each replica's loss is divided by. They
    are no sum, so what is accumulated is on all ranks, to which all add the same. With a *staleness* a step leaves
    owners the sums of that many steps before it, and its own are on their way meanwhile. A *hook* makes the sums that
    it fits, in place of an all-reduce.

    Raises:
        UsageError: parameters of a bucket differ in dtype or device, or one is in two buckets.
    """

    def __init__(
        self, buckets: Sequence[Bucket], failures: Failures, transport: Any = dist, *, staleness: int = 0
    ) -> None:
        self.buckets = tuple(buckets)
        self._failures = failures
        self._transport = transport
        self._pending: list[_Pending] = []
        self._next = 0
        self._round: deque[_Pending] = deque()  # that start in a backward which is not the last
        self._armed: dict[Holder, _Pending] = {}
        self._of: dict[Holder, _Pending] = {}
        self._before: dict[Holder, Tensor] = {}
        self._flying: deque[tuple[_Pending, Scattered | None, bool]] = deque()  # and whether it is the last sum
        self._flying_apart: deque[_Pending] = deque()  # whose gradients are exchanged in another dtype
        self._update: Update | None = None
        self.sums_each = any(bucket.each for bucket in buckets)
        self.counts: Counts | None = None
        self.hook: CommHook | None = None
        self._staleness = staleness
        seen: set[Holder] = set()
        for bucket in self.buckets:
            kinds = {(parameter.dtype, parameter.device) for parameter in bucket.parameters}
            if len(kinds) > 1 or not seen.isdisjoint(bucket.parameters) or len(bucket.parameters) == 0:
                raise UsageError(f"bucket {bucket.index} needs parameters of one dtype and device, each in one bucket")
            seen.update(bucket.parameters)

    def begin(self, update: Update | None = None) -> None:
        """Start a step, in which *update* gets the parameters of each bucket when their gradients are final; these are
        then freed."""
        self._update = update
        self._pending = [_Pending(bucket, set(bucket.stages)) for bucket in self.buckets]
        self._of = {
            parameter: pending
            for pending in self._pending
            if pending.bucket.group is not None or pending.bucket.unit is not None
            for parameter in pending.bucket.parameters
        }
        self._next = 0
        self._armed.clear()
        self._before.clear()
        for bucket in self.buckets:
            if bucket.group is not None or bucket.unit is not None:
                for parameter in bucket.parameters:
                    if isinstance(parameter, GradientSlot):
                        parameter.grad = None
                    elif parameter.grad is not None:
                        self._before[parameter] = parameter.grad
                        if self.hook is not None and self.hook.fits(bucket):
                            parameter.grad.div_(len(bucket.ranks))  # of the mean that a hook makes, all ranks have it
                        elif bucket.adasum is not None or bucket.rows or self._failures.rank != min(bucket.ranks):
                            parameter.grad = None

    def resume(self) -> list[Tensor]:
        """Make the sums that a step has had of earlier micro-batches, without values: for a dry run of a later one."""
        made = []
        for pending in self._pending:
            unit = pending.bucket.unit
            if pending.bucket.each and unit is not None and not unit.unit.on_host:
                pending.own = torch.empty_like(unit.own)
                made.append(pending.own)
        return made

    def arm(self, stage: int, last: bool = True) -> None:
        """Announce the stage's next backward: in its *last* one gradients are final unless another stage adds to
        them."""
        self._land(0)  # those of an earlier micro-batch, which had its forward's time
        for pending in self._pending:
            bucket = pending.bucket
            if bucket.early and pending.stages == {stage} and (last or bucket.each):
                for parameter in bucket.parameters:
                    self._armed[parameter] = pending
                if not last:
                    self._round.append(pending)

    def finished(self, stage: int, last: bool = True) -> None:
        """Announce that the backward is done: missing gradients are zero."""
        if last:
            for pending in self._pending:
                pending.stages.discard(stage)
            self._start_ready()
        else:
            while self._round:
                self._start(self._round.popleft(), last=False)
        for pending in self._armed.values():
            pending.ready.clear()
        self._armed.clear()

    def launch(self, index: int) -> None:
        """Start the bucket, if it has not started.

        Raises:
            ScheduleError: a stage that contributes has not finished, or the program's order is another.
        """
        self._start_ready(index)
        started = [pending.bucket.index for pending in self._pending[: self._next]]
        if index not in started:
            raise ScheduleError(f"bucket {index} cannot be reduced yet; of {self._order()} only {started} have started")

    def finish(self) -> None:
        """Wait for all sums and write them to the parameters' gradients.

        Raises:
            WorkerError: a rank did not come within the timeout; the message names it.
        """
        if self._next < len(self._pending):
            left = [pending.bucket.index for pending in self._pending[self._next :]]
            raise ScheduleError(f"the step ended before buckets {left} were reduced")
        self._land(0)
        self._combine()
        self._flying_apart.clear()
        for pending in self._pending:
            bucket = pending.bucket
            if bucket.unit is not None and pending.own is not None:
                bucket.unit.add_gradients(pending.own)
            if bucket.unit is not None and self._staleness:
                bucket.unit.leave_oldest(self._staleness)
            self._wait(pending)
            self._write(pending)
        self._pending = []
        self._of.clear()
        self._before.clear()

    def _combine(self) -> None:
        """Combine the gradients of replicas."""
        sums = [
            (pending, pending.bucket.adasum, pending.terms)
            for pending in self._pending
            if pending.bucket.adasum is not None and pending.terms is not None
        ]
        if not sums:
            return
        gathers = []
        found = combined([(adasum, terms) for _, adasum, terms in sums], self.counts)
        for (pending, adasum, _), own in zip(sums, found, strict=True):
            pending.terms = None
            if pending.bucket.unit is not None:
                pending.own = pending.bucket.unit.placed(own)
            elif pending.total is not None:
                gathers.append((adasum, adasum.gather(own, pending.total)))
        for adasum, works in gathers:
            adasum.wait(works, adasum.spec.ranks, found[0].device)

    def _wait(self, pending: _Pending) -> None:
        """Wait for the sum of a bucket."""
        bucket = pending.bucket
        work = pending.work if pending.of_rows is None else pending.of_rows.work
        if work is None:
            return
        what = f"the sum of gradient bucket {bucket.index} over ranks {list(bucket.ranks)}"
        with named(range_names.WAIT + range_names.BUCKET_SUM, bucket.index):
            self._failures.wait(work, what, bucket.ranks, blocking=not bucket.parameters[0].is_cuda)
        pending.work = None
        if pending.of_rows is not None:
            with on_host() if bucket.on_host else nullcontext():
                bucket.parameters[0].grad = pending.of_rows.result()
            pending.of_rows = None
        if pending.exchanged is not None and pending.total is not None:
            pending.total.copy_(pending.exchanged)
            pending.exchanged = None

    def _write(self, pending: _Pending) -> None:
        """Write sums to the gradients that were there before the step, where they are not there yet."""
        if pending.bucket.rows:
            (parameter,) = pending.bucket.parameters
            if (before := self._before.get(parameter)) is not None and parameter.grad is not None:
                parameter.grad = before.add_(parameter.grad)
            return
        targets, sources = [], []
        for parameter, total in pending.places.items():
            if (before := self._before.get(parameter)) is not None:
                parameter.grad = before
                if pending.bucket.adasum is not None:
                    before.add_(total)
                elif total is not before:
                    targets.append(before)
                    sources.append(total)
        if targets:
            torch._foreach_copy_(targets, sources)
        _lay_as_parameters(pending.places)

    def place(self, parameter: Holder) -> Tensor | None:
        """The memory of a parameter's gradient if it has none yet, contiguous and with any values; None if it is in no
        bucket."""
        pending = self._of.get(parameter)
        if pending is None or pending.bucket.rows:
            return None
        if pending.total is None:
            self._lay_out(pending)
        return pending.places[parameter]

    def _lay_out(self, pending: _Pending) -> None:
        """Make the memory of a bucket's gradients: that of those which are there already, if it is in one piece."""
        parameters = pending.bucket.parameters
        before = [self._before.get(parameter) for parameter in parameters]
        pending.total = _side_by_side(before) if pending.bucket.adasum is None else None
        if pending.total is not None:
            pending.places = {p: there for p, there in zip(parameters, before, strict=True) if there is not None}
            return
        sizes = [prod(parameter.shape) for parameter in parameters]
        first = parameters[0]
        pending.total = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        # detached: scripts may write to it, as to a gradient of autograd
        pending.places = {
            parameter: part.view(parameter.shape).detach()
            for parameter, part in zip(parameters, pending.total.split(sizes), strict=True)
        }

    def gradient_ready(self, parameter: Tensor) -> None:
        """Record that the gradient of a parameter is ready; stages call it in every backward, so it must be fast."""
        pending = self._armed.get(parameter)  # type: ignore[call-overload]
        if pending is None:
            return
        if parameter in pending.ready:
            raise ScheduleError(f"a parameter of bucket {pending.bucket.index} got two gradients in one backward")
        pending.ready.add(parameter)
        if not pending.is_complete:
            return
        if len(pending.bucket.ranks) == 1:  # no other rank waits for it
            if pending in self._round:
                self._start(pending, last=False)
                self._round.remove(pending)
                if not self._round:
                    return
            else:
                self._start(pending)
                pending.started = True
        self._start_ready()

    def _start_ready(self, launched: int | None = None) -> None:
        """Start buckets, in order, up to the first that is not ready, or that the program has not *launched*."""
        if self._round:
            while self._round and self._round[0].is_complete:
                self._start(self._round.popleft(), last=False)
            return
        while self._next < len(self._pending):
            pending = self._pending[self._next]
            if not pending.started:
                if pending.stages and not pending.is_complete:
                    return
                if not pending.bucket.early and pending.bucket.index != launched:
                    return
                self._start(pending)
            self._next += 1

    def _start(self, pending: _Pending, *, last: bool = True) -> None:
        bucket = pending.bucket
        if bucket.group is None and bucket.unit is None:
            self._step(pending)
            return
        with torch.no_grad(), named(range_names.BUCKET_SUM, bucket.index):
            if bucket.adasum is not None:
                total = self._total(pending) if bucket.unit is None else self._take(pending)
                pending.terms = bucket.adasum.start(bucket.exchanged(total))
                return
            if bucket.unit is not None:
                self._land(1)
                scattered = bucket.unit.scatter(bucket.exchanged(self._take(pending)))
                if self._staleness:
                    bucket.unit.late.append(scattered)
                    return
                self._flying.append((pending, scattered, last))
                return
            if self._update is not None:
                self._land(1)
                self._flying.append((pending, None, last))
            self._sum(pending)

    def _land(self, most: int) -> None:
        """Wait for sums until at most *most* are in flight, of those that hold gradients which are freed then."""
        while len(self._flying) > most:
            pending, scattered, last = self._flying.popleft()
            if scattered is not None:
                assert pending.bucket.unit is not None
                own = pending.bucket.unit.sum_of(scattered)
                pending.own = pending.bucket.unit.added(pending.own, own)
            if last:
                self._step(pending)

    def _step(self, pending: _Pending) -> None:
        """Update the parameters of a bucket by their gradients, which are final, and free these; backwards give a
        gradient after the last operator that reads its parameter."""
        if self._update is None:
            return
        parameters: Sequence[Any] = pending.bucket.parameters
        if (unit := pending.bucket.unit) is not None:
            unit.kept_parameters()  # an owner's rows are sent before it changes them
            if pending.own is not None:
                unit.add_gradients(pending.own)
                pending.own = None
            parameters = list(unit.parameters.values())
        self._wait(pending)
        _lay_as_parameters(parameters)
        self._update(parameters)
        for parameter in parameters:
            parameter.grad = None
        pending.total, pending.places = None, {}

    def _take(self, pending: _Pending) -> Tensor:
        """The gradients of a unit in one vector; its slots have none afterwards."""
        total = self._total(pending)
        pending.total, pending.places = None, {}
        for slot in pending.bucket.parameters:
            slot.grad = None
        return total

    def _sum(self, pending: _Pending) -> None:
        if pending.bucket.rows:
            self._sum_rows(pending)
            return
        total, group = self._total(pending), pending.bucket.group
        if self.hook is not None and self.hook.fits(pending.bucket):
            self._sum_by(self.hook, pending, total)
            return
        if pending.bucket.dtype is not None:
            while len(self._flying_apart) > 1:  # each holds its gradients twice
                self._wait(self._flying_apart.popleft())
            self._flying_apart.append(pending)
            total = pending.exchanged = pending.bucket.exchanged(total)
        pending.work = self._transport.all_reduce(total, op=dist.ReduceOp.SUM, group=group, async_op=True)

    def _sum_by(self, hook: CommHook, pending: _Pending, total: Tensor) -> None:
        """Let a hook make the sum. On a processor it ends here: what a hook does when its first exchange has ended runs
        in a thread, whose order of exchanges would be no other rank's."""
        bucket = pending.bucket
        last = [one.index for one in self.buckets if hook.fits(one)][-1] == bucket.index
        pending.work = hook.start(bucket.index, total, bucket.parameters, last)
        if not total.is_cuda:
            self._wait(pending)

    def _sum_rows(self, pending: _Pending) -> None:
        bucket, (parameter,) = pending.bucket, pending.bucket.parameters
        assert bucket.group is not None
        with on_host() if bucket.on_host else nullcontext():
            pending.of_rows = SparseSum(
                parameter.grad, parameter, bucket.rows, len(bucket.ranks), bucket.group, bucket.dtype, self._transport
            )

    def _total(self, pending: _Pending) -> Tensor:
        """The gradients of a bucket in one vector, with zeros where there are none."""
        parameters = pending.bucket.parameters
        only = parameters[0].grad if len(parameters) == 1 else None
        if pending.total is None and only is not None and not only.is_sparse and only.is_contiguous():
            pending.total, pending.places = only.view(-1), {parameters[0]: only}
        if pending.total is None:
            self._lay_out(pending)
        assert pending.total is not None
        targets, sources = [], []
        for parameter, place in pending.places.items():
            gradient = parameter.grad
            if gradient is None:
                place.zero_()
            elif gradient.is_sparse:
                place.zero_().add_(gradient)
            elif gradient is not place:
                targets.append(place)
                sources.append(gradient)
            if parameter not in self._before:
                parameter.grad = place
        if targets:
            torch._foreach_copy_(targets, sources)
        return pending.total

    def _order(self) -> list[int]:
        return [bucket.index for bucket in self.buckets]


def _lay_as_parameters(parameters: Iterable[Holder]) -> None:
    """Give gradients the strides of their parameters, as autograd does: fused optimizers walk over both in one
    order."""
    for parameter in parameters:
        if not isinstance(parameter, Tensor) or parameter.is_contiguous():
            continue
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse and gradient.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(gradient)


def _side_by_side(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Tensors that follow each other in one storage, as one vector; None if they do not."""
    first = tensors[0]
    if first is None:
        return None
    storage, start = first.untyped_storage()._cdata, first.storage_offset()
    end = start
    for tensor in tensors:
        if tensor is None or not tensor.is_contiguous() or tensor.storage_offset() != end:
            return None
        if tensor.untyped_storage()._cdata != storage:
            return None
        end += tensor.numel()
    return first.as_strided((end - start,), (1,), start)


def bucketize(parameters: Sequence[Parameter], capacity_bytes: int) -> list[tuple[Parameter, ...]]:
    """Divide parameters, in forward order, into buckets in the order in which gradients become ready.

    A parameter larger than the capacity is a bucket of its own, which needs no copy; frozen ones are left out.
    """
    buckets: list[tuple[Parameter, ...]] = []
    current: list[Parameter] = []
    held = 0
    for parameter in reversed(parameters):
        if not parameter.requires_grad:
            continue
        size = parameter.numel() * parameter.element_size()
        first = current[0] if current else parameter
        if current and (
            held + size > capacity_bytes or (first.dtype, first.device) != (parameter.dtype, parameter.device)
        ):
            buckets.append(tuple(current))
            current, held = [], 0
        current.append(parameter)
        held += size
    return [*buckets, tuple(current)] if current else buckets
