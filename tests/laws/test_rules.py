"""Every axis rule against the operator that it describes: whole against shards, value and gradient, for every choice.

The registry is enumerated: a rule without a sample call fails.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.operator_samples import samples, x
from tests.sharded_call import Call, check, single_call
from whale.strategies.rules import REGISTRY
from whale.strategies.rules.registry import target_name

aten = torch.ops.aten
SAMPLES = list(samples())
SHARES = ((3.0, 1.0), (1.0, 1.0))


@pytest.fixture(scope="module")
def calls() -> dict[int, Call]:
    return {}


def call_of(calls: dict[int, Call], number: int) -> Call:
    if number not in calls:
        sample = SAMPLES[number]
        calls[number] = single_call(sample.target, *sample.args, **sample.kwargs)
    return calls[number]


def each_sample() -> list[object]:
    return [pytest.param(i, id=str(sample)) for i, sample in enumerate(SAMPLES)]


def test_every_registered_operator_has_a_sample(calls: dict[int, Call]) -> None:
    sampled = {target_name(call_of(calls, i).node) for i in range(len(SAMPLES))}
    namespaces = {name.partition(".")[0] for name in sampled}
    of_other_builds = set() if torch.backends.mkldnn.is_available() else {"aten.mkldnn_rnn_layer"}
    assert set(REGISTRY) - sampled - namespaces - of_other_builds == set()


def test_operators_tagged_pointwise_are_sampled() -> None:
    tagged = [s for s in SAMPLES if torch.Tag.pointwise in getattr(s.target, "tags", ())]
    assert len([s for s in tagged if not str(s.target).startswith(tuple(REGISTRY))]) >= 5


@pytest.mark.parametrize("number", each_sample())
def test_rule_covers_what_it_should(calls: dict[int, Call], number: int) -> None:
    call, sample = call_of(calls, number), SAMPLES[number]
    assert call.opaque == sample.refused
    assert set(sample.offers) <= call.offers, sorted(call.offers)


@pytest.mark.parametrize("number", each_sample())
def test_shards_compute_what_the_whole_does(calls: dict[int, Call], number: int) -> None:
    call, sample = call_of(calls, number), SAMPLES[number]
    for choice, shares in itertools.product(call.choices, SHARES):
        try:
            check(call, [choice], [shares], compare_values=not sample.random, scratch=sample.scratch)
        except Exception as error:
            raise AssertionError(f"{choice} {choice.form} shared {shares}: {error}") from error


@pytest.mark.parametrize("number", each_sample())
def test_two_mesh_axes_compute_what_the_whole_does(calls: dict[int, Call], number: int) -> None:
    call, sample = call_of(calls, number), SAMPLES[number]
    for pair in itertools.product(call.choices[1:], repeat=2):
        if pair[0].form == "halo" and pair[0] == pair[1]:
            continue  # neighbours lie along one mesh axis: annotations that ask for two are refused
        try:
            check(call, pair, [(1.0, 1.0), (1.0, 2.0)], compare_values=not sample.random, scratch=sample.scratch)
        except Exception as error:
            raise AssertionError(f"{' and '.join(map(str, pair))}: {error}") from error


KEYWORDS: dict[str, Any] = {
    "alpha": 2, "approximate": "tanh", "beta": 2, "check_errors": True, "correction": 2, "descending": True,
    "device": torch.device("cpu"), "dim": 0, "driver": None, "dtype": torch.float64, "enable_gqa": True,
    "generator": None, "implicit": True, "include_self": False, "keepdim": True, "layout": torch.strided, "left": True,
    "log_target": True, "memory_format": torch.contiguous_format, "non_blocking": True, "out_int32": True,
    "output_size": None, "path": None, "pin_memory": False, "pivot": True, "reduce": "add", "right": True,
    "rounding_mode": "trunc", "scale": 0.5, "side": "right", "sorter": None, "sparse_grad": False, "stable": False,
    "unitriangular": False, "upper": True, "value": 2,
}  # fmt: skip
"""A value for every argument that can only be given by its name."""


def with_keywords() -> list[object]:
    found: list[object] = []
    for number, sample in enumerate(SAMPLES):
        schema = getattr(sample.target, "_schema", None)
        for argument in schema.arguments if schema is not None else ():
            if argument.kwarg_only:
                found.append(pytest.param(number, argument.name, id=f"{sample}-{argument.name}"))
    return found


@pytest.mark.parametrize(("number", "name"), with_keywords())
def test_arguments_by_name_are_taken(number: int, name: str) -> None:
    sample = SAMPLES[number]
    call = single_call(sample.target, *sample.args, **{**sample.kwargs, name: KEYWORDS[name]})
    for choice in call.choices:
        check(call, [choice], [(3.0, 1.0)], compare_values=not sample.random, scratch=sample.scratch)


WINDOWS = [
    (aten.conv1d.default, (x(2, 3, 6), x(4, 3, 7), x(4), [1], [3])),
    (aten.conv1d.default, (x(2, 3, 12), x(4, 3, 5), x(4), [2], [2])),
    (aten.max_pool1d.default, (x(2, 3, 6), [5], [1], [2])),
    (aten.avg_pool1d.default, (x(2, 3, 12), [4], [2], [1])),
]


@pytest.mark.parametrize("shares", [(1, 1, 1, 1, 1, 1), (3, 1, 1, 1), (2, 0, 1, 3), (0, 3, 3), (3, 3, 0)])
@pytest.mark.parametrize(("target", "arguments"), WINDOWS)
def test_windows_reach_over_several_neighbours_and_over_ranks_without_a_row(
    target: Any, arguments: Any, shares: tuple[float, ...]
) -> None:
    call = single_call(target, *arguments)
    halo = next(choice for choice in call.choices if choice.form == "halo")
    check(call, [halo], [shares], empty=True)


@pytest.mark.parametrize("shares", [(1, 1, 1, 1, 1), (3, 1, 1)])
def test_windows_of_two_dims_reach_over_corners(shares: tuple[float, ...]) -> None:
    call = single_call(aten.conv2d.default, x(2, 3, 5, 6), x(4, 3, 3, 5), x(4), [1, 1], [1, 2])
    halos = [choice for choice in call.choices if choice.form == "halo"]
    check(call, halos, [shares, (2.0, 1.0)])
