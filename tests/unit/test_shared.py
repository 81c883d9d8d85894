"""Work shared with forked processes: every task is done once, and what fails there is done here."""

import os
import time
from pathlib import Path

import pytest

from whale.commands.shared import Shared, available_cores

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")


def test_every_task_is_done_once_by_this_process_or_a_fork(tmp_path: Path) -> None:
    here, forked = os.getpid(), tmp_path / "forked"

    def work(number: int) -> tuple[int, int]:
        if os.getpid() != here:
            forked.touch()
        end = time.monotonic() + 30
        while not forked.exists() and time.monotonic() < end:  # on a busy machine forks come late
            time.sleep(0.01)
        time.sleep(0.01)
        return number, os.getpid()

    with Shared(work, 20, processes=3) as shared:
        found = [shared.result(number) for number in range(20)]
    assert [number for number, _ in found] == list(range(20))
    assert 1 < len({process for _, process in found}) <= 3
    assert here in {process for _, process in found}


def test_one_process_does_only_what_is_asked_for_in_order() -> None:
    done: list[int] = []
    with Shared(lambda number: done.append(number), 3, processes=1) as shared:
        shared.result(0)
    assert done == [0]


def test_results_larger_than_a_pipe_arrive() -> None:
    with Shared(lambda number: bytes(2_000_000), 8, processes=2) as shared:
        assert all(len(shared.result(number)) == 2_000_000 for number in range(8))


def test_what_fails_in_a_fork_fails_here_and_only_where_it_is_asked_for() -> None:
    def work(number: int) -> int:
        time.sleep(0.01)
        if number % 3 == 1:
            raise ValueError(f"task {number}")
        return number

    with Shared(work, 6, processes=2) as shared:
        assert [shared.result(number) for number in (5, 0, 2, 3)] == [5, 0, 2, 3]
        with pytest.raises(ValueError, match="task 4"):
            shared.result(4)


def test_a_fork_that_dies_leaves_its_tasks_to_this_process() -> None:
    here = os.getpid()

    def work(number: int) -> int:
        time.sleep(0.01)
        if os.getpid() != here:
            os._exit(1)
        return number

    with Shared(work, 6, processes=2) as shared:
        assert [shared.result(number) for number in range(6)] == list(range(6))


def test_results_that_cannot_be_sent_are_made_here() -> None:
    with Shared(lambda number: lambda: number, 6, processes=2) as shared:
        assert [shared.result(number)() for number in range(6)] == list(range(6))


def test_leaving_ends_forks_that_still_work() -> None:
    began = time.monotonic()
    here = os.getpid()

    def work(number: int) -> None:
        time.sleep(0 if os.getpid() == here else 60)

    with Shared(work, 3, processes=2):
        pass
    assert time.monotonic() - began < 30


def test_more_tasks_than_are_offered_are_done_where_they_are_asked_for() -> None:
    with Shared(lambda number: -number, 10_000, processes=2) as shared:
        assert shared.result(9_999) == -9_999


def test_there_is_a_core() -> None:
    assert available_cores() >= 1
