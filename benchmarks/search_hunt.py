"""Hunt for faults of the search: random models, clusters and batches, and rivals of the plan that each search finds.

    python benchmarks/search_hunt.py --cases 200 --seed 1 --jobs 2
    python benchmarks/search_hunt.py --seed 1 --case 17     # one of them, in full
    python benchmarks/search_hunt.py --cases 100 --regions  # with nodes in two regions

A case is searched as ``whale search`` does, with what it decides by default: recompute, divided state, offload. Its
rivals are data parallelism over all devices and over those of a type, tensor parallelism within nodes with replicas or
a pipeline across them, one stage a node, one stage a device, random plans, and local changes of the found plan: a cut
moved, a degree changed, stages joined or split, devices exchanged, other micro-batches. Each is tried with whole state
and with states of the optimizer that replicas divide, and with all of it divided where nothing was found. A rival is
compiled and simulated exactly as the candidates of the search are; of each kind those are compiled that the search's
cost model ranks first, as many as there is time for.

The programs of all ranks of the sold plan go through the static check of the executor. A crash is an error that Whale
did not write, or one of this check. An error that says that nothing fits is wrong if a rival can be run. A plan wins by
the fraction of the searched plan's step that it saves. Memory is compared too: the excess of a compiled candidate's
fullest device over the search's prediction.
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
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import click
from harness import report, table
from hunt_cases import Problem, drawn
from hunt_rivals import Makers, Rival, rivals

from whale.cli.model_loader import load_model
from whale.cli.search import SearchedModel, search
from whale.commands.automatic import context_degrees
from whale.commands.plan_writer import Choice, PlanWriter, Trial
from whale.commands.searching import Searched, search_plans, settings_for
from whale.compile.compilation import Compilation
from whale.compile.options import Options
from whale.errors import InfeasibleError, ScheduleError, UsageError, WhaleError
from whale.ir.cluster import Cluster
from whale.planner.catalog import device_types
from whale.planner.cost.precision import BY_DTYPE
from whale.planner.search import SearchSettings, StageChoice

SLIGHT, SEVERE = 0.01, 0.05
"""Parts of the found plan's step by which a rival wins."""

OF_A_KIND = 2
"""Rivals of each simple kind that are compiled."""

MOST_COMPILED = 8
"""Random plans and local changes together that are compiled, the best by score first."""

TOO_SLOW = 1.6
"""Times the best score beyond which random plans and local changes are not compiled."""

TIME_LIMIT = 60.0
"""Seconds of a search, by the processor as other work on the machine was before it: more than any takes, so that a busy
machine finds what a free one does."""


def main() -> None:
    parser = argparse.ArgumentParser(description="random problems, and rivals of the plans that the search finds")
    parser.add_argument("--cases", type=int, default=20, help="how many problems")
    parser.add_argument("--seed", type=int, default=0, help="that they are drawn from")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--case", type=int, help="this problem alone, with its rivals in full")
    parser.add_argument("--seconds-per-case", type=float, default=20.0, help="for rivals, beside the search")
    parser.add_argument("--regions", action="store_true", help="nodes are in two regions with slow links between them")
    parser.add_argument("--jobs", type=int, default=1, help="problems at a time")
    parser.add_argument("--keep", type=Path, help="keep the results of problems there, and go on from what it has")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    if options.case is not None:
        print(
            json.dumps(
                hunted((drawn(options.seed, options.case, regions=options.regions), options.seconds_per_case, True)),
                indent=2,
            )
        )
        return
    known = _kept(options.keep)
    wanted = range(options.first, options.first + options.cases)
    problems = (drawn(options.seed, number, regions=options.regions) for number in wanted if number not in known)
    tasks = [(problem, options.seconds_per_case, False) for problem in problems]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, maxtasksperchild=10) as pool:
        for result in pool.imap_unordered(hunted, tasks):
            known[result["number"]] = result
            print(_line(result), file=sys.stderr, flush=True)
            if options.keep:
                with options.keep.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    results = [known[number] for number in wanted]
    where = " --regions" if options.regions else ""
    command = f"python benchmarks/search_hunt.py --cases {options.cases} --seed {options.seed}{where}"
    report(
        f"search_hunt{'_regions' if options.regions else ''}_seed{options.seed}",
        options,
        _summary(results),
        command=command,
    )


def _kept(path: Path | None) -> dict[int, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    return {one["number"]: one for one in map(json.loads, path.read_text().splitlines())}


# --- a case -----------------------------------------------------------------------------------------------------------


def hunted(task: tuple[Problem, float, bool]) -> dict[str, Any]:
    """The outcome of a problem; its ``outcome`` is ok, crash, refused, wrongly refused or unlike."""
    problem, seconds, full = task
    warnings.filterwarnings("ignore")
    began = time.process_time()
    found: dict[str, Any] = {"number": problem.number, "command": problem.command, "cluster": problem.cluster}
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
        model = SearchedModel.of(loaded, None, cluster, problem.precision, "adamw", (), Options(), rules=False)
    slower = max(1.0, (time.monotonic() - wall) / max(0.1, time.process_time() - busy))
    settings = SearchSettings(
        precision=problem.precision or BY_DTYPE.get(model.profile.precision, "fp32"),
        time_limit=TIME_LIMIT * slower,
        zero="auto",
        offload="auto",
    )
    settings = settings_for(settings, model.trial, model.profile)
    began = time.process_time()
    error = ""
    searched: Searched | None = None
    try:
        searched = search_plans(
            model.profile,
            cluster,
            batch=problem.batch,
            settings=settings,
            trial=model.trial,
            with_rules=partial(model.trial.with_rules, rows=problem.batch),
            with_cuts=partial(model.trial.with_cuts, degrees=context_degrees(cluster)),
        )
    except InfeasibleError as raised:
        error = str(raised)
    search_seconds = time.process_time() - began
    makers = Makers.of(model.profile, cluster, settings, problem)
    drawn_rivals = list(rivals(makers, searched, random.Random(f"{problem.seed}:{problem.number}:rivals")))
    tried, crashed = _compiled(drawn_rivals, makers, model.trial, seconds)
    best = min((one for one in tried if not one[1].reason), key=lambda one: _seconds(one[1]), default=None)
    found: dict[str, Any] = {
        "devices": len(cluster.devices),
        "search_seconds": round(search_seconds, 2),
        "rivals": len(drawn_rivals),
        "compiled": len(tried),
        "capture_refused": list(model.profile.refused),
        "tried": [_in_numbers(rival.kind, choice) for rival, choice in tried],
    }
    if searched is not None:
        _check(model.trial.compile(searched.best.plan, cluster))
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


def _check(compilation: Compilation) -> None:
    """The static check of the executor on all ranks' programs."""
    try:
        compilation.check(compilation.stages[0].mesh.ranks[0], None)
    except ScheduleError as error:
        raise RuntimeError(f"the sold plan fails the static check: {error}") from error


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
            + _ways(one)
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


def _ways(stage: StageChoice) -> str:
    """Words for the state that a stage divides, what it computes again or has on the host, and rows that it cuts."""
    found = {
        "zero": stage.level,
        "recompute": stage.recompute != "none" and stage.recompute,
        "offload": stage.offload != "none" and stage.offload,
        "context": stage.context > 1 and stage.context,
    }
    return "".join(f" {name} {value}" for name, value in found.items() if value)


def _rows(rows: Sequence[int]) -> str:
    return "+".join(f"{len(list(same))}x{rows}" for rows, same in groupby(rows))


def _compiled(
    rivals: Sequence[Rival], makers: Makers, trial: Trial, seconds: float
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
