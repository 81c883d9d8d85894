"""Costs of stages and messages as data, and those that are known already, by keys that say all that they depend on."""

from __future__ import annotations

from typing import Any, NamedTuple

from whale.planner.cost.layer_cost import LayerMemo
from whale.planner.cost.overlap import Beside

__all__ = ["NOTHING", "Hop", "Memo", "Shape", "StageCost"]

Shape = tuple[tuple[int, int, int, int], ...]
"""Location of a group: kind of node, its devices and adapters there, and the number of such consecutive nodes."""


class StageCost(NamedTuple):
    """A micro-batch through a stage, or a layer, on one replica: seconds of its slowest device, bytes of its fullest.

    Attributes:
        forward, backward: seconds, exposed collectives included.
        weights: the part of ``backward`` that only gradients of weights need.
        communication: seconds of collectives among ``forward`` + ``backward``.
        kept: bytes of a micro-batch from forward to backward; ``working``: beside them while a layer runs.
        update: seconds of the optimizer, once a step.
        measured: whether all times were measured.
        launched: seconds among ``forward`` + ``backward`` of layers that wait for the host's launches.
        accumulation: seconds more of a later micro-batch's ``backward``, of a layer that is priced for the first.
        hosted: bytes of a micro-batch that are on the host from forward to backward.
    """

    forward: float
    backward: float
    weights: float
    communication: float
    kept: float
    working: float
    update: float
    measured: bool
    launched: float = 0.0
    accumulation: float = 0.0
    hosted: float = 0.0


NOTHING = StageCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, True)


class Hop(NamedTuple):
    """Cost of a message between two tensor groups: seconds besides its bytes, and bytes per second."""

    latency: float
    bandwidth: float


class Memo(LayerMemo):
    """Cache of costs for one profile, precision, stack and optimizer; others empty it.

    Keys say all that a price depends on, so it may be handed from a search to the next one on other machines.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of: tuple[Any, ...] = ()
        self.kinds_of_nodes: dict[Any, int] = {}
        self.kinds_of_groups: dict[Any, int] = {}
        self.layers: dict[Any, StageCost] = {}
        self.collectives: dict[Any, float] = {}
        self.hops: dict[Any, Hop] = {}
        self.places: dict[Any, int] = {}
        self.exchanges: dict[Any, Any] = {}
        self.besides: dict[Any, Beside] = {}
        self.buckets: dict[tuple[Shape, bool], int] = {}
        self.least_bandwidths: dict[Shape, float] = {}

    def begin(self, *of: Any) -> Memo:
        """Itself, emptied if it has prices of something else."""
        if self._of != of:
            self.__dict__.update(Memo().__dict__)
            self._of = of
        return self
