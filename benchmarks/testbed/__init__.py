"""Testbed: a cluster of mixed emulated devices on one Linux machine, with real processes, sockets and CPU time and
throttled speeds.

An emulated device is a CPU quota and a memory limit (cgroups); a node is a network namespace whose link to the switch
has a rate (``tc tbf``). ``python -m benchmarks.testbed -h`` is its command line; `Testbed` is the same for a program.
"""

from .bed import RankFailed, Run, Testbed, TimedOut, clean, missing
from .description import Description

__all__ = ["Description", "RankFailed", "Run", "Testbed", "TimedOut", "clean", "missing"]
