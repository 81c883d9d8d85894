"""Programs with times: the tasks of each rank with the messages that they consume and produce, as input of the engine.

The records are also the mutable state of the engine, made for a single simulation. This module knows no clock.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from whale.errors import ScheduleError, UsageError
from whale.ir.program import Compute, Copy, Edge, Free, Gather, Program, Receive, Reduce, Send, SumLoss
from whale.ir.schedule import Kind
from whale.ir.workload import LinkTime, Reduction, StageWork, Workload
from whale.planner.simulation.timeline import PARTS, Part

__all__ = [
    "Bucket",
    "TaskGroup",
    "Link",
    "Loads",
    "Message",
    "PricedPrograms",
    "PricedTask",
    "RankState",
    "price_programs",
]

Key = tuple[int, str, int]
"""Key of a received tensor: edge, direction, micro-batch."""

Interval = tuple[float, float, Part, int]
"""Start, end, reason and the rank that is waited for."""

Price = tuple[float, float, int, int]
"""Cost of a task: seconds, seconds of communication among them, bytes while it runs, bytes of saved activations after
it."""

Loads = Mapping[tuple[int, int], Mapping[str, int]]
"""For a folded link and each resource: the number of links that share it."""


@dataclass(eq=False, slots=True)
class Link:
    """The link from one rank to another, with its queue of messages."""

    time: LinkTime
    loads: Mapping[str, int]  # by resource, the number of messages that one of this link represents
    queue: deque[Message] = field(default_factory=deque)  # issued, in order; the first may be moving
    last: Message | None = None  # the last message that has been sent


@dataclass(eq=False, slots=True)
class Message:
    """One message between two ranks, with its state."""

    link: Link
    bytes: float
    key: Key
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
class Bucket:
    """A gradient reduction, with its state."""

    index: int
    seconds: float
    ready: float
    stages: frozenset[int]
    slowdown: dict[int, float]  # by rank: slowdown of overlapped computation
    stretch: float  # slowdown of the reduction while a rank computes
    ranks: list[int] = field(default_factory=list)
    launched: int = 0
    last: tuple[float, int, int] = (0.0, -1, -1)  # when, on which rank and after which event it could start
    start: float | None = None
    left: float = 0.0  # remaining seconds on a free network, from *since* on
    since: float = 0.0
    speed: float = 1.0
    end: float = 0.0
    event: int = -1  # of one of its ranks
    version: int = 0


@dataclass(eq=False, slots=True)
class PricedTask:
    """A task on one rank, with its messages before and after."""

    kind: Kind
    stage: int
    micro_batch: int
    price: Price
    keys: list[Key]  # its inputs
    inputs: list[Message]
    first_receives: int  # receives before it in the program
    outputs: list[Message]
    copies: tuple[Key, ...] = ()
    milestones: tuple[tuple[float, Bucket], ...] = ()  # fraction of the task after which a bucket is ready
    frees: tuple[int, ...] = ()  # stages
    least_end: float = 0.0  # until then its parameters arrive
    own: float = 0.0  # seconds that it computes before it needs its inputs
    event: int = -1


@dataclass(eq=False, slots=True)
class TaskGroup:
    """Ranks that run a stage's tasks together."""

    size: int
    arrived: list[int] = field(default_factory=list)
    done: int = 0


@dataclass(eq=False, slots=True)
class RankState:
    """The state of a rank: its tasks and its position in them."""

    index: int
    tasks: list[PricedTask]
    receives: list[Message]
    buckets: list[Bucket]
    credit: int  # values that may be in flight before the program asks for them
    window: int  # tasks after which a send must be done
    saved_bytes: dict[int, int]  # bytes of saved activations of a micro-batch, by stage
    next_task: int = 0
    posted: int = 0
    outstanding: set[Key] = field(default_factory=set)
    sends: deque[Message] = field(default_factory=deque)
    blockers: int = 0
    free: float = 0.0  # start of its idle time
    last_event: int = -1
    after: int = -1
    waits: list[Interval] = field(default_factory=list)
    # the running task
    running: bool = False
    slowed: bool = False  # by an overlapped reduction
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
    reducing: float | None = None  # slowdown of overlapped work, while a reduction runs
    at_end: bool = False
    finished: bool = False
    # results
    parts: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    live_bytes: int = 0
    memory: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    in_flight: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PricedPrograms:
    """The input of the engine; ``groups`` by stage and rank."""

    ranks: dict[int, RankState]
    groups: dict[tuple[int, int], TaskGroup]


