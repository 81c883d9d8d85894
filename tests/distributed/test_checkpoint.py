"""Checkpoints: saved under one plan and loaded under another, bitwise, with the curve of a run that never stopped.

A few plans; ``benchmarks/resharding.py`` has all pairs of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.parity import Worlds
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.resharding import BOUND, Runs

PLANS = ("one process", "tp 3:1", "uneven pp", "interleaved", "zero3 3:1", "state on the host", "tp2 x pp2")


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


@pytest.fixture(scope="module")
def runs(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(worlds, "decoder", PLANS, "AdamW", 3, tmp_path_factory.mktemp("runs"))


def test_all_plans_train_alike(runs: Runs) -> None:
    for curve in runs.curves.values():
        assert curve == pytest.approx(runs.curves["one process"], rel=BOUND)


@pytest.mark.parametrize("plan", PLANS)
def test_a_checkpoint_of_any_plan_goes_on_under_this_one(runs: Runs, plan: str) -> None:
    for other, wrong in runs.faults(plan).items():
        assert not wrong, f"from {other}"
