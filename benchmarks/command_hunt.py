"""Hunt for faults of the commands: random models, clusters and options, and what is done with each plan then.

    python benchmarks/command_hunt.py --cases 100 --seed 1
    python benchmarks/command_hunt.py --seed 1 --first 17 --cases 1

A case is a problem of ``search_hunt.py``, most with layers so wide that memory is short, and a command with random
options: ``whale search``, ``plan``, ``estimate``, or ``profile model`` and a search of its file. A plan goes through
``simulate``, ``explain``, ``report`` and ``diff`` with the plan before it. Faults are tracebacks, exit codes that say
that Whale is at fault or refuses a file that it wrote, steps that another command predicts otherwise, and advice
("It would fit with --zero 1") with which the command refuses again.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from harness import report
from hunt_cases import EXAMPLES, Problem, drawn

from whale.cli.app import app
from whale.ir.cluster import Cluster
from whale.planner.catalog import device_types

WIDTHS = (
    "hidden", "hidden_size", "n_embd", "d_model", "ffn", "intermediate_size", "d_ff", "ffn_dim", "n_inner",
    "word_embed_proj_dim", "head_dim", "d_kv",
)  # fmt: skip
"""Settings of models that are multiplied together."""

WIDER = (1, 4, 8, 16)

BAD_CODES = (1, 3)
"""Exit codes of a fault of Whale, and of a bad input file; all files here are Whale's own, or fit its schema."""

OPTIONS: dict[str, tuple[str, ...]] = {
    "--optimizer": ("adamw", "adafactor", "sgd", "sgd_momentum", "none"),
    "--zero": ("0", "1", "2", "3", "auto"),
    "--recompute": ("none", "selective", "full"),
    "--offload": ("none", "activations", "state", "both", "auto"),
    "--gradient-dtype": ("fp32", "bf16", "fp16"),
}
"""Options of all planning commands, with their values."""

Fault = tuple[str, str]
"""A command line, and what is wrong."""


def main() -> None:
    parser = argparse.ArgumentParser(description="random problems, options and commands")
    parser.add_argument("--cases", type=int, default=20, help="how many problems")
    parser.add_argument("--seed", type=int, default=0, help="that they are drawn from")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    hunt, faults = Hunt(), list[Fault]()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for number in range(options.first, options.first + options.cases):
            problem = drawn(options.seed, number)
            found = list(hunt.case(problem, random.Random(f"{options.seed}:{number}:commands")))
            print(f"{number}: {Path(problem.model).name}, {hunt.runs} commands so far, {len(found)} faults", flush=True)
            for line, what in found:
                print(f"    {line}\n    {what}", flush=True)
            faults += found
    os.chdir(Path(__file__).parents[1])
    shown = "\n".join(f"- `{line}`: {what.splitlines()[-1]}" for line, what in faults)
    text = f"- {options.cases} cases: {hunt.runs} commands, {len(faults)} faults\n{shown}"
    command = f"python benchmarks/command_hunt.py --cases {options.cases} --seed {options.seed}"
    report(f"command_hunt_seed{options.seed}", options, text, command=command)


