"""Seats of a launch: the rank of each process, by the device that it has."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from whale.errors import PlanMismatchError
from whale.ir.cluster import Cluster, DeviceType
from whale.ir.plan import Plan
from whale.planner.catalog import device_types
from whale.runtime.location import RankLocation
from whale.seats import PartOfCluster, seating

TYPES = ("fastest", "fast", "slow", "slowest")


def cards(*names: str) -> list[tuple[str, DeviceType]]:
    """A node for each device."""
    types = device_types()
    made = {
        name: types.get(name) or DeviceType.of(name, speed={"float32": 1e12}, memory_bytes=2**34, memory_bandwidth=1e12)
        for name in names
    }
    return [(f"node{number}", made[name]) for number, name in enumerate(names)]


def processors(*names: str, hosts: tuple[str, ...] = (), agents: tuple[int, ...] = ()) -> list[RankLocation]:
    """Processes that stand for devices."""
    return [
        RankLocation(
            rank=rank,
            device_type="cpu",
            node=hosts[rank] if hosts else "here",
            memory_bytes=2**30,
            agent=str(agents[rank]) if agents else "",
            stands_for=name,
        )
        for rank, name in enumerate(names)
    ]


def gpus(*names: str) -> list[RankLocation]:
    """Processes on GPUs with these names of their driver."""
    memory = {name: type_.memory_bytes for name, type_ in device_types().items()}
    return [
        RankLocation(rank=rank, device_type=name, node="here", memory_bytes=memory.get(name, 2**34))
        for rank, name in enumerate(names)
    ]


def seated(cluster: Cluster | Plan, places: list[RankLocation]) -> tuple[int, ...]:
    take = seating(None, cluster) if isinstance(cluster, Plan) else seating(cluster, None)
    assert take is not None
    return tuple(take(places))


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_a_process_takes_the_rank_that_is_for_its_device(order: tuple[int, ...]) -> None:
    devices = {name: [rank] for rank, name in enumerate(TYPES)}
    plan = Plan.model_validate({"world_size": 4, "cluster": {"devices": devices}})
    places = processors(*(TYPES[place] for place in order))
    assert seated(plan, places) == order
    assert seated(Cluster.of(cards(*TYPES)), places) == order


def test_processes_of_one_agent_stay_neighbours() -> None:
    cluster = Cluster.of(cards("fast", "fast", "slow", "slow", "fast", "fast"))
    places = processors("slow", "slow", "fast", "fast", "fast", "fast", agents=(0, 0, 1, 2, 1, 2))
    assert seated(cluster, places) == (2, 3, 0, 4, 1, 5)


def test_an_order_that_fits_is_left_alone() -> None:
    cluster = Cluster.of(cards("fast", "fast", "slow", "slow"))
    assert seated(cluster, processors("fast", "fast", "slow", "slow", agents=(0, 1, 0, 1))) == (0, 1, 2, 3)


def test_equal_devices_have_no_seats() -> None:
    assert seating(Cluster.of(cards("fast", "fast")), None) is None
    assert seating(None, Plan(world_size=4)) is None
    assert seating(None, None) is None


def test_a_missing_type_names_the_rank_and_what_was_started() -> None:
    with pytest.raises(PlanMismatchError, match=r"rank 1 is for a device of type slow, .* fast on here, fast on here"):
        seated(Cluster.of(cards("fast", "slow")), processors("fast", "fast"))
    with pytest.raises(PlanMismatchError, match="rank 0 is for a device of type fast"):
        seated(Cluster.of(cards("fast", "slow")), processors("slow", "another"))


def test_a_named_host_has_its_ranks_whatever_the_order_is() -> None:
    cluster = Cluster.of(cards("fast", "fast", "slow"))
    nodes = [replace(node, host=f"host{number}") for number, node in enumerate(cluster.nodes)]
    named = replace(cluster, nodes=tuple(nodes))
    places = processors("slow", "fast", "fast", hosts=("host2.lab", "host1.lab", "host0.lab"))
    assert seated(named, places) == (2, 1, 0)
    with pytest.raises(PlanMismatchError, match="rank 0 is for a device of type fast on host host0, "):
        seated(named, processors("fast", "fast", "slow", hosts=("host3", "host1", "host2")))


def test_processors_that_stand_for_nothing_take_any_rank() -> None:
    cluster = Cluster.of(cards("fast", "slow", "slow"))
    assert seated(cluster, processors("", "", "")) == (0, 1, 2)
    assert seated(cluster, processors("slow", "", "fast")) == (1, 2, 0)


def test_gpus_are_known_by_their_drivers_names() -> None:
    cluster = Cluster.of(cards("A100-SXM4-80GB", "L4"))
    assert seated(cluster, gpus("L4", "A100-SXM4-80GB")) == (1, 0)
    with pytest.raises(PlanMismatchError, match="rank 0 is for a device of type A100-SXM4-80GB"):
        seated(cluster, gpus("L4", "L4"))


def test_a_type_that_a_cluster_file_defines_is_that_of_a_gpu_that_is_none_of_the_others() -> None:
    cluster = Cluster.of(cards("lab-card", "L4"))
    assert seated(cluster, gpus("L4", "Some-GPU")) == (1, 0)


# --- fewer processes than devices, where machines come and go ---------------------------------------------------------


@pytest.mark.parametrize("there", [names for size in (1, 2, 3, 4) for names in permutations(TYPES, size)])
def test_devices_without_a_process_are_left_out(there: tuple[str, ...]) -> None:
    part = PartOfCluster(Cluster.of(cards(*TYPES)))
    ranks = part(processors(*there))
    expected = [name for name in TYPES if name in there]
    assert [device.type.name for device in part.cluster.devices] == expected
    assert [expected[rank] for rank in ranks] == list(there)


def test_machines_of_a_type_are_any_of_that_type() -> None:
    part = PartOfCluster(Cluster.of(cards("fast", "fast", "slow")))
    assert part(processors("slow", "fast")) == (1, 0)
    assert [device.name for device in part.cluster.devices] == ["fast:0", "slow:1"]


def test_a_machine_that_the_cluster_file_does_not_have_is_named() -> None:
    part = PartOfCluster(Cluster.of(cards("fast", "slow")))
    with pytest.raises(
        PlanMismatchError, match="a process on here has a slowest, of which the cluster file has no more"
    ):
        part(processors("slowest"))
