"""Cluster files that several tests use."""

PROCESSORS = """
[links]
inter_node = {bandwidth = "1 GB/s", latency = "50 us"}
[[nodes]]
devices = 1
device = "cpu-fast"
[[nodes]]
devices = 1
device = "cpu-slow"
[device_types.cpu-fast]
speed = {float64 = "3 GFLOP/s", float32 = "3 GFLOP/s"}
memory = "16 GiB"
memory_bandwidth = "1 GB/s"
[device_types.cpu-slow]
speed = {float64 = "1 GFLOP/s", float32 = "1 GFLOP/s"}
memory = "16 GiB"
memory_bandwidth = "0.4 GB/s"
"""
"""Two unlike processors, a node each."""
