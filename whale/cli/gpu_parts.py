"""The parts of ``whale doctor --gpu``: what the ranks of one part do, and what they find.

    torchrun --nproc-per-node 2 -m whale.cli.gpu_parts parity /tmp/found cuda

Every rank writes what it found to the folder, as JSON. Loaded only in these processes, because it loads torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from whale.api import ParallelModule, parallelize, verify
from whale.runtime.agreement import checksum
from whale.runtime.launch import describe
from whale.runtime.random import column_numbers, keep_mask, row_numbers

ROWS, LENGTH, WORDS = 8, 32, 128
MICRO_BATCHES = (1, 2, 8)
SCHEDULES = ("gpipe", "1f1b", "zero_bubble", "zero_bubble_2p")
COPIED_STEPS, GRAPH_STEPS = 200, 6
WAIT_SECONDS = 20.0
"""Limit of waits in the part that lets a rank fail."""


class Block(nn.Module):
    """Attention and feed-forward, with residual sums."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (rows, length, width)."""
        rows, length, width = x.shape
        parts = self.qkv(self.before(x)).split(width, dim=-1)
        query, key, value = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(rows, length, width)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.between(x)))), self.dropout, self.training)


class Decoder(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, layers: int = 4, width: int = 64, heads: int = 8, words: int = WORDS, dropout: float = 0.0):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of (rows, length) tokens."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def decoder(device: torch.device, **sizes: Any) -> Decoder:
    """A decoder with the same weights on every rank."""
    torch.manual_seed(0)
    return Decoder(**sizes).to(device)


def batch(rows: int = ROWS, length: int = LENGTH, words: int = WORDS) -> dict[str, Tensor]:
    """A global batch, the same on every rank."""
    drawn = torch.randint(words, (2, rows, length), generator=torch.Generator().manual_seed(1))
    return {"tokens": drawn[0], "labels": drawn[1]}


