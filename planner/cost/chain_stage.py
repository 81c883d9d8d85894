"""A stage as the cost model evaluates it: a range of a profile's chain of layers, and its ranks, degrees and rows.

Data only. The stage of a plan file, with module paths and mesh axes, is `whale.ir.plan.PlanStage`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from whale.ir.state import StateSharding
from whale.ir.strategy import Offload, Offloading, Recompute

__all__ = ["ChainStage"]


@dataclass(frozen=True, kw_only=True)
class ChainStage(Offloading):
    """A stage: a range of the chain of layers on a mesh of ranks.

    Attributes:
        first, last: its layers, [first, last) of the profile's chain.
        ranks: row-major over replicas and the devices of each, ascending along both. Several stages may have the same
            ranks, which then run them in turn.
        data, tensor: degrees.
        rows: of a micro-batch, for each replica; a replica may have none.
        expert: degree; the ranks of an expert group divide the rows of a replica, and only their experts are split.
        context: degree; the ranks of a context group cut each row, such as its tokens.
        recompute: what its backward computes again, as Whale runs it.
        state: how its replicas divide their state, as Whale runs it; None: all have all.
        offload: what is in the host's memory, as Whale runs it.
    """

    first: int
    last: int
    ranks: tuple[int, ...]
    data: int
    tensor: int
    rows: tuple[float, ...]
    expert: int = 1
    context: int = 1
    recompute: Recompute = "none"
    state: StateSharding | None = None
    offload: Offload = "none"

    @property
    def level(self) -> int:
        """How much of the state is divided, as ``zero`` of ``parallelize`` says; on the host it is in stretches
        always."""
        if self.offload != "none" and self.state_on_host:
            return max(1, self.state.level if self.state is not None else 1)
        return self.state.level if self.state is not None and len(self.data_group) > 1 else 0

    def share(self, index: int) -> float:
        """The part of the state that a replica owns.

        >>> state = StateSharding(1, (3, 1))
        >>> ChainStage(first=0, last=1, ranks=(0, 1), data=2, tensor=1, rows=(1, 1), state=state).share(1)
        0.25
        """
        shares = self.state.shares if self.state is not None else ()
        each = len(shares) // self.data
        return sum(shares[index * each : (index + 1) * each]) / sum(shares) if shares else 1 / self.data

    @property
    def owned(self) -> tuple[float, ...]:
        """The parts of the state that replicas own; () are equal ones."""
        if self.state is None or not self.state.shares or not self.level:
            return ()
        found = tuple(self.share(index) for index in range(self.data))
        return found if len(set(found)) > 1 else ()

    @property
    def size(self) -> int:
        """Ranks of a replica."""
        return self.tensor * lcm(self.expert, self.context)

    @property
    def degrees(self) -> tuple[int, int, int]:
        """Data, tensor, expert."""
        return self.data, self.tensor, self.expert

    @property
    def layers(self) -> range:
        """Its layers."""
        return range(self.first, self.last)

    @property
    def data_group(self) -> tuple[int, ...]:
        """The ranks that hold the same dense parameters as its first."""
        return self.ranks[:: self.tensor]

    @property
    def row_group(self) -> tuple[int, ...]:
        """The ranks that hold the same dense parameters as its first and divide the rows of a micro-batch with it."""
        return self.ranks[:: self.tensor * self.context]

    def slice(self, index: int) -> tuple[int, ...]:
        """The ranks of a replica.

        >>> ChainStage(first=0, last=1, ranks=(0, 1, 2, 3), data=2, tensor=2, rows=(1, 1)).slice(1)
        (2, 3)
        """
        return self.ranks[index * self.size : (index + 1) * self.size]
