"""AdamW in one pass over memory, on the stretches of the state that each rank owns: the same curve as torch's.

    torchrun --standalone --nproc-per-node 2 examples/fused_adamw.py
    python examples/fused_adamw.py                                    # alone; the same losses

On two ranks each owns half of the state (zero=1), as one stretch of memory that the optimizer updates by one loop. In
the middle the states go into torch's AdamW, which goes on with them. benchmarks/fused_adamw.py measures the step.
"""

import copy

import torch
from torch import nn

import whale

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
generator = torch.Generator().manual_seed(0)
batches = [torch.randn(32, 16, generator=generator) for _ in range(20)]


def loss_fn(output, batch):
    return nn.functional.cross_entropy(output, batch[0][:, :4].argmax(1))


local = copy.deepcopy(model)
model = whale.parallelize(model, batches[0], loss_fn=loss_fn, zero=1)
optimizer = whale.optim.FusedAdamW(model.parameters(), lr=0.01, weight_decay=0.1)
alone = torch.optim.AdamW(local.parameters(), lr=0.01, weight_decay=0.1)
equal = True
for step, batch in enumerate(batches):
    if step == 10:  # either loads the states of the other
        state, optimizer = optimizer.state_dict(), torch.optim.AdamW(model.parameters())
        optimizer.load_state_dict(state)
    loss, expected = model.train_step(batch), loss_fn(local(batch), (batch,))
    expected.backward()
    for own in (optimizer, alone):
        own.step()
        own.zero_grad()
    equal &= abs(loss.item() - expected.item()) <= 1e-9 * expected.item()
    if whale.rank() == 0:
        print(f"step {step}: loss {loss.item():.12f}, alone {expected.item():.12f}")

if whale.rank() == 0:
    print(f"parity on {whale.size()} ranks: losses {'equal' if equal else 'NOT EQUAL'} to 1e-9")
raise SystemExit(0 if equal else 1)
