"""A job that goes on with the machines that are there: each time it searches a plan for their devices, loads its newest
checkpoint, and keeps its global batch and its curve.

    whale run --elastic 3:4 --endpoint node0:29400 examples/elastic.py --directory runs/a   # on each machine
    whale run --processes 2 examples/elastic.py
    python examples/elastic.py

With --cluster FILE devices are those of a cluster file that names all machines that may come; without it they are
detected. The losses of all attempts are compared with those of one process.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from models.gpt import gpt

import whale


def build():
    """The same weights on every rank, in float64 and without dropout, so that losses can be compared."""
    torch.manual_seed(0)
    return gpt(layers=4, hidden=32, heads=4, seq=16, vocab=64, dropout=0.0, batch_size=8)[0].double()


def batch(step):
    """The global batch of a step."""
    tokens = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens, "labels": tokens.clone()}


def optimizer_of(model):
    if arguments.sgd:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def alone():
    model = build()
    optimizer = optimizer_of(model)
    for step in range(arguments.steps):
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--directory", type=Path, help="of checkpoints and losses [a temporary one of this run]")
parser.add_argument("--cluster", metavar="FILE", help="all machines that may come [those that are there, detected]")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--every", type=int, default=2, metavar="STEPS", help="between checkpoints")
parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="after each step, to see what happens")
parser.add_argument("--sgd", action="store_true", help="train with SGD and not with AdamW")
arguments = parser.parse_args()
run = os.environ.get("TORCHELASTIC_RUN_ID", str(os.getpid()))
runs = arguments.directory or Path(tempfile.gettempdir()) / f"whale-elastic-{run}"

began = time.time()
model = whale.parallelize(
    build(),
    batch(0),
    plan="auto",
    plan_cache=runs / "plans",  # devices that were there before have their plan at once
    cluster=arguments.cluster,
    device="cpu",
    timeout_seconds=60,
)
searched = time.time()
optimizer = optimizer_of(model)
size = whale.BatchSize(8)  # it stays; with other rows the learning rate would follow
state = {"optimizer": optimizer, "size": size}
done = whale.load_checkpoint(runs, model, **state)
size.follow(optimizer)
first = done.step if done else 0


def note(**what):
    """Keep what a rank saw, over all attempts."""
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / "log.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")


times = {"began": began, "search": searched - began, "load": time.time() - searched}
held = sum(parameter.numel() for parameter in model.parameters())
note(ranks=model.world_size, rank=model.rank, first=first, parameters=held, **times)
for step in range(first, arguments.steps):
    loss = model.train_step(**batch(step))
    optimizer.step()
    optimizer.zero_grad()
    if model.rank == 0:
        note(step=step, loss=loss.item(), time=time.time())
    if (step + 1) % arguments.every == 0:
        whale.save_checkpoint(runs, model, step=step + 1, keep=2, **state)
    time.sleep(arguments.pause)
whale.wait_for_checkpoints()

if model.rank == 0:
    found = [json.loads(line) for line in (runs / "log.jsonl").read_text().splitlines()]
    local = list(alone())
    worst = max(abs(one["loss"] - local[one["step"]]) / local[one["step"]] for one in found if "loss" in one)
    for one in found:
        if "loss" in one:
            print(f"step {one['step']}: loss {one['loss']:.12f}")
        else:
            print(f"rank {one['rank']} of {one['ranks']} has {one['parameters']} parameters, from step {one['first']}")
    print(f"largest difference from one process: {worst:.1e}")
    if arguments.directory is None:
        shutil.rmtree(runs)
    raise SystemExit(0 if worst <= (1e-12 if arguments.sgd else 1e-9) else 1)
