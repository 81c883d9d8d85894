"""Search time for GPT-3 175B and larger models, and the time of whole ``whale search`` processes.

    python benchmarks/search_speed.py --write 2026-11-21

GPT-3 175B (96 layers, hidden 12288) and a model of twice as many of the same blocks, in fp16 with a batch of 1,536, on
two device types (half H100, half A100) and on three (with V100 for a quarter). The profile of two blocks is captured
once; only the search is timed, in processor seconds, each time with no prices known.

Then `whale search --model` as a process, from its start to its last line: torch, the capture, the search and the best
plans compiled, with the most memory that it has at a time. GPT of 13B on the mix of two types, and mixtures of experts
of the size of M6 (Lin et al. 2021) on V100.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harness import arguments, report, table

from whale.cli.model_loader import load_model
from whale.errors import InfeasibleError
from whale.ir.cluster import Cluster, Link
from whale.ir.profile import ModelProfile
from whale.planner.catalog import device_types
from whale.planner.search import Found, SearchSettings, search
from whale.strategies.profile import profile_model

NETWORK = Link(bandwidth=100e9, latency=1e-5, adapters=8)
MIXES = {
    2: {"H100-SXM5-80GB": 0.5, "A100-SXM4-80GB": 0.5},
    3: {"H100-SXM5-80GB": 0.25, "A100-SXM4-80GB": 0.5, "V100-SXM2-32GB": 0.25},
}
TARGETS = {2: 0.25, 3: 0.25}
SIZES = {"layers": 2, "hidden": 12288, "heads": 96, "seq": 2048, "vocab": 51200}
BATCH = 1536
ROOT = Path(__file__).parents[1]
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A `whale search` from a model: its settings, nodes of eight by device type, and rows of the batch."""

    case: str
    model: str
    sizes: Mapping[str, object]
    nodes: Mapping[str, int]
    batch: int

    def cluster(self) -> str:
        """The cluster file."""
        lines = ['[links]\ninter_node = {bandwidth = "800 Gbit/s", latency = "10 us", adapters = 8}']
        for name, count in self.nodes.items():
            lines.append(f'[[nodes]]\ncount = {count}\ndevices = 8\ndevice = "{name}"')
        return "\n".join(lines)

    def command(self, cluster: Path) -> list[str]:
        """The command line."""
        settings = [text for key, value in self.sizes.items() for text in ("--set", f"{key}={value}")]
        given = ["--cluster", str(cluster), "--batch", str(self.batch), "--precision", "fp16"]
        return [sys.executable, "-m", "whale", "search", "--model", str(ROOT / self.model), *settings, *given]


GPT_13B = {"layers": 40, "hidden": 5120, "heads": 40, "seq": 2048, "vocab": 51200}
M6 = {"hidden": 1024, "heads": 16, "kv_heads": 16, "seq": 512, "vocab": 51200, "top_k": 1, "mlp": "gelu"}
WHOLE = (
    *(
        Whole(
            case=f"13B, 2 types, {16 * count} GPUs",
            model="examples/models/gpt.py:gpt",
            sizes=GPT_13B,
            nodes={"H100-SXM5-80GB": count, "A100-SXM4-80GB": count},
            batch=1024,
        )
        for count in (8, 32)
    ),
    *(
        Whole(
            case=f"M6-{name}, {8 * count} V100",
            model="examples/models/moe.py:moe",
            sizes=M6 | {"layers": layers, "experts": experts, "ffn": ffn},
            nodes={"V100-SXM2-32GB": count},
            batch=1920,
        )
        for name, count, layers, experts, ffn in (("1T", 60, 24, 960, 21248), ("10T", 64, 48, 10240, 9984))
    ),
)
WHOLE_TARGET, WHOLE_MEMORY = 10.0, 2048 * MIB


def deep(profile: ModelProfile, num_blocks: int) -> ModelProfile:
    """The model with a number of blocks."""
    first, block, last = profile.layers[0], profile.layers[1], profile.layers[-1]
    paths = (profile.paths[0], *(f"layers.{index}" for index in range(num_blocks)), profile.paths[-1])
    layers = (first, *(block,) * num_blocks, last)
    return profile.model_copy(update={"layers": layers, "paths": paths, "tied": ()})


