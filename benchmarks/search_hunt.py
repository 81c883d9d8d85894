"""Hunt for faults of the search: random models, clusters and batches, and rivals of the plan that each search finds.

    python benchmarks/search_hunt.py --cases 200 --seed 1 --jobs 2
    python benchmarks/search_hunt.py --seed 1 --case 17     # one of them, in full

A case is searched as ``whale search`` does. Its rivals are data parallelism over all devices and over those of a type,
tensor parallelism within nodes with replicas or a pipeline across them, one stage a node, one stage a device, random
plans, and local changes of the found plan: a cut moved, a degree changed, stages joined or split, devices exchanged,
other micro-batches. A rival is compiled and simulated exactly as the candidates of the search are; of each kind those
are compiled that the search's cost model ranks first, as many as there is time for.

A crash is an error that Whale did not write. An error that says that nothing fits is wrong if a rival can be run. A
plan wins by the fraction of the searched plan's step that it saves. Memory is compared too: the excess of a compiled
candidate's fullest device over the search's prediction.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import random
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
from harness import report, table
from hunt_cases import Problem, drawn

from whale.cli.model_loader import load_model
from whale.cli.search import _Model, search
from whale.commands.searching import Choice, PlanWriter, Searched, Trial, search_plans, settings_for
from whale.errors import InfeasibleError, UsageError, WhaleError
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.planner.catalog import device_types
from whale.planner.cost.precision import BY_DTYPE
from whale.planner.cost.stage import CostModel
from whale.planner.schedules.in_flight import in_flight
from whale.planner.search import Candidate, SearchSettings, StageChoice
from whale.planner.search.evaluate import score
from whale.planner.search.layout import fastest_rows

SLIGHT, SEVERE = 0.01, 0.05
"""Parts of the found plan's step by which a rival wins."""

OF_A_KIND = 2
"""Rivals of each simple kind that are compiled."""

MOST_RANDOM, MOST_LOCAL = 60, 80
"""Rivals that are scored; `MOST_COMPILED` of both together are compiled, the best by score first."""

MOST_COMPILED = 8
TOO_SLOW = 1.6
"""Times the best score beyond which random plans and local changes are not compiled."""

TIME_LIMIT = 10.0
"""Seconds of a search, as of ``whale search``, by the processor: other work on the machine does not count."""

Layers = Sequence[range]


class Mesh(NamedTuple):
    """A stage's devices, row-major over data x tensor x expert, and its degrees."""

    ranks: tuple[int, ...]
    tensor: int
    expert: int = 1

    @property
    def data(self) -> int:
        return len(self.ranks) // self.tensor // self.expert


@dataclass(frozen=True)
class Rival:
    """A plan to hold the found one against."""

    kind: str
    candidate: Candidate


def main() -> None:
    parser = argparse.ArgumentParser(description="random problems, and rivals of the plans that the search finds")
    parser.add_argument("--cases", type=int, default=20, help="how many problems")
    parser.add_argument("--seed", type=int, default=0, help="that they are drawn from")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--case", type=int, help="this problem alone, with its rivals in full")
    parser.add_argument("--seconds-per-case", type=float, default=20.0, help="for rivals, beside the search")
    parser.add_argument("--jobs", type=int, default=1, help="problems at a time")
    parser.add_argument("--keep", type=Path, help="keep the results of problems there, and go on from what it has")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(hunted((options.seed, options.case, options.seconds_per_case, True)), indent=2))
        return
    known = _kept(options.keep)
    wanted = range(options.first, options.first + options.cases)
    tasks = [(options.seed, number, options.seconds_per_case, False) for number in wanted if number not in known]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, maxtasksperchild=10) as pool:
        for result in pool.imap_unordered(hunted, tasks):
            known[result["number"]] = result
            print(_line(result), file=sys.stderr, flush=True)
            if options.keep:
                with options.keep.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    results = [known[number] for number in wanted]
    command = f"python benchmarks/search_hunt.py --cases {options.cases} --seed {options.seed}"
    options.repeats = 1
    report(f"search_hunt_seed{options.seed}", options, _summary(results), command=command)


