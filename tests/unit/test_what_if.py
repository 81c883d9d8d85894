"""Clusters without a node, with a node more: who is left, in which order, and what is refused."""

from __future__ import annotations

import pytest

from whale.errors import UsageError
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.planner.catalog import device_types
from whale.planner.what_if import with_node, without

FAST, SLOW = (
    DeviceType.of(name, speed={"float32": speed}, memory_bytes=2**34, memory_bandwidth=1e12)
    for name, speed in (("fast", 2e12), ("slow", 1e12))
)
LINK = Link(bandwidth=1e9, latency=1e-5)
CLUSTER = Cluster.of(
    [("a", FAST), ("a", FAST), ("b", FAST), ("b", SLOW), ("c", SLOW), ("c", SLOW)], intra=LINK, inter=LINK
)


def shown(cluster: Cluster) -> list[tuple[str, list[str]]]:
    """The devices of every node."""
    assert [device.rank for device in cluster.devices] == list(range(len(cluster.devices)))
    assert [node.name for node in cluster.nodes for _ in node.ranks] == [device.node for device in cluster.devices]
    return [(node.name, [cluster.devices[rank].name for rank in node.ranks]) for node in cluster.nodes]


def test_without_a_node_the_others_are_numbered_anew() -> None:
    assert shown(without(CLUSTER, "a")) == [("b", ["fast:0", "slow:1"]), ("c", ["slow:2", "slow:3"])]


def test_devices_of_a_type_go_from_the_last_nodes_first() -> None:
    assert shown(without(CLUSTER, "slow:2")) == [("a", ["fast:0", "fast:1"]), ("b", ["fast:2", "slow:3"])]


def test_several_can_be_missing_at_once() -> None:
    assert shown(without(CLUSTER, "c, fast:1")) == [("a", ["fast:0", "fast:1"]), ("b", ["slow:2"])]


def test_types_have_the_names_that_drivers_and_people_give_them() -> None:
    known = device_types()
    types = [known[name] for name in ("RTX4090", "V100-SXM2-16GB", "A100-SXM4-80GB", "A100-PCIe-80GB")]
    machines = Cluster.of([(f"node{index}", type_) for index, type_ in enumerate(types)], inter=LINK)
    for what in ("RTX-4090:1", "NVIDIA GeForce RTX 4090:1", "rtx4090:1"):
        assert [device.type for device in without(machines, what).devices] == types[1:]
    assert without(machines, "Tesla V100-SXM2-16GB:1,a100-pcie:1").devices[1].name == "A100-SXM4-80GB:1"
    assert with_node(machines, "1xTesla V100-SXM2-16GB", {}).devices[-1].type is types[1]
    with pytest.raises(UsageError, match="'A100' is A100-SXM4-80GB or A100-PCIe-80GB; say which"):
        without(machines, "A100:1")
    with pytest.raises(UsageError, match="'A100-80GB' is A100-SXM4-80GB or A100-PCIe-80GB; say which"):
        with_node(machines, "2xA100-80GB", {})


def test_a_node_more_is_linked_like_its_kind() -> None:
    more = with_node(CLUSTER, "2xslow,1xA100-SXM4-80GB", device_types())
    assert shown(more)[3:] == [("added0", ["slow:6", "slow:7"]), ("added1", ["A100-SXM4-80GB:8"])]
    assert more.nodes[3].intra == LINK and more.nodes[3].inter == LINK
    assert more.nodes[4].intra == device_types()["A100-SXM4-80GB"].intra_node


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("d", "a, b, c"),
        ("slow:4", "only 3 slow"),
        ("SLOW:99", "only 3 slow"),
        ("c,slow:2", "only 3 slow, of which 2 are missing already"),
        ("c,slow:1,slow:1", "only 3 slow, of which 3 are missing already"),
        ("slow:0", "a type and a number"),
        ("a,b,c", "leaves no device"),
        ("fsat:1", "did you mean fast:1"),
    ],
)
def test_what_is_not_there_cannot_be_missing(what: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        without(CLUSTER, what)


@pytest.mark.parametrize(("what", "says"), [("slow", "2xfast"), ("2xslaw", "did you mean slow"), ("0xslow", "write a")])
def test_a_node_of_nothing_known_is_refused(what: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        with_node(CLUSTER, what, {})


def test_a_single_node_says_that_links_between_nodes_are_missing() -> None:
    with pytest.raises(UsageError, match="inter_node"):
        with_node(Cluster.of([("a", FAST)]), "1xfast", {})


def test_an_unknown_type_is_told_from_those_that_look_like_it_or_from_none() -> None:
    with pytest.raises(UsageError, match=r"unknown device type 'T5'; did you mean T4"):
        with_node(CLUSTER, "3xT5", device_types())
    with pytest.raises(UsageError, match=r"unknown device type 'xyz'; define it under \[device_types\]"):
        with_node(CLUSTER, "3xxyz", {})
