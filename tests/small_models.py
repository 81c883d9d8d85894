"""Small models for tests of what is around a model: annotations, devices, errors. In float64, with their own loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 32


class Block(nn.Module):
    """Attention and feed-forward, with residual sums."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        query, key, value = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, *, width: int = 16, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def decoder(**sizes: int) -> Decoder:
    """A decoder with the same weights on every rank."""
    torch.manual_seed(0)
    return Decoder(**sizes).double()


def tokens(rows: int = 8, length: int = 6) -> dict[str, Tensor]:
    """A batch for a decoder, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(WORDS, (2, rows, length), generator=generator)
    return {"tokens": drawn[0], "labels": drawn[1]}
