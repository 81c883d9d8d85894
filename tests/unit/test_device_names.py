"""Device types by the names that people and drivers give them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.ir.device_names import matching_types
from whale.planner.catalog import device_types

MEMORY = {name: type_.memory_bytes for name, type_ in device_types().items()}


def matching(name: str) -> list[str]:
    return matching_types(name, MEMORY)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("Tesla P100-PCIE-16GB", "P100-PCIe-16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
        ("NVIDIA TITAN RTX", "TitanRTX"),
        ("NVIDIA GeForce GTX 1080 Ti", "GTX1080Ti"),
        ("NVIDIA GeForce RTX 2080", "RTX2080"),
        ("Quadro RTX 8000", "QuadroRTX8000"),
        ("AMD Instinct MI300X", "MI300X"),
        ("RTX-4090", "RTX4090"),
        ("rtx4090", "RTX4090"),
    ],
)
def test_names_of_drivers_and_of_people_are_one_type(name: str, expected: str) -> None:
    assert matching(name) == [expected]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("A100", ["A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIe-40GB", "A100-PCIe-80GB"]),
        ("V100-32GB", ["V100-SXM2-32GB", "V100-SXM3-32GB (DGX-2)"]),
        ("MI250X", ["MI250X (per GCD)", "MI250X (2 GCDs)"]),
    ],
)
def test_what_a_name_leaves_open_is_listed(name: str, expected: list[str]) -> None:
    assert matching(name) == expected


@pytest.mark.parametrize(
    "name", ["RTX 3090 Ti", "A100-SXM4-80GB MIG 3g.40gb", "A100-64GB", "RTX 6000", "H200 NVL", "L4 80GB", "NVIDIA", ""]
)
def test_another_card_is_not_taken_for_one_that_is_known(name: str) -> None:
    assert matching(name) == []


@given(name=st.sampled_from(sorted(MEMORY)), data=st.data())
def test_writing_a_name_differently_does_not_change_what_it_means(name: str, data: st.DataObject) -> None:
    words = re.split(r"([-_ ()]+)", name)
    written = "".join(data.draw(st.sampled_from("-_ ")) if re.fullmatch(r"[-_ ]", word) else word for word in words)
    written = {"upper": written.upper(), "lower": written.lower(), "": written}[
        data.draw(st.sampled_from(["upper", "lower", ""]))
    ]
    written = data.draw(st.sampled_from(["", "NVIDIA ", "nvidia-", "Tesla "])) + written
    assert matching(written) == [name]


@given(name=st.sampled_from(sorted(MEMORY)), data=st.data())
def test_leaving_out_words_never_loses_the_type(name: str, data: st.DataObject) -> None:
    model, *others = re.split(r"[-_ ]", re.sub(r" \(.*", "", name))
    kept = [word for word in others if data.draw(st.booleans())]
    assert name in matching(" ".join([model, *kept]))
