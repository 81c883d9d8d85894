"""Test set-up of the whole repository: the folders behind the symlinks are collected once, under their right names.

Hypothesis keeps no clock: how fast examples are drawn says something of the machine, not of the code.
"""

from hypothesis import HealthCheck, settings

collect_ignore = ["planner", "strategies"]

settings.register_profile("whale", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whale")
