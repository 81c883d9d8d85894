"""Communication in the order in which the executors of all ranks start it: it can run one after another on every rank,
as NCCL runs it. Steps run without data; every call is recorded where the executor makes it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import whale
from whale.annotations import module_scopes
from whale.compile.assembly import assemble
from whale.compile.communicators import PURPOSES, Communicator, communicators, message_ranks, start_up
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_traced
from whale.compile.options import Options
from whale.compile.rank_step import rank_step
from whale.compile.trace import Traced, trace
from whale.errors import ScheduleError
from whale.graph.values import value_tensor
from whale.ir.check import CollectiveCall, check_collectives, check_programs
from whale.ir.cluster import Cluster
from whale.ir.program import Compute, Gather, Program, Reduce, Send, SumLoss
from whale.ir.state import StateSharding
from whale.runtime.collectives import CollectiveModule, DryGroup
from whale.runtime.failure import Failures
from whale.runtime.launch import families
from whale.runtime.messages import CoalescedMessages, Messages
from whale.runtime.owned import HeldUnit
from whale.runtime.random import RNGPosition
from whale.runtime.shards import gather_calls
from whale.strategies.derivatives import with_derivatives
from whale.strategies.dry_run import WithoutData, dry_run

LAYERS, ROWS, LENGTH = 4, 24, 8
WIDTH, WORDS = 16, 32
SCHEDULES = ("gpipe", "1f1b", "1f1b_deep", "zero_bubble", "zero_bubble_2p", "greedy")

Event = tuple[Hashable, tuple[int, ...]]
"""Something that ranks start together: a key, equal on all of them, and these ranks."""


def stages(count: int, *inner: Callable[[], Any]) -> dict[str, Any]:
    per = LAYERS // count
    first = whale.stage(4 // count) if inner else whale.stage()
    return {f"layers.[{i * per}-{i * per + per - 1}]": [first, *(make() for make in inner)] for i in range(count)}


NESTINGS: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "two stages": (lambda: stages(2), 2),
    "four stages": (lambda: stages(4), 4),
    "two stages of replicas": (lambda: stages(2, lambda: whale.replicate(2)), 4),
    "two split stages": (lambda: stages(2, lambda: whale.split(2)), 4),
    "one to three": (
        lambda: {"layers.[0-1]": whale.stage(1), "layers.[2-3]": [whale.stage(3), whale.replicate(3)]},
        4,
    ),
    "replicas to parts": (
        lambda: {
            "layers.[0-1]": [whale.stage(2), whale.replicate(2)],
            "layers.[2-3]": [whale.stage(2), whale.split(2)],
        },
        4,
    ),
    "replicas of parts": (lambda: {"": [whale.replicate(2), whale.split(2)]}, 4),
}
ALL_NESTINGS = NESTINGS | {
    "replicas": (lambda: {"": whale.replicate()}, 3),
    "parts": (lambda: {"": whale.split()}, 2),
}
"""Nestings of the order's proofs, and others without pipelines."""


class Layer(nn.Module):
    """A feed-forward layer: its order of communication is that of larger ones, with fewer operators."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers between two tables of words, which may be one."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def traced(tied: bool) -> tuple[nn.Module, Traced]:
    with torch.device("meta"):
        model = Stack(tied)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    return model, trace(model, {"tokens": tokens, "labels": tokens}, device="cpu", training=True)


class Recorder:
    """The transport of one rank and its groups."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: list[Event] = []
        self.messages: Counter[Hashable] = Counter()
        self.groups: set[Communicator] = set()

    def append(self, call: Any) -> None:
        """A collective inside a stage, or of parameters in stretches: of the list of calls of a :class:`DryGroup`."""
        self.groups.add(Communicator(call.node, tuple(sorted(call.ranks))))
        self.meet(call.op, tuple(sorted(call.ranks)))

    def meet(self, kind: str, ranks: tuple[int, ...]) -> None:
        self.messages[kind, ranks] += 1
        self.events.append(((kind, ranks, self.messages[kind, ranks]), ranks))

    def isend(self, tensor: Tensor, peer: int, group: Communicator) -> Recorder:
        self.meet_peer((self.rank, peer), group)
        return self

    def irecv(self, tensor: Tensor, peer: int, group: Communicator) -> Recorder:
        self.meet_peer((peer, self.rank), group)
        return self

    def meet_peer(self, ends: tuple[int, int], group: Communicator) -> None:
        self.groups.add(group)
        self.messages[group.purpose, ends] += 1
        self.events.append(((group.purpose, ends, self.messages[group.purpose, ends]), ends))

    def all_reduce(self, tensor: Tensor, op: Any, group: tuple[int, ...], async_op: bool) -> Recorder:
        self.groups.add(Communicator("sums of gradients", group))
        self.meet("bucket", group)
        return self

    def wait(self, *timeout: Any) -> bool:
        return True


