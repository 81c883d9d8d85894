"""Predicted against counted peaks of a rank's memory: GPT-2 and Llama on two ranks in 40 settings, with AdamW.

Settings differ in layout, precision, recompute, division of state, what is on the host, schedule, micro-batches, and
whether the optimizer steps in the backward. A prediction is the dry run of the compiled step on shapes, as ``whale
plan`` makes it; counted are the live bytes of a real step that is not the first, operator by operator, without what
would be in the host's memory. The error is that of the rank where it is larger; a prediction must not be below.

Bytes do not depend on the load of the machine.
"""

from __future__ import annotations

import statistics
from itertools import cycle
from typing import Any

import torch.distributed as dist
from harness import arguments, on_two_ranks, over_ranks, report, table
from live_bytes import LiveBytes, hosted_left_out, living, peak_of
from models import batch, gpt2, llama
from torch import nn
from torch.optim import AdamW

import whale
from whale.compile.compile import Options, compile_model
from whale.ir.cluster import Cluster
from whale.ir.state import StateSharding
from whale.predict.peak_memory import peak_memory

MEAN, BELOW = 0.02, 0.0
"""The largest mean error, and the largest by which a prediction may be below."""

ROWS, LENGTH = 8, 32
BLOCKS = {"gpt2": "transformer.h", "llama": "model.layers"}
REPLICAS: list[dict[str, Any]] = [
    {},
    {"recompute": "selective"},
    {"recompute": "full", "micro_batches": 2},
    {"zero": 1},
    {"zero": 1, "micro_batches": 2, "recompute": "selective"},
    {"zero": 2, "micro_batches": 4},
    {"zero": 2, "state_shares": [3, 1], "recompute": "full"},
    {"zero": 3},
    {"zero": 3, "micro_batches": 2, "recompute": "full"},
    {"zero": 3, "state_shares": [1, 3], "recompute": "selective"},
    {"offload": "activations"},
    {"offload": "activations", "recompute": "full", "micro_batches": 2},
    {"offload": "state", "zero": 1},
    {"offload": "state", "zero": 3, "recompute": "full"},
    {"offload": "both", "zero": 2, "micro_batches": 2},
    {"step_in_backward": True},
    {"step_in_backward": True, "zero": 3, "recompute": "full"},
    {"gradient_dtype": "bf16", "recompute": "full"},
]
TENSORS: list[dict[str, Any]] = [
    {},
    {"micro_batches": 2, "recompute": "selective"},
    {"recompute": "full", "step_in_backward": True},
    {"offload": "activations"},
    {"offload": "state", "zero": 3, "recompute": "full"},
]
STAGES: list[dict[str, Any]] = [
    {"micro_batches": 4},
    {"micro_batches": 4, "schedule": "gpipe", "recompute": "full"},
    {"micro_batches": 4, "schedule": "zero_bubble"},
    {"micro_batches": 4, "schedule": "zero_bubble", "recompute": "selective", "step_in_backward": True},
    {"micro_batches": 4, "offload": "activations"},
    {"micro_batches": 2, "offload": "state", "zero": 3},
    {"micro_batches": 8, "recompute": "full"},
]
LOW: list[tuple[str, dict[str, Any]]] = [
    ("replicate", {}),
    ("replicate", {"zero": 3, "recompute": "full"}),
    ("replicate", {"zero": 1, "micro_batches": 2}),
    ("replicate", {"offload": "both", "zero": 1, "recompute": "selective"}),
    ("split", {"micro_batches": 2}),
    ("split", {"recompute": "full"}),
    ("stage", {"micro_batches": 4, "recompute": "selective"}),
    ("stage", {"micro_batches": 4, "schedule": "zero_bubble"}),
    ("stage", {"micro_batches": 4}),
    ("replicate", {"recompute": "full", "gradient_dtype": "bf16"}),
]
"""In bfloat16."""


def settings() -> list[tuple[str, str, dict[str, Any]]]:
    """Model, layout and options; models take turns."""
    chosen = [("replicate", options) for options in REPLICAS] + [("split", options) for options in TENSORS]
    chosen += [("stage", options) for options in STAGES]
    chosen += [(layout, options | {"precision": "bf16"}) for layout, options in LOW]
    return [(model, *one) for model, one in zip(cycle(BLOCKS), chosen, strict=False)]


def annotated(name: str, layout: str) -> nn.Module:
    made = gpt2(width=128, layers=4) if name == "gpt2" else llama(width=128, layers=4, words=1024)
    halves = {f"{BLOCKS[name]}.0": whale.stage(), f"{BLOCKS[name]}.2": whale.stage()}
    whale.annotate(made, {"replicate": {"": whale.replicate()}, "split": {"": whale.split()}, "stage": halves}[layout])
    return made


def counted(name: str, layout: str, options: dict[str, Any]) -> int:
    """The peak of this rank in a step that is not the first."""
    others, given = frozenset(living()), batch(ROWS, LENGTH)
    parallel = whale.parallelize(annotated(name, layout), given, device="cpu", **options)
    hosts_state = options.get("offload") in ("state", "both")
    if hosts_state:
        others |= {parameter.untyped_storage()._cdata for parameter in parallel.parameters()}
    # the optimizer of the host writes to what is left out, which would be counted then
    update = AdamW(parallel.parameters()).step if not hosts_state else lambda: None

    def step() -> None:
        parallel.train_step(**given)
        update()
        parallel.zero_grad()

    with LiveBytes(others) as live, hosted_left_out(live):
        return peak_of(step, live)


def predicted(name: str, layout: str, options: dict[str, Any]) -> int:
    """The same of the compiled step, of which nothing runs."""
    given = dict(options)
    level, shares = given.pop("zero", None), tuple(given.pop("state_shares", ()))
    state = StateSharding(level, shares) if level else None
    chosen, cluster = Options(state=state, **given), Cluster.homogeneous(2)
    found = compile_model(annotated(name, layout), batch(ROWS, LENGTH), cluster, chosen, device="cpu", training=True)
    return peak_memory(found, dist.get_rank(), schedule=chosen.schedule).total


def main() -> None:
    options = arguments("predicted against counted bytes of a step's peak")
    on_two_ranks()
    rows, errors, least = [], [], 0.0
    for name, layout, given in settings():
        text = ", ".join(f"{key}={value}" for key, value in given.items())
        case = f"{name}, {layout}{', ' * bool(text)}{text}"
        if options.only not in case:
            continue
        bytes_, said = counted(name, layout, given), predicted(name, layout, given)
        error = said / bytes_ - 1
        most = over_ranks(error, dist.ReduceOp.MAX)
        low = over_ranks(error, dist.ReduceOp.MIN)
        worst = low if abs(low) > most else most
        peaks = [over_ranks(float(size), dist.ReduceOp.MAX) for size in (bytes_, said)]
        errors.append(abs(worst))
        least = min(least, low)
        rows.append([case, *(f"{size / 2**20:.2f} MiB" for size in peaks), f"{worst:+.2%}"])
        if not dist.get_rank():
            print(rows[-1], flush=True)
    found = f"{len(rows)} settings: mean error {statistics.mean(errors):.2%} (asked {MEAN:.0%}), largest "
    found += f"{max(errors):.2%}; farthest below {least:.2%} (asked {BELOW:.0%})"
    report("memory_predictions", options, table(["setting", "counted", "predicted", "error"], rows) + "\n\n" + found)


if __name__ == "__main__":
    main()
