"""Cuts of a chain into stages: known answers, sends and ties, orders of groups, and what an error says."""

from dataclasses import replace

import pytest

from whale.errors import InfeasibleError, UsageError
from whale.planner.balance.cuts import CutProblem, StageGroup, Tie, fastest_cut, price

GIB = 2**30


def group(name: str, seconds: float, num_layers: int = 12, *, gib: float = float("inf")) -> StageGroup:
    """Layers of 1 GiB of state that keep 1 GiB of a micro-batch."""
    return StageGroup(
        name=name,
        seconds=(seconds,) * num_layers,
        fixed_bytes=(GIB,) * num_layers,
        kept_bytes=(GIB,) * num_layers,
        capacity_bytes=gib * GIB,
    )


def test_layers_go_by_speed_where_memory_does_not_bind() -> None:
    fast, slow = group("fast", 1), group("slow", 2)
    cut = fastest_cut(CutProblem(groups=(fast, fast, slow, slow), micro_batches=16))
    assert (cut.starts, cut.seconds) == ((0, 4, 8, 10), (4, 4, 4, 4))
    assert cut.step_seconds == 15 * 4 + 16


def test_an_early_stage_takes_fewer_layers_where_its_micro_batches_in_flight_do_not_fit() -> None:
    card = group("card", 1, gib=15)
    cut = fastest_cut(CutProblem(groups=(card,) * 4, micro_batches=8))
    assert [need / GIB for need in cut.fullest_bytes] == [15, 12, 9, 6]
    tighter = fastest_cut(CutProblem(groups=(replace(card, capacity_bytes=14 * GIB),) * 4, micro_batches=8))
    assert tighter.starts[1] <= 2 and tighter.fits and max(tighter.seconds) == 4


def test_one_micro_batch_holds_one_in_flight() -> None:
    card = group("card", 1, gib=6)
    assert fastest_cut(CutProblem(groups=(card,) * 4, micro_batches=1)).fits
    with pytest.raises(InfeasibleError):
        fastest_cut(CutProblem(groups=(card,) * 4, micro_batches=2))


def test_gpipe_holds_all_micro_batches_at_every_stage() -> None:
    card = group("card", 1, gib=27)
    problem = CutProblem(groups=(card,) * 4, micro_batches=8, in_flight=(8,) * 4)
    assert fastest_cut(problem).fullest_bytes == (27 * GIB,) * 4


def test_a_dear_boundary_is_not_cut() -> None:
    card = group("card", 1, 6)
    cheap_after = {1, 4}
    cut = fastest_cut(
        CutProblem(groups=(card,) * 2, micro_batches=8, send=lambda layer, *_: 0.1 if layer in cheap_after else 5.0)
    )
    assert cut.starts == (0, 2)
    assert cut.seconds == pytest.approx((2.1, 4))


def test_a_tied_parameter_is_held_once_by_a_stage_that_has_both_layers() -> None:
    card = StageGroup(name="card", seconds=(1, 1, 1), fixed_bytes=(10, 1, 10), kept_bytes=(0, 0, 0), capacity_bytes=11)
    whole = CutProblem(groups=(card,), micro_batches=1)
    assert fastest_cut(replace(whole, ties=(Tie((0, 2), 10),))).fullest_bytes == (11,)
    with pytest.raises(InfeasibleError):
        fastest_cut(whole)


def test_the_sum_of_tied_gradients_is_paid_only_where_the_layers_are_cut_apart() -> None:
    card = group("card", 1, 4)
    apart = CutProblem(groups=(card,) * 2, micro_batches=2, ties=(Tie((1, 2), 0, 9.0),))
    assert fastest_cut(apart).starts in ((0, 1), (0, 3))
    assert fastest_cut(apart).step_seconds == 3 + 4
    assert price(apart, (0, 2)).step_seconds == 2 + 4 + 9
    many = replace(apart, micro_batches=50)
    assert fastest_cut(many).starts == (0, 2)
    between = replace(apart, ties=(Tie((0, 2, 3), 0, 1.5),))
    assert price(between, (0, 1)).step_seconds == 3 + 4 + 1.5


def test_the_objective_says_whether_only_the_slowest_stage_counts() -> None:
    """One micro-batch waits for the sum: the fast group then takes all it can."""
    fast, slow = group("fast", 1), group("slow", 2)
    problem = CutProblem(groups=(fast, slow), micro_batches=1)
    assert fastest_cut(problem).starts == (0, 11)
    assert fastest_cut(problem, "slowest").starts == (0, 8)


def test_with_more_memory_in_the_first_stages_the_cut_is_even() -> None:
    large, small = group("large", 1, gib=30), group("small", 1, gib=10)
    cut = fastest_cut(CutProblem(groups=(large, large, small, small), micro_batches=8))
    assert list(cut.seconds) == [3, 3, 3, 3]
    as_given = fastest_cut(CutProblem(groups=(small, small, large, large), micro_batches=8))
    assert max(as_given.seconds) == 4


def test_what_does_not_fit_names_the_stage_and_what_it_lacks() -> None:
    card = group("V100:0", 1, 5, gib=5)
    recomputed = replace(card, kept_bytes=(GIB / 8,) * 5)
    half_kept = replace(card, kept_bytes=(GIB * 0.9,) * 5)
    problem = CutProblem(groups=(card,) * 2, micro_batches=8)
    with pytest.raises(InfeasibleError) as raised:
        fastest_cut(
            problem,
            remedies=[
                ("recompute='full'", replace(problem, groups=(recomputed,) * 2)),
                ("recompute='selective'", replace(problem, groups=(half_kept,) * 2)),
            ],
        )
    message = str(raised.value)
    assert "no cut into 2 stages fits" in message
    assert "stage 0 on V100:0 needs 6.00 GiB and has 5.00 GiB, 1.00 GiB too little" in message
    assert "It would fit with recompute='full' (3.38 GiB of 5.00 GiB on stage 1)" in message
    assert "selective" not in message


def test_more_stages_than_layers_are_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="use at most 3 stages"):
        CutProblem(groups=(group("card", 1, 3),) * 4, micro_batches=1)


@pytest.mark.parametrize("starts", [(0,), (1, 2), (0, 0), (2, 0), (0, 12)])
def test_cuts_that_are_none_are_a_usage_error(starts: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        price(CutProblem(groups=(group("card", 1),) * 2, micro_batches=1), starts)


def test_figures_for_another_number_of_layers_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="each of 12 layers"):
        CutProblem(groups=(group("a", 1), group("b", 1, 5)), micro_batches=1)
