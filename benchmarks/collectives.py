"""Error of the communication model on published measurements of collectives.

    python benchmarks/collectives.py               # a table for each group of measurements
    python benchmarks/collectives.py --points      # every point

Compares ``whale.planner.network.communication`` with every row of ``planner/data/network.csv`` that names its machine.
The benchmark measures nothing itself.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

from whale.ir.cluster import Cluster, Link
from whale.planner.catalog import device_types
from whale.planner.network.communication import CommunicationCost, collective, send
from whale.planner.network.links import link_kinds, read_table
from whale.planner.network.topology import Topology

LARGE = 2**34
"""Bytes, for sizes that the source calls large."""
SIZES = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Point:
    group: str
    row: dict[str, str]
    num_bytes: float
    measured: float
    predicted: CommunicationCost

    @property
    def error(self) -> float:
        return self.predicted.seconds / self.measured - 1


def size_of(text: str) -> float:
    return LARGE if text == "large" else float(text[:-1]) * SIZES[text[-1]]


def cluster_of(row: dict[str, str]) -> tuple[Cluster, list[int]]:
    """The machine of a row, and the ranks of its group."""
    per_node, num_nodes, num_ranks = int(row["devices_per_node"]), int(row["nodes"]), int(row["ranks"])
    inter = None
    if row["node_Gbps"]:
        network: Any = row["network"]
        inter = Link(
            bandwidth=float(row["node_Gbps"]) * 1e9 / 8,
            latency=link_kinds()[network.upper()].latency,
            adapters=int(row["adapters"]),
            network=network,
        )
    type_ = device_types()[row["device"]]
    cluster = Cluster.homogeneous(
        per_node * num_nodes, type_, num_devices_per_node=per_node, intra=type_.intra_node, inter=inter
    )
    each = num_ranks // num_nodes
    return cluster, [node * per_node + index for node in range(num_nodes) for index in range(each)]


def share_of_ideal_ring(operation: str, num_ranks: int) -> float:
    """Bytes that a device sends for each byte of the tensor: what busbw is defined by."""
    share = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "send": 1.0}[operation]


def compare(row: dict[str, str]) -> Point:
    cluster, ranks = cluster_of(row)
    num_bytes, operation = size_of(row["message_size"]), row["operation"]
    topology = Topology.of(cluster)
    if operation == "send":
        predicted = send(topology, ranks[0], ranks[1], num_bytes)
    else:
        kind: Any = operation
        algorithm: Any = row["algorithm"] or None
        predicted = collective(topology, kind, ranks, num_bytes, algorithm=algorithm)
    factor = share_of_ideal_ring(operation, len(ranks)) if row["unit"].startswith("busbw") else 1.0
    if row["source"].startswith("Sailor") and operation == "all_reduce":
        factor = share_of_ideal_ring(operation, len(ranks))
    measured = num_bytes * factor / (float(row["value"]) * 1e9)
    source = (
        row["source"].split(" (")[0].removeprefix("github ").removesuffix(" README").removesuffix(" README excerpt")
    )
    group = f"{source}: {row['device']}, {'within a node' if row['nodes'] == '1' else 'between nodes'}"
    return Point(group, row, num_bytes, measured, predicted)


def compare_all() -> list[Point]:
    return [compare(row) for row in read_table("network.csv") if not row["left_out"]]


def table(points: list[Point]) -> str:
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    lines = [
        "| measurements | points | mean error over 1 MB | mean error, all | bias over 1 MB | worst over 1 MB |",
        "|---|---|---|---|---|---|",
    ]
    for name, members in {**groups, "**all**": points}.items():
        large = [point.error for point in members if point.num_bytes >= 2**20]
        everything = statistics.mean(abs(point.error) for point in members)
        bias, worst = statistics.mean(large), max(large, key=abs)
        cells = (len(members), f"{statistics.mean(map(abs, large)):.1%}", f"{everything:.1%}", f"{bias:+.1%}")
        lines.append(f"| {name} | {' | '.join(map(str, cells))} | {worst:+.1%} |")
    return "\n".join(lines)


def line_of(point: Point) -> str:
    row, cost = point.row, point.predicted
    return (
        f"{row['hardware'][:44]:<44} {row['operation']:<14} {row['ranks']:>4} {row['message_size']:>6} "
        f"{point.measured * 1e6:>12.1f} us {cost.seconds * 1e6:>12.1f} us {point.error:>+7.1%} "
        f"{cost.algorithm:<9} {cost.bottleneck}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", action="store_true", help="print every point: measured, predicted, error")
    options = parser.parse_args()
    points = compare_all()
    if options.points:
        print("\n".join(map(line_of, points)))
        return
    print(table(points))
    inside = sum(point.predicted.interval[0] <= point.measured <= point.predicted.interval[1] for point in points)
    print(f"\n{inside} of {len(points)} points ({inside / len(points):.0%}) lie in the interval of 9 chances in 10.")


if __name__ == "__main__":
    main()
