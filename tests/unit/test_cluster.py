"""Cluster files: what they mean, and what each mistake in one is answered with."""

from dataclasses import replace
from pathlib import Path

import pytest

from whale.errors import InputFileError, PlanMismatchError, UsageError
from whale.ir.cluster import Cluster, DeviceType, HostMemory, Link
from whale.ir.plan import cluster_hash
from whale.planner.catalog import device_types
from whale.planner.cost.hosts import host_of, host_text, link_to_host

TOML = """\
[links]
intra_node = {bandwidth = "300 GB/s", latency = "5 us"}
inter_node = {bandwidth = "100 Gbit/s", latency = "15 us"}
[[nodes]]
count = 2
devices = 8
device = "A100-SXM4-80GB"
[[nodes]]
count = 1
devices = 4
device = "lab-card"
[nodes.links]
inter_node = {bandwidth = "10 Gbit/s", latency = "50 us"}
[device_types.lab-card]
speed = {float32 = "9.3 TFLOP/s", float16 = "18.7 TFLOP/s"}
memory = "16 GiB"
memory_bandwidth = "732 GB/s"
"""
YAML = """\
links:
  intra_node: {bandwidth: 300 GB/s, latency: 5 us}
  inter_node: {bandwidth: 100 Gbit/s, latency: 15 us}
nodes:
  - count: 2
    devices: 8
    device: A100-SXM4-80GB
  - count: 1
    devices: 4
    device: lab-card
    links:
      inter_node: {bandwidth: 10 Gbit/s, latency: 50 us}
device_types:
  lab-card:
    speed: {float32: 9.3 TFLOP/s, float16: 18.7 TFLOP/s}
    memory: 16 GiB
    memory_bandwidth: 732 GB/s
"""
CARD = DeviceType.of("card", speed={"float32": 2e12}, memory_bytes=2**30, memory_bandwidth=1e11)


def parse(text: str) -> Cluster:
    return Cluster.parse(text, source="cluster.toml", catalog=device_types())


def test_ranks_run_through_the_nodes_in_the_order_of_the_file() -> None:
    cluster = parse(TOML)
    assert [node.name for node in cluster.nodes] == ["node0", "node1", "node2"]
    assert [node.ranks for node in cluster.nodes] == [tuple(range(8)), tuple(range(8, 16)), (16, 17, 18, 19)]
    assert [device.rank for device in cluster.devices] == list(range(20))
    last = cluster.devices[19]
    assert (last.name, last.node, last.memory_bytes, last.speed("float16")) == ("lab-card:19", "node2", 2**34, 18.7e12)
    assert cluster.devices[0].speed("bfloat16") == 312e12


def test_links_are_the_defaults_or_the_nodes_own_and_the_slower_one_counts() -> None:
    cluster = parse(TOML)
    assert cluster.link(0, 7) == Link(bandwidth=300e9, latency=5e-6)
    assert cluster.link(0, 8) == Link(bandwidth=12.5e9, latency=15e-6)
    assert cluster.link(0, 16) == cluster.link(16, 0) == Link(bandwidth=1.25e9, latency=50e-6)


def test_adapters_and_network_are_of_the_link_between_nodes() -> None:
    cluster = parse(TOML.replace('"15 us"', '"15 us", adapters = 8, network = "rdma"'))
    assert cluster.link(0, 8) == Link(bandwidth=12.5e9, latency=15e-6, adapters=8, network="rdma")
    assert cluster.link(0, 16).adapters is None
    assert parse(TOML).link(0, 8).num_adapters == 1


def test_known_devices_bring_the_link_of_their_node() -> None:
    cluster = parse('[[nodes]]\ndevices = 2\ndevice = "H100-SXM5-80GB"\n')
    assert cluster.link(0, 1) == Link(bandwidth=450e9, latency=3e-6)


def test_yaml_with_the_same_keys_is_the_same_cluster() -> None:
    assert Cluster.parse(YAML, "yaml", catalog=device_types()) == parse(TOML)


