"""Joining a launch: from a launcher's environment to process groups, with errors instead of hangs.

A rank is, in this order, what the script's own process group says, what torchrun's variables say, or what those of a
Slurm step say; any other process is a world of one, without a process group. A wrong number of processes is detected
before any process group exists, and ranks that did not start are named. This module knows no plans and no models; the
environment is read when `initialize` is called, never at import.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from whale.errors import PlanMismatchError, UsageError, WorkerError
from whale.runtime.failure import Failures
from whale.runtime.location import RankLocation, location_of
from whale.runtime.session import session
from whale.runtime.supervision import Supervisor
from whale.runtime.warn import warn

__all__ = [
    "SHARE_GPU",
    "START_SECONDS",
    "STEP_SECONDS",
    "Seating",
    "World",
    "check_device",
    "current",
    "describe",
    "families",
    "finalize",
    "groups",
    "initialize",
    "local_rank_of_launcher",
    "name_of_unsupported",
]

START_SECONDS, STEP_SECONDS = 60.0, 600.0
"""Default limits for waits of a rank for another: while they start, where one that is missing should be noticed soon,
and in steps, where one may write a checkpoint or evaluate meanwhile."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process and its world.

    Attributes:
        rank: this process.
        size: number of processes.
        device: of this process.
        failures: failure reports; has the timeout.
        store: the rendezvous store; None for one process.
        step_timeout_seconds: limit for waits in steps; that of `failures` is for the start, until steps begin.
        supervisor: looks at steps that the device runs; None where waits block the host.
    """

    rank: int
    size: int
    device: torch.device
    failures: Failures
    store: dist.Store | None = None
    step_timeout_seconds: float = STEP_SECONDS
    supervisor: Supervisor | None = field(default=None, repr=False, compare=False)
    _said: set[str] = field(default_factory=set, repr=False, compare=False)

    def begin_steps(self) -> None:
        """All ranks have started: from now on waits have the limit of those in steps."""
        self.failures.timeout_seconds = self.step_timeout_seconds

    def warn(self, text: str) -> None:
        """Warn of what all ranks know: on rank 0, once."""
        if self.rank == 0 and text not in self._said:
            self._said.add(text)
            warn(text)

    def warn_of_rank(self, kind: str, text: str) -> None:
        """Warn of what other ranks may not know: once for each *kind*, on the first rank that finds one."""
        if self.store is None or self.store.add(f"warned/{kind}", 1) == 1:
            self.warn(text) if self.rank == 0 else warn(f"rank {self.rank}: {text}")


Seating = Callable[[Sequence[RankLocation]], Sequence[int]]
"""The rank of each process of a launch, by where they are, in the order of the launcher."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process among those of its launch, before it joins them."""

    rank: int
    size: int
    device: torch.device


def describe(device_type: str | None = None) -> Launch:
    """The rank, world size and device of this process, without joining anything.

    Raises:
        UsageError: the environment is incomplete or that of an unknown launcher, this process has no device of its own,
            or the script's process group does not communicate for it.
    """
    if dist.is_available() and dist.is_initialized():
        launch = Launch(rank=dist.get_rank(), size=dist.get_world_size(), device=_device(device_type))
        served = sorted({device.type for device in dist.distributed_c10d._get_default_group()._device_types})
        if launch.device.type not in served:
            raise UsageError(
                f"the script's process group ({dist.get_backend()}) communicates for {' and '.join(served)}, but this "
                f"rank computes on {launch.device.type}; call init_process_group without a backend, or pass "
                f"device={served[0]!r}"
            )
        return launch
    rank, size, _ = _variables()
    launch = Launch(rank=_integer(rank, 0), size=_integer(size, 1), device=_device(device_type))
    for name in () if size in os.environ else _SIZES_OF_MPI:
        if _integer(name, 1) > 1:
            raise UsageError(
                f"environment variable {name} says that this is one of {os.environ[name]} processes, but not how they "
                "meet; use torchrun, or call torch.distributed.init_process_group before parallelize"
            )
    return launch


