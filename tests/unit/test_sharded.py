"""Time of sharded weights: what bounds it, and what each collective exposes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whale.planner.cost.sharded import ShardedUnit, sharded_seconds

numbers = st.floats(0, 10)
units = st.builds(ShardedUnit, numbers, numbers, numbers, numbers, st.integers(1, 4))


@settings(max_examples=60)
@given(st.lists(units, min_size=1, max_size=4), st.booleans(), st.floats(0, 1))
def test_sharding_takes_as_long_as_the_longer_of_both_queues_and_at_most_as_both_in_turn(
    chain: list[ShardedUnit], regather: bool, slowdown: float
) -> None:
    forward, backward = sharded_seconds(chain, regather=regather, slowdown=slowdown)
    compute = sum(unit.num * unit.forward for unit in chain), sum(unit.num * unit.backward for unit in chain)
    gathers = sum(unit.num * unit.gather for unit in chain)
    again = gathers - chain[-1].gather if regather else 0.0
    queue = gathers, again + sum(unit.num * unit.reduce for unit in chain)
    for seconds, computed, collectives in zip((forward, backward), compute, queue, strict=True):
        assert max(computed, collectives) - 1e-9 <= seconds <= computed + collectives + 1e-9


def test_equal_units_take_as_long_one_by_one_as_together() -> None:
    one, three = ShardedUnit(1, 2, 3, 4), ShardedUnit(1, 2, 3, 4, num=3)
    ends = ShardedUnit(5, 6, 7, 8)
    for regather in (False, True):
        together = sharded_seconds([ends, three, ends], regather=regather, slowdown=0.3)
        assert together == pytest.approx(sharded_seconds([ends, one, one, one, ends], regather=regather, slowdown=0.3))


def test_the_first_gather_and_the_last_sum_are_exposed_even_where_computation_takes_longer() -> None:
    chain = [ShardedUnit(10, 20, 1, 2, num=5)]
    assert sharded_seconds(chain, regather=True, slowdown=0.0) == (51, 102)
