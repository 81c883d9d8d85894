"""State sharding: parameters, gradients and optimizer states in stretches, of which each rank that sums a gradient owns
one.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models" (SC 2020). Stretches may be
of unequal sizes, apart from the shares of the batch: a slow device with much memory holds more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, get_args

from whale.errors import UsageError

__all__ = ["LEVELS", "Align", "StateSharding", "shares_of", "stretches"]

Align = Literal["row", "parameter"]
"""Ends of stretches: after a row of a parameter (an index of its first dim), or after a parameter."""

LEVELS = (0, 1, 2, 3)
"""From the one that divides nothing to the one that divides most."""


@dataclass(frozen=True)
class StateSharding:
    """How the state of a stage's parameters is divided among the ranks that sum their gradients.

    Attributes:
        level: 0: all of them have all; 1: gradients are summed to their owners once a step; 2: in each micro-batch, so
            that no rank has all of them; 3: parameters are gathered for each task that reads them, too, and freed after
            it.
        shares: of each rank of the stage, or of each rank that sums a gradient, in any unit; () are equal ones.
        align: where stretches end. With ``parameter`` an optimizer sees whole matrices.

    Raises:
        UsageError: a field is not one of these.

    >>> print(StateSharding(3, (3, 1), "parameter"), StateSharding(1))
    zero=3, state_shares=[3, 1], state_align='parameter' zero=1
    """

    level: int
    shares: tuple[float, ...] = ()
    align: Align = "row"

    def __post_init__(self) -> None:
        if isinstance(self.level, bool) or self.level not in LEVELS:
            raise UsageError(f"zero is {self.level!r}; it can be 0, 1, 2 or 3")
        if self.align not in get_args(Align):
            raise UsageError(f"state_align is {self.align!r}; it can be 'row' or 'parameter'")
        if any(not math.isfinite(share) or share < 0 for share in self.shares) or (
            self.shares and not sum(self.shares)
        ):
            raise UsageError(
                f"state_shares are {list(self.shares)}: they must be numbers of at least 0, and one of them more"
            )
        if not self.level and (self.shares or self.align != "row"):
            raise UsageError("state_shares and state_align say how zero= divides the state: give zero=1, 2 or 3")

    def __str__(self) -> str:
        said = [f"zero={self.level}"]
        said += [f"state_shares=[{', '.join(f'{share:g}' for share in self.shares)}]"] if self.shares else []
        said += [f"state_align={self.align!r}"] if self.align != "row" else []
        return ", ".join(said)

    def of_stage(self, ranks: Sequence[int], world_size: int) -> StateSharding:
        """The same for a stage on these ranks, where shares may be of each rank of the launch."""
        if len(self.shares) != world_size:
            return self
        own = tuple(self.shares[rank] for rank in ranks)
        if not sum(own) and len(own) > 1:
            raise UsageError(f"state_shares are 0 for all of the ranks {list(ranks)}, which must own what they train")
        return replace(self, shares=own if sum(own) else ())


def shares_of(ranks: Sequence[int], states: Mapping[tuple[int, ...], StateSharding]) -> tuple[float, ...]:
    """The shares of the ranks that sum a bucket.

    Args:
        ranks: that sum it.
        states: of the stages that it is of, by the ranks of each; a rank's share is that in the first which has it.

    Raises:
        UsageError: none of these ranks has any, or the shares are neither for all ranks of a stage nor for as many as
            these.
    """
    found: dict[int, float] = {}
    for everyone, state in states.items():
        shares = state.shares or (1.0,) * len(everyone)
        if len(shares) not in (len(everyone), len(ranks)):
            many = f"{len(ranks)} numbers, or " if len(ranks) < len(everyone) else ""
            raise UsageError(
                f"state_shares has {len(shares)} numbers, but gradients are summed over {len(ranks)} ranks, "
                f"{list(ranks)}: give {many}one number for each of the {len(everyone)} ranks of the stage, or one for "
                "each rank of the launch"
            )
        owners = everyone if len(shares) == len(everyone) else ranks
        for rank, share in zip(owners, shares, strict=True):
            found.setdefault(rank, share)
    own = tuple(found[rank] for rank in ranks)
    if not sum(own):
        raise UsageError(f"state_shares are 0 for all of the ranks {list(ranks)}, which must own what they train")
    return own


def stretches(
    shapes: Iterable[Sequence[int]], shares: Sequence[float], align: Align, owed: list[float]
) -> tuple[int, ...]:
    """The bounds of the stretches of parameters that lie one after the other.

    Args:
        shapes: of the parameters.
        shares: of the ranks.
        align: where a stretch may end.
        owed: elements that the ranks before each bound have got too few so far, which these give them; it is changed.

    >>> stretches([(4, 2), (3,)], (1, 1), "row", [0.0]), stretches([(4, 2), (3,)], (3, 1), "parameter", [0.0])
    ((0, 6, 11), (0, 8, 11))
    """
    places, end = [0], 0
    for shape in shapes:
        size = prod(shape)
        row = size if align == "parameter" or not shape else size // max(shape[0], 1)
        if row:
            places += range(end + row, end + size + 1, row)
        end += size
    bounds, ideal = [0], 0.0
    for place, share in enumerate(shares[:-1]):
        ideal += share / sum(shares) * end
        wanted = ideal + owed[place]
        after = bisect_left(places, wanted)
        nearest = min(places[max(after - 1, 0) : after + 1], key=lambda found: abs(found - wanted))
        bounds.append(max(nearest, bounds[-1]))
        owed[place] = wanted - bounds[-1]
    return (*bounds, end)
