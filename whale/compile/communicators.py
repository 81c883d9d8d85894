"""The process groups of a compiled step, in the order in which all ranks make them and use them first.

A process group is a communicator on NCCL: it costs memory on its ranks, and all ranks of the launch meet where it is
made. So there is one set of ranks for each line of a mesh along which programs communicate, for each set that sums
gradients, for each that gathers parameters, and for each two stages that exchange values in a direction; sets without
common ranks are made together.
Knows compilations; makes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from whale.compile.compilation import Compilation
from whale.graph.values import has_sparse_gradient
from whale.ir.check import CollectiveCall
from whale.ir.program import Direction, Edge, StageSpec, box_size
from whale.runtime.launch import families

__all__ = ["DIRECTIONS", "ON_HOSTS", "PURPOSES", "Communicator", "communicators", "message_ranks", "start_up"]

PURPOSES = (
    "inside stages", "sums of gradients", "gathers of parameters", "sums of columns", "forward", "backward",
    "sums of gradients on hosts", "sums of columns on hosts",
)  # fmt: skip
"""Uses of process groups that must not wait for each other, in the order in which groups are made."""

ON_HOSTS = frozenset(("sums of gradients on hosts", "sums of columns on hosts"))
"""Purposes of groups for tensors in the host's memory."""

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


class Communicator(NamedTuple):
    """Ranks that communicate for one purpose."""

    purpose: str
    ranks: tuple[int, ...]


def communicators(compilation: Compilation, *, for_messages: bool) -> tuple[Communicator, ...]:
    """The process groups of more than one rank, in the order of their making.

    Args:
        compilation: of the model.
        for_messages: whether messages have groups of their own: on NCCL all that is started on a group runs one after
            another.
    """
    sums = {
        name: {
            ranks
            for spec in compilation.reduces
            if spec.on_host == on_host
            for ranks in (spec.ranks, *([] if spec.adasum is None else [spec.adasum.ranks]))
        }
        for name, on_host in (("sums of gradients", False), ("sums of gradients on hosts", True))
    }
    on_device, on_host = _columns(compilation)
    sets: dict[str, set[tuple[int, ...]]] = {
        "inside stages": _lines(compilation),
        "gathers of parameters": {unit.spec.ranks for unit in compilation.units},
        "sums of columns": on_device,
        "sums of columns on hosts": on_host,
        **sums,
    }
    if for_messages:
        for direction in DIRECTIONS:
            edges = [edge for edge in compilation.edges if _has_messages(edge, direction)]
            sets[direction] = {message_ranks(compilation.rank_specs, edge) for edge in edges}
    return tuple(
        Communicator(purpose, ranks)
        for purpose in PURPOSES
        for ranks in sorted(sets.get(purpose, ()))
        if len(ranks) > 1
    )


def _lines(compilation: Compilation) -> set[tuple[int, ...]]:
    """The lines of meshes along which the programs of stages communicate: all along an axis, or none."""
    found = set[tuple[int, ...]]()
    for place, stage in enumerate(compilation.stages):
        axes = compilation.communicating(place)
        found |= {tuple(sorted(group)) for axis in axes for group in stage.mesh.groups(axis)}
    return found


def _columns(compilation: Compilation) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """The ranks that have columns of the same rows of a table with sparse gradients, whose rows have one state: of
    tables on devices, and of those on hosts."""
    captured = compilation.captured
    names = {
        captured.parameters[node.name]
        for node in captured.graph.nodes
        if node.op == "placeholder" and node.name in captured.parameters and has_sparse_gradient((node, 0))
    }
    shards = compilation.shards() if names else {}
    hosted = compilation.tables_on_host

    def together(names: set[str]) -> set[tuple[int, ...]]:
        return {shards[name].ranks_of_columns(rank) for name in names for rank in shards[name].parts} - {()}

    return together(names - hosted), together(names & hosted)


def _has_messages(edge: Edge, direction: Direction) -> bool:
    """Whether ranks send something of an edge to others."""
    transfers = edge.forward if direction == "forward" else edge.backward
    return any(t.source != t.target and box_size(t.target_box) for own in transfers for t in own)


def message_ranks(stages: Sequence[StageSpec], edge: Edge) -> tuple[int, ...]:
    """The ranks of both ends of an edge."""
    return tuple(sorted({*stages[edge.source_stage].ranks, *stages[edge.target_stage].ranks}))


def start_up(wanted: Sequence[Communicator], rank: int, size: int) -> Iterator[CollectiveCall]:
    """Collectives of a rank before its first step, for :func:`whale.ir.check.check_collectives`: each family
    of groups is made by all ranks together, and then each group is used once, in the same order."""
    everyone = tuple(range(size))
    for purpose in PURPOSES:
        sets = [ranks for other, ranks in wanted if other == purpose]
        for family in families(sets):
            yield CollectiveCall(f"groups {purpose} {family}", "split", everyone, "", ())
    for purpose, ranks in wanted:
        if rank in ranks:
            yield CollectiveCall(f"the first use {purpose}", "all_reduce", ranks, "", ())
