"""A compilation is data: who runs it, or tries it without data, leaves it as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import whale
from tests.small_models import decoder, tokens
from whale import replicate, split
from whale.compile.assembly import assemble
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.compile.rank_step import rank_step
from whale.ir.cluster import Cluster
from whale.predict.peak_memory import brief_peak_memory, peak_memory
from whale.predict.traffic import traffic
from whale.runtime.failure import Failures
from whale.runtime.local_program import LocalProgram
from whale.runtime.random import RNGPosition

RANKS = 4
OF_ALL_MODULES = vars(nn.Module()).keys()


def compiled() -> Compilation:
    """Batch shards and split matrices on four ranks, in two micro-batches."""
    model = decoder(layers=1)
    whale.annotate(model, {"": [replicate(2), split(2)]})
    cluster = Cluster.homogeneous(RANKS)
    return compile_model(model.to("meta"), tokens(), cluster, Options(micro_batches=2), device="cpu", training=True)


def text(program: LocalProgram) -> list[str]:
    """Everything that a program has: its nodes, what they are fed, and the attributes of its modules."""
    found = [f"{program.nothing} {program.depends_on_position} {len(program.bridges)}"]
    for graph in (program.constant, program.step, program.micro_batch):
        found += [f"{n.op} {n.name} {n.target} {n.args} {n.kwargs} {n.meta}" for n in graph.code.graph.nodes]
        found += [f"{kind} {what}" for kind, what in graph.sources]
        for name, module in graph.code.root.named_modules():
            own = {key: value for key, value in vars(module).items() if key not in OF_ALL_MODULES}
            found.append(f"{name} {type(module).__name__} {own}")
    return found


def programs(compilation: Compilation) -> dict[int, list[LocalProgram]]:
    stage = compilation.stages[0]
    return {rank: compilation.local_programs(stage, rank, None) for rank in stage.mesh.ranks}


def texts(compilation: Compilation) -> dict[Any, Any]:
    found: dict[Any, Any] = {rank: [text(program) for program in own] for rank, own in programs(compilation).items()}
    return found | compilation.texts()


def step(compilation: Compilation, rank: int, group: str) -> Any:
    """The programs of *rank*, with a text in place of each group."""
    held = {
        name: nn.Parameter(torch.zeros(part.shape, dtype=part.dtype))
        for name, part in compilation.local_parameters(rank).items()
    }
    return assemble(
        rank_step(compilation, rank, compilation.program(rank), None),
        rank,
        tensors={("parameter", name): parameter for name, parameter in held.items()},
        clock=RNGPosition(0),
        bridge_group=lambda ranks: f"{group} {ranks}",
        reduce_group=lambda ranks: group,
        failures=Failures(rank),
        device=torch.device("cpu"),
    )


def test_nothing_that_runs_or_tries_a_compilation_changes_it() -> None:
    compilation, other = compiled(), compiled()
    before = texts(compilation)
    assert before == texts(other)
    for rank in range(RANKS):
        step(compilation, rank, "one")
        traffic(compilation, rank)
        for device in ("cpu", "cuda"):
            peak_memory(compilation, rank, schedule="1f1b", device=device)
            brief_peak_memory(compilation, rank, schedule="1f1b", device=device)
    assert compilation.check(0, None) == other.check(0, None)
    assert texts(compilation) == before
    bridges = [b for own in programs(compilation).values() for program in own for b in program.bridges]
    assert bridges and all(bridge.group is None for bridge in bridges)


def test_a_compilation_serves_launches_with_other_groups_side_by_side() -> None:
    compilation = compiled()
    steps = {group: step(compilation, 1, group) for group in ("one", "other")}
    for group, found in steps.items():
        bridges = [b for stage in found.stages for program in stage.programs for b in program.bridges]
        assert bridges and all(b.group == f"{group} {tuple(sorted(b.ranks))}" for b in bridges)


def test_programs_of_equal_micro_batches_share_what_runs() -> None:
    found = step(compiled(), 0, "one").stages[0].programs
    assert found[0].micro_batch.code is found[1].micro_batch.code
