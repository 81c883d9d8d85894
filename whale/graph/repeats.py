"""Traces of repeated layers: a layer is traced twice, and equal siblings in a list are copied with other parameters.

Tracing an operator takes torch milliseconds, copying a node takes microseconds, so the cost of a capture grows with the
kinds of layers, hardly with their number. torch's passes over a traced graph cost more than copies of its nodes, so
they see one node for each result of a copied layer, whose operators are copied after them.

Two modules are equal if they cannot be distinguished when they are called: by class and attributes, inner modules,
shapes of parameters and inputs, other arguments, torch's modes, and everything that their code reaches through objects,
closures and globals. The first and the second module are traced; only if their operators are equal is the third a copy.

A layer with side effects is traced every time: one that changes any of these, its arguments or its buffers, or that
enters annotations. Values inside a layer that are read elsewhere are detected at the end (`Escaped`); the model is then
captured without copies. Hidden state, as in C objects, may still be missed, so a model that will run is traced
completely, and only plans are made of copies: a plan for another graph than the run's is refused by its hash. This
module knows torch's tracer, and nothing of devices and plans.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from whale.graph.nodes import create_node
from whale.graph.reach import PLAIN, WATCHES, Reach, Same, Unknown, untraced
from whale.graph.tracer import (
    current_tracer,
    disable_proxy_modes_tracing,
    get_current_meta,
    node_in,
    track_tensor_tree,
)

__all__ = ["Escaped", "Repeats"]

TRACED = 2
"""Layers of each kind that are traced before any is copied."""

Token = tuple[Any, ...]
"""Token of a node in a description: a number among the layer's own nodes, inputs or parameters."""

_PLACES = "whale_places"
"""Key of a traced node's metadata: by the number of a copied trace the node's number there."""

_STAND_IN = operator.and_
"""Operator of a node that stands for a result of a copy, of what it reads and its place: torch allows it in a graph,
and no pass looks at it."""

_SOURCE = -1
"""Number of the traced layer among its copies."""

Name = tuple[str, str]
"""An attribute of a module inside of a layer: the module's path in it, and the attribute's name."""


class Escaped(Exception):
    """Raised if a value inside a copied layer is read outside of it: the copies lack it."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of a layer: its path, its inputs and its parameters and buffers as nodes of the tracer's graph."""

    path: str
    inputs: tuple[fx.Node, ...]
    own: tuple[fx.Node, ...]
    given: Hashable


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """A call that was traced: its nodes, and its result as tokens of nodes and inputs, or plain values.

    ``inputs`` are the tokens by which the inputs are known after the call: an operator that returns its argument, as a
    cast to the type that it has does, takes that argument's place in the tracer.
    """

    call: _Call
    nodes: tuple[fx.Node, ...]
    text: tuple[Any, ...]
    inputs: tuple[Token, ...]
    results: tuple[Token, ...]
    shapes: tuple[Any, ...]
    structure: pytree.TreeSpec

    @property
    def values(self) -> list[Token]:
        """Its own nodes that are known outside of it."""
        return [token for token in dict.fromkeys((*self.results, *self.inputs)) if token[0] == "here"]

    @property
    def common(self) -> tuple[fx.Node, ...]:
        """The other nodes that its own read: what is neither an input nor a parameter is the same for all copies."""
        known = {*self.nodes, *self.call.inputs, *self.call.own}
        return tuple(dict.fromkeys(n for node in self.nodes for n in node.all_input_nodes if n not in known))


@dataclass
class _Kind:
    """Equal layers: the traced ones, the number of copies, and a reason against copying, if any.

    ``numbers`` are those that differ among a list's layers and that these read; ``number`` is that of the copied trace
    whose copies are made later.
    """

    numbers: dict[Name, int]
    traces: list[_Trace] = field(default_factory=list)
    copies: int = 0
    refused: bool = False
    number: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Later:
    """A trace whose copies are made after torch's passes, with the names of the nodes of each."""

    trace: _Trace
    names: list[list[str]] = field(default_factory=list)


