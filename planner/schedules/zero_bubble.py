"""Zero-bubble schedules: the backward has two parts, and the weight-gradient part fills the bubble.

This module has the hand-made schedules H1 and H2, and the search that adapts a schedule to stages of different times,
slow p2p transfers and a memory limit: Qi, Wan, Huang and Lin, "Zero bubble pipeline parallelism" (ICLR 2024), sections
2 and 3. It returns lines of tasks, one per stage; `whale.planner.schedules.orders` merges them. It knows no devices.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from whale.errors import InfeasibleError
from whale.ir.schedule import Kind, Task

__all__ = ["hand_made", "searched"]

Line = list[Task]
Seconds = Callable[[Task], float]


def hand_made(num_stages: int, micro_batches: int, depth: int) -> list[Line]:
    """Return the lines of H1 (``depth`` 1) or H2 (``depth`` 2).

    Before its first backward, stage s of P runs its distance to the end times ``depth``, plus one, forwards; it delays
    ``depth`` x s weight gradients to the end. So every stage has at most ``depth`` x (P - 1) + 1 micro-batches in
    flight. For f = i = w = 1 a stage works without a pause after its first forward, in H2 to its end.
    """
    lines = []
    for stage in range(num_stages):
        warm_up = min(micro_batches, depth * (num_stages - 1 - stage) + 1)
        held_back = depth * stage
        line = [Task("F", stage, m) for m in range(warm_up)]
        for m in range(micro_batches):
            line.append(Task("I", stage, m))
            if m >= held_back:
                line.append(Task("W", stage, m - held_back))
            if m + warm_up < micro_batches:
                line.append(Task("F", stage, m + warm_up))
        line += [Task("W", stage, m) for m in range(max(0, micro_batches - held_back), micro_batches)]
        lines.append(line)
    return lines


def searched(
    num_stages: int,
    micro_batches: int,
    seconds: Seconds,
    *,
    p2p_seconds: float = 0.0,
    limit: float,
    weights_share: float = 1.0,
) -> list[Line]:
    """Return the best lines of the paper's heuristic: ZB-1p with a ``limit`` of P, ZB-2p with 2 P.

    Objective: minimize the longest stage, from the start of its first task to the end of its last (a stage may begin
    the next step when it has finished). Constraint: no stage exceeds ``limit``. Heuristic: it builds all stages
    together, one micro-batch at a time. Before the first backward it runs as many forwards as fit into the wait; then
    it alternates forwards and backwards. It inserts weight gradients where a stage would wait, as long as that does not
    make the stage the longest, and where memory runs out. Three choices that depend on the rest of the schedule are
    tried both ways; the best of the eight results is returned, the first of equal ones.

    Complexity: 8 x O(P M). Not optimal.

    Args:
        num_stages: P; each has its own devices.
        micro_batches: M.
        seconds: time of each F, I and W.
        p2p_seconds: p2p time of a value from one stage to the next.
        limit: memory limit of a stage in micro-batches, at least 1.
        weights_share: fraction of a micro-batch's saved activations that its W needs; the rest is freed by
            the I. The executor frees everything with the W: 1.

    Raises:
        InfeasibleError: a stage cannot hold one micro-batch.
    """
    if limit < 1:
        raise InfeasibleError(f"a stage has at least 1 micro-batch in flight, but the limit is {limit}")
    best: _Search | None = None
    for options in product((True, False), repeat=3):
        search = _Search(num_stages, micro_batches, seconds, p2p_seconds, limit, weights_share, *options)
        search.run()
        if best is None or search.longest_stage() < best.longest_stage():
            best = search
    assert best is not None
    return [stage.line for stage in best.stages]


class _Stage:
    """The line of one stage while it is built."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.line: Line = []
        self.count: dict[Kind, int] = {"F": 0, "I": 0, "W": 0}
        self.ends: dict[Task, float] = {}
        self.begin = 0.0  # of the first task
        self.clock = 0.0
        self.idle = 0.0  # since the first task
        self.in_flight = 0.0  # micro-batches

    def pending_weights(self) -> int:
        return self.count["I"] - self.count["W"]


