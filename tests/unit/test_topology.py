"""The topology of a cluster: what messages and groups use of its links."""

import networkx as nx
import pytest

from whale.errors import UsageError
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.planner.catalog import device_types
from whale.planner.network.topology import Topology

NVLINK = Link(bandwidth=300e9, latency=3e-6)
NODES = Link(bandwidth=100e9, latency=5e-6, adapters=4)
A100 = device_types()["A100-SXM4-80GB"]


def of(num_nodes: int, per_node: int, type: DeviceType = A100, intra: Link = NVLINK, inter: Link = NODES) -> Topology:
    return Topology.of(
        Cluster.homogeneous(num_nodes * per_node, type, num_devices_per_node=per_node, intra=intra, inter=inter)
    )


def test_a_message_within_a_node_has_its_devices_links_to_itself() -> None:
    path = of(2, 8).link(1, 6)
    assert (path.bandwidth, path.latency, path.between_nodes) == (300e9, 3e-6, False)
    assert path.resources == ("rank 1 out", "rank 6 in")
    assert path.kinds[0].name == "NVLink3"


def test_a_message_between_nodes_uses_one_adapter_at_each_end() -> None:
    path = of(2, 8).link(3, 15)
    assert (path.bandwidth, path.latency, path.between_nodes) == (25e9, 5e-6, True)
    assert path.resources == ("node0 adapter 1 out", "node1 adapter 3 in")


def test_neighbours_share_an_adapter_where_there_are_fewer_adapters_than_devices() -> None:
    topology = of(2, 8)
    sources = [topology.link(rank, 8).resources[0] for rank in range(8)]
    assert sources == [f"node0 adapter {index}" + " out" for index in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_adapters_that_are_not_given_have_at_most_400_gbit_each() -> None:
    assert Link(bandwidth=400e9, latency=0.0).num_adapters == 8
    assert Link(bandwidth=400e9 + 1, latency=0.0).num_adapters == 9
    assert Link(bandwidth=6.25e9, latency=0.0).num_adapters == 1
    assert Link(bandwidth=400e9, latency=0.0, adapters=16).num_adapters == 16


def test_a_message_to_a_slower_node_is_as_slow_as_that() -> None:
    slow = Link(bandwidth=1.25e9, latency=50e-6)
    cluster = Cluster.of([("fast", A100), ("slow", A100)], intra=NVLINK, inter=NODES)
    nodes = (cluster.nodes[0], type(cluster.nodes[1])(name="slow", ranks=(1,), intra=NVLINK, inter=slow))
    path = Topology.of(Cluster(nodes=nodes, devices=cluster.devices)).link(0, 1)
    assert (path.bandwidth, path.latency) == (1.25e9, 50e-6)
    assert [kind.name for kind in path.kinds] == ["RDMA", "TCP"]


def test_a_pair_of_a_mesh_has_its_own_links_only() -> None:
    mesh = of(1, 8, device_types()["MI300X"], Link(bandwidth=448e9, latency=3e-6))
    assert mesh.link(0, 5).bandwidth == 448e9 / 7
    cube = of(1, 8, device_types()["V100-SXM2-32GB"], Link(bandwidth=150e9, latency=3e-6))
    assert cube.link(0, 1).bandwidth == 150e9 / 6


def test_the_graph_is_a_tree_of_devices_nodes_adapters_and_the_network() -> None:
    topology = of(3, 4)
    graph = topology.graph
    kinds = [kind for _, kind in graph.nodes(data="kind")]
    assert {kind: kinds.count(kind) for kind in kinds} == {"switch": 1, "node": 3, "device": 12, "adapter": 12}
    assert graph.number_of_edges() == 12 * 3
    for source, target in ((0, 3), (0, 4), (5, 11)):
        latency = nx.shortest_path_length(graph, source, target, weight="latency")
        assert latency == pytest.approx(topology.link(source, target).latency)
        route = nx.shortest_path(graph, source, target, weight="latency")
        narrowest = min(graph.edges[edge]["bandwidth"] for edge in nx.utils.pairwise(route))
        assert narrowest == topology.link(source, target).bandwidth


def test_the_graph_of_a_cluster_without_links_has_its_devices_alone() -> None:
    graph = Topology.of(Cluster.homogeneous(3)).graph
    assert graph.number_of_edges() == 0
    assert {0, 1, 2} < set(graph)


def test_members_of_a_group_are_ranks_by_node() -> None:
    members = of(3, 4).members((9, 1, 0, 4))
    assert [(member.node.name, member.ranks) for member in members] == [
        ("node0", (0, 1)),
        ("node1", (4,)),
        ("node2", (9,)),
    ]


def test_what_does_not_exist_is_refused() -> None:
    topology = of(2, 2)
    with pytest.raises(UsageError, match="no link to itself"):
        topology.link(1, 1)
    with pytest.raises(UsageError, match="rank 4 does not exist"):
        topology.link(0, 4)
    with pytest.raises(UsageError, match="every rank once"):
        topology.members((1, 1))
    with pytest.raises(UsageError, match="no intra_node link is known between ranks 0 and 1"):
        Topology.of(Cluster.homogeneous(2)).link(0, 1)


@pytest.mark.parametrize(
    ("type", "bandwidth", "kind"),
    [
        ("A100-SXM4-80GB", 300e9, "NVLink3"),
        ("A100-SXM4-80GB", 25e9, "PCIe4"),
        ("RTX3090", 31.5e9, "PCIe4"),
        ("RTX3090", 112.5e9, "NVLink3"),
        ("T4", 15.75e9, "PCIe3-host"),
        ("H100-SXM5-80GB", 450e9, "NVLink4"),
        ("H100-PCIe-80GB", 63e9, "PCIe5"),
        ("card of ours", 12e9, "PCIe3"),
        ("card of ours", 200e9, "NVLink3"),
    ],
)
def test_the_kind_of_a_link_is_told_from_the_device_and_the_bandwidth(type: str, bandwidth: float, kind: str) -> None:
    known = device_types().get(type)
    device = known or DeviceType.of(type, speed={"float32": 1e12}, memory_bytes=2**30, memory_bandwidth=1e11)
    topology = of(1, 2, device, Link(bandwidth=bandwidth, latency=3e-6))
    assert topology.link(0, 1).kinds[0].name == kind


@pytest.mark.parametrize(
    ("link", "kind"),
    [
        (Link(bandwidth=6.25e9, latency=0.0), "TCP"),
        (Link(bandwidth=25e9, latency=0.0, adapters=4), "TCP"),
        (Link(bandwidth=25e9, latency=0.0), "RDMA"),
        (Link(bandwidth=12.5e9, latency=0.0, network="tcp"), "TCP"),
        (Link(bandwidth=400e9, latency=0.0, network="efa"), "EFA"),
    ],
)
def test_the_network_is_as_given_or_told_from_the_bandwidth_of_an_adapter(link: Link, kind: str) -> None:
    assert of(2, 1, inter=link).link(0, 1).kinds[0].name == kind
