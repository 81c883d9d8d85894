"""Gains of hybrid over data parallelism: the annotated examples on two ranks, forward and backward, relative to
PyTorch's DistributedDataParallel of the same model.

Bytes are what a rank receives in a step. *Least* is what any implementation must move: of data parallelism the sum of
all gradients; of a hybrid the sum of those that are replicated, and what its rows exchange with the part that is cut.
*Declared* is what the compiled step says, each collective as a ring does it. *Counted* is what the kernel has counted
on the process's own connections. Batch norm sees the whole batch in Whale and its half in DistributedDataParallel. The
two ranks are linked by the machine's loopback, so ratios of time are those of a fast network: on slower ones hybrids
gain more.
"""

from __future__ import annotations

import copy
import os
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from harness import arguments, on_two_ranks, report, side_by_side, table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import whale
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.ir.cluster import Cluster
from whale.predict.traffic import traffic

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import classification_100k
import moe

RECEIVED_BYTES = 128
"""Offset of the 64-bit ``tcpi_bytes_received`` in Linux's ``struct tcp_info`` (include/uapi/linux/tcp.h)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An example at a size that is worth measuring. ``exchanged`` are the bytes that a hybrid must move besides the
    gradients of parameters outside of ``cut``."""

    name: str
    build: Callable[[], nn.Module]
    batch: dict[str, Tensor]
    cut: Callable[[str], bool]
    exchanged: float


def classification(classes: int = 100_000, rows: int = 16, features: int = 2048) -> Case:
    return Case(
        name=f"classification_100k.py: ResNet-50, {classes:,} classes, {rows} images of 64 x 64",
        build=lambda: classification_100k.build(50, classes),
        batch=classification_100k.make_batch(rows, 64, classes),
        cut=lambda name: name.startswith("head"),
        exchanged=2 * 0.5 * rows * features * 4,  # features are gathered, and their gradients reduced and scattered
    )


def experts(layers: int = 4, hidden: int = 256, count: int = 32, rows: int = 8, length: int = 128) -> Case:
    sizes = {"vocabulary": 1024, "layers": layers, "hidden": hidden, "experts": count, "inner": 4 * hidden}
    slots = count * -(-3 * length // count)
    return Case(
        name=f"moe.py: {layers} layers of {count} experts, {rows} x {length} tokens",
        build=lambda: moe.build(**sizes, length=length),
        batch=next(moe.make_batches(1, rows, length, 1024)),
        cut=lambda name: ".experts." in name,
        exchanged=layers * 4 * 0.5 * rows / 2 * slots * hidden * 4,  # to the experts and back, forward and backward
    )


CASES = {"classification": classification, "moe": experts}
HEAD = ("case", "DDP", "hybrid", "DDP / hybrid", "the same of processor time")
BYTES_HEAD = ("case", "", "least", "declared", "counted")


def received() -> int:
    """Bytes that the kernel has received on the TCP connections of this process."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(entry)))
        except OSError:  # no socket, or closed meanwhile
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                counted = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED_BYTES + 8)
                total += struct.unpack_from("=Q", counted, RECEIVED_BYTES)[0]
    return total


def counted(step: Callable[[], object], repeats: int = 3) -> float:
    """Bytes that this rank receives in a step."""
    dist.barrier()
    before = received()
    for _ in range(repeats):
        step()
    dist.barrier()
    return (received() - before) / repeats


def declared(case: Case) -> float:
    """Bytes that the compiled step of the first rank sends, which on two ranks is what it receives."""
    with torch.device("meta"):
        model = case.build()
    options = Options()
    compilation = compile_model(model, case.batch, Cluster.homogeneous(2), options, device="cpu", training=True)
    return sum(message.sent_bytes for message in traffic(compilation, 0))


def measure(case: Case, repeats: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    torch.manual_seed(0)
    local = case.build()
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in local.named_parameters()}
    hybrid = whale.parallelize(copy.deepcopy(local), case.batch, device="cpu")
    plain = DistributedDataParallel(local)
    rank, half = dist.get_rank(), len(next(iter(case.batch.values()))) // 2
    part = {name: tensor[rank * half : (rank + 1) * half] for name, tensor in case.batch.items()}

    def hybrid_step() -> None:
        hybrid.zero_grad()
        hybrid.train_step(**case.batch)

    def plain_step() -> None:
        plain.zero_grad()
        plain(**part).backward()

    row = side_by_side(case.name, hybrid_step, plain_step, repeats=repeats, target=1.0)
    seconds = (f"{row.torch * 1e3:.0f} ms", f"{row.whale * 1e3:.0f} ms", f"{1 / row.ratio:.2f}")
    assert row.processor_ratio is not None
    least = sum(size for name, size in sizes.items() if not case.cut(name)) + case.exchanged
    numbers = {
        "DDP": (mebibytes(sum(sizes.values())), "", mebibytes(counted(plain_step))),
        "hybrid": (mebibytes(least), mebibytes(declared(case)), mebibytes(counted(hybrid_step))),
    }
    rows = [(case.name, side, *found) for side, found in numbers.items()]
    return (case.name, *seconds, f"{1 / row.processor_ratio:.2f}"), rows


def mebibytes(number: float) -> str:
    return f"{number / 2**20:.1f} MiB"


def main() -> None:
    options = arguments("hybrids against DistributedDataParallel", repeats=8)
    on_two_ranks()
    measured = [measure(case(), options.repeats) for name, case in CASES.items() if options.only in name]
    times = table(HEAD, [row for row, _ in measured])
    sizes = table(BYTES_HEAD, [row for _, rows in measured for row in rows])
    report("hybrid_examples", options, f"{times}\n\n{sizes}")


if __name__ == "__main__":
    main()