class _Search:
    def __init__(
        self,
        num_stages: int,
        micro_batches: int,
        seconds: Seconds,
        p2p_seconds: float,
        limit: float,
        weights_share: float,
        delay_first_backward: bool,
        backward_first: bool,
        fill_small_gaps: bool,
    ) -> None:
        self.stages = [_Stage(index) for index in range(num_stages)]
        self.micro_batches = micro_batches
        self.seconds = seconds
        self.p2p = p2p_seconds
        self.limit = limit
        self.change: dict[Kind, float] = {"F": 1.0, "I": weights_share - 1.0, "W": -weights_share}
        self.delay_first_backward = delay_first_backward
        self.backward_first = backward_first
        self.fill_small_gaps = fill_small_gaps

    def longest_stage(self) -> float:
        return max(stage.clock - stage.begin for stage in self.stages)

    def run(self) -> None:
        self._warm_up()
        for _ in range(1, self.micro_batches):
            for stage, wanted in zip(self.stages, self._wanted_forwards(), strict=True):
                if wanted:
                    self._make_room(stage)
                    self._fill_gap(stage, self._arrival("F", stage))
                    self._put("F", stage)
            for stage in reversed(self.stages):
                self._fill_gap(stage, self._arrival("I", stage))
                if stage.index == 0 and stage.count["F"] == self.micro_batches:
                    self._put_weights(stage)
                self._put("I", stage)
        for stage in self.stages:
            self._put_weights(stage)

    def _warm_up(self) -> None:
        """Schedule each stage's forwards up to its first backward, and that backward."""
        for stage in self.stages:
            self._put("F", stage)
        more = self._forwards_that_fit()
        for stage, number in zip(self.stages, more, strict=True):
            for _ in range(number):
                self._put("F", stage)
        for stage in reversed(self.stages):
            self._put("I", stage)

    def _forwards_that_fit(self) -> list[int]:
        """Return the number of forwards after the first that each stage can run while it waits for its first
        gradient."""
        more = [0] * len(self.stages)
        gradient = 0.0  # end of the first backward of the next stage
        for stage in reversed(self.stages):
            number, clock, held = 0, stage.clock, stage.in_flight
            arrival = gradient + self.p2p if stage is not self.stages[-1] else clock
            while stage.count["F"] + number < self.micro_batches and held + 1 <= self.limit:
                forward = self._cost("F", stage, number)
                if (clock if self.delay_first_backward else clock + forward) > arrival or clock == arrival:
                    break
                number, clock, held = number + 1, clock + forward, held + 1
            more[stage.index] = number
            gradient = max(clock, arrival) + self._cost("I", stage)
        for index in range(1, len(more)):  # a stage stays at least one forward ahead of the next, while it has any left
            if 1 + more[index - 1] < self.micro_batches:
                more[index] = max(0, min(more[index], more[index - 1] - 1))
        return more

    def _wanted_forwards(self) -> list[bool]:
        """Return which stages run a forward in this round: those with forwards left, unless a backward should go
        first."""
        wanted = [stage.count["F"] < self.micro_batches and not self._skips(stage) for stage in self.stages]
        for index in reversed(range(len(wanted) - 1)):
            wanted[index] = wanted[index] and wanted[index + 1]
        return wanted

    def _skips(self, stage: _Stage) -> bool:
        """Whether a stage two forwards ahead of the next one skips this round, to be ready for its I."""
        if not self.backward_first or stage is self.stages[-1]:
            return False
        following = self.stages[stage.index + 1]
        if stage.count["F"] < following.count["F"] + 2:
            return False
        gradient = following.clock + self._cost("F", following) + self._cost("I", following) + self.p2p
        if stage.clock >= gradient:
            return True
        number = self._weights_for_room(stage)
        weights = sum(self._cost("W", stage, offset) for offset in range(number))
        if stage.clock + weights + self._cost("F", stage) <= gradient:
            return False
        return gradient - stage.clock <= self._spare(stage)

    # Pieces

    def _cost(self, kind: Kind, stage: _Stage, offset: int = 0) -> float:
        """Seconds of the stage's next task of a kind, or of a later one."""
        return self.seconds(Task(kind, stage.index, stage.count[kind] + offset))

    def _arrival(self, kind: Kind, stage: _Stage) -> float:
        """Arrival time of the input of the stage's next F or I."""
        index = stage.index + (-1 if kind == "F" else 1)
        if not 0 <= index < len(self.stages):
            return 0.0
        return self.stages[index].ends[Task(kind, index, stage.count[kind])] + self.p2p

    def _put(self, kind: Kind, stage: _Stage) -> None:
        task = Task(kind, stage.index, stage.count[kind])
        start = stage.clock if kind == "W" else max(stage.clock, self._arrival(kind, stage))
        if stage.line:
            stage.idle += start - stage.clock
        else:
            stage.begin = start
        stage.clock = stage.ends[task] = start + self.seconds(task)
        stage.in_flight += self.change[kind]
        stage.count[kind] += 1
        stage.line.append(task)

    def _put_weights(self, stage: _Stage) -> None:
        while stage.pending_weights():
            self._put("W", stage)

    def _weights_for_room(self, stage: _Stage) -> int:
        """Number of weight-gradient tasks that free the memory of one more forward."""
        held, number = stage.in_flight, 0
        while held + 1 > self.limit and number < stage.pending_weights():
            held += self.change["W"]
            number += 1
        return number

    def _make_room(self, stage: _Stage) -> None:
        for _ in range(self._weights_for_room(stage)):
            self._put("W", stage)

    def _fill_gap(self, stage: _Stage, until: float) -> None:
        """Run weight parts while the stage waits; one that is longer than the rest of the gap only if that is worth
        it."""
        while stage.pending_weights() and stage.clock + self._cost("W", stage) <= until:
            self._put("W", stage)
        gap = until - stage.clock
        if stage.pending_weights() and gap > 0 and (self.fill_small_gaps or gap > self._spare(stage)):
            self._put("W", stage)

    def _spare(self, stage: _Stage) -> float:
        """Seconds that the stage may wait before it becomes the stage that waits most."""
        return max(other.idle for other in self.stages) - stage.idle
