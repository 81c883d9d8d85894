"""Build a model without its memory, then make the parts of its tensors that this rank owns, with the local values.

`record` runs a function that builds a model. Its tensors are on the meta device: the operators that create or write
them are noted instead of computed. `Recording.take` computes them afterwards, one tensor at a time, and keeps only the
parts that are asked for. Every random operator runs, in the order of the recording, on all of its elements, because a
generator cannot skip; so the values, and the state in which the generator is left, are bitwise those of building the
model locally.

A storage that is wholly overwritten is a new *incarnation* of it: what the old one held is dead, and if it was random
it is drawn and dropped (Hugging Face initialises every weight twice). Operators run as soon as what they read is there,
not in the order of the recording, so that no tensor waits whole for a cast at the end. Peak memory is the parts that
are kept and the largest chain of operators on one tensor, which for the usual initialisations is the largest tensor.

Knows tensors and operators; nothing of models, plans or process groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from whale.errors import UsageError
from whale.runtime.stage import Intervals, part

__all__ = ["Recording", "record"]

Result = TypeVar("Result")

_OVERWRITING = {
    "normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_",
    "bernoulli_",
}  # fmt: skip
"""In-place operators whose result does not depend on what was there."""

_ALLOCATING = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"}


@dataclass(frozen=True)
class _Ref:
    """A view of one incarnation of a storage."""

    incarnation: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(eq=False)
class _Call:
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
    resume: _Resume | None = None


class _Resume(NamedTuple):
    """A generator's state before a draw was not that after the last one: the builder set it, to ``state``, or to what
    it was after draw number ``draw`` (-1: before the first)."""

    state: Tensor | None
    draw: int


@dataclass(eq=False)
class _Incarnation:
    """What a storage holds until it is overwritten. ``writers`` and ``readers`` (since the last write) are calls;
    ``literal`` is a tensor that the builder brought with its data."""

    storage: torch.UntypedStorage
    device: torch.device
    writers: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)
    literal: Tensor | None = None


@dataclass(eq=False)
class _Stream:
    """A generator while its draws are recorded. It ticks at every draw, so that no two states of it are equal."""

    start: Tensor
    draws: dict[bytes, int]
    last: bytes
    count: int = 0


def record(build: Callable[[], Result]) -> tuple[Result, Recording]:
    """Run *build* with tensors on the meta device; return what it returns and the recording.

    Generators are left as they were. A number that the builder asks for (``.item()``) is computed at once.
    Raises :class:`UsageError` if that number is random.
    """
    recorder = _Recorder()
    with _Reads(recorder), recorder, _whole_trunc_normal(recorder):
        result = build()
    return result, recorder.finish()


@contextmanager
def _whole_trunc_normal(recorder: _Recorder) -> Iterator[None]:
    """Record ``trunc_normal_`` as one call: it draws again until what it has drawn is within the bounds."""
    name = "_no_grad_trunc_normal_"
    original = getattr(nn.init, name, None)
    if original is None:
        yield
        return

    def recorded(tensor: Tensor, *args: Any, generator: torch.Generator | None = None) -> Tensor:
        with torch._C.DisableTorchFunction():
            return recorder.draw(original, tensor, *args, generator=generator)

    setattr(nn.init, name, recorded)
    try:
        yield
    finally:
        setattr(nn.init, name, original)


class _Reads(TorchFunctionMode):
    """Answers what never reaches an operator: values as Python objects, and the device that the builder asked for."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PYTHON_VALUES and args[0].is_meta:
            with _disable_current_modes():
                return func(self.recorder.value(args[0]), *args[1:], **(kwargs or {}))
        if func in (_DEVICE, _IS_META):
            device = self.recorder.device(args[0])
            return device if func == _DEVICE else device.type == "meta"
        return func(*args, **(kwargs or {}))


