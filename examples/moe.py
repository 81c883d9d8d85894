"""A mixture of experts, as in GShard and M6: attention in data parallel, experts split over the same devices, with an
all-to-all between.

    torchrun --standalone --nproc-per-node 2 examples/moe.py
    torchrun --standalone --nproc-per-node 4 examples/moe.py --experts 8
    python examples/moe.py                                            # alone; the same losses
    python examples/moe.py --params 1T                                # a trillion parameters: compiled, not trained

A router picks two experts for each token. Each expert takes at most `capacity` tokens of a row; the rest pass by on the
residual. Dispatch and combination are einsums over a one-hot mask, so the experts' work is a batched matrix product
whose leading axis is the expert: cutting that axis is expert parallelism, and the all-to-all follows from it.

With `--params` M6's models of 100 billion, 1 trillion and 10 trillion parameters are placed, lowered to the program of
a rank and proved for all ranks in this one process, which allocates none of their tensors.
"""

import argparse
import copy
import resource

import torch
from torch import nn
from torch.nn import functional

import whale
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.predict.peak_memory import peak_memory
from whale.predict.traffic import traffic

M6 = {  # layers, experts of each, their hidden units, and the V100 of 32 GB that trained it; all are 1024 wide
    "100B": (24, 512, 4096, 128),
    "1T": (24, 960, 21248, 480),
    "10T": (48, 10240, 9984, 512),
}


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
    """The routing tensor, with the weight of a token in an expert's queue: [rows, length, experts, capacity]."""

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


def build(vocabulary=64, layers=2, hidden=32, heads=4, experts=4, inner=128, length=16):
    """The annotated model, with room in each expert for its share of the tokens and half as many again."""
    capacity = -(-3 * length // experts)
    model = Model(vocabulary, layers, hidden, heads=heads, experts=experts, inner=inner, capacity=capacity)
    whale.annotate(model, {"": whale.replicate(), "blocks.*.experts": whale.split()})
    return model


def make_batches(steps, rows=8, length=16, vocabulary=64):
    """Sequences that count upwards from a random start; the label is the next number."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = (torch.randint(vocabulary, (rows, 1), generator=generator) + torch.arange(length)) % vocabulary
        yield {"ids": ids, "labels": (ids + 1) % vocabulary}


def train(layers, experts, steps):
    """Train in parallel, and a local copy beside it; whether all losses are the same."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model, batches = build(layers=layers, experts=experts), list(make_batches(steps))
    local = copy.deepcopy(model)
    model = whale.parallelize(model, batches[0])
    optimizers = [torch.optim.AdamW(trained.parameters(), lr=3e-3) for trained in (model, local)]
    equal = True
    for step, batch in enumerate(batches):
        loss, alone = model.train_step(**batch), local(**batch)
        alone.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        equal &= abs(loss.item() - alone.item()) <= 1e-9 * alone.item()
        if model.rank == 0:
            print(f"step {step}: loss {loss.item():.12f}, alone {alone.item():.12f}")
    for name in ("blocks.0.attention.query.weight", "blocks.0.experts.up"):
        print(f"rank {model.rank} of {model.world_size}: {name} is {tuple(model.get_parameter(name).shape)}")
    if model.rank == 0:
        print(f"parity on {model.world_size} ranks: losses {'equal' if equal else 'NOT EQUAL'} to 1e-9")
    return equal


def lower(params, layers, world, length=512):
    """Compile one of M6's models for *world* ranks with a row each, and print the memory, calls and messages of rank
    0."""
    most_layers, experts, inner, devices = M6[params]
    layers, world = layers or most_layers, world or devices
    with torch.device("meta"):
        model = build(50304, layers, 1024, 16, experts, inner, length)
        ids = torch.zeros(world, length, dtype=torch.long)
    compilation = compile_model(
        model, {"ids": ids, "labels": ids}, whale.Cluster.homogeneous(world), Options(), device="cpu", training=True
    )
    compilation.check(0, None)
    whole = sum(p.numel() for p in model.parameters())
    print(f"{whole / 1e9:,.1f} billion parameters in {layers} layers of {experts} experts, on {world} ranks")
    held = peak_memory(compilation, 0, schedule="1f1b", optimizer="sgd")
    sizes = {"parameters": held.parameters, "gradients": held.gradients, "activations": held.activations}
    print("rank 0 holds, in float32 and at the peak of a step:")
    print(*(f"  {name:<12} {size / 2**30:8.2f} GiB" for name, size in sizes.items()), sep="\n")
    print("rank 0 calls in a step:")
    for call in traffic(compilation, 0):
        size = f"{call.tensor_bytes / 2**20:10.3f} MiB over {len(call.ranks)} ranks"
        print(f"  {call.count:4} x {call.op:<14} {size}  {call.purpose}")
    sent = sum(call.sent_bytes for call in traffic(compilation, 0))
    print(f"and sends at least {sent / 2**20:,.1f} MiB")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
    print(f"all {world} ranks meet in every collective; this process took {peak:.2f} GiB")


def main():
    parser = argparse.ArgumentParser(description="mixture of experts")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--layers", type=int, help="2, and as many as M6 has with --params")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--params", choices=list(M6), help="compile this model of M6's and train nothing")
    parser.add_argument("--world", type=int, help="ranks to compile for; as many as M6 was trained on")
    options = parser.parse_args()
    if options.params:
        lower(options.params, options.layers, options.world)
    elif not train(options.layers or 2, options.experts, options.steps):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
