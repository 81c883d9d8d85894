"""The cuts that are found are the best ones, by trying all; over orders too; and never lose to the paper's."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.errors import InfeasibleError
from whale.planner.balance.cuts import CutProblem, StageGroup, Tie, fastest_cut, price

NUMBERS = st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.7])


@st.composite
def problems(draw: st.DrawFn, max_layers: int = 7, max_groups: int = 4) -> CutProblem:
    num_layers = draw(st.integers(1, max_layers))

    def figures() -> tuple[float, ...]:
        return tuple(draw(st.lists(NUMBERS, min_size=num_layers, max_size=num_layers)))

    kinds = [
        StageGroup(
            name=f"kind {index}",
            seconds=figures(),
            fixed_bytes=figures(),
            kept_bytes=figures(),
            working_bytes=figures(),
            capacity_bytes=draw(st.sampled_from([8.0, 14.0, 1000.0])),
        )
        for index in range(draw(st.integers(1, 3)))
    ]
    groups = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=min(max_groups, num_layers)))
    sends = draw(st.lists(NUMBERS, min_size=num_layers, max_size=num_layers))
    tied = draw(st.sets(st.integers(0, num_layers - 1), min_size=1, max_size=3))
    return CutProblem(
        groups=tuple(groups),
        micro_batches=draw(st.sampled_from([1, 2, 3, 16])),
        send=lambda layer, a, b: sends[layer] * (1 if a.name == b.name else 1.6),
        ties=(Tie(tuple(sorted(tied)), 0.4, draw(st.sampled_from([0.0, 2.5]))),),
    )


def all_cuts(problem: CutProblem):  # type: ignore[no-untyped-def]
    for rest in combinations(range(1, problem.num_layers), len(problem.groups) - 1):
        cut = price(problem, (0, *rest))
        if cut.fits:
            yield cut


@given(problems(), st.sampled_from(["step", "slowest"]))
def test_no_other_cut_is_faster(problem: CutProblem, objective) -> None:  # type: ignore[no-untyped-def]
    possible = list(all_cuts(problem))
    if not possible:
        with pytest.raises(InfeasibleError, match="too little"):
            fastest_cut(problem, objective)
        return
    found = fastest_cut(problem, objective)
    assert found.fits and found == price(problem, found.starts)
    if objective == "step":
        assert found.step_seconds == pytest.approx(min(cut.step_seconds for cut in possible))
    else:
        assert max(found.seconds) == pytest.approx(min(max(cut.seconds) for cut in possible))


@given(problems(max_layers=20, max_groups=6))
def test_never_slower_than_even(problem: CutProblem) -> None:
    even = tuple(problem.num_layers * stage // len(problem.groups) for stage in range(len(problem.groups)))
    other = price(problem, even)
    if other.fits:
        assert fastest_cut(problem).step_seconds <= other.step_seconds * (1 + 1e-9)
