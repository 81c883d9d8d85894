"""Compact lists of ranks: single ranks, ranges, and ranges with a step, in order.

>>> read_ranks(["0-3", 9, "10-14:2"])
(0, 1, 2, 3, 9, 10, 12, 14)
>>> write_ranks((0, 1, 2, 3, 9, 10, 12, 14))
['0-3', 9, '10-14:2']
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["MAX_RANKS", "read_ranks", "write_ranks"]

MAX_RANKS = 131_072
"""Limit of the world size, so that a short text cannot take all memory."""

_RANGE = re.compile(r"([0-9]{1,6})-([0-9]{1,6})(?::([0-9]{1,6}))?")


def read_ranks(given: object) -> tuple[int, ...]:
    """The ranks of a list of numbers and ranges.

    Raises:
        ValueError: something else is in it, a range descends, or there are more than `MAX_RANKS`.
    """
    if not isinstance(given, list | tuple):
        raise ValueError('write ranks as a list, such as [0, 1] or ["0-7"] or ["0-14:2"]')
    ranks: list[int] = []
    for item in given:
        found = _RANGE.fullmatch(item) if isinstance(item, str) else None
        if found is not None:
            first, last, step = int(found[1]), int(found[2]), int(found[3] or 1)
            if last < first or step < 1 or last >= MAX_RANKS:
                raise ValueError(f"the range {item!r} must ascend and end below {MAX_RANKS}")
            ranks += range(first, last + 1, step)
        elif isinstance(item, int) and not isinstance(item, bool) and 0 <= item < MAX_RANKS:
            ranks.append(item)
        else:
            raise ValueError(f'{str(item)[:60]!r} is no rank; write a number from 0 up, or a range such as "0-7"')
        if len(ranks) > MAX_RANKS:
            raise ValueError(f"there are more than {MAX_RANKS} ranks")
    return tuple(ranks)


def write_ranks(ranks: Sequence[int]) -> list[int | str]:
    """The inverse of `read_ranks`: runs of three or more with one step become a range."""
    written: list[int | str] = []
    start = 0
    while start < len(ranks):
        end = start + 1
        step = ranks[end] - ranks[start] if end < len(ranks) else 0
        while step > 0 and end + 1 < len(ranks) and ranks[end + 1] - ranks[end] == step:
            end += 1
        if step > 0 and end - start >= 2:
            written.append(f"{ranks[start]}-{ranks[end]}" + (f":{step}" if step > 1 else ""))
            start = end + 1
        else:
            written.append(ranks[start])
            start += 1
    return written
