"""Train a GPT in bfloat16, and with activations that are computed again: less memory, the same curve.

Each setting trains the same model with the same batches. `precision="bf16"` computes as torch.autocast does, over
parameters in float32. `recompute=` lets the forward keep less: losses have the same bits as without. Bytes are those
that a step keeps between its forward and its backward.

    torchrun --standalone --nproc-per-node 2 examples/low_memory.py
    python examples/low_memory.py                                     # alone
"""

import torch
from models.gpt import gpt
from torch.autograd.graph import saved_tensors_hooks

import whale

STEPS = 5
SETTINGS = {
    "float32": {},
    "float32, selective": {"recompute": "selective"},
    "float32, full": {"recompute": "full"},
    "bfloat16": {"precision": "bf16"},
    "bfloat16, selective": {"precision": "bf16", "recompute": "selective"},
    "bfloat16, full": {"precision": "bf16", "recompute": "full"},
}


def build():
    """The same weights and tokens on every rank."""
    torch.manual_seed(0)
    return gpt(layers=4, hidden=128, heads=4, seq=64, vocab=256, dropout=0.1, batch_size=8)


def kept_bytes(model, batch):
    """The bytes that a step keeps, each storage once, without parameters."""
    parameters = {x.untyped_storage().data_ptr() for x in model.parameters()}
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        model.train_step(**batch)
    model.zero_grad()
    return sum(size for address, size in storages.items() if address not in parameters)


def train(settings):
    model, batch = build()
    whale.annotate(model, {"": whale.replicate()})
    model = whale.parallelize(model, batch, seed=0, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    torch.manual_seed(1)  # one process draws dropout from torch's generator
    for _ in range(STEPS):
        losses.append(model.train_step(**batch).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, kept_bytes(model, batch), model.rank


found = {name: train(settings) for name, settings in SETTINGS.items()}
plain, most, rank = found["float32"]
if rank == 0:
    for name, (losses, kept, _) in found.items():
        print(f"{name:20} loss {losses[-1]:.6f}, {kept / 2**20:5.1f} MiB kept ({kept / most:.0%})")
same = all(
    found[f"{kind}, {rule}"][0] == found[kind][0] for kind in ("float32", "bfloat16") for rule in ("selective", "full")
)
near = all(abs(a - b) <= 0.01 * a for a, b in zip(plain, found["bfloat16"][0], strict=True))
if rank == 0:
    print(f"recompute: losses {'equal' if same else 'NOT EQUAL'}; bfloat16: {'near' if near else 'NOT NEAR'} float32")
raise SystemExit(0 if same and near else 1)
