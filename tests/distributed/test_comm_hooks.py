"""Communication hooks of DDP: torch's own make the sums that they fit, as they make DDP's."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import whale
from tests.distributed.parity import Worlds
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import refusal
from whale.runtime.launch import World


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


class Net(nn.Module):
    """Matrices that PowerSGD compresses, and vectors that it does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 12))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.body(x).square().mean()
        return loss


def batch(rows: int = 8, seed: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


HOOKS: dict[str, tuple[Any, Any]] = {
    "all-reduce": (lambda: None, default_hooks.allreduce_hook),
    "float16": (lambda: None, default_hooks.fp16_compress_hook),
    "float16 in a group": (lambda: torch.distributed.new_group(), default_hooks.fp16_compress_hook),
    "PowerSGD": (lambda: PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1.0), powerSGD_hook),
    "PowerSGD in float16": (
        lambda: PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1.0),
        default_hooks.fp16_compress_wrapper(powerSGD_hook),
    ),
}


def trained(world: World, kind: str, micro_batches: int) -> tuple[list[float], list[float]]:
    """The losses of Whale's and of DDP's steps with a hook, whose buckets have the same order of parameters."""
    state, hook = HOOKS[kind]
    ours, theirs = Net().double(), Net().double()
    made: Any = whale.parallelize(ours, batch(), device="cpu", micro_batches=micro_batches, timeout_seconds=30)
    made.register_comm_hook(state(), hook)
    ddp = DistributedDataParallel(theirs)
    ddp.register_comm_hook(state(), hook)
    found: tuple[list[float], list[float]] = ([], [])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in (made, ddp)]
    for number in range(8):
        given = batch(seed=number)
        own = given["x"].chunk(world.size)[world.rank]
        loss = ddp(x=own)
        loss.backward()
        whole = torch.tensor(float(loss), dtype=torch.float64)
        torch.distributed.all_reduce(whole)
        found[0].append(made.train_step(**given).item())
        found[1].append(float(whole) / world.size)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", HOOKS)
def test_steps_with_a_hook_are_those_of_ddp_with_it(worlds: Worlds, kind: str, micro_batches: int) -> None:
    for ours, theirs in worlds.run(2, trained, kind, micro_batches):
        bound = {"all-reduce": 1e-12, "PowerSGD": 1e-9}.get(kind, 2e-3)
        assert ours == pytest.approx(theirs, rel=bound)
        assert ours[-1] < 0.9 * ours[0]


def signs(state: None, bucket: Any) -> Any:
    """A mean that is no linear function of the gradients."""
    terms = bucket.buffer().sign().mul_(0.01 / torch.distributed.get_world_size())
    return torch.distributed.all_reduce(terms, async_op=True).get_future().then(lambda future: future.value()[0])


def accumulated(world: World) -> float:
    """The largest difference from DDP's gradients where two steps add to them."""
    made: Any = whale.parallelize(Net().double(), batch(), device="cpu", timeout_seconds=30)
    ddp = DistributedDataParallel(Net().double())
    for model in (made, ddp):
        model.register_comm_hook(None, lambda state, bucket: signs(state, bucket))  # DDP reads annotations
    for number in range(2):
        given = batch(seed=number)
        made.train_step(**given)
        ddp(x=given["x"].chunk(world.size)[world.rank]).backward()
    found = made.full_gradients()
    theirs = {name: p.grad for name, p in ddp.module.named_parameters() if p.grad is not None}
    return max(float((found[name] - gradient).abs().max()) for name, gradient in theirs.items())


def test_hooks_get_accumulated_gradients_as_from_ddp(worlds: Worlds) -> None:
    assert max(worlds.run(2, accumulated)) < 1e-15