_DEVICE, _IS_META = Tensor.device.__get__, Tensor.is_meta.__get__  # type: ignore[attr-defined]
_PYTHON_VALUES = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.incarnations: list[_Incarnation] = []
        self.current: dict[int, int] = {}
        self.streams: dict[torch.Generator, _Stream] = {}
        self._stream(torch.default_generator)

    def finish(self) -> Recording:
        ends = {}
        for generator, stream in self.streams.items():
            ends[generator] = self._resume(generator, stream)
            generator.set_state(stream.start)
        starts = {generator: stream.start for generator, stream in self.streams.items()}
        return Recording(self.calls, self.incarnations, self.current, starts, ends)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name, schema = func._schema.name.removeprefix("aten::"), func._schema
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        aliases = any(r.alias_info is not None for r in schema.returns)
        written = _written(func, args, kwargs)
        if given and not any(self._is_recorded(x) for x in given) and not draws:
            return func(*args, **kwargs)  # data that the builder brought
        if given and all(not x.is_meta for x in given) and aliases and not written:
            return func(*args, **kwargs)
        if given and schema.returns and not any("Tensor" in str(r.type) for r in schema.returns):
            with torch.no_grad():
                return func(*_values(self, args), **_values(self, kwargs))
        stand_ins = {id(x): x if x.is_meta else _like(x) for x in given}
        result = func(*_replaced(args, stand_ins), **_on_meta(schema, _replaced(kwargs, stand_ins)))
        wanted = kwargs.get("device")
        device = torch.device(wanted) if wanted is not None else self.device(given[0]) if given else torch.device("cpu")
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        known = {x.untyped_storage()._cdata for x in stand_ins.values()}
        fresh = [(i, x) for i, x in enumerate(outputs) if x.untyped_storage()._cdata not in known]
        if name in _ALLOCATING:
            self._new(outputs[0].untyped_storage(), device)
        elif fresh or written:
            for index in self._overwritten(name, func._overloadname, given, written):
                old = self.incarnations[index]
                self._new(old.storage, old.device)
            recorded = pytree.tree_map(lambda x: self._ref(x) if isinstance(x, Tensor) else x, (args, kwargs))
            created: dict[int, tuple[int, int]] = {}
            for position, x in fresh:
                if x.untyped_storage()._cdata not in created:
                    created[x.untyped_storage()._cdata] = (position, self._new(x.untyped_storage(), device))
            self._note(func, recorded, written, list(created.values()), given, draws)
        originals = {id(stand_in): x for x in given if (stand_in := stand_ins[id(x)]) is not x}
        return _replaced(result, originals)

    def draw(self, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Record a function that fills a tensor with random numbers as one call."""
        for index in self._overwritten("uniform_", "", [tensor], [tensor]):
            old = self.incarnations[index]
            self._new(old.storage, old.device)
        with _disable_current_modes():
            self._note(function, ((self._ref(tensor), *args), kwargs), [tensor], [], [tensor], True)
        return tensor

    def _note(
        self, func: Any, recorded: Any, written: list[Tensor], created: Any, given: list[Tensor], draws: bool
    ) -> None:
        index = len(self.calls)
        writes = {self._incarnation(x) for x in written} | {i for _, i in created}
        touched = tuple(dict.fromkeys([*(self._incarnation(x) for x in given), *writes]))
        values: dict[int, None] = {}
        after: dict[int, None] = {}
        for i in touched:
            incarnation = self.incarnations[i]
            values.update(dict.fromkeys(incarnation.writers))
            if i in writes:
                after.update(dict.fromkeys(incarnation.readers))
                incarnation.writers.append(index)
                incarnation.readers = []
            else:
                incarnation.readers.append(index)
        call = _Call(
            index=index,
            target=func,
            args=recorded[0],
            kwargs=recorded[1],
            created=tuple(created),
            touched=touched,
            draws=draws,
            values=tuple(values),
            after=tuple(after),
        )
        if call.draws:
            given_generator = call.kwargs.get("generator")
            call.generator = given_generator if given_generator is not None else torch.default_generator
            stream = self._stream(call.generator)
            call.resume = self._resume(call.generator, stream)
            torch.rand((), generator=call.generator)
            stream.last = _bytes(call.generator.get_state())
            stream.draws[stream.last] = stream.count
            stream.count += 1
        self.calls.append(call)

    def _stream(self, generator: torch.Generator) -> _Stream:
        if generator not in self.streams:
            start = generator.get_state()
            self.streams[generator] = _Stream(start, {_bytes(start): -1}, _bytes(start))
        return self.streams[generator]

    def _resume(self, generator: torch.Generator, stream: _Stream) -> _Resume | None:
        state = generator.get_state()
        found = _bytes(state)
        if found == stream.last:
            return None
        if found in stream.draws:
            return _Resume(None, stream.draws[found])
        return _Resume(state, -1)

    def value(self, x: Tensor) -> Tensor:
        """The value of a tensor, from what is recorded so far."""
        ref = self._ref(x)
        run = _Replay(Recording(self.calls, self.incarnations, self.current, {}, {}), draw=False)
        run.kept = {ref.incarnation}
        writers = self.incarnations[ref.incarnation].writers
        with torch.no_grad():
            run.need(writers)
            run.plan()
            run.demand(writers)
            return run.tensor(ref)

    def device(self, x: Tensor) -> torch.device:
        """The device that the builder asked for."""
        index = self.current.get(x.untyped_storage()._cdata)
        return x.device if index is None else self.incarnations[index].device

    def _is_recorded(self, x: Tensor) -> bool:
        index = self.current.get(x.untyped_storage()._cdata)
        return x.is_meta or (index is not None and bool(self.incarnations[index].writers))

    # Storages

    def _incarnation(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        if storage._cdata not in self.current:
            index = self._new(storage, x.device)
            if not x.is_meta:
                self.incarnations[index].literal = x.detach()
        return self.current[storage._cdata]

    def _new(self, storage: torch.UntypedStorage, device: torch.device) -> int:
        self.incarnations.append(_Incarnation(storage, device))
        self.current[storage._cdata] = len(self.incarnations) - 1
        return len(self.incarnations) - 1

    def _ref(self, x: Tensor) -> _Ref:
        return _Ref(self._incarnation(x), tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)

    def _overwritten(self, name: str, overload: str, given: list[Tensor], written: list[Tensor]) -> set[int]:
        """The incarnations that a call replaces whole."""
        if name not in _OVERWRITING and not overload.endswith("out"):
            return set()
        found = set()
        for x in written:
            storage = x.untyped_storage()
            whole = x.numel() * x.element_size() == storage.nbytes() and _dense(x)
            others = [y for y in given if y is not x and y.untyped_storage()._cdata == storage._cdata]
            if whole and not others:
                found.add(self._incarnation(x))
        return found


@dataclass(eq=False)
class Recording:
    """The calls that make the tensors of a model. Use it once: generators are left as after the local construction."""

    calls: Sequence[_Call]
    incarnations: Sequence[_Incarnation]
    current: Mapping[int, int]
    starts: Mapping[torch.Generator, Tensor]
    ends: Mapping[torch.Generator, _Resume | None]

    def digest(self) -> str:
        """What the values depend on besides the calls: where the default generator starts."""
        state = self.starts[torch.default_generator]
        return hashlib.sha256(_bytes(state)).hexdigest() if any(call.draws for call in self.calls) else ""

    def uninitialised(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """The names of those whose storage nothing ever wrote."""
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
            device: where the parts are kept; they are computed where the builder put them.
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
        run = _Replay(self, draw=draw, device=torch.device(device))
        for name, (x, intervals) in wanted.items():
            index = self.current.get(x.untyped_storage()._cdata, -1)
            if not x.is_meta and (index < 0 or not self.incarnations[index].writers):
                run.found[name] = _kept(x.detach(), intervals, run.device, alone=False)
                continue
            run.wanted.setdefault(index, []).append((name, _view(x, index), intervals))
            run.need(self.incarnations[index].writers)
        with torch.no_grad():
            run.plan()
            run.all()
        return {name: run.found[name] for name in wanted}


class _Replay:
    """One computation of a recording."""

    def __init__(self, recording: Recording, *, draw: bool, device: torch.device | None = None) -> None:
        self.calls, self.incarnations = recording.calls, recording.incarnations
        self.recording, self.draw, self.device = recording, draw, device or torch.device("cpu")
        self.wanted: dict[int, list[tuple[str, _Ref, Intervals | None]]] = {}
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

    def run(self, call: _Call) -> None:
        if call.draws and call.generator is not None:
            self.set_state(call.generator, call.resume)
        args, kwargs = pytree.tree_map(lambda x: self.tensor(x) if isinstance(x, _Ref) else x, (call.args, call.kwargs))
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

    def set_state(self, generator: torch.Generator, resume: _Resume | None) -> None:
        if resume is not None:
            state = resume.state if resume.state is not None else self.states[id(generator), resume.draw]
            generator.set_state(state)

    def harvest(self, index: int) -> None:
        """Keep the wanted parts of a finished incarnation and drop the rest."""
        for name, ref, intervals in self.wanted.pop(index, ()):
            whole = self.tensor(ref)
            alone = whole.numel() * whole.element_size() == whole.untyped_storage().nbytes()
            self.found[name] = _kept(whole, intervals, self.device, alone=alone)
            del whole
        if index not in self.kept:
            self.buffers.pop(index, None)

    def tensor(self, ref: _Ref) -> Tensor:
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


def _like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _values(recorder: _Recorder, tree: Any) -> Any:
    return pytree.tree_map(lambda x: recorder.value(x) if isinstance(x, Tensor) else x, tree)


def _replaced(tree: Any, by: Mapping[int, Tensor]) -> Any:
    return pytree.tree_map(lambda x: by.get(id(x), x), tree)


def _on_meta(schema: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What makes a new tensor makes it on the meta device."""
    instead = {"device": torch.device("meta"), "pin_memory": None}
    return kwargs | {a.name: instead[a.name] for a in schema.arguments if a.name in instead}


def _kept(whole: Tensor, intervals: Intervals | None, device: torch.device, *, alone: bool) -> Tensor:
    """A part with memory of its own. ``alone`` says that the whole has no other use, so it need not be copied."""
    piece = whole if intervals is None else part(whole, intervals)
    if alone and tuple(piece.shape) == tuple(whole.shape) and piece.data_ptr() == whole.data_ptr():
        return piece.to(device)
    return piece.to(device, copy=True, memory_format=torch.contiguous_format)


def _clone_storage(x: Tensor) -> Tensor:
    storage = x.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage, 0, (storage.nbytes(),), (1,)).clone()


def _view(x: Tensor, incarnation: int) -> _Ref:
    return _Ref(incarnation, tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call writes to."""
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found += [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    return found


def _dense(x: Tensor) -> bool:
    """Whether the elements lie one after the other, in some order of the dims."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _bytes(state: Tensor) -> bytes:
    return state.numpy().tobytes()
