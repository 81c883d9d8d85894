"""A mixture of experts as in GShard and M6: an expert has a capacity of tokens of a row, and further tokens pass by on
the residual.

    whale verify --model examples/models/gshard.py:gshard --set layers=2 --set hidden=64 --set heads=4 --set seq=16

Tokens are dispatched and combined by einsums over a one-hot mask, so the experts' work is a batched matrix product
whose leading axis is the expert: cutting that axis is expert parallelism, and the all-to-all follows from it.
Attention, norms and embeddings are Llama's.
"""

import torch
from llama import Llama, batch_of
from torch import nn
from torch.nn import functional as F


class Router(nn.Module):
    """The routing tensor: the experts of a token, its place in their queues, and its weight: [rows, length, experts,
    capacity]."""

    def __init__(self, hidden, experts, top_k, capacity):
        super().__init__()
        self.experts, self.top_k, self.capacity = experts, top_k, capacity
        self.gate = nn.Linear(hidden, experts, bias=False)

    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        combine, taken, left = 0.0, torch.zeros_like(gates[:, :1]), gates
        for _ in range(self.top_k):
            choice = F.one_hot(left.argmax(-1), self.experts).to(gates.dtype)
            left = left * (1 - choice)
            place = (choice.cumsum(1) - 1 + taken) * choice
            taken = taken + choice.sum(1, keepdim=True)
            choice = choice * (place < self.capacity)
            slot = F.one_hot(place.sum(-1).long().clamp(max=self.capacity - 1), self.capacity).to(gates.dtype)
            combine = combine + torch.einsum("rle,rlc->rlec", gates * choice, slot)
        return combine


class Experts(nn.Module):
    """Feed-forwards with GELU, one for each expert, as stacked matrices."""

    def __init__(self, hidden, ffn, experts):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, hidden, ffn) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(experts, ffn, hidden) * ffn**-0.5)

    def forward(self, x, combine):
        tokens = torch.einsum("rlec,rlh->erch", (combine > 0).to(x.dtype), x)
        tokens = torch.einsum("erch,ehi->erci", tokens, self.up)
        tokens = torch.einsum("erci,eih->erch", F.gelu(tokens), self.down)
        return torch.einsum("rlec,erch->rlh", combine, tokens)


class Mixture(nn.Module):
    """A router, and the experts that it sends tokens to."""

    def __init__(self, hidden, ffn, experts, top_k, capacity):
        super().__init__()
        self.router = Router(hidden, experts, top_k, capacity)
        self.experts = Experts(hidden, ffn, experts)

    def forward(self, x):
        return self.experts(x, self.router(x))


def gshard(
    layers=24, hidden=1024, ffn=4096, heads=16, experts=32, top_k=2, seq=512, vocab=50304, room=1.5, batch_size=1
):
    """The model and a batch of random tokens. An expert's capacity is ``room`` times its even share of a row."""
    capacity = max(1, round(room * top_k * seq / experts))
    model = Llama(layers, hidden, heads, heads, vocab, 10000.0, lambda: Mixture(hidden, ffn, experts, top_k, capacity))
    return model, batch_of(batch_size, seq, vocab)
