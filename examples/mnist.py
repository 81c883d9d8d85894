"""A small convolutional network and a small vision transformer learn digits with the same losses on any number of
ranks, and with other ones after two mistakes that are often made.

    torchrun --standalone --nproc-per-node 2 examples/mnist.py
    torchrun --standalone --nproc-per-node 4 examples/mnist.py
    python examples/mnist.py                                          # alone; the same curves
    python examples/mnist.py --curves                                 # 1, 2 and 4 ranks side by side, and the mistakes
    python examples/mnist.py --curves --data ~/mnist                  # on the digits of MNIST

The digits are drawn here: three by five dots, enlarged, put somewhere near the middle, under noise; or, with --data,
those of MNIST: train-images-idx3-ubyte and train-labels-idx1-ubyte, also .gz, in a folder. A batch has 32 of them
whatever the number of ranks, so each step has the same loss, up to the rounding of float64. Batch norm takes its
statistics over all 32, as on one device. `python benchmarks/learning_curves.py` draws the curves of 1, 2 and 4 ranks:
docs/images/learning_curves.svg.
"""

import argparse
import copy
import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import whale

torch.set_default_dtype(torch.float64)
ROWS = 32

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


def read_idx(folder, name, dims):
    """The bytes of a file in the format IDX, whose header says how many there are along each of its dims."""
    found = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if not found:
        raise SystemExit(f"{folder} has neither {name} nor {name}.gz")
    data = found[0].read_bytes()
    try:
        data = gzip.decompress(data) if found[0].suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise SystemExit(f"{found[0]} is damaged, or no gzip file: {error}") from error
    magic, start = 0x800 + dims, 4 + 4 * dims  # 8: unsigned bytes
    if len(data) < start or struct.unpack(">i", data[:4])[0] != magic:
        raise SystemExit(f"{found[0]} is no IDX file of bytes with {dims} dims: it begins with {data[:4].hex()}")
    shape = struct.unpack(f">{dims}i", data[4:start])
    if min(shape) < 1 or len(data) - start != math.prod(shape):
        raise SystemExit(f"{found[0]} has {len(data) - start} bytes after its header, which says {shape}")
    return torch.frombuffer(bytearray(data[start:]), dtype=torch.uint8).view(shape)


