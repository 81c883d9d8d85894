"""Low precision of steps: the state of ``torch.autocast`` around them, and the scale of a float16 loss.

The casts are in the graphs that steps run (`whale.graph.precision`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from whale.errors import UsageError

__all__ = ["LossScaler", "in_own_dtypes", "without_autocast"]

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def _autocast_off() -> Iterator[None]:
    with ExitStack() as off:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                off.enter_context(torch.autocast(kind, enabled=False))
        yield


def in_own_dtypes(function: F) -> F:
    """Let a function compute in the dtypes that tensors have, also where a script stands under ``torch.autocast``: what
    is computed beside the model, such as a comparison, is none of what the script casts."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return function(*args, **kwargs)
        with _autocast_off():
            return function(*args, **kwargs)

    return cast(F, run)


@contextmanager
def without_autocast(device: torch.device, precision: torch.dtype | None) -> Iterator[None]:
    """Run a step under the script's ``torch.autocast``, whose casts its graphs have already.

    Args:
        device: of the step.
        precision: in which it was compiled.

    Raises:
        UsageError: autocast is on, with another dtype than *precision*.
    """
    around = torch.get_autocast_dtype(device.type)
    if torch.is_autocast_enabled(device.type) and around != precision:
        names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        own = f"the model was made for {_name(precision)}" if precision else "the model was made without a precision"
        raise UsageError(
            f"a step stands under torch.autocast with {_name(around)}, but {own}: write "
            f'parallelize(..., precision="{names.get(around, "bf16")}"), and leave torch.autocast out'
        )
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with _autocast_off():
        yield


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


_SPOILED = 2
"""The number of a rank whose gradients an earlier step has spoiled; 1: this one does, 0: they are finite."""


def _numbers(gradient: Tensor) -> Tensor:
    """The numbers of a gradient, which torch neither tests nor fills where it is sparse."""
    return gradient._values() if gradient.is_sparse else gradient


def _is_spoiled(x: Tensor) -> bool:
    return x.grad is not None and bool(_numbers(x.grad).flatten()[:1].isnan().any())


def _has_no_rows(x: Tensor) -> bool:
    return x.grad is not None and x.grad.is_sparse and not x.grad._nnz()


class LossScaler:
    """The factor of a loss whose gradients float16 cannot hold, as ``torch.amp.GradScaler`` keeps it.

    After a step in which a gradient is not finite, on any rank, all gradients are NaN until they are zeroed, whatever
    further steps add, and ``optimizer.step()`` leaves parameters alone; the factor becomes smaller. After many steps
    without one it grows. Read *scale* for logs; save :meth:`state_dict` with a checkpoint.

    Args:
        scale: the first factor.
        growth_factor, backoff_factor: what it is multiplied by.
        growth_interval: number of steps without an overflow after which it grows.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.scale, self.growth_factor, self.backoff_factor = scale, growth_factor, backoff_factor
        self.growth_interval = growth_interval
        self.growth_tracker = self.skipped = 0
        self._is_spoiled = False

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint: numbers by name."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with a state. Raises `UsageError` if it is none of a scaler."""
        if state.keys() != self.state_dict().keys() or not all(isinstance(x, (int, float)) for x in state.values()):
            raise UsageError("the state is not what state_dict of a loss scaler returns")
        vars(self).update(state)

    def run(self, tensors: Iterable[Tensor], step: Callable[[float], Any], largest: Callable[[Tensor], int]) -> Any:
        """Run a step with the factor, and take it out of the gradients that the step adds.

        Args:
            tensors: whose gradients these are.
            step: of the factor; it adds gradients.
            largest: the largest of a number of all ranks.

        Returns:
            the result of *step*.
        """
        tensors = list(tensors)
        before = [x.grad for x in tensors]
        if self._is_spoiled:  # unless they were zeroed since
            self._is_spoiled = any(map(_is_spoiled, tensors))
        for x in tensors:
            x.grad = None
        result = step(self.scale)
        made = [x.grad for x in tensors if x.grad is not None]
        unlike = [(~_numbers(gradient).isfinite()).any() for gradient in made]
        overflow = (
            torch.stack([x.to(unlike[0].device) for x in unlike]).any() if unlike else torch.zeros((), dtype=torch.bool)
        )
        found = largest(torch.tensor(_SPOILED) if self._is_spoiled else overflow)
        with torch.no_grad():
            for x, earlier in zip(tensors, before, strict=True):
                if x.grad is None:
                    x.grad = earlier
                elif not found:
                    x.grad.mul_(1 / self.scale)
                    if earlier is not None:
                        x.grad = earlier.add_(x.grad)
                if found and x.grad is not None:
                    _numbers(x.grad).fill_(torch.nan)
        self._is_spoiled = found > 0
        if found != _SPOILED:
            self._update(found > 0)
        return result

    def skip(self, tensors: Iterable[Tensor]) -> None:
        """Take their gradients from tensors with which an optimizer begins its step, if a step has spoiled them."""
        for x in tensors:
            if self._is_spoiled and (_is_spoiled(x) or _has_no_rows(x)):
                x.grad = None

    def _update(self, overflow: bool) -> None:
        self.growth_tracker = 0 if overflow else self.growth_tracker + 1
        if overflow:
            self.skipped += 1
            self.scale *= self.backoff_factor
        elif self.growth_tracker == self.growth_interval:
            self.growth_tracker = 0
            self.scale *= self.growth_factor
