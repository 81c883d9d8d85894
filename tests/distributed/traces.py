"""Traces that ranks keep: many tests run one model in other layouts, and its trace takes most of their time.

Two models have one trace if nothing that their forward reads differs. Models of classes that are defined in a script
that is no example, with hooks, or with attributes that cannot be compared, are traced each time; so is all that runs in
a mode of torch's.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

import whale.api
import whale.commands.candidates
import whale.commands.planning
import whale.commands.tables
import whale.compile.builder
import whale.compile.compile
import whale.strategies.layers
from tests.distributed.kept_calls import calls_known_once
from tests.distributed.kept_graphs import dumps_if_possible, kept
from whale.annotations import NODE_KEY, module_scopes
from whale.compile import trace as trace_module
from whale.compile.trace import Traced, trace
from whale.graph.capture import batch_leaves, capture
from whale.graph.captured import Captured
from whale.graph.scoping import NodeScopes, module_paths, recorded_scopes, scopes_by_module
from whale.graph.size_conditions import SizeConditions, VaryingDims, size_conditions
from whale.ir.strategy import encode_scopes

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
    if isinstance(x, (tuple, list, Mapping)) and getattr(x, "__dict__", None):
        raise _Unlike(x)  # it has attributes beside its entries
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
    if isinstance(x, partial):
        _refuse_tensors(x, (x.args, x.keywords))
        return partial, _key(x.func), _key(x.args), _key(x.keywords)
    if callable(getattr(x, "to_json_string", None)):  # a configuration of transformers
        return type(x), x.to_json_string(use_diff=False), getattr(x, "_attn_implementation", "")
    name = getattr(x, "__name__", "")
    if callable(x) and getattr(sys.modules.get(getattr(x, "__module__", "")), name, None) is x:
        defaults = getattr(x, "__defaults__", None), getattr(x, "__kwdefaults__", None)
        return getattr(x, "__module__", ""), name, _source(x), _key(defaults)
    if isinstance(x, FunctionType):
        return _key_of_function(x)
    raise _Unlike(x)


def _key_of_function(x: FunctionType, of: type | None = None) -> Hashable:
    """A function that no module has by name, such as one that another function makes, or a method of the class *of*."""
    constants: list[Any] = [x.__defaults__, x.__kwdefaults__]
    for cell in x.__closure__ or ():
        try:
            constants.append(cell.cell_contents)
        except ValueError:  # of a name that has no value yet
            raise _Unlike(x) from None
    _refuse_tensors(x, constants)
    plain = tuple(None if of is not None and constant is of else _key(constant) for constant in constants)
    return x.__module__, x.__qualname__, x.__code__.co_firstlineno, _key_of_code(x.__code__), plain, _source(x)


def _refuse_tensors(x: Any, held: Any) -> None:
    """Refuse what holds tensors, which are constants of the graph by their values."""
    if any(isinstance(leaf, (Tensor, nn.Module)) for leaf in tree_leaves(held)):
        raise _Unlike(x)


def _key_of_code(code: CodeType) -> Hashable:
    constants = tuple(_key_of_code(x) if isinstance(x, CodeType) else repr(x) for x in code.co_consts)
    return code.co_code, code.co_names, constants


def _key_of_model(model: nn.Module) -> Hashable:
    tensors: dict[int, str] = {}
    found: list[Hashable] = []
    for path, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        script = sys.argv if kind.__module__ == "__main__" else None  # its arguments may be globals that are read
        if script and Path(script[0]).parent != EXAMPLES:
            raise _Unlike(module)
        functions = [x for x in vars(kind).values() if isinstance(x, FunctionType)]
        source: Hashable = _source(*functions)
        if "<" in kind.__qualname__:
            source = source, tuple(_key_of_function(x, kind) for x in functions), tuple(map(str, kind.__mro__))
        attributes = {name: x for name, x in vars(module).items() if name not in _OWN}
        if any(isinstance(x, Tensor) or (name.endswith("_hooks") and x) for name, x in attributes.items()):
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
    """All that a trace depends on, besides annotations of modules and, where its forward makes tensors once, the values
    of buffers; None where it cannot be compared."""
    options = {name: x for name, x in options.items() if name != "values"}
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
        before, trace_module.capture = trace_module.capture, captured_once
        try:
            found = trace(model, batch, **options)
        finally:
            trace_module.capture = before
        again = found.stages(scopes)
        if (again.stages, again.scopes) != (found.annotated.stages, found.annotated.scopes):
            return found  # not all its annotations are marks of modules
        if found.captured.made:
            return found
        _traces[key] = found
    return replace(_traces[key], annotated=_traces[key].stages(scopes))


_DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(capture).parameters.items()
    if parameter.default is not inspect.Parameter.empty
}


def captured_once(model: nn.Module, batch: Any, **options: Any) -> Captured:
    """Capture a model as `whale.graph.capture.capture`, where no process of this run has captured such a one yet.

    Models that differ in annotations of modules alone have one graph, with the annotations of each.
    """
    given = {**_DEFAULTS, **options}
    given["device"] = torch.device(given["device"])
    scopes = module_scopes(model)
    key = _key_of_call(model, batch, given)
    if key is None:
        return capture(model, batch, **options)
    of_stages = repr(scopes) if given["precision"] is not None else ""  # casts are shared within a stage
    with kept(("captured", key, of_stages)) as file:
        graph: Captured | None = file.graph
        if graph is not None:
            _mark(graph, scopes_by_module(module_paths(graph, model), scopes))
            return graph
        graph = capture(model, batch, **options)
        marked = recorded_scopes(graph) == scopes_by_module(module_paths(graph, model), scopes)
        file.write(_bytes(graph) if marked and not graph.made else b"")
    return graph


def _mark(graph: Captured, scopes: NodeScopes) -> None:
    """Give a graph the annotations with which another model like its own is captured."""
    for node in graph.graph.nodes:
        custom = {name: x for name, x in (node.meta.get("custom") or {}).items() if name != NODE_KEY}
        if node in scopes.of:
            custom[NODE_KEY] = encode_scopes(scopes.of[node])
        if custom or "custom" in node.meta:
            node.meta["custom"] = custom
    graph.stage_regions = scopes.stage_regions


def _bytes(captured: Captured) -> bytes:
    """A graph's bytes; none where it holds what has none, or types of outputs, which a capture registers."""
    if captured.structure is not None:
        return b""
    return dumps_if_possible(captured)


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
