"""The search: from a profile and a cluster to the fastest plans that can be executed.

`whale.planner.search.searching` says what is searched and how; `evaluate` scores a given plan.
"""

from whale.errors import InfeasibleError
from whale.planner.cost.stage_cost import Memo
from whale.planner.search.evaluate import evaluate
from whale.planner.search.problem import (
    Candidate,
    Degrees,
    Dropped,
    Fixed,
    Found,
    Point,
    Progress,
    SearchSettings,
    StageChoice,
)
from whale.planner.search.searching import search

__all__ = [
    "Candidate",
    "Degrees",
    "Dropped",
    "Fixed",
    "Found",
    "InfeasibleError",
    "Memo",
    "Point",
    "Progress",
    "SearchSettings",
    "StageChoice",
    "evaluate",
    "search",
]
