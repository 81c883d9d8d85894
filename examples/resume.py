"""A run that loses a rank while it trains, and goes on from its last checkpoint with the same curve; then under another
plan.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/resume.py --crash 5
    python examples/resume.py                                  # or without a crash; under torchrun, too

Every second step is saved, while the next one runs. With --crash 5 the last rank kills itself before step 5, at the
first attempt: torchrun starts all ranks again, which load the newest checkpoint. At the end the checkpoint of step 4 is
loaded into a model that is divided in another way, whose last steps are compared, too.
"""

import argparse
import os
import shutil
import signal
import tempfile
from pathlib import Path

import torch
from models.gpt import gpt

import whale

STEPS, EVERY = 8, 2


def build():
    """The same weights and tokens on every rank; in float64 and without dropout, so that losses can be compared."""
    torch.manual_seed(0)
    model, batch = gpt(layers=2, hidden=32, heads=4, seq=16, vocab=64, dropout=0.0, batch_size=8)
    return model.double(), batch


def parallel(layout):
    model, batch = build()
    whale.annotate(model, layout)
    model = whale.parallelize(model, batch, device="cpu", timeout_seconds=60)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, batch, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


def train(model, batch, optimizer, scheduler, first, last, after=lambda step: None):
    losses = {}
    for step in range(first, last):
        loss = model.train_step(**batch)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses[step] = loss.item()
        after(step + 1)
    return losses


def alone():
    model, batch = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    losses = {}
    for step in range(STEPS):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses[step] = loss.item()
    return losses


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--crash", type=int, default=STEPS + 1, metavar="STEP", help="lose a rank before this step")
arguments = parser.parse_args()
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
run = os.environ.get("TORCHELASTIC_RUN_ID", str(os.getpid()))
runs = Path(tempfile.gettempdir()) / f"whale-resume-{run}"

model, batch, optimizer, scheduler = parallel({"": whale.split()})
state = {"optimizer": optimizer, "scheduler": scheduler}
done = whale.load_checkpoint(runs, model, **state)
first = done.step if done else 0


def save(step):
    if step % EVERY == 0:
        whale.save_checkpoint(runs, model, step=step, keep=4, **state)
    if step == arguments.crash and attempt == 0 and model.rank == model.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)


losses = train(model, batch, optimizer, scheduler, first, STEPS, save)
whale.wait_for_checkpoints()

model, batch, optimizer, scheduler = parallel({"": whale.replicate(zero=1)} if model.world_size > 1 else {})
whale.load_checkpoint(runs, model, step=4, optimizer=optimizer, scheduler=scheduler)
others = train(model, batch, optimizer, scheduler, 4, STEPS)

local = alone()
equal = all(abs(found[step] - local[step]) <= 1e-9 * local[step] for found in (losses, others) for step in found)
if model.rank == 0:
    print(f"attempt {attempt + 1} began at step {first}")
    print(*(f"step {step}: loss {losses[step]:.12f}, alone {local[step]:.12f}" for step in losses), sep="\n")
    print(f"curves after the load, and under another plan: {'equal' if equal else 'NOT EQUAL'} to 1e-9")
    shutil.rmtree(runs)
raise SystemExit(0 if equal else 1)
