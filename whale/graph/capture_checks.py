"""Checks of a capture: models that cannot be captured are refused with the line of the user's file.

torch reports some problems, such as a branch on a tensor's values; what it would mishandle in a capture is refused by
:mod:`whale.graph.refusing`. This module knows batches, models and graphs, not how a model is captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from keyword import iskeyword
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from whale.errors import CaptureError, UsageError
from whale.graph.nodes import inner_modules
from whale.graph.origins import located, place_of_forward, place_of_node
from whale.graph.refusing import NO_TRANSFORMS, OWN_GENERATOR

__all__ = [
    "DATA_DEPENDENT",
    "check_batch",
    "check_constant",
    "check_dtypes",
    "check_hooks",
    "check_modules",
    "check_static",
]


aten = torch.ops.aten


# --- before the capture -----------------------------------------------------------------------------------------------


def _refuse_nested(key: str, leaf: Any) -> None:
    inner = _fields(leaf)
    if not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(list(inner.values()))):
        return
    kind = type(leaf).__name__
    names = [str(n) if str(n).isidentifier() and not iskeyword(str(n)) else f"x{i}" for i, n in enumerate(inner)]
    pairs = list(zip(inner, names, strict=True))
    if isinstance(leaf, Mapping):
        made = f"({{{', '.join(f'{field!r}: {name}' for field, name in pairs)}}})"
    elif isinstance(leaf, (list, tuple)):
        made = f"({kind}({', '.join(names)}))" if hasattr(leaf, "_fields") else f"([{', '.join(names)}])"
    elif is_dataclass(leaf):
        made = f"({kind}({', '.join(f'{field}={name}' for field, name in pairs)}))"
    else:
        made = f" with a {kind} of them"
    raise UsageError(
        f"the batch's {key} is a {kind} of tensors, but each tensor of a batch is an argument of its own: put the "
        f"model in a module whose forward(self, {', '.join(names)}) calls self.model{made}, with the other arguments "
        "beside, and give the batch as those"
    )


def _fields(leaf: Any) -> dict[Any, Any]:
    """The members of a collection, or of an object of the script's own, by key, number or attribute."""
    if isinstance(leaf, Mapping):
        return dict(leaf)
    if isinstance(leaf, (list, tuple)):
        return dict(zip(getattr(leaf, "_fields", range(len(leaf))), leaf, strict=True))
    if isinstance(leaf, (torch.Tensor, type)):
        return {}
    if is_dataclass(leaf):
        return {field.name: getattr(leaf, field.name, None) for field in fields(leaf) if field.init}
    return dict(getattr(leaf, "__dict__", {}))


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


# --- after the capture ------------------------------------------------------------------------------------------------


_TRANSFORMS = ("_add_batch_dim", "_remove_batch_dim")
"""Functions between which operators have one dim less than a graph of them has."""


def check_static(graph: fx.Graph, name: str) -> None:
    """Refuse a graph in which a number or a shape depends on a tensor's values, as in the regions without gradients."""
    for node in (node for one in (graph, *(m.graph for m in inner_modules(graph))) for node in one.nodes):
        values = node.meta.get("val")
        for value in values if isinstance(values, (tuple, list)) else (values,):
            dynamic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
            if isinstance(value, torch.Tensor):
                dynamic = any(isinstance(size, torch.SymInt) for size in value.shape)
            if dynamic:
                raise located(f"{name} cannot be captured: {DATA_DEPENDENT}", place_of_node(node))
        if getattr(node.target, "__name__", "") in _TRANSFORMS:
            raise located(NO_TRANSFORMS, place_of_node(node))
        if node.kwargs.get("generator") is not None or isinstance(node.meta.get("val"), torch.Generator):
            raise located(OWN_GENERATOR, place_of_node(node))
        if node.target is aten.instance_norm.default and node.args[3] is not None and node.args[5]:
            raise located(
                "instance_norm in training mode updates running statistics, which its operator does not say: make the "
                "layer with track_running_stats=False, or call its eval() before parallelize",
                place_of_node(node),
            )


def check_dtypes(graph: fx.Graph, name: str) -> None:
    """Refuse products of tensors of several dtypes, and rows of a table that are no whole numbers."""
    for node in graph.nodes:
        if node.target is aten.embedding.default:
            given = node.args[1].meta["val"].dtype
            if given not in (torch.int32, torch.int64):
                raise located(
                    f"{name} cannot be captured: rows of an embedding table are of int64 or int32, but got {given}",
                    place_of_node(node),
                )
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
