"""Casts of ``torch.autocast``, written into a captured graph.

A model is captured under autocast, so that its code sees the dtypes that it would see when it runs, and the graph's
fake values have them; the casts themselves happen below what is captured. So each operator is run once more, on fake
tensors, under autocast, and what it casts becomes a cast of the graph. Which operators cast is torch's knowledge: there
is no list of them here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from whale.annotations import NODE_KEY
from whale.graph.canonical import emit
from whale.graph.composites import inline_parts, parts_of
from whale.graph.origins import located, place_of_node
from whale.graph.refusing import without_logs

__all__ = ["LOW_PRECISIONS", "Autocast", "autocast_around", "under_autocast", "write_casts"]

aten = torch.ops.aten

LOW_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The precisions of ``torch.autocast``, by name."""


class Autocast(NamedTuple):
    """The state of autocast on a type of device: the dtype to which it casts, None if it is off, and whether it
    remembers the casts of parameters."""

    device_type: str
    dtype: torch.dtype | None
    remembers: bool = True


def autocast_around(device_type: str) -> Autocast:
    """The state in which the caller runs."""
    if not torch.is_autocast_enabled(device_type):
        return Autocast(device_type, None)
    return Autocast(device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled())


@contextmanager
def under_autocast(state: Autocast) -> Iterator[None]:
    """Run in a state, whatever is around."""
    if state.dtype is None and not torch.is_autocast_enabled(state.device_type):
        yield
        return
    dtype = state.dtype or torch.get_autocast_dtype(state.device_type)
    with torch.autocast(state.device_type, dtype, enabled=state.dtype is not None, cache_enabled=state.remembers):
        yield


def write_casts(graph: fx.Graph, around: Autocast, parameters: Mapping[str, str]) -> None:
    """Write the casts into a graph of operators as the model's code calls them.

    An operator is in the state of its ``meta["autocast"]``, or else in that *around*. A parameter is cast once for all
    operators of a stage that read it, as autocast remembers its casts; anything else once for each operator, so that
    its gradients are added in its own dtype.

    Args:
        graph: changed in place.
        around: the state in which the model was captured.
        parameters: the names of placeholders that are parameters.

    Raises:
        CaptureError: an operator casts what it computes inside, and has no parts.
    """
    known: dict[Hashable, tuple[tuple[int, torch.dtype], ...] | None] = {}
    made: dict[Hashable, fx.Node] = {}
    retyped = set[fx.Node]()
    for node in list(graph.nodes):
        state = _state_of(node, around)
        if not retyped.isdisjoint(node.all_input_nodes) and _retype(node, state):
            retyped.add(node)
        if node.op != "call_function" or state.dtype is None or not isinstance(node.target, torch._ops.OpOverload):
            continue
        inputs = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]
        values = [source.meta.get("val") for source in inputs]
        if node.target in _CASTS or not any(isinstance(x, Tensor) and x.is_floating_point() for x in values):
            continue
        key = state, node.target, _without_sizes(node), tuple(map(inputs.index, inputs))
        if key not in known:
            known[key] = _casts_of(node, inputs, state)
        casts = known[key]
        if casts is None:
            with under_autocast(state._replace(remembers=False)):
                parts = parts_of(node)
            if parts is None:
                raise located(
                    f"{node.target} casts what it computes inside under torch.autocast, which cannot be captured: run "
                    "it under torch.autocast(..., enabled=False)",
                    place_of_node(node),
                )
            retyped |= inline_parts(graph, node, parts, _remembered(graph, node, parts, state, made, parameters))
            continue
        for place, dtype in casts:
            cast = _cast(graph, node, inputs[place], dtype, state, made, parameters)
            node.replace_input_with(inputs[place], cast)


def _state_of(node: fx.Node, around: Autocast) -> Autocast:
    """The state in which an operator runs."""
    device_type, dtype, enabled, remembers = node.meta.pop("autocast", (None, None, False, True))
    if device_type != around.device_type:
        return around
    if not enabled:
        return Autocast(device_type, None)
    return Autocast(device_type, dtype or torch.get_autocast_dtype(device_type), remembers)


def _retype(node: fx.Node, state: Autocast) -> bool:
    """Give a node whose inputs have other dtypes than they had its own; whether that is another.

    A fake tensor does not always take the kernel that a real one takes, as an LSTM of oneDNN, which returns bfloat16.
    """
    before = node.meta.get("val")
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    mode = next((x.fake_mode for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)), None)
    if node.op != "call_function" or mode is None or not isinstance(before, Tensor):
        return False
    with mode, torch.no_grad(), under_autocast(state._replace(remembers=False)):
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
    return node.meta["val"].dtype != before.dtype


