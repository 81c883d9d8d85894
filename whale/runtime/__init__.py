"""What runs on each rank, over torch.distributed: groups, collectives, the executor. It knows no graph and no planner."""
