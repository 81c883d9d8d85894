"""Shares of state: how much of a stage's parameters, gradients and optimizer states each of its devices owns.

Equal ones where they fit; else in proportion to what the memory of each device leaves after its rows' activations, with
which the fullest is as little full as can be. So a slow device with much memory owns more, whatever it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import floor

from whale.ir.state import StateSharding
from whale.ir.workload import DeviceMemory

__all__ = ["fitting_shares", "fitting_states", "owned_bytes"]

PARTS = 1000
"""Shares are whole numbers that sum to about as many."""


def owned_bytes(parameters: float, gradients: float, optimizer: float, *, level: int, at_once: bool) -> float:
    """Bytes of a device's state that are of what it owns alone.

    Args:
        parameters, gradients, optimizer: that it has.
        level: of ``zero``.
        at_once: whether gradients go to their owners as soon as they are made.
    """
    return optimizer + (gradients if at_once and level else 0.0) + (parameters if level == 3 else 0.0)


def fitting_shares(rooms: Sequence[float], owned: float) -> tuple[float, ...]:
    """Return the shares of devices that own some bytes together; () are equal ones. Each has some, because others may
    hold no copy of what it trains.

    Args:
        rooms: bytes of each device's memory that all else leaves.
        owned: bytes of all of them.

    >>> fitting_shares([4e9, 4e9], 6e9), fitting_shares([6e9, 2e9], 6e9), fitting_shares([6e9, -1e9], 9e9)
    ((), (750.0, 250.0), (1000.0, 1.0))
    """
    if all(owned / len(rooms) <= room for room in rooms) or max(rooms) <= 0:
        return ()
    room = [max(0.0, one) for one in rooms]
    return tuple(max(1.0, float(floor(PARTS * one / sum(room)))) for one in room)


def fitting_states(
    ranks: Sequence[Sequence[int]],
    states: Sequence[StateSharding | None],
    memory: Sequence[DeviceMemory],
    *,
    micro_batches: int,
) -> tuple[StateSharding | None, ...]:
    """Return how stages divide their state, with shares of each rank that fit best where equal ones do not.

    Args:
        ranks: of each stage.
        states: with equal shares.
        memory: of all devices with these.
        micro_batches: of a step.
    """
    held = {device.rank: device for device in memory}
    found = []
    for own, state in zip(ranks, states, strict=True):
        if state is not None and state.level:
            at_once = micro_batches == 1 or state.level > 1
            parts = [
                owned_bytes(one.parameters, one.gradients, one.optimizer, level=state.level, at_once=at_once)
                for one in map(held.__getitem__, own)
            ]
            rooms = [held[rank].capacity - held[rank].total + part for rank, part in zip(own, parts, strict=True)]
            state = replace(state, shares=fitting_shares(rooms, sum(parts)))
        found.append(state)
    return tuple(found)
