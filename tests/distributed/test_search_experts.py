"""Plans of the search whose experts are split while all else is replicated on the same ranks: the local step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import whale
from tests.distributed.parity import BOUND, Setup, Worlds, local_step, relative_errors
from tests.distributed.parity import worlds as worlds_of_a_module
from whale.cli.model_loader import load_model
from whale.commands.candidates import CandidateCompiler
from whale.commands.searching import search_plans
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.plan import Plan
from whale.planner.search import Degrees, Fixed, SearchSettings
from whale.runtime.launch import World
from whale.strategies.profile import profile_model

SPEC = "examples/models/gshard.py:gshard"
SIZES = {"layers": 2, "hidden": 16, "ffn": 32, "heads": 4, "experts": 4, "seq": 6, "vocab": 24, "batch_size": 8}
LAYERS = 4  # the embedding, two blocks, the head


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def planned_step(world: World, text: str) -> tuple[float, tuple[int, ...]]:
    """The worst error of a step by plan, and the shape of the experts of the last block that lie here."""
    torch.manual_seed(0)
    loaded = load_model(SPEC, SIZES)
    model = loaded.model.double()
    loss, gradients, _ = local_step(model, loaded.batch, Setup())
    module = whale.parallelize(model, loaded.batch, plan=Plan.parse(text), device="cpu")
    found = module.train_step(**loaded.batch)
    errors = relative_errors(module.full_gradients(), gradients)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    return max(float((found - loss).abs() / loss), *errors.values()), shapes.get("layers.1.feed_forward.experts.up", ())


@pytest.mark.parametrize(
    "fixed",
    [
        Fixed(degrees=(Degrees(first=0, last=LAYERS, data=1, tensor=1, expert=4),)),
        Fixed(degrees=(Degrees(first=0, last=LAYERS, data=2, tensor=1, expert=2),)),
        Fixed(starts=(2,), degrees=(Degrees(first=0, last=LAYERS, data=1, tensor=1, expert=2),)),
    ],
    ids=["one group", "two groups", "a pipeline"],
)
def test_what_the_search_finds_is_the_local_step(worlds: Worlds, fixed: Fixed) -> None:
    loaded = load_model(SPEC, SIZES, device="meta")
    trial = CandidateCompiler(loaded.model, loaded.batch, name="gshard")
    profile = profile_model(
        loaded.model, loaded.batch, tensor_degrees=(1,), expert_degrees=(2, 4), captured=trial.captured
    )
    assert len(profile.layers) == LAYERS
    card = DeviceType.of("cpu-card", speed={"float32": 1e12}, memory_bytes=2**34, memory_bandwidth=1e11)
    cluster = Cluster.homogeneous(4, card, intra=Link(bandwidth=1e9, latency=1e-6))
    settings = SearchSettings(fixed=fixed, top=1, time_limit=60.0)
    best = search_plans(profile, cluster, batch=8, settings=settings, trial=trial).best
    assert best.compiled
    assert all(stage.degrees == (fixed.degrees[0].data, 1, fixed.degrees[0].expert) for stage in best.candidate.stages)
    for worst, shape in worlds.run(4, planned_step, best.plan.dumps()):
        assert worst <= BOUND
        assert shape in ((), (4 // (fixed.degrees[0].expert or 1), 16, 32))
