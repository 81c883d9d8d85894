"""Functions of torch.nn on two ranks: exact with divided rows, split matrices and in stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import whale
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import Two
from tests.torch_functions import ROWS_OF, error
from whale.runtime.launch import World

LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "replicas": ({"": whale.replicate()}, 1),
    "split, micro-batches": ({"": whale.split()}, 2),
    "stages, micro-batches": ({"first": whale.stage(), "ending": whale.stage()}, 2),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    with worlds_of_a_module() as made:
        yield Two(made)


def all_errors(world: World, layout: str) -> dict[str, float]:
    annotations, micro_batches = LAYOUTS[layout]
    return {name: error(name, annotations, micro_batches=micro_batches) for name in ROWS_OF}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_functions_of_torch_are_exact_on_two_ranks(ranks: Two, layout: str) -> None:
    for found in ranks.run(all_errors, layout):
        assert {name: worst for name, worst in found.items() if worst > 1e-12} == {}
