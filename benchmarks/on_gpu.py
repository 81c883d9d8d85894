"""Steps of models on one GPU: plain torch and Whale, their time and memory, and the peak that Whale predicts.

    PYTHONPATH=. python benchmarks/on_gpu.py                     # all cases, each in a process of its own
    PYTHONPATH=. python benchmarks/on_gpu.py --case llama --small    # one, of tiny sizes, on whatever device there is

Both train the same model with torch's fused AdamW, under autocast where the case says so; the time is the median of
steps after the first four. The peak is that of torch's allocator in these steps; predicted is the dry run of the
compiled step (`whale.predict.peak_memory`) for an optimizer without temporary tensors. Nothing else should run beside.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import whale
from whale.cli.model_loader import load_model
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.ir.cluster import Cluster
from whale.predict.peak_memory import peak_memory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, LEFT_OUT = 9, 4
LLAMA = {"hidden": 2048, "layers": 16, "heads": 16, "kv_heads": 8, "ffn": 5632, "seq": 2048, "vocab": 32000}
GPT = {"hidden": 1024, "layers": 24, "heads": 16, "seq": 1024, "vocab": 50304}
LOW: dict[str, Any] = {"precision": "bf16"}
CASES: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "llama": ("llama", LLAMA, 4, LOW),
    "llama, float32": ("llama", LLAMA, 4, {"precision": "fp32"}),
    "llama, compiled": ("llama", LLAMA, 4, {**LOW, "compile": True}),
    "llama, recompute": ("llama", LLAMA, 4, {**LOW, "recompute": "full"}),
    "llama, activations on the host": ("llama", LLAMA, 4, {**LOW, "offload": "activations"}),
    "gpt": ("gpt", GPT, 8, LOW),
    "gpt, graphs": ("gpt", GPT, 8, {**LOW, "cuda_graphs": True}),
}
SMALL = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128, "seq": 32, "vocab": 256}


def timed(step: Callable[[], object]) -> tuple[float, int]:
    """The median of the seconds of steps, and the peak of the allocator in bytes, 0 without a GPU."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[LEFT_OUT:]), torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0


def case(name: str, small: bool) -> str:
    """The line of a case."""
    kind, sizes, rows, options = CASES[name]
    sizes = {key: SMALL[key] for key in sizes} if small else sizes
    spec = f"{Path(__file__).parents[1] / 'examples' / 'models' / f'{kind}.py'}:{kind}"
    dtype = torch.bfloat16 if options["precision"] == "bf16" else None

    def loaded() -> tuple[nn.Module, dict[str, Tensor]]:
        made = load_model(spec, sizes, batch_size=rows, device=DEVICE)
        return made.model.train(), {key: x.to(DEVICE) for key, x in made.batch.items()}

    def local() -> tuple[float, int]:
        model, batch = loaded()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step() -> None:
            with torch.autocast(DEVICE, dtype) if dtype is not None else nullcontext():
                loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return timed(step)

    torch_seconds, torch_peak = local()
    gc.collect()
    model, batch = loaded()
    own = {key: value for key, value in options.items() if key not in ("compile", "cuda_graphs")}
    compilation = compile_model(model, batch, Cluster.homogeneous(1), Options(**own), device=DEVICE, training=True)
    predicted = peak_memory(compilation, 0, schedule="1f1b", optimizer="sgd_momentum", device="cuda")
    states = 2 * predicted.optimizer  # AdamW has two of what momentum is one
    parallel = whale.parallelize(model, batch, device=DEVICE, **options)
    del model
    updates = torch.optim.AdamW(parallel.parameters(), fused=True)

    def step() -> None:
        parallel.train_step(**batch)
        updates.step()
        updates.zero_grad()

    seconds, peak = timed(step)
    expected = predicted.total - predicted.optimizer + states
    sizes_shown = [f"{x / 2**30:.2f}" for x in (torch_peak, peak, expected)]
    times = [f"{1e3 * torch_seconds:.1f}", f"{1e3 * seconds:.1f}", f"{seconds / torch_seconds:.3f}"]
    return f"| {' | '.join([name, str(rows), *times, *sizes_shown])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    if options.case is not None:
        warnings.filterwarnings("ignore")
        print(case(options.case, options.small), flush=True)
        return
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "a processor"
    print(f"{device}, torch {torch.__version__}\n")
    print("| case | rows | torch, ms | Whale, ms | Whale / torch | torch, peak GiB | Whale, peak GiB | predicted GiB |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in CASES:
        again = [sys.executable, __file__, "--case", name, *["--small"] * options.small]
        done = subprocess.run(again, capture_output=True, text=True, timeout=600, check=False)
        last = done.stderr.strip().splitlines()[-1:] or ["it failed"]
        print(done.stdout.strip() or f"| {name} | {last[0]} | | | | | | |", flush=True)


if __name__ == "__main__":
    main()
