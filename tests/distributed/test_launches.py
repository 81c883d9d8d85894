"""Processes that the script starts itself: a rank is what its process group says, without any variable."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import whale
from tests.distributed.harness import PRELOADED
from tests.small_models import decoder, tokens

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def train(rank: int, meeting: str, results: multiprocessing.SimpleQueue[tuple[int, int, float]]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for name in VARIABLES:
        os.environ.pop(name, None)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = decoder(layers=1)
    whale.annotate(model, {"": whale.split()})
    parallel = whale.parallelize(model, tokens(rows=6), device="cpu", timeout_seconds=20)
    results.put((rank, parallel.world_size, parallel.train_step(**tokens(rows=6)).item()))
    dist.barrier()
    os._exit(0)  # leaving groups in an orderly way takes seconds


def test_ranks_of_a_group_that_the_script_made_train_together(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    results = context.SimpleQueue()
    meeting = f"file://{tmp_path / 'meeting'}"  # a store that no variable names
    processes = [context.Process(target=train, args=(rank, meeting, results), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, 0]
    torch.manual_seed(0)
    expected = decoder(layers=1)(**tokens(rows=6)).item()
    found = sorted(results.get() for _ in processes)
    assert [(rank, size) for rank, size, _ in found] == [(0, 2), (1, 2)]
    assert [loss for _, _, loss in found] == pytest.approx([expected] * 2, rel=1e-5)
