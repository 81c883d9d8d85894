"""Checks of a capture: models that cannot be captured are refused with the line of the user's file.

torch reports some problems (a branch on a tensor's values) and silently mishandles others: a custom backward, a hook on
a gradient, a value that is printed. This module knows tracebacks, graphs and hooks, not how a model is captured.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from keyword import iskeyword
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import proxy
from torch.fx.proxy import TracerBase
from torch.fx.traceback import annotate as annotate_nodes
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from whale.errors import CaptureError, UsageError
from whale.graph.stand_ins import STAND_INS, standing_in

__all__ = [
    "DATA_DEPENDENT",
    "SourceLine",
    "check_batch",
    "check_constant",
    "check_dtypes",
    "check_hooks",
    "check_modules",
    "check_static",
    "checkpointing",
    "is_checkpointed",
    "is_model",
    "layer_of",
    "located",
    "module_of",
    "modules_around",
    "place_of_forward",
    "place_of_frame",
    "place_of_node",
    "refusing",
    "where",
    "without_logs",
]


aten = torch.ops.aten


class SourceLine(NamedTuple):
    """A line of a source file."""

    file: str
    line: int


_NOT_THE_MODEL = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        sysconfig.get_paths()["stdlib"],
    )
)
_PACKAGES = ("numpy", "transformers/utils", "transformers/integrations")


def is_model(file: str) -> bool:
    """Whether a source file may be the model's own: not torch, Whale, Python, or a library's decorators."""
    if file.startswith("<"):
        return False
    if "site-packages" in file:
        inside = file.rpartition("site-packages")[2].lstrip("/\\").replace("\\", "/")
        return not inside.startswith((*(f"{name}/" for name in _PACKAGES), "torch/"))
    return not os.path.abspath(file).startswith(_NOT_THE_MODEL)


def place_of_frame(frame: FrameType | None) -> SourceLine | None:
    """The innermost line of the model's own source that a frame is in."""
    while frame is not None:
        if is_model(frame.f_code.co_filename):
            return SourceLine(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def place_of_node(node: fx.Node) -> SourceLine | None:
    """The innermost line of the model's own source that made an operator."""
    found = None
    for line in (node.meta.get("stack_trace") or "").splitlines():
        if line.strip().startswith("File "):
            file, number = line.strip().removeprefix('File "').split('", line ')
            if is_model(file):
                found = SourceLine(file, int(number.split(",")[0]))
    return found


def where(node: fx.Node) -> str:
    """The operator's place at the end of a phrase, for messages: `` at model.py:12``; that of what it reads, or of what
    reads it, where its own is not known, as of operators that write; empty where neither is."""
    if (place := place_of_node(node)) is not None:
        return f" at {place.file}:{place.line}"
    for near in (*reversed(node.all_input_nodes), *node.users):
        if (place := place_of_node(near)) is not None:
            return f" near {place.file}:{place.line}"
    return ""


def module_of(node: fx.Node) -> str:
    """Path of the innermost module of the model whose forward made an operator; empty for the model itself."""
    return next(reversed(modules_around(node)), "")


def modules_around(node: fx.Node) -> list[str]:
    """Paths of the modules of the model in whose forwards an operator was made, outermost first; the model is the empty
    path, and what computes the loss from its output lies in none."""
    paths = [str(entry[0]).removeprefix("L['self'].") for entry in (node.meta.get("nn_module_stack") or {}).values()]
    return [path.removeprefix("model").removeprefix(".") for path in paths if path]


def layer_of(node: fx.Node) -> str:
    """The module of a list of modules in which an operator was made, as far as the first number in its path; empty
    outside of lists."""
    parts = next(iter(reversed(modules_around(node))), "").split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ""


def is_checkpointed(node: fx.Node) -> bool:
    """Whether an operator was made in a ``torch.utils.checkpoint``."""
    return _CHECKPOINTED in (node.meta.get("custom") or {})


_CHECKPOINTED = "whale_checkpointed"


def checkpointing() -> AbstractContextManager[Any]:
    """Context in which operators are those of a ``torch.utils.checkpoint``."""
    return annotate_nodes({_CHECKPOINTED: "1"})


def place_of_forward(model: nn.Module) -> SourceLine | None:
    """The line at which a model's forward begins, where it is not torch's."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return SourceLine(code.co_filename, code.co_firstlineno) if code and is_model(code.co_filename) else None


def located(message: str, place: SourceLine | None) -> CaptureError:
    """An error at a line."""
    return CaptureError(message, file=place.file if place else None, line=place.line if place else None)


# --- before the capture -----------------------------------------------------------------------------------------------


def _refuse_nested(key: str, leaf: Any) -> None:
    if not isinstance(leaf, (Mapping, list, tuple)) or not any(
        isinstance(x, torch.Tensor) for x in pytree.tree_leaves(leaf)
    ):
        return
    fields = list(map(str, leaf)) if isinstance(leaf, Mapping) else getattr(leaf, "_fields", range(len(leaf)))
    names = [str(n) if str(n).isidentifier() and not iskeyword(str(n)) else f"x{i}" for i, n in enumerate(fields)]
    if isinstance(leaf, Mapping):
        inside = f"{{{', '.join(f'{field!r}: {name}' for field, name in zip(fields, names, strict=True))}}}"
    else:
        inside = f"{type(leaf).__name__}({', '.join(names)})" if hasattr(leaf, "_fields") else f"[{', '.join(names)}]"
    raise UsageError(
        f"the batch's {key} is a {type(leaf).__name__} of tensors, but each tensor of a batch is an argument of its "
        f"own: put the model in a module whose forward(self, {', '.join(names)}) calls self.model({inside}), with the "
        "other arguments beside, and give the batch as those"
    )


def check_batch(model: nn.Module, leaves: Mapping[str, Any], loss_fn: Callable[..., Any] | None) -> None:
    """Refuse a batch without tensors, with nested ones, or whose leaves are not what the model's forward takes."""
    name = type(model).__name__
    for key, leaf in leaves.items():
        _refuse_nested(key, leaf)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves.values()):
        shown = ", ".join(f"{key}: {type(leaf).__name__}" for key, leaf in leaves.items()) or "nothing"
        raise UsageError(
            f"the batch holds no tensor ({shown}); give a dict of keyword arguments of {name}.forward, a tuple of "
            "positional ones, or one tensor"
        )
    for key, leaf in leaves.items():
        if not isinstance(key, str):
            raise UsageError(f"the batch has the key {key!r}; its keys are names of arguments of {name}.forward")
        if not isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None))):
            raise UsageError(
                f"the batch's {key} is a {type(leaf).__name__}; give tensors, numbers, strings or None, each tensor "
                "as an argument of its own"
            )
        if isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
            kind = "nested" if leaf.is_nested else "sparse"
            remedy = (
                "to_padded_tensor(0.0), with a mask beside" if leaf.is_nested else "to_dense(), or indices and values"
            )
            raise UsageError(
                f"the batch's {key} is a {kind} tensor, whose sizes are values that a captured graph cannot know; give "
                f"{key}.{remedy}"
            )
        if isinstance(leaf, torch.Tensor) and leaf.dim() and not len(leaf):
            raise UsageError(f"the batch's {key} has shape {tuple(leaf.shape)}, no rows; leave it out on all ranks")
    if loss_fn is not None:
        return
    args = [leaf for key, leaf in leaves.items() if key.startswith("args[")]
    kwargs = {key: leaf for key, leaf in leaves.items() if not key.startswith("args[")}
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as problem:
        wanted = ", ".join(p.name if p.default is p.empty else f"{p.name}=..." for p in signature.parameters.values())
        given = ", ".join(kwargs) if kwargs else f"{len(args)} positional"
        raise UsageError(
            f"the batch has {given}, but the forward of {name} takes ({wanted}): {problem}; give it what forward "
            "takes, as a dict of keyword arguments or a tuple"
        ) from None


