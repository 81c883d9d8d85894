"""Train a small classifier alone and in parallel, from the same seed, and compare the losses.

torchrun --nproc-per-node 2 examples/quickstart.py        # or: python examples/quickstart.py
"""

import os

import torch
from torch import nn

import whale


class Classifier(nn.Module):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64))
        self.head = nn.Linear(64, 1000)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.head(self.trunk(x)), labels)


def batches(steps=10, rows=16):
    torch.manual_seed(1)
    return [{"x": torch.randn(rows, 32), "labels": torch.randint(1000, (rows,))} for _ in range(steps)]


def train_alone():
    model, losses = Classifier(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_in_parallel():
    model, losses = Classifier(), []
    whale.annotate(model, {"trunk": whale.replicate(), "head": whale.split()})  # 1: data parallel, then classes sharded
    model = whale.parallelize(model, batches()[0])  # 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        loss = model.train_step(**batch)  # 3: forward and backward of the whole batch
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


local, parallel = train_alone(), train_in_parallel()
equal = all(abs(a - b) <= 1e-6 * a for a, b in zip(local, parallel, strict=True))
if os.environ.get("RANK", "0") == "0":
    print(*(f"loss {a:.7f} alone, {b:.7f} in parallel" for a, b in zip(local, parallel, strict=True)), sep="\n")
    print(f"on {os.environ.get('WORLD_SIZE', '1')} ranks: the losses are {'equal' if equal else 'NOT EQUAL'} to 1e-6")
raise SystemExit(0 if equal else 1)
