"""CUDA graphs of pieces of a stage's graphs: recorded once for each micro-batch in flight, and replayed afterwards.

A piece is a run of operators between what is the host's. A slot has the recordings of a forward and its backward; a
micro-batch takes a free one, so that there are as many as micro-batches in flight. The operands of a piece are in the
same memory in each step, as parameters and what other pieces of the slot made, or are copied to memory of its own. What
leaves the graphs stays in memory as long as the slot; all else, operands too, has memory that recordings of other tasks
use again, because a rank runs one task at a time. So tasks are recorded whole, and replayed in their order. It knows
pieces as functions of tensors; nothing of graphs, stages or schedules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from whale.errors import UsageError
from whale.runtime.local_program import LocalCode
from whale.runtime.random import RNGPosition
from whale.runtime.uploads import upload

__all__ = [
    "RECORDERS",
    "Begin",
    "Piece",
    "Recorded",
    "Recorder",
    "Slots",
    "StepSeeds",
    "check_recordable",
    "recorder_of",
    "solid",
]

WARM_UP = 2
"""Uses of a slot before its pieces are recorded: libraries and compilers then have what they make at their first
calls."""

MOST_RESETS = 8
"""How often recordings are made again, because memory that should stay has changed, before a stage does without."""


class Recorded(NamedTuple):
    """A recording: the memory of its operands, its results, and what runs it again."""

    operands: Sequence[Tensor]
    results: Sequence[Tensor]
    replay: Callable[[], None]


class Recorder(Protocol):
    """Records functions of tensors on a device."""

    def record(self, function: Callable[..., Any], operands: Sequence[Tensor], fixed: Sequence[bool]) -> Recorded:
        """Run a function, and record its operators; operands that are not *fixed* are copied to memory of its own."""
        ...

    def unowned(self, x: Tensor) -> Tensor:
        """A tensor in the memory of another, which recordings may use again when this one is gone."""
        ...

    def wait(self) -> None:
        """Wait until nothing is replayed."""
        ...


class CudaRecorder:
    """Records CUDA graphs, of which all have one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, function: Callable[..., Any], operands: Sequence[Tensor], fixed: Sequence[bool]) -> Recorded:
        """Record a function, then replay it.

        Raises:
            RuntimeError: an operator cannot be recorded.
        """
        if any(x.device != self._device for x in operands):
            raise RuntimeError("an operand is not on the device")
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # other threads, as NCCL's, may call CUDA meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                pairs = zip(operands, fixed, strict=True)
                own = [x if stays else torch.empty_strided(x.shape, x.stride(), **_kind(x)) for x, stays in pairs]
                results = function(*own)
            except BaseException:
                with suppress(RuntimeError):  # that the recording is invalid, which the first error explains
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        for x, to, stays in zip(operands, own, fixed, strict=True):
            if not stays:
                solid(to).copy_(solid(x))
        graph.replay()
        return Recorded(own, results, graph.replay)

    def unowned(self, x: Tensor) -> Tensor:
        """A tensor made of an address."""
        storage = x.untyped_storage()
        if not x.is_cuda or storage.nbytes() == 0:
            return x
        held = torch.as_tensor(_Address(storage.data_ptr(), storage.nbytes()), device=x.device)
        return held.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

    def wait(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


class _Address:
    """Memory of a device, for torch to make a tensor of."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def _kind(x: Tensor) -> dict[str, Any]:
    return {"dtype": x.dtype, "device": x.device}


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""Makers of recorders, by the type of the device."""


def check_recordable(device: torch.device) -> None:
    """Refuse devices on which nothing is recorded.

    Raises:
        UsageError: names the device.
    """
    if device.type not in RECORDERS:
        raise UsageError(
            f"cuda_graphs=True needs a CUDA device, and this process computes on {device.type!r}: leave it out there"
        )


def recorder_of(device: torch.device) -> Recorder:
    """The recorder of a device, which :func:`check_recordable` accepts."""
    return RECORDERS[device.type](device)


def solid(x: Tensor) -> Tensor:
    """A view of a tensor in which each element of an expanded one is once."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


class StepSeeds:
    """The seeds of random operators as tensors, written once a step: a recording would repeat numbers of the host.

    Args:
        clock: of the step.
        keys: of the operators.
        device: of the tensors.
    """

    def __init__(self, clock: RNGPosition, keys: Collection[int], device: torch.device) -> None:
        self._clock, self._keys, self._device = clock, tuple(keys), device
        self._seeds = torch.zeros(len(keys), dtype=torch.int64, device=device)
        self._written: tuple[int, int] | None = None
        self.of = dict(zip(self._keys, self._seeds.unbind(), strict=True))
        """The seed of each operator, int64 without dims."""

    def write(self) -> None:
        """Write those of this step."""
        at = (self._clock.seed, self._clock.step)
        if self._keys and at != self._written:
            now = torch.tensor([self._clock.of_step(key) for key in self._keys], dtype=torch.int64)
            self._seeds.copy_(upload(now, self._device))
            self._written = at


class Piece(nn.Module):
    """A run of operators, as a module of a graph.

    Args:
        number: of the piece in its slot; those of a graph follow each other.
        begins: whether it is the first of its graph.
        code: its operators.
        fixed: which of its operands have the same memory in each step, by their source.
        kept: which of its results leave the graph, or are read by what may keep them.
    """

    def __init__(
        self, number: int, begins: bool, code: LocalCode, fixed: tuple[bool, ...], kept: tuple[bool, ...]
    ) -> None:
        super().__init__()
        self.number, self.begins, self.code, self.fixed, self.kept = number, begins, code, fixed, kept

    def forward(self, use: _Use, *operands: Tensor) -> Sequence[Tensor]:
        """Its results."""
        return use.run(self, operands)


class _Recording(NamedTuple):
    """A recorded piece: addresses of operands by number, memory that operands are copied to, and the results."""

    addresses: tuple[tuple[int, int], ...]
    copied: tuple[tuple[int, Tensor], ...]
    results: Sequence[Tensor]
    replay: Callable[[], None]


class _Slot:
    """The recordings of a micro-batch in flight."""

    def __init__(self) -> None:
        self.recordings: dict[int, _Recording] = {}
        self.memory: set[int] = set()  # addresses of what its pieces made
        self.retired: list[Any] = []
        self.num_uses = 0
        self.use: weakref.ref[_Use] | None = None

    def reset(self) -> None:
        """Forget the recordings. A task may still read what they made, so that they go when the next one begins."""
        self.retired.append(self.recordings)
        self.recordings, self.memory = {}, set()


class Slots:
    """The slots of a stage's graphs.

    Args:
        recorder: of the device.
        seeds: that pieces read.
        warn: called once, if the stage does without recordings.
    """

    def __init__(self, recorder: Recorder, seeds: StepSeeds, warn: Callable[[str], None]) -> None:
        self.recorder, self.seeds, self._warn = recorder, seeds, warn
        self._slots: list[_Slot] = []
        self._num_resets = 0
        self._records = True

    def begin(self) -> _Use:
        """Take a free slot for a micro-batch, until its backward is done or dropped."""
        self.seeds.write()
        free = (slot for slot in self._slots if slot.use is None or slot.use() is None)
        if (slot := next(free, None)) is None:
            self._slots.append(slot := _Slot())
        if slot.retired:
            self.recorder.wait()
            slot.retired.clear()
        slot.num_uses += 1
        use = _Use(self, slot, self._records and slot.num_uses > WARM_UP)
        slot.use = weakref.ref(use)
        return use

    def reset(self, slot: _Slot) -> None:
        """Make a slot's recordings again, in its next use."""
        slot.reset()
        self._num_resets += 1
        if self._num_resets == MOST_RESETS:
            self.give_up("tensors that should stay where they are, as parameters, have other memory again and again")

    def give_up(self, why: str) -> None:
        """Record nothing any more."""
        if self._records:
            self._warn(f"the rank runs a stage without CUDA graphs, operator by operator: {why}")
        self._records = False
        for slot in self._slots:
            slot.reset()
            if slot.use is not None and (use := slot.use()) is not None:
                use.records = False


class Begin(nn.Module):
    """The first node of a forward: takes a slot, which its pieces and those of its backward are given."""

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.slots = slots

    def forward(self) -> _Use:
        """The use of a slot."""
        return self.slots.begin()


class _Use:
    """One use of a slot: by a forward and its backward."""

    def __init__(self, slots: Slots, slot: _Slot, records: bool) -> None:
        self._slots, self._slot, self.records = slots, slot, records
        self._recorded: set[int] = set()

    def run(self, piece: Piece, operands: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results of a piece: recorded if it is not yet, replayed if it is."""
        if not self.records:
            return piece.code(*operands)
        found = self._slot.recordings.get(piece.number)
        if found is None:
            if piece.begins or piece.number - 1 in self._recorded:
                return self._record(piece, operands)
            return self._as_it_is(piece, operands)  # the task was not recorded to its end
        for number, address in found.addresses:
            if operands[number].data_ptr() != address:
                return self._as_it_is(piece, operands)
        for number, to in found.copied:
            to.copy_(solid(operands[number]))
        found.replay()
        return found.results

    def _as_it_is(self, piece: Piece, operands: Sequence[Tensor]) -> Sequence[Tensor]:
        """Go on without recordings, which are made again in the next use."""
        self.records = False
        self._slots.reset(self._slot)
        return piece.code(*operands)

    def _record(self, piece: Piece, operands: Sequence[Tensor]) -> Sequence[Tensor]:
        slot, recorder = self._slot, self._slots.recorder
        fixed = [
            stays or _storage(x) in slot.memory or x.numel() == 0
            for x, stays in zip(operands, piece.fixed, strict=True)
        ]

        def run(*tensors: Tensor) -> list[Tensor]:
            copied = {_storage(x) for x, stays in zip(tensors, fixed, strict=True) if not stays}
            return [x.clone() if _storage(x) in copied else x for x in piece.code(*tensors)]

        try:
            recorded = recorder.record(run, operands, fixed)
        except RuntimeError as error:
            self._slots.give_up(f"{str(error).splitlines()[0]} (while operators were recorded)")
            return piece.code(*operands)
        addresses, copied = [], []
        for number, (x, stays) in enumerate(zip(recorded.operands, fixed, strict=True)):
            if stays:
                addresses += [(number, x.data_ptr())] if x.numel() else []
            else:
                copied.append((number, solid(recorder.unowned(x))))
        results = [x if kept else recorder.unowned(x) for x, kept in zip(recorded.results, piece.kept, strict=True)]
        slot.memory |= {_storage(x) for x in recorded.results}
        slot.recordings[piece.number] = _Recording(tuple(addresses), tuple(copied), results, recorded.replay)
        self._recorded.add(piece.number)
        return recorded.results


def _storage(x: Tensor) -> int:
    """The address of the memory of which a tensor is a part."""
    return x.untyped_storage().data_ptr()
