"""Stages on devices: the placement vectors, uneven machines, selections, and what does not fit."""

from dataclasses import replace

import pytest

from whale.errors import AnnotationError, InfeasibleError, UsageError
from whale.ir.cluster import Cluster, Device, DeviceType
from whale.ir.strategy import DeviceSelection, Scope, ScopePath, Strategy
from whale.planner.assignment.assign import Assignment, StageRequest, place


def nest(text: str) -> ScopePath:
    path: list[Scope] = []
    words = ""
    for word in filter(None, text.split(" > ")):
        kind, _, number = word.rstrip(")").partition("(")
        words += f"/{word}"
        strategy = Strategy(kind=kind, degree=int(number) if number else None)  # type: ignore[arg-type]
        path.append(Scope(strategy=strategy, region=words))
    return tuple(path)


def within(**selection: object) -> Scope:
    return Scope(strategy=Strategy(kind="cluster", devices=DeviceSelection(**selection)), region=f"cluster {selection}")  # type: ignore[arg-type]


def staged(*stages: str, outer: ScopePath = ()) -> list[StageRequest]:
    """Stages as in ``"stage(4): replicate(2) > split(2), split(4)"``."""
    found = []
    for index, text in enumerate(stages):
        head, _, regions = text.partition(":")
        (scope,) = nest(head)
        found.append(
            StageRequest(
                stage=replace(scope, region=f"s{index}"),
                outer=outer,
                regions=tuple(nest(region.strip()) for region in regions.split(",")),
            )
        )
    return found


def whole(*regions: str) -> list[StageRequest]:
    return [StageRequest(stage=None, regions=tuple(map(nest, regions)))]


def equal(num_devices: int, per_node: int | None = None) -> tuple[Device, ...]:
    return Cluster.homogeneous(num_devices, num_devices_per_node=per_node).devices


def mixed(*types: str) -> tuple[Device, ...]:
    """One device of each type, in nodes of equal types."""
    made = {
        name: DeviceType.of(name, speed={"float32": speed}, memory_bytes=2**34, memory_bandwidth=1e12)
        for name, speed in (("A100-SXM4", 4.0), ("A100-PCIe", 3.0), ("T4", 1.0))
    }
    return Cluster.of([(f"rack-{name}", made[name]) for name in types]).devices


MIXED = mixed(*["A100-SXM4"] * 4, *["T4"] * 4)


def ranks(assignment: Assignment) -> list[tuple[int, ...]]:
    return [stage.device.ranks for stage in assignment.stages]


def axes(assignment: Assignment) -> list[dict[str, int]]:
    return [{axis.name: axis.size for axis in stage.device.axes} for stage in assignment.stages]


# --- the placement vectors --------------------------------------------------------------------------------------------


def test_two_stages_of_one_on_four_devices_are_two_pipelines() -> None:
    assignment = place(staged("stage", "stage(1)"), equal(4))
    assert ranks(assignment) == [(0, 2), (1, 3)]
    assert axes(assignment) == [{"data": 2}, {"data": 2}]
    assert assignment.num_replicas == 2


def test_four_stages_of_one_on_four_devices_take_one_each() -> None:
    assignment = place(staged("stage", "stage", "stage", "stage"), equal(4))
    assert ranks(assignment) == [(0,), (1,), (2,), (3,)]
    assert axes(assignment) == [{}, {}, {}, {}]


def test_replicate_on_four_devices_is_four_replicas() -> None:
    assignment = place(whole("replicate"), equal(4))
    assert ranks(assignment) == [(0, 1, 2, 3)]
    assert axes(assignment) == [{"replicate": 4}]
    assert dict(assignment.stages[0].roles) == {"/replicate": ("replicate",), "": ("replicate",)}


def test_a_replicated_and_a_split_stage_on_eight_devices() -> None:
    assignment = place(staged("stage: replicate(2)", "stage: split(2)"), equal(8))
    first, second = (stage.device for stage in assignment.stages)
    assert [first.group(1, rank) for rank in (0, 4)] == [(0, 1), (4, 5)]
    assert [second.group(1, rank) for rank in (2, 6)] == [(2, 3), (6, 7)]
    assert axes(assignment) == [{"data": 2, "replicate": 2}, {"data": 2, "split": 2}]
    assert assignment.stages[1].roles["/split(2)"] == ("replicate", "split")


