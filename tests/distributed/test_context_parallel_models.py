"""Attention of sequences cut over ranks in models of Hugging Face: parity with the local one, and in low precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import whale
from tests.distributed import zoo
from tests.distributed.parity import Setup, Worlds, check
from tests.distributed.parity import worlds as worlds_of_a_module
from whale import split
from whale.runtime.launch import World


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def in_low_precision(world: World, way: Any) -> tuple[float, float]:
    """Relative errors of the loss and of the gradients in bfloat16, against torch.autocast in one process."""
    torch.manual_seed(0)
    local, batch = zoo.qwen2()
    local.float()
    model = copy.deepcopy(local)
    whale.annotate(model, {"": split(dim=1, attention=way)})
    parallel = whale.parallelize(model, batch, device="cpu", precision="bf16", timeout_seconds=30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = local(**batch).loss
    expected.backward()
    found, gradients = parallel.train_step(**batch), parallel.full_gradients()
    largest = max(float(x.grad.abs().max()) for x in local.parameters() if x.grad is not None)
    errors = [float((gradients[n] - x.grad).abs().max()) for n, x in local.named_parameters() if x.grad is not None]
    return float((found - expected).abs() / expected.abs()), max(errors) / largest


@pytest.mark.parametrize("way", ["gather", "ring", "ulysses"])
def test_grouped_heads_in_low_precision(worlds: Worlds, way: str) -> None:
    """Keys, which rotary positions turn in float32, are cast after they are repeated for the heads of a group, and
    values before."""
    for loss, gradients in worlds.run(2, in_low_precision, way):
        assert loss < 2e-3 and gradients < 3e-2  # bfloat16 has eight bits


HUGGING_FACE: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "gpt as a ring": (zoo.gpt2, "ring", {"speeds": (1.0, 3.0)}),
    "gpt in steps by heads": (zoo.gpt2_eager_one_layer, "ulysses", {}),
    "llama as a ring": (zoo.llama, "ring", {"speeds": (2.0, 1.0)}),
    "llama by heads": (zoo.llama, "ulysses", {}),
    "bert as a ring": (zoo.bert, "ring", {}),
    "t5 by heads": (zoo.t5, "ulysses", {}),
}


@pytest.mark.parametrize(("build", "attention", "options"), HUGGING_FACE.values(), ids=HUGGING_FACE.keys())
def test_models_of_hugging_face(worlds: Worlds, build: Any, attention: Any, options: dict[str, Any]) -> None:
    check(worlds, 2, build, Setup(layout={"": split(dim=1, attention=attention)}, promote=True, **options))


OTHERS: dict[str, tuple[Callable[[], Any], str, int]] = {
    "mistral as a ring": (zoo.mistral, "ring", 2),
    "mixtral": (zoo.mixtral, "auto", 2),
    "qwen2 on three": (zoo.qwen2, "auto", 3),
    "mistral on three": (zoo.mistral, "auto", 3),
    "gemma2 on three": (zoo.gemma2, "auto", 3),
    "bert on three": (zoo.bert, "auto", 3),
    "t5 on three": (zoo.t5, "auto", 3),
}


@pytest.mark.parametrize(("build", "attention", "size"), OTHERS.values(), ids=OTHERS.keys())
def test_other_families(worlds: Worlds, build: Any, attention: Any, size: int) -> None:
    check(worlds, size, build, Setup(layout={"": split(dim=1, attention=attention)}, promote=True))
