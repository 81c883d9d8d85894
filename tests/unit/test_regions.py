"""Regions of a cluster: what a file says, what messages and sums between them share, and plans that avoid them."""

from __future__ import annotations

from math import isclose

import pytest

from tests.chains import GIB, chain, layer
from whale.errors import InputFileError
from whale.ir.cluster import Cluster
from whale.ir.plan import cluster_hash
from whale.planner.catalog import device_types
from whale.planner.cost.stage import CostModel
from whale.planner.network.communication import collective, send
from whale.planner.network.topology import Topology
from whale.planner.search import SearchSettings, StageChoice, search
from whale.planner.search.evaluate import evaluate
from whale.planner.search.space import Chain, Mesh, pools_of
from whale.planner.search.table import CostTable

A100 = "A100-SXM4-80GB"


def text(*regions: str, wide: str = "10 Gbit/s", nodes: int = 2, latency: str = "20 ms") -> str:
    """The file of some nodes of eight A100 in each of these regions; none: in no region."""
    lines = [
        "[links]",
        'inter_node = {bandwidth = "1600 Gbit/s", latency = "5 us", adapters = 8}',
        f'inter_region = {{bandwidth = "{wide}", latency = "{latency}"}}',
    ]
    for name in regions or ("",):
        lines.append(f'[[nodes]]\ncount = {nodes}\ndevices = 8\ndevice = "{A100}"')
        lines += [f'region = "{name}"'] if name else []
    return "\n".join(lines)


def cluster(*regions: str, **links: object) -> Cluster:
    return Cluster.parse(text(*regions, **links), catalog=device_types())  # type: ignore[arg-type]


def test_a_file_says_in_which_region_nodes_are_and_how_these_are_linked() -> None:
    found = cluster("north", "south")
    assert [node.region and node.region.name for node in found.nodes] == ["north", "north", "south", "south"]
    link = found.link(0, 31)
    assert (link.bandwidth, link.latency) == (1.25e9, 0.02)
    assert Cluster.parse(found.dumps(catalog=device_types()), "json", catalog=device_types()) == found
    assert len({cluster_hash(cluster(*names)) for names in ((), ("north",), ("north", "south"))}) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (text("north") + f'\n[[nodes]]\ndevices = 8\ndevice = "{A100}"', "some nodes are in a region and some in none"),
        (text("north", "south").replace("inter_region", "#"), "no inter_region link of region 'north' is given"),
        (
            text("north")
            + f'\n[[nodes]]\ndevices = 8\ndevice = "{A100}"\nregion = "north"\n'
            + 'links = {inter_region = {bandwidth = "1 Gbit/s", latency = "1 ms"}}',
            "the nodes of region 'north' have other inter_region links",
        ),
    ],
)
def test_regions_that_are_not_described_are_refused(given: str, message: str) -> None:
    with pytest.raises(InputFileError, match=message):
        Cluster.parse(given, catalog=device_types())


def test_a_message_to_another_region_is_as_slow_as_the_way_there() -> None:
    topology = Topology.of(cluster("north", "south"))
    path = topology.link(1, 17)
    assert (path.bandwidth, path.latency) == (1.25e9, 0.02)
    assert path.resources == (
        "node0 adapter 1 out",
        "node2 adapter 1 in",
        "region north gateway 0 out",
        "region south gateway 0 in",
    )
    assert send(topology, 1, 17, 1e9).bottleneck == "TCP between regions"
    assert topology.link(1, 9).bandwidth == 25e9 and len(topology.link(1, 9).resources) == 2


def test_a_wide_way_out_of_a_region_carries_several_messages_at_full_speed() -> None:
    topology = Topology.of(cluster("north", "south", wide="1000 Gbit/s", nodes=32))
    ways = {topology.link(8 * node, 256).resources[2] for node in range(32)}
    assert len(ways) == 28  # 125 GB/s in parts of the 4.5 GB/s that a connection reaches
    assert isclose(topology.link(0, 256).bandwidth, 125e9 / 28)


