"""Python's objects: their slots, and deep copies of those with attributes that Python cannot copy.

Models hold locks, open files, TensorBoard's writers or modules of Python, as ``self.F = torch.nn.functional``;
``copy.deepcopy`` fails for all of a model then.
"""

from __future__ import annotations

import copy
import functools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from gc import get_referents
from itertools import chain
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar
from weakref import CallableProxyType, ProxyType, WeakMethod, proxy, ref

__all__ = [
    "FORWARD_HOOKS",
    "CopiedFunction",
    "Variable",
    "deep_copy",
    "held_under",
    "part_of",
    "parts_of",
    "reached",
    "slots_of",
]

T = TypeVar("T")

FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Attributes of modules: the tables of the hooks that their forwards call."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), slice, range)
_ATOMS = (type, FunctionType, BuiltinFunctionType, ModuleType, CodeType, FrameType, GeneratorType, ref)
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)


class Variable(NamedTuple):
    """A variable of a function that has something of a model, of which a copy of the function has the copy.

    Attributes:
        name: in the function's code.
        read: gives what it has now; raises a KeyError or a ValueError if it is deleted.
        first: gives what it had, or None.
        kind: what that is of the model: ``module``, ``parameter`` or ``buffer``; empty: a function that has such.
            ``number of entries`` and ``value``: of a container of such, as ``path`` says.
        path: its name in the model.
        owner: whose variable it is, in words.
    """

    name: str
    read: Callable[[], Any]
    first: Callable[[], Any]
    kind: str
    path: str
    owner: str


class CopiedFunction:
    """A function that is copied with what it reaches.

    Attributes:
        function: to call.
        origin: the function of which it is a copy, or a copy of a copy.
        reached: what is copied with it, by its identity.
        variables: those of the script's function that it does not follow.
        objects: of the script's function that are copied with it, each with its copy.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        origin: Callable[..., Any],
        reached: Mapping[int, Any],
        variables: Sequence[Variable] = (),
        objects: Sequence[tuple[Any, Any]] = (),
    ) -> None:
        functools.update_wrapper(self, function)
        self.function, self.origin, self.reached = function, origin, reached
        self.variables, self.objects = variables, objects

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


def deep_copy(x: T, memo: dict[int, Any], parts: Callable[[], Iterable[Any]] = tuple) -> T:
    """A copy by ``copy.deepcopy`` with *memo*, which shares with *x* what cannot be copied.

    Weak references of parts to what is copied, as of a layer to its model, refer to the copies; and a dict that is its
    own attributes has a copy that is so.

    Args:
        x: to be copied.
        memo: copies by the identity of what is copied, as of ``copy.deepcopy``.
        parts: those of *x*, itself among them, each of whose attributes is copied or shared; without any, *x* is.

    Raises:
        Exception: of any type, where each attribute can be copied and all of it cannot.
    """
    known, given = list(parts()), dict(memo)
    made = _copied(x, memo, known, given)
    for one in memo.get(id(memo), ()):  # what was copied, which copy.deepcopy keeps there
        if isinstance(one, dict) and held_under(one, "__dict__") is one:
            memo[id(one)].__dict__ = memo[id(one)]
    for part in known:
        for name, one in vars(part).items():
            weak = _weak_copy(one, memo)
            if weak is not None and id(part) in memo:
                vars(memo[id(part)])[name] = weak
    return made


def _weak_copy(x: Any, memo: Mapping[int, Any]) -> Any:
    """A weak reference to the copy of what one refers to; None of others."""
    if type(x) is ref:
        target = memo.get(id(x()))
        return None if target is None else ref(target)
    if type(x) is WeakMethod and (method := x()) is not None:
        target = memo.get(id(method.__self__))
        return None if target is None else WeakMethod(MethodType(method.__func__, target))
    if type(x) in (ProxyType, CallableProxyType):
        target = memo.get(id(x.__repr__.__self__))  # a method that the proxy has of what it refers to
        return None if target is None else proxy(target)
    return None


def _copied(x: T, memo: dict[int, Any], known: Sequence[Any], given: Mapping[int, Any]) -> T:
    try:
        return copy.deepcopy(x, memo)
    except Exception:  # of any type
        if not known:
            return x
        alone = {**given, **{id(part): part for part in known}}
        shared = [one for part in known for one in _not_copied(vars(part), alone)]
        if not shared:
            raise
    memo.clear()
    memo.update(given)
    # A tensor that autograd has computed is without its history.
    memo.update({id(one): one.detach() if hasattr(type(one), "grad_fn") else one for one in shared})
    return copy.deepcopy(x, memo)


def _not_copied(x: Any, memo: dict[int, Any]) -> Iterator[Any]:
    """The values in a container, or in containers in it, that cannot be copied."""
    for value in list(x.values() if isinstance(x, MutableMapping) else x):
        try:
            copy.deepcopy(value, dict(memo))
        except Exception:  # of any type
            if type(value) in (list, tuple, dict):
                yield from _not_copied(value, {**memo, id(value): value})
            else:
                yield value


def part_of(model: Any, kind: str, path: str) -> Any:
    """A ``module``, ``parameter`` or ``buffer`` of a model, whatever it is there; None where it has none of this
    name."""
    owner, _, name = ("", "", path) if kind == "module" else path.rpartition(".")
    try:
        return model.get_submodule(path) if kind == "module" else getattr(model.get_submodule(owner), name)
    except AttributeError:
        return None


def parts_of(x: Any) -> list[Any] | None:
    """The parts of an object in an order that its copies have too, as of ``copy.deepcopy``; None where copies may have
    another."""
    kind = type(x)
    if isinstance(x, MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, functools.partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, (*_PLAIN, *_ATOMS, bytearray, array)) or kind.__module__.partition(".")[0] == "numpy":
        return []
    if kind.__module__.partition(".")[0] == "whale":
        return None
    found: list[Any] = []
    if isinstance(x, dict):
        found += chain.from_iterable(dict.items(x))  # a subclass may give others
    elif isinstance(x, (list, tuple, deque)):
        found += iter(x)
    elif isinstance(x, (set, frozenset)) and not all(map(_is_plain, x)):
        return None
    names = [name for name in slots_of(kind) if name not in ("__dict__", "__weakref__")]
    held = held_under(x, "__dict__")
    if held is not None and held is not x:
        found += chain.from_iterable(held.items())
    if not isinstance(x, _CONTAINERS) and held is None and not names:  # of a class in C, as an iterator
        return [part for part in get_referents(x) if not isinstance(part, type)]
    return found + [held_under(x, name) for name in names]


def reached(roots: Iterable[Any], parts: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Objects and all that they reach, each once; *parts* gives those of one, none where the way ends."""
    seen: dict[int, Any] = {}  # what is made by a look at another object would leave its identity to others
    waiting = [*roots]
    while waiting:
        x = waiting.pop()
        if id(x) not in seen:
            seen[id(x)] = x
            yield x
            waiting += parts(x)


def _is_plain(x: Any) -> bool:
    return isinstance(x, _PLAIN) or (isinstance(x, (tuple, frozenset)) and all(map(_is_plain, x)))


def held_under(x: Any, name: str) -> Any:
    """An attribute of an object, or one of its slots; None if it has none, or its class raises for that."""
    try:
        return getattr(x, name, None)
    except Exception:  # of any type, by a __getattr__
        return None


def slots_of(kind: type) -> tuple[str, ...]:
    """The names of a class's slots."""
    return _slots_of(kind)


@cache
def _slots_of(kind: type) -> tuple[str, ...]:
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return tuple(name for slots in found for name in ((slots,) if isinstance(slots, str) else slots))