class Hunt:
    """Commands that are run one after the other in a folder.

    Attributes:
        runs: how many.
    """

    def __init__(self) -> None:
        self.runs = 0
        self._has_plan = False

    def case(self, problem: Problem, numbers: random.Random) -> Iterator[Fault]:
        """The faults of a command, and of what is done with its plan."""
        Path("c.toml").write_text(problem.cluster, encoding="utf-8")
        num_devices = len(Cluster.parse(problem.cluster, catalog=device_types()).devices)
        by = numbers.choice(WIDER)
        model = ["--model", problem.model]
        for name, value in problem.settings.items():
            model += ["--set", f"{name}={value * by if name in WIDTHS else value}"]
        given = ["--cluster", "c.toml", "--batch", str(problem.batch), *_options(numbers)]
        precision = ["--precision", problem.precision] if problem.precision else []
        kind = numbers.choice(("search", "plan", "plan", "estimate", "profile"))
        if kind == "profile":
            result, faults = self._run(["profile", "model", *model, "-o", "profile.json"])
            yield from faults
            kind, model, precision = "search", ["--profile", "profile.json"], []
            if result.exit_code:
                return
        own = _of_command(kind, num_devices, numbers)
        written = [] if kind == "estimate" else ["-o", "plan.json"]
        line = [kind, *model, *given, *precision, *own, *written]
        result, faults = self._run(line)
        yield from faults
        if result.exit_code == 4:
            yield from self._advised(line, result.stderr)
        if result.exit_code == 0 and written:
            yield from self._of_plan(_step(result.stdout))

    def _run(self, line: Sequence[str]) -> tuple[Result, list[Fault]]:
        self.runs += 1
        result = CliRunner().invoke(app, list(line))
        text = f"whale {' '.join(line)}".replace(f"{EXAMPLES.parents[1]}/", "")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            return result, [(text, "".join(traceback.format_exception(result.exception)[-4:]).strip())]
        if result.exit_code in BAD_CODES:
            return result, [(text, f"exit code {result.exit_code}: {_last(result.stderr)}")]
        if re.search(r"\b(nan|inf|None)\b", result.stdout):
            return result, [(text, "shows a number that is none")]
        return result, []

    def _advised(self, line: Sequence[str], error: str) -> Iterator[Fault]:
        """The faults of doing what a refusal says would fit."""
        advice = re.search(r"It would fit with (.*)", error.replace("\n", " "))
        for part in re.split(r", or with |, or ", advice[1] if advice else ""):
            words = re.sub(r"\(.*?\)", "", part).strip(" .").split()
            if words and words[0].startswith("--") and len(words) == 2:
                name, value = words
                changed = list(line)
                if name in changed:
                    changed[changed.index(name) + 1] = value
                else:
                    changed += words
                result, faults = self._run(changed)
                yield from faults
                if result.exit_code:
                    yield (
                        f"whale {' '.join(line)}",
                        f"advises {name} {value}, which does not do: {_last(result.stderr)}",
                    )

    def _of_plan(self, step: str) -> Iterator[Fault]:
        result, faults = self._run(["simulate", "plan.json"])
        yield from faults
        if step != _step(result.stdout):
            yield "whale simulate plan.json", f"a step of {_step(result.stdout)}, where the plan's was {step}"
        lines: list[list[Any]] = [
            ["explain", "plan.json"],
            ["report", "plan.json", "-o", "report.html", "--cluster", "c.toml"],
            ["simulate", "plan.json", "--failures", "mtbf=1y,save=20s"],
        ]
        if self._has_plan:
            lines.append(["diff", "plan.json", "before.json"])
        for line in lines:
            yield from self._run(line)[1]
        Path("plan.json").replace("before.json")
        self._has_plan = True


def _last(error: str) -> str:
    return (error.strip().splitlines() or [""])[-1]


def _step(shown: str) -> str:
    """The time of a step as a command shows it: ``step 1.2 ms`` or ``1.2 ms a step``."""
    found = re.search(r"^step ([0-9.,]+ \w+)|([0-9.,]+ \w+) a step", shown, re.MULTILINE)
    return (found[1] or found[2]) if found else ""


def _options(numbers: random.Random) -> list[str]:
    found: list[str] = []
    for name, values in OPTIONS.items():
        if numbers.random() < 0.35:
            found += [name, numbers.choice(values)]
    return found + (["--step-in-backward"] if numbers.random() < 0.15 else [])


def _of_command(kind: str, num_devices: int, numbers: random.Random) -> list[str]:
    """Options of one command; degrees divide the devices."""

    def divisor(most: int, of: int = num_devices) -> int:
        return numbers.choice([part for part in range(1, most + 1) if of % part == 0])

    found: list[str] = []
    if kind == "plan":
        stages = divisor(8)
        found = ["--stages", str(stages), "--replicas", str(num_devices // stages)]
        found += ["--schedule", numbers.choice(("gpipe", "1f1b", "1f1b", "1f1b_deep", "zero_bubble", "greedy"))]
    elif kind == "estimate":
        tensor = divisor(8)
        found = ["--tp", str(tensor), "--pp", str(divisor(4, num_devices // tensor))]
        found += ["--micro-batch", str(numbers.choice((1, 2, 4)))]
    elif numbers.random() < 0.3:
        found = ["--max-stages", str(numbers.choice((1, 2, 3)))]
    if kind != "estimate" and numbers.random() < 0.4:
        found += ["--micro-batches", str(numbers.choice((1, 2, 3, 4, 8)))]
    return found


if __name__ == "__main__":
    main()