def test_a_sum_over_regions_takes_what_the_way_out_of_one_allows() -> None:
    near, far = (Topology.of(cluster(*names, nodes=4 // len(names))) for names in (("north",), ("north", "south")))
    size = 2**30
    cost = collective(far, "all_reduce", range(32), size)
    assert cost.bottleneck == "TCP between regions" and cost.algorithm == "ring"
    assert isclose(cost.transfer, 2 * 31 / 32 * size / (1.25e9 * 0.92), rel_tol=1e-6)
    assert collective(far, "all_reduce", range(16), size) == collective(near, "all_reduce", range(16), size)
    shared = collective(far, "all_reduce", range(0, 32, 8), size, sharing=far.sharing(range(0, 32, 8), 8))
    alone = collective(far, "all_reduce", range(0, 32, 8), size)
    assert isclose(shared.transfer, 8 * alone.transfer, rel_tol=1e-6)


def test_an_exchange_of_all_with_all_sends_what_is_for_other_regions() -> None:
    far, size = Topology.of(cluster("north", "south")), 2**28
    cost = collective(far, "all_to_all", range(32), size)
    assert isclose(cost.transfer, 16 * 16 * size / 32 / (1.25e9 * 0.92), rel_tol=1e-6)


def test_a_short_sum_over_many_nodes_goes_up_and_down_a_tree() -> None:
    far = Topology.of(cluster("north", "south", nodes=64))
    cost = collective(far, "all_reduce", range(1024), 4)
    assert cost.algorithm == "tree" and 2 * 0.02 < cost.seconds < 2 * 0.02 + 0.01


def test_one_region_is_as_none() -> None:
    alone, none = cluster("north", nodes=4), cluster(nodes=4)
    for kind in ("all_reduce", "all_gather", "all_to_all"):
        one, other = (collective(Topology.of(own), kind, range(32), 1e8) for own in (alone, none))
        assert one == other
    assert send(Topology.of(alone), 0, 31, 1e8) == send(Topology.of(none), 0, 31, 1e8)


WIDE = chain([layer({A100: 0.01}, output=1e9)], [0] * 8)
PROFILE = chain([layer({A100: 0.01}, parameters=5e8, output=1e5)], [0] * 8)


def test_sums_of_several_stages_share_the_way_out_of_a_region() -> None:
    two = cluster("north", "south", latency="10 us")

    def exposed(*stages: tuple[int, ...]) -> float:
        parts = [
            StageChoice(first=8 // len(stages) * index, last=8 // len(stages) * (index + 1), ranks=ranks, data=2,
                        tensor=1, rows=(1, 1))
            for index, ranks in enumerate(stages)
        ]  # fmt: skip
        found = evaluate(PROFILE, two, parts, micro_batches=2)
        return sum(one.seconds for one in found.workload.reductions if 0 in one.ranks)

    assert isclose(exposed((0, 16), (8, 24)), exposed((0, 16)), rel_tol=0.05)  # half of the bytes at half of the speed


def test_all_messages_between_two_stages_share_the_way_out_of_a_region() -> None:
    far = cluster("north", "south", nodes=8, latency="10 us")

    def hop(replicas: int) -> float:
        ranks = (tuple(range(0, 8 * replicas, 8)), tuple(range(64, 64 + 8 * replicas, 8)))
        parts = [
            StageChoice(first=4 * index, last=4 * index + 4, ranks=own, data=replicas, tensor=1, rows=(1,) * replicas)
            for index, own in enumerate(ranks)
        ]
        (link,) = {one.bandwidth for one in evaluate(WIDE, far, parts, micro_batches=2).workload.links}
        return 1 / link

    assert isclose(hop(8), 8 * hop(1), rel_tol=0.01)


def test_the_search_gives_a_stage_on_few_nodes_their_ways_out_of_a_region_alone() -> None:
    far = cluster("north", "south", wide="1000 Gbit/s", nodes=28, latency="10 us")
    assert Topology.of(far).gateways(pools_of(far)[0].region) == 28  # type: ignore[arg-type]
    prices = CostModel.of(WIDE, far, precision="fp32")
    table = CostTable(prices=prices, pools=pools_of(far), chain=Chain.of((), len(WIDE.layers), None))

    def hop(nodes: int) -> float:
        meshes = Mesh((8 * nodes, 0), 1), Mesh((0, 8 * nodes), 1)
        return max(table.hops(*meshes, 8 * nodes, 2))

    assert isclose(hop(1), hop(28), rel_tol=0.01)  # of as many bytes for each node


@pytest.mark.parametrize("wide", ["1 Mbit/s", "100 Mbit/s", "10 Gbit/s"])
def test_the_search_keeps_sums_within_regions(wide: str) -> None:
    two = cluster("north", "south", wide=wide)
    assert [len(pool.ranks) for pool in pools_of(two)] == [16, 16]
    best = search(PROFILE, two, batch=64, settings=SearchSettings(precision="fp32")).best
    regions = [{two.node_of(rank).region for rank in stage.ranks} for stage in best.stages]
    assert all(len(one) == 1 for one in regions)
    alone = search(PROFILE, cluster("north"), batch=64, settings=SearchSettings(precision="fp32")).best
    assert best.prediction.step_seconds < 1.05 * alone.prediction.step_seconds
    assert len({one.pop() for one in regions}) == (2 if wide == "10 Gbit/s" else 1)
    assert best.prediction.memory and max(one.total for one in best.prediction.memory) < 80 * GIB
