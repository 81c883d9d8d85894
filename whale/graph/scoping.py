"""Annotation scopes of the operators of a captured graph, as data beside the graph.

The capture records them on the nodes, from the model's annotations and from ``with`` statements in its forward. A graph
captured without annotations can be given those of any plan, by the modules in which its operators were computed, so a
model is captured once and compiled for many plans. This module knows scopes and modules; nothing of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx, nn

from whale.annotations import NODE_KEY
from whale.graph.captured import Captured
from whale.graph.origins import modules_around
from whale.ir.strategy import ScopePath, decode_scopes

__all__ = ["NodeScopes", "module_paths", "recorded_scopes", "scopes_by_module"]


@dataclass(frozen=True, kw_only=True)
class NodeScopes:
    """The annotations of a graph's operators; those that have none are left out.

    ``stage_regions`` are the regions of ``stage`` annotations, those of modules that compute nothing included.
    """

    of: Mapping[fx.Node, ScopePath] = field(default_factory=dict)
    stage_regions: tuple[str, ...] = ()


def recorded_scopes(captured: Captured) -> NodeScopes:
    """The annotations with which a model was captured."""
    texts = {
        node: (node.meta.get("custom") or {}).get(NODE_KEY)
        for node in captured.graph.nodes
        if node.op == "call_function"
    }
    paths = {text: decode_scopes(text) for text in dict.fromkeys(texts.values()) if text}
    return NodeScopes(
        of={node: paths[text] for node, text in texts.items() if text}, stage_regions=captured.stage_regions
    )


def module_paths(captured: Captured, model: nn.Module) -> dict[fx.Node, tuple[str, ...]]:
    """For every operator the modules whose forward was running, innermost first, each by the first of its names."""
    first: dict[int, str] = {}
    name = {path: first.setdefault(id(module), path) for path, module in model.named_modules(remove_duplicate=False)}
    return {
        node: tuple(name.get(path, path) for path in reversed(modules_around(node)))
        for node in captured.graph.nodes
        if node.op == "call_function"
    }


def scopes_by_module(paths: Mapping[fx.Node, tuple[str, ...]], scopes: Mapping[str, ScopePath]) -> NodeScopes:
    """Give every operator the scopes of the innermost annotated module in which it was computed.

    Args:
        paths: of the operators' modules, as `module_paths` returns them.
        scopes: by module path, as `whale.annotations.module_scopes` returns them.
    """
    known: dict[tuple[str, ...], ScopePath] = {}
    for own in paths.values():
        if own not in known:
            known[own] = next((scopes[path] for path in own if path in scopes), ())
    stages = (scope.region for path in scopes.values() for scope in path if scope.strategy.makes_stage)
    return NodeScopes(
        of={node: known[own] for node, own in paths.items() if known[own]},
        stage_regions=tuple(dict.fromkeys(stages)),
    )
