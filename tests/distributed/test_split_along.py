"""Activations cut along a dim, volumes in slabs and sequences in stretches: parity with the local model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import whale
from tests.distributed import spatial, zoo
from tests.distributed.parity import Setup, Worlds, check
from tests.distributed.parity import worlds as worlds_of_a_module
from whale import replicate, split, stage
from whale.runtime.launch import World


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


SLABS = {"": split(dim=2)}
STRETCHES = {"": split(dim=1)}
TWO: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "u-net with batch norm": (spatial.unet3d, SLABS, {"training": True, "speeds": (1.0, 3.0)}),
    "cosmoflow": (spatial.cosmoflow, SLABS, {}),
    "cosmoflow, a split head": (spatial.cosmoflow, {"trunk": split(dim=2), "head": split()}, {"speeds": (3.0, 1.0)}),
    "windows": (spatial.windows, SLABS, {"training": True, "speeds": (2.0, 1.0)}),
    "gpt": (spatial.gpt, STRETCHES, {"speeds": (1.0, 2.0)}),
    "gpt of hugging face": (zoo.gpt2, STRETCHES, {"promote": True, "speeds": (2.0, 1.0)}),
    "eager attention": (zoo.gpt2_eager_one_layer, STRETCHES, {"promote": True}),
    "llama": (zoo.llama, STRETCHES, {"promote": True}),
}


@pytest.mark.parametrize(("build", "layout", "options"), TWO.values(), ids=TWO.keys())
def test_two_parts(worlds: Worlds, build: Any, layout: Any, options: dict[str, Any]) -> None:
    results = check(worlds, 2, build, Setup(layout=layout, **options))
    for found in results:
        assert all(found.held[n] == found.whole[n] for n in found.held if "head" not in layout)


FOUR: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "slabs in replicas": (spatial.unet3d_of_two, {"": [replicate(2), split(2, dim=2)]}, {"training": True}),
    "columns": (spatial.unet3d, {"": [split(2, dim=2), split(2, dim=3)]}, {"training": True}),
    "windows over several neighbours": (spatial.windows, {"": split(4, dim=2)}, {"speeds": (3.0, 1.0, 1.0, 1.0)}),
    "stretches in stages": (
        spatial.gpt,
        {"blocks.0": [stage(2), split(dim=1)], "blocks.1": [stage(2), split(dim=1)]},
        {"micro_batches": 2},
    ),
}


@pytest.mark.parametrize(("build", "layout", "options"), FOUR.values(), ids=FOUR.keys())
def test_four_ranks(worlds: Worlds, build: Any, layout: Any, options: dict[str, Any]) -> None:
    check(worlds, 4, build, Setup(layout=layout, **options))


def in_low_precision(world: World) -> tuple[float, float]:
    """Relative errors of the loss and of the gradients in bfloat16, against torch.autocast in one process."""
    torch.manual_seed(0)
    local, batch = spatial.windows()
    local.float()
    batch = {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}
    model = copy.deepcopy(local)
    whale.annotate(model, SLABS)
    parallel = whale.parallelize(model, batch, device="cpu", precision="bf16", timeout_seconds=30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = local(**batch)
    expected.backward()
    found, gradients = parallel.train_step(**batch), parallel.full_gradients()
    known = {n: x.grad for n, x in local.named_parameters() if x.grad is not None}
    largest = max(float(x.abs().max()) for x in known.values())
    error = max(float((gradients[n] - x).abs().max()) for n, x in known.items())
    return float((found - expected).abs() / expected.abs()), error / largest


def test_norms_of_low_precision_have_weights_of_float32(worlds: Worlds) -> None:
    for loss, gradients in worlds.run(2, in_low_precision):
        assert loss < 2e-3 and gradients < 3e-2  # bfloat16 has eight bits
