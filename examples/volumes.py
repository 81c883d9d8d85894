"""Train on volumes of an HDF5 or a zarr file, of which each rank reads the slab that it computes on, and no more.

    torchrun --standalone --nproc-per-node 2 examples/volumes.py --format hdf5       # needs h5py
    torchrun --standalone --nproc-per-node 2 examples/volumes.py --format zarr       # needs zarr

`whale.read_parts` reads a rank's parts of a sample as slices of the file; the edges that a convolution needs of its
neighbours are exchanged in the step. The losses are those of one process that reads whole volumes.
"""

import argparse
import copy
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import whale

parser = argparse.ArgumentParser(description="volumes in files")
parser.add_argument("--format", default="hdf5", choices=["hdf5", "zarr"])
options = parser.parse_args()
if find_spec(needed := {"hdf5": "h5py", "zarr": "zarr"}[options.format]) is None:
    raise SystemExit(f"this example needs {needed}: pip install 'whale-parallel[volumes]'")
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

folder = tempfile.TemporaryDirectory()  # of this rank, in place of a file system that all share
path, volumes = Path(folder.name) / "volumes", torch.randn(6, 1, 20, 8, 8).numpy()
if options.format == "hdf5":
    import h5py

    stored = h5py.File(path, "w").create_dataset("volume", data=volumes, chunks=(1, 1, 4, 8, 8))
else:
    import zarr

    zarr.save_array(path, volumes)
    stored = zarr.open(path, mode="r")

model = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv3d(4, 1, 3, padding=1), nn.Flatten(), nn.Tanh())
local = copy.deepcopy(model)
whale.annotate(model, {"": whale.split(dim=2)})
example = (torch.from_numpy(volumes[:2]),)
model = whale.parallelize(model, example, loss_fn=lambda output, _: output.square().mean(), batch="parts")


def read(index, parts):
    slab = whale.read_parts(stored, next(iter(parts.values()), ()), at=(index,))
    return torch.from_numpy(slab)


equal = True
for step, slabs in enumerate(whale.shard_dataset(range(6), model, reader=read, batch_size=2)):
    loss, alone = model.train_step(slabs), local(torch.from_numpy(stored[2 * step : 2 * step + 2])).square().mean()
    equal = equal and abs(loss.item() - alone.item()) <= 1e-12
    print(f"step {step}, rank {model.rank} read {slabs.numel()} of {volumes[:2].size} voxels: loss {loss.item():.12f}")
print("losses equal those of whole volumes" if equal else "NOT EQUAL")
raise SystemExit(0 if equal else 1)
