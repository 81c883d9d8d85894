"""The simulator against closed forms and hand-drawn timelines."""

from __future__ import annotations

import pytest

from tests.workloads import chain_workload
from whale.errors import UsageError
from whale.ir.check import check_programs
from whale.ir.program import project
from whale.ir.workload import StageWork, Workload
from whale.planner.simulate import order_of, programs_of, simulate


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "micro_batches"), [(1, 3), (2, 2), (4, 8), (5, 3)])
def test_without_communication_gpipe_and_1f1b_take_m_plus_p_minus_1(
    schedule: str, num_stages: int, micro_batches: int
) -> None:
    timeline = simulate(chain_workload(num_stages, micro_batches, schedule=schedule))
    assert timeline.step_seconds == (micro_batches + num_stages - 1) * 3


def test_a_slow_link_costs_1f1b_more_than_gpipe_and_one_more_warm_up_forward_repairs_it() -> None:
    assert simulate(chain_workload(4, 8, schedule="gpipe", latency=0.5)).step_seconds == 36
    assert simulate(chain_workload(4, 8, schedule="1f1b", latency=0.5)).step_seconds == 41
    assert simulate(chain_workload(4, 8, schedule="1f1b_deep", latency=0.5)).step_seconds == 37


def test_the_programs_of_a_workload_pass_the_static_check() -> None:
    workload = chain_workload(4, 6)
    stages, edges, reduces = programs_of(workload)
    check_programs(project(order_of(workload), stages, edges, reduces), stages, edges, reduces)


def test_a_workload_that_contradicts_itself_is_refused() -> None:
    stage = StageWork(ranks=(0, 1), forward=(1.0,), backward=(2.0,), weights=(1.0,), kept_bytes=(1,))
    with pytest.raises(UsageError, match="stage 0 of the workload has 2 ranks, but 1 entries in 'forward'"):
        simulate(Workload(world_size=2, micro_batches=1, stages=(stage,)))
