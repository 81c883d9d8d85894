"""Partition of a captured graph into stages: the operators of each stage, and the values that cross boundaries.

A node is *pinned* if it reads (through others) a parameter, changes a buffer or draws random numbers; it is computed
once, in its stage. Everything else is *floating* (masks, positions, rotary tables, label shifts): each stage that
needs a floating value computes it from its own rows of the batch. So only hidden states cross a boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from whale.errors import AnnotationError
from whale.graph.captured import Captured
from whale.graph.origins import where
from whale.graph.scoping import NodeScopes, recorded_scopes
from whale.graph.values import Value, is_call, operands, resolve, value_tensor
from whale.ir.strategy import ScopePath, StageCut, cut_at_stage

aten = torch.ops.aten

_UNTAGGED = {
    overload
    for name in (
        "random", "normal_functional", "rrelu", "feature_dropout", "feature_alpha_dropout", "binomial",
        "_sample_dirichlet",
    )
    for overload in (getattr(getattr(aten, name), overload) for overload in getattr(aten, name).overloads())
}  # fmt: skip
"""Operators that draw random numbers, although torch does not say so."""


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags and target not in _UNTAGGED:
        return False
    names = (argument.name for argument in target._schema.arguments)
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if any(given.get(name) is False for name in ("train", "training")):
        return False
    drops = [a.name for a in target._schema.arguments if a.name in ("dropout", "dropout_p")]
    return not drops or any(given.get(name) for name in drops)


@dataclass(frozen=True, kw_only=True)
class TaskGraph:
    """The pinned operators of one stage, in order, and the values that cross its boundaries.

    ``scopes`` holds the annotation path of every node below its stage. ``received`` come from earlier stages, ``sent``
    go to later ones.
    """

    index: int
    name: str
    cut: StageCut
    nodes: tuple[fx.Node, ...]
    scopes: dict[fx.Node, ScopePath]
    received: tuple[Value, ...]
    sent: tuple[Value, ...]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The stages of a graph, its floating nodes, and the annotations that made the stages."""

    stages: tuple[TaskGraph, ...]
    floating: frozenset[fx.Node]
    stage_of: dict[fx.Node, int]
    scopes: NodeScopes


@dataclass(frozen=True, kw_only=True)
class Dataflow:
    """Dataflow of a graph, independent of annotations: its calls, the pinned ones, what these read, by which calls they
    are read, and on which the loss depends; the rest is floating."""

    calls: tuple[fx.Node, ...]
    pinned: tuple[fx.Node, ...]
    floating: frozenset[fx.Node]
    reads: dict[fx.Node, list[Value]]
    users: dict[fx.Node, list[fx.Node]]
    needed: frozenset[fx.Node]


def dataflow(captured: Captured) -> Dataflow:
    """The calls of a graph, and what they read."""
    calls = tuple(n for n in captured.graph.nodes if is_call(n))
    floating = floating_nodes(captured)
    pinned = tuple(n for n in calls if n not in floating)
    reads = {node: operands(node) for node in pinned}
    return Dataflow(
        calls=calls,
        pinned=pinned,
        floating=floating,
        reads=reads,
        users={node: _users(node) for node in pinned},
        needed=_read_by_first(pinned, reads),
    )


def partition(captured: Captured, scopes: NodeScopes | None = None, flow: Dataflow | None = None) -> Partition:
    """Cut a graph at its ``stage`` annotations; a model without any is one stage.

    Args:
        captured: the graph.
        scopes: the annotations of its operators; by default those with which it was captured.
        flow: of the graph, where it is known already.

    Raises:
        AnnotationError: the annotated stages are not in the order of the data's flow.
    """
    scopes = scopes if scopes is not None else recorded_scopes(captured)
    flow = flow if flow is not None else dataflow(captured)
    known = {path: cut_at_stage(path) for path in dict.fromkeys((*scopes.of.values(), ()))}
    cuts = {node: known[scopes.of.get(node, ())] for node in flow.calls}
    order = _in_order(flow, cuts)
    _check_not_empty(scopes.stage_regions, cuts, order)
    number = {region: i for i, region in enumerate(order)}
    stage_of = _assign(flow, cuts, number)
    return Partition(
        stages=_task_graphs(order, flow.pinned, cuts, stage_of, flow.reads),
        floating=flow.floating,
        stage_of=stage_of,
        scopes=scopes,
    )


def _in_order(flow: Dataflow, cuts: dict[fx.Node, StageCut]) -> dict[str, StageCut]:
    """The stages that have work, each after those that it reads; where this leaves a choice, and where stages read each
    other, in the order in which the forward enters them."""
    entered: dict[str, StageCut] = {}
    read: dict[str, set[str]] = {}
    behind: dict[fx.Node, set[str]] = {}
    for node in flow.pinned:
        sources = set[str]().union(*(behind.get(source, ()) for source, _ in flow.reads[node]))
        scope = cuts[node].stage
        if scope is not None:
            entered.setdefault(scope.region, cuts[node])
            read.setdefault(scope.region, set()).update(sources - {scope.region})
            sources = {scope.region}
        behind[node] = sources
    order: dict[str, StageCut] = {}
    while len(order) < len(entered):
        left = [region for region in entered if region not in order]
        following = next((region for region in left if read[region] <= order.keys()), left[0])
        order[following] = entered[following]
    return order


_NOTHING = (
    "its forward computes nothing, or is not called, as that of a list whose modules are called one by one (annotate "
    "these)"
)


