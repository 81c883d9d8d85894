"""Rules of operators on images and signals: convolution, pooling, resampling, and normalisation of channels.

The batch and the channels are cut, and space wherever a dim is as many strides long as there are windows. Windows that
neither overlap nor are padded (patches, 1 x 1 kernels, plain pooling) stay inside their shard; others read rows of the
neighbours: the form ``halo``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch

from whale.graph.values import value_tensor
from whale.strategies.rules.registry import LocalShapes, Op, OpAxis, Rule, Window, register


def _each(value: Any, count: int, default: int) -> list[int]:
    """A window argument, one number a spatial dim."""
    if value is None or value == []:
        return [default] * count
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _windows(op: Op, kernel: Sequence[int], space: int, padding: float = 0.0) -> dict[int, Window]:
    """By dim: the windows of spatial dims of which each window has its stride for itself."""
    if isinstance(op.args.get("padding"), str):  # what cannot be written as a number on both sides
        return {}
    lead = len(op.shape(0)) - space
    strides = list(kernel) if op.args.get("stride") in (None, []) else _each(op.args["stride"], space, 1)
    dilations, before = (
        _each(op.args.get(name), space, default) for name, default in (("dilation", 1), ("padding", 0))
    )
    found = {}
    for i in range(space):
        extent = dilations[i] * (kernel[i] - 1) + 1
        whole = op.shape(0)[lead + i] == op.outputs[0][lead + i] * strides[i]
        if whole and before[i] < extent:
            found[lead + i] = Window(stride=strides[i], before=before[i], extent=extent, padding=padding)
    return found


def _apart(window: Window) -> bool:
    """Whether windows stay inside of their strides."""
    return window.before == 0 and window.extent <= window.stride


def _spatial(op: Op, windows: dict[int, Window]) -> list[OpAxis]:
    """An axis for each dim with windows: a dim is (windows, stride)."""
    return [
        OpAxis({0: dim}, {0: dim}, factor=(1, op.outputs[0][dim]), form="" if _apart(window) else "halo")
        for dim, window in windows.items()
    ]


def _spread(op: Op, space: int) -> list[OpAxis]:
    """The spatial axes of a transposed convolution in which every input has its stride of the output for itself."""
    lead = len(op.shape(0)) - space
    kernel = op.shape(1)[2:]
    strides, dilations, before = (
        _each(op.args[name], space, default) for name, default in (("stride", 1), ("dilation", 1), ("padding", 0))
    )
    axes = []
    for i in range(space):
        size, out = op.shape(0)[lead + i], op.outputs[0][lead + i]
        window = Window(stride=strides[i], before=before[i], extent=dilations[i] * (kernel[i] - 1) + 1)
        if _apart(window) and out == size * strides[i]:
            axes.append(OpAxis({0: lead + i}, {0: lead + i}, factor=(1, size)))
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
    windows = {} if transposed else _windows(op, op.shape(1)[2:], space)
    axes += _spread(op, space) if transposed else _spatial(op, windows)

    def local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
        return {**args, "groups": groups * shapes.inputs[1][0] // op.shape(1)[0] if groups > 1 else 1}

    return Rule(axes=axes, additive=frozenset(bias), windows=windows, local=local)


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
    mean, indices = "avg" in op.name, len(op.outputs) > 1  # indices speak of places in the whole plane
    windows = _windows(op, _each(op.args["kernel_size"], space, 1), space, 0.0 if mean else -inf)
    padded = value_tensor(op.operands[0]).is_floating_point() and not (mean and op.args["ceil_mode"])
    counted = not mean or op.args["count_include_pad"]  # else a mean is divided by how much lies inside
    axes = _leading(op, space)
    if not indices:
        axes += _spatial(op, {d: w for d, w in windows.items() if _apart(w) or (padded and (counted or not w.before))})
    return Rule(axes=axes, linear=[frozenset({0})] if mean else [], windows=windows)


@register(
    *(f"aten.adaptive_{kind}_pool{space}d" for kind in ("avg", "max") for space in (1, 2, 3)),
    *(f"aten.upsample_{kind}" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *(f"aten.{kind}{space}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for space in (1, 2, 3)),
    "aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa",
)  # fmt: skip
def _resample(op: Op) -> Rule:
    """Space is cut where every input has its outputs (nearest), or every output its inputs (a mean), for itself."""
    space = int(next(c for c in reversed(op.name) if c.isdigit()))
    lead = len(op.shape(0)) - space
    axes = _leading(op, space)
    scales = op.args.get("scale_factors") or [s for name, s in op.args.items() if name.startswith("scales")]
    nearest = "nearest" in op.name and all(scale is None or float(scale).is_integer() for scale in scales)
    for dim in range(lead, lead + space):
        size, out = op.shape(0)[dim], op.outputs[0][dim]
        if nearest and out % size == 0:
            axes.append(OpAxis({0: dim}, {0: dim}, factor=(1, size)))
        elif "adaptive_avg" in op.name and size % out == 0:
            axes.append(OpAxis({0: dim}, {0: dim}, factor=(1, out)))

    def local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
        return args if args.get("output_size") is None else {**args, "output_size": list(shapes.outputs[0][lead:])}

    return Rule(axes=axes, linear=[] if "max" in op.name else [frozenset({0})], local=local)


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


@register("aten.affine_grid_generator")
def _affine_grid(op: Op) -> Rule:
    """``n 2! 3! -> n v! u! 2!``."""

    def local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
        return {**args, "size": [shapes.outputs[0][0], *args["size"][1:]]}

    return Rule(axes=[OpAxis({0: 0}, {0: 0})], local=local)


@register("aten.fractional_max_pool2d", "aten.fractional_max_pool3d")
def _fractional_pool(op: Op) -> Rule:
    """``n c s!, n c 2! -> n c s!, n c s!``: the second operand is random numbers that cut space into windows."""
    lead = len(op.shape(0)) - int(op.name[-2])
    axes = [OpAxis({0: dim, 1: dim + 2 - lead}, {0: dim, 1: dim}) for dim in range(lead)]
    return Rule(axes=axes)


@register("aten.max_unpool2d", "aten.max_unpool3d")
def _unpool(op: Op) -> Rule:
    """``* s!, * s! -> * s!``: indices speak of places in the whole plane."""
    lead = len(op.shape(0)) - int(op.name[-2])
    return Rule(axes=[OpAxis({0: dim, 1: dim}, {0: dim}) for dim in range(lead)])


@register("aten.group_norm")
def _group_norm(op: Op) -> Rule:
    """``n (g c) s*, (g c)?, (g c)? -> n (g c) s*`` with the statistics of each row and group over all of space."""
    groups = op.args["num_groups"]
    channels = dict.fromkeys(range(1, len(op.operands)), 0)
    axes = [OpAxis({0: 0}, {0: 0}), OpAxis({0: 1, **channels}, {0: 1}, factor=(1, groups))]
    axes += [OpAxis({0: d}, {0: d}, form="group_statistics") for d in range(2, len(op.shape(0)))]

    def local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
        return {**args, "num_groups": groups * shapes.outputs[0][1] // op.outputs[0][1]}

    return Rule(axes=axes, local=local)


@register("aten.instance_norm")
def _instance_norm(op: Op) -> Rule | None:
    """``n c s*, c? -> n c s*``, each row by itself; running statistics are of all rows."""
    if op.args.get("running_mean") is not None:
        return None
    channels = dict.fromkeys(range(1, len(op.operands)), 0)
    axes = [OpAxis({0: 0}, {0: 0}), OpAxis({0: 1, **channels}, {0: 1})]
    return Rule(axes=axes + [OpAxis({0: d}, {0: d}, form="group_statistics") for d in range(2, len(op.shape(0)))])


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
