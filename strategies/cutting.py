"""The axis factor along which each operator of a stage is cut on each mesh axis: the batch, or a dim of its region.

``split(n, dim=d)`` refers to dim *d* of the input of the annotated region. That dim, refined by all operators of the
model (192 rows that are pooled by 2 are 96 times 2), is cut along its outermost factor: each part is one contiguous
range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from whale.errors import AnnotationError, InfeasibleError
from whale.graph.captured import Captured
from whale.graph.origins import where
from whale.graph.scoping import NodeScopes
from whale.graph.values import Value, is_call, operands, value_shape
from whale.ir.strategy import Along, RegionRole, divides_batch
from whale.ir.virtual_device import VirtualDevice
from whale.strategies.analysis import Analysis

__all__ = ["cut_along", "dim_along"]


def cut_along(
    captured: Captured,
    analysis: Analysis,
    scopes: NodeScopes,
    mesh: VirtualDevice,
    roles: Mapping[fx.Node, tuple[RegionRole, ...]],
) -> dict[fx.Node, tuple[int | None, ...]]:
    """For each operator and mesh axis: the factor to cut along, -1 if there is none, None if matrices are split.

    Raises:
        AnnotationError: a region has no such dim, or names the same one twice.
        InfeasibleError: the dim has too few parts for the axis.
    """
    factors: dict[tuple[Along, int], int] = {}

    def factor(role: RegionRole, axis: int) -> int | None:
        if divides_batch(role):
            return analysis.batch_factor
        if not isinstance(role, Along):
            return None
        if (role, axis) not in factors:
            factors[role, axis] = _factor_of(captured, analysis, scopes, role, mesh.axes[axis].size)
        return factors[role, axis]

    known = {own: tuple(factor(role, axis) for axis, role in enumerate(own)) for own in dict.fromkeys(roles.values())}
    for own, cuts in known.items():
        twice = [role for i, role in enumerate(own) if isinstance(role, Along) and cuts[i] in cuts[:i]]
        if twice:
            raise AnnotationError(
                f"split(dim={twice[0].dim}){_of(twice[0].region)} cuts a dim that another annotation around or in it "
                "cuts too; write one split(n, dim=...) with the product of their numbers"
            )
    return {node: known[own] for node, own in roles.items()}


def dim_along(captured: Captured, analysis: Analysis, members: Sequence[fx.Node] | None, dim: int) -> int | None:
    """The dim of what comes into a region with which ``split`` cuts its operators as it cuts the whole model along
    *dim* of the batch: a table of positions takes no rows; None if there is none.

    Args:
        members: the region's operators; None: the model.
    """
    every = [node for node in captured.graph.nodes if is_call(node)]
    members = every if members is None else members
    wanted = next(_cuttable(captured, analysis, every, dim), None)
    ranks = [len(value_shape(value)) for value in _incoming(captured, members)]
    for own in dict.fromkeys((dim, *range(max(ranks, default=0)))):
        found = next(_cuttable(captured, analysis, members, own), None)
        if wanted is not None and found is not None and found[2] == wanted[2] != analysis.batch_factor:
            return own
    return None


def _of(region: str) -> str:
    """The region in a message."""
    return f" of {region}" if region not in ("", ".") else " of the model"


def _factor_of(captured: Captured, analysis: Analysis, scopes: NodeScopes, role: Along, size: int) -> int:
    """The factor of the first dim that fits and along which an operator of the region can be cut."""
    asked = f"split({size}, dim={role.dim}){_of(role.region)}"
    members = [n for n in captured.graph.nodes if is_call(n) and _lies_in(scopes, n, role.region)]
    incoming = _incoming(captured, members)
    dims = [(v, role.dim % len(value_shape(v))) for v in incoming if _has_dim(v, role.dim)]
    if not dims:
        shapes = ", ".join(str(list(value_shape(v))) for v in incoming[:4]) or "none"
        raise AnnotationError(
            f"{asked}: no tensor that comes into it has a dim {role.dim}; their shapes are {shapes}. Name a dim of one "
            "of them, counted from 0"
        )
    short: list[str] = []
    for value, dim, found in _cuttable(captured, analysis, members, role.dim):
        if found == analysis.batch_factor:
            raise AnnotationError(f"{asked}: dim {role.dim} is the batch; write replicate({size}), which divides it")
        units, length = analysis.factors.size(found), value_shape(value)[dim]
        if units >= size:
            return found
        together = f", for its operators take {length // units} positions together" if units < length else ""
        short.append(f"it has {length} positions, which can be cut into at most {units} parts{together}")
    if short:
        raise InfeasibleError(f"{asked}: {short[0]}; use fewer devices there, or another dim")
    value, dim = dims[0]
    name = captured.inputs.get(value[0].name, value[0].name)
    pieces = [analysis.factors.size(factor) for factor in analysis.factors.flat(analysis.dims[value][dim])]
    if value_shape(value)[dim] == 1:
        why = ", which has one position; give an example with the lengths of training, "
    elif len(pieces) > 1:
        why = f", which views or slices take apart into {' x '.join(map(str, pieces))} positions; "
    else:
        why = "; "
    raise InfeasibleError(
        f"{asked}: none of its operators can be cut along dim {dim} of {name} of shape "
        f"{list(value_shape(value))}{where(members[0])}{why}use another dim, or replicate"
    )


def _cuttable(
    captured: Captured, analysis: Analysis, members: Sequence[fx.Node], dim: int
) -> Iterator[tuple[Value, int, int]]:
    """The inputs of a region that have a dim, counted from 0, along which one of its operators can be cut, and the
    factor."""
    cuttable = {choice.factor for node in members for choice in analysis.choices.get(node, ())}
    for value in _incoming(captured, members):
        if _has_dim(value, dim):
            own = dim % len(value_shape(value))
            found = analysis.factors.cuttable(analysis.dims[value][own])
            if found and found[0] in cuttable:
                yield value, own, found[0]


def _lies_in(scopes: NodeScopes, node: fx.Node, region: str) -> bool:
    """Whether a call belongs to a region; all calls belong to the unannotated rest, whose inputs are the batch's."""
    return not region or any(scope.region == region for scope in scopes.of.get(node, ()))


def _incoming(captured: Captured, members: Sequence[fx.Node]) -> list[Value]:
    """The region's inputs: batch tensors and activations that its operators read but do not produce, in reading
    order."""
    inside = set(members)
    found: dict[Value, None] = {}
    for node in members:
        for value in operands(node):
            given = value[0].op == "placeholder" and value[0].name in captured.inputs
            if given or (is_call(value[0]) and value[0] not in inside):
                found[value] = None
    return list(found)


def _has_dim(value: Value, dim: int) -> bool:
    rank = len(value_shape(value))
    return -rank <= dim < rank
