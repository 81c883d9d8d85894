"""Seats of processes that stand for devices of four types. Every order of them is in `tests.unit.test_seats`."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.scripts import run_script

ORDERS = [(1, 2, 3, 0), (2, 0, 3, 1)]

SCRIPT = """
import os, sys
import torch, whale
from tests.small_models import decoder, tokens
from whale.ir.cluster import Cluster, DeviceType
from whale.ir.plan import Plan
from whale.runtime.launch import finalize, initialize
from whale.seats import seating

SPEEDS = {"fastest": 4, "fast": 3, "slow": 2, "slowest": 1}
TYPES, ORDERS = list(SPEEDS), [(1, 2, 3, 0), (2, 0, 3, 1)]
process = int(os.environ["RANK"])
plan = Plan.model_validate({"world_size": 4, "cluster": {"devices": {name: [i] for i, name in enumerate(TYPES)}}})
for order in ORDERS:
    os.environ["WHALE_DEVICE_TYPE"] = TYPES[order[process]]
    world = initialize(60, 4, "cpu", seating(None, plan))
    total = torch.tensor(10 ** world.rank)
    torch.distributed.all_reduce(total)
    print(f"seat {order} {process} {world.rank} {total.item()};", flush=True)
    finalize()

cards = [
    DeviceType.of(name, speed={"float32": speed * 1e12}, memory_bytes=2**34, memory_bandwidth=1e12)
    for name, speed in SPEEDS.items()
]
os.environ["WHALE_DEVICE_TYPE"] = TYPES[3 - process]
torch.manual_seed(0)
batch = tokens(rows=10)
cluster = Cluster.of([("node", card) for card in cards])
model = whale.parallelize(decoder(layers=1), batch, cluster=cluster, device="cpu")
loss = model.train_step(**batch).item()
rows = sum(last - first for first, last in model.batch_share())
print(f"share {TYPES[3 - process]} {model.rank} {rows};", flush=True)
finalize()

os.environ["WHALE_DEVICE_TYPE"] = TYPES[min(process, 2)]
try:
    whale.parallelize(decoder(layers=1), batch, cluster=cluster, device="cpu")
except whale.WhaleError as error:
    print(f"refused {type(error).__name__}: {error};", flush=True)
finalize()

torch.distributed.init_process_group("gloo")
for place in (3 - process, process):
    os.environ["WHALE_DEVICE_TYPE"] = TYPES[place]
    torch.distributed.barrier()
    try:
        model = whale.parallelize(decoder(layers=1), batch, cluster=cluster, device="cpu")
        rows = sum(last - first for first, last in model.batch_share())
        print(f"own {place} {model.rank} {rows};", flush=True)
    except whale.WhaleError as error:
        print(f"kept {type(error).__name__}: {error};", flush=True)
"""


def test_processes_take_the_seats_of_their_devices_whatever_their_order_is(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_script(str(script), ranks=4, timeout=200)
    assert done.returncode == 0, done.stderr
    said = [line.strip() for line in done.stdout.split(";")]
    seats = [f"seat {order} {process} {rank} 1111" for order in ORDERS for process, rank in enumerate(order)]
    assert sorted(line for line in said if line.startswith("seat")) == sorted(seats)
    shares = [line for line in said if line.startswith("share")]
    assert sorted(shares) == sorted(["share fastest 0 4", "share fast 1 3", "share slow 2 2", "share slowest 3 1"])
    refused = [line for line in said if line.startswith("refused")]
    assert len(refused) == 4
    assert all("PlanMismatchError: rank 3 is for a device of type slowest, and no process" in line for line in refused)
    kept = [line for line in said if line.startswith("kept")]
    assert len(kept) == 4, "ranks of a script's own process group are not changed"
    wrong = "PlanMismatchError: rank 0 of the process group that the script has made has a slowest on"
    assert all(wrong in line and "is rank 3 of the plan" in line for line in kept)
    own = [line for line in said if line.startswith("own")]
    assert sorted(own) == ["own 0 0 4", "own 1 1 3", "own 2 2 2", "own 3 3 1"]
