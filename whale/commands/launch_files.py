"""Files that start a plan on a cluster's engine: a batch script for Slurm, a JobSet for Kubernetes, a script for this
machine.

Nodes are started in the order of the plan's ranks, by groups of equal nodes. Whatever order an engine would have
otherwise, node numbers are given to ``whale run``, which ends a job after what no restart would fix. This module makes
text, and starts nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import yaml

from whale.errors import UsageError
from whale.ir.cluster import Cluster
from whale.runtime.ending import ENDING
from whale.runtime.location import DEVICE_TYPE

__all__ = ["Launch", "job_set", "local_script", "slurm_script"]

PORT = 29500
"""The port at which ranks meet, where jobs do not share hosts."""

RESTARTS = 3
"""How often ranks are started again, from the newest checkpoint, before the engine's own rules act."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Equal nodes that follow each other.

    Attributes:
        device_type: name of the type of their devices.
        processes: devices, and ranks, of a node.
        first: number of the first node.
        nodes: how many there are.
        on_processors: whether they are processors, of which no engine counts devices.
    """

    device_type: str
    processes: int
    first: int
    nodes: int
    on_processors: bool


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command on the nodes of a cluster.

    Attributes:
        name: of the job.
        cluster: of the plan.
        command: the script and its arguments.
        python: interpreter.
        features: what an engine calls a device type, where it is not the type's name.
        options: further lines of the engine, such as ``--partition=main`` of Slurm.
    """

    name: str
    cluster: Cluster
    command: Sequence[str]
    python: str = "python"
    features: Mapping[str, str]
    options: Sequence[str] = ()

    @property
    def groups(self) -> list[Group]:
        """Groups of equal nodes, in the order of ranks.

        Raises:
            UsageError: a node has devices of several types, which one process each could not tell apart.
        """
        nodes = []
        for node in self.cluster.nodes:
            types = {self.cluster.devices[rank].type for rank in node.ranks}
            if len(types) > 1:
                names = ", ".join(sorted(type_.name for type_ in types))
                raise UsageError(f"node {node.name} has devices of several types ({names}); start its ranks by hand")
            type_ = types.pop()
            nodes.append((type_.name, len(node.ranks), type_.is_processor))
        found: list[Group] = []
        for (name, processes, on_processors), run in groupby(nodes):
            first = found[-1].first + found[-1].nodes if found else 0
            found.append(
                Group(
                    device_type=name,
                    processes=processes,
                    first=first,
                    nodes=len(list(run)),
                    on_processors=on_processors,
                )
            )
        return found

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.cluster.nodes)

    def agent(self, number: str, processes: str, host: str, port: str) -> str:
        """The command of a node; the arguments are text of a shell."""
        words = [
            shlex.quote(self.python), "-m whale run", f"--elastic {self.num_nodes}", f"--machine {number}",
            f"--processes {processes}", f"--max-restarts {RESTARTS}", f"--endpoint {host}:{port}",
            shlex.join(self.command),
        ]  # fmt: skip
        return " ".join(words)


def slurm_script(launch: Launch) -> str:
    """A batch script for ``sbatch``: a heterogeneous job with a component for each group of equal nodes.

    Components keep the order of ranks; a constraint such as ``[fast*1&slow*1]`` would have that of node names.

    Raises:
        UsageError: a device type has no name for Slurm.
    """
    groups = launch.groups
    lines = [
        "#!/bin/bash",
        f"# Start with: sbatch {launch.name}.sbatch. Its components are in the order of the plan's ranks.",
    ]
    for index, group in enumerate(groups):
        if index:
            lines.append("#SBATCH hetjob")
        else:
            lines += [f"#SBATCH --job-name={launch.name}", f"#SBATCH --output={launch.name}.%j.out"]
        lines.append(f"#SBATCH --nodes={group.nodes} --ntasks-per-node=1")
        feature = launch.features.get(group.device_type, group.device_type)
        if not re.fullmatch(r"[A-Za-z0-9_.&|*\[\]-]+", feature):
            raise UsageError(
                f"{feature!r} is no feature of Slurm; say what the nodes of {group.device_type} have: "
                f"--feature {shlex.quote(group.device_type)}=NAME"
            )
        lines.append(f"#SBATCH --constraint={feature}")
        if not group.on_processors:
            lines.append(f"#SBATCH --gpus-per-node={group.processes}")
        lines += [f"#SBATCH {option}" for option in launch.options]
    nodes = "SLURM_JOB_NODELIST_HET_GROUP_0" if len(groups) > 1 else "SLURM_JOB_NODELIST"
    components = f"--het-group={','.join(str(index) for index in range(len(groups)))} " if len(groups) > 1 else ""
    return "\n".join(
        [
            *lines,
            "",
            "set -eu",
            "# The first node, and a port of this job; sbatch keeps them where they are set already.",
            f'export MASTER_ADDR="${{MASTER_ADDR:-$(scontrol show hostnames "${nodes}" | head -n 1)}}"',
            'export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"',
            f"srun {components}--kill-on-bad-exit=1 bash -c '",
            *_cases(groups, "SLURM_PROCID"),
            f"exec {_quoted(launch.agent('$SLURM_PROCID', '$processes', '$MASTER_ADDR', '$MASTER_PORT'))}",
            "'",
            "",
        ]
    )


