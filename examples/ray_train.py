"""Ray Train starts equal workers; each trains its part of the model, and the losses are those of one process.

pip install "ray[train]"
python examples/ray_train.py --workers 2
python examples/ray_train.py --workers 0        # without Ray
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
from models.gpt import gpt

import whale

STEPS = 5


def build():
    torch.manual_seed(0)
    model, batch = gpt(layers=2, hidden=32, heads=4, seq=16, vocab=64, dropout=0.0, batch_size=8)
    return model.double(), batch


def train_alone():
    model, batch = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_in_parallel(config):
    """On every worker: the process group is Ray's."""
    model, batch = build()
    whale.annotate(model, {"": whale.split()})
    model = whale.parallelize(model, batch, device="cpu", timeout_seconds=60)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = model.train_step(**batch)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if model.rank == 0:
        Path(config["output"]).write_text(json.dumps([model.world_size, losses]))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--workers", type=int, default=2)
if __name__ == "__main__":
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = {"output": f"{folder}/losses.json"}
        if arguments.workers:
            os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")
            try:
                from ray.train import ScalingConfig
                from ray.train.torch import TorchTrainer
            except ModuleNotFoundError:
                raise SystemExit("this example needs Ray: pip install 'ray[train]', or --workers 0") from None
            workers = ScalingConfig(num_workers=arguments.workers, use_gpu=False)
            TorchTrainer(train_in_parallel, train_loop_config=config, scaling_config=workers).fit()
        else:
            train_in_parallel(config)
        size, losses = json.loads(Path(config["output"]).read_text())
    equal = all(abs(one - other) <= 1e-9 * other for one, other in zip(losses, train_alone(), strict=True))
    print(*(f"step {step}: loss {loss:.12f}" for step, loss in enumerate(losses)), sep="\n")
    print(f"parity on {size} workers: losses {'equal' if equal else 'NOT EQUAL'} to 1e-9")
    raise SystemExit(0 if equal else 1)
