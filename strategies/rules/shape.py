"""Rules of operators that move or rename elements: views, permutations, slices, joins, and tensors made from nothing."""

from __future__ import annotations

from typing import Any

import torch

from whale.strategies.rules.registry import LocalShapes, Op, OpAxis, Rule, register, same_axes

_FIRST = [frozenset({0})]


def _output_size(argument: str) -> Any:
    def local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
        return {**args, argument: list(shapes.outputs[0])}

    return local


@register("aten.view", "aten.reshape", "aten._unsafe_view")
def _view(op: Op) -> Rule | None:
    if op.args.get("dtype") is not None or isinstance(op.args.get("size", op.args.get("shape")), torch.dtype):
        return None
    name = "size" if "size" in op.args else "shape"
    return Rule(views=[(0, 0)], linear=_FIRST, local=_output_size(name))


@register("aten.unsqueeze", "aten.squeeze", "aten.flatten", "aten.unflatten", "aten.view_as", "aten.reshape_as")
def _reshape(op: Op) -> Rule | None:
    if op.name == "aten.flatten" or op.name == "aten.unsqueeze" or op.name == "aten.squeeze":
        return Rule(views=[(0, 0)], linear=_FIRST, local=_squeeze_local if op.name == "aten.squeeze" else None)
    return None


def _squeeze_local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
    if "dim" in args:
        return args
    raise ValueError("squeeze without dims is normalised away before lowering")


@register("aten.transpose", "aten.permute", "aten.t", "aten.movedim", "aten.swapaxes", "aten.mT", "aten.numpy_T")
def _permute(op: Op) -> Rule | None:
    rank = len(op.shape(0))
    if op.name == "aten.permute":
        order = [d % rank for d in op.args["dims"]]
    elif op.name == "aten.t":
        order = list(range(rank))[::-1]
    elif op.name == "aten.transpose":
        order = list(range(rank))
        a, b = op.args["dim0"] % max(rank, 1), op.args["dim1"] % max(rank, 1)
        if rank:
            order[a], order[b] = order[b], order[a]
    else:
        return None
    return Rule(axes=[OpAxis({0: source}, {0: dim}) for dim, source in enumerate(order)], linear=_FIRST)


@register("aten.expand", "aten.expand_as", "aten.broadcast_to")
def _expand(op: Op) -> Rule | None:
    shape, out = op.shape(0), op.outputs[0]
    axes = []
    for dim, size in enumerate(out):
        own = dim - (len(out) - len(shape))
        axis = OpAxis(outputs={0: dim})
        if own >= 0 and shape[own] == size:
            axis.inputs[0] = own
        axes.append(axis)
    if op.name == "aten.expand_as":
        return None
    return Rule(axes=axes, linear=_FIRST, local=_output_size("size"))


@register("aten.clone", "aten.contiguous", "aten.alias", "aten.detach", "aten.lift_fresh_copy", "aten.positive")
def _same(op: Op) -> Rule:
    return Rule(axes=same_axes(op, 0), linear=_FIRST)


@register("aten.to", "aten._to_copy", "aten.type_as")
def _cast(op: Op) -> Rule:
    source = op.operands[0][0].meta["val"]
    out = op.node.meta["val"]
    same = isinstance(source, torch.Tensor) and source.dtype == out.dtype
    axes = same_axes(op, 0)
    return Rule(axes=axes, linear=_FIRST if same else [])


@register("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unsafe_split", "aten.tensor_split")
def _split(op: Op) -> Rule | None:
    if op.name in ("aten.chunk", "aten.tensor_split"):
        return None
    shape = op.shape(0)
    dim = op.args.get("dim", 0) % len(shape)
    sizes = tuple(out[dim] for out in op.outputs)
    outputs = range(len(sizes))
    axes = [OpAxis({0: d}, dict.fromkeys(outputs, d)) for d in range(len(shape)) if d != dim]

    def local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
        parts = [out[dim] for out in shapes.outputs]
        if "split_sizes" in args:
            return {**args, "split_sizes": parts}
        if isinstance(args["split_size"], (list, tuple)):
            return {**args, "split_size": parts}
        return {**args, "split_size": parts[0]}

    if len(set(sizes)) == 1 and len(sizes) > 1:
        # (k! c): the parts are alike, so they share one axis.
        return Rule(axes=axes, sums=[(0, dim, sizes)], linear=_FIRST, local=local)
    return Rule(axes=axes, sums=[(0, dim, sizes)], linear=_FIRST, local=local)


