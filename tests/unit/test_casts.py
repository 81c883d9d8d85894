"""Casts of parameters to a low precision: one for all micro-batches of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import whale
from tests.small_models import decoder, tokens
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.compile.rank_step import rank_step
from whale.ir.cluster import Cluster
from whale.predict.peak_memory import peak_memory
from whale.runtime.local_program import LocalProgram

MATRICES = ("layers.0.qkv.weight", "layers.0.out.weight", "layers.0.up.weight", "layers.0.down.weight", "head.weight")


def compiled(micro_batches: int, **options: Any) -> Compilation:
    model = decoder(layers=1, width=32).float().to("meta")
    whale.annotate(model, {"": whale.replicate()})
    chosen = Options(micro_batches=micro_batches, precision="bf16", **options)
    return compile_model(
        model, tokens(4 * micro_batches, 6), Cluster.homogeneous(2), chosen, device="cpu", training=True
    )


def programs(compilation: Compilation) -> list[LocalProgram]:
    step = rank_step(compilation, 0, compilation.program(0), None, device=torch.device("cpu"))
    return list(step.stages[0].programs)


def casts_in(program: LocalProgram) -> set[str]:
    """The parameters that the forward of a program casts itself, those of matrices."""
    assert program.derivative is not None
    graph, sources = program.derivative.forward.graph, program.micro_batch.sources
    found = set()
    for (kind, what), node in zip(sources, graph.find_nodes(op="placeholder"), strict=True):
        if kind == "parameter" and any(user.target is torch.ops.aten._to_copy.default for user in node.users):
            found.add(what)
    return found & set(MATRICES)


def given_to(program: LocalProgram) -> set[str]:
    return {what[0] for kind, what in program.micro_batch.sources if kind == "cast"}


def test_micro_batches_share_the_casts_that_they_keep() -> None:
    alone, first, *_ = (*programs(compiled(1)), *programs(compiled(4)))
    assert casts_in(alone) == set(MATRICES) and not given_to(alone)
    assert not casts_in(first) and given_to(first) == set(MATRICES)


def test_a_backward_that_casts_again_keeps_no_copy() -> None:
    for program in programs(compiled(4, recompute="full")):
        assert "layers.0.up.weight" not in given_to(program)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_a_micro_batch_keeps_less_by_the_bytes_of_the_casts(micro_batches: int) -> None:
    model = decoder(layers=1, width=32)
    num_bytes = 2 * sum(dict(model.named_parameters())[name].numel() for name in MATRICES)
    alone, several = (peak_memory(compiled(count), 0, schedule="1f1b").tasks[0].kept for count in (1, micro_batches))
    assert alone - several == num_bytes
