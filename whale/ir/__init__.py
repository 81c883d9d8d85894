"""What the parts share, as data: cluster, strategies, placements, schedules, plans. It imports only the errors."""
