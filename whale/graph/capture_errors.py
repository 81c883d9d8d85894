"""Errors of a capture in the user's words: what torch says of its own functions, with a line of the model.

This module knows tracebacks and the texts of torch's errors, not how a model is captured.
"""

from __future__ import annotations

import os
from types import TracebackType

import torch
from torch import nn

from whale.errors import CaptureError, UsageError, WhaleError
from whale.graph.capture_checks import DATA_DEPENDENT
from whale.graph.origins import SourceLine, is_model, located, place_of_forward

__all__ = ["capture_error"]


def capture_error(error: Exception, model: nn.Module) -> WhaleError:
    """Explain in the user's words why a model cannot be captured, with the place in the user's source."""
    place = _place_of_traceback(error.__traceback__)
    if isinstance(error, UsageError):  # an annotation inside forward
        return type(error)(f"{place.file}:{place.line}: {error}" if place else str(error))
    if isinstance(error, CaptureError):
        if error.file is not None:
            return error
        return located(error.message, place or place_of_forward(model))
    text = str(error)
    first = text.strip().splitlines()[0] if text.strip() else ""
    name, kind = type(model).__name__, type(error).__name__
    if "data-dependent" in text or "GuardOnDataDependent" in kind or "DataDependent" in kind or "DynamicOutput" in kind:
        function = _function_of_traceback(error.__traceback__)
        said = f"{DATA_DEPENDENT}; {_INSTEAD[function]}" if function in _INSTEAD else DATA_DEPENDENT
        return located(f"{name} cannot be captured: {f'in {function}, ' if function else ''}{said}", place)
    if "Expected inputs of BF16 type" in text:
        return located(f"{name} cannot be captured: in grouped_mm, {first}; {_INSTEAD['grouped_mm']}", place)
    if "is mutated in the forward" in text:
        return located(
            f"{name} cannot be captured: the forward or loss_fn writes to a tensor that is no buffer of the model, as "
            "of a loss's module, or the statistics of a teacher's norm in training; register it as a buffer of the "
            "model (register_buffer), put a loss with a state inside the model, and register a teacher as a module of "
            "the model or call its eval() before parallelize",
            place or place_of_forward(model),
        )
    if ".numpy()" in text or "__array__" in text:
        return located(
            f"{name} cannot be captured: numpy reads a tensor's values, which a captured model does not have; use "
            "torch's operators in place of numpy's",
            place,
        )
    if _packs(error.__traceback__):
        return located(
            f"{name} cannot be captured: shapes of a packed sequence depend on the lengths' values; leave "
            "pack_padded_sequence out, give the recurrent layer padded sequences, and take of its outputs those of the "
            "last real step with gather, or multiply with a mask",
            place,
        )
    if isinstance(error, StopIteration):
        return located(
            f"{name} cannot be captured: the forward takes the next value of an iterator that has ended, as of a "
            "generator that was made before; a step has to do the same every time: make the iterator in forward, or "
            "hold a list",
            place,
        )
    reason = f"{kind}: {first}" if first else kind
    return located(
        f"{name} cannot be captured: its forward raised {reason}; check that model(**batch) runs on one device with "
        "this batch, and keep what is no computation on tensors out of forward",
        place,
    )


_INSTEAD = {
    "grouped_mm": "here, give bfloat16, for which alone torch knows its shapes without data, or use "
    "torch.ops.transformers.grouped_mm_fallback(x, matrices, ends), which takes any number type",
    "one_hot": "here, give num_classes",
    **dict.fromkeys((f"BatchNorm{dims}d" for dims in (1, 2, 3)), "here, give momentum as a number"),
    "AdaptiveLogSoftmaxWithLoss": "here, use cross_entropy of all classes",
}
"""Words on calls of torch that read values, by function or module: what to write instead."""


def _place_of_traceback(traceback: TracebackType | None) -> SourceLine | None:
    found = None
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if is_model(file):
            found = SourceLine(file, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def _function_of_traceback(traceback: TracebackType | None) -> str:
    """The public function or module of torch that the model's last line called, in which an error was raised."""
    found = ""
    while traceback is not None:
        frame = traceback.tb_frame
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        if is_model(frame.f_code.co_filename):
            found = ""
        elif not found and name == "__torch_function__":
            found = getattr(frame.f_locals.get("func"), "__name__", "")
        elif _is_of_torch(frame.f_code.co_filename) and (name == "forward" or (not found and _is_public(name))):
            found = name if owner is None else type(owner).__name__
        traceback = traceback.tb_next
    return "" if found.startswith("_") or found == "item" else found


def _is_public(name: str) -> bool:
    return name == "__init__" or not name.startswith("_")


def _is_of_torch(file: str) -> bool:
    """Whether a source file has functions or modules of torch that a model calls, unlike those that capture it."""
    inside = file.partition(os.path.dirname(torch.__file__) + os.sep)[2]
    return inside.startswith(("nn", "distributions", "functional", "_tensor"))


def _packs(traceback: TracebackType | None) -> bool:
    """Whether an error was raised in a function that has a packed sequence."""
    while traceback is not None:
        if any(isinstance(x, nn.utils.rnn.PackedSequence) for x in traceback.tb_frame.f_locals.values()):
            return True
        traceback = traceback.tb_next
    return False
