"""Rules of operators that move or rename elements: views, permutations, slices, joins, and new tensors."""

from __future__ import annotations

from typing import Any

from whale.strategies.rules.registry import LocalShapes, Op, OpAxis, Rule, broadcast_axes, register, same_axes

_FIRST = [frozenset({0})]


def _output_size(argument: str) -> Any:
    def local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
        return {**args, argument: list(shapes.outputs[0])}

    return local


@register("aten.reshape")
def _reshape(op: Op) -> Rule:
    return Rule(views=[(0, 0)], linear=_FIRST, local=_output_size("shape"))


@register("aten.transpose", "aten.permute")
def _permute(op: Op) -> Rule:
    rank = len(op.shape(0))
    order = list(range(rank))
    if op.name == "aten.permute":
        order = [d % rank for d in op.args["dims"]]
    elif rank:
        a, b = op.args["dim0"] % rank, op.args["dim1"] % rank
        order[a], order[b] = order[b], order[a]
    return Rule(axes=[OpAxis({0: source}, {0: dim}) for dim, source in enumerate(order)], linear=_FIRST)


@register("aten.expand")
def _expand(op: Op) -> Rule:
    return Rule(axes=broadcast_axes(op, (0,)), linear=_FIRST, local=_output_size("size"))


@register(
    "aten.clone", "aten.detach", "aten.view_as_real", "aten.view_as_complex", "aten.real", "aten.imag",
    "aten.conj_physical", "aten._to_copy",
)  # fmt: skip
def _same(op: Op) -> Rule:
    return Rule(axes=same_axes(op, 0), linear=_FIRST)


@register("aten.split_with_sizes")
def _split(op: Op) -> Rule:
    shape = op.shape(0)
    dim = op.args["dim"] % len(shape)
    sizes = tuple(out[dim] for out in op.outputs)
    axes = [OpAxis({0: d}, dict.fromkeys(range(len(sizes)), d)) for d in range(len(shape)) if d != dim]

    def local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
        return {**args, "split_sizes": [out[dim] for out in shapes.outputs]}

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
    return Rule(axes=axes, linear=_FIRST)


@register("aten.stack")
def _stack(op: Op) -> Rule:
    dim = op.args.get("dim", 0) % len(op.outputs[0])
    operands = range(len(op.operands))
    axes = [OpAxis(dict.fromkeys(operands, d - (d > dim)), {0: d}) for d in range(len(op.outputs[0])) if d != dim]
    return Rule(axes=axes, linear=[frozenset(operands)])


@register("aten.cat")
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
def _pad(op: Op) -> Rule:
    pads = op.args["pad"]
    rank = len(op.shape(0))
    blocked = [rank - 1 - i // 2 for i, amount in enumerate(pads) if amount]
    zero = op.args.get("mode", "constant") == "constant" and not op.args.get("value")
    return Rule(axes=same_axes(op, 0, blocked=blocked), linear=_FIRST if zero else [])


@register("aten.flip", "aten.roll")
def _flip(op: Op) -> Rule | None:
    dims = op.args["dims"]
    if not dims and op.name == "aten.roll":
        return None  # rolls the flattened tensor
    return Rule(axes=same_axes(op, 0, blocked=dims), linear=_FIRST)


@register("aten.tril", "aten.triu")
def _triangle(op: Op) -> Rule:
    return Rule(axes=same_axes(op, 0, blocked=(-2, -1)), linear=_FIRST)


@register("aten.diagonal")
def _diagonal(op: Op) -> Rule:
    rank = len(op.shape(0))
    gone = {op.args["dim1"] % rank, op.args["dim2"] % rank}
    kept = [d for d in range(rank) if d not in gone]
    return Rule(axes=[OpAxis({0: source}, {0: dim}) for dim, source in enumerate(kept)], linear=_FIRST)


@register("aten.diag_embed")
def _diag_embed(op: Op) -> Rule:
    rank = len(op.outputs[0])
    made = {op.args["dim1"] % rank, op.args["dim2"] % rank}
    kept = [d for d in range(rank) if d not in made]
    return Rule(axes=[OpAxis({0: source}, {0: dim}) for source, dim in enumerate(kept)], linear=_FIRST)


@register("aten.unfold")
def _unfold(op: Op) -> Rule:
    """Windows of one dim, as a new last dim."""
    return Rule(axes=same_axes(op, 0, blocked=(op.args["dimension"],)), linear=_FIRST)


@register("aten.repeat_interleave")
def _repeat_interleave(op: Op) -> Rule | None:
    """Every position, repeated: the dim becomes (positions, repeats)."""
    if not isinstance(op.args.get("repeats"), int) or op.args.get("dim") is None:
        return None
    shape = op.shape(0)
    dim = op.args["dim"] % len(shape)
    axes = [OpAxis({0: d}, {0: d}, factor=(1, shape[d]) if d == dim else None) for d in range(len(shape))]

    def local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
        return {**args, "output_size": None}

    return Rule(axes=axes, linear=_FIRST, local=local)


@register("aten.pixel_shuffle", "aten.pixel_unshuffle")
def _pixel_shuffle(op: Op) -> Rule:
    """``n (c r r) y x -> n c (y r) (x r)`` and back."""
    few = op.outputs[0] if op.name == "aten.pixel_shuffle" else op.shape(0)  # the side with few channels
    many = op.shape(0) if op.name == "aten.pixel_shuffle" else op.outputs[0]
    rank = len(few)
    sizes = [*few[:-2], many[-2], many[-1]]
    factors = [None] * (rank - 3) + [(1, size) for size in sizes[-3:]]
    return Rule(axes=[OpAxis({0: d}, {0: d}, factor=f) for d, f in enumerate(factors)], linear=_FIRST)


@register("aten.slice_scatter", "aten.select_scatter")
def _overwrite(op: Op) -> Rule:
    """A part of the first operand is replaced by the second; the dim of which it is a part stays whole."""
    shape, source = op.shape(0), op.shape(1)
    dim = (op.args.get("dim") or 0) % len(shape)
    selects = op.name == "aten.select_scatter"
    axes = []
    for d in range(len(shape)):
        own = d - (selects and d > dim)
        if d != dim:
            axes.append(OpAxis({0: d, 1: own}, {0: d}, blocked=source[own] != shape[d]))
    return Rule(axes=axes, linear=[frozenset({0, 1})])


@register("aten.zeros", "aten.ones", "aten.full", "aten.empty")
def _create(op: Op) -> Rule:
    return Rule(axes=[OpAxis({}, {0: dim}) for dim in range(len(op.outputs[0]))], local=_output_size("size"))


@register("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like")
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
