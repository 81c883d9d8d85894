"""A mixture of experts, as GShard writes it: attention in data parallel, each device with its own experts.

A router picks two experts for each token. Each expert takes at most `capacity` tokens of a row; the rest pass by on the
residual. Dispatch and combination are einsums over a one-hot mask, so the experts' work is a batched matrix product
whose leading axis is the expert: cutting that axis is expert parallelism, and the all-to-all follows from it.

    torchrun --nproc-per-node 2 examples/moe.py
    torchrun --nproc-per-node 4 examples/moe.py --experts 8
    python examples/moe.py                                            # alone; the same losses
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

import whale


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x):
        rows, length, hidden = x.shape
        y = self.norm(x)
        q, k, v = (
            project(y).view(rows, length, self.heads, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.output(y.transpose(1, 2).reshape(rows, length, hidden))


class Router(nn.Module):
    """Which experts take a token, and with what weight: [rows, length, experts, capacity]."""

    def __init__(self, hidden, experts, capacity):
        super().__init__()
        self.experts, self.capacity = experts, capacity
        self.gate = nn.Linear(hidden, experts, bias=False)

    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        combine = 0.0
        taken = torch.zeros_like(gates[:, :1])  # how many tokens of the row each expert has already
        left = gates
        for _ in range(2):
            choice = functional.one_hot(left.argmax(-1), self.experts).to(gates.dtype)
            left = left * (1 - choice)
            place = (choice.cumsum(1) - 1 + taken) * choice  # the token's place in its expert's queue
            taken = taken + choice.sum(1, keepdim=True)
            choice = choice * (place < self.capacity)
            slot = functional.one_hot(place.sum(-1).long().clamp(max=self.capacity - 1), self.capacity)
            combine = combine + torch.einsum("rle,rlc->rlec", gates * choice, slot.to(gates.dtype))
        return combine


class Experts(nn.Module):
    """Feed-forward networks, one for each expert, as batched matrices."""

    def __init__(self, experts, hidden, inner):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, hidden, inner) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, hidden) / inner**0.5)

    def forward(self, x, combine):
        dispatch = (combine > 0).to(x.dtype)
        tokens = torch.einsum("rlec,rlh->erch", dispatch, x)
        tokens = torch.einsum("erch,ehi->erci", tokens, self.up)
        tokens = torch.einsum("erci,eih->erch", functional.gelu(tokens), self.down)
        return torch.einsum("rlec,erch->rlh", combine, tokens)


class Block(nn.Module):
    """Attention, then experts."""

    def __init__(self, hidden, heads, experts, inner, capacity):
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.norm = nn.LayerNorm(hidden)
        self.router = Router(hidden, experts, capacity)
        self.experts = Experts(experts, hidden, inner)

    def forward(self, x):
        x = self.attention(x)
        y = self.norm(x)
        return x + self.experts(y, self.router(y))


class Model(nn.Module):
    """A language model of such blocks."""

    def __init__(self, vocabulary, layers, hidden, **block):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, **block) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build(vocabulary=64, layers=2, hidden=32, heads=4, experts=4, length=16):
    """The model, with room in each expert for its share of the tokens and half as many again."""
    torch.manual_seed(0)
    capacity = 3 * length // experts
    return Model(vocabulary, layers, hidden, heads=heads, experts=experts, inner=4 * hidden, capacity=capacity)


def make_batches(steps, rows=8, length=16, vocabulary=64):
    """Sequences that count upwards from a random start; the label is the next number."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = (torch.randint(vocabulary, (rows, 1), generator=generator) + torch.arange(length)) % vocabulary
        yield {"ids": ids, "labels": (ids + 1) % vocabulary}


def main():
    parser = argparse.ArgumentParser(description="mixture of experts")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    model = build(layers=options.layers, experts=options.experts)
    batches = list(make_batches(options.steps))
    whale.annotate(model, {"": whale.replicate(), "blocks.*.experts": whale.split()})
    model = whale.parallelize(model, batches[0])

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, batch in enumerate(batches):
        loss = model.train_step(**batch)
        optimizer.step()
        optimizer.zero_grad()
        if model.rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    for name in ("blocks.0.attention.query.weight", "blocks.0.experts.up"):
        print(f"rank {model.rank} of {model.world_size}: {name} is {tuple(model.get_parameter(name).shape)}")


if __name__ == "__main__":
    main()
