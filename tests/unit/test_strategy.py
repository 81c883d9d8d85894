"""The record of an annotation: what it accepts, how it prints, and how it travels as a string."""

import json

import pytest

from whale.errors import AnnotationError
from whale.ir.strategy import (
    DeviceSelection,
    Scope,
    Strategy,
    check_nesting,
    cut_at_stage,
    decode_scopes,
    encode_scopes,
    parse_strategy,
    region_of,
)


def strategy(kind: str, degree: int | None = None) -> Strategy:
    return Strategy(kind=kind, degree=degree)  # type: ignore[arg-type]


def scope(kind: str, region: str, degree: int | None = None) -> Scope:
    return Scope(strategy=strategy(kind, degree), region=region)


def test_only_a_stage_has_a_rule() -> None:
    ruled = Strategy(kind="stage", degree=2, recompute="full")
    assert parse_strategy(str(ruled)) == ruled
    assert parse_strategy("stage(recompute=selective)") == Strategy(kind="stage", recompute="selective")
    path = (Scope(strategy=ruled, region="a"),)
    assert decode_scopes(encode_scopes(path)) == path
    with pytest.raises(AnnotationError, match=r"split\(recompute='full'\).*only a stage"):
        Strategy(kind="split", recompute="full")
    with pytest.raises(AnnotationError, match="unknown rule.*'selective'"):
        parse_strategy("stage(recompute=some)")


@pytest.mark.parametrize("degree", [0, -1, True, 2.0, "2"])
def test_a_degree_is_a_positive_integer(degree: object) -> None:
    with pytest.raises(AnnotationError, match="degree must be a positive integer"):
        Strategy(kind="split", degree=degree)  # type: ignore[arg-type]


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AnnotationError, match=r"'shard'.*replicate, split, stage, cluster"):
        strategy("shard")


def test_only_cluster_chooses_devices_and_it_has_no_degree() -> None:
    everything = DeviceSelection(layout="all")
    with pytest.raises(AnnotationError, match="devices are chosen by cluster"):
        Strategy(kind="split", devices=everything)
    with pytest.raises(AnnotationError, match="devices are chosen by cluster"):
        Strategy(kind="cluster")
    with pytest.raises(AnnotationError, match="no degree"):
        Strategy(kind="cluster", degree=2, devices=everything)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": "column"}, "unknown layout"),
        ({"layout": "row"}, "positive integer"),
        ({"layout": "average", "number": 0}, "positive integer"),
        ({"layout": "all", "number": 2}, "takes no number"),
        ({"layout": "ranks"}, "empty"),
        ({"layout": "ranks", "ranks": (0, 0)}, "more than once"),
        ({"layout": "ranks", "ranks": (0, -1)}, "from 0 up"),
        ({"layout": "type", "label": ""}, "not empty"),
        ({"layout": "name"}, "not empty"),
    ],
)
def test_a_selection_that_chooses_nothing_clear_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        DeviceSelection(**arguments)  # type: ignore[arg-type]


def test_strategies_print_as_the_user_wrote_them() -> None:
    chosen = [
        DeviceSelection(layout="all"),
        DeviceSelection(layout="row", number=4),
        DeviceSelection(layout="ranks", ranks=(0, 1, 4)),
        DeviceSelection(layout="type", label="A100"),
    ]
    assert [str(Strategy(kind="cluster", devices=devices)) for devices in chosen] == [
        "cluster('all')",
        "cluster('row', 4)",
        "cluster([0, 1, 4])",
        "cluster(type='A100')",
    ]
    assert [str(strategy("split", 4)), str(strategy("replicate"))] == ["split(4)", "replicate()"]


def test_a_scope_path_survives_its_string() -> None:
    path = (
        Scope(strategy=Strategy(kind="cluster", devices=DeviceSelection(layout="ranks", ranks=(0, 3))), region="all"),
        scope("stage", "layers.[0-7]", 8),
        scope("replicate", "layers.0"),
        scope("split", 'naïve #"0', 4),
    )
    assert decode_scopes(encode_scopes(path)) == path
    assert decode_scopes(encode_scopes(())) == ()


@pytest.mark.parametrize(
    "text",
    ["", "{", "{}x", '[["split"]]', '[["split",0,null,null,"a"]]', '[["split",1,null,null,3]]', "3", "[" * 100_000],
)
def test_a_string_that_is_no_scope_path_is_refused(text: str) -> None:
    with pytest.raises(AnnotationError):
        decode_scopes(text)


def test_the_encoding_is_plain_json_on_one_line() -> None:
    text = encode_scopes((scope("stage", "stage#0"),))
    assert json.loads(text) == [["stage", None, None, None, "stage#0"]]
    assert "\n" not in text


def test_a_path_is_cut_at_its_stage() -> None:
    outer, stage, inner = scope("replicate", "r", 2), scope("stage", "s"), scope("split", "t")
    assert cut_at_stage((outer, stage, inner)) == ((outer,), stage, (inner,))
    assert cut_at_stage((outer, inner)) == ((), None, (outer, inner))
    assert cut_at_stage(()) == ((), None, ())


def test_the_region_is_that_of_the_innermost_scope() -> None:
    assert region_of((scope("stage", "s"), scope("split", "t"))) == "t"
    assert region_of(()) == ""


def test_a_stage_in_a_stage_is_refused() -> None:
    with pytest.raises(AnnotationError, match=r"stage\(2\) lies in stage\(4\)"):
        check_nesting([strategy("stage", 4), strategy("replicate"), strategy("stage", 2)])


def test_a_stage_in_a_split_is_refused() -> None:
    with pytest.raises(AnnotationError, match=r"stage\(\) lies in split\(2\)"):
        check_nesting([strategy("split", 2), strategy("stage")])


def test_a_stage_in_a_replicate_is_a_replicated_pipeline() -> None:
    check_nesting([strategy("replicate", 2), strategy("stage"), strategy("split")])
