"""Effects of a testbed on a machine, without root."""

from pathlib import Path

import pytest

from benchmarks.testbed import Description, bed, missing, network
from benchmarks.testbed.cgroups import Hierarchy, find_hierarchy
from whale.errors import InputFileError, UsageError, WhaleError
from whale.ir.cluster import Cluster

FILE = """
[links]
inter_node = {bandwidth = "1 Gbit/s"}
[[nodes]]
count = 2
device = "cpu-50"
[[nodes]]
devices = 2
device = "cpu-25"
links.inter_node = {bandwidth = "200 Mbit/s", latency = "2 ms"}
[device_types]
cpu-50 = {cores = 0.5, memory = "2 GiB"}
cpu-25 = {cores = 0.25, memory = "1 GiB"}
"""


def test_ranks_are_numbered_through_the_nodes() -> None:
    described = Description.parse(FILE)
    places = [(d.rank, d.node, d.local_rank, d.cores, d.memory_bytes >> 30) for d in described.devices]
    assert places == [(0, 0, 0, 0.5, 2), (1, 1, 0, 0.5, 2), (2, 2, 0, 0.25, 1), (3, 2, 1, 0.25, 1)]
    assert described.cores == 1.5
    assert [link.bandwidth for link in described.node_links if link] == [1.25e8, 1.25e8, 2.5e7]


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ('device = "cpu-25"', 'device = "gpu"', 9, "unknown device type 'gpu'; known here: cpu-50, cpu-25"),
        ("cores = 0.25", "cores = 0.05", 13, "greater than or equal to 0.1"),
        ("cores = 0.25", "cores = 2.0", 13, "less than or equal to 1"),
        ("count = 2", "cuont = 2", 5, "cuont"),
        ('"1 GiB"', '"1"', 13, "no unit"),
        ('inter_node = {bandwidth = "1 Gbit/s"}', "", None, "several nodes need links"),
        ("count = 2", "count = 200", 4, "more than 200 nodes"),
        ("cpu-25 =", '"../../etc" =', 13, "pattern"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(old: str, new: str, line: int | None, message: str) -> None:
    assert old in FILE
    with pytest.raises(InputFileError, match=message) as caught:
        Description.parse(FILE.replace(old, new), source="testbed.toml")
    assert caught.value.path == "testbed.toml"
    assert caught.value.line == line


def test_its_cluster_file_is_one_that_whale_reads() -> None:
    cluster = Cluster.parse(Description.parse(FILE).cluster_file())
    speeds = [device.speed("float32") for device in cluster.devices]
    assert [speed / speeds[-1] for speed in speeds] == [2, 2, 1, 1]
    assert [len(node.ranks) for node in cluster.nodes] == [1, 1, 2]
    assert cluster.link(0, 1).bandwidth == 1.25e8
    assert cluster.link(0, 3).bandwidth == 2.5e7
    assert cluster.link(0, 3).latency > 2e-3


def test_both_ends_of_each_cable_are_throttled_in_the_namespaces_of_the_testbed() -> None:
    commands = [" ".join(command) for command in network.make("bed", Description.parse(FILE).node_links)]
    throttles = [c for c in commands if "tbf" in c]
    assert len(throttles) == 6
    assert "tc -n bed-node0 qdisc add dev eth0 root handle 1: tbf rate 1000000000bit burst 125000b" in throttles[0]
    assert "tc -n bed-switch qdisc add dev port0 root handle 1: tbf rate 1000000000bit" in throttles[1]
    assert "rate 200000000bit burst 32768b" in throttles[4]
    delays = [c for c in commands if "netem" in c]
    assert delays == ["tc -n bed-node2 qdisc add dev eth0 parent 1:1 handle 10: netem delay 2000us limit 100000"]
    assert all("bed-" in command for command in commands), "nothing is made outside of its namespaces"


def test_a_single_node_needs_no_link() -> None:
    one = Description.parse('[[nodes]]\ndevices = 2\ndevice = "c"\n[device_types]\nc = {cores = 0.5, memory = "1 GiB"}')
    assert not any("tbf" in command for command in network.make("bed", one.node_links))


def _mounts(version: int) -> str:
    if version == 2:
        return "30 24 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    return (
        "30 24 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "31 24 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:5 - cgroup cgroup rw,cpu,cpuacct\n"
        "32 24 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    )


def test_version_2_is_taken_only_where_it_has_the_controllers(tmp_path: Path) -> None:
    unified = tmp_path / "sys/fs/cgroup/unified"
    unified.mkdir(parents=True)
    (unified / "cgroup.controllers").write_text("pids\n")
    found = find_hierarchy(_mounts(1), tmp_path)
    assert found is not None and found.version == 1
    assert found.cpu == tmp_path / "sys/fs/cgroup/cpu,cpuacct"
    (unified / "cgroup.controllers").write_text("cpu memory pids\n")
    found = find_hierarchy(_mounts(1), tmp_path)
    assert found is not None and found.version == 2 and found.cpu == found.memory == unified
    assert find_hierarchy(_mounts(2), tmp_path) is None, "a mount without the controllers"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (
            1,
            {
                "cpu/bed/rank3/cpu.cfs_period_us": "10000",
                "cpu/bed/rank3/cpu.cfs_quota_us": "2500",
                "memory/bed/rank3/memory.limit_in_bytes": "1024",
            },
        ),
        (
            2,
            {
                "all/cgroup.subtree_control": "+cpu +memory",
                "all/bed/cgroup.subtree_control": "+cpu +memory",
                "all/bed/rank3/cpu.max": "2500 10000",
                "all/bed/rank3/memory.max": "1024",
            },
        ),
    ],
)
def test_limits_are_written_in_the_form_of_each_version(tmp_path: Path, version: int, expected: dict[str, str]) -> None:
    hierarchy = _hierarchy(tmp_path, version)
    hierarchy.create("bed", 3, cores=0.25, memory_bytes=1024)
    written = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert written == expected
    assert hierarchy.names() == {"bed"}
    assert all(file.parent.is_dir() for file in hierarchy.task_files("bed", 3))


