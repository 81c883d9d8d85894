"""Hand-made pipelines on real ranks against the same model in one process: loss and gradients, for every schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.harness import Ranks
from tests.rows import Shares, chain_of, rows_edge
from whale.ir.check import check_programs
from whale.ir.program import Edge, Reduce, ReduceSpec, StageSpec, project, project_rank
from whale.planner.schedules.orders import schedule_order
from whale.runtime.by_autograd import ByAutograd
from whale.runtime.executor import Executor
from whale.runtime.launch import World, groups
from whale.runtime.messages import CoalescedMessages, Messages, StagedMessages
from whale.runtime.reduce import Bucket, Reducer

WIDTH = 4
SCHEDULES = ["gpipe", "1f1b", "zero_bubble", "greedy"]


def model(num_stages: int, tied: bool = False) -> list[nn.Sequential]:
    """One module for each stage; tied: the last shares the first's weight."""
    torch.manual_seed(0)
    layers: list[nn.Sequential] = [
        nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH), nn.LayerNorm(WIDTH)).double()
        for _ in range(num_stages)
    ]
    if tied:
        layers[-1][0].weight = layers[0][0].weight
    return layers


def batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, WIDTH, dtype=torch.float64), torch.randn(rows, WIDTH, dtype=torch.float64)


def part_of(shares: list[list[Shares]], stage: int, micro_batch: int, rank: int) -> slice:
    """Rows of the global batch that a rank has of a stage's micro-batch."""
    begin = sum(sum(by_rank.values()) for by_rank in shares[stage][:micro_batch])
    for other, rows in shares[stage][micro_batch].items():
        if other == rank:
            return slice(begin, begin + rows)
        begin += rows
    raise KeyError(rank)


