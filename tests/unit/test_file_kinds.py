"""A file of one kind that is given in place of another is called by its kind, not by its first unknown key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from whale.errors import InputFileError
from whale.ir.cluster import Cluster
from whale.ir.jobs import Jobs
from whale.ir.plan import Plan
from whale.ir.profile import ModelProfile

PLAN = Plan(world_size=2).dumps()
RECORD = '{"version": 1, "candidates": [], "points": []}'
CLUSTER = '[[nodes]]\ndevices = 2\ndevice = "T4"\n'


@pytest.mark.parametrize(
    ("read", "text", "says"),
    [
        (ModelProfile.parse, PLAN, "the file is a plan, as .*, not a profile of a model"),
        (ModelProfile.parse, RECORD, "the file is the record of a search, as .*, not a profile of a model"),
        (Plan.parse, RECORD, "the file is the record of a search, as .*, not a plan"),
        (lambda text: Cluster.parse(text, "json"), PLAN, "the file is a plan, as .*, not a description of a cluster"),
        (Jobs.parse, CLUSTER, "the file is a description of a cluster, not a list of jobs"),
        (Plan.parse, PLAN.replace("world_size", "world_sise"), "unknown key 'world_sise'; did you mean 'world_size'"),
    ],
)
def test_the_kind_of_a_file_is_named(read: Callable[[str], Any], text: str, says: str) -> None:
    with pytest.raises(InputFileError, match=says):
        read(text)
