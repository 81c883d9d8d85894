"""The discrete-event core of the simulator: ranks walk through their programs while messages and reductions move.

It does what `whale.runtime.executor` and `whale.runtime.reduce` do, with clocks instead of tensors: receives are
posted ahead, sends are waited for only when they lag, a task waits for what it consumes and for the ranks that it
shares collectives with, buckets of gradients start in one order on all ranks as soon as they are ready. Messages
between the same two ranks follow each other; messages that name a common resource get equal parts of it. Time is
exact up to floating point and ties are broken by the order of ranks, so the same input gives the same timeline.

Complexity: O(n log n) for n instructions, times the number of messages that share a resource at one time. It knows
neither plans nor how programs are made.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from whale.errors import ScheduleError, UsageError
from whale.ir.program import Compute, Copy, Edge, Free, Program, Receive, Reduce, Send
from whale.ir.schedule import Kind
from whale.ir.workload import LinkTime, StageWork, Workload
from whale.planner.timeline import PARTS, Event, Part, Timeline

__all__ = ["run_programs"]

_Key = tuple[int, str, int]
_Interval = tuple[float, float, Part, int]
"""Start, end, reason and the rank that is waited for."""

_Price = tuple[float, float, int, int]
"""Of a task: seconds, those of them that are communication, bytes while it runs, bytes that it leaves."""


def run_programs(
    programs: Mapping[int, Program], edges: Sequence[Edge], workload: Workload, bytes_of: Callable[[int, Send], float]
) -> Timeline:
    """Run the programs of all ranks with the prices of ``workload``, and ``bytes_of(rank, send)`` for messages.

    Raises:
        UsageError: the workload has no price for something that a program does; names it.
        ScheduleError: the programs wait for each other; names what each rank waits for.
    """
    return _Engine(programs, edges, workload, bytes_of).run()


@dataclass(eq=False, slots=True)
class _Link:
    time: LinkTime
    queue: deque[_Message] = field(default_factory=deque)  # issued, in order; the first may be moving
    last: _Message | None = None  # that has moved


@dataclass(eq=False, slots=True)
class _Message:
    link: _Link
    bytes: float
    key: _Key
    stage: int = -1
    issued: float | None = None
    posted: float | None = None
    started: float | None = None
    sent: bool = False
    arrived: bool = False
    number: int = 0  # of the sender's task that made it
    producer: int = -1  # events
    poster: int = -1
    cause: int = -1
    event: int = -1
    sender_waits: bool = False
    receiver_waits: bool = False
    left: float = 0.0
    rate: float = 0.0
    since: float = 0.0
    version: int = 0


@dataclass(eq=False, slots=True)
class _Bucket:
    index: int
    seconds: float
    ready: float
    stages: frozenset[int]
    ranks: list[int] = field(default_factory=list)
    launched: int = 0
    last: tuple[float, int, int] = (0.0, -1, -1)  # when, on which rank and after which event it could start
    start: float | None = None
    end: float = 0.0
    event: int = -1  # of one of its ranks
    version: int = 0


@dataclass(eq=False, slots=True)
class _Task:
    kind: Kind
    stage: int
    micro_batch: int
    price: _Price
    keys: list[_Key]  # what it consumes
    inputs: list[_Message]
    first_receives: int  # receives before it in the program
    outputs: list[_Message] = field(default_factory=list)
    copies: list[_Key] = field(default_factory=list)
    milestones: list[tuple[float, _Bucket]] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)
    event: int = -1


@dataclass(eq=False, slots=True)
class _Group:
    """Ranks that run a stage's tasks together."""

    size: int
    arrived: list[int] = field(default_factory=list)
    done: int = 0


@dataclass(eq=False, slots=True)
class _Rank:
    index: int
    tasks: list[_Task]
    receives: list[_Message]
    buckets: list[_Bucket]
    credit: int  # values that may be on their way before the program asks for them
    window: int  # tasks after which a send must be done
    next_task: int = 0
    posted: int = 0
    outstanding: set[_Key] = field(default_factory=set)
    sends: deque[_Message] = field(default_factory=deque)
    blockers: int = 0
    free: float = 0.0  # since when it does nothing
    last_event: int = -1
    after: int = -1
    waits: list[_Interval] = field(default_factory=list)
    # the running task
    running: bool = False
    slowed: bool = False  # by a reduction beside it
    start: float = 0.0
    own_end: float = 0.0
    done: float = 0.0
    since: float = 0.0
    version: int = 0
    milestone: int = 0
    # buckets
    ready: set[int] = field(default_factory=set)
    launched: int = 0
    reduced: int = 0
    reducing: bool = False
    at_end: bool = False
    finished: bool = False
    # results
    parts: dict[Part, float] = field(default_factory=dict)
    held: int = 0
    memory: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    in_flight: dict[int, int] = field(default_factory=dict)


