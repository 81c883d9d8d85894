"""Steps of a recommendation model on two hosts with a slow link between them: what hides the exchange of looked-up
vectors and of their gradients.

    python benchmarks/overlap.py --write 2026-11-27                     # as root: a testbed of two hosts

Eight tables are placed by ``whale.place_tables``, the dense part, with the bottom MLP of MLPerf's DLRM, has replicas.
Sides take turns in the same processes: with the wait for vectors before a rank computes anything of its dense part, and
where they are first read, as Whale does it, so that the bottom MLP is computed meanwhile; each with whole backwards
(``1f1b``) and with ``zero_bubble``, which sends gradients of vectors before it computes those of weights. A step is the
forward, the backward, the exchange and the optimizers' updates; its seconds are the slowest rank's, and so are those in
which a rank waits for vectors and for gradients of vectors. Parameters are compared after the last step.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import TWO_HOSTS, arguments, in_turns, over_ranks, report, said_on_testbed, table
from torch import Tensor, nn
from torch.nn import functional as F

import whale
from whale.compile import rank_step
from whale.runtime.failure import Failures

ROWS, DIM, BATCH, SEVERAL = (40_000, 15_000, 6_000, 6_000, 2_000, 2_000, 500, 400), 128, 2048, 4
BOTTOM, TOP = (13, 512, 256, DIM), (512, 256, 1)
HEAD = ("waits for vectors", "schedule", "step", "of the first", "for vectors", "for their gradients")
SIDES = {
    f"{when}, {schedule}": (when, schedule) for schedule in ("1f1b", "zero_bubble") for when in ("first", "at the read")
}


def mlp(sizes: tuple[int, ...]) -> nn.Sequential:
    """Linear layers, all but the last with ReLU."""
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Clicks(nn.Module):
    """DLRM: tables, a bottom MLP, products of all pairs of vectors, a top MLP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for rows in ROWS)
        self.bottom, pairs = mlp(BOTTOM), (len(ROWS) + 1) * len(ROWS) // 2
        self.top = mlp((DIM + pairs, *TOP))
        for each in self.tables:
            nn.init.normal_(each.weight, std=0.1)

    def forward(self, numbers: Tensor, ids: Tensor, clicked: Tensor) -> Tensor:
        found = [each(ids[:, number]) for number, each in enumerate(self.tables)]
        x = torch.relu(self.bottom(numbers))
        vectors = torch.stack([x, *found], dim=1)
        first, second = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
        products = (vectors @ vectors.transpose(1, 2))[:, first, second]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, products], 1)).squeeze(1), clicked)


def batch() -> dict[str, Tensor]:
    """A batch of random indices."""
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(size, (BATCH, SEVERAL), generator=draw) for size in ROWS]
    clicked = (torch.rand(BATCH, generator=draw) < 0.3).float()
    return {"numbers": torch.randn(BATCH, BOTTOM[0], generator=draw), "ids": torch.stack(ids, 1), "clicked": clicked}


class Waits:
    """Seconds in which this rank waits for vectors and for gradients of vectors."""

    def __init__(self) -> None:
        self.seconds = {"value": 0.0, "gradient": 0.0}
        wait = Failures.wait

        def timed(failures: Failures, work: Any, what: str, *args: Any, **options: Any) -> None:
            start = time.perf_counter()
            wait(failures, work, what, *args, **options)
            kind = what.split()[0]
            if kind in self.seconds and " from rank " in what:
                self.seconds[kind] += time.perf_counter() - start

        Failures.wait = timed  # type: ignore[method-assign]

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        found, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return found


def side(
    model: nn.Module, when: str, schedule: str, waits: Waits, waited: list[dict[str, float]]
) -> tuple[Any, Callable[[], None]]:
    """A model in parallel, and its step."""
    given = batch()
    whale.annotate(model, whale.place_tables(copy.deepcopy(model), given, 2))
    waits_first = mock.patch.object(rank_step, "awaited", lambda programs: programs)
    with waits_first if when == "first" else mock.MagicMock():
        made: Any = whale.parallelize(model, given, device="cpu", schedule=schedule, timeout_seconds=120)
    tables = [p for name, p in made.named_parameters() if "tables" in name]
    rest = [p for name, p in made.named_parameters() if "tables" not in name]
    optimizers = whale.optim.RowWiseAdagrad(tables, lr=0.05), torch.optim.SGD(rest, lr=0.05)

    def run() -> None:
        waits.take()
        made.train_step(**given)
        waited.append(waits.take())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return made, run


def run_rank(repeats: int) -> None:
    """One rank: the sides in turns, and a line of JSON on the first one."""
    torch.set_num_threads(1)
    waits, waited = Waits(), {name: list[dict[str, float]]() for name in SIDES}
    made = {name: side(Clicks(), *how, waits, waited[name]) for name, how in SIDES.items()}
    seconds = in_turns({name: step for name, (_, step) in made.items()}, repeats)
    exposed = {
        name: {
            kind: over_ranks(statistics.median(one[kind] for one in own[1:]), dist.ReduceOp.MAX)
            for kind in waits.seconds
        }
        for name, own in waited.items()
    }
    states = [model.full_state_dict() for model, _ in made.values()]
    error = max(float((state[name] - x).abs().max()) for state in states for name, x in states[0].items())
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "exposed": exposed, "error": error}))


def main() -> None:
    if "RANK" in os.environ:
        run_rank(int(sys.argv[1]))
        return
    options = arguments(__doc__ or "", repeats=20)
    found = said_on_testbed(TWO_HOSTS, __file__, options.repeats)
    base, rows = found["seconds"]["first, 1f1b"], []
    for name, (when, schedule) in SIDES.items():
        own = found["seconds"][name]
        ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
        waits = (f"{found['exposed'][name][kind] * 1e3:.0f} ms" for kind in ("value", "gradient"))
        rows.append((when, schedule, f"{statistics.median(own) * 1e3:.0f} ms", f"{ratio:.2f}", *waits))
    size = BATCH // 2 * len(ROWS) // 2 * DIM * 4 / 2**20
    text = (
        f"{len(ROWS)} tables of rows of {DIM}, batch {BATCH}, {SEVERAL} look-ups each; each rank sends the other about "
        f"{size:.1f} MiB of vectors\n\n{table(HEAD, rows)}\n\n"
        f"Parameters differ by {found['error']:.0e} at most."
    )
    report("overlap", options, text)


if __name__ == "__main__":
    main()
