"""Files of profiles: the same bytes for the same profile, strict reading, a published schema."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from whale.cli.app import app
from whale.errors import InputFileError
from whale.ir.profile import (
    Affine,
    Amount,
    Kernel,
    LayerKind,
    LayerVariant,
    LinkCurve,
    MeasuredRate,
    MeasuredTimes,
    ModelProfile,
    Saved,
)


def a_profile() -> ModelProfile:
    kernel = Kernel(
        name="aten.mm", kind="matmul", dims=(Affine(1, 0), Affine(0, 8)), flops=Affine(0, 1 / 3), split=True
    )
    variant = LayerVariant(
        tensor_degree=1, forward=(kernel,), saved=(Saved(origin="x", size=Amount(bytes=Affine(0, 4))),), parameters=64
    )
    times = MeasuredTimes(
        device_type="card", tensor_degree=1, rows=(1, 2), forward=(0.1, 0.2), backward=(0.2, 0.4), update=(0, 0)
    )
    return ModelProfile(
        name="m",
        layers=(0, 0),
        paths=("a", "b"),
        kinds=(LayerKind(name="a", variants=(variant,), measured=(times,)),),
        device_types={"card": {"memory_bytes": 2.0**34, "float32": 1e12}},
        links=(
            LinkCurve(
                operation="all_reduce",
                source="card",
                target="card",
                devices=2,
                within="node",
                sizes=(1.0, 2.0),
                bandwidths=(3.0, 4.0),
            ),
        ),
        rates=(MeasuredRate(device_type="card", kind="matmul", dtype="float32", dims=(2, 2, 2), rate=1e9),),
        tied=(((0, 1), 64.0),),
    )


def test_a_profile_reads_back_and_has_one_form(tmp_path: Path) -> None:
    profile = a_profile()
    file = tmp_path / "profile.json"
    file.write_text(profile.dumps(), encoding="utf-8")
    assert ModelProfile.load(file) == profile
    assert ModelProfile.load(file).dumps() == profile.dumps()
    shuffled = json.dumps(dict(reversed(json.loads(profile.dumps()).items())))
    assert ModelProfile.parse(shuffled).dumps() == profile.dumps()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("kindz",), [], "unknown key 'kindz'"),
        (("format_version",), 2, "format_version"),
        (("layers",), [0, 1], "layers refers to position 1, but there are only 1 kinds"),
        (("tied",), [[[0, 2], 4.0]], "tied refers to position 2"),
        (("paths",), ["a"], "paths has 1 entries and layers has 2"),
        (("device_types", "card", "memory"), 3.0, "'memory' = 3"),
        (("device_types", "card", "float32"), 0, "'float32' = 0"),
        (("kinds", 0, "measured", 0, "rows"), [2, 1], "rows must ascend"),
        (("kinds", 0, "measured", 0, "forward"), [0.1], "forward has 1 entries and rows has 2"),
        (("kinds", 0, "measured", 0, "forward"), [0.1, -1], "must be at least 0"),
        (("kinds", 0, "variants", 0, "tensor_degree"), "1", "must be a whole number"),
        (("links", 0, "sizes"), [], "bandwidths has 2 entries and sizes has 0"),
        (("rates", 0, "rate"), 0, "must be at least 0.000001"),
        (("kinds", 0, "variants", 0, "parameters"), 1e300, "must be at most 1e+24"),
        (("kinds", 0, "variants", 0, "saved", 0, "size", "bytes", 1), -1e300, "must be at least -1e+24"),
        (
            ("kinds", 0, "variants", 0, "saved", 0, "size", "bytes"),
            [-9, 0],
            "bytes [-9, 0] is negative at every",
        ),
    ],
)
def test_what_is_wrong_with_a_profile_is_said_with_file_and_line(
    tmp_path: Path, path: tuple[Any, ...], value: Any, message: str
) -> None:
    data = json.loads(a_profile().dumps())
    table = data
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(data, indent=1), encoding="utf-8")
    with pytest.raises(InputFileError) as refusal:
        ModelProfile.load(file)
    assert message in refusal.value.message
    assert refusal.value.path == str(file)


def test_a_finding_has_the_line_of_its_value(tmp_path: Path) -> None:
    text = a_profile().dumps()
    line = next(number for number, each in enumerate(text.splitlines(), start=1) if '"forward": [0.1' in each)
    with pytest.raises(InputFileError) as refusal:
        ModelProfile.parse(text.replace('"forward": [0.1,', '"forward": ["x",'))
    assert refusal.value.line == line


@pytest.mark.parametrize("name", ["profile.toml", "profile", "none.json"])
def test_a_file_that_is_no_profile_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "profile.toml").write_text("day = 1979-05-27", encoding="utf-8")
    (tmp_path / "profile").write_text("{}", encoding="utf-8")
    with pytest.raises(InputFileError, match=name):
        ModelProfile.load(tmp_path / name)


def test_the_schema_is_published() -> None:
    ran = CliRunner().invoke(app, ["profile", "--schema"])
    assert ran.exit_code == 0
    schema = json.loads(ran.stdout)
    assert set(json.loads(a_profile().dumps())) <= set(schema["properties"])
