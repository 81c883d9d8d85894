"""Captured models: the graph of a training computation, and what its placeholders are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from whale.graph.canonical import DRAWS
from whale.graph.forward_state import Listing, graph_listing
from whale.graph.made_once import Attribute, Carried
from whale.graph.nodes import node_copy
from whale.graph.origins import SourceLine, place_of_node
from whale.graph.structure import Structure
from whale.graph.values import Value, resolve

__all__ = ["Captured", "KnownMask", "Listed", "copy_of", "listed", "mark_gradients"]


class Listed(NamedTuple):
    """A captured graph, to be compared with others: its nodes, and its constants, each with the line that reads it."""

    nodes: Listing
    constants: tuple[tuple[Any, SourceLine | None], ...]


def listed(captured: Captured) -> Listed:
    """A captured graph as it is now."""
    holes = {node.name: node for node in captured.graph.find_nodes(op="placeholder")}
    places = {name: next(map(place_of_node, holes[name].users), None) for name in captured.constants if name in holes}
    constants = tuple((x, places.get(name)) for name, x in captured.constants.items())
    return Listed(graph_listing(captured.graph), constants)


class KnownMask(NamedTuple):
    """A mask of attentions that is the same in every step.

    Attributes:
        words: ``causal`` or ``none``, to which it is equivalent.
        graph: computes it, on a processor.
        constants: of its placeholders.
    """

    words: str
    graph: fx.Graph
    constants: tuple[torch.Tensor, ...]


@dataclass(kw_only=True)
class Captured:
    """A captured model: its graph and what its placeholders are.

    ``parameters`` and ``buffers`` map a placeholder's name to the tensor's name in the model (the first of its names
    if it is tied), ``constants`` to a tensor, ``inputs`` to the batch leaf that it reads. The graph's output is the
    loss (any number, if the model returned none: not ``has_loss``) followed by the new values of the buffers in
    ``mutated``, and the tensors of ``structure``, that of the model's output, where it is wanted. ``stage_regions`` are
    those of annotated modules, whether they run or not, and of ``with`` statements, whether they compute or not.
    ``made`` are attributes as the first forward leaves them, with which it was captured; ``left`` are others that it
    changes, if there are some, ``left_outside`` says whether it changes what modules do not have, and ``listing`` is
    its graph as it was captured, with the constants. ``masks`` are those of attentions that run without them.
    """

    graph: fx.Graph
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: dict[str, str]
    mutated: tuple[str, ...] = ()
    structure: Structure | None = None
    has_loss: bool = True
    aliases: dict[str, str] = field(default_factory=dict)
    stage_regions: tuple[str, ...] = ()
    written: tuple[tuple[str, SourceLine | None], ...] = ()
    made: Mapping[Attribute, Any] = field(default_factory=dict)
    left: Carried | None = None
    left_outside: bool = False
    masks: tuple[KnownMask, ...] = ()
    listing: Listed = field(default_factory=lambda: Listed((), ()))

    @property
    def new_values(self) -> dict[str, Value]:
        """The values that the forward writes into buffers, by their names."""
        outputs: tuple[Any, ...] = self.graph.output_node().args[0]  # type: ignore[assignment]
        return {name: resolve(node) for name, node in zip(self.mutated, outputs[1:], strict=False)}

    @property
    def device(self) -> torch.device:
        """The device that its operators name."""
        values = (node.meta.get("val") for node in self.graph.nodes)
        return next((x.device for x in values if isinstance(x, torch.Tensor)), torch.device("cpu"))

    @property
    def module(self) -> fx.GraphModule:
        """The graph as a callable of its placeholders, in order."""
        return fx.GraphModule(nn.Module(), self.graph)


def copy_of(captured: Captured) -> Captured:
    """A copy with its own graph and names, which may be changed independently."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in captured.graph.nodes:
        copies[node] = node_copy(graph, node, copies.__getitem__)
    return replace(
        captured,
        graph=graph,
        parameters=dict(captured.parameters),
        buffers=dict(captured.buffers),
        constants=dict(captured.constants),
        inputs=dict(captured.inputs),
    )


_NO_GRADIENT = DRAWS | {
    torch.ops.aten.detach.default, torch.ops.aten.zeros_like.default, torch.ops.aten.ones_like.default,
    torch.ops.aten.full_like.default, torch.ops.aten.new_zeros.default, torch.ops.aten.new_ones.default,
    torch.ops.aten.new_full.default, torch.ops.aten.empty_like.default,
}  # fmt: skip


def mark_gradients(captured: Captured, model: nn.Module) -> None:
    """Record in ``node.meta["grad"]`` whether gradients flow through a node: it depends on a trainable parameter, and
    the loss on it. A parameter that only a metric reads has no gradient, as in the local model."""
    trainable = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            node.meta["grad"] = captured.parameters.get(node.name) in trainable
        else:
            inherits = any(source.meta.get("grad") for source in node.all_input_nodes)
            leaves = pytree.tree_leaves(node.meta.get("val"))
            floats = any(isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) for x in leaves)
            node.meta["grad"] = inherits and floats and node.target not in _NO_GRADIENT
    reached = set[fx.Node]()
    waiting = [node for node in pytree.tree_leaves(captured.graph.output_node().args[0])[:1] if node.meta["grad"]]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += [source for source in node.all_input_nodes if source.meta["grad"]]
    for node in captured.graph.nodes:
        node.meta["grad"] = node in reached
