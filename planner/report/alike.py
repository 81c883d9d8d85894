"""Grouping of equal items, so that a picture of four thousand devices has only as many rows as differ.

It knows neither devices nor pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Alike", "alike"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Alike(Generic[T]):
    """A group of items, of which one is shown.

    Attributes:
        shown: the item that is drawn; the heaviest of items that are only similar.
        members: all items, in order.
        equal: whether they are equal in everything that is drawn.
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
    """Group items into at most ``most`` groups, and count the items in none of them.

    Items that are ``equal`` share a group; if there are too many groups, so do items that are ``similar``; if there are
    still too many, only the groups with the heaviest items remain. Groups are in the order of their first items.
    Linear, except for a sort of the groups.

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
