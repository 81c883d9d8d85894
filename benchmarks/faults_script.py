"""The training script that `faults.py` breaks: a small model with AdamW and a loader, saved every second step.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import whale
from tests.distributed import zoo
from tests.distributed.parity import cluster_of
from tests.distributed.resharding import built, stages
from whale.errors import WhaleError

PIPELINED = {"micro_batches": 2}


@dataclass(frozen=True)
class Layout:
    """A model and how it is divided.

    Attributes:
        annotations, options: of `whale.parallelize`.
        ranks: how many.
        model: a family of `built` or a name in the zoo.
        floats: the dtype of parameters.
    """

    annotations: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2
    model: str = "decoder"
    floats: torch.dtype = torch.float64

    def make(self) -> tuple[nn.Module, dict[str, Any]]:
        """The model, with the same weights on every rank, and a batch."""
        torch.manual_seed(0)
        found = built(self.model) if self.model in ("decoder", "experts") else getattr(zoo, self.model)()
        return found[0].to(self.floats), found[1]


def blocks(first: str, last: str) -> dict[str, Any]:
    """Two stages, from these blocks on."""
    return {first: whale.stage(), last: whale.stage()}


ALL: dict[str, Any] = {"": whale.replicate()}
CUT: dict[str, Any] = {"": whale.split()}
UNLIKE = {"cluster": cluster_of((3.0, 1.0))}
LAYOUTS: dict[str, Layout] = {
    "dp": Layout(ALL),
    "dp 3:1": Layout(ALL, UNLIKE),
    "dp, own rows": Layout(ALL, {"batch": "local"}),
    "dp, bf16": Layout(ALL, {"precision": "bf16"}, floats=torch.float32),
    "dp, fp16": Layout(ALL, {"precision": "fp16"}, floats=torch.float32),
    "dp of 3": Layout(ALL, ranks=3),
    "zero 1": Layout(ALL, {"zero": 1}),
    "zero 3": Layout(ALL, {"zero": 3}),
    "zero 3, 3:1": Layout(ALL, {"zero": 3, "state_shares": [3, 1]}),
    "zero 1, state on the host": Layout(ALL, {"zero": 1, "offload": "state"}),
    "dp, activations on the host": Layout(ALL, {"offload": "activations"}),
    "dp, step in backward": Layout(ALL, {"step_in_backward": True}),
    "zero 1, step in backward": Layout(ALL, {"zero": 1, "step_in_backward": True}),
    "tp": Layout(CUT),
    "tp 3:1": Layout(CUT, UNLIKE),
    "pp": Layout(stages(0, 2), PIPELINED),
    "pp, uneven": Layout(stages(0, 3), PIPELINED),
    "pp, interleaved": Layout(stages(0, 1, 2, 3), PIPELINED | {"schedule": "interleaved"}),
    "pp of 1 and 2": Layout(
        {"layers.[0-1]": whale.stage(1), "layers.[2-3]": [whale.stage(2), whale.replicate(2)]}, PIPELINED, ranks=3
    ),
    "pp of 3": Layout(stages(0, 1, 3), {"micro_batches": 4}, ranks=3),
    "dp2 x pp2": Layout({key: [stage, whale.replicate()] for key, stage in stages(0, 2).items()}, PIPELINED, ranks=4),
    "tp2 x pp2": Layout(stages(0, 2, split=True), PIPELINED, ranks=4),
    "dp2 x tp2": Layout({"": [whale.replicate(2), whale.split(2)]}, ranks=4),
    "experts": Layout({"": whale.replicate(), "layers.*.feed_forward": whale.split()}, model="experts"),
    "GPT-2, dropout, dp": Layout(ALL, model="gpt2_with_dropout"),
    "GPT-2, dropout, pp": Layout(blocks("transformer.h.0", "transformer.h.1"), PIPELINED, model="gpt2_with_dropout"),
    "Llama, tp": Layout(CUT, model="llama"),
    "Llama, pp": Layout(blocks("model.layers.0", "model.layers.1"), PIPELINED, model="llama"),
    "T5, tp": Layout(CUT, model="t5"),
    "BERT, zero 2": Layout(ALL, {"zero": 2}, model="bert"),
    "Mixtral, dp": Layout(ALL, model="mixtral"),
    "module called twice, dp": Layout(ALL, model="twice"),
}
CALLS = ("mkdir", "write", "fsync", "rename", "ftruncate")
"""Calls of the system that make a checkpoint."""
COMMUNICATIONS = (
    "allreduce", "allgather", "_allgather_base", "allgather_into_tensor_coalesced", "alltoall", "alltoall_base",
    "broadcast", "reduce_scatter", "_reduce_scatter_base", "send", "recv",
)  # fmt: skip
"""Methods of process groups."""


@dataclass(frozen=True)
class Fault:
    """A fault, which happens once in a run.

    Attributes:
        point: ``init``, ``built``, ``step``, ``communication`` (before number *call* of a step), ``update``, ``during``
            (a step, after *delay* seconds), ``save`` (before call *call* of the system) or ``end``.
        rank: on which rank.
        step: in which step.
        act: ``kill``, ``stop`` (SIGSTOP), ``leave`` (the script ends), ``full`` (no file may grow), ``skip`` (the
            rank leaves out the call that follows).
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
        self._waits = False

    def at(self, point: str, step: int = -1) -> bool:
        """Whether this is the place of the fault; one that kills does not return."""
        fault = self.fault
        if (point, self.process) != (fault.point, fault.rank) or step not in (-1, fault.step) or self.mark.exists():
            return False
        if point == "during":
            threading.Timer(fault.delay, self.act).start()
        elif point == "communication":
            self.count(dist.ProcessGroup, COMMUNICATIONS)
        elif point == "save" and fault.act == "kill":
            self.count(os, CALLS)
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
        elif self.fault.act != "skip":
            os.kill(os.getpid(), signal.SIGKILL if self.fault.act == "kill" else signal.SIGSTOP)

    def waits(self) -> None:
        """Leave a mark with the time when the rank that has left something out comes to what the others do not do."""
        if self.fault.act == "skip" and self.process == self.fault.rank and self.mark.exists() and not self._waits:
            self.mark.write_text(repr(time.time()))
            self._waits = True

    def count(self, owner: Any, names: Iterable[str]) -> None:
        """Act before a call of one of these functions."""
        left = [self.fault.call]

        def counted(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                self.act()
            return call(*arguments, **options)

        for name in names:
            if (own := getattr(owner, name, None)) is not None:
                setattr(owner, name, lambda *a, _own=own, **k: counted(_own, *a, **k))


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A digest of all bits."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


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
    layout = LAYOUTS[options.layout]
    made, example = layout.make()
    whale.annotate(made, layout.annotations)
    model: Any = whale.parallelize(made, example, device="cpu", timeout_seconds=options.timeout, **layout.options)
    trigger.at("built")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=options.steps)
    count = len(next(iter(example.values())))
    data = [{name: rows[i % count].roll(i) for name, rows in example.items()} for i in range(32)]
    loader = whale.shard_dataset(data, model, batch_size=count, shuffle=True, seed=3)
    state = {"optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    runs = options.folder / ("runs" + (str(model.rank) if options.apart else ""))
    done = whale.load_checkpoint(runs, model, **state)
    log = open(options.folder / "log", "a")  # noqa: SIM115  # until the end

    def say(**what: Any) -> None:
        log.write(json.dumps(what) + "\n")
        log.flush()

    step = done.step if done else 0
    if model.rank == 0:
        say(start=step)
    while step < options.steps:
        for batch in loader:
            trigger.at("during", step)
            trigger.at("communication", step)
            if not trigger.at("step", step):
                loss = model.train_step(**batch)
            if not trigger.at("update", step):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if model.rank == 0:
                say(step=step, loss=loss.item())
            step += 1
            if step % 2 == 0 and not (trigger.at("save", step) and trigger.fault.act == "skip"):
                trigger.waits()
                whale.save_checkpoint(runs, model, step=step, asynchronous=not options.synchronous, **state)
            if step == options.steps:
                break
    trigger.waits()
    whale.wait_for_checkpoints()
    if not trigger.at("end"):
        whole = model.full_state_dict()
        states = {f"{i}.{k}": x for i, s in enumerate(optimizer.state.values()) for k, x in s.items()}
        own = digest({name: x if isinstance(x, Tensor) else torch.tensor(x) for name, x in states.items()})
        say(**{f"optimizer of rank {model.rank}": own, f"draw of rank {model.rank}": torch.rand(()).item()})
        if model.rank == 0:
            say(weights=digest(whole))


if __name__ == "__main__":
    try:
        main()
    except WhaleError as error:
        sys.stderr.write(f"at {time.time():.3f}: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)
