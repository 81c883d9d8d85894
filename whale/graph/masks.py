"""Recognition of constant attention masks, so that attention can run without a mask.

A traced model contains its causal mask as a matrix of rows times columns, which every layer would save for the
backward, and which is slower than the kernels for ``is_causal``. A mask that depends only on shapes is computed here
once and compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from whale.graph.captured import Captured, KnownMask
from whale.graph.nodes import node_copy

__all__ = ["LARGEST_MASK", "mask_in_words", "recognize_masks"]

LARGEST_MASK = 2**28
"""Masks with more elements (16,384 squared) are not evaluated, because that takes as many bytes, and more."""


def recognize_masks(captured: Captured) -> None:
    """Set ``node.meta["mask"]`` of attention calls to ``"causal"`` or ``"none"`` if their mask is equivalent, and note
    these masks in the captured model."""
    known: dict[fx.Node, Any] = {}
    words: dict[fx.Node, str] = {}
    for node in captured.graph.nodes:
        if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
            continue
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node) or (len(node.args) > 5 and node.args[5]) or node.kwargs.get("is_causal"):
            continue
        if mask not in words:
            words[mask] = mask_in_words(_value(mask, captured, known))
        if words[mask]:
            node.meta["mask"] = words[mask]
    captured.masks = tuple(_code_of(mask, captured, word) for mask, word in words.items() if word)


def _code_of(mask: fx.Node, captured: Captured, words: str) -> KnownMask:
    graph, copies, constants = fx.Graph(), dict[fx.Node, fx.Node](), list[Tensor]()
    for node in _needed(mask, captured):
        copies[node] = made = node_copy(graph, node, copies.__getitem__)
        if node.op == "placeholder":
            constants.append(captured.constants[node.name].cpu())
        made.args, made.kwargs = fx.node.map_aggregate((made.args, made.kwargs), _on_processor)
    graph.output(copies[mask])
    return KnownMask(words, graph, tuple(constants))


def _on_processor(x: Any) -> Any:
    return torch.device("cpu") if isinstance(x, torch.device) else x


def mask_in_words(mask: Tensor | None) -> str:
    """The equivalent of a mask, empty if it has none."""
    if mask is None or mask.dim() < 2:
        return ""
    if mask.dtype == torch.bool:
        seen = mask
    elif bool(((mask == 0) | (mask <= torch.finfo(mask.dtype).min)).all()):
        seen = mask == 0
    else:
        return ""
    if bool(seen.all()):
        return "none"
    rows, columns = seen.shape[-2:]
    lower = torch.ones(rows, columns, dtype=torch.bool, device=seen.device).tril_()
    return "causal" if rows == columns and bool((seen == lower).all()) else ""


def _value(node: fx.Node, captured: Captured, known: dict[fx.Node, Any]) -> Tensor | None:
    """Value, on the CPU, of a node that is the same in every step; None if it depends on the batch, the parameters or
    random numbers."""

    def argument(x: Any) -> Any:
        return known[x] if isinstance(x, fx.Node) else _on_processor(x)

    needed = _needed(node, captured)
    for step in needed or ():
        if step not in known:
            if step.op == "placeholder":
                known[step] = captured.constants[step.name].cpu()
                continue
            args, kwargs = fx.node.map_aggregate((step.args, step.kwargs), argument)
            known[step] = step.target(*args, **kwargs)  # type: ignore[operator]
    return known[node] if needed else None


def _needed(node: fx.Node, captured: Captured) -> list[fx.Node]:
    """The nodes that a value is computed from, in order, ending with itself; none if it is not constant, or too
    large."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current in found:
            continue
        sizes = [leaf.numel() for leaf in pytree.tree_leaves(current.meta.get("val")) if isinstance(leaf, Tensor)]
        constant = current.op == "placeholder" and isinstance(captured.constants.get(current.name), Tensor)
        tags = getattr(current.target, "tags", ())
        if max(sizes, default=0) > LARGEST_MASK or torch.Tag.nondeterministic_seeded in tags:
            return []
        if not constant and current.op != "call_function":
            return []
        found.add(current)
        stack.extend(current.all_input_nodes)
    return [n for n in captured.graph.nodes if n in found]
