"""``plan="auto"``: an unmodified model on what was started, with the local model's loss and gradients."""

from __future__ import annotations

import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import whale
from tests.distributed import zoo
from tests.distributed.parity import BOUND, UNEVEN_BOUND, Setup, Worlds, local_step, relative_errors
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.small_models import decoder, tokens
from whale.commands.candidates import CandidateCompiler
from whale.commands.searching import search_plans
from whale.detection import detect
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.plan import Plan
from whale.planner.search import SearchSettings
from whale.runtime.launch import World
from whale.strategies.profile import profile_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "auto_search.py"


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def gpt2_step(world: World) -> tuple[float, int]:
    """The worst error of a step of Hugging Face's GPT-2, and how many parameters lie here."""
    torch.manual_seed(0)
    model, batch = zoo.gpt2()
    model.eval()
    loss, gradients, _ = local_step(model, batch, Setup(promote=True))
    module = whale.parallelize(model, batch, plan="auto", promote_casts=True, device="cpu")
    found = module._step(batch, train=True)
    errors = relative_errors(module.full_gradients(), gradients)
    return max(float((found - loss).abs() / loss), *errors.values()), sum(p.numel() for p in module.parameters())


def test_gpt2_without_an_annotation_has_the_loss_and_gradients_of_one_process(worlds: Worlds) -> None:
    for worst, held in worlds.run(2, gpt2_step):
        assert worst <= BOUND
        assert held > 0


def step_of_own_rows(world: World) -> tuple[float, float]:
    """Losses of a searched plan to which each rank brings its rows, and of one process."""
    local, batch = decoder(layers=2), tokens()
    made = whale.parallelize(
        decoder(layers=2), batch, plan="auto", batch="local", recompute="full", device="cpu", timeout_seconds=20
    )
    share = made.batch_share(8)
    index = torch.tensor([row for first, stop in share for row in range(first, stop)], dtype=torch.long)
    return made.train_step(**{name: x[index] for name, x in batch.items()}).item(), local(**batch).item()


def test_a_searched_plan_with_rows_of_each_rank(worlds: Worlds) -> None:
    for found, expected in worlds.run(2, step_of_own_rows):
        assert found == pytest.approx(expected, rel=BOUND)


