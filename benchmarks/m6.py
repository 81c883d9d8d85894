"""M6 on V100: which plan does `whale search` find for the mixtures of experts of the Whale paper, and what do hosts
hold?

    python benchmarks/m6.py --repeats 1 --write 2026-11-26

M6-MoE-100B on 128, 1T on 480 and 10T on 512 V100 of 32 GB (Jia et al., USENIX ATC 2022; Lin et al., arXiv 2110.03888),
nodes of eight with 736 GiB (Alibaba's ecs.gn6e-c12g1.24xlarge; recalled) and 50 Gbit/s Ethernet; rows of 512 tokens,
one expert a token. As a process, from its start to its last line: the model is captured, the search run, and the best
plan compiled for all ranks. The first two are in fp16 over float32 with AdamW; 10T is a model in float16 with
Adafactor, whose states are factored, and once in fp16 over float32 with either optimizer: then the message says what
memory hosts would need.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import arguments, report, table

ROOT = Path(__file__).parents[1]
SIZES = {"hidden": 1024, "heads": 16, "kv_heads": 16, "seq": 512, "vocab": 51200, "top_k": 1, "mlp": "gelu"}
GIB = 2**30
MOST_SECONDS, MOST_BYTES = 60.0, 4 * GIB


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model by its layers, experts and their width, on nodes of eight, in a precision with an optimizer."""

    name: str
    layers: int
    experts: int
    ffn: int
    nodes: int
    precision: str = "fp16"
    optimizer: str = "adamw"


CASES = (
    Case(name="100B", layers=24, experts=512, ffn=4096, nodes=16),
    Case(name="1T", layers=24, experts=960, ffn=21248, nodes=60),
    Case(name="10T", layers=48, experts=10240, ffn=9984, nodes=64, precision="float16", optimizer="adafactor"),
    Case(name="10T", layers=48, experts=10240, ffn=9984, nodes=64, optimizer="adafactor"),
    Case(name="10T", layers=48, experts=10240, ffn=9984, nodes=64),
)


def run(case: Case, time_limit: float) -> tuple[float, float, int, Mapping[str, Any] | str]:
    """Seconds and processor seconds of a search, its most bytes, and the result, or the message."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.toml"
        cluster.write_text(
            '[links]\ninter_node = {bandwidth = "50 Gbit/s", latency = "30 us", adapters = 1, network = "tcp"}\n'
            f'[host_memory]\nsize = "736 GiB"\n[[nodes]]\ncount = {case.nodes}\ndevices = 8\n'
            'device = "V100-SXM2-32GB"\n'
        )
        sizes = SIZES | {"layers": case.layers, "experts": case.experts, "ffn": case.ffn}
        settings = [text for key, value in sizes.items() for text in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "whale", "search", "--model", str(ROOT / "examples/models/moe.py:moe")]
        command += [*settings, "--cluster", str(cluster), "--batch", str(64 * case.nodes), "--top", "1", "--json"]
        command += ["--precision", case.precision, "--optimizer", case.optimizer, "--time-limit", f"{time_limit:g}"]
        begin = time.perf_counter()
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with (Path(folder) / "out").open("w+") as out, (Path(folder) / "errors").open("w+") as errors:
            process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            seconds = time.perf_counter() - begin
            out.seek(0)
            errors.seek(0)
            found = json.load(out) if process.returncode == 0 else errors.read().splitlines()[-1]
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, found


def row(case: Case, time_limit: float) -> tuple[str, ...]:
    """The row of a case."""
    seconds, spent, most, found = run(case, time_limit)
    name = f"{case.name}, {8 * case.nodes} V100, {case.precision}, {case.optimizer}"
    met = "yes" if spent <= MOST_SECONDS and most <= MOST_BYTES else "no"
    cost = (f"{seconds:.0f} s", f"{spent:.0f} s", f"{most / GIB:.2f} GiB", met)
    if isinstance(found, str):
        return (name, *cost, "", "", "", found.removeprefix("whale: error: "))
    (best,) = found["choices"]
    first = best["stages"][0]
    plan = (
        f"{len(best['stages'])} stages, the first of {first['data']} x {first['tensor']} x {first['expert']} experts, "
    )
    plan += f"{best['micro_batches']} micro-batches, recompute {first['recompute']}, zero {first['zero']}, "
    plan += f"offload {first['offload']}{'' if best['compiled'] else ', not compiled'}"
    sizes = (f"{best[name] / GIB:.1f} GiB" for name in ("memory_bytes", "host_memory_bytes"))
    return (name, *cost, f"{best['step_seconds']:.1f} s", *sizes, plan)


def main() -> None:
    options = arguments(__doc__ or "", repeats=1)
    rows = []
    for case in CASES:
        if options.only in f"{case.name} {case.precision}":
            rows.append(row(case, time_limit=300.0))
            print(rows[-1], flush=True)
    heads = (
        "case",
        "process",
        "processor time",
        "most memory",
        "60 s, 4 GiB",
        "step",
        "fullest device",
        "fullest host",
        "found",
    )
    note = "The paper gives no step times of these models. Targets are of processor time, for the machine is shared."
    report("m6", options, f"{table(heads, rows)}\n\n{note}")


if __name__ == "__main__":
    main()
