"""Round numbers along an axis. It knows no picture."""

from __future__ import annotations

from math import ceil, floor, log10

__all__ = ["ticks", "ticks_of_powers"]


def ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """Return up to ``most`` numbers between two, 1, 2 or 5 times a power of ten apart.

    >>> ticks(0, 41, 7), ticks(0.12, 0.34, 3), ticks(3, 3, 5)
    ((0.0, 10.0, 20.0, 30.0, 40.0), (0.2, 0.3), ())
    """
    if not 1e-12 < high - low < 1e18:
        return ()  # an empty range, or one below the resolution of floats
    least = (high - low) / most
    power = 10.0 ** floor(log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return tuple(round(position * step, 12) for position in range(first, last + 1))


def ticks_of_powers(low: float, high: float) -> tuple[float, ...]:
    """Return 1, 2 and 5 times the powers of ten between two positive numbers, for a logarithmic axis.

    >>> ticks_of_powers(8, 120)
    (10.0, 20.0, 50.0, 100.0)
    """
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    values = (round(factor * 10.0**power, 12) for power in powers for factor in (1, 2, 5))
    return tuple(value for value in values if low <= value <= high)
