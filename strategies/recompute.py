"""Recompute: values that a forward does not keep for its backward, which computes them again before it reads them.

Chen et al., "Training deep nets with sublinear memory cost" (2016). A rule says what is kept of each region, a layer or
a ``torch.utils.checkpoint``; what enters a region is always kept. Results of collectives are kept too, so that ranks
communicate as often as before, and so is what a kernel draws; masks that are hashes of positions are computed again
with the same bits.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from whale.graph.nodes import copy_of_root, node_copy
from whale.graph.origins import is_checkpointed, layer_of
from whale.ir.strategy import Recompute
from whale.runtime.derivative import OnTape
from whale.runtime.experts import product_of_groups
from whale.runtime.local_program import Derivative, LocalCode, LocalGraph, Source
from whale.strategies.fused import FusedCall
from whale.strategies.split_backward import communicates
from whale.strategies.traced_call import Call, makes_alias, writes, written_to

__all__ = [
    "computed_again",
    "draws_numbers",
    "has_regions",
    "is_pointwise",
    "kept_once",
    "recomputed",
    "takes_most_time",
]

aten = torch.ops.aten

_PRODUCTS = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.scaled_dot_product_attention,
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_flash_attention_for_cpu, product_of_groups,
}  # fmt: skip
"""Operators that take most of the time of a layer: products and attention."""

_Region = tuple[Recompute, str] | None
"""A rule of a region, and the name of its layer."""


def recomputed(derivative: Derivative, rule: Recompute) -> Derivative:
    """The derivative of the same graph that keeps less.

    Args:
        derivative: that keeps what its backward reads.
        rule: of layers: ``none`` keeps everything, ``selective`` the results of products and of attention, ``full``
            what enters a layer. In regions of ``torch.utils.checkpoint`` it is ``full``.
    """
    return _Recomputing(derivative, rule).run()


def kept_once(derivative: Derivative) -> Derivative:
    """The derivative of the same graph for fused kernels, whose forwards write to memory only what they must.

    A value is computed again if it is element by element a function of others that the backward has, and if nothing
    but such functions reads it in the forward, so that this has it in memory for the backward alone. A mask that is
    written out (:mod:`whale.strategies.mask_hashes`) is, too, of the keys of its rows.

    Args:
        derivative: with its backward in one part.
    """
    return _KeepingOnce(derivative, "none").run()


def has_regions(nodes: Iterable[fx.Node]) -> bool:
    """Whether any of these operators of a model lies in a layer or a checkpoint, inside of which a rule acts."""
    return any(is_checkpointed(node) or layer_of(node) for node in nodes)


def computed_again(derivative: Derivative) -> Iterator[tuple[fx.Node, bool]]:
    """The operators of the model of which a backward computes something again, and whether that is a product or an
    attention."""
    for node in derivative.backward.code.graph.nodes:
        source = node.meta.get("source")
        if not node.meta.get("again") or node.target is operator.getitem or makes_alias(node):
            continue
        if isinstance(source, fx.Node):
            yield source, takes_most_time(node, derivative.backward.code.root)


class _Recomputing:
    def __init__(self, derivative: Derivative, rule: Recompute) -> None:
        self.given, self.rule = derivative, rule
        forward = derivative.forward
        self.root, self.output = forward.root, forward.graph.output_node()
        self.placeholders = {node: n for n, node in enumerate(_placeholders(forward.graph))}
        self.written = written_to(forward.graph)
        self.results: set[fx.Node] = set()
        self.regions: dict[fx.Node, _Region] = {}
        self.backward, self.backward_root = fx.Graph(), copy_of_root(derivative.backward.code.root)
        self.sources: list[Source] = []
        self.kept: dict[fx.Node, int] = {}
        self.env: dict[fx.Node, Any] = {}  # of the given backward
        self.again: dict[fx.Node, fx.Node] = {}  # of the forward, in the backward
        self.last: fx.Node | None = None
        self.count = 0

    def run(self) -> Derivative:
        found: Any = self.output.args[0]
        own, kept = found[: self.given.num_results], found[self.given.num_results :]
        self.results = set(own)
        if not any(self._is_computed_again(node) for node in kept):
            return self.given
        sink, *holes = _placeholders(self.given.backward.code.graph)
        self.env[sink] = self.last = self.backward.placeholder("sink")
        origins: dict[fx.Node, fx.Node] = {}
        for hole, (kind, what) in zip(holes, self.given.backward.sources, strict=True):
            if kind == "kept":
                origins[hole] = kept[what]
            else:
                self.env[hole] = self._placeholder((kind, what))
                if kind == "argument":
                    self.again[list(self.placeholders)[what]] = self.env[hole]

        def read(node: fx.Node) -> fx.Node:
            return self._again(origins[node]) if node in origins else self.env[node]

        for node in self.given.backward.code.graph.nodes:
            if node.op == "output":
                self.backward.output(fx.node.map_arg(node.args[0], read))
            elif node.op != "placeholder":
                self.env[node] = node_copy(self.backward, node, read)
        forward = self._forward((*own, *self.kept))
        code = LocalCode(self.backward_root, self.backward, boxed=True)
        return replace(self.given, forward=forward, backward=LocalGraph(code, self.sources))

    def _placeholder(self, source: Source) -> fx.Node:
        assert self.last is not None
        with self.backward.inserting_after(self.last):
            self.last = self.backward.placeholder(f"{source[0]}_number_{len(self.sources)}")
        self.sources.append(source)
        return self.last

    # What is kept

    def _region(self, node: fx.Node) -> _Region:
        """The region of a value of the forward, inside of which values may be computed again."""
        if node not in self.regions:
            source = node.meta.get("source")
            found: _Region = None
            if isinstance(source, fx.Node):
                layer = layer_of(source)
                if is_checkpointed(source):
                    found = ("full", layer)
                elif self.rule != "none" and layer:
                    found = (self.rule, layer)
            self.regions[node] = found
        return self.regions[node]

    def _is_computed_again(self, node: fx.Node) -> bool:
        """Whether a value that a backward reads is not kept."""
        region = self._region(node)
        if node.op == "placeholder" or region is None or self._leaves(node) or not self._can_be_computed_again(node):
            return False
        return region[0] == "full" or not takes_most_time(_maker(node), self.root)

    def _leaves(self, node: fx.Node) -> bool:
        """Whether a value enters another region, or is a result of the graph."""
        return node in self.results or any(
            user is not self.output and self._region(user) != self._region(node) for user in node.users
        )

    def _can_be_computed_again(self, node: fx.Node) -> bool:
        maker = _maker(node)
        if maker in self.written or maker.op == "get_attr":
            return False
        if maker.op == "call_module":
            module = self.root.get_submodule(str(maker.target))
            if isinstance(module, OnTape):
                fused = _fused(module)
                return fused is not None and not fused.draws
            return not communicates(maker, self.root)
        return not draws_numbers(maker)

    def _again(self, node: fx.Node) -> fx.Node:
        """A value of the forward in the backward: an argument, one that is kept, or one that is computed again."""
        if node in self.again:
            return self.again[node]
        if node in self.placeholders:
            found = self._placeholder(("argument", self.placeholders[node]))
        elif self._is_computed_again(node):
            found = self._copy(node)
        else:
            number = self.kept.setdefault(node, len(self.kept))
            found = self._placeholder(("kept", number))
        self.again[node] = found
        return found

    def _copy(self, node: fx.Node) -> fx.Node:
        inputs = {used: self._input(used, node) for used in node.all_input_nodes}
        found = node_copy(self.backward, node, inputs.__getitem__)
        found.meta["again"] = True
        if node.op == "call_module":
            found.target = f"again_{self.count}"
            self.count += 1
            self.backward_root.add_module(found.target, self.root.get_submodule(str(node.target)))
        return found

    def _input(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The operand of a value that is computed again; of an operator with several results, all of them."""
        if reader.target is operator.getitem:
            if node not in self.again:
                self.again[node] = self._copy(node)
            return self.again[node]
        return self._again(node)

    def _forward(self, results: tuple[fx.Node, ...]) -> LocalCode:
        """The forward with other results."""
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.given.forward.graph.nodes:
            if node.op != "output":
                env[node] = node_copy(graph, node, env.__getitem__)
        graph.output(tuple(env[node] for node in results))
        return LocalCode(self.root, graph)


