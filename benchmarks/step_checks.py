"""Time of a step with the checks of what a script may have changed, relative to the same step without them.

The checks compare the modules, their attributes and modes, hooks and parameters with those of the compiled step, and
sometimes the values of the ranks' batches. Without them a step runs what is compiled, whatever has become of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import transformers
from harness import HEAD, arguments, on_two_ranks, report, side_by_side, table
from models import batch, gpt2
from torch import Tensor, nn

import whale
from whale.runtime.attributes import Changes


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, image_size=32, patch_size=8,
        num_labels=10,
    )  # fmt: skip
    torch.manual_seed(0)
    images = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(0, 10, (8,))}
    return transformers.ViTForImageClassification(config), images


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "GPT-2, 4 layers, 256 wide, 8 x 128": lambda: (gpt2(), batch(8, 128)),
    "ViT, 4 layers, 64 wide, 8 images of 32 x 32": vit,
}


def without_checks(model: Any, given: dict[str, Tensor]) -> None:
    """A step of the compiled program; what it compares is left out."""
    inner = model._whale
    engine = inner.engine
    with (
        patch.object(type(inner.watch), "check", lambda watch: None),
        patch.object(type(inner.attributes), "changes", lambda attributes: Changes()),
        patch.object(type(engine), "_compare", lambda engine, batch, key, what: None),
    ):
        model.train_step(**given)


def main() -> None:
    options = arguments("a step with its checks against one without", repeats=40)
    on_two_ranks()
    rows = []
    for name, build in MODELS.items():
        if options.only not in name:
            continue
        model, given = build()
        model = copy.deepcopy(model)
        whale.annotate(model, {"": whale.replicate()})
        parallel = whale.parallelize(model, given, device="cpu")
        sides = partial(parallel.train_step, **given), partial(without_checks, parallel, given)
        rows.append(side_by_side(name, *sides, repeats=options.repeats, target=1.01).cells())
    head = ("case", "checked", "unchecked", "checked / unchecked", *HEAD[4:])
    report("step_checks", options, table(head, rows))


if __name__ == "__main__":
    main()
