"""Jobs that share a mixed cluster: times to completion over a trace, under Whale's rule and plain ones.

    python benchmarks/allocate.py --write 2026-11-26

200 training jobs of three sizes of GPT arrive at random (seeded) at 2 nodes of 4 A100 and 2 of 4 V100, more than these
can take at times. Nodes fail and come back. A job whose devices change, or one of whose devices fails, loses a minute
to start, search and reshard, and in the second case also what it did since its last checkpoint. The speeds of every
model on every number of devices are those of the plans that the search finds; the trace is simulated. `equal shares`
divides the devices among all jobs that are there, `first come` gives each, in order, what makes it fastest of what is
free, until it is done; `one node each` does so with a node at most, as schedulers of fixed requests do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from harness import arguments, report, table

from whale.cli.model_loader import load_model
from whale.ir.cluster import Cluster
from whale.ir.jobs import Job
from whale.ir.units import duration_text
from whale.planner.allocation.options import options_of
from whale.planner.allocation.rules import LeastCompletion, equal_shares, first_come
from whale.planner.allocation.speeds import speeds_of
from whale.planner.allocation.timeline import Change, Demand, Rule, Timeline, simulate
from whale.planner.catalog import device_types
from whale.strategies.profile import profile_model

NUM_JOBS = 200
MEAN_ARRIVAL_SECONDS = 1_100.0
MEAN_ALONE_SECONDS = 3_600.0
"""A job's time on all devices; jobs are unlike in length by a factor of ten and more (log-normal)."""
NODE_FAILS_AFTER_SECONDS = 24 * 3600.0
NODE_IS_BACK_AFTER_SECONDS = 3600.0
RESTART_SECONDS, LOST_SECONDS = 60.0, 150.0
"""The time of a restart, and half of the time between two checkpoints."""

CLUSTER = """
[links]
inter_node = {bandwidth = "100 Gbit/s", latency = "15 us"}
[[nodes]]
count = 2
devices = 4
device = "A100-SXM4-80GB"
[[nodes]]
count = 2
devices = 4
device = "V100-SXM2-32GB"
"""

MODELS = {
    "small": {"layers": 8, "hidden": 512, "heads": 8, "seq": 256},
    "medium": {"layers": 12, "hidden": 768, "heads": 12, "seq": 512},
    "large": {"layers": 24, "hidden": 1024, "heads": 16, "seq": 512},
}
BATCHES = {"small": (64, 256), "medium": (64,), "large": (64,)}
NOISE_SCALE = 512.0


@dataclass(frozen=True)
class Drawn:
    jobs: Sequence[Demand]
    changes: Sequence[Change]