class _KeepingOnce(_Recomputing):
    """Computes again what backwards can compute of what they have, element by element."""

    @cached_property
    def _cheap(self) -> frozenset[fx.Node]:
        found: Any = self.output.args[0]
        kept = set(found[self.given.num_results :])
        there = kept | {list(self.placeholders)[number] for number in self.given.arguments}
        return frozenset(
            node
            for node in kept - self.written - self.results
            if is_pointwise(node)
            and there.issuperset(node.all_input_nodes)
            and all(user is self.output or is_pointwise(user) for user in node.users)
        )

    def _is_computed_again(self, node: fx.Node) -> bool:
        return node in self._cheap or self._is_hash(node)

    def _is_hash(self, node: fx.Node) -> bool:
        """Whether a value is a part of a hash of positions, or a view of one."""
        if makes_alias(node) and not node.meta.get("hash"):
            return self._is_hash(node.all_input_nodes[0])
        return bool(node.meta.get("hash"))


def is_pointwise(node: fx.Node) -> bool:
    """Whether an operator computes each element of a new tensor of those at the same place in others."""
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) or writes(node):
        return False
    return bool(node.all_input_nodes) and not draws_numbers(node)


def _fused(module: nn.Module) -> FusedCall | None:
    """The kernel of an accelerator that a module stands for, in a dry run."""
    call = module.call if isinstance(module, OnTape) else None
    inner = call.module if isinstance(call, Call) else None
    return inner if isinstance(inner, FusedCall) else None


def takes_most_time(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node is a product or an attention, by itself or as a kernel of an accelerator."""
    target: Any = node.target
    if node.op == "call_module":
        fused = _fused(root.get_submodule(target))
        target = None if fused is None else fused.target
    return getattr(target, "overloadpacket", target) in _PRODUCTS


def draws_numbers(node: fx.Node) -> bool:
    """Whether an operator draws random numbers; attention does where it drops some of its weights."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _maker(node: fx.Node) -> fx.Node:
    """The operator that makes a value, of which it may be one of several results."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node
