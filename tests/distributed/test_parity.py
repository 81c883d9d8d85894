"""Two ranks: loss and every gradient equal those of plain PyTorch, for real models and odd ones, under every layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed import zoo
from tests.distributed.parity import Setup, Worlds, check
from tests.distributed.parity import worlds as worlds_of_a_module
from whale import replicate, split, stage

DP = {"": replicate()}
TP = {"": split()}
GPT2_STAGES = {"transformer.h.0": stage(), "transformer.h.1": stage()}
STAGES: dict[Any, dict[str, Any]] = {
    zoo.gpt2: GPT2_STAGES,
    zoo.llama: {"model.layers.0": stage(), "model.layers.1": stage()},
    zoo.bert: {"bert.encoder.layer.0": stage(), "bert.encoder.layer.1": stage()},
    zoo.vit: {"vit.layers.0": stage(), "vit.layers.1": stage()},
    zoo.t5: {"encoder": stage(), "decoder": stage()},
    zoo.resnet: {"resnet.embedder": stage(), "resnet.encoder": stage()},
}
CASTS = (zoo.gpt2, zoo.llama, zoo.t5)
"""Models that compute norms, or the logits of their loss, in float32."""
MODELS = [zoo.gpt2, zoo.llama, zoo.bert, zoo.vit, zoo.t5, zoo.resnet]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def name(value: Any) -> str | None:
    return value.__name__ if callable(value) else None


@pytest.mark.parametrize("build", MODELS, ids=name)
def test_data_parallel(worlds: Worlds, build: Any) -> None:
    check(worlds, 2, build, Setup(layout=DP, promote=build in CASTS))


@pytest.mark.parametrize("build", MODELS, ids=name)
def test_tensor_parallel(worlds: Worlds, build: Any) -> None:
    results = check(worlds, 2, build, Setup(layout=TP, promote=build in CASTS))
    for found in results:
        matrices = {n: shape for n, shape in found.whole.items() if len(shape) == 2}
        whole = [n for n, shape in matrices.items() if found.held[n] == shape]
        assert len(whole) <= len(matrices) // 4, f"stored whole under split: {whole}"


@pytest.mark.parametrize("build", MODELS, ids=name)
def test_pipeline(worlds: Worlds, build: Any) -> None:
    check(worlds, 2, build, Setup(layout=STAGES[build], promote=build in CASTS, micro_batches=2))
