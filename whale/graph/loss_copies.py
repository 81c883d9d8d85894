"""Losses that read a model: those of a copy read the copy, and the objects that both have are known.

Knows functions and objects; no graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import islice
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from whale.graph.bytecode import names_of
from whale.graph.rebinding import MOST_OBJECTS, Bound, Rebinding, is_empty, places_of
from whale.ir.objects import FORWARD_HOOKS, held_under, part_of, parts_of, reached

__all__ = ["READ_BY_LOSS", "function_of_copy", "mark_read_by_loss"]

_STANDARD = frozenset(nn.Module().__dict__)

READ_BY_LOSS = "_whale_read_by_loss"
"""Attribute of modules of copies: names of attributes and tables of hooks with an object that the loss has too."""


def function_of_copy(function: Callable[..., Any], model: nn.Module, made: nn.Module) -> Callable[..., Any]:
    """A function that reads modules or parameters of *model*, as a loss with a penalty does, with those of *made*, a
    copy of it; itself where it has none in its variables, and in the objects that it has."""
    places = places_of(model)
    copies = {known: part_of(made, kind, name) for known, (kind, name) in places.items()}
    copies = {known: x for known, x in copies.items() if x is not None}
    rebinding = Rebinding(copies, places, stays=True, with_objects=True)
    rebinding.owner = "the loss"
    found = rebinding.of(function)
    if found is function or found is getattr(function, "function", None):
        return function
    if isinstance(function, Bound):
        return Bound(found, function.origin, rebinding.used, function.variables, tuple(rebinding.objects))
    return Bound(found, function, rebinding.used, tuple(rebinding.variables), tuple(rebinding.objects))


def mark_read_by_loss(model: nn.Module, made: nn.Module, loss_fn: Callable[..., Any]) -> None:
    """Note on the modules of *made*, a copy of a model, which attributes and hooks have an object of the script's that
    the loss has too, by itself: that of a copy is another one, so the loss does not see what a forward does to it."""
    modules = dict(model.named_modules())
    inside = {id(module) for module in modules.values()}
    read = _objects_in([loss_fn], inside)

    def has(x: Any) -> bool:
        return not isinstance(x, FunctionType) and not read.isdisjoint(_objects_in([x], inside))

    for path, module in modules.items():
        names = {name for name, x in vars(module).items() if name not in _STANDARD and has(x)}
        names |= {name for name in FORWARD_HOOKS if any(map(has, getattr(module, name).values()))}
        if names:
            made.get_submodule(path).__dict__[READ_BY_LOSS] = frozenset(names)


def _objects_in(roots: list[Any], models: Collection[int]) -> set[int]:
    """The identities of the objects that may change and that some have, or functions name, but not through a model."""

    def parts(x: Any) -> Iterable[Any]:
        if id(x) in models or isinstance(x, (Tensor, type)):
            return ()
        if isinstance(x, Bound):
            return [x.origin]
        if isinstance(x, FunctionType):
            variables = [cell.cell_contents for cell in x.__closure__ or () if not is_empty(cell)]
            variables += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
            return [*variables, *(x.__globals__[name] for name in names_of(x.__code__) if name in x.__globals__)]
        return parts_of(x) or ()

    def changes(x: Any) -> bool:
        if id(x) in models or isinstance(x, (Tensor, type, str, int, float, Bound, FunctionType)):
            return False
        return bool(parts_of(x)) or isinstance(x, (list, dict, set)) or held_under(x, "__dict__") is not None

    return {id(x) for x in islice(reached(roots, parts), MOST_OBJECTS) if changes(x)}
