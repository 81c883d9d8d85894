"""Embedding tables with sparse gradients, placed by the planner and trained with row-wise Adagrad.

torchrun --standalone --nproc-per-node 2 examples/sparse_tables.py
python examples/sparse_tables.py                                             # alone: the same losses
torchrun ... examples/sparse_tables.py --host                                # tables in the host's memory: the same
"""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

import whale

ROWS = (40_000, 9_000, 9_000, 700, 50)


class Clicks(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for rows in ROWS)
        self.top = nn.Sequential(nn.Linear(len(ROWS) * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids, clicked):  # ids: [batch, tables, several for each]
        vectors = [table(ids[:, number]) for number, table in enumerate(self.tables)]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat(vectors, 1)).squeeze(1), clicked)


def batch(rows=64, several=4):
    ids = torch.stack([torch.randint(size, (rows, several)) for size in ROWS], 1)
    return {"ids": ids, "clicked": torch.randint(2, (rows,)).to(torch.get_default_dtype())}


def losses(model, step):
    tables = [p for name, p in model.named_parameters() if name.startswith("tables")]
    rest = [p for name, p in model.named_parameters() if not name.startswith("tables")]
    optimizers = [whale.optim.RowWiseAdagrad(tables, lr=0.1), torch.optim.AdamW(rest, lr=1e-3)]
    torch.manual_seed(1)
    for _ in range(5):
        yield step(**batch()).item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model, size = Clicks(), int(os.environ.get("WORLD_SIZE", "1"))
if size > 1:
    whale.annotate(model, whale.place_tables(model, batch(), size))
model = whale.parallelize(model, batch(), offload="tables" if "--host" in sys.argv else "none")
held = [name for name, _ in model.named_parameters() if name.startswith("tables")]
print(
    f"rank {model.rank} of {size} has {', '.join(held)}: {[f'{loss:.10f}' for loss in losses(model, model.train_step)]}"
)
