"""Devices of stages from a plan: annotations and plan must agree, and the plan's ranks and shares are used.

The plan decides the devices of each stage, their order and shares; the annotations decide how regions use them. So the
mesh is built from the annotations and compared with the plan's. This module decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from whale.errors import InfeasibleError, PlanMismatchError, UsageError
from whale.ir.cluster import Device
from whale.ir.plan import Plan, PlanStage
from whale.ir.strategy import Role, Strategy, role_of_axis
from whale.ir.virtual_device import MeshAxis, RegionRoles, VirtualDevice
from whale.planner.assignment.assign import Assignment, StagePlacement, StageRequest, axes_of, outer_degree, selected
from whale.planner.assignment.mesh import lay_out

__all__ = ["axis_role", "place_as_planned"]


def place_as_planned(
    stages: Sequence[StageRequest],
    devices: Sequence[Device],
    plan: Plan,
    *,
    default: Strategy | None = None,
    dtype: str = "float32",
) -> Assignment:
    """Assign to every stage the devices in *plan*.

    Args:
        stages: as annotated, in the order of the pipeline.
        devices: in the order of ranks.
        plan: has axes for its stages.
        default: the strategy of operators without an annotation.
        dtype: the dtype whose speed the VirtualDevices have.

    Raises:
        PlanMismatchError: another number of stages, or a stage whose annotations request another mesh; the message
            names the field.
    """
    if len(plan.stages) != len(stages):
        raise PlanMismatchError(
            f"the plan has {len(plan.stages)} stages, but the model has {len(stages)}: "
            f"{', '.join(stage.name for stage in stages[:6])}; annotate the model as it was when the plan was made, or "
            "make a new plan"
        )
    replicas = {_num_replicas(stage) for stage in plan.stages}
    if len(replicas) > 1:
        raise PlanMismatchError(
            f"the plan's stages have axes 'data' of sizes {sorted(replicas)} (1 where there is none); whole pipelines "
            "side by side have all stages"
        )
    num_replicas = replicas.pop()
    if num_replicas % outer_degree(stages):
        raise PlanMismatchError(
            f"the plan's axis 'data' has size {num_replicas}, which is no multiple of the {outer_degree(stages)} "
            "replicas that the model's annotations ask for around its stages"
        )
    placed = tuple(
        _place(index, request, planned, num_replicas, devices, default, dtype)
        for index, (request, planned) in enumerate(zip(stages, plan.stages, strict=True))
    )
    busy = {rank for stage in placed for rank in stage.device.ranks}
    return Assignment(
        stages=placed,
        num_replicas=num_replicas,
        idle_ranks=tuple(device.rank for device in devices if device.rank not in busy),
    )


def _num_replicas(stage: PlanStage) -> int:
    first = next(iter(stage.axes or ()), None)
    return first.size if first is not None and first.name == "data" else 1


def _place(
    index: int,
    request: StageRequest,
    planned: PlanStage,
    num_replicas: int,
    devices: Sequence[Device],
    default: Strategy | None,
    dtype: str,
) -> StagePlacement:
    field = f"the plan's stages.{index}"
    degree = len(planned.ranks) // num_replicas
    asked = request.stage.strategy.degree if request.stage is not None else None
    if asked not in (None, degree):
        raise PlanMismatchError(
            f"{field}.ranks has {degree} ranks for each replica, but {request.name} asks for {asked}; change one "
            "of them"
        )
    for selection in selected(request, devices):
        outside = [rank for rank in planned.ranks if rank not in selection.ranks]
        if outside:
            raise PlanMismatchError(
                f"{field}.ranks has rank {outside[0]}, which {selection.name} of {request.name} does not select; "
                "change one of them"
            )
    try:
        axes, roles = axes_of(lay_out(request.regions, degree, owner=request.name, default=default), num_replicas)
    except (InfeasibleError, UsageError) as error:
        raise PlanMismatchError(f"{field}.ranks has {degree} ranks for each replica: {error}") from error
    given = [(axis.name, axis.size, axis.role) for axis in planned.axes or ()]
    found = [(axis.name, axis.size, axis_role(roles, position)) for position, axis in enumerate(axes)]
    if given != found:
        raise PlanMismatchError(
            f"{field}.axes are {_shown(given)}, but the annotations of {request.name} make {_shown(found)}; annotate "
            "the model as it was when the plan was made, or make a new plan"
        )
    ordered = [devices[rank] for rank in planned.ranks]
    device = VirtualDevice(
        stage=index,
        ranks=planned.ranks,
        axes=tuple(
            MeshAxis(name=axis.name, size=axis.size, shares=tuple(axis.shares) or (1,) * axis.size)
            for axis in planned.axes or ()
        ),
        speeds=tuple(device.speed(dtype) for device in ordered),
        memory_bytes=tuple(device.memory_bytes for device in ordered),
        types=tuple(device.type.name for device in ordered),
    )
    return StagePlacement(device=device, roles=roles)


def axis_role(roles: RegionRoles, position: int) -> Role:
    """The role of an axis in a plan."""
    return role_of_axis(of_region[position] for of_region in roles.values())


def _shown(axes: Sequence[tuple[str, int, str]]) -> str:
    return ", ".join(f"{name} of {size}" for name, size, _ in axes) or "none"