class CoalescingRecorder(Recorder):
    """The same of a rank on a device: messages that start together are one list of events."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.together: list[list[Event]] = []

    def start_all(self, messages: Sequence[tuple[bool, Tensor, int]], group: Any) -> list[Recorder]:
        self.close()
        for sends, tensor, peer in messages:
            (self.isend if sends else self.irecv)(tensor, peer, group)
        self.together.append(self.events)
        self.events = []
        return [self]

    def close(self) -> None:
        """All since the last messages started one after another."""
        self.together += [[event] for event in self.events]
        self.events = []


class NoQueue(nullcontext[None]):
    """A device without queues."""

    def beside(self) -> NoQueue:
        return self

    def mark(self) -> None:
        """Nothing."""

    def follow(self, mark: None) -> None:
        """Nothing."""


def recorded_together(compilation: Compilation, rank: int, world: int) -> list[list[Event]]:
    """Everything that a rank on a device starts in a step: lists of what starts together."""
    recorder, meta = CoalescingRecorder(rank), torch.device("meta")
    messages = CoalescedMessages(meta, NoQueue(), recorder.start_all)
    record(compilation, rank, world, recorder, messages=messages)
    recorder.close()
    return recorder.together


def recorded(compilation: Compilation, rank: int, world: int, program: Program | None = None) -> list[Event]:
    """Everything that a rank starts in a step, of its own program or another, in this order."""
    recorder = Recorder(rank)
    record(compilation, rank, world, recorder, program)
    return recorder.events


def record(
    compilation: Compilation,
    rank: int,
    world: int,
    recorder: Recorder,
    program: Program | None = None,
    messages: Messages | None = None,
) -> None:
    """Run a step of a rank without data."""
    clock, meta = RNGPosition(0), torch.device("meta")
    tensors: dict[tuple[str, Any], Any] = {}
    for name, part in compilation.local_parameters(rank).items():
        blank = torch.empty(part.shape, dtype=part.dtype, device=meta)
        tensors["parameter", name] = nn.Parameter(blank, requires_grad=part.trainable)
    captured, batch = compilation.captured, {}
    for node in captured.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
            blank = torch.empty(node.meta["val"].shape, dtype=value_tensor((node, 0)).dtype, device=meta)
            if node.name in captured.inputs:
                batch[captured.inputs[node.name]] = blank
            elif node.name in captured.buffers:
                tensors["buffer", captured.buffers[node.name]] = blank
            elif node.name in captured.constants:
                tensors["constant", node.name] = blank
    for unit in compilation.units:
        if rank in unit.spec.ranks:
            of_sums, of_gathers = (DryGroup(purpose, unit.spec.ranks, recorder) for purpose in PURPOSES[1:3])  # type: ignore[arg-type]
            held = HeldUnit(unit, rank, {}, meta, of_gathers, of_sums, Failures(rank))
            tensors["unit", unit.spec.index] = held
            tensors |= {("gradient", name): slot for name, slot in held.slots.items()}
    everyone, specs = tuple(range(world)), compilation.rank_specs
    groups: dict[Hashable, Any] = {}
    data = rank_step(compilation, rank, program or compilation.program(rank), clock, device=torch.device("cpu"))
    with WithoutData():
        step = assemble(
            data,
            rank,
            tensors=tensors,
            clock=clock,
            bridge_group=lambda ranks: DryGroup(PURPOSES[0], ranks, recorder) if len(ranks) > 1 else None,  # type: ignore[arg-type]
            reduce_group=lambda ranks: ranks if len(ranks) > 1 else None,
            failures=Failures(rank),
            device=meta,
            transport=recorder,
            message_group=lambda edge, direction: groups.setdefault(
                (direction, message_ranks(specs, edge)), Communicator(direction, message_ranks(specs, edge))
            ),
            credit=0,
        )
        if messages is not None:
            step.executor.messages = messages
        for stage in step.stages:
            stage.begin(batch)
        recorder.meet("loss", everyone)  # the comparison of batches
        step.executor.run(True, lambda loss: recorder.meet("loss", everyone))


def check_one_queue(events: dict[int, list[Event]]) -> None:
    """Require that all ranks come to their ends if each does one thing at a time."""
    check_collectives(
        {
            rank: [CollectiveCall(str(key), "", tuple(sorted(set(ranks))), "", ()) for key, ranks in own]
            for rank, own in events.items()
        }
    )


def ends(events: dict[int, list[list[Event]]]) -> bool:
    """Whether all ranks come to their ends if each runs one list at a time, all of it at once."""
    position = dict.fromkeys(events, 0)
    done: set[Hashable] = set()
    moved = True
    while moved:
        moved = False
        present: Counter[Hashable] = Counter()
        for rank, own in events.items():
            while position[rank] < len(own) and all(key in done for key, _ in own[position[rank]]):
                position[rank] += 1
                moved = True
            if position[rank] < len(own):
                present.update(key for key, _ in own[position[rank]])
        sizes = {key: len(set(ranks)) for own in events.values() for each in own for key, ranks in each}
        met = {key for key, count in present.items() if count == sizes[key]} - done
        done |= met
        moved = moved or bool(met)
    return all(position[rank] == len(own) for rank, own in events.items())


def compiled(
    schedule: str, nesting: str, tied: bool, micro_batches: int, state: StateSharding | None = None
) -> tuple[Compilation, int]:
    annotations, world = ALL_NESTINGS[nesting]
    if schedule == "interleaved":
        world //= 2
    model, one = traced(tied)
    annotated = copy.deepcopy(model)
    whale.annotate(annotated, annotations())
    options = Options(micro_batches=micro_batches, schedule=schedule, state=state)
    cluster = Cluster.homogeneous(world)
    return compile_traced(one, cluster, options, device="cpu", scopes=module_scopes(annotated)), world


CASES = [
    (schedule, nesting, (i + j) % 2 == 0) for i, schedule in enumerate(SCHEDULES) for j, nesting in enumerate(NESTINGS)
]
"""Every schedule with every nesting, and each of both with tied and untied tables."""


@pytest.mark.parametrize(
    ("schedule", "nesting", "tied"),
    [*CASES, *(("interleaved", "four stages", tied) for tied in (True, False))],
    ids=lambda x: x if isinstance(x, str) else "tied" if x else "untied",
)
def test_ranks_start_things_in_one_order(schedule: str, nesting: str, tied: bool) -> None:
    for micro_batches in (1, 2, 8):
        compilation, world = compiled(schedule, nesting, tied, micro_batches)
        check_one_queue({rank: recorded(compilation, rank, world) for rank in range(world)})


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("nesting", ["two stages of replicas", "replicas of parts"])
def test_ranks_start_gathers_and_sums_of_stretches_in_one_order(nesting: str, level: int) -> None:
    for schedule, tied, micro_batches in (("1f1b", True, 2), ("zero_bubble", True, 8), ("gpipe", False, 1)):
        compilation, world = compiled(schedule, nesting, tied, micro_batches, StateSharding(level, (3, 1, 2, 1)))
        assert compilation.units
        clock = RNGPosition(0)
        texts = {compilation.check(rank, clock) for rank in range(world)}
        assert len(texts) == 1
        check_one_queue({rank: recorded(compilation, rank, world) for rank in range(world)})


@pytest.mark.parametrize("level", [None, 1, 3])
@pytest.mark.parametrize("nesting", ALL_NESTINGS)
def test_process_groups_are_those_that_ranks_use(nesting: str, level: int | None) -> None:
    state = None if level is None else StateSharding(level)
    compilation, world = compiled("1f1b", nesting, True, 2, state)
    used = set[Communicator]()
    for rank in range(world):
        recorder = Recorder(rank)
        record(compilation, rank, world, recorder)
        used |= recorder.groups
    assert set(communicators(compilation, for_messages=True)) == used


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_2p"])
def test_messages_that_start_together_end_as_well(schedule: str, nesting: str) -> None:
    compilation, world = compiled(schedule, nesting, True, 2)
    events = {rank: recorded_together(compilation, rank, world) for rank in range(world)}
    assert ends(events)
    if nesting == "one to three":
        assert max(len(each) for each in events[0]) >= 3


def test_a_list_that_waits_for_another_in_a_circle_does_not_end() -> None:
    one, two = ("one", (0, 1)), ("two", (0, 1))
    assert ends({0: [[one, two]], 1: [[two], [one]]})
    assert not ends({0: [[one], [two]], 1: [[two], [one]]})


def collectives_of(graph: fx.Graph, root: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    modules = [root.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"]
    return [(getattr(m, "op", "all_to_all"), m.ranks) for m in modules if isinstance(m, CollectiveModule)]


@pytest.mark.parametrize("nesting", ["two split stages", "replicas to parts", "replicas of parts"])
def test_graphs_have_the_collectives_that_the_static_check_proves(nesting: str) -> None:
    compilation, _ = compiled("1f1b", nesting, True, 2)
    captured, clock, compared = compilation.captured, RNGPosition(0), 0
    for stage in compilation.stages:
        for rank in stage.mesh.ranks:
            programs = compilation.local_programs(stage, rank, clock)
            device = torch.device("cpu")
            (derived, *_) = with_derivatives(captured, stage, rank, programs, device, in_parts=True)
            checked = dry_run(captured, stage, rank, programs[0], 0)
            derivative = derived.derivative
            assert derivative is not None and derivative.split is not None
            forward = collectives_of(derivative.forward.graph, derivative.forward.root)
            assert forward == [(call.op, call.ranks) for call in checked.forward]
            expected = [(call.op, call.ranks) for call in checked.backward]
            whole, first = derivative.backward.code, derivative.split.inputs.code
            assert collectives_of(whole.graph, whole.root) == expected
            if derivative.received:
                assert collectives_of(first.graph, first.root) == expected
            compared += len(forward) + len(expected)
    assert compared


def loss_before_the_last_backward(program: Program) -> Program:
    rest = [instruction for instruction in program if not isinstance(instruction, SumLoss)]
    last = max(at for at, instruction in enumerate(rest) if isinstance(instruction, Compute))
    return (*rest[:last], SumLoss(), *rest[last:])


def shared_buckets_early(program: Program) -> Program:
    return tuple(Reduce(task.bucket, early=True) if isinstance(task, Reduce) else task for task in program)


def gathers_backwards(program: Program) -> Program:
    gathers = [task for task in program if isinstance(task, Gather)]
    return (*reversed(gathers), *(task for task in program if not isinstance(task, Gather)))


def without_a_gather(program: Program) -> Program:
    first = next(task for task in program if isinstance(task, Gather))
    return tuple(task for task in program if task != first)


@pytest.mark.parametrize("change", [gathers_backwards, without_a_gather])
def test_ranks_that_gather_otherwise_are_found(change: Callable[[Program], Program]) -> None:
    compilation, _ = compiled("1f1b", "two stages of replicas", True, 2, StateSharding(1))
    programs = compilation.programs()
    programs[1] = change(programs[1])
    with pytest.raises(ScheduleError, match="cannot end: .*gather bucket"):
        check_programs(programs, compilation.rank_specs, compilation.edges, compilation.reduces)


@pytest.mark.parametrize("change", [loss_before_the_last_backward, shared_buckets_early])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "greedy"])
def test_what_runs_ahead_of_the_order_is_found(schedule: str, change: Callable[[Program], Program]) -> None:
    compilation, world = compiled(schedule, "two stages", True, 2)
    programs = {rank: change(compilation.program(rank)) for rank in range(world)}
    with pytest.raises(ScheduleError, match="cannot end|disagree on call"):
        check_one_queue({rank: recorded(compilation, rank, world, programs[rank]) for rank in range(world)})


Programs = dict[int, Program]
Calls = dict[int, list[CollectiveCall]]


def check_all(compilation: Compilation, programs: Programs, start: Calls, saving: Calls) -> None:
    """The static check of a launch: its start, its steps, and its checkpoints."""
    check_collectives(start)
    check_programs(programs, compilation.rank_specs, compilation.edges, compilation.reduces, order=compilation.order)
    check_collectives(saving)


def launched(compilation: Compilation, world: int) -> tuple[Programs, Calls, Calls]:
    wanted = communicators(compilation, for_messages=True)
    shards = compilation.shards()
    names = sorted(shards)
    saving = {
        rank: [call for to in (None, 0) for call in gather_calls(shards, names, world, to, rank)]
        for rank in range(world)
    }
    return compilation.programs(), {rank: list(start_up(wanted, rank, world)) for rank in range(world)}, saving


def swapped(items: Sequence[Any], wanted: Callable[[Any], bool]) -> list[Any]:
    """The items with the first two that are wanted in each other's place."""
    found = [at for at, item in enumerate(items) if wanted(item)][:2]
    assert len(found) == 2
    result = list(items)
    first, second = found
    result[first], result[second] = result[second], result[first]
    return result


