"""Messages between ranks: a wait ends soon after a rank was lost that would have to write."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from whale.errors import WorkerError
from whale.runtime.failure import Failures
from whale.runtime.launch import World
from whale.runtime.store import Board


def world() -> World:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    failures = Failures(0, store, 120.0)
    return World(rank=0, size=3, device=torch.device("cpu"), failures=failures, store=store)


def test_a_message_is_not_awaited_from_a_rank_that_is_lost() -> None:
    own = world()
    board = Board(own, "checkpoint", patience_seconds=120.0)
    own.failures.lost("a step", (1,), RuntimeError("connection reset by peer"))
    began = time.monotonic()
    with pytest.raises(WorkerError, match="and rank 1 did not come within 3 s after other communication had failed$"):
        board.get("written/1", 1)
    assert time.monotonic() - began < 20


def test_what_is_there_is_read_although_a_rank_is_lost() -> None:
    own = world()
    board = Board(own, "checkpoint", patience_seconds=120.0)
    own.failures.lost("a step", (1,), RuntimeError("connection reset by peer"))
    board.put("written/2", ["digest", ""])
    assert board.get("written/2", 2) == ["digest", ""]


def test_a_wait_ends_with_its_patience() -> None:
    with pytest.raises(WorkerError, match=r"folder of the checkpoint, and rank 1 did not come within 0\.2 s$"):
        Board(world(), "checkpoint", patience_seconds=0.2).get("folder", 1)


def test_a_long_wait_fills_no_log(capfd: pytest.CaptureFixture[str]) -> None:
    own = world()
    board = Board(own, "search", patience_seconds=60.0)
    late = threading.Timer(2.6, board.put, ("plan", "found"))
    late.start()
    assert board.get("plan", None) == "found"
    assert capfd.readouterr().err.count("timed out") <= 1
