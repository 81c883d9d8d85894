"""Copies of functions, and of objects that a script has made, that have what they reach of a model replaced.

``old = layer.forward; layer.forward = lambda x: 2 * old(x)``, hooks and losses with a penalty refer to modules of a
model: their copies refer to those of a copy of it. Knows functions and objects; no graphs.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from whale.errors import CaptureError
from whale.graph.bytecode import names_of
from whale.ir.objects import CopiedFunction, Variable, held_under, parts_of, reached, slots_of

__all__ = ["MOST_OBJECTS", "Bound", "Rebinding", "is_empty", "places_of", "values_of", "write_value"]

MOST_OBJECTS = 1_000_000
"""Objects that are looked at."""


def places_of(model: nn.Module) -> dict[int, tuple[str, str]]:
    """Kind and name of the modules, parameters and buffers of a model, by their identity."""
    found: dict[int, tuple[str, str]] = {}
    for kind in ("module", "parameter", "buffer"):
        for name, x in getattr(model, f"named_{kind}s")(remove_duplicate=False):
            found.setdefault(id(x), (kind, name))
    return found


class Bound(CopiedFunction):
    """A function with what it reaches of a model: modules, tensors, and objects that the model has as attributes."""

    def __deepcopy__(self, memo: dict[Any, Any]) -> Bound:
        rebinding = memo.setdefault(Rebinding, Rebinding({}, {}))  # one for all functions, that share what they hold
        for x in self.reached.values():
            rebinding.copies[id(x)] = copy.deepcopy(x, memo)
        return Bound(rebinding.of(self.function), self.origin, rebinding.used, self.variables, self.objects)


class Rebinding:
    """Functions, and other objects that refer to what is copied, with copies of these.

    Args:
        copies: by the identity of what is copied.
        places: kind and name of what is a model's, by its identity.
        stays: whether a list or a dict of modules and of other values stays as it is; else it is refused.
        with_objects: whether such, and other objects of the script that have what is copied, are copied.

    Attributes:
        objects: those that were copied, with their copies.
        used: the copies that were used, by their identity.
        variables: of functions, that have something of *places*.
        owner: whose variables these are, in words.
    """

    owner = ""

    def __init__(
        self,
        copies: dict[int, Any],
        places: Mapping[int, tuple[str, str]],
        *,
        stays: bool = False,
        with_objects: bool = False,
    ) -> None:
        self.copies, self.places, self.stays, self.with_objects = copies, places, stays, with_objects
        self.objects: list[tuple[Any, Any]] = []
        self.variables: list[Variable] = []
        self._known: dict[int, tuple[Any, Any]] = {}
        self.used: dict[int, Any] = {}

    def of(self, x: Any) -> Any:
        """*x* with copies; the same object if it refers to nothing that is copied."""
        made = self.copies.get(id(x), x)
        if made is not x:
            self.used[id(made)] = made
        if made is not x or isinstance(x, (nn.Module, Tensor)):
            return made
        if id(x) not in self._known:
            self._known[id(x)] = x, x  # what refers to itself
            self._known[id(x)] = x, self._of_parts(x)
        return self._known[id(x)][1]

    def _of_parts(self, x: Any) -> Any:
        if isinstance(x, MethodType):
            owner = self.of(x.__self__)
            return x if owner is x.__self__ else MethodType(x.__func__, owner)
        if type(x) in (list, tuple, dict, OrderedDict, SimpleNamespace) or _is_named(x):
            return self._of_container(x)
        if isinstance(x, functools._lru_cache_wrapper):
            function = self.of(x.__wrapped__)
            return x if function is x.__wrapped__ else functools.lru_cache(**x.cache_parameters())(function)
        if isinstance(x, functools.partial):
            function, args, keywords = self.of(x.func), self.of(x.args), self._of_names(x.keywords)
            changed = function is not x.func or args is not x.args or keywords is not x.keywords
            return functools.partial(function, *args, **keywords) if changed else x
        if isinstance(x, Bound):
            return self.of(x.function)
        if isinstance(x, RemovableHandle) and not self.stays:
            raise CaptureError(
                "a function that is a module's forward, or a hook, has the handle of a hook, which it could remove: do "
                "what is done once before parallelize, and remove the hook there"
            )
        if isinstance(x, FunctionType):
            return x if str(x.__globals__.get("__name__")).partition(".")[0] == "torch" else self._of_function(x)
        return self._of_object(x) if self.with_objects and self._reaches(x) else x

    def _of_object(self, x: Any) -> Any:
        """A copy of an object whose attributes are copies, or those of the script."""
        try:
            made = object.__new__(type(x))
        except TypeError:  # of a class that is written in C
            return x
        self._known[id(x)] = x, made  # for what refers to it
        self.objects.append((x, made))
        for name, value in values_of(x):
            write_value(made, name, self.of(value))
        return made

    def _reaches(self, x: Any) -> bool:
        """Whether an object of a script has something that is copied, or an object that has."""

        def parts(one: Any) -> Iterable[Any]:
            if isinstance(one, (nn.Module, Tensor)):
                return ()
            if isinstance(one, FunctionType):
                return [cell.cell_contents for cell in one.__closure__ or () if not is_empty(cell)]
            return () if type(one).__module__.partition(".")[0] in ("torch", "whale") else parts_of(one) or ()

        return any(id(one) in self.copies for one in islice(reached([x], parts), MOST_OBJECTS))

    def _of_container(self, x: Any) -> Any:
        names = vars(x) if isinstance(x, SimpleNamespace) else x if isinstance(x, dict) else None
        parts = [*x] if names is None else [*names.values()]
        made = [self.of(part) for part in parts]
        same = [a is b for a, b in zip(made, parts, strict=True)]
        if all(same):
            return x
        if any(same) and not isinstance(x, tuple):
            if self.with_objects:
                return self._of_mixed(x, names, made)
            if self.stays:
                return x
            raise CaptureError(
                f"a function that is a module's forward, or a hook, holds a {type(x).__name__} with modules of the "
                "model and with other values: the parallel model has other modules, and changes of this one could not "
                "be seen; hold the modules in a variable of their own"
            )
        if not isinstance(x, tuple) and self.places:
            self._note_entries(x, list(names or range(len(x))))
        return self._made_of(x, names, made)

    def _of_mixed(self, x: Any, names: Mapping[Any, Any] | None, parts: list[Any]) -> Any:
        """A container of some copies, which is given what changes in that of the script."""
        made = self._made_of(x, names, parts)
        self.objects.append((x, made))
        return made

    @staticmethod
    def _made_of(x: Any, names: Mapping[Any, Any] | None, parts: list[Any]) -> Any:
        if names is not None:
            pairs = dict(zip(names, parts, strict=True))
            return SimpleNamespace(**pairs) if isinstance(x, SimpleNamespace) else type(x)(pairs)
        return x._make(parts) if _is_named(x) else type(x)(parts)

    def _of_function(self, x: FunctionType) -> FunctionType:
        """A function with copies in its variables; the others it shares with *x*."""
        old = x.__closure__ or ()
        cells, variables = tuple(CellType() for _ in old), _Globals({}, x.__globals__)
        made = FunctionType(x.__code__, variables, x.__name__, None, cells)
        self._known[id(x)] = x, made  # for what refers to it
        for cell, one in zip(cells, old, strict=True):
            with suppress(ValueError):  # an empty cell
                cell.cell_contents = self.of(one.cell_contents)
        defaults, keyword = self.of(x.__defaults__), x.__kwdefaults__ and self._of_names(x.__kwdefaults__)
        read = {name: x.__globals__[name] for name in names_of(x.__code__) if name in x.__globals__}
        others = {name: new for name, value in read.items() if (new := self.of(value)) is not value}
        closure = tuple(new if _differ(new, one) else one for new, one in zip(cells, old, strict=True))
        variables.update(others)
        made.__defaults__, made.__kwdefaults__ = defaults, keyword
        made.__dict__.update(x.__dict__)
        found = FunctionType(x.__code__, variables if others else x.__globals__, x.__name__, defaults, closure)
        found.__kwdefaults__, found.__dict__ = keyword, made.__dict__
        cells_of = zip(x.__code__.co_freevars, closure, old, strict=True)
        self._note((name, functools.partial(_content, cell)) for name, new, cell in cells_of if new is not cell)
        self._note((name, functools.partial(x.__globals__.__getitem__, name)) for name in others)
        changed = defaults is not x.__defaults__ or keyword is not x.__kwdefaults__
        for cell, one in zip(closure, old, strict=True):
            if cell is not one and cell.cell_contents is made:
                cell.cell_contents = found
            elif cell is not one:
                changed = True
        for name, new in others.items():
            if new is made:
                variables[name] = found
            else:
                changed = True
        if not changed:
            return x
        for function in (made, found):
            function.__qualname__, function.__module__, function.__doc__ = x.__qualname__, x.__module__, x.__doc__
        return found

    def _of_names(self, x: dict[str, Any]) -> dict[str, Any]:
        """The arguments that a function has by name; the same object if nothing of them is copied."""
        made = {name: self.of(value) for name, value in x.items()}
        return made if any(made[name] is not value for name, value in x.items()) else x

    def _note(self, variables: Iterable[tuple[str, Callable[[], Any]]]) -> None:
        """Note variables that have something of a model, of a tuple its entries."""
        for name, read in variables:
            x = read()
            kind, path = self.places.get(id(x), ("", ""))
            if isinstance(x, tuple):
                self._note((name, functools.partial(_entry_of, read, place)) for place in range(len(x)))
            elif isinstance(x, (bool, int, float, str)):
                self.variables.append(Variable(name, read, functools.partial(_itself, x), "value", str(x), self.owner))
            else:
                with suppress(TypeError):  # of what there is no weak reference to, as a list
                    self.variables.append(Variable(name, read, ref(x), kind, path, self.owner))

    def _note_entries(self, x: Any, keys: Sequence[Any]) -> None:
        """Note the entries of a container that all have something of a model, and their number."""
        kind, num = type(x).__name__, len(keys)
        self._note((f"an entry of a {kind}", functools.partial(_entry, x, key)) for key in keys)
        as_many, first = functools.partial(_has_as_many, x, num), functools.partial(_itself, True)
        self.variables.append(Variable(f"a {kind}", as_many, first, "number of entries", str(num), self.owner))


def values_of(x: Any) -> list[tuple[Any, Any]]:
    """The attributes of an object by name, or the entries of a list or a dict by key."""
    if isinstance(x, (list, dict)):
        return list(x.items() if isinstance(x, dict) else enumerate(x))
    slots = [name for name in slots_of(type(x)) if name not in ("__dict__", "__weakref__") and hasattr(x, name)]
    return [*(held_under(x, "__dict__") or {}).items(), *((name, getattr(x, name)) for name in slots)]


def write_value(x: Any, name: Any, value: Any) -> None:
    """Set an attribute or an entry, also of an object that is frozen."""
    if isinstance(x, (list, dict)):
        x[name] = value
    else:
        object.__setattr__(x, name, value)


def is_empty(cell: CellType) -> bool:
    """Whether a variable of an outer function has no value."""
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def _itself(x: Any) -> Any:
    return x


def _entry_of(read: Callable[[], Any], place: int) -> Any:
    """An entry of the tuple that a variable has; None where it has none."""
    x = read()
    return x[place] if isinstance(x, tuple) and place < len(x) else None


def _entry(x: Any, key: Any) -> Any:
    """An entry of a container, or an attribute of a namespace; None where there is none."""
    with suppress(LookupError):
        return (vars(x) if isinstance(x, SimpleNamespace) else x)[key]
    return None


def _has_as_many(x: Any, num: int) -> bool | None:
    """True if a container has as many entries; else None."""
    return len(vars(x) if isinstance(x, SimpleNamespace) else x) == num or None


def _content(cell: CellType) -> Any:
    return cell.cell_contents


def _is_named(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(x, "_make")


def _differ(one: CellType, other: CellType) -> bool:
    try:
        return one.cell_contents is not other.cell_contents
    except ValueError:  # an empty cell
        return False


class _Globals(dict[str, Any]):
    """The globals of a function, some of them others than those of its file."""

    def __init__(self, others: Mapping[str, Any], rest: dict[str, Any]) -> None:
        super().__init__(others)
        self.rest = rest

    def __missing__(self, name: str) -> Any:
        return self.rest[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.rest

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a global."""
        return super().get(name, self.rest.get(name, default))
