"""A classifier with 100,000 classes: a ResNet in data parallel, the classifier split by class over the same devices.

    torchrun --standalone --nproc-per-node 2 examples/classification_100k.py
    torchrun --nproc-per-node 8 examples/classification_100k.py --classes 100000 --layers 50 --size 224 --dtype float32
    python examples/classification_100k.py                            # alone; the same losses

The classifier has nearly all parameters, the ResNet nearly all computation. Data parallelism would sum the gradients of
all parameters over the network at every step. Here the classifier's never travel: features go to every rank (rows x
2048 numbers, and as many back as gradients), each computes its own classes, and logits never leave the rank that
computed them. No rank ever makes more of the classifier than it owns. `benchmarks/hybrid_examples.py` measures it
against DistributedDataParallel.
"""

import argparse

import torch
from models.resnet import ResNet

import whale


def build(layers, classes):
    """The annotated local model: replicated, except for the head."""
    model = ResNet(layers, width=1, classes=classes)
    whale.annotate(model, {"": whale.replicate(), "head": whale.split()})
    return model


def make_batch(rows, size, classes):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(rows, 3, size, size, generator=generator)
    return {"images": images, "labels": torch.randint(classes, (rows,), generator=generator)}


def train(model, step, steps):
    """The losses of some steps; *step* is a forward and a backward."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(steps):
        losses.append(step().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main():
    parser = argparse.ArgumentParser(description="replicated ResNet, split classifier")
    parser.add_argument("--classes", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=14, help="of the ResNet: 14, 26, 50, 101 or 152")
    parser.add_argument("--size", type=int, default=32, help="of the images")
    parser.add_argument("--rows", type=int, default=16, help="of the global batch")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    options = parser.parse_args()
    torch.set_default_dtype(getattr(torch, options.dtype))
    batch = make_batch(options.rows, options.size, options.classes)

    torch.manual_seed(0)
    model = whale.parallelize(lambda: build(options.layers, options.classes), batch)
    losses = train(model, lambda: model.train_step(**batch), options.steps)
    print(f"rank {model.rank} of {model.world_size}: head.weight is {tuple(model.get_parameter('head.weight').shape)}")
    if model.rank > 0:
        return

    torch.manual_seed(0)
    local = build(options.layers, options.classes)

    def step():
        loss = local(**batch)
        loss.backward()
        return loss

    alone = train(local, step, options.steps)
    for index, pair in enumerate(zip(losses, alone, strict=True)):
        print("step {}: loss {:.12f}, alone {:.12f}".format(index, *pair))
    bound = {"float64": 1e-9, "float32": 1e-4}[options.dtype]
    equal = all(abs(a - b) <= bound * b for a, b in zip(losses, alone, strict=True))
    print(f"parity on {model.world_size} ranks: losses {'equal' if equal else 'NOT EQUAL'} to {bound}")
    raise SystemExit(0 if equal else 1)


if __name__ == "__main__":
    main()
