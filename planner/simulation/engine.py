"""The discrete-event engine of the simulator: ranks execute their programs while messages and reductions progress.

It follows `whale.runtime.executor` and `whale.runtime.reduce`, with clocks instead of tensors: receives are posted
ahead, sends block only if they lag, a task waits for its inputs and for the ranks of its collectives, and gradient
buckets start in one order on all ranks as soon as they are ready. Messages between the same two ranks stay in order;
messages that share a resource get equal parts of it. Time is exact up to floating point and ties are broken by rank, so
the same input gives the same timeline. A longer task never makes a step shorter, except where messages share a resource
or reductions slow tasks down: there a later message may leave the link to one that matters more, as in reality.

Complexity: O(n log n) for n instructions, times the number of messages that share a resource at one time. It knows
neither plans nor how programs are made.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from whale.errors import ScheduleError
from whale.ir.program import Edge, Program, Send
from whale.ir.workload import Workload
from whale.planner.simulation.priced import Bucket, Link, Loads, Message, PricedTask, RankState, price_programs
from whale.planner.simulation.timeline import Event, Part, Timeline

__all__ = ["run_programs"]


def run_programs(
    programs: Mapping[int, Program],
    edges: Sequence[Edge],
    workload: Workload,
    bytes_of: Callable[[int, Send], float],
    loads: Loads | None = None,
) -> Timeline:
    """Run the programs of all ranks with the times of ``workload`` and ``bytes_of(rank, send)`` for messages.

    *loads* has the number of links that a folded link represents on each shared resource.

    Raises:
        UsageError: the workload has no time for an instruction of a program, which the message names.
        ScheduleError: deadlock; the message says what each rank waits for.
    """
    return _Engine(programs, edges, workload, bytes_of, loads or {}).run()


class _Engine:
    def __init__(
        self,
        programs: Mapping[int, Program],
        edges: Sequence[Edge],
        workload: Workload,
        bytes_of: Callable[[int, Send], float],
        loads: Loads,
    ) -> None:
        self.workload = workload
        priced = price_programs(programs, edges, workload, bytes_of, loads)
        self.ranks, self.groups = priced.ranks, priced.groups
        self.heap: list[tuple[float, int, Callable[..., None], Any, int]] = []
        self.sequence = 0
        self.events: list[Event] = []
        self.users: dict[str, dict[Message, None]] = {}  # messages that move through a resource
        self.load: dict[str, int] = {}  # their number, including those that they represent
        self.changed: dict[str, None] = {}  # resources that messages started or stopped using at this moment
        self.in_flight: dict[int, int] = {}

    # The clock

    def run(self) -> Timeline:
        for rank in self.ranks.values():
            self._reach(rank, 0.0)
        now = 0.0
        while True:
            if self.changed and (not self.heap or self.heap[0][0] > now):
                self._share(now)
            if not self.heap:
                break
            now, _, handler, subject, version = heapq.heappop(self.heap)
            if subject.version == version:
                handler(subject, now)
        stuck = [rank for rank in self.ranks.values() if not rank.finished]
        if stuck:
            raise ScheduleError("the programs wait for each other: " + "; ".join(map(_where, stuck)))
        return self._result()

    def _at(self, time: float, handler: Callable[..., None], subject: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (time, self.sequence, handler, subject, subject.version))

    def _reserve(self) -> int:
        """Reserve the position of an event that is written when it ends, so that others can refer to it earlier."""
        self.events.append(_RESERVED)
        return len(self.events) - 1

    def _emit(self, event: Event) -> int:
        self.events.append(event)
        return len(self.events) - 1

    # Tasks

    def _reach(self, rank: RankState, now: float) -> None:
        """Advance to the next task, or to the end of the program."""
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

    def _post(self, rank: RankState, task: PricedTask, now: float) -> None:
        """Post the receives before the task, and later ones while the credit lasts."""
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

    def _unblocked(self, rank: RankState, now: float, message: Message | None) -> None:
        """Continue after the last input has arrived; ``message`` is that input, if the rank had to wait."""
        rank.after = rank.last_event
        rank.waits = []
        if now > rank.free and message is not None:
            rank.after = message.event
            link = message.link.time
            peer = link.source if link.target == rank.index else link.target
            begin = rank.free
            if message.receiver_waits and not rank.at_end:
                begin = self._compute_own(rank, rank.tasks[rank.next_task], now)
            issued = min(max(message.issued or 0.0, begin), now)
            self._wait(rank, begin, issued, "pipeline", peer)
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
            rank.start = now  # start of its wait for its group
            return
        for index in group.arrived:
            member = self.ranks[index]
            if member is not rank:
                self._wait_for_peer(member, rank, member.start, now)
                member.after = rank.after
        for index in group.arrived:
            self._begin(self.ranks[index], self.ranks[index].tasks[self.ranks[index].next_task], now)

    def _compute_own(self, rank: RankState, task: PricedTask, now: float) -> float:
        """Take what a task has computed before its last input came off its seconds; return when that was done."""
        own = min(task.own, now - rank.free)
        if own:
            seconds, *others = task.price
            task.price = (seconds - own, *others)  # type: ignore[assignment]
            rank.parts["compute"] += own
            end = rank.free + own
            event = Event(task.kind, rank.index, rank.free, end, task.stage, task.micro_batch, after=rank.last_event)
            rank.last_event = self._emit(event)
        return rank.free + own

    def _wait_for_peer(self, rank: RankState, peer: RankState, start: float, now: float) -> None:
        """Attribute a wait for a group member to the reasons of that member's waits, otherwise to a stall."""
        for begin, end, reason, other in peer.waits:
            begin, end = max(begin, start), min(end, now)
            if begin < end:
                self._wait(rank, start, begin, "stall", peer.index)
                self._wait(rank, begin, end, reason, other)
                start = end
        self._wait(rank, start, now, "stall", peer.index)

    def _wait(self, rank: RankState, start: float, end: float, reason: Part, peer: int) -> None:
        if end > start:
            rank.waits.append((start, end, reason, peer))
            rank.parts[reason] += end - start
            self._emit(Event("idle", rank.index, start, end, peer=peer, reason=reason, after=rank.last_event))

    def _begin(self, rank: RankState, task: PricedTask, now: float) -> None:
        self._computes(rank, True, now)
        rank.slowed = rank.reducing is not None
        rank.start = rank.since = now
        rank.done = 0.0
        rank.milestone = 0
        if task.kind == "F":
            count = rank.in_flight[task.stage] = rank.in_flight.get(task.stage, 0) + 1
            self.in_flight[task.stage] = max(self.in_flight.get(task.stage, 0), count)
        seconds, communication, *sizes = task.price
        if (waits := task.least_end - now - seconds) > 0:
            task.price = (seconds + waits, communication + waits, *sizes)  # type: ignore[assignment]
        task.event = self._reserve()
        if task.price[2]:
            rank.memory.append((now, rank.live_bytes + task.price[2]))
        self._schedule(rank, task)

    def _speed(self, rank: RankState) -> float:
        return 1.0 if rank.reducing is None else 1 / (1 + rank.reducing)

    def _schedule(self, rank: RankState, task: PricedTask) -> None:
        """Schedule the next milestone of the running task, or its end."""
        until = task.price[0]
        if rank.milestone < len(task.milestones):
            until *= task.milestones[rank.milestone][0]
        self._at(rank.since + max(0.0, until - rank.done) / self._speed(rank), self._progress, rank)

    def _progress(self, rank: RankState, now: float) -> None:
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

    def _task_done(self, rank: RankState, task: PricedTask, now: float) -> None:
        self._computes(rank, False, now)
        rank.version += 1
        rank.own_end = now
        event = Event(task.kind, rank.index, rank.start, now, task.stage, task.micro_batch, after=rank.after)
        self.events[task.event] = event
        rank.last_event = task.event
        seconds, communication, _, _ = task.price
        slowed = max(0.0, now - rank.start - seconds) if rank.slowed else 0.0  # rounding may make it negative, as below
        rank.parts["reduction"] += slowed
        rank.parts["communication"] += communication
        rank.parts["compute"] += max(0.0, now - rank.start - slowed - communication)
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

    def _leave(self, rank: RankState, task: PricedTask, now: float) -> None:
        """Finish a task: free memory, issue its messages, and advance."""
        if task.kind == "F":
            rank.live_bytes += task.price[3]
        for stage in task.frees:
            rank.live_bytes -= rank.saved_bytes[stage]
            rank.in_flight[stage] -= 1
        if rank.live_bytes != rank.memory[-1][1]:
            rank.memory.append((now, rank.live_bytes))
        rank.next_task += 1
        rank.outstanding.update(task.copies)
        for message in task.outputs:
            message.issued, message.number, message.producer = now, rank.next_task, rank.last_event
            rank.sends.append(message)
            message.link.queue.append(message)
            self._move(message.link, now)
        self._reach(rank, now)

    # Messages

    def _move(self, link: Link, now: float) -> None:
        """Start the link's first message if sender and receiver are ready."""
        if not link.queue:
            return
        message = link.queue[0]
        if message.started is not None or message.posted is None:
            return
        message.started = message.since = now
        message.cause = self._cause(message)
        message.event = self._reserve()
        message.left = message.bytes
        if not link.time.resources:
            self._at(now + message.left / link.time.bandwidth, self._sent, message)
            return
        for resource, load in link.loads.items():
            self.users.setdefault(resource, {})[message] = None
            self.load[resource] = self.load.get(resource, 0) + load
            self.changed[resource] = None

    def _share(self, now: float) -> None:
        """Update the bandwidth of every message on the changed resources.

        This runs once per moment: all messages of ranks that work together begin, and many end, at the same time.
        """
        load = self.load
        for message in {message: None for resource in self.changed for message in self.users[resource]}:
            time = message.link.time
            rate = time.bandwidth / max([load[resource] for resource in time.resources])
            if rate == message.rate:
                continue
            message.left = max(0.0, message.left - (now - message.since) * message.rate)
            message.since = now
            message.rate = rate
            message.version += 1
            self._at(now + message.left / rate, self._sent, message)
        self.changed.clear()

    def _sent(self, message: Message, now: float) -> None:
        """The last byte has left: start the next message; this one arrives after the latency."""
        link = message.link
        message.version += 1
        message.sent = True
        link.queue.popleft()
        link.last = message
        for resource, load in link.loads.items():
            del self.users[resource][message]
            self.load[resource] -= load
            self.changed[resource] = None
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

    def _cause(self, message: Message) -> int:
        """Return the event that determined when a message started."""
        issued, posted, previous = message.issued or 0.0, message.posted or 0.0, message.link.last
        if previous is not None and message.started is not None and message.started > max(issued, posted):
            return previous.event
        return message.poster if posted > issued else message.producer

    def _arrived(self, message: Message, now: float) -> None:
        message.arrived = True
        if message.receiver_waits:
            self._unblock(self.ranks[message.link.time.target], message, now)

    def _unblock(self, rank: RankState, message: Message, now: float) -> None:
        rank.blockers -= 1
        if not rank.blockers:
            self._unblocked(rank, now, message)

    # Reductions and the end of the step

    def _launch(self, rank: RankState, now: float) -> None:
        """Launch the rank's buckets in order, up to the first that is not ready."""
        while rank.launched < len(rank.buckets) and rank.buckets[rank.launched].index in rank.ready:
            bucket = rank.buckets[rank.launched]
            rank.launched += 1
            bucket.launched += 1
            bucket.last = (now, rank.index, rank.tasks[rank.next_task].event)
            self._reduce(bucket, now)

    def _reduce(self, bucket: Bucket, now: float) -> None:
        """Start a bucket if all of its ranks have launched it and it is next on each of them."""
        members = [self.ranks[rank] for rank in bucket.ranks]
        if bucket.start is not None or bucket.launched < len(members):
            return
        if any(rank.buckets[rank.reduced] is not bucket for rank in members):
            return
        bucket.start = bucket.since = now
        bucket.left = bucket.seconds
        for rank in members:
            self._set_reducing(rank, bucket.slowdown[rank.index], now)
        self._set_pace(bucket, now)

    def _set_pace(self, bucket: Bucket, now: float) -> None:
        """Schedule the end of a reduction, which takes longer while any of its ranks computes."""
        bucket.left = max(0.0, bucket.left - (now - bucket.since) * bucket.speed)
        bucket.since = now
        computes = bucket.stretch and any(self.ranks[rank].running for rank in bucket.ranks)
        bucket.speed = 1 / (1 + bucket.stretch) if computes else 1.0
        bucket.version += 1
        self._at(now + bucket.left / bucket.speed, self._reduced, bucket)

    def _computes(self, rank: RankState, computes: bool, now: float) -> None:
        rank.running = computes
        if rank.reducing is not None and (bucket := rank.buckets[rank.reduced]).stretch:
            self._set_pace(bucket, now)

    def _reduced(self, bucket: Bucket, now: float) -> None:
        bucket.end = now
        bucket.version += 1
        members = [self.ranks[rank] for rank in bucket.ranks]
        start, (launched, _, after) = bucket.start or 0.0, bucket.last
        if start > launched:  # it waited for another bucket of one of its ranks
            before = [rank.buckets[rank.reduced - 1] for rank in members if rank.reduced]
            after = max(before, key=lambda other: other.end).event
        for rank in members:
            event = Event("reduce", rank.index, start, now, bucket=bucket.index, after=after)
            bucket.event = self._emit(event)
            rank.reduced += 1
            self._set_reducing(rank, None, now)
        for rank in members:
            if rank.reduced < len(rank.buckets):
                self._reduce(rank.buckets[rank.reduced], now)
        for rank in members:
            if rank.at_end and not rank.blockers:
                self._finish(rank, now)

    def _set_reducing(self, rank: RankState, reducing: float | None, now: float) -> None:
        """Slow the running task down, or restore its full speed."""
        if rank.running:
            rank.done += (now - rank.since) * self._speed(rank)
            rank.since = now
        rank.reducing = reducing
        rank.slowed |= reducing is not None
        if rank.running:
            rank.version += 1
            self._schedule(rank, rank.tasks[rank.next_task])

    def _finish(self, rank: RankState, now: float) -> None:
        """Update the parameters after all tasks, sends and reductions of the rank."""
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


def _where(rank: RankState) -> str:
    if rank.at_end:
        return f"rank {rank.index} at the end of the step"
    task = rank.tasks[rank.next_task]
    return f"rank {rank.index} before {task.stage}{task.kind}{task.micro_batch}"