_CASTS = {
    aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default,
}  # fmt: skip


def _without_sizes(node: fx.Node) -> Hashable:
    """A key of calls with the same casts: dtypes, numbers of dims, and arguments that are not tensors."""

    def described(leaf: Any) -> Hashable:
        value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else None
        if isinstance(value, Tensor):
            return value.dtype, value.dim()
        return type(leaf), str(leaf)

    leaves, structure = pytree.tree_flatten((node.args, dict(node.kwargs)))
    return tuple(map(described, leaves)), str(structure)


class _Recorder(TorchDispatchMode):
    """Records the operators below a call, and the tensors that are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.dtypes: list[torch.dtype] = []
        self.casts: list[tuple[Tensor, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self.calls.append(str(func))
        if func is aten._to_copy.default:
            self.casts.append((args[0], result.dtype))
        return result


def _casts_of(node: fx.Node, inputs: list[fx.Node], state: Autocast) -> tuple[tuple[int, torch.dtype], ...] | None:
    """The numbers of the arguments that a call casts, with their dtypes; None if it casts other tensors."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    values = [source.meta.get("val") for source in inputs]
    mode = next((x.fake_mode for x in pytree.tree_leaves(values) if isinstance(x, FakeTensor)), None)
    target: Any = node.target

    def recorded(own: Autocast, cast: Mapping[int, torch.dtype] = {}) -> _Recorder | None:
        given = pytree.tree_map_only(Tensor, lambda x: x.to(cast.get(id(x), x.dtype)), (args, kwargs))
        try:
            with without_logs(), torch.no_grad(), under_autocast(own), _Recorder() as recorder:
                result = target(*given[0], **given[1])
        except (RuntimeError, TypeError):  # tensors of several dtypes
            return None
        recorder.dtypes = [x.dtype for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        return recorder

    if mode is None:
        return ()
    with mode:
        found = recorded(state._replace(remembers=False))
        if found is None or not found.casts:
            return ()
        places = [next((i for i, value in enumerate(values) if value is x), None) for x, _ in found.casts]
        num = next((i for i, place in enumerate(places) if place is None), len(places))
        for first in range(num + 1):  # those of autocast come first; what follows the operator does by itself
            cast = {id(x): dtype for x, dtype in found.casts[:first]}
            without = recorded(state._replace(dtype=None), cast)
            alike = without is not None and without.dtypes == found.dtypes  # else it reads a tensor as it is, too
            if without is not None and alike and [*found.calls[:first], *without.calls] == found.calls:
                num = first
                break
        else:
            if num < len(places) or not alike:
                return None
    return tuple((place, dtype) for place, (_, dtype) in zip(places[:num], found.casts, strict=False))  # type: ignore[misc]


def _cast(
    graph: fx.Graph,
    node: fx.Node,
    source: fx.Node,
    dtype: torch.dtype,
    state: Autocast,
    made: dict[Hashable, fx.Node],
    parameters: Mapping[str, str],
) -> fx.Node:
    """The cast of an operator's input, of which there is one for all operators where autocast remembers it."""
    stage = (node.meta.get("custom") or {}).get(NODE_KEY)
    key = (source, dtype, stage) if state.remembers and source.name in parameters else (source, dtype, node)
    if key not in made:
        value = source.meta["val"]
        with graph.inserting_before(node):
            made[key] = emit(graph, node, aten._to_copy.default, source, dtype=dtype, device=value.device)
    return made[key]


def _remembered(
    graph: fx.Graph,
    node: fx.Node,
    parts: fx.Graph,
    state: Autocast,
    made: dict[Hashable, fx.Node],
    parameters: Mapping[str, str],
) -> dict[fx.Node, fx.Node]:
    """The casts of parameters among an operator's parts, each with that of all operators."""
    given = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]
    sources = dict(zip(parts.find_nodes(op="placeholder"), given, strict=True))
    return {
        part: _cast(graph, node, source, part.kwargs["dtype"], state, made, parameters)
        for part in parts.find_nodes(op="call_function", target=aten._to_copy.default)
        if state.remembers and (source := sources.get(part.args[0])) is not None and source.name in parameters
    }
