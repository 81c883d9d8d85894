"""Plans, clusters and records of searches for tests of the report."""

from __future__ import annotations

from itertools import pairwise

from tests.workloads import boundary, stage_work
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.plan import ClusterIdentity, ModelIdentity, Plan, PlanAxis, PlanStage
from whale.ir.search_record import RecordedCandidate, RecordedDrop, RecordedPoint, SearchRecord
from whale.ir.workload import DeviceMemory, LinkTime, Prediction, Reduction, Workload
from whale.planner.simulation.simulate import simulate

GIB = 2**30
FAST, SLOW = "A100-SXM4-40GB", "V100-SXM2-16GB"


def mixed_cluster(*, name: str = FAST) -> Cluster:
    """Two nodes of four fast devices and one of four slow ones."""
    types = [
        DeviceType.of(type_, speed={"float32": 1e12}, memory_bytes=size * GIB, memory_bandwidth=1e12)
        for type_, size in ((name, 40), (SLOW, 16))
    ]
    link = Link(bandwidth=1e10, latency=1e-5)
    devices = [(node, types[node == "old"]) for node in ("left", "right", "old") for _ in range(4)]
    return Cluster.of(devices, intra=link, inter=link)


def mixed_plan(*, micro_batches: int = 8, seconds: float = 0.01, name: str = FAST, model: str = "gpt") -> Plan:
    """Two stages: 4 replicas of 2 tensor parts on the fast devices, then 4 replicas, whose last takes less."""
    fast, slow = tuple(range(8)), tuple(range(8, 12))
    stages = (
        PlanStage(
            ranks=fast,
            axes=(
                PlanAxis(name="replicate", size=4, role="replicate"),
                PlanAxis(name="split", size=2, role="split", shares=(3, 1)),
            ),
        ),
        PlanStage(ranks=slow, axes=(PlanAxis(name="replicate", size=4, role="replicate", shares=(5, 5, 4, 2)),)),
    )
    pairs = [(2 * replica, 8 + replica) for replica in range(4)]
    workload = Workload(
        world_size=12,
        micro_batches=micro_batches,
        stages=(
            stage_work(
                fast,
                together=tuple((rank, rank + 1) for rank in range(0, 8, 2)),
                forward=(seconds,) * 8,
                backward=(2 * seconds,) * 8,
                communication=(0.6 * seconds,) * 8,
            ),
            stage_work(
                slow,
                forward=tuple(seconds * factor for factor in (1.1, 1.1, 0.9, 0.5)),
                backward=tuple(2 * seconds * factor for factor in (1.1, 1.1, 0.9, 0.5)),
            ),
        ),
        boundaries=(boundary(0, 1, pairs, 2 * 10**6),),
        links=tuple(
            LinkTime(source=a, target=b, latency=1e-5, bandwidth=1e9)
            for one, other in pairs
            for a, b in ((one, other), (other, one))
        ),
        reductions=(
            Reduction(ranks=(0, 2, 4, 6), stages=(0,), bytes=10**8, seconds=2 * seconds, ready=1.0),
            Reduction(ranks=slow, stages=(1,), bytes=10**8, seconds=2 * seconds, ready=0.5),
        ),
        update=(seconds / 2,) * 12,
        overlap_slowdown=0.1,
    )
    memory = tuple(
        DeviceMemory(
            rank=rank,
            device=f"{name if rank < 8 else SLOW}:{rank}",
            capacity=(40 if rank < 8 else 16) * GIB,
            parameters=3 * GIB,
            gradients=3 * GIB,
            optimizer=6 * GIB,
            activations=(8 if rank < 8 else 2) * GIB,
            buffers=GIB // 2,
            workspace=GIB // 4,
            framework=GIB // 2,
        )
        for rank in range(12)
    )
    timeline = simulate(workload)
    prediction = Prediction(
        step_seconds=timeline.step_seconds,
        step_seconds_interval=(0.9 * timeline.step_seconds, 1.1 * timeline.step_seconds),
        breakdown={str(part): spent for part, spent in timeline.breakdown.items()},
        memory=memory,
        bubble=timeline.bubble,
        flops=1e13,
        mfu=0.41,
    )
    return Plan(
        model=ModelIdentity(name=model),
        cluster=ClusterIdentity(devices={name: fast, SLOW: slow}),
        world_size=12,
        batch=16 * micro_batches,
        micro_batches=micro_batches,
        annotations={"h.0": ("stage(8)", "replicate(4)", "split(2)"), "h.16": ("stage(4)", "replicate(4)")},
        stages=stages,
    ).with_prediction(prediction, workload)