def cluster(num_types: int, num_devices: int) -> Cluster:
    """Nodes of eight."""
    devices = []
    for name, share in MIXES[num_types].items():
        for _ in range(round(share * num_devices)):
            devices.append((f"node{len(devices) // 8}", device_types()[name]))
    return Cluster.of(devices, intra=device_types()["A100-SXM4-80GB"].intra_node, inter=NETWORK)


def cases(profile: ModelProfile) -> Iterator[tuple[str, ModelProfile, int, int]]:
    for num_types in (2, 3):
        for num_devices in (128, 512, 4096):
            yield "175B", deep(profile, 96), num_types, num_devices
        yield "350B", deep(profile, 192), num_types, 4096


def whole(given: Whole) -> tuple[float, int, str]:
    """Seconds of a process, its most bytes, and the line of its best plan, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.toml"
        cluster.write_text(given.cluster())
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        begin = time.perf_counter()
        process = subprocess.Popen(
            given.command(cluster), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None and process.stderr is not None
        lines, errors = process.stdout.read().splitlines(), process.stderr.read().splitlines()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    return seconds, usage.ru_maxrss * 1024, said(lines, errors)


def said(lines: Sequence[str], errors: Sequence[str]) -> str:
    best = next((line for line in lines if line.startswith("1 ")), None)
    return " ".join((best or (errors[-1] if errors else "nothing")).split())[:120]


def timed_search(profile: ModelProfile, machines: Cluster, repeats: int) -> tuple[float, str]:
    """The median of processor seconds, and what was found."""
    seconds, said = [], ""
    for _ in range(repeats):
        began = time.process_time()
        try:
            said = shown(search(profile, machines, batch=BATCH, settings=SearchSettings(precision="fp16")))
        except InfeasibleError as error:
            said = str(error)[:80]
        seconds.append(time.process_time() - began)
    return median(seconds), said


def search_row(case: str, num_types: int, seconds: float, said: str) -> tuple[str, ...]:
    met = "yes" if seconds <= TARGETS[num_types] else "no"
    return case, f"{seconds:.2f} s", f"{TARGETS[num_types]:.2f} s", met, said


def main() -> None:
    options = arguments(__doc__ or "", repeats=3)
    loaded = load_model("examples/models/gpt.py:gpt", SIZES, device="meta")
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2, 4, 8), name="gpt")
    rows = []
    for name, model, num_types, num_devices in cases(profile):
        case = f"{name}, {num_types} types, {num_devices} GPUs"
        if options.only not in case:
            continue
        seconds, said = timed_search(model, cluster(num_types, num_devices), options.repeats)
        rows.append(search_row(case, num_types, seconds, said))
        print(rows[-1], flush=True)
    processes = []
    for given in WHOLE:
        if options.only not in given.case:
            continue
        times, most, found = [], 0, ""
        for _ in range(options.repeats):
            seconds, peak, found = whole(given)
            times.append(seconds)
            most = max(most, peak)
        met = "yes" if median(times) <= WHOLE_TARGET and most <= WHOLE_MEMORY else "no"
        processes.append((given.case, f"{median(times):.1f} s", f"{most / MIB:.0f} MiB", "10 s, 2048 MiB", met, found))
        print(processes[-1], flush=True)
    searches = table(("case", "search", "target", "met", "found"), rows)
    wholes = table(("case", "whole process", "most memory", "target", "met", "found"), processes)
    report("search_speed", options, f"{searches}\n\n{wholes}")


def shown(found: Found) -> str:
    best = found.best
    return (
        f"{len(best.stages)} stages, {best.micro_batches} micro-batches, {best.prediction.step_seconds:.2f} s, "
        f"MFU {best.prediction.mfu:.0%}, {found.gap:.0%} above the bound, {found.tried} partial plans"
    )


if __name__ == "__main__":
    main()
