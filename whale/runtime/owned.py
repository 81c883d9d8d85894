"""Buckets whose parameters, gradients and optimizer states are divided among their ranks: each owns a stretch.

A script has the parameters that its rank owns, as rows of the local model's. Tasks read whole ones, which are gathered
from the stretches; gradients are summed to their owners. Where they are gathered once a step, the owned stretch is a
part of the whole buffer, so that nothing is held twice; else the whole is made for a task and freed after its last use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale.ir import range_names
from whale.ir.program import ReduceSpec
from whale.runtime.collectives import DryGroup, gather_single, reduce_scatter_single
from whale.runtime.failure import Failures
from whale.runtime.local_program import Intervals
from whale.runtime.ranges import named

__all__ = ["GradientSlot", "HeldTensors", "HeldUnit", "Scattered", "Unit", "exchange", "rows_of"]

ALIGNED_BYTES = 16
"""A multiple of the size of any element."""

Rows = tuple[int, int]
"""A half-open range of indices of the first dim."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A bucket whose ranks own stretches of it.

    Attributes:
        spec: of its sum; its ``bounds`` are those of the stretches.
        names: of its parameters, which lie in it one after the other.
        shapes: of their parts on each of its ranks.
        dtype: of all of them.
        read_as: the dtype in which each is gathered, because all that read it cast it to that first.
        on_host: whether the stretches, their gradients and optimizer states are in the host's memory.
        readers: the places in the model of the first and the last operator that reads one of its parameters.
    """

    spec: ReduceSpec
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    read_as: tuple[torch.dtype, ...]
    on_host: bool = False
    readers: tuple[int, int] = (0, 0)

    @property
    def is_cast(self) -> bool:
        """Whether a parameter is gathered in another dtype than its own: the whole unit is bytes then."""
        return any(dtype != self.dtype for dtype in self.read_as)

    def bytes_up_to(self, element: int) -> int:
        """The bytes of the gathered unit before one of its elements; parameters begin where any dtype may."""
        begin = 0
        for (_, _, start, stop), dtype in zip(self.places(), self.read_as, strict=True):
            if element < stop:
                return begin + max(0, element - start) * dtype.itemsize
            begin += -(-(stop - start) * dtype.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES
        return begin

    @cached_property
    def whole_bytes(self) -> int:
        """The bytes of the gathered unit."""
        return self.bytes_up_to(self.spec.bounds[-1]) if self.is_cast else self.spec.bounds[-1] * self.dtype.itemsize

    def places(self) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """Name, shape and place of each parameter."""
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            yield name, shape, start, start + prod(shape)
            start += prod(shape)

    def rows(self, position: int) -> dict[str, Rows]:
        """The rows of each parameter that a rank owns, by its position among the unit's; a scalar has one row."""
        first, last = self.spec.bounds[position : position + 2]
        found = {}
        for name, shape, start, stop in self.places():
            row = (stop - start) // (shape[0] or 1) if shape else 1
            begin, end = max(start, first), min(stop, last)
            if start == stop:  # without elements: everyone has it
                found[name] = (0, shape[0])
            elif begin < end:
                found[name] = ((begin - start) // row, (end - start) // row)
        return found

    def owners(self) -> Iterator[tuple[int, dict[str, Rows]]]:
        """Each rank, with the rows that it owns."""
        for position, rank in enumerate(self.spec.ranks):
            yield rank, self.rows(position)


def rows_of(part: Intervals, start: int, stop: int) -> Intervals:
    """Some rows of a part of a tensor, counted within the part."""
    if not part:
        return part
    held, place = [], 0
    for first, last in part[0]:
        begin, end = max(start, place), min(stop, place + last - first)
        if begin < end:
            held.append((first + begin - place, first + end - place))
        place += last - first
    return (tuple(held), *part[1:])


class GradientSlot:
    """In place of a parameter of which a rank owns some rows or none: its whole gradient in a step."""

    requires_grad = True

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.is_cuda = device.type == "cuda"
        self.grad: Tensor | None = None


@dataclass(eq=False)
class _Arriving:
    """Parameters that are being gathered."""

    whole: Tensor
    works: list[dist.Work]
    copied: torch.cuda.Event | None = None


class Scattered(NamedTuple):
    """A sum in flight: the vector of the whole unit, and what this rank gets: the sum, or the terms of other ranks."""

    total: Tensor
    received: Tensor
    works: Sequence[dist.Work] = ()


class HeldUnit:
    """A unit on one rank. The owned parameters become views of its stretch, until a script gives one other memory: then
    parameters stay where they are, as what else has that memory must, and the stretch has their values in each step.

    Args:
        unit: which.
        rank: that holds it.
        tensors: the parameters that it owns, by name; new ones are made of those that are missing.
        device: of all of its tensors.
        group: of the gathers; a dry one makes no calls.
        sum_group: of the sums, which a gather ahead does not wait for.
        failures: waits.
        is_shared: whether a script has had the tensors already, and may have their memory under other names.
    """

    def __init__(
        self,
        unit: Unit,
        rank: int,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        group: Any,
        sum_group: Any,
        failures: Failures,
        *,
        is_shared: bool = False,
    ) -> None:
        self.unit, self.group, self.sum_group = unit, group, sum_group
        self.failures, self.device = failures, device
        self.bounds = unit.spec.bounds
        self.position = unit.spec.ranks.index(rank)
        self.keeps_whole = unit.spec.gathers == "step" and not unit.is_cast
        self.cuts = tuple(map(unit.bytes_up_to, self.bounds)) if unit.is_cast else self.bounds
        self._whole: Tensor | None = None
        self._parameters: tuple[Tensor, ...] = ()
        self._is_apart = is_shared
        self.owned: dict[str, tuple[Tensor, Tensor]] = {}
        """Each parameter that the rank owns, and the elements of its stretch that are this parameter's."""
        self._make()
        for name, elements in self._elements():
            tensor = tensors.get(name)
            self.owned[name] = nn.Parameter(elements) if tensor is None else tensor, elements
            if tensor is not None and not is_shared:
                with torch.no_grad():
                    tensor.data = elements.copy_(tensor)
        self.slots = {
            name: GradientSlot(shape, unit.dtype, device) for name, shape in zip(unit.names, unit.shapes, strict=True)
        }
        self._arriving: _Arriving | None = None
        self.late: deque[Scattered] = deque()
        """Sums of earlier steps that are on their way."""

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self.unit.dtype, device=self.device)

    def _empty_whole(self) -> Tensor:
        """Memory for the gathered unit: elements, or bytes of several dtypes."""
        dtype = torch.uint8 if self.unit.is_cast else self.unit.dtype
        return torch.empty(self.cuts[-1], dtype=dtype, device=self.device)

    def _on_host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self.unit.dtype, pin_memory=self.device.type == "cuda")

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Owned parameters, by name."""
        return {name: tensor for name, (tensor, _) in self.owned.items()}

    def _make(self) -> None:
        """Make a stretch."""
        first, last = self.bounds[self.position : self.position + 2]
        if self.unit.on_host:
            own = self._on_host(last - first)
        else:
            own = self._empty(self.bounds[-1])[first:last] if self.keeps_whole else self._empty(last - first)
        self._use(own)

    def _use(self, own: Tensor) -> None:
        """Let this be the stretch; where the whole is kept on its device it is a part of that."""
        self.own = own
        if self.keeps_whole and (self._whole is None or not self.unit.on_host):
            whole = self._empty(self.bounds[-1]) if self.unit.on_host else own.as_strided((self.bounds[-1],), (1,), 0)
            self._whole, self._parameters = whole, self._views(whole)
        self.owned = {name: (self.owned[name][0], x) for name, x in self._elements() if name in self.owned}

    def _elements(self) -> Iterator[tuple[str, Tensor]]:
        """The elements of the stretch that are those of each parameter of which the rank owns some."""
        first, last = self.bounds[self.position : self.position + 2]
        rows = self.unit.rows(self.position)
        for name, shape, start, stop in self.unit.places():
            if start < stop and name in rows:
                elements = self.own[max(start, first) - first : min(stop, last) - first]
                yield name, elements.view(-1, *shape[1:]) if shape else elements.view(shape)

    def take_own(self) -> None:
        """Take the values of owned parameters to which a script gave other memory. That memory is not changed, for a
        script may have it under other names; and the stretch that they were parts of is left to those who have it."""
        if all(_place(tensor) == _place(elements) for tensor, elements in self.owned.values()):
            return
        if (stretch := self._found_stretch()) is not None:
            self._is_apart = False
            self._use(stretch)
            return
        if not self._is_apart:
            self._is_apart = True
            self._make()
        with torch.no_grad():
            for tensor, elements in self.owned.values():
                elements.copy_(tensor)

    def _found_stretch(self) -> Tensor | None:
        """The memory of owned parameters if it is such a stretch, as after a script has given theirs back."""
        tensor, _ = next(iter(self.owned.values()))
        storage, own = tensor.untyped_storage(), self.own.untyped_storage()
        if storage.nbytes() != own.nbytes() or storage.device != own.device:
            return None
        for tensor, elements in self.owned.values():
            if tensor.untyped_storage()._cdata != storage._cdata or tensor.stride() != elements.stride():
                return None
            if tensor.storage_offset() != elements.storage_offset():
                return None
        empty = torch.empty(0, dtype=self.unit.dtype, device=storage.device)
        return empty.set_(storage, self.own.storage_offset(), (len(self.own),), (1,))

    def _views(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The parameters in the gathered unit."""
        places = zip(self.unit.places(), self.unit.read_as, strict=True)
        if not self.unit.is_cast:
            return tuple(whole[start:stop].view(shape) for (_, shape, start, stop), _ in places)
        return tuple(
            whole[(begin := self.unit.bytes_up_to(start)) : begin + (stop - start) * dtype.itemsize]
            .view(dtype)
            .view(shape)
            for (_, shape, start, stop), dtype in places
        )

    # Gathers

    def begin(self) -> None:
        """Start to gather the parameters for a step."""
        if self._whole is None:
            self._whole = self._empty_whole()
            self._parameters = self._views(self._whole)
        with self._copying():
            if not self.keeps_whole or self.unit.on_host:
                self._put_own(self._whole)
            self._arriving = self._gathered(self._whole)

    def kept_parameters(self) -> tuple[Tensor, ...]:
        """Wait for the parameters that are gathered for the step, and return them."""
        if self._arriving is not None:
            self._wait(self._arriving)
            self._arriving = None
        return self._parameters

    def finish(self) -> None:
        """End a step: free the parameters, unless this rank's stretch is a part of them. What no task has read arrives
        first, because an optimizer may write to the stretch that others still read."""
        self.kept_parameters()
        if not self.keeps_whole:
            self._whole, self._parameters = None, ()

    def start(self) -> _Arriving:
        """Start to gather the parameters for a task."""
        whole = self._empty_whole()
        with self._copying():
            self._put_own(whole)
            return self._gathered(whole)

    def arrived(self, arriving: _Arriving) -> tuple[Tensor, ...]:
        """Wait for parameters, and return them."""
        self._wait(arriving)
        return self._views(arriving.whole)

    def _put_own(self, whole: Tensor) -> None:
        first, last = self.bounds[self.position : self.position + 2]
        if not self.unit.is_cast:
            whole[first:last].copy_(self.own, non_blocking=True)
            return
        for (_, _, start, stop), dtype in zip(self.unit.places(), self.unit.read_as, strict=True):
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                place = self.unit.bytes_up_to(begin)
                held = whole[place : place + (end - begin) * dtype.itemsize].view(dtype)
                held.copy_(self.own[begin - first : end - first], non_blocking=True)

    def _copying(self) -> AbstractContextManager[Any]:
        """Copies from the host run beside the computation, into its memory."""
        if not self.unit.on_host or self.device.type != "cuda":
            return nullcontext()
        stream = _copy_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(stream)

    def _gathered(self, whole: Tensor) -> _Arriving:
        with named(range_names.BUCKET_GATHER, self.unit.spec.index):
            works = self._gather(whole) if len(self._sizes) > 1 else []
        copied = None
        if self.unit.on_host and self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        return _Arriving(whole, works, copied)

    def _gather(self, whole: Tensor) -> list[dist.Work]:
        sizes = [stop - start for start, stop in pairwise(self.cuts)]
        if isinstance(self.group, DryGroup):
            self.group.note("all_gather", whole, *((size,) for size in sizes))
            return []
        pieces = [whole[start:stop] for start, stop in pairwise(self.cuts)]
        own = pieces[self.position]
        if not whole.is_cuda:  # gloo gathers into other memory, and copies it
            return exchange([own] * len(pieces), pieces, self.unit.spec.ranks, self.position, self.group)
        if len(set(sizes)) == 1:
            return [gather_single(whole, own, group=self.group, async_op=True)]
        return [dist.all_gather(pieces, own, group=self.group, async_op=True)]

    def _wait(self, arriving: _Arriving) -> None:
        for work in arriving.works:
            self.wait_for(work, "the parameters")
        if arriving.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(arriving.copied)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in pairwise(self.bounds))

    # Sums of gradients

    def scatter(self, total: Tensor) -> Scattered:
        """Start to sum a vector of the whole unit over its ranks: each gets the sum of its stretch.

        On a processor each rank gets the terms of its stretch and adds them: gloo would sum all of the unit everywhere.
        """
        sizes, own = self._sizes, len(self.own)
        if len(sizes) == 1:
            return Scattered(total, total)
        received = total.new_empty(own * (len(sizes) - 1) if self.device.type == "cpu" else own)
        if isinstance(self.sum_group, DryGroup):
            op = "all_to_all" if self.device.type == "cpu" else "reduce_scatter"
            self.sum_group.note(op, total, *((size,) for size in sizes))
            return Scattered(total, received)
        pieces = [total[start:stop] for start, stop in pairwise(self.bounds)]
        if self.device.type == "cpu":
            return Scattered(total, received, self._exchange(pieces, received))
        if len(set(sizes)) == 1:
            work = reduce_scatter_single(received, total, group=self.sum_group, async_op=True)
        else:
            work = dist.reduce_scatter(received, pieces, group=self.sum_group, async_op=True)
        assert work is not None
        return Scattered(total, received, [work])

    def _exchange(self, pieces: Sequence[Tensor], received: Tensor) -> list[dist.Work]:
        """Send each rank the piece that it owns, and receive the terms of this rank's from the others, one after the
        other; the piece of this rank stays where it is."""
        terms = list(received.split(len(self.own)) if len(self.own) else [received] * (len(pieces) - 1))
        terms.insert(self.position, pieces[self.position])
        return exchange(pieces, terms, self.unit.spec.ranks, self.position, self.sum_group)

    def sum_of(self, scattered: Scattered) -> Tensor:
        """Wait for the sum of this rank's stretch."""
        for work in scattered.works:
            self.wait_for(work, "the sum of gradients")
        found = scattered.received
        if self.device.type == "cpu" and len(self._sizes) > 1:
            first, last = self.bounds[self.position : self.position + 2]
            terms = [*found.view(len(self._sizes) - 1, last - first)]
            terms.insert(self.position, scattered.total[first:last])
            if len(terms) == 2 and found.dtype == self.unit.dtype:  # in the order of ranks, or the other, alike
                found = found.add_(scattered.total[first:last])
            else:
                found = terms[0].to(self.unit.dtype, copy=True)
                for term in terms[1:]:
                    found.add_(term)
        return self.placed(found)

    def placed(self, sum: Tensor) -> Tensor:
        """A sum of this rank's stretch in the unit's dtype, and where it is."""
        sum = sum.to(self.unit.dtype)
        return self._on_host(len(sum)).copy_(sum, non_blocking=True) if self.unit.on_host else sum

    def added(self, sum: Tensor | None, other: Tensor) -> Tensor:
        """The sum of a stretch with that of another micro-batch."""
        if sum is None:
            return other
        self._arrive_on_host()
        return sum.add_(other)

    def _arrive_on_host(self) -> None:
        if self.unit.on_host and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def add_gradients(self, own: Tensor) -> None:
        """Add the sums of this rank's stretch to the gradients of what it owns."""
        self._arrive_on_host()
        offset = self.own.storage_offset()
        for tensor, elements in self.owned.values():
            gradient = own.as_strided(elements.shape, elements.stride(), elements.storage_offset() - offset)
            if tensor.grad is None:
                tensor.grad = gradient.detach()
            else:
                tensor.grad.add_(gradient)

    def leave_oldest(self, most: int) -> bool:
        """Add the sum of the oldest of more than *most* late steps to the gradients of what this rank owns; whether
        there was one."""
        if len(self.late) <= most:
            return False
        self.add_gradients(self.sum_of(self.late.popleft()))
        return True

    def wait_for(self, work: dist.Work, what: str) -> None:
        """Wait for communication; *what* is in the error if it fails."""
        spec = self.unit.spec
        of_all = f"{what} of bucket {spec.index} over ranks {list(spec.ranks)}"
        self.failures.wait(work, of_all, spec.ranks, blocking=self.device.type != "cuda")

    def alone(self) -> HeldUnit:
        """The same without other ranks, and with no gradients."""
        made = HeldUnit.__new__(HeldUnit)
        made.__dict__.update(self.__dict__)
        made.late = deque()
        made.group = made.sum_group = DryGroup("", self.unit.spec.ranks, [])
        made.slots = {n: GradientSlot(slot.shape, slot.dtype, slot.device) for n, slot in self.slots.items()}
        made.begin()
        return made