_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
"""Classes of torch that wrap a model to distribute it."""


def check_modules(model: nn.Module) -> None:
    """Refuse modules that cannot be copied without data, or captured.

    Raises:
        CaptureError: names the module, and what to write instead.
    """
    for path, module in model.named_modules():
        name = path or "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name} is compiled by torch.jit, which is not captured: give the module that was compiled"
            )
        if type(module).__name__ in _PARALLEL and type(module).__module__.startswith("torch."):
            raise CaptureError(
                f"{name} is a {type(module).__name__} of torch, but parallelize distributes a local model itself: give "
                "the module inside of it, model.module"
            )
        for own, x in [*module._parameters.items(), *module._buffers.items()]:
            if nn.parameter.is_lazy(x):
                raise CaptureError(
                    f"{name} has no {own} yet: run a batch through the model before parallelize, which gives lazy "
                    "modules their shapes"
                )


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks that run in the backward: the graph would not have them."""
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"the module {path or 'itself'!r} of {type(model).__name__} has a backward hook, which a captured "
                "graph cannot keep; remove it before parallelize, and read or change gradients after train_step"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"the parameter {name} of {type(model).__name__} has a gradient hook, which would see the gradient "
                "of a part of the batch; remove it before parallelize, and change gradients after train_step"
            )


# --- during the capture -----------------------------------------------------------------------------------------------

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
            raise located(_NO_TRANSFORMS, place_of_frame(sys._getframe(1)))
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


# --- after the capture ------------------------------------------------------------------------------------------------


_TRANSFORMS = ("_add_batch_dim", "_remove_batch_dim")
"""Functions between which operators have one dim less than a graph of them has."""

_NO_TRANSFORMS = (
    "torch.vmap and other transforms of torch.func inside forward are not captured: write what they do with batched "
    "operators, as torch.einsum, matmul and broadcasting"
)


def check_static(graph: fx.Graph, name: str) -> None:
    """Refuse a graph in which a number or a shape depends on a tensor's values."""
    for node in graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (tuple, list)) else (values,):
            dynamic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
            if isinstance(value, torch.Tensor):
                dynamic = any(isinstance(size, torch.SymInt) for size in value.shape)
            if dynamic:
                raise located(f"{name} cannot be captured: {DATA_DEPENDENT}", place_of_node(node))
        if getattr(node.target, "__name__", "") in _TRANSFORMS:
            raise located(_NO_TRANSFORMS, place_of_node(node))
        if node.kwargs.get("generator") is not None or isinstance(node.meta.get("val"), torch.Generator):
            raise located(
                "a random operator draws from a generator of its own, whose position a captured graph does not have; "
                "leave generator= out (the step seeds its random operators), or give the step what is drawn",
                place_of_node(node),
            )
        if node.target is aten.instance_norm.default and node.args[3] is not None and node.args[5]:
            raise located(
                "instance_norm in training mode updates running statistics, which its operator does not say: make the "
                "layer with track_running_stats=False, or call its eval() before parallelize",
                place_of_node(node),
            )


