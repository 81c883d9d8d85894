"""The cost of communication, against sums done by hand and against published measurements."""

import math
from itertools import pairwise, product
from typing import Any

import pytest

from whale.errors import UsageError
from whale.ir.cluster import Cluster, Link
from whale.ir.profile import LinkCurve
from whale.planner.catalog import device_types
from whale.planner.network.algorithms import LOW_LATENCY_BANDWIDTH, LOW_LATENCY_HOP, SLICES, TREE_BANDWIDTH
from whale.planner.network.communication import Collective, collective, send
from whale.planner.network.links import link_kinds
from whale.planner.network.topology import Topology

LARGE, GB = 2**34, 1e9
KINDS = link_kinds()


def of(name: str, num_nodes: int = 1, per_node: int = 8, inter: Link | None = None, **how: Any) -> Topology:
    type_ = device_types()[name]
    cluster = Cluster.homogeneous(
        num_nodes * per_node, type_, num_devices_per_node=per_node, intra=type_.intra_node, inter=inter
    )
    return Topology.of(cluster, **how)


INFINIBAND = Link(bandwidth=200 * GB, latency=5e-6, adapters=8)
A100 = of("A100-SXM4-80GB", 4, inter=INFINIBAND)
ETHERNET = of("T4", 4, 1, Link(bandwidth=1.25 * GB, latency=30e-6))


def busbw(topology: Topology, kind: Collective, ranks: range, num_bytes: float = LARGE, **how: Any) -> float:
    """GB/s by the definition of nccl-tests."""
    n = len(ranks)
    factor = (2 if kind == "all_reduce" else 1) * (n - 1) / n
    return factor * num_bytes / collective(topology, kind, ranks, num_bytes, **how).seconds / GB


def test_a_ring_within_a_node_by_hand() -> None:
    kind, num_bytes = KINDS["NVLink3"], 2.0**26
    rate = 300 * GB * kind.efficiency
    hop = kind.latency + num_bytes / 8 / SLICES / rate
    by_hand = kind.launch + 14 * hop + 14 / 8 * num_bytes / rate
    cost = collective(A100, "all_reduce", range(8), num_bytes)
    assert cost.seconds == pytest.approx(by_hand)
    assert cost.transfer == pytest.approx(14 / 8 * num_bytes / rate)
    assert (cost.algorithm, cost.bottleneck) == ("ring", "NVLink3 within a node")
    gathered = collective(A100, "all_gather", range(8), num_bytes)
    assert gathered.seconds == pytest.approx(kind.launch + 7 * hop + 7 / 8 * num_bytes / rate)
    assert gathered == collective(A100, "reduce_scatter", range(8), num_bytes)


def test_a_small_message_goes_by_the_protocol_of_low_latency() -> None:
    kind = KINDS["NVLink3"]
    rate = 300 * GB * kind.efficiency * LOW_LATENCY_BANDWIDTH
    by_hand = kind.launch + 14 * kind.latency * LOW_LATENCY_HOP + 14 / 8 * 4096 / rate
    assert collective(A100, "all_reduce", range(8), 4096).seconds == pytest.approx(by_hand)


def test_a_ring_over_ethernet_by_hand() -> None:
    kind, num_bytes = KINDS["TCP"], 100e6
    rate = 1.25 * GB * kind.efficiency
    hop = 30e-6 + kind.chunk_bytes / rate
    ring = 6 * hop + 6 / 4 * num_bytes / rate
    assert collective(ETHERNET, "all_reduce", range(4), num_bytes).seconds == pytest.approx(ring)
    tree = 4 * (30e-6 + 1000 / 2 / SLICES / rate) + 2 * 1000 / rate / TREE_BANDWIDTH
    small = collective(ETHERNET, "all_reduce", range(4), 1000)
    assert small.algorithm == "tree"
    assert small.seconds == pytest.approx(tree)


def test_the_adapters_of_a_node_bound_a_group_over_nodes() -> None:
    whole = collective(A100, "all_reduce", range(32), LARGE)
    assert whole.bottleneck == "RDMA between nodes"
    assert busbw(A100, "all_reduce", range(32)) == pytest.approx(200 * KINDS["RDMA"].efficiency, rel=0.02)
    one_of_each = range(0, 32, 8)
    assert busbw(A100, "all_reduce", one_of_each) == pytest.approx(25 * KINDS["RDMA"].efficiency, rel=0.02)