class Looks(nn.Module):
    """A table with sparse gradients, which no hook sums, and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.top = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.top(self.table(ids)).square().mean()
        return loss


def of_parts(world: World) -> tuple[list[str], float]:
    """Warnings where a hook fits some of the sums, and the largest error of gradients of two steps together."""
    local, given = Looks().double(), {"ids": torch.arange(8) % 5}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made: Any = whale.parallelize(copy.deepcopy(local), given, device="cpu")
        made.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(2):
        made.train_step(**given)
        local(**given).backward()
    gradients = made.full_gradients()
    error = max(
        float((gradients[n] - p.grad.to_dense()).abs().max()) for n, p in local.named_parameters() if p.grad is not None
    )
    return [str(one.message) for one in said if "communication hook" in str(one.message)], error


def test_other_sums_are_made_as_without_a_hook(worlds: Worlds) -> None:
    found = worlds.run(2, of_parts)
    assert max(error for _, error in found) < 1e-12
    assert any("allreduce_hook makes 1 of 2 sums of gradients" in text for said, _ in found for text in said)


def refused(world: World, case: str) -> str:
    cases: dict[str, dict[str, Any]] = {"zero": {"zero": 1}, "gradient_dtype": {"gradient_dtype": "bf16"}}
    options = cases.get(case, {})
    made: Any = whale.parallelize(Net().double(), batch(), device="cpu", **options)
    if case == "twice":
        made.register_comm_hook(None, default_hooks.allreduce_hook)
    return refusal(lambda: made.register_comm_hook(None, default_hooks.allreduce_hook))


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("zero", r"allreduce_hook of ranks \[0, 1\] fits no sum of gradients"),
        ("gradient_dtype", "in another number type"),
        ("twice", "allreduce_hook is registered already"),
    ],
)
def test_hooks_that_fit_nothing_are_refused(worlds: Worlds, case: str, says: str) -> None:
    for message in worlds.run(2, refused, case):
        assert re.search(says, message), message


def in_part_of_the_ranks(world: World, has_state: bool) -> tuple[str, float]:
    """The refusal on a rank of a hook in a group of the first two of three, and the error of a step; all sum over
    the three too."""
    local, group = Net().double(), torch.distributed.new_group([0, 1])
    model = copy.deepcopy(local)
    first = [whale.cluster([0, 1]), whale.stage(2), whale.replicate()]
    whale.annotate(model, {"body.0": first, "": [whale.cluster([0, 1, 2]), whale.stage(3), whale.replicate()]})
    made: Any = whale.parallelize(model, batch(12), device="cpu", timeout_seconds=30)
    state = PowerSGDState(group, start_powerSGD_iter=100) if has_state else group
    hook = powerSGD_hook if has_state else default_hooks.allreduce_hook
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = refusal(lambda: made.register_comm_hook(state, hook))
    made.train_step(**batch(12))
    local(**batch(12)).backward()
    gradients = made.full_gradients()
    return said, max(
        float((gradients[n] - p.grad).abs().max()) for n, p in local.named_parameters() if p.grad is not None
    )


@pytest.mark.parametrize("has_state", [False, True])
def test_ranks_outside_a_hooks_group_make_their_own_sums(worlds: Worlds, has_state: bool) -> None:
    for said, error in worlds.run(3, in_part_of_the_ranks, has_state):
        assert said == "" and error < 1e-12, said


WRONG: dict[str, Any] = {
    "no future": lambda state, bucket: bucket.buffer(),
    "never done": lambda state, bucket: torch.futures.Future(),
    "another size": lambda state, bucket: done(bucket.buffer()[:3]),
    "no tensor": lambda state, bucket: done("mean"),
    "no function": "PowerSGD",
}


def done(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return future


def wrong(world: World, case: str) -> str:
    made: Any = whale.parallelize(Net().double(), batch(), device="cpu", timeout_seconds=3)

    def step() -> None:
        made.register_comm_hook(None, WRONG[case])
        made.train_step(**batch())

    return refusal(step)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("never done", "has no result"),  # the first that fails in a step, of which all others in the world hear
        ("no future", "returned a Tensor; it returns a torch.futures.Future"),
        ("another size", "result of 3 elements for a bucket of 708"),
        ("no tensor", "result which is a str"),
        ("no function", "is a function of its state and a bucket, not a str"),
    ],
)
def test_hooks_that_are_wrong_are_refused_in_words(worlds: Worlds, case: str, says: str) -> None:
    for message in worlds.run(2, wrong, case):
        assert re.search(says, message), message


def refused_by_some(world: World) -> str:
    model = Net().double()
    first = [whale.cluster([0]), whale.stage(1)]
    whale.annotate(model, {"body.[0-1]": first, "": [whale.cluster([1, 2]), whale.stage(2), whale.replicate()]})
    made: Any = whale.parallelize(model, batch(), device="cpu", timeout_seconds=30)
    said = refusal(lambda: made.register_comm_hook(None, default_hooks.allreduce_hook))
    made.train_step(**batch())  # without a hook
    return said


def test_a_hook_that_one_rank_refuses_is_refused_by_all(worlds: Worlds) -> None:
    first, *others = worlds.run(3, refused_by_some)
    assert first == "another rank refuses the communication hook allreduce_hook; its error says why"
    assert all("fits no sum of gradients" in one for one in others)
