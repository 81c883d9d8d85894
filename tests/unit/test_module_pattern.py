"""Keys of annotation mappings: what they match, which wins, and what is said when nothing matches."""

import pytest

from whale.errors import AnnotationError
from whale.ir.module_pattern import ModulePattern, explain_no_match, most_specific

PATHS = ["", "embed", "layers", *(f"layers.{i}" for i in range(12)), "layers.0.attn", "layers.0.mlp", "head", "layer1"]


def matched(pattern: str) -> list[str]:
    return [path for path in PATHS if ModulePattern(pattern).matches(path)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", [""]),
        ("head", ["head"]),
        ("layers.[0-2]", ["layers.0", "layers.1", "layers.2"]),
        ("layers.[9-99]", ["layers.9", "layers.10", "layers.11"]),
        ("layers.[0, 2,5-6]", ["layers.0", "layers.2", "layers.5", "layers.6"]),
        ("layers.*.attn", ["layers.0.attn"]),
        ("*", ["embed", "layers", "head", "layer1"]),
        ("layer[1-4]", ["layer1"]),
        ("hea", []),
        ("layers.0.*.x", []),
    ],
)
def test_a_pattern_matches_whole_paths_component_by_component(pattern: str, expected: list[str]) -> None:
    assert matched(pattern) == expected


def test_a_dot_or_a_plus_in_a_path_is_only_itself() -> None:
    assert not ModulePattern("a.b").matches("aXb")
    assert ModulePattern("a+").matches("a+")
    assert not ModulePattern("a+").matches("aa")


@pytest.mark.parametrize(
    "pattern",
    [
        "a..b",
        ".",
        "a.",
        "layers.[0-7",
        "layers.0]",
        "layers.[]",
        "layers.[a-b]",
        "layers.[7-0]",
        "layers.[-1]",
        "[0-1.5]",
    ],
)
def test_a_malformed_pattern_is_refused_with_itself_in_the_message(pattern: str) -> None:
    with pytest.raises(AnnotationError) as refusal:
        ModulePattern(pattern)
    assert repr(pattern) in str(refusal.value)


@pytest.mark.parametrize(
    ("winner", "loser"),
    [
        ("layers.3", "layers.[0-7]"),
        ("layers.[0-7]", "layers.*"),
        ("layers.3", "*.3"),
        ("layers.[3]", "layers.[0-7]"),
        ("layers.[0-3]", "layers.[0-7]"),
        ("layers.[1,3]", "layers.[0-3,9]"),
        ("layers.[0-7].*", "*.*.attn"),
    ],
)
def test_the_more_specific_pattern_wins_in_either_order(winner: str, loser: str) -> None:
    first, second = ModulePattern(winner), ModulePattern(loser)
    assert first.is_more_specific_than(second)
    assert not second.is_more_specific_than(first)
    assert most_specific([first, second], "x") is first
    assert most_specific([second, first], "x") is first


def test_patterns_that_only_overlap_tie_and_both_are_named() -> None:
    with pytest.raises(AnnotationError, match=r"'layers.\[0-4\]' and 'layers.\[3-7\]'.*'layers.3'|3-7.*0-4.*layers.3"):
        most_specific([ModulePattern("layers.[0-4]"), ModulePattern("layers.[3-7]")], "layers.3")


def test_a_third_pattern_within_both_settles_a_tie() -> None:
    patterns = [ModulePattern("layers.[0-4]"), ModulePattern("layers.[3-7]"), ModulePattern("layers.[3-4]")]
    assert most_specific(patterns, "layers.3").text == "layers.[3-4]"


def test_a_misspelt_key_is_answered_with_near_misses_and_the_children_there() -> None:
    message = explain_no_match(ModulePattern("layers.0.atn"), PATHS)
    assert "'layers.0' has: attn, mlp" in message
    assert "'layers.0.attn'" in message


def test_an_index_out_of_range_shows_the_indices_in_their_order() -> None:
    message = explain_no_match(ModulePattern("layers.[12-15]"), PATHS)
    assert "'layers' has: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11" in message


def test_many_children_are_cut_short() -> None:
    message = explain_no_match(ModulePattern("nothing"), ["", *(f"m{i:02}" for i in range(20))])
    assert "and 8 more" in message
