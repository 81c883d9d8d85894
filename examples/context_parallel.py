"""Causal attention on a sequence that is cut over the ranks, in three ways, and what a rank keeps in each.

    torchrun --standalone --nproc-per-node 2 examples/context_parallel.py
    torchrun --standalone --nproc-per-node 4 examples/context_parallel.py --length 2048

The length need not be a multiple of the ranks.
"""

import argparse
import copy

import torch
from torch import nn
from torch.nn import functional as F

import whale


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x):  # eight heads share four keys
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (16, -1)).transpose(1, 2).split([8, 4, 4], 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, words=50, width=64):
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))

    def forward(self, tokens, labels):
        return F.cross_entropy(self.head(self.blocks(self.words(tokens))).flatten(0, 1), labels.flatten())


parser = argparse.ArgumentParser()
parser.add_argument("--length", type=int, default=512)
tokens = torch.randint(50, (2, parser.parse_args().length), generator=torch.manual_seed(0))
local, batch = Model().double(), {"tokens": tokens, "labels": tokens.roll(-1, 1)}
expected = local(**batch)
for attention in ("gather", "ring", "ulysses"):
    model, kept = copy.deepcopy(local), {}
    whale.annotate(model, {"": whale.split(dim=1, attention=attention)})
    model = whale.parallelize(model, batch)

    def keep(x, kept=kept):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model.train_step(**batch)
    size = sum(kept.values()) / 2**20
    if model.rank == 0:
        print(f"{attention:7} loss {loss.item():.12f}, alone {expected.item():.12f}: keeps {size:.2f} MiB on a rank")
    assert abs(loss - expected) < 1e-9
