"""Steps of a data-parallel model on two hosts with a slow link between them, with communication hooks of DDP.

    python benchmarks/comm_hooks.py --write 2026-11-28                  # as root: a testbed of two hosts

Sides take turns in the same processes: Whale's all-reduce, torch's cast to float16 and PowerSGD (rank 2) as hooks of
Whale, and the same PowerSGD in DDP. A step is the forward, the backward, the sums and SGD's update; its seconds are the
slowest rank's. Losses of PowerSGD in Whale and in DDP are compared in every step. DDP has all gradients in one bucket:
with several its ranks wait for each other forever on gloo, as what PowerSGD does when an exchange has ended runs in
threads.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import TWO_HOSTS, arguments, in_turns, report, said_on_testbed, table
from servers import counters
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import whale

WIDTH, LAYERS, ROWS = 768, 3, 64
BASE, CAST, POWER, DDP = "all-reduce", "float16", "PowerSGD", "PowerSGD in DDP"
HEAD = ("sums", "step", "of the all-reduce", "sent by a rank")


class Layers(nn.Module):
    """Matrices, the first of which has the last gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


def side(kind: str, losses: list[float]) -> Callable[[], None]:
    """The step of a model, which adds its loss to *losses*."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    own = x.chunk(2)[dist.get_rank()]
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    if kind == DDP:
        ddp = DistributedDataParallel(Layers(), bucket_cap_mb=100)
        ddp.register_comm_hook(state, powerSGD_hook)
        model: Any = ddp
    else:
        model = whale.parallelize(Layers(), {"x": x}, device="cpu", timeout_seconds=120)
        if kind == CAST:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif kind == POWER:
            model.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        if kind == DDP:
            loss = model(own)
            loss.backward()
        else:
            loss = model.train_step(x=x)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()

    return run


def run_rank(repeats: int) -> None:
    """One rank: the sides in turns, and a line of JSON on the first one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses: dict[str, list[float]] = {kind: [] for kind in (BASE, CAST, POWER, DDP)}
    steps = {kind: side(kind, own) for kind, own in losses.items()}
    for step in steps.values():
        step(), step()
    seconds = in_turns(steps, repeats)
    sent = {}
    for kind, step in steps.items():
        dist.barrier()
        before = counters()
        step()
        dist.barrier()
        sent[kind] = counters()[1] - before[1]
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, losses[DDP])
    means = [sum(pair) / 2 for pair in zip(*of_ranks, strict=True)]
    error = max(abs(a / b - 1) for a, b in zip(losses[POWER], means, strict=True))
    if dist.get_rank() == 0:
        last = {kind: own[-1] / own[0] for kind, own in losses.items() if kind != DDP}
        print(json.dumps({"seconds": seconds, "sent": sent, "error": error, "last": last}))


def main() -> None:
    if "RANK" in os.environ:
        run_rank(int(sys.argv[1]))
        return
    options = arguments(__doc__ or "", repeats=20)
    found = said_on_testbed(TWO_HOSTS, __file__, options.repeats)
    base, rows = found["seconds"][BASE], []
    for kind, own in found["seconds"].items():
        ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
        rows.append(
            (
                kind,
                f"{statistics.median(own) * 1e3:.0f} ms",
                f"{ratio:.2f}",
                f"{found['sent'][kind] / 2**20:.2f} MiB",
            )
        )
    last = ", ".join(f"{part:.3f} ({kind})" for kind, part in found["last"].items())
    text = (
        f"{LAYERS} matrices of {WIDTH} x {WIDTH}, {ROWS} rows\n\n{table(HEAD, rows)}\n\n"
        f"Losses of PowerSGD differ from DDP's by {found['error']:.0e} of them at most. The last loss is of the first: "
        f"{last}."
    )
    report("comm_hooks", options, text)


if __name__ == "__main__":
    main()
