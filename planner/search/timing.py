"""The time of a pipeline step from the times of its stages: a recurrence, and a closed form below it.

The recurrence goes through the tasks in the order of the simulator, with one time for each stage and
each message, which wait for their link, and without the differences between replicas: O(stages^2), over as many
micro-batches as fill the pipeline and some more. The closed form, in numpy, is the longest of the cycles of waits
through neighbouring stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import add
from typing import Any, NamedTuple

import numpy as np

from whale.planner.simulation.recurrence import SETTLING, Slot, slots_of

__all__ = ["Ends", "pipeline_bound", "pipeline_ends"]

Array = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


class Ends(NamedTuple):
    """Seconds from the begin of a step, of each stage: when it is done with its last backward, and when the stage
    before has received its last gradients; 0 of the first stage."""

    done: list[float]
    sent: list[float]


def pipeline_ends(
    forward: Sequence[float],
    backward: Sequence[float],
    hops: Sequence[float],
    micro_batches: int,
    schedule: str,
    *,
    last_share: float = 1.0,
    latencies: Sequence[float] = (),
    others: Sequence[float] = (),
    own: Sequence[float] = (),
    gathered: Sequence[float] = (),
    slowed: Sequence[float] = (),
) -> Ends:
    """When stages are done with their last backward and with sending its gradients.

    Args:
        forward, backward: seconds of each stage for a micro-batch.
        hops: seconds from each stage to the next, and back.
        micro_batches: of the step.
        schedule: ``1f1b`` or ``gpipe``.
        last_share: rows of the last micro-batch, as a share of those of the others.
        latencies: the part of each of ``hops`` in which the next message may be on its way too; none if not given.
        others: seconds for which messages of other hops have each hop's adapters between two of its own, while messages
            go both ways; none if not given.
        own: the part of each of ``forward`` that comes first and needs nothing of other stages; none if not given.
        gathered: seconds before which no stage's forward counts as begun, because it waits for parameters; none if
            not given.
        slowed: seconds by which the last backward of each stage takes longer; none if not given.

    >>> pipeline_ends([1, 1], [2, 2], [0, 0], 4, "1f1b")
    Ends(done=[15.0, 13.0], sent=[0.0, 13.0])
    """
    none = (0.0,) * len(hops)
    latencies, others, own = latencies or none, others or none, own or none
    gathered, slowed = gathered or none, slowed or none
    links = [hop - late for hop, late in zip(hops, latencies, strict=True)]
    each, turns = max(*forward, *links) + max(*backward, *links), 1
    if schedule != "gpipe":
        windows = _Windows(*np.array([forward, backward, hops, own]))
        slowest = np.unravel_index(windows.period.argmax(), windows.period.shape)
        each, turns = float(windows.period[slowest]), int(windows.stages[slowest])
        busiest = max(map(add, links, others))
        if busiest > each:
            each, turns = busiest, 1
    # What a micro-batch takes once the pipeline is full comes round with as many of them as the slowest run has stages.
    enough = min(micro_batches, len(forward) + SETTLING)
    enough += (micro_batches - enough) % turns
    every = _ends(forward, backward, links, latencies, others, own, gathered, slowed, enough, schedule, last_share)
    later = (micro_batches - enough) * each
    return Ends(*([end + later if end else 0.0 for end in ends] for ends in every))


def _ends(
    forward: Sequence[float],
    backward: Sequence[float],
    links: Sequence[float],
    latencies: Sequence[float],
    others: Sequence[float],
    own: Sequence[float],
    gathered: Sequence[float],
    slowed: Sequence[float],
    micro_batches: int,
    schedule: str,
    last_share: float,
) -> Ends:
    depth = len(forward)
    ahead, back = [0.0, *links[:-1]], [*links[:-1], 0.0]
    late_ahead, late_back = [0.0, *latencies[:-1]], [*latencies[:-1], 0.0]
    turn_ahead, turn_back = [0.0, *others[:-1]], [*others[:-1], 0.0]
    free = [0.0] * (depth + 1)  # the last one is before the first stage, and after the last: nothing is waited for
    came_down, came_up, arrived_up = ([0.0] * depth for _ in range(3))  # when links are free again, by where they lead
    for slot in _slots(depth, micro_batches, schedule):
        before, both = free.copy(), bool(slot.forwards and slot.backwards)
        for stage in slot.forwards:
            made, begin = before[stage - 1], max(before[stage], gathered[stage])
            sent, spent, turn, early = ahead[stage], forward[stage], turn_ahead[stage] if both else 0.0, own[stage]
            if stage == slot.last_forward:
                sent, spent, turn, early = sent * last_share, spent * last_share, turn * last_share, early * last_share
            sent = (made if made > came_down[stage] else came_down[stage]) + sent
            came_down[stage] = sent + turn
            ready = sent + late_ahead[stage] - early
            free[stage] = (ready if ready > begin else begin) + spent
        for stage in slot.backwards:
            made, begin = before[stage + 1], before[stage]
            sent, spent, turn = back[stage], backward[stage], turn_back[stage] if both else 0.0
            if stage == slot.last_backward:
                sent, spent, turn = sent * last_share, spent * last_share + slowed[stage], turn * last_share
            sent = (made if made > came_up[stage] else came_up[stage]) + sent
            came_up[stage] = sent + turn
            arrived_up[stage] = ready = sent + late_back[stage]
            free[stage] = (ready if ready > begin else begin) + spent
    return Ends(free[:-1], [0.0, *arrived_up[:-1]])


@lru_cache(maxsize=64)
def _slots(num_stages: int, micro_batches: int, schedule: str) -> tuple[Slot, ...]:
    return tuple(slots_of(num_stages, micro_batches, schedule))


class _Windows:
    """All runs of neighbouring stages s to e of ``1f1b``, as arrays [s, e].

    A micro-batch goes down through such a run; stage e then does the backward whose turn it is, which goes up again,
    and stage s takes the next forward: as many micro-batches later as the run has stages. So each micro-batch takes at
    least ``period``, what is computed and sent on the way over the number of stages. Every cycle of waits is of such
    ones, and so the largest of them is what each micro-batch takes once the pipeline is full. What stages after s
    compute on their *own* before they need a message is not on the way.
    """

    def __init__(self, forward: Array, backward: Array, hops: Array, own: Array) -> None:
        twice, upto = 2 * hops, np.zeros(len(hops) + 1)
        (forward + backward + twice - own).cumsum(out=upto[1:])
        self.around = upto[1:] - twice - upto[:-1, None] + own[:, None]
        self.stages, self.possible = _windows_of(len(forward))

    @property
    def period(self) -> Array:
        """Lower bound on the time of each micro-batch, for each run of stages."""
        return np.where(self.possible, self.around / self.stages, 0.0)


@lru_cache(maxsize=256)
def _windows_of(depth: int) -> tuple[Integers, np.ndarray[Any, np.dtype[np.bool_]]]:
    """How many stages each run of such a pipeline has, and which runs there are."""
    places = np.arange(depth)
    return np.maximum(places - places[:, None] + 1, 1), places[:, None] <= places


@lru_cache(maxsize=256)
def _turns(depth: int, micro_batches: int) -> tuple[Integers, Integers, Integers]:
    """By the last stage of a run the forwards before its first backward, but one; for each run, how often all others
    fill it, and how many are left."""
    filling = np.arange(depth - 1, -1, -1)
    times, rest = np.divmod(np.maximum(micro_batches - 1 - filling, 0), _windows_of(depth)[0])
    return np.minimum(filling, micro_batches - 1), times, rest


def pipeline_bound(
    forward: Sequence[float],
    backward: Sequence[float],
    hops: Sequence[float],
    once: Sequence[float],
    micro_batches: int,
    schedule: str,
    *,
    last_share: float = 1.0,
    own: Sequence[float] = (),
    gathered: Sequence[float] = (),
) -> float:
    """A time before which a step cannot end. Arguments are those of `pipeline_ends`, and what comes *once* a step.

    A stage is busy with all micro-batches, after the forwards of the stages before it and before their backwards. Under
    ``1f1b`` micro-batches go around `_Windows`, all but those with which the pipeline is filled.

    >>> pipeline_bound([1, 1], [2, 2], [0, 0], [0, 0], 4, "1f1b")
    15.0
    """
    depth = len(forward)
    none = (0.0,) * depth
    every = np.array([forward, backward, hops, once, own or none, gathered or none])
    ahead_each, back_each, sent, after, early, ready = every
    each, ahead, back = ahead_each + back_each, np.zeros(depth), np.zeros(depth)
    (ahead_each - early + sent)[:-1].cumsum(out=ahead[1:])
    late = np.maximum.accumulate(np.maximum(0.0, ready + early - ahead))  # by waits for parameters
    ahead[1:] += late[:-1]
    ahead = np.maximum(ahead - early, ready)  # when each stage could begin without a wait
    (last_share * (back_each + sent))[:-1].cumsum(out=back[1:])
    busy = (micro_batches - 1 + last_share) * each
    ends = np.maximum.accumulate(after - back)  # of any stage before, beyond the backwards on the way to it
    least = float((ahead + busy + back + ends).max())
    if schedule == "1f1b" and last_share < 1 and micro_batches > 1:
        # The first micro-batch, which is full, goes there and back, and the last one's backwards follow.
        first = (back_each + sent)[::-1].cumsum()[::-1] + last_share * back_each
        least = max(least, float((ahead[-1] + ahead_each[-1] + first + back + ends).max()))
    if schedule == "1f1b" and depth > 1:
        windows = _Windows(ahead_each, back_each, sent, early)
        filling, times, rest = _turns(depth, micro_batches)
        through = ahead + last_share * windows.around[:, -1] + back + ends[-1]
        whole = through[:, None] + filling * np.maximum(ahead_each[:, None], ahead_each - early)
        whole += times * windows.around  # and what is left over at either end
        whole += rest * np.where(times, np.maximum(each[:, None], each - early), each - early)
        least = max(least, float(whole.max(where=windows.possible, initial=0.0)))
    return least
