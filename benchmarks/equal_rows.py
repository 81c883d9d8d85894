"""Steps of a model with embedding tables on two hosts with a slow link between them: rows that samples look up several
times travel once, against all looked-up vectors, and against tables in replicas.

    python benchmarks/equal_rows.py --write 2026-11-28                  # as root: a testbed of two hosts

Tables are looked up once for each sample, at indices whose frequencies fall as 1 / rank (Zipf), as those of clicks and
words do. Sides take turns in the same processes: tables placed by ``whale.place_tables`` whose stages have
``distinct=``, the same without it, and all tables in replicas, which sum the gradients of looked-up rows. A step is the
forward, the backward, the exchange and the updates; its seconds are the slowest rank's. Losses are compared in
every step. Then the time in which one process finds the equal rows of messages, without anything beside.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from harness import TWO_HOSTS, arguments, in_turns, report, said_on_testbed, table
from servers import counters
from torch import Tensor, nn
from torch.nn import functional as F

import whale
from whale.annotations import Annotation
from whale.ir.cluster import Cluster, Link
from whale.runtime.equal_rows import EqualRows

ROWS, DIM, BATCH = (200_000, 100_000, 50_000, 50_000, 10_000, 10_000), 64, 4096
SIDES = ("distinct rows", "all vectors", "replicas")
HEAD = ("what is sent", "step", "of all vectors", "sent by a rank")


class Clicks(nn.Module):
    """Tables, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for rows in ROWS)
        self.top = nn.Sequential(nn.Linear(DIM * len(ROWS), 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
        vectors = [each(ids[:, number : number + 1]) for number, each in enumerate(self.tables)]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat(vectors, 1)).squeeze(1), clicked)


def batch() -> dict[str, Tensor]:
    """Indices of a Zipf distribution, whose numbers say nothing of their frequencies."""
    draw = torch.Generator().manual_seed(0)
    columns = []
    for rows in ROWS:
        weights = 1 / torch.arange(1, rows + 1, dtype=torch.float64)
        drawn = torch.multinomial(weights, BATCH, replacement=True, generator=draw)
        columns.append(torch.randperm(rows, generator=draw)[drawn])
    return {"ids": torch.stack(columns, 1), "clicked": (torch.rand(BATCH, generator=draw) < 0.3).float()}


def annotations(kind: str, model: nn.Module, given: dict[str, Tensor]) -> dict[str, Any]:
    """The annotations of a side."""
    if kind == "replicas":
        return {"": whale.replicate()}
    placed = whale.place_tables(model, given, Cluster.homogeneous(2, intra=Link(bandwidth=1.25e7, latency=1e-4)))
    return {key: [one if kind == "distinct rows" else _of_all(one) for one in nest] for key, nest in placed.items()}


def _of_all(one: Annotation) -> Annotation:
    return Annotation(strategy=replace(one.strategy, distinct=None))


def side(kind: str, losses: list[float]) -> Callable[[], None]:
    """The step of a model in parallel, which adds its loss to *losses*."""
    model, given = Clicks(), batch()
    whale.annotate(model, annotations(kind, Clicks(), given))
    made: Any = whale.parallelize(model, given, device="cpu", timeout_seconds=120)
    tables = [p for name, p in made.named_parameters() if "tables" in name]
    rest = [p for name, p in made.named_parameters() if "tables" not in name]
    optimizers = [whale.optim.RowWiseAdagrad(tables, lr=0.05), torch.optim.SGD(rest, lr=0.05)]

    def run() -> None:
        losses.append(made.train_step(**given).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return run


def run_rank(repeats: int) -> None:
    """One rank: the sides in turns, and a line of JSON on the first one."""
    torch.set_num_threads(1)
    losses: dict[str, list[float]] = {kind: [] for kind in SIDES}
    steps = {kind: side(kind, losses[kind]) for kind in SIDES}
    seconds = in_turns(steps, repeats)
    sent = {}
    for kind, step in steps.items():
        dist.barrier()
        before = counters()
        step()
        dist.barrier()
        sent[kind] = counters()[1] - before[1]
    error = max(abs(a - b) for own in losses.values() for a, b in zip(own, losses[SIDES[0]], strict=True))
    part = [float(str(one)[:-1].split("distinct=")[1]) for one in _stages(annotations(SIDES[0], Clicks(), batch()))]
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "sent": sent, "error": error, "distinct": part}))


def _stages(placed: dict[str, Any]) -> list[Annotation]:
    return [one for nest in placed.values() for one in nest if one.strategy.distinct is not None]


def of_keys() -> list[tuple[str, str, str]]:
    """Nanoseconds for each row in which equal rows are found, of messages of several sizes, in one process."""
    found = []
    for rows, count in ((1_000, 1024), (100_000, 1024), (100_000, 8192), (10_000_000, 8192), (10_000_000, 262_144)):
        keys = (rows * torch.rand(count, dtype=torch.float64) ** 6).long()
        finder = EqualRows({}, {}, torch.device("cpu"))
        finder.find(keys, rows)
        times = []
        for _ in range(30):
            start = time.perf_counter()
            finder.find(keys, rows)
            times.append(time.perf_counter() - start)
        found.append((f"{rows:,}", f"{count:,}", f"{statistics.median(times) / count * 1e9:.0f} ns"))
    return found


def main() -> None:
    if "RANK" in os.environ:
        run_rank(int(sys.argv[1]))
        return
    options = arguments(__doc__ or "", repeats=20)
    keys = of_keys()
    found = said_on_testbed(TWO_HOSTS, __file__, options.repeats)
    base, rows = found["seconds"]["all vectors"], []
    for kind in SIDES:
        own = found["seconds"][kind]
        ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
        sent = f"{found['sent'][kind] / 2**20:.2f} MiB"
        rows.append((kind, f"{statistics.median(own) * 1e3:.0f} ms", f"{ratio:.2f}", sent))
    text = (
        f"{len(ROWS)} tables of {min(ROWS):,} to {max(ROWS):,} rows of {DIM}, batch {BATCH}; `place_tables` says "
        f"distinct={' and '.join(f'{part:g}' for part in found['distinct'])}\n\n{table(HEAD, rows)}\n\n"
        f"Losses differ by {found['error']:.0e} at most.\n\n"
        f"{table(('rows of the table', 'rows of a message', 'for each row'), keys)}"
    )
    report("equal_rows", options, text)


if __name__ == "__main__":
    main()
