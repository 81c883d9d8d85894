"""Annotate a graph that was captured without annotations, as if its modules had been annotated before the capture.

So a model is captured once and compiled for many plans. Annotations inside a model's own ``forward`` need a capture:
they leave no trace in its modules. Knows scopes and modules; nothing of devices and plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx, nn

from whale.annotations import NODE_KEY
from whale.graph.capture import Captured
from whale.graph.capture_checks import modules_around
from whale.ir.strategy import ScopePath, encode_scopes

__all__ = ["put_scopes"]


def put_scopes(captured: Captured, model: nn.Module, scopes: Mapping[str, ScopePath]) -> None:
    """Give every operator the scopes of the innermost module in *scopes* that it was computed in, and no others.

    Args:
        captured: whose graph is changed.
        model: that it was captured from.
        scopes: by module path, as `whale.annotations.module_scopes` returns them.
    """
    first: dict[int, str] = {}
    name = {path: first.setdefault(id(module), path) for path, module in model.named_modules(remove_duplicate=False)}
    texts = {path: encode_scopes(scope) for path, scope in scopes.items()}
    for node in captured.graph.nodes:
        if node.op != "call_function":
            continue
        custom = {key: value for key, value in (node.meta.get("custom") or {}).items() if key != NODE_KEY}
        text = next((texts[path] for path in _paths(node, name) if path in texts), None)
        node.meta["custom"] = custom if text is None else {**custom, NODE_KEY: text}
    stages = (scope.region for path in scopes.values() for scope in path if scope.strategy.kind == "stage")
    captured.stage_regions = tuple(dict.fromkeys(stages))


def _paths(node: fx.Node, name: Mapping[str, str]) -> Iterator[str]:
    """The modules whose forward was running, innermost first, each by the first of its names."""
    return (name.get(path, path) for path in reversed(modules_around(node)))
