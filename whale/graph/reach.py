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
import re
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from whale.graph.copies import Bound
from whale.ir.objects import slots_of

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


_STATELESS_OR_BUILT = {*_STATELESS, "builtins", "numpy"}
_OF_MODULES = frozenset(nn.Module().__dict__)
"""Attributes that each module has, whose tensors, modules and hooks are looked at by themselves."""

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
            yield from (getattr(x, name, None) for name in slots_of(type(x)))
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
        classes: those of its modules and of objects that these hold, and others that the code names.
    """

    names: frozenset[str]
    globals: tuple[tuple[Mapping[str, Any], frozenset[str]], ...]
    cells: tuple[tuple[str, CellType], ...]
    objects: tuple[Any, ...]
    pieces: frozenset[str]
    stored: frozenset[str]
    classes: tuple[type, ...]


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks that run with a module's forward."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def names_in_code(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Named:
    """The names in a forward and in the functions that it may call: those of the classes of its modules, and of the
    objects and classes that these hold or name, are found by their names."""
    return _Search(model, loss_fn).run()


_NOT_IN_A_FORWARD = {
    "__init__", "__new__", "__init_subclass__", "__class_getitem__", "__set_name__", "__del__", "__repr__", "__str__",
    "__dir__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__",
    "__post_init__", "__setattr__", "__delattr__", "__sizeof__", "__format__",
}  # fmt: skip
"""Methods that Python calls by itself, but not to compute with an object."""

_WRITTEN = "<string>"
"""File of methods that Python writes, as those of dataclasses, which name all fields."""

_BY_ANY_NAME = {"__dict__", "__getattribute__", "attrgetter", "vars"}
"""Names of what reads attributes whose names may be computed."""

_FORMAT = re.compile(r"%[-+ #0-9.]*[a-z]|\{[^}]*\}")
"""A value's place in a text."""

_DEPTH, _LONG = 6, 1000
"""Depth from which on what an object holds is not looked for, and number of elements from which on in a container."""


