"""The planner decides: from a profile and a cluster to a Plan. It knows no torch, no graph and no runtime."""

if __name__ != "whale.planner":
    raise ImportError(
        f"this folder is the package 'whale.planner', not {__name__!r}: write 'import whale.planner' "
        "(from the root of the repository, or after 'pip install whale-parallel')"
    )
