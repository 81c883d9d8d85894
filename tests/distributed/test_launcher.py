"""Ranks that a notebook or a script launches: what they return, which error is shown, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import whale
from whale.errors import UsageError
from whale.launcher import _spawn

ROOT = Path(__file__).resolve().parents[2]

NOTEBOOK = """
import os, sys, time, torch, whale, torch._dynamo
from pathlib import Path

torch.randn(500, 500, requires_grad=True).matmul(torch.randn(500, 500)).sum().backward()  # with OpenMP's threads

def train(rows):
    torch.manual_seed(0)
    model = whale.parallelize(torch.nn.Linear(4, 1), torch.ones(rows, 4), loss_fn=lambda y, batch: y.square().sum())
    loss = model.train_step(torch.ones(rows, 4))
    return model.rank, model.world_size, loss, model.full_state_dict()

def fail(rank, what):
    if os.environ["RANK"] == str(rank):
        what()
    time.sleep(100)

def leave(how):
    torch.distributed.init_process_group("gloo")
    if os.environ["RANK"] == "0":
        raise ValueError("bad row")
    time.sleep(100)

def message(function, *args, **options):
    try:
        whale.launch(function, *args, processes=2, **options)
    except whale.WhaleError as error:
        return f"{type(error).__name__}: {error}"

torch.manual_seed(0)
local = torch.nn.Linear(4, 1)
expected = local(torch.ones(6, 4)).square().sum()
(first, second) = whale.launch(train, 6, processes=2, results="all")
assert [first[:2], second[:2]] == [(0, 2), (1, 2)]
assert torch.allclose(first[2], expected) and torch.equal(first[2], second[2])
assert torch.equal(first[3]["weight"], local.weight)

class Held(torch.nn.Linear):
    pass

assert isinstance(whale.launch(lambda: Held(2, 2), processes=1), Held)  # rank 0 alone
assert whale.launch(lambda: sys.exit(), processes=2) is None

def bad_row():
    raise ValueError("bad row")

found = message(fail, 1, bad_row)
assert found.startswith("WorkerError: rank 1 of 2 failed: ValueError: bad row"), found
assert 'in bad_row\\nValueError: bad row' in found and "launcher.py" not in found, found
found = message(lambda: fail(1, lambda: os.kill(os.getpid(), 9)))
assert "rank 1 of 2 ended with signal SIGKILL" in found, found
found = message(lambda: time.sleep(100), timeout_seconds=1)
assert "ranks [0, 1] of 2 did not end within 1 s" in found, found
assert "rank 0 was here (most recent call first):" in found, found
assert found.count("\\n  File ") <= 2 and 'in <lambda>' in found, found
assert "returned generator, which cannot be sent" in message(lambda: (x for x in ())), found
assert "rank 0 of 2 already" in message(lambda: whale.launch(train, 6, processes=2))
assert "without calling it" in message(None)
left = [path.name for path in Path(sys.argv[1]).iterdir()]
assert not [name for name in left if name.startswith(("whale", "torchelastic"))], left
print("all held")
"""

SPAWNED = """
import os, torch, whale, whale.launcher

def add(x):
    return x + int(os.environ["RANK"])

if __name__ == "__main__":
    whale.launcher._can_fork = lambda: False
    assert whale.launch(add, torch.ones(1), processes=2, results="all") == [1, 2]
    print("all held")
"""

WAITING = """
import os, signal, sys, time, whale
from pathlib import Path

def wait():
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(100)

try:
    whale.launch(wait, processes=2)
except KeyboardInterrupt:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("interrupted")
"""


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}


@pytest.mark.slow
def test_a_notebook_launches_its_own_functions(tmp_path: Path) -> None:
    command = [sys.executable, "-", str(tmp_path)]
    done = subprocess.run(
        command, input=NOTEBOOK, env=environment(tmp_path), capture_output=True, text=True, timeout=100
    )
    assert done.stdout.endswith("all held\n"), done.stdout + done.stderr
    assert done.stderr == ""


def test_fresh_processes_import_the_function(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=100)
    assert done.stdout == "all held\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_no_rank_outlives_the_process_that_launched_it(tmp_path: Path, number: signal.Signals) -> None:
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(WAITING)
    pids.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(script), str(pids)], env=environment(tmp_path), stdout=subprocess.PIPE, text=True
    )
    until(lambda: len(list(pids.iterdir())) == 2)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == ((0, "interrupted\n") if number == signal.SIGINT else (-number, ""))
    until(lambda: not any(Path(f"/proc/{path.name}").exists() for path in pids.iterdir()))


def until(condition: object, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_new_processes_cannot_import_is_refused_with_both_ways_out() -> None:
    assert _spawn(torch.add, (1, 2)) == "spawn"
    words = "it has used CUDA .*; and new processes cannot be given .*<lambda>.*inside of the function"
    with pytest.raises(UsageError, match=words):
        _spawn(lambda: 1, ())


def test_a_rank_of_a_launch_does_not_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="this process is rank 1 of 4 already; call the function itself"):
        whale.launch(print, processes=2)
