"""Traces that ranks keep: many tests run one model in other layouts, and its trace takes most of their time.

Two models have one trace if nothing that their forward reads differs. Models of classes that are defined in a function,
with hooks, or with attributes that cannot be compared, are traced each time; so is all that runs in
a mode of torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import whale.api
from whale.annotations import module_scopes
from whale.compile.trace import Traced, trace
from whale.graph.capture import batch_leaves

__all__ = ["shared", "traced_once"]

_traces: dict[Hashable, Traced] = {}
_OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training", "_whale_scopes"}
"""Attributes that :func:`_key_of_model` looks at by itself."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, Enum)


class _Unlike(Exception):
    """A value that cannot be compared."""


@dataclass
class _Of:
    model: nn.Module


def _key(x: Any) -> Hashable:
    if isinstance(x, _PLAIN):
        return type(x), x
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(_key, x))
    if isinstance(x, (set, frozenset)):
        return type(x), frozenset(map(_key, x))
    if isinstance(x, _Of):
        return _key_of_model(x.model)
    if isinstance(x, Mapping):
        return type(x), tuple((_key(name), _key(value)) for name, value in x.items())
    if isinstance(x, Tensor):
        return type(x), tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad
    if callable(getattr(x, "to_json_string", None)):  # a configuration of transformers
        return type(x), x.to_json_string(use_diff=False), getattr(x, "_attn_implementation", "")
    name = getattr(x, "__name__", "")
    if callable(x) and getattr(sys.modules.get(getattr(x, "__module__", "")), name, None) is x:
        return getattr(x, "__module__", ""), name
    raise _Unlike(x)


def _key_of_model(model: nn.Module) -> Hashable:
    tensors: dict[int, str] = {}
    found: list[Hashable] = []
    for path, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        if "<" in kind.__qualname__ or kind.__module__ == "__main__":
            raise _Unlike(module)
        attributes = {name: x for name, x in vars(module).items() if name not in _OWN}
        if any(isinstance(x, Tensor) or (x and name.endswith("_hooks")) for name, x in attributes.items()):
            raise _Unlike(module)  # a tensor that is no buffer is a constant of the graph, by its values
        held = {**module._parameters, **module._buffers}
        for name, x in held.items():
            tied = None if x is None else tensors.setdefault(id(x), f"{path}.{name}")
            found.append((name, tied, _key(x)))
        plain = tuple((name, _key(x)) for name, x in attributes.items() if not name.endswith("_hooks"))
        found.append((path, kind, module.training, plain))
    return tuple(found)


def traced_once(model: nn.Module, batch: Any, **options: Any) -> Traced:
    """Trace a model as `whale.compile.trace.trace`, where this process has not traced such a one yet."""
    try:
        modes = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.get_default_dtype()
        key = None if _get_current_dispatch_mode_stack() else _key((_Of(model), batch_leaves(batch), options, modes))
    except _Unlike:
        key = None
    if key is None or key not in _traces:
        found = trace(model, batch, **options)
        again = found.stages(module_scopes(model))
        if key is not None and (again.stages, again.scopes) == (found.annotated.stages, found.annotated.scopes):
            _traces[key] = found  # all its annotations are marks of modules
        return found
    return replace(_traces[key], annotated=_traces[key].stages(module_scopes(model)))


@contextmanager
def shared() -> Iterator[None]:
    """Context in which steps are built from traces that this process has."""
    whale.api.trace = traced_once
    try:
        yield
    finally:
        whale.api.trace = trace
