"""Stand-ins: functions of torch that a capture would record wrongly or not at all, in other words.

A stand-in has the values and the gradients of the function. It leaves out what reads values only to check arguments: a
captured model has none, and what is not allowed becomes not a number. This module knows functions of torch, not how a
model is captured.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.nn.modules import transformer
from torch.utils._python_dispatch import _disable_current_modes

from whale.errors import CaptureError
from whale.graph.known_values import READS_VALUES, known_value
from whale.graph.row_wise import row_wise

__all__ = ["STAND_INS", "standing_in"]


def _l1_loss(*args: Any, **kwargs: Any) -> Tensor:
    """``l1_loss``, which loses its weight on the way to a mode of torch."""
    frame, weight = sys._getframe(1), None
    while frame.f_back is not None and (frame.f_code is _L1_LOSS or not _calls_it(frame.f_code.co_filename)):
        if frame.f_code is _L1_LOSS:
            weight = frame.f_locals.get("weight")
        frame = frame.f_back
    if weight is not None:
        kwargs["weight"] = weight
    found: Tensor = F.l1_loss(*args, **kwargs)
    return found


_L1_LOSS = F.l1_loss.__code__


def _calls_it(file: str) -> bool:
    return not file.startswith(_OWN)


_OWN = (torch.__path__[0], __file__.removesuffix("stand_ins.py"))


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """``gaussian_nll_loss``; a variance below zero is not a number."""
    var = var * torch.ones_like(input) if isinstance(var, float) else var
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    clamped = torch.where(var < 0, torch.nan, var.clamp(min=eps)).detach()
    var = clamped + (var - var.detach()) if var.requires_grad else clamped
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return _reduced(loss, reduction)


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


@row_wise
class Alignment(torch.autograd.Function):
    """The connectionist temporal classification of each row, whose kernel has no form without data."""

    @staticmethod
    def forward(
        ctx: Any,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor,
        target_lengths: Tensor,
        blank: int,
        zero_infinity: bool,
    ) -> Tensor:
        """*log_probs* (rows, time, classes), *targets* (rows, longest), lengths (rows) -> losses (rows)."""
        if isinstance(log_probs, FakeTensor) or log_probs.is_meta:
            ctx.save_for_backward(torch.empty_like(log_probs))
            return log_probs.new_empty(log_probs.shape[:1])
        with torch.enable_grad():
            x = log_probs.detach().requires_grad_()
            lengths = input_lengths, target_lengths
            losses = torch.ctc_loss(x.transpose(0, 1), targets, *lengths, blank, 0, zero_infinity)
            ctx.save_for_backward(*torch.autograd.grad(losses.sum(), x))
        return losses.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """The gradient of the log-probabilities."""
        (slope,) = ctx.saved_tensors
        return slope * gradients[0][:, None, None], None, None, None, None, None


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    if log_probs.dim() != 3 or targets.dim() != 2:
        raise CaptureError(
            f"ctc_loss of log-probabilities of shape {tuple(log_probs.shape)} with targets of shape "
            f"{tuple(targets.shape)}: which targets belong to which row depends on the lengths' values; give "
            "log-probabilities of shape (time, rows, classes), and targets of shape (rows, longest), padded"
        )
    lengths = [
        length if isinstance(length, Tensor) else torch.tensor(length, device=log_probs.device)
        for length in (input_lengths, target_lengths)
    ]
    if torch.is_autocast_enabled(log_probs.device.type):
        log_probs = log_probs.float()  # as autocast does
    losses = Alignment.apply(log_probs.transpose(0, 1), targets, *lengths, blank, zero_infinity)
    name = reduction if isinstance(reduction, str) else ("none", "mean", "sum")[reduction]
    if name == "mean":
        losses = losses / lengths[1].to(losses.device).clamp_min(1)
    return _reduced(losses, name)


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """``bincount`` of numbers below its least length, as of chosen experts: its length then depends on no values."""
    if weights is not None or not minlength:
        return torch.bincount(input, weights, minlength)
    if minlength == 1:
        return (input == 0).sum().reshape(1)
    return torch.histc(input.double(), minlength, 0, minlength - 1).long()


def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """``cov`` as torch computes it, without its checks of the weights' values."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    given = [w.to(x.dtype) for w in (fweights, aweights) if w is not None]
    weights = given[0] * given[-1] if len(given) > 1 else given[0] if given else None
    if weights is None:
        x = x - (x.sum(1) / x.shape[1]).unsqueeze(1)
        return (torch.mm(x, x.t().conj()) / max(x.shape[1] - correction, 0)).squeeze()
    total = weights.sum()
    lost = correction if aweights is None else correction * (weights * aweights).sum() / total
    x = x - ((x * weights).sum(1) / total).unsqueeze(1)
    return (torch.mm(x, (x * weights).t().conj()) / (total - lost).clamp(min=0)).squeeze()


def _corrcoef(input: Tensor) -> Tensor:
    """``corrcoef`` as torch computes it."""
    found = _cov(input)
    if found.dim() == 0:
        return found / found
    deviations = found.diag().real.sqrt() if found.is_complex() else found.diag().sqrt()
    found = found / deviations.view(-1, 1) / deviations.view(1, -1)
    if found.is_complex():
        return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1))
    return found.clip(-1, 1)


