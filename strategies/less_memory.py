"""Backwards that compute values again, in less memory: what is computed again is held no longer than it must be.

A value that is element by element a function of others that are there anyway is not held while a product or an
attention runs: a reader after it has the value computed for itself. And an operator that works element by element
writes its result over its first operand if nothing reads that later. Neither changes a bit of any result. Backwards
that compute nothing again remain as autograd's are. It knows graphs and operators; nothing of placements, stages or
ranks.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from itertools import pairwise

import torch
from torch import Tensor, fx

from whale.graph.nodes import node_copy
from whale.runtime.local_program import LocalCode
from whale.strategies.gradients_in_place import out_form
from whale.strategies.recompute import is_pointwise, takes_most_time
from whale.strategies.traced_call import makes_alias

__all__ = ["in_less_memory"]

aten = torch.ops.aten


def in_less_memory(code: LocalCode) -> LocalCode:
    """A backward with the same results; the given one if it computes nothing again."""
    if not any(node.meta.get("again") for node in code.graph.nodes):
        return code
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in code.graph.nodes:
        env[node] = node_copy(graph, node, env.__getitem__)
    made = LocalCode(code.root, graph, boxed=code.boxed)
    _compute_for_each_reader(made)
    _write_over_operands(graph)
    return made


def _compute_for_each_reader(code: LocalCode) -> None:
    """Compute values anew for readers behind a product, where that needs nothing that is not there anyway."""
    nodes = list(code.graph.nodes)
    places: dict[fx.Node, float] = {node: place for place, node in enumerate(nodes)}
    products = [places[node] for node in nodes if takes_most_time(node, code.root)]

    def is_there(value: fx.Node, place: float) -> bool:
        return any(places[user] >= place for user in value.users)

    for node in nodes:
        if not node.meta.get("again") or not is_pointwise(node):
            continue
        readers = sorted(node.users, key=places.__getitem__)
        made = node
        for before, reader in pairwise(readers):
            place = places[reader]
            passes = bisect_left(products, place) > bisect_left(products, places[before])
            if passes and all(is_there(used, place) for used in node.all_input_nodes):
                with code.graph.inserting_before(reader):
                    made = node_copy(code.graph, node)
                places[made] = place - 0.5
            if made is not node:
                reader.replace_input_with(node, made)


def _write_over_operands(graph: fx.Graph) -> None:
    """Have operators write over first operands of which nothing else has the memory, and that nothing reads later."""
    owners: dict[fx.Node, fx.Node] = {}  # of the memory of each value
    ends: dict[fx.Node, fx.Node] = {}  # its last readers
    alone = set[fx.Node]()  # owners that nothing outside of the graph can have hold of
    for node in graph.nodes:
        operands, selects = node.all_input_nodes, node.target is operator.getitem
        is_operator = isinstance(node.target, torch._ops.OpOverload)
        shares = bool(operands) and (selects or makes_alias(node) or node.target is aten._unsafe_view.default)
        owners[node] = owners[node.kwargs.get("out", operands[0])] if shares else node
        if is_operator and not shares:
            alone.add(node)
        for used in operands:
            ends[owners[used]] = node
            if not is_operator and not selects:
                alone.discard(owners[used])
    for node in graph.nodes:
        form = out_form(node.target) if is_pointwise(node) and not makes_alias(node) else None
        if form is None:
            continue
        used, *others = node.all_input_nodes  # the result is laid out as the first operand
        owner = owners[used]
        is_free = owner in alone and ends[owner] is node and _is_all(used, owner) and _are_alike(node, used)
        if is_free and not any(owners[one] is owner for one in others):
            node.target, node.kwargs = form, {**node.kwargs, "out": used}


def _is_all(view: fx.Node, owner: fx.Node) -> bool:
    """Whether a view has all elements of a tensor, as they are."""
    if view is owner:
        return True
    a, b = view.meta.get("val"), owner.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.is_conj() or a.is_neg():
        return False
    return a.dtype == b.dtype and a.numel() == b.numel()


def _are_alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two tensors have as many elements of a dtype in the same places."""
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not a.layout == b.layout == torch.strided:
        return False
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
