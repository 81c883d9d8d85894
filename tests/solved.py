"""Solve and lower a model for one rank without any process, and count what it would communicate."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import whale
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.ir.cluster import Cluster
from whale.runtime.collectives import Bridge
from whale.strategies import sharding


@dataclass(kw_only=True)
class Solved:
    """Collectives of one micro-batch's graph on rank 0, by name, and the parameters that are stored whole."""

    compilation: Compilation
    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)
    sites: list[tuple[str, str]] = field(default_factory=list)
    whole_matrices: list[str] = field(default_factory=list)

    def stored(self, name: str) -> str:
        """How a parameter is stored on the innermost axis, as ``S(0)``."""
        for stage in self.compilation.stages:
            for value, placements in stage.stored.items():
                if self.compilation.captured.parameters.get(value[0].name) == name:
                    return str(placements[-1])
        raise KeyError(name)


def solve(
    model: nn.Module,
    batch: Any,
    annotations: dict[str, Any],
    *,
    world_size: int = 2,
    cluster: Cluster | None = None,
    device: str = "cpu",
    **options: Any,
) -> Solved:
    """Compile *model* under these annotations and count the collectives of rank 0's first stage graph."""
    whale.annotate(model, annotations)
    compilation = compile_model(
        model.eval(),
        batch,
        cluster or Cluster.homogeneous(world_size),
        Options(**options),
        device=device,
        training=False,
    )
    solved = Solved(compilation=compilation)
    for stage in compilation.stages:
        if 0 not in stage.mesh.ranks:
            continue
        program = compilation.local_programs(stage, 0, None)[0]
        for module in program.bridges:
            if isinstance(module, Bridge):
                if module.conversion.forward_collective:
                    solved.forward[module.conversion.forward_collective] += 1
                if module.conversion.backward_collective:
                    solved.backward[module.conversion.backward_collective] += 1
            else:
                solved.forward[type(module).__name__] += 1
        for value, placements in stage.stored.items():
            name = compilation.captured.parameters.get(value[0].name)
            if name and value[0].meta["val"].dim() > 1 and all(p.kind != "S" for p in placements):
                solved.whole_matrices.append(name)
    return solved


def tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    """A batch of token ids and labels on the meta device."""
    ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


NVLINK = sharding.Prices()