def _kept(path: Path | None) -> dict[int, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    return {one["number"]: one for one in map(json.loads, path.read_text().splitlines())}


# --- a case -----------------------------------------------------------------------------------------------------------


def hunted(task: tuple[int, int, float, bool]) -> dict[str, Any]:
    """The outcome of a problem; its ``outcome`` is ok, crash, refused, wrongly refused or unlike."""
    seed, number, seconds, full = task
    warnings.filterwarnings("ignore")
    problem = drawn(seed, number)
    began = time.process_time()
    found: dict[str, Any] = {"number": number, "command": problem.command, "cluster": problem.cluster}
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            found |= _hunted(problem, seconds, full)
    except WhaleError as error:
        found |= {"outcome": "refused", "error": str(error)}
    except BaseException as error:
        lines = traceback.format_exc().splitlines()
        found |= {"outcome": "crash", "error": f"{type(error).__name__}: {error}", "traceback": lines[-40:]}
    return found | {"processor_seconds": round(time.process_time() - began, 1)}


def _hunted(problem: Problem, seconds: float, full: bool) -> dict[str, Any]:
    cluster = Cluster.parse(problem.cluster, catalog=device_types())
    wall, busy = time.monotonic(), time.process_time()
    loaded = load_model(problem.model, dict(problem.settings), batch_size=problem.batch, device="meta")
    with click.Context(search):
        model = _Model.of(loaded, None, cluster, problem.precision, "adamw", ())
    slower = max(1.0, (time.monotonic() - wall) / max(0.1, time.process_time() - busy))
    settings = SearchSettings(
        precision=problem.precision or BY_DTYPE.get(model.profile.precision, "fp32"),
        time_limit=TIME_LIMIT * slower,
    )
    settings = settings_for(settings, model.trial)
    began = time.process_time()
    error = ""
    searched: Searched | None = None
    try:
        searched = search_plans(model.profile, cluster, batch=problem.batch, settings=settings, trial=model.trial)
    except InfeasibleError as raised:
        error = str(raised)
    search_seconds = time.process_time() - began
    makers = _Makers.of(model.profile, cluster, settings, problem)
    rivals = list(_rivals(makers, searched, random.Random(f"{problem.seed}:{problem.number}:rivals")))
    tried, crashed = _compiled(rivals, makers, model.trial, seconds)
    best = min((one for one in tried if not one[1].reason), key=lambda one: _seconds(one[1]), default=None)
    found: dict[str, Any] = {
        "devices": len(cluster.devices),
        "search_seconds": round(search_seconds, 2),
        "rivals": len(rivals),
        "compiled": len(tried),
        "capture_refused": list(model.profile.refused),
        "tried": [_in_numbers(rival.kind, choice) for rival, choice in tried],
    }
    if searched is not None:
        every = (*searched.choices, *searched.refused)
        found["tried"] += [_in_numbers("candidate", choice) for choice in every if choice.compiled]
    if crashed:
        found["rival_crashes"] = crashed[:3]
    if searched is None:
        found |= {"error": error, "outcome": "refused" if best is None else "wrongly refused"}
    else:
        found |= _of_found(searched, best)
    if best is not None:
        found["best_rival"] = {"kind": best[0].kind} | _shown(best[1])
    if full:
        found["all"] = [
            {"kind": rival.kind, "reason": choice.reason} | _shown(choice)
            for rival, choice in sorted(tried, key=lambda one: _seconds(one[1]))
        ]
        if searched is not None:
            found["choices"] = [_shown(choice) for choice in searched.choices]
            found["refused"] = [{"reason": choice.reason} | _shown(choice) for choice in searched.refused]
    return found


def _seconds(choice: Choice) -> float:
    return choice.prediction.step_seconds


def _in_numbers(kind: str, choice: Choice) -> list[Any]:
    """A compiled plan: kind, stages, micro-batches, milliseconds and GiB by the search and compiled, why it fails."""
    predictions = (choice.candidate.prediction, choice.prediction)
    return [
        kind,
        len(choice.candidate.stages),
        choice.candidate.micro_batches,
        *(round(one.step_seconds * 1e3, 3) for one in predictions),
        *(round(max(device.total for device in one.memory) / 2**30, 3) for one in predictions),
        choice.reason,
    ]


def _of_found(searched: Searched, best: tuple[Rival, Choice] | None) -> dict[str, Any]:
    """How the found plan does, and what the search said of it and the others that were compiled."""
    every = [choice for choice in (*searched.choices, *searched.refused) if choice.compiled]
    crashes = [choice.reason for choice in searched.refused if not choice.compiled]
    memory = [
        max(device.total for device in choice.prediction.memory)
        / max(device.total for device in choice.candidate.prediction.memory)
        for choice in every
    ]
    gain = 0.0 if best is None else 1 - _seconds(best[1]) / _seconds(searched.best)
    return {
        "outcome": "ok",
        "found": _shown(searched.best),
        "compiled_candidates": len(every),
        "gain": round(gain, 5),
        "memory_ratio": [round(ratio, 3) for ratio in memory],
        "seconds_ratio": [round(_seconds(one) / one.candidate.prediction.step_seconds, 3) for one in every],
        "uncompilable": crashes[:3],
        "unfit": [choice.reason for choice in searched.refused if choice.compiled][:3],
    }


def _shown(choice: Choice) -> dict[str, Any]:
    candidate = choice.candidate
    return {
        "ms": round(_seconds(choice) * 1e3, 3),
        "searched_ms": round(candidate.prediction.step_seconds * 1e3, 3),
        "compiled": choice.compiled,
        "breakdown": {
            part: [round(1e3 * one.breakdown.get(part, 0.0), 3) for one in (candidate.prediction, choice.prediction)]
            for part in choice.prediction.breakdown
        },
        "micro_batches": candidate.micro_batches,
        "schedule": candidate.schedule,
        "stages": [
            f"[{one.first},{one.last}) {_ranges(one.ranks)} {one.data}x{one.tensor}x{one.expert} {_rows(one.rows)}"
            for one in candidate.stages
        ],
    }


def _ranges(ranks: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return "+".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _rows(rows: Sequence[int]) -> str:
    return "+".join(f"{len(list(same))}x{rows}" for rows, same in groupby(rows))


def _compiled(
    rivals: Sequence[Rival], makers: _Makers, trial: Trial, seconds: float
) -> tuple[list[tuple[Rival, Choice]], list[str]]:
    """The rivals to be compiled, compiled, until the time is over; and what went wrong that Whale has no words for."""
    began = time.process_time()
    found, crashes = [], []
    for rival in _worth(rivals):
        if time.process_time() - began > seconds:
            break
        try:
            writer = PlanWriter(makers.profile, makers.cluster, makers.batch, trial)
            found.append((rival, writer.compiled(rival.candidate, trial)))
        except UsageError:  # it cannot be written as annotations of this model
            continue
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            crashes.append(f"{type(error).__name__}: {error} at {last.filename}:{last.lineno}")
    return found, crashes


def _worth(rivals: Sequence[Rival]) -> Iterator[Rival]:
    """The best rival of each simple kind by score; then the best of random plans and of local changes."""

    def seconds(rival: Rival) -> tuple[bool, float]:
        prediction = rival.candidate.prediction
        return not prediction.fits, prediction.step_seconds

    seen: set[object] = set()

    def fresh(some: Sequence[Rival]) -> Iterator[Rival]:
        for rival in sorted(some, key=seconds):
            look = rival.candidate.stages, rival.candidate.micro_batches
            if look not in seen:
                seen.add(look)
                yield rival

    free = ("random", "local")
    kinds = sorted({rival.kind for rival in rivals if rival.kind.split()[0] not in free})
    for kind in kinds:
        yield from islice(fresh([rival for rival in rivals if rival.kind == kind]), OF_A_KIND)
    least = min((seconds(rival)[1] for rival in rivals), default=0.0)
    others = [rival for rival in rivals if rival.kind.split()[0] in free and seconds(rival)[1] < TOO_SLOW * least]
    yield from islice(fresh(others), MOST_COMPILED)


# --- rivals -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Makers:
    """Maker of candidates from meshes: balanced cuts, rows by speed, and their score."""

    profile: ModelProfile
    cluster: Cluster
    batch: int
    prices: CostModel
    micro_batches: tuple[int, ...]
    layers: int
    starts: frozenset[int]

    @classmethod
    def of(cls, profile: ModelProfile, cluster: Cluster, settings: SearchSettings, problem: Problem) -> _Makers:
        batch = problem.batch
        prices = CostModel.of(profile, cluster, precision=settings.precision, batch=batch)
        counts = [count for count in range(1, batch + 1) if batch % count == 0]
        counts = counts if settings.micro_batches is None else [settings.micro_batches]
        starts = frozenset(index for index, path in enumerate(profile.paths) if path)
        return cls(profile, cluster, batch, prices, tuple(counts), len(profile.layers), starts)

    def made(self, meshes: Sequence[Mesh], micro_batches: int, cuts: Layers | None = None) -> Candidate | None:
        """The candidate with these stages; None where the degrees or the number of stages are impossible."""
        if self.batch % micro_batches or any(not self._knows(mesh) for mesh in meshes):
            return None
        cuts = cuts or self._cuts(meshes, micro_batches)
        if cuts is None:
            return None
        stages = []
        for index, (mesh, layers) in enumerate(zip(meshes, cuts, strict=True)):
            size = mesh.tensor * mesh.expert
            groups = self._groups(mesh)
            held = in_flight("1f1b", len(meshes), index, micro_batches)
            own = fastest_rows(self.prices, layers, groups, self.batch // micro_batches, micro_batches, held)
            stages.append(
                StageChoice(
                    first=layers.start,
                    last=layers.stop,
                    ranks=mesh.ranks,
                    data=len(mesh.ranks) // size,
                    tensor=mesh.tensor,
                    expert=mesh.expert,
                    rows=own,
                )
            )
        return score(self.prices, stages, micro_batches=micro_batches, batch=self.batch)

    def _knows(self, mesh: Mesh) -> bool:
        return (
            mesh.tensor in self.prices.tensor_degrees
            and mesh.expert in (1, *self.prices.expert_degrees)
            and 1 in (mesh.tensor, mesh.expert)
            and len(mesh.ranks) % (mesh.tensor * mesh.expert) == 0
        )

    def _groups(self, mesh: Mesh) -> list[Any]:
        size = mesh.tensor * mesh.expert
        parts = [mesh.ranks[first : first + size] for first in range(0, len(mesh.ranks), size)]
        return [self.prices.group(part, mesh.data, mesh.expert) for part in parts]

    def _cuts(self, meshes: Sequence[Mesh], micro_batches: int) -> Layers | None:
        """Contiguous layers for each stage with which the slowest is least slow."""
        num, depth = self.layers, len(meshes)
        if depth > num:
            return None
        if depth == 1:
            return [range(num)]
        rows = self.batch // micro_batches
        sums = []
        for mesh in meshes:
            group = self._groups(mesh)[0]
            share = -(-rows // mesh.data)
            costs = [self.prices.stage([layer], group, share, micro_batches) for layer in range(num)]
            total = [0.0]
            for cost in costs:
                total.append(total[-1] + cost.forward + cost.backward)
            sums.append(total)
        best = [[float("inf")] * (num + 1) for _ in range(depth + 1)]
        come = [[0] * (num + 1) for _ in range(depth + 1)]
        best[0][0] = 0.0
        for stage in range(depth):
            own = sums[stage]
            for end in range(stage + 1, num + 1):
                for first in range(stage, end):
                    if stage and first not in self.starts:
                        continue
                    slowest = max(best[stage][first], own[end] - own[first])
                    if slowest < best[stage + 1][end]:
                        best[stage + 1][end], come[stage + 1][end] = slowest, first
        if best[depth][num] == float("inf"):
            return None
        ends = [num]
        for stage in range(depth, 0, -1):
            ends.append(come[stage][ends[-1]])
        return [range(*pair) for pair in pairwise(reversed(ends))]

    def few_counts(self, depth: int) -> list[int]:
        """Numbers of micro-batches that suit a pipeline of a given depth."""
        if depth == 1:
            return list(self.micro_batches[:4])
        wanted = sorted(self.micro_batches, key=lambda count: abs(count - 3 * depth))
        return sorted({*wanted[:3], self.micro_batches[-1]})


def _rivals(makers: _Makers, searched: Searched | None, numbers: random.Random) -> Iterator[Rival]:
    for kind, meshes in _simple(makers):
        for count in makers.few_counts(len(meshes)):
            if candidate := makers.made(meshes, count):
                yield Rival(kind, candidate)
    for _ in range(MOST_RANDOM):
        meshes, count = _random(makers, numbers)
        if candidate := makers.made(meshes, count):
            yield Rival("random", candidate)
    if searched is not None:
        yield from islice(_local(makers, searched.best.candidate, numbers), MOST_LOCAL)


def _simple(makers: _Makers) -> Iterator[tuple[str, list[Mesh]]]:
    """The plans that people write down without a search."""
    cluster = makers.cluster
    every = tuple(range(len(cluster.devices)))
    degrees = sorted({1, *makers.prices.tensor_degrees})
    by_type: dict[str, list[int]] = {}
    for device in cluster.devices:
        by_type.setdefault(device.type.name, []).append(device.rank)
    yield "data parallel", [Mesh(every, 1)]
    for name, ranks in by_type.items():
        yield f"data parallel on {name}", [Mesh(tuple(ranks), 1)]
    yield "one device", [Mesh((max(every, key=lambda r: cluster.devices[r].speed("float32")),), 1)]
    for degree in degrees[1:]:
        if all(len(node.ranks) % degree == 0 for node in cluster.nodes):
            yield f"tensor {degree} in nodes, data across", [Mesh(every, degree)]
            meshes = [Mesh(tuple(node.ranks), degree) for node in cluster.nodes]
            yield f"tensor {degree} in nodes, a stage a node", meshes
            if len(every) == degree:
                yield "tensor parallel", [Mesh(every, degree)]
    for degree in makers.prices.expert_degrees:
        if len(every) % degree == 0:
            yield f"expert parallel {degree}", [Mesh(every, 1, degree)]
    nodes = [Mesh(tuple(node.ranks), 1) for node in cluster.nodes]
    for name, meshes in (
        ("data in nodes, a stage a node", nodes),
        ("a stage a device", [Mesh((r,), 1) for r in every]),
    ):
        yield name, meshes
        by_memory = sorted(meshes, key=lambda mesh: -cluster.devices[mesh.ranks[0]].memory_bytes)
        yield name, by_memory
        yield name, list(reversed(meshes))
    if len(by_type) > 1:
        yield "data parallel, a stage a type", [Mesh(tuple(ranks), 1) for ranks in by_type.values()]
    for depth in (2, 4, 8):
        if len(every) % depth == 0:
            size = len(every) // depth
            yield (
                f"data parallel in {depth} stages",
                [Mesh(every[place * size : (place + 1) * size], 1) for place in range(depth)],
            )


def _random(makers: _Makers, numbers: random.Random) -> tuple[list[Mesh], int]:
    """Any plan: how many stages, which devices in each and in which mesh, how many micro-batches."""
    num = len(makers.cluster.devices)
    order = list(range(num))
    if numbers.random() < 0.3:
        numbers.shuffle(order)
    else:
        nodes = [list(node.ranks) for node in makers.cluster.nodes]
        numbers.shuffle(nodes)
        order = [rank for node in nodes for rank in node]
    if num > 1 and numbers.random() < 0.2:
        order = order[: numbers.randint(1, num)]
    num = len(order)
    most = min(num, makers.layers, makers.batch * 2)
    depth = min(numbers.randint(1, most), numbers.randint(1, most))
    cuts = (0, *sorted(numbers.sample(range(1, num), depth - 1)), num)
    meshes = []
    for first, last in pairwise(cuts):
        ranks = tuple(sorted(order[first:last]))
        divisions = [(degree, 1) for degree in makers.prices.tensor_degrees if len(ranks) % degree == 0]
        divisions += [(1, degree) for degree in makers.prices.expert_degrees if len(ranks) % degree == 0]
        meshes.append(Mesh(ranks, *numbers.choice(divisions)))
    return meshes, numbers.choice(makers.micro_batches)


def _local(makers: _Makers, found: Candidate, numbers: random.Random) -> Iterator[Rival]:
    """The found plan with one thing changed."""
    meshes = [Mesh(stage.ranks, stage.tensor, stage.expert) for stage in found.stages]
    cuts = [range(stage.first, stage.last) for stage in found.stages]
    changes = list(_changes(makers, meshes, cuts, found.micro_batches))
    numbers.shuffle(changes)
    for kind, other, layers, count in changes:
        if candidate := makers.made(other, count, layers):
            yield Rival(f"local {kind}", candidate)


def _changes(
    makers: _Makers, meshes: list[Mesh], cuts: list[range], count: int
) -> Iterator[tuple[str, list[Mesh], Layers | None, int]]:
    place = makers.micro_batches.index(count) if count in makers.micro_batches else 0
    for near in makers.micro_batches[max(0, place - 2) : place + 3]:
        yield "micro-batches", meshes, cuts, near
        yield "micro-batches", meshes, None, near
    if count not in makers.micro_batches:
        return
    for index in range(len(meshes) - 1):
        one, other = cuts[index], cuts[index + 1]
        for moved in (-1, 1):
            middle = one.stop + moved
            if one.start < middle < other.stop and middle in makers.starts:
                yield (
                    "cut",
                    meshes,
                    [*cuts[:index], range(one.start, middle), range(middle, other.stop), *cuts[index + 2 :]],
                    count,
                )
        joined = Mesh(
            tuple(sorted((*meshes[index].ranks, *meshes[index + 1].ranks))), meshes[index].tensor, meshes[index].expert
        )
        layers = [*cuts[:index], range(one.start, other.stop), *cuts[index + 2 :]]
        yield "joined", [*meshes[:index], joined, *meshes[index + 2 :]], layers, count
        yield "exchanged", [*meshes[:index], meshes[index + 1], meshes[index], *meshes[index + 2 :]], cuts, count
    for index, mesh in enumerate(meshes):
        divisions = [(degree, 1) for degree in makers.prices.tensor_degrees]
        divisions += [(1, degree) for degree in makers.prices.expert_degrees]
        for division in divisions:
            if division != mesh[1:] and len(mesh.ranks) % (division[0] * division[1]) == 0:
                yield "degree", [*meshes[:index], Mesh(mesh.ranks, *division), *meshes[index + 1 :]], cuts, count
        half = len(mesh.ranks) // 2
        if half:
            parts = [Mesh(mesh.ranks[:half], 1), Mesh(mesh.ranks[half:], 1)]
            yield "split", [*meshes[:index], *parts, *meshes[index + 1 :]], None, count
    used = {rank for mesh in meshes for rank in mesh.ranks}
    left = tuple(rank for rank in range(len(makers.cluster.devices)) if rank not in used)
    if left:
        yield "left over", [*meshes, Mesh(left, 1)], None, count
        yield "left over", [Mesh(left, 1), *meshes], None, count
        for index, mesh in enumerate(meshes):
            more = mesh._replace(ranks=tuple(sorted((*mesh.ranks, *left))))
            yield "left over", [*meshes[:index], more, *meshes[index + 1 :]], cuts, count
    for index, mesh in enumerate(meshes):
        if mesh.data > 1:
            size = mesh.tensor * mesh.expert
            yield "fewer", [*meshes[:index], mesh._replace(ranks=mesh.ranks[:-size]), *meshes[index + 1 :]], cuts, count


# --- the report
# --------------------------------------------------------------------------------------------------------


def _line(result: Mapping[str, Any]) -> str:
    tail = result.get("error") or ""
    if "gain" in result:
        rival = result.get("best_rival") or {}
        tail = f"{result['found']['ms']} ms; {rival.get('kind')} {rival.get('ms')} ms, gain {result['gain']:.2%}"
    return f"{result['number']}: {result['outcome']} {result['processor_seconds']} s: {tail[:160]}"


def _summary(results: Sequence[Mapping[str, Any]]) -> str:
    outcomes = Counter(result["outcome"] for result in results)
    gains = [result["gain"] for result in results if "gain" in result]
    slight, severe = (sum(gain > limit for gain in gains) for limit in (SLIGHT, SEVERE))
    memory = [ratio for result in results for ratio in result.get("memory_ratio", ())]
    unfit = sum(bool(result.get("unfit")) for result in results)
    crashed = sum(bool(result.get("rival_crashes")) for result in results)
    compiled = sum(result.get("compiled", 0) for result in results)
    rows = [
        (
            str(result["number"]),
            result["outcome"],
            f"`{result['command']}`",
            str(result.get("devices", "")),
            f"{result['gain']:.1%}" if "gain" in result else "",
            (result.get("best_rival") or {}).get("kind", ""),
            (result.get("error") or "")[:200].replace("|", "/").replace("\n", " "),
        )
        for result in results
        if result["outcome"] not in ("ok", "refused") or result.get("gain", 0) > SLIGHT or result.get("rival_crashes")
    ]
    lines = [
        f"- {len(results)} cases: {', '.join(f'{count} {what}' for what, count in sorted(outcomes.items()))}; "
        f"{compiled} rivals compiled, of {sum(result.get('rivals', 0) for result in results)} scored",
        f"- rivals better by more than 1%: {slight} ({slight / max(1, len(results)):.1%}; wanted: at most 2%); by more "
        f"than 5%: {severe} (wanted: none); crashes: {outcomes['crash']}, of rivals {crashed} (wanted: none); wrong "
        f"refusals: {outcomes['wrongly refused']} (wanted: none)",
    ]
    if gains:
        worst = max(gains)
        lines.append(
            f"- the best rival against the found plan: worst {worst:+.2%}, median {-statistics.median(gains):+.1%}"
        )
    if memory:
        above = sum(ratio > 1.001 for ratio in memory)
        lines.append(
            f"- compiled memory of the fullest device by the search's: median {statistics.median(memory):.3f}, "
            f"{min(memory):.3f} to {max(memory):.3f}; above in {above} of {len(memory)} compiled candidates; searches "
            f"in which a candidate did not fit once compiled: {unfit}"
        )
    refusals = Counter(result["error"][:120] for result in results if result["outcome"] == "refused")
    lines += [f"- refused, as all rivals are: {count} x {error}" for error, count in refusals.most_common()]
    head = ("case", "outcome", "command", "devices", "rival's gain", "kind", "error")
    return "\n".join(lines) + ("\n\n" + table(head, rows) if rows else "")


if __name__ == "__main__":
    main()
