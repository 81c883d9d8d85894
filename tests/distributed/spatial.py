"""Small models in float64 whose activations are cut along a dim, with a batch each: volumes, images and sequences."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Example = tuple[nn.Module, dict[str, Any]]


def convolution(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(inside, outside, 3, padding=1), nn.BatchNorm3d(outside), nn.ReLU())


class UNet3d(nn.Module):
    """Down twice and up twice with skips, batch norm everywhere."""

    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.first, self.second = convolution(1, width), convolution(width, 2 * width)
        self.bottom = convolution(2 * width, 2 * width)
        self.up2 = nn.ConvTranspose3d(2 * width, 2 * width, 2, 2)
        self.back2 = convolution(4 * width, width)
        self.back1 = convolution(2 * width, width)
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, volume: Tensor, labels: Tensor) -> Tensor:
        high = self.first(volume)
        middle = self.second(F.max_pool3d(high, 2))
        low = self.bottom(F.max_pool3d(middle, 2))
        middle = self.back2(torch.cat([self.up2(low), middle], 1))
        high = self.back1(torch.cat([F.interpolate(middle, scale_factor=2.0), high], 1))
        return F.cross_entropy(self.head(high), labels)


def unet3d(rows: int = 1) -> Example:
    volume = torch.randn(rows, 1, 12, 8, 8).double()
    return UNet3d().double(), {"volume": volume, "labels": torch.randint(0, 3, (rows, 12, 8, 8))}


def unet3d_of_two() -> Example:
    return unet3d(2)


class CosmoFlow(nn.Module):
    """Convolutions and poolings of a volume to a few numbers."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        widths = [1, width, 2 * width, 2 * width]
        self.trunk = nn.Sequential()
        for inside, outside in pairwise(widths):
            self.trunk.extend([nn.Conv3d(inside, outside, 3, padding="same"), nn.LeakyReLU(), nn.MaxPool3d(2)])
        self.trunk.append(nn.Flatten())
        self.head = nn.Sequential(nn.Linear(2 * width * 3, 16), nn.LeakyReLU(), nn.Linear(16, 4))

    def forward(self, volume: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.trunk(volume)), targets)


def cosmoflow() -> Example:
    return CosmoFlow().double(), {"volume": torch.randn(2, 1, 24, 8, 8).double(), "targets": torch.randn(2, 4).double()}


class Windows(nn.Module):
    """Windows of many kinds: strided, dilated, grouped, wide, overlapping pools, group and instance norm, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm1 = nn.Conv2d(3, 8, 11, padding=5), nn.GroupNorm(2, 8)
        self.strided, self.norm2 = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.InstanceNorm2d(8, affine=True)
        self.dilated = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4)
        self.shortcut = nn.Conv2d(8, 8, 1, stride=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.wide(x)))
        y = torch.relu(self.norm2(self.strided(y))) + self.shortcut(y)
        y = F.max_pool2d(self.dilated(y), 3, 2, 1) + F.avg_pool2d(y, 3, 2, 1)
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(y, 1).flatten(1)), labels)


def windows() -> Example:
    return Windows().double(), {"x": torch.randn(2, 3, 20, 12).double(), "labels": torch.tensor([1, 3])}


class Block(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.project(y.reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Causal attention by a word, learned positions of a parameter, a tied head."""

    def __init__(self, words: int = 31, length: int = 11, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.words(tokens) + self.positions)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def gpt() -> Example:
    tokens = torch.randint(0, 31, (4, 11))
    labels = tokens.roll(-1, 1)
    labels[0, 5:] = -100
    labels[:, -1] = -100
    return Gpt().double(), {"tokens": tokens, "labels": labels}
