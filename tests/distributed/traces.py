"""Traces that ranks keep: many tests run one model in other layouts, and its trace takes most of their time.

Two models have one trace if nothing that their forward reads differs. Models of classes that are defined in a function
or in a script that is no example, with hooks, or with attributes that cannot be compared, are traced each time; so is
all that runs in a mode of torch's.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import whale.api
import whale.commands.candidates
import whale.commands.planning
import whale.commands.tables
import whale.compile.builder
import whale.compile.compile
import whale.strategies.layers
from tests.distributed.kept_calls import calls_known_once
from tests.distributed.kept_graphs import dumps_if_possible, kept
from whale.annotations import module_scopes
from whale.compile import trace as trace_module
from whale.compile.trace import Traced, trace
from whale.graph.capture import Captured, batch_leaves, capture
from whale.graph.size_conditions import SizeConditions, VaryingDims, size_conditions

__all__ = ["captured_once", "shared", "traced_once"]

_traces: dict[Hashable, Traced] = {}
_OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training", "_whale_scopes"}
"""Attributes that :func:`_key_of_model` looks at by itself."""
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
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
        return type(x), tuple(sorted(map(_key, x), key=repr))
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
        return getattr(x, "__module__", ""), name, _source(x)
    raise _Unlike(x)


def _key_of_model(model: nn.Module) -> Hashable:
    tensors: dict[int, str] = {}
    found: list[Hashable] = []
    for path, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        script = sys.argv if kind.__module__ == "__main__" else None  # its arguments may be globals that are read
        if "<" in kind.__qualname__ or (script and Path(script[0]).parent != EXAMPLES):
            raise _Unlike(module)
        source = _source(*(x for x in vars(kind).values() if hasattr(x, "__code__")))
        attributes = {name: x for name, x in vars(module).items() if name not in _OWN}
        if any(isinstance(x, Tensor) or (x and name.endswith("_hooks")) for name, x in attributes.items()):
            raise _Unlike(module)  # a tensor that is no buffer is a constant of the graph, by its values
        held = {**module._parameters, **module._buffers}
        for name, x in held.items():
            tied = None if x is None else tensors.setdefault(id(x), f"{path}.{name}")
            found.append((name, tied, _key(x)))
        plain = tuple((name, _key(x)) for name, x in attributes.items() if not name.endswith("_hooks"))
        found.append((path, kind, source, script and tuple(script), module.training, plain))
    return tuple(found)


@cache
def _source(*of: Any) -> str:
    """A hash of the files of functions; files of one name may differ."""
    names = {code.co_filename for x in of if (code := getattr(x, "__code__", None)) is not None}
    files = (Path(name) for name in sorted(names))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.exists())).hexdigest()


def _key_of_call(model: nn.Module, batch: Any, options: Mapping[str, Any]) -> Hashable:
    """All that a trace depends on, besides annotations of modules; None where it cannot be compared."""
    modes = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        return None if _get_current_dispatch_mode_stack() else _key((_Of(model), batch_leaves(batch), options, modes))
    except _Unlike:
        return None


def traced_once(model: nn.Module, batch: Any, **options: Any) -> Traced:
    """Trace a model as `whale.compile.trace.trace`, where this process has not traced such a one yet."""
    key = _key_of_call(model, batch, options)
    if key is None:
        return trace(model, batch, **options)
    scopes = module_scopes(model)
    if key not in _traces:
        with kept(key) as file:
            found, text = _traced(model, batch, options, file.graph)
            again = found.stages(scopes)
            if text is not None and (again.stages, again.scopes) != (found.annotated.stages, found.annotated.scopes):
                file.write(b"")  # not all its annotations are marks of modules
                return found
            if text is not None:
                file.write(text)
        _traces[key] = found
    return replace(_traces[key], annotated=_traces[key].stages(scopes))


def _traced(
    model: nn.Module, batch: Any, options: Mapping[str, Any], graph: Captured | None
) -> tuple[Traced, bytes | None]:
    """A trace, from this graph if there is one, and the bytes of its graph if there was none."""
    text: bytes | None = None

    def captured(*arguments: Any, **settings: Any) -> Captured:
        nonlocal text
        if graph is not None:
            return graph
        found = capture(*arguments, **settings)
        text = _bytes(found)
        return found

    before = trace_module.capture
    trace_module.capture = captured
    try:
        return trace(model, batch, **options), text
    finally:
        trace_module.capture = before


def _bytes(captured: Captured) -> bytes:
    """A graph's bytes; none where it holds what has none, or types of outputs, which a capture registers."""
    if captured.structure is not None:
        return b""
    return dumps_if_possible(captured)


def captured_once(model: nn.Module, batch: Any, **options: Any) -> Captured:
    """Capture a model as `whale.graph.capture.capture`, where no process of this run has captured such a one yet."""
    key = _key_of_call(model, batch, options)
    if key is None:
        return capture(model, batch, **options)
    with kept(("captured", key, repr(module_scopes(model)))) as file:
        graph = file.graph
        if graph is None:
            graph = capture(model, batch, **options)
            file.write(_bytes(graph))
    return graph


def conditions_once(
    model: nn.Module, batch: Mapping[str, Any], dims: VaryingDims, **options: Any
) -> SizeConditions | None:
    """Find conditions on sizes as `whale.graph.size_conditions`, where no process of this run has found them."""
    key = _key_of_call(model, batch, options)
    if key is None:
        return size_conditions(model, batch, dims, **options)
    with kept(("conditions", key, tuple(dims.items()), repr(module_scopes(model)))) as file:
        found = file.graph
        if found is None:
            found = size_conditions(model, batch, dims, **options)
            file.write(b"" if found is None else dumps_if_possible(found))
    return found


_TRACING: tuple[Any, ...] = (
    whale.api, whale.compile.builder, whale.compile.compile, whale.commands.candidates, whale.commands.planning,
    whale.commands.tables,
)  # fmt: skip
_CAPTURING: tuple[Any, ...] = (whale.strategies.layers,)


@contextmanager
def shared() -> Iterator[None]:
    """Context in which steps, plans and profiles are made from traces that this process has, of graphs that this run
    has."""
    for module in _TRACING:
        module.trace = traced_once
    for module in _CAPTURING:
        module.capture = captured_once
    whale.compile.builder.size_conditions = conditions_once
    try:
        with calls_known_once():
            yield
    finally:
        for module in _TRACING:
            module.trace = trace
        for module in _CAPTURING:
            module.capture = capture
        whale.compile.builder.size_conditions = size_conditions
