"""Refusals during a capture: what torch would mishandle silently is an error at the model's line, such as a custom
backward, a hook on a gradient, a seed or a value that is printed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.fx import proxy
from torch.fx.proxy import TracerBase
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from whale.graph.origins import checkpointing, is_model, located, place_of_frame
from whale.graph.stand_ins import STAND_INS, standing_in

__all__ = ["NO_TRANSFORMS", "OWN_GENERATOR", "refusing", "without_logs"]

aten = torch.ops.aten

NO_TRANSFORMS = (
    "torch.vmap and other transforms of torch.func inside forward are not captured: write what they do with batched "
    "operators, as torch.einsum, matmul and broadcasting"
)
"""The refusal of transforms, in a capture or of its graph."""

OWN_GENERATOR = (
    "a random operator draws from a generator of its own, whose position a captured graph does not have; leave "
    "generator= out (the step seeds its random operators), or give the step what is drawn"
)
"""The refusal of a generator, where torch traces it or, before 2.13, does not."""

_READS = {"__repr__": "printed", "__str__": "printed", "__format__": "printed"}
_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor", "torch.export", "torch._export")


_DATA_ATTRIBUTE: Any = torch.Tensor.data
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
_ATTRIBUTES = (
    "layout",
    "requires_grad",
    "shape",
    "dtype",
    "device",
    "is_leaf",
    "is_sparse",
    "is_quantized",
    "is_nested",
)
_METHODS = ("stride", "size", "storage_offset", "numel", "dim", "_is_view", "untyped_storage", "is_inference")
_FACTS: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in (*_ATTRIBUTES, "is_mkldnn", "grad")]
    + [getattr(torch.Tensor, name) for name in _METHODS]
)
"""Reads of tensors that leave no trace; a capture has some hundred for each parameter."""
_SEEDS = ("manual_seed", "seed", "set_rng_state")


@contextmanager
def _refusing_seeds() -> Iterator[None]:
    """Context that refuses to seed torch's generator: a captured graph's random operators go on with the step's."""
    originals = {name: getattr(torch, name) for name in _SEEDS}

    def refused(name: str) -> Callable[..., Any]:
        def seed(*args: Any) -> Any:
            frame = sys._getframe(1)
            if is_model(frame.f_code.co_filename):
                raise located(
                    f"torch.{name} in a forward: a captured graph's random operators are seeded by the step, not in "
                    "between; give the step what is drawn as a tensor, or keep it in a buffer",
                    place_of_frame(frame),
                )
            return originals[name](*args)

        return seed

    for name in _SEEDS:
        setattr(torch, name, refused(name))
        setattr(torch.random, name, getattr(torch, name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
            setattr(torch.random, name, original)


@contextmanager
def _without_inference_mode() -> Iterator[None]:
    """Context in which ``torch.inference_mode`` is ``torch.no_grad``, which leaves a region in a captured graph."""
    own = torch.inference_mode.__enter__, torch.inference_mode.__exit__

    def enter(self: Any) -> None:
        self._whale_region = torch.no_grad() if self.mode else nullcontext()
        self._whale_region.__enter__()

    def leave(self: Any, *error: Any) -> None:
        self._whale_region.__exit__(*error)

    torch.inference_mode.__enter__, torch.inference_mode.__exit__ = enter, leave  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.inference_mode.__enter__, torch.inference_mode.__exit__ = own  # type: ignore[method-assign]


_NO_GRADIENTS = (
    "gradients are computed inside forward, but a captured graph has a forward alone, and train_step makes its "
    "backward; write the derivative with torch's operators, or compute what needs it outside of the model"
)


class _Refuse(TorchFunctionMode):
    """Context that refuses calls which leave no trace in the graph, or a wrong one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FACTS:
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _READS and _called_by_model():
            raise located(
                "a tensor's value is printed or made into text, but a captured model has no values; remove it from "
                "forward, or return the tensor and print it outside",
                place_of_frame(sys._getframe(1)),
            )
        transform: Any = torch._C._functorch.peek_interpreter_stack()
        kinds = torch._C._functorch.TransformType
        if transform is not None and (
            transform.key() in (kinds.Grad, kinds.Jvp) or (transform.key() != kinds.Vmap and _called_by_model())
        ):
            raise located(NO_TRANSFORMS, place_of_frame(sys._getframe(1)))
        if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
            raise located(OWN_GENERATOR, place_of_frame(sys._getframe(1)))
        if func in (torch.Tensor.backward, torch.autograd.grad, torch.autograd.backward) and _called_by_model():
            raise located(_NO_GRADIENTS, place_of_frame(sys._getframe(1)))
        if _writes(name) and args and _is_unrecorded(args[0]):
            raise located(
                "a tensor that has a gradient is written to through detach(), .data or under torch.no_grad(), which "
                "autograd does not see and a captured graph does: write to a clone() of it, or compute another tensor",
                place_of_frame(sys._getframe(1)),
            )
        if name == "register_hook" and _called_by_model():
            raise located(
                "register_hook on a tensor inside forward: a captured graph cannot keep a hook on a gradient; remove "
                "it, or write what it does as operators of the forward",
                place_of_frame(sys._getframe(1)),
            )
        if _changes_training(func, name, args, kwargs):
            raise located(
                "requires_grad of a parameter is changed inside forward, which leaves no operator in a captured graph: "
                "call the module with detached parameters, as torch.func.functional_call(module, {name: p.detach() for "
                "name, p in module.named_parameters()}, x), or freeze it outside of the model",
                place_of_frame(sys._getframe(1)),
            )
        if name == "__get__" and func == _DATA_ATTRIBUTE.__get__:
            return _detached(args[0])  # .data is no operator, and what is written to it would be lost
        if func is torch.Tensor.detach or func is torch.detach:
            return _detached(*args, **(kwargs or {}))
        if name == "__set__" and func == _DATA_ATTRIBUTE.__set__ and _called_by_model():
            raise located(
                "a tensor's .data is replaced in forward, which leaves no operator in a captured graph; compute with "
                "another tensor, or write to a buffer with copy_",
                place_of_frame(sys._getframe(1)),
            )
        if transform is None and name not in _UNTRAINED and torch.is_grad_enabled():
            for x in (*args, *(kwargs or {}).values()):
                for tensor in x if isinstance(x, (list, tuple)) else (x,):
                    if type(tensor) in _PLAIN and tensor.requires_grad and tensor.is_leaf:
                        raise located(_no_name(tensor), place_of_frame(sys._getframe(1)))
        return STAND_INS.get(func, func)(*args, **(kwargs or {}))


def _writes(name: str) -> bool:
    """Whether a function of this name writes to its first argument."""
    in_place = name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "detach_")
    return in_place or name == "__setitem__"


def _detached(x: torch.Tensor) -> torch.Tensor:
    """``x.detach()``, of which it is known whether it shares the memory of a tensor with a gradient."""
    found = x.detach()
    if x.requires_grad and not x.is_leaf:
        found._whale_shares = True  # type: ignore[attr-defined]
    return found


def _is_unrecorded(x: Any) -> bool:
    """Whether autograd records no write to a tensor, though the memory is that of one with a gradient."""
    if not isinstance(x, torch.Tensor):
        return False
    held = [x] if x._base is None else [x, x._base]
    if any(getattr(tensor, "_whale_shares", False) for tensor in held):
        return True
    return not torch.is_grad_enabled() and any(tensor.requires_grad and not tensor.is_leaf for tensor in held)


def _changes_training(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Whether a function freezes or thaws a parameter."""
    if name == "requires_grad_":
        value = args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True)
    elif name == "__set__" and func == _REQUIRES_GRAD.__set__:
        value = args[1]
    else:
        return False
    return isinstance(args[0], nn.Parameter) and args[0].requires_grad != bool(value)


_PLAIN: tuple[type, ...] = (torch.Tensor, nn.Parameter)
"""Types of tensors with data: those of the model that is captured are fake."""
_UNTRAINED = ("__get__", "__set__", "detach", "size", "dim", "stride", "numel", "__len__", "requires_grad_")


def _no_name(x: torch.Tensor) -> str:
    kind = "a parameter" if isinstance(x, nn.Parameter) else "a tensor"
    return (
        f"the forward or loss_fn reads {kind} of shape {tuple(x.shape)} that requires a gradient and that the model "
        "has not under a name (it is in a list, a global, a closure or the loss's module, or is reached through an "
        "object, as a set or a namespace, with modules from before parallelize), so that steps would not train it: "
        "register it (self.weight = nn.Parameter(...), nn.ParameterList, a submodule) and read it as the "
        "module's attribute, put a loss with parameters inside the model, or freeze it with requires_grad_(False)"
    )


def _called_by_model() -> bool:
    """Whether the current call comes from the model, not from torch's own machinery."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename.endswith(_DISPATCH)
    ):
        frame = frame.f_back
    return is_model(frame.f_code.co_filename)


_DISPATCH = ("torch/_tensor.py", "torch/overrides.py", "torch/_tensor_str.py", "torch/autograd/__init__.py")


class _WithoutDumps:
    """A stream that drops the graph which torch.export prints before it raises."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if sys._getframe(1).f_code.co_filename.endswith("torch/export/_trace.py"):
            return len(text)
        return int(self._stream.write(text))


class _LinesOfModel:
    """The model's lines of the stack of an operator that is recorded, for torch's tracers; they would keep only those
    of functions called ``forward``. It looks at no source file, as torch's own class does for all hundred frames of
    such a stack, which takes a quarter of a capture.
    """

    @classmethod
    def extract(cls) -> _LinesOfModel:
        """Take the place of ``CapturedTraceback.extract``."""
        return cls()

    def summary(self) -> StackSummary:
        """The lines, outermost first, from the first ``forward`` on."""
        found: list[FrameSummary] = []
        last = 0
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            is_forward = code.co_name == "forward"
            if is_forward or _is_model(code.co_filename):
                found.append(FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False))
                last = len(found) if is_forward else last
            frame = frame.f_back
        return StackSummary.from_list(found[:last][::-1])


