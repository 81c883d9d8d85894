"""Values that a compiled step has from Python: attributes of modules, globals, variables of enclosing functions.

A graph has them as they were when it was captured. Where a script changes one, as ``model.alpha = 0.5``, or freezes a
parameter, the next step is compiled with it. Knows objects and tables of them; no ranks and no graphs.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import is_dataclass
from functools import cache, partial
from itertools import chain
from operator import is_, itemgetter
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn

from whale.ir.objects import FORWARD_HOOKS, CopiedFunction, deep_copy, held_under, slots_of

__all__ = ["Attributes", "Changes", "Identity", "Sources", "Tokens"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_ATOMS = (*_PLAIN, type, FunctionType, ModuleType)
_FOLLOWED = (MethodType, CopiedFunction, partial, ref)
_BYTES = (bytearray, memoryview, array)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, MappingProxyType)
_STANDARD = frozenset(nn.Module().__dict__)
_TRAINS = ".requires_grad"

_LARGE_ARRAY = 1 << 20
"""Bytes of an array of numpy from which on its values are not compared."""

_LARGE, _DEEP = 10_000, 16
"""Number of elements from which on a container, and depth from which on an object, is not looked into."""


_Name = tuple[str, str | int]
"""An owner, as a module by its path, and the name of its attribute; or its table of hooks, and the number of one."""

Tokens = dict[_Name, Hashable]
"""Keys of values: equal for equal values."""


class Sources(NamedTuple):
    """Names in the code of a model: see `whale.graph.code_names.Named`."""

    names: Collection[str] = ()
    globals: Collection[tuple[Mapping[str, Any], Collection[str]]] = ()
    cells: Collection[tuple[str, CellType]] = ()
    objects: Collection[Any] = ()
    pieces: Collection[str] = ()
    stored: Collection[str] = ()
    classes: Collection[type] = ()
    whole: bool = False


class Changes(NamedTuple):
    """Differences from the values with which a model was captured first.

    Attributes:
        key: names with values, equal for equal values; empty if there are none.
        names: attributes of modules, of their parameters, and hooks, that were changed at any time, by path.
        source: gives the model that has their values; what it does not have was deleted.
        sources: what its code names.
        attributes: gives those of which these are the differences, which keep these.
    """

    key: tuple[tuple[str, Hashable], ...] = ()
    names: Mapping[str, Collection[str | int]] = {}
    source: Callable[[], nn.Module | None] = lambda: None
    sources: Sources = Sources()
    attributes: Callable[[], Attributes | None] = lambda: None

    def take(self, leave: Callable[[nn.Module], bool]) -> tuple[Changes, bool]:
        """Let a step give the model what its forward keeps; see :meth:`Attributes.take`."""
        attributes = self.attributes()
        return (self, False) if attributes is None else attributes.take(leave)

    def __str__(self) -> str:
        return ", ".join(f"{name}={_shown(token)}" for name, token in self.key)

    def write(self, model: nn.Module) -> None:
        """Give *model*, whose modules are alike, copies of the changed attributes."""
        source = self.source()
        if source is None:
            return
        memo: dict[int, Any] = {id(theirs): own for theirs, own in zip(source.modules(), model.modules(), strict=False)}
        # Steps read the tensors that a script has beside the model.
        memo |= {id(x): x for _, x in Attributes(source, self.sources).tensors()}
        in_own, in_theirs = _in_functions(model), _in_functions(source)
        for owner, names in self.names.items():
            table, held = _table_of(model, owner), _table_of(source, owner)
            for name in names:
                is_shared = id(held.get(name)) in in_theirs and id(table.get(name)) in in_own
                if is_shared and _became(table[name], deep_copy(held[name], memo)):
                    continue
                if isinstance(name, str) and name.endswith(_TRAINS):
                    parameter = f"{owner}.{name.removesuffix(_TRAINS)}".removeprefix(".")
                    model.get_parameter(parameter).requires_grad_(source.get_parameter(parameter).requires_grad)
                    continue
                table.pop(name, None)
                if name in held:
                    table[name] = deep_copy(held[name], memo)


def _table_of(model: nn.Module, owner: str) -> dict[Any, Any]:
    """The attributes of a module of a model, or its hooks of a kind."""
    path, _, kind = owner.rpartition(":")
    return getattr(model.get_submodule(path), kind) if kind in FORWARD_HOOKS else model.get_submodule(owner).__dict__


def _full_name(owner: str, name: str | int) -> str:
    if isinstance(name, int):
        return f"a hook of {owner.rpartition(':')[0] or 'the model'}"
    return f"{owner}.{name}".removeprefix(".")


def _in_functions(model: nn.Module) -> set[int]:
    """The identities of objects that functions on a model have in their variables, and the model as attributes."""
    found = set[int]()
    for module in model.modules():
        for x in chain(module.__dict__.values(), module._forward_hooks.values(), module._forward_pre_hooks.values()):
            found.update(x.reached if isinstance(x, CopiedFunction) else ())
    return found


def _became(x: Any, other: Any) -> bool:
    """Give an object the state of another, if that can be."""
    if type(x) is not type(other):
        return False
    if isinstance(x, list | deque):
        x.clear()
        x.extend(other)
    elif isinstance(x, dict | set):
        x.clear()
        x.update(other)
    elif hasattr(x, "__dict__") and not slots_of(type(x)):
        x.__dict__.clear()
        x.__dict__.update(other.__dict__)
    else:
        return False
    return True


class Identity:
    """An object as a key, in a version, which does not keep it where it can be referred to weakly."""

    def __init__(self, x: Any, version: Hashable = 0) -> None:
        self._hash = hash((id(x), version))
        self._version = version
        self._get: Callable[[], Any]
        try:
            self._get = ref(x)
        except TypeError:
            self._get = lambda: x

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or self._version != other._version:
            return False
        x = self._get()
        return self is other or (x is not None and x is other._get())


class _Again:
    """The kind of the key of an object that is in a value several times."""


def _shown(token: Any) -> str:
    return repr(token[1]) if isinstance(token, tuple) and len(token) == 2 and token[0] in _PLAIN else "another value"


class Attributes:
    """The values of a model's modules, and of what else its code names, as they are now.

    Args:
        root: the model.
        sources: what its code names.
        first: the first values of what is there, if they are not those of now.
        ever: names of those that were changed at any time.

    Attributes:
        first: the first values.
        ever: names of those that were changed at any time.
    """

    def __init__(
        self, root: nn.Module, sources: Sources, first: Tokens | None = None, ever: Collection[_Name] = ()
    ) -> None:
        self.sources = sources
        self._root = ref(root)
        self._own = {id(module): path for path, module in self._modules.items()}
        # Parameters and buffers, which recurrent layers have in lists too: steps read them, and update them.
        held = chain.from_iterable(module.__dict__.values() for module in self._modules.values())
        elsewhere = (x for x in held if isinstance(x, nn.Parameter))  # of other ranks
        self._states = {id(x) for x in [*root.parameters(), *root.buffers(), *elsewhere]}
        self._given: dict[int, frozenset[str]] = {}
        self.first, self.ever = self._tokens(), dict.fromkeys(ever)
        self._changes = Changes()
        if first is not None:
            owners = {*self._modules, *(owner for owner, _ in self.first)}
            self.first = {name: token for name, token in first.items() if name[0] in owners}
            self._compare()
        self._look()

    @property
    def _modules(self) -> dict[str, nn.Module]:
        root = self._root()
        return dict(root.named_modules()) if root is not None else {}

    def changes(self) -> Changes:
        """The differences from the first values."""
        try:
            now = list(chain.from_iterable([read() for read in self._reads]))
            same = len(now) == len(self._known) and all(map(is_, now, self._known))
        except (KeyError, ValueError):  # deleted
            same = False
        if not same or [len(table) for table in self._tables] != self._sizes:
            self._compare()
            self._look()
        return self._changes

    def take(self, leave: Callable[[nn.Module], bool]) -> tuple[Changes, bool]:
        """Let a step give the model values, which are its first ones from then on; the differences of the others, and
        what *leave* returns."""
        root = self._root()
        before = self._tokens()
        says = root is not None and leave(root)
        now = self._tokens()
        for name in [name for name in now if before.get(name) != now[name]]:
            self.first[name] = now[name]
            self.ever.pop(name, None)
        self._compare()
        self._look()
        return self._changes, says

    def unlike(self, other: Attributes) -> list[str]:
        """Names of values that are not the first ones, and that *other*, of an alike model, does not have now,
        except those that the model's code sets."""
        now, theirs = self._tokens(), other._tokens()
        return [
            _full_name(owner, name)
            for owner, name in {**self.first, **now}
            if name not in self.sources.stored
            and self.first.get((owner, name)) != now.get((owner, name)) != theirs.get((owner, name))
        ]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors in the values that are neither parameters nor buffers, by the names of the values."""
        for owner, table, names in self._roots():
            for name in names:
                yield from ((_full_name(owner, name), x) for x in self._tensors_in(table[name], 1, set()))
        for name, cell in self.sources.cells:
            with suppress(ValueError):  # it is empty
                yield from ((name, x) for x in self._tensors_in(cell.cell_contents, 1, set()))

    def _tensors_in(self, x: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
        if isinstance(x, _PLAIN) or id(x) in seen or depth > _DEEP:
            return
        seen.add(id(x))
        own = _held_by(x) if isinstance(x, nn.Module) else [x]
        yield from (one for one in own if type(one) in (Tensor, nn.Parameter) and id(one) not in self._states)
        for read in self._parts(x) or ():
            for part in read():
                yield from self._tensors_in(part, depth + 1, seen)

    def _compare(self) -> None:
        now = self._tokens()
        changed = [name for name in {**self.first, **now} if self.first.get(name) != now.get(name)]
        self.ever.update(dict.fromkeys(changed))
        names: dict[str, list[str | int]] = {}
        modules = self._modules
        for owner, name in self.ever:
            if owner in modules or isinstance(name, int):
                names.setdefault(owner, []).append(name)
        key = tuple((_full_name(owner, name), now.get((owner, name))) for owner, name in changed)
        self._changes = Changes(key, names, self._root, self.sources, ref(self))

    def _roots(self) -> Iterator[tuple[str, Mapping[Any, Any], Collection[Any]]]:
        """Tables with the names of their owners, and the names in each that matter."""
        modules = self._modules
        for path, module in modules.items():
            yield path, module.__dict__, self.named(module)
            for hooks in FORWARD_HOOKS:
                if held := getattr(module, hooks):
                    yield f"{path}:{hooks}", held, list(held)
        bases = (base for module in modules.values() for base in type(module).__mro__)
        for kind in dict.fromkeys(chain(bases, self.sources.classes)):
            if kind.__module__.partition(".")[0] not in ("torch", "builtins", "whale", "transformers"):
                held = (name for name in vars(kind) if not name.startswith("__"))
                yield f"class {kind.__module__}.{kind.__qualname__}", vars(kind), sorted(filter(self._is_named, held))
        for table, names in self.sources.globals:
            yield f"module {table.get('__name__')}", table, sorted(name for name in names if name in table)
        for given in self.sources.objects:
            for x in given.modules() if isinstance(given, nn.Module) else (given,):  # a loss has modules too
                if id(x) not in self._own and held_under(x, "__dict__") is not None:
                    yield f"a {type(x).__name__}", x.__dict__, self.named(x)
                elif slots_of(type(x)):
                    yield f"a {type(x).__name__}", {"slots": x}, ["slots"]

    def named(self, x: Any) -> list[str]:
        """The names of an object's attributes that matter: of a module of torch all."""
        names = x.__dict__.keys()
        if isinstance(x, nn.Module):
            names -= _STANDARD | {"_whale"}
            kind = next(base for base in type(x).__mro__ if not base.__module__.startswith("whale."))
            if kind.__module__.startswith("torch."):  # its code is not searched for names
                names &= self._given.setdefault(id(x), frozenset(names)) | {*self.sources.names}
                return sorted(names)
        own: type = type(x)
        every = not isinstance(x, nn.Module) and (_makes_names(own) or (self.sources.whole and _is_of_data(own)))
        return sorted(names if every else filter(self._is_named, names))

    def _is_named(self, name: str) -> bool:
        """Whether the code may read an attribute of this name."""
        return name in self.sources.names or any(piece in name for piece in self.sources.pieces)

    def _tokens(self) -> Tokens:
        """Every value by name."""
        found: Tokens = {}
        seen: dict[str, int] = {}

        def numbered(owner: str) -> str:
            seen[owner] = seen.get(owner, 0) + 1
            return owner if seen[owner] == 1 else f"{owner} ({seen[owner]})"

        for owner, table, names in self._roots():
            own = numbered(owner)
            found |= {(own, name): self._token(table[name], {}) for name in names}
        for name, cell in self.sources.cells:
            with suppress(ValueError):  # it is empty
                found["an enclosing function", numbered(name)] = self._token(cell.cell_contents, {})
        for path, module in self._modules.items():
            found |= {(path, n + _TRAINS): (bool, p.requires_grad) for n, p in _own_parameters(module)}
        return found

    def _token(self, x: Any, seen: dict[int, int], depth: int = 0) -> Hashable:
        """A key of a value: equal where all is that code may read of it. *seen* numbers what is in it already."""
        if isinstance(x, _PLAIN):
            return type(x), x
        if isinstance(x, Tensor):
            return None if id(x) in self._states else Identity(x, (x._version, _place_of(x)))
        if isinstance(x, CopiedFunction):
            return Identity(x.origin)
        if id(x) in seen:
            return _Again, seen[id(x)]
        if id(x) in self._own:
            return nn.Module, self._own[id(x)]
        parts = self._parts(x) if depth < _DEEP else None
        if parts is None:
            return Identity(x)
        seen[id(x)] = len(seen)
        values = tuple(self._token(part, seen, depth + 1) for part in chain.from_iterable(read() for read in parts))
        names = tuple(self.named(x)) if self._has_names(x) else ()
        # Steps read the tensors of a module that is not of the model, which may be written to, as of a teacher.
        held = tuple(Identity(one, _place_of(one)) for one in _held_by(x)) if isinstance(x, nn.Module) else ()
        return type(x), names, values, held

    def _parts(self, x: Any) -> list[Callable[[], Iterable[Any]]] | None:
        """Readers of the values in an object, if it is looked into."""
        if isinstance(x, (*_ATOMS, Tensor)) or id(x) in self._own:
            return None
        if isinstance(x, ContextVar):
            return [partial(_value_of, x)]
        if isinstance(x, _CONTAINERS):
            if len(x) > _LARGE:
                return None
            names = self._readers_of_names(x)
            return [x.keys, x.values, *names] if isinstance(x, (dict, MappingProxyType)) else [partial(iter, x), *names]
        if isinstance(x, partial):
            return [lambda: (x.func, x.args, x.keywords)]
        if isinstance(x, MethodType):
            return [lambda: (x.__func__, x.__self__)]
        if isinstance(x, WeakMethod):
            return [lambda: (getattr(x(), "__func__", None), getattr(x(), "__self__", None))]
        if isinstance(x, ref):
            return [lambda: (x(),)]
        if isinstance(x, _BYTES):
            return [_Last(partial(bytes, x))] if memoryview(x).nbytes < _LARGE_ARRAY else None
        if type(x).__module__.partition(".")[0] == "numpy":
            return [_Last(x.tobytes)] if getattr(x, "nbytes", _LARGE_ARRAY) < _LARGE_ARRAY else None
        inside = isinstance(x, nn.Module)
        found: list[Callable[[], Iterable[Any]]] = [x._modules.values] if inside else []
        kind: type = type(x)
        makes = not inside and (_makes_names(kind) or (self.sources.whole and _is_of_data(kind)))
        slots = [name for name in slots_of(type(x)) if makes or self._is_named(name)]
        if slots:
            found.append(lambda: [held_under(x, name) for name in slots])
        found += self._readers_of_names(x)
        return found or None

    def _readers_of_names(self, x: Any) -> list[Callable[[], Iterable[Any]]]:
        names = self.named(x) if self._has_names(x) else []
        return [partial(_several(names), x.__dict__)] if names else []

    @staticmethod
    def _has_names(x: Any) -> bool:
        """Whether an object has attributes that are looked at, as one of a kind of dict may."""
        own = None if isinstance(x, (*_ATOMS, *_FOLLOWED, Tensor)) else held_under(x, "__dict__")
        if not isinstance(own, dict) or own is x:
            return False
        return type(x).__module__.partition(".")[0] != "torch" or isinstance(x, nn.Module)

    def _look(self) -> None:
        """Note which objects there are, to notice cheaply that they are no more."""
        self._reads: list[Callable[[], Iterable[Any]]] = []
        self._tables: list[Mapping[str, Any]] = []
        seen = dict[int, Any]()
        for _, table, names in self._roots():
            self._tables.append(table)
            if names:
                read = partial(_several(names), table)
                self._reads.append(read)
                for x in read():
                    self._follow(x, 1, seen)
        for _, cell in self.sources.cells:
            with suppress(ValueError):  # it is empty
                self._follow(cell.cell_contents, 1, seen)
                self._reads.append(partial(_content, cell))
        parameters = [p for module in self._modules.values() for _, p in _own_parameters(module)]
        self._reads.append(lambda: [p.requires_grad for p in parameters])
        self._known = list(chain.from_iterable([read() for read in self._reads]))
        self._sizes = [len(table) for table in self._tables]

    def _follow(self, x: Any, depth: int, seen: dict[int, Any]) -> None:
        if isinstance(x, _PLAIN) or id(x) in seen or depth > _DEEP:
            return
        seen[id(x)] = x
        if isinstance(x, Tensor) and id(x) not in self._states:
            self._reads.append(_Last(lambda: (x._version, _place_of(x))))
        if self._has_names(x) and id(x) not in self._own:
            self._tables.append(x.__dict__)  # a name that it gets may be that of a default of its class
        for read in self._parts(x) or ():
            self._reads.append(read)
            for part in read():
                self._follow(part, depth + 1, seen)
        if isinstance(x, nn.Module) and id(x) not in self._own:
            self._reads += [partial(_held_by, x), _Last(lambda: tuple(map(_place_of, _held_by(x))))]


