"""Strategies: placements for every tensor and the bridges between them. They know no costs and no planner."""

if __name__ != "whale.strategies":
    raise ImportError(
        f"this folder is the package 'whale.strategies', not {__name__!r}: write 'import whale.strategies' "
        "(from the root of the repository, or after 'pip install whale-parallel')"
    )
