"""Custom autograd functions that a script declares to compute row by row: each is an operator of a captured graph.

A captured graph has the operators of a function's forward, and autograd derives their backward. A function whose own
backward is another one (a straight-through estimator, a reversed gradient) can only be kept as a whole; then something
must be known of its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from whale.errors import CaptureError, UsageError

__all__ = [
    "NAMESPACE",
    "RowWise",
    "by_target",
    "capturing",
    "is_row_wise",
    "operator_of",
    "row_wise",
    "whole_positions",
]

NAMESPACE = "whale_row_wise"

Function = TypeVar("Function", bound="type[torch.autograd.Function]")

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_whole: dict[type, frozenset[int]] = {}
_operators: dict[Any, RowWise] = {}
by_target: dict[Any, RowWise] = {}
"""The row-wise functions of operators."""

_numbers = itertools.count()
_capturing: list[bool] = []


@overload
def row_wise(function: Function) -> Function: ...


@overload
def row_wise(*, whole: Collection[int]) -> Callable[[Function], Function]: ...


def row_wise(function: Any = None, *, whole: Collection[int] = ()) -> Any:
    """Declare that a ``torch.autograd.Function`` computes each row of its outputs and of its gradients by itself.

    Rows are along the first dim of every tensor. Ranks and micro-batches that divide the rows call it with theirs;
    where another dim is divided, it is gathered first. Functions whose backward is the derivative of their forward need
    no declaration.

    Args:
        function: a subclass of ``torch.autograd.Function``; it is returned as it is.
        whole: positions of arguments that are the same for all rows, such as weights: their gradients are summed over
            rows.

    Raises:
        UsageError: it is no such class.

    >>> @row_wise
    ... class Reversed(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return x.clone()
    ...
    ...     @staticmethod
    ...     def backward(ctx, gradient):
    ...         return -gradient
    """
    if function is None:
        return lambda given: row_wise(given, whole=whole)  # type: ignore[call-overload]
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise UsageError(f"row_wise is for subclasses of torch.autograd.Function, not for {function!r}")
    _whole[function] = frozenset(whole)
    return function


def is_row_wise(function: type) -> bool:
    """Whether a function is declared to compute row by row."""
    return function in _whole


def whole_positions(function: type) -> frozenset[int]:
    """Positions of arguments that are the same for all rows."""
    return _whole[function]


@contextmanager
def capturing() -> Iterator[None]:
    """Context for a capture."""
    _capturing.append(True)
    try:
        yield
    finally:
        _capturing.pop()


def operator_of(apply: Callable[..., Any], function: type, args: Sequence[Any]) -> RowWise:
    """The operator of a function for calls with these constants.

    Args:
        apply: of ``torch.autograd.Function``, as it is without a capture.
        function: that is row-wise.
        args: of a call.
    """
    positions = tuple(i for i, arg in enumerate(args) if isinstance(arg, Tensor))
    constants = tuple(None if isinstance(arg, Tensor) else arg for arg in args)
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(constants)):
        raise CaptureError(
            f"{function.__name__} is row-wise and was given tensors in a list, a tuple or a dict, where autograd does "
            "not see them: give each as an argument of its own"
        )
    key = function, positions, tuple(map(_token, constants))
    if key not in _operators:
        _operators[key] = RowWise(apply, function, positions, constants)
    return _operators[key]


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _token(x: Any) -> Hashable:
    """A key of a constant: by its value if it is a plain one, else by its identity; the operator keeps it."""
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(_token, x))
    return (type(x), repr(x)) if type(x) in _PLAIN else ("an object", id(x))


class _Opaque(torch.autograd.Function):
    """An operator in a capture, which needs no gradients, but to know where there are some."""

    @staticmethod
    def forward(ctx: Any, operator: Callable[[list[Tensor]], list[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(operator(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise NotImplementedError("a captured function has no gradients")


class RowWise:
    """A function with everything that is not a tensor: an operator of a list of tensors."""

    def __init__(
        self, apply: Callable[..., Any], function: type, positions: tuple[int, ...], constants: tuple[Any, ...]
    ) -> None:
        self._apply, self._function, self._positions, self._constants = apply, function, positions, constants
        self.whole = frozenset(n for n, position in enumerate(positions) if position in _whole[function])
        self._is_tuple, self._kept = False, list[bool]()
        plain = [constant if type(constant) in _PLAIN else type(constant).__name__ for constant in constants]
        described = f"{function.__module__}.{function.__qualname__} {positions} {plain}"
        name = f"{function.__name__}_{sha256(described.encode()).hexdigest()[:8]}"
        if hasattr(getattr(torch.ops, NAMESPACE), name):  # a class that a notebook has defined again
            name = f"{name}_{next(_numbers)}"
        _library.define(f"{name}(Tensor[] tensors) -> Tensor[]")
        _library.impl(name, self._differentiable, "Autograd")
        for device in ("CPU", "CUDA"):
            _library.impl(name, self._run, device)
        torch.library.register_fake(f"{NAMESPACE}::{name}", self._run, lib=_library)
        self.target = getattr(getattr(torch.ops, NAMESPACE), name).default
        by_target[self.target] = self

    def __call__(self, args: Sequence[Any]) -> Any:
        """Call the function, as one operator."""
        found = iter(self.target([args[i] for i in self._positions]))
        results = tuple(next(found) if is_tensor else None for is_tensor in self._kept)
        return results if self._is_tuple else results[0]

    def _differentiable(self, tensors: list[Tensor]) -> list[Tensor]:
        """A captured graph has the operator itself, and not what its forward does."""
        return list(self._apply(_Opaque, self.target, *tensors)) if _capturing else self._run(tensors)

    def _run(self, tensors: list[Tensor]) -> list[Tensor]:
        args = list(self._constants)
        for position, tensor in zip(self._positions, tensors, strict=True):
            args[position] = tensor
        results = self._apply(self._function, *args)
        self._is_tuple = isinstance(results, tuple)
        every = results if self._is_tuple else (results,)
        self._kept = [isinstance(result, Tensor) for result in every]
        return [result for result in every if isinstance(result, Tensor)]
