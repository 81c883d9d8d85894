"""Properties of communication costs on any cluster: more bytes, less bandwidth or more contention never help."""

from dataclasses import replace
from typing import Any

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from whale.ir.cluster import Cluster, Link
from whale.ir.profile import LinkCurve
from whale.planner.catalog import device_types
from whale.planner.network.communication import Collective, collective, send
from whale.planner.network.topology import Topology

KINDS: Any = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
TYPES = st.sampled_from(["A100-SXM4-80GB", "H100-SXM5-80GB", "B200-SXM", "V100-SXM2-32GB", "T4", "MI300X", "A10"])
SIZES = st.floats(1, 1e11)
SLACK = 1 + 1e-9


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    num_nodes, per_node = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    type_ = device_types()[draw(TYPES)]
    network: Any = draw(st.sampled_from(["tcp", "rdma", "efa"]))
    inter = Link(
        bandwidth=draw(st.floats(1e8, 4e11)),
        latency=draw(st.floats(0, 1e-4)),
        adapters=draw(st.sampled_from([None, 1, 2, 4, 8])),
        network=network,
    )
    return Cluster.homogeneous(
        num_nodes * per_node, type_, num_devices_per_node=per_node, intra=type_.intra_node, inter=inter
    )


def group_of(data: st.DataObject, cluster: Cluster) -> list[int]:
    assume(len(cluster.devices) > 1)
    return data.draw(
        st.lists(st.integers(0, len(cluster.devices) - 1), min_size=2, max_size=len(cluster.devices), unique=True)
    )


def with_inter(cluster: Cluster, **changes: Any) -> Cluster:
    nodes = tuple(replace(node, inter=replace(node.inter, **changes)) for node in cluster.nodes if node.inter)
    return Cluster(nodes=nodes, devices=cluster.devices)


@settings(max_examples=80, deadline=None)
@given(st.data(), clusters(), KINDS, SIZES, st.floats(1, 1e3), st.integers(1, 8))
def test_more_bytes_are_never_quicker(
    data: st.DataObject, cluster: Cluster, kind: Collective, num_bytes: float, times: float, sharing: int
) -> None:
    topology, ranks = Topology.of(cluster), group_of(data, cluster)
    few = collective(topology, kind, ranks, num_bytes, sharing=sharing)
    assert few.seconds <= collective(topology, kind, ranks, num_bytes * times, sharing=sharing).seconds * SLACK
    assert 0 < few.interval[0] <= few.seconds <= few.interval[1]
    sent = send(topology, ranks[0], ranks[1], num_bytes, sharing=sharing)
    assert sent.seconds <= send(topology, ranks[0], ranks[1], num_bytes * times, sharing=sharing).seconds * SLACK


@settings(max_examples=80, deadline=None)
@given(st.data(), clusters(), KINDS, SIZES, st.floats(1, 10))
def test_more_bandwidth_is_never_slower(
    data: st.DataObject, cluster: Cluster, kind: Collective, num_bytes: float, times: float
) -> None:
    ranks, link = group_of(data, cluster), cluster.nodes[0].inter
    assert link is not None
    faster = with_inter(cluster, bandwidth=link.bandwidth * times, adapters=link.num_adapters)
    slow, fast = (Topology.of(each) for each in (cluster, faster))
    assert collective(fast, kind, ranks, num_bytes).seconds <= collective(slow, kind, ranks, num_bytes).seconds * SLACK
    assert (
        send(fast, ranks[0], ranks[1], num_bytes).seconds <= send(slow, ranks[0], ranks[1], num_bytes).seconds * SLACK
    )


@settings(max_examples=80, deadline=None)
@given(st.data(), clusters(), KINDS, SIZES, st.integers(1, 8), st.integers(1, 8))
def test_more_sharing_is_never_quicker(
    data: st.DataObject, cluster: Cluster, kind: Collective, num_bytes: float, sharing: int, more: int
) -> None:
    topology, ranks = Topology.of(cluster), group_of(data, cluster)
    few, many = (
        collective(topology, kind, ranks, num_bytes, sharing=number).seconds for number in (sharing, sharing + more)
    )
    assert few <= many * SLACK


@settings(max_examples=60, deadline=None)
@given(st.data(), clusters(), KINDS, SIZES)
def test_the_order_of_ranks_does_not_matter(
    data: st.DataObject, cluster: Cluster, kind: Collective, num_bytes: float
) -> None:
    topology, ranks = Topology.of(cluster), group_of(data, cluster)
    shuffled = data.draw(st.permutations(ranks))
    assert collective(topology, kind, ranks, num_bytes) == collective(topology, kind, shuffled, num_bytes)


@settings(max_examples=60, deadline=None)
@given(clusters(), st.floats(1e3, 1e11))
def test_reducing_in_nodes_first_is_never_slower_over_slow_links_between_them(
    cluster: Cluster, num_bytes: float
) -> None:
    node = cluster.nodes[0]
    assume(len(cluster.nodes) > 1 and len(node.ranks) > 1 and node.intra and node.inter)
    assert node.intra is not None
    slow = with_inter(cluster, bandwidth=node.intra.bandwidth / 100 / len(cluster.nodes), adapters=1)
    topology, ranks = Topology.of(slow), range(len(cluster.devices))
    flat, hierarchical = (
        collective(topology, "all_reduce", ranks, num_bytes, algorithm=algorithm).seconds
        for algorithm in ("ring", "hierarchical")
    )
    assert hierarchical <= flat * SLACK


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-100, 100), min_size=1, max_size=5),
    st.sampled_from([0.0, 1e9, 1e11]),
    SIZES,
    st.floats(1, 1e3),
    st.integers(1, 8),
)
@example(coefficients=[1.2e-308], maximum=0.0, num_bytes=2.0**31, times=7.0, devices=1)  # seconds overflow
def test_no_curve_makes_more_bytes_quicker(
    coefficients: list[float], maximum: float, num_bytes: float, times: float, devices: int
) -> None:
    type_ = device_types()["A100-SXM4-80GB"]
    curve = LinkCurve(
        source=type_.name,
        target=type_.name,
        devices=devices,
        within="node",
        coefficients=tuple(coefficients),
        maximum=maximum,
    )
    topology = Topology.of(Cluster.homogeneous(8, type_, intra=type_.intra_node), [curve])
    for price in (
        lambda size: send(topology, 0, 1, size).seconds,
        lambda size: collective(topology, "all_reduce", range(8), size).seconds,
    ):
        assert 0 < price(num_bytes) <= price(num_bytes * times) * SLACK
