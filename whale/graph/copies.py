"""Copies of a model whose functions are copied too: those that a script has put on its modules.

``old = layer.forward; layer.forward = lambda x: 2 * old(x)`` and hooks refer to the modules of the model, and
``copy.deepcopy`` leaves functions as they are: in a copy they would compute with the first model's parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from whale.errors import CaptureError
from whale.graph.rebinding import MOST_OBJECTS, Bound, Rebinding, places_of, values_of, write_value
from whale.ir.objects import FORWARD_HOOKS, CopiedFunction, Variable, deep_copy, part_of, parts_of, reached

__all__ = ["model_copy", "reading", "tensors_beside", "variables_of"]

_STANDARD = frozenset(nn.Module().__dict__)


def model_copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy with *memo*, as of `copy.deepcopy`; functions that a script put on modules, and hooks, are the copy's.

    What cannot be copied, such as a lock, is shared; and so are tensors that are no state of the model, as of a teacher
    in a list: steps read those that the script has.

    Raises:
        CaptureError: such a function has a list or a dict of modules and of other values, which it could change; or a
            module's own ``__deepcopy__`` does not copy with the memo.
    """
    for tensor in tensors_beside(model):
        memo.setdefault(id(tensor), tensor)
    made = deep_copy(model, memo, model.modules)
    _check_parameters(model, made, memo)
    rebinding = Rebinding(memo, places_of(model))
    for path, module in made.named_modules():
        of = f" of {path or 'the model'}"
        for table in (module.__dict__, *(getattr(module, name) for name in FORWARD_HOOKS)):
            for name, x in table.items():
                if isinstance(x, (FunctionType, functools.partial)):
                    rebinding.owner = (name if isinstance(name, str) else "a hook") + of
                    known = len(rebinding.variables)
                    function = rebinding.of(x)
                    if function is not x:
                        table[name] = Bound(function, x, rebinding.used, tuple(rebinding.variables[known:]))
    return made


def variables_of(model: nn.Module) -> list[Variable]:
    """The variables of the functions on a copy of a model, that had something of the model and do not follow it."""
    return [variable for x in _functions_on(model) for variable in x.variables]


def _functions_on(model: nn.Module) -> Iterator[CopiedFunction]:
    """The copied functions that modules have as attributes and hooks."""
    for module in model.modules():
        for table in (module.__dict__, *(getattr(module, name) for name in FORWARD_HOOKS)):
            yield from (x for x in table.values() if isinstance(x, CopiedFunction))


def tensors_beside(model: nn.Module) -> Iterator[Tensor]:
    """The tensors that the attributes of a model's modules have, or objects in these, and that are no state of it."""
    modules = list(model.modules())
    states = {id(x) for x in chain(modules, model.parameters(), model.buffers())}
    tables = [vars(module) for module in modules]
    tables += [getattr(module, name) for module in modules for name in FORWARD_HOOKS]
    held = [x for table in tables for name, x in table.items() if name not in _STANDARD]

    def parts(x: Any) -> Iterable[Any]:
        return () if id(x) in states or isinstance(x, Tensor) else parts_of(x) or ()

    for x in islice(reached(held, parts), MOST_OBJECTS):
        if type(x) in (Tensor, nn.Parameter) and x.is_leaf and id(x) not in states:
            yield x


def _check_parameters(model: nn.Module, made: nn.Module, memo: Mapping[int, Any]) -> None:
    copies = {id(x) for x in memo.values()}
    if all(id(parameter) in copies for parameter in made.parameters()):
        return
    kinds = dict.fromkeys(type(module) for module in model.modules())
    own = [kind for kind in kinds if hasattr(kind, "__deepcopy__")]
    raise CaptureError(
        f"__deepcopy__ of {', '.join(kind.__qualname__ for kind in own) or 'a module'} makes parameters that are no "
        "copies of the model's: let it copy with the memo that it is given (copy.deepcopy(x, memo)), or leave it out"
    )


@contextmanager
def reading(
    model: nn.Module, first: Mapping[int, tuple[str, str]], loss_fn: Callable[..., Any] | None
) -> Iterator[Any]:
    """Let the functions on a model, and a loss that is given back, read the tensors that the model has now, as while it
    is exported, in place of the *first* ones, whose kinds and names are known."""
    now = {known: part_of(model, kind, name) for known, (kind, name) in first.items()}
    rebinding = Rebinding({known: x for known, x in now.items() if id(x) != known}, {}, stays=True)
    bound = [x for x in _functions_on(model) if isinstance(x, Bound)]
    before = [x.function for x in bound]
    own = [copy for _, copy in loss_fn.objects] if isinstance(loss_fn, Bound) else []
    written = [
        (x, name, value, made)
        for x in own
        for name, value in values_of(x)
        if (made := rebinding.of(value)) is not value
    ]
    try:
        for x in bound if rebinding.copies else ():
            x.function = rebinding.of(x.function)
        for x, name, _, made in written:
            write_value(x, name, made)
        yield rebinding.of(loss_fn.function) if isinstance(loss_fn, Bound) else loss_fn
    finally:
        for x, function in zip(bound, before, strict=True):
            x.function = function
        for x, name, value, made in written:
            if dict(values_of(x)).get(name) is made:
                write_value(x, name, value)
