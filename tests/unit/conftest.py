"""Set-up of tests of one process: models that many of them use are traced once."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

OF_CHANGES = {"test_attributes", "test_attributes_of_others", "test_copies", "test_forward_state", "test_known_values"}
"""Tests of what code reads from Python, which two traces that look alike may have in other states."""


@pytest.fixture(autouse=True, scope="module")
def _shared_traces(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of a module share traces, and all processes of a run captures."""
    from tests.distributed.traces import shared

    with nullcontext() if request.path.stem in OF_CHANGES else shared():
        yield
