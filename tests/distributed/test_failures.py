"""Errors of all ranks when one of them fails, dies, hangs or omits something: they name that rank, in time."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import whale
from tests.distributed.harness import Outcome, Ranks
from tests.distributed.test_executor import RowStage, make_executor
from tests.rows import Shares
from tests.small_models import decoder, tokens
from whale.runtime.by_autograd import ByAutograd
from whale.runtime.executor import Executor
from whale.runtime.launch import World, groups
from whale.runtime.reduce import Reducer

CHAIN: list[list[Shares]] = [[{0: 2}] * 4, [{1: 2}] * 4, [{2: 2}] * 4]
TIMEOUT_SECONDS = 3.0


def fail_in_forward(world: World, rank: int, name: str, stay: bool) -> None:
    """Raise in a forward of one rank's stage; with ``stay`` its process lives on, as in a notebook."""
    executor, _ = make_executor(world, CHAIN, name, tied=False, skip=False, credit=None)
    executor.run(train=True)
    for stage in row_stages(executor).values():
        stage.fail_at = 2 if world.rank == rank else None
    try:
        executor.run(train=True)
    except RuntimeError:
        if stay and world.rank == rank:
            time.sleep(TIMEOUT_SECONDS + 4)
        raise


def row_stages(executor: Executor) -> dict[int, RowStage]:
    found = {}
    for index, stage in executor.stages.items():
        assert isinstance(stage, ByAutograd) and isinstance(stage.stage, RowStage)
        found[index] = stage.stage
    return found


class BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ArithmeticError("no gradient for this")


def fail_in_backward(world: World, name: str) -> None:
    executor, _ = make_executor(world, CHAIN, name, tied=False, skip=False, credit=None)
    if world.rank == 1:
        row_stages(executor)[1].layer.register_forward_hook(lambda module, inputs, output: BrokenBackward.apply(output))
    executor.run(train=True)


def stop(world: World, how: str) -> None:
    """Stop rank 1 in the middle of its second step."""
    executor, _ = make_executor(world, CHAIN, "1f1b", tied=False, skip=False, credit=None)
    executor.run(train=True)

    def halt(*ignored: object) -> None:
        if how == "hang":
            time.sleep(TIMEOUT_SECONDS + 4)
        os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == 1:
        row_stages(executor)[1].layer.register_forward_hook(halt)
    executor.run(train=True)


def skip_a_bucket(world: World) -> None:
    """Let rank 1 leave out the sum of its gradients, and wait."""
    shares: list[list[Shares]] = [[{0: 1, 1: 1, 2: 1}] * 2]
    executor, _ = make_executor(world, shares, "1f1b", tied=False, skip=False, credit=None)
    if world.rank == 1:
        assert executor.reducer is not None
        executor.reducer.finish = lambda: time.sleep(TIMEOUT_SECONDS + 4)  # type: ignore[method-assign]
        executor.reducer._start = lambda *ignored: None  # type: ignore[method-assign]
    executor.run(train=True)


def run(function: Callable[..., object], *arguments: object) -> list[Outcome]:
    with Ranks(3, TIMEOUT_SECONDS) as ranks:
        return ranks.outcomes(function, *arguments, timeout=60)


@pytest.mark.parametrize(("rank", "name"), [(0, "1f1b"), (1, "zero_bubble"), (2, "gpipe")])
def test_all_ranks_name_the_rank_the_task_and_the_reason(rank: int, name: str) -> None:
    outcomes = run(fail_in_forward, rank, name, False)
    reason = f"rank {rank} failed in task {rank}F2 (stage {rank}, micro-batch 2): ValueError: the numbers are bad"
    assert outcomes[rank].error == f"WorkerError: {reason}"
    for other, outcome in enumerate(outcomes):
        assert reason in outcome.error, f"rank {other}: {outcome.traceback}"


def test_a_failed_rank_whose_process_stays_is_named_within_the_timeout() -> None:
    outcomes = run(fail_in_forward, 1, "1f1b", True)
    for outcome in outcomes:
        assert "rank 1 failed in task 1F2 (stage 1, micro-batch 2): ValueError: the numbers are bad" in outcome.error
    assert abs(outcomes[0].seconds - outcomes[2].seconds) < TIMEOUT_SECONDS + 2


@pytest.mark.parametrize(("name", "task"), [("1f1b", "1B0"), ("zero_bubble", "1I0")])
def test_a_failing_backward_is_named(name: str, task: str) -> None:
    for outcome in run(fail_in_backward, name):
        assert f"rank 1 failed in task {task} (stage 1, micro-batch 0): " in outcome.error
        assert "no gradient for this" in outcome.error


