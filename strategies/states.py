"""States of the placement solver: where the live values are placed, and which states are worth keeping.

Values and placements are tuples and numbers here, equal for equal parts of a graph. It knows no operators and no prices
but those that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from whale.ir.placement import Placement

__all__ = ["BEAM", "Canonical", "Known", "Priced", "State", "canonical", "undominated", "with_gradient"]

BEAM = 24
"""Number of states that are kept, of those that store the same matrices in the same way."""

WAYS = 16
"""Number of ways to store matrices of which states are kept: between layers that share weights there are thousands."""

_BLOCK = 128
"""Number of states that are compared at a time."""

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
    pending: Callable[[V, Any], float],
    emulate: Callable[[V, Any, Any], float],
    is_stored: Callable[[V], bool],
) -> dict[Any, tuple[float, Any]]:
    """The states that no cheaper state dominates, best first, and at most :data:`BEAM` for each of at most :data:`WAYS`
    ways to place the values that are stored.

    A state has the placements of each of the *values*. Best is the least with what is *pending* of its values;
    *emulate* prices what it takes to have a value placed as in another. This is sound: a dominated state's continuation
    is available to the dominating state at the same price. What *is_stored* is never moved, so no state stands for
    those that store it otherwise: a matrix that the first and the last operator read is cut for both, and what suits
    the last shows at the end.
    """
    states = list(found)
    costs = np.array([cost for cost, _ in found.values()])
    expected, stored = np.zeros(len(states)), list[Any]()
    differing: list[tuple[Any, Any]] = []  # for each value the numbers of its placements, and prices between these
    for value, column in zip(values, zip(*states, strict=True), strict=True):
        numbers = {placed: number for number, placed in enumerate(dict.fromkeys(column))}
        places = np.fromiter(map(numbers.__getitem__, column), dtype=np.intp, count=len(states))
        expected += np.array([pending(value, placed) for placed in numbers])[places]
        if len(numbers) > 1:
            table = [[0.0 if have == want else emulate(value, have, want) for want in numbers] for have in numbers]
            differing.append((places, np.array(table)))
            stored += [places] if is_stored(value) else []
    order = np.lexsort((costs, costs + expected))
    ways = list(zip(*(places[order].tolist() for places in stored), strict=True)) or [()] * len(states)
    num: dict[tuple[int, ...], int] = {}
    kept: list[int] = []
    for begin in range(0, len(states), _BLOCK):
        own = order[begin : begin + _BLOCK]
        others = np.concatenate([np.array(kept, dtype=np.intp), own])
        gaps = costs[None, own] - costs[others, None]  # what a state costs more than each, which has to be as it is
        for places, table in differing:
            gaps -= table[places[others, None], places[None, own]]
        dominates = gaps >= 0
        by_kept = dominates[: len(kept)].any(0).tolist()
        bits = np.packbits(dominates[len(kept) :], axis=0, bitorder="little").T.tolist()
        new = 0  # the states of the block that are kept, as bits
        for place, number in enumerate(own.tolist()):
            way = ways[begin + place]
            if by_kept[place] or num.get(way, 0) == BEAM or (way not in num and len(num) == WAYS):
                continue
            if not int.from_bytes(bits[place], "little") & new:
                new |= 1 << place
                num[way] = num.get(way, 0) + 1
                kept.append(number)
    return {states[number]: found[states[number]] for number in kept}