def test_replicas_of_a_stage_can_be_kept_in_one_node() -> None:
    assignment = place(staged("stage", "stage"), equal(4, per_node=2), prefer="replica_in_node")
    assert ranks(assignment) == [(0, 1), (2, 3)]
    assert axes(assignment) == [{"data": 2}, {"data": 2}]


# --- degrees ----------------------------------------------------------------------------------------------------------


def test_a_nest_in_a_stage_is_a_mesh_under_the_data_axis() -> None:
    assignment = place(staged("stage(8): replicate(2) > split(4), split(8)"), equal(16))
    assert axes(assignment) == [{"data": 2, "split": 2, "split2": 4}]
    assert assignment.stages[0].roles["/replicate(2)/split(4)"] == ("replicate", "replicate", "split")
    assert assignment.stages[0].device.coordinates(13) == (1, 1, 1)


def test_a_stage_without_a_number_takes_what_its_regions_need() -> None:
    assignment = place(staged("stage: replicate(2) > split(2)", "stage"), equal(5))
    assert ranks(assignment) == [(0, 1, 2, 3), (4,)]


def test_stages_that_want_the_rest_share_it_evenly() -> None:
    assignment = place(staged("stage(2)", "stage: replicate", "stage: split > replicate(3)"), equal(8))
    assert ranks(assignment) == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert assignment.num_replicas == 1


def test_a_model_without_stages_needs_what_its_numbers_say() -> None:
    assert axes(place(whole("split(4)", "replicate(2) > split(2)"), equal(8))) == [{"data": 2, "split": 2, "split2": 2}]
    assert axes(place(whole("replicate", "split"), equal(8))) == [{"split": 8}]


def test_a_model_without_annotations_is_replicated() -> None:
    assignment = place(whole(""), equal(3))
    assert axes(assignment) == [{"data": 3}]
    assert assignment.stages[0].roles.of(()) == ("replicate",)


def test_the_default_strategy_is_for_what_has_no_annotation() -> None:
    split = Strategy(kind="split")
    assert axes(place(whole(""), equal(4), default=split)) == [{"split": 4}]
    assert axes(place(whole(""), equal(4), default=Strategy(kind="split", degree=2))) == [{"data": 2, "split": 2}]
    in_stages = place(staged("stage(2)", "stage(2): replicate"), equal(4), default=split)
    assert [dict(stage.roles) for stage in in_stages.stages] == [
        {"": ("split",)},
        {"": ("replicate",), "/replicate": ("replicate",)},
    ]


def test_replicate_around_the_stages_is_the_data_axis() -> None:
    outer = nest("replicate(2)")
    assert ranks(place(staged("stage", "stage: split", outer=outer), equal(8))) == [(0, 4), (1, 2, 3, 5, 6, 7)]
    assert place(staged("stage", "stage", outer=outer), equal(8)).num_replicas == 4
    with pytest.raises(InfeasibleError, match="a multiple of 4 devices.*6.*use 4 or 8"):
        place(staged("stage", "stage", outer=outer), equal(6))


def test_devices_keep_their_ranks_speeds_and_memory() -> None:
    device = place(staged("stage(2)", "stage(2)"), MIXED).stages[1].device
    assert device.ranks == (2, 3, 6, 7)
    assert device.speeds == (4.0, 4.0, 1.0, 1.0)
    assert device.axis_speeds(0) == (8.0, 2.0)
    assert device.memory_bytes == (2**34,) * 4