class Repeats:
    """The layers of one capture; *entered* counts the annotations that the model's code enters."""

    def __init__(self, model: nn.Module, entered: Mapping[str, int]) -> None:
        self._entered = entered
        self._inside = 0  # of layers that are being traced
        self._later: list[_Later] = []
        self._kinds: dict[Hashable, list[_Kind]] = {}
        self._unknown: set[type] = set()
        for parent in list(model.modules()):
            if isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(parent) > TRACED:
                names = _numbered(list(parent.children()))
                for child in parent.children():
                    if "forward" not in child.__dict__:
                        child.forward = self._watched(child, names)

    def check(self) -> None:
        """Check that no value inside a copied layer is read outside of it.

        Raises:
            Escaped: such a value is read.
        """
        for kind in (kind for kinds in self._kinds.values() for kind in kinds):
            for trace in kind.traces if kind.copies else ():
                inside = set(trace.nodes)
                leaving = {trace.nodes[token[1]] for token in (*trace.results, *trace.inputs) if token[0] == "here"}
                if any(user not in inside for node in inside - leaving for user in node.users):
                    raise Escaped

    def _watched(self, module: nn.Module, names: Collection[Name]) -> Callable[..., Any]:
        forward = module.forward

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            tracer = current_tracer()
            found = None if tracer is None else self._found(tracer, module, names, args, kwargs)
            if tracer is None or found is None:
                return forward(*args, **kwargs)
            call, numbers, kinds, kind = found
            if kind is not None and len(kind.traces) == TRACED:
                kind.copies += 1
                make = self._makes_later(kind) if self._can_wait(kind.traces[-1]) else _copies
                return _copied(tracer, kind.traces[-1], call, (args, kwargs), make)
            before, last = self._state(module), _last(tracer.graph)
            self._inside += 1
            try:
                with _noting_reads(module, names) as read:
                    result = forward(*args, **kwargs)
            finally:
                self._inside -= 1
            if kind is None:
                kind = _Kind({name: value for name, value in numbers.items() if name in read})
                kinds.append(kind)
            trace = _traced(tracer, call, last, (args, kwargs), result)
            changed = before is None or before != self._state(module) or read != kind.numbers.keys()
            if trace is None or changed or any(trace.text != one.text for one in kind.traces):
                kind.refused = True
            else:
                kind.traces.append(trace)
            return result

        watched.__dict__[WATCHES] = True
        return watched

    def _can_wait(self, trace: _Trace) -> bool:
        """Whether torch's passes leave a layer as it is: nothing in it, or around it, becomes a graph of its own. A
        layer inside of one that is traced is copied with that."""
        autocast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
        plain = all(getattr(node.target, "namespace", "") == "aten" for node in trace.nodes)
        return torch.is_grad_enabled() and not autocast and not self._inside and plain and bool(trace.values)

    def _makes_later(self, kind: _Kind) -> _Make:
        """Maker of nodes that stand for the results of a copy until `finish`."""

        def make(tracer: Any, trace: _Trace, call: _Call) -> dict[Token, fx.Node]:
            if kind.number is None:
                kind.number = len(self._later)
                self._later.append(_Later(trace=trace))
                for i, node in enumerate(trace.nodes):
                    node.meta[_PLACES] = {**node.meta.get(_PLACES, {}), kind.number: i}
                _stand_in(tracer, trace, trace.call, (kind.number, _SOURCE, 0), trace.nodes[-1])
            names = self._later[kind.number].names
            names.append([tracer.graph._graph_namespace.create_name(_base(node), None) for node in trace.nodes])
            place = kind.number, len(names) - 1
            return {
                token: _stand_in(tracer, trace, call, (*place, token[1]), trace.nodes[token[1]])
                for token in trace.values
            }

        return make

    def finish(self, graph: fx.Graph) -> None:
        """Make the copies in the graph that torch's passes have returned.

        Raises:
            Escaped: a pass has changed a traced layer, or what stands for a copy.
        """
        stands: dict[tuple[int, int], list[fx.Node]] = {}
        traced: dict[tuple[int, int], fx.Node] = {}
        for node in graph.nodes if self._later else ():
            if node.target is _STAND_IN and isinstance(node.args[0], tuple):
                stands.setdefault(_place(node)[:2], []).append(node)
            for number, i in node.meta.pop(_PLACES, {}).items():
                if traced.setdefault((number, i), node) is not node:
                    raise Escaped
        for number, later in enumerate(self._later):
            (source,) = stands.get((number, _SOURCE), [None])
            nodes = {i: traced[number, i] for i in range(len(later.trace.nodes)) if (number, i) in traced}
            for copy, names in enumerate(later.names):
                own = stands.get((number, copy), [])
                if source is None or len(own) != len(later.trace.values):
                    raise Escaped
                _replaced(graph, own, source, nodes, names)
            if source is not None:
                graph.erase_node(source)

    @untraced
    def _found(
        self, tracer: Any, module: nn.Module, names: Collection[Name], args: Any, kwargs: Any
    ) -> tuple[_Call, dict[Name, int], list[_Kind], _Kind | None] | None:
        """A call, the numbers of its layer, the kinds that differ in such numbers alone, and the one that it is of;
        None where the call is to be traced, whatever came before."""
        try:
            described = None if type(module) in self._unknown else _described(tracer, module, names, args, kwargs)
        except Unknown:
            self._unknown.add(type(module))
            return None
        if described is None:
            return None
        key, call = described
        numbers = _numbers(module, names)
        kinds = self._kinds.setdefault(key, [])
        kind = next((one for one in kinds if one.numbers.items() <= numbers.items()), None)
        return None if kind is not None and kind.refused else (call, numbers, kinds, kind)

    @untraced
    def _state(self, module: nn.Module) -> Hashable:
        """State that a call must not change; None if it cannot be determined."""
        own = tuple((name, Same(x)) for name, x in _tensors(module))
        try:
            return sum(self._entered.values()), _modes(), own, _attributes(module)
        except Unknown:
            return None


