"""States of the placement solver: where the live values are placed, and which states are worth keeping.

Values and placements are tuples and numbers here, equal for equal parts of a graph. It knows no operators and no prices
but those that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from whale.ir.placement import Placement

__all__ = ["BEAM", "Canonical", "Known", "Priced", "State", "canonical", "undominated", "with_gradient"]

BEAM = 24
"""Number of states that are kept, of those that store the same matrices in the same way."""

WAYS = 16
"""Number of ways to store matrices of which states are kept: between layers that share weights there are thousands."""

Canonical = tuple[str, int, int]
"""A placement as a tuple: kind, dim, factor (or, inside a segment, the factor's number)."""

State = tuple[tuple[int, frozenset[Canonical]], ...]
"""The values that are live before or after a segment, by their numbers in it, each with the placements that it has."""

V = TypeVar("V")


def canonical(placement: Placement) -> Canonical:
    """A placement as a tuple."""
    return placement.kind, placement.dim, placement.factor


def with_gradient(kind: str, grad: bool) -> str:
    """The kind of a placement; without a gradient, replicated with partial gradient is replicated."""
    return "R" if kind == "R*" and not grad else kind


class Priced(NamedTuple):
    """The allowed choices of an operator on one axis, for all operators whose are equal.

    Attributes:
        number: of these choices and prices.
        allowed: their numbers among the operator's choices.
        choices: placements of operands and outputs and the price of each, with positions in
            `whale.strategies.analysis.Form.factors`.
    """

    number: int
    allowed: Sequence[int]
    choices: Sequence[tuple[tuple[Canonical, ...], tuple[Canonical, ...], float]]


@dataclass
class Known:
    """Knowledge of one mesh size and its prices, for all stages and plans for a graph: operators by what their
    choices depend on, segments by their canonical form, and the best ways through them."""

    priced: dict[Hashable, Priced] = field(default_factory=dict)
    segments: dict[Hashable, int] = field(default_factory=dict)
    ways: dict[tuple[int, State], list[tuple[State, float, tuple[int, ...]]]] = field(default_factory=dict)


def undominated(
    values: Sequence[V],
    found: Mapping[Any, tuple[float, Any]],
    rank: Callable[[Any, float], float],
    emulate: Callable[[V, Any, Any], float],
    is_stored: Callable[[V], bool],
) -> dict[Any, tuple[float, Any]]:
    """The states that no cheaper state dominates, best first, and at most :data:`BEAM` for each of at most :data:`WAYS`
    ways to place the values that are stored.

    A state has the placements of each of the *values*; *emulate* prices what it takes to have a value placed as in
    another. This is sound: a dominated state's continuation is available to the dominating state at the same price.
    What *is_stored* is never moved, so no state stands for those that store it otherwise: a matrix that the first and
    the last operator read is cut for both, and what suits the last shows at the end.
    """
    ordered = sorted((rank(state, one[0]), one[0], i, state) for i, (state, one) in enumerate(found.items()))
    differing = [i for i in range(len(values)) if len({state[i] for state in found}) > 1]
    differ = [values[i] for i in differing]
    stored = [i for i in differing if is_stored(values[i])]
    num: dict[tuple[Any, ...], int] = {}
    kept: list[tuple[float, Any, list[Any]]] = []
    for _, cost, _, state in ordered:
        ways = tuple([state[i] for i in stored])
        if num.get(ways, 0) == BEAM or (ways not in num and len(num) == WAYS):
            continue
        own = [state[i] for i in differing]
        for other, _, placed in kept:
            gap = cost - other
            if gap < 0:
                continue
            for value, have, want in zip(differ, placed, own, strict=True):
                if have != want:
                    gap -= emulate(value, have, want)
                    if gap < 0:
                        break
            else:
                break
        else:
            kept.append((cost, state, own))
            num[ways] = num.get(ways, 0) + 1
    return {state: found[state] for _, state, _ in kept}