def test_the_same_file_gives_the_same_cluster(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(TOML)
    assert Cluster.load(path, catalog=device_types()) == parse(TOML)
    assert hash(parse(TOML)) == hash(parse(TOML))


def test_a_cluster_is_written_as_a_file_that_reads_back() -> None:
    memory = 'hosts = ["a", "b"]\nhost_memory = {size = "512 GiB", device_link = "25 GB/s"}\n'
    text = TOML.replace('device = "A100-SXM4-80GB"\n', f'device = "A100-SXM4-80GB"\n{memory}')
    text = text.replace('device = "lab-card"\n', 'device = "lab-card"\nname = "lab"\nhosts = ["c"]\n')
    text = text.replace('latency = "15 us"}', 'latency = "15 us", adapters = 2, network = "tcp"}')
    cluster = parse(text)
    written = cluster.dumps(catalog=device_types())
    assert "lab-card" in written and 'A100-SXM4-80GB": {' not in written
    assert Cluster.parse(written, "json", catalog=device_types()) == cluster
    alone = Cluster.parse(cluster.dumps(), "json")
    assert (alone.nodes, alone.devices[0].type.rates) == (cluster.nodes, cluster.devices[0].type.rates)
    mixed = Cluster.of([("a", CARD), ("a", replace(CARD, name="other"))])
    with pytest.raises(UsageError, match=r"node a has devices of several types \(card, other\)"):
        mixed.dumps()


def test_a_definition_in_the_file_wins_over_the_catalog() -> None:
    cluster = parse(TOML.replace("lab-card", "T4"))
    assert cluster.devices[19].speed("float32") == 9.3e12


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("count = 2", "cuont = 2", 5, "unknown key 'cuont'; did you mean 'count'?"),
        ("[links]", "[lniks]", 1, "unknown key 'lniks'; did you mean 'links'?"),
        ("latency", "lat", 2, "unknown key 'lat'"),
        ("[links]", "'[key]' = 1\n[links]", 1, "unknown key '[key]'"),
        ("memory =", "mem =", 16, "unknown key 'mem'"),
        ("count = 2", "count = 0", 5, "nodes.0.count: must be at least 1, not 0"),
        ("count = 2", "count = true", 5, "must be a whole number, not True"),
        ("count = 2", "count = 2.0", 5, "must be a whole number, not 2.0"),
        ("count = 2", "count = 999999", 5, "nodes.0.count"),
        ("count = 2", "count = 131072", 4, "more than 131072 devices"),
        ("devices = 8", "", 4, "the key 'devices' is missing"),
        (
            "A100-SXM4-80GB",
            "A100",
            7,
            "'A100' is A100-SXM4-40GB, A100-SXM4-80GB, A100-PCIe-40GB or A100-PCIe-80GB; say",
        ),
        ("A100-SXM4-80GB", "A100 SXM4", 7, "'A100 SXM4' is A100-SXM4-40GB or A100-SXM4-80GB; say which"),
        ("A100-SXM4-80GB", "A100-SXM4-81GB", 7, "unknown device type 'A100-SXM4-81GB'; did you mean 'A100-SXM4-80GB'"),
        ('= "lab-card"', '= "lab-crad"', 11, "did you mean 'lab-card'?"),
        ("float16", "fp16", 15, "unknown number type"),
        ('"9.3 TFLOP/s"', "9.3", 15, "with its unit"),
        ('"16 GiB"', '"16 Gib"', 16, "unknown unit 'Gib'"),
        ('"16 GiB"', '"1e30 GiB"', 16, "1 EiB"),
        ('"16 GiB"', '"0.1 B"', 16, "1 EiB"),
        (
            '"16 GiB"',
            '"1e-9 GiB"',
            16,
            "device_types.lab-card.memory: a memory lies between 1 KiB and 1 EiB, not 1e-9 GiB",
        ),
        ('"300 GB/s"', '"1e30 Gbit/s"', 2, "a bandwidth lies between 1 kB/s and 100 PB/s"),
        ('"5 us"', '"1e9 s"', 2, "a latency lies between 0 and 60 s"),
        ('"9.3 TFLOP/s"', '"1e30 TFLOP/s"', 15, "a speed lies between 1 MFLOP/s"),
        ('"5 us"', "nan", 2, "finite"),
        (
            '{float32 = "9.3 TFLOP/s", float16 = "18.7 TFLOP/s"}',
            "{}",
            15,
            "speed: must have at least one entry, not {}",
        ),
        ("[links]", "format_version = 2\n[links]", 1, "format_version"),
        ("count = 2", 'count = 2\nname = "node"', 4, "two nodes are named"),
        ('"15 us"}', '"15 us", adapter = 8}', 3, "unknown key 'adapter'; did you mean 'adapters'?"),
        ('"15 us"}', '"15 us", adapters = 0}', 3, "links.inter_node.adapters"),
        ('"15 us"}', '"15 us", adapters = "8"}', 3, "must be a whole number, not '8'"),
        ('"15 us"}', '"15 us", adapters = 1025}', 3, "must be at most 1024"),
        ('"50 us"}', '"50 us", network = "infiniband"}', 13, "'tcp', 'rdma' or 'efa'"),
        ('"5 us"}', '"5 us", adapters = 8}', 2, "unknown key 'adapters'; known here: bandwidth, latency"),
    ],
)
def test_a_mistake_is_answered_with_its_line(old: str, new: str, line: int, message: str) -> None:
    text = TOML.replace(old, new, 1)
    if message.startswith("two nodes"):
        text = text.replace("count = 1", 'name = "node1"')
        line = 9
    with pytest.raises(InputFileError) as refusal:
        parse(text)
    assert message in str(refusal.value)
    assert str(refusal.value).startswith(f"cluster.toml:{line}:")


