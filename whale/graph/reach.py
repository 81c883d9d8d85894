"""Reach: everything that a module and its code could read, as tokens that are equal where the values are.

Objects are followed through their attributes, containers and closures, and functions through the globals that they
name. This module knows Python's objects, and nothing of graphs and captures.
"""

from __future__ import annotations

import functools
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from io import BytesIO, StringIO
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from whale.graph.bytecode import names_of
from whale.ir.objects import held_under, slots_of

__all__ = [
    "PLAIN",
    "REACHED",
    "STATELESS",
    "STATELESS_CLASSES",
    "WATCHES",
    "Reach",
    "Same",
    "Unknown",
    "package_of",
    "untraced",
]

WATCHES = "_whale_watches"
"""Attribute of functions and classes of a capture that stand in for a script's, which is their ``__wrapped__``."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)

REACHED = 10_000
"""Limit on the objects that a layer may reach and still be compared; a layer that reaches more is traced."""

STATELESS = ("torch", "whale", "logging", *sys.stdlib_module_names)
"""Packages whose functions and classes have no state that distinguishes layers, except `_modes`."""

STATELESS_CLASSES = ("transformers", *STATELESS)
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
        if isinstance(x, dict | MappingProxyType):  # of other mappings the attributes: some make their entries
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
            elif package_of(x) not in STATELESS:
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
        elif isinstance(x, bytearray | array):
            yield bytes(x) if len(x) < _LARGE else None
        elif isinstance(x, StringIO | BytesIO):
            yield from (x.closed, None if x.closed else (x.getvalue(), x.tell()))
        elif package_of(type(x)) == "numpy":
            yield _numpy_state(x)
        elif not isinstance(x, Tensor | ModuleType) and package_of(type(x)) not in ("torch", "logging"):
            yield type(x)
            yield held_under(x, "__dict__")
            yield from (held_under(x, name) for name in slots_of(type(x)))
            if isinstance(x, functools.partial):
                yield from (x.func, x.args, x.keywords)


def package_of(x: Any) -> str:
    """The package in which a function or a class is defined."""
    return str(getattr(x, "__module__", "")).partition(".")[0]


def _read(function: FunctionType) -> Iterator[Any]:
    """Free variables of a function: defaults, closure, globals and module attributes."""
    yield from (function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            yield None
    names = names_of(function.__code__)
    for name in names:
        x = function.__globals__.get(name)
        yield x
        if isinstance(x, ModuleType) and x.__name__.partition(".")[0] not in STATELESS:
            yield from (vars(x).get(inner) for inner in names)


def _defined(kind: type) -> Iterator[tuple[str, Any]]:
    """Attributes of a class and of its base classes, with their names."""
    for base in kind.__mro__:
        if package_of(base) not in STATELESS_CLASSES:
            yield from ((name, x) for name, x in list(vars(base).items()) if name not in ("__dict__", "__weakref__"))


def _numpy_state(x: Any) -> Any:
    """State of an array or of a random generator of numpy."""
    if hasattr(x, "bit_generator"):
        return x.bit_generator.state
    if hasattr(x, "get_state"):
        return repr(x.get_state())
    return x.tobytes() if getattr(x, "nbytes", _LARGE) < _LARGE else None
