"""State in stretches: GPT-2 on two replicas, with AdamW, where parameters are most of the memory.

zero=1 is compared with DistributedDataParallel, zero=3 with FSDP2 (`fully_shard` of every block and the model). Memory
is the peak of the live bytes of a whole step, of the rank with more, or what is left between steps; time that of
zeroing gradients, forward, backward and AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from harness import HEAD, Row, arguments, on_two_ranks, over_ranks, report, side_by_side, table
from live_bytes import LiveBytes, living, peak_of
from models import batch, gpt2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import whale

LAYERS = 8
Step = Callable[[], object]


def whale_step(width: int, rows: int, length: int, zero: int) -> Step:
    model = gpt2(width=width, layers=LAYERS)
    whale.annotate(model, {"": whale.replicate()})
    made = whale.parallelize(model, batch(rows, length), device="cpu", zero=zero)
    optimizer = AdamW(made.parameters())

    def step() -> None:
        optimizer.zero_grad()
        made.train_step(**batch(rows, length))
        optimizer.step()

    return step


def torch_step(width: int, rows: int, length: int, wrap: Callable[[Any], Any]) -> Step:
    model = wrap(gpt2(width=width, layers=LAYERS))
    optimizer = AdamW(model.parameters())
    half = rows // 2
    own = {name: x[half * dist.get_rank() :][:half] for name, x in batch(rows, length).items()}

    def step() -> None:
        optimizer.zero_grad()
        model(**own).loss.backward()
        optimizer.step()

    return step


def ddp(model: Any) -> Any:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp2(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def bytes_of(make: Callable[[], Step]) -> tuple[float, float]:
    """Peak of a step, and what is left after it."""
    others = frozenset(living())
    with LiveBytes(others) as live:
        step = make()
        peak = peak_of(step, live)
        left = live.now
    del step
    return over_ranks(float(peak), dist.ReduceOp.MAX), over_ranks(float(left), dist.ReduceOp.MAX)


def main() -> None:
    options = arguments("state in stretches against DDP and FSDP2")
    on_two_ranks()
    rows = []
    for width, count, length in ((256, 4, 32), (512, 4, 32)):
        sizes = width, count, length
        for zero, name, wrap, peak, time in ((1, "DDP", ddp, 0.70, 1.05), (3, "FSDP2", fsdp2, 1.00, 1.00)):
            case = f"zero={zero} against {name}, {width} wide, {count} x {length}"
            if options.only not in case:
                continue
            one, other = partial(whale_step, *sizes, zero), partial(torch_step, *sizes, wrap)
            own, theirs = bytes_of(one), bytes_of(other)
            rows.append(Row(f"{case}, peak", own[0], theirs[0], peak, unit="B").cells())
            rows.append(Row(f"{case}, at rest", own[1], theirs[1], 1.0, unit="B").cells())
            timed = side_by_side(f"{case}, time", one(), other(), repeats=options.repeats, target=time)
            rows.append(timed.cells())
    report("state_sharding", options, table(HEAD, rows))


if __name__ == "__main__":
    main()
