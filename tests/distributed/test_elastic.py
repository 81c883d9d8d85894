"""``whale run``: machines that are lost and come back, codes that end a job, and a curve that goes on.

Machines are processes of this one. Where only they matter, scripts are plain Python, without torch.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.clusters import PROCESSORS
from tests.distributed.scripts import Forked as Machine
from whale.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Start machines; no process is left at the end."""
    machines: list[Machine] = []

    def started(*arguments: str, forks_ranks: bool = False, **environment: str) -> Machine:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WHALE_ELASTIC")
        own = {name: value for name, value in os.environ.items() if name not in names}
        own |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
        said = tmp_path / f"machine{len(machines)}.txt"
        command = ("-m", "whale", "run", *arguments)
        options = {"start_new_session": True, "forks_ranks": forks_ranks}
        machines.append(Machine(command, environment=own, folder=tmp_path, output=said, **options))
        return machines[-1]

    yield started
    for machine in machines:
        lose(machine)


def lose(machine: Machine) -> None:
    """The agent and its ranks, which are in sessions of their own, end at once."""
    ranks = subprocess.run(
        ["pgrep", "-P", str(machine.pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    for pid in [machine.pid, *map(int, ranks)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    machine.wait()


def port() -> str:
    """A free port that no connection is given: machines bind it seconds later."""
    while True:
        number = random.SystemRandom().randint(20_000, 30_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", number))
            return str(number)


def wait_for(path: Path, text: str) -> None:
    end = time.monotonic() + SECONDS
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < end, f"{text!r} is not in {path.read_text() if path.exists() else path}"
        time.sleep(0.05)


def ended(machine: Machine) -> int:
    return machine.wait(SECONDS)


@pytest.mark.parametrize("code", [2, 4])
def test_a_code_that_no_restart_fixes_ends_the_job(code: int, start: Callable[..., Machine], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"open('starts', 'a').write('x')\nraise SystemExit({code})")
    assert ended(start("train.py")) == code
    assert (tmp_path / "starts").read_text() == "x"
    said = (tmp_path / "machine0.txt").read_text()
    assert f"rank 0 ended with exit code {code}; it is not started again, because that would not help" in said
    assert "Traceback" not in said


def test_other_failures_are_started_again_as_often_as_allowed(start: Callable[..., Machine], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nopen('starts', 'a').write(sys.argv[1])\nraise SystemExit(1)")
    assert ended(start("--max-restarts", "2", "train.py", "y")) == 6
    assert (tmp_path / "starts").read_text() == "yyy"
    assert "rank 0 ended with exit code 1, after 2 restarts" in (tmp_path / "machine0.txt").read_text()


@pytest.mark.parametrize("other", ["waits", "fails"])
def test_a_machine_with_a_number_ends_the_job_on_all(other: str, start: Callable[..., Machine], tmp_path: Path) -> None:
    """Ranks of the other machines may not notice that it is gone, or fail and start again without it."""
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "open('starts' + os.environ['RANK'], 'a').write('x')\n"
        "while not (os.path.exists('starts0') and os.path.exists('starts1')): time.sleep(0.05)\n"
        f"time.sleep(600 if os.environ['RANK'] == '0' and {other == 'waits'} else 0.2)\n"
        "raise SystemExit(2 if os.environ['RANK'] == '1' else 1)"
    )
    options = ("--elastic", "2", "--endpoint", f"127.0.0.1:{port()}", "--max-restarts", "1000")
    machines = [start(*options, "--machine", str(number), "train.py") for number in (0, 1)]
    assert [ended(machine) for machine in machines] == [6, 2]
    said = (tmp_path / "machine0.txt").read_text()
    assert "machine 1 has ended the job: rank 1 ended with exit code 2; it is not started again" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_job_goes_on_with_the_machines_that_are_there(start: Callable[..., Machine], tmp_path: Path) -> None:
    """3 -> 2 -> 3 machines; then one of them ends the job on all."""
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "with open('worlds', 'a') as file:\n"
        "    file.write(os.environ['WORLD_SIZE'] + ' ' + os.environ['NAME'] + chr(10))\n"
        "while not os.path.exists('stop'): time.sleep(0.05)\n"
        "raise SystemExit(4 if os.environ['NAME'] == 'b' else time.sleep(600))"
    )
    options = ("--elastic", "2:3", "--endpoint", f"127.0.0.1:{port()}")
    worlds = tmp_path / "worlds"
    machines = {
        name: start(*options, "--head" if name == "a" else "--no-head", "train.py", NAME=name) for name in "abc"
    }
    for name in "abc":
        wait_for(worlds, f"3 {name}")
    lose(machines["c"])
    # Ranks without communication do not see it: one that fails does, and the machines meet again.
    ranks = subprocess.run(["pgrep", "-P", str(machines["a"].pid)], capture_output=True, text=True, check=True).stdout
    os.kill(int(ranks.split()[-1]), signal.SIGKILL)
    ranks = subprocess.run(["pgrep", "-P", str(machines["b"].pid)], capture_output=True, text=True, check=True).stdout
    os.kill(int(ranks.split()[-1]), signal.SIGKILL)
    wait_for(worlds, "2 a")
    wait_for(worlds, "2 b")
    worlds.write_text("")
    machines["d"] = start(*options, "--no-head", "train.py", NAME="d")
    for name in "abd":
        wait_for(worlds, f"3 {name}")
    (tmp_path / "stop").write_text("")
    assert ended(machines["b"]) == 4


@pytest.mark.slow
def test_the_curve_goes_on_with_other_devices_under_another_plan(start: Callable[..., Machine], tmp_path: Path) -> None:
    (tmp_path / "both.toml").write_text(PROCESSORS)
    arguments = ["--cluster", "both.toml", "--directory", "run", "--steps", "12", "--pause", "0.3"]
    script = [str(ROOT / "examples" / "elastic.py"), *arguments]
    options = ("--elastic", "1:2", "--endpoint", f"127.0.0.1:{port()}")
    stays = start(*options, "--head", *script, forks_ranks=True, WHALE_DEVICE_TYPE="cpu-slow")
    lost = start(*options, "--no-head", *script, forks_ranks=True, WHALE_DEVICE_TYPE="cpu-fast")
    wait_for(tmp_path / "run" / "log.jsonl", '"step": 3,')
    lose(lost)
    assert ended(stays) == 0
    said = (tmp_path / "machine0.txt").read_text()
    assert "2 machines with 2 ranks have met" in said and "1 machines with 1 ranks have met" in said
    starts = re.findall(r"rank 0 of (\d) has \d+ parameters, from step (\d+)", said)
    assert [ranks for ranks, _ in starts] == ["2", "1"]
    steps = [int(step) for step in re.findall(r"step (\d+): loss", said)]
    assert sorted(set(steps)) == list(range(12))
    assert int(starts[1][1]) >= 2 and len(steps) - len(set(steps)) <= 4  # what was not saved yet


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--elastic", "3:8"], "--elastic 3:8: give --endpoint HOST:PORT, the same on every machine"),
        (["--elastic", "8:3"], "the least number is at least 1, and at most the greatest"),
        (["--elastic", "three"], "write the least and the greatest number of machines, such as 3:8"),
        (["--elastic", "1:2", "--endpoint", "node0"], "--endpoint node0: write HOST:PORT, such as node0:29400"),
        (["--elastic", "2", "--machine", "2", "--endpoint", "node0:29400"], "give their number, --elastic N, and"),
        (["--elastic", "1:2", "--machine", "0", "--endpoint", "node0:29400"], "give their number, --elastic N, and"),
        (["--machine", "0"], "--machine 0: machines with numbers are all there"),
        (["--processes", "2"], "is no file; give the training script"),
    ],
)
def test_options_that_say_nothing_are_refused(arguments: list[str], message: str) -> None:
    script = "nothing.py" if "--processes" in arguments else str(ROOT / "examples" / "elastic.py")
    result = CliRunner().invoke(app, ["run", *arguments, script])
    assert result.exit_code == 2
    assert message in result.stderr