def initialize(
    timeout_seconds: float | None = None,
    expected_world_size: int | None = None,
    device_type: str | None = None,
    seating: Seating | None = None,
) -> World:
    """Join the processes of a launch; a process that nothing launched is a world of one.

    All keys in the store have a prefix for the session, because the keys of a killed attempt would make the next one
    fail. If this process has already joined, here or in the user's script, its existing process groups are
    used.

    Args:
        timeout_seconds: limit for every wait of a rank for another, here and later; by default `START_SECONDS` here and
            `STEP_SECONDS` later.
        expected_world_size: how many processes the plan is for.
        device_type: ``cpu`` or ``cuda``; by default cuda where there is one.
        seating: the rank of each process by where they are. Where the script's process group has decided the ranks,
            they must be these.

    Raises:
        PlanMismatchError: there is another number of processes than the plan is for, *seating* finds no process
            for a rank, or the script has decided otherwise.
        UsageError: see `describe`; two ranks have one device.
        WorkerError: a rank did not start within the timeout; names all that did not.
    """
    launch = describe(device_type)
    rank, size, device = launch.rank, launch.size, launch.device
    step_seconds = STEP_SECONDS if timeout_seconds is None else timeout_seconds
    timeout_seconds = START_SECONDS if timeout_seconds is None else timeout_seconds
    if expected_world_size is not None and size != expected_world_size:
        raise PlanMismatchError(
            f"the plan is for {expected_world_size} processes, but {size} {'was' if size == 1 else 'were'} started; "
            f"use torchrun with {expected_world_size} in total, or make a plan for {size}"
        )
    failures = Failures(rank, None, timeout_seconds)
    if size == 1:
        return World(rank=0, size=1, device=device, failures=failures, step_timeout_seconds=step_seconds)
    timeout = timedelta(seconds=timeout_seconds)
    begin = time.monotonic()
    joined = dist.is_initialized()
    # A connection of its own: a long wait for a message would hold up torch's use of the script's store.
    store: Any = dist.distributed_c10d._get_default_store().clone() if joined else _store(rank, timeout)  # type: ignore[attr-defined]
    if not joined:
        left = max(1.0, timeout_seconds - (time.monotonic() - begin))
        _joined[:] = [session(store, rank, size, left, timeout_seconds)]
    prefix = f"whale/session/{_joined[0] if _joined else _attempt()}"
    shared = dist.PrefixStore(prefix, store)
    if seating is not None:
        rank = _seat(shared, rank, size, device, seating, timeout, is_fixed=joined)
    failures = Failures(rank, shared, timeout_seconds)
    supervisor = None
    if device.type == "cuda":
        beside = Failures(rank, dist.PrefixStore(prefix, store.clone()), step_seconds)
        supervisor = Supervisor(beside, size, _abort)
    world = World(
        rank=rank,
        size=size,
        device=device,
        failures=failures,
        store=shared,
        step_timeout_seconds=step_seconds,
        supervisor=supervisor,
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cuda" and not _shares_gpu():
        _check_devices_apart(shared, rank, size, device, timeout)
    if joined:
        _bind(device)
        if device.type == "cuda":
            atexit.register(partial(_leave, world))
        _last[:] = [(world, _default_group())]
        return world
    backend = _backend(device)
    try:
        dist.init_process_group(
            backend=backend,
            store=dist.PrefixStore("groups", shared),
            rank=rank,
            world_size=size,
            timeout=_limit(step_seconds, device),
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        raise WorkerError(f"rank {rank} could not connect to the other {size - 1} ranks: {error}") from error
    # A gloo thread that releases a tensor after the interpreter has exited aborts the process.
    atexit.register(partial(_leave, world))
    _last[:] = [(world, _default_group())]
    return world


_last: list[tuple[World, Any]] = []
"""The world that `initialize` made last, and the process group of all ranks then."""


def _default_group() -> Any:
    return dist.distributed_c10d._get_default_group() if dist.is_available() and dist.is_initialized() else None


def current() -> World:
    """The world that this process has joined last; a process that nothing launched is a world of one.

    Raises:
        UsageError: a launcher has started several processes, or the script has a process group, and Whale has not
            joined it.
    """
    if _last and _last[0][1] is not None and _last[0][1] is _default_group():
        return _last[0][0]
    launch = describe()
    if launch.size > 1:
        raise UsageError(
            f"this process is rank {launch.rank} of {launch.size}, but has not joined the other ranks yet: call "
            "whale.init() first, on every rank, or whale.parallelize"
        )
    return initialize()


_joined: list[str] = []
"""The session of this process, if it has joined a launch here."""


def _attempt() -> str:
    """A name of the attempt in which a script has made process groups, which know no session."""
    return f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


SHARE_GPU = "WHALE_SHARE_GPU"
"""Environment variable that lets several ranks have one GPU, for tests: 1 says so."""

_NCCL_THAT_SHARES = (2, 31)
"""The first version of NCCL in which ranks of one GPU can communicate, if a variable says so."""


def _shares_gpu() -> bool:
    return os.environ.get(SHARE_GPU) == "1"


def _nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that is loaded; torch names the one that it was built with."""
    found: tuple[int, ...] = torch.cuda.nccl.version()
    with contextlib.suppress(OSError, AttributeError):
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
        found = number.value // 10000, number.value // 100 % 100, number.value % 100
    return found


def _backend(device: torch.device) -> str:
    """The backend of process groups. Ranks that share a GPU need a new NCCL, or else gloo, through the host."""
    if device.type != "cuda":
        return "gloo"
    if not _shares_gpu():
        return "nccl"
    if not dist.is_nccl_available() or _nccl_version() < _NCCL_THAT_SHARES:
        return "cpu:gloo,cuda:gloo"
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return "nccl"


def _limit(seconds: float, device: torch.device) -> timedelta:
    """The timeout of process groups. NCCL's own watch ends the process without a word: ours comes first."""
    return timedelta(seconds=2 * seconds + 60 if device.type == "cuda" else seconds)


def _bind(device: torch.device) -> None:
    """Let the process group of a script know this rank's device, if it does not: NCCL would otherwise connect pairs of
    ranks at their first message, each waiting for the other, in any order; and groups of it could not be split."""
    group = dist.distributed_c10d._get_default_group()
    if device.type == "cuda" and group.bound_device_id is None and "cuda:gloo" not in str(dist.get_backend_config()):
        group.bound_device_id = device
        group._get_backend(device).eager_connect_single_device(device)


def _seat(
    store: dist.Store,
    rank: int,
    size: int,
    device: torch.device,
    seating: Seating,
    timeout: timedelta,
    *,
    is_fixed: bool,
) -> int:
    """The rank that this process takes; one that is fixed must be it, for all processes."""
    turn = store.add(f"seats/{rank}", 1)  # what was said for another model is none of this one's
    store.set(f"seats/{turn}/{rank}", json.dumps(asdict(location_of(rank, device))))
    keys = [f"seats/{turn}/{other}" for other in range(size)]
    store.wait(keys, timeout)
    places = [RankLocation(**json.loads(store.get(key))) for key in keys]
    taken = seating(places)
    if is_fixed and (others := [process for process, seat in enumerate(taken) if process != seat]):
        first = places[others[0]]
        raise PlanMismatchError(
            f"rank {others[0]} of the process group that the script has made has a "
            f"{first.stands_for or first.device_type} on {first.node}, which is rank {taken[others[0]]} of the plan or "
            "cluster file: leave init_process_group to parallelize, which seats processes by their devices, or give "
            f"processes the ranks {list(taken)}"
        )
    return taken[rank]


def _check_devices_apart(store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
    """Refuse ranks that have one device, which NCCL finds late and says badly.

    Raises:
        UsageError: names the ranks and the device.
    """
    key = "devices"
    store.set(f"{key}/{rank}", _identity(device))
    names = [f"{key}/{other}" for other in range(size)]
    store.wait(names, timeout)
    found: dict[str, int] = {}
    for other, name in enumerate(names):
        identity = store.get(name).decode()
        first = found.setdefault(identity, other)
        if first != other:
            raise UsageError(
                f"ranks {first} and {other} have the same device, {identity}: start one process for each GPU, or show "
                "each process its own (CUDA_VISIBLE_DEVICES)"
            )


def _identity(device: torch.device) -> str:
    """The name of a GPU among all of a launch."""
    properties = torch.cuda.get_device_properties(device)
    unique = getattr(properties, "uuid", None) or f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')} {device}"
    return f"{properties.name} {unique} of {socket.gethostname()}"


def families(rank_sets: Iterable[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Sets of ranks in families without common ranks, as few as the first fit gives: a family is one split of NCCL's
    communicator, at which all ranks meet.

    >>> families([(0, 1), (0, 2), (1, 3), (2, 3)])
    [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]
    """
    found: list[tuple[set[int], list[tuple[int, ...]]]] = []
    for ranks in rank_sets:
        members, family = next(((m, f) for m, f in found if m.isdisjoint(ranks)), (set[int](), []))
        if not family:
            found.append((members, family))
        members.update(ranks)
        family.append(ranks)
    return [family for _, family in found]


def groups(
    rank_sets: Iterable[Iterable[int]], timeout_seconds: float = START_SECONDS
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make a process group for each distinct set of ranks; the ranks of a key are in order.

    All ranks must call this with the same sets, including ranks in none of them; groups are made in one sorted order,
    and on NCCL those of a family (see `families`) by one split. Sets of one rank need no group and are omitted. Every
    call makes new groups, so that operations that must not wait for each other, such as collectives of stages and
    gradient reductions, can have different ones.
    """
    wanted = sorted({tuple(sorted(set(ranks))) for ranks in rank_sets})
    wanted = [ranks for ranks in wanted if len(ranks) > 1]
    if not wanted:
        return {}
    world = dist.distributed_c10d._get_default_group()
    bound = world.bound_device_id
    # A group of a script may have gloo for tensors on the host besides, which not all versions of torch split.
    if bound is None or len(world._device_types) > 1 or not world._get_backend(bound).supports_splitting:
        timeout = timedelta(seconds=timeout_seconds)
        return {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in wanted}
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for family in families(wanted):
        split: Sequence[list[int]] = [list(ranks) for ranks in family]
        with _names_of_their_own():
            own = dist.split_group(split_ranks=split, timeout=_limit(timeout_seconds, bound))  # type: ignore[arg-type]
        for ranks in family:
            made[ranks] = own if dist.get_rank() in ranks else dist.GroupMember.NON_GROUP_MEMBER  # type: ignore[assignment]
    return {ranks: made[ranks] for ranks in wanted}


_splits = itertools.count(1)


@contextlib.contextmanager
def _names_of_their_own() -> Iterator[None]:
    """Context for a split of the group of all ranks. torch names the new group by its ranks and the number of groups
    that there are, and after some were destroyed that can be the name of another."""
    module: Any = dist.distributed_c10d
    named, number = module._hash_ranks_to_str, next(_splits)
    module._hash_ranks_to_str = lambda ranks: f"whale:{number}:{'_'.join(map(str, ranks))}"
    try:
        yield
    finally:
        module._hash_ranks_to_str = named


def _abort() -> None:
    """End all communication of this process: kernels that wait for other ranks end."""
    with contextlib.suppress(Exception):  # a group may be half made
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()


def _leave(world: World) -> None:
    """Leave the launch at exit. Where communication has failed on a device, destroying its groups would wait for
    kernels that never end; and a script that has not seen the failure must not end as if there were none."""
    supervisor = world.supervisor
    if supervisor is None or not (supervisor.error or world.failures.has_reported):
        finalize()
        return
    _abort()
    if supervisor.error is not None and not supervisor.is_told:
        sys.stdout.flush()
        os._exit(WorkerError.exit_code)


def finalize() -> None:
    """Leave the launch; a no-op if nothing was joined."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    _joined.clear()


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
"""Variables of a step that ``srun`` starts; a batch script itself is no step, and is one process."""

_SIZES_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Numbers of processes that MPI's launchers set."""


def _variables() -> tuple[str, str, str]:
    """Names of the variables for rank, world size and local rank: torchrun's, also inside of a Slurm step."""
    slurm = _SLURM[1] in os.environ and not {*_TORCHRUN[:2]} & {*os.environ}
    return _SLURM if slurm else _TORCHRUN


def _integer(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise UsageError(f"environment variable {name} is {text!r}, not a number; start processes with torchrun")
    return int(text)


_UNSUPPORTED = {
    "xpu": "Whale does not run on Intel GPUs (xpu)",
    "mps": "Whale does not run on Apple GPUs (mps)",
    "hpu": "Whale does not run on Gaudi (hpu)",
    "npu": "Whale does not run on Ascend (npu)",
    "rocm": "AMD GPUs are 'cuda' in torch for ROCm",
    "hip": "AMD GPUs are 'cuda' in torch for ROCm",
}


def name_of_unsupported(device_type: str) -> str:
    """A sentence on a kind of device on which Whale does not run; empty for others.

    >>> name_of_unsupported("mps")
    'Whale does not run on Apple GPUs (mps)'
    """
    return _UNSUPPORTED.get(device_type, "")


def check_device(device: object) -> None:
    """Refuse what is no kind of device on which Whale runs, those of other makers by name.

    Raises:
        UsageError: it is not ``cpu``, ``cuda`` or None.
    """
    if device not in (None, "cpu", "cuda"):
        why = name_of_unsupported(str(device).partition(":")[0].lower())
        raise UsageError(f"device={device!r}{f': {why}' if why else ' is unknown'}; it can be 'cpu' or 'cuda'")


def _device(device_type: str | None) -> torch.device:
    check_device(device_type)
    if device_type == "cpu" or not torch.cuda.is_available():
        if device_type == "cuda":
            raise UsageError("device='cuda', but torch sees no CUDA device")
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1:  # launchers may show each process its own device only; `initialize` checks that no two are the same
        return torch.device("cuda", 0)
    local_rank = _local_rank(count) % count if _shares_gpu() else _local_rank(count)
    if local_rank >= count:
        raise UsageError(
            f"local rank {local_rank} has no CUDA device of its own, this node has {count}; "
            f"start at most {count} processes here, or pass device_type='cpu'"
        )
    return torch.device("cuda", local_rank)


def _local_rank(num_devices: int) -> int:
    """This process among those of its node; where no launcher says it, by the device that the script has set, or by
    rank, with as many ranks on each node as it has devices."""
    name = _variables()[2]
    if name in os.environ or not dist.is_initialized():
        return _integer(name, 0)
    return torch.cuda.current_device() or dist.get_rank() % num_devices


def local_rank_of_launcher(world: World) -> int:
    """The position of this process among those of its node.

    Raises:
        UsageError: no launcher says it.
    """
    name = _variables()[2]
    if name in os.environ:
        return _integer(name)
    if world.size == 1:
        return 0
    if world.device.type == "cuda":
        return world.device.index or 0
    raise UsageError(f"environment variable {name} is not set, by which launchers say the local rank; use torchrun")


def _store(rank: int, timeout: timedelta) -> dist.Store:
    """Connect to torchrun's store, or to the one that rank 0 opens where there is no torchrun."""
    host, port = _address()
    hosted = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(host, port, is_master=hosted, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:  # covers what torch raises for a network, a timeout and a port in use
        who = "rank 0 or torchrun" if not hosted else "this rank"
        raise WorkerError(f"rank {rank}: no store at {host}:{port}, which {who} should open: {error}") from error


_FIRST_PORT, _NUM_PORTS, _STEPS_OF_A_JOB = 20_000, 10_000, 10


def _address() -> tuple[str, int]:
    """Host and port of the store; in a Slurm step that names neither the first host, and a port by job and step."""
    host, default = os.environ.get("MASTER_ADDR"), None
    if _variables() == _SLURM:
        host = host or first_host(os.environ.get("SLURM_STEP_NODELIST", ""))
        step = _integer("SLURM_JOB_ID", 0) * _STEPS_OF_A_JOB + _integer("SLURM_STEP_ID", 0)
        default = _FIRST_PORT + step % _NUM_PORTS
    port = _integer("MASTER_PORT", default)
    if not host:
        raise UsageError("environment variable MASTER_ADDR is not set; start processes with torchrun")
    return host, port


def first_host(hosts: str) -> str:
    """The first of Slurm's list of hosts.

    >>> first_host("rack1-node[03-05,9],gpu7"), first_host("gpu7,gpu8"), first_host("a[1-2]b[10-12]-ib")
    ('rack1-node03', 'gpu7', 'a1b10-ib')
    """
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", hosts).split(",")[0]
