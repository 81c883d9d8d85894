"""Attention of sequences cut over ranks, gathered, as a ring and by heads: parity with the local model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed import spatial, zoo
from tests.distributed.parity import Setup, Worlds, check
from tests.distributed.parity import worlds as worlds_of_a_module
from whale import split


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt": (spatial.gpt, {"speeds": (1.0, 3.0)}),
    "gpt of hugging face": (zoo.gpt2, {"promote": True}),
    "llama": (zoo.llama, {"promote": True, "speeds": (2.0, 1.0)}),
}


@pytest.mark.parametrize("attention", ["ring", "ulysses", "auto"])
@pytest.mark.parametrize(("build", "options"), MODELS.values(), ids=MODELS.keys())
def test_two_parts(worlds: Worlds, build: Any, options: dict[str, Any], attention: Any) -> None:
    check(worlds, 2, build, Setup(layout={"": split(dim=1, attention=attention)}, **options))