def _cases(groups: Sequence[Group], number: str) -> list[str]:
    """Lines of a shell that set ``processes``, and the device type that processors stand for, by the node's number."""
    lines = []
    for index, group in enumerate(groups):
        word = "if" if index == 0 else "elif"
        test = f"{word} [ ${number} -lt {group.first + group.nodes} ]; then" if index < len(groups) - 1 else "else"
        name = _quoted(shlex.quote(group.device_type))
        stands = f" export {DEVICE_TYPE}={name};" if group.on_processors else ""
        if len(groups) == 1:
            return [f"processes={group.processes};{stands}"]
        lines.append(f"{test} processes={group.processes};{stands}")
    return [*lines, "fi"]


def _quoted(text: str) -> str:
    """Text within single quotes of a shell."""
    return text.replace("'", "'\\''")


def job_set(launch: Launch, *, image: str, claim: str | None = None) -> str:
    """A JobSet (``jobset.x-k8s.io/v1alpha2``) as YAML: a replicated job for each group of equal nodes, with one pod a
    node, whose number is that of the group's first node and its index.

    Args:
        launch: the command.
        image: of the container.
        claim: a volume for checkpoints, which all nodes see, mounted at ``/checkpoints``.

    Raises:
        UsageError: the name of the job, the image, the claim or a device type is none for Kubernetes.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,30}[a-z0-9])?", launch.name):
        raise UsageError(
            f"{launch.name!r} is no name for Kubernetes: use a lower case letter, then lower case letters, digits and "
            "dashes (--name)"
        )
    if not re.fullmatch(r"[\w.:/@-]{1,500}", image, re.ASCII):
        raise UsageError(f"--image {image!r}: no image; write it as registry/name:tag")
    if claim is not None and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", claim):
        raise UsageError(f"--claim {claim!r}: no name for Kubernetes: use lower case letters, digits, dashes and dots")
    jobs = []
    for index, group in enumerate(launch.groups):
        number = f"$(({group.first} + JOB_COMPLETION_INDEX))" if group.first else "$JOB_COMPLETION_INDEX"
        host = f"{launch.name}-g0-0-0.{launch.name}"
        # Kubernetes reads $$ as $, and $(NAME) as a variable of its own
        command = f"exec {launch.agent(number, str(group.processes), host, str(PORT))}".replace("$", "$$")
        container: dict[str, object] = {
            "name": "whale",
            "image": image,
            "command": ["sh", "-c", command],
        }
        pod: dict[str, object] = {"restartPolicy": "Never", "containers": [container]}
        if group.on_processors:
            container["env"] = [{"name": DEVICE_TYPE, "value": group.device_type}]
        else:
            feature = launch.features.get(group.device_type, f"NVIDIA-{group.device_type}")
            if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", feature):
                raise UsageError(
                    f"{feature!r} is no label of Kubernetes; say what the nodes of {group.device_type} have: "
                    f"--feature {shlex.quote(group.device_type)}=LABEL"
                )
            pod["nodeSelector"] = {"nvidia.com/gpu.product": feature}
            container["resources"] = {"limits": {"nvidia.com/gpu": group.processes}}
        if claim is not None:
            container["volumeMounts"] = [{"name": "checkpoints", "mountPath": "/checkpoints"}]
            pod["volumes"] = [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}}]
        spec = {
            "parallelism": group.nodes,
            "completions": group.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(ENDING)}}]
            },
            "template": {"spec": pod},
        }
        jobs.append({"name": f"g{index}", "replicas": 1, "template": {"spec": spec}})
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": launch.name},
        "spec": {
            "failurePolicy": {
                "maxRestarts": 10,
                "rules": [
                    {"name": "ending", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "network": {"enableDNSHostnames": True, "subdomain": launch.name},
            "replicatedJobs": jobs,
        },
    }
    head = f"# Start with: kubectl apply -f {launch.name}.yaml. Its jobs are in the order of the plan's ranks.\n"
    return head + yaml.safe_dump(document, sort_keys=False, width=1000)


def local_script(launch: Launch) -> str:
    """A shell script that starts all nodes on this machine, each with its own ``whale run``; it ends with the first
    code other than 0, and leaves no process."""
    lines = [
        "#!/bin/bash",
        "# All nodes of the plan as processes of this machine.",
        "set -u",
        "pids=()",
        "trap 'kill \"${pids[@]}\" 2>/dev/null; exit 143' INT TERM",
        f'port="${{MASTER_PORT:-{PORT}}}"',
    ]
    for group in launch.groups:
        stands = f"{DEVICE_TYPE}={shlex.quote(group.device_type)} " if group.on_processors else ""
        for number in range(group.first, group.first + group.nodes):
            lines.append(f"{stands}{launch.agent(str(number), str(group.processes), '127.0.0.1', '$port')} &")
            lines.append("pids+=($!)")
    return "\n".join(
        [
            *lines,
            "code=0",
            "while [ ${#pids[@]} -gt 0 ]; do  # wait -n forgets nodes that end at the same time",
            '    for index in "${!pids[@]}"; do',
            '        kill -0 "${pids[index]}" 2>/dev/null && continue',
            '        wait "${pids[index]}"; ended=$?',
            '        unset "pids[index]"',
            '        if [ "$ended" -ne 0 ] && [ "$code" -eq 0 ]; then code=$ended; kill "${pids[@]}" 2>/dev/null; fi',
            "    done",
            "    sleep 0.1",
            "done",
            'exit "$code"',
            "",
        ]
    )
