"""Reach: everything that a module and its code could read, as tokens that are equal where the values are.

Objects are followed through their attributes, containers and closures, and functions through the globals that they
name. This module knows Python's objects, and nothing of graphs and captures.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from whale.graph.copies import Bound

__all__ = ["PLAIN", "REACHED", "WATCHES", "Named", "Reach", "Same", "Unknown", "hooks_of", "names_in_code", "untraced"]

WATCHES = "_whale_watches"
"""Attribute of functions and classes of a capture that stand in for a script's, which is their ``__wrapped__``."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)

REACHED = 10_000
"""Limit on the objects that a layer may reach and still be compared; a layer that reaches more is traced."""

_STATELESS = ("torch", "whale", "logging", *sys.stdlib_module_names)
"""Packages whose functions and classes have no state that distinguishes layers, except `_modes`."""

_CLASSES = ("transformers", *_STATELESS)
"""Packages for which this holds only for classes: their functions may be hooks that collect values."""


_LARGE = 1 << 20
"""Bytes of an array from which on its values are not compared."""


class Unknown(Exception):
    """Raised if a layer reaches an object whose changes cannot be detected."""


class Same:
    """An object as a key, kept alive because its address could be reused."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __hash__(self) -> int:
        return id(self.x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.x is other.x


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function look at tensors, and make some, without the modes that trace what is done with them."""

    @functools.wraps(function)
    def untraced(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return untraced


class Reach:
    """Tokens of reachable objects: equal for equal values, and for the same object in the same state."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._inside = {id(inner): path for path, inner in module.named_modules()}
        self._seen: dict[int, tuple[int, Any]] = {}

    def token(self, x: Any) -> Hashable:
        """The token of an object."""
        if isinstance(x, PLAIN):
            return type(x), x
        if isinstance(x, FunctionType | type) and WATCHES in x.__dict__:
            return self.token(x.__wrapped__)  # type: ignore[union-attr]
        if id(x) in self._inside:
            return nn.Module, self._inside[id(x)]
        if id(x) in self._seen:
            return self._again(x)
        around = isinstance(x, nn.Module) and any(inner is self._module for inner in x.modules())
        if around or isinstance(x, Iterator) or len(self._seen) > REACHED:
            return self._hidden(x)  # a module around finds the layer's place in it; an iterator hides its own
        self._seen[id(x)] = len(self._seen), x
        if isinstance(x, Mapping):
            return type(x), tuple((self.token(key), self.token(value)) for key, value in x.items())
        if isinstance(x, tuple | list | deque):
            return type(x), tuple(self.token(item) for item in x)
        if isinstance(x, set | frozenset):
            return type(x), frozenset(self.token(item) for item in x)
        if isinstance(x, MethodType):
            return type(x), self.token(x.__func__), self.token(x.__self__)
        return Same(x), tuple(self.token(part) for part in self._parts(x))

    def _again(self, x: Any) -> Hashable:
        """The token of an object that was reached before."""
        return Reach, self._seen[id(x)][0]

    def _hidden(self, x: Any) -> Hashable:
        """The token of an object whose changes cannot be detected."""
        raise Unknown

    def _may_read(self, kind: type, name: str) -> bool:
        """Whether code may read an attribute of a class."""
        return True

    def _parts(self, x: Any) -> Iterator[Any]:
        """State, besides its identity, that affects an object's behaviour."""
        if isinstance(x, ref | ContextVar):
            yield x() if isinstance(x, ref) else x.get(None)
        elif isinstance(x, FunctionType | type):
            if isinstance(x, type):
                yield from (part for name, part in _defined(x) if self._may_read(x, name))
            elif _package(x) not in _STATELESS:
                yield from _read(x)
                yield x.__dict__
        elif isinstance(x, staticmethod | classmethod):
            yield x.__func__
        elif isinstance(x, property):
            yield from (x.fget, x.fset)
        elif isinstance(x, random.Random):
            yield x.getstate()
        elif isinstance(x, RemovableHandle):
            yield x.hooks_dict_ref()
        elif _package(type(x)) == "numpy":
            yield _numpy_state(x)
        elif not isinstance(x, Tensor | ModuleType) and _package(type(x)) not in ("torch", "logging"):
            yield type(x)
            yield getattr(x, "__dict__", None)
            yield from (getattr(x, name, None) for name in _slots(type(x)))  # type: ignore[arg-type]
            if isinstance(x, functools.partial):
                yield from (x.func, x.args, x.keywords)


def _package(x: Any) -> str:
    return str(getattr(x, "__module__", "")).partition(".")[0]


def _read(function: FunctionType) -> Iterator[Any]:
    """Free variables of a function: defaults, closure, globals and module attributes."""
    yield from (function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            yield None
    names = _names(function.__code__)
    for name in names:
        x = function.__globals__.get(name)
        yield x
        if isinstance(x, ModuleType) and x.__name__.partition(".")[0] not in _STATELESS:
            yield from (vars(x).get(inner) for inner in names)


@functools.cache
def _names(code: CodeType) -> tuple[str, ...]:
    inner = [name for x in code.co_consts if isinstance(x, CodeType) for name in _names(x)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _defined(kind: type) -> Iterator[tuple[str, Any]]:
    """Attributes of a class and of its base classes, with their names."""
    for base in kind.__mro__:
        if _package(base) not in _CLASSES:
            yield from ((name, x) for name, x in list(vars(base).items()) if name not in ("__dict__", "__weakref__"))


def _numpy_state(x: Any) -> Any:
    """State of an array or of a random generator of numpy."""
    if hasattr(x, "bit_generator"):
        return x.bit_generator.state
    if hasattr(x, "get_state"):
        return repr(x.get_state())
    return x.tobytes() if getattr(x, "nbytes", _LARGE) < _LARGE else None


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return tuple(name for slots in found for name in ((slots,) if isinstance(slots, str) else slots))


# --- what code names --------------------------------------------------------------------------------------------------


class Named(NamedTuple):
    """Names in the code of a model's forward, as a superset of what it reads.

    Attributes:
        names: of attributes, its own and those of objects that it holds.
        globals: for every table of globals, the names that are looked up there.
        cells: variables of the functions around, each with a name.
        objects: other objects that compute, as a loss function with attributes.
        pieces: of names that are put together, as of ``getattr(self, f"layer{i}")``.
        stored: names of attributes that the code sets.
    """

    names: frozenset[str]
    globals: tuple[tuple[Mapping[str, Any], frozenset[str]], ...]
    cells: tuple[tuple[str, CellType], ...]
    objects: tuple[Any, ...]
    pieces: frozenset[str]
    stored: frozenset[str]


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks that run with a module's forward."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def names_in_code(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Named:
    """The names in a forward and in the functions that it may call: those of the classes of its modules, and of the
    objects that these hold, are found by their names."""
    modules = list(model.modules())
    held = [
        x for module in modules for x in module.__dict__.values() if not isinstance(x, (*PLAIN, Tensor, dict, list))
    ]
    classes = dict.fromkeys(type(x) for x in [*modules, *held])
    by_name: dict[str, list[Any]] = {}
    for base in dict.fromkeys(base for kind in classes for base in kind.__mro__):
        if _package(base) not in _STATELESS:
            for name, x in vars(base).items():
                by_name.setdefault(name, []).append(x)
    for module in modules:
        for name, x in module.__dict__.items():
            by_name.setdefault(name, []).extend(_functions(x))
    names = {"forward"}
    tables: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
    cells: dict[int, tuple[str, CellType]] = {}
    objects: list[Any] = []
    pieces, stored = set[str](), set[str]()
    seen = set[int]()
    waiting: list[Any] = [loss_fn, *by_name.get("forward", ())]
    for module in modules:
        waiting += [module.__dict__.get("forward"), *hooks_of(module)]
    while waiting:
        x = waiting.pop()
        if id(x) in seen or x is None:
            continue
        seen.add(id(x))
        if isinstance(x, Bound):
            x = x.function
        if isinstance(x, MethodType):
            objects.append(x.__self__)
            x = x.__func__
        elif isinstance(x, functools.partial):
            objects.append(x)
            cells[id(x)] = "a functools.partial", CellType((x.args, x.keywords))
            waiting.extend((x.func, *x.args, *x.keywords.values()))
        elif isinstance(x, property):
            waiting.append(x.fget)
        elif isinstance(x, staticmethod | classmethod):
            x = x.__func__
        elif x is loss_fn and not isinstance(x, FunctionType):
            objects.append(x)
            waiting.extend(getattr(type(x), name, None) for name in ("__call__", "forward"))
        if not isinstance(x, FunctionType) or _package(x) in _STATELESS:
            continue
        inside = _words(x.__code__)
        if inside & {"environ", "getenv"}:
            tables[id(os.environ)] = vars(os.environ), {"_data"}
        if "getattr" in inside:
            pieces |= _pieces(x.__code__)
        stored |= _stored(x.__code__)
        new = inside - names
        names |= inside
        waiting.extend(found for name in new for found in by_name.get(name, ()))
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                waiting.append(cell.cell_contents)
                cells[id(cell)] = name, cell
        given = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        if not all(isinstance(one, PLAIN) for one in given):
            cells[id(x)] = f"an argument of {x.__name__}", CellType(tuple(given))
            waiting.extend(given)
        known = [name for name in _names(x.__code__) if name in x.__globals__]
        waiting.extend(x.__globals__[name] for name in known)
        looked_up = [name for name in known if not callable(x.__globals__[name])]
        if looked_up:
            tables.setdefault(id(x.__globals__), (x.__globals__, set()))[1].update(_globals(x.__code__) & {*looked_up})
        for name in known:
            inner = x.__globals__[name]
            if isinstance(inner, ModuleType) and inner.__name__.partition(".")[0] not in _CLASSES:
                own = [word for word in inside if word in vars(inner)]
                waiting.extend(vars(inner)[word] for word in own)
                tables.setdefault(id(vars(inner)), (vars(inner), set()))[1].update(own)
    return Named(
        frozenset(names),
        tuple((table, frozenset(found)) for table, found in tables.values()),
        tuple(cells.values()),
        tuple(objects),
        frozenset(pieces),
        frozenset(stored),
    )


def _functions(x: Any) -> list[Any]:
    """The functions that an attribute is or holds, which a forward may call by the attribute's name."""
    held = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else (x,)
    return [one for one in held if isinstance(one, (FunctionType, MethodType, functools.partial, Bound))]


@functools.cache
def _words(code: CodeType) -> frozenset[str]:
    """Names in a code, and texts in it that could be names, as for getattr."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    texts = [x for x in code.co_consts if isinstance(x, str) and x.isidentifier()]
    return frozenset([*code.co_names, *texts]).union(*(_words(x) for x in inner))


@functools.cache
def _globals(code: CodeType) -> frozenset[str]:
    """Names that a code looks up among globals."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    own = (x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return frozenset(own).union(*(_globals(x) for x in inner))


@functools.cache
def _stored(code: CodeType) -> frozenset[str]:
    """Names of attributes that a code sets."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    own = (x.argval for x in dis.get_instructions(code) if x.opname == "STORE_ATTR")
    return frozenset(own).union(*(_stored(x) for x in inner))


@functools.cache
def _pieces(code: CodeType) -> frozenset[str]:
    """Texts of which a code puts together the names that it gives getattr."""
    found = set[str]()
    own = list(dis.get_instructions(code))
    for place, instruction in enumerate(own):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == "getattr":
            call = next((x for x in own[place + 1 :] if x.opname.startswith("CALL")), own[-1])
            given = own[place + 1 : own.index(call)]
            if any(x.opname in ("FORMAT_VALUE", "FORMAT_SIMPLE", "BUILD_STRING", "BINARY_OP") for x in given):
                found |= {x.argval for x in given if x.opname == "LOAD_CONST" and isinstance(x.argval, str)}
    return frozenset(found).union(*(_pieces(x) for x in code.co_consts if isinstance(x, CodeType)))
