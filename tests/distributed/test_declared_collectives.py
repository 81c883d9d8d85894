"""A step makes exactly the collectives that were declared for it before: the same, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import whale
from tests.distributed import spatial
from tests.distributed.harness import Ranks
from tests.distributed.test_meta_init import Net, bert, gpt2, images, tokens
from whale.ir.check import CollectiveCall
from whale.ir.program import Compute
from whale.runtime import collectives
from whale.runtime.launch import World
from whale.strategies.dry_run import stage_calls

SIZE = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(SIZE) as started:
        yield started


class Wide(nn.Module):
    """Shares are uneven: 6 hidden units on 4 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.down(torch.relu(self.up(x))), y)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], Callable[[], Any], int]] = {
    "gpt2 tp": (gpt2, tokens, whale.split, 1),
    "gpt2 dp x tp": (gpt2, tokens, lambda: [whale.replicate(2), whale.split(2)], 2),
    "bert dp x tp": (bert, tokens, lambda: [whale.replicate(2), whale.split(2)], 1),
    "uneven tp": (Wide, lambda: {"x": torch.zeros(4, 5), "y": torch.arange(4)}, whale.split, 1),
    "batch statistics": (Net, images, whale.replicate, 1),
    "halos": (lambda: spatial.windows()[0], lambda: spatial.windows()[1], lambda: whale.split(dim=2), 1),
}

Seen = list[tuple[str, tuple[int, ...], str, int]]


class Watch:
    """Notes the collectives that reach torch on the groups inside of stages: name, ranks, type, number of elements."""

    def __init__(self, groups: dict[Any, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups, self.seen = groups, []  # type: Any, Seen
        for owner, name, op, tensor in (
            (dist, "all_reduce", "all_reduce", 0),
            (collectives, "gather_single", "all_gather", 1),
            (collectives, "reduce_scatter_single", "reduce_scatter", 0),
            (dist, "reduce_scatter", "reduce_scatter", 0),
            (dist, "all_to_all_single", "all_to_all", 1),
        ):
            monkeypatch.setattr(owner, name, self.watched(getattr(owner, name), op, tensor))

    def watched(self, call: Callable[..., Any], op: str, tensor: int) -> Callable[..., Any]:
        def watch(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            if group in self.groups:
                x = args[tensor]
                self.seen.append((op, self.groups[group], str(x.dtype).removeprefix("torch."), x.numel()))
            return call(*args, **kwargs)

        return watch


def expected(call: CollectiveCall, rank: int) -> tuple[str, tuple[int, ...], str, int]:
    sizes = [prod(shape) for shape in call.shapes]
    index = call.ranks.index(rank)
    number = {"all_reduce": sizes[0], "all_gather": max(sizes), "reduce_scatter": sizes[index % len(sizes)]}
    return call.op, tuple(sorted(call.ranks)), call.dtype, number.get(call.op, -1)


def compared(world: World, case: str) -> tuple[Seen, Seen]:
    build, batch, strategy, micro_batches = CASES[case]
    torch.manual_seed(0)
    model = build()
    whale.annotate(model, {"": strategy()})
    parallel = whale.parallelize(model, batch(), device="cpu", micro_batches=micro_batches)
    builder: Any = parallel._whale.engine.source.__self__  # type: ignore[attr-defined]
    compilation = builder.first
    stage = compilation.stages[0]
    calls = stage_calls(
        compilation.captured,
        stage,
        compilation.rows,
        lambda s, r: compilation.local_programs(s, r, builder.clock),
        world.rank,
    )
    declared: Seen = []
    for task in compilation.program(world.rank):
        if isinstance(task, Compute) and calls:
            own = calls[0][world.rank]
            declared += [expected(c, world.rank) for c in (own.forward if task.kind == "F" else own.backward)]
    with pytest.MonkeyPatch.context() as patch:
        inside = {group: one.ranks for one, group in builder.groups.items() if one.purpose == "inside stages"}
        watch = Watch(inside, patch)
        parallel.train_step(**batch())
    made = [(op, ranks, kind, -1 if op == "all_to_all" else number) for op, ranks, kind, number in watch.seen]
    return declared, made


@pytest.mark.parametrize("case", list(CASES))
def test_a_step_calls_what_was_declared(ranks: Ranks, case: str) -> None:
    for declared, made in ranks.run(compared, case, timeout=110):
        assert made == declared
        assert len(made) > 0