def test_a_link_that_is_needed_must_be_given() -> None:
    own_type = TOML[TOML.index("[device_types") :]
    with pytest.raises(InputFileError, match="no intra_node link"):
        parse('[[nodes]]\ndevices = 2\ndevice = "lab-card"\n' + own_type)
    with pytest.raises(InputFileError, match="no inter_node link"):
        parse('[[nodes]]\ncount = 2\ndevices = 1\ndevice = "T4"\n')
    assert len(parse('[[nodes]]\ndevices = 1\ndevice = "T4"\n').devices) == 1


def test_several_mistakes_are_counted_and_the_first_is_shown() -> None:
    with pytest.raises(InputFileError, match=r"cluster.toml:5: unknown key 'cuont'.*and 1 more"):
        parse(TOML.replace("count = 2", "cuont = 2").replace('"16 GiB"', '"16"'))


def test_a_cluster_of_nothing_is_refused() -> None:
    with pytest.raises(InputFileError, match="'nodes' is missing"):
        parse("")
    with pytest.raises(InputFileError, match="nodes"):
        parse("nodes = []")


def test_nodes_may_be_named() -> None:
    cluster = parse('[[nodes]]\ndevices = 1\ndevice = "T4"\nname = "left"\n')
    assert cluster.nodes[0].name == cluster.devices[0].node == "left"


def test_equal_devices_need_no_file() -> None:
    cluster = Cluster.homogeneous(4, CARD, num_devices_per_node=2, intra=Link(bandwidth=1e9, latency=0.0))
    assert [device.node for device in cluster.devices] == ["node0", "node0", "node1", "node1"]
    assert cluster.link(2, 3).bandwidth == 1e9
    with pytest.raises(UsageError, match="no inter_node link is known between ranks 1 and 2"):
        cluster.link(1, 2)
    assert len(Cluster.homogeneous(3).devices) == 3
    with pytest.raises(UsageError, match="at least one"):
        Cluster.homogeneous(0)
    with pytest.raises(UsageError, match="cannot lie on nodes of 2"):
        Cluster.homogeneous(3, num_devices_per_node=2)


def test_devices_found_by_a_launch_make_a_cluster() -> None:
    cluster = Cluster.of([("a", CARD), ("a", CARD), ("b", CARD)])
    assert [node.ranks for node in cluster.nodes] == [(0, 1), (2,)]
    with pytest.raises(UsageError, match="not consecutive"):
        Cluster.of([("a", CARD), ("b", CARD), ("a", CARD)])
    with pytest.raises(UsageError, match="rank 3 does not exist"):
        cluster.node_of(3)


def test_a_number_type_that_is_not_listed_runs_as_float32() -> None:
    half_only = DeviceType.of("h", speed={"float16": 4e12, "float8": 8e12}, memory_bytes=1, memory_bandwidth=1.0)
    assert CARD.speed("bfloat16") == 2e12
    assert half_only.speed("float32") == 4e12
    with pytest.raises(UsageError, match="int4"):
        CARD.speed("int4")


@pytest.mark.parametrize("speed", [{}, {"fp32": 1.0}, {"float32": 0.0}])
def test_a_device_type_without_a_usable_speed_is_refused(speed: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="'x'"):
        DeviceType.of("x", speed=speed, memory_bytes=1, memory_bandwidth=1.0)


def test_the_schema_of_the_file_is_published() -> None:
    schema = Cluster.schema()
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {"format_version", "links", "host_memory", "nodes", "device_types"}
    between = schema["$defs"]["_InterNodeLink"]
    assert set(between["properties"]) == {"bandwidth", "latency", "adapters", "network"}
    assert between["required"] == ["bandwidth", "latency"]


def test_the_catalog_knows_what_the_data_sheets_say() -> None:
    types = device_types()
    assert len(types) == 53
    assert types["A100-SXM4-80GB"].speed("float16") == 312e12
    assert types["H100-SXM5-80GB"].memory_bandwidth == 3350e9
    assert types["V100-SXM2-16GB"].speed("bfloat16") == types["V100-SXM2-16GB"].speed("float32") == 15.7e12
    assert types["V100-SXM2-16GB"].intra_node == Link(bandwidth=150e9, latency=3e-6)
    assert types["MI250X (2 GCDs)"].memory_bytes == 2 * types["MI250X (per GCD)"].memory_bytes == 128 * 2**30
    for name, type_ in types.items():
        assert type_.name == name
        assert 2**32 < type_.memory_bytes < 2**39


