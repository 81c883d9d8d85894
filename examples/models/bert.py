"""BERT: an encoder with post-norm blocks that predicts masked tokens.

    whale verify --model examples/models/bert.py:bert --set dropout=0 --set layers=2 --set hidden=64 --set heads=4

The defaults are those of BERT-large, with a vocabulary that eight devices can share evenly.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention, then a feed-forward, each added to its input and normalised."""

    def __init__(self, hidden, ffn, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.project = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def attention(self, x):
        rows, length, hidden = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(hidden, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.project(y.transpose(1, 2).reshape(rows, length, hidden))

    def forward(self, x):
        x = self.norm1(x + F.dropout(self.attention(x), self.dropout, self.training))
        return self.norm2(x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training))


class Bert(nn.Module):
    """A masked language model that returns its loss; ``labels`` are -100 where nothing is masked."""

    def __init__(self, layers, hidden, ffn, heads, seq, vocab, dropout):
        super().__init__()
        self.dropout = dropout
        self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.layers = nn.ModuleList(Block(hidden, ffn, heads, dropout) for _ in range(layers))
        self.transform, self.head_norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab)
        for weight in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, labels):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = F.dropout(self.norm(x), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        x = self.head_norm(F.gelu(self.transform(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def bert(layers=24, hidden=1024, ffn=None, heads=16, seq=512, vocab=30528, dropout=0.1, batch_size=4):
    """The model and a batch of random tokens, of which every seventh is to be predicted.

    ``ffn`` is four times ``hidden`` unless given.
    """
    model = Bert(layers, hidden, ffn or 4 * hidden, heads, seq, vocab, dropout)
    tokens = torch.randint(vocab, (batch_size, seq))
    masked = torch.arange(seq) % 7 == 3
    return model, {"tokens": tokens.masked_fill(masked, 0), "labels": tokens.masked_fill(~masked, -100)}
