"""Rows of micro-batches: a batch in a number of parts, all of the same size but the last, which may have fewer rows."""

from __future__ import annotations

from whale.errors import UsageError

__all__ = ["rows_of_micro_batch"]


def rows_of_micro_batch(batch: int, micro_batches: int) -> int:
    """Rows of every micro-batch except the last, which has the rest: the fewest that suffice.

    Raises:
        UsageError: no size makes that number of them; names the nearest numbers.

    >>> rows_of_micro_batch(64, 11)  # ten of 6 rows and one of 4
    6
    """
    rows = -(-batch // micro_batches)
    enough = -(-batch // rows)
    if enough == micro_batches:
        return rows
    near = f"{enough} or {-(-batch // (rows - 1))}" if rows > 1 else str(enough)
    each = "1 row" if rows == 1 else f"{rows} rows"
    raise UsageError(
        f"a batch of {batch} rows does not make {micro_batches} micro-batches: with {each} each there are {enough}; "
        f"use {near}"
    )
