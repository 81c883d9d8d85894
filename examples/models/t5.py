"""T5: an encoder and a decoder with relative positions, RMS norms and no biases.

    whale verify --model examples/models/t5.py:t5 --set dropout=0 --set layers=2 --set hidden=64 --set heads=4

The defaults are those of T5-large. ``layers`` are those of the encoder, and as many of the decoder.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

BUCKETS, FURTHEST = 32, 128
"""Distances fall into a number of buckets, wider for larger distances."""


def buckets(length, both_ways, device):
    """Bucket of the distance for each query and key: [length, length]."""
    places = torch.arange(length, device=device)
    distance = places[None, :] - places[:, None]
    count, first = (BUCKETS // 2, (distance > 0) * (BUCKETS // 2)) if both_ways else (BUCKETS, 0)
    distance = distance.abs() if both_ways else (-distance).clamp(min=0)
    near = count // 2
    scale = (count - near) / math.log(FURTHEST / near)
    far = (near + ((distance.clamp(min=1) / near).log() * scale).long()).clamp(max=count - 1)
    return first + torch.where(distance < near, distance, far)


class Attention(nn.Module):
    """Attention of *x* to *source*, with *bias* added to the scores; T5 does not scale them."""

    def __init__(self, hidden, size, heads):
        super().__init__()
        self.size = size
        self.query, self.key, self.value = (nn.Linear(hidden, heads * size, bias=False) for _ in range(3))
        self.output = nn.Linear(heads * size, hidden, bias=False)

    def forward(self, x, source, bias):
        q, k, v = (
            project(y).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for project, y in ((self.query, x), (self.key, source), (self.value, source))
        )
        weights = q @ k.transpose(-1, -2)
        weights = (weights if bias is None else weights + bias).softmax(-1)
        return self.output((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Self-attention, in a decoder attention to the encoder, and a feed-forward."""

    def __init__(self, hidden, ffn, size, heads, dropout, crossed):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm1, self.attention = nn.RMSNorm(hidden, eps=1e-6), Attention(hidden, size, heads)
        if crossed:
            self.norm2, self.cross = nn.RMSNorm(hidden, eps=1e-6), Attention(hidden, size, heads)
        self.norm3 = nn.RMSNorm(hidden, eps=1e-6)
        self.up, self.down = nn.Linear(hidden, ffn, bias=False), nn.Linear(ffn, hidden, bias=False)
        self.crossed = crossed

    def forward(self, x, bias, encoded=None):
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, bias))
        if self.crossed:
            x = x + self.dropout(self.cross(self.norm2(x), encoded, None))
        return x + self.dropout(self.down(self.dropout(F.relu(self.up(self.norm3(x))))))


class T5(nn.Module):
    """A model from one sequence to another that returns its loss; ``labels`` are the target's next tokens."""

    def __init__(self, layers, hidden, ffn, size, heads, vocab, dropout):
        super().__init__()
        self.hidden = hidden
        self.dropout = nn.Dropout(dropout)
        self.tokens = nn.Embedding(vocab, hidden)
        self.encoder_bias, self.decoder_bias = nn.Embedding(BUCKETS, heads), nn.Embedding(BUCKETS, heads)
        self.encoder = nn.ModuleList(Block(hidden, ffn, size, heads, dropout, False) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(hidden, ffn, size, heads, dropout, True) for _ in range(layers))
        self.encoder_norm, self.decoder_norm = nn.RMSNorm(hidden, eps=1e-6), nn.RMSNorm(hidden, eps=1e-6)

    def forward(self, tokens, targets, labels):
        x = self.dropout(self.tokens(tokens))
        bias = self.encoder_bias(buckets(tokens.shape[1], True, x.device)).permute(2, 0, 1)
        for block in self.encoder:
            x = block(x, bias)
        encoded = self.dropout(self.encoder_norm(x))
        x = self.dropout(self.tokens(targets))
        length = targets.shape[1]
        bias = self.decoder_bias(buckets(length, False, x.device)).permute(2, 0, 1)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        bias = bias.masked_fill(future, torch.finfo(x.dtype).min)
        for block in self.decoder:
            x = block(x, bias, encoded)
        x = self.dropout(self.decoder_norm(x)) * self.hidden**-0.5  # the head is tied
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), labels.flatten())


def t5(layers=24, hidden=1024, ffn=None, heads=16, size=None, seq=512, vocab=32128, dropout=0.1, batch_size=4):
    """The model and a batch of random tokens, as many to read as to write.

    ``ffn`` is four times ``hidden``, and ``size``, of a head, ``hidden`` over ``heads``, unless given.
    """
    model = T5(layers, hidden, ffn or 4 * hidden, size or hidden // heads, heads, vocab, dropout)
    tokens, targets = torch.randint(vocab, (batch_size, seq)), torch.randint(vocab, (batch_size, seq + 1))
    return model, {"tokens": tokens, "targets": targets[:, :-1].contiguous(), "labels": targets[:, 1:].contiguous()}
