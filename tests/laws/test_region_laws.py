"""Plans of a cluster in several regions: faster ways between them make none worse, nor do more regions."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf

import pytest

from tests.chains import card, chain, layer
from whale.errors import InfeasibleError
from whale.ir.cluster import Cluster, Device, DeviceType, Link, Node, Region
from whale.ir.profile import ModelProfile
from whale.planner.search import SearchSettings, search
from whale.planner.what_if import only

WAYS = (1e6, 1e7, 1e8, 1e9, 1e10)
"""Bytes per second out of a region; nodes have 1e9."""

SEEDS = (0, 1, 2, 3, 7)
"""Cases whose search takes tenths of a second."""

TOLERANCE = 0.02
"""By which a plan may be slower than one that was found for slower ways: a descent ends where no likely move helps."""


@dataclass(frozen=True)
class Case:
    """A search problem: the nodes with their region, the type of their devices, and how many these are."""

    profile: ModelProfile
    nodes: tuple[tuple[str, DeviceType, int], ...]
    batch: int
    settings: SearchSettings

    def cluster(self, way: float) -> Cluster:
        nodes: list[Node] = []
        devices: list[Device] = []
        for region, type_, count in self.nodes:
            name, ranks = f"node{len(nodes)}", tuple(range(len(devices), len(devices) + count))
            devices += [Device(rank=rank, name=f"{type_.name}:{rank}", type=type_, node=name) for rank in ranks]
            nodes.append(
                Node(
                    name=name,
                    ranks=ranks,
                    intra=Link(bandwidth=1e10, latency=1e-5),
                    inter=Link(bandwidth=1e9, latency=1e-5),
                    region=Region(name=region, link=Link(bandwidth=way, latency=1e-3)),
                )
            )
        return Cluster(nodes=tuple(nodes), devices=tuple(devices))

    def step(self, cluster: Cluster) -> float:
        """Seconds of the best plan; infinite where none fits."""
        try:
            found = search(self.profile, cluster, batch=self.batch, settings=self.settings)
        except InfeasibleError:
            return inf
        return found.best.prediction.step_seconds


def case(seed: int) -> Case:
    draw = random.Random(seed)
    types = [card(name, gib=draw.choice([0.12, 64])) for name in "ab"]
    kinds = [
        layer(
            {one.name: draw.choice([0.01, 0.015, 0.04]) for one in types},
            degrees=(1, 2),
            fixed=draw.choice([0.0, 0.02]),
            parameters=draw.choice([1e5, 2e6]),
            kept=draw.choice([1e5, 5e6]),
            output=draw.choice([1e3, 1e5, 1e6]),
            name=str(index),
        )
        for index in range(2)
    ]
    return Case(
        profile=chain(kinds, [draw.randint(0, 1) for _ in range(draw.randint(4, 8))]),
        nodes=tuple(
            (region, draw.choice(types), draw.choice((1, 2, 3)))
            for region in ("a", "b")
            for _ in range(draw.randint(1, 2))
        ),
        batch=draw.choice([4, 8, 12]),
        settings=SearchSettings(zero=draw.choice((0, 1)), time_limit=300),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_faster_ways_between_regions_make_no_plan_worse(seed: int) -> None:
    given, best = case(seed), inf
    for way in WAYS:
        step = given.step(given.cluster(way))
        assert step <= best * (1 + TOLERANCE), f"with {way:g} bytes a second out of a region"
        best = min(best, step)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_over_regions_is_no_worse_than_that_of_one(seed: int) -> None:
    given = case(seed)
    cluster = given.cluster(1e7)
    step = given.step(cluster)
    for region in ("a", "b"):
        own = [rank for node in cluster.nodes if node.region and node.region.name == region for rank in node.ranks]
        assert step <= given.step(only(cluster, own)) * (1 + 1e-3), region  # which compares the batches of fewer ranks
