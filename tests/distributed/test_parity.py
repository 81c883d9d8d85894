"""Two ranks: loss and every gradient equal those of plain PyTorch, for real models and odd ones, under every layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.distributed import zoo
from tests.distributed.parity import Setup, Worlds, check, local_step, relative_errors
from tests.distributed.parity import worlds as worlds_of_a_module
from whale import replicate, split, stage

DP = {"": replicate()}
TP = {"": split()}
GPT2_STAGES = {"transformer.h.0": stage(), "transformer.h.1": stage()}
STAGES: dict[Any, dict[str, Any]] = {
    zoo.gpt2: GPT2_STAGES,
    zoo.llama: {"model.layers.0": stage(), "model.layers.1": stage()},
    zoo.mixtral: {"model.layers.0": stage(), "model.layers.1": stage()},
    zoo.bert: {"bert.encoder.layer.0": stage(), "bert.encoder.layer.1": stage()},
    zoo.vit: {"vit.layers.0": stage(), "vit.layers.1": stage()},
    zoo.t5: {"encoder": stage(), "decoder": stage()},
    zoo.resnet: {"resnet.embedder": stage(), "resnet.encoder": stage()},
}
CASTS = (zoo.gpt2, zoo.llama, zoo.mixtral, zoo.t5)
"""Models that compute norms, or the logits of their loss, in float32."""
MODELS = [zoo.gpt2, zoo.llama, zoo.mixtral, zoo.bert, zoo.vit, zoo.t5, zoo.resnet]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def name(value: Any) -> str | None:
    return value.__name__ if callable(value) else None


@pytest.mark.parametrize("build", CASTS, ids=name)
def test_the_oracle_of_models_that_cast_is_the_eager_model_up_to_float32(build: Any) -> None:
    torch.manual_seed(0)
    model, batch = build()
    model.eval()
    promoted = local_step(model, batch, Setup(promote=True))
    if build is zoo.mixtral:  # PyTorch's kernel for products with experts takes no float64
        model.set_experts_implementation("eager")
    eager = local_step(model, batch, Setup())
    assert eager[0].item() == pytest.approx(promoted[0].item(), rel=1e-6)
    assert max(relative_errors(promoted[1], eager[1]).values()) <= 1e-6


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


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble", "greedy"])
def test_pipeline_schedules(worlds: Worlds, schedule: str) -> None:
    check(worlds, 2, zoo.gpt2, Setup(layout=GPT2_STAGES, promote=True, micro_batches=4, schedule=schedule))


def test_interleaved_stages(worlds: Worlds) -> None:
    layout = {f"transformer.h.{i}": stage() for i in range(4)}
    build = zoo.gpt2_four_layers
    check(worlds, 2, build, Setup(layout=layout, promote=True, micro_batches=4, schedule="interleaved"))


@pytest.mark.parametrize("layout", [DP, GPT2_STAGES], ids=["dp", "pp"])
@pytest.mark.parametrize("build", [zoo.gpt2_eager, zoo.gpt2_padded, zoo.gpt2_checkpointed], ids=name)
def test_variants_of_attention(worlds: Worlds, build: Any, layout: Any) -> None:
    check(worlds, 2, build, Setup(layout=layout, promote=True, micro_batches=1 if layout is DP else 2))


def test_eager_attention_in_shards(worlds: Worlds) -> None:
    check(worlds, 2, zoo.gpt2_eager_one_layer, Setup(layout=TP, promote=True))


@pytest.mark.parametrize("speeds", [(3.0, 1.0), (1.0, 3.0)], ids=str)
def test_uneven_shares_of_the_batch(worlds: Worlds, speeds: tuple[float, ...]) -> None:
    check(worlds, 2, zoo.gpt2, Setup(layout=DP, promote=True, speeds=speeds))


def test_uneven_shards_of_weights(worlds: Worlds) -> None:
    results = check(worlds, 2, zoo.gpt2_one_layer, Setup(layout=TP, promote=True, speeds=(3.0, 1.0)))
    name = "transformer.h.0.mlp.c_fc.weight"
    assert [r.held[name][1] for r in results] == [96, 32]


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("speeds", [(), (3.0, 1.0)], ids=["equal", "uneven"])
def test_replicated_trunk_with_split_head(worlds: Worlds, speeds: tuple[float, ...], micro_batches: int) -> None:
    layout = {"trunk": replicate(), "head": split()}
    results = check(worlds, 2, zoo.trunk_and_head, Setup(layout=layout, speeds=speeds, micro_batches=micro_batches))
    for found in results:
        assert found.held["trunk.0.weight"] == found.whole["trunk.0.weight"]
        assert found.held["head.weight"][0] < found.whole["head.weight"][0]


def test_replicated_gpt2_with_split_untied_head(worlds: Worlds) -> None:
    check(worlds, 2, zoo.gpt2_untied, Setup(layout={"": replicate(), "lm_head": split()}, promote=True))


TWICE_STAGES = {"first": stage(), "second": stage()}
TWO_STAGES = {"first": stage(), "second": stage()}
HALVES = {"blocks.[0-1]": stage(), "blocks.[2-3]": stage()}
OUTSIDE = {"loss_fn": zoo.cross_entropy_of}
ODD: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "called twice, dp": (zoo.twice, DP, {}),
    "called twice, tp": (zoo.twice, TP, {}),
    "several inputs, dp": (zoo.several, DP, {}),
    "several inputs, tp": (zoo.several, TP, {}),
    "several inputs, pp": (zoo.several, {"left": stage(), "mix": stage()}, {"micro_batches": 2}),
    "checkpointed, dp": (zoo.blocks, DP, OUTSIDE),
    "checkpointed, tp": (zoo.blocks, TP, OUTSIDE),
    "checkpointed, pp": (zoo.blocks, HALVES, {**OUTSIDE, "micro_batches": 4, "schedule": "zero_bubble"}),
    "buffers, dp": (zoo.counting, DP, {"training": True}),
    "buffers, pp": (zoo.counting, {"body": stage(), "head": stage()}, {"training": True}),
    "batch norm, dp": (zoo.normalized, DP, {"training": True}),
    "batch norm, hybrid": (zoo.normalized, {"conv": replicate(), "head": split()}, {"training": True}),
    "tied stages, 1f1b": (zoo.tied_stages, TWO_STAGES, {"micro_batches": 2}),
    "tied stages, zero bubble": (zoo.tied_stages, TWO_STAGES, {"micro_batches": 4, "schedule": "zero_bubble"}),
    "tied stages, tp": (zoo.tied_stages, TP, {}),
    "penalties, dp": (zoo.penalized, DP, {"micro_batches": 4}),
    "penalties, tp": (zoo.penalized, TP, {"micro_batches": 2}),
    "penalties, pp": (zoo.penalized, TWO_STAGES, {"micro_batches": 4, "schedule": "zero_bubble"}),
    "log-probabilities, tp": (zoo.log_probabilities, TP, {"micro_batches": 2}),
    "log-probabilities, uneven tp": (zoo.log_probabilities, TP, {"speeds": (3.0, 1.0)}),
    "a contrastive loss, dp": (zoo.contrastive, DP, {}),
    "a contrastive loss, tp": (zoo.contrastive, TP, {}),
    "few heads, tp": (zoo.few_heads, TP, {"micro_batches": 2}),
    "few heads, uneven tp": (zoo.few_heads, TP, {"speeds": (3.0, 1.0)}),
    "frozen first stage": (zoo.frozen_trunk, {"trunk": stage(), "head": stage()}, {"micro_batches": 2}),
}


@pytest.mark.parametrize(("build", "layout", "options"), ODD.values(), ids=ODD.keys())
def test_odd_models(worlds: Worlds, build: Any, layout: Any, options: dict[str, Any]) -> None:
    results = check(worlds, 2, build, Setup(layout=layout, **options))
    if layout is TP:
        assert all(any(found.held[n] != found.whole[n] for n in found.held) for found in results)