@pytest.mark.parametrize(
    ("stages", "num_devices", "message"),
    [
        (
            staged("stage(3)", "stage(1)"),
            6,
            r"stage\(3\) \(s0\) on 3.*a multiple of 4 devices, and there are 6; use 4 or 8",
        ),
        (staged("stage(4)", "stage(4)"), 4, "a multiple of 8 devices, and there are 4; use 8 devices"),
        (
            whole("split(4)"),
            6,
            "the model with split.4. on 4 needs a multiple of 4 devices, and there are 6; use 4 or 8",
        ),
        (staged("stage(2)", "stage: split", "stage: split"), 5, "2 and a multiple of 2 devices.*5; use 4 or 6"),
        (staged("stage(4)", "stage: split"), 4, "4 and a multiple of 1 devices.*4; use 5 devices"),
        (staged("stage: replicate > split(4)"), 6, "a multiple of 4 devices.*6; use 4 or 8"),
    ],
)
def test_degrees_that_do_not_fit_name_the_nearest_counts_that_would(
    stages: list[StageRequest], num_devices: int, message: str
) -> None:
    with pytest.raises(InfeasibleError, match=message):
        place(stages, equal(num_devices))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (staged("stage(8): replicate(2) > split(3)"), "2 x 3 = 6 devices, which does not divide the 8"),
        (staged("stage: stage"), "cannot contain a stage"),
        (staged("stage", outer=nest("split(2)")), "cannot be cut into stages"),
        (staged("stage: replicate > split"), "neither"),
        (
            [*staged("stage", outer=nest("replicate(2)")), *staged("stage")],
            r"different outer replications \(2 around .* and 1 around",
        ),
    ],
)
def test_annotations_that_contradict_each_other_are_refused(stages: list[StageRequest], message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        place(stages, equal(8))


def test_arguments_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one"):
        place([], equal(1))
    with pytest.raises(UsageError, match="at least one"):
        place(whole(""), [])
    with pytest.raises(UsageError, match="'scattered'"):
        place(whole(""), equal(1), prefer="scattered")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="same rank"):
        place(whole(""), equal(1) * 2)
    with pytest.raises(UsageError, match="default strategy"):
        place(whole(""), equal(1), default=Strategy(kind="stage"))


# --- selections of devices --------------------------------------------------------------------------------------------


def test_stages_run_on_the_types_they_select() -> None:
    slow = staged("stage", outer=(within(layout="type", label="t4"),))
    fast = staged("stage", outer=(within(layout="type", label="A100"),))
    assert ranks(place([*slow, *fast], MIXED)) == [(4, 5, 6, 7), (0, 1, 2, 3)]


def test_a_stage_without_a_cluster_takes_what_the_others_leave() -> None:
    listed = staged("stage(2)", outer=(within(layout="ranks", ranks=(5, 1)),))
    assert ranks(place([*listed, *staged("stage: split")], equal(6))) == [(1, 5), (0, 2, 3, 4)]


def test_a_name_selects_a_device_or_a_whole_node() -> None:
    named = staged("stage: split", outer=(within(layout="name", label="rack-T4"),))
    assert ranks(place(named, MIXED)) == [(4, 5, 6, 7)]
    one = staged("stage", outer=(within(layout="name", label="T4:6"),))
    assert ranks(place(one, MIXED)) == [(6,)]


def test_a_cluster_inside_the_stage_selects_for_all_of_it() -> None:
    chosen = within(layout="type", label="T4")
    request = StageRequest(stage=nest("stage(2)")[0], regions=((chosen, *nest("split")), ()))
    assert ranks(place([request], MIXED)) == [(4, 5, 6, 7)]
    request = StageRequest(stage=None, regions=((chosen, *nest("replicate")), (chosen,), ()))
    assert ranks(place([request], MIXED)) == [(4, 5, 6, 7)]


def test_devices_that_no_stage_may_use_are_reported_idle() -> None:
    assert place(staged("stage: split", outer=(within(layout="type", label="T4"),)), MIXED).idle_ranks == (0, 1, 2, 3)
    assert place(whole(""), MIXED).idle_ranks == ()


def test_all_devices_is_no_restriction() -> None:
    everything = staged("stage", "stage", outer=(within(layout="all"),))
    assert ranks(place(everything, equal(4))) == [(0, 2), (1, 3)]


