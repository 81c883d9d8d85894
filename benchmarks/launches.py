"""The host's time for a kernel in Whale's executor and in plain torch: models with tensors of a few bytes.

    python benchmarks/launches.py

What a kernel computes takes next to no time at these sizes, so that the time of a step, over the kernels that the cost
model counts in it, is about the time in which the host launches one, views between kernels included. A GPU adds a call
of its driver. `whale.planner.cost.calibration` has the figure as ``executor_launch_seconds``.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import arguments, report, table

import whale
from whale.cli.model_loader import load_model
from whale.ir.profile import ModelProfile
from whale.strategies.profile import profile_model

MODELS = Path(__file__).parents[1] / "examples" / "models"
CASES: dict[str, dict[str, Any]] = {
    "gpt": {"hidden": 16, "layers": 24, "heads": 2, "seq": 8, "vocab": 32},
    "llama": {"hidden": 16, "layers": 16, "heads": 2, "kv_heads": 1, "ffn": 32, "seq": 8, "vocab": 32},
}


def kernels_of(profile: ModelProfile) -> float:
    """Kernels of a forward and a backward."""
    variants = [profile.kinds[kind].variants[0] for kind in profile.layers]
    return sum(kernel.count for variant in variants for kernel in (*variant.forward, *variant.backward))


def seconds(step: Callable[[], object], repeats: int) -> float:
    """The median of steps."""
    taken = []
    for _ in range(repeats + 3):
        begin = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[3:])


def main() -> None:
    options = arguments("the host's time for a kernel")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for name, sizes in CASES.items():
        loaded = load_model(f"{MODELS / f'{name}.py'}:{name}", sizes, batch_size=1)
        count = kernels_of(profile_model(loaded.model, loaded.batch, tensor_degrees=[1], precision="bf16"))
        plain = copy.deepcopy(loaded.model)
        parallel = whale.parallelize(loaded.model, loaded.batch, device="cpu", precision="bf16")

        def own(parallel: Any = parallel, batch: Any = loaded.batch) -> None:
            parallel.zero_grad()
            parallel.train_step(**batch)

        def torch_step(plain: Any = plain, batch: Any = loaded.batch) -> None:
            plain.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = plain(**batch)
            loss.backward()

        found = [seconds(step, max(options.repeats, 15)) for step in (own, torch_step)]
        rows.append([name, f"{count:.0f}", *(f"{1e3 * x:.1f} ms, {1e6 * x / count:.1f} us each" for x in found)])
    report("launches", options, table(["model", "kernels", "whale", "torch"], rows))


if __name__ == "__main__":
    main()
