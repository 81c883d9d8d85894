"""Checkpoints against `torch.distributed.checkpoint` (DCP), in one run: GPT-2 with AdamW on two ranks.

Whale writes with a SHA-256 for each 256 KiB, and checks every byte that it loads; DCP has no digests. Both write to the
disk (fsync). `save`: until all files are there; `blocked`: until training goes on, files being written by a thread;
`load`: into a model and an optimizer that have states. The time is that of the slower rank. `read`: bytes that a rank
reads, as a part of what it has; the last rows, of unlike shares, are of the rank with the smaller one.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import HEAD, Row, arguments, on_two_ranks, over_ranks, report, side_by_side, table
from models import batch, gpt2
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import whale
from whale.ir.cluster import Cluster, DeviceType

WIDTH = 512
LAYERS = {1: 6, 2: 12}
"""By the number of ranks among which they are divided: parameters with AdamW's states are at least 200 MiB a rank."""


def unlike() -> Cluster:
    """Two devices, of which one has three times the other's speed."""
    cards = [
        DeviceType.of(f"x{speed}", speed={"float32": speed * 1e12}, memory_bytes=2**34, memory_bandwidth=1e12)
        for speed in (3, 1)
    ]
    return Cluster.of([("node", card) for card in cards])


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "dp": ({"": whale.replicate()}, {}, 1.02),
    "tp": ({"": whale.split()}, {}, 1.15),
    "pp": ({f"transformer.h.{i}": whale.stage() for i in (0, 6)}, {"micro_batches": 2}, 1.02),
    "zero 3": ({"": whale.replicate()}, {"zero": 3}, 1.02),
    "tp 3:1": ({"": whale.split()}, {"cluster": unlike()}, 1.30),
}
"""Annotations, options, and how much a rank may read."""


class Run:
    """A model and an optimizer with states."""

    def __init__(self, layout: dict[str, Any], options: dict[str, Any], layers: int) -> None:
        model = gpt2(width=WIDTH, layers=layers)
        whale.annotate(model, layout)
        self.model = whale.parallelize(model, batch(4, 16), device="cpu", **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model.train_step(**batch(4, 16))
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def own_bytes(self) -> int:
        states = [x for state in self.optimizer.state.values() for x in state.values()]
        return sum(x.nbytes for x in [*self.model._whale.engine.tensors.values(), *states])

    def state(self) -> dict[str, Any]:
        """The state as DCP takes it."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return {
            "model": self.model.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options),
        }


def main() -> None:
    options = arguments(__doc__ or "", repeats=7)
    on_two_ranks()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    beside = dist.new_group(backend="gloo")
    rows = []
    for case, (layout, given, read) in CASES.items():
        if options.only in case:
            run = Run(layout, given, LAYERS[1 if case == "dp" else 2])
            rows += measured(case, run, read, Path(folder[0]) / case, beside, options.repeats)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    report("checkpoints", options, table(HEAD, [row.cells() for row in rows]))


def measured(case: str, run: Run, read: float, folder: Path, beside: Any, repeats: int) -> list[Row]:
    """The rows of one layout."""
    warnings.filterwarnings("ignore")
    own, theirs = folder / "whale", folder / "dcp"
    state = run.state()
    step, pending = [0], []

    def save(asynchronous: bool) -> None:
        step[0] += 1
        whale.save_checkpoint(own, run.model, step=step[0], keep=1, optimizer=run.optimizer, asynchronous=asynchronous)

    def save_beside() -> None:
        pending.append(dcp.async_save(run.state(), checkpoint_id=theirs, process_group=beside))

    def settle() -> None:
        whale.wait_for_checkpoints()
        while pending:
            pending.pop().result()

    found: list[Any] = [None]

    def load() -> None:
        found[0] = whale.load_checkpoint(own, run.model, optimizer=run.optimizer)

    def timed(name: str, one: Callable[[], object], other: Callable[[], object], target: float) -> Row:
        return side_by_side(f"{case}, {name}", one, other, repeats=repeats, target=target, after=settle)

    own_bytes = over_ranks(run.own_bytes, dist.ReduceOp.MAX) / 2**20
    rows = [
        timed(
            f"save ({own_bytes:.0f} MiB a rank)",
            lambda: save(False),
            lambda: dcp.save(run.state(), checkpoint_id=theirs),
            1.3,
        ),
        timed("blocked", lambda: save(True), save_beside, 0.6),
        timed("load", load, lambda: dcp.load(state, checkpoint_id=theirs), 1.6),
    ]
    most = over_ranks(found[0].bytes_read / run.own_bytes, dist.ReduceOp.MAX)
    return [*rows, Row(f"{case}, bytes read", most * run.own_bytes, run.own_bytes, read, unit="B", ratio_median=most)]


if __name__ == "__main__":
    main()