def with_kept_plan(world: World, folder: Path) -> tuple[list[int], int, str]:
    """How many searches there were after each of five runs; how many plans are kept; a refusal."""
    from whale.commands import automatic

    searches, found = [0], []

    def counted(*arguments: Any, **options: Any) -> Any:
        searches[0] += 1
        return search_plans(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(automatic, "search_plans", counted)
        for rows, damaged in ((8, False), (8, False), (4, False), (8, True), (8, False)):
            if damaged and world.rank == 0:
                for file in folder.iterdir():
                    file.write_text("{")
            batch = tokens(rows=rows)
            model = whale.parallelize(decoder(layers=2), batch, plan="auto", plan_cache=folder, device="cpu")
            losses = model.train_step(**batch).item(), decoder(layers=2)(**batch).item()
            assert losses[0] == pytest.approx(losses[1], rel=BOUND)
            found.append(searches[0])
    with pytest.raises(whale.WhaleError) as caught:
        whale.parallelize(decoder(layers=2), batch, plan_cache=folder)
    return found, len(list(folder.iterdir())), str(caught.value)


def test_a_plan_that_was_found_is_found_again(worlds: Worlds, tmp_path: Path) -> None:
    first, other = worlds.run(2, with_kept_plan, tmp_path / "plans")
    assert first[0] == [1, 1, 2, 3, 3], "another batch and a damaged file are searched for"
    assert (other[0], first[1]) == ([0] * 5, 2)
    assert 'plan_cache keeps plans that plan="auto" finds' in first[2]


def staged_step(world: World, schedule: str | None = None) -> tuple[float, set[str]]:
    """The worst error of a decoder whose stages are annotated, and what lies here."""
    model, batch = decoder(layers=4), tokens()
    whale.annotate(model, {"layers.[0-1]": whale.stage(), "layers.[2-3]": whale.stage()})
    loss, gradients, _ = local_step(model, batch, Setup())
    count = None if schedule is None else 4
    module = whale.parallelize(model, batch, plan="auto", micro_batches=count, schedule=schedule, device="cpu")
    found = module.train_step(**batch)
    errors = relative_errors(module.full_gradients(), gradients)
    return max(float((found - loss).abs() / loss), *errors.values()), {name for name, _ in module.named_parameters()}


@pytest.mark.parametrize("schedule", [None, "gpipe", "zero_bubble", "zero_bubble_1p"])
def test_annotated_stages_are_kept(worlds: Worlds, schedule: str | None) -> None:
    found = worlds.run(2, staged_step, schedule)
    assert all(worst <= BOUND for worst, _ in found)
    held = [{name.split(".")[1] for name in names if name.startswith("layers.")} for _, names in found]
    assert sorted(map(sorted, held)) == [["0", "1"], ["2", "3"]]


def planned_step(world: World, text: str) -> float:
    """The worst error of a step of a decoder by plan."""
    model, batch = decoder(layers=2), tokens()
    loss, gradients, _ = local_step(model, batch, Setup())
    module = whale.parallelize(model, batch, plan=Plan.parse(text), device="cpu")
    found = module.train_step(**batch)
    return max(float((found - loss).abs() / loss), *relative_errors(module.full_gradients(), gradients).values())


def test_what_the_search_proposes_for_unlike_nodes_runs_with_the_local_gradients(worlds: Worlds) -> None:
    model = decoder(layers=2)
    trial = CandidateCompiler(model.to("meta"), tokens(), name="decoder")
    profile = profile_model(model, tokens(), tensor_degrees=(1, 2), name="decoder")
    fast, slow = (
        DeviceType.of(name, speed={"float32": speed}, memory_bytes=2**34, memory_bandwidth=speed)
        for name, speed in (("fast", 3e9), ("slow", 1e9))
    )
    link = Link(bandwidth=1e10, latency=1e-6)
    cluster = Cluster.of([("a", fast), ("b", slow)], inter=link)
    settings = SearchSettings(top=4, time_limit=60.0)
    found = search_plans(profile, cluster, batch=8, settings=settings, trial=trial)
    assert not found.refused
    plans = [choice.plan for choice in found.choices if choice.compiled]
    assert len(plans) == len(found.choices) == 4
    for plan in plans:
        assert max(worlds.run(2, planned_step, plan.dumps())) <= UNEVEN_BOUND, plan.stages


def detected(world: World) -> list[tuple[str, str, int]]:
    return [(device.name, device.node, device.memory_bytes) for device in detect(world).devices]


def test_all_ranks_detect_the_same_devices(worlds: Worlds) -> None:
    one, other = worlds.run(2, detected)
    assert one == other
    assert [name for name, _, _ in one] == ["cpu:0", "cpu:1"]


def refused(world: World) -> str:
    """The error of each rank if rank 0 finds no plan."""
    tiny = DeviceType.of("tiny", speed={"float32": 1e9}, memory_bytes=2**10, memory_bandwidth=1e9)
    cluster = Cluster.homogeneous(2, tiny, intra=Link(bandwidth=1e9, latency=1e-5))
    with pytest.raises(whale.WhaleError) as caught:
        whale.parallelize(decoder(layers=1), tokens(), plan="auto", cluster=cluster, device="cpu")
    return f"{type(caught.value).__name__}: {caught.value}"


def test_where_nothing_fits_all_ranks_end_with_the_reason(worlds: Worlds) -> None:
    first, second = worlds.run(2, refused)
    assert first.startswith("InfeasibleError") and "GiB" in first
    assert second.startswith("WorkerError: rank 0: ") and "GiB" in second


def example(world: World) -> object:
    """The exit code of the example: zero if its losses are those of one process."""
    sys.argv = ["auto_search.py", "--steps", "5"]
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE))
    return ended.value.code


def test_the_example_has_the_losses_of_one_process(worlds: Worlds) -> None:
    assert worlds.run(2, example) == [0, 0]
