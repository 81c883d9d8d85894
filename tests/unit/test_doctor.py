"""``whale doctor``: what this machine has, and what a cluster file says."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from whale.cli.app import app
from whale.cli.doctor import _as_text, examine
from whale.cli.machine import device_links, host_rates, network_adapters
from whale.ir.profile import LinkCurve, ModelProfile

FILE = """\
[links]
inter_node = {bandwidth = "1600 Gbit/s", latency = "5 us", adapters = 8}
[[nodes]]
count = 2
devices = 8
device = "A100-SXM4-80GB"
[[nodes]]
devices = 4
device = "lab-card"
name = "lab"
[nodes.links]
intra_node = {bandwidth = "16 GB/s", latency = "5 us"}
[device_types.lab-card]
speed = {float32 = "9.3 TFLOP/s"}
memory = "16 GiB"
memory_bandwidth = "732 GB/s"
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    return path


def test_a_cluster_file_is_shown_with_the_sources_of_its_figures(file: Path) -> None:
    result = run("--cluster", str(file), "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["num_nodes"], data["num_devices"]) == (3, 20)
    twins, lab = data["nodes"]
    assert (twins["count"], twins["names"], twins["ranks"]) == (2, ["node0", "node1"], [0, 15])
    assert twins["intra_node"]["source"] == "known of the device type"
    assert (twins["intra_node"]["bandwidth"], twins["intra_node"]["kind"]) == (300e9, "NVLink3")
    assert (twins["inter_node"]["adapters"], twins["inter_node"]["kind"]) == (8, "RDMA")
    assert (lab["names"], lab["intra_node"]["source"], lab["intra_node"]["kind"]) == (["lab"], "the file", "PCIe3")
    a100, card = data["device_types"]
    assert a100["source"].startswith("catalog: exact")
    assert (card["source"], card["speed"]) == ("the file", {"float32": 9.3e12})
    assert [entry["num_ranks"] for entry in data["collectives"]] == [8, 3, 20]
    for entry in data["collectives"]:
        assert entry["seconds_interval"][0] < entry["seconds"] < entry["seconds_interval"][1]


def test_a_cluster_file_is_shown_as_tables(file: Path) -> None:
    result = run("--cluster", str(file))
    assert result.exit_code == 0
    for text in ("3 nodes, 20 devices", "8 x A100-SXM4-80GB", "NVLink3", "300 GB/s", "lab-card", "the file", "ring"):
        assert text in result.stdout
    assert max(map(len, result.stdout.splitlines())) < 160


def test_one_device_has_no_links_to_show(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text('[[nodes]]\ndevices = 1\ndevice = "T4"\n')
    data = json.loads(run("--cluster", str(path), "--json").stdout)
    assert data["nodes"][0]["inter_node"] is None
    assert data["collectives"] == []
    shown = run("--cluster", str(path))
    assert shown.exit_code == 0 and "cluster: 1 node, 1 device\n" in shown.stdout


def test_memory_of_hosts_is_shown_with_what_is_assumed(file: Path) -> None:
    file.write_text('host_memory = {size = "1 TiB"}\n' + FILE)
    twins, lab = json.loads(run("--cluster", str(file), "--json").stdout)["nodes"]
    assert twins["host"] == {
        "memory_bytes": 2**40,
        "bandwidth": 200e9,
        "device_link": pytest.approx(25.2e9),
        "assumed": ["bandwidth"],
    }
    assert lab["host"]["assumed"] == ["bandwidth", "device_link"]
    assert "1024.0 GiB" in run("--cluster", str(file)).stdout


def test_the_speed_of_the_memory_is_measured_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str] = []
    found = host_rates(0, problems)
    assert found["bandwidth"] > 1e8
    assert (found["devices"], problems) == ([], [])
    report = examine()
    report["host"]["devices"] = [{"index": 0, "to_device": 12.3e9, "from_device": 12.9e9}]
    text = _as_text(report)
    assert "GB/s with" in text
    assert "12.3 GB/s to it, 12.9 GB/s from it" in text


def test_a_bad_cluster_file_is_exit_code_3(file: Path) -> None:
    file.write_text(FILE.replace("adapters", "adaptors"))
    result = run("--cluster", str(file))
    assert result.exit_code == 3
    assert f"{file}:2: unknown key 'adaptors'; did you mean 'adapters'?" in result.stderr
    file.write_text(FILE.replace("A100-SXM4-80GB", "A100-80GB"))
    result = run("--cluster", str(file))
    assert result.exit_code == 3
    assert "'A100-80GB' is A100-SXM4-80GB or A100-PCIe-80GB; say which" in result.stderr


def test_device_types_of_a_profile_are_shown_with_it_and_asked_for_without(tmp_path: Path) -> None:
    cluster, profile = tmp_path / "cluster.toml", tmp_path / "profile.json"
    cluster.write_text(
        '[links]\nintra_node = {bandwidth = "16 GB/s", latency = "5 us"}\n[[nodes]]\ndevices = 2\ndevice = "lab-card"\n'
    )
    figures = {"memory_bytes": 2.0**34, "memory_bandwidth": 7e11, "float32": 9e12}
    curve = LinkCurve(
        source="lab-card", target="lab-card", devices=2, within="node", sizes=(2.0**20, 2.0**28), bandwidths=(1e9, 1e9)
    )
    made = ModelProfile(name="machines", layers=(), kinds=(), device_types={"lab-card": figures}, links=(curve,))
    profile.write_text(made.dumps())
    data = json.loads(run("--cluster", str(cluster), "--profile", str(profile), "--json").stdout)
    (card,) = data["device_types"]
    assert (card["source"], card["speed"]) == ("the profile", {"float32": 9e12})
    assert data["collectives"][0]["seconds"] == pytest.approx(
        2**28 / 1e9, rel=0.01
    )  # by the curve, not the file's link
    without = run("--cluster", str(cluster))
    assert without.exit_code == 3
    assert "cluster.toml:5: unknown device type 'lab-card'" in without.stderr
    assert "define it under [device_types], or give a profile that has its figures (--profile)" in without.stderr
    profile.write_text(made.model_copy(update={"device_types": {"lab-card": {"float32": 9e12}}}).dumps())
    half = run("--cluster", str(cluster), "--profile", str(profile))
    assert half.exit_code == 3 and "the profile of machines, which has only its float32" in half.stderr
    assert run("--profile", str(profile)).exit_code == 2


def test_a_cluster_is_shown_without_torch(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run("--cluster", str(file)).exit_code == 0


def test_network_adapters_are_read_from_the_kernel(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    for name, state, speed in (
        ("eth0", "up", "25000"),
        ("eth1", "up", "-1"),
        ("eth2", "down", "1000"),
        ("lo", "up", "1"),
    ):
        write(f"net/{name}/operstate", state)
        write(f"net/{name}/speed", speed)
    port = "infiniband/mlx5_0/ports"
    for number, state in ((1, "4: ACTIVE"), (2, "1: DOWN")):
        write(f"{port}/{number}/state", state)
        write(f"{port}/{number}/rate", "200 Gb/sec (4X HDR)")
        write(f"{port}/{number}/link_layer", "InfiniBand")
    assert network_adapters(tmp_path) == [
        {"name": "eth0", "kind": "ethernet", "bits_per_second": 25 * 10**9},
        {"name": "eth1", "kind": "ethernet", "bits_per_second": None},
        {"name": "mlx5_0:1", "kind": "infiniband", "bits_per_second": 200 * 10**9},
    ]
    assert network_adapters(tmp_path / "nowhere") == []


def test_links_between_devices_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: second < 2)
    problems: list[str] = []
    links = device_links(3, problems)
    assert [(link["devices"], link["peer_access"]) for link in links] == [
        ([0, 1], True),
        ([0, 2], False),
        ([1, 2], False),
    ]
    assert device_links(1, problems) == []
    assert problems == []
    links[0]["nvlinks"] = 12
    text = _as_text({**examine(), "links": links})
    assert "12 x NVLink, peer access" in text
    assert "no peer access: through the host" in text


def test_links_that_cannot_be_read_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def fail(*_: Any) -> bool:
        raise RuntimeError("driver gone")

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", fail)
    problems: list[str] = []
    assert device_links(2, problems) == []
    assert "driver gone" in problems[0]


def test_nvlinks_are_counted_where_torch_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch._C._distributed_c10d as c10d

    matrix = [[0, 12], [12, 0]]
    monkeypatch.setattr(c10d, "_detect_dma_connectivity", lambda *_: SimpleNamespace(matrix=matrix), raising=False)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    assert device_links(2, [])[0]["nvlinks"] == 12


def test_a_build_for_rocm_is_not_taken_for_one_for_processors() -> None:
    report = examine()
    assert report["torch"]["rocm"] is None
    report["torch"]["rocm"] = "7.0.2"
    shown = _as_text(report)
    assert "ROCm of torch" in shown and "7.0.2" in shown
    assert "a CPU build" not in shown