def search_record(plan: Plan) -> SearchRecord:
    """A search that priced 300 plans, of which a third did not fit."""
    assert plan.prediction is not None
    best = plan.prediction.step_seconds
    points = []
    for index in range(300):
        memory = 0.35 + (index * 37 % 100) / 100
        points.append(
            RecordedPoint(
                seconds=best * (1.02 + (index * 61 % 97) / 60 + 0.1 / memory),
                memory=memory,
                label=f"{1 + index % 4} stages, tensor {2 ** (index % 3)}",
                reason="" if memory <= 1 else f"needs {memory:.0%} of a {SLOW}",
            )
        )
    reasons = ("", "more waiting: 12.1% bubble", "a collective between nodes in every layer", "1 device unused")
    candidates = tuple(
        RecordedCandidate(
            label=f"{FAST} x8 (4 x 2) | {SLOW} x4 (4 x 1), cut {24 - place}",
            seconds=best * (1 + 0.04 * place),
            memory=0.95 - 0.1 * place,
            bubble=plan.prediction.bubble,
            mfu=0.41 / (1 + 0.04 * place),
            micro_batches=plan.micro_batches,
            why=why,
        )
        for place, why in enumerate(reasons)
    )
    return SearchRecord(
        plan=plan.digest(),
        candidates=candidates,
        points=tuple(points),
        dropped=(
            RecordedDrop(family="tensor 8", reason="a node has 4 devices", count=1200),
            RecordedDrop(family="1 stage", reason=f"needs 41.3 GiB of the 16 GiB of a {SLOW}", count=14),
        ),
        bound_seconds=0.94 * best,
        tried=300,
        seconds=0.31,
    )


def large_plan(num_devices: int = 4096, *, stages: int = 16, micro_batches: int = 4, unlike: bool = False) -> Plan:
    """A pipeline of replicas on a number of devices; ``unlike``: all differ in time and memory."""
    width = num_devices // stages
    members = [tuple(range(stage * width, (stage + 1) * width)) for stage in range(stages)]

    def seconds(rank: int) -> float:
        return 0.01 * (1 + rank / num_devices) if unlike else 0.01

    work = tuple(
        stage_work(
            ranks,
            forward=tuple(seconds(rank) for rank in ranks),
            backward=tuple(2 * seconds(rank) for rank in ranks),
            kept_bytes=(2**30,) * width,
        )
        for ranks in members
    )
    hops = [list(zip(one, other, strict=True)) for one, other in pairwise(members)]
    workload = Workload(
        world_size=num_devices,
        micro_batches=micro_batches,
        stages=work,
        boundaries=tuple(boundary(stage, stage + 1, pairs, 10**6) for stage, pairs in enumerate(hops)),
        links=tuple(
            LinkTime(source=a, target=b, latency=1e-5, bandwidth=1e10)
            for pairs in hops
            for one, other in pairs
            for a, b in ((one, other), (other, one))
        ),
    )
    memory = tuple(
        DeviceMemory(
            rank=rank,
            device=f"{FAST}:{rank}",
            capacity=40 * GIB,
            parameters=8 * GIB + (rank if unlike else 0) * 2**18,
            activations=(stages - rank // width) * GIB,
        )
        for rank in range(num_devices)
    )
    prediction = Prediction(step_seconds=1.0, step_seconds_interval=(0.9, 1.1), memory=memory)
    axes = (PlanAxis(name="replicate", size=width, role="replicate"),)
    return Plan(
        world_size=num_devices,
        batch=width * micro_batches,
        micro_batches=micro_batches,
        stages=tuple(PlanStage(ranks=ranks, axes=axes) for ranks in members),
    ).with_prediction(prediction, workload)
