"""Replay of a recorded construction: compute tensors one by one, and return the requested parts.

A storage that is wholly overwritten is a new *incarnation* of it: what the old one held is dead, and if it was random
it is drawn and dropped (Hugging Face initialises every weight twice). Operators run as soon as what they read is there,
not in the order of the recording, so that no tensor waits whole for a cast at the end. Peak memory is the parts that
are kept and the largest chain of operators on one tensor, which for the usual initialisations is the largest tensor.

Knows recorded operators; not how they were recorded (`materialize`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from whale.errors import UsageError
from whale.runtime.local_program import Intervals
from whale.runtime.stage import part

__all__ = ["Call", "Incarnation", "Recording", "Ref", "Replay", "Resume", "bytes_of"]


@dataclass(frozen=True)
class Ref:
    """A view of one incarnation of a storage."""

    incarnation: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor, incarnation: int) -> Ref:
        """View of a storage's incarnation that a tensor has."""
        return cls(incarnation, tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)


@dataclass(eq=False)
class Call:
    """An operator that creates or writes storages. ``values`` are the calls whose results it reads; ``after`` must run
    before it, as it overwrites what they read."""

    index: int
    target: Any
    args: Any
    kwargs: Any
    created: tuple[tuple[int, int], ...]
    touched: tuple[int, ...]
    draws: bool
    values: tuple[int, ...]
    after: tuple[int, ...]
    generator: torch.Generator | None = None
    resume: Resume | None = None


class Resume(NamedTuple):
    """A generator's state before a draw was not that after the last one: the builder set it, to ``state``, or to what
    it was after draw number ``draw`` (-1: before the first)."""

    state: Tensor | None
    draw: int


@dataclass(eq=False)
class Incarnation:
    """Content of a storage until it is overwritten. ``writers`` and ``readers`` (since the last write) are calls;
    ``literal`` is a tensor that the builder provided with its data."""

    storage: torch.UntypedStorage
    device: torch.device
    writers: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)
    literal: Tensor | None = None


