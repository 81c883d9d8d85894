"""The lower bound of the search is the computation of a step, divided among all devices by their speed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.chains import card, chain, layer, machines
from whale.planner.cost.stage import CostModel
from whale.planner.search import SearchSettings, search
from whale.planner.search.bound import least_seconds, least_time

FAST, SLOW = card("fast"), card("slow")


def test_of_one_device_it_is_the_step_but_for_the_optimizer() -> None:
    profile, cluster = chain([layer({FAST.name: 0.01})], (0,) * 8), machines([FAST])
    best = search(profile, cluster, batch=8, settings=SearchSettings(time_limit=300)).best.prediction
    assert best.step_seconds * 0.99 < least_seconds(CostModel.of(profile, cluster), 8) <= best.step_seconds


def test_types_work_at_their_own_pace() -> None:
    profile = chain([layer({FAST.name: 0.01, SLOW.name: 0.03})], (0,) * 4)
    prices = CostModel.of(profile, machines([FAST, SLOW]))
    assert least_seconds(prices, 12) - prices.step_overhead == pytest.approx(4 * 12 * 0.01 * 3 / 4)


def test_the_number_of_rows_is_the_one_that_costs_least_for_each_row() -> None:
    """The fixed cost of a layer is shared by many rows."""
    profile = chain([layer({FAST.name: 0.01}, fixed=0.02)], (0,))
    prices = CostModel.of(profile, machines([FAST]))
    assert 64 * 0.01 <= least_seconds(prices, 64) - prices.step_overhead <= 64 * 0.01 + 0.02


def test_each_kind_of_layer_is_done_where_it_costs_least() -> None:
    work = np.array([[1.0, 4.0], [4.0, 1.0]])
    assert least_time(work, np.ones(2)) == pytest.approx(1.0)
    assert least_time(work, np.array([1e9, 1.0])) == pytest.approx(0.0, abs=1e-6)
