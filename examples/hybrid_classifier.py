"""A classifier with very many classes: the trunk in data parallel, the head cut over the same devices by class.

The head has nearly all parameters and the trunk nearly all computation. Data parallelism alone would sum the head's
gradients over the network at every step; here no rank holds more than its part of the head, features go there instead,
and logits never leave the rank that computes them.

    torchrun --nproc-per-node 2 examples/hybrid_classifier.py
    torchrun --nproc-per-node 4 examples/hybrid_classifier.py --classes 100000
    python examples/hybrid_classifier.py                              # alone; the same losses
"""

import argparse

import torch
from torch import nn

import whale


class Classifier(nn.Module):
    """A small convolutional trunk and a linear head."""

    def __init__(self, features, classes):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(256, features),
        )
        self.head = nn.Linear(features, classes)

    def forward(self, images, labels):
        return nn.functional.cross_entropy(self.head(self.trunk(images)), labels)


def make_batches(steps, rows, classes):
    """A few images with labels, again and again."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(rows, 3, 16, 16, generator=generator)
    labels = torch.randint(classes, (rows,), generator=generator)
    return [{"images": images, "labels": labels}] * steps


parser = argparse.ArgumentParser(description="replicated trunk, split head")
parser.add_argument("--features", type=int, default=128)
parser.add_argument("--classes", type=int, default=20_000)
parser.add_argument("--rows", type=int, default=16, help="of the global batch")
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()

torch.manual_seed(0)
model = Classifier(options.features, options.classes)
batches = make_batches(options.steps, options.rows, options.classes)

whale.annotate(model, {"trunk": whale.replicate(), "head": whale.split()})
model = whale.parallelize(model, batches[0])

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, batch in enumerate(batches):
    loss = model.train_step(**batch)
    optimizer.step()
    optimizer.zero_grad()
    if model.rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")

for name in ("trunk.7.weight", "head.weight"):
    print(f"rank {model.rank} of {model.world_size}: {name} is {tuple(model.get_parameter(name).shape)}")
