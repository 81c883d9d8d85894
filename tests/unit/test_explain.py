"""Explanations of workloads whose answer is known, and comparisons of two plans."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from whale.cli.app import app
from whale.cli.explain import as_text
from whale.ir.plan import Plan, PlanAxis, PlanStage
from whale.ir.workload import Boundary, DeviceMemory, LinkTime, Prediction, Reduction, StageWork, Transfer, Workload
from whale.planner.explain import difference, explain
from whale.planner.simulation.simulate import simulate


def pipeline(first: float, second: float, *, kept: int = 0, micro_batches: int = 8) -> Workload:
    def stage(rank: int, seconds: float) -> StageWork:
        return StageWork(
            ranks=(rank,), forward=(seconds,), backward=(2 * seconds,), weights=(seconds,), kept_bytes=(kept,)
        )

    boundary = Boundary(
        source_stage=0,
        target_stage=1,
        forward=(Transfer(source=0, target=1, bytes=1000),),
        backward=(Transfer(source=1, target=0, bytes=1000),),
    )
    links = tuple(LinkTime(source=a, target=1 - a, latency=0.0, bandwidth=1e9) for a in (0, 1))
    return Workload(
        world_size=2,
        micro_batches=micro_batches,
        stages=(stage(0, first), stage(1, second)),
        boundaries=(boundary,),
        links=links,
    )


def test_a_slow_stage_bounds_the_step_and_the_other_waits_for_it() -> None:
    found = explain(pipeline(1.0, 3.0))
    assert found.busiest == (1, 72.0)
    assert "computation" in found.bound and "stage 1 is the busiest" in found.bound
    assert (found.waits[0].rank, found.waits[0].peer, found.waits[0].part) == (0, 1, "pipeline")
    assert any("moved to stage 0" in change.what for change in found.changes)
    assert all(change.step_seconds < found.step_seconds for change in found.changes)
    assert len(found.changes) <= 3


def test_a_change_says_what_the_simulator_says() -> None:
    workload = pipeline(1.0, 1.0)
    tried = {change.what: change for change in (*explain(workload).changes, *explain(workload).others)}
    gpipe = workload.model_copy(update={"schedule": "gpipe"})
    change = tried["schedule 'gpipe' instead of '1f1b'"]
    assert change.step_seconds == simulate(gpipe).step_seconds


def test_what_does_not_fit_is_not_proposed() -> None:
    workload = pipeline(1.0, 1.0, kept=2**20)
    memory = tuple(
        DeviceMemory(rank=rank, device=f"card:{rank}", capacity=3 * 2**20, activations=2 * 2**20) for rank in (0, 1)
    )
    prediction = Prediction(step_seconds=27.0, step_seconds_interval=(20.0, 30.0), memory=memory)
    found = explain(workload, prediction)
    assert not any("gpipe" in change.what for change in found.changes)
    assert next(change for change in found.others if "gpipe" in change.what).fits is False


@pytest.mark.parametrize(("capacity", "fits"), [(11, False), (13, True)])
def test_layers_are_moved_only_to_devices_that_hold_them(capacity: int, fits: bool) -> None:
    """A third of 3 GiB of activations and of 6 GiB of state, beside 4 GiB."""
    memory = tuple(
        DeviceMemory(rank=rank, device=f"card:{rank}", capacity=size * 2**30, optimizer=state, activations=kept)
        for rank, size, state, kept in ((0, capacity, 9 * 2**30, 0), (1, 24, 6 * 2**30, 3 * 2**30))
    )
    prediction = Prediction(step_seconds=27.0, step_seconds_interval=(20.0, 30.0), memory=memory)
    found = explain(pipeline(1.0, 3.0), prediction)
    (moved,) = (change for change in (*found.changes, *found.others) if "moved to stage 0" in change.what)
    assert moved.fits is fits and (moved in found.changes) is fits


def test_sums_of_gradients_that_bound_a_step_are_named() -> None:
    stage = StageWork(ranks=(0, 1), forward=(1.0, 1.0), backward=(2.0, 2.0), weights=(1.0, 1.0), kept_bytes=(0, 0))
    reduction = Reduction(ranks=(0, 1), stages=(0,), bytes=10**9, seconds=6.0)
    found = explain(Workload(world_size=2, micro_batches=1, stages=(stage,), reductions=(reduction,)))
    assert "sums of gradients takes 67% of the step" in found.bound
    assert found.changes[0].what.startswith("sums of gradients in half the time")
    assert found.changes[0].step_seconds == 6.0
    assert "waits 6000.00 ms for its own reduction" in as_text(found)


def test_a_device_more_is_priced_with_whole_rows() -> None:
    """Of 16 rows on five devices one still has four, as on four."""
    for num, rows, least in ((4, 16, 4), (3, 16, 4), (4, 20, 4)):
        axis = PlanAxis(name="replicate", size=num, role="replicate")
        plan = Plan(world_size=num, batch=rows, stages=(PlanStage(ranks=tuple(range(num)), axes=(axis,)),))
        own = [rows // num + (place < rows % num) for place in range(num)]
        stage = StageWork(
            ranks=tuple(range(num)),
            forward=tuple(map(float, own)),
            backward=tuple(2.0 * count for count in own),
            weights=tuple(map(float, own)),
            kept_bytes=(0,) * num,
        )
        workload = Workload(world_size=num, micro_batches=1, stages=(stage,))
        prediction = Prediction(step_seconds=3.0 * max(own), step_seconds_interval=(1.0, 100.0))
        plan = plan.with_prediction(prediction, workload)
        found = explain(workload, prediction, plan=plan)
        change = next(one for one in (*found.changes, *found.others) if one.what.startswith("one device more"))
        assert change.step_seconds == pytest.approx(3.0 * least)
        assert (change in found.changes) == (max(own) > least)


def test_a_replica_more_makes_sums_of_gradients_longer_and_the_first_one_is_not_proposed() -> None:
    """A sum over n ranks sends 2 (n - 1) / n of its bytes through each; of one rank there is none to go by."""
    stage = StageWork(ranks=(0, 1), forward=(2.0, 2.0), backward=(4.0, 4.0), weights=(2.0, 2.0), kept_bytes=(0, 0))
    reduction = Reduction(ranks=(0, 1), stages=(0,), bytes=10**9, seconds=6.0)
    found = explain(Workload(world_size=2, micro_batches=1, stages=(stage,), reductions=(reduction,)), num_changes=9)
    change = next(one for one in (*found.changes, *found.others) if "3 instead of 2" in one.what)
    assert change.step_seconds == pytest.approx(4.0 + 6.0 * 4 / 3)
    alone = explain(pipeline(1.0, 3.0))
    assert not any("more for stage" in one.what for one in (*alone.changes, *alone.others))


def test_shares_and_smaller_micro_batches_are_priced_with_whole_rows() -> None:
    axis = PlanAxis(name="replicate", size=2, role="replicate", shares=(2, 1))
    stages = (PlanStage(ranks=(0, 1), axes=(axis,)), PlanStage(ranks=(2,), axes=()))
    plan = Plan(world_size=3, batch=12, micro_batches=4, stages=stages)

    def work(ranks: tuple[int, ...], seconds: tuple[float, ...]) -> StageWork:
        nothing = (0.0,) * len(ranks)
        return StageWork(ranks=ranks, forward=seconds, backward=nothing, weights=nothing, kept_bytes=(0,) * len(ranks))

    workload = Workload(world_size=3, micro_batches=4, stages=(work((0, 1), (6.0, 1.0)), work((2,), (0.0,))))
    prediction = Prediction(step_seconds=24.0, step_seconds_interval=(1.0, 100.0))
    found = explain(workload, prediction, plan=plan.with_prediction(prediction, workload), num_changes=10)
    tried = {one.what: one.step_seconds for one in (*found.changes, *found.others)}
    assert tried["shares of stage 0 in proportion to what its devices do in a second"] == pytest.approx(4 * 3.0)
    assert tried["8 micro-batches of half the rows, if half of them took half the time"] == pytest.approx(8 * 4.0)


def planned(shares: tuple[int, ...], seconds: float) -> Plan:
    axis = PlanAxis(name="replicate", size=2, role="replicate", shares=shares)
    plan = Plan(world_size=2, batch=8, stages=(PlanStage(ranks=(0, 1), axes=(axis,)),))
    prediction = Prediction(
        step_seconds=seconds, step_seconds_interval=(seconds, seconds), breakdown={"compute": seconds}
    )
    return plan.with_prediction(prediction, None)


def test_a_difference_is_of_fields_and_of_what_they_should_give() -> None:
    found = difference(planned((4, 4), 3.0), planned((6, 2), 2.0))
    assert found.fields == {"stages.0.axes.0.shares": ([4, 4], [6, 2])}
    assert found.effects["step_seconds"] == (3.0, 2.0)
    assert difference(planned((4, 4), 3.0), planned((4, 4), 2.0)).fields == {}


def test_a_difference_is_of_the_device_that_has_the_least_left() -> None:
    def held(totals: tuple[int, ...]) -> Plan:
        plan = planned((4, 4), 3.0)
        assert plan.prediction is not None
        memory = tuple(
            DeviceMemory(rank=rank, device=f"cpu:{rank}", parameters=total, capacity=capacity)
            for rank, (total, capacity) in enumerate(zip(totals, (80, 16), strict=True))
        )
        return plan.with_prediction(plan.prediction.model_copy(update={"memory": memory}), None)

    found = difference(held((40, 12)), held((48, 8)))
    effects = {name: found.effects[name] for name in ("fullest_bytes", "fullest_share")}
    assert effects == {"fullest_bytes": (12.0, 48.0), "fullest_share": (0.75, 0.6)}


def test_explain_and_diff_read_files_without_torch(tmp_path: Path) -> None:
    plan = Plan(world_size=2, micro_batches=8, stages=(PlanStage(ranks=(0,)), PlanStage(ranks=(1,))))
    prediction = Prediction(step_seconds=72.0, step_seconds_interval=(60.0, 80.0))
    plan.with_prediction(prediction, pipeline(1.0, 3.0)).save(tmp_path / "one.json")
    planned((6, 2), 2.0).save(tmp_path / "two.json")
    code = (
        "import sys; from whale.cli.app import app\n"
        f"for arguments in (['explain', {str(tmp_path / 'one.json')!r}, '--json'], ['plan', '--schema'],\n"
        f"    ['diff', {str(tmp_path / 'one.json')!r}, {str(tmp_path / 'two.json')!r}]):\n"
        "    try: app(arguments)\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"bound"' in done.stdout and "world_size" in done.stdout and "stages.0.ranks" not in done.stderr
    runner = CliRunner()
    text = runner.invoke(app, ["explain", str(tmp_path / "one.json")])
    assert text.exit_code == 0 and "what would help most:" in text.stdout and "for rank 1 (pipeline)" in text.stdout
    refused = runner.invoke(app, ["explain", str(tmp_path / "two.json")])
    assert refused.exit_code == 3 and "no workload" in refused.stderr
    schema = json.loads(runner.invoke(app, ["plan", "--schema"]).stdout)
    assert schema == Plan.published_schema()
