"""Gradients that backwards write where they stay: the last operator of each gets memory from the sink of gradients.

So a gradient that is summed with others over ranks is written straight into its bucket, and copied nowhere. Operators
that have no form with an ``out`` argument of their own make their results as before, and the sink copies these. It
knows graphs and operators; nothing of buckets.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from whale.graph.nodes import node_copy
from whale.runtime.derivative import laid_out
from whale.runtime.local_program import LocalCode
from whale.strategies.traced_call import makes_alias

__all__ = ["gradients_in_place", "out_form"]

aten = torch.ops.aten


class _Write(NamedTuple):
    """A node that can write all of a gradient: the operator that does, its kind of result, and who gets it."""

    target: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sink: fx.Node
    number: int


def gradients_in_place(code: LocalCode) -> LocalCode:
    """A backward that writes gradients into memory from its sink."""
    writes = {}
    for node in code.graph.nodes:
        if node.op == "call_method" and node.target == "add":
            sink, number, gradient = node.args
            if (found := _write(gradient)) is not None:
                maker, target, shape, strides = found
                writes[maker] = _Write(target, shape, strides, sink, number)
    if not writes:
        return code
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in code.graph.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], env.__getitem__))
        elif (write := writes.get(node)) is None:
            env[node] = node_copy(graph, node, env.__getitem__)
        else:
            given = (env[write.sink], write.number, write.shape, write.strides)
            place = graph.call_method("place", given)
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
            if write.target is aten.copy_.default:
                env[node] = graph.call_function(write.target, (place, args[0]))
            else:
                env[node] = graph.call_function(write.target, args, {**kwargs, "out": place})
            env[node].meta = node.meta
    return LocalCode(code.root, graph, boxed=code.boxed)


def _write(gradient: fx.Node) -> tuple[fx.Node, Any, tuple[int, ...], tuple[int, ...]] | None:
    """The node whose result is all the memory of a gradient, the operator that writes it, its shape and strides."""
    maker, size = gradient, None
    while maker.op == "call_function" and len(maker.users) == 1:
        value = maker.meta.get("val")
        if maker.target is laid_out:
            source, strides = maker.args
            like = source.meta.get("val")  # type: ignore[union-attr]
            if maker is not gradient or not isinstance(like, Tensor) or like.layout is not torch.strided:
                return None
            if _is_contiguous(tuple(like.shape), strides):  # type: ignore[arg-type]
                return maker, aten.copy_.default, tuple(like.shape), strides  # type: ignore[return-value]
            return None
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        shape, strides = tuple(value.shape), tuple(value.stride())
        if maker is gradient:
            size = value.numel()
            if not _is_contiguous(shape, strides):
                return None
        if value.numel() != size or value.storage_offset():
            return None
        if makes_alias(maker):
            maker = maker.all_input_nodes[0]
            continue
        target = _writing(maker)
        return None if target is None else (maker, target, shape, strides)
    return None


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return torch.empty_strided(shape, strides, device="meta").is_contiguous()


def _writing(node: fx.Node) -> Any:
    """The form of an operator that writes its result into given memory; None if it has none of its own."""
    if node.target is aten._to_copy.default:
        return aten.copy_.default if set(node.kwargs) <= {"dtype"} else None
    return out_form(node.target) if isinstance(node.target, torch._ops.OpOverload) else None


@cache
def out_form(operator: torch._ops.OpOverload) -> Any:
    """The form of an operator that writes its result into given memory, as ``out``; None if it has none of its own."""
    given = [(argument.name, str(argument.type)) for argument in operator._schema.arguments]
    for name in operator.overloadpacket.overloads():
        form = getattr(operator.overloadpacket, name)
        arguments = form._schema.arguments
        outs = [argument for argument in arguments if argument.is_out]
        rest = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        if [out.name for out in outs] == ["out"] and rest == given:
            own = torch._C._dispatch_has_kernel_for_dispatch_key(form.name(), "CPU")
            return form if own else None  # else torch runs the operator and copies its result
    return None