def price_programs(
    programs: Mapping[int, Program],
    edges: Sequence[Edge],
    workload: Workload,
    bytes_of: Callable[[int, Send], float],
    loads: Loads,
) -> PricedPrograms:
    """Add times to the programs of all ranks; linear in their size.

    Raises:
        UsageError: the workload has no time for an instruction of a program, which the message names.
        ScheduleError: ranks do not send what others receive.
    """
    return _Pricing(programs, edges, workload, bytes_of, loads).result()


class _Pricing:
    def __init__(
        self,
        programs: Mapping[int, Program],
        edges: Sequence[Edge],
        workload: Workload,
        bytes_of: Callable[[int, Send], float],
        loads: Loads,
    ) -> None:
        self.programs = programs
        self.workload = workload
        self.prices: dict[int, dict[int, dict[Kind, Price]]] = {rank: {} for rank in programs}  # by rank and stage
        for index, stage in enumerate(workload.stages):
            for position, rank in enumerate(stage.ranks):
                if rank in self.prices:
                    self.prices[rank][index] = _prices(stage, position)
        self.gathered = {
            (rank, index): end
            for index, stage in enumerate(workload.stages)
            for rank, end in zip(stage.ranks, stage.gathered, strict=False)
        }
        self.own = {
            (rank, index): seconds
            for index, stage in enumerate(workload.stages)
            for rank, seconds in zip(stage.ranks, stage.own, strict=False)
        }
        self.buckets = [
            Bucket(
                index,
                reduction.seconds,
                reduction.ready,
                frozenset(reduction.stages),
                _slowdowns(workload, reduction),
                reduction.stretch,
            )
            for index, reduction in enumerate(workload.reductions)
        ]
        self.entering: dict[int, list[int]] = {}
        self.leaving: dict[int, list[int]] = {}
        for edge in edges:
            self.entering.setdefault(edge.target_stage, []).append(edge.index)
            self.leaving.setdefault(edge.source_stage, []).append(edge.index)
        links = {
            pair: Link(link, loads.get(pair) or dict.fromkeys(link.resources, 1))
            for link in workload.links
            for pair in [(link.source, link.target)]
        }
        self.unmatched: dict[tuple[int, int], deque[Message]] = {}  # between two ranks: sent, not yet received
        for rank, program in programs.items():
            for instruction in program:
                if isinstance(instruction, Send):
                    pair = (rank, instruction.peer)
                    if pair not in links:
                        raise UsageError(
                            f"rank {rank} sends to rank {instruction.peer}, but the workload has no link between them"
                        )
                    message = Message(links[pair], bytes_of(rank, instruction), instruction[:3])
                    self.unmatched.setdefault(pair, deque()).append(message)
        self.unsent = {pair: deque(messages) for pair, messages in self.unmatched.items()}

    def result(self) -> PricedPrograms:
        groups: dict[tuple[int, int], TaskGroup] = {}
        for index, stage in enumerate(self.workload.stages):
            for ranks in stage.together:
                group = TaskGroup(len(ranks))
                groups |= {(index, rank): group for rank in ranks}
        ranks_of = {rank: self._rank(rank, program) for rank, program in self.programs.items()}
        return PricedPrograms(ranks=ranks_of, groups=groups)

    def _rank(self, rank: int, program: Program) -> RankState:
        tasks: list[PricedTask] = []
        receives: list[Message] = []
        buckets: list[Bucket] = []
        arriving: dict[Key, list[Message]] = {}
        kept = most = 0
        for instruction in program:
            match instruction:
                case Compute():
                    tasks.append(self._task(rank, instruction, arriving, len(receives)))
                    kept += instruction.kind == "F"
                    most = max(most, kept)
                case Send():
                    message = self.unsent[rank, instruction.peer].popleft()
                    message.stage = tasks[-1].stage
                    tasks[-1].outputs.append(message)
                case Receive():
                    message = self._received(rank, instruction)
                    receives.append(message)
                    arriving.setdefault(instruction[:3], []).append(message)
                case Copy():
                    tasks[-1].copies += (instruction[:3],)
                case Reduce():
                    buckets.append(self._bucket(rank, instruction, tasks))
                case SumLoss():
                    pass  # a number over all ranks, beside the sums of gradients
                case Gather():
                    pass  # `least_end` of tasks says when they have arrived
                case Free():
                    tasks[-1].frees += (instruction.stage,)
                    kept -= 1
        ahead = self.workload.runs_ahead
        credit = len(receives) if ahead else max(2, most)
        window = 2 if ahead else 2 * credit + 2  # the executor's credit on CUDA is 0
        if self.workload.blocking_transfers:
            window = 0
        kept_bytes = {stage: prices["F"][3] for stage, prices in self.prices[rank].items()}
        return RankState(rank, tasks, receives, buckets, credit, window, kept_bytes)

    def _task(self, rank: int, task: Compute, arriving: dict[Key, list[Message]], first: int) -> PricedTask:
        kind, stage, micro_batch = task
        if stage not in self.prices[rank]:
            raise UsageError(f"the workload has no times of stage {stage} on rank {rank}")
        edges: Sequence[int] = ()
        if kind != "W":
            edges = (self.entering if kind == "F" else self.leaving).get(stage, ())
        keys = [(edge, "forward" if kind == "F" else "backward", micro_batch) for edge in edges]
        inputs = [message for key in keys for message in arriving.pop(key, ())]
        price, own = self.prices[rank][stage][kind], self.own.get((rank, stage), 0.0) if kind == "F" else 0.0
        if micro_batch == self.workload.micro_batches - 1:  # its memory counts as that of a full micro-batch
            seconds, communication, *sizes = price
            share = self.workload.last_share
            price, own = (seconds * share, communication * share, *sizes), own * share  # type: ignore[assignment]
        made = PricedTask(kind, stage, micro_batch, price, keys, inputs, first, [], own=own)
        if kind == "F" and not micro_batch:
            made.least_end = self.gathered.get((rank, stage), 0.0)
        return made

    def _received(self, rank: int, receive: Receive) -> Message:
        queue = self.unmatched.get((receive.peer, rank))
        if not queue or queue[0].key != receive[:3]:
            raise ScheduleError(f"rank {rank}: {receive}, but that rank's next send to it is another, or there is none")
        return queue.popleft()

    def _bucket(self, rank: int, reduce: Reduce, tasks: Sequence[PricedTask]) -> Bucket:
        index = reduce.bucket
        if index >= len(self.buckets):
            raise UsageError(f"rank {rank} reduces bucket {index}, but the workload has {len(self.buckets)} reductions")
        bucket = self.buckets[index]
        bucket.ranks.append(rank)
        if not reduce.early and tasks:
            tasks[-1].milestones = (*tasks[-1].milestones, (1.0, bucket))
            return bucket
        for task in reversed(tasks):
            if task.kind in "BW" and task.stage in bucket.stages:
                milestones = list(task.milestones)
                insort(milestones, (bucket.ready, bucket), key=itemgetter(0))
                task.milestones = tuple(milestones)
                return bucket
        raise UsageError(f"rank {rank} reduces bucket {index}, but runs no backward of its stages before")


def _slowdowns(workload: Workload, reduction: Reduction) -> dict[int, float]:
    """Slowdown of computation on each rank during a reduction."""
    each = reduction.slowdown or (workload.overlap_slowdown,) * len(reduction.ranks)
    return dict(zip(reduction.ranks, each, strict=True))


def _prices(work: StageWork, position: int) -> dict[Kind, Price]:
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
