"""Llama: a decoder with rotary positions, RMS norms, SwiGLU and grouped-query attention.

    whale verify --model examples/models/llama.py:llama --set layers=2 --set hidden=64 --set heads=4 --set seq=16

The defaults are those of Llama 3 8B; build that on the meta device.
"""

import torch
from torch import nn
from torch.nn import functional as F


def rotary(length, size, base, like):
    """Cosines and sines of every position and pair of features: two tensors of [length, size]."""
    frequencies = base ** (-torch.arange(0, size, 2, device=like.device) / size)
    angles = torch.outer(torch.arange(length, device=like.device), frequencies).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention in which groups of query heads share a head of keys and values."""

    def __init__(self, hidden, heads, kv_heads):
        super().__init__()
        self.size = hidden // heads
        self.query, self.output = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, kv_heads * self.size, bias=False)
        self.value = nn.Linear(hidden, kv_heads * self.size, bias=False)

    def forward(self, x, cos, sin):
        rows, length, hidden = x.shape
        q, k, v = (
            project(x).view(rows, length, -1, self.size).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(y.transpose(1, 2).reshape(rows, length, hidden))


class SwiGLU(nn.Module):
    """A feed-forward with a gate."""

    def __init__(self, hidden, ffn):
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then *feed_forward*, each on a normalised input and added to the residual stream."""

    def __init__(self, hidden, heads, kv_heads, feed_forward):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.attention, self.feed_forward = Attention(hidden, heads, kv_heads), feed_forward

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    """A language model that returns its loss; ``labels`` are the next tokens."""

    def __init__(self, layers, hidden, heads, kv_heads, vocab, base, feed_forward):
        super().__init__()
        self.size, self.base = hidden // heads, base
        self.tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, kv_heads, feed_forward()) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens, labels):
        x = self.tokens(tokens)
        cos, sin = rotary(tokens.shape[1], self.size, self.base, like=x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def batch_of(rows, seq, vocab):
    tokens = torch.randint(vocab, (rows, seq + 1))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def llama(
    layers=32, hidden=4096, ffn=None, heads=32, kv_heads=None, seq=8192, vocab=128256, base=500000.0, batch_size=1
):
    """The model and a batch of random tokens.

    ``ffn`` is 3.5 times ``hidden`` and ``kv_heads`` a quarter of ``heads`` unless given; ``base`` is that of the
    rotary frequencies.
    """
    ffn, kv_heads = ffn or 7 * hidden // 2, kv_heads or max(heads // 4, 1)
    model = Llama(layers, hidden, heads, kv_heads, vocab, base, lambda: SwiGLU(hidden, ffn))
    return model, batch_of(batch_size, seq, vocab)