_is_model = cache(is_model)


@contextmanager
def refusing() -> Iterator[None]:
    """Context for a capture: refuse calls that torch would record wrongly, record the model's lines on its operators,
    and silence torch's own dumps. What ``torch.utils.checkpoint`` computes is marked."""

    def frames(*args: Any, **kwargs: Any) -> Iterator[None]:
        with checkpointing():
            yield

    filter_frames, stacks = TracerBase._filter_traceback_frames, proxy.CapturedTraceback
    stderr = sys.stderr
    non_reentrant = checkpoint._checkpoint_without_reentrant_generator
    checkpoint._checkpoint_without_reentrant_generator = frames
    TracerBase._filter_traceback_frames = lambda tracer, summary: summary  # type: ignore[assignment, method-assign]
    proxy.CapturedTraceback = _LinesOfModel  # type: ignore[misc, assignment]
    sys.stderr = _WithoutDumps(stderr)
    try:
        with without_logs(), _Refuse(), _refusing_seeds(), _without_inference_mode(), standing_in():
            yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = non_reentrant
        TracerBase._filter_traceback_frames = filter_frames  # type: ignore[method-assign]
        proxy.CapturedTraceback = stacks  # type: ignore[misc]
        sys.stderr = stderr


@contextmanager
def without_logs() -> Iterator[None]:
    """Context in which torch does not log the errors that it raises in captures and on fake tensors."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    try:
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
