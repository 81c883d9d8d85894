"""Arithmetic of amounts that are linear in the rows of a micro-batch: differences, and the largest of several."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from whale.ir.profile import Affine, Amount, RuleCosts

__all__ = ["as_number", "most_of", "most_of_both", "sum_of", "without_all"]

ELEMENT_BYTES = (2, 4, 8)
"""The dtypes in which a profile may be read."""


def most_of_both(one: RuleCosts, other: RuleCosts, least: int) -> RuleCosts:
    """Costs that are no less than either, for any number of rows."""

    def most(a: Affine, b: Affine) -> Affine:
        return Affine(max(a.fixed, b.fixed), max(a.per_row, b.per_row))

    kept = Amount(
        elements=most(one.kept.elements, other.kept.elements),
        bytes=most(one.kept.bytes, other.kept.bytes),
    )
    working = (*one.working, *other.working) if one.working and other.working else ()
    multiple = max(one.multiple, other.multiple)
    return RuleCosts(rule=other.rule, kept=kept, working=working, least=least, multiple=multiple)


def as_number(value: Fraction | int) -> float:
    """Whole numbers as such."""
    return int(value) if value.denominator == 1 else float(value)


def sum_of(amounts: Sequence[Amount]) -> Amount:
    """The sum of amounts."""
    elements, others = [one.elements for one in amounts], [one.bytes for one in amounts]
    return Amount(
        elements=Affine(*map(sum, zip(*elements, strict=True))), bytes=Affine(*map(sum, zip(*others, strict=True)))
    )


def without_all(amount: Amount, others: Sequence[Amount]) -> Amount:
    """The rest of an amount without others."""
    parts = [
        Affine(*(own - sum(theirs) for own, *theirs in zip(whole, *those, strict=True)))
        for whole, those in (
            (amount.elements, [other.elements for other in others]),
            (amount.bytes, [other.bytes for other in others]),
        )
    ]
    return Amount(elements=parts[0], bytes=parts[1])


def most_of(amounts: Sequence[Amount]) -> tuple[Amount, ...]:
    """The amounts that are the largest at some number of rows: the upper hull of lines, for each element size.

    >>> few, many = Amount(bytes=Affine(9, 1)), Amount(bytes=Affine(1, 2))
    >>> most_of([few, many, Amount(bytes=Affine(4, 1.5))]) == (few, many)
    True
    """
    found: dict[Amount, None] = {}
    for size in ELEMENT_BYTES:
        lines = [(one.total(0, size), one.total(1, size) - one.total(0, size), one) for one in amounts]
        best = max(lines, key=lambda line: (line[0] + line[1], line[1]), default=None)
        while best is not None:
            found[best[2]] = None
            fixed, slope = best[:2]
            steeper = [line for line in lines if line[1] > slope]
            best = min(steeper, key=lambda line: ((fixed - line[0]) / (line[1] - slope), -line[1]), default=None)
    return tuple(found)
