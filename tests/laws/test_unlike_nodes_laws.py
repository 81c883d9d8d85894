"""Properties of communication costs among nodes that differ, with and without measured curves."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from whale.ir.cluster import Cluster, Device, Link, Node
from whale.ir.profile import LinkCurve
from whale.planner.catalog import device_types
from whale.planner.network.communication import Collective, collective, send
from whale.planner.network.topology import Topology

KINDS: Any = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
TYPES = ("A100-SXM4-80GB", "V100-SXM2-32GB", "T4")
SIZES = st.floats(1, 1e11)
SLACK = 1 + 1e-9


@st.composite
def nodes(draw: st.DrawFn) -> list[tuple[str, int, Link, Link]]:
    """For each node the type and the number of its devices, and its links."""
    network: Any = st.sampled_from(["tcp", "rdma", "efa"])
    found = []
    for _ in range(draw(st.integers(1, 4))):
        inter = Link(
            bandwidth=draw(st.sampled_from([1e8, 1.25e9, 12.5e9, 1e11])),
            latency=draw(st.sampled_from([0.0, 1e-5, 1e-4])),
            adapters=draw(st.sampled_from([None, 1, 2, 4])),
            network=draw(network),
        )
        intra = Link(bandwidth=draw(st.sampled_from([8e9, 6e10, 3e11])), latency=draw(st.sampled_from([3e-6, 1e-5])))
        found.append((draw(st.sampled_from(TYPES)), draw(st.integers(1, 4)), intra, inter))
    return found


def cluster_of(described: list[tuple[str, int, Link, Link]]) -> Cluster:
    made: list[Node] = []
    devices: list[Device] = []
    for index, (name, count, intra, inter) in enumerate(described):
        ranks = tuple(range(len(devices), len(devices) + count))
        devices += [
            Device(rank=rank, name=f"{name}:{rank}", type=device_types()[name], node=f"node{index}") for rank in ranks
        ]
        made.append(Node(name=f"node{index}", ranks=ranks, intra=intra, inter=inter))
    return Cluster(nodes=tuple(made), devices=tuple(devices))


@st.composite
def curves(draw: st.DrawFn, most: int = 6) -> list[LinkCurve]:
    found = []
    for _ in range(draw(st.integers(0, most))):
        source, target = draw(st.sampled_from(TYPES)), draw(st.sampled_from(TYPES))
        operation: Any = draw(st.sampled_from(["send", "all_reduce", "all_gather", "all_to_all"]))
        within: Any = draw(st.sampled_from(["node", "nodes"]))
        ranks = 2 if operation == "send" or source != target else draw(st.integers(2, 8))
        sizes = sorted(draw(st.sets(st.sampled_from([1e3, 1e5, 1e6, 1e8, 1e9]), min_size=1, max_size=4)))
        found.append(
            LinkCurve(
                operation=operation,
                source=source,
                target=target,
                ranks=ranks,
                devices=ranks if within == "node" else draw(st.integers(1, ranks)),
                within=within,
                sizes=tuple(sizes),
                bandwidths=tuple(draw(st.sampled_from([1e6, 1e9, 5e9, 5e10])) for _ in sizes),
            )
        )
    return found


def group_of(draw: st.DataObject, described: list[tuple[str, int, Link, Link]]) -> list[tuple[int, int]]:
    """Devices of a group, each as its node and its place there."""
    places = [(node, place) for node, (_, count, _, _) in enumerate(described) for place in range(count)]
    assume(len(places) > 1)
    return draw.draw(st.lists(st.sampled_from(places), min_size=2, unique=True))


def ranks_of(cluster: Cluster, order: list[int], group: list[tuple[int, int]]) -> list[int]:
    """The ranks of places where the nodes are listed in another order."""
    return [cluster.nodes[order.index(node)].ranks[place] for node, place in group]


@settings(max_examples=60, deadline=None)
@given(st.data(), nodes(), curves(), KINDS, SIZES, st.integers(1, 4))
def test_the_order_in_which_nodes_and_ranks_are_listed_does_not_matter(
    data: st.DataObject,
    described: list[tuple[str, int, Link, Link]],
    measured: list[LinkCurve],
    kind: Collective,
    num_bytes: float,
    sharing: int,
) -> None:
    group = group_of(data, described)
    order = data.draw(st.permutations(range(len(described))))
    plain, shuffled = (cluster_of([described[node] for node in nodes]) for nodes in (range(len(described)), order))
    own = ranks_of(plain, list(range(len(described))), group)
    other = data.draw(st.permutations(ranks_of(shuffled, order, group)))
    one, two = Topology.of(plain, measured), Topology.of(shuffled, measured)
    assert collective(one, kind, own, num_bytes, sharing=sharing) == collective(
        two, kind, other, num_bytes, sharing=sharing
    )
    assert one.sharing(own, 8) == two.sharing(other, 8)
    ends = ranks_of(shuffled, order, group)
    assert send(one, own[0], own[1], num_bytes) == send(two, ends[0], ends[1], num_bytes)


@settings(max_examples=60, deadline=None)
@given(st.data(), nodes(), curves(), KINDS, SIZES, st.floats(1, 1e3), st.integers(1, 4))
def test_more_bytes_are_never_faster(
    data: st.DataObject,
    described: list[tuple[str, int, Link, Link]],
    measured: list[LinkCurve],
    kind: Collective,
    num_bytes: float,
    times: float,
    sharing: int,
) -> None:
    cluster = cluster_of(described)
    ranks = ranks_of(cluster, list(range(len(described))), group_of(data, described))
    topology = Topology.of(cluster, measured)
    few, many = (collective(topology, kind, ranks, size, sharing=sharing) for size in (num_bytes, num_bytes * times))
    assert 0 < few.seconds <= many.seconds * SLACK
    one, more = (send(topology, ranks[0], ranks[1], size) for size in (num_bytes, num_bytes * times))
    assert 0 < one.seconds <= more.seconds * SLACK


@settings(max_examples=60, deadline=None)
@given(st.data(), nodes(), KINDS, SIZES, st.floats(1, 100))
def test_a_better_link_of_one_node_is_never_slower(
    data: st.DataObject, described: list[tuple[str, int, Link, Link]], kind: Collective, num_bytes: float, times: float
) -> None:
    group, index = group_of(data, described), data.draw(st.integers(0, len(described) - 1))
    type_, count, intra, inter = described[index]
    better = [*described]
    better[index] = (
        type_,
        count,
        intra,
        replace(inter, bandwidth=inter.bandwidth * times, adapters=inter.num_adapters),
    )
    slow, fast = cluster_of(described), cluster_of(better)
    ranks = ranks_of(slow, list(range(len(described))), group)
    before, after = (collective(Topology.of(one), kind, ranks, num_bytes).seconds for one in (slow, fast))
    assert after <= before * SLACK


def curve(**given: Any) -> LinkCurve:
    values: dict[str, Any] = {
        "source": "T4",
        "target": "T4",
        "devices": 1,
        "within": "nodes",
        "sizes": (1e6,),
        "bandwidths": (1e10,),
    }
    return LinkCurve(**(values | given))


def test_a_slow_node_slows_a_sum_wherever_it_is_listed() -> None:
    fast, slow = (("T4", 1, Link(bandwidth=8e9, latency=5e-6), Link(bandwidth=b, latency=0)) for b in (1.25e10, 5e8))
    for measured in (curve(), curve(operation="all_reduce")):
        clusters = [cluster_of(each) for each in ([fast, slow], [slow, fast], [fast, fast], [slow, slow])]
        mixed, turned, both, neither = (
            collective(Topology.of(cluster, [measured]), "all_reduce", (0, 1), 1e8).seconds for cluster in clusters
        )
        assert mixed == turned > 10 * both  # the curve is more than the slow link can do
        assert neither == pytest.approx(both)  # curves come first: nothing says that they were measured on better links
        topology = Topology.of(clusters[0], [measured])
        assert send(topology, 0, 1, 1e8).seconds == send(topology, 1, 0, 1e8).seconds


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([5e8, 2e9, 1.25e10]), st.floats(1, 100), KINDS, SIZES, st.sampled_from(["send", "all_reduce"]))
def test_a_better_link_of_the_slowest_node_is_never_slower_beside_curves(
    bandwidth: float, times: float, kind: Collective, num_bytes: float, operation: str
) -> None:
    within = Link(bandwidth=8e9, latency=5e-6)
    seconds = []
    for own in (bandwidth, min(bandwidth * times, 2e10)):
        described = [("T4", 1, within, Link(bandwidth=each, latency=1e-5, network="rdma")) for each in (2e10, own, own)]
        topology = Topology.of(cluster_of(described), [curve(operation=operation, bandwidths=(5e9,))])
        seconds.append(collective(topology, kind, (1, 2), num_bytes).seconds)
    assert seconds[1] <= seconds[0] * SLACK