def test_rows_and_averages_give_each_stage_a_group() -> None:
    rows = staged("stage", "stage: split(2)", outer=(within(layout="row", number=4),))
    assert ranks(place(rows, equal(8))) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert ranks(place(rows, equal(16)))[0] == (0, 1, 2, 3, 8, 9, 10, 11)
    halves = staged("stage", "stage", outer=(within(layout="average", number=2),))
    assert ranks(place(halves, equal(6))) == [(0, 1, 2), (3, 4, 5)]


def test_selections_narrow_from_outer_to_inner() -> None:
    pairs = (within(layout="type", label="T4"), within(layout="row", number=2))
    assert ranks(place(staged("stage", "stage", outer=pairs), MIXED)) == [(4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"layout": "type", "label": "H100"}, r"cluster\(type='H100'\) matches no device; there are A100-SXM4, T4"),
        ({"layout": "type", "label": "A10"}, "matches no device"),
        ({"layout": "name", "label": "rack"}, "matches no device; there are rack-A100-SXM4, rack-T4, A100-SXM4:0"),
        ({"layout": "ranks", "ranks": (0, 8)}, "no rank 8 among ranks 0 to 7"),
    ],
)
def test_a_selection_that_matches_nothing_shows_what_there_is(selection: dict[str, object], message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        place(staged("stage", outer=(within(**selection),)), MIXED)


def test_selections_that_leave_unequal_replicas_are_refused() -> None:
    fast = staged("stage", outer=(within(layout="type", label="A100"),))
    slow = staged("stage", outer=(within(layout="ranks", ranks=(4, 5)),))
    with pytest.raises(InfeasibleError, match=r"same number of replicas.*4 times.*2 times"):
        place([*fast, *slow], MIXED)


def test_a_selection_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(InfeasibleError, match=r"cluster\(\[0, 1, 2\]\) selects 3; use 2 or 4"):
        place(staged("stage(2)", outer=(within(layout="ranks", ranks=(0, 1, 2)),)), MIXED)


def test_stages_that_select_the_same_devices_among_others_share_them() -> None:
    tables = staged("stage", outer=(within(layout="ranks", ranks=(0,)),))
    tables += staged("stage", outer=(within(layout="ranks", ranks=(1,)),))
    dense = staged("stage: replicate", outer=(within(layout="ranks", ranks=(0, 1)),))
    assert ranks(place([*tables, *dense], equal(2))) == [(0,), (1,), (0, 1)]


def test_a_stage_with_nothing_left_is_refused() -> None:
    chosen = staged("stage", outer=(within(layout="ranks", ranks=(0, 1)),))
    with pytest.raises(InfeasibleError, match="select all 2 devices"):
        place([*chosen, *staged("stage")], equal(2))


def test_regions_of_one_stage_cannot_select_different_devices() -> None:
    regions = tuple((within(layout="type", label=label), *nest("split")) for label in ("A100", "T4"))
    with pytest.raises(AnnotationError, match="all regions of a stage share its devices"):
        place([StageRequest(stage=None, regions=regions)], MIXED)


@pytest.mark.parametrize(
    ("stages", "number", "error", "message"),
    [
        (["stage"], 3, InfeasibleError, "does not divide 8 devices evenly; use 6 or 9"),
        (["stage(2)"], 4, AnnotationError, "gives each stage 4 of 8 devices"),
        (["stage: split(3)"], 4, AnnotationError, "needs 3 devices, which does not divide the 4"),
    ],
)
def test_rows_that_do_not_fit_are_refused(stages: list[str], number: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        place(staged(*stages, outer=(within(layout="row", number=number),)), equal(8))


def test_a_row_that_would_straddle_two_rows_is_refused() -> None:
    row = staged("stage", outer=(within(layout="row", number=4),))
    with pytest.raises(InfeasibleError, match="middle of a group of 4"):
        place([*staged("stage(2)"), *row, *staged("stage(2)")], equal(8))


def test_one_layout_at_a_time() -> None:
    both = (within(layout="row", number=4), within(layout="average", number=2))
    with pytest.raises(AnnotationError, match="use one layout"):
        place(staged("stage", outer=both), equal(8))


# --- from operators to stages -----------------------------------------------------------------------------------------
