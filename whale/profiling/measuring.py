"""The measuring loop: it runs the measurements that the profile lacks, in rounds over all ranks, until the time limit.

The work is a list of items, equal on all ranks and in one order. Rank 0 sets the time of each item; the ranks of an
item measure it, the first of them reports, and rank 0 writes the result to the profile and the profile to its file. An
interrupted run is resumed by running it again, because items in the profile are not measured again. Ranks wait for each
other at the store and not in collectives, so that they do not disturb measurements. This module does not know what an
item measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from whale.errors import WhaleError
from whale.ir.profile import ModelProfile
from whale.runtime.launch import World
from whale.runtime.store import Board

__all__ = ["PREPARATION_SECONDS", "Item", "measure_items"]

MOST_SECONDS = 1.0
"""Seconds of an item of weight 1: five windows."""
PREPARATION_SECONDS = 900.0
"""Seconds for which ranks wait for the slowest to load and capture a model, also on throttled devices."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One measurement.

    Attributes:
        name: for messages.
        ranks: that measure it together; the first reports.
        weight: its share of the time, in proportion to the others.
        known: whether a profile has it.
        run: measure it for about the given seconds; returns what JSON can represent.
        merged: adds the result to a profile.
        prepare: untimed preparation; all ranks do it at the same time.
    """

    name: str
    ranks: tuple[int, ...]
    known: Callable[[ModelProfile], bool]
    run: Callable[[float], Any]
    merged: Callable[[ModelProfile, Any], ModelProfile]
    weight: float = 1.0
    prepare: Callable[[], object] = lambda: None


def measure_items(
    world: World,
    items: Sequence[Item],
    profile: ModelProfile,
    *,
    time_limit: float,
    most_seconds: float = MOST_SECONDS,
    passes: int = 1,
    parallel: bool = False,
    write: Callable[[ModelProfile], None] = lambda profile: None,
    tell: Callable[[str], None] = lambda message: None,
) -> tuple[ModelProfile, int]:
    """Measure the items that the profile lacks; return the new profile, and the number of items that the time did not
    allow.

    Called by all ranks with the same items, which they prepare before the time begins. Rank 0's profile counts, and
    only rank 0 writes and reports, after each item. Items that cannot be measured, such as a layer that does not fit in
    memory, are reported and skipped. An item of weight 1 gets *most_seconds* at most in each of the
    *passes*: one pass measures all items, and the medians over passes count, because a machine that is not idle varies.
    *parallel* lets consecutive items without common ranks run at the same time.
    """
    board = Board(world, "profile", time_limit + PREPARATION_SECONDS)
    if world.rank == 0:
        board.put("known", [item.known(profile) for item in items])
    missing = [item for item, known in zip(items, board.get("known", 0), strict=True) if not known]
    for item in missing:
        if world.rank in item.ranks:
            item.prepare()
    board.put(f"ready/{world.rank}", True)
    for rank in range(world.size):
        board.get(f"ready/{rank}", rank)
    end = time.monotonic() + time_limit
    before, found, failed = profile, dict[Item, list[Any]](), set[Item]()
    rounds = _rounds(missing, parallel) * passes
    for index, together in enumerate(rounds):
        if world.rank == 0:
            now = [item for item in together if item not in failed]
            remaining = [item for later in rounds[index:] for item in later if item not in failed]
            seconds = _seconds(now, remaining, end - time.monotonic(), most_seconds)
            board.put(f"round/{index}", [seconds, [together.index(item) for item in now]])
        seconds, chosen = board.get(f"round/{index}", 0)
        if not seconds:
            continue
        for number in chosen:
            if world.rank in together[number].ranks:
                result = _try(together[number], seconds)
                if world.rank == together[number].ranks[0]:
                    board.put(f"result/{index}/{number}", result)
        for number in chosen if world.rank == 0 else ():
            item = together[number]
            result = board.get(f"result/{index}/{number}", item.ranks[0])
            if "failure" in result:
                failed.add(item)
                tell(f"not measured: {item.name}: {result['failure']}")
                continue
            values = found.setdefault(item, [])
            values.append(result["value"])
            if len(values) == 1:
                profile = item.merged(profile, values[0])
            write(profile)
            tell(f"measured: {item.name}")
    if passes > 1 and found:
        profile = before
        for item, values in found.items():
            profile = item.merged(profile, _medians(values))
        write(profile)
    board.put(f"done/{world.rank}", True)
    for rank in range(world.size) if world.rank == 0 else ():
        board.get(f"done/{rank}", rank)  # the store is rank 0's, and ends with it
    return profile, len(set(missing) - found.keys() - failed)


def _medians(values: Sequence[Any]) -> Any:
    """Medians, number by number, of measurements that are a number or a list of numbers.

    >>> _medians([[1.0, [4.0]], [3.0, [2.0]], [2.0, [9.0]]])
    [2.0, [4.0]]
    """
    if isinstance(values[0], list):
        return [_medians(each) for each in zip(*values, strict=True)]
    return median(values)


def _rounds(items: Sequence[Item], parallel: bool) -> list[list[Item]]:
    """Items that run at the same time, in the order in which they were given."""
    rounds: list[list[Item]] = []
    for item in items:
        busy = {rank for other in rounds[-1] for rank in other.ranks} if rounds else set()
        if parallel and rounds and not busy & set(item.ranks):
            rounds[-1].append(item)
        else:
            rounds.append([item])
    return rounds


def _seconds(now: Sequence[Item], remaining: Sequence[Item], free: float, most_seconds: float) -> float:
    """Seconds of the items of a round: their share of the remaining time, by weight; 0 if there is none."""
    if not now or free <= 0:
        return 0.0
    weight = max(item.weight for item in now)
    return min(free * weight / sum(item.weight for item in remaining), most_seconds * weight)


def _try(item: Item, seconds: float) -> dict[str, Any]:
    """The result; or why it failed, if the failure was this rank's alone."""
    try:
        return {"value": item.run(seconds)}
    except (RuntimeError, WhaleError) as error:
        if len(item.ranks) > 1:
            raise
        return {"failure": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
