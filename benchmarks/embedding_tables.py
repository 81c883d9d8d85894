"""DLRM on two ranks: one rank per embedding table, compared with replicated tables (PyTorch's DDP) and tables split by
rows.

    python benchmarks/embedding_tables.py

The steps of all sides alternate in the same processes. DDP reduces the gradients of all tables in every step; tables
with one rank each exchange the looked-up vectors, and only the gradients of the dense part are reduced. Bytes are those
of ring and pairwise algorithms, of both ranks together.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from harness import in_turns, on_two_ranks, report, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
import torch.distributed as dist
from dlrm import DLRM, batches, by_table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import whale

ROWS, DIM, BATCH = (40_000, 25_000, 15_000, 12_000, 5_000, 2_000, 500, 40), 32, 512


class ByRows(nn.Module):
    """The same with sums of looked-up rows, for which there is an axis rule, instead of bags."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding.from_pretrained(t.weight, freeze=False) for t in model.tables)
        self.dense = model.dense

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        return self.dense(numbers, [t(ids[:, i]).sum(1) for i, t in enumerate(self.tables)], clicked)


def main() -> None:
    parser = argparse.ArgumentParser(description="embedding tables, whole on a rank, against replicated ones")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps of each side")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    on_two_ranks()
    torch.manual_seed(0)
    model = DLRM(ROWS, DIM)
    batch = next(batches(1, rows=BATCH, table_rows=ROWS))
    half = BATCH // 2
    own = {name: tensor[half * dist.get_rank() :][:half] for name, tensor in batch.items()}
    plain = DistributedDataParallel(copy.deepcopy(model))

    def replicated() -> None:
        plain.zero_grad()
        plain(**own).backward()

    whole, by_rows = copy.deepcopy(model), ByRows(copy.deepcopy(model))
    whale.annotate(whole, by_table(ROWS, 2))
    whale.annotate(by_rows, {"tables.*": whale.split(), "dense": whale.replicate()})
    sides = {
        "all replicated (DDP)": replicated,
        "tables whole on a rank": step_of(whole, batch),
        "tables cut by rows": step_of(by_rows, batch),
    }
    seconds = in_turns(sides, options.repeats)
    held = 4 * DIM * sum(ROWS)
    dense = 4 * sum(p.numel() for p in model.dense.parameters())
    looked_up = 4 * len(ROWS) * BATCH * DIM
    sent = [2 * (held + dense), looked_up + 2 * dense, 2 * looked_up + 2 * dense]
    rows = []
    for (name, own_seconds), size in zip(seconds.items(), sent, strict=True):
        ratios = [a / b for a, b in zip(seconds["all replicated (DDP)"], own_seconds, strict=True)]
        middle = statistics.median(own_seconds)
        rows.append((name, f"{middle * 1e3:.1f} ms", f"{statistics.median(ratios):.2f}", f"{size / 2**20:.2f} MiB"))
    tables = f"{len(ROWS)} tables of {', '.join(map(str, ROWS))} rows of {DIM}, batch {BATCH}"
    report(
        "embedding_tables",
        options,
        f"{tables}\n\n" + table(("side", "forward and backward", "DDP / this", "bytes sent"), rows),
    )
    dist.barrier()
    dist.destroy_process_group()


def step_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], object]:
    parallel = whale.parallelize(model, batch, device="cpu")

    def step() -> None:
        parallel.zero_grad()
        parallel.train_step(**batch)

    return step


if __name__ == "__main__":
    main()
