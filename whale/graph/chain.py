"""Layer chain: a captured model as a chain of layers, with equal layers recognised.

A layer is a child of a ``ModuleList`` or ``Sequential`` with consecutive children, or an embedding table with sparse
gradients or in a list of tables, each of which may be on devices of its own. Operators between such layers with
their own parameters (embedding, final norm and head) are a layer too; operators without parameters belong to the layer
before them. In a model without any such list or table each of the modules that follow one another is a layer. No layer
reaches over the beginning of an annotated stage, or into another annotated module.

Layers are equal, of one *kind*, if their operators and shapes are, with any values. One layer of every kind remains, so
that the following passes cost as much as the model has kinds. This module knows no devices and no costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from whale.annotations import module_scopes
from whale.graph.canonical import drop_dead
from whale.graph.captured import Captured
from whale.graph.origins import module_of
from whale.graph.partition import Partition, partition
from whale.graph.scoping import NodeScopes, module_paths, recorded_scopes, scopes_by_module
from whale.graph.values import Value, is_call, operands, resolve, value_tensor
from whale.ir.strategy import Scope, ScopePath, Strategy

__all__ = ["LayerChain", "Layer", "chain_of"]

_SUBSTANCE = 0.7
"""Fraction of a layer's parameters above which the children of an inner list are the layers instead."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One link of the chain.

    Attributes:
        path: of its module, or of the first module with parameters if it has several.
        kind: index of its kind.
        parameters: names of its parameters, in order of use.
        crossing: values that are computed before its end and read later, as the first layer of their kind computes
            them.
        read: by which later layers each value that it computes is read, likewise.
        since: position of the first layer that it depends on: its own if it is computed of the batch and its own
            parameters alone, as the embedding of a decoder is.
    """

    path: str
    kind: int
    parameters: tuple[str, ...]
    crossing: tuple[Value, ...]
    read: Mapping[Value, tuple[int, ...]]
    since: int = 0


@dataclass(frozen=True, kw_only=True)
class LayerChain:
    """A model as a chain of layers.

    ``captured`` and ``partition`` hold one layer of each kind: stage *k* of the partition is kind *k*. ``names`` are of
    the kinds.
    """

    layers: tuple[Layer, ...]
    names: tuple[str, ...]
    captured: Captured
    partition: Partition


def chain_of(captured: Captured, model: nn.Module, scopes: Mapping[str, ScopePath] | None = None) -> LayerChain:
    """Cut a captured model into layers. Its graph is consumed and becomes the chain's.

    Args:
        captured: the capture.
        model: of which it is.
        scopes: of annotated modules by path, where their annotations were taken off.
    """
    pinned = partition(captured, NodeScopes()).stages[0].nodes
    scopes = scopes or module_scopes(model)
    recorded = recorded_scopes(captured)
    if not recorded.of and scopes:
        recorded = scopes_by_module(module_paths(captured, model), scopes)
    stage_of = partition(captured, recorded).stage_of if recorded.of else {}
    segments = _segments(captured, pinned, _layer_paths(model, pinned, scopes), stage_of)
    index = {node: i for i, segment in enumerate(segments) for node in segment.nodes}
    kinds: dict[str, int] = {}
    firsts: list[_Segment] = []
    sent: list[Mapping[Value, tuple[int, ...]]] = []
    kind_of = []
    describe = _Describer(captured, index)
    for position, segment in enumerate(segments):
        kind = kinds.setdefault(describe.key(position, segment), len(kinds))
        if kind == len(firsts):
            firsts.append(segment)
            sent.append(_read_later(segment, position, index))
        kind_of.append(kind)
    read = _read(segments, index, [firsts[kind] for kind in kind_of])
    since = _since(captured, segments, index)
    layers = tuple(
        Layer(
            path=segment.path,
            kind=kind_of[position],
            parameters=_parameters(captured, segment),
            crossing=tuple(
                value for own in read[: position + 1] for value, readers in own.items() if readers[-1] > position
            ),
            read=read[position],
            since=since[position],
        )
        for position, segment in enumerate(segments)
    )
    repeats = [(s, firsts[k]) for s, k in zip(segments, kind_of, strict=True) if firsts[k] is not s]
    _contract(captured, repeats, keep={node for values in sent for node, _ in values})
    of_kinds = {
        node: (Scope(strategy=Strategy(kind="stage"), region=f"{kind}: {segment.name}"),)
        for kind, segment in enumerate(firsts)
        for node in segment.nodes
    }
    return LayerChain(
        layers=layers,
        names=tuple(s.name for s in firsts),
        captured=captured,
        partition=_sending(partition(captured, NodeScopes(of=of_kinds)), sent),
    )


def _sending(kinds: Partition, sent: Sequence[Iterable[Value]]) -> Partition:
    """The partition with the values that the first layer of each kind sends, even if no first layer reads them."""
    stages = [replace(s, sent=tuple(dict.fromkeys((*s.sent, *v)))) for s, v in zip(kinds.stages, sent, strict=True)]
    return replace(kinds, stages=tuple(stages))


# --- which modules are layers -----------------------------------------------------------------------------------------


def _layer_paths(model: nn.Module, pinned: Sequence[fx.Node], annotated: Iterable[str]) -> list[str]:
    """The paths of the modules that are layers: of *annotated* ones those that are no part of others and have none."""
    modules = dict(model.named_modules(remove_duplicate=False))
    place = {node: i for i, node in enumerate(pinned)}
    nodes_of: dict[str, list[fx.Node]] = {}
    for node in pinned:
        path = module_of(node)
        while path:
            nodes_of.setdefault(path, []).append(node)
            path = path.rpartition(".")[0]

    def children(path: str) -> list[str]:
        """The modules that compute, in execution order."""
        prefix = f"{path}." if path else ""
        found = [prefix + name for name, _ in modules[path].named_children() if prefix + name in nodes_of]
        return sorted(found, key=lambda child: place[nodes_of[child][0]])

    def is_chain(path: str) -> bool:
        if not isinstance(modules[path], nn.ModuleList | nn.Sequential):
            return False
        return _follow_one_another([nodes_of[child] for child in children(path)])

    def is_table(path: str) -> bool:
        return isinstance(modules[path], nn.Embedding | nn.EmbeddingBag)

    def find(path: str) -> Iterator[str]:
        if is_table(path):
            if modules[path].sparse:
                yield path
        elif isinstance(modules[path], nn.ModuleList) and all(map(is_table, children(path))):
            yield from children(path)
        elif is_chain(path):
            for child in children(path):
                yield from descend(child)
        else:
            for child in children(path):
                yield from find(child)

    def descend(path: str) -> Iterator[str]:
        """The layer itself, unless it is mostly a list of equal modules."""
        inner = _inner_list(modules, path)
        alike = inner is not None and len({type(modules[child]) for child in children(inner)}) == 1
        if inner is not None and alike and is_chain(inner) and not bypassed(path, inner):
            for child in children(inner):
                yield from descend(child)
        else:
            yield path

    def bypassed(path: str, inner: str) -> bool:
        """Whether a module reads inputs of its inner list after the list has begun: a residual connection around it."""
        begin, within = place[nodes_of[inner][0]], set(nodes_of[inner])
        after = [node for node in nodes_of[path] if node not in within and place[node] > begin]
        return any(place.get(source, begin) < begin for node in after for source, _ in operands(node))

    def one_by_one(path: str) -> Iterator[str]:
        """The modules with parameters that follow one another, of a module without lists; in the place of the one that
        has most of them its own."""
        own = [child for child in children(path) if _num_parameters(modules[child])]
        if len(own) > 1 and not _follow_one_another([nodes_of[child] for child in own]):
            return
        for child in own:
            most = _num_parameters(modules[child]) >= _SUBSTANCE * _num_parameters(modules[path])
            inner = list(one_by_one(child)) if most else []
            yield from inner if len(inner) > 1 else [child]

    found = list(find("")) or list(one_by_one(""))
    apart = [path for path in annotated if path in nodes_of and not any(_overlap(path, layer) for layer in found)]
    return [*found, *apart]


def _overlap(path: str, other: str) -> bool:
    """Whether one of two modules is in the other, or is it."""
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _inner_list(modules: Mapping[str, nn.Module], path: str) -> str | None:
    """The list with most of a module's parameters: the module itself, or one inside it."""
    whole = _num_parameters(modules[path])
    for name, module in modules[path].named_modules(prefix=path):
        is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 0
        if is_list and _num_parameters(module) >= _SUBSTANCE * whole > 0:
            return name
    return None


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _follow_one_another(groups: Sequence[Sequence[fx.Node]]) -> bool:
    """Whether each group of nodes reads results of the one before it, directly or through nodes of no group."""
    member = {node: i for i, group in enumerate(groups) for node in group}
    for position, group in enumerate(groups):
        if position == 0:
            continue
        stack, seen = list(group), set(group)
        reached = False
        while stack and not reached:
            for source in stack.pop().all_input_nodes:
                if member.get(source) == position - 1:
                    reached = True
                    break
                if source not in seen and source not in member:
                    seen.add(source)
                    stack.append(source)
        if not reached:
            return False
    return bool(groups)


