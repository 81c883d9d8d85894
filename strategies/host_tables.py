"""Embedding tables in the host's memory: what reads one in a rank's local graph is a part that computes there.

Indices that are computed of the batch alone are computed there, of the batch as the host has it, so that the host does
not wait for the device; others go there. Vectors come back; a bag of them is summed there, so that its sum comes and
not its rows. The gradient of a table is made on the host, where it stays. It knows graphs; nothing of devices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx, nn

from whale.errors import UsageError
from whale.graph.captured import Captured
from whale.graph.nodes import node_copy
from whale.graph.values import Value, has_sparse_gradient
from whale.runtime.at_host import AtHost
from whale.runtime.collectives import Bridge, CollectiveModule, Conversion, Take
from whale.runtime.local_program import LocalCode, Source
from whale.strategies.local_graph import LEVELS, Emitter
from whale.strategies.traced_call import is_pure

__all__ = ["computed_at_host", "looked_up", "tables_of"]

aten = torch.ops.aten

_SUMS = {aten.sum.dim_IntList}
_IN_BAGS = {aten.mul.Tensor, aten.masked_fill.Scalar, aten.div.Scalar, aten.div.Tensor, *_SUMS}
"""Operators of which bags are made of looked-up rows."""


def tables_of(captured: Captured, stored: Collection[Value]) -> frozenset[str]:
    """The names of the parameters among stored values whose gradients are sparse."""
    names = captured.parameters
    return frozenset(names[v[0].name] for v in stored if v[0].name in names and has_sparse_gradient(v))


def looked_up(node: fx.Node) -> list[fx.Node]:
    """A look-up of a captured graph, and what makes a smaller tensor of its rows: what computes at the host."""
    return _chain(node, (), lambda one: one)


def computed_at_host(emitters: Sequence[Emitter], tables: Collection[str]) -> None:
    """Let what reads these parameters in the last of the graphs that are being written compute in the host's memory.

    Raises:
        UsageError: ranks exchange one of them, or something that is no look-up reads it.
    """
    emitter = emitters[-1]
    graph = emitter.graph
    there = {node: what for node, (kind, what) in _sources(emitter).items() if kind == "parameter" and what in tables}
    for node in list(graph.nodes):
        read = [there[x] for x in node.all_input_nodes if x in there]
        if not read:
            continue
        module = emitter.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, Bridge) and _is_local(module.conversion):
            there[node] = read[0]
        elif isinstance(module, CollectiveModule):
            raise UsageError(f"ranks exchange {read[0]}, which offload='tables' has in the host's memory: leave it out")
        else:
            _Moved(emitters, there).move(_bag(node, emitter.outputs))


def _is_local(conversion: Conversion) -> bool:
    """Whether ranks exchange neither a value nor its gradient."""
    return not (conversion.forward_collective or conversion.backward_collective)


def _bag(node: fx.Node, outputs: Collection[fx.Node]) -> list[fx.Node]:
    """A look-up and what makes a smaller tensor of its rows, up to the last operator that only they reach."""
    for user in list(node.users):
        if user.target is operator.getitem and not user.users and user not in outputs:
            node.graph.erase_node(user)
    return _chain(node, outputs, lambda one: one.meta.get("source"))


def _chain(node: fx.Node, outputs: Collection[fx.Node], source_of: Callable[[fx.Node], Any]) -> list[fx.Node]:
    chain = [node]
    summed = 1
    while len(chain[-1].users) == 1 and chain[-1] not in outputs:
        (user,) = chain[-1].users
        if user.target is operator.getitem:  # of a bag, whose other results are for its backward
            chain.append(user)
            summed = len(chain)
            continue
        if user.target not in _IN_BAGS or user.args[0] is not chain[-1] or not _is_of_rows(user, source_of(user)):
            break
        chain.append(user)
        if user.target in _SUMS or (summed > 1 and user.target is not aten.mul.Tensor):
            summed = len(chain)
    return chain[:summed]


def _is_of_rows(node: fx.Node, source: Any) -> bool:
    """Whether an operator, of *source* in the captured graph, does the same to all elements of a looked-up row."""
    if source is None:
        return False
    if node.target in _SUMS:
        rank, dims = source.args[0].meta["val"].dim(), [*source.args, ()][1] or ()
        return bool(dims) and all(dim % rank != rank - 1 for dim in dims)
    others = [x for x in source.all_input_nodes if x is not source.args[0]]
    return all(x.meta["val"].shape[-1:] in ((), (1,)) for x in others)


def _sources(emitter: Emitter) -> dict[fx.Node, Source]:
    """The sources of the placeholders of a graph."""
    holes = [node for node in emitter.graph.nodes if node.op == "placeholder"]
    return dict(zip(holes, emitter.sources, strict=True))


class _Moved:
    """The graph of a part that computes at the host, as it is written, and what is given to it."""

    def __init__(self, emitters: Sequence[Emitter], there: Collection[fx.Node]) -> None:
        self.emitters, self.main, self.there = emitters, emitters[-1], there
        self.graph, self.root = fx.Graph(), nn.Module()
        self.env: dict[fx.Node, fx.Node] = {}
        self.given: dict[fx.Node, bool] = {}
        self.like: list[fx.Node] = []

    def move(self, chain: Sequence[fx.Node]) -> None:
        """Replace nodes, each of which the next alone reads, by a part that computes at the host."""
        last = chain[-1]
        for x in dict.fromkeys(x for node in chain for x in node.all_input_nodes if x not in chain):
            if x not in self.there and _is_whole(x, self.emitters):
                self.env[x] = self._of_batch(x, self.main)
            else:
                self.env[x] = self._hole(x, x in self.there)
                self.like += [] if x in self.there else [x]
        for node in chain:
            self._copy(node, self.main)
        self.graph.output((self.env[last],))
        if not self.like or any(user.target is operator.getitem for user in last.users):
            raise UsageError(
                f"{chain[0].name} is no look-up of vectors in a table, which offload='tables' has in the host's "
                "memory: leave it out"
            )
        module = AtHost(LocalCode(self.root, self.graph), tuple(self.given.values()))
        with self.main.graph.inserting_before(last):
            found = self.main.call_module(module, (self.like[-1], *self.given), "at_host")
        source = next(node.meta["source"] for node in reversed(chain) if "source" in node.meta)
        found.meta |= {"source": source} | {k: v for k, v in chain[0].meta.items() if k == "starts"}
        last.replace_all_uses_with(found)
        self.main.outputs = [found if node is last else node for node in self.main.outputs]
        for node in reversed(chain):
            self.main.graph.erase_node(node)
            if node.op == "call_module":
                delattr(self.main.root, str(node.target))

    def _hole(self, x: fx.Node, there: bool) -> fx.Node:
        self.given[x] = there
        return self.graph.placeholder(f"x_{len(self.given)}")

    def _copy(self, node: fx.Node, emitter: Emitter) -> fx.Node:
        made = self.env[node] = node_copy(self.graph, node, self.env.__getitem__)
        if node.target is aten._to_copy.default:  # to another dtype, where it is
            made.kwargs = {name: x for name, x in made.kwargs.items() if name != "device"}
        if node.op == "call_module":
            made.target = f"part_{len(self.env)}"
            self.root.add_module(made.target, emitter.root.get_submodule(str(node.target)))
        return made

    def _of_batch(self, x: fx.Node, emitter: Emitter) -> fx.Node:
        """A value of a graph that is computed of the batch, computed on the host."""
        if x in self.env:
            return self.env[x]
        if x.op != "placeholder":
            for used in x.all_input_nodes:
                self._of_batch(used, emitter)
            return self._copy(x, emitter)
        other, origin = _origin(self.emitters, emitter, x)
        if origin is not x:
            self.env[x] = self._of_batch(origin, other)
            return self.env[x]
        kind, what = _sources(emitter)[x]
        _, *key = what
        on_host = self.main.placeholder(("at host", *key), ("host input", what), f"host_{x.name}")
        self.like.append(self.main.placeholder(tuple(key), (kind, what), x.name))
        self.env[x] = self.env[on_host] = self.env.get(on_host) or self._hole(on_host, False)
        return self.env[x]


def _is_whole(x: fx.Node, emitters: Sequence[Emitter]) -> bool:
    """Whether a value is whole numbers that plain operators compute of the batch alone, without real ones between,
    which devices round in their own ways."""
    wanted, waiting = {x}, [(emitters[-1], x)]
    while waiting:
        emitter, given = waiting.pop()
        emitter, node = _origin(emitters, emitter, given)
        source = node.meta.get("source")
        if node.op == "placeholder":
            kind, what = _sources(emitter)[node]
            if kind != "input":
                return False
            source = what[1][0]
        elif not _is_plain(node, emitter):
            return False
        elif node.op == "call_module" or node.target is operator.getitem:  # of the kind of its operand
            wanted |= set(node.all_input_nodes) if given in wanted else set()
        if isinstance(source, fx.Node) and (given in wanted or node.op != "placeholder"):
            value = source.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
                return False
        waiting += [(emitter, used) for used in node.all_input_nodes]
    return True


def _origin(emitters: Sequence[Emitter], emitter: Emitter, node: fx.Node) -> tuple[Emitter, fx.Node]:
    """The graph of inputs in which a value is made, and its node there."""
    while node.op == "placeholder":
        kind, what = _sources(emitter)[node]
        if kind not in LEVELS[1:]:
            break
        emitter = emitters[LEVELS.index(kind)]
        node = emitter.outputs[what]
    return emitter, node


def _is_plain(node: fx.Node, emitter: Emitter) -> bool:
    """Whether an operator computes the same on any device, and nothing but its result."""
    if node.op == "call_module":
        return isinstance(emitter.root.get_submodule(str(node.target)), Take)
    if node.target is operator.getitem:
        return True
    return is_pure(node) and ("device" not in node.kwargs or node.target is aten._to_copy.default)
