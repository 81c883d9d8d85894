"""Measure machines, and a model's layers on them, on the ranks of one launch, within a time limit.

`measuring` says how it goes; what can be measured is in `machine` (devices), `links` (pairs and groups of them) and
`layers`; `places` says what each rank runs on.
"""

from whale.profiling.layers import layer_items
from whale.profiling.machine import Sizes, machine_items
from whale.profiling.measuring import PREPARATION_SECONDS, Item, measure_items
from whale.profiling.places import Place, places_of

__all__ = [
    "PREPARATION_SECONDS",
    "Item",
    "Place",
    "Sizes",
    "layer_items",
    "machine_items",
    "measure_items",
    "places_of",
]
