"""Model hash: equal for every batch size, annotation, micro-batch, dtype and process.

Two captured models have the same hash if they have the same parameters, by name and shape, and the same operators on
them in the same order, up to casts and whole numbers: sizes follow the batch. Knows graphs only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from whale.graph.captured import Captured
from whale.graph.partition import floating_nodes
from whale.graph.values import is_call, resolve, value_shape

__all__ = ["model_hash"]


_EXTREMES = {
    getattr(torch.finfo(dtype), name): name
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for name in ("min", "max", "eps", "tiny")
}
"""Limits of number types, which masks and clamps are made of: they follow the number type, as whole sizes do the
batch."""


def model_hash(captured: Captured) -> str:
    """The hash of a captured model, as ``sha256:`` and 64 digits."""
    floating = floating_nodes(captured)
    number: dict[fx.Node, int] = {}
    lines = [
        f"{captured.parameters[node.name]} {list(value_shape((node, 0)))}"
        for node in captured.graph.nodes
        if node.op == "placeholder" and node.name in captured.parameters
    ]

    def token(x: Any) -> Any:
        if isinstance(x, fx.Node):
            node, output = resolve(x)
            while node.target is torch.ops.aten._to_copy.default:
                node, output = resolve(node.args[0])  # type: ignore[arg-type]
            if node.name in captured.parameters:
                return captured.parameters[node.name]
            return f"{number[node]}.{output}" if node in number else "from the batch"
        if isinstance(x, tuple | list):
            return [token(item) for item in x if not isinstance(item, int)]
        if isinstance(x, Mapping):
            return {key: token(item) for key, item in sorted(x.items())}
        return _EXTREMES.get(x, x) if isinstance(x, float | str | bool) else None

    for node in captured.graph.nodes:
        if is_call(node) and node not in floating and node.target is not torch.ops.aten._to_copy.default:
            target = getattr(node.target, "__qualname__", node.target)
            lines.append(f"{target} {token(node.args)} {token(node.kwargs)} {_heads(node)}")
            number[node] = len(number)
    return f"sha256:{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}"


def _heads(node: fx.Node) -> int | None:
    """Number of heads of an attention: no parameter shape has it, although it changes the model."""
    aten = torch.ops.aten
    if node.target not in (aten.scaled_dot_product_attention.default, aten.matmul.default):
        return None
    shape = value_shape((node, 0))
    return shape[-3] if len(shape) >= 4 else None
