"""Names in the code of a model: a superset of what its forward reads from Python's objects.

Functions are followed through the names of what they may call: methods of the model's modules, of objects that these
hold, and of what scripts define.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn

from whale.graph.bytecode import globals_of, imported_by, names_of, pieces_of, stored_by, words_of
from whale.graph.reach import PLAIN, REACHED, STATELESS, STATELESS_CLASSES, package_of
from whale.graph.rebinding import Bound
from whale.ir.objects import slots_of

__all__ = ["Named", "hooks_of", "names_in_code"]

_OF_MODULES = frozenset(nn.Module().__dict__)
"""Attributes that each module has, whose tensors, modules and hooks are looked at by themselves."""

_OF_NAMES = ("types", "argparse")
"""Python's modules whose objects have attributes alone, as ``SimpleNamespace`` and ``argparse.Namespace``."""

_STATELESS_OR_BUILT = {*STATELESS, "builtins", "numpy"}


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
        whole: whether it may read all attributes of an object of data at once, as ``vars`` and ``asdict`` do.
    """

    names: frozenset[str]
    globals: tuple[tuple[Mapping[str, Any], frozenset[str]], ...]
    cells: tuple[tuple[str, CellType], ...]
    objects: tuple[Any, ...]
    pieces: frozenset[str]
    stored: frozenset[str]
    classes: tuple[type, ...]
    whole: bool = False


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

_WHOLE = {"__dict__", "vars"}
_OF_DATACLASSES = (dataclasses.asdict, dataclasses.astuple, dataclasses.fields)
"""Names by which all attributes of an object are read, and functions that read those of a dataclass."""

_DEPTH, _LONG = 16, 10_000
"""Depth from which on what an object holds is not looked for, and number of elements from which on in a container."""


class _Search:
    """A search through functions, and through the objects and classes whose methods they may call."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.model, self.loss_fn = model, loss_fn
        self._loss = loss_fn.function if isinstance(loss_fn, Bound) else loss_fn
        self.names = {"forward"}
        self.tables: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        self.cells: dict[int, tuple[str, CellType]] = {}
        self.objects: list[Any] = []
        self.classes: dict[type, None] = {}
        self.pieces, self.stored = set[str](), set[str]()
        self._texts, self._computes_names, self._reads_whole = set[str](), False, False
        self._by_name: dict[str, list[Any]] = {}
        self._held: dict[int, Any] = {}
        self._modules: dict[int, ModuleType] = {}
        self._attributes: dict[int, str] = {}
        self._reached, self._layers = set[int](), set[int]()
        self._kinds = set[type]()
        self._seen: dict[int, Any] = {}
        self._waiting: list[Any] = []

    def run(self) -> Named:
        modules = list(self.model.modules())
        self._layers.update(map(id, modules))
        for module in modules:
            self._hold(module)
        self._waiting.append(self.loss_fn)
        for module in modules:
            self._waiting += [module.__dict__.get("forward"), *hooks_of(module)]
        while self._waiting:
            self._follow(self._waiting.pop())
        for python_module in self._modules.values():
            own = vars(python_module)
            table = self.tables.setdefault(id(own), (own, set()))
            table[1].update(name for name in self.names & {*own} if not _is_code(own[name], True))
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
            self._reads_whole,
        )

    def _hold(self, x: Any, depth: int = 0) -> None:
        """Note an object, and those that it holds: their methods are found by name."""
        if isinstance(x, str):
            self._texts.add(x)
        if isinstance(x, ref):
            x = x()
        if isinstance(x, ModuleType):
            self._hold_module(x)
        if isinstance(x, (*PLAIN, Tensor, FunctionType, MethodType, ModuleType)) or id(x) in self._held:
            return
        if depth > _DEPTH or len(self._held) > REACHED:
            return
        self._held[id(x)] = x
        if isinstance(x, type):
            self._hold_class(x)
            return
        if isinstance(x, dict | MappingProxyType | tuple | list | set | frozenset | deque) and len(x) <= _LONG:
            self._hold_all([*x, *(x.values() if isinstance(x, dict | MappingProxyType) else ())], depth)
        if type(x).__module__ in _OF_NAMES:
            self._hold_all(vars(x).values(), depth)
        module, own = isinstance(x, nn.Module), _is_own(type(x))
        if not module and not own and (depth > 1 or package_of(type(x)) in _STATELESS_OR_BUILT):
            return
        self._hold_class(type(x))
        if not module and not own:
            return
        for name, inner in _attributes(x):
            if not module or name not in _OF_MODULES:
                self._attributes.setdefault(id(inner), name)
                self._find(name, _functions(inner))
                self._hold(inner, depth + 1)
        children: Mapping[str, Any] = x._modules if module else {}
        for child in children.values():  # of a loss, which are no layers of the model
            self._hold(child, depth)

    def _hold_all(self, held: Iterable[Any], depth: int) -> None:
        """Note what a container, a namespace or a function holds."""
        for inner in held:
            self._waiting.extend(_functions(inner))
            self._hold(inner, depth + 1)

    def _hold_module(self, x: ModuleType) -> None:
        """Note a module of a script, which code has from an object or imports when it runs."""
        if id(x) in self._modules or not _is_source(x.__name__.partition(".")[0]):
            return
        self._modules[id(x)] = x
        for name, inner in list(vars(x).items()):
            if not _is_special(name):
                self._find(name, [inner])

    def _hold_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if base in self._kinds or package_of(base) in _STATELESS_OR_BUILT:
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
        if isinstance(x, ModuleType):
            self._hold_module(x)
        if id(x) in self._seen or isinstance(x, (*PLAIN, Tensor, ModuleType)):
            return
        self._seen[id(x)] = x
        if isinstance(x, Bound):
            self._reached |= x.reached.keys()
            x = x.function
        if isinstance(x, MethodType):
            if id(x.__self__) not in self._layers:
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
        elif x is self._loss and not isinstance(x, FunctionType):
            self.objects.append(x)
            self._waiting.extend(getattr(type(x), name, None) for name in ("__call__", "forward"))
        if not isinstance(x, FunctionType):
            self._hold(x)
        elif package_of(x) not in STATELESS:
            self._read(x)

    def _read(self, x: FunctionType) -> None:
        """Note what a function names."""
        inside = words_of(x.__code__)
        if inside & {"environ", "getenv"}:
            self.tables[id(os.environ)] = vars(os.environ), {"_data"}
        own = _is_own(x)
        for name in imported_by(x.__code__) if own else ():
            if (module := sys.modules.get(name)) is not None:
                self._hold_module(module)
        if "getattr" in inside:
            pieces = pieces_of(x.__code__)
            self.pieces |= pieces - {""}
            self._computes_names |= own and "" in pieces
        self._computes_names |= own and bool(inside & _BY_ANY_NAME)
        self._reads_whole |= own and _reads_whole(x)
        self.stored |= stored_by(x.__code__)
        if own and set(x.__dict__) - {"__wrapped__"}:
            self.objects.append(x)
            self._hold_all(x.__dict__.values(), 0)
        new = inside - self.names
        self.names |= inside
        self._waiting.extend(found for name in sorted(new) for found in self._by_name.get(name, ()))
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                held = cell.cell_contents
                self._waiting.append(held)
                if id(held) not in self._reached:
                    self.cells[id(cell)] = name, cell
                elif id(held) in self._attributes:  # of the model, whose attribute the script changes
                    self.names.add(self._attributes[id(held)])
        given = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        if not all(isinstance(one, PLAIN) for one in given):
            self.cells[id(x)] = f"an argument of {x.__name__}", CellType(tuple(given))
            self._waiting.extend(given)
        known = [name for name in names_of(x.__code__) if name in x.__globals__]
        self._waiting.extend(x.__globals__[name] for name in known if own or _is_called(x.__globals__[name]))
        looked_up = [name for name in known if not _is_code(x.__globals__[name], own)]
        if looked_up:
            table = self.tables.setdefault(id(x.__globals__), (x.__globals__, set()))
            table[1].update(globals_of(x.__code__) & {*looked_up})
        for name in known:
            inner = x.__globals__[name]
            if isinstance(inner, ModuleType) and inner.__name__.partition(".")[0] not in STATELESS_CLASSES:
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


