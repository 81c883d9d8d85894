"""Custom autograd functions in a capture: a graph has the operators of a function's forward, and not its backward.

They are taken where autograd derives the same backward from these, and as one operator where they are declared
row-wise; others are refused. This module knows classes of functions, not how a model is captured.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.utils import checkpoint

from whale.graph.origins import checkpointing, located, place_of_frame
from whale.graph.row_wise import capturing, is_row_wise, operator_of, whole_positions

__all__ = ["checking_functions"]

_MODULES = ("torch.nn.", "torch.distributions.")
_APPLY: Any = torch.autograd.Function.__dict__["apply"]
_thread = threading.local()


def _unchecked(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Apply a function as without a capture."""
    before = getattr(_thread, "is_unchecked", False)
    _thread.is_unchecked = True
    try:
        return _APPLY.__func__(cls, *args, **kwargs)
    finally:
        _thread.is_unchecked = before


@contextmanager
def checking_functions() -> Iterator[None]:
    """Context for a capture."""

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is checkpoint.CheckpointFunction:  # runs without gradients, so that a capture would not see any
            function, _, *rest = args
            trains = any(isinstance(x, torch.Tensor) and x.requires_grad for x in rest)  # else it makes no gradients
            with checkpointing(), nullcontext() if trains else torch.no_grad():
                return function(*rest)
        if is_row_wise(cls) and not kwargs:
            if not _computes_rows_apart(cls, args):
                raise located(
                    f"the custom autograd function {cls.__name__} is declared row-wise, but its rows depend on each "
                    "other, or on how many there are, or gradients of whole arguments are no sums over rows; leave "
                    "whale.row_wise out, or give the positions of arguments that are the same for all rows, as "
                    "whale.row_wise(whole=(1,))",
                    place_of_frame(sys._getframe(1)),
                )
            return operator_of(_unchecked, cls, args)(args)
        trained = any(isinstance(x, torch.Tensor) and x.requires_grad for x in (*args, *kwargs.values()))
        own = cls.__module__.startswith("torch.") and not cls.__module__.startswith(_MODULES)  # of operators
        if trained and torch.is_grad_enabled() and not own and not _derives_its_backward(cls, args, kwargs):
            raise located(
                f"the custom autograd function {cls.__name__} has a backward that is not its forward's derivative, "
                "which a captured graph cannot keep; if each row of a batch is computed by itself, say so with "
                "@whale.row_wise above the class; else write its forward with torch's operators and let autograd "
                "derive the backward",
                place_of_frame(sys._getframe(1)),
            )
        return _unchecked(cls, *args, **kwargs)

    def apply_of_before(cls: Any, *args: Any) -> Any:
        if getattr(_thread, "is_unchecked", False) or threading.get_ident() != owner:
            return super(_SingleLevelFunction, cls).apply(*args)
        return apply(cls, *args)

    owner = threading.get_ident()
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    # An `apply` that the model has taken before, as `reverse = Reverse.apply` does, calls the one of the base class.
    _SingleLevelFunction.apply = classmethod(apply_of_before)  # type: ignore[attr-defined]
    try:
        with capturing():
            yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]
        torch.autograd.Function.apply = _APPLY  # type: ignore[method-assign]


class _Context:
    """The context passed to a custom function's forward when only its operators matter."""

    needs_input_grad: tuple[bool, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _sampler() -> Callable[..., Any]:
    """Makes small tensors of random numbers in float64 in place of others."""
    generator = torch.Generator().manual_seed(0)

    def sample(value: Any, in_rows: bool = False) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = [5 if in_rows and not dim else min(size, 5) for dim, size in enumerate(value.shape)]
        if not value.is_floating_point():
            return torch.zeros(shape, dtype=value.dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(value.requires_grad)

    return sample


def _computes_rows_apart(cls: type, args: tuple[Any, ...]) -> bool:
    """Whether a custom function gives rows the same values and gradients without others, and sums over rows as the
    gradients of whole arguments, if it can be tried."""
    whole, sample = whole_positions(cls), _sampler()

    def of_rows(args: Sequence[Any], rows: slice) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        given = [
            x.detach()[rows if place not in whole and x.dim() else ...].requires_grad_(x.requires_grad)
            if isinstance(x, torch.Tensor)
            else x
            for place, x in enumerate(args)
        ]
        results = _unchecked(cls, *given)
        outputs = [y for y in (results if isinstance(results, tuple) else (results,)) if isinstance(y, torch.Tensor)]
        weights = (torch.arange(5.0 * y[0].numel()).sin().view(5, *y.shape[1:])[rows] for y in outputs)
        terms = [(y * weight).sum() for y, weight in zip(outputs, weights, strict=True) if y.requires_grad]
        trained = {i: x for i, x in enumerate(given) if isinstance(x, torch.Tensor) and x.requires_grad}
        found = torch.autograd.grad(terms, list(trained.values()), allow_unused=True) if trained and terms else ()
        grads = {place: grad for place, grad in zip(trained, found, strict=False) if grad is not None}
        own = [grad for place, grad in grads.items() if place not in whole]
        return [*outputs, *own], [grad for place, grad in grads.items() if place in whole]

    def agree() -> bool:
        try:
            with torch.enable_grad():
                inputs = [sample(value, place not in whole) for place, value in enumerate(args)]
                every, total = of_rows(inputs, slice(0, 5))
                first, last = of_rows(inputs, slice(0, 3)), of_rows(inputs, slice(3, 5))
                pairs = [(x, torch.cat(two)) for x, *two in zip(every, first[0], last[0], strict=True)]
                pairs += [(x, a + b) for x, a, b in zip(total, first[1], last[1], strict=True)]
                return all(a.shape == b.shape and torch.allclose(a.double(), b.double()) for a, b in pairs)
        except Exception:  # small numbers of other sizes may not be what it takes: it is declared
            return True

    with ThreadPoolExecutor(1) as other:
        return other.submit(agree).result()


def _derives_its_backward(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a custom backward is what autograd derives from the forward, tested on small random numbers in float64.

    If so, the captured operators of the forward have the same gradients, up to constants that were rounded when the
    backward was written by hand (hence the tolerance).
    """
    sample = _sampler()

    def run(function: Callable[..., Any], inputs: list[Any]) -> list[torch.Tensor]:
        leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        results = function(*inputs, **kwargs)
        outputs = [y for y in (results if isinstance(results, tuple) else (results,)) if isinstance(y, torch.Tensor)]
        terms = [(y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() for y in outputs if y.requires_grad]
        grads = torch.autograd.grad(terms, leaves, allow_unused=True) if leaves else ()
        return [*outputs, *(torch.zeros(()) if g is None else g for g in grads)]

    # A thread of its own: the modes of the capture, which would record the trial, belong to this one.
    with ThreadPoolExecutor(1) as other:
        return other.submit(_agree, run, sample, cls, args).result()


def _agree(
    run: Callable[..., list[torch.Tensor]],
    sample: Callable[[Any], Any],
    cls: Any,
    args: tuple[Any, ...],
) -> bool:
    forward = cls.forward if cls.setup_context is not torch.autograd.Function.setup_context else None
    try:
        with torch.enable_grad():
            inputs = [sample(value) for value in args]
            custom = run(lambda *a, **k: _unchecked(cls, *a, **k), inputs)
            derived = run(forward or (lambda *a, **k: cls.forward(_Context(), *a, **k)), inputs)
        return len(custom) == len(derived) and all(
            a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-6)
            for a, b in zip(custom, derived, strict=True)
        )
    except Exception:  # a function that cannot be tested is not trusted
        return False
