"""Three and four ranks: nests of stages, replicas and shards, and stages of different sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed import zoo
from tests.distributed.parity import Setup, Worlds, check
from tests.distributed.parity import worlds as worlds_of_a_module
from whale import replicate, split, stage

FIRST, SECOND = "transformer.h.0", "transformer.h.1"


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


THREE: dict[str, dict[str, Any]] = {
    "two replicas to one": {FIRST: [stage(2), replicate()], SECOND: stage(1)},
    "two shards to one": {FIRST: [stage(2), split()], SECOND: stage(1)},
}
FOUR: dict[str, dict[str, Any]] = {
    "one to three replicas": {FIRST: stage(1), SECOND: [stage(3), replicate()]},
    "one to three shards": {FIRST: stage(1), SECOND: [stage(3), split()]},
    "pipelines side by side": {FIRST: stage(), SECOND: stage()},
    "stages of replicas": {FIRST: [stage(2), replicate()], SECOND: [stage(2), replicate()]},
    "stages of shards": {FIRST: [stage(2), split()], SECOND: [stage(2), split()]},
    "replicas to shards": {FIRST: [stage(2), replicate()], SECOND: [stage(2), split()]},
}


@pytest.mark.parametrize("layout", THREE.values(), ids=THREE.keys())
def test_stages_on_three_ranks(worlds: Worlds, layout: Any) -> None:
    check(worlds, 3, zoo.gpt2, Setup(layout=layout, promote=True, micro_batches=2))


@pytest.mark.parametrize("layout", FOUR.values(), ids=FOUR.keys())
def test_stages_on_four_ranks(worlds: Worlds, layout: Any) -> None:
    check(worlds, 4, zoo.gpt2, Setup(layout=layout, promote=True, micro_batches=2))


@pytest.mark.parametrize("build", [zoo.gpt2_one_layer, zoo.trunk_and_head], ids=["gpt2", "classifier"])
def test_shards_inside_replicas(worlds: Worlds, build: Any) -> None:
    check(worlds, 4, build, Setup(layout={"": [replicate(2), split(2)]}, promote=build is zoo.gpt2_one_layer))


def test_uneven_replicas_of_uneven_pipelines(worlds: Worlds) -> None:
    layout = {"first": stage(), "second": stage()}
    check(worlds, 4, zoo.tied_stages, Setup(layout=layout, micro_batches=1, speeds=(3.0, 1.0, 3.0, 1.0)))