def _hierarchy(folder: Path, version: int) -> Hierarchy:
    cpu, memory = (folder / "cpu", folder / "memory") if version == 1 else (folder / "all", folder / "all")
    for path in (cpu, memory):
        path.mkdir(exist_ok=True)
    return Hierarchy(version=version, cpu=cpu, memory=memory)


def test_a_controller_that_cannot_be_delegated_is_named(tmp_path: Path) -> None:
    hierarchy = _hierarchy(tmp_path, 2)
    (hierarchy.cpu / "cgroup.subtree_control").mkdir()  # as a container: what cannot be written
    with pytest.raises(WhaleError, match="subtree_control"):
        hierarchy.create("bed", 0, cores=0.5, memory_bytes=1)


@pytest.mark.parametrize(
    ("version", "file"), [(1, "memory/bed/rank0/memory.oom_control"), (2, "all/bed/rank0/memory.events")]
)
def test_a_kill_for_memory_is_seen(tmp_path: Path, version: int, file: str) -> None:
    hierarchy = _hierarchy(tmp_path, version)
    hierarchy.create("bed", 0, cores=0.5, memory_bytes=1)
    assert not hierarchy.was_out_of_memory("bed", 0)
    (tmp_path / file).write_text("under_oom 0\noom_kill 0\n")
    assert not hierarchy.was_out_of_memory("bed", 0)
    (tmp_path / file).write_text("under_oom 0\noom_kill 1\n")
    assert hierarchy.was_out_of_memory("bed", 0)


def test_what_is_missing_is_named_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bed.sys, "platform", "linux")
    monkeypatch.setattr(bed.os, "geteuid", lambda: 1000, raising=False)
    monkeypatch.setattr(bed.shutil, "which", lambda tool: None)
    monkeypatch.setattr(bed, "_hierarchy", lambda: None)
    problems = " ".join(missing())
    for part in ("root", "ip and tc", "iproute2", "nsenter", "util-linux", "cgroup controllers cpu and memory"):
        assert part in problems
    with pytest.raises(UsageError, match="needs root"):
        bed.Testbed(Description.parse(FILE))
    monkeypatch.setattr(bed.os, "geteuid", lambda: 0, raising=False)
    monkeypatch.setattr(bed, "_has_capability", lambda bit: bit != 12)
    assert missing()[0] == "CAP_NET_ADMIN (a container needs --privileged)"
    monkeypatch.setattr(bed.sys, "platform", "darwin")
    assert missing() == ["Linux, not darwin"]
