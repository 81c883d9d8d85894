"""Every axis rule against the operator that it describes: whole against shards, value and gradient, for every choice.

The registry is enumerated: a rule without a sample call fails.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.operator_samples import samples
from tests.sharded_call import Call, check, single_call
from whale.strategies.rules import REGISTRY
from whale.strategies.rules.registry import target_name

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
    assert set(REGISTRY) - sampled == set()


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
            check(call, [choice], [shares], compare_values=not sample.random)
        except Exception as error:
            raise AssertionError(f"{choice} {choice.form} shared {shares}: {error}") from error


@pytest.mark.parametrize("number", each_sample())
def test_two_mesh_axes_compute_what_the_whole_does(calls: dict[int, Call], number: int) -> None:
    call, sample = call_of(calls, number), SAMPLES[number]
    for pair in itertools.product(call.choices[1:], repeat=2):
        try:
            check(call, pair, [(1.0, 1.0), (1.0, 2.0)], compare_values=not sample.random)
        except Exception as error:
            raise AssertionError(f"{' and '.join(map(str, pair))}: {error}") from error
