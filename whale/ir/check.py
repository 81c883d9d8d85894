"""The static check: a proof, before any process group exists, that the programs of all ranks match.

`check_programs` checks the messages between stages, `check_collectives` the collectives inside them. Both are linear in
the number of instructions: 1,024 ranks take seconds, in one process, with no device. A finding is a bug in generated
programs, never the user's fault, so it is a `ScheduleError`. This module knows no torch and no strategies; a collective
is a name, its ranks and the data that they must agree on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from whale.errors import ScheduleError
from whale.ir.program import (
    Box,
    Compute,
    Copy,
    Direction,
    Edge,
    Free,
    Gather,
    Program,
    Receive,
    Reduce,
    ReduceSpec,
    Send,
    Shape,
    StageSpec,
    SumLoss,
    Transfer,
    box_shape,
    box_size,
    fills,
)
from whale.ir.schedule import Order

__all__ = ["CollectiveCall", "check_collectives", "check_edges", "check_programs"]


class CollectiveCall(NamedTuple):
    """One call of a collective by one rank; all ranks of a call must see equal ones.

    Attributes:
        node: the name of the graph node that makes the call.
        op: what it does, as in ``all_reduce``.
        ranks: its members, in the order of the process group.
        dtype: torch's name of the type.
        shapes: equal on all ranks: the common shape, or, for uneven shares, one shape per rank.
        beside: whether it moves while the attention of its node computes.
    """

    node: str
    op: str
    ranks: tuple[int, ...]
    dtype: str
    shapes: tuple[Shape, ...]
    beside: bool = False

    def __str__(self) -> str:
        return f"{self.op} of {self.node} over ranks {list(self.ranks)}, {self.dtype} {list(self.shapes)}"


def check_programs(
    programs: Mapping[int, Program],
    stages: Sequence[StageSpec],
    edges: Sequence[Edge],
    reduces: Sequence[ReduceSpec] = (),
    in_flight: Mapping[int, int] | None = None,
    order: Order | None = None,
) -> None:
    """Check that the programs of all ranks run to their end, without deadlock, lost or unexpected values.

    Every pair of ranks sends what the other receives, in the same order and shape; all inputs of a task have arrived
    before it; each backward follows its forward, and each free the last use; the ranks of a stage and of a bucket do
    the same things in the same order; each rank sums the loss once; and no ranks wait for each other in a circle, even
    if every computation of a stage, every message, every bucket and the sum of the loss were a rendezvous of its ranks,
    at which each waits for the others before it does anything else. This is more than gloo needs. It holds for NCCL in
    each of its ways to run what a rank starts: in one queue for each communicator, in one queue for all
    (NCCL_LAUNCH_ORDER_IMPLICIT=1), or blocking the host until all ranks have come, as at the first use of a
    communicator.

    Args:
        programs: the instructions of each rank, all ranks of all stages.
        stages: the stages.
        edges: what travels between them; checked by `check_edges` first.
        reduces: the gradient buckets.
        in_flight: the limit of micro-batches in flight on each stage, if it is to be checked.
        order: the projected order, if every rank is to be compared with it and not only with its stage's other ranks.

    Raises:
        ScheduleError: the first finding; names ranks, value and task.
    """
    check_edges(edges)
    _check_pairs(programs, edges)
    _check_tasks(programs, stages, edges, in_flight or {}, order)
    _check_reduces(programs, reduces)
    _check_progress(_events(programs, stages, reduces))
    for rank, program in programs.items():
        if sum(isinstance(instruction, SumLoss) for instruction in program) != 1:
            raise ScheduleError(f"the program of rank {rank} does not sum the loss exactly once")


def check_edges(edges: Sequence[Edge]) -> None:
    """Check that boxes are inside of their tensors, of equal shape at both ends, and fill what a stage receives.

    Raises:
        ScheduleError: names the edge's value, the micro-batch and the transfer or the rank.
    """
    for index, edge in enumerate(edges):
        if edge.index != index:
            raise ScheduleError(f"edge {edge.value!r} has index {edge.index} at position {index}")
        counts = {len(edge.forward), len(edge.backward), len(edge.source_shapes), len(edge.target_shapes)}
        if len(counts) != 1:
            raise ScheduleError(f"edge {edge.value!r} does not have the same number of micro-batches in all its fields")
        for micro_batch in range(len(edge.forward)):
            where = f"edge {index} ({edge.value!r}), micro-batch {micro_batch}"
            sources, targets = edge.source_shapes[micro_batch], edge.target_shapes[micro_batch]
            if edge.backward[micro_batch] and not edge.needs_grad:
                raise ScheduleError(f"{where}: gradients travel, but the value needs none")
            for transfer in edge.backward[micro_batch]:
                _check_transfer(transfer, targets, sources, f"{where}, backward")
            parts: dict[int, list[Box]] = {rank: [] for rank in targets}
            for transfer in edge.forward[micro_batch]:
                _check_transfer(transfer, sources, targets, f"{where}, forward")
                parts[transfer.target].append(transfer.target_box)
            for rank, boxes in parts.items():
                if not fills(boxes, targets[rank]):
                    raise ScheduleError(
                        f"{where}: what rank {rank} receives, {boxes}, does not fill its {targets[rank]} exactly once"
                    )


def _check_transfer(transfer: Transfer, sources: Mapping[int, Shape], targets: Mapping[int, Shape], where: str) -> None:
    source, target, source_box, target_box = transfer
    for end, rank, shapes, box in (("from", source, sources, source_box), ("to", target, targets, target_box)):
        shape = shapes.get(rank)
        if shape is None:
            raise ScheduleError(f"{where}: {transfer} is {end} a rank that has no part of the value")
        if len(box) != len(shape) or not all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True)):
            raise ScheduleError(f"{where}: {transfer} leaves the {shape} of rank {rank}")
    if box_shape(source_box) != box_shape(target_box):
        raise ScheduleError(f"{where}: {transfer} has boxes of different shape")


def _check_pairs(programs: Mapping[int, Program], edges: Sequence[Edge]) -> None:
    """Check that each pair of ranks sends and receives the same values in the same order."""
    sent: dict[tuple[int, int], list[Send]] = {}
    received: dict[tuple[int, int], list[Receive]] = {}
    for rank, program in programs.items():
        for instruction in program:
            if isinstance(instruction, Send):
                sent.setdefault((rank, instruction.peer), []).append(instruction)
            elif isinstance(instruction, Receive):
                received.setdefault((instruction.peer, rank), []).append(instruction)
    for pair in sorted(sent.keys() | received.keys()):
        for position, (send, receive) in enumerate(zip_longest(sent.get(pair, ()), received.get(pair, ()))):
            if send is not None and receive is not None:
                same = send[:3] == receive[:3] and box_shape(send.box) == box_shape(receive.box)
                if same:
                    continue
            one = send or receive
            raise ScheduleError(
                f"ranks {pair[0]} and {pair[1]} disagree on exchange {position} between them, of value "
                f"{edges[one.edge].value!r}: "
                f"rank {pair[0]} has {send or 'nothing'}, rank {pair[1]} has {receive or 'nothing'}"
            )


def _check_tasks(
    programs: Mapping[int, Program],
    stages: Sequence[StageSpec],
    edges: Sequence[Edge],
    in_flight: Mapping[int, int],
    order: Order | None,
) -> None:
    """Check each program by itself, and that the ranks of a stage do the same tasks in the same order."""
    expected: Counter[tuple[int, Direction, int, int]] = Counter()
    for edge in edges:
        directions: tuple[tuple[Direction, tuple[tuple[Transfer, ...], ...]], ...]
        directions = (("forward", edge.forward), ("backward", edge.backward))
        for direction, by_micro_batch in directions:
            for micro_batch, transfers in enumerate(by_micro_batch):
                for transfer in transfers:
                    if box_size(transfer.source_box):
                        expected[edge.index, direction, micro_batch, transfer.target] += 1
    ranks_of = {stage.index: frozenset(stage.ranks) for stage in stages}
    wanted: dict[int, tuple[str, list[Compute]]] = {}
    for task in order or ():
        wanted.setdefault(task.stage, ("the order", []))[1].append(Compute(*task))
    for rank, program in programs.items():
        tasks = _check_program(rank, program, edges, ranks_of, expected, in_flight)
        for stage, ranks in ranks_of.items():
            own = tasks.get(stage, [])
            other, theirs = wanted.setdefault(stage, (f"rank {rank}", own)) if rank in ranks else ("", own)
            if theirs != own:
                mine, yours = " ".join(map(str, own)), " ".join(map(str, theirs))
                raise ScheduleError(f"rank {rank} and {other} differ on stage {stage}: {mine!r} against {yours!r}")


def _check_program(
    rank: int,
    program: Program,
    edges: Sequence[Edge],
    ranks_of: Mapping[int, frozenset[int]],
    expected: Counter[tuple[int, Direction, int, int]],
    in_flight: Mapping[int, int],
) -> dict[int, list[Compute]]:
    """Check that the inputs of every instruction exist; return the tasks of each stage."""
    tasks: dict[int, list[Compute]] = {}
    done: set[tuple[int, int, int] | tuple[str, int, int]] = set()
    freed: set[tuple[int, int]] = set()
    held: Counter[int] = Counter()
    arrived: Counter[tuple[int, Direction, int]] = Counter()
    entering: dict[int, list[Edge]] = {}
    leaving: dict[int, list[Edge]] = {}
    for edge in edges:
        entering.setdefault(edge.target_stage, []).append(edge)
        leaving.setdefault(edge.source_stage, []).append(edge)

    def need(condition: bool, instruction: object, reason: str) -> None:
        if not condition:
            raise ScheduleError(f"rank {rank}, {instruction}: {reason}")

    for instruction in program:
        if isinstance(instruction, Compute):
            kind, stage, micro_batch = instruction
            here = (stage, micro_batch)
            need(rank in ranks_of.get(stage, ()), instruction, "the rank is not of this stage")
            need(instruction not in done, instruction, "done twice")
            need(here not in freed, instruction, "after its activations are freed")
            needed = {"F": None, "B": "F", "I": "F", "W": "I"}[kind]
            need(needed is None or (needed, *here) in done, instruction, f"before its {needed}")
            direction: Direction = "forward" if kind == "F" else "backward"
            sources = {"F": entering, "W": {}}.get(kind, leaving).get(stage, ())
            for edge in sources:
                key = (edge.index, direction, micro_batch)
                if arrived[key] != expected.get((*key, rank), 0):
                    wanted = expected.get((*key, rank), 0)
                    reason = f"{arrived[key]} of {wanted} parts of edge {edge.index} ({edge.value!r}) have come"
                    raise ScheduleError(f"rank {rank}, {instruction}: {reason}")
            done.add(instruction)
            tasks.setdefault(stage, []).append(instruction)
            held[stage] += (kind == "F") - (kind in "BW")
            limit = in_flight.get(stage)
            need(limit is None or held[stage] <= limit, instruction, f"more than {limit} micro-batches in flight")
        elif isinstance(instruction, Free):
            here = (instruction.stage, instruction.micro_batch)
            need(("F", *here) in done and here not in freed, instruction, "nothing to free")
            freed.add(here)
        elif isinstance(instruction, Send | Copy | Receive):
            edge = edges[instruction.edge]
            key = (instruction.edge, instruction.direction, instruction.micro_batch)
            if not isinstance(instruction, Receive):
                forward = instruction.direction == "forward"
                stage = edge.source_stage if forward else edge.target_stage
                here = (stage, instruction.micro_batch)
                ready = ("F", *here) in done if forward else ("B", *here) in done or ("I", *here) in done
                need(ready and here not in freed, instruction, "the value is not there, or no longer")
            if not isinstance(instruction, Send):
                arrived[key] += 1
    for task in done:
        need((task[1], task[2]) in freed, Compute(*task), "its activations are never freed")
    for key, count in arrived.items():
        wanted = expected.get((*key, rank), 0)
        need(count == wanted, f"edge {key[0]} {key[1]} m{key[2]}", f"{count} parts come, but {wanted} make the value")
    return tasks


def _check_reduces(programs: Mapping[int, Program], reduces: Sequence[ReduceSpec]) -> None:
    """Check that a rank reduces the buckets it is in, early only those of one stage, and that no backward of a bucket's
    stages follows."""
    specs = {reduce.index: reduce for reduce in reduces}
    for rank, program in programs.items():
        complete: set[int] = set()
        late: Reduce | None = None
        for instruction in program:
            if isinstance(instruction, Compute):
                late = None
            if isinstance(instruction, Reduce):
                spec = specs.get(instruction.bucket)
                if spec is None or rank not in spec.ranks:
                    raise ScheduleError(f"rank {rank}, {instruction}: the rank is not in this bucket")
                if instruction.early and (late is not None or len(spec.stages) > 1):
                    reason = f"it follows {late}" if late is not None else f"{len(spec.stages)} stages add to it"
                    raise ScheduleError(f"rank {rank}, {instruction}: it may start early, but {reason}")
                late = None if instruction.early else instruction
                complete.update(spec.stages)
            elif isinstance(instruction, Compute) and instruction.kind in "BW" and instruction.stage in complete:
                raise ScheduleError(f"rank {rank}, {instruction}: after a bucket of its gradients is reduced")


def check_collectives(sequences: Mapping[int, Sequence[CollectiveCall]]) -> None:
    """Check that the members of every group make the same calls on it, and that no groups wait for each other.

    Args:
        sequences: for each rank, all calls it makes, in order; a rank that makes none may be left out.

    Raises:
        ScheduleError: names two ranks that differ and their nodes, or the circle of ranks that wait.

    >>> call = CollectiveCall("linear_3", "all_reduce", (0, 1), "float32", ((4, 8),))
    >>> check_collectives({0: [call, call], 1: [call]})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    whale.errors.ScheduleError: ranks 0 and 1 disagree on call 1 of their group [0, 1]: ... rank 1 makes none
    """
    by_group: dict[tuple[int, ...], dict[int, list[CollectiveCall]]] = {}
    events: dict[int, list[_Event]] = {rank: [] for rank in sequences}
    for rank, calls in sequences.items():
        for call in calls:
            if rank not in call.ranks or len(set(call.ranks)) != len(call.ranks):
                raise ScheduleError(f"rank {rank} makes {call}, which is not a group that it is in once")
            own = by_group.setdefault(call.ranks, {}).setdefault(rank, [])
            events[rank].append(_Event((call.ranks, len(own)), call.ranks, call))
            own.append(call)
    for group, calls_of in sorted(by_group.items()):
        first = calls_of.get(group[0], [])
        for rank in group[1:]:
            if calls_of.get(rank, []) == first:
                continue
            pairs = zip_longest(first, calls_of.get(rank, []))
            position, (one, other) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
            raise ScheduleError(
                f"ranks {group[0]} and {rank} disagree on call {position} of their group {list(group)}: "
                f"rank {group[0]} makes {one or 'none'}, rank {rank} makes {other or 'none'}"
            )
    _check_progress(events)


class _Event(NamedTuple):
    """An instruction as the simulation sees it: a rendezvous of its members."""

    key: Hashable
    members: tuple[int, ...]
    label: object


def _events(
    programs: Mapping[int, Program], stages: Sequence[StageSpec], reduces: Sequence[ReduceSpec]
) -> dict[int, list[_Event]]:
    ranks_of = {stage.index: stage.ranks for stage in stages}
    members_of = {reduce.index: reduce.ranks for reduce in reduces}
    everyone = tuple(programs)
    events: dict[int, list[_Event]] = {}
    for rank, program in programs.items():
        own = events[rank] = []
        messages: Counter[tuple[int, int]] = Counter()
        for instruction in program:
            if isinstance(instruction, Send | Receive):
                ends = (rank, instruction.peer) if isinstance(instruction, Send) else (instruction.peer, rank)
                own.append(_Event((ends, messages[ends]), ends, instruction))
                messages[ends] += 1
            elif isinstance(instruction, Compute):
                if len(ranks_of[instruction.stage]) > 1:
                    own.append(_Event(instruction, ranks_of[instruction.stage], instruction))
            elif isinstance(instruction, Reduce | Gather):
                own.append(_Event(instruction, members_of[instruction.bucket], instruction))
            elif isinstance(instruction, SumLoss):
                own.append(_Event(instruction, everyone, instruction))
    return events


def _check_progress(events: Mapping[int, Sequence[_Event]]) -> None:
    """Run every rank as far as possible, repeatedly; if some cannot finish, name the ranks in the deadlock."""
    position = dict.fromkeys(events, 0)
    meeting: dict[Hashable, list[int]] = {}
    runnable = deque(events)
    while runnable:
        rank = runnable.popleft()
        own = events[rank]
        at = position[rank]
        while at < len(own):
            key, members, _ = own[at]
            present = meeting.setdefault(key, [])
            present.append(rank)
            if len(present) < len(members):
                break
            del meeting[key]
            for other in present:
                if other != rank:
                    position[other] += 1
                    runnable.append(other)
            at += 1
        position[rank] = at
    stuck = {rank: events[rank][at] for rank, at in position.items() if at < len(events[rank])}
    if stuck:
        raise ScheduleError(_circle(stuck, meeting))


def _circle(stuck: Mapping[int, _Event], meeting: Mapping[Hashable, list[int]]) -> str:
    """Follow the chain of waiting ranks from the lowest stuck rank until a rank repeats or has ended."""
    rank = min(stuck)
    chain: list[int] = []
    while rank in stuck and rank not in chain:
        chain.append(rank)
        event = stuck[rank]
        rank = next(member for member in event.members if member not in meeting.get(event.key, ()))
    steps = [f"rank {waiter} waits in '{stuck[waiter].label}'" for waiter in chain]
    end = f"rank {rank}, which never comes to it" if rank not in stuck else f"rank {rank} again"
    return "programs cannot end: " + ", for ".join(steps) + f", for {end}"