class RowStage:
    """A stage that computes its rows; the first reads the batch, the last gives the loss."""

    def __init__(self, index: int, layers: list[nn.Sequential], shares: list[list[Shares]], rank: int) -> None:
        self.index, self.shares, self.rank = index, shares, rank
        self.layer = layers[index]
        self.parameters = tuple(self.layer.parameters())
        self.last = index == len(layers) - 1
        self.x, self.y = batch(sum(sum(by_rank.values()) for by_rank in shares[0]))
        self.outputs = ("loss",) if self.last else (f"h{index}",)
        self.fail_at: int | None = None

    def forward(self, micro_batch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if micro_batch == self.fail_at:
            raise ValueError("the numbers are bad")
        rows = part_of(self.shares, self.index, micro_batch, self.rank)
        hidden = sum(received) if received else self.x[rows]
        hidden = self.layer(hidden)
        if self.last:
            return (((hidden - self.y[rows]) ** 2).sum() / self.y.numel(),)
        return (hidden,)


def local(num_stages: int, rows: int, tied: bool = False, skip: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    layers = model(num_stages, tied)
    hidden, y = batch(rows)
    values: list[Tensor] = []
    for index, layer in enumerate(layers):
        hidden = layer(values[0] + hidden if skip and index == num_stages - 1 else hidden)
        values.append(hidden)
    loss = ((hidden - y) ** 2).sum() / y.numel()
    loss.backward()
    return loss.detach(), named_gradients(layers)


def named_gradients(layers: Sequence[nn.Module]) -> dict[str, Tensor]:
    named = nn.ModuleList(layers).named_parameters(remove_duplicate=False)
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def layout(
    shares: list[list[Shares]], tied: bool, skip: bool
) -> tuple[list[StageSpec], list[Edge], list[ReduceSpec], dict[int, list[tuple[int, str]]]]:
    """Stages, edges, buckets and what is in each bucket, as (stage, parameter name): two for each stage, one tied."""
    stages, edges, _ = chain_of(shares)
    last = len(stages) - 1
    if skip:
        edges.append(replace(rows_edge(0, 0, last, shares), index=len(edges)))
    names = [name for name, _ in model(1)[0].named_parameters()]
    reduces: list[ReduceSpec] = []
    contents: dict[int, list[tuple[int, str]]] = {}

    def add(of: tuple[int, ...], members: list[tuple[int, str]]) -> None:
        ranks = tuple(sorted({rank for stage in of for rank in stages[stage].ranks}))
        contents[len(reduces)] = members
        reduces.append(ReduceSpec(index=len(reduces), ranks=ranks, stages=of))

    for stage in reversed(range(last + 1)):
        own = [name for name in names if not (tied and name == "0.weight" and stage in (0, last))]
        add((stage,), [(stage, name) for name in reversed(own[1:])])
        add((stage,), [(stage, own[0])])
    if tied:
        add((0, last), [(0, "0.weight")])
    return stages, edges, reduces, contents


def make_executor(
    world: World,
    shares: list[list[Shares]],
    name: str,
    tied: bool,
    skip: bool,
    credit: int | None,
    messages: Messages | None = None,
) -> tuple[Executor, list[nn.Module]]:
    stages, edges, reduces, contents = layout(shares, tied, skip)
    order = schedule_order(name, len(stages), len(shares[0]), [frozenset(stage.ranks) for stage in stages])
    check_programs(project(order, stages, edges, reduces), stages, edges, reduces, order=order)
    layers = model(len(stages), tied)
    mine = {stage.index for stage in stages if world.rank in stage.ranks}
    process_groups = groups(reduce.ranks for reduce in reduces)
    buckets = {}
    for reduce in reduces:
        if world.rank in reduce.ranks:
            buckets[reduce.index] = Bucket(
                index=reduce.index,
                parameters=tuple(layers[stage].get_parameter(name) for stage, name in contents[reduce.index]),
                ranks=reduce.ranks,
                stages=frozenset(reduce.stages) & mine,
                group=process_groups.get(reduce.ranks),
                early=len(reduce.stages) == 1,
            )
    program = project_rank(order, stages, edges, reduces, world.rank)
    in_order = [buckets[i.bucket] for i in program if isinstance(i, Reduce)]
    executor = Executor(
        rank=world.rank,
        program=program,
        edges=edges,
        stages={stage: ByAutograd(RowStage(stage, layers, shares, world.rank)) for stage in sorted(mine)},
        reducer=Reducer(in_order, world.failures),
        failures=world.failures,
        credit=credit,
        messages=messages,
    )
    return executor, [layer if stage in mine else nn.Identity() for stage, layer in enumerate(layers)]


def train(
    world: World, shares: list[list[Shares]], name: str, options: Mapping[str, Any], steps: int = 1
) -> tuple[list[Tensor | None], dict[str, Tensor], Tensor | None]:
    tied, skip = options.get("tied", False), options.get("skip", False)
    executor, layers = make_executor(world, shares, name, tied, skip, options.get("credit"))
    evaluated = executor.run(train=False)
    assert not named_gradients(layers)
    losses = [executor.run(train=True) for _ in range(steps)]
    return losses, named_gradients(layers), evaluated


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


def check(ranks: Ranks, shares: list[list[Shares]], name: str, steps: int = 1, **options: Any) -> None:
    rows = sum(sum(by_rank.values()) for by_rank in shares[0])
    loss, gradients = local(len(shares), rows, options.get("tied", False), options.get("skip", False))
    results = ranks.run(train, shares, name, options, steps)
    for position in range(steps):
        parts = [losses[position] for losses, _, _ in results if losses[position] is not None]
        torch.testing.assert_close(sum(parts), loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(sum(e for _, _, e in results if e is not None), loss, rtol=1e-12, atol=0)
    seen = set()
    for _, own, _ in results:
        for key, gradient in own.items():
            scale = gradients[key].abs().max().item()
            torch.testing.assert_close(gradient, steps * gradients[key], rtol=1e-12, atol=1e-12 * scale, msg=key)
            seen.add(key)
    assert seen == gradients.keys()


LAYOUTS: dict[str, list[list[Shares]]] = {
    "one to one": [[{0: 3}] * 4, [{1: 3}] * 4],
    "two to one": [[{0: 3, 1: 1}] * 4, [{2: 4}] * 4],
    "one to three": [[{0: 4}] * 4, [{1: 2, 2: 1, 3: 1}] * 4],
    "three stages, two to one to one": [[{0: 1, 1: 2}] * 4, [{2: 3}] * 4, [{3: 3}] * 4],
    "overlapping sets": [[{0: 4}] * 4, [{1: 1, 2: 2, 3: 1}] * 4, [{3: 1, 0: 3}] * 4],
    "the same set cut differently": [[{0: 2, 1: 1}] * 4, [{0: 1, 1: 2}] * 4],
    "in another order of ranks": [[{0: 2, 1: 1}] * 3, [{1: 1, 0: 2}] * 3],
    "ragged": [[{0: 3, 1: 1}, {0: 3, 1: 1}, {0: 2, 1: 0}], [{2: 2, 3: 2}, {2: 1, 3: 3}, {2: 0, 3: 2}]],
    "an empty micro-batch": [[{0: 2, 1: 1}, {0: 0, 1: 0}], [{1: 3, 2: 0}, {1: 0, 2: 0}]],
    "one rank": [[{0: 2}] * 3, [{0: 2}] * 3],
    "one stage of two": [[{0: 3, 1: 1}] * 2],
}


def everywhere(shares: list[list[Shares]]) -> list[list[Shares]]:
    """Give ranks that have no stage an empty share of the first, so that all four have a program."""
    present = {rank for by_micro_batch in shares for rank in by_micro_batch[0]}
    return [[by_rank | dict.fromkeys(set(range(4)) - present, 0) for by_rank in shares[0]], *shares[1:]]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("case", LAYOUTS)
def test_loss_and_gradients_equal_the_local_models(ranks: Ranks, case: str, name: str) -> None:
    check(ranks, everywhere(LAYOUTS[case]), name)


@pytest.mark.parametrize("name", ["1f1b_deep", "zero_bubble_h2", "zero_bubble_2p"])
def test_schedules_that_run_further_ahead_give_the_local_models_gradients(ranks: Ranks, name: str) -> None:
    check(ranks, everywhere(LAYOUTS["three stages, two to one to one"]), name, tied=True)


@pytest.mark.parametrize("case", ["one to one", "ragged", "overlapping sets"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_weight_on_two_stages_gets_the_sum_of_both(ranks: Ranks, case: str, name: str) -> None:
    check(ranks, everywhere(LAYOUTS[case]), name, tied=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_value_read_by_two_stages_gets_the_sum_of_both_gradients(ranks: Ranks, name: str) -> None:
    check(ranks, LAYOUTS["overlapping sets"], name, skip=True)


@pytest.mark.parametrize("tied", [False, True])
def test_interleaved_stages_of_two_devices(ranks: Ranks, tied: bool) -> None:
    sets: list[Shares] = [{0: 2, 1: 1}, {2: 1, 3: 2}]
    check(ranks, [[sets[stage % 2]] * 4 for stage in range(4)], "interleaved", tied=tied)


@pytest.mark.parametrize("credit", [0, 1, 100])
def test_how_early_receives_are_posted_does_not_matter(ranks: Ranks, credit: int) -> None:
    check(ranks, LAYOUTS["ragged"], "1f1b", credit=credit)


def test_gradients_of_two_steps_add_up_and_are_not_summed_twice(ranks: Ranks) -> None:
    check(ranks, LAYOUTS["overlapping sets"], "1f1b", steps=2, tied=True)


class LateWork:
    """A message of a device: what it receives is there when the work has been waited for, and not before."""

    def __init__(self, sends: bool, tensor: Tensor, peer: int) -> None:
        self.target = None if sends else tensor
        self.tensor = tensor if sends else torch.empty_like(tensor)
        self.work = (dist.isend if sends else dist.irecv)(self.tensor, peer)
        if not sends:
            tensor.fill_(torch.nan)

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert self.work is not None
        self.work.wait()
        if self.target is not None:
            self.target.copy_(self.tensor)
        return True


class OneQueue(nullcontext[None]):
    """A device that runs everything at once; it notes the marks that messages wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = 0
        self.followed: list[int] = []

    def beside(self) -> OneQueue:
        return self

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def follow(self, mark: int) -> None:
        self.followed.append(mark)


def train_late(
    world: World, shares: list[list[Shares]], name: str, tied: bool
) -> tuple[Tensor | None, dict[str, Tensor], list[int], list[int]]:
    """Three steps as on a device; also the messages of each call, and the buffers after each step."""
    queue = OneQueue()
    calls: list[int] = []
    buffers: list[int] = []

    def start_all(messages: Sequence[tuple[bool, Tensor, int]], group: Any) -> list[LateWork]:
        calls.append(len(messages))
        return [LateWork(*message) for message in messages]

    late = CoalescedMessages(torch.device("cpu"), queue, start_all)
    executor, layers = make_executor(world, shares, name, tied, False, 0, late)
    loss = None
    for _ in range(3):
        nn.ModuleList(layers).zero_grad()
        loss = executor.run(train=True)
        buffers.append(len(late.buffers))
    assert not buffers[0] or queue.followed  # memory is used again when its tasks are done
    return loss, named_gradients(layers), calls, buffers


@pytest.mark.parametrize("case", ["overlapping sets", "ragged", "three stages, two to one to one"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_that_start_together_into_kept_memory_give_the_same_gradients(
    ranks: Ranks, case: str, name: str
) -> None:
    shares = everywhere(LAYOUTS[case])
    rows = sum(sum(by_rank.values()) for by_rank in shares[0])
    loss, gradients = local(len(shares), rows, tied=True)
    results = ranks.run(train_late, shares, name, True)
    torch.testing.assert_close(sum(r[0] for r in results if r[0] is not None), loss, rtol=1e-12, atol=0)
    for _, own, _, buffers in results:
        for key, gradient in own.items():
            scale = gradients[key].abs().max().item()
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-12, atol=1e-12 * scale, msg=key)
        assert buffers[0] == buffers[1] == buffers[2]  # memory of the first step serves all later ones
    if case != "ragged":
        assert max(length for result in results for length in result[2]) > 1


def train_staged(world: World, shares: list[list[Shares]]) -> tuple[Tensor | None, dict[str, Tensor]]:
    staged = StagedMessages(torch.device("cpu"))
    executor, layers = make_executor(world, shares, "1f1b", True, False, 0, staged)
    return executor.run(train=True), named_gradients(layers)


def test_messages_through_the_host_give_the_same_gradients(ranks: Ranks) -> None:
    shares = everywhere(LAYOUTS["overlapping sets"])
    loss, gradients = local(3, 16, tied=True)
    results = ranks.run(train_staged, shares)
    torch.testing.assert_close(sum(r[0] for r in results if r[0] is not None), loss, rtol=1e-12, atol=0)
    for _, own in results:
        for key, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-12, atol=1e-12, msg=key)
