"""GPT: a decoder with learned positions, pre-norm blocks, GELU and a tied head, as GPT-2 and Megatron train it.

    whale verify --model examples/models/gpt.py:gpt --set dropout=0 --set layers=2 --set hidden=64 --set heads=4

The defaults are GPT-2's (124M), with a vocabulary that eight devices can share evenly.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention, then a feed-forward, each on a normalised input and added to the residual stream."""

    def __init__(self, hidden, ffn, heads, kv_heads, dropout):
        super().__init__()
        self.heads, self.kv_heads, self.dropout = heads, kv_heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        shared = kv_heads * (hidden // heads)
        self.widths = hidden if shared == hidden else [hidden, shared, shared]
        self.qkv, self.project = nn.Linear(hidden, hidden + 2 * shared), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def attention(self, x):
        rows, length, hidden = x.shape
        counts = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (
            part.view(rows, length, count, -1).transpose(1, 2)
            for part, count in zip(self.qkv(x).split(self.widths, dim=-1), counts, strict=True)
        )
        dropout = self.dropout if self.training else 0.0
        grouped = self.kv_heads < self.heads
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
        return self.project(y.transpose(1, 2).reshape(rows, length, hidden))

    def forward(self, x):
        x = x + F.dropout(self.attention(self.norm1(x)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """A language model that returns its loss; ``labels`` are the next tokens."""

    def __init__(self, layers, hidden, ffn, heads, kv_heads, seq, vocab, dropout):
        super().__init__()
        self.dropout = dropout
        self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
        self.layers = nn.ModuleList(Block(hidden, ffn, heads, kv_heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        for weight in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, labels):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = F.dropout(x, self.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def gpt(layers=12, hidden=768, ffn=None, heads=12, kv_heads=None, seq=1024, vocab=50304, dropout=0.1, batch_size=4):
    """The model and a batch of random tokens.

    ``ffn`` is four times ``hidden`` and ``kv_heads``, those of keys and values, as many as ``heads`` unless given.
    """
    model = GPT(layers, hidden, ffn or 4 * hidden, heads, kv_heads or heads, seq, vocab, dropout)
    tokens = torch.randint(vocab, (batch_size, seq + 1))
    return model, {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
