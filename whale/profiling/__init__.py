"""Profiling: measurements of machines and of a model's layers on the ranks of one launch, within a time limit.

`measuring` runs the measurements; `machine` (devices), `links` (pairs and groups of them) and `layers` define them;
`places` has the device of each rank.
"""

from whale.profiling.layers import layer_items
from whale.profiling.machine import Sizes, machine_items
from whale.profiling.measuring import PREPARATION_SECONDS, Item, measure_items
from whale.profiling.places import RankLocation, places_of

__all__ = [
    "PREPARATION_SECONDS",
    "Item",
    "RankLocation",
    "Sizes",
    "layer_items",
    "machine_items",
    "measure_items",
    "places_of",
]