# --- the operators of each layer --------------------------------------------------------------------------------------


@dataclass
class _Segment:
    path: str
    name: str
    nodes: list[fx.Node]


def _segments(
    captured: Captured, pinned: Sequence[fx.Node], layers: Sequence[str], stage_of: Mapping[fx.Node, int]
) -> list[_Segment]:
    """The pinned nodes in consecutive groups of one layer, and one annotated stage, each, in execution order."""
    known = set(layers)
    runs: list[tuple[tuple[str, int], list[fx.Node]]] = []
    for node in pinned:
        path = next((path for path in _ancestors(module_of(node)) if path in known), "")
        label = path, stage_of.get(node, 0)
        if runs and runs[-1][0] == label:
            runs[-1][1].append(node)
        else:
            runs.append((label, [node]))
    joined: list[tuple[tuple[str, int], list[fx.Node]]] = []
    for label, nodes in runs:
        if joined and (joined[-1][0] == label or not _has_parameters(captured, nodes)):
            joined[-1][1].extend(nodes)
        elif joined and not _has_parameters(captured, joined[-1][1]):
            joined[-1] = (label, joined[-1][1] + nodes)
        else:
            joined.append((label, nodes))
    stages: dict[str, int] = {}
    segments = []
    for (path, stage), nodes in joined:
        is_rest = stages.setdefault(path, stage) != stage  # of a layer that a stage cuts
        segments.append(_named(captured, "" if is_rest else path, nodes))
    return segments


