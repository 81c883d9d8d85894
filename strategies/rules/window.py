"""Rules of operators on images and signals: convolution, pooling, resampling, and normalisation of channels.

The batch and the channels are cut; space is cut only where windows neither overlap nor are padded (patches, 1 x 1
kernels, plain pooling): other windows would need rows of the neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from whale.strategies.rules.registry import LocalShapes, Op, OpAxis, Rule, register


def _each(value: Any, count: int, default: int) -> list[int]:
    """A window argument, one number a spatial dim."""
    if value is None or value == []:
        return [default] * count
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _tiles(op: Op, kernel: Sequence[int], space: int, dilation: Any = 1) -> list[OpAxis]:
    """The spatial axes of windows that lie side by side: each dim is (windows, kernel)."""
    lead = len(op.shape(0)) - space
    if isinstance(op.args.get("padding"), str) and max(kernel) > 1:
        return []
    padding = [0] * space if isinstance(op.args.get("padding"), str) else _each(op.args.get("padding"), space, 0)
    strides = op.args.get("stride")
    axes = []
    for i in range(space):
        size, windows = op.shape(0)[lead + i], op.outputs[0][lead + i]
        stride = kernel[i] if strides in (None, []) else _each(strides, space, 1)[i]
        plain = padding[i] == 0 and (kernel[i] == 1 or _each(dilation, space, 1)[i] == 1)
        if plain and stride == kernel[i] and size == windows * kernel[i]:
            axes.append(OpAxis({0: lead + i}, {0: lead + i}, factor=(1, windows)))
    return axes


@register(
    "aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.conv_transpose1d", "aten.conv_transpose2d",
    "aten.conv_transpose3d",
)  # fmt: skip
def _convolution(op: Op) -> Rule | None:
    """``n (g i) y, (g o) i ky!, (g o)? -> n (g o) y``; the transposed weight is ``(g i) o ky!``."""
    space = int(op.name[-2])
    if len(op.shape(0)) != space + 2:
        return None
    transposed = "transpose" in op.name
    groups = op.args["groups"]
    bias = {2: 0} if len(op.operands) > 2 else {}
    axes = [OpAxis({0: 0}, {0: 0})]
    if groups == 1:
        inside, outside = (0, 1) if transposed else (1, 0)
        axes += [OpAxis({1: outside, **bias}, {0: 1}), OpAxis({0: 1, 1: inside}, {})]
    else:
        axes.append(OpAxis({0: 1, 1: 0, **bias}, {0: 1}, factor=(1, groups)))
    if not transposed:
        axes += _tiles(op, op.shape(1)[2:], space, op.args["dilation"])

    def local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
        return {**args, "groups": groups * shapes.inputs[1][0] // op.shape(1)[0] if groups > 1 else 1}

    return Rule(axes=axes, additive=frozenset(bias), local=local)


def _leading(op: Op, space: int) -> list[OpAxis]:
    """Batch and channels: all dims before the spatial ones, in every output."""
    outputs = range(len(op.outputs))
    return [OpAxis({0: dim}, dict.fromkeys(outputs, dim)) for dim in range(len(op.shape(0)) - space)]


@register(
    "aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d", "aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d",
    "aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices",
)  # fmt: skip
def _pool(op: Op) -> Rule:
    space = int(op.name[op.name.index("pool") + 4])
    plain = len(op.outputs) == 1  # indices speak of places in the whole plane
    kernel = _each(op.args["kernel_size"], space, 1)
    linear = [frozenset({0})] if "avg" in op.name else []
    tiles = _tiles(op, kernel, space, op.args.get("dilation", 1)) if plain else []
    return Rule(axes=_leading(op, space) + tiles, linear=linear)


@register(
    *(f"aten.adaptive_{kind}_pool{space}d" for kind in ("avg", "max") for space in (1, 2, 3)),
    *(f"aten.upsample_{kind}" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *(f"aten.{kind}{space}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for space in (1, 2, 3)),
    "aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa",
)  # fmt: skip
def _resample(op: Op) -> Rule:
    space = int(next(c for c in reversed(op.name) if c.isdigit()))
    return Rule(axes=_leading(op, space), linear=[] if "max" in op.name else [frozenset({0})])


@register("aten.im2col", "aten.col2im")
def _columns(op: Op) -> Rule:
    """``n c y x -> n (c k) l`` and back; the batch may be missing."""
    images = op.shape(0) if op.name == "aten.im2col" else op.outputs[0]
    channel = len(images) - 3
    axes = [OpAxis({0: dim}, {0: dim}) for dim in range(channel)]
    axes.append(OpAxis({0: channel}, {0: channel}, factor=(1, images[channel])))
    return Rule(axes=axes, linear=[frozenset({0})])


@register("aten.grid_sampler")
def _grid_sampler(op: Op) -> Rule:
    """``n c y x, n v u 2 -> n c v u``."""
    space = range(1, len(op.shape(1)) - 1)
    axes = [OpAxis({0: 0, 1: 0}, {0: 0}), OpAxis({0: 1}, {0: 1})]
    return Rule(axes=axes + [OpAxis({1: dim}, {0: dim + 1}) for dim in space])


@register("aten.group_norm")
def _group_norm(op: Op) -> Rule:
    """``n (g c) s!, (g c)?, (g c)? -> n (g c) s!``."""
    groups = op.args["num_groups"]
    channels = dict.fromkeys(range(1, len(op.operands)), 0)
    axes = [OpAxis({0: 0}, {0: 0}), OpAxis({0: 1, **channels}, {0: 1}, factor=(1, groups))]

    def local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
        return {**args, "num_groups": groups * shapes.outputs[0][1] // op.outputs[0][1]}

    return Rule(axes=axes, local=local)


@register("aten.instance_norm")
def _instance_norm(op: Op) -> Rule | None:
    """``n c s!, c? -> n c s!``, each row by itself; running statistics are of all rows."""
    if op.args.get("running_mean") is not None:
        return None
    channels = dict.fromkeys(range(1, len(op.operands)), 0)
    return Rule(axes=[OpAxis({0: 0}, {0: 0}), OpAxis({0: 1, **channels}, {0: 1})])


@register("aten.batch_norm", "aten._native_batch_norm_legit_no_training")
def _batch_norm_fixed(op: Op) -> Rule | None:
    """``n c s, c? ... -> n c s`` with running statistics."""
    if op.args.get("training"):
        return _batch_norm(op) if op.args.get("running_mean") is None else None
    channels = dict.fromkeys(range(1, len(op.operands)), 0)
    axes = [OpAxis({0: dim}, {0: dim}) for dim in range(len(op.shape(0))) if dim != 1]
    return Rule(axes=[OpAxis({0: 1, **channels}, {0: 1}), *axes])


@register("aten._native_batch_norm_legit_functional", "aten._native_batch_norm_legit")
def _batch_norm(op: Op) -> Rule | None:
    """``n c s, c? ... -> n c s, c ...`` with the statistics of the whole batch and space, which all ranks then know."""
    if not op.args["training"] or op.target is torch.ops.aten._native_batch_norm_legit.default:
        return None
    channels = dict.fromkeys(range(1, len(op.operands)), 0)
    statistics = dict.fromkeys(range(1, len(op.outputs)), 0)
    axes = [OpAxis({0: dim}, {0: dim}, form="batch_statistics") for dim in range(len(op.shape(0))) if dim != 1]
    return Rule(axes=[OpAxis({0: 1, **channels}, {0: 1, **statistics}), *axes])
