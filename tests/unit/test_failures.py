"""Failures of a long run: closed forms against their definitions, their limits and a simulation of single failures."""

from __future__ import annotations

import json
from math import exp, inf, isclose, sqrt
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from whale.cli.app import app
from whale.errors import UsageError
from whale.ir.workload import StageWork, Workload
from whale.planner.failures import Failures, daly_interval, missing, outlook, trained, young_interval

DAY = 86400.0


def best_interval(saving: float, restart: float, mtbf: float) -> float:
    """The interval with which most is trained, by golden sections."""
    low, high, golden = 1e-6 * mtbf, 2 * mtbf, (sqrt(5) - 1) / 2
    while high - low > 1e-9 * mtbf:
        one, other = high - golden * (high - low), low + golden * (high - low)
        if trained(one, saving, restart, mtbf) < trained(other, saving, restart, mtbf):
            low = one
        else:
            high = other
    return low


@pytest.mark.parametrize("saving", [1e-5, 1e-3, 0.05, 0.3])
@pytest.mark.parametrize("restart", [0.0, 0.2])
def test_dalys_interval_is_the_best_one(saving: float, restart: float) -> None:
    best = best_interval(saving, restart, 1.0)
    assert isclose(daly_interval(saving, 1.0), best, rel_tol=0.01)
    loss = trained(best, saving, restart, 1.0) - trained(daly_interval(saving, 1.0), saving, restart, 1.0)
    assert -1e-12 < loss < 1e-5
    assert isclose(young_interval(saving, 1.0), best, rel_tol=saving + sqrt(saving))  # of first order in saving / mtbf


def test_a_checkpoint_that_takes_longer_than_failures_leave_is_made_once_between_them() -> None:
    assert daly_interval(3.0, 1.0) == 1.0 and daly_interval(5.0, inf) == inf


def test_few_failures_cost_what_the_first_order_says() -> None:
    interval, saving, restart, mtbf = 600.0, 30.0, 60.0, 1e8
    lost = (interval + saving) / 2 + restart
    expected = saving / 630 + lost / mtbf * interval / 630
    assert isclose(1 - trained(interval, saving, restart, mtbf), expected, rel_tol=1e-6)
    assert trained(600.0, 0.0, 1e6, 1.0) == 0.0


def one_by_one(failures: Failures, nodes: int, speeds: dict[int, float], seconds: float, seed: int) -> float:
    """Rows per second of a run in which nodes fail and are repaired one by one; *speeds* by missing nodes, 0: waits."""
    random = np.random.default_rng(seed)
    away, rows, now = 0, 0.0, 0.0
    rate, every = failures.node / failures.mtbf, failures.interval
    assert every is not None
    begun: float | None = 0.0  # when the job that runs was started
    speed = 1.0
    while now < seconds:
        ends = (nodes + failures.spares - away) * rate
        back = away / failures.repair if away else 0.0
        after = now + random.exponential(1 / (ends + back))
        failed = random.random() < ends / (ends + back)
        active = nodes - max(0, away - failures.spares)
        hits = failed and random.random() < active / (nodes + failures.spares - away)
        away += 1 if failed else -1
        faster = speeds.get(max(0, away - failures.spares), 0.0)
        if hits or faster != speed:
            if begun is not None and speed:
                ran = after - begun - failures.restart
                rows += speed * every * max(0, int(ran / (every + failures.saving)))
            begun, speed = after, faster
        now = after
    return rows / now


@pytest.mark.parametrize("spares", [0, 2])
@pytest.mark.parametrize("elastic", [False, True])
def test_closed_forms_are_the_average_of_single_failures(spares: int, elastic: bool) -> None:
    failures = Failures(mtbf=4 * 20 * 3600.0, node=4, saving=30, restart=120, repair=7200, spares=spares, interval=900)
    speeds = [(count, 1 - count / 10) for count in range(1, 9)] if elastic else []
    found = outlook(failures, 40, speeds)
    told = found.elastic if elastic else found.waiting
    measured = [one_by_one(failures, 10, {0: 1.0, **dict(speeds)}, 500 * DAY, seed) for seed in range(8)]
    error = np.std(measured) / sqrt(len(measured) - 1)
    assert told is not None and abs(told - np.mean(measured)) < 4 * error < 0.02


