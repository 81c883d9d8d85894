"""Runtime of each rank over torch.distributed: groups, collectives, executor. It knows no graph and no planner."""