@register("aten.slice")
def _slice(op: Op) -> Rule:
    shape, out = op.shape(0), op.outputs[0]
    dim = (op.args.get("dim") or 0) % len(shape)
    whole = shape[dim] == out[dim]

    def local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
        return {**args, "start": 0, "end": shapes.outputs[0][dim]} if whole else args

    return Rule(axes=same_axes(op, 0, blocked=() if whole else (dim,)), linear=_FIRST, local=local)


@register("aten.select", "aten.unbind")
def _select(op: Op) -> Rule:
    shape = op.shape(0)
    dim = op.args.get("dim", 0) % len(shape)
    outputs = range(len(op.outputs))
    axes = [OpAxis({0: d}, dict.fromkeys(outputs, d - (d > dim))) for d in range(len(shape)) if d != dim]
    return Rule(axes=[*axes, OpAxis({0: dim}, blocked=True)], linear=_FIRST)


@register("aten.stack")
def _stack(op: Op) -> Rule:
    dim = op.args.get("dim", 0) % len(op.outputs[0])
    operands = range(len(op.operands))
    axes = [
        OpAxis(dict.fromkeys(operands, d - (d > dim)), {0: d}) for d in range(len(op.outputs[0])) if d != dim
    ]
    return Rule(axes=[*axes, OpAxis({}, {0: dim}, blocked=True)], linear=[frozenset(operands)])


@register("aten.cat", "aten.concat", "aten.concatenate")
def _cat(op: Op) -> Rule | None:
    out = op.outputs[0]
    if any(len(op.shape(i)) != len(out) for i in range(len(op.operands))):
        return None
    dim = op.args.get("dim", 0) % len(out)
    operands = range(len(op.operands))
    axes = [OpAxis(dict.fromkeys(operands, d), {0: d}) for d in range(len(out)) if d != dim]
    sizes = tuple(op.shape(i)[dim] for i in operands)
    return Rule(axes=axes, sums=[(-1, dim, sizes)], linear=[frozenset(operands)])


@register("aten.pad", "aten.constant_pad_nd")
def _pad(op: Op) -> Rule | None:
    pads = op.args["pad"]
    rank = len(op.shape(0))
    blocked = [rank - 1 - i // 2 for i, amount in enumerate(pads) if amount]
    zero = op.args.get("mode", "constant") == "constant" and not op.args.get("value")
    return Rule(axes=same_axes(op, 0, blocked=blocked), linear=_FIRST if zero else [])


@register("aten.flip", "aten.roll")
def _flip(op: Op) -> Rule | None:
    dims = op.args["dims"]
    if not dims:
        return None
    return Rule(axes=same_axes(op, 0, blocked=[dims] if isinstance(dims, int) else dims), linear=_FIRST)


@register("aten.repeat")
def _repeat(op: Op) -> Rule:
    shape, out, repeats = op.shape(0), op.outputs[0], op.args["repeats"]
    axes = []
    for dim, size in enumerate(out):
        own = dim - (len(out) - len(shape))
        if repeats[dim] == 1 and own >= 0:
            axes.append(OpAxis({0: own}, {0: dim}))
        elif own < 0 or shape[own] == 1:
            axes.append(OpAxis({}, {0: dim}))  # made by repeating a single position: as expand
        elif size:
            axes.append(OpAxis({0: own}, {}, blocked=True))

    def local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
        lead = len(out) - len(shape)
        counts = [
            n // (shapes.inputs[0][d - lead] if d >= lead and shapes.inputs[0][d - lead] else 1)
            for d, n in enumerate(shapes.outputs[0])
        ]
        return {**args, "repeats": counts}

    return Rule(axes=axes, linear=_FIRST, local=local)


_CREATE = ("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "rand", "randn")


@register(*(f"aten.{name}" for name in _CREATE))
def _create(op: Op) -> Rule:
    axes = [OpAxis({}, {0: dim}) for dim in range(len(op.outputs[0]))]
    axes += [OpAxis({0: dim}, {}, blocked=True) for dim in range(len(op.shape(0)))] if op.operands else []
    return Rule(axes=axes, local=_output_size("size"))


@register("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like", "aten.rand_like", "aten.fill")
def _like(op: Op) -> Rule:
    return Rule(axes=same_axes(op, 0))


@register("aten.arange")
def _arange(op: Op) -> Rule | None:
    if not all(isinstance(op.args.get(k, 0), int) for k in ("start", "end", "step")):
        return None
    start, step = op.args.get("start", 0), op.args.get("step", 1)

    def local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
        first = start + shapes.starts[0] * step
        return {"start": first, "end": first + shapes.outputs[0][0] * step, "step": step} | {
            k: v for k, v in args.items() if k not in ("start", "end", "step")
        }

    return Rule(axes=[OpAxis({}, {0: 0}, form="offset")], local=local)
