"""A small convolutional network and a small vision transformer learn digits with the same losses on any number of
ranks.

    torchrun --standalone --nproc-per-node 2 examples/mnist.py
    torchrun --standalone --nproc-per-node 4 examples/mnist.py
    python examples/mnist.py                                          # alone; the same curves

The digits are drawn here: three by five dots, enlarged, put somewhere near the middle, under noise. A batch has 32 of
them whatever the number of ranks, so each step has the same loss, up to the rounding of float64. Batch norm takes
its statistics over all 32, as on one device. `python benchmarks/learning_curves.py` draws the curves of 1, 2 and 4
ranks: docs/images/learning_curves.svg.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import whale

torch.set_default_dtype(torch.float64)

# Five rows of three bits for each digit.
FONT = ("75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717")


def draw_digits(count, generator):
    """Images of 16 x 16 with a digit of 6 x 10 each, and which digits they are."""
    dots = torch.tensor([[[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in digit] for digit in FONT])
    glyphs = dots.repeat_interleave(2, 1).repeat_interleave(2, 2)
    images = 0.2 * torch.randn(count, 1, 16, 16, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    tops, lefts = (2 + torch.randint(most, (count,), generator=generator) for most in (3, 5))
    for image, label, top, left in zip(images, labels, tops, lefts, strict=True):
        image[0, top : top + 10, left : left + 6] += glyphs[label]
    return {"images": images, "labels": labels}


class ConvolutionalNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        )
        self.head = nn.Linear(512, 10)

    def forward(self, images, labels):
        return F.cross_entropy(self.head(self.features(images)), labels)


class Block(nn.Module):
    """Attention, then a feed-forward, each added to the residual stream."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.project(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Sixteen patches of 4 x 4 dots."""

    def __init__(self, width=32, blocks=2, heads=4):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.head = nn.Linear(16 * width, 10)

    def forward(self, images, labels):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return F.cross_entropy(self.head(self.blocks(x).flatten(1)), labels)


EXPERIMENTS = (
    ("convolutional", ConvolutionalNetwork, {"": whale.replicate()}),
    ("transformer", VisionTransformer, {"": whale.replicate(), "blocks.*": whale.split()}),
)
generator = torch.Generator().manual_seed(0)
batches = [draw_digits(32, generator) for _ in range(60)]
equal = True
for name, build, annotations in EXPERIMENTS:
    torch.manual_seed(0)
    model = build()
    local = copy.deepcopy(model)
    whale.annotate(model, annotations)
    model = whale.parallelize(model, batches[0])
    optimizers = [torch.optim.Adam(trained.parameters(), lr=3e-3) for trained in (model, local)]
    for step, batch in enumerate(batches):
        loss, alone = model.train_step(**batch), local(**batch)
        alone.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        equal &= abs(loss.item() - alone.item()) <= 1e-9 * alone.item()
        if model.rank == 0:
            print(f"{name}, step {step}: loss {loss.item():.15f}, alone {alone.item():.15f}")

if model.rank == 0:
    print(f"parity on {model.world_size} ranks: losses {'equal' if equal else 'NOT EQUAL'} to 1e-9")
raise SystemExit(0 if equal else 1)
