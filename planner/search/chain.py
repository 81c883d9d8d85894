"""The model as a chain of parts that no cut goes through, with what is decided about them. It knows no prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from whale.planner.search.choices import Fixed
from whale.planner.search.devices import Mesh

__all__ = ["Chain"]

Integers = np.ndarray[Any, np.dtype[np.int64]]

Degree = tuple[int | None, int | None, int | None]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The model as parts that no cut goes through.

    Attributes:
        bounds: the first layer of each part, and the number of layers.
        starts: parts that must begin a stage.
        degrees: for each part (data, tensor, expert) where they are decided, else None.
    """

    bounds: tuple[int, ...]
    starts: frozenset[int] = frozenset()
    degrees: tuple[Degree, ...] = ()

    @classmethod
    def of(cls, paths: Sequence[str], num_layers: int, fixed: Fixed | None) -> Chain:
        """The parts of a chain: a stage cannot begin at a layer without a path, if others have one, nor inside of what
        is fixed to be one."""
        fixed = fixed or Fixed()
        cuts = {layer for layer in range(num_layers) if not paths or paths[layer]} | {0, *fixed.starts}
        for first, last in fixed.uncut:
            cuts -= set(range(first + 1, last))
        bounds = (*sorted(cuts), num_layers)
        position = {bound: index for index, bound in enumerate(bounds)}
        degrees: list[Degree] = []
        for first, last in pairwise(bounds):
            own = [one for one in fixed.degrees if one.first < last and first < one.last]
            data = next((one.data for one in own if one.data is not None), None)
            tensor = next((one.tensor for one in own if one.tensor is not None), None)
            expert = next((one.expert for one in own if one.expert is not None), None)
            degrees.append((data, tensor, expert))
        starts = frozenset(position[start] for start in fixed.starts)
        return cls(bounds=bounds, starts=starts, degrees=tuple(degrees))

    def __len__(self) -> int:
        """Parts."""
        return len(self.bounds) - 1

    @cached_property
    def last_start(self) -> Integers:
        """For each end of a stage the first part that it may reach back to, by what must begin a stage."""
        found = np.zeros(len(self) + 1, dtype=np.int64)
        for start in sorted(self.starts):
            found[start + 1 :] = start
        return found

    def allows(self, mesh: Mesh) -> Integers:
        """For each end of a stage on a mesh the first part that it may reach back to, by all that is decided."""
        if not self._decided:
            return self.last_start
        found = self.last_start.copy()
        for part, degrees in self._decided:
            data, tensor, expert = degrees
            whole = mesh.data * (mesh.expert if expert is None else 1)  # of what is no expert there are more replicas
            fits = data in (None, mesh.data, whole)
            if not fits or tensor not in (None, mesh.tensor) or expert not in (None, mesh.expert):
                found[part + 1 :] = np.maximum(found[part + 1 :], part + 1)
        return found

    @cached_property
    def _decided(self) -> list[tuple[int, Degree]]:
        """Parts whose degrees are decided, with these."""
        return [(part, degrees) for part, degrees in enumerate(self.degrees) if any(one is not None for one in degrees)]