def _reads_whole(x: FunctionType) -> bool:
    """Whether a function reads all attributes of an object; one that Python calls for an attribute reads that alone."""
    names = names_of(x.__code__)
    known = {id(x.__globals__[name]) for name in names if name in x.__globals__}
    by_module = id(dataclasses) in known and any(read.__name__ in names for read in _OF_DATACLASSES)
    by_name = not x.__name__.startswith("__") and not _WHOLE.isdisjoint(names)
    return by_name or by_module or any(id(read) in known for read in _OF_DATACLASSES)


_CALLED = (FunctionType, MethodType, functools.partial, Bound, property, staticmethod, classmethod)


def _is_called(x: Any) -> bool:
    return isinstance(x, _CALLED)


def _is_own(x: Any) -> bool:
    """Whether a function or class is a script's, or that of a package whose source it has beside it: of installed
    packages, objects and classes that their code names are constants."""
    return _is_source(package_of(x))


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
    if isinstance(x, (ref, nn.Module, MethodType, functools.partial)):
        return False
    if isinstance(x, FunctionType | type):
        return not replaceable or package_of(x) in _STATELESS_OR_BUILT
    return callable(x) and package_of(type(x)) in _STATELESS_OR_BUILT


def _functions(x: Any) -> list[Any]:
    """The functions that an attribute is or holds, which a forward may call by the attribute's name."""
    held = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else (x,)
    return [one for one in held if isinstance(one, (FunctionType, MethodType, functools.partial, Bound))]
