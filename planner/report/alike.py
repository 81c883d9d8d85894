"""What is alike is shown once: a picture of four thousand devices has as many rows as there are different ones.

Knows neither devices nor pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Alike", "alike"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Alike(Generic[T]):
    """Things of which one is shown.

    Attributes:
        shown: one of them; of things that only resemble each other the heaviest.
        members: all of them, in their order.
        equal: whether they are the same in all that is shown.
    """

    shown: T
    members: tuple[T, ...]
    equal: bool


def alike(
    things: Sequence[T],
    *,
    equal: Callable[[T], Hashable],
    similar: Callable[[T], Hashable],
    weight: Callable[[T], float],
    most: int,
) -> tuple[tuple[Alike[T], ...], int]:
    """Group things so that at most ``most`` groups are left, and count the things that are in none of them.

    Things that are ``equal`` share a group; where that makes too many groups, all that are ``similar``; where those
    are too many, only the groups with the heaviest things stay. The order is that of each group's first thing. Linear,
    but for a sort of the groups.

    >>> words = ["aa", "ab", "aa", "b"]
    >>> groups, left = alike(words, equal=str, similar=lambda word: word[0], weight=len, most=2)
    >>> [(group.shown, len(group.members), group.equal) for group in groups], left
    ([('aa', 3, False), ('b', 1, True)], 0)
    """
    kinds = [equal(thing) for thing in things]
    positions = _grouped(kinds)
    if len(positions) > most:
        positions = _grouped([similar(thing) for thing in things])
    weights = [weight(thing) for thing in things]
    heaviest = {group: max(group, key=lambda position: weights[position]) for group in positions}
    kept = sorted(positions, key=lambda group: -weights[heaviest[group]])[:most]
    groups = tuple(
        Alike(
            shown=things[heaviest[group]],
            members=tuple(things[position] for position in group),
            equal=len({kinds[position] for position in group}) == 1,
        )
        for group in sorted(kept)
    )
    return groups, len(things) - sum(len(group.members) for group in groups)


def _grouped(keys: Sequence[Hashable]) -> list[tuple[int, ...]]:
    found: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        found.setdefault(key, []).append(position)
    return [tuple(group) for group in found.values()]
