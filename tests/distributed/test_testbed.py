"""A testbed on this machine: the limits hold, failures reach the caller, and nothing is left behind."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.testbed import Description, RankFailed, Testbed, TimedOut, bed, clean, missing, network

ROOT = Path(__file__).resolve().parents[2]
FILE = """
[links]
inter_node = {bandwidth = "80 Mbit/s"}
[[nodes]]
device = "cpu-30"
[[nodes]]
device = "cpu-15"
[device_types]
cpu-30 = {cores = 0.3, memory = "1 GiB"}
cpu-15 = {cores = 0.15, memory = "48 MiB"}
"""

PROBLEMS = missing()
pytestmark = pytest.mark.skipif(bool(PROBLEMS), reason=f"a testbed needs {'; '.join(PROBLEMS)}")


def _traces(name: str) -> list[str]:
    hierarchy = bed._hierarchy()
    assert hierarchy is not None
    return sorted(hierarchy.names() & {name}) + network.names(name)


@pytest.fixture(scope="module")
def testbed() -> Iterator[Testbed]:
    with Testbed(Description.parse(FILE)) as up:
        yield up
    assert not _traces(up.name)


BURN = """
import os, socket, sys, time
start, used = time.monotonic(), time.process_time()
while time.monotonic() < start + 1: pass
print((time.process_time() - used) / (time.monotonic() - start))
rank, size = int(os.environ["RANK"]), 2**20
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(address) as server:
        peer = server.accept()[0]
        start, left = time.monotonic(), size
        while left: left -= len(peer.recv(left))
        print((time.monotonic() - start) * 80e6 / 8 / size)
else:
    for attempt in range(100):
        try: peer = socket.create_connection(address); break
        except ConnectionRefusedError: time.sleep(0.05)
    peer.sendall(bytes(size))
"""


def test_quotas_and_link_rates_hold(testbed: Testbed) -> None:
    done = testbed.run([sys.executable, "-I", "-S", "-c", BURN], timeout_seconds=60, show=False)
    fast, over_link = map(float, done.outputs[0].split())
    slow = float(done.outputs[1])
    # A machine that is busy gives less than the quota, and never more; the same of the link.
    assert 0.05 < fast < 0.35
    assert 0.05 < slow < 0.2
    assert over_link > 0.9


def test_ranks_find_torchruns_environment(testbed: Testbed) -> None:
    command = ["sh", "-c", "echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $GLOO_SOCKET_IFNAME $OMP_NUM_THREADS $OWN"]
    done = testbed.run(command, environment={"OWN": "x"}, show=False)
    assert done.outputs == ("0 0 2 10.77.0.1 eth0 1 x\n", "1 0 2 10.77.0.1 eth0 1 x\n")


def test_the_first_failing_rank_ends_all(testbed: Testbed) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        testbed.run(["sh", "-c", "echo rank $RANK says >&2; test $RANK = 0 && exec sleep 60; exit 7"], show=False)
    assert (caught.value.rank, caught.value.rank_exit_code, caught.value.tail) == (1, 7, "rank 1 says")
    assert time.monotonic() - start < 30


def test_a_rank_over_its_memory_is_said_to_be(testbed: Testbed) -> None:
    code = "import os, time; x = bytearray(2**26 if os.environ['RANK'] == '1' else 1); time.sleep(60)"
    with pytest.raises(RankFailed, match="rank 1 .*137: it needed more than its memory of 48 MiB"):
        testbed.run([sys.executable, "-I", "-S", "-c", code], show=False)


def test_a_timeout_ends_all(testbed: Testbed) -> None:
    with pytest.raises(TimedOut, match="running still: rank 0, 1"):
        testbed.run(["sh", "-c", "sleep 60 & sleep 60"], timeout_seconds=0.3, show=False)
    hierarchy = bed._hierarchy()
    assert hierarchy is not None and not hierarchy._members(testbed.name, None)


def _start_command(tmp_path: Path, *command: str) -> tuple[subprocess.Popen[str], str]:
    """A testbed of the command line, with its ranks running; and its name."""
    (tmp_path / "bed.toml").write_text(FILE)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.testbed", "run", str(tmp_path / "bed.toml"), "--", *command],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    name = f"whale-testbed-{process.pid}-{bed._start_time(process.pid)}-0"
    return process, name


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_tears_down(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process, name = _start_command(tmp_path, "sh", "-c", "echo up; exec sleep 60")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    assert _traces(name)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert not _traces(name)


def test_what_a_killed_testbed_leaves_is_cleaned_and_others_are_not(tmp_path: Path, testbed: Testbed) -> None:
    process, name = _start_command(tmp_path, "sh", "-c", "echo up; exec sleep 60")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.kill()
    process.communicate()
    assert _traces(name)
    assert name in clean()
    assert not _traces(name), "a group with a living process cannot be removed"
    assert _traces(testbed.name)


def test_a_failure_is_the_last_on_the_screen_and_its_code_is_kept(tmp_path: Path) -> None:
    process, name = _start_command(tmp_path, "sh", "-c", "test $RANK = 0 && exec sleep 60; echo went wrong >&2; exit 9")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 9
    assert errors.splitlines()[-2:] == ["testbed: rank 1 failed with exit code 9; its last lines:", "went wrong"]
    assert not _traces(name)
