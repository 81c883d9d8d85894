"""Mixed GPUs: the faster one gets more rows of the batch, more heads and columns, more layers.

A cluster file, mixed_gpus.toml, describes the devices: a V100 and a P100, whose speeds are as 1.65 to 1. The script
need not run on them: two processes on a laptop divide the work as those two would, and loss and gradients must equal
the local model's for all shares.

    torchrun --standalone --nproc-per-node 2 examples/mixed_gpus.py
    torchrun --standalone --nproc-per-node 4 examples/mixed_gpus.py --cluster lab.toml       # a file of your own
    python examples/mixed_gpus.py                                                            # alone, on one device

Shares here are in proportion to speed. `whale plan` and `whale search` divide by the time that layers take, measured or
modelled, and by memory.
"""

import argparse
import copy
import os
from pathlib import Path

import torch
from models.gpt import gpt

import whale
from whale.ir.shares import shares
from whale.planner.catalog import device_types

LAYERS, HEADS, ROWS, MICRO_BATCHES, BOUND = 5, 8, 16, 4, 1e-9


def cuts(speeds):
    """Stages whose numbers of layers are in proportion to the speeds."""
    annotations, first = {}, 0
    for count in shares(LAYERS, speeds, minimum=1):
        annotations[f"layers.[{first}-{first + count - 1}]"] = whale.stage()
        first += count
    return annotations


def held(model):
    """The part of the model on this rank, in words."""
    layers = sorted({int(name.split(".")[1]) for name, _ in model.named_parameters() if name.startswith("layers.")})
    query, _ = model.get_parameter(f"layers.{layers[0]}.qkv.weight").shape
    columns, _ = model.get_parameter(f"layers.{layers[0]}.up.weight").shape
    return f"layers {layers[0]} to {layers[-1]}, {query // (3 * SIZE)} heads, {columns} columns of each feed-forward"


def largest_error(model, local):
    """The largest error of all gradients, relative to the largest element of each."""
    found, errors = model.full_gradients(), [0.0]
    for name, parameter in local.named_parameters():
        errors.append(((found[name].cpu() - parameter.grad).abs().max() / parameter.grad.abs().max()).item())
    return max(errors)


parser = argparse.ArgumentParser(description="uneven shares on mixed devices")
parser.add_argument("--cluster", default=Path(__file__).with_name("mixed_gpus.toml"))
options = parser.parse_args()
alone = "RANK" not in os.environ
cluster = whale.Cluster.homogeneous(1) if alone else whale.Cluster.load(options.cluster, catalog=device_types())
ranks = int(os.environ.get("WORLD_SIZE", 1))
if ranks != len(cluster.devices):
    raise SystemExit(f"{options.cluster} has {len(cluster.devices)} devices, but {ranks} ranks started: see --cluster")
speeds = [device.speed("float32") for device in cluster.devices]

SIZE = 8  # of a head
torch.manual_seed(0)
model, batch = gpt(layers=LAYERS, hidden=SIZE * HEADS, heads=HEADS, seq=16, vocab=96, dropout=0.0, batch_size=ROWS)
local = copy.deepcopy(model.double())
expected = local(**batch)
expected.backward()

worst = 0.0
for what, annotations, micro_batches in (
    (f"rows of the batch, {shares(ROWS, speeds)}", {"": whale.replicate()}, 1),
    ("heads and columns", {"": whale.split()}, 1),
    ("layers", cuts(speeds), MICRO_BATCHES),
):
    mine = copy.deepcopy(model)
    whale.annotate(mine, annotations)
    parallel = whale.parallelize(mine, batch, cluster=cluster, micro_batches=micro_batches)
    loss = parallel.train_step(**batch)
    error = max(abs(loss.item() / expected.item() - 1), largest_error(parallel, local))
    worst = max(worst, error)
    device = cluster.devices[parallel.rank].name
    print(f"{what}: rank {parallel.rank} of {parallel.world_size}, {device}, has {held(parallel)}")
    if parallel.rank == 0:
        equal = "equal" if error < BOUND else "NOT EQUAL"
        print(f"{what}: parity of loss and every gradient: {equal} to {BOUND:g}, off by {error:.1e} at most")
raise SystemExit(0 if worst < BOUND else 1)
