"""Measuring on two ranks: what is measured arrives in one profile, is not measured twice, and ends in time."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.harness import Ranks
from whale import profiling
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.profiling.links import OPERATIONS
from whale.runtime.launch import World

SIZES = profiling.Sizes(matmul=(("float32", (16, 32)),), copy=2**16, messages=(2**10, 2**12))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


def _unlike() -> Cluster:
    return Cluster.parse(
        """
        links = {inter_node = {bandwidth = "1 Gbit/s", latency = "1 ms"}}
        nodes = [{devices = 1, device = "fast"}, {devices = 1, device = "slow"}]
        [device_types]
        fast = {speed = {float32 = "2 GFLOP/s"}, memory = "1 GiB", memory_bandwidth = "1 GB/s"}
        slow = {speed = {float32 = "1 GFLOP/s"}, memory = "1 GiB", memory_bandwidth = "1 GB/s"}
        """
    )


def _measure(world: World, path: str, cluster: bool, time_limit: float, parallel: bool = False) -> tuple[str, int, int]:
    torch.manual_seed(0)
    places = profiling.places_of(world, _unlike() if cluster else None)
    items = profiling.machine_items(world, places, SIZES)
    file = Path(path)
    start = ModelProfile(name="machines", layers=(), kinds=())
    if world.rank == 0 and file.exists():
        start = ModelProfile.load(file)
    told: list[str] = []
    made, left = profiling.measure_items(
        world,
        items,
        start,
        time_limit=time_limit,
        most_seconds=0.02,
        parallel=parallel,
        write=lambda now: (file.write_text(now.dumps(), encoding="utf-8"), None)[1],
        tell=told.append,
    )
    return made.dumps(), left, len(told)


def test_devices_and_links_of_unlike_types_are_measured(ranks: Ranks, tmp_path: Path) -> None:
    (text, left, told), (nothing, _, _) = ranks.run(_measure, str(tmp_path / "a.json"), True, 100.0)
    profile = ModelProfile.parse(text)
    assert left == 0 and told == 2 + 2 * 4 + 1 + 2 * 3
    assert set(profile.device_types) == {"fast", "slow"}
    assert profile.device_types["slow"]["memory_bytes"] == 2**30
    assert {(rate.device_type, rate.kind, rate.dims) for rate in profile.rates} == {
        (name, kind, dims)
        for name in ("fast", "slow")
        for kind, dims in (("memory", (2**16,)), ("matmul", (16,) * 3), ("matmul", (32,) * 3))
    }
    assert [curve.operation for curve in profile.links] == ["send", *OPERATIONS]
    for curve in profile.links:
        assert (curve.types, curve.within, curve.sizes) == (("fast", "slow"), "nodes", (2**10, 2**12))
        assert min(curve.bandwidths) > 0 and (curve.beside is not None) == (curve.operation == "all_reduce")
        assert curve.beside is None or curve.beside.types == ("fast", "slow")
    assert ModelProfile.parse(nothing).rates == ()


def test_what_is_in_the_file_is_not_measured_again(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "b.json")
    (first, left, _), _ = ranks.run(_measure, path, False, 100.0)
    assert left == 0 and Path(path).read_text(encoding="utf-8") == first
    (second, left, told), _ = ranks.run(_measure, path, False, 100.0)
    assert (second, left, told) == (first, 0, 0)
    lost = ModelProfile.parse(first)
    Path(path).write_text(lost.model_copy(update={"rates": lost.rates[:1]}).dumps(), encoding="utf-8")
    (third, left, told), _ = ranks.run(_measure, path, False, 100.0, True)
    assert (left, told) == (0, 2)
    assert [rate.dims for rate in ModelProfile.parse(third).rates] == [rate.dims for rate in lost.rates]


def test_what_there_is_no_time_for_is_left_and_counted(ranks: Ranks, tmp_path: Path) -> None:
    (text, left, told), _ = ranks.run(_measure, str(tmp_path / "c.json"), False, 0.0)
    assert (left, told) == (14, 0)
    assert ModelProfile.parse(text).links == ()


def test_a_cluster_of_another_size_is_refused(ranks: Ranks) -> None:
    errors = ranks.run(_refused)
    assert all("the cluster has 1 device, but 2 processes were started" in error for error in errors)


def _refused(world: World) -> str:
    from whale.errors import PlanMismatchError

    with pytest.raises(PlanMismatchError) as refusal:
        profiling.places_of(world, Cluster.homogeneous(1))
    return str(refusal.value)