class _Engine:
    def __init__(
        self,
        programs: Mapping[int, Program],
        edges: Sequence[Edge],
        workload: Workload,
        bytes_of: Callable[[int, Send], float],
    ) -> None:
        self.workload = workload
        self.heap: list[tuple[float, int, Callable[..., None], Any, int]] = []
        self.sequence = 0
        self.events: list[Event] = []
        self.users: dict[str, dict[_Message, None]] = {}  # messages that move through a resource
        self.in_flight: dict[int, int] = {}
        self.prices = {
            (index, rank): _prices(stage, position)
            for index, stage in enumerate(workload.stages)
            for position, rank in enumerate(stage.ranks)
        }
        self.links = {(link.source, link.target): _Link(link) for link in workload.links}
        self.groups: dict[tuple[int, int], _Group] = {}
        for index, stage in enumerate(workload.stages):
            for ranks in stage.together:
                group = _Group(len(ranks))
                for rank in ranks:
                    self.groups[index, rank] = group
        self.buckets = [
            _Bucket(index, reduction.seconds, reduction.ready, frozenset(reduction.stages))
            for index, reduction in enumerate(workload.reductions)
        ]
        entering: dict[int, list[int]] = {}
        leaving: dict[int, list[int]] = {}
        for edge in edges:
            entering.setdefault(edge.target_stage, []).append(edge.index)
            leaving.setdefault(edge.source_stage, []).append(edge.index)
        self.expected: dict[tuple[int, int], deque[_Message]] = {}  # between two ranks: sent, not yet matched
        for rank, program in programs.items():
            for instruction in program:
                if isinstance(instruction, Send):
                    self.expected.setdefault((rank, instruction.peer), deque()).append(
                        self._message(rank, instruction, bytes_of(rank, instruction))
                    )
        outgoing = {pair: deque(messages) for pair, messages in self.expected.items()}
        self.ranks = {
            rank: self._compile(rank, program, entering, leaving, outgoing) for rank, program in programs.items()
        }

    # From instructions to tasks with their inputs and outputs

    def _message(self, rank: int, send: Send, size: float) -> _Message:
        link = self.links.get((rank, send.peer))
        if link is None:
            raise UsageError(f"rank {rank} sends to rank {send.peer}, but the workload has no link between them")
        return _Message(link, size, send[:3])

    def _compile(
        self,
        rank: int,
        program: Program,
        entering: Mapping[int, Sequence[int]],
        leaving: Mapping[int, Sequence[int]],
        outgoing: Mapping[tuple[int, int], deque[_Message]],
    ) -> _Rank:
        tasks: list[_Task] = []
        receives: list[_Message] = []
        buckets: list[_Bucket] = []
        arriving: dict[_Key, list[_Message]] = {}
        kept = most = 0
        for instruction in program:
            match instruction:
                case Compute(kind, stage, micro_batch):
                    if (stage, rank) not in self.prices:
                        raise UsageError(f"the workload has no times of stage {stage} on rank {rank}")
                    edges = {"F": entering, "W": {}}.get(kind, leaving).get(stage, ())
                    direction = "forward" if kind == "F" else "backward"
                    keys: list[_Key] = [(edge, direction, micro_batch) for edge in edges]
                    inputs = [message for key in keys for message in arriving.pop(key, ())]
                    price = self.prices[stage, rank][kind]
                    tasks.append(_Task(kind, stage, micro_batch, price, keys, inputs, len(receives)))
                    kept += kind == "F"
                    most = max(most, kept)
                case Send():
                    message = outgoing[rank, instruction.peer].popleft()
                    message.stage = tasks[-1].stage
                    tasks[-1].outputs.append(message)
                case Receive():
                    message = self._match(rank, instruction)
                    receives.append(message)
                    arriving.setdefault(instruction[:3], []).append(message)
                case Copy():
                    tasks[-1].copies.append(instruction[:3])
                case Reduce(index):
                    buckets.append(self._bucket(rank, index, tasks))
                case Free(stage, _):
                    tasks[-1].frees.append(stage)
                    kept -= 1
        ahead = self.workload.runs_ahead
        credit = len(receives) if ahead else max(2, most)
        window = 2 if ahead else 2 * credit + 2  # the executor's credit on CUDA is 0
        return _Rank(rank, tasks, receives, buckets, credit, window, parts=dict.fromkeys(PARTS, 0.0))

    def _match(self, rank: int, receive: Receive) -> _Message:
        queue = self.expected.get((receive.peer, rank))
        if not queue or queue[0].key != receive[:3]:
            raise ScheduleError(f"rank {rank}: {receive}, but that rank's next send to it is another, or there is none")
        return queue.popleft()

    def _bucket(self, rank: int, index: int, tasks: Sequence[_Task]) -> _Bucket:
        if index >= len(self.buckets):
            raise UsageError(f"rank {rank} reduces bucket {index}, but the workload has {len(self.buckets)} reductions")
        bucket = self.buckets[index]
        bucket.ranks.append(rank)
        for task in reversed(tasks):
            if task.kind in "BW" and task.stage in bucket.stages:
                task.milestones.append((bucket.ready, bucket))
                task.milestones.sort(key=lambda milestone: milestone[0])
                return bucket
        raise UsageError(f"rank {rank} reduces bucket {index}, but runs no backward of its stages before")

    # The clock

    def run(self) -> Timeline:
        for rank in self.ranks.values():
            self._reach(rank, 0.0)
        while self.heap:
            time, _, handler, subject, version = heapq.heappop(self.heap)
            if subject.version == version:
                handler(subject, time)
        stuck = [rank for rank in self.ranks.values() if not rank.finished]
        if stuck:
            raise ScheduleError("the programs wait for each other: " + "; ".join(map(_where, stuck)))
        return self._result()

    def _at(self, time: float, handler: Callable[..., None], subject: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (time, self.sequence, handler, subject, subject.version))

    def _reserve(self) -> int:
        """Return the position of an event that is written when it ends, so that others can refer to it before."""
        self.events.append(_RESERVED)
        return len(self.events) - 1

    def _emit(self, event: Event) -> int:
        self.events.append(event)
        return len(self.events) - 1

    # Tasks

    def _reach(self, rank: _Rank, now: float) -> None:
        """Come to the next task, or to the end of the program."""
        rank.free = now
        if rank.next_task == len(rank.tasks):
            rank.at_end = True
            waited = list(rank.sends)
            rank.blockers = sum(not message.sent for message in waited)
        else:
            task = rank.tasks[rank.next_task]
            self._post(rank, task, now)
            waited = []
            while rank.sends and rank.sends[0].number < rank.next_task + 1 - rank.window:
                waited.append(rank.sends.popleft())
            rank.blockers = 0
            for message in task.inputs:
                if not message.arrived:
                    message.receiver_waits = True
                    rank.blockers += 1
            rank.blockers += sum(not message.sent for message in waited)
        for message in waited:
            message.sender_waits = True
        if not rank.blockers:
            self._unblocked(rank, now, None)

    def _post(self, rank: _Rank, task: _Task, now: float) -> None:
        """Post the receives that come before the task, and later ones while the credit lasts."""
        while rank.posted < len(rank.receives):
            if rank.posted >= task.first_receives and len(rank.outstanding) >= rank.credit:
                break
            message = rank.receives[rank.posted]
            rank.posted += 1
            rank.outstanding.add(message.key)
            message.posted = now
            message.poster = rank.last_event
            self._move(message.link, now)
        rank.outstanding.difference_update(task.keys)

    def _unblocked(self, rank: _Rank, now: float, message: _Message | None) -> None:
        """Everything is there; ``message`` was the last, if the rank had to wait."""
        rank.after = rank.last_event
        rank.waits = []
        if now > rank.free and message is not None:
            rank.after = message.event
            link = message.link.time
            peer = link.source if link.target == rank.index else link.target
            issued = min(max(message.issued or 0.0, rank.free), now)
            self._wait(rank, rank.free, issued, "pipeline", peer)
            self._wait(rank, issued, now, "transfer", peer)
        if rank.at_end:
            self._finish(rank, now)
            return
        task = rank.tasks[rank.next_task]
        group = self.groups.get((task.stage, rank.index))
        if group is None:
            self._begin(rank, task, now)
            return
        group.arrived.append(rank.index)
        if len(group.arrived) < group.size:
            rank.start = now  # since when it waits for its group
            return
        for index in group.arrived:
            member = self.ranks[index]
            if member is not rank:
                self._wait_for_peer(member, rank, member.start, now)
                member.after = rank.after
        for index in group.arrived:
            self._begin(self.ranks[index], self.ranks[index].tasks[self.ranks[index].next_task], now)

    def _wait_for_peer(self, rank: _Rank, peer: _Rank, start: float, now: float) -> None:
        """A rank waits for another of its group: for the reasons of that one's waits, else because it is slower."""
        for begin, end, reason, other in peer.waits:
            begin, end = max(begin, start), min(end, now)
            if begin < end:
                self._wait(rank, start, begin, "stall", peer.index)
                self._wait(rank, begin, end, reason, other)
                start = end
        self._wait(rank, start, now, "stall", peer.index)

    def _wait(self, rank: _Rank, start: float, end: float, reason: Part, peer: int) -> None:
        if end > start:
            rank.waits.append((start, end, reason, peer))
            rank.parts[reason] += end - start
            self._emit(Event("idle", rank.index, start, end, peer=peer, reason=reason, after=rank.last_event))

    def _begin(self, rank: _Rank, task: _Task, now: float) -> None:
        rank.running = True
        rank.slowed = rank.reducing
        rank.start = rank.since = now
        rank.done = 0.0
        rank.milestone = 0
        if task.kind == "F":
            count = rank.in_flight[task.stage] = rank.in_flight.get(task.stage, 0) + 1
            self.in_flight[task.stage] = max(self.in_flight.get(task.stage, 0), count)
        task.event = self._reserve()
        if task.price[2]:
            rank.memory.append((now, rank.held + task.price[2]))
        self._schedule(rank, task)

    def _speed(self, rank: _Rank) -> float:
        return 1 / (1 + self.workload.overlap_slowdown) if rank.reducing else 1.0

    def _schedule(self, rank: _Rank, task: _Task) -> None:
        """Set the clock for the next milestone of the running task, or for its end."""
        until = task.price[0]
        if rank.milestone < len(task.milestones):
            until *= task.milestones[rank.milestone][0]
        self._at(rank.since + max(0.0, until - rank.done) / self._speed(rank), self._progress, rank)

    def _progress(self, rank: _Rank, now: float) -> None:
        task = rank.tasks[rank.next_task]
        if rank.milestone == len(task.milestones):
            self._task_done(rank, task, now)
            return
        fraction, bucket = task.milestones[rank.milestone]
        rank.milestone += 1
        rank.done, rank.since = fraction * task.price[0], now
        rank.version += 1
        self._schedule(rank, task)
        rank.ready.add(bucket.index)
        self._launch(rank, now)

    def _task_done(self, rank: _Rank, task: _Task, now: float) -> None:
        rank.running = False
        rank.version += 1
        rank.own_end = now
        event = Event(task.kind, rank.index, rank.start, now, task.stage, task.micro_batch, after=rank.after)
        self.events[task.event] = event
        rank.last_event = task.event
        seconds, communication, _, _ = task.price
        slowed = now - rank.start - seconds if rank.slowed else 0.0
        rank.parts["reduction"] += slowed
        rank.parts["communication"] += communication
        rank.parts["compute"] += now - rank.start - slowed - communication
        group = self.groups.get((task.stage, rank.index))
        if group is None:
            self._leave(rank, task, now)
            return
        group.done += 1
        if group.done == group.size:
            members = [self.ranks[index] for index in group.arrived]
            group.arrived, group.done = [], 0
            for member in members:
                if member is not rank:
                    member.waits = []
                    self._wait(member, member.own_end, now, "stall", rank.index)
                    if member.own_end < now:
                        member.last_event = rank.last_event
            for member in members:
                self._leave(member, member.tasks[member.next_task], now)

    def _leave(self, rank: _Rank, task: _Task, now: float) -> None:
        """Do what follows a task, and come to the next."""
        if task.kind == "F":
            rank.held += task.price[3]
        for stage in task.frees:
            rank.held -= self.prices[stage, rank.index]["F"][3]
            rank.in_flight[stage] -= 1
        if rank.held != rank.memory[-1][1]:
            rank.memory.append((now, rank.held))
        rank.next_task += 1
        rank.outstanding.update(task.copies)
        for message in task.outputs:
            message.issued, message.number, message.producer = now, rank.next_task, rank.last_event
            rank.sends.append(message)
            message.link.queue.append(message)
            self._move(message.link, now)
        self._reach(rank, now)

    # Messages

    def _move(self, link: _Link, now: float) -> None:
        """Start the link's first message if both ends are there."""
        if not link.queue:
            return
        message = link.queue[0]
        if message.started is not None or message.posted is None:
            return
        message.started = message.since = now
        message.cause = self._cause(message)
        message.event = self._reserve()
        message.left = message.bytes
        message.rate = link.time.bandwidth
        if not link.time.resources:
            self._at(now + message.left / message.rate, self._sent, message)
            return
        for resource in link.time.resources:
            self.users.setdefault(resource, {})[message] = None
        self._share(link, now)

    def _share(self, link: _Link, now: float) -> None:
        """Give every message that shares a resource with the link its part from now on."""
        affected = {message: None for resource in link.time.resources for message in self.users[resource]}
        for message in affected:
            time = message.link.time
            message.left = max(0.0, message.left - (now - message.since) * message.rate)
            message.since = now
            message.rate = time.bandwidth / max(len(self.users[resource]) for resource in time.resources)
            message.version += 1
            self._at(now + message.left / message.rate, self._sent, message)

    def _sent(self, message: _Message, now: float) -> None:
        """The last byte has left: the next message may follow; this one arrives after the latency."""
        link = message.link
        message.version += 1
        message.sent = True
        link.queue.popleft()
        link.last = message
        for resource in link.time.resources:
            del self.users[resource][message]
        if link.time.resources:
            self._share(link, now)
        arrival = now + link.time.latency
        started = message.started or 0.0
        source, target, micro_batch = link.time.source, link.time.target, message.key[2]
        shared = (message.stage, micro_batch)
        self.events[message.event] = Event("receive", target, started, arrival, *shared, source, after=message.cause)
        self._emit(Event("send", source, started, arrival, *shared, target, after=message.cause))
        if link.time.latency:
            self._at(arrival, self._arrived, message)
        self._move(link, now)
        if message.sender_waits:
            self._unblock(self.ranks[source], message, now)
        if not link.time.latency:
            self._arrived(message, now)

    def _cause(self, message: _Message) -> int:
        """Return the event that let a message start when it did."""
        issued, posted, previous = message.issued or 0.0, message.posted or 0.0, message.link.last
        if previous is not None and message.started is not None and message.started > max(issued, posted):
            return previous.event
        return message.poster if posted > issued else message.producer

    def _arrived(self, message: _Message, now: float) -> None:
        message.arrived = True
        if message.receiver_waits:
            self._unblock(self.ranks[message.link.time.target], message, now)

    def _unblock(self, rank: _Rank, message: _Message, now: float) -> None:
        rank.blockers -= 1
        if not rank.blockers:
            self._unblocked(rank, now, message)

    # Reductions and the end of the step

    def _launch(self, rank: _Rank, now: float) -> None:
        """Start the rank's buckets in their order, up to the first that is not ready."""
        while rank.launched < len(rank.buckets) and rank.buckets[rank.launched].index in rank.ready:
            bucket = rank.buckets[rank.launched]
            rank.launched += 1
            bucket.launched += 1
            bucket.last = (now, rank.index, rank.tasks[rank.next_task].event)
            self._reduce(bucket, now)

    def _reduce(self, bucket: _Bucket, now: float) -> None:
        """Let a bucket run if it is launched everywhere and the next of each of its ranks."""
        members = [self.ranks[rank] for rank in bucket.ranks]
        if bucket.start is not None or bucket.launched < len(members):
            return
        if any(rank.buckets[rank.reduced] is not bucket for rank in members):
            return
        bucket.start = now
        for rank in members:
            self._set_reducing(rank, True, now)
        self._at(now + bucket.seconds, self._reduced, bucket)

    def _reduced(self, bucket: _Bucket, now: float) -> None:
        bucket.end = now
        members = [self.ranks[rank] for rank in bucket.ranks]
        start, (launched, _, after) = bucket.start or 0.0, bucket.last
        if start > launched:  # it had to wait for another bucket of one of its ranks
            before = [rank.buckets[rank.reduced - 1] for rank in members if rank.reduced]
            after = max(before, key=lambda other: other.end).event
        for rank in members:
            event = Event("reduce", rank.index, start, now, bucket=bucket.index, after=after)
            bucket.event = self._emit(event)
            rank.reduced += 1
            self._set_reducing(rank, False, now)
        for rank in members:
            if rank.reduced < len(rank.buckets):
                self._reduce(rank.buckets[rank.reduced], now)
        for rank in members:
            if rank.at_end and not rank.blockers:
                self._finish(rank, now)

    def _set_reducing(self, rank: _Rank, reducing: bool, now: float) -> None:
        """Slow the running task down, or let it go on at full speed."""
        if rank.running:
            rank.done += (now - rank.since) * self._speed(rank)
            rank.since = now
        rank.reducing = reducing
        rank.slowed |= reducing
        if rank.running:
            rank.version += 1
            self._schedule(rank, rank.tasks[rank.next_task])

    def _finish(self, rank: _Rank, now: float) -> None:
        """All tasks are done and all sends: once the reductions are too, update the parameters."""
        if rank.reduced < len(rank.buckets):
            return
        rank.finished = True
        time, after = max([rank.free, *(end for _, end, _, _ in rank.waits)]), rank.after
        for bucket in rank.buckets:
            if bucket.end <= time:
                continue
            launched, last, _ = bucket.last
            if launched > time:
                alike = {task.stage for task in rank.tasks} & {task.stage for task in self.ranks[last].tasks}
                self._wait(rank, time, launched, "stall" if alike else "pipeline", last)
            self._wait(rank, max(time, launched), bucket.end, "reduction", last)
            time, after = bucket.end, bucket.event
        update = self.workload.update[rank.index] if self.workload.update else 0.0
        ends: tuple[tuple[Literal["update", "overhead"], float], ...]
        ends = (("update", update), ("overhead", self.workload.overhead))
        for kind, seconds in ends:
            if seconds:
                after = self._emit(Event(kind, rank.index, time, time + seconds, after=after))
                rank.parts[kind] += seconds
                time += seconds
        rank.free, rank.last_event = time, after

    def _result(self) -> Timeline:
        step = max(rank.free for rank in self.ranks.values())
        last = min(rank.index for rank in self.ranks.values() if rank.free == step)
        for rank in self.ranks.values():
            self._wait(rank, rank.free, step, "pipeline", last)
        return Timeline(
            events=tuple(self.events),
            step_seconds=step,
            last_rank=last,
            breakdowns={rank.index: rank.parts for rank in self.ranks.values()},
            memory={rank.index: tuple(rank.memory) for rank in self.ranks.values()},
            in_flight=dict(sorted(self.in_flight.items())),
        )


_RESERVED = Event("idle", -1, 0.0, 0.0)


def _prices(work: StageWork, position: int) -> dict[Kind, _Price]:
    forward, backward, weights = work.forward[position], work.backward[position], work.weights[position]
    kept = work.kept_bytes[position]
    during = work.forward_peak_bytes[position] if work.forward_peak_bytes else kept
    peak = work.backward_peak_bytes[position] if work.backward_peak_bytes else 0
    total = forward + backward
    share = work.communication[position] / total if work.communication and total else 0.0
    return {
        "F": (forward, forward * share, during, kept),
        "B": (backward, backward * share, peak, 0),
        "I": (backward - weights, (backward - weights) * share, peak, 0),
        "W": (weights, weights * share, peak, 0),
    }


def _where(rank: _Rank) -> str:
    if rank.at_end:
        return f"rank {rank.index} at the end of the step"
    task = rank.tasks[rank.next_task]
    return f"rank {rank.index} before {task.stage}{task.kind}{task.micro_batch}"