def test_groups_that_have_an_adapter_each_do_not_slow_each_other_down() -> None:
    one_of_each = range(0, 32, 8)
    alone = collective(A100, "all_reduce", one_of_each, LARGE)
    assert collective(A100, "all_reduce", one_of_each, LARGE, sharing=8).seconds == pytest.approx(alone.seconds)


def test_groups_that_share_an_adapter_divide_it() -> None:
    topology = of("A100-SXM4-80GB", 2, inter=Link(bandwidth=25 * GB, latency=5e-6))
    alone = collective(topology, "all_reduce", (0, 8), LARGE)
    assert collective(topology, "all_reduce", (0, 8), LARGE, sharing=8).transfer == pytest.approx(8 * alone.transfer)
    assert send(topology, 0, 8, LARGE, sharing=2).transfer == pytest.approx(2 * send(topology, 0, 8, LARGE).transfer)
    assert send(topology, 0, 1, LARGE, sharing=2) == send(topology, 0, 1, LARGE)


def test_one_connection_does_not_fill_a_fast_ethernet_adapter() -> None:
    topology = of("V100-SXM2-16GB", 2, inter=Link(bandwidth=12.5 * GB, latency=30e-6, network="tcp"))
    limit = KINDS["TCP"].max_flow
    assert send(topology, 0, 8, LARGE).transfer == pytest.approx(LARGE / limit)
    assert send(topology, 0, 8, LARGE, sharing=2).transfer == pytest.approx(LARGE / limit)
    assert busbw(topology, "all_reduce", range(16)) == pytest.approx(12.5 * KINDS["TCP"].efficiency, rel=0.02)


def test_a_switch_that_sums_beats_the_ring_from_five_devices_on() -> None:
    topology = of("H200-SXM")
    assert collective(topology, "all_reduce", range(3), LARGE).algorithm == "ring"
    for n in (5, 8):
        cost = collective(topology, "all_reduce", range(n), LARGE)
        assert cost.algorithm == "multicast"
        rate = 450 * GB * KINDS["NVLink4"].multicast_efficiency
        assert cost.transfer == pytest.approx(LARGE * (1 + 1 / n) / rate)
    assert collective(topology, "all_gather", range(8), LARGE).algorithm == "ring"


def test_an_all_to_all_sends_what_is_not_its_own() -> None:
    rate = 300 * GB * KINDS["NVLink3"].efficiency
    assert collective(A100, "all_to_all", range(8), LARGE).transfer == pytest.approx(7 / 8 * LARGE / rate)
    over_nodes = collective(A100, "all_to_all", range(32), LARGE)
    rate = 200 * GB * KINDS["RDMA"].efficiency
    assert over_nodes.transfer == pytest.approx(8 * LARGE * 24 / 32 / rate)
    assert over_nodes.bottleneck == "RDMA between nodes"


def test_a_tree_of_many_nodes_does_not_slow_down_with_their_number() -> None:
    topology = of("H100-SXM5-80GB", 512, inter=Link(bandwidth=400 * GB, latency=5e-6, adapters=8))
    few, many = (collective(topology, "all_reduce", range(n), 2**26) for n in (64, 4096))
    assert few.algorithm == many.algorithm == "tree"
    assert few.seconds < many.seconds < 2.5 * few.seconds
    ring = collective(topology, "all_reduce", range(4096), 2**26, algorithm="ring")
    assert ring.seconds > 20 * many.seconds


def test_the_slowest_link_of_unlike_nodes_decides() -> None:
    fast, slow = device_types()["A100-SXM4-80GB"], device_types()["T4"]
    cluster = Cluster.parse(
        f"""
        [links]
        inter_node = {{bandwidth = "1600 Gbit/s", latency = "5 us"}}
        [[nodes]]
        devices = 4
        device = "{fast.name}"
        [[nodes]]
        devices = 4
        device = "{slow.name}"
        """,
        catalog=device_types(),
    )
    mixed = collective(Topology.of(cluster), "all_reduce", range(8), LARGE)
    assert mixed.bottleneck == "PCIe3-host within a node"
    assert mixed.transfer == pytest.approx(
        14 / 8 * LARGE / (slow.intra_node.bandwidth * KINDS["PCIe3-host"].efficiency * 0.65)  # type: ignore[union-attr]
    )


