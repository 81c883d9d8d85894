"""Rival plans for a searched plan: the best of each single strategy, and random plans of the search space.

Used with a profile, a cluster and a model; runs nothing itself.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

from whale.cli.search_text import in_short
from whale.commands.plan_writer import Choice, PlanWriter, Trial
from whale.commands.searching import search_plans
from whale.errors import UsageError, WhaleError
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.planner.cost.stage import CostModel
from whale.planner.schedules.in_flight import in_flight
from whale.planner.search import Candidate, Degrees, Fixed, SearchSettings, StageChoice
from whale.planner.search.evaluate import score
from whale.planner.search.layout import fastest_rows

SINGLE = ("data", "tensor", "pipeline")
MOST_DRAWS = 2_000
"""Limit on random plans; on small clusters fewer may fit."""


def searched(profile: ModelProfile, cluster: Cluster, batch: int, trial: Trial) -> dict[str, Choice]:
    """The searched plan, under ``found``, and the best plan of each single strategy: all devices as replicas, all as
    one tensor group, stages of one device each."""

    def best(**narrowed: Any) -> Choice:
        settings = SearchSettings(**narrowed)
        return search_plans(profile, cluster, batch=batch, settings=settings, trial=trial).best

    def of_degrees(data: int, tensor: int) -> Fixed:
        return Fixed(degrees=(Degrees(first=0, last=len(profile.layers), data=data, tensor=tensor),))

    num = len(cluster.devices)
    found = {"found": best()}
    narrowed: tuple[dict[str, Any], ...] = (
        {"fixed": of_degrees(num, 1), "max_stages": 1},
        {"fixed": of_degrees(1, num), "max_stages": 1},
        {"fixed": of_degrees(1, 1)},
    )
    for name, settings in zip(SINGLE, narrowed, strict=True):
        try:
            found[name] = best(**settings)
        except WhaleError as error:
            print(f"{profile.name}: no plan of {name} alone: {error}", file=sys.stderr, flush=True)
    return found


def drawn(
    profile: ModelProfile, cluster: Cluster, batch: int, trial: Trial, known: dict[str, Choice], count: int
) -> list[Choice]:
    """Distinct random plans that compile, fit and are not in *known*, in the order of their predictions."""
    prices = CostModel.of(profile, cluster, batch=batch)
    seen: set[object] = {look(choice) for choice in known.values()}
    return sorted(islice(_random_plans(prices, trial, seen), count), key=lambda choice: choice.prediction.step_seconds)


def _random_plans(prices: CostModel, trial: Trial, seen: set[object]) -> Iterator[Choice]:
    numbers = random.Random(0)
    for _ in range(MOST_DRAWS):
        candidate = draw(prices, numbers)
        try:
            choice = PlanWriter(prices.profile, prices.cluster, prices.batch, trial).compiled(candidate, trial)
        except UsageError:  # it cannot be written as annotations of this model
            continue
        if not choice.reason and look(choice) not in seen:
            seen.add(look(choice))
            yield choice


def draw(prices: CostModel, numbers: random.Random) -> Candidate:
    """A random plan on all devices: number of stages, devices and mesh of each, cuts, and micro-batches; rows are by
    speed."""
    num_devices, num_layers, batch = len(prices.cluster.devices), len(prices.profile.layers), prices.batch
    order = numbers.sample(range(num_devices), num_devices)
    micro_batches = numbers.choice([count for count in range(1, batch + 1) if batch % count == 0])
    num_stages = numbers.randint(1, min(num_devices, num_layers))

    def parts(total: int) -> Iterator[tuple[int, int]]:
        return pairwise((0, *sorted(numbers.sample(range(1, total), num_stages - 1)), total))

    stages = []
    for index, (layers, devices) in enumerate(zip(parts(num_layers), parts(num_devices), strict=True)):
        ranks = tuple(sorted(order[slice(*devices)]))
        tensor = numbers.choice([degree for degree in prices.tensor_degrees if len(ranks) % degree == 0])
        data = len(ranks) // tensor
        groups = [prices.group(ranks[first : first + tensor], data) for first in range(0, len(ranks), tensor)]
        held = in_flight("1f1b", num_stages, index, micro_batches)
        rows = fastest_rows(prices, range(*layers), groups, batch // micro_batches, micro_batches, held)
        stages.append(StageChoice(first=layers[0], last=layers[1], ranks=ranks, data=data, tensor=tensor, rows=rows))
    return score(prices, stages, micro_batches=micro_batches, batch=batch)


def look(choice: Choice) -> tuple[object, ...]:
    """Key that distinguishes plans."""
    return choice.candidate.stages, choice.candidate.micro_batches


def label(choice: Choice, cluster: Cluster) -> str:
    """A plan in a line."""
    stages = choice.candidate.stages
    layers = "-".join(str(stage.last - stage.first) for stage in stages)
    return in_short(choice.candidate, cluster) + (f", {layers} layers" if len(stages) > 1 else "")
