"""Train an unmodified model with plan="auto": the planner searches for a plan instead of reading annotations.

    torchrun --standalone --nproc-per-node 2 examples/auto_search.py   # or any number; the plan is for what was started
    python examples/auto_search.py                                     # alone; the same losses

`whale search` does the same in advance, for machines described in a file, and shows the candidates.
"""

import argparse
import copy

import torch
from torch import nn

import whale


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, width=64, blocks=4, classes=10):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, classes)

    def forward(self, x, labels):
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


parser = argparse.ArgumentParser(description="A searched plan")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--rows", type=int, default=16, help="of the global batch")
options = parser.parse_args()

torch.manual_seed(0)
model = Classifier().double()
local = copy.deepcopy(model)
features, labels = torch.randn(options.rows, 64).double(), torch.randint(10, (options.rows,))

model = whale.parallelize(model, {"x": features, "labels": labels}, plan="auto")

optimizers = [torch.optim.AdamW(trained.parameters(), lr=1e-3) for trained in (model, local)]
equal = True
for step in range(options.steps):
    loss, alone = model.train_step(x=features, labels=labels), local(features, labels)
    alone.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    equal &= abs(loss.item() - alone.item()) <= 1e-9 * alone.item()
    if model.rank == 0:
        print(f"step {step}: loss {loss.item():.12f}, alone {alone.item():.12f}")

held = sum(p.numel() for p in model.parameters())
print(f"rank {model.rank} of {model.world_size} holds {held} parameters")
if model.rank == 0:
    print(f"parity on {model.world_size} ranks: losses {'equal' if equal else 'NOT EQUAL'} to 1e-9")
raise SystemExit(0 if equal else 1)
