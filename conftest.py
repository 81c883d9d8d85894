"""Test set-up of the whole repository: the folders behind the symlinks are collected once, under their right names."""

collect_ignore = ["planner", "strategies"]
