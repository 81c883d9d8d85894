"""Joining the other processes: the errors that come before anything could hang. No test here starts a process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import whale
from whale.errors import PlanMismatchError, UsageError, WorkerError
from whale.runtime import launch
from whale.runtime.launch import describe, finalize, groups, initialize
from whale.runtime.session import session


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI_", "MV2_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    yield
    finalize()


def connected(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, port: int, attempt: int = 0) -> None:
    settings = {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": attempt}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def test_one_process_is_a_world_of_one_without_a_process_group() -> None:
    world = initialize(expected_world_size=1, device_type="cpu")
    assert (world.rank, world.size, world.device, world.store) == (0, 1, torch.device("cpu"), None)
    assert not dist.is_initialized()
    assert groups([(0,)]) == {}


def test_a_plan_for_more_processes_names_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanMismatchError, match="plan is for 4 processes, but 1 was started"):
        initialize(expected_world_size=4)
    launched(monkeypatch, 0, 8, 1)
    with pytest.raises(PlanMismatchError, match="plan is for 4 processes, but 8 were started"):
        initialize(expected_world_size=4)


def test_ranks_that_did_not_start_are_named_within_the_timeout(
    monkeypatch: pytest.MonkeyPatch, store: dist.TCPStore
) -> None:
    launched(monkeypatch, 1, 4, store.port)
    store.set("whale/hello/2", "a number")
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"ranks \[0, 3\] of 4 did not start within 1 s"):
        initialize(1, device_type="cpu")
    assert time.monotonic() - begin < 20
    assert not dist.is_initialized()


def test_what_an_earlier_attempt_left_in_the_store_does_not_count(
    monkeypatch: pytest.MonkeyPatch, store: dist.TCPStore
) -> None:
    store.set("whale/hello/1", "an old number")
    launched(monkeypatch, 0, 2, store.port)
    with pytest.raises(WorkerError, match="rank 1 of 2 did not start"):
        initialize(1, device_type="cpu")


def test_ranks_whose_launchers_count_other_attempts_meet_in_one_session(store: dist.TCPStore) -> None:
    """Twice, with one store: the second session knows nothing of the first."""
    names = []
    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda rank: session(connected(store.port), rank, 4, 20, 20), range(4)))
        assert len(set(found)) == 1
        names.append(found[0])
    assert names[0] != names[1]


def test_no_store_at_the_address_names_the_address(monkeypatch: pytest.MonkeyPatch, store: dist.TCPStore) -> None:
    port = store.port
    del store
    launched(monkeypatch, 1, 2, port)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(WorkerError, match=r"rank 1: no store at 127\.0\.0\.1:1"):
        initialize(1, device_type="cpu")


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    launched(monkeypatch, 0, 2, 1)
    monkeypatch.delenv(name)
    with pytest.raises(UsageError, match=f"{name}.*torchrun"):
        initialize(1, device_type="cpu")


def test_a_rank_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UsageError, match="RANK is 'first'"):
        initialize()


def test_an_unknown_device_type_is_refused() -> None:
    with pytest.raises(UsageError, match="'tpu'"):
        initialize(device_type="tpu")


def in_slurm_step(monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    for name, value in (
        {"PROCID": 5, "STEP_NUM_TASKS": 8, "LOCALID": 1, "STEP_NODELIST": "127.0.0.1"} | settings
    ).items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


def test_a_process_that_srun_starts_is_one_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    in_slurm_step(monkeypatch)
    launch = describe("cpu")
    assert (launch.rank, launch.size) == (5, 8)


def test_a_batch_script_of_slurm_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert describe("cpu").size == 1


def test_torchrun_inside_of_a_slurm_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    in_slurm_step(monkeypatch, PROCID=1, STEP_NUM_TASKS=2)
    launched(monkeypatch, 3, 4, 1)
    launch = describe("cpu")
    assert (launch.rank, launch.size) == (3, 4)


def test_the_ranks_of_a_slurm_step_meet_at_its_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    in_slurm_step(monkeypatch, PROCID=0, STEP_NUM_TASKS=2, JOB_ID=77, STEP_ID=3)
    with pytest.raises(WorkerError, match="rank 1 of 2 did not start within 1 s"):
        initialize(1, device_type="cpu")
    in_slurm_step(monkeypatch, PROCID=1, STEP_NUM_TASKS=2, JOB_ID=77, STEP_ID=3, STEP_NODELIST="127.0.0.[1,3-4]")
    with pytest.raises(WorkerError, match=r"rank 1: no store at 127\.0\.0\.1:20773"):
        initialize(1, device_type="cpu")


def test_a_launcher_that_says_only_how_many_processes_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="OMPI_COMM_WORLD_SIZE says that this is one of 4 processes.*torchrun"):
        initialize(1, device_type="cpu")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_a_process_that_sees_one_gpu_has_it_whatever_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, one_gpu: None
) -> None:
    launched(monkeypatch, 1, 2, 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert describe().device == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert describe().device == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UsageError, match="local rank 2 has no CUDA device of its own, this node has 2"):
        describe()


def test_ranks_with_the_same_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store, here = dist.HashStore(), torch.device("cuda", 0)
    monkeypatch.setattr(launch, "_identity", lambda device: "NVIDIA L4 GPU-1 of node0")
    store.set("devices/0", "NVIDIA L4 GPU-0 of node0")
    store.set("devices/1", "NVIDIA L4 GPU-1 of node1")
    launch._check_devices_apart(store, 2, 3, here, timedelta(seconds=1))
    store.set("devices/1", "NVIDIA L4 GPU-1 of node0")
    with pytest.raises(UsageError, match="ranks 1 and 2 have the same device, NVIDIA L4 GPU-1 of node0"):
        launch._check_devices_apart(store, 2, 3, here, timedelta(seconds=1))


UNSUPPORTED = [("xpu", "Intel"), ("mps", "Apple"), ("MPS:0", "Apple"), ("rocm", "AMD GPUs are 'cuda'")]


@pytest.mark.parametrize("name", [*UNSUPPORTED, (torch.device("xpu", 1), "Intel")], ids=str)
@pytest.mark.parametrize("call", [describe, lambda device: whale.init(device=device)], ids=["describe", "init"])
def test_devices_on_which_whale_does_not_run_are_refused_by_name(name: Any, call: Callable[[Any], Any]) -> None:
    device, whose = name
    with pytest.raises(UsageError, match=f"device=.*{whose}.*'cpu' or 'cuda'"):
        call(device)


class Bindable:
    """A process group of a script, of NCCL."""

    def __init__(self) -> None:
        self.bound_device_id: torch.device | None = None
        self.connected: list[torch.device] = []
        self.supports_splitting = True
        self._device_types = [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Bindable:
        return self

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)


def test_a_group_of_a_script_gets_the_device_of_its_rank_and_connects_all_ranks_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, device = Bindable(), torch.device("cuda", 3)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: group)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    launch._bind(torch.device("cpu"))
    assert group.connected == []
    for _ in range(2):
        launch._bind(device)
    assert (group.bound_device_id, group.connected) == (device, [device])


def test_groups_without_common_ranks_are_one_split(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Bindable()
    group.bound_device_id = torch.device("cuda", 0)
    splits: list[list[list[int]]] = []
    names: list[str] = []

    def split_group(split_ranks: list[list[int]], timeout: timedelta) -> str:
        assert timeout > timedelta(seconds=2 * 600)  # ours is noticed first
        splits.append(split_ranks)
        names.append(dist.distributed_c10d._hash_ranks_to_str(split_ranks[0]))
        return f"group {len(splits)}"

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: group)
    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    made: Any = groups([(2, 3), (0, 1), (0, 2), (1, 3), (3,)], timeout_seconds=600)
    assert splits == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    groups([(0, 1)], timeout_seconds=600)
    assert len(set(names)) == 3  # also of equal ranks, whatever groups there were between
    outside = dist.GroupMember.NON_GROUP_MEMBER
    assert made == {(0, 1): outside, (0, 2): "group 2", (1, 3): outside, (2, 3): "group 1"}
    group._device_types.append(torch.device("cpu"))
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout: f"new {ranks}")
    unsplit: Any = groups([(0, 1)])
    assert unsplit == {(0, 1): "new [0, 1]"}


def test_waits_are_short_while_ranks_start_and_long_in_steps() -> None:
    world = initialize(device_type="cpu")
    assert world.failures.timeout_seconds == 60
    world.begin_steps()
    assert world.failures.timeout_seconds == 600
    given = initialize(7, device_type="cpu")
    given.begin_steps()
    assert given.failures.timeout_seconds == 7


def test_ranks_that_share_a_gpu_have_a_backend_that_can(monkeypatch: pytest.MonkeyPatch, one_gpu: None) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert launch._backend(gpu) == "nccl"
    monkeypatch.setenv(launch.SHARE_GPU, "1")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    monkeypatch.setattr(launch, "_nccl_version", lambda: (2, 29, 7))
    assert launch._backend(gpu) == "cpu:gloo,cuda:gloo"
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "0"
    monkeypatch.setattr(launch, "_nccl_version", lambda: (2, 31, 0))
    assert launch._backend(gpu) == "nccl"
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    launched(monkeypatch, 3, 4, 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert describe().device == torch.device("cuda", 1)


def test_ranks_on_gpus_join_nccl_with_their_devices_and_are_supervised(
    monkeypatch: pytest.MonkeyPatch, one_gpu: None, store: dist.TCPStore
) -> None:
    launched(monkeypatch, 0, 2, store.port)
    monkeypatch.setenv("LOCAL_RANK", "0")
    store.set("whale/session/one/devices/1", "NVIDIA L4 GPU-1 of node0")
    monkeypatch.setattr(launch, "session", lambda *given: "one")
    joined: list[dict[str, Any]] = []
    current: list[torch.device] = []
    monkeypatch.setattr(launch, "_identity", lambda device: "NVIDIA L4 GPU-0 of node0")
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(dist, "init_process_group", lambda **options: joined.append(options))
    monkeypatch.setattr(launch.atexit, "register", lambda function: function)
    world = initialize(5)
    gpu = torch.device("cuda", 0)
    assert (world.device, current) == (gpu, [gpu])
    assert (joined[0]["backend"], joined[0]["device_id"]) == ("nccl", gpu)
    assert joined[0]["timeout"] > timedelta(seconds=5 + 5)  # the supervisor comes first, and has a message
    assert world.supervisor is not None
    world.supervisor.check()
    world.supervisor.error = WorkerError("rank 1 failed")
    left: list[int] = []
    monkeypatch.setattr(launch.os, "_exit", left.append)
    launch._leave(world)
    assert left == [WorkerError.exit_code]  # a script that did not see the failure does not end well
    with pytest.raises(WorkerError, match="rank 1 failed"):
        world.supervisor.check()
    launch._leave(world)
    assert len(left) == 1
