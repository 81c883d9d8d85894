"""Copies of a model whose functions are copied too: those that a script has put on its modules.

``old = layer.forward; layer.forward = lambda x: 2 * old(x)`` and hooks refer to the modules of the model, and
``copy.deepcopy`` leaves functions as they are: in a copy they would compute with the first model's parameters.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

__all__ = ["model_copy"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def model_copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy by ``copy.deepcopy`` with *memo*; functions that a script put on modules, and hooks, are the copy's."""
    made = copy.deepcopy(model, memo)
    for module in made.modules():
        for table in (module.__dict__, *(getattr(module, name) for name in _HOOKS)):
            for name, x in table.items():
                if isinstance(x, (FunctionType, functools.partial)):
                    rebinding = _Rebinding(memo)
                    function = rebinding.of(x)
                    if function is not x:
                        table[name] = _Bound(function, list(rebinding.used.values()))
    return made


class _Bound:
    """A function with the modules and tensors that it reaches, with which it is copied."""

    def __init__(self, function: Callable[..., Any], reached: list[Any]) -> None:
        functools.update_wrapper(self, function)
        self._function, self._reached = function, reached

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Bound:
        copies = {id(x): copy.deepcopy(x, memo) for x in self._reached}
        return _Bound(_Rebinding(copies).of(self._function), list(copies.values()))


class _Rebinding:
    """Functions, and other objects that refer to modules and tensors, with copies of these.

    Args:
        copies: by the identity of what is copied.

    Attributes:
        used: the copies that were used, by their identity.
    """

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies
        self._known: dict[int, tuple[Any, Any]] = {}
        self.used: dict[int, Any] = {}

    def of(self, x: Any) -> Any:
        """*x* with copies; the same object if it refers to nothing that is copied."""
        if isinstance(x, (nn.Module, Tensor)):
            made = self._copies.get(id(x), x)
            if made is not x:
                self.used[id(made)] = made
            return made
        if id(x) not in self._known:
            self._known[id(x)] = x, x  # what refers to itself
            self._known[id(x)] = x, self._of_parts(x)
        return self._known[id(x)][1]

    def _of_parts(self, x: Any) -> Any:
        if isinstance(x, MethodType):
            owner = self.of(x.__self__)
            return x if owner is x.__self__ else MethodType(x.__func__, owner)
        if type(x) in (list, tuple):
            parts = [self.of(part) for part in x]
            return x if all(a is b for a, b in zip(parts, x, strict=True)) else type(x)(parts)
        if type(x) is dict:
            values = {key: self.of(value) for key, value in x.items()}
            return x if all(values[key] is x[key] for key in x) else values
        if isinstance(x, functools.partial):
            function, args, keywords = self.of(x.func), self.of(x.args), self.of(x.keywords)
            changed = function is not x.func or args is not x.args or keywords is not x.keywords
            return functools.partial(function, *args, **keywords) if changed else x
        if isinstance(x, _Bound):
            function = self.of(x._function)
            return x if function is x._function else _Bound(function, [self.of(one) for one in x._reached])
        if isinstance(x, FunctionType) and x.__module__ is not None and x.__module__.partition(".")[0] != "torch":
            return self._of_function(x)
        return x

    def _of_function(self, x: FunctionType) -> FunctionType:
        cells = tuple(self._of_cell(cell) for cell in x.__closure__ or ())
        defaults, keyword = self.of(x.__defaults__), self.of(x.__kwdefaults__)
        read = {name: x.__globals__[name] for name in _names(x.__code__) if name in x.__globals__}
        others = {name: made for name, value in read.items() if (made := self.of(value)) is not value}
        same = all(a is b for a, b in zip(cells, x.__closure__ or (), strict=True))
        if same and defaults is x.__defaults__ and keyword is x.__kwdefaults__ and not others:
            return x
        variables = _Globals(others, x.__globals__) if others else x.__globals__
        made = FunctionType(x.__code__, variables, x.__name__, defaults, cells)
        made.__kwdefaults__ = keyword
        made.__dict__.update(x.__dict__)
        made.__qualname__, made.__module__, made.__doc__ = x.__qualname__, x.__module__, x.__doc__
        return made

    def _of_cell(self, cell: CellType) -> CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # it is empty
            return cell
        made = self.of(content)
        return cell if made is content else CellType(made)


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


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _names(x)
