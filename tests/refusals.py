"""`parallelize` on what it must refuse, for the tests of what a user can do wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tests.small_models import tokens
from whale import api, errors
from whale.errors import UsageError

Launched = Callable[[int], None]
"""Makes this process look like rank 0 of a number of processes."""


def refused(
    kind: type[errors.WhaleError], parts: list[str], model: Any, batch: Any = None, **options: Any
) -> errors.WhaleError:
    """Check that parallelize refuses *model* with an error of exactly this class, whose message has all *parts*."""
    with pytest.raises(errors.WhaleError) as caught:
        api.parallelize(model, tokens() if batch is None else batch, **{"device": "cpu", **options})
    assert type(caught.value) is kind
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    for part in parts:
        assert part in message, message
    return caught.value


def compiles(model: nn.Module, batch: Any = None, **options: Any) -> None:
    """Check that all checks pass: what fails then is joining, of which the environment says nothing."""
    with pytest.raises(UsageError, match="MASTER_"):
        api.parallelize(model, tokens() if batch is None else batch, device="cpu", **options)