# --- what tells modules and calls apart -------------------------------------------------------------------------------


def _described(
    tracer: Any, module: nn.Module, names: Collection[Name], args: Any, kwargs: Any
) -> tuple[Hashable, _Call] | None:
    """A description equal for equal calls, and the call; None if the tracer does not know all of it."""
    *around, (path, (name, _)) = tracer.module_stack.items()
    tensors = list(_tensors(module))
    own = [node_in(tracer, x) for _, x in tensors]
    leaves = pytree.tree_leaves((args, kwargs))
    inputs = [node_in(tracer, x) for x in leaves if isinstance(x, Tensor)]
    if path != name or None in inputs or None in own or set(inputs) & set(own):
        return None
    if not all(isinstance(x, (Tensor, *PLAIN)) for x in leaves):
        return None
    key = (
        _attributes(module, names),
        tuple((name, _shape(x)) for name, x in tensors),
        tuple(own.index(node) for node in own),
        (given := _given(args, kwargs)),
        tuple(inputs.index(node) for node in inputs),
        tuple(outer for outer, _ in around),
        _modes(),
    )
    return key, _Call(path=path, inputs=tuple(inputs), own=tuple(own), given=given)  # type: ignore[arg-type]


def _given(args: Any, kwargs: Any) -> Hashable:
    """Arguments, with tensors replaced by their shapes."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    return tuple(_shape(x) if isinstance(x, Tensor) else (type(x), x) for x in leaves), repr(structure)


def _shape(x: Tensor) -> Hashable:
    return type(x), x.dtype, x.device, tuple(x.shape), x.stride(), x.requires_grad


def _modes() -> Hashable:
    """Global modes that affect how an operator is traced."""
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return torch.is_grad_enabled(), autocast, torch.get_default_dtype(), repr(get_current_meta().get("custom"))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, all the names of each."""
    for path, inner in module.named_modules(remove_duplicate=False):
        for table in ("_parameters", "_buffers"):
            for name, x in inner.__dict__[table].items():
                if x is not None:
                    yield f"{path}.{name}", x