def _rand(*args: Any, **kwargs: Any) -> Tensor:
    found: Any = torch.rand(*args, **kwargs)
    found._is_drawn = found.dim() == 0
    return found


def _less(x: Any, other: Any) -> Any:
    """``x < other``; a number that ``rand`` draws is not less than zero, as models ask that drop no layer."""
    if isinstance(other, (int, float)) and other <= 0 and getattr(x, "_is_drawn", False):
        return False
    return torch.lt(x, other)


def _reading(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A function that reads values, of which the capture knows some."""

    def read(x: Tensor) -> Any:
        known = known_value(x)
        if known is None:
            return function(x)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(known)

    return read


def _selected(x: Tensor, index: Any) -> Any:
    """``x[index]``; a mask that the capture knows, as ``~torch.eye(n).bool()`` of contrastive losses, selects by
    number, and so does a place, as ``torch.arange(n)[1]``, for which torch before 2.13 reads a value."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(_is_mask(part) or _is_place(part) for part in parts):
        return x[index]
    found: list[Any] = []
    for part in parts:
        if _is_place(part):
            known = known_value(part)
            found.append(part if known is None else int(known))
            continue
        if _is_mask(part):
            places = _known_places(part)
            if places is None:
                return x[index]
            found += places.unbind(1)
        else:
            found.append(part)
    return x[tuple(found)]


def _is_mask(part: Any) -> bool:
    if isinstance(part, list):
        return bool(part) and all(isinstance(one, bool) for one in part)
    return isinstance(part, Tensor | np.ndarray) and part.dtype in (torch.bool, np.bool_) and part.ndim > 0


def _is_place(part: Any) -> bool:
    return isinstance(part, Tensor) and part.ndim == 0 and part.dtype in _WHOLE


_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)
"""Dtypes of places; a tensor of uint8 without dims is a mask."""


def _known_places(mask: Any) -> Tensor | None:
    """``mask.nonzero()`` of a mask that the capture knows."""
    known: Tensor | None = None
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        if not isinstance(mask, Tensor):
            known = torch.as_tensor(mask)
        elif type(mask) is Tensor and mask.device.type == "cpu":  # an attribute that is no buffer
            known = mask
    if known is None:
        known = known_value(mask, _MOST_OF_MASK)
    if known is None:
        return None
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return known.nonzero()


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """``combinations``, whose number depends on the input's size alone."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        places = torch.combinations(torch.arange(input.shape[0]), r, with_replacement)
    return input[places]


def _nonzero(input: Tensor, **kwargs: Any) -> Any:
    places = _known_places(input) if kwargs.get("out") is None else None
    if places is None:
        return torch.nonzero(input, **kwargs)
    return places.unbind(1) if kwargs.get("as_tuple") else places


def _where(condition: Tensor, *others: Any, **kwargs: Any) -> Any:
    return torch.where(condition, *others, **kwargs) if others or kwargs else _nonzero(condition, as_tuple=True)


_MOST_OF_MASK = 1 << 20
"""Elements of a mask from which on its values are not looked up."""


def _masked_select(input: Tensor, mask: Tensor, **kwargs: Any) -> Any:
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    places = None if kwargs else _known_places(mask.expand(shape))
    return torch.masked_select(input, mask, **kwargs) if places is None else input.expand(shape)[places.unbind(1)]


STAND_INS: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _selected,
    torch.combinations: _combinations,
    Tensor.nonzero: _nonzero,
    torch.nonzero: _nonzero,
    torch.argwhere: _nonzero,
    torch.where: _where,
    Tensor.masked_select: _masked_select,
    torch.masked_select: _masked_select,
    **{function: _reading(function) for function in READS_VALUES},
    torch.bincount: _bincount,
    Tensor.bincount: _bincount,
    torch.cov: _cov,
    Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    Tensor.corrcoef: _corrcoef,
    torch.rand: _rand,
    Tensor.lt: _less,
    F.l1_loss: _l1_loss,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.ctc_loss: _ctc_loss,
    torch.ctc_loss: _ctc_loss,
}
"""Functions that torch hands to modes, and what is called in place of each."""


def _not_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether attention may leave out its mask: not where only the mask's values would tell."""
    return is_causal is True


@contextmanager
def standing_in() -> Iterator[None]:
    """Context for a capture: replaces what torch's modules call, and lets distributions not check their arguments. A
    batch norm that synchronizes its statistics is one without: those of a step are of the whole batch."""
    detect, validate = transformer._detect_is_causal_mask, Distribution._validate_args
    synchronizing = nn.SyncBatchNorm.forward
    transformer._detect_is_causal_mask = _not_causal
    Distribution._validate_args = False
    nn.SyncBatchNorm.forward = nn.modules.batchnorm._BatchNorm.forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect
        Distribution._validate_args = validate
        nn.SyncBatchNorm.forward = synchronizing  # type: ignore[method-assign]
