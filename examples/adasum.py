"""Eight times the batch: the mean gradient at eight times the learning rate diverges, and Adasum learns.

    torchrun --standalone --nproc-per-node 8 examples/adasum.py
    torchrun --standalone --nproc-per-node 4 examples/adasum.py        # four times the batch
    python examples/adasum.py                                         # one batch, for comparison

Every rank adds 16 rows to the batch. Small batches learn at a rate of 1; with n times the rows the usual rule is n
times the rate. Adasum needs no rule: where the gradients of replicas are orthogonal, it adds them, and where they agree
it takes their mean, for each parameter. `python benchmarks/adasum.py` draws the curves.
"""

import os
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

import whale

ROWS, RATE, STEPS = 16, 1.0, 120
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(1)
FIRST, LAST = torch.randn(16, 32), torch.randn(32, 10) / 8


class Regression(nn.Module):
    """Five layers that learn a random network of two."""

    def __init__(self, width=64):
        super().__init__()
        torch.manual_seed(0)
        sizes = [16, width, width, width, width]
        self.layers = nn.Sequential(*(part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.GELU())))
        self.head = nn.Linear(width, 10)

    def forward(self, x, y):
        return F.mse_loss(self.head(self.layers(x)), y)


def batch_of(step, rows):
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": torch.tanh(torch.relu(x @ FIRST) @ LAST)}


for reduce, rate in (("mean", RATE * RANKS), ("adasum", RATE)):
    model = whale.parallelize(Regression(), batch_of(0, ROWS * RANKS), reduce=reduce, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(STEPS):
        loss = model.train_step(**batch_of(step, ROWS * RANKS))
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 and model.rank == 0:
            print(f"{reduce} of {RANKS} at {rate:g}, step {step + 1}: loss {loss.item():.4f}")