class _Search:
    """A search through functions, and through the objects and classes whose methods they may call."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.names = {"forward"}
        self.tables: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        self.cells: dict[int, tuple[str, CellType]] = {}
        self.objects: list[Any] = []
        self.classes: dict[type, None] = {}
        self.pieces, self.stored = set[str](), set[str]()
        self._texts, self._computes_names = set[str](), False
        self._by_name: dict[str, list[Any]] = {}
        self._held: dict[int, Any] = {}
        self._kinds = set[type]()
        self._seen: dict[int, Any] = {}
        self._waiting: list[Any] = []

    def run(self) -> Named:
        modules = list(self.model.modules())
        for module in modules:
            self._hold(module)
        self._waiting.append(self.loss_fn)
        for module in modules:
            self._waiting += [module.__dict__.get("forward"), *hooks_of(module)]
        while self._waiting:
            self._follow(self._waiting.pop())
        # A name that is not in the code is a text that an object holds.
        held = (name for text in self._texts for name in text.split(".")) if self._computes_names else ()
        return Named(
            frozenset(self.names).union(filter(str.isidentifier, held)),
            tuple((table, frozenset(found)) for table, found in self.tables.values()),
            tuple(self.cells.values()),
            tuple(self.objects),
            frozenset(self.pieces),
            frozenset(self.stored),
            tuple(self.classes),
        )

    def _hold(self, x: Any, depth: int = 0) -> None:
        """Note an object, and those that it holds: their methods are found by name."""
        if isinstance(x, str):
            self._texts.add(x)
        if isinstance(x, (*PLAIN, Tensor, FunctionType, MethodType, ModuleType)) or id(x) in self._held:
            return
        if depth > _DEPTH or len(self._held) > REACHED:
            return
        self._held[id(x)] = x
        if isinstance(x, type):
            self._hold_class(x)
            return
        if isinstance(x, dict | MappingProxyType | tuple | list | set | frozenset | deque) and len(x) <= _LONG:
            for inner in [*x, *(x.values() if isinstance(x, dict | MappingProxyType) else ())]:
                self._waiting.extend(_functions(inner))
                self._hold(inner, depth + 1)
        module, own = isinstance(x, nn.Module), _is_own(type(x))
        if not module and not own and (depth > 1 or _package(type(x)) in _STATELESS_OR_BUILT):
            return
        self._hold_class(type(x))
        if not module and not own:
            return
        for name, inner in _attributes(x):
            if not module or name not in _OF_MODULES:
                self._find(name, _functions(inner))
                self._hold(inner, depth + 1)

    def _hold_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if base in self._kinds or _package(base) in _STATELESS_OR_BUILT:
                continue
            self._kinds.add(base)
            own = _is_own(base)
            if own:
                self.classes[base] = None
                self._hold_class(type(base))
            for name, x in list(vars(base).items()):
                self._find(name, [x])
                implied = own and _is_special(name) and name not in _NOT_IN_A_FORWARD
                if implied and isinstance(x, FunctionType) and x.__code__.co_filename != _WRITTEN:
                    self._waiting.append(x)

    def _find(self, name: str, functions: list[Any]) -> None:
        """Let functions be called by this name."""
        self._by_name.setdefault(name, []).extend(functions)
        if name in self.names:
            self._waiting.extend(functions)

    def _follow(self, x: Any) -> None:
        if isinstance(x, str):
            self._texts.add(x)
        if id(x) in self._seen or isinstance(x, (*PLAIN, Tensor, ModuleType)):
            return
        self._seen[id(x)] = x
        if isinstance(x, Bound):
            x = x.function
        if isinstance(x, MethodType):
            self.objects.append(x.__self__)
            self._hold(x.__self__)
            x = x.__func__
        elif isinstance(x, functools.partial):
            self.objects.append(x)
            self.cells[id(x)] = "a functools.partial", CellType((x.args, x.keywords))
            self._waiting.extend((x.func, *x.args, *x.keywords.values()))
        elif isinstance(x, property | functools.cached_property):
            self._waiting.append(x.fget if isinstance(x, property) else x.func)
        elif isinstance(x, staticmethod | classmethod):
            x = x.__func__
        elif x is self.loss_fn and not isinstance(x, FunctionType):
            self.objects.append(x)
            self._waiting.extend(getattr(type(x), name, None) for name in ("__call__", "forward"))
        if not isinstance(x, FunctionType):
            self._hold(x)
        elif _package(x) not in _STATELESS:
            self._read(x)

    def _read(self, x: FunctionType) -> None:
        """Note what a function names."""
        inside = _words(x.__code__)
        if inside & {"environ", "getenv"}:
            self.tables[id(os.environ)] = vars(os.environ), {"_data"}
        own = _is_own(x)
        if "getattr" in inside:
            pieces = _pieces(x.__code__)
            self.pieces |= pieces - {""}
            self._computes_names |= own and "" in pieces
        self._computes_names |= own and bool(inside & _BY_ANY_NAME)
        self.stored |= _stored(x.__code__)
        if own and set(x.__dict__) - {"__wrapped__"}:
            self.objects.append(x)
        new = inside - self.names
        self.names |= inside
        self._waiting.extend(found for name in sorted(new) for found in self._by_name.get(name, ()))
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                self._waiting.append(cell.cell_contents)
                self.cells[id(cell)] = name, cell
        given = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        if not all(isinstance(one, PLAIN) for one in given):
            self.cells[id(x)] = f"an argument of {x.__name__}", CellType(tuple(given))
            self._waiting.extend(given)
        known = [name for name in _names(x.__code__) if name in x.__globals__]
        self._waiting.extend(x.__globals__[name] for name in known if own or _is_called(x.__globals__[name]))
        looked_up = [name for name in known if not _is_code(x.__globals__[name], own)]
        if looked_up:
            table = self.tables.setdefault(id(x.__globals__), (x.__globals__, set()))
            table[1].update(_globals(x.__code__) & {*looked_up})
        for name in known:
            inner = x.__globals__[name]
            if isinstance(inner, ModuleType) and inner.__name__.partition(".")[0] not in _CLASSES:
                words = sorted(word for word in inside if word in vars(inner))
                self._waiting.extend(vars(inner)[word] for word in words if own or _is_called(vars(inner)[word]))
                self.tables.setdefault(id(vars(inner)), (vars(inner), set()))[1].update(words)


def _attributes(x: Any) -> list[tuple[str, Any]]:
    """The attributes of an object, without asking it."""
    found: list[tuple[str, Any]] = []
    with contextlib.suppress(AttributeError):
        found += object.__getattribute__(x, "__dict__").items()
    for name in slots_of(type(x)):
        with contextlib.suppress(AttributeError):  # it has no value
            found.append((name, object.__getattribute__(x, name)))
    return found


_CALLED = (FunctionType, MethodType, functools.partial, Bound, property, staticmethod, classmethod)


def _is_called(x: Any) -> bool:
    return isinstance(x, _CALLED)


def _is_own(x: Any) -> bool:
    """Whether a function or class is a script's, or that of a package whose source it has beside it: of installed
    packages, objects and classes that their code names are constants."""
    return _is_source(_package(x))


@functools.cache
def _is_source(package: str) -> bool:
    if package in _STATELESS_OR_BUILT:
        return False
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None) or "", *(getattr(module, "__path__", None) or ())]
    return not any(part in ("site-packages", "dist-packages") for place in places for part in Path(place).parts)


def _is_special(name: str) -> bool:
    """Whether a name is that of a method that Python calls by itself."""
    return name.startswith("__") and name.endswith("__")


def _is_code(x: Any, replaceable: bool) -> bool:
    """Whether a global is a function or a class, except those that a script may replace, or computes without a state of
    its own."""
    if isinstance(x, FunctionType | type):
        return not replaceable or _package(x) in _STATELESS_OR_BUILT
    return callable(x) and _package(type(x)) in _STATELESS_OR_BUILT


def _functions(x: Any) -> list[Any]:
    """The functions that an attribute is or holds, which a forward may call by the attribute's name."""
    held = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else (x,)
    return [one for one in held if isinstance(one, (FunctionType, MethodType, functools.partial, Bound))]


