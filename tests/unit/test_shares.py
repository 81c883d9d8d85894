"""Shares of a batch: the published divisions, and errors."""

import pytest

from whale.errors import InfeasibleError, UsageError
from whale.ir.shares import shares


def test_a_v100_and_a_t4_share_a_batch_of_six() -> None:
    assert shares(6, [15.7, 8.1]) == (4, 2)


def test_eight_v100_and_eight_p100_share_a_batch_of_512() -> None:
    assert shares(512, [15.7] * 8 + [9.3] * 8) == (40,) * 8 + (24,) * 8


def test_ties_go_to_the_lower_index() -> None:
    assert shares(5, [1, 1, 1]) == (2, 2, 1)


def test_a_receiver_of_weight_zero_gets_only_the_minimum() -> None:
    assert shares(4, [1, 0]) == (4, 0)
    assert shares(4, [1, 0], minimum=1) == (3, 1)


def test_the_minimum_is_paid_by_those_above_it() -> None:
    assert shares(10, [100, 100, 1], minimum=2) == (4, 4, 2)


def test_nothing_to_share_gives_nothing_to_everyone() -> None:
    assert shares(0, [2, 1]) == (0, 0)


def test_decimal_weights_are_taken_as_written() -> None:
    assert shares(3, [0.1, 0.2]) == (1, 2)
    assert shares(30, [1.1, 2.2, 3.3]) == (5, 10, 15)


def test_a_total_below_the_minimum_of_all_says_what_it_takes() -> None:
    with pytest.raises(InfeasibleError, match="takes 4"):
        shares(3, [1, 1], minimum=2)


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [1, float("nan")], [1, float("inf")]])
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(UsageError):
        shares(4, weights)


def test_a_negative_total_or_minimum_is_refused() -> None:
    with pytest.raises(UsageError, match="negative"):
        shares(-1, [1])
    with pytest.raises(UsageError, match="negative"):
        shares(1, [1], minimum=-1)
