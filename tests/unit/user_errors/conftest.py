"""Errors of users, and their messages, before any process group is made.

Each case checks the class, the exit code and the parts of the message: what was given, the rule, what to do.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

import whale
from tests.refusals import Launched


@pytest.fixture(autouse=True)
def nothing_is_joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    whale.set_default_strategy(None)
    assert not dist.is_initialized()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Make this process look like rank 0 of several; nothing listens there, so joining would fail at once."""

    def launch(size: int) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(size))

    return launch
