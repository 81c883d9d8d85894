"""Attention whose rows are cut over ranks: the ways to compute it, and its lowering as a ring.

Three ways (:data:`whale.ir.strategy.Attention`) are choices of the placement solver. To gather is to cut the rows
alone: bridges gather keys and values. Ulysses is to cut the heads, where everything around is cut along the sequence:
bridges exchange one for the other. A ring cuts rows and columns alike, and is a form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from whale.errors import InfeasibleError
from whale.graph.origins import module_of, where
from whale.graph.values import output_shapes, value_shape
from whale.ir.strategy import Along, Attention, RegionRole
from whale.runtime.ring import RingAttention, Round
from whale.strategies.analysis import STRETCHES, Analysis, Choice
from whale.strategies.layout import Layout, Placements
from whale.strategies.regions import attention_cores
from whale.strategies.rules.registry import Op

__all__ = ["Ways", "allowed_ways", "mirrored_cuts", "repetitions", "ring_call", "ways_of_attention"]

aten = torch.ops.aten

Ways = Mapping[fx.Node, Attention | None]
"""The operators of attentions whose rows are cut on a mesh axis, each with the way that is asked; None: any."""

_REPEATING = {aten.expand.default, aten.reshape.default, aten.clone.default}
"""Operators that repeat keys and values for the heads of a group: better exchanged before than after."""


def ways_of_attention(
    nodes: Sequence[fx.Node],
    analysis: Analysis,
    roles: Mapping[fx.Node, tuple[RegionRole, ...]],
    along: Mapping[fx.Node, tuple[int | None, ...]],
    axis: int,
    size: int,
) -> dict[fx.Node, Attention | None]:
    """The operators of attentions whose rows are cut on an axis of *size* ranks.

    Raises:
        InfeasibleError: an attention cannot be computed as is asked.
    """
    cut = [n for n in nodes if isinstance(roles[n][axis], Along)]
    if not cut:
        return {}
    cores = attention_cores(cut[0].graph)
    found: dict[fx.Node, Attention | None] = {}
    for node in cut:
        if node in cores:
            role = roles[node][axis]
            assert isinstance(role, Along)
            found[node] = role.attention
            if role.attention in ("ring", "ulysses"):
                _check(node, analysis, along[node][axis], role, size)
    for node in reversed(cut):  # keys and values before they are repeated
        readers = [user for user in node.users if user in found]
        if node.target in _REPEATING and node not in cores and readers and len(readers) == len(node.users):
            found[node] = found[readers[0]]
    return found


def allowed_ways(
    analysis: Analysis, node: fx.Node, along: int | None, way: Attention | None, fit: Iterable[int]
) -> list[int]:
    """The choices, by number, of an operator of an attention whose rows are cut along a factor."""
    every, found = analysis.choices[node], {"gather": list[int](), "ring": list[int](), "ulysses": list[int]()}
    for i in fit:
        if every[i].factor == along:
            found["ring" if every[i].form == "ring" else "gather"].append(i)
        elif _cuts_heads(analysis, node, every[i]):
            found["ulysses"].append(i)
    if way is None:
        return [i for own in found.values() for i in own]
    return found[way] or found["gather"]


def _cuts_heads(analysis: Analysis, node: fx.Node, choice: Choice) -> bool:
    """Whether a choice cuts all results before their last two dims, and not along the batch."""
    ranks = [len(shape) for shape in output_shapes(node)]
    cut = all(p.kind == "S" and p.dim < rank - 2 for p, rank in zip(choice.outputs, ranks, strict=True))
    return cut and choice.factor not in (-1, analysis.batch_factor)


def _check(node: fx.Node, analysis: Analysis, along: int | None, role: Along, size: int) -> None:
    """Refuse a way in which an attention cannot be computed."""
    every = analysis.choices[node]
    fused = node.target is aten.scaled_dot_product_attention.default
    asked = f"split(dim={role.dim}, attention={role.attention!r}): the attention in {module_of(node) or 'the model'}"
    if role.attention == "ulysses":
        heads = [c for c in every if _cuts_heads(analysis, node, c)]
        units = max((analysis.factors.size(c.factor) for c in heads), default=0)
        if units < size and any(c.factor == along for c in every):
            raise InfeasibleError(
                f"{asked}{where(node)} has {units or 'no'} heads that can be cut, and there are {size} ranks; use "
                "attention='ring' or 'gather', or fewer ranks there"
            )
        return
    if any(c.form == "ring" for c in every) or not any(c.factor == along for c in every):
        return
    op = analysis.ops[node]
    if not fused:
        reason = "is computed in steps, as a product, a softmax and a product; write it as "
        reason += "F.scaled_dot_product_attention (attn_implementation='sdpa' in Hugging Face's models)"
    elif op.args.get("dropout_p"):
        reason = "drops some of its weights, which a ring does not; set its dropout to 0"
    elif value_shape(op.operands[0])[-2] != value_shape(op.operands[1])[-2] or not _of_itself(op, analysis):
        return  # of one sequence to another: whose keys and values are gathered
    else:
        reason = "has a mask whose columns are not those of its keys"
    raise InfeasibleError(f"{asked}{where(node)} {reason}, or use attention='gather'")


def _of_itself(op: Op, analysis: Analysis) -> bool:
    """Whether rows and columns of an attention are one sequence."""
    query, key = (analysis.dims[value][-2] for value in op.operands[:2])
    return analysis.factors.flat(query) == analysis.factors.flat(key)


def mirrored_cuts(analysis: Analysis, choices: Mapping[fx.Node, Sequence[Choice]]) -> frozenset[tuple[int, int]]:
    """The mesh axes that cut the rows of a causal attention, each with the factor: cut from both ends, the rows of each
    rank see as many columns. Those are excluded along which an operator needs each part to be one stretch."""
    wanted, excluded = set[tuple[int, int]](), set[tuple[int, int]]()
    for node, chosen in choices.items():
        for axis, choice in enumerate(chosen):
            if choice.factor < 0 or axis == 0:
                continue
            if choice.form in STRETCHES - {"causal"}:
                excluded.add((axis, choice.factor))
            elif _is_causal(analysis.ops[node]) and choice.outputs[0].dim == len(output_shapes(node)[0]) - 2:
                wanted.add((axis, choice.factor))
    return frozenset(wanted - excluded)


def _is_causal(op: Op) -> bool:
    fused = op.target is aten.scaled_dot_product_attention.default
    return fused and (bool(op.args.get("is_causal")) or op.node.meta.get("mask") == "causal")


def ring_call(
    op: Op,
    choices: Sequence[Choice],
    arguments: Mapping[str, Any],
    placed: Placements,
    layout: Layout,
    coordinates: Sequence[int],
    groups: Sequence[tuple[int, ...]],
) -> tuple[RingAttention, tuple[Any, ...]]:
    """An attention as a ring on the rank at these coordinates: the module that computes it, and its tensors."""
    axis = next(i for i, choice in enumerate(choices) if choice.form == "ring")
    held = []
    for index in range(len(groups[axis])):
        at = (*coordinates[:axis], index, *coordinates[axis + 1 :])
        held.append(layout.intervals(op.operands[0], placed, at)[len(op.shape(0)) - 2])
    ring = Round(
        held=tuple(held),
        index=coordinates[axis],
        causal=bool(arguments.get("is_causal")),
        scale=arguments.get("scale"),
    )
    tensors = [arguments["query"], *(_of_groups(arguments[name]) for name in ("key", "value"))]
    mask = arguments.get("attn_mask")
    return RingAttention(ring, groups[axis]), (*tensors, *([] if mask is None else [mask]))


def repetitions(key: fx.Node) -> int:
    """How often keys are repeated for the heads of a group before an attention reads them."""
    if key.target is aten._to_copy.default and isinstance(copies := key.args[0], fx.Node):
        return repetitions(copies)
    found = _repeated(key)
    return 1 if found is None else found[1][2]


def _of_groups(key: fx.Node) -> fx.Node:
    """The keys that are repeated for the heads of a group: a ring passes them on once."""
    if key.target is aten._to_copy.default and isinstance(copies := key.args[0], fx.Node):
        return key.graph.call_function(key.target, (_of_groups(copies),), key.kwargs)
    if (found := _repeated(key)) is None:
        return key
    source, (rows, groups, _, length, width) = found
    return key.graph.call_function(aten.reshape.default, (source, [rows, groups, length, width]))


def _repeated(key: fx.Node) -> tuple[fx.Node, list[int]] | None:
    """The source of keys (rows, heads, length, width) that are copies of one for the heads of a group, side by side,
    and their sizes with the number of copies after the groups."""
    steps, targets = [key], [aten.reshape.default, aten.expand.default, aten.reshape.default]
    for target in targets:
        if steps[-1].target is not target or not isinstance(source := steps[-1].args[0], fx.Node):
            return None
        steps.append(source)
    shapes: list[Any] = [list(step.args[1]) for step in steps[:3]]  # type: ignore[arg-type]
    joined, apart, before = shapes
    if len(joined) != 4 or len(apart) != 5 or before != [*apart[:2], 1, *apart[3:]]:
        return None
    return (steps[3], apart) if joined == [apart[0], apart[1] * apart[2], *apart[3:]] else None
