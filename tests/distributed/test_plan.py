"""Plans as files decide what runs: uneven shares of rows and of units, orders of ranks, annotations of the plan."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from math import prod

import pytest
import torch

import whale
from tests.distributed.parity import UNEVEN_BOUND, Setup, Worlds, local_step, relative_errors
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.largest import largest
from tests.small_models import decoder, tokens
from whale.ir.plan import Plan
from whale.runtime.launch import World


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def run(world: World, text: str) -> tuple[float, dict[str, tuple[int, ...]], bool]:
    """The worst error of a step by plan of a decoder without annotations, and the shapes that lie here."""
    model, batch = decoder(layers=2, heads=3, width=12), tokens()
    loss, gradients, _ = local_step(model, batch, Setup())
    module = whale.parallelize(model, batch, plan=Plan.parse(text), device="cpu")
    found = module.train_step(**batch)
    errors = relative_errors(module.full_gradients(), gradients)
    untouched = not any("_whale_scopes" in m.__dict__ for m in model.modules())
    worst = largest(float((found - loss).abs() / loss), *errors.values())
    return worst, {name: tuple(p.shape) for name, p in module.named_parameters()}, untouched


CASES: dict[str, tuple[int, str]] = {
    "rows in unlike shares": (
        2,
        """{"world_size": 2, "batch": 8, "annotations": {"": "replicate()"}, "stages": [
           {"ranks": [0, 1], "axes": [{"name": "replicate", "size": 2, "role": "replicate", "shares": [5, 3]}]}]}""",
    ),
    "heads in unlike shares": (
        2,
        """{"world_size": 2, "batch": 8, "micro_batches": 2, "annotations": {"": "split()"}, "stages": [
           {"ranks": [0, 1], "axes": [{"name": "split", "size": 2, "role": "split", "shares": [1, 2]}]}]}""",
    ),
    "a rank without rows beside a stage on the other order of ranks": (
        3,
        """{"world_size": 3, "batch": 8, "micro_batches": 2, "schedule": "gpipe",
           "annotations": {"layers.0": "stage()", "layers.1": ["stage()", "replicate()"]}, "stages": [
           {"ranks": [2], "axes": []},
           {"ranks": [0, 1], "axes": [{"name": "replicate", "size": 2, "role": "replicate", "shares": [4, 0]}]}]}""",
    ),
    "a last micro-batch that is not full": (
        3,
        """{"world_size": 3, "batch": 8, "micro_batches": 3,
           "annotations": {"layers.0": ["stage()", "replicate()"], "layers.1": "stage()"}, "stages": [
           {"ranks": [0, 1], "axes": [{"name": "replicate", "size": 2, "role": "replicate", "shares": [2, 1]}]},
           {"ranks": [2], "axes": []}]}""",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_by_plan_is_the_local_step(worlds: Worlds, name: str) -> None:
    size, text = CASES[name]
    found = worlds.run(size, run, text)
    for worst, _, untouched in found:
        assert worst <= UNEVEN_BOUND
        assert untouched
    if name == "heads in unlike shares":
        less, more = (prod(shapes["layers.0.down.weight"]) for _, shapes, _ in found)
        assert 2 * less == more == 192  # along whichever dim the solver cuts


def train_with_an_idle_rank(world: World) -> tuple[list[float], list[str], dict[str, tuple[int, ...]]]:
    """Relative errors of the losses, of the gradients and of the state of a usual script, what it is warned of, and the
    shapes that lie here."""
    text = """{"world_size": 3, "batch": 8, "annotations": {"": "replicate()"}, "stages": [
           {"ranks": [0, 2], "axes": [{"name": "replicate", "size": 2, "role": "replicate", "shares": [5, 3]}]}]}"""
    model, batch = decoder(layers=2), tokens()
    local = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = whale.parallelize(model, batch, plan=Plan.parse(text), device="cpu")
    made = [torch.optim.AdamW(either.parameters(), lr=1e-3) for either in (local, module)]
    errors = []
    for _ in range(3):
        expected, found = local(**batch), module.train_step(**batch)
        expected.backward()
        errors.append(float((found - expected).abs() / expected))
        gradients = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
        errors += relative_errors(module.full_gradients(), gradients).values()
        torch.nn.utils.clip_grad_norm_(local.parameters(), 0.1)
        module.clip_grad_norm_(0.1)
        for either in (local, module):
            torch.nn.utils.clip_grad_value_(either.parameters(), 1e-3)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    assert set(module.state_dict()) == {name for name in local.state_dict() if world.rank != 1}
    saved = copy.deepcopy({"model": module.state_dict(), "optimizer": made[1].state_dict()})
    state = module.full_state_dict()
    module.load_full_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert not any(module.load_state_dict(saved["model"]))
    made[1].load_state_dict(saved["optimizer"])
    errors += relative_errors(module.full_state_dict(), local.state_dict()).values()
    module.load_full_state_dict(state)
    expected, found = local(**batch), module.eval_step(**batch)
    errors.append(float((found - expected).abs() / expected))
    return errors, [str(one.message) for one in caught], {n: tuple(p.shape) for n, p in module.named_parameters()}


def test_the_usual_script_runs_on_a_rank_that_the_plan_leaves_idle(worlds: Worlds) -> None:
    found = worlds.run(3, train_with_an_idle_rank)
    for rank, (errors, said, shapes) in enumerate(found):
        assert max(errors) <= UNEVEN_BOUND
        assert ("ranks [1] have no work: the plan leaves them out" in said) == (rank == 0)
        assert (sum(map(prod, shapes.values())) == 0) == (rank == 1) == (len(shapes) == 1)


def losses_in_float32(world: World) -> list[torch.Tensor]:
    """Losses of a step and of an evaluation by a plan with a rank before the loss, one that computes it and one
    idle."""
    text = """{"world_size": 3, "batch": 8, "micro_batches": 2,
           "annotations": {"layers.0": "stage()", "layers.1": "stage()"}, "stages": [
           {"ranks": [0], "axes": []}, {"ranks": [2], "axes": []}]}"""
    module = whale.parallelize(decoder(layers=2).float(), tokens(), plan=Plan.parse(text), device="cpu")
    return [module.train_step(**tokens()).detach(), module.eval_step(**tokens())]


def test_the_loss_is_one_number_of_the_models_type_on_every_rank(worlds: Worlds) -> None:
    for losses in zip(*worlds.run(3, losses_in_float32), strict=True):
        assert {loss.dtype for loss in losses} == {torch.float32}
        assert len({float(loss) for loss in losses}) == 1
