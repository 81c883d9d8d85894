"""A recommendation model (DLRM): one rank per embedding table, the dense part in data parallel.

The tables hold nearly all parameters and take next to no computation, and no two are of one size. So each rank keeps
some tables, looks the whole batch up in them, and sends every rank the rows that its dense part works on; gradients
come back the same way. That is the all-to-all of DLRM (Naumov et al. 2019, arXiv 1906.00091). In Whale it is what
crosses between stages that share devices: the tables of each rank are a stage on that rank alone, and the dense part
is the last stage, on all ranks.

    torchrun --standalone --nproc-per-node 2 examples/dlrm.py
    torchrun --standalone --nproc-per-node 4 examples/dlrm.py
    python examples/dlrm.py                                            # alone; the same losses

The other way is to cut every table by rows, {"tables.*": whale.split(), "dense": whale.replicate()} for tables that are
nn.Embedding. That holds a table which is too large for any rank, but each rank then has a term of every vector that was
looked up, and these have to be summed: on N ranks N times the bytes.
"""

import copy
import os

import torch
from torch import nn
from torch.nn import functional as F

import whale

BOUND = 1e-12
TABLE_ROWS = (20_000, 12_000, 7_000, 7_000, 2_000, 300, 40, 3)


class Dense(nn.Module):
    """The dense part: an MLP for the numbers, products of all pairs of vectors, an MLP over them, the loss."""

    def __init__(self, tables, dim, numbers):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(numbers, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers, looked_up, clicked):
        x = self.bottom(numbers)
        vectors = torch.stack([x, *looked_up], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        first, second = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
        logits = self.top(torch.cat([x, products[:, first, second]], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicked)


class DLRM(nn.Module):
    """``ids`` are [rows, tables, several for each], of which a table sums the vectors."""

    def __init__(self, table_rows=TABLE_ROWS, dim=16, numbers=13):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for rows in table_rows)
        self.dense = Dense(len(table_rows), dim, numbers)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, numbers, ids, clicked):
        looked_up = [table(ids[:, index]) for index, table in enumerate(self.tables)]
        return self.dense(numbers, looked_up, clicked)


def batches(steps, rows=64, table_rows=TABLE_ROWS, per_table=3, numbers=13):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = [torch.randint(size, (rows, per_table), generator=generator) for size in table_rows]
        clicked = (torch.rand(rows, generator=generator) < 0.3).to(torch.get_default_dtype())
        yield {
            "numbers": torch.randn(rows, numbers, generator=generator),
            "ids": torch.stack(ids, 1),
            "clicked": clicked,
        }


def tables_of_ranks(table_rows, num_ranks):
    """Assign tables to ranks: the largest first, each to the rank with the fewest rows so far."""
    held = [[] for _ in range(num_ranks)]
    for table in sorted(range(len(table_rows)), key=lambda table: -table_rows[table]):
        min(held, key=lambda tables: sum(table_rows[one] for one in tables)).append(table)
    return held


def by_table(table_rows, num_ranks):
    """The annotations: a stage for the tables of each rank, then the dense part on all of them."""
    annotations = {
        f"tables.[{','.join(map(str, tables))}]": [whale.cluster([rank]), whale.stage()]
        for rank, tables in enumerate(tables_of_ranks(table_rows, num_ranks))
        if tables
    }
    return annotations | {"dense": [whale.cluster(range(num_ranks)), whale.stage(), whale.replicate()]}


def losses(model, step):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for batch in batches(steps=8):
        loss = step(batch)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = DLRM()

    local = copy.deepcopy(model)

    def local_step(batch):
        loss = local(**batch)
        loss.backward()
        return loss

    expected = list(losses(local, local_step))

    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        whale.annotate(model, by_table(TABLE_ROWS, size))
    parallel = whale.parallelize(model, next(batches(steps=1)))
    found = list(losses(parallel, lambda batch: parallel.train_step(**batch)))

    state, error = parallel.full_state_dict(), 0.0
    for name, parameter in local.state_dict().items():
        error = max(error, (state[name].cpu() - parameter).abs().max().item())
    error = max(error, *(abs(a - b) for a, b in zip(expected, found, strict=True)))
    equal = "equal" if error < BOUND else "NOT EQUAL"
    held = [tuple(p.shape) for name, p in parallel.named_parameters() if name.startswith("tables")]
    print(f"rank {parallel.rank} of {size} holds tables of {', '.join(str(rows) for rows, _ in held)} rows")
    if parallel.rank == 0:
        print(f"losses: {', '.join(f'{loss:.6f}' for loss in found)}")
        print(
            f"parity on {size} ranks: losses and parameters {equal} to {BOUND:g}; the largest difference is {error:.1e}"
        )
    raise SystemExit(0 if error < BOUND else 1)


if __name__ == "__main__":
    main()
