"""Train 3D networks with spatial parallelism: each rank has a slab of every sample and of every activation.

A batch has one row, so there is nothing to replicate: `whale.split(dim=2)` cuts the depth. Before a convolution each
rank gets the edge slices of its neighbours, after it they get back their gradients, and batch norm takes its statistics
over all slabs. The network is plain PyTorch and knows nothing of it.

    torchrun --standalone --nproc-per-node 2 examples/unet3d.py
    torchrun --standalone --nproc-per-node 2 examples/unet3d.py --model cosmoflow
    python examples/unet3d.py                                         # alone; the same losses

Slabs need not be equal: a depth of 20, pooled twice by 2, is 5 times 4 slices, 12 and 8 of them on two ranks.
"""

import argparse
import copy
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

import whale

torch.set_default_dtype(torch.float64)


def convolution(inside, outside):
    return nn.Sequential(nn.Conv3d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm3d(outside), nn.ReLU())


class UNet(nn.Module):
    """Segments a volume: twice down, twice up, with what was there on the way down beside it."""

    def __init__(self, width=8, classes=3):
        super().__init__()
        self.down1, self.down2 = convolution(1, width), convolution(width, 2 * width)
        self.bottom = convolution(2 * width, 4 * width)
        self.raise2, self.raise1 = (nn.ConvTranspose3d(2 * n * width, n * width, 2, stride=2) for n in (2, 1))
        self.up2, self.up1 = convolution(4 * width, 2 * width), convolution(2 * width, width)
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, volume, labels):
        high = self.down1(volume)
        middle = self.down2(F.max_pool3d(high, 2))
        low = self.bottom(F.max_pool3d(middle, 2))
        middle = self.up2(torch.cat([self.raise2(low), middle], 1))
        high = self.up1(torch.cat([self.raise1(middle), high], 1))
        return F.cross_entropy(self.head(high), labels)


class CosmoFlow(nn.Module):
    """Regresses a few numbers that describe a volume, as CosmoFlow (Mathuriya et al. 2018) does for simulated
    universes."""

    def __init__(self, width=8, numbers=4):
        super().__init__()
        widths = [1, width, 2 * width, 4 * width]
        blocks = [(nn.Conv3d(*pair, 3, padding="same"), nn.LeakyReLU(), nn.MaxPool3d(2)) for pair in pairwise(widths)]
        self.trunk = nn.Sequential(*(layer for block in blocks for layer in block))
        self.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(32), nn.LeakyReLU(), nn.Linear(32, numbers))

    def forward(self, volume, numbers):
        return F.mse_loss(self.head(self.trunk(volume)), numbers)


def make(name):
    """A model and batches of one volume each."""
    torch.manual_seed(0)
    if name == "unet":
        shape = (20, 16, 16)
        batches = [{"volume": torch.randn(1, 1, *shape), "labels": torch.randint(3, (1, *shape))} for _ in range(3)]
        return UNet(), batches
    batches = [{"volume": torch.randn(1, 1, 24, 16, 16), "numbers": torch.randn(1, 4)} for _ in range(3)]
    model = CosmoFlow()
    model(**batches[0])  # gives the lazy layer its shape
    return model, batches


def main():
    parser = argparse.ArgumentParser(description="volumes in slabs")
    parser.add_argument("--model", default="unet", choices=["unet", "cosmoflow"])
    options = parser.parse_args()

    model, batches = make(options.model)
    local = copy.deepcopy(model)
    whale.annotate(model, {"": whale.split(dim=2)})
    model = whale.parallelize(model, batches[0])

    optimizers = [torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9) for trained in (model, local)]
    for step, batch in enumerate(batches):
        loss, alone = model.train_step(**batch), local(**batch)
        alone.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if model.rank == 0:
            print(f"step {step}: loss {loss.item():.12f}, alone {alone.item():.12f}")

    state = model.full_state_dict()
    error = max(
        (state[name].cpu() - x).abs().max().item() / x.abs().max().item() for name, x in local.named_parameters()
    )
    equal = error <= 1e-9 and abs(loss.item() - alone.item()) <= 1e-9 * alone.item()
    if model.rank == 0:
        outcome = "equal" if equal else "NOT EQUAL"
        print(f"parity on {model.world_size} ranks: losses and trained weights {outcome} to 1e-9 (found {error:.0e})")
    raise SystemExit(0 if equal else 1)


if __name__ == "__main__":
    main()
