"""ResNet: bottleneck blocks of convolutions and batch norms, and Wide-ResNet by a setting.

    whale verify --model examples/models/resnet.py:resnet --set layers=14 --set classes=10 --set size=32

``layers`` are 50, 101 or 152, or 14 or 26 for tests: one or two blocks where there are more. ``width`` multiplies the
channels inside blocks: 2 is Wide-ResNet-50-2.
"""

import torch
from torch import nn
from torch.nn import functional as F

BLOCKS = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


class Normed(nn.Module):
    """A convolution and a batch norm."""

    def __init__(self, inside, outside, kernel, stride=1):
        super().__init__()
        self.convolution = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outside)

    def forward(self, x):
        return self.norm(self.convolution(x))


class Bottleneck(nn.Module):
    """Three convolutions and the way around them."""

    def __init__(self, inside, inner, outside, stride):
        super().__init__()
        self.narrow, self.spatial = Normed(inside, inner, 1), Normed(inner, inner, 3, stride)
        self.widen = Normed(inner, outside, 1)
        self.around = Normed(inside, outside, 1, stride) if stride > 1 or inside != outside else nn.Identity()

    def forward(self, x):
        y = F.relu(self.spatial(F.relu(self.narrow(x))))
        return F.relu(self.widen(y) + self.around(x))


class ResNet(nn.Module):
    """A classifier of images that returns its loss."""

    def __init__(self, layers, width, classes):
        super().__init__()
        self.stem = Normed(3, 64, 7, 2)
        blocks, inside = [], 64
        for stage, count in enumerate(BLOCKS[layers]):
            outside = 256 * 2**stage
            for index in range(count):
                stride = 2 if index == 0 and stage else 1
                blocks.append(Bottleneck(inside, int(width * outside / 4), outside, stride))
                inside = outside
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(inside, classes)

    def forward(self, images, labels):
        x = F.max_pool2d(F.relu(self.stem(images)), 3, 2, 1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def resnet(layers=50, width=1, classes=1000, size=224, batch_size=32):
    """The model and a batch of random square images, ``size`` pixels wide."""
    images = torch.randn(batch_size, 3, size, size)
    return ResNet(layers, width, classes), {"images": images, "labels": torch.randint(classes, (batch_size,))}