def test_a_killed_rank_is_named_by_the_ranks_that_waited_for_it() -> None:
    outcomes = run(stop, "kill")
    assert outcomes[1].error == "process ended with exit code -9"
    for rank in (0, 2):
        assert outcomes[rank].error.startswith("WorkerError: ")
        assert "rank 1 did not come" in outcomes[rank].error


def test_a_rank_that_hangs_is_named_with_value_and_micro_batch_after_the_timeout() -> None:
    outcomes = run(stop, "hang")
    for rank in (0, 2):
        assert "rank 1 did not come within 3 s" in outcomes[rank].error
        assert re.search("'h[01]' of micro-batch [0-3] (to|from) rank 1", outcomes[rank].error)
        assert outcomes[rank].seconds < outcomes[1].seconds


def test_a_skipped_collective_names_the_rank_that_did_not_come() -> None:
    with Ranks(4, TIMEOUT_SECONDS) as ranks:
        outcomes = ranks.outcomes(skip_on_three, timeout=60)
    expected = "the sum of gradient bucket 0 over ranks [0, 1, 2], and rank 1 did not come within 3 s"
    assert expected in outcomes[0].error
    assert expected in outcomes[2].error


def skip_on_three(world: World) -> None:
    """Use three of four ranks, so that the bucket's group is not all of them; the fourth only makes groups."""
    if world.rank == 3:
        groups([(0, 1, 2)])
    else:
        skip_a_bucket(world)


def sums_in_a_subgroup(world: World) -> list[float]:
    """Make groups whose ranks are given in any order, and twice, and sum over each."""
    made = groups([(1, 0), (0, 1), (2,), (2, 0, 1)])
    assert list(made) == [(0, 1), (0, 1, 2)]
    result = []
    for ranks, group in made.items():
        value = torch.tensor(float(world.rank + 1))
        if world.rank in ranks:
            dist.all_reduce(value, group=group)
        result.append(value.item())
    return result


def test_groups_are_the_same_on_all_ranks() -> None:
    with Ranks(3) as ranks:
        assert ranks.run(sums_in_a_subgroup) == [[3.0, 6.0], [3.0, 6.0], [3.0, 6.0]]


def test_a_reducer_of_other_buckets_than_the_programs_is_refused() -> None:
    with Ranks(1) as ranks:
        assert "[(0, True), (1, True)] in its program, but was given []" in ranks.outcomes(other_buckets)[0].error


def other_buckets(world: World) -> None:
    from whale.runtime.executor import Executor

    executor, _ = make_executor(world, [[{0: 2}]], "1f1b", tied=False, skip=False, credit=None)
    Executor(
        rank=0,
        program=executor.programs[True],
        edges=(),
        stages=executor.stages,
        reducer=Reducer([], world.failures),
    )


def run_out_of_memory(world: World) -> None:
    """Train a model whose second stage finds no memory in its second step."""
    model = decoder(layers=2)
    whale.annotate(model, {"layers.0": whale.stage(), "layers.1": whale.stage()})
    made = whale.parallelize(model, tokens(), device="cpu", micro_batches=2, timeout_seconds=20)
    made.train_step(**tokens())
    if world.rank == 1:
        steps = made._whale.engine.steps
        stage: Any = steps._steps[next(iter(steps._steps))].stages[0]

        def allocate(*ignored: object) -> None:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.68 GiB of which 1.20 "
                "GiB is free. See documentation for Memory Management (https://pytorch.org)"
            )

        stage.forward_to_train = allocate
    made.train_step(**tokens())


def test_a_rank_out_of_memory_says_where_what_was_predicted_and_what_would_help() -> None:
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(run_out_of_memory, timeout=100)
    for outcome in outcomes:
        assert (
            "rank 1 is out of memory in task 1F0 (stage 1, micro-batch 0): CUDA out of memory. Tried" in outcome.error
        )
        assert "See documentation" not in outcome.error
        said = outcome.error.partition("; ")[2]
        assert re.match(r"predicted were [\d.]+ [KM]iB: parameters [\d.]+ [KM]iB, gradients", said), said
        assert (
            'recompute="selective", or offload="state", or micro_batches=4, or more devices for stage 1'
            in outcome.error
        )
    assert abs(outcomes[0].seconds - outcomes[1].seconds) < TIMEOUT_SECONDS + 5
