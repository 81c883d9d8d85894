"""``whale launch``: the files for Slurm, Kubernetes and this machine; started here, and on a Slurm of two nodes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from tests.clusters import PROCESSORS
from whale.cli.app import app
from whale.cli.clusters import load_cluster
from whale.ir.plan import ClusterIdentity, Plan

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "tests" / "golden" / "jobset_schema.json").read_text())

GPUS = """
[links]
inter_node = {bandwidth = "100 Gbit/s", latency = "15 us"}
[[nodes]]
devices = 8
device = "A100-SXM4-80GB"
[[nodes]]
count = 2
devices = 4
device = "V100-SXM2-32GB"
"""


def planned(folder: Path, cluster: str) -> list[str]:
    """Arguments that name a plan of all devices and its cluster."""
    (folder / "cluster.toml").write_text(cluster)
    found = load_cluster(folder / "cluster.toml", None)
    plan = Plan(world_size=len(found.devices), cluster=ClusterIdentity.of(found))
    (folder / "plan.json").write_text(plan.dumps())
    return [str(folder / "plan.json"), "--cluster", str(folder / "cluster.toml")]


def launched(folder: Path, cluster: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["launch", *planned(folder, cluster), *arguments])


def printed(folder: Path, cluster: str, *arguments: str) -> str:
    result = launched(folder, cluster, *arguments[:-1], "--dry-run", "--", arguments[-1], "--lr", "1e-3", "it's")
    assert result.exit_code == 0, result.output
    return result.stdout


SLURM = r"""#!/bin/bash
# Start with: sbatch train.sbatch. Its components are in the order of the plan's ranks.
#SBATCH --job-name=train
#SBATCH --output=train.%j.out
#SBATCH --nodes=1 --ntasks-per-node=1
#SBATCH --constraint=a100
#SBATCH --gpus-per-node=8
#SBATCH --time=60
#SBATCH hetjob
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --constraint=V100-SXM2-32GB
#SBATCH --gpus-per-node=4
#SBATCH --time=60