def _numbered(layers: Sequence[nn.Module]) -> frozenset[Name]:
    """The whole numbers that the layers of a list hold as attributes and that are not the same in all of them."""
    values: dict[Name, set[int]] = {}
    for layer in layers:
        for path, inner in layer.named_modules():
            for name, x in inner.__dict__.items():
                if type(x) is int and not hasattr(type(inner), name):
                    values.setdefault((path, name), set()).add(x)
    return frozenset(name for name, found in values.items() if len(found) > 1)


def _numbers(module: nn.Module, names: Collection[Name]) -> dict[Name, int]:
    """The values of the attributes in *names*, as far as they are whole numbers."""
    inside = dict(module.named_modules()) if names else {}
    found = {(path, name): inside[path].__dict__.get(name) for path, name in names if path in inside}
    return {name: x for name, x in found.items() if type(x) is int}


class _Noted(property):
    """An attribute of modules of which reads are noted."""


@contextmanager
def _noting_reads(module: nn.Module, names: Collection[Name]) -> Iterator[set[Name]]:
    """Note which of the attributes in *names* are read meanwhile, of the module or of others of their classes.

    Other layers of the list may have a number where this one's class defines something by the same name: that stays.
    """
    read: set[Name] = set()
    paths = {id(inner): path for path, inner in module.named_modules()}
    inside = dict(module.named_modules())

    def noted(name: str, around: _Noted | None) -> _Noted:
        def get(self: nn.Module) -> Any:
            read.add((paths.get(id(self), "outside"), name))
            if around is not None and around.fget is not None:  # the layer is in another one, which reads it too
                return around.fget(self)
            if name not in self.__dict__:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            return self.__dict__[name]

        def put(self: nn.Module, value: Any) -> None:
            self.__dict__[name] = value

        return _Noted(get, put)

    found = {
        (kind, name): inspect.getattr_static(kind, name, None)
        for kind, name in {(type(inside[path]), name) for path, name in names if path in inside}
    }
    classes = {key: x for key, x in found.items() if x is None or isinstance(x, _Noted)}
    before = {(kind, name): vars(kind).get(name) for kind, name in classes}
    for (kind, name), around in classes.items():
        setattr(kind, name, noted(name, around))
    try:
        yield read
    finally:
        for (kind, name), own in before.items():
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)


def _attributes(module: nn.Module, leave_out: Collection[Name] = ()) -> Hashable:
    """Everything that a module and its inner modules own and reach, except parameters and buffers.

    Raises:
        Unknown: it reaches an object whose changes cannot be detected.
    """
    reach = Reach(module)
    found = []
    for path, inner in module.named_modules(remove_duplicate=False):
        held = [
            (name, reach.token(x))
            for name, x in inner.__dict__.items()
            if name not in ("_parameters", "_buffers", "_modules")
            and WATCHES not in getattr(x, "__dict__", ())
            and not ((path, name) in leave_out and type(x) is int)
        ]
        found.append((path, reach.token(type(inner)), tuple(held)))
    return tuple(found)


# --- what a call computed ---------------------------------------------------------------------------------------------