def test_fewer_plans_stand_for_more_missing_nodes() -> None:
    failures = Failures(mtbf=100 * DAY, saving=30, restart=60, repair=DAY, node=8)
    each = outlook(failures, 400, [(count, 1 - count / 50) for count in range(1, 10)]).elastic
    some = outlook(failures, 400, [(2, 0.96), (5, 0.9), (9, 0.82)]).elastic
    waiting = outlook(failures, 400).waiting
    assert each is not None and some is not None and waiting < some < each


def test_missing_nodes_are_binomial() -> None:
    found = missing(5000, 1e6, 1e4)
    assert isclose(sum(found), 1, rel_tol=1e-9)
    assert isclose(sum(count * one for count, one in enumerate(found)), 5000 / 101, rel_tol=1e-9)
    assert isclose(found[0], (100 / 101) ** 5000, rel_tol=1e-6)
    assert missing(100, inf, 5.0) == missing(100, 1.0, 0.0) == [1.0]


def test_nothing_fails_where_machines_do_not() -> None:
    found = outlook(Failures(mtbf=inf, saving=30), 1024)
    assert found.trained == found.waiting == 1 and found.lost == found.saving == 0 and found.interval == inf


def test_a_job_without_repairs_waits_for_none() -> None:
    found = outlook(Failures(mtbf=1000 * DAY, saving=30, restart=60), 1000)
    assert found.waiting == found.trained and found.short == 0
    assert isclose(found.trained + found.saving + found.lost, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mtbf": 0.0, "saving": 1.0}, "mtbf is 0 s"),
        ({"mtbf": 1.0, "saving": -1.0}, "save is -1 s"),
        ({"mtbf": 1.0, "saving": 1.0, "interval": 0.0}, "every is 0 s"),
        ({"mtbf": 1.0, "saving": 0.0}, "every="),
        ({"mtbf": 1.0, "saving": 1.0, "node": 0}, "a node has 0 devices"),
    ],
)
def test_figures_without_sense_are_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Failures(**given)  # type: ignore[arg-type]


# --- the command ------------------------------------------------------------------------------------------------------


def written(path: Path, ranks: int, seconds: float) -> str:
    stage = StageWork(
        ranks=tuple(range(ranks)),
        forward=ranks * (seconds / 3,),
        backward=ranks * (seconds * 2 / 3,),
        weights=ranks * (0.0,),
        kept_bytes=ranks * (0,),
    )
    path.write_text(Workload(world_size=ranks, micro_batches=1, stages=(stage,)).model_dump_json())
    return str(path)


def simulated(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


@pytest.fixture
def plans(tmp_path: Path) -> tuple[str, str]:
    return written(tmp_path / "all.json", 64, 1.0), written(tmp_path / "fewer.json", 56, 1.25)


def test_simulate_says_what_failures_leave(plans: tuple[str, str]) -> None:
    whole, fewer = plans
    told = "mtbf=2y,save=20 s,restart=1min,repair=4h,node=8"
    found = simulated(whole, "--failures", told, "--fallback", fewer, "--json")
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)["failures"]
    expected = outlook(Failures(mtbf=2 * 31557600, saving=20, restart=60, repair=4 * 3600, node=8), 64, [(1, 0.8)])
    assert data["elastic"] == pytest.approx(expected.elastic) and data["waiting"] == pytest.approx(expected.waiting)
    assert data["interval_seconds"] == pytest.approx(daly_interval(20, 2 * 31557600 / 64))
    text = simulated(whole, "--failures", told, "--fallback", fewer).stdout
    assert "failures: one of 8 nodes about every 11 d 10 h" in text
    words = " ".join(text.split())
    assert f"that waits for repairs {expected.waiting:.1%}" in words
    assert f"that goes on with fewer nodes {expected.elastic:.1%}" in words
    alone = simulated(whole, "--failures", "mtbf=2y,save=20 s").stdout  # devices fail one by one
    assert "failures: one of 64 devices about every 11 d 10 h" in alone and "nodes" not in alone


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mtbf=5y", "save is missing: say how long a checkpoint holds training up"),
        ("save=5s", "mtbf is missing: say how often a device fails"),
        ("mtbf=5,save=20s", "mtbf: '5' has no unit"),
        ("mtbf=5y,save=20s,spare=1", "'spare=1': write NAME=VALUE"),
        ("mtbf=5y,save=20s,save=1s", "save is given twice"),
        ("mtbf=5y,save=20s,node=2.5", "node='2.5': write a whole number"),
        ("mtbf=0y,save=20s", "mtbf is 0 s; it must be positive"),
    ],
)
def test_a_mistake_in_failures_is_named(plans: tuple[str, str], given: str, message: str) -> None:
    found = simulated(plans[0], "--failures", given)
    assert found.exit_code == 2 and message in " ".join(found.stderr.split()), found.stderr


