"""A training loop of one's own, as scripts for Horovod have it, with the collectives of Whale and their gradients.

    torchrun --standalone --nproc-per-node 2 examples/collectives.py
    python examples/collectives.py                                    # alone; the same losses

Each rank encodes its rows of a batch, of which ranks have different numbers, and gathers those of all: the contrastive
loss compares every row with every other one. docs/tutorials/from-horovod.md maps Horovod's calls to these.
"""

import copy

import torch
from torch import nn

import whale

torch.set_default_dtype(torch.float64)
whale.init()
torch.manual_seed(whale.rank())  # ranks start with other values, and take those of rank 0
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
whale.broadcast_parameters(model)
whale.broadcast_optimizer_state(optimizer)
local = copy.deepcopy(model)
alone = torch.optim.Adam(local.parameters(), lr=0.02)


def contrastive(features):
    """Rows 2 i and 2 i + 1 belong together; all others do not."""
    scores = nn.functional.normalize(features) @ nn.functional.normalize(features).T / 0.2
    scores = scores.masked_fill(torch.eye(len(features), dtype=torch.bool), -torch.inf)
    return nn.functional.cross_entropy(scores, torch.arange(len(features)) ^ 1)


generator = torch.Generator().manual_seed(0)
shares = [32 // whale.size() + 4 * (r == 0) for r in range(whale.size())]  # the first rank has four rows more
shares[-1] = 32 - sum(shares[:-1])
equal = True
for step in range(30):
    pairs = torch.randn(16, 8, generator=generator).repeat_interleave(2, 0)
    rows = pairs + 0.3 * torch.randn(32, 8, generator=generator)
    features = whale.all_gather(model(rows.split(shares)[whale.rank()]))
    loss = contrastive(features)  # the same on every rank: the gradients are those of the sum of these losses
    (loss / whale.size()).backward()
    for parameter in model.parameters():
        parameter.grad = whale.all_reduce(parameter.grad)
    expected = contrastive(local(rows))
    expected.backward()
    equal &= abs(loss.item() - expected.item()) <= 1e-9 * expected.item()
    for own in (optimizer, alone):
        own.step()
        own.zero_grad()
    if whale.rank() == 0:
        print(f"step {step}: loss {loss.item():.12f}, alone {expected.item():.12f}")

if whale.rank() == 0:
    print(f"parity on {whale.size()} ranks: losses {'equal' if equal else 'NOT EQUAL'} to 1e-9; rows {shares}")
raise SystemExit(0 if equal else 1)