set -eu
# The first node, and a port of this job; sbatch keeps them where they are set already.
export MASTER_ADDR="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)}"
export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
srun --het-group=0,1 --kill-on-bad-exit=1 bash -c '
if [ $SLURM_PROCID -lt 1 ]; then processes=8;
else processes=4;
fi
exec python -m whale run --elastic 3 --machine $SLURM_PROCID --processes $processes --max-restarts 3 \
--endpoint $MASTER_ADDR:$MASTER_PORT train.py --lr 1e-3 '\''it'\''"'\''"'\''s'\''
'
""".replace("\\\n", "")


def test_a_component_of_slurm_for_each_group_of_equal_nodes_in_the_order_of_ranks(tmp_path: Path) -> None:
    options = ("--on", "slurm", "--feature", "A100-SXM4-80GB=a100", "--option=--time=60")
    assert printed(tmp_path, GPUS, *options, "train.py") == SLURM


def test_equal_nodes_are_no_heterogeneous_job(tmp_path: Path) -> None:
    text = printed(
        tmp_path, GPUS.replace("A100-SXM4-80GB", "V100-SXM2-32GB").replace("8", "4", 1), "--on", "slurm", "train.py"
    )
    assert "#SBATCH --nodes=3 --ntasks-per-node=1" in text
    assert "hetjob" not in text and "--het-group" not in text
    assert 'show hostnames "$SLURM_JOB_NODELIST"' in text
    assert "processes=4;" in text


def test_the_job_set_is_one_of_the_schema_with_nodes_numbered_in_the_order_of_ranks(tmp_path: Path) -> None:
    text = printed(tmp_path, GPUS, "--on", "k8s", "--image", "here/whale:1", "--claim", "runs", "train.py")
    document = yaml.safe_load(text)
    assert list(findings(document, SCHEMA)) == []
    jobs = document["spec"]["replicatedJobs"]
    commands = [as_kubernetes_reads(job["template"]["spec"]["template"]["spec"]["containers"][0]) for job in jobs]
    assert commands[0] == (
        "exec python -m whale run --elastic 3 --machine $JOB_COMPLETION_INDEX --processes 8 --max-restarts 3 "
        "--endpoint train-g0-0-0.train:29500 train.py --lr 1e-3 'it'\"'\"'s'"
    )
    assert "--machine $((1 + JOB_COMPLETION_INDEX)) --processes 4" in commands[1]
    assert document["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    ends = [job["template"]["spec"]["podFailurePolicy"]["rules"][0] for job in jobs]
    assert ends == [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2, 3, 4]}}] * 2
    assert [job["template"]["spec"]["completions"] for job in jobs] == [1, 2]
    selectors = [job["template"]["spec"]["template"]["spec"]["nodeSelector"] for job in jobs]
    assert selectors[1] == {"nvidia.com/gpu.product": "NVIDIA-V100-SXM2-32GB"}


def as_kubernetes_reads(container: dict[str, Any]) -> str:
    """The command of a shell; without escapes, a variable is one that the container does not have."""
    text: str = container["command"][2]
    assert not re.search(r"(?<!\$)(\$\$)*\$\(", text)
    return text.replace("$$", "$")


def test_arguments_come_to_a_script_of_kubernetes_as_they_are(tmp_path: Path) -> None:
    files, arguments = planned(tmp_path, GPUS), ["pa$$word", "$(JOB_COMPLETION_INDEX)", "$HOME", "a b"]
    options = ("--on", "k8s", "--image", "here/whale:1", "--dry-run")
    result = CliRunner().invoke(app, ["launch", *files, *options, "--", "train.py", *arguments])
    container = yaml.safe_load(result.stdout)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    command = as_kubernetes_reads(container["containers"][0])
    assert shlex.split(command)[-5:] == ["train.py", *arguments]


def test_the_schema_finds_a_misspelt_field(tmp_path: Path) -> None:
    document = yaml.safe_load(printed(tmp_path, GPUS, "--on", "k8s", "--image", "here/whale:1", "train.py"))
    document["spec"]["replicatedJobs"][0]["template"]["spec"]["completionModus"] = "Indexed"
    document["spec"]["replicatedJobs"][1]["replicas"] = "one"
    assert list(findings(document, SCHEMA)) == [
        "spec.replicatedJobs.0.template.spec: unknown completionModus",
        "spec.replicatedJobs.1.replicas: not of type integer",
    ]


TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": float}


def findings(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """Deviations of a value from a schema of Kubernetes, as far as ours needs it."""
    wanted = schema.get("type", [])
    types = [wanted] if isinstance(wanted, str) else wanted
    if types and not any(isinstance(value, TYPES[name]) for name in types):
        yield f"{where}: not of type {' or '.join(types)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: not one of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], str(value)):
        yield f"{where}: not like {schema['pattern']}"
    if isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{where}: no {name}"
        for name, inner in value.items():
            others = schema.get("additionalProperties", True)
            own = schema.get("properties", {}).get(name, others)
            if own is False:
                yield f"{where}: unknown {name}"
            elif isinstance(own, dict):
                yield from findings(inner, own, f"{where}.{name}".lstrip("."))
    if isinstance(value, list) and "items" in schema:
        for index, inner in enumerate(value):
            yield from findings(inner, schema["items"], f"{where}.{index}")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--on", "k8s"], 2, "--on k8s needs --image"),
        (["--on", "local", "--image", "a"], 2, "--image is for --on k8s"),
        (["--on", "k8s", "--image", "a", "--option=-x"], 2, "--option is for --on slurm"),
        (["--on", "slurm", "--option=partition=gpu"], 2, "--option partition=gpu: options of sbatch begin with a dash"),
        (["--on", "slurm", "--feature", "T4=a"], 2, "--feature T4=a: the cluster has no T4, but A100-SXM4-80GB, V100"),
        (["--on", "k8s", "--image", "a", "--name", "Big_Job"], 2, "'Big_Job' is no name for Kubernetes"),
        (["--on", "k8s", "--image", "a", "--name", "1abc"], 2, "'1abc' is no name for Kubernetes"),
        (["--on", "k8s", "--image", "a b"], 2, "--image 'a b': no image"),
        (["--on", "k8s", "--image", ""], 2, "--image '': no image"),
        (["--on", "k8s", "--image", "a", "--claim", "Bad Name"], 2, "--claim 'Bad Name': no name for Kubernetes"),
        (["--on", "k8s", "--image", "a", "--feature", f"V100-SXM2-32GB={'x' * 70}"], 2, "is no label of Kubernetes"),
        (["--on", "slurm", "--feature", "V100-SXM2-32GB=a", "--feature", "V100-SXM2-32GB=b"], 2, "is a already"),
        (["--on", "slurm", "--", "-x"], 2, "'-x' is no script"),
        (["--on", "slurm", "--", ""], 2, "'' is no script"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: list[str], code: int, message: str, tmp_path: Path) -> None:
    result = launched(tmp_path, GPUS, *arguments, "--dry-run", "--", "train.py")
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr


def test_the_plan_and_the_cluster_file_are_not_written_over(tmp_path: Path) -> None:
    result = launched(tmp_path, GPUS, "--on", "slurm", "-o", str(tmp_path / "cluster.toml"), "--", "train.py")
    assert result.exit_code == 2
    assert "cluster.toml is the cluster file; give another file" in result.stderr
    assert (tmp_path / "cluster.toml").read_text() == GPUS


def test_a_script_that_is_not_there_is_not_started(tmp_path: Path) -> None:
    result = launched(tmp_path, GPUS, "--on", "local", "--", str(tmp_path / "train.py"))
    assert result.exit_code == 2
    assert "train.py is no file; give the training script" in result.stderr


def test_a_plan_of_other_machines_is_refused(tmp_path: Path) -> None:
    planned(tmp_path, GPUS)
    (tmp_path / "cluster.toml").write_text(PROCESSORS)
    files = [str(tmp_path / "plan.json"), "--cluster", str(tmp_path / "cluster.toml")]
    result = CliRunner().invoke(app, ["launch", *files, "--on", "slurm", "--", "train.py"])
    assert result.exit_code == 3
    assert "the plan's cluster has A100-SXM4-80GB at rank 0, but this one has cpu-fast" in result.stderr


# --- started ----------------------------------------------------------------------------------------------------------

WHERE = """
import os, pathlib, sys
rank = os.environ["RANK"]
with pathlib.Path(sys.argv[1], rank).open("a") as file:
    file.write(os.environ["WHALE_DEVICE_TYPE"] + " of " + os.environ["WORLD_SIZE"] + ";")