def test_a_fallback_is_for_fewer_devices_and_after_failures(plans: tuple[str, str]) -> None:
    whole, fewer = plans
    assert "give --failures too" in simulated(whole, "--fallback", fewer).stderr
    found = simulated(fewer, "--failures", "mtbf=1y,save=1s", "--fallback", whole)
    assert found.exit_code == 2 and "uses 64 devices and FILE 56" in found.stderr


def planned(path: Path, used: int, world_size: int, **changes: float) -> str:
    """A plan of 960 rows that leaves devices idle; its workload has one rank that stands for all."""
    workload = json.loads(Path(written(path, 1, 1.0)).read_text()) | changes
    stages = [{"ranks": [f"0-{used - 1}"], "axes": [{"name": "replicate", "size": used, "role": "replicate"}]}]
    sizes = {"world_size": world_size, "batch": 960, "micro_batches": workload["micro_batches"], "schedule": "1f1b"}
    path.write_text(json.dumps({"version": 1, **sizes, "stages": stages, "workload": workload}))
    return str(path)


def test_devices_that_a_plan_leaves_idle_fail_for_nobody(tmp_path: Path) -> None:
    told = "mtbf=2y,save=20s,repair=4h,node=8"
    idle = planned(tmp_path / "idle.json", 48, 64)
    found = simulated(idle, "--failures", told, "--fallback", planned(tmp_path / "fewer.json", 40, 56), "--json")
    assert found.exit_code == 0, found.stderr
    expected = outlook(Failures(mtbf=2 * 31557600, saving=20, repair=4 * 3600, node=8), 48, [(1, 1.0)])
    data = json.loads(found.stdout)["failures"]
    assert data["elastic"] == pytest.approx(expected.elastic) and data["waiting"] == pytest.approx(expected.waiting)
    assert "failures: one of 6 nodes" in simulated(idle, "--failures", told).stdout
    as_many = planned(tmp_path / "as_many.json", 48, 56)
    assert "uses 48 devices and FILE 48" in simulated(idle, "--failures", told, "--fallback", as_many).stderr


def test_a_last_micro_batch_with_fewer_rows_has_fewer_rows_per_second_too(tmp_path: Path) -> None:
    told = "mtbf=2y,save=20s,repair=4h,node=8"
    whole = planned(tmp_path / "whole.json", 48, 48, micro_batches=2, last_share=0.5)
    fewer = planned(tmp_path / "fewer.json", 40, 40, micro_batches=2, last_share=0.5)
    found = simulated(whole, "--failures", told, "--micro-batches", "4", "--fallback", fewer, "--json")
    expected = outlook(Failures(mtbf=2 * 31557600, saving=20, repair=4 * 3600, node=8), 48, [(1, 1.0)])
    assert json.loads(found.stdout)["failures"]["elastic"] == pytest.approx(expected.elastic)


def test_a_run_of_a_fixed_length_takes_what_dalys_formula_says() -> None:
    interval, saving, restart, mtbf = 500.0, 20.0, 100.0, 4000.0
    wall = mtbf * exp(restart / mtbf) * (exp((interval + saving) / mtbf) - 1) * 1e6 / interval
    assert isclose(1e6 / wall, trained(interval, saving, restart, mtbf))
