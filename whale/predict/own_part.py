"""The layers that a stage computes before it needs what it receives (:mod:`whale.strategies.arrivals`), by the captured
graph: those of its own part, whose seconds messages may take without a rank waiting for them.

A layer counts only if all operators with its parameters and in its modules are of the own part. It knows no seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from whale.graph.captured import Captured
from whale.graph.origins import module_of
from whale.graph.values import operands
from whale.strategies.lowering import PlacedStage

__all__ = ["own_layers"]


def own_layers(captured: Captured, stage: PlacedStage, layer_of: Callable[[str], int]) -> frozenset[int]:
    """The layers of a stage that are computed of the batch alone.

    Args:
        captured: the model.
        stage: of it.
        layer_of: the layer of a parameter or module, by name; -1 for none.
    """
    late = {value[0] for value in stage.received}
    if not late:
        return frozenset()
    inside, known = set(stage.nodes), dict[fx.Node, bool]()

    def reads_batch(node: fx.Node) -> bool:
        if node not in known:
            known[node] = node.name in captured.inputs or any(map(reads_batch, node.all_input_nodes))
        return known[node]

    own, mixed = set[int](), {-1}
    for node in stage.nodes:
        read = {used for used, _ in operands(node)}
        if not late.isdisjoint(read):
            late.add(node)
        known[node] = any(reads_batch(used) for used in read if used not in late or used in inside)
        names = [captured.parameters[used.name] for used, _ in operands(node) if used.name in captured.parameters]
        layer = layer_of(names[0] if names else module_of(node))
        if node in late:
            mixed.add(layer)
        elif names and known[node]:
            own.add(layer)
    return frozenset(own - mixed)
