"""Objects of a local model that its parallel model has too, as configurations, schedules and trainers.

A script that has made ``config`` for a model changes it between steps, and its loss reads it, wherever the model is:
the parallel model has the same object, not a copy. So it does with tensors that are no state of the model, as a table
that the script writes to. An object that reaches a module, a parameter or a buffer, as a trainer, is copied with the
model: that of the parallel model reaches the parallel one, and is given what the script changes in its own. Knows
objects; no ranks and no steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import chain
from sys import getrefcount
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from whale.errors import UsageError
from whale.ir.objects import FORWARD_HOOKS, held_under, part_of, parts_of, reached, slots_of
from whale.runtime.attributes import Identity

__all__ = ["CopiedObjects", "SharedObjects", "shared_objects"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), slice, range, torch.device, torch.dtype, torch.Size)
_STANDARD = frozenset(nn.Module().__dict__)

_LARGE = 10_000
"""Number of attributes or entries from which on an object is not followed."""

_MOST = 100_000
"""Objects that a model's attributes reach from which on others are copied."""


class SharedObjects(NamedTuple):
    """The objects of a model, by the identity of their copies in a copy of it.

    Attributes:
        shared: those that reach no module and none of its states.
        apart: others that a script may change, and that are no modules.
    """

    shared: dict[int, Any]
    apart: dict[int, Any]


def shared_objects(model: nn.Module, copied: nn.Module) -> SharedObjects:
    """The objects that the attributes and hooks of a model's modules reach, each with that of a copy of the model."""
    states = {id(x) for x in chain(copied.modules(), copied.parameters(), copied.buffers())}
    found: dict[int, Any] = {}
    holders: dict[int, list[int]] = {}
    apart: list[int] = []
    alive: list[Any] = []  # an object that is made by a look at another one would leave its identity to others
    modules = zip(model.named_modules(), copied.named_modules(), strict=True)
    waiting = [(0, x, its) for (_, module), (_, other) in modules for x, its in _pairs_of(module, other)]
    while waiting:
        holder, x, its = waiting.pop()
        known = id(its)
        if isinstance(x, _PLAIN):
            continue
        holders.setdefault(known, []).append(holder)
        if known in found:
            if found[known] is not x:
                apart.append(known)
            continue
        found[known] = x
        alive.append(its)
        if x is its:
            continue
        parts = _parts_of(x) if type(x) is type(its) and known not in states and len(found) <= _MOST else None
        others = _parts_of(its) if parts is not None else None
        if parts is None or others is None or len(parts) != len(others):
            apart.append(known)
        else:
            waiting += [(known, *pair) for pair in zip(parts, others, strict=True)]
    reaching = _reaching(apart, holders)
    holding = reaching.difference(apart)
    return SharedObjects(
        {known: x for known, x in found.items() if known not in reaching},
        {known: x for known, x in found.items() if known in holding},
    )


def _reaching(apart: Iterable[int], holders: Mapping[int, Collection[int]]) -> set[int]:
    """Objects, and all that have them, directly or not."""
    found: set[int] = set()
    waiting = [*apart]
    while waiting:
        known = waiting.pop()
        if known not in found:
            found.add(known)
            waiting += holders.get(known, ())
    return found


def _pairs_of(module: nn.Module, other: nn.Module) -> Iterator[tuple[Any, Any]]:
    """The attributes and hooks of a module, each with that of a copy of it."""
    tables = [(vars(module), vars(other))]
    tables += [(getattr(module, name), getattr(other, name)) for name in FORWARD_HOOKS]
    for table, copies in tables:
        for name, x in table.items():
            if name not in _STANDARD and name in copies:
                yield x, copies[name]


def _parts_of(x: Any) -> list[Any] | None:
    """The parts of an object; None of one that is copied with a model."""
    if isinstance(x, Tensor):
        return [] if type(x) in (Tensor, nn.Parameter) and x.is_leaf else None
    return parts_of(x)


