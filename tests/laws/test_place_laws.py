"""Properties of every assignment of stages to devices."""

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from whale.errors import AnnotationError, InfeasibleError
from whale.ir.cluster import Cluster
from whale.ir.strategy import Kind, Scope, ScopePath, Strategy
from whale.planner.assignment.assign import Preference, StageRequest, place

KINDS: st.SearchStrategy[Kind] = st.sampled_from(["replicate", "split"])


@st.composite
def fitting_requests(draw: st.DrawFn) -> tuple[list[StageRequest], int]:
    """Stages whose regions divide them, and the devices of one model replica; powers of two, so that every mesh
    exists."""
    found: list[StageRequest] = []
    total = 0
    for index in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from([1, 2, 4, 8, 16]))
        total += size
        regions: list[ScopePath] = [()]
        for region in range(draw(st.integers(0, 3))):
            left = size
            degrees: list[int | None] = []
            for _ in range(draw(st.integers(1, 3))):
                degrees.append(draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if left % n == 0])))
                left //= degrees[-1] or 1
            if draw(st.booleans()):
                degrees[draw(st.integers(0, len(degrees) - 1))] = None
            regions.append(
                tuple(
                    Scope(strategy=Strategy(kind=draw(KINDS), degree=degree), region=f"{index}.{region}.{level}")
                    for level, degree in enumerate(degrees)
                )
            )
        stage = Scope(strategy=Strategy(kind="stage", degree=size), region=f"stage#{index}")
        found.append(StageRequest(stage=stage, regions=tuple(regions)))
    return found, total


@st.composite
def requests(draw: st.DrawFn) -> list[StageRequest]:
    """Stages with a number, with what their regions need, or with a share of what is left."""
    found: list[StageRequest] = []
    for index in range(draw(st.integers(1, 4))):
        degree = draw(st.sampled_from([None, None, 1, 2, 3, 6]))
        inner = Strategy(kind=draw(KINDS), degree=draw(st.sampled_from([None, 1, 2, 3])))
        path = (Scope(strategy=inner, region=f"region#{index}"),)
        stage = Scope(strategy=Strategy(kind="stage", degree=degree), region=f"stage#{index}")
        found.append(StageRequest(stage=stage, regions=(path,)))
    return found


@given(fitting_requests(), st.integers(1, 3), st.sampled_from(["consecutive", "replica_in_node"]))
def test_every_device_serves_one_stage_and_every_region_gets_what_it_asked_for(
    drawn: tuple[list[StageRequest], int], num_replicas: int, prefer: Preference
) -> None:
    stages, total = drawn
    devices = Cluster.homogeneous(total * num_replicas).devices
    assignment = place(stages, devices, prefer=prefer)
    assert assignment.num_replicas == num_replicas
    assert assignment.idle_ranks == ()
    assert sorted(rank for stage in assignment.stages for rank in stage.device.ranks) == list(range(len(devices)))
    for request, stage in zip(stages, assignment.stages, strict=True):
        assert request.stage is not None
        shape = stage.device.shape
        assert prod(shape) == num_replicas * (request.stage.strategy.degree or 0)
        for path in request.regions:
            roles = stage.roles.of(path)
            assert len(roles) == len(shape)
            num_parts = prod(size for size, role in zip(shape, roles, strict=True) if role == "split")
            numbered = [scope.strategy.degree for scope in path if scope.strategy.degree is not None]
            rest = prod(shape) // num_replicas // prod(numbered)
            asked = [scope.strategy.degree or rest for scope in path if scope.strategy.kind == "split"]
            assert num_parts == prod(asked)


@given(fitting_requests(), st.integers(1, 3))
def test_both_preferences_give_the_same_meshes(drawn: tuple[list[StageRequest], int], num_replicas: int) -> None:
    stages, total = drawn
    devices = Cluster.homogeneous(total * num_replicas).devices
    first = place(stages, devices)
    second = place(stages, devices, prefer="replica_in_node")
    assert [stage.roles for stage in first.stages] == [stage.roles for stage in second.stages]
    assert [stage.device.axes for stage in first.stages] == [stage.device.axes for stage in second.stages]


@given(requests(), st.integers(1, 48))
def test_the_counts_that_an_error_names_would_do(stages: list[StageRequest], num_devices: int) -> None:
    try:
        place(stages, Cluster.homogeneous(num_devices).devices)
    except InfeasibleError as error:
        named = str(error).rpartition("use ")[2].partition(" devices")[0]
        for count in map(int, named.split(" or ")):
            try:
                place(stages, Cluster.homogeneous(count).devices)
            except AnnotationError:
                continue  # a region contradicts its stage, whatever the number of devices
    except AnnotationError:
        pass
