"""Compiling and checking for a thousand ranks in one process: in work that seconds suffice for, without parameters.

Bounds are in function calls, a million to some tenths of a second; `benchmarks/lowering_175b.py` has the seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.work import counted_calls
from whale.compile.compilation import Compilation
from whale.errors import ScheduleError
from whale.ir.check import CollectiveCall
from whale.runtime.random import RNGPosition
from whale.strategies.dry_run import StageCalls, TaskCalls, check_stage, stage_calls

RANKS = 1024


@cache
def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "lowering_175b.py"
    spec = importlib.util.spec_from_file_location("lowering_175b", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def large() -> tuple[Compilation, int]:
    """24 layers on 8 stages of 16 replicas of 8 ranks, and the function calls it took."""
    sizes = {"layers": 24, "hidden": 1024, "heads": 16, "vocabulary": 51200, "length": 1024}
    model = benchmark().annotated(8, 16, 8, **sizes)
    return counted_calls(lambda: benchmark().compiled(model, RANKS, 16 * 16, 1024, 16))


@pytest.fixture
def compilation() -> Iterator[Compilation]:
    found = large()[0]
    found._lowered.clear()
    yield found
    found._lowered.clear()


def calls_of(compilation: Compilation, stage: int, rank: int = 0) -> StageCalls:
    return stage_calls(
        compilation.captured,
        compilation.stages[stage],
        compilation.rows,
        lambda s, r: compilation.local_programs(s, r, RNGPosition(0)),
        rank,
    )


def test_a_thousand_ranks_are_compiled_with_little_work() -> None:
    compilation, calls = large()
    assert len(compilation.stages) == 8 and {len(s.mesh.ranks) for s in compilation.stages} == {128}
    assert calls < 8_000_000


def test_programs_and_collectives_of_a_thousand_ranks_are_proved_with_little_work(compilation: Compilation) -> None:
    text, calls = counted_calls(lambda: compilation.check(77, RNGPosition(0)))
    assert calls < 25_000_000
    assert text.count("all_reduce") > 8 * 6 and "stage 7" in text


def test_every_rank_of_a_stage_has_its_own_lines_of_the_mesh(compilation: Compilation) -> None:
    calls = calls_of(compilation, 1)[0]
    assert set(calls) == set(range(128, 256))
    assert {call.ranks for call in calls[130].forward} == {tuple(range(128, 136))}
    assert {call.ranks for call in calls[255].backward} == {tuple(range(248, 256))}
    assert len(calls[130].forward) >= 6 and len(calls[130].backward) >= 6  # 3 layers, attention and perceptron


def test_backward_comes_in_the_reverse_of_forward(compilation: Compilation) -> None:
    task = calls_of(compilation, 3)[0][400]
    nodes = [call.node for call in task.backward]
    assert len(set(nodes)) == len(nodes)
    positions = [int(node.rpartition("_")[2]) for node in nodes]  # the order in which bridges were made
    assert positions == sorted(positions, reverse=True)


def mutated(calls: StageCalls, rank: int, change: str) -> StageCalls:
    """The calls of a stage with those of one rank changed."""
    task = calls[0][rank]
    forward = list(task.forward)
    if change == "dropped":
        del forward[2]
    elif change == "swapped":
        forward[1], forward[2] = forward[2], forward[1]
    elif change == "shape":
        forward[1] = forward[1]._replace(shapes=((7,),))
    elif change == "type":
        forward[1] = forward[1]._replace(dtype="bfloat16")
    elif change == "group":
        forward[1] = forward[1]._replace(ranks=(*forward[1].ranks[:-1], max(forward[1].ranks) + 8))
    elif change == "extra":
        forward.append(CollectiveCall("invented", "all_reduce", forward[0].ranks, "float32", ((1,),)))
    return {0: {**calls[0], rank: TaskCalls(forward=tuple(forward), backward=task.backward)}}


@pytest.mark.parametrize("change", ["dropped", "swapped", "shape", "type", "group", "extra"])
def test_a_rank_that_would_call_something_else_is_named_with_its_node(compilation: Compilation, change: str) -> None:
    calls = calls_of(compilation, 2)
    check_stage(2, calls)
    wrong = mutated(calls, 300, change)
    with pytest.raises(ScheduleError) as caught:
        check_stage(2, wrong)
    message = str(caught.value)
    nodes = [c.node for c in (*calls[0][300].forward, *wrong[0][300].forward)]
    assert "stage 2, forward of micro-batch 0" in message and "rank 300" in message
    assert any(node in message for node in nodes)
