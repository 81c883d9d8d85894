"""The models of examples/models are trained in parallel as any other: loss and gradients equal plain PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from torch import nn

from tests.distributed.parity import Setup, Worlds, check
from tests.distributed.parity import worlds as worlds_of_a_module
from whale import replicate, split, stage
from whale.cli.model_loader import load_model

SMALL: dict[str, Any] = {"hidden": 16, "heads": 4, "seq": 6, "vocab": 24}
Example = tuple[nn.Module, dict[str, Any]]


def build(name: str, **settings: Any) -> Example:
    loaded = load_model(f"examples/models/{name}.py:{name}", settings, batch_size=4)
    return loaded.model.double(), loaded.batch


def gpt(layers: int = 1) -> Example:
    return build("gpt", layers=layers, **SMALL, dropout=0.0)


def grouped(layers: int = 1) -> Example:
    return build("gpt", layers=layers, **SMALL, kv_heads=2, dropout=0.0)


def llama(layers: int = 1) -> Example:
    return build("llama", layers=layers, **SMALL, kv_heads=2)


def bert(layers: int = 1) -> Example:
    return build("bert", layers=layers, **SMALL, dropout=0.0)


def t5(layers: int = 1) -> Example:
    return build("t5", layers=layers, **SMALL, dropout=0.0)


def resnet() -> Example:
    model, batch = build("resnet", layers=14, width=0.25, classes=5, size=32)
    return model, {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def moe(layers: int = 1) -> Example:
    return build("moe", layers=layers, **SMALL, experts=4)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


@pytest.mark.parametrize("model", [gpt, grouped, llama, moe, bert, t5])
def test_split(worlds: Worlds, model: Any) -> None:
    check(worlds, 2, model, Setup(layout={"": split()}))


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        (gpt, "layers.0", "layers.1"),
        (moe, "layers.0", "layers.1"),
        (t5, "encoder.[0-1]", "decoder.[0-1]"),
    ],
)
def test_in_stages(worlds: Worlds, model: Any, first: str, second: str) -> None:
    check(worlds, 2, partial(model, layers=2), Setup(layout={first: stage(), second: stage()}, micro_batches=2))


def test_a_resnet_in_replicas(worlds: Worlds) -> None:
    check(worlds, 2, resnet, Setup(layout={"": replicate()}))
