"""Sustained rates of chips, from their data sheets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.planner.catalog import device_types
from whale.planner.cost.precision import precision_named
from whale.planner.cost.silicon import clock, silicon_of

TYPES = device_types()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("eager", [False, True])
def test_every_chip_reaches_some_of_its_peaks_and_none_more(name: str, eager: bool) -> None:
    found = silicon_of(TYPES[name], eager=eager)
    for part in (found.matmul, found.vector, found.attention, found.vector_attention, found.bandwidth):
        assert 0.05 < part <= 1


def test_cards_of_little_power_sustain_less_of_their_peak_than_the_same_design_with_more() -> None:
    for frugal, ample in (
        ("T4", "RTX2080Ti"),
        ("L4", "RTX4090"),
        ("A10", "RTX3090"),
        ("A100-PCIe-40GB", "A100-SXM4-40GB"),
    ):
        assert silicon_of(TYPES[frugal]).matmul < 0.9 * silicon_of(TYPES[ample]).matmul


def test_chips_without_tensor_cores_multiply_16_bits_in_float32() -> None:
    for name in ("P100-PCIe-16GB", "P40", "GTX1080Ti"):
        assert precision_named("fp16").rate(TYPES[name]) == (TYPES[name].speed("float32"), "float32")


def test_a_card_is_predicted_from_its_figures_not_its_name() -> None:
    twin = replace(TYPES["A100-SXM4-80GB"], memory_bytes=2**36)
    assert silicon_of(twin) == silicon_of(TYPES["A100-SXM4-80GB"]) == silicon_of(TYPES["A800-SXM4-80GB"])


def test_float64_is_slow_on_cards_for_graphics() -> None:
    assert TYPES["RTX4090"].speed("float64") < TYPES["A100-SXM4-80GB"].speed("float64") / 10


@given(watts=st.floats(1, 1000), more=st.floats(1, 4), boost=st.floats(1, 2000))
def test_more_power_never_lowers_the_clock(watts: float, more: float, boost: float) -> None:
    low, high = clock(watts, boost), clock(watts * more, boost)
    assert 0 < low <= high + 1e-9 <= 1 + 1e-9


def test_every_type_in_the_catalog_has_a_float32_rate_of_its_own() -> None:
    unlisted = [name for name, type_ in TYPES.items() if "float32" not in dict(type_.rates)]
    assert not unlisted, "they would be priced at their slowest listed rate, that of bfloat16"
