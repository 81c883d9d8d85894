"""A small decoder on two ranks in three layouts, for tests of what scripts do with a parallel model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import whale
from tests.distributed.parity import Worlds
from tests.small_models import decoder, tokens

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {"": whale.replicate()},
    "split": {"": whale.split()},
    "stages": {"layers.0": whale.stage(), "layers.1": whale.stage()},
}
SHARDED = ["split", "stages"]


class Two:
    """Two ranks, started again after a test that failed."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.worlds.run(2, function, *arguments)


def annotated(kind: str, model: nn.Module | None = None) -> nn.Module:
    model = decoder(layers=2) if model is None else model
    whale.annotate(model, LAYOUTS[kind])
    return model


def parallel(kind: str, **options: Any) -> Any:
    return whale.parallelize(annotated(kind), tokens(), device="cpu", timeout_seconds=20, **options)


def refusal(what: Callable[[], Any]) -> str:
    try:
        what()
    except whale.WhaleError as error:
        return str(error)
    return ""
