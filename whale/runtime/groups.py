"""Process groups of parallel models, which are destroyed after them: each has threads and sockets.

A model is collected at another time on each rank, and its groups may be in use on the others then. They are destroyed
when the next model gets its own: all ranks are there, and destroy those of models that none of them has any more. On a
GPU they have memory there, so that models that are cyclic garbage are collected first.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from whale.runtime.launch import World, groups

__all__ = ["Groups"]

_numbers = itertools.count(1)
_retired: dict[int, list[dist.ProcessGroup]] = {}
"""Groups of models that this rank has no more, by the number of the model."""

_living: weakref.WeakSet[Groups] = weakref.WeakSet()

_TOLD = 32
"""Models of which ranks tell each other at a time."""


class Groups:
    """The process groups of one model. All ranks must make one, and its groups, in one order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._made: list[dist.ProcessGroup] = []
        if world.size > 1:
            if _living and world.device.type == "cuda":
                gc.collect()
            _living.add(self)
            _destroy_retired(world)
            finalizer = weakref.finalize(self, _retired.__setitem__, next(_numbers), self._made)
            finalizer.atexit = False

    def make(self, rank_sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """New groups, as by :func:`whale.runtime.launch.groups`."""
        made = groups(rank_sets, self._world.step_timeout_seconds)
        self._made.extend(made.values())
        return made

    def of_hosts(self) -> dist.ProcessGroup:
        """A new group of all ranks, for tensors on the CPU."""
        everyone = tuple(range(self._world.size))
        return self.make_on_hosts([everyone])[everyone]

    def make_on_hosts(self, rank_sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """New groups for tensors on the CPU; all ranks must call it with the same sets, in one order."""
        timeout = timedelta(seconds=self._world.step_timeout_seconds)
        made = {ranks: dist.new_group(list(ranks), timeout=timeout, backend="gloo") for ranks in rank_sets}
        self._made.extend(made.values())
        return made


def _destroy_retired(world: World) -> None:
    """Destroy the groups of models that no rank has any more; all ranks must call it."""
    own = sorted(_retired)[:_TOLD]
    mine = torch.tensor(own + [0] * (_TOLD - len(own)), device=world.device)
    told = [torch.empty_like(mine) for _ in range(world.size)]
    work = dist.all_gather(told, mine, async_op=True)
    world.failures.wait(work, "the models that ranks have no more", range(world.size))
    for number in sorted(set.intersection(*(set(each.tolist()) for each in told)) - {0}):
        for group in _retired.pop(number):
            with suppress(ValueError):  # the script has destroyed it, or this rank is not in it
                dist.destroy_process_group(group)