def test_one_rank_and_no_bytes_cost_nothing() -> None:
    for cost in (
        collective(A100, "all_reduce", (3,), 1e9),
        collective(A100, "all_gather", range(4), 0),
        send(A100, 2, 2, 1e9),
        send(A100, 1, 2, 0),
    ):
        assert (cost.seconds, cost.interval) == (0.0, (0.0, 0.0))


def test_what_is_no_collective_is_refused() -> None:
    wrong: Any = "all_hands"
    with pytest.raises(UsageError, match="unknown collective 'all_hands'; use one of all_reduce"):
        collective(A100, wrong, range(4), 1.0)
    for ranks, num_bytes, sharing in (((), 1.0, 1), ((0, 1), -1.0, 1), ((0, 1), 1.0, 0)):
        with pytest.raises(UsageError, match="needs a rank"):
            collective(A100, "all_reduce", ranks, num_bytes, sharing=sharing)
    with pytest.raises(UsageError, match="no algorithm 'tree' for all_gather"):
        collective(A100, "all_gather", range(16), 1.0, algorithm="tree")


# --- measured curves --------------------------------------------------------------------------------------------------


def curve(**given: Any) -> LinkCurve:
    values: dict[str, Any] = {
        "source": "A100-SXM4-80GB",
        "target": "A100-SXM4-80GB",
        "devices": 8,
        "ranks": 8,
        "within": "node",
        "operation": "all_reduce",
        "sizes": (2.0**20, 2.0**30),
        "bandwidths": (1 * GB, 10 * GB),
    }
    return LinkCurve(**(values | given))


def test_a_measured_collective_comes_before_the_model() -> None:
    topology = of("A100-SXM4-80GB", curves=[curve()])
    cost = collective(topology, "all_reduce", range(8), 2**30)
    assert cost.algorithm == "measured"
    assert cost.seconds == pytest.approx(2**30 / (10 * GB))
    assert collective(topology, "all_reduce", range(8), 2**32).seconds == pytest.approx(4 * cost.seconds)
    smallest = collective(topology, "all_reduce", range(8), 2**20).seconds
    assert collective(topology, "all_reduce", range(8), 1).seconds == pytest.approx(smallest)
    assert collective(topology, "all_gather", range(8), 2**30).algorithm == "ring"


def test_a_curve_of_other_devices_says_nothing() -> None:
    for other in ({"source": "T4"}, {"within": "nodes"}, {"operation": "all_gather"}):
        topology = of("A100-SXM4-80GB", curves=[curve(**other)])
        assert collective(topology, "all_reduce", range(8), 2**30) == collective(
            of("A100-SXM4-80GB"), "all_reduce", range(8), 2**30
        )


def test_a_curve_of_fewer_ranks_is_scaled_as_the_model_is() -> None:
    plain = of("A100-SXM4-80GB")
    topology = of("A100-SXM4-80GB", curves=[curve(ranks=4, devices=4)])
    model = [collective(plain, "all_reduce", range(n), 2**30).seconds for n in (4, 8)]
    measured = [collective(topology, "all_reduce", range(n), 2**30).seconds for n in (4, 8)]
    assert measured[0] == pytest.approx(2**30 / (10 * GB))
    assert measured[1] / measured[0] == pytest.approx(model[1] / model[0])


def test_a_group_of_unlike_devices_is_told_by_curves_among_them() -> None:
    a, b = device_types()["A100-SXM4-80GB"], device_types()["T4"]
    cluster = Cluster.of([("0", a), ("1", a), ("2", b), ("3", b)], inter=INFINIBAND)
    between: dict[str, Any] = {"within": "nodes", "devices": 1}
    pairs = [
        curve(**between, ranks=4, bandwidths=(9 * GB, 9 * GB)),
        curve(**between, ranks=4, source=b.name, target=b.name, bandwidths=(3 * GB, 3 * GB)),
    ]
    slowest = collective(Topology.of(cluster, pairs), "all_reduce", range(4), 2**30)
    assert slowest.seconds == pytest.approx(2**30 / (3 * GB))
    mixed = curve(
        **between, ranks=4, target=b.name, types=(a.name, a.name, b.name, b.name), bandwidths=(2 * GB, 2 * GB)
    )
    together = collective(Topology.of(cluster, [*pairs, mixed]), "all_reduce", range(4), 2**30)
    assert together.seconds == pytest.approx(2**30 / (2 * GB))
    alone = collective(Topology.of(cluster, pairs[:1]), "all_reduce", range(4), 2**30)
    assert alone.algorithm == "ring"