class CopiedObjects:
    """Objects of a local model that reach some of it: what the script changes in one, as ``trainer.epoch += 1``, is
    changed in that of the parallel model. It keeps none of them alive.

    Args:
        model: the one whose objects are followed up: the parallel one, or its template.
        others: models whose modules and tensors stand for those of the same names: the local one, and the parallel one.
        copies: the objects of the local model, each with that of the parallel one.
        names: gives the names of an object's attributes that steps may read.
    """

    def __init__(
        self,
        model: nn.Module,
        others: Iterable[nn.Module],
        copies: Iterable[tuple[Any, Any]],
        names: Callable[[Any], Collection[str]],
    ) -> None:
        self._model = ref(model)
        self._places = {
            id(x): (ref(x), kind, path)
            for other in others
            for kind in ("module", "parameter", "buffer")
            for path, x in getattr(other, f"named_{kind}s")()
        }
        self._names = names
        self._followed: list[_Followed] = []
        pairs = [*copies]
        ways = _ways_to([x for x, _ in pairs])
        for x, its in pairs:
            of = ways.get(id(x))
            for read in _READERS:
                if of is not None and (table := read(x)) is not None and len(table) < _LARGE:
                    self._followed.append(_Followed(of, its, read, len(table), self._tokens(x, read, table)))

    def of_copy(self, model: nn.Module, memo: Mapping[int, Any]) -> CopiedObjects:
        """The same for a copy of the parallel model with *memo*, as of `copy.deepcopy`."""
        made = copy(self)
        made._model = ref(model)
        made._followed = [
            _Followed(one.of, memo.get(id(one.copy), one.copy), one.read, one.size, one.tokens)
            for one in self._followed
        ]
        return made

    def follow(self) -> None:
        """Give the parallel model what the script has changed since the last time.

        Raises:
            UsageError: it is something of the local model, in an object of its own; names it.
        """
        for one in self._followed:
            x = one.of()
            if x is None:
                continue
            table = one.read(x)
            if len(table) == one.size and all(
                name in table and _token(table[name]) == token for name, token in one.tokens.items()
            ):
                continue
            now = self._tokens(x, one.read, table)
            changed = [name for name in {**one.tokens, **now} if one.tokens.get(name) != now.get(name)]
            self._give(one, type(x).__name__, table, changed)
            one.tokens, one.size = now, len(table)

    def _give(self, one: _Followed, owner: str, table: Mapping[Any, Any], names: Iterable[Any]) -> None:
        its = one.read(one.copy)
        if one.read is _items:
            objects = ((token, place) for place, token in one.tokens.items() if not isinstance(token, tuple))
            had = {token: its[place] for token, place in objects if place in its}
            given = [
                had[token] if token in had else self._its(x, None, owner, "an entry")
                for x, token in [(x, None if isinstance(x, _PLAIN) else _token(x)) for x in table.values()]
            ]
            one.copy.clear()
            (one.copy.update if isinstance(one.copy, set) else one.copy.extend)(given)
            return
        for name in names:
            if one.read is _slots:
                object.__setattr__(one.copy, name, self._its(table[name], its[name], owner, name))  # it may be frozen
            elif name in table:
                its[name] = self._its(table[name], its.get(name), owner, name)
            else:
                its.pop(name, None)

    def _its(self, x: Any, had: Any, owner: str, name: Any) -> Any:
        """The parallel model's object for one of the script's, where it had another."""
        if isinstance(x, _PLAIN) or x is had:
            return x
        found = next((other.copy for other in self._followed if other.of() is x), None)
        if found is None and self._is_local(x):
            _, kind, path = self._places[id(x)]
            found = part_of(self._model(), kind, path)
        elif found is None and self._is_free(x):
            found = x
        if found is None:
            raise UsageError(
                f"{name} of a {owner} that the local model has was changed after parallelize to something of that "
                "model: change it in the model that parallelize has returned"
            )
        return found

    def _is_local(self, x: Any) -> bool:
        return id(x) in self._places and self._places[id(x)][0]() is x

    def _is_free(self, x: Any) -> bool:
        """Whether an object reaches nothing of the local model that is not the parallel one's too."""
        model = self._model()
        own = chain(model.modules(), model.parameters(), model.buffers()) if model is not None else ()
        parallel = set(map(id, own))

        def parts(one: Any) -> Iterable[Any]:
            return () if id(one) in parallel else parts_of(one) or ()

        objects = enumerate(reached([x], parts))
        return not any(number > _MOST or (self._is_local(one) and id(one) not in parallel) for number, one in objects)

    def _tokens(self, x: Any, read: Callable[[Any], Any], table: Mapping[Any, Any]) -> dict[Any, Hashable]:
        names = self._names(x) if read is _attributes else table
        return {name: _token(table[name]) for name in names}


