"""Train a GPT in eight settings that take less memory: the same curve, and what each of them frees.

`precision="bf16"` computes as torch.autocast does, over parameters in float32. `recompute=` lets the forward keep
less: losses have the same bits as without. `zero=` divides parameters, gradients and optimizer states among the
replicas, which need two ranks at least. Kept bytes are those between a forward and its backward; state is what is left
between two steps, with the gradients.

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
    "float32, zero 1": {"zero": 1},
    "float32, zero 3": {"zero": 3},
    "bfloat16": {"precision": "bf16"},
    "bfloat16, full": {"precision": "bf16", "recompute": "full"},
    "bfloat16, full, zero 3": {"precision": "bf16", "recompute": "full", "zero": 3},
}


def build():
    """The same weights and tokens on every rank."""
    torch.manual_seed(0)
    return gpt(layers=4, hidden=128, heads=4, seq=64, vocab=256, dropout=0.1, batch_size=8)


def bytes_of(tensors):
    """The bytes of their storages, each once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def kept_bytes(model, batch):
    """The bytes that a step keeps, without parameters."""
    parameters = {x.untyped_storage().data_ptr() for x in model.parameters()}
    kept = []

    def pack(x):
        kept.append(x)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        model.train_step(**batch)
    model.zero_grad()
    return bytes_of(x for x in kept if x.untyped_storage().data_ptr() not in parameters)


def state_bytes(model, optimizer):
    """The bytes of parameters, gradients and optimizer states on this rank."""
    states = [x for of_one in optimizer.state.values() for x in of_one.values()]
    return bytes_of([*model.parameters(), *(p.grad for p in model.parameters()), *states])


def train(settings):
    model, batch = build()
    whale.annotate(model, {"": whale.replicate()})
    model = whale.parallelize(model, batch, seed=0, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    torch.manual_seed(1)  # one process draws dropout from torch's generator
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(model.train_step(**batch).item())
        optimizer.step()
    state = state_bytes(model, optimizer)
    return losses, kept_bytes(model, batch), state, model.rank


found = {name: train(settings) for name, settings in SETTINGS.items()}
plain, most, whole, rank = found["float32"]
if rank == 0:
    for name, (losses, kept, state, _) in found.items():
        print(
            f"{name:23} loss {losses[-1]:.6f}, {kept / 2**20:5.1f} MiB kept ({kept / most:4.0%}), "
            f"{state / 2**20:5.1f} MiB of state ({state / whole:4.0%})"
        )


def near(one, other, tolerance):
    """Whether two curves are."""
    return all(abs(a - b) <= tolerance * a for a, b in zip(found[one][0], found[other][0], strict=True))


same = all(found[f"float32, {rule}"][0] == plain for rule in ("selective", "full"))
same = same and found["bfloat16, full"][0] == found["bfloat16"][0]
divided = near("float32", "float32, zero 1", 1e-6) and near("float32", "float32, zero 3", 1e-6)
low = near("float32", "bfloat16", 0.01) and near("float32", "bfloat16, full, zero 3", 0.01)
if rank == 0:
    print(
        f"recompute: losses {'equal' if same else 'NOT EQUAL'}; zero: {'equal' if divided else 'NOT EQUAL'} to 1e-6; "
        f"bfloat16: {'near' if low else 'NOT NEAR'} float32"
    )
raise SystemExit(0 if same and divided and low else 1)