def read_digits(folder, steps, generator):
    """Batches of MNIST, in a random order."""
    images, labels = read_idx(folder, "train-images-idx3-ubyte", 3), read_idx(folder, "train-labels-idx1-ubyte", 1)
    if len(images) != len(labels) or labels.max() > 9 or images.shape[1] != images.shape[2] or images.shape[1] % 4:
        raise SystemExit(f"{folder} has images {tuple(images.shape)} and {len(labels)} labels up to {labels.max()}")
    images = ((images.double() / 255 - 0.1307) / 0.3081).unsqueeze(1)  # mean and deviation of MNIST's training set
    order = torch.cat(
        [torch.randperm(len(images), generator=generator) for _ in range(-(-steps * ROWS // len(images)))]
    )
    return [{"images": images[rows], "labels": labels[rows].long()} for rows in order.split(ROWS)[:steps]]


class ConvolutionalNetwork(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        )
        self.head = nn.Linear(32 * (size // 4) ** 2, 10)

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
    """Patches of 4 x 4 dots."""

    def __init__(self, size, width=32, blocks=2, heads=4):
        super().__init__()
        patches = (size // 4) ** 2
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(patches, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.head = nn.Linear(patches * width, 10)

    def forward(self, images, labels):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return F.cross_entropy(self.head(self.blocks(x).flatten(1)), labels)


EXPERIMENTS = {
    "convolutional": (ConvolutionalNetwork, {"": whale.replicate()}),
    "transformer": (VisionTransformer, {"": whale.replicate(), "blocks.*": whale.split()}),
}


def built(name, batches):
    torch.manual_seed(0)
    return EXPERIMENTS[name][0](batches[0]["images"].shape[-1])


def train(name, batches, show=False):
    """The losses of a network on the ranks of this launch, and whether they are those of one device."""
    model = built(name, batches)
    local, equal, losses = copy.deepcopy(model), True, []
    whale.annotate(model, EXPERIMENTS[name][1])
    model = whale.parallelize(model, batches[0])
    optimizers = [torch.optim.Adam(trained.parameters(), lr=3e-3) for trained in (model, local)]
    for step, batch in enumerate(batches):
        loss, alone = model.train_step(**batch), local(**batch)
        alone.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        equal &= abs(loss.item() - alone.item()) <= 1e-9 * alone.item()
        if show and whale.rank() == 0:
            print(f"{name}, step {step}: loss {loss.item():.15f}, alone {alone.item():.15f}")
    return losses, equal


def train_by_hand(batches, shares, weight):
    """The losses of the transformer where rank r takes the mean loss of its own shares[r] rows, and gradients are added
    up with a weight: what ranks do together, in one process."""
    model = built("transformer", batches)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9), []
    for batch in batches:
        with torch.no_grad():
            losses.append(model(**batch).item())
        pieces = zip(batch["images"].split(shares), batch["labels"].split(shares), strict=True)
        for images, labels in pieces:
            (weight(len(images)) * model(images, labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def show_curves(batches, ranks):
    for name in EXPERIMENTS:
        found = {n: whale.launch(train, name, batches, processes=n)[0] for n in ranks}
        print(f"{name} network, Adam, a global batch of {ROWS} on any number of ranks:")
        print("  step" + "".join(f"{n:5} rank{'s' if n > 1 else ' '}" for n in ranks))
        for step in range(0, len(batches), max(1, len(batches) // 12)):
            print(f"  {step:4}" + "".join(f"{losses[step]:11.6f}" for losses in found.values()))
        first, *others = found.values()
        unlike = max((abs(a / b - 1) for losses in others for a, b in zip(losses, first, strict=True)), default=0)
        print(f"  largest difference from those of {ranks[0]}: {unlike:.0e}\n")
    even, uneven = [8, 8, 8, 8], [20, 4, 4, 4]
    curves = {
        "right": train_by_hand(batches, uneven, lambda rows: rows / ROWS),
        "sum of losses": train_by_hand(batches, even, lambda rows: 1),
        "mean of gradients": train_by_hand(batches, uneven, lambda rows: 1 / 4),
    }
    print("transformer, SGD, on 4 ranks that each take the mean loss of their own rows:")
    print("  step  " + "".join(f"{name:>19}" for name in curves))
    for step in range(0, len(batches), max(1, len(batches) // 12)):
        print(f"  {step:4}  " + "".join(f"{losses[step]:19.6f}" for losses in curves.values()))
    print(
        """
right: each rank's gradient counts by its rows, rows / 32; the sum is the gradient of the mean over all 32.
sum of losses: gradients of 8 rows each are added up as they are. The sum is 4 times the gradient of the mean, for 4
    ranks: as a learning rate 4 times as large, and another one on each number of ranks. Adam divides by the
    gradient's size, and so hides it, until gradients are clipped or weight decay counts.
mean of gradients: ranks have 20, 4, 4 and 4 rows, as with unequal devices, or at the end of the data, and their
    gradients are averaged, as DistributedDataParallel and Horovod do. A row on a small rank then counts 5 times as
    much as one on the first, so that the step is that of another loss. It is right only where all have as many rows.
train_step of a parallel model has the right one: its loss is a sum over a count that all ranks share."""
    )


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", type=Path, help="folder with MNIST's two training files; by default digits are drawn")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument(
    "--curves", type=int, nargs="*", help="curves of these numbers of ranks, 1, 2 and 4, and of mistakes"
)
options = parser.parse_args()
if options.steps < 1:
    parser.error(f"--steps {options.steps}: at least 1")
generator = torch.Generator().manual_seed(0)
if options.data is None:
    batches = [draw_digits(ROWS, generator) for _ in range(options.steps)]
else:
    batches = read_digits(options.data, options.steps, generator)
if options.curves is not None:
    show_curves(batches, options.curves or [1, 2, 4])
    raise SystemExit(0)
found = {name: train(name, batches, show=True) for name in EXPERIMENTS}
equal = all(same for _, same in found.values())
if whale.rank() == 0:
    print(f"parity on {whale.size()} ranks: losses {'equal' if equal else 'NOT EQUAL'} to 1e-9")
raise SystemExit(0 if equal else 1)