def _held_by(module: nn.Module) -> list[Any]:
    """The tensors and hooks of a module."""
    tables = (module._parameters, module._buffers, *(getattr(module, hooks) for hooks in FORWARD_HOOKS))
    return [x for table in tables for x in table.values() if x is not None]


@cache
def _makes_names(kind: Any) -> bool:
    """Whether attributes of objects of a class may be read by other names, as those of a `collections.UserDict` or of
    a class with a ``__getattr__``, or with aliases, as configurations of transformers."""
    readers = {"__getattr__", "__getattribute__"}
    return any(
        base.__module__ == "collections" or readers & {*vars(base)} for base in kind.__mro__ if base is not object
    )


def _is_of_data(kind: type) -> bool:
    """Whether objects of a class are read as a whole, as configurations are: dataclasses and namespaces."""
    return is_dataclass(kind) or any(base.__module__ in ("types", "argparse") for base in kind.__mro__)


def _place_of(x: Any) -> int:
    """The address of a tensor, another one once a script has set its ``.data``; 0 of others."""
    return x.data_ptr() if type(x) in (Tensor, nn.Parameter) else 0


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module._parameters.items() if p is not None]


def _several(names: Collection[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    get = itemgetter(*names)
    return get if len(names) > 1 else lambda table: (get(table),)


class _Last:
    """A reader of a value that gives the same object while it is equal."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read, self._last = read, read()

    def __call__(self) -> tuple[Any]:
        now = self._read()
        if now != self._last:
            self._last = now
        return (self._last,)


def _value_of(variable: ContextVar[Any]) -> tuple[Any]:
    return (variable.get(None),)


def _content(cell: CellType) -> tuple[Any]:
    return (cell.cell_contents,)
