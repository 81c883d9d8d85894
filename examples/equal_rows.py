"""Embedding tables of which few rows are looked up often: these travel once to each rank that needs them.

torchrun --standalone --nproc-per-node 2 examples/equal_rows.py
python examples/equal_rows.py                                                # alone: the same losses
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

import whale
from whale.ir.cluster import Cluster, Link

ROWS = (40_000, 9_000, 9_000)
SLOW = Link(bandwidth=1e8, latency=1e-4)  # 100 MB/s, as between hosts


class Clicks(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, dim, sparse=True) for rows in ROWS)
        self.top = nn.Sequential(nn.Linear(len(ROWS) * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids, clicked):  # ids: [batch, tables]
        vectors = [table(ids[:, number]) for number, table in enumerate(self.tables)]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat(vectors, 1)).squeeze(1), clicked)


def batch(rows=2048):
    """Row n of a table is looked up about 1 / n times as often as the first."""
    drawn = torch.rand(rows, len(ROWS))
    ids = torch.stack([(size ** drawn[:, number]).long() - 1 for number, size in enumerate(ROWS)], 1)
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
model, example, size = Clicks(), batch(), int(os.environ.get("WORLD_SIZE", "1"))
if size > 1:
    placed = whale.place_tables(model, example, Cluster.homogeneous(size, intra=SLOW))
    whale.annotate(model, placed)
model = whale.parallelize(model, example)
if model.rank == 0 and size > 1:
    print("\n".join(f"{path!r}: {', '.join(map(str, nest))}" for path, nest in placed.items()))
print(f"rank {model.rank} of {size}: {[f'{loss:.10f}' for loss in losses(model, model.train_step)]}")