def check_dtypes(graph: fx.Graph, name: str) -> None:
    """Refuse products of tensors of several dtypes."""
    for node in graph.nodes:
        if node.target in _ONE_DTYPE:
            dtypes = {str(source.meta["val"].dtype).removeprefix("torch.") for source in node.all_input_nodes}
            if len(dtypes) > 1:
                raise located(
                    f"{name} cannot be captured: {node.target} of {' and '.join(sorted(dtypes))}; give a batch of the "
                    "model's dtype, or cast inside the model",
                    place_of_node(node),
                )


_ONE_DTYPE = (aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default)
"""Operators that refuse tensors of different dtypes when they run, but not when they are captured."""


def check_constant(constant: Any, node: fx.Node, model: nn.Module) -> None:
    """Refuse a tensor that the forward reads and is not the model's, if a step would not have its values."""
    if not isinstance(constant, FakeTensor):
        return
    place = next((found for user in node.users if (found := place_of_node(user))), None) or place_of_forward(model)
    raise located(
        f"the forward or loss_fn reads a tensor of shape {tuple(constant.shape)} that the model has not under a name, "
        "or that an earlier forward computed and kept, so that it has no data while the model is captured: read a "
        "parameter as its module's attribute (or from an nn.ParameterList), and keep a tensor in a buffer of the model "
        "(register_buffer) and write to it with copy_; put a loss with a state inside the model",
        place,
    )


DATA_DEPENDENT = (
    "control flow, a number or a shape depends on a tensor's values (`if`, `.item()`, `.tolist()`, `nonzero`, a mask "
    "as an index); use torch.where, or multiply with the mask, in place of it"
)
