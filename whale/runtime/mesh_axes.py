"""The ranks along one axis of a stage's mesh, with a process group, for communication that a script asks for.

The groups are others than those of steps, and are made when a script first asks for an axis. Knows meshes and groups;
no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from whale.errors import UsageError
from whale.ir.virtual_device import VirtualDevice
from whale.runtime.agreement import meet
from whale.runtime.groups import Groups
from whale.runtime.launch import World

__all__ = ["Axis", "MeshAxes"]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The ranks that differ from this one only along one axis of the mesh of a stage: a ``group`` for
    ``whale.all_reduce`` and the other collectives.

    Attributes:
        name: of the axis, as in the plan: ``data``, ``replicate`` or ``split``, numbered from the second.
        ranks: in the order of the axis; this one alone where no stage of it has the axis.
        index: of this rank among them.
        group: their ``torch.distributed`` process group; None for one rank.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: Any = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


class MeshAxes:
    """The axes of the meshes of one model's stages.

    Args:
        world: all ranks.
        meshes: of all stages.
        groups: makes process groups.
    """

    def __init__(self, world: World, meshes: Sequence[VirtualDevice], groups: Groups) -> None:
        self._world, self._meshes, self._groups = world, tuple(meshes), groups
        self._made: dict[tuple[int, ...], Any] = {}
        self._asked: set[str] = set()

    def axis(self, name: str, stage: int | None = None) -> Axis:
        """The ranks along an axis. All ranks must call it, also those whose stages do not have it.

        Raises:
            UsageError: no stage has such an axis, or this rank has it in several stages, with different ranks.
            WorkerError: a rank did not come within the timeout; names it.
        """
        known = list(dict.fromkeys(axis.name for mesh in self._meshes for axis in mesh.axes))
        if name not in known:
            shown = f"there are {', '.join(map(repr, known))}" if known else "every stage has one device"
            raise UsageError(f"no stage has a mesh axis {name!r}; {shown}")
        if stage is not None and not 0 <= stage < len(self._meshes):
            raise UsageError(f"stage={stage!r} does not exist: the model has {len(self._meshes)} stages")
        lines = {
            (mesh.stage, mesh.group(position, rank))
            for mesh in self._meshes
            for position, axis in enumerate(mesh.axes)
            if axis.name == name
            for rank in mesh.ranks
        }
        if name not in self._asked:
            meet(self._world, f"all ranks to ask for the mesh axis {name!r}")
            self._made |= self._groups.make(ranks for _, ranks in lines if ranks not in self._made)
            self._asked.add(name)
        rank = self._world.rank
        own = {ranks for number, ranks in lines if rank in ranks and stage in (None, number)}
        if len(own) > 1:
            raise UsageError(
                f"rank {rank} has the mesh axis {name!r} in several stages, along which it meets other ranks in each: "
                "say which, as in mesh_axis(model, name, stage=0)"
            )
        ranks = next(iter(own), (rank,))
        return Axis(name=name, ranks=ranks, index=ranks.index(rank), group=self._made.get(ranks))
