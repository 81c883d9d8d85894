"""Test set-up of the whole repository: the folders behind the symlinks are collected once, under their right names.

Hypothesis keeps no clock: how fast examples are drawn says something of the machine, not of the code.
"""

import importlib.util

from hypothesis import HealthCheck, settings

collect_ignore = ["planner", "strategies"]
if importlib.util.find_spec("triton") is None:
    collect_ignore.append("whale/runtime/adamw_triton.py")

settings.register_profile("whale", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whale")
