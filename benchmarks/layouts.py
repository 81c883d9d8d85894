"""Models of the prediction and search benchmarks, in all layouts that they run; ``none`` has no annotations, for the
search.

whale plan --model benchmarks/layouts.py:gpt --set layout=pp4 ...
"""

from __future__ import annotations

from typing import Any

import torch
from models import WORDS, batch, gpt2
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

import whale

CLASSES, SIDE = 100, 64


def block(index: int) -> str:
    return f"transformer.h.{index}"


GPT_LAYOUTS: dict[str, dict[str, Any]] = {
    "none": {},
    "dp": {"": whale.replicate()},
    # 2:2:1:1, 3:2:1 and 2:1 are the speeds of the devices
    "pp4": {block(0): whale.stage(), block(3): whale.stage(), block(6): whale.stage(), block(7): whale.stage()},
    "pp3": {block(0): whale.stage(), block(4): whale.stage(), block(7): whale.stage()},
    "pp2": {block(0): whale.stage(), block(5): whale.stage()},
    "dp-pp": {block(0): [whale.stage(2), whale.replicate()], block(5): [whale.stage(2), whale.replicate()]},
}
WIDE_LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"": whale.split()},
    "tp-pp": {block(0): [whale.stage(2), whale.split()], block(1): [whale.stage(2), whale.split()]},
}
RESNET_LAYOUTS: dict[str, dict[str, Any]] = {
    "none": {},
    "dp": {"": whale.replicate()},
    "pp2": {"resnet.embedder": whale.stage(), "resnet.encoder.stages.2": whale.stage()},
}


def gpt(
    layout: str = "dp", layers: int = 8, width: int = 384, heads: int = 6, length: int = 128, batch_size: int = 24
) -> tuple[nn.Module, dict[str, Tensor]]:
    # the activation in one kernel: spelt out, a step waits for memory, which all emulated devices share
    model = gpt2(layers=layers, width=width, length=length, heads=heads, activation="gelu")
    whale.annotate(model, {**GPT_LAYOUTS, **WIDE_LAYOUTS}[layout])
    tokens = torch.randint(WORDS, (batch_size, length))
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def wide(layout: str = "tp", width: int = 1152, length: int = 128) -> tuple[nn.Module, dict[str, Tensor]]:
    """A GPT for tensor parallelism: what is computed between two collectives is long against the slices of time in
    which an emulated device gets its part of a core."""
    return gpt(layout=layout, layers=2, width=width, heads=12, length=length, batch_size=8)


def resnet(layout: str = "dp", side: int = SIDE, batch_size: int = 48) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], layer_type="basic", num_labels=CLASSES
    )
    model = ResNetForImageClassification(config)
    whale.annotate(model, RESNET_LAYOUTS[layout])
    pixels, labels = torch.randn(batch_size, 3, side, side), torch.randint(CLASSES, (batch_size,))
    return model, {"pixel_values": pixels, "labels": labels}


def resnet96(layout: str = "none", side: int = 96) -> tuple[nn.Module, dict[str, Tensor]]:
    """The same on larger pictures, for four devices in a row: a stage that begins after a wait has the rest of its
    period's quota at once, so what it then computes has to be long against that."""
    return resnet(layout=layout, side=side)


def few(layout: str = "dp", width: int = 384, length: int = 128) -> tuple[nn.Module, dict[str, Tensor]]:
    """A GPT with few rows, for many settings of memory."""
    return gpt(layout=layout, width=width, length=length, batch_size=12)


class InBfloat16(GPT2LMHeadModel):
    """A GPT-2 under autocast."""

    def forward(self, **batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(**batch)


def few16(layout: str = "dp", width: int = 384, length: int = 128) -> tuple[nn.Module, dict[str, Tensor]]:
    """The same, computing in bfloat16."""
    model, given = few(layout, width, length)
    model.__class__ = InBfloat16
    return model, given


def large(
    layout: str = "none", layers: int = 6, width: int = 1024, heads: int = 8, length: int = 32, batch_size: int = 8
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A GPT with 1.2 GiB of state and few activations."""
    model = gpt2(layers=layers, width=width, length=length, heads=heads, activation="gelu")
    whale.annotate(model, GPT_LAYOUTS[layout])
    return model, batch(batch_size, length)
