"""The loss in what a model returns. Knows outputs; not how a model is captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from whale.errors import CaptureError

__all__ = ["any_sum", "pick_loss"]


def pick_loss(output: Any, *, required: bool) -> torch.Tensor | None:
    """The scalar loss of a model's output: itself, its ``loss``, or the scalar among its elements; None where there is
    none, unless it is *required*."""
    loss = output
    if not isinstance(loss, torch.Tensor):
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None and isinstance(output, (tuple, list)) and output:
            loss = _only_scalar(output)
    if not required and (not isinstance(loss, torch.Tensor) or loss.dim() != 0):
        return None
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"the model returns {type(output).__name__}, which has no loss: return a scalar tensor, an output with "
            "a `loss` (pass labels in the batch), or give parallelize a loss_fn(output, batch); for outputs without a "
            "loss there is model.predict_step"
        )
    if loss.dim() != 0:
        raise CaptureError(
            f"the loss must be a scalar, but it has shape {tuple(loss.shape)}: reduce it, e.g. with .mean(), in the "
            "model or in the loss_fn(output, batch) of parallelize"
        )
    return loss


def _only_scalar(output: Sequence[Any]) -> Any:
    """The one scalar of a tuple that has a gradient, or the first element where there is none."""
    scalars = [
        place
        for place, x in enumerate(output)
        if isinstance(x, torch.Tensor) and x.dim() == 0 and x.is_floating_point() and x.requires_grad
    ]
    if len(scalars) > 1:
        raise CaptureError(
            f"the model returns a tuple with scalars at {' and '.join(map(str, scalars))}, and which is the loss is "
            f"not known: return the loss alone or an output with `loss`, or give parallelize "
            f"loss_fn=lambda output, batch: output[{scalars[0]}]"
        )
    return output[scalars[0] if scalars else 0]


def any_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of a tensor, in place of a loss, for a graph of outputs alone."""
    if not tensors:
        raise CaptureError("the model returns no tensor, so there is nothing to predict")
    first = next((x for x in tensors if x.requires_grad), tensors[0])
    return first.sum()
