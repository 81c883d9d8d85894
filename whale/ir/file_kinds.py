"""The kinds of Whale's files, known by keys that no other kind has together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

__all__ = ["said_of_another_kind"]

_KEYS: Mapping[str, Collection[str]] = MappingProxyType(
    {
        "Plan": ("version", "world_size"),
        "ModelProfile": ("layers", "kinds"),
        "SearchRecord": ("candidates", "points"),
        "Workload": ("world_size", "boundaries"),
        "Cluster": ("nodes",),
        "Jobs": ("jobs",),
    }
)
"""By the name of the record that is read of it."""

_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "Plan": "a plan, as 'whale plan' and 'whale search' write it",
        "ModelProfile": "a profile of a model, as 'whale profile model' writes it",
        "SearchRecord": "the record of a search, as 'whale search --record' writes it",
        "Workload": "a workload (the times of stages and links) or a plan that has one",
        "Cluster": "a description of a cluster",
        "Jobs": "a list of jobs",
    }
)


def said_of_another_kind(keys: Collection[str], wanted: str) -> str | None:
    """The error of a file with these keys that is of another kind than the record *wanted*; None if it is not known
    to be.

    >>> said_of_another_kind(["format_version", "name", "layers", "kinds"], "Jobs")
    "the file is a profile of a model, as 'whale profile model' writes it, not a list of jobs"
    >>> said_of_another_kind(["world_size", "anything"], "Jobs")
    """
    found = next((kind for kind, own in _KEYS.items() if all(key in keys for key in own)), wanted)
    return None if found == wanted else f"the file is {_WORDS[found]}, not {_WORDS.get(wanted, 'what is needed')}"
