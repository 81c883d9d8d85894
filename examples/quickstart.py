"""Train a small GPT-2 alone and in parallel, from the same seed, and compare the losses.

    torchrun --standalone --nproc-per-node 2 examples/quickstart.py        # or: python examples/quickstart.py

Both functions train; they differ in the three lines with numbers.
"""

import os

import torch
from models.gpt import gpt

import whale


def build():
    """The same weights and tokens on every rank; in float64 and without dropout, so that losses can be compared."""
    torch.manual_seed(0)
    model, batch = gpt(layers=2, hidden=64, heads=4, seq=32, vocab=128, dropout=0.0, batch_size=8)
    return model.double(), batch


def train_alone():
    (model, batch), losses = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(10):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_in_parallel():
    (model, batch), losses = build(), []
    whale.annotate(model, {"": whale.replicate()})  # 1: data parallel; whale.split() would be tensor parallel
    model = whale.parallelize(model, batch)  # 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(10):
        loss = model.train_step(**batch)  # 3: forward and backward of the whole batch
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


local, parallel = train_alone(), train_in_parallel()
equal = all(abs(a - b) <= 1e-9 * a for a, b in zip(local, parallel, strict=True))
if os.environ.get("RANK", "0") == "0":
    print(*(f"loss {a:.12f} alone, {b:.12f} in parallel" for a, b in zip(local, parallel, strict=True)), sep="\n")
    print(f"parity on {os.environ.get('WORLD_SIZE', '1')} ranks: losses {'equal' if equal else 'NOT EQUAL'} to 1e-9")
raise SystemExit(0 if equal else 1)
