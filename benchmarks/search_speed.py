"""How long does the search take, and does that grow with the cluster or with the depth of the model?

    python benchmarks/search_speed.py --write 2026-11-21

GPT-3 175B (96 layers, hidden 12288) and a model of twice as many of the same blocks, in fp16 with a batch of 1,536, on
two device types (half H100, half A100) and on three (with V100 for a quarter). The profile of two blocks is captured
once; only the search is timed, in processor seconds, each time with no prices known.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
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
TARGETS = {2: 0.5, 3: 1.0}
SIZES = {"layers": 2, "hidden": 12288, "heads": 96, "seq": 2048, "vocab": 51200}
BATCH = 1536


def deep(profile: ModelProfile, num_blocks: int) -> ModelProfile:
    """The model with so many blocks."""
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


def main() -> None:
    options = arguments(__doc__ or "", repeats=3)
    loaded = load_model("examples/models/gpt.py:gpt", SIZES, device="meta")
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2, 4, 8), name="gpt")
    rows = []
    for name, model, num_types, num_devices in cases(profile):
        case = f"{name}, {num_types} types, {num_devices} GPUs"
        if options.only not in case:
            continue
        machines, seconds, said = cluster(num_types, num_devices), [], ""
        for _ in range(options.repeats):
            began = time.process_time()
            try:
                said = shown(search(model, machines, batch=BATCH, settings=SearchSettings(precision="fp16")))
            except InfeasibleError as error:
                said = str(error)[:80]
            seconds.append(time.process_time() - began)
        met = "yes" if median(seconds) <= TARGETS[num_types] else "no"
        rows.append((case, f"{median(seconds):.2f} s", f"{TARGETS[num_types]:.1f} s", met, said))
        print(rows[-1], flush=True)
    report("search_speed", options, table(("case", "search", "target", "met", "found"), rows))


def shown(found: Found) -> str:
    best = found.best
    return (
        f"{len(best.stages)} stages, {best.micro_batches} micro-batches, {best.prediction.step_seconds:.2f} s, "
        f"MFU {best.prediction.mfu:.0%}, {found.gap:.0%} above the bound, {found.tried} drafts"
    )


if __name__ == "__main__":
    main()