def test_a_table_of_nodes_is_told_apart_from_a_list_of_them() -> None:
    with pytest.raises(InputFileError, match=r"nodes: must be a list of tables; write \[\[nodes\]\] for each"):
        parse('[nodes]\ndevices = 2\ndevice = "T4"\n')


HOSTS = TOML.replace("count = 2\n", 'count = 2\nhosts = ["fast-1", "fast-2"]\n').replace(
    "count = 1\n", 'count = 1\nhosts = ["slow"]\n'
)


def test_nodes_lie_where_the_ranks_of_their_hosts_are() -> None:
    cluster = parse(HOSTS).on_hosts(["slow.lab"] * 4 + ["fast-2.lab"] * 8 + ["fast-1.lab"] * 8)
    assert [(node.name, node.ranks[0], len(node.ranks)) for node in cluster.nodes] == [
        ("node2", 0, 4),
        ("node1", 4, 8),
        ("node0", 12, 8),
    ]
    assert [cluster.devices[rank].name for rank in (0, 4)] == ["lab-card:0", "A100-SXM4-80GB:4"]
    assert [device.rank for device in cluster.devices] == list(range(20))


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (["slow"] * 4 + ["fast-1"] * 16, "node0 on host fast-1 needs 8 ranks, but 16 run there"),
        (["slow"] * 3 + ["fast-1"] * 8 + ["fast-2"] * 9, "node1 on host fast-2 needs 8 ranks, but 9 run there"),
        (["slow"] * 3 + ["fast-1"] * 8 + ["fast-2"] * 8 + ["slow"], "are [0, 1, 2, 19], which are not consecutive"),
    ],
)
def test_ranks_on_other_hosts_are_refused(hosts: list[str], message: str) -> None:
    with pytest.raises(PlanMismatchError) as error:
        parse(HOSTS).on_hosts(hosts)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('["fast-1", "fast-2"]', '["fast-1"]', "count is 2, with 1 hosts"),
        ('hosts = ["slow"]', "", "count is 1, with 0 hosts"),
        ('"slow"', '"fast-1"', "two nodes are on host 'fast-1'"),
    ],
)
def test_hosts_are_named_once_for_all_nodes(old: str, new: str, message: str) -> None:
    with pytest.raises(InputFileError) as error:
        parse(HOSTS.replace(old, new))
    assert message in str(error.value)


MEMORY = """
[links]
inter_node = {bandwidth = "50 Gbit/s", latency = "30 us"}
[[nodes]]
devices = 8
device = "V100-SXM2-32GB"
[[nodes]]
devices = 2
device = "A100-SXM4-80GB"
host_memory = {size = "1 TiB", device_link = "20 GB/s"}
"""


def test_a_node_has_memory_of_its_own() -> None:
    plain = parse(MEMORY)
    assert plain.nodes[0].host_memory == HostMemory()
    assert plain.nodes[1].host_memory == HostMemory(size_bytes=2**40, device_link=20e9)
    told = parse('host_memory = {size = "736 GiB", bandwidth = "180 GB/s"}' + MEMORY)
    assert told.nodes[0].host_memory == HostMemory(size_bytes=736 * 2**30, bandwidth=180e9)
    assert told.nodes[1].host_memory == HostMemory(size_bytes=2**40, bandwidth=180e9, device_link=20e9)
    assert cluster_hash(told) != cluster_hash(plain)


def test_memory_of_hosts_that_is_not_given_is_assumed_and_said() -> None:
    plain = parse(MEMORY)
    first, second = (host_of(plain, node) for node in plain.nodes)
    assert (first.memory_bytes, first.assumed) == (512 * 2**30, ("memory_bytes", "bandwidth"))
    assert (second.memory_bytes, second.assumed) == (2**40, ("bandwidth",))
    assert [link_to_host(plain, rank) for rank in (0, 8)] == [pytest.approx(0.8 * 15.75e9), 20e9]
    said = list(host_text(plain))
    assert any("size 512.0 GiB, bandwidth 200 GB/s; host_memory in the cluster file" in text for text in said)
    whole = 'host_memory = {size = "736 GiB", bandwidth = "180 GB/s", device_link = "11 GB/s"}'
    assert not list(host_text(parse(whole + MEMORY)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('host_memory = {size = "736"}', "host_memory.size"),
        ('host_memory = {memory = "736 GiB"}', "unknown key 'memory'"),
        ('host_memory = {device_link = "12 GiB"}', "host_memory.device_link"),
    ],
)
def test_a_mistake_in_the_memory_of_hosts_is_named(line: str, message: str) -> None:
    with pytest.raises(InputFileError, match=message):
        parse(line + MEMORY)