def _last(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


@untraced
def _traced(tracer: Any, call: _Call, known: fx.Node, given: Any, result: Any) -> _Trace | None:
    """The nodes after *known* as a trace; None where they cannot be copied."""
    nodes, node = [], known.next
    while node.op != "root":
        nodes.append(node)
        node = node.next
    place: dict[fx.Node, Token] = {node: ("input", i) for i, node in reversed(list(enumerate(call.inputs)))}
    place |= {node: ("own", i) for i, node in reversed(list(enumerate(call.own)))}
    after = [node_in(tracer, x) for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    same = all(_returned(node, was) for node, was in zip(after, call.inputs, strict=True))
    if not same or _given(*given) != call.given or any(node.op != "call_function" for node in nodes):
        return None  # an input was changed, or something was made that is no operator
    text = []
    for i, node in enumerate(nodes):
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: place.get(n, ("fixed", n)))
        values = [(_shape(x) if isinstance(x, Tensor) else x) for x in pytree.tree_leaves(node.meta.get("val"))]
        text.append((node.target, arguments, values, node.meta.get("custom"), _moved(node, call.path, "")))
        place[node] = ("here", i)
    inputs = tuple(place[node] for node in after if node is not None)
    results, shapes = [], []
    leaves, structure = pytree.tree_flatten(result)
    for x in leaves:
        maker = node_in(tracer, x) if isinstance(x, Tensor) else None
        token = ("plain", x) if maker is None else place.get(maker, ("fixed",))
        if token[0] not in ("here", "input") and not isinstance(x, PLAIN):
            return None
        if isinstance(x, Tensor) and _overlaps(x):
            return None  # no blank could be made like it
        results.append(token)
        shapes.append(_shape(x) if isinstance(x, Tensor) else None)
    return _Trace(
        call=call,
        nodes=tuple(nodes),
        text=(text, inputs, results, shapes, repr(structure)),
        inputs=inputs,
        results=tuple(results),
        shapes=tuple(shapes),
        structure=structure,
    )


def _returned(node: fx.Node | None, argument: fx.Node) -> bool:
    """Whether a node is *argument*, or the result of operators that returned it as it was."""
    while node is not None and node is not argument:
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.is_mutable or not node.args or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return node is argument


def _overlaps(x: Tensor) -> bool:
    """Whether elements may share memory, as those of an expanded tensor do."""
    extent = 0
    for step, count in sorted(zip(x.stride(), x.shape, strict=True)):
        if count > 1 and step <= extent:
            return True
        extent += step * (count - 1)
    return False


def _moved(node: fx.Node, source: str, target: str) -> dict[str, tuple[str, Any]]:
    """The modules around a node, if the module at one path were at another."""
    return _stack(node, (source, source), (target, target))


def _stack(node: fx.Node, source: tuple[str, str], target: tuple[str, str]) -> dict[str, tuple[str, Any]]:
    """The same where the keys of modules are not their paths."""

    def moved(path: str, source: str, target: str) -> str:
        return target + path[len(source) :] if path == source or path.startswith(f"{source}.") else path

    stack = node.meta.get("nn_module_stack") or {}
    return {
        moved(key, source[0], target[0]): (moved(path, source[1], target[1]), kind)
        for key, (path, kind) in stack.items()
    }


# --- the same once more -----------------------------------------------------------------------------------------------


_Make = Callable[[Any, _Trace, _Call], Mapping[Token, fx.Node]]
"""Makes the nodes that a copied call is known by, by their tokens in the trace, with a tracer."""


@untraced
def _copied(tracer: Any, trace: _Trace, call: _Call, given: Any, make: _Make) -> Any:
    """Result of a call that is the same as a trace, from nodes that *make* makes."""
    nodes = make(tracer, trace, call)
    inputs = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    for x, token in zip(inputs, trace.inputs, strict=True):
        if token[0] == "here":
            track_tensor_tree(x, fx.Proxy(nodes[token], tracer), constant=None, tracer=tracer)
    made: dict[Token, Any] = {}
    for token, shape in zip(trace.results, trace.shapes, strict=True):
        if token[0] == "here" and token not in made:
            made[token] = track_tensor_tree(_blank(shape), fx.Proxy(nodes[token], tracer), constant=None, tracer=tracer)
    leaves = [
        token[1] if token[0] == "plain" else inputs[token[1]] if token[0] == "input" else made[token]
        for token in trace.results
    ]
    return pytree.tree_unflatten(leaves, trace.structure)


def _copies(tracer: Any, trace: _Trace, call: _Call) -> dict[Token, fx.Node]:
    """Copies of a trace's nodes."""
    nodes: dict[fx.Node, fx.Node] = dict(zip(trace.call.own, call.own, strict=True))
    nodes |= dict(zip(trace.call.inputs, call.inputs, strict=True))
    for node in trace.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: nodes.get(n, n))
        copy = create_node(tracer.graph, node.op, node.target, args, kwargs, _base(node), node.type)
        copy.meta = {**node.meta, "nn_module_stack": _moved(node, trace.call.path, call.path)}
        copy.meta.pop(_PLACES, None)
        nodes[node] = copy
    return {token: nodes[trace.nodes[token[1]]] for token in trace.values}


