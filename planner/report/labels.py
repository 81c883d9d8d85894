"""Text labels of ranks, stages, device types and bytes. It knows plans and no picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from whale.ir.cluster import Cluster
from whale.ir.plan import Plan, PlanStage
from whale.ir.ranks import write_ranks
from whale.planner.report.markup import short

__all__ = ["decision_columns", "ranks_text", "shares_text", "stages_of", "stages_text", "type_of_name", "types_of"]


def types_of(plan: Plan, cluster: Cluster | None) -> Mapping[int, str]:
    """The device type of each rank, from the cluster, the plan or its prediction."""
    if cluster is not None:
        return {device.rank: device.type.name for device in cluster.devices}
    if plan.cluster is not None and plan.cluster.devices:
        return {rank: name for name, ranks in plan.cluster.devices.items() for rank in ranks}
    if plan.prediction is not None:
        return {one.rank: type_of_name(one.device, one.rank) for one in plan.prediction.memory}
    return {}


def type_of_name(device: str, rank: int) -> str:
    """The type in a device name, which ends with its rank.

    >>> type_of_name("A100:3", 3), type_of_name("left:2", 3)
    ('A100', 'left:2')
    """
    return device.removesuffix(f":{rank}")


def stages_of(stages: Iterable[Sequence[int]]) -> Mapping[int, tuple[int, ...]]:
    """The stages of each rank, from the ranks of each stage.

    >>> stages_of([(0, 1), (1, 2)])
    {0: (0,), 1: (0, 1), 2: (1,)}
    """
    found: dict[int, tuple[int, ...]] = {}
    for index, ranks in enumerate(stages):
        for rank in ranks:
            found[rank] = (*found.get(rank, ()), index)
    return found


def stages_text(stages: Sequence[int]) -> str:
    """Label stages.

    >>> stages_text((2,)), stages_text((0, 4)), stages_text(())
    ('stage 2', 'stages 0, 4', 'no stage')
    """
    if not stages:
        return "no stage"
    return ("stage " if len(stages) == 1 else "stages ") + ", ".join(map(str, write_ranks(stages)))


def ranks_text(ranks: Sequence[int], most: int = 40) -> str:
    """Label ranks, with at most ``most`` characters after the word.

    >>> ranks_text((3,)), ranks_text((0, 1, 2, 8))
    ('rank 3', 'ranks 0-2, 8')
    """
    word = "rank " if len(ranks) == 1 else "ranks "
    return word + short(", ".join(map(str, write_ranks(sorted(ranks)))), most)


def decision_columns(stages: Sequence[PlanStage]) -> dict[str, list[str]]:
    """The decisions of stages besides devices and meshes, in words, by name: those that any of them has.

    >>> decision_columns([PlanStage(ranks=(0,), recompute="full"), PlanStage(ranks=(1,), distinct=0.25)])
    {'recompute': ['full', 'none'], 'distinct': ['all', '0.25']}
    """
    columns: dict[str, list[str]] = {
        "recompute": [stage.recompute or "none" for stage in stages],
        "zero": [
            "0" if stage.state is None else f"{stage.state.level}{shares_text(stage.state.shares)}" for stage in stages
        ],
        "offload": [stage.offload or "none" for stage in stages],
        "reduce": [stage.reduce or "mean" for stage in stages],
        "distinct": ["all" if stage.distinct is None else f"{stage.distinct:g}" for stage in stages],
    }
    usual = {"zero": "0", "reduce": "mean", "distinct": "all"}
    return {name: found for name, found in columns.items() if {*found} != {usual.get(name, "none")}}


def shares_text(shares: Sequence[float]) -> str:
    """Shares that are not equal, in parentheses.

    >>> shares_text((1, 0.5)), shares_text(())
    (' (1:0.5)', '')
    """
    if not shares:
        return ""
    return f" ({':'.join(f'{share:g}' for share in shares[:8])}{':...' if len(shares) > 8 else ''})"
