"""Shared data structures: cluster, strategies, placements, schedules, plans. It imports only the errors."""
