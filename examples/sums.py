"""Ways to sum gradients: an all-reduce, parameter servers, servers whose sums come a step late, and PowerSGD.

    torchrun --standalone --nproc-per-node 2 examples/sums.py
    torchrun --standalone --nproc-per-node 4 examples/sums.py
    python examples/sums.py                                            # alone: the losses of the all-reduce

Servers have the losses of the all-reduce. Late sums have those of a local run whose optimizer gets each gradient a step
late. PowerSGD, a communication hook of DDP, sends matrices of rank 4 in place of gradients, and approximates.
"""

import os

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional as F

import whale

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
SERVERS = {"reduce": "server", "state_shares": [RANKS + 1] + [1] * (RANKS - 1)}  # the first serves most parameters
WAYS = {"all-reduce": {}, "servers": SERVERS, "late servers": {**SERVERS, "staleness": 1}, "PowerSGD": {}}


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x, y):
        return F.mse_loss(self.layers(x), y)


def batch_of(step, rows=64):
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": x[:, :8].square()}


torch.set_default_dtype(torch.float64)
for way, options in WAYS.items() if RANKS > 1 else [("all-reduce", {})]:
    model = whale.parallelize(Regression(), batch_of(0), device="cpu", **options)
    if way == "PowerSGD":
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(60):
        loss = model.train_step(**batch_of(step))
        optimizer.step()
        optimizer.zero_grad()
    while model.drain():  # sums that are on their way
        optimizer.step()
        optimizer.zero_grad()
    elements = sum(parameter.numel() for parameter in model.parameters())
    print(f"{way}: rank {model.rank} of {RANKS} steps {elements} elements, last loss {loss.item():.10f}")