def layouts(size: int) -> dict[str, dict[str, Any]]:
    """Kinds of plans for a number of ranks."""
    found: dict[str, dict[str, Any]] = {"replicate": {"": whale.replicate()}, "split": {"": whale.split()}}
    if size == 1:
        return {"one rank": {}}
    pairs = {"layers.[0-1]": (0, size // 2), "layers.[2-3]": (1, size - size // 2)}
    if size % 2 == 0:
        found["stages"] = {name: [whale.stage(count), whale.replicate(count)] for name, (_, count) in pairs.items()}
    if size % 4 == 0:
        found["stages of parts"] = {
            name: [whale.stage(count), whale.split(count)] for name, (_, count) in pairs.items()
        }
        found["replicas of parts"] = {"": [whale.replicate(size // 2), whale.split(2)]}
    return found


def parity(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    """Loss and gradients of every kind of plan and schedule against the local step, in float64."""
    rows = []
    for name, layout in layouts(size).items():
        for schedule in SCHEDULES if "stages" in name else ("1f1b",):
            for micro_batches in MICRO_BATCHES:
                model = decoder(device).double()
                if layout:
                    whale.annotate(model, layout)
                options: dict[str, Any] = {"micro_batches": micro_batches, "schedule": schedule, "device": device.type}
                report = verify(model, batch(), **options)
                rows.append(
                    {
                        "plan": name,
                        "schedule": schedule,
                        "micro_batches": micro_batches,
                        "error": max(report.loss_error, report.gradient_error),
                        "passed": report.passed,
                    }
                )
    return {"passed": all(row["passed"] for row in rows), "cases": rows}


def copies(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    """Copies of parameters and masks of dropout, bit for bit, after steps with dropout in all replicas."""
    unlike: dict[str, Any] = {}
    steps = COPIED_STEPS if device.type == "cuda" else 5
    for name, layout in layouts(size).items():
        model = decoder(device, dropout=0.1).train()
        if layout:
            whale.annotate(model, layout)
        made = parallelize(model, batch(), device=device.type, cluster=None, seed=5)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
        for _ in range(steps):
            made.train_step(**batch())
            optimizer.step()
            optimizer.zero_grad()
        unlike |= {f"{name}: {parameter}": list(ranks) for parameter, ranks in made.unlike_copies().items()}
    held, sizes = (((0, 1000),), ((0, 4000),)), (1000, 4000)
    masks = [
        int(checksum(keep_mask(5, 0.9, row_numbers(held, sizes, place), column_numbers(held, place))))
        for place in (torch.device("cpu"), device)
    ]
    return {"passed": not unlike and masks[0] == masks[1], "unlike": unlike, "masks": masks, "steps": steps}


def waits(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    """Steps in which the host waits for the device are refused by torch."""
    found = {}
    for name, layout in layouts(size).items():
        model = decoder(device)
        if layout:
            whale.annotate(model, layout)
        made = parallelize(model, batch(), device=device.type, micro_batches=2)
        for _ in range(2):
            made.train_step(**batch())
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            made.train_step(**batch())
            found[name] = ""
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0]
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return {"passed": not any(found.values()), "waits": found}


def graphs(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    """Steps that are replayed as CUDA graphs against others, bit for bit: losses and parameters after some steps."""
    others = []
    for name, layout in layouts(size).items():
        found: list[list[int]] = []
        for asked in (False, device.type == "cuda"):
            model = decoder(device, dropout=0.1).train()
            if layout:
                whale.annotate(model, layout)
            made = parallelize(model, batch(), device=device.type, micro_batches=2, seed=5, cuda_graphs=asked)
            optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
            losses = []
            for _ in range(GRAPH_STEPS):
                losses.append(made.train_step(**batch()))
                optimizer.step()
                optimizer.zero_grad()
            found.append([int(checksum(x.detach())) for x in (*losses, *made.parameters())])
        if found[0] != found[1]:
            others.append(name)
    return {"passed": not others, "others": others, "steps": GRAPH_STEPS}


def failures(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    """The last rank fails in a step: all others must say so, in time."""
    model = decoder(device)
    whale.annotate(model, {"": whale.replicate()} if size > 1 else {})
    limit = WAIT_SECONDS if device.type == "cuda" else 5.0
    made = parallelize(model, batch(), device=device.type, timeout_seconds=limit)
    made.train_step(**batch())
    steps = made._whale.engine.steps
    if rank == size - 1:

        def fail(*ignored: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory: allocated by whale doctor")

        stage: Any = steps._steps[next(iter(steps._steps))].stages[0]
        stage.forward_to_train = fail
    begin, message = time.monotonic(), ""
    try:
        for _ in range(3):
            made.train_step(**batch()).item()
            time.sleep(1.0)
    except whale.WhaleError as error:
        message = str(error)
    seconds = time.monotonic() - begin
    if rank == size - 1:
        time.sleep(limit)
    passed = f"rank {size - 1} is out of memory" in message and seconds < limit + 5
    return {"passed": passed, "message": message, "seconds": seconds}


def communicators(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    """Bytes of a device that a process group takes once it has been used."""
    if device.type != "cuda" or size == 1:
        return {"passed": True, "bytes": None}
    from whale.runtime.launch import groups, initialize

    initialize()
    count, everyone = 8, tuple(range(size))

    def free() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    dist.all_reduce(torch.zeros(1, device=device))
    before = free()
    for _ in range(count):
        made = groups([everyone])[everyone]
        dist.all_reduce(torch.zeros(1, device=device), group=made)
    return {"passed": True, "bytes": (before - free()) // count}


SPEED = {"layers": 12, "width": 1024, "heads": 16, "words": 32768}


def speed(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    """Seconds of a step in bfloat16 autocast: plain torch on one rank, DDP, Whale; and predicted against measured."""
    sizes = SPEED if device.type == "cuda" else {"layers": 2, "width": 64, "heads": 4, "words": 256}
    rows, length = (8 * size, 1024) if device.type == "cuda" else (2 * size, 16)
    given = batch(rows, length, sizes["words"])
    mine = {name: x[rank * rows // size : (rank + 1) * rows // size].to(device) for name, x in given.items()}
    found: dict[str, Any] = {"rows": rows, "length": length, **sizes}

    def local(model: nn.Module) -> Callable[[], Any]:
        optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")

        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(**mine)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    model: nn.Module = decoder(device, **sizes)
    found["parameters"] = sum(p.numel() for p in model.parameters())
    if size == 1:
        found["torch"] = _seconds(local(model), device)

    def parallel(**options: Any) -> tuple[ParallelModule, Callable[[], Any]]:
        options |= {"device": device.type, "precision": "bf16"}
        made: ParallelModule = parallelize(decoder(device, **sizes), given, **options)
        optimizer = torch.optim.AdamW(made.parameters(), fused=device.type == "cuda")

        def step() -> None:
            made.train_step(**given)
            optimizer.step()
            optimizer.zero_grad()

        return made, step

    made, step = parallel()
    found["whale"] = _seconds(step, device)
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    advice = made._whale.engine.world.failures.memory_advice
    found["predicted"] = advice() if advice is not None else ""
    if device.type == "cuda":
        del made, step
        found["graphs"] = _seconds(parallel(cuda_graphs=True)[1], device)
    if size > 1:
        found["ddp"] = _seconds(local(nn.parallel.DistributedDataParallel(model)), device)
    flops = 6 * found["parameters"] * rows * length / size
    found["flops_per_second"] = flops / found["whale"]
    return {"passed": True, **found}


def _seconds(step: Callable[[], Any], device: torch.device) -> float:
    """The median of the seconds of steps."""

    def timed() -> float:
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    for _ in range(4):  # graphs are recorded in the third
        timed()
    return median(timed() for _ in range(10))


PARTS: dict[str, Callable[[int, int, torch.device], dict[str, Any]]] = {
    "parity": parity,
    "one queue": parity,
    "copies": copies,
    "waits": waits,
    "failures": failures,
    "graphs": graphs,
    "communicators": communicators,
    "speed": speed,
}


@contextmanager
def _written(path: Path, found: dict[str, Any]) -> Iterator[None]:
    """Write what was found, or the error."""
    try:
        yield
    except BaseException as error:
        found |= {"passed": False, "error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        path.write_text(json.dumps(found, default=str), encoding="utf-8")


def main() -> None:
    """Run one part on this rank."""
    name, folder, device_type = sys.argv[1:]
    warnings.simplefilter("ignore")
    launch = describe(device_type)
    if launch.device.type == "cuda":
        torch.cuda.set_device(launch.device)
    found: dict[str, Any] = {}
    with _written(Path(folder) / f"{name}.{launch.rank}.json", found):
        found |= PARTS[name](launch.rank, launch.size, launch.device)
    sys.stdout.flush()
    os._exit(0)  # a part that failed on purpose has groups that are not destroyed


if __name__ == "__main__":
    main()