def exchange(
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor],
    ranks: Sequence[int],
    position: int,
    group: Any,
    transport: Any = dist,
) -> list[dist.Work]:
    """Start to send each rank a vector, and to receive one of each; those of this rank itself stay where they are.

    Args:
        outgoing, incoming: one for each rank; empty ones are not sent.
        ranks: of the group.
        position: of this rank among them.
        group: the process group.
        transport: has ``isend`` and ``irecv``.
    """
    others = [
        (rank, away, back)
        for place, (rank, away, back) in enumerate(zip(ranks, outgoing, incoming, strict=True))
        if place != position
    ]
    if outgoing[0].is_cuda:  # on NCCL messages of a group wait for each other, unless they start together
        calls = [dist.P2POp(dist.irecv, back, rank, group) for rank, _, back in others if len(back)]
        calls += [dist.P2POp(dist.isend, away, rank, group) for rank, away, _ in others if len(away)]
        return dist.batch_isend_irecv(calls) if calls else []
    works = []
    for rank, away, back in others:
        if len(back):
            works.append(transport.irecv(back, rank, group=group))
        if len(away):
            works.append(transport.isend(away, rank, group=group))
    return [work for work in works if work is not None]


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies from the host, one for all units."""
    return torch.cuda.Stream(device)


def _place(x: Tensor) -> tuple[Any, ...]:
    """The memory of a tensor."""
    return x.untyped_storage()._cdata, x.storage_offset()


class HeldTensors(dict[str, Tensor]):
    """A rank's tensors by name, and the units that some are parts of, once these are made."""

    units: Mapping[int, HeldUnit] | None = None
    are_shared = False
    """Whether a script had them before there were units."""
