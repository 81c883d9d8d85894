"""Launch and restart under the real torchrun, which executes its ranks in the first test, and forks them in others."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed.scripts import Ended, run_script

SCRIPT = """
import atexit, os, signal, sys
import torch, torch.distributed as dist
from whale.runtime.launch import groups, initialize

# Handlers run last in first out, so that this one sees what `initialize` left to be done at the end.
atexit.register(lambda: os._exit(3) if dist.is_initialized() else None)

# The survivor of a killed rank waits until its agent restarts it, which takes a loaded machine more than 20 s.
world = initialize(60, expected_world_size=2, device_type="cpu")
if world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and "kill" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
value = torch.tensor(world.rank + 1.0)
dist.all_reduce(value, group=groups([(0, 1)])[0, 1])
print(f"rank {world.rank} has {value.item()}", flush=True)
"""


def torchrun(folder: Path, processes: int, *arguments: str, restarts: int = 0, forks_ranks: bool = True) -> Ended:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    options = ("--standalone", f"--nproc-per-node={processes}", f"--max-restarts={restarts}")
    return run_script("-m", "torch.distributed.run", *options, str(script), *arguments, forks_ranks=forks_ranks)


def test_two_processes_meet_and_part_at_the_end_of_the_script(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 2, forks_ranks=False)
    assert done.returncode == 0, done.stderr
    # Lines of two processes may run together in one pipe.
    assert sorted(re.findall(r"rank \d has [\d.]+\d", done.stdout)) == ["rank 0 has 3.0", "rank 1 has 3.0"]


@pytest.mark.slow
def test_after_a_killed_rank_two_agents_meet_again(tmp_path: Path) -> None:
    """Each agent counts its own restarts: after the kill one of them counts none."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=1"]
    command += ["--rdzv-id=two", "--local-addr=127.0.0.1", str(script), "kill"]
    with ThreadPoolExecutor() as threads:
        agents = list(threads.map(lambda _: run_script(*command, forks_ranks=True), range(2)))
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(agent.stderr for agent in agents)
    assert sum(agent.stdout.count("has 3.0") for agent in agents) == 2
    assert not any("WorkerError" in agent.stderr for agent in agents)


@pytest.mark.slow
def test_after_a_killed_rank_the_next_attempt_meets_again(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 2, "kill", restarts=1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("has 3.0") == 2


def test_a_wrong_number_of_processes_fails_at_once_with_both_numbers(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 3)
    assert done.returncode != 0
    assert "the plan is for 2 processes, but 3 were started" in done.stderr
