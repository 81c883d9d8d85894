"""Properties of every division into shares, for any total and weights."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from whale.ir.shares import shares

TOTALS = st.integers(0, 10_000)
WEIGHTS = st.lists(st.integers(1, 10**6) | st.floats(1e-3, 1e15), min_size=1, max_size=20)


def exact(weight: float) -> Fraction:
    return Fraction(str(weight))


@given(TOTALS, WEIGHTS, st.integers(0, 3))
def test_shares_sum_to_the_total_and_keep_the_minimum(total: int, weights: list[float], minimum: int) -> None:
    total += minimum * len(weights)
    given_out = shares(total, weights, minimum=minimum)
    assert sum(given_out) == total
    assert min(given_out) >= minimum


@given(TOTALS, WEIGHTS, st.integers(0, 3))
def test_a_larger_weight_never_gets_less(total: int, weights: list[float], minimum: int) -> None:
    given_out = shares(total + minimum * len(weights), weights, minimum=minimum)
    for share, weight in zip(given_out, weights, strict=True):
        for other_share, other_weight in zip(given_out, weights, strict=True):
            assert share >= other_share or exact(weight) <= exact(other_weight)


@given(TOTALS, WEIGHTS)
def test_every_share_is_within_one_of_its_ideal(total: int, weights: list[float]) -> None:
    weight_sum = sum(exact(weight) for weight in weights)
    for share, weight in zip(shares(total, weights), weights, strict=True):
        assert abs(share - total * exact(weight) / weight_sum) < 1


@given(TOTALS, st.integers(1, 30), st.floats(1e-3, 1e15), st.integers(0, 3))
def test_equal_weights_differ_by_at_most_one_and_the_first_get_more(
    total: int, num_receivers: int, weight: float, minimum: int
) -> None:
    given_out = shares(total + minimum * num_receivers, [weight] * num_receivers, minimum=minimum)
    assert max(given_out) - min(given_out) <= 1
    assert list(given_out) == sorted(given_out, reverse=True)


@given(TOTALS, WEIGHTS)
def test_the_unit_of_the_weights_does_not_matter(total: int, weights: list[float]) -> None:
    assert shares(total, [exact(weight) * 1000 for weight in weights]) == shares(total, weights)  # type: ignore[misc]


@given(TOTALS, WEIGHTS)
def test_the_same_input_gives_the_same_shares(total: int, weights: list[float]) -> None:
    assert shares(total, weights) == shares(total, list(weights))
