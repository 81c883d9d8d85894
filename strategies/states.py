"""States of the placement solver: where the live values are placed, and which states are worth keeping.

Values and placements are tuples and numbers here, equal for equal parts of a graph. It knows no operators and no prices
but those that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from whale.ir.placement import Placement

__all__ = ["BEAM", "Canonical", "Known", "Moves", "Priced", "State", "canonical", "undominated", "with_gradient"]

BEAM = 24
"""Number of states that are kept, of those that store the same matrices in the same way."""

WAYS = 16
"""Number of ways to store matrices of which states are kept: between layers that share weights there are thousands."""

Canonical = tuple[str, int, int]
"""A placement as a tuple: kind, dim, factor (or, inside a segment, the factor's number)."""

State = tuple[tuple[int, frozenset[Canonical]], ...]
"""The values that are live before or after a segment, by their numbers in it, each with the placements that it has."""

V = TypeVar("V")
P = TypeVar("P")


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


class Moves(NamedTuple):
    """Prices of a value in each of some sets of placements.

    Attributes:
        pending: for each set, what it takes to sum the value.
        emulated: for each set and each other one, what it takes to have the value placed as in the other.
    """

    pending: npt.NDArray[np.float64]
    emulated: npt.NDArray[np.float64]

    @classmethod
    def between(
        cls,
        sets: Sequence[frozenset[P]],
        pending: Callable[[frozenset[P]], float],
        reach: Callable[[frozenset[P], P], float],
    ) -> Moves:
        """The prices between all *sets*: of a placement that is not in a set, by *reach*."""
        reached = {
            one: np.array([0.0 if one in have else reach(have, one) for have in sets])
            for one in frozenset().union(*sets)
        }
        emulated = np.zeros((len(sets), len(sets)))
        for number, want in enumerate(sets):
            for one in want:
                emulated[:, number] += reached[one]
        return cls(np.array([pending(have) for have in sets]), emulated)


def undominated(
    values: Sequence[V],
    found: Mapping[Any, tuple[float, Any]],
    moves: Callable[[V, tuple[Any, ...]], Moves],
    is_stored: Callable[[V], bool],
) -> dict[Any, tuple[float, Any]]:
    """The states that no cheaper state dominates, best first, and at most :data:`BEAM` for each of at most :data:`WAYS`
    ways to place the values that are stored.

    A state has the placements of each of the *values*. Best is the least with what is pending of its values; *moves*
    prices what it takes to have a value placed as in another state. This is sound: a dominated state's continuation
    is available to the dominating state at the same price. What *is_stored* is never moved, so no state stands for
    those that store it otherwise: a matrix that the first and the last operator read is cut for both, and what suits
    the last shows at the end.
    """
    states = list(found)
    if len(states) == 1:
        return dict(found)
    costs = np.array([cost for cost, _ in found.values()])
    expected = np.zeros(len(states))
    differing: list[tuple[Any, Any]] = []  # for each value the numbers of its placements, and prices between these
    stored: list[Any] = []
    for value, column in zip(values, zip(*states, strict=True), strict=True):
        numbers = {placed: number for number, placed in enumerate(dict.fromkeys(column))}
        pending, emulated = moves(value, tuple(numbers))
        if len(numbers) == 1:
            expected += pending
            continue
        places = np.fromiter(map(numbers.__getitem__, column), dtype=np.intp, count=len(states))
        expected += pending[places]
        differing.append((places, emulated))
        stored += [places] if is_stored(value) else []
    order = np.lexsort((costs, costs + expected))
    ways = list(zip(*(places[order].tolist() for places in stored), strict=True)) or [()] * len(states)
    costs = costs[order]
    emulations = [(places[order].tolist(), emulated[:, places[order]]) for places, emulated in differing]
    dominated = np.zeros(len(states), dtype=bool)
    num: dict[tuple[int, ...], int] = {}
    kept: list[int] = []
    for place, way in enumerate(ways):
        if dominated[place] or num.get(way, 0) == BEAM or (way not in num and len(num) == WAYS):
            continue
        num[way] = num.get(way, 0) + 1
        kept.append(place)
        gaps = costs - costs[place]  # what a state costs more than this one, which has to be as it is
        for have, prices in emulations:
            gaps -= prices[have[place]]
        dominated |= gaps >= 0
    return {states[number]: found[states[number]] for number in order[kept].tolist()}