def bucket_before_its_gradients(programs: Programs, start: Calls, saving: Calls) -> None:
    for rank, program in programs.items():
        at = next(at for at, task in enumerate(program) if isinstance(task, Reduce))
        last = max(n for n, task in enumerate(program[:at]) if isinstance(task, Compute))
        programs[rank] = (*program[:last], program[at], *program[last:at], *program[at + 1 :])


def loss_before_a_message_on_one_rank(programs: Programs, start: Calls, saving: Calls) -> None:
    rest = [task for task in programs[2] if not isinstance(task, SumLoss)]
    last = max(at for at, task in enumerate(rest) if isinstance(task, Send))
    programs[2] = (*rest[:last], SumLoss(), *rest[last:])


def loss_left_out_on_one_rank(programs: Programs, start: Calls, saving: Calls) -> None:
    programs[1] = tuple(task for task in programs[1] if not isinstance(task, SumLoss))


def buckets_in_another_order_on_one_rank(programs: Programs, start: Calls, saving: Calls) -> None:
    programs[0] = tuple(swapped(programs[0], lambda task: isinstance(task, Reduce)))


def messages_in_another_order_on_one_rank(programs: Programs, start: Calls, saving: Calls) -> None:
    programs[0] = tuple(swapped(programs[0], lambda task: isinstance(task, Send)))