raise SystemExit(int(sys.argv[2]) if rank == "1" else 0)
"""


def started(folder: Path, *arguments: str, timeout: float = 200.0) -> subprocess.CompletedProcess[str]:
    """Run a command of whale in a process of its own, without what a launcher has set."""
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, "-m", "whale", *arguments]
    return subprocess.run(command, env=own, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False)


def test_all_nodes_of_a_plan_are_started_here(tmp_path: Path) -> None:
    (tmp_path / "where.py").write_text(WHERE)
    files = planned(tmp_path, PROCESSORS)
    options = ("--on", "local", "--python", sys.executable)
    done = started(tmp_path, "launch", *files, *options, "--", "where.py", str(tmp_path), "0")
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["cpu-fast of 2;", "cpu-slow of 2;"]


@pytest.mark.parametrize(("code", "starts"), [(3, 1), (1, 4)])
def test_a_code_that_no_restart_fixes_ends_the_job_at_once(code: int, starts: int, tmp_path: Path) -> None:
    (tmp_path / "where.py").write_text(WHERE)
    options = ("--on", "local", "--python", sys.executable)
    files = planned(tmp_path, PROCESSORS)
    script = ("--", "where.py", str(tmp_path), str(code))
    done = started(tmp_path, "launch", *files, *options, *script, timeout=60)  # torch's agents wait 60 s for each other
    assert done.returncode == (code if starts == 1 else 6), done.stderr
    assert (tmp_path / "1").read_text() == "cpu-slow of 2;" * starts
    assert f"rank 1 ended with exit code {code}" in done.stderr and "Traceback" not in done.stderr


# --- Slurm: two nodes on this machine, from Debian's packages ---------------------------------------------------------

NEEDED = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol")
MISSING = [name for name in NEEDED if shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin") is None]

CONFIGURATION = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName=a-slow NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=1000 Feature=cpu-slow
NodeName=z-fast NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=1000 Feature=cpu-fast
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""The slow node is the first by name, so that the order of the plan is not that of names."""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Slurm:
    """A controller and two nodes."""

    def __init__(self, folder: Path) -> None:
        port, first, second = free_ports(3)
        self.file = folder / "slurm.conf"
        host = socket.gethostname().partition(".")[0]
        self.file.write_text(CONFIGURATION.format(host=host, port=port, first=first, second=second, folder=folder))
        (folder / "state").mkdir()
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        self.environment |= {"SLURM_CONF": str(self.file), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.environment["PATH"] += ":/usr/sbin"
        self.environment["MASTER_ADDR"] = "127.0.0.1"  # the names of the nodes are no hosts
        commands = [["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "a-slow"], ["slurmd", "-D", "-N", "z-fast"]]
        self.processes: list[subprocess.Popen[bytes]] = []
        for command in commands:
            said = (folder / f"{command[0]}{len(self.processes)}.txt").open("w")
            with said:
                self.processes.append(subprocess.Popen(command, env=self.environment, stdout=said, stderr=said))
        self.until(lambda: self.said("sinfo", "-h", "-o", "%t %D").strip() == "idle 2", "both nodes are idle")

    def said(self, *command: str, folder: Path | None = None) -> str:
        ran = subprocess.run(command, env=self.environment, cwd=folder, capture_output=True, text=True, check=False)
        return ran.stdout + ran.stderr

    def until(self, true: Any, what: str, seconds: float = 400.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            logs = "".join(log.read_text()[-2000:] for log in self.file.parent.glob("*.log"))
            assert time.monotonic() < end, f"not so: {what}\n{self.said('sinfo')}\n{self.said('squeue')}\n{logs}"
            time.sleep(0.2)

    def run(self, script: Path) -> str:
        """Submit a script, wait for its end, and return its output."""
        said = self.said("sbatch", "--parsable", str(script), folder=script.parent)
        number = said.strip().partition(";")[0]
        assert number.isdecimal(), said
        self.until(lambda: not (queue := self.said("squeue", "-h")).strip() or " held)" in queue, "the job has ended")
        return (script.parent / f"{script.stem}.{number}.out").read_text()

    def end(self) -> None:
        self.said("scancel", "--user=root", "--signal=KILL")
        self.said("scancel", "--user=root")
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    if MISSING or os.geteuid() != 0:
        why = f"{', '.join(MISSING)} (apt-get install slurmctld slurmd slurm-client)" if MISSING else "root"
        pytest.skip(f"a Slurm of two nodes on this machine needs {why}")
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp") as folder:  # a name of a socket has at most 108 bytes
        found = Slurm(Path(folder))
        try:
            yield found
        finally:
            found.end()


TRAIN = """
import hashlib, os, pathlib, signal
import torch, whale
from tests.small_models import decoder, tokens

STEPS, RUN = 6, pathlib.Path("run")


def trained(saved):
    torch.manual_seed(0)
    model = decoder(layers=2)
    whale.annotate(model, {"": whale.split()})
    model = whale.parallelize(model, tokens(), plan="plan.json", cluster="cluster.toml", device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = whale.load_checkpoint(RUN, model, optimizer=optimizer) if saved else None
    for step in range(done.step if done else 0, STEPS):
        model.train_step(**tokens())
        optimizer.step()
        optimizer.zero_grad()
        if saved:
            whale.save_checkpoint(RUN, model, step=step + 1, optimizer=optimizer)
        if saved and done is None and step == 3 and model.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # while it is written
    whale.wait_for_checkpoints()
    state = model.full_state_dict()
    digest = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()
    return model.rank, done.step if done else 0, digest


rank, step, digest = trained(True)
uninterrupted = trained(False)[2]
if rank == 0:
    print("from step", step, "as", os.environ["WHALE_DEVICE_TYPE"], "equal:", digest == uninterrupted, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_of_slurm_that_is_killed_while_it_saves_goes_on_with_the_same_bits(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    files = planned(tmp_path, PROCESSORS)
    options = ("--on", "slurm", "--python", sys.executable, "-o", str(tmp_path / "train.sbatch"))
    done = started(tmp_path, "launch", *files, *options, "--", "train.py")
    assert done.returncode == 0, done.stderr
    said = slurm.run(tmp_path / "train.sbatch")
    found = re.search(r"from step (\d) as (\S+) equal: (\w+)", said)
    assert found, said
    # Rank 0 is that of the plan, which is on the last node by name.
    assert (found[2], found[3]) == ("cpu-fast", "True")
    assert int(found[1]) in (3, 4)


# --- Ray --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_ray_have_the_losses_of_one_process(workers: int) -> None:
    if workers:
        pytest.importorskip("ray", reason='Ray is not installed: pip install "ray[train]"')
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py"), "--workers", str(workers)]
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    own |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"parity on {max(workers, 1)} workers: losses equal" in done.stdout
