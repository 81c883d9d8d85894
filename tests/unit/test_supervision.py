"""Steps that never end on a device: all ranks say which rank failed and why, within the timeout, and are gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from whale.errors import WhaleError, WorkerError
from whale.runtime.failure import Failures
from whale.runtime.supervision import Supervisor

TIMEOUT_SECONDS = 1.0


class Device:
    """A device in whose queue a step ends when the test says so, or when communication is aborted."""

    def __init__(self, store: dist.Store, rank: int, *, hangs: bool = False) -> None:
        self.ended, self.aborted = False, 0
        self.left: list[int] = []
        self.hangs, self.error = hangs, ""
        self.failures = Failures(rank, store, TIMEOUT_SECONDS)
        self.supervisor = Supervisor(
            self.failures, 3, self.abort, leave=self.left.append, poll_seconds=0.02, grace_seconds=0.3
        )

    def query(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.ended

    def abort(self) -> None:
        self.aborted += 1
        self.ended = not self.hangs

    def run(self, step: int) -> None:
        self.supervisor.watch(f"step {step}", self, TIMEOUT_SECONDS)


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def wait_for(condition: Callable[[], Any]) -> float:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < 20
        time.sleep(0.01)
    return time.monotonic() - begin


def told(device: Device) -> str:
    with pytest.raises(WhaleError) as caught:
        device.supervisor.check()
    return str(caught.value)


def test_a_rank_that_failed_is_named_by_those_whose_kernels_wait_for_it(
    store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    device = Device(store, 0)
    device.run(7)
    Failures(2, store).report("rank 2 failed in task 1F2 (stage 1, micro-batch 2): ValueError: the numbers are bad")
    assert wait_for(lambda: device.aborted) < TIMEOUT_SECONDS
    assert told(device) == (
        "rank 2 failed in task 1F2 (stage 1, micro-batch 2): ValueError: the numbers are bad [rank 0 was in step 7]"
    )
    assert "the numbers are bad" in capsys.readouterr().err
    assert device.left == []  # its kernels have ended, and the script gets the error


def test_a_rank_that_is_gone_without_a_word_is_named_after_the_timeout(store: dist.Store) -> None:
    devices = [Device(store, rank) for rank in (0, 1)]
    for device in devices:
        device.run(3)
    assert wait_for(lambda: all(d.aborted for d in devices)) < TIMEOUT_SECONDS + 5
    for device in devices:
        assert "the end of step 3, and rank 2 did not come within 1 s" in told(device)


def test_a_device_that_failed_is_reported_to_the_others(store: dist.Store) -> None:
    broken, other = Device(store, 0), Device(store, 1)
    broken.error = "CUDA error: an illegal memory access was encountered"
    for device in (broken, other):
        device.run(1)
    wait_for(lambda: other.aborted)
    assert "rank 0 failed in step 1: RuntimeError: CUDA error: an illegal memory access" in told(other)
    assert "illegal memory access" in told(broken)


def test_a_process_whose_kernels_go_on_is_ended(store: dist.Store) -> None:
    device = Device(store, 0, hangs=True)
    device.run(1)
    Failures(1, store).report("rank 1 failed in task 0F0: it is out of memory")
    wait_for(lambda: device.left)
    assert device.left == [WorkerError.exit_code]


def test_steps_that_end_are_forgotten(store: dist.Store) -> None:
    device = Device(store, 0)
    for step in range(3):
        device.run(step)
    device.ended = True
    wait_for(lambda: not device.supervisor._steps)
    device.supervisor.check()
    assert device.aborted == 0
