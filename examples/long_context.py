"""Train a GPT on one long sequence that is split over the ranks along its length.

Activations grow with the length of a sequence, and one sequence cannot be shared as a batch is. `whale.split(dim=1)`
cuts it: tokens, positions, norms, projections and the loss are computed for a rank's own rows. Only attention looks
back: queries stay, and keys and values go round the ranks (`context_parallel.py` shows other ways). Parameters are
whole, their gradients summed. The model is plain PyTorch and knows nothing of it.

    torchrun --standalone --nproc-per-node 2 examples/long_context.py
    torchrun --standalone --nproc-per-node 4 examples/long_context.py --length 2000
    python examples/long_context.py                                   # alone; the same losses

The length need not be a multiple of the ranks.
"""

import argparse
import copy
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

import whale

torch.set_default_dtype(torch.float64)


class Block(nn.Module):
    """Causal attention, then a feed-forward, each added to the residual stream."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, length, words=64, width=64, heads=4, blocks=2):
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens, labels):
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_batch(length, words=64):
    """A sequence that counts in steps; each label is the next token, those of a prompt and the last are ignored."""
    tokens = (7 * torch.arange(length)[None] + torch.arange(length)[None] // 9) % words
    labels = tokens.roll(-1, 1)
    labels[:, : length // 10] = -100
    labels[:, -1] = -100
    return {"tokens": tokens, "labels": labels}


@contextmanager
def kept(model):
    """Bytes of saved activations by address, without parameters."""
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in owned:
            sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield sizes


parser = argparse.ArgumentParser(description="one long sequence over all ranks")
parser.add_argument("--length", type=int, default=501)
parser.add_argument("--steps", type=int, default=3)
options = parser.parse_args()

torch.manual_seed(0)
model, batch = GPT(options.length), make_batch(options.length)
local = copy.deepcopy(model)
whale.annotate(model, {"": whale.split(dim=1)})
model = whale.parallelize(model, batch)

optimizers = [torch.optim.AdamW(trained.parameters(), lr=1e-3) for trained in (model, local)]
for step in range(options.steps):
    with kept(model) as part:
        loss = model.train_step(**batch)
    with kept(local) as whole:
        alone = local(**batch)
        alone.backward()
    if step == 0:  # before Adam, which enlarges what rounding leaves of a gradient that is zero
        gradients = model.full_gradients()
        error = max(
            (gradients[name].cpu() - p.grad).abs().max().item() / p.grad.abs().max().item()
            for name, p in local.named_parameters()
        )
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if model.rank == 0:
        print(f"step {step}: loss {loss.item():.12f}, alone {alone.item():.12f}")

kibibytes = [sum(sizes.values()) / 1024 for sizes in (part, whole)]
print(
    "rank {} of {} keeps {:.0f} KiB of activations, alone {:.0f} KiB".format(model.rank, model.world_size, *kibibytes)
)
equal = error <= 1e-9 and abs(loss.item() - alone.item()) <= 1e-9 * alone.item()
if model.rank == 0:
    outcome = "equal" if equal else "NOT EQUAL"
    print(f"parity on {model.world_size} ranks: losses and gradients {outcome} to 1e-9 (found {error:.0e})")
raise SystemExit(0 if equal else 1)
