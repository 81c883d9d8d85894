"""Pipeline schedules: orders of forward and backward tasks."""