def message_after_a_bucket_on_one_rank(programs: Programs, start: Calls, saving: Calls) -> None:
    program = programs[2]
    at = max(n for n, task in enumerate(program) if isinstance(task, Send))
    rest = [*program[:at], *program[at + 1 :]]
    last = max(n for n, task in enumerate(rest) if isinstance(task, Reduce))
    programs[2] = (*rest[: last + 1], program[at], *rest[last + 1 :])


def group_made_in_another_order_on_one_rank(programs: Programs, start: Calls, saving: Calls) -> None:
    start[3] = swapped(start[3], lambda call: call.op == "split")


def group_not_used_first_by_one_rank(programs: Programs, start: Calls, saving: Calls) -> None:
    start[1] = [call for call in start[1] if call.op == "split"]


def checkpoint_in_another_order_on_one_rank(programs: Programs, start: Calls, saving: Calls) -> None:
    saving[1] = saving[1][::-1]


MUTATIONS = [
    bucket_before_its_gradients,
    loss_before_a_message_on_one_rank,
    loss_left_out_on_one_rank,
    buckets_in_another_order_on_one_rank,
    messages_in_another_order_on_one_rank,
    message_after_a_bucket_on_one_rank,
    group_made_in_another_order_on_one_rank,
    group_not_used_first_by_one_rank,
    checkpoint_in_another_order_on_one_rank,
]


