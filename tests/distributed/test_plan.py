"""Plans as files decide what runs: uneven shares of rows and of units, orders of ranks, annotations of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import pytest

import whale
from tests.distributed.parity import UNEVEN_BOUND, Setup, Worlds, local_step, relative_errors
from tests.distributed.parity import worlds as worlds_of_a_module
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
    worst = max(float((found - loss).abs() / loss), *errors.values())
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
