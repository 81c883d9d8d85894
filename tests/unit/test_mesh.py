"""The mesh of one stage, from the regions in it."""

import pytest

from whale.errors import AnnotationError
from whale.ir.strategy import Along, DeviceSelection, Scope, ScopePath, Strategy
from whale.planner.assignment.mesh import Mesh, lay_out, needs_of


def nest(text: str, name: str = "") -> ScopePath:
    """A scope path as in ``"replicate(2) > split(4)"``; scopes with the same words and *name* are the same."""
    path: list[Scope] = []
    words = ""
    for word in filter(None, text.split(" > ")):
        kind, _, number = word.rstrip(")").partition("(")
        words += f"{name}/{word}"
        degree = int(number) if number else None
        path.append(Scope(strategy=Strategy(kind=kind, degree=degree), region=words.lstrip("/")))  # type: ignore[arg-type]
    return tuple(path)


def laid_out(degree: int, *texts: str, default: Strategy | None = None) -> tuple[tuple[int, ...], dict[str, str]]:
    """Sizes, and for each nest its roles as letters."""
    paths = {text: nest(text) for text in texts}
    mesh = lay_out(list(paths.values()), degree, owner=f"stage({degree})", default=default)
    letters = {
        text: "".join(str(role)[0] for role in mesh.roles[path[-1].region if path else ""])
        for text, path in paths.items()
    }
    return mesh.sizes, letters


def test_a_nest_is_a_mesh() -> None:
    assert laid_out(8, "replicate(2) > split(4)") == ((2, 4), {"replicate(2) > split(4)": "rs"})


def test_regions_share_the_coarsest_mesh_that_fits_all() -> None:
    assert laid_out(8, "replicate(2) > split(4)", "split(8)") == (
        (2, 4),
        {"replicate(2) > split(4)": "rs", "split(8)": "ss"},
    )
    assert laid_out(8, "replicate(2) > split(4)", "split(8)", "replicate(4) > split(2)") == (
        (2, 2, 2),
        {"replicate(2) > split(4)": "rss", "split(8)": "sss", "replicate(4) > split(2)": "rrs"},
    )


def test_two_uses_of_the_same_devices_need_one_axis() -> None:
    assert laid_out(8, "replicate(8)", "split(8)") == ((8,), {"replicate(8)": "r", "split(8)": "s"})


def test_an_unnumbered_scope_takes_what_the_numbered_ones_leave() -> None:
    assert laid_out(8, "replicate() > split(4)") == ((2, 4), {"replicate() > split(4)": "rs"})
    assert laid_out(8, "replicate(2) > split()") == ((2, 4), {"replicate(2) > split()": "rs"})
    assert laid_out(6, "replicate()", "split()", "") == ((6,), {"replicate()": "r", "split()": "s", "": "r"})


def test_a_scope_smaller_than_its_stage_is_repeated_outside_of_it() -> None:
    assert laid_out(8, "split(4)") == ((2, 4), {"split(4)": "rs"})
    assert laid_out(8, "replicate(2)") == ((8,), {"replicate(2)": "r"})
    assert laid_out(8, "replicate(8)", "split(4)") == ((2, 4), {"replicate(8)": "rr", "split(4)": "rs"})


def test_the_rest_of_a_scope_uses_the_same_axes_as_what_lies_in_it() -> None:
    assert laid_out(8, "split(2)", "split(2) > replicate(4)") == (
        (2, 4),
        {"split(2)": "sr", "split(2) > replicate(4)": "sr"},
    )
    assert laid_out(8, "replicate(2)", "replicate(2) > split(4)", "replicate(2) > split(2)") == (
        (2, 2, 2),
        {"replicate(2)": "rrr", "replicate(2) > split(4)": "rss", "replicate(2) > split(2)": "rrs"},
    )


def test_nested_splits_keep_their_axes_apart() -> None:
    assert laid_out(8, "split(2) > split(4)") == ((2, 4), {"split(2) > split(4)": "ss"})


def test_axes_of_size_one_are_dropped() -> None:
    assert laid_out(4, "replicate(1) > split(4)") == ((4,), {"replicate(1) > split(4)": "s"})
    assert laid_out(1, "split(1)", "") == ((), {"split(1)": "", "": ""})


def test_operators_without_an_annotation_take_the_default() -> None:
    assert laid_out(4, "replicate(4)", "", default=Strategy(kind="split")) == ((4,), {"replicate(4)": "r", "": "s"})
    assert laid_out(4, "replicate(4)", "", default=Strategy(kind="split", degree=2)) == (
        (2, 2),
        {"replicate(4)": "rr", "": "rs"},
    )


def test_a_cluster_scope_is_no_axis() -> None:
    everything = Scope(strategy=Strategy(kind="cluster", devices=DeviceSelection(layout="all")), region="c")
    mesh = lay_out([(everything, *nest("split(2)")), (everything,)], 4, owner="stage(4)")
    assert mesh == Mesh(
        sizes=(2, 2),
        roles={
            "split(2)": ("replicate", "split"),
            "c": ("replicate", "replicate"),
            "": ("replicate", "replicate"),
        },
    )


@pytest.mark.parametrize(
    ("degree", "texts", "message"),
    [
        (8, ["replicate(2) > split(3)"], r"replicate\(2\) > split\(3\) in stage\(8\) needs 2 x 3 = 6 devices.*the 8"),
        (4, ["split(8)"], r"split\(8\) in stage\(4\) needs 8 devices.*the 4"),
        (8, ["replicate() > split()"], "neither.*has a number"),
        (6, ["replicate(2) > split(3)", "replicate(3) > split(2)"], r"groups of 3 and of 2.*no mesh has both"),
        (8, ["split(2) > replicate(2)", "split(2) > replicate(8)"], "2 x 8 = 16"),
        (10, ["split(2)", "split(5)"], "groups of 5 and of 2"),
    ],
)
def test_regions_that_contradict_each_other_are_refused(degree: int, texts: list[str], message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        laid_out(degree, *texts)


def test_a_default_that_does_not_fit_is_refused_by_its_name() -> None:
    with pytest.raises(AnnotationError, match=r"default strategy split\(3\).*4 devices"):
        laid_out(4, "", default=Strategy(kind="split", degree=3))


def test_needs_are_the_least_common_multiple_of_the_numbers() -> None:
    assert needs_of([nest("replicate(2) > split(4)"), nest("split(16)"), ()]) == (16, False)
    assert needs_of([nest("replicate() > split(4)")]) == (4, True)
    assert needs_of([()]) == (1, False)
    assert needs_of([()], Strategy(kind="split", degree=2)) == (2, False)
    assert needs_of([nest("split(4)")], Strategy(kind="split", degree=3)) == (4, False)


def test_an_axis_that_cuts_a_dim_knows_the_dim_and_the_region_that_asked() -> None:
    outer = Scope(strategy=Strategy(kind="replicate", degree=2), region="blocks")
    inner = Scope(strategy=Strategy(kind="split", degree=4, dim=1), region="blocks.0")
    mesh = lay_out([(outer, inner)], 8, owner="stage(8)")
    assert mesh.sizes == (2, 4)
    assert mesh.roles["blocks.0"] == ("replicate", Along(dim=1, region="blocks.0"))