class _Followed:
    """An object with its copy, how its attributes or entries are read, and their number and keys as compared last."""

    def __init__(
        self, of: Callable[[], Any], its: Any, read: Callable[[Any], Any], size: int, tokens: dict[Any, Hashable]
    ) -> None:
        self.of, self.copy, self.read, self.size, self.tokens = of, its, read, size, tokens


def _attributes(x: Any) -> dict[str, Any] | None:
    found = held_under(x, "__dict__")
    return found if isinstance(found, dict) and found is not x else None


def _slots(x: Any) -> dict[str, Any] | None:
    names = [name for name in slots_of(type(x)) if name not in ("__dict__", "__weakref__")]
    return {name: held_under(x, name) for name in names} if names else None


def _entries(x: Any) -> dict[Any, Any] | None:
    return x if isinstance(x, dict) else None


def _items(x: Any) -> dict[int, Any] | None:
    return dict(enumerate(x)) if isinstance(x, (list, deque, set)) else None


_READERS: tuple[Callable[[Any], Any], ...] = (_attributes, _slots, _entries, _items)


def _token(x: Any) -> Hashable:
    """A key of a value, equal where it is the same object. What is changed in one is another's: of one that is shared,
    or of one that is followed too."""
    if isinstance(x, _PLAIN):
        return type(x), x
    return Identity(x) if type(x).__weakrefoffset__ else id(x)


def _ways_to(objects: Sequence[Any]) -> dict[int, Callable[[], Any]]:
    """Functions that give objects while they are alive, by their identity; none for one that could not be let go."""
    found: dict[int, Callable[[], Any]] = {}
    for x in objects:
        try:
            found[id(x)] = ref(x)
        except TypeError:
            if not _reaches_itself(x):
                found[id(x)] = _Kept(x)
    own = {id(x) for x in objects}
    waiting = [x for x in objects if id(x) in found]
    while waiting:  # a list or a dict that reaches itself is found in an object that has it
        x = waiting.pop()
        for read in _READERS:
            for name, part in (read(x) or {}).items():
                if id(part) in own and id(part) not in found:
                    found[id(part)] = partial(_part_of, found[id(x)], read, name, id(part))
                    waiting.append(part)
    return found


def _part_of(of: Callable[[], Any], read: Callable[[Any], Any], name: Any, known: int) -> Any:
    """An attribute or an entry of an object, while it is the known one."""
    x = of()
    part = (read(x) or {}).get(name) if x is not None else None
    return part if id(part) == known else None


class _Kept:
    """An object without weak references, as a dict, until nothing else has it."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __call__(self) -> Any:
        if getrefcount(self._x) <= 2:  # this one and the argument
            self._x = None
        return self._x


def _reaches_itself(x: Any) -> bool:
    objects = enumerate(reached(parts_of(x) or (), lambda part: parts_of(part) or ()))
    return any(part is x or number > _MOST for number, part in objects)
