"""The training script that `faults.py` breaks: a small decoder with AdamW and a loader, saved every second step.

It continues from its newest checkpoint. ``--fault`` says what happens once, on which rank and where: see `Fault`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import whale
from tests.small_models import decoder, tokens
from whale.errors import WhaleError

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp": ({"": whale.replicate()}, {}),
    "tp": ({"": whale.split()}, {}),
    "pp": ({"layers.0": whale.stage(), "layers.1": whale.stage()}, {"micro_batches": 2}),
    "zero": ({"": whale.replicate(zero=3)}, {}),
}
CALLS = ("mkdir", "write", "fsync", "rename", "ftruncate")
"""Calls of the system that make a checkpoint."""


@dataclass(frozen=True)
class Fault:
    """A fault, which happens once in a run.

    Attributes:
        point: ``init``, ``built``, ``step``, ``update``, ``during`` (a step, after *delay* seconds) or ``save`` (before
            call *call* of the system).
        rank: on which rank.
        step: in which step.
        act: ``kill``, ``stop`` (SIGSTOP), ``leave`` (the script ends), ``full`` (no file may grow).
    """

    point: str = ""
    rank: int = 0
    step: int = 0
    act: str = "kill"
    delay: float = 0.0
    call: int = 0


class Trigger:
    """Lets a fault happen on its rank, once for all attempts."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self.mark = fault, folder / "happened"
        self.process = int(os.environ["RANK"])

    def at(self, point: str, step: int = -1) -> bool:
        """Whether this is the place of the fault; one that kills does not return."""
        fault = self.fault
        if (point, self.process) != (fault.point, fault.rank) or step not in (-1, fault.step) or self.mark.exists():
            return False
        if point == "during":
            threading.Timer(fault.delay, self.act).start()
        elif point == "save" and fault.act != "full":
            self.count()
        else:
            self.act()
        return True

    def act(self) -> None:
        """Do it, and leave a mark with the time."""
        self.mark.write_text(repr(time.time()))
        if self.fault.act == "full":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        elif self.fault.act == "leave":
            sys.stdout.flush()
            os._exit(0)
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.fault.act == "kill" else signal.SIGSTOP)

    def count(self) -> None:
        """Act before a call of the system."""
        left = [self.fault.call]

        def counted(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                self.act()
            return call(*arguments, **options)

        for name in CALLS:
            own = getattr(os, name)
            setattr(os, name, lambda *a, _own=own, **k: counted(_own, *a, **k))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layout", choices=LAYOUTS, default="dp")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--fault", default="{}")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--synchronous", action="store_true")
    parser.add_argument("--apart", action="store_true", help="each rank saves to a folder of its own")
    options = parser.parse_args()
    trigger = Trigger(Fault(**json.loads(options.fault)), options.folder)
    trigger.at("init")
    layout, given = LAYOUTS[options.layout]
    model: Any = decoder(layers=2)
    whale.annotate(model, layout)
    model = whale.parallelize(model, tokens(), device="cpu", timeout_seconds=options.timeout, **given)
    trigger.at("built")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [{name: rows[0] for name, rows in tokens(rows=1 + i).items()} for i in range(32)]
    loader = whale.shard_dataset(data, model, batch_size=8, shuffle=True, seed=3)
    state = {"optimizer": optimizer, "loader": loader}
    runs = options.folder / ("runs" + (str(model.rank) if options.apart else ""))
    done = whale.load_checkpoint(runs, model, **state)
    log = open(options.folder / "log", "a")  # noqa: SIM115  # until the end

    def say(**what: Any) -> None:
        if model.rank == 0:
            log.write(json.dumps(what) + "\n")
            log.flush()

    step = done.step if done else 0
    say(start=step)
    while step < options.steps:
        for batch in loader:
            trigger.at("during", step)
            trigger.at("step", step)
            loss = model.train_step(**batch)
            trigger.at("update", step)
            optimizer.step()
            optimizer.zero_grad()
            say(step=step, loss=loss.item())
            step += 1
            if step % 2 == 0:
                trigger.at("save", step)
                whale.save_checkpoint(runs, model, step=step, asynchronous=not options.synchronous, **state)
            if step == options.steps:
                break
    whale.wait_for_checkpoints()
    whole = model.full_state_dict()
    digest = hashlib.sha256(b"".join(whole[name].numpy().tobytes() for name in sorted(whole))).hexdigest()
    say(weights=digest, draw=torch.rand(()).item())


if __name__ == "__main__":
    try:
        main()
    except WhaleError as error:
        sys.stderr.write(f"at {time.time():.3f}: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)
