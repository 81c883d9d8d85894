"""Time and memory to compile GPT-3 175B in one process for one of 1,024 ranks.

    python benchmarks/lowering_175b.py                       # 96 layers, 8 stages x 16 replicas x 8-way split
    python benchmarks/lowering_175b.py --layers 24 --profile lowering.prof

The model is on the meta device and there is no process group: everything that a rank does before it meets the others,
in seconds of the process's own time, with the peak of the resident set. The last line proves the programs and the
collectives of all ranks.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

import whale
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.ir.cluster import Cluster
from whale.runtime.random import RNGPosition


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Part(nn.Module):
    """One pipeline stage: some blocks, before them the embedding or after them the head."""

    def __init__(
        self, layers: int, hidden: int, heads: int, vocabulary: int, length: int, first: bool, last: bool
    ) -> None:
        super().__init__()
        if first:
            self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        if last:
            self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


class GPT(nn.Module):
    def __init__(self, stages: int, layers: int, hidden: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        per = layers // stages
        self.parts = nn.ModuleList(
            Part(per, hidden, heads, vocabulary, length, i == 0, i == stages - 1) for i in range(stages)
        )

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = tokens
        for part in self.parts:
            x = part(x)
        return functional.cross_entropy(x.flatten(0, 1), labels.flatten())


def annotated(stages: int, replicas: int, degree: int, **sizes: int) -> GPT:
    with torch.device("meta"):
        model = GPT(stages, **sizes)
    nest = [whale.replicate(replicas), whale.split(degree)]
    whale.annotate(model, {f"parts.{i}": [whale.stage(), *nest] for i in range(stages)})
    return model


def compiled(model: nn.Module, ranks: int, rows: int, length: int, micro_batches: int) -> Compilation:
    tokens = torch.empty(rows, length, dtype=torch.long, device="meta")
    batch = {"tokens": tokens, "labels": tokens}
    options = Options(micro_batches=micro_batches)
    return compile_model(model, batch, Cluster.homogeneous(ranks), options, device="cpu", training=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 96, "hidden": 12288, "heads": 96, "vocabulary": 51200, "length": 2048}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in {"stages": 8, "replicas": 16, "degree": 8, "micro-batches": 16, "rank": 77}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--profile", help="write a cProfile file")
    given = parser.parse_args()
    sizes = {k: getattr(given, k) for k in ("layers", "hidden", "heads", "vocabulary", "length")}
    ranks = given.stages * given.replicas * given.degree
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        begin = time.process_time()
        yield
        seconds[what] = round(time.process_time() - begin, 2)
        print(f"{what:28} {seconds[what]:8.2f} CPU s, peak {peak():.2f} GB", flush=True)

    profile = cProfile.Profile()
    if given.profile:
        profile.enable()
    with timed("build on the meta device"):
        model = annotated(given.stages, given.replicas, given.degree, **sizes)
    with timed("compile"):
        rows = given.replicas * given.micro_batches
        compilation = compiled(model, ranks, rows, given.length, given.micro_batches)
    with timed("lower one rank"):
        for stage in compilation.stages:
            if given.rank in stage.mesh.ranks:
                compilation.local_programs(stage, given.rank, RNGPosition(0))
        compilation.program(given.rank)
        compilation.shards()
    total = sum(seconds.values())
    with timed("check all ranks"):
        compilation.check(given.rank, RNGPosition(0))
    profile.disable()
    if given.profile:
        profile.dump_stats(given.profile)
    found = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "ranks": ranks,
        "nodes": len(compilation.captured.graph.nodes),
    }
    print(json.dumps({**found, "one_rank_seconds": round(total, 2), "peak_gb": round(peak(), 2), "seconds": seconds}))


def peak() -> float:
    """Peak resident set in GB; ru_maxrss is in KiB on Linux and in bytes on macOS."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


if __name__ == "__main__":
    main()