def test_a_send_that_was_measured_one_way_tells_of_the_other() -> None:
    a, b = device_types()["A100-SXM4-80GB"], device_types()["T4"]
    cluster = Cluster.of([("0", a), ("1", b)], inter=INFINIBAND)
    there = curve(operation="send", ranks=2, devices=1, within="nodes", target=b.name, bandwidths=(1 * GB, 2 * GB))
    back = curve(
        operation="send", ranks=2, devices=1, within="nodes", source=b.name, target=a.name, bandwidths=(1 * GB, 4 * GB)
    )
    one_way, both = (Topology.of(cluster, curves) for curves in ([there], [there, back]))
    assert send(one_way, 1, 0, 2**30).seconds == send(one_way, 0, 1, 2**30).seconds == 2**30 / (2 * GB)
    assert send(both, 1, 0, 2**30).seconds == 2**30 / (4 * GB)


def test_measured_sends_carry_collectives_that_were_not_measured() -> None:
    sends = curve(operation="send", ranks=2, devices=1, within="nodes", sizes=(1e3, 1e9), bandwidths=(1e7, 1e9))
    topology = of("A100-SXM4-80GB", 2, 1, INFINIBAND, curves=[sends])
    assert send(topology, 0, 1, 1e9).seconds == pytest.approx(1.0)
    ring = collective(topology, "all_reduce", range(2), 2e9)
    assert ring.seconds == pytest.approx(2.0)


def test_a_fitted_polynomial_is_not_believed_where_it_was_not_fitted() -> None:
    # 20 (log10(bytes) - 6) GB/s is negative below 1 MB, and more than was measured above 30 MB.
    fitted = curve(
        operation="send", ranks=2, within="node", sizes=(), bandwidths=(), coefficients=(20.0, -120.0), maximum=30 * GB
    )
    topology = of("A100-SXM4-80GB", curves=[fitted])
    seconds = [send(topology, 0, 1, 10.0**exponent).seconds for exponent in range(1, 12)]
    assert all(0 < small <= large for small, large in pairwise(seconds))
    assert send(topology, 0, 1, 1e7).seconds == pytest.approx(1e7 / (20 * GB), rel=0.01)
    assert send(topology, 0, 1, 1e11).seconds == pytest.approx(1e11 / (30 * GB), rel=0.01)


def test_a_curve_that_is_nowhere_positive_says_nothing() -> None:
    useless = curve(operation="send", ranks=2, devices=2, sizes=(), bandwidths=(), coefficients=(-1.0,))
    assert send(of("A100-SXM4-80GB", curves=[useless]), 0, 1, 1e6) == send(of("A100-SXM4-80GB"), 0, 1, 1e6)


# --- published measurements -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "kind", "num_ranks", "measured"),
    [
        (of("A100-SXM4-80GB"), "all_reduce", 8, 234.9),
        (of("H200-SXM"), "all_reduce", 8, 482.3),
        (of("H200-SXM"), "all_gather", 8, 361.4),
        (of("B200-SXM"), "all_reduce", 8, 845.7),
        (of("V100-SXM2-32GB"), "all_reduce", 8, 134.5),
        (of("V100-SXM2-32GB"), "all_reduce", 4, 85.4),
        (of("V100-SXM2-32GB"), "all_reduce", 2, 22.55),
        (of("MI300X"), "all_reduce", 8, 312.9),
        (of("MI300X"), "all_reduce", 2, 47.7),
        (of("H200-SXM", 4, inter=Link(bandwidth=400e9, latency=15e-6, network="efa")), "all_reduce", 32, 364.9),
        (of("A100-SXM4-80GB", 3, inter=Link(bandwidth=100e9, latency=5e-6, adapters=4)), "all_reduce", 24, 96.0),
    ],
)
def test_large_collectives_are_within_8_percent_of_measurements(
    topology: Topology, kind: Collective, num_ranks: int, measured: float
) -> None:
    """Figures of ``planner/data/network.csv``, GB/s."""
    assert busbw(topology, kind, range(num_ranks)) == pytest.approx(measured, rel=0.08)


def test_every_kind_of_link_prices_every_collective() -> None:
    kinds: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    for name, kind in product(device_types(), kinds):
        cost = collective(of(name, 2, 4, INFINIBAND), kind, range(8), 1e6)
        assert math.isfinite(cost.seconds)
        assert 0 < cost.interval[0] < cost.seconds < cost.interval[1]
        assert cost.seconds == pytest.approx(cost.latency + cost.transfer)