@pytest.mark.parametrize("nesting", NESTINGS)
def test_start_steps_and_checkpoints_are_proven(nesting: str) -> None:
    compilation, world = compiled("1f1b", nesting, True, 2)
    check_all(compilation, *launched(compilation, world))


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_change_of_the_order_is_found(mutation: Callable[[Programs, Calls, Calls], None]) -> None:
    compilation, world = compiled("1f1b", "two stages of replicas", True, 2)
    programs, start, saving = launched(compilation, world)
    mutation(programs, start, saving)
    with pytest.raises(ScheduleError):
        check_all(compilation, programs, start, saving)


def meshes(data: int, tensor: int, pipeline: int) -> dict[str, Any]:
    per = LAYERS // pipeline
    inner = [whale.replicate(data), whale.split(tensor)]
    return {f"layers.[{i * per}-{i * per + per - 1}]": [whale.stage(data * tensor), *inner] for i in range(pipeline)}


@pytest.mark.parametrize(("data", "tensor", "pipeline"), [(2, 2, 2), (8, 2, 4), (128, 2, 4)])
def test_the_process_groups_of_a_rank_do_not_grow_with_the_launch(data: int, tensor: int, pipeline: int) -> None:
    model, one = traced(True)
    annotated = copy.deepcopy(model)
    whale.annotate(annotated, meshes(data, tensor, pipeline))
    size = data * tensor * pipeline
    options = Options(micro_batches=1)
    compilation = compile_traced(one, Cluster.homogeneous(size), options, device="cpu", scopes=module_scopes(annotated))
    wanted = communicators(compilation, for_messages=True)
    splits = [family for p in PURPOSES for family in families([ranks for purpose, ranks in wanted if purpose == p])]
    # Two axes; three kinds of sums; two families of neighbours in each direction, and the tied embedding's way.
    assert len(splits) <= 2 + 4 + 2 * 3
    for rank in (0, size // 2, size - 1):
        assert sum(rank in ranks for _, ranks in wanted) <= len(splits)
    check_collectives({rank: list(start_up(wanted, rank, size)) for rank in range(size)})
