"""Time to choose placements for a deep model on 2 to 64 ranks.

    python benchmarks/placement.py                     # 48 layers; analysis and placement only, after one capture
    python benchmarks/placement.py --profile solve.prof

The model is on the meta device; no process is started. Seconds are this process's own.
"""

from __future__ import annotations

import argparse
import cProfile
import time
import warnings
from typing import Any

import torch
from lowering_175b import GPT

import whale
from whale.compile.compile import _place_stages, _request, _rows
from whale.compile.options import Options
from whale.graph.capture import capture
from whale.graph.captured import Captured
from whale.graph.partition import Partition, partition
from whale.graph.values import resolve
from whale.ir.cluster import Cluster
from whale.planner.assignment.assign import place
from whale.strategies.analysis import analyse
from whale.strategies.placing import Report, batch_placeholders

NESTS = {
    "dp": lambda ranks: whale.replicate(),
    "tp": lambda ranks: whale.split(),
    "dp x tp": lambda ranks: [whale.replicate(2), whale.split(ranks // 2)],
}


REPEATS = 3


def seconds(layers: int, ranks: int, nest: Any, profile: cProfile.Profile | None) -> tuple[float, float]:
    """Seconds of the analysis and of the placement, each the least of three."""
    with torch.device("meta"):
        model = GPT(1, layers, hidden=1024, heads=64, vocabulary=51200, length=512)
    whale.annotate(model, {"": nest})
    tokens = torch.empty(64, 512, dtype=torch.long, device="meta")
    captured = capture(model, {"tokens": tokens, "labels": tokens})
    cut = partition(captured)
    if profile is not None:
        profile.enable()
    found = [_once(captured, cut, ranks) for _ in range(REPEATS)]
    if profile is not None:
        profile.disable()
    return min(first for first, _ in found), min(second for _, second in found)


def _once(captured: Captured, cut: Partition, ranks: int) -> tuple[float, float]:
    begin = time.process_time()
    analysis = analyse(captured.graph, batch_placeholders(captured))
    middle = time.process_time()
    rows = _rows(analysis, Options(), None)
    assignment = place([_request(graph) for graph in cut.stages], Cluster.homogeneous(ranks).devices)
    loss = resolve(captured.graph.output_node().args[0][0])  # type: ignore[index, arg-type]
    _place_stages(captured, analysis, cut, assignment, rows, loss, "cpu", Report(), {})
    return middle - begin, time.process_time() - middle


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--profile", help="write a cProfile file")
    given = parser.parse_args()
    profile = cProfile.Profile() if given.profile else None
    print("| ranks | strategy | analysis (CPU s) | placement (CPU s) |\n|---|---|---|---|")
    for ranks in given.ranks:
        for name, nest in NESTS.items():
            if name == "dp x tp" and ranks < 4:
                continue
            first, second = seconds(given.layers, ranks, nest(ranks), profile)
            print(f"| {ranks} | {name} | {first:.2f} | {second:.2f} |", flush=True)
    if profile is not None:
        profile.dump_stats(given.profile)


if __name__ == "__main__":
    main()