@dataclass(eq=False)
class Recording:
    """The calls that make the tensors of a model. Use it once: generators are left as after the local construction."""

    calls: Sequence[Call]
    incarnations: Sequence[Incarnation]
    current: Mapping[int, int]
    starts: Mapping[torch.Generator, Tensor]
    ends: Mapping[torch.Generator, Resume | None]

    def digest(self) -> str:
        """State besides the calls that determines the values: the initial state of the default generator."""
        state = self.starts[torch.default_generator]
        return hashlib.sha256(bytes_of(state)).hexdigest() if any(call.draws for call in self.calls) else ""

    def uninitialised(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of tensors whose storage nothing ever wrote."""
        found = []
        for name, x in tensors.items():
            index = self.current.get(x.untyped_storage()._cdata)
            if x.is_meta and x.numel() and (index is None or not self._has_value(index)):
                found.append(name)
        return found

    def asked_for_meta(self, x: Tensor) -> bool:
        """Whether the builder itself put a tensor on the meta device."""
        index = self.current.get(x.untyped_storage()._cdata)
        return x.is_meta and (index is None or self.incarnations[index].device.type == "meta")

    def _has_value(self, index: int) -> bool:
        return bool(self.incarnations[index].writers) or self.incarnations[index].literal is not None

    def random(self, x: Tensor) -> bool:
        """Whether a tensor's value depends on a draw."""
        pending = list(self.incarnations[self.current[x.untyped_storage()._cdata]].writers)
        seen = set(pending)
        while pending:
            call = self.calls[pending.pop()]
            if call.draws:
                return True
            pending += [v for v in call.values if v not in seen]
            seen.update(call.values)
        return False

    def take(
        self,
        wanted: Mapping[str, tuple[Tensor, Intervals | None]],
        device: torch.device | str = "cpu",
        *,
        draw: bool = True,
    ) -> dict[str, Tensor]:
        """Compute parts of recorded tensors, each on its own and contiguous.

        Args:
            wanted: for each name a tensor of the recording, and which stretches of its dims; None is all of it.
            device: of the returned parts; they are computed on the builder's device.
            draw: whether to run the random operators that no wanted tensor depends on, as the local construction does.

        Raises:
            UsageError: nothing ever wrote a wanted tensor.
        """
        missing = self.uninitialised({name: x for name, (x, _) in wanted.items()})
        if missing:
            raise UsageError(
                f"{', '.join(missing[:5])}{' and others' if len(missing) > 5 else ''}: nothing gives it a value while "
                "the model is built; initialise it there, or pass state_dict="
            )
        run = Replay(self, draw=draw, device=torch.device(device))
        for name, (x, intervals) in wanted.items():
            index = self.current.get(x.untyped_storage()._cdata, -1)
            if not x.is_meta and (index < 0 or not self.incarnations[index].writers):
                run.found[name] = _kept(x.detach(), intervals, run.device, alone=False)
                continue
            run.wanted.setdefault(index, []).append((name, Ref.of(x, index), intervals))
            run.need(self.incarnations[index].writers)
        with torch.no_grad():
            run.plan()
            run.all()
        return {name: run.found[name] for name in wanted}


class Replay:
    """One computation of a recording."""

    def __init__(self, recording: Recording, *, draw: bool, device: torch.device | None = None) -> None:
        self.calls, self.incarnations = recording.calls, recording.incarnations
        self.recording, self.draw, self.device = recording, draw, device or torch.device("cpu")
        self.wanted: dict[int, list[tuple[str, Ref, Intervals | None]]] = {}
        self.found: dict[str, Tensor] = {}
        self.kept: set[int] = set()
        self.buffers: dict[int, Tensor] = {}
        self.needed: set[int] = set()
        self.done: set[int] = set()
        self.pending: dict[int, int] = {}
        self.users: dict[int, list[int]] = {}
        self.states: dict[tuple[int, int], Tensor] = {}
        self.drawn: dict[int, int] = {}
        self.kept_draws: set[tuple[int, int]] = set()

    def need(self, calls: Iterable[int]) -> None:
        """Mark calls, and all whose results they read."""
        stack = [c for c in calls if c not in self.needed]
        while stack:
            index = stack.pop()
            if index in self.needed:
                continue
            self.needed.add(index)
            if self.calls[index].draws and not self.draw:
                raise UsageError(
                    "the model's construction depends on the value of a random tensor (through .item(), a comparison "
                    "or state_dict=), which is not known before; build the model on the CPU instead"
                )
            stack += self.calls[index].values

    def plan(self) -> None:
        """Count how often each incarnation is still to be touched, and who waits for whom."""
        if self.draw:
            self.need(call.index for call in self.calls if call.draws)
        for index in sorted(self.needed):
            call = self.calls[index]
            for i in call.touched:
                self.pending[i] = self.pending.get(i, 0) + 1
            for before in (*call.values, *call.after):
                self.users.setdefault(before, []).append(index)
            if call.draws and call.resume is not None and call.resume.state is None:
                self.kept_draws.add((id(call.generator), call.resume.draw))
        for generator, end in self.recording.ends.items():
            if end is not None and end.state is None:
                self.kept_draws.add((id(generator), end.draw))

    def all(self) -> None:
        """Run all that is needed: the draws in their order, the rest as soon as it can or when it is asked for."""
        if self.draw:
            for generator, state in self.recording.starts.items():
                generator.set_state(state)
                self.states[id(generator), -1] = state
                self.drawn[id(generator)] = 0
        for call in self.calls:
            if call.draws and call.index in self.needed:
                self.demand([call.index])
        for index in list(self.wanted):
            self.demand(self.incarnations[index].writers)
            self.harvest(index)
        if self.draw:
            for generator, end in self.recording.ends.items():
                self.set_state(generator, end)

    def demand(self, calls: Iterable[int]) -> None:
        """Run calls after all that they wait for, then whatever can run with their results."""
        stack = [c for c in calls if c not in self.done]
        while stack:
            index = stack[-1]
            call = self.calls[index]
            missing = [c for c in (*call.values, *call.after) if c in self.needed and c not in self.done]
            if index in self.done:
                stack.pop()
            elif missing:
                stack += missing
            else:
                stack.pop()
                self.run(call)
                stack += [u for u in self.users.get(index, ()) if u not in self.done and self._ready(u)]

    def _ready(self, index: int) -> bool:
        call = self.calls[index]
        return not call.draws and all(c in self.done or c not in self.needed for c in (*call.values, *call.after))

    def run(self, call: Call) -> None:
        """Run a call whose operands are there."""
        if call.draws and call.generator is not None:
            self.set_state(call.generator, call.resume)
        args, kwargs = pytree.tree_map(lambda x: self.tensor(x) if isinstance(x, Ref) else x, (call.args, call.kwargs))
        if torch.device(kwargs.get("device") or "cpu").type == "meta":
            kwargs = {**kwargs, "device": None}
        result = call.target(*args, **kwargs)
        if call.draws and call.generator is not None:
            key = id(call.generator)
            number = self.drawn.get(key, 0)
            self.drawn[key] = number + 1
            if (key, number) in self.kept_draws:
                self.states[key, number] = call.generator.get_state()
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        for position, incarnation in call.created:
            self.buffers[incarnation] = outputs[position]
        del args, kwargs, result, outputs
        self.done.add(call.index)
        for i in call.touched:
            self.pending[i] -= 1
            if not self.pending[i]:
                self.harvest(i)

    def set_state(self, generator: torch.Generator, resume: Resume | None) -> None:
        """Restore a generator to the builder's state."""
        if resume is not None:
            state = resume.state if resume.state is not None else self.states[id(generator), resume.draw]
            generator.set_state(state)

    def harvest(self, index: int) -> None:
        """Copy the wanted parts of a finished incarnation and free the rest."""
        for name, ref, intervals in self.wanted.pop(index, ()):
            whole = self.tensor(ref)
            alone = whole.numel() * whole.element_size() == whole.untyped_storage().nbytes()
            self.found[name] = _kept(whole, intervals, self.device, alone=alone)
            del whole
        if index not in self.kept:
            self.buffers.pop(index, None)

    def tensor(self, ref: Ref) -> Tensor:
        """The real tensor of a view; allocates what no call has created."""
        incarnation = self.incarnations[ref.incarnation]
        buffer = self.buffers.get(ref.incarnation)
        if buffer is None:
            if incarnation.literal is not None:
                buffer = _clone_storage(incarnation.literal)
            else:
                device = incarnation.device if incarnation.device.type != "meta" else torch.device("cpu")
                buffer = torch.empty(incarnation.storage.nbytes(), dtype=torch.uint8, device=device)
            self.buffers[ref.incarnation] = buffer
        blank = torch.empty(0, dtype=ref.dtype, device=buffer.device)
        return blank.set_(buffer.untyped_storage(), ref.offset, ref.size, ref.stride)


def _kept(whole: Tensor, intervals: Intervals | None, device: torch.device, *, alone: bool) -> Tensor:
    """A part with memory of its own. ``alone`` says that the whole has no other use, so it need not be copied."""
    piece = whole if intervals is None else part(whole, intervals)
    if alone and tuple(piece.shape) == tuple(whole.shape) and piece.data_ptr() == whole.data_ptr():
        return piece.to(device)
    return piece.to(device, copy=True, memory_format=torch.contiguous_format)


def _clone_storage(x: Tensor) -> Tensor:
    storage = x.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage, 0, (storage.nbytes(),), (1,)).clone()


def bytes_of(state: Tensor) -> bytes:
    """Bytes of a generator's state, to compare."""
    return state.numpy().tobytes()
