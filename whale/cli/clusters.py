"""Cluster files as every verb reads them: device types are the known ones and those that a profile brings along."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from whale.errors import InputFileError, UsageError

if TYPE_CHECKING:
    from whale.ir.cluster import Cluster
    from whale.ir.profile import ModelProfile

__all__ = ["load_cluster", "load_cluster_and_profile"]


def load_cluster_and_profile(
    cluster_file: str | None, profile_file: str | None
) -> tuple[Cluster | None, ModelProfile | None]:
    """The cluster that ``--cluster`` names, and the profile of ``--profile``, which adds device types.

    Raises:
        UsageError: a profile alone.
    """
    if cluster_file is None:
        if profile_file is not None:
            raise UsageError("--profile is for --cluster: it defines device types of a cluster file")
        return None, None
    from whale.ir.profile import ModelProfile

    profile = None if profile_file is None else ModelProfile.load(profile_file)
    return load_cluster(cluster_file, profile), profile


def load_cluster(path: str | PathLike[str], profile: ModelProfile | None) -> Cluster:
    """Read a cluster file that may name known device types and those of *profile*.

    Raises:
        InputFileError: with file and line; of an unknown device type, from where its figures may come.
    """
    from whale.ir.cluster import Cluster
    from whale.planner.catalog import device_types, device_types_with

    catalog = device_types() if profile is None else device_types_with(profile)
    try:
        return Cluster.load(path, catalog=catalog)
    except InputFileError as error:
        if not error.message.startswith("unknown device type"):
            raise
        raise InputFileError(
            f"{error.message}, or {_where_else(error.message, profile)}", path=error.path, line=error.line
        ) from error


def _where_else(message: str, profile: ModelProfile | None) -> str:
    """Other sources of a device type that *message* calls unknown."""
    if profile is None:
        return "give a profile that has its figures (--profile)"
    for name, figures in profile.device_types.items():
        if message.startswith(f"unknown device type {name!r}"):
            return f"complete it in the profile of {profile.name}, which has only its {', '.join(figures) or 'name'}"
    return (
        f"give a profile that has its figures (that of {profile.name} has {', '.join(profile.device_types) or 'none'})"
    )