def _base(node: fx.Node) -> str:
    """The name of a node without its number."""
    return re.sub(r"_\d+$", "", node.name)


def _stand_in(tracer: Any, trace: _Trace, call: _Call, place: tuple[int, int, int], like: fx.Node) -> fx.Node:
    """A node for the result of a call at a *place*: a copied trace, a copy, a node. It reads what the call may read."""
    read = (*call.inputs, *call.own, *trace.common)
    node = create_node(tracer.graph, "call_function", _STAND_IN, (read, place), {}, "layer")
    modules = list(_moved(like, trace.call.path, call.path).items())
    depth = next(i for i, (key, _) in enumerate(modules) if key == call.path)
    node.meta = {**like.meta, "nn_module_stack": dict(modules[: depth + 1])}
    node.meta.pop(_PLACES, None)
    return node


def _place(stand_in: fx.Node) -> tuple[int, int, int]:
    found: Any = stand_in.args[1]
    return found


def _replaced(
    graph: fx.Graph, stands: Sequence[fx.Node], source: fx.Node, traced: Mapping[int, fx.Node], names: Sequence[str]
) -> None:
    """Put copies of the *traced* nodes, by number, in the place of those that stand for their results. *source* reads
    what the traced nodes may read."""
    reads: list[Any] = [source.args[0], stands[0].args[0]]
    nodes = dict(zip(*reads, strict=True))
    modules = _last_module(source), _last_module(stands[0])
    made: dict[int, fx.Node] = {}
    for i, node in traced.items():
        if not nodes.keys() >= set(node.all_input_nodes):
            raise Escaped
        args, kwargs = fx.map_arg((node.args, node.kwargs), nodes.__getitem__)
        with graph.inserting_before(stands[0]):
            copy = create_node(graph, node.op, node.target, args, kwargs, names[i], node.type)
        copy.meta = {**node.meta, "nn_module_stack": _stack(node, *modules)}
        nodes[node] = made[i] = copy
    for stand_in in stands:
        *_, i = _place(stand_in)
        if i not in made:
            raise Escaped
        stand_in.replace_all_uses_with(made[i])
        graph.erase_node(stand_in)
    for copy in reversed(made.values()):
        if copy.target is torch.ops.aten.detach.default and not copy.users:  # as in torch's passes
            graph.erase_node(copy)


def _last_module(node: fx.Node) -> tuple[str, str]:
    """Key and path of the innermost module around a node."""
    key, (path, _) = list(node.meta["nn_module_stack"].items())[-1]
    return key, path


def _blank(shape: Sequence[Any]) -> Tensor:
    """A tensor like one that an operator returned, without data."""
    _, dtype, device, sizes, strides, requires_grad = shape
    with disable_proxy_modes_tracing():
        x = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
        if not requires_grad:
            return x
        source = torch.empty((), dtype=dtype, device=device, requires_grad=True)
        return x.copy_(source.expand(sizes))  # the result of an operator: a leaf could not be changed in place