def _named(captured: Captured, label: str, nodes: list[fx.Node]) -> _Segment:
    if label:
        return _Segment(label, label, nodes)
    names = list(dict.fromkeys(filter(None, (module_of(n) for n in nodes if _reads_parameter(captured, n)))))
    name = " + ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]}"
    return _Segment(names[0] if names else "", name or "the model", nodes)


def _ancestors(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def _reads_parameter(captured: Captured, node: fx.Node) -> bool:
    return any(value[0].name in captured.parameters for value in operands(node))


def _has_parameters(captured: Captured, nodes: Sequence[fx.Node]) -> bool:
    return any(_reads_parameter(captured, node) for node in nodes)


def _parameters(captured: Captured, segment: _Segment) -> tuple[str, ...]:
    read = (v[0].name for node in segment.nodes for v in operands(node) if v[0].name in captured.parameters)
    return tuple(dict.fromkeys(captured.parameters[name] for name in read))


def _since(captured: Captured, segments: Sequence[_Segment], index: Mapping[fx.Node, int]) -> list[int]:
    """For each layer the first one that it depends on; layer 0 if it reads no batch."""
    of_batch = {node for node in captured.graph.nodes if node.name in captured.inputs}
    for node in captured.graph.nodes:
        if not of_batch.isdisjoint(node.all_input_nodes):
            of_batch.add(node)
    found: list[int] = []
    for position, segment in enumerate(segments):
        places = {index.get(used, position) for node in segment.nodes for used, _ in operands(node)}
        earlier = [found[place] for place in places if place < position]
        reads_nothing = not earlier and of_batch.isdisjoint(segment.nodes)
        found.append(0 if reads_nothing else min(earlier, default=position))
    return found


# --- equal layers -----------------------------------------------------------------------------------------------------


class _Describer:
    """Descriptions of layers that are equal for equal layers."""

    def __init__(self, captured: Captured, index: Mapping[fx.Node, int]) -> None:
        self.captured, self.index = captured, index
        self.floating: dict[fx.Node, str] = {}
        outputs: tuple[Any, ...] = captured.graph.output_node().args[0]  # type: ignore[assignment]
        self.leaving = [resolve(node) for node in outputs]

    def key(self, position: int, segment: _Segment) -> str:
        """Text of a layer's operators, their inputs and the readers of their results."""
        local = {node: i for i, node in enumerate(segment.nodes)}
        seen: dict[tuple[str, Value], int] = {}

        def token(node: fx.Node) -> Any:
            value = resolve(node)
            source = value[0]
            if source in local:
                return ("here", local[source], value[1])
            if source.name in self.captured.parameters:
                return ("parameter", seen.setdefault(("parameter", value), len(seen)), _type(value))
            if source in self.index:
                return ("received", seen.setdefault(("received", value), len(seen)), _type(value))
            return ("floating", self._floating(node))

        lines = []
        for node in segment.nodes:
            values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
            kinds = [(str(v.dtype), tuple(v.shape)) for v in values]
            lines.append(f"{_target(node)} {_arguments(node, token)} {kinds} {node.meta.get('grad')}")
        sent = [(local[node], i) for node, i in _read_later(segment, position, self.index)]
        roots = [(i > 0, local[v[0]], v[1]) for i, v in enumerate(self.leaving) if v[0] in local]
        return "\n".join([*lines, repr(sent), repr(roots)])

    def _floating(self, node: fx.Node) -> str:
        """Digest of the computation of a floating value."""
        if node not in self.floating:
            if node.op == "placeholder":
                table = "buffer" if node.name in self.captured.buffers else "constant"
                text = self.captured.inputs.get(node.name) or f"{table} {_type((node, 0))}"
            else:
                text = f"{_target(node)} {_arguments(node, self._floating)}"
            self.floating[node] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self.floating[node]


def _target(node: fx.Node) -> str:
    return str(getattr(node.target, "__qualname__", node.target))


def _arguments(node: fx.Node, token: Callable[[fx.Node], Any]) -> str:
    """The arguments of a call as text, with other nodes replaced by *token*."""

    def plain(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return token(x)
        if isinstance(x, tuple | list):
            return [plain(item) for item in x]
        if isinstance(x, Mapping):
            return {k: plain(v) for k, v in x.items()}
        return getattr(x, "__qualname__", x) if callable(x) else x

    return repr((plain(node.args), plain(node.kwargs)))


def _type(value: Value) -> tuple[Any, ...]:
    tensor = value_tensor(value)
    return str(tensor.dtype), tuple(tensor.shape), bool(value[0].meta.get("grad"))


def _read_later(segment: _Segment, position: int, index: Mapping[fx.Node, int]) -> dict[Value, tuple[int, ...]]:
    """The values of a segment that later ones read, in the order of their nodes, with these segments."""
    found: dict[Value, set[int]] = {}
    for node in segment.nodes:
        for user in node.users:
            value, readers = ((node, 0), [user]) if user in index else (resolve(user), list(user.users))
            later = {index.get(reader, position) for reader in readers} - set(range(position + 1))
            if user.op != "output" and later:
                found.setdefault(value, set()).update(later)
    return {value: tuple(sorted(later)) for value, later in found.items()}


def _read(
    segments: Sequence[_Segment], index: Mapping[fx.Node, int], firsts: Sequence[_Segment]
) -> list[dict[Value, tuple[int, ...]]]:
    """The values of each segment that later segments read, as the first of their kind computes them, with these."""
    found = []
    for position, (segment, first) in enumerate(zip(segments, firsts, strict=True)):
        place = {node: i for i, node in enumerate(segment.nodes)}
        later = _read_later(segment, position, index)
        found.append({(first.nodes[place[node]], output): readers for (node, output), readers in later.items()})
    return found


def _contract(captured: Captured, repeats: Sequence[tuple[_Segment, _Segment]], *, keep: Collection[fx.Node]) -> None:
    """Replace layers by the first of their kind, and remove unused nodes.

    A first layer read only by removed layers stays, with the values that it sends (*keep*). In A B A C the layer C then
    reads the first A, and nothing reads B.
    """
    graph = captured.graph
    output = graph.output_node()
    results: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    dropped = {node for repeat, _ in repeats for node in repeat.nodes}
    kept = [i for i, node in enumerate(results) if i == 0 or resolve(node)[0] not in dropped]
    captured.mutated = tuple(captured.mutated[i - 1] for i in kept[1:])
    output.args = (tuple(results[i] for i in kept),)
    for repeat, first in repeats:
        for node, other in zip(repeat.nodes, first.nodes, strict=True):
            node.replace_all_uses_with(other)
    drop_dead(graph, keep={*keep, *(user for node in keep for user in node.users if not is_call(user))})
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users and node.name not in captured.inputs:
            for table in (captured.parameters, captured.buffers, captured.constants):
                table.pop(node.name, None)
            graph.erase_node(node)
    graph.lint()
