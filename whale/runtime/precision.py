"""Low precision of steps: the state of ``torch.autocast`` around them, and the scale of a float16 loss.

The casts are in the graphs that steps run (`whale.graph.precision`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from whale.errors import UsageError

__all__ = ["LossScaler", "without_autocast"]


@contextmanager
def without_autocast(device: torch.device, precision: torch.dtype | None) -> Iterator[None]:
    """Run a step under the script's ``torch.autocast``, whose casts its graphs have already.

    Args:
        device: of the step.
        precision: in which it was compiled.

    Raises:
        UsageError: autocast is on, with another dtype than *precision*.
    """
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    around = torch.get_autocast_dtype(device.type)
    if around != precision:
        names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        own = f"the model was made for {_name(precision)}" if precision else "the model was made without a precision"
        raise UsageError(
            f"a step stands under torch.autocast with {_name(around)}, but {own}: write "
            f'parallelize(..., precision="{names.get(around, "bf16")}"), and leave torch.autocast out'
        )
    with torch.autocast(device.type, enabled=False):
        yield


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


class LossScaler:
    """The factor of a loss whose gradients float16 cannot hold, as ``torch.amp.GradScaler`` keeps it.

    A step in which a gradient is not finite, on any rank, leaves gradients as they were before it, and makes the factor
    smaller; after many steps without one it grows. Read *scale* for logs; save :meth:`state_dict` with a checkpoint.

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

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint: numbers by name."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with a state. Raises `UsageError` if it is none of a scaler."""
        if state.keys() != vars(self).keys() or not all(isinstance(x, (int, float)) for x in state.values()):
            raise UsageError("the state is not what state_dict of a loss scaler returns")
        vars(self).update(state)

    def run(self, tensors: Iterable[Tensor], step: Callable[[float], Any], any_rank: Callable[[Tensor], bool]) -> Any:
        """Run a step with the factor, and take it out of the gradients that the step adds.

        Args:
            tensors: whose gradients these are.
            step: of the factor; it adds gradients.
            any_rank: whether a flag is set on some rank.

        Returns:
            the result of *step*.
        """
        tensors = list(tensors)
        before = [x.grad for x in tensors]
        for x in tensors:
            x.grad = None
        result = step(self.scale)
        made = [x.grad for x in tensors if x.grad is not None]
        unlike = [(~gradient.isfinite()).any() for gradient in made]
        overflow = any_rank(torch.stack(unlike).any() if unlike else torch.zeros((), dtype=torch.bool))
        with torch.no_grad():
            for x, earlier in zip(tensors, before, strict=True):
                if overflow or x.grad is None:
                    x.grad = earlier
                else:
                    x.grad.mul_(1 / self.scale)
                    if earlier is not None:
                        x.grad = earlier.add_(x.grad)
        self._update(overflow)
        return result

    def _update(self, overflow: bool) -> None:
        self.growth_tracker = 0 if overflow else self.growth_tracker + 1
        if overflow:
            self.skipped += 1
            self.scale *= self.backoff_factor
        elif self.growth_tracker == self.growth_interval:
            self.growth_tracker = 0
            self.scale *= self.growth_factor