def _check_not_empty(regions: Sequence[str], cuts: dict[fx.Node, StageCut], order: dict[str, StageCut]) -> None:
    """Refuse a stage without work: it would have devices, and leave them idle."""
    seen: dict[str, fx.Node | None] = dict.fromkeys(regions)
    for node, cut in cuts.items():
        scope = cut.stage
        if scope is not None and seen.get(scope.region) is None:
            seen[scope.region] = node
    for region, first in seen.items():
        if region not in order:
            why = f"none of its operators{where(first)} reads a parameter" if first else _NOTHING
            raise AnnotationError(
                f"stage {region!r} is empty: {why}, so its devices would be idle; leave it out, or annotate modules "
                f"that compute. The model's stages with work: {', '.join(map(repr, order)) or 'none'}"
            )


def floating_nodes(captured: Captured) -> frozenset[fx.Node]:
    """The calls that read no parameter and no changing statistic, and draw no random numbers."""
    calls = [n for n in captured.graph.nodes if is_call(n)]
    mutated = set(captured.mutated)
    pinned = {n for n in captured.graph.nodes if n.op == "placeholder" and n.name in captured.parameters}
    pinned |= {n for n in captured.graph.nodes if captured.buffers.get(n.name) in mutated and _is_statistic(n)}
    for node in calls:
        sources = {source[0] for source in operands(node)}
        if is_random(node) or sources & pinned or pinned.intersection(node.all_input_nodes):
            pinned.add(node)
    return frozenset(n for n in calls if n not in pinned)


def _is_statistic(node: fx.Node) -> bool:
    """Buffers that training changes are pinned; counters (integers) are not: they do not depend on the batch."""
    return bool(value_tensor((node, 0)).is_floating_point())


def _assign(flow: Dataflow, cuts: dict[fx.Node, StageCut], number: dict[str, int]) -> dict[fx.Node, int]:
    """Stage of every pinned node: annotated; else, if the loss depends on it, the last stage that the model's code has
    entered before, but none after that of a user; else that of its inputs, as new values of buffers and metrics; else
    the first of its users."""
    pinned, reads, needed = flow.pinned, flow.reads, flow.needed
    latest: dict[fx.Node, int] = {}
    for node in reversed(pinned):
        scope = cuts[node].stage
        users = [latest[user] for user in flow.users[node] if user in latest]
        latest[node] = number[scope.region] if scope is not None else min(users, default=len(number) - 1)
    stage_of: dict[fx.Node, int] = {}
    entered: int | None = None
    for node in pinned:
        inputs = [stage_of[source] for source, _ in reads[node] if source in stage_of]
        scope = cuts[node].stage
        if scope is not None:
            index = number[scope.region]
            entered = max(index, entered or 0)
            late = [source for source, _ in reads[node] if stage_of.get(source, -1) > index]
            if late:
                raise AnnotationError(
                    f"stage {scope.region!r} comes before stage {list(number)[stage_of[late[0]]]!r} in the model, but "
                    f"its operator {node.name}{where(node)} reads {late[0].name} from there; annotate stages in the "
                    "order of the data's flow, and a module that is called again in one stage with what lies between"
                )
            stage_of[node] = index
        elif node in needed and (entered is not None or inputs):
            stage_of[node] = max([*inputs, min(entered or 0, latest[node])])
        elif node not in needed and inputs:
            stage_of[node] = max(inputs)
    for node in pinned:
        if node not in stage_of and node not in needed:  # of buffers alone: where these are read
            near = [other for source, _ in reads[node] for other in (source, *source.users) if other in stage_of]
            if near:
                stage_of[node] = max(stage_of[other] for other in near)
    for node in reversed(pinned):
        if node not in stage_of:
            users = [stage_of[u] for u in flow.users[node] if u in stage_of]
            stage_of[node] = min(users, default=0)
    return stage_of


def _read_by_first(pinned: Sequence[fx.Node], reads: dict[fx.Node, list[Value]]) -> frozenset[fx.Node]:
    """The nodes on which the first output of the graph, the loss, depends."""
    if not pinned:
        return frozenset()
    results: Sequence[fx.Node] = pinned[0].graph.output_node().args[0]  # type: ignore[assignment]
    stack, found = [resolve(results[0])[0]], set[fx.Node]()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [source for source, _ in reads.get(node, ())]
    return frozenset(found)


def _users(node: fx.Node) -> list[fx.Node]:
    """Calls that read any output of a node."""
    return [call for user in node.users for call in ([user] if is_call(user) else list(user.users))]


def _task_graphs(
    order: dict[str, StageCut],
    pinned: Sequence[fx.Node],
    cuts: dict[fx.Node, StageCut],
    stage_of: dict[fx.Node, int],
    reads: dict[fx.Node, list[Value]],
) -> tuple[TaskGraph, ...]:
    """The stages, by where each node is computed and what it reads."""
    stages = order or {"": StageCut((), None, ())}
    nodes: list[list[fx.Node]] = [[] for _ in stages]
    received: list[dict[Value, None]] = [{} for _ in stages]
    sent: list[dict[Value, None]] = [{} for _ in stages]
    for node in pinned:
        index = stage_of[node]
        nodes[index].append(node)
        for source in reads[node]:
            made = stage_of.get(source[0], index)
            if made < index:
                received[index][source] = None
                sent[made][source] = None
    return tuple(
        TaskGraph(
            index=index,
            name=region,
            cut=cut,
            nodes=tuple(nodes[index]),
            scopes={node: cuts[node].inner for node in nodes[index]},
            received=tuple(received[index]),
            sent=tuple(sent[index]),
        )
        for index, (region, cut) in enumerate(stages.items())
    )
