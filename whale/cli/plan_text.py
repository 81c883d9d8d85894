"""A plan and its step for a reader: a table of its stages, the step with its parts, and the command that runs it."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from whale.cli.tables import text_table
from whale.ir.units import bytes_text, counted, time_text

if TYPE_CHECKING:
    from whale.ir.cluster import Cluster
    from whale.ir.plan import Plan
    from whale.ir.workload import DeviceMemory, Prediction, Workload

__all__ = ["command", "fullest", "memory_text", "stage_table", "step_lines"]


def stage_table(plan: Plan, prediction: Prediction, workload: Workload, cluster: Cluster) -> str:
    """A row for each stage: its ranks, devices, mesh, other decisions that any stage has, time and fullest device."""
    from whale.planner.report.labels import decision_columns, shares_text

    memory = {device.rank: device for device in prediction.memory}
    decided = decision_columns(plan.stages)
    rows = []
    for index, (stage, work) in enumerate(zip(plan.stages, workload.stages, strict=True)):
        axes = [f"{axis.name} {axis.size}{shares_text(axis.shares)}" for axis in stage.axes or ()]
        tasks = [ahead + back for ahead, back in zip(work.forward, work.backward, strict=True)]
        types = dict.fromkeys(cluster.devices[rank].type.name for rank in stage.ranks)
        rows.append(
            [
                str(index),
                _ranks(stage.ranks),
                ", ".join(types),
                "; ".join(axes) or "one device",
                *(column[index] for column in decided.values()),
                time_text(max(tasks)),
                memory_text(fullest([memory[rank] for rank in stage.ranks if rank in memory])),
            ]
        )
    return text_table("", ["stage", "ranks", "devices", "mesh", *decided, "a micro-batch", "fullest device"], rows)


def step_lines(plan: Plan, prediction: Prediction) -> list[str]:
    """The step, its interval, and where its time goes."""
    low, high = prediction.step_seconds_interval
    least = (plan.batch or 0) % (plan.micro_batch_rows or 1)
    ragged = f", the last of {least}" if least else ""
    hosts = [
        f"{host.node} has {bytes_text(host.total)} of {bytes_text(host.capacity)} in its own memory: state "
        f"{bytes_text(host.state)}, activations {bytes_text(host.activations)}"
        for host in prediction.hosts
    ]
    return [
        f"{plan.schedule}, {counted(plan.micro_batches, 'micro-batch', 'es')} of "
        f"{counted(plan.micro_batch_rows or 0, 'row')}{ragged}",
        f"step {time_text(prediction.step_seconds)} ({time_text(low)} to {time_text(high)}, "
        f"{prediction.source}), {(plan.batch or 0) / prediction.step_seconds:.1f} rows/s, "
        f"bubble {prediction.bubble:.1%}",
        f"of which{_of_rank(prediction)} "
        + ", ".join(f"{part} {time_text(spent)}" for part, spent in prediction.breakdown.items() if spent > 0),
        *hosts,
    ]


def _of_rank(prediction: Prediction) -> str:
    """The rank whose parts are shown, in words."""
    rank = prediction.breakdown_rank
    return "" if rank is None else f" on rank {rank}, the busiest,"


def command(plan: Plan, cluster: Cluster, path: Path | None) -> str:
    """The commands that run the plan, one process per device: one line, or for several nodes one for each run of equal
    nodes, with placeholders.

    Nodes have numbers, not an elastic rendezvous, because ranks must lie on the nodes for which they are planned.
    """
    call = f"whale.parallelize(model, batch, plan={str(path or 'plan.json')!r})"
    nodes = cluster.nodes
    if len(nodes) == 1:
        return f"torchrun --nproc-per-node {len(nodes[0].ranks)} train.py    # with {call}"
    lines, first = [], 0
    for count, run in groupby(nodes, key=lambda node: len(node.ranks)):
        last = first + len(list(run)) - 1
        number, where = ("NODE_RANK", f"each of {nodes[first].name} to {nodes[last].name}: NODE_RANK {first} to {last}")
        if first == last:
            number, where = str(first), nodes[first].name
        lines.append(
            f"torchrun --nnodes {len(nodes)} --node-rank {number} --nproc-per-node {count} --master-addr HOST "
            f"--master-port 29500 train.py    # on {where}"
        )
        first = last + 1
    return "\n".join([*lines, f"# HOST is the address of {nodes[0].name}; train.py calls {call}"])


def fullest(memory: list[DeviceMemory]) -> DeviceMemory:
    """The device that has the least left of what it has."""
    return max(memory, key=lambda device: device.share)


def memory_text(device: DeviceMemory) -> str:
    """Bytes of a device, and their fraction of its capacity."""
    return f"{bytes_text(device.total)} ({device.share:.0%})"


def _ranks(ranks: tuple[int, ...]) -> str:
    from whale.ir.ranks import write_ranks

    return ", ".join(map(str, write_ranks(ranks)))