def drawn(seed: int, speeds: dict[str, np.ndarray], capacity: tuple[int, ...], mean_arrival: float) -> Drawn:
    draw = random.Random(seed)
    jobs, now = [], 0.0
    for number in range(NUM_JOBS):
        now += draw.expovariate(1 / mean_arrival)
        own = speeds[draw.choice(list(speeds))]
        work = float(own.max()) * MEAN_ALONE_SECONDS * draw.lognormvariate(-1.5, 1.2)
        weight = draw.choice([1.0, 1.0, 1.0, 4.0])
        jobs.append(Demand(number=number, work=work, weight=weight, speeds=own, arrival_seconds=now))
    changes, down = [], [0] * len(capacity)
    events: list[tuple[float, int, int]] = []
    for kind, number in enumerate(capacity):
        for _ in range(number // 4):
            at = 0.0
            while (at := at + draw.expovariate(1 / NODE_FAILS_AFTER_SECONDS)) < 2 * now:
                back = at + draw.expovariate(1 / NODE_IS_BACK_AFTER_SECONDS)
                events += [(at, kind, 4), (back, kind, -4)]
                at = back
    for at, kind, lost in sorted(events):
        down[kind] += lost
        left = tuple(number - gone for number, gone in zip(capacity, down, strict=True))
        changes.append(Change(seconds=at, capacity=left, kind=kind if lost > 0 else None, draw=draw.random()))
    return Drawn(jobs, changes)


def limited(rule: Rule, counts: np.ndarray, most: int) -> Rule:
    """The rule for jobs that use at most a number of devices, of one kind."""
    allowed = (counts.sum(axis=1) <= most) & ((counts > 0).sum(axis=1) <= 1)

    def chosen(jobs: Sequence[Demand], capacity: tuple[int, ...]) -> Sequence[int]:
        return rule([replace(job, speeds=np.where(allowed, job.speeds, 0.0)) for job in jobs], capacity)

    return chosen


def cells(name: str, found: Timeline, jobs: Sequence[Demand], least: float, seconds: float) -> tuple[str, ...]:
    own = sorted(found.done_seconds[job.number] - job.arrival_seconds for job in jobs)
    mean = found.total_seconds / sum(job.weight for job in jobs)
    return (
        name,
        duration_text(mean),
        f"{found.total_seconds / least:.2f} x",
        duration_text(own[len(own) // 2]),
        duration_text(own[int(0.95 * len(own))]),
        duration_text(max(found.done_seconds.values())),
        str(found.restarts),
        f"{seconds / len(found.phases) * 1e3:.0f} ms",
    )


def main() -> None:
    options = arguments(__doc__ or "")
    cluster = Cluster.parse(CLUSTER, catalog=device_types())
    given = options_of(cluster)
    speeds: dict[str, np.ndarray] = {}
    rows = []
    for name, sizes in MODELS.items():
        loaded = load_model("examples/models/gpt.py:gpt", sizes, device="meta")
        profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2, 4, 8), name=name)
        job = Job(name=name, profile="-", batch=BATCHES[name], rows=1, noise_scale=NOISE_SCALE)
        found = speeds_of(job, profile, cluster, given)
        speeds[name] = found.rows_per_second
        one = {kind.name: given.index({kind.device_type: 1}) for kind in given.kinds}
        rows.append((name, *(f"{found.rows_per_second[one[kind.name] or 0]:.0f}" for kind in given.kinds)))
        rows[-1] += (f"{found.rows_per_second[-1]:.0f}", str(found.batches[-1]))
        print(rows[-1], flush=True)
    head = ("model", *(f"rows/s on one {kind.name}" for kind in given.kinds), "on all", "batch there")
    texts = [table(head, rows)]
    rules: dict[str, Rule] = {
        "whale allocate": LeastCompletion(given.counts, RESTART_SECONDS),
        "equal shares": equal_shares(given.counts),
        "first come": first_come(given.counts),
        "one node each": limited(first_come(given.counts), given.counts, 4),
    }
    for seed in range(1):
        trace = drawn(seed, speeds, given.capacity, MEAN_ARRIVAL_SECONDS)
        found_rows, least = [], 0.0
        for name, rule in rules.items():
            if options.only not in name:
                continue
            began = time.process_time()
            timeline = simulate(
                trace.jobs,
                given.counts,
                given.capacity,
                rule,
                restart_seconds=RESTART_SECONDS,
                changes=trace.changes,
                lost_seconds=LOST_SECONDS,
            )
            least = least or timeline.total_seconds
            found_rows.append(cells(name, timeline, trace.jobs, least, time.process_time() - began))
            print(found_rows[-1], flush=True)
        failures = sum(change.kind is not None for change in trace.changes)
        columns = (
            "rule",
            "weighted mean time",
            "relative",
            "median",
            "95 %",
            "last job done",
            "restarts",
            "a decision",
        )
        texts.append(
            f"Seed {seed}: {NUM_JOBS} jobs, {failures} failures of a node drawn.\n\n{table(columns, found_rows)}"
        )
    report("allocate", options, "\n\n".join(texts))


if __name__ == "__main__":
    main()
