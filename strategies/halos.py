"""Operators that read beyond their shard of a dim: windows at its edges, and the rows of a causal attention.

A windowed operator is lowered as itself, without padding along the cut dims, on a shard extended by the rows of its
neighbours and the padding of the true borders. Rows of a causal attention read the columns up to the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whale.runtime.halo import Halo, Reach, Stretch, WindowedCall
from whale.strategies.analysis import Choice
from whale.strategies.layout import Layout, Placements
from whale.strategies.rules.registry import Op, Rule

__all__ = ["causal_mask", "windowed_call"]


def windowed_call(
    op: Op,
    rule: Rule,
    choices: Sequence[Choice],
    arguments: dict[str, Any],
    placed: Placements,
    layout: Layout,
    coordinates: Sequence[int],
    groups: Sequence[tuple[int, ...]],
) -> tuple[WindowedCall, tuple[Any, ...]]:
    """A call whose first operand is cut along dims with windows, on the rank at these coordinates: the module that
    computes it, and its tensors."""
    halos = _halos(op, rule, choices, placed, layout, coordinates, groups)
    given = _without_padding(op, arguments, [halo.reach.dim for halo in halos])
    tensors = [name for name in op.args if name in op.tensor_names]
    others = {name: None if name in tensors else given[name] for name in op.args}
    module = WindowedCall(op.target, others, tensors, halos)  # type: ignore[arg-type]
    return module, tuple(given[name] for name in tensors)


def _halos(
    op: Op,
    rule: Rule,
    choices: Sequence[Choice],
    placed: Placements,
    layout: Layout,
    coordinates: Sequence[int],
    groups: Sequence[tuple[int, ...]],
) -> list[Halo]:
    """The halo exchange of a shard, one for each cut dim with windows."""
    found = []
    for axis, choice in enumerate(choices):
        if choice.form != "halo":
            continue
        dim = choice.inputs[0].dim
        window, size = rule.windows[dim], op.shape(0)[dim]
        held: list[Stretch] = []
        read: list[Stretch] = []
        padding = (0, window.extent)  # a rank without rows pads for one window, whose result it drops
        for index in range(len(groups[axis])):
            at = (*coordinates[:axis], index, *coordinates[axis + 1 :])
            own = layout.intervals(op.operands[0], placed, at)[dim]
            held.append(own[0] if own else (0, 0))
            first, stop = window.reach(*held[-1]) if own else (0, 0)
            read.append((max(first, 0), min(stop, size)))
            if own and index == coordinates[axis]:
                padding = (max(-first, 0), max(stop - size, 0))
        reach = Reach(dim=dim, held=tuple(held), read=tuple(read), padding=padding, value=window.padding)
        found.append(Halo(reach, groups[axis], coordinates[axis]))
    return found


def _without_padding(op: Op, arguments: dict[str, Any], dims: Sequence[int]) -> dict[str, Any]:
    """The arguments of a windowed operator whose input is already padded along some dims."""
    space = int(next(c for c in reversed(op.name) if c.isdigit()))
    lead = len(op.shape(0)) - space
    given = arguments["padding"]
    padding = [given] * space if isinstance(given, int) else list(given) * (space // len(given))
    for dim in dims:
        padding[dim - lead] = 0
    changed: dict[str, Any] = {"padding": padding}
    if "ceil_mode" in arguments:
        changed["ceil_mode"] = False
    return {**arguments, **changed}


def causal_mask(rows: Sequence[Stretch], columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bias added to the scores of some stretches of rows, which masks later columns.

    >>> causal_mask(((1, 3),), 3, torch.float32, torch.device("cpu")).tolist()
    [[0.0, 0.0, -inf], [0.0, 0.0, 0.0]]
    """
    masks = [torch.full((stop - start, columns), -torch.inf, dtype=dtype, device=device) for start, stop in rows]
    return torch.cat([mask.triu_(start + 1) for mask, (start, _) in zip(masks, rows, strict=True)])
