"""CosmoFlow: 3D convolutions that regress a few numbers from a simulated universe (Mathuriya et al. 2018).

    whale search --model examples/models/cosmoflow.py:cosmoflow --set size=512 --cluster gpus.toml --batch 8

A convolution and a pooling halve each side until it is 4. The defaults are MLPerf HPC's, with 128 voxels a side; Oyama
et al. (2020) train on 512, of which one volume's activations take more than most GPUs have.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F


class CosmoFlow(nn.Module):
    """Returns the mean squared error of its numbers; with *norm*, each convolution has a batch norm."""

    def __init__(self, size, width, most, channels, numbers, dropout, norm):
        super().__init__()
        num = (size // 4).bit_length() - 1
        widths = [channels, *(min(width << place, most) for place in range(num))]
        self.blocks = nn.ModuleList()
        for inside, outside in pairwise(widths):
            parts = [nn.Conv3d(inside, outside, 3, padding=1, bias=not norm)]
            parts += [nn.BatchNorm3d(outside)] if norm else []
            self.blocks.append(nn.Sequential(*parts, nn.LeakyReLU(0.3), nn.MaxPool3d(2)))
        self.head = nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(widths[-1] * 64, 128), nn.LeakyReLU(0.3), nn.Dropout(dropout)),
            *(nn.Linear(128, 64), nn.LeakyReLU(0.3), nn.Dropout(dropout)),
            nn.Linear(64, numbers),
        )

    def forward(self, volume, numbers):
        for block in self.blocks:
            volume = block(volume)
        return F.mse_loss(self.head(volume), numbers)


def cosmoflow(
    size=128, width=32, most=512, channels=4, numbers=4, dropout=0.0, norm=False, batch_size=4
):  # fmt: skip
    """A model and a batch of random volumes; *size* voxels a side, a power of two from 8."""
    model = CosmoFlow(size, width, most, channels, numbers, dropout, norm)
    volume = torch.randn(batch_size, channels, size, size, size)
    return model, {"volume": volume, "numbers": torch.rand(batch_size, numbers)}
