"""A step of `faults.py` in which one rank alone has gradients that are not finite: ``faults_numbers.py nan|inf RANK
LAYOUT``."""

from __future__ import annotations

import sys

import torch
from torch import nn

import whale

value, rank, layout = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
if layout == "zero":
    whale.annotate(net, {"": whale.replicate(zero=2)})
x = torch.randn(8, 8)
model = whale.parallelize(
    net, x, loss_fn=lambda y, _: y.float().square().mean(), device="cpu", precision="fp16", batch="local"
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scaler = model.loss_scaler
assert scaler is not None
(first, last), *_ = model.batch_share(8)
own = x[first:last]
model.train_step(own)
optimizer.step()
optimizer.zero_grad()
before = [p.detach().clone() for p in model.parameters()]
moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
scale = scaler.scale
bad = own.clone()
if model.rank == rank:
    bad[0, 0] = float(value)
model.train_step(bad)
optimizer.step()
optimizer.zero_grad()
same = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
same &= all(torch.equal(s["exp_avg"], old) for s, old in zip(optimizer.state.values(), moments, strict=True))
print("skipped alike;" if same and scaler.scale == scale / 2 else f"{same} {scaler.scale} of {scale};", flush=True)