@functools.cache
def _words(code: CodeType) -> frozenset[str]:
    """Names in a code, and texts in it that could be names, as for getattr."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    texts = (x.split(".") for x in code.co_consts if isinstance(x, str))
    words = [word for text in texts if all(map(str.isidentifier, text)) for word in text]
    return frozenset([*code.co_names, *words]).union(*(_words(x) for x in inner))


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
    """Texts of which a code puts together the names that it gives getattr; an empty one where it has them from
    elsewhere."""
    found = set[str]()
    own = list(dis.get_instructions(code))
    for place, instruction in enumerate(own):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == "getattr":
            name = _second_argument(own[place + 1 :])
            if len(name) != 1 or name[0].opname != "LOAD_CONST":
                texts = [x.argval for x in name if x.opname == "LOAD_CONST" and isinstance(x.argval, str)]
                parts = {part for text in texts for part in re.split(_FORMAT, text) if part}
                found |= parts or {""}
    return frozenset(found).union(*(_pieces(x) for x in code.co_consts if isinstance(x, CodeType)))


def _second_argument(after: Sequence[dis.Instruction]) -> list[dis.Instruction]:
    """The instructions that put the second argument of a call on the stack, of those after the one for its function;
    none if they are not in one piece."""
    height, first_ends, second_ends = 0, -1, -1
    for place, instruction in enumerate(after):
        if instruction.opname in ("PRECALL", "RESUME", "CACHE", "KW_NAMES"):
            continue
        if instruction.opname == "CALL":
            if instruction.arg == height:
                return list(after[first_ends + 1 : second_ends])
            height -= (instruction.arg or 0) + 1
        else:
            height += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if height == 1:
            first_ends = place
        elif height == 2:
            second_ends = place + 1
    return []
